#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""Learn to read the handwritten digits of scikit-learn with Ray's TorchTrainer: examples/slurm/ray.job starts it."""
import os
import socket

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def learn():
    """Runs in each worker, after Ray has set its rank, its GPU and the process group."""
    torch.manual_seed(1)
    rank, size = train.get_context().get_world_rank(), train.get_context().get_world_size()
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    loader = DataLoader(TensorDataset((images / 16).float(), labels), max(1, 48 // size), shuffle=True, drop_last=True)
    loader = prepare_data_loader(loader)
    model = prepare_model(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(20):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("rank %d of %d on %s: loss %.4f, compiled kernels in %s" % (
        rank, size, socket.gethostname(), loss.item(), os.environ.get('TRITON_CACHE_DIR')), flush=True)


if __name__ == '__main__':
    ray.init()      # connects to RAY_ADDRESS
    nodes = int(os.environ['SLURM_JOB_NUM_NODES'])
    gpus = torch.cuda.device_count() * nodes
    wanted = train.ScalingConfig(num_workers=gpus or nodes, use_gpu=gpus > 0, placement_strategy='SPREAD')
    TorchTrainer(learn, scaling_config=wanted).fit()
