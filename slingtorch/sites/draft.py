# SPDX-License-Identifier: GPL-2.0-only
"""What 'slingtorch site new' writes into a site file: a Draft decides it from what was seen of a machine."""
import re
from typing import Dict, Mapping, Optional, Tuple

from slingtorch.job import machine
from slingtorch.sites import probe
from slingtorch.sites.probe import Gpus, Loaded, Partitions, Place, Text, one_line

# what --robot installs where a machine has no module of it: easyconfigs of the bundle
PLUGIN, CONDA_PYTHON = 'aws-ofi-nccl/1.21.1', 'CondaPython/3.12'
NCCL_GUIDE = "NVIDIA NCCL user guide, environment variables"


def choose_partition(partitions: Partitions, default: Optional[str]) -> str:
    """The partition that the file is for: the default one if it has GPUs, else that with most GPUs."""
    gpus = {name: sum(number * count for nodes, number in kinds.items() for _, count in nodes)
            for name, kinds in partitions.items()}
    most = max(gpus, key=lambda name: gpus[name])
    return default if default and (gpus.get(default) or not gpus[most]) else most


def gpu_words(gpus: Gpus) -> str:
    """GPUs of a node in words: '8 GPUs (mi250)'."""
    return ' and '.join('%d GPUs%s' % (count, kind and ' (%s)' % kind) for kind, count in gpus) or 'no GPUs'


class Draft:
    """
    What a person would write who had seen this.

    :ivar sections: {name: {key: value}} as in the file, [site] first
    :ivar seen: {what: words}
    :ivar unseen: {what: why it could not be seen}

    :param evidence: {name of a probe: Text}, as gather() returns it
    :param known: name of a site that this machine is already
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
        """Add a section, with reason and source at its end. Its keys come back."""
        order = {'reason': 1, 'source': 2}
        self.sections[section] = {key.rstrip('_'): keys[key] for key in sorted(keys, key=lambda key: order.get(key, 0))}
        return self.sections[section]

    def note(self, what: str, words: str, why_not: str) -> None:
        """Remember what was seen, else why it was not."""
        (self.seen if words else self.unseen)[what] = words or why_not

    def gpus(self) -> Tuple[str, str]:
        """gpu and gpus_per_node of the site: what the scheduler gives to a job, else what this node has."""
        own = probe.node_gpus(self.evidence) if self.in_job else None
        partitions, default = probe.read_sinfo(self.text['sinfo'])
        slurm = self.site['scheduler'] == 'slurm'
        if not partitions and not (self.evidence['sinfo'].problem or '').startswith('there is no command'):
            self.unseen['partitions'] = self.evidence['sinfo'].problem or "sinfo says nothing that can be understood"
        if slurm and partitions:
            of_job = self.environ.get('SLURM_JOB_PARTITION')
            chosen = of_job if of_job in partitions else choose_partition(partitions, default)
            self.seen['partition'] = chosen
            self.seen['partitions'] = '; '.join('%s: %s' % (name, ', '.join(
                '%s on %d nodes' % (gpu_words(gpus), number) for gpus, number in kinds.items()))
                for name, kinds in partitions.items())
            kinds = {gpus: number for gpus, number in partitions[chosen].items() if gpus}
            gpus = max(kinds, key=lambda gpus: kinds[gpus], default=())
            if len(kinds) > 1:
                self.unseen['one kind of node'] = ("nodes of partition %s differ, the file is for those with %s"
                                                   % (chosen, gpu_words(gpus)))
            vendor, by = probe.gpu_vendor(' '.join(kind for kind, _ in gpus)), ''
            if own and not vendor:
                vendor, by = own[0], '; %s by %s' % (own[0], own[2])
            self.gpus_of_job = sum(count for _, count in gpus)
            if gpus and not vendor:
                self.unseen['GPUs'] = ("sinfo shows %s a node, and not whose they are: write gpu = cuda or rocm, and "
                                       "gpus_per_node = %d" % (gpu_words(gpus), self.gpus_of_job))
                return 'any', 'any'
            if gpus or not own:
                self.seen['GPUs'] = "%s a node; sinfo, partition %s%s" % (gpu_words(gpus), chosen, by)
                return (vendor or '', str(self.gpus_of_job)) if gpus else ('none', '0')
        if own:
            self.seen['GPUs'] = "%d GPUs (%s); %s" % (own[1], own[0], own[2])
            if self.site['scheduler'] != 'none':
                self.seen['GPUs'] += ", which shows what this job got: correct gpus_per_node if the nodes have more"
            return own[0], str(own[1])
        if not self.in_job:
            self.unseen['GPUs'] = "a login node does not show those of the compute nodes"
            return 'any', 'any'
        self.seen['GPUs'] = "no GPUs; neither nvidia-smi, rocm-smi nor /sys/bus/pci shows one"
        return 'none', '0'

    def network(self) -> str:
        """The network of the compute nodes; a login node may have another one, unless Slurm says what it is."""
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
        self.unseen['network'] = ("a compute node shows it, with interfaces and storage: %s slingtorch site new "
                                  "--complete %s. This login node has %s"
                                  % (probe.LAUNCHERS[self.site['scheduler']], self.name, words))
        return 'any'

    def detection(self, known: Optional[str]) -> None:
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

    def interfaces(self) -> None:
        """The interface over which processes find each other, where there are several."""
        speeds = probe.read_interfaces(self.text['net'], self.text['addresses'])
        names = list(speeds)
        self.note('interfaces', ', '.join(names), self.evidence['addresses'].problem or "none is up and has an address")
        fast = [name for name in names if name.startswith(('hsn', 'ib'))]
        # slingshot11.inc names hsn
        if len(names) < 2 or fast and 'include' in self.site:
            return
        best = max(fast or names, key=lambda name: speeds[name])
        why = "of %s it is %s. It must have this name on every node" % (
            ', '.join(names), "the one of the fast network" if fast else
            "the fastest" if len(set(speeds.values())) > 1 else "the first")
        source = "/sys/class/net and ip address " + self.here
        # also beside NCCL: checkpoints and barriers of programs with GPUs use it
        self.add('env GLOO_SOCKET_IFNAME', value=best, source=source,
                 reason="Gloo else takes the interface of the host name, maybe that for management; " + why)
        if self.site['gpu'] != 'none':
            self.add('env NCCL_SOCKET_IFNAME', value='ib' if fast and best.startswith('ib') else '=' + best,
                     reason="the interface over which ranks find each other ('=': exactly this name); " + why,
                     source="%s; %s" % (source, NCCL_GUIDE))

    def file_systems(self) -> None:
        """Shared file systems, which containers must bind."""
        found = {path: kind for path, kind, _ in machine.read_mounts(self.text['mounts']) if kind in machine.SHARED}
        self.note('shared file systems', ', '.join('%s (%s)' % item for item in found.items()), "/proc/mounts has none")
        # the runtime takes a colon or a comma for a separator
        bound = [path for path in found if path != '/' and not re.search(r'[:,%#;]', path) and path == one_line(path)]
        if bound:
            self.add('parameter bind_paths', values='\n    ' + '\n    '.join(bound), for_='Singularity',
                     reason="the shared file systems, which a container does not see by itself; a path that a node "
                            "does not have is left out there", source="/proc/mounts " + self.here)

    def provides(self) -> None:
        """The machine's modules by their roles: those that load, and what is installed where there is none."""
        if self.site['network'] == 'any' and not self.in_job:
            self.unseen['modules by role'] = "which are needed follows from the network, and a compute node shows that"
            return
        roles: Dict[str, str] = {}
        for role, found in self.loads.items():
            name = 'gpu' if role in ('cuda', 'rocm') else role
            if role in ('cuda', 'rocm') and role != self.site['gpu']:
                continue
            if found.problem:
                self.unseen[name] = '%s: %s' % (found.module, found.problem)
                continue
            # what Cray's compilers and conda do is done when software is built
            build = 'build ' * (role == 'conda' or found.module.startswith('PrgEnv-'))
            roles[name] = build + found.module + (' in ' + found.prefix if found.prefix and not build else '')
            self.seen[name] = '%s: %s%s' % (found.module, found.why, '' if build else '; prefix %s' % (
                found.prefix and ('$' + found.prefix if found.prefix[0] != '/' else found.prefix)
                or 'not seen, EasyBuild will look for it'))
        if self.site['gpu'] == 'none':
            for role in ('nccl', 'nccl_plugin'):
                roles.pop(role, None)
        if 'python' not in roles and 'conda' in roles:
            roles['python'] = 'build eb ' + CONDA_PYTHON
            self.seen['python'] = "installed by conda: there is no module of Python %d.%d or newer" % (
                probe.OLDEST_PYTHON)
        if self.site['gpu'] == 'rocm' and 'gpu' in roles:
            roles['nccl'] = 'gpu'
        if self.site['gpu'] in ('cuda', 'rocm') and 'nccl_plugin' not in roles and (
                self.site['network'] == 'slingshot11'):
            roles['nccl_plugin'] = 'eb ' + PLUGIN
            self.seen['nccl_plugin'] = "there is no module of it: --robot builds ours for this libfabric"
            for role in ('gpu', 'libfabric'):
                if role not in roles:
                    self.unseen.setdefault(role, "no module of it was found, and the plugin is built with it: add the "
                                                 "line '%s = MODULE/VERSION' to the section [provides ...]" % role)
        if self.site['gpu'] in ('cuda', 'rocm') and 'gpu' not in roles:
            self.unseen.setdefault('gpu', "no module of %s was found" % self.site['gpu'])
        for role in {'gpu', *(role for role, _, _ in probe.ROLE_MODULES)}.intersection(self.unseen):
            self.unseen[role] += '' if self.in_job else ". A login node may lack what compute nodes have"
        if roles:
            gpu = self.loads.get(self.site['gpu'])
            version = gpu.module.rpartition('/')[2] if gpu and 'gpu' in roles else ''
            self.add('provides ' + (re.sub(r'[^\w.-]', '_', '%s-%s' % (self.site['gpu'], version)) if version
                                    else 'modules'),
                     source="module avail, and what the modules set when they are loaded, " + self.here, **roles)
