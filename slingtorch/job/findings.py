# SPDX-License-Identifier: GPL-2.0-only
"""Findings, and the ranks that have them: equal findings of several ranks become one, which keeps reports short."""
import re
import shutil
import textwrap
from collections import defaultdict, namedtuple

from . import messages
from .kinds import Any, Mapping, Optional
from .messages import one_line

# red: the job certainly cannot run, or runs on the wrong network: a library or the kernel shows it, or a trial did;
# ignored: the same, but the user accepts it
LEVELS = ('red', 'ignored', 'yellow', 'good', 'untested')
TITLES = {'red': 'RED', 'ignored': 'ignored', 'yellow': 'yellow', 'good': 'good', 'untested': 'not tested'}
# characters at most in the text of a finding or fact
LONGEST = 2000
# names of findings
NAMES = ('cache', 'clock', 'collective', 'cores', 'disk', 'gpus', 'import', 'interface',
         'libraries', 'limit', 'master', 'network', 'no-answer', 'plugin', 'port', 'program', 'rendezvous', 'script',
         'shm', 'torch', 'value', 'variable', 'versions', 'worker', 'world-size')
# `name` is a word that never changes, for searching; `remedy` tells the user what to do
Finding = namedtuple('Finding', ['level', 'name', 'text', 'remedy'])
# of a report as a message; masks are hexadecimal
FORM = {'ranks': str, 'findings': [[str]], 'facts': {str: {str: str}}}


def ranks_of(mask: int) -> list:
    """The ranks of a bit mask, ascending."""
    return [place for place, bit in enumerate(reversed(bin(mask)[2:])) if bit == '1']


def mask_of(text: str, within: int) -> int:
    """The bit mask in hexadecimal digits of a message. :raises ValueError: it has ranks outside `within`"""
    if len(text) > within.bit_length() or (int(text, 16) | within) != within:
        raise ValueError("ranks of other nodes")
    return int(text, 16)


def ranks_text(which: 'Any') -> str:
    """Ranks, or those in a bit mask, for a person: 'ranks 0-3,8', or the first ones and their total number."""
    bits = bin(which if isinstance(which, int) else sum(1 << rank for rank in which))[:1:-1]
    count, pieces = bits.count('1'), [match.span() for match in re.finditer('1+', bits)]
    text = ','.join(str(first) if first == last - 1 else '%d-%d' % (first, last - 1) for first, last in pieces[:8])
    if len(pieces) > 8:
        text += ',... (%d ranks)' % count
    return ('rank ' if count == 1 else 'ranks ') + text


def ignored_of(environ: 'Mapping[str, str]') -> set:
    """The names in SLINGTORCH_CHECK_IGNORE, such as 'port, value'; 1 means all."""
    words = set(re.findall(r'[^\s,]+', environ.get('SLINGTORCH_CHECK_IGNORE', ''))) - {'0'}
    return set(NAMES) if '1' in words else words


def some(names: list, most: int = 20) -> str:
    """A list for a person: the first names."""
    return ', '.join(names[:most] + ['...'] * (len(names) > most))


class Report:
    """
    Findings and facts of some ranks.

    :ivar ranks: bit mask of the ranks in it
    :ivar findings: {Finding: bit mask of the ranks}
    :ivar facts: {name: {value as text: bit mask}}: values that must be the same, or that the summary needs
    """

    def __init__(self, rank: 'Optional[int]' = None) -> None:
        self.ranks = 0 if rank is None else 1 << rank
        self.findings, self.facts = defaultdict(int), defaultdict(lambda: defaultdict(int))  # type: dict, dict

    def add(self, level: str, name: str, text: str, remedy: str = '', ranks: 'Optional[int]' = None) -> None:
        """Add a finding of these ranks, or of all in the report."""
        self.findings[Finding(level, name, one_line(text)[:LONGEST], one_line(remedy)[:LONGEST])] |= (
            self.ranks if ranks is None else ranks)

    def fact(self, name: str, value: object, ranks: 'Optional[int]' = None) -> None:
        """Add a fact; ranks with the same value are counted together."""
        self.facts[name][one_line(value)[:LONGEST]] |= self.ranks if ranks is None else ranks

    def value(self, name: str, default: 'Optional[str]' = None) -> 'Any':
        """The value that most ranks have."""
        values = self.facts.get(name) or {default: 1}
        return max(values, key=lambda value: bin(values[value]).count('1'))

    def nodes(self, mask: int) -> list:
        """The names of the nodes that have some of these ranks."""
        return [name for name, own in sorted((self.facts.get('node') or {}).items()) if own & mask]

    def merge(self, other: 'Report') -> None:
        """Add another report's content."""
        self.ranks |= other.ranks
        for finding, mask in other.findings.items():
            self.findings[finding] |= mask
        for name, values in other.facts.items():
            for value, mask in values.items():
                self.facts[name][value] |= mask

    def ignore(self, names: set) -> None:
        """Change red findings that the user wants to ignore (ignored_of()) to 'ignored'."""
        for finding in self.having(level='red'):
            if finding.name in names:
                self.change(finding, 'ignored')

    def change(self, finding: 'Finding', level: str) -> None:
        """Give a finding another level."""
        self.findings[finding._replace(level=level)] |= self.findings.pop(finding)

    def having(self, level: 'Optional[str]' = None, name: 'Optional[str]' = None) -> list:
        """The findings of this level and name."""
        return [finding for finding in self.findings if level in (None, finding.level) and name in (None, finding.name)]

    def dump(self) -> dict:
        """As a message, for load(). If it is too long, facts are left out, the longest first."""
        facts = {name: {value: '%x' % mask for value, mask in values.items()} for name, values in self.facts.items()}
        thing = {'ranks': '%x' % self.ranks, 'facts': facts, 'findings': [
            [*finding, '%x' % mask] for finding, mask in self.findings.items()]}
        while len(messages.dump(thing)) > messages.MOST // 2 and facts:     # details of the rank come with it
            del facts[max(facts, key=lambda name: len(str(facts[name])))]
        return thing

    @classmethod
    def load(cls, thing: 'Any', within: int) -> 'Report':
        """
        :param within: bit mask of the ranks that it may contain; ranks that died are only in findings
        :raises ValueError: it is not a report
        """
        report = cls()
        if not messages.has_form(thing, FORM):
            raise ValueError("no report")
        report.ranks = mask_of(thing['ranks'], within)
        for level, name, text, remedy, mask in thing['findings']:
            if level not in LEVELS or name not in NAMES:
                raise ValueError("no finding")
            report.add(level, name, text, remedy, mask_of(mask, within))
        for name, values in thing['facts'].items():
            for value, mask in values.items():
                report.fact(one_line(name)[:LONGEST], value, mask_of(mask, within))
        return report

    def sorted(self) -> list:
        """The findings, red ones first: [(level, name, text, remedy, mask)]."""
        found = sorted(self.findings.items(), key=lambda item: (
            LEVELS.index(item[0].level), -bin(item[1]).count('1'), item[0][1:]))
        return [finding + (mask,) for finding, mask in found]

    def text(self, header: str) -> str:
        """The table."""
        width = max(80, min(120, shutil.get_terminal_size((110, 24)).columns))
        lines = [header]
        for level, name, text, remedy, mask in self.sorted():
            where = '' if mask == self.ranks or not mask else ' [%s]' % ranks_text(mask)
            lines += textwrap.wrap(text + where, width, initial_indent='%-11s%-13s' % (TITLES[level], name),
                                   subsequent_indent=' ' * 24, break_long_words=False, break_on_hyphens=False)
            if remedy:
                lines += textwrap.wrap('-> ' + remedy, width, initial_indent=' ' * 24, subsequent_indent=' ' * 27,
                                       break_long_words=False, break_on_hyphens=False)
        return '\n'.join(lines) + '\n'

    def data(self, **more: 'Any') -> dict:
        """For JSON; docs/check.md describes the form."""
        return dict(more, format=1, ranks=ranks_of(self.ranks), findings=[
            {'level': level, 'name': name, 'text': text, 'remedy': remedy, 'ranks': ranks_of(mask)}
            for level, name, text, remedy, mask in self.sorted()
        ], facts={name: {value: ranks_of(mask) for value, mask in sorted(values.items())}
                  for name, values in sorted(self.facts.items())})
