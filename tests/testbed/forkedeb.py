# SPDX-License-Identifier: GPL-2.0-only
"""`eb` in a fork of a process that has imported EasyBuild: an error case costs a tenth of a second less than two.

testbed.easybuild.EasyBuild does this by itself; use it, not this. In a test that runs `eb` in its own way:

    done = forkedeb.eb(['Small.eb', '--rebuild'], env, cwd, timeout=300)    # as subprocess.run() of `eb` would
    script = forkedeb.command(directory / 'eb')     # for a shell script that calls `eb`
    process = forkedeb.Started(['Small.eb'], env, cwd, directory / 'output')    # to be watched and killed

The child is what `eb` is: the same code as `python -O -m easybuild.main`, with exactly the environment and working
directory that are given, a session of its own, standard input from /dev/null. What it prints goes to a file. One to be
wrapped in another program wants a real `eb` (`EasyBuild(..., fresh=True)`, or a Popen).
test_testbed.py::test_forked_eb_is_eb compares the two.

The server is this file run as a program. It serves one process of pytest and ends with it.
"""

import atexit
import contextlib
import gc
import json
import os
import pathlib
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile

NOT_HERE = ('EB_INSTALLPYTHON', 'PYTHONHOME', 'PYTHONOPTIMIZE', 'PYTHONSTARTUP', 'PYTHONWARNINGS', 'LD_PRELOAD')
"""Variables that matter before a Python starts: with one of them set a fork is not what `eb` would be."""


class Server:
    """The process that imports EasyBuild once.

    :ivar directory: holds its socket, only this user may enter it
    """

    def __init__(self):
        self.directory = tempfile.TemporaryDirectory(prefix='eb-', dir='/tmp')
        self.socket = f'{self.directory.name}/socket'
        command = [sys.executable, '-O', os.path.abspath(__file__), self.socket]
        # as the script `eb` sets it: an MPI that mpi4py starts does not survive a fork
        env = {**os.environ, 'FANCYLOGGER_IGNORE_MPI4PY': '1'}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
                                        start_new_session=True)
        if not self.process.stdout.readline():
            raise RuntimeError(f'{" ".join(command)} does not start')
        self.owner = os.getpid()
        atexit.register(self.stop)

    def stop(self):
        if self.owner == os.getpid():
            self.process.stdin.close()
            self.process.wait()

    def run(self, args, env, cwd, timeout, module='easybuild.main'):
        """Run `eb ARGS`; a CompletedProcess with text streams. subprocess.TimeoutExpired if it does not end."""
        with tempfile.TemporaryDirectory(dir=self.directory.name) as directory:
            out, err = pathlib.Path(directory, 'out'), pathlib.Path(directory, 'err')
            try:
                status = ask(self.socket, args, env, cwd, out, err, timeout, module)
            except TimeoutError:
                raise subprocess.TimeoutExpired(['eb', *args], timeout, out.read_text(), err.read_text())
            return subprocess.CompletedProcess(['eb', *args], status, out.read_text(), err.read_text())


def begin(connection, path, args, env, cwd, out, err, module='easybuild.main'):
    """Let `eb ARGS` run, which writes to the files `out` and `err`; its process number, and where its status will come."""
    umask = os.umask(0)
    os.umask(umask)
    request = {'args': [str(arg) for arg in args], 'env': dict(env), 'cwd': str(cwd), 'out': str(out),
               'err': str(err), 'umask': umask, 'module': module}
    connection.connect(path)
    connection.sendall(json.dumps(request).encode() + b'\n')
    answers = connection.makefile()
    return int(answers.readline()), answers


def ask(path, args, env, cwd, out, err, timeout=None, module='easybuild.main'):
    """Run `eb ARGS`; its status. TimeoutError if it does not end in time."""
    with socket.socket(socket.AF_UNIX) as connection:
        pid, answers = begin(connection, path, args, env, cwd, out, err, module)
        connection.settimeout(timeout)
        try:
            return int(answers.readline())
        except BaseException:   # Ctrl-C as well: it is in a session of its own
            os.killpg(pid, signal.SIGKILL)
            raise


class Started:
    """An `eb` that runs, in a process group of its own.

    :ivar pid: its process number, which is that of the group
    :ivar returncode: its status, negative for a signal, as soon as it is known
    """

    def __init__(self, args, env, cwd, output):
        self.output, self.returncode = pathlib.Path(output), None
        self.connection = socket.socket(socket.AF_UNIX)
        self.pid, self.answers = begin(self.connection, the_server().socket, args, env, cwd, output, output)

    def poll(self):
        """Its status, or None while it runs."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.end()
        return self.returncode

    def end(self, timeout=300):
        """All that it printed, when it has ended; status and output are there afterwards."""
        if self.returncode is None:
            self.connection.settimeout(timeout)
            self.returncode = int(self.answers.readline())
            self.answers.close()
            self.connection.close()
        return self.output.read_text()


server = None


def can(env):
    """Whether a fork with this environment is what `eb` would be."""
    python = env.get('EB_PYTHON')
    return not any(env.get(name) for name in NOT_HERE) and (not python or os.path.exists(python) and
                                                            os.path.samefile(python, sys.executable))


def eb(args, env, cwd, timeout=600):
    """Run `eb ARGS` in a fork: see above.

    :param env: the whole environment
    :return: CompletedProcess with text streams
    :raises subprocess.TimeoutExpired: after so many seconds; it and what it started in its session are killed
    """
    return the_server().run(args, env, cwd, timeout)


def slingtorch(args, env, cwd, timeout=600):
    """Run `python -m slingtorch ARGS` in a fork, likewise: importing EasyBuild is a third of what it does."""
    return the_server().run(args, env, cwd, timeout, 'slingtorch')


def the_server():
    """The server of this process, started at the first call."""
    global server
    if not server or server.owner != os.getpid():
        server = Server()
    return server


def command(path, module='easybuild.main'):
    """Write to `path` a command that does what `eb` does, for scripts that call it; the path."""
    words = [sys.executable, '-IS', os.path.abspath(__file__), '--ask', the_server().socket, module]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
    return path


# --- the other side


def become_eb(request):
    """Be the `eb` of this request, until it ends."""
    os.chdir(request['cwd'])
    os.umask(request['umask'])
    for name, descriptor in ((os.devnull, 0), (request['out'], 1), (request['err'], 2)):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request['env'])
    if request['module'] == 'easybuild.main':
        # what the script `eb` adds
        os.environ.update(PYTHONOPTIMIZE='1', FANCYLOGGER_IGNORE_MPI4PY='1',
                          EB_SCRIPT_PATH=os.path.join(os.path.dirname(sys.executable), 'eb'))
    sys.path[0:0] = [os.getcwd(), *filter(None, request['env'].get('PYTHONPATH', '').split(os.pathsep))]
    sys.argv = [request['module'], *request['args']]

    # what was taken from the environment when it was imported
    import copy
    import importlib
    import runpy
    from easybuild.tools import config, environment, modules, options
    tempfile.tempdir = None
    config.DEFAULT_PREFIX = os.path.expanduser('~/.local/easybuild')
    config.mk_full_default_path.__defaults__ = (config.DEFAULT_PREFIX,)
    environment.ORIG_OS_ENVIRON = modules.ORIG_OS_ENVIRON = copy.deepcopy(os.environ)
    importlib.reload(options)

    sys.modules.pop(request['module'], None)    # it is to be __main__
    runpy.run_module(request['module'], run_name='__main__', alter_sys=True)


def answer(connection):
    """Fork the `eb` that is asked for; tell its process number, then its status. Returns in the `eb`: the request."""
    with connection.makefile() as stream:
        request = json.loads(stream.readline())
    pid = os.fork()
    if pid == 0:
        os.setsid()
        connection.close()
        return request
    connection.sendall(f'{pid}\n'.encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):      # it was told to go, and nobody waits
        connection.sendall(f'{status}\n'.encode())
    os._exit(0)


def warm_up():
    """Load and compile once what every `eb` would by itself: a fifth of its processor time."""
    import _imp
    import inspect
    from importlib import import_module
    from importlib.machinery import SourceFileLoader
    from easybuild.tools.toolchain.utilities import search_toolchain
    search_toolchain('')
    for name in ('easyblocks.pytorch', 'easyblocks.generic.tarball', 'tools.job.slurm', 'tools.repository.filerepo',
                 'tools.module_naming_scheme.hierarchical_mns', 'tools.package.package_naming_scheme.easybuild_pns'):
        import_module('easybuild.' + name)
    inspect.getouterframes(inspect.currentframe())      # for each error; fills inspect's caches

    # easyblocks are included from a new directory each time, in which there is no .pyc
    root, compiled = pathlib.Path(__file__).resolve().parents[2], {}
    for path in (root / 'easyblocks').rglob('*.py'):
        compiled[path.read_bytes()] = compile(path.read_bytes(), path, 'exec', dont_inherit=True)
    original = SourceFileLoader.source_to_code

    def source_to_code(self, data, path, **more):
        code = compiled.get(bytes(data))
        if not code:
            return original(self, data, path, **more)
        _imp._fix_co_filename(code, path)
        return code

    SourceFileLoader.source_to_code = source_to_code
    gc.collect()
    gc.freeze()     # the children neither look at it nor copy it


def serve(path):
    """Answer each connection in a process of its own. Returns in a child that is to become `eb`: the request."""
    del sys.path[0]     # that of this file, where easybuild.py is another one
    import easybuild.main  # noqa: F401
    warm_up()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    os.write(1, b'ready\n')
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return answer(connection)
        connection.close()
    os._exit(0)


if __name__ == '__main__':
    if sys.argv[1] == '--ask':
        streams = [f'/proc/{os.getpid()}/fd/{number}' for number in (1, 2)]
        sys.exit(ask(sys.argv[2], sys.argv[4:], os.environ, os.getcwd(), *streams, module=sys.argv[3]))
    become_eb(serve(sys.argv[1]))
