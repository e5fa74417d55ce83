# SPDX-License-Identifier: GPL-2.0-only
"""until-done: jobs of real Slurms that are signalled, requeued and lose ranks and nodes; launchers of two MPIs."""
import json
import os
import re
import signal
import subprocess
import time

import pytest

import testbed
from testbed import ROOT, debianroot, forkedtorch, launchers, run, slurm as slurm_
from testbed.slurm import wait

pytestmark = pytest.mark.real

UNTIL_DONE = ROOT / 'runscripts/until-done'
MACHINE = {'GLOO_SOCKET_IFNAME': 'lo', 'OMP_NUM_THREADS': '1'}

# 17 epochs; a file `at-EPOCH` says that a rank waits there: for the signal, or for its end
TRAIN = '''
import os, pathlib, signal, sys, time

came = []
signal.signal(signal.SIGUSR1, lambda *_: came.append(True))
rank = int(os.environ.get('SLURM_PROCID') or os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])
saved = pathlib.Path('ckpt/epoch')
epoch = int(saved.read_text()) if saved.exists() else 0

def read(path):
    return pathlib.Path(path).read_text() if os.path.exists(path) else ''

def save():
    pathlib.Path(f'in-{rank}').write_text(f'{epoch}')
    if rank == 0:
        while any(int('0' + read(f'in-{other}')) < epoch for other in range(2)):
            time.sleep(0.01)
        saved.parent.mkdir(exist_ok=True)
        saved.with_suffix('.part').write_text(str(epoch))
        saved.with_suffix('.part').rename(saved)
    while not saved.exists() or int(saved.read_text()) < epoch:
        time.sleep(0.01)

def hold():
    pathlib.Path(f'at-{epoch}-{rank}').touch()
    while not came:
        time.sleep(0.01)
'''
FLOW = TRAIN + '''
while epoch < 17:
    epoch += 1
    save()
    if epoch in (6, 12, 15) and not pathlib.Path(f'at-{epoch}-{rank}').exists():
        hold()
        sys.exit(85)
    if epoch == 9 and rank == 1 and not pathlib.Path('killed').exists():
        pathlib.Path('killed').touch()
        os.kill(os.getpid(), signal.SIGKILL)
'''


class Job:
    """A job of Slurm that may be requeued, in a directory of its own; `output()` of all its runs."""

    def __init__(self, cluster, directory, command, *options, env=None, program=FLOW):
        self.cluster, self.dir = cluster, directory
        directory.mkdir(exist_ok=True)
        (directory / 'train.py').write_text(program)
        (directory / 'job').write_text(f'#!/bin/bash\n{command}\n')
        options = ['-N2', '--ntasks-per-node=1', '--requeue', '--open-mode=append', f'--output={directory}/out', *options]
        self.id = cluster.run('sbatch', '--parsable', *options, directory / 'job', cwd=directory, env=env).stdout.strip()

    def output(self):
        return (self.dir / 'out').read_text() if (self.dir / 'out').exists() else ''

    def state(self):
        """State, and in another word the exit status."""
        return self.shown('JobState'), self.shown('ExitCode').partition(':')[0]

    def steps(self):
        """Processes of slurmstepd, on all nodes."""
        return run(['pgrep', '-f', rf'slurmstepd: \[{self.id}\.'], check=False).stdout.split()

    def shown(self, name):
        text = self.cluster.run('scontrol', '--oneliner', 'show', 'job', self.id).stdout
        return re.search(rf' {name}=(\S+)', text).group(1)

    def wait(self, condition, problem):
        """A requeued job waits for two minutes (AuthInfo=cred_expire in slurm.conf's manual), here for two seconds.

        Not less: slurmd refuses a credential of the second in which the last start ended. And a step that is left on a
        node which was down removes the socket of the next step, which has its number.
        """
        def now():
            if condition():
                return True
            state = self.shown('JobState')
            if state != 'RUNNING' and 'down' in self.cluster.run('sinfo', '-h', '-N', '-o', '%T').stdout:
                self.cluster.run('scontrol', 'update', f'NodeName={self.cluster.nodes[1]}', 'State=RESUME', check=False)
            elif state == 'PENDING' and not self.steps():
                start = self.shown('StartTime')
                if start != 'Unknown' and time.mktime(time.strptime(start, '%Y-%m-%dT%H:%M:%S')) > time.time() + 10:
                    self.cluster.run('scontrol', 'update', f'JobId={self.id}', 'StartTime=now+2', check=False)
            return False
        try:
            wait(now, 240, problem)
        except RuntimeError as error:
            pytest.fail(f'{error}\n{self.output()}', pytrace=False)

    def lose(self, node):
        """The node goes down, and Slurm requeues the job; wait() brings the node back, if it does not come by itself."""
        before = self.restarts()
        self.cluster.run('scontrol', 'update', f'NodeName={node}', 'State=DOWN', 'Reason=test')
        self.wait(lambda: self.restarts() > before, 'Slurm does not requeue it')

    def restarts(self):
        return int(self.shown('Restarts'))

    def wait_at(self, epoch, ranks=2):
        self.wait(lambda: len(list(self.dir.glob(f'at-{epoch}-*'))) == ranks, f'epoch {epoch} is not there')

    def signal(self):
        """What --signal=B:USR1 sends."""
        self.cluster.run('scancel', '--batch', '--signal=USR1', self.id)

    def end(self):
        self.wait(lambda: self.state()[0] not in ('PENDING', 'CONFIGURING', 'RUNNING', 'COMPLETING', 'REQUEUED'), 'no end')
        return self.state()


def lines(output):
    """What until-done said, without numbers of jobs and seconds; 85, or 143 and 137 where srun ends a rank before it ends."""
    said = re.findall(r'^until-done: (.*)', output, re.M)
    said = [re.sub(r'job \d+', 'job N', re.sub(r'ran \d+ s', 'ran N s', line)) for line in said]
    return [re.sub(r'status (85|137|143)\b', 'status N', line) for line in said]


@pytest.fixture
def nodes():
    """Two nodes with the newest Slurm; the training below has the oldest one."""
    testbed.only_root('mounts file systems, for the Slurm of a newer Debian')
    slurm_.clean_up_killed_runs()
    cluster = slurm_.Cluster(debianroot.roots()['sid'], launchers.NODES[:2])
    try:
        yield cluster.start()
    finally:
        cluster.stop()


# examples/training/resume_training.py, held after its second epoch
HELD = f'''
import os, pathlib, signal, sys, time
sys.path.insert(0, {str(ROOT / 'examples/training')!r})
import resume_training as program

came, real, save, rank = [], signal.signal, program.save, os.environ['RANK']
signal.signal = lambda number, handler: real(number, lambda *args: (came.append(True), handler(*args)))

def held(args, model, optimizer, place):
    save(args, model, optimizer, place)
    epoch = place[0] - 1
    mark = pathlib.Path('at-%d-%s' % (epoch, rank))
    if place[1] == 0 and epoch == 2 and not mark.exists():
        mark.touch()
        while not came:
            time.sleep(0.01)

program.save = held
program.main()
'''


def test_training_has_the_losses_of_one_that_was_not_interrupted(separate_nodes, installed_pytorch):
    """To all digits, printed or not; the signal comes in the middle of an epoch, which is not begun again."""
    where = separate_nodes.shared / 'training'
    env = {**forkedtorch.quick(installed_pytorch).env, 'GLOO_SOCKET_IFNAME': 'eth0', 'SLINGTORCH_CACHE_ROOT': separate_nodes.shared}
    start = installed_pytorch.runscripts / 'conda-python-distributed'
    job = Job(separate_nodes, where, f'exec {UNTIL_DONE} --checkpoint ckpt srun {start} train.py --checkpoints ckpt '
              '--epochs 4 --json resumed.json', env=env, program=HELD)
    job.wait_at(2)
    job.signal()
    assert job.end() == ('COMPLETED', '0'), job.output()
    assert lines(job.output())[-1] == 'done: start 2 ran N s, status 0, saved epoch-0005-step-000000', job.output()
    assert re.findall(r'^from ckpt/(.*)', job.output(), re.M) == ['epoch-0003-step-000005']
    assert sorted(os.listdir(where / 'ckpt')) == ['epoch-0004-step-000000', 'epoch-0005-step-000000']
    whole = separate_nodes.srun('-N2', '--ntasks-per-node=1', start, ROOT / 'examples/training/resume_training.py',
                                '--checkpoints', 'whole', '--epochs', '4', '--json', 'whole.json', env=env, cwd=where)
    epochs = re.findall(r'^epoch .*', whole.stdout, re.M)
    assert len(epochs) == 4 and re.findall(r'^epoch .*', job.output(), re.M) == epochs
    found = [json.loads((where / f'{name}.json').read_text()) for name in ('resumed', 'whole')]
    assert found[0]['losses'] == found[1]['losses'] and found[0]['accuracy'] == found[1]['accuracy']


def test_four_allocations_a_killed_rank_and_a_node_that_goes_down(nodes):
    python = f'PATH={os.path.dirname(testbed.sys.executable)}:$PATH'
    job = Job(nodes, nodes.shared / 'flow', f'{python} exec {UNTIL_DONE} --checkpoint ckpt srun python train.py')
    job.wait_at(6)
    job.signal()
    job.wait_at(12)
    job.lose(launchers.NODES[1])
    job.wait_at(15)
    job.signal()
    assert job.end() == ('COMPLETED', '0'), job.output()
    again = 'job N goes back to the queue: '
    # what it may still say, and has to say, where a node goes down
    ends = re.compile(r'(the batch system ends job N|start 4, job N, from epoch; start 3) ?.*')
    said = [ends.sub(r'\1', line) for line in lines(job.output())]
    assert [line for line in said if line != 'the batch system ends job N'] == [
        'start 1, job N, from no checkpoint',
        again + (first := 'start 1 ran N s, status N after SIGUSR1, saved epoch'),
        f'start 2, job N, from epoch; {first}',
        'start 3, job N, from epoch; start 2 ran N s, status N, saved epoch',
        'start 4, job N, from epoch; start 3',
        again + (fourth := 'start 4 ran N s, status N after SIGUSR1, saved epoch'),
        f'start 5, job N, from epoch; {fourth}',
        'done: start 5 ran N s, status 0, saved epoch']
    assert not (job.dir / 'ckpt.starts').exists()


@pytest.mark.parametrize('option, ranks', [('--torchrun=2', 2), ('--stage', 1)])
def test_signal_reaches_python_behind_other_processes(slurm, installed_pytorch, tmp_path, option, ranks):
    program = ('import os, pathlib, signal, sys\n'
               'def save(*_):\n    pathlib.Path("ckpt", os.environ["RANK"]).touch(); sys.exit(85)\n'
               'signal.signal(signal.SIGUSR1, save)\npathlib.Path("ckpt").mkdir(exist_ok=True)\n'
               'if any(pathlib.Path("ckpt").iterdir()): sys.exit()\n'
               'pathlib.Path("at-0-" + os.environ["RANK"]).touch()\nwhile True: signal.pause()\n')
    env = {**installed_pytorch.env, 'SLINGTORCH_CACHE_ROOT': tmp_path, 'SLINGTORCH_STAGE_DIR': slurm.local}
    start = installed_pytorch.runscripts / 'conda-python-distributed'
    job = Job(slurm, tmp_path, f'exec {UNTIL_DONE} --checkpoint ckpt srun {start} {option} train.py', '-N1', env=env,
              program=program)
    job.wait_at(0, ranks)
    job.signal()
    assert job.end() == ('COMPLETED', '0') and len(os.listdir(tmp_path / 'ckpt')) == ranks, job.output()


# --- without waiting for Slurm: PBS's variables and the launchers of two MPIs

HOLDS = TRAIN + 'epoch += 1\nsave()\nhold()\nsys.exit(85)\n'


@pytest.fixture
def begin(mpich, tmp_path):
    """Start until-done with a program and MPICH's mpiexec on two ranks; the Popen."""
    def popen(program, *options, launcher=mpich, **env):
        (tmp_path / 'train.py').write_text(program)
        command = [UNTIL_DONE, '--checkpoint', 'ckpt', *options, *launcher.command(2, testbed.sys.executable, 'train.py')]
        # SLURM_CONF, for kill_leftovers(): MPICH's ranks outlive a launcher that is killed
        env = {**testbed.clean_environ(), 'PBS_JOBID': '77', 'SLURM_CONF': f'{tmp_path}/slurm.conf', **env}
        return subprocess.Popen([str(word) for word in command], env=env, cwd=tmp_path, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    yield popen
    slurm_.kill_leftovers(tmp_path)


def ended(process):
    """Its exit status and what until-done said."""
    output = process.communicate(timeout=120)[0]
    return process.returncode, lines(output), output


@pytest.mark.parametrize('launcher', ['mpich', 'openmpi'])
def test_every_rank_has_the_signal_and_the_next_job_is_submitted(begin, request, launcher, tmp_path):
    process = begin(HOLDS, '--submit', 'echo $PBS_JOBID > next', launcher=request.getfixturevalue(launcher))
    wait(lambda: len(list(tmp_path.glob('at-1-*'))) == 2, 60, 'the ranks do not start')
    process.send_signal(signal.SIGUSR1)
    status, said, output = ended(process)
    assert said[0] == 'start 1, job N, from no checkpoint', output
    assert re.fullmatch(r'job N goes back to the queue: start 1 ran N s, status \w+ after SIGUSR1, saved epoch.*', said[1])
    assert (tmp_path / 'next').read_text() == '77\n'


def test_minutes_are_counted_where_the_batch_system_sends_nothing(begin, tmp_path):
    status, said, output = ended(begin(HOLDS, '--minutes=0', '--grace=1', '--submit=touch next'))
    assert said[-1].startswith('job N goes back to the queue: ') and (tmp_path / 'next').exists(), output


def test_a_signal_cannot_interrupt_the_parsing_of_a_substitution():
    """Bash 5.2 ended with "unexpected EOF" (status 134) in one of 80 starts on a loaded machine."""
    caught = UNTIL_DONE.read_text().partition('\n_hand_over() {')[2]
    assert 'trap ' in caught and re.findall(r'(?m).*(?:\$\((?!\()|<\(|`).*', caught) == []


@pytest.mark.parametrize('start, options, says', [
    ('', ['--requeue'], 'Start this with exec in the script: exec until-done ...'),
    ('exec', ['--no-requeue'], "may not be requeued. Add '#SBATCH --requeue'"),
])
def test_job_that_could_not_go_on_does_not_begin(slurm, tmp_path, start, options, says):
    job = slurm.sbatch(f'#!/bin/bash\n{start} {UNTIL_DONE} --checkpoint {tmp_path}/ckpt srun touch {tmp_path}/begun\n'
                       'exit $?\n', *options)
    assert job.returncode and says in job.output and not os.listdir(tmp_path), job.output
