#!/usr/bin/env python
"""
Import what a training program imports, and check that PyTorch has what it was built for. Needs no GPU, starts no MPI:
it runs on a login node.

    python test_imports.py [--without-cuda]
"""
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

assert ShardedGradScaler and DistributedDataParallel and DistributedSampler
print('PyTorch', torch.__version__)
assert dist.is_available(), "torch.distributed was not built"
assert dist.is_mpi_available(), "torch.distributed has no MPI"
if '--without-cuda' not in sys.argv[1:]:
    import torchvision
    print('torchvision', torchvision.__version__)
    assert torch.version.cuda, "PyTorch was built without CUDA"
    assert dist.is_nccl_available(), "torch.distributed has no NCCL"
    print('CUDA', torch.version.cuda, 'NCCL', '.'.join(str(part) for part in torch.cuda.nccl.version()))
print('All is there')
