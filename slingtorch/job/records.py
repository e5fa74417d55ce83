# SPDX-License-Identifier: GPL-2.0-only
"""The file that bench writes in a job for 'slingtorch bench' (commands/bench.py), and the tables that both print."""
import argparse
import json
import os
import re

FORMAT, VERSION = 'slingtorch bench', 1
"""Values of the file's first keys; a change that an older reader would misread needs a new number."""

OPERATIONS = ['all_reduce', 'all_gather', 'reduce_scatter', 'broadcast', 'all_to_all', 'send_receive']
KINDS = ['nccl', 'gloo', 'mpi', 'mpi-gpu']
"""What carries the data: NCCL or RCCL; gloo, on CPUs; PyTorch's backend mpi, on CPUs or on GPU memory."""

UNITS = {'K': 2 ** 10, 'M': 2 ** 20, 'G': 2 ** 30}


class BenchError(RuntimeError):
    """Something that the user must fix; the message says how."""


def parse_size(text: str) -> int:
    """Bytes in '32768', '32K', '128 MiB' or '16G'; units are powers of 1024, as in nccl-tests."""
    match = re.match(r'([1-9]\d*) ?([KMG]?)(i?B)?$', text, re.I)
    if not match:
        raise argparse.ArgumentTypeError("'%s' is not a size: write 32K, 16M or 1G" % text)
    return int(match.group(1)) * UNITS.get(match.group(2).upper(), 1)


def show_size(size: int) -> str:
    """'32 KiB'"""
    for unit in 'GMK':
        if size >= UNITS[unit]:
            return '%.4g %siB' % (size / UNITS[unit], unit)
    return '%d B' % size


def show_time(seconds: float) -> str:
    """'12.3 us', with three digits."""
    for unit, scale in (('us', 1e-6), ('ms', 1e-3)):
        if seconds < 1000 * scale:
            return '%.3g %s' % (seconds / scale, unit)
    return '%.3g s' % seconds


def wrong_values(record: dict) -> list:
    """Lines about wrong values."""
    return ['WRONG VALUES: %s, %s of %s: %d, first on %s'
            % (row['kind'], row['operation'], show_size(row['size']), row['wrong'], row['first_wrong'])
            for row in record['results'] if row['wrong']]


def table(record: dict) -> list:
    """The lines of the table; if the record is complete, also what was not measured, and what went wrong."""
    form, rates = '%-8s %-14s %10s %10s %14s %10s %12s %8s', record['line_rates']
    lines = ['slingtorch bench: %d ranks, %d per node, nodes: %d; PyTorch %s; %s' % (
        record['ranks'], record['ranks_per_node'], record['nodes'], record['versions']['torch'], record['date'])]
    lines += ['  %s %s' % pair for pair in record['versions'].items() if pair[0] != 'torch']
    lines.append('  line rate of a node: ' + (
        '%.4g GB/s (%s)' % (sum(rates.values()), ', '.join('%s %.4g' % pair for pair in sorted(rates.items())))
        if rates else 'unknown (no network card reports it in /sys)'))
    lines += ['  network of %s: %s' % pair for pair in record['networks'].items()]
    lines += ['', form % ('backend', 'operation', 'size', 'time', 'algorithm GB/s', 'bus GB/s', 'of line rate',
                          'wrong')]
    rate = sum(rates.values()) if record['nodes'] > 1 else 0
    lines += [form % (
        row['kind'], row['operation'], show_size(row['size']), show_time(row['seconds']),
        '%.4g' % row['algorithm_bandwidth'], '%.4g' % row['bus_bandwidth'],
        '%.1f %%' % (100 * row['bus_bandwidth'] / rate) if rate else '-', row['wrong']) for row in record['results']]
    if record['complete']:
        lines += [''] + ['note: ' + line for line in record['notes']] + wrong_values(record)
    return lines


def file_to_write(path: str) -> str:
    """For argparse: a FILE to write to. Refuses an existing file without slingtorch's results, such as a program."""
    if os.path.isfile(path) and os.path.getsize(path):
        try:
            with open(path, errors='replace') as stream:
                start = stream.read(200)
        except OSError as err:
            raise argparse.ArgumentTypeError(str(err))
        if not re.match(r'\{[^{]*"slingtorch ', start):
            raise argparse.ArgumentTypeError("%s exists and has no results of slingtorch: choose another file, since "
                                             "this one is not overwritten" % path)
    return path


def write(record: dict, path: str) -> None:
    """Write a record as JSON, whole or not at all."""
    write_whole({path: json.dumps(record, indent=1) + '\n'})


def write_whole(texts: dict) -> None:
    """Write files, {path: text}, all of them whole or none; writes directly to a device such as /dev/stdout."""
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
                    os.fsync(stream.fileno())  # a network file system reports only now that it is full
        for part, path in parts.items():
            os.replace(part, path)
    finally:
        for part in filter(os.path.exists, parts):
            os.remove(part)
