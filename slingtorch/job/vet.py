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
import json
import signal
import statistics
import sys
import time

from . import gather, look, node, pairs, records
from .kinds import Any, Optional
from .machine import Machine, expand_hosts, seconds_to_wait
from .messages import Child, one_line

# A node is slow if its best pair reaches less than this share of the median, over all nodes, of their best pairs.
SLOW = 0.5
ROUNDS = 8
# by backend, the share of the line rate below which vet reports it: on a fast network, gloo over TCP reaches a tenth
OF_LINE_RATE = {'nccl': 0.5, 'gloo': node.SLOW_LINK}


def best_pairs(speeds: dict) -> dict:
    """{number of a node: bytes per second of its best pair, in the slower direction}; 0 if no pair worked."""
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
    Decide which nodes are good.

    :param names: names of the nodes
    :param speeds: {(number, number of the partner): bytes per second or a text}, each direction
    :return: (numbers of the good nodes, {number of each other node: why}, median of the best pairs)
    """
    best, wrong = best_pairs(speeds), {}  # type: dict, dict
    median = statistics.median([speed for speed in best.values() if speed] or [0.0])
    for number in range(len(names)):
        failed = [text for (one, _), text in speeds.items() if one == number and not isinstance(text, float)]
        if not best.get(number):
            wrong[number] = "fails: none of its pairs worked%s" % (' (%s)' % failed[0] if failed else '')
        elif best[number] < SLOW * median:
            wrong[number] = "slow: best pair %.2f GB/s, median %.2f GB/s" % (best[number] / 1e9, median / 1e9)
    # Two nodes have one pair, which does not show which node is slow. A single node has no pair.
    if len(names) == 1:
        wrong = {}
    return [number for number in range(len(names)) if number not in wrong], wrong, median


def judge_backend(names: list, states: dict, speeds: dict) -> tuple:
    """
    Decide which nodes are good from the messages of the processes of pairs.py.

    :param states: {number of a node: first message of each of its processes}
    :param speeds: {number of the process: speeds as in judge()}
    :return: ({number of a bad node: why}, {number of a node: GB/s of all its processes}, what was not tested)
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
                wrong.setdefault(number, "fails: its PyTorch uses %s, the others use %s" % (said['backend'], kind))
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
    """A positive number: without a round, no node is measured, so none would be good."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("%s is not a positive number" % text)
    return int(text)


def reference_of(text: str) -> tuple:
    """('nccl', 80.0) for 'nccl=80'."""
    backend, _, figure = text.partition('=')
    return backend, float(figure)


def judge_rates(names: list, figures: dict, kind: str, rates: list, lanes: dict, references: dict) -> list:
    """
    Lines about nodes whose network is slower than expected, which does not stop a job.

    :param figures: {number of a node: GB/s}
    :param rates: for each node, {network card: GB/s}
    :param lanes: {number of a node: how many GPUs were measured}; at most as many cards are used
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
            lines.append("%s: %d of %d nodes: lowest %.2f GB/s over %s, %s (%.4g GB/s): %s" % (
                what, len(low), len(figures), min(figures[number] for number in low), kind, text,
                wanted[low[0]], shown))
    return lines


def judge_two(figures: dict, lines: list, wanted: dict) -> tuple:
    """
    Judge two nodes: their one pair does not show which is slow, so line rates or references decide, if known.

    :param lines: result of judge_rates()
    :param wanted: {number of a node: a figure to compare with}, {} without one
    :return: ({number: why it is slow}, {number: why it is untested})
    """
    if not figures:
        return {}, {}
    if lines:
        return dict.fromkeys(figures, "slow: it or its only partner: %s" % lines[0].split(': ', 2)[-1]), {}
    return {}, {} if wanted else dict.fromkeys(
        figures, "only one partner, and neither a line rate nor a reference to compare with")


def table_text(names: list, good: list, wrong: dict, absent: list, columns: 'Optional[dict]' = None,
               untested: 'Optional[dict]' = None) -> str:
    """Lines in the form of vetnode: 'Vetted: NODE' or 'Cordon: NODE', followed by what was measured."""
    more, untested = {number: '    ' + text for number, text in (columns or {}).items()}, untested or {}
    return ''.join(['Untested: %s    %s%s\n' % (names[number], untested[number], more.get(number, ''))
                    if number in untested else 'Vetted: %s%s\n' % (names[number], more.get(number, ''))
                    for number in good] +
                   ['Cordon: %s    %s%s\n' % (names[number], why, more.get(number, ''))
                    for number, why in sorted(wrong.items())] +
                   ['Cordon: %s    fails: it did not answer\n' % name for name in absent])


def write_lists(prefix: str, good: list, bad: list) -> None:
    """Write one node per line, for srun --nodelist=FILE and --exclude=FILE (FILE must contain a '/')."""
    records.write_whole({prefix + suffix: ''.join(name + '\n' for name in names)
                         for suffix, names in (('.vetted', good), ('.cordon', bad))})


def run(machine: Machine, out: 'Any', count: int = ROUNDS, prefix: 'Optional[str]' = None,
        path: 'Optional[str]' = None, references: 'Optional[dict]' = None) -> int:
    """
    Run vet in one rank.

    :param count: maximum number of rounds
    :param prefix: rank 0 writes PREFIX.vetted and PREFIX.cordon
    :param path: file to which rank 0 writes the results as JSON
    :param references: {backend: GB/s that the site expects of a node}
    :return: exit status: 0 on all nodes if none is bad, else 1
    """
    gather.read_ranks(machine.environ)
    if int(machine.environ['LOCAL_RANK']):
        return 0
    known, seconds = machine.gpus(), seconds_to_wait(machine.environ)
    seen = max(1, len(look.visible_gpus(machine, known)) if known else 0)
    children = [Child(machine.environ, 'pairs', number, seen) for number in range(seen)]
    if machine.environ['RANK'] == '0':
        children.append(Child(machine.environ, 'pairs', 'keep', count, int(seconds)))
    try:
        end = time.monotonic() + 2 * seconds + 60 + count * (pairs.LIMIT + 5) + pairs.FIRST_LIMIT
        if machine.environ['RANK'] == '0':
            return conduct(machine, out, children, end, prefix, path, references or {})
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


def conduct(machine: Machine, out: 'Any', children: list, end: float, prefix: 'Optional[str]', path: 'Optional[str]',
            references: dict) -> int:
    """Rank 0's part of run(), with the processes of pairs.py; the last one has the store."""
    environ, begin, keeper = machine.environ, time.monotonic(), children[-1]
    told = keeper.hear(end)
    if 'opened' in told:
        told = keeper.hear(end)
    if 'lanes' not in told:
        raise gather.PeerLost("the nodes cannot meet at MASTER_ADDR=%s, MASTER_PORT=%s: %s" % (
            environ['MASTER_ADDR'], environ['MASTER_PORT'], one_line(told.get('error', ''))[:600]))
    numbers = {int(rank): number for rank, number in told['nodes'].items()}
    names, rates, states = [''] * len(numbers), [{}] * len(numbers), {}  # type: list, list, dict
    for said in sorted(told['lanes'], key=lambda said: said['lane']):
        number = numbers[said['rank']]
        names[number] = one_line(said['node'])
        rates[number] = {one_line(card): float(rate) for card, rate in said['rates'].items()
                         if isinstance(rate, (int, float))}
        states.setdefault(number, []).append(said)
    speeds = {}  # type: dict
    for lane, one, other, speed in told['speeds']:
        found = speeds.setdefault(lane, {})
        if not isinstance(found.get((one, other)), str):
            found[one, other] = speed
    wrong, figures, not_tested = judge_backend(names, states, speeds)
    measured = {number: len({lane for lane, found in speeds.items() for pair in found if number in pair})
                for number in figures}
    yellow, untested = judge_rates(names, figures, told['kind'], rates, measured, references), {}  # type: list, dict
    if len(names) == 2:
        known = {number: 1 for number in figures if rates[number] or references.get(told['kind'])}
        slow, untested = judge_two({number: figure for number, figure in figures.items() if number not in wrong},
                                   yellow, known)
        wrong.update(slow)
    elif len(names) == 1:
        wrong, untested = {}, {0: "no other node answered"}
    good = [number for number in range(len(names)) if number not in wrong]
    if told['network'].startswith('Socket') and machine.slingshot():
        yellow.append("NCCL uses sockets (TCP) here, not Slingshot: see 'plugin' and 'network' in --check's output")
    total_gpus, lanes = len(machine.gpus()), len(children) - 1
    if total_gpus > lanes:
        not_tested.append("%d of a node's %d GPUs: not tested, since this rank sees only %d. Start one rank per node, "
                          "with all GPUs" % (total_gpus - lanes, total_gpus, lanes))
    expected = expand_hosts(environ.get('SLURM_STEP_NODELIST', ''))
    absent = [name for name in expected if len(expected) > 1 and name not in names]
    missing = int(environ['WORLD_SIZE']) // int(environ['LOCAL_WORLD_SIZE']) - len(names)
    absent += ['(a node of unknown name)'] * max(0, missing - len(absent))
    total, count = len(names) + len(absent), told['rounds']
    network = ' (%s)' % one_line(told['network']) if told['network'] else ''
    figure = "median over the nodes of their best pair: %.2f GB/s (%s%s)" % (
        statistics.median(figures.values()), told['kind'], network) if figures else "no pair was measured"
    text = "slingtorch vet: %d node%s, %d round%s, %.1f s; %s\ntimes: start of PyTorch %.1f s, pairs %.1f s" % (
        total, 's'[:total != 1], count, 's'[:count != 1], time.monotonic() - begin, figure, told['imported'],
        told['took'])
    out.write(text + '\n' + table_text(names, good, wrong, absent, {
        number: '%s %.2f GB/s' % (told['kind'], figure) for number, figure in figures.items()}, untested))
    out.write(''.join('yellow: %s\n' % line for line in yellow) + ''.join(line + '\n' for line in not_tested))
    out.flush()
    if path:
        entries = [{'name': name, 'good': number in good, 'why': wrong.get(number, untested.get(number, '')),
                    'line_rates': rates[number], 'backend': figures.get(number)} for number, name in enumerate(names)]
        entries += [{'name': name, 'good': False, 'why': 'fails: it did not answer'} for name in absent]
        records.write_whole({path: json.dumps({
            'format': 2, 'title': text.splitlines()[0], 'rounds': count, 'backend': told['kind'], 'yellow': yellow,
            'not_tested': not_tested, 'nodes': entries,
            'seconds': {'start': told['imported'], 'backend': told['took']}}, indent=1)})
    if prefix:
        write_lists(prefix, [names[number] for number in good], [names[number] for number in wrong] + [
            name for name in absent if ' ' not in name])
    failed = bool(wrong or absent)
    keeper.tell('01'[failed])
    keeper.hear(time.monotonic() + 5)       # until it has told the others
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
    return gather.guarded('vet', machine,
                          lambda: run(machine, sys.stdout, args.rounds, args.write, args.json, dict(args.reference)))
