# SPDX-License-Identifier: GPL-2.0-only
"""The example for Frontier: its batch script on two emulated nodes, killed, and submitted again."""
import os
import pickletools
import re
import shutil
import zipfile

import pytest

import testbed
from testbed import forkedtorch, slurm as slurm_

pytestmark = pytest.mark.real

EXAMPLE = testbed.ROOT / 'examples/frontier'
# one of eight ranks on a node, on one core: the script's own numbers need Frontier's nodes
SMALL = ['--partition=gpu', '--ntasks-per-node=1', '--cpus-per-task=1', '--gpu-bind=none']


def epochs_of(snapshot):
    """How many epochs are finished by what this file says, without PyTorch: the number after that word in its pickle."""
    with zipfile.ZipFile(snapshot) as archive:
        name, = (name for name in archive.namelist() if name.endswith('/data.pkl'))
        words = [arg for op, arg, _ in pickletools.genops(archive.read(name)) if op.name.startswith(('BININT', 'BINUNI'))]
    return words[words.index('epochs') + 1]


class Job:
    """The batch script in a directory of a user, for the PyTorch that was installed."""

    def __init__(self, directory, cluster, pytorch, lmod):
        self.dir, self.cluster, self.pytorch = directory, cluster, forkedtorch.quick(pytorch)
        shutil.copy(EXAMPLE / 'train_ddp.py', directory)
        self.script = (EXAMPLE / 'train.sbatch').read_text()
        init = directory / 'init'
        init.write_text(f'unset BASH_ENV\n{lmod.init}\nmodule use {pytorch.modulepath}\n')
        self.env = {**lmod.env, 'BASH_ENV': init, 'PYTORCH_MODULE': pytorch.module, 'BACKEND': 'gloo', 'SAVE_EVERY': '1',
                    'GLOO_SOCKET_IFNAME': 'lo', 'OMP_NUM_THREADS': '1', 'SLINGTORCH_CACHE_ROOT': directory}

    def alone(self, **env):
        """The program on one rank, without the script; the CompletedProcess."""
        env = {**self.pytorch.env, 'BACKEND': 'gloo', 'SLINGTORCH_CACHE_ROOT': str(self.dir), **env}
        return testbed.run([self.pytorch.runscripts / 'conda-python-distributed', 'train_ddp.py'], env=env, cwd=self.dir,
                           check=False)

    def run(self, epochs, *options):
        """Submit and wait; the Batch."""
        return self.cluster.sbatch(self.script, *SMALL, *options, env={**self.env, 'EPOCHS': str(epochs)}, cwd=self.dir)

    def kill_after_some_snapshots(self):
        """Submit a job that would never end, and kill all of it, without warning, epochs after a snapshot that is kept as
        `early.pt`."""
        (self.dir / 'train.sbatch').write_text(self.script)
        command = ['sbatch', '--parsable', *SMALL, '--output=killed.out', 'train.sbatch']
        env = self.cluster.environ({**self.env, 'EPOCHS': '1000000'})
        number = testbed.run(command, env=env, cwd=self.dir).stdout.strip()
        try:
            slurm_.wait((self.dir / 'snapshot.pt').exists, 240, 'no snapshot')
            shutil.copy(self.dir / 'snapshot.pt', self.dir / 'early.pt')
            early = epochs_of(self.dir / 'early.pt')
            slurm_.wait(lambda: max(self.losses('killed.out'), default=0) >= early + 5, 240, 'no more snapshots')
        finally:
            testbed.run(['scancel', '--signal=KILL', '--full', number], env=env)
        slurm_.wait(lambda: not testbed.run(['squeue', '-h', '-j', number], env=env, check=False).stdout, 60,
                    'the killed job does not end')

    def losses(self, output):
        """{epoch: loss} in what a job printed (text, or the name of its file)."""
        text = (self.dir / output).read_text() if '\n' not in output else output
        return {int(epoch): loss for epoch, loss in re.findall(r'^epoch (\d+) of \d+: loss (\S+),', text, re.M)}


@pytest.fixture
def job(tmp_path, slurm, installed_pytorch, lmod):
    return Job(tmp_path, slurm, installed_pytorch, lmod)


def test_killed_job_goes_on_to_the_same_loss(job):
    """Killed where PyTorch is on the nodes' own storage, and resumed without; then another number of ranks is refused."""
    staged = os.geteuid() == 0      # who gives each emulated node storage of its own
    if staged:
        job.env.update(SLINGTORCH_STAGE_NODES='2', SLINGTORCH_STAGE_DIR=str(job.cluster.local))
    job.kill_after_some_snapshots()
    assert ('staged ' in (job.dir / 'killed.out').read_text()) == staged
    job.env.pop('SLINGTORCH_STAGE_NODES', None)
    before = job.losses('killed.out')
    snapshot = (job.dir / 'snapshot.pt').read_bytes()
    (job.dir / 'early.pt').replace(job.dir / 'snapshot.pt')
    resumed = job.run(max(before))
    assert resumed.returncode == 0, resumed.output
    assert 'staged ' not in resumed.output
    early = int(re.search(r'^2 ranks on cpu, torch \S+: from epoch (\d+) of snapshot.pt$', resumed.output, re.M).group(1))
    again = job.losses(resumed.output)
    # the same epochs a second time
    assert min(again) == early + 1 and len(again) >= 5 and again == {epoch: before[epoch] for epoch in again}
    assert float(before[max(before)]) < float(before[min(before)])

    # what the killed job left is whole
    (job.dir / 'snapshot.pt').write_bytes(snapshot)
    other = job.alone()
    assert other.returncode != 0 and 'the snapshot snapshot.pt was saved with 2 ranks, but this job has 1' in other.stderr
    assert 'Start 2 ranks (srun -n 2)' in other.stderr and (job.dir / 'snapshot.pt').read_bytes() == snapshot


def test_no_gpu_and_a_snapshot_that_is_none(job):
    (job.dir / 'snapshot.pt').write_text('nothing\n')
    done = job.alone()
    assert done.returncode != 0 and 'snapshot.pt cannot be read as a snapshot' in done.stderr
    assert 'remove it to start afresh' in done.stderr and 'Traceback' not in done.stderr
    done = job.alone(BACKEND='')
    assert done.returncode != 0 and 'PyTorch sees no GPU here' in done.stderr and 'export BACKEND=gloo' in done.stderr
