#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Train with FSDP2: each rank has a part of every layer and of every batch, for networks that one GPU cannot hold.

    srun -N 2 --ntasks-per-node 4 conda-python-distributed fsdp2_training.py
    torchrun --nproc-per-node 4 fsdp2_training.py
"""
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import common


def main():
    args = common.parse_arguments()
    common.need_launcher()
    device = torch.device('cuda') if torch.cuda.is_available() else torch.device('cpu')
    if device.type == 'cuda':
        # a task that sees one GPU calls it 0, whatever its local rank is
        device = torch.device('cuda', int(os.environ['LOCAL_RANK']) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')
    rank, ranks = dist.get_rank(), dist.get_world_size()

    data = common.load_data(args.data)
    torch.manual_seed(args.seed)
    model = common.make_network(data).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    for part in (model[0], model[2], model[6], model):
        fully_shard(part, mesh=mesh)                # each layer by itself, so that no rank ever holds them all
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(1, args.epochs + 1):
        batches = common.Batches(len(data), args.batch_size, args.seed + epoch, rank, ranks)
        total = torch.zeros((), device=device)
        for step, (images, labels) in enumerate(DataLoader(data, batch_size=None, sampler=batches)):
            size = min(args.batch_size, len(data) - step * args.batch_size)
            loss = cross_entropy(model(images.to(device)), labels.to(device), reduction='sum')
            optimizer.zero_grad()
            (loss / size * ranks).backward()        # the ranks' gradients are averaged, and we want their sum
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        loss = total.item() / len(data)
        common.check_loss(loss, epoch, rank, dist.barrier)
        if rank == 0:
            print('epoch %d loss %.6f' % (epoch, loss), flush=True)

    # all ranks take part in putting the weights together
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        common.save(weights, args.output_dir)
        print('final loss %.6f' % loss)
    dist.destroy_process_group()
    common.leave()


if __name__ == '__main__':
    main()
