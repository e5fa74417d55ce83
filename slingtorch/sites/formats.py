# SPDX-License-Identifier: GPL-2.0-only
"""
slingtorch sites NAME --format: prints a site's values, with reasons, for people who do not use the modules.

The output depends only on the site's file: lines for a shell and for --env-file (env), or a documentation page
(markdown; without NAME a table of all sites).
"""
from typing import Any, Iterable, List, Sequence

from slingtorch import wrapped

FORMATS = ('env', 'markdown')

Names = Sequence[str]   # of opt-in groups; a site is a Site of slingtorch/sites

# the runscript sets NCCL_NET from this variable; without the runscript, users must do so
NET = 'SLINGTORCH_MULTINODE_NCCL_NET'
# variables that only the runscripts read
OWN = 'SLINGTORCH_'
KINDS_OF_GPUS = {'cuda': 'NVIDIA', 'rocm': 'AMD', 'xpu': 'Intel'}
CONDITION = 'only for software with %s = %s'


def comment(text: str) -> List[str]:
    """Text as comment lines."""
    return wrapped(text, '# ', '# ').splitlines()


def env_file(site: Any, names: Names) -> List[str]:
    """Lines for --env-file of podman, docker, apptainer and singularity: no quotes, no conditions."""
    lines = comment("%s: values for PyTorch, from slingtorch's site '%s' (%s)" % (site.title, site.name, site.source))
    for group in site.check_groups(names):
        lines += comment("group %s: %s; needs %s" % (group.name, group.title, group.needs))
    own = []
    for value in site.env_values(names).values():
        line = '%s=%s' % (value.name, value.value)
        if value.name == NET:
            lines += comment("only for jobs of several nodes; a file cannot have conditions: " + value.reason)
            lines += ['#NCCL_NET=%s' % value.value]
        elif value.name.startswith(OWN):
            own.append(value.name)
        else:
            lines += comment(value.reason) + ['# %s: %s' % (CONDITION % value.when, line) if value.when else line]
    left_out = comment("omitted, because only slingtorch's runscripts read them: %s" % ', '.join(own)) if own else []
    return lines + left_out


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace('\\', '\\\\').replace('|', '\\|').replace('<', '&lt;')


def about(site: Any) -> List[str]:
    """A description of a site, as lines of a Markdown list."""
    gpus = '%s per node' % site.gpus_per_node if site.gpus_per_node.isdigit() else 'any number'
    facts = [('centre', '[%s](%s)' % (site.centre, site.url)),
             ('GPUs', 'none' if site.gpu == 'none' else '%s, %s' % (KINDS_OF_GPUS.get(site.gpu, site.gpu), gpus)),
             ('network', site.network), ('scheduler', site.scheduler), ('processor', site.processor),
             ('recognised by', ', '.join('`%s`' % pattern for _, pattern in site.rules)),
             ('PyTorch there', site.pytorch), ('based on', site.evidence), ('not published', site.missing)]
    return wrapped_list('%s: %s' % (name, text) for name, text in facts if text)


def wrapped_list(entries: Iterable[str]) -> List[str]:
    """A Markdown list."""
    return [line for entry in entries for line in wrapped(cell(entry), '* ', '  ').splitlines()]


def provided(site: Any) -> List[str]:
    """Markdown lists of a site's modules and groups."""
    lines: List[str] = []
    for name, roles in site.generations.items():
        shown = ', '.join('%s `%s`' % (role, text) for role, text in roles.items() if role != 'default')
        lines += wrapped_list(['generation %s%s: %s' % (name, ' (default)' if 'default' in roles else '', shown)])
    groups = wrapped_list('`%s`: %s; needs %s' % (group.name, group.title, group.needs)
                          for group in site.groups.values())
    return (['', 'Modules:', ''] + lines if lines else []) + (['', 'Opt-in groups:', ''] + groups if groups else [])


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


def markdown(site: Any, names: Names) -> List[str]:
    """A documentation page: a description of the site, its values, modules and groups."""
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
    """The text of a site in one of FORMATS, with these opt-in groups."""
    # raises an error for unknown groups
    site.check_groups(names, asked_by='--group')
    return '\n'.join((markdown if form == 'markdown' else env_file)(site, names)) + '\n'
