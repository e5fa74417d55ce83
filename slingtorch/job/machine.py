# SPDX-License-Identifier: GPL-2.0-only
"""
Everything about how a node's hardware is recognised, from files only: processors, memory, GPUs, mounts, network cards,
libraries; also lists of hosts. 'slingtorch site new' and the choice of a wheel use it, too.
"""
import contextlib
import functools
import glob
import os
import re
import socket
import time

from .kinds import Callable, List, Mapping, Optional

# Class and vendor of a PCI device that is a GPU, as in /sys, separated by '/': 3D controller, other display controller,
# processing accelerator; VGA only of NVIDIA, since those of other vendors belong to the mainboard.
GPU = r'^0x(0302|0380|1200|0300.*/0x10de$)'
# vendors of GPUs that PyTorch's CUDA and ROCm run on
VENDORS = {'0x10de': 'cuda', '0x1002': 'rocm'}
# variables that limit a process to some GPUs, in the order in which they are read
VISIBILITY = ('ROCR_VISIBLE_DEVICES', 'CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES', 'ZE_AFFINITY_MASK',
              'GPU_DEVICE_ORDINAL')
# An entry of such a list that can be a GPU, also for bash. The list ends at the first entry that cannot (CUDA C++
# Programming Guide, CUDA_VISIBLE_DEVICES): -1, NoDevFiles of Slurm and PBS, none, void.
GPU_ENTRY = r'^([0123456789]{1,4}(\.[0123456789]{1,4})?|(GPU|MIG)-[A-Za-z0-9/-]+)$'
# ROCm's devices and processors
KFD = 'sys/class/kfd/kfd/topology/nodes'
# types of file systems that nodes share, as in /proc/mounts
SHARED = frozenset('lustre gpfs beegfs fhgfs wekafs ceph panfs nfs nfs4 dvs pvfs2 orangefs daos afs cifs glusterfs '
                   'fuse.glusterfs fuse.sshfs fuse.dfuse'.split())
# An MPI itself. Cray's: libmpi_gnu_123.so.12, libmpi_cray.so.12, libmpi_nvidia.so.12 ..., one for each compiler.
MPI_LIBRARY = re.compile(r'^libmpi(ch)?(_(?!gtl|cxx|mpifh|usempi|java)\w+)?\.so')
# libraries that belong to an MPI: bindings for other languages, its profiling library, the GPU Transport Layer
OF_AN_MPI = re.compile(r'^lib(p?mpi|mpich|mpicxx|mpi_\w+|mvapich)\.so')
# Cray's GPU Transport Layer: libmpi_gtl_cuda.so, libmpi_gtl_hsa.so
TRANSPORT_LAYER = re.compile(r'^libmpi_gtl_')
# network plugins that NCCL or RCCL opens if NCCL_NET_PLUGIN is not set (nccl.plugin_names)
NET_PLUGINS = ('libnccl-net.so', 'librccl-net.so')
# mapped libraries that show how a program communicates
COMMUNICATION = re.compile(r'/lib([nr]ccl|fabric|mpi|cxi|ibverbs|ucp|psm2|cuda(rt)?\.|amdhip64|hsa-runtime|MIOpen)')


def for_bash() -> str:
    """The constants that bash needs, for runscripts/lib/facts.bash; 'python3 -m slingtorch.job.machine' prints it."""
    return """# SPDX-License-Identifier: GPL-2.0-only
# Made from slingtorch/job/machine.py, by: python3 -m slingtorch.job.machine
# shellcheck disable=SC2034  # for those who source it
_gpu_device='%s'
_gpu_variables='%s'
_gpu_entry='%s'
_net_plugins='%s'
""" % (GPU, ','.join(VISIBILITY), GPU_ENTRY, ':'.join(NET_PLUGINS))


def by_srun(environ: 'Mapping[str, str]') -> bool:
    """Whether srun started this rank. An mpiexec in a job passes its own Slurm variables on, so these do not tell."""
    return environ.get('SLINGTORCH_LAUNCHER', 'slurm') == 'slurm' and bool(environ.get('SLURM_STEP_ID'))


def seconds_to_wait(environ: 'Mapping[str, str]') -> float:
    """SLINGTORCH_CHECK_SECONDS, by default 120. :raises SystemExit: it is not a whole number from 1 to 86400"""
    text = environ.get('SLINGTORCH_CHECK_SECONDS') or '120'
    if not re.match(r'[1-9][0-9]{0,4}\Z', text) or int(text) > 86400:
        raise SystemExit("SLINGTORCH_CHECK_SECONDS=%s is not a number of seconds. Write a whole number from 1 to 86400"
                         % ascii(text[:60]) if environ.get('RANK', '0') == '0' else 1)
    return float(text)


def numbers_in(text: str) -> list:
    """The numbers in a list such as 08-11,20, as texts with leading zeros; skips what it cannot read."""
    numbers = []
    for part in text.strip().split(','):
        first, _, last = part.partition('-')
        last = last or first
        if first.isdigit() and last.isdigit() and int(last) - int(first) < 100000:
            numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_hosts(text: 'Optional[str]') -> list:
    """The hosts in a list of Slurm, such as nid[001-003,7],a1; skips what it cannot read."""
    hosts = []
    for part in re.findall(r'(?:[^,\[]|\[[^\]]*\])+', text or ''):
        names = ['']
        for piece in re.findall(r'\[[^\]]*\]|[^\[]+', part):
            values = numbers_in(piece[1:-1]) if piece.startswith('[') else [piece]
            names = [name + value for name in names for value in values]
        hosts += names
    return hosts


def cpus_of(text: str) -> set:
    """The numbers in a list such as 0-3,8."""
    return set(map(int, numbers_in(text)))


def gpu_vendor(device_class: 'Optional[str]', vendor: 'Optional[str]') -> 'Optional[str]':
    """'cuda' or 'rocm' if a PCI device with this class and vendor ('0x030200', '0x10de') is a GPU; else None."""
    return VENDORS.get(vendor or '') if re.match(GPU, '%s/%s' % (device_class, vendor)) else None


def read_mounts(text: str) -> list:
    """The content of /proc/mounts: [(directory, type, options)]."""
    lines = [line.split(' ') for line in text.splitlines()]
    return [(re.sub(r'\\([0-7]{3})', lambda code: chr(int(code.group(1), 8)), fields[1]), fields[2],
             fields[3].split(',')) for fields in lines if len(fields) > 3]


def library_kind(path: str) -> 'Optional[str]':
    """The kind of a library, from its name: 'libnccl', 'MPI' ...; None if it is of no interest here."""
    name = os.path.basename(path)
    found = re.match(r'(libnccl|librccl|libfabric|libcuda|libcudart|libamdhip64)\.so', name)
    return 'MPI' if MPI_LIBRARY.match(name) else found and found.group(1)


def mapped_libraries() -> list:
    """Paths of the libraries that this process maps and that show how it communicates, each once."""
    with open('/proc/self/maps') as maps:
        return sorted(filter(COMMUNICATION.search, set(re.findall(r' (/.+\.so.*)$', maps.read(), re.M))))


class Machine:
    """
    A node.

    :param environ: the environment of a rank on the node
    :param root: directory that contains /proc, /sys, /dev and the mounts
    :param clock: returns the time
    """

    def __init__(self, environ: 'Optional[Mapping[str, str]]' = None, root: str = '/',
                 clock: 'Callable[[], float]' = time.time) -> None:
        self.environ = dict(os.environ if environ is None else environ)
        self.root, self.clock = root, clock

    def path(self, name: str) -> str:
        """A path below the root."""
        return os.path.join(self.root, name)

    def read(self, name: str, default: str = '') -> str:
        """The text of a small file, stripped."""
        try:
            with open(self.path(name), errors='replace') as stream:
                return stream.read(1 << 20).strip()
        except OSError:
            return default

    def list(self, name: str) -> 'List[str]':
        """The names in a directory, sorted."""
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return []

    def glob(self, pattern: str) -> 'List[str]':
        """The paths below the root that match, sorted."""
        return sorted(glob.glob(os.path.join(glob.escape(self.root), pattern)))

    @property
    def node(self) -> str:
        """The node's name, determined as in conda-python-distributed."""
        own = self.environ.get('SLURMD_NODENAME')
        if own and by_srun(self.environ):
            return own
        return self.read('proc/sys/kernel/hostname') or socket.gethostname()

    def cpus(self) -> tuple:
        """(CPUs that this process may use, CPUs of the node)"""
        allowed = re.search(r'^Cpus_allowed_list:\s*(\S+)', self.read('proc/self/status'), re.M)
        return cpus_of(allowed.group(1) if allowed else ''), cpus_of(self.read('sys/devices/system/cpu/online'))

    def mount_of(self, path: str) -> tuple:
        """(directory, type) of a path's file system; ('', '') if unknown."""
        best = '', ''
        for where, kind, _ in read_mounts(self.read('proc/self/mounts')):
            # the last mount on a directory hides earlier ones
            if (path + '/').startswith(where.rstrip('/') + '/') and len(where) >= len(best[0]):
                best = where, kind
        return best

    # --- GPUs

    @functools.lru_cache()
    def gpus(self) -> 'List[tuple]':
        """
        The node's GPUs: [(name, CPUs near it, 'cuda' or 'rocm')], in the order of their PCI addresses.

        NVIDIA's own order may differ, depending on CUDA_DEVICE_ORDER, if there are GPUs of several kinds.
        """
        found = []
        for device in self.list('sys/bus/pci/devices'):
            where = 'sys/bus/pci/devices/%s/' % device
            vendor = gpu_vendor(self.read(where + 'class'), self.read(where + 'vendor'))
            if vendor:
                found.append((device, sorted(cpus_of(self.read(where + 'local_cpulist'))), vendor))
        return found

    def open_gpus(self) -> 'List[int]':
        """Numbers of NVIDIA's devices that this process can open: Slurm blocks the others with a control group."""
        numbers = sorted(int(name[6:]) for name in self.list('dev') if re.match(r'nvidia\d+$', name))
        usable = []
        for number in numbers:
            with contextlib.suppress(OSError):
                os.close(os.open(self.path('dev/nvidia%d' % number), os.O_RDONLY))
                usable.append(number)
        return usable

    def rocm_gpus(self) -> 'List[str]':
        """Numbers of ROCm's GPUs in KFD, where an MI300 in CPX mode counts as several."""
        # the simd_count of a CPU is 0 (Linux, kfd_topology.c)
        return [number for number in sorted(self.list(KFD), key=int)
                if re.search('^simd_count [1-9]', self.read('%s/%s/properties' % (KFD, number)), re.M)]

    def nvidia_driver(self) -> 'Optional[str]':
        """Version of NVIDIA's loaded kernel driver; None if there is none."""
        # open kernel modules print 'Kernel Module for x86_64  580.65.06'
        found = re.search(r'Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)', self.read('proc/driver/nvidia/version'))
        return found.group(1) if found else None

    # --- memory and control groups

    def cgroups(self, controller: str) -> 'List[str]':
        """Directories of the control groups with this controller that contain this process, the innermost first."""
        found = []
        for line in self.read('proc/self/cgroup').splitlines():
            parts = line.split(':', 2)
            if len(parts) == 3 and (not parts[1] or controller in parts[1].split(',')):
                base = 'sys/fs/cgroup' + ('/' + controller if parts[1] else '')
                path = parts[2].strip('/')
                while True:
                    found.append(os.path.join(base, path))
                    if not path:
                        break
                    path = os.path.dirname(path)
        return found

    def free_memory(self) -> tuple:
        """
        (bytes that the job's processes may still use on this node, None if unknown; the limit of the control group that
        causes this figure, else None; the file with this limit)

        The minimum of the memory that the kernel calls available and of what each cgroup above this process has left
        (version 2, and the memory controller of version 1). Cached file data counts as free: the kernel reclaims it.
        """
        found = re.search(r'^MemAvailable: +(\d+) kB', self.read('proc/meminfo'), re.M)
        least = int(found.group(1)) * 1024 if found else None, None, ''  # type: tuple
        for group in self.cgroups('memory'):
            names = 'memory.max', 'memory.current', 'inactive_file'
            if not self.read(os.path.join(group, names[0])):
                names = 'memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'
            limit, used = (self.read(os.path.join(group, name)) for name in names[:2])
            cached = re.search(r'^%s (\d+)' % names[2], self.read(os.path.join(group, 'memory.stat')), re.M)
            if limit.isdigit() and used.isdigit():
                left = int(limit) - int(used) + (int(cached.group(1)) if cached else 0)
                if least[0] is None or left < least[0]:
                    least = max(0, left), int(limit), self.path(os.path.join(group, names[0]))
        return least

    # --- network

    def slingshot(self) -> bool:
        """Whether the node has Slingshot 11: its devices, or interfaces with the usual name."""
        return bool(self.list('sys/class/cxi')) or any(name.startswith('hsn') for name in self.list('sys/class/net'))

    def reaches_internet(self) -> bool:
        """Whether the node has a proxy, or a default route (proc(5), net/route; or its routes are not known)."""
        routes, newer = self.read('proc/net/route').splitlines()[1:], self.read('proc/net/ipv6_route')
        return bool(self.environ.get('https_proxy') or self.environ.get('HTTPS_PROXY')) or not routes or any(
            re.match(r'\S+\s+00000000\s', line) for line in routes) or bool(
                re.search(r'(?m)^0{32} 00 (?!.* lo$)', newer))

    def line_rates(self) -> dict:
        """
        {interface: GB/s} of this node's network, from the drivers of InfiniBand and RoCE ports and of Slingshot's
        interfaces; if there are none, from those of the network cards that are up.
        """
        rates = {}
        for port in self.glob('sys/class/infiniband/*/ports/*'):
            match = re.match(r'(\d+(\.\d+)?) Gb/sec', self.read(port + '/rate'))
            if match and 'ACTIVE' in self.read(port + '/state'):
                rates['%s:%s' % (port.split('/')[-3], port.split('/')[-1])] = float(match.group(1)) / 8
        cards = [os.path.basename(path) for path in self.glob('sys/class/cxi/*/device/net/*')]
        if not rates and not cards:
            # virtual interfaces have no device
            cards = [path.split('/')[-2] for path in self.glob('sys/class/net/*/device')]
        for card in cards:
            where = 'sys/class/net/%s/' % card
            speed = self.read(where + 'speed')
            if speed.isdigit() and int(speed) > 0 and self.read(where + 'operstate') == 'up':
                rates[card] = int(speed) / 8000
        return rates


if __name__ == '__main__':
    print(for_bash(), end='')
