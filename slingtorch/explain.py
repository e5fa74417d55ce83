# SPDX-License-Identifier: GPL-2.0-only
"""
slingtorch explain: what went wrong in a job, from its output or from the files of PyTorch's flight recorder.

What is known stands in explain_rules.cfg, as data (docs/explain.md). A log is read once, in blocks, so that its size
does not matter: each rule names texts that its lines hold, and only lines with such a text meet a regular expression.
"""
import configparser
import gzip
import io
import json
import os
import pickle
import re
import sys
import zlib
from typing import Any, BinaryIO, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from slingtorch import wrapped
from slingtorch.job.findings import ranks_text

Calls = List[Tuple[Tuple[str, int], List[int]]]     # ((operation, number), ranks that called it)
Entry = Dict[str, Any]      # of the flight recorder

RULES = os.path.join(os.path.dirname(os.path.realpath(__file__)), 'explain_rules.cfg')

# statuses of the command; 1 is an error
EXPLAINED, NOTHING_KNOWN = 0, 3

# what a rule says is: needed by other rules, the reason, a reason that fits only some lines, an unknown reason,
# what follows from a reason, worth knowing
LEVELS = ('fact', 'cause', 'perhaps', 'unknown', 'consequence', 'note')
REASONS = LEVELS[1:4]
BROAD = LEVELS[2:4]      # they never answer for a line that a cause knows
TITLES = {'cause': 'cause', 'perhaps': 'perhaps', 'unknown': 'cause?', 'consequence': 'follows', 'note': 'note'}
NEEDED = ('has', 'pattern', 'sample', 'source')
SAID = ('cause', 'remedy')
OPTIONAL = ('level', 'role', 'network', 'needs', 'absent', 'absent_line', 'distinct', 'times', 'of', 'lines',
            'blame', 'alone')
# what the program does with a finding besides: docs/explain.md
ROLES = ('', 'timeout', 'work', 'difference', 'first-failed', 'exception')

BLOCK = 1 << 20         # bytes that are read at a time
LINE = 4096             # bytes of a line that are looked at, on either side of what was found
SHOWN = 240             # characters of a line that are shown
MAX_BLAMED = 3          # nodes that a cause names first
MAX_LIKELY = 2          # rules that are told where no other one names a reason
MAX_TRACKED = 100000    # ranks and nodes that are remembered per rule
MATCHES = 100000        # lines that are compared with expressions; later, only those unlike all before are
MAX_KINDS = 200000      # of lines that are remembered then
MAX_EXCEPTIONS = 1000   # different ones that are remembered
TRACEBACK_WINDOW = 1 << 14  # bytes before an exception that are looked at for its traceback
SEEN_BUDGET = 1 << 22   # bytes of short lines that are remembered
VARYING = b'0123456789abcdefABCDEF'     # numbers and addresses: without them most lines of a log are alike
# times, measurements, addresses; no status and no rank
COUNTED = re.compile(rb'\d{4,}|\d+(?=[:.]\d)|(?<=\d[:.])\d+')
MAX_DUMP_BYTES = 1 << 28

COLOUR = re.compile(r'\x1b\[[0-9;?]*[ -/]*[@-~]')
CONTROL = re.compile(r'[\x00-\x08\x0b-\x1f\x7f-\x9f]')
# who wrote a line: PyTorch, srun --label, Open MPI, Cray MPICH
RANK = re.compile(r'^\s*\[?rank ?(\d+)\]?:|\[rank=(\d+)\]|^\s*(\d+): |^\[\d+,(\d+)\]<|\[[Rr]ank (\d+)\]'
                  r'|\bPE (\d+): MPICH|\bRank (\d+)\]')
# PALS, NCCL, Cray MPICH, libfabric, Slurm
NODE = re.compile(r'^\s*(nid\d+|x\d+c\d+s\d+b\d+n\d+)(?: \d+)?: '
                  r'|(?:^|[\s>])([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] |\] \[([A-Za-z][\w.-]*)\] - Abort'
                  r'|<(?:warn|info|error)> ([A-Za-z][\w.-]*): | ON (\S+) CANCELLED AT| error: ([A-Za-z][\w.-]*): task')
# Slurm, PBS (job.o4711), torchrun (stdout.log), and what people name theirs
OUTPUT_NAME = re.compile(r'\.(?:out|err|log|txt|output|error)(?:\.gz)?$|\.[oe]\d+(?:\.\d+)?$|^slurm-\d')
DUMP_NAME = re.compile(r'^(.*?)(\d+)$')
BAR = re.compile(r'(\d+)%\|.*\[([\d:]+)<([\d:]+),')
EXCEPTION = re.compile(r'\b[A-Z]\w*(?:Error|Exception)\b|\bException: ')
# Python's own form, and that of rich (in a frame of lines)
FRAME = re.compile(r'(?:\bFile "|│ (?=/))(?P<file>[^":]+)(?:", line |:)(?P<line>\d+)(?:,? in (?P<name>\S+))?')
# what launchers and loggers write before a message: srun --label, Open MPI, PALS, torchrun, PyTorch, and times
LABEL = re.compile(r'^\s*(?:\[[^\]]*\](?:<\w+>)?:?\s*|(?:\d+|nid\d+|x\d+c\d+s\d+b\d+n\d+)(?: \d+)?:\s+'
                   r'|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*\s+)*')
NOT_OWN = re.compile(r'/(?:site|dist)-packages/|/lib(?:64)?/python\d|/torch/|^<|/bin/(?:torchrun|accelerate)$')
NO_EXCEPTION = re.compile(r'^(?:Exception|Error) ignored in|^Exception in thread .*\(daemon\)')


class ExplainError(RuntimeError):
    """A file that cannot be read, or rules that are wrong; the message says what to do."""


class Rule:
    """One section of the rules: what its lines look like, and what they mean."""

    def __init__(self, name: str, keys: Dict[str, str]) -> None:
        self.name = name
        self.level = keys.get('level', 'cause')
        self.role, self.network = keys.get('role', ''), keys.get('network')
        unknown = set(keys) - set(NEEDED + SAID + OPTIONAL)
        missing = [key for key in NEEDED + (() if self.level == 'fact' else SAID) if not keys.get(key)]
        if unknown or missing or self.level not in LEVELS or self.role not in ROLES:
            raise ExplainError("rule [%s]: unknown keys: %s; missing: %s; level is '%s', one of %s; role is '%s', one "
                               "of %s" % (name, ', '.join(sorted(unknown)) or 'none', ', '.join(missing) or 'none',
                                          self.level, ', '.join(LEVELS), self.role, ', '.join(ROLES[1:])))
        self.has = [text.encode() for text in lines(keys['has'])]
        self.sample = lines(keys['sample'])
        self.cause, self.remedy, self.source = [keys.get(key, '') for key in SAID + ('source',)]
        self.needs, self.absent = [keys.get(key, '').split() for key in ('needs', 'absent')]
        self.distinct, self.of = keys.get('distinct', '').split(), keys.get('of')
        self.times, self.lines = int(keys.get('times', '1')), int(keys.get('lines', '1'))
        self.blame, self.alone = keys.get('blame'), 'alone' in keys
        self.expressions, self.not_in_line = lines(keys['pattern']), lines(keys.get('absent_line', ''))
        self.compiled: Optional[List['re.Pattern[str]']] = None

    @property
    def patterns(self) -> List['re.Pattern[str]']:
        """The expressions, compiled when the first line needs them: a log meets few of the rules."""
        if self.compiled is None:
            self.compiled = [re.compile(expression) for expression in self.expressions]
        return self.compiled

    def check(self) -> None:
        """:raises ExplainError: if an expression is none, or matches every line"""
        try:
            for expression in self.expressions + self.not_in_line:
                re.compile(expression)
        except re.error as err:
            raise ExplainError("rule [%s]: %s is no regular expression: %s" % (self.name, str(err.pattern), err))
        if self.search('') or b'' in self.has:
            raise ExplainError("rule [%s] matches every line: its expressions must match no empty one" % self.name)

    def forbids(self, text: str) -> bool:
        """Whether a line has what its absent_line names."""
        return any(re.search(expression, text) for expression in self.not_in_line)

    def search(self, text: str) -> Optional['re.Match[str]']:
        """The leftmost match of the patterns, as if they were one with '|' between them."""
        matches = [match for match in (pattern.search(text) for pattern in self.patterns) if match]
        return min(matches, key=lambda match: match.start()) if matches else None


class Finding:
    """What a rule found: how often, where first, by which ranks and on which nodes."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.count = 0
        self.place, self.line = ('', 0), ''     # (file, number) of the first line, and what it says
        self.told = ''      # what the pattern found there
        self.groups: Dict[str, Optional[str]] = {}      # what the pattern's groups are there
        self.ranks: Set[int] = set()
        self.nodes: Set[str] = set()
        self.distinct: Set[Any] = set()
        self.first: List[int] = []      # the ranks of the first line
        self.details: List[str] = []

    def add(self, text: str, match: 're.Match[str]') -> None:
        """Count one line."""
        groups = match.groupdict()
        ranks, nodes = who(text, groups)
        if not self.count:
            self.line, self.groups, self.first = text, groups, ranks
            self.told = match.group().split('\n')[0]
        self.count += 1
        self.ranks.update(ranks[:MAX_TRACKED - len(self.ranks)])
        self.nodes.update(nodes[:MAX_TRACKED - len(self.nodes)])
        if self.rule.distinct and len(self.distinct) < MAX_TRACKED:
            # what has no name of its own counts each time
            self.distinct.add(next(filter(None, map(groups.get, self.rule.distinct[:1])), self.count))

    def cause(self) -> str:
        """The cause, with what the pattern's groups found in it."""
        text = re.sub(r'\{(\w+)\}', lambda match: self.groups.get(match.group(1)) or '\0', self.rule.cause)
        # a group that found nothing leaves neither its blank nor its brackets
        text = re.sub(r'\s*\0+(?=[\s),.;:]|$)|\0', '', re.sub(r'\s*\([\0\s]+\)', '', text.replace('(\0 ', '(')))
        text = re.sub(r'\s+', ' ', text).strip(' :,')
        if self.rule.blame and 0 < len(self.nodes) <= MAX_BLAMED:
            ranks = ', ' + ranks_text(self.ranks) if self.ranks else ''
            text = '%s%s: %s' % (', '.join(sorted(self.nodes)), ranks, text)
        return text

    def evidence(self) -> str:
        """The line, cut so that what was found in it is seen."""
        start = self.line.find(self.told)
        if len(self.line) <= SHOWN or start + len(self.told) <= SHOWN:
            return self.line[:SHOWN]
        if len(self.told) <= SHOWN - 40:
            return '...' + self.line[start - 40:][:SHOWN]
        half = SHOWN // 2
        return '%s%s ... %s' % ('...' * bool(start), self.told[:half], self.told[-half:])

    def data(self) -> Dict[str, Any]:
        """For JSON."""
        return {'rule': self.rule.name, 'level': self.rule.level, 'cause': self.cause(), 'file': self.place[0],
                'line': self.place[1], 'text': self.line, 'count': self.count, 'ranks': sorted(self.ranks),
                'nodes': sorted(self.nodes), 'details': self.details, 'remedy': self.rule.remedy,
                'source': self.rule.source}


def lines(text: str) -> List[str]:
    """The lines of a value, without blanks around them."""
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def read_rules(path: str = RULES, check: bool = True) -> Dict[str, Rule]:
    """
    The rules of a file: {name: Rule}, in their order.

    :param check: compile every expression, too, which takes most of the time (the shipped ones are tested)
    """
    parser = configparser.ConfigParser(interpolation=None, delimiters=('=',), comment_prefixes=('#',))
    try:
        with open(path, encoding='utf-8') as handle:
            parser.read_file(handle)
    except (OSError, UnicodeDecodeError, configparser.Error) as err:
        raise ExplainError("the rules %s cannot be read: %s" % (path, err))
    rules = {name: Rule(name, dict(parser.items(name))) for name in parser.sections()}
    for rule in rules.values():
        if check:
            rule.check()
        for name in rule.needs + rule.absent:
            if name not in rules:
                raise ExplainError("rule [%s] names [%s], which is not there" % (rule.name, name))
    return rules


def numbers(text: Optional[str]) -> List[int]:
    """The numbers of a list such as 1,4-6."""
    return [number for first, last in re.findall(r'(\d{1,8})(?:-(\d{1,8}))?', text or '')
            for number in range(int(first), min(int(last or first), int(first) + MAX_TRACKED) + 1)]


def who(text: str, groups: Dict[str, Optional[str]]) -> Tuple[List[int], List[str]]:
    """Ranks and nodes that a line is of, from the groups of the pattern or from what precedes the message."""
    ranks, nodes = numbers(groups.get('ranks')), [groups.get('node')]
    by_rank, by_node = RANK.search(text), NODE.search(text)
    rank = next(filter(None, by_rank.groups())) if by_rank else groups.get('rank')
    if rank:
        ranks.append(int(rank))
    if by_node:
        nodes.append(next(filter(None, by_node.groups())))
    return ranks, [node for node in nodes if node]


def readable(data: bytes) -> str:
    """A line as text, without colours and what would steer a terminal."""
    return CONTROL.sub('', COLOUR.sub('', data.decode('utf-8', 'replace'))).rstrip()


def read_block(stream: BinaryIO) -> Tuple[bytes, Optional[Exception]]:
    """Up to BLOCK bytes, and the error that ended them early. A compressed file gives what comes before its damage."""
    read, pieces, size = getattr(stream, 'read1', stream.read), [], 0
    try:
        while size < BLOCK:
            pieces.append(read(BLOCK - size))
            if not pieces[-1]:
                break
            size += len(pieces[-1])
    except (EOFError, OSError, zlib.error) as err:
        return b''.join(pieces), err
    return b''.join(pieces), None


class Log:
    """Reads logs and keeps what rules find in them."""

    def __init__(self, rules: Dict[str, Rule]) -> None:
        self.rules = rules
        self.findings: Dict[str, Finding] = {}
        self.remarks: List[str] = []
        # rank: (number, operation) of the first collective in which it timed out
        self.timeouts: Dict[int, Tuple[int, str]] = {}
        self.works: Dict[int, Tuple[str, int, int]] = {}    # rank: (group, number, last one that it had begun)
        self.size = 0        # ranks of the job, as far as the logs say
        self.exceptions: Dict[str, Finding] = {}    # by short form, those that no rule knows
        # Longest word of each text, digits removed; used as a prefilter
        self.texts = {text: max(text.translate(None, VARYING).split(), key=len, default=b'')
                      for rule in rules.values() for text in rule.has}
        self.seen: Set[bytes] = set()       # lines without digits, and their words
        self.words: Set[bytes] = set()
        self.seen_size = 0
        self.likely: Set[bytes] = set()     # texts whose word was seen there, and those that were seen themselves
        self.possible: Set[bytes] = set()
        self.looked = 0      # lines that had a text of a rule
        self.kinds: Set[int] = set()    # of lines, after many of those
        self.thinned = False
        self.before = b''    # the end of the block before
        self.root: Optional[int] = None     # the rank that failed first, as torchrun says

    def read(self, name: str, stream: BinaryIO) -> None:
        """Read one log from a binary stream; name is what the report calls it."""
        number, rest, last = 1, b'', b''
        while True:
            data, error = read_block(stream)
            if error:
                self.remarks.append("%s is cut off or damaged (%s): only what comes before was read" % (name, error))
            block = rest + data
            last = data[-1:] or last
            # a line without an end, as of a progress bar, is cut at what looks like a boundary
            ends = [block.rfind(mark) + 1 for mark in (b'\n', b'\r', b' ')] if data and not error else []
            end = next(filter(None, ends), len(block))
            self.search(name, block[:end], number)
            self.before = block[max(0, end - TRACEBACK_WINDOW):end]
            number += block.count(b'\n', 0, end)
            rest = block[end:]
            if error or not data:
                break
        if not last and not error:
            self.remarks.append("%s is empty: the job wrote nothing, or its output goes to another file" % name)
        elif last not in (b'', b'\n'):
            self.remarks.append("%s ends in the middle of a line: it may be cut off, and its end tells the most" % name)

    def search(self, name: str, block: bytes, number: int) -> None:
        """Search a block, whose first line has this number."""
        # lines that a cause explains; those that any rule explains
        causes, known = set(), set()    # type: Set[int], Set[int]
        numbers = []    # type: List[int]
        if self.looked > MATCHES:
            block, numbers = self.thin(block, number)
        # most lines, without their numbers, are like those of earlier blocks: only new ones are searched for the texts
        new = set(block.translate(None, VARYING).split(b'\n')) - self.seen
        lines_of_block = b'\n'.join(new)
        words = set(lines_of_block.split()) - self.words
        if self.seen_size < SEEN_BUDGET:
            self.seen |= new
            self.seen_size += sum(map(len, new))
            self.words |= words
        words_of_block = b' '.join(words)
        self.likely.update(text for text, word in self.texts.items() if word in words_of_block)
        self.possible.update(text for text in self.likely if text.translate(None, VARYING) in lines_of_block)
        # a line that another rule explains is no exception that nobody knows
        for rule in sorted(self.rules.values(), key=lambda rule: rule.level in BROAD and BROAD.index(rule.level) + 1):
            once = rule.level == 'fact' and not rule.role
            if once and rule.name in self.findings:
                continue
            for start, end in self.lines_with(rule, block):
                last = rule.level == 'unknown' or rule.role == 'exception'
                if rule.level in BROAD and start in (known if last else causes):
                    continue
                self.looked += 1
                line = seen = readable(block[start:end])
                if rule.lines > 1:
                    seen = with_next(line, block[end:end + LINE], rule.lines)
                bare = LABEL.sub('', seen)
                match = rule.search(bare) or (rule.search(seen) if bare != seen else None)
                if not match or rule.forbids(line):
                    continue
                if rule.level != 'note':
                    known.add(start)
                if rule.level == 'cause' and not (rule.needs or rule.absent or rule.distinct):
                    causes.add(start)
                finding = self.keep(rule, block, start, line, match)
                if finding and finding.count == 1:
                    index = block.count(b'\n', 0, start)
                    finding.place = name, numbers[index] if numbers else number + index
                if once:
                    break

    def lines_with(self, rule: Rule, block: bytes) -> Iterator[Tuple[int, int]]:
        """Start and end of each line of a block that holds one of a rule's texts."""
        found = set()
        for text in rule.has:
            place = block.find(text) if text in self.possible else -1
            while place >= 0:
                start, end = line_around(block, place)
                if start not in found:
                    found.add(start)
                    yield start, end
                place = block.find(text, max(end, place + 1))

    def thin(self, block: bytes, number: int) -> Tuple[bytes, List[int]]:
        """The lines of a block that are not like an earlier one but for times and measurements, and their numbers."""
        kept, numbers = [], []
        for line, kind in zip(block.split(b'\n'), map(hash, COUNTED.sub(b'0', block).split(b'\n'))):
            if kind not in self.kinds:
                kept.append(line)
                numbers.append(number)
                if len(self.kinds) < MAX_KINDS:
                    self.kinds.add(kind)
            number += 1
        self.thinned = True
        return b'\n'.join(kept) + b'\n', numbers + [number]

    def keep(self, rule: Rule, block: bytes, start: int, line: str, match: 're.Match[str]') -> Optional[Finding]:
        """Keep what a rule found in the line that starts there."""
        kept, key = self.findings, rule.name
        if rule.role == 'exception':
            message = match.group('exception') + (match.group('message') or '')[:80]
            kept, key = self.exceptions, re.sub(r'[\d\W]+', '', message)
        finding = kept.get(key)
        if not finding:
            frame = own_frame(self.before + block[:start], line) if rule.level in REASONS else ''
            if frame is None or len(kept) > MAX_EXCEPTIONS:
                return None
            finding = kept[key] = Finding(rule)
            finding.details = [frame] if frame else []
            if rule.role == 'timeout':
                self.progress(finding, block[:start])
                if match.group('op') == 'ALLREDUCE' and match.group('numel') == '1':
                    finding.details.append("an ALLREDUCE of one element is a barrier, or the sum of one number: look "
                                           "for one that only some ranks reach (a save, a validation or a log entry "
                                           "under 'if rank == 0')")
            self.findings.setdefault(rule.name, finding)
        finding.add(line, match)
        self.remember(rule.role, line, match)
        return finding

    def progress(self, finding: Finding, before: bytes) -> None:
        """Note a progress bar that stood right before the watchdog's first line."""
        match = BAR.search(readable((self.before + before)[-LINE:].rstrip().split(b'\n')[-1].split(b'\r')[-1]))
        if match:
            finding.details.append("right before it, a progress bar stood at %s %% after %s, with %s left: if that was "
                                   "the preparation of data or a checkpoint on a rank, it only needs a longer timeout "
                                   "(init_process_group(timeout=...)), or to be done before" % match.groups())

    def remember(self, role: str, line: str, match: 're.Match[str]') -> None:
        """Who waits for what, of PyTorch's watchdog; who failed first, of torchrun; the size of the job."""
        for rank in who(line, match.groupdict())[0][:1]:
            if role == 'timeout' and match.group('seq') and len(self.timeouts) < MAX_TRACKED:
                self.timeouts.setdefault(rank, (int(match.group('seq')), match.group('op')))
            elif role == 'work' and len(self.works) < MAX_TRACKED:
                self.works.setdefault(rank, (match.group('group'), int(match.group('seq')),
                                             int(match.group('enqueued'))))
        if role == 'first-failed' and match.group('rank') and self.root is None:
            self.root = int(match.group('rank'))
        size = re.search(r'\bn[Rr]anks (\d+)', line)
        if size:
            self.size = max(self.size, int(size.group(1)))

    def report(self, facts: Iterable[str] = ()) -> List[Finding]:
        """
        The findings, causes first.

        :param facts: names of rules that hold without a line
        """
        true = set(self.findings).union(facts)
        self.choose_exception()
        found = []
        for rule in self.rules.values():
            finding = self.findings.get(rule.name)
            if finding and rule.level != 'fact' and true.issuperset(rule.needs) and not true.intersection(rule.absent):
                different, size = len(finding.distinct), finding.groups.get(rule.of or '')
                if not rule.distinct or (different < int(size) if size else different >= rule.times):
                    found.append(finding)
        self.compare_ranks(found)
        # what is most likely where nothing says why
        if any(finding.rule.level in REASONS[:2] and not finding.rule.alone for finding in found):
            found = [finding for finding in found if not finding.rule.alone]
        elif any(finding.rule.role == 'exception' for finding in found):
            found = [finding for finding in found if not finding.rule.alone or finding.rule.role == 'exception']
        likely = [finding for finding in found if finding.rule.alone][:MAX_LIKELY]
        found = [finding for finding in found if not finding.rule.alone or finding in likely]
        order, told = list(self.rules), {}      # type: List[str], Dict[Any, Finding]
        for finding in sorted(found, key=lambda one: (LEVELS.index(one.rule.level), order.index(one.rule.name))):
            # where a special rule and a general one found the same lines, the special one stands first
            told.setdefault((finding.place, finding.count) if finding.rule.level in REASONS else finding.rule.name,
                            finding)
        if self.thinned:
            self.remarks.append("lines like earlier ones were not counted after %d that a rule looked at" % MATCHES)
        return list(told.values())

    def choose_exception(self) -> None:
        """The first exception that no rule knows, or that of the rank that torchrun names; the others are mentioned."""
        files = list(dict.fromkeys(one.place[0] for one in self.exceptions.values()))
        all_of_them = sorted(self.exceptions.values(), key=lambda one: (files.index(one.place[0]), one.place[1]))
        if all_of_them:
            chosen = next((one for one in all_of_them if self.root in one.ranks), all_of_them[0])
            others = [one for one in all_of_them if one is not chosen]
            # the first ones and the last
            for one in others[:2] + others[2:][-1:]:
                chosen.details.append("also, in line %d: %s" % (one.place[1], one.line.strip()[:SHOWN]))
            for one in all_of_them:
                self.findings.pop(one.rule.name, None)
            self.findings[chosen.rule.name] = chosen

    def compare_ranks(self, found: List[Finding]) -> None:
        """From the watchdogs of the ranks: who is missing, who is behind, who called something else."""
        waiting = next((finding for finding in found if finding.rule.role == 'timeout'), None)
        if not waiting:
            return
        by_call: Dict[Tuple[str, int], List[int]] = {}
        for rank, (seq, operation) in self.timeouts.items():
            by_call.setdefault((operation, seq), []).append(rank)
        calls = sorted(by_call.items(), key=lambda item: -len(item[1]))
        for (operation, seq), ranks in calls[:4]:
            waiting.details.append("%s waited in %s, number %d" % (ranks_text(ranks), operation, seq))
        if len(calls) > 4:
            waiting.details.append("... and others in %d more" % (len(calls) - 4))
        if not self.works and len({operation for operation, _ in by_call}) > 1:
            # PyTorch before 2.2 does not say of which group a number is
            self.differ(found, waiting, calls,
                        "unless they are of different process groups, which this log does not say")
        # numbers are those of one process group: ranks are compared where the log says that it is the same one
        groups: Dict[str, Dict[int, Tuple[int, str, int]]] = {}
        for rank, (group, seq, enqueued) in self.works.items():
            if rank in self.timeouts and self.timeouts[rank][0] == seq and re.search(r'\(\w*\)', group):
                groups.setdefault(group, {})[rank] = (seq, self.timeouts[rank][1], enqueued)
        for group, members in groups.items():
            self.compare_group(group, members, found, waiting)
        size = max([self.size] + [rank + 1 for rank in self.timeouts])
        missing = set(range(size)) - set(self.timeouts)
        if len(self.timeouts) > 1 and 0 < len(missing) <= max(8, size // 8):
            waiting.details.append("%s wrote no such line: look there first" % ranks_text(missing))

    def differ(self, found: List[Finding], waiting: Finding, calls: Calls, remark: str) -> None:
        """Report that ranks called different collectives: [((operation, number), ranks)]."""
        rule = next(rule for rule in self.rules.values() if rule.role == 'difference')
        if not any(finding.rule is rule for finding in found):
            finding = Finding(rule)
            finding.count, finding.place, finding.line = 1, waiting.place, waiting.line
            calls = sorted(calls, key=lambda call: len(call[1]))
            finding.details = ["%s called %s as number %d" % (ranks_text(ranks), operation, seq)
                               for (operation, seq), ranks in calls] + [remark]
            finding.ranks = set(calls[0][1])
            found.append(finding)

    def compare_group(self, group: str, members: Dict[int, Tuple[int, str, int]], found: List[Finding],
                      waiting: Finding) -> None:
        """Ranks of one process group: {rank: (number, operation, last number that it had begun)}."""
        operations: Dict[int, Dict[str, List[int]]] = {}
        for rank, (seq, operation, _) in members.items():
            operations.setdefault(seq, {}).setdefault(operation, []).append(rank)
        for seq, called in sorted(operations.items()):
            if len(called) > 1:
                calls = [((operation, seq), ranks) for operation, ranks in called.items()]
                self.differ(found, waiting, calls, "in group " + group)
                break
        begun = {rank: enqueued for rank, (_, _, enqueued) in members.items()}
        behind = sorted(rank for rank in begun if begun[rank] < max(begun.values()))
        if behind and len(behind) < len(begun):
            waiting.details.append(
                "%s had begun fewer collectives of group %s than the others (%d of %d)"
                % (ranks_text(behind), group, begun[behind[0]], max(begun.values())))


def own_frame(before: bytes, line: str) -> Optional[str]:
    """
    Where in the program an exception arose, from the traceback before its line.

    :return: the last frame outside Python and its packages, or ''; None for an exception that Python ignored
    """
    if not EXCEPTION.search(line):
        return ''
    above, frame = before[-TRACEBACK_WINDOW:].split(b'\n'), ''
    ranks = who(line, {})[0]
    for number in reversed(range(len(above))):
        text = readable(above[number])
        if who(text, {})[0] != ranks:
            continue
        match = FRAME.search(text)
        if match and not frame and not NOT_OWN.search(match.group('file')):
            code = LABEL.sub('', readable(above[number + 1])) if number + 1 < len(above) else ''
            frame = 'the last line of the program itself: %s:%s%s%s' % (
                match.group('file'), match.group('line'), ' in ' + match.group('name') if match.group('name') else '',
                ': ' + code[:SHOWN] if code and code[0] != '│' and not FRAME.search(code) else '')
        elif 'Traceback (most recent call last' in text:
            if number and NO_EXCEPTION.search(LABEL.sub('', readable(above[number - 1]))):
                return None
            break
    return frame


def with_next(line: str, after: bytes, count: int) -> str:
    """A line and those of the same rank that follow it, without their labels: so many in all."""
    ranks, together = who(line, {})[0], [line]
    for text in map(readable, after.split(b'\n')[1:]):
        if len(together) == count:
            break
        if who(text, {})[0] == ranks:
            together.append(LABEL.sub('', text))
    return '\n'.join(together)


def line_around(block: bytes, place: int) -> Tuple[int, int]:
    """Start and end of the line, or of the part of a long one, that holds this place."""
    low, high = max(0, place - LINE), place + LINE
    start = block.rfind(b'\n', low, place) + 1 or low
    start = block.rfind(b'\r', start, place) + 1 or start
    ends = [end for end in (block.find(mark, place, high) for mark in (b'\n', b'\r')) if end >= 0]
    return start, min(ends, default=min(high, len(block)))


# ----------------------------------------------------------------------------------------------------------------------
# the flight recorder's files

class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts and containers of them, and runs nothing of what a file names."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse: the recorder's files name no classes."""
        raise pickle.UnpicklingError("it names %s.%s, and the flight recorder's files name no classes" % (module, name))


def read_dump(path: str) -> Optional[Entry]:
    """
    One file of the flight recorder, or None if the file is something else.

    :raises ExplainError: if it begins like one and cannot be read
    """
    with open(path, 'rb') as handle:
        start = handle.peek(1)[:1]
        if start not in (b'\x80', b'{') or os.fstat(handle.fileno()).st_size > MAX_DUMP_BYTES:
            return None
        try:
            data = json.loads(handle.read().decode()) if start == b'{' else PlainUnpickler(handle).load()
        except Exception as err:  # pylint: disable=broad-except
            # a damaged pickle can raise anything
            raise ExplainError("%s is no file of the flight recorder, or was cut off while it was written: %s"
                               % (path, err))
    return data if isinstance(data, dict) and isinstance(data.get('entries'), list) else None


def find_dumps(directory: str) -> Tuple[Dict[str, Dict[int, Entry]], List[str]]:
    """The flight recorder's files of a directory: ({prefix: {rank: contents}}, remarks)."""
    dumps: Dict[str, Dict[int, Entry]] = {}
    remarks = []
    for name in sorted(os.listdir(directory)):
        match = DUMP_NAME.match(name)
        path = os.path.join(directory, name)
        try:
            dump = read_dump(path) if match and os.path.isfile(path) else None
        except (ExplainError, OSError) as err:
            remarks.append(str(err))
            continue
        if match and dump:
            dumps.setdefault(match.group(1), {})[int(match.group(2))] = dump
    return dumps, remarks


def call_text(entry: Entry) -> str:
    """What a collective was, and where the program called it."""
    frames = [frame for frame in entry.get('frames') or [] if isinstance(frame, dict)]
    own = [frame for frame in frames if not re.search(r'/torch/|<frozen|^\?\?', str(frame.get('filename')))] or frames
    where = ' at %s:%s' % (own[0].get('filename'), own[0].get('line')) if own else ''
    return '%s %s%s' % (entry.get('profiling_name'), json.dumps(entry.get('input_sizes')), where)


def finished(entry: Entry) -> bool:
    """Whether a collective came to its end. gloo's entries have no state but are retired at the end."""
    gloo = str(entry.get('profiling_name')).startswith('gloo')
    return entry.get('state') == 'completed' or gloo and bool(entry.get('retired'))


def process_groups(dumps: Dict[int, Entry]) -> Dict[Any, Dict[int, Dict[int, Entry]]]:
    """The collectives by process group: {name: (ranks, {rank: {number: entry}})}."""
    groups: Dict[Any, Dict[int, Dict[int, Entry]]] = {}
    for rank, dump in sorted(dumps.items()):
        for config in dump.get('pg_config', {}).values():
            members = [int(number) for number in re.findall(r'\d+', str(config.get('ranks', '')))]
            name = config.get('desc') or config.get('name') or 'default_pg'
            groups.setdefault((name, tuple(members)), {})
        for entry in dump['entries']:
            if entry.get('is_p2p'):
                continue
            name = list(entry.get('process_group') or ['', ''])
            name = name[-1] or name[0]
            key = next((key for key in groups if key[0] == name and rank in key[1]),
                       next((key for key in groups if key[0] in (name, 'default_pg') and name in (key[0], 'default_pg')
                             and rank in key[1]), (name, ())))
            # before version 2.2 of the format it is seq_id
            number = int(entry.get('collective_seq_id', entry.get('seq_id')) or 0)
            groups.setdefault(key, {}).setdefault(rank, {})[number] = entry
    return groups


def explain_dumps(dumps: Dict[int, Entry]) -> List[str]:
    """What the flight recorders of these ranks say, the most telling first; nothing if all finished the same."""
    said = []
    for (name, members), calls in process_groups(dumps).items():
        if not calls:
            continue
        ranks = sorted(set(members) & set(dumps) or calls)
        last = {rank: max(calls.get(rank) or [0]) for rank in ranks}
        for number in sorted(set.intersection(*[set(calls.get(rank, ())) for rank in ranks])):
            by_name: Dict[str, List[int]] = {}
            for rank in ranks:
                by_name.setdefault(str(calls[rank][number].get('profiling_name')), []).append(rank)
            if len(by_name) > 1:
                said.append("group %s, collective %d: ranks called different ones: %s" % (name, number, '; '.join(
                    '%s called %s' % (ranks_text(alike), call_text(calls[alike[0]][number]))
                    for alike in by_name.values())))
                break
        behind = [rank for rank in ranks if last[rank] < max(last.values())]
        if behind:
            number = min(last[rank] for rank in behind) + 1
            others = [rank for rank in ranks if rank not in behind]
            entry = next((calls[rank][number] for rank in others if number in calls[rank]), {})
            said.append("group %s, collective %d (%s): %s did not come; %s did"
                        % (name, number, call_text(entry), ranks_text(behind), ranks_text(others)))
            for rank in behind[:4]:
                before = calls.get(rank, {}).get(last[rank])
                said.append("  rank %d was last in collective %d, %s" % (rank, last[rank], call_text(before))
                            if before else "  rank %d had begun none" % rank)
        else:
            begun = [number for rank in ranks for number, entry in calls.get(rank, {}).items() if not finished(entry)]
            if begun and not said:
                number = min(begun)
                entry = next(calls[rank][number] for rank in ranks if number in calls.get(rank, {}))
                said.append("group %s, collective %d (%s): all ranks with a file came, and it did not end: the network "
                            "stood still, or a rank without a file is missing" % (name, number, call_text(entry)))
        missing = sorted(set(members) - set(dumps))
        if missing:
            said.append("group %s: %s left no file: ended before, or could not write it" % (name, ranks_text(missing)))
    for rank, dump in sorted(dumps.items()):
        waiting = next((entry for entry in dump['entries'] if entry.get('is_p2p') and not finished(entry)), None)
        if waiting:
            said.append("rank %d waits in a send or receive: %s" % (rank, call_text(waiting)))
    return list(dict.fromkeys(said))


# ----------------------------------------------------------------------------------------------------------------------
# the command

class Utf16:
    """A log in UTF-16, as PowerShell writes it, read as UTF-8."""

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self.text = io.TextIOWrapper(stream, encoding, 'replace', newline='')

    def read(self, size: int) -> bytes:
        """About this many bytes."""
        return self.text.read(size).encode('utf-8', 'replace')

    def __enter__(self) -> 'Utf16':
        return self

    def __exit__(self, *_: Any) -> None:
        self.text.close()


def decoded(stream: Any) -> Any:
    """A stream that gives bytes of text: what is compressed with gzip or in UTF-16 is read as such."""
    start = stream.peek(64)[:64]
    low, high = start[::2], start[1::2]
    if start[:2] == b'\x1f\x8b':
        return gzip.GzipFile(fileobj=stream)
    if start[:2] in (b'\xff\xfe', b'\xfe\xff'):
        return Utf16(stream, 'utf-16')
    # without a mark: every other byte is zero, and no other one
    for encoding, zero, other in (('utf-16-le', high, low), ('utf-16-be', low, high)):
        if len(zero) > 1 and not zero.strip(b'\0') and b'\0' not in other:
            return Utf16(stream, encoding)
    return stream


def open_log(path: str) -> Tuple[str, Any]:
    """(name, binary stream) of a log; '-' is standard input."""
    if path == '-':
        return 'standard input', decoded(sys.stdin.buffer)
    return path, decoded(open(path, 'rb'))


def outputs(directory: str) -> List[str]:
    """The files of a directory whose names are those of job outputs, the newest last."""
    paths = [entry.path for entry in os.scandir(directory) if OUTPUT_NAME.search(entry.name) and entry.is_file()]
    return sorted(paths, key=lambda path: (os.stat(path).st_mtime, path))


def print_finding(number: int, finding: Finding) -> None:
    """One finding, for a person."""
    print('%d. %s: %s' % (number, TITLES[finding.rule.level], finding.cause()))
    print('   %-9s%s' % ('line', '%s:%d: %s' % (finding.place + (finding.evidence(),))))
    seen = []
    if finding.count > 1:
        seen.append('%d lines' % finding.count)
    if finding.ranks:
        first = ' (first in the log: %d)' % finding.first[0] if 0 < len(finding.first) < len(finding.ranks) else ''
        seen.append(ranks_text(finding.ranks) + first)
    if finding.nodes:
        names = sorted(finding.nodes)
        seen.append('%s %s' % ('nodes' if len(names) > 1 else 'node', ','.join(names[:8])
                               + (',... (%d in all)' % len(names) if len(names) > 8 else '')))
    paragraphs = [('seen', '; '.join(seen))] * bool(seen) + [('', detail) for detail in finding.details]
    for label, text in paragraphs + [('remedy', finding.rule.remedy), ('source', finding.rule.source)]:
        print(wrapped(text, '   %-9s' % label, ' ' * 12))
    print()


def run(paths: Iterable[str], as_json: bool = False, network: Optional[str] = None) -> int:
    """slingtorch explain, of logs, '-' and directories of the flight recorder, on a site with this network."""
    log, dumps, logs = Log(read_rules(check=False)), [], []
    for path in paths:
        if not os.path.isdir(path):
            logs.append(path)
            continue
        found, remarks = find_dumps(path)
        log.remarks += remarks
        inside = outputs(path)
        if not found and not inside:
            log.remarks.append("%s has no files of PyTorch's flight recorder (...rank-0, ...rank-1) and no outputs of "
                               "jobs (slurm-*, *.out, *.err, *.log, *.o4711)" % path)
        for prefix, by_rank in found.items():
            dumps.append((os.path.join(path, prefix), len(by_rank), explain_dumps(by_rank)))
        logs += inside
    for path in logs:
        try:
            name, stream = open_log(path)
            with stream:
                log.read(name, stream)
        except OSError as err:
            raise ExplainError("%s cannot be read: %s. Give the output of a job (slurm-JOB.out), or '-'"
                               % (path, err.strerror))
    findings = log.report(rule.name for rule in log.rules.values() if network and rule.network == network)
    told = [said for _, _, said in dumps if said]
    if as_json:
        print(json.dumps({'version': 1, 'findings': [finding.data() for finding in findings], 'remarks': log.remarks,
                          'flight_recorder': [{'prefix': prefix, 'files': files, 'said': said}
                                              for prefix, files, said in dumps]}, indent=2))
        return EXPLAINED if findings or told else NOTHING_KNOWN
    for prefix, files, said in dumps:
        print("flight recorder, %d files %s*:" % (files, prefix))
        for text in said or ["every collective that was begun ended, on all ranks with a file"]:
            print(wrapped(text, '   ', '      '))
        print()
    for number, finding in enumerate(findings, 1):
        print_finding(number, finding)
    for remark in log.remarks:
        print('remark: %s' % remark)
    if not findings and not told:
        print("Nothing known was found. What helps: the whole output with standard error of another run, with "
              "export NCCL_DEBUG=INFO FI_LOG_LEVEL=warn, conda-python-distributed --check before it, and the flight "
              "recorder's files.")
        return NOTHING_KNOWN
    return EXPLAINED
