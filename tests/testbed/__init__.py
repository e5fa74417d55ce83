# SPDX-License-Identifier: GPL-2.0-only
"""The real components the tests run: Slurm, Lmod, Environment Modules, MPICH, Open MPI, EasyBuild.

Each module here finds or starts one of them and hands out a small object; tests/conftest.py makes fixtures of these.
Nothing here changes a setting of the machine, and what is started is stopped.
"""

import contextlib
import fcntl
import http.server
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
"""Top of the checkout, which is also the bundle root."""

DIR = pathlib.Path(os.environ.get('SLINGTORCH_TEST_DIR') or ROOT / '.testbed').resolve()
"""Where ./run-tests puts everything it makes; kept between runs."""

NODES = ('nid000001', 'nid000002')
"""Names of the emulated nodes; /etc/hosts resolves them to the loopback address."""

FOREIGN = ('EASYBUILD_', 'SLINGTORCH_', 'SLURM_', 'PMI_', 'PMIX_', 'OMPI_', 'HYDRA_', 'MPI_LOCAL', 'PALS_', 'PBS_',
           'LMOD_', '_ModuleTable', 'MODULE', '__MOD', 'EBROOT', 'EBVERSION', 'EBDEVEL', 'NCCL_', 'FI_', 'MPICH_',
           'APPTAINER', 'SINGULARITY', 'PYTEST_CURRENT_TEST', 'BASH_FUNC_', 'BASH_ENV')
"""Starts of names of variables that would leak from the shell of the person who runs the tests."""

RENDEZVOUS = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'LOADEDMODULES',
              '_LMFILES_', 'PYTHONPATH')


ORDINARY = ['setpriv', '--bounding-set=-dac_override,-dac_read_search', '--inh-caps=-dac_override,-dac_read_search'] * (
    os.geteuid() == 0)
"""Words before a command for which permissions of files count: root without the right to do everything."""


def said(done):
    """All that a CompletedProcess printed, in one line."""
    return ' '.join((done.stdout + done.stderr).split())


@contextlib.contextmanager
def serving(handler):
    """Address of an HTTP server on the loopback address."""
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f'http://127.0.0.1:{server.server_port}'
        finally:
            server.shutdown()
            thread.join()


def in_ci():
    """Whether a missing component is a failure (CI or SLINGTORCH_CI set) and not a skip."""
    return any(os.environ.get(name) not in (None, '', '0', 'false') for name in ('CI', 'SLINGTORCH_CI'))


def missing(what):
    """Skip the test because `what` is missing, with the remedy; in CI (tests/conftest.py) every skip is a failure."""
    pytest.skip(f'{what} is missing; remedy: run the tests with ./run-tests, which installs it')


def only_root(does):
    """Skip the test unless root runs it.

    :param does: what only root does, for example 'mounts file systems'
    """
    if os.geteuid() != 0:
        pytest.skip(f'only root {does}; remedy: run the tests as root')


def clean_environ():
    """This process's environment without anything a module, a job or EasyBuild put there."""
    own = ('SLINGTORCH_TEST_DIR', 'SLINGTORCH_CI', 'SLINGTORCH_DEBIAN_BUILD')
    return {
        key: value
        for key, value in os.environ.items()
        if key in own or not (key.startswith(FOREIGN) or key in RENDEZVOUS)
        or (key, value) == ('PYTHONPATH', str(ROOT))      # tests/conftest.py sets it
    }


def installed_from():
    """The checkout whose package a Python that this one starts imports, or None."""
    # not asked of importlib.metadata: it may find what setuptools left in this checkout
    command = [sys.executable, '-c', 'import slingtorch; print(slingtorch.__file__)']
    done = subprocess.run(command, cwd='/', stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return pathlib.Path(done.stdout.strip()).resolve().parents[1] if done.stdout else None


def run(command, env=None, timeout=120, check=True, cwd=None, input=None, stdin=subprocess.DEVNULL):
    """Run `command` (list) and return the CompletedProcess with text stdout and stderr.

    :param check: a non-zero status is a failure of the test that shows both streams
    :param stdin: where there is no `input`, the descriptor that it reads
    """
    done = subprocess.run([str(word) for word in command], env=env, timeout=timeout, cwd=cwd, input=input,
                          stdin=stdin if input is None else None, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)
    return checked(done, check)


def checked(done, check=True):
    """This CompletedProcess; if `check`, a non-zero status is a failure of the test that shows both streams."""
    if check and done.returncode != 0:
        pytest.fail(
            f'{" ".join(map(str, done.args))}\nstatus {done.returncode}\n'
            f'--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}',
            pytrace=False,
        )
    return done


def parse_env0(text):
    """What `env -0` printed, as a dictionary."""
    return dict(entry.split('=', 1) for entry in text.split('\0') if '=' in entry)


@contextlib.contextmanager
def locked(name):
    """One process at a time in the testbed directory, for what is cached there."""
    DIR.mkdir(parents=True, exist_ok=True)
    with open(DIR / f'.{name}.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def copy_of_checkout(target):
    """Copy to `target`, which must not exist, what a clone of this checkout would have, and what is new; the path."""
    # also in a checkout of somebody else's: git only lists
    options = ['-z', '--cached', '--others', '--exclude-standard']
    listed = run(['git', '-c', f'safe.directory={ROOT}', 'ls-files', *options], cwd=ROOT)
    for name in filter(None, listed.stdout.split('\0')):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def runscripts_of_another_machine(scripts, target, values):
    """
    Copy runscripts to `target`, which must not exist, with other values of what they read of the machine; the path.

    :param values: {name at the top of conda-python-distributed: value}; no variable of the environment sets them
    """
    shutil.copytree(scripts, target)
    script = target / 'conda-python-distributed'
    text = script.read_text()
    for name, value in values.items():
        text, count = re.subn(rf'^{name}=.*$', f'{name}={shlex.quote(str(value))}', text, flags=re.M)
        assert count == 1, name
    script.write_text(text)
    return target


def path_without(command, directory):
    """
    A search path in which one command is not, and all others are.

    :param directory: where to make what it needs; it must not exist
    """
    directory.mkdir()
    entries = []
    for number, entry in enumerate(os.environ['PATH'].split(os.pathsep)):
        if os.path.exists(os.path.join(entry, command)):
            links = directory / str(number)
            links.mkdir()
            for name in os.listdir(entry):
                if name != command:
                    (links / name).symlink_to(os.path.join(entry, name))
            entry = str(links)
        entries.append(entry)
    return os.pathsep.join(entries)


def raising(error):
    """A function that takes anything and raises this."""
    def function(*_, **named):
        raise error
    return function
