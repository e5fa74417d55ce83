"""Fixtures for the real components, and the rule that in CI nothing is skipped."""

import os
import pathlib
import signal
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import testbed  # noqa: E402
from testbed import easybuild, modulestools, mpi, slurm as slurm_  # noqa: E402

skipped = pytest.StashKey()


# --- the rule


def pytest_configure(config):
    config.stash[skipped] = []
    for name in set(os.environ) - set(testbed.clean_environ()):
        del os.environ[name]
    bin_dir = str(easybuild.BIN)
    if bin_dir not in os.environ['PATH'].split(os.pathsep):
        os.environ['PATH'] = bin_dir + os.pathsep + os.environ['PATH']
    # a runner in the background hands on ignored signals, and what the tests start would ignore them too
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(ignored) == signal.SIG_IGN:
            signal.signal(ignored, signal.SIG_DFL)
    # a polite kill stops what the fixtures started, as Ctrl-C does
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


class SkipWatch:
    """Remembers what was skipped, whether one test or a whole file."""

    def __init__(self, config):
        self.config = config

    def note(self, report):
        if report.skipped and not hasattr(report, 'wasxfail'):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.config.stash[skipped].append(f'{report.nodeid}: {reason}')

    def pytest_runtest_logreport(self, report):
        self.note(report)

    def pytest_collectreport(self, report):
        self.note(report)


def pytest_sessionstart(session):
    session.config.pluginmanager.register(SkipWatch(session.config))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if testbed.in_ci() and session.config.stash[skipped] and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if testbed.in_ci() and config.stash[skipped]:
        terminalreporter.section('skipped, which is a failure in CI', red=True)
        for line in config.stash[skipped]:
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def own_temporary_directory():
    """EasyBuild configured inside a test moves Python's temporary directory: not for the tests after it."""
    tempdir, variable = tempfile.tempdir, os.environ.get('TMPDIR')
    yield
    tempfile.tempdir = tempdir
    if variable is None:
        os.environ.pop('TMPDIR', None)
    else:
        os.environ['TMPDIR'] = variable


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
def slurm():
    """A running cluster of two nodes: testbed.slurm.Cluster. Stopped when the tests end, however they end."""
    slurm_.clean_up_killed_runs()
    cluster = slurm_.Cluster()
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def eb_env(tmp_path, lmod):
    """Real `eb` with the bundle activated and a prefix of its own: testbed.easybuild.EasyBuild, to be called."""
    return easybuild.EasyBuild(tmp_path / 'eb', lmod)


@pytest.fixture(scope='session')
def installed_pytorch(lmod):
    """PyTorch for this machine as `eb` installs it: testbed.easybuild.Installation. Takes a minute, is kept."""
    return easybuild.installed('PyTorch-2.13.0-local-cpu.eb', lmod)
