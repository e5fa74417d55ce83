#!/usr/bin/env python
"""
Check that a GPU tensor is refused with an error, not a crash, where MPI was not told to expect GPU buffers.

    mpiexec -n 8 -ppn 4 env MPICH_GPU_SUPPORT_ENABLED=0 python test_refusal.py
"""
import os

import ranks
import torch
import torch.distributed as dist


def main():
    """Try it on every rank."""
    assert os.environ.get('MPICH_GPU_SUPPORT_ENABLED') != '1', "start it with MPICH_GPU_SUPPORT_ENABLED=0"
    rank, size, device = ranks.start(ranks.parser(__doc__.strip()).parse_args())
    assert device.type == 'cuda', "this check needs GPUs"
    try:
        dist.all_reduce(torch.ones(8, device=device))
    except RuntimeError as err:
        assert 'CUDA-aware' in str(err), err
    else:
        raise AssertionError("a GPU tensor was taken although MPICH_GPU_SUPPORT_ENABLED is not 1")

    # tensors in main memory go on working
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 8, tensor
    if rank == 0:
        print('GPU tensors are refused with an error, others work: %s ranks' % size)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
