#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""
Bandwidth of all_reduce by message size: PyTorch's backends mpi and gloo, and MPI_Allreduce itself (mpi4py), with the
same ranks and sizes, in turn, in the same run. To be run with a PyTorch that has the backend mpi, and mpi4py:

    module load PyTorch/2.6.0-debian-mpich
    benchmarks/backends.py --ranks 2 --json backends.json
    benchmarks/backends.py --read backends.json --plot backends.png         where there is matplotlib

Time is that of the slowest rank, the median of all repetitions of all rounds. Bandwidth is size / time.
Goals: mpi at least 0.8 of plain MPI from 1 MB, and faster than gloo from 64 kB.
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

KINDS = ['plain MPI', 'mpi', 'gloo']
SIZES = [4 ** exponent for exponent in range(5, 14)]
"""Message sizes in bytes: 1 kiB to 64 MiB."""
GOAL_RATIO, GOAL_FROM = 0.8, 10 ** 6
GOAL_GLOO_FROM = 64 * 1000
WARM_UP = 3
SECONDS_PER_SIZE = 1.5
"""How long one size is repeated, at least MIN_REPEATS and at most MAX_REPEATS times."""
MIN_REPEATS, MAX_REPEATS = 5, 200


class PlainMPI:
    """
    MPI_Allreduce as mpi4py calls it, on memory that PyTorch allocated.

    NumPy asks the kernel for huge pages from 4 MiB up and PyTorch does not: with memory of each its own, that would be
    compared.
    """

    def __init__(self):
        import torch
        from mpi4py import MPI
        self.torch, self.mpi = torch, MPI
        torch.set_num_threads(1)
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()

    def tensor(self, count, value):
        return self.torch.full((count,), value, dtype=self.torch.float32)

    def all_reduce(self, tensor):
        self.comm.Allreduce(self.mpi.IN_PLACE, tensor.numpy())

    def barrier(self):
        self.comm.Barrier()

    def slowest(self, value):
        return self.comm.allreduce(value, op=self.mpi.MAX)

    def close(self):
        pass


class Backend:
    """A backend of torch.distributed."""

    def __init__(self, name):
        import torch
        import torch.distributed as dist
        self.torch, self.dist = torch, dist
        torch.set_num_threads(1)
        options = {}
        if name == 'gloo':
            options = {'rank': int(os.environ['PMI_RANK']), 'world_size': int(os.environ['PMI_SIZE'])}
        dist.init_process_group(name, **options)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def tensor(self, count, value):
        return self.torch.full((count,), value, dtype=self.torch.float32)

    def all_reduce(self, tensor):
        self.dist.all_reduce(tensor)

    def barrier(self):
        self.dist.barrier()

    def slowest(self, value):
        tensor = self.torch.tensor([value], dtype=self.torch.float64)
        self.dist.all_reduce(tensor, op=self.dist.ReduceOp.MAX)
        return float(tensor[0])

    def close(self):
        self.dist.destroy_process_group()


def measure(kind, sizes):
    """One rank: print {bytes: [seconds]} as JSON on rank 0."""
    comm = PlainMPI() if kind == 'plain MPI' else Backend(kind)
    expected = comm.size * (comm.size + 1) / 2
    result = {}
    for size in sizes:
        count = size // 4
        times = []
        repeats = MAX_REPEATS
        while len(times) < WARM_UP + repeats:
            tensor = comm.tensor(count, comm.rank + 1)
            comm.barrier()
            start = time.perf_counter()
            comm.all_reduce(tensor)
            seconds = comm.slowest(time.perf_counter() - start)
            if float(tensor[0]) != expected or float(tensor[-1]) != expected:
                raise SystemExit('%s: wrong sum of %d bytes' % (kind, size))
            times.append(seconds)
            if len(times) == WARM_UP:
                # the same number on every rank: each has the time of the slowest one
                repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(SECONDS_PER_SIZE / max(seconds, 1e-6))))
        result[size] = times[WARM_UP:]
    if comm.rank == 0:
        print('RESULT ' + json.dumps(result), flush=True)
    comm.close()


def run(kind, options):
    """Start the ranks of one kind; {bytes: [seconds]}."""
    env = dict(os.environ, MASTER_ADDR='127.0.0.1', MASTER_PORT=str(options.port), OMP_NUM_THREADS='1',
               GLOO_SOCKET_IFNAME=options.interface)
    command = [options.mpiexec, '-n', str(options.ranks), sys.executable, os.path.abspath(__file__), '--worker', kind,
               '--max-bytes', str(options.max_bytes)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('RESULT ')]
    if done.returncode != 0 or len(lines) != 1:
        sys.exit('backends.py: %s failed with status %s:\n%s'
                 % (' '.join(command), done.returncode, done.stderr[-2000:]))
    return {int(size): times for size, times in json.loads(lines[0][7:]).items()}


def collect(options):
    """All rounds; the record."""
    times = {kind: {} for kind in KINDS}
    for _ in range(options.rounds):
        for kind in KINDS:
            for size, seconds in run(kind, options).items():
                times[kind].setdefault(size, []).extend(seconds)
    import mpi4py
    import torch
    mpi = subprocess.run([sys.executable, '-c', 'from mpi4py import MPI; print(MPI.Get_library_version())'],
                         stdout=subprocess.PIPE, text=True).stdout
    return {
        'date': time.strftime('%Y-%m-%d'), 'ranks': options.ranks, 'rounds': options.rounds, 'cpus': os.cpu_count(),
        'load': os.getloadavg()[0], 'machine': platform.machine(), 'torch': str(torch.__version__),
        'mpi4py': mpi4py.__version__, 'mpi': mpi.splitlines()[0] if mpi else 'unknown',
        'seconds': {kind: {str(size): statistics.median(values) for size, values in found.items()}
                    for kind, found in times.items()},
        'repeats': {str(size): len(values) for size, values in times['mpi'].items()},
    }


def report(record):
    """Print the table; whether the goals are met."""
    print('%s, PyTorch %s, mpi4py %s, %s ranks on %s processors, load %.1f, %s rounds' % (
        record['mpi'], record['torch'], record['mpi4py'], record['ranks'], record['cpus'], record['load'],
        record['rounds']))
    print('%10s %10s %10s %10s %14s %10s' % ('bytes', 'plain MB/s', 'mpi MB/s', 'gloo MB/s', 'mpi/plain', 'mpi/gloo'))
    failed = []
    for text in sorted(record['seconds']['mpi'], key=int):
        size = int(text)
        plain, mpi, gloo = (size / record['seconds'][kind][text] / 1e6 for kind in KINDS)
        print('%10d %10.1f %10.1f %10.1f %14.2f %10.2f' % (size, plain, mpi, gloo, mpi / plain, mpi / gloo))
        if size >= GOAL_FROM and mpi / plain < GOAL_RATIO:
            failed.append('%d bytes: %.2f of plain MPI' % (size, mpi / plain))
        if size >= GOAL_GLOO_FROM and mpi <= gloo:
            failed.append('%d bytes: gloo is faster' % size)
    print('Goals (%.1f of plain MPI from 1 MB, faster than gloo from 64 kB): %s'
          % (GOAL_RATIO, 'met' if not failed else 'MISSED: ' + '; '.join(failed)))
    return not failed


def plot(record, path):
    """Draw bandwidth by size."""
    try:
        import matplotlib
    except ImportError:
        sys.exit('backends.py: there is no matplotlib for --plot. Remedy: pip install matplotlib')
    matplotlib.use('Agg')
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for kind, marker in zip(KINDS, 'sox'):
        points = sorted((int(size), int(size) / seconds / 1e6) for size, seconds in record['seconds'][kind].items())
        axes.plot(*zip(*points), marker=marker, label={'mpi': 'torch, mpi', 'gloo': 'torch, gloo'}.get(kind, kind))
    axes.set_xscale('log', base=2)
    axes.set_yscale('log')
    axes.set_xlabel('bytes')
    axes.set_ylabel('bandwidth of all_reduce, MB/s')
    axes.set_title('%s ranks on %s processors, %s' % (record['ranks'], record['cpus'], record['date']))
    axes.grid(True, which='both', alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    """Measure or read, print a table, write JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--ranks', type=int, default=2)
    parser.add_argument('--rounds', type=int, default=3, help='how often all three are measured in turn')
    parser.add_argument('--max-bytes', type=int, default=SIZES[-1])
    parser.add_argument('--mpiexec', default='mpiexec')
    parser.add_argument('--interface', default='lo', help="network interface for gloo (default: lo)")
    parser.add_argument('--port', type=int, default=29511, help='for the rendezvous of gloo')
    parser.add_argument('--json', metavar='FILE')
    parser.add_argument('--read', type=pathlib.Path, metavar='FILE', help='an earlier result, instead of measuring')
    parser.add_argument('--plot', metavar='FILE', help='PNG')
    parser.add_argument('--worker', choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(options.worker, [size for size in SIZES if size <= options.max_bytes])
        return
    record = json.loads(options.read.read_text()) if options.read else collect(options)
    met = report(record)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record, indent=2) + '\n')
    if options.plot:
        plot(record, options.plot)
    sys.exit(0 if met else 1)


if __name__ == '__main__':
    main()
