# SPDX-License-Identifier: GPL-2.0-only
"""What --check says of NCCL's network plugin, on two nodes with a network of their own, and a stand-in for it."""
import json
import subprocess

import pytest

import testbed
from testbed import slurm as slurm_

pytestmark = pytest.mark.real

NODES = ('nid000001', 'nid000002')


@pytest.fixture(scope='module')
def two():
    """A cluster of two separate nodes."""
    slurm_.clean_up_killed_runs()
    cluster = slurm_.Cluster(nodes=NODES, separate=True)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def check(two, installed_pytorch):
    """Run --check with this plugin; [(level, text)] of the lines about the plugin, and of all that are red."""
    subprocess.run(['gcc', '-shared', '-fPIC', '-w', '-DVERSION=11', testbed.ROOT / 'tests/unit/plugin_stand_in.c',
                    '-o', two.shared / 'libnccl-net.so'], check=True)

    def run(**env):
        path = two.shared / 'check.json'
        path.unlink(missing_ok=True)
        env = {**installed_pytorch.env, 'OMP_NUM_THREADS': '1', 'SLINGTORCH_CACHE_ROOT': two.shared, 'PROVIDER': 'cxi',
               'SLINGTORCH_CHECK_JSON': path, 'LD_LIBRARY_PATH': two.shared, 'STAND_IN': two.shared, **env}
        done = two.srun('-N2', '--ntasks-per-node=1', installed_pytorch.runscripts / 'conda-python-distributed',
                        '--check', env=env, check=False)
        assert path.exists(), done.stdout + done.stderr
        found = json.loads(path.read_text())['findings']
        return ([(entry['level'], entry['text']) for entry in found if entry['name'] == 'plugin'],
                [entry for entry in found if entry['level'] == 'red'])
    return run


def test_data_moves_between_the_nodes(check):
    said, red = check()
    assert not red
    assert any('64 MB of host memory went to the next node' in text or 'its line rate is' in text for _, text in said)


@pytest.mark.parametrize('planted, says', [
    ('no-provider', 'libnccl-net.so does not start by itself: init failed with status 2: NET/OFI no provider cxi of 7'),
    ('no-vni', 'libnccl-net.so moves no data between the nodes: cxi1: connect failed with status 6'),
    ('crash', 'libnccl-net.so does not start by itself: it ended with status -6'),
])
def test_what_is_planted_is_named_and_stops_no_job_without_gpus(check, planted, says):
    said, red = check(PLANTED=planted)
    assert not red and [level for level, text in said if says in text] == ['yellow'], said
