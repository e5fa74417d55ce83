# SPDX-License-Identifier: GPL-2.0-only
"""
Measures the bandwidth between nodes before a job starts; names slow and failing nodes (docs/check.md).

In each round, each node has one partner (the circle method of a round-robin tournament). All nodes measure at the
same time, over process groups of the backend that a training uses (pairs.py).
"""
import argparse
import collections
import contextlib
import re
import signal
import statistics
import time

from . import gather, meet, node, pairs, records
from .kinds import Any
from .machine import Machine, expand_hosts, seconds_to_wait
from .messages import Child, has_form, one_line
from .probe import first_lines, patience

# A node is slow if its best pair reaches less than this share of the median, over all nodes, of their best pairs.
SLOW = 0.5
# the share of the line rate below which vet reports a node: on a fast network, gloo over TCP reaches a tenth
OF_LINE_RATE = {'nccl': 0.5, 'gloo': node.SLOW_LINK}
# forms of what a node sends, besides meet.COMES
COMES = {'error': str, 'gpus': int, 'rates': {str: (int, float)}}
REPORT = {'best': [(int, float, str)]}
SILENT = "fails: it did not answer"


def uses(said: dict) -> str:
    """What a node measures with, from its first message: 'gloo', 'nccl on 4 GPUs'."""
    return 'nccl on %d GPUs' % said['gpus'] if said['gpus'] else 'gloo'


def judge(nodes: dict, kind: str, reports: dict) -> tuple:
    """
    Decide which nodes are good.

    :param nodes: {number: first message of a node}
    :param kind: what most nodes use; '' if the backend starts on none
    :param reports: {number of a node that took part: what the best pair of each GPU reached, in GB/s, or why none
        worked; [] if it had no partner; None if it did not report}
    :return: ({number of a bad node: why}, {number of a node: GB/s of its GPUs' best pairs})
    """
    wrong = {}  # type: dict
    for number, said in nodes.items():
        if said['error']:
            wrong[number] = "fails: %s does not start: %s" % (kind.split(' ')[0] or 'the backend', said['error'])
        elif uses(said) != kind:
            wrong[number] = "fails: its PyTorch uses %s, the others use %s" % (uses(said), kind)
        elif number in reports and reports[number] is None:
            wrong[number] = SILENT
    figures = {number: 0.0 for number, report in reports.items() if report}
    for gpu, speeds in enumerate(zip(*filter(None, reports.values()))):
        what = 'gloo' if kind == 'gloo' else 'nccl, GPU %d,' % gpu
        median = statistics.median([speed for speed in speeds if not isinstance(speed, str)] or [0])
        for number, speed in zip(figures, speeds):
            if isinstance(speed, str):
                wrong.setdefault(number, "%s fails: none of its pairs worked (%s)" % (what, speed))
                continue
            figures[number] += speed
            if speed < SLOW * median:
                wrong.setdefault(number, "%s slow: best pair %.2f GB/s, median %.2f GB/s" % (what, speed, median))
    return wrong, figures


def table_of(nodes: dict, kind: str, best: dict, references: dict) -> tuple:
    """
    (An entry for each node, for the table and the file; a line about nodes that reach less than an absolute figure, or
    ''). See judge(); the absolute figures decide only if there are two nodes, whose one pair does not show which is
    slow.
    """
    wrong, figures = judge(nodes, kind, best)
    why = {number: "no pair was measured" for number in nodes if number not in figures}
    backend, wanted, low = kind.split(' ')[0], {}, ''   # type: str, dict, str
    for number in figures:
        rates = nodes[number]['rates'].values()
        # a GPU uses at most one card
        rate = min(sum(rates), max(rates, default=0) * max(1, nodes[number]['gpus']))
        wanted[number] = references.get(backend) or OF_LINE_RATE[backend] * rate
    less = [number for number in figures if figures[number] < wanted[number]]
    if less:
        low = "%d of %d nodes: lowest %.2f GB/s, less than %s (%.4g GB/s)" % (
            len(less), len(figures), min(figures[number] for number in less), "the site's reference"
            if backend in references else "%g of the line rate of its network cards" % OF_LINE_RATE[backend],
            wanted[less[0]])
    if len(nodes) == 2 and low:
        wrong = wrong or dict.fromkeys(figures, "slow: it or its only partner: %s" % low)
    elif len(nodes) == 2 and not all(wanted.values()):
        why.update(dict.fromkeys(figures, "only one partner, and neither a line rate nor a reference to compare with"))
    why.update(wrong)
    return [{'name': one_line(said['node']), 'good': number not in wrong, 'backend': figures.get(number),
             'why': one_line(why.get(number, ''))} for number, said in nodes.items()], low


def run(machine: Machine, args: 'Any') -> int:
    """Run vet in one rank with the options of main(): exit status 0 on all nodes if none is bad, else 1."""
    environ = machine.environ
    gather.read_ranks(environ)
    if int(environ['LOCAL_RANK']):
        return 0
    child, seconds = Child(pairs.play), seconds_to_wait(environ)
    try:
        if environ['RANK'] == '0':
            return conduct(environ, seconds, args)
        said = child.hear(time.monotonic() + 3 * seconds) or {}
        if 'longest' in said:
            said = child.hear(time.monotonic() + said['longest'] + 2 * pairs.SLACK) or {}
        if 'word' not in said:
            why = "it ended with status " + child.end() if child.ended() else "no answer in time"
            raise gather.PeerLost(said.get('error', why))
        return 0 if said['word'] == '0' else 1
    finally:
        child.end()


def conduct(environ: dict, seconds: float, args: 'Any') -> int:
    """Rank 0's part of run()."""
    begin, world = time.monotonic(), int(environ['WORLD_SIZE'])
    count = world // int(environ['LOCAL_WORLD_SIZE'])
    try:
        store = meet.Store(environ, seconds)
        end = time.monotonic() + patience(time.monotonic() - begin, count, seconds) + 2
        came = store.others(count, world + 1, end)
        nodes = {number: said for number, said in sorted(came.items()) if has_form(said, COMES)}
        kinds = collections.Counter(uses(said) for said in nodes.values() if not said['error'])
        kind = max(kinds, key=lambda kind: kinds[kind], default='')
        ring = [number for number, said in nodes.items() if not said['error'] and uses(said) == kind]
        rounds = min(args.rounds, len(ring) - 1 + len(ring) % 2) if len(ring) > 1 else 0
        store.put('go', {'ring': ring, 'rounds': rounds})
        end = time.monotonic() + rounds * (pairs.LIMIT + pairs.LATER) + pairs.SLACK
        said = store.reports(ring if rounds else [], end)
    except Exception as err:    # PyTorch may be broken in any way
        raise gather.PeerLost("the nodes cannot meet at MASTER_ADDR=%s, MASTER_PORT=%s: %s" % (
            environ['MASTER_ADDR'], environ['MASTER_PORT'], err if isinstance(err, meet.NotMet) else first_lines(err)))
    reports = {number: said.get(number) or {} for number in ring if rounds}
    network = max((', '.join(one_line(report[key]) for key in ('network', 'provider') if report.get(key))
                   for report in reports.values()), default='')
    best = {number: report['best'] if has_form(report, REPORT) and len(report['best']) in (
        0, max(1, nodes[number]['gpus'])) else None for number, report in reports.items()}
    table, low = table_of(nodes, kind, best, dict(args.reference))
    names = [entry['name'] for entry in table]
    absent = [name for name in expand_hosts(environ.get('SLURM_STEP_NODELIST', '')) if name not in names]
    absent = (absent + ["(a node of unknown name)"] * count)[:max(0, count - len(names))]
    table += [{'name': name, 'good': False, 'backend': None, 'why': SILENT} for name in absent]
    table.sort(key=lambda entry: (not entry['good'], entry['name']))
    figures = [entry['backend'] for entry in table if entry['backend'] is not None]
    title = "slingtorch vet: nodes: %d, rounds: %d, %.1f s; %s" % (
        len(table), rounds, time.monotonic() - begin,
        "median over the nodes of their best pair: %.2f GB/s (%s)" % (
            statistics.median(figures), ', '.join(filter(None, [kind, network])))
        if figures else "no pair was measured")
    show({'format': 3, 'title': title, 'backend': kind, 'yellow': low, 'nodes': table}, args)
    failed = not all(entry['good'] for entry in table)
    with contextlib.suppress(meet.NotMet):
        store.word('01'[failed], len(nodes))
    return int(failed)


def show(found: dict, args: 'Any') -> None:
    """Print the table, in the form of vetnode, and write the files."""
    print(found['title'])
    for entry in found['nodes']:
        word = 'Cordon' if not entry['good'] else 'Untested' if entry['why'] else 'Vetted'
        figure = '' if entry['backend'] is None else '%s %.2f GB/s' % (found['backend'].split(' ')[0], entry['backend'])
        print('    '.join(filter(None, ['%s: %s' % (word, entry['name']), entry['why'], figure])))
    print('yellow: %s\n' % found['yellow'] if found['yellow'] else '', end='', flush=True)
    if args.json:
        records.write(found, args.json)
    if args.write:
        # one node per line, for srun --nodelist=FILE and --exclude=FILE (FILE must contain a '/')
        records.write_whole({args.write + suffix: ''.join(
            entry['name'] + '\n' for entry in found['nodes'] if entry['good'] == good and ' ' not in entry['name'])
            for suffix, good in (('.vetted', True), ('.cordon', False))})


def reference_of(text: str) -> tuple:
    """('nccl', 80.0) for 'nccl=80'."""
    backend, _, figure = text.partition('=')
    if backend not in OF_LINE_RATE or not re.match(r'\d+(\.\d+)?$', figure):
        raise argparse.ArgumentTypeError("'%s' is not a reference: write nccl=80 or gloo=2.5" % text)
    return backend, float(figure)


def main(argv: list) -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(prog='vet', description="Measures the bandwidth between nodes (docs/check.md).")
    parser.add_argument('--rounds', metavar='N', type=int, default=8,
                        help="maximum number of partners of a node (default: %(default)s)")
    parser.add_argument('--write', metavar='PREFIX', help="write PREFIX.vetted and PREFIX.cordon")
    parser.add_argument('--json', metavar='FILE', type=records.file_to_write, help="write the results to a new file")
    parser.add_argument('--reference', metavar='BACKEND=GB/S', type=reference_of, action='append', default=[],
                        help="GB/s that a node should reach with all its GPUs: nccl=80")
    args, machine = parser.parse_args(argv), Machine()
    if args.rounds < 1:     # no node would be measured
        parser.error("--rounds %d is not a positive number" % args.rounds)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return gather.guarded('vet', machine, lambda: run(machine, args))
