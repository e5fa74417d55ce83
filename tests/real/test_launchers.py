# SPDX-License-Identifier: GPL-2.0-only
"""Slurm, Open MPI and MPICH of Debian 12, 13 and sid: under each the runscripts find the same ranks and rank 0's node.

What the launchers export is theirs: nothing here writes a variable of Slurm, PALS or PMI.
"""

import pathlib
import sys

import pytest

from testbed import ROOT, debianroot, launchers, slurm as slurm_

pytestmark = pytest.mark.real

RECORDS = ROOT / 'tests/records/pals'
NODES_OF = {**{name: nodes for name, (_, nodes) in (*launchers.SRUN.items(), *launchers.WITH_GPUS.items())},
            **launchers.BATCHED,
            'het step': launchers.HET_STEPS['het step']}
ALONE = {**{f'PALS alone {name}': nodes for name, (_, nodes) in launchers.PALS_ALONE.items()},
         'het PALS alone': launchers.HET_STEPS['het PALS alone']}


@pytest.fixture(scope='module', params=launchers.SYSTEMS)
def nodes(request):
    """The cluster of one Debian: testbed.slurm.Cluster."""
    slurm_.clean_up_killed_runs()
    cluster = launchers.cluster(request.param)
    yield cluster
    cluster.stop()


@pytest.fixture(scope='module')
def seen(nodes):
    """What all launchers of this Debian did: testbed.launchers.Seen."""
    return launchers.look(nodes)


def works(seen, case):
    """Whether this release has the option: no release may lose more than these."""
    older = seen.versions['slurm'] == '22.05'
    return not (case == '--mpi=pmix' and seen.versions['slurm'] != '24.11' or case == '--tres-per-task' and older)


@pytest.mark.parametrize('case', [*NODES_OF, *ALONE])
def test_ranks_and_the_node_of_rank_0(seen, case):
    expected = NODES_OF.get(case) or ALONE[case]
    ranks = seen.ranks[case]
    if not works(seen, case):
        assert not ranks, 'works now: see works()'
        return
    found = [rank.seen for rank in ranks]
    said = seen.said.get(case, seen.said['batch'] + seen.said['het'])
    assert None not in found, said
    assert [rank['node'] for rank in found] == list(expected), said
    assert [rank['RANK'] for rank in found] == [str(number) for number in range(len(expected))]
    assert {rank['WORLD_SIZE'] for rank in found} == {str(len(expected))}
    for number, rank in enumerate(found):
        assert rank['LOCAL_RANK'] == str(expected[:number].count(expected[number]))
        assert rank['LOCAL_WORLD_SIZE'] == str(expected.count(expected[number]))
    assert {rank['MASTER_ADDR'] for rank in found} == {expected[0] if len(set(expected)) > 1 else '127.0.0.1'}
    assert len({rank['MASTER_PORT'] for rank in found}) == 1
    if case not in ('openmpi', 'mpich'):
        assert {rank.master for rank in ranks} == {expected[0]}
    if case in ALONE:
        assert not any(name.startswith('SLURM_') for rank in ranks for name in rank.env)


@pytest.mark.parametrize('suite', debianroot.SUITES)
def test_open_mpi_between_nodes_with_networks_of_their_own(suite):
    # elsewhere all nodes are one machine, on which mpirun starts its daemons by a step of all nodes
    # the line in one piece, so that no other rank's comes between
    program = ("import os; os.write(1, b' '.join(os.environb[name] for name in (b'RANK', b'LOCAL_RANK', "
               "b'MASTER_ADDR', b'SLURMD_NODENAME')) + bytes([10]))")
    cluster = launchers.cluster(suite, separate=True)
    try:
        batch = cluster.sbatch(
            '#!/bin/bash\nmpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none --map-by ppr:2:node -n 4 '
            f'{ROOT}/runscripts/conda-python-distributed -S -c "{program}"\n', *launchers.TWO,
            env={'PATH': f'{pathlib.Path(sys.executable).parent}:{cluster.env["PATH"]}'})
    finally:
        cluster.stop()
    first, second = launchers.NODES[:2]
    assert sorted(line for line in batch.output.splitlines() if first in line) == [
        f'0 0 {first} {first}', f'1 1 {first} {first}', f'2 0 {first} {second}', f'3 1 {first} {second}'], batch.output


@pytest.mark.parametrize('case, shares', [
    ('--gpus-per-node', ['0,1', '2,3']),
    ('--gpus-per-task', ['0', '1']),
    ('--gpu-bind', ['0', '1']),
    ('--tres-per-task', ['0', '1']),
])
def test_gpus_are_shared_out_once(seen, case, shares):
    if works(seen, case):
        assert [rank.seen['gpus'] for rank in seen.ranks[case]] == shares * 2


@pytest.mark.parametrize('case', ['block', 'two-nodes-uneven', 'cyclic', 'arbitrary'])
def test_table_of_pals_is_the_recorded_one(seen, case):
    # the format changed once, in 23.02
    record = RECORDS / f'slurm-{"22.05.8" if seen.versions["slurm"] < "23.02" else "26.05.5"}-{case}.apinfo'
    tables = {rank.apinfo for rank in seen.ranks[f'PALS alone {case}']}
    assert tables == {record.read_bytes()}
