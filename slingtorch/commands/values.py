# SPDX-License-Identifier: GPL-2.0-only
"""'slingtorch env --values': sets what a PyTorch module would set, for the PyTorch of the active `python`.

PyTorch is not imported: only its files are read. Messages report what differs from a module.
"""
import glob
import json
import os
import re
import shutil
import subprocess
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from slingtorch import sites
from slingtorch.job import elf, look, nccl
from slingtorch.job.findings import Report
from slingtorch.job.machine import Machine
from slingtorch.sites.formats import KINDS_OF_GPUS, NET

# what the active Python would import by its own rules, as in a job, but not from the working directory
PROBE = '''
import importlib.util, json, site, sys
def where(name):
    try:
        return list(importlib.util.find_spec(name).submodule_search_locations)[0]
    except (AttributeError, ImportError, IndexError, TypeError, ValueError):
        return None
print(json.dumps(dict({name: where(name) for name in ("torch", "mpi4py", "horovod")}, python=sys.executable,
                      prefix=sys.prefix, home=site.getusersitepackages())))
'''
# where environments of wheels and of conda have NCCL or RCCL
NCCLS = ('%(torch)s/lib/lib[nr]ccl.so*', '%(torch)s/../nvidia/nccl/lib/libnccl.so*',
         '%(torch)s/../_rocm_sdk_*/lib/librccl.so*', '%(prefix)s/lib/lib[nr]ccl.so*')
# options of Apptainer and Singularity, as variables
FOR_GPUS = {'cuda': 'NV', 'rocm': 'ROCM'}


class OwnPyTorch:
    """The PyTorch of the active `python`: environment, kind (cuda, rocm or None), toolkit (its version), report."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.report = machine, Report(0)
        self.found, self.problem = {}, ''  # type: Dict[str, Any], str
        python = shutil.which('python', path=machine.environ.get('PATH'))
        if not python:
            self.problem = "PATH has no 'python'"
        else:
            said = ''
            try:
                # a wrapper may print what it likes
                done = subprocess.run([python, '-c', PROBE], cwd='/', env=machine.environ, stdin=subprocess.DEVNULL,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
                                      errors='replace')
                said = done.stderr.strip()[-300:] or "it ended with status %d" % done.returncode
                self.found = dict(json.loads(done.stdout.splitlines()[-1]))
            except (IndexError, OSError, TypeError, ValueError) as err:
                self.problem = "%s does not run: %s" % (python, said or err)
            if not self.found.get('torch'):
                self.problem = self.problem or "%s has no PyTorch" % python
        if self.found.get('torch'):
            look.look_at_torch(machine, self.report, self.found['torch'], self.found['home'])
        toolkits = {'cuda': self.fact('CUDA of torch'), 'rocm': self.fact('ROCm of torch')}
        self.kind = next((kind for kind, text in toolkits.items() if text), None)
        self.toolkit = toolkits.get(self.kind or '', '')

    def fact(self, name: str) -> str:
        """A value from torch's version.py; '' for none."""
        value = self.report.value(name) or ''
        return '' if value in ('none', 'not known') else value

    def what(self) -> str:
        """A description for the user."""
        return self.problem or "PyTorch %s for %s, in %s" % (
            self.fact('torch'), '%s %s' % (sites.NAMES_OF_GPUS[self.kind], self.toolkit) if self.kind else 'processors',
            self.found['python'])

    def nccls(self) -> List[str]:
        """The NCCL or RCCL libraries of this PyTorch."""
        places = {key: glob.escape(self.found[key]) for key in ('torch', 'prefix')}
        return [path for pattern in NCCLS for path in sorted(glob.glob(pattern % places))]


def module_values(site: Any, groups: Iterable[str]) -> Dict[str, str]:
    """The site's values that a module of a PyTorch wheel would set: {variable: value}."""
    return {value.name: value.value for value in site.env_values(groups).values()
            if not value.when and (not value.easyblocks or 'PythonVenv' in value.easyblocks)}


def in_front(entries: Iterable[str], before: Optional[str], separator: str) -> str:
    """A list with these entries first, without duplicates."""
    return separator.join(dict.fromkeys(list(entries) + [entry for entry in (before or '').split(separator) if entry]))


def variables(root: str, site: Any, groups: Iterable[str], own: OwnPyTorch) -> List[Tuple[str, Optional[str]]]:
    """What a module would set for a bundle at this root: (name, value), None to unset."""
    environ, scripts = own.machine.environ, os.path.join(root, 'runscripts')
    found = [(name, scripts) for name in ('RUNSCRIPTS', 'RUNSCRIPTSPYTORCH')]  # type: List[Tuple[str, Optional[str]]]
    found += [('PATH', in_front([scripts], environ.get('PATH'), ':'))]
    # what NCCL needs between nodes would stop a PyTorch without NCCL
    found += sorted((name, value) for name, value in module_values(site, groups).items()
                    if name != NET or own.kind or own.problem)
    found += [('SLINGTORCH_CUDA_VERSION', own.toolkit if own.kind == 'cuda' else None)]
    # other projects' images start with an empty environment and see few directories
    binds = site.parameter_values(groups).get('bind_paths')
    paths = [root] + [path for path in (binds.value if binds else []) if os.path.exists(path.split(':')[0])]
    for runtime in ('APPTAINER', 'SINGULARITY'):
        found += [(runtime + '_BINDPATH', in_front(paths, environ.get(runtime + '_BINDPATH'), ',')),
                  (runtime + 'ENV_PREPEND_PATH', in_front([scripts], environ.get(runtime + 'ENV_PREPEND_PATH'), ':'))]
        if site.gpu in FOR_GPUS:
            found.append(('%s_%s' % (runtime, FOR_GPUS[site.gpu]), '1'))
    return found


def plugin_remedy(site: Any, own: OwnPyTorch) -> str:
    """Commands for the site's NCCL plugin for the CUDA or ROCm of this PyTorch, or a text that there is none."""
    fitting, others = [], []  # type: List[str], List[str]
    for generation, roles in site.generations.items():
        version = site.toolkit(generation)
        if 'nccl_plugin' in roles and version:
            if site.gpu == own.kind and version.split('.')[0] == own.toolkit.split('.')[0]:
                fitting.append(generation)
            else:
                others.append('%s %s' % (sites.NAMES_OF_GPUS.get(site.gpu, ''), version))
    if not fitting:
        return "the site's file names none for %s %s%s; docs/easyconfigs.md explains how to build one" % (
            sites.NAMES_OF_GPUS[own.kind or ''], own.toolkit, ' (it has %s)' % ', '.join(others) if others else '')
    generation = next((name for name in fitting if 'default' in site.generations[name]), fitting[0])
    parts = site.provided(generation, 'nccl_plugin', 'slingtorch env --values')
    if not parts['eb']:
        return "the site has it: module load %s" % parts['module']
    suffix = site.suffix(generation)
    return "build it once ('eval \"$(slingtorch env)\"' in another shell first): %seb --robot %s.eb; then in " \
        "this shell: module load %s%s" % ('%s=%s ' % (sites.GENERATION_VARIABLE, generation) if suffix else '',
                                          str(parts['module']).replace('/', '-'), parts['module'], suffix)


def check_plugin(report: Report, path: str, nccls: List[str]) -> None:
    """Compare the plugin's symbols with those that NCCL looks for, and its runtime with torch's."""
    try:
        library = elf.Library(path)
        apis, needed = nccl.interfaces(library.exported()), library.needed()
    except (OSError, ValueError) as err:
        report.add('yellow', 'plugin', "cannot read %s: %s" % (path, err), "install the plugin again")
        return
    if not apis:
        report.add('yellow', 'plugin', "%s is not a network plugin: it has no %s*" % (path, nccl.INTERFACE),
                   "name the plugin itself in NCCL_NET_PLUGIN")
        return
    for name in needed:
        runtime = re.match(r'(libcudart|libamdhip64)\.so\.(\d+)', name)
        fact = 'CUDA of torch' if name.startswith('libcuda') else 'ROCm of torch'
        major = report.value(fact, '').partition('.')[0]
        if runtime and major.isdigit() and runtime.group(2) != major:
            report.add('yellow', 'plugin', "%s needs %s, but torch is for %s %s" % (
                path, name, runtime.group(1), major), "load the plugin that was built for torch's release")
    other = next(elf.readable(nccls), None)
    loads = nccl.interfaces(other.names(nccl.INTERFACE)) if other else []
    if not other or not loads:
        report.add('untested', 'plugin', "whether NCCL can load %s (v%d to v%d): no NCCL shows it"
                   % (path, apis[0], apis[-1]))
    elif not set(apis) & set(loads):
        report.add('yellow', 'plugin', "%s has the interfaces v%d to v%d, but %s loads only v%d to v%d" % (
            path, apis[0], apis[-1], other.path, loads[0], loads[-1]),
            "use a plugin for this NCCL: without one, NCCL runs over TCP")
    else:
        report.add('good', 'plugin', "%s has an interface that %s loads" % (path, other.path))


def differences(site: Any, own: OwnPyTorch, values: Mapping[str, Optional[str]]) -> List[str]:
    """Messages about what differs from a module."""
    machine, said = own.machine, []  # type: Machine, List[str]
    before = machine.environ
    mine = ['%s=%s' % (name, before[name]) for name, value in values.items()
            if value and before.get(name, value) != value and 'PATH' not in name]
    if mine:
        said.append("replaced, as a module would: %s. Export yours after this line" % ', '.join(mine))
    if before.get('EBROOTPYTORCH'):
        said.append("a PyTorch module is loaded (%s), and it needs no --values. To use your own PyTorch, run 'module "
                    "unload PyTorch', then this again" % before['EBROOTPYTORCH'])
    if own.problem:
        return said + ["activate your environment, or load its module, and run this again; for a container image of "
                       "another project nothing is missing"]
    wanted = site.gpu if site.gpu in sites.NAMES_OF_GPUS else next((vendor for _, _, vendor in machine.gpus()), None)
    if wanted and own.kind != wanted:
        said.append("this PyTorch is for %s, but the GPUs of this machine are %s's: it cannot use them" % (
            sites.NAMES_OF_GPUS.get(own.kind or '', 'processors'), KINDS_OF_GPUS[wanted]))
    # the environment with the new values
    machine = Machine({**before, **{name: value for name, value in values.items() if value}}, root=machine.root)
    plugins = nccl.plugin_files(machine) if own.kind else []
    if plugins:
        check_plugin(own.report, plugins[0], own.nccls())
    elif own.kind and values.get(NET):
        said.append("NCCL's network plugin is missing, and jobs of several nodes fail without it: "
                    + plugin_remedy(site, own))
    said += ["%s: %s%s" % (name, text, '; ' + remedy if remedy else '')
             for _, name, text, remedy, _ in own.report.sorted()]
    mpis = [name for name in ('mpi4py', 'horovod') if own.found[name]]
    if mpis and not before.get('SLINGTORCH_MPI'):
        said.append("%s is installed and uses an MPI that must understand your launcher: with 'export "
                    "SLINGTORCH_MPI=auto' each rank checks this" % ' and '.join(mpis))
    return said
