# SPDX-License-Identifier: GPL-2.0-only
"""What a node has, from its files alone: processors, memory, GPUs, mounts, network cards; and lists of hosts."""
import functools
import glob
import os
import re
import socket
import time

PARALLEL = {'lustre', 'gpfs', 'beegfs', 'panfs', 'wekafs', 'ceph', 'pvfs2', 'nfs', 'nfs4', 'dvs', 'cifs', 'fhgfs'}
# ROCm's devices and processors
KFD = 'sys/class/kfd/kfd/topology/nodes'


def by_srun(environ):
    """Whether srun started this rank: an mpiexec inside a job passes on Slurm's variables of its own process."""
    return environ.get('SLINGTORCH_LAUNCHER', 'slurm') == 'slurm' and bool(environ.get('SLURM_STEP_ID'))


def expand_hosts(text):
    """The hosts of a list of Slurm: nid[001-003,7],a1; as many as can be read."""
    hosts = []
    for part in re.findall(r'(?:[^,\[]|\[[^\]]*\])+', text or ''):
        names = ['']
        for piece in re.findall(r'\[[^\]]*\]|[^\[]+', part):
            values = [piece]
            if piece.startswith('['):
                values = []
                for span in piece[1:-1].split(','):
                    first, _, last = span.partition('-')
                    if first.isdigit() and (last or first).isdigit() and int(last or first) - int(first) < 100000:
                        numbers = range(int(first), int(last or first) + 1)
                        values += [str(number).zfill(len(first)) for number in numbers]
            names = [name + value for name in names for value in values]
        hosts += names
    return hosts


class Machine:
    """
    What a rank can look at.

    :param environ: its environment
    :param root: directory under which /proc, /sys, /dev and the mounts are looked up
    :param clock: gives the time
    """

    def __init__(self, environ=None, root='/', clock=time.time, mounts='proc/self/mounts'):
        self.environ = dict(os.environ if environ is None else environ)
        self.root, self.clock, self.mounts = root, clock, mounts

    def path(self, name):
        """A path below the root."""
        return os.path.join(self.root, name)

    def read(self, name, default=''):
        """The text of a small file."""
        try:
            with open(self.path(name), errors='replace') as stream:
                return stream.read(1 << 20)
        except OSError:
            return default

    def list(self, name):
        """The names in a directory, sorted."""
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return []

    @property
    def node(self):
        """Name of the node, as in conda-python-distributed."""
        own = self.environ.get('SLURMD_NODENAME')
        if own and by_srun(self.environ):
            return own
        return self.read('proc/sys/kernel/hostname').strip() or socket.gethostname()

    @property
    def container(self):
        """Whether this is inside a container."""
        return bool(self.environ.get('APPTAINER_CONTAINER') or self.environ.get('SINGULARITY_CONTAINER')
                    or os.path.exists(self.path('run/.containerenv')) or os.path.exists(self.path('.dockerenv')))

    def slingshot(self):
        """Whether the node has Slingshot 11: its devices, or interfaces of the usual name."""
        return bool(self.list('sys/class/cxi')) or any(name.startswith('hsn') for name in self.list('sys/class/net'))


def cpus_of(text):
    """The numbers of a list such as 0-3,8."""
    found = set()
    for part in text.strip().split(','):
        first, _, last = part.partition('-')
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return found


def cpus(machine):
    """(those that this process may use, those of the node)"""
    allowed = re.search(r'^Cpus_allowed_list:\s*(\S+)', machine.read('proc/self/status'), re.M)
    return cpus_of(allowed.group(1) if allowed else ''), cpus_of(machine.read('sys/devices/system/cpu/online'))


@functools.lru_cache()
def gpus(machine):
    """
    The GPUs of the node as [(name, CPUs beside it, maker)], NVIDIA's or AMD's, in the order of their PCI addresses.

    NVIDIA's own order may be another one, with CUDA_DEVICE_ORDER and GPUs of several kinds.
    """
    found = []
    for device in machine.list('sys/bus/pci/devices'):
        where = 'sys/bus/pci/devices/%s/' % device
        kind = machine.read(where + 'class').strip()[:6] + '/' + machine.read(where + 'vendor').strip()
        # AMD's 0x0300 can be the small one on the board of a server, as in cpu-bind
        if re.match(r'0x(0302|0380|1200|0300/0x10de$)', kind) and kind[-6:] in ('0x10de', '0x1002'):
            found.append((device, sorted(cpus_of(machine.read(where + 'local_cpulist'))), kind[-6:]))
    return found


def open_devices(machine):
    """Numbers of NVIDIA's devices that this process may open: Slurm closes the others by a control group."""
    numbers = sorted(int(name[6:]) for name in machine.list('dev') if re.match(r'nvidia\d+$', name))
    usable = []
    for number in numbers:
        try:
            os.close(os.open(machine.path('dev/nvidia%d' % number), os.O_RDONLY))
            usable.append(number)
        except OSError:
            pass
    return usable


def mount_of(machine, path):
    """(directory, type) of the file system that a path is on; ('', '') if that cannot be told."""
    best = ('', '')
    for line in machine.read(machine.mounts).splitlines():
        fields = line.split(' ')
        if len(fields) > 2:
            where = re.sub(r'\\([0-7]{3})', lambda code: chr(int(code.group(1), 8)), fields[1])
            if (path + '/').startswith(where.rstrip('/') + '/') and len(where) >= len(best[0]):
                best = where, fields[2]
    return best


def read_text(*parts):
    """Text of a file, stripped; '' if it cannot be read."""
    try:
        with open(os.path.join(*parts)) as stream:
            return stream.read().strip()
    except (OSError, ValueError):
        return ''


def free_memory(root='/'):
    """
    (bytes that the processes of this job may still take on this node, None if nothing says so; the limit of their
    control group if that is what leaves so little, else None; the file of this limit)

    The least of what the kernel calls available and of what every cgroup above this process has left (version 2, and
    the memory controller of version 1). What is cached of files counts as free: the kernel gives it back.
    """
    found = re.search(r'^MemAvailable: +(\d+) kB', read_text(root, 'proc/meminfo'), re.M)
    least = (int(found.group(1)) * 1024 if found else None, None, '')
    for line in read_text(root, 'proc/self/cgroup').splitlines():
        _, controllers, path = line.split(':', 2)
        if controllers == '':
            base, names = 'sys/fs/cgroup', ('memory.max', 'memory.current', 'inactive_file')
        elif 'memory' in controllers.split(','):
            base, names = 'sys/fs/cgroup/memory', ('memory.limit_in_bytes', 'memory.usage_in_bytes',
                                                   'total_inactive_file')
        else:
            continue
        path = path.strip('/')
        while True:
            group = os.path.join(root, base, path)
            limit, used = read_text(group, names[0]), read_text(group, names[1])
            cached = re.search(r'^%s (\d+)' % names[2], read_text(group, 'memory.stat'), re.M)
            if limit.isdigit() and used.isdigit():
                left = int(limit) - int(used) + (int(cached.group(1)) if cached else 0)
                if least[0] is None or left < least[0]:
                    least = max(0, left), int(limit), os.path.join(group, names[0])
            if not path:
                break
            path = os.path.dirname(path)
    return least


def line_rates(root='/sys'):
    """
    {interface: GB/s} of this node's network: what its drivers say of InfiniBand and RoCE ports and of Slingshot's
    interfaces; if there are none, of the network cards that are up.
    """
    rates = {}
    for port in glob.glob(os.path.join(root, 'class/infiniband/*/ports/*')):
        match = re.match(r'(\d+(\.\d+)?) Gb/sec', read_text(port, 'rate'))
        if match and 'ACTIVE' in read_text(port, 'state'):
            rates['%s:%s' % (port.split('/')[-3], port.split('/')[-1])] = float(match.group(1)) / 8
    cards = [os.path.basename(path) for path in glob.glob(os.path.join(root, 'class/cxi/*/device/net/*'))]
    if not rates and not cards:
        # virtual ones have no device
        cards = [path.split('/')[-2] for path in glob.glob(os.path.join(root, 'class/net/*/device'))]
    for card in cards:
        speed = read_text(root, 'class/net', card, 'speed')
        if speed.isdigit() and int(speed) > 0 and read_text(root, 'class/net', card, 'operstate') == 'up':
            rates[card] = int(speed) / 8000
    return rates
