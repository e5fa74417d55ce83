# SPDX-License-Identifier: GPL-2.0-only
"""Start one of the programs of this package, as the runscripts do: python -B lib/job COMMAND ARGUMENTS

COMMAND is a module with a main(): bench, check, exchange, plugin, probe, tree_copy, vet.
"""
import importlib
import os
import sys


def main(command: str, *arguments: str) -> int:
    """Run the program; its exit status."""
    package = __package__
    if not package:
        # Started as a directory, which is then first in sys.path: import this package by its name, as pip's own
        # __main__.py does, and leave nothing behind that the imports of a training program do not have.
        sys.path[0], package = os.path.split(os.path.dirname(os.path.abspath(__file__)))
        importlib.import_module(package)
        del sys.path[0]
    return importlib.import_module('%s.%s' % (package, command)).main(list(arguments))


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
