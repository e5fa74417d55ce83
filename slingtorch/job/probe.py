# SPDX-License-Identifier: GPL-2.0-only
"""
A process of its own on one rank of each node, because what it does may crash or never end: imports PyTorch, loads the
plugin, takes part in one small all_reduce over all nodes, and says which libraries it maps.

    python job probe [NAME OF A PLUGIN]...      the first that can be loaded is

Reads 'go HOST PORT RANK RANKS SECONDS' from standard input; an empty line for the import alone.

Prints JSON lines, each more complete than the one before; what libraries print is dropped.
"""
import ctypes
import json
import os
import re
import sys
import tempfile
import time

from . import nccl
from .machine import mapped_libraries

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Any


def say(descriptor: int, result: dict) -> None:
    """One line."""
    os.write(descriptor, json.dumps(result).encode() + b'\n')


def collective(result: dict, torch: 'Any', words: list, log: str, descriptor: int) -> None:
    """Rendezvous and all_reduce; fills in `result`."""
    import datetime

    import torch.distributed as dist
    host, port, rank, ranks = words[0], int(words[1]), int(words[2]), int(words[3])
    gpu = torch.cuda.is_available() and dist.is_nccl_available()
    backend = 'nccl' if gpu else 'gloo'
    result['facts']['backend'] = backend
    begin, limit = time.time(), datetime.timedelta(seconds=float(words[4]))
    result['phase'] = 'rendezvous'
    say(descriptor, result)
    store = dist.TCPStore(host, port, ranks, rank == 0, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    result['seconds']['rendezvous'] = time.time() - begin
    result['phase'], begin = 'collective', time.time()
    say(descriptor, result)
    number = torch.ones(1, device='cuda:0' if gpu else 'cpu')
    dist.all_reduce(number)
    if int(number.item()) != ranks:
        raise RuntimeError("an all_reduce of ones over %d ranks gave %s" % (ranks, number.item()))
    result['seconds']['collective'] = time.time() - begin
    if gpu:
        with open(log, errors='replace') as stream:
            result['network'], result['provider'], _ = nccl.network(stream.read())


def load(names: list, result: dict) -> None:
    """Load the first plugin that can be, as NCCL does; fills in `result`."""
    beside = {os.path.dirname(path) for path in result['maps'] if re.search(r'/lib[nr]ccl\.so', path)}
    result['plugin_missing'] = True
    for name in names:
        # libnccl may bring a search path of its own, which is not this process's
        for place in [''] + sorted(beside if '/' not in name else ()):
            try:
                ctypes.CDLL(os.path.join(place, name))
                result['plugin_missing'] = False
                result.pop('plugin_error', None)
                return
            except OSError as err:
                if not re.match(r'%s: .*No such file' % re.escape(os.path.join(place, name)), str(err)):
                    result['plugin_missing'] = False
                    result.setdefault('plugin_error', str(err))


def main(plugins: list) -> None:
    """Do it; never returns, since exit handlers may hang."""
    descriptor = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    result = {'facts': {}, 'seconds': {}, 'phase': 'import', 'maps': []}  # type: dict
    log = None
    try:
        log = os.path.join(tempfile.mkdtemp(prefix='slingtorch-check-'), 'nccl.log')
        os.environ.update(NCCL_DEBUG='INFO', NCCL_DEBUG_SUBSYS='INIT,NET', NCCL_DEBUG_FILE=log)
        begin = time.time()
        import torch
        result['seconds']['import'] = time.time() - begin
        for fact, value in (('CUDA', torch.version.cuda), ('ROCm', getattr(torch.version, 'hip', None))):
            if value:
                result['facts'][fact] = value
        result['maps'] = mapped_libraries()
        if plugins:
            load(plugins, result)
        say(descriptor, result)
        words = sys.stdin.readline().split()
        if words[:1] == ['go']:
            collective(result, torch, words[1:], log, descriptor)
    except BaseException as err:    # whatever it is, it is the finding
        text = str(err).strip().splitlines() or ['']
        result['error'] = '%s failed: %s: %s' % (
            {'import': 'import torch', 'rendezvous': 'the rendezvous of one rank of each node'}.get(
                result['phase'], 'the first all_reduce'), type(err).__name__, ' '.join(text[:3]))
    result['maps'] = mapped_libraries()
    say(descriptor, result)
    if log:
        for path in (log, os.path.dirname(log)):
            try:
                (os.rmdir if path != log else os.unlink)(path)
            except OSError:
                pass
    os._exit(0)
