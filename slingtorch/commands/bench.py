# SPDX-License-Identifier: GPL-2.0-only
"""'slingtorch bench': reads what 'conda-python-distributed --bench --json FILE' (job/bench.py) wrote, plots it, and
compares it with the reference figures of a site."""
import argparse
import json
import sys
from typing import Any

from slingtorch import sites
from slingtorch.job.records import FORMAT, VERSION, BenchError, parse_size, table, wrong_values


def read(path: str) -> dict:
    """The record in a file; BenchError if it has none."""
    try:
        with open(path, encoding='utf-8') as stream:
            record = json.load(stream)
        if not isinstance(record, dict) or (record.get('format'), record.get('version')) != (FORMAT, VERSION):
            raise ValueError("its format is not '%s', version %d" % (FORMAT, VERSION))
        index(record)
        if not all(line.isprintable() for line in show(record)):
            raise ValueError("it has control characters")
        return record
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as err:
        raise BenchError("%s is not a result of bench (%s: %s): give the file that '--bench --json FILE' of this "
                         "slingtorch wrote" % (path, type(err).__name__, ascii(str(err))[1:-1]))


def show(record: dict) -> list:
    """The lines of the whole table, as the job printed it."""
    return table({**record, 'complete': True}) + (
        [] if record['complete'] else ["INCOMPLETE: the job ended before everything was measured"])


def index(record: dict) -> dict:
    """{(kind, operation, size): row}"""
    return {(row['kind'], row['operation'], row['size']): row for row in record['results']}


def judge(record: dict, site: Any) -> tuple:
    """Compare with the site's reference figures: (lines, whether all is good, or None if nothing could be compared)."""
    rows, lines, verdicts = index(record), [], []  # type: dict, list, list
    shape = record['nodes'], record['ranks_per_node']
    for reference in site.references:
        what = "%s, %s of %s on %s x %s ranks" % (reference.backend, reference.operation, reference.size,
                                                  reference.nodes, reference.ranks_per_node)
        row = rows.get((reference.backend, reference.operation, parse_size(reference.size)))
        if shape != (int(reference.nodes), int(reference.ranks_per_node)):
            lines.append("not compared: %s; this was %d x %d ranks" % (what, *shape))
        elif row is None:
            lines.append("not compared: %s was not measured" % what)
        else:
            wanted, found = float(reference.bus_bandwidth), row['bus_bandwidth']
            good = found >= wanted * (1 - float(reference.tolerance)) and not row['wrong']
            verdicts.append(good)
            lines.append("%s: %s: %.4g GB/s, %.2f of the reference %.4g (tolerance %s; %s)" % (
                'good' if good else 'WRONG VALUES' if row['wrong'] else 'TOO SLOW', what, found, found / wanted, wanted,
                reference.tolerance, reference.source))
    well = all(verdicts) if verdicts else None
    if well is False:
        lines.append("look for the reason: the network in the lines above (with TCP or Socket, the plugin was not "
                     "used), the variables NCCL_* and FI_* (slingtorch sites %s), other jobs on the same nodes"
                     % site.name)
    if well is None:
        lines.append("nothing was compared: there is no reference figure for this number of nodes and ranks. Send the "
                     "JSON file with the date to the project, or add a section [reference LABEL] to %s (docs/check.md)"
                     % site.path)
    return ["site %s: %s" % (site.name, line) for line in lines], well


def draw(record: dict, path: str) -> None:
    """Plot bus bandwidth by size to a file: a line for each backend and operation."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchError("--plot needs matplotlib: %s -m pip install matplotlib" % sys.executable)
    picture = Figure(figsize=(9, 6))
    axes = picture.subplots()
    for kind, operation in dict.fromkeys((row['kind'], row['operation']) for row in record['results']):
        axes.plot(*zip(*((row['size'], row['bus_bandwidth']) for row in record['results']
                         if (row['kind'], row['operation']) == (kind, operation))), marker='o',
                  linestyle='-' if kind == 'nccl' else '--', label='%s %s' % (kind, operation))
    if record['line_rates'] and record['nodes'] > 1:
        axes.axhline(sum(record['line_rates'].values()), color='0.4', linestyle=':', label='line rate of a node')
    axes.set(xscale='log', yscale='log', xlabel='bytes', ylabel='bus bandwidth, GB/s', title=table(record)[0])
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize='small')
    try:
        picture.savefig(path, dpi=110)
    except ValueError as err:  # a file name extension that matplotlib does not support
        raise BenchError("--plot %s: %s" % (path, err))


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    record = read(args.result)
    print('\n'.join(show(record)))
    if args.plot:
        draw(record, args.plot)
        print("plotted: %s" % args.plot)
    status = 1 if wrong_values(record) or not record['complete'] else 0
    if args.site:
        lines, well = judge(record, sites.load(args.site))
        print('\n'.join([''] + lines))
        status = status or {True: 0, False: 1, None: 3}[well]
    return status


def add_parser(commands: Any) -> None:
    """Add 'bench' to the command line."""
    parser = commands.add_parser('bench', help="print, plot or judge the results of --bench",
                                 description="Reads what 'srun ... conda-python-distributed --bench --json FILE' wrote "
                                             "in a job (docs/check.md).",
                                 epilog="Exit status: 0 good; 1 wrong values, slower than the site's figures, an "
                                        "incomplete file, or an error; 3 no reference figures to compare with.")
    parser.add_argument('result', metavar='FILE', help="JSON file of --bench, whose table to print")
    parser.add_argument('--plot', metavar='PNG', help="plot bus bandwidth by size (needs matplotlib)")
    parser.add_argument('--site', metavar='NAME', help="compare with the reference figures of this site")
    parser.set_defaults(function=run)
