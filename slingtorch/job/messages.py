# SPDX-License-Identifier: GPL-2.0-only
"""
Messages from other processes are untrusted: JSON of a bounded size with plain numbers, or a ValueError. Also child
processes, programs of this package, that send such messages.
"""
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

from .kinds import Any, Callable

HERE = os.path.dirname(os.path.abspath(__file__))

# seconds between two looks at what others write
LOOK = 0.02
# bytes of a message at most: a node sends 2.4 kB, or 60 kB if its ranks all differ in some variables
MOST = 256 << 10


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
        return json.loads(data.decode(), parse_int=number, parse_float=number, parse_constant=number)
    except RecursionError:
        raise ValueError("nested too deeply")


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


def as_child() -> int:
    """In a Child: the descriptor for its messages. The output of libraries is dropped."""
    descriptor = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return descriptor


class Child:
    """
    A program of this package as a child process, so that a crash or a hang in a library becomes a finding.

    :ivar said: its messages so far, one dictionary for each line
    :ivar ended: whether there will be no more messages
    """

    def __init__(self, environ: dict, *words: object) -> None:
        # a file: nobody reads until the end, and its output may exceed a pipe's capacity
        self.errors = scratch_file() or open(os.devnull, 'w+b')
        self.process = subprocess.Popen([sys.executable, '-B', HERE, *map(str, words)], env=environ,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)  # type: Any
        self.said, self.heard, self.ended = [], 0, False    # type: list, int, bool
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        """Read its messages until it ends."""
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):   # a library may have printed the line
                self.said.append(json.loads(line.decode()))
        self.ended = True

    def until(self, there: 'Callable[[], Any]', end: float) -> bool:
        """Wait until the condition holds, the child ends, or the time is `end`; whether the condition holds."""
        until(lambda: there() or self.ended, end)
        return bool(there())

    def hear(self, end: float) -> dict:
        """Its next message, if it comes before the time `end`; else {'error': why}."""
        if self.until(lambda: len(self.said) > self.heard, end):
            self.heard += 1
            return dict(self.said[self.heard - 1])
        return {'error': "it ended with status %s" % self.status() if self.ended else "no answer in time"}

    def tell(self, thing: object) -> None:
        """Send a line to the child."""
        with contextlib.suppress(OSError):      # it has ended, which is reported elsewhere
            self.process.stdin.write(dump(thing) + b'\n')
            self.process.stdin.flush()

    def status(self) -> str:
        """Wait for its end; returns its exit status and the last line of its stderr."""
        status = self.process.wait()
        self.errors.seek(0)
        last = [line.decode(errors='replace').strip() for line in self.errors if line.strip()][-1:]
        return '%s%s' % (status, ''.join(': ' + text[:600] for text in last))

    def end(self) -> None:
        """Kill the child, which also closes its connections."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):    # a driver may hold it
            self.process.wait(5)
        self.reader.join(1)
        # a process that it has started may keep its stdout open, so that the thread still reads
        for stream in [self.process.stdin, self.errors] + [self.process.stdout] * (not self.reader.is_alive()):
            with contextlib.suppress(OSError):
                stream.close()
