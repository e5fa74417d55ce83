# SPDX-License-Identifier: GPL-2.0-only
"""
What comes from another process is data: JSON of a bounded size with plain numbers, or a ValueError. And the processes
that speak so: programs of this package as children.
"""
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from .kinds import Any, Callable

HERE = os.path.dirname(os.path.abspath(__file__))

# bytes of a message: a node sends 2.4 kB, one whose ranks all differ in some variables 60 kB
MOST = 256 << 10


def one_line(text: object) -> str:
    """Without what would end the line or steer a terminal: it may come from another process."""
    return re.sub(r'[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+', ' ', str(text))


def whole(text: str) -> int:
    """A whole number of few digits."""
    if len(text) > 18:
        raise ValueError("a number of %d digits" % len(text))
    return int(text)


def finite(text: str) -> float:
    """A number that is one."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("%.20s is not a number" % text)
    return number


def load(data: bytes) -> 'Any':
    """What a message says. :raises ValueError: it is too long, too deep, or no JSON"""
    if len(data) > MOST:
        raise ValueError("%d bytes" % len(data))
    try:
        return json.loads(data.decode(), parse_int=whole, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError("too many brackets")


def dump(thing: 'Any') -> bytes:
    """As one line of ASCII, for load()."""
    return json.dumps(thing).encode()


def has_form(thing: 'Any', form: dict) -> bool:
    """Whether a message is a dictionary with these keys and kinds of values at least."""
    return isinstance(thing, dict) and all(
        isinstance(thing.get(key), kind) and (kind is bool or not isinstance(thing[key], bool))
        for key, kind in form.items())


def scratch_file() -> 'Any':
    """A file without a name, so that nothing stays behind, whatever ends this process; None if there is no place."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return None     # limits.py says that there is none


def as_child() -> int:
    """In a Child: the descriptor for what it says. What libraries print is dropped."""
    descriptor = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)   # `trap '' CHLD` of a job script is inherited
    return descriptor


class Child:
    """
    A program of this package as a child, so that a crash or a hang in a library is a finding.

    :ivar said: what it has said, one dictionary for each line
    :ivar ended: whether it says nothing more
    """

    def __init__(self, environ: dict, *words: object) -> None:
        # a file: nobody reads until the end, and what it prints may be more than a pipe takes
        self.errors = scratch_file() or open(os.devnull, 'w+b')
        self.process = subprocess.Popen([sys.executable, '-B', HERE, *map(str, words)], env=environ,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)  # type: Any
        self.said, self.heard, self.ended = [], 0, False    # type: list, int, bool
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        """Take its answers until it ends."""
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):   # of a library that knows the descriptor
                found = json.loads(line.decode())
                with self.changed:
                    self.said.append(found)
                    self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def until(self, there: 'Callable[[], Any]', end: float) -> bool:
        """Whether this is so before the time `end`, as far as the child has to do with it."""
        with self.changed:
            self.changed.wait_for(lambda: there() or self.ended, max(0, end - time.monotonic()))
            return bool(there())

    def hear(self, end: float) -> dict:
        """What it says next, before the time `end`; else {'error'}"""
        if self.until(lambda: len(self.said) > self.heard, end):
            self.heard += 1
            return dict(self.said[self.heard - 1])
        return {'error': "it ended with status %s" % self.status() if self.ended else "no answer in time"}

    def tell(self, thing: object) -> None:
        """A line for it."""
        with contextlib.suppress(OSError):      # it has ended, which is said elsewhere
            self.process.stdin.write(dump(thing) + b'\n')
            self.process.stdin.flush()

    def status(self) -> str:
        """Wait for its end: its status, and the last line of its errors."""
        status = self.process.wait()
        self.errors.seek(0)
        last = [line.decode(errors='replace').strip() for line in self.errors if line.strip()][-1:]
        return '%s%s' % (status, ''.join(': ' + text[:600] for text in last))

    def end(self) -> None:
        """Nobody wants anything of it any more, nor that it keeps its connections."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):    # a driver may hold it
            self.process.wait(5)
        self.reader.join(1)
        # a process that it has started may keep its stdout open, and the thread reads on
        for stream in [self.process.stdin, self.errors] + [self.process.stdout] * (not self.reader.is_alive()):
            with contextlib.suppress(OSError):
                stream.close()
