"""The test bed itself: without it, nothing that layer 5 says would mean anything."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import testbed
from testbed import slurm as slurm_

pytestmark = pytest.mark.real
TESTS = pathlib.Path(__file__).resolve().parents[1]


def run_pytest(directory, text, **env):
    """Run pytest on a file with this text, with our conftest.py, in `directory`."""
    (directory / 'test_it.py').write_text(text)
    return subprocess.run(
        [
            sys.executable,
            '-m',
            'pytest',
            '-c',
            os.devnull,
            '--rootdir',
            str(directory),
            '-p',
            'no:cacheprovider',
            '-p',
            'conftest',
        ],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env={**testbed.clean_environ(), 'PYTHONPATH': str(TESTS), 'CI': '', 'SLINGTORCH_CI': '', **env},
    )


SKIPS = {
    'in the test': 'import testbed\ndef test_one():\n    testbed.missing("Frobnicator")\ndef test_two(): pass\n',
    'the file': 'import pytest\npytest.importorskip("frobnicator", reason="Frobnicator is missing")\n',
}


@pytest.mark.parametrize('text', SKIPS.values(), ids=SKIPS)
def test_skip_fails_in_ci_and_says_why(tmp_path, text):
    (tmp_path / 'test_other.py').write_text('def test_other(): pass\n')
    done = run_pytest(tmp_path, text, SLINGTORCH_CI='1')
    assert done.returncode == 1, done.stdout
    assert '1 passed' in done.stdout or '2 passed' in done.stdout
    assert 'Frobnicator is missing' in done.stdout


def test_skip_is_a_skip_elsewhere(tmp_path):
    assert run_pytest(tmp_path, SKIPS['in the test']).returncode == 0


def test_no_tests_is_a_failure(tmp_path):
    assert run_pytest(tmp_path, '').returncode == 5


def test_modules_tool_loads_reports_failure_and_restores(modulestool, tmp_path):
    module = tmp_path / 'foo'
    module.mkdir()
    if modulestool.syntax == 'Lua':
        (module / '1.lua').write_text('pushenv("FOO", "module")\n')
    else:
        (module / '1').write_text('#%Module\npushenv FOO module\n')
    env = modulestool.load('foo/1', modulepath=[tmp_path], env={'FOO': 'user'})
    assert env['FOO'] == 'module'
    done = modulestool.bash(
        'module load foo/1; module unload foo/1; echo "FOO=$FOO"', modulepath=[tmp_path], env={'FOO': 'user'}
    )
    assert 'FOO=user' in done.stdout
    assert modulestool.bash('module load absent', modulepath=[tmp_path], check=False).returncode != 0


def test_cluster_has_two_nodes(slurm):
    lines = slurm.srun(
        '-N2', '--ntasks-per-node=2', 'bash', '-c', 'echo $SLURM_PROCID $SLURMD_NODENAME $SLURM_LOCALID'
    ).stdout.splitlines()
    assert sorted(lines) == ['0 nid000001 0', '1 nid000001 1', '2 nid000002 0', '3 nid000002 1']


def test_cluster_gives_gpus(slurm):
    lines = slurm.srun(
        '-N2', '--ntasks-per-node=2', '--gpus-per-task=1', 'bash', '-c', 'echo $SLURM_LOCALID $ROCR_VISIBLE_DEVICES'
    ).stdout.splitlines()
    assert sorted(lines) == ['0 0', '0 0', '1 1', '1 1']


def test_batch_status_and_output(slurm):
    batch = slurm.sbatch('#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1\nsrun hostname\nexit 7\n')
    assert batch.returncode == 7
    assert len(batch.output.split()) == 2


CLUSTER = f'''
import sys, time
sys.path.insert(0, {str(TESTS)!r})
from testbed import slurm
cluster = slurm.Cluster()
cluster.start()
job = cluster.popen('-N2', 'sleep', '987')
slurm.wait(lambda: 'R' in slurm.run(['squeue', '-h', '-o', '%t'], env=cluster.env).stdout, 20, 'job does not run')
print(cluster.dir, flush=True)
time.sleep(600)
'''


def test_cluster_of_a_killed_run_is_cleaned_up(slurm):
    with subprocess.Popen(
        [sys.executable, '-c', CLUSTER], stdout=subprocess.PIPE, text=True, env=testbed.clean_environ()
    ) as killed:
        directory = pathlib.Path(killed.stdout.readline().strip())
        assert directory.is_dir()
        killed.send_signal(signal.SIGKILL)
    slurm_.clean_up_killed_runs()
    assert not directory.exists()
    slurm_.wait(lambda: not processes_of(directory), 20, f'processes of {directory} are left')
    assert slurm.dir.is_dir(), 'the running cluster was taken for a dead one'
    slurm.srun('true')


def processes_of(directory):
    found = []
    for environ in pathlib.Path('/proc').glob('[0-9]*/environ'):
        try:
            if str(directory).encode() in environ.read_bytes():
                found.append(environ)
        except OSError:
            pass
    return found


def test_interrupted_run_leaves_nothing(tmp_path):
    (tmp_path / 'test_it.py').write_text(
        'import time\ndef test_it(slurm):\n    print("DIR", slurm.dir, flush=True)\n    time.sleep(600)\n'
    )
    with subprocess.Popen(
        [
            sys.executable,
            '-m',
            'pytest',
            '-s',
            '-c',
            os.devnull,
            '--rootdir',
            str(tmp_path),
            '-p',
            'conftest',
            'test_it.py',
        ],
        cwd=tmp_path,
        env={**testbed.clean_environ(), 'PYTHONPATH': str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        directory = None
        for line in run.stdout:
            if 'DIR' in line:
                directory = pathlib.Path(line.split('DIR', 1)[1].strip())
                break
        assert directory and directory.is_dir()
        run.send_signal(signal.SIGTERM)
        run.stdout.read()
    assert not directory.exists()
    time.sleep(0.5)
    assert not processes_of(directory)


@pytest.mark.parametrize('name', ['mpich', 'openmpi'])
def test_launcher_starts_ranks_and_passes_status(request, name):
    launcher = request.getfixturevalue(name)
    ranks = launcher.run(4, 'bash', '-c', 'echo ${PMI_RANK:-$OMPI_COMM_WORLD_RANK}').stdout.split()
    assert sorted(ranks) == ['0', '1', '2', '3']
    assert launcher.run(2, 'bash', '-c', 'exit 3', check=False).returncode == 3
