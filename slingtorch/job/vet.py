# SPDX-License-Identifier: GPL-2.0-only
"""
Measures the bandwidth between nodes, pair by pair, before a job starts; names slow and failing nodes (docs/check.md).

    python job vet [--rounds N] [--write PREFIX] [--json FILE] [--reference BACKEND=GB/S]
                                                   in one rank per node; further ranks of a node end at once

In each round, each node has one partner (the circle method of a round-robin tournament). All nodes measure at the
same time, over process groups of the backend that a training uses (pairs.py).
"""
import argparse
import collections
import contextlib
import signal
import statistics
import sys
import time

from . import gather, look, meet, node, pairs, records
from .kinds import Any
from .machine import Machine, expand_hosts, seconds_to_wait
from .messages import Child, one_line

# A node is slow if its best pair reaches less than this share of the median, over all nodes, of their best pairs.
SLOW = 0.5
ROUNDS = 8
# by backend, the share of the line rate below which vet reports it: on a fast network, gloo over TCP reaches a tenth
OF_LINE_RATE = {'nccl': 0.5, 'gloo': node.SLOW_LINK}


def judge(lanes: list, speeds: list, kind: str) -> tuple:
    """
    Decide which nodes are good.

    :param lanes: first messages of the processes of pairs.py, each with the 'number' of its node
    :param speeds: see pairs.Keeper
    :param kind: the backend that most use
    :return: ({number of a bad node: why}, {number of a node: GB/s of the best pairs of its processes}, {lane: why it
        was not tested})
    """
    wrong, figures, untested = {}, collections.Counter(), {}  # type: dict, Any, dict
    for lane in sorted({said['lane'] for said in lanes}):
        told = {said['number']: said for said in lanes if said['lane'] == lane}
        if all(said['absent'] for said in told.values()):
            untested[lane] = collections.Counter(said['error'] for said in told.values()).most_common(1)[0][0]
            continue
        for number, said in told.items():
            if not said['ready']:
                wrong.setdefault(number, "fails: %s does not start: %s" % (kind, said['error']))
            elif said['backend'] != kind:
                wrong.setdefault(number, "fails: its PyTorch uses %s, the others use %s" % (said['backend'], kind))
        best, failed = {}, {}    # type: dict, dict
        for pair, answers in [(entry[1:3], entry[3:]) for entry in speeds if entry[0] == lane]:
            worked = all(isinstance(answer, float) for answer in answers)
            for number, answer in zip(pair, answers):
                # the slower direction
                best[number] = max(best.get(number, 0.0), min(answers) if worked else 0.0)
                failed.setdefault(number, '' if isinstance(answer, float) else ' (%s)' % answer)
        median = statistics.median([speed for speed in best.values() if speed] or [0.0])
        for number, speed in best.items():
            figures[number] += speed / 1e9
            what = kind + (', %s,' % told[number]['gpu'] if told[number]['gpu'] else '')
            if not speed:
                wrong.setdefault(number, "%s fails: none of its pairs worked%s" % (what, failed[number]))
            elif speed < SLOW * median:
                wrong.setdefault(number, "%s slow: best pair %.2f GB/s, median %.2f GB/s" % (
                    what, speed / 1e9, median / 1e9))
    return wrong, dict(figures), untested


def positive(text: str) -> int:
    """A positive number: without a round, no node is measured, so none would be good."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("%s is not a positive number" % text)
    return int(text)


def reference_of(text: str) -> tuple:
    """('nccl', 80.0) for 'nccl=80'."""
    backend, _, figure = text.partition('=')
    return backend, float(figure)


def judge_rates(names: list, figures: dict, kind: str, rates: dict, reference: float) -> list:
    """
    Lines about nodes whose network is slower than expected, which does not stop a job of three nodes or more.

    :param figures: {number of a node: GB/s}
    :param rates: {number of a node: GB/s of the network cards that it can use}, 0 if unknown
    :param reference: GB/s that the site expects of a node, 0 if unknown
    """
    lines, share = [], OF_LINE_RATE.get(kind, 0.5)
    for what, wanted, text in (
            ('line rate', {number: share * rates[number] for number in figures},
             "less than %g of the line rate of its network cards" % share),
            ('reference', dict.fromkeys(figures, reference), "less than the site's reference")):
        low = sorted(number for number, least in wanted.items() if figures[number] < least)
        if low:
            shown = ', '.join(names[number] for number in low[:8]) + (', ...' if len(low) > 8 else '')
            lines.append("%s: %d of %d nodes: lowest %.2f GB/s over %s, %s (%.4g GB/s): %s" % (
                what, len(low), len(figures), min(figures[number] for number in low), kind, text,
                wanted[low[0]], shown))
    return lines


def table_text(nodes: list, kind: str) -> str:
    """Lines in the form of vetnode: 'Vetted: NODE' or 'Cordon: NODE', followed by what was measured."""
    return ''.join('%s: %s%s%s\n' % (
        'Cordon' if not node['good'] else 'Untested' if node['why'] else 'Vetted', node['name'],
        node['why'] and '    ' + node['why'], '' if node['backend'] is None else
        '    %s %.2f GB/s' % (kind, node['backend'])) for node in nodes)


def run(machine: Machine, out: 'Any', args: 'Any') -> int:
    """Run vet in one rank with the options of main(): exit status 0 on all nodes if none is bad, else 1."""
    gather.read_ranks(machine.environ)
    if int(machine.environ['LOCAL_RANK']):
        return 0
    known, seconds = machine.gpus(), seconds_to_wait(machine.environ)
    seen = max(1, len(look.visible_gpus(machine, known)) if known else 0)
    children = [Child(machine.environ, 'pairs', number, seen) for number in range(seen)]
    try:
        if machine.environ['RANK'] == '0':
            return conduct(machine, out, seen, args)
        end = time.monotonic() + 2 * seconds + 60 + args.rounds * (pairs.LIMIT + 5) + pairs.FIRST_LIMIT
        said = [child.hear(end) for child in children]
        word = [each['word'] for each in said if 'word' in each]
        if not word:
            raise gather.PeerLost(one_line(said[0].get('error', 'no message'))[:600])
        for each in said:
            if 'error' in each:
                gather.say('vet', machine, each['error'][:600])
        return 0 if word[0] == '0' else 1
    finally:
        for child in children:
            child.end()


def conduct(machine: Machine, out: 'Any', seen: int, args: 'Any') -> int:
    """Rank 0's part of run(), which sees this number of GPUs, or 1 without GPUs."""
    environ, begin = machine.environ, time.monotonic()
    try:
        keeper = pairs.keep(environ, seconds_to_wait(environ))
        keeper.measure(args.rounds)
    except meet.NotMet as err:
        raise gather.PeerLost("the nodes cannot meet at MASTER_ADDR=%s, MASTER_PORT=%s: %s" % (
            environ['MASTER_ADDR'], environ['MASTER_PORT'], one_line(err)[:600]))
    lanes = list(keeper.lanes.values())
    kind, expected, said_of = keeper.kind, dict(args.reference), {said['number']: said for said in lanes}
    names = [one_line(said_of[number]['node']) for number in sorted(said_of)]
    rates = {number: {one_line(card): float(rate) for card, rate in said['rates'].items()
                      if isinstance(rate, (int, float))} for number, said in said_of.items()}
    wrong, figures, not_tested = judge(lanes, keeper.speeds, kind or 'the backend')
    # a GPU uses at most one card
    measured = {number: len({entry[0] for entry in keeper.speeds if number in entry[1:3]}) for number in figures}
    reach = {number: min(sum(cards.values()), max(cards.values(), default=0.0) * measured.get(number, 0))
             for number, cards in rates.items()}
    yellow = judge_rates(names, figures, kind, reach, expected.get(kind, 0.0))
    untested = {number: "no pair was measured" for number in said_of if number not in figures}
    if len(names) == 2 and not wrong:   # their one pair does not show which is slow
        if yellow:
            wrong = dict.fromkeys(figures, "slow: it or its only partner: %s" % yellow[0].split(': ', 2)[-1])
        elif not expected.get(kind) and not all(reach.values()):
            untested.update(dict.fromkeys(
                figures, "only one partner, and neither a line rate nor a reference to compare with"))
    if keeper.network.startswith('Socket') and machine.slingshot():
        yellow.append("NCCL uses sockets (TCP) here, not Slingshot: see 'plugin' and 'network' in --check's output")
    lines = ["backend%s: not tested, %s" % (' of GPU %d' % lane if lane else '', why)
             for lane, why in not_tested.items()]
    total_gpus = len(machine.gpus())
    if total_gpus > seen:
        lines.append("%d of a node's %d GPUs: not tested, since this rank sees only %d. Start one rank per node, with "
                     "all GPUs" % (total_gpus - seen, total_gpus, seen))
    nodes = [{'name': name, 'good': number not in wrong, 'why': one_line(wrong.get(number, untested.get(number, ''))),
              'line_rates': rates[number], 'backend': figures.get(number)}
             for number, name in enumerate(names)]
    absent = [name for name in expand_hosts(environ.get('SLURM_STEP_NODELIST', '')) if name not in names]
    missing = int(environ['WORLD_SIZE']) // int(environ['LOCAL_WORLD_SIZE']) - len(names)
    absent = (absent + ['(a node of unknown name)'] * missing)[:max(0, missing)]
    nodes += [{'name': name, 'good': False, 'why': 'fails: it did not answer', 'backend': None} for name in absent]
    nodes.sort(key=lambda node: not node['good'])
    network = ' (%s)' % one_line(keeper.network) if keeper.network else ''
    figure = "median over the nodes of their best pair: %.2f GB/s (%s%s)" % (
        statistics.median(figures.values()), kind, network) if figures else "no pair was measured"
    title = "slingtorch vet: %d node%s, %d round%s, %.1f s; %s" % (
        len(nodes), 's'[:len(nodes) != 1], keeper.rounds, 's'[:keeper.rounds != 1], time.monotonic() - begin, figure)
    out.write("%s\ntimes: start of PyTorch %.1f s, pairs %.1f s\n%s" % (
        title, keeper.imported, keeper.took, table_text(nodes, kind)))
    out.write(''.join('yellow: %s\n' % line for line in yellow) + ''.join(line + '\n' for line in lines))
    out.flush()
    if args.json:
        records.write({'format': 2, 'title': title, 'rounds': keeper.rounds, 'backend': kind, 'yellow': yellow,
                       'not_tested': lines, 'nodes': nodes,
                       'seconds': {'start': keeper.imported, 'backend': keeper.took}}, args.json)
    if args.write:
        # one node per line, for srun --nodelist=FILE and --exclude=FILE (FILE must contain a '/')
        records.write_whole({args.write + suffix: ''.join(
            node['name'] + '\n' for node in nodes if node['good'] == good and ' ' not in node['name'])
            for suffix, good in (('.vetted', True), ('.cordon', False))})
    failed = not all(node['good'] for node in nodes)
    with contextlib.suppress(meet.NotMet):
        keeper.tell('01'[failed])
    return 1 if failed else 0


def main(argv: list) -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(prog='vet', description="Measures the bandwidth between nodes (docs/check.md).")
    parser.add_argument('--rounds', metavar='N', type=positive, default=ROUNDS,
                        help="maximum number of partners of a node (default: %(default)s)")
    parser.add_argument('--write', metavar='PREFIX', help="write PREFIX.vetted and PREFIX.cordon")
    parser.add_argument('--json', metavar='FILE', type=records.file_to_write, help="write the results to a new file")
    parser.add_argument('--reference', metavar='BACKEND=GB/S', type=reference_of, action='append', default=[],
                        help="GB/s that a node should reach with all its GPUs: nccl=80")
    args = parser.parse_args(argv)
    machine = Machine()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return gather.guarded('vet', machine, lambda: run(machine, sys.stdout, args))
