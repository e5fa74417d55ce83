# SPDX-License-Identifier: GPL-2.0-only
"""Bench in jobs: four ranks on two nodes, and planted faults."""
import json
import re

import pytest

from slingtorch import cli
from testbed import forkedtorch

pytestmark = pytest.mark.real

OPERATIONS = ['all_reduce', 'all_gather', 'reduce_scatter', 'broadcast', 'all_to_all', 'send_receive']
FAULTS = '''
"""Bench with the faults of rank 1: one value of its all_reduce is wrong, and its broadcast ends the process."""
import os
import runpy
import signal
import sys
import torch.distributed as dist

all_reduce = dist.all_reduce

def corrupted(tensor, *args, **kwargs):
    all_reduce(tensor, *args, **kwargs)
    if tensor.numel() == 1024 and tensor.dtype.itemsize == 4:
        tensor[700] += 1

if os.environ['RANK'] == '1':
    dist.all_reduce = corrupted
    dist.broadcast = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
sys.argv[:1] = [os.environ['RUNSCRIPTS'] + '/lib/job', 'bench']
runpy.run_path(sys.argv[0], run_name='__main__')
'''


@pytest.fixture
def env(installed_pytorch, tmp_path):
    return {**forkedtorch.quick(installed_pytorch).env, 'GLOO_SOCKET_IFNAME': 'lo',
            'SLINGTORCH_CACHE_ROOT': str(tmp_path)}


def test_four_ranks_on_two_nodes(slurm, installed_pytorch, env, tmp_path, capsys):
    """The file that the job writes is the one that the command reads."""
    path = tmp_path / 'bench.json'
    job = slurm.srun('-N2', '--ntasks-per-node=2', installed_pytorch.runscripts / 'conda-python-distributed', '--bench',
                     '--max', '300K', '--factor', '8', '--seconds', '0.01', '--json', path, env=env)
    record = json.loads(path.read_text())
    assert record['complete'] and (record['nodes'], record['ranks'], record['ranks_per_node']) == (2, 4, 2)
    assert [(row['operation'], row['size'], row['wrong']) for row in record['results']] == [
        (operation, size, 0) for operation in OPERATIONS for size in (2 ** 15, 2 ** 18)]
    for row in record['results']:
        assert row['algorithm_bandwidth'] == pytest.approx(row['size'] / row['seconds'] / 1e9)
    assert len(record['notes']) == 1 and record['notes'][0].startswith('gloo, on CPUs: PyTorch ')
    assert record['networks'] == {'gloo': 'TCP'}
    assert [line for line in job.stderr.splitlines() if 'Warning' in line] == []
    assert cli.main(['bench', str(path)]) == 0
    assert capsys.readouterr().out in job.stdout + '\n'


def test_a_wrong_value_and_a_rank_that_dies(slurm, installed_pytorch, env, tmp_path):
    """What was measured before is in the file; the other rank ends by itself, and says what to look for."""
    (tmp_path / 'faults.py').write_text(FAULTS)
    path = tmp_path / 'bench.json'
    job = slurm.srun('-N2', '--ntasks-per-node=1', '--kill-on-bad-exit=0',
                     installed_pytorch.runscripts / 'conda-python-distributed', tmp_path / 'faults.py', '--min', '4K',
                     '--max', '8K', '--seconds', '0.01', '--operations', 'all_reduce', 'broadcast', '--json', path,
                     env=env, check=False)
    assert job.returncode != 0
    record = json.loads(path.read_text())
    assert not record['complete']
    found = [(row['operation'], row['size'], row['wrong'], row['first_wrong']) for row in record['results']]
    # of two checks each
    assert found == [('all_reduce', 4096, 2, 'rank 1 on nid000002'), ('all_reduce', 8192, 0, None)]
    assert re.search(r'^slingtorch bench: rank 0 on nid000001: .*If a rank or its node is gone', job.stderr, re.M)
