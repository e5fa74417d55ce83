# SPDX-License-Identifier: GPL-2.0-only
"""A private Slurm cluster on this machine, with its own munge: this machine's Slurm, or that of a newer Debian.

Everything it writes is in one directory of its own under /tmp, with a file that names the process that started it; so
any number of test runs can have a cluster at the same time, and a later run finds and ends what a killed one left.
"""

import glob
import itertools
import os
import pathlib
import pwd
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid

import pytest

from . import DIR, NODES, ROOT, clean_environ, missing, only_root, run

PREFIX = f'{tempfile.gettempdir()}/slingtorch-slurm-{os.getuid()}-'
CPUS = 8
GPUS = 4

# With `separate`: a network of the cluster's own, which ends with its last process, so that clusters cannot meet.
# Above 127: in 10.0.0.0/8 a node that calls itself 127.0.1.1 does no harm (seen with PyTorch 2.13), as gloo lets the
# rank with the lower address listen.
NETWORK = '172.30.0.%d'
LOGIN = NETWORK % 254
LOGIN_NODE = f'''echo login > /proc/sys/kernel/hostname
ip link set lo up
ip link add slurm type bridge
ip address add {LOGIN}/24 dev slurm
ip link set slurm up'''
# What a node has for itself; this sh becomes slurmd, below $root. sysfs shows the network of who mounts it, and loses
# the cgroups.
NODE = '''node=$0 root=${1%/} dir=$2 login=$3 address=$4 count=$5; shift 5
echo "$node" > /proc/sys/kernel/hostname
ip link set lo up
ip link add eth0 type veth peer name "$node" netns "$login"
nsenter --target="$login" --net ip link set "$node" master slurm up
ip address add "$address/24" dev eth0
ip link set eth0 up
mkdir -p "$dir/cgroup"
mount --rbind /sys/fs/cgroup "$dir/cgroup"
mount -t sysfs sysfs "$root/sys"
mount --rbind "$dir/cgroup" "$root/sys/fs/cgroup"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/run"
mkdir "$root/run/munge"
ln -s "$dir/munge.socket" "$root/run/munge/munge.socket.2"
mount --bind "$dir/hosts.$node" "$root/etc/hosts"
mount --bind "$dir/boot_id.$node" "$root/proc/sys/kernel/random/boot_id"
while [ "$count" -gt 0 ]; do
    mkdir -p "$dir/local.$node${1#/tmp}"
    mount --rbind "$1" "$dir/local.$node${1#/tmp}"
    shift; count=$((count - 1))
done
mount --rbind "$dir/local.$node" "$root/tmp"
mount --bind "$root$dir/local.$node" "$root$dir/local"
exec chroot "$root/" env --chdir="$dir" "$@"'''


class Batch:
    """A batch job that has ended: its number, exit status, and what it printed (both streams)."""

    def __init__(self, jobid, returncode, output):
        self.jobid = jobid
        self.returncode = returncode
        self.output = output


class Cluster:
    """Two nodes, nid000001 and nid000002, each with 8 CPUs and 4 GPUs that are links to /dev/null.

    :param root: directory of a whole system (testbed.debianroot) whose Slurm and munge run there. Programs in it see
                 this machine's /proc, /dev, /sys, temporary directory, checkout, testbed directory and Python.
                 '/': the Slurm of this machine, in the same way
    :param nodes: other names of nodes, neighbouring numbers; with a root alone, where they need no line in /etc/hosts
    :param separate: each node has, as a real one, its own network (eth0, MTU 1500), host name, /tmp, /dev/shm,
                     /etc/hosts (`hosts.<node>` in `dir`) and boot id; needs root
    :ivar env: a clean environment in which srun and its relatives talk to this cluster
    :ivar local: where root runs the tests, a directory that each node has for itself, as the disk of a real one;
                 from outside, `local.<node>` beside it is the node's, with `separate` also as /tmp
    :ivar shared: a directory that all nodes see at the same path, for files of jobs
    """

    def __init__(self, root=None, nodes=NODES, separate=False):
        if separate:
            # an ordinary user's own namespaces could have one user id alone, and no bridge to the others
            only_root('gives nodes a network, mounts and a host name of their own')
            root = root or '/'
        self.root, self.separate = root, separate
        self.nodes = nodes
        for program, package in () if root else (('slurmctld', 'slurm-wlm'), ('slurmd', 'slurm-wlm'),
                                                 ('srun', 'slurm-wlm'), ('munged', 'munge')):
            if not shutil.which(program, path=os.environ.get('PATH', '') + ':/usr/sbin:/sbin'):
                missing(f'{program} (package {package})')
        for node in () if root else nodes:
            try:
                address = socket.gethostbyname(node)
            except OSError:
                address = ''
            if not address.startswith('127.'):
                missing(f'line "127.0.0.1 {" ".join(NODES)}" in /etc/hosts')
        self.daemons, self.pids = [], {}
        self.batches = itertools.count()
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX))
        self.dir.chmod(0o755)
        (self.dir / 'owner').write_text(f'{os.getpid()} {start_time(os.getpid())}\n')
        self.local, self.shared = self.dir / 'local', self.dir / 'shared'
        self.shared.mkdir()
        self.address = dict(zip(nodes, map(NETWORK.__mod__, range(1, 254)))) if separate else {}
        self.env = {**clean_environ(), 'SLURM_CONF': str(self.dir / 'slurm.conf')}
        self.inside = []
        if root:
            self.env['PATH'] = '/usr/sbin:/usr/bin:/sbin:/bin'

    # --- start and stop

    def start(self):
        """Start all daemons and wait for the nodes; again with other ports if another run took them."""
        if self.root and not self.inside:
            self.enter_root()
        for attempt in range(3):
            self.write_configuration()
            try:
                self.start_daemons()
                self.wait_for_nodes()
                return self
            except RuntimeError as error:
                problem = error
                self.stop_daemons()
        raise RuntimeError(f'the Slurm cluster in {self.dir} does not start: {problem}\n{self.logs()}')

    def enter_root(self):
        """A process in the root, with this machine's directories mounted there; `self.inside` runs commands there."""
        hosts = self.dir / 'hosts'
        if self.separate:
            names = ['127.0.0.1 localhost', f'{LOGIN} login', *(f'{self.address[node]} {node}' for node in self.nodes)]
            hosts.write_text('\n'.join(names) + '\n')
        else:
            hosts.write_text(f'127.0.0.1 localhost {socket.gethostname()} {" ".join(self.nodes)}\n')
        lines = [f'root={shlex.quote(str(self.root))}; mount --rbind "$root" "$root"']
        python = [sys.base_prefix] if sys.base_prefix != '/usr' else [
            os.path.realpath(sys.executable), sysconfig.get_path('stdlib')]
        paths = ['/proc', '/dev', '/sys', tempfile.gettempdir(), ROOT, DIR, *python]
        paths += [f'/etc/{name}' for name in ('passwd', 'group', 'nsswitch.conf')]
        for path in paths if self.root != '/' else ():
            lines += bind(path)
        lines += [*bind(hosts, '/etc/hosts'), LOGIN_NODE * self.separate,
                  'exec chroot "$root" sh -c "echo there && exec sleep infinity"']
        env = {'PATH': self.env['PATH']}    # and no SLURM_CONF: kill_leftovers()
        own = ['--net', '--uts'] * self.separate
        command = ['unshare', *own, '--mount', '--propagation', 'private', 'sh', '-ec', '\n'.join(lines)]
        self.holder = subprocess.Popen(['setpriv', '--pdeathsig', 'KILL', *command], env=env, text=True,
                                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = self.holder.stdout.readline()
        if said != 'there\n':
            raise RuntimeError(f'cannot enter {self.root}: {said}{self.holder.stdout.read()}')
        self.inside = ['nsenter', f'--target={self.holder.pid}', '--mount', '--root', *own]

    def command(self, *command, cwd=None):
        """The command line that runs this command where the cluster's Slurm is."""
        where = [*self.inside, 'env', f'--chdir={cwd or self.dir}'] if self.inside else []
        return [*where, *map(str, command)]

    def on(self, node, *command):
        """The command line that runs this command as root on a separate node, with what that has for itself."""
        return ['nsenter', f'--target={self.pids[node]}', '--net', '--uts', '--mount', '--root', *map(str, command)]

    def write_configuration(self):
        """slurm.conf, gres.conf, the munge key and the GPUs."""
        user = pwd.getpwuid(os.getuid()).pw_name
        controller, daemon = free_ports(1)[0], free_ports(len(self.nodes))[0]
        for number in range(GPUS):
            gpu = self.dir / f'gpu{number}'
            if not gpu.is_symlink():
                gpu.symlink_to('/dev/null')
        key = self.dir / 'munge.key'
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        # FirstJobId: ranks of two clusters of this machine, in jobs of the same number, would meet at the same port
        # TmpFS: Slurm's PMIx makes a directory there, and the nodes of one step would make the same one
        nodes = f'nid[{self.nodes[0][3:]}-{self.nodes[-1][3:]}]'
        if self.separate:
            host, login = 'login', LOGIN
            places = f'NodeHostname={nodes} NodeAddr={NETWORK[:-2]}[1-{len(self.nodes)}] Port={daemon}'
        else:
            host, login = socket.gethostname().split('.')[0], '127.0.0.1'
            places = f'NodeHostname={host} NodeAddr={login} Port=[{daemon}-{daemon + len(self.nodes) - 1}]'
        (self.dir / 'cgroup.conf').write_text('CgroupPlugin=disabled\n' if self.root not in (None, '/') else '')
        (self.dir / 'gres.conf').write_text(f'NodeName={nodes} Name=gpu File={self.dir}/gpu[0-{GPUS - 1}]\n')
        (self.dir / 'slurm.conf').write_text(f'''
ClusterName=slingtorch
FirstJobId={random.randint(1, 100_000)}
SlurmctldHost={host}({login})
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={self.dir}/munge.socket
CredType=cred/munge
StateSaveLocation={self.dir}/state
SlurmdSpoolDir={self.dir}/spool.%n
TmpFS={self.dir}/local.%n
SlurmctldPidFile={self.dir}/slurmctld.pid
SlurmdPidFile={self.dir}/%n.pid
SlurmctldLogFile={self.dir}/slurmctld.log
SlurmdLogFile={self.dir}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=600
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
KillWait=2
GresTypes=gpu
NodeName={nodes} {places} \\
    CPUs={CPUS} RealMemory=4000 Gres=gpu:{GPUS} State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
'''.lstrip())

    def start_daemons(self):
        """munged, slurmctld and one slurmd a node, in the foreground as children of this process."""
        (self.dir / 'state').mkdir(exist_ok=True)
        self.daemon('munged', '--foreground', '--force', f'--socket={self.dir}/munge.socket',
                    f'--key-file={self.dir}/munge.key', f'--pid-file={self.dir}/munged.pid',
                    f'--log-file={self.dir}/munged.log', f'--seed-file={self.dir}/munge.seed')
        wait(lambda: (self.dir / 'munge.socket').exists(), 240, 'munged makes no socket', self.check_daemons)
        self.daemon('slurmctld', '-D', '-c', '-f', self.dir / 'slurm.conf')
        for node in self.nodes:
            own = self.dir / f'local.{node}'
            for directory in (self.local, own):
                directory.mkdir(exist_ok=True)
                directory.chmod(0o1777)
            self.daemon('slurmd', '-D', '-N', node, '-f', self.dir / 'slurm.conf', own=own, node=node)

    def daemon(self, *command, own=None, node=None):
        """Start a daemon; with a directory `own`, that is what it and its jobs have at `self.local`.

        :param node: the node that it is, if nodes are separate
        """
        path = self.env.get('PATH', '') + ':/usr/sbin:/sbin'
        # a daemon ends with this process, even when that is killed
        name, *_ = command = [*map(str, command)]
        if node and self.separate:
            (self.dir / f'hosts.{node}').write_text((self.dir / 'hosts').read_text())
            (self.dir / f'boot_id.{node}').write_text(f'{uuid.uuid4()}\n')
            kept = [kept for kept in (self.dir, ROOT, DIR, sys.base_prefix) if str(kept).startswith('/tmp/')]
            command = [NODE, node, self.root, self.dir, self.holder.pid, self.address[node], len(kept), *kept, *command]
            command = ['sh', '-ec', *map(str, command)]
            command = ['unshare', '--net', '--uts', '--mount', '--propagation', 'slave', *command]
            # where the root's mounts are, with this machine's programs
            command = [word for word in self.inside if word != '--root'] + command
        elif own and os.geteuid() == 0:
            mount = 'mount --bind "$0" "$1" && shift && exec "$@"'
            command = ['sh', '-c', mount, str(own), str(self.local), *command]
            command = ['unshare', '--mount', '--propagation', 'slave', *command]
        if not (node and self.separate):
            command = self.command(*command)
        command = ['setpriv', '--pdeathsig', 'TERM', *command]
        with open(self.dir / f'{name}.out', 'a') as log:
            self.daemons.append(subprocess.Popen(command, env={**self.env, 'PATH': path}, cwd=self.dir,
                                                 stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                 start_new_session=True))
        self.pids[node] = self.daemons[-1].pid   # each of the programs in front becomes the next one

    def check_daemons(self):
        for daemon in self.daemons:
            if daemon.poll() is not None:
                raise RuntimeError(f'{" ".join(daemon.args[3:])} ended with status {daemon.returncode}')

    def wait_for_nodes(self):
        def idle():
            done = run(self.command('sinfo', '-h', '-N', '-o', '%T'), env=self.env, check=False)
            return done.stdout.split() == ['idle'] * len(self.nodes)

        wait(idle, 240, 'the nodes do not become idle', self.check_daemons)

    def stop(self):
        """End jobs, then daemons, then remove the directory."""
        if any(daemon.poll() is None for daemon in self.daemons):
            subprocess.run(self.command('scancel', '--state=PENDING'), env=self.env, stderr=subprocess.DEVNULL,
                           timeout=30)
            subprocess.run(self.command('scancel', '--signal=KILL', '--full', '--state=RUNNING'), env=self.env,
                           stderr=subprocess.DEVNULL, timeout=30)
            try:
                wait(lambda: not self.run('squeue', '-h', check=False).stdout.strip(), 20, 'jobs do not end')
            except RuntimeError:
                pass  # their steps are killed below
        self.stop_daemons()
        if self.inside:
            self.holder.kill()
            self.holder.wait()
        shutil.rmtree(self.dir, ignore_errors=True)

    def stop_daemons(self):
        for daemon in reversed(self.daemons):
            if daemon.poll() is None:
                daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.daemons = []
        kill_leftovers(self.dir)

    def logs(self):
        """The ends of all logs, for a message."""
        return '\n'.join(
            f'--- {path}\n' + ''.join(open(path, errors='replace').readlines()[-15:])
            for path in sorted(glob.glob(f'{self.dir}/*.log') + glob.glob(f'{self.dir}/*.out'))
        )

    # --- jobs

    def environ(self, env=None):
        """This cluster's environment with `env` on top; None as a value removes the variable."""
        merged = {**self.env, **{key: value for key, value in (env or {}).items() if key not in ('SLURM_CONF',)}}
        return {key: str(value) for key, value in merged.items() if value is not None}

    def run(self, *command, env=None, check=True, timeout=240, cwd=None):
        """Run a command where the cluster's Slurm is; its CompletedProcess, with text streams."""
        return run(self.command(*command, cwd=cwd), env=self.environ(env), check=check, timeout=timeout, cwd=cwd)

    def srun(self, *args, env=None, check=True, timeout=240, cwd=None):
        """`srun ARGS`: options of srun, then the command. Its CompletedProcess, with text streams.

        :param env: variables on top of this cluster's environment, passed on to the job
        """
        return self.run('srun', *args, env=env, check=check, timeout=timeout, cwd=cwd)

    def popen(self, *args, env=None, program='srun', cwd=None):
        """Start `srun ARGS` (or salloc) and return the Popen, both streams as pipes."""
        return subprocess.Popen(self.command(program, *args, cwd=cwd), env=self.environ(env), cwd=cwd,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True)

    def sbatch(self, script, *args, arguments=(), env=None, timeout=240, cwd=None):
        """Submit `script`, wait for the end of the job, return a Batch; does not check the exit status.

        :param script: its text, or its path
        :param arguments: of the script
        """
        number = next(self.batches)    # threads may submit at the same time
        path, output = self.dir / f'batch-{number}.sh', self.dir / f'batch-{number}.out'
        path.write_text(script if isinstance(script, str) else '')
        command = ['sbatch', '--parsable', f'--output={output}', *args]
        command += [path if isinstance(script, str) else script, *arguments]
        jobid = self.run(*command, env=env, cwd=cwd, timeout=120).stdout.split()[0].split(';')[0]

        # not sbatch --wait: it looks every 2, 4, 8, 16 ... seconds
        def state():
            text = self.run('scontrol', '--oneliner', 'show', 'job', jobid).stdout
            return dict(entry.split('=', 1) for entry in text.split() if '=' in entry)

        unfinished = ('PENDING', 'CONFIGURING', 'RUNNING', 'COMPLETING', 'SUSPENDED')
        try:
            wait(lambda: state()['JobState'] not in unfinished, timeout, f'batch job {jobid} does not end')
        except RuntimeError as error:
            self.run('scancel', jobid)
            pytest.fail(f'{error}\n{output.read_text() if output.exists() else ""}', pytrace=False)
        status, killed_by = map(int, state()['ExitCode'].split(':'))
        return Batch(int(jobid), status or 128 * bool(killed_by) + killed_by, output.read_text())


def bind(path, target=None):
    """Lines of sh that show this directory or file of the machine in $root, at the same path or at `target`."""
    there = f'"$root"{shlex.quote(str(target or path))}'
    made = f'mkdir -p {there}' if os.path.isdir(path) else f'mkdir -p {there}/.. && rmdir {there} && touch {there}'
    return [f'test -e {there} || {{ {made}; }}', f'mount --rbind {shlex.quote(str(path))} {there}']


def wait(condition, seconds, problem, check=lambda: None):
    """Wait until `condition()` is true; RuntimeError(problem) after so many seconds."""
    start = time.monotonic()
    while not condition():
        check()
        passed = time.monotonic() - start
        if passed > seconds:
            raise RuntimeError(f'{problem} in {seconds} s')
        # a condition may start programs: at most a twentieth longer than it takes, in place of a core that asks
        time.sleep(min(1, 0.05 + passed / 20))


def free_ports(count):
    """
    `count` neighbouring TCP ports, below the kernel's ephemeral range, on which nothing listens at this moment.

    Above those that lib/master.bash gives to jobs (10000 to 26383 where the ephemeral range is Linux's own): rank 0 of a
    job could meet a daemon there.
    """
    while True:
        first = random.randrange(27000, 32000)
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.socket())
                sockets[-1].bind(('0.0.0.0', port))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for open_socket in sockets:
                open_socket.close()


def start_time(pid):
    """When the process started, in the kernel's ticks; '' if there is none. Numbers of processes come again."""
    try:
        return pathlib.Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[19]
    except (OSError, IndexError):
        return ''


def kill_leftovers(directory):
    """
    Kill every process that belongs to the cluster of this directory: its environment names the slurm.conf in it.

    Until there is none: one that is killed may have started another one while we looked.
    """
    mark = f'SLURM_CONF={directory}/slurm.conf'.encode()

    def none_is_left():
        left = False
        for environ in glob.glob('/proc/[0-9]*/environ'):
            pid = int(environ.split('/')[2])
            try:
                with open(environ, 'rb') as stream:
                    if pid != os.getpid() and mark in stream.read().split(b'\0'):
                        os.kill(pid, signal.SIGKILL)
                        left = True
            except OSError:
                pass  # ended meanwhile, or another user's
        return not left

    wait(none_is_left, 120, f'processes of {directory} are left')


def clean_up_killed_runs():
    """End and remove the clusters whose test run is gone."""
    for owner in glob.glob(f'{PREFIX}*/owner'):
        directory = pathlib.Path(owner).parent
        try:
            pid, started = (pathlib.Path(owner).read_text().split() + ['', ''])[:2]
        except OSError:
            continue
        if not started or start_time(pid) != started:
            kill_leftovers(directory)
            shutil.rmtree(directory, ignore_errors=True)
