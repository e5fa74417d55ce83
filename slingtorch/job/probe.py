# SPDX-License-Identifier: GPL-2.0-only
"""
A separate process on one rank of each node, because its work may crash or never end. It imports PyTorch and what the
script imports, meets the other nodes (meet.py), tries all_reduces with them, and exchanges the nodes' reports.
"""
import copy
import gc
import os
import re
import threading
import time
import warnings
from traceback import extract_tb

from . import meet, messages, nccl, network
from .kinds import Any, Optional
from .machine import Machine, mapped_libraries

# Seconds after which a node reports that it cannot reach rank 0's node. Seconds in which the store must exist: minimum,
# per second that importing PyTorch took here, and per node, since many nodes load Python from one file system.
SPEAKS, COMES, PER_IMPORT, PER_NODE = 11, 30, 5, 1 / 16


def patience(imported: float, nodes: int, left: float) -> float:
    """Seconds to wait for others after PyTorch is imported here, at most those that are left."""
    return max(0.5, min(left, max(COMES, PER_IMPORT * imported) + nodes * PER_NODE))


class Probe:
    """This process's findings, which go through `pipe` to check.Probe, and its part in the store."""

    def __init__(self, pipe: 'Any') -> None:
        self.pipe, self.lock, self.log = pipe, threading.Lock(), messages.scratch_file()
        self.result = {'facts': {}, 'phase': 'import'}  # type: dict
        self.environ, self.store, self.nodes = os.environ, None, {}     # type: Any, Any, dict
        self.clock, self.gpu = time.time, False    # type: Any, bool

    def say(self, **more: 'Any') -> None:
        """Add to the findings, and send them."""
        with self.lock:
            self.result.update(more)
            self.pipe.send(self.result)

    def load(self) -> 'Any':
        """Import PyTorch."""
        nccl.log_into(os.environ, self.log)
        begin = time.monotonic()
        gc.disable()    # a seventh of the time of the import, which leaves no garbage
        import torch
        gc.enable()
        self.say(imported=time.monotonic() - begin, took=taken(), maps=mapped_libraries())
        return torch

    def look_for_gpus(self, torch: 'Any') -> None:
        """Note whether PyTorch, if it was built for GPUs, sees one, and what it warns of while it looks."""
        if torch.version.cuda or getattr(torch.version, 'hip', None):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter('always')
                sees = torch.cuda.is_available()
            self.say(sees=sees, warned=' '.join(str(one.message) for one in said)[:400])
            self.gpu = sees and torch.distributed.is_nccl_available()

    # --- the nodes

    def open(self, seconds: float) -> 'Optional[meet.Store]':
        """Open the store; None if it is not reached. Reports from time to time what this node waits for."""
        opened, end = [], time.monotonic() + seconds + SLACK  # type: list, float

        def connect() -> None:
            try:
                opened.append(meet.Store(self.environ, seconds))
            except Exception as err:    # this PyTorch may have no torch.distributed
                opened.append(err)

        # TCPStore has no limit if the other end accepts and sends nothing
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(min(SPEAKS, seconds))
        if not opened:
            self.say(late=meet.why_not(self.environ))
        thread.join(max(0, end - time.monotonic()))
        if opened and isinstance(opened[0], meet.Store):
            return opened[0]
        text = str(opened[0]) if opened else ''
        self.say(lost=text if text and self.environ['RANK'] == '0' else meet.why_not(self.environ, text))
        return None

    def come(self, seconds: float) -> bool:
        """Meet the other nodes; returns whether to try the network."""
        environ = self.environ
        world, ranks, rank = (int(environ[name]) for name in ('WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'RANK'))
        limit = patience(self.result['imported'], world // ranks, seconds)
        self.store = self.open(seconds)
        if not self.store:
            return False
        if rank == 0:
            self.nodes = self.store.others(world - ranks, world, time.monotonic() + limit + SLACK)
            there = [said for said in self.nodes.values() if said]
            go = len(there) == len(self.nodes) and sum(said['ranks'] for said in there) == world - ranks and world > 1
            others = [said['node'] for said in there if (said.get('gpu') is True) != self.gpu]
            if others:      # NCCL and gloo would wait for each other
                go, self.result['others'] = False, [self.gpu, others]
            self.store.put('go', {'now': self.clock(), 'nodes': len(self.nodes) + 1, 'go': go})
            self.result['nodes'] = self.nodes
        else:
            said = self.store.join({'node': Machine(environ).node, 'rank': rank, 'ranks': ranks, 'gpu': self.gpu},
                                   time.monotonic() + seconds + 2 * SLACK)
            if not messages.has_form(said, {'now': (int, float), 'nodes': int, 'go': bool}):
                raise ValueError("the node of rank 0 sent a message that this version of slingtorch does not know")
            self.result['ahead'], go = self.clock() - said['now'], said['go']
            self.nodes = dict.fromkeys(range(1, min(said['nodes'], world)))
        self.say(met=True)
        return go

    def collective(self, torch: 'Any', seconds: float) -> None:
        """
        Try all_reduces over one rank of each node, in a thread that may never end; fills in the result. In a job of one
        node this tries whether gloo finds an address; NCCL would need several processes.
        """
        import datetime

        import torch.distributed as dist
        result, ranks, failed, gpu = self.result, len(self.nodes) + 1, [], self.gpu    # type: Any, int, list, bool
        result['facts']['backend'] = 'nccl' if gpu else 'gloo'
        if gpu and ranks == 1:
            return
        if not gpu:
            result['facts']['address of gloo'] = network.address_of_gloo(self.environ)
        self.say(phase='rendezvous')

        watch = network.Watch(network.slowness(seconds, ranks))

        def work() -> None:
            try:
                # without a free descriptor, PyTorch tries to connect until `seconds` are over
                store = self.store.another().store
                dist.init_process_group(result['facts']['backend'], store=dist.PrefixStore('trial', store),
                                        world_size=ranks, rank=self.store.number,
                                        timeout=datetime.timedelta(seconds=seconds))
                self.say(phase='collective')
                took = network.rise(
                    dist.all_reduce, lambda count: torch.zeros(count, device='cuda:0' if gpu else 'cpu'), ranks, watch)
                if ranks > 1:
                    result['told'] = dict(network.totals(network.connections()), seconds=took)
            except Exception as err:
                failed.append('%s failed: %s' % (watch.name, first_lines(err)))

        watch.enter('the rendezvous of one rank of each node')
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        error = watch.over(thread) or ''.join(failed)
        self.result = copy.deepcopy(result)     # the thread may go on
        if self.store.number:       # as many as the ranks of this node will open at once, and no more: rank 0 hears all
            many = int(self.environ.get('LOCAL_WORLD_SIZE', 1))
            self.result['unanswered'] = network.unanswered(int(self.environ.get('MASTER_PORT', 0)), many), many
        if error:
            self.result['error'] = error + network.state(network.connections(), watch.before, not gpu)
        if gpu and self.log:
            self.result.update(nccl.heard(self.log))

    def exchange(self) -> None:
        """Rank 0's node sends the other nodes' reports and tells them the verdict; these send theirs, and get it."""
        thing, seconds = self.pipe.recv()
        end = time.monotonic() + seconds
        if self.environ['RANK'] == '0':
            self.say(reports=self.store.reports(thing, end))
            self.store.word(self.pipe.recv()[0], len(self.nodes))
            self.say(heard=True)
        else:
            self.say(word=self.store.report(thing, end))


# Seconds that rank 0's node waits longer for other nodes than these wait for their ranks.
SLACK = 2


def taken() -> dict:
    """What this process, after importing PyTorch, uses of the resources that limits.py checks: proc(5)."""
    with open('/proc/self/status') as stream:
        sizes = dict(re.findall(r'^(\w+):\s+(\d+) kB', stream.read(), re.M))
    return {'fds': len(os.listdir('/proc/self/fd')), 'v': int(sizes.get('VmPeak', 0)) << 10,
            'd': int(sizes.get('VmData', 0)) << 10,
            's': int(sizes.get('VmStk', 0)) << 10, 'anon': int(sizes.get('RssAnon', 0)) << 10}


def first_lines(err: BaseException) -> str:
    """The first lines of an error, with its type. What NCCL says of it is in the fourth."""
    lines = [line.strip() for line in str(err).strip().splitlines()]
    return '%s: %.600s' % (type(err).__name__, ' '.join(lines[:4 if lines[2:3] == ['Last error:'] else 3]))


def run(pipe: 'Any', seconds: float, words: list) -> None:
    """What the process does, in a messages.Child; `words`: what Python will run."""
    from . import imports       # only here: other ranks import this file, but need no analysis of programs

    probe, trial = Probe(pipe), None  # type: Any, Any
    try:
        torch = probe.load()
        trial = imports.Trial(words)   # in a fork, meanwhile; a fork cannot use GPUs that were looked for before
        probe.look_for_gpus(torch)
        if probe.come(seconds):
            probe.collective(torch, seconds)
    except BaseException as err:    # every error is a finding
        result = probe.result
        if isinstance(err, (meet.NotMet, ValueError)) and probe.store:
            result['lost'] = str(err)
        else:
            what, place = 'import torch', extract_tb(err.__traceback__)[-1].filename
            if 'imported' in result:
                result['phase'], what = 'rendezvous', 'the rendezvous'
            result['error'] = '%s failed: %s (in %s)' % (what, first_lines(err), place)
    if trial:
        probe.result['script'] = trial.result()
    probe.say(over=True, maps=mapped_libraries())
    if probe.store and probe.nodes:
        try:
            probe.exchange()
        except (meet.NotMet, ValueError) as err:
            probe.say(lost=str(err))
