# SPDX-License-Identifier: GPL-2.0-only
"""
slingtorch site new: looks at a machine and writes a site file for it.

gather() alone touches the machine: every probe is a text. The read_ functions understand such texts, a Draft decides,
compose() and merge() write; so recorded texts of other machines test them. hooks/slingshot_sites.py knows the form.
"""
import concurrent.futures
import difflib
import glob
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import OrderedDict, namedtuple

from slingtorch.job import machine

LIMIT = 20      # seconds for one command; all of them run at the same time

COMMANDS = {
    'sinfo': ['sinfo', '--noheader', '--format=%P|%D|%G'],
    'slurm': ['scontrol', 'show', 'config'],
    'pbs': ['qstat', '--version'],
    'addresses': ['ip', '-j', 'address'],
    'routes': ['ip', '-j', 'route', 'show', 'default'],
    'fi_info': ['fi_info'],
    'nvidia-smi': ['nvidia-smi', '-L'],
    'rocm-smi': ['rocm-smi', '--showid'],
    'amd-smi': ['amd-smi', 'list'],
}
# what 'module avail' says is on standard error, and shell code on standard output
MODULES = (('LMOD_CMD', '"$LMOD_CMD" bash -t avail 2>&1 >/dev/null'),
           ('MODULES_CMD', '"$MODULES_CMD" bash avail -t 2>&1 >/dev/null'))
TREES = {
    'net': ('/sys/class/net', ['*/operstate', '*/speed']),
    'cxi': ('/sys/class/cxi', ['*']),
    'rdma': ('/sys/class/infiniband', ['*/device/driver'] + ['*/ports/*/' + name for name in [
        'link_layer', 'rate', 'state'] + ['%s/%s' % (kind, index) for kind in (
            'gids', 'gid_attrs/types', 'gid_attrs/ndevs') for index in ('[0-9]', '1[0-5]')]]),
    'pci': ('/sys/bus/pci/devices', ['*/class', '*/vendor']),
}
RUNTIMES = ('apptainer', 'singularity', 'podman-hpc', 'podman', 'enroot', 'shifter', 'sarus', 'ch-run')
PROXIES = ('http_proxy', 'https_proxy', 'ftp_proxy', 'all_proxy', 'no_proxy')

# how administrators write types of GPUs
GPU_TYPES = (('rocm', r'mi\d|amd|radeon|gfx\d'),
             ('cuda', r'nvidia|tesla|quadro|titan|geforce|rtx|gtx|[avp]100|a800|[hb][1238]00|g[hb]\d00|[plt]4|a[1-6]0'
                      r'|a[2456]000|l40s?|[km][2468]0|\dg\.\d+gb'))
# lines that stand for a GPU in the output of a command
GPU_LINES = (('nvidia-smi', 'cuda', r'^GPU (\d+):'), ('rocm-smi', 'rocm', r'^GPU\[(\d+)\]'),
             ('amd-smi', 'rocm', r'^GPU: (\d+)'))
MPI = re.compile(r'(^|/)(open-?mpi|(cray-)?mpich|mvapich|impi|intel-?mpi|hpcx|psmpi|parastationmpi|(hpe-)?mpt)', re.I)
LOCAL = 'ext2 ext3 ext4 xfs btrfs zfs tmpfs'.split()
SYSTEM = re.compile(r'/$|/(proc|sys|dev|run|boot|etc|usr|s?bin|lib|lib64|root|snap|tmp/.*|var(?!/(tmp|scratch)))(/|$)')
VIRTUAL = re.compile(r'lo$|docker|virbr|veth|vnet|br-|cni|cali|flannel|tun|tap|ifb|dummy|kube|podman|lxc|idrac|usb')

Text = namedtuple('Text', ['text', 'problem'])
Place = namedtuple('Place', ['host', 'kind', 'cluster'])        # kind: login node, compute node, machine
Interface = namedtuple('Interface', ['name', 'speed'])
Port = namedtuple('Port', ['device', 'number', 'kind', 'rate', 'gids', 'interfaces'])

NCCL_GUIDE = "NVIDIA NCCL user guide, environment variables"
UNSEEN = '#   not seen: '


class SiteFileError(RuntimeError):
    """What a person must decide or fix; the message says how."""


# ----------------------------------------------------------------------------------------------------------------------
# gathering

def run(command, environ, limit):
    """What a command prints, as Text: one that is not there, fails or hangs is a problem, and no error."""
    name = 'module' if command[0] == 'bash' else command[0]
    path = environ.get('PATH', os.defpath) + ':/usr/sbin:/sbin:/opt/rocm/bin'
    try:
        # env, since the path is for the search of the command too
        process = subprocess.Popen(['/usr/bin/env', '-u', 'LANGUAGE', 'LC_ALL=C', 'PATH=' + path, *command],
                                   env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, start_new_session=True)
        out, err = [stream.decode(errors='replace') for stream in process.communicate(timeout=limit)]
    except OSError as err:
        return Text('', "%s cannot be run: %s" % (name, err.strerror))
    except subprocess.TimeoutExpired:
        try:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=1)
        except (OSError, subprocess.TimeoutExpired):
            pass    # it waits for a file server, and cannot be killed
        return Text('', "%s did not answer within %g s" % (name, limit))
    if process.returncode == 127:
        return Text('', "there is no command %s here" % name)
    if process.returncode:
        said = one_line((err or out).strip().rpartition('\n')[2])
        return Text('', "%s ended with status %d%s" % (name, process.returncode, said and ': ' + said))
    return Text(out, None if out.strip() else "%s printed nothing" % name)


def tree(top, patterns):
    """Small files and links below a directory, as lines 'path: content', like those of grep."""
    lines = []
    for path in sorted(path for pattern in patterns for path in glob.glob(os.path.join(glob.escape(top), pattern))):
        try:
            if os.path.islink(path):
                content = os.path.basename(os.readlink(path))
            else:
                with open(path, errors='replace') as stream:
                    content = stream.read(200)
        except OSError:
            continue
        lines.append('%s: %s\n' % (os.path.relpath(path, top), one_line(content)))
    return Text(''.join(lines), None if lines else "there is nothing in %s" % top)


def gather(environ):
    """Look at this machine: {name of a probe: Text}. It takes as long as the slowest command, or the limit."""
    # a login shell knows the modules tool where this one does not
    modules = [['bash', '-c', code] for variable, code in MODULES if environ.get(variable)]
    commands = dict(COMMANDS, modules=(modules + [['bash', '-lc', 'module -t avail 2>&1']])[0])
    with concurrent.futures.ThreadPoolExecutor(len(commands)) as pool:
        results = {name: pool.submit(run, command, environ, LIMIT) for name, command in commands.items()}
        evidence = {name: tree(*arguments) for name, arguments in TREES.items()}
        evidence.update((name, result.result()) for name, result in results.items())
    with open('/proc/mounts', errors='replace') as stream:
        evidence['mounts'] = Text(stream.read(), None)
    evidence['runtimes'] = Text(' '.join(filter(shutil.which, RUNTIMES)), None)
    names = [name for proxy in PROXIES for name in (proxy, proxy.upper())] + ['TMPDIR']
    evidence['environment'] = Text(''.join('%s=%s\n' % (name, one_line(environ[name])) for name in names
                                           if environ.get(name)), None)
    return evidence


# ----------------------------------------------------------------------------------------------------------------------
# reading

def one_line(text):
    """A text without line ends and control characters."""
    return ' '.join(''.join(char if char.isprintable() else ' ' for char in text).split())


def find_scheduler(evidence, environ):
    """slurm, pbs or none. Slurm whose commands fail is still Slurm, but not one that is installed without a cluster."""
    if environ.get('SLURM_JOB_ID') or not re.search('there is no command|configuration source|slurm.conf.*No such file',
                                                    evidence['sinfo'].problem or ''):
        return 'slurm'
    return 'none' if evidence['pbs'].problem and not environ.get('PBS_JOBID') else 'pbs'


def find_place(evidence, environ, host):
    """Where this is, as a Place: a step of a job is on a compute node, a machine without scheduler is one itself."""
    match = re.search(r'^ClusterName\s*=\s*(\S+)', evidence['slurm'].text, re.M)
    cluster = environ.get('SLURM_CLUSTER_NAME') or (match.group(1) if match else '')
    node, kind = environ.get('SLURMD_NODENAME') or host, 'compute node'
    if not (environ.get('SLURMD_NODENAME') or environ.get('PBS_JOBID')):
        kind = 'machine' if find_scheduler(evidence, environ) == 'none' else 'login node'
    return Place(one_line(node), kind, one_line(cluster))


def read_gres(gres):
    """GPUs of a node by type, from sinfo's %G: 'gpu:mi250:8(S:0),nvme:1' is (('mi250', 8),)."""
    found = OrderedDict()
    for entry in re.sub(r'\([^)]*\)?', '', gres).split(','):
        match = re.match(r'gpu(?::([^:]*[^:\d][^:]*))?(?::(\d+))?$', entry.strip())
        if match and int(match.group(2) or 1):
            found[match.group(1) or ''] = found.get(match.group(1) or '', 0) + int(match.group(2) or 1)
    # slices of a GPU (MIG) do not count beside whole ones
    whole = [item for item in found.items() if not re.search(r'\dg\.\d+gb', item[0])]
    return tuple(whole or found.items())


def read_sinfo(text):
    """Partitions as sinfo has them: ({name: {GPUs of a node: number of nodes}}, name of the default one or None)."""
    partitions, default = OrderedDict(), None
    for fields in (line.split('|') for line in text.splitlines()):
        if len(fields) == 3 and fields[0].strip('* ') and fields[1].strip().isdigit() and fields[2].strip():
            name, gpus = one_line(fields[0]).rstrip('*'), read_gres(one_line(fields[2]))
            default = name if '*' in fields[0] else default
            nodes = partitions.setdefault(name, OrderedDict())
            nodes[gpus] = nodes.get(gpus, 0) + int(fields[1])
    return partitions, default


def choose_partition(partitions, default, wanted=None):
    """
    The partition that the file is for: the wanted one, the default one if it has GPUs, else that with most GPUs.

    :raises SiteFileError: if the wanted one does not exist
    """
    if wanted:
        if wanted not in partitions:
            raise SiteFileError("--partition names '%s', which sinfo does not show. It shows: %s"
                                % (one_line(wanted), ', '.join(partitions)))
        return wanted
    gpus = {name: sum(number * count for nodes, number in kinds.items() for _, count in nodes)
            for name, kinds in partitions.items()}
    most = max(gpus, key=gpus.get)
    return default if gpus.get(default) or default and not gpus[most] else most


def gpu_vendor(text):
    """cuda or rocm for a type of GPU; None if it does not say."""
    return next((vendor for vendor, pattern in GPU_TYPES
                 if re.search(r'(?<![a-z0-9])(%s)' % pattern, text.lower().replace('_', ' '))), None)


def gpu_words(gpus):
    """GPUs of a node in words: '8 GPUs (mi250)'."""
    return ' and '.join('%d GPUs%s' % (count, kind and ' (%s)' % kind) for kind, count in gpus) or 'no GPUs'


def node_gpus(evidence):
    """GPUs that this node itself shows: (vendor, number, where it is seen), or None."""
    for name, vendor, pattern in GPU_LINES:
        numbers = set(re.findall(pattern, evidence[name].text, re.M))
        if numbers:
            return vendor, len(numbers), name
    devices = [machine.gpu_vendor(keys.get('class'), keys.get('vendor'))
               for keys in read_tree(evidence['pci'].text).values()]
    vendor = min(filter(None, devices), default=None)
    return (vendor, devices.count(vendor), '/sys/bus/pci') if vendor else None


def read_tree(text):
    """Lines of tree(): {first directory: {rest of the path: content}}."""
    res = OrderedDict()
    for path, _, content in (line.partition(': ') for line in text.splitlines()):
        top, _, rest = path.partition('/')
        res.setdefault(one_line(top), {})[rest] = one_line(content)
    return res


def read_json(text):
    """The dictionaries that 'ip -j' prints; none if the text is cut off, or something else."""
    try:
        data = json.loads(text)
    except ValueError:
        return []
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


def read_interfaces(net, addresses):
    """Network interfaces that are up and have an IPv4 address, with their speed in Gb/s (0: unknown)."""
    addressed = {entry.get('ifname') for entry in read_json(addresses) for info in entry.get('addr_info') or []
                 if info.get('family') == 'inet' and info.get('scope') == 'global'}
    return [Interface(name, int(keys['speed']) / 1000 if keys.get('speed', '').isdigit() else 0)
            for name, keys in read_tree(net).items()
            if name in addressed and not VIRTUAL.match(name) and keys.get('operstate') in ('up', 'unknown')]


def read_rdma(text):
    """RDMA ports that are up, as Port; their kind is InfiniBand, RoCE, Omni-Path, EFA or what the link layer says."""
    res = []
    for device, keys in read_tree(text).items():
        for number in sorted(path.split('/')[1] for path in keys if re.match(r'ports/\d+/state$', path)):
            port = {path.partition('/')[2].partition('/')[2]: value for path, value in keys.items()
                    if path.startswith('ports/%s/' % number)}
            if 'ACTIVE' not in port['state'] or device.startswith(('rxe', 'siw')):      # RDMA in software
                continue
            types = {path.rpartition('/')[2]: value for path, value in port.items()
                     if path.startswith('gid_attrs/types/')}
            gids = {int(index) for index, kind in types.items() if kind == 'RoCE v2'
                    and port.get('gids/' + index, '').startswith('0000:0000:0000:0000:0000:ffff:')}
            kind = port.get('link_layer', '')
            if device.startswith('hfi1'):
                kind = 'Omni-Path'      # which says InfiniBand
            elif device.startswith('efa') or keys.get('device/driver') == 'efa':
                kind = 'EFA'
            elif kind == 'Ethernet' and any('RoCE' in name for name in types.values()):
                kind = 'RoCE'
            rate = re.match(r'\d+(\.\d+)?', port.get('rate', ''))
            res.append(Port(device, number, kind, float(rate.group()) if rate else 0, gids,
                            {name for path, name in port.items() if path.startswith('gid_attrs/ndevs/')}))
    return res


def read_providers(text):
    """Providers of libfabric with their domains: {provider: [domain]}."""
    res, domains = OrderedDict(), []
    for key, _, value in (one_line(line).partition(': ') for line in text.splitlines()):
        if key == 'provider':
            domains = res.setdefault(value.partition(';')[0], [])
        elif key == 'domain' and value not in domains:
            domains.append(value)
    return res


def read_modules(text):
    """Names of modules in what 'module -t avail' prints."""
    names = [re.sub(r'[(<].*', '', one_line(line)).strip() for line in text.splitlines()]
    return [name for name in names if name and not name.endswith((':', '/')) and ' ' not in name]


# ----------------------------------------------------------------------------------------------------------------------
# deciding

class Draft:
    """
    What a person would write who had seen this.

    :ivar sections: {name: {key: value}} as in the file, [site] first
    :ivar seen: {what: words}
    :ivar unseen: {what: why it could not be seen}

    :param evidence: {name of a probe: Text}, as gather() returns it
    :param partition: name of the partition that the file is for, instead of the one that is chosen
    :param known: name of a site that this machine is already
    """

    def __init__(self, name, evidence, environ, place, partition=None, known=None):
        self.name, self.evidence, self.place, self.environ = name, evidence, place, environ
        self.sections, self.seen, self.unseen = OrderedDict(), OrderedDict(), OrderedDict()
        self.ports, self.gpus_of_job = [], 0
        self.in_job = place.kind != 'login node'
        self.here = 'on %s' % place.host
        self.site = self.add('site', title=place.cluster or name, centre='(write its name here)',
                             url='(write the address of its pages here)', scheduler=find_scheduler(evidence, environ))
        self.site['gpu'], self.site['gpus_per_node'] = self.gpus(partition)
        self.site['network'] = self.network()
        if self.site['network'] == 'slingshot11' and self.site['gpu'] in ('cuda', 'rocm'):
            self.site['include'] = 'slingshot11'
        self.site['source'] = "slingtorch site new, run %s, a %s" % (self.here, place.kind)
        self.detection(known)
        if self.in_job:
            self.interfaces()
            if self.site['gpu'] != 'none':
                self.adapters()
            self.temporary_files()
        self.file_systems()
        self.software()
        self.proxies()

    def add(self, section, **keys):
        """Add a section, with reason and source at its end. Its keys come back."""
        keys = OrderedDict((key.rstrip('_'), value) for key, value in keys.items())
        for key in [key for key in ('reason', 'source') if key in keys]:
            keys.move_to_end(key)
        self.sections[section] = keys
        return keys

    def gpus(self, wanted):
        """gpu and gpus_per_node of the site: what the scheduler gives to a job, else what this node has."""
        own = node_gpus(self.evidence) if self.in_job else None
        partitions, default = read_sinfo(self.evidence['sinfo'].text)
        slurm = self.site['scheduler'] == 'slurm'
        if not partitions and not (self.evidence['sinfo'].problem or '').startswith('there is no command'):
            self.unseen['partitions'] = self.evidence['sinfo'].problem or "sinfo says nothing that can be understood"
        if wanted and not partitions:
            raise SiteFileError("--partition names '%s', but %s"
                                % (one_line(wanted), self.unseen.get('partitions', "there is no Slurm here")))
        if slurm and partitions:
            of_job = self.environ.get('SLURM_JOB_PARTITION')
            chosen = choose_partition(partitions, default, wanted or (of_job if of_job in partitions else None))
            self.seen['partition'] = chosen
            self.seen['partitions'] = '; '.join('%s: %s' % (name, ', '.join(
                '%s on %d nodes' % (gpu_words(gpus), number) for gpus, number in kinds.items()))
                for name, kinds in partitions.items())
            kinds = {gpus: number for gpus, number in partitions[chosen].items() if gpus}
            gpus = max(kinds, key=kinds.get, default=())
            if len(kinds) > 1:
                self.unseen['one kind of node'] = ("nodes of partition %s differ, the file is for those with %s. For "
                                                   "another partition: --partition NAME" % (chosen, gpu_words(gpus)))
            vendor, by = gpu_vendor(' '.join(kind for kind, _ in gpus)), ''
            if own and not vendor:
                vendor, by = own[0], '; %s by %s' % (own[0], own[2])
            self.gpus_of_job = sum(count for _, count in gpus)
            if gpus and not vendor:
                self.unseen['GPUs'] = ("sinfo shows %s a node, and not whose they are: write gpu = cuda or rocm, and "
                                       "gpus_per_node = %d" % (gpu_words(gpus), self.gpus_of_job))
                return 'any', 'any'
            if gpus or not own:
                self.seen['GPUs'] = "%s a node; sinfo, partition %s%s" % (gpu_words(gpus), chosen, by)
                return (vendor, str(self.gpus_of_job)) if gpus else ('none', '0')
        if own:
            self.seen['GPUs'] = "%d GPUs (%s); %s" % (own[1], own[0], own[2])
            if self.site['scheduler'] != 'none':
                self.seen['GPUs'] += ", which shows what this job got: correct gpus_per_node if the nodes have more"
            return own[0], str(own[1])
        if not self.in_job:
            self.unseen['GPUs'] = "a login node does not show those of the compute nodes"
            return 'any', 'any'
        self.seen['GPUs'] = "no GPUs; neither nvidia-smi, rocm-smi, amd-smi nor /sys/bus/pci shows one"
        return 'none', '0'

    def network(self):
        """network of the site; keeps the RDMA ports of a compute node. A login node only shows its own."""
        ports = read_rdma(self.evidence['rdma'].text)
        providers = read_providers(self.evidence['fi_info'].text)
        cards = sorted(set(read_tree(self.evidence['cxi'].text)).union(providers.get('cxi', [])))
        if not ports and 'efa' in providers:
            ports = [Port(domain, '1', 'EFA', 0, set(), set()) for domain in providers['efa']]
        main = max(ports, key=lambda port: (port.rate, port.kind == 'InfiniBand'), default=None)
        if cards:
            network, words, ports = 'slingshot11', "Slingshot 11: %s" % ', '.join(cards), []
        elif main:
            network = {'InfiniBand': 'infiniband', 'Omni-Path': 'any'}.get(main.kind, 'ethernet')
            words = "%s: %s" % (main.kind, port_words(ports))
        else:
            network, words = 'ethernet', "Ethernet: no RDMA device is active"
        if not self.in_job:
            if re.search(r'^SwitchType\s*=\s*switch/hpe_slingshot', self.evidence['slurm'].text, re.M):
                self.seen['network'] = "Slingshot 11: SwitchType of Slurm is switch/hpe_slingshot"
                return 'slingshot11'
            self.unseen['network'] = ("a compute node shows it, with interfaces, adapters and storage: srun slingtorch "
                                      "site new --complete %s. This login node has %s" % (self.name, words))
            return 'any'
        self.ports = sorted(ports, key=lambda port: (port.kind, port.rate) != (main.kind, main.rate))
        self.seen['network'] = words
        if providers:
            self.seen['libfabric'] = ', '.join('%s (%s)' % (name, ' '.join(domains[:8]) + ' ...' * (len(domains) > 8))
                                               for name, domains in providers.items())
        else:
            self.unseen['libfabric'] = self.evidence['fi_info'].problem or "fi_info names no provider"
        return network

    def detection(self, known):
        """Rules by which the site is recognised, unless it is another one already: two that match are an error."""
        if known:
            self.unseen['rules'] = ("this machine is recognised as the site '%s' already. Use that, or name this one "
                                    "with 'slingtorch env --site'" % known)
            return
        if self.place.cluster:
            self.add('detect cluster', env='SLURM_CLUSTER_NAME=' + self.place.cluster,
                     source="ClusterName in Slurm's configuration; a job has the variable")
        if self.place.kind != 'compute node' and not self.place.host.startswith('localhost'):
            digits = '[0-9]*' if self.place.kind == 'login node' else r'\g<0>'
            self.add('detect host', hostname=re.sub(r'\d+', digits, re.sub(r'[^\w.-]', '?', self.place.host)),
                     source="the host name %s" % self.place.host)

    def interfaces(self):
        """The interface over which processes find each other, where there are several."""
        interfaces = read_interfaces(self.evidence['net'].text, self.evidence['addresses'].text)
        if interfaces:
            self.seen['interfaces'] = ', '.join(name + (' at %g Gb/s' % speed if speed else '')
                                                for name, speed in interfaces)
        else:
            self.unseen['interfaces'] = self.evidence['addresses'].problem or "none is up and has an address"
        names = [interface.name for interface in interfaces]
        fast = [item for item in interfaces if item.name.startswith(('hsn', 'ib'))]
        # slingshot11.inc names hsn
        if len(names) < 2 or fast and 'include' in self.site:
            return
        # adapters of GPUs need not reach each other (NCCL's rails): rather one without RoCE, or slower, as at clouds
        roce = [port for port in self.ports if self.ports[0].kind == port.kind == 'RoCE']
        rails = [port for port in roce if port.rate == roce[0].rate]
        pool = fast or next((pool for pool in [
            [item for item in interfaces if not any(item.name in port.interfaces for port in ports)]
            for ports in (roce, rails)] if pool), interfaces)
        routes = [entry.get('dev') for entry in read_json(self.evidence['routes'].text)]
        best = max(pool, key=lambda item: (item.speed, item.name in routes)).name
        why = "of %s it is " % ', '.join(names) + (
            "the one of the fast network" if fast else "the fastest" if len({item.speed for item in pool}) > 1 else
            "not of the RoCE adapters, which need not reach each other" if len(pool) < len(names) else
            "the one with the default route" if best in routes else "the first")
        why += ". It must have this name on every node"
        if self.site['gpu'] == 'none':
            self.add('env GLOO_SOCKET_IFNAME', value=best, source="/sys/class/net and ip address " + self.here,
                     reason="Gloo else takes the interface of the host name, maybe that for management; " + why)
        else:
            self.add('env NCCL_SOCKET_IFNAME', value='ib' if fast and best.startswith('ib') else '=' + best,
                     reason="the interface over which ranks find each other ('=': exactly this name); " + why,
                     source="/sys/class/net and ip address %s; %s" % (self.here, NCCL_GUIDE))

    def adapters(self):
        """Values for the RDMA adapters that NCCL or RCCL uses."""
        if self.site['gpu'] == 'rocm' and self.site['network'] == 'slingshot11':
            self.add('env HSA_FORCE_FINE_GRAIN_PCIE', value='1',
                     reason="RCCL needs fine-grained memory over PCIe for GPUDirect RDMA and warns without it",
                     source="olcf/olcf-user-docs software/analytics/pytorch_frontier.rst")
        if not self.ports:
            return
        main = self.ports[0]
        used = [port for port in self.ports if (port.kind, port.rate) == (main.kind, main.rate)]
        if main.kind in ('EFA', 'Omni-Path'):
            self.add('group ofi', title="NCCL over libfabric (%s)" % main.kind, source="aws/aws-ofi-nccl README",
                     needs="the plugin aws-ofi-nccl, which the job must find (docs/ofi-plugin.md)",
                     reason="without the plugin a job of several nodes would not start")
            self.add('env SLINGTORCH_MULTINODE_NCCL_NET in ofi', value='AWS Libfabric',
                     source="aws/aws-ofi-nccl README",
                     reason="a job of several nodes without the plugin fails, and does not run over TCP unnoticed")
        elif len(used) < len(self.ports):
            several = len({port.device for port in self.ports}) < len(self.ports)
            self.add('env NCCL_IB_HCA', value='=' + ','.join(
                port.device + (':' + port.number if several else '') for port in used),
                reason="the adapters of the fast network, out of %s. They must have these names on every node"
                % port_words(self.ports),
                source="/sys/class/infiniband %s; %s" % (self.here, NCCL_GUIDE))
        common = set.intersection(*[port.gids for port in used])
        if main.kind == 'RoCE' and not common:
            self.unseen['GID index'] = "no index has a RoCE v2 address with IPv4 on all of %s" % port_words(used)
        elif main.kind == 'RoCE':
            self.add('group roce', title="the address (GID) that RoCE uses, by its index",
                     needs="NCCL before 2.21: newer ones find the index themselves",
                     reason="a fixed index is in the way of a newer NCCL, as an adapter can number its addresses anew",
                     source=NCCL_GUIDE + ", NCCL_IB_GID_INDEX")
            self.add('env NCCL_IB_GID_INDEX in roce', value=str(min(common)),
                     source="/sys/class/infiniband " + self.here,
                     reason="the RoCE v2 address with IPv4 has this index on %s" % port_words(used))

    def temporary_files(self):
        """A directory for caches, where the usual one is on a shared file system."""
        mounts = machine.read_mounts(self.evidence['mounts'].text)
        match = re.search(r'^TMPDIR=(/.*)', self.evidence['environment'].text, re.M)
        top = match.group(1) if match else '/tmp'
        kind = machine.mount_of(top, mounts)[1]
        self.seen['temporary files'] = "%s, on %s" % (top, kind or 'an unknown file system')
        if kind not in machine.SHARED:
            return
        local = ['/tmp'] * (machine.mount_of('/tmp', mounts)[1] not in machine.SHARED) + [
            path for path, kind, options in mounts
            if kind in LOCAL and 'ro' not in options and (path == '/dev/shm' or not SYSTEM.match(path))]
        if local:
            self.add('env SLINGTORCH_CACHE_ROOT', value=local[0], source="/proc/mounts " + self.here,
                     reason="%s is shared (%s), which does not serve the caches of every rank" % (top, kind))
        else:
            self.unseen['storage of the node'] = "%s is shared (%s), and nothing else was seen" % (top, kind)

    def file_systems(self):
        """What containers must be given to see."""
        mounts = OrderedDict((path, kind) for path, kind, options in
                             machine.read_mounts(self.evidence['mounts'].text)
                             if not (kind in LOCAL and 'ro' in options))
        shared, local = [[path for path, kind in mounts.items() if kind in kinds and not SYSTEM.match(path)]
                         for kinds in (machine.SHARED, LOCAL)]
        for what, paths in (('shared file systems', shared), ('local file systems', local)):
            if paths:
                self.seen[what] = ', '.join('%s (%s)' % (path, mounts[path]) for path in paths)
        # the runtime takes a colon or a comma for a separator
        bound = [path for path in shared if not re.search(r'[:,%#;]', path) and path == one_line(path)]
        if not shared:
            self.unseen['shared file systems'] = "/proc/mounts has none"
        if bound:
            self.add('parameter bind_paths', values='\n    ' + '\n    '.join(bound), for_='Singularity',
                     reason="the shared file systems, which a container does not see by itself; a path that a node "
                            "does not have is left out there", source="/proc/mounts " + self.here)

    def software(self):
        """Container runtime and MPI modules: for the person, the site file has no place for them."""
        modules = read_modules(self.evidence['modules'].text)
        for what, found, problem in (
                ('container runtime', self.evidence['runtimes'].text.split(), "none of " + ', '.join(RUNTIMES)),
                ('MPI modules', list(filter(MPI.search, modules)),
                 self.evidence['modules'].problem or "none of %d modules looks like one" % len(modules))):
            if found:
                self.seen[what] = ', '.join(found[:12]) + ', ...' * (len(found) > 12)
            else:
                self.unseen[what] = problem

    def proxies(self):
        """The way out, on request."""
        proxies, left_out = OrderedDict(), []
        for variable, _, value in (line.partition('=') for line in self.evidence['environment'].text.splitlines()):
            # a file is shown to others; and Python's httpx refuses socks://
            if variable.lower() in PROXIES and (re.search(r'@|%\(', value) or value.startswith('socks://')):
                left_out.append(variable)
            elif variable.lower() in PROXIES:
                proxies.setdefault(variable.lower(), value)
        if left_out:
            self.unseen['proxy'] = "%s is left out: with a password, or of a form that is refused" % ', '.join(left_out)
        if set(proxies) - {'no_proxy'}:
            source = "the environment " + self.here
            self.add('group proxy', title="the way out through the proxy of this site", source=source,
                     needs="a job that downloads something, on nodes that reach the proxy",
                     reason="a job that downloads nothing should not depend on it")
            for variable, value in proxies.items():
                self.add('env %s in proxy' % variable, value=value, source=source,
                         reason="as on this " + self.place.kind)


def port_words(ports):
    """RDMA ports in words, those of one kind and rate together."""
    groups = OrderedDict()
    for port in ports:
        groups.setdefault(port.kind + (' at %g Gb/s' % port.rate if port.rate else ''), []).append(port.device)
    return '; '.join('%s (%s)' % (' '.join(devices), words) for words, devices in groups.items())


# ----------------------------------------------------------------------------------------------------------------------
# writing

def remarks(draft):
    """Comment lines of what was seen and what was not."""
    return (['#   %s: %s\n' % (what, one_line(words)) for what, words in draft.seen.items()]
            + [UNSEEN + '%s: %s\n' % (what, one_line(why)) for what, why in draft.unseen.items()])


def section_text(name, keys):
    """The text of a section, after an empty line."""
    return '\n[%s]\n' % name + ''.join('%s =%s\n' % (key, value if key == 'values' else ' ' + one_line(value))
                                       for key, value in keys.items())


def compose(name, draft):
    """The text of a new site file."""
    lines = ["# Site %s, written by 'slingtorch site new' %s, a %s. Edit it as you like; docs/sites.md of slingtorch\n"
             "# describes the form, and 'slingtorch sites %s' checks and shows it.\n"
             % (name, draft.here, draft.place.kind, name), "#\n# Seen here:\n"] + remarks(draft)
    return ''.join(lines) + ''.join(section_text(*item) for item in draft.sections.items())


def merge(text, sections, draft):
    """
    Add to the text of a site file what it does not say; what it says stays.

    :param sections: the file's, as read_sections of slingshot_sites returns them
    :return: (new text, [what was added], [where file and node differ])
    """
    added, kept = [], []
    old = sections['site', None, None]
    for keys in (('gpu', 'gpus_per_node'), ('network', 'network')):
        for key in dict.fromkeys(keys):
            new = draft.site[key]
            if new != 'any' and old[keys[0]] == old[keys[1]] == 'any':
                text = re.sub(r'(?m)^(\s*%s\s*=\s*)any\s*?$' % key, r'\g<1>' + new, text, 1)
                added.append('%s = %s' % (key, new))
            # a job may have got fewer GPUs than the node has: then only what sinfo says counts
            elif new not in ('any', old[key]) and (key != 'gpus_per_node' or draft.gpus_of_job):
                kept.append('%s = %s; this node says %s' % (key, old[key], new))
    if 'include' in draft.site and 'include' not in old and not kept:
        text = re.sub(r'(?m)^(\s*network\s*=.*\n)', r'\g<1>include = %s\n' % draft.site['include'], text, 1)
        added.append('include = ' + draft.site['include'])
    more = ''
    for name, keys in draft.sections.items():
        match = re.match(r'(\S+) (\S+)(?: in (\S+))?$', name)
        there = sections.get(match.groups()) if match else keys
        if there is None and not name.startswith('detect'):
            more += section_text(name, keys)
            added.append('[%s]' % name)
        elif there and there.get('value') and there['value'] != keys.get('value'):
            kept.append('[%s] value = %s; this node says %s' % (name, there['value'], keys['value']))
    if added:
        # what is seen now is missing no longer
        lines = [line for line in text.rstrip('\n').splitlines(True)
                 if not (line.startswith(UNSEEN) and line[len(UNSEEN):].partition(':')[0] in draft.seen)]
        more = "\n\n# Added %s, a %s, where was seen:\n%s%s" % (
            draft.here, draft.place.kind, ''.join(line for line in remarks(draft) if line not in lines), more)
        text = ''.join(lines) + more
    return text, added, kept


def check_name(sites, name, environ):
    """Raise a SiteFileError if a site cannot have this name, or another one has it."""
    if not re.match(r'[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z', name) or (name + sites.SITE).endswith(sites.METADATA):
        raise SiteFileError("A site cannot be called '%s': use up to 64 letters, digits, '_', '.' and '-', and begin "
                            "with a letter or digit." % one_line(name))
    path = sites.find_files(sites.SITE, environ).get(name)
    if path and os.path.dirname(path) != sites.user_directory(environ):
        raise SiteFileError("There is a site '%s' already, %s: choose another name, or look at it: slingtorch sites %s"
                            % (name, path, name))


def own_directory(sites, environ):
    """The user's own directory with sites, made if it is not there."""
    path = sites.user_directory(environ)
    if not path:
        raise SiteFileError("There is no home directory to write to: set XDG_CONFIG_HOME to a directory of yours, here "
                            "and where you use the site.")
    try:
        os.makedirs(os.path.dirname(os.path.dirname(path)), exist_ok=True)
        for directory in (os.path.dirname(path), path):
            if not os.path.isdir(directory):
                os.mkdir(directory, 0o700)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as err:
        raise SiteFileError("Your sites belong in %s, which cannot be written to (%s). Make it writable, or set "
                            "XDG_CONFIG_HOME to a directory of yours, here and where you use the site."
                            % (path, err.strerror))
    sites.directories(environ)      # refuses one that others may write to
    return path


def write(sites, path, text, environ, replace=False):
    """
    Write a site file that the bundle's own reader accepts.

    :param replace: whether it takes the place of the one that is there; else that one stays, and this is beside it
    :return: path of the file
    """
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix='.', suffix='.tmp')
        with os.fdopen(handle, 'w', encoding='utf-8') as stream:
            stream.write(text)
        sites.read_site(os.path.basename(path)[:-len(sites.SITE)], temporary, environ)
        os.chmod(temporary, 0o644)
        target, number = path, 0
        while not replace and os.path.lexists(target):
            if read_text(target) == text:
                return target
            number += 1
            target = '%s.new%s' % (path, number if number > 1 else '')
        os.replace(temporary, os.path.realpath(target))
        return target
    except OSError as err:
        raise SiteFileError("%s could not be written: %s" % (path, err.strerror))
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def read_text(path):
    """The text of a site file, whatever is in it."""
    with open(path, encoding='utf-8', errors='replace') as stream:
        return stream.read()


def run_new(args, sites, environ=None, evidence=None, host=None):
    """
    slingtorch site new

    :param sites: the module slingshot_sites
    :param evidence: recorded texts instead of those of this machine
    """
    environ, host, name = dict(os.environ if environ is None else environ), host or socket.gethostname(), args.name
    check_name(sites, name, environ)
    if environ.get('SLURM_PROCID', '0') != '0':
        return 0    # the first task of a step does it
    path = os.path.join(own_directory(sites, environ), name + sites.SITE)
    old = read_text(path) if os.path.exists(path) else None
    if old is None and args.complete:
        raise SiteFileError("There is no file %s to complete. Write it on the login node first: slingtorch site new %s"
                            % (path, name))
    if evidence is None:
        print("Looking at this machine, for %d s at most." % LIMIT, flush=True)
        evidence = gather(environ)
    place = find_place(evidence, environ, host)
    if args.complete and not (environ.get('SLURMD_NODENAME') or environ.get('PBS_JOBID') or place.kind == 'machine'):
        raise SiteFileError("This is a login node: what is missing in %s is seen on a compute node. Run it there: srun "
                            "slingtorch site new --complete %s" % (path, name))
    in_a_job = dict(environ, SLURM_CLUSTER_NAME=place.cluster) if place.cluster else environ
    known = [site.name for site, _ in sites.detected_sites(in_a_job, host) if site.name != name]
    draft = Draft(name, evidence, environ, place, args.partition, known[0] if known else None)
    print("This is %s, a %s.\n%s" % (place.host, place.kind, ''.join(line[1:] for line in remarks(draft))), end='')

    if args.complete:
        text, added, kept = merge(old, sites.read_sections(path), draft)
        if added:
            write(sites, path, text, environ, replace=True)
        print("Added to %s: %s" % (path, ', '.join(added)) if added else "%s says all of it already." % path)
        print(''.join("Kept as it is in the file: %s\n" % line for line in kept), end='')
    else:
        text = compose(name, draft)
        if text == old:
            print("%s says the same already." % path)
        else:
            written = write(sites, path, text, environ)
            if written != path:
                print(''.join(difflib.unified_diff(old.splitlines(True), text.splitlines(True), path, written, n=1)))
                print("The file that was there stays. The new one is %s: take from it what you want." % written)
            else:
                print("Written: %s" % written)
    # outside an activated environment the shell does not find it
    program = 'slingtorch' if shutil.which('slingtorch') else shlex.quote(os.path.abspath(sys.argv[0]))
    if not draft.in_job:
        command = 'srun --nodes=1 --ntasks=1' if draft.site['scheduler'] == 'slurm' else 'in a job:'
        command += ' --partition=' + draft.seen['partition'] if 'partition' in draft.seen else ''
        command += ' --gres=gpu:%d' % draft.gpus_of_job if draft.gpus_of_job else ''
        print("Now add what only a compute node shows:\n  %s %s site new --complete %s" % (command, program, name))
    print("Look at it, and use it:\n  %s sites %s\n  eval \"$(%s env --site %s)\"" % (program, name, program, name))
    return 0
