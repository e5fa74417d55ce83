# SPDX-License-Identifier: GPL-2.0-only
"""--vet and with-spares with the PyTorch that real `eb` installed, on three nodes with a network of their own."""
import json
import re
import shutil

import pytest

import testbed
from testbed import forkedtorch, slurm as slurm_

pytestmark = pytest.mark.real

NODES = ('nid000001', 'nid000002', 'nid000003')


def limit(cluster, node, rate):
    """Let a node send no faster than this."""
    testbed.run(cluster.on(node, 'tc', 'qdisc', 'replace', 'dev', 'eth0', 'root', 'tbf', 'rate', rate, 'burst', '64kb',
                           'latency', '100ms'))


@pytest.fixture(scope='module')
def three():
    """A cluster of three separate nodes, whose network is slower than they are on a busy machine."""
    slurm_.clean_up_killed_runs()
    cluster = slurm_.Cluster(nodes=NODES, separate=True)
    try:
        cluster.start()
        for node in NODES:
            limit(cluster, node, '100mbit')
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope='module')
def pytorch(installed_pytorch):
    """With processes that are forks; real ones: test_check_jobs.py."""
    return forkedtorch.quick(installed_pytorch)


@pytest.fixture
def python(three, pytorch, request):
    """PATH with a python in front of which bash runs a line on one node alone."""
    directory = three.shared / request.node.name
    directory.mkdir()

    def plant(line, node):
        path = directory / 'python'
        path.write_text(f'#!/bin/bash\n[[ $HOSTNAME != "{node}" ]] || {line}\nexec {pytorch.quick} "$@"\n')
        path.chmod(0o755)
        return f'{directory}:{pytorch.env["PATH"]}'
    return plant


def environment(three, pytorch, **env):
    return {**pytorch.env, 'SLINGTORCH_CACHE_ROOT': three.shared,
            'SLINGTORCH_CHECK_SECONDS': '60', 'SLINGTORCH_VET_DIR': three.shared, **env}


@pytest.fixture
def vet(three, pytorch):
    """Run `--vet ARGS`: (CompletedProcess, {node: what the JSON says of it}, the JSON)."""
    def run(*args, nodes=2, **env):
        path = three.shared / 'vet.json'
        path.unlink(missing_ok=True)
        done = three.srun(f'-N{nodes}', '--ntasks-per-node=1', pytorch.runscripts / 'conda-python-distributed',
                          '--vet', '--json', path, *args, env=environment(three, pytorch, **env), check=False)
        assert path.exists(), done.stdout + done.stderr
        found = json.loads(path.read_text())
        return done, {entry['name']: entry for entry in found['nodes']}, found
    return run


def test_sound_nodes_are_measured_over_gloo(vet):
    done, nodes, found = vet(nodes=3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if 'Vetted: ' in line and ' gloo ' in line]) == 3
    assert found['backend'] == 'gloo' and all(entry['backend'] > 0 for entry in nodes.values())


def test_a_slow_node_is_named(vet, three):
    limit(three, NODES[2], '10mbit')
    try:
        done, nodes, found = vet('--reference', 'gloo=50', nodes=3)
    finally:
        limit(three, NODES[2], '100mbit')
    assert done.returncode != 0 and not nodes[NODES[2]]['good'], done.stdout
    assert 'slow: best pair 0.0' in nodes[NODES[2]]['why']
    assert nodes[NODES[2]]['backend'] < 0.5 * nodes[NODES[0]]['backend']
    assert found['yellow'].startswith('3 of 3 nodes: lowest 0.0') and "the site's reference" in found['yellow']


def test_a_node_without_pytorch_says_so_and_is_cordoned(vet, python):
    done, nodes, _ = vet(nodes=3, SLINGTORCH_CHECK_SECONDS='40', PATH=python('exec /usr/bin/python3 "$@"', NODES[2]))
    assert done.returncode != 0 and nodes[NODES[2]]['why'] == 'fails: it did not answer'
    assert nodes[NODES[0]]['good'] and nodes[NODES[1]]['good'], done.stdout
    assert f"rank 2 on {NODES[2]}: ModuleNotFoundError: No module named 'torch'" in done.stderr


def test_with_spares_under_pbs_starts_on_the_good_nodes(three, pytorch, python):
    """hydra starts its proxies on the nodes as by ssh; PBS's variables are those of a job's first node."""
    ssh = three.shared / 'ssh'
    ssh.write_text('#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\ncase $1 in\n' + ''.join(
        f'{node}) enter="{" ".join(three.on(node, ""))}" ;;\n' for node in NODES) +
        'esac\nshift\nexec $enter bash -c "$*"\n')
    ssh.chmod(0o755)
    (three.shared / 'nodefile').write_text(''.join(f'{node}\n' * 2 for node in NODES[:2]))
    hydra = shutil.which('mpiexec.hydra') or testbed.missing('MPICH (package mpich)')
    env = environment(three, pytorch, PATH=python('export GLOO_SOCKET_IFNAME=hsn0', NODES[0]),
                      PBS_JOBID='77.server', PBS_NODEFILE=three.shared / 'nodefile', HYDRA_LAUNCHER='ssh',
                      HYDRA_LAUNCHER_EXEC=ssh)
    # to files, since hydra may lose what ranks print last
    program = ('import os, socket; print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", '
               'socket.gethostname(), "master", os.environ["MASTER_ADDR"], '
               f'file=open("{three.shared}/pbs-" + os.environ["RANK"], "w"))')
    done = testbed.run(
        three.on(NODES[0], pytorch.runscripts / 'with-spares', '1', hydra, '-ppn', '2',
                 pytorch.runscripts / 'conda-python-distributed', '-c', program),
        env={name: str(value) for name, value in env.items()}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf'Cordon: {NODES[0]}    fails: gloo does not start.*for: hsn0', done.stdout), done.stdout
    ranks = [path.read_text() for path in sorted(three.shared.glob('pbs-*'))]
    assert ranks == [f'rank {rank} of 2 on {NODES[1]} master {NODES[1]}\n' for rank in range(2)]


def test_until_done_goes_on_without_a_node_that_goes_down(three, pytorch):
    """Of three nodes one is spare; a job with --no-kill outlives one, and the bad one of the second start stays out."""
    directory = three.shared / 'until-done'
    directory.mkdir()
    (directory / 'train.sh').write_text(
        'read -r node < /proc/sys/kernel/hostname\ntouch "$DIR/ckpt/$SLURM_JOB_ID.$SLURM_STEP_ID.$node"\n'
        '[[ -e $DIR/again ]] || read -r < <(sleep infinity)\n')
    (directory / 'job').write_text(f'#!/bin/bash\nexec {testbed.ROOT}/runscripts/until-done --checkpoint {directory}/ckpt '
                                   f'--spares 1 srun --ntasks-per-node=1 bash {directory}/train.sh\n')
    (directory / 'ckpt').mkdir()
    env = environment(three, pytorch, DIR=directory, SLINGTORCH_CHECK_SECONDS='30')
    job = three.run('sbatch', '--parsable', '-N3', '--no-kill', '--requeue', f'--output={directory}/out', directory / 'job',
                    env=env).stdout.strip()

    def nodes():
        return sorted(path.name.rpartition('.')[2] for path in (directory / 'ckpt').iterdir())
    try:
        slurm_.wait(lambda: len(nodes()) == 2, 120, 'the first start does not begin')
        assert nodes() == list(NODES[:2])
        (directory / 'again').touch()
        three.run('scontrol', 'update', f'NodeName={NODES[1]}', 'State=DOWN', 'Reason=test')
        slurm_.wait(lambda: not three.run('squeue', '-h', '-j', job, check=False).stdout, 120, 'the job does not end')
    finally:
        three.run('scancel', job, check=False)
        three.run('scontrol', 'update', f'NodeName={NODES[1]}', 'State=RESUME', check=False)
        output = (directory / 'out').read_text()
    assert re.search(rf'until-done: start 2, job {job}, from .*, without {NODES[1]}; start 1 ran ', output), output
    assert 'until-done: done: start 2 ran' in output and set(nodes()) == set(NODES), output
