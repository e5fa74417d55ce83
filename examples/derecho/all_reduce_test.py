#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Time and bandwidth of all_reduce and broadcast by message size, as a table and as JSON. Every result is checked.

    mpiexec -n 8 -ppn 4 --cpu-bind numa python all_reduce_test.py --backend mpi --json mpi.json

Time is that of the slowest rank, the median of several operations. Bandwidth is size / time; bus bandwidth is that of
all_reduce times 2 (n - 1) / n, which does not depend on the number of ranks if the network is the limit.
"""
import json
import os
import time

import ranks
import torch
import torch.distributed as dist

WARM_UP = 2


def parse_arguments():
    """Command line: those of ranks.parser, sizes, repetitions, file for the results."""
    parser = ranks.parser(__doc__.strip().splitlines()[0])
    parser.add_argument('--min-bytes', type=int, default=1024, help="smallest message, a multiple of 4, which is "
                        "one float (default: 1024)")
    parser.add_argument('--max-bytes', type=int, default=64 * 1024 * 1024, help="largest message (default: 64 MiB)")
    parser.add_argument('--factor', type=int, default=4, help="from one size to the next, 2 or more (default: 4)")
    parser.add_argument('--repeat', type=int, default=20, help="timed operations of each size (default: 20)")
    parser.add_argument('--json', metavar='FILE', help="a new file for the results")
    options = parser.parse_args()
    if options.min_bytes < 4 or options.min_bytes % 4:
        parser.error("--min-bytes %s: must be a multiple of 4 and more than 0" % options.min_bytes)
    if options.max_bytes < options.min_bytes:
        parser.error("--max-bytes %s is less than --min-bytes %s: there is nothing to measure"
                     % (options.max_bytes, options.min_bytes))
    if options.factor < 2:
        parser.error("--factor %s: must be 2 or more, so that sizes grow" % options.factor)
    if options.repeat < 1:
        parser.error("--repeat %s: must be 1 or more" % options.repeat)
    if options.json and os.path.exists(options.json):
        parser.error("--json: %s already exists and is not overwritten: name another file" % options.json)
    return options


def measure(operation, count, device, repeat):
    """
    Time one operation.

    :param operation: 'all_reduce' or 'broadcast'
    :param count: number of 32-bit floats
    :return: median time in seconds, of the slowest rank
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    times = []
    for index in range(WARM_UP + repeat):
        tensor = torch.full((count,), float(rank + 1), device=device)
        ranks.wait_for(device)
        dist.barrier()
        start = time.perf_counter()
        if operation == 'all_reduce':
            dist.all_reduce(tensor)
        else:
            dist.broadcast(tensor, src=0)
        ranks.wait_for(device)
        if index >= WARM_UP:
            times.append(time.perf_counter() - start)
        expected = size * (size + 1) / 2 if operation == 'all_reduce' else 1.0
        ranks.require_values(operation, tensor, expected)
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    ranks.wait_for(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return sorted(slowest.tolist())[len(times) // 2]


def main():
    """Measure every size and print the table on rank 0."""
    options = parse_arguments()
    rank, size, device = ranks.start(options)
    result = {'backend': options.backend, 'ranks': size, 'device': device.type, 'torch': str(torch.__version__),
              'repeat': options.repeat, 'operations': []}
    if rank == 0:
        print('PyTorch %s, backend %s, %s ranks, %s' % (torch.__version__, options.backend, size, device.type))
        print('%-10s %12s %12s %12s %12s' % ('operation', 'bytes', 'time us', 'GB/s', 'bus GB/s'))
    for operation in ('all_reduce', 'broadcast'):
        bytes_ = options.min_bytes
        while bytes_ <= options.max_bytes:
            seconds = measure(operation, bytes_ // 4, device, options.repeat)
            bandwidth = bytes_ / seconds / 1e9
            bus = bandwidth * (2.0 * (size - 1) / size if operation == 'all_reduce' else 1.0)
            result['operations'].append({'operation': operation, 'bytes': bytes_, 'seconds': seconds,
                                         'bandwidth_gb_per_s': bandwidth, 'bus_bandwidth_gb_per_s': bus})
            if rank == 0:
                print('%-10s %12d %12.1f %12.3f %12.3f' % (operation, bytes_, seconds * 1e6, bandwidth, bus),
                      flush=True)
            bytes_ *= options.factor
    if rank == 0 and options.json:
        with open(options.json, 'w') as handle:
            json.dump(result, handle, indent=1)
            handle.write('\n')
    # without it, PyTorch before 2.8.0 may hang here with the backend mpi (pytorch/pytorch issue 76760), unless it has
    # the patch process-group-gil of this bundle
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
