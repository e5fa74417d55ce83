# SPDX-License-Identifier: GPL-2.0-only
"""'slingtorch bench': reads what 'conda-python-distributed --bench --json FILE' (job/bench.py) wrote, compares two
files, draws them, and judges them by the reference figures of a site."""
import argparse
import sys
from typing import Any, List

from slingtorch import sites
from slingtorch.job.records import (KINDS, OPERATIONS, BenchError, head, parse_size, read, show_size, summary,
                                    table_head, table_row, wrong_values)

NOTHING_COMPARED = 3
"""Exit status when a verdict was asked for and there was nothing to compare with."""

HOW = """\
'slingtorch bench' measures nothing itself: the ranks of a job do. In a job, after 'module load' of a PyTorch:

    srun -N2 --ntasks-per-node=8 --kill-on-bad-exit $RUNSCRIPTS/conda-python-distributed --bench --json bench.json
    mpiexec -n 8 -ppn 4 $RUNSCRIPTS/conda-python-distributed --bench --json bench.json
    srun -N2 --ntasks-per-node=8 singularity exec $SIFPYTORCH conda-python-distributed --bench --json bench.json

One rank for each GPU. Then, anywhere:

    slingtorch bench bench.json                         the tables again
    slingtorch bench bench.json --plot bench.png
    slingtorch bench bench.json --site NAME             too slow? By the site's reference figures
    slingtorch bench --compare before.json after.json"""


def show(record: dict) -> list:
    """Lines: everything, as the job printed it."""
    lines, rows = head(record), {}  # type: list, dict
    for row in record['results']:
        rows.setdefault((row['kind'], row['operation']), []).append(table_row(record, row))
    for (kind, operation), found in rows.items():
        lines += table_head(record, kind, operation) + found
    lines += summary(record)
    if not record['complete']:
        lines.append("INCOMPLETE: the job ended before everything was measured")
    return lines


def index(record: dict) -> dict:
    """{(kind, operation, size): row}"""
    return {(row['kind'], row['operation'], row['size']): row for row in record['results']}


def differences(first: dict, second: dict) -> list:
    """Lines about what differs between two jobs besides their figures."""
    pairs = [(key, first[key], second[key])
             for key in ('ranks', 'ranks_per_node', 'nodes', 'site', 'providers', 'line_rates')]
    for key in ('versions', 'environment'):
        pairs += [(name, first[key].get(name, 'not set'), second[key].get(name, 'not set'))
                  for name in sorted(set(first[key]) | set(second[key]))]
    return ['%s: %s / %s' % pair for pair in pairs if pair[1] != pair[2]]


def compare(first: dict, second: dict, names: list) -> list:
    """Lines: bus bandwidths of two files side by side."""
    rows = [index(first), index(second)]
    both = [key for key in rows[0] if key in rows[1]]
    if not both:
        raise BenchError("%s and %s have no backend, operation and size in common" % tuple(names))
    lines = ['A: %s, %s' % (names[0], first['date']), 'B: %s, %s' % (names[1], second['date'])]
    lines += ['differs: ' + text for text in differences(first, second)]
    form, before = '%10s %14s %14s %8s', None
    for key in both:
        if key[:2] != before:
            before = key[:2]
            lines += ['', '%s, %s: bus bandwidth, GB/s' % before, form % ('size', 'A', 'B', 'B / A')]
        values = [each[key]['bus_bandwidth'] for each in rows]
        lines.append(form % (show_size(key[2]), '%.4g' % values[0], '%.4g' % values[1],
                             '%.2f' % (values[1] / values[0]) if values[0] else '-'))
    for letter, one, other in (('A', rows[0], rows[1]), ('B', rows[1], rows[0])):
        alone = len([key for key in one if key not in other])
        if alone:
            lines.append('only in %s: %d figures' % (letter, alone))
    return lines


def judge(record: dict, site: Any) -> tuple:
    """(lines, whether all is well, None if nothing could be compared): the record by the site's reference figures."""
    if not site.references:
        return ["site %s: no reference figures are known, so nothing says whether this is good. Yours would be the "
                "first: send the JSON file with the date and the number of nodes to the project, or add a section "
                "[reference LABEL] to %s (docs/bench.md)" % (site.name, site.path)], None
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
            lines.append("site %s: not compared: %s, which was not measured" % (site.name, what))
            continue
        wanted, found = float(reference.bus_bandwidth), row['bus_bandwidth']
        good = found >= wanted * (1 - float(reference.tolerance)) and not row['wrong']
        well = good and well is not False
        lines.append("site %s: %s: %s: %.4g GB/s, %.2f of the reference %.4g (tolerance %s; %s)" % (
            site.name, 'good' if good else 'WRONG VALUES' if row['wrong'] else 'TOO SLOW', what, found, found / wanted,
            wanted, reference.tolerance, reference.source))
    if well is False:
        lines.append("What to look at: the network that the tables name (TCP or Socket: the plugin was not used), "
                     "NCCL_* and FI_* variables (slingtorch sites %s), other jobs on the same nodes" % site.name)
    if well is None:
        lines.append("site %s: nothing was compared: measure on as many nodes and ranks as a reference" % site.name)
    return lines, well


def draw(records: List[dict], names: list, path: str) -> None:
    """Write a PNG: bus bandwidth by size, a panel for each operation, a line for each backend and file."""
    try:
        import matplotlib
    except ImportError:
        raise BenchError("--plot needs matplotlib: %s -m pip install matplotlib" % sys.executable)
    matplotlib.use('Agg')
    from matplotlib import pyplot, ticker
    rows = [row for record in records for row in record['results']]
    operations, kinds = ([name for name in names if any(row[key] == name for row in rows)]
                         for key, names in (('operation', OPERATIONS), ('kind', KINDS)))
    if not operations:
        raise BenchError("there is nothing to draw: no result in %s" % ', '.join(names))
    columns, height = min(3, len(operations)), -(-len(operations) // 3)
    figure, grid = pyplot.subplots(height, columns, figsize=(4.2 * columns + 0.6, 3.3 * height + 1.1), squeeze=False,
                                   sharex=True)
    handles = {}
    rates = [sum(record['line_rates'].values()) if record['nodes'] > 1 else 0 for record in records]
    for axes, operation in zip(grid.flat, operations):
        for number, record in enumerate(records):
            for kind in kinds:
                points = sorted((row['bytes'], row['bus_bandwidth']) for row in record['results']
                                if (row['kind'], row['operation']) == (kind, operation))
                if points:
                    label = kind if len(records) == 1 else '%s, %s' % (kind, names[number])
                    handles[label], = axes.plot(
                        *zip(*points), marker='os^vDx'[kinds.index(kind)], markersize=4, linewidth=1.5,
                        color='C%d' % kinds.index(kind), linestyle=('-', '--')[number % 2])
            if rates[number]:
                label = 'line rate of a node' if len(set(rates)) == 1 else 'line rate, ' + names[number]
                handles[label] = axes.axhline(rates[number], color='0.4', linestyle=':')
        axes.set_xscale('log', base=2)
        axes.set_yscale('log')
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda size, _: show_size(int(size))))
        axes.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=6))
        axes.tick_params(axis='x', labelrotation=30, labelbottom=True)
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: '%g' % value))
        axes.set_title(operation)
        axes.grid(True, which='major', alpha=0.3)
    for axes in list(grid.flat)[len(operations):]:
        axes.remove()
    for row in grid:
        row[0].set_ylabel('bus bandwidth, GB/s')
    record = records[0]
    title = '%d ranks, nodes: %d; PyTorch %s; %s' % (
        record['ranks'], record['nodes'], record['versions']['torch'], record['date'])
    figure.suptitle(title if len(records) == 1 else ' / '.join(names))
    figure.legend(handles.values(), handles.keys(), loc='lower center', ncols=min(4, len(handles)), frameon=False)
    figure.tight_layout(rect=(0, 0.25 * (1 + -(-len(handles) // 4)) / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=110)


def run(args: argparse.Namespace) -> int:
    """Do what was asked for; the exit status."""
    names = args.compare or ([args.result] if args.result else [])
    if not names:
        if args.plot or args.site:
            raise BenchError("name the file that '--bench --json FILE' wrote in a job")
        print(HOW)
        return 0
    if args.compare and (args.result or args.site):
        raise BenchError("--compare takes two files, and no third one or --site")
    records = [read(name) for name in names]
    print('\n'.join(compare(records[0], records[1], names) if args.compare else show(records[0])))
    if args.plot:
        draw(records, names, args.plot)
        print("drawn: %s" % args.plot)
    status = 1 if any(wrong_values(record) or not record['complete'] for record in records) else 0
    if not args.compare:
        chosen = None
        try:
            # of a job's own site, if it is a system by itself that is known here
            name = args.site or records[0]['site']
            chosen = sites.load(name) if name else None
        except sites.SiteError:
            if args.site:
                raise
        if chosen and (args.site or chosen.rules):
            lines, well = judge(records[0], chosen)
            print('\n'.join([''] + lines))
            if args.site:
                status = status or {True: 0, False: 1, None: NOTHING_COMPARED}[well]
    return status


def add_parser(commands: Any) -> None:
    """Add 'bench' to the command line."""
    parser = commands.add_parser('bench', help="read, compare, draw and judge what --bench measured in a job",
                                 description="Reads what 'conda-python-distributed --bench' measured in a job. "
                                             "Without arguments it says how that is done.",
                                 epilog="Exit status: 0; 1 for wrong values, too slow by the site's figures, a job "
                                        "that ended early, or an error; 3 if --site had nothing to compare with.")
    parser.add_argument('result', nargs='?', metavar='FILE', help="JSON file of --bench: print its tables")
    parser.add_argument('--compare', nargs=2, metavar=('A', 'B'), help="two such files side by side")
    parser.add_argument('--plot', metavar='PNG', help="draw bus bandwidth by size (needs matplotlib)")
    parser.add_argument('--site', metavar='NAME', help="judge by the reference figures of this site")
    parser.set_defaults(function=run)
