# SPDX-License-Identifier: GPL-2.0-only
"""What there is to check."""

from testbed import ROOT

EASYCONFIGS = sorted((ROOT / 'easyconfigs').rglob('*.eb'))
# EasyBuild itself takes no file for an easyblock whose name starts with '_' (avail_easyblocks): it holds functions
EASYBLOCKS = sorted((ROOT / 'easyblocks').rglob('[!_]*.py'))
PATCHES = sorted(path for path in (ROOT / 'patches').rglob('*') if path.is_file() and path.suffix != '.md')
INCLUDE = [
    pattern
    for pattern in (ROOT / 'easyblocks/*.py', ROOT / 'easyblocks/generic/*.py')
    if any(path.match(str(pattern)) for path in EASYBLOCKS)
]


def name(path):
    """Identifier of a test."""
    return str(path.relative_to(ROOT))
