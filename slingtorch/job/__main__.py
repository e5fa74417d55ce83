# SPDX-License-Identifier: GPL-2.0-only
"""Start one of the programs of this package, as the runscripts do: python -B lib/job COMMAND ARGUMENTS

COMMAND is a module with a main(): bench, check, vet.
"""
import importlib
import os
import sys


def name_shadows(kind: type, error: BaseException, trace: object) -> None:
    """
    For sys.excepthook: if PYTHONPATH has a module with the name of one of Python's own, report it in one line instead
    of a traceback.
    """
    own = os.path.dirname(os.__file__)
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, '__file__', None) or ''
        if '.' not in name and path and os.path.dirname(path) in os.environ.get('PYTHONPATH', '').split(':') and (
                os.path.exists(os.path.join(own, name + '.py')) or os.path.isdir(os.path.join(own, name))):
            sys.stderr.write("slingtorch: PYTHONPATH: 'import %s' loads %s instead of Python's own module %s (%s: %s). "
                             "Rename this file, or remove its directory from PYTHONPATH\n" % (
                                 name, path, name, kind.__name__, error))
            return
    sys.__excepthook__(kind, error, trace)  # type: ignore


def put_first(directory: str) -> None:
    """Make imports look here first instead of in this program's directory, as for a training."""
    sys.path[0] = directory


def main(command: str, *arguments: str) -> int:
    """Run the program; returns its exit status."""
    sys.excepthook = name_shadows
    package = __package__
    if not package:
        # started as a directory: import this package by its name, as pip's own __main__.py does
        directory, package = os.path.split(os.path.dirname(os.path.abspath(__file__)))
        put_first(directory)
        importlib.import_module(package)
        put_first(os.devnull)   # search only where a training's imports do
    return importlib.import_module('%s.%s' % (package, command)).main(list(arguments))


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
