# SPDX-License-Identifier: GPL-2.0-only
"""Lock of an installation that the kernel holds: it ends with the eb that holds it, however that ends.

EasyBuild's own lock is a directory that a killed run leaves behind (create_lock in easybuild/tools/filetools.py). Here
a file beside it is locked (flock) and says who installs. Where flock is missing or local, EasyBuild's lock decides.
"""
import contextlib
import fcntl
import glob
import os
import socket
import sys
import time
from typing import Any, Dict, List, Tuple

from easybuild.tools.build_log import EasyBuildError, print_msg, print_warning
from easybuild.tools.config import build_option
from easybuild.tools.filetools import det_lock_path, mkdir, remove_dir

# In the environment of what a run starts, its line in the file: a pip or make that outlives a killed eb has it still.
MARK = 'SLINGTORCH_INSTALLING'

_HELD: Dict[str, int] = {}  # path of the locked file: its descriptor


def take_lock(easyblock: Any) -> None:
    """Lock an installation, removing what a killed run of this host left; EasyBuildError after --wait-on-lock-limit."""
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
    holder = 'process %d of user %s, since %s, on %s' % (
        os.getpid(), os.environ.get('USER', os.getuid()), time.strftime('%F %T'), host)
    # EasyBuild goes back to the second one before extensions and the sanity check (EasyBlock.load_module)
    os.environ[MARK] = easyblock.initial_environ[MARK] = holder
    os.ftruncate(fd, 0)
    os.pwrite(fd, holder.encode(), 0)


def left_behind(holder: str) -> List[str]:
    """Numbers of the processes that this run has started, of those on this host that this user may look at."""
    mark, found = ('%s=%s' % (MARK, holder)).encode(), []
    for path in glob.glob('/proc/[0-9]*/environ'):
        with contextlib.suppress(OSError), open(path, 'rb') as environ:
            if mark in environ.read().split(b'\0'):
                found.append(path.split('/')[2])
    return found


def wait_for(path: str, name: str, silent: bool) -> Tuple[int, str]:
    """Lock a file: its descriptor, and what is in it. OSError if it cannot be locked, EasyBuildError if not in time."""
    waited, limit, interval = 0, build_option('wait_on_lock_limit'), build_option('wait_on_lock_interval')
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        holder = os.read(fd, 1000).decode()
        who = holder or 'a run that has just begun'
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            processes = ' '.join(left_behind(holder))
            if not processes and os.fstat(fd).st_nlink:
                return fd, holder
            # else the run that held it has just removed it
            who = processes and '%s (killed; processes that it left behind: %s)' % (holder, processes)
        os.close(fd)
        if who:
            if limit != -1 and waited >= limit:
                raise EasyBuildError("%s is being installed already, by %s. Wait until it has ended and try again, or "
                                     "let eb wait: --wait-on-lock-limit=3600", name, who)
            print_msg("%s is being installed by %s, waiting %d seconds..." % (name, who, interval), silent=silent)
            sys.stdout.flush()  # into a job's output or a pipe it would come with the next 8 kB
            time.sleep(interval)
            waited += interval


def release_lock() -> None:
    """Release the lock that this run holds, also for what still runs of it: that installation is over."""
    os.environ.pop(MARK, None)
    for path in list(_HELD):
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(_HELD.pop(path))
