# SPDX-License-Identifier: GPL-2.0-only
"""
A log, read once and in blocks, so that its size does not matter: only lines with a text that a rule needs meet a
regular expression. What rules find is kept with its place, its ranks and nodes, and whether the program went on.
"""
import re
import zlib
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from slingtorch.job.findings import ranks_text
from slingtorch.explain.tables import BROAD, REASONS, Rule

BLOCK = 1 << 20         # bytes that are read at a time
LINE = 4096             # bytes of a line that are looked at, on either side of what was found
SHOWN = 240             # characters of a line that are shown
GROUP = 100             # characters of a group that a cause names
MAX_TRACKED = 100000    # ranks and nodes that are remembered per rule
ALIKE = 10000           # lines that differ in numbers alone, before a rule skips the others
MAX_KINDS = 50000       # of lines that are counted for this
MAX_EXCEPTIONS = 1000   # different ones that are remembered
TRACEBACK_WINDOW = 1 << 14  # bytes before an exception that are looked at for its traceback
SEEN_BUDGET = 1 << 20   # bytes of short lines that are remembered
WENT_ON = 3             # steps of a program after a line, by which the line did not end it
TAIL = 1 << 16          # bytes at the end of a block in which progress and trouble are looked for
QUOTED = 3              # lines that are quoted where no fault is known
VARYING = b'0123456789abcdefABCDEF'     # numbers and addresses: without them most lines of a log are alike

# a program that trains: steps, losses, epochs, tokens per second, a progress bar, a checkpoint that was saved
PROGRESS_TEXTS = (b'loss', b'Loss', b'step', b'Step', b'iter', b'Iter', b'epoch', b'Epoch', b'it/s', b's/it',
                  b'samples/s', b'checkpoint')
PROGRESS = re.compile(
    r'(?i)\b(?:train_?|val_?|lm )?loss\b[\'" ]*[:=|]? *[\[(]?-?\d|\b(?:global_?)?(?:step|iter(?:ation)?|epoch)s?\b'
    r'[\'"\]]*[ :=#\[(|]*\d+|\d(?:it/s|s/it)|samples/s|(?:saved|wrote|saving) (?:a |the )?(?:\w+ )?checkpoint')
FAILED = re.compile(r'(?i)error|fail|abort|traceback|timed? ?out|exception|killed|fatal')
# a line that is a warning by its own words, unless the library calls all its faults so
SOFT = re.compile(r'\bW(?:ARN(?:ING)?|arning)\b|\[W\d|\bINFO\b|\w+Warning:|\bDEBUG\b')
LOUD = re.compile(r'NCCL|NET/OFI|MPICH|GTL|libfabric|<warn>|stub library')
# what is worth quoting where nothing is known, and what sound logs have of it
TROUBLE = re.compile(rb'(?i)(?:\b|\x1b\[[\d;]*m)(?:warn(?:ing)?|err(?:or)?s?|fatal|failed|failure|abort(?:ed|ing)?|'
                     rb'denied|refused|invalid|cannot|unable)\b')
SOUND = re.compile(
    rb'(?i)(?:Future|User|Deprecation|Runtime|Import|Syntax|Resource)Warning|\berrors?[\s:=]+0\b|'
    rb'\b0 (?:errors|failed)|TF-TRT|OMP_NUM_THREADS|Setting OMP|deprecat|errno: 97|destroy_process_group|'
    rb'TORCH_NCCL_AVOID|error_handling|'
    rb'error_file: <none>|standard error|test error|error rate|word error|NCCL INFO|Unable to register cu|'
    rb'computation_placer|oneDNN|NUMA node')

COLOUR = re.compile(r'\x1b\[[0-9;?]*[ -/]*[@-~]')
CONTROL = re.compile(r'[\x00-\x08\x0b-\x1f\x7f-\x9f]')
# who wrote a line: PyTorch, srun --label, Open MPI, Cray MPICH
RANK = re.compile(r'^\s*\[?rank ?(\d+)\]?:|\[rank=(\d+)\]|^\s*(\d+): |^\[\d+,(\d+)\]<|\[[Rr]ank (\d+)\]'
                  r'|\bPE (\d+): MPICH|\bRank (\d+)\]')
# PALS, NCCL, Cray MPICH, libfabric, Slurm
NODE = re.compile(r'^\s*(nid\d+|x\d+c\d+s\d+b\d+n\d+)(?: \d+)?: '
                  r'|(?:^|[\s>])([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] |\] \[([A-Za-z][\w.-]*)\] - Abort'
                  r'|<(?:warn|info|error)> ([A-Za-z][\w.-]*): | ON (\S+) CANCELLED AT| error: ([A-Za-z][\w.-]*): task')
EXCEPTION = re.compile(r'\b[A-Z]\w*(?:Error|Exception)\b|\bException: ')
# Python's own form, and that of rich (in a frame of lines)
FRAME = re.compile(r'(?:\bFile "|│ (?=/))(?P<file>[^":]+)(?:", line |:)(?P<line>\d+)(?:,? in (?P<name>\S+))?')
# what launchers and loggers write before a message: srun --label, Open MPI, PALS, torchrun, PyTorch, and times
LABEL = re.compile(r'^\s*(?:\[[^\]]*\](?:<\w+>)?:?\s*|(?:\d+|nid\d+|x\d+c\d+s\d+b\d+n\d+)(?: \d+)?:\s+'
                   r'|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*\s+)*')
NOT_OWN = re.compile(r'/(?:site|dist)-packages/|/lib(?:64)?/python\d|/torch/|^<|/bin/(?:torchrun|accelerate)$')
NO_EXCEPTION = re.compile(r'^(?:Exception|Error) ignored in|^Exception in thread .*\(daemon\)')


class Finding:
    """What a rule found: how often, where, by which ranks and on which nodes."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.level = rule, rule.level
        self.count = 0
        self.place, self.line = ('', 0), ''     # (file, number) of the first line, and what it says
        self.at, self.until = 0, 0      # where in the file the first and the last line begin
        self.told = ''      # what the expression found in the first line
        self.groups: Dict[str, Optional[str]] = {}      # what its groups are there
        self.ranks: Set[int] = set()
        self.nodes: Set[str] = set()
        self.distinct: Set[Any] = set()
        self.first: List[int] = []      # the ranks of the first line
        self.details: List[str] = []
        self.soft = True    # a warning by its own words

    def add(self, text: str, match: 're.Match[str]', at: int) -> None:
        """Count one line, which begins there in its file."""
        groups = match.groupdict()
        ranks, nodes = who(text, groups)
        if not self.count:
            self.line, self.groups, self.first, self.at = text, groups, ranks, at
            self.told = match.group().split('\n')[0]
        self.count += 1
        self.until = at
        self.soft = self.soft and bool(SOFT.search(text)) and not LOUD.search(text)
        self.ranks.update(ranks[:MAX_TRACKED - len(self.ranks)])
        self.nodes.update(nodes[:MAX_TRACKED - len(self.nodes)])
        if self.rule.distinct and len(self.distinct) < MAX_TRACKED:
            self.distinct.add(groups.get(self.rule.distinct) or self.count)     # without a name, each time

    def merge(self, other: 'Finding') -> None:
        """Take in what another rule found that shows the same fault."""
        self.count += other.count
        self.ranks |= other.ranks
        self.nodes |= other.nodes
        self.until = max(self.until, other.until)
        self.details += [detail for detail in other.details if detail not in self.details]

    def evidence(self) -> str:
        """The line, cut so that what was found in it is seen."""
        start = self.line.find(self.told)
        if start + len(self.told) <= SHOWN or start < 40:
            return self.line[:SHOWN]
        return '...' + self.line[start - 40:][:SHOWN]


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


def lines_with(texts: List[bytes], block: bytes) -> Iterator[Tuple[int, int]]:
    """Start and end of each line of a block that holds one of these texts."""
    found = set()
    for text in texts:
        place = block.find(text)
        while place >= 0:
            start, end = line_around(block, place)
            if start not in found:
                found.add(start)
                yield start, end
            place = block.find(text, end)


def read_block(stream: Any) -> Tuple[bytes, Optional[Exception]]:
    """Up to BLOCK bytes, and the error that ended them early. A compressed file gives what comes before its damage."""
    pieces, size = [], 0
    try:
        while size < BLOCK:
            pieces.append(stream.read1(BLOCK - size))
            if not pieces[-1]:
                break
            size += len(pieces[-1])
    except (EOFError, OSError, zlib.error) as err:
        return b''.join(pieces), err
    return b''.join(pieces), None


class Log:
    """Reads logs and keeps what rules find in them."""

    def __init__(self, rules: List[Rule]) -> None:
        # an exception that a rule explains is not unknown, and what a cause explains needs nothing vaguer
        self.rules = sorted(rules, key=lambda rule: rule.level in BROAD and BROAD.index(rule.level) + 1)
        self.findings: Dict[Rule, Finding] = {}
        self.remarks: List[str] = []
        self.progress: Dict[str, List[int]] = {}    # of a file: where the first and the last steps of a program are
        self.sizes: Dict[str, int] = {}     # of the files
        # (file, line, number of line) of the ends of the last blocks, for warnings and errors that nothing explains
        self.tails: List[Tuple[str, int, bytes]] = []
        # rank: (number, operation) of the first collective in which it timed out
        self.timeouts: Dict[int, Tuple[int, str]] = {}
        self.works: Dict[int, Tuple[str, int, int]] = {}    # rank: (group, number, last one that it had begun)
        self.size = 0        # ranks of the job, as far as the logs say
        self.exceptions: Dict[str, Finding] = {}    # by short form, those that no rule knows
        # of each text, what is left without digits, and its longest word: the prefilter
        self.bare = {text: text.translate(None, VARYING) for rule in rules for text in rule.has}
        self.texts = {text: max(bare.split(), key=len, default=b'') for text, bare in self.bare.items()}
        self.seen: Set[bytes] = set()       # lines without digits, and their words
        self.words: Set[bytes] = set()
        self.seen_size = 0
        self.likely = {text for text, word in self.texts.items() if not word}  # and those whose word was seen there
        self.possible: Set[bytes] = set()   # those that were seen themselves, and the rules with them
        self.active: List[Tuple[Rule, List[bytes]]] = []
        self.looked: Dict[int, int] = {}    # how often a rule looked at lines that differ in numbers alone
        self.thinned = False
        self.before = b''    # the end of the block before
        self.root: Optional[int] = None     # the rank that failed first, as torchrun says

    def read(self, name: str, stream: Any) -> None:
        """Read one log from a binary stream; name is what the report calls it."""
        number, rest, last = 1, b'', b''
        while True:
            data, error = read_block(stream)
            if error:
                self.remarks.append("%s is cut off or damaged (%s): only the part before that was read" % (name, error))
            block = rest + data
            last = data[-1:] or last
            # a line without an end, as of a progress bar, is cut at what looks like a boundary
            ends = [block.rfind(mark) + 1 for mark in (b'\n', b'\r', b' ')] if data and not error else []
            end = next(filter(None, ends), len(block))
            self.search(name, block[:end], number)
            self.follow(name, block[:end])
            self.sizes[name] = self.sizes.get(name, 0) + end
            self.before = block[max(0, end - TRACEBACK_WINDOW):end]
            number += block.count(b'\n', 0, end)
            if end:
                tail = block[max(0, end - TAIL):end]
                self.tails = self.tails[-1:] + [(name, number - tail.count(b'\n'), tail)]
            rest = block[end:]
            if error or not data:
                break
        if not last and not error:
            self.remarks.append("%s is empty: the job wrote nothing, or its output goes to another file" % name)
        elif last not in (b'', b'\n'):
            self.remarks.append("%s ends in the middle of a line: the end, often with the cause, may be missing" % name)

    def search(self, name: str, block: bytes, number: int) -> None:
        """Search a block, whose first line has this number."""
        # lines that a cause explains; those that any rule explains
        causes, known = set(), set()    # type: Set[int], Set[int]
        # most lines, without their numbers, are like those of earlier blocks: only new ones are searched for the texts
        new = set(block.translate(None, VARYING).split(b'\n')) - self.seen
        lines_of_block = b'\n'.join(new)
        words = set(lines_of_block.split()) - self.words
        if self.seen_size < SEEN_BUDGET:
            self.seen |= new
            self.seen_size += sum(map(len, new))
            self.words |= words
        words_of_block = b' '.join(words)
        if new:
            if words:
                self.likely.update(text for text, word in self.texts.items() if word in words_of_block)
            found = {text for text in self.likely - self.possible if self.bare[text] in lines_of_block}
            if found:
                self.possible |= found
                self.active = [(rule, texts) for rule, texts in (
                    (rule, [text for text in rule.has if text in self.possible]) for rule in self.rules) if texts]
        for rule, texts in self.active:
            once = rule.fact and not rule.role
            if once and rule in self.findings:
                continue
            for start, end in lines_with(texts, block):
                last = rule.level == 'unknown' or rule.role == 'exception'
                if rule.level in BROAD and start in (known if last else causes):
                    continue
                shape = hash((rule.name, block[start:end].translate(None, VARYING)))
                looked = self.looked.get(shape, 0)
                if looked == ALIKE:
                    self.thinned = True
                    continue
                if looked or len(self.looked) < MAX_KINDS:
                    self.looked[shape] = looked + 1
                line = seen = readable(block[start:end])
                if rule.lines > 1:
                    seen = with_next(line, block[end:end + LINE], rule.lines)
                bare = LABEL.sub('', seen)
                match = rule.search(bare) or (rule.search(seen) if bare != seen else None)
                if not match or rule.forbids(line):
                    continue
                if rule.level not in ('note', '') or rule.role:
                    known.add(start)
                if rule.level == 'cause' and not rule.conditional:
                    causes.add(start)
                finding = self.keep(name, rule, block, start, line, match)
                if finding and finding.count == 1:
                    finding.place = name, number + block.count(b'\n', 0, start)
                if once:
                    break

    def follow(self, name: str, block: bytes) -> None:
        """Note where the program made progress."""
        base, places = self.sizes.get(name, 0), set()   # type: int, Set[int]
        tail = max(0, len(block) - TAIL)
        for text in PROGRESS_TEXTS:
            high = len(block)
            for _ in range(2 * WENT_ON):
                place = block.rfind(text, tail, high)
                if place < 0:
                    break
                high = line_around(block, place)[0]
                if is_progress(block, place):
                    places.add(base + high)
            place = block.find(text) if name not in self.progress else -1
            if place >= 0 and is_progress(block, place):
                places.add(base + line_around(block, place)[0])
        if places:
            known = self.progress.get(name, []) + sorted(places)
            self.progress[name] = known[:1] + known[1:][-WENT_ON:]

    @property
    def quoted(self) -> List[Tuple[str, int, str]]:
        """(file, number, line) of the last warnings and errors."""
        found: Dict[bytes, Tuple[str, int, str]] = {}
        for name, number, tail in self.tails:
            for match in TROUBLE.finditer(tail):
                start, end = line_around(tail, match.start())
                if not SOUND.search(tail, start, end):
                    shape = tail[start:end].translate(None, VARYING)
                    found.pop(shape, None)
                    found[shape] = (name, number + tail.count(b'\n', 0, start), readable(tail[start:end])[:SHOWN])
        return list(found.values())[-QUOTED:]

    def went_on(self, finding: Finding) -> bool:
        """Whether the program made progress after the last line of a finding."""
        places = self.progress.get(finding.place[0], [])
        return len(places) >= WENT_ON and places[-WENT_ON] > finding.until

    def phase(self, finding: Finding) -> str:
        """Whether the first line came before any progress of the program, or after."""
        places = self.progress.get(finding.place[0], [])
        return 'running' if places and places[0] < finding.at else 'early'

    def keep(self, name: str, rule: Rule, block: bytes, start: int, line: str,
             match: 're.Match[str]') -> Optional[Finding]:
        """Keep what a rule found in the line that starts there."""
        kept, key = self.findings, rule     # type: Dict[Any, Finding], Any
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
            if match.groupdict().get('op') == 'ALLREDUCE' and match.groupdict().get('numel') == '1':
                finding.details.append("an ALLREDUCE of one element is a barrier, or the sum of one number: look for a "
                                       "call that only some ranks reach (a save, a validation or a log entry under "
                                       "'if rank == 0')")
        finding.add(line, match, self.sizes.get(name, 0) + start)
        self.remember(rule.role, line, match)
        return finding

    def remember(self, role: str, line: str, match: 're.Match[str]') -> None:
        """Who waits for what, of PyTorch's watchdog; who failed first, of torchrun; the size of the job."""
        for rank in who(line, match.groupdict())[0][:1]:
            if role == 'timeout' and match.groupdict().get('seq') and len(self.timeouts) < MAX_TRACKED:
                self.timeouts.setdefault(rank, (int(match.group('seq')), match.group('op')))
            elif role == 'work' and len(self.works) < MAX_TRACKED:
                self.works.setdefault(rank, (match.group('group'), int(match.groupdict().get('seq') or 0),
                                             int(match.group('enqueued'))))
        if role == 'first-failed' and match.group('rank') and self.root is None:
            self.root = int(match.group('rank'))
        size = re.search(r'\bn[Rr]anks (\d+)', line)
        if size:
            self.size = max(self.size, int(size.group(1)))

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
                self.findings.pop(one.rule, None)
            self.findings[chosen.rule] = chosen

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
            waiting.details.append("... and other ranks in %d more collectives" % (len(calls) - 4))
        # numbers are those of one process group: ranks are compared where the log says that it is the same one
        groups: Dict[str, Dict[int, Tuple[int, str, int]]] = {}
        for rank, (group, seq, enqueued) in self.works.items():
            # a rank whose own watchdog caught nothing tells only how far it is
            own, operation = self.timeouts.get(rank, (0, ''))
            if own == seq and re.search(r'\(\w*\)', group):
                groups.setdefault(group, {})[rank] = (seq, operation, enqueued)
        for group, members in groups.items():
            self.compare_group(group, members, found, waiting)
        size = max([self.size] + [rank + 1 for rank in self.timeouts])
        missing = set(range(size)) - set(self.timeouts)
        if not self.thinned and len(self.timeouts) > 1 and 0 < len(missing) <= max(8, size // 8):
            waiting.details.append("%s wrote no such line: look there first" % ranks_text(missing))

    def compare_group(self, group: str, members: Dict[int, Tuple[int, str, int]], found: List[Finding],
                      waiting: Finding) -> None:
        """Ranks of one process group: {rank: (number, operation, last number that it had begun)}."""
        operations: Dict[int, Dict[str, List[int]]] = {}
        for rank, (seq, operation, _) in members.items():
            operations.setdefault(seq, {}).setdefault(operation, []).append(rank)
        rule = next(rule for rule in self.rules if rule.role == 'difference')
        for seq, called in sorted(operations.items()):
            if seq and len(called) > 1 and not any(finding.rule.name == rule.name for finding in found):
                finding = Finding(rule)
                finding.count, finding.place, finding.line = 1, waiting.place, waiting.line
                finding.at, finding.until, finding.soft = waiting.at, waiting.until, False
                calls = sorted(called.items(), key=lambda call: len(call[1]))
                finding.details = ["%s called %s as number %d" % (ranks_text(ranks), operation, seq)
                                   for operation, ranks in calls] + ["in group " + group]
                finding.ranks = set(calls[0][1])
                found.append(finding)
        begun = {rank: enqueued for rank, (_, _, enqueued) in members.items()}
        behind = sorted(rank for rank in begun if begun[rank] < max(begun.values()))
        if behind:
            waiting.details.append("%s had begun fewer collectives of group %s than the others (%d of %d)"
                                   % (ranks_text(behind), group, begun[behind[0]], max(begun.values())))


def is_progress(block: bytes, place: int) -> bool:
    """Whether the line there tells of a step of a program."""
    start, end = line_around(block, place)
    line = readable(block[start:end])
    return bool(PROGRESS.search(line)) and not FAILED.search(line)


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
            frame = 'place in your program: %s:%s%s%s' % (
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
