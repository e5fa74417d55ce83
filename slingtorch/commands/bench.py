# SPDX-License-Identifier: GPL-2.0-only
"""'slingtorch bench': reads what 'conda-python-distributed --bench --json FILE' (job/bench.py) wrote, plots it, and
compares it with the reference figures of a site."""
import argparse
import json
import math
import sys
from typing import Any

from slingtorch import sites
from slingtorch.job.records import (FORMAT, KINDS, OPERATIONS, VERSION, BenchError, head, parse_size, show_size,
                                    summary, table_head, table_row, wrong_values)

NOTHING_COMPARED = 3
"""Exit status when a verdict was requested but there is no reference figure."""

HOW = """\
'slingtorch bench' does not measure; the ranks of a job do. In a job, after loading a PyTorch module:

    srun -N2 --ntasks-per-node=8 --kill-on-bad-exit $RUNSCRIPTS/conda-python-distributed --bench --json bench.json
    mpiexec -n 8 -ppn 4 $RUNSCRIPTS/conda-python-distributed --bench --json bench.json
    srun -N2 --ntasks-per-node=8 singularity exec $SIFPYTORCH conda-python-distributed --bench --json bench.json

One rank for each GPU. Then, anywhere:

    slingtorch bench bench.json                         prints the table again
    slingtorch bench bench.json --plot bench.png        plots it
    slingtorch bench bench.json --site NAME             compares it with the site's reference figures"""


def text(value: Any) -> str:
    """A text without escape sequences of a terminal; ValueError if it is none."""
    if not isinstance(value, str) or not ' '.join(value.split()).isprintable():
        raise ValueError("'%s' is not text" % ascii(value)[:80])
    return value


def figure(value: Any) -> float:
    """A number of a size that figures of bench have; ValueError for another one."""
    if type(value) not in (int, float) or not 0 <= value < 2 ** 60:
        raise ValueError("'%s' is not a figure" % ascii(value)[:80])
    return value


ROW_FORM = {'kind': text, 'operation': text, 'size': figure, 'bytes': figure, 'seconds': figure,
            'algorithm_bandwidth': figure, 'bus_bandwidth': figure, 'wrong': figure, 'repeats': figure}


def read(path: str) -> dict:
    """The record in a file."""
    try:
        with open(path, encoding='utf-8') as stream:
            record = json.load(stream)
    except OSError as err:
        raise BenchError("%s cannot be read: %s" % (path, err.strerror))
    except (ValueError, RecursionError) as err:
        raise BenchError("%s is not JSON (%s): give the file that '--bench --json FILE' wrote" % (path, err))
    if not isinstance(record, dict) or record.get('format') != FORMAT:
        raise BenchError("%s is not a result of bench: give the file that '--bench --json FILE' wrote" % path)
    if record.get('version') != VERSION:
        raise BenchError("%s has format version %s, but this slingtorch reads version %s: use the slingtorch that "
                         "wrote it, or measure again" % (path, ascii(record.get('version')), VERSION))
    try:
        return {
            'date': text(record['date']), 'complete': record['complete'] is True,
            'site': record['site'] and text(record['site']),
            **{name: int(figure(record[name])) for name in ('ranks', 'ranks_per_node', 'nodes')},
            'versions': {text(name): text(record['versions'][name]) for name in {'torch', *record['versions']}},
            'line_rates': {text(name): figure(rate) for name, rate in record['line_rates'].items()},
            'networks': {text(kind): text(name) for kind, name in record['networks'].items()},
            'notes': [text(line) for line in record['notes']],
            'results': [{'first_wrong': row['first_wrong'] and text(row['first_wrong']),
                         **{name: form(row[name]) for name, form in ROW_FORM.items()}} for row in record['results']],
        }
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise BenchError("%s is damaged: %s. Take another copy, or measure again" % (
            path, "%s is missing" % ascii(err.args[0]) if isinstance(err, KeyError) else ascii(str(err))[1:-1]))


def show(record: dict) -> list:
    """The lines of the whole table, as the job printed it."""
    lines = head(record) + table_head(record) + [table_row(record, row) for row in record['results']]
    return lines + summary(record) + (
        [] if record['complete'] else ["INCOMPLETE: the job ended before everything was measured"])


def index(record: dict) -> dict:
    """{(kind, operation, size): row}"""
    return {(row['kind'], row['operation'], row['size']): row for row in record['results']}


def judge(record: dict, site: Any) -> tuple:
    """Compare with the site's reference figures: (lines, whether all is good, or None if nothing could be compared)."""
    if not site.references:
        return ["site %s: no reference figures are known, so there is nothing to compare with. Yours would be the "
                "first: send the JSON file with the date and the number of nodes to the project, or add a section "
                "[reference LABEL] to %s (docs/check.md)" % (site.name, site.path)], None
    rows, lines, well = index(record), [], None
    for reference in site.references:
        what = "%s, %s of %s on %s x %s ranks" % (reference.backend, reference.operation, reference.size,
                                                  reference.nodes, reference.ranks_per_node)
        row = rows.get((reference.backend, reference.operation, parse_size(reference.size)))
        shape = record['nodes'], record['ranks_per_node']
        if shape != (int(reference.nodes), int(reference.ranks_per_node)):
            lines.append("site %s: not compared: %s; this was %d x %d ranks" % (site.name, what, *shape))
            continue
        if row is None:
            lines.append("site %s: not compared: %s was not measured" % (site.name, what))
            continue
        wanted, found = float(reference.bus_bandwidth), row['bus_bandwidth']
        good = found >= wanted * (1 - float(reference.tolerance)) and not row['wrong']
        well = good and well is not False
        lines.append("site %s: %s: %s: %.4g GB/s, %.2f of the reference %.4g (tolerance %s; %s)" % (
            site.name, 'good' if good else 'WRONG VALUES' if row['wrong'] else 'TOO SLOW', what, found, found / wanted,
            wanted, reference.tolerance, reference.source))
    if well is False:
        lines.append("Look for the reason: the network in the lines above (with TCP or Socket, the plugin was not "
                     "used), the variables NCCL_* and FI_* (slingtorch sites %s), other jobs on the same nodes"
                     % site.name)
    if well is None:
        lines.append("site %s: nothing was compared: there is no reference figure for this number of nodes and "
                     "ranks" % site.name)
    return lines, well


def draw(record: dict, path: str) -> None:
    """Plot bus bandwidth by size to a PNG: a panel for each operation, a line for each backend."""
    try:
        import matplotlib
    except ImportError:
        raise BenchError("--plot needs matplotlib: %s -m pip install matplotlib" % sys.executable)
    matplotlib.use('Agg')
    from matplotlib import pyplot, ticker
    operations, kinds = ([name for name in names if any(row[key] == name for row in record['results'])]
                         for key, names in (('operation', OPERATIONS), ('kind', KINDS)))
    if not operations:
        raise BenchError("there is nothing to plot: the file has no results")
    columns = min(3, len(operations))
    figure, grid = pyplot.subplots(-(-len(operations) // columns), columns, squeeze=False, sharex=True,
                                   figsize=(4.2 * columns + 0.6, 3.3 * -(-len(operations) // columns) + 1.1))
    rate = sum(record['line_rates'].values()) if record['nodes'] > 1 else 0
    for axes, operation in zip(grid.flat, operations):
        for kind in kinds:
            axes.plot(*zip(*sorted((row['bytes'], row['bus_bandwidth']) for row in record['results'] if (
                row['kind'], row['operation']) == (kind, operation)) or [(math.nan, math.nan)]),
                marker='o', markersize=4, label=kind)
        if rate:
            axes.axhline(rate, color='0.4', linestyle=':', label='line rate of a node')
        axes.set_xscale('log', base=2)
        axes.set_yscale('log')
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda size, _: show_size(int(size))))
        axes.tick_params(axis='x', labelrotation=30)
        axes.set_title(operation)
        axes.grid(True, alpha=0.3)
    grid[0][0].set_ylabel('bus bandwidth, GB/s')
    grid[0][0].legend(frameon=False)
    figure.suptitle('%d ranks, nodes: %d; PyTorch %s; %s' % (
        record['ranks'], record['nodes'], record['versions']['torch'], record['date']))
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except ValueError as err:  # a file name extension that matplotlib does not support
        raise BenchError("--plot %s: %s" % (path, err))


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    if not args.result:
        if args.plot or args.site:
            raise BenchError("give the file that '--bench --json FILE' wrote in a job")
        print(HOW)
        return 0
    record = read(args.result)
    print('\n'.join(show(record)))
    if args.plot:
        draw(record, args.plot)
        print("plotted: %s" % args.plot)
    status = 1 if wrong_values(record) or not record['complete'] else 0
    chosen = None
    try:
        # the site of the job, if this bundle knows it and it is a real system
        name = args.site or record['site']
        chosen = sites.load(name) if name else None
    except sites.SiteError:
        if args.site:
            raise
    if chosen and (args.site or chosen.rules):
        lines, well = judge(record, chosen)
        print('\n'.join([''] + lines))
        if args.site:
            status = status or {True: 0, False: 1, None: NOTHING_COMPARED}[well]
    return status


def add_parser(commands: Any) -> None:
    """Add 'bench' to the command line."""
    parser = commands.add_parser('bench', help="print, plot or judge the results of --bench",
                                 description="Reads the results of 'conda-python-distributed --bench'. Without "
                                             "arguments, shows how to measure.",
                                 epilog="Exit status: 0 good; 1 wrong values, slower than the site's figures, an "
                                        "incomplete file, or an error; 3 no reference figures to compare with.")
    parser.add_argument('result', nargs='?', metavar='FILE', help="JSON file of --bench, whose table to print")
    parser.add_argument('--plot', metavar='PNG', help="plot bus bandwidth by size (needs matplotlib)")
    parser.add_argument('--site', metavar='NAME', help="compare with the reference figures of this site")
    parser.set_defaults(function=run)
