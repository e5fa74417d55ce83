# SPDX-License-Identifier: GPL-2.0-only
"""
Does this job use the network it paid for? Every rank runs this before the training: docs/check.md.

    python job check [--json FILE] [--stderr]

Reads what conda-python-distributed sets: RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT.
Rank 0 prints one table. Exit status on all ranks: 0 nothing red, 1 something red or no answer, 2 wrong usage.
    SLINGTORCH_CHECK_SECONDS   how many seconds a rank waits for others, and for PyTorch (default: 120)
    SLINGTORCH_CHECK_JSON      like --json
    SLINGTORCH_CHECK_IGNORE    names of findings that do not change the exit status; 1: all
"""
import argparse
import contextlib
import os
import re
import signal
import sys
import threading
import time

from . import gather, limits, look, meet, messages, network, node, probe, records
from .findings import LEVELS, TITLES, Report, ignored_of, ranks_text, some
from .gather import PeerLost
from .kinds import Any, Callable, Iterable, Optional
from .machine import Machine, expand_hosts, seconds_to_wait
from .probe import SLACK

# {fact that must be the same on all ranks: (level and name of the finding, remedy)}
SAME = {
    **dict.fromkeys(('torch', 'torch is in', 'CUDA of torch', 'ROCm of torch'),
                    ('yellow', 'versions', "start all ranks from one environment")),
    **dict.fromkeys(('maps libnccl', 'maps librccl', 'maps MPI'),
                    ('yellow', 'versions', "check LD_LIBRARY_PATH and LD_PRELOAD of these ranks")),
    'plugin': ('yellow', 'versions', "load the same modules on all nodes"),
    'driver': ('yellow', 'versions', "ask the centre to check these nodes"),
    # a node has several names
    'MASTER_ADDR': ('yellow', 'master', "unset it in the job script: conda-python-distributed sets it"),
    'MASTER_PORT': ('red', 'master', "unset it in the job script: conda-python-distributed sets it"),
    'WORLD_SIZE': ('red', 'world-size', "unset it in the job script: conda-python-distributed sets it"),
    **{'ulimit -' + option: ('yellow', 'limit', "find where this limit is set") for option in limits.SHELL},
}
# seconds to wait for the other ranks of the node, and on a busy node, after PyTorch is imported
SILENT, BUSY = 12, 8
# from this number of seconds on, check reports how long an address takes to resolve to a name
SLOW_NAME = 1
# remedy for a step that did not end and perhaps did not fail
LATE = "a slow file system, or a network that does not answer; set SLINGTORCH_CHECK_SECONDS=N to wait longer"
# A larger difference of clocks confuses logs, make and Kerberos; within a cluster, clocks differ by milliseconds.
CLOCK_SECONDS = 1


# ----------------------------------------------------------------------------------------------------------------------
# the process with PyTorch

class Probe(messages.Child):
    """The process that runs probe.py; `found` is what it has said so far."""

    def __init__(self, machine: Machine, seconds: float, words: list) -> None:
        self.begin, self.machine = time.monotonic(), machine
        self.found = {'facts': {}, 'phase': 'import'}    # type: dict
        super().__init__(probe.run, seconds, words)

    def wait(self, key: str, end: float) -> bool:
        """Whether it says something of this name before the time `end`."""
        while key not in self.found:
            said = self.hear(end)
            if said is None:
                return False
            self.found.update(said)
            if 'late' in said:      # before something else ends the job
                gather.say('check', self.machine, said['late'] + ". This node keeps trying")
        return True

    def ask(self, key: str, seconds: float, thing: object) -> 'Any':
        """Send it a thing for the store, with a time limit; its answer. :raises PeerLost: the store is gone"""
        self.tell((thing, seconds))
        if self.wait(key, time.monotonic() + seconds + 3 * SLACK):
            return self.found[key]
        raise PeerLost("PyTorch's store at MASTER_ADDR and MASTER_PORT: %s" % self.found.get(
            'lost', "the process with PyTorch has ended" if self.ended() else "it did not answer in time"))

    def result(self, end: float) -> dict:
        """All that it found until the time `end`; the key 'error' has what went wrong."""
        if self.wait('over', end):
            return self.found
        late, status, found = not self.ended(), self.end(), self.found
        what = {'import': 'import torch', 'rendezvous': 'the rendezvous'}.get(found['phase'], 'an all_reduce')
        if not late:
            return dict(found, error="%s ended the process with status %s" % (what, status))
        if 'imported' in found and found['phase'] == 'import':
            return found    # it was waiting for others
        return dict(found, error="%s did not end within %d s" % (what, time.monotonic() - self.begin), remedy=LATE,
                    level='yellow' if found['phase'] == 'import' else 'red')    # on a cold file system it takes minutes


# ----------------------------------------------------------------------------------------------------------------------
# rank 0

def check_same(report: Report) -> None:
    """Report facts that differ between ranks but must not."""
    for fact, values in sorted(report.facts.items()):
        level, name, remedy = SAME.get(fact, ('yellow', 'variable', "export it before srun, for all ranks"))
        rest, env = report.ranks & ~sum(values.values()), fact.startswith('env ')
        values = {**values, '(not set)': rest} if env and rest else values
        if len(values) > 1 and (env or fact in SAME):
            parts = ['%.200s on %s' % (value, ranks_text(mask)) for value, mask in
                     sorted(values.items(), key=lambda item: -bin(item[1]).count('1'))]
            parts[4:] = ['...'] * (len(parts) > 4)
            if fact == 'torch' and 'none' in values:
                level = 'red'
            report.add(level, name, "%s differs: %s" % (fact[4 * env:], '; '.join(parts)), remedy)
    torch = report.facts.get('torch', {})
    if len(torch) == 1 and 'none' not in torch:
        report.add('good', 'versions', "torch %s (CUDA %s, ROCm %s) on all ranks" % (
            report.value('torch'), report.value('CUDA of torch'), report.value('ROCm of torch')))


def check_answers(rank: 'Rank') -> None:
    """Report ranks and nodes that did not answer."""
    report, environ, own = rank.report, rank.environ, rank.machine.node
    missing = (1 << rank.world) - 1 & ~report.ranks
    if not missing:
        return
    if report.having('red', 'port') or report.having('red', 'import') and not rank.nodes:
        report.add('untested', 'no-answer', "the other nodes: rank 0's node could not open the store for them")
        return
    came = [said for said in rank.nodes.values() if said]
    called = {said['node'] for said in came} | {own}
    hosts = expand_hosts(environ.get('SLURM_STEP_NODELIST', ''))
    never = [host for host in hosts if len(hosts) > 1 and host not in called]
    silent = [said['node'] for said in came if missing >> said['rank'] & 1]
    text = "no answer from %s of %d" % (ranks_text(missing), rank.world)
    if never:
        text += ". %s sent nothing: see their own messages" % some(never)
    if silent:
        text += ". %s answered at first, then no longer" % some(silent)
    report.add('red', 'no-answer', text, "check whether these nodes reach MASTER_ADDR=%s (%s), MASTER_PORT=%s, and "
               "whether all these ranks were started; start without these nodes (srun --exclude)" % (
                   environ['MASTER_ADDR'], network.address_of_host(environ['MASTER_ADDR'], 'no address here'),
                   environ['MASTER_PORT']), missing)


def one_cause(report: Report) -> None:
    """A broken network causes different errors on the nodes: keep one, which names the cause or tells most."""
    found = report.having('red', 'rendezvous') + report.having('red', 'collective')
    if report.having('red', 'interface'):
        for finding in [one for one in found if 'Unable to find address for' in one.text]:  # gloo's device.cc
            report.findings.pop(finding)
            found.remove(finding)
    if not found:
        return
    said, level, text, remedy = network.cause([finding.text for finding in found])
    best = next(finding for finding in found if finding.text == said)
    named, mask = [], 0     # type: list, int
    for finding in found:
        mask |= report.findings.pop(finding)
    for address, own in sorted(report.facts.get('address of gloo', {}).items()):
        nodes = report.nodes(own)
        named.append('%s on %s' % (address or 'none', some(nodes, 3)))
        if address and len(nodes) > 1 and len(report.facts.get('machine', {})) > 1:
            report.add('red', 'rendezvous', "%s give the other nodes the same address, %s" % (
                ' and '.join(nodes[:8]), address), "ask the centre to check /etc/hosts and the interfaces")
    text = (text or said) + ' [addresses of gloo: %s]' % '; '.join(named[:6]) * bool(named)
    report.add(level or best.level, best.name, text, remedy or best.remedy, mask)


def check_job(rank: 'Rank') -> None:
    """Check what only all ranks together show."""
    from . import program

    report = rank.report
    check_answers(rank)
    if report.having('yellow', 'import'):
        for finding in report.having('red', 'rendezvous'):
            report.change(finding, 'yellow')    # the others were waiting for a node that was still importing
    one_cause(report)
    program.compare_programs(report)
    limits.compare_directories(report)
    check_same(report)
    if rank.nodes and not report.having(name='clock'):
        report.add('good', 'clock', "clocks differ by less than %d s" % CLOCK_SECONDS)
    if not rank.several or 'backend' not in report.facts:
        report.add('untested', 'collective', "the network: the nodes did not start an all_reduce" if rank.several else
                   "the network: the job has one node")


def header(report: Report, seconds: float) -> str:
    """The first lines of the table."""
    nodes, count = report.facts.get('node', {}), bin(report.ranks).count('1')
    lines = ["slingtorch check: %d rank%s on %d node%s, %.1f s: %s" % (
        count, 's'[:count != 1], len(nodes), 's'[:len(nodes) != 1], seconds, ', '.join(
            '%d %s' % (len(report.having(level)), TITLES[level]) for level in LEVELS
            if level != 'ignored' or report.having(level)))]
    places = ['%s %s' % (name, ranks_text(mask)) for name, mask in sorted(nodes.items())[:6]]
    lines.append('nodes:  %s' % '; '.join(places + ['...'] * (len(nodes) > 6)))
    if 'seconds import' in report.facts:
        lines.append('times:  import torch about %g s (slowest rank)' % max(map(float, report.facts['seconds import'])))
    return '\n'.join(lines)


# ----------------------------------------------------------------------------------------------------------------------

class Rank:
    """
    A rank in this check, and what it has found.

    :param torch: directory of torch, or None
    :param words: what Python will run, with its options
    """

    def __init__(self, machine: Machine, torch: 'Optional[str]', start: 'Callable', words: list) -> None:
        self.words, self.begin = words, time.monotonic()
        self.machine, self.environ, self.torch, self.start = machine, machine.environ, torch, start
        self.rank, self.world, self.local_rank, self.local_world = (int(self.environ[name]) for name in (
            'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'))
        self.seconds, self.report = seconds_to_wait(self.environ), Report(self.rank)
        self.several = self.world > self.local_world
        self.nodes, self.looked_up = {}, []  # type: dict, list
        # seconds for all that has limits of its own, such as the trial of the network
        self.limit = 3 * self.seconds + 60

    def look(self) -> dict:
        """look.look(), limits.py and program.py"""
        if self.several and not self.local_rank:
            hosts = expand_hosts(self.environ.get('SLURM_STEP_NODELIST', ''))
            name = self.environ['MASTER_ADDR'] if self.rank or not hosts else hosts[-1]
            threading.Thread(target=lambda: self.looked_up.append(meet.look_up(name)), daemon=True).start()
        details = look.look(self.machine, self.report, self.torch, self.several)
        limits.look(self.machine, self.report, details)
        if not self.local_rank:     # directories and files are the same for all ranks of the node
            from . import program
            details['words'] = self.words
            for function in (look.look_at_caches, program.look_at_program, limits.look_at_directories,
                             limits.look_at_compiler, limits.look_at_outputs, program.look_at_arguments):
                report = Report(self.rank)      # its thread may go on
                ended, error = limits.in_time(function, self.machine, report, details)
                if error:
                    self.report.add('untested', 'script', "%s() ended early: %s" % (function.__name__, error))
                if ended:
                    self.report.merge(report)
                else:
                    self.report.add('yellow', 'disk', "a file system did not answer within %d s: that of TMPDIR, HOME, "
                                    "HF_HOME, a cache, /dev/shm, the script or its arguments" % limits.WAIT,
                                    "run df on this node")
        return details


def run(machine: Machine, out: 'Any', json_file: 'Optional[str]' = None, torch: 'Optional[str]' = None,
        start: 'Callable' = Probe, words: 'Iterable[str]' = ()) -> int:
    """Run the whole check in one rank, with a Rank's parameters; rank 0 prints to `out`. Returns the exit status."""
    gather.read_ranks(machine.environ)
    rank = Rank(machine, torch, start, list(words))
    return gather.verdict(other_rank(rank) if rank.local_rank else for_the_node(rank, out, json_file), machine.environ)


def other_rank(rank: Rank) -> str:
    """Not the first rank of its node: writes what it finds. Returns rank 0's verdict."""
    files, name = gather.Files(rank.environ), 'rank-%d' % rank.rank
    files.wait_for_first(rank.begin + rank.seconds)
    details = rank.look()
    files.write(name, {'report': rank.report.dump(), 'details': details})
    word = files.wait_for_word(time.monotonic() + 2 * rank.limit)
    with contextlib.suppress(OSError):      # the first rank has removed it
        os.remove(files.path(name))
    return str(word)


def for_the_node(rank: Rank, out: 'Any', json_file: 'Optional[str]') -> str:
    """The first rank of a node: sends the node's report to rank 0's node, and tells the node's ranks the verdict."""
    process = rank.torch and rank.start(rank.machine, rank.seconds, rank.words)     # type: Any
    try:
        local, word = gather.LocalRanks(rank.environ), gather.LOST
        try:
            details = rank.look()
            found = meet_nodes(rank, process)
            finish_node(rank, local, found, details)
            word = finish_job(rank, process, out, json_file) if not rank.rank else deliver(rank, process, found)
        finally:
            local.tell(word)
    finally:
        if process:
            process.end()
    return word


def meet_nodes(rank: Rank, process: 'Optional[Probe]') -> dict:
    """What the process with PyTorch says after it has met those of other nodes and tried the network; or {}."""
    if not process:
        if rank.several:
            rank.report.add('red', 'import', "this Python has no PyTorch, but the nodes meet in PyTorch's store (%s)"
                            % sys.executable, "start all ranks from the environment that has PyTorch")
        return {}
    end = rank.begin + rank.seconds
    if process.wait('took', end):
        end = time.monotonic() + rank.limit
    found = process.result(end)
    rank.nodes = found.get('nodes') or {}
    lost = found.get('lost', '')
    if lost and not rank.rank:
        taken = re.search('EADDRINUSE|EACCES|[Aa]ddress already in use', lost)
        rank.report.add('red', 'port' if taken else 'rendezvous', "PyTorch cannot open its store at MASTER_ADDR=%s, "
                        "MASTER_PORT=%s: %s" % (rank.environ['MASTER_ADDR'], rank.environ['MASTER_PORT'],
                                                re.sub('^.*message: ', '', lost)),
                        "find the program that listens there (ss -ltnp), or unset MASTER_ADDR and MASTER_PORT in the "
                        "job script")
    if 'others' in found:
        gpu, others = found['others']
        rank.report.add(
            'red' if look.wants_gpus(rank.machine) else 'yellow', 'gpus',
            "PyTorch on rank 0's node uses %s, but on %s %s: they cannot train together" % (
                ('nccl', some(others), 'gloo') if gpu else ('gloo', some(others), 'nccl')),
            "find out why PyTorch sees no GPU on the nodes with gloo, or start without them (srun --exclude)")
    if abs(found.get('ahead', 0)) > CLOCK_SECONDS:
        rank.report.add('yellow', 'clock', "the clock of %s differs by %.0f s from that of rank 0's node" % (
            rank.machine.node, found['ahead']), "tell the centre that this node's time is wrong")
    return found


def finish_node(rank: Rank, local: gather.LocalRanks, found: dict, details: dict) -> None:
    """Merge what all ranks of the node found, and what meet_nodes() found, into the first rank's report."""
    from . import program

    report, machine = rank.report, rank.machine
    if rank.several and (rank.looked_up or [SLOW_NAME])[0] >= SLOW_NAME:
        report.add('yellow', 'rendezvous', "on this node it takes %g s or more to look up the name of an address, and "
                   "PyTorch's store does this for each connection, one after the other" % SLOW_NAME,
                   "check the name server in /etc/resolv.conf; export RES_OPTIONS='timeout:1 attempts:1'")
    messages.until(local.look, min(rank.begin + rank.seconds, max(rank.begin + SILENT, time.monotonic() + BUSY)))
    ranks = [dict(details, rank=rank.rank)]
    for other, own in local.reports.values():
        report.merge(other)
        ranks.append(own)
    node.check_cores(report, ranks)
    node.check_gpus(report, ranks, node.check_probe(report, found, machine), rank.environ)
    limits.check(report, ranks, found.get('took', {}), rank.world, not machine.gpus())
    program.check_imports(report, found.get('script') or {}, details)


def deliver(rank: Rank, process: 'Optional[Probe]', found: dict) -> str:
    """Send this node's report to rank 0's node; returns rank 0's verdict. :raises PeerLost: rank 0 is not reached"""
    try:
        if not process or not found.get('met'):
            raise PeerLost(found.get('lost') or found.get('error') or "it has not imported PyTorch in time")
        # what is red here ends the job unless it is ignored, and may be a network over which no verdict comes
        seconds = rank.seconds if rank.report.having('red') else rank.limit
        return str(process.ask('word', seconds, rank.report.dump()))
    except PeerLost as err:
        for level, name, text, remedy, _ in rank.report.sorted():
            # another job's number is also another MASTER_PORT
            if level == 'red' or name == 'world-size':
                gather.say('check', rank.machine, "%s: %s -> %s" % (name, text, remedy))
        raise PeerLost(("rank 0 has ended, or its node is gone (%s): see rank 0's own messages" if found.get('met') else
                        "this node cannot reach rank 0's node: %s") % err)


def finish_job(rank: Rank, process: 'Optional[Probe]', out: 'Any', json_file: 'Optional[str]') -> str:
    """Rank 0: reads the other nodes' reports, prints the result, and tells them the verdict, which it returns."""
    report = rank.report
    collect(rank, process)
    check_job(rank)
    report.ignore(ignored_of(rank.environ))
    title = header(report, time.monotonic() - rank.begin)
    out.write(report.text(title + '\n'))
    out.flush()
    if json_file:
        seconds = round(time.monotonic() - rank.begin, 3)
        records.write(report.data(title=title.splitlines()[0], seconds=seconds), json_file)
    word = '1' if report.having('red') else '0'
    if rank.nodes and process:
        with contextlib.suppress(PeerLost):     # the other nodes report it themselves
            process.ask('heard', SLACK, word)
    return word


def collect(rank: Rank, process: 'Any') -> None:
    """Merge the nodes' reports."""
    report, there = rank.report, rank.nodes
    strange, texts = [number for number, said in there.items() if not said], {}  # type: list, dict
    if there:
        seconds = min(rank.seconds, network.STEP * network.slowness(rank.seconds, len(there)) + 3 *
                      process.found.get('imported', 0)) + SLACK
        try:
            texts = process.ask('reports', seconds, [number for number, said in there.items() if said])
        except PeerLost as err:
            report.add('red', 'rendezvous', "the other nodes' reports did not arrive: %s" % err)
    free = (1 << rank.world) - 1 & ~report.ranks
    for number, said in texts.items():
        try:
            other = Report.load(said, free)
        except ValueError:
            strange.append(number)
            continue
        free &= ~other.ranks
        report.merge(other)
    if strange:
        names = sorted({(there[number] or {}).get('node', 'a node of unknown name') for number in strange})
        report.add('red', 'no-answer', "%s sent a message that this version does not know, or has ranks of another node"
                   % some(names), "start all nodes from one installation; see how the job script sets RANK; another "
                   "program may use MASTER_PORT", 1)


def main(argv: list) -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(prog='check', description="Checks a job from inside its ranks (docs/check.md).")
    parser.add_argument('--json', metavar='FILE', type=records.file_to_write,
                        default=os.environ.get('SLINGTORCH_CHECK_JSON'),
                        help="file to which rank 0 writes the findings (default: $SLINGTORCH_CHECK_JSON)")
    parser.add_argument('--stderr', action='store_true', help="rank 0 prints to standard error")
    parser.add_argument('program', nargs=argparse.REMAINDER, help="after '--': what Python will run")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)   # `trap '' CHLD` of a job script is inherited
    machine, out = Machine(), sys.stderr if args.stderr else sys.stdout     # type: Any, Any
    out.reconfigure(errors='backslashreplace')      # as on stderr: values of variables may be in another encoding
    return gather.guarded('check', machine, lambda: run(machine, out, args.json, look.find_torch(),
                                                        words=args.program[args.program[:1] == ['--']:]))
