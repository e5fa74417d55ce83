# SPDX-License-Identifier: GPL-2.0-only
"""
Imports what a script imports, in a fork of the process with PyTorch, and searches as Python does for the script: its
directory first. Before, it starts one worker of a DataLoader. An import has no effect on anything else: the trial ends
where the program's own code is about to write, to connect or to start a process.
"""
import ast
import contextlib
import ctypes
import glob
import importlib
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time

from . import __main__, program, syntax
from .kinds import Any, Iterator

# seconds for everything; what takes longer remains untested
LIMIT = 30
# exit status of the fork if no import ends it
OVER = 117
HERE = os.path.dirname(os.path.abspath(__file__)) + '/'
# Python's audit events for what others than the process notice (docs.python.org/3/library/audit_events.html)
EFFECTS = re.compile(r'os\.(chmod|chown|exec|fork|forkpty|kill|killpg|link|mkdir|posix_spawn|remove|rename|rmdir|'
                     r'spawn|symlink|system|truncate|utime)$|subprocess\.|socket\.(bind|connect|sendto|sendmsg)$|'
                     r'sqlite3\.connect$')
PDEATHSIG = 1   # PR_SET_PDEATHSIG (linux/prctl.h)
# Calls before an import that leave it certain. Others may provide the module, end the program, or start another one.
IDLE = ('print', 'write', 'flush', 'filterwarnings', 'simplefilter', 'basicConfig', 'getLogger', 'get', 'getenv', 'int',
        'str', 'len')


class Trial:
    """Runs in a fork from its creation on. SIGCHLD must not be ignored."""

    def __init__(self, words: list) -> None:
        self.begin, self.text, self.place = time.monotonic(), b'', ''
        with contextlib.suppress(OSError):
            # the job's directory is removed with the job
            self.place = tempfile.mkdtemp(prefix='slingtorch-', dir=next(
                filter(os.path.isdir, [os.environ.get('SLINGTORCH_JOB_DIR', '')]), None))
        self.answers, answer = os.pipe()
        parent, self.pid = os.getpid(), os.fork()
        if not self.pid:
            try:
                os.setsid()     # so that the processes that it starts can be ended, too
                ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)     # it ends with this process
                if os.getppid() == parent:
                    run(words, answer, self.place)
            finally:
                os._exit(OVER)
        os.close(answer)

    def result(self) -> dict:
        """
        Its last message: 'wrong' (text, whether that is certain), 'untested' (text), 'shadows', 'worker', 'late'
        (texts), 'modules'; {} if there is none.
        """
        ended, late, last = None, False, {}     # type: Any, bool, dict
        while not ended:    # a process that an import started may keep the pipe
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if select.select([self.answers], [], [], 0 if ended else 0.1)[0]:
                self.text += os.read(self.answers, 1 << 16)
            if not ended and not late and time.monotonic() > self.begin + LIMIT:
                late = True
                os.kill(self.pid, signal.SIGKILL)
        os.close(self.answers)
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        shutil.rmtree(self.place, ignore_errors=True)
        for line in self.text.split(b'\n'):
            with contextlib.suppress(ValueError):
                last.update(json.loads(line.decode()))
        if last.get('doing') and late:
            last['wrong'] = ['%s did not end within %d s' % (last['doing'], LIMIT), False]
        elif last.get('doing') and status != OVER << 8:
            how = 'signal %d' % os.WTERMSIG(status) if os.WIFSIGNALED(status) else 'status %d' % os.WEXITSTATUS(status)
            # signal 9: the kernel lacked memory, perhaps due to this extra process; late imports may never happen
            last['wrong'] = ['%s ended the process with %s' % (last['doing'], how),
                             how != 'signal 9' and 'late' not in last]
        return last


def has_effect(event: str, words: tuple, installed: tuple = ()) -> bool:
    """
    Whether an audit event says that code of the program changes more than itself.

    :param installed: directories of packages, beside site-packages: those of pip's --target
    """
    if event == 'open' and isinstance(words[0], (str, bytes)):
        changes = words[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not os.fsdecode(words[0]).startswith('/dev/')
    else:
        changes = EFFECTS.match(event) and words[:1] != (os.getpid(),)      # it may end itself
    frame = sys._getframe() if changes else None    # type: Any
    while frame:
        code = frame.f_code
        if not program.INSTALLED.match(code.co_filename) and not code.co_filename.startswith((HERE, *installed)):
            return True
        if code.co_name == '<module>' and not code.co_filename.startswith('<'):
            return False    # it happens at each import of this package
        frame = frame.f_back
    return False


def is_path(node: 'Any') -> bool:
    """Whether a node is sys.path."""
    return syntax.named(node) == 'path' and syntax.named(node.value) == 'sys'


def changes_path(node: 'Any') -> bool:
    """Whether a statement changes sys.path or os.environ, also under one condition: if PATH not in sys.path."""
    if isinstance(node, ast.If):
        return not node.orelse and all(map(changes_path, node.body))
    called = getattr(getattr(node, 'value', None), 'func', None)
    changed = getattr(node, 'targets', None) or [getattr(node, 'target', called)]
    return isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)) and any(
        is_path(part) or syntax.named(part) == 'environ' for one in changed if one for part in ast.walk(one))


def statements(text: bytes) -> 'Iterator[tuple]':
    """
    The script's top-level statements that affect its imports: (statement, whether it is an import, whether all
    that may provide modules before it is among these).
    """
    sure = True
    for node in syntax.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) or changes_path(node):
            yield node, isinstance(node, (ast.Import, ast.ImportFrom)), sure
        elif not isinstance(node, syntax.FUNCTIONS + (ast.ClassDef,)):
            sure = sure and all(syntax.called(part) in IDLE if isinstance(part, ast.Call) else not is_path(part)
                                for part in ast.walk(node))


def beside(directory: str) -> list:
    """Files and packages in a directory that would shadow a module which is already imported."""
    found = []
    for entry in sorted(os.listdir(directory or '.')):
        name = entry[:-3] if entry.endswith('.py') else entry
        there = getattr(sys.modules.get(name), '__file__', None)
        paths = [os.path.realpath(os.path.join(directory, entry, *part)) for part in ((), ('__init__.py',))]
        if there and name not in ('__main__', 'slingtorch') and any(map(os.path.isfile, paths)) and \
                os.path.realpath(there) not in paths:
            found.append(entry)
    return found


def forget(names: list) -> None:
    """Let these modules be imported again, from files or directories of these names."""
    for module in [one for one in sys.modules if one.split('.')[0] in [name.partition('.')[0] for name in names]]:
        del sys.modules[module]


def run(words: list, descriptor: int, place: str) -> None:
    """
    Start the worker, import, and print the results as JSON lines.

    :param place: a directory for temporary files
    """
    found = {}  # type: dict

    def say(**more: 'Any') -> None:
        found.update(more)
        os.write(descriptor, json.dumps(found).encode() + b'\n')

    # keep it from joining other processes (mpi4py 3.1.6, docs/source/usrman/mpi4py.rst) and from reading stdin
    real = dict(os.environ)
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='1', MPI4PY_RC_INITIALIZE='0')
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    kind, name, given, isolated = program.program_of(words)
    if __package__ == 'job':    # a program may have modules of this name
        forget(['job'])
    sys.argv = [name] + given
    safe = isolated or getattr(sys.flags, 'safe_path', False)    # since 3.11
    # a link's own directory does not count (CPython's Python/pathconfig.c: _PyPathConfig_ComputeSysPath0)
    directory = os.path.dirname(os.path.realpath(name)) if kind == 'script' else os.getcwd()
    shadows = beside(directory) if kind and not safe else []
    try:
        torch = importlib.import_module('torch')    # type: Any
        importlib.import_module('torch.utils.data')
        batches = torch.utils.data.DataLoader(torch.arange(4, device='cpu'), batch_size=2, num_workers=1,
                                              timeout=LIMIT // 2)     # type: Any
        say(worker='' if sum(int(batch.sum()) for batch in batches) == 6 else 'it returned wrong data', doing='')
    except Exception as err:
        say(worker=first(err) * ('timed out' not in str(err)), doing='')      # this node is busy
    try:
        loaded = program.load(words, real)
    except OSError:
        loaded = None
    say(shadows=shadows)
    if not loaded or loaded.wrong.get(next(iter(loaded.files))):
        return
    forget(shadows)     # the program finds its own
    if not safe:
        __main__.put_first(directory)
    if place:
        os.environ['TMPDIR'] = tempfile.tempdir = place

    installed = tuple(path + '/' for path in sys.path if path and glob.glob(glob.escape(path) + '/*.dist-info'))

    def watch(event: str, more: tuple) -> None:
        if has_effect(event, more, installed):
            say(untested='%s (%s)' % (found['doing'], ' '.join([event, *map(str, more[:1])])[:200]), doing='',
                modules=modules_of(loaded, directory))
            os._exit(OVER)

    sys.addaudithook(watch)     # novermin: jobs have Python 3.8
    module = name + '.__main__' * loaded.script.endswith('__main__.py')
    space = {'__name__': '__slingtorch__', '__file__': loaded.script,
             '__package__': module.rpartition('.')[0] if kind == 'module' else None}

    def attempt(node: 'Any', code: list) -> 'Any':
        line = loaded.files[loaded.place[id(node)]].decode(errors='replace').splitlines()[node.lineno - 1]
        try:
            say(doing='%s: %s' % (loaded.where(node), line.strip()[:100]))
            exec(compile(ast.Module(code, []), loaded.script, 'exec'), space)
        except BaseException as err:    # every exception would end the script
            return err
        return None

    sure, late = not shadows, []   # type: bool, list
    for node, imports, known in statements(next(iter(loaded.files.values()))):
        failed = attempt(node, [node])
        if failed and not imports:
            sure = False    # the statement needs more than this process has
        elif failed:
            ends = isinstance(failed, SystemExit)
            # PyTorch is here before it: other libraries may fail only then
            sure = sure and known and (ends or isinstance(failed, SyntaxError) or isinstance(failed, ImportError)
                                       and bool(re.search('No module named|cannot import name', str(failed))))
            say(wrong=['%s%s: %s' % (found['doing'], ' ends the program' * ends, first(failed)), sure], doing='')
            return
    for node, code in loaded.late():    # what the program loads in functions that it calls
        say(late=late)
        failed = attempt(node, code)
        if isinstance(failed, (ImportError, SyntaxError, OSError)):    # for others, it may need what this process lacks
            late.append('%s: %s' % (found['doing'], first(failed)))
    say(late=list(dict.fromkeys(late))[:8], modules=modules_of(loaded, directory), doing='')


def modules_of(loaded: 'syntax.Program', directory: str) -> dict:
    """{package that the program imports, beside its own: its version, or a digest of its first file}"""
    found, known = {}, {'', 'torch', *getattr(sys, 'stdlib_module_names', ())}     # since 3.10
    for top in sorted({name.partition('.')[0] for name in loaded.imports} - known):
        path = os.path.realpath(getattr(sys.modules.get(top), '__file__', None) or '/nowhere')
        if os.path.isfile(path) and not path.startswith(os.path.realpath(directory) + '/'):
            found[top] = str(getattr(sys.modules[top], '__version__', '')) or program.contents(path)
    return dict(list(found.items())[:syntax.ARGUMENTS])


def first(err: BaseException) -> str:
    """An error in one line, with its type."""
    lines = [line for line in str(err).strip().splitlines() if line.strip()] or ['']
    # a worker's error has its own traceback, whose last line is the error itself
    return '%s: %s' % (type(err).__name__, lines[-1] if 'Traceback' in str(err) else lines[0])
