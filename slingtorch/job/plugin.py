# SPDX-License-Identifier: GPL-2.0-only
"""
NCCL's network plugin without NCCL, PyTorch or a GPU: a process of its own on one rank of each node loads it, asks for
its devices, and sends host memory to the next node through it while it receives from the one before. For check.py.

    python job plugin NAME...      the first of these libraries that can be loaded

Says in a JSON line what the plugin is and has, with a handle of each device; reads a JSON line with those of the next
node; says what it received, bytes a second by device, or what went wrong. Each answer has a "turn".

The table of functions is that of NCCL's own headers, src/include/plugin/net/net_v6.h to net_v12.h of 2.30.7: the places
of those called here are the same in all seven, their arguments are not.
"""
import ctypes
import json
import mmap
import os
import re
import sys
import time

from . import elf, nccl
from .machine import libraries, library_kind, mapped_libraries
from .node import SLOW_LINK, SOCKET_PROVIDERS, round_up
from .probe import first_lines, say
from .vet import Lane

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Any, Optional

    from .findings import Report
    from .machine import Machine

KNOWN = range(6, 13)
# places in the table, as all known versions have them
INIT, DEVICES, PROPERTIES, LISTEN, CONNECT, ACCEPT, REGISTER = range(1, 8)
SEND, RECEIVE, TEST = 10, 11, 13
HANDLE, HOST = 128, 1       # NCCL_NET_HANDLE_MAXSIZE, NCCL_PTR_HOST
# bytes through all devices of a node together, of one message, and messages at once (8 in v6, 32 since)
TOTAL, MESSAGE, AT_ONCE = 64 << 20, 4 << 20, 4
# seconds for the plugin to start, and for 64 MB
START, LIMIT = 8, 5
# A device is slow that has less than this part of the median of the node's devices.
SLOW_DEVICE = 0.5
REMEDY = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET shows what NCCL makes of it"


def starved(process: object = 'self') -> float:
    """Seconds that a process could have run and had no processor (proc(5), schedstat); 0 if nobody knows."""
    try:
        with open('/proc/%s/schedstat' % process) as stream:
            return int(stream.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Limit:
    """
    Seconds that a process may take, without those in which a busy node gave it no processor, and three times as many
    with them: libfabric's start takes half a second of processor time, and PyTorch is imported meanwhile.
    """
    MOST = 3

    def __init__(self, seconds: float, process: object = 'self') -> None:
        self.seconds, self.process, self.begin, self.before = seconds, process, time.monotonic(), starved(process)

    def left(self) -> float:
        """The seconds that are left of it."""
        left = self.begin + self.seconds - time.monotonic()
        if left > 0:
            return left
        return left + min((self.MOST - 1) * self.seconds, max(0, starved(self.process) - self.before))

    def over(self) -> bool:
        """Whether none are left."""
        return self.left() <= 0


class Failed(Exception):
    """A function of the plugin did not do what it was asked."""


class Plugin:
    """
    A plugin that is loaded.

    :ivar log: what it says through NCCL's logger, [(level, text)]
    """

    def __init__(self, names: list) -> None:
        self.log, wrong = [], []  # type: list, list
        for name in names:
            try:
                self.library = ctypes.CDLL(name)
                break
            except OSError as err:
                wrong.append(str(err))
        else:
            raise Failed(next((text for text in wrong if 'No such file' not in text), wrong[0]))
        self.path = next((path for path in libraries() if os.path.basename(name) in path or
                          os.path.realpath(name) == path), name)
        offered = nccl.offered(elf.Library(self.path))
        self.version = max(set(offered) & set(KNOWN), default=0)
        if not self.version:
            raise NotKnown("it has the interfaces %s; known are v%d to v%d" % (
                ', '.join('v%d' % number for number in offered) or 'none', KNOWN[0], KNOWN[-1]))
        self.table = (ctypes.c_void_p * 14).in_dll(self.library, nccl.INTERFACE + str(self.version))
        self.name = ctypes.string_at(self.table[0] or 0).decode(errors='replace')
        self.context = ctypes.c_void_p()
        # NCCL_NET_TRAFFIC_CLASS_UNDEF
        self.config = ctypes.c_int(-1)
        # level, flags, file, line, format; and the registers and stack where whole numbers and pointers follow
        self.logger = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_int,
                                       *[ctypes.c_void_p] * 10)(self.hear)

    def hear(self, level: int, flags: int, file: bytes, line: int, form: int, *arguments: 'Any') -> None:
        """A line of its log: NCCL's logger takes what printf(3) takes."""
        text = ctypes.create_string_buffer(1000)
        ctypes.CDLL(None).snprintf(text, ctypes.c_size_t(1000), ctypes.c_void_p(form), *map(ctypes.c_void_p, arguments))
        self.log.append((level, text.value.decode(errors='replace').strip()))

    def call(self, place: int, doing: str, *arguments: 'Any') -> None:
        """A function of the table. :raises Failed: it gives another status than ncclSuccess"""
        status = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * len(arguments))(self.table[place] or 0)(
            *arguments)
        if status:
            # NCCL_LOG_WARN; the first one says why, the last one what came of it
            warned = [text for level, text in self.log if level == 2]
            raise Failed("%s failed with status %d%s" % (
                doing, status, ''.join(': ' + text for text in warned[:1] + warned[1:][-1:])))

    def init(self) -> None:
        """Start it."""
        logger, version = ctypes.cast(self.logger, ctypes.c_void_p), self.version
        arguments = (logger,) if version < 10 else (logger, None) if version == 10 else (
            ctypes.addressof(self.context), 0, ctypes.addressof(self.config), logger, None)
        self.call(INIT, 'init', *arguments)

    def devices(self) -> list:
        """[(name, Mbit/s)] of its devices."""
        count, found = ctypes.c_int(), []
        self.call(DEVICES, 'devices', ctypes.addressof(count))
        for number in range(count.value):
            data = ctypes.create_string_buffer(1024)
            self.call(PROPERTIES, 'getProperties', number, ctypes.addressof(data))
            name = ctypes.cast(data, ctypes.POINTER(ctypes.c_char_p))[0]
            # ncclNetProperties_vN_t: name, pciPath (pointers), guid (8 bytes), ptrSupport, regIsGlobal, forceFlush
            speed = ctypes.c_int.from_buffer(data, 28 + 4 * (self.version >= 8) + 4 * (self.version >= 9)).value
            found.append(((name or b'?').decode(errors='replace'), speed))
        return found

    def owner(self) -> tuple:
        """What stands in front of the number of a device."""
        return (self.context.value,) if self.version >= 11 else ()

    def listen(self, device: int) -> tuple:
        """(what listens, handle for the other end)"""
        handle, place = ctypes.create_string_buffer(HANDLE), ctypes.c_void_p()
        self.call(LISTEN, 'listen', *self.owner() + (device, ctypes.addressof(handle), ctypes.addressof(place)))
        return place.value, handle.raw

    def pair(self, device: int, listening: int, theirs: bytes, limit: 'Limit') -> tuple:
        """(connection to the next node, connection from the one before): both ends ask again until it stands."""
        handle, out, into, offload = (ctypes.create_string_buffer(theirs, HANDLE), ctypes.c_void_p(),
                                      ctypes.c_void_p(), ctypes.c_void_p())
        more = (ctypes.addressof(offload),) if self.version >= 7 else ()
        config = (ctypes.addressof(self.config),) if self.version == 10 else ()
        while not (out.value and into.value):
            if not out.value:
                self.call(CONNECT, 'connect', *self.owner() + (device,) + config + (
                    ctypes.addressof(handle), ctypes.addressof(out)) + more)
            if not into.value:
                self.call(ACCEPT, 'accept', listening, ctypes.addressof(into), *more)
            if limit.over():
                raise Failed("%s did not end within %d s" % ('accept' if out.value else 'connect', LIMIT))
            time.sleep(0.0002)
        return out.value, into.value

    def register(self, place: int, buffer: 'Any') -> int:
        """Memory that a connection is to use."""
        handle = ctypes.c_void_p()
        self.call(REGISTER, 'regMr', place, ctypes.addressof(buffer), ctypes.sizeof(buffer), HOST,
                  ctypes.addressof(handle))
        return handle.value or 0

    def begin(self, sends: bool, place: int, buffer: 'Any', memory: int) -> int:
        """Ask for a message; its request, 0 if it has to be asked for again."""
        request = ctypes.c_void_p()
        # of one entry each; the sizes are int before v9, and a small size_t begins with the same bytes
        data, size, tag = (ctypes.c_void_p * 1)(ctypes.addressof(buffer)), ctypes.c_size_t(MESSAGE), ctypes.c_int(1)
        memories, nothing = (ctypes.c_void_p * 1)(memory), (ctypes.c_void_p * 1)()
        if sends:
            self.call(SEND, 'isend', place, data[0], MESSAGE, 1, memory, *((None,) if self.version >= 10 else ()),
                      ctypes.addressof(request))
        else:
            self.call(RECEIVE, 'irecv', place, 1, ctypes.addressof(data), ctypes.addressof(size),
                      ctypes.addressof(tag), ctypes.addressof(memories),
                      *((ctypes.addressof(nothing),) if self.version >= 10 else ()), ctypes.addressof(request))
        return request.value or 0

    def ended(self, request: int) -> bool:
        """Whether a message is through."""
        done, size = ctypes.c_int(), ctypes.c_size_t()
        self.call(TEST, 'test', request, ctypes.addressof(done), ctypes.addressof(size))
        return bool(done.value)

    def exchange(self, device: int, listening: int, order: dict, limit: 'Limit') -> float:
        """Bytes a second that came from the node before, while as many went to the next one."""
        count = max(2, order['bytes'] // MESSAGE)
        out, into = self.pair(device, listening, bytes.fromhex(order['handles'][device]), limit)
        memory = [mmap.mmap(-1, MESSAGE) for _ in range(2)]
        buffers = [(ctypes.c_char * MESSAGE).from_buffer(area) for area in memory]
        memory[0].write(bytes([1 + order['number'] % 255]) * MESSAGE)
        keys = [self.register(out, buffers[0]), self.register(into, buffers[1])]
        began, left, running = time.monotonic(), [count, count], [[], []]  # type: float, list, list
        while any(left) or any(running):
            before = left + list(map(len, running))
            for way, place in ((0, out), (1, into)):
                if left[way] and len(running[way]) < AT_ONCE:
                    request = self.begin(way == 0, place, buffers[way], keys[way])
                    if request:
                        running[way].append(request)
                        left[way] -= 1
                # in order: those of one connection
                while running[way] and self.ended(running[way][0]):
                    running[way].pop(0)
            if before == left + list(map(len, running)):
                time.sleep(0.0002)      # PyTorch is imported meanwhile
            if limit.over():
                sent, came = (count - left[way] - len(running[way]) for way in (0, 1))
                if came:
                    return came * MESSAGE / (time.monotonic() - began)   # slow it is, but it works
                raise Failed("%d of %d messages of 4 MB were sent, and none was received, within %d s" % (
                    sent, count, LIMIT))
        seconds = time.monotonic() - began
        if memory[1][:] != bytes([1 + order['before'] % 255]) * MESSAGE:
            raise Failed("wrong values were received")
        return count * MESSAGE / max(seconds, 1e-6)


class NotKnown(Exception):
    """An interface that this program does not know: nothing is known of the plugin."""


def answers(names: list, descriptor: int) -> None:
    """Do it, and say it."""
    found = {'turn': 0}  # type: dict
    plugin = None
    try:
        plugin = Plugin(names)
        found.update(path=plugin.path, version=plugin.version, name=plugin.name)
        plugin.init()
        found['devices'] = plugin.devices()
        if not found['devices']:
            raise Failed("it has no device")
        listening = [plugin.listen(number) for number in range(len(found['devices']))]
        found['handles'] = [handle.hex() for _, handle in listening]
    except NotKnown as err:
        found['unknown'] = str(err)
    except Exception as err:    # whatever it is, it is the answer
        found['error'] = str(err) if isinstance(err, Failed) else first_lines(err)
    found['libfabric'] = [path for path in mapped_libraries() if library_kind(path) == 'libfabric']
    for _, text in plugin.log if plugin else ():
        match = re.search(r'Selected [Pp]rovider is ([^,\s]+)', text)
        found['provider'] = match.group(1) if match else found.get('provider')
    say(descriptor, found)
    line = sys.stdin.readline()
    if not line.strip() or not plugin or 'handles' not in found:
        return
    order, rates = json.loads(line), []  # type: Any, list
    found, limit = {'turn': 1, 'rates': rates}, Limit(LIMIT)
    for number in range(len(order['handles'])):
        if limit.over():
            break
        try:
            rates.append(plugin.exchange(number, listening[number][0], order, limit))
        except Exception as err:    # as above
            found.update(error=str(err) if isinstance(err, Failed) else first_lines(err), device=number)
            break
    say(descriptor, found)
    sys.stdin.readline()    # what is under way to the next node ends with this process


def main(argv: list) -> None:
    """Do it; never returns, since exit handlers may hang."""
    descriptor = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    answers(argv, descriptor)
    os._exit(0)


# ----------------------------------------------------------------------------------------------------------------------
# in check.py, on the first rank of a node

def hear(lane: Lane, limit: Limit, turn: int) -> dict:
    """The answer of a process to this turn as soon as it is there, or why there is none."""
    while True:
        found = lane.hear(time.monotonic() + min(1, limit.left()), turn)
        if not found.get('absent') or limit.over():
            return found


class Trial:
    """The process of this node. `told` and `moved` are what it said, None before."""

    def __init__(self, machine: 'Machine', seconds: float) -> None:
        self.machine, self.told, self.moved = machine, None, None  # type: Any, Any, Any
        self.lane, self.asked = None, False  # type: Optional[Lane], bool
        if nccl.plugin_files(machine):
            self.lane = Lane(machine.environ, *nccl.plugin_names(machine), program='plugin')
            self.limit = Limit(min(START, seconds), self.lane.process.pid)

    def handles(self) -> str:
        """Those of this node's devices, as a text for the others; '' without."""
        if self.lane:
            self.told = hear(self.lane, self.limit, 0)
        return ' '.join(self.told.get('handles', [])) if self.told else ''

    def move(self, following: str, pairs: int, number: int, nodes: int) -> None:
        """
        Begin to send and receive; the network is tried by PyTorch meanwhile, if that has been imported.

        :param following: handles() of the next node
        :param pairs: devices that each node has
        :param number: this node's
        :param nodes: how many there are
        """
        if not (self.lane and pairs and nodes > 1):
            return
        self.lane.tell({'handles': following.split()[:pairs], 'bytes': TOTAL // pairs, 'number': number,
                        'before': (number - 1) % nodes})
        self.limit, self.asked = Limit(LIMIT + 2, self.lane.process.pid), True

    def result(self) -> None:
        """Wait for what move() has begun."""
        if self.lane and self.asked and self.moved is None:
            self.moved = hear(self.lane, self.limit, 1)

    def end(self) -> None:
        """Nobody wants anything of it any more."""
        if self.lane:
            self.lane.end()


def gigabits(speed: float) -> str:
    """Mbit/s for a person."""
    return '%.4g Gbit/s' % (speed / 1000) if speed > 0 else 'of unknown speed'


def check(report: 'Report', trial: Trial, need: str) -> None:
    """
    What it said.

    :param need: why NCCL cannot do without the plugin, '' if it can
    """
    told, moved, machine = trial.told, trial.moved, trial.machine
    if not trial.lane or not told:
        return
    level, gpus = 'red' if need else 'yellow', machine.gpus()
    what = os.path.basename(told.get('path') or nccl.plugin_files(machine)[0])
    if told.get('unknown'):
        report.add('untested', 'plugin', "%s by itself: %s" % (what, told['unknown']))
        return
    fabric = ', '.join(map(os.path.realpath, told.get('libfabric', []))) or 'no libfabric'
    if told.get('error'):
        # one that is built for GPUs may want a driver: CUDA's and ROCm's own start needs one
        driver = not gpus and re.search('CUDA|ROCm|HIP|hip|cuda', told['error'])
        report.add('untested' if driver else level, 'plugin', "%s does not start by itself: %s (%s)%s" % (
            what, told['error'], fabric, "; the node has no GPU" if driver else ''), '' if driver else REMEDY)
        return
    devices, provider = told['devices'], told.get('provider') or 'it does not say which'
    report.fact('plugin devices', '%d of %s' % (len(devices), provider))
    wrong = check_devices(report, what, devices, machine)
    if provider.split(';')[0] in SOCKET_PROVIDERS and machine.slingshot():
        wrong, chosen = True, machine.environ.get('FI_PROVIDER')
        report.add(level, 'plugin', "%s takes libfabric's provider %s, and not cxi, on a node with Slingshot (%s%s)" % (
            what, provider, fabric, ', FI_PROVIDER=' + chosen if chosen else ''),
            "unset FI_PROVIDER, or load the system's libfabric; in a container bind it, with libcxi")
    if moved and moved.get('error'):
        device = devices[moved['device']][0] + ': ' if 'device' in moved else ''
        report.add(level, 'plugin', "%s moves no data between the nodes: %s%s (provider %s)" % (
            what, device, moved['error'], provider),
            "see whether the job may use the network (a VNI of Slingshot: srun --network), and whether vet names a "
            "node")
        return
    wrong = check_rates(report, what, devices, moved) or wrong
    if not wrong:
        report.add('good', 'plugin', "%s v%d by itself: provider %s, %s, %s" % (
            what, told['version'], provider, ', '.join(sorted({'%s %s' % (name, gigabits(speed))
                                                               for name, speed in devices})),
            "64 MB of host memory went to the next node and came from another one" if moved else
            "nothing was sent" if machine.environ.get('WORLD_SIZE') == machine.environ.get('LOCAL_WORLD_SIZE') else
            "nothing was sent: another node has no plugin that starts"))


def check_devices(report: 'Report', what: str, devices: list, machine: 'Machine') -> bool:
    """Number and speed of the devices; whether something was said."""
    cards, said = machine.list('sys/class/cxi'), False
    if len(devices) < len(cards):
        said = True
        report.add('yellow', 'plugin', "%s finds %d devices (%s), and the node has %d of Slingshot (%s)" % (
            what, len(devices), ', '.join(name for name, _ in devices), len(cards), ', '.join(cards)),
            "see FI_CXI_DEVICE_NAME, and what a container binds of /dev/cxi*")
    median = sorted(speed for _, speed in devices)[len(devices) // 2]
    slow = ['%s %s' % (name, gigabits(speed)) for name, speed in devices if speed < SLOW_DEVICE * median]
    if slow:
        said = True
        report.add('yellow', 'plugin', "%s: the speed of a device is far from that of the others (%s): %s" % (
            what, gigabits(median), ', '.join(slow)), "have the centre look at the link of this card")
    return said


def check_rates(report: 'Report', what: str, devices: list, moved: 'Optional[dict]') -> bool:
    """How fast the data went; whether something was said."""
    rates, said = (moved or {}).get('rates', []), False
    if rates:
        report.fact('GB/s of the plugin', '%.2g' % round_up(sum(rates) / len(rates) / 1e9))
    median = sorted(rates)[len(rates) // 2] if rates else 0
    for (name, speed), rate in zip(devices, rates):
        # the line rate is what the plugin says
        least = max(SLOW_LINK * speed * 1e6 / 8, SLOW_DEVICE ** 2 * median)
        if rate < least:
            said = True
            report.add('yellow', 'plugin', "%s: %s moves about %.2g GB/s of host memory, its line rate is %s, the "
                       "median of the devices %.2g GB/s" % (what, name, round_up(rate / 1e9), gigabits(speed),
                                                            round_up(median / 1e9)),
                       "have the centre look at this card and its link; vet finds slow nodes")
    return said
