#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""Learn to read the handwritten digits of scikit-learn on many devices, with Horovod.

    srun --mpi=pmi2 -N 2 --ntasks-per-node=4 --gpus-per-node=4 conda-python-distributed horovod_training.py
"""
import argparse
import json
import os
import socket

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

BATCH, TEST = 48, 360       # images per step; images for testing only


def report(args, epoch, loss, weights):
    """Print the loss, and save under another name before renaming: after a kill, model.pt is still complete."""
    print("epoch %2d of %d: loss %.4f" % (epoch, args.epochs, loss), flush=True)
    if args.output_dir:
        path = os.path.join(args.output_dir, 'model.pt')
        os.makedirs(args.output_dir, exist_ok=True)
        with open(path + '.part', 'wb') as stream:
            torch.save(weights, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(path + '.part', path)


def finish(args, hosts, **found):
    print("\nrank  node              device")
    for rank, host in enumerate(hosts):
        print("%4d  %-16s  %s" % (rank, host['node'], host['device']))
    print("\naccuracy %.4f on %d test images, %d ranks" % (found['accuracy'], TEST, len(hosts)), flush=True)
    if args.json:
        with open(args.json, 'w') as stream:
            json.dump({'world_size': len(hosts), 'hosts': hosts, **found}, stream)


def main():
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits")
    parser.add_argument('--epochs', type=int, default=20, help="passes over the images (default: 20)")
    parser.add_argument('--lr', type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument('--output-dir', metavar='DIR', help="a new directory for model.pt (default: nothing is saved)")
    parser.add_argument('--json', metavar='FILE', help="a new file for accuracy, losses and devices")
    args = parser.parse_args()
    for path in (args.output_dir, args.json):
        if path and os.path.exists(path):
            parser.error("%s already exists and is not overwritten: name another one" % path)
    hvd.init()
    if hvd.size() != int(os.environ.get('WORLD_SIZE', hvd.size())):
        raise SystemExit("Horovod sees %d rank(s), and the launcher started %s: Horovod's MPI and the launcher do not "
                         "know each other. srun --mpi=pmi2 is for MPICH, --mpi=pmix for Open MPI; or take the mpiexec "
                         "of that MPI" % (hvd.size(), os.environ['WORLD_SIZE']))
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    if device.type == 'cuda':       # a rank that sees only one GPU calls it 0, whatever its local rank is
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    torch.manual_seed(1)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data = TensorDataset((images / 16).float(), labels)
    train, test = random_split(data, [len(data) - TEST, TEST])
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), drop_last=True)
    loader = DataLoader(train, max(1, BATCH // hvd.size()), sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)        # a different order in each epoch
        total = torch.zeros((), device=device)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        losses.append(hvd.allreduce(total).item() / len(loader))
        if hvd.rank() == 0:
            report(args, epoch, losses[-1], model.state_dict())
    with torch.no_grad():
        images, labels = data[test.indices]
        accuracy = (model(images.to(device)).argmax(1) == labels.to(device)).float().mean().item()
    hosts = hvd.allgather_object({'node': socket.gethostname(), 'device': str(model[0].weight.device)})
    if hvd.rank() == 0:
        finish(args, hosts, accuracy=accuracy, losses=losses)
    hvd.shutdown()


if __name__ == '__main__':
    main()
