# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch explain: every rule against its own sample, logs as they come, the flight recorder's files."""
import pytest

from slingtorch import explain

RULES = explain.read_rules()


def read(text, facts=(), name='job.log'):
    """The findings in a log."""
    import io
    log = explain.Log(explain.read_rules())
    log.read(name, io.BytesIO(text if isinstance(text, bytes) else text.encode()))
    return log.report(facts)


def names(text, facts=()):
    return [finding.rule.name for finding in read(text, facts)]


@pytest.mark.parametrize('name', RULES)
def test_a_rule_finds_its_sample_and_nothing_before_it_does(name):
    rule = RULES[name]
    log = explain.Log(RULES)
    import io
    log.read('sample', io.BytesIO('\n'.join(rule.sample).encode() + b'\n'))
    if rule.level == 'fact':
        assert name in log.findings
    else:
        found = log.report()
        assert found and found[0].rule.name == name, [finding.rule.name for finding in found]
        assert '{' not in found[0].cause()
