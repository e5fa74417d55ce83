# SPDX-License-Identifier: GPL-2.0-only
"""Whole outputs against those in tests/expected: a word of an output tells little about the others.

`UPDATE_EXPECTED=1 ./run-tests FILE` writes what is printed now; read the difference before it is committed.
"""
import difflib
import os
import pathlib

EXPECTED = pathlib.Path(__file__).resolve().parents[1] / 'expected'


def expected(text, name, replace=()):
    """Compare an output with tests/expected/NAME, once all (what differs from run to run, its name) are replaced."""
    # the longest first: a virtual environment may be below the checkout
    for part, word in sorted(((str(part), word) for part, word in replace), key=lambda pair: -len(pair[0])):
        text = text.replace(part, word)
    path = EXPECTED / name
    if os.environ.get('UPDATE_EXPECTED'):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = path.read_text().splitlines() if path.exists() else []
    difference = difflib.unified_diff(before, text.splitlines(), f'tests/expected/{name}', 'this run', n=1, lineterm='')
    assert text.splitlines() == before, '\n'.join(difference)
