#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""Compares slingmpi's all_reduce with plain MPI, gloo and PyTorch's own MPI backend, alternating in one run.

    MPICXX=mpicxx mpiexec -n 2 python benchmarks/mpi_backend.py --json slingmpi.json

Times are in us per in-place all_reduce of 32-bit floats, on the slowest rank, at the 10th percentile of the rounds,
because other processes on the machine disturb the slower ones. Columns:

    plain MPI      MPI_Allreduce in a C++ loop, on the same memory
    MPI_I          MPI_Iallreduce and MPI_Test in a C++ loop, as slingmpi must use them: ranks may mix async_op=True and
                   False in one operation, and MPI does not match the blocking call with the non-blocking one
    slingmpi C++   the process group in a C++ loop: the cost for C++ libraries such as DistributedDataParallel
    none C++       the same with PyTorch's backend "fake", which does nothing: the cost of PyTorch itself
    slingmpi       torch.distributed.all_reduce
    none           the same with the backend "fake": the cost of Python and PyTorch
    gloo, mpi      torch.distributed.all_reduce; mpi only if this PyTorch has it; --module registers another backend

The last columns are plain MPI's time divided by slingmpi's, and the best possible ratio (MPI_I plus "none").

Start it with the mpiexec of the MPI that slingmpi was built with. MPICXX is that MPI's compiler; it needs ninja.
"""
import argparse
import importlib
import json
import os
import pathlib
import sys
import time

import slingmpi
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg     # noqa: F401  registers "fake"
from torch.utils import cpp_extension

SIZES = [4 ** power for power in range(5, 13)]      # 1 KiB to 16 MiB
SECONDS = 0.003     # for one column in one round: short, so that some rounds are not interrupted


def columns(names):
    """{column of the table: function (tensor, repetitions) that returns the seconds of one repetition}."""
    os.environ['CXX'] = os.environ.get('MPICXX', 'mpicxx')
    version = [int(part) for part in torch.__version__.split('.')[:2]]

    def load():
        # the first rank compiles it for all
        return cpp_extension.load('mpi_backend_benchmark', [str(pathlib.Path(__file__).with_suffix('.cpp'))],
                                  extra_cflags=['-O2', f'-DBENCHMARK_TORCH={version[0] * 100 + version[1]}'])
    loop = load() if dist.get_rank() == 0 else None
    dist.barrier()
    loop = loop or load()

    def by_python(group):
        def run(tensor, repeat):
            start = time.perf_counter()
            for _ in range(repeat):
                dist.all_reduce(tensor, group=group)
            return (time.perf_counter() - start) / repeat
        return run

    def by_cpp(group):
        return lambda tensor, repeat: loop.group(group, tensor, repeat)
    none = dist.new_group(backend='fake')
    found = {'plain MPI': loop.plain, 'MPI_I': loop.started, 'slingmpi C++': by_cpp(dist.group.WORLD),
             'none C++': by_cpp(none), 'slingmpi': by_python(dist.group.WORLD), 'none': by_python(none)}
    found.update((name, by_python(dist.new_group(backend=name))) for name in names)
    return found


def slowest(seconds):
    tensor = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def sizes_in_turn(functions, rounds):
    """[{'bytes': size, name: us, ...}]."""
    rows = []
    for size in SIZES:
        times = {name: [] for name in functions}
        tensor = torch.ones(size // 4)
        for name, function in functions.items():
            tensor.fill_(1)
            function(tensor, 1)
            if not name.startswith('none') and not (tensor == dist.get_world_size()).all():
                sys.exit(f'{name}: wrong values for {size} bytes')
        tensor.zero_()
        repeats = {}
        for name, function in functions.items():
            dist.barrier()
            guess, = slowest([function(tensor, 3)])
            repeats[name] = max(1, min(1000, int(SECONDS / guess)))
        for turn in range(rounds):
            names = list(functions)
            for name in names[turn % len(names):] + names[:turn % len(names)]:
                dist.barrier()
                times[name].append(functions[name](tensor, repeats[name]))
        row = {'bytes': size}
        for name in functions:
            row[name] = sorted(slowest(times[name]))[rounds // 10] * 1e6
        rows.append(row)
        if dist.get_rank() == 0:
            plain, best = row['plain MPI'], row['MPI_I']
            print(f'{size:>10}' + ''.join(f'{row[name]:>13.1f}' for name in functions) + ''.join(
                f'{plain / row[name]:>13.2f} of {plain / (best + row[none]):.2f}'
                for name, none in (('slingmpi C++', 'none C++'), ('slingmpi', 'none'))), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--json', metavar='FILE')
    parser.add_argument('--rounds', type=int, default=100, help="number of rounds (default: 100)")
    parser.add_argument('--backends', default='gloo', help="other backends, separated by commas (default: gloo); mpi "
                        "is added if PyTorch has it")
    parser.add_argument('--module', help="module that registers a backend when it is imported")
    args = parser.parse_args()
    rank, ranks = slingmpi._load().start()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR=os.environ.get('MASTER_ADDR', '127.0.0.1'),
                      MASTER_PORT=os.environ.get('MASTER_PORT', '29577'))
    dist.init_process_group('slingmpi')
    if args.module:
        importlib.import_module(args.module)
    names = [name for name in args.backends.split(',') if name] + ['mpi'] * dist.is_mpi_available()
    result = {'mpi': slingmpi.built()['mpi'], 'torch': torch.__version__, 'ranks': ranks, 'load': os.getloadavg()[0]}
    functions = columns(names)
    result['columns'] = list(functions)
    if rank == 0:
        print(f'{"bytes":>10}' + ''.join(f'{name:>13}' for name in functions) + '   plain / C++ and possible'
              '   plain / slingmpi', flush=True)
    result['rows'] = sizes_in_turn(functions, args.rounds)
    if rank == 0:
        print(f'{result["mpi"]}, PyTorch {torch.__version__}, {ranks} ranks, load {result["load"]:.1f}')
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + '\n')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
