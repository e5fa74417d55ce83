# SPDX-License-Identifier: GPL-2.0-only
"""What PyTorch's own flight recorder writes for the ranks of a job, explained."""
import sys

import pytest

from testbed import ROOT, forkedtorch, run

pytestmark = pytest.mark.real

# NCCL's watchdog needs GPUs: the program itself writes what the watchdog would, under the name that the runscript gives
PROGRAM = '''
import os, sys
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace


def reduce(wait):
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if wait:
        work.wait()


dist.init_process_group('gloo')
rank = dist.get_rank()
reduce(wait=True)
if rank != 1:
    reduce(wait=False)
with open(os.environ['TORCH_FR_DUMP_TEMP_FILE'] + str(rank), 'wb') as file:
    file.write(_dump_fr_trace())
sys.stdout.flush()
os._exit(0)
'''


def test_the_rank_that_is_missing_is_named(installed_pytorch, mpich, tmp_path):
    (tmp_path / 'train.py').write_text(PROGRAM)
    env = {**forkedtorch.quick(installed_pytorch).env, 'PBS_JOBID': '4711.srv'}
    mpich.run(2, installed_pytorch.runscripts / 'conda-python-distributed', 'train.py', env=env, cwd=tmp_path)
    files = sorted(path.name for path in tmp_path.glob('flight-recorder*'))
    assert files == [f'flight-recorder-4711.srv-rank-{rank}' for rank in range(2)]

    done = run([sys.executable, '-m', 'slingtorch', 'explain', tmp_path],
               env={'PYTHONPATH': ROOT, 'PATH': '/usr/bin:/bin'})
    said = ' '.join(done.stdout.split())
    line = PROGRAM.splitlines().index('    work = dist.all_reduce(torch.ones(3), async_op=True)') + 1
    assert 'collective 2 (gloo:all_reduce [[3]] at ' in said and f'train.py:{line})' in said, said
    assert 'rank 1 did not call it; rank 0 did' in said, said
    assert 'rank 1 last called collective 1' in said, said
