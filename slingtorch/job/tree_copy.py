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
import hmac
import os
import socket
import sys
import threading
import time

# to how many nodes one node sends: Slurm's sbcast does so too (sbcast(1), --fanout)
FANOUT = 8
BLOCK = 1 << 20
# Seconds without a call after which nodes that have not called are not waited for: their storage may be full.
QUIET = 20
# seconds to try to reach another node: it may have started later, or gone on without this
REACH = 60
# seconds for the first word of whoever is there, which may be a program of somebody else
ANSWER = 20


class TreeError(Exception):
    """What went wrong, for the user."""


class GrowingFile:
    """
    A file of which more and more is there.

    :ivar size: of the whole file, None until it is known
    :ivar there: how much of it is there
    :ivar given_up: nothing more will come
    """

    def __init__(self, path, size=None):
        self.path, self.size = path, size
        self.there, self.given_up = size or 0, False
        self.changed = threading.Condition()

    def grow(self, size=None, count=0, given_up=False):
        """Take note of a change, for the threads that send."""
        with self.changed:
            self.size = self.size if size is None else size
            self.there += count
            self.given_up = given_up
            self.changed.notify_all()

    def send(self, connection):
        """Send the size as a line and the content as it comes; the connection is closed afterwards, in any case."""
        sent = 0
        try:
            with connection, open(self.path, 'rb') as stream:
                with self.changed:
                    self.changed.wait_for(lambda: self.size is not None or self.given_up)
                    size = self.size
                if size is None:
                    return
                connection.sendall(b'%d\n' % size)
                while sent < size:
                    with self.changed:
                        self.changed.wait_for(lambda: self.there > sent or self.given_up)
                        count = min(self.there - sent, BLOCK)
                    if not count:
                        return
                    connection.sendall(stream.read(count))
                    sent += count
        except OSError:
            pass    # the other side notices as well, and says so


def serve(file, connections):
    """Start sending to all these at the same time; the threads."""
    threads = [threading.Thread(target=file.send, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    return threads


def read_line(connection, end=None):
    """A short line, byte by byte, since the file follows it; not after the time `end`."""
    line = b''
    while not line.endswith(b'\n'):
        byte = connection.recv(1)
        if not byte or len(line) > 200 or end and time.time() > end:
            raise TreeError("the node that sends it ended the connection")
        line += byte
    return line[:-1].decode('ascii', 'replace')


def call(host, port, key, words, seconds):
    """A connection to another node, tried again for a while, to which that has said that it is the one."""
    end = time.time() + min(REACH, seconds)
    while True:
        try:
            connection = socket.create_connection((host, port), min(ANSWER, seconds))
            break
        except OSError as err:
            if time.time() > end or isinstance(err, socket.gaierror):
                raise TreeError("no connection to %s, port %s (%s)" % (host, port, err))
            time.sleep(0.2)
    try:
        connection.sendall(('%s %s\n' % (key, words)).encode('ascii'))
        read_line(connection)
    except (OSError, TreeError) as err:
        connection.close()
        raise TreeError("another program is at %s, port %s (%s)" % (host, port, err))
    connection.settimeout(seconds)
    return connection


def listen(port):
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


def accept(listener, count, key, seconds, weigh=lambda words: 1):
    """
    So many callers that know the key, or fewer: [(connection, what else they said)].

    Each is heard in a thread of its own: a stranger that says nothing delays nobody.

    :param weigh: for how many a caller counts, by what it said; called as soon as it is heard
    """
    callers, counted, last = [], [], [time.time()]

    def hear(connection):
        try:
            connection.settimeout(ANSWER)
            word, _, rest = read_line(connection, time.time() + ANSWER).partition(' ')
            if hmac.compare_digest(word.encode(), key.encode()):
                weight = weigh(rest)
                connection.sendall(b'+\n')
                connection.settimeout(seconds)
                last[0] = time.time()
                callers.append((connection, rest))
                counted.append(weight)
                return
        except (OSError, TreeError, ValueError):
            pass
        connection.close()

    listener.settimeout(0.1)
    while sum(counted) < count and time.time() < last[0] + min(QUIET, seconds):
        try:
            connection = listener.accept()[0]
        except socket.timeout:
            continue
        # daemon: nobody waits for a stranger at the end either
        threading.Thread(target=hear, args=(connection,), daemon=True).start()
    return callers[:count]


def give_places(callers, more=lambda number: ''):
    """
    On the node of rank 0: tell each of the others its parent and how many are below it; those below this node.

    :param callers: [(connection, port at which it listens)]
    :param more: what else node `number` is told
    """
    children = []
    for number, (connection, _) in enumerate(callers, 1):
        # node n has nodes FANOUT*n + 1 to FANOUT*n + FANOUT below it; this one is node 0
        below = max(0, min(len(callers) - FANOUT * number, FANOUT))
        parent = (number - 1) // FANOUT
        host, parent_port = '-', '0'
        if parent:
            host, parent_port = callers[parent - 1][0].getpeername()[0], callers[parent - 1][1]
        else:
            children.append(connection)
        try:
            connection.sendall(('%s %s %d%s\n' % (host, parent_port, below, more(number))).encode('ascii'))
        except OSError:
            pass    # it is gone: who is below it will find out
    return children


def send(port, nodes, key, seconds, source):
    """On the node of rank 0: tell each of the others its place in the tree, and send."""
    children = give_places(accept(listen(port), nodes - 1, key, seconds))
    for thread in serve(GrowingFile(source, os.path.getsize(source)), children):
        thread.join()


def receive(port, key, seconds, target, host):
    """On another node: ask for its place, receive, and hand on."""
    listener = listen(0)
    own_port = listener.getsockname()[1]
    connection = call(host, port, key, own_port, seconds)
    parent, parent_port, below = read_line(connection).split(' ')
    if parent != '-':
        connection.close()
        connection = call(parent, int(parent_port), key, own_port, seconds)
    with connection, open(target, 'wb', buffering=0) as stream:
        file = GrowingFile(target)
        threads = serve(file, [caller for caller, _ in accept(listener, int(below), key, seconds)])
        try:
            file.grow(size=int(read_line(connection)))
            while file.there < file.size:
                block = connection.recv(BLOCK)
                if not block:
                    raise TreeError("the node that sends it ended the connection")
                stream.write(block)
                file.grow(count=len(block))
        except BaseException:
            file.grow(given_up=True)
            raise
        finally:
            for thread in threads:
                thread.join()


def main(arguments):
    """Send or receive the file; the exit status."""
    port, nodes, key, seconds, path = arguments[:5]
    try:
        if len(arguments) == 5:
            send(int(port), int(nodes), key, int(seconds), path)
        else:
            receive(int(port), key, int(seconds), path, arguments[5])
    except (OSError, TreeError, ValueError) as err:
        sys.stderr.write('%s\n' % err)
        return 1
    return 0
