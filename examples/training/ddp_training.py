#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Train with DistributedDataParallel: each rank has the whole network and a part of every batch.

    srun -N 2 --ntasks-per-node 4 conda-python-distributed ddp_training.py
    torchrun --nproc-per-node 4 ddp_training.py
"""
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import common


def main():
    args = common.parse_arguments()
    device = common.own_device(common.local_rank())
    dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')
    data = common.load_data(args.data)
    model = DistributedDataParallel(common.make_network(data, args.seed).to(device))
    optimizer = common.make_optimizer(model, args.lr)
    common.train(args, data, model, optimizer, dist.get_rank(), dist.get_world_size(), dist.all_reduce, dist.barrier)
    if dist.get_rank() == 0:
        common.save(model.module.state_dict(), args.output_dir)
    dist.destroy_process_group()
    common.leave()


if __name__ == '__main__':
    main()
