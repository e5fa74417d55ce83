# SPDX-License-Identifier: GPL-2.0-only
"""Fixtures for the real components, the rule that in CI nothing is skipped, and which worker runs what."""

import collections
import functools
import os
import pathlib
import shutil
import signal
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import testbed  # noqa: E402
from testbed import easybuild, images, modulestools, mpi, otheruser, quickstarted, slurm as slurm_, stagedenv  # noqa: E402

REMARK = 'remark'


# --- the rule


def pytest_configure(config):
    for name in set(os.environ) - set(testbed.clean_environ()):
        del os.environ[name]
    if testbed.installed_from() != testbed.ROOT:
        # a virtual environment of another checkout: the package of this one is to be tested
        sys.path.insert(0, str(testbed.ROOT))
        os.environ['PYTHONPATH'] = str(testbed.ROOT)
    bin_dir = str(easybuild.BIN)
    if bin_dir not in os.environ['PATH'].split(os.pathsep):
        os.environ['PATH'] = bin_dir + os.pathsep + os.environ['PATH']
    # a runner in the background hands on ignored signals, and what the tests start would ignore them too
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(ignored) == signal.SIG_IGN:
            signal.signal(ignored, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, functools.partial(interrupt, config))


def interrupt(config, *_):
    """A polite kill stops what the fixtures started, as Ctrl-C does: that reaches the workers by itself."""
    if config.pluginmanager.has_plugin('dsession'):
        for gateway in config.pluginmanager.get_plugin('dsession').nodemanager.group:
            gateway._io.popen.send_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


class Watch:
    """Remembers what was skipped, whether one test or a whole file, what tests have to say, and how long they took."""

    def __init__(self):
        self.skipped = {}
        self.remarks = []
        self.seconds = collections.defaultdict(float)
        self.tests = collections.Counter()

    def pytest_runtest_logreport(self, report):
        directory = os.path.dirname(report.nodeid.partition('::')[0])
        self.seconds[directory] += report.duration
        self.tests[directory] += report.when == 'call'
        if report.when == 'call':
            self.remarks += [text for name, text in report.user_properties if name == REMARK]
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report):
        if report.skipped and not hasattr(report, 'wasxfail'):
            # a file that is skipped is so in each worker
            self.skipped[report.nodeid] = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr


def pytest_sessionstart(session):
    session.config.pluginmanager.register(Watch(), 'slingtorch-watch')


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    watch = session.config.pluginmanager.get_plugin('slingtorch-watch')
    if testbed.in_ci() and watch.skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    watch = config.pluginmanager.get_plugin('slingtorch-watch')
    if testbed.in_ci() and watch.skipped:
        terminalreporter.section('skipped, which is a failure in CI', red=True)
        for test, reason in watch.skipped.items():
            terminalreporter.line(f'{test}: {reason}')
    if len(watch.tests) > 1:
        workers = config.getoption('numprocesses', 0) or 1
        terminalreporter.section(f'time by directory, in all {workers} workers together' if workers > 1
                                 else 'time by directory')
        for directory, seconds in sorted(watch.seconds.items(), key=lambda item: -item[1]):
            terminalreporter.line(f'{seconds:6.0f} s  {watch.tests[directory]:5} tests  {directory}')
    for remark in watch.remarks:
        terminalreporter.line(remark)


@pytest.fixture
def remark(record_property):
    """A function: what a test says with it is at the end of the run's output, whether it passes or fails."""
    return functools.partial(record_property, REMARK)


# --- several workers (pytest-xdist)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Ours, unless another one is asked for (--dist)."""
    if config.getoption('dist') == 'load':
        from testbed import workers     # not at the top: it needs pytest-xdist
        return workers.Scheduling(config, log)


@pytest.fixture(autouse=True)
def own_temporary_directory():
    """EasyBuild configured inside a test moves Python's temporary directory: not for the tests after it."""
    tempdir, before = tempfile.tempdir, {name: os.environ.get(name) for name in ('TMPDIR', 'TEMP', 'TMP')}
    yield
    tempfile.tempdir = tempdir
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# --- the components


@pytest.fixture(scope='session')
def lmod():
    """Lmod with Lua module files: testbed.modulestools.ModulesTool."""
    return modulestools.lmod()


@pytest.fixture(scope='session')
def envmodules():
    """Environment Modules with Tcl module files: testbed.modulestools.ModulesTool."""
    return modulestools.envmodules()


@pytest.fixture(scope='session', params=['lmod', 'envmodules'])
def modulestool(request):
    """Both modules tools, one after the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope='session')
def mpich():
    """MPICH's mpiexec.hydra: testbed.mpi.Launcher."""
    return mpi.mpich()


@pytest.fixture(scope='session')
def openmpi():
    """Open MPI's mpirun: testbed.mpi.Launcher."""
    return mpi.openmpi()


@pytest.fixture(scope='session')
def runtime():
    """Directory of the commands apptainer and singularity."""
    return images.runtime()


@pytest.fixture(scope='session')
def slurm():
    """A running cluster of two nodes: testbed.slurm.Cluster. Stopped when the tests end, however they end."""
    slurm_.clean_up_killed_runs()
    cluster = slurm_.Cluster()
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture(scope='session')
def separate_nodes():
    """As slurm, but each node has a network, mounts and a host name of its own, as a real one."""
    slurm_.clean_up_killed_runs()
    cluster = slurm_.Cluster(separate=True)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def other_user():
    """testbed.otheruser.OtherUser: runs commands as another user, on copies that this user can read."""
    other = otheruser.OtherUser()
    yield other
    shutil.rmtree(other.directory)


@pytest.fixture
def eb_env(tmp_path, lmod):
    """Real `eb` with the bundle activated and a prefix of its own: testbed.easybuild.EasyBuild, to be called."""
    return easybuild.EasyBuild(tmp_path / 'eb', lmod)


@pytest.fixture(scope='session')
def installed_pytorch(lmod):
    """PyTorch for this machine as ./quickstart and `eb` install it, also as one image: testbed.easybuild.Installation.

    Takes two minutes, is kept.
    """
    return quickstarted.installed(lmod)


@pytest.fixture(scope='session')
def image_env(lmod, tmp_path_factory):
    """A small environment that is also one image, as `eb` installs it: testbed.easybuild.Installation, with `image`."""
    return stagedenv.installed(tmp_path_factory.mktemp('image-env'), lmod)


@pytest.fixture
def submit(slurm, lmod, tmp_path):
    """A function: copy a job script, put other words into it, submit it from a shell that has Lmod; the ended job."""
    (tmp_path / 'init').write_text(f'unset BASH_ENV\n{lmod.init}\n')

    def submitted(script, words, *options, timeout=240, **env):
        text = script.read_text()
        for old, new in words.items():
            assert old in text
            text = text.replace(old, str(new))
        return slurm.sbatch(text, *options, cwd=tmp_path, timeout=timeout, env={**lmod.env, 'BASH_ENV': tmp_path / 'init', **env})

    return submitted
