# SPDX-License-Identifier: GPL-2.0-only
"""
Bandwidth between nodes, pair by pair, before a job starts on them: names slow and failing ones (docs/check.md).

    python job vet [--rounds N] [--write PREFIX]      in one rank per node; further ranks of a node end at once

In every round each node has one partner (the circle method of a round-robin tournament): all nodes measure at the
same time. Measured is TCP, on the interface that NCCL_SOCKET_IFNAME names, else on the one that leads to MASTER_ADDR.
"""
import argparse
import fcntl
import functools
import json
import socket
import statistics
import struct
import sys
import time

from . import star, wire
from .machine import Machine, expand_hosts

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


def address_of(interface: str) -> str:
    """The IPv4 address of the first interface whose name begins so; '' if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            if name.startswith(interface):
                try:
                    # SIOCGIFADDR, netdevice(7)
                    answer = fcntl.ioctl(query.fileno(), 0x8915, struct.pack('256s', name.encode()[:15]))
                    return socket.inet_ntoa(answer[20:24])
                except OSError:
                    continue
    return ''


def answer(key: str, connection: socket.socket) -> None:
    """A partner: what it sends is received to its end and timed; it is told the bytes a second."""
    with connection:
        connection.settimeout(PATIENCE)
        try:
            if wire.read_line(connection, time.time() + PATIENCE) != key:
                return
            begin, size, view = 0.0, 0, memoryview(bytearray(len(BLOCK)))
            while True:
                count = connection.recv_into(view)
                begin = begin or time.time()
                if not count:
                    break
                size += count
            connection.sendall(b'%.0f\n' % (size / max(1e-6, time.time() - begin)))
        except (OSError, wire.PeerLost):
            pass    # the one who measures says so


def measure(key: str, address: tuple, seconds: float = MEASURE) -> float:
    """Bytes a second to a partner. :raises OSError, PeerLost: it cannot be reached, or ended"""
    with socket.create_connection(address, PATIENCE) as connection:
        connection.sendall(key.encode() + b'\n')
        end = time.time() + seconds
        while time.time() < end:
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


def judge(names: list, speeds: dict) -> tuple:
    """
    Who is good.

    :param names: of the nodes
    :param speeds: {(number, number of the partner): bytes a second or a text}, each direction
    :return: (numbers of the good nodes, {number of another one: why}, median of the best pairs)
    """
    pairs = {}  # type: dict
    for (one, other), speed in speeds.items():
        pair = tuple(sorted((one, other)))
        pairs.setdefault(pair, []).append(speed if isinstance(speed, float) else 0.0)
    best, wrong = {}, {}  # type: dict, dict
    for pair, both in pairs.items():
        for number in pair:
            best[number] = max(best.get(number, 0.0), min(both) if len(both) == 2 else 0.0)
    median = statistics.median([speed for speed in best.values() if speed] or [0.0])
    for number, name in enumerate(names):
        failed = [text for (one, _), text in speeds.items() if one == number and not isinstance(text, float)]
        if not best.get(number):
            wrong[number] = "fails: no pair of it worked%s" % (' (%s)' % failed[0] if failed else '')
        elif best[number] < SLOW * median:
            wrong[number] = "slow: best pair %.2f GB/s, median %.2f GB/s" % (best[number] / 1e9, median / 1e9)
    # Two nodes have one pair: none can be said to be the slow one. One node alone has none.
    if len(names) == 1:
        wrong = {}
    return [number for number in range(len(names)) if number not in wrong], wrong, median


def table_text(names: list, good: list, wrong: dict, absent: list) -> str:
    """Lines as vetnode's readers take them: 'Vetted: NODE' and 'Cordon: NODE'."""
    word = 'Vetted: %s\n' if len(names) > 1 else 'Untested: %s    no other node answered\n'
    return ''.join([word % names[number] for number in good] +
                   ['Cordon: %s    %s\n' % (names[number], why) for number, why in sorted(wrong.items())] +
                   ['Cordon: %s    fails: it did not answer\n' % name for name in absent])


def write_lists(prefix: str, good: list, bad: list) -> None:
    """One node a line, which srun --nodelist=FILE and --exclude=FILE take (the name needs a '/' in it)."""
    for suffix, names in (('.vetted', good), ('.cordon', bad)):
        with open(prefix + suffix, 'w') as stream:
            stream.write(''.join(name + '\n' for name in names))


def run(machine: Machine, out: 'Any', count: int = ROUNDS, prefix: 'Optional[str]' = None) -> int:
    """
    Vet, as one rank.

    :param count: rounds at most
    :param prefix: rank 0 writes PREFIX.vetted and PREFIX.cordon
    :return: exit status: 0 on all nodes if none is bad, else 1
    """
    environ, begin = machine.environ, time.time()
    star.read_ranks(environ)
    if int(environ['LOCAL_RANK']):
        return 0
    seconds = float(environ.get('SLINGTORCH_CHECK_SECONDS') or 120)
    interface = environ.get('NCCL_SOCKET_IFNAME', '').lstrip('=').split(',')[0]
    own = address_of(interface) if interface and not interface.startswith('^') else ''
    world, local_world = int(environ['WORLD_SIZE']), int(environ['LOCAL_WORLD_SIZE'])
    key = star.start_id(environ)
    listener = wire.listen(0)
    wire.serve(listener, functools.partial(answer, key))
    port = listener.getsockname()[1]
    if environ['RANK'] != '0':
        branch = star.Branch(environ, local_world, machine.node, seconds, machine.clock)
        wire.send_message(branch.connection, json.dumps([own, port]).encode())
        end = time.time() + seconds
        table, number, count = json.loads(wire.receive_message(branch.connection, end).decode())
        found = rounds(number, table, key, count)
        wire.send_message(branch.connection, json.dumps(found).encode())
        return 0 if wire.receive_message(branch.connection, time.time() + seconds + count * PATIENCE * 2) == b'0' else 1

    root = star.Root(environ, world - local_world, min(seconds, wire.QUIET), machine.clock)
    root.gather(lambda: '-')
    nodes, names, table = [], [machine.node], [[own or environ['MASTER_ADDR'], port]]
    silent = []
    for node in root.nodes:
        try:
            theirs, their_port = json.loads(wire.receive_message(node.connection, time.time() + PATIENCE).decode())
        except (wire.PeerLost, ValueError):
            silent.append(node.name)
            continue
        nodes.append(node)
        names.append(node.name)
        table.append([theirs or node.connection.getpeername()[0], their_port])
    count = min(count, len(names) - 1 + len(names) % 2)
    for number, node in enumerate(nodes, 1):
        wire.send_message(node.connection, json.dumps([table, number, count]).encode())
    speeds = {(0, other): speed for other, speed in rounds(0, table, key, count).items()}
    end = time.time() + count * PATIENCE * 2
    for number, node in enumerate(nodes, 1):
        try:
            theirs = json.loads(wire.receive_message(node.connection, end).decode())
            speeds.update({(number, int(other)): speed for other, speed in theirs.items()})
        except (wire.PeerLost, ValueError):
            pass    # no pair of it counts
    good, wrong, median = judge(names, speeds)
    expected = expand_hosts(environ.get('SLURM_STEP_NODELIST', ''))
    absent = silent + [name for name in expected if len(expected) > 1 and name not in names + silent]
    total = len(names) + len(absent)
    figure = "median of the best pairs %.2f GB/s" % (median / 1e9) if speeds else "no pair was measured"
    out.write("slingtorch vet: %d node%s, %d round%s, %.1f s; %s (TCP%s)\n%s" % (
        total, 's'[:total != 1], count, 's'[:count != 1], time.time() - begin, figure,
        ' on ' + interface if own else '', table_text(names, good, wrong, absent)))
    out.flush()
    if prefix:
        write_lists(prefix, [names[number] for number in good], [names[number] for number in wrong] + absent)
    bad = bool(wrong or absent)
    wire.tell_all([node.connection for node in nodes], b'01'[bad:bad + 1])
    return 1 if bad else 0


def main(argv: list) -> int:
    """Run the program; the exit status."""
    parser = argparse.ArgumentParser(prog='vet', description="Measures the bandwidth between nodes (docs/check.md).")
    parser.add_argument('--rounds', metavar='N', type=int, default=ROUNDS,
                        help="how many partners each node has at most (%(default)s)")
    parser.add_argument('--write', metavar='PREFIX', help="write PREFIX.vetted and PREFIX.cordon")
    args = parser.parse_args(argv)
    machine = Machine()
    return star.guarded('vet', machine, lambda: run(machine, sys.stdout, args.rounds, args.write))
