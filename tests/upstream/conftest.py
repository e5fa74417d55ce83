# SPDX-License-Identifier: GPL-2.0-only
"""Runs the worker once for all easyconfigs and once per modules tool for all easyblocks."""

import json
import os
import sys

import pytest

import testbed

UPSTREAM = testbed.ROOT / 'tests/upstream'


class Checker:
    """Runs checks on files.

    :ivar directory: scratch
    """

    def __init__(self, directory, tool):
        self.directory = directory
        self.tool = tool
        self.runs = 0

    def __call__(self, kind, files, homes, easyblocks, patches=(), options=()):
        """{file: {check: [what is wrong]}}; parameters as the worker's request has them."""
        self.runs += 1
        where = self.directory / str(self.runs)
        where.mkdir()
        if os.geteuid() == 0:
            options = [*options, '--allow-use-as-root-and-accept-consequences']
        if kind == 'easyblocks':
            options = [*options, '--module-only', '--force']
        request = {
            'kind': kind,
            'files': [str(path) for path in files],
            'homes': [str(home) for home in homes],
            'easyblocks': [str(path) for path in easyblocks],
            'patches': [str(path) for path in patches],
            'hooks': str(testbed.ROOT / 'hooks'),
            'prefix': str(where / 'prefix'),
            'options': [*self.tool.eb_args, *options],
        }
        (where / 'request.json').write_text(json.dumps(request))
        testbed.run(
            [sys.executable, UPSTREAM / 'worker.py', where / 'request.json', where / 'results.json'],
            # EasyBuild asks distutils where packages are, a dozen times: that of setuptools takes 0.3 s to import
            env={**self.tool.env, 'SETUPTOOLS_USE_DISTUTILS': 'stdlib'},
            timeout=600,
            cwd=where,
        )
        return json.loads((where / 'results.json').read_text())


@pytest.fixture(scope='session')
def lua_checker(tmp_path_factory, lmod):
    return Checker(tmp_path_factory.mktemp('lua'), lmod)


@pytest.fixture(scope='session')
def tcl_checker(tmp_path_factory, envmodules):
    return Checker(tmp_path_factory.mktemp('tcl'), envmodules)
