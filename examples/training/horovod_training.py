#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Train with Horovod: each rank has the whole network and a part of every batch.

    srun -N 2 --ntasks-per-node 4 conda-python-distributed horovod_training.py
    horovodrun -np 4 python horovod_training.py
"""
import functools
import os
import socket
import sys

import horovod
import horovod.torch as hvd
import torch

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
    device = common.own_device(hvd.local_rank())
    data = common.load_data(args.data)
    model = common.make_network(data, args.seed).to(device)
    optimizer = hvd.DistributedOptimizer(common.make_optimizer(model, args.lr),
                                         named_parameters=model.named_parameters(), op=hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sum_over_ranks = functools.partial(hvd.allreduce_, op=hvd.Sum)
    common.train(args, data, model, optimizer, hvd.rank(), hvd.size(), sum_over_ranks, hvd.barrier)
    if hvd.rank() == 0:
        common.save(model.state_dict(), args.output_dir)
    hvd.shutdown()


if __name__ == '__main__':
    main()
