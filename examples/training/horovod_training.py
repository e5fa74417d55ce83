#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Train with Horovod: each rank has the whole network and a part of every batch.

    srun -N 2 --ntasks-per-node 4 conda-python-distributed horovod_training.py
    horovodrun -np 4 python horovod_training.py
"""
import os
import socket
import sys

import horovod
import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import common


def check_ranks():
    """Stop unless all tasks of the launcher found each other, with the same Horovod and PyTorch."""
    expected = int(os.environ.get('WORLD_SIZE', hvd.size()))
    if hvd.size() != expected:
        sys.exit("Horovod sees %d rank(s), and the launcher started %d: its MPI and the launcher do not know each "
                 "other. With Slurm name the interface that this MPI has ('srun --mpi=list' shows them), such as "
                 "srun --mpi=pmi2; else use the mpiexec of the MPI that Horovod was built with"
                 % (hvd.size(), expected))
    own = '%s %s with PyTorch %s' % (os.path.dirname(horovod.__file__), horovod.__version__, torch.__version__)
    found = hvd.allgather_object((own, socket.gethostname()))
    if len({installation for installation, _ in found}) > 1:
        sys.exit("the ranks have different installations: %s. Load the same module on all nodes"
                 % '; '.join(sorted({'%s on %s' % pair for pair in found})))


def main():
    args = common.parse_arguments()
    hvd.init()
    check_ranks()
    device = torch.device('cuda') if torch.cuda.is_available() else torch.device('cpu')
    if device.type == 'cuda':
        # a task that sees one GPU calls it 0, whatever its local rank is
        device = torch.device('cuda', hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rank, ranks = hvd.rank(), hvd.size()

    data = common.load_data(args.data)
    torch.manual_seed(args.seed)
    model = common.make_network(data).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

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
        total = hvd.allreduce(total, op=hvd.Sum)
        loss = total.item() / len(data)
        common.check_loss(loss, epoch, rank, hvd.barrier)
        if rank == 0:
            print('epoch %d loss %.6f' % (epoch, loss), flush=True)

    if rank == 0:
        common.save(model.state_dict(), args.output_dir)
        print('final loss %.6f' % loss)
    hvd.shutdown()


if __name__ == '__main__':
    main()
