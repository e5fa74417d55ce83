# SPDX-License-Identifier: GPL-2.0-only
"""Bench in a job: four ranks on two nodes."""
import json

import pytest

from slingtorch import cli
from testbed import forkedtorch

pytestmark = pytest.mark.real

OPERATIONS = ['all_reduce', 'all_gather', 'reduce_scatter', 'broadcast', 'all_to_all', 'send_receive']


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
