# SPDX-License-Identifier: GPL-2.0-only
"""
Does this job use the network it paid for? In every rank, before the training: docs/check.md.

    python job check [--json FILE] [--stderr]

Reads what conda-python-distributed sets: RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT.
Rank 0 prints one table. Exit status on all ranks: 0 nothing red, 1 something red or no answer, 2 wrong use.
    SLINGTORCH_CHECK_SECONDS   how long a rank waits for others, and for PyTorch (120)
    SLINGTORCH_CHECK_JSON      as --json
    SLINGTORCH_CHECK_IGNORE    names of findings that set no exit status, also NAME:SUBJECT; 1: all
"""
import argparse
import contextlib
import hashlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time

from . import limits, look, nccl, network, node, plugin, records, star, variables
from .findings import LEVELS, TITLES, Report, ignored_of, ranks_text
from .machine import Machine, expand_hosts, seconds_to_wait
from .probe import scratch_file
from .wire import PeerLost, receive_message, send_message, tell_all

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Optional

HERE = os.path.dirname(os.path.abspath(__file__))
# facts that must be the same on all ranks: level and name of the finding, what to do
SAME = {
    **dict.fromkeys(('torch', 'torch is in', 'CUDA of torch', 'ROCm of torch'),
                    ('yellow', 'versions', "start all ranks from one environment")),
    **dict.fromkeys(('maps libnccl', 'maps librccl', 'maps MPI'),
                    ('yellow', 'versions', "see LD_LIBRARY_PATH and LD_PRELOAD of these ranks")),
    'plugin': ('yellow', 'versions', "load the same modules on all nodes"),
    'plugin devices': ('yellow', 'plugin', "see which cards these nodes have, and FI_PROVIDER"),
    'driver': ('yellow', 'versions', "have the centre look at these nodes"),
    # a node has several names
    'MASTER_ADDR': ('yellow', 'master', "unset it in the job script: conda-python-distributed sets it"),
    'MASTER_PORT': ('red', 'master', "unset it in the job script: conda-python-distributed sets it"),
    'WORLD_SIZE': ('red', 'world-size', "unset it in the job script: conda-python-distributed sets it"),
}
# A rank is slow if it needed so many times the median, and so many seconds more.
SLOW_TIMES, SLOW_SECONDS = 4, 3
# A node is busy whose import of PyTorch takes more seconds; so many more its other ranks may take.
BUSY = 4
# what to do about a step that is not known to have failed
LATE = "a slow file system, or a network that does not answer; SLINGTORCH_CHECK_SECONDS=N waits longer"
# what to do about an error that nobody knows
LOOK_THERE = {
    'import': "python -c 'import torch' on one of these nodes shows all of it",
    **dict.fromkeys(('rendezvous', 'collective'), "see whether the nodes reach each other at all ports, and which "
                    "interface they take (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); vet finds the node: docs/check.md"),
}
# Clocks that differ by more confuse logs, make and tickets; those of a cluster differ by milliseconds.
CLOCK_SECONDS = 1


# ----------------------------------------------------------------------------------------------------------------------
# the process with PyTorch

class Probe:
    """probe.py as a child, so that a crash or a hang in a library is a finding."""

    def __init__(self, environ: dict, plugin: list, seconds: float, local_ranks: int = 1) -> None:
        self.begin, self.seconds, self.asked = time.monotonic(), seconds, False
        self.end_time = self.begin + seconds
        self.found = {'facts': {}, 'seconds': {}, 'phase': 'import', 'maps': []}  # type: dict
        # a file: nobody reads until the end, and what it prints may be more than a pipe takes
        self.errors = scratch_file() or open(os.devnull, 'w+b')
        self.process = subprocess.Popen([sys.executable, '-B', HERE, 'probe'] + plugin, env=environ,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors)  # type: Any
        self.changed, self.over = threading.Event(), threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.write('local %d %d' % (local_ranks, min(seconds, network.RENDEZVOUS)))

    def read(self) -> None:
        """Take its answers until it ends."""
        for line in self.process.stdout:
            try:
                self.found = json.loads(line.decode())
            except ValueError:
                continue
            if 'ready' in self.found:
                self.changed.set()
            if self.found.get('stays'):
                self.over.set()
        self.changed.set()
        self.over.set()

    def write(self, words: str) -> None:
        """Tell it something."""
        with contextlib.suppress(OSError):      # it has ended: result() says so
            self.process.stdin.write(words.encode() + b'\n')
            self.process.stdin.flush()

    def ready(self) -> bool:
        """Whether it has imported PyTorch, and is ready for all nodes; waits for that."""
        self.changed.wait(max(0, self.end_time - time.monotonic()))
        return bool(self.found.get('ready'))

    def go(self, words: str = '') -> None:
        """Let it take part in the collective, or end."""
        self.asked = bool(words)
        if self.asked:      # it ends itself when it has to wait for too long
            self.end_time = time.monotonic() + min(self.seconds, (network.ASIDE + 3) * max(1, self.seconds / 120))
        self.write(words)

    def end(self) -> None:
        """Nobody wants its result any more, nor that it keeps its connections."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):    # a driver may hold it
            self.process.wait(5)

    def result(self) -> dict:
        """Its dictionary; 'error' in it says what went wrong."""
        killed = not self.over.wait(max(0.1, self.end_time - time.monotonic()))
        found = self.found
        if found.get('stays'):
            return found
        if killed:
            self.process.kill()
            self.reader.join()
        self.process.wait()
        found = self.found
        if killed and found['seconds'] and found['phase'] == 'import':
            found['phase'] = 'rendezvous'       # it waited for its turn
            killed = self.asked
        what = {'import': 'import torch', 'rendezvous': 'the rendezvous'}.get(found['phase'], 'an all_reduce')
        if killed:
            found['error'] = "%s did not end within %d s" % (what, self.end_time - self.begin)
            found['remedy'] = LATE
            if what == 'import torch':
                found['level'] = 'yellow'       # on a cold file system it takes minutes
        elif self.process.returncode and (self.asked or not found['seconds']):
            self.errors.seek(0)
            last = [line.decode(errors='replace').strip() for line in self.errors if line.strip()][-1:]
            found['error'] = "%s ended the process with status %d%s" % (
                what, self.process.returncode, ': ' + last[0] if last else '')
        return found


def fi_info_names(report: Report, environ: dict) -> 'Optional[set]':
    """Names of the variables that `fi_info -e` prints, if one is set that the table does not know; else None."""
    families = variables.read_table()
    unknown = [fact[4:] for fact in report.facts if fact.startswith('env FI_')]
    family = variables.family_of('FI_', families)
    if not family or all(name in family.known or name in family.other or name.startswith(family.open)
                         for name in unknown):
        return None
    return set(re.findall(r'FI_[A-Z0-9_]+', fi_info(environ, '-e') or '')) or None


def fi_info(environ: dict, *options: str) -> 'Optional[str]':
    """Output of fi_info, or None."""
    try:
        return subprocess.run(['fi_info', *options], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              timeout=10, check=False).stdout.decode(errors='replace')
    except (OSError, subprocess.TimeoutExpired):
        return None


def check_providers(report: Report, machine: Machine) -> None:
    """Which providers libfabric has, on a node with Slingshot. NCCL's log says which one it took, but needs GPUs."""
    if not machine.slingshot():
        return
    text = fi_info(machine.environ)
    if text is None:
        report.add('untested', 'provider', "which providers libfabric has: there is no fi_info in PATH")
        return
    providers = sorted(set(re.findall(r'^provider: (\w+)', text, re.M)))
    found = "libfabric has %s" % (', '.join(providers) or 'no provider')
    if 'cxi' in providers:
        report.add('good', 'provider', found)
    else:
        # fi_info's libfabric need not be that of the program
        report.add('yellow', 'provider', found + ", and not cxi, on a node with Slingshot",
                   "load the system's libfabric; in a container bind it, with libcxi")


# ----------------------------------------------------------------------------------------------------------------------
# rank 0

def holder(port: int) -> str:
    """Who listens on a port, for a message; '' if it is somebody else's process."""
    inodes = set()
    for table in ('/proc/net/tcp', '/proc/net/tcp6'):
        with contextlib.suppress(OSError), open(table) as stream:
            inodes |= {fields[9] for fields in map(str.split, stream)
                       if fields[3] == '0A' and fields[1].endswith(':%04X' % port)}
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError):
            for name in os.listdir('/proc/%s/fd' % pid):
                if os.readlink('/proc/%s/fd/%s' % (pid, name))[8:-1] in inodes:
                    with open('/proc/%s/comm' % pid) as stream:
                        return " (process %s, %s)" % (pid, stream.read().strip())
    return ''


def check_master(environ: dict, report: Report, name: str) -> None:
    """Whether MASTER_ADDR is this node."""
    address = environ['MASTER_ADDR']
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return      # look_at_master has said it
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as attempt:
            attempt.bind(place)
            report.add('good', 'master', "MASTER_ADDR=%s is the node of rank 0" % address)
            return
    report.add('red', 'master', "MASTER_ADDR=%s (%s) is not the node of rank 0, which is %s" % (
        address, found[0][4][0], name), "it is another job's, or of another step: unset MASTER_ADDR in the job script")


def check_same(report: Report) -> None:
    """Facts that must be the same on all ranks."""
    for fact, values in sorted(report.facts.items()):
        level, name, remedy = SAME.get(fact, ('yellow', 'variable', "export it before srun, for all ranks"))
        if fact not in SAME and not fact.startswith('env '):
            continue
        values = dict(values)
        rest = report.ranks
        for mask in values.values():
            rest &= ~mask
        if rest and fact.startswith('env '):
            values['(not set)'] = rest
        if len(values) > 1:
            parts = ['%s on %s' % (value, ranks_text(mask)) for value, mask in
                     sorted(values.items(), key=lambda item: -bin(item[1]).count('1'))]
            what = fact[4:] if fact.startswith('env ') else fact
            parts[4:] = ['...'] * (len(parts) > 4)
            if fact == 'torch' and 'none' in values:
                level = 'red'
            if fact == 'MASTER_PORT' and len(report.facts.get(look.PORTS, {})) > 1:
                parts.append("so does ip_local_port_range, by which conda-python-distributed chooses it")
                remedy = "export MASTER_PORT in the job script; have the centre give all nodes one range"
            report.add(level, name, "%s differs: %s" % (what, '; '.join(parts)), remedy)
    torch = report.facts.get('torch', {})
    if len(torch) == 1 and 'none' not in torch:
        report.add('good', 'versions', "torch %s (CUDA %s, ROCm %s) on all ranks" % (
            report.value('torch'), report.value('CUDA of torch'), report.value('ROCm of torch')))


def check_times(report: Report) -> None:
    """Ranks that needed much longer than the others."""
    for fact, values in sorted(report.facts.items()):
        # in the rendezvous and in a collective all wait for the slowest
        if not re.match('seconds (import|starting)', fact):
            continue
        times = [float(value) for value, mask in values.items() for _ in range(bin(mask).count('1'))]
        median = statistics.median_low(times)
        for value, mask in values.items():
            if float(value) > max(SLOW_TIMES * median, median + SLOW_SECONDS):
                where = [name for name, own in sorted(report.facts.get('node', {}).items()) if own & mask]
                report.add('yellow', 'slow', "%s took about %s s, the median is %s s: %s" % (
                    fact[8:], value, median, ', '.join(where[:10] + ['...'] * (len(where) > 10))),
                           "look at these nodes, or start without them (srun --exclude)", mask)


def check_answers(report: Report, environ: dict, root: star.Root, own: str) -> None:
    """Ranks and nodes of which nothing came."""
    world = int(environ['WORLD_SIZE'])
    missing = ((1 << world) - 1) & ~report.ranks
    for finding in report.having(name='ended'):
        missing &= ~report.findings[finding]
    if not missing:
        return
    silent = [other.name for other in root.nodes if missing >> other.rank & 1]
    called = {other.name for other in root.nodes} | {own}
    hosts = expand_hosts(environ.get('SLURM_STEP_NODELIST', ''))
    never = [host for host in hosts if len(hosts) > 1 and host not in called]
    text = "no answer from %s of %d" % (ranks_text(missing), world)
    if never:
        text += ". Nothing came from %s" % ', '.join(never[:20])
    if silent:
        text += ". %s called first and fell silent" % ', '.join(silent[:20])
    if set(report.facts.get('node', {})) == {own}:
        text += network.own_address(environ['MASTER_ADDR'])
    sent, again = (now - then for now, then in zip(network.segments(), root.sent))
    if again >= 3 and 10 * again > sent:
        text += (". Packets get lost between the nodes, or nobody acknowledges them: of the %d segments of TCP that %s "
                 "sent meanwhile, %d were sent again" % (sent, own, again))
    report.add('red', 'no-answer', text, "see whether these nodes reach MASTER_ADDR=%s, port %s, and whether so many "
               "ranks were started; start without the nodes (srun --exclude)"
               % (environ['MASTER_ADDR'], environ['MASTER_PORT']), missing)


def one_cause(report: Report) -> None:
    """What a broken network does on the nodes is one line: that which names the cause, or says most."""
    found = report.having('red', 'rendezvous') + report.having('red', 'collective')
    # Gloo's device.cc names the interface that GLOO_SOCKET_IFNAME names; that it is not there is said already
    for finding in list(found):
        name = re.search(r'Unable to find address for: (\S+)', finding.text)
        if name and any('=' + name.group(1) in other.text for other in report.having('red', 'interface')):
            report.findings.pop(finding)
            found.remove(finding)
    # one that is refused without any error on the node that it calls
    refused = [finding for finding in found if 'Connection refused' in finding.text]
    late = [finding for finding in found if finding.remedy == LATE]
    named = [finding for finding in found if finding.remedy and finding not in late]
    if refused and not named and all(finding in refused or 'did not end' in finding.text for finding in found):
        for finding in found:
            report.add('red', 'rendezvous', network.REFUSED, network.OPEN_PORTS, report.findings.pop(finding))
        return
    slow = [finding for finding in report.having('yellow', 'collective') if network.SLOW in finding.text]
    if slow:    # some nodes gave up, and others see that these are gone
        found = [finding for finding in found if '8 MB' in finding.text or finding in late] + slow
    first = [finding for finding in found if not re.search(network.SECONDARY, finding.text)]
    best = slow or named or first or found[:1]
    for finding in set(found) - set(best):
        ranks = report.findings.pop(finding)
        if len(best) == 1:
            report.findings[best[0]] |= ranks


def look_there(report: Report) -> None:
    """What to do about an error whose cause nobody has named."""
    for finding in sum((report.having('red', name) for name in LOOK_THERE), []):
        if not finding.remedy:
            report.findings[finding._replace(remedy=LOOK_THERE[finding.name])] = report.findings.pop(finding)


def check_job(report: Report, machine: Machine, root: star.Root) -> None:
    """What only all ranks together show."""
    environ = machine.environ
    check_answers(report, environ, root, machine.node)
    if report.having('yellow', 'import'):
        for finding in report.having('red', 'rendezvous'):
            report.change(finding, 'yellow')    # the others waited for a node that was still importing
    one_cause(report)
    look_there(report)
    limits.compare_programs(report)
    limits.compare_directories(report)
    check_same(report)
    check_times(report)
    if root.nodes and not report.having(name='clock'):
        report.add('good', 'clock', "clocks differ by less than %d s" % CLOCK_SECONDS)
    if len(report.facts.get('machine', {})) > 1:
        for variable in ('NCCL_SOCKET_IFNAME', 'GLOO_SOCKET_IFNAME'):
            mask = report.facts.get('only loopback ' + variable, {}).get('True')
            if mask:
                report.add(look.sure_of(machine, variable), 'interface',
                           "%s=lo, and the job has several machines" % variable, "unset it", mask)
    if 'backend' not in report.facts:
        report.add('untested', 'collective', "the network: the job has one node" if environ['WORLD_SIZE'] ==
                   environ['LOCAL_WORLD_SIZE'] else "the network: no all_reduce over the nodes was begun")


def header(report: Report, seconds: float) -> str:
    """The first lines."""
    nodes, count = report.facts.get('node', {}), bin(report.ranks).count('1')
    lines = ["slingtorch check: %d rank%s on %d node%s, %.1f s: %s" % (
        count, 's'[:count != 1], len(nodes), 's'[:len(nodes) != 1], seconds, ', '.join(
            '%d %s' % (report.count(level), TITLES[level]) for level in LEVELS
            if level != 'ignored' or report.count(level)))]
    places = ['%s %s' % (name, ranks_text(mask)) for name, mask in sorted(nodes.items())]
    lines.append('nodes:  %s' % '; '.join(places[:6] + ['...'] * (len(places) > 6)))
    times = []
    for name, title in (('import', 'import torch'), ('rendezvous', 'rendezvous'), ('collective', 'all_reduces')):
        values = sorted(map(float, report.facts.get('seconds ' + name, {})))
        if values:
            times.append('%s %.2g s' % (title, values[-1]))
    if times:
        lines.append('times:  %s (slowest rank, to a quarter)' % ', '.join(times))
    return '\n'.join(lines)


# ----------------------------------------------------------------------------------------------------------------------

def environment_digest(environ: dict, torch: 'Optional[str]') -> str:
    """What decides which libraries are loaded: ranks of a node that have the same import PyTorch once."""
    parts = [sys.executable, torch or '']
    parts += ['%s=%s' % item for item in sorted(environ.items()) if re.match(r'LD_|PYTHON|PATH$|NCCL_NET', item[0])]
    parts.append(str(sorted(limits.of_shell().items())))    # PyTorch may not be imported within them
    return hashlib.sha256('\0'.join(parts).encode()).hexdigest()


def add_reports(report: Report, machine: Machine, local: star.LocalRanks) -> list:
    """On the first rank of a node: what its other ranks said, and what became of the others."""
    details = []
    for other, own in local.reports.values():
        report.merge(other)
        details.append(own)
    for rank, pid in local.ended.items():
        report.add('red', 'ended', "a rank ended while it was checked (process %d on %s)" % (pid, machine.node),
                   "see its own messages", 1 << rank)
    for rank, seconds in local.late.items():
        report.fact('seconds starting the rank', '%.2g' % node.round_up(seconds), 1 << rank)
    return details


class Rank:
    """
    What a rank is in this check, and what it has found.

    :param torch: directory of torch, or None
    :param start: starts the process with PyTorch
    :param program: what Python will run, its options too
    """

    def __init__(self, machine: Machine, torch: 'Optional[str]', start: 'Callable', program: list) -> None:
        self.program = program
        self.machine, self.environ, self.torch, self.begin = machine, machine.environ, torch, time.monotonic()
        self.rank, self.world, self.local_rank, self.local_world = (int(self.environ[name]) for name in (
            'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'))
        self.seconds = seconds_to_wait(self.environ)
        self.digest, self.report, self.start = environment_digest(self.environ, torch), Report(self.rank), start
        self.trial = None  # type: Any
        self.patience = star.patience(self.seconds, self.world // self.local_world)

    def try_plugin(self, trade: 'Callable', number: int, nodes: int) -> None:
        """Through NCCL's plugin to the next node, while PyTorch is imported; `trade` is star's."""
        following, pairs = trade(self.trial.handles(), time.monotonic() + plugin.Limit.MOST * plugin.START + star.SLACK)
        self.trial.move(following, pairs, number, nodes)

    def start_probe(self) -> 'Any':
        """The process with PyTorch; None without PyTorch."""
        names = nccl.plugin_names(self.machine)
        # with GPUs NCCL would be tried, which forks of one process cannot
        ranks = 1 if self.local_rank or self.machine.gpus() else self.local_world
        return self.start(self.environ, names, self.seconds, ranks) if self.torch else None

    def look(self) -> dict:
        """look.look(), and limits.py"""
        details = look.look(self.machine, self.report, self.torch, self.world > self.local_world)
        limits.look(self.machine, self.report, details)
        if not self.local_rank:     # directories and files are those of the node
            for function, arguments in ((limits.look_at_directories, (self.machine, self.report)),
                                        (limits.look_at_program,
                                         (self.report, self.program, details, self.environ))):
                if not limits.in_time(function, *arguments):
                    self.report.add('yellow', 'disk', "a file system did not answer within %d s: of TMPDIR, HOME, "
                                    "HF_HOME, /dev/shm or the script" % limits.WAIT, "see df on this node")
        return details


def run(machine: Machine, out: 'Any', json_file: 'Optional[str]' = None, torch: 'Optional[str]' = None,
        start: 'Callable' = Probe, program: 'Iterable[str]' = ()) -> int:
    """
    The whole check, in one rank.

    :param out: where rank 0 prints
    :param torch: directory of torch, or None
    :param start: starts the process with PyTorch
    :param program: what Python will run, its options too
    :return: exit status
    """
    star.read_ranks(machine.environ)
    rank = Rank(machine, torch, start, list(program))
    if rank.local_rank:
        word = other_rank(rank)
    elif rank.rank:
        word = for_the_node(rank, first_rank)
    else:
        word = for_the_node(rank, lambda rank, local, probe: rank_zero(rank, local, probe, out, json_file))
    return star.verdict(word, machine.environ)


def other_rank(rank: Rank) -> bytes:
    """Not the first one of its node: tells that what it finds. Returns rank 0's word."""
    connection, wants_probe = star.call_first_rank(rank.environ, rank.rank, rank.digest, rank.begin + rank.seconds)
    probe = rank.start_probe() if wants_probe else None
    details = rank.look()
    if probe:
        probe.go()
        check_probe(rank.report, probe, rank.machine)
    send_message(connection, rank.report.dump())
    send_message(connection, json.dumps(details).encode())
    try:
        return receive_message(connection, time.monotonic() + 3 * rank.seconds + 60)
    except PeerLost as err:
        raise PeerLost("the first rank of this node has ended (%s): see its own messages" % err)


def for_the_node(rank: Rank, role: 'Callable') -> bytes:
    """The first rank of a node: plays its role, and tells the node's other ranks rank 0's word, which it returns."""
    try:
        local = star.LocalRanks(rank.environ, rank.local_world, rank.digest)
    except OSError as err:
        raise PeerLost("another process of this start says that it is local rank 0 of this node too (%s): "
                       "unset LOCAL_RANK in the job script" % err)
    rank.trial, probe = plugin.Trial(rank.machine, rank.seconds), rank.start_probe()
    try:
        word = role(rank, local, probe)
    except PeerLost:
        tell_all(local.connections, star.LOST)
        raise
    finally:
        rank.trial.end()
        if probe:
            probe.end()
    tell_all(local.connections, word)
    return word


def first_rank(rank: Rank, local: star.LocalRanks, probe: 'Optional[Probe]') -> bytes:
    """The first one of its node, but not of the job: brings what the node found to rank 0, whose word it returns."""
    details = rank.look()
    branch = star.Branch(rank.environ, rank.local_world, rank.machine.node, rank.seconds, rank.machine.clock)
    if abs(branch.ahead) > CLOCK_SECONDS:
        rank.report.add('yellow', 'clock', "the clock of %s differs by %.0f s from that of rank 0's node" % (
            rank.machine.node, branch.ahead), "tell the centre: time is wrong there")
    rank.try_plugin(branch.trade, branch.number, branch.nodes)
    go = branch.meet(bool(probe and probe.ready()), rank.begin + rank.seconds)
    finish_node(rank, local, probe, details, (branch.host, branch.extra, branch.number, branch.nodes) if go else None)
    branch.deliver(rank.report)
    return branch.verdict(2 * rank.seconds + 60)


def rank_zero(rank: Rank, local: star.LocalRanks, probe: 'Optional[Probe]', out: 'Any',
              json_file: 'Optional[str]') -> bytes:
    """Of the job: hears all nodes, prints what was found, and tells them its word, which it returns."""
    machine, report, environ = rank.machine, rank.report, rank.environ
    check_master(environ, report, machine.node)
    root = star.Root(environ, rank.world - rank.local_world, rank.patience, machine.clock)
    # torchrun's agent listens there, for its workers
    if root.refused and environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True':
        port = int(environ['MASTER_PORT'])
        report.add('red', 'port', "MASTER_PORT=%d on rank 0's node cannot be used: %s%s" % (
            port, root.refused, holder(port)), "unset MASTER_PORT in the job script, or name another one")
    port_of_all = free_port if root.refused else lambda: environ['MASTER_PORT']
    threading.Thread(target=root.gather, args=(port_of_all,), daemon=True).start()
    details = rank.look()
    root.known.wait()
    first = min([rank.begin] + [other.called for other in root.nodes])
    for mask, called in [(1, rank.begin)] + [(1 << other.rank, other.called) for other in root.nodes]:
        report.fact('seconds starting the node', '%.2g' % node.round_up(called - first), mask)
    # a world without some of its nodes would wait for them
    whole = sum(other.ranks for other in root.nodes) + rank.local_world >= rank.world
    rank.try_plugin(root.trade, 0, len(root.nodes) + 1)
    go = root.meet(bool(probe and probe.ready()) and whole, rank.begin + rank.seconds)
    end = finish_node(rank, local, probe, details, ('localhost', root.word, 0, len(root.nodes) + 1) if go else None)
    root.collect(report, end)
    check_job(report, machine, root)
    report.ignore(ignored_of(environ.get('SLINGTORCH_CHECK_IGNORE', '')))
    title = header(report, time.monotonic() - rank.begin)
    out.write(report.text(title + '\n'))
    out.flush()
    if json_file:
        seconds = round(time.monotonic() - rank.begin, 3)
        records.write(report.data(title=title.splitlines()[0], seconds=seconds), json_file)
    word = b'1' if report.count('red') else b'0'
    tell_all([other.connection for other in root.nodes], word)
    return word


def finish_node(rank: Rank, local: star.LocalRanks, probe: 'Optional[Probe]', details: dict,
                meeting: 'Optional[tuple]') -> float:
    """
    What all ranks of the node found becomes part of the first one's report.

    :param details: of the first rank (look.look())
    :param meeting: for the collective, if there is one: host and port of rank 0's, number of this node, how many there
        are
    :return: the time until which other nodes are waited for
    """
    report, machine = rank.report, rank.machine
    if probe:
        probe.go('go %s %s %d %d %d' % (*meeting, rank.seconds) if meeting else '')
    imported = probe.found['seconds'].get('import') if probe else 0     # None: not yet
    # on a busy node, where the import takes long, others of this node come late, too
    grace = min(BUSY, rank.seconds) if imported is None or imported > BUSY else 0
    local.wait(max(rank.begin + rank.patience, time.monotonic() + grace), rank.begin + rank.seconds)
    # other nodes need little time, or import PyTorch too
    end = max(rank.begin + rank.patience, time.monotonic() + min(rank.seconds, network.ASIDE + 3 * (imported or 0)))
    ranks = [details] + add_reports(report, machine, local)
    node.check_cores(report, ranks)
    took = probe.found.get('took', {}) if probe else {}
    limits.check(report, ranks, took, rank.world, not machine.gpus())
    check_providers(report, machine)
    node.check_gpus(report, ranks, check_probe(report, probe, machine), rank.environ)
    rank.trial.result()
    if not any('cannot be loaded' in finding.text for finding in report.having(name='plugin')):
        # NCCL that runs over another network has found what it needs
        runs = report.value('network of NCCL') not in (None, 'Socket')
        plugin.check(report, rank.trial, '' if runs else look.plugin_need(machine))
    return end


def check_probe(report: Report, probe: 'Optional[Probe]', machine: Machine) -> list:
    """The findings of the process with PyTorch; which libraries it maps."""
    with_gpu = bool(machine.gpus())
    return node.check_probe(report, probe.result() if probe else "this Python has no PyTorch", machine,
                            with_gpu, fi_info_names(report, machine.environ))


def free_port() -> str:
    """A port for the collective."""
    with socket.socket() as attempt:
        attempt.bind(('', 0))
        return str(attempt.getsockname()[1])


def main(argv: list) -> int:
    """Run the program; the exit status."""
    parser = argparse.ArgumentParser(prog='check', description="Checks a job from inside its ranks (docs/check.md).")
    parser.add_argument('--json', metavar='FILE', type=records.file_to_write,
                        default=os.environ.get('SLINGTORCH_CHECK_JSON'),
                        help="rank 0 writes what was found there; without it $SLINGTORCH_CHECK_JSON")
    parser.add_argument('--stderr', action='store_true', help="rank 0 prints on standard error")
    parser.add_argument('program', nargs=argparse.REMAINDER, help="after '--': what Python will run")
    args = parser.parse_args(argv)
    machine, out = Machine(), sys.stderr if args.stderr else sys.stdout
    return star.guarded('check', machine, lambda: run(machine, out, args.json, look.find_torch(),
                                                      program=args.program[args.program[:1] == ['--']:]))
