# SPDX-License-Identifier: GPL-2.0-only
"""
For vet.py: pairs of nodes measure over the backend of torch.distributed that a training uses (NCCL or RCCL on GPU
memory, else gloo). Each node runs a process for each of its GPUs:

    python job pairs NUMBER LANES           the number of the GPU, as PyTorch counts them, or 0; how many a node has

The process of rank 0 (vet.py) has the store (meet.py) and sets the pairs of each round. Each pair has its own process
group, so that a failing pair does not affect others.

Keys in the store, besides the groups' own:
    lanes, lane-N       how many processes have joined, and the first message of each
    round-T             {'pairs': [[process, process], ...]} of a round, or {'word': the verdict}
    done-T, did-T-N     how many have ended this round, and what process N received
    heard               how many have read the verdict
"""
import collections
import datetime
import json
import os
import threading
import time

from . import meet, messages, nccl
from .kinds import Any
from .machine import Machine, seconds_to_wait
from .probe import first_lines, patience

# What one volley sends: bytes at first and at most, the factor between volleys, and the seconds after which no larger
# one follows. A volley of 4 bytes before sets up the connection.
FIRST, LARGEST, FACTOR, ENOUGH = 64 << 10, 16 << 30, 8, 0.1
# bytes of one message at most
MESSAGE = 32 << 20
# Seconds for a pair; in the first round it also sets up the network
FIRST_LIMIT, LIMIT = 15, 8
# after so many failed pairs, and none that worked, a process takes no further part
FAILED = 3
COMES = {'rank': int, 'lane': int, 'lanes': int, 'node': str, 'ready': bool, 'backend': str, 'gpu': str, 'error': str,
         'absent': bool, 'rates': dict}


def say(descriptor: int, result: dict) -> None:
    """Print one JSON line."""
    os.write(descriptor, json.dumps(result).encode() + b'\n')


def pairs_of(turn: int, nodes: int) -> list:
    """The pairs of nodes in a round, by the circle method: each pair meets once in nodes - 1 (or nodes) rounds."""
    moving = list(range(1, nodes + nodes % 2))
    ring = [0] + moving[turn:] + moving[:turn]
    half = len(ring) // 2
    return [sorted(pair) for pair in zip(ring[:half], reversed(ring[half:])) if max(pair) < nodes]


class Absent(Exception):
    """There is nothing to measure with."""


class Exchange:
    """This process's end of its pairs. :raises Absent: PyTorch has no backend, or no such GPU"""

    def __init__(self, number: int) -> None:
        import torch
        import torch.distributed as dist
        self.torch, self.dist, self.kept, self.store = torch, dist, [], None  # type: Any, Any, list, Any
        gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
        if number >= max(1, gpus):
            raise Absent("PyTorch sees %d GPUs, but none with number %d" % (gpus, number))
        if not gpus and not dist.is_gloo_available():
            raise Absent("this PyTorch has no gloo and sees no GPU (MPI is not tried)")
        self.backend, self.gpu = 'nccl' if gpus else 'gloo', ''
        device = 'cpu'
        if gpus:
            device = torch.device('cuda', number)
            torch.cuda.set_device(device)
            told = torch.cuda.get_device_properties(device)
            self.gpu = 'GPU %d' % number
            if hasattr(told, 'pci_bus_id'):     # of newer releases
                self.gpu += ' (%04x:%02x:%02x.0)' % (told.pci_domain_id, told.pci_bus_id, told.pci_device_id)
        self.buffer = torch.zeros(MESSAGE, dtype=torch.uint8, device=device)
        # finds errors that need no partner, such as an interface that does not exist
        group = self.group(dist.HashStore(), 0, 60, 1)
        self.kept.append(group)
        group.allreduce([self.buffer[:4]]).wait()
        if gpus:
            torch.cuda.synchronize(device)

    def group(self, store: 'Any', rank: int, limit: float, ranks: int = 2) -> 'Any':
        """A process group of the two processes."""
        if self.backend == 'gloo':
            return self.dist.ProcessGroupGloo(store, rank, ranks, datetime.timedelta(seconds=limit))
        # NCCL's watchdog would end the process, so its limit is long: volley() has a limit itself
        return self.dist.ProcessGroupNCCL(store, rank, ranks, datetime.timedelta(hours=1))

    def volley(self, group: 'Any', sends: bool, other: int, size: int, end: float) -> float:
        """Send or receive this number of bytes; returns the seconds that it took."""
        begin, works = time.monotonic(), []
        while size > 0:
            part = [self.buffer[:min(size, MESSAGE)]]
            works.append(group.send(part, other, 0) if sends else group.recv(part, other, 0))
            size -= MESSAGE
        for work in works:
            if self.backend == 'gloo':
                work.wait()
            else:
                # NCCL's wait() makes only the GPU wait
                while not work.is_completed():
                    if time.monotonic() > end:
                        raise RuntimeError("no answer")
                    time.sleep(0.0002)
        return time.monotonic() - begin

    def pair(self, turn: int, rank: int, key: str) -> float:
        """Measure both directions, one after the other; returns the bytes per second that were received."""
        end = time.monotonic() + limit_of(turn)
        # its own client: while one waits, other threads cannot use it
        store = self.dist.PrefixStore(key, self.store.another().store)
        group = self.group(store, rank, limit_of(turn))
        self.kept.append(group)     # destroying an NCCL group may wait for the other end
        try:
            received = 0.0
            for sender in (0, 1):
                last, value, size = 0, 1 + sender + 2 * (turn % 100), 4
                self.buffer.fill_(value if sender == rank else 0)
                while size:
                    seconds, last = self.volley(group, sender == rank, 1 - rank, size, end), size
                    following = '%d-%d' % (sender, size)
                    if sender != rank:
                        received = size / max(seconds, 1e-6)
                        size = max(FIRST, size * FACTOR) if seconds < ENOUGH or size < FIRST else 0
                        size = size if size <= LARGEST else 0
                        store.set(following, str(size))
                    else:
                        size = int(store.get(following))
                if sender != rank and not bool((self.buffer[:last] == value).all()):
                    raise RuntimeError("wrong values were received")
            return received
        except BaseException:
            if self.backend == 'nccl':
                # since 2.6; ends kernels that would wait on the GPU
                getattr(group, 'abort', lambda: None)()
            raise

    def answer(self, *order: 'Any') -> dict:
        """The result of pair(), or what went wrong, within its limit."""
        found = {'error': "no answer within %d s" % limit_of(order[0])}  # type: dict

        def run():
            try:
                found.update(received=self.pair(*order), error='')
            except BaseException as err:    # every error is an answer
                found['error'] = first_lines(err)[:300]

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(limit_of(order[0]) + 1)
        return dict(found)


def limit_of(turn: int) -> int:
    """Seconds for a pair of this round."""
    return LIMIT if turn else FIRST_LIMIT


def play(number: int, lanes: int, descriptor: int) -> None:
    """The process for one GPU: join, measure in every round, and report how it ended."""
    environ, log, begin = os.environ, messages.scratch_file(), time.monotonic()
    nccl.log_into(environ, log)
    exchange, error, absent = None, '', False
    try:
        exchange = Exchange(number)
    except BaseException as err:    # every error is an answer
        error, absent = first_lines(err)[:500], isinstance(err, Absent)
    imported = time.monotonic() - begin
    seconds = patience(imported, int(environ['WORLD_SIZE']), seconds_to_wait(environ))
    try:
        store = meet.Store(environ, seconds, False)
    except meet.NotMet as err:
        say(descriptor, {'error': error or meet.why_not(environ, str(err))})
        return
    if exchange:
        exchange.store = store
    own = store.count('lanes', 1)
    machine = Machine()
    store.put('lane-%d' % own, {
        'rank': int(environ['RANK']), 'lane': number, 'lanes': lanes, 'node': machine.node[:200], 'error': error,
        'ready': not error, 'backend': exchange.backend if exchange else '', 'gpu': exchange.gpu if exchange else '',
        'absent': absent, 'rates': machine.line_rates()})
    turn = 0
    while True:
        # others may take long to import PyTorch, and one may never come
        said = store.get('round-%d' % turn, time.monotonic() + seconds + 3 * FIRST_LIMIT)
        if 'word' in said:
            say(descriptor, {'word': said['word']})
            store.count('heard', 1)
            return
        for pair in said['pairs']:
            if exchange and own in pair:
                found = exchange.answer(turn, pair.index(own), 'pair-%d-%d-%d' % (turn, *pair))
                if exchange.backend == 'nccl' and log:
                    found.update(nccl.heard(log))
                store.put('did-%d-%d' % (turn, own), found)
                store.count('done-%d' % turn, 1)
        turn += 1


class Keeper:
    """
    In the process of rank 0: has the store, and lets all processes measure, round by round.

    :ivar lanes: {number of a process: its first message, with the 'number' of its node; rank 0's node is 0}
    :ivar nodes: how many have come
    :ivar speeds: [[number of a GPU, numbers of two nodes, what each received: bytes per second or why not], ...]
    :ivar network: the network that NCCL's log names; '' if none
    :ivar rounds: how many there were; :ivar took: their seconds
    """

    def __init__(self, store: 'Any') -> None:
        self.store, self.lanes, self.nodes, self.network = store, {}, 0, ''  # type: Any, dict, int, str
        self.failed, self.worked, self.speeds = collections.Counter(), set(), []  # type: Any, set, list
        self.imported = self.took = 0.0

    def gather(self, nodes: int, end: float) -> None:
        """Wait until all processes of `nodes` nodes have come, at most until the time `end`."""
        while time.monotonic() < end:
            there = set(range(1, min(self.store.count('lanes'), 64 * nodes) + 1)) - set(self.lanes)  # type: Any
            for number, said in self.store.known('lane', there, COMES).items():
                self.lanes[number] = said if said and 0 <= said['lane'] < 64 else None
            there = collections.Counter(said['rank'] for said in self.lanes.values() if said)
            whole = {said['rank'] for said in self.lanes.values() if said and there[said['rank']] >= said['lanes']}
            if len(whole) >= nodes:
                break
            time.sleep(messages.LOOK)
        self.lanes = {number: said for number, said in self.lanes.items() if said}
        ranks = sorted({said['rank'] for said in self.lanes.values()})
        for said in self.lanes.values():
            said['number'] = ranks.index(said['rank'])
        self.nodes = len(ranks)
        ready = [said for said in self.lanes.values() if said['ready']]
        kinds = collections.Counter(said['backend'] for said in ready)
        self.kind = kinds.most_common(1)[0][0] if kinds else ''
        self.playing = {number for number, said in self.lanes.items() if said['ready'] and said['backend'] == self.kind}

    def round(self, turn: int) -> None:
        """Measure all pairs of a round."""
        place = {(said['lane'], said['number']): number for number, said in self.lanes.items()
                 if number in self.playing}
        pairs = [[place[lane, one], place[lane, other]] for one, other in pairs_of(turn, self.nodes)
                 for lane in sorted({lane for lane, _ in place}) if (lane, one) in place and (lane, other) in place]
        self.store.put('round-%d' % turn, {'pairs': pairs})
        end = time.monotonic() + limit_of(turn) + 4
        while self.store.count('done-%d' % turn) < 2 * len(pairs) and time.monotonic() < end:
            time.sleep(messages.LOOK)
        answers = self.store.known('did-%d' % turn, sum(pairs, []), {'error': str})
        for pair in pairs:
            self.speeds.append([self.lanes[pair[0]]['lane'], *[self.lanes[number]['number'] for number in pair],
                                *[self.received(number, answers.get(number)) for number in pair]])

    def received(self, number: int, said: 'Any') -> 'Any':
        """What a process received in a round, from its answer: bytes per second, or why not."""
        if said and messages.has_form(said, {'received': (int, float)}) and not said['error']:
            self.worked.add(number)
            self.network = self.network or ', '.join(str(said[key])[:60] for key in ('network', 'provider')
                                                     if said.get(key))
            return float(said['received'])
        self.failed[number] += 1
        if not said or self.failed[number] >= FAILED and number not in self.worked:
            self.playing.discard(number)
        return said['error'][:300] if said else 'it did not answer'

    def measure(self, rounds: int) -> None:
        """Measure all rounds, at most this number."""
        begin = time.monotonic()
        self.rounds = min(rounds, self.nodes - 1 + self.nodes % 2) if self.nodes > 1 else 0
        for turn in range(self.rounds):
            self.round(turn)
        self.took = time.monotonic() - begin

    def tell(self, word: str) -> None:
        """Tell all processes the verdict, and wait until they have read it."""
        self.store.put('round-%d' % self.rounds, {'word': word})
        end = time.monotonic() + meet.HEARD
        while self.store.count('heard') < len(self.lanes) and time.monotonic() < end:
            time.sleep(messages.LOOK)


def keep(environ: 'Any', seconds: float) -> Keeper:
    """A keeper, after all processes have come. :raises NotMet: there is no store"""
    begin = time.monotonic()
    try:
        import torch.distributed    # noqa: F401
    except Exception as err:    # an installation may be broken in any way
        raise meet.NotMet(first_lines(err))
    keeper = Keeper(meet.Store(environ, seconds))
    keeper.imported = time.monotonic() - begin
    nodes = int(environ['WORLD_SIZE']) // int(environ['LOCAL_WORLD_SIZE'])
    keeper.gather(nodes, time.monotonic() + patience(keeper.imported, nodes, seconds) + 2)
    return keeper


def main(argv: list) -> None:
    """Run the program; never returns, since exit handlers may hang."""
    descriptor = messages.as_child()
    try:
        play(int(argv[0]), int(argv[1]), descriptor)
    except BaseException as err:    # every error is an answer
        say(descriptor, {'error': first_lines(err)})
    os._exit(0)
