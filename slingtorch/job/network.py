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
from .machine import Machine

# what is sent in turn: bytes, its name
ROW = ((4, 'one float'), (64 << 10, '64 kB'), (8 << 20, '8 MB'))
# seconds for each step, and for a process that has nothing under way itself and waits for another
STEP, ASIDE = 5, 9
# and how often connections are looked at
LOOK = 0.25
# states of TCP (Linux net/tcp_states.h)
CONNECTING, LISTENING = 2, 10
# ip_local_port_range as Linux has it (ip(7))
LINUX_PORTS = '32768 60999'
# in the text about a slow network, which is yellow
SLOW = 'is slow'
NAME_IT = "export GLOO_SOCKET_IFNAME=NAME OF THE INTERFACE between the nodes"
REFUSED = ("the nodes reach rank 0's node at MASTER_PORT, but something between them, such as a firewall, refuses "
           "connections to other ports")
OPEN_PORTS = "have the centre open all ports between the nodes of a job: a training may use any of them"
# errors on the other nodes after one has given up
SECONDARY = r'closed by peer|reset by peer|Broken pipe|Connection refused|[Tt]imed out|did not end'
# round-trip seconds above which nodes are farther apart than in one cluster
FAR = 0.005
# from this share of resent segments, and this number, check reports that the network loses packets
LOSS, RESENT = 0.05, 5


def connections() -> list:
    """
    This process's own TCP sockets: dictionaries with state, here (address), resent and sent (segments), again (how
    often the segment under way was resent), underway (unacknowledged segments), trip (shortest round trip in seconds).
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
            words = struct.unpack('36I', told[8:].ljust(144, b'\0'))   # older kernels have fewer
            found.append({'state': told[0], 'again': told[2], 'here': here, 'underway': words[4], 'resent': words[23],
                          'sent': words[32], 'trip': words[35] / 1e6})
    return found


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


def state(sockets: list, before: int = 0) -> dict:
    """
    A summary of connections(), for JSON.

    :param before: segments that were resent in steps that ended well
    """
    connecting = [entry for entry in sockets if entry['state'] == CONNECTING]
    underway = [entry for entry in sockets if entry['state'] != CONNECTING and entry['underway']]
    return {
        'resent': sum(entry['resent'] for entry in sockets) - before, 'sent': sum(entry['sent'] for entry in sockets),
        'trip': max((entry['trip'] for entry in sockets if not is_loopback(entry['here'])), default=0),
        'before': before, 'underway': bool(underway), 'again': max((entry['again'] for entry in underway), default=0),
        'silent': bool(connecting), 'link': any(entry['here'].startswith('fe80:') for entry in connecting),
        'loopback': sorted({entry['here'] for entry in sockets
                            if entry['state'] == LISTENING and is_loopback(entry['here'])}),
    }


def segments() -> tuple:
    """(TCP segments that this node has sent, those that it has resent) since it booted: proc(5)."""
    lines = [line.split()[1:] for line in Machine().read('proc/net/snmp').splitlines() if line.startswith('Tcp:')]
    told = dict(zip(*lines))
    return int(told.get('OutSegs', 0)), int(told.get('RetransSegs', 0))


def slowness(seconds: float, nodes: int) -> float:
    """By what to multiply the limits: with more nodes, each connects to more others; `seconds`: what the user gives."""
    return max(1, seconds / 120) + nodes / 100


class Watch:
    """
    Whether a step takes too long.

    :ivar told: state() when something was last under way, or at the end
    :param factor: multiplies all limits
    """

    def __init__(self, factor: float = 1) -> None:
        self.factor, self.name, self.before, self.told, self.since = factor, '', 0, state([]), time.monotonic()

    def enter(self, name: str) -> None:
        """Begin a step."""
        self.since, self.name, self.before = time.monotonic(), name, sum(one['resent'] for one in connections())

    def over(self, thread: threading.Thread) -> str:
        """Look at the connections until the thread ends; why it is given up, '' if it has ended."""
        while True:
            thread.join(LOOK)
            if not thread.is_alive():
                return ''
            text = self.look(time.monotonic() - self.since, state(connections(), self.before))
            if text and thread.is_alive():
                return text

    def look(self, seconds: float, now: dict) -> str:
        """Why the step is given up after these seconds, from the state() now; '' if it goes on."""
        # a process that waits for a late one on another node has nothing under way itself
        waits = not (now['underway'] or now['silent'] or now['loopback'])
        over = seconds > (ASIDE if waits else STEP) * self.factor
        if now['underway'] or over:
            self.told = now
        return '%s did not end within %d s' % (self.name, STEP * self.factor) if over else ''


def rise(reduce: 'Callable[[Any], None]', zeros: 'Callable[[int], Any]', ranks: int, watch: Watch,
         times: dict) -> None:
    """
    All_reduces of rising size, each twice, since the first may have to set up connections; fills in `times`.

    :param reduce: does an all_reduce of a tensor, and waits for it
    :param zeros: makes a tensor with this number of zeros
    """
    for size, name in ROW:
        watch.enter('the all_reduce of %s' % name)
        for _ in range(2):
            tensor = zeros(size // 4)
            tensor += 1
            begin = time.monotonic()
            reduce(tensor)
            times[str(size)] = time.monotonic() - begin
            least, most = float(tensor.min().item()), float(tensor.max().item())
            if not least == most == ranks:      # also if one is nan
                raise RuntimeError("wrong values came: an all_reduce of ones over %d ranks gave values from %g to %g"
                                   % (ranks, least, most))


def address_of_gloo(environ: 'Mapping[str, str]') -> str:
    """The address that gloo gives to the other nodes, and its interface."""
    name = environ.get('GLOO_SOCKET_IFNAME', '')
    own = address_of(name) if name else address_of_host(socket.gethostname())   # as gloo chooses it
    return own + interface_of(own)


def explained(text: str, told: dict, environ: 'Mapping[str, str]') -> tuple:
    """
    (text, remedy) for an all_reduce that failed or did not end; ('', '') if the cause is unknown.

    Nodes that see the same cause return the same text, so that the report has one line for it.

    :param text: the error's own text
    :param told: state() at that time
    """
    if 'unsupported gloo device' in text:
        return ("GLOO_DEVICE_TRANSPORT=%s: this PyTorch's gloo has no such transport"
                % environ.get('GLOO_DEVICE_TRANSPORT', ''), "unset it in the job script, or set it to TCP")
    loopback, name = told.get('loopback') or re.findall(r'\b127(?:\.\d+){3}\b', text), environ.get('GLOO_SOCKET_IFNAME')
    if loopback:
        return ("gloo on a node gives %s to the other nodes as its address: %s" % (
            loopback[0], "it is that of the interface GLOO_SOCKET_IFNAME=%s" % name if name else
            "the node's own name has this address in /etc/hosts, or has no address"), NAME_IT)
    if told.get('silent') and told.get('link'):
        return ("the interface of GLOO_SOCKET_IFNAME=%s has only a link-local address (fe80:...), and other nodes do "
                "not answer there" % name, NAME_IT)
    if told.get('silent'):
        return ("the nodes reach rank 0's node at MASTER_PORT, but connections to other ports get no answer: something "
                "between them, such as a firewall, drops packets",
                OPEN_PORTS)
    # the kernel gives ETIMEDOUT if nobody acknowledges what it resends
    unheard = told.get('again') or 'Connection timed out' in text
    if unheard and '64 kB' in text and told.get('before', 0) < RESENT // 2:
        return ("small messages pass, but the all_reduce of 64 kB does not: full-size packets are lost on the way, for "
                "example because a switch or an interface between the nodes has a smaller MTU than the nodes",
                "ask the centre to check the MTU of the nodes and switches (command: ip link show dev NAME)")
    late = re.search(r'8 MB did not end within (\d+) s', text)
    if late:
        return ("the network between the nodes %s, less than %.1g MB/s, or loses packets: %s, but that of 64 kB did" % (
            SLOW, ROW[-1][0] / int(late.group(1)) / 1e6, text),
            "run vet, which measures the nodes and finds a slow one: docs/check.md")
    if told.get('resent', 0) + told.get('before', 0) >= RESENT or told.get('again', 0) >= RESENT - 1:
        return ("packets get lost between the nodes: %s" % text,
                "ask the centre to check cables, ports and switches; vet finds the node: docs/check.md")
    return '', ''
