# SPDX-License-Identifier: GPL-2.0-only
"""
Brings what the ranks found to rank 0: on a node through a socket that has no file, between nodes over TCP.

Rank 0's node is the only one that all know (MASTER_ADDR, MASTER_PORT): the first rank of each node calls there once,
and everything goes over this connection. 512 nodes of 8 ranks take less than a second so (benchmarks/check.py).
"""
import contextlib
import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
import time

from . import limits, network
from .findings import Report, ignored_of
from .machine import by_srun, expand_hosts
from .wire import PeerLost, accept, call, listen, read_line, receive_message, send_message, serve, tell_all

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Any, Callable, Optional  # noqa: F401, in comments

    from .machine import Machine

# second port of rank 0's node, where the first one is taken: between those of staging (+16) and of the next job
SECOND_PORT = 32
# Where ranks of an srun also meet, if they do not agree in MASTER_PORT: above what conda-python-distributed chooses,
# and below Linux's own range of ports for connections (ip(7), ip_local_port_range).
MEETING = range(26400, 27000)
# Seconds that rank 0's node waits longer for others than these wait for their ranks.
SLACK = 2
ONE_DAY = 86400
# what every host takes: RFC 9293, 3.7.1
SMALL_SEGMENT = 536
# instead of rank 0's word, '0' or '1'
LOST = b'lost'
RANK_0_GONE = "rank 0 has ended, or its node is gone: see rank 0's own messages"
# how a word to be traded begins
TRADE = 'trade '
NEEDED = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


def patience(seconds: float, nodes: int) -> float:
    """
    Seconds for what takes others no time: a node that has not called by then cannot, unless the limit is a long one.
    Many nodes start Python from one file system, some of them late.

    :param seconds: SLINGTORCH_CHECK_SECONDS
    :param nodes: how many there are, about
    """
    return min(seconds, max(12 + nodes / 16, seconds / 10))


class Usage(Exception):
    """The program was started wrongly."""


def start_id(environ: dict) -> str:
    """A word that is the same on all ranks of this start, and of no other one on these nodes."""
    step = [environ.get(name, '') for name in ('SLURM_JOB_ID', 'PBS_JOBID', 'TORCHELASTIC_RUN_ID')]
    # an mpirun starts its daemons on other nodes by srun: these have a step, and those of the first node may have none
    step.append(environ.get('SLURM_STEP_ID' if by_srun(environ) else 'MASTER_PORT', ''))
    return 'check-' + hashlib.sha256('\0'.join([str(os.getuid())] + step).encode()).hexdigest()[:16]


def read_ranks(environ: dict) -> None:
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


def verdict(word: bytes, environ: dict) -> int:
    """The exit status that rank 0's word means."""
    lost_is_fine = ('no-answer', '') in ignored_of(environ.get('SLINGTORCH_CHECK_IGNORE', ''))
    return 0 if word == b'0' or word == LOST and lost_is_fine else 1


def guarded(name: str, machine: 'Machine', function: 'Callable') -> int:
    """The exit status of a program of this package, which `function` runs, and why not on stderr."""
    try:
        return function()
    except Usage as err:
        sys.stderr.write("slingtorch %s: %s\n" % (name, err))
        return 2
    except (PeerLost, OSError, RuntimeError) as err:     # RuntimeError: no new thread can be started
        rank, text = machine.environ.get('RANK', '?'), str(err)
        if "can't start new thread" in text or isinstance(err, BlockingIOError):    # EAGAIN of fork(2)
            text = "%s (%s): ask for more processes in the job, or have the limit raised where it is set" % (
                text, limits.processes(machine) or "a limit of processes and threads")
        sys.stderr.write("slingtorch %s: rank %s on %s: %s\n" % (name, rank, machine.node, text))
        return verdict(LOST, machine.environ)


# ----------------------------------------------------------------------------------------------------------------------
# on a node

def local_address(environ: dict) -> str:
    """The abstract socket of this start's first rank on this node (unix(7))."""
    # nodes that are emulated on one machine share its sockets
    node = environ.get('SLURMD_NODENAME', '') if by_srun(environ) else ''
    return '\0slingtorch-%s-%s' % (start_id(environ), node)


def same_user(connection: socket.socket) -> bool:
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

    def __init__(self, environ: dict, count: int, digest: str) -> None:
        self.count, self.digest, self.begin = count, digest, time.monotonic()
        self.reports, self.ended, self.connections, self.late = {}, {}, [], {}  # type: dict, dict, list, dict
        self.changed = threading.Condition()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(local_address(environ))
        listener.listen(512)
        serve(listener, self.handshake)

    def handshake(self, connection: socket.socket) -> None:
        """One rank: who it is, then what it found."""
        hello = None
        try:
            if not same_user(connection):
                return
            hello = json.loads(receive_message(connection, time.monotonic() + ONE_DAY).decode())
            hello = int(hello['rank']), int(hello['pid']), hello['digest']
            self.late[hello[0]] = time.monotonic() - self.begin
            send_message(connection, b'skip' if hello[2] == self.digest else b'import')
            report = Report.load(receive_message(connection, time.monotonic() + ONE_DAY))
            details = json.loads(receive_message(connection, time.monotonic() + ONE_DAY).decode())
        except (PeerLost, OSError, ValueError, KeyError, TypeError):
            if hello:
                with self.changed:
                    self.ended[hello[0]] = hello[1]
                    self.changed.notify_all()
            return
        with self.changed:
            self.reports[hello[0]] = report, details
            self.connections.append(connection)
            self.changed.notify_all()

    def wait(self, silent: float, end: float) -> None:
        """
        Until all others of the node have reported or ended.

        :param silent: the time until which those are waited for that have not said hello
        :param end: and the others
        """
        def all_of(count: int) -> bool:
            return len(self.reports) + len(self.ended) >= count

        with self.changed:
            self.changed.wait_for(lambda: all_of(self.count - 1), max(0, silent - time.monotonic()))
            self.changed.wait_for(lambda: all_of(len(self.late)), max(0, end - time.monotonic()))


def call_first_rank(environ: dict, rank: int, digest: str, end: float) -> tuple:
    """
    Another rank of the node: say hello to the first one.

    :return: (connection, whether this rank is to import PyTorch itself)
    :raises PeerLost: it is not there
    """
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(local_address(environ))
            if not same_user(connection):
                raise PeerLost("a process of another user has the socket of this start on this node: tell the centre")
            break
        except OSError as err:
            connection.close()
            if time.monotonic() > end:
                raise PeerLost("no answer from the first rank of this node (%s): see its own messages, and whether "
                               "LOCAL_RANK is right in the job script" % err)
            time.sleep(0.05)
    send_message(connection, json.dumps({'rank': rank, 'pid': os.getpid(), 'digest': digest}).encode())
    return connection, receive_message(connection, end) == b'import'


# ----------------------------------------------------------------------------------------------------------------------
# between nodes

def places(environ: dict) -> list:
    """
    Where rank 0 may listen: [(host, port)], first MASTER_PORT and the one beside it. The second host serves a
    MASTER_ADDR that is wrong.
    """
    port = int(environ['MASTER_PORT'])
    ports = [port, port + SECOND_PORT if port + SECOND_PORT <= 65535 else port - SECOND_PORT]
    hosts = [environ['MASTER_ADDR']]
    if by_srun(environ):
        hosts += [host for host in expand_hosts(environ.get('SLURM_STEP_NODELIST'))[:1] if host != hosts[0]]
        ports.append(MEETING[int(start_id(environ)[-8:], 16) % len(MEETING)])
    return [(host, number) for host in hosts for number in ports]


class Node:
    """A node that called rank 0's: its connection, number of its ranks, the first one, its name, and when it called."""

    def __init__(self, words: str, now: float) -> None:
        ranks, rank, self.name = words.split(' ')
        self.ranks, self.rank = int(ranks), int(rank)
        self.called, self.connection = now, None


class Root:
    """
    Rank 0's end of the star.

    :ivar nodes: the other nodes, once all have called or time is up
    :ivar refused: why it does not listen at MASTER_PORT, or None
    :raises PeerLost: no port is free
    """

    def __init__(self, environ: dict, others: int, seconds: float, clock: 'Callable[[], float]' = time.time) -> None:
        self.others, self.seconds, self.clock, self.key = others, seconds, clock, start_id(environ)
        self.nodes = []  # type: list
        self.refused = None  # type: Optional[str]
        for _, port in places(environ)[:2]:
            try:
                self.listener = listen(port)
                break
            except OSError as err:
                self.refused = self.refused or err.strerror
        else:
            raise PeerLost("neither MASTER_PORT=%s nor port %d is free on this node: unset MASTER_PORT in the job "
                           "script, or name another one" % (environ['MASTER_PORT'], port))
        self.listeners = [self.listener]
        for _, port in places(environ)[2:3] if by_srun(environ) else ():
            with contextlib.suppress(OSError):      # nobody needs it as long as all agree
                self.listeners.append(listen(port))
        for listener in self.listeners:
            # others send in small segments, so that what they found arrives where packets of full size are lost
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        self.word, self.sent = '0', network.segments()
        self.known = threading.Event()

    def gather(self, extra: 'Callable[[], str]') -> None:
        """Wait for the nodes, and tell each its number; `extra` is a function, whose word all are told with it."""
        called = {}

        def weight(words):
            called[words] = Node(words, time.monotonic())
            return called[words].ranks

        try:
            if self.others > 0:
                for connection, words in accept(self.listeners, self.others, self.key, self.seconds, weight):
                    called[words].connection = connection
                    self.nodes.append(called[words])
            self.word = extra()
            for number, node in enumerate(self.nodes, 1):
                line = '%d %d %s %.3f\n' % (number, len(self.nodes) + 1, self.word, self.clock())
                with contextlib.suppress(OSError):      # it is gone, and gives no answer later
                    node.connection.sendall(line.encode('ascii'))
        finally:
            for listener in self.listeners:
                listener.close()    # PyTorch's store takes the port next
            self.known.set()

    def meet(self, ready: bool, end: float) -> bool:
        """
        Whether all nodes are ready for a collective, which all are told.

        :param ready: whether this node is
        """
        for node in self.nodes:
            try:
                said = receive_message(node.connection, end + SLACK)
                if said.startswith(TRADE.encode()):     # it came too late
                    said = receive_message(node.connection, end + SLACK)
                ready = said == b'1' and ready
            except PeerLost:
                ready = False
        tell_all([node.connection for node in self.nodes], b'1' if ready else b'0')
        return ready and bool(self.nodes)

    def trade(self, word: str, end: float) -> list:
        """
        Each node, by its number, is told the word of the next one, and how many blanks apart all words have at least.

        :param word: this node's
        :param end: time until which others are waited for; one that is silent has ''
        :return: [the next one's word, the number]
        """
        words = [word]
        for node in self.nodes:
            try:
                words.append(receive_message(node.connection, end).decode()[len(TRADE):])
            except (PeerLost, ValueError):
                words.append('')
        least = min(len(each.split()) for each in words)
        for node, following in zip(self.nodes, words[2:] + words[:1]):
            tell_all([node.connection], json.dumps([following, least]).encode())
        return [words[1 % len(words)], least]

    def collect(self, report: Report, end: float) -> None:
        """Merge what the nodes send until the time `end`, and what is there then."""
        for node in self.nodes:
            with contextlib.suppress(PeerLost, ValueError):     # who gives no answer is a finding: check_answers()
                report.merge(Report.load(receive_message(node.connection, end + SLACK)))


class Branch:
    """
    The end of another node.

    :ivar connection: to rank 0's node
    :ivar host: where that was found
    :ivar number: of this node, rank 0's is 0
    :ivar nodes: how many there are
    :ivar ahead: seconds by which this node's clock differs
    :ivar extra: what rank 0's node tells all
    :raises PeerLost: rank 0 is nowhere to be found
    """

    def __init__(self, environ: dict, ranks: int, node: str, seconds: float,
                 clock: 'Callable[[], float]' = time.time) -> None:
        words = '%d %s %s' % (ranks, environ['RANK'], re.sub(r'[^A-Za-z0-9._-]', '_', node) or '_')
        end = time.monotonic() + patience(seconds, int(environ['WORLD_SIZE']) // ranks)
        self.connection, wrong, attempt = None, {}, 1  # type: Any, dict, int
        while self.connection is None:
            for self.host, port in places(environ):
                try:
                    self.connection = call(self.host, port, start_id(environ), words,
                                           min(attempt, max(0.5, end - time.monotonic())))
                    break
                except (PeerLost, OSError, UnicodeError) as err:
                    wrong[self.host, port] = str(err)
                if time.monotonic() > end:
                    raise PeerLost('; '.join(wrong.values()) + (
                        network.own_address(environ['MASTER_ADDR']) or ". Rank 0 was not started or has ended (see its "
                        "own messages), or MASTER_ADDR=%s leads elsewhere" % environ['MASTER_ADDR']))
            attempt = min(3, 2 * attempt)
        try:
            self.connection.settimeout(2 * seconds + 60)
            number, nodes, self.extra, now = read_line(self.connection).split(' ')
            self.number, self.nodes, self.ahead = int(number), int(nodes), clock() - float(now)
        except (PeerLost, OSError, ValueError) as err:
            raise PeerLost("rank 0 gave this node no number (%s): %s" % (err, RANK_0_GONE))

    def send(self, data: bytes, failure: str) -> None:
        """:raises PeerLost: rank 0 is gone"""
        try:
            send_message(self.connection, data)
        except OSError as err:
            raise PeerLost("%s (%s): %s" % (failure, err, RANK_0_GONE))

    def hear(self, end: float) -> bytes:
        """Rank 0's next word. :raises PeerLost: rank 0 is gone"""
        try:
            return receive_message(self.connection, end)
        except PeerLost as err:
            raise PeerLost("no word from rank 0 (%s): %s" % (err, RANK_0_GONE))

    def meet(self, ready: bool, end: float) -> bool:
        """As Root.meet(). :raises PeerLost: rank 0 is gone"""
        self.send(b'1' if ready else b'0', "rank 0 cannot be told that this node is ready")
        return self.hear(end + 3 * SLACK) == b'1'

    def trade(self, word: str, end: float) -> list:
        """As Root.trade(). :raises PeerLost: rank 0 is gone"""
        self.send((TRADE + word).encode(), "rank 0 cannot be told what this node has")
        return json.loads(self.hear(end + 3 * SLACK).decode())

    def deliver(self, report: Report) -> None:
        """Send it to rank 0's node. :raises PeerLost: that is gone"""
        self.send(report.dump(), "what this node found cannot be delivered")

    def verdict(self, seconds: float) -> bytes:
        """How it ended. :raises PeerLost: rank 0 is gone"""
        return self.hear(time.monotonic() + seconds)
