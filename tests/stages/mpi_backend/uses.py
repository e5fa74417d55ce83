# SPDX-License-Identifier: GPL-2.0-only
"""Run on every rank: all of collectives.py, and what programs do with torch.distributed, over slingmpi. Prints what was
right.

    mpiexec -n 2 python uses.py [case ...]
"""
import os
import random
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from collectives import CASES, case, start


def model():
    """The same on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))


def batch(rank):
    return torch.arange(8.).reshape(1, 8) + rank


def gradients_of_all(ranks):
    """The mean of the gradients, by one process alone."""
    alone = model()
    (sum(alone(batch(rank)).sum() for rank in ranks) / len(ranks)).backward()
    return [parameter.grad for parameter in alone.parameters()]


@case
def data_parallel():
    from torch.distributed.fsdp import fully_shard
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = gradients_of_all(range(world))
    for wrap in (torch.nn.parallel.DistributedDataParallel,
                 lambda given: fully_shard(given, mesh=init_device_mesh('cpu', (world,)))):
        wrapped = wrap(model())
        wrapped(batch(rank)).sum().backward()
        for parameter, grad in zip(wrapped.parameters(), expected):
            torch.testing.assert_close(getattr(parameter.grad, 'full_tensor', lambda p=parameter: p.grad)(), grad)


@case
def uneven_inputs():
    """DistributedDataParallel.join: a rank that is through waits, where others go on; they do one all_reduce at once,
    the one with async_op=True and the other without. MPI must not be given a blocking call for one of them."""
    wrapped = torch.nn.parallel.DistributedDataParallel(model())
    with wrapped.join():
        for _ in range(3 + 2 * dist.get_rank()):
            wrapped(batch(0)).sum().backward()


@case
def blocking_meets_waiting():
    for number in range(20):
        tensor = torch.ones(1 << number % 15)
        if (number + dist.get_rank()) % 2:
            dist.all_reduce(tensor)
        else:
            dist.all_reduce(tensor, async_op=True).wait()
        assert (tensor == dist.get_world_size()).all()


@case
def pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 4) for _ in range(world)]
    given = torch.randn(4, 4)
    schedule = ScheduleGPipe(PipelineStage(layers[rank], rank, world, torch.device('cpu')), n_microbatches=2,
                             loss_fn=lambda found, target: (found - target).pow(2).sum())
    arguments = (given,) if rank == 0 else ()
    found = schedule.step(*arguments, **({'target': torch.zeros(4, 4)} if rank == world - 1 else {}))
    expected = given
    for layer in layers:
        expected = layer(expected)
    if rank == world - 1:
        torch.testing.assert_close(found, expected)
    assert layers[rank].weight.grad is not None


@case
def tensors_of_a_mesh():
    """DTensor: a product of shards, and from one way of sharing to another."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    world = dist.get_world_size()
    mesh = init_device_mesh('cpu', (world,))
    torch.manual_seed(2)
    left, right = torch.randn(8 * world, 6), torch.randn(6, 4 * world)
    product = distribute_tensor(left, mesh, [Shard(0)]) @ distribute_tensor(right, mesh, [Replicate()])
    torch.testing.assert_close(product.full_tensor(), left @ right)
    torch.testing.assert_close(product.redistribute(mesh, [Shard(1)]).full_tensor(), left @ right)
    sums = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    torch.testing.assert_close(sums.full_tensor(), left @ right)
    alone, shared = model(), parallelize_module(model(), mesh, {'0': ColwiseParallel(), '2': RowwiseParallel()})
    torch.testing.assert_close(shared(batch(0)), alone(batch(0)))


@case
def checkpoint():
    """Written by all ranks, read back into other values."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    wrapped = fully_shard(model(), mesh=mesh)
    saved = {name: tensor.full_tensor().clone() for name, tensor in wrapped.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        dcp.save({'model': wrapped.state_dict()}, checkpoint_id=where[0])
        for parameter in wrapped.parameters():
            torch.nn.init.zeros_(parameter)
        state = {'model': wrapped.state_dict()}
        dcp.load(state, checkpoint_id=where[0])
    wrapped.load_state_dict(state['model'])
    for name, tensor in wrapped.state_dict().items():
        torch.testing.assert_close(tensor.full_tensor(), saved[name])


@case
def objects():
    world = dist.get_world_size()
    found = [None] * world
    dist.all_gather_object(found, {'rank': dist.get_rank(), 'text': 'x' * 1000})
    assert [one['rank'] for one in found] == list(range(world))


@case
def workers_of_a_data_loader():
    """They are forked after MPI has started; they do not communicate, and end."""
    numbers = torch.utils.data.TensorDataset(torch.arange(8.))
    for _ in range(2):
        seen = [one for (one,) in torch.utils.data.DataLoader(numbers, num_workers=1, multiprocessing_context='fork')]
        total = torch.cat(seen).sum()
        dist.all_reduce(total)
        assert total == 28 * dist.get_world_size()


@case
def gloo_beside():
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=dist.new_group(backend='gloo'))
    assert tensor[0] == dist.get_world_size()


@case
def backends_by_device():
    from torch.distributed.distributed_c10d import BackendConfig
    parsed = BackendConfig(dist.Backend('cpu:slingmpi,cuda:nccl')).get_device_backend_map()
    assert parsed == {'cpu': 'slingmpi', 'cuda': 'nccl'}, parsed
    # nccl is not in every PyTorch
    group = dist.new_group(backend='cpu:slingmpi,cuda:gloo')
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == dist.get_world_size()
    assert group._get_backend(torch.device('cpu')).name() == 'slingmpi'


@case
def groups_at_once():
    """Operations of several groups cross each other, on each rank in an order of its own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group() for _ in range(5)] + [dist.new_group(list(range(world)), use_local_synchronization=True)]
    for _ in range(10):
        order = list(enumerate(groups))
        random.Random(rank).shuffle(order)
        tensors = {}
        for number, group in order:
            tensors[number] = torch.full((1 + 3000 * number,), float(number))
            tensors[number].work = dist.all_reduce(tensors[number], group=group, async_op=True)
        for number, tensor in tensors.items():
            tensor.work.wait()
            assert (tensor == number * world).all()


@case
def destroyed_in_any_order():
    """As often as $TIMES says, several at a time, by each rank in an order of its own, some with operations before."""
    world, rank = dist.get_world_size(), dist.get_rank()
    order, left = random.Random(rank), []
    for number in range(int(os.environ.get('TIMES', 200))):
        group = dist.new_group(list(range(world)))
        if number % 10 == 0:
            dist.all_reduce(torch.ones(3), group=group)
        left.append(group)
        if len(left) == 5:
            order.shuffle(left)
            while left:
                dist.destroy_process_group(left.pop())


@case
def coalesced_lists():
    """PyTorch gives the results of all_gather_coalesced by rank, not by tensor; a tensor may be in a list twice."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for number in (1, 2, 3):
        found = [[torch.zeros(1) for _ in range(number)] for _ in range(world)]
        dist.all_gather_coalesced(found, [torch.tensor([10. * rank + one]) for one in range(number)])
        assert [[one.item() for one in row] for row in found] == [
            [10. * source + one for one in range(number)] for source in range(world)], found
    twice = torch.full((3,), rank + 1.)
    dist.all_reduce_coalesced([twice, twice])
    assert (twice == world * (world + 1) / 2).all(), twice


@case
def not_a_number():
    """A NaN of one rank is the minimum and maximum on all."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            for source in range(dist.get_world_size()):
                tensor = torch.full((2,), float('nan') if source == dist.get_rank() else 1., dtype=dtype)
                dist.all_reduce(tensor, op)
                assert tensor.isnan().all(), (dtype, op, source, tensor)


@case
def splits_on_one_rank():
    """The same shares, which one rank has written down and the other not."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found, shares = torch.zeros(world), [1] * world if rank else None
    dist.all_to_all_single(found, torch.full((world,), float(rank)), shares, shares)
    assert found.tolist() == list(range(world)), found


@case
def timeout_of_a_wait():
    """wait(timeout) is an error of this wait; the operation itself goes on."""
    import datetime
    world, rank = dist.get_world_size(), dist.get_rank()
    if rank == 0 and world > 1:
        found = torch.zeros(3)
        work = dist.irecv(found, 1)
        try:
            work.wait(datetime.timedelta(milliseconds=50))
        except dist.DistBackendError as err:
            assert 'not complete after the 50 ms' in str(err), err
        else:
            raise AssertionError('it did not wait')
        dist.send(torch.ones(1), 1)
        work.wait()
        assert (found == 5).all()
    elif rank == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.full((3,), 5.), 0)


def main():
    start(120)
    for name in sys.argv[1:] or CASES:
        CASES[name]()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f'{name}: right', flush=True)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
