# SPDX-License-Identifier: GPL-2.0-only
"""
A process of its own on each node, for each GPU that it has: sends to a process of another node, and receives from it,
over the backend of torch.distributed that a training takes (NCCL or RCCL on GPU memory, else gloo). For vet.py.

    python job exchange NUMBER      of the GPU, as PyTorch counts them; 0 where there is none

Reads JSON lines from standard input, one for each pair: turn, rank (0 or 1 of the two), host and port of the store that
rank 0 has, limit (seconds). Says in a JSON line that it is ready, or why it cannot be, and then for each pair what it
received (bytes a second), or what went wrong. Each pair has a process group of its own, so that one that fails spoils
no other.
"""
import datetime
import json
import os
import sys
import threading
import time

from . import nccl
from .machine import Machine
from .probe import first_lines, say, scratch_file

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Any

# What is sent in one volley: bytes at first and at most, by which factor more, and until it takes so many seconds. The
# first one of all sets up the connection.
FIRST, LARGEST, FACTOR, ENOUGH = 64 << 10, 16 << 30, 8, 0.1
# bytes of one message at most
MESSAGE = 32 << 20


def nearest_card(machine: Machine, address: str) -> str:
    """The one network card that shares most PCI bridges with a GPU, at least the first one; '' if none or several."""
    def bridges(path):
        root = os.path.realpath(machine.path('sys/devices'))
        return os.path.relpath(os.path.realpath(path), root).split('/')

    own, shared = bridges(machine.path('sys/bus/pci/devices/' + address)), {}  # type: Any, dict
    for path in machine.glob('sys/class/net/*/device') + machine.glob('sys/class/infiniband/*/device'):
        common = os.path.commonprefix([own, bridges(path)])
        if common and common[0].startswith('pci'):
            shared.setdefault(len(common), []).append(path.split('/')[-2])
    found = shared[max(shared)] if shared else []
    return found[0] if len(found) == 1 else ''


class Absent(Exception):
    """There is nothing that could be tried."""


class Exchange:
    """The end of pairs that this process is. :raises Absent: PyTorch has no backend, or no such GPU"""

    def __init__(self, number: int) -> None:
        import torch
        import torch.distributed as dist
        self.torch, self.dist, self.kept = torch, dist, []  # type: Any, Any, list
        gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
        if number >= max(1, gpus):
            raise Absent("PyTorch sees %d GPUs, and no number %d" % (gpus, number))
        if not gpus and not dist.is_gloo_available():
            raise Absent("this PyTorch has neither gloo nor a GPU that it sees (MPI is not tried)")
        self.backend, self.gpu = 'nccl' if gpus else 'gloo', ''
        device = 'cpu'
        if gpus:
            device = torch.device('cuda', number)
            torch.cuda.set_device(device)
            told = torch.cuda.get_device_properties(device)
            self.gpu = 'GPU %d' % number
            if hasattr(told, 'pci_bus_id'):     # of newer releases
                address = '%04x:%02x:%02x.0' % (told.pci_domain_id, told.pci_bus_id, told.pci_device_id)
                card = nearest_card(Machine(), address)
                self.gpu += ' (%s%s)' % (address, ', near ' + card if card else '')
        self.buffer = torch.zeros(MESSAGE, dtype=torch.uint8, device=device)
        self.store = dist.TCPStore('localhost', 0, None, True, datetime.timedelta(seconds=20), False)
        # what one process alone can find out, such as an interface that is not there
        group, _ = self.group({'turn': -1, 'rank': 0, 'limit': 60}, 1)
        self.kept.append(group)
        group.allreduce([self.buffer[:4]]).wait()
        if gpus:
            torch.cuda.synchronize(device)

    def group(self, order: dict, ranks: int = 2) -> tuple:
        """(process group of the two, their store)"""
        limit = datetime.timedelta(seconds=order['limit'])
        # a connection of its own: one that waits keeps others from asking
        host, port = ('localhost', self.store.port) if order['rank'] == 0 else (order['host'], order['port'])
        store = self.dist.PrefixStore('pair-%d' % order['turn'], self.dist.TCPStore(host, port, None, False, limit))
        if self.backend == 'gloo':
            return self.dist.ProcessGroupGloo(store, order['rank'], ranks, limit), store
        # NCCL's own watchdog would end the process: this one has a limit itself
        return self.dist.ProcessGroupNCCL(store, order['rank'], ranks, datetime.timedelta(hours=1)), store

    def volley(self, group: 'Any', sends: bool, other: int, size: int, end: float) -> float:
        """Send or receive so many bytes; the seconds that it took."""
        begin, works = time.monotonic(), []
        while size > 0:
            part = [self.buffer[:min(size, MESSAGE)]]
            works.append(group.send(part, other, 0) if sends else group.recv(part, other, 0))
            size -= MESSAGE
        for work in works:
            if self.backend == 'gloo':
                work.wait()
            else:
                # its wait() only lets the GPU wait
                while not work.is_completed():
                    if time.monotonic() > end:
                        raise RuntimeError("no answer")
                    time.sleep(0.0002)
        return time.monotonic() - begin

    def pair(self, order: dict) -> float:
        """Both directions, one after the other; the bytes a second that were received."""
        end = time.monotonic() + order['limit']
        group, store = self.group(order)
        self.kept.append(group)     # to take down one of NCCL can wait for the other end
        try:
            received, rank = 0.0, order['rank']
            for sender in (0, 1):
                last, value, size, number, more = 4, 1 + sender + 2 * (order['turn'] % 100), 4, 0, True
                self.buffer.fill_(value if sender == rank else 0)
                while more:
                    seconds = self.volley(group, sender == rank, 1 - rank, size, end)
                    key = '%d-%d' % (sender, number)
                    if sender != rank:
                        more = not number or seconds < ENOUGH and size * FACTOR <= LARGEST
                        received = size / max(seconds, 1e-6)
                        store.set(key, str(int(more)))
                    else:
                        more = store.get(key) == b'1'
                    last, size, number = size, size * FACTOR if number else FIRST, number + 1
                if sender != rank and not bool((self.buffer[:last] == value).all()):
                    raise RuntimeError("wrong values were received")
            return received
        except BaseException:
            if self.backend == 'nccl':
                # since 2.6; it ends kernels that would wait on the GPU
                getattr(group, 'abort', lambda: None)()
            raise

    def answer(self, order: dict) -> dict:
        """What pair() says, or what went wrong, in time."""
        found = {'turn': order['turn'], 'error': "no answer within %d s" % order['limit']}

        def run():
            try:
                found.update(received=self.pair(order), error='')
            except BaseException as err:    # whatever it is, it is the answer
                found['error'] = first_lines(err)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(order['limit'] + 1)
        return dict(found)


def main(argv: list) -> None:
    """Do it until there is nothing more to read; never returns, since exit handlers may hang."""
    descriptor = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    log = scratch_file()
    try:
        os.environ.update(NCCL_DEBUG='INFO', NCCL_DEBUG_SUBSYS='INIT,NET',
                          NCCL_DEBUG_FILE='/proc/self/fd/%d' % log.fileno() if log else os.devnull)
        # what fails is said here, and does not end the process
        os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING='0', NCCL_ASYNC_ERROR_HANDLING='0')
        begin = time.monotonic()
        exchange = Exchange(int(argv[0]))
        say(descriptor, {'ready': True, 'backend': exchange.backend, 'gpu': exchange.gpu, 'port': exchange.store.port,
                         'seconds': time.monotonic() - begin})
        for line in sys.stdin:
            found = exchange.answer(json.loads(line))
            if exchange.backend == 'nccl' and log:
                log.seek(0)
                found['network'], found['provider'], _ = nccl.network(log.read().decode(errors='replace'))
            say(descriptor, found)
    except BaseException as err:    # whatever it is, it is the answer
        no_torch = isinstance(err, ImportError) and err.name == 'torch'
        say(descriptor, {'error': 'no torch' if no_torch else first_lines(err),
                         'absent': no_torch or isinstance(err, Absent)})
    os._exit(0)
