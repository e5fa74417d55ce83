# SPDX-License-Identifier: GPL-2.0-only
"""
What a program does with ranks, data and gradients that does not fit this job, or works only on one rank: each rule
yields (node, text, remedy). A text that begins with '!' is red: the program cannot work. There are rules for faults
that hang, that appear late, or that nothing reports; what PyTorch says clearly on all ranks at once needs none.
"""
import ast
import os
import re

from .kinds import Any, Iterator, Optional, Program, Report
from .syntax import FUNCTIONS, LISTINGS, LOOPS, RANK, called, keywords, literal, named, owner

# operations that need all ranks, and FSDP's that do
COLLECTIVES = ('barrier', 'all_reduce', 'all_gather', 'broadcast', 'reduce_scatter', 'all_to_all', 'all_gather_object',
               'broadcast_object_list', 'all_gather_into_tensor', 'reduce_scatter_tensor', 'monitored_barrier',
               'new_group', 'reduce', 'scatter', 'gather', 'gather_object', 'scatter_object_list')
OF_FSDP = ('state_dict', 'full_tensor', 'clip_grad_norm_', 'get_model_state_dict', 'get_state_dict', 'backward')
DDP, FSDP = {'DistributedDataParallel', 'DDP'}, {'FullyShardedDataParallel', 'FSDP', 'fully_shard'}
FRAMEWORKS = re.compile('accelerat|lightning|deepspeed|horovod|ignite|composer', re.I)
# calls whose result does not depend on the order of their arguments' elements, some that keep it, and some in a loop
# that do something in its order
UNORDERED = re.compile('.*sort|(len|sum|min|max|any|all|set|frozenset|bool|isinstance|print|debug|info|warning)$')
KEEP = ('list', 'tuple', 'map', 'filter', 'iter', 'reversed')
ORDERED = ('append', 'extend', 'insert', 'setattr', 'add_module', 'register_module', 'setdefault') + COLLECTIVES
# calls in which the order of a set matters; other functions may want a set
INDEXES = ('enumerate', 'zip', 'next', 'tensor', 'array', 'join')
# functions with which all ranks would write the same file, and the number of the argument that is its path
SAVERS = {'save': 1, 'save_file': 1, 'save_pretrained': 0}
# calls that draw random numbers, and names of what sets a seed
DRAWS, SEEDS = ('random_split', 'randperm', 'shuffle', 'permutation'), 'seed|default_rng|RandomState|Generator'
# names of values that differ from rank to rank
OWN = r'loss|\bnan|isnan|isfinite|\btime\b|perf_counter|monotonic|\brandom\b|\brand\b'
LOCAL = 'local_?rank|LOCALID'
# seconds that ranks should have, at least, to reach a collective
TIMEOUT = 60


def compiles(node: 'Any') -> bool:
    """Whether a node is torch.compile, also as a decorator, or model.compile(). An eager backend needs no compiler."""
    if isinstance(node, ast.Call) and called(node) == 'compile' and isinstance(node.func, ast.Attribute):
        return 'eager' not in str(literal(keywords(node).get('backend'))) if owner(node) == 'torch' else not node.args
    return any(named(one) == 'compile' and named(getattr(one, 'value', None)) == 'torch'
               for one in getattr(node, 'decorator_list', ()))


def group(program: 'Program') -> 'Iterator[tuple]':
    """The ranks and the meeting point that the program passes to an init_process_group() that it always calls."""
    begins, value = program.names.get('init_process_group', ()), program.value
    for node in begins if len(begins) == 1 else ():
        words = keywords(node)
        backend = value(words.get('backend', (node.args + [None])[0]))
        # if there are several, or a condition decides, this job need not call this one
        if program.chosen(node) or 'store' in words or backend == 'fake':
            continue
        sure = '!' * program.certain(node)
        size, rank = value(words.get('world_size')), literal(words.get('rank'))
        method = str(literal(words.get('init_method')))
        master, host = program.environ.get('MASTER_ADDR'), re.match(r'tcp://(\[[^]]*\]|[^:/]*)', method)
        own = host and re.match(r'(localhost|127\.[\d.]*|\[::1\])$', host.group(1))
        for wrong, text in (
                (isinstance(size, int) and size > 0 and size != program.world,
                 sure + "init_process_group(world_size=%s), but this job has %d ranks" % (size, program.world)),
                (type(rank) is int and rank >= 0 and program.world > 1,
                 sure + "all %d ranks call init_process_group(rank=%s)" % (program.world, rank)),
                (program.several and 'device_count' in program.words(words.get('world_size')),
                 "init_process_group() uses the number of GPUs on a node as the number of ranks in the job"),
                (program.several and re.search(LOCAL, program.words(words.get('rank')), re.I),
                 "init_process_group() uses the local rank as the rank"),
                (program.several and method.startswith('file:'),
                 "init_method='%s' works only if all nodes share this file, its file system supports locks, and no "
                 "earlier job has left the file behind" % method),
                (program.several and host and host.group(1) != master,
                 (sure if own else '') + "init_method='%s' means %s, but MASTER_ADDR=%s" % (
                     method, 'another host on each node' if own else 'a fixed host', master))):
            if wrong:
                yield node, text, "leave world_size, rank and init_method out: they are read from the environment"
        if backend == 'nccl' and not program.gpus:
            yield node, sure + "init_process_group('nccl'), but this rank sees no GPU", \
                "ask for GPUs, or use 'gloo' if torch.cuda.is_available() is false"
        for word, part in keywords(words['timeout']).items() if isinstance(words.get('timeout'), ast.Call) else ():
            time, least = value(part), {'milliseconds': 1000 * TIMEOUT, 'seconds': TIMEOUT}.get(word, 0)
            if isinstance(time, (int, float)) and time < least:
                yield node, "a rank has only %g %s to reach a collective" % (time, word), \
                    "raise timeout: another rank may be writing a checkpoint, or compiling"


def ranks(program: 'Program') -> 'Iterator[tuple]':
    """Ranks that the program confuses, starts again, or sets differently from the launcher."""
    for node in program.nodes:
        value = getattr(node, 'value', None)    # type: Any
        # a program may be for both: with a launcher, and without one
        perhaps = isinstance(node, (ast.Assign, ast.Call)) and program.chosen(node)
        if called(node) == 'spawn' and owner(node) in ('mp', 'multiprocessing') and program.local > 1 and not perhaps:
            yield node, "spawn() starts further processes, but the launcher has already started %d ranks on this " \
                "node: each rank would start its own set" % program.local, \
                "start one task per node (srun --ntasks-per-node=1), or remove spawn()"
        for target in node.targets if isinstance(node, ast.Assign) else ():
            key, text = str(program.value(getattr(target, 'slice', None))), str(literal(value))
            own, sets = program.environ.get(key), named(getattr(target, 'value', None)) == 'environ'
            if sets and isinstance(value, ast.Constant) and text != own and not perhaps and \
                    key in ('MASTER_ADDR', 'MASTER_PORT', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK'):
                yield node, "sets %s='%s', but this job has %s" % (key, text, own), \
                    "remove it: conda-python-distributed sets it"
            if named(target) in ('rank', 'world_rank', 'global_rank') and program.several and any(
                    literal(part) in ('SLURM_LOCALID', 'LOCAL_RANK') for part in ast.walk(value)):
                yield node, "uses the local rank as the rank", "read RANK from the environment"
    for place in program.gpu_numbers() if program.several else ():
        words = program.words(place)
        if re.search(r'\b(RANK|SLURM_PROCID|get_rank)\b', words) and not re.search(
                'device_count|local|modulo', words, re.I):
            yield place, "uses the rank as the GPU's number, but a node has fewer GPUs than the job has ranks", \
                "use LOCAL_RANK"


def order(program: 'Program') -> 'Iterator[tuple]':
    """All ranks do what needs all of them; only one rank does what is meant for one."""
    names = set(program.names)
    # own functions that call a collective in any case
    own, functions = {}, [node.name for node in program.nodes if isinstance(node, FUNCTIONS)]     # type: dict, list
    for call in program.calls:
        name = getattr(program.function(call), 'name', '')
        if owner(call) in ('dist', 'distributed') and called(call) in COLLECTIVES and not program.optional(
                call) and functions.count(name) == 1:
            own[name] = called(call)
    modules = {'self', *(os.path.basename(path)[:-3] for path in program.files)}
    for node in program.calls:
        name, words = called(node), keywords(node)
        of_all = name in COLLECTIVES and owner(node) in ('dist', 'distributed') and 'group' not in words
        calls = (isinstance(node.func, ast.Name) or owner(node) in modules) and own.get(name)
        if (of_all or calls or name in OF_FSDP and names & FSDP or names & DDP and (
                name == 'backward' or name == 'step' and 'opt' in owner(node))) and program.one_branch(
                    node, COLLECTIVES + tuple(own) if of_all or calls else (name,)):
            yield node, "only some ranks call %s(): %s" % (
                '%s(), which calls %s' % (name, calls) if calls else name, "the parameters of the others do not change"
                if name == 'step' else "they wait for the others"), "have all ranks call it"
        at = SAVERS.get(name, 9) if name != 'save' or owner(node) == 'torch' else 9
        if len(node.args) > at and not program.for_one_rank(node) and not re.search(
                'rank|pid|host|uuid|LOCALID|temp|job', program.words(node.args[at]), re.I):
            yield node, "all ranks write the same file with %s()" % name, "if dist.get_rank() == 0: %s(...)" % name
        if literal(words.get('download')) is True and not program.for_one_rank(node):
            yield node, "all ranks download the same data set with %s()" % name, \
                "download on local rank 0, then call barrier()"


def steps(program: 'Program') -> 'Iterator[tuple]':
    """All ranks do the same number of steps: else they wait for each other."""
    told = ' '.join(program.words(node, 1) for node in program.calls if called(node) in COLLECTIVES)
    for node in program.nodes:
        loop = next((one for one, _ in program.around(node) if isinstance(one, LOOPS)), None) if isinstance(
            node, (ast.If, ast.Try)) else None
        inside = set(map(called, ast.walk(loop))) if loop else set()
        if inside & {'backward', *COLLECTIVES} and isinstance(node, ast.If) and isinstance(
                node.body[-1], (ast.Break, ast.Continue, ast.Return)):
            own = re.search('%s|%s' % (OWN, RANK.pattern), program.words(node.test, 0))
            if own and own.group() not in told and not re.search('reduce|broadcast|gather', program.words(node.test)):
                yield node, "a rank leaves the loop by its own '%s', while the others wait for it" % own.group(), \
                    "call all_reduce() on it first, so that all ranks decide alike"
        if isinstance(node, ast.Try) and 'backward' in inside & set(map(called, ast.walk(node))) and any(
                isinstance(one.body[-1], (ast.Pass, ast.Continue, ast.Break)) for one in node.handlers):
            yield node, "a rank skips a step that fails, and the others wait for it", "let the error end it"


def data(program: 'Program') -> 'Iterator[tuple]':
    """Each rank trains on its own part of the same data, and the ranks together on all of it."""
    names, loaders = set(program.names), program.names.get('DataLoader', ())
    seeds = [node for node in program.calls if re.search(SEEDS, called(node))]
    own = any(RANK.search(' '.join(map(program.words, node.args))) for node in seeds)
    for node in program.calls:
        name, words = called(node), keywords(node)
        if name == 'DistributedSampler':
            size, rank = program.value(words.get('num_replicas')), words.get('rank')
            if 'set_epoch' not in names and literal(words.get('shuffle')) is not False:
                yield node, "DistributedSampler without set_epoch(): each epoch has the same order", \
                    "call sampler.set_epoch(epoch) at the beginning of each epoch"
            if isinstance(size, int) and size != program.world or isinstance(program.value(rank), int) or \
                    program.several and re.search(LOCAL, program.words(rank), re.I) or re.search(
                        'rank|time|pid|rand', program.words(words.get('seed')), re.I):
                yield node, "num_replicas, rank or seed of DistributedSampler does not fit the %d ranks of this job" % (
                    program.world), "leave them out"
        if name in DRAWS and 'generator' not in words and not program.for_one_rank(node) and (
                owner(node) in ('', 'torch', 'random', 'np', 'utils', 'data')) and (
                    own and name == 'random_split' or not seeds):
            yield node, "%s() draws different numbers on each rank: %s" % (
                name, "the seed depends on the rank" if own else "nothing sets a seed"), "pass it a generator"
    if names & DDP and loaders and 'IterableDataset' not in program.used and not any(
            word is None or 'sampler' in str(word) for node in loaders for word in keywords(node)) and not any(
                len(node.args) > 3 for node in loaders) and not any(map(FRAMEWORKS.search, program.imports)):
        yield loaders[0], "DistributedDataParallel with a DataLoader without a sampler: all ranks train on the same " \
            "data", "use DataLoader(..., sampler=DistributedSampler(dataset))"


def unordered(program: 'Program', node: 'Any', deep: int = 4) -> 'Optional[tuple]':
    """(the set of strings, or the call that lists files, which gives an expression its order; whether as a list)"""
    name, values = called(node), []     # type: str, list
    if isinstance(node, ast.BinOp):
        return unordered(program, node.left, deep) or unordered(program, node.right, deep)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)) or name in KEEP and node.args:
        found = unordered(program, node.args[-1] if name else node.generators[0].iter, deep)
        return found and (found[0], True)
    if isinstance(node, ast.SetComp) or name in LISTINGS or name in ('set', 'frozenset') and node.args and called(
            node.args[0]) != 'range' or isinstance(node, ast.Set) and not all(
                isinstance(literal(part), (int, float)) for part in node.elts):
        return node, name in LISTINGS
    if isinstance(node, (ast.Name, ast.Attribute)) and deep:
        values = program.assigned(node)
    return unordered(program, values[0], deep - 1) if len(values) == 1 else None


def elements(program: 'Program') -> 'Iterator[tuple]':
    """What takes the elements of a set, or the files of a directory, one after the other has a different order."""
    hashed = not re.match('[0-9]', program.environ.get('PYTHONHASHSEED', ''))
    sorts = {named(node.args[0]) if node.args else owner(node) for name in program.names if 'sort' in name
             for node in program.names[name]} - {''}
    for node in program.nodes:
        takes, name = [], called(node)  # type: Any, str
        if isinstance(node, ast.For):
            inside = [part for one in node.body for part in ast.walk(one)]
            takes = [node.iter] * any(
                called(part) in ORDERED and owner(part) not in sorts or isinstance(part, ast.Assign)
                and isinstance(part.targets[0], ast.Subscript) for part in inside)
        elif isinstance(node, ast.DictComp):
            takes = [node.generators[0].iter]
        elif isinstance(node, ast.Subscript):
            takes = [node.value]
        elif isinstance(node, ast.Call) and name not in KEEP and not UNORDERED.match(name):
            takes = node.args
        for part in takes:
            found = unordered(program, part)
            if not found or named(part) in sorts or name and not found[1] and name not in INDEXES or any(
                    UNORDERED.match(called(one)) or isinstance(one, ast.SetComp) for one, _ in list(
                        program.around(node))[:3]):
                continue
            if called(found[0]) in LISTINGS and program.several:
                yield found[0], "%s() may list files in a different order on each node" % called(found[0]), \
                    "use sorted(...)"
            elif called(found[0]) not in LISTINGS and hashed:
                yield found[0], "the order of a set of strings differs from rank to rank", \
                    "use sorted(...), or export PYTHONHASHSEED=0 before srun"


def gradients(program: 'Program') -> 'Iterator[tuple]':
    """Steps that bypass DistributedDataParallel."""
    for node in filter(lambda node: called(node) in DDP, program.calls):
        inner = named(node.args[0]) if node.args and isinstance(node.args[0], ast.Name) else ''
        outer = {named(target) for target in getattr(program.above.get(id(node)), 'targets', ())} - {''}
        for call in program.calls if outer else ():
            bare = inner and inner not in outer and isinstance(call.func, ast.Name) and call.func.id == inner and \
                program.function(call) is program.function(node) and call.lineno > node.lineno
            if (bare or 'module' in (called(call), owner(call) * (called(call) == 'forward'))) and call.args and \
                    not program.without_gradients(call):
                yield call, "%s() bypasses DistributedDataParallel: gradients are not averaged" % (
                    inner if bare else 'module'), "call what DistributedDataParallel() returns"


def check(report: 'Report', program: 'Program', gpus: bool) -> None:
    """Apply all rules; if several lines have the same finding, report the first one."""
    said = set()    # type: set
    program.gpus = gpus
    several = program.world > 1 and 'init_process_group' in program.names
    for rule in (group, ranks) + (order, steps, data, elements, gradients) * several:
        for node, text, remedy in rule(program):
            if text not in said:
                said.add(text)
                report.add('red' if text[0] == '!' else 'yellow', 'program', '%s: %s' % (
                    program.where(node), text.lstrip('!')), remedy)
