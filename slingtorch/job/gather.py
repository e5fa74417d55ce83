# SPDX-License-Identifier: GPL-2.0-only
"""
The ranks of a node exchange files in a private directory: each writes its report (atomically, by rename), and the first
one reads them all. It locks a file as long as it lives (flock(2)), so that nobody waits for it when it has ended.
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
from .findings import NAMES, Report, ignored_of
from .kinds import Any, Callable, Machine, Optional  # noqa: F401, in comments
from .machine import by_srun

# the verdict if rank 0 gave none; else it is 0 or 1
LOST = 'lost'
# seconds that ranks have to read it, on a node that is busy
READS = 20
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
    unknown = ignored_of(environ) - set(NAMES)
    if unknown:
        raise Usage("SLINGTORCH_CHECK_IGNORE: no finding has the name '%s'. Write 1 for all, or names: %s" % (
            min(unknown), ', '.join(NAMES)))
    if environ['RANK'] == '0' and environ['LOCAL_RANK'] != '0':
        raise Usage("rank 0 has LOCAL_RANK=%s, but must have 0" % environ['LOCAL_RANK'])


def verdict(word: str, environ: dict) -> int:
    """The exit status for rank 0's verdict."""
    return 0 if word == '0' or word == LOST and 'no-answer' in ignored_of(environ) else 1


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
    # nodes that are emulated on one machine, or are containers on it, may share its /tmp
    step = ('SLURM_STEP_ID', 'SLURMD_NODENAME') if by_srun(environ) else ('MASTER_PORT',)
    start = [environ.get(name, '') for name in ('SLURM_JOB_ID', 'PBS_JOBID', 'TORCHELASTIC_RUN_ID', *step)]
    with contextlib.suppress(OSError):
        start.append(str(os.stat('/proc/self/ns/net').st_ino))
    name = 'check-' + hashlib.sha256('\0'.join(start).encode()).hexdigest()[:16]
    own = environ.get('SLINGTORCH_JOB_DIR')
    return [os.path.join(own or '', name)] * bool(own) + ['/dev/shm/slingtorch-%d-%s' % (os.getuid(), name)]


def is_private(path: str) -> bool:
    """Whether a path is a directory of this user to which nobody else can write: its content needs no more checks."""
    with contextlib.suppress(OSError):
        state = os.lstat(path)
        return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022
    return False


class Files:
    """
    What the ranks of a node write for each other, in the first of places() that works: LocalRanks chooses it, and the
    others find it in wait_for_first().
    """

    def __init__(self, environ: dict) -> None:
        self.places, self.place = places(environ), ''   # type: list, str

    def path(self, name: str) -> str:
        """The path of a file."""
        return os.path.join(self.place, name)

    def write(self, name: str, thing: 'Any') -> None:
        """Write a file whole. :raises OSError: it cannot be written"""
        with open(self.path(name + '.part'), 'wb') as stream:
            stream.write(messages.dump(thing))
        os.replace(self.path(name + '.part'), self.path(name))

    def read(self, name: str) -> 'Any':
        """The content of a file; None if there is none, or it is not a message."""
        with contextlib.suppress(OSError, ValueError), open(self.path(name), 'rb') as stream:
            return messages.load(stream.read(messages.MOST + 1))
        return None

    def first_lives(self) -> bool:
        """Whether a first rank lives: its file is locked."""
        try:
            with open(self.path(FIRST)) as stream:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except FileNotFoundError:
            return False
        except OSError:     # also on a file system without locks
            return True

    def find_first(self) -> bool:
        """Find the directory of a first rank that lives."""
        for self.place in filter(is_private, self.places):
            if self.first_lives():
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
        messages.until(lambda: self.read(WORD) or not self.first_lives(), end)
        word = self.read(WORD)
        if word is None:
            raise PeerLost("the first rank of this node has ended, or does not answer: see its own messages")
        return word


class LocalRanks(Files):
    """
    On the first rank of a node: makes the directory, and reads what the others write.

    :ivar reports: {rank: (Report, details for node.py)}
    :raises PeerLost: another process is already the first rank
    :raises OSError: none of the places is writable
    """

    def __init__(self, environ: dict) -> None:
        super().__init__(environ)
        self.count, self.reports = int(environ['LOCAL_WORLD_SIZE']), {}     # type: int, dict
        self.may_come = set(range(int(environ['WORLD_SIZE']))) - {int(environ['RANK'])}
        if self.find_first():
            raise PeerLost("another process of this start is also local rank 0 of this node: unset LOCAL_RANK in the "
                           "job script")
        for self.place in self.places:
            try:
                self.make()
                return
            except OSError as err:
                wrong = err
                self.remove()
        raise OSError("cannot write to %s (%s): free space there" % (' or '.join(self.places), wrong))

    def make(self) -> None:
        """Make the directory. :raises OSError: it cannot be written"""
        self.remove()   # left behind by an earlier start that was killed
        os.mkdir(self.place, 0o700)
        full = limits.write_trial(self.place, self.count << 13)     # more than the ranks usually write
        if full:
            raise OSError(full)
        self.lock = open(self.path(FIRST + '.part'), 'w')
        with contextlib.suppress(OSError):      # without locks on this file system
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(self.lock.name, self.path(FIRST))

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.place, ignore_errors=True)

    def others(self) -> list:
        """The other ranks whose files are there."""
        names = os.listdir(self.place) if os.path.isdir(self.place) else []
        return [int(name[5:]) for name in names if re.match(r'rank-[0-9]{1,9}\Z', name)]

    def look(self) -> bool:
        """Read the files written so far; whether all other ranks of the node have reported."""
        for rank in self.may_come.intersection(self.others()) - set(self.reports):
            thing = self.read('rank-%d' % rank)
            if messages.has_form(thing, {'report': dict, 'details': dict}):
                with contextlib.suppress(ValueError):
                    self.reports[rank] = Report.load(thing['report'], 1 << rank), dict(thing['details'], rank=rank)
        return len(self.reports) >= self.count - 1

    def tell(self, word: str) -> None:
        """Pass on rank 0's verdict; remove the directory once all ranks have read it, and so removed their files."""
        self.write(WORD, word)
        messages.until(lambda: not set(self.reports).intersection(self.others()), time.monotonic() + READS)
        self.remove()
