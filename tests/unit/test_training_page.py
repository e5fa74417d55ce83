# SPDX-License-Identifier: GPL-2.0-only
"""docs/from-one-gpu-to-many.md shows the real differences of the training programs."""
import re

from testbed import ROOT, run

PROGRAMS = ROOT / 'examples/training'
PAGE = (ROOT / 'docs/from-one-gpu-to-many.md').read_text()


def test_differences():
    blocks = re.findall(r'```diff\n(--- (\S+)\n\+\+\+ (\S+)\n.*?)```\n', PAGE, re.S)
    assert {new for _, _, new in blocks} == {path.name for path in PROGRAMS.glob('*_training.py')} - {'base_training.py'}
    for block, old, new in blocks:
        done = run(['diff', '-U0', '--label', old, '--label', new, old, new], cwd=PROGRAMS, check=False)
        assert block == ''.join(line for line in done.stdout.splitlines(True) if not line.startswith('@@')), \
            f'paste what this prints: diff -U0 --label {old} --label {new} {old} {new} | grep -v ^@@'


def test_options():
    options = set(re.findall(r"add_argument\('(--[\w-]+)'", (PROGRAMS / 'common.py').read_text()))
    assert options and all(f'`{option} ' in PAGE for option in options)
