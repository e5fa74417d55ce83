# SPDX-License-Identifier: GPL-2.0-only
"""
What explain knows, from two tables beside this file: messages.txt (lines of logs, and the fault that each shows) and
faults.txt (what a fault is, and what to do). docs/explain.md describes their form.
"""
import os
import re
from typing import Any, Dict, Iterator, List, Optional, Tuple

try:
    from re import _parser as sre_parse    # type: ignore[attr-defined]
except ImportError:     # before Python 3.11
    import sre_parse    # type: ignore[no-redef]

HERE = os.path.dirname(os.path.realpath(__file__))

# what a fault is said to be: the reason, a reason that fits only some lines, the same where nothing better is known,
# an unknown reason, what follows from a reason, worth knowing
LEVELS = ('cause', 'perhaps', 'weak', 'unknown', 'consequence', 'note')
REASONS = LEVELS[:4]
BROAD = LEVELS[1:4]     # they never answer for a line that a cause knows
ROLES = ('', 'timeout', 'work', 'difference', 'first-failed', 'exception')      # docs/explain.md
PHASES = ('early', 'running')
HEADER = re.compile(r'\[(?P<name>@?[a-z][a-z0-9-]+)(?P<options> [^\]]*)?\](?: (?P<rest>\S.*))?$')
# what parts the texts of an expression without alternatives
BETWEEN = re.compile(r'(?<!\\)\((?:\?(?:P<\w+>|:))?'
                     r'|(?:\\.|(?<!\\)\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\()])(?:[*?]|\{[\d,]*\})\??'
                     r'|(?<!\\)\[\^?\]?(?:\\.|[^\]\\])*\]|\\\w|(?<!\\)[).^$+]')
HARD = re.compile(r'\||\)[*?{]|\(\?[^P:]|\(\?P=')
Literals = Optional[List[str]]


class ExplainError(RuntimeError):
    """A file that cannot be read, or tables that are wrong; the message says what to do."""


class Fault:
    """One section of faults.txt."""

    def __init__(self, name: str, level: str) -> None:
        self.name, self.cause = name, ''
        # '+' is mostly the root of others; '-' is a state of the run, which the run can survive, or mostly none
        self.level, self.weight = level.rstrip('+-'), {'+': -1, '-': 1}.get(level[-1:], 0)
        self.remedies: List[Tuple[List[str], str]] = []     # (conditions that must hold, what to do)

    def advice(self, facts: 'set') -> List[str]:
        """What to do where these facts hold: at most three, the ones that were written for them first."""
        fitting = [(conditions, text) for conditions, text in self.remedies
                   if all((name[1:] not in facts) if name[0] == '!' else name in facts for name in conditions)]
        return [text for _, text in sorted(fitting, key=lambda one: not one[0])][:3]


class Rule:
    """Messages of one witness that show one fault: a block of messages.txt. A name with '@' is a fact, no fault."""

    def __init__(self, name: str, options: str, witness: str) -> None:
        self.name, self.fact, self.witness = name, name.startswith('@'), witness
        known = dict(option.partition('=')[::2] for option in options.split())
        self.level = next((known.pop(level) or level for level in LEVELS if level in known), '')
        self.role = known.pop('role', '')
        self.needs, self.unless, self.distinct, self.kinds = [
            [part for part in known.pop(key, '').split(',') if part] for key in ('needs', 'unless', 'distinct', 'is')]
        self.of, self.times = known.pop('of', ''), int(known.pop('times', '1'))
        self.lines, self.blame = int(known.pop('lines', '1')), 'blame' in known
        known.pop('blame', '')
        if known or self.role not in ROLES or not witness:
            raise ExplainError("messages.txt, [%s]: unknown: %s; role is '%s', one of %s; the witness is '%s'"
                               % (name, ' '.join(known) or 'nothing', self.role, ', '.join(ROLES[1:]), witness))
        self.expressions: List[str] = []
        self.samples: List[str] = []        # of each expression; empty for a plain text, which is its own
        self.forbidden: List[str] = []
        self.compiled: Optional[List['re.Pattern[str]']] = None
        self.has: List[bytes] = []

    @property
    def conditional(self) -> bool:
        """Whether it needs more than one line."""
        return bool(self.needs or self.unless or self.distinct)

    def forbids(self, text: str) -> bool:
        """Whether a line has what it must not have."""
        return any(re.search(expression, text) for expression in self.forbidden)

    def search(self, text: str) -> Optional['re.Match[str]']:
        """The leftmost match of the expressions, which are compiled when the first line needs them."""
        if self.compiled is None:
            self.compiled = [re.compile(expression) for expression in self.expressions]
        matches = [match for match in (pattern.search(text) for pattern in self.compiled) if match]
        return min(matches, key=lambda match: match.start()) if matches else None

    def check(self) -> None:
        """:raises ExplainError: if an expression is none"""
        for expression in self.expressions + self.forbidden:
            try:
                re.compile(expression)
            except re.error as err:
                raise ExplainError("messages.txt, [%s]: %s is not a regular expression: %s" % (
                    self.name, expression, err))


def needed(expression: str) -> Literals:
    """
    Texts of which a line must hold one, if this expression matches it: the longest that it spells out.

    :return: None if it spells out none
    """
    if HARD.search(expression):     # Python's own parser, which takes ten times as long
        return spelled_out(sre_parse.parse(expression))
    text = max(BETWEEN.split(expression), key=len)
    return [re.sub(r'\\(.)', r'\1', text)] if text else None


def spelled_out(parsed: Any) -> Literals:
    """needed() for a parsed expression: the longest of its plain texts and of what its groups spell out."""
    found: List[List[str]] = []
    plain = ''
    for operation, value in [*parsed, (None, None)]:
        if operation == sre_parse.LITERAL:
            plain += chr(value)
            continue
        found.append([plain])
        plain = ''
        inner: Literals = None
        if operation == sre_parse.SUBPATTERN and not value[1]:      # without flags of its own
            inner = spelled_out(value[-1])
        elif operation in (sre_parse.MAX_REPEAT, sre_parse.MIN_REPEAT) and value[0]:
            inner = spelled_out(value[2])
        elif operation == sre_parse.BRANCH:
            branches = [spelled_out(branch) for branch in value[1]]
            inner = sum(filter(None, branches), []) if all(branches) else None
        found += [inner] if inner else []
    best = max(found, key=lambda texts: min(map(len, texts)))
    return best if min(map(len, best)) else None


def sections(path: str) -> Iterator[Tuple[int, str, Optional['re.Match[str]']]]:
    """(number, line, match of a header) of each line that is neither empty nor a comment."""
    with open(path, encoding='utf-8') as handle:
        for number, line in enumerate(handle, 1):
            line = line.rstrip('\n')
            if line and not line.startswith('#'):
                yield number, line, HEADER.match(line) if line[0] == '[' else None


def read_faults(path: str = os.path.join(HERE, 'faults.txt')) -> Dict[str, Fault]:
    """:raises ExplainError: for what is not a table of faults"""
    faults: Dict[str, Fault] = {}
    fault = None
    for number, line, header in sections(path):
        if header:
            name, level = header.group('name'), (header.group('options') or '').strip()
            fault = Fault(name, level)
            if name in faults or fault.level not in LEVELS:
                raise ExplainError("%s:%d: [%s] is defined twice, or its level '%s' is not one of %s"
                                   % (path, number, name, level, ', '.join(LEVELS)))
            faults[name] = fault
        elif fault is None or not line.startswith('- ') and fault.cause:
            raise ExplainError("%s:%d: a fault is [NAME LEVEL], a line with its cause, and remedies '- ...' or "
                               "'- @when,!unless ...'" % (path, number))
        elif line.startswith('- '):
            when, text = re.match(r'- (?:@(\S+) )?(.*)', line).groups()     # type: ignore[union-attr]
            fault.remedies.append((when.split(',') if when else [], text))
        else:
            fault.cause = line
    for fault in faults.values():
        if not fault.cause or not any(not conditions for conditions, _ in fault.remedies):
            raise ExplainError("%s: [%s] lacks a cause, or a remedy without conditions" % (path, fault.name))
    return faults


def read_rules(path: str = os.path.join(HERE, 'messages.txt'), faults: Optional[Dict[str, Fault]] = None,
               check: bool = True) -> List[Rule]:
    """
    The messages, in blocks.

    :param check: compile every expression, too, which takes most of the time (the shipped ones are tested)
    :raises ExplainError: for what is not a table of messages
    """
    rules: List[Rule] = []
    for number, line, header in sections(path):
        if header:
            rules.append(Rule(*[part or '' for part in header.groups()]))
        elif not rules:
            raise ExplainError("%s:%d: a block begins with [FAULT] WITNESS" % (path, number))
        elif line.startswith('!'):
            rules[-1].forbidden.append(line[1:])
        else:
            expression, _, sample = line.partition('\t')
            try:
                texts = needed(expression)
            except re.error as err:
                raise ExplainError("%s:%d: %s is not a regular expression: %s" % (path, number, expression, err))
            if not texts or min(map(len, texts)) < 3:
                raise ExplainError("%s:%d: %s spells out no text of three letters that every line of it has"
                                   % (path, number, expression))
            rules[-1].expressions.append(expression)
            rules[-1].samples.append(sample)
            rules[-1].has += [text.encode() for text in texts]
    faults = read_faults() if faults is None else faults
    known = set(faults) | {rule.name[1:] for rule in rules if rule.fact} | set(PHASES)
    for rule in rules:
        rule.level = rule.level or ('' if rule.fact else faults[rule.name].level if rule.name in faults else '')
        unknown = set(rule.needs + rule.unless + ([] if rule.fact else [rule.name])) - known
        if unknown or not rule.expressions:
            raise ExplainError("%s: [%s] has no expression, or names what is in no table: %s"
                               % (path, rule.name, ', '.join(sorted(unknown))))
        if check:
            rule.check()
    known.update(kind for rule in rules for kind in rule.kinds)
    for fault in faults.values():
        unknown = {name.lstrip('!') for conditions, _ in fault.remedies for name in conditions} - known
        if unknown:
            raise ExplainError("faults.txt: [%s] has conditions that are in no table: %s"
                               % (fault.name, ', '.join(sorted(unknown))))
    return rules
