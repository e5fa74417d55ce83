# SPDX-License-Identifier: GPL-2.0-only
"""A `python` whose ranks are forks of a process that has imported PyTorch: a start costs 0.1 s instead of 3 to 4.

For tests of what programs do, not of how PyTorch is found and loaded:

    pytorch = forkedtorch.quick(installed_pytorch)      # the same, with such a `python` in front in its PATH

What `python` starts is a child of the server, in the namespaces, directory and environment of who asked, with its three
streams. That one waits, hands signals on, and ends as the child does; if it is killed, so is the child. Other options
than -u, -B and -c, and other numbers of threads than one, get the real Python.

The server is this file, run by the installation's Python. It serves all workers, and ends with the last of them.
"""

import array
import contextlib
import ctypes
import hashlib
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys

HANDED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
NOT_HERE = ('PYTHONHOME', 'PYTHONWARNINGS', 'LD_PRELOAD')
"""Variables that matter before a Python starts."""


leases = {}
"""Connections that keep the servers alive as long as this process lives: {directory: socket}."""


def quick(installation):
    """The installation, with the other `python`, which is also its `quick`, in front in the PATH of its environment."""
    digest = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:12]
    directory = installation.modulepath.parents[1] / f'forkedtorch-{digest}'
    if directory not in leases:
        leases[directory] = lease(directory, installation.python)
    quick = installation.with_variables(PATH=f'{directory}:{installation.env["PATH"]}', OMP_NUM_THREADS='1')
    quick.quick = directory / 'python'
    return quick


def lease(directory, real):
    """A connection with which the server of this directory lives; it is started if there is none."""
    from . import locked
    with locked('forkedtorch'):
        connection = connected(directory)
        if not connection:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(mode=0o700)
            own = shutil.copy(__file__, directory)      # for the tests of other checkouts
            python = directory / 'python'
            python.write_text(f'#!{os.path.realpath(sys.executable)} -IS\nimport sys\nsys.path.insert(0, {str(directory)!r})\n'
                              f'import forkedtorch\nforkedtorch.ask({str(directory)!r}, {str(real)!r}, sys.argv[1:])\n')
            python.chmod(0o755)
            start([str(real), '-I', own, str(directory)])
            connection = connected(directory)
        connection.sendall(b'lease\n')
    return connection


def start(command):
    """Start the server, and wait until it listens."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={'OMP_NUM_THREADS': '1'},
                          start_new_session=True) as server:
        if not server.stdout.readline():
            raise RuntimeError(f'{" ".join(command)} does not start')
        server.returncode = 0   # nobody waits for it


def connected(directory):
    """A connection to the server of this directory, or None."""
    try:
        top = os.open(directory, os.O_PATH)
    except OSError:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f'/proc/self/fd/{top}/socket')    # the path of a socket may have 107 characters
        return connection
    except OSError:
        connection.close()
        return None
    finally:
        os.close(top)


# --- the `python`


def ask(directory, python, words):
    """Do what this Python does with these words."""
    rest = words
    while rest and rest[0] in ('-u', '-B'):
        rest = rest[1:]
    can = rest and (rest[0] == '-c' or rest[0][0] != '-') and os.environ.get('OMP_NUM_THREADS') == '1'
    connection = can and not any(os.environ.get(name) for name in NOT_HERE) and connected(directory)
    if not connection:
        os.execv(python, [python, *words])
    umask = os.umask(0)
    os.umask(umask)
    request = {'words': rest, 'env': dict(os.environ), 'cwd': os.getcwd(), 'umask': umask,
               'options': words[:len(words) - len(rest)]}
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 1, 2]))]
    connection.sendall(b'start\n')
    connection.sendmsg([b'f'], streams)
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    connection.sendall(json.dumps(request).encode() + b'\n')
    answers = connection.makefile()
    pid = int(answers.readline())
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
    status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# --- the server


def serve(directory):
    """Fork for each who asks, until nobody has a lease. Returns in such a child: what it is asked for, and by whom."""
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(directory)
    listener.bind('socket')
    listener.listen(64)
    os.write(1, b'ready\n')
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    leases, first = set(), True
    while leases or first:
        ready = select.select([listener, *leases], [], [], 60 if first else None)[0]
        if not ready:   # who has started it is gone
            break
        for ended in leases.intersection(ready):
            leases.remove(ended)
            ended.close()
        if listener in ready:
            connection, _ = listener.accept()
            kind = line_of(connection)
            if kind == b'lease':
                leases.add(connection)
                first = False
            elif kind and os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                for lease in leases:
                    lease.close()
                return answer(connection)
            else:
                connection.close()
    os._exit(0)


def line_of(connection):
    """A line, byte by byte: what follows it may have descriptors."""
    line = b''
    with contextlib.suppress(ConnectionError):
        while (byte := connection.recv(1)) not in (b'\n', b''):
            line += byte
    return line


def answer(connection):
    """Tell the number of the child, then its status; if nobody listens any more, kill it. Returns in the child."""
    streams = array.array('i')
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_LEN(3 * streams.itemsize))
    for _, _, data in ancillary:
        streams.frombytes(data)
    with connection.makefile() as stream:
        request = json.loads(stream.readline())
    asking = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        connection.close()
        return request, streams, asking
    for descriptor in streams:
        os.close(descriptor)
    connection.sendall(f'{pid}\n'.encode())
    ended = os.pidfd_open(pid)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):      # it may be gone
        connection.sendall(f'{status}\n'.encode())
    os._exit(0)


def enter(pid):
    """The namespaces and the root of that process, as far as they are others."""
    libc = ctypes.CDLL(None, use_errno=True)
    root = os.open(f'/proc/{pid}/root', os.O_PATH)
    for name in ('net', 'uts', 'mnt'):
        there = os.open(f'/proc/{pid}/ns/{name}', os.O_RDONLY)
        if not os.path.sameopenfile(there, own := os.open(f'/proc/self/ns/{name}', os.O_RDONLY)):
            if libc.setns(there, 0):
                raise OSError(ctypes.get_errno(), f'setns {name}')
        os.close(own)
        os.close(there)
    if os.geteuid() == 0:
        os.fchdir(root)
        os.chroot('.')
    os.close(root)


def become(request, streams, asking):
    """Be what was asked for; returns (arguments, or code) """
    enter(asking)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request['cwd'])
    os.umask(request['umask'])
    os.environ.clear()
    os.environ.update(request['env'])
    # new ones: those of the server know whether they are files
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, 'w', 1 if '-u' in request['options'] else -1, closefd=False)
    sys.stderr = open(2, 'w', 1, errors='backslashreplace', closefd=False)
    sys.dont_write_bytecode = '-B' in request['options'] or 'PYTHONDONTWRITEBYTECODE' in os.environ
    return request['words']


def run(words, python):
    """As Python does with a program (which may be a directory) and its arguments, or with -c."""
    import runpy
    sys.executable, sys.orig_argv = python, [python, *words]
    sys.path[0:0] = filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))
    if 'PYTHONPATH' in os.environ:
        sys.modules.pop('sitecustomize', None)      # Debian's Python has one, which the server has imported
        with contextlib.suppress(ImportError):
            import sitecustomize  # noqa: F401
    if words[0] == '-c':
        sys.argv, sys.path[0:0] = ['-c', *words[2:]], ['']
        exec(compile(words[1], '<string>', 'exec'), {'__name__': '__main__'})
    else:
        sys.argv = words
        if not os.path.isdir(words[0]):
            sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
        runpy.run_path(words[0], run_name='__main__')


if __name__ == '__main__':
    import gc
    import sklearn.datasets  # noqa: F401
    import torch._dynamo  # noqa: F401, which DistributedDataParallel and optimizers import
    gc.collect()
    gc.freeze()
    run(become(*serve(sys.argv[1])), f'{sys.argv[1]}/python')
