#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Check that a GPU tensor is refused with an error, not a crash, if MPI was not told to expect GPU buffers.

    mpiexec -n 8 -ppn 4 env MPICH_GPU_SUPPORT_ENABLED=0 python test_refusal.py
"""
import os

import ranks
import torch
import torch.distributed as dist


def main():
    """Try it on every rank."""
    options = ranks.parser(__doc__.strip().splitlines()[0]).parse_args()
    enabled = os.environ.get('MPICH_GPU_SUPPORT_ENABLED')
    ranks.require(enabled != '1', "the environment", "MPICH_GPU_SUPPORT_ENABLED=0", enabled)
    rank, size, device = ranks.start(options)
    ranks.require(device.type == 'cuda', "the device", "a GPU", device.type)
    try:
        dist.all_reduce(torch.ones(8, device=device))
    except RuntimeError as err:
        ranks.require('CUDA-aware' in str(err), "the error for a GPU tensor", "one about CUDA-aware MPI", err)
    else:
        ranks.require(False, "a GPU tensor where MPICH_GPU_SUPPORT_ENABLED is not 1", "an error", "no error")

    # tensors in main memory still work
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    ranks.require_values("all_reduce in main memory", tensor, size)
    if rank == 0:
        print('GPU tensors are refused with an error, others work: %s ranks' % size)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
