# SPDX-License-Identifier: GPL-2.0-only
"""
What may differ from rank to rank, and from node to node: limits of the shell and of control groups against what the
process with PyTorch took, directories that are really written to, and whether the program is there.
"""
import ast
import contextlib
import hashlib
import importlib.util
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Callable, Mapping, Optional

    from .findings import Report
    from .machine import Machine

# option of ulimit: its number in getrlimit(2), and what it is
SHELL = {'n': (resource.RLIMIT_NOFILE, 'open files'), 'v': (resource.RLIMIT_AS, 'address space'),
         'd': (resource.RLIMIT_DATA, 'data'), 's': (resource.RLIMIT_STACK, 'stack'),
         'f': (resource.RLIMIT_FSIZE, 'size of a file'), 't': (resource.RLIMIT_CPU, 'processor time')}
# seconds for directories and programs: a file system that hangs must not take the check with it
WAIT = 5
# bytes that are written for a trial
TRIAL = 1 << 20
# What containers give /dev/shm by default, and NCCL's manual ("Troubleshooting", shared memory) calls too little.
SMALL_SHM = 64 << 20
# A tensor or a checkpoint of a toy is larger; 1 GB of a real one.
SMALL_FILE, LARGE_FILE = 16 << 20, 1 << 30
# what is said of a directory
WRITTEN, A_FILE = 'written', 'it is a file'
# seconds of processor time that no training gets by with
SHORT = 60
# Open files that a DataLoader of two workers needs: with ten left, PyTorch 2.13 ended with "Too many open files" on
# rank 0, which has the store and writes; another rank trained with 14 left.
WORKERS, WORKERS_ELSEWHERE = 16, 8
# a stack below which it is tried whether Python can do with it
SMALL_STACK = 1 << 20


def of_shell() -> dict:
    """{option of ulimit: its limit}, those that there are."""
    found = {option: resource.getrlimit(number)[0] for option, (number, _) in SHELL.items()}
    return {option: limit for option, limit in found.items() if limit != resource.RLIM_INFINITY}


def quota(machine: 'Machine') -> 'Optional[float]':
    """Cores that the control groups allow on average; None without a limit."""
    least = None  # type: Optional[float]
    for group in machine.cgroups('cpu'):
        words = (machine.read(group + '/cpu.max') or '%s %s' % (
            machine.read(group + '/cpu.cfs_quota_us'), machine.read(group + '/cpu.cfs_period_us'))).split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            cores = int(words[0]) / int(words[1])
            least = cores if least is None else min(least, cores)
    return least


def look(machine: 'Machine', report: 'Report', details: dict) -> None:
    """What this rank may have, as far as a rank alone can tell."""
    limits = details['limits'] = of_shell()
    details['memory'], _, details['memory of'] = machine.free_memory()
    size = limits.get('f')
    if size is not None and size < LARGE_FILE:
        report.add('red' if size < SMALL_FILE else 'yellow', 'limit', "ulimit -f: a file of this rank has %d bytes at "
                   "most, also a checkpoint, and what it shares with its workers in /dev/shm" % size,
                   "ulimit -f unlimited, in the job script or where the limit is set")
    if 't' in limits:
        report.add('red' if limits['t'] < SHORT else 'yellow', 'limit', "ulimit -t: the kernel ends this rank after %d "
                   "s of processor time" % limits['t'], "ulimit -t unlimited, where the limit is set")
    cores = quota(machine)
    if cores is not None and cores < 1:
        report.add('yellow', 'limit', "a control group gives this rank and those that share it %.2g of a core (its "
                   "quota): all others wait for it" % cores, "ask for more cores, or have the centre look at the node")
    if limits.get('s', SMALL_STACK) < SMALL_STACK:
        status = subprocess.run([sys.executable, '-B', '-c', 'import tempfile'], stderr=subprocess.DEVNULL,
                                check=False).returncode
        report.add('red' if status else 'yellow', 'limit', "ulimit -s: the stack of this rank may have %d kB%s" % (
            limits['s'] >> 10, ", and Python ends with status %d where it imports a module" % status if status else
            ', and that of each thread'), "ulimit -s 8192, in the job script or where the limit is set")
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > 0:
        report.add('yellow', 'limit', "this rank runs with nice %d: other processes of the node go before it" % nice,
                   "start it without nice")


def megabytes(number: int) -> str:
    """For a person, with few different values."""
    return '%d MB' % max(1, number >> 20)


def check(report: 'Report', ranks: list, took: dict, world: int, connects: bool) -> None:
    """
    What the ranks of a node may have against what PyTorch took in the process that tried it.

    :param ranks: details of all ranks of the node
    :param took: of that process: 'fds', 'v', 'd' (bytes, as of ulimit), 'anon' (bytes), 'nodes'
    :param world: number of ranks
    :param connects: whether each rank will connect to all others, as gloo does
    """
    groups = {}  # type: dict
    failed = 0      # these have said so themselves
    for finding in report.having('red', 'import'):
        failed |= report.findings[finding]
    for details in ranks:
        limits, mask = details.get('limits', {}), 1 << details['rank']
        if failed & mask:
            continue
        for option in 'vd':
            if took.get(option, 0) > limits.get(option, took.get(option, 0)):
                report.add('red', 'limit', "ulimit -%s: this rank may have %s of %s, and PyTorch took more on this "
                           "node, before any training" % (option, megabytes(limits[option]), SHELL[option][1]),
                           "ulimit -%s unlimited, in the job script or where the limit is set" % option, mask)
        if took.get('fds') and 'n' in limits:
            need = took['fds'] + (max(0, world - took.get('nodes', 1)) if connects else 0)
            if limits['n'] < need + 3 * WORKERS:
                workers = WORKERS_ELSEWHERE if details['rank'] else WORKERS
                report.add('red' if limits['n'] < need + workers else 'yellow', 'limit', "ulimit -n: this rank may "
                           "have %d open files; PyTorch and the connections of %d ranks take %d, and workers of a "
                           "DataLoader need some" % (limits['n'], world, need),
                           "ulimit -n 65536, in the job script or where the limit is set", mask)
        if details.get('memory of'):
            groups.setdefault((details['memory of'], details['memory']), []).append(details['rank'])
    for (_, left), who in groups.items():
        if took.get('anon') and left < len(who) * took['anon']:
            report.add('red', 'limit', "a control group leaves %s of memory to %d rank%s, and each process with "
                       "PyTorch takes more than %s, before any training" % (
                           megabytes(left), len(who), 's'[:len(who) != 1], megabytes(left // len(who))),
                       "ask for more memory (srun --mem)", sum(1 << rank for rank in who))


def processes(machine: 'Machine') -> str:
    """How many processes and threads this rank may have, for a message; '' without a limit."""
    found = []
    user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if user != resource.RLIM_INFINITY:
        found.append("ulimit -u is %d" % user)
    for group in machine.cgroups('pids'):
        most = machine.read(group + '/pids.max')
        if most.isdigit():
            found.append("its control group has %s processes and threads of %s" % (
                machine.read(group + '/pids.current') or '?', most))
    return '; '.join(found)


def cause_of(error: str, limits: dict) -> str:
    """Which limit may be behind an import that failed; ''."""
    if 's' in limits and limits['s'] < 1 << 20 and 'status -11' in error:
        return 'ulimit -s: the stack of this rank may have %d kB' % (limits['s'] >> 10)
    if re.search('failed to map|[Cc]annot allocate|Memory allocation|MemoryError|bad_alloc|status -(6|9|11)|new thread',
                 error):
        for option in 'vd':
            if option in limits:
                return 'ulimit -%s: this rank may have %s of %s' % (option, megabytes(limits[option]), SHELL[option][1])
    if 'n' in limits and re.search('Too many open files|Errno 24', error):
        return 'ulimit -n: this rank may have %d open files' % limits['n']
    return ''


# ----------------------------------------------------------------------------------------------------------------------
# directories and the program: the first rank of a node looks

def in_time(function: 'Callable', *arguments: object) -> bool:
    """Whether the function ended within WAIT seconds; else its thread stays behind."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    thread.join(WAIT)
    return not thread.is_alive()


def write_trial(directory: str, size: int = 4096) -> str:
    """Why a file with so many bytes cannot be written in a directory; ''."""
    try:
        with tempfile.TemporaryFile(dir=directory) as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
    except OSError as err:
        return err.strerror or str(err)
    return ''


def look_at_directories(machine: 'Machine', report: 'Report') -> None:
    """Where a training writes: is it possible? Tried, since permissions mean nothing to root and to a full disk."""
    try:
        tempfile.gettempdir()
    except OSError:
        report.add('red', 'disk', "no directory for temporary files can be written: TMPDIR=%s, /tmp, /var/tmp"
                   % machine.environ.get('TMPDIR', ''), "name one in TMPDIR, or start without this node (--exclude)")
    for variable, what in (('TMPDIR', 'temporary files'), ('HOME', 'caches and settings'), ('XDG_CACHE_HOME', 'caches'),
                           ('HF_HOME', 'models and data of Hugging Face')):
        path = machine.environ.get(variable)
        if not path:
            continue
        there = path
        while not os.path.isdir(there) and there not in ('/', '') and not os.path.exists(there):
            there = os.path.dirname(there)
        report.fact('%s=%s: %s' % (variable, path, what),
                    A_FILE if os.path.isfile(there) else write_trial(there) or WRITTEN)
    shm = machine.path('dev/shm')
    wrong = write_trial(shm, TRIAL) if os.path.isdir(shm) else 'not there'
    remedy = "give the node's or the container's /dev/shm more room (docker --shm-size), or have the centre clean it up"
    if wrong:
        report.add('red', 'shm', "/dev/shm cannot take 1 MB (%s): workers of a DataLoader and NCCL pass their data "
                   "there" % wrong, remedy)
    elif os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize <= SMALL_SHM:
        report.add('yellow', 'shm', "/dev/shm has %s free: little for NCCL and the workers of a DataLoader"
                   % megabytes(os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize), remedy)


def compare_directories(report: 'Report') -> None:
    """
    Directories that cannot be written. Where other nodes of the job can write, the file system is full or broken there.
    Elsewhere it may be meant so: at some centres compute nodes have no home directory.
    """
    for fact, values in sorted(report.facts.items()):
        found = re.match(r'((TMPDIR|HOME|XDG_CACHE_HOME|HF_HOME)=.*): ([^:]*)$', fact)
        if not found:
            continue
        where, variable, what = found.groups()
        # Python's own temporary files go elsewhere then
        others = ", and on other nodes it can" if WRITTEN in values and variable != 'TMPDIR' else ''
        for wrong, mask in values.items():
            if wrong != WRITTEN:
                report.add('red' if others or wrong == A_FILE else 'yellow', 'disk',
                           "%s cannot be written (%s)%s: %s cannot go there" % (where, wrong, others, what),
                           "%sname another directory in %s" % (
                               "start without these nodes (srun --exclude), or " * bool(others), variable), mask)


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


def imports_of(text: bytes) -> list:
    """The packages that a script imports first of all, outside of functions and 'try'; [] of one that is no Python."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return []
    names = [name.name for node in body if isinstance(node, ast.Import) for name in node.names]
    names += [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return sorted({name.partition('.')[0] for name in names})


def files_of_program(script: str, text: bytes) -> list:
    """The texts of a script and of the modules that it imports from below its own directory."""
    texts = [text]
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, OSError):
        for node in ast.walk(ast.parse(text)):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                path = os.path.join(os.path.dirname(os.path.abspath(script)), *name.split('.')) + '.py'
                if os.path.isfile(path) and len(texts) < 20:
                    with open(path, 'rb') as stream:
                        texts.append(stream.read(SMALL_FILE))
    return texts


def takes_local(text: bytes) -> bool:
    """Whether Python code takes the GPU with the number of its local rank, without a look at how many it sees."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return False

    def words(node: 'ast.AST') -> set:
        return {str(getattr(part, 'id', getattr(part, 'attr', getattr(part, 'value', '')))) for part in ast.walk(node)}

    def modulo(node: 'ast.AST') -> bool:
        return 'device_count' in words(node) or any(     # but '%' of a text
            isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and not isinstance(part.left, ast.Constant)
            for part in ast.walk(node))

    def local(node: 'ast.AST') -> bool:
        return not modulo(node) and any(
            word in named or word not in spared and re.search('local_?(rank|id$)', word, re.I) for word in words(node))

    named, spared = set(), set()    # type: set, set
    for assigned in sorted((node for node in nodes if isinstance(node, ast.Assign)), key=lambda node: node.lineno):
        targets = {getattr(target, 'id', getattr(target, 'attr', '')) for target in assigned.targets} - {''}
        if modulo(assigned.value):
            spared |= targets
        elif local(assigned.value) and not any(isinstance(part, (ast.keyword, ast.Dict, ast.DictComp))
                                               for part in ast.walk(assigned.value)):   # those hold it among others
            named |= targets
    spared -= named
    for node in nodes:
        if isinstance(node, ast.Call) and node.args and local(node.args[0]) and \
                getattr(node.func, 'attr', '') in ('set_device', 'set_device_index'):
            return True
        if isinstance(node, ast.keyword) and node.arg == 'device_ids' and isinstance(node.value, ast.List) and \
                local(node.value):
            return True
        if isinstance(node, (ast.JoinedStr, ast.BinOp)) or getattr(getattr(node, 'func', None), 'attr', '') == 'format':
            # 'cuda:%d', f'{acc}:{rank}'
            if local(node) and any(re.match(r'(cuda)?:(%[ds]|\{\})?$', word) for word in words(node)) and \
                    any(re.match('cuda:|acc|dev', word) for word in words(node)):
                return True
    return False


def gpu_of_program(texts: list) -> str:
    """
    Which GPU a program takes: 'local' for that with the number of its local rank, '0' for the first one in all ranks,
    '' where it does not say so itself: frameworks choose the GPU.

    :param texts: of the script first, then of its own modules
    """
    if any(map(takes_local, texts)):
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


def look_at_program(report: 'Report', words: list, details: dict, environ: 'Mapping[str, str]') -> None:
    """
    Whether the script or module is there, what it imports, and which GPU it takes; what differs between nodes is found
    by rank 0.

    :param details: of look.look(): the GPUs that this rank sees
    """
    kind, name = program_of(words)
    if kind == 'module':
        found = True
        sys.path.insert(0, '')      # the working directory
        with contextlib.suppress(ImportError, ValueError, OSError):
            found = importlib.util.find_spec(name.partition('.')[0]) is not None
        del sys.path[0]
        if not found:
            report.add('red', 'script', "python -m %s: this node finds no such module" % name,
                       "start in its directory, or install it in this environment")
        return
    if not name or os.path.isdir(name):
        return
    try:
        with open(name, 'rb') as stream:
            text = stream.read(1 << 24)
    except OSError as err:
        report.add('red', 'script', "the script %s cannot be read on this node (%s)" % (name, err.strerror),
                   "put it on a file system that all nodes have")
        return
    if not text.strip():
        report.add('red', 'script', "the script %s is empty on this node" % name, "see which copy each node has")
        return
    check_layout(report, files_of_program(name, text), details.get('gpus'), int(environ.get('LOCAL_WORLD_SIZE') or 1))
    report.fact('script ' + name, hashlib.sha256(text).hexdigest()[:12])
    sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
    try:
        for package in imports_of(text):
            try:
                there = package in sys.modules or importlib.util.find_spec(package) is not None
            except (ImportError, ValueError, AttributeError):
                there = True    # it says so itself
            report.fact('module ' + package, there)
    finally:
        del sys.path[0]


def compare_programs(report: 'Report') -> None:
    """Scripts and modules that not all nodes have alike."""
    for fact, values in sorted(report.facts.items()):
        kind, _, name = fact.partition(' ')
        if kind == 'script' and len(values) > 1:
            fewest = min(values.values(), key=lambda mask: bin(mask).count('1'))
            report.add('red', 'script', "nodes have different copies of the script %s" % name,
                       "put it on a file system that all nodes have", fewest)
        elif kind == 'module' and 'False' in values:
            report.add('red' if 'True' in values else 'yellow', 'script', "the script imports %s, which %s" % (
                name, "these nodes do not have, and others do" if 'True' in values else "is not there"),
                "install it where all nodes have it", values['False'])
