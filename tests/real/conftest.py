# SPDX-License-Identifier: GPL-2.0-only
"""What several files of this directory need."""
import sys

import pytest

from testbed import clean_environ, copy_of_checkout, run


@pytest.fixture(scope='session')
def wheel(tmp_path_factory):
    """The wheel that `python -m build` makes from the files of this checkout (through a source distribution).

    By the test bed's own setuptools; what pyproject.toml asks for is downloaded by test_packaging.py's pip.
    """
    source = copy_of_checkout(tmp_path_factory.mktemp('source') / 'slingtorch')
    run([sys.executable, '-m', 'build', '--no-isolation', '--skip-dependency-check', '--outdir', source / 'dist', source],
        timeout=300, env=clean_environ())
    found, = (source / 'dist').glob('*.whl')
    return found
