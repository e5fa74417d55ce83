# SPDX-License-Identifier: GPL-2.0-only
"""conda-python-distributed --stage: on a real Slurm with real FUSE, on nodes that each have storage of their own."""
import os
import pathlib
import re
import shutil
import signal
import subprocess

import pytest

from testbed import NODES, ROOT, messages, only_root, stagedenv
from testbed import run as run_any
from testbed.easybuild import EasyBuild
from testbed.slurm import wait

pytestmark = pytest.mark.real
START = ROOT / 'runscripts/conda-python-distributed'


def run(command, env, **more):
    """A start whose messages are known."""
    done = run_any(command, env=env, **more)
    stage = env.get('SLINGTORCH_STAGE_DIR', '-').replace('%u', env.get('USER', ''))
    messages.known(done.stderr, stage, env.get('VIRTUAL_ENV', '-'))
    return done


SHOW = 'import alpha, os, sys; print(os.environ["RANK"], sys.prefix, alpha.__file__.startswith(sys.prefix))'
WAIT = 'import signal; print("running", flush=True); signal.pause()'


class Staging:
    """Jobs of two nodes with two ranks each, and what is on the nodes' own storage.

    :ivar env: environment of a job, with the module loaded and a `sbcast` that keeps a record
    :ivar log: that record: a line for each call, with the rank that called
    """

    def __init__(self, slurm, image_env, directory):
        self.slurm, self.image_env, self.dir = slurm, image_env, directory
        self.log = directory / 'sbcast.log'
        self.log.touch()
        self.bin = directory / 'bin'
        self.program('sbcast', f'echo "$SLURM_PROCID $*" >> {self.log}; exec /usr/bin/sbcast "$@"')
        self.env = {**image_env.env, 'PATH': f'{self.bin}:{image_env.env["PATH"]}', 'SLINGTORCH_STAGE_DIR': slurm.local}

    def program(self, name, text):
        self.bin.mkdir(exist_ok=True)
        (self.bin / name).write_text(f'#!/bin/bash\n{text}\n')
        (self.bin / name).chmod(0o755)

    def __call__(self, *arguments, code=SHOW, env=(), check=True):
        done = self.slurm.srun('-Q', '-N2', '--ntasks-per-node=2', START, *(arguments or ['--stage']), '-c', code,
                               env={**self.env, **dict(env)}, check=check)
        messages.known(done.stderr, self.slurm.local, self.dir, self.image_env.root)
        return done

    def on_node(self, node, *command):
        return self.slurm.srun('-N1', '-w', node, *command, check=False).stdout

    def left(self, node):
        """Files on the node's own storage, without the directory of the user that is in everybody's."""
        top = self.slurm.dir / f'local.{node}'
        # os.walk, unlike pathlib, takes it that a directory vanishes while it looks
        return sorted(os.path.relpath(os.path.join(where, name), top) for where, folders, files in os.walk(top)
                      for name in [*folders, *files] if name != 'slingtorch-0')

    def nothing_is_left(self):
        return not any(self.left(node) or f' {self.slurm.local}/' in self.on_node(node, 'cat', '/proc/self/mounts')
                       for node in NODES)


@pytest.fixture
def staging(slurm, image_env, tmp_path):
    only_root('gives each emulated node storage of its own')
    yield Staging(slurm, image_env, tmp_path)
    for node in NODES:
        shutil.rmtree(slurm.dir / f'local.{node}/slingtorch-0', ignore_errors=True)


def prefixes(done):
    """{rank: prefix of its Python}; its packages came from there."""
    lines = [line.split() for line in done.stdout.splitlines()]
    assert all(line[2] == 'True' for line in lines)
    return {int(line[0]): line[1] for line in lines}


def assert_staged(done, where):
    """Which of the two nodes are staged; all four ranks ran."""
    found = prefixes(done)
    assert sorted(found) == [0, 1, 2, 3]
    assert [found[rank].endswith('/env') for rank in range(4)] == [where[0], where[0], where[1], where[1]], done.stderr


def test_once_per_job_and_gone_afterwards(staging):
    done = staging(code=SHOW[:-1] + ', "-".join(oct(os.stat(f"{sys.prefix}/{up}").st_mode)[-3:] for up in ("..", "../..")))')
    assert_staged(done, (True, True))
    local = staging.slurm.local
    assert all(prefix.startswith(f'{local}/slingtorch-0/stage-') for prefix in prefixes(done).values())
    assert len(set(prefixes(done).values())) == 2
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {'700-700'}, 'the directories are private'
    calls = staging.log.read_text().splitlines()
    assert len(calls) == 2 and all(call.startswith('0 ') for call in calls)  # the image, and the word that it is there
    assert str(staging.image_env.image) in calls[0]
    assert done.stderr.count('\n') == 1 and f'staged {staging.image_env.image} to {local}/' in done.stderr
    wait(staging.nothing_is_left, 240, 'the nodes are not clean')     # the watcher may end after the step


def test_renewed_while_staged_jobs_start_and_run(slurm, lmod, tmp_path):
    """One line of get-master reaches the next staged job, and what has begun goes on with the files that it has."""
    only_root('gives each emulated node storage of its own')
    (tmp_path / 'image').mkdir()
    own = stagedenv.installed(tmp_path / 'image', lmod)
    eb, bundle = EasyBuild(tmp_path / 'image/eb', lmod), tmp_path / 'runscripts'
    shutil.copytree(ROOT / 'runscripts', bundle)
    with open(bundle / 'get-master', 'a') as script:
        script.write('# a fix\n')
    staging = Staging(slurm, own, tmp_path)
    # rank 0 stays in the middle of staging until the runscripts are others
    fifo = tmp_path / 'fifo'
    os.mkfifo(fifo)
    staging.program('sbcast', f'[[ $* != *.squashfs* ]] || read -r < {fifo}; exec /usr/bin/sbcast "$@"')
    command = ['-Q', '-N2', '--ntasks-per-node=2', own.runscripts / START.name, '--stage', '-c', SHOW]
    job = slurm.popen(*command, env=staging.env)
    with open(fifo, 'w') as word:
        eb(tmp_path / 'image/PyTorch-0.1-tiny.eb', '--module-only', '--force',
           f'--sourcepath={tmp_path}:{bundle}')
        assert (own.runscripts / 'get-master').read_text().endswith('# a fix\n')
        word.write('go on\n')
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, err
    assert sorted(line.split()[0] for line in out.splitlines()) == list('0123') and out.count('/env True') == 4
    staging.program('sbcast', 'exec /usr/bin/sbcast "$@"')
    assert slurm.srun(*command, env=staging.env).stdout.count('/env True') == 4


def test_from_a_number_of_nodes_on(staging):
    assert_staged(staging('-B', env={'SLINGTORCH_STAGE_NODES': '2'}), (True, True))
    for env, said in (({'SLINGTORCH_STAGE_NODES': '3'}, []), ({'SLINGTORCH_STAGE_NODES': '2', 'SLINGTORCH_ENVIRONMENT_IMAGE': None}, [
            'SLINGTORCH_STAGE_NODES=2, but this job is not staged: SLINGTORCH_ENVIRONMENT_IMAGE is not set'])):
        done = staging('-B', env=env)
        assert_staged(done, (False, False))
        assert [re.sub(r'^[^:]*: |\. Load .*', '', line) for line in done.stderr.splitlines()] == said


def test_mpiexec_on_one_node_needs_no_sbcast(staging, mpich, tmp_path):
    """hydra waits for whatever holds its socket."""
    done = mpich.run(2, START, '--stage', '-c', SHOW, env={**staging.env, 'SLINGTORCH_STAGE_DIR': tmp_path})
    assert set(prefixes(done)) == {0, 1} and all('/stage-nojob-' in path for path in prefixes(done).values())
    assert staging.log.read_text() == ''
    assert not list((tmp_path / 'slingtorch-0').iterdir())


# --- without Slurm: one rank by itself

class Alone:
    """One rank outside any job."""

    def __init__(self, image_env, directory):
        self.dir = directory
        self.env = {**image_env.env, 'SLINGTORCH_STAGE_DIR': str(directory)}

    def popen(self, code, **more):
        return subprocess.Popen([START, '--stage', '-c', code], env=self.env, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, **more)

    def left(self):
        return list(self.dir.glob('slingtorch-*/*'))


@pytest.fixture
def alone(image_env, tmp_path):
    return Alone(image_env, tmp_path)


def test_status_input_and_arguments_are_pythons(alone):
    code = 'import sys; print(sys.stdin.read()); sys.exit(7)'
    process = alone.popen(code, stdin=subprocess.PIPE)
    out, _ = process.communicate('words')
    assert (process.returncode, out) == (7, 'words\n')
    wait(lambda: alone.left() == [], 240, 'the node is not clean')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_python_and_its_end_is_the_ranks(alone, number):
    handler = ('import os, signal, sys\n'
               'def handle(n, _):\n'
               # no print: the signal may come while "running" is printed
               '    os.write(1, b"got %d\\n" % n); signal.signal(n, signal.SIG_DFL); signal.raise_signal(n)\n'
               f'signal.signal({int(number)}, handle)\n' + WAIT)
    process = alone.popen(handler)
    assert process.stdout.readline() == 'running\n'
    process.send_signal(number)
    out, _ = process.communicate(timeout=240)
    assert (process.returncode, out) == (-number, f'got {int(number)}\n')
    wait(lambda: alone.left() == [], 240, 'the node is not clean')


def test_killed_first_rank(alone):
    process = alone.popen('import os; print(os.getpid(), flush=True); ' + WAIT)
    python = int(process.stdout.readline())
    assert process.stdout.readline() == 'running\n'
    process.kill()
    os.kill(python, signal.SIGKILL)
    process.communicate()
    wait(lambda: alone.left() == [], 240, 'the watcher does not clean up')


def test_what_a_killed_start_left_is_removed_by_the_next(alone, image_env):
    with open('/proc/sys/kernel/hostname') as stream:
        node = stream.read().strip()
    dead = subprocess.Popen(['true'])
    dead.wait()
    old = alone.dir / f'slingtorch-{os.getuid()}' / f'stage-4711-10000-0-{node}'
    other = old.with_name('stage-4711-10000-0-another')
    for directory in (old, other):
        (directory / 'ranks').mkdir(parents=True)
        (directory / f'ranks/{dead.pid}').touch()
    (old / 'env').mkdir()
    old.parent.chmod(0o700)
    partial = alone.dir / f'slingtorch-{os.getuid()}-stage-4711-10000-0'
    partial.write_text('half an image')
    done = run([START, '--stage', '-c', 'pass'], env=alone.env)
    assert 'staged' in done.stderr
    # that of another node, where storage is shared against all advice, is not judged from here
    assert alone.left() == [other] and not partial.exists()


@pytest.mark.parametrize('prepare, words', [
    (lambda base: base.symlink_to(base.parent), 'is a symbolic link'),
    (lambda base: (base.mkdir(), base.chmod(0o777)), 'is writable by others (mode 777)'),
    (lambda base: (base.mkdir(), os.chown(base, 65534, 65534)), 'does not belong to you'),
])
def test_a_directory_of_somebody_else_is_not_used(alone, image_env, prepare, words):
    only_root('gives files away')
    prepare(alone.dir / f'slingtorch-{os.getuid()}')
    done = run([START, '--stage', '-c', SHOW], env=alone.env)
    assert prefixes(done) == {0: str(image_env.root)}
    assert words in done.stderr and 'not staged: ' in done.stderr and done.stderr.count('\n') == 1


@pytest.mark.parametrize('env, words', [
    ({'SLINGTORCH_ENVIRONMENT_IMAGE': None}, "with 'environment_image = True'"),
    ({'WITH_CONDA': 'source /x/activate'}, 'activates an environment other than the staged one'),
    ({'VIRTUAL_ENV': '/home/me/env'}, 'the environment /home/me/env is active, but the staged image does not have its packages'),
    ({'SLINGTORCH_STAGE_DIR': 'relative'}, 'is not absolute'),
    ({'SLINGTORCH_STAGE_DIR': '/tmp/a:b'}, 'has a colon or a control character'),
    ({'SLINGTORCH_STAGE_DIR': '/tmp/a\nb'}, 'has a colon or a control character'),
    ({'SLINGTORCH_STAGE_TIMEOUT': 'soon'}, 'is not a whole number'),
])
def test_what_cannot_be_meant_is_an_error(alone, env, words):
    env = {name: value for name, value in {**alone.env, **env}.items() if value is not None}
    done = run([START, '--stage', '-c', 'print("ran")'], env=env, check=False)
    assert done.returncode == 1 and words in done.stderr and done.stdout == ''
    assert done.stderr.count('\n') == 1


def test_image_that_is_gone(alone, image_env, tmp_path):
    """A file system that is purged may have taken it; the job runs, and says what is wrong."""
    kept = tmp_path / 'kept'
    image_env.image.rename(kept)
    try:
        done = run([START, '--stage', '-c', SHOW], env=alone.env)
    finally:
        kept.rename(image_env.image)
    assert prefixes(done) == {0: str(image_env.root)}
    assert f'not staged: {image_env.image} is missing or not readable' in done.stderr


def test_name_of_the_user_in_the_directory(alone):
    (alone.dir / 'somebody').mkdir()
    env = {**alone.env, 'SLINGTORCH_STAGE_DIR': f'{alone.dir}/%u', 'USER': 'somebody'}
    done = run([START, '--stage', '-c', SHOW], env=env)
    assert prefixes(done)[0].startswith(f'{alone.dir}/somebody/slingtorch-')


# --- what goes wrong

def pbs_nodes(alone, count, env=()):
    """Starts as under PBS, one rank on each node: [CompletedProcess]. They run at the same time."""
    processes = []
    # 127.0.0.1, which the runscript refuses in a job of several nodes: these are one machine
    this_machine = '2130706433'
    for rank in range(count):
        directory = alone.dir / f'node{rank}'
        directory.mkdir()
        own = {**alone.env, 'SLINGTORCH_STAGE_DIR': str(directory), 'PBS_JOBID': '12.server', 'RANK': str(rank),
               'WORLD_SIZE': str(count), 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1', 'MASTER_ADDR': this_machine,
               **dict(env)}
        processes.append(subprocess.Popen([START, '--stage', '-c', SHOW], env=own, text=True, stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE))
    said = [process.communicate(timeout=240) for process in processes]
    return [subprocess.CompletedProcess(process.args, process.returncode, *words)
            for process, words in zip(processes, said)]


def test_without_sbcast_each_node_copies(alone):
    done = pbs_nodes(alone, 3)
    for rank, node in enumerate(done):
        assert prefixes(node)[rank].startswith(f'{alone.dir}/node{rank}/'), node.stderr
        assert node.stderr.count('\n') == (rank == 0)  # 'staged'
    assert not [path for path in alone.dir.glob('node*/slingtorch-*/*')]


@pytest.mark.parametrize('options, words', [
    ('ro', ' cannot be created: '),
    ('size=8m', 'no space: '),
], ids=['sbcast fails on one node', 'disk of one node is full'])
def test_one_node_that_cannot_take_it(staging, options, words):
    """There the staging directory is a small or a read-only file system."""
    staging.env['SLINGTORCH_STAGE_DIR'] = directory = staging.slurm.local / 'own'
    for name in NODES:
        (staging.slurm.dir / f'local.{name}/own').mkdir()
    staging.slurm.srun('-N1', '-w', NODES[1], 'mount', '-t', 'tmpfs', '-o', options, 'tmpfs', directory)
    try:
        done = staging()
        assert_staged(done, (True, False))
        assert 'sbcast: error: ' in done.stderr and 'each node now copies the image' in done.stderr
        said = [line for line in done.stderr.splitlines() if 'not staged' in line]
        assert len(said) == 1 and f'node {NODES[1]}: not staged: ' in said[0] and words in said[0]
        wait(lambda: not any('stage-' in path for path in staging.left(NODES[0])), 240, 'the other node is not clean')
    finally:
        staging.slurm.srun('-N1', '-w', NODES[1], 'umount', '--lazy', directory)
        for name in NODES:
            shutil.rmtree(staging.slurm.dir / f'local.{name}/own')


def test_damaged_image(staging):
    copy = staging.dir / 'environment.squashfs'
    shutil.copy(staging.image_env.image, copy)
    shutil.copy(f'{staging.image_env.image}.sha256', f'{copy}.sha256')
    with open(copy, 'r+b') as stream:
        stream.seek(100_000)
        stream.write(b'damaged')
    done = staging(env={'SLINGTORCH_ENVIRONMENT_IMAGE': copy})
    assert_staged(done, (False, False))
    for node in NODES:
        [line] = [line for line in done.stderr.splitlines() if f'node {node}: not staged: ' in line]
        assert 'is not the one that was installed (sha256 ' in line and 'eb --rebuild' in line
    wait(staging.nothing_is_left, 240, 'the nodes are not clean')


def test_no_fuse(staging):
    some = staging.dir / 'some'
    some.mkdir()
    for program in {path.name: path for path in (*pathlib.Path('/usr/bin').iterdir(), *staging.bin.iterdir())}.values():
        if program.name not in ('squashfuse', 'squashfuse_ll'):
            (some / program.name).symlink_to(program)
    done = staging(env={'PATH': f'{staging.image_env.root}/bin:{some}'})
    assert_staged(done, (True, True))
    for node in NODES:
        assert done.stderr.count(f'node {node}: cannot mount the image (no squashfuse') == 1
    wait(staging.nothing_is_left, 240, 'the nodes are not clean')


def test_rank_0_says_nothing(staging):
    """No sbcast gets through to the other node, which waits as long as it is told to."""
    staging.program('sbcast', 'exit 1')
    done = staging(env={'SLINGTORCH_STAGE_TIMEOUT': '1'})
    assert_staged(done, (True, False))
    assert f'node {NODES[1]}: not staged: no answer from rank 0' in done.stderr


@pytest.mark.parametrize('number', ['TERM', 'KILL'])
@pytest.mark.parametrize('when', ['staging', 'running'])
def test_killed_job_leaves_nothing(staging, when, number):
    if when == 'staging':
        # half of the image has arrived on the nodes
        half = staging.dir / 'half'
        staging.program('sbcast', f'head -c 1000000 "$2" > {half}; /usr/bin/sbcast "$1" {half} "$3"; echo running; '
                                  'exec tail -f /dev/null')
    process = staging.slurm.popen('-N2', '--ntasks-per-node=2', START, '--stage', '-c', WAIT, env=staging.env)
    for _ in range({'staging': 1, 'running': 4}[when]):
        assert process.stdout.readline() == 'running\n'
    jobs = run(['squeue', '-h', '-o', '%i'], env=staging.slurm.env).stdout.split()
    run(['scancel', *([] if number == 'TERM' else ['--signal=KILL']), *jobs], env=staging.slurm.env)
    process.communicate(timeout=240)
    assert process.returncode != 0
    wait(staging.nothing_is_left, 240, 'the nodes are not clean')
