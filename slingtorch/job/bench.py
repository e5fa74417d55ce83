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
import atexit
import datetime
import gc
import os
import re
import shutil
import statistics
import sys
import tempfile
import time

from . import nccl
from .kinds import Any, Callable, Iterable, Iterator, Optional
from .machine import Machine
from .records import (FORMAT, KINDS, OPERATIONS, VERSION, BenchError, file_to_write, head, parse_size, show_size,
                      show_time, summary, table_head, table_row, write, wrong_values)

ITEM = 4
"""Bytes of a float32, the type of all data sent."""

PERIOD, STRIDE = 1021, 17
"""Element i of rank r is (i + 17 r) mod 1021: sums over 16,000 ranks are exact in a float32. Since 1021 is prime, no
two blocks with the size of a power of two look alike."""

WARM_UP, MIN_REPEATS, MAX_REPEATS = 3, 3, 1000
LONGEST = 5
"""If an operation takes more seconds than this, no larger size follows."""
MEMORY_SHARE = 0.8
"""Share of the free memory to use; libraries are assumed to need the size of the messages once more (gloo does)."""

VARIABLES = ('NCCL_', 'RCCL_', 'FI_', 'OFI_NCCL_', 'MPICH_', 'GLOO_', 'HSA_', 'TORCH_NCCL_', 'OMPI_MCA_', 'UCX_',
             'OMP_NUM_THREADS', 'SLINGTORCH_')
"""Prefixes of the variables that the file keeps: network settings, no secrets."""


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


def expected(operation: str, count: int, ranks: int, rank: int) -> list:
    """What a rank must receive: [(first element, number of elements, sender or None for the sum over all ranks,
    position in the sender's data)]; `count` is the number of elements received."""
    of_one = {'all_reduce': (None, 0), 'reduce_scatter': (None, rank * count), 'broadcast': (0, 0),
              'send_receive': ((rank - 1) % ranks, 0)}
    if operation in of_one:
        return [(0, count, *of_one[operation])]
    part = count // ranks
    return [(other * part, part, other, rank * part if operation == 'all_to_all' else 0) for other in range(ranks)]


def sizes_between(smallest: int, largest: int, factor: int) -> list:
    """Sizes from the smallest, each `factor` times the one before."""
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


def largest_size(operation: str, ranks: int, free: float) -> int:
    """The largest size that fits into `free` bytes of memory, one rank's share."""
    size = 2 ** 40
    return int(MEMORY_SHARE * free * size / (2 * ITEM * sum(elements(operation, size, ranks))))


class TorchBackend:
    """The operations of a torch.distributed backend, on tensors of its device."""

    def __init__(self, kind: str, job: 'Job') -> None:
        import torch
        import torch.distributed as dist
        self.torch, self.dist = torch, dist
        self.device = job.gpu() if kind in ('nccl', 'mpi-gpu') else 'cpu'
        name = kind.replace('-gpu', '')
        options = {'timeout': datetime.timedelta(seconds=job.timeout)}  # type: dict
        if name != 'mpi':  # MPI knows its ranks itself
            options.update(store=dist.PrefixStore(kind, job.store()), rank=job.rank, world_size=job.ranks)
        dist.init_process_group(name, **options)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def operation(self, name: str, send: 'Any', receive: 'Any') -> 'Any':
        """A function that runs the operation once."""
        dist, size = self.dist, self.size
        following, previous = (self.rank + 1) % size, (self.rank - 1) % size
        # PyTorch 2.13 renamed them, and warns about the old names
        gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor
        scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor

        def exchange():
            work = dist.batch_isend_irecv([dist.P2POp(dist.isend, send, following),
                                           dist.P2POp(dist.irecv, receive, previous)])
            for each in work:
                each.wait()

        return {
            'all_reduce': lambda: dist.all_reduce(send),
            'all_gather': lambda: gather(receive, send),
            'reduce_scatter': lambda: scatter(receive, send),
            'broadcast': lambda: dist.broadcast(send, 0),
            'all_to_all': lambda: dist.all_to_all_single(receive, send),
            'send_receive': exchange,
        }[name]

    def operation_on_lists(self, name: str, send: 'Any', receive: 'Any') -> 'Any':
        """The same on a list of tensors, for a backend without the other form; None if this form does not exist."""
        return {
            'all_gather': lambda: self.dist.all_gather(list(receive.chunk(self.size)), send),
            'reduce_scatter': lambda: self.dist.reduce_scatter(receive, list(send.chunk(self.size))),
            'all_to_all': lambda: self.dist.all_to_all(list(receive.chunk(self.size)), list(send.chunk(self.size))),
        }.get(name)

    def barrier(self) -> None:
        self.dist.barrier()

    def maximum(self, values: list) -> list:
        """For each value, the maximum over all ranks."""
        tensor = self.torch.tensor(values, dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(tensor, op=self.dist.ReduceOp.MAX)
        return tensor.tolist()

    def gather(self, thing: 'Any') -> list:
        """A list of each rank's object."""
        things = [None] * self.size
        self.dist.all_gather_object(things, thing)
        return things

    def close(self) -> None:
        self.dist.destroy_process_group()


class Data:
    """The pattern on one device, written and compared in blocks, so that no second copy of a message is needed."""

    def __init__(self, torch: 'Any', device: 'Any', ranks: int) -> None:
        self.torch = torch
        base = torch.arange(PERIOD, dtype=torch.float64)
        total = sum((base + rank * STRIDE) % PERIOD for rank in range(ranks))
        self.tiles = {one: row.to(torch.float32).repeat(1028).to(device) for one, row in ((True, base), (False, total))}
        self.block = PERIOD * 1027

    def blocks(self, tensor: 'Any', first: int, count: int, source: 'Optional[int]', position: int) -> 'Iterator':
        """Pairs (part of the tensor, values that it must have); for `source` and `position`, see expected()."""
        tile = self.tiles[source is not None]
        for start in range(0, count, self.block):
            length = min(self.block, count - start)
            phase = (position + start + (source or 0) * STRIDE) % PERIOD
            yield tensor[first + start:first + start + length], tile[phase:phase + length]

    def fill(self, tensor: 'Any', rank: int) -> None:
        """Write what a rank sends."""
        for part, values in self.blocks(tensor, 0, tensor.numel(), rank, 0):
            part.copy_(values)

    def wrong(self, tensor: 'Any', segments: list) -> tuple:
        """The number of wrong values, and the place of the first one."""
        number, where = 0, None
        for first, count, source, position in segments:
            for part, values in self.blocks(tensor, first, count, source, position):
                differ = part != values
                found = int(differ.sum())
                if found and not number:
                    at = int(differ.nonzero()[0])
                    where = 'value %d is %g but must be %g' % (
                        (part.data_ptr() - tensor.data_ptr()) // ITEM + at, float(part[at]), float(values[at]))
                number += found
        return number, where


class Job:
    """This rank's place in the job, from the runscript's variables."""

    def __init__(self, options: 'Any') -> None:
        missing = [name for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')
                   if not os.environ.get(name, '').isdigit()]
        if missing:
            raise BenchError("%s not set: start it with the runscript, as in 'srun -N2 --ntasks-per-node=4 "
                             "$RUNSCRIPTS/conda-python-distributed --bench'" % ', '.join(missing))
        self.rank, self.ranks, self.local_rank, self.local_ranks = (
            int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'))
        self.node = Machine().node
        self.timeout = options.timeout
        self.name = "rank %d on %s" % (self.rank, self.node)
        self._store = None

    def store(self) -> 'Any':
        """PyTorch's store at MASTER_ADDR and MASTER_PORT, the same for all backends."""
        import torch.distributed as dist
        if self._store is None:
            self._store, _, _ = next(dist.rendezvous('env://', timeout=datetime.timedelta(seconds=self.timeout)))
        return self._store

    def gpu(self) -> 'Any':
        """Select this rank's GPU; returns it."""
        import torch
        seen = torch.cuda.device_count()
        if seen == 0:
            raise BenchError("%s sees no GPU: ask the scheduler for GPUs (Slurm: --gpus-per-node)" % self.name)
        if seen > 1 and self.local_rank >= seen:
            raise BenchError("%s is local rank %d, but sees only %d GPUs: start one rank per GPU"
                             % (self.name, self.local_rank, seen))
        device = torch.device('cuda', self.local_rank if seen > 1 else 0)
        torch.cuda.set_device(device)
        return device


def at_hand() -> dict:
    """{kind: None, or why bench cannot measure it}"""
    import torch
    import torch.distributed as dist
    if not dist.is_available():
        raise BenchError("this PyTorch has no torch.distributed")
    gpu = None if torch.cuda.is_available() else "PyTorch %s sees no GPU" % torch.__version__
    found = {
        'nccl': gpu or (None if dist.is_nccl_available() else "this PyTorch was built without NCCL or RCCL"),
        'gloo': None if dist.is_gloo_available() else "this PyTorch was built without gloo",
        'mpi': None if dist.is_mpi_available() else "this PyTorch was built without MPI",
    }
    # an MPI that cannot access GPU memory crashes, so mpi-gpu runs only on request if nothing shows that it can
    aware = None if os.environ.get('MPICH_GPU_SUPPORT_ENABLED') == '1' else \
        "MPICH_GPU_SUPPORT_ENABLED is not 1; if this MPI supports GPU memory, name the backend with --backends"
    found['mpi-gpu'] = found['mpi'] or gpu or aware
    return found


class Measurement:
    """One kind of communication in this job: measures operations, and reports what it cannot measure."""

    def __init__(self, kind: str, job: Job, options: 'Any') -> None:
        import torch
        self.kind, self.job, self.options, self.torch = kind, job, options, torch
        self.comm = TorchBackend(kind, job)
        if self.comm.size != job.ranks:
            raise BenchError("MPI sees %d rank(s), but the job has %d: start the ranks with a launcher of this MPI "
                             "(Slurm: srun --mpi=pmi2, pmix or cray_shasta), or leave MPI out: --backends nccl,gloo"
                             % (self.comm.size, job.ranks))
        self.data = Data(torch, self.comm.device, job.ranks)
        self.comm.maximum([0.0])  # connects
        self.network = self.find_network()

    def find_network(self) -> str:
        """The network that carries the data, and the source; all networks if nodes differ."""
        said = 'unknown'
        if self.kind == 'nccl':
            log = Machine().read(os.environ.get('NCCL_DEBUG_FILE') or '/nowhere')
            network, provider, lines = nccl.network(log)
            said = ', '.join(filter(None, [network, provider and 'provider ' + provider])) or said
            said += ' (%s)' % '; '.join(lines) if lines else '' if log else \
                " (you set NCCL_DEBUG or NCCL_DEBUG_FILE: see NCCL's own output)"
        elif self.kind == 'gloo':
            said = os.environ.get('GLOO_DEVICE_TRANSPORT', 'TCP')
        return ' / '.join(sorted(set(self.comm.gather(said))))

    def free(self) -> tuple:
        """The smallest share of free memory of all ranks, and where the figure is from."""
        if self.comm.device == 'cpu':
            free, limit, source = Machine().free_memory()
            if free is None:
                raise BenchError("%s: /proc/meminfo does not give the free memory; set --max" % self.job.name)
            share = free / self.job.local_ranks
            why = '%s %s, for %d rank(s)' % (show_size(free), 'left of the %s that the job may use here (%s)' % (
                show_size(limit), source) if limit else 'free on this node', self.job.local_ranks)
        else:
            share = self.torch.cuda.mem_get_info(self.comm.device)[0]
            why = '%s free on the GPU' % show_size(share)
        return min(self.comm.gather((share, why + ' on ' + self.job.node)))

    def seconds(self, function: 'Callable', repeats: int) -> list:
        """For each repetition, the seconds that its slowest rank took."""
        times = []
        if self.comm.device == 'cpu':
            barrier, clock = self.comm.barrier, time.perf_counter
            for _ in range(repeats):
                barrier()
                start = clock()
                function()
                times.append(clock() - start)
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
        return self.comm.maximum(times)

    def check(self, function: 'Callable', operation: str, send: 'Any', receive: 'Any') -> tuple:
        """Run once with the pattern; returns the number of wrong values on all ranks, and the place of the first."""
        rank, ranks = self.job.rank, self.job.ranks
        self.data.fill(send, rank)
        if receive is not send:
            receive.fill_(-1)
        function()
        number, where = self.data.wrong(receive, expected(operation, receive.numel(), ranks, rank))
        found = self.comm.gather((number, '%s: %s' % (self.job.name, where)))
        return sum(count for count, _ in found), next((text for count, text in found if count), None)

    def buffers(self, operation: str, size: int) -> 'Optional[tuple]':
        """(send, receive), one tensor if the operation works in place; None if a rank has too little memory."""
        send, receive = elements(operation, size, self.job.ranks)
        try:
            made = [self.torch.empty(count, dtype=self.torch.float32, device=self.comm.device)
                    for count in (send, receive) if count]
        except (RuntimeError, MemoryError):
            made = []
        return None if self.comm.maximum([not made])[0] else (made[0], made[-1])

    def choose_form(self, operation: str, send: 'Any', receive: 'Any') -> 'Callable':
        """The operation's function in a form that the backend supports. :raises BenchError: it supports none"""
        problem = None
        for form in (self.comm.operation, self.comm.operation_on_lists):
            function = form(operation, send, receive)
            try:
                if function:
                    function()
                    return function
            except RuntimeError as err:
                problem = problem or str(err).splitlines()[0]
                if not re.search('support|implement', str(err)) and form == self.comm.operation:
                    raise  # a lost peer, for example
        raise BenchError("not supported by this backend: %s" % problem)

    def operation(self, operation: str, say: 'Callable') -> 'Any':
        """Measure all sizes of an operation; yields rows for the file."""
        if operation == 'send_receive' and self.job.ranks == 1:
            say('a single rank has no partner')
            return
        free, why = self.free()
        largest = largest_size(operation, self.job.ranks, free)
        wanted = sizes_between(self.options.min, self.options.max, self.options.factor)
        sizes = [size for size in wanted if size <= largest]
        if len(sizes) < len(wanted):
            say('up to %s, not %s: %s' % (show_size(sizes[-1]) if sizes else 'no size', show_size(wanted[-1]), why))
        for size in sizes:
            tensors = self.buffers(operation, size)
            if tensors is None:
                say('a rank has too little memory for %s' % show_size(size))
                return
            try:
                function = self.choose_form(operation, *tensors)
            except BenchError as err:
                say(str(err))
                return
            wrong, where = self.check(function, operation, *tensors)
            estimate = statistics.median(self.seconds(function, WARM_UP))
            repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(self.options.seconds / max(estimate, 1e-6))))
            self.seconds(function, min(20, repeats // 5))
            gc.disable()
            # meanwhile, sums grow to infinity, which does not change the time
            times = self.seconds(function, repeats)
            gc.enable()
            again, where_again = self.check(function, operation, *tensors)
            actual = ITEM * max(tensors[0].numel(), tensors[1].numel())
            seconds = statistics.median(times)
            yield {
                'kind': self.kind, 'operation': operation, 'size': size, 'bytes': actual, 'seconds': seconds,
                'repeats': repeats, 'algorithm_bandwidth': actual / seconds / 1e9,
                'bus_bandwidth': actual / seconds / 1e9 * bus_factor(operation, self.job.ranks),
                'wrong': wrong + again, 'first_wrong': where or where_again,
            }
            del tensors, function
            if estimate > LONGEST and size != sizes[-1]:
                say('no size above %s, which took %s' % (show_size(size), show_time(estimate)))
                return


def versions(torch: 'Any', kinds: list) -> dict:
    """Versions of the software that affects the results."""
    found = {'torch': str(torch.__version__), 'python': '%d.%d.%d' % sys.version_info[:3]}
    for name in ('cuda', 'hip'):
        if getattr(torch.version, name, None):
            found[name] = getattr(torch.version, name)
    if torch.cuda.is_available():
        found['gpu'] = torch.cuda.get_device_name(0)
        if 'nccl' in kinds:
            version = torch.cuda.nccl.version()
            found['nccl'] = '.'.join(map(str, version)) if isinstance(version, tuple) else str(version)
    return found


def comma_list(known: 'Iterable[str]') -> 'Callable[[str], list]':
    """A type for argparse: a list of known names, separated by commas."""
    def names(text):
        found = [name.strip() for name in text.split(',') if name.strip()]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError("'%s' is unknown: choose from %s" % (name, ', '.join(known)))
        return found
    return names


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser, the same for all ranks."""
    parser = argparse.ArgumentParser(
        prog='conda-python-distributed --bench', formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__.split('\n\nIt needs')[0], epilog='backends:\n' + '\n'.join(
            '  %-14s %s' % pair for pair in KINDS.items()))
    parser.add_argument('--backends', type=comma_list(KINDS), metavar='LIST',
                        help="separated by commas (default: all that PyTorch has)")
    parser.add_argument('--operations', type=comma_list(OPERATIONS), default=OPERATIONS, metavar='LIST',
                        help="default: %s" % ','.join(OPERATIONS))
    parser.add_argument('--min', type=parse_size, default='32K', metavar='SIZE', help="default: 32K")
    parser.add_argument('--max', type=parse_size, default='16G', metavar='SIZE',
                        help="default: 16G, or what fits into the free memory")
    parser.add_argument('--factor', type=int, default=2, help="factor from one size to the next (default: 2)")
    parser.add_argument('--seconds', type=float, default=0.3,
                        help="time for each size, in 3 to 1000 repetitions (default: 0.3)")
    parser.add_argument('--timeout', type=int, default=300, metavar='SECONDS',
                        help="time after which a silent rank counts as dead (default: 300)")
    parser.add_argument('--json', metavar='FILE', type=file_to_write,
                        help="write the results for 'slingtorch bench'")
    return parser


def ask_nccl() -> 'Optional[str]':
    """Let NCCL log which network it uses to a private file, which bench parses; returns the file's directory."""
    if os.environ.get('NCCL_DEBUG_FILE') or os.environ.get('NCCL_DEBUG', '').upper() in ('INFO', 'TRACE'):
        return None
    directory = tempfile.mkdtemp(prefix='slingtorch-bench-')
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ.update(NCCL_DEBUG='INFO', NCCL_DEBUG_SUBSYS='INIT,NET', NCCL_DEBUG_FILE=os.path.join(directory, 'nccl'))
    return directory


def new_record(job: Job, torch: 'Any', kinds: list, why_not: dict) -> dict:
    """The record before the first measurement."""
    return {
        'format': FORMAT, 'version': VERSION, 'complete': False, 'date': time.strftime('%Y-%m-%d %H:%M'),
        'ranks': job.ranks, 'ranks_per_node': job.local_ranks, 'nodes': -(-job.ranks // job.local_ranks),
        'site': os.environ.get('SLINGTORCH_SITE'), 'versions': versions(torch, kinds),
        'environment': {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        'line_rates': Machine().line_rates(), 'networks': {}, 'results': [],
        # mentions mpi-gpu only if mpi on CPUs can be measured
        'notes': ['not measured: %s: %s' % (kind, why) for kind, why in why_not.items()
                  if why and not (kind == 'mpi-gpu' and why_not['mpi'])],
    }


def run(options: 'Any', job: Job) -> dict:
    """Measure everything; returns the record."""
    try:
        import torch
    except ImportError as err:
        raise BenchError("no PyTorch in %s (%s): load its module" % (sys.executable, err))
    if not os.environ.get('OMP_NUM_THREADS'):
        torch.set_num_threads(1)
    why_not = at_hand()
    if options.backends:
        kinds = [kind for kind in options.backends if not why_not[kind] or '--backends' in why_not[kind]]
        why_not.update((kind, None) for kind in kinds)
        refused = [kind for kind in options.backends if kind not in kinds]
        if refused:
            raise BenchError('; '.join('%s cannot be measured: %s' % (kind, why_not[kind]) for kind in refused))
    else:
        kinds = [kind for kind in KINDS if not why_not[kind]]
    if not kinds:
        raise BenchError("nothing to measure: %s" % '; '.join('%s: %s' % pair for pair in why_not.items()))
    record = new_record(job, torch, kinds, why_not)

    def say(*lines):
        if job.rank == 0:
            print(*lines, sep='\n', flush=True)

    def note(text):
        text = '%s, %s: %s' % (kind, operation, text)
        if text not in record['notes']:
            record['notes'].append(text)

    def save():
        if job.rank == 0 and options.json:
            write(record, options.json)

    save()  # fails at once if the directory is not writable
    say(*head(record))
    for kind in kinds:
        try:
            measurement = Measurement(kind, job, options)
        except BenchError as err:
            if options.backends:
                raise
            record['notes'].append('not measured: %s: %s' % (kind, err))
            continue
        record['networks'][kind] = measurement.network
        say(*table_head(dict(record, networks={kind: measurement.network})))
        for operation in options.operations:
            for row in measurement.operation(operation, note):
                record['results'].append(row)
                say(table_row(record, row))
            save()
        measurement.comm.close()
    record['complete'] = True
    say(*summary(record))
    save()
    return record


def main(argv: list) -> int:
    """Run bench in one rank; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.factor < 2 or options.min < ITEM or options.max < options.min:
        parser.error("--factor must be at least 2, --min at least 4, and --max at least --min")
    what, directory = "rank %s" % os.environ.get('RANK', '?'), None
    try:
        job = Job(options)
        what = job.name
        directory = ask_nccl()
        return 1 if wrong_values(run(options, job)) else 0
    except BenchError as err:
        text = str(err)
    except Exception as err:  # pylint: disable=broad-except
        # only the first line: others may be a C++ stack
        text = "%s: %s" % (type(err).__name__, (str(err).splitlines() or [''])[0][:500])
        if re.search('onnection|imeout|timed out|peer|ncclRemoteError|nccl', str(err)):
            text += ". A rank or its node is gone, or the network is blocked: the job's first error tells which " \
                    "(srun and mpiexec name the rank that ended first)"
    print("bench: %s: %s" % (what, text), file=sys.stderr, flush=True)
    sys.stdout.flush()
    if directory:
        shutil.rmtree(directory, ignore_errors=True)
    # destroying a process group hangs if a peer is gone
    os._exit(1)
