#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""
What bench itself costs: its measuring of plain MPI against a loop of mpi4py calls that does nothing else.
To be run with a PyTorch that has mpi4py; where it has the backend mpi too, that is compared with plain MPI and gloo:

    module load PyTorch/2.6.0-debian-mpich
    benchmarks/bench.py --json bench.json

Both work by turns in the same processes and on the same memory, in blocks of so many repetitions as take a tenth of a
second, a barrier before each. Time is that of the slowest rank, the median of a block; the ratio is the median over
the pairs of blocks. Two processes that are started one after the other differ by more than what is looked for, even on
a quiet machine: by the places of their memory. Processor time is that of rank 0, barriers included.
Goals: bench takes at most 1.02 of the loop; mpi has at least 0.8 of plain MPI's bandwidth from 1 MB, and more than
gloo's from 64 kB.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOAL_OVERHEAD = 1.02
GOAL_RATIO, GOAL_FROM, GOAL_GLOO_FROM = 0.8, 10 ** 6, 64 * 1000

LOOP = """
import json, statistics, sys, time, types
sys.path.insert(0, sys.argv[1])
from slingtorch.job import bench
import torch
from mpi4py import MPI

BLOCK, REPEATS = 0.1, 4000
comm, operation = MPI.COMM_WORLD, sys.argv[2]
rank, ranks = comm.Get_rank(), comm.Get_size()
torch.set_num_threads(1)


def loop(out, into, repeats):
    'Seconds of each repetition, each of its slowest rank.'
    times = []
    for _ in range(repeats):
        comm.Barrier()
        start = time.perf_counter()
        if operation == 'all_reduce':
            comm.Allreduce(MPI.IN_PLACE, out)
        else:
            comm.Sendrecv(out, (rank + 1) % ranks, 0, into, (rank - 1) % ranks, 0)
        times.append(time.perf_counter() - start)
    return [max(column) for column in zip(*comm.allgather(times))]


def timed(function, *words):
    'Median, and processor time of a repetition.'
    begin = time.process_time()
    median = statistics.median(function(*words))
    return median, (time.process_time() - begin) / words[-1]


options = types.SimpleNamespace(timeout=60)
measurement = bench.Measurement('plain-mpi', bench.Job(options), options)
for size in map(int, sys.argv[4:]):
    send, receive = measurement.buffers(operation, size)
    send.fill_(1), receive.fill_(1)
    function = measurement.choose_form(operation, send, receive)
    estimate = max(comm.allgather(statistics.median(loop(send.numpy(), receive.numpy(), 20))))
    repeats = max(5, min(REPEATS, int(BLOCK / estimate)))
    rows = []
    for number in range(max(5, int(float(sys.argv[3]) / 2 / (repeats * estimate)))):
        ways = [('bench', lambda: timed(measurement.seconds, function, repeats)),
                ('mpi4py', lambda: timed(loop, send.numpy(), receive.numpy(), repeats))]
        rows.append({name: way() for name, way in (ways if number % 2 else ways[::-1])})
    if rank == 0:
        print('RESULT', json.dumps({'operation': operation, 'bytes': size, 'repeats': repeats, 'blocks': rows}))
"""


def run(command, env=None):
    """Standard output of a command that must end well."""
    done = subprocess.run([str(word) for word in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)
    if done.returncode != 0:
        sys.exit('benchmarks/bench.py: %s failed with status %s:\n%s'
                 % (' '.join(map(str, command)), done.returncode, (done.stdout + done.stderr)[-2000:]))
    return done.stdout


def started(options, *command):
    """What ranks print that the runscript starts."""
    env = dict(os.environ, OMP_NUM_THREADS='1', GLOO_SOCKET_IFNAME=options.interface)
    start = [options.mpiexec, '-n', options.ranks, ROOT / 'runscripts/conda-python-distributed']
    return run([*start, *command], env=env)


def measured(options, directory, operation, backends):
    """{backend: {bytes: row}} of bench in a job."""
    path = os.path.join(directory, 'bench.json')
    started(options, '--bench', '--operations', operation, '--min', '32K', '--max', '%dM' % options.max_mib,
            '--factor', 4, '--seconds', options.seconds, '--backends', backends, '--json', path)
    with open(path) as stream:
        found = {}
        for row in json.load(stream)['results']:
            if row['wrong']:
                sys.exit('benchmarks/bench.py: %s: wrong values' % operation)
            found.setdefault(row['kind'], {})[row['bytes']] = row
        return found


def collect(options):
    """The record."""
    import mpi4py
    import torch
    sizes = [32 << 10]
    while sizes[-1] * 4 <= options.max_mib << 20:
        sizes.append(sizes[-1] * 4)
    rows, backends = [], {}
    with tempfile.TemporaryDirectory() as directory:
        loop = os.path.join(directory, 'loop.py')
        pathlib.Path(loop).write_text(LOOP)
        for operation in ('all_reduce', 'send_receive'):
            out = started(options, loop, ROOT, operation, options.seconds, *sizes)
            rows += [json.loads(line[7:]) for line in out.splitlines() if line.startswith('RESULT ')]
        if torch.distributed.is_mpi_available():
            backends = measured(options, directory, 'all_reduce', 'gloo,mpi,plain-mpi')
    version = run([sys.executable, '-c', 'from mpi4py import MPI; print(MPI.Get_library_version())'])
    return {
        'date': time.strftime('%Y-%m-%d %H:%M'), 'ranks': options.ranks, 'cpus': os.cpu_count(),
        'load': os.getloadavg()[0], 'torch': str(torch.__version__), 'mpi4py': mpi4py.__version__,
        'mpi': version.splitlines()[0], 'rows': rows, 'backends': backends,
    }


def ratio(row, place=0):
    """Median over the pairs of blocks of bench / mpi4py."""
    return statistics.median(pair['bench'][place] / pair['mpi4py'][place] for pair in row['blocks'])


def report(record):
    """Print the table; whether the goals are met."""
    print('%(mpi)s, PyTorch %(torch)s, mpi4py %(mpi4py)s, %(ranks)s ranks on %(cpus)s processors, load %(load).1f'
          % record)
    form = '%14s %10s %14s %12s %14s %16s'
    print(form % ('', 'bytes', 'pairs of', 'mpi4py, us', 'bench/mpi4py', 'processor time'))
    for row in record['rows']:
        print(form % (row['operation'], row['bytes'], '%d x %d' % (len(row['blocks']), row['repeats']),
                      '%.2f' % (1e6 * statistics.median(pair['mpi4py'][0] for pair in row['blocks'])),
                      '%.3f' % ratio(row), '%.3f' % ratio(row, 1)))
    found = statistics.median(map(ratio, record['rows']))
    print('bench/mpi4py, median of all sizes: %.3f; goal %.2f' % (found, GOAL_OVERHEAD))
    missed = [] if found <= GOAL_OVERHEAD else ['bench takes more than %.2f' % GOAL_OVERHEAD]
    for size, row in sorted(record['backends'].get('mpi', {}).items()):
        plain, gloo = (record['backends'][name][size]['seconds'] / row['seconds'] for name in ('plain-mpi', 'gloo'))
        print('    all_reduce %10d   backend mpi: %.2f of plain MPI, %.1f of gloo' % (size, plain, gloo))
        if size >= GOAL_FROM and plain < GOAL_RATIO:
            missed.append('%d bytes: mpi has %.2f of plain MPI' % (size, plain))
        if size >= GOAL_GLOO_FROM and gloo <= 1:
            missed.append('%d bytes: gloo is faster' % size)
    print('Goals: %s' % ('MISSED: ' + '; '.join(missed) if missed else 'met'))
    return not missed


def main():
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--ranks', type=int, default=2)
    parser.add_argument('--seconds', type=float, default=8, help='for each operation and size (default: 8)')
    parser.add_argument('--max-mib', type=int, default=32, help='largest size (default: 32)')
    parser.add_argument('--mpiexec', default='mpiexec')
    parser.add_argument('--interface', default='lo', help='network interface for gloo (default: lo)')
    parser.add_argument('--json', metavar='FILE')
    options = parser.parse_args()
    record = collect(options)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + '\n')
    sys.exit(0 if report(record) else 1)


if __name__ == '__main__':
    main()
