#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Train a small network on scikit-learn's handwritten digits (1,797 images of 8x8 pixels) with DistributedDataParallel.

Start it through a runscript, which sets what torch.distributed needs:

    srun -N 2 --ntasks-per-node 2 conda-python-distributed train_digits.py
    mpiexec -n 4 conda-python-distributed train_digits.py

The global batch is the same for any number of ranks and is split evenly over them, so the losses are those of one
rank up to rounding: that is how to see that gradients really travel.
"""
import argparse
import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TEST_IMAGES = 360        # one fifth
GLOBAL_BATCH = 48        # divides evenly over 1, 2, 3, 4, 6, 8, 12, 16, 24 and 48 ranks
PIXEL_MAX = 16.0


def parse_arguments():
    """Command line: epochs, learning rate, seed, backend, file for the results."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with DistributedDataParallel")
    parser.add_argument('--epochs', type=int, default=20, help="passes over the training images (default: 20)")
    parser.add_argument('--lr', type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument('--seed', type=int, default=1, help="for weights and order of images (default: 1)")
    parser.add_argument('--backend', choices=['gloo', 'mpi', 'nccl', 'slingmpi'],
                        help="of torch.distributed (default: nccl with GPUs, else gloo)")
    parser.add_argument('--json', metavar='FILE', help="write accuracy, losses and ranks to FILE")
    return parser.parse_args()


def load_data(seed, rank, device):
    """
    Load the images on rank 0, which sends them to all: a shared file system is asked once, also for scikit-learn.

    :return: training images, training labels, test images, test labels; images as rows of 64 values from 0 to 1
    """
    data = [None]
    if rank == 0:
        try:
            from sklearn.datasets import load_digits
            data = [load_digits(return_X_y=True)]
        except ImportError as err:
            # said before the others end: a launcher may kill this rank then
            print("train_digits.py: %s. The images come with scikit-learn, and %s has none: install it on top of the "
                  "module (docs/extending.md), or train examples/training/ddp_training.py, which draws its images"
                  % (err, sys.prefix), file=sys.stderr, flush=True)
    dist.broadcast_object_list(data, device=device)
    if data[0] is None:
        dist.destroy_process_group()
        os._exit(1)
    images, labels = data[0]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(images, dtype=torch.float32)[order] / PIXEL_MAX
    labels = torch.tensor(labels)[order]
    return images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES]


def train(model, images, labels, args, rank, world_size, device):
    """
    Train; each rank works on its part of every global batch.

    :return: list with the mean loss of each epoch over all ranks
    """
    part = GLOBAL_BATCH // world_size
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for epoch in range(args.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed + epoch))
        total = torch.zeros(1, device=device)
        steps = len(order) // GLOBAL_BATCH
        for step in range(steps):
            start = step * GLOBAL_BATCH + rank * part
            mine = order[start:start + part]
            loss = criterion(model(images[mine].to(device)), labels[mine].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / (steps * world_size))
        if rank == 0:
            print("epoch %2d of %d: loss %.4f" % (epoch + 1, args.epochs, losses[-1]), flush=True)
    return losses


def main():
    """Train, measure accuracy on rank 0, show who took part."""
    args = parse_arguments()
    started = time.time()
    use_gpu = torch.cuda.is_available()
    local_rank = int(os.environ.get('LOCAL_RANK', 0))
    # a task that sees one GPU calls it 0, whatever its local rank is
    device = torch.device('cuda', local_rank % torch.cuda.device_count()) if use_gpu else torch.device('cpu')
    if use_gpu:
        # collectives of objects use the current device: without this all ranks of a node would use GPU 0
        torch.cuda.set_device(device)
    backend = args.backend or ('nccl' if use_gpu else 'gloo')
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if GLOBAL_BATCH % world_size:
        dist.destroy_process_group()
        raise SystemExit("train_digits.py: %d ranks do not divide the global batch of %d images: "
                         "use 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48 ranks" % (world_size, GLOBAL_BATCH))

    images, labels, test_images, test_labels = load_data(args.seed, rank, device)
    torch.manual_seed(args.seed)
    network = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10)).to(device)
    model = DistributedDataParallel(network, device_ids=[device] if use_gpu else None)
    losses = train(model, images, labels, args, rank, world_size, device)

    with torch.no_grad():
        right = (network(test_images.to(device)).argmax(1) == test_labels.to(device)).float().mean().item()

    node = os.environ.get('SLURMD_NODENAME', socket.gethostname())
    hosts = [None] * world_size
    dist.all_gather_object(hosts, {'rank': rank, 'local_rank': local_rank, 'host': socket.gethostname(), 'node': node,
                                   'device': str(device), 'pid': os.getpid()})
    dist.destroy_process_group()

    if rank == 0:
        print("\nrank  local rank  node              device  process")
        for entry in hosts:
            print("%(rank)4d  %(local_rank)10d  %(node)-16s  %(device)-6s  %(pid)7d" % entry)
        print("\naccuracy %.4f on %d test images, %d ranks, %.1f s"
              % (right, len(test_labels), world_size, time.time() - started))
        if args.json:
            with open(args.json, 'w') as handle:
                json.dump({'accuracy': right, 'losses': losses, 'world_size': world_size, 'hosts': hosts,
                           'seconds': time.time() - started, 'torch': torch.__version__, 'backend': backend}, handle,
                          indent=1)

    # leave while the model lives, without the destructors of torch's C++ objects: docs/from-one-gpu-to-many.md, The end
    # of a program
    sys.stdout.flush()
    os._exit(0)


if __name__ == '__main__':
    main()
