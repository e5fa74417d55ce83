# SPDX-License-Identifier: GPL-2.0-only
"""What a rank sees without PyTorch: processors, GPUs, caches, interfaces, the rendezvous, its environment."""
import getpass
import importlib.util
import os
import re
import site
import sys

from . import nccl, network
from .kinds import Machine, Optional, Report
from .limits import nearest, write_trial
from .machine import GPU_ENTRY, SHARED, VISIBILITY, by_srun

# variables with directories for caches; MIOpen's have a database with locks (ROCm/MIOpen#2214)
CACHES = ('MIOPEN_USER_DB_PATH', 'MIOPEN_CUSTOM_CACHE_DIR', 'TRITON_CACHE_DIR', 'TORCHINDUCTOR_CACHE_DIR')
# variables that differ from rank to rank or node to node, or do not concern the network
PER_RANK = VISIBILITY + CACHES + ('FI_CXI_DEVICE_NAME', 'NCCL_HOSTID', 'TORCH_FR_DUMP_TEMP_FILE',
                                  'TORCH_NCCL_DEBUG_INFO_TEMP_FILE')


def visible_gpus(machine: 'Machine', known: list) -> list:
    """Names of the GPUs that this rank sees."""
    names, nvidia = [entry[0] for entry in known], known[0][2] == 'cuda'
    if nvidia:
        names = [names[number] for number in machine.open_gpus() if number < len(names)]
    elif not os.path.exists(machine.path('dev/kfd')):
        names = []
    else:
        parts = machine.rocm_gpus()
        if len(parts) > len(names):
            names = ['partition ' + number for number in parts]
    for variable in VISIBILITY[1:2] if nvidia else (VISIBILITY[0], VISIBILITY[2], VISIBILITY[1]):
        if variable not in machine.environ:
            continue
        chosen = []
        for word in machine.environ[variable].split(','):
            if word.isdigit() and int(word) < len(names):
                chosen.append(names[int(word)])
            elif not re.match(GPU_ENTRY, word) or word.isdigit():
                break       # the libraries end the list at the first GPU that does not exist
            else:
                chosen.append(word)
        # a process sees one slice of a GPU (NVIDIA's MIG guide, "Device enumeration")
        return chosen[:1] if chosen and chosen[0].startswith('MIG-') else chosen
    return names


def uses_gpus(machine: 'Machine') -> bool:
    """Whether this rank sees a GPU, and so communicates through NCCL."""
    return bool(machine.gpus() and visible_gpus(machine, machine.gpus()))


def wants_gpus(machine: 'Machine') -> bool:
    """Whether the job asked for GPUs, and no variable hides them: a job on CPUs may run on such a node, too."""
    hidden = any(not re.match(GPU_ENTRY, machine.environ.get(name, '0').split(',')[0]) for name in VISIBILITY)
    return not hidden and (any(map(machine.environ.get, VISIBILITY))
                           or machine.environ.get('SLURM_GPUS_ON_NODE', '') not in ('', '0'))


def look_at_gpus(machine: 'Machine', report: 'Report', details: dict) -> None:
    """Check which GPUs this rank sees; note the cores near them."""
    known = machine.gpus()
    variables = ['%s=%s' % (name, machine.environ[name]) for name in VISIBILITY if machine.environ.get(name)]
    details['gpus'], details['near'] = None, {}
    if not known:
        report.add('untested', 'gpus', "no GPU on the node%s" % (
            ", although %s is set" % ' and '.join(name.partition('=')[0] for name in variables) if variables else ''))
        return
    seen = visible_gpus(machine, known)
    details['gpus'], details['near'] = seen, {entry[0]: entry[1] for entry in known}
    if not seen:
        report.add('red' if wants_gpus(machine) else 'yellow', 'gpus', "this rank sees none of its node's %d GPUs "
                   "(%s)" % (len(known), ', '.join(variables) or "it cannot open their devices, or a variable hides "
                             "them"),
                   "ask for GPUs (--gpus-per-node or --gpus-per-task), and in a container use --nv or --rocm")


def look_at_caches(machine: 'Machine', report: 'Report', _: dict) -> None:
    """Whether the caches belong to this user, nobody else can write to them, and they are on a disk of the node."""
    checked = [variable for variable in sorted(CACHES) if machine.environ.get(variable)]
    for variable in checked:
        path = machine.environ[variable]
        real, there = os.path.realpath(path), nearest(os.path.realpath(path))
        state, own, (where, kind) = os.stat(there), there == real, machine.mount_of(real)
        for wrong, what in (
                (own and state.st_uid != os.getuid(), "belongs to user id %d" % state.st_uid),
                (write_trial(there), "cannot be written (tried: %s)" % there),
                (own and state.st_mode & 0o022, "is writable by others (mode %o), who could put code there"
                 % (state.st_mode & 0o7777)),
                (kind in SHARED, "is on a parallel or network file system (%s, %s), whose locks do not work for a "
                 "database and which all ranks access for every compiled kernel" % (where, kind))):
            if wrong:
                report.add('yellow', 'cache', "%s=%s %s" % (variable, path, what), "unset %s: conda-python-distributed "
                           "then creates a private cache on the node" % variable)
    if checked and not report.having(name='cache'):
        report.add('good', 'cache', "%s: private, writable, not on a parallel file system" % ', '.join(checked))


def look_at_interfaces(machine: 'Machine', report: 'Report', several: bool) -> None:
    """Whether this node has the interfaces that variables name for NCCL and Gloo."""
    there = machine.list('sys/class/net')
    for variable in ('NCCL_SOCKET_IFNAME', 'GLOO_SOCKET_IFNAME'):
        value = machine.environ.get(variable)
        if not value or value.startswith('^'):
            continue
        gloo = variable.startswith('GLOO')
        exact = gloo or value.startswith('=')
        # NCCL matches prefixes of names, and one match suffices (src/misc/socket.cc); Gloo wants whole names
        found = {word: [name for name in there if name == word or not exact and name.startswith(word)]
                 for word in value.lstrip('=').split(',') if word}
        missing, used = [word for word in found if not found[word]], sorted(set(sum(found.values(), [])))
        if missing:
            wrong = "this node has no interface %s" % ', '.join(missing)
        elif all(machine.read('sys/class/net/%s/operstate' % name) == 'down' for name in used):
            wrong = "%s is down on this node" % ', '.join(used)
        else:
            report.add('good', 'interface', "%s=%s exists" % (variable, value))
            continue
        # the library that moves the data: NCCL between GPUs, else Gloo
        sure = uses_gpus(machine) != gloo and (gloo or not missing or not used)
        report.add('red' if sure else 'yellow', 'interface',
                   "%s=%s: %s (it has %s)" % (variable, value, wrong, ', '.join(there)),
                   "name one of these in the job script, or unset the variable")
    if several and machine.slingshot() and not machine.environ.get('NCCL_SOCKET_IFNAME'):
        report.add('yellow', 'interface', "NCCL_SOCKET_IFNAME is not set on a node with Slingshot: NCCL may use the "
                   "management network", "export NCCL_SOCKET_IFNAME=hsn")


def look_at_master(machine: 'Machine', report: 'Report') -> None:
    """Whether MASTER_ADDR has an address here, on rank 0 its own; note what must be the same on all ranks."""
    address = machine.environ.get('MASTER_ADDR', '')
    remedy = "unset MASTER_ADDR and RANK in the job script: conda-python-distributed sets them"
    for name in ('MASTER_ADDR', 'MASTER_PORT', 'WORLD_SIZE'):
        report.fact(name, machine.environ.get(name, '(not set)'))
    try:
        found = network.addresses(address)
    except OSError as err:
        report.add('red', 'master', "MASTER_ADDR=%s has no address on this node (%s)" % (address, err), remedy)
        return
    if machine.environ.get('RANK') != '0':
        return
    # to reach one of the node's own addresses, the kernel sends from that address
    if any(network.source_of(one) == one for one in found):
        report.add('good', 'master', "MASTER_ADDR=%s is the node of rank 0" % address)
    else:
        report.add('red', 'master', "MASTER_ADDR=%s (%s) is not the node of rank 0 (%s), or two nodes have RANK=0" % (
            address, found[0], machine.node), remedy)


def look_at_user(machine: 'Machine', report: 'Report') -> None:
    """Whether print, torch.compile and the rendezvous have what they need from the environment."""
    encoding = (getattr(sys.stdout, 'encoding', '') or 'utf-8').lower()
    if encoding.replace('_', '-') not in ('utf-8', 'utf8'):
        report.add('yellow', 'value', "stdout uses %s: printing other characters ends the program" % encoding,
                   "check PYTHONIOENCODING and LC_ALL, or export PYTHONUTF8=1")
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):
        report.add('yellow', 'torch', "user id %d has no name on this node, but torch.compile needs one (getpass)"
                   % os.getuid(), "export USER=NAME, or in a container bind /etc/passwd")
    environ = machine.environ
    by_torchrun = environ.get('TORCHELASTIC_RUN_ID') and environ.get('SLINGTORCH_LAUNCHER', 'torchrun') == 'torchrun'
    if environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True' and not by_torchrun:
        report.add('red', 'variable', "TORCHELASTIC_USE_AGENT_STORE=True, but torchrun did not start this rank: rank 0 "
                   "waits for a store that torchrun would provide", "unset it in the job script")


def look_at_job(machine: 'Machine', report: 'Report') -> None:
    """Whether Slurm's variables are those of this job, whose number is in the title of the slurmstepd above."""
    environ, pid = machine.environ, 'self'
    while by_srun(environ) and not environ.get('SLURM_HET_JOB_ID') and pid not in ('0', '1'):
        found = re.match(r'slurmstepd: \[(\d+)\.', machine.read('proc/%s/cmdline' % pid))
        if found and found.group(1) != environ.get('SLURM_JOB_ID'):
            report.add('yellow', 'world-size', "SLURM_JOB_ID=%s, but this process runs in job %s: the variables are "
                       "those of another job" % (environ.get('SLURM_JOB_ID'), found.group(1)),
                       "do not export Slurm's variables in the job script")
        parent = machine.read('proc/%s/stat' % pid).rpartition(')')[2].split()[1:2]
        pid = parent[0] if parent and not found else '1'


def find_torch() -> 'Optional[str]':
    """Directory of the package that 'import torch' would load, or None; imports nothing."""
    spec = importlib.util.find_spec('torch')
    return os.path.dirname(spec.origin) if spec and spec.origin else None


def look_at_torch(machine: 'Machine', report: 'Report', directory: 'Optional[str]',
                  home: 'Optional[str]' = None) -> None:
    """Find from its files which torch this rank would import."""
    if directory is None:
        report.add('untested', 'torch', "PyTorch: this Python has none (%s)" % sys.executable)
        report.fact('torch', 'none')
        return
    report.fact('torch is in', directory)
    text = machine.read(os.path.join(directory, 'version.py'))
    for name, fact in (('__version__', 'torch'), ('cuda', 'CUDA of torch'), ('hip', 'ROCm of torch')):
        found = re.search(r"^%s(?:: [^=]*)? = (?:'([^']*)'|None)" % name, text, re.M)
        report.fact(fact, (found.group(1) or 'none') if found else 'not known')
    users = os.path.realpath(home or site.getusersitepackages())
    if os.path.realpath(directory).startswith(users + '/'):
        report.add('yellow', 'torch', "'import torch' loads %s from your home directory instead of the module's"
                   % directory, "export PYTHONNOUSERSITE=1 in the job script, or: pip uninstall torch")


def look_for_plugin(machine: 'Machine', report: 'Report') -> None:
    """Report a missing network plugin of NCCL where a variable names it, or where the node has Slingshot and GPUs."""
    names, wanted = nccl.plugin_names(machine), machine.environ.get('NCCL_NET', '')
    named = machine.environ.get('NCCL_NET_PLUGIN') or wanted.lower() not in ('', 'socket', 'ib')
    if names and (named or machine.slingshot() and uses_gpus(machine)):
        report.add('yellow', 'plugin', "NCCL's network plugin is missing: no %s%s (NCCL_NET=%s)" % (
            names[0], '' if '/' in names[0] else " in LD_LIBRARY_PATH or the system's directories",
            wanted or '(not set)'),
            "load the module of the plugin (module spider aws-ofi-nccl); in a container bind its directory")


def look(machine: 'Machine', report: 'Report', torch: 'Optional[str]', several: bool) -> dict:
    """
    Make all checks of this file.

    :param torch: directory of torch, or None
    :param several: whether the job has several nodes
    :return: what node.py needs
    """
    allowed, online = machine.cpus()
    details = {'cpus': sorted(allowed), 'online': sorted(online)}
    report.fact('node', machine.node)
    report.fact('machine', machine.read('proc/sys/kernel/random/boot_id') or machine.node)
    report.fact('driver', machine.nvidia_driver() or 'none')
    for path in nccl.plugin_files(machine)[:1]:
        report.fact('plugin', path)
    for name, value in machine.environ.items():
        # also PyTorch's own variables, those for its threads, and those by which a rank may load other files
        if re.match(r'(NCCL|RCCL|FI|MPICH|OFI_NCCL|HSA|MIOPEN|TORCH|GLOO)_|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|'
                    r'(OMP|MKL)_NUM_THREADS|PYTHON[A-Z]+$|LD_(LIBRARY_PATH|PRELOAD)$', name, re.I) and \
                name not in PER_RANK:
            report.fact('env ' + name, value)
    look_at_job(machine, report)
    look_at_user(machine, report)
    look_at_master(machine, report)
    look_at_gpus(machine, report, details)
    look_at_interfaces(machine, report, several)
    look_at_torch(machine, report, torch)
    return details
