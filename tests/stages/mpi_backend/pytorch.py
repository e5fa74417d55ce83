# SPDX-License-Identifier: GPL-2.0-only
"""PyTorch's own tests on ranks of slingmpi. Prints each test that ran, and counts.

    mpiexec -n 3 python pytorch.py mpi|opened|gloo [NAME ...]           distributed_test.py, which is in every wheel
    mpiexec -n 4 python pytorch.py opened|gloo FILE.py [NAME ...]       of PyTorch's sources: test/distributed/...

mpi      as PyTorch tests its own backend "mpi", which is slingmpi here
opened   slingmpi instead of gloo, with all that is asked of gloo alone
gloo     gloo itself, to compare

Without names all tests; a name may be the beginning of several. What needs a GPU, another backend or another number of
ranks is not counted.
"""
import datetime
import functools
import importlib
import os
import sys
import tempfile
import traceback
import types
import unittest

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal import common_distributed

import slingmpi

LIMIT = datetime.timedelta(seconds=60)


def put_in_place_of_gloo():
    """PyTorch makes slingmpi where it would make gloo."""
    helper, wrapper, members = (
        distributed_c10d._new_process_group_helper, distributed_c10d._create_process_group_wrapper, [])
    gloo = distributed_c10d.ProcessGroupGloo

    def wrapping(*args, **kwargs):      # TORCH_DISTRIBUTED_DEBUG=DETAIL: gloo compares what the ranks do
        distributed_c10d.ProcessGroupGloo = gloo
        try:
            return wrapper(*args, **kwargs)
        finally:
            distributed_c10d.ProcessGroupGloo = Gloo

    def noting(size, rank, ranks, backend, store, name, *args, **kwargs):
        members[:] = [ranks, name]
        return helper(size, rank, ranks, backend, store, name, *args, **kwargs)

    class Always(type):     # PyTorch asks whether a backend is one
        def __instancecheck__(cls, instance):
            return True

    class Gloo(metaclass=Always):
        def __new__(cls, store, rank, size, timeout):
            return slingmpi._create(types.SimpleNamespace(
                store=store, group_rank=rank, group_size=size, timeout=min(timeout, LIMIT), group_id=members[1],
                global_ranks_in_group=members[0]))
    distributed_c10d._new_process_group_helper = noting
    distributed_c10d._create_process_group_wrapper = wrapping
    distributed_c10d.ProcessGroupGloo = Gloo
    torch._C._distributed_c10d.Backend.options = types.SimpleNamespace()    # PyTorch notes the members in gloo's


def outcome(test):
    """'passed', 'skipped' or the traceback of one test."""
    try:
        test()
    except unittest.SkipTest:
        return 'skipped'
    except SystemExit:          # how PyTorch's decorators leave out a test in a process of its own
        return 'skipped'
    except BaseException:
        return traceback.format_exc()
    return 'passed'


def tests_of(file, rank, size, directory):
    """Name and function of each test of a file that would start its ranks itself, as one of these runs it."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    module = importlib.import_module(os.path.splitext(os.path.basename(file))[0])

    def run(kind, name):
        case = kind(name)
        case.rank, case.file_name = rank, os.path.join(directory, f'{kind.__name__}.{name}')
        if case.world_size != size:
            raise unittest.SkipTest
        getattr(case, name)()
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and issubclass(kind, common_distributed.MultiProcessTestCase):
            for name in unittest.defaultTestLoader.getTestCaseNames(kind):
                yield f'{kind.__name__}.{name}', functools.partial(run, kind, name)


def main():
    kind, *wanted = sys.argv[1:]
    file = wanted.pop(0) if wanted and wanted[0].endswith('.py') else None
    if kind == 'mpi':
        slingmpi.take_name_mpi()
    rank, size = slingmpi._load().start()
    store = slingmpi._store_of_mpi(LIMIT)
    if rank == 0:
        directory = tempfile.TemporaryDirectory()
        for name in ('barrier', 'test_dir', 'init_dir'):    # what distributed_test.Barrier and its likes write into
            os.mkdir(os.path.join(directory.name, name))
        store.set('directory', directory.name)
    os.environ.update(BACKEND='mpi' if kind == 'mpi' else 'gloo', WORLD_SIZE=str(size), RANK=str(rank),
                      TEMP_DIR=store.get('directory').decode(), MASTER_ADDR='127.0.0.1', MASTER_PORT='0')
    if kind == 'opened':
        put_in_place_of_gloo()
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import distributed_test

    if kind == 'opened':    # the profiler's names are those of MPI
        by_name = distributed_test.get_profiling_event

        def renamed(name, *args, **kwargs):
            events = by_name(name.replace('gloo:', 'mpi:'), *args, **kwargs)
            for event in events:
                event.name = event.name.replace('mpi:', 'gloo:')
            return events
        distributed_test.get_profiling_event = renamed

    class Tests(common_utils.TestCase, distributed_test.DistributedTest._DistTestBase):
        pass
    Tests.rank, Tests.world_size = rank, size
    tests = tests_of(file, rank, size, os.environ['TEMP_DIR']) if file else (
        (name, Tests(name).debug) for name in sorted(dir(Tests)) if name.startswith('test_'))
    counts = {'passed': 0, 'failed': 0}
    for name, test in tests:
        if wanted and not any(name.startswith(one) or f'.{one}' in name for one in wanted):
            continue
        own = dist.PrefixStore(name, store)
        if kind == 'mpi':
            dist.init_process_group('mpi', timeout=LIMIT)
        elif not file:
            dist.init_process_group('gloo', store=own, rank=rank, world_size=size, timeout=LIMIT)
        found = outcome(test)
        own.set(f'outcome {rank}', found)
        all_found = [own.get(f'outcome {one}').decode() for one in range(size)]
        if dist.is_initialized():
            dist.destroy_process_group()
        distributed_test.Barrier.barrier_id = 0
        if rank == 0:
            for file in os.scandir(os.path.join(os.environ['TEMP_DIR'], 'barrier')):
                os.unlink(file)
            wrong = [text for text in all_found if text not in ('passed', 'skipped')]
            if wrong:
                print(wrong[0])
            if wrong or 'passed' in all_found:
                result = 'failed' if wrong else 'passed'
                counts[result] += 1
                print(f'{name}: {result}', flush=True)
        own.set(f'go on {rank}', '')
        own.wait([f'go on {one}' for one in range(size)])
    # rank 0, which has the store, leaves last
    own.set(f'left {rank}', '')
    if rank == 0:
        own.wait([f'left {one}' for one in range(size)])
        print(f"{kind}: {counts['passed']} of {sum(counts.values())} passed", flush=True)
    sys.exit(bool(counts['failed']))


if __name__ == '__main__':
    main()
