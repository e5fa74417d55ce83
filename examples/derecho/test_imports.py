#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Import what a training program imports, and check that PyTorch has what it was built for. Needs no GPU, starts no MPI:
it runs on a login node.

    python test_imports.py [--without-cuda]
"""
import argparse

import ranks
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # noqa: F401
from torch.nn.parallel import DistributedDataParallel  # noqa: F401
from torch.utils.data.distributed import DistributedSampler  # noqa: F401

parser = argparse.ArgumentParser(description="Check that PyTorch has what it was built for")
parser.add_argument('--without-cuda', action='store_true', help="do not look for CUDA, NCCL and torchvision")
options = parser.parse_args()

print('PyTorch', torch.__version__)
ranks.require(dist.is_available(), "PyTorch", "torch.distributed", "none")
ranks.require(dist.is_mpi_available(), "torch.distributed", "MPI", "none")
if not options.without_cuda:
    import torchvision
    print('torchvision', torchvision.__version__)
    ranks.require(torch.version.cuda, "PyTorch", "CUDA", "none")
    ranks.require(dist.is_nccl_available(), "torch.distributed", "NCCL", "none")
    print('CUDA', torch.version.cuda, 'NCCL', '.'.join(str(part) for part in torch.cuda.nccl.version()))
print('All is there')
