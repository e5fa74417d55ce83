# SPDX-License-Identifier: GPL-2.0-only
"""torch-mpi, built by pip for the installed PyTorch with MPICH, on real ranks."""

import json
import os
import pathlib
import re
import shutil
import sys

import pytest

import testbed
from testbed import ROOT, run
from testbed.slurm import free_ports

HERE = pathlib.Path(__file__).parent
COMPILERS = {'mpich': 'mpicxx.mpich'}


class Built:
    """slingmpi in a virtual environment on top of the installed PyTorch.

    :ivar python: its Python
    :ivar said: what pip printed
    """

    def __init__(self, directory, pytorch, name, launcher):
        self.launcher = launcher
        run([sys.executable, '-m', 'venv', directory])
        packages, = (directory / 'lib').glob('python*/site-packages')
        (packages / 'pytorch.pth').write_text(f'{pytorch}\n')
        self.python = directory / 'bin/python'
        self.packages = packages
        # pip builds in the source directory
        source = directory / 'torch-mpi'
        shutil.copytree(ROOT / 'torch-mpi', source, ignore=shutil.ignore_patterns('build', '*.so', '*.egg-info'))
        env = {**testbed.clean_environ(), 'MPICXX': COMPILERS[name], 'MAX_JOBS': '2'}
        pip = [self.python, '-m', 'pip', 'install', '--quiet']
        run([*pip, 'setuptools>=70.1'], env=env)
        run([*pip, '--no-build-isolation', '--no-deps', source], env=env, timeout=900)

    def environ(self, **variables):
        # each test a rendezvous of its own
        port = free_ports(1)[0]
        return {**testbed.clean_environ(), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port), 'OMP_NUM_THREADS': '1',
                'PYTHONPATH': str(HERE), **variables}

    def ranks(self, number, *command, check=True, timeout=240, **variables):
        return self.launcher.run(number, self.python, *command, env=self.environ(**variables), check=check,
                                 timeout=timeout)


@pytest.fixture(scope='module', params=COMPILERS)
def built(request, tmp_path_factory, installed_pytorch):
    packages, = (installed_pytorch.root / 'lib').glob('python*/site-packages')
    return Built(tmp_path_factory.mktemp('slingmpi') / request.param, packages, request.param,
                 request.getfixturevalue(request.param))


@pytest.mark.parametrize('ranks', [1, 2, 3])
def test_every_operation_type_and_size(built, ranks):
    done = built.ranks(ranks, HERE / 'collectives.py', timeout=600)
    cases = re.findall(r'^@case\ndef (\w+)', (HERE / 'collectives.py').read_text(), re.M)
    assert re.findall(r'^(\w+): right$', done.stdout, re.M) == cases


def test_training(built):
    assert built.ranks(2, HERE / 'faults.py', 'training').stdout.count('trained') == 2


def test_takes_the_name_mpi(built):
    done = built.ranks(2, HERE / 'faults.py', 'named_mpi', SLINGMPI_AS_MPI='1')
    assert done.stdout.count('as mpi') == 2
    done = built.ranks(2, HERE / 'faults.py', 'named_mpi', check=False)
    assert done.returncode and "doesn't have MPI built in" in done.stdout + done.stderr


def test_exception_that_was_caught(built):
    assert built.ranks(2, HERE / 'faults.py', 'uncaught_before').stdout.count('fine') == 2


@pytest.mark.parametrize('name, words', [
    ('late', ['all_reduce in group 0 (rank 0 of 2) is not complete after 3000 ms', 'timeout']),
    ('dies', ['this rank has had enough', 'rank 1 ends with an error']),
    ('killed', []),
    ('shapes', ['do different things', 'Float[3]', 'Float[4]']),
    ('operations', ['do different things', 'slingmpi:all_reduce', 'slingmpi:barrier']),
    ('too_short', ['rank 0 sent 12 bytes, but the tensor to receive into has 20']),
    ('sizes', ['rank 0 of 1 for torch.distributed', 'of 2 for MPI', 'mpiexec']),
    ('forked', ['forked', 'spawn']),
    ('reduction', ['no reduction SUM', 'Float8_e4m3fn']),
    ('destroyed', ['the process group was destroyed']),
    ('aborted', ['aborted by the program']),
])
def test_faults_end_with_a_message(built, name, words):
    done = built.ranks(2, HERE / 'faults.py', name, check=False, timeout=60)
    text = done.stdout + done.stderr
    assert done.returncode != 0, text
    for word in words:
        assert word in text, text


def test_other_pytorch(built, tmp_path):
    copy = tmp_path / 'slingmpi'
    shutil.copytree(built.packages / 'slingmpi', copy)
    made = json.loads((copy / 'built.json').read_text())
    assert set(made) == {'torch', 'mpi', 'compiler', 'cxx11_abi'} and os.path.isabs(made['compiler'])
    (copy / 'built.json').write_text(json.dumps({**made, 'torch': '2.5'}))
    done = built.ranks(1, HERE / 'faults.py', 'reduction', check=False, PYTHONPATH=f'{tmp_path}:{HERE}')
    assert done.returncode != 0
    assert 'built for PyTorch 2.5' in done.stderr and 'pip install --no-build-isolation' in done.stderr


def test_other_mpi(built, tmp_path):
    """Its library is not there: the message names the MPI that it was built with."""
    copy = tmp_path / 'slingmpi'
    shutil.copytree(built.packages / 'slingmpi', copy)
    library, = copy.glob('_backend*.so')
    needed = re.search(r'NEEDED.*\[(libmpi\S*)\]', run(['readelf', '-d', library]).stdout).group(1)
    library.write_bytes(library.read_bytes().replace(needed.encode(), needed.replace('mpi', 'xyz').encode()))
    done = built.ranks(1, HERE / 'faults.py', 'reduction', check=False, PYTHONPATH=f'{tmp_path}:{HERE}')
    assert done.returncode != 0
    assert 'slingmpi was built with' in done.stderr and 'Load the module of that MPI' in done.stderr


def test_no_compiler(installed_pytorch, tmp_path):
    python = installed_pytorch.root / 'bin/python'
    source = tmp_path / 'torch-mpi'
    shutil.copytree(ROOT / 'torch-mpi', source, ignore=shutil.ignore_patterns('build', '*.so', '*.egg-info'))
    env = {**testbed.clean_environ(), 'MPICXX': 'no-such-compiler'}
    done = run([python, 'setup.py', 'build_ext'], env=env, check=False, cwd=source)
    assert done.returncode == 1 and "no MPI compiler 'no-such-compiler'" in done.stderr and 'MPICXX' in done.stderr
