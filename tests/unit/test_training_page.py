# SPDX-License-Identifier: GPL-2.0-only
"""docs/training.md shows the real differences of the training programs, and they are small."""
import re

import pytest

from testbed import ROOT, run

PROGRAMS = ROOT / 'examples/training'
PAGE = (ROOT / 'docs/training.md').read_text()
BASE = 'base_training.py'


@pytest.mark.parametrize('new', ['ddp_training.py', 'fsdp2_training.py', 'horovod_training.py'])
def test_difference(new):
    done = run(['diff', '-U0', '--label', BASE, '--label', new, BASE, new], cwd=PROGRAMS, check=False)
    lines = [line for line in done.stdout.splitlines(True) if not line.startswith('@@')]
    assert sum(line[0] == '+' for line in lines[2:]) <= 25
    assert f'```diff\n{"".join(lines)}```\n' in PAGE or f'`diff {BASE} {new}`' in PAGE, \
        f'paste what this prints: diff -U0 --label {BASE} --label {new} {BASE} {new} | grep -v ^@@'


def test_base():
    text = (PROGRAMS / BASE).read_text()
    assert len(text.splitlines()) <= 80
    options = set(re.findall(r"add_argument\('(--[\w-]+)'", text))
    assert options and all(f'`{option}' in PAGE for option in options)
