# SPDX-License-Identifier: GPL-2.0-only
"""
Imports what a script imports, in a fork of the process with PyTorch, and searches as Python does for the script: its
directory first. Then starts one worker of a DataLoader.

    python job imports DESCRIPTOR WORDS      the same in a new process, if a file beside the script has the name of a
                                             module that PyTorch imports
"""
import ast
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import resource
import select
import signal
import sys
import time

from . import __main__, program, syntax
from .kinds import Any, Iterator

# seconds for everything; what takes longer remains untested
LIMIT = 30
# exit status of the fork if no import ends it
OVER = 117
# variables that a launcher sets, and those for interfaces
VARIABLES = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'NCCL_SOCKET_IFNAME',
             'GLOO_SOCKET_IFNAME')
HERE = os.path.dirname(os.path.abspath(__file__))


class Trial:
    """Runs in a fork from its creation on. SIGCHLD must not be ignored."""

    def __init__(self, words: list) -> None:
        self.begin, self.text = time.monotonic(), b''
        self.answers, answer = os.pipe()
        self.pid = os.fork()
        with contextlib.suppress(OSError):      # so that processes it starts end with it
            os.setpgid(self.pid, self.pid)
        if not self.pid:
            try:
                run(words, answer)
            finally:
                os._exit(OVER)
        os.close(answer)

    def result(self) -> dict:
        """
        Its last message: 'wrong' (text, whether that is certain), 'changed' (texts), 'shadows', 'worker', 'late'
        (texts), 'modules'; {} if there is none.
        """
        late = False
        while b'"done"' not in self.text:   # a worker may keep the pipe
            late = not select.select([self.answers], [], [], max(0, self.begin + LIMIT - time.monotonic()))[0]
            more = b'' if late else os.read(self.answers, 1 << 16)
            self.text += more
            if not more:
                break
        os.close(self.answers)
        if late:    # locks of a compilation (torch.utils.file_baton) are for the training, too
            os.killpg(self.pid, signal.SIGINT)
            time.sleep(2)
        os.killpg(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        last = {}
        for line in self.text.split(b'\n'):
            with contextlib.suppress(ValueError):
                last = json.loads(line.decode())
        if last.get('doing') and late:
            last['wrong'] = ['%s did not end within %d s' % (last['doing'], LIMIT), False]
        elif last.get('doing') and status != OVER << 8:
            how = 'signal %d' % os.WTERMSIG(status) if os.WIFSIGNALED(status) else 'status %d' % os.WEXITSTATUS(status)
            # signal 9: the kernel lacked memory, perhaps due to this extra process; late imports may never happen
            last['wrong'] = ['%s ended the process with %s' % (last['doing'], how),
                             how != 'signal 9' and 'late' not in last]
        return last


def of_process() -> dict:
    """Properties of the process that a training relies on and no import should change: {name: value}."""
    torch, stdout = sys.modules.get('torch'), sys.stdout    # type: Any, Any
    found = {'the working directory': os.path.realpath('/proc/self/cwd'), 'argv': str(sys.argv)[:100]}  # type: dict
    found.update((name, os.environ.get(name)) for name in VARIABLES)
    with open('/proc/self/status') as stream:
        found['the umask'] = ''.join(line.split()[1] for line in stream if line.startswith('Umask'))
    for number, name in {number: name for name, number in vars(resource).items() if name.startswith('RLIMIT_')}.items():
        limit = resource.getrlimit(number)[0]
        found[name] = None if limit == resource.RLIM_INFINITY else limit
    for name in ('SIGCHLD', 'SIGTERM', 'SIGINT'):
        found[name] = 'is ignored' * (signal.getsignal(getattr(signal, name)) == signal.SIG_IGN)
    found['a timer (SIGALRM)'] = 'runs' * (signal.getitimer(signal.ITIMER_REAL)[0] > 0)
    found['stdout'] = 'closed' * (stdout is None or bool(getattr(stdout, 'closed', False)) or not fd_is_open(1))
    for name in ('dtype', 'device'):    # device since 2.3
        if hasattr(torch, 'get_default_' + name):
            found["PyTorch's default " + name] = str(getattr(torch, 'get_default_' + name)())
    children = 0
    for thread in os.listdir('/proc/self/task'):
        with contextlib.suppress(OSError), open('/proc/self/task/%s/children' % thread) as stream:
            children += len(stream.read().split())
    return dict(found, **{'its own processes': children})


def fd_is_open(number: int) -> bool:
    """Whether this descriptor is open."""
    with contextlib.suppress(OSError):
        os.fstat(number)
        return True
    return False


def changes(before: dict, real: dict) -> list:
    """
    The differences between of_process() now and `before`.

    :param real: the training's values of the variables: setting these is no change
    """
    return ['%s (%s%s)' % (name, now or 'none', ', before: %s' % before[name] if before.get(name) else '')
            for name, now in of_process().items() if now != before.get(name) and now != real.get(name, before.get(name))
            and not (name.startswith('RLIMIT') and (now is None or now > (before[name] or now)))]     # raised


def changes_path(node: 'Any') -> bool:
    """Whether a statement changes sys.path or os.environ, also under one condition: if PATH not in sys.path."""
    if isinstance(node, ast.If):
        return not node.orelse and all(map(changes_path, node.body))
    # what is changed: the target, or that whose method is called
    called = getattr(getattr(node, 'value', None), 'func', None) if isinstance(node, ast.Expr) else None
    changed = getattr(node, 'targets', None) or [getattr(node, 'target', None) or getattr(called, 'value', None)]
    return isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)) and any(
        isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
        and (part.value.id, part.attr) in (('sys', 'path'), ('os', 'environ'))
        for one in changed if one for part in ast.walk(one))


def statements(text: bytes) -> 'Iterator[tuple]':
    """
    The script's top-level statements that affect its imports: (statement, whether it is an import, whether all
    that may change sys.path or sys.modules before it is among these).
    """
    sure = True
    for node in syntax.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) or changes_path(node):
            yield node, isinstance(node, (ast.Import, ast.ImportFrom)), sure
        elif not isinstance(node, syntax.FUNCTIONS + (ast.ClassDef,)):
            sure = sure and not any(isinstance(part, (ast.Call, ast.For, ast.While)) for part in ast.walk(node))


def line_of(text: bytes, number: int) -> str:
    """A line of a script, for a message."""
    return text.decode(errors='replace').splitlines()[number - 1].strip()[:100]


def beside(directory: str) -> list:
    """Files and packages in a directory that would shadow a module which is already imported."""
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
    """Import, start the worker, and print the results as JSON lines."""
    found = {}  # type: dict

    def say(**more: 'Any') -> None:
        found.update(more)
        os.write(descriptor, json.dumps(found).encode() + b'\n')

    # keep it from joining other processes (mpi4py 3.1.6, docs/source/usrman/mpi4py.rst) and from reading stdin
    real = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='1', MPI4PY_RC_INITIALIZE='0')
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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
            say(wrong=['import torch loads a file beside the script: %s' % first(err), True], doing='')
            return
    sure, text, changed, space = True, b'', [], {}  # type: bool, bytes, list, dict
    try:
        if kind == 'module':
            spec = importlib.util.find_spec(name)
            if spec and spec.submodule_search_locations:
                name += '.__main__'
                spec = importlib.util.find_spec(name)
            path = spec.origin if spec and spec.origin and spec.origin.endswith('.py') else ''
        if kind and path and os.path.isfile(path):
            with open(path, 'rb') as stream:
                text = stream.read(syntax.MOST)
        space = {'__name__': '__slingtorch__', '__file__': path,
                 '__package__': name.rpartition('.')[0] if kind == 'module' else None}
        for node, imports, known in statements(text):
            code = compile(ast.Module([node], []), path, 'exec')
            before = of_process()
            try:
                say(doing=line_of(text, node.lineno))
                exec(code, space)
            except BaseException as err:    # every exception would end the script
                if not imports:
                    sure = False    # the statement needs more than this process has
                    continue
                ends = isinstance(err, SystemExit)
                say(wrong=['line %d: %s%s: %s' % (node.lineno, found['doing'], ' ends the program' * ends, first(err)),
                           # PyTorch is here before it: other libraries may fail only then
                           sure and known and (ends or isinstance(err, SyntaxError) or isinstance(err, ImportError) and
                                               bool(re.search('No module named|cannot import name', str(err))))],
                    doing='')
                return
            if imports:
                changed += ['line %d: %s: %s' % (node.lineno, found['doing'], text) for text in changes(before, real)]
                say(changed=changed[:8])
                with contextlib.suppress(OSError):      # the directory may have been removed
                    os.chdir(before['the working directory'])
    except (SyntaxError, ValueError, RecursionError, ImportError, OSError, UnicodeDecodeError):
        pass    # program.py reports it
    say(doing='')
    try:
        torch = importlib.import_module('torch')    # type: Any
        importlib.import_module('torch.utils.data')
        batches = torch.utils.data.DataLoader(torch.arange(4, device='cpu'), batch_size=2, num_workers=1,
                                              timeout=LIMIT // 2)     # type: Any
        say(worker='' if sum(int(batch.sum()) for batch in batches) == 6 else 'it returned wrong data')
    except Exception as err:
        say(worker=first(err) * ('timed out' not in str(err)))      # this node is busy
    try:
        loaded = program.load(words, {**os.environ, **{name: value for name, value in real.items() if value}})
    except OSError:
        loaded = None
    if loaded and not found.get('wrong'):
        try_late(loaded, say, space)
        say(modules=modules_of(loaded, directory), doing='')
    say(done=True)


def try_late(loaded: 'syntax.Program', say: 'Any', space: dict) -> None:
    """
    Try what the program loads later, in functions that it calls: modules, and libraries with ctypes.

    :param space: the names that the script's imports have defined
    """
    wrong = []  # type: list
    for node, code, text in loaded.late():
        try:
            say(doing=text, late=wrong)
            exec(compile(code, '<late>', 'exec'), space)
        except (ImportError, SyntaxError, OSError) as err:
            wrong.append('%s: %s: %s' % (loaded.where(node), text, first(err)))
        except Exception:   # it may need what this process lacks
            pass
    dist = getattr(sys.modules.get('torch'), 'distributed', None)
    for node in loaded.calls:
        name = loaded.value(syntax.keywords(node).get('backend', (node.args + [None])[0]))
        if syntax.called(node) == 'init_process_group' and name in ('mpi', 'ucc', 'gloo') and not loaded.optional(
                node) and not getattr(dist, 'is_%s_available' % name, lambda: True)():
            wrong.append("%s: init_process_group('%s'), but this PyTorch was built without it" % (
                loaded.where(node), name))
    say(late=list(dict.fromkeys(wrong))[:8])


def modules_of(loaded: 'syntax.Program', directory: str) -> dict:
    """{package that the program imports: its version, and a digest of its files if they are outside this Python}"""
    found, own = {}, tuple(map(os.path.realpath, (sys.prefix, sys.base_prefix)))
    known = {'', 'torch', *getattr(sys, 'stdlib_module_names', ())}     # since 3.10
    for top in {name.partition('.')[0] for name in loaded.imports} - known:
        path = os.path.realpath(getattr(sys.modules.get(top), '__file__', None) or '/nowhere')
        version = getattr(sys.modules.get(top), '__version__', None)
        if path.startswith(os.path.realpath(directory) + '/') or not os.path.isfile(path):
            continue
        if path.startswith(own):
            if isinstance(version, str):
                found[top] = version
            continue
        digest = hashlib.sha256()
        for name, module in sorted(sys.modules.items())[:program.LISTED]:
            file = getattr(module, '__file__', None) or ''
            if (name + '.').startswith(top + '.') and os.path.isfile(file):
                digest.update(program.contents(file).encode())
        found[top] = '%s, %s' % (version or 'files', digest.hexdigest()[:12])
    return dict(sorted(found.items())[:syntax.ARGUMENTS])


def first(err: BaseException) -> str:
    """An error in one line, with its type."""
    lines = [line for line in str(err).strip().splitlines() if line.strip()] or ['']
    # a worker's error has its own traceback, whose last line is the error itself
    return '%s: %s' % (type(err).__name__, lines[-1] if 'Traceback' in str(err) else lines[0])


def main(argv: list) -> None:
    """Run in a new process."""
    try:
        run(argv[1:], int(argv[0]), True)
    finally:
        os._exit(OVER)
