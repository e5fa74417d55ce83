# SPDX-License-Identifier: GPL-2.0-only
"""
What explain knows, from two tables beside this file: messages.txt (lines of logs, and the fault that each shows) and
faults.txt (what a fault is, and what to do). docs/explain.md describes their form, which the tests check.
"""
import os
import re
from typing import Any, Dict, List, Optional, Tuple

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
HEADER = re.compile(r'\[(?P<name>@?[a-z][a-z0-9-]+)(?: (?P<options>[^\]]*))?\](?: (?P<rest>\S.*))?$')
Literals = Optional[List[str]]


class ExplainError(RuntimeError):
    """A file that cannot be read; the message says what to do."""


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

    def __init__(self, name: str, options: Optional[str], witness: str) -> None:
        self.name, self.fact, self.witness = name, name.startswith('@'), witness
        self.options = dict(option.partition('=')[::2] for option in (options or '').split())
        self.level = next((level for level in LEVELS if level in self.options), '')
        self.needs, self.unless = [self.options[key].split(',') if key in self.options else []
                                   for key in ('needs', 'unless')]
        self.role, self.distinct = self.options.get('role', ''), self.options.get('distinct', '')
        self.lines, self.blame = int(self.options.get('lines', '1')), 'blame' in self.options
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


def needed(parsed: Any) -> Literals:
    """
    Texts of which a line must hold one, if this parsed expression matches it: the longest that it spells out.

    :return: None if it spells out none
    """
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
            inner = needed(value[-1])
        elif operation in (sre_parse.MAX_REPEAT, sre_parse.MIN_REPEAT) and value[0]:
            inner = needed(value[2])
        elif operation == sre_parse.BRANCH:
            branches = [needed(branch) for branch in value[1]]
            inner = sum(filter(None, branches), []) if all(branches) else None
        found += [inner] if inner else []
    best = max(found, key=lambda texts: min(map(len, texts)))
    return best if min(map(len, best)) else None


def sections(table: str) -> List[Tuple['re.Match[str]', List[str]]]:
    """(heading, lines) of each section of a table. Headings that follow one another share the lines below them."""
    found: List[Tuple['re.Match[str]', List[str]]] = []
    with open(os.path.join(HERE, table), encoding='utf-8') as handle:
        for line in handle.read().split('\n'):
            heading = HEADER.match(line)
            if heading:
                found.append((heading, found[-1][1] if found and not found[-1][1] else []))
            elif line and not line.startswith('#'):
                found[-1][1].append(line)
    return found


def read_faults() -> Dict[str, Fault]:
    """The faults, by their names."""
    faults = {}
    for heading, lines in sections('faults.txt'):
        fault = faults[heading.group('name')] = Fault(heading.group('name'), heading.group('options'))
        for line in lines:
            if line.startswith('- '):
                when, text = re.match(r'- (?:@(\S+) )?(.*)', line).groups()     # type: ignore[union-attr]
                fault.remedies.append((when.split(',') if when else [], text))
            else:
                fault.cause = line
    return faults


def read_rules(faults: Dict[str, Fault]) -> List[Rule]:
    """The messages, in blocks."""
    rules = []
    for heading, lines in sections('messages.txt'):
        rule = Rule(*heading.group('name', 'options', 'rest'))
        rules.append(rule)
        if not rule.level and not rule.fact:
            rule.level = faults[rule.name].level
        for line in lines:
            if line.startswith('!'):
                rule.forbidden.append(line[1:])
                continue
            expression, _, sample = line.partition('\t')
            rule.expressions.append(expression)
            rule.samples.append(sample)
            rule.has += [text.encode() for text in needed(sre_parse.parse(expression)) or ()]
    return rules
