# SPDX-License-Identifier: GPL-2.0-only
"""
Bandwidth of PyTorch's collective operations in this job, by message size, with the values checked.

    srun -N2 --ntasks-per-node=4 conda-python-distributed --bench --json bench.json

Every rank runs it. Rank 0 prints the table and writes the file, which 'slingtorch bench' reads, judges and plots
(docs/check.md). Algorithm and bus bandwidth are defined as in nccl-tests (NVIDIA/nccl-tests doc/PERFORMANCE.md), so
that results can be compared. The time is the median, over all repetitions, of the slowest rank's time.

It needs only PyTorch, also in a container, and Python 3.8 or newer.
"""
import argparse
import datetime
import os
import re
import statistics
import sys
import time

from . import gather, nccl
from .kinds import Any, Callable, Iterator
from .machine import Machine
from .messages import scratch_file
from .records import (FORMAT, KINDS, OPERATIONS, VERSION, BenchError, file_to_write, head, parse_size, show_size,
                      show_time, summary, table_row, write, wrong_values)

# bytes of a float32, the type of all data sent
ITEM = 4
# all elements of rank r are r mod 127 + 1: sums over 100,000 ranks are exact in a float32
VALUES = 127
WARM_UP, MIN_REPEATS, MAX_REPEATS = 5, 3, 1000
# if an operation takes more seconds than this, no larger size follows
LONGEST = 5
# share of the free memory to use; libraries are assumed to need the size of the messages once more (gloo does)
MEMORY_SHARE = 0.8
# after this time, a silent rank counts as dead
TIMEOUT = datetime.timedelta(seconds=300)
# prefixes of the variables that the file keeps: network settings, no secrets
VARIABLES = ('NCCL_', 'RCCL_', 'FI_', 'OFI_NCCL_', 'MPICH_', 'GLOO_', 'HSA_', 'TORCH_NCCL_', 'OMPI_MCA_', 'UCX_',
             'OMP_NUM_THREADS', 'SLINGTORCH_')


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md; send_receive: src/sendrecv.cu)."""
    factor = {'all_reduce': 2 * (ranks - 1) / ranks, 'broadcast': 1.0, 'send_receive': 1.0}
    return factor.get(operation, (ranks - 1) / ranks)


def elements(operation: str, size: int, ranks: int) -> tuple:
    """Elements of a rank's buffers (send, receive) for a size as nccl-tests defines it: the size of the whole array, of
    which each rank has a part in some operations. receive is 0 if one buffer serves for both."""
    count = size // ITEM
    part = max(1, count // ranks)
    return {'all_reduce': (count, 0), 'broadcast': (count, 0), 'send_receive': (count, count),
            'all_gather': (part, part * ranks), 'reduce_scatter': (part * ranks, part),
            'all_to_all': (part * ranks, part * ranks)}[operation]


def expected(operation: str, ranks: int, rank: int) -> list:
    """What a rank must receive: the value of each part of what it receives, which are equally long."""
    values = [other % VALUES + 1 for other in range(ranks)]
    return {'all_reduce': [sum(values)], 'reduce_scatter': [sum(values)], 'broadcast': values[:1],
            'send_receive': [values[rank - 1]]}.get(operation, values)


def largest_size(operation: str, ranks: int, free: float) -> int:
    """The largest size that fits into `free` bytes of memory, one rank's share."""
    size = 2 ** 40
    return int(MEMORY_SHARE * free * size / (2 * ITEM * sum(elements(operation, size, ranks))))


def choose_gpu(torch: 'Any', name: str, local_rank: int) -> 'Any':
    """Select this rank's GPU; returns it."""
    seen = torch.cuda.device_count()
    if seen == 0:
        raise BenchError("%s sees no GPU: ask the scheduler for GPUs (Slurm: --gpus-per-node)" % name)
    if seen > 1 and local_rank >= seen:
        raise BenchError("%s is local rank %d, but sees only %d GPUs: start one rank per GPU"
                         % (name, local_rank, seen))
    device = torch.device('cuda', local_rank if seen > 1 else 0)
    torch.cuda.set_device(device)
    return device


class Measurement:
    """
    The job's process group: measures operations, and reports what it cannot measure.

    :ivar kind: one of KINDS
    :ivar name: this rank and its node, for messages
    :ivar network: the network that carries the data; all networks if nodes differ
    """

    def __init__(self, options: 'Any') -> None:
        try:
            self.rank, self.ranks, local_rank, self.local_ranks = (
                int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'))
        except (KeyError, ValueError) as err:
            raise BenchError("%s is not set: start it with the runscript, as in 'srun -N2 --ntasks-per-node=4 "
                             "$RUNSCRIPTS/conda-python-distributed --bench'" % err)
        import torch
        import torch.distributed as dist
        self.options, self.torch, self.dist, self.node = options, torch, dist, Machine().node
        self.name = "rank %d on %s" % (self.rank, self.node)
        self.kind = options.backend or (
            'nccl' if torch.cuda.is_available() and dist.is_nccl_available() else 'gloo')
        self.device = choose_gpu(torch, self.name, local_rank) if self.kind in ('nccl', 'mpi-gpu') else 'cpu'
        if not os.environ.get('OMP_NUM_THREADS'):
            torch.set_num_threads(1)
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
        self.maximum([0.0])  # connects
        said = {'gloo': os.environ.get('GLOO_DEVICE_TRANSPORT', 'TCP')}.get(self.kind, 'unknown')
        if log:
            heard = nccl.heard(log)
            said = ', provider '.join(filter(None, [heard['network'] or said, heard['provider']]))
        self.network = ' / '.join(sorted(set(self.gather(said))))

    def maximum(self, values: list) -> list:
        """For each value, the maximum over all ranks."""
        tensor = self.torch.tensor(values, dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(tensor, op=self.dist.ReduceOp.MAX)
        return tensor.tolist()

    def gather(self, thing: 'Any') -> list:
        """A list of each rank's object."""
        things = [None] * self.ranks
        self.dist.all_gather_object(things, thing)
        return things

    def forms(self, operation: str, send: 'Any', receive: 'Any') -> list:
        """Functions that run the operation once: on lists of tensors for a backend without the other form."""
        dist, ranks = self.dist, self.ranks
        # PyTorch 2.13 renamed them, and warns about the old names
        gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor
        scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor

        def exchange():
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, send, (self.rank + 1) % ranks),
                                                dist.P2POp(dist.irecv, receive, (self.rank - 1) % ranks)]):
                work.wait()

        return {
            'all_reduce': [lambda: dist.all_reduce(send)],
            'all_gather': [lambda: gather(receive, send), lambda: dist.all_gather(list(receive.chunk(ranks)), send)],
            'reduce_scatter': [lambda: scatter(receive, send),
                               lambda: dist.reduce_scatter(receive, list(send.chunk(ranks)))],
            'broadcast': [lambda: dist.broadcast(send, 0)],
            'all_to_all': [lambda: dist.all_to_all_single(receive, send),
                           lambda: dist.all_to_all(list(receive.chunk(ranks)), list(send.chunk(ranks)))],
            'send_receive': [exchange],
        }[operation]

    def supported(self, forms: list) -> 'Callable':
        """The first of these functions that works. :raises BenchError: the backend supports none"""
        problem = ''
        for form in forms:
            try:
                form()
                return form
            except RuntimeError as err:
                if not re.search('support|implement', str(err)):
                    raise   # a lost peer, for example
                problem = problem or str(err).splitlines()[0]
        raise BenchError("not supported by this backend: %s" % problem)

    def free(self) -> tuple:
        """The smallest share of free memory of all ranks, and where the figure is from."""
        if self.device == 'cpu':
            free, limit, source = Machine().free_memory()
            if free is None:
                raise OSError("/proc/meminfo does not give the free memory")
            share, where = free / self.local_ranks, '%s%s' % (
                self.node, limit and ', whose job may use %s (%s)' % (show_size(limit), source) or '')
        else:
            share, where = self.torch.cuda.mem_get_info(self.device)[0], 'the GPU of ' + self.name
        return min(self.gather((share, 'a rank has %s free on %s' % (show_size(share), where))))

    def seconds(self, function: 'Callable', repeats: int) -> list:
        """For each repetition, the seconds that its slowest rank took."""
        times = []
        if self.device == 'cpu':
            for _ in range(repeats):
                self.dist.barrier()
                start = time.perf_counter()
                function()
                times.append(time.perf_counter() - start)
        else:
            # as in nccl-tests, operations follow one another on the GPU, and events time them
            events = [[self.torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
            self.torch.cuda.synchronize()
            for before, after in events:
                before.record()
                function()
                after.record()
            self.torch.cuda.synchronize()
            times = [before.elapsed_time(after) / 1e3 for before, after in events]
        return self.maximum(times)

    def check(self, function: 'Callable', operation: str, send: 'Any', receive: 'Any') -> tuple:
        """Run once with known values; returns the number of wrong ones on all ranks, and the place of the first."""
        receive.fill_(-1)
        send.fill_(self.rank % VALUES + 1)
        function()
        number, where = 0, ''
        wanted = expected(operation, self.ranks, self.rank)
        for index, (part, value) in enumerate(zip(receive.chunk(len(wanted)), wanted)):
            at = (part != value).nonzero().flatten()
            if len(at) and not number:
                where = 'value %d is %g but must be %g' % (index * len(part) + int(at[0]), part[at[0]], value)
            number += len(at)
        found = self.gather((number, '%s: %s' % (self.name, where)))
        return sum(count for count, _ in found), next((text for count, text in found if count), None)

    def operation(self, operation: str) -> 'Iterator':
        """Measure all sizes of an operation; yields rows for the file. :raises BenchError: the rest is not possible"""
        if operation == 'send_receive' and self.ranks == 1:
            raise BenchError('a single rank has no partner')
        free, why = self.free()
        size, largest = self.options.min, largest_size(operation, self.ranks, free)
        while size <= self.options.max:
            if size > largest:
                raise BenchError('no size from %s on: %s' % (show_size(size), why))
            made = [self.torch.empty(count, dtype=self.torch.float32, device=self.device)
                    for count in elements(operation, size, self.ranks) if count]
            tensors = made[0], made[-1]     # the same if the operation works in place
            function = self.supported(self.forms(operation, *tensors))
            wrong, where = self.check(function, operation, *tensors)
            estimate = statistics.median(self.seconds(function, WARM_UP))
            repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(self.options.seconds / max(estimate, 1e-6))))
            # meanwhile, sums grow to infinity, which does not change the time
            seconds = statistics.median(self.seconds(function, repeats))
            again, where_again = self.check(function, operation, *tensors)
            actual = ITEM * max(tensors[0].numel(), tensors[1].numel())
            yield {
                'kind': self.kind, 'operation': operation, 'size': size, 'bytes': actual, 'seconds': seconds,
                'repeats': repeats, 'algorithm_bandwidth': actual / seconds / 1e9,
                'bus_bandwidth': actual / seconds / 1e9 * bus_factor(operation, self.ranks),
                'wrong': wrong + again, 'first_wrong': where or where_again,
            }
            del made, tensors, function
            if estimate > LONGEST and size * self.options.factor <= self.options.max:
                raise BenchError('no size above %s, which took %s' % (show_size(size), show_time(estimate)))
            size *= self.options.factor


def new_record(measurement: Measurement) -> dict:
    """The record before the first operation."""
    torch, kind = measurement.torch, measurement.kind
    versions, notes = {'torch': str(torch.__version__)}, []
    if torch.cuda.is_available():
        versions['gpu'] = torch.cuda.get_device_name(0)
    if kind == 'nccl':
        versions['nccl'] = '.'.join(map(str, torch.cuda.nccl.version()))
    if kind == 'gloo' and not measurement.options.backend:
        notes.append("gloo, on CPUs: PyTorch %s sees no GPU, or has no NCCL" % torch.__version__)
    return {
        'format': FORMAT, 'version': VERSION, 'complete': False, 'date': time.strftime('%Y-%m-%d %H:%M'),
        'ranks': measurement.ranks, 'ranks_per_node': measurement.local_ranks,
        'nodes': -(-measurement.ranks // measurement.local_ranks),
        'site': os.environ.get('SLINGTORCH_SITE'), 'versions': versions,
        'environment': {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        'line_rates': Machine().line_rates(), 'networks': {kind: measurement.network}, 'notes': notes, 'results': []}


def run(options: 'Any') -> dict:
    """Measure everything; returns the record."""
    measurement = Measurement(options)
    record = new_record(measurement)

    def say(*lines):
        if measurement.rank == 0:
            print(*lines, sep='\n', flush=True)

    def save():
        if measurement.rank == 0 and options.json:
            write(record, options.json)

    save()  # fails at once if the directory is not writable
    say(*head(record))
    for operation in options.operations:
        try:
            for row in measurement.operation(operation):
                record['results'].append(row)
                say(table_row(record, row))
        except BenchError as err:
            record['notes'].append('%s: %s' % (operation, err))
        save()
    measurement.dist.destroy_process_group()
    record['complete'] = True
    say(*summary(record))
    save()
    return record


def main(argv: list) -> int:
    """Run bench in one rank; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog='conda-python-distributed --bench', formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__.split('\n\nIt needs')[0], epilog='backends:\n' + '\n'.join(
            '  %-14s %s' % pair for pair in KINDS.items()))
    parser.add_argument('--backend', choices=list(KINDS), help="default: nccl with GPUs, else gloo")
    parser.add_argument('--operations', nargs='+', choices=OPERATIONS, default=OPERATIONS, help="default: all")
    parser.add_argument('--min', type=parse_size, default='32K', metavar='SIZE', help="default: 32K")
    parser.add_argument('--max', type=parse_size, default='16G', metavar='SIZE',
                        help="default: 16G, or what fits into the free memory")
    parser.add_argument('--factor', type=int, default=2, help="factor from one size to the next (default: 2)")
    parser.add_argument('--seconds', type=float, default=0.3,
                        help="time for each size, in 3 to 1000 repetitions (default: 0.3)")
    parser.add_argument('--json', metavar='FILE', type=file_to_write, help="write the results for 'slingtorch bench'")
    options = parser.parse_args(argv)
    if options.factor < 2 or options.min < ITEM or options.max < options.min:
        parser.error("--factor must be at least 2, --min at least 4, and --max at least --min")
    try:
        return 1 if wrong_values(run(options)) else 0
    except BenchError as err:
        text = str(err)
    except ImportError as err:
        text = "no PyTorch in %s (%s): load its module" % (sys.executable, err)
    except Exception as err:  # pylint: disable=broad-except
        # only the first line: others may be a C++ stack
        text = "%s: %s" % (type(err).__name__, (str(err).splitlines() or [''])[0][:500])
        if re.search('onnection|imeout|timed out|peer|ncclRemoteError|nccl', str(err)):
            text += ". A rank or its node is gone, or the network is blocked: the job's first error tells which " \
                    "(srun and mpiexec name the rank that ended first)"
    gather.say('bench', Machine(), text)
    sys.stdout.flush()
    # destroying a process group hangs if a peer is gone
    os._exit(1)
