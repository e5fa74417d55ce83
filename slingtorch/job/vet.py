# SPDX-License-Identifier: GPL-2.0-only
"""
Bandwidth between nodes, pair by pair, before a job starts on them: names slow and failing ones (docs/check.md).

    python job vet [--rounds N] [--write PREFIX] [--json FILE] [--reference BACKEND=GB/S]
                                                   in one rank per node; further ranks of a node end at once

In every round each node has one partner (the circle method of a round-robin tournament): all nodes measure at the
same time. First TCP, on the interface that NCCL_SOCKET_IFNAME names, else on the one that leads to MASTER_ADDR; then
what a training uses, the backend of torch.distributed, by exchange.py: a process for each GPU of the node.
"""
import argparse
import collections
import contextlib
import fcntl
import functools
import json
import os
import queue
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time

from . import look, node, records, star, wire
from .machine import Machine, expand_hosts, seconds_to_wait
from .probe import scratch_file

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Any, Optional

# A node is slow whose best pair reaches less than this part of the median of the best pairs of all nodes.
SLOW = 0.5
# for one direction of a pair: seconds of sending
MEASURE = 0.2
# seconds to connect to a partner, and for each of its answers
PATIENCE = 5
BLOCK = bytes(1 << 20)
ROUNDS = 8
# Seconds for a pair over the backend: the first one of a process sets up the network
FIRST_LIMIT, LIMIT = 15, 8
# pairs that failed, and none that worked, after which a process is not waited for again
ENOUGH = 3
# the share of the line rate below which it is said, by backend: over TCP, gloo reaches a tenth of a fast network's
OF_LINE_RATE = {'nccl': 0.5, 'gloo': node.SLOW_LINK}
HERE = os.path.dirname(os.path.abspath(__file__))


def partner(number: int, turn: int, nodes: int) -> 'Optional[int]':
    """With whom node `number` measures in this round, or None: each pair meets once in nodes - 1 (or nodes) rounds."""
    even = nodes + nodes % 2
    last = even - 1
    if number == last:
        other = next(n for n in range(last) if (2 * n - turn) % last == 0)
    elif (2 * number - turn) % last == 0:
        other = last
    else:
        other = (turn - number) % last
    return other if other < nodes else None


def interfaces_of(prefixes: str) -> list:
    """Names of the interfaces that NCCL_SOCKET_IFNAME means."""
    exact, words = prefixes.startswith('='), prefixes.lstrip('=').split(',')
    return [name for word in words for _, name in socket.if_nameindex()
            if word and (name == word if exact else name.startswith(word))]


def address_of(interface: str) -> str:
    """The IPv4 address of this interface; '' if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            # SIOCGIFADDR, netdevice(7)
            answer = fcntl.ioctl(query.fileno(), 0x8915, struct.pack('256s', interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            return ''


def answer(key: str, connection: socket.socket) -> None:
    """A partner: what it sends is received to its end and timed; it is told the bytes a second."""
    # of what goes wrong, the one who measures says it
    with connection, contextlib.suppress(OSError, wire.PeerLost):
        connection.settimeout(PATIENCE)
        if wire.read_line(connection, time.monotonic() + PATIENCE) != key:
            return
        begin, size, view = 0.0, 0, memoryview(bytearray(len(BLOCK)))
        while True:
            count = connection.recv_into(view)
            begin = begin or time.monotonic()
            if not count:
                break
            size += count
        connection.sendall(b'%.0f\n' % (size / max(1e-6, time.monotonic() - begin)))


def measure(key: str, address: tuple, seconds: float = MEASURE) -> float:
    """Bytes a second to a partner. :raises OSError, PeerLost: it cannot be reached, or ended"""
    with socket.create_connection(address, PATIENCE) as connection:
        connection.sendall(key.encode() + b'\n')
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(BLOCK)
        connection.shutdown(socket.SHUT_WR)
        return float(wire.read_line(connection))


def rounds(number: int, table: list, key: str, count: int) -> dict:
    """What this node measures with its partners: {partner's number: bytes a second, or what went wrong}."""
    found = {}  # type: dict
    for turn in range(count):
        other = partner(number, turn, len(table))
        if other is None or other == number:
            time.sleep(MEASURE)
            continue
        try:
            found[other] = measure(key, tuple(table[other]))
        except (OSError, ValueError, wire.PeerLost) as err:
            found[other] = str(err)
    return found


def best_pairs(speeds: dict) -> dict:
    """{number of a node: bytes a second of its best pair, in the slower direction}; 0 if none worked."""
    pairs, best = {}, {}  # type: dict, dict
    for (one, other), speed in speeds.items():
        pair = tuple(sorted((one, other)))
        pairs.setdefault(pair, []).append(speed if isinstance(speed, float) else 0.0)
    for pair, both in pairs.items():
        for number in pair:
            best[number] = max(best.get(number, 0.0), min(both) if len(both) == 2 else 0.0)
    return best


def judge(names: list, speeds: dict) -> tuple:
    """
    Who is good.

    :param names: of the nodes
    :param speeds: {(number, number of the partner): bytes a second or a text}, each direction
    :return: (numbers of the good nodes, {number of another one: why}, median of the best pairs)
    """
    best, wrong = best_pairs(speeds), {}  # type: dict, dict
    median = statistics.median([speed for speed in best.values() if speed] or [0.0])
    for number in range(len(names)):
        failed = [text for (one, _), text in speeds.items() if one == number and not isinstance(text, float)]
        if not best.get(number):
            wrong[number] = "fails: no pair of it worked%s" % (' (%s)' % failed[0] if failed else '')
        elif best[number] < SLOW * median:
            wrong[number] = "slow: best pair %.2f GB/s, median %.2f GB/s" % (best[number] / 1e9, median / 1e9)
    # Two nodes have one pair: none can be said to be the slow one. One node alone has none.
    if len(names) == 1:
        wrong = {}
    return [number for number in range(len(names)) if number not in wrong], wrong, median


def judge_backend(names: list, states: dict, speeds: dict) -> tuple:
    """
    Who is good, by what the processes of exchange.py say.

    :param states: {number of a node: what each of its processes said at first}
    :param speeds: {number of the process: speeds as judge() has them}
    :return: ({number of a node: why}, {number of a node: GB/s of all its processes together}, what was not tested)
    """
    wrong, figures, untested = {}, collections.Counter(), []  # type: dict, Any, list
    for lane in range(max(map(len, states.values()), default=0)):
        told = {number: said[lane] for number, said in states.items() if len(said) > lane}
        kinds = collections.Counter(said['backend'] for said in told.values() if said.get('ready'))
        if not kinds and all(said.get('absent') for said in told.values()):
            errors = collections.Counter(said['error'] for said in told.values())
            untested.append("backend%s: not tested, %s" % (' of GPU %d' % lane if lane else '',
                                                           errors.most_common(1)[0][0]))
            continue
        kind = kinds.most_common(1)[0][0] if kinds else 'the backend'
        for number, said in told.items():
            if not said.get('ready'):
                wrong.setdefault(number, "fails: %s does not start: %s" % (kind, said['error']))
            elif said['backend'] != kind:
                wrong.setdefault(number, "fails: its PyTorch takes %s, that of the others %s" % (said['backend'], kind))
        found = speeds.get(lane, {})
        members = sorted({number for pair in found for number in pair})
        place = {number: index for index, number in enumerate(members)}
        _, bad, _ = judge(members, {(place[one], place[other]): speed for (one, other), speed in found.items()})
        for index, why in bad.items():
            gpu = told[members[index]].get('gpu')
            wrong.setdefault(members[index], '%s%s %s' % (kind, ', %s,' % gpu if gpu else '', why))
        for number, speed in best_pairs(found).items():
            figures[number] += speed / 1e9
    return wrong, dict(figures), untested


def positive(text: str) -> int:
    """A number from 1 on: without a round no node is measured, and none would be good."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("%s is no number from 1 on" % text)
    return int(text)


def reference_of(text: str) -> tuple:
    """('nccl', 80.0) of 'nccl=80'."""
    backend, _, figure = text.partition('=')
    return backend, float(figure)


def judge_rates(names: list, figures: dict, kind: str, rates: list, lanes: dict, references: dict) -> list:
    """
    Lines about nodes whose network is slower than what it is said to be: nothing that stops a job.

    :param figures: GB/s of a node
    :param rates: of each node {network card: GB/s}
    :param lanes: {number of a node: how many GPUs were measured}: that many cards at most are used
    :param references: {backend: GB/s that the site expects of a node}
    """
    lines, share = [], OF_LINE_RATE.get(kind, 0.5)
    for what, wanted, text in (
            ('line rate', {number: share * min(sum(rates[number].values()), max(rates[number].values()) *
                           lanes.get(number, 1)) for number in figures if rates[number]},
             "less than %g of the line rate of its network cards" % share),
            ('reference', {number: references.get(kind, 0.0) for number in figures}, "less than the site's reference")):
        low = sorted(number for number, least in wanted.items() if figures[number] < least)
        if low:
            shown = ', '.join(names[number] for number in low[:8]) + (', ...' if len(low) > 8 else '')
            lines.append("%s: %d of %d nodes: %.2f GB/s over %s at least, %s (%.4g GB/s): %s" % (
                what, len(low), len(figures), min(figures[number] for number in low), kind, text,
                wanted[low[0]], shown))
    return lines


def table_text(names: list, good: list, wrong: dict, absent: list, columns: 'Optional[dict]' = None) -> str:
    """Lines as vetnode's readers take them: 'Vetted: NODE' and 'Cordon: NODE', and what was measured behind it."""
    word = 'Vetted: %s%s\n' if len(names) > 1 else 'Untested: %s    no other node answered%s\n'
    more = {number: '    ' + text for number, text in (columns or {}).items()}
    return ''.join([word % (names[number], more.get(number, '')) for number in good] +
                   ['Cordon: %s    %s%s\n' % (names[number], why, more.get(number, ''))
                    for number, why in sorted(wrong.items())] +
                   ['Cordon: %s    fails: it did not answer\n' % name for name in absent])


def write_lists(prefix: str, good: list, bad: list) -> None:
    """One node a line, which srun --nodelist=FILE and --exclude=FILE take (the name needs a '/' in it)."""
    write_whole({prefix + suffix: ''.join(name + '\n' for name in names)
                 for suffix, names in (('.vetted', good), ('.cordon', bad))})


def write_whole(texts: dict) -> None:
    """Write files, {path: text}, all of them whole or none; what is no file, as /dev/stdout, is written to."""
    parts = {}
    try:
        for path, text in texts.items():
            path = os.path.realpath(path)
            part = path if os.path.exists(path) and not os.path.isfile(path) else '%s.part-%d' % (path, os.getpid())
            if part != path:
                parts[part] = path
            with open(part, 'w') as stream:
                stream.write(text)
                stream.flush()
                if part != path:
                    os.fsync(stream.fileno())  # a file system over a network says only now that it is full
        for part, path in parts.items():
            os.replace(part, path)
    finally:
        for part in filter(os.path.exists, parts):
            os.remove(part)


class Lane:
    """exchange.py, or another program, as a child, so that a crash or a hang in a library is a finding."""

    def __init__(self, environ: dict, *words: object, program: str = 'exchange') -> None:
        self.errors = scratch_file() or open(os.devnull, 'w+b')
        self.process = subprocess.Popen([sys.executable, '-B', HERE, program] + list(map(str, words)), env=environ,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)  # type: Any
        self.said = queue.Queue()  # type: queue.Queue
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """Take its answers until it ends."""
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):       # of a library that knows the descriptor
                self.said.put(json.loads(line.decode()))
        self.said.put(None)

    def hear(self, end: float, turn: 'Optional[int]' = None) -> dict:
        """Its answer, to this turn, before the time `end`."""
        while True:
            try:
                found = self.said.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                return {'error': "no answer in time", 'gone': True, 'absent': True}
            if found is None:
                self.errors.seek(0)
                last = [line.decode(errors='replace').strip() for line in self.errors if line.strip()][-1:]
                self.said.put(None)
                return {'gone': True, 'error': "it ended with status %s%s" % (
                    self.process.wait(), ''.join(': ' + text[:300] for text in last))}
            if found.get('turn') == turn:
                return found

    def tell(self, order: dict) -> None:
        """A pair."""
        with contextlib.suppress(OSError):      # it has ended: hear() says so
            self.process.stdin.write(json.dumps(order).encode() + b'\n')
            self.process.stdin.flush()

    def end(self) -> None:
        """Nobody wants anything of it any more."""
        self.process.kill()
        self.process.wait()


def play(lanes: list, orders: dict) -> dict:
    """This node's part of a round: what its processes say, by their numbers as texts."""
    for lane, order in orders.items():
        lanes[int(lane)].tell(order)
    return {lane: lanes[int(lane)].hear(time.monotonic() + order['limit'] + 3, order['turn'])
            for lane, order in orders.items()}


def follow(lanes: list, branch: star.Branch, seconds: float) -> None:
    """Another node than rank 0's: play() what that says, until it says that it is over. :raises PeerLost: it is gone"""
    end = time.monotonic() + seconds
    wire.send_message(branch.connection, json.dumps([lane.hear(end) for lane in lanes]).encode())
    while True:
        # others may import for as long, and one may be waited for in vain
        orders = json.loads(branch.hear(time.monotonic() + seconds + 3 * FIRST_LIMIT).decode())
        if orders is None:
            return
        wire.send_message(branch.connection, json.dumps(play(lanes, orders)).encode())


def receive(connection: socket.socket, end: float) -> 'Any':
    """What a node says, or None."""
    try:
        return json.loads(wire.receive_message(connection, end).decode())
    except (wire.PeerLost, ValueError):
        return None


def greeting(connection: socket.socket, end: float) -> tuple:
    """What a node says at first: (its address or '', its port, {network card: GB/s}); port 0 if it does not."""
    said = receive(connection, end)
    if not (isinstance(said, list) and [type(part) for part in said] == [str, int, dict]):
        return '', 0, {}
    return tuple(said)


class Conductor:
    """
    Rank 0's node: has all nodes measure over the backend, round by round.

    :ivar states: {number of a node: what its processes said at first}
    :ivar speeds: {number of a process: {(number, number of the partner): bytes a second or a text}}
    :ivar network: what NCCL says that it runs over, '' if nothing
    :ivar seconds: of the slowest start, of all rounds
    :param table: [host, port] of each node
    :param failed: numbers of the nodes that nobody is to wait for
    """

    def __init__(self, lanes: list, connections: list, table: list, seconds: float, failed: set) -> None:
        self.lanes, self.connections, self.table = lanes, connections, table
        self.failed, self.worked, self.network = collections.Counter(), set(), ''  # type: Any, set, str
        end = time.monotonic() + seconds
        self.states = {0: [lane.hear(end) for lane in lanes]}
        self.speeds = {}  # type: dict
        for number, connection in enumerate(connections, 1):
            self.states[number] = receive(connection, end + star.SLACK) or [
                {'error': "it did not answer"}]
        ready = [said for said in sum(self.states.values(), []) if said.get('ready')]
        self.seconds = [max((said['seconds'] for said in ready), default=0.0), 0.0]
        kinds = collections.Counter(said['backend'] for said in ready)
        self.kind = kinds.most_common(1)[0][0] if kinds else ''
        self.playing = {(lane, number) for number, said in self.states.items() for lane, told in enumerate(said)
                        if told.get('ready') and told['backend'] == self.kind and number not in failed}

    def orders(self, turn: int) -> dict:
        """{number of a node: {number of a process: what it is to do}}"""
        found = {number: {} for number in self.states}  # type: dict
        for lane, number in sorted(self.playing):
            other = partner(number, turn, len(self.states))
            if other is None or other <= number or (lane, other) not in self.playing:
                continue
            order = {'turn': turn, 'limit': LIMIT if turn else FIRST_LIMIT}
            found[number][str(lane)] = dict(order, rank=0)
            found[other][str(lane)] = dict(order, rank=1, host=self.table[number][0],
                                           port=self.states[number][lane]['port'])
        return found

    def round(self, turn: int) -> None:
        """All pairs of a round."""
        begin, orders = time.monotonic(), self.orders(turn)
        for number, connection in enumerate(self.connections, 1):
            wire.tell_all([connection], json.dumps(orders[number]).encode())
        answers = {0: play(self.lanes, orders[0])}
        end = time.monotonic() + star.SLACK + (LIMIT if turn else FIRST_LIMIT) + 3
        for number, connection in enumerate(self.connections, 1):
            answers[number] = receive(connection, end)
            if answers[number] is None:     # what it says later would be taken for the answer to another round
                connection.close()
                answers[number] = {}
                self.playing -= {(lane, number) for lane in range(len(self.states[number]))}
        for number, said in answers.items():
            for lane in orders[number]:
                self.take(int(lane), number, partner(number, turn, len(self.states)), said.get(lane) or {})
        self.seconds[1] += time.monotonic() - begin

    def take(self, lane: int, number: int, other: 'Any', said: dict) -> None:
        """One process's answer to a round."""
        speeds = self.speeds.setdefault(lane, {})
        self.network = self.network or ', '.join(filter(None, (said.get('network'), said.get('provider'))))
        if 'received' in said and not said.get('error'):
            self.worked.add((lane, number))
            if isinstance(speeds.get((other, number)), str):
                return      # the other one says that it failed
            speeds[other, number] = float(said['received'])
            return
        speeds[number, other] = str(said.get('error') or 'it did not answer')
        self.failed[lane, number] += 1
        if said.get('gone') or self.failed[lane, number] >= ENOUGH and (lane, number) not in self.worked:
            self.playing.discard((lane, number))


def run(machine: Machine, out: 'Any', count: int = ROUNDS, prefix: 'Optional[str]' = None,
        path: 'Optional[str]' = None, references: 'Optional[dict]' = None) -> int:
    """
    Vet, as one rank.

    :param count: rounds at most
    :param prefix: rank 0 writes PREFIX.vetted and PREFIX.cordon
    :param path: rank 0 writes what it found there, as JSON
    :param references: {backend: GB/s that the site expects of a node}
    :return: exit status: 0 on all nodes if none is bad, else 1
    """
    star.read_ranks(machine.environ)
    if int(machine.environ['LOCAL_RANK']):
        return 0
    known = machine.gpus()
    seen = len(look.visible_gpus(machine, known)) if known else 0
    # they import PyTorch meanwhile
    lanes = [Lane(machine.environ, number) for number in range(max(1, seen))]
    try:
        return vet(machine, out, lanes, count, prefix, path, references or {})
    finally:
        for lane in lanes:
            lane.end()


def vet(machine: Machine, out: 'Any', lanes: list, count: int, prefix: 'Optional[str]', path: 'Optional[str]',
        references: dict) -> int:
    """As run(), with this node's processes of exchange.py."""
    environ, begin = machine.environ, time.monotonic()
    seconds = seconds_to_wait(environ)
    wanted = environ.get('NCCL_SOCKET_IFNAME', '')
    found = [] if wanted.startswith('^') else [name for name in interfaces_of(wanted) if address_of(name)]
    interface, own = (found[0], address_of(found[0])) if found else ('', '')
    world, local_world = int(environ['WORLD_SIZE']), int(environ['LOCAL_WORLD_SIZE'])
    key = star.start_id(environ)
    listener = wire.listen(0)
    wire.serve(listener, functools.partial(answer, key))
    hello = [own, listener.getsockname()[1], machine.line_rates()]
    if environ['RANK'] != '0':
        branch = star.Branch(environ, local_world, machine.node, seconds, machine.clock)
        wire.send_message(branch.connection, json.dumps(hello).encode())
        end = time.monotonic() + seconds
        table, number, count = json.loads(branch.hear(end).decode())
        wire.send_message(branch.connection, json.dumps(rounds(number, table, key, count)).encode())
        if len(table) > 1:
            follow(lanes, branch, seconds)
        return 0 if branch.verdict(seconds + count * PATIENCE * 2) == b'0' else 1

    root = star.Root(environ, world - local_world, min(seconds, wire.QUIET), machine.clock)
    root.gather(lambda: '-')
    nodes, names, rates, table = [], [machine.node], [hello[2]], [[own or environ['MASTER_ADDR'], hello[1]]]
    silent = []
    for other in root.nodes:
        theirs, port, rate = greeting(other.connection, time.monotonic() + PATIENCE)
        if not port:
            silent.append(other.name)
            continue
        nodes.append(other.connection)
        names.append(other.name)
        rates.append(rate)
        table.append([theirs or nodes[-1].getpeername()[0], port])
    count = min(count, len(names) - 1 + len(names) % 2)
    for number, connection in enumerate(nodes, 1):
        wire.send_message(connection, json.dumps([table, number, count]).encode())
    speeds = {(0, other): speed for other, speed in rounds(0, table, key, count).items()}
    end = time.monotonic() + count * PATIENCE * 2
    for number, connection in enumerate(nodes, 1):
        told = receive(connection, end) or {}   # no pair of one that is silent counts
        speeds.update({(number, int(other)): speed for other, speed in told.items()})
    good, wrong, median = judge(names, speeds)
    tcp, not_tested, yellow = time.monotonic() - begin, [], []
    columns = {number: ['TCP %.2f GB/s' % (speed / 1e9)] for number, speed in best_pairs(speeds).items()}
    figures, kind, took = {}, '', [0.0, 0.0]  # type: dict, str, list
    if len(names) > 1:
        over = Conductor(lanes, nodes, table, seconds, {number for number in range(len(names))
                                                        if not best_pairs(speeds).get(number)})
        if over.playing:
            for turn in range(count):
                over.round(turn)
        wire.tell_all(nodes, b'null')
        bad, figures, not_tested = judge_backend(names, over.states, over.speeds)
        kind, took = over.kind, over.seconds
        for number, why in bad.items():
            wrong[number] = '; '.join(filter(None, (wrong.get(number), why)))
        good = [number for number in good if number not in wrong]
        for number, figure in figures.items():
            columns.setdefault(number, []).append('%s %.2f GB/s' % (kind, figure))
        measured = {number: len({lane for lane, pairs in over.speeds.items() for pair in pairs if number in pair})
                    for number in figures}
        yellow = judge_rates(names, figures, kind, rates, measured, references)
        if over.network.startswith('Socket') and machine.slingshot():
            yellow.append("NCCL takes sockets (TCP) here, not Slingshot: see 'plugin' and 'network' of --check")
        network_of = ' (%s)' % over.network if over.network else ''
    if found[1:]:
        not_tested.append("TCP over %s: not tested, %s was" % (', '.join(found[1:]), interface))
    total_gpus = len(machine.gpus())
    if total_gpus > len(lanes):
        not_tested.append("%d of a node's %d GPUs: not tested, this rank sees %d. Start one rank per node, with all "
                          "GPUs" % (total_gpus - len(lanes), total_gpus, len(lanes)))
    expected = expand_hosts(environ.get('SLURM_STEP_NODELIST', ''))
    absent = silent + [name for name in expected if len(expected) > 1 and name not in names + silent]
    total = len(names) + len(absent)
    figure = "median of the best pairs %.2f GB/s" % (median / 1e9) if speeds else "no pair was measured"
    text = "slingtorch vet: %d node%s, %d round%s, %.1f s; %s (TCP%s)" % (
        total, 's'[:total != 1], count, 's'[:count != 1], time.monotonic() - begin, figure,
        ' on ' + interface if own else '')
    if figures:
        text += "; %.2f GB/s (%s%s)\ntimes: TCP %.1f s, start of PyTorch %.1f s, %s %.1f s" % (
            statistics.median(figures.values()), kind, network_of, tcp, took[0], kind, took[1])
    out.write(text + '\n' + table_text(names, good, wrong, absent, {
        number: ', '.join(texts) for number, texts in columns.items()}))
    out.write(''.join('yellow: %s\n' % line for line in yellow) +
              ''.join(line + '\n' for line in not_tested))
    out.flush()
    if path:
        entries = [{'name': name, 'good': number in good, 'why': wrong.get(number, ''), 'line_rates': rates[number],
                    'tcp': best_pairs(speeds).get(number, 0) / 1e9, 'backend': figures.get(number)}
                   for number, name in enumerate(names)]
        entries += [{'name': name, 'good': False, 'why': 'fails: it did not answer'} for name in absent]
        write_whole({path: json.dumps({
            'format': 1, 'title': text.splitlines()[0], 'rounds': count, 'backend': kind, 'yellow': yellow,
            'not_tested': not_tested, 'nodes': entries,
            'seconds': {'tcp': tcp, 'start': took[0], 'backend': took[1]}}, indent=1)})
    if prefix:
        write_lists(prefix, [names[number] for number in good], [names[number] for number in wrong] + absent)
    failed = bool(wrong or absent)
    wire.tell_all(nodes, b'01'[failed:failed + 1])
    return 1 if failed else 0


def main(argv: list) -> int:
    """Run the program; the exit status."""
    parser = argparse.ArgumentParser(prog='vet', description="Measures the bandwidth between nodes (docs/check.md).")
    parser.add_argument('--rounds', metavar='N', type=positive, default=ROUNDS,
                        help="how many partners each node has at most (%(default)s)")
    parser.add_argument('--write', metavar='PREFIX', help="write PREFIX.vetted and PREFIX.cordon")
    parser.add_argument('--json', metavar='FILE', type=records.file_to_write, help="write what was found")
    parser.add_argument('--reference', metavar='BACKEND=GB/S', type=reference_of, action='append', default=[],
                        help="what a node should send over this backend, by all its GPUs together: nccl=80")
    args = parser.parse_args(argv)
    machine = Machine()
    return star.guarded('vet', machine,
                        lambda: run(machine, sys.stdout, args.rounds, args.write, args.json, dict(args.reference)))
