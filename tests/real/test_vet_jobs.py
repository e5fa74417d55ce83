# SPDX-License-Identifier: GPL-2.0-only
"""--vet and with-spares with the PyTorch that real `eb` installed, on three nodes with a network of their own."""
import json
import shutil

import pytest

import testbed
from testbed import slurm as slurm_

pytestmark = pytest.mark.real

NODES = ('nid000001', 'nid000002', 'nid000003')


@pytest.fixture(scope='module')
def three():
    """A cluster of three separate nodes."""
    slurm_.clean_up_killed_runs()
    cluster = slurm_.Cluster(nodes=NODES, separate=True)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def python(three, installed_pytorch, request):
    """PATH with a python in front of which bash runs a line on one node alone."""
    directory = three.shared / request.node.name
    directory.mkdir()

    def plant(line, node, real=installed_pytorch.python):
        path = directory / 'python'
        path.write_text(f'#!/bin/bash\n[[ $HOSTNAME != "{node}" ]] || {line}\nexec {real} "$@"\n')
        path.chmod(0o755)
        return f'{directory}:{installed_pytorch.env["PATH"]}'
    return plant


def environment(three, installed_pytorch, **env):
    return {**installed_pytorch.env, 'OMP_NUM_THREADS': '1', 'SLINGTORCH_CACHE_ROOT': three.shared,
            'SLINGTORCH_CHECK_SECONDS': '60', 'SLINGTORCH_VET_DIR': three.shared, **env}


@pytest.fixture
def vet(three, installed_pytorch):
    """Run `--vet ARGS`: (CompletedProcess, {node: what the JSON says of it}, the JSON)."""
    def run(*args, nodes=2, **env):
        path = three.shared / 'vet.json'
        path.unlink(missing_ok=True)
        done = three.srun(f'-N{nodes}', '--ntasks-per-node=1', installed_pytorch.runscripts / 'conda-python-distributed',
                          '--vet', '--json', path, *args, env=environment(three, installed_pytorch, **env), check=False)
        assert path.exists(), done.stdout + done.stderr
        found = json.loads(path.read_text())
        return done, {entry['name']: entry for entry in found['nodes']}, found
    return run


def test_sound_nodes_are_measured_over_gloo(vet):
    done, nodes, found = vet()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if 'Vetted: ' in line and ', gloo ' in line]) == 2
    assert found['backend'] == 'gloo' and all(entry['tcp'] > 0 and entry['backend'] > 0 for entry in nodes.values())
    assert found['seconds']['tcp'] + found['seconds']['backend'] < 15 and not found['not_tested']


def test_a_backend_that_does_not_start_is_named_with_its_message(vet, python):
    done, nodes, _ = vet(PATH=python('export GLOO_SOCKET_IFNAME=hsn0', NODES[1]))
    assert done.returncode != 0
    assert nodes[NODES[0]]['good'] and not nodes[NODES[1]]['good']
    assert 'gloo does not start' in nodes[NODES[1]]['why'] and 'for: hsn0' in nodes[NODES[1]]['why']
    assert nodes[NODES[1]]['tcp'] > 0, 'TCP has nothing to do with it'


def test_a_slow_node_is_named(vet, three):
    for line in (['add', 'dev', 'eth0', 'root', 'tbf', 'rate', '200mbit', 'burst', '64kb', 'latency', '100ms'],
                 ['show', 'dev', 'eth0']):
        testbed.run(three.on(NODES[2], 'tc', 'qdisc', *line))
    try:
        done, nodes, found = vet('--reference', '50', nodes=3)
    finally:
        testbed.run(three.on(NODES[2], 'tc', 'qdisc', 'del', 'dev', 'eth0', 'root'))
    assert done.returncode != 0 and not nodes[NODES[2]]['good'], done.stdout
    assert 'slow: best pair 0.0' in nodes[NODES[2]]['why']
    assert nodes[NODES[2]]['backend'] < 0.5 * nodes[NODES[0]]['backend']
    assert any('reference: 3 of 3 nodes' in line for line in found['yellow'])


def test_without_pytorch_tcp_is_measured(vet, python):
    done, nodes, _ = vet(PATH=python('true', '', '/usr/bin/python3'))
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'backend: not tested, no torch' in done.stdout and done.stdout.count('Vetted: ') == 2
    assert all(entry['tcp'] > 0 and entry['backend'] is None for entry in nodes.values())


def test_with_spares_under_pbs_starts_on_the_good_nodes(three, installed_pytorch, python):
    """hydra starts its proxies on the nodes as by ssh; PBS's variables are those of a job's first node."""
    ssh = three.shared / 'ssh'
    ssh.write_text('#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\ncase $1 in\n' + ''.join(
        f'{node}) enter="{" ".join(three.on(node, ""))}" ;;\n' for node in NODES) +
        'esac\nshift\nexec $enter bash -c "$*"\n')
    ssh.chmod(0o755)
    (three.shared / 'nodefile').write_text(''.join(f'{node}\n' * 2 for node in NODES[:2]))
    hydra = shutil.which('mpiexec.hydra') or testbed.missing('MPICH (package mpich)')
    env = environment(three, installed_pytorch, PATH=python('export GLOO_SOCKET_IFNAME=hsn0', NODES[0]),
                      PBS_JOBID='77.server', PBS_NODEFILE=three.shared / 'nodefile', HYDRA_LAUNCHER='ssh',
                      HYDRA_LAUNCHER_EXEC=ssh)
    program = ('import os, socket; print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", '
               'socket.gethostname(), "master", os.environ["MASTER_ADDR"])')
    done = testbed.run(
        three.on(NODES[0], installed_pytorch.runscripts / 'with-spares', '1', hydra, '-ppn', '2',
                 installed_pytorch.runscripts / 'conda-python-distributed', '-c', program),
        env={name: str(value) for name, value in env.items()}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'Cordon: {NODES[0]}    fails: gloo does not start' in done.stdout
    ranks = sorted(line for line in done.stdout.splitlines() if line.startswith('rank '))
    assert ranks == [f'rank {rank} of 2 on {NODES[1]} master {NODES[1]}' for rank in range(2)]
