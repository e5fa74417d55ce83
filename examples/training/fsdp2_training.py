#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""Learn to read the handwritten digits of scikit-learn on many devices, with FSDP2: each holds a part of every layer.

    srun -N 2 --ntasks-per-node=4 --gpus-per-node=4 conda-python-distributed fsdp2_training.py
"""
import argparse
import json
import os
import socket

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
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
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    if device.type == 'cuda':       # a rank that sees only one GPU calls it 0, whatever its local rank is
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']) % torch.cuda.device_count())
    dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')

    torch.manual_seed(1)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data = TensorDataset((images / 16).float(), labels)
    train, test = random_split(data, [len(data) - TEST, TEST])
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, max(1, BATCH // dist.get_world_size()), sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10)).to(device)
    for part in (model[0], model[2], model[4], model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
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
        dist.all_reduce(total)
        losses.append(total.item() / len(loader) / dist.get_world_size())
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            report(args, epoch, losses[-1], weights)
    with torch.no_grad():
        images, labels = data[test.indices]
        accuracy = (model(images.to(device)).argmax(1) == labels.to(device)).float().mean().item()
    hosts = [{}] * dist.get_world_size()
    dist.all_gather_object(hosts, {'node': socket.gethostname(), 'device': str(next(model.parameters()).device)})
    if dist.get_rank() == 0:
        finish(args, hosts, accuracy=accuracy, losses=losses, backend=dist.get_backend())
    dist.destroy_process_group()
    os._exit(0)     # PyTorch's destructors may abort or hang with gloo: pytorch/pytorch#179291, #190489


if __name__ == '__main__':
    main()
