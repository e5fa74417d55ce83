# SPDX-License-Identifier: GPL-2.0-only
"""
What Python will run, looked at without running it: the script, its own modules, the paths among its arguments, and what
its syntax tree says of ranks, GPUs and data. What differs between nodes is found by rank 0.
"""
import ast
import functools
import hashlib
import importlib.util
import os
import re
import sys
import warnings
from importlib.machinery import PathFinder

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Iterator, Mapping, Optional

    from .findings import Report

# bytes of a program, and of the beginning and the end of a file that is compared
MOST, ENDS = 16 << 20, 64 << 10
# what tells ranks apart; operations that need all of them
RANK = re.compile(r'rank|is_(main|master|primary|chief)|main_process|master|LOCALID|PROCID', re.I)
COLLECTIVES = ('barrier', 'all_reduce', 'all_gather', 'broadcast', 'reduce_scatter', 'all_to_all', 'all_gather_object',
               'broadcast_object_list', 'all_gather_into_tensor', 'reduce_scatter_tensor', 'monitored_barrier')
# own modules that are looked at, arguments, and entries of a directory
FILES, ARGUMENTS, LISTED = 200, 50, 20000
# options that name what a program writes, and functions that write to their first text
OUTPUT = re.compile(r'-o$|-{0,2}(\w+\.)*(out|save|log|ckpt|checkpoint|work_?dir|run_?dir|results?)[\w.-]*$', re.I)
INPUT = re.compile(r'-{0,2}(\w+\.)*(data|input|conf|cfg|resume|load|train|val|test|eval|vocab|token|model|init)', re.I)
WRITERS = ('savez', 'savetxt', 'save_pretrained', 'save_file', 'save_model', 'FileHandler', 'SummaryWriter', 'to_csv',
           'to_json', 'to_parquet', 'FileSystemWriter', 'CSVLogger', 'TensorBoardLogger')


def program_of(words: list) -> tuple:
    """('script' or 'module', its name) of what follows python: options as python(1) has them; ('', '') without."""
    words = list(words)
    while words:
        word = words.pop(0)
        if word == '-c' or word == '-':
            return '', ''
        if word == '-m':
            return 'module', words[0] if words else ''
        if word in ('-W', '-X', '--check-hash-based-pycs'):
            words = words[1:]
        elif word.startswith('-m') and len(word) > 2:
            return 'module', word[2:]
        elif not word.startswith('-'):
            return 'script', word
    return '', ''


def isolated(words: list) -> bool:
    """Whether Python is told to take no module from the script's directory: -I, -P."""
    before = words[:words.index(program_of(words)[1])] if program_of(words)[1] in words else []
    return any(re.match('-[a-zA-Z]*[IP]', word) for word in before)


@functools.lru_cache(None)
def parse(text: bytes) -> 'ast.Module':
    """Its syntax tree, without a word on what Python only warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return ast.parse(text)


def parsed(text: bytes) -> 'Optional[ast.AST]':
    """Its syntax tree; None of one that is not Python."""
    try:
        return parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def imported(tree: 'ast.AST') -> 'Iterator[str]':
    """Names of the modules that it imports anywhere: 'a.b', also where 'from a import b' may mean a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ''
            yield base
            yield from ('%s.%s' % (base, name.name) if base else name.name for name in node.names)


def read(path: str) -> bytes:
    """The text of a file. :raises OSError: it cannot be read"""
    with open(path, 'rb') as stream:
        return stream.read(MOST)


def files_of_program(script: str, text: bytes) -> dict:
    """{path below the script's directory: text} of the script and of its own modules, as far as they are there."""
    top = os.path.dirname(os.path.realpath(script))
    found, waiting = {os.path.basename(script): text}, [('', text)]
    while waiting and len(found) < FILES:
        package, text = waiting.pop()
        tree = parsed(text)
        for name in imported(tree) if tree else ():
            for base in {'', package}:      # relative ones too
                place = os.path.join(base, *name.split('.'))
                for path in (place + '.py', os.path.join(place, '__init__.py')):
                    if path not in found and os.path.isfile(os.path.join(top, path)):
                        try:
                            found[path] = read(os.path.join(top, path))
                        except OSError:
                            found[path] = b''
                        waiting.append((os.path.dirname(path), found[path]))
    return found


def called(node: 'ast.AST') -> str:
    """The last word of what is called: 'spawn' of mp.spawn(...); '' of another node."""
    function = getattr(node, 'func', None)
    return str(getattr(function, 'attr', getattr(function, 'id', '')))


def owner(node: 'ast.Call') -> str:
    """What stands before the last word of what is called: 'mp' of mp.spawn(...)."""
    before = getattr(node.func, 'value', None)
    return str(getattr(before, 'attr', getattr(before, 'id', '')))


class Program:
    """
    Syntax trees, asked for what decides about a call.

    :ivar values: {name: all expressions that are assigned to it}
    """

    def __init__(self, trees: list) -> None:
        self.nodes = [node for tree in trees for node in ast.walk(tree)]    # type: list
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.names = {called(node) for node in self.calls}
        self.values, self.above = {}, {}    # type: dict, dict
        for node in self.nodes:
            self.above.update((id(child), node) for child in ast.iter_child_nodes(node))
            # a table holds what is asked for among others
            for target in node.targets if isinstance(node, ast.Assign) and not isinstance(node.value, (
                    ast.Dict, ast.DictComp)) else ():
                self.values.setdefault(getattr(target, 'id', getattr(target, 'attr', '')), []).append(node.value)

    def around(self, node: 'ast.AST') -> 'Iterator[tuple]':
        """(what it is in, the part of that in which it is), from the inside."""
        while id(node) in self.above:
            yield self.above[id(node)], node
            node = self.above[id(node)]

    def words(self, node: 'Optional[ast.AST]', deep: int = 2) -> str:
        """
        The names and texts of an expression, and of what is assigned to these names; 'modulo' for this operation.
        """
        found = []
        for part in ast.walk(node) if node else ():
            name = getattr(part, 'id', getattr(part, 'attr', getattr(part, 'arg', getattr(part, 'value', ''))))
            found.append(name if isinstance(name, str) else '')
            # but '%' of a text
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and not isinstance(part.left, ast.Constant):
                found.append('modulo')
            if isinstance(part, (ast.Name, ast.Attribute)) and deep:
                found += [self.words(value, deep - 1) for value in self.values.get(name, ())]
        return ' '.join(filter(None, found))

    def takes_local(self) -> bool:
        """Whether it takes the GPU with the number of its local rank, without a look at how many it sees."""
        def local(node: 'ast.AST') -> bool:
            words = self.words(node)
            return bool(re.search(r'local_?(rank|id\b)', words, re.I)) and not re.search('device_count|modulo', words)

        for node in self.nodes:
            if called(node) in ('set_device', 'set_device_index') and isinstance(node.func, ast.Attribute):
                if node.args and local(node.args[0]):
                    return True
            elif isinstance(node, ast.keyword):
                if node.arg == 'device_ids' and isinstance(node.value, ast.List) and local(node.value):
                    return True
            elif (isinstance(node, (ast.JoinedStr, ast.BinOp)) or called(node) == 'format') and local(node):
                # 'cuda:%d', f'{acc}:{rank}'
                words = [str(getattr(part, 'id', getattr(part, 'value', ''))) for part in ast.walk(node)]
                if any(re.match(r'(cuda)?:(%[ds]|\{\})?$', word) for word in words) and any(
                        re.match('cuda:|acc|dev', word) for word in words):
                    return True
        return False

    def reached(self, call: 'ast.AST') -> bool:
        """Whether it stands in no function, or in one that something calls."""
        return all(node.name in self.names for node, _ in self.around(call) if isinstance(node, ast.FunctionDef))

    def for_one_rank(self, call: 'ast.AST', deep: int = 3) -> bool:
        """Whether a condition or a decorator that has to do with ranks decides about a call, as far as is seen here."""
        for node, part in self.around(call):
            if isinstance(node, (ast.If, ast.IfExp, ast.BoolOp)) and RANK.search(
                    self.words(getattr(node, 'test', node))) and part is not getattr(node, 'test', None):
                return True
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if any(RANK.search(self.words(one)) for one in node.decorator_list) or any(
                        isinstance(one, ast.If) and RANK.search(self.words(one.test)) and
                        isinstance(one.body[-1], (ast.Return, ast.Raise)) for one in node.body):
                    return True
                callers = [other for other in self.calls if called(other) == node.name]
                return not callers or not deep or all(self.for_one_rank(other, deep - 1) for other in callers)
        return False

    def one_branch(self, call: 'ast.Call') -> bool:
        """Whether rank 0 alone does it, or all others, and no other branch of the function does the same."""
        def zero(node: 'ast.AST') -> bool:
            return isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and bool(
                RANK.search(self.words(node.test.left, 0))) and isinstance(node.test.ops[0], (ast.Eq, ast.NotEq)) and \
                getattr(node.test.comparators[0], 'value', None) == 0

        around = list(self.around(call))
        if not any(zero(node) and part is not node.test for node, part in around):
            return False
        top = next((node for node, _ in around if isinstance(node, ast.FunctionDef)), around[-1][0])
        return sum(isinstance(node, ast.Call) and called(node) == called(call) and any(zero(one) for one, _ in
                   self.around(node)) for node in ast.walk(top)) == 1


def gpu_of_program(texts: list) -> str:
    """
    Which GPU a program takes: 'local' for that with the number of its local rank, '0' for the first one in all ranks,
    '' where it does not say so itself: frameworks choose the GPU.

    :param texts: of the script first, then of its own modules
    """
    trees = [tree for tree in map(parsed, texts) if tree]
    if any(Program([tree]).takes_local() for tree in trees):
        return 'local'
    script, text = texts[0], b''.join(texts)
    if b'init_process_group' not in script or re.search(
            b'local_?rank|LOCALID|accelerate|lightning|deepspeed|transformers', script, re.I) or re.search(
            b'set_device|VISIBLE_DEVICES', text):
        return ''
    return '0' if re.search(rb'"cuda(:0)?"|\'cuda(:0)?\'|\.cuda\(\)|device_ids *= *\[0\]', script) else ''


def check_layout(report: 'Report', texts: list, gpus: 'Optional[list]', local_world: int) -> None:
    """What the script takes for its GPU, against what the first rank of the node sees."""
    takes = gpu_of_program(texts)
    if not gpus or local_world < 2 or not takes:
        return
    if takes == 'local' and local_world > len(gpus):
        report.add('yellow', 'gpus', "the script takes the GPU with the number of its local rank, and each of the %d "
                   "ranks of this node sees %d ('invalid device ordinal')" % (local_world, len(gpus)),
                   "let each rank see all GPUs: srun --gpus-per-node=N in place of --gpus-per-task=1, and no "
                   "SLINGTORCH_GPU_VISIBILITY")
    if takes == '0' and len(gpus) > 1:
        report.add('yellow', 'gpus', "the script takes GPU 0 in each rank, and the ranks of this node see the same %d"
                   % len(gpus), "let each rank see one: srun --gpus-per-task=1; or torch.cuda.set_device(LOCAL_RANK)")


def main_block(node: 'ast.AST') -> bool:
    """Whether it is: if __name__ == '__main__'."""
    return isinstance(node, ast.If) and any(getattr(part, 'id', '') == '__name__' for part in ast.walk(node.test))


def compiles(node: 'ast.AST') -> bool:
    """Whether it is torch.compile, also as a decorator, or model.compile(). An eager backend needs no compiler."""
    if isinstance(node, ast.Call) and called(node) == 'compile' and isinstance(node.func, ast.Attribute):
        return not node.args and owner(node) != 'torch' or owner(node) == 'torch' and not any(
            word.arg == 'backend' and 'eager' in str(getattr(word.value, 'value', '')) for word in node.keywords)
    return any(isinstance(one, ast.Attribute) and one.attr == 'compile' and getattr(one.value, 'id', '') == 'torch'
               for one in getattr(node, 'decorator_list', ()))


def check_group(report: 'Report', program: 'Program', call: 'ast.Call', environ: 'Mapping[str, str]') -> None:
    """An init_process_group() that is always called: what it says itself of ranks and of where they meet."""
    words, line = {word.arg: word.value for word in call.keywords}, call.lineno     # type: dict, int
    world, several = int(environ.get('WORLD_SIZE') or 1), more_nodes(environ)
    rank = getattr(words.get('rank'), 'value', None)
    if type(rank) is int and rank >= 0 and world > 1:
        report.add('red', 'program', "line %d: init_process_group(rank=%d) in each of the %d ranks" % (
            line, rank, world), "leave rank out: it comes from RANK")
    if several and re.search('local_?rank|LOCALID', program.words(words.get('rank')), re.I):
        report.add('yellow', 'program', "line %d: init_process_group() takes the number on the node for the rank"
                   % line, "leave rank out: it comes from RANK")
    method = getattr(words.get('init_method'), 'value', None)
    if not several or not isinstance(method, str):
        return
    host = re.match(r'tcp://(\[[^]]*\]|[^:/]*)', method)
    if method.startswith('file:'):
        report.add('yellow', 'program', "line %d: init_method='%s': a file on a file system that all nodes must "
                   "share, whose locks work, and that no earlier job has left" % (line, method), "leave it out")
    elif host and host.group(1) != environ.get('MASTER_ADDR'):
        own = re.match(r'(localhost|127\.[\d.]*|\[::1\])$', host.group(1))
        report.add('red' if own else 'yellow', 'program', "line %d: init_method='%s', which %s, and this job has "
                   "MASTER_ADDR=%s" % (line, method, 'is each node itself' if own else 'names a node',
                                       environ.get('MASTER_ADDR')), "leave init_method out: env:// takes MASTER_ADDR")


def more_nodes(environ: 'Mapping[str, str]') -> bool:
    """Whether the job has several."""
    return int(environ.get('WORLD_SIZE') or 1) > int(environ.get('LOCAL_WORLD_SIZE') or 1)


def check_ways(report: 'Report', program: 'Program', script: 'ast.AST', several: bool) -> None:
    """
    What goes well on one rank or on one node alone.

    :param script: the tree of the script itself
    :param several: whether the job has several nodes
    """
    for call in program.calls if 'init_process_group' in program.names else ():
        words = {word.arg: word.value for word in call.keywords}    # type: dict
        name, line = called(call), call.lineno
        if name == 'save' and owner(call) == 'torch' and len(call.args) > 1 and not program.for_one_rank(call) and \
                not re.search('rank|pid|host|uuid|LOCALID', program.words(call.args[1]), re.I):
            report.add('yellow', 'program', "line %d: all ranks write one file by torch.save()" % line,
                       "if dist.get_rank() == 0: torch.save(...)")
        if name == 'DistributedSampler' and re.search('rank|time|pid|rand', program.words(words.get('seed')), re.I):
            report.add('yellow', 'program', "line %d: the seed of DistributedSampler is not the same on all ranks: "
                       "their parts of the data overlap" % line, "leave seed out, or give all ranks one number")
        if name in COLLECTIVES and owner(call) in ('dist', 'distributed') and 'group' not in words and \
                program.one_branch(call):
            report.add('yellow', 'program', "line %d: %s() where some ranks alone come: these wait for the others" % (
                line, name), "have all ranks call it")
        places = call.args[:1] if name in ('set_device', 'set_device_index', 'cuda') else getattr(
            words.get('device_ids'), 'elts', [])
        if several and any(re.search(r'\b(RANK|SLURM_PROCID|get_rank)\b', program.words(place)) and not re.search(
                'device_count|local|modulo', program.words(place), re.I) for place in places):
            report.add('yellow', 'program', "line %d takes the GPU with the number of the rank, and a node has fewer "
                       "GPUs than the job has ranks" % line, "take LOCAL_RANK")
    spawns = [node.value for node in program.nodes if isinstance(node, ast.Constant)
              and node.value in ('spawn', 'forkserver') and any(
                  called(one) in ('set_start_method', 'get_context', 'DataLoader') for one, _ in program.around(node))]
    if spawns and not any(map(main_block, ast.walk(script))):
        report.add('yellow', 'program', "processes are started by %s, and the script has no if __name__ == '__main__': "
                   "each of them runs all of it again" % spawns[0], "put what is not a definition under this condition")


def check_calls(report: 'Report', trees: list, environ: 'Mapping[str, str]', gpus: bool) -> None:
    """What the program says of ranks and data that does not go with this job."""
    program, world = Program(trees), int(environ.get('WORLD_SIZE') or 1)
    nodes, calls, names = program.nodes, program.calls, program.names
    if trees:
        check_ways(report, program, trees[0], more_nodes(environ))
    constant = constants(nodes)

    def value(node: 'Optional[ast.AST]') -> object:
        """Of a constant, or of a name that has one value alone."""
        values = constant.get(getattr(node, 'id', None), ())
        return node.value if isinstance(node, ast.Constant) else next(iter(values)) if len(values) == 1 else None

    # one of several, or one that depends on something, need not be what this job calls
    chosen = {id(part) for node in nodes if isinstance(node, (ast.If, ast.IfExp, ast.Try))
              for part in ast.walk(node) if not main_block(node)}
    only = sum(called(node) == 'init_process_group' for node in calls) == 1
    for node in calls:
        words = {word.arg: word.value for word in node.keywords}
        if called(node) == 'init_process_group' and only and id(node) not in chosen and program.reached(node) and not (
                'store' in words or value(words.get('backend', (node.args + [None])[0])) == 'fake'):
            size = value(words.get('world_size'))
            backend = value(words.get('backend', node.args[0] if node.args else None))
            check_group(report, program, node, environ)
            if isinstance(size, int) and size > 0 and size != world:
                report.add('red', 'program', "line %d: init_process_group(world_size=%d), and this job has %d ranks" % (
                    node.lineno, size, world), "leave world_size and rank out: they come from WORLD_SIZE and RANK")
            if backend == 'nccl' and not gpus:
                report.add('red', 'program', "line %d: init_process_group('nccl'), and this rank sees no GPU"
                           % node.lineno, "ask for GPUs, or take 'gloo' where torch.cuda.is_available() says no")
        if called(node) == 'spawn' and owner(node) in ('mp', 'multiprocessing') and int(
                environ.get('LOCAL_WORLD_SIZE') or 1) > 1:
            report.add('yellow', 'program', "line %d: spawn() starts processes, and the launcher has started %s ranks "
                       "on this node: each of them starts as many again" % (node.lineno, environ['LOCAL_WORLD_SIZE']),
                       "one task per node (srun --ntasks-per-node=1), or no spawn()")
        if called(node) == 'DistributedSampler' and 'set_epoch' not in names and not (
                value(words.get('shuffle')) is False):
            report.add('yellow', 'program', "line %d: DistributedSampler without set_epoch(): each epoch has the same "
                       "order" % node.lineno, "call sampler.set_epoch(epoch) at the beginning of each")
    if world > 1 and 'DistributedDataParallel' in names | {'DistributedDataParallel' * ('DDP' in names)} and \
            'DataLoader' in names and not any('sampler' in (word.arg or '') for node in calls
                                              if called(node) == 'DataLoader' for word in node.keywords) \
            and 'IterableDataset' not in {getattr(node, 'attr', getattr(node, 'id', '')) for node in nodes}:
        report.add('yellow', 'program', "DistributedDataParallel, and a DataLoader without a sampler: all ranks train "
                   "on the same data", "DataLoader(..., sampler=DistributedSampler(dataset))")
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                key = value(getattr(target, 'slice', None))
                if key in ('MASTER_ADDR', 'MASTER_PORT') and str(node.value.value) != environ.get(str(key)):
                    report.add('yellow', 'program', "line %d sets %s='%s', and this job has %s" % (
                        node.lineno, key, node.value.value, environ.get(str(key))),
                        "take the line out: conda-python-distributed sets it")
        elif isinstance(node, ast.Assign):
            names_of = {getattr(target, 'id', '') for target in node.targets}
            if names_of & {'rank', 'world_rank', 'global_rank'} and world > int(
                    environ.get('LOCAL_WORLD_SIZE') or 1) and any(
                    isinstance(part, ast.Constant) and part.value in ('SLURM_LOCALID', 'LOCAL_RANK')
                    for part in ast.walk(node.value)):
                report.add('yellow', 'program', "line %d takes the number on the node for the rank" % node.lineno,
                           "take RANK from the environment")


def look_at_program(report: 'Report', words: list, details: dict, environ: 'Mapping[str, str]') -> None:
    """
    Whether the script or module is there, what it says of ranks, and which GPU it takes; what differs between nodes is
    found by rank 0.

    :param details: of look.look(): the GPUs that this rank sees
    """
    kind, name = program_of(words)
    if kind == 'module':
        top = name.partition('.')[0]
        try:
            spec = PathFinder.find_spec(top, ['']) or importlib.util.find_spec(top)     # '': the working directory
        except (ImportError, ValueError, OSError):
            return      # the import says so
        if spec is None:
            report.add('red', 'script', "python -m %s: this node finds no such module" % name,
                       "start in its directory, or install it in this environment")
        return
    if not name or os.path.isdir(name):
        return
    try:
        text = read(name)
    except OSError as err:
        report.add('red', 'script', "the script %s cannot be read on this node (%s)" % (name, err.strerror),
                   "put it on a file system that all nodes have")
        return
    if not text.strip():
        report.add('red', 'script', "the script %s is empty on this node" % name, "see which copy each node has")
        return
    files, trees = files_of_program(name, text), []
    for path, content in files.items():
        report.fact('file %s' % (name if path == os.path.basename(name) else path),
                    hashlib.sha256(content).hexdigest()[:12])
        try:
            trees.append(parse(content))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
            report.add('red', 'script', "%s is not Python that %s understands: line %s: %s" % (
                path, 'this release (%d.%d)' % sys.version_info[:2], getattr(err, 'lineno', '?'),
                getattr(err, 'msg', err)), "python -m py_compile %s shows the place" % path)
    check_layout(report, list(files.values()), details.get('gpus'), int(environ.get('LOCAL_WORLD_SIZE') or 1))
    check_calls(report, trees, environ, bool(details.get('gpus')))
    nodes = [node for tree in trees for node in ast.walk(tree)]     # type: list
    details['written'] = outputs(words, trees)
    details['makes'] = any(re.match('(make|mk)_?dirs?$', called(node)) for node in nodes)
    look_at_paths(report, 'named', named_paths(trees, set(details['written'])))
    details['mpi'] = any(re.search(b'mpi4py|horovod|slingmpi', content) for content in files.values())
    details['compiles'] = any(map(compiles, nodes))
    details['workers'] = any(called(node) == 'DataLoader' and any(
        word.arg == 'num_workers' and getattr(word.value, 'value', 1) != 0 for word in node.keywords) for node in nodes)


def arguments_of(words: list) -> list:
    """[(option or '', value)] of the script, as far as options are written in one of the usual ways."""
    name, found, option = program_of(words)[1], [], ''
    for word in words[words.index(name) + 1:][:ARGUMENTS] if name in words else ():
        key, equals, value = word.partition('=')
        if equals and re.match(r'-{0,2}[\w.-]+$', key):
            found.append((key, value))
        elif not word.startswith('-'):
            found.append((option, word))
        option = word if word.startswith('-') and not equals else ''
    return found


def leading(node: 'Optional[ast.AST]', constant: dict) -> str:
    """The path that an expression begins with, as far as it is literal: '/scratch' of f'/scratch/{name}.pt'."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name) and len(constant.get(node.id, ())) == 1:
        return leading(ast.Constant(next(iter(constant[node.id]))), {})
    if isinstance(node, ast.JoinedStr) and node.values:
        return leading(node.values[0], {}).rpartition('/')[0]
    if isinstance(node, ast.BinOp):
        more = leading(node.right, constant) if isinstance(node.op, (ast.Add, ast.Div)) else ''
        first = leading(node.left, constant)
        return (os.path.join(first, more) if isinstance(node.op, ast.Div) else first + more) if more else \
            first if isinstance(node.op, ast.Div) else first.rpartition('/')[0]
    if isinstance(node, ast.Call) and called(node) in ('join', 'Path') and node.args:
        parts = [leading(part, constant) for part in node.args]
        return os.path.join(*parts[:(parts + ['']).index('')] or [''])
    return ''


def constants(nodes: list) -> dict:
    """{name: all values of constants that are given to it}"""
    found = {}  # type: dict
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                found.setdefault(getattr(target, 'id', ''), set()).add(node.value.value)
    return found


def outputs(words: list, trees: list) -> dict:
    """{path that the program writes to: what says so}: arguments, defaults of its options, and calls that write."""
    given, found = arguments_of(words), {}
    for option, value in given:
        if OUTPUT.match(option) and ('/' in value or os.path.isdir(value)) and '://' not in value:
            found[value] = option
    nodes = [node for tree in trees for node in ast.walk(tree)]
    constant = constants(nodes)
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        texts, name, path = [leading(part, constant) for part in node.args], called(node), ''
        keywords = {word.arg: word.value for word in node.keywords}
        if name == 'open' and re.search('[wax+]', (texts + ['', ''])[1] or leading(keywords.get('mode'), constant)):
            path = texts[0]
        elif name in WRITERS or name == 'save' and owner(node) in ('torch', 'np', 'numpy'):
            path = next(filter(None, texts + [leading(word, constant) for word in keywords.values()]), '')
        elif name in ('write_text', 'write_bytes') and isinstance(node.func, ast.Attribute):
            path = leading(node.func.value, constant)
        elif name == 'add_argument' and any(map(OUTPUT.match, texts)) and not set(texts) & set(dict(given)):
            path = leading(keywords.get('default'), constant)
            path = path if '/' in path else ''
        if path and '://' not in path and not path.startswith(('/dev/', '/proc/')):
            found.setdefault(path, 'line %d' % node.lineno)
    return found


def named_paths(trees: list, written: set) -> list:
    """Paths that stand in the text of the program, without those that it writes to."""
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)
             and isinstance(node.value, str) and re.match(r'(/|\.{0,2}/?[\w-]+/)[\w./ -]+$', node.value)
             and not node.value.startswith(('/dev/', '/proc/', '/sys/'))}
    return sorted(path for path in texts - written if os.path.isabs(path) or '.' in os.path.basename(path) or
                  os.path.exists(path))[:ARGUMENTS]


def look_at_arguments(report: 'Report', words: list) -> None:
    """The paths among the arguments of the script."""
    paths = [(option, value) for option, value in arguments_of(words)
             if value and '://' not in value and not OUTPUT.match(option)]
    look_at_paths(report, 'argument', [value for _, value in paths])
    for option, value in paths:
        # what else is not there may be a name, a pattern, or what the program makes
        if INPUT.match(option) and re.match(r'\.{0,2}/[^*?{]*$', value) and not os.path.lexists(value):
            report.add('yellow', 'script', "%s: %s is not there on this node" % (option, value),
                       "correct the path, or put it on a file system that all nodes have")


def listing(directory: str) -> str:
    """What is in a directory, for a comparison: names, and sizes of files; without what is written meanwhile."""
    found = []  # type: list
    with os.scandir(directory) as entries:
        for entry in entries:
            if len(found) < LISTED and not re.match(r'\.|tmp|.*\.(out|err|log|part|pyc)$|__pycache__$', entry.name):
                found.append('%s %s' % (entry.name, entry.stat().st_size if entry.is_file() else '/'))
    return 'a directory of %d, %s' % (len(found), hashlib.sha256('\0'.join(sorted(found)).encode(
        errors='replace')).hexdigest()[:12])


def look_at_paths(report: 'Report', kind: str, paths: list) -> None:
    """What is there: sizes, beginnings and ends of files, names and sizes of a directory's entries are compared."""
    for path in paths:
        try:
            size = os.stat(path).st_size
            found = 'something else'
            if os.path.isdir(path):
                found = listing(path)
            elif os.path.isfile(path):
                with open(path, 'rb') as stream:
                    digest = hashlib.sha256(stream.read(ENDS))
                    stream.seek(max(0, size - ENDS))
                    digest.update(stream.read(ENDS))
                found = '%d bytes, %s' % (size, digest.hexdigest()[:12])
        except (OSError, ValueError) as err:
            found = getattr(err, 'strerror', None) or 'no path'
        report.fact('%s %s' % (kind, path[:200]), found)


def compare_programs(report: 'Report') -> None:
    """Scripts, own modules and files among the arguments that not all nodes have alike."""
    looked = 0
    for name, values in report.facts.items():
        if name.startswith('file '):
            for mask in values.values():
                looked |= mask
    for fact, values in sorted(report.facts.items()):
        kind, _, name = fact.partition(' ')
        there = sum(values.values())
        fewest = min(values.values(), key=lambda mask: bin(mask).count('1'))
        if kind == 'file' and (len(values) > 1 or looked & ~there):
            report.add('red', 'script', "nodes have different copies of %s" % name if len(values) > 1 else
                       "these nodes lack %s, which others have" % name, "put it on a file system that all nodes have",
                       fewest if len(values) > 1 else looked & ~there)
        elif kind in ('argument', 'named') and len(values) > 1:
            report.add('yellow', 'script', "%s, %s, is not the same on all nodes: %s" % (
                name, {'argument': 'an argument'}.get(kind, 'which the program names'), '; '.join(sorted(values)[:4])),
                "put it on a file system that all nodes have", fewest)
        elif kind == 'working' and len(values) > 1:
            report.add('yellow', 'script', "the nodes have different working directories: %s" % ', '.join(
                sorted(values)[:4]), "start in a directory that all nodes have (srun --chdir)", fewest)


def check_imports(report: 'Report', trial: dict, workers: bool, mpi: bool = False) -> None:
    """
    What imports.py said.

    :param workers: whether the program has a DataLoader with workers
    :param mpi: whether it uses MPI, which ends a process that is not one of its ranks
    """
    if trial.get('wrong'):
        text, sure = trial['wrong']
        sure = sure and not (mpi and 'ended the process' in text)
        shadows = trial.get('shadows')
        report.add('red' if sure else 'yellow', 'script', "the script's imports fail: %s%s" % (
            text, ' (%s beside the script)' % ', '.join(shadows) if shadows else ''),
            "rename what lies beside the script" if shadows else
            "see what this module asks for; an import ends no program" if re.search('end(s|ed) the pro', text) else
            "install what is missing where all nodes have it, or start Python as the script needs it" if re.search(
                'No module named|cannot open shared object', text) else "correct it there: no rank comes further")
    for text in trial.get('changed', ()):
        report.add('yellow', 'script', "an import changes what the training finds: %s" % text,
                   "have the module do this in a function that is called where it is needed")
    if trial.get('worker') and not report.having('red', 'shm'):
        report.add('red' if workers else 'yellow', 'worker', "a worker of a DataLoader fails: %s" % trial['worker'],
                   "see TMPDIR, /dev/shm and the limits of this node")
