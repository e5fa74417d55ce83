# SPDX-License-Identifier: GPL-2.0-only
"""
Sends a file from one node of a job to all others, each of which hands it on: for --stage where there is no sbcast.

    python job tree_copy PORT NODES KEY SECONDS SOURCE             on the node of rank 0
    python job tree_copy PORT NODES KEY SECONDS TARGET HOST        on every other one; HOST is that of rank 0

The node of rank 0 waits until the others have called, then tells each from whom it gets the file and to how many it
hands it on, which they do while the rest is still arriving. KEY is a word that is the same on all nodes; without it
nobody gets anything. SECONDS is how long one answer or block is waited for. What arrived is for the caller to verify.

Exit status 0: the file is here. Otherwise one line on stderr says why not; it does not say what became of other nodes.
"""
import contextlib
import os
import sys
import threading

from .wire import PeerLost, accept, call, listen, read_line

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    import socket

# to how many nodes one node sends: Slurm's sbcast does so too (sbcast(1), --fanout)
FANOUT = 8
BLOCK = 1 << 20


class GrowingFile:
    """A file of which more and more is there, so many bytes, until nothing more will come (given_up)."""

    def __init__(self, path: str, size: int, there: int = 0) -> None:
        self.path, self.size, self.there, self.given_up = path, size, there, False
        self.changed = threading.Condition()

    def grow(self, count: int = 0, given_up: bool = False) -> None:
        """Take note of a change, for the threads that send."""
        with self.changed:
            self.there += count
            self.given_up = given_up
            self.changed.notify_all()

    def send(self, connection: 'socket.socket') -> None:
        """Send the content as it comes; the connection is closed afterwards, in any case."""
        sent = 0
        # the other side notices an error as well, and says so
        with contextlib.suppress(OSError), connection, open(self.path, 'rb') as stream:
            while sent < self.size:
                with self.changed:
                    self.changed.wait_for(lambda: self.there > sent or self.given_up)
                    count = min(self.there - sent, BLOCK)
                if not count:
                    return
                connection.sendall(stream.read(count))
                sent += count

    def send_all(self, connections: list) -> list:
        """Start sending to all these at the same time; the threads."""
        threads = [threading.Thread(target=self.send, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        return threads


def send(port: int, nodes: int, key: str, seconds: float, source: str) -> None:
    """On the node of rank 0: tell each of the others its parent, how many are below it and the size; and send."""
    size, children = os.path.getsize(source), []
    callers = accept([listen(port)], nodes - 1, key, seconds)
    for number, (connection, _) in enumerate(callers, 1):
        # node n has nodes FANOUT*n + 1 to FANOUT*n + FANOUT below it; this one is node 0
        below = max(0, min(len(callers) - FANOUT * number, FANOUT))
        parent = (number - 1) // FANOUT
        host, parent_port = '-', '0'
        if parent:
            host, parent_port = callers[parent - 1][0].getpeername()[0], callers[parent - 1][1]
        else:
            children.append(connection)
        with contextlib.suppress(OSError):      # it is gone: who is below it will find out
            connection.sendall(('%s %s %d %d\n' % (host, parent_port, below, size)).encode('ascii'))
    for thread in GrowingFile(source, size, size).send_all(children):
        thread.join()


def receive(port: int, key: str, seconds: float, target: str, host: str) -> None:
    """On another node: ask for its place, receive, and hand on."""
    listener = listen(0)
    own_port = listener.getsockname()[1]
    connection = call(host, port, key, own_port, seconds)
    parent, parent_port, below, size = read_line(connection).split(' ')
    if parent != '-':
        connection.close()
        connection = call(parent, int(parent_port), key, own_port, seconds)
    with connection, open(target, 'wb', buffering=0) as stream:
        file = GrowingFile(target, int(size))
        threads = file.send_all([caller for caller, _ in accept([listener], int(below), key, seconds)])
        try:
            while file.there < file.size:
                block = connection.recv(BLOCK)
                if not block:
                    raise PeerLost("the node that sends it ended the connection")
                stream.write(block)
                file.grow(len(block))
        except BaseException:
            file.grow(given_up=True)
            raise
        finally:
            for thread in threads:
                thread.join()


def main(arguments: list) -> int:
    """Send or receive the file; the exit status."""
    port, nodes, key, seconds, path = arguments[:5]
    try:
        if len(arguments) == 5:
            send(int(port), int(nodes), key, int(seconds), path)
        else:
            receive(int(port), key, int(seconds), path, arguments[5])
    except (OSError, PeerLost, ValueError) as err:
        sys.stderr.write('%s\n' % err)
        return 1
    return 0
