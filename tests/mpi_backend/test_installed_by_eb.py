# SPDX-License-Identifier: GPL-2.0-only
"""slingmpi as `eb` installs it on the PyTorch of the tests, with the machine's MPICH: loaded, and trained with."""
import pathlib
import re

import pytest

from testbed import DIR
from testbed.easybuild import EasyBuild
from testbed.slurm import free_ports

HERE = pathlib.Path(__file__).parent
NAME = 'slingmpi-0.1.0-PyTorch-2.13.0-local-cpu.eb'
MODULE = NAME[:-len('.eb')].replace('-', '/', 1)


@pytest.fixture(scope='module')
def loaded(tmp_path_factory, lmod, installed_pytorch):
    """The environment after `module load`."""
    eb = EasyBuild(tmp_path_factory.mktemp('eb'), lmod)
    eb.env['MODULEPATH'] = str(installed_pytorch.modulepath)
    # what was compiled once is not compiled again
    env = {'MPICH_CXX': 'ccache g++', 'CCACHE_DIR': DIR / 'ccache-slingmpi'}
    done = eb(NAME, '--try-amend=mpicxx=mpicxx.mpich', env=env)
    # the sanity check has started two ranks
    assert re.search(r'an all_reduce on 2 ranks is right \(/\S+/mpiexec', done.stdout)
    assert re.search(r'PyTorch 2\.13\.0\+cpu, MPI /\S+/libmpich\.so\.\S+, GPU', done.stdout)
    return lmod.load(MODULE, modulepath=[eb.modulepath, installed_pytorch.modulepath])


def test_training_on_two_ranks(loaded, mpich):
    """By the runscript, under mpiexec."""
    env = {**loaded, 'MASTER_PORT': str(free_ports(1)[0]), 'OMP_NUM_THREADS': '1', 'PYTHONPATH':
           f'{HERE}:{loaded["PYTHONPATH"]}'}
    done = mpich.run(2, 'conda-python-distributed', HERE / 'uses.py', 'data_parallel', env=env, timeout=240)
    assert done.stdout.split('\n')[-2] == 'data_parallel: right'
