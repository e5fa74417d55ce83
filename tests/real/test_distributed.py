# SPDX-License-Identifier: GPL-2.0-only
"""Layer 5: PyTorch that real `eb` installed, in distributed jobs under real launchers on two emulated nodes.

The global batch of light_training.py is split over the ranks, so every launch must give the losses of one rank; a wrong
rank, world size, address or port cannot.
"""

import contextlib
import json
import os
import pathlib
import shlex
import signal
import subprocess
import time

import pytest

import testbed
from testbed import ROOT, slurm as slurm_

pytestmark = pytest.mark.real

TRAIN = pathlib.Path(__file__).with_name('light_training.py')
TWO_BY_TWO = ('-N2', '--ntasks-per-node=2')
ONE_BY_ONE = ('-N2', '--ntasks-per-node=1')
SECONDS_TO_END = 60  # bound for a job of which one rank was killed; the others sleep 600 s


@pytest.fixture(scope='session')
def pytorch(installed_pytorch, tmp_path_factory):
    """The installation, with the environment of a job on one machine: loopback network, one thread a rank."""
    return installed_pytorch.with_variables(
        GLOO_SOCKET_IFNAME='lo', OMP_NUM_THREADS='1', SLINGTORCH_CACHE_ROOT=str(tmp_path_factory.mktemp('caches')))


@pytest.fixture(scope='session')
def distributed(pytorch):
    """The runscript."""
    return pytorch.runscripts / 'conda-python-distributed'


def training(results):
    """Arguments of the runscript: train, and write the results there."""
    return [TRAIN, results]


@pytest.fixture(scope='session')
def one_rank(pytorch, distributed, tmp_path_factory):
    """Results of one rank, without any launcher."""
    results = tmp_path_factory.mktemp('one') / 'results.json'
    testbed.run([distributed, *training(results)], env=pytorch.env, timeout=300)
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


def finish(process, timeout=240):
    """Both streams of a Popen that must end well."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, out + err
    return out


@contextlib.contextmanager
def ended(*processes):
    """Whatever happens inside, these Popens and what they started are ended afterwards."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


# --- the losses are those of one rank


def test_one_rank_learns(one_rank):
    assert one_rank['world_size'] == 1
    assert one_rank['losses'][-1] < one_rank['losses'][0]


def test_srun_two_nodes(slurm, pytorch, distributed, one_rank, tmp_path):
    slurm.srun(*TWO_BY_TWO, distributed, *training(tmp_path / 'results.json'), env=pytorch.env)
    same(tmp_path / 'results.json', one_rank, 4, nodes_of(2))


@pytest.mark.parametrize('launcher', ['mpirun.openmpi --allow-run-as-root -n 1', 'mpiexec.hydra -n 1'])
def test_job_that_is_submitted_from_inside_an_mpirun(slurm, tmp_path, launcher):
    """Each of its ranks was rank 0 of 1."""
    show = ['-c', 'import os; print(*(os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")))']
    script = ROOT / 'runscripts/conda-python-distributed'
    done = slurm.run(*launcher.split(), 'srun', *TWO_BY_TWO, script, *show, env={'SLINGTORCH_CACHE_ROOT': tmp_path})
    assert sorted(done.stdout.splitlines()) == [f'{rank} 4 {rank % 2} {testbed.NODES[0]}' for rank in range(4)]
    assert done.stderr.count('are left over from an outer start') == 1


def test_torchrun_starts_the_workers_of_each_node(slurm, pytorch, distributed, one_rank, tmp_path):
    slurm.srun('-N2', '--ntasks-per-node=1', distributed, '--torchrun=2', *training(tmp_path / 'results.json'),
               env=pytorch.env)
    same(tmp_path / 'results.json', one_rank, 4, nodes_of(2))


def test_torchrun_outlives_a_signal_on_which_its_workers_save(slurm, pytorch, distributed, tmp_path):
    """scancel and --signal of Slurm reach the agent as well, and it has no handler for this one."""
    program = tmp_path / 'save.py'
    program.write_text(
        'import os, pathlib, signal, sys, time\n'
        f'own = pathlib.Path("{tmp_path}", os.environ["RANK"])\n'
        'def save(*_):\n    own.with_suffix(".saved").touch()\n    sys.exit()\n'
        'signal.signal(signal.SIGUSR1, save)\nown.with_suffix(".ready").touch()\ntime.sleep(600)\n')
    job = slurm.popen(*ONE_BY_ONE, '--job-name=saves', distributed, '--torchrun=2', program, env=pytorch.env)
    with ended(job):
        slurm_.wait(lambda: len(list(tmp_path.glob('*.ready'))) == 4, 120, 'not all workers start',
                    lambda: job.poll() is None or pytest.fail(''.join(job.communicate()), pytrace=False))
        slurm.run('scancel', '--name=saves', '--signal=USR1')
        finish(job)
    assert len(list(tmp_path.glob('*.saved'))) == 4


def test_two_jobs_at_the_same_time_on_the_same_nodes(slurm, pytorch, distributed, one_rank, tmp_path):
    results = [tmp_path / 'a.json', tmp_path / 'b.json']
    jobs = [slurm.popen(*ONE_BY_ONE, distributed, *training(path), env=pytorch.env) for path in results]
    with ended(*jobs):
        slurm_.wait(
            lambda: testbed.run(['squeue', '-h', '-t', 'R', '-o', '%N'], env=slurm.env).stdout.split()
            == ['nid[000001-000002]'] * 2,
            60,
            'the two jobs do not run together',
        )
        for job in jobs:
            finish(job)
    for path in results:
        same(path, one_rank, 2, nodes_of(1))


def test_two_steps_of_a_job_at_the_same_time(slurm, pytorch, distributed, one_rank, tmp_path):
    results = [tmp_path / 'a.json', tmp_path / 'b.json']
    step = 'srun --exact -N2 -n2 --ntasks-per-node=1 {} &\npids+=($!)\n'
    script = '#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2\npids=()\n'
    script += ''.join(step.format(shlex.join(map(str, [distributed, *training(path)]))) for path in results)
    script += 'for i in {1..300}; do squeue -h -s -j $SLURM_JOB_ID -o %i > $STEPS\n'
    script += '[[ $(grep -c "\\.[01]$" $STEPS) == 2 ]] && break; sleep 0.1; done\n'
    script += 'status=0\nfor pid in "${pids[@]}"; do wait $pid || status=$?; done\nexit $status\n'
    batch = slurm.sbatch(script, env={**pytorch.env, 'STEPS': tmp_path / 'steps'})
    assert batch.returncode == 0, batch.output
    steps = (tmp_path / 'steps').read_text()
    assert f'{batch.jobid}.0' in steps and f'{batch.jobid}.1' in steps, 'the steps did not run together'
    for path in results:
        same(path, one_rank, 2, nodes_of(1))


def test_batch_script(slurm, pytorch, distributed, one_rank, tmp_path):
    script = f'''#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
srun $RUNSCRIPTS/conda-python-distributed {shlex.join(map(str, training(tmp_path / "results.json")))}
'''
    batch = slurm.sbatch(script, env=pytorch.env)
    assert batch.returncode == 0, batch.output
    same(tmp_path / 'results.json', one_rank, 2, nodes_of(1))


def test_step_smaller_than_its_job(slurm, pytorch, distributed, one_rank, tmp_path):
    """The step counts, not the job; and a step may be on the second node alone."""
    script = f'''#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
srun -N1 -n2 -w {testbed.NODES[1]} {shlex.join(map(str, [distributed, *training(tmp_path / "results.json")]))}
'''
    batch = slurm.sbatch(script, env=pytorch.env)
    assert batch.returncode == 0, batch.output
    same(tmp_path / 'results.json', one_rank, 2, [testbed.NODES[1]] * 2)


def torchrun(pytorch, ranks, *command):
    """Command line of torchrun with the runscript as the program of each rank."""
    return [pytorch.root / 'bin/torchrun', '--standalone', f'--nproc-per-node={ranks}', '--no-python', *command]


def launch(request, name, ranks, *command):
    """Command line that starts `command` on so many ranks of this machine."""
    if name == 'torchrun':
        return torchrun(request.getfixturevalue('pytorch'), ranks, *command)
    return request.getfixturevalue(name).command(ranks, *command)


LAUNCHERS = pytest.mark.parametrize('name', ['mpich', 'openmpi', 'torchrun'])


@LAUNCHERS
def test_launcher_on_one_node(request, name, pytorch, distributed, one_rank, tmp_path):
    testbed.run(launch(request, name, 3, distributed, *training(tmp_path / 'results.json')), env=pytorch.env,
                timeout=240)
    same(tmp_path / 'results.json', one_rank, 3)


# --- errors

EXIT_3 = ['-c', 'import sys; sys.exit(3)']


def test_status_through_srun(slurm, pytorch, distributed):
    assert slurm.srun(*TWO_BY_TWO, distributed, *EXIT_3, env=pytorch.env, check=False).returncode == 3


@LAUNCHERS
def test_status_through_launcher(request, name, pytorch, distributed):
    done = testbed.run(launch(request, name, 4, distributed, *EXIT_3), env=pytorch.env, check=False)
    assert done.returncode == {'mpich': 3, 'openmpi': 3}.get(name, done.returncode)
    assert done.returncode != 0


def sleepers(directory):
    """Arguments of the runscript: each rank leaves its process number in the directory and sleeps 10 minutes."""
    program = directory / 'sleepers.py'
    program.write_text(
        'import os, time\nrank = os.environ["RANK"]\n'
        f'with open(f"{directory}/part{{rank}}", "w") as stream:\n    stream.write(str(os.getpid()))\n'
        f'os.rename(f"{directory}/part{{rank}}", f"{directory}/pid{{rank}}")\ntime.sleep(600)\n'
    )
    return [program]


def kill_rank_1(process, directory, ranks):
    """Kill rank 1 when all have started; the job must end soon, with an error, and leave no process."""
    with ended(process):
        slurm_.wait(lambda: all((directory / f'pid{rank}').exists() for rank in range(ranks)), 60,
                    'not all ranks start',
                    lambda: process.poll() is None or pytest.fail(''.join(process.communicate()), pytrace=False))
        pids = [int((directory / f'pid{rank}').read_text()) for rank in range(ranks)]
        start = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        process.communicate(timeout=SECONDS_TO_END)
        assert process.returncode != 0
        slurm_.wait(lambda: not any(alive(pid) for pid in pids), SECONDS_TO_END, 'ranks are left')
        assert time.monotonic() - start < SECONDS_TO_END


def alive(pid):
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        return pathlib.Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] not in 'ZX'
    except OSError:
        return False


def test_killed_rank_ends_the_job_under_srun(slurm, pytorch, distributed, tmp_path):
    job = slurm.popen(*TWO_BY_TWO, '--kill-on-bad-exit=1', distributed, *sleepers(tmp_path), env=pytorch.env)
    kill_rank_1(job, tmp_path, 4)


@LAUNCHERS
def test_killed_rank_ends_the_job_under_launcher(request, name, pytorch, distributed, tmp_path):
    command = launch(request, name, 4, distributed, *sleepers(tmp_path))
    job = subprocess.Popen(list(map(str, command)), env=pytorch.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, start_new_session=True)
    kill_rank_1(job, tmp_path, 4)


def test_batch_script_without_srun_is_an_error(slurm, pytorch, distributed):
    """One rank that believes it is the whole job would waste the other nodes in silence."""
    batch = slurm.sbatch(f'#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2\n"{distributed}" -c "print(1)"\n',
                         env=pytorch.env)
    assert batch.returncode != 0
    assert 'srun' in batch.output and 'conda-python-distributed' in batch.output


def test_world_size_that_srun_does_not_start_is_an_error(slurm, pytorch, distributed):
    done = slurm.srun(*TWO_BY_TWO, distributed, '-c', 'print(1)', env={**pytorch.env, 'WORLD_SIZE': '8'}, check=False)
    assert done.returncode != 0
    assert 'WORLD_SIZE' in done.stderr and '8' in done.stderr and '4' in done.stderr
    assert not done.stdout.strip()


# --- GPUs as Slurm hands them out

SHOW_GPUS = [
    '-c',
    'import os; print(os.environ["SLURMD_NODENAME"], os.environ["LOCAL_RANK"], '
    'os.environ.get(os.environ.get("SLINGTORCH_GPU_VISIBILITY", "ROCR_VISIBLE_DEVICES")))',
]


def gpus(slurm, pytorch, distributed, option, variable):
    """{(node, local rank): what the variable says} of four tasks on two nodes."""
    env = {**pytorch.env, 'SLINGTORCH_GPU_VISIBILITY': variable}
    out = slurm.srun(*TWO_BY_TWO, option, distributed, *SHOW_GPUS, env=env).stdout
    return {tuple(line.split()[:2]): line.split()[2] for line in out.splitlines()}


def each_node(first, second):
    return {(node, rank): shown for node in testbed.NODES for rank, shown in (('0', first), ('1', second))}


@pytest.mark.parametrize('variable', ['ROCR_VISIBLE_DEVICES', 'CUDA_VISIBLE_DEVICES'])
def test_gpus_of_the_node_are_shared_out(slurm, pytorch, distributed, variable):
    assert gpus(slurm, pytorch, distributed, '--gpus-per-node=4', variable) == each_node('0,1', '2,3')


@pytest.mark.parametrize('variable', ['ROCR_VISIBLE_DEVICES', 'CUDA_VISIBLE_DEVICES'])
def test_gpus_of_the_task_stay(slurm, pytorch, distributed, variable):
    assert gpus(slurm, pytorch, distributed, '--gpus-per-task=1', variable) == each_node('0', '1')


def test_gpus_are_left_alone_unless_asked(slurm, pytorch, distributed):
    assert gpus(slurm, pytorch, distributed, '--gpus-per-node=4', None) == each_node('0,1,2,3', '0,1,2,3')
