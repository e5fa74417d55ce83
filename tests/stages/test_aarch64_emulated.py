# SPDX-License-Identifier: GPL-2.0-only
"""On aarch64 (GH200), under qemu: bash's and Python's part of the bundle."""
import pytest

from testbed import arm64

pytestmark = pytest.mark.real


def said(command):
    done = arm64.run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ranks():
    """Two of four, as torchrun's variables say it, through the runscript."""
    rank = 'MASTER_ADDR=localhost MASTER_PORT=29511 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 RANK=%d LOCAL_RANK=%d '
    program = 'import os, platform; print(os.environ[\'RANK\'], platform.machine())'
    rank += f'runscripts/conda-python-distributed -c "{program}"'
    assert said('%s; %s' % (rank % (0, 0), rank % (3, 3))).split() == ['0', 'aarch64', '3', 'aarch64']


def test_command_and_wheels():
    """The package is imported, but for what EasyBuild loads; of CUDA's wheels, those of 13 have files for aarch64."""
    said("python3 -c 'import pkgutil, importlib, slingtorch; names = "
         '[module.name for module in pkgutil.walk_packages(slingtorch.__path__, "slingtorch.")]; [importlib.'
         'import_module(name) for name in names if "slingtorch.install." not in name and "__main__" not in name]\'')
    assert 'derecho ' in said('python3 -m slingtorch sites')
    chosen = said("python3 -c 'from slingtorch import gpus; print(*gpus.fitting_easyconfig(site_gpu=\"cuda\"))'")
    assert chosen.startswith('PyTorch-2.15.0-cuda-13.2.eb ') and 'cuda-12' not in chosen
