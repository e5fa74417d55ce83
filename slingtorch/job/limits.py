# SPDX-License-Identifier: GPL-2.0-only
"""
What may differ from rank to rank and from node to node: limits of the shell and of control groups, compared with what
the process with PyTorch used; directories, tested by writing to them; and a compiler.
"""
import contextlib
import ctypes
import os
import re
import resource
import shutil
import stat
import subprocess
import sysconfig
import tempfile
import threading

from .kinds import Any, Callable, Machine, Mapping, Optional, Report

# {option of ulimit: (its number in getrlimit(2), what it limits)}
SHELL = {'n': (resource.RLIMIT_NOFILE, 'open files'), 'v': (resource.RLIMIT_AS, 'address space'),
         'd': (resource.RLIMIT_DATA, 'data'), 's': (resource.RLIMIT_STACK, 'stack'),
         'f': (resource.RLIMIT_FSIZE, 'size of a file'), 't': (resource.RLIMIT_CPU, 'processor time')}
# bytes of address space and of data that suffice for CUDA and a training of some GB; bytes of a large thread stack
SPACE, LARGE_STACK = 16 << 30, 1 << 30
# seconds for directories and programs: a file system that hangs must not hang the check
WAIT = 5
# bytes that a trial writes
TRIAL = 1 << 20
# The default size of /dev/shm in containers, which NCCL's manual ("Troubleshooting", shared memory) calls too small.
SMALL_SHM = 64 << 20
# bytes that a tensor or a checkpoint of even a toy model exceeds, and those that one of a real model exceeds
SMALL_FILE, LARGE_FILE = 16 << 20, 1 << 30
# values of a fact about a directory
WRITTEN, A_FILE = 'written', 'it is a file'
# {variable with a directory: what programs write there}
DIRECTORIES = {'TMPDIR': 'temporary files', 'HOME': 'caches and settings', 'XDG_CACHE_HOME': 'caches',
               'HF_HOME': 'models and data of Hugging Face'}
RAISE = "ulimit -%s, in the job script or where the limit is set"
# seconds of processor time that are too few for any training
SHORT = 60
# Open files that a DataLoader of two workers needs: with ten left, PyTorch 2.13 ended with "Too many open files" on
# rank 0, which has the store and writes; another rank trained with 14 left.
WORKERS, WORKERS_ELSEWHERE = 16, 8
# processes and threads of a rank: those of PyTorch and OpenMP, and some workers; seconds of a short training
ROOM, SOON = 64, 300
# characters of TMPDIR at most: Python adds /pymp-xxxxxxxx/listener-xxxxxxxx; bytes for a program's output
LONGEST = 74
PRINTS = 1 << 20
# bytes of a stack that are few for Python
SMALL_STACK = 1 << 20


def of_shell() -> dict:
    """{option of ulimit: its limit}, without unlimited ones."""
    found = {option: resource.getrlimit(number)[0] for option, (number, _) in SHELL.items()}
    return {option: limit for option, limit in found.items() if limit != resource.RLIM_INFINITY}


def quota(machine: 'Machine') -> 'Optional[float]':
    """Cores that the control groups allow on average; None if there is no limit."""
    least = None  # type: Optional[float]
    for group in machine.cgroups('cpu'):
        words = (machine.read(group + '/cpu.max') or '%s %s' % (
            machine.read(group + '/cpu.cfs_quota_us'), machine.read(group + '/cpu.cfs_period_us'))).split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            cores = int(words[0]) / int(words[1])
            least = cores if least is None else min(least, cores)
    return least


def look(machine: 'Machine', report: 'Report', details: dict) -> None:
    """Check the limits that a rank can judge by itself."""
    limits = details['limits'] = of_shell()
    details['memory'], _, details['memory of'] = machine.free_memory()
    for option in SHELL:
        report.fact('ulimit -' + option, limits.get(option, 'unlimited'))
    size, stack, seconds = (limits.get(option) for option in 'fst')

    def add(text: str, remedy: str, red: bool = False) -> None:
        report.add('red' if red else 'yellow', 'limit', text, remedy)

    if size is not None and size < LARGE_FILE:
        add("ulimit -f: this rank can write at most %d bytes to a file, also to a checkpoint, and to data for its "
            "workers in /dev/shm" % size, RAISE % 'f unlimited', size < SMALL_FILE)
    if seconds is not None:
        add("ulimit -t: the kernel ends this rank after %d s of processor time" % seconds, RAISE % 't unlimited',
            seconds < SHORT)
    if stack is not None and stack < SMALL_STACK:       # a Python that ends of it is the import's finding
        add("ulimit -s: a stack of this rank may have %d kB, also that of each thread" % (stack >> 10),
            RAISE % 's 8192')
    if stack is not None and stack >= LARGE_STACK:
        add("ulimit -s: each thread of this rank reserves a stack of %d MB" % (stack >> 20), RAISE % 's 8192')
    locked, most = (resource.getrlimit(number)[0] for number in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC))
    if machine.list('sys/class/infiniband') and 0 <= locked < SMALL_SHM and os.geteuid():
        add("ulimit -l: this rank may lock %d kB, but InfiniBand must lock the data it sends" % (locked >> 10),
            RAISE % 'l unlimited')
    cores = quota(machine)
    if cores is not None and cores < 1:
        add("a control group (its quota) allows this rank, or several, only %.2g of a core: all others wait for it"
            % cores, "ask for more cores, or ask the centre to check the node")
    if os.geteuid() and details.get('local_rank') == 0 and most != resource.RLIM_INFINITY:  # root may have more
        now = sum(len(machine.list('proc/%s/task' % name)) for name in machine.list('proc') if name.isdigit() and
                  re.search(r'^Uid:\s+%d\b' % os.getuid(), machine.read('proc/%s/status' % name), re.M))
        if most - now < ROOM:
            add("ulimit -u: this user may have %d processes and threads on a node, and has %d already: few are left "
                "for PyTorch and a DataLoader" % (most, now), RAISE % 'u unlimited')
    for most, now in pids(machine):
        if most - now < ROOM:
            add("a control group of this rank has %d of at most %d processes and threads: few are left for PyTorch and "
                "a DataLoader" % (now, most), "ask for more processes in the job, or have the limit raised")
    end = machine.environ.get('SLURM_JOB_END_TIME', '')
    if end.isdigit() and int(end) - machine.clock() < SOON:
        add("the job ends in less than %d minutes" % (SOON // 60), "ask for more time (--time)")


def megabytes(number: int) -> str:
    """Bytes in whole MB, so that nodes that differ little report the same."""
    return '%d MB' % max(1, number >> 20)


def check(report: 'Report', ranks: list, took: dict, world: int, connects: bool) -> None:
    """
    Compare the limits of a node's ranks (their details) with what the process with PyTorch took (probe.taken()).

    :param connects: whether each rank will connect to all others, as gloo does
    """
    groups = {}  # type: dict
    failed = 0      # ranks that have reported it themselves
    for finding in report.having('red', 'import'):
        failed |= report.findings[finding]
    for details in ranks:
        limits, mask = details.get('limits', {}), 1 << details['rank']
        if failed & mask:
            continue
        for option in 'vd':
            limit, need = limits.get(option, 0), took.get(option, 0)
            if need and limit and limit < max(2 * need, SPACE):
                report.add('red' if limit < need else 'yellow', 'limit', "ulimit -%s: this rank may have %s of %s, but "
                           "PyTorch used %son this node, before any training" % (
                               option, megabytes(limit), SHELL[option][1], 'more ' if limit < need else
                               'more than half of that ' if limit < 2 * need else '%s ' % megabytes(need)),
                           RAISE % (option + ' unlimited'), mask)
        need = took.get('fds', 0) + (max(0, world - 1) if connects else 0)
        if took.get('fds') and limits.get('n', need + 3 * WORKERS) < need + 3 * WORKERS:
            workers = WORKERS_ELSEWHERE if details['rank'] else WORKERS
            report.add('red' if limits['n'] < need + workers else 'yellow', 'limit', "ulimit -n: this rank may have %d "
                       "open files; PyTorch and the connections of %d ranks use %d, and workers of a DataLoader need "
                       "more" % (limits['n'], world, need), RAISE % 'n 65536', mask)
        if details.get('memory of'):
            groups.setdefault((details['memory of'], details['memory']), []).append(details['rank'])
    for (_, left), who in groups.items():
        if took.get('anon') and left < 2 * len(who) * took['anon']:
            sure = left < len(who) * took['anon']
            report.add('red' if sure else 'yellow', 'limit', "a control group leaves %s of memory to %d rank%s, but "
                       "each process with PyTorch uses more than %s, before any training" % (
                           megabytes(left), len(who), 's'[:len(who) != 1], megabytes(left // len(who) // (2 - sure))),
                       "ask for more memory (srun --mem)", sum(1 << rank for rank in who))


def pids(machine: 'Machine') -> list:
    """[(maximum number of processes and threads in a control group of this rank, current number)], as far as known."""
    found = [(machine.read(group + '/pids.max'), machine.read(group + '/pids.current'))
             for group in machine.cgroups('pids')]
    return [(int(most), int(now)) for most, now in found if most.isdigit() and now.isdigit()]


def cause_of(error: str, limits: dict) -> str:
    """The limit that may have made an import fail; '' if none."""
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

def in_time(function: 'Callable', *arguments: object) -> tuple:
    """(whether the function ends within WAIT seconds, its error as text); if it does not, its thread is left behind."""
    failed = []     # type: list

    def work() -> None:
        try:
            function(*arguments)
        except Exception as err:    # what it looks at is another's: one fault must not hide the other findings
            failed.append('%s: %s' % (type(err).__name__, err))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT)
    return not thread.is_alive(), ''.join(failed)


def nearest(path: str) -> str:
    """The directory or file that exists on the way to a path, the path itself at best."""
    while not os.path.lexists(path) and path not in ('/', ''):
        path = os.path.dirname(path)
    return path or '.'


def free_in(place: 'Any') -> int:
    """The free bytes of a path's or a descriptor's file system."""
    state = os.statvfs(place)
    return state.f_bavail * state.f_frsize


def write_trial(directory: str, size: int = 64 << 10, sync: bool = False) -> str:
    """Why a file of this size cannot be written in a directory; '' if it can."""
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as stream:
            if stream.write(b'\0' * size) < size:
                return 'no space for %d bytes' % size
            if sync:    # a network file system reports a full quota only then
                os.fsync(stream.fileno())
    except OSError as err:
        return err.strerror or str(err)
    return ''


def look_at_directories(machine: 'Machine', report: 'Report') -> None:
    """Try to write where a training writes: permissions do not show what root may do, nor that a disk is full."""
    try:
        length = len(tempfile.gettempdir())
        if length > LONGEST:
            report.add('yellow', 'disk', "the path of the directory for temporary files has %d characters: workers of "
                       "a DataLoader use sockets there, whose paths may have only 107 (unix(7))" % length,
                       "export TMPDIR with a shorter path")
    except OSError:
        report.add('red', 'disk', "no directory for temporary files is writable: TMPDIR=%s, /tmp, /var/tmp"
                   % machine.environ.get('TMPDIR', ''), "name one in TMPDIR, or start without this node (--exclude)")
    for variable, what in DIRECTORIES.items():
        path = machine.environ.get(variable)
        if path:
            there = nearest(path)
            report.fact('%s=%s: %s' % (variable, path, what),
                        A_FILE if os.path.isfile(there) else write_trial(there) or WRITTEN)
    try:
        here = os.getcwd()
    except OSError:
        here = 'one that has been removed'
    report.fact('working directory', here)
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(1).st_mode) and free_in(1) < PRINTS:
            report.add('yellow', 'disk', "stdout goes to a file on a full disk: printing ends the program",
                       "free space there, or name another file (--output)")
    shm = machine.path('dev/shm')
    wrong = write_trial(shm, TRIAL) if os.path.isdir(shm) else 'it does not exist'
    remedy = "enlarge the container's /dev/shm (docker --shm-size), or ask the centre to enlarge or clean up the node's"
    if wrong:
        report.add('red', 'shm', "cannot write 1 MB to /dev/shm (%s): workers of a DataLoader and NCCL pass their data "
                   "there" % wrong, remedy)
    elif free_in(shm) <= SMALL_SHM:
        report.add('yellow', 'shm', "/dev/shm has only %s free for NCCL and the workers of a DataLoader"
                   % megabytes(free_in(shm)), remedy)


def look_at_outputs(report: 'Report', details: dict) -> None:
    """Whether the program can write to its outputs (program.look_at_program()): try an unnamed file beside them."""
    made = details.get('made', {})
    for path, says in list(details.get('written', {}).items())[:50]:
        place = path if os.path.isdir(path) else os.path.dirname(path) or '.'
        there = nearest(place)
        wrong = '%s is not a directory' % there if not os.path.isdir(there) else write_trial(there, sync=True)
        if os.path.isfile(path) and not os.access(path, os.W_OK):
            wrong = 'it exists, and its permissions forbid it'
        if path in made and os.path.lexists(path) and (not os.path.isdir(path) or made[path]):
            wrong = 'it is a file' if os.path.isfile(path) else 'it is a link to nothing' if not os.path.isdir(
                path) else 'it exists, and the program does not set exist_ok'
        if not wrong and there != place and 'line' in says and not any(
                one in ('', '.') or (one + '/').startswith(place + '/') for one in made):
            wrong = 'the directory %s does not exist, and the program does not make it' % place
        if not wrong and free_in(there) < SMALL_FILE:
            wrong = 'its file system has only %s free' % megabytes(free_in(there))
        if wrong:
            report.add('yellow', 'disk', "%s: the program cannot write to %s (%s)" % (says, path, wrong),
                       "name another directory, create this one, or free space")


def look_at_compiler(report: 'Report', environ: 'Mapping[str, str]', details: dict) -> None:
    """Try what torch.compile needs on a node: a compiler, and a directory for caches from which code can run."""
    builds = details.get('extension')
    if not builds and (not details.get('compiles') or '1' in (environ.get('TORCH_COMPILE_DISABLE'),
                                                              environ.get('TORCHDYNAMO_DISABLE'))):
        return
    does, include = 'builds C++ extensions' if builds else 'calls torch.compile', sysconfig.get_paths()['include']

    def add(text: str, remedy: str, name: str = 'torch') -> None:
        report.add('yellow', name, "the program %s, but %s" % (does, text), remedy)

    if not os.path.isfile(os.path.join(include, 'Python.h')):
        add("this node has no Python.h in %s" % include,
            "install the headers of Python (python3-dev), or use a Python that has them")
    if builds and not shutil.which('ninja', path=environ.get('PATH')):
        add("this node has no ninja in PATH", "pip install ninja")
    there = nearest(environ.get('TORCHINDUCTOR_CACHE_DIR') or tempfile.gettempdir())
    # the compilers of Inductor and of Triton, searched for as they do
    for variable, known, kind in [('CXX', ('g++', 'clang++', 'c++'), 'C++')] + [
            ('CC', ('gcc', 'clang', 'cc'), 'C')] * bool(details.get('gpus')):
        names = environ.get(variable, '').split()[:1] or known
        compiler = next(filter(None, (shutil.which(name, path=environ.get('PATH')) for name in names)), '')
        remedy = "load one in the job script (%s), or start without torch.compile (TORCH_COMPILE_DISABLE=1)" % variable
        if not compiler:
            add("this node has no %s compiler in PATH (%s)" % (kind, ', '.join(names)), remedy)
            continue
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix='slingtorch-', dir=there) as place:
            library = os.path.join(place, 'a.so')
            done = subprocess.run([compiler, '-shared', '-fPIC', '-x', kind.lower(), '-', '-o', library],
                                  input=b'int a;', env=dict(environ), check=False, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE)
            if done.returncode:
                said = [line for line in done.stderr.decode(errors='replace').splitlines() if line.strip()][:1]
                add("the compiler %s fails on this node: status %d%s" % (
                    compiler, done.returncode, ''.join(': ' + line for line in said)), remedy)
                continue
            try:
                ctypes.CDLL(library)
            except OSError as err:
                add("code compiled in %s cannot be loaded (%s): its file system may be mounted noexec" % (
                    there, str(err).rpartition(': ')[2]), "name another directory in TORCHINDUCTOR_CACHE_DIR", 'cache')


def compare_directories(report: 'Report') -> None:
    """
    Report directories that are not writable. If they are on other nodes of the job, the file system here is full or
    broken. If not, this may be intended: at some centres, compute nodes have no home directory.
    """
    for fact, values in sorted(report.facts.items()):
        found = re.match(r'((%s)=.*): ([^:]*)$' % '|'.join(DIRECTORIES), fact)
        if not found:
            continue
        where, variable, what = found.groups()
        # without TMPDIR, Python's own temporary files go elsewhere
        others = ", but is on other nodes" if WRITTEN in values and variable != 'TMPDIR' else ''
        for wrong, mask in values.items():
            if wrong != WRITTEN:
                report.add('red' if others or wrong == A_FILE else 'yellow', 'disk',
                           "%s is not writable (%s)%s: it is for %s" % (where, wrong, others, what),
                           "%sname another directory in %s" % (
                               "start without these nodes (srun --exclude), or " * bool(others), variable), mask)
