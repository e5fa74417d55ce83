# SPDX-License-Identifier: GPL-2.0-only
"""
The network as a training uses it, tried by the process with PyTorch: all_reduces among the ranks of the node and over
one rank of each node, which rise from one float to 8 MB. Each step has its own limit, and what the kernel says of the
connections meanwhile (TCP_INFO of tcp(7)) tells packets that are lost from somebody who is late.
"""
import contextlib
import fcntl
import os
import re
import select
import signal
import socket
import struct
import threading
import time

from .kinds import Any, Callable, Mapping

# what is sent in turn: bytes, its name
ROW = ((4, 'one float'), (64 << 10, '64 kB'), (8 << 20, '8 MB'))
# Seconds: for each step, for all of them together, and for those that wait for somebody else, while nothing of their
# own is under way.
STEP, RENDEZVOUS, ALL, ASIDE = 5, 6, 8, 9
# and how often connections are looked at
LOOK = 0.25
# ranks of a node that take part in its own all_reduce at most: each connects to all others
LOCAL = 16
# states of TCP (Linux net/tcp_states.h)
CONNECTING, LISTENING = 2, 10
# ip_local_port_range as Linux has it (ip(7))
LINUX_PORTS = '32768 60999'
# What nobody has acknowledged is sent again 0.2, 0.6, 1.4, 3 and 6.2 s after the first time at the earliest, and the
# first segment of a connection after 1, 3 and 7 s (Linux net/ipv4/tcp_timer.c): after so many times a step of 5 s hears
# nothing that it has not heard. Newer kernels ask for connections each second, and do so for as long.
UNHEARD, UNANSWERED, ASKED = 4, 2, 3.5
WRONG_VALUES = 'wrong values came'
# of a network that carries little; yellow
SLOW = 'is slow'
NAME_IT = "export GLOO_SOCKET_IFNAME=NAME OF THE INTERFACE between the nodes"
REFUSED = ("the nodes reach rank 0's at MASTER_PORT, but connections to other ports are refused: by something between "
           "them, such as a firewall")
OPEN_PORTS = "have the centre open all ports between the nodes of a job; a training's connections take any"
# what the others see when one has given up
SECONDARY = r'closed by peer|reset by peer|Broken pipe|Connection refused|[Tt]imed out|did not end'
# seconds to another node and back above which the nodes of a cluster are far from each other
FAR = 0.005
# the share of segments sent again from which on the network is said to lose packets; and how many at least
LOSS, RESENT = 0.05, 5


def connections() -> list:
    """
    This process's own TCP sockets: dictionaries with state, here (host, port), there (the other end's port, or 0),
    resent and sent (segments), again (times the segment under way was sent again), underway (segments that nobody has
    acknowledged), trip (the shortest seconds to the other end and back).
    """
    found = []
    for name in os.listdir('/proc/self/fd'):
        try:
            link = os.readlink('/proc/self/fd/' + name)
            if not link.startswith('socket:'):
                continue
            own = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue        # it was that of listdir, or is gone
        with own:
            try:
                told = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 152)
                entry = {'state': told[0], 'again': told[2], 'here': own.getsockname()[:2]}
            except OSError:
                continue    # of another kind
            entry['there'] = 0
            with contextlib.suppress(OSError):
                entry['there'] = asked(link[8:-1]) if told[0] == CONNECTING else own.getpeername()[1]
            words = struct.unpack('24I', told[8:104])
            entry.update(underway=words[4], resent=words[23],
                         sent=struct.unpack('I', told[136:140])[0] if len(told) >= 140 else 0,
                         trip=struct.unpack('I', told[148:152])[0] / 1e6 if len(told) >= 152 else 0)
            found.append(entry)
    return found


def asked(inode: str) -> int:
    """The port that a socket wants to be connected to, which getpeername(2) does not say; 0 if nobody knows."""
    for table in ('/proc/self/net/tcp', '/proc/self/net/tcp6'):
        with contextlib.suppress(OSError), open(table) as stream:
            for line in stream:
                fields = line.split()
                if fields[9] == inode:
                    return int(fields[2].partition(':')[2], 16)
    return 0


def own_address(name: str) -> str:
    """What to say of a MASTER_ADDR that is on each node the node itself; '' of another one."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ''
    if not all(is_loopback(entry[4][0]) for entry in found):
        return ''
    return ". MASTER_ADDR=%s is %s on this node, which is the node itself: see its hosts file" % (name, found[0][4][0])


def why_no_loopback() -> str:
    """Why this machine cannot reach itself at 127.0.0.1, as the kernel says; '' if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            query.connect(('127.0.0.1', 9))
            return ''
        except OSError as err:
            return str(err)


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
    """' (eth0)' for an address of that interface; '' if none has it."""
    return next((' (%s)' % name for _, name in socket.if_nameindex() if address_of(name) == address), '')


def port_range() -> str:
    """The kernel's ports for connections, by which conda-python-distributed chooses MASTER_PORT."""
    try:
        with open('/proc/sys/net/ipv4/ip_local_port_range') as stream:
            return ' '.join(stream.read().split())
    except OSError:
        return ''


def is_loopback(host: str) -> bool:
    """Whether an address is of the node itself alone."""
    return host == '::1' or re.sub('^::ffff:', '', host).startswith('127.')


def state(sockets: list, before: int = 0) -> dict:
    """
    What matters of connections(), for JSON.

    :param before: segments that were sent again in steps that ended well
    """
    return {
        'resent': sum(entry['resent'] for entry in sockets) - before, 'sent': sum(entry['sent'] for entry in sockets),
        'before': before, 'trip': max((entry.get('trip', 0) for entry in sockets if not is_loopback(entry['here'][0])),
                                      default=0),
        'stuck': any(entry['again'] and entry['underway'] for entry in sockets if entry['state'] != CONNECTING),
        'underway': any(entry['underway'] for entry in sockets if entry['state'] != CONNECTING),
        'again': max((entry['again'] for entry in sockets if entry['state'] != CONNECTING and entry['underway']),
                     default=0),
        'silent': any(entry['state'] == CONNECTING for entry in sockets),
        'to': sorted({entry['there'] for entry in sockets if entry['state'] == CONNECTING}),
        'link': any(entry['here'][0].startswith('fe80:') for entry in sockets if entry['state'] == CONNECTING),
        'loopback': sorted({entry['here'][0] for entry in sockets
                            if entry['state'] == LISTENING and is_loopback(entry['here'][0])}),
    }


def segments() -> tuple:
    """(segments of TCP that this node has sent, those of them that it sent again) since it was started: proc(5)."""
    try:
        with open('/proc/net/snmp') as stream:
            names, values = [line.split()[1:] for line in stream if line.startswith('Tcp:')]
    except (OSError, ValueError):
        return 0, 0
    told = dict(zip(names, map(int, values)))
    return told.get('OutSegs', 0), told.get('RetransSegs', 0)


def hopeless(sockets: list, seconds: float) -> bool:
    """
    Whether the kernel has asked in vain so often that a step need not be waited for.

    :param sockets: connections()
    :param seconds: since the step began
    """
    return any(entry['again'] >= UNANSWERED and seconds >= ASKED if entry['state'] == CONNECTING else
               entry['again'] >= UNHEARD and entry['underway'] for entry in sockets)


class Watch:
    """
    Calls `give_up` if a step takes too long, or cannot end any more.

    :ivar name: of the step that goes on
    :ivar told: state() when something was last under way
    :param give_up: called with a text and a dictionary of state()
    :param factor: of all limits
    :param others_gone: whether another node has given up
    """

    def __init__(self, give_up: 'Callable[[str, dict], None]', factor: float = 1,
                 others_gone: 'Callable[[], bool]' = lambda: False) -> None:
        self.give_up, self.factor, self.name, self.before, self.others_gone = give_up, factor, '', 0, others_gone
        self.told, self.gone = state([]), 0
        self.begin = self.since = time.monotonic()
        self.limit, self.done = STEP * factor, threading.Event()
        threading.Thread(target=self.loop, daemon=True).start()

    def enter(self, name: str, seconds: float = STEP) -> None:
        """A step begins."""
        self.before = sum(entry['resent'] for entry in connections())
        self.since, self.limit, self.name = time.monotonic(), seconds * self.factor, name

    def loop(self) -> None:
        """Look again and again."""
        while not self.done.wait(LOOK):
            now, sockets = time.monotonic(), connections()
            if any(entry['underway'] for entry in sockets):
                self.told = state(sockets, self.before)
            text = self.look(now, sockets)
            if text and not self.done.is_set():
                self.give_up(text, dict(state(sockets, self.before), limit=self.limit))
                return

    def look(self, now: float, sockets: list) -> str:
        """What is said of the step if it is given up; '' if it goes on."""
        self.gone += self.others_gone()
        # its own error may come first; and what 8 MB took so far says how slow the network is
        if self.gone > 2 or hopeless(sockets, now - self.since) and not self.name.endswith(ROW[-1][1]):
            return '%s did not end' % self.name
        if now - self.since < self.limit and now - self.begin < ALL * self.factor:
            return ''
        # one that waits for another node's process, which is late, has nothing under way itself
        told = state(sockets, self.before)
        if told['underway'] or told['silent'] or told['loopback'] or now - self.begin > ASIDE * self.factor:
            return '%s did not end within %d s' % (self.name, self.limit)
        return ''


def rise(reduce: 'Callable[[Any], None]', zeros: 'Callable[[int], Any]', ranks: int, watch: Watch,
         times: dict) -> None:
    """
    The rising row, twice each, since the first one may have to set up connections; fills in `times`.

    :param reduce: all_reduce of a tensor, and wait for it
    :param zeros: makes a tensor of so many floats, 0 on all ranks
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
            if not least == most == ranks:      # nan is not, either
                raise RuntimeError("%s: an all_reduce of ones over %d ranks gave values from %g to %g" % (
                    WRONG_VALUES, ranks, least, most))


def among_local_ranks(torch: 'Any', ranks: int, seconds: float) -> str:
    """
    An all_reduce of gloo among so many processes of this node, as its ranks do: forks of this one, since each of them
    would have to import PyTorch for seconds. What went wrong; '' if it was right.
    """
    import datetime

    import torch.distributed as dist
    problem = why_no_loopback()
    if problem:
        return "no connection to 127.0.0.1 (%s)" % problem
    ranks, limit, children = min(ranks, LOCAL), datetime.timedelta(seconds=seconds), []
    answers, answer = os.pipe()
    for rank in range(1, ranks):
        given, give = os.pipe()
        pid = os.fork()
        if not pid:
            text = b'died'
            try:
                text = _local_rank(dist, torch, dist.TCPStore(
                    'localhost', int(os.read(given, 20) or 0), ranks, False, limit), rank, ranks, limit)
            except BaseException as err:    # whatever it is, it is the answer
                text = str(err).encode()[:200] or b'failed'
            finally:
                os.write(answer, text.replace(b'\n', b' ') + b'\n')
                os._exit(0)
        os.close(given)
        children.append((pid, give))
    wrong = b''
    try:
        store = dist.TCPStore('localhost', 0, ranks, True, limit, False)
        for _, give in children:
            os.write(give, b'%d' % store.port)
        wrong = _local_rank(dist, torch, store, 0, ranks, limit)
    except Exception as err:
        wrong = str(err).encode()
    os.close(answer)
    end, texts = time.monotonic() + seconds, b''
    while not wrong and texts.count(b'\n') < ranks - 1:
        if not select.select([answers], [], [], max(0, end - time.monotonic()))[0]:
            break
        more = os.read(answers, 4096)
        texts += more
        if not more:
            break
    for pid, give in children:
        os.close(give)
        os.kill(pid, signal.SIGKILL)    # one that has ended is not yet waited for
        os.waitpid(pid, 0)
    os.close(answers)
    missing = ranks - 1 - texts.count(b'\n')
    text = wrong or next((line for line in texts.split(b'\n') if line), b'')
    return text.decode(errors='replace') or ("%d of %d ranks did not answer" % (missing, ranks) if missing else '')


def _local_rank(dist: 'Any', torch: 'Any', store: 'Any', rank: int, ranks: int, limit: 'Any') -> bytes:
    """One of them: b'', or what went wrong."""
    group = dist.ProcessGroupGloo(store, rank, ranks, limit)
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    total = int(tensor.item())
    return b'' if total == ranks else b'an all_reduce of ones over %d ranks gave %d' % (ranks, total)


def own_name_address() -> str:
    """The address that gloo takes where GLOO_SOCKET_IFNAME is not set: the first one of the node's own name; or ''."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return ''


def address_of_gloo(environ: 'Mapping[str, str]') -> str:
    """Which one gloo tells the other nodes, and its interface."""
    name = environ.get('GLOO_SOCKET_IFNAME', '')
    own = address_of(name) if name else own_name_address()
    return own + (interface_of(own) if own else '')


def explained(text: str, told: dict, environ: 'Mapping[str, str]') -> tuple:
    """
    (what is said, what to do) of an all_reduce that failed or did not end; ('', '') if nobody knows.

    Texts are the same on all nodes that see the same cause, so that it is one line.

    :param text: of the error
    :param told: state() at that time
    :param environ: of the rank
    """
    if 'unsupported gloo device' in text:
        return ("GLOO_DEVICE_TRANSPORT=%s is not a transport that the gloo of this PyTorch has"
                % environ.get('GLOO_DEVICE_TRANSPORT', ''), "unset it in the job script, or write TCP")
    if 'no connection to 127.0.0.1' in text:
        return "processes of a node cannot reach each other: %s" % text.split(': ', 1)[-1], (
            "have the centre look at the node's loopback interface (ip link show lo)")
    loopback = told.get('loopback') or re.findall(r'\b127(?:\.\d+){3}\b', text)
    if 'ss_family' in text:
        loopback = [address for address in [own_name_address()] if ':' in address]
        if loopback and not is_loopback(loopback[0]):
            return ("gloo tells the other nodes an IPv6 address of a node, that of its own name, and others have IPv4",
                    NAME_IT)
    if loopback:
        return ("gloo tells the other nodes %s as the address of a node: its own name has this one in its hosts file, "
                "or has none" % loopback[0],
                NAME_IT + "; or have the centre take the name out of that line of /etc/hosts")
    if told.get('silent') and told.get('link'):
        return ("the interface of GLOO_SOCKET_IFNAME=%s has no address but one of its link alone (fe80:...), and "
                "nobody answers there" % environ.get('GLOO_SOCKET_IFNAME', ''),
                "name another interface, or have the centre look at this one (ip address)")
    if told.get('silent') and str(told.get('to', [])) == '[%s]' % environ.get('MASTER_PORT'):
        return ("connections to MASTER_PORT=%s of rank 0's node get no answer, and others do: something between the "
                "nodes drops packets to this port, such as a firewall" % environ.get('MASTER_PORT'),
                "unset MASTER_PORT in the job script or name another one; have the centre open all ports between the "
                "nodes of a job")
    if told.get('silent'):
        return ("the nodes reach rank 0's at MASTER_PORT, but connections to other ports get no answer: something "
                "between them drops packets, such as a firewall",
                OPEN_PORTS)
    # ETIMEDOUT is the kernel's: nobody acknowledges what it sends again
    unheard = told.get('stuck') or 'Connection timed out' in text
    if unheard and '64 kB' in text and told.get('before', 0) < RESENT // 2:
        return ("small messages pass, the all_reduce of 64 kB does not: packets of full size are lost on the way, as "
                "where the MTU of a switch or an interface between the nodes is smaller than that of the nodes",
                "have the centre look at the MTU of the nodes and switches; ip link show dev NAME mtu")
    if re.search('8 MB.*did not end', text):
        seconds = told.get('limit', STEP)
        return ("the network between the nodes %s, less than %.1g MB/s, or loses packets: the all_reduce of 8 MB did "
                "not end within %d s, and 64 kB did end" % (SLOW, ROW[-1][0] / seconds / 1e6, seconds),
                "vet measures the nodes, and finds a slow one: docs/check.md")
    if told.get('resent', 0) + told.get('before', 0) >= RESENT or told.get('again', 0) >= UNHEARD:
        return ("packets get lost between the nodes: %s" % text,
                "have the centre look at cables, ports and switches; vet finds the node: docs/check.md")
    return '', ''


def speed(times: dict, ranks: int) -> float:
    """GB/s that a node sends and receives in the largest all_reduce: a ring's share of it; 0 without."""
    size = max(map(int, times), default=0)
    return 2 * (ranks - 1) / ranks * size / times[str(size)] / 1e9 if size >= ROW[-1][0] and times[str(size)] else 0
