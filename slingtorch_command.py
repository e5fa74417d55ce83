# SPDX-License-Identifier: GPL-2.0-only
"""Start of the command slingtorch, outside its package: PYTHONPATH may bring a foreign package of that name."""
import os
import sys


def main() -> int:
    """The command; a package that hides ours is named instead of a traceback."""
    try:
        from slingtorch.cli import main as command
    except Exception:   # whatever foreign code does
        foreign = getattr(sys.modules.get('slingtorch'), '__file__', None) or ''
        own = os.path.join(os.path.dirname(os.path.realpath(__file__)), 'slingtorch')
        if os.path.dirname(os.path.realpath(foreign)) == own:
            raise
        sys.stderr.write("slingtorch: 'import slingtorch' takes %s, and not %s: PYTHONPATH comes first. Rename it, or "
                         "take its directory out of PYTHONPATH\n" % (foreign or 'another package', own))
        return 1
    return command()
