# SPDX-License-Identifier: GPL-2.0-only
"""
What 'slingtorch site new' finds out about a machine. Only gather() and load_modules() touch the machine; probes return
text, so that tests can use recordings. The read_ functions parse such texts.
"""
import concurrent.futures
import contextlib
import glob
import json
import os
import re
import subprocess
from collections import namedtuple
from typing import Any, Dict, List, Mapping, Optional, Tuple

LIMIT = 20      # seconds for one command; all of them run at the same time
COMMANDS = {
    'sinfo': ['sinfo', '--noheader', '--format=%P|%D|%G'],
    'slurm': ['scontrol', 'show', 'config'],
    'pbs': ['qstat', '--version'],
    'addresses': ['ip', '-j', 'address'],
    'fi_info': ['fi_info'],
    'nvidia-smi': ['nvidia-smi', '-L'],
    'rocm-smi': ['rocm-smi', '--showid'],
}
# 'module avail' prints to standard error, and shell code to standard output
MODULES = (('LMOD_CMD', '"$LMOD_CMD" bash -t avail 2>&1 >/dev/null'),
           ('MODULES_CMD', '"$MODULES_CMD" bash avail -t 2>&1 >/dev/null'))
LOADERS = (('LMOD_CMD', '"$LMOD_CMD" bash load'), ('MODULES_CMD', '"$MODULES_CMD" bash load'))
# module names for the roles of a site (slingtorch/sites), the best name first, and a file below the prefix; in the
# order in which the modules are loaded
ROLE_MODULES = (
    ('compiler', ('PrgEnv-gnu', 'gcc-native', 'gcc'), 'bin/gcc'),
    ('mpi', ('cray-mpich', 'openmpi', 'mpich'), 'include/mpi.h'),
    ('cuda', ('cudatoolkit', 'cuda'), 'bin/nvcc'),
    ('rocm', ('rocm',), 'bin/hipcc'),
    ('libfabric', ('libfabric',), 'bin/fi_info'),
    ('cudnn', ('cudnn',), 'include/cudnn.h'),
    ('blas', ('mkl', 'intel-oneapi-mkl', 'openblas'), 'lib'),
    ('conda', ('miniforge3', 'miniforge', 'mambaforge', 'miniconda3', 'conda'), 'bin/conda'),
    ('python', ('cray-python', 'python', 'python3'), 'bin/python3'),
    ('nccl', ('nccl',), 'include/nccl.h'),
    ('nccl_plugin', ('aws-ofi-nccl', 'aws-ofi-nccl-plugin', 'rccl-net-plugin', 'aws-ofi-rccl'), 'lib'),
)
OLDEST_PYTHON = (3, 11)     # of the Pythons in the wheels' lock files
TREES = {
    'net': ('/sys/class/net', ['*/operstate', '*/speed']),
    'cxi': ('/sys/class/cxi', ['*']),
    'rdma': ('/sys/class/infiniband', ['*/ports/*/link_layer', '*/ports/*/state']),
}

# patterns of GPU types as administrators write them
GPU_TYPES = (('rocm', r'mi\d|amd|radeon|gfx\d'),
             ('cuda', r'nvidia|tesla|[avphlt]\d+|g[hb]\d00|b\d00|k80|rtx|\dg\.\d+gb'))
# lines that show a GPU in the output of a command
GPU_LINES = (('nvidia-smi', 'cuda', r'^GPU (\d+):'), ('rocm-smi', 'rocm', r'^GPU\[(\d+)\]'))
VIRTUAL = re.compile(r'lo$|docker|virbr|veth|vnet|br-|cni|cali|flannel|tun|tap|ifb|dummy|kube|podman|lxc|idrac|usb')

# what starts one task on a node of a job; nothing without a scheduler
LAUNCHERS = {'slurm': 'srun --nodes=1 --ntasks=1', 'pbs': 'mpiexec -n 1', 'none': ''}

Env = Mapping[str, str]
Text = namedtuple('Text', ['text', 'problem'])
Place = namedtuple('Place', ['host', 'kind', 'cluster'])        # kind: login node, compute node, machine
Gpus = Tuple[Tuple[str, int], ...]       # of a node: type and number
Partitions = Dict[str, Dict[Gpus, int]]
Loaded = namedtuple('Loaded', ['module', 'why', 'prefix', 'problem'])


def run(command: List[str], environ: Env, limit: float) -> Text:
    """The output of a command, as Text; if it is missing, fails or hangs, Text has a problem instead of an error."""
    name = 'module' if command[0] == 'bash' else command[0]
    path = environ.get('PATH', os.defpath) + ':/usr/sbin:/sbin:/opt/rocm/bin'
    # env, because the path must also be used to find the command
    process = subprocess.run(['timeout', '-k', '1', str(limit), '/usr/bin/env', '-u', 'LANGUAGE', 'LC_ALL=C',
                              'PATH=' + path, *command], env=environ, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = [stream.decode(errors='replace') for stream in (process.stdout, process.stderr)]
    if process.returncode in (124, 137):
        return Text('', "%s did not answer within %g s" % (name, limit))
    if process.returncode == 127:
        return Text('', "there is no command %s" % name)
    if process.returncode:
        said = one_line((err or out).strip().rpartition('\n')[2])
        return Text('', "%s ended with status %d%s" % (name, process.returncode, said and ': ' + said))
    return Text(out, None if out.strip() else "%s printed nothing" % name)


def tree(top: str, patterns: List[str]) -> Text:
    """Small files and links below a directory, as lines 'path: content', like the output of grep."""
    lines = []
    for path in sorted(path for pattern in patterns for path in glob.glob(os.path.join(glob.escape(top), pattern))):
        with contextlib.suppress(OSError):
            if os.path.islink(path):
                content = os.path.basename(os.readlink(path))
            else:
                with open(path, errors='replace') as stream:
                    content = stream.read(200)
            lines.append('%s: %s\n' % (os.path.relpath(path, top), one_line(content)))
    return Text(''.join(lines), None if lines else "there is nothing in %s" % top)


def gather(environ: Env) -> Dict[str, Text]:
    """Examine this machine: {name of a probe: Text}. Takes as long as the slowest command, at most LIMIT."""
    # a login shell may know the modules tool if this one does not
    modules = [['bash', '-c', code] for variable, code in MODULES if environ.get(variable)]
    commands = dict(COMMANDS, modules=(modules + [['bash', '-lc', 'module -t avail 2>&1']])[0])
    with concurrent.futures.ThreadPoolExecutor(len(commands)) as pool:
        results = {name: pool.submit(run, command, environ, LIMIT) for name, command in commands.items()}
        evidence = {name: tree(*arguments) for name, arguments in TREES.items()}
        evidence.update((name, result.result()) for name, result in results.items())
    with open('/proc/mounts', errors='replace') as stream:
        evidence['mounts'] = Text(stream.read(), None)
    return evidence


def one_line(text: str) -> str:
    """A text without line ends and control characters."""
    return ' '.join(''.join(char if char.isprintable() else ' ' for char in text).split())


def find_scheduler(evidence: Dict[str, Text], environ: Env) -> str:
    """slurm, pbs or none. It is slurm even if its commands fail, but not if it is installed without a cluster."""
    if environ.get('SLURM_JOB_ID') or not re.search('there is no command|configuration source|slurm.conf.*No such file',
                                                    evidence['sinfo'].problem or ''):
        return 'slurm'
    return 'none' if evidence['pbs'].problem and not environ.get('PBS_JOBID') else 'pbs'


def find_place(evidence: Dict[str, Text], environ: Env, host: str) -> Place:
    """The Place of this process: a compute node inside a job, else a login node or a machine without scheduler."""
    match = re.search(r'^ClusterName\s*=\s*(\S+)', evidence['slurm'].text, re.M)
    cluster = environ.get('SLURM_CLUSTER_NAME') or (match.group(1) if match else '')
    node, kind = environ.get('SLURMD_NODENAME') or host, 'compute node'
    if not (environ.get('SLURMD_NODENAME') or environ.get('PBS_JOBID')):
        kind = 'machine' if find_scheduler(evidence, environ) == 'none' else 'login node'
    return Place(one_line(node), kind, one_line(cluster))


def read_gres(gres: str) -> Gpus:
    """GPUs of a node by type, from sinfo's %G: 'gpu:mi250:8(S:0),nvme:1' is (('mi250', 8),)."""
    found: Dict[str, int] = {}
    for entry in re.sub(r'\([^)]*\)?', '', gres).split(','):
        match = re.match(r'gpu(?::([^:]*[^:\d][^:]*))?(?::(\d+))?$', entry.strip())
        if match and int(match.group(2) or 1):
            found[match.group(1) or ''] = found.get(match.group(1) or '', 0) + int(match.group(2) or 1)
    return tuple(found.items())


def read_sinfo(text: str) -> Tuple[Partitions, Optional[str]]:
    """Partitions from sinfo's output: ({name: {GPUs of a node: number of nodes}}, name of the default one or None)."""
    partitions: Partitions = {}
    default = None
    for fields in (line.split('|') for line in text.splitlines()):
        if len(fields) == 3 and fields[0].strip('* ') and fields[1].strip().isdigit():
            name, gpus = one_line(fields[0]).rstrip('*'), read_gres(one_line(fields[2]))
            default = name if '*' in fields[0] else default
            nodes = partitions.setdefault(name, {})
            nodes[gpus] = nodes.get(gpus, 0) + int(fields[1])
    return partitions, default


def gpu_vendor(text: str) -> Optional[str]:
    """cuda or rocm for a type of GPU; None if unknown."""
    return next((vendor for vendor, pattern in GPU_TYPES
                 if re.search(r'(?<![a-z0-9])(%s)' % pattern, text.lower().replace('_', ' '))), None)


def node_gpus(evidence: Dict[str, Text]) -> Optional[Tuple[str, int, str]]:
    """GPUs of this node: (vendor, number, the command that shows them), or None."""
    for name, vendor, pattern in GPU_LINES:
        numbers = set(re.findall(pattern, evidence[name].text, re.M))
        if numbers:
            return vendor, len(numbers), name
    return None


def read_tree(text: str) -> Dict[str, Dict[str, str]]:
    """Lines of tree(): {first directory: {rest of the path: content}}."""
    res: Dict[str, Dict[str, str]] = {}
    for path, _, content in (line.partition(': ') for line in text.splitlines()):
        top, _, rest = path.partition('/')
        res.setdefault(one_line(top), {})[rest] = one_line(content)
    return res


def read_json(text: str) -> List[Dict[str, Any]]:
    """The dictionaries that 'ip -j' prints; none if the text is truncated or is something else."""
    try:
        data = json.loads(text)
    except ValueError:
        return []
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


def read_interfaces(net: str, addresses: str) -> Dict[str, int]:
    """Network interfaces that are up and have an IPv4 address, with their speed in Mb/s (0: unknown)."""
    addressed = {entry.get('ifname') for entry in read_json(addresses) for info in entry.get('addr_info') or []
                 if info.get('family') == 'inet' and info.get('scope') == 'global'}
    return {name: int(keys['speed']) if keys.get('speed', '').isdigit() else 0 for name, keys in read_tree(net).items()
            if name in addressed and not VIRTUAL.match(name) and keys.get('operstate') in ('up', 'unknown')}


def infiniband(text: str) -> List[str]:
    """InfiniBand devices with a port that is up; without Omni-Path, which also reports InfiniBand."""
    return [device for device, keys in read_tree(text).items() if not device.startswith('hfi1') and any(
        'ACTIVE' in state and keys.get(path.replace('/state', '/link_layer')) == 'InfiniBand'
        for path, state in keys.items() if path.endswith('/state'))]


def read_providers(text: str) -> Dict[str, List[str]]:
    """libfabric's providers with their domains: {provider: [domain]}."""
    res: Dict[str, List[str]] = {}
    domains: List[str] = []
    for key, _, value in (one_line(line).partition(': ') for line in text.splitlines()):
        if key == 'provider':
            domains = res.setdefault(value.partition(';')[0], [])
        elif key == 'domain' and value not in domains:
            domains.append(value)
    return res


def read_modules(text: str) -> List[str]:
    """Names of modules in the output of 'module -t avail'."""
    names = [re.sub(r'[(<].*', '', one_line(line)).strip() for line in text.splitlines()]
    return [name for name in names if name and not name.endswith((':', '/')) and ' ' not in name]


def version_of(module: str) -> Tuple[int, ...]:
    """The numbers in a module's version."""
    return tuple(int(number) for number in re.findall(r'\d+', module.rpartition('/')[2] if '/' in module else ''))


def choose_modules(evidence: Dict[str, Text], environ: Env) -> List[Tuple[str, str, str, str]]:
    """Modules chosen for roles by their names: (role, module, reason, a file below its prefix)."""
    avail = read_modules(evidence['modules'].text)
    loaded = environ.get('LOADEDMODULES', '').split(':')
    default = re.findall(r'^(\S+?)\((?:default|D)\)', evidence['modules'].text, re.M)
    chosen = []
    for role, names, below in ROLE_MODULES:
        for name in names:
            found = sorted({module for module in avail if module.rpartition('/')[0] == name}, key=version_of)
            if role == 'python':
                found = [module for module in found if version_of(module)[:2] >= OLDEST_PYTHON]
            if found:
                here, first = ([module for module in found if module in names] for names in (loaded, default))
                module = (here or first or found)[-1]
                why = ('it is loaded' if here else 'the default one' if first else
                       'the newest of %d' % len(found) if len(found) > 1 else 'the only one')
                chosen.append((role, module, why, below))
                break
    return chosen


def load_modules(chosen: List[Tuple[str, str, str, str]], environ: Env) -> Dict[str, Loaded]:
    """
    Load modules one after the other: {role: Loaded}.

    The prefix is a directory that the module names in a variable, or whose bin, lib or include it adds to a list.
    """
    loader = next((command for variable, command in LOADERS if environ.get(variable)), None)
    if not loader or not chosen:
        return {}
    script = 'env -0; for module in "$@"; do eval "$(%s "$module" 2>/dev/null)"; printf "\\n"; env -0; done' % loader
    done = run(['bash', '-c', script, 'bash'] + [module for _, module, _, _ in chosen], environ, LIMIT)
    states = [dict(entry.split('=', 1) for entry in state.split('\0') if '=' in entry)
              for state in re.split('(?<=\0)\n', done.text)]
    loads = {}
    for (role, module, why, below), before, after in zip(chosen, states, states[1:]):
        new = {name: value for name, value in after.items() if before.get(name) != value}
        there = module in after.get('LOADEDMODULES', '').split(':')
        problem = '' if there else "it cannot be loaded here: 'module spider %s' shows what it needs" % module
        if module in before.get('LOADEDMODULES', '').split(':'):
            # loaded at login or by the compiler's module: examine all variables
            new, before = after, {}
        loads[role] = Loaded(module, why, one_line(prefix_in(new, before, below)) if there else '', problem)
    return loads


def prefix_in(new: Env, before: Env, below: str) -> str:
    """The first directory of these variables, else above one of their paths, that has the file `below`; else ''."""
    paths = [path for name, value in sorted(new.items()) if name not in ('HOME', 'PWD', 'OLDPWD')
             for path in value.split(':') if path not in before.get(name, '').split(':')]
    tops = paths + [os.path.dirname(path.rstrip('/')) for path in paths]
    return next((top for top in tops if os.path.isabs(top) and top not in ('/', '/usr')
                 and os.path.exists(os.path.join(top, below))), '')
