# SPDX-License-Identifier: GPL-2.0-only
"""What several files of this directory need."""
import sys

import pytest

from testbed import clean_environ, copy_of_checkout, run


@pytest.fixture(scope='session')
def wheel(tmp_path_factory):
    """The wheel that `python -m build` makes from the files of this checkout (through a source distribution)."""
    source = copy_of_checkout(tmp_path_factory.mktemp('source') / 'slingtorch')
    run([sys.executable, '-m', 'build', '--outdir', source / 'dist', source], timeout=300, env=clean_environ())
    found, = (source / 'dist').glob('*.whl')
    return found
