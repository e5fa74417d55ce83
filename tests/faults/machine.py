# SPDX-License-Identifier: GPL-2.0-only
"""Faults of a node and of what a rank may have of it: limits, memory, directories, files, processes."""

from . import TWO, add_fault, fault

# --- limits of the shell

LIMITS = {
    # (words of ulimit, where): what --check must say
    ('-n 24', 'all'): ('red', 'ulimit -n|open files'),
    ('-n 40', 'all'): ('yellow', 'ulimit -n|open files'),
    ('-n 24', 'rank 3'): ('yellow', 'ulimit -n|open files'),
    ('-v 500000', 'all'): ('red', 'ulimit -v|address space'),
    ('-v 700000', 'rank 3'): ('nothing', ''),
    ('-f 0', 'all'): ('red', 'ulimit -f|(size of|file size|large) ?file'),
    ('-f 0', 'rank 3'): ('red', 'ulimit -f|(size of|file size|large) ?file'),
    ('-t 2', 'rank 3'): ('red', 'ulimit -t|processor time|CPU time'),
    ('-l 0', 'all'): ('nothing', ''),
    ('-s 64', 'rank 3'): ('red', 'ulimit -s|stack'),
}
for (words, where), (colour, says) in LIMITS.items():
    def limited(job, words=words, where=where):
        job.rank(f'ulimit {words}', where)
    name = f'ulimit {words}{"" if where == "all" else " of one rank"}'
    add_fault(name, limited, f'ulimit {words} in {"all ranks" if where == "all" else where}', colour, says)


@fault('nothing')
def nice_on_one_node(job):
    """The ranks of the second node run with nice 19."""
    job.rank('renice -n 19 $$ > /dev/null', 2)


@fault('yellow', '(?i)cores|slow|quota')
def one_core_for_a_node(job):
    """The ranks of the second node may use one core."""
    job.rank('taskset -cp 0 $$ > /dev/null', 2)


@fault('yellow', '(?i)quota|processor time')
def quota_of_4_percent(job):
    """A control group gives rank 3 4 % of a core."""
    job.group(2, 'rank 3', quota=4000)


@fault('red', '(?i)memory')
def memory_of_150_MB(job):
    """A control group gives rank 3 150 MB of memory."""
    job.group(2, 'rank 3', memory=150_000_000)


@fault('nothing')
def memory_of_4_GB(job):
    """A control group gives the ranks of the second node 4 GB of memory."""
    job.group(2, memory=4_000_000_000)


@fault('red', '(?i)processes|threads|pids')
def six_processes(job):
    """A control group lets the ranks of the second node have 6 processes and threads."""
    job.group(2, pids=6)


# --- ranks


@fault('red', 'no-answer|ended')
def a_rank_that_never_starts(job):
    """Rank 3 ends before Python starts."""
    job.rank('exit 3', 'rank 3')


@fault('red', 'no-answer|ended|no answer')
def a_rank_that_hangs(job):
    """Rank 3 is stopped before Python starts."""
    job.rank('kill -STOP $$', 'rank 3')
    job.options = [*TWO, '--kill-on-bad-exit']


@fault('red', 'no-answer|ended|no answer|no connection')
def rank_0_hangs(job):
    """Rank 0 is stopped before Python starts."""
    job.rank('kill -STOP $$', 'rank 0')
    job.options = [*TWO, '--kill-on-bad-exit']


# --- directories

SHM = '/dev/shm'


@fault('red', SHM)
def shm_is_full(job):
    """/dev/shm of the second node is full."""
    job.mount(2, SHM, '-t tmpfs -o size=1m', fill=True)


@fault('red', SHM)
def shm_is_64_kB(job):
    """/dev/shm of the second node has 64 kB."""
    job.mount(2, SHM, '-t tmpfs -o size=64k')


@fault('yellow', SHM)
def shm_is_64_MB(job):
    """/dev/shm of both nodes has 64 MB, as containers have by default."""
    for node in (1, 2):
        job.mount(node, SHM, '-t tmpfs -o size=64m')


@fault('red', SHM)
def shm_is_read_only(job):
    """/dev/shm of the second node cannot be written."""
    job.mount(2, SHM, '-t tmpfs -o ro')


@fault('yellow', '/tmp|TMPDIR')
def tmp_is_full(job):
    """/tmp of the second node is full."""
    job.tmp(2, 'size=256k', fill=True)


@fault('red', '/tmp|TMPDIR')
def tmp_has_no_inodes(job):
    """/tmp of the second node has no inodes left."""
    job.tmp(2, 'nr_inodes=6')
    job.on(2, 'for i in 1 2 3 4 5 6 7 8; do touch /tmp/$i 2> /dev/null || true; done')


@fault('red', 'TMPDIR')
def tmpdir_is_read_only(job):
    """TMPDIR is a directory that cannot be written on the second node."""
    job.env['TMPDIR'] = job.scratch / 'tmp'
    (job.scratch / 'tmp').mkdir()
    job.mount(2, job.env['TMPDIR'], '-t tmpfs -o ro')


@fault('nothing')
def tmpdir_is_missing(job):
    """TMPDIR is a directory that is on no node; Python takes /tmp."""
    job.env['TMPDIR'] = job.scratch / 'not-there'


@fault('red', 'HOME|home')
def home_is_read_only(job):
    """The home directory cannot be written on the second node."""
    job.mount(2, job.home, '-t tmpfs -o ro')


@fault('yellow', 'HOME|home')
def home_is_missing(job):
    """HOME is a directory that compute nodes do not have and nobody can make."""
    # it breaks this training, which writes there; at EPCC's Cirrus no compute node has the home directories
    job.env['HOME'] = '/proc/home'


@fault('red', 'HF_HOME')
def hf_home_is_full(job):
    """HF_HOME is on a file system that is full on the second node."""
    job.env['HF_HOME'] = job.scratch / 'hf'
    (job.scratch / 'hf').mkdir()
    job.mount(2, job.env['HF_HOME'], '-t tmpfs -o size=64k', fill=True)


@fault('red', 'XDG_CACHE_HOME')
def xdg_cache_home_is_a_file(job):
    """XDG_CACHE_HOME is a file."""
    job.env['XDG_CACHE_HOME'] = job.scratch / 'cache'
    (job.scratch / 'cache').write_text('')


@fault('yellow', 'cache.*TRITON_CACHE_DIR')
def triton_cache_is_missing(job):
    """TRITON_CACHE_DIR is a directory that nobody can make; this training compiles nothing."""
    job.env['TRITON_CACHE_DIR'] = '/proc/triton'


@fault('yellow', 'cache.*TORCHINDUCTOR_CACHE_DIR')
def inductor_cache_is_open_to_all(job):
    """TORCHINDUCTOR_CACHE_DIR can be written by everybody."""
    job.env['TORCHINDUCTOR_CACHE_DIR'] = job.scratch / 'inductor'
    (job.scratch / 'inductor').mkdir()
    (job.scratch / 'inductor').chmod(0o777)


@fault('red', 'SLINGTORCH_CACHE_ROOT')
def cache_root_is_missing_on_one_node(job):
    """SLINGTORCH_CACHE_ROOT is a directory of the first node alone."""
    job.env['SLINGTORCH_CACHE_ROOT'] = '/tmp/cache-root'
    job.on(1, 'mkdir -p /tmp/cache-root', 'rm -rf /tmp/cache-root')


# --- programs and libraries


@fault('red', r'train\.py')
def script_is_missing_on_one_node(job):
    """The script is on a disk of the first node."""
    job.on(1, f'mkdir -p /tmp/code; cp {job.scratch}/*.py /tmp/code', 'rm -r /tmp/code')
    job.script = '/tmp/code/train.py'


@fault('red', r'train\.py')
def script_is_empty_on_one_node(job):
    """The second node sees an empty script."""
    job.over(2, job.script, '/dev/null')


@fault('red', r'train\.py')
def script_is_older_on_one_node(job):
    """The second node has an older copy of the script, with half of the steps."""
    for node, steps in ((1, 8), (2, 4)):
        job.on(node, f'mkdir -p /tmp/code; cp {job.scratch}/*.py /tmp/code; '
                     f'sed -i "s/^STEPS = 8/STEPS = {steps}/" /tmp/code/train.py', 'rm -r /tmp/code')
    job.script = '/tmp/code/train.py'


@fault('red', r'train\.py')
def script_is_missing(job):
    """The script is nowhere."""
    job.script = job.scratch / 'trains/train.py'


@fault('red', 'shapes')
def module_is_missing_on_one_node(job):
    """The second node lacks a module that the script imports."""
    job.on(1, 'mkdir -p /tmp/modules', 'rm -r /tmp/modules')
    job.on(1, f'cp {job.scratch}/shapes.py /tmp/modules')
    (job.scratch / 'shapes.py').unlink()
    job.env['PYTHONPATH'] = '/tmp/modules'


@fault('red', 'import.*libtorch')
def library_is_truncated_on_one_node(job):
    """The second node sees the first 100 kB of libtorch_cpu.so."""
    library = job.library('libtorch_cpu.so')
    job.on(2, f'head -c 100000 {library} > /tmp/truncated', 'rm /tmp/truncated')
    job.over(2, library, '/tmp/truncated')


@fault('yellow', 'versions.*torch')
def other_torch_on_one_node(job):
    """torch of the second node says another version."""
    version = job.library('libc10.so').parents[1] / 'version.py'
    job.on(2, f"sed 's/2[.]13/2.12/' {version} > /tmp/version", 'rm /tmp/version')
    job.over(2, version, '/tmp/version')


@fault('red', 'torch|python')
def other_python_on_one_node(job):
    """PATH of the second node leads to a Python without PyTorch."""
    (job.scratch / 'bin').mkdir()
    (job.scratch / 'bin/python').symlink_to('/usr/bin/python3')
    job.rank(f'PATH={job.scratch}/bin:$PATH', 2)


@fault('red', 'python')
def no_python_on_one_node(job):
    """PATH of the second node has no python."""
    job.rank('mkdir -p /tmp/nothing; for name in bash cat mkdir stat od; do ln -sf $(type -P $name) /tmp/nothing; '
             'done; PATH=/tmp/nothing', 2)


@fault('yellow', 'clock')
def clocks_are_apart(job):
    """The clock of the second node is an hour ahead."""
    source = job.scratch / 'clock.c'
    source.write_text(CLOCK)
    job.on(1, f'gcc -shared -fPIC -o {job.scratch}/clock.so {source} -ldl')
    job.rank(f'export LD_PRELOAD={job.scratch}/clock.so', 2)


CLOCK = r'''
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *at) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, at);
    if (clock == CLOCK_REALTIME) at->tv_sec += 3600;
    return status;
}
'''


@fault('nothing')
def one_node_alone(job):
    """All four ranks are on one node."""
    job.options = ['-N1', '-n4', '--ntasks-per-node=4', '-w', job.first, '--overcommit']
