# SPDX-License-Identifier: GPL-2.0-only
"""
The nodes of a job meet in PyTorch's own TCPStore at MASTER_ADDR and MASTER_PORT, which the training's
init_process_group() opens a moment later. Nothing else listens. Used in processes with PyTorch: probe.py, pairs.py.

Whoever reaches the store can write into it, and newer releases list its keys. So rank 0's node gives the other nodes a
random secret by munge.py: it is part of the prefix of all further keys, and signs what is put there (HMAC-SHA256).
Where rank 0's node has no MUNGE, everything is believed.

Keys in the store (all JSON within the bounds of messages.py):
    secret              as a credential; '' where there is no MUNGE
    nodes               how many have come; each takes its number from it; rank 0's node is 0
    come-N              first message of node N: {'node', 'rank', 'ranks'}
    go                  answer of rank 0's node: {'now', 'nodes', 'go'}
    report-N, word      what node N found; the verdict
    heard               how many have read the verdict
"""
import contextlib
import datetime
import hashlib
import hmac
import os
import socket
import time

from . import messages, network
from .kinds import Any, Callable, Iterable
from .machine import Machine

COMES = {'node': str, 'rank': int, 'ranks': int}
# seconds that rank 0's node waits until others have read the verdict
HEARD = 3
# seconds that the store needs for an answer only if it is busy with connections of others
BUSY = 1
ANSWERS = "something answers there, but not as PyTorch's store does"


class NotMet(Exception):
    """The nodes cannot meet."""


class Unsigned(ValueError):
    """Somebody else has written this."""


class Store:
    """
    A client of the store. Rank 0's first one is the server, except under torchrun, whose agent is.

    :param seconds: limit for each answer; connections of strangers delay the store by up to 5 s each (look_up())
    :param first: whether this is the process's first client, and on rank 0 the one that makes the key
    :raises NotMet: the store cannot be reached, or the port is taken
    """

    secret = b''

    def __init__(self, environ: 'Any', seconds: float, first: bool = True) -> None:
        import torch.distributed as dist
        self.environ, self.seconds, self.number = environ, seconds, 0
        master = first and environ['RANK'] == '0'
        self.store = self.whole = dist.PrefixStore(
            'slingtorch-%s' % environ.get('TORCHELASTIC_RESTART_COUNT', '0'),
            self.call(dist.TCPStore, environ['MASTER_ADDR'], int(environ['MASTER_PORT']), None,
                      master and environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True',
                      datetime.timedelta(seconds=seconds), False))     # type: Any
        self.call(self.store.num_keys)     # whether it answers; no key that others could write
        if master:
            self.share_secret()

    def another(self) -> 'Store':
        """A new client for another thread: while one waits, other threads cannot use it."""
        store = Store(self.environ, self.seconds, False)
        store.use(self.secret)
        return store

    def use(self, secret: bytes) -> None:
        """Hide and sign all further keys with this secret, if it is not empty."""
        if secret:
            import torch.distributed as dist
            self.secret = secret
            self.store = dist.PrefixStore(self.sign('prefix', b''), self.whole)

    def share_secret(self) -> None:
        """On rank 0's node: make a secret, if there is MUNGE."""
        from . import munge     # only here: it needs ctypes
        secret, credential = os.urandom(32), ''
        with contextlib.suppress(munge.NoMunge):
            credential = munge.Munge().seal(secret)
        self.call(self.store.set, 'secret', credential)
        self.use(secret if credential else b'')

    def get_secret(self, end: float) -> None:
        """
        On other nodes. :raises NotMet: there is no secret by the time `end`, another user has put it there, or rank 0's
        node has MUNGE and this one does not
        """
        from . import munge
        self.wait('secret', end)
        credential = self.raw(['secret'])[0].decode('ascii', 'replace')
        try:
            self.use(munge.Munge().open(credential) if credential else b'')
        except munge.NoMunge as err:
            raise NotMet("MUNGE answers on rank 0's node, but not on this one (%s): see systemctl status munge" % err)
        except ValueError:
            raise NotMet("another user writes into PyTorch's store at MASTER_PORT=%s: choose another port, and tell "
                         "your centre" % self.environ['MASTER_PORT'])

    def sign(self, key: str, data: bytes) -> str:
        """The signature of a message under this key; '' without a secret."""
        return hmac.new(self.secret, key.encode() + b'=' + data, hashlib.sha256).hexdigest() if self.secret else ''

    def put(self, key: str, thing: 'Any') -> None:
        """Store a message under this key. :raises NotMet: the store is gone"""
        data = messages.dump(thing)
        self.call(self.store.set, key, self.sign(key, data) + data.decode())

    def load(self, key: str, data: bytes) -> 'Any':
        """
        The message that was found under this key. :raises Unsigned: somebody else has written it
        :raises ValueError: it is no message
        """
        signature, data = (data[:64], data[64:]) if self.secret else (b'', data)
        if not hmac.compare_digest(signature, self.sign(key, data).encode()):
            raise Unsigned("another user wrote %s into PyTorch's store" % key)
        return messages.load(data)

    def count(self, key: str, more: int = 0) -> int:
        """Add to a counter; returns its new value. :raises NotMet: the store is gone"""
        return self.call(self.store.add, key, more)

    def call(self, function: 'Callable', *arguments: 'Any') -> 'Any':
        """Call a function of the store; returns its result. :raises NotMet: the store is gone"""
        try:
            return function(*arguments)
        except Exception as err:    # depending on the release: DistNetworkError, DistStoreError, RuntimeError
            raise NotMet((str(err).strip().splitlines() or [repr(err)])[0][:300])

    def raw(self, keys: list) -> list:
        """The values of these keys, which must exist. :raises NotMet: the store is gone"""
        if hasattr(self.store, 'multi_get'):    # since 2.1
            return self.call(self.store.multi_get, keys) if keys else []
        return [self.call(self.store.get, key) for key in keys]

    def get(self, key: str, end: float) -> 'Any':
        """
        Wait for the message under a key. :raises NotMet: there is none by the time `end`, or the store is gone
        :raises ValueError: the value is not a message
        """
        self.wait(key, end)
        while True:
            try:
                return self.load(key, self.raw([key])[0])
            except Unsigned:    # rank 0 may write there later
                if time.monotonic() > end:
                    raise
            time.sleep(messages.LOOK)

    def wait(self, key: str, end: float) -> None:
        """Wait until a key exists. :raises NotMet: it does not by the time `end`, or the store is gone"""
        seconds = max(0.05, end - time.monotonic())
        self.call(self.store.wait, [key], datetime.timedelta(seconds=seconds))

    def join(self, said: dict, end: float) -> 'Any':
        """As a node but rank 0's: say this at first; returns the answer 'go'."""
        self.get_secret(end)
        self.number = self.count('nodes', 1)
        self.put('come-%d' % self.number, said)
        return self.get('go', end)

    def report(self, thing: 'Any', end: float) -> str:
        """Store this node's report; returns rank 0's verdict."""
        self.put('report-%d' % self.number, thing)
        word = self.get('word', end)
        self.count('heard', 1)
        return str(word)[:10]

    # --- rank 0's node

    def known(self, name: str, numbers: 'Iterable[int]', form: dict) -> dict:
        """The messages stored so far as NAME-<number>: {number: message, None if it has another form}."""
        found, there = {}, [number for number in numbers if self.is_there('%s-%d' % (name, number))]  # type: dict, list
        for number, data in zip(there, self.raw(['%s-%d' % (name, number) for number in there])):
            try:
                said = self.load('%s-%d' % (name, number), data)
            except Unsigned:
                continue    # the node itself may write there later
            except ValueError:
                said = None
            found[number] = said if messages.has_form(said, form) else None
        return found

    def others(self, ranks: int, world: int, end: float) -> dict:
        """
        Wait for nodes until the time `end`, or until this many ranks have come: {number of a node: its first message,
        or None if it has another form}. While the store is busy with connections of strangers, nodes wait behind them.
        """
        found, there, last = {}, 0, time.monotonic() + self.seconds  # type: dict, int, float
        while there < ranks and time.monotonic() < end:
            begin = time.monotonic()
            came = set(range(1, min(self.count('nodes'), ranks) + 1))
            new = self.known('come', came - set(found), COMES)
            for number, said in sorted(new.items()):
                if said and not (0 < said['rank'] < world and 0 < said['ranks'] <= ranks):
                    said = None
                found[number] = said
                there += said['ranks'] if said else 1
            took = time.monotonic() - begin
            if took > BUSY:
                end = max(end, min(last, end + took))
            elif not new:
                time.sleep(messages.LOOK)
        return found

    def is_there(self, key: str) -> bool:
        """Whether this key exists."""
        if hasattr(self.store, 'check'):    # in newer releases
            return bool(self.call(self.store.check, [key]))
        try:
            self.store.wait([key], datetime.timedelta(seconds=messages.LOOK))
            return True
        except Exception:
            return False

    def reports(self, numbers: list, end: float) -> dict:
        """Wait for reports until the time `end`: {number of a node: its report}."""
        found = {}  # type: dict

        def complete() -> bool:
            found.update(self.known('report', set(numbers) - set(found), {}))
            return len(found) == len(numbers)

        messages.until(complete, end)
        return found

    def word(self, word: str, nodes: int) -> None:
        """Tell all nodes the verdict, and wait until this many have read it."""
        self.put('word', word)
        messages.until(lambda: self.count('heard') >= nodes, time.monotonic() + HEARD)


def attempt(address: str, port: int) -> str:
    """How this node reaches an address of rank 0's node, and what the kernel says of it, for a message."""
    own = network.source_of(address)
    try:
        with socket.create_connection((address, port), 3):
            answer = ANSWERS
    except socket.timeout:
        answer = "no answer"
    except (OSError, OverflowError) as err:
        answer = getattr(err, 'strerror', None) or str(err)
    return '%s, from %s%s: %s' % (address, own or 'nowhere', network.interface_of(own), answer)


def why_not(environ: 'Any', said: str = '') -> str:
    """Why this node does not reach rank 0's node, for a message."""
    host, port = environ['MASTER_ADDR'], environ['MASTER_PORT']
    low = ' '.join(Machine().read('proc/sys/net/ipv4/ip_local_port_range').split())
    try:
        found = network.addresses(host)
        answers = '; '.join(attempt(address, int(port)) for address in found)
    except OSError as err:
        found, answers = [], "it has no address here: %s" % err
    text = "no connection to MASTER_ADDR=%s, MASTER_PORT=%s (%s)" % (host, port, answers)
    if any(map(network.is_loopback, found)):
        text += ". On this node, %s is a loopback address: see its /etc/hosts" % host
    elif environ.get('RANK', '0') != '0' and any(network.source_of(address) == address for address in found):
        # only the first rank of a node comes here
        text += ". MASTER_ADDR is this node, but rank 0 is on another one: unset MASTER_ADDR in the job script"
    if low and low != network.LINUX_PORTS:
        text += ". conda-python-distributed derives MASTER_PORT from ip_local_port_range, which is %s here" % low
    return text + (' [%s]' % said if said else '')


def look_up(host: str) -> float:
    """
    Seconds to look up the name of a host's address, as PyTorch's store does for each connection (c10d's socket.cpp,
    getnameinfo(3) of an IPv4-mapped IPv6 address).
    """
    begin, address = time.monotonic(), network.address_of_host(host)
    with contextlib.suppress(OSError, UnicodeError):
        socket.getnameinfo(('::ffff:' + address if '.' in address else address, 9, 0, 0), 0)
    return time.monotonic() - begin
