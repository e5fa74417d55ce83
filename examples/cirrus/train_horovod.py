#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Train the network of examples/digits with Horovod in place of DistributedDataParallel.

Start it through a runscript, on a module that has Horovod:

    srun --ntasks=8 --ntasks-per-node=4 $RUNSCRIPTS/conda-python-distributed train_horovod.py

As there, the global batch is the same for any number of ranks, and so are the losses.
"""
import json
import os
import socket
import sys
import time

import horovod
import horovod.torch as hvd
import torch
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), os.pardir, 'digits'))
from train_digits import GLOBAL_BATCH, load_data, parse_arguments  # noqa: E402


def check_ranks():
    """Stop unless all tasks of the launcher found each other, with the same Horovod and PyTorch."""
    expected = int(os.environ.get('WORLD_SIZE', hvd.size()))
    if hvd.size() != expected:
        raise SystemExit("train_horovod.py: Horovod sees %d rank(s), and the launcher started %d: its MPI and the "
                         "launcher do not know each other. With Slurm name the interface that this MPI has "
                         "('srun --mpi=list' shows them), such as srun --mpi=pmi2; else use the mpiexec of the MPI "
                         "that Horovod was built with" % (hvd.size(), expected))
    own = (horovod.__version__, torch.__version__, os.path.dirname(horovod.__file__))
    found = hvd.allgather_object((own, socket.gethostname()))
    others = sorted({'%s %s with PyTorch %s on %s' % (place, version, pytorch, host)
                     for (version, pytorch, place), host in found})
    if len({version for version, _ in found}) > 1:
        raise SystemExit("train_horovod.py: the ranks have different installations: %s. Load the same module on all "
                         "nodes" % '; '.join(others))


def train(model, images, labels, args, device):
    """
    Train; each rank works on its part of every global batch.

    :return: list with the mean loss of each epoch over all ranks
    """
    part = GLOBAL_BATCH // hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for epoch in range(args.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed + epoch))
        total = torch.zeros(1, device=device)
        steps = len(order) // GLOBAL_BATCH
        for step in range(steps):
            start = step * GLOBAL_BATCH + hvd.rank() * part
            mine = order[start:start + part]
            optimizer.zero_grad()
            loss = criterion(model(images[mine].to(device)), labels[mine].to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        losses.append(hvd.allreduce(total, op=hvd.Sum).item() / (steps * hvd.size()))
        if hvd.rank() == 0:
            print("epoch %2d of %d: loss %.4f" % (epoch + 1, args.epochs, losses[-1]), flush=True)
    return losses


def main():
    """Train, and measure accuracy on rank 0."""
    args = parse_arguments()
    started = time.time()
    hvd.init()
    check_ranks()
    if GLOBAL_BATCH % hvd.size():
        raise SystemExit("train_horovod.py: %d ranks do not divide the global batch of %d images: "
                         "use 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48 ranks" % (hvd.size(), GLOBAL_BATCH))
    use_gpu = torch.cuda.is_available()
    device = torch.device('cuda', hvd.local_rank() % torch.cuda.device_count()) if use_gpu else torch.device('cpu')

    images, labels, test_images, test_labels = load_data(args.seed)
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10)).to(device)
    training = time.time()
    losses = train(model, images, labels, args, device)
    training = time.time() - training
    with torch.no_grad():
        right = (model(test_images.to(device)).argmax(1) == test_labels.to(device)).float().mean().item()
    hosts = hvd.allgather_object({'rank': hvd.rank(), 'local_rank': hvd.local_rank(), 'pid': os.getpid(),
                                  'node': os.environ.get('SLURMD_NODENAME', socket.gethostname())})
    if hvd.rank() == 0:
        print("\naccuracy %.4f on %d test images, %d ranks, %.1f s"
              % (right, len(test_labels), hvd.size(), time.time() - started))
        if args.json:
            with open(args.json, 'w') as handle:
                json.dump({'accuracy': right, 'losses': losses, 'world_size': hvd.size(), 'hosts': hosts,
                           'seconds': training, 'torch': torch.__version__}, handle, indent=1)
    hvd.shutdown()


if __name__ == '__main__':
    main()
