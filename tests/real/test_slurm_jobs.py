# SPDX-License-Identifier: GPL-2.0-only
"""The job scripts of examples/slurm as a user edits and submits them."""
import os
import re
import shlex
import shutil

import pytest

from testbed import ROOT, missing, run, stagedenv
from testbed.easybuild import BIN
from testbed.slurm import wait

pytestmark = pytest.mark.real

JOBS = ROOT / 'examples/slurm'
DDP = JOBS / 'ddp_pytorch.job'
# what a job on one machine needs
MACHINE = {'GLOO_SOCKET_IFNAME': 'lo', 'OMP_NUM_THREADS': '1'}


def test_training_replaces_nothing(submit, installed_pytorch, tmp_path):
    """Also what the submitting shell had loaded stays out. With the real program: test_readme.py, test_first_hour."""
    (tmp_path / 'ddp_training.py').write_text(
        'import os, sys\nos.makedirs(sys.argv[2], exist_ok=True)\n'
        'open(f"{sys.argv[2]}/rank-{os.environ[\'RANK\']}-of-{os.environ[\'WORLD_SIZE\']}", "x")\n')
    (tmp_path / 'model.pt').write_text('PRECIOUS')
    words = {'PyTorch/2.15.0-cuda-13.2': installed_pytorch.module}
    env = {**MACHINE, 'EASYBUILD_PREFIX': installed_pytorch.modulepath.parents[1], 'SLINGTORCH_CACHE_ROOT': tmp_path}
    job = submit(DDP, words, '--job-name=mine', '--gpus-per-node=1', '--ntasks-per-node=1', **env)
    assert job.returncode == 0, job.output
    assert (tmp_path / 'model.pt').read_text() == 'PRECIOUS'
    assert sorted(os.listdir(tmp_path / f'mine-{job.jobid}')) == ['rank-0-of-2', 'rank-1-of-2']
    # of the runscript, which finds processors' PyTorch in a job with GPUs: shown, although it goes to another file
    assert 'this job has 1 GPUs on each node, but the PyTorch in ' in job.output


def test_errors_of_the_program_come_last(submit, image_env, tmp_path):
    (tmp_path / 'train.py').write_text(
        'import os, signal\nif os.environ["RANK"] == "5":\n    raise ValueError("the loss is nan")\nsignal.pause()\n')
    words = {'PyTorch/2.15.0-cuda-13.2': image_env.module, 'ddp_training.py': 'train.py'}
    job = submit(DDP, words, EASYBUILD_PREFIX=image_env.modulepath.parents[1])
    assert job.returncode and 'task 5: Exited with exit code 1' in job.output
    assert 'ValueError: the loss is nan' in job.output.splitlines()[-2:], job.output     # and one line of slurmstepd


def test_module_that_does_not_load_ends_the_job(submit, image_env):
    job = submit(DDP, {}, EASYBUILD_PREFIX=image_env.modulepath.parents[1])
    assert job.returncode == 1 and 'PyTorch/2.15.0-cuda-13.2' in job.output and 'srun' not in job.output


def test_requeued_job_keeps_what_its_ranks_said(submit, image_env):
    """Slurm starts it again under the same number, and would empty the file."""
    words = {'PyTorch/2.15.0-cuda-13.2': image_env.module, 'ddp_training.py': '-c pass',
             'srun --kill': 'echo earlier > "$name.err"\nsrun --kill'}
    job = submit(DDP, words, EASYBUILD_PREFIX=image_env.modulepath.parents[1])
    assert job.returncode == 0 and 'earlier' in job.output


def test_job_script_without_a_job(tmp_path):
    (tmp_path / 'init').write_text('module() { :; }\nsrun() { touch started; }\n')
    done = run(['bash', DDP], env={'BASH_ENV': tmp_path / 'init'}, cwd=tmp_path, check=False)
    assert done.returncode == 1 and f'SLURM_JOB_ID: is not set: sbatch {DDP}' in done.stderr
    assert os.listdir(tmp_path) == ['init']


def test_build_without_the_bundle_ends_before_eb(submit, eb_env):
    job = submit(JOBS / 'venv_build.job', {'eb --max': 'echo eb was started\neb --max'}, **eb_env.env)
    assert job.returncode and 'slingtorch-env/bin/slingtorch: No such file' in job.output
    assert 'eb was started' not in job.output


def test_build(submit, eb_env, tmp_path):
    """Installed in a job, and found by the next one."""
    files = stagedenv.write_easyconfig(tmp_path, image=False)
    words = {'slingtorch-env/bin': BIN, 'PyTorch-2.15.0-cuda-13.2.eb\n# For': f'{files.easyconfig}\n# For'}
    job = submit(JOBS / 'venv_build.job', words, **{**eb_env.env, **files.pip_env})
    assert 'COMPLETED: Installation ended successfully' in job.output and job.returncode == 0, job.output
    (tmp_path / 'train.py').write_text('import sys; print(sys.prefix)')
    words = {'PyTorch/2.15.0-cuda-13.2': 'PyTorch/0.1-tiny', 'ddp_training.py': 'train.py'}
    job = submit(DDP, words, EASYBUILD_PREFIX=eb_env.prefix)
    assert job.returncode == 0 and job.output.count(f'{eb_env.prefix}/software/PyTorch/0.1-tiny\n') == 8, job.output


@pytest.mark.parametrize('name', ['ddp', 'horovod'])
def test_job_scripts_of_cirrus(submit, image_env, name):
    """With this cluster's cores, and a program that says who it is; Horovod itself is in tests/stages."""
    program = "-c 'import os; print(os.environ[\"RANK\"], os.environ[\"WORLD_SIZE\"], os.environ[\"SLURMD_NODENAME\"])'"
    words = {f'{name}_training.py': program, '--cpus-per-task=10': '--cpus-per-task=1'}
    job = submit(ROOT / f'examples/cirrus/{name}.sbatch', words, PYTORCH_MODULE=image_env.module,
                 MODULEPATH=image_env.modulepath)
    ranks = sorted(line.split() for line in job.output.splitlines() if line[0] in '01234567')
    assert job.returncode == 0 and [rank for rank, *_ in ranks] == list('01234567'), job.output
    assert all(size == '8' for _, size, _ in ranks) and len({node for *_, node in ranks}) == 2


def test_shellcheck_and_length():
    checker = shutil.which('shellcheck') or missing('shellcheck')
    jobs = [*sorted(JOBS.iterdir()), *(JOBS.parent / name / 'until_done.job' for name in ('pbs', 'flux'))]
    run([checker, *jobs], cwd=ROOT)
    assert len(jobs) == 8 and all(len(job.read_text().splitlines()) <= 30 for job in jobs)


def test_unknown_partition_and_constraint(slurm):
    """Slurm's own messages, which the page repeats with a remedy."""
    page = (ROOT / 'docs/systems/slurm.md').read_text()
    for option, message in (('-p', 'Invalid partition name specified'), ('-C', 'Invalid feature specification')):
        done = run(['sbatch', option, 'none', DDP], env=slurm.env, check=False)
        assert done.returncode != 0 and message in done.stderr and f'`{message}`' in page


def test_job_of_easybuild(slurm, eb_env, tmp_path):
    """The lines of docs/systems/slurm.md, with another easyconfig."""
    page = (ROOT / 'docs/systems/slurm.md').read_text()
    line = re.search(r'^    (SBATCH_PARTITION=.* eb --job .*\\\n.*)\.eb$', page, re.M).group(1).replace('\\\n', '')
    files = stagedenv.write_easyconfig(tmp_path, image=False)
    command = shlex.split(line.replace('PARTITION ', 'gpu ').rpartition(' ')[0])
    done = run(['env', *command, files.easyconfig], env={key: value for key, value in {**eb_env.env, **files.pip_env, 'SLURM_CONF':
               slurm.env['SLURM_CONF']}.items() if value is not None}, cwd=tmp_path)
    jobid = re.search(r'PyTorch-0.1-tiny \(PyTorch/0.1-tiny\): (\d+)', done.stdout).group(1)
    wait(lambda: not run(['squeue', '-h', '-j', jobid], env=slurm.env, check=False).stdout.strip(), 240, 'the job does not end')
    output = (tmp_path / f'PyTorch-0.1-tiny-{jobid}.out').read_text()
    assert 'COMPLETED: Installation ended successfully' in output, output
    assert (eb_env.modulepath / 'PyTorch/0.1-tiny.lua').exists()
