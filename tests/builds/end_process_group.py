#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Make and destroy the process group of the MPI backend again and again, each time right after an all_reduce.

    mpiexec -n 4 python end_process_group.py

Without the patch PyTorch-*_process-group-gil.patch, releases before 2.8.0 hang here within some hundred rounds.
"""
import argparse

import torch
import torch.distributed as dist


def main():
    """All rounds; a sum that is wrong ends the program."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument('--rounds', type=int, default=300, help='default: %(default)s')
    options = parser.parse_args()
    torch.set_num_threads(1)
    for _ in range(options.rounds):
        dist.init_process_group('mpi')
        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = torch.full((4,), rank + 1.0)
        dist.all_reduce(tensor)
        total = float(tensor[0])
        # the thread of the backend is now the last that holds it
        del tensor
        dist.destroy_process_group()
        if total != size * (size + 1) / 2:
            raise SystemExit('rank %d: the sum is %s' % (rank, total))
    if rank == 0:
        print('process group made and destroyed %d times on %d ranks' % (options.rounds, size))


if __name__ == '__main__':
    main()
