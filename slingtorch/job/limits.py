# SPDX-License-Identifier: GPL-2.0-only
"""
What may differ from rank to rank and from node to node: limits of the shell and of control groups, compared with what
the process with PyTorch used; directories, tested by writing to them; and a compiler.
"""
import contextlib
import errno
import glob
import os
import re
import resource
import stat
import tempfile
import threading

from .kinds import Any, Callable, Machine, Report

# {option of ulimit: (its number in getrlimit(2), what it limits)}
SHELL = {'n': (resource.RLIMIT_NOFILE, 'open files'), 'v': (resource.RLIMIT_AS, 'of address space'),
         'd': (resource.RLIMIT_DATA, 'of data'), 's': (resource.RLIMIT_STACK, 'of stack, also of each thread'),
         'f': (resource.RLIMIT_FSIZE, 'in a file, also in /dev/shm'), 't': (resource.RLIMIT_CPU, 'processor time')}
# an error that such a limit may cause
LACKS = 'failed to map|[Aa]llocat|MemoryError|bad_alloc|Too many open files|new thread|status -(6|9|11|24|25)'
# bytes of address space that suffice for CUDA and a training of some GB; those of a stack that are few
SPACE, SMALL_STACK = 16 << 30, 1 << 20
# seconds for directories and programs: a file system that hangs must not hang the check
WAIT = 5
# bytes that a trial writes
TRIAL = 1 << 20
# The default size of /dev/shm in containers, which NCCL's manual ("Troubleshooting", shared memory) calls too small.
SMALL_SHM = 64 << 20
# what that manual recommends there (--shm-size=1g), where workers of a DataLoader use it, too
LARGE_SHM = 1 << 30
# bytes that a tensor or a checkpoint of even a toy model exceeds, and those that one of a real model exceeds
SMALL_FILE, LARGE_FILE = 16 << 20, 1 << 30
# values of a fact about a directory
WRITTEN, A_FILE = 'written', os.strerror(errno.ENOTDIR)
# {variable with a directory: what programs write there}
DIRECTORIES = {'TMPDIR': 'temporary files', 'HOME': 'caches and settings', 'XDG_CACHE_HOME': 'caches',
               'HF_HOME': 'models and data of Hugging Face'}
# seconds of processor time that are too few for any training; seconds of a job that are few
SHORT, SOON = 60, 300
# Open files that a DataLoader of two workers needs: with ten left, PyTorch 2.13 ended with "Too many open files" on
# rank 0, which has the store and writes; another rank trained with 14 left.
WORKERS, WORKERS_ELSEWHERE = 16, 8
FEW, LITTLE = 1024, 1 << 30     # open files (Linux's default), memory of a rank: many a training needs more
# bytes for a program's output
PRINTS = 1 << 20
# processes and threads of a rank: those of PyTorch and OpenMP, and some workers
ROOM = 64
# characters of TMPDIR at most: Python adds /pymp-xxxxxxxx/listener-xxxxxxxx
LONGEST = 74


def of_shell() -> dict:
    """{option of ulimit: its limit}, without unlimited ones."""
    found = {option: resource.getrlimit(number)[0] for option, (number, _) in SHELL.items()}
    return {option: limit for option, limit in found.items() if limit != resource.RLIM_INFINITY}


def cores_of_quota(machine: 'Machine') -> float:
    """Cores that the control groups allow on average; infinity if there is no limit."""
    found = [float('inf')]
    for group in machine.cgroups('cpu'):
        words = (machine.read(group + '/cpu.max') or '%s %s' % (
            machine.read(group + '/cpu.cfs_quota_us'), machine.read(group + '/cpu.cfs_period_us'))).split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found)


def few_processes(machine: 'Machine') -> str:
    """That a control group leaves few processes and threads to this rank; '' if none does."""
    for group in machine.cgroups('pids'):
        now, most = machine.read(group + '/pids.current'), machine.read(group + '/pids.max')
        if now.isdigit() and most.isdigit() and int(most) - int(now) < ROOM:
            return "a control group of this rank has %s of at most %s processes and threads: few are left for " \
                "PyTorch and a DataLoader" % (now, most)
    return ''


def look(machine: 'Machine', report: 'Report', details: dict) -> None:
    """Note the limits of a rank for check(), and report what it can judge by itself."""
    limits = details['limits'] = of_shell()
    details['memory'], _, details['memory of'] = machine.free_memory()
    for option in SHELL:
        report.fact('ulimit -' + option, limits.get(option, 'unlimited'))
    cores, few, end = cores_of_quota(machine), few_processes(machine), machine.environ.get('SLURM_JOB_END_TIME', '')
    if cores < 1:
        report.add('yellow', 'limit', "a control group (its quota) allows this rank, or several, only %.2g of a core: "
                   "all others wait for it" % cores, "ask for more cores, or ask the centre to check the node")
    if few:
        report.add('yellow', 'limit', few, "ask for more processes in the job, or have the limit raised")
    if end.isdigit() and int(end) - machine.clock() < SOON:
        report.add('yellow', 'limit', "the job ends in less than %d minutes" % (SOON // 60),
                   "ask for more time (--time)")


def megabytes(number: int) -> str:
    """Bytes in whole MB, so that nodes that differ little report the same; fewer in kB."""
    return '%d MB' % (number >> 20) if number >> 20 else '%d kB' % (number >> 10)


def check(report: 'Report', ranks: list, took: dict, world: int, connects: bool) -> None:
    """
    Compare the limits of a node's ranks (their details) with what the process with PyTorch took (probe.taken()).

    :param connects: whether each rank will connect to all others, as gloo does
    """
    groups, failed = {}, 0  # type: dict, int
    for finding in report.having('red', 'import'):
        failed |= report.findings[finding] * bool(re.search(LACKS, finding.text))
    files = took.get('fds', 0) + (world - 1) * connects
    # {option: (what PyTorch or any training needs at least, what suffices)}
    needs = {'f': (SMALL_FILE, LARGE_FILE), 't': (SHORT, float('inf')), 's': (took.get('s', 0), SMALL_STACK),
             **{option: (took.get(option, 0), max(2 * took.get(option, 0), SPACE)) for option in 'vd'}}
    for details in ranks:
        mask = 1 << details['rank']
        needs['n'] = files + (WORKERS_ELSEWHERE if details['rank'] else WORKERS), max(FEW, files + 3 * WORKERS)
        for option, (least, enough) in needs.items():
            if option == 'v' and details.get('gpus'):   # CUDA reserves addresses for all memory of all GPUs
                enough = float('inf')
            limit = details.get('limits', {}).get(option, enough)
            if limit < enough:
                sure = limit < least or failed & mask
                amount = '%d s of' % limit if option == 't' else '%d' % limit if option == 'n' else megabytes(limit)
                report.add('red' if sure else 'yellow', 'limit', "ulimit -%s: this rank may have %s %s, but %s" % (
                    option, amount, SHELL[option][1], "PyTorch and a training use more" if sure else
                    "a training may need more"), "raise it with ulimit -%s, in the job script or where the limit is set"
                    % option, mask)
        if details.get('memory of'):
            groups.setdefault(details['memory of'], []).append(details)
    for who in groups.values():
        left = max(one['memory'] for one in who)    # ranks look at different moments, the first before PyTorch is there
        if took.get('anon') and left < len(who) * max(LITTLE, 2 * took['anon']):
            sure = left < len(who) * took['anon']
            report.add(('yellow', 'red')[sure], 'limit', "a control group leaves %s of memory to %d rank%s, but %s" % (
                megabytes(left), len(who), 's'[:len(who) != 1], "a training may need more" if not sure else
                "each process with PyTorch uses more than %s, before any training" % megabytes(left // len(who))),
                       "ask for more memory (srun --mem)", sum(1 << one['rank'] for one in who))


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


def look_at_directories(machine: 'Machine', report: 'Report', details: dict) -> None:
    """Try to write where a training writes: permissions do not show what root may do, nor that a disk is full."""
    try:
        length = len(tempfile.gettempdir())
        if length > LONGEST:    # else workers of a DataLoader end, and the program waits for them forever
            report.add('yellow', 'disk', "the path of the directory for temporary files has %d characters: workers of "
                       "a DataLoader use sockets there, whose paths may have only 107 (unix(7))" % length,
                       "export TMPDIR with a shorter path")
    except OSError:
        report.add('red', 'disk', "no directory for temporary files is writable: TMPDIR=%s, /tmp, /var/tmp"
                   % machine.environ.get('TMPDIR', ''), "name one in TMPDIR, or start without this node (--exclude)")
    for variable in DIRECTORIES:
        path = machine.environ.get(variable)
        if path:
            report.fact('writes %s=%s' % (variable, path), write_trial(nearest(path)) or WRITTEN)
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
    elif free_in(shm) < (LARGE_SHM if details.get('workers') else SMALL_SHM + 1):
        report.add('yellow', 'shm', "/dev/shm has only %s free for NCCL and the workers of a DataLoader"
                   % megabytes(free_in(shm)), remedy)


def look_at_outputs(_: 'Machine', report: 'Report', details: dict) -> None:
    """Whether the program can write to its outputs (program.outputs()): try an unnamed file there or beside them."""
    for path, (says, made) in details.get('written', {}).items():
        target = path if made else os.path.realpath(path)
        place = nearest(target)
        if place == target and os.path.isfile(target) and not made:
            place = os.path.dirname(target)
        if not os.path.isdir(place):
            wrong = '%s is a %s' % (place, 'file' if os.path.exists(place) else 'link to nothing')
        elif os.path.isfile(target) and not os.access(target, os.W_OK):
            wrong = 'its permissions forbid it'
        else:
            wrong = write_trial(place, sync=True)
        text = "the program cannot write to %s (%s)" % (path, wrong) if wrong else ''
        if not wrong and free_in(place) < (LARGE_FILE if details.get('saves') else SMALL_FILE):
            text = "%s: its file system has only %s free" % (path, megabytes(free_in(place)))
        if text:
            report.add('yellow', 'disk', "%s: %s" % (says, text),
                       "name another directory, create this one, or free space")


def look_at_compiler(machine: 'Machine', report: 'Report', details: dict) -> None:
    """Compile and load a file as torch.compile and C++ extensions do, where they do."""
    import ctypes       # only here: most ranks need none of them
    import shutil
    import subprocess
    import sysconfig

    environ = machine.environ
    disabled = '1' in (environ.get('TORCH_COMPILE_DISABLE'), environ.get('TORCHDYNAMO_DISABLE'))
    if details.get('extends') and not shutil.which('ninja', path=environ.get('PATH')):
        report.add('yellow', 'torch', "the program uses torch.utils.cpp_extension, but there is no ninja in PATH",
                   "install it where all nodes see it (pip install ninja), or load its module")
    built = environ.get('TORCH_EXTENSIONS_DIR') or os.path.join(os.path.expanduser('~'), '.cache/torch_extensions')
    for lock in sorted(glob.glob(os.path.join(glob.escape(built), '**/lock'), recursive=True))[:1 if details.get(
            'extends') else 0]:     # torch/utils/_file_baton.py
        report.add('yellow', 'torch', "%s: another process builds this extension, or was killed while it did: the "
                   "program waits until the file is gone" % lock, "remove it if no other job of yours builds it")
    compiles = details.get('compiles') and not disabled
    if not compiles and not details.get('extends'):
        return
    text, flags = b'#include <Python.h>\n', []     # type: bytes, list
    compiler, language = environ.get('CXX') or 'g++', 'c++'
    if compiles and not details.get('gpus'):    # torch/_inductor/cpp_builder.py; newer releases even want C++20
        text, flags = text + b'#include <omp.h>\n', ['-std=c++17', '-fopenmp']
    elif not details.get('extends'):    # Triton (python/triton/runtime/build.py)
        compiler, language = environ.get('CC') or shutil.which('gcc', path=environ.get('PATH')) or 'clang', 'c'
    there = nearest(environ.get('TORCHINDUCTOR_CACHE_DIR') or tempfile.gettempdir())
    try:
        with tempfile.TemporaryDirectory(prefix='slingtorch-', dir=there) as place:
            library = os.path.join(place, 'a.so')
            done = subprocess.run([compiler.split()[0], '-shared', '-fPIC', '-x', language, '-', '-I',
                                   sysconfig.get_paths()['include'], *flags, '-o', library], input=text,
                                  env=dict(environ), check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if done.returncode:
                raise OSError("the compiler ends with status %d%s" % (done.returncode, ''.join(
                    ': ' + line for line in done.stderr.decode(errors='replace').splitlines()[:1])))
            ctypes.CDLL(library)
    except OSError as err:
        report.add('yellow', 'torch', "the program uses torch.compile or builds C++ extensions, but compiling and "
                   "loading a file in %s fails on this node: %s" % (there, re.sub("/slingtorch-[^/' ]*", '', str(err))),
                   "load a C++ compiler with OpenMP in the job script (CXX; for Triton CC), install Python's headers "
                   "(python3-dev), or, if the directory is mounted noexec, name another one in TORCHINDUCTOR_CACHE_DIR")


def compare_directories(report: 'Report') -> None:
    """
    Report directories that are not writable. If they are on other nodes of the job, the file system here is full or
    broken. If not, this may be intended: at some centres, compute nodes have no home directory.
    """
    for fact, values in sorted(report.facts.items()):
        kind, _, where = fact.partition(' ')
        variable = where.partition('=')[0]
        # without TMPDIR, Python's own temporary files go elsewhere
        others = ", but is on other nodes" if WRITTEN in values and variable != 'TMPDIR' else ''
        for wrong, mask in values.items() if kind == 'writes' and variable in DIRECTORIES else ():
            if wrong != WRITTEN:
                report.add('red' if others or wrong == A_FILE else 'yellow', 'disk',
                           "%s is not writable (%s)%s: it is for %s" % (where, wrong, others, DIRECTORIES[variable]),
                           "%sname another directory in %s" % (
                               "start without these nodes (srun --exclude), or " * bool(others), variable), mask)
