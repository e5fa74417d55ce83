#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""Learn to read the handwritten digits of scikit-learn on many devices, and resume after a signal or a crash.

    until-done --checkpoint digits srun conda-python-distributed resume_training.py --checkpoints digits
"""
import argparse
import glob
import json
import os
import shutil
import signal
import socket

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

BATCH, TEST = 48, 360       # images per step; images for testing only
EVERY = 5                   # steps between checks whether any rank has received the signal
SAVED = 85                  # exit status: saved, but not finished


def state(model, optimizer, place):
    """What a checkpoint holds; `place`: epoch, its finished steps and the sum of their losses, losses of epochs."""
    weights, moments = get_state_dict(model, optimizer)
    return {'model': weights, 'optimizer': moments, 'place': json.dumps(place)}


def save(args, model, optimizer, place):
    """Each rank writes and syncs its part; then rank 0 renames the checkpoint and keeps only the newest two."""
    name = os.path.join(args.checkpoints, 'epoch-%04d-step-%06d' % tuple(place[:2]))
    if dist.get_rank() == 0:
        shutil.rmtree(name + '.part', ignore_errors=True)   # left by a killed run
    dist.barrier()
    checkpoint.save(state(model, optimizer, place), checkpoint_id=name + '.part')
    if dist.get_rank() == 0:
        os.rename(name + '.part', name)
        for old in sorted(glob.glob(args.checkpoints + '/epoch-*[0-9]'))[:-2]:
            shutil.rmtree(old)
    dist.barrier()      # if one rank exits, all are ended: wait until the checkpoint is in place


def resume(args, model, optimizer):
    """Load the newest checkpoint that rank 0 sees, written by any number of ranks; returns the place."""
    newest = [max(glob.glob(args.checkpoints + '/epoch-*[0-9]'), default=None)]
    dist.broadcast_object_list(newest)
    if newest[0] is None:
        return [1, 0, 0, []]
    found = state(model, optimizer, None)
    checkpoint.load(found, checkpoint_id=newest[0])
    set_state_dict(model, optimizer, model_state_dict=found['model'], optim_state_dict=found['optimizer'])
    if dist.get_rank() == 0:
        print("from", newest[0], flush=True)
    return json.loads(found['place'])


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
    parser.add_argument('--checkpoints', metavar='DIR', required=True, help="where it saves, and goes on from")
    parser.add_argument('--fsdp2', action='store_true', help="FSDP2 instead of DistributedDataParallel")
    parser.add_argument('--json', metavar='FILE', help="a file for accuracy, losses and devices")
    parser.add_argument('--backend', help="of torch.distributed (default: nccl on GPUs, else gloo)")
    args = parser.parse_args()
    stop = []
    signal.signal(signal.SIGUSR1, lambda *_: stop.append(True))
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    if device.type == 'cuda':       # a rank that sees only one GPU calls it 0, whatever its local rank is
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']) % torch.cuda.device_count())
    dist.init_process_group(args.backend or ('nccl' if device.type == 'cuda' else 'gloo'))

    torch.manual_seed(1)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data = TensorDataset((images / 16).float(), labels)
    train, test = random_split(data, [len(data) - TEST, TEST])
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, max(1, BATCH // dist.get_world_size()), sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10)).to(device)
    if args.fsdp2:
        from torch.distributed.fsdp import fully_shard      # PyTorch 2.6 or newer
        for part in (model[0], model[2], model[4], model):
            fully_shard(part)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    first, done, before, losses = resume(args, model, optimizer)
    for epoch in range(first, args.epochs + 1):
        sampler.set_epoch(epoch)        # a different order in each epoch, the same after a restart
        total = torch.zeros((), device=device, dtype=torch.float64)
        if dist.get_rank() == 0:
            total += before * dist.get_world_size()
        for step, (images, labels) in enumerate(loader, 1):
            if step <= done:
                continue
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step % EVERY == 0 and step < len(loader):
                signalled = torch.tensor(len(stop), device=device)
                dist.all_reduce(signalled)
                if signalled:
                    dist.all_reduce(total)
                    save(args, model, optimizer, [epoch, step, total.item() / dist.get_world_size(), losses])
                    dist.destroy_process_group()
                    os._exit(SAVED)
        dist.all_reduce(total)
        losses.append(total.item() / len(loader) / dist.get_world_size())
        if dist.get_rank() == 0:
            print("epoch %2d of %d: loss %.4f" % (epoch, args.epochs, losses[-1]), flush=True)
        done = before = 0
        save(args, model, optimizer, [epoch + 1, 0, 0, losses])
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
