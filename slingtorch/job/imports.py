# SPDX-License-Identifier: GPL-2.0-only
"""
What a script imports is imported, in a fork of the process that has PyTorch, as Python would for the script: its
directory first. Then one worker of a DataLoader is started.

    python job imports DESCRIPTOR WORDS      the same in a process of its own, where a file beside the script has the
                                             name of a module that PyTorch imports
"""
import ast
import contextlib
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import time

from . import __main__, program

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Any, Iterator

# seconds for all of it; one that takes longer is not tested
LIMIT = 30
HERE = os.path.dirname(os.path.abspath(__file__))


class Trial:
    """It goes on in a process of its own from now on. No SIGCHLD may be ignored."""

    def __init__(self, words: list) -> None:
        self.begin, self.text = time.monotonic(), b''
        self.answers, answer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                run(words, answer)
            finally:
                os._exit(0)
        os.close(answer)

    def result(self) -> dict:
        """What it says: 'wrong' (text, whether that is sure), 'shadows', 'worker'; {} if nothing, or not in time."""
        while select.select([self.answers], [], [], max(0, self.begin + LIMIT - time.monotonic()))[0]:
            more = os.read(self.answers, 1 << 16)
            self.text += more
            if not more or b'"done"' in more:   # a worker may keep the pipe
                break
        os.close(self.answers)
        os.kill(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        last = {}
        for line in self.text.split(b'\n'):
            with contextlib.suppress(ValueError):
                last = json.loads(line.decode())
        if last.get('doing') and os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
            last['wrong'] = ['%s ended the process with signal %d' % (last['doing'], os.WTERMSIG(status)), True]
        return last


def statements(text: bytes) -> 'Iterator[tuple]':
    """What a script does first of all that decides about its imports: (statement, whether it is an import)."""
    for node in program.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, True
            continue
        # what is changed: the target, or that whose method is called
        called = getattr(getattr(node, 'value', None), 'func', None) if isinstance(node, ast.Expr) else None
        changed = getattr(node, 'targets', None) or [getattr(node, 'target', None) or getattr(called, 'value', None)]
        if any(isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
               and (part.value.id, part.attr) in (('sys', 'path'), ('os', 'environ'))
               for one in changed if one and isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign))
               for part in ast.walk(one)):
            yield node, False


def line_of(text: bytes, number: int) -> str:
    """This line of a script, for a message."""
    return text.decode(errors='replace').splitlines()[number - 1].strip()[:100]


def beside(directory: str) -> list:
    """Names of files and packages of a directory that are taken in the place of a module that is imported already."""
    found = []
    for entry in sorted(os.listdir(directory or '.')):
        name = entry[:-3] if entry.endswith('.py') else entry
        path = os.path.realpath(os.path.join(directory, entry))
        if not entry.endswith('.py') and not os.path.isfile(os.path.join(path, '__init__.py')):
            continue
        there = getattr(sys.modules.get(name), '__file__', None)
        if there and name != '__main__' and os.path.realpath(there) not in (path, os.path.join(path, '__init__.py')):
            found.append(entry)
    return found


def run(words: list, descriptor: int, again: bool = False) -> None:
    """Do it, and say in JSON lines what comes of it."""
    found = {}  # type: dict

    def say(**more: 'Any') -> None:
        found.update(more)
        os.write(descriptor, json.dumps(found).encode() + b'\n')

    # it is not to meet anybody
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='1')
    kind, name = program.program_of(words)
    if __package__ == 'job':    # a program may have modules of this name
        for module in [module for module in sys.modules if module.split('.')[0] == 'job']:
            del sys.modules[module]
    sys.argv = [name] + words[words.index(name) + 1:] if name in words else [name]
    safe = getattr(sys.flags, 'safe_path', False) or program.isolated(words)    # since 3.11
    # a link's own directory does not count (CPython's Python/pathconfig.c: _PyPathConfig_ComputeSysPath0)
    directory = os.path.dirname(os.path.realpath(name)) if kind == 'script' else os.getcwd()
    path = name
    if kind and not safe:
        shadows = beside(directory) if not again else []
        if shadows:
            say(shadows=shadows)
            os.set_inheritable(descriptor, True)
            os.execv(sys.executable, [sys.executable, '-B', HERE, 'imports', str(descriptor)] + words)
        __main__.put_first(directory)
    if again:
        say(doing='import torch')
        try:
            importlib.import_module('torch')
        except Exception as err:
            say(wrong=['import torch takes a file beside the script: %s' % first(err), True], doing='')
            return
    sure, text = True, b''
    try:
        if kind == 'module':
            spec = importlib.util.find_spec(name)
            path = spec.origin if spec and spec.origin and spec.origin.endswith('.py') else ''
        if kind and path and os.path.isfile(path):
            with open(path, 'rb') as stream:
                text = stream.read(program.MOST)
        space = {'__name__': '__slingtorch__', '__file__': path,
                 '__package__': name.rpartition('.')[0] if kind == 'module' else None}
        for node, imports in statements(text):
            code = compile(ast.Module([node], []), path, 'exec')
            try:
                say(doing=line_of(text, node.lineno))
                exec(code, space)
            except Exception as err:
                if not imports:
                    sure = False    # it needs more than is here
                    continue
                say(wrong=['line %d: %s: %s' % (node.lineno, found['doing'], first(err)),
                           sure and isinstance(err, (ImportError, SyntaxError))], doing='')
                return
            except SystemExit:
                break
    except (SyntaxError, ValueError, RecursionError, ImportError, OSError, UnicodeDecodeError):
        pass    # program.py has said it
    say(doing='')
    try:
        torch = importlib.import_module('torch')    # type: Any
        importlib.import_module('torch.utils.data')
        batches = torch.utils.data.DataLoader(torch.arange(4), batch_size=2, num_workers=1,
                                              timeout=LIMIT // 2)     # type: Any
        say(worker='' if sum(int(batch.sum()) for batch in batches) == 6 else 'wrong data came')
    except Exception as err:
        say(worker=first(err))
    say(done=True)


def first(err: BaseException) -> str:
    """What an error says, in one line."""
    lines = [line for line in str(err).strip().splitlines() if line.strip()] or ['']
    # a worker's error has its own traceback, whose last line says what it was
    return '%s: %s' % (type(err).__name__, lines[-1] if 'Traceback' in str(err) else lines[0])


def main(argv: list) -> None:
    """As a process of its own."""
    run(argv[1:], int(argv[0]), True)
    os._exit(0)
