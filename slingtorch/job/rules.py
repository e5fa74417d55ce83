# SPDX-License-Identifier: GPL-2.0-only
"""
A program's syntax trees, and rules on what it does with ranks and data that does not fit this job. There are rules for
faults that hang, that appear late, or that nothing reports; what PyTorch says clearly on all ranks needs none.
"""
import ast
import contextlib
import os
import re
import warnings

from .kinds import Any, Iterator, Mapping, Optional, Report

FUNCTIONS, IMPORTS = (ast.FunctionDef, ast.AsyncFunctionDef), (ast.Import, ast.ImportFrom)
# what may skip the code in it, or its errors, some only since Python 3.10 or 3.11
CHOICES = ('If', 'IfExp', 'BoolOp', 'Try', 'TryStar', 'With', 'Match', 'While', 'For', 'Lambda')
# calls that end the script, or start another one
EXITS = re.compile(r'(.*\.)?(_?exit|quit|exec[lv]\w*)$')
# own modules, bytes of each, and nodes (half a second) that are read at most
FILES, MOST, NODES = 60, 16 << 20, 50000
# what makes samplers, or calls set_epoch(), by itself
FRAMEWORKS = rb'(import|from) +\w*(accelerat|lightning|deepspeed|horovod|ignite|composer)'
# variables that the launcher or the runscript sets
LAUNCHED = ('MASTER_ADDR', 'MASTER_PORT', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK')
# what all ranks of a group must call
COLLECTIVES = re.compile(r'(.*\.)?dist(ributed)?\.(barrier|(all_)?(reduce|gather)(_object)?|broadcast(_object_list)?)$')
# calls that shuffle with the generator of a library: (their names, the names of those that seed it for all)
SHUFFLES = (
    (r'random\.shuffle$', r'random\.seed$'),
    (r'(np|numpy)\.random\.(shuffle|permutation)$', r'(np|numpy)\.random\.seed$'),
    (r'torch\.randperm$|(.*\.)?random_split$', r'(torch\.(random\.)?)?manual_seed$'))
# own functions and those of other packages that seed every library, such as set_seed() or seed_everything()
SEEDS_ALL = r'(.*\.)?(?!(manual_)?seed(_all)?$)\w*seed\w*$'
# what gives each process a port of its own
OWN_PORT = re.compile(r'getsockname|(free|open|unused)_?port|rand(int|range)')
# what makes a path differ between ranks
OWN_PATH = re.compile('(?i)rank|procid|localid|nodeid|getpid|host|uuid|temp|time|random')
# names, in variables and arguments, of the local rank, the node's number and the number of nodes
LOCAL, NODE, NODE_COUNT = r'slurm_localid|local_?rank', r'slurm_nodeid|node_?rank', r'(slurm_\w*)?n(um_)?nodes'
# the local rank as the number of a GPU
GPU_NUMBER = rb'(set_device\(|device_ids=\[|cuda:\{)[^)\]}\n]*(?i:local_?rank|LOCALID)'


def read(path: str) -> bytes:
    """The text of a file. :raises OSError: it cannot be read"""
    with open(path, 'rb') as stream:
        return stream.read(MOST)


def named(node: 'Any') -> str:
    """The text of a name, such as mp.spawn, also of the name that is called; '' for another node."""
    if isinstance(node, ast.Call):
        return named(node.func)
    if isinstance(node, ast.Attribute):
        return '%s.%s' % (named(node.value), node.attr)
    return node.id if isinstance(node, ast.Name) else ''


def literal(node: 'Any') -> 'Any':
    """The value of a constant, also of an index; None for anything else."""
    node = node.value if type(node).__name__ == 'Index' else node       # before Python 3.9
    return node.value if isinstance(node, ast.Constant) else None


def beginning(node: 'Any') -> str:
    """The text of a constant, or that at the beginning of an f-string; '' for anything else."""
    text = literal(node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node)
    return text if isinstance(text, str) else ''


def keywords(call: 'Any') -> dict:
    """The keyword arguments of a call: {name: expression}."""
    return {word.arg: word.value for word in call.keywords}


def opens(node: 'Any') -> bool:
    """Whether a node is 'with' and only opens files or sockets: no error in it is lost."""
    return isinstance(node, ast.With) and all(
        re.match(r'(.*\.)?(open|socket|closing)$', named(item.context_expr)) for item in node.items)


def main_block(node: 'Any') -> bool:
    """Whether a node is: if __name__ == '__main__'."""
    test = getattr(node, 'test', None)  # type: Any
    return isinstance(node, ast.If) and isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and \
        '__name__' in (named(test.left), named(test.comparators[0]))


def own_modules(tree: 'ast.AST', top: str, package: str) -> list:
    """Paths, relative to `top`, of the modules there, or in the package, that a tree imports."""
    names = []  # type: list
    for node in ast.walk(tree):
        if isinstance(node, IMPORTS):
            base = [getattr(node, 'module', None) or '']
            # b of 'from a import b' may be a module
            names += base + ['.'.join(filter(None, base + [name.name])) for name in node.names]
    places = [os.path.join(base, *name.split('.')) for name in names for base in ('', package)]
    paths = {os.path.normpath(place + end) for place in places for end in ('.py', '/__init__.py')}
    return sorted(path for path in paths if os.path.isfile(os.path.join(top, path)))


class Program:
    """
    The syntax trees of a script (its text), given these words, and of its own modules in the directory `top`.

    :ivar files: {path relative to `top`: its text}, the script first
    :ivar wrong: {path of a file that is not valid Python: why}
    :ivar nodes: all nodes, first the script itself
    :ivar calls: {last word of the called name: calls}
    :ivar used: last words of the names that the program reads
    :ivar stored: {name: nodes that give it a value, also parameters, functions and imports}
    """

    def __init__(self, text: bytes, environ: 'Mapping[str, str]', given: list, path: str = '', top: str = '') -> None:
        self.environ, self.given, self.script = environ, given, path
        self.first = os.path.relpath(path, top) if path else 'script'
        self.files, self.wrong = {self.first: text}, {}     # type: dict, dict
        self.nodes, self.above, self.place = [], {}, {}     # type: list, dict, dict
        self.calls, self.used, self.stored = {}, set(), {}  # type: dict, set, dict
        self.world, self.local = (int(environ.get(name) or 1) for name in ('WORLD_SIZE', 'LOCAL_WORLD_SIZE'))
        waiting = [self.first]
        for path in waiting:    # which grows
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter('ignore')
                    tree = ast.parse(self.files[path])
                    compile(tree, path, 'exec')     # finds more, such as a return outside of a function
            except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
                self.wrong[path] = err
                continue
            if len(self.nodes) <= NODES:
                self.learn(tree, path)
            for found in own_modules(tree, top, os.path.dirname(path)) if top else ():
                if found not in self.files and len(waiting) < FILES:
                    waiting.append(found)
                    self.files[found] = b''
                    with contextlib.suppress(OSError):
                        self.files[found] = read(os.path.join(top, found))

    def learn(self, tree: 'ast.AST', path: str) -> None:
        """Record the nodes of a file."""
        for node in ast.walk(tree):
            self.nodes.append(node)
            self.place[id(node)] = path
            self.above.update((id(child), node) for child in ast.iter_child_nodes(node))
            if isinstance(node, ast.Call):
                self.calls.setdefault(named(node).rpartition('.')[2], []).append(node)
            elif isinstance(getattr(node, 'ctx', None), ast.Load):
                self.used.add(named(node).rpartition('.')[2])
            elif not isinstance(node, ast.keyword):
                for key in 'id', 'arg', 'name', 'asname':
                    self.stored.setdefault(getattr(node, key, None), []).append(node)

    def mentions(self, pattern: bytes) -> bool:
        """Whether a line, before a comment, has a regular expression."""
        return any(re.search(b'(?m)^[^#\n]*(%s)' % pattern, text) for text in self.files.values())

    def meant(self, node: 'Any') -> 'Any':
        """What a name stands for, if one statement, of the same function or the module, assigns to it; else `node`."""
        stored = self.stored.get(node.id, []) if isinstance(node, ast.Name) else []
        above = self.above[id(stored[0])] if len(stored) == 1 else None     # type: Any
        if not above or self.place[id(above)] != self.place[id(node)] or not isinstance(
                self.function(stored[0]), ast.Module) and self.function(stored[0]) is not self.function(node):
            return node
        if isinstance(above, ast.Tuple):    # rank, size = 0, 2
            number, above = above.elts.index(stored[0]), self.above[id(above)]
            values = getattr(above.value, 'elts', []) if isinstance(above, ast.Assign) else []
            return values[number] if number < len(values) else node
        return above.value if isinstance(above, ast.Assign) else node

    def text(self, node: 'Any') -> str:
        """An expression as text to search, with what its names stand for and the own functions that it calls."""
        parts = [node, *(self.meant(one) for one in ast.walk(node) if isinstance(one, ast.Name))]
        names = {one.id for part in parts for one in ast.walk(part) if isinstance(one, ast.Name)}
        parts += [one for name in sorted(names) for one in self.stored.get(name, ()) if isinstance(one, FUNCTIONS)]
        return ' '.join(map(ast.dump, parts))

    def where(self, node: 'Any') -> str:
        """The line of a node, and its file if that is not the script."""
        path = self.place[id(node)]
        return '%sline %d' % ('' if path == self.first else path + ', ', node.lineno)

    def around(self, node: 'ast.AST') -> 'Iterator[Any]':
        """What encloses a node, from the innermost to the module."""
        while id(node) in self.above:
            node = self.above[id(node)]
            yield node

    def by_rank(self, node: 'ast.AST') -> list:
        """The conditions around a node that have a rank: (if, the part of it that the node is in)."""
        around = [node, *self.around(node)]
        return [(choice, part) for part, choice in zip(around, around[1:])
                if isinstance(choice, ast.If) and re.search('(?i)rank', ast.dump(choice.test))]

    def function(self, node: 'Any') -> 'Any':
        """The function that encloses a node, else the module."""
        return next(above for above in self.around(node) if isinstance(above, FUNCTIONS + (ast.Module,)))

    def optional(self, node: 'ast.AST') -> bool:
        """Whether the program may skip a node: in a condition, a loop, try, with, or a function that nothing uses."""
        return any(type(above).__name__ in CHOICES and not main_block(above) and not opens(above) or isinstance(
            above, FUNCTIONS) and above.name not in self.used and not above.name.startswith('__')
                   for above in self.around(node))

    def turned_off(self, node: 'Any') -> bool:
        """Whether a node is only for an option that is off by default, and that is not given."""
        around = [node, *self.around(node)]
        for part, choice in zip(around, around[1:]):
            if isinstance(choice, (ast.If, ast.IfExp)) and part in (
                    choice.body if isinstance(choice, ast.If) else (choice.body,)):
                test = choice.test  # type: Any
                both = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
                if any(map(self.is_off, test.values if both else [test])):
                    return True
        return False

    def is_off(self, node: 'Any') -> bool:
        """Whether an expression is args.NAME, an option that is off by default, and that is not given."""
        for call in self.calls.get('add_argument', ()) if isinstance(node, ast.Attribute) else ():
            options, words = [str(literal(word)) for word in call.args], keywords(call)
            if node.attr in [option.lstrip('-').replace('-', '_') for option in options]:
                default = words.get('default', ast.Constant(None))
                return isinstance(default, ast.Constant) and not default.value and literal(
                    words.get('action')) != 'store_false' and not {
                        word.partition('=')[0] for word in self.given} & set(options)
        return False

    def forwarded(self, call: 'Any') -> set:
        """Names that a call gives to a function of the program which calls them."""
        functions = [one for one in self.stored.get(named(call), ()) if isinstance(one, FUNCTIONS)]
        return {named(word) for function in functions for word, own in zip(call.args, function.args.args)
                if any(isinstance(one, ast.Call) and named(one) == own.arg for one in ast.walk(function))}

    def makes_dataset(self, node: 'Any') -> bool:
        """Whether a node is in __init__() of a dataset."""
        function = self.function(node)  # type: Any
        return getattr(function, 'name', '') == '__init__' and any(
            named(base).endswith('Dataset') for base in getattr(self.above[id(function)], 'bases', ()))

    def certain(self, node: 'Any', deep: int = 4) -> bool:
        """Whether the script itself comes to a node in any case: at its top level, or in a function called there."""
        function = self.function(node)
        leaves = [one for one in ast.walk(function)
                  if isinstance(one, (ast.Return, ast.Raise)) or EXITS.match(named(one))]     # type: list
        if self.place[id(node)] != self.first or self.optional(node) or any(
                one.lineno < node.lineno and self.function(one) is function for one in leaves):
            return False
        if isinstance(function, ast.Module):
            return True
        calls = self.calls.get(function.name, ())
        same = [one for one in self.stored[function.name] if hasattr(one, 'name')]  # also another function or an import
        return deep > 0 and len(calls) == 1 and isinstance(calls[0].func, ast.Name) and not function.decorator_list \
            and len(same) == 1 and self.certain(calls[0], deep - 1)


# --- rules: each yields (node, whether it may be red, text, remedy)

def is_only(node: 'Any', names: str) -> bool:
    """Whether an expression is one of these (LOCAL, NODE ...), and no more is made of it; a condition is no value."""
    text = ' '.join(map(ast.dump, [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node] if node else []))
    return bool(re.search("(?i)'(%s)'" % names, text)) and not re.search(
        "BinOp|'get_rank'|'(WORLD_)?(RANK|SIZE)'|_PROCID'|TASKS'", text)


def group(program: 'Program', gpus: bool) -> 'Iterator[tuple]':
    """The ranks and the meeting point that the program passes to init_process_group()."""
    calls = program.calls.get('init_process_group', ())
    for node in calls if len(calls) == 1 else ():   # of several, this job need not come to this one
        words, several, master = keywords(node), program.world > program.local, program.environ.get('MASTER_ADDR')
        words = {name: program.meant(value) for name, value in words.items()}
        backend = literal(words.get('backend') or program.meant((node.args + [None])[0]))
        size, rank, method = (literal(words.get(name)) for name in ('world_size', 'rank', 'init_method'))
        host = re.match(r'tcp://(\[[^]]*\]|[^:/]*)', str(method))
        remedy = "leave world_size, rank and init_method out: they are read from the environment"
        if 'store' in words or backend == 'fake':
            continue
        if type(size) is int and 0 < size != program.world:
            yield node, True, "init_process_group(world_size=%s), but this job has %d ranks" % (
                size, program.world), remedy
        if type(rank) is int and rank >= 0 and program.world > 1:
            yield node, True, "all %d ranks call init_process_group(rank=%s)" % (program.world, rank), remedy
        if several and is_only(words.get('rank'), LOCAL):
            yield node, False, "init_process_group() uses the local rank as the rank", remedy
        for key, names, text in (('rank', NODE, "number of the node as the rank"),
                                 ('world_size', NODE_COUNT, "number of nodes as the number of ranks")):
            if program.local > 1 and is_only(words.get(key), names):
                yield node, False, "init_process_group() uses the %s, but the nodes have several ranks" % text, remedy
        if program.world > 1 and 'init_method' in words and OWN_PORT.search(program.text(words['init_method'])):
            yield node, False, "each rank gives init_process_group() a port of its own", remedy
        if several and re.match('file://(/var)?/(tmp|dev/shm)/', str(method)):
            yield node, False, "init_method='%s' is another file on each node" % method, remedy
        if several and host and host.group(1) != master:
            own = bool(re.match(r'(localhost|127\.[\d.]*|\[::1\])$', host.group(1)))
            yield node, own, "init_method='%s' means %s, but MASTER_ADDR=%s" % (
                method, 'another host on each node' if own else 'a fixed host', master), remedy
        if backend == 'nccl' and not gpus:
            yield node, True, "init_process_group('nccl'), but this rank sees no GPU", \
                "ask for GPUs, or use 'gloo' if torch.cuda.is_available() is false"


def decides(program: 'Program', name: str) -> bool:
    """Whether a name is compared or given as a rank: others only choose a GPU by it."""
    return any(named(part) == name for node in program.nodes for part in (
        [node.left, *node.comparators] if isinstance(node, ast.Compare) else
        [node.value] if isinstance(node, ast.keyword) and node.arg == 'rank' else
        [getattr(node.test, 'operand', node.test)] if isinstance(node, (ast.If, ast.IfExp)) else []))


def ranks(program: 'Program', _: bool) -> 'Iterator[tuple]':
    """Ranks that the program starts again, or sets differently from the launcher."""
    remove = "remove it: conda-python-distributed sets it"
    for node in program.calls.get('spawn', ()) if program.local > 1 else ():
        if re.search(r'\b(mp|multiprocessing)\.spawn', named(node)):
            yield node, False, "spawn() starts more processes, but the launcher has already started %d ranks on this " \
                "node" % program.local, "start one task per node (srun --ntasks-per-node=1), or remove spawn()"
    for node in program.nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else None  # type: Any
        if isinstance(target, ast.Subscript) and named(target.value).endswith('environ'):
            name, value = literal(target.slice), literal(node.value)
            if name in LAUNCHED and isinstance(value, str) and value != program.environ.get(name):
                yield node, False, "sets %s='%s', but this job has %s" % (
                    name, value, program.environ.get(name)), remove
            elif name == 'MASTER_PORT' and program.world > 1 and OWN_PORT.search(program.text(node.value)):
                yield node, False, "each rank sets MASTER_PORT to a port of its own", remove
            elif program.local > 1 and (name == 'RANK' and is_only(node.value, NODE) or name == 'WORLD_SIZE'
                                        and is_only(node.value, NODE_COUNT)):
                yield node, False, "sets %s by nodes, but the nodes have several ranks" % name, remove
        if program.world > program.local and re.match(r'(.*\.)?(world_|global_)?rank$', named(target)) and is_only(
                node.value, LOCAL) and decides(program, named(target)):
            yield node, False, "uses the local rank as the rank", "read RANK from the environment"


def data(program: 'Program', _: bool) -> 'Iterator[tuple]':
    """Each rank trains on its own part of the data, in an order that changes from epoch to epoch."""
    if program.world == 1 or 'init_process_group' not in program.calls or program.mentions(FRAMEWORKS):
        return
    for node in program.calls.get('DistributedSampler', ()):
        if 'set_epoch' not in program.calls and literal(keywords(node).get('shuffle')) is not False:
            yield node, False, "DistributedSampler without set_epoch(): each epoch has the same order", \
                "call sampler.set_epoch(epoch) at the beginning of each epoch"
    loaders = program.calls.get('DataLoader', ())
    sampled = any(len(node.args) > 3 or any(word is None or 'sampler' in word for word in keywords(node))
                  for node in loaders)
    averaged = {'DDP', 'DistributedDataParallel'} & set(program.calls)
    for node in loaders if averaged and not sampled and 'IterableDataset' not in program.used else ():
        yield node, False, "DistributedDataParallel with a DataLoader without a sampler: %s" % (
            "ranks with more batches than others wait for these" if program.mentions(br'range\(\w*rank,|\[\w*rank::')
            else "all ranks train on the same data"), "use DataLoader(..., sampler=DistributedSampler(dataset))"


def streams(program: 'Program', _: bool) -> 'Iterator[tuple]':
    """An iterable dataset of the program's own, of which each rank gets everything."""
    averaged = {'DDP', 'DistributedDataParallel'} & set(program.calls)
    splits = program.mentions(rb'(?i:split|shard)|num_replicas|worker_init_fn') or program.mentions(FRAMEWORKS)
    for node in program.nodes if program.world > 1 and averaged and not splits else ():
        own = isinstance(node, ast.ClassDef) and any(named(base).endswith('IterableDataset') for base in node.bases)
        if own and any(getattr(part, 'name', '') == '__iter__' for part in node.body) and node.name in program.calls:
            made = [word for call in program.calls[node.name] for word in [*call.args, *keywords(call).values()]]
            if not re.search('(?i)rank|world|rand|shuffle', ' '.join(map(program.text, [node, *made]))):
                yield node, False, "the IterableDataset %s does not know the rank: all ranks train on the same data" \
                    % node.name, "let each rank take its part: islice(rows, get_rank(), None, get_world_size())"


def shuffles(program: 'Program', _: bool) -> 'Iterator[tuple]':
    """Data in an order that each rank draws for itself, of which each then takes its part."""
    split = 'DistributedSampler' in program.calls or program.mentions(br'\[[\w.()]*rank[\w.()]*::')
    if program.world == 1 or not split or program.mentions(FRAMEWORKS):
        return
    seeds = [node for name in program.calls if 'seed' in name for node in program.calls[name]
             if 'rank' not in program.text(node)]
    for names, seeding in SHUFFLES:
        seeded = any(re.match('%s|%s' % (seeding, SEEDS_ALL), named(node)) for node in seeds)
        own = [one.lineno for calls in program.calls.values() for one in calls
               if re.match(seeding, named(one)) and one not in seeds]
        for node in (one for calls in program.calls.values() for one in calls):
            # a seed of each rank's own, after a common one
            again = max([one.lineno for one in seeds if one.lineno < node.lineno], default=0) < max(
                [line for line in own if line < node.lineno], default=0)
            if (again or not seeded) and re.match(names, named(node)) and not {'generator', None} & set(
                    keywords(node)) and (program.certain(node) or program.makes_dataset(node)) and not re.search(
                        'rank|Generator', program.text(node)):
                yield node, False, "%s() without a common seed: each rank has another order, and takes its part of " \
                    "that" % named(node), "seed this generator with the same number on all ranks"


def directories(program: 'Program', _: bool) -> 'Iterator[tuple]':
    """Directories that all ranks make, although that succeeds only once."""
    for node in [*program.calls.get('makedirs', ()), *program.calls.get('mkdir', ())] if program.world > 1 else ():
        text = program.text(node)
        if (named(node).startswith('os.') or "'Path'" in text) and len(node.args) < 3 and not {
                'exist_ok', None} & set(keywords(node)) and program.certain(node) and not OWN_PATH.search(text):
            yield node, False, "all ranks make the same directory: all but one end with FileExistsError", \
                "write exist_ok=True, in os.makedirs() or Path.mkdir()"


def gradients(program: 'Program', _: bool) -> 'Iterator[tuple]':
    """A forward pass around DistributedDataParallel, which then does not exchange the gradients."""
    averaged = {'DDP', 'DistributedDataParallel'} & set(program.calls) if program.world > 1 else ()
    for node in [*program.calls.get('module', ()), *program.calls.get('forward', ())] if averaged else ():
        function = program.function(node)
        trained = any(program.function(one) is function and one.lineno > node.lineno
                      for one in program.calls.get('backward', ()))
        tested = any(re.search('no_grad|inference_mode', ''.join(map(ast.dump, getattr(above, 'items', ()))))
                     for above in program.around(node))
        if re.search(r'\.module(\.forward)?$', named(node)) and trained and not tested:
            yield node, False, "%s() goes past DistributedDataParallel: the ranks do not exchange gradients" % named(
                node), "call the wrapped model itself"


def environment(program: 'Program', _: bool) -> 'Iterator[tuple]':
    """Variables that the program certainly reads, and that neither the job nor the program sets or asks for."""
    reads = [node for node in program.nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
             and re.match(r'(os\.)?environ$', named(node.value)) and isinstance(literal(node.slice), str)]
    for node in reads if not program.mentions(rb'environ\.update\(|dotenv|putenv') else ():
        name = literal(node.slice)
        other = r"""(?<!environ\[['"])\b%s\b|\b%s['"]\] *=(?!=)""" % (2 * (re.escape(name),))
        if name not in (*LAUNCHED, *program.environ) and not program.mentions(other.encode()) and program.certain(node):
            yield node, False, "reads os.environ['%s'], which is not set (KeyError)" % name, "export it in the job " \
                "script, have Slurm set it (SLURM_CPUS_PER_TASK: srun -c), or use os.environ.get()"


def options(program: 'Program', _: bool) -> 'Iterator[tuple]':
    """An option for the local rank, which only torch.distributed.launch gives."""
    known = program.world == 1 or program.mentions(rb'LOCAL_RANK|LOCALID') or program.mentions(FRAMEWORKS)
    for call in program.calls.get('add_argument', ()) if not known else ():
        names = {str(literal(word)) for word in call.args}
        if names & {'--local_rank', '--local-rank'} and 'local_rank' in program.used and not names & {
                word.partition('=')[0] for word in program.given}:
            yield call, False, "takes the local rank from an option that srun and torchrun do not give: all ranks " \
                "have its default", "make int(os.environ['LOCAL_RANK']) its default"


def devices(program: 'Program', gpus: bool) -> 'Iterator[tuple]':
    """GPUs that the program certainly uses, where there is none."""
    for node in [one for calls in program.calls.values() for one in calls if not gpus]:
        name, device = named(node), keywords(node).get('device')
        if device is None and re.match(r'(.*\.)?(to|device)$', name):
            device = (node.args + [None])[0]
        if (re.match(r'.*\.cuda$|(.*\.)?cuda\.set_device$', name) or re.match(
                'cuda(:|$)', beginning(program.meant(device)))) and program.certain(node):
            yield node, False, "uses a GPU, but this rank sees none", \
                "ask for GPUs, or write torch.device('cuda' if torch.cuda.is_available() else 'cpu')"


def of_rank(choice: 'Any', part: 'ast.AST') -> bool:
    """Whether a part of 'if rank == 0' is that of this rank."""
    return part in choice.body and 'ops=[Eq()], comparators=[Constant(' in ast.dump(choice.test)


def together(program: 'Program', _: bool) -> 'Iterator[tuple]':
    """Collectives that only one rank calls; if others call one under a condition, too, it may be the same."""
    for name in program.calls if program.world > 1 else ():
        chosen = [(node, of_rank(choice, part))
                  for node in program.calls[name] if COLLECTIVES.match(named(node)) and 'group' not in keywords(node)
                  for choice, part in program.by_rank(node)]
        if chosen and all(alone for _, alone in chosen):
            yield chosen[0][0], False, "only one rank calls %s(): it waits for others" % name, "let all ranks call it"


def validation(program: 'Program', _: bool) -> 'Iterator[tuple]':
    """Weights that one rank alone loads into DDP; its forward pass on one rank, which exchanges BatchNorm's buffers."""
    wrapped = {node.targets[0].id for node in program.nodes if isinstance(node, ast.Assign)
               and re.search(r'(^|\.)(DDP|DistributedDataParallel)$', named(node.value))
               and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name)}
    wrapped -= {named(node.targets[0]) for node in program.nodes if isinstance(node, ast.Assign)
                and named(node.value).endswith('.module')}
    buffers = program.mentions(rb'BatchNorm|resnet') and not program.mentions(rb'broadcast_buffers *= *False')
    for call in program.calls.get('load_state_dict', ()) if program.world > 1 else ():
        if named(call).split('.')[0] in wrapped and any(of_rank(*pair) for pair in program.by_rank(call)):
            yield call, False, "only one rank loads weights after DistributedDataParallel has made them the same: " \
                "the others keep theirs", "let all ranks load them, or load before the model is wrapped"
    for call in [one for calls in program.calls.values() for one in calls if wrapped and buffers]:
        alone = any(of_rank(choice, part) for choice, part in program.by_rank(call))
        own = getattr(program.function(call), 'args', None)     # parameters may be something else of the same name
        names = wrapped - {one.arg for one in own.args} if own else wrapped
        if alone and program.world > 1 and (named(call) in names or names & program.forwarded(call)):
            yield call, False, "only one rank calls the model in DistributedDataParallel, which has BatchNorm: it " \
                "waits for others", "call model.module there, or let all ranks call it"


def check(report: 'Report', program: 'Program', gpus: 'Optional[list]') -> None:
    """Report what the rules say of what the program need not skip; `gpus`: those that the node's first rank sees."""
    said = set()    # type: set
    anywhere = (gradients, streams, together, validation)   # also in a condition, or in a loop
    for rule in (group, ranks, data, shuffles, directories, environment, options, devices, *anywhere):
        for node, red, text, remedy in rule(program, bool(gpus)):
            if text not in said and (rule in anywhere or not program.optional(node)):
                said.add(text)
                report.add('red' if red and program.certain(node) else 'yellow', 'program', '%s: %s' % (
                    program.where(node), text), remedy)
    if gpus and len(gpus) < program.local and program.mentions(GPU_NUMBER) and not program.mentions(b'device_count'):
        report.add('yellow', 'gpus', "the script uses the GPU with the number of its local rank, but each rank of this "
                   "node sees only %d of them ('invalid device ordinal')" % len(gpus), "let each rank see all GPUs: "
                   "use srun --gpus-per-node=N instead of --gpus-per-task=1, and unset SLINGTORCH_GPU_VISIBILITY")
