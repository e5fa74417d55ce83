# SPDX-License-Identifier: GPL-2.0-only
"""
Imports what a script imports at its top level, in a fork of the process with PyTorch, and searches as Python does for
the script: its directory first. Before, it starts one worker of a DataLoader. An import has no effect on anything else:
the trial ends where the program's own code is about to write, to connect or to start a process.
"""
import ast
import contextlib
import functools
import importlib.util
import os
import re
import sys
import tempfile
import time

from . import __main__, messages, program, rules
from .kinds import Any, Callable, Iterator

# seconds for everything; what takes longer remains untested
LIMIT = 30
HERE = os.path.dirname(os.path.abspath(__file__)) + '/'
# Python's audit events for what others than the process notice (docs.python.org/3/library/audit_events.html)
EFFECTS = re.compile(r'os\.(chmod|chown|exec|fork|forkpty|kill|killpg|link|mkdir|posix_spawn|remove|rename|rmdir|'
                     r'spawn|symlink|system|truncate|utime)$|subprocess\.|socket\.(bind|connect|sendto|sendmsg)$|'
                     r'sqlite3\.connect$|torch\.')
# PyTorch's functions that write or connect in C++, where Python has no audit events
UNHEARD = (('torch', 'save'), ('torch.jit', 'save'), ('torch.distributed', 'init_process_group'),
           ('torch.distributed.distributed_c10d', 'init_process_group'))
# calls in the path of a directory
PATHS = re.compile(r'(.*\.)?(Path|str|(dir|base)name|(abs|real|rel|norm)path|join(path)?|resolve|absolute|(get)?cwd|'
                   r'expanduser)$')
# Errors that do not depend on this process: PyTorch is here before the import, and other libraries may fail only then.
# Nor on the script's own names, of which the trial has few.
CERTAIN = re.compile('(ModuleNotFound|Import)Error: (No module named|cannot import name(?!.*__main__)|bad magic number)'
                     '|(Syntax|Indentation)Error|SystemExit')


# modules of PyTorch that need another package: what it is called
NEEDS = {'torch.utils.tensorboard': 'tensorboard'}


class Trial(messages.Child):
    """Runs from its creation on."""

    def __init__(self, words: list) -> None:
        super().__init__(attempt, words)
        self.last_moment = time.monotonic() + LIMIT     # an alarm in the fork would be the program's, too

    def result(self) -> dict:
        """
        'worker' (why it fails), 'wrong' (text, whether that is certain), 'late', 'untested' (texts), 'shadows', 'files'
        """
        found, said = {}, {}    # type: dict, Any
        while said is not None:
            found.update(said)
            said = self.hear(self.last_moment)
        late, status = not self.ended(), self.end()
        if found.get('doing') and late:
            found['late'] = '%s did not end within %d s' % (found['doing'], LIMIT)
        elif found.get('doing') and not status.startswith(str(messages.OVER)):
            # status -9: the kernel lacked memory, perhaps due to this extra process
            sure = found['sure'] and not status.startswith('-9')
            found['wrong'] = ['%s ended the process with status %s' % (found['doing'], status), sure]
        return found


def has_effect(event: str, words: tuple) -> bool:
    """Whether an audit event says that code of the program, not of an installed package, changes more than itself."""
    if event == 'open' and isinstance(words[0], (str, bytes)):
        changes = words[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not os.fsdecode(words[0]).startswith('/dev/')
    else:
        changes = EFFECTS.match(event) and words[:1] != (os.getpid(),)      # it may end itself
    frame = sys._getframe() if changes else None    # type: Any
    while frame:
        code = frame.f_code
        if not program.INSTALLED.match(code.co_filename) and not code.co_filename.startswith(HERE):
            return True
        if code.co_name == '<module>' and not code.co_filename.startswith('<'):
            return False    # it happens at each import of this package
        frame = frame.f_back
    return False


def announce(function: 'Callable', event: str) -> 'Callable':
    """A function that raises this audit event, unless it writes to a file that is open, and then calls `function`."""
    @functools.wraps(function)
    def call(*words: 'Any', **named: 'Any') -> 'Any':
        target = (words[1:2] or [named.get('f')])[0]
        if not hasattr(target, 'write'):
            sys.audit(event, target or '')      # novermin: jobs have Python 3.8
        return function(*words, **named)
    return call


def changes_path(node: 'Any') -> bool:
    """Whether a statement changes sys.path or os.environ, also under one condition: if PATH not in sys.path."""
    if isinstance(node, ast.If):
        return not node.orelse and all(map(changes_path, node.body))
    changed = getattr(node, 'targets', None) or [getattr(node, 'target', getattr(
        getattr(node, 'value', None), 'func', None))]   # of an assignment, or a call
    return isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)) and any(
        re.search(r"id='sys', ctx=Load\(\)\), attr='path'|'environ'", ast.dump(one)) for one in changed if one)


def only_names(node: 'Any') -> bool:
    """Whether a statement does nothing but give names to values, such as paths of directories."""
    stores = [one for one in ast.walk(node) if isinstance(getattr(one, 'ctx', None), ast.Store)]
    return isinstance(node, (ast.Assign, ast.Expr)) and all(
        PATHS.match(rules.named(one)) for one in ast.walk(node) if isinstance(one, ast.Call)) and not any(
        isinstance(one, (ast.Attribute, ast.Subscript)) for one in stores)


def statements(script: 'Any') -> 'Iterator[tuple]':
    """
    The script's statements that affect its imports: (statement, whether all before it are of known effect). Others may
    provide a module, end the program, or start another one.
    """
    sure = True
    for node in script.body:
        for part in node.body if rules.main_block(node) else [node]:   # type: Any
            if isinstance(part, rules.IMPORTS) or changes_path(part) or only_names(part):
                yield part, sure
            elif not isinstance(part, rules.FUNCTIONS + (ast.ClassDef,)):
                sure = False


def beside(directory: str) -> list:
    """Files and packages in a directory that have the name of a module which is already imported from elsewhere."""
    found = []
    for entry in sorted(os.listdir(directory)):
        name = re.sub(r'\.py$', '', entry)
        there = os.path.realpath(getattr(sys.modules.get(name), '__file__', None) or directory)
        if name not in ('__main__', 'slingtorch') and not (there + '/').startswith(directory + '/') and (
                name != entry or os.path.isfile(os.path.join(directory, entry, '__init__.py'))):
            found.append(entry)
    return found


def try_worker() -> str:
    """Why a DataLoader with a worker fails; '' if it does not."""
    try:
        import torch.utils.data
        batches = torch.utils.data.DataLoader(torch.arange(4), batch_size=2, num_workers=1, timeout=LIMIT // 2)
        return '' if sum(int(batch.sum()) for batch in batches) == 6 else 'it returned wrong data'
    except Exception as err:
        return '' if 'timed out' in str(err) else first(err)    # this node is busy


def attempt(pipe: 'Any', words: list) -> None:
    """run(), whose own errors are no findings: an import may have closed the pipe."""
    with contextlib.suppress(Exception):
        run(pipe, words)


def run(pipe: 'Any', words: list) -> None:
    """Start the worker, import, and send the results: of equal names, the last one counts."""
    def say(**more: 'Any') -> None:
        pipe.send(more)

    kind, name, given = program.program_of(words)
    if __package__ == 'job':    # a program may have modules of this name
        for module in [one for one in sys.modules if one.split('.')[0] == 'job']:
            del sys.modules[module]
    safe = getattr(sys.flags, 'safe_path', False)    # since 3.11
    # a link's own directory does not count (CPython's Python/pathconfig.c: _PyPathConfig_ComputeSysPath0)
    directory = os.path.dirname(os.path.realpath(name)) if kind == 'script' else os.getcwd()
    shadows = beside(directory) if kind and not safe else []
    say(worker=try_worker(), shadows=shadows)
    loaded = program.load(words, dict(os.environ))
    if not loaded or loaded.first in loaded.wrong or shadows:   # with shadows, PyTorch itself may fail
        return
    if not safe:
        __main__.put_first(directory)
    # keep it from joining other processes (mpi4py 3.1.6, docs/source/usrman/mpi4py.rst)
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='1', MPI4PY_RC_INITIALIZE='0')
    tempfile.tempdir = os.environ.get('SLINGTORCH_JOB_DIR') or tempfile.tempdir     # private, and removed with the job
    text, doing, sys.argv = loaded.files[loaded.first], '', [name] + given

    def watch(event: str, more: tuple) -> None:
        if has_effect(event, more):
            say(untested='%s (%s)' % (doing, ' '.join([event, *map(str, more[:1])])[:200]), doing='')
            os._exit(messages.OVER)

    for place, function in UNHEARD:
        if hasattr(sys.modules.get(place), function):
            original = getattr(sys.modules[place], function)
            setattr(sys.modules[place], function, announce(original, 'torch.' + function))
    sys.addaudithook(watch)     # novermin: jobs have Python 3.8
    module = name + '.__main__' * loaded.script.endswith('__main__.py')
    space = {'__name__': '__slingtorch__', '__file__': loaded.script,
             '__package__': module.rpartition('.')[0] if kind == 'module' else None}
    # MPI ends a process that is not one of its ranks
    certain = not loaded.mentions(b'mpi4py|horovod|slingmpi')
    for node, sure in statements(loaded.nodes[0]):
        certain = certain and sure
        line = text.splitlines()[node.lineno - 1].decode(errors='replace').strip()
        doing = 'line %d: %s' % (node.lineno, line[:100])
        say(doing=doing, sure=certain)
        try:
            exec(compile(ast.Module([node], []), loaded.script, 'exec'), space)
        except BaseException as err:    # every exception would end the script
            if isinstance(node, rules.IMPORTS):
                ends = ' ends the program' * isinstance(err, SystemExit)
                say(wrong=['%s%s: %s' % (doing, ends, first(err)), certain and bool(CERTAIN.match(first(err)))],
                    doing='')
                return
            certain = certain and not changes_path(node)    # the statement needs more than this process has
    for node in loaded.nodes:   # also in functions, which are not run
        if isinstance(node, rules.IMPORTS) and not getattr(node, 'level', 0) and loaded.certain(
                of_one_rank(loaded, node)):
            name = getattr(node, 'module', None) or node.names[0].name
            top = NEEDS.get(name, name.partition('.')[0])
            if top not in sys.modules and not importlib.util.find_spec(top):
                say(wrong=["line %d: ModuleNotFoundError: No module named '%s'" % (node.lineno, top), False])
    files = [getattr(module, '__file__', None) or '<' for module in list(sys.modules.values())]
    elsewhere = [path for path in files if not path.startswith((HERE, directory + '/'))]
    say(doing='', files=[path for path in elsewhere if not program.INSTALLED.match(path)])


def of_one_rank(loaded: 'Any', node: 'ast.AST') -> 'ast.AST':
    """The statement 'if rank == 0' if a node is in it at once, else the node: one rank imports it."""
    choice, part = (loaded.by_rank(node) + [(None, None)])[0]
    return choice if part is node and rules.of_rank(choice, part) else node


def first(err: BaseException) -> str:
    """An error in one line, with its type."""
    lines = [line for line in str(err).strip().splitlines() if line.strip()] or ['']
    # a worker's error has its own traceback, whose last line is the error itself
    return '%s: %.500s' % (type(err).__name__, lines[-1] if 'Traceback' in str(err) else lines[0])
