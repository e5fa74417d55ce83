#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Train with FSDP2: each rank has a part of every layer and of every batch, for networks that one GPU cannot hold.

    srun -N 2 --ntasks-per-node 4 conda-python-distributed fsdp2_training.py
    torchrun --nproc-per-node 4 fsdp2_training.py
"""
import os

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import common


def main():
    args = common.parse_arguments()
    device = common.own_device(common.local_rank())
    mesh = init_device_mesh(device.type, (int(os.environ['WORLD_SIZE']),))      # and init_process_group
    data = common.load_data(args.data)
    model = common.make_network(data, args.seed).to(device)
    for part in (model[0], model[2], model[6], model):
        fully_shard(part, mesh=mesh)                # each layer by itself, so that no rank ever holds them all
    optimizer = common.make_optimizer(model, args.lr)
    common.train(args, data, model, optimizer, dist.get_rank(), dist.get_world_size(), dist.all_reduce, dist.barrier)
    # all ranks take part in putting the weights together
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        common.save(weights, args.output_dir)
    dist.destroy_process_group()
    common.leave()


if __name__ == '__main__':
    main()
