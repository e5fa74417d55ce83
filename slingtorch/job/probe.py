# SPDX-License-Identifier: GPL-2.0-only
"""
A process of its own on one rank of each node, because what it does may crash or never end: imports PyTorch, loads the
plugin, takes part in all_reduces among the ranks of the node and over all nodes, and says which libraries it maps.

    python job probe [NAME OF A PLUGIN]...      the first that can be loaded is

Reads from standard input 'local RANKS OF THE NODE SECONDS', or an empty line, and once it has said that it is ready,
'go HOST PORT RANK RANKS SECONDS', or an empty line.

Prints JSON lines, each more complete than the one before; what libraries print is dropped.
"""
import ctypes
import json
import os
import re
import sys
import tempfile
import time

from . import nccl, network
from .machine import mapped_libraries

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Any


def say(descriptor: int, result: dict) -> None:
    """One line."""
    os.write(descriptor, json.dumps(result).encode() + b'\n')


def collective(result: dict, torch: 'Any', words: list, log: 'Any', descriptor: int) -> None:
    """Rendezvous and all_reduces; fills in `result`."""
    import datetime

    import torch.distributed as dist
    host, port, rank, ranks = words[0], int(words[1]), int(words[2]), int(words[3])
    gpu = torch.cuda.is_available() and dist.is_nccl_available()
    backend = 'nccl' if gpu else 'gloo'
    result['facts']['backend'] = backend
    begin, limit = time.monotonic(), datetime.timedelta(seconds=float(words[4]))
    result['phase'] = 'rendezvous'
    say(descriptor, result)

    def give_up(text, told):
        result.update(error=text, told=told)
        say(descriptor, result)

    # with more nodes it takes longer: each connects to all others. NCCL has connections of its own to the store.
    watch = network.Watch(give_up, max(1, float(words[4]) / 120) + ranks / 100, 0 if gpu else port)
    try:
        watch.enter('the rendezvous of one rank of each node', network.RENDEZVOUS)
        store = dist.TCPStore(host, port, ranks, rank == 0, limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
        result['seconds']['rendezvous'] = time.monotonic() - begin
        result['phase'], begin = 'collective', time.monotonic()
        say(descriptor, result)
        times = result['row'] = {}
        network.rise(dist.all_reduce, lambda count: torch.zeros(count, device='cuda:0' if gpu else 'cpu'), ranks, watch,
                     times)
        result['seconds']['collective'] = time.monotonic() - begin
        result['took'] = taken(ranks)
        result['told'] = network.state(network.connections())
    except Exception as err:
        result.update(error='%s failed: %s' % (watch.name, first_lines(err)), told=watch.told)
        time.sleep(2 * network.LOOK)    # the others are to see that it was there, and is gone
    finally:
        watch.done.set()
    if gpu and log:
        log.seek(0)
        result['network'], result['provider'], _ = nccl.network(log.read().decode(errors='replace'))


def taken(nodes: int) -> dict:
    """What this process has taken of what limits.py knows; the kernel's own figures: proc(5)."""
    with open('/proc/self/status') as stream:
        sizes = dict(re.findall(r'^(\w+):\s+(\d+) kB', stream.read(), re.M))
    return {'fds': len(os.listdir('/proc/self/fd')), 'nodes': nodes, 'v': int(sizes.get('VmPeak', 0)) << 10,
            'd': int(sizes.get('VmData', 0)) << 10, 'anon': int(sizes.get('RssAnon', 0)) << 10}


def first_lines(err: BaseException) -> str:
    """What an error says."""
    return '%s: %s' % (type(err).__name__, ' '.join((str(err).strip().splitlines() or [''])[:3]))


def scratch_file() -> 'Any':
    """A file without a name, so that nothing stays behind, whatever ends this process; None if there is no place."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return None     # look.py says that there is none


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
        log = scratch_file()
        os.environ.update(NCCL_DEBUG='INFO', NCCL_DEBUG_SUBSYS='INIT,NET',
                          NCCL_DEBUG_FILE='/proc/self/fd/%d' % log.fileno() if log else os.devnull)
        begin = time.monotonic()
        import torch
        result['seconds']['import'] = time.monotonic() - begin
        for fact, value in (('CUDA', torch.version.cuda), ('ROCm', getattr(torch.version, 'hip', None))):
            if value:
                result['facts'][fact] = value
        result['maps'], result['took'] = mapped_libraries(), taken(1)
        if plugins:
            load(plugins, result)
        say(descriptor, result)
        words = sys.stdin.readline().split()
        if words[:1] == ['local'] and int(words[1]) > 1:
            result['phase'] = 'collective'
            wrong = network.among_local_ranks(torch, int(words[1]), float(words[2]))
            if wrong:
                result.update(error="an all_reduce of gloo among the ranks of a node failed: %s" % wrong, told={})
            else:
                result['phase'], result['local'] = 'import', True
        say(descriptor, dict(result, ready='error' not in result))
        words = sys.stdin.readline().split()
        if words[:1] == ['go']:
            collective(result, torch, words[1:], log, descriptor)
    except BaseException as err:    # whatever it is, it is the finding
        result['error'] = '%s failed: %s' % ('import torch' if result['phase'] == 'import' else 'an all_reduce',
                                             first_lines(err))
    result['maps'] = mapped_libraries()
    stays = 'collective' in result['seconds'] and 'error' not in result
    say(descriptor, dict(result, stays=stays))
    if stays:       # who sees its connections end takes it for one that has given up
        sys.stdin.readline()
    os._exit(0)
