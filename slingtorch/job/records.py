# SPDX-License-Identifier: GPL-2.0-only
"""The file that bench writes in a job and 'slingtorch bench' reads, and its tables, which both print."""
import argparse
import json
import os
import re

FORMAT, VERSION = 'slingtorch bench', 1
"""What the first keys of a file say; a change that an older reader would misread gets a new number."""

OPERATIONS = ['all_reduce', 'all_gather', 'reduce_scatter', 'broadcast', 'all_to_all', 'send_receive']
KINDS = {
    'nccl': "NCCL or RCCL, on GPUs",
    'gloo': "gloo, on CPUs",
    'mpi': "PyTorch's backend mpi, on CPUs",
    'mpi-gpu': "PyTorch's backend mpi, on GPUs",
    'plain-mpi': "MPI itself (mpi4py), on CPUs",
    'plain-mpi-gpu': "MPI itself (mpi4py), on GPUs",
}
UNITS = {'K': 2 ** 10, 'M': 2 ** 20, 'G': 2 ** 30, 'T': 2 ** 40}
KEYS = ('complete', 'date', 'environment', 'line_rates', 'nodes', 'not_measured', 'notes', 'providers', 'ranks',
        'ranks_per_node', 'results', 'site', 'versions')
"""What is read of a file."""


class BenchError(RuntimeError):
    """Something that the user must fix; the message says how."""


def parse_size(text: str) -> int:
    """Bytes of '32768', '32K', '32KiB' or '16G'; powers of 1024, as in nccl-tests."""
    match = re.match(r'(\d+)\s*([KMGT]?)(i?B)?$', text.strip(), re.I)
    if not match or int(match.group(1)) == 0:
        raise argparse.ArgumentTypeError("'%s' is not a size: write 32K, 16M or 1G" % text)
    return int(match.group(1)) * UNITS.get(match.group(2).upper(), 1)


def show_size(size: int) -> str:
    """'32 KiB'"""
    for unit in 'TGMK':
        if size >= UNITS[unit]:
            return '%.4g %siB' % (size / UNITS[unit], unit)
    return '%d B' % size


def show_time(seconds: float) -> str:
    """'12.3 us', with three digits."""
    for unit, scale in (('us', 1e-6), ('ms', 1e-3)):
        if seconds < 1000 * scale:
            return '%.3g %s' % (seconds / scale, unit)
    return '%.3g s' % seconds


def read(path: str) -> dict:
    """The record in a file."""
    try:
        with open(path, encoding='utf-8') as stream:
            record = json.load(stream)
    except OSError as err:
        raise BenchError("%s cannot be read: %s" % (path, err.strerror))
    except ValueError as err:
        raise BenchError("%s is not JSON (%s): give the file that '--bench --json FILE' wrote" % (path, err))
    if not isinstance(record, dict) or record.get('format') != FORMAT:
        raise BenchError("%s is not a result of bench: give the file that '--bench --json FILE' wrote" % path)
    if record.get('version') != VERSION:
        raise BenchError("%s has version %s of the file's form, and this slingtorch reads %s: read it with the one "
                         "that wrote it, or measure again" % (path, record.get('version'), VERSION))
    missing = [key for key in KEYS if key not in record]
    if missing:
        raise BenchError("%s lacks %s: was it changed by hand?" % (path, ', '.join(missing)))
    return record


def averages(record: dict) -> dict:
    """{(kind, operation): average bus bandwidth}, as nccl-tests has it: of all sizes alike."""
    found = {}  # type: dict
    for row in record['results']:
        found.setdefault((row['kind'], row['operation']), []).append(row['bus_bandwidth'])
    return {key: sum(values) / len(values) for key, values in found.items()}


def wrong_values(record: dict) -> list:
    """Lines about wrong values."""
    return ['WRONG VALUES: %s, %s of %s: %d; %s'
            % (row['kind'], row['operation'], show_size(row['size']), row['wrong'], row['first_wrong'])
            for row in record['results'] if row['wrong']]


def head(record: dict) -> list:
    """Lines that say what was measured."""
    rates = record['line_rates']
    lines = ['slingtorch bench: %d ranks, %d a node, nodes: %d; PyTorch %s; %s' % (
        record['ranks'], record['ranks_per_node'], record['nodes'], record['versions']['torch'], record['date'])]
    extra = ['%s %s' % (name, record['versions'][name]) for name in ('gpu', 'nccl', 'mpi')
             if name in record['versions']]
    if extra:
        lines.append('  ' + '; '.join(extra))
    if record['nodes'] == 1:
        lines.append('  one node: nothing crosses the network')
    elif rates:
        lines.append('  line rate of a node: %.4g GB/s (%s)' % (
            sum(rates.values()), ', '.join('%s %.4g' % pair for pair in sorted(rates.items()))))
    else:
        lines.append('  line rate of a node: not known (no network card says it in /sys)')
    return lines


ROW = '%10s %10s %14s %10s %12s %8s %8s'


def table_head(record: dict, kind: str, operation: str) -> list:
    provider = record['providers'].get(kind, {})
    return ['', '%s, %s   (network: %s%s)' % (
        kind, operation, provider.get('name') or 'not known',
        ', %s' % provider['evidence'] if provider.get('evidence') else ''),
        ROW % ('size', 'time', 'algorithm GB/s', 'bus GB/s', 'of line rate', 'wrong', 'repeats')]


def table_row(record: dict, row: dict) -> str:
    rate = sum(record['line_rates'].values()) if record['nodes'] > 1 else 0
    return ROW % (show_size(row['size']), show_time(row['seconds']), '%.4g' % row['algorithm_bandwidth'],
                  '%.4g' % row['bus_bandwidth'], '%.1f %%' % (100 * row['bus_bandwidth'] / rate) if rate else '-',
                  row['wrong'], row['repeats'])


def summary(record: dict) -> list:
    """Lines: the average bus bandwidth of each operation and kind; beside plain MPI the ratio to it."""
    found = averages(record)
    kinds = [kind for kind in KINDS if any(kind == key[0] for key in found)]
    operations = [name for name in OPERATIONS if any(name == key[1] for key in found)]
    lines = ['', 'average bus bandwidth, GB/s' + (' (and as a share of plain MPI)' if 'plain-mpi' in kinds else ''),
             '%-16s' % '' + ''.join('%18s' % kind for kind in kinds)]
    for operation in operations:
        cells = []
        for kind in kinds:
            value, plain = found.get((kind, operation)), found.get(('plain-mpi', operation))
            cells.append('-' if value is None else '%.4g' % value if not plain or kind.startswith('plain-mpi')
                         else '%.4g (%.2f)' % (value, value / plain))
        lines.append('%-16s' % operation + ''.join('%18s' % cell for cell in cells))
    return lines + [''] + ['not measured: ' + text for text in record['not_measured']] + \
        ['note: ' + text for text in record['notes']] + wrong_values(record)


def write(record: dict, path: str) -> None:
    """Write the file, whole or not at all."""
    part = path + '.part'
    with open(part, 'w') as stream:
        json.dump(record, stream, indent=1)
        stream.write('\n')
    os.replace(part, path)
