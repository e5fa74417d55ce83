#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Train with DistributedDataParallel: each rank has the whole network and a part of every batch.

    srun -N 2 --ntasks-per-node 4 conda-python-distributed ddp_training.py
    torchrun --nproc-per-node 4 ddp_training.py
"""
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
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
    model = DistributedDataParallel(common.make_network(data).to(device))
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

    if rank == 0:
        common.save(model.module.state_dict(), args.output_dir)
        print('final loss %.6f' % loss)
    dist.destroy_process_group()
    common.leave()


if __name__ == '__main__':
    main()
