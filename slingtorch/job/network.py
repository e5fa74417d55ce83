# SPDX-License-Identifier: GPL-2.0-only
"""
The process with PyTorch tries the network as a training uses it: all_reduces over one rank of each node, from one float
to 8 MB. Each step has its own time limit. Meanwhile, the kernel's data about the connections (TCP_INFO of tcp(7)) tells
lost packets from a late process.
"""
import contextlib
import fcntl
import os
import re
import socket
import struct
import threading
import time

from .kinds import Any, Callable, Mapping
from .messages import until

# what is sent in turn: bytes, its name
ROW = ((4, 'one float'), (64 << 10, '64 kB'), (8 << 20, '8 MB'))
# seconds for each step, and how often it is looked at
STEP, LOOK = 9, 0.25
# states of TCP (Linux net/tcp_states.h)
CONNECTING, LISTENING = 2, 10
# seconds in which a new connection is answered: TCP sends its first segment again after 1 and 3 s
ANSWER = 4
# ip_local_port_range as Linux has it (ip(7))
LINUX_PORTS = '32768 60999'
NAME_IT = "export GLOO_SOCKET_IFNAME=NAME OF THE INTERFACE between the nodes"
OPEN_PORTS = "have the centre open all ports between the nodes of a job: a training may use any of them"
# What state() adds to an error
LOOPBACK, LINK_LOCAL, SILENT, UNHEARD, RESENDS, BEFORE = (
    'gloo listens at', 'no answer to a link-local address', 'no answer to a connection', 'nobody acknowledges data',
    'segments were sent again', 'also in smaller messages')
# Why all_reduces fail or do not end: (pattern of an error with its state(), level, text, remedy). A broken network
# causes different errors on the nodes: the first entry that fits one of them is the cause.
CAUSES = (
    # not of the trial, although it may name a loopback address: rank 0's node had no store for it
    ('^PyTorch cannot open its store', '', '', ''),
    ('unsupported gloo device', 'red', "GLOO_DEVICE_TRANSPORT names a transport that this PyTorch's gloo does not have",
     "unset it in the job script, or set it to TCP"),
    (r'^(?!.*NCCL error).*(?:%s |\b)(127(?:\.\d+){3}|::1)\b' % LOOPBACK, 'red', r"gloo on a node gives \1 to the other "
     "nodes as its address: it is that of the interface GLOO_SOCKET_IFNAME or, without this variable, of the node's "
     "own name in /etc/hosts, or this name has no address", NAME_IT),
    (LINK_LOCAL, 'red', "the interface of GLOO_SOCKET_IFNAME has only a link-local address (fe80:...), and other nodes "
     "do not answer there", NAME_IT),
    (SILENT, 'red', "the nodes reach rank 0's node at MASTER_PORT, but connections to other ports get no answer: "
     "a firewall drops packets, or gloo's interface has no way to the other nodes", OPEN_PORTS + '; or ' + NAME_IT),
    ('8 MB did not end', 'yellow', r"the network between the nodes is slow, less than 2 MB/s, or loses packets: the "
     "all_reduce of 8 MB did not end, but that of 64 kB did",
     "run vet, which measures the nodes and finds a slow one: docs/check.md"),
    # the kernel gives ETIMEDOUT if nobody acknowledges what it resends
    ('64 kB (?!.*%s).*(%s|Connection timed out)' % (BEFORE, UNHEARD), 'red', "small messages pass, but the all_reduce "
     "of 64 kB does not: full-size packets are lost on the way, for example because a switch or an interface between "
     "the nodes has a smaller MTU than the nodes",
     "ask the centre to check the MTU of the nodes and switches (command: ip link show dev NAME)"),
    ('^(.*%s.*)' % RESENDS, 'red', r"packets get lost between the nodes: \1",
     "ask the centre to check cables, ports and switches; vet finds the node: docs/check.md"),
    ('^(?!.*(?:closed|reset) by).*(?:Last error: |: ValueError: ).', '', '', "correct what the message names; with "
     "NCCL_DEBUG=WARN NCCL says more, and 'slingtorch explain' explains the job's output"),
    # any other error but those that nodes report after another one has given up
    (r'^(?!.*(closed by peer|reset by peer|Broken pipe|Connection refused|[Tt]imed out|did not end)).*', '', '', ''),
    # the node at the other end has no error of its own
    ('Connection refused', 'red', "the nodes reach rank 0's node at MASTER_PORT, but something between them, such as a "
     "firewall, refuses connections to other ports", OPEN_PORTS),
    ('', '', '', ''))
# round-trip seconds above which nodes are farther apart than in one cluster
FAR = 0.005
# from this share of resent segments, and this number, check reports that the network loses packets
LOSS, RESENT = 0.05, 5


def connections() -> list:
    """
    This process's own TCP sockets: dictionaries with state, here (address), there (address and port of the other end,
    if it is connected), resent and sent (segments), again (how often the segment under way was resent), underway
    (unacknowledged segments), trip (shortest round trip in seconds).
    """
    found = []
    for name in os.listdir('/proc/self/fd'):
        try:
            link = os.readlink('/proc/self/fd/' + name)
            if not link.startswith('socket:'):
                continue
            own = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue        # the descriptor of listdir, or one closed meanwhile
        with own:
            try:
                told = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 152)
                here = own.getsockname()[0]
            except OSError:
                continue    # not a TCP socket
            words, there = struct.unpack('36I', told[8:].ljust(144, b'\0')), ('', 0)    # older kernels have fewer
            with contextlib.suppress(OSError):
                there = own.getpeername()[:2]
            found.append({'state': told[0], 'again': told[2], 'here': here, 'there': there, 'underway': words[4],
                          'resent': words[23], 'sent': words[32], 'trip': words[35] / 1e6})
    return found


def unanswered(port: int, count: int) -> int:
    """How many of this number of new connections get no answer at a port to which this process has a connection."""
    address = next((entry['there'] for entry in connections() if entry['there'][1] == port), ())    # type: tuple
    opened = []     # type: list
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):      # few open files: limits.py reports it
            for _ in range(count if address else 0):
                own = socket.socket(socket.AF_INET6 if ':' in address[0] else socket.AF_INET)
                opened.append(stack.enter_context(own))
                own.setblocking(False)
                own.connect_ex(address)

        def waiting() -> int:
            return sum(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CONNECTING for own in opened)

        until(lambda: not waiting(), time.monotonic() + ANSWER)
        return waiting()


def addresses(name: str) -> list:
    """The addresses of a host, as texts. :raises OSError: it has none"""
    try:
        return list(dict.fromkeys(entry[4][0] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
    except UnicodeError as err:
        raise OSError(err)


def address_of_host(name: str, default: str = '') -> str:
    """The first address of a host; the default if it has none."""
    with contextlib.suppress(OSError):
        return str(addresses(name)[0])
    return default


def source_of(address: str) -> str:
    """The own address from which packets go to an address; '' if there is no route."""
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as query:
        query.connect((address, 9))
        return str(query.getsockname()[0])
    return ''


def address_of(interface: str) -> str:
    """The IPv4 address of this interface; '' if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            # SIOCGIFADDR, netdevice(7)
            answer = fcntl.ioctl(query.fileno(), 0x8915, struct.pack('256s', interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            return ''


def interface_of(address: str) -> str:
    """' (eth0)' for an address of that interface; '' if no interface has it."""
    return next((' (%s)' % name for _, name in socket.if_nameindex() if address and address_of(name) == address), '')


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address."""
    return host == '::1' or re.sub('^::ffff:', '', host).startswith('127.')


def state(sockets: list, before: int, gloo: bool = True) -> str:
    """
    What connections() tell of an error, to add to its text, for CAUSES.

    :param before: segments that were resent in steps that ended well
    :param gloo: whether gloo made the connections; NCCL also listens for its own tool at a loopback address
    """
    again = max((entry['again'] for entry in sockets if entry['state'] != CONNECTING and entry['underway']), default=0)
    resent = sum(entry['resent'] for entry in sockets)
    said = {'%s %s' % (LOOPBACK, entry['here']) for entry in sockets
            if gloo and entry['state'] == LISTENING and is_loopback(entry['here'])}
    said |= {LINK_LOCAL if entry['here'].startswith('fe80:') else SILENT for entry in sockets
             if entry['state'] == CONNECTING}
    for true, text in ((again, UNHEARD), (before >= RESENT // 2, BEFORE),
                       (resent >= RESENT or again >= RESENT - 1, '%d %s' % (resent, RESENDS))):
        said |= {text} if true else set()
    return ' [%s]' % ', '.join(sorted(said)) if said else ''


def totals(sockets: list) -> dict:
    """Segments that connections() have sent and resent, and the longest of their shortest round trips."""
    return {'sent': sum(entry['sent'] for entry in sockets), 'resent': sum(entry['resent'] for entry in sockets),
            'trip': max((entry['trip'] for entry in sockets if not is_loopback(entry['here'])), default=0)}


def slowness(seconds: float, nodes: int) -> float:
    """By what to multiply the limits: with more nodes, each connects to more others; `seconds`: what the user gives."""
    return max(1, seconds / 120) + nodes / 100


class Watch:
    """Whether a step takes too long. :param factor: multiplies its limit"""

    def __init__(self, factor: float = 1) -> None:
        self.limit, self.name, self.before, self.since = STEP * factor, '', 0, time.monotonic()

    def enter(self, name: str) -> None:
        """Begin a step."""
        self.since, self.name, self.before = time.monotonic(), name, sum(one['resent'] for one in connections())

    def over(self, thread: threading.Thread) -> str:
        """Wait until the thread ends; the step that is given up, '' if it has ended."""
        while thread.is_alive():
            thread.join(LOOK)
            if thread.is_alive() and time.monotonic() - self.since > self.limit:
                return '%s did not end within %d s' % (self.name, self.limit)
        return ''


def rise(reduce: 'Callable[[Any], None]', zeros: 'Callable[[int], Any]', ranks: int, watch: Watch) -> float:
    """
    All_reduces of rising size, each twice, since the first may have to set up connections; returns the seconds of the
    faster one of the last size.

    :param reduce: does an all_reduce of a tensor, and waits for it
    :param zeros: makes a tensor with this number of zeros
    """
    for size, name in ROW:
        watch.enter('the all_reduce of %s' % name)
        took = []   # type: list
        for _ in range(2):
            tensor = zeros(size // 4)
            tensor += 1
            begin = time.monotonic()
            reduce(tensor)
            took.append(time.monotonic() - begin)
            least, most = float(tensor.min().item()), float(tensor.max().item())
            if not least == most == ranks:      # also if one is nan
                raise RuntimeError("wrong values came: an all_reduce of ones over %d ranks gave values from %g to %g"
                                   % (ranks, least, most))
    return min(took)


def address_of_gloo(environ: 'Mapping[str, str]') -> str:
    """The address that gloo gives to the other nodes, and its interface."""
    name = environ.get('GLOO_SOCKET_IFNAME', '')
    own = address_of(name) if name else address_of_host(socket.gethostname())   # as gloo chooses it
    return own + interface_of(own)


def cause(texts: list) -> tuple:
    """(the text that tells most, level, text and remedy of CAUSES for it; '' if the cause is unknown)"""
    return next((said, level, found.expand(text), remedy) for pattern, level, text, remedy in CAUSES
                for said in texts for found in [re.search(pattern, said)] if found)
