# SPDX-License-Identifier: GPL-2.0-only
"""
What may differ from rank to rank, and from node to node: limits of the shell and of control groups against what the
process with PyTorch took, directories that are really written to, and whether the program is there.
"""
import contextlib
import ctypes
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading

from .kinds import Callable, Machine, Mapping, Optional, Report

# option of ulimit: its number in getrlimit(2), and what it is
SHELL = {'n': (resource.RLIMIT_NOFILE, 'open files'), 'v': (resource.RLIMIT_AS, 'address space'),
         'd': (resource.RLIMIT_DATA, 'data'), 's': (resource.RLIMIT_STACK, 'stack'),
         'f': (resource.RLIMIT_FSIZE, 'size of a file'), 't': (resource.RLIMIT_CPU, 'processor time')}
# bytes of address space and of data that CUDA, and a training of some GB, get by with; of a stack that each thread has
SPACE, LARGE_STACK = 16 << 30, 1 << 30
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
# processes and threads that a rank takes: those of PyTorch and OpenMP, and of some workers; seconds of a short training
ROOM, SOON = 64, 300
# characters of TMPDIR: Python adds /pymp-xxxxxxxx/listener-xxxxxxxx; bytes for what a program prints
LONGEST = 74
PRINTS = 1 << 20
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
    if limits.get('s', 0) >= LARGE_STACK:
        report.add('yellow', 'limit', "ulimit -s: each thread of this rank reserves a stack of %d MB" % (
            limits['s'] >> 20), "ulimit -s 8192, in the job script or where the limit is set")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if machine.list('sys/class/infiniband') and 0 <= locked < SMALL_SHM and os.geteuid():
        report.add('yellow', 'limit', "ulimit -l: this rank may lock %d kB, and InfiniBand locks what it sends"
                   % (locked >> 10), "ulimit -l unlimited, where the limit is set")
    for option in SHELL:
        report.fact('ulimit -' + option, limits.get(option, 'unlimited'))
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() and details.get('local_rank') == 0 and most != resource.RLIM_INFINITY:  # root may have more
        now = sum(len(machine.list('proc/%s/task' % name)) for name in machine.list('proc') if name.isdigit() and
                  re.search(r'^Uid:\s+%d\b' % os.getuid(), machine.read('proc/%s/status' % name), re.M))
        if most - now < ROOM:
            report.add('yellow', 'limit', "ulimit -u: this user may have %d processes and threads on a node, and has "
                       "%d: little room for those of PyTorch and of a DataLoader" % (most, now),
                       "ulimit -u unlimited, in the job script or where the limit is set")
    for most, now in pids(machine):
        if most - now < ROOM:
            report.add('yellow', 'limit', "a control group of this rank has %d processes and threads of %d: little "
                       "room for those of PyTorch and of a DataLoader" % (now, most),
                       "ask for more processes in the job, or have the limit raised where it is set")
    end = machine.environ.get('SLURM_JOB_END_TIME', '')
    if end.isdigit() and int(end) - machine.clock() < SOON:
        report.add('yellow', 'limit', "the job ends in less than %d minutes" % (SOON // 60),
                   "ask for more time (--time)")
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > 0:
        report.add('yellow', 'limit', "this rank runs with nice %d: other processes of the node go before it" % nice,
                   "start it without nice")


def megabytes(number: int) -> str:
    """In whole MB, so that nodes that differ by little say the same."""
    return '%d MB' % max(1, number >> 20)


def check(report: 'Report', ranks: list, took: dict, world: int, connects: bool) -> None:
    """
    What the ranks of a node may have against what PyTorch took in the process that tried it.

    :param ranks: details of all ranks of the node
    :param took: of that process: 'fds', 'v', 'd' (bytes, as of ulimit), 'anon' (bytes)
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
            limit, need = limits.get(option, 0), took.get(option, 0)
            if need and limit and limit < max(2 * need, SPACE):
                report.add('red' if limit < need else 'yellow', 'limit', "ulimit -%s: this rank may have %s of %s, and "
                           "PyTorch took %son this node, before any training" % (
                               option, megabytes(limit), SHELL[option][1], 'more ' if limit < need else
                               'more than half of it ' if limit < 2 * need else '%s ' % megabytes(need)),
                           "ulimit -%s unlimited, in the job script or where the limit is set" % option, mask)
        if took.get('fds') and 'n' in limits:
            need = took['fds'] + (max(0, world - 1) if connects else 0)
            if limits['n'] < need + 3 * WORKERS:
                workers = WORKERS_ELSEWHERE if details['rank'] else WORKERS
                report.add('red' if limits['n'] < need + workers else 'yellow', 'limit', "ulimit -n: this rank may "
                           "have %d open files; PyTorch and the connections of %d ranks take %d, and workers of a "
                           "DataLoader need some" % (limits['n'], world, need),
                           "ulimit -n 65536, in the job script or where the limit is set", mask)
        if details.get('memory of'):
            groups.setdefault((details['memory of'], details['memory']), []).append(details['rank'])
    for (_, left), who in groups.items():
        if took.get('anon') and left < 2 * len(who) * took['anon']:
            sure = left < len(who) * took['anon']
            report.add('red' if sure else 'yellow', 'limit', "a control group leaves %s of memory to %d rank%s, and "
                       "each process with PyTorch takes more than %s, before any training" % (
                           megabytes(left), len(who), 's'[:len(who) != 1], megabytes(left // len(who) // (2 - sure))),
                       "ask for more memory (srun --mem)", sum(1 << rank for rank in who))


def pids(machine: 'Machine') -> list:
    """[(how many processes and threads a control group of this rank may have, how many it has)], as far as it says."""
    found = [(machine.read(group + '/pids.max'), machine.read(group + '/pids.current'))
             for group in machine.cgroups('pids')]
    return [(int(most), int(now)) for most, now in found if most.isdigit() and now.isdigit()]


def processes(machine: 'Machine') -> str:
    """Which limit of processes and threads this rank has reached, for a message."""
    found = ["its control group has %d processes and threads of %d" % (now, most) for most, now in pids(machine)
             if most - now < ROOM]
    user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if user != resource.RLIM_INFINITY and not found:
        found.append("ulimit -u is %d" % user)
    return '; '.join(found) or "no limit is near: a filter of the container or the kernel may forbid it"


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


def working_directory() -> str:
    """Its path; '' of one that has been removed."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return ''


def write_trial(directory: str, size: int = 64 << 10, sync: bool = False) -> str:
    """Why a file with so many bytes cannot be written in a directory; ''."""
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as stream:
            if stream.write(b'\0' * size) < size:
                return 'no space for %d bytes' % size
            if sync:    # quotas of file systems over a network are said only then
                os.fsync(stream.fileno())
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
    with contextlib.suppress(OSError):
        if len(tempfile.gettempdir()) > LONGEST:
            report.add('yellow', 'disk', "the name of the directory for temporary files has %d characters: those of "
                       "sockets in it, through which workers of a DataLoader pass tensors, may have 107 (unix(7))"
                       % len(tempfile.gettempdir()), "export TMPDIR with a shorter name")
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
    report.fact('working directory', working_directory() or 'one that has been removed')
    wrong = write_trial('.', sync=True)
    if wrong:
        report.add('yellow', 'disk', "the working directory %s cannot be written (%s)" % (working_directory(), wrong),
                   "start in another one (srun --chdir), if the program writes there")
    with contextlib.suppress(OSError):
        state = os.fstatvfs(1)
        if stat.S_ISREG(os.fstat(1).st_mode) and state.f_bavail * state.f_frsize < PRINTS:
            report.add('yellow', 'disk', "the file that stdout goes to is on a full disk: a print ends the program",
                       "free space there, or name another file (--output)")
    shm = machine.path('dev/shm')
    wrong = write_trial(shm, TRIAL) if os.path.isdir(shm) else 'not there'
    remedy = "give the node's or the container's /dev/shm more room (docker --shm-size), or have the centre clean it up"
    if wrong:
        report.add('red', 'shm', "/dev/shm cannot take 1 MB (%s): workers of a DataLoader and NCCL pass their data "
                   "there" % wrong, remedy)
    elif os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize <= SMALL_SHM:
        report.add('yellow', 'shm', "/dev/shm has %s free: little for NCCL and the workers of a DataLoader"
                   % megabytes(os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize), remedy)


def look_at_outputs(report: 'Report', details: dict) -> None:
    """
    Whether the program can write where it will, by a file without a name in the same directory.

    :param details: of program.look_at_program(): what is written, and which directories the program makes
    """
    made = details.get('made', {})
    for path, says in list(details.get('written', {}).items())[:50]:
        place = path if os.path.isdir(path) else os.path.dirname(path) or '.'
        there = place
        while not os.path.lexists(there) and there not in ('/', ''):
            there = os.path.dirname(there)
        there = there or '.'
        wrong = '%s is not a directory' % there if not os.path.isdir(there) else write_trial(there, sync=True)
        if os.path.isfile(path) and not os.access(path, os.W_OK):
            wrong = 'it is there already, and its permissions forbid it'
        if path in made and os.path.lexists(path) and (not os.path.isdir(path) or made[path]):
            wrong = 'a file is there' if not os.path.isdir(path) else 'it is there already, and exist_ok is not said'
        if not wrong and there != place and 'line' in says and not any(
                one in ('', '.') or (one + '/').startswith(place + '/') for one in made):
            wrong = 'the directory %s is not there, and the program does not make it' % place
        free = os.statvfs(there)
        if not wrong and free.f_bavail * free.f_frsize < SMALL_FILE:
            wrong = 'its file system has %s free' % megabytes(free.f_bavail * free.f_frsize)
        if wrong:
            report.add('yellow', 'disk', "%s: the program writes to %s, where it cannot (%s)" % (says, path, wrong)
                       if 'free' not in wrong else "%s: the program writes to %s, and %s" % (says, path, wrong),
                       "name another directory, or make it and free space")


def look_at_compiler(report: 'Report', environ: 'Mapping[str, str]', details: dict) -> None:
    """What torch.compile needs on a node, tried: a compiler, and a directory for caches from which code can be run."""
    builds = details.get('extension')
    if not builds and (not details.get('compiles') or '1' in (environ.get('TORCH_COMPILE_DISABLE'),
                                                              environ.get('TORCHDYNAMO_DISABLE'))):
        return
    calls = 'builds C++ extensions' if builds else 'calls torch.compile'
    include = sysconfig.get_paths()['include']
    if not os.path.isfile(os.path.join(include, 'Python.h')):
        report.add('yellow', 'torch', "the program %s, and this node has no Python.h in %s" % (calls, include),
                   "install the headers of Python (python3-dev), or take a Python that has them")
    if builds and not shutil.which('ninja', path=environ.get('PATH')):
        report.add('yellow', 'torch', "the program builds C++ extensions, and this node has no ninja in PATH",
                   "pip install ninja")
    there = environ.get('TORCHINDUCTOR_CACHE_DIR') or tempfile.gettempdir()
    while not os.path.isdir(there):
        there = os.path.dirname(there) or '/'
    # those of Inductor and of Triton, as each looks for them
    for variable, known, end in [('CXX', ('g++', 'clang++', 'c++'), '.cpp')] + [
            ('CC', ('gcc', 'clang', 'cc'), '.c')] * bool(details.get('gpus')):
        names = [environ[variable].split()[0]] if environ.get(variable, '').strip() else known
        compiler = next(filter(None, (shutil.which(name, path=environ.get('PATH')) for name in names)), '')
        if not compiler:
            report.add('yellow', 'torch', "the program %s, and this node has no %s compiler in PATH "
                       "(%s)" % (calls, 'C++' if end == '.cpp' else 'C', ', '.join(names)),
                       "load one in the job script (%s), or start "
                       "without torch.compile (TORCH_COMPILE_DISABLE=1)" % variable)
            continue
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix='slingtorch-', dir=there) as place:
            source, library = os.path.join(place, 'a' + end), os.path.join(place, 'a.so')
            with open(source, 'w') as stream:
                stream.write('int a;\n')
            done = subprocess.run([compiler, '-shared', '-fPIC', '-o', library, source], env=dict(environ), check=False,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if done.returncode:
                said = [line for line in done.stderr.decode(errors='replace').splitlines() if line.strip()][:1]
                report.add('yellow', 'torch', "the program %s, and the compiler %s fails on this "
                           "node: status %d%s" % (
                               calls, compiler, done.returncode, ''.join(': ' + line for line in said)),
                           "load another one in the job script (%s), or export TORCH_COMPILE_DISABLE=1" % variable)
                continue
            try:
                ctypes.CDLL(library)
            except OSError as err:
                report.add('yellow', 'cache', "the program %s, and what is compiled in %s cannot be "
                           "loaded (%s), as on a file system without the right to run code (noexec)" % (
                               calls, there, str(err).rpartition(': ')[2]),
                           "name another directory in TORCHINDUCTOR_CACHE_DIR")


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
