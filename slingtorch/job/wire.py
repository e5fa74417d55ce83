# SPDX-License-Identifier: GPL-2.0-only
"""
Brings what the ranks found to rank 0: on a node through a socket that has no file, between nodes as a tree over TCP.

Rank 0's node is the only one that all know (MASTER_ADDR, MASTER_PORT): the first rank of each node calls there once and
is told its parent, as in tree_copy.py. What comes up is merged at every step.
"""
import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
import time

from . import tree_copy
from .findings import LARGEST, Report, ignored_of
from .machine import by_srun, expand_hosts
from .tree_copy import TreeError as Lost

# second port of rank 0's node, where the first one is taken: between those of staging (+16) and of the next job
SECOND_PORT = 32
# Seconds that a node waits longer for others than these wait for theirs.
SLACK = 2
# instead of rank 0's word, '0' or '1'
LOST = b'lost'
NEEDED = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


class Usage(Exception):
    """The program was started wrongly."""


def start_id(environ):
    """A word that is the same on all ranks of this start, and of no other one on these nodes."""
    step = [environ.get(name, '') for name in ('SLURM_JOB_ID', 'SLURM_STEP_ID', 'PBS_JOBID', 'TORCHELASTIC_RUN_ID')]
    if not by_srun(environ):
        step.append(environ.get('MASTER_PORT', ''))
    return 'check-' + hashlib.sha256('\0'.join([str(os.getuid())] + step).encode()).hexdigest()[:16]


def read_ranks(environ):
    """Check what this program must know. :raises Usage:"""
    for name in NEEDED:
        if not environ.get(name):
            raise Usage("%s is not set. Start it through the runscript: srun ... $RUNSCRIPTS/conda-python-distributed "
                        "--check" % name)
        if name != 'MASTER_ADDR' and not environ[name].isdigit():
            raise Usage("%s='%s' is no number" % (name, environ[name]))
    try:
        ignored_of(environ.get('SLINGTORCH_CHECK_IGNORE', ''))
    except ValueError as err:
        raise Usage(err)
    if environ['RANK'] == '0' and environ['LOCAL_RANK'] != '0':
        raise Usage("rank 0 has LOCAL_RANK=%s: the first rank of a node has 0" % environ['LOCAL_RANK'])


def verdict(word, environ):
    """The exit status that rank 0's word means."""
    lost_is_fine = ('no-answer', '') in ignored_of(environ.get('SLINGTORCH_CHECK_IGNORE', ''))
    return 0 if word == b'0' or word == LOST and lost_is_fine else 1


def guarded(name, machine, function):
    """The exit status of a program of this package, which `function` runs, and why not on stderr."""
    try:
        return function()
    except Usage as err:
        sys.stderr.write("slingtorch %s: %s\n" % (name, err))
        return 2
    except (Lost, OSError) as err:
        rank = machine.environ.get('RANK', '?')
        sys.stderr.write("slingtorch %s: rank %s on %s: %s\n" % (name, rank, machine.node, err))
        return verdict(LOST, machine.environ)


def send_message(connection, data):
    """So many bytes follow, and the bytes."""
    connection.sendall(b'%d\n' % len(data) + data)


def tell_all(connections, data):
    """The same message to all that are still there."""
    for connection in connections:
        try:
            send_message(connection, data)
        except OSError:
            pass    # it is gone, and nobody waits for it


def receive_message(connection, end):
    """:raises Lost: nothing whole came until the time `end`"""
    try:
        connection.settimeout(max(0.1, end - time.time()))
        size = int(tree_copy.read_line(connection, end))
        if not 0 <= size <= LARGEST:
            raise Lost("%d bytes" % size)
        data = bytearray()
        while len(data) < size:
            connection.settimeout(max(0.1, end - time.time()))
            block = connection.recv(min(size - len(data), 1 << 20))
            if not block:
                raise Lost("it ended")
            data += block
        return bytes(data)
    except (OSError, ValueError) as err:
        raise Lost(str(err))


# ----------------------------------------------------------------------------------------------------------------------
# on a node

def local_address(environ):
    """The abstract socket of this start's first rank on this node (unix(7))."""
    # nodes that are emulated on one machine share its sockets
    node = environ.get('SLURMD_NODENAME', '') if by_srun(environ) else ''
    return '\0slingtorch-%s-%s' % (start_id(environ), node)


def same_user(connection):
    """Whether the other end is a process of this user."""
    return struct.unpack('3i', connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] == os.getuid()


class LocalRanks:
    """
    The first rank of a node: hears the others.

    :ivar connections: to those that have reported
    :ivar reports: {rank: (Report, what node.py wants to know)}
    :ivar ended: {rank: process id} of those that ended before they had reported
    :ivar late: {rank: seconds after which it was heard}
    :raises OSError: another process is the first rank of this node already
    """

    def __init__(self, environ, count, digest):
        self.count, self.digest, self.begin = count, digest, time.time()
        self.reports, self.ended, self.connections, self.late = {}, {}, [], {}
        self.changed = threading.Condition()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(local_address(environ))
        self.listener.listen(512)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        """Whoever comes, each in a thread."""
        while True:
            connection = self.listener.accept()[0]
            threading.Thread(target=self.hear, args=(connection,), daemon=True).start()

    def hear(self, connection):
        """One rank: who it is, then what it found."""
        hello = None
        try:
            if not same_user(connection):
                return
            forever = time.time() + 86400
            hello = json.loads(receive_message(connection, forever).decode())
            hello = int(hello['rank']), int(hello['pid']), hello['digest']
            self.late[hello[0]] = time.time() - self.begin
            send_message(connection, b'skip' if hello[2] == self.digest else b'import')
            report = Report.load(receive_message(connection, forever))
            details = json.loads(receive_message(connection, forever).decode())
        except (Lost, OSError, ValueError, KeyError, TypeError):
            if hello:
                with self.changed:
                    self.ended[hello[0]] = hello[1]
                    self.changed.notify_all()
            return
        with self.changed:
            self.reports[hello[0]] = report, details
            self.connections.append(connection)
            self.changed.notify_all()

    def wait(self, end):
        """Until all others of the node have reported or ended, or until that time."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.reports) + len(self.ended) >= self.count - 1,
                                  max(0, end - time.time()))


def call_first_rank(environ, rank, digest, end):
    """
    Another rank of the node: say hello to the first one.

    :return: (connection, whether this rank is to import PyTorch itself)
    :raises Lost: it is not there
    """
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(local_address(environ))
            if not same_user(connection):
                raise Lost("a process of another user has its socket")
            break
        except OSError as err:
            connection.close()
            if time.time() > end:
                raise Lost("the first rank of this node does not answer (%s)" % err)
            time.sleep(0.05)
    send_message(connection, json.dumps({'rank': rank, 'pid': os.getpid(), 'digest': digest}).encode())
    return connection, receive_message(connection, end) == b'import'


# ----------------------------------------------------------------------------------------------------------------------
# between nodes

def places(environ):
    """Where rank 0 may listen: [(host, port)]. The second host serves a MASTER_ADDR that is wrong."""
    port = int(environ['MASTER_PORT'])
    second = port + SECOND_PORT if port + SECOND_PORT <= 65535 else port - SECOND_PORT
    hosts = [environ['MASTER_ADDR']]
    if by_srun(environ):
        hosts += [host for host in expand_hosts(environ.get('SLURM_STEP_NODELIST'))[:1] if host != hosts[0]]
    return [(host, number) for host in hosts for number in (port, second)]


class Joined:
    """A node that called rank 0's: its connection, first rank, name, and when."""

    def __init__(self, words, now):
        port, ranks, rank, self.node = words.split(' ')
        self.port, self.ranks, self.rank = int(port), int(ranks), int(rank)
        self.heard, self.connection = now, None


class Root:
    """
    Rank 0's end of the tree.

    :ivar nodes: the Joined, once all have called or time is up
    :ivar refused: why it does not listen at MASTER_PORT, or None
    :raises Lost: no port is free
    """

    def __init__(self, environ, others, seconds, clock=time.time):
        self.others, self.seconds, self.clock, self.nodes, self.key = others, seconds, clock, [], start_id(environ)
        self.listener = self.refused = None
        for _, port in places(environ)[:2]:
            try:
                self.listener = tree_copy.listen(port)
                break
            except OSError as err:
                self.refused = self.refused or err.strerror
        else:
            raise Lost("neither MASTER_PORT=%s nor the port %d above it is free on this node" % (
                environ['MASTER_PORT'], SECOND_PORT))
        self.children, self.word = [], '0'
        self.known = threading.Event()

    def gather(self, extra):
        """Hear the nodes and tell each its place; `extra` is a function whose word all of them are told with it."""
        heard = {}

        def weigh(words):
            heard[words] = Joined(words, self.clock())
            return heard[words].ranks

        try:
            if self.others > 0:
                for connection, words in tree_copy.accept(self.listener, self.others, self.key, self.seconds, weigh):
                    heard[words].connection = connection
                    self.nodes.append(heard[words])
            self.word, others = extra(), len(self.nodes)
            self.children = tree_copy.give_places(
                [(node.connection, node.port) for node in self.nodes], lambda number: ' %d %d %d %s %.3f' % (
                    height(number, others), number, others + 1, self.word, self.clock()))
        finally:
            self.known.set()

    def collect(self, report, end):
        """Merge what comes up the tree, then what nodes send directly whose parent is lost."""
        end += SLACK * height(0, len(self.nodes))
        for connection in self.children:
            merge_from(connection, report, end)
        for node in self.nodes:
            # a node that is alive and finds no parent sends to rank 0's
            if not report.ranks >> node.rank & 1 and node.connection not in self.children:
                merge_from(node.connection, report, min(end, time.time() + SLACK))


def height(number, others):
    """How many levels are below node `number` of a tree with so many nodes besides rank 0's."""
    levels = 0
    while tree_copy.FANOUT * number + 1 <= others:
        number, levels = tree_copy.FANOUT * number + 1, levels + 1
    return levels


def merge_from(connection, report, end):
    """Merge a report that comes in time; whether it did."""
    try:
        report.merge(Report.load(receive_message(connection, end)))
        return True
    except (Lost, ValueError):
        return False


class Branch:
    """
    The end of another node.

    :ivar host: where rank 0 was found
    :ivar number: of this node, rank 0's is 0
    :ivar nodes: how many there are
    :ivar ahead: seconds by which this node's clock differs
    :ivar extra: what rank 0's node tells all
    :raises Lost: rank 0 is nowhere to be found
    """

    def __init__(self, environ, ranks, node, seconds, clock=time.time):
        self.key, self.seconds = start_id(environ), seconds
        self.listener = tree_copy.listen(0)
        words = '%d %d %s %s' % (self.listener.getsockname()[1], ranks, environ['RANK'],
                                 re.sub(r'[^A-Za-z0-9._-]', '_', node) or '_')
        end, self.root, wrong = time.time() + seconds, None, {}
        while self.root is None:
            for host, port in places(environ):
                try:
                    self.root = tree_copy.call(host, port, self.key, words, 1)
                    self.host = host
                    break
                except (Lost, OSError, UnicodeError) as err:
                    wrong[host, port] = str(err)
            else:
                if time.time() > end:
                    raise Lost('; '.join(wrong.values()))
        try:
            self.root.settimeout(2 * seconds + 60)
            line = tree_copy.read_line(self.root)
            self.parent, port, below, levels, number, nodes, self.extra, now = line.split(' ')
            self.ahead = clock() - float(now)
            self.port, self.below, self.levels = int(port), int(below), int(levels)
            self.number, self.nodes = int(number), int(nodes)
        except (Lost, OSError, ValueError) as err:
            raise Lost("rank 0 gave no place in the tree (%s)" % err)
        self.callers = []
        self.accepting = threading.Thread(target=self.accept, daemon=True)
        self.accepting.start()
        self.up = self.root
        if self.parent != '-':
            try:
                self.up = tree_copy.call(self.parent, self.port, self.key, str(self.number), SLACK)
            except (Lost, OSError):
                pass    # the parent is gone: rank 0's node takes it

    def accept(self):
        """The nodes below."""
        self.callers = tree_copy.accept(self.listener, self.below, self.key, self.seconds) if self.below else []

    def collect(self, report, end):
        """Merge what the nodes below send."""
        end += SLACK * self.levels
        self.accepting.join(max(0.1, end - time.time()))
        for connection, _ in self.callers:
            merge_from(connection, report, end)

    def deliver(self, report):
        """Send it up; to rank 0's node if the parent is gone. :raises Lost: neither is there"""
        data = report.dump()
        for connection in [self.up, self.root]:
            try:
                send_message(connection, data)
                return
            except OSError as err:
                wrong = err
        raise Lost("what this node found cannot be delivered (%s)" % wrong)

    def verdict(self, seconds):
        """How it ended. :raises Lost: rank 0 is gone"""
        return receive_message(self.root, time.time() + seconds)
