# SPDX-License-Identifier: GPL-2.0-only
"""Which libraries NCCL and RCCL load, which interfaces they look for, and which network their log names."""
import os
import re

from . import elf
from .kinds import Any, Machine, MutableMapping, Optional
from .machine import NET_PLUGINS, library_kind

# symbol of a network plugin, followed by the number of its interface
INTERFACE = 'ncclNetPlugin_v'


def find_library(machine: 'Machine', name: str) -> 'Optional[str]':
    """The first file of this name in LD_LIBRARY_PATH or the system's directories; or None."""
    for directory in machine.environ.get('LD_LIBRARY_PATH', '').split(':'):
        path = os.path.join(directory, name)
        if directory and os.path.exists(path):
            return path
    found = re.search(r'(/[^\0]*/%s)\0' % re.escape(name), machine.read('etc/ld.so.cache'))
    return found.group(1) if found else None


def plugin_names(machine: 'Machine') -> list:
    """
    The names that NCCL or RCCL passes to dlopen(3) for its network plugin, in its order; [] if NCCL_NET_PLUGIN says
    none. From NCCL's src/plugin/plugin_open.cc of v2.30.7-1; lists are allowed since 2.27.
    """
    wanted = machine.environ.get('NCCL_NET_PLUGIN', '')
    if wanted.lower() in ('none', 'static_plugin'):
        return []
    names = [[word] if '/' in word else [word, 'libnccl-net-%s.so' % word] for word in wanted.split(',') if word]
    return sum(names, []) or list(NET_PLUGINS)


def plugin_files(machine: 'Machine') -> list:
    """The paths of those in plugin_names() that exist."""
    paths = [(name if os.path.exists(name) else None) if '/' in name else find_library(machine, name)
             for name in plugin_names(machine)]
    return list(filter(None, paths))


def interfaces(names: set) -> list:
    """The numbers of a plugin's interfaces among these names, in order."""
    found = (re.match(INTERFACE + r'(\d+)$', name) for name in names)
    return sorted(int(match.group(1)) for match in found if match)


def refuses_to_share(paths: list) -> bool:
    """Whether an NCCL or RCCL among these libraries refuses two ranks on one GPU (src/init.cc to 2.29, and since)."""
    found = elf.readable(path for path in paths if library_kind(path) in ('libnccl', 'librccl'))
    return any(library.match(re.compile(b'Duplicate GPU detected|sing the same GPU')) for library in found)


def log_into(environ: 'MutableMapping[str, str]', log: 'Any') -> None:
    """Let NCCL log to this file. Errors do not end the process: whoever tries the network reports them."""
    environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING='0', NCCL_ASYNC_ERROR_HANDLING='0', NCCL_DEBUG='INFO',
                   NCCL_DEBUG_SUBSYS='INIT,NET',
                   NCCL_DEBUG_FILE='/proc/self/fd/%d' % log.fileno() if log else os.devnull)


def heard(log: 'Any') -> dict:
    """
    The 'network', libfabric's 'provider' and what is wrong with the 'plugin' in NCCL's log; None for what it does not
    name.
    """
    log.seek(0)
    text = log.read().decode(errors='replace')
    return {name: (re.findall('(?m)' + pattern, text) or [None])[-1] for name, pattern in (
        ('network', r'Using network (.+?)\s*$'), ('provider', r'Selected [Pp]rovider is ([^,\s]+)'),
        # NCCL's src/plugin/plugin_open.cc: names that no directory has, or what dlopen(3) says of a file
        ('plugin', r'NET/Plugin ?: (Could not find:.+|.*No plugin found.*|Plugin load .*returned.+|'
                   r'.*cannot open shared object.*|.*undefined symbol.*|Failed to find ncclNetPlugin symbol.*)'))}
