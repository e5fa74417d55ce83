# SPDX-License-Identifier: GPL-2.0-only
"""
Lock of an installation that the kernel holds: it ends with the processes that hold it, however these end.

EasyBuild's own lock is a directory that a killed run leaves behind (create_lock in easybuild/tools/filetools.py). Here
a file beside it is locked (flock) and says who installs. Where flock is missing or local, EasyBuild's lock decides.
"""
import contextlib
import fcntl
import functools
import os
import socket
import subprocess
import sys
import time

from easybuild.tools.build_log import EasyBuildError, print_msg, print_warning
from easybuild.tools.config import build_option
from easybuild.tools.filetools import det_lock_path, mkdir, remove_dir

_HELD = {}  # path of the locked file: its descriptor

# What eb starts holds the lock too, as it may outlive eb. Popen closes what is not named; run_shell_cmd names nothing.
subprocess.Popen.__init__ = functools.partialmethod(subprocess.Popen.__init__, pass_fds=_HELD.values())


def take_lock(easyblock):
    """
    Lock an installation, and remove EasyBuild's lock if a killed run of this host has left it.

    :raises EasyBuildError: if another run, or what it has started, holds the lock for longer than --wait-on-lock-limit
    """
    if easyblock.dry_run or build_option('ignore_locks'):
        return
    name, silent, host = easyblock.full_mod_name, build_option('silent'), socket.gethostname()
    # the name that EasyBlock.run_all_steps (easybuild/framework/easyblock.py) gives it
    lock = det_lock_path(easyblock.installdir.replace('/', '_'))
    path = lock + '.holder'
    try:
        mkdir(os.path.dirname(path), parents=True)
    except PermissionError as err:
        raise EasyBuildError("You may not use the directory in which software is installed: %s", err)
    try:
        fd, holder = wait_for(path, name, silent)
    except OSError as err:  # no flock, or the file of another user
        easyblock.log.info("slingtorch: EasyBuild's lock stands alone: %s", err)
        return
    if os.path.isdir(lock) and not holder.endswith(' on ' + host):
        os.close(fd)
        print_warning("slingtorch: the lock of %s is held by %s. If that has ended, remove %s or use --ignore-locks",
                      name, holder or 'a run that left no name', lock, silent=silent)
        return
    if os.path.isdir(lock):
        remove_dir(lock)
        print_msg("slingtorch: an earlier installation of %s was killed (%s): its lock is removed and the installation "
                  "is done again" % (name, holder), silent=silent)
    _HELD[path] = fd
    os.ftruncate(fd, 0)
    os.pwrite(fd, ('process %d of user %s, since %s, on %s' % (
        os.getpid(), os.environ.get('USER', os.getuid()), time.strftime('%F %T'), host)).encode(), 0)


def wait_for(path, name, silent):
    """Lock a file: its descriptor, and what is in it. OSError if it cannot be locked, EasyBuildError if not in time."""
    waited, limit, interval = 0, build_option('wait_on_lock_limit'), build_option('wait_on_lock_interval')
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        holder = os.read(fd, 1000).decode()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:  # else the run that held it has just removed it
                return fd, holder
        except BlockingIOError:
            if limit != -1 and waited >= limit:
                raise EasyBuildError("%s is being installed already, by %s, or by what that has started and left "
                                     "behind ('fuser -v %s' lists it). Wait until it has ended and try again, or let "
                                     "eb wait: --wait-on-lock-limit=3600", name, holder, path)
            print_msg("%s is being installed by %s, waiting %d seconds..." % (name, holder, interval), silent=silent)
            sys.stdout.flush()  # into a job's output or a pipe it would come with the next 8 kB
            time.sleep(interval)
            waited += interval
        os.close(fd)


def release_lock():
    """Release the lock that this run holds, also for what still runs of it: that installation is over."""
    for path in list(_HELD):
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(_HELD.pop(path))
