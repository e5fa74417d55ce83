# SPDX-License-Identifier: GPL-2.0-only
"""Faults of foreign making, each planted on two nodes, and what --check has to say of it.

    cd tests && python -m faults [NAME ...]      as root: plants all, and compares with what a training did

A fault is a function of a Job, with a line that says what is wrong. `@fault('red', 'words')` is what --check must say:

red      it stops, and a red line, or the runscript's message, has these words (a regular expression)
yellow   it goes on, and a yellow line has them
named    one or the other
nothing  nothing red: the set-up is sound, or does no certain harm
"""

import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import time

import pytest

from testbed import ROOT, run, slurm

HERE = pathlib.Path(__file__).parent
CHECK_SECONDS = 40
"""What a rank of --check waits for others and for PyTorch."""
TWO = ['-N2', '--ntasks-per-node=2']
CHECK_LIMIT, TRAINING_LIMIT = 90, 60
"""Seconds after which the ranks are killed."""
Fault = collections.namedtuple('Fault', 'name plant text colour words')
Answer = collections.namedtuple('Answer', 'status colour lines seconds left')
"""Of --check: exit status; 'red' if it stopped, 'hangs' if it was killed, else 'goes on'; [(level, line)]; seconds;
what it left in /tmp of the nodes."""
FAULTS = {}

HARM_OF_ANOTHER_KIND = (
    'quota of 4 percent', 'home is missing', 'another user overwrites the secret',
)
"""That are stopped although this training does not break, or named in other ways than its outcome alone asks for."""
IN_EVERY_RUN = (
    'PYTHONHOME=/nonexistent', 'OMP_NUM_THREADS=abc', 'TORCH_DISTRIBUTED_DEBUG=DETIAL', 'GLOO_SOCKET_IFNAM=eth0',
    'WORLD_SIZE=2', 'pythonpath shadows a standard module', 'variable differs between nodes', 'ulimit -n 24',
    'memory of 150 MB', 'rank 0 hangs', 'shm is full', 'home is read only', 'script is missing on one node',
    'library is truncated on one node', 'other torch on one node', 'clocks are apart', 'sound', 'mtu black hole',
    'packets 30 a second', 'ports refused by firewall', 'nodes cannot reach each other', 'own name is 127 0 1 1',
    'master addr is localhost', 'master port answers', 'gloo interface is not there',
    'another user writes into the store',
)
"""One of each kind; the others by the program alone."""


def fault(colour, words=''):
    """Add a function to FAULTS: its name with blanks is that of the fault, its docstring says what is wrong."""
    def add(function):
        add_fault(function.__name__.replace('_', ' '), function, function.__doc__, colour, words)
        return function
    return add


def add_fault(name, plant, text, colour, words=''):
    assert name not in FAULTS and bool(words) == (colour != 'nothing'), name
    FAULTS[name] = Fault(name, plant, text, colour, words)


class Lane:
    """Two nodes of a cluster, and one allocation of both.

    :ivar nodes: their names; rank 0 and 1 are on the first one, 2 and 3 on the second one
    """

    def __init__(self, cluster, nodes, installed):
        self.cluster, self.nodes, self.installed = cluster, nodes, installed
        self.shared = cluster.shared / nodes[0]
        self.shared.mkdir(exist_ok=True)
        said = cluster.run('salloc', '--no-shell', '-N2', '--ntasks-per-node=2', '-w', ','.join(nodes)).stderr
        self.job = re.search(r'job allocation (\d+)', said).group(1)


class Job:
    """One fault on a lane, as its function sees it; what it does is undone in the end.

    :ivar env: variables for all ranks
    :ivar script: what Python runs
    :ivar options: of srun
    :ivar shared: a directory that all nodes see; `scratch` in it is empty at first
    """

    def __init__(self, lane, stack):
        self.lane, self.stack, self.nodes, self.cluster = lane, stack, lane.nodes, lane.cluster
        self.first, self.second = lane.nodes
        self.shared, self.scratch, self.home = lane.shared, lane.shared / 'scratch', lane.shared / 'home'
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)
        for directory in (self.scratch, self.home):
            directory.mkdir()
        for path in self.left():
            shutil.rmtree(path)
        for name in ('train.py', 'shapes.py'):
            shutil.copy(HERE / name, self.scratch)
        self.script, self.options, self.before, self.python = self.scratch / 'train.py', TWO, [], lane.installed.python
        self.start = ['conda-python-distributed']
        self.env = {**lane.installed.env, 'HOME': self.home, 'OMP_NUM_THREADS': '1', 'PYTHONDONTWRITEBYTECODE': '1',
                    'FIRST': self.first, 'SECOND': self.second}

    def on(self, node, script, undo=''):
        """Run lines of sh on the first or second node (1, 2), and others when all is over."""
        name = self.nodes[node - 1]
        run(self.cluster.on(name, 'sh', '-ec', script))
        if undo:
            self.stack.callback(run, self.cluster.on(name, 'sh', '-ec', undo))

    def filter(self, node, rule):
        """What nftables does with packets that reach this node from the other one."""
        table = (f'table inet fault {{ chain in {{ type filter hook input priority 0;\n'
                 f'ip saddr {self.address(3 - node)} {rule}\n}}\n}}')
        self.on(node, f'nft {shlex.quote(table)}', 'nft delete table inet fault')

    def address(self, node):
        return self.cluster.address[self.nodes[node - 1]]

    def hosts(self, node, change):
        """Change /etc/hosts of a node: change(text) is the new one."""
        path = self.cluster.dir / f'hosts.{self.nodes[node - 1]}'
        text = path.read_text()
        path.write_text(change(text))
        self.stack.callback(path.write_text, text)

    def own_name(self, node, address):
        """The hosts file of a node gives its own name another address."""
        self.hosts(node, lambda text: text.replace(self.address(node) + ' ', address + ' '))

    def called(self, node, name):
        """Another host name."""
        own = self.nodes[node - 1]
        self.on(node, f'echo {name} > /proc/sys/kernel/hostname', f'echo {own} > /proc/sys/kernel/hostname')

    def mount(self, node, where, options, what='tmpfs', fill=False):
        """Mount a file system, or with --bind a file or directory; `fill` it."""
        self.on(node, f'mkdir -p {where}; mount {options} {what} {where}', f'umount -l {where}')
        if fill:
            self.on(node, f'dd if=/dev/zero of={where}/fill bs=4k 2> /dev/null || true')

    def over(self, node, path, what):
        """One node sees another file (or directory) instead of this one."""
        self.on(node, f'mount --bind {what} {path}', f'umount -l {path}')

    def tmp(self, node, options, fill=False):
        """Another /tmp on a node, in which the cluster's directory is there as before."""
        directory, own = self.cluster.dir, self.cluster.dir / f'tmp.{self.nodes[node - 1]}'
        self.on(node, f'mkdir -p {own}; mount -t tmpfs -o {options} tmpfs {own}; mkdir -p {own}{str(directory)[4:]}; '
                      f'mount --rbind {directory} {own}{str(directory)[4:]}; mount --rbind {own} /tmp',
                'umount -l /tmp')
        if fill:
            self.on(node, 'dd if=/dev/zero of=/tmp/fill bs=4k 2> /dev/null || true')

    def rank(self, line, where='all'):
        """A line of bash that ranks run first: of all nodes, of node 1 or 2, or of rank 'rank 3' alone."""
        if where in (1, 2):
            line = f'[[ $SLURMD_NODENAME != {self.nodes[where - 1]} ]] || {{ {line}; }}'
        elif where != 'all':
            line = f'[[ $SLURM_PROCID != {where.split()[1]} ]] || {{ {line}; }}'
        self.before.append(line)

    def group(self, node, where='all', **limits):
        """Ranks of a node in a control group with limits, of version 1 or 2: quota=, memory=, pids=."""
        for limit, value in limits.items():
            old, key, new, line = {
                'quota': ('cpu', 'cpu.cfs_quota_us', 'cpu.max', f'{value} 100000'),
                'memory': ('memory', 'memory.limit_in_bytes', 'memory.max', value),
                'pids': ('pids', 'pids.max', 'pids.max', value),
            }[limit]
            name = f'slingtorch-{os.getpid()}-{self.nodes[node - 1]}'
            if pathlib.Path('/sys/fs/cgroup/cgroup.controllers').exists():
                path, key, value = f'/sys/fs/cgroup/{name}', new, line
            else:
                path = f'/sys/fs/cgroup/{old}/{name}'
            self.on(node, f'mkdir -p {path}; echo {value} > {path}/{key}',   # what was killed may still be ending
                    f'for i in $(seq 100); do rmdir {path} && exit; sleep 0.1; done; exit 1')
            self.rank(f'echo $$ > {path}/cgroup.procs', node if where == 'all' else where)

    def library(self, name):
        """Path of a library of the installed PyTorch."""
        return next(self.lane.installed.root.glob(f'lib/python*/site-packages/torch/lib/{name}'))

    def background(self, node, program):
        """A program in Python on a node, until all is over; it must say 'there'."""
        env = self.cluster.environ(self.env)    # with SLURM_CONF, for kill_leftovers()
        process = subprocess.Popen(self.cluster.on(self.nodes[node - 1], self.python, '-c', program), env=env,
                                   stdout=subprocess.PIPE, text=True)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        assert process.stdout.readline() == 'there\n', program

    def step(self, limit, *words, env=()):
        """Start the script with these words of the runscript in front; (CompletedProcess, seconds)."""
        ranks = ['timeout', '--signal=KILL', limit, 'bash', '-c', '\n'.join([*self.before, 'exec "$@"']), 'bash']
        begin = time.monotonic()
        done = self.cluster.srun(
            f'--jobid={self.lane.job}', '--overlap', *self.options, *ranks,
            ROOT / 'runscripts' / self.start[0], *self.start[1:], *words, env={**self.env, **dict(env)},
            check=False, timeout=limit + 60)
        return done, time.monotonic() - begin

    def check(self):
        """Answer of --check, in front of a script that only says that it was started."""
        found = self.shared / 'found.json'
        found.unlink(missing_ok=True)
        env = {'SLINGTORCH_CHECK_JSON': found, 'SLINGTORCH_CHECK_SECONDS': CHECK_SECONDS}
        done, seconds = self.step(CHECK_LIMIT, '--check', self.script, self.scratch, '--only-start', env=env)
        lines = []
        if found.exists():
            lines = [(entry['level'], f"{entry['name']}: {entry['text']} ({entry['remedy']})")
                     for entry in json.loads(found.read_text())['findings']]
        # the table is on stderr, too
        own = ('conda-python-distributed:', 'slingtorch check: rank') if lines else ''
        lines += [('stderr', line) for line in dict.fromkeys(done.stderr.splitlines())
                  if line.strip() and line.startswith(own) and not line.startswith('srun:')]
        colour = 'hangs' if seconds >= CHECK_LIMIT else 'red' if done.returncode else 'goes on'
        return Answer(done.returncode, colour, lines, seconds, [path.name for path in self.left()])

    def left(self):
        """What --check left in /tmp."""
        return [path for node in self.nodes
                for path in (self.cluster.dir / f'local.{node}').glob('slingtorch-check-*')]

    def train(self):
        """What a training does: {'outcome': 'breaks', 'slow' or 'harmless', 'seconds', 'said'}."""
        done, seconds = self.step(TRAINING_LIMIT, self.script, self.scratch)
        steps = re.findall(r'^step (\d)', done.stdout, re.M)
        loss = re.search(r'^loss (.*)', done.stdout, re.M)
        said = [line for line in done.stderr.splitlines() if line.strip()]
        said.sort(key=lambda line: not re.match(r'(\[rank\d\]: )?([\w.]*(Error|Exception)\b|conda-python)', line))
        outcome = 'breaks'
        if seconds >= TRAINING_LIMIT:
            outcome, said = ('slow' if steps else 'breaks'), [f'{len(steps)} of 8 steps in {TRAINING_LIMIT} s']
        elif done.returncode == 0 and loss:
            outcome, said = 'harmless', [loss.group(0)]
        elif done.returncode == 0:
            said = ['no rank says that it trained, and the status is 0']
        text = re.sub(r'/\S*/', '', said[0]) if said else ''
        return {'outcome': outcome, 'seconds': round(seconds), 'said': f'status {done.returncode}: {text}'[:200]}


def verdict(wanted, colour, lines):
    """(whether --check said what it must, the line that says so, or the first one).

    :param colour: as in Answer
    :param lines: as in Answer
    """
    levels = {'red': ('red', 'stderr'), 'yellow': ('yellow',), 'named': ('red', 'yellow'), 'nothing': ()}
    named = [line for level, line in lines if level in levels[wanted.colour] and re.search(wanted.words, line)]
    loud = [line for level, line in lines if level in ('red', 'stderr') and colour != 'goes on']
    right = {
        'red': colour == 'red' and named,
        'yellow': colour == 'goes on' and named,
        'named': colour != 'hangs' and named,
        'nothing': colour == 'goes on',
    }[wanted.colour]
    return bool(right), (named + loud + [''])[0]


@contextlib.contextmanager
def planted(lane, wanted):
    """A Job with this fault, until the end of the block."""
    with contextlib.ExitStack() as stack:
        job = Job(lane, stack)
        wanted.plant(job)
        yield job


def run_all(wanted, installed, what, lanes=3, show=lambda name, result: None):
    """what(job) for each fault, on as many pairs of nodes at the same time; {name: its result, or the exception}.

    The jobs that wait for something leave the processors to the others. show(name, result) is called after each.
    """
    slurm.clean_up_killed_runs()
    for group in pathlib.Path('/sys/fs/cgroup').glob('**/slingtorch-*-nid*'):
        if not pathlib.Path('/proc', group.name.split('-')[1]).exists():
            group.rmdir()   # of a killed run
    cluster = slurm.Cluster(nodes=tuple(f'nid{number:06}' for number in range(1, 2 * lanes + 1)), separate=True)
    waiting, found = collections.deque(wanted), {}

    def work(number):
        lane = Lane(cluster, cluster.nodes[2 * number:2 * number + 2], installed)
        # those of the network, which are the last ones, wait most
        take = waiting.pop if number % 2 else waiting.popleft
        while waiting:
            try:
                entry = take()
            except IndexError:  # another one took the last
                return
            try:
                with planted(lane, entry) as job:
                    found[entry.name] = what(job)
            except (Exception, pytest.fail.Exception) as error:     # the others go on
                found[entry.name] = error
            show(entry.name, found[entry.name])

    try:
        cluster.start()
        with concurrent.futures.ThreadPoolExecutor(lanes) as pool:
            for done in [pool.submit(work, number) for number in range(lanes)]:
                done.result()
    finally:
        cluster.stop()
    return found


from . import environment, machine, network  # noqa: E402,F401, they fill FAULTS
