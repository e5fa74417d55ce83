# SPDX-License-Identifier: GPL-2.0-only
"""PyTorch's own distributed_test.py, which is in every wheel, on ranks of slingmpi in the place of its backend "mpi".
Prints each test that ran, and counts.

    mpiexec -n 3 python pytorch.py [NAME ...]

Without names all tests; a name may be the beginning of several. What needs a GPU, another backend or another number of
ranks is not counted.
"""
import datetime
import os
import sys
import tempfile
import traceback
import unittest

import torch.distributed as dist

import slingmpi

LIMIT = datetime.timedelta(seconds=60)


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


def main():
    wanted = sys.argv[1:]
    slingmpi.take_name_mpi()
    rank, size = slingmpi._load().start()
    store = slingmpi._store_of_mpi(LIMIT)
    if rank == 0:
        directory = tempfile.TemporaryDirectory()
        for name in ('barrier', 'test_dir', 'init_dir'):    # what distributed_test.Barrier and its likes write into
            os.mkdir(os.path.join(directory.name, name))
        store.set('directory', directory.name)
    os.environ.update(BACKEND='mpi', WORLD_SIZE=str(size), RANK=str(rank),
                      TEMP_DIR=store.get('directory').decode(), MASTER_ADDR='127.0.0.1', MASTER_PORT='0')
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import distributed_test

    class Tests(common_utils.TestCase, distributed_test.DistributedTest._DistTestBase):
        pass
    Tests.rank, Tests.world_size = rank, size
    counts = {'passed': 0, 'failed': 0}
    for name in sorted(dir(Tests)):
        if not name.startswith('test_') or wanted and not name.startswith(tuple(wanted)):
            continue
        own = dist.PrefixStore(name, store)
        dist.init_process_group('mpi', timeout=LIMIT)
        found = outcome(Tests(name).debug)
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
        print(f"mpi: {counts['passed']} of {sum(counts.values())} passed", flush=True)
    sys.exit(bool(counts['failed']))


if __name__ == '__main__':
    main()
