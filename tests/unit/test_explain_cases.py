# SPDX-License-Identifier: GPL-2.0-only
"""benchmarks/explain.py and its cases: read, counted, judged as its docstring says. Nothing is measured here."""
import pathlib
import runpy
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
explain = types.SimpleNamespace(**runpy.run_path(str(ROOT / 'benchmarks/explain.py')))


def test_the_cases_are_read_and_are_as_many_as_the_page_says():
    faults = [explain.read_case(path)['cause'] != 'sound' for path in explain.OWN.glob('*.txt')]
    page = (ROOT / 'docs/explain.md').read_text()
    assert f'{sum(faults)} public problem reports' in page and f'{len(faults) - sum(faults)} logs of sound jobs' in page


def finding(level, cause, remedy='x'):
    return {'level': level, 'cause': cause, 'remedy': remedy}


@pytest.mark.parametrize('verdict, findings', [
    ('right', [finding('cause', 'the disk is full')]),
    ('right', [finding('perhaps', 'a', 'look at the DISK')]),
    ('partly', [finding('unknown', 'ValueError'), finding('cause', 'the disk is full')]),
    ('right', [finding('cause', 'a ' * 38, 'the disk')]),
    ('wrong', [finding('cause', 'a ' * 39, 'the disk')]),
    ('partly', [finding('cause', 'a'), finding('perhaps', 'the disk is full')]),
    ('nothing', []),
    ('nothing', [finding('perhaps', 'a')]),
    ('nothing', [finding('consequence', 'the disk is full'), finding('note', 'disk')]),
    ('wrong', [finding('cause', 'a'), finding('note', 'the disk is full')]),
])
def test_a_fault_is_judged(verdict, findings):
    assert explain.judged({'cause': 'full', 'remedy': 'disk'}, findings) == verdict


@pytest.mark.parametrize('verdict, findings', [
    ('sound', []),
    ('sound', [finding('consequence', 'a'), finding('note', 'b')]),
    ('perhaps', [finding('perhaps', 'a'), finding('note', 'b')]),
    ('false alarm', [finding('cause', 'a')]),
])
def test_a_sound_log_is_judged(verdict, findings):
    assert explain.judged({'cause': 'sound', 'remedy': ''}, findings) == verdict


HEAD = 'source: https://example.org\nsystem: other\ncause: the disk is full\nremedy: quota|space\n'


@pytest.mark.parametrize('text', [
    HEAD, HEAD + '---\n\n', HEAD.replace('other', 'cray') + '---\nlog\n',
    HEAD.replace('quota|space', '') + '---\nlog\n',
    HEAD.replace('quota', '(quota') + '---\nlog\n', HEAD.replace('source: https://example.org\n', '') + '---\nlog\n',
    HEAD.replace('the disk is full', 'sound') + '---\nlog\n',
])
def test_what_is_no_case_is_refused(tmp_path, text):
    path = tmp_path / 'case.txt'
    path.write_text(text)
    with pytest.raises(SystemExit, match='case.txt'):
        explain.read_case(path)


def test_the_program_counts_and_does_not_list_what_is_measured(tmp_path, capsys, monkeypatch):
    (tmp_path / 'a.txt').write_text(HEAD + '---\nOSError: [Errno 122] Disk quota exceeded\n')
    (tmp_path / 'b.txt').write_text(HEAD + '---\nall is well\n')
    monkeypatch.setattr(sys, 'argv', ['explain.py', '--cases', str(tmp_path)])
    explain.main()
    shown = capsys.readouterr().out
    assert '1 of 2, 50 %' in shown
    monkeypatch.setattr(sys, 'argv', ['explain.py', '--list'])
    with pytest.raises(SystemExit):
        explain.main()
