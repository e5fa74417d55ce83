# SPDX-License-Identifier: GPL-2.0-only
"""The test bed itself: without it, nothing that layer 5 says would mean anything."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

import testbed
from testbed import easybuild, forkedtorch, slurm as slurm_

pytestmark = pytest.mark.real
TESTS = pathlib.Path(__file__).resolve().parents[1]


def run_pytest(directory, text, *args, **env):
    """Run pytest on a file with this text, with our conftest.py, in `directory`."""
    (directory / 'test_it.py').write_text(text)
    command = [sys.executable, '-m', 'pytest', '-c', os.devnull, '--rootdir', str(directory), '-p', 'no:cacheprovider',
               '-p', 'conftest', *args]
    return subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=600,    # on a busy machine whose disk is slow, pytest alone took 77 s to start
                          env={**testbed.clean_environ(), 'PYTHONPATH': str(TESTS), 'CI': '', 'SLINGTORCH_CI': '', **env})


IN_A_TEST = 'import testbed\ndef test_one():\n    testbed.missing("Frobnicator")\ndef test_two(): pass\n'
A_FILE = 'import pytest\npytest.importorskip("frobnicator", reason="Frobnicator is missing")\n'


def test_skip_fails_in_ci_and_says_why(tmp_path):
    (tmp_path / 'test_file.py').write_text(A_FILE)
    done = run_pytest(tmp_path, IN_A_TEST, '-n', '2', SLINGTORCH_CI='1')
    assert done.returncode == 1 and '1 passed' in done.stdout, done.stdout
    listed = done.stdout.partition('skipped, which is a failure in CI =')[2]
    for name in ('test_file.py', 'test_it.py::test_one'):
        assert re.search(f'^{name}: .*Frobnicator is missing', listed, re.M), done.stdout


TOY = """
easyblock = 'Binary'
name = 'toy'
version = '1'
homepage = 'https://example.org'
description = "Toy"
toolchain = SYSTEM
sources = ['file']
checksums = [None]
install_cmds = ["%s"]
sanity_check_paths = {'files': ['file'], 'dirs': []}
moduleclass = 'tools'
"""
# what a program can tell of the process that started it
SHOW = '{ pwd; umask; ulimit -a; env | grep -v ^_Mod | sort; ls /proc/self/fd; cat; } > %(installdir)s/file'


def toy(directory, command):
    """An easyconfig that runs a command; its path."""
    (directory / 'file').write_text('source')
    (directory / 'toy-1.eb').write_text(TOY % command)
    return directory / 'toy-1.eb'


def test_forked_eb_is_eb(lmod, tmp_path):
    """Whether it works or not: the same output, status and files; and nothing of one run is left for the next."""
    path = toy(tmp_path, SHOW)
    both = easybuild.EasyBuild(tmp_path / 'fork', lmod), easybuild.EasyBuild(tmp_path / 'real', lmod, fresh=True)
    both[1].env.update({name: both[0].env[name] for name in ('PATH', 'SETUPTOOLS_USE_DISTUTILS')})
    home = tmp_path / 'home'
    (home / '.config/easybuild').mkdir(parents=True)
    (home / '.config/easybuild/config.cfg').write_text('[override]\nmax-parallel = 24\n')

    def outcome(eb, *args, **kwargs):
        """Words of both streams, of what the program saw, and of the module file; without random names and times."""
        done = eb(*args, check=False, **kwargs)
        files = [eb.prefix / 'software/toy/1/file', eb.modulepath / 'toy/1.lua']
        text = done.stdout + done.stderr + ''.join(path.read_text() for path in files if path.exists())
        random = r'\d\d:\d\d:\d\d|(eb-|tmp|/-)\w{8}\b|easybuild-\S+\.log|\(took\s.*?\)|\(total:\s.*?\)|process \d+ of user'
        return [done.returncode, *re.sub(random, 'RANDOM', text).replace(str(eb.prefix), 'PREFIX').split()]

    for args, env in [
        ([path, '--trace'], {}),
        ([path], {}),
        ([path, '--rebuild', '--trace', '--umask=077'], {'ONLY': '1', 'PYTHONPATH': str(tmp_path)}),
        (['--show-config'], {'HOME': home, 'EASYBUILD_PREFIX': None, 'LD_LIBRARY_PATH': '/nowhere'}),
        ([path, '--rebuild'], {'LD_LIBRARY_PATH': '/nowhere', 'EASYBUILD_TMPDIR': None, 'TMPDIR': home, 'EASYBUILD_HOOKS': None,
                               'EASYBUILD_MODULE_SYNTAX': 'Tcl'}),
        (['absent.eb'], {}),
        (['--frobnicate'], {}),
    ]:
        fork, real = (outcome(eb, *args, env=env) for eb in both)
        assert fork == real


PYTHON = """
import atexit, os, signal, sys
atexit.register(print, 'the end')
print(sys.argv, sys.path[0], os.getcwd(), sorted(os.environ.items()), os.umask(0o22), sys.stdin.read(), __name__)
print('last words', file=sys.stderr)
if sys.argv[-1] == 'dies':
    sys.stdout.flush()
    signal.raise_signal(signal.SIGUSR1)
sys.exit(sys.argv[-1])
"""


def test_forked_python_is_python(installed_pytorch, tmp_path):
    """Streams, status, and what a program sees; and it does not outlive who has started it."""
    quick = forkedtorch.quick(installed_pytorch).quick
    env = {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(tmp_path), 'LC_ALL': 'C.UTF-8'}
    (tmp_path / 'program.py').write_text(PYTHON)
    for words in (['program.py', 'a b', 'c'], ['-u', 'program.py', 'dies'], ['-B', '-c', PYTHON, '3']):
        fork, real = (testbed.run([python, *words], env=env, cwd=tmp_path, input='text', check=False)
                      for python in (quick, installed_pytorch.python))
        assert (fork.returncode, fork.stdout, fork.stderr) == (real.returncode, real.stdout, real.stderr)
    waits = 'import os, sys, torch\nprint(os.getpid(), "torch._dynamo" in sys.modules, flush=True)\nsys.stdin.read()'
    with subprocess.Popen([quick, '-c', waits], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asks:
        pid, forked = asks.stdout.readline().split()
        assert forked == 'True' and int(pid) != asks.pid and alive(pid)
        asks.kill()
        slurm_.wait(lambda: not alive(pid), 120, 'its child runs on')


def test_forked_eb_that_does_not_end_is_killed(eb_env, tmp_path):
    path = toy(tmp_path, f'echo $$ > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; sleep 600')
    for seconds in (10, 60, 360):   # until it has come as far as its program
        with pytest.raises(subprocess.TimeoutExpired):
            eb_env(path, '--ignore-locks', timeout=seconds)
        if (tmp_path / 'pid').exists():
            break
    slurm_.wait(lambda: not alive((tmp_path / 'pid').read_text().strip()), 120, 'what it started runs on')


def alive(pid):
    """Whether the process runs; one that has ended and waits for its parent does not."""
    stat = pathlib.Path(f'/proc/{pid}/stat')
    return stat.exists() and stat.read_text().rsplit(')', 1)[1].split()[0] not in 'ZX'


CLUSTER = f'''
import sys, time
sys.path.insert(0, {str(TESTS)!r})
from testbed import slurm
cluster = slurm.Cluster(separate=bool(sys.argv[1:]))
cluster.start()
job = cluster.popen('-N2', 'sleep', '987')
slurm.wait(lambda: 'R' in cluster.run('squeue', '-h', '-o', '%t').stdout, 120, 'job does not run')
print(cluster.dir, flush=True)
time.sleep(600)
'''


@pytest.mark.parametrize('words', [(), ('separate',)])
def test_cluster_of_a_killed_run_is_cleaned_up(slurm, words):
    if words:
        testbed.only_root('gives nodes a network of their own')
    with subprocess.Popen(
        [sys.executable, '-c', CLUSTER, *words], stdout=subprocess.PIPE, text=True, env=testbed.clean_environ()
    ) as killed:
        directory = pathlib.Path(killed.stdout.readline().strip())
        assert directory.is_dir()
        killed.send_signal(signal.SIGKILL)
    slurm_.clean_up_killed_runs()
    assert not directory.exists()
    slurm_.wait(lambda: not processes_of(directory), 120, f'processes of {directory} are left')
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
    """A polite kill of the run is one of its workers, too."""
    started = tmp_path / 'started'
    (tmp_path / 'test_it.py').write_text(
        'import pathlib, time\ndef test_it(slurm):\n'
        f'    pathlib.Path("part").write_text(str(slurm.dir))\n    pathlib.Path("part").rename("{started}")\n'
        '    time.sleep(600)\n'
    )
    command = [sys.executable, '-m', 'pytest', '-c', os.devnull, '--rootdir', tmp_path, '-p', 'conftest', '-n', '2']
    with subprocess.Popen(command, cwd=tmp_path, env={**testbed.clean_environ(), 'PYTHONPATH': str(TESTS)}) as run:
        slurm_.wait(started.exists, 300, 'the cluster does not start')
        directory = pathlib.Path(started.read_text())
        assert directory.is_dir()
        run.send_signal(signal.SIGTERM)
    assert not directory.exists()
    slurm_.wait(lambda: not processes_of(directory), 120, f'processes of {directory} are left')
