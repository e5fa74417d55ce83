#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""
What bench itself costs: its figures of plain MPI against two programs that do nothing else, in turn, in the same run.
To be run with a PyTorch that has mpi4py; where it has the backend mpi too, that is compared with plain MPI and gloo:

    module load PyTorch/2.6.0-debian-mpich
    benchmarks/bench.py --json bench.json

Baselines: a loop of mpi4py calls, and a C program compiled with mpicc; the same ranks, sizes and numbers of
repetitions, a barrier before each. Time is that of the slowest rank, the median of a round; then the median of
all rounds' ratios. On a machine with other work the median says little, and the fastest repetition of each side counts:
that one was not disturbed. Processor time is that of rank 0, barriers included.
Goals: bench takes at most 1.02 of the mpi4py loop; mpi has at least 0.8 of plain MPI's bandwidth from 1 MB, and more
than gloo's from 64 kB.
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

C_PROGRAM = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
static double processor(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + 1e-6 * (u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}
static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
int main(int argc, char **argv)      /* OPERATION, then SIZE REPEATS in turn */
{
    int rank, ranks, reduce = !strcmp(argv[1], "all_reduce");
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int arg = 2; arg + 1 < argc; arg += 2) {
        int count = atoi(argv[arg]) / 4, repeats = atoi(argv[arg + 1]);
        float *out, *in;
        double *times = malloc(repeats * sizeof(double)), begin = 0;
        if (posix_memalign((void **)&out, 64, 4 * count) || posix_memalign((void **)&in, 64, 4 * count))
            return 1;
        for (int i = 0; i < count; i++)
            out[i] = in[i] = 1;
        for (int i = -3 - repeats / 5; i < repeats; i++) {
            if (i == 0)
                begin = processor();
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            if (reduce)
                MPI_Allreduce(MPI_IN_PLACE, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            else
                MPI_Sendrecv(out, count, MPI_FLOAT, (rank + 1) % ranks, 0, in, count, MPI_FLOAT,
                             (rank + ranks - 1) % ranks, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            if (i >= 0)
                times[i] = MPI_Wtime() - start;
        }
        begin = processor() - begin;
        MPI_Allreduce(MPI_IN_PLACE, times, repeats, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        qsort(times, repeats, sizeof(double), by_value);
        if (rank == 0)
            printf("RESULT %d %.9f %.9f %.9f\n", 4 * count, times[repeats / 2], begin / repeats, times[0]);
        free(out); free(in); free(times);
    }
    MPI_Finalize();
    return 0;
}
"""

LOOP = """
import statistics, sys, time
import torch
from mpi4py import MPI
comm, operation = MPI.COMM_WORLD, sys.argv[1]
rank, ranks = comm.Get_rank(), comm.Get_size()
torch.set_num_threads(1)
for size, repeats in zip(map(int, sys.argv[2::2]), map(int, sys.argv[3::2])):
    out, into = (torch.ones(size // 4, dtype=torch.float32).numpy() for _ in range(2))
    times = []
    for number in range(-3 - repeats // 5, repeats):
        if number == 0:
            begin = time.process_time()
        comm.Barrier()
        start = time.perf_counter()
        if operation == 'all_reduce':
            comm.Allreduce(MPI.IN_PLACE, out)
        else:
            comm.Sendrecv(out, (rank + 1) % ranks, 0, into, (rank - 1) % ranks, 0)
        end = time.perf_counter()
        if number >= 0:
            times.append(end - start)
    processor = time.process_time() - begin
    slowest = [max(column) for column in zip(*comm.allgather(times))]
    if rank == 0:
        found = statistics.median(slowest), processor / repeats, min(slowest)
        print('RESULT', size, *('%.9f' % one for one in found))
"""


def run(command, env=None):
    """Standard output of a command that must end well."""
    done = subprocess.run([str(word) for word in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)
    if done.returncode != 0:
        sys.exit('benchmarks/bench.py: %s failed with status %s:\n%s'
                 % (' '.join(map(str, command)), done.returncode, (done.stdout + done.stderr)[-2000:]))
    return done.stdout


def baseline(command):
    """{bytes: (seconds, processor seconds, fastest)} of a program that prints RESULT lines."""
    return {int(words[1]): tuple(map(float, words[2:]))
            for words in (line.split() for line in run(command).splitlines()) if words[:1] == ['RESULT']}


def measured(options, directory, operation, backends):
    """{backend: {bytes: row}} of bench in a job."""
    path = os.path.join(directory, 'bench.json')
    env = dict(os.environ, OMP_NUM_THREADS='1', GLOO_SOCKET_IFNAME=options.interface)
    run([options.mpiexec, '-n', options.ranks, ROOT / 'runscripts/conda-python-distributed', '--bench', '--operations',
         operation, '--min', '32K', '--max', options.max_bytes, '--factor', 4, '--seconds', options.seconds,
         '--backends', backends, '--json', path], env=env)
    with open(path) as stream:
        found = {}
        for row in json.load(stream)['results']:
            if row['wrong']:
                sys.exit('benchmarks/bench.py: %s: wrong values' % operation)
            found.setdefault(row['kind'], {})[row['bytes']] = row
        return found


def collect(options):
    """All rounds; the record."""
    import mpi4py
    import torch
    backends = 'plain-mpi'
    if torch.distributed.is_mpi_available():
        backends = 'gloo,mpi,' + backends
    rows = {}
    with tempfile.TemporaryDirectory() as directory:
        source, loop, program = (os.path.join(directory, name) for name in ('c.c', 'loop.py', 'c'))
        pathlib.Path(source).write_text(C_PROGRAM)
        pathlib.Path(loop).write_text(LOOP)
        run([options.mpicc, '-O2', '-o', program, source])
        for number in range(options.rounds):
            for operation in ('all_reduce', 'send_receive'):
                found = measured(options, directory, operation, backends)
                sizes = [word for size, row in found['plain-mpi'].items() for word in (size, row['repeats'])]
                start = [options.mpiexec, '-n', options.ranks]
                pair = [('mpi4py', [sys.executable, loop]), ('C', [program])]
                others = {name: baseline([*start, *command, operation, *sizes])
                          for name, command in (pair if number % 2 else pair[::-1])}
                for size, row in found['plain-mpi'].items():
                    entry = rows.setdefault((operation, size), [])
                    entry.append({
                        'bench': (row['seconds'], row['processor_seconds'], row['fastest']),
                        **{name: other[size] for name, other in others.items()},
                        **{name: (found[name][size]['seconds'],) for name in ('mpi', 'gloo') if name in found}})
    version = run([sys.executable, '-c', 'from mpi4py import MPI; print(MPI.Get_library_version())'])
    return {
        'date': time.strftime('%Y-%m-%d %H:%M'), 'ranks': options.ranks, 'rounds': options.rounds,
        'cpus': os.cpu_count(), 'load': os.getloadavg()[0], 'torch': str(torch.__version__),
        'mpi4py': mpi4py.__version__, 'mpi': version.splitlines()[0],
        'rows': [{'operation': operation, 'bytes': size, 'rounds': entry}
                 for (operation, size), entry in rows.items()],
    }


def ratio(row, one, other, place=0):
    """Median over the rounds of time / time."""
    return statistics.median(entry[one][place] / entry[other][place] for entry in row['rounds'])


def fastest(row):
    """bench / mpi4py of the fastest repetitions of all rounds."""
    return min(entry['bench'][2] for entry in row['rounds']) / min(entry['mpi4py'][2] for entry in row['rounds'])


def report(record):
    """Print the table; whether the goals are met."""
    print('%(mpi)s, PyTorch %(torch)s, mpi4py %(mpi4py)s, %(ranks)s ranks on %(cpus)s processors, load %(load).1f, '
          '%(rounds)s rounds' % record)
    form = '%14s %10s %12s %14s %14s %14s %12s %16s'
    print(form % ('', 'bytes', 'mpi4py, us', 'bench adds, us', 'bench/mpi4py', 'bench/C', 'fastest', 'processor time'))
    for row in record['rows']:
        print(form % (row['operation'], row['bytes'],
                      '%.2f' % (1e6 * statistics.median(entry['mpi4py'][0] for entry in row['rounds'])),
                      '%.2f' % (1e6 * statistics.median(entry['bench'][0] - entry['mpi4py'][0]
                                                        for entry in row['rounds'])),
                      *('%.3f' % ratio(row, 'bench', other) for other in ('mpi4py', 'C')),
                      '%.3f' % fastest(row), '%.3f' % ratio(row, 'bench', 'mpi4py', 1)))
    quiet = record['load'] < 0.75 * record['cpus'] + record['ranks']
    found = statistics.median(ratio(row, 'bench', 'mpi4py') if quiet else fastest(row) for row in record['rows'])
    print('bench/mpi4py, median of all sizes: %.3f of %s; goal %.2f'
          % (found, 'the median times' if quiet else 'the fastest times (there was other work)', GOAL_OVERHEAD))
    missed = [] if found <= GOAL_OVERHEAD else ['bench takes more than %.2f' % GOAL_OVERHEAD]
    rows = [row for row in record['rows'] if 'mpi' in row['rounds'][0] and row['operation'] == 'all_reduce']
    for row in rows:
        plain, gloo = ratio(row, 'bench', 'mpi'), ratio(row, 'gloo', 'mpi')
        print('%14s %10d   backend mpi: %.2f of plain MPI, %.1f of gloo'
              % (row['operation'], row['bytes'], plain, gloo))
        if row['bytes'] >= GOAL_FROM and plain < GOAL_RATIO:
            missed.append('%d bytes: mpi has %.2f of plain MPI' % (row['bytes'], plain))
        if row['bytes'] >= GOAL_GLOO_FROM and gloo <= 1:
            missed.append('%d bytes: gloo is faster' % row['bytes'])
    print('Goals: %s' % ('MISSED: ' + '; '.join(missed) if missed else 'met'))
    return not missed


def main():
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--ranks', type=int, default=2)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--seconds', type=float, default=3,
                        help='how long each size is repeated; beside other work a second or two say nothing')
    parser.add_argument('--max-bytes', default='32M')
    parser.add_argument('--mpiexec', default='mpiexec')
    parser.add_argument('--mpicc', default='mpicc', help='of the same MPI')
    parser.add_argument('--interface', default='lo', help='network interface for gloo (default: lo)')
    parser.add_argument('--json', metavar='FILE')
    options = parser.parse_args()
    record = collect(options)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + '\n')
    sys.exit(0 if report(record) else 1)


if __name__ == '__main__':
    main()
