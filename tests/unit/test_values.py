# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch env --values: a module's variables for a PyTorch that is there already, and what is said of it."""
import subprocess
import sys

import pytest

from slingtorch import sites as SITES
from slingtorch.commands import values
from slingtorch.job.machine import Machine
from testbed import ROOT, parse_env0, wheels


@pytest.fixture
def environment(tmp_path):
    """A function: an environment with a toy PyTorch for this CUDA or ROCm; the variables in which it is active."""
    def make(cuda=None, hip=None, more=(), release=23007):
        venv = tmp_path / 'venv'
        subprocess.run([sys.executable, '-m', 'venv', '--without-pip', venv], check=True)
        packages = next(venv.glob('lib/python3*/site-packages'))
        library = 'librccl.so.1' if hip else 'libnccl.so.2'
        files = wheels.toy_torch(tmp_path, '9.9.0', cuda, hip, {library: release} if cuda or hip else {})
        for name, content in {**files, **{f'{name}/__init__.py': '' for name in more}}.items():
            (packages / name).parent.mkdir(parents=True, exist_ok=True)
            (packages / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        (tmp_path / 'home').mkdir()
        return {'PATH': f'{venv}/bin:/usr/bin:/bin', 'HOME': str(tmp_path / 'home'), 'PYTHONPATH': str(ROOT)}
    return make


def evaluate(env, args, check=True):
    """(variables of a bash after eval "$(slingtorch env --values ARGS)", what was said)"""
    script = f'eval "$({sys.executable} -m slingtorch env --values {args})" && env -0'
    done = subprocess.run(['bash', '-c', script], env=env, cwd='/', stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)
    assert not check or done.returncode == 0, done.stderr
    return parse_env0(done.stdout), done.stderr


def test_the_values_of_a_module(environment):
    env, said = evaluate(environment(cuda='13.2'), '--site perlmutter')
    site = SITES.load('perlmutter', {})
    assert {name: env[name] for name in values.module_values(site, [])} == {
        name: value.value for name, value in site.env_values().items()}
    assert env['RUNSCRIPTS'] == env['RUNSCRIPTSPYTORCH'] == str(ROOT / 'runscripts')
    assert env['SLINGTORCH_CUDA_VERSION'] == '13.2' and env['SLINGTORCH_SITE'] == 'perlmutter'
    assert not [name for name in env if name.startswith('EASYBUILD_')]
    assert 'PyTorch 9.9.0 for CUDA 13.2, in ' in said and 'module load nccl/2.29.2-cu13' in said
    found = subprocess.run(['bash', '-c', 'type -P conda-python-distributed'], env=env, stdout=subprocess.PIPE, text=True)
    assert found.stdout == f'{ROOT}/runscripts/conda-python-distributed\n'


def test_values_for_other_software_are_left_out():
    derecho = SITES.load('derecho', {})
    assert 'MPICH_GPU_SUPPORT_ENABLED' in derecho.env_values()
    assert 'MPICH_GPU_SUPPORT_ENABLED' not in values.module_values(derecho, [])


def test_twice_is_once_and_the_users_value_is_named(environment):
    env = {**environment(hip='7.1'), 'NCCL_SOCKET_IFNAME': 'eth7'}
    first, said = evaluate(env, '--site frontier')
    assert 'replaced, as a module would: NCCL_SOCKET_IFNAME=eth7. ' in said
    again, said = evaluate(first, '--site frontier')
    assert again == first and 'replaced' not in said


@pytest.mark.parametrize('site, toolkit, line', [
    ('frontier', {'hip': '7.1.25'}, 'SLINGTORCH_SITE_GENERATION=rocm-7.1.1 eb --robot aws-ofi-nccl-1.21.1.eb; then in this shell: '
                                    'module load aws-ofi-nccl/1.21.1-frontier-rocm-7.1.1'),
    ('perlmutter', {'cuda': '12.8'}, 'SLINGTORCH_SITE_GENERATION=cuda-12.4 eb --robot aws-ofi-nccl-1.21.1.eb'),
    ('derecho', {'cuda': '13.2'}, "the site's file names none for CUDA 13.2 (it has CUDA 12.2.1, CUDA 12.3.2, CUDA 12.9.0)"),
])
def test_the_plugin_is_missing(environment, site, toolkit, line):
    said = evaluate(environment(**toolkit), f'--site {site}')[1]
    assert "NCCL's network plugin is missing" in said and line in said


def test_the_plugin_is_there(environment, tmp_path):
    env = environment(cuda='13.2')
    wheels.toy_plugin(tmp_path / 'libnccl-net.so', [3])
    said = evaluate({**env, 'LD_LIBRARY_PATH': str(tmp_path)}, '--site perlmutter')[1]
    assert f'plugin: whether NCCL can load {tmp_path}/libnccl-net.so (v3 to v3)' in said and 'missing' not in said


def test_without_gpus_no_plugin_is_asked_for(environment):
    """On a site whose jobs of several nodes need it, which a PyTorch for processors could not load."""
    env, said = evaluate(environment(), '--site frontier')
    assert 'SLINGTORCH_MULTINODE_NCCL_NET' not in env and "NCCL's plugin" not in said
    assert "this PyTorch is for processors, but the GPUs of this machine are AMD's" in said


def test_what_differs_from_a_module(environment, tmp_path):
    env = {**environment(cuda='13.2', more=['mpi4py']), 'OMP_NUM_THREADS': '4', 'EBROOTPYTORCH': '/sw/PyTorch'}
    driver = tmp_path / 'root/proc/driver/nvidia/version'
    driver.parent.mkdir(parents=True)
    driver.write_text('NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri\n')
    own = values.OwnPyTorch(Machine(env, root=str(tmp_path / 'root')))
    said = '\n'.join(values.differences(SITES.load('local', {}), own, {}))
    for text in ('driver 550.90.07 of this node is too old for CUDA 13.2, which needs 580', 'mpi4py is installed', 'OMP_NUM_THREADS=4 is set', 'a PyTorch module is loaded (/sw/PyTorch)'):
        assert text in said


@pytest.mark.parametrize('python, says', [
    (None, "PATH has no 'python'"), ('exit 3', 'bin/python does not run: it ended with status 3'),
    ('echo "{}"', 'bin/python has no PyTorch'), ('echo 3', 'bin/python does not run'),
    (r'printf "\377" >&2; exit 1', 'bin/python does not run: \ufffd'), ('\n#!/nowhere', 'bin/python does not run: [Errno')])
def test_no_python_or_no_pytorch(tmp_path, python, says):
    """The values are those for an image all the same."""
    if python:
        (tmp_path / 'bin').mkdir()
        (tmp_path / 'bin/python').write_text(f'#!/bin/sh\n{python}\n'.rpartition('\n\n')[2])
        (tmp_path / 'bin/python').chmod(0o755)
    for name in ('bash', 'env'):
        (tmp_path / 'bin').mkdir(exist_ok=True)
        (tmp_path / 'bin' / name).symlink_to(f'/usr/bin/{name}')
    env, said = evaluate({'PATH': str(tmp_path / 'bin'), 'HOME': str(tmp_path), 'PYTHONPATH': str(ROOT)}, '--site lumi')
    assert says in said and env['NCCL_SOCKET_IFNAME'] == 'hsn'
    assert env['APPTAINER_BINDPATH'].split(',')[0] == env['SINGULARITY_BINDPATH'].split(',')[0] == str(ROOT)
    assert env['SINGULARITYENV_PREPEND_PATH'] == str(ROOT / 'runscripts') and env['APPTAINER_ROCM'] == '1'


def test_an_unknown_site_fails_in_the_shell(environment):
    assert 'There is no site' in evaluate(environment(), '--site nonsense', check=False)[1]
