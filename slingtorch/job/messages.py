# SPDX-License-Identifier: GPL-2.0-only
"""
Messages from other ranks are untrusted: JSON of a bounded size with plain numbers, or a ValueError. Also child
processes, which are trusted.
"""
import contextlib
import json
import math
import os
import re
import signal
import socket
import struct
import tempfile
import time
import traceback
import warnings

from .kinds import Any, Callable

# exit status of a child whose function has returned
OVER = 117
# seconds between two looks at what others write
LOOK = 0.02
# bytes of a message at most: a node sends 2.4 kB, or 60 kB if its ranks all differ in some variables
MOST = 256 << 10
# levels of lists and dictionaries in it at most
DEEPEST = 20


def one_line(text: object) -> str:
    """Remove line ends and control characters for a terminal: the text may come from another process."""
    return re.sub(r'[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+', ' ', str(text))


def number(text: str) -> 'Any':
    """A number in a message. :raises ValueError: it is not finite, or a whole number of many digits"""
    value = (int if re.match(r'-?\d{1,18}\Z', text) else float)(text)
    if not math.isfinite(value):
        raise ValueError("%.20s is not a number" % text)
    return value


def load(data: bytes) -> 'Any':
    """The content of a message. :raises ValueError: it is too long, nested too deeply, or not JSON"""
    if len(data) > MOST:
        raise ValueError("%d bytes" % len(data))
    try:
        thing = json.loads(data.decode(), parse_int=number, parse_float=number, parse_constant=number)
    except RecursionError:
        raise ValueError("nested too deeply")
    level, depth = [thing], 0   # type: list, int
    while level:    # pickle and copy.deepcopy() bear less than json
        level = [part for one in level if isinstance(one, (list, dict))
                 for part in (one.values() if isinstance(one, dict) else one)]
        depth += 1
        if depth > DEEPEST:
            raise ValueError("nested too deeply")
    return thing


def dump(thing: 'Any') -> bytes:
    """A message as one line of ASCII, for load()."""
    return json.dumps(thing).encode()


def has_form(thing: 'Any', form: 'Any') -> bool:
    """
    Whether a message has this form: a type or several; [form of each element]; {key: form of its value} for the keys
    that it must have, or {str: form of all values}.
    """
    if isinstance(form, list):
        return isinstance(thing, list) and all(has_form(one, form[0]) for one in thing)
    if isinstance(form, dict):
        return isinstance(thing, dict) and all(
            all(has_form(one, kind) for one in thing.values()) if key is str else
            key in thing and has_form(thing[key], kind) for key, kind in form.items())
    return isinstance(thing, form) and (form is bool or not isinstance(thing, bool))


def until(there: 'Callable[[], Any]', end: float) -> bool:
    """Wait until the condition holds, but only until the time `end`; whether it holds."""
    while not there():
        if time.monotonic() > end:
            return False
        time.sleep(LOOK)
    return True


def scratch_file() -> 'Any':
    """An unnamed file, which vanishes however this process ends; None if no directory is writable."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return None     # limits.py reports it


def drop_inherited() -> None:
    """
    Redirect what the launcher has left open, such as PMI_FD: an MPI in a child would answer for the rank, whose own
    MPI_Init then fails (seen with MPICH's mpiexec.hydra: "expecting cmd=, got response_to_init").
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir('/proc/self/fd'):
        with contextlib.suppress(OSError):      # the descriptor of listdir
            if int(name) > 2 and os.get_inheritable(int(name)):
                os.dup2(nothing, int(name))     # not closed, since another file would get the number


class Child:
    """
    A function in a fork of this process, so that a crash or a hang in a library becomes a finding.

    :param function: gets the other end of `pipe`, then the arguments; its output is dropped. To be forked from the main
        thread, before there are others; SIGCHLD must not be ignored
    """

    def __init__(self, function: 'Callable', *arguments: 'Any') -> None:
        import ctypes       # only here: most ranks have no child
        from multiprocessing import Pipe

        # a file: nobody reads until the end, and its output may exceed a pipe's capacity
        self.errors = scratch_file() or open(os.devnull, 'w+b')
        self.pipe, pipe = Pipe()
        # recv() has no limit, but the child may stop in the middle of a message, or a library write there
        with socket.socket(fileno=os.dup(self.pipe.fileno())) as own:
            for option in socket.SO_RCVTIMEO, socket.SO_SNDTIMEO:
                own.setsockopt(socket.SOL_SOCKET, option, struct.pack('ll', 5, 0))
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')     # of other threads, since Python 3.12: those of libraries do no harm
            self.pid, self.status = os.fork(), ''
        if not self.pid:
            status = 1
            try:
                self.pipe.close()
                drop_inherited()
                os.setsid()     # so that the processes that it starts can be ended, too
                # PR_SET_PDEATHSIG (linux/prctl.h): it ends with this process
                ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
                nothing = os.open(os.devnull, os.O_RDWR)
                # stderr first: if the rank has no stdin, the file may be descriptor 0
                for number, stream in ((2, self.errors.fileno()), (1, nothing), (0, nothing)):
                    os.dup2(stream, number)
                function(pipe, *arguments)
                status = OVER
            except BaseException:   # the last line of stderr becomes a finding
                os.write(2, traceback.format_exc().encode(errors='replace'))
            finally:
                os._exit(status)    # exit handlers may hang
        pipe.close()

    def ended(self) -> bool:
        """Whether it has ended."""
        return bool(self.status or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def hear(self, end: float) -> 'Any':
        """Its next message; None if it ends before, or the time is `end`."""
        # not only the end of the file tells, since processes that it has started may keep the pipe
        with contextlib.suppress(Exception):    # the end of the file, or what a program wrote there
            while not self.pipe.poll(LOOK):
                if time.monotonic() > end or self.ended() and not self.pipe.poll():
                    return None
            return self.pipe.recv()
        until(self.ended, end)
        return None

    def tell(self, thing: object) -> None:
        """Send it a message."""
        with contextlib.suppress(OSError):      # it has ended, which is reported elsewhere
            self.pipe.send(thing)

    def end(self) -> str:
        """Kill it, which also closes its connections; returns its exit status and the last line of its stderr."""
        if self.status:
            return self.status
        for kill in os.kill, os.killpg:
            with contextlib.suppress(OSError):
                kill(self.pid, signal.SIGKILL)
        if not until(self.ended, time.monotonic() + 5):     # a driver may hold it
            return 'unknown'
        status = os.waitpid(self.pid, 0)[1]
        self.errors.seek(0)
        last = [line.decode(errors='replace').strip()[:600] for line in self.errors if re.search(rb'\w', line)][-1:]
        for stream in self.pipe, self.errors:
            stream.close()
        self.status = ': '.join([str(-os.WTERMSIG(status) or os.WEXITSTATUS(status))] + last)
        return self.status
