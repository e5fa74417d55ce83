# SPDX-License-Identifier: GPL-2.0-only
"""Ranks that have nothing but what srun --mpi=cray_shasta of Slurm 22.05 exports, with the tables that Slurm wrote."""

import json
import sys

import pytest

from testbed import ROOT, clean_environ, launchers, run

RECORDS = ROOT / 'tests/records/pals'
START = ROOT / 'runscripts/conda-python-distributed'
SHOW = ['-S', '-c', 'import json, os; print(json.dumps([os.environ[name] for name in '
                    '("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]))']
CASES = [case for case in launchers.PALS_ALONE if (RECORDS / f'slurm-22.05.8-{case}.apinfo').exists()]


def start(tmp_path, table, rank, node, check=True):
    python = tmp_path / 'bin/python'
    if not python.exists():
        python.parent.mkdir()
        python.symlink_to(sys.executable)
    env = {**clean_environ(), 'PATH': f'{python.parent}:/usr/bin:/bin', 'SLINGTORCH_CACHE_ROOT': str(tmp_path),
           'PALS_RANKID': str(rank), 'PALS_NODEID': str(node), 'PALS_APID': '4711.0', 'PALS_APINFO': str(table)}
    return run([START, *SHOW], env=env, check=check)


@pytest.mark.parametrize('version', ['22.05.8', '24.11.5', '26.05.5'])
@pytest.mark.parametrize('case', CASES)
def test_ranks_out_of_the_table(tmp_path, version, case):
    nodes = launchers.PALS_ALONE[case][1]
    table = RECORDS / f'slurm-{version}-{case}.apinfo'
    for rank, node in enumerate(nodes):
        found = json.loads(start(tmp_path, table, rank, launchers.NODES.index(node)).stdout)
        assert found == [str(rank), str(len(nodes)), str(nodes[:rank].count(node)), str(nodes.count(node)), nodes[0]]


def test_four_records_are_there():
    assert len(CASES) == 4


@pytest.mark.parametrize('change', [
    lambda data: data[:100],                                   # ends in the header
    lambda data: data[:136 + 12 + 12 * 8 - 4],                 # ends within the ranks
    lambda data: b'\x06' + data[1:],                           # an unknown version
    lambda data: data[:80] + b'\x05' + data[81:],              # of fewer ranks than this one's number
    lambda data: b'',
])
def test_table_that_cannot_be_is_not_believed(tmp_path, change):
    table = tmp_path / 'apinfo'
    table.write_bytes(change((RECORDS / 'slurm-22.05.8-cyclic.apinfo').read_bytes()))
    done = start(tmp_path, table, 5, 1, check=False)
    assert done.returncode == 1 and not done.stdout
    assert 'does not say the world_size of this process' in done.stderr and 'Export RANK' in done.stderr
