# SPDX-License-Identifier: GPL-2.0-only
"""MPI launchers: MPICH's hydra and Open MPI."""

import os
import shutil
import subprocess

from . import clean_environ, missing, run


class Launcher:
    """mpiexec of one MPI.

    :ivar path: full path of the launcher
    :ivar flags: options it needs on a small machine, possibly as root
    """

    def __init__(self, path, flags):
        self.path = path
        self.flags = flags

    def command(self, ranks, *command):
        """The whole command line that starts `command` on so many ranks of this machine."""
        return [self.path, *self.flags, '-n', str(ranks), *map(str, command)]

    def run(self, ranks, *command, env=None, **kwargs):
        """
        Run it; keyword arguments as in testbed.run(), `env` is the whole environment.

        Its standard input stays open while it runs: hydra of MPICH 4.0.2 passes the end of its own on to rank 0, and dies of
        SIGPIPE where that rank has ended already (11 of 150 runs of ranks that end at once; none with an open pipe).
        """
        reader, writer = os.pipe()
        try:
            return run(self.command(ranks, *command), env=clean_environ() if env is None else env, stdin=reader, **kwargs)
        finally:
            os.close(reader)
            os.close(writer)

    def popen(self, ranks, *command, env=None, **kwargs):
        """Start it in a process group of its own, with both streams as pipes."""
        return subprocess.Popen(self.command(ranks, *command), env=clean_environ() if env is None else env,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True, **kwargs)


def mpich():
    """MPICH's hydra; the fork launcher, since a test that runs inside an allocation must not start steps."""
    path = shutil.which('mpiexec.hydra') or missing('MPICH (package mpich)')
    return Launcher(path, ['-launcher', 'fork'])


def openmpi():
    """Open MPI's mpirun."""
    path = shutil.which('mpirun.openmpi') or missing('Open MPI (package openmpi-bin)')
    root = ['--allow-run-as-root'] if os.geteuid() == 0 else []
    return Launcher(
        path,
        root + ['--oversubscribe', '--bind-to', 'none', '--mca', 'btl', 'self,vader,tcp', '--mca', 'plm', 'isolated'],
    )
