# SPDX-License-Identifier: GPL-2.0-only
"""Ways to go wrong, on ranks of slingmpi: python faults.py NAME ... What is printed is what a user would see."""
import ctypes
import datetime
import os
import sys
import tempfile
import time

import slingmpi     # before PyTorch, which slingmpi imports and which looks for it while it is half imported
import torch
import torch.distributed as dist

from collectives import start

MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE = 2, 3


def mpi():
    """The library of the MPI that slingmpi is linked with, which mpi4py would call in the same way."""
    from slingmpi import _backend   # noqa: F401  loads MPI, and does not start it
    library, = slingmpi._mpi_libraries()
    return ctypes.CDLL(library)


# --- on two ranks, each in groups of its own; the process goes on


def attempts(*wrong):
    """Print how each of these ends; each has a group of its own."""
    for attempt in wrong:
        group = dist.new_group()
        try:
            attempt(group)
        except Exception as err:
            print(f'{type(err).__name__}: {err}', flush=True)


def impatient():
    """A group that waits 3 s. All ranks are there before: on a busy machine one starts late."""
    dist.barrier()
    return dist.new_group(timeout=datetime.timedelta(seconds=3))


def late(rank):
    """Rank 1 never comes. What another group has on its way goes on."""
    beside, found = dist.new_group(), torch.zeros(1)
    work = dist.irecv(found, 1 - rank, group=beside)
    group = impatient()
    attempts(lambda _: rank or dist.all_reduce(torch.ones(3), group=group))
    if rank:
        work.wait()
    dist.send(torch.ones(1), 1 - rank, group=beside)
    work.wait()
    assert found == 1


def different_sizes(rank):
    """What two ranks do differently is named before MPI makes a wrong result of it."""
    mine = torch.ones(3 + 2 * rank)
    rows = [torch.zeros_like(mine) for _ in range(2)]
    attempts(
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


def different_operations(rank):
    attempts(
        lambda group: dist.broadcast(torch.ones(3, dtype=torch.float64 if rank else torch.float32), 0, group=group),
        lambda group: dist.broadcast(torch.ones(3), rank, group=group),
        lambda group: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=group),
        lambda group: dist.barrier(group) if rank else dist.reduce(torch.ones(3), 0, group=group))


def different_from_before(rank):
    """Both sizes are known: the ranks compare them each time."""
    def after_both(group):
        for size in (3, 4, 3 + rank):
            dist.all_reduce(torch.ones(size), group=group)
    os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'
    attempts(after_both)
    del os.environ['TORCH_DISTRIBUTED_DEBUG']


def known_and_new(rank):
    """The rank that does what it knows waits for the other, which asks."""
    group = impatient()

    def after_one(_):
        for size in (3, 3 + rank):
            dist.all_reduce(torch.ones(size), group=group)
    attempts(after_one)


def other_lengths(rank):
    """Of messages, from rank 0 to rank 1."""
    for sent, received in ((3, 5), (5, 3)):
        attempts(lambda group: dist.recv(torch.ones(received), 0, group=group) if rank else
                 dist.send(torch.ones(sent), 1, group=group))


def overwritten(_):
    kept = torch.full((1000,), 7.)
    attempts(lambda group: dist.all_to_all_single(kept[:16], torch.ones(1000), group=group))
    assert (kept == 7).all(), kept


def aborted(rank):
    def abort(group):
        work = dist.irecv(torch.ones(3), 1 - rank, group=group)
        group._get_backend(torch.device('cpu')).abort()
        work.wait()
    attempts(abort)


def forked(_):
    """A process that was forked ends with the error, and the ranks go on."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        dist.all_reduce(torch.ones(3))
    print('ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def refused(_):
    """Errors that leave everything as it was."""
    gone = dist.new_group()
    destroyed = gone._get_backend(torch.device('cpu'))
    dist.destroy_process_group(gone)
    attempts(
        lambda group: dist.all_reduce(torch.ones(3, dtype=torch.float8_e4m3fn), group=group),
        lambda _: destroyed.allreduce([torch.ones(3)]),
        # memory that is not the processor's, and no MPI takes
        lambda group: group._get_backend(torch.device('cpu')).allreduce([torch.ones(3, device='meta')]),
        lambda group: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1], [3], group=group),
        lambda group: dist.all_gather_into_tensor(torch.ones(5), torch.ones(3), group=group),
        # dist.all_gather itself compares them
        lambda group: group._get_backend(torch.device('cpu')).allgather(
            [[torch.ones(3), torch.ones(3, dtype=torch.int)]], [torch.ones(3)]),
        lambda group: dist.all_gather_coalesced([[torch.ones(1)] * 2] * 2, [torch.ones(1)], group=group),
        lambda group: group._get_backend(torch.device('cpu')).broadcast([torch.ones(3), torch.ones(3)]),
        lambda group: dist.all_to_all_single(torch.ones(3), torch.ones(3), group=group),
        lambda group: dist.all_reduce(torch.ones(3, dtype=torch.int), dist.ReduceOp.AVG, group=group),
        lambda group: dist.isend(torch.ones(3), 0, tag=-1, group=group),
        lambda group: dist.all_reduce(torch.ones(3).to_sparse(), group=group))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()


def late_group(rank):
    """Rank 1 never comes. The last one: now the ranks count their groups differently."""
    if rank == 0:
        try:
            dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3))
        except dist.DistBackendError as err:
            print(err)


SURVIVED = [refused, different_sizes, different_operations, different_from_before, other_lengths, overwritten, aborted,
            forked, late, known_and_new, late_group]


def survived():
    """All of them; the program takes it for a success, and the job is none, because operations have failed."""
    rank = start(60)
    for fault in SURVIVED:
        print('==', fault.__name__, flush=True)
        fault(rank)
        sys.stdout.flush()
        dist.barrier()      # the first one to leave ends the others


# --- on two ranks that end


def exits():
    """Rank 1 ends by itself; the others wait for it."""
    if start(60) == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(3))


def names():
    """An error: RANK of another launcher. Fine: rank, size and store from MPI alone, also as "mpi", with its limit."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            dist.init_process_group('slingmpi', init_method=f'file://{directory}/store', rank=0, world_size=1)
        except RuntimeError as err:
            print(err)
    for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):
        os.environ.pop(name, None)
    for words in ({'backend': 'slingmpi', 'init_method': 'mpi://'}, {'backend': 'mpi'}):
        dist.init_process_group(**words)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor[0] == dist.get_world_size() == 2
        beside = dist.new_group(backend='gloo')
        dist.all_reduce(tensor, group=beside)
        assert tensor[0] == 4
        group = dist.new_group([1])
        if dist.get_rank() == 1:
            dist.all_reduce(tensor, group=group)
        print('right as', words['backend'], flush=True)
        if words['backend'] == 'slingmpi':
            dist.barrier()
            dist.destroy_process_group()
    late(dist.get_rank())
    dist.barrier()


def polled():
    """Fine: asking makes progress, also where the thread that would make it is gone."""
    start(60)
    slingmpi._loaded.stop()
    tensor = torch.ones(3)
    work, end = dist.all_reduce(tensor, async_op=True), time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < end
    print('complete without a wait', tensor.tolist(), flush=True)
    dist.barrier()


def mpi4py_before():
    """Fine: it starts MPI, and finalizes it after the process group."""
    from mpi4py import MPI
    start(60)
    beside(MPI)
    dist.destroy_process_group()


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
    print('beside mpi4py', flush=True)
    dist.barrier()


# --- on one


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


def not_named():
    """SLINGMPI_AS_MPI is not set."""
    dist.init_process_group('mpi')


def alone():
    """Each as a process of its own, which is forked before MPI runs."""
    for function in (one_thread, finalized_before, finalized_too_early, two_mpis, not_named):
        print('==', function.__name__, flush=True)
        child = os.fork()
        if not child:
            function()
            sys.exit()
        print('ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == '__main__':
    assert dist.Backend.SLINGMPI == 'slingmpi'
    if 'SAID' in os.environ:
        file = os.open(os.path.join(os.environ['SAID'], str(os.getpid())), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
    for name in sys.argv[1:]:
        globals()[name]()
