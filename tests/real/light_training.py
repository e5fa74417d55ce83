# SPDX-License-Identifier: GPL-2.0-only
"""
A training whose losses are those of one rank, on any number of ranks that divides 12: light_training.py RESULTS

Real ranks, gloo and gradients that travel, without DistributedDataParallel and torch.optim, which import TorchDynamo:
half of the processor time of a start. The trainings that users copy have both, and their own tests.
"""
import json
import os
import sys

import torch
import torch.distributed as dist

EPOCHS = 2
BATCH = 12

dist.init_process_group('gloo')
rank, world_size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(1)
points = torch.randn(10 * BATCH, 5, generator=generator)
values = points @ torch.randn(5, generator=generator)
weights = torch.zeros(5, requires_grad=True)
losses = []
for epoch in range(EPOCHS):
    total = torch.zeros(1)
    for start in range(0, len(points), BATCH):
        mine = slice(start + rank * BATCH // world_size, start + (rank + 1) * BATCH // world_size)
        loss = ((points[mine] @ weights - values[mine]) ** 2).sum() / BATCH
        gradient, = torch.autograd.grad(loss, weights)
        dist.all_reduce(gradient)
        weights.data -= 0.05 * gradient
        total += loss.detach()
    dist.all_reduce(total)
    losses.append(total.item())

hosts = [None] * world_size
dist.all_gather_object(hosts, {'rank': rank, 'local_rank': int(os.environ['LOCAL_RANK']), 'pid': os.getpid(),
                               'node': os.environ.get('SLURMD_NODENAME')})
dist.destroy_process_group()
if rank == 0:
    with open(sys.argv[1], 'w') as stream:
        json.dump({'losses': losses, 'world_size': world_size, 'hosts': hosts}, stream)
# as ddp_training.py ends, for the reason given there
sys.stdout.flush()
os._exit(0)
