"""What there is to check."""

from testbed import ROOT

EASYCONFIGS = sorted((ROOT / 'easyconfigs').rglob('*.eb'))
EASYBLOCKS = sorted((ROOT / 'easyblocks').rglob('*.py'))
PATCHES = sorted(path for path in (ROOT / 'patches').rglob('*') if path.is_file() and path.suffix != '.md')
LOADED_BY_EB = EASYBLOCKS + sorted((ROOT / 'hooks').rglob('*.py')) + sorted((ROOT / 'slingtorch').rglob('*.py'))
INCLUDE = [
    pattern
    for pattern in (ROOT / 'easyblocks/*.py', ROOT / 'easyblocks/generic/*.py')
    if any(path.match(str(pattern)) for path in EASYBLOCKS)
]


def name(path):
    """Identifier of a test."""
    return str(path.relative_to(ROOT))
