# SPDX-License-Identifier: GPL-2.0-only
"""One way to go wrong, on ranks of slingmpi: python faults.py NAME. What is printed is what a user would see."""

import datetime
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from collectives import ranks_from_launcher


def start(seconds=60):
    ranks_from_launcher()
    dist.init_process_group('slingmpi', timeout=datetime.timedelta(seconds=seconds))
    return dist.get_rank()


def late():
    """Rank 1 never comes."""
    if start(3) == 1:
        time.sleep(30)
    dist.all_reduce(torch.ones(3))


def dies():
    if start() == 1:
        raise ValueError('this rank has had enough')
    dist.all_reduce(torch.ones(3))


def killed():
    if start() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(3))


def shapes():
    os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'
    dist.all_reduce(torch.ones(3 + start()))


def operations():
    os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'
    if start():
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(3))


def too_short():
    if start():
        dist.recv(torch.ones(5), 0)
    else:
        dist.send(torch.ones(3), 1)
        dist.barrier()


def sizes():
    """RANK and WORLD_SIZE of another launcher."""
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group('slingmpi', init_method=f'file://{directory}/store', rank=0, world_size=1)


def forked():
    start()
    if not os.fork():
        dist.all_reduce(torch.ones(3))
    sys.exit(os.wait()[1] >> 8)


def reduction():
    start()
    dist.all_reduce(torch.ones(3, dtype=torch.float8_e4m3fn))


def destroyed():
    start()
    group = dist.new_group()
    backend = group._get_backend(torch.device('cpu'))
    dist.destroy_process_group(group)
    backend.allreduce([torch.ones(3)])


def aborted():
    rank = start()
    backend = dist.group.WORLD._get_backend(torch.device('cpu'))
    work = dist.irecv(torch.ones(3), 1 - rank)
    backend.abort()
    work.wait()


def named_mpi():
    """Fine: the name "mpi", rank and size from MPI."""
    dist.init_process_group('mpi')
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == dist.get_world_size() == 2
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        dist.all_reduce(tensor, group=group)
    dist.destroy_process_group()
    print('as mpi')


def uncaught_before():
    """Fine: an exception that the program has dealt with ends nobody."""
    start()
    try:
        raise KeyError('dealt with')
    except KeyError:
        pass
    dist.barrier()
    print('fine')


def training():
    """Fine: DistributedDataParallel, FSDP2 and gloo beside."""
    rank = start()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    gradients = {}
    for name in ('ddp', 'fsdp2'):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.constant_(parameter, 0.01 * (number + 1))
        if name == 'ddp':
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
        else:
            wrapped = fully_shard(model, mesh=init_device_mesh('cpu', (dist.get_world_size(),)))
        wrapped(torch.arange(8.).reshape(1, 8) + rank).sum().backward()
        gradients[name] = [getattr(parameter.grad, 'full_tensor', lambda p=parameter: p.grad)()
                           for parameter in model.parameters()]
    for left, right in zip(gradients['ddp'], gradients['fsdp2']):
        torch.testing.assert_close(left, right)
    gloo = dist.new_group(backend='gloo')
    tensor = gradients['ddp'][0].clone()
    dist.all_reduce(tensor, group=gloo)
    torch.testing.assert_close(tensor / dist.get_world_size(), gradients['ddp'][0])
    dist.destroy_process_group()
    print('trained')


if __name__ == '__main__':
    globals()[sys.argv[1]]()
