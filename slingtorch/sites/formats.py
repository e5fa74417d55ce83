# SPDX-License-Identifier: GPL-2.0-only
"""
slingtorch sites NAME --format: a site's values for people who do not use the modules, each with its reason.

What is printed comes from the site's file alone: lines that a shell and --env-file read (env), or a page for
documentation (markdown; without NAME a table of all sites).
"""
from typing import Any, Iterable, List, Sequence

from slingtorch import wrapped

FORMATS = ('env', 'markdown')

Names = Sequence[str]   # of opt-in groups; a site is a Site of slingtorch/sites

# what the runscript makes of this one, others need too
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
            lines += comment("for jobs of several nodes only, since a file has no conditions: " + value.reason)
            lines += ['#NCCL_NET=%s' % value.value]
        elif value.name.startswith(OWN):
            own.append(value.name)
        else:
            lines += comment(value.reason) + ['# %s: %s' % (CONDITION % value.when, line) if value.when else line]
    left_out = comment("left out, since only slingtorch's runscripts read them: %s" % ', '.join(own)) if own else []
    return lines + left_out


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
    """The text of a site in one of FORMATS, with these opt-in groups."""
    # groups that exclude each other, and names that are none
    site.check_groups(names, asked_by='--group')
    return '\n'.join((markdown if form == 'markdown' else env_file)(site, names)) + '\n'
