# SPDX-License-Identifier: GPL-2.0-only
"""Which module examples/slurm/ddp_pytorch.job takes by itself: nodes of files, module files that are empty, both tools."""
import re
import shutil

import pytest

from testbed import ROOT

JOB = (ROOT / 'examples/slurm/ddp_pytorch.job').read_text()
FUNCTION = re.search(r'^choose_module\(\) \{\n.*?^\}\n', JOB, re.M | re.S).group()
CUDA13, CUDA12, CPU = 'PyTorch/2.15.0-cuda-13.2', 'PyTorch/2.10.0-cuda-12.8', 'PyTorch/2.13.0-local-cpu'
OTHERS = ['PyTorch/2.14.1-cuda-13.2-singularity-dockerhub', 'PyTorch/2.13.0-local-cpu-horovod', 'PyTorch-bundle/2.15.0-cuda-13.2']
GPUS = {'SLURM_GPUS_ON_NODE': '4'}


@pytest.fixture
def choose(tmp_path, modulestool):
    """A function: what the job says, and its status, on a node with this driver and these modules."""
    bundle = tmp_path / 'bundle'
    for name in ('slingtorch/__init__.py', 'slingtorch/gpus.py', 'slingtorch/job/__init__.py',
                 'slingtorch/job/machine.py', 'hooks/slingshot_hooks.py', 'runscripts/lib/drivers.cfg'):
        (bundle / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, bundle / name)
    shutil.copytree(ROOT / 'easyconfigs', bundle / 'easyconfigs')
    text = (bundle / 'slingtorch/gpus.py').read_text()
    assert "def fitting_easyconfig(root: str = '/'," in text
    (bundle / 'slingtorch/gpus.py').write_text(text.replace(
        "def fitting_easyconfig(root: str = '/',", f"def fitting_easyconfig(root: str = '{tmp_path}/node',"))

    def call(driver, modules, model='NVIDIA A100-SXM4-40GB', **variables):
        if driver:
            gpu = tmp_path / 'node/proc/driver/nvidia/gpus/0000:01:00.0/information'
            gpu.parent.mkdir(parents=True, exist_ok=True)
            gpu.write_text(f'Model: \t\t {model}\n')
            (gpu.parents[2] / 'version').write_text(f'NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Wed Jul 14\n')
        for name in modules:
            path = tmp_path / 'modules' / (name + ('.lua' if modulestool.syntax == 'Lua' else ''))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('' if modulestool.syntax == 'Lua' else '#%Module\n')
        script = ('set -euo pipefail\ndie() { echo "$*" >&2; exit 1; }\nSLURM_JOB_NAME=ddp_pytorch unset=""\n'
                  f'bundle={bundle}\n{FUNCTION}\nchoose_module\necho "pytorch=$pytorch"\n')
        (tmp_path / 'modules').mkdir(exist_ok=True)
        done = modulestool.bash(script, modulepath=[tmp_path / 'modules'], check=False, env={
            'HOROVOD': None, 'GPUS_PER_RANK': None, 'SLURM_GPUS_ON_NODE': None, **variables})
        return done.returncode, done.stdout + done.stderr

    return call


def test_newest_of_two_that_fit(choose):
    status, said = choose('580.65.06', [CUDA12, CUDA13, CPU, *OTHERS], **GPUS)
    assert status == 0 and f'pytorch={CUDA13}\n' in said
    assert f'ddp_pytorch: {CUDA13}, the newest of 2 that fit: driver 580.65.06. For another one, MODULE=NAME\n' in said


@pytest.mark.parametrize('driver,model,words', [
    ('550.90.07', 'NVIDIA A100-SXM4-40GB', 'the newest of 1 that fit: driver 550.90.07.'),
    ('580.65.06', 'Tesla V100-SXM2-32GB', 'has no code for Tesla V100'),
])
def test_older_cuda_where_the_newest_does_not_run(choose, driver, model, words):
    status, said = choose(driver, [CUDA12, CUDA13, CPU], model, **GPUS)
    assert status == 0 and f'pytorch={CUDA12}\n' in said and words in said


@pytest.mark.parametrize('driver', [None, '580.65.06'])
def test_job_without_gpus(choose, driver):
    """The one for processors, also on a node with a driver; Horovod's is another module."""
    status, said = choose(driver, [CUDA13, CPU, *OTHERS])
    assert status == 0 and f'pytorch={CPU}\n' in said and 'this job uses no GPUs: sbatch --gpus-per-node=N' in said
    status, said = choose(driver, [], HOROVOD='horovod')
    assert status == 0 and f'pytorch={CPU}-horovod\n' in said
    status, said = choose(driver, [], GPUS_PER_RANK='0', **GPUS)
    assert status == 0 and f'pytorch={CPU}\n' in said


@pytest.mark.parametrize('driver,modules,variables,words', [
    ('580.65.06', [CPU], GPUS, ['(driver 580.65.06). Install one: eb PyTorch-2.15.0-cuda-13.2.eb.', f'there are: {CPU}']),
    ('550.90.07', [CUDA13], GPUS, ['(driver 550.90.07). Install one: eb PyTorch-2.10.0-cuda-12.8.eb.', f'there are: {CUDA13}']),
    (None, [], {}, ['Install one: eb PyTorch-2.13.0-local-cpu.eb. Or name a module, MODULE=NAME; there are: none']),
    ('390.157', [CUDA13, CPU], GPUS, ['driver 390.157 is too old for every wheel', 'GPUS_PER_RANK=0 trains without']),
    (None, [CUDA13], GPUS, ["no driver of NVIDIA's or AMD's GPUs is loaded here"]),
])
def test_nothing_that_fits(choose, driver, modules, variables, words):
    status, said = choose(driver, modules, **variables)
    assert status == 1 and 'pytorch=' not in said
    for word in words:
        assert word in said, said
