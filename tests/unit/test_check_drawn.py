# SPDX-License-Identifier: GPL-2.0-only
"""Variables drawn from upstream's manuals (tests/records): right ones stop nothing in check, wrong ones are named."""
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / 'runscripts/lib/check'), str(ROOT / 'tools/variables')]

import draw             # noqa: E402
import findings         # noqa: E402
import variables        # noqa: E402

FAMILIES = variables.read_table()
SEEDS = range(22, 27)   # any; 22 is the one that docs/verification.md reports


def found(name, value):
    """What check says of one variable: [(level, text)]."""
    report = findings.Report(0)
    report.fact('env ' + name, value)
    variables.check(report, FAMILIES, variables.Asked([]), False)
    return [(entry[0], entry[2]) for entry in report.sorted()]


@pytest.mark.parametrize('seed', SEEDS)
def test_120_right_ones_give_no_red_and_60_wrong_ones_are_named(seed):
    right, names, values = draw.draw(seed)
    assert (len({name for name, _ in right}), len(names) + len(values)) == (120, 60)
    red = [(name, value) for name, value in right if any(level == 'red' for level, _ in found(name, value))]
    yellow = [(name, value) for name, value in right if any(level == 'yellow' for level, _ in found(name, value))]
    unnamed = [(name, value) for name, value in names + values
               if not any(level in ('red', 'yellow') and name in text for level, text in found(name, value))]
    print('seed %d: %d right: %d red, %d yellow %s; 60 wrong: %d named' % (
        seed, len(right), len(red), len(yellow), yellow, 60 - len(unnamed)))
    assert not red
    assert not yellow
    assert not unnamed


def test_the_same_seed_draws_the_same():
    assert draw.draw(1) == draw.draw(1) != draw.draw(2)
