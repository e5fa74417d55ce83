# SPDX-License-Identifier: GPL-2.0-only
"""What only all ranks of a node together show: shared cores and GPUs, and the libraries that PyTorch's process maps."""
import os
import re

from . import elf, look, nccl, network, variables
from .kinds import Iterable, Machine, Report
from .machine import TRANSPORT_LAYER, library_kind

# A network is reported as slow below this share of its line rate: on a fast network, gloo over TCP reaches a tenth.
SLOW_LINK = 0.02
# GB/s below which any network is slow: that of a link which fell back to 100 Mbit/s
SLOW = 0.015
BIND = '"$($RUNSCRIPTS/cpu-bind)"'
# ld.so's words for a file that is cut off or empty (glibc elf/dl-load.c)
DAMAGED = 'file too short|invalid ELF header|cannot read file data|ELF load command'
# remedies for an error of unknown cause: of the network, of the import
LOOK_THERE = (
    "check whether the nodes reach each other at all ports, and which interface they use (GLOO_SOCKET_IFNAME, "
    "NCCL_SOCKET_IFNAME); vet finds the node: docs/check.md",
    "run python -c 'import torch' on one of these nodes to see the whole error")
SOCKET_PROVIDERS = ('tcp', 'sockets', 'udp', 'net')


def mask_of(ranks: 'Iterable[int]') -> int:
    """The bit mask of these ranks."""
    return sum(1 << rank for rank in ranks)


def grouped(ranks: list, key: str) -> dict:
    """{cores or GPUs of ranks of the node: these ranks}, from their details (look.look())."""
    found = {}  # type: dict
    for details in ranks:
        found.setdefault(tuple(details[key] or ()), []).append(details['rank'])
    return found


def check_cores(report: 'Report', ranks: list) -> None:
    """Report cores that several ranks share; `ranks` are the details of all ranks of the node."""
    sharing, everything = grouped(ranks, 'cpus'), set(ranks[0]['online'])
    for cpus, who in sharing.items():
        if len(who) > len(cpus):
            report.add('yellow', 'cores', "%d ranks of the node share %s: they slow each other down" % (
                len(who), "its %d cores" % len(cpus) if set(cpus) >= everything else
                "one core (%d)" % cpus[0] if len(cpus) == 1 else "%d cores" % len(cpus)),
                "start fewer ranks on a node, or give each more cores (srun --cpus-per-task=N)", mask_of(who))
        elif len(sharing) == 1 and len(ranks) > 1:
            report.add('yellow', 'cores', "the ranks of the node are not bound: each may use all %d cores" % len(cpus),
                       "srun --cpu-bind=" + BIND)
    if not report.having('yellow', 'cores'):
        report.add('good', 'cores', "no rank shares a core with another rank")


def check_gpus(report: 'Report', ranks: list, mapped: list, environ: dict) -> None:
    """Report GPUs that several ranks share, and ranks whose cores are far from their GPU; `mapped`: libraries."""
    lists = {gpus: who for gpus, who in grouped(ranks, 'gpus').items() if gpus}
    for gpus, who in lists.items():
        if len(who) > len(gpus):
            sure = nccl.refuses_to_share(mapped) and environ.get('NCCL_MULTI_RANK_GPU_ENABLE') != '1'
            report.add('red' if sure else 'yellow', 'gpus', "%d ranks of the node share %s" % (
                len(who), "one GPU" if len(gpus) == 1 else "%d GPUs" % len(gpus)),
                "start one rank per GPU, with --gpus-per-task=1 or SLINGTORCH_GPU_VISIBILITY", mask_of(who))
    single = [one for one in ranks if one['gpus'] and len(one['gpus']) == 1]
    near = [set(one['near'].get(one['gpus'][0], ())) for one in single]
    far = [one['rank'] for one, cpus in zip(single, near) if cpus and one['cpus'] and not cpus & set(one['cpus'])]
    if far:
        report.add('yellow', 'gpus', "the rank's cores are not near its GPU", "srun --cpu-bind=" + BIND, mask_of(far))
    if lists and all(len(gpus) == len(who) == 1 for gpus, who in lists.items()):
        report.add('good', 'gpus', "each rank sees a GPU of its own")
        if not far and all(near):
            report.add('good', 'gpus', "each rank runs on cores near its GPU")


def check_libraries(report: 'Report', paths: list, machine: 'Machine') -> None:
    """Report libraries that the process with PyTorch maps twice, or that do not work together."""
    by_kind = {}  # type: dict
    for path in paths:
        if library_kind(path):
            by_kind.setdefault(library_kind(path), set()).add(os.path.realpath(path))
    for kind, files in sorted(by_kind.items()):
        report.fact('maps ' + kind, ' '.join(sorted(files)))
        if len(files) > 1:
            report.add('yellow', 'libraries', "one process has loaded %d %s: %s" % (
                len(files), kind, ' and '.join(sorted(files))),
                       "keep one: find which of LD_PRELOAD, LD_LIBRARY_PATH and the packages adds the other")
    gtl = any(TRANSPORT_LAYER.match(os.path.basename(path)) for path in paths)
    if machine.environ.get('MPICH_GPU_SUPPORT_ENABLED') == '1' and not gtl and \
            any('cray' in path for path in by_kind.get('MPI', ())):
        report.add('yellow', 'libraries', "MPICH_GPU_SUPPORT_ENABLED=1, but the process maps Cray MPICH without its "
                   "GPU library (libmpi_gtl): a call of MPI_Init would end the program",
                   "unset it, or first load the module craype-accel-*")
    if machine.gpus() and not {'libnccl', 'librccl'} & set(by_kind):
        report.add('yellow', 'libraries', "the process with PyTorch maps neither libnccl nor librccl",
                   "use a PyTorch that is built for the GPUs of this node")
    if not report.having(name='libraries'):
        report.add('good', 'libraries', "the process with PyTorch maps %s" % (
            '; '.join(sorted(set().union(*by_kind.values()))) or "no NCCL, libfabric or MPI"))


def check_probe(report: 'Report', probe: dict, machine: 'Machine') -> list:
    """Report what the process with PyTorch says, {} without one; returns the libraries that it maps."""
    plugin, mapped = report.value('plugin'), probe.get('maps', [])
    if 'imported' in probe:
        # with one digit, so that ranks with about the same time are counted together
        report.fact('seconds import', '%.1g' % probe['imported'])
    for name, value in sorted(probe.get('facts', {}).items()):
        report.fact(name, value)
    if probe.get('error'):
        report_error(report, probe)
    elif 'told' in probe:
        report.add('good', 'collective', "an all_reduce of %s over one rank of each node gave the right result"
                   % probe['facts'].get('backend'))
        check_speed(report, probe, machine)
    if probe.get('sees') is False and look.uses_gpus(machine):
        report.add('red' if look.wants_gpus(machine) else 'yellow', 'gpus',
                   "PyTorch sees no GPU, although this rank has one. %s" % probe['warned'],
                   "run nvidia-smi or rocm-smi on this node; keep cuda/lib64/stubs out of LD_LIBRARY_PATH; a container "
                   "needs all of the driver's device files (--nv, --rocm)")
    if probe.get('unanswered', [0])[0]:
        report.add('yellow', 'network', "%d of %d new connections to rank 0's node got no answer within %d s, although "
                   "others to the same port did: a firewall limits how many are opened in a time (its rate of SYN), or "
                   "packets get lost" % (*probe['unanswered'], network.ANSWER),
                   "have the centre lift this limit between the nodes of a job")
    if probe:
        check_libraries(report, mapped, machine)
    carrier, provider = probe.get('network'), probe.get('provider')
    # NCCL over any other network has found the plugin that it needs; without one, its log always says so
    if carrier in (None, 'Socket') and plugin and probe.get('plugin'):
        report.add('yellow', 'plugin', "NCCL did not load the plugin: %s" % probe['plugin'],
                   "load the module of the plugin and those that it was built with (libfabric, hwloc, CUDA or ROCm)")
    elif carrier in (None, 'Socket') and not plugin:
        look.look_for_plugin(machine, report)
    if provider or carrier:
        slow = carrier == 'Socket' or (provider or '').split(';')[0] in SOCKET_PROVIDERS
        # on a machine with nothing but Ethernet, sockets are the network
        faster = machine.list('sys/class/infiniband') or plugin or provider or report.having(name='plugin')
        level = 'red' if slow and machine.slingshot() else 'yellow' if slow and faster else 'good'
        report.add(level, 'network', "NCCL runs over %s%s" % (
            "sockets (TCP)" if slow else carrier or 'its plugin',
            ", libfabric's provider %s" % provider if provider else ''),
            "the plugin was not loaded, or has no provider for this network: set NCCL_DEBUG=INFO "
            "NCCL_DEBUG_SUBSYS=INIT,NET" if level != 'good' else '')
    variables.check(report, variables.read_table(), mapped, [plugin] if plugin else [], bool(machine.gpus()))
    variables.check_torch(report, machine)
    return mapped


def report_error(report: 'Report', probe: dict) -> None:
    """Report what went wrong in the process with PyTorch; check.py finds the cause of what the network does."""
    phase, error, torch = probe.get('phase', 'import'), probe['error'], report.value('torch is in', '')
    remedy = probe.get('remedy') or LOOK_THERE[phase == 'import']
    cut_off = elf.cut_off(os.path.join(torch, 'lib')) if phase == 'import' and torch else []
    if cut_off or phase == 'import' and re.search(DAMAGED, error):
        error = '; truncated: '.join([error, *cut_off[:3]])
        remedy = "a file of the environment is damaged on this node: install or copy the environment again"
    report.add(probe.get('level', 'red'), phase, error, remedy)


def check_speed(report: 'Report', probe: dict, machine: 'Machine') -> None:
    """Report a slow or far network, and lost packets, from the largest all_reduce."""
    told = probe['told']
    speed = network.ROW[-1][0] / told['seconds'] / 1e9     # each node sends and receives it once
    card, rate = max(machine.line_rates().items(), key=lambda item: item[1], default=('', 0))
    for wrong, text, remedy in (
            (speed < max(SLOW, SLOW_LINK * rate), "an all_reduce of 8 MB over one rank of each node reached about %.1g "
             "GB/s%s" % (speed, ", but the line rate of %s is %g GB/s" % (card, rate) if card else ''),
             "check which network the job uses (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); vet finds slow nodes"),
            (told['trip'] > network.FAR, "the shortest round trip to other nodes takes more than %g ms"
             % (1000 * network.FAR), "check which network the job uses (%s), and where its nodes are"
             % report.value('address of gloo', '?')),
            (told['resent'] >= network.RESENT and told['resent'] > network.LOSS * told['sent'], "packets get lost "
             "between the nodes: more than 1 in %d TCP segments was sent again" % (
                 2 if 2 * told['resent'] > told['sent'] else 1 / network.LOSS),
             "ask the centre to check cables, ports and switches; vet finds the node")):
        if wrong:
            report.add('yellow', 'network', text, remedy)
