# SPDX-License-Identifier: GPL-2.0-only
"""From what was found in a log to answers: which of it is a reason, in what order, and what to do."""
import re
from typing import Any, Dict, Iterable, List, Set

from slingtorch import wrapped
from slingtorch.explain.log import GROUP, Finding, Log
from slingtorch.explain.tables import LEVELS, REASONS, Fault
from slingtorch.job.findings import ranks_text

TITLES = {'cause': 'cause', 'perhaps': 'perhaps', 'weak': 'perhaps', 'unknown': 'cause?', 'consequence': 'follows',
          'note': 'note'}
MAX_BLAMED = 3          # nodes that a cause names first
MAX_LIKELY = 2          # vague faults that are told where no other one names a reason
NEAR_THE_END = 1 << 16  # bytes from the end of a log


class Answer:
    """A fault that a log shows, with its evidence."""

    def __init__(self, fault: Fault, finding: Finding, facts: Set[str], phase: str) -> None:
        self.fault, self.finding, self.level = fault, finding, finding.level
        self.remedies = fault.advice(facts.union([phase], (name for name, text in finding.groups.items() if text)))

    def cause(self) -> str:
        """The cause, with what the expression's groups found in it."""
        groups = self.finding.groups
        text = re.sub(r'\{(\w+)\}', lambda match: shortened(groups.get(match.group(1))) or '\0', self.fault.cause)
        # a group that found nothing leaves neither its blank, nor its brackets
        text = re.sub(r'\s*\((?:status)?\s*\)', '', re.sub(r'\s*\0(?!\0*\w)|\0', '', text)).replace('( ', '(')
        text = re.sub(r'\s+', ' ', text).strip(' :,')
        if self.finding.rule.blame and 0 < len(self.finding.nodes) <= MAX_BLAMED:
            ranks = ', ' + ranks_text(self.finding.ranks) if self.finding.ranks else ''
            text = '%s%s: %s' % (', '.join(sorted(self.finding.nodes)), ranks, text)
        return text

    def data(self) -> Dict[str, Any]:
        """For JSON."""
        found = self.finding
        return {'rule': self.fault.name, 'level': 'perhaps' if self.level == 'weak' else self.level,
                'cause': self.cause(), 'file': found.place[0], 'line': found.place[1], 'text': found.line,
                'count': found.count, 'ranks': sorted(found.ranks), 'nodes': sorted(found.nodes),
                'details': found.details, 'remedy': self.remedies[0], 'remedies': self.remedies,
                'source': found.rule.witness}

    def show(self, number: int) -> None:
        """Print it, for a person."""
        found = self.finding
        print('%d. %s: %s' % (number, TITLES[self.level], self.cause()))
        print('   %-9s%s' % ('line', '%s:%d: %s' % (found.place + (found.evidence(),))))
        seen = ['%d lines' % found.count] * (found.count > 1)
        if found.ranks:
            first = ' (first in the log: %d)' % found.first[0] if 0 < len(found.first) < len(found.ranks) else ''
            seen.append(ranks_text(found.ranks) + first)
        if found.nodes:
            names = sorted(found.nodes)
            seen.append('%s %s' % ('nodes' if len(names) > 1 else 'node', ','.join(names[:8])
                                   + (',... (%d in all)' % len(names) if len(names) > 8 else '')))
        paragraphs = [('seen', '; '.join(seen))] * bool(seen) + [('', detail) for detail in found.details]
        remedies = [('remedy' if not index else '', text) for index, text in enumerate(self.remedies)]
        for label, text in paragraphs + remedies + [('source', found.rule.witness)]:
            print(wrapped(text, '   %-9s' % label, ' ' * 12))
        print()


def shortened(text: 'str | None') -> str:
    """What a group found, short enough for a sentence."""
    text = (text or '').strip()
    return text if len(text) <= GROUP else text[:GROUP].rsplit(' ', 1)[0] + ' ...'


def answers(log: Log, faults: Dict[str, Fault], facts: Iterable[str] = ()) -> List[Answer]:
    """
    What a log shows, the reason first.

    :param facts: names of facts that hold without a line
    """
    true = {rule.name.lstrip('@') for rule in log.findings}.union(facts)
    log.choose_exception()
    found = []
    for rule, finding in log.findings.items():
        if not rule.fact and true.issuperset(rule.needs) and not true.intersection(rule.unless):
            different, size = len(finding.distinct), finding.groups.get('size')
            if not rule.distinct or (different < int(size) if size else different > 1):
                found.append(finding)
    log.compare_ranks(found)
    for finding in found:
        fault = faults[finding.rule.name]
        if finding.level in REASONS and fault.weight <= 0 and log.went_on(finding):
            finding.level = 'note'
            finding.details.append("the program continued after this line, which therefore did not end the job")
    sure = [finding for finding in found if finding.level in ('cause', 'perhaps') and not finding.soft]
    exceptions = [finding for finding in found if finding.rule.role == 'exception']
    if sure or exceptions:
        found = [finding for finding in found if finding.level != 'weak'
                 or not sure and finding.rule.role == 'exception']

    def order(finding: Finding) -> Any:
        far = log.sizes.get(finding.place[0], 0) - finding.until > NEAR_THE_END
        other = log.root is not None and bool(finding.ranks) and log.root not in finding.ranks
        return (finding.level in REASONS[:3] and finding.soft, LEVELS.index(finding.level),
                faults[finding.rule.name].weight, far, other, list(log.sizes).index(finding.place[0]), finding.at)

    told: Dict[str, Finding] = {}
    for finding in sorted(found, key=order):
        first = told.setdefault(finding.rule.name, finding)
        if first is not finding:
            first.merge(finding)
    weak = [finding for finding in told.values() if finding.level == 'weak']
    if log.thinned:
        log.remarks.append("the log has very many similar lines: not all of them were counted")
    ordered = sorted(told.values(), key=lambda one: one.level not in REASONS)
    return [Answer(faults[finding.rule.name], finding, true, log.phase(finding))
            for finding in ordered if finding not in weak[MAX_LIKELY:]]
