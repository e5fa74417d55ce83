# SPDX-License-Identifier: GPL-2.0-only
"""
How 'slingtorch sites' shows sites: one with all its values, each with its reason; its values for a shell and for
--env-file; a table of all sites for the documentation.
"""
from typing import Any, Iterable, List, Optional, Sequence

from slingtorch import wrapped

# the runscript sets NCCL_NET from this variable; without the runscript, users must do so
NET = 'SLINGTORCH_MULTINODE_NCCL_NET'
# variables that only the runscripts read
OWN = 'SLINGTORCH_'
KINDS_OF_GPUS = {'cuda': 'NVIDIA', 'rocm': 'AMD'}


def comment(text: str) -> List[str]:
    """Text as comment lines."""
    return wrapped(text, '# ', '# ').splitlines()


def env_file(site: Any, names: Sequence[str]) -> str:
    """
    Text for --env-file of podman, docker, apptainer and singularity: no quotes, no conditions.

    :param names: opt-in groups; a site is a Site of slingtorch/sites
    """
    lines = comment("%s: values for PyTorch, from slingtorch's site '%s' (%s)" % (site.title, site.name, site.source))
    for group in site.check_groups(names, asked_by='--group'):
        lines += comment("group %s: %s; needs %s" % (group.name, group.title, group.needs))
    for value in site.env_values(names).values():
        line = '%s=%s' % (value.name, value.value)
        if value.name == NET:
            lines += comment("only for jobs of several nodes; a file cannot have conditions: " + value.reason)
            lines += ['#NCCL_NET=%s' % value.value]
        elif not value.name.startswith(OWN):
            lines += comment(value.reason) + [
                '# only for software with %s = %s: %s' % (value.when + (line,)) if value.when else line]
    return '\n'.join(lines) + '\n'


def value_lines(values: Iterable[Any], group: Optional[str] = None) -> List[str]:
    """The values of a group, each with reason and source."""
    lines: List[str] = []
    for value in values:
        if value.group == group:
            shown = '\n      '.join(value.value) if isinstance(value.value, list) else value.value
            lines.append("  %s = %s" % (value.name, shown))
            facts = [('for', ', '.join(value.easyblocks)), ('when', ' = '.join(value.when or ())),
                     ('reason', value.reason), ('source', value.source)]
            lines += [wrapped(text, '      %-7s ' % (label + ':'), ' ' * 14, width=112)
                      for label, text in facts if text]
    return lines


def everything(site: Any) -> str:
    """One site with everything in its file."""
    facts = [(key, getattr(site, key)) for key in ('centre', 'url', 'scheduler', 'processor', 'gpu', 'gpus_per_node',
                                                   'network', 'source')]
    facts += [('recognised by', ', '.join(pattern for _, pattern in site.rules)), ('PyTorch there', site.pytorch),
              ('based on', site.evidence), ('not published', site.missing), ('file', site.path)]
    lines = ["%s: %s" % (site.name, site.title)]
    lines += [wrapped(text, '  %-15s' % (key + ':'), ' ' * 17, width=112) for key, text in facts if text]
    for name, roles in site.generations.items():
        lines += ["", "Modules, generation %s%s:" % (name, ' (default)' if 'default' in roles else '')]
        lines += ["  %s = %s" % item for item in roles.items() if item[0] != 'default']
    if not (site.env or site.parameters):
        lines += ["", "This site sets no values."]
    for what, values in (("Environment variables in the module of PyTorch", site.env),
                         ("Easyconfig parameters", site.parameters)):
        found = value_lines(values)
        lines += ["", what + ":"] + found if found else []
    for group in site.groups.values():
        lines += ["", "Group %s (opt-in: slingtorch env --with %s): %s" % (group.name, group.name, group.title)]
        lines += ["  %-7s %s" % (key + ':', getattr(group, key)) for key in ('needs', 'reason', 'source')]
        lines += value_lines(site.env + site.parameters, group=group.name)
    if site.references:
        lines += ["", "Expected network performance (slingtorch bench --site %s):" % site.name]
    for entry in site.references:
        lines.append("  %s %s of %s on %s x %s ranks: %s GB/s of bus bandwidth, tolerance %s\n      source: %s" % (
            entry.backend, entry.operation, entry.size, entry.nodes, entry.ranks_per_node, entry.bus_bandwidth,
            entry.tolerance, entry.source))
    return '\n'.join(lines) + '\n'


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace('\\', '\\\\').replace('|', '\\|').replace('<', '&lt;')


def overview(sites: Sequence[Any]) -> str:
    """A table of all sites for documentation."""
    lines = ['| site | system | GPUs per node | network | scheduler | PyTorch there | based on |',
             '|---|---|---|---|---|---|---|']
    for site in sites:
        gpus = '0' if site.gpu == 'none' else '%s %s' % (site.gpus_per_node, KINDS_OF_GPUS.get(site.gpu, site.gpu))
        if site.processor != 'x86_64':
            gpus += ', ' + site.processor
        lines.append('| %s |' % ' | '.join(map(cell, ('`%s`' % site.name, site.title, gpus, site.network,
                                                      site.scheduler, site.pytorch, site.evidence))))
    return '\n'.join(lines) + '\n'
