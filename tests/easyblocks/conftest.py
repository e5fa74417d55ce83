# SPDX-License-Identifier: GPL-2.0-only
"""Steps of an easyblock without `eb`."""
import importlib
import json
import pathlib
import subprocess
import sys

import pytest

from testbed import ROOT

WORKER = pathlib.Path(__file__).with_name('steps_worker.py')


@pytest.fixture(scope='session')
def load_block():
    """A function: the module of an easyblock."""
    for name in ('easybuild.easyblocks', 'easybuild.easyblocks.generic'):
        importlib.import_module(name).__path__.append(str(ROOT / name.replace('easybuild.', '').replace('.', '/')))
    return lambda name: importlib.import_module('easybuild.easyblocks.' + name)


@pytest.fixture(scope='session')
def steps():
    """A function that takes an easyconfig through EasyBuild's steps: what steps_worker.py answers, and no module."""
    with subprocess.Popen([sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, universal_newlines=True, cwd='/') as process:
        def take(eb, easyconfig, *options, env=None, last='configure'):
            environ = {key: str(value) for key, value in {**eb.env, **(env or {})}.items() if value is not None}
            job = {'easyconfig': str(easyconfig), 'environ': environ, 'options': ['--disable-debug', *options], 'last': last}
            process.stdin.write(json.dumps(job) + '\n')
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            answer['error'] = answer['error'] and ' '.join(answer['error'].split())
            return answer

        yield take
        process.stdin.close()
