# SPDX-License-Identifier: GPL-2.0-only
"""The newest easyconfig of a wheel with CUDA, as a user installs it: 2.9 GB, which are removed afterwards."""
import json
import shutil

import pytest

from slingtorch import gpus
from testbed import ROOT, easybuild, missing, run

PROGRAM = """
import ctypes, json, numpy, torch, torch.distributed, torchvision
nccl = ctypes.CDLL('libnccl.so.2')
number = ctypes.c_int()
nccl.ncclGetVersion(ctypes.byref(number))
print(json.dumps({
    'torch': torch.__version__, 'torchvision': torchvision.__version__,
    'cuda': torch.version.cuda, 'nccl': number.value,
    'gpus': [name for name in torch._C._cuda_getArchFlags().split() if name.startswith('sm_')],
    'backends': [torch.distributed.is_nccl_available(), torch.distributed.is_gloo_available()],
    'mapped': sorted({line.split()[-1] for line in open('/proc/self/maps') if 'libnccl.so' in line}),
}))
"""


@pytest.fixture(scope='module')
def wheel():
    return next(wheel for wheel in gpus.wheels() if wheel.kind == 'cuda')


@pytest.fixture(scope='module')
def installed(wheel, lmod, tmp_path_factory):
    """What one command of eb installs."""
    prefix = tmp_path_factory.mktemp('gpu-wheel')
    eb = easybuild.EasyBuild(prefix, lmod, fresh=True)
    try:
        # with pip's cache it would be there twice
        eb(wheel.name, timeout=1800, env={'PIP_NO_CACHE_DIR': '1'})
        yield easybuild.Installation(wheel.name[:-3].replace('-', '/', 1), eb.modulepath, lmod)
    finally:
        shutil.rmtree(prefix)


def test_libraries_of_the_process(installed, wheel):
    printed = json.loads(run([installed.python, '-c', PROGRAM], env=installed.env, timeout=120).stdout)
    assert (printed['torch'], printed['cuda'], printed['nccl']) == ('2.15.0+cu132', '13.2', 23007)
    assert printed['backends'] == [True, True] and len(printed['mapped']) == 1
    assert printed['mapped'][0].startswith(str(installed.root))
    assert installed.env['SLINGTORCH_CUDA_VERSION'] == printed['cuda']
    # what the easyconfig says is in it
    assert min(int(name[3:]) for name in printed['gpus']) == wheel.oldest_gpu[0] * 10 + wheel.oldest_gpu[1]
    assert 'No broken requirements found' in run([installed.python, '-m', 'pip', 'check'], env=installed.env).stdout


def test_two_ranks_train(installed, tmp_path):
    launcher = shutil.which('mpiexec.mpich') or missing('mpiexec.mpich')
    result = tmp_path / 'result.json'
    env = {**installed.env, 'GLOO_SOCKET_IFNAME': 'lo', 'OMP_NUM_THREADS': '1', 'SLINGTORCH_CACHE_ROOT': str(tmp_path)}
    run([launcher, '-n', '2', installed.runscripts / 'conda-python-distributed',
         ROOT / 'examples/training/ddp_training.py', '--json', result], env=env, timeout=300, cwd=tmp_path)
    found = json.loads(result.read_text())
    assert found['accuracy'] > 0.95, found
