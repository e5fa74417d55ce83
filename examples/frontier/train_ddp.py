#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Fit a small network with DistributedDataParallel, write snapshots, and continue from the last one after a kill.

    srun ... conda-python-distributed train_ddp.py --epochs 2000 --save-every 10

The runscript says which rank this is and where rank 0 is. BACKEND=gloo trains on processors.
The data are made, not read: each rank makes all of them from the seed and trains on its share.
"""
import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 2048
FEATURES = 20


def parse_arguments():
    """Command line: epochs, how often to save, name of the snapshot, samples per rank and step."""
    parser = argparse.ArgumentParser(description="Train with DistributedDataParallel, with snapshots")
    parser.add_argument('--epochs', type=int, default=2000, help="passes over the data in all (default: 2000)")
    parser.add_argument('--save-every', type=int, default=10, help="epochs between snapshots (default: 10)")
    parser.add_argument('--snapshot', metavar='FILE', default='snapshot.pt',
                        help="on a file system that all nodes share; loaded if it exists (default: snapshot.pt)")
    parser.add_argument('--batch-size', type=int, default=32, help="samples per rank and step (default: 32)")
    args = parser.parse_args()
    if args.epochs < 1 or args.save_every < 1 or args.batch_size < 1:
        parser.error("--epochs, --save-every and --batch-size must be at least 1")
    return args


def give_up(message):
    """Print one message and end all ranks."""
    if dist.get_rank() == 0:
        print("train_ddp.py: " + message, file=sys.stderr, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    leave(1)


def leave(status=0):
    """End without running torch's destructors: docs/training.md, The end of a program."""
    sys.stdout.flush()
    os._exit(status)


def choose_device():
    """The GPU of this rank; a task that sees one GPU calls it 0, whatever its local rank is."""
    backend = os.environ.get('BACKEND') or 'nccl'
    if backend == 'gloo':
        return backend, torch.device('cpu')
    if not torch.cuda.is_available():
        sys.exit("train_ddp.py: PyTorch sees no GPU here. In a job: srun --gpus-per-task=1. To train on CPUs: "
                 "export BACKEND=gloo")
    device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return backend, device


def make_data():
    """Samples and their targets, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    samples = torch.randn(SAMPLES, FEATURES, generator=generator)
    weights = torch.randn(FEATURES, 1, generator=generator)
    noise = 0.1 * torch.randn(SAMPLES, 1, generator=generator)
    return samples, torch.tanh(samples @ weights) + noise


def load_snapshot(path, settings, network, optimizer):
    """
    Continue from a snapshot.

    :param settings: must equal the snapshot's, because another number of ranks or samples changes the results
    :return: number of finished epochs; 0 without a snapshot
    """
    # only rank 0 reads it, so that all ranks get the same
    box = [None]
    if dist.get_rank() == 0 and os.path.exists(path):
        try:
            # weights_only: a snapshot must not run code
            box[0] = torch.load(path, map_location='cpu', weights_only=True)
            box[0]['settings'], box[0]['epochs']  # pylint: disable=pointless-statement
        except Exception as err:  # pylint: disable=broad-except
            box[0] = str(err).splitlines()[0]
    dist.broadcast_object_list(box)
    snapshot = box[0]
    if snapshot is None:
        return 0
    if isinstance(snapshot, str):
        give_up("%s cannot be read as a snapshot (%s). Name another file with --snapshot, or remove it to start afresh."
                % (path, snapshot))
    found = snapshot['settings']
    if found['ranks'] != settings['ranks']:
        give_up("the snapshot %s was saved with %d ranks, but this job has %d, which would change the "
                "results. Start %d ranks (srun -n %d), or name another file with --snapshot to start afresh."
                % (path, found['ranks'], settings['ranks'], found['ranks'], found['ranks']))
    if found != settings:
        give_up("the snapshot %s was saved with --batch-size %s, not %s. Use that size, or name another file with "
                "--snapshot to start afresh." % (path, found['batch_size'], settings['batch_size']))
    network.load_state_dict(snapshot['network'])
    optimizer.load_state_dict(snapshot['optimizer'])
    return snapshot['epochs']


def save_snapshot(path, settings, network, optimizer, epochs):
    """Write a snapshot under another name, then rename it: if the job is killed, one of the two is complete."""
    part = path + '.part'
    with open(part, 'wb') as stream:
        torch.save({'settings': settings, 'network': network.state_dict(), 'optimizer': optimizer.state_dict(),
                    'epochs': epochs}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, path)


def train(args, network, optimizer, start, settings, device):
    """Train from this epoch to the last."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network, device_ids=[device] if device.type == 'cuda' else None)
    samples, targets = (data.to(device) for data in make_data())
    criterion = nn.MSELoss()
    steps = SAMPLES // (args.batch_size * ranks)
    for epoch in range(start, args.epochs):
        # depends only on the number of the epoch, so that a continued run has the same order
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(1, device=device)
        for step in range(steps):
            first = (step * ranks + rank) * args.batch_size
            mine = order[first:first + args.batch_size]
            loss = criterion(model(samples[mine]), targets[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs):
            save_snapshot(args.snapshot, settings, network, optimizer, epoch + 1)
            print("epoch %d of %d: loss %.8f, snapshot written"
                  % (epoch + 1, args.epochs, total.item() / steps / ranks), flush=True)


def main():
    """Set up, continue from a snapshot if there is one, and train."""
    args = parse_arguments()
    backend, device = choose_device()
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if SAMPLES < args.batch_size * ranks:
        give_up("%d ranks with %d samples each are more than the %d that there are: use a smaller --batch-size."
                % (ranks, args.batch_size, SAMPLES))

    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    settings = {'ranks': ranks, 'batch_size': args.batch_size}
    start = load_snapshot(args.snapshot, settings, network, optimizer)
    if rank == 0:
        print("%d ranks on %s, torch %s: %s" % (ranks, device.type, torch.__version__, "from epoch %d of %s" % (
            start, args.snapshot) if start else "from the beginning"), flush=True)
    train(args, network, optimizer, start, settings, device)
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == '__main__':
    main()
