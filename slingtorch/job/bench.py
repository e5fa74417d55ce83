# SPDX-License-Identifier: GPL-2.0-only
"""
Bandwidth of PyTorch's collective operations in this job, by message size, with the values checked.

    srun -N2 --ntasks-per-node=4 conda-python-distributed --bench --json bench.json

Every rank runs it. Rank 0 prints the table and writes the file, which 'slingtorch bench' reads, judges and plots
(docs/check.md). Time, algorithm and bus bandwidth are defined as in nccl-tests (NVIDIA/nccl-tests doc/PERFORMANCE.md),
so that results can be compared.
"""
import argparse
import collections
import datetime
import os
import re
import time

from . import gather, nccl
from .kinds import Any, Callable
from .machine import Machine
from .messages import scratch_file
from .probe import first_lines
from .records import (FORMAT, KINDS, OPERATIONS, VERSION, BenchError, file_to_write, parse_size, table,
                      write, wrong_values)

# bytes of a float32, the type of all data sent
ITEM = 4
# all elements of rank r are r mod 127 + 1: sums over 100,000 ranks are exact in a float32
VALUES = 127
MIN_REPEATS, MAX_REPEATS = 3, 1000
# the largest sizes, if none is given: ranks with 1 GB of memory have room for them
LARGEST = {'cpu': 128 << 20, 'cuda': 1 << 30}
# after this time, a silent rank counts as dead
TIMEOUT = datetime.timedelta(seconds=300)

Operation = collections.namedtuple('Operation', 'sends receives bus_factor expected run')
"""
Of the data, in as many parts as there are ranks: how many parts a rank sends and receives (0 if one buffer serves for
both); bus bandwidth / algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md; send_receive: src/sendrecv.cu); the value of
each part that a rank must receive; a function of the tensors (received, sent).
"""


def operations_of(dist: 'Any', kind: str, rank: int, ranks: int) -> dict:
    """{name: Operation} for this rank."""
    # PyTorch 2.13 renamed them, and warns about the old names
    whole = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor
    scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor
    # PyTorch's own MPI backend has only all_gather() of lists
    collect = whole if kind[:3] != 'mpi' else lambda received, sent: dist.all_gather(list(received.chunk(ranks)), sent)

    def exchange(received: 'Any', sent: 'Any') -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
                                            dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]):
            work.wait()

    values, share = [other % VALUES + 1 for other in range(ranks)], (ranks - 1) / ranks
    return {
        'all_reduce': Operation(ranks, 0, 2 * share, [sum(values)], lambda _, data: dist.all_reduce(data)),
        'all_gather': Operation(1, ranks, share, values, collect),
        'reduce_scatter': Operation(ranks, 1, share, [sum(values)], scatter),
        'broadcast': Operation(ranks, 0, 1, values[:1], lambda _, data: dist.broadcast(data, 0)),
        'all_to_all': Operation(ranks, ranks, share, values, dist.all_to_all_single),
        'send_receive': Operation(ranks, ranks, 1, [values[rank - 1]], exchange),
    }


class Measurement:
    """
    The job's process group.

    :ivar kind: one of KINDS; `name`: this rank and its node, for messages
    :ivar record: what was measured, and what could not be
    """

    def __init__(self, options: 'Any') -> None:
        try:
            self.rank, self.ranks, local_rank, self.local_ranks = (
                int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'))
        except KeyError as err:
            raise BenchError("%s is not set: start it with the runscript, as in 'srun -N2 --ntasks-per-node=4 "
                             "$RUNSCRIPTS/conda-python-distributed --bench'" % err)
        import torch
        import torch.distributed as dist
        self.options, self.torch, self.dist, self.printed = options, torch, dist, 0
        self.name = "rank %d on %s" % (self.rank, Machine().node)
        self.kind = options.backend or (
            'nccl' if torch.cuda.is_available() and dist.is_nccl_available() else 'gloo')
        self.device = 'cuda' if self.kind in ('nccl', 'mpi-gpu') else 'cpu'
        if self.device == 'cuda':
            torch.cuda.set_device(local_rank if torch.cuda.device_count() > 1 else 0)
        log = None
        if self.kind == 'nccl' and not os.environ.get('NCCL_DEBUG'):
            log = scratch_file()
            nccl.log_into(os.environ, log)
            # a dead peer ends this program, as it would end a training
            del os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'], os.environ['NCCL_ASYNC_ERROR_HANDLING']
        dist.init_process_group(self.kind.replace('-gpu', ''), timeout=TIMEOUT)
        self.rank, size = dist.get_rank(), dist.get_world_size()    # MPI numbers them itself
        if size != self.ranks:
            raise BenchError("MPI sees %d rank(s), but the job has %d: start the ranks with a launcher of this MPI "
                             "(Slurm: srun --mpi=pmi2, pmix or cray_shasta)" % (size, self.ranks))
        self.operations = operations_of(dist, self.kind, self.rank, size)
        self.gather(None)   # connects
        network = 'TCP' if self.kind == 'gloo' else 'unknown'
        if log:
            heard = nccl.heard(log)
            network = ', provider '.join(filter(None, [heard['network'] or network, heard['provider']]))
        versions = {'torch': str(torch.__version__)}
        if self.kind == 'nccl':
            versions.update(gpu=torch.cuda.get_device_name(0), nccl='.'.join(map(str, torch.cuda.nccl.version())))
        self.record = {
            'format': FORMAT, 'version': VERSION, 'complete': False, 'date': time.strftime('%Y-%m-%d %H:%M'),
            'ranks': size, 'ranks_per_node': self.local_ranks, 'nodes': -(-size // self.local_ranks),
            'versions': versions, 'line_rates': Machine().line_rates(), 'results': [],
            'networks': {self.kind: ' / '.join(sorted(set(self.gather(network))))},     # nodes may differ
            'notes': ["gloo, on CPUs: PyTorch %s sees no GPU, or has no NCCL" % torch.__version__] * (
                self.kind == 'gloo' and not options.backend)}   # type: dict
        if size == 1:
            self.record['notes'].append("a single rank sends nothing: these are times of calls, not of a network")

    def gather(self, thing: 'Any') -> list:
        """A list of each rank's object."""
        things = [None] * self.ranks
        self.dist.all_gather_object(things, thing)
        return things

    def seconds(self, function: 'Callable', repeats: int) -> float:
        """Run it so often; returns the mean time of the slowest rank, as nccl-tests."""
        self.gather(None)   # waits for all
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        if self.device == 'cuda':
            self.torch.cuda.synchronize()
        return max(self.gather((time.perf_counter() - start) / repeats))

    def wrong(self, operation: Operation, received: 'Any', sent: 'Any') -> int:
        """Run once with known values; returns the number of wrong ones here. :raises BenchError: not supported"""
        received.fill_(-1)
        sent.fill_(self.rank % VALUES + 1)
        try:
            operation.run(received, sent)
        except RuntimeError as err:
            if not re.search('support|implement', str(err)):
                raise   # a lost peer, for example
            raise BenchError("this backend: " + first_lines(err))
        parts = received.chunk(len(operation.expected))
        return sum(int((part != value).sum()) for part, value in zip(parts, operation.expected))

    def row(self, name: str, size: int) -> dict:
        """Measure a size of an operation; returns a row for the file. :raises BenchError: it is not possible"""
        if name == 'send_receive' and self.ranks == 1:
            raise BenchError('a single rank has no partner')
        operation, part = self.operations[name], max(1, size // ITEM // self.ranks)
        counts = [parts * part for parts in (operation.sends, operation.receives) if parts]
        made = [self.torch.empty(count, dtype=self.torch.float32, device=self.device) for count in counts]
        tensors = made[-1], made[0]     # the same if the operation works in place
        wrong = self.wrong(operation, *tensors)
        estimate = self.seconds(lambda: operation.run(*tensors), MIN_REPEATS)
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(self.options.seconds / max(estimate, 1e-6))))
        # meanwhile, sums grow to infinity, which does not change the time
        seconds = self.seconds(lambda: operation.run(*tensors), repeats)
        wrong += self.wrong(operation, *tensors)
        found = [(number, rank) for number, rank in self.gather((wrong, self.name)) if number]
        bandwidth = ITEM * max(counts) / seconds / 1e9
        return {'kind': self.kind, 'operation': name, 'size': size, 'seconds': seconds,
                'algorithm_bandwidth': bandwidth, 'bus_bandwidth': bandwidth * operation.bus_factor,
                'wrong': sum(number for number, _ in found), 'first_wrong': found[0][1] if found else None}

    def tell(self) -> None:
        """On rank 0: print the new lines of the table, and write the file."""
        if self.rank == 0:
            lines = table(self.record)
            print(*lines[self.printed:], sep='\n', flush=True)
            self.printed = len(lines)
            if self.options.json:
                write(self.record, self.options.json)

    def run(self) -> dict:
        """Measure everything; returns the record."""
        self.tell()     # fails at once if the directory is not writable
        largest = self.options.max or max(self.options.min, LARGEST[self.device])
        for name in self.options.operations:
            size = self.options.min
            try:
                while size <= largest:
                    self.record['results'].append(self.row(name, size))
                    self.tell()
                    size *= self.options.factor
            except BenchError as err:
                self.record['notes'].append('%s: %s' % (name, err))
        self.dist.destroy_process_group()
        self.record['complete'] = True
        self.tell()
        return self.record


def main(argv: list) -> int:
    """Run bench in one rank; returns the exit status."""
    parser = argparse.ArgumentParser(prog='conda-python-distributed --bench', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--backend', choices=KINDS, help="default: nccl with GPUs, else gloo")
    parser.add_argument('--operations', nargs='+', choices=OPERATIONS, default=OPERATIONS, help="default: all")
    parser.add_argument('--min', type=parse_size, default='32K', metavar='SIZE', help="default: 32K")
    parser.add_argument('--max', type=parse_size, metavar='SIZE', help="default: 1G on GPUs, 128M on CPUs")
    parser.add_argument('--factor', type=int, default=2, help="factor from one size to the next (default: 2)")
    parser.add_argument('--seconds', type=float, default=0.3,
                        help="time for each size, in 3 to 1000 repetitions (default: 0.3)")
    parser.add_argument('--json', metavar='FILE', type=file_to_write, help="write the results for 'slingtorch bench'")
    options = parser.parse_args(argv)
    if options.factor < 2 or options.min < ITEM or (options.max or options.min) < options.min or not (
            0 <= options.seconds < float('inf')):
        parser.error("--factor must be at least 2, --min at least 4, --max at least --min, --seconds a positive number")
    try:
        return 1 if wrong_values(Measurement(options).run()) else 0
    except BenchError as err:
        text = str(err)
    except Exception as err:  # pylint: disable=broad-except
        text = "%s. If a rank or its node is gone, the job's first error tells which (srun and mpiexec name the rank " \
               "that ended first)" % first_lines(err)
    gather.say('bench', Machine(), text)
    # destroying a process group hangs if a peer is gone
    os._exit(1)
