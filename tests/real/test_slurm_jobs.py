# SPDX-License-Identifier: GPL-2.0-only
"""The job scripts of examples/slurm as a user submits them, with nothing edited: examples/slurm/*.job."""
import os
import re
import shlex
import shutil

import pytest

from testbed import ROOT, images, missing, run, runscripts_of_another_machine, stagedenv
from testbed.slurm import wait

pytestmark = pytest.mark.real

JOBS = ROOT / 'examples/slurm'
DDP = JOBS / 'ddp_pytorch.job'
BUILD = JOBS / 'venv_build.job'
# what a job on one machine needs, and Open MPI where root runs it
MACHINE = {'GLOO_SOCKET_IFNAME': 'lo', 'OMP_NUM_THREADS': '1', 'OMPI_ALLOW_RUN_AS_ROOT': '1',
           'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1'}
SHOW = ['import os', 'print(*(os.environ.get(name) for name in ("RANK", "LOADEDMODULES", "OTHER", "WANTED")), sep="|")']


def final_loss(job):
    assert job.returncode == 0, job.output
    return re.search(r'^final loss (\S+)$', job.output, re.M).group(1)


@pytest.fixture(scope='module')
def train(slurm, installed_pytorch, tmp_path_factory):
    """A function: train the example by ddp_pytorch.job with these variables and options of sbatch; the ended job."""
    home = tmp_path_factory.mktemp('train')
    env = {**MACHINE, 'EASYBUILD_PREFIX': installed_pytorch.modulepath.parents[1], 'SLINGTORCH_CACHE_ROOT': home}

    def submit(*options, **variables):
        return slurm.sbatch(DDP, *options, arguments=['--epochs', '1', '--output-dir', home], env={**env, **variables}, cwd=home)

    return submit


@pytest.fixture(scope='module')
def loss(train):
    """The loss of ranks that srun starts, one on each node."""
    job = train('--ntasks-per-node=1')
    # nothing said which module
    assert job.output.startswith('ddp_pytorch: PyTorch/2.13.0-local-cpu, the newest of 1 that fit: this job uses no GPUs')
    assert '2 nodes (nid[000001-000002]), 1 ranks and 0 GPUs on each, srun, PyTorch/2.13.0-local-cpu' in job.output
    return final_loss(job)


@pytest.mark.parametrize('options,variables,ranks', [
    (['--ntasks-per-node=1'], {'LAUNCHER': 'torchrun', 'MASTER_ADDR': 'nid000001:29401'}, 1),
    (['--ntasks-per-node=2'], {'LAUNCHER': 'mpirun', 'MODULE': 'PyTorch/2.13.0-local-cpu'}, 2),
])
def test_every_launcher_gives_the_same_loss(train, loss, options, variables, ranks):
    job = train(*options, **variables)
    assert final_loss(job) == loss
    assert f', {ranks} ranks and ' in job.output
    assert ("MASTER_ADDR='nid000001:29401' is taken apart" in job.output) == ('MASTER_ADDR' in variables)


def test_pytorch_for_processors_on_gpus_is_refused(train):
    job = train('--ntasks-per-node=2', '--gpus-per-node=2', MODULE='PyTorch/2.13.0-local-cpu')
    assert job.returncode == 1 and 'epoch' not in job.output
    assert 'is for processors, and this job has 2 GPUs on each node: MODULE=NAME of another one' in job.output


def test_container_gives_the_same_loss(train, loss, lmod):
    image = images.pytorch(lmod)
    job = train('--ntasks-per-node=1', USE_CONTAINER='1', SIF=image, PATH=f'{images.runtime()}:{os.environ["PATH"]}')
    assert final_loss(job) == loss
    assert f', {image}, ' in job.output


# --- a small environment from here on: nothing is trained


@pytest.fixture
def job(slurm, image_env, tmp_path):
    """A function: run a program of some lines by ddp_pytorch.job with these variables and options; the ended job."""
    script = tmp_path / 'my train.py'

    def submit(*options, program=SHOW, **variables):
        script.write_text('\n'.join(program))
        env = {'EASYBUILD_PREFIX': image_env.modulepath.parents[1], 'MODULE': image_env.module, **variables}
        return slurm.sbatch(DDP, *options, arguments=[script.name], env=env, cwd=tmp_path)

    return submit


@pytest.mark.parametrize('options,variables,message', [
    ([], {'LAUNCHER': 'mpiexec'}, 'LAUNCHER=mpiexec is none of srun, mpirun, torchrun'),
    ([], {'HOROVOD': 'horovod', 'LAUNCHER': 'torchrun'}, 'LAUNCHER=torchrun is none of srun, mpirun\n'),
    ([], {'GPUS_PER_RANK': 'two'}, 'GPUS_PER_RANK=two is no number of GPUs'),
    ([], {'TRAIN_SCRIPT': 'nowhere.py'}, "there is no training script 'nowhere.py' (in "),
    ([], {'MODULE': 'PyTorch/99'}, 'module PyTorch/99 cannot be loaded'),
    (['--gpus-per-node=2'], {'MODULE': ''}, "no PyTorch for these GPUs: no driver of NVIDIA's or AMD's GPUs is loaded here"),
    ([], {'MODULE': ''}, 'that fits is installed here (this job uses no GPUs'),
    ([], {'MODULES': 'nompi/1'}, 'module nompi/1 cannot be loaded'),
    ([], {'EASYBUILD_PREFIX': '/nowhere'}, 'There is no /nowhere/modules/all: is EASYBUILD_PREFIX the one of the installation?'),
    ([], {'USE_CONTAINER': '1', 'CONTAINER_MODULE': ''}, "CONTAINER_MODULE=NAME, or an image, SIF=FILE (SIF is '')"),
    ([], {'VENV': 'nowhere'}, 'VENV=nowhere is no environment: there is no nowhere/bin/activate'),
    ([], {'USE_CONTAINER': 'yes'}, 'USE_CONTAINER=yes is neither 1 nor 0'),
    ([], {'SIF': '/some.sif'}, 'this names a container, /some.sif: set USE_CONTAINER=1'),
    ([], {'USE_CONTAINER': '1', 'SIF': '/nowhere.sif'}, "SIF=FILE (SIF is '/nowhere.sif')"),
    ([], {'USE_CONTAINER': '1', 'SIF': str(DDP)}, 'is no image: it begins neither as SIF nor as squashfs does'),
    (['--ntasks=3'], {'LAUNCHER': 'torchrun'}, '3 tasks do not fit 2 nodes: sbatch --nodes=2 --ntasks-per-node=N'),
    (['--gpus-per-node=4'], {'LAUNCHER': 'torchrun'}, '2 ranks and 4 GPUs on each node: sbatch --ntasks-per-node=4'),
    ([], {'SLINGTORCH_GPU_VISIBILITY': 'CUDA_VISIBLE_DEVICES'}, 'is for GPUs, and this job has none: sbatch --gpus-per-node=N'),
])
def test_what_cannot_be_right_is_said_at_once(job, options, variables, message):
    done = job(*options, **variables)
    assert done.returncode != 0 and message in done.output
    assert '|' not in done.output


@pytest.mark.parametrize('cuda,warned', [('13.2', 2), ('12.8', 0)])
def test_module_of_another_cuda_than_the_driver(job, image_env, tmp_path, cuda, warned):
    """MODULE is taken as it is named; each node says once what its driver is too old for, and what it runs."""
    module = tmp_path / f'modules/all/PyTorch/2.15.0-cuda-{cuda}.lua'
    module.parent.mkdir(parents=True)
    own = (image_env.modulepath / f'{image_env.module}.lua').read_text()
    driver = tmp_path / 'version'
    driver.write_text('NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Wed Jul 14 19:13:55 UTC 2021\n')
    scripts = runscripts_of_another_machine(image_env.runscripts, tmp_path / 'runscripts', {
        '_nvidia_driver': driver, '_machine': 'x86_64'})
    module.write_text(f'{own}\nsetenv("SLINGTORCH_CUDA_VERSION", "{cuda}")\nsetenv("RUNSCRIPTS", "{scripts}")\n'
                      f'prepend_path("PATH", "{scripts}")\n')
    done = job('--gpus-per-node=2', MODULE=f'PyTorch/2.15.0-cuda-{cuda}',
               EASYBUILD_INSTALLPATH_MODULES=tmp_path / 'modules')
    assert done.returncode == 0, done.output
    assert f', srun, PyTorch/2.15.0-cuda-{cuda}, ' in done.output
    assert len(re.findall(r'^\d\|.*PyTorch/2.15.0-cuda-', done.output, re.M)) == 4, done.output
    words = (f"the driver of this node's GPUs is 550, and this PyTorch is for CUDA {cuda}, which needs 580 or newer: "
             "without NVIDIA's cuda-compat no GPU will be found. eb PyTorch-2.10.0-cuda-12.8.eb installs one that this "
             "driver runs")
    assert done.output.count(words) == warned and done.output.count('the driver of this') == warned


def test_every_task_of_a_job_array_finds_the_bundle(slurm, tmp_path):
    """Slurm shows all of them for the number of the last one."""
    run(['sbatch', '--wait', '--array=1-2', f'--output={tmp_path}/%a.out', DDP, 'nowhere.py'], env=slurm.env, check=False, cwd=tmp_path)
    for task in (1, 2):
        assert f'Name yours: sbatch {DDP} train.py\n' in (tmp_path / f'{task}.out').read_text()


@pytest.mark.parametrize('options,variables', [(['--gpus-per-node=2'], {}), ([], {'MODULE': 'PyTorch/0.1-tiny'})])
def test_plain_job(slurm, image_env, lmod, tmp_path, options, variables):
    """train.sbatch, for GPUs and without: one rank for each task, in the order of the tasks, with its arguments."""
    modules = tmp_path / 'modules/PyTorch'
    modules.mkdir(parents=True)
    for name in ('0.1-tiny', '2.15.0-cuda-13.2'):
        shutil.copy(image_env.modulepath / f'{image_env.module}.lua', modules / f'{name}.lua')
    (tmp_path / 'init').write_text(f'unset BASH_ENV\n{lmod.init}\nmodule use {modules.parent}\n')
    (tmp_path / 'train.py').write_text('\n'.join([*SHOW, 'import sys', 'print(sys.argv[1:])']))
    env = {**lmod.env, 'BASH_ENV': tmp_path / 'init', **variables}
    done = slurm.sbatch(JOBS / 'train.sbatch', *options, arguments=['train.py', 'a b'], env=env, cwd=tmp_path)
    module = variables.get('MODULE', 'PyTorch/2.15.0-cuda-13.2')
    assert done.returncode == 0, done.output
    assert sorted(re.findall(r'^(\d)\|(\S+?)\|', done.output, re.M)) == [(str(rank), module) for rank in range(4)]
    assert done.output.count("['a b']") == 4
    (tmp_path / 'train.py').write_text('import os, time\nif os.environ["RANK"] == "3":\n    raise ValueError("nan")\n'
                                       'time.sleep(600)\n')
    done = slurm.sbatch(JOBS / 'train.sbatch', *options, arguments=['train.py'], env=env, cwd=tmp_path)
    assert done.returncode != 0 and 'ValueError: nan' in done.output.splitlines()[-5:], done.output
    done = slurm.sbatch(JOBS / 'train.sbatch', *options, env=env, cwd=tmp_path)
    assert done.returncode != 0 and 'name your training script: sbatch train.sbatch train.py' in done.output


def test_only_for_batch_jobs(slurm, tmp_path):
    done = run(['salloc', '-N1', 'bash', DDP], env=slurm.env, check=False, cwd=tmp_path)
    assert done.returncode != 0 and f'this is no batch job: sbatch {DDP}' in done.stderr
    build = JOBS / 'venv_build.job'
    done = run(['bash', build], env=slurm.env, check=False, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == f'venv_build.job: this is no batch job: sbatch {build}\n'


def test_modules_of_the_submitting_shell_stay_out(job, image_env, lmod, tmp_path):
    """Its modules are not those that PyTorch was installed with, and a job must not depend on who submits it."""
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other/1.lua').write_text('setenv("OTHER", "loaded")\n')
    shell = lmod.load('other/1', modulepath=[tmp_path])
    assert shell['OTHER'] == 'loaded'
    done = job('--export=ALL', **{name: shell[name] for name in shell if re.match('MODULE|LOADED|_LM|LMOD|_Module|OTHER', name)})
    assert sorted(done.output.splitlines()[1:]) == [f'{rank}|{image_env.module}|None|None' for rank in range(4)], done.output
    # srun passes on what sbatch did
    done = job('--export=EASYBUILD_PREFIX,MODULE,OTHER', OTHER='mine')
    assert sorted(done.output.splitlines()[1:]) == [f'{rank}|{image_env.module}|mine|None' for rank in range(4)], done.output


def test_shellcheck():
    checker = shutil.which('shellcheck') or missing('shellcheck')
    run([checker, '-x', *JOBS.glob('*.job')], cwd=ROOT)


def test_unknown_partition_and_constraint(slurm):
    """Slurm's own messages, which the page repeats with a remedy."""
    page = (ROOT / 'docs/systems/slurm.md').read_text()
    for option, message in (('-p', 'Invalid partition name specified'), ('-C', 'Invalid feature specification')):
        done = run(['sbatch', option, 'none', DDP], env=slurm.env, check=False)
        assert done.returncode != 0 and message in done.stderr and f'`{message}`' in page


# --- venv_build.job


@pytest.fixture
def build(slurm, eb_env, tmp_path):
    """A function: install a small environment by venv_build.job with these arguments and variables; the ended job."""
    files = stagedenv.write_easyconfig(tmp_path, image=False)

    def submit(*arguments, **variables):
        return slurm.sbatch(BUILD, arguments=[files.easyconfig, *arguments], env={**eb_env.env, **files.pip_env, **variables}, cwd=tmp_path)

    return submit


def test_build_brings_its_modules_into_every_job(build, eb_env, job, tmp_path):
    modules = tmp_path / 'site'
    (modules / 'wanted').mkdir(parents=True)
    wanted = modules / 'wanted/1.lua'
    wanted.write_text('setenv("WANTED", "loaded")\n')
    site = {'MODULEPATH': modules}
    done = build(MODULES='wanted/1', HTTPS_PROXY='http://me:secret@proxy:3128', no_proxy='localhost', **site)
    assert done.returncode == 0, done.output
    assert 'https_proxy=http://...@proxy:3128\nvenv_build.job: no_proxy=localhost\n' in done.output
    assert 'secret' not in done.output

    here = {'EASYBUILD_PREFIX': eb_env.prefix, 'MODULE': 'PyTorch/0.1-tiny', **site}
    done = job('--ntasks-per-node=1', **here)
    assert sorted(done.output.splitlines()[1:]) == [f'{rank}|wanted/1:PyTorch/0.1-tiny|None|loaded' for rank in range(2)], done.output
    wanted.unlink()
    done = job(**here)
    assert done.returncode != 0 and 'or one that it was installed with is gone' in done.output


def test_environment_that_a_job_may_be_using_is_not_overwritten(build, eb_env, slurm, tmp_path):
    installed = build()
    assert installed.returncode == 0, installed.output
    other = run(['sbatch', '--parsable', '--job-name=train', '--output=/dev/null', '--wrap', 'sleep 600'], env=slurm.env).stdout.strip()
    try:
        wait(lambda: run(['squeue', '-h', '-j', other, '-o', '%T'], env=slurm.env).stdout.strip() == 'RUNNING', 60, 'no job runs')
        for refused in (build('--rebuild'), build('--force'), build(EASYBUILD_REBUILD='1')):
            assert refused.returncode != 0 and f'    {other} (train)\n' in refused.output, refused.output
            assert 'OVERWRITE=1' in refused.output and 'EasyBuild' not in refused.output
        assert 'is already installed' in build().output
        assert build('--rebuild', '--dry-run', OVERWRITE='1').returncode == 0
    finally:
        run(['scancel', other], env=slurm.env)


def test_build_without_the_bundle(slurm, build):
    done = build(PATH='/usr/bin:/bin')
    assert done.returncode != 0 and 'there is no eb in this job' in done.output


@pytest.mark.parametrize('arguments,message', [
    (['PyTorch-2.14.1'], "'PyTorch-2.14.1' is neither a file NAME.eb nor an option of eb"),
    (['--rebuild', 'PyTorch-2.14.1.eb'], 'one NAME.eb at a time, and before the options'),
])
def test_no_other_software_than_the_named_one_is_built(slurm, eb_env, arguments, message):
    done = slurm.sbatch(BUILD, arguments=arguments, env={**eb_env.env, 'OVERWRITE': '1'})
    assert done.returncode != 0 and message in done.output
    assert not eb_env.prefix.exists() or not list(eb_env.prefix.glob('software/*'))


def test_job_of_easybuild(slurm, eb_env, tmp_path):
    """The lines of docs/systems/slurm.md, with another easyconfig."""
    page = (ROOT / 'docs/systems/slurm.md').read_text()
    line = re.search(r'^    (SBATCH_PARTITION=.* eb --job .*)\.eb$', page, re.M).group(1)
    files = stagedenv.write_easyconfig(tmp_path, image=False)
    command = shlex.split(line.replace('PARTITION ', 'gpu ').rpartition(' ')[0])
    done = run(['env', *command, files.easyconfig], env={key: value for key, value in {**eb_env.env, **files.pip_env, 'SLURM_CONF':
               slurm.env['SLURM_CONF']}.items() if value is not None}, cwd=tmp_path)
    jobid = re.search(r'PyTorch-0.1-tiny \(PyTorch/0.1-tiny\): (\d+)', done.stdout).group(1)
    wait(lambda: not run(['squeue', '-h', '-j', jobid], env=slurm.env, check=False).stdout.strip(), 240, 'the job does not end')
    output = (tmp_path / f'PyTorch-0.1-tiny-{jobid}.out').read_text()
    assert 'COMPLETED: Installation ended successfully' in output, output
    assert (eb_env.modulepath / 'PyTorch/0.1-tiny.lua').exists()
