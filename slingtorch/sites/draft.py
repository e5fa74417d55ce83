# SPDX-License-Identifier: GPL-2.0-only
"""What 'slingtorch site new' writes into a site file: a Draft derives it from evidence about a machine."""
import re
from typing import Dict, Mapping, Optional, Tuple

from slingtorch.job import machine
from slingtorch.sites import probe
from slingtorch.sites.probe import Gpus, Loaded, Partitions, Place, Text, one_line

# easyconfigs of the bundle that --robot installs if a machine has no module for the role
PLUGIN, CONDA_PYTHON = 'aws-ofi-nccl/1.21.1', 'CondaPython/3.12'
NCCL_GUIDE = "NVIDIA NCCL user guide, environment variables"


def choose_partition(partitions: Partitions, default: Optional[str]) -> str:
    """The partition to describe: the default one if it has GPUs, else the one with the most GPUs."""
    gpus = {name: sum(number * count for nodes, number in kinds.items() for _, count in nodes)
            for name, kinds in partitions.items()}
    most = max(gpus, key=lambda name: gpus[name])
    return default if default and (gpus.get(default) or not gpus[most]) else most


def gpu_words(gpus: Gpus) -> str:
    """A node's GPUs as a text: '8 GPUs (mi250)'."""
    return ' and '.join('%d GPUs%s' % (count, kind and ' (%s)' % kind) for kind, count in gpus) or 'no GPUs'


class Draft:
    """
    A draft of the site file from this evidence.

    :ivar sections: {name: {key: value}} as in the file, [site] first
    :ivar seen: {what: text about it}
    :ivar unseen: {what: why it could not be detected}

    :param evidence: {name of a probe: Text}, as gather() returns it
    :param known: name of another site that matches this machine
    :param loads: what load_modules() returned
    """

    def __init__(self, name: str, evidence: Dict[str, Text], environ: Mapping[str, str], place: Place,
                 known: Optional[str] = None, loads: Mapping[str, Loaded] = {}) -> None:
        self.name, self.evidence, self.place, self.environ = name, evidence, place, environ
        self.loads = loads
        self.text = {probe: found.text for probe, found in evidence.items()}
        self.sections: Dict[str, Dict[str, str]] = {}
        self.seen: Dict[str, str] = {}
        self.unseen: Dict[str, str] = {}
        self.gpus_of_job = 0
        self.in_job = place.kind != 'login node'
        self.here = 'on %s' % place.host
        self.site = self.add('site', title=place.cluster or name, centre='(write its name here)',
                             url='(write the address of its pages here)',
                             scheduler=probe.find_scheduler(evidence, environ))
        self.site['gpu'], self.site['gpus_per_node'] = self.gpus()
        self.site['network'] = self.network()
        if self.site['network'] == 'slingshot11' and self.site['gpu'] in ('cuda', 'rocm'):
            self.site['include'] = 'slingshot11'
        self.site['source'] = "slingtorch site new, run %s, a %s" % (self.here, place.kind)
        self.detection(known)
        if self.in_job:
            self.interfaces()
            if self.site['gpu'] == 'rocm' and self.site['network'] == 'slingshot11':
                self.add('env HSA_FORCE_FINE_GRAIN_PCIE', value='1',
                         reason="RCCL needs fine-grained memory over PCIe for GPUDirect RDMA and warns without it",
                         source="olcf/olcf-user-docs software/analytics/pytorch_frontier.rst")
        self.file_systems()
        self.provides()

    def add(self, section: str, **keys: str) -> Dict[str, str]:
        """Add a section, with reason and source at its end; return its keys."""
        order = {'reason': 1, 'source': 2}
        self.sections[section] = {key.rstrip('_'): keys[key] for key in sorted(keys, key=lambda key: order.get(key, 0))}
        return self.sections[section]

    def note(self, what: str, words: str, why_not: str) -> None:
        """Record what was seen, or why it was not."""
        (self.seen if words else self.unseen)[what] = words or why_not

    def gpus(self) -> Tuple[str, str]:
        """gpu and gpus_per_node of the site: the GPUs that the scheduler gives to a job, else those of this node."""
        own = probe.node_gpus(self.evidence) if self.in_job else None
        partitions, default = probe.read_sinfo(self.text['sinfo'])
        if not partitions and not (self.evidence['sinfo'].problem or '').startswith('there is no command'):
            self.unseen['partitions'] = self.evidence['sinfo'].problem or "the output of sinfo has an unknown form"
        if partitions and self.site['scheduler'] == 'slurm':
            of_job = self.environ.get('SLURM_JOB_PARTITION')
            chosen = of_job if of_job in partitions else choose_partition(partitions, default)
            self.seen['partition'] = chosen
            kinds = {gpus: number for gpus, number in partitions[chosen].items() if gpus}
            gpus = max(kinds, key=lambda gpus: kinds[gpus], default=())
            vendor = probe.gpu_vendor(' '.join(kind for kind, _ in gpus)) or (own[0] if own else '')
            self.gpus_of_job = sum(count for _, count in gpus)
            if gpus and not vendor:
                self.unseen['GPUs'] = ("sinfo shows %s per node, but not the vendor: write gpu = cuda or rocm, and "
                                       "gpus_per_node = %d" % (gpu_words(gpus), self.gpus_of_job))
                return 'any', 'any'
            if gpus or not own:
                self.seen['GPUs'] = "%s per node; sinfo, partition %s" % (gpu_words(gpus), chosen)
                return (vendor, str(self.gpus_of_job)) if gpus else ('none', '0')
        if own:
            self.seen['GPUs'] = "%d GPUs (%s); %s" % (own[1], own[0], own[2])
            if self.site['scheduler'] != 'none':
                self.seen['GPUs'] += " (only this job's GPUs: correct gpus_per_node if the nodes have more)"
            return own[0], str(own[1])
        if not self.in_job:
            self.unseen['GPUs'] = "a login node does not show the GPUs of compute nodes"
            return 'any', 'any'
        self.seen['GPUs'] = "no GPUs: neither nvidia-smi nor rocm-smi shows one"
        return 'none', '0'

    def network(self) -> str:
        """The network of the compute nodes. A login node may have another one, but Slurm's settings may name it."""
        providers = probe.read_providers(self.text['fi_info'])
        cards = sorted(set(probe.read_tree(self.text['cxi'])).union(providers.get('cxi', [])))
        fabric = probe.infiniband(self.text['rdma'])
        network, words = (('slingshot11', "Slingshot 11: %s" % ', '.join(cards)) if cards else
                          ('infiniband', "InfiniBand: %s" % ' '.join(fabric)) if fabric else
                          ('ethernet', "Ethernet: neither Slingshot nor InfiniBand is active"))
        if self.in_job:
            self.seen['network'] = words
            return network
        if re.search(r'^SwitchType\s*=\s*switch/hpe_slingshot', self.text['slurm'], re.M):
            self.seen['network'] = "Slingshot 11: SwitchType of Slurm is switch/hpe_slingshot"
            return 'slingshot11'
        self.unseen['network'] = ("run this on a compute node, which also shows interfaces and storage: %s slingtorch "
                                  "site new --complete %s. This login node has %s"
                                  % (probe.LAUNCHERS[self.site['scheduler']], self.name, words))
        return 'any'

    def detection(self, known: Optional[str]) -> None:
        """Rules that detect the site, unless another site already matches: two matching sites are an error."""
        if known:
            self.unseen['rules'] = ("this machine already matches the site '%s'. Use that one, or select this one with "
                                    "'slingtorch env --site'" % known)
            return
        if self.place.cluster:
            self.add('detect cluster', env='SLURM_CLUSTER_NAME=' + self.place.cluster,
                     source="ClusterName in Slurm's configuration; a job has the variable")
        if self.place.kind != 'compute node' and not self.place.host.startswith('localhost'):
            digits = '[0-9]*' if self.place.kind == 'login node' else r'\g<0>'
            self.add('detect host', hostname=re.sub(r'\d+', digits, re.sub(r'[^\w.-]', '?', self.place.host)),
                     source="the host name %s" % self.place.host)

    def interfaces(self) -> None:
        """The interface through which processes find each other, if there are several."""
        speeds = probe.read_interfaces(self.text['net'], self.text['addresses'])
        names = list(speeds)
        self.note('interfaces', ', '.join(names), self.evidence['addresses'].problem or "none is up with an address")
        fast = [name for name in names if name.startswith(('hsn', 'ib'))]
        # slingshot11.inc names hsn
        if len(names) < 2 or fast and 'include' in self.site:
            return
        best = max(fast or names, key=lambda name: speeds[name])
        why = "out of %s. The interface must have this name on every node" % ', '.join(names)
        source = "/sys/class/net and ip address " + self.here
        # needed also with NCCL: programs with GPUs use Gloo for checkpoints and barriers
        self.add('env GLOO_SOCKET_IFNAME', value=best, source=source,
                 reason="otherwise Gloo uses the interface of the host name, which may be for management; " + why)
        if self.site['gpu'] != 'none':
            self.add('env NCCL_SOCKET_IFNAME', value='ib' if fast and best.startswith('ib') else '=' + best,
                     reason="the interface through which ranks find each other ('=': exactly this name), chosen " + why,
                     source="%s; %s" % (source, NCCL_GUIDE))

    def file_systems(self) -> None:
        """Shared file systems that containers must bind."""
        found = {path: kind for path, kind, _ in machine.read_mounts(self.text['mounts']) if kind in machine.SHARED}
        self.note('shared file systems', ', '.join('%s (%s)' % item for item in found.items()), "/proc/mounts has none")
        # the container runtime splits at colons and commas
        bound = [path for path in found if path != '/' and not re.search(r'[:,%#;]', path) and path == one_line(path)]
        if bound:
            self.add('parameter bind_paths', values='\n    ' + '\n    '.join(bound), for_='Singularity',
                     reason="the shared file systems, which a container does not see by itself; nodes skip paths that "
                            "they do not have", source="/proc/mounts " + self.here)

    def provides(self) -> None:
        """The machine's modules by role: those that can be loaded, and what --robot installs for missing ones."""
        gpu, network = self.site['gpu'], self.site['network']
        if network == 'any':
            self.unseen['modules by role'] = "the network decides which are needed, and only a compute node shows it"
            return
        roles: Dict[str, str] = {}
        for role, found in self.loads.items():
            name = 'gpu' if role == gpu else role
            if role in {'cuda', 'rocm'} - {gpu} or gpu == 'none' and role in ('nccl', 'nccl_plugin'):
                continue
            if found.problem:
                self.unseen[name] = '%s: %s' % (found.module, found.problem)
                continue
            # Cray's compilers and conda are needed only for building
            build = 'build ' * (role == 'conda' or found.module.startswith('PrgEnv-'))
            roles[name] = build + found.module + (' in ' + found.prefix if found.prefix and not build else '')
            self.seen[name] = '%s: %s' % (found.module, found.why)
        if 'python' not in roles and 'conda' in roles:
            roles['python'] = 'build eb ' + CONDA_PYTHON
            self.seen['python'] = "installed by conda, because there is no module of Python %d.%d or newer" % (
                probe.OLDEST_PYTHON)
        if gpu == 'rocm' and 'gpu' in roles:
            roles['nccl'] = 'gpu'
        needed = ['gpu'] if gpu in ('cuda', 'rocm') else []
        if needed and network == 'slingshot11' and 'nccl_plugin' not in roles:
            roles['nccl_plugin'] = 'eb ' + PLUGIN
            self.seen['nccl_plugin'] = "there is no module; --robot builds this bundle's plugin for this libfabric"
            needed.append('libfabric')
        for role in [role for role in needed if role not in roles]:
            self.unseen.setdefault(role, "no module was found: add the line '%s = MODULE/VERSION' to the section "
                                         "[provides ...]" % role)
        if roles:
            version = self.loads[gpu].module.rpartition('/')[2] if 'gpu' in roles else ''
            self.add('provides ' + (re.sub(r'[^\w.-]', '_', '%s-%s' % (gpu, version)) if version else 'modules'),
                     source="module avail, and what the modules set when loaded, " + self.here, **roles)
