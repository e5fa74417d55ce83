# SPDX-License-Identifier: GPL-2.0-only
"""A program's syntax trees: which conditions a call depends on, the text of an expression, files read and written."""
import ast
import contextlib
import functools
import os
import re
import warnings

from .kinds import Any, Iterable, Iterator, Mapping, Optional

# names in conditions that tell ranks apart
RANK = re.compile(r'rank|is_(main|master|primary|chief)|main_process|master|LOCALID|PROCID', re.I)
# options that name what a program writes
OUTPUT = re.compile(r'-o$|-{0,2}(\w+\.)*(out|save|log|ckpt|checkpoint|work_?dir|run_?dir|results?)[\w.-]*$', re.I)
# functions that write to their first text
WRITERS = ('savez', 'savetxt', 'save_pretrained', 'save_file', 'save_model', 'FileHandler', 'SummaryWriter', 'to_csv',
           'to_json', 'to_parquet', 'FileSystemWriter', 'CSVLogger', 'TensorBoardLogger')
FUNCTIONS, LOOPS = (ast.FunctionDef, ast.AsyncFunctionDef), (ast.For, ast.While)
LISTINGS = ('glob', 'iglob', 'rglob', 'listdir', 'scandir', 'iterdir')
# context managers in which one rank comes after the other
IN_TURN = re.compile(r'_first\b|file_?lock|\block|once|only', re.I)
# functions that read from their first argument, and modules that have these and others
READERS = ('open', 'load', 'loadtxt', 'read_csv', 'fromfile', 'memmap')
MODULES = ('torch', 'np', 'numpy', 'os', 'pd', 'io', 'glob')
# functions that give the path that they get, and the mark for an unknown part of a text
PATHS, UNKNOWN = ('str', 'fspath', 'resolve', 'absolute', 'abspath', 'realpath', 'normpath'), '\0'
# words of a command line that are examined at most; how deep names are followed
ARGUMENTS, DEEP = 50, 9
# how much of a large program is read: half a second; own modules, and bytes of each, at most
NODES, FILES, MOST = 50000, 60, 16 << 20


@functools.lru_cache(None)
def parse(text: bytes) -> 'ast.Module':
    """The text's syntax tree; Python's warnings about it are not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return ast.parse(text)


def read(path: str) -> bytes:
    """The text of a file. :raises OSError: it cannot be read"""
    with open(path, 'rb') as stream:
        return stream.read(MOST)


def imported(tree: 'ast.AST') -> 'Iterator[str]':
    """Names of all modules that a tree imports; 'from a import b' gives 'a' and 'a.b', since b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ''
            yield base
            yield from ('%s.%s' % (base, name.name) if base else name.name for name in node.names)


def named(node: 'Any') -> str:
    """The last word of a name: 'spawn' of mp.spawn; '' for another node."""
    return str(getattr(node, 'attr', getattr(node, 'id', '')))


def called(node: 'Any') -> str:
    """The last word of the called name: 'spawn' of mp.spawn(...); '' for another node."""
    return named(getattr(node, 'func', None))


def owner(node: 'Any') -> str:
    """The word before the last one of the called name: 'mp' of mp.spawn(...)."""
    return named(getattr(node.func, 'value', None))


def keywords(call: 'Any') -> dict:
    """The keyword arguments of a call: {name: expression}."""
    return {word.arg: word.value for word in call.keywords}


def literal(node: 'Any') -> 'Any':
    """The value of a constant, also of an index; None for anything else."""
    node = node.value if type(node).__name__ == 'Index' else node       # before Python 3.9
    return node.value if isinstance(node, ast.Constant) else None


def variable(node: 'Any') -> 'Optional[tuple]':
    """(name of the environment variable that an expression reads, its default)"""
    name, default = None, None     # type: Any, Any
    if isinstance(node, ast.Subscript) and named(node.value) == 'environ' and isinstance(node.ctx, ast.Load):
        name = literal(node.slice)
    elif called(node) == 'getenv' or called(node) == 'get' and owner(node) == 'environ':
        name, default = (list(map(literal, node.args[:1])) + [None])[0], (node.args + [None, None])[1]
    return (name, default) if isinstance(name, str) else None


def parent(path: str) -> str:
    """The directory of a path, with UNKNOWN if the path has it."""
    return os.path.dirname(path) + UNKNOWN if UNKNOWN in path else os.path.dirname(path) or '.'


def main_block(node: 'ast.AST') -> bool:
    """Whether a node is: if __name__ == '__main__'."""
    return isinstance(node, ast.If) and any(getattr(part, 'id', '') == '__name__' for part in ast.walk(node.test))


def arguments_of(words: list) -> list:
    """[(option or '', value)] of a command line, if its options are written in one of the usual ways."""
    found, option = [], ''
    for word in words[:ARGUMENTS]:
        key, equals, value = word.partition('=')
        if equals and re.match(r'-{0,2}[\w.-]+$', key):
            found.append((key, value))
        elif not word.startswith('-'):
            found.append((option, word))
        option = word if word.startswith('-') and not equals else ''
    return found


def own_modules(names: 'Iterable[str]', top: str, package: str) -> 'Iterator[str]':
    """Paths, relative to `top`, of those modules that are files there or in the package."""
    for name in sorted(names):
        for base in dict.fromkeys(('', package)) if re.match(r'[\w.]*$', name) else ():   # relative ones too
            place = os.path.join(base, *name.split('.'))
            for path in (place + '.py', os.path.join(place, '__init__.py')):
                if os.path.isfile(os.path.join(top, path)):
                    yield path


class Program:
    """
    Syntax trees of a program: which conditions a call depends on, and what the text of an expression is.

    :param files: {path: its text}, the script first
    :param given: the words of its command line
    :param top: directory that has the program's own modules, which are read, too; '': none
    :ivar wrong: {path: why it is not valid Python}
    :ivar values: {name: all expressions assigned to it}, {(path, name): those in this file}
    :ivar used: all names that the program reads
    :ivar names: {name: its calls}
    :ivar imports: names of modules
    """

    def __init__(self, files: dict, environ: 'Mapping[str, str]', given: list, script: str = '', top: str = '') -> None:
        self.files, self.environ, self.given, self.script = dict(files), environ, given, script
        self.arguments = arguments_of(given)
        self.world, self.local = (int(environ.get(name) or 1) for name in ('WORLD_SIZE', 'LOCAL_WORLD_SIZE'))
        self.several, self.gpus = self.world > self.local, False
        self.values, self.above, self.place = {}, {}, {}    # type: dict, dict, dict
        self.options, self.wrong = {}, {}   # type: dict, dict
        self.nodes, self.calls, self.used, self.imports = [], [], set(), set()  # type: list, list, set, set
        self.names = {}     # type: dict
        paths = list(files)
        for path in paths:      # which grow
            try:
                tree = parse(self.files[path])
            except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
                self.wrong[path] = err
                continue
            names = set(imported(tree))
            if len(self.nodes) <= NODES:    # what the script imports first is what decides
                self.imports |= names
                self.learn_file(tree, path)
            if path == paths[-1]:
                names.update(self.text(node.args[0])[0] for node in self.names.get('import_module', ()) if node.args)
            for found in own_modules(names, top, os.path.dirname(path)) if top else ():
                if found not in self.files and len(paths) < FILES:
                    paths.append(found)
                    self.files[found] = b''
                    with contextlib.suppress(OSError):
                        self.files[found] = read(os.path.join(top, found))

    def learn_file(self, tree: 'ast.AST', path: str) -> None:
        """Record the nodes of a file, and its options."""
        for node in ast.walk(tree):
            self.nodes.append(node)
            self.place[id(node)] = path
            for child in ast.iter_child_nodes(node):
                self.above[id(child)] = node
            self.learn(node, path)
            if isinstance(node, ast.Call):
                self.calls.append(node)
                self.names.setdefault(called(node), []).append(node)
        for call in self.names.get('add_argument', ()):
            self.learn_option(call)

    def learn(self, node: 'Any', path: str) -> None:
        """Record what a node assigns or reads."""
        value, targets = getattr(node, 'value', None), []  # type: Any, Any
        if isinstance(node, ast.Assign):
            # a dictionary has other values, too
            targets = node.targets if not isinstance(value, (ast.Dict, ast.DictComp)) else ()
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and value:
            # of a dataclass it is a default
            targets = [node.target] * (not isinstance(self.above.get(id(node)), ast.ClassDef))
        elif isinstance(node, (ast.For, ast.comprehension)):
            targets, value = [node.target], ast.Tuple([node.iter, node.iter], ast.Load())
        elif isinstance(node, ast.arg):
            targets, value = [ast.Name(node.arg, ast.Store())], node
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            self.used.add(named(node))
        for target in targets:
            for key in (named(target), (path, named(target))):
                self.values.setdefault(key, []).append(value)

    def learn_option(self, call: 'ast.Call') -> None:
        """Record the value of args.NAME for this option: from the command line, else its default."""
        names, words = [literal(part) for part in call.args if isinstance(literal(part), str)], keywords(call)
        dest = literal(words.get('dest')) or next((name.lstrip('-').replace('-', '_') for name in names
                                                  if name.startswith('--')), names[0].lstrip('-') if names else '')
        given = [value for option, value in self.arguments if option and option in names]
        self.options[dest] = ast.Constant(given[-1]) if given else words.get('default')

    def where(self, node: 'Any') -> str:
        """The line of a node, and its file if that is not the script."""
        path = self.place.get(id(node), '')
        return ('%s, ' % path if self.files and path != next(iter(self.files)) else '') + 'line %d' % node.lineno

    def around(self, node: 'ast.AST') -> 'Iterator[tuple]':
        """(enclosing node, its child that encloses `node` or is it), from the innermost."""
        while id(node) in self.above:
            yield self.above[id(node)], node
            node = self.above[id(node)]

    def function(self, node: 'ast.AST') -> 'ast.AST':
        """The function that encloses a node, else the module."""
        top = node
        for top, _ in self.around(node):
            if isinstance(top, FUNCTIONS):
                break
        return top

    def assigned(self, node: 'Any') -> list:
        """The expressions assigned to a name in its file, else anywhere."""
        name = named(node)
        return self.values.get((self.place.get(id(node)), name)) or self.values.get(name, [])

    def value(self, node: 'Any') -> 'Any':
        """The value of a constant, or of a name with only one value; else None."""
        known = self.assigned(node) if isinstance(node, (ast.Name, ast.Attribute)) else [node]
        return literal(known[0]) if known and len({literal(one) for one in known}) == 1 else None

    @functools.lru_cache(None)
    def words(self, node: 'Optional[ast.AST]', deep: int = 2) -> str:
        """
        The names and strings in an expression, and in what is assigned to these names; 'modulo' for this operation.
        """
        found = []
        for part in ast.walk(node) if node else ():
            name = getattr(part, 'id', getattr(part, 'attr', getattr(part, 'arg', getattr(part, 'value', ''))))
            found.append(name if isinstance(name, str) else '')
            # '%' of a string formats it
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and not isinstance(part.left, ast.Constant):
                found.append('modulo')
            if isinstance(part, (ast.Name, ast.Attribute)) and deep:
                found += [self.words(value, deep - 1) for value in self.assigned(part)]
        return ' '.join(filter(None, found))

    # --- the text of an expression

    def text(self, node: 'Any') -> tuple:
        """(the known beginning of the text or path that an expression gives, whether this is all of it)"""
        found, unknown, _ = self.known(node).partition(UNKNOWN)
        return found, not unknown

    def directory(self, node: 'Any') -> str:
        """The known part of a path: '/scratch' for f'/scratch/{name}.pt'."""
        found, whole = self.text(node)
        return found if whole else found.rpartition('/')[0]

    def known(self, node: 'Any', deep: int = DEEP) -> str:
        """The text or path that an expression gives, with UNKNOWN in place of what only running it would show."""
        if not deep or node is None:
            return UNKNOWN

        def of(part: 'Any') -> str:
            return self.known(part, deep - 1)

        read, text = variable(node), literal(node)
        if read:
            return self.environ[read[0]] if read[0] in self.environ else of(read[1])
        if isinstance(node, ast.Call):
            name, own, texts = called(node), of(getattr(node.func, 'value', None)), list(map(of, node.args))
            path = (texts + [own])[0]
            if name in ('join', 'Path', 'PurePath', 'joinpath') and texts:
                return os.path.join(*[own] * (name == 'joinpath'), *texts)
            if name == 'expanduser' and UNKNOWN not in path.partition('/')[0]:
                return os.path.expanduser(path)
            return parent(path) if name == 'dirname' else path if name in PATHS else UNKNOWN
        if isinstance(node, ast.JoinedStr):
            return ''.join(map(of, node.values))
        if isinstance(node, ast.FormattedValue) and not node.format_spec:
            return of(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Div)):
            texts = [of(node.left), of(node.right)]
            return os.path.join(*texts) if isinstance(node.op, ast.Div) else ''.join(texts)
        if isinstance(node, ast.Subscript) and named(node.value) == 'argv':
            number = literal(node.slice)
            return self.given[number - 1] if isinstance(number, int) and 0 < number <= len(self.given) else UNKNOWN
        if named(node) == '__file__':
            return os.path.join(os.path.dirname(os.path.realpath(self.script)), self.place.get(id(node), UNKNOWN))
        if isinstance(node, ast.Attribute) and node.attr in self.options and re.search(
                'arg|opt|cfg|conf|flag|param', named(node.value), re.I):
            return of(self.options[node.attr])
        if isinstance(node, ast.Attribute) and node.attr == 'parent':
            return parent(of(node.value))
        values = self.assigned(node) if isinstance(node, (ast.Name, ast.Attribute)) else []
        return of(values[0]) if len(values) == 1 else text if isinstance(text, str) else UNKNOWN

    # --- what decides about a call

    def reached(self, call: 'ast.AST') -> bool:
        """Whether a call is outside all functions, or in a function, or a method of a class, that something uses."""
        around = [node for node, _ in self.around(call) if isinstance(node, FUNCTIONS + (ast.ClassDef,))]
        return all(node.name in self.used or isinstance(above, ast.ClassDef) and (
            node.name.startswith('__') or re.search('forward|_step$|_dataloader$', node.name))
            for node, above in zip(around, around[1:] + [None]))

    def chosen(self, node: 'ast.AST', *more: type) -> bool:
        """Whether a condition decides about a node, beside main_block(), or nothing uses its function."""
        return not self.reached(node) or any(isinstance(above, (ast.If, ast.IfExp, ast.Try) + more) and
                                             not main_block(above) for above, _ in self.around(node))

    def certain(self, call: 'ast.AST', deep: int = 4) -> bool:
        """Whether the script itself comes to a call in any case."""
        top = self.function(call)
        if self.place.get(id(call)) != next(iter(self.files)) or self.chosen(call, ast.BoolOp, *LOOPS):
            return False
        if not isinstance(top, FUNCTIONS):
            return True
        callers = self.names.get(top.name, ())
        return deep > 0 and len(callers) == 1 and self.certain(callers[0], deep - 1) and not any(
            isinstance(node, ast.Return) and node.lineno < getattr(call, 'lineno', 0) for node in ast.walk(top))

    @functools.lru_cache(None)
    def optional(self, node: 'ast.AST') -> bool:
        """Whether the program may skip a node: in a try, or under a condition not about the rank or a given option."""
        for above, part in self.around(node):
            if isinstance(above, ast.Try) and part not in above.finalbody and part not in above.orelse:
                return True
            if isinstance(above, (ast.If, ast.IfExp, ast.BoolOp, ast.While)) and not main_block(above):
                words = self.words(getattr(above, 'test', above), 1)
                given = {option.lstrip('-').replace('-', '_') for option, _ in self.arguments if option}
                if not RANK.search(words) and not given & set(words.split()):
                    return True
        return not self.reached(node)

    def without_gradients(self, node: 'ast.AST') -> bool:
        """Whether a node is no part of the training: within no_grad(), or in a function for something else."""
        return any(re.search(r'no_grad|inference_mode', self.contexts(above)) or isinstance(above, FUNCTIONS) and (
            re.search('eval|val|test|infer|generate|sample|predict|save|load|export', above.name, re.I) or
            any(re.search('no_grad|inference', self.words(one, 0)) for one in above.decorator_list))
            for above, _ in self.around(node))

    def contexts(self, node: 'Any') -> str:
        """The words of a with statement's context managers."""
        return ' '.join(self.words(item.context_expr, 0) for item in getattr(node, 'items', ()))

    @functools.lru_cache(None)
    def for_one_rank(self, call: 'ast.AST', deep: int = 3) -> bool:
        """Whether a call depends on a condition, a context manager or a decorator about ranks, as the syntax shows."""
        for node, part in self.around(call):
            test = getattr(node, 'test', None)
            if isinstance(node, (ast.If, ast.IfExp, ast.BoolOp)) and part is not test and RANK.search(
                    self.words(test or node)) or IN_TURN.search(self.contexts(node)):
                return True
            if isinstance(node, FUNCTIONS):
                if any(RANK.search(self.words(one)) for one in node.decorator_list) or any(
                        isinstance(one, ast.If) and RANK.search(self.words(one.test)) and
                        isinstance(one.body[-1], (ast.Return, ast.Raise)) for one in node.body):
                    return True
                callers = self.names.get(node.name, ())
                return not callers or not deep or all(self.for_one_rank(other, deep - 1) for other in callers)
        return False

    @functools.lru_cache(None)
    def zero(self, node: 'ast.AST') -> bool:
        """Whether a node is a condition that is true only on rank 0, or only on all others."""
        test = getattr(node, 'test', None) if isinstance(node, ast.If) else None     # type: Any
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
            return bool(RANK.search(self.words(test.left, 0))) and literal(test.comparators[0]) == 0
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test = test.operand
        name = called(test) or named(test)
        return bool(re.match(r'_?((local_|global_)?rank$|is_(main|master|chief|rank)|main_process)', name, re.I))

    def one_branch(self, call: 'ast.Call', names: tuple) -> bool:
        """
        Whether only rank 0 makes a call, or only the others, and no other branch of the function makes a call of one of
        these names; or whether some ranks have left the function before.
        """
        around, top = list(self.around(call)), self.function(call)
        zero = [node for node in ast.walk(top) if self.zero(node)]  # type: Any
        outside = [node for node in zero if all(node is not above for above, _ in around)]
        if any(self.function(node) is top and node.lineno < call.lineno and (
                isinstance(node.body[-1], ast.Return) or
                called(getattr(node.body[-1], 'value', None)) in ('exit', '_exit')) for node in outside):
            return True
        if not any(above in zero and part is not above.test for above, part in around):
            return False
        return sum(isinstance(node, ast.Call) and called(node) in names and any(
            above in zero for above, _ in self.around(node)) for node in ast.walk(top)) == 1

    def gpu_numbers(self) -> 'Iterator[ast.AST]':
        """Expressions with the number of the GPU that a rank takes: in set_device(), device_ids and 'cuda:%d'."""
        for node in self.nodes:
            if called(node) in ('set_device', 'set_device_index', 'cuda') and isinstance(node.func, ast.Attribute):
                yield from node.args[:1]
            elif isinstance(node, ast.keyword) and node.arg == 'device_ids' and isinstance(node.value, ast.List):
                yield node.value
            elif isinstance(node, (ast.JoinedStr, ast.BinOp)) or called(node) == 'format':  # 'cuda:%d', f'{acc}:{rank}'
                texts = [str(getattr(part, 'id', getattr(part, 'value', ''))) for part in ast.walk(node)]
                if any(re.match(r'(cuda)?:(%[ds]|\{\})?$', text) for text in texts) and any(
                        re.match('cuda:|acc|dev', text) for text in texts):
                    yield node

    # --- files

    def paths(self) -> tuple:
        """
        ({path that the program writes to: option or line}, {directory that it makes: the call}, paths that it reads or
        names); of a path to write or make, it may be only the known part.
        """
        written = {value: option for option, value in self.arguments
                   if OUTPUT.match(option) and ('/' in value or os.path.isdir(value))}
        made, read = {}, set()  # type: dict, set
        for name, default in self.options.items():
            if OUTPUT.match(name) and id(default) in self.place and '/' in self.directory(default):
                written.setdefault(self.directory(default), self.where(default))
        for node in self.nodes:
            value, name = literal(node), called(node)
            if isinstance(value, str) and re.match(r'(/|\.{0,2}/?[\w-]+/)[\w./ -]+$', value):
                read.add(value)
            if not isinstance(node, ast.Call) or name in ('print', 'add_argument', 'join', 'Path'):
                continue
            words = keywords(node)
            method = isinstance(node.func, ast.Attribute) and owner(node) not in MODULES
            at = [getattr(node.func, 'value', None)] if method else node.args[:1]   # type: Any
            writes = bool(re.search('[wax+]', str(literal(words.get('mode', (node.args + [None, None])[1])))))
            if name in WRITERS or name == 'save' and not method:
                at, writes = node.args + list(words.values()), True
            if re.match('(make|mk)_?dirs?$', name):
                made[self.directory(at[0]) if at else ''] = node
            elif name in WRITERS + ('write_text', 'write_bytes') or name in ('open', 'save') and not method and writes:
                written.setdefault(next(filter(None, map(self.directory, at)), ''), self.where(node))
            elif name in READERS and not method or name in LISTINGS + ('read_text', 'read_bytes'):
                read.update(path for path, whole in map(self.text, at) if whole)
            texts = [self.text(part) for part in node.args if not isinstance(part, ast.Constant)]
            read.update(path for path, whole in texts if whole and '/' in path)
        return tuple({path.rstrip('/') or path: what for path, what in paths.items() if (path or paths is made)
                      and not re.match('/(dev|proc|sys)/', path) and '://' not in path and '\n' not in path}
                     for paths in (written, made, dict.fromkeys(re.split(r'[^/]*[*?\[]', path)[0] for path in read)))

    def late(self) -> 'Iterator[tuple]':
        """Modules that the program imports later, in functions or conditions: (node, statements that import it)."""
        for node in self.nodes:
            code = []   # type: list
            if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, 'level', 0):
                code = [node] * any(isinstance(one, FUNCTIONS + (ast.If,)) for one, _ in self.around(node))
            elif called(node) == 'import_module' and len(node.args) == 1 and self.text(node.args[0])[1]:
                code = ast.parse('import importlib\nimportlib.import_module(%r)' % self.text(node.args[0])[0]).body
            if code and not self.optional(node):
                yield node, code

    def variables(self) -> list:
        """The environment variables that the program reads."""
        return sorted({read[0] for read in map(variable, self.nodes) if read})
