# SPDX-License-Identifier: GPL-2.0-only
"""What the tests of the check make it say is compared whole: a test looks at a word, and a finding has many."""
import os
import re
import sys

import pytest

from testbed import ROOT
from testbed.expected import EXPECTED

# what differs from run to run, from one Python or machine to another, and the line of a program
VARIES = (r'(?<=MASTER_PORT=)\d+', r'(?<=PORT differs: )\d+', r'(?<=this Python )\(\S+\)', r'\[Errno -\d+\][^)]*',
          r"(?<=\d: )(invalid syntax|expected ':')", r'(?<=user id )\d+', r'(?<=program: line )\d+',
          # names and numbers that the tests themselves assert
          r'(?<=may have )\d+', r'(?<=: ulimit -)\w(?= differs)', r"(?<=value: )\w+='[^']*'",
          r'(?<=variable: )\w+(?= is not)', r'(?<=Perhaps it should be )\w+', r'(?<=or write )\w+',
          r'(?<=\(it has )[^)]*', r'(?<=VISIBLE_DEVICES=)[^)]*(?=\) ->)', r'look_at_\w+(?=\(\))',
          r'(?<=SOCKET_IFNAME=).*(?=: this node)', r'(?<=cannot write to )TMP/\S*', r'(?<=TMP fails on this node: ).*(?= -> )')


@pytest.fixture
def whole_findings(monkeypatch, tmp_path):
    """Level, name, text and remedy of each finding must be a line of tests/expected/check-findings.

    UPDATE_EXPECTED=1, with -n 0, adds the lines that are not there.
    """
    from slingtorch.job import findings     # not before the checkout is chosen (tests/conftest.py)
    said, add = set(), findings.Report.add

    def recorded(report, level, name, text, remedy='', ranks=None):
        if sys._getframe(1).f_code.co_filename.startswith(f'{ROOT}/slingtorch/'):   # not those that a test makes up
            said.add(f'{level} {name}: {findings.one_line(text)} -> {findings.one_line(remedy)}')
        add(report, level, name, text, remedy, ranks)

    monkeypatch.setattr(findings.Report, 'add', recorded)
    yield
    for part, word in ((str(tmp_path), 'TMP'), (sys.executable, 'PYTHON'), (str(ROOT), 'ROOT')):
        said = {line.replace(part, word) for line in said}
    said = {re.sub('|'.join(VARIES), 'N', line) for line in said}
    path = EXPECTED / 'check-findings'
    if os.environ.get('UPDATE_EXPECTED'):
        path.touch()
        path.write_text(''.join(f'{line}\n' for line in sorted({*path.read_text().splitlines(), *said})))
    assert not said - {*path.read_text().splitlines()}
