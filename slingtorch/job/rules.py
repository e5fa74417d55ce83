# SPDX-License-Identifier: GPL-2.0-only
"""
What a program does with ranks, data and gradients that does not fit this job, or works only on one rank: each rule
yields (node, text, remedy). A text that begins with '!' is red: the program cannot work.
"""
import ast
import builtins
import os
import re
import types

from .kinds import Any, Iterator, Program, Report
from .syntax import FUNCTIONS, LISTINGS, LOOPS, RANK, called, keywords, literal, main_block, named, owner

# operations that need all ranks, and FSDP's that do
COLLECTIVES = ('barrier', 'all_reduce', 'all_gather', 'broadcast', 'reduce_scatter', 'all_to_all', 'all_gather_object',
               'broadcast_object_list', 'all_gather_into_tensor', 'reduce_scatter_tensor', 'monitored_barrier',
               'new_group', 'reduce', 'scatter', 'gather', 'gather_object', 'scatter_object_list')
OF_FSDP = ('state_dict', 'full_tensor', 'clip_grad_norm_', 'get_model_state_dict', 'get_state_dict', 'backward')
DDP, FSDP = {'DistributedDataParallel', 'DDP'}, {'FullyShardedDataParallel', 'FSDP', 'fully_shard'}
FRAMEWORKS = re.compile('accelerat|lightning|deepspeed|horovod|ignite|composer', re.I)
# modules with parameters
LAYERS = re.compile(r'(Lazy)?(Linear|Bilinear|Conv\w*|Embedding\w*|\w*Norm(\dd)?|LSTM|GRU|RNN|Transformer\w*|'
                    r'MultiheadAttention|Sequential|ModuleList|ModuleDict|Parameter)$')
# calls whose result does not depend on the order of their arguments' elements
UNORDERED = ('sorted', 'len', 'sum', 'min', 'max', 'any', 'all', 'set', 'frozenset', 'bool', 'isinstance', 'print')
# functions with which all ranks would write or remove the same file
ONCE = {'save': 'write', 'save_file': 'write', 'save_pretrained': 'write', 'rename': 'rename', 'replace': 'rename',
        'move': 'rename', 'remove': 'remove', 'unlink': 'remove', 'rmtree': 'remove', 'mkdir': 'make',
        'makedirs': 'make', 'symlink': 'make', 'symlink_to': 'make'}
# calls that draw random numbers, names of what sets a seed, and calls at which torch.compile breaks a graph
DRAWS, SEEDS = ('random_split', 'randperm', 'shuffle', 'permutation'), 'seed|default_rng|RandomState|Generator'
BREAKS = ('item', 'print', 'tolist', 'numpy', 'breakpoint', 'save', 'input')
GROUPS = ('gloo', 'nccl', 'mpi', 'ucc', 'xccl', 'hccl', 'fake', 'undefined')
# names of values that differ from rank to rank
OWN = r'loss|\bnan|isnan|isfinite|\btime\b|perf_counter|monotonic|\brandom\b|\brand\b'
# seconds that ranks should have, at least, to reach a collective
TIMEOUT = 60
LET_IT = "remove it: conda-python-distributed sets it"


def compiles(node: 'Any') -> bool:
    """Whether a node is torch.compile, also as a decorator, or model.compile(). An eager backend needs no compiler."""
    if isinstance(node, ast.Call) and called(node) == 'compile' and isinstance(node.func, ast.Attribute):
        return 'eager' not in str(literal(keywords(node).get('backend'))) if owner(node) == 'torch' else not node.args
    return any(named(one) == 'compile' and named(getattr(one, 'value', None)) == 'torch'
               for one in getattr(node, 'decorator_list', ()))


def group(program: 'Program') -> 'Iterator[tuple]':
    """The ranks and the meeting point that the program passes to an init_process_group() that it always calls."""
    # if there are several, or a condition decides, this job need not call this one
    chosen = {id(part) for node in program.nodes if isinstance(node, (ast.If, ast.IfExp, ast.Try))
              for part in ast.walk(node) if not main_block(node)}
    begins, value = [node for node in program.calls if called(node) == 'init_process_group'], program.value
    for node in begins if len(begins) == 1 else ():
        words = keywords(node)
        backend = value(words.get('backend', (node.args + [None])[0]))
        if id(node) in chosen or not program.reached(node) or 'store' in words or backend == 'fake':
            continue
        sure = '!' * program.certain(node)
        size, rank, leave = value(words.get('world_size')), literal(words.get('rank')), "leave rank out (default: RANK)"
        if isinstance(size, int) and size > 0 and size != program.world:
            yield node, sure + "init_process_group(world_size=%d), but this job has %d ranks" % (size, program.world), \
                "leave world_size and rank out: they are read from WORLD_SIZE and RANK"
        if backend == 'nccl' and not program.gpus:
            yield node, sure + "init_process_group('nccl'), but this rank sees no GPU", \
                "ask for GPUs, or use 'gloo' if torch.cuda.is_available() is false"
        if isinstance(backend, str) and not set(re.findall(r'(?:^|,)(?:\w+:)?(\w+)', backend.lower())) <= set(GROUPS):
            yield node, "init_process_group('%s'): use one of %s" % (backend, ', '.join(GROUPS)), "correct it"
        if re.search('device_count', program.words(words.get('world_size'))) and program.several:
            yield node, "init_process_group() uses the number of GPUs on a node as the number of ranks in the job", \
                "leave world_size out: it is read from WORLD_SIZE"
        if type(rank) is int and rank >= 0 and program.world > 1:
            yield node, sure + "all %d ranks call init_process_group(rank=%d)" % (program.world, rank), leave
        if program.several and re.search('local_?rank|LOCALID', program.words(words.get('rank')), re.I):
            yield node, "init_process_group() uses the local rank as the rank", leave
        for word, part in keywords(words['timeout']).items() if isinstance(words.get('timeout'), ast.Call) else ():
            time, least = value(part), {'milliseconds': 1000 * TIMEOUT, 'seconds': TIMEOUT}.get(word, 0)
            if isinstance(time, (int, float)) and time < least:
                yield node, "a rank has only %g %s to reach a collective" % (time, word), \
                    "raise timeout: another rank may be writing a checkpoint, or compiling"
        method = literal(words.get('init_method'))
        host = re.match(r'tcp://(\[[^]]*\]|[^:/]*)', str(method))
        if program.several and str(method).startswith('file:'):
            yield node, "init_method='%s' works only if all nodes share this file, its file system supports locks, " \
                "and no earlier job has left the file behind" % method, "leave it out"
        elif program.several and host and host.group(1) != program.environ.get('MASTER_ADDR'):
            own = re.match(r'(localhost|127\.[\d.]*|\[::1\])$', host.group(1))
            yield node, "%sinit_method='%s' means %s, but MASTER_ADDR=%s" % (
                sure if own else '', method, 'another host on each node (localhost)' if own else 'a fixed host',
                program.environ.get('MASTER_ADDR')), "leave init_method out: the default (env://) reads MASTER_ADDR"


def ranks(program: 'Program') -> 'Iterator[tuple]':
    """Ranks that the program confuses, starts again, or sets differently from the launcher."""
    cards = sorted(os.listdir('/sys/class/net')) if os.path.isdir('/sys/class/net') else []
    for node in program.nodes:
        value = getattr(node, 'value', None)    # type: Any
        # a program may be for both: with a launcher, and without one
        perhaps = isinstance(node, (ast.Assign, ast.Call)) and (program.optional(node) or any(
            isinstance(one, ast.If) and not main_block(one) for one, _ in program.around(node)))
        if called(node) == 'spawn' and owner(node) in ('mp', 'multiprocessing') and program.local > 1 and not perhaps:
            yield node, "spawn() starts further processes, but the launcher has already started %d ranks on this " \
                "node: each rank would start its own set" % program.local, \
                "start one task per node (srun --ntasks-per-node=1), or remove spawn()"
        for target in node.targets if isinstance(node, ast.Assign) else ():
            key, text = program.value(getattr(target, 'slice', None)), str(literal(value))
            told = named(getattr(target, 'value', None)) == 'environ' and isinstance(value, ast.Constant)
            if told and key in ('MASTER_ADDR', 'MASTER_PORT', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK') and \
                    text != program.environ.get(str(key)) and not perhaps:
                yield node, "sets %s='%s', but this job has %s" % (key, text, program.environ.get(str(key))), LET_IT
            if told and re.match('(GLOO|NCCL)_SOCKET_IFNAME$', str(key)) and cards and text[:1] != '^' and not any(
                    one.startswith(text.lstrip('=')) for one in cards):
                yield node, "sets %s='%s', but this node has no such interface" % (key, text), \
                    "remove it, or name one of: " + ', '.join(cards)
            if named(target) in ('rank', 'world_rank', 'global_rank') and program.several and any(
                    literal(part) in ('SLURM_LOCALID', 'LOCAL_RANK') for part in ast.walk(value)):
                yield node, "uses the local rank as the rank", "read RANK from the environment"
        if literal(node) in ('spawn', 'forkserver') and program.trees and not any(
                map(main_block, ast.walk(program.trees[0]))) and any(called(one) in (
                    'set_start_method', 'get_context', 'DataLoader') for one, _ in program.around(node)):
            yield node, "%s starts processes, but the script has no if __name__ == '__main__': each process runs " \
                "the whole script again" % literal(node), "move all code except definitions under this condition"
    for call in program.calls if 'init_process_group' in program.names and program.several else ():
        places = call.args[:1] if called(call) in ('set_device', 'set_device_index', 'cuda') else getattr(
            keywords(call).get('device_ids'), 'elts', [])
        words = ' '.join(map(program.words, places))
        if re.search(r'\b(RANK|SLURM_PROCID|get_rank)\b', words) and not re.search(
                'device_count|local|modulo', words, re.I):
            yield call, "uses the rank as the GPU's number, but a node has fewer GPUs than the job has ranks", \
                "use LOCAL_RANK"


def order(program: 'Program') -> 'Iterator[tuple]':
    """All ranks do what needs the process group, once it exists; only one rank does what is meant for one."""
    names, begins = program.names, [node for node in program.calls if called(node) == 'init_process_group']
    others = any(map(FRAMEWORKS.search, program.imports))
    if not begins and names & DDP and program.world > 1 and not others and not re.search(
            r'(init|setup|start|launch)\w*(dist|ddp|group|process|parallel|env)', ' '.join(names), re.I):
        yield next(node for node in program.calls if called(node) in DDP), \
            "uses DistributedDataParallel, but nothing calls init_process_group()", "call it first"
    for node in program.calls if begins else ():
        name, dist = called(node), owner(node) in ('dist', 'distributed')
        ends = [one for one in program.calls if called(one) == 'destroy_process_group' and not program.optional(one) and
                program.function(one) is program.function(node) and one.lineno < node.lineno and one is not node]
        if dist and name in COLLECTIVES and ends and node.lineno > max(one.lineno for one in begins):
            yield node, "%s() comes after destroy_process_group()" % name, "end the process group last"
        if name == 'init_process_group' and node is not begins[0] and not ends and program.function(
                begins[0]) is program.function(node) and not any(map(program.optional, (node, begins[0]))):
            yield node, "init_process_group() is called twice", "call it once"
        for word in ('src', 'dst'):
            other = literal(keywords(node).get(word)) if dist else None
            if isinstance(other, int) and other >= program.world:
                yield node, "%s(%s=%d), but the job has %d ranks" % (name, word, other, program.world), "correct it"
        needs = dist and name in COLLECTIVES + ('get_rank', 'get_world_size') or name in DDP | FSDP
        if needs and len(begins) == 1 and program.function(begins[0]) is program.function(node) and \
                node.lineno < begins[0].lineno and not program.optional(node):
            yield node, "%s() comes before init_process_group()" % name, "call init_process_group() first"
        if (name in COLLECTIVES and dist and 'group' not in keywords(node) or name in OF_FSDP and names & FSDP or
                names & DDP and (name == 'backward' or name == 'step' and 'opt' in owner(node))) and \
                program.one_branch(node):
            yield node, "only some ranks call %s(): %s" % (name, "the parameters of the others do not change" if name
                                                           == 'step' else "they wait for the others"), \
                "have all ranks call it"
        if name in ONCE and program.world > 1 and not program.for_one_rank(node):
            yield from once(program, node, name, ONCE[name])
        if literal(keywords(node).get('download')) is True and program.world > 1 and not program.for_one_rank(node):
            yield node, "all ranks download the same data set with %s()" % name, \
                "download on local rank 0, then call barrier()"


def files(program: 'Program') -> 'Iterator[tuple]':
    """A file that one rank writes exists when the others read it."""
    for save in program.calls if 'init_process_group' in program.names and program.world > 1 else ():
        if called(save) != 'save' or owner(save) != 'torch' or len(save.args) < 2 or not program.for_one_rank(save):
            continue
        for load in program.calls:
            if called(load) == 'load' and owner(load) == 'torch' and load.args and ast.dump(load.args[0]) == ast.dump(
                    save.args[1]) and not program.for_one_rank(load):
                if re.match('/(tmp|dev/shm|var/tmp)/', program.directory(load.args[0])) and program.several:
                    yield load, "all ranks read a file that one wrote in %s, which other nodes do not see" % (
                        program.directory(load.args[0])), "write to a file system that all nodes have"
                between = [one for one in program.calls if save.lineno <= one.lineno <= load.lineno]
                if program.function(load) is program.function(save) and load.lineno > save.lineno and not any(
                        called(one) in COLLECTIVES for one in between):
                    yield load, "all ranks read a file that one may still be writing", "call dist.barrier() before"


def steps(program: 'Program') -> 'Iterator[tuple]':
    """All ranks do the same number of steps, with parameters of the same size: else they wait for each other."""
    names = {called(node) for node in program.calls}
    if not names & (DDP | FSDP | set(COLLECTIVES)) or program.world < 2:
        return
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
        sizes = node.args if called(node) == 'range' or LAYERS.match(called(node)) else [
            node.lower, node.upper] if isinstance(node, ast.Slice) else []
        for part in sizes:
            if isinstance(part, ast.BinOp) and isinstance(part.op, (ast.Add, ast.Sub)) and any(
                    re.search('rank$|get_rank', named(one) or called(one)) for one in (part.left, part.right)):
                yield part, "a size depends on the rank: ranks do different steps, or have different parameters", \
                    "use the same size on all ranks"


def once(program: 'Program', node: 'ast.Call', name: str, what: str) -> 'Iterator[tuple]':
    """A file or directory that all ranks write, rename, remove or make."""
    paths = node.args[:2]
    if name in ('replace', 'move', 'remove') and owner(node) not in ('os', 'shutil'):
        return      # of a text, or of a list
    if name == 'save':
        paths = node.args[1:2] * (owner(node) == 'torch')
    elif what != 'write' and owner(node) not in ('os', 'shutil', ''):
        paths = [node.func.value] if isinstance(node.func, ast.Attribute) else []     # of a Path
    text = ' '.join(map(program.words, paths))
    harmless = what == 'make' and (literal(keywords(node).get('exist_ok')) or program.optional(node))
    if paths and not harmless and (what == 'write' or any(map(program.directory, paths))) and not re.search(
            'rank|pid|host|uuid|LOCALID|temp|job|tmpdir', text, re.I):
        yield node, "all ranks %s the same %s with %s()" % (what, 'directory' if 'dir' in name else 'file', 'torch.' * (
            name == 'save') + name), "exist_ok=True" if what == 'make' else "if dist.get_rank() == 0: %s(...)" % name


def data(program: 'Program') -> 'Iterator[tuple]':
    """Each rank trains on its own part of the same data, and the ranks together on all of it."""
    names, started = program.names, 'init_process_group' in program.names
    loaders = [node for node in program.calls if called(node) == 'DataLoader']
    for node in program.calls:
        name, words = called(node), keywords(node)
        if name == 'DistributedSampler':
            size, rank = program.value(words.get('num_replicas')), words.get('rank')
            if 'set_epoch' not in names and literal(words.get('shuffle')) is not False:
                yield node, "DistributedSampler without set_epoch(): each epoch has the same order", \
                    "call sampler.set_epoch(epoch) at the beginning of each epoch"
            if started and re.search('rank|time|pid|rand', program.words(words.get('seed')), re.I):
                yield node, "the seed of DistributedSampler differs between ranks: their parts of the data overlap", \
                    "leave seed out, or use the same number on all ranks"
            if isinstance(size, int) and size != program.world or isinstance(program.value(rank), int) and \
                    program.world > 1 or program.several and re.search(
                        'local_?rank|LOCALID', program.words(rank), re.I):
                yield node, "num_replicas or rank of DistributedSampler does not fit the %d ranks of this job" % (
                    program.world), "leave num_replicas and rank out"
        if node in loaders:
            workers = program.value(words.get('num_workers'))
            if 'sampler' in words and literal(words.get('shuffle')) is True:
                yield node, "DataLoader has a sampler and shuffle=True, which exclude each other", "leave shuffle out"
            if isinstance(workers, int) and 0 < program.cores < workers:
                yield node, "DataLoader starts %d workers, but a rank has %d cores" % (workers, program.cores), \
                    "ask for more cores (--cpus-per-task), or use fewer workers"
        if name in DRAWS and started and 'generator' not in words and not program.for_one_rank(node) and (
                owner(node) in ('', 'torch', 'random', 'np', 'utils', 'data')):
            seeds = [one for one in program.calls if re.search(SEEDS, called(one))]
            own = any(RANK.search(' '.join(map(program.words, one.args))) for one in seeds)
            if own and name == 'random_split' or not seeds:
                yield node, "%s() draws different numbers on each rank: %s" % (
                    name, "the seed depends on the rank" if own else "nothing sets a seed"), "pass it a generator"
        if name in LISTINGS and started and program.several and no_order(program, node):
            yield node, "%s() may list files in a different order on each node" % name, "use sorted(...)"
    if program.world > 1 and names & DDP and loaders and 'IterableDataset' not in program.used and not any(
            word is None or 'sampler' in str(word) for node in loaders for word in keywords(node)) and not any(
                len(node.args) > 3 for node in loaders) and not any(map(FRAMEWORKS.search, program.imports)):
        yield loaders[0], "DistributedDataParallel with a DataLoader without a sampler: all ranks train on the same " \
            "data", "use DataLoader(..., sampler=DistributedSampler(dataset))"
    sets = [node for node in program.nodes if goes_through_set(program, node)] if started and program.world > 1 and \
        not re.match('[0-9]', program.environ.get('PYTHONHASHSEED', '')) else []
    if sets:
        yield getattr(sets[0], 'iter', sets[0]), "the order of a set of strings differs from rank to rank", \
            "use sorted(...), or export PYTHONHASHSEED=0 before srun"


def no_order(program: 'Program', node: 'ast.Call') -> bool:
    """Whether the program keeps the files that a call lists, and nothing sorts them."""
    around = list(program.around(node))
    kept = next((one for one, _ in around if isinstance(one, ast.stmt)), node)     # type: Any
    whose = {named(target) for target in getattr(kept, 'targets', ())} - {''}
    asks = [one for one in program.calls if whose & {named(part) for part in ast.walk(one)}]
    reads = sum(named(one) in whose and isinstance(one.ctx, ast.Load) for one in program.nodes
                if isinstance(one, (ast.Name, ast.Attribute)))
    return not any(called(one) in UNORDERED for one, _ in around) and not any(
        'sort' in called(one) for one in asks) and reads > sum(called(one) in UNORDERED for one in asks)


def is_set(program: 'Program', node: 'Any', deep: int = 3) -> bool:
    """Whether an expression is a set whose elements may be strings."""
    if isinstance(node, ast.Set):
        return not all(isinstance(literal(part), (int, float)) for part in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)):
        return is_set(program, node.left, deep) or is_set(program, node.right, deep)
    values = program.assigned(node) if deep and isinstance(node, (ast.Name, ast.Attribute)) else []
    return isinstance(node, ast.SetComp) or called(node) in ('set', 'frozenset') and bool(node.args) and called(
        node.args[0]) != 'range' or len(values) == 1 and is_set(program, values[0], deep - 1)


def goes_through_set(program: 'Program', node: 'Any') -> bool:
    """Whether a node iterates over a set of strings and the order matters, as it does not for printing or adding up."""
    through = node.iter if isinstance(node, (ast.For, ast.comprehension)) else node.args[0] if called(node) in (
        'list', 'tuple', 'enumerate', 'zip', 'iter', 'map', 'tensor', 'array', 'join') and node.args else None
    if through is None or not is_set(program, through):
        return False
    if isinstance(node, ast.For):
        return any(isinstance(part, (ast.Assign, ast.AugAssign)) or called(part) in COLLECTIVES + (
            'append', 'setdefault') for one in node.body for part in ast.walk(one))
    around = list(program.around(node))[:3]
    return not any(called(one) in UNORDERED or isinstance(one, ast.SetComp) for one, _ in around)


def gradients(program: 'Program') -> 'Iterator[tuple]':
    """Parameters that DistributedDataParallel or FSDP do not see, and steps that bypass them."""
    wraps = [node for node in program.calls if called(node) in DDP and program.world > 1]
    if wraps and not any(literal(keywords(node).get(word)) for node in wraps
                         for word in ('find_unused_parameters', 'static_graph')):
        classes = {part.name: part for part in program.nodes if isinstance(part, ast.ClassDef)}
        read = {part.attr if isinstance(part, ast.Attribute) else literal(part) for part in program.nodes
                if not isinstance(getattr(part, 'ctx', None), ast.Store)}
        for name in program.used & set(classes):
            if any(getattr(one, 'name', '') == 'forward' for one in classes[name].body):
                yield from unused_layers(program, classes[name], classes, read)
    for node in wraps:
        inner = named(node.args[0]) if node.args and isinstance(node.args[0], ast.Name) else ''
        outer = {named(target) for target in getattr(program.above.get(id(node)), 'targets', ())} - {''}
        for call in program.calls if outer else ():
            bare = inner and inner not in outer and isinstance(call.func, ast.Name) and call.func.id == inner and \
                program.function(call) is program.function(node) and call.lineno > node.lineno
            if (bare or 'module' in (called(call), owner(call) * (called(call) == 'forward'))) and call.args and \
                    not program.without_gradients(call):
                yield call, "%s() bypasses DistributedDataParallel: gradients are not averaged" % (
                    inner if bare else 'module'), "call what DistributedDataParallel() returns"
        if isinstance(keywords(node).get('device_ids'), ast.List) and not program.gpus and not program.optional(node):
            yield node, "DistributedDataParallel(device_ids=...), but this rank sees no GPU", \
                "ask for GPUs, or leave device_ids out"
        own = {one.name for part in program.nodes if isinstance(part, ast.ClassDef) for one in part.body if isinstance(
            one, FUNCTIONS)} - {'forward', 'train', 'eval', 'state_dict', 'load_state_dict', 'parameters', 'to', 'join'}
        for part in program.nodes if outer and own else ():
            if isinstance(part, ast.Attribute) and part.attr in own and isinstance(part.value, ast.Name) and \
                    part.value.id in outer and part.lineno > node.lineno and \
                    program.function(part) is program.function(node):
                yield part, "DistributedDataParallel has no %s(): it belongs to the wrapped model" % part.attr, \
                    "write .module.%s()" % part.attr
    for node in [node for node in program.calls if called(node) in FSDP and node.args]:
        early = [one for one in program.calls if called(one) == 'parameters'
                 and one.lineno < node.lineno and program.function(one) is program.function(node)
                 and owner(one) == named(node.args[0])
                 and any(re.match('[A-Z]', called(above)) for above, _ in program.around(one))]
        if early:
            yield early[0], "the optimizer has the parameters that the model had before %s" % called(node), \
                "create the optimizer after wrapping the model"


def unused_layers(program: 'Program', node: 'ast.ClassDef', classes: dict, read: set) -> 'Iterator[tuple]':
    """Layers of a class that nothing reads, or that forward() uses at random."""
    layers = {target.attr: target for part in ast.walk(node) if isinstance(part, ast.Assign) and (
        LAYERS.match(called(part.value)) or called(part.value) in classes) for target in part.targets
              if isinstance(target, ast.Attribute) and named(target.value) == 'self'}
    every = {'children', 'modules', 'named_children', 'named_modules', 'getattr'} & {called(p) for p in ast.walk(node)}
    remedy = "use DistributedDataParallel(find_unused_parameters=True)"
    for name in sorted(set(layers) - read) if not every else ():
        yield layers[name], "forward() does not use self.%s: DistributedDataParallel stops at the second step" % (
            name), "remove it, or " + remedy
    for part in ast.walk(node):
        if isinstance(part, (ast.If, ast.IfExp)) and re.search(r'\brand|random', program.words(part.test)) and any(
                named(one) in layers for one in ast.walk(part)):
            yield part, "forward() uses layers at random: DistributedDataParallel stops at the next step", remedy


def python(program: 'Program') -> 'Iterator[tuple]':
    """What torch.compile or this Python does not accept, and missing GPUs."""
    for node in filter(compiles, program.calls):
        above, words = program.above.get(id(node)), keywords(node)
        inside = [above] if isinstance(above, FUNCTIONS) else [one for one in program.nodes if isinstance(
            one, FUNCTIONS) and one.name in ('forward', named((node.args + [None])[0]))]
        breaks = [part for one in inside for part in ast.walk(one) if called(part) in BREAKS]
        if breaks and literal(words.get('fullgraph')):
            yield breaks[0], "torch.compile(fullgraph=True) cannot compile %s()" % called(breaks[0]), \
                "move it out of forward(), or leave fullgraph out"
    flag = program.environ.get('PYTHONOPTIMIZE', '')
    nccl = re.search(rb'[\'"]nccl[\'"]', b''.join(program.files.values()))
    for node in program.nodes if flag not in ('', '0') else ():
        if isinstance(node, ast.Assert) and any(isinstance(part, ast.Call) and called(part) not in UNORDERED + (
                'hasattr', 'callable') for part in ast.walk(node.test)):
            yield node, "PYTHONOPTIMIZE=%s removes assert statements, so the call in this one does not happen" % flag, \
                "unset PYTHONOPTIMIZE, or make the call a separate statement"
    asks = program.gpus or nccl or {'is_available', 'device_count'} & program.names
    for node in program.calls if not asks else ():
        if (called(node) in ('cuda', 'set_device') and isinstance(node.func, ast.Attribute) or called(node) in (
                'to', 'device') and any(str(literal(part)).startswith('cuda') for part in node.args)) and \
                not program.optional(node):
            yield node, "uses a GPU, but this rank sees none", "ask for GPUs (srun --gpus-per-task=1)"


def undefined(program: 'Program') -> 'Iterator[tuple]':
    """Names that nothing in a file defines."""
    for tree in program.trees:
        parts = list(ast.walk(tree))    # type: Any
        known = {*dir(builtins), *vars(types.ModuleType('')), '__file__', '__path__', '__qualname__', '__module__',
                 '__annotations__', '__builtins__', 'WindowsError', 'get_ipython', 'profile'}   # type: Any
        notes = {id(one) for part in parts for note in (getattr(part, 'annotation', None), getattr(
            part, 'returns', None)) if note for one in ast.walk(note)}      # nobody need evaluate them
        for part in parts:
            known |= {getattr(part, name, None) for name in ('arg', 'name', 'asname', 'rest')}
            known |= {part.id} if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load) else set(
                getattr(part, 'names', ())) if isinstance(part, (ast.Global, ast.Nonlocal)) else set()
            known |= {part.name.split('.')[0]} if isinstance(part, ast.alias) else set()
        for part in parts if not known & {'*'} and not {'exec', 'globals', 'vars'} & set(map(called, parts)) else ():
            if isinstance(part, ast.Name) and part.id not in known and id(part) not in notes and not program.optional(
                    part):
                yield part, "'%s' is used, but nothing defines it" % part.id, "define or import it"


def check(report: 'Report', program: 'Program', gpus: bool, cores: int = 0) -> None:
    """Apply all rules; if several lines have the same finding, report the first one."""
    said = set()    # type: set
    program.gpus, program.cores = gpus, cores
    for rule in (group, ranks, order, files, steps, data, gradients, python, undefined):
        for node, text, remedy in rule(program):
            if text not in said:
                said.add(text)
                report.add('red' if text[0] == '!' else 'yellow', 'program', '%s: %s' % (
                    program.where(node), text.lstrip('!')), remedy)
