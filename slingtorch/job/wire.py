# SPDX-License-Identifier: GPL-2.0-only
"""Connections between the nodes of a job, and messages over them: what --check, --vet and --stage have in common."""
import contextlib
import hmac
import socket
import threading
import time

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Callable, Optional

# Seconds without a call after which nodes that have not called are not waited for: their storage may be full.
QUIET = 20
# seconds to try to reach another node: it may have started later, or gone on without this
REACH = 60
# seconds for the first word of whoever is there, which may be a program of somebody else
ANSWER = 20
# bytes of a message, which may come from a program of somebody else
MAX_REPORT_BYTES = 1 << 26


class PeerLost(Exception):
    """Another process cannot be reached, or is gone; for the user."""


def read_line(connection: socket.socket, end: 'Optional[float]' = None) -> str:
    """A short line, and nothing of what follows it; not after the time `end`."""
    line = b''
    while not line.endswith(b'\n'):
        there = connection.recv(200, socket.MSG_PEEK)
        if not there or len(line) + len(there.partition(b'\n')[0]) >= 200 or end and time.monotonic() > end:
            raise PeerLost("the node that sends it ended the connection")
        line += connection.recv(there.find(b'\n') + 1 or len(there))
    return line[:-1].decode('ascii', 'replace')


def call(host: str, port: int, key: str, words: str, seconds: float) -> socket.socket:
    """
    A connection to another node, tried again for a while, to which that has said that it is the one, and is told that
    this was heard: who was not answered in time has gone elsewhere.
    """
    end = time.monotonic() + min(REACH, seconds)
    while True:
        try:
            connection = socket.create_connection((host, port), min(ANSWER, seconds))
            break
        except OSError as err:
            if time.monotonic() > end or isinstance(err, socket.gaierror):
                raise PeerLost("no connection to %s, port %s (%s)" % (host, port, err))
            time.sleep(0.2)
    try:
        connection.sendall(('%s %s\n' % (key, words)).encode('ascii'))
        if read_line(connection) != '+':
            raise PeerLost("it answers in its own way")
        connection.sendall(b'+\n')
    except (OSError, PeerLost) as err:
        connection.close()
        raise PeerLost("another program is at %s, port %s (%s)" % (host, port, err))
    connection.settimeout(seconds)
    return connection


def listen(port: int) -> socket.socket:
    """A socket that listens on a port, for IPv6 as well where the node has that; port 0 is for any that is free."""
    try:
        listener = socket.socket(socket.AF_INET6)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:
        listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(('', port))
    listener.listen(512)
    return listener


def why_no_loopback(seconds: float) -> str:
    """Why this machine cannot reach itself at 127.0.0.1; '' if it can."""
    try:
        with socket.socket() as there:
            there.bind(('127.0.0.1', 0))
            there.listen(1)
            socket.create_connection(there.getsockname(), seconds).close()
        return ''
    except OSError as err:
        return str(err)


def serve(listener: socket.socket, answer: 'Callable') -> None:
    """Answer each caller in a thread of its own, in the background: one that says nothing delays nobody."""
    def loop():
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return      # it was shut down
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=loop, daemon=True).start()


def accept(listeners: list, count: int, key: str, seconds: float,
           weight: 'Callable[[str], int]' = lambda words: 1) -> list:
    """
    So many callers that know the key, or fewer: [(connection, what else they said)]. Nobody is listened to then.

    :param listeners: sockets, as listen() makes them
    :param weight: for how many a caller counts, by what it said; called as soon as it is heard
    """
    callers, weights, changed = [], [], threading.Condition()

    def handshake(connection):
        with contextlib.suppress(OSError, PeerLost, ValueError):
            connection.settimeout(ANSWER)
            word, _, rest = read_line(connection, time.monotonic() + ANSWER).partition(' ')
            if hmac.compare_digest(word.encode(), key.encode()):
                counts = weight(rest)
                connection.sendall(b'+\n')
                if read_line(connection, time.monotonic() + ANSWER) != '+':
                    raise PeerLost("it has not heard the answer")
                connection.settimeout(seconds)
                with changed:
                    callers.append((connection, rest))
                    weights.append(counts)
                    changed.notify()
                return
        connection.close()

    for listener in listeners:
        serve(listener, handshake)
    with changed:
        while sum(weights) < count and changed.wait(min(QUIET, seconds)):
            pass
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
    return callers[:count]


def send_message(connection: socket.socket, data: bytes) -> None:
    """So many bytes follow, and the bytes."""
    connection.sendall(b'%d\n' % len(data) + data)


def tell_all(connections: list, data: bytes) -> None:
    """The same message to all that are still there."""
    for connection in connections:
        with contextlib.suppress(OSError):      # it is gone, and nobody waits for it
            send_message(connection, data)


def receive_message(connection: socket.socket, end: float) -> bytes:
    """:raises PeerLost: nothing whole came until the time `end`"""
    try:
        connection.settimeout(max(0.1, end - time.monotonic()))
        size = int(read_line(connection, end))
        if not 0 <= size <= MAX_REPORT_BYTES:
            raise PeerLost("%d bytes" % size)
        data = bytearray()
        while len(data) < size:
            connection.settimeout(max(0.1, end - time.monotonic()))
            block = connection.recv(min(size - len(data), 1 << 20))
            if not block:
                raise PeerLost("it ended")
            data += block
        return bytes(data)
    except (OSError, ValueError) as err:
        raise PeerLost(str(err))
