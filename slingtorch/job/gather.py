# SPDX-License-Identifier: GPL-2.0-only
"""
The ranks of a node exchange files in a private directory: each writes its report (atomically, by rename), and the first
one reads them all. A writer locks its file as long as it lives (flock(2)), so that nobody waits for an ended rank.
"""
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import sys
import time

from . import limits, messages
from .findings import Report, ignored_of
from .kinds import Any, Callable, Machine, Optional  # noqa: F401, in comments
from .machine import by_srun

# the verdict if rank 0 gave none; else it is 0 or 1
LOST = 'lost'
# seconds that ranks have to read it: those that may hang, and those that have reported, on a node that is busy
HANGS, READS = 2, 20
# the first rank's files: that it lives, and rank 0's verdict
FIRST, WORD = 'first', 'word'
NEEDED = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


class PeerLost(Exception):
    """Another process cannot be reached, or is gone; the text is for the user."""


class Usage(Exception):
    """The program was started wrongly."""


def read_ranks(environ: dict) -> None:
    """Check the variables that this program needs. :raises Usage: one is missing or wrong"""
    for name in NEEDED:
        if not environ.get(name):
            raise Usage("%s is not set. Start this with the runscript: srun ... $RUNSCRIPTS/conda-python-distributed "
                        "--check" % name)
        if name != 'MASTER_ADDR' and not environ[name].isdigit():
            raise Usage("%s='%s' is not a number" % (name, environ[name]))
    try:
        ignored_of(environ.get('SLINGTORCH_CHECK_IGNORE', ''))
    except ValueError as err:
        raise Usage(err)
    if environ['RANK'] == '0' and environ['LOCAL_RANK'] != '0':
        raise Usage("rank 0 has LOCAL_RANK=%s, but must have 0" % environ['LOCAL_RANK'])


def verdict(word: str, environ: dict) -> int:
    """The exit status for rank 0's verdict."""
    lost_is_fine = ('no-answer', '') in ignored_of(environ.get('SLINGTORCH_CHECK_IGNORE', ''))
    return 0 if word == '0' or word == LOST and lost_is_fine else 1


def guarded(name: str, machine: 'Machine', function: 'Callable') -> int:
    """Run a program of this package (`function`); returns its exit status, prints errors to stderr."""
    try:
        return function()
    except Usage as err:
        sys.stderr.write("slingtorch %s: %s\n" % (name, err))
        return 2
    except (PeerLost, OSError, RuntimeError) as err:     # RuntimeError: cannot start a new thread
        text = str(err)
        if "can't start new thread" in text or isinstance(err, BlockingIOError):    # EAGAIN of fork(2)
            text = "%s (%s): ask for more processes in the job, or have the limit raised where it is set" % (
                text, limits.few_processes(machine) or "see ulimit -u, or a filter of the container")
        say(name, machine, text)
        return verdict(LOST, machine.environ)


def say(name: str, machine: 'Machine', text: str) -> None:
    """Print a line of this rank to stderr."""
    sys.stderr.write("slingtorch %s: rank %s on %s: %s\n" % (
        name, machine.environ.get('RANK', '?'), machine.node, messages.one_line(text)))
    sys.stderr.flush()


def places(environ: dict) -> list:
    """
    The directories in which the ranks of this start meet on a node: in the job's private one, if the runscript has made
    it (runscripts/lib/caches.bash), and in /dev/shm, for example if the first one is full.
    """
    srun = by_srun(environ)
    start = [environ.get(name, '') for name in ('SLURM_JOB_ID', 'PBS_JOBID', 'TORCHELASTIC_RUN_ID',
                                                'SLURM_STEP_ID' if srun else 'MASTER_PORT')]
    # nodes that are emulated on one machine, or are containers on it, may share its /tmp
    node = re.sub(r'[^\w.-]', '_', environ.get('SLURMD_NODENAME', '')) if srun else ''
    with contextlib.suppress(OSError):
        node += '-%d' % os.stat('/proc/self/ns/net').st_ino
    name = 'check-%s-%s' % (hashlib.sha256('\0'.join(start).encode()).hexdigest()[:16], node)
    own = environ.get('SLINGTORCH_JOB_DIR')
    return [os.path.join(own or '', name)] * bool(own) + ['/dev/shm/slingtorch-%d-%s' % (os.getuid(), name)]


def make_private(path: str) -> None:
    """Make a directory. :raises OSError: it belongs to another user, or is writable by others"""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    state = os.lstat(path)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError("only you may be able to write to %s: have its owner remove it" % path)


class Files:
    """
    What the ranks of a node write for each other, in the first of places() that works: LocalRanks chooses it, and the
    others find it in wait_for_first(). The own files stay open for their locks.
    """

    def __init__(self, environ: dict) -> None:
        self.places, self.place, self.kept = places(environ), '', []  # type: list, str, list

    def write(self, name: str, thing: 'Any') -> None:
        """Write a file whole. :raises OSError: it cannot be written"""
        data, part = messages.dump(thing), os.path.join(self.place, '%s.part' % name)
        self.kept.append(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
        if os.write(self.kept[-1], data) < len(data):
            raise OSError("cannot write to %s: free space there" % self.place)
        with contextlib.suppress(OSError):      # without locks on this file system
            fcntl.flock(self.kept[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(part, os.path.join(self.place, name))

    def read(self, name: str) -> tuple:
        """(content of a file or None, whether its writer is alive); (None, None) if there is no such file."""
        try:
            descriptor = os.open(os.path.join(self.place, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None, None
        with open(descriptor, 'rb', 0) as stream:
            state = os.fstat(descriptor)
            if state.st_uid != os.getuid() or not stat.S_ISREG(state.st_mode):
                return None, None
            data, lives = stream.read(messages.MOST + 1), True
            with contextlib.suppress(OSError):      # its writer has the lock, or the file system has no locks
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                lives = False
        try:
            return messages.load(data), lives
        except ValueError:
            return None, lives

    def find_first(self) -> bool:
        """Find the directory of a first rank that lives."""
        for self.place in self.places:
            if self.read(FIRST)[1]:
                return True
        return False

    def wait_for_first(self, end: float) -> None:
        """Wait for find_first(). :raises PeerLost: there is none by the time `end`"""
        if not messages.until(self.find_first, end):
            raise PeerLost("no answer from the first rank of this node, which has written nothing to %s (a container "
                           "with --contain has its own /tmp): see its own messages, and check LOCAL_RANK in the job "
                           "script" % self.places[0])

    def wait_for_word(self, end: float) -> 'Any':
        """Wait for rank 0's verdict. :raises PeerLost: there is none by the time `end`, or the first rank has ended"""
        messages.until(lambda: not self.read(FIRST)[1] or self.read(WORD)[1], end)
        word = self.read(WORD)[0]
        if word is None:
            raise PeerLost("the first rank of this node has ended, or does not answer: see its own messages")
        return word

    def others(self) -> dict:
        """What the other ranks of the node have written: {rank: read()}."""
        with contextlib.suppress(OSError):
            names = filter(re.compile(r'rank-[0-9]{1,9}\Z').match, os.listdir(self.place))
            return {int(name[5:]): self.read(name) for name in names}
        return {}


class LocalRanks(Files):
    """
    On the first rank of a node: makes the directory, and reads what the others write.

    :ivar reports: {rank: (Report, details for node.py)}
    :ivar ended: {rank: process id} of ranks that ended before they reported
    :raises PeerLost: another process is already the first rank
    :raises OSError: none of the places is writable
    """

    def __init__(self, environ: dict) -> None:
        super().__init__(environ)
        self.count, world = int(environ['LOCAL_WORLD_SIZE']), int(environ['WORLD_SIZE'])
        self.may_come = set(range(world)) - {int(environ['RANK'])}
        self.reports, self.ended, self.came = {}, {}, set()  # type: dict, dict, set
        if self.find_first():
            raise PeerLost("another process of this start is also local rank 0 of this node: unset LOCAL_RANK in the "
                           "job script")
        for self.place in self.places:
            try:
                shutil.rmtree(self.place, ignore_errors=True)   # left behind by an earlier start that was killed
                make_private(self.place)
                full = limits.write_trial(self.place, self.count << 13)     # more than the ranks usually write
                if full:
                    raise OSError(full)
                self.write(FIRST, {'pid': os.getpid()})
                return
            except OSError as err:
                wrong = err
                shutil.rmtree(self.place, ignore_errors=True)
        raise OSError("cannot write to %s (%s): free space there" % (' or '.join(self.places), wrong))

    def look(self, silent: float) -> bool:
        """
        Read the files written so far; whether all other ranks of the node have reported or ended.

        :param silent: the time from which not to wait for ranks that have not written anything
        """
        for rank, (thing, lives) in self.others().items():
            if rank in self.reports or lives is None or rank not in self.may_come:
                continue
            self.came.add(rank)
            if messages.has_form(thing, {'report': dict, 'details': dict}):
                with contextlib.suppress(ValueError):
                    self.reports[rank] = Report.load(thing['report'], 1 << rank), dict(thing['details'], rank=rank)
            elif not lives and messages.has_form(thing, {'pid': int}):
                self.ended[rank] = thing['pid']
        wanted = len(self.came) if time.monotonic() > silent else self.count - 1
        return len(set(self.reports) | set(self.ended)) >= wanted

    def tell(self, word: str) -> None:
        """Pass on rank 0's verdict; remove the directory once all ranks have read it and ended."""
        self.write(WORD, word)
        begin = time.monotonic()
        messages.until(lambda: not any(lives and (rank in self.reports or time.monotonic() < begin + HANGS)
                                       for rank, (_, lives) in self.others().items()), begin + READS)
        shutil.rmtree(self.place, ignore_errors=True)
