# SPDX-License-Identifier: GPL-2.0-only
"""One way to go wrong, on ranks of slingmpi: python faults.py NAME. What is printed is what a user would see."""

import ctypes
import datetime
import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist

import slingmpi
from collectives import start

MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE = 2, 3


def mpi():
    """The library of the MPI that slingmpi is linked with, which mpi4py would call in the same way."""
    from slingmpi import _backend   # noqa: F401  loads MPI, and does not start it
    library, = slingmpi._mpi_libraries()
    return ctypes.CDLL(library)


def impatient():
    """This rank's number, and a group that waits 3 s. All ranks are there before: on a busy machine one starts late."""
    rank = start(60)
    dist.barrier()
    return rank, dist.new_group(timeout=datetime.timedelta(seconds=3))


def late():
    """Rank 1 never comes."""
    rank, group = impatient()
    if rank == 1:
        signal.pause()
    dist.all_reduce(torch.ones(3), group=group)


def dies():
    if start(60) == 1:
        raise ValueError('this rank has had enough')
    dist.all_reduce(torch.ones(3))


def exits():
    """Rank 1 ends by itself; the others wait for it."""
    if start(60) == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(3))


def late_group():
    if start(60) == 1:
        signal.pause()
    dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3))


def late_as_mpi():
    dist.init_process_group('mpi', timeout=datetime.timedelta(seconds=3))
    if dist.get_rank() == 1:
        signal.pause()
    dist.all_reduce(torch.ones(3))


def killed():
    if start(60) == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(3))


def differences(*operations):
    """What two ranks do differently is named before MPI makes a wrong result of it; each in a group of its own."""
    for different in operations:
        group = dist.new_group()
        try:
            different(group)
        except (dist.DistBackendError, ValueError) as err:
            print(err, flush=True)
    dist.barrier()      # the first one to leave ends the others
    sys.exit('and that was all')


def different_sizes():
    rank = start(20)
    mine = torch.ones(3 + 2 * rank)
    rows = [torch.zeros_like(mine) for _ in range(2)]
    differences(
        lambda group: dist.broadcast(mine, 0, group=group),
        lambda group: dist.all_reduce(mine, group=group),
        lambda group: dist.all_reduce_coalesced([torch.ones(1)] * 99 + [mine], group=group),
        lambda group: dist.reduce(mine, 0, group=group),
        lambda group: dist.all_gather(rows, mine, group=group),
        lambda group: dist.all_gather_into_tensor(torch.cat(rows), mine, group=group),
        lambda group: dist.gather(mine, None if rank else rows, group=group),
        lambda group: dist.scatter(mine, None if rank else rows, group=group),
        lambda group: dist.reduce_scatter(mine, rows, group=group),
        lambda group: dist.reduce_scatter_tensor(mine, torch.cat(rows), group=group),
        lambda group: dist.all_to_all([torch.ones(3 - (one == rank)) for one in range(2)],
                                      [torch.ones(2), torch.ones(2)], group=group))


def different_operations():
    rank = start(20)
    differences(
        lambda group: dist.broadcast(torch.ones(3, dtype=torch.float64 if rank else torch.float32), 0, group=group),
        lambda group: dist.broadcast(torch.ones(3), rank, group=group),
        lambda group: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=group),
        lambda group: dist.barrier(group) if rank else dist.reduce(torch.ones(3), 0, group=group))


def different_from_before():
    """Both sizes are known: the ranks compare them each time."""
    os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'
    rank = start(20)

    def after_both(group):
        for size in (3, 4, 3 + rank):
            dist.all_reduce(torch.ones(size), group=group)
    differences(after_both)


def known_and_new():
    """The rank that does what it knows waits for the other, which asks."""
    rank, group = impatient()
    for size in (3, 3 + rank):
        dist.all_reduce(torch.ones(size), group=group)


def too_short():
    if start(60):
        dist.recv(torch.ones(5), 0)
    else:
        dist.send(torch.ones(3), 1)
        dist.barrier()


def too_long():
    if start(60):
        dist.recv(torch.ones(3), 0)
    else:
        dist.send(torch.ones(5), 1)
        dist.barrier()


def overwritten():
    start(20)
    kept = torch.full((1000,), 7.)
    try:
        dist.all_to_all_single(kept[:16], torch.ones(1000))
    except ValueError as err:
        print(err, flush=True)
    dist.barrier()
    sys.exit('and that was all' if (kept == 7).all() else f'overwritten: {kept}')


def sizes():
    """RANK and WORLD_SIZE of another launcher."""
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group('slingmpi', init_method=f'file://{directory}/store', rank=0, world_size=1)


def aborted():
    rank = start(60)
    backend = dist.group.WORLD._get_backend(torch.device('cpu'))
    work = dist.irecv(torch.ones(3), 1 - rank)
    backend.abort()
    work.wait()


def forked():
    start(60)
    if not os.fork():
        dist.all_reduce(torch.ones(3))
    sys.exit(os.wait()[1] >> 8)


def refused():
    """Errors that leave everything as it was."""
    start(60)
    backend = dist.group.WORLD._get_backend(torch.device('cpu'))
    group = dist.new_group()
    destroyed = group._get_backend(torch.device('cpu'))
    dist.destroy_process_group(group)
    for wrong in (
            lambda: dist.all_reduce(torch.ones(3, dtype=torch.float8_e4m3fn)),
            lambda: destroyed.allreduce([torch.ones(3)]),
            # memory that is not the processor's, and no MPI takes
            lambda: backend.allreduce([torch.ones(3, device='meta')]),
            lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1], [3]),
            lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(3)),
            lambda: dist.isend(torch.ones(3), 0, tag=-1),
            lambda: dist.all_reduce(torch.ones(3).to_sparse())):
        try:
            wrong()
        except Exception as err:
            print(f'{type(err).__name__}: {err}', flush=True)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()
    sys.exit('and that was all')


def one_thread():
    """MPI was started for a program whose threads call it by turns."""
    mpi().MPI_Init_thread(None, None, MPI_THREAD_SERIALIZED, ctypes.byref(ctypes.c_int()))
    start(60)


def finalized_before():
    library = mpi()
    library.MPI_Init_thread(None, None, MPI_THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    library.MPI_Finalize()
    start(60)


def finalized_too_early():
    start(60)
    mpi().MPI_Finalize()
    dist.all_reduce(torch.ones(3))


def two_mpis():
    """Another MPI has been loaded: $OTHER."""
    ctypes.CDLL(os.environ['OTHER'])
    start(60)


def named_mpi():
    """Fine: the name "mpi", rank and size from MPI."""
    dist.init_process_group('mpi')
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == dist.get_world_size() == 2
    beside = dist.new_group(backend='gloo')
    dist.all_reduce(tensor, group=beside)
    assert tensor[0] == 4
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        dist.all_reduce(tensor, group=group)
    dist.destroy_process_group()
    print('as mpi')


def met_by_mpi():
    """Fine: rank, size and store from MPI alone."""
    for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):
        os.environ.pop(name, None)
    dist.init_process_group('slingmpi', init_method='mpi://')
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=dist.new_group(backend='gloo'))
    assert tensor[0] == dist.get_world_size() == 2
    print('met by MPI')


def caught():
    """Fine: an exception that the program has dealt with ends nobody."""
    start(60)
    try:
        raise KeyError('dealt with')
    except KeyError:
        pass
    dist.barrier()
    print('fine')


def mpi4py_before():
    """Fine: it starts MPI, and finalizes it after the process group."""
    from mpi4py import MPI
    start(60)
    beside(MPI)


def mpi4py_after():
    """Fine: it finds MPI started."""
    start(60)
    from mpi4py import MPI
    beside(MPI)


def beside(MPI):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    total = MPI.COMM_WORLD.allreduce(1)
    work.wait()
    assert tensor[0] == total == dist.get_world_size()
    dist.destroy_process_group()
    print('beside mpi4py')


if __name__ == '__main__':
    if 'SAID' in os.environ:
        file = os.open(os.path.join(os.environ['SAID'], str(os.getpid())), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
    globals()[sys.argv[1]]()
