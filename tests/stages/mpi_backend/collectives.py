# SPDX-License-Identifier: GPL-2.0-only
"""Run on every rank: each operation of slingmpi, for each type and size, against NumPy. Prints what differs. Groups,
messages from any rank and the like are asked by PyTorch's own tests (pytorch.py).

    mpiexec -n 3 python collectives.py [case ...]

A result is compared with what all ranks' inputs give: each rank knows them, because they come from rank and seed.
"""
import datetime
import functools
import os
import sys

import numpy
import torch
import torch.distributed as dist

import slingmpi

SIZES = (0, 1, 7, 1 << 17)
REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
TYPES = (*REAL, *WHOLE, *COMPLEX, torch.bool)
OPS = {'SUM': numpy.add, 'PRODUCT': numpy.multiply, 'MIN': numpy.minimum, 'MAX': numpy.maximum,
       'BAND': numpy.bitwise_and, 'BOR': numpy.bitwise_or, 'BXOR': numpy.bitwise_xor}
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


@functools.lru_cache(16)
def numbers_of(seed, size):
    """Small whole numbers, which 16 bits hold exactly; for all types the same, and not to be written to."""
    return torch.from_numpy(numpy.random.default_rng(seed).integers(0, 3, size=size))


def tensor_of(rank, dtype, size, seed=0):
    """The tensor that this rank has."""
    found = numbers_of(1000 * seed + rank, size).to(dtype, copy=True)
    return found * (1 + 1j) if dtype.is_complex else found


def all_of(dtype, size, seed=0):
    return [tensor_of(rank, dtype, size, seed) for rank in range(dist.get_world_size())]


def as_numpy(tensor):
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
    return tensor.to(wide.get(tensor.dtype, tensor.dtype)).numpy()


def same(found, expected, what):
    assert found.dtype == expected.dtype and found.shape == expected.shape, (what, found.dtype, found.shape)
    assert torch.equal(found, expected), f'{what}: {found.flatten()[:5]} and not {expected.flatten()[:5]}'


def ops_of(dtype):
    if dtype.is_complex:
        return ['SUM']      # PyTorch itself refuses others
    return ['SUM', 'PRODUCT', 'MIN', 'MAX'] if dtype in REAL else list(OPS)


def reduced(tensors, name):
    """What NumPy makes of these tensors."""
    if tensors[0].dtype == torch.bool:
        name = {'SUM': 'BOR', 'MAX': 'BOR', 'PRODUCT': 'BAND', 'MIN': 'BAND'}.get(name, name)
    result = as_numpy(tensors[0]).copy()
    for tensor in tensors[1:]:
        result = OPS[name](result, as_numpy(tensor))
    return torch.from_numpy(numpy.ascontiguousarray(result)).to(tensors[0].dtype)


@case
def all_reduce():
    for dtype in TYPES:
        for size in SIZES:
            for name in ops_of(dtype):
                tensor = tensor_of(dist.get_rank(), dtype, size)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
                same(tensor, reduced(all_of(dtype, size), name), f'all_reduce {dtype} {size} {name}')


@case
def mean_and_factor():
    world = dist.get_world_size()
    for dtype in (*REAL, *COMPLEX):
        tensor = torch.full((5,), float(dist.get_rank() * 2)).to(dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, torch.full((5,), float(world - 1)).to(dtype), f'AVG {dtype}')
        tensor = torch.ones(5).to(dtype)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0))
        same(tensor, torch.full((5,), 2.0 * world).to(dtype), f'PREMUL_SUM {dtype}')
    given = torch.ones(3)
    dist.reduce(given, world - 1, dist._make_nccl_premul_sum(torch.tensor([0.5])))
    if dist.get_rank() == world - 1:
        same(given, torch.full((3,), 0.5 * world), 'reduce by PREMUL_SUM')


@case
def reduce():
    for root in range(dist.get_world_size()):
        for dtype in TYPES:
            mine = tensor_of(dist.get_rank(), dtype, 7)
            dist.reduce(mine, root)
            if dist.get_rank() == root:
                same(mine, reduced(all_of(dtype, 7), 'SUM'), f'reduce {dtype} to {root}')
            else:
                same(mine, tensor_of(dist.get_rank(), dtype, 7), f'reduce leaves {dtype} of others as it is')


@case
def broadcast():
    for root in range(dist.get_world_size()):
        for dtype in TYPES:
            for size in SIZES:
                mine = tensor_of(dist.get_rank(), dtype, size)
                dist.broadcast(mine, root)
                same(mine, tensor_of(root, dtype, size), f'broadcast {dtype} {size} from {root}')


@case
def gather_and_scatter():
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in TYPES:
        for size in SIZES:
            mine, expected = tensor_of(rank, dtype, size), all_of(dtype, size)
            found = [torch.zeros_like(mine) for _ in range(world)]
            dist.all_gather(found, mine)
            same(torch.cat(found), torch.cat(expected), f'all_gather {dtype} {size}')
            whole = torch.zeros(world * size, dtype=dtype)
            dist.all_gather_into_tensor(whole, mine)
            same(whole, torch.cat(expected), f'all_gather_into_tensor {dtype} {size}')
            root = size % world
            found = [torch.zeros_like(mine) for _ in range(world)] if rank == root else None
            dist.gather(mine, found, dst=root)
            if rank == root:
                same(torch.cat(found), torch.cat(expected), f'gather {dtype} {size}')
            dist.scatter(mine, [tensor.clone() for tensor in expected] if rank == root else None, src=root)
            same(mine, expected[rank], f'scatter {dtype} {size}')


@case
def reduce_scatter():
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in TYPES:
        for size in (0, 1, 7, 1 << 16):
            for name in ops_of(dtype):
                op = getattr(dist.ReduceOp, name)
                expected = reduced(all_of(dtype, size * world), name)[rank * size:(rank + 1) * size]
                given = tensor_of(rank, dtype, size * world)
                kept = given.clone()
                found = torch.zeros(size, dtype=dtype)
                dist.reduce_scatter_tensor(found, given, op)
                same(found, expected, f'reduce_scatter_tensor {dtype} {size} {name}')
                same(given, kept, 'reduce_scatter_tensor leaves its input as it is')
                found = torch.zeros(size, dtype=dtype)
                dist.reduce_scatter(found, list(given.split(size) if size else [given] * world), op)
                same(found, expected, f'reduce_scatter {dtype} {size} {name}')


@case
def all_to_all():
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in TYPES:
        for size in SIZES[:3] + (1 << 14,):
            rows = [tensor_of(source, dtype, size * world).reshape(world, size) for source in range(world)]
            found = torch.zeros(world, size, dtype=dtype)
            dist.all_to_all_single(found, rows[rank])
            same(found, torch.stack([rows[source][rank] for source in range(world)]), f'all_to_all_single {dtype}')
            lists = [torch.zeros(source + size, dtype=dtype) for source in range(world)]
            dist.all_to_all(lists, [tensor_of(rank, dtype, rank + size, seed=target) for target in range(world)])
            for source in range(world):
                same(lists[source], tensor_of(source, dtype, source + size, seed=rank), f'all_to_all {dtype}')
            # rank r sends r + 1 rows of two to each
            given = tensor_of(rank, dtype, 2 * world * (rank + 1)).reshape(-1, 2)
            counts = [source + 1 for source in range(world)]
            found = torch.zeros(sum(counts), 2, dtype=dtype)
            dist.all_to_all_single(found, given, counts, [rank + 1] * world)
            expected = [tensor_of(source, dtype, 2 * world * (source + 1)).reshape(world, -1, 2)[rank]
                        for source in range(world)]
            same(found, torch.cat(expected), f'all_to_all_single with splits {dtype}')


@case
def messages():
    world, rank = dist.get_world_size(), dist.get_rank()
    following, before = (rank + 1) % world, (rank - 1) % world
    for dtype in TYPES:
        for size in SIZES:
            found = torch.zeros(size, dtype=dtype)
            for work in dist.batch_isend_irecv([
                    dist.P2POp(dist.isend, tensor_of(rank, dtype, size), following, tag=3),
                    dist.P2POp(dist.irecv, found, before, tag=3)]):
                work.wait()
            same(found, tensor_of(before, dtype, size), f'isend and irecv {dtype} {size}')
    # a message and a collective do not hold each other up
    if world > 1:
        found = torch.zeros(3)
        late = dist.irecv(found, before, tag=9)
        dist.barrier()
        dist.send(torch.full((3,), float(rank)), following, tag=9)
        late.wait()
        same(found, torch.full((3,), float(before)), 'a message later than a barrier')


@case
def other_layouts():
    world, rank = dist.get_world_size(), dist.get_rank()
    columns = torch.full((4, 6), float(rank)).t()[:, ::2]
    dist.all_reduce(columns)
    same(columns, torch.full((6, 2), world * (world - 1) / 2), 'all_reduce of a view')
    rows = torch.zeros(8)[::2]
    dist.broadcast(rows if rank else rows.fill_(5), 0)
    same(rows, torch.full((4,), 5.0), 'broadcast of a view')
    found = [torch.zeros(3, 2).t() for _ in range(world)]
    dist.all_gather(found, torch.arange(6.).reshape(3, 2).t() + rank)
    for source in range(world):
        same(found[source], torch.arange(6.).reshape(3, 2).t() + source, 'all_gather of views')
    # input and output share memory, as FSDP has it
    whole = torch.zeros(world, 3)
    whole[rank] = rank
    dist.all_gather_into_tensor(whole, whole[rank])
    same(whole, torch.arange(float(world)).repeat_interleave(3).reshape(world, 3), 'all_gather in place')
    whole[0] = rank
    dist.all_gather_into_tensor(whole, whole[0])
    same(whole[:, 0], torch.arange(float(world)), 'all_gather from within')
    whole = torch.ones(world, 3)
    dist.reduce_scatter_tensor(whole[rank], whole)
    same(whole[rank], torch.full((3,), float(world)), 'reduce_scatter in place')
    whole = torch.full((world,), float(rank))
    dist.all_to_all_single(whole, whole)
    same(whole, torch.arange(float(world)), 'all_to_all in place')
    number = torch.tensor(float(rank))
    dist.all_reduce(number)
    same(number, torch.tensor(world * (world - 1) / 2), 'all_reduce of a number')


@case
def several_at_once():
    world = dist.get_world_size()
    tensors = [torch.full((1000 * number + 1,), 1.0) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future().then(lambda done: done.value()[0].sum().item()) for work in works[::2]]
    for work in reversed(works):
        work.wait()
    for tensor in tensors:
        same(tensor, torch.full_like(tensor, float(world)), 'many at once')
    for number, future in enumerate(futures):
        assert future.wait() == world * (2000 * number + 1), future.value()
    lists = [torch.ones(3), torch.ones(5)]
    dist.all_reduce_coalesced(lists)
    assert all((tensor == world).all() for tensor in lists), lists
    # PyTorch's own comparison of what ranks do numbers it
    backend = dist.group.WORLD._get_backend(torch.device('cpu'))
    before = backend._get_sequence_number_for_group()
    dist.barrier()
    assert backend._get_sequence_number_for_group() == before + 1
    # nobody waits, and it is done nonetheless
    tensor = torch.ones(100)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    assert work.get_future().done() or work.get_future().wait()
    same(tensor, torch.full((100,), float(world)), 'by the progress thread')


@case
def larger_than_an_int():
    """The same as for 2^31 elements, with parts of 1,000."""
    world, rank = dist.get_world_size(), dist.get_rank()
    slingmpi._loaded.split_counts_above(1000)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = tensor_of(rank, dtype, 4321)
        dist.all_reduce(tensor)
        same(tensor, reduced(all_of(dtype, 4321), 'SUM'), f'all_reduce in parts {dtype}')
        try:
            dist.reduce_scatter_tensor(torch.zeros(4321, dtype=dtype), tensor_of(rank, dtype, 4321 * world))
        except ValueError as err:
            assert '4321 elements for each rank are more than one call' in str(err), err
        else:
            raise AssertionError('reduce_scatter in parts')
        dist.reduce(tensor, 0)
        whole = torch.zeros(world * 4321, dtype=dtype)
        dist.all_gather_into_tensor(whole, tensor_of(rank, dtype, 4321))
        same(whole, torch.cat(all_of(dtype, 4321)), 'all_gather in parts')
        tensor = tensor_of(rank, dtype, 4321)
        dist.broadcast(tensor, world - 1)
        same(tensor, tensor_of(world - 1, dtype, 4321), 'broadcast in parts')
        found = torch.zeros(4321 * world, dtype=dtype)
        dist.all_to_all_single(found, tensor_of(rank, dtype, 4321 * world))
        if world > 1 and rank < 2:
            found = torch.zeros(4321, dtype=dtype)
            other = 1 - rank
            sent = dist.isend(tensor_of(rank, dtype, 4321), other)
            dist.recv(found, other)
            sent.wait()
            same(found, tensor_of(other, dtype, 4321), 'a message in parts')
    slingmpi._loaded.split_counts_above(1 << 30)


def ranks_from_launcher():
    """RANK and WORLD_SIZE from Open MPI, MPICH or srun; of a process that none has started 0 and 1."""
    for name, candidates, alone in (('RANK', ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'SLURM_PROCID'), '0'),
                                    ('WORLD_SIZE', ('OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'SLURM_NTASKS'), '1')):
        os.environ.setdefault(name, next((os.environ[found] for found in candidates if found in os.environ), alone))


def start(seconds):
    """Join the other ranks; this rank's number.

    :param seconds: that an operation may take
    """
    if not dist.is_initialized():
        ranks_from_launcher()
        dist.init_process_group('slingmpi', timeout=datetime.timedelta(seconds=seconds))
    return dist.get_rank()


def main():
    start(120)
    for name in sys.argv[1:] or CASES:
        CASES[name]()
        if dist.get_rank() == 0:
            print(f'{name}: right', flush=True)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
