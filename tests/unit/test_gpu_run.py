# SPDX-License-Identifier: GPL-2.0-only
"""tests/gpu/run on machines without a GPU, and with a PyTorch that only pretends to see two."""
import json
import os
import subprocess
import sys

import pytest

import testbed

PRETENDS = '''
__version__ = '2.99'
class version: cuda = '13.0'
class cuda:
    is_available = staticmethod(lambda: %d > 0)
    device_count = staticmethod(lambda: %d)
    get_device_name = staticmethod(lambda number: 'Pretended')
'''


@pytest.fixture
def gpu_run(tmp_path):
    """Function: run it with a module `torch` of this text, or none; the CompletedProcess."""
    def run(torch, *args):
        (tmp_path / 'packages').mkdir()
        if torch is not None:
            (tmp_path / 'packages/torch.py').write_text(torch)
        env = {**testbed.clean_environ(), 'PYTHONPATH': str(tmp_path / 'packages'), 'TMPDIR': str(tmp_path)}
        return subprocess.run([sys.executable, testbed.ROOT / 'tests/gpu/run', '--python', sys.executable, *args],
                              env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    return run


@pytest.mark.parametrize('torch,says', [
    (None, "has no PyTorch that can be imported: ModuleNotFoundError: No module named 'torch'. Load a module"),
    (PRETENDS % (0, 0), 'PyTorch 2.99 in %s sees no GPU here. Run this on a machine with a GPU' % sys.executable),
])
def test_without_pytorch_or_gpu_nothing_is_tested(gpu_run, torch, says):
    done = gpu_run(torch)
    assert done.returncode == 2 and done.stdout == ''
    assert says in done.stderr and 'Nothing was tested.' in done.stderr


def test_what_fails_is_red_and_what_is_missing_is_said(gpu_run, tmp_path):
    """No rank gets beyond its import of this torch."""
    done = gpu_run(PRETENDS % (2, 2), '--json', str(tmp_path / 'x.json'))
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith('PyTorch 2.99, 2 x Pretended\n')
    record = json.loads((tmp_path / 'x.json').read_text())
    found = {one['test']: one['result'] for one in record['results']}
    assert found['bench over NCCL or RCCL'] == 'WRONG' and found['one GPU for each rank'] == 'WRONG'
    assert found['NCCL loads the OFI plugin and starts with it'] == 'not tested'
    assert 'right' not in found.values()
    assert 'more than one node' in done.stdout and done.stdout.splitlines()[-1].startswith('0 right, ')
    assert [name for name in os.listdir(tmp_path) if name.startswith('slingtorch-gpu-')] == []
