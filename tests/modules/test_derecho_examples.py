"""The job scripts for Derecho, with commands in place of `qsub`, `eb` and `mpiexec`; and the test programs."""
import json
import os
import shutil

import pytest

from testbed import ROOT, derecho, run

EXAMPLES = ROOT / 'examples/derecho'
RECORD = '#!/bin/bash\nprintf "%s|" {name} "$@" >> "{log}"; printf "\\n" >> "{log}"\n'


class Login:
    """A login node of the emulated Derecho, whose commands `eb`, `qsub` and `mpiexec` write down their calls."""

    def __init__(self, path, lmod):
        self.path = path
        self.lmod = lmod
        self.log = path / 'calls'
        self.derecho = derecho.Derecho(path / 'derecho')
        for name in ('eb', 'qsub', 'mpiexec', 'python'):
            derecho.script(path / 'bin' / name, RECORD.format(name=name, log=self.log))
        (path / 'bin/slingtorch').symlink_to(shutil.which('slingtorch'))

    def bash(self, script, env=None, check=True):
        """Run a script file as a login shell's child, in which `module` works."""
        environment = {'PATH': f'{self.path}/bin:{os.environ["PATH"]}', 'SLINGTORCH_SITE': None, **(env or {})}
        command = f'module purge; export -f module; bash {script}'
        return self.lmod.bash(command, modulepath=[self.path / 'own', self.derecho.modulepath], env=environment,
                              check=check, cwd=self.path)

    @property
    def calls(self):
        """What was called, a list of words each."""
        return [line.split('|')[:-1] for line in self.log.read_text().splitlines()]


@pytest.fixture
def login(tmp_path, lmod):
    (tmp_path / 'own').mkdir()
    return Login(tmp_path, lmod)


def test_scripts_are_clean_bash():
    run([shutil.which('shellcheck'), *EXAMPLES.glob('*.sh')])


def test_build_script_fetches_then_submits_itself(login):
    login.bash(EXAMPLES / 'build.sh', env={'PBS_ACCOUNT': 'SCSG0001', 'EASYBUILD_PREFIX': '/glade/work/me/eb'})
    fetch, submit = login.calls[-2:]  # activating the bundle asks eb for its configuration
    assert fetch == ['eb', 'PyTorch-2.4.0-derecho-cray-mpich.eb', 'torchvision-0.19.0-derecho-cray-mpich.eb',
                     'mpi4py-4.0.0-derecho-cray-mpich-PyTorch-2.4.0.eb', '--robot', '--fetch']
    assert submit[:6] == ['qsub', '-A', 'SCSG0001', '-W', 'block=true', '-v']
    assert "EASYBUILD_PREFIX='/glade/work/me/eb'" in submit[6] and 'NCARENV=23.09' in submit[6]
    assert submit[7] == str(EXAMPLES / 'build.sh')
    for name in fetch[1:4]:
        assert list((ROOT / 'easyconfigs').rglob(name)), name


def test_build_script_as_a_job(login):
    login.bash(EXAMPLES / 'build.sh', env={
        'PBS_JOBID': '1.desched1', 'NCARENV': '24.12', 'EASYCONFIGS': 'PyTorch-2.6.0-derecho-cray-mpich.eb',
        'SLINGTORCH': login.path / 'bin/slingtorch'})
    assert login.calls[-1] == ['eb', 'PyTorch-2.6.0-derecho-cray-mpich.eb', '--robot', '--max-parallel=96']


def test_build_script_without_account(login):
    done = login.bash(EXAMPLES / 'build.sh', check=False, env={'PBS_ACCOUNT': None})
    assert done.returncode != 0 and 'name the project to charge' in done.stderr


def test_batch_jobs(login):
    """Eight ranks on two nodes, and no other test program than those that are there."""
    login.derecho.module(login.path / 'own', 'PyTorch/2.4.0-derecho-cray-mpich', 'setenv("RUNSCRIPTS", "/runscripts")')
    nodefile = login.path / 'nodes'
    nodefile.write_text('deg0001\n' * 4 + 'deg0002\n' * 4)
    env = {'PBS_NODEFILE': nodefile, 'PBS_O_WORKDIR': ROOT, 'PBS_JOBID': '1.desched1'}
    login.bash(EXAMPLES / 'test.sh', env=env)
    login.bash(EXAMPLES / 'train.sh', env=env)
    ranks = [call for call in login.calls if call[0] == 'mpiexec']
    assert len(ranks) == 6 and all(call[1:7] == ['-n', '8', '-ppn', '4', '--cpu-bind', 'numa'] for call in ranks)
    programs = {word for call in login.calls for word in call if word.endswith('.py') and '/' in word}
    assert len(programs) == 4 and all((ROOT / program).is_file() for program in programs)
    nccl = [call for call in ranks if 'nccl' in call]
    assert len(nccl) == 3 and all(call[7] == '/runscripts/conda-python-distributed' for call in nccl)


# --- the test programs, on processors and over gloo: the same code as over MPI and NCCL

def ranks(mpich, installed, number, program, *args, **kwargs):
    """Run a test program on some ranks."""
    return mpich.run(number, installed.runscripts / 'conda-python-distributed', EXAMPLES / program, *args,
                     env={**installed.env, 'OMP_NUM_THREADS': '1'}, **kwargs)


def test_values(installed_pytorch, mpich):
    done = ranks(mpich, installed_pytorch, 3, 'test_backend.py', '--backend', 'gloo')
    assert 'All values are right: backend gloo, 3 ranks, cpu' in done.stdout


def test_bandwidth(installed_pytorch, mpich, tmp_path):
    done = ranks(mpich, installed_pytorch, 2, 'all_reduce_test.py', '--backend', 'gloo', '--max-bytes', '262144',
                 '--repeat', '5', '--json', tmp_path / 'result.json')
    result = json.loads((tmp_path / 'result.json').read_text())
    sizes = [1024, 4096, 16384, 65536, 262144]
    assert [entry['bytes'] for entry in result['operations']] == sizes * 2
    assert (result['backend'], result['ranks'], result['device']) == ('gloo', 2, 'cpu')
    for entry in result['operations']:
        assert entry['bandwidth_gb_per_s'] == pytest.approx(entry['bytes'] / entry['seconds'] / 1e9)
        # with 2 ranks 2 (n - 1) / n is 1
        assert entry['bus_bandwidth_gb_per_s'] == pytest.approx(entry['bandwidth_gb_per_s'])
    lines = done.stdout.splitlines()
    assert lines[1].split() == ['operation', 'bytes', 'time', 'us', 'GB/s', 'bus', 'GB/s']
    assert len(lines) == 2 + len(result['operations'])


def test_wrong_values_are_found(installed_pytorch, mpich, tmp_path):
    """The checks are real ones: with an all_reduce that does nothing they fail."""
    (tmp_path / 'sitecustomize.py').write_text(
        'import torch.distributed\ntorch.distributed.all_reduce = lambda *args, **kwargs: None\n')
    installed_pytorch.env, saved = {**installed_pytorch.env, 'PYTHONPATH': str(tmp_path)}, installed_pytorch.env
    try:
        done = ranks(mpich, installed_pytorch, 2, 'test_backend.py', '--backend', 'gloo', check=False)
    finally:
        installed_pytorch.env = saved
    assert done.returncode != 0 and 'all_reduce of torch.float32: 1000000 of 1000000 elements' in done.stderr


def test_imports_tells_what_is_missing(installed_pytorch):
    """The wheel has no MPI."""
    done = run([installed_pytorch.python, EXAMPLES / 'test_imports.py', '--without-cuda'], env=installed_pytorch.env,
               check=False)
    assert done.returncode != 0 and 'torch.distributed has no MPI' in done.stderr


def test_local_rank_is_not_guessed(installed_pytorch):
    code = 'import ranks; ranks.local_rank()'
    done = run([installed_pytorch.python, '-c', code], env={**installed_pytorch.env, 'PYTHONPATH': str(EXAMPLES)},
               check=False)
    assert done.returncode == 1 and 'No launcher says which rank of its node this is' in done.stderr
