# SPDX-License-Identifier: GPL-2.0-only
"""Layer 5: PyTorch that real `eb` installed, in distributed jobs under real launchers on two emulated nodes.

The global batch of light_training.py is split over the ranks, so every launch must give the losses of one rank; a wrong
rank, world size, address or port cannot.
"""

import json
import pathlib
import shlex

import pytest

import testbed
from testbed import ROOT, forkedtorch, slurm as slurm_

pytestmark = pytest.mark.real

TRAIN = pathlib.Path(__file__).with_name('light_training.py')
TWO_BY_TWO = ('-N2', '--ntasks-per-node=2')
ONE_BY_ONE = ('-N2', '--ntasks-per-node=1')


@pytest.fixture(scope='session')
def pytorch(installed_pytorch, tmp_path_factory):
    """The installation, with the environment of a job on one machine: loopback network, one thread a rank."""
    return installed_pytorch.with_variables(
        GLOO_SOCKET_IFNAME='lo', OMP_NUM_THREADS='1', SLINGTORCH_CACHE_ROOT=str(tmp_path_factory.mktemp('caches')))


@pytest.fixture(scope='session')
def quick(pytorch):
    """The same, where it is not the start of Python that is looked at."""
    return forkedtorch.quick(pytorch)


@pytest.fixture(scope='session')
def distributed(pytorch):
    """The runscript."""
    return pytorch.runscripts / 'conda-python-distributed'


def training(results):
    """Arguments of the runscript: train, and write the results there."""
    return [TRAIN, results]


@pytest.fixture(scope='session')
def one_rank(quick, distributed, tmp_path_factory):
    """Results of one rank, without any launcher."""
    results = tmp_path_factory.mktemp('one') / 'results.json'
    testbed.run([distributed, *training(results)], env=quick.env, timeout=300)
    return read(results)


def read(results):
    with open(results) as stream:
        return json.load(stream)


def same(results, one_rank, ranks, nodes=None):
    """Fail unless so many ranks did what one rank does; `nodes` are those of ranks 0, 1, ..."""
    found = read(results)
    assert found['world_size'] == ranks
    assert found['losses'] == pytest.approx(one_rank['losses'], rel=1e-4)
    assert found['losses'][-1] < found['losses'][0]
    hosts = sorted(found['hosts'], key=lambda host: host['rank'])
    assert [host['rank'] for host in hosts] == list(range(ranks))
    assert len({host['pid'] for host in hosts}) == ranks
    if nodes:
        assert [host['node'] for host in hosts] == nodes
    seen = {}
    for host in hosts:
        assert host['local_rank'] == seen.setdefault(host['node'], 0)
        seen[host['node']] += 1


def nodes_of(ranks_per_node):
    return [node for node in testbed.NODES for _ in range(ranks_per_node)]


# --- the losses are those of one rank; or the ranks say who they are

SHOW = ['-c', 'import os; names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURMD_NODENAME", "MASTER_ADDR"\n'
        'os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())']


def test_srun_two_nodes(slurm, pytorch, distributed, one_rank, tmp_path):
    slurm.srun(*TWO_BY_TWO, distributed, *training(tmp_path / 'results.json'), env=pytorch.env)
    same(tmp_path / 'results.json', one_rank, 4, nodes_of(2))


@pytest.mark.parametrize('launcher', ['mpirun.openmpi --allow-run-as-root -n 1', 'mpiexec.hydra -n 1'])
def test_job_that_is_submitted_from_inside_an_mpirun(slurm, tmp_path, launcher):
    """Each of its ranks was rank 0 of 1."""
    script = ROOT / 'runscripts/conda-python-distributed'
    done = slurm.run(*launcher.split(), 'srun', *TWO_BY_TWO, script, *SHOW, env={'SLINGTORCH_CACHE_ROOT': tmp_path})
    assert sorted(done.stdout.splitlines()) == [
        f'{rank} 4 {rank % 2} {testbed.NODES[rank // 2]} {testbed.NODES[0]}' for rank in range(4)]
    assert done.stderr.count('are left over from an outer start') == 1


def test_torchrun_starts_the_workers_and_outlives_a_signal_on_which_they_save(slurm, pytorch, distributed, tmp_path):
    """scancel and --signal of Slurm reach the agent as well, and it has no handler for this one."""
    program = tmp_path / 'save.py'
    program.write_text(
        'import os, pathlib, signal, sys, time\n'
        f'own = pathlib.Path("{tmp_path}", os.environ["RANK"])\n'
        'def save(*_):\n    own.with_suffix(".saved").touch()\n    sys.exit()\n'
        f'signal.signal(signal.SIGUSR1, save)\n{SHOW[1]}\nown.with_suffix(".ready").touch()\ntime.sleep(600)\n')
    with slurm.popen(*ONE_BY_ONE, '--job-name=saves', distributed, '--torchrun=2', program, env=pytorch.env) as job:
        try:
            slurm_.wait(lambda: len(list(tmp_path.glob('*.ready'))) == 4, 120, 'not all workers start',
                        lambda: job.poll() is None or pytest.fail(''.join(job.communicate()), pytrace=False))
            slurm.run('scancel', '--name=saves', '--signal=USR1')
            said = job.communicate(timeout=240)
        finally:
            slurm.run('scancel', '--name=saves')
    assert job.returncode == 0, said
    assert len(list(tmp_path.glob('*.saved'))) == 4
    ranks = [line.split() for line in sorted(said[0].splitlines())]
    assert [rank[:4] for rank in ranks] == [[str(rank), '4', str(rank % 2), node] for rank, node in enumerate(nodes_of(2))]
    assert len({rank[4] for rank in ranks}) == 1


def test_step_smaller_than_its_job(slurm, pytorch, distributed):
    """The step counts, not the job; and a step may be on the second node alone."""
    script = f'''#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
srun -N1 -n2 -w {testbed.NODES[1]} {shlex.join([str(distributed), *SHOW])}
'''
    batch = slurm.sbatch(script, env=pytorch.env)
    assert batch.returncode == 0, batch.output
    assert sorted(batch.output.splitlines()) == [f'{rank} 2 {rank} {testbed.NODES[1]} 127.0.0.1' for rank in range(2)]


@pytest.mark.parametrize('name', ['mpich', 'openmpi', 'torchrun'])
def test_launcher_on_one_node(request, name, quick, distributed, one_rank, tmp_path):
    torchrun = [quick.root / 'bin/torchrun', '--standalone', '--nproc-per-node=2', '--no-python']
    start = torchrun if name == 'torchrun' else request.getfixturevalue(name).command(2)
    testbed.run([*start, distributed, *training(tmp_path / 'results.json')], env=quick.env, timeout=240)
    same(tmp_path / 'results.json', one_rank, 2)
