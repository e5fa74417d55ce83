# SPDX-License-Identifier: GPL-2.0-only
"""
slingtorch sites NAME --format: a site's values for people who do not use the modules, each with its reason.

What is printed comes from the site's file alone; the formats are lines of a job script (sbatch, pbs), a container
engine's EDF file (edf), a file for --env-file (env) and a page for documentation (markdown; without NAME a table of all
sites).
"""
import json
import shlex
from typing import Any, Iterable, List, Sequence, Tuple

from slingtorch import wrapped

FORMATS = ('sbatch', 'pbs', 'flux', 'edf', 'env', 'markdown')
# of job scripts, by the site's scheduler
OF_SCHEDULER = {'slurm': 'sbatch', 'pbs': 'pbs', 'flux': 'flux'}

Names = Sequence[str]   # of opt-in groups; a site is a Site of slingtorch/sites

# what the runscript makes of this one, others need too
NET = 'SLINGTORCH_MULTINODE_NCCL_NET'
# variables that only the runscripts read
OWN = 'SLINGTORCH_'
KINDS_OF_GPUS = {'cuda': 'NVIDIA', 'rocm': 'AMD', 'xpu': 'Intel'}
CONDITION = 'only for software with %s = %s'
# EDF: https://docs.cscs.ch/software/container-engine/resource-hook (2026-08-20), variants of the plugin by kind of GPU
PLUGIN_VARIANTS = {'cuda': ('cuda-dl', "or cuda12, cuda13"), 'rocm': ('rocm6', "or rocm5")}
# number of nodes of the job
NODES = {'slurm': '"${SLURM_JOB_NUM_NODES:-1}"', 'pbs': '"$(sort -u "$PBS_NODEFILE" | wc -l)"',
         'flux': '"$(flux resource list -n -o {nnodes})"'}      # flux-environment(7)
# what alt_read needs of a job
NO_GET = {'slurm': '#SBATCH --network=disable_rdzv_get',
          'pbs': '# start the ranks with: mpiexec --disable-rdzv-get ...',
          'flux': '#flux: --setattr=rdzv_get_en=0'}


def comment(text: str) -> List[str]:
    """Text as comment lines."""
    return wrapped(text, '# ', '# ').splitlines()


def sorted_out(site: Any, names: Names) -> Tuple[List[str], List[Any], Any, List[str]]:
    """
    With these groups: (comment on what the values are, and what the groups need of every job; values that everybody can
    set; value of NCCL_NET in jobs of several nodes or None; comment that names what only slingtorch's runscripts read).
    """
    lines = comment("%s: values for PyTorch, from slingtorch's site '%s' (%s)" % (site.title, site.name, site.source))
    for group in site.check_groups(names):
        lines += comment("group %s: %s; needs %s" % (group.name, group.title, group.needs))
    values = list(site.env_values(names).values())
    net = next((value for value in values if value.name == NET), None)
    own = [value.name for value in values if value.name.startswith(OWN) and value.name != NET]
    return (lines, [value for value in values if not value.name.startswith(OWN)], net,
            comment("left out, since only slingtorch's runscripts read them: %s" % ', '.join(own)) if own else [])


def setting(value: Any, line: str) -> List[str]:
    """A value's line after its reason; a comment where it does not always hold."""
    return comment(value.reason) + ['# %s: %s' % (CONDITION % value.when, line) if value.when else line]


def job_script(site: Any, names: Names, scheduler: str) -> List[str]:
    """Lines of a job script."""
    lines, values, net, left_out = sorted_out(site, names)
    if scheduler == 'slurm' and site.gpus_per_node.isdigit() and int(site.gpus_per_node):
        lines += ['#SBATCH --%s-per-node=%s' % (what, site.gpus_per_node) for what in ('ntasks', 'gpus')]
    if ('FI_CXI_RDZV_PROTO', 'alt_read') in [(value.name, value.value) for value in values]:
        lines += comment("alt_read needs it: without it performance and stability suffer")
        lines += [NO_GET[scheduler]]
    for value in values:
        lines += [''] + setting(value, 'export %s=%s' % (value.name, shlex.quote(value.value)))
    if net:
        lines += [''] + comment("on one node the plugin would take the network needlessly, or not start; " + net.reason)
        lines += ['if (( %s > 1 )); then' % NODES[scheduler], '    export NCCL_NET=%s' % shlex.quote(net.value), 'fi']
    return lines + ([''] + left_out if left_out else [])


def env_file(site: Any, names: Names) -> List[str]:
    """Lines for --env-file of podman, docker, apptainer and singularity: no quotes, no conditions."""
    lines, values, net, left_out = sorted_out(site, names)
    for value in values:
        lines += setting(value, '%s=%s' % (value.name, value.value))
    if net:
        lines += comment("for jobs of several nodes only, since a file has no conditions: " + net.reason)
        lines += ['#NCCL_NET=%s' % net.value]
    return lines + left_out


def edf(site: Any, names: Names) -> List[str]:
    """An EDF file of CSCS' container engine (TOML) without the image."""
    lines, values, net, left_out = sorted_out(site, names)
    lines += ['# image = "..."', '', '[env]']
    for value in values:
        lines += setting(value, '%s = %s' % (value.name, json.dumps(value.value)))
    if net:
        lines += comment("for jobs of several nodes only: " + net.reason) + ['# NCCL_NET = %s' % json.dumps(net.value)]
    lines += left_out
    if site.network == 'slingshot11':
        lines += ['', '[annotations]'] + comment("the host's libfabric instead of the image's: without it TCP is used")
        lines += ['com.hooks.cxi.enabled = "true"']
        if site.gpu in PLUGIN_VARIANTS:
            lines += comment("the plugin for %s, built for that libfabric. The variants are those of CSCS: %s"
                             % ('RCCL' if site.gpu == 'rocm' else 'NCCL', ' '.join(PLUGIN_VARIANTS[site.gpu])))
            lines += ['com.hooks.aws_ofi_nccl.enabled = "true"',
                      'com.hooks.aws_ofi_nccl.variant = "%s"' % PLUGIN_VARIANTS[site.gpu][0]]
    return lines


def cell(text: str) -> str:
    """Text in a table of Markdown."""
    return text.replace('\\', '\\\\').replace('|', '\\|').replace('<', '&lt;')


def about(site: Any) -> List[str]:
    """What a site is, in lines of a list."""
    gpus = '%s a node' % site.gpus_per_node if site.gpus_per_node.isdigit() else 'any number'
    facts = [('centre', '[%s](%s)' % (site.centre, site.url)),
             ('GPUs', 'none' if site.gpu == 'none' else '%s, %s' % (KINDS_OF_GPUS.get(site.gpu, site.gpu), gpus)),
             ('network', site.network), ('scheduler', site.scheduler), ('processor', site.processor),
             ('recognised by', ', '.join('`%s`' % pattern for _, pattern in site.rules)),
             ('PyTorch there', site.pytorch), ('rests on', site.evidence), ('not published', site.missing)]
    return wrapped_list('%s: %s' % (name, text) for name, text in facts if text)


def wrapped_list(entries: Iterable[str]) -> List[str]:
    """A list in Markdown."""
    return [line for entry in entries for line in wrapped(cell(entry), '* ', '  ').splitlines()]


def provided(site: Any) -> List[str]:
    """The modules that a site's file names, and its groups."""
    lines: List[str] = []
    for name, roles in site.generations.items():
        shown = ', '.join('%s `%s`' % (role, text) for role, text in roles.items() if role != 'default')
        lines += wrapped_list(['generation %s%s: %s' % (name, ' (default)' if 'default' in roles else '', shown)])
    groups = wrapped_list('`%s`: %s; needs %s' % (group.name, group.title, group.needs)
                          for group in site.groups.values())
    return (['', 'Modules:', ''] + lines if lines else []) + (['', 'Opt-in groups:', ''] + groups if groups else [])


def overview(sites: Sequence[Any]) -> str:
    """A table of all sites for documentation."""
    lines = ['| site | system | GPUs a node | network | scheduler | PyTorch there | rests on |',
             '|---|---|---|---|---|---|---|']
    for site in sites:
        gpus = '0' if site.gpu == 'none' else '%s %s' % (site.gpus_per_node, KINDS_OF_GPUS.get(site.gpu, site.gpu))
        if site.processor != 'x86_64':
            gpus += ', ' + site.processor
        lines.append('| %s |' % ' | '.join(map(cell, ('`%s`' % site.name, site.title, gpus, site.network,
                                                      site.scheduler, site.pytorch, site.evidence))))
    return '\n'.join(lines) + '\n'


def markdown(site: Any, names: Names) -> List[str]:
    """A page for documentation: what the site is, its values and modules, its groups."""
    lines = ['# %s' % cell(site.title), '']
    lines += wrapped("From slingtorch's site `%s`; source: %s." % (site.name, cell(site.source)), '', '').splitlines()
    lines += [''] + about(site)
    for group in site.check_groups(names):
        lines += ['', 'With the group `%s`: %s; needs %s.' % (group.name, cell(group.title), cell(group.needs))]
    values = site.env_values(names).values()
    lines += ['', '| variable | value | reason | source |', '|---|---|---|---|'] if values else ['', 'No values.']
    for value in values:
        reason = value.reason + (' (%s)' % (CONDITION % value.when) if value.when else '')
        lines.append('| `%s` | `%s` | %s | %s |'
                     % (value.name, value.value.replace('|', '\\|'), cell(reason), cell(value.source)))
    return lines + provided(site)


def render(site: Any, form: str, names: Names = ()) -> str:
    """
    The text of a site in one of FORMATS.

    :param names: opt-in groups
    :raises ValueError: if the site has another scheduler than the format is for
    """
    scheduler = {name: key for key, name in OF_SCHEDULER.items()}.get(form)
    if scheduler and site.scheduler not in (scheduler, 'none'):
        raise ValueError("the site '%s' has the scheduler %s: use --format %s"
                         % (site.name, site.scheduler, OF_SCHEDULER[site.scheduler]))
    # groups that exclude each other, and names that are none
    site.check_groups(names, asked_by='--group')
    make = {'edf': edf, 'env': env_file, 'markdown': markdown}.get(form)
    return '\n'.join(make(site, names) if make else job_script(site, names, scheduler or '')) + '\n'
