# SPDX-License-Identifier: GPL-2.0-only
"""
The nodes of a job meet in PyTorch's own TCPStore, at MASTER_ADDR and MASTER_PORT, as init_process_group of the training
will open it a moment later. Nothing else listens. Runs in the processes that import PyTorch: probe.py, pairs.py.

What is in the store (all JSON within the bounds of messages.py):
    nodes               how many have come; each takes its number from it, rank 0's node is 0
    come-N              {'node', 'rank', 'ranks', 'ready'} and more of node N
    go                  {'now', 'nodes', 'go'} of rank 0's
    given-up            how many have given up the trial of the network
    report-N, word      what node N found; how it ended
    heard               how many have read that
"""
import contextlib
import datetime
import re
import socket
import time

from . import messages, network
from .kinds import Any, Callable, Iterable

# seconds between two looks at the store, and for each of its answers
LOOK, ANSWER = 0.02, 20
COMES = {'node': str, 'rank': int, 'ranks': int, 'ready': bool}
# how long rank 0's waits until others have heard how it ended
HEARD = 3


class NotMet(Exception):
    """The nodes do not meet. :ivar port: whether another process has the port"""
    port = False


class Store:
    """
    One client of the store; rank 0's first one has the store itself, except under torchrun, whose agent has it.

    :raises NotMet: it cannot be reached, or the port is taken
    """

    def __init__(self, environ: 'Any', seconds: float, first: bool = True) -> None:
        import torch.distributed as dist
        self.environ, self.dist = environ, dist
        master = first and environ['RANK'] == '0' and environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'
        host, port = environ['MASTER_ADDR'], int(environ['MASTER_PORT'])
        try:
            self.store = dist.TCPStore(host, port, None, master, datetime.timedelta(seconds=seconds),
                                       False)  # type: Any
            self.store.set_timeout(datetime.timedelta(seconds=ANSWER))
            self.store = dist.PrefixStore('slingtorch-%s' % environ.get('TORCHELASTIC_RESTART_COUNT', '0'), self.store)
            self.store.add('here', 0)
        except Exception as err:
            wrong = NotMet(str(err).splitlines()[0][:300] if str(err) else repr(err))
            wrong.port = master and bool(re.search('EADDRINUSE|EACCES|[Aa]ddress already in use', str(err)))
            raise wrong

    def another(self) -> 'Store':
        """A client of its own for another thread: one that waits keeps others from asking."""
        return Store(self.environ, ANSWER, False)

    def put(self, key: str, thing: 'Any') -> None:
        """Under this key. :raises NotMet: the store is gone"""
        self.call(self.store.set, key, messages.dump(thing).decode())

    def count(self, key: str, more: int = 0) -> int:
        """Of a counter, to which so many are added. :raises NotMet: the store is gone"""
        return self.call(self.store.add, key, more)

    def call(self, function: 'Callable', *arguments: 'Any') -> 'Any':
        """What the store says. :raises NotMet: it is gone"""
        try:
            return function(*arguments)
        except Exception as err:    # DistNetworkError, DistStoreError, RuntimeError: by release
            raise NotMet((str(err).strip().splitlines() or [repr(err)])[0][:300])

    def raw(self, keys: list) -> list:
        """What is under these keys, which are there. :raises NotMet: the store is gone"""
        if not keys:
            return []
        if hasattr(self.store, 'multi_get'):    # since 2.1
            return self.call(self.store.multi_get, keys)
        return [self.call(self.store.get, key) for key in keys]

    def get(self, key: str, end: float) -> 'Any':
        """
        What is there, as soon as it is. :raises NotMet: nothing is until the time `end`, or the store is gone
        :raises ValueError: that is not a message
        """
        seconds = max(0.05, end - time.monotonic())
        self.call(self.store.wait, [key], datetime.timedelta(seconds=seconds))
        return messages.load(self.raw([key])[0])

    # --- rank 0's node

    def known(self, name: str, numbers: 'Iterable[int]', form: dict) -> dict:
        """{number: what is under NAME-number, None if that is not of this form}, of those that are there."""
        found, there = {}, [number for number in numbers if self.is_there('%s-%d' % (name, number))]  # type: dict, list
        for number, data in zip(there, self.raw(['%s-%d' % (name, number) for number in there])):
            said = None     # type: Any
            with contextlib.suppress(ValueError):
                said = messages.load(data)
            found[number] = said if messages.has_form(said, form) else None
        return found

    def others(self, ranks: int, world: int, end: float) -> dict:
        """
        Who comes until the time `end`, or until so many ranks of the world are there: {number of a node: what it says
        of itself, or None if that is nothing that this version understands}.
        """
        found, there = {}, 0  # type: dict, int
        while there < ranks and time.monotonic() < end:
            new = self.known('come', set(range(1, min(self.count('nodes'), ranks) + 1)) - set(found), COMES)
            for number, said in sorted(new.items()):
                if said and not (0 < said['rank'] < world and 0 < said['ranks'] <= ranks):
                    said = None
                elif said and said['rank'] in [other['rank'] for other in found.values() if other]:
                    said['twice'] = True
                found[number] = said
                there += said['ranks'] if said else 1
            if not new:
                time.sleep(LOOK)
        return found

    def is_there(self, key: str) -> bool:
        """Whether something is under this key."""
        if hasattr(self.store, 'check'):    # of newer releases
            return bool(self.call(self.store.check, [key]))
        try:
            self.store.wait([key], datetime.timedelta(seconds=LOOK))
            return True
        except Exception:
            return False

    def reports(self, numbers: list, end: float) -> dict:
        """{number of a node as text: its report} of those that bring one until the time `end`."""
        found, missing = {}, set(numbers)  # type: dict, set
        while missing:
            new = self.known('report', missing, {})
            found.update((str(number), said) for number, said in new.items())
            missing -= set(new)
            if missing and time.monotonic() > end:
                break
            if missing:
                time.sleep(LOOK)
        return found

    def word(self, word: str, nodes: int) -> None:
        """Tell all nodes how it ended, and wait until so many have heard it."""
        self.put('word', word)
        end = time.monotonic() + HEARD
        while self.count('heard') < nodes and time.monotonic() < end:
            time.sleep(LOOK)


def route(host: str) -> str:
    """The addresses of a host, and those of this node from which packets go there, for a message."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as err:
        return "%s has no address here (%s)" % (host, err)
    parts = []
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as query:
            try:
                query.connect(place)
                own = query.getsockname()[0]
                parts.append('%s, from %s%s' % (place[0], own, network.interface_of(own)))
            except OSError as err:
                parts.append('%s (%s)' % (place[0], err.strerror))
    return '%s is %s' % (host, '; '.join(dict.fromkeys(parts)))


def attempt(environ: 'Any', seconds: float = 3) -> str:
    """What the kernel says of a connection to rank 0's node, for a message."""
    host, port = environ['MASTER_ADDR'], int(environ['MASTER_PORT'])
    try:
        with socket.create_connection((host, port), seconds):
            return "something answers there, in another way than PyTorch's store"
    except socket.timeout:
        return "no answer"
    except (OSError, UnicodeError, OverflowError) as err:
        return str(getattr(err, 'strerror', None) or err)


def listens(environ: 'Any') -> bool:
    """Whether somebody does at MASTER_ADDR and MASTER_PORT."""
    with contextlib.suppress(OSError, UnicodeError, OverflowError):
        socket.create_connection((environ['MASTER_ADDR'], int(environ['MASTER_PORT'])), 1).close()
        return True
    return False


def why_not(environ: 'Any', said: str = '') -> str:
    """Why this node does not reach rank 0's, for a message."""
    low = network.port_range()
    text = "no connection to MASTER_ADDR=%s, MASTER_PORT=%s: %s (%s)%s" % (
        environ['MASTER_ADDR'], environ['MASTER_PORT'], attempt(environ), route(environ['MASTER_ADDR']),
        network.own_address(environ['MASTER_ADDR']))
    if low and low != network.LINUX_PORTS:
        text += ". This node's ip_local_port_range is %s, by which conda-python-distributed chooses MASTER_PORT" % low
    return text + (' [%s]' % said if said else '')


def look_up(address: str) -> float:
    """
    Seconds that the name of an address takes, as PyTorch's store looks it up for each connection (c10d's socket.cpp,
    getnameinfo(3) of an IPv4 address in IPv6's form).
    """
    begin = time.monotonic()
    with contextlib.suppress(OSError, UnicodeError):
        socket.getnameinfo(('::ffff:' + address if '.' in address else address, 9, 0, 0), 0)
    return time.monotonic() - begin
