#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Check the results of collective and point-to-point operations.

    mpiexec -n 8 -ppn 4 --cpu-bind numa python test_backend.py --backend mpi
    mpiexec -n 8 -ppn 4 --cpu-bind numa conda-python-distributed test_backend.py --backend nccl
"""
import ranks
import torch
import torch.distributed as dist

SIZE = 1000


def main():
    """Run every operation on every rank."""
    rank, size, device = ranks.start(ranks.parser(__doc__.strip().splitlines()[0]).parse_args())

    def filled(value, dtype=torch.float32):
        """A matrix on this rank's device, complete before MPI reads it."""
        tensor = torch.full((SIZE, SIZE), value, dtype=dtype, device=device)
        ranks.wait_for(device)
        return tensor

    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        tensor = filled(rank + 1, dtype)
        dist.all_reduce(tensor)
        ranks.require_values('all_reduce of %s' % dtype, tensor, size * (size + 1) // 2)
    for operation, expected in ((dist.ReduceOp.MAX, size - 1), (dist.ReduceOp.MIN, 0)):
        tensor = filled(rank)
        dist.all_reduce(tensor, op=operation)
        ranks.require_values('all_reduce %s' % operation, tensor, expected)

    for root in range(size):
        tensor = filled(root + 7 if rank == root else -1)
        dist.broadcast(tensor, src=root)
        ranks.require_values('broadcast from %s' % root, tensor, root + 7)

    parts = [filled(-1) for _ in range(size)]
    dist.all_gather(parts, filled(rank))
    for other, part in enumerate(parts):
        ranks.require_values('all_gather, part %s' % other, part, other)

    if size > 1:
        # around the ring: even ranks send first
        received = filled(-1)
        right, left = (rank + 1) % size, (rank - 1) % size
        if rank % 2 == 0:
            dist.send(filled(rank), right)
            dist.recv(received, left)
        else:
            dist.recv(received, left)
            dist.send(filled(rank), right)
        ranks.require_values('send and receive', received, left)

    dist.barrier()
    if rank == 0:
        print('All values are right: backend %s, %s ranks, %s' % (dist.get_backend(), size, device.type))
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
