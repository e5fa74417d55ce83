# SPDX-License-Identifier: GPL-2.0-only
"""The file that bench writes in a job and 'slingtorch bench' reads, and its tables, which both print."""
import argparse
import json
import os
import re

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Any

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
NAMES, LINES, COUNT, FIGURE = {str: str}, [str], range(1, 2 ** 31), float
FORM = {'complete': bool, 'date': str, 'environment': NAMES, 'line_rates': {str: FIGURE}, 'nodes': COUNT,
        'not_measured': LINES, 'notes': LINES, 'ranks': COUNT,
        'providers': {str: {'name': (str, None), 'evidence': (str, None)}},
        'ranks_per_node': COUNT, 'site': (str, None), 'versions': {'torch': str, str: str},
        'results': [{'kind': str, 'operation': str, 'size': range(2 ** 60), 'bytes': range(2 ** 60), 'seconds': FIGURE,
                     'algorithm_bandwidth': FIGURE, 'bus_bandwidth': FIGURE, 'wrong': range(2 ** 60),
                     'repeats': range(2 ** 60), 'first_wrong': (str, None)}]}  # type: dict
"""What is read of a file, and of which form it must be."""


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


def misfit(value: 'Any', form: 'Any', where: str = '') -> str:
    """Where a value is first of another form, '' if nowhere; {'name': X} must have it, {str: X} has any names."""
    if isinstance(form, tuple):
        return '' if value is None else misfit(value, form[0], where)
    if isinstance(form, range):
        fits = type(value) is int and value in form
    elif form is float:
        fits = type(value) in (int, float) and 0 <= value < 1e15
    elif form is str:   # of a terminal no escape sequence
        fits = isinstance(value, str) and ' '.join(value.split()).isprintable()
    else:
        fits = isinstance(value, form if isinstance(form, type) else type(form))
    if not fits or not isinstance(form, (dict, list)):
        return '' if fits else where
    names = [name for name in {**form, **value} if name is not str] if isinstance(form, dict) else range(len(value))
    for name in names:
        inner = form.get(name, form.get(str)) if isinstance(form, dict) else form[0]
        there = isinstance(form, list) or name in value
        found = inner and (misfit(value[name], inner, '%s %s' % (where, name)) if there else '%s %s' % (where, name))
        if found:
            return found
    return ''


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
        raise BenchError("%s has version %s of the file's form, and this slingtorch reads %s: read it with the one "
                         "that wrote it, or measure again" % (path, record.get('version'), VERSION))
    missing = [key for key in FORM if key not in record]
    if missing:
        raise BenchError("%s lacks %s: was it changed by hand?" % (path, ', '.join(missing)))
    where = misfit(record, FORM).strip()
    if where:
        raise BenchError("%s is damaged: %s is not of the form that --bench writes. Take another copy, or measure again"
                         % (path, ascii(where)))
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
