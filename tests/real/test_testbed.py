# SPDX-License-Identifier: GPL-2.0-only
"""The test bed itself: without it, nothing that layer 5 says would mean anything."""

import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

import testbed
from testbed import easybuild, run, slurm as slurm_, workers

pytestmark = pytest.mark.real
TESTS = pathlib.Path(__file__).resolve().parents[1]


def run_pytest(directory, text, *args, **env):
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
            *args,
        ],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,    # on a busy machine whose disk is slow, pytest alone took 77 s to start
        env={**testbed.clean_environ(), 'PYTHONPATH': str(TESTS), 'CI': '', 'SLINGTORCH_CI': '', **env},
    )


SKIPS = {
    'in the test': 'import testbed\ndef test_one():\n    testbed.missing("Frobnicator")\ndef test_two(): pass\n',
    'the file': 'import pytest\npytest.importorskip("frobnicator", reason="Frobnicator is missing")\n',
}


@pytest.mark.parametrize('number', ['0', '2'])
@pytest.mark.parametrize('text', SKIPS.values(), ids=SKIPS)
def test_skip_fails_in_ci_and_says_why(tmp_path, text, number):
    (tmp_path / 'test_other.py').write_text('def test_other(): pass\n')
    done = run_pytest(tmp_path, text, '-n', number, SLINGTORCH_CI='1')
    assert done.returncode == 1, done.stdout
    assert '1 passed' in done.stdout or '2 passed' in done.stdout
    assert re.search('skipped, which is a failure in CI =+\ntest_it.py.*: .*Frobnicator is missing', done.stdout)


def test_skip_is_a_skip_elsewhere(tmp_path):
    assert run_pytest(tmp_path, SKIPS['in the test']).returncode == 0


def test_no_tests_is_a_failure(tmp_path):
    assert run_pytest(tmp_path, '').returncode == 5


@pytest.mark.parametrize('number', ['0', '2'])
def test_time_by_directory_and_remarks_are_shown(tmp_path, number):
    """Also in the run in which a test fails."""
    for name, text in (('a', 'remark("configured only")'), ('b', 'assert False')):
        (tmp_path / name).mkdir()
        (tmp_path / name / f'test_{name}.py').write_text(f'def test_one(remark): {text}\ndef test_two(): pass\n')
    done = run_pytest(tmp_path, '', '-n', number)
    assert done.returncode == 1
    assert re.search(r'time by directory.*=+\n( +0 s +2 tests  [ab]\n){2}configured only\n', done.stdout)
    assert '1 failed, 3 passed' in done.stdout.splitlines()[-1]


def test_files_that_share_go_to_one_worker(tmp_path):
    for name in [*itertools.chain(*workers.TOGETHER.items()), 'tests/test_other.py']:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('import os, pytest\n@pytest.mark.parametrize("i", range(4))\n'
                                     f'def test(i, remark): remark("{name} " + os.environ["PYTEST_XDIST_WORKER"])\n')
    done = run_pytest(tmp_path, '', '-n', '2')
    worker = dict(re.findall(r'^(\S+) (gw\d)$', done.stdout, re.M))
    assert len(set(re.findall(r'^\S+ gw\d$', done.stdout, re.M))) == len(worker), 'a file went to two workers'
    assert len(set(worker.values())) == 2
    assert all(worker[one] == worker[other] for one, other in workers.TOGETHER.items())


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


OWN = '''touch /tmp/$(hostname) /dev/shm/$(hostname) $SHARED/$(hostname) $LOCAL/local.$(hostname)
echo $(ls /sys/class/net) $(cat /sys/class/net/eth0/mtu)
echo $(ls -d /dev/shm/* $LOCAL/local* /tmp/nid* /tmp/local*)
cat /proc/sys/kernel/random/boot_id
getent hosts nid000001 nid000002
'''


def test_separate_nodes_have_everything_of_their_own_and_share_one_directory(separate_nodes):
    cluster, boot_ids = separate_nodes, {pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()}
    for node in testbed.NODES:
        env = {'SHARED': cluster.shared, 'LOCAL': cluster.local}
        lines = cluster.srun('-n1', '-w', node, 'sh', '-c', OWN, env=env).stdout.splitlines()
        interfaces, files, boot_id, *hosts = lines
        assert interfaces == 'eth0 lo 1500'
        assert files == f'/dev/shm/{node} /tmp/local.{node} /tmp/{node} {cluster.local}/local.{node}'
        assert [tuple(line.split()) for line in hosts] == [(cluster.address[name], name) for name in testbed.NODES]
        boot_ids.add(boot_id)
    assert len(boot_ids) == 3
    assert {path.name for path in cluster.shared.iterdir()} >= set(testbed.NODES)
    assert (cluster.dir / 'local.nid000002/nid000002').exists(), 'not seen from outside'
    # what is done on a node is seen by its jobs
    run(cluster.on('nid000002', 'mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', '/dev/shm'))
    sizes = [cluster.srun('-n1', '-w', node, 'df', '--output=size', '/dev/shm').stdout.split()[1]
             for node in testbed.NODES]
    run(cluster.on('nid000002', 'umount', '/dev/shm'))
    assert run(cluster.on('nid000002', 'hostname')).stdout == 'nid000002\n' and int(sizes[0]) > 64 == int(sizes[1])


def test_two_clusters_of_separate_nodes_do_not_meet(separate_nodes):
    other = slurm_.Cluster(separate=True)
    try:
        other.start()
        boot_ids = {cluster.srun('-N2', 'cat', '/proc/sys/kernel/random/boot_id').stdout
                    for cluster in (separate_nodes, other)}
        assert len(set(''.join(boot_ids).split())) == 4
    finally:
        other.stop()
    assert separate_nodes.srun('-N2', 'hostname').stdout.split() and not other.dir.exists()
    # nothing of them is in this machine's network
    assert 'nid00000' not in run(['ip', 'link']).stdout


def test_an_ordinary_user_is_told_that_nodes_cannot_be_separate(monkeypatch):
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match='only root gives nodes a network'):
        slurm_.Cluster(separate=True)


def test_batch_status_and_output(slurm):
    batch = slurm.sbatch('#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1\nsrun hostname\nexit 7\n')
    assert batch.returncode == 7
    assert len(batch.output.split()) == 2


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
        ([path, '--rebuild'], {'EASYBUILD_HOOKS': None, 'EASYBUILD_MODULE_SYNTAX': 'Tcl'}),
        (['--show-config'], {'HOME': home, 'EASYBUILD_PREFIX': None, 'LD_LIBRARY_PATH': '/nowhere'}),
        ([path, '--rebuild'], {'LD_LIBRARY_PATH': '/nowhere', 'EASYBUILD_TMPDIR': None, 'TMPDIR': home}),
        (['absent.eb'], {}),
        (['--frobnicate'], {}),
    ]:
        fork, real = (outcome(eb, *args, env=env) for eb in both)
        assert fork == real


def test_forked_eb_that_does_not_end_is_killed(eb_env, tmp_path):
    path = toy(tmp_path, f'echo $$ > {tmp_path}/pid; sleep 600')
    with pytest.raises(subprocess.TimeoutExpired):
        eb_env(path, timeout=10)
    slurm_.wait(lambda: not alive((tmp_path / 'pid').read_text().strip()), 10, 'what it started runs on')


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


@pytest.mark.parametrize('number', ['0', '2'])
def test_interrupted_run_leaves_nothing(tmp_path, number):
    """A polite kill of the run is one of its workers, too."""
    started = tmp_path / 'started'
    (tmp_path / 'test_it.py').write_text(
        'import pathlib, time\ndef test_it(slurm):\n'
        f'    pathlib.Path("part").write_text(str(slurm.dir))\n    pathlib.Path("part").rename("{started}")\n'
        '    time.sleep(600)\n'
    )
    command = [sys.executable, '-m', 'pytest', '-c', os.devnull, '--rootdir', tmp_path, '-p', 'conftest', '-n', number]
    with subprocess.Popen(command, cwd=tmp_path, env={**testbed.clean_environ(), 'PYTHONPATH': str(TESTS)}) as run:
        slurm_.wait(started.exists, 300, 'the cluster does not start')
        directory = pathlib.Path(started.read_text())
        assert directory.is_dir()
        run.send_signal(signal.SIGTERM)
    assert not directory.exists()
    slurm_.wait(lambda: not processes_of(directory), 120, f'processes of {directory} are left')


@pytest.mark.parametrize('name', ['mpich', 'openmpi'])
def test_launcher_starts_ranks_and_passes_status(request, name):
    launcher = request.getfixturevalue(name)
    ranks = launcher.run(4, 'bash', '-c', 'echo ${PMI_RANK:-$OMPI_COMM_WORLD_RANK}').stdout.split()
    assert sorted(ranks) == ['0', '1', '2', '3']
    assert launcher.run(2, 'bash', '-c', 'exit 3', check=False).returncode == 3
