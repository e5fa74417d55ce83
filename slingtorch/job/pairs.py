# SPDX-License-Identifier: GPL-2.0-only
"""
One node's part of vet.py, in a process of its own, since libraries may crash or hang: measures with other nodes over
NCCL or RCCL on all GPUs that PyTorch sees, else over gloo.

It meets rank 0's vet.py as meet.py describes; 'go' is {'ring': numbers of the nodes that take part, 'rounds'}. Each
pair has a process group of its own for each GPU, so that a failing pair does not affect others. Besides the groups'
keys, the store has done-T, how many nodes have ended round T, and next-T once all have.
"""
import contextlib
import datetime
import os
import threading
import time

from . import meet, messages, nccl
from .kinds import Any
from .machine import Machine, seconds_to_wait
from .probe import first_lines, patience

# What one volley sends: bytes at first, the factor between volleys, and the seconds after which no larger
# one follows. A volley of 4 bytes before sets up the connection.
FIRST, FACTOR, ENOUGH = 64 << 10, 8, 0.2
# bytes of one message at most
MESSAGE = 32 << 20
# seconds for a pair, and how much later a round ends if one of its nodes hangs
LIMIT, LATER = 10, 2
# seconds that rank 0 waits longer for reports, and nodes for the verdict
SLACK = 5


def pairs_of(turn: int, nodes: int) -> list:
    """The pairs of nodes in a round, by the circle method: each pair meets once in nodes - 1 (or nodes) rounds."""
    moving = list(range(1, nodes + nodes % 2))
    ring = [0] + moving[turn:] + moving[:turn]
    half = len(ring) // 2
    return [sorted(pair) for pair in zip(ring[:half], reversed(ring[half:])) if max(pair) < nodes]


class Exchange:
    """
    This node's end of its pairs on one device.

    :param gpu: its number, as PyTorch counts them; None for gloo on the CPU
    :ivar best: GB/s of the best pair; 0 if none worked, and `why` not
    """

    def __init__(self, gpu: 'Any') -> None:
        import torch
        import torch.distributed as dist
        self.dist, self.gpu, self.kept = dist, gpu, []  # type: Any, Any, list
        self.best, self.why = 0.0, "no answer within %d s" % LIMIT
        device = torch.device('cpu') if gpu is None else torch.device('cuda', gpu)
        self.buffer = torch.zeros(MESSAGE, dtype=torch.uint8, device=device)
        # finds errors that need no partner, such as an interface that does not exist
        self.group(dist.HashStore(), 0, 1).allreduce([self.buffer[:4]]).wait()
        if gpu is not None:
            torch.cuda.synchronize(device)

    def group(self, store: 'Any', rank: int, ranks: int) -> 'Any':
        """A process group. It is kept, since destroying one of NCCL may wait for the other end."""
        # NCCL's watchdog would end the process, so its limit is long: volley() has a limit itself
        kind, limit = (self.dist.ProcessGroupGloo, LIMIT) if self.gpu is None else (self.dist.ProcessGroupNCCL, 3600)
        self.kept.append(kind(store, rank, ranks, datetime.timedelta(seconds=limit)))
        return self.kept[-1]

    def volley(self, transfer: 'Any', other: int, size: int, end: float) -> float:
        """Send or receive this number of bytes; returns the seconds that it took."""
        begin, works = time.monotonic(), []
        while size > 0:
            works.append(transfer([self.buffer[:min(size, MESSAGE)]], other, 0))
            size -= MESSAGE
        for work in works:
            # NCCL's wait() makes only the GPU wait
            while self.gpu is not None and not work.is_completed():
                if time.monotonic() > end:
                    raise RuntimeError("no answer")
                time.sleep(0.0005)
            work.wait()
        return time.monotonic() - begin

    def pair(self, group: 'Any', store: meet.Store, rank: int, key: str, end: float) -> float:
        """Send and receive, one after the other; returns the mean of both directions, in bytes per second."""
        size, speed = 4, 0.0
        while size:
            transfers = [group.send, group.recv] if rank == 0 else [group.recv, group.send]
            seconds = sum(self.volley(transfer, 1 - rank, size, end) for transfer in transfers)
            if rank == 0:   # the last one to receive
                more = max(FIRST, size * FACTOR) if seconds < ENOUGH or size < FIRST else 0
                store.put('%s-%d' % (key, size), [more, 2 * size / seconds])
            size, speed = store.get('%s-%d' % (key, size), end)
        return speed

    def meet(self, store: meet.Store, rank: int, key: str) -> None:
        """Measure with another node, in a thread."""
        group = None    # type: Any
        try:
            # a client of its own, since threads cannot share one
            own, key = store.another(), '%s-%s' % (key, self.gpu)
            group = self.group(self.dist.PrefixStore(key, own.store), rank, 2)
            self.best = max(self.best, self.pair(group, own, rank, key, time.monotonic() + LIMIT) / 1e9)
        except BaseException as err:    # every error is an answer
            self.why = first_lines(err)
            if group and self.gpu is not None:
                getattr(group, 'abort', lambda: None)()     # since 2.6; ends kernels that would wait on the GPU


def play(pipe: 'Any') -> None:
    """In a messages.Child: take_part(), or what went wrong."""
    try:
        take_part(pipe)
    except BaseException as err:    # every error is an answer
        pipe.send({'error': str(err) if isinstance(err, meet.NotMet) else first_lines(err)})


def take_part(pipe: 'Any') -> None:
    """Join, measure in every round, and say rank 0's verdict."""
    environ, log, begin, machine = os.environ, messages.scratch_file(), time.monotonic(), Machine()
    nccl.log_into(environ, log)
    ends, gpus, error, paired = [], 0, '', False    # type: list, int, str, bool
    try:
        import torch
        gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
        ends = [Exchange(gpu) for gpu in (range(gpus) if gpus else [None])]
    except BaseException as err:    # every error is an answer
        error = first_lines(err)
    seconds = patience(time.monotonic() - begin, int(environ['WORLD_SIZE']), seconds_to_wait(environ))
    try:
        store = meet.Store(environ, seconds, False)
    except meet.NotMet as err:
        raise meet.NotMet(error or meet.why_not(environ, str(err)))
    # in meet.py, other nodes have ranks from 1; here also that of rank 0. Others may take long to import PyTorch
    said = store.join({'node': machine.node, 'rank': int(environ['RANK']) + 1, 'ranks': 1, 'error': error,
                       'gpus': gpus, 'rates': machine.line_rates()}, time.monotonic() + 2 * seconds)
    if not messages.has_form(said, {'ring': [int], 'rounds': int}) or not 0 <= said['rounds'] <= len(said['ring']):
        raise meet.NotMet("the node of rank 0 sent a message that this version of slingtorch does not know")
    ring, own, longest = said['ring'], store.number, said['rounds'] * (LIMIT + LATER)
    pipe.send({'longest': longest})     # whoever is silent for longer hangs
    for turn in range(said['rounds'] if own in ring else 0):
        end = time.monotonic() + LIMIT + LATER
        for pair in ([ring[place] for place in places] for places in pairs_of(turn, len(ring))):
            if own in pair:
                paired, words = True, (store, pair.index(own), 'pair-%d-%d' % tuple(pair))
                threads = [threading.Thread(target=each.meet, args=words, daemon=True) for each in ends]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(max(0, end - LATER / 2 - time.monotonic()))
        if store.count('done-%d' % turn, 1) == len(ring):
            store.put('next-%d' % turn, True)
        with contextlib.suppress(meet.NotMet):  # one hangs
            store.get('next-%d' % turn, end)
    best = [each.best or each.why for each in ends if paired]
    pipe.send({'word': store.report({'best': best, **(nccl.heard(log) if gpus and log else {})},
                                    time.monotonic() + longest + SLACK)})
