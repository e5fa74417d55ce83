# SPDX-License-Identifier: GPL-2.0-only
"""
EasyBuild hooks of slingtorch: they add the values of this machine's site, and refuse easyconfigs for another site.

Sites are data, in sites/*.cfg (see docs/sites.md); no site is named in this file.

Only EasyBuild's hooks may have a name in this file that ends in '_hook'.
"""
import functools
import os
import re
import sys
import tempfile
from typing import Any, Dict, List, Tuple

from easybuild.framework.easyconfig.constants import EASYCONFIG_CONSTANTS
from easybuild.framework.easyconfig.default import DEFAULT_CONFIG, DEPENDENCIES, OTHER
from easybuild.framework.easyconfig.easyconfig import get_easyblock_class, robot_find_easyconfig
from easybuild.tools import version as easybuild_version
from easybuild.tools.build_log import EasyBuildError, print_msg, print_warning
from easybuild.tools.config import build_option
from easybuild.tools.include import include_easyblocks

# EasyBuild archives only this file (reprod/hooks beside an installation); the rest is then that of the active bundle.
ROOTS = [os.path.dirname(os.path.dirname(os.path.realpath(path)))
         for path in (__file__, os.environ.get('EASYBUILD_HOOKS') or __file__)]
try:
    # easyblocks make slingtorch importable, but eb --include-easyblocks=... replaces the bundle's
    if 'easybuild.easyblocks.generic._bundle' not in sys.modules:
        include_easyblocks(None, [file for file in (root + '/easyblocks/generic/_bundle.py' for root in ROOTS)
                                  if os.path.isfile(file)])
    from slingtorch import sites
except (ImportError, EasyBuildError) as error:
    # an EasyBuildError would end in a traceback: hooks are loaded before eb handles errors (easybuild/main.py)
    sys.exit("ERROR: %s cannot be used by itself (%s), because it is part of the bundle slingtorch. Activate the "
             "bundle, if possible in the version of that installation, and run the same command again: "
             "eval \"$(slingtorch env)\""
             % (__file__, error))
TOO_OLD = sites.old_easybuild(easybuild_version.VERSION, easybuild_version.__file__)
if TOO_OLD:
    sys.exit("ERROR: " + TOO_OLD)

# parameters of every easyconfig, whatever its easyblock
DEFAULT_CONFIG.update({
    'only_site': [None, "Name of the only site that this easyconfig is for", OTHER],
    'site_dependencies': [None, "Roles whose modules the site provides: 'gpu'; 'nccl?', if the site may have none; "
                                "'run conda', also needed at run time if the site has 'build'", DEPENDENCIES],
    'site_generation': [None, "Generation of the site's modules (default: the site's default)", OTHER],
})
EXTERNAL_MODULE = EASYCONFIG_CONSTANTS['EXTERNAL_MODULE'][0]

# These get the site's values for NCCL or RCCL, libfabric and MPI; without them PyTorch runs over TCP, or hangs
# (https://github.com/HewlettPackard/shs-ccl-docs, and the site files with their sources). This bundle's easyblocks also
# add them to PyTorch under another name ('slingtorch new'). In an image with PyTorch, Horovod is separate software.
WITH_SITE_VALUES = ('Horovod', 'PyTorch')

# messages about what was added to easyconfigs: {path: message}
_ADDED: Dict[str, str] = {}
# why parsed easyconfigs cannot run on this site; raised only when they are installed: {path: message}
_REFUSED: Dict[str, str] = {}


# ----------------------------------------------------------------------------------------------------------------------
# the site

@functools.lru_cache(maxsize=None)
def chosen_site() -> sites.Site:
    """
    Return the site, as a sites.Site.

    The site is chosen once per run: modules that are loaded during an installation must not change it.
    """
    try:
        choice = sites.choose()
        # report a wrong group name now, not at the first PyTorch
        choice.site.check_groups(sites.chosen_groups())
    except sites.SiteError as err:
        raise EasyBuildError("slingtorch: %s", err)
    if choice.warning:
        print_warning("slingtorch: %s", choice.warning, silent=build_option('silent'))
    return choice.site


def wanted_groups(ec: Any, site: sites.Site) -> List[str]:
    """Names of the opt-in groups, from the environment and the easyconfig parameter site_groups."""
    groups = sites.chosen_groups()
    if 'site_groups' in ec:
        of_easyconfig = ec['site_groups'] or []
        if not isinstance(of_easyconfig, (list, tuple)):
            raise EasyBuildError("Easyconfig parameter site_groups in %s is not a list: write site_groups = ['%s']",
                                 ec.path, of_easyconfig)
        site.check_groups(of_easyconfig, asked_by="Easyconfig parameter site_groups in %s" % ec.path)
        groups.extend(group for group in of_easyconfig if group not in groups)
    return groups


def with_site_values(ec: Any) -> bool:
    """Whether an easyconfig gets the site's variables; the parameter site_digest shows the easyblock RunScripts."""
    return ec.name in WITH_SITE_VALUES or 'site_digest' in ec


def applies(value: sites.Value, ec: Any, easyblocks: List[str]) -> bool:
    """Whether a value of the site is for this easyblock, and its condition fits the easyconfig."""
    if value.easyblocks and not set(value.easyblocks).intersection(easyblocks):
        return False
    if value.when:
        parameter, wanted = value.when
        return parameter in ec and str(ec[parameter]) == wanted
    return True


def easyblocks_of(ec: Any) -> List[str]:
    """Names of the easyblock's class and its base classes."""
    return [cls.__name__ for cls in get_easyblock_class(ec.easyblock, name=ec.name).__mro__]


def add_site_parameters(ec: Any, groups: List[str]) -> List[str]:
    """Add the site's parameter values that the easyconfig does not set itself; return the added names."""
    site, added = chosen_site(), []
    easyblocks, easyconfig_values = easyblocks_of(ec), ec.parser.get_config_dict(validate=False)
    for name, value in site.parameter_values(groups).items():
        if name in ec and name not in easyconfig_values and applies(value, ec, easyblocks):
            ec[name] = list(value.value) if isinstance(value.value, list) else value.value
            added.append(name)
    return added


def add_site_values(ec: Any) -> None:
    """
    Add the site's values to an easyconfig; the easyconfig's own values stay.

    Environment values become entries of modextravars with pushenv, so that unloading the module restores the user's own
    value. Other values become easyconfig parameters of that name, if the easyblock knows them. site_name and site_gpu
    are set to the name and GPUs of the site, site_groups to all groups, and site_digest to a digest of the values.
    """
    site = chosen_site()
    try:
        groups = wanted_groups(ec, site)
        env_values = site.env_values(groups)
        added = add_site_parameters(ec, groups)
    except sites.SiteError as err:
        raise EasyBuildError("slingtorch: %s", err)

    easyblocks = easyblocks_of(ec)
    easyconfig_values = ec.parser.get_config_dict(validate=False)
    # so that an easyblock can refuse an easyconfig for another site or other GPUs
    for parameter, word in [('site_name', site.name), ('site_gpu', site.gpu), ('site_digest', site.digest(groups))]:
        if parameter in ec and parameter not in easyconfig_values:
            ec[parameter] = word
    if 'site_groups' in ec:
        ec['site_groups'] = groups

    # a new dictionary, because the default one is shared with other easyconfigs
    modextravars = dict(ec['modextravars'])
    for name, value in env_values.items():
        if name not in modextravars and applies(value, ec, easyblocks):
            modextravars[name] = {'value': value.value, 'pushenv': True}
            added.append(name)
    if added:
        ec['modextravars'] = modextravars
        msg = "slingtorch: site %s: %s: %d site values (%s)" % (
            site.name, file_name(ec), len(added), ', '.join(added))
        for name in groups:
            msg += "; group %s, which needs: %s" % (name, site.groups[name].needs)
        _ADDED[ec.path] = msg


def file_name(ec: Any) -> str:
    """Name of an easyconfig's file; its software's if EasyBuild parses a copy, which has no path."""
    return os.path.basename(ec.path or ec.name)


def generation_of(ec: Any, site: sites.Site) -> str:
    """The generation of modules for an easyconfig: from its file name, else its parameter, the user or the site."""
    name = file_name(ec)
    for generation in site.generations:
        if site.suffix(generation) and name == '%s-%s%s.eb' % (ec.name, ec.version, site.suffix(generation)):
            return generation
    return site.generation(ec['site_generation'] or os.environ.get(sites.GENERATION_VARIABLE), name)


def link_easyconfig(name: str, version: str, suffix: str) -> None:
    """Let the robot find NAME-VERSION.eb also under the name for a generation; generation_of() reads that name."""
    path = robot_find_easyconfig(name, version)
    if path and not robot_find_easyconfig(name, version + suffix):
        directory = tempfile.mkdtemp(prefix='generation-')
        os.symlink(path, os.path.join(directory, '%s-%s%s.eb' % (name, version, suffix)))
        build_option('robot_path').append(directory)


def site_entries(ec: Any) -> List[Tuple[str, bool, bool]]:
    """Entries of site_dependencies: (role, whether it may be missing, whether it is always needed at run time)."""
    entries = ec['site_dependencies']
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
        raise EasyBuildError("site_dependencies in %s is %r, but must be a list of roles, such as ['compiler', "
                             "'nccl?', 'run conda']", ec.path, entries)
    return [(re.sub(r'^run |\?$', '', entry), entry.endswith('?'), entry.startswith('run ')) for entry in entries]


def add_site_dependencies(ec: Any) -> None:
    """
    Add the site's modules for the roles in site_dependencies; the easyconfig's own dependencies stay.

    An easyconfig without a versionsuffix gets that of the generation, if the site has several and the easyconfig needs
    something of the generation at run time. The parameter is emptied, so that an easyconfig that EasyBuild writes
    (reprod/) has the dependencies themselves.
    """
    site, asked_by = chosen_site(), file_name(ec)
    own = [dep[0].split('/')[0] for key in ('dependencies', 'builddependencies') for dep in ec[key]]
    # modules and software to install, each for run time and for the build only
    found: Dict[Tuple[str, bool], List[Any]] = {(kind, build): [] for kind in ('', 'eb') for build in (False, True)}
    try:
        generation = generation_of(ec, site)
        suffix, provides = site.suffix(generation), site.generations[generation]
        # the modules of this role make the others visible, so they come first
        first = [(role, False, False) for role in sites.ROLES[:1] if role in provides]
        for role, optional, run_time in first + site_entries(ec):
            if role not in provides and role in sites.ROLES and optional:
                continue
            parts = site.provided(generation, role, asked_by)
            build, module = bool(parts['build']) and not run_time, str(parts['module'])
            if parts['eb']:
                # a Python of conda-forge does not depend on the generation
                add_software(found['eb', build], own, tuple(module.split('/', 1)), '' if role == 'python' else suffix)
            elif module.split('/')[0] not in own and not any((module, EXTERNAL_MODULE) in deps
                                                             for deps in found.values()):
                found['', build].append((module, EXTERNAL_MODULE))
        if any(role == 'nccl_plugin' and role in provides for role, _, _ in site_entries(ec)):
            refuse_other_gpu(ec, site, generation)
    except sites.SiteError as err:
        raise EasyBuildError("slingtorch: %s", err)
    at_run_time = found['', False][len(first):] + list(ec['dependencies']) + found['eb', False]
    if first and not at_run_time:
        found['', True][:0], found['', False] = found['', False], []
    ec['dependencies'] = found['', False] + list(ec['dependencies']) + found['eb', False]
    ec['builddependencies'] = found['', True] + list(ec['builddependencies']) + found['eb', True]
    ec['site_dependencies'] = None
    if not ec['versionsuffix'] and at_run_time:
        ec['versionsuffix'] = suffix


def refuse_other_gpu(ec: Any, site: sites.Site, generation: str) -> None:
    """Record an error if a wheel and the plugin of this generation are for different CUDA or ROCm versions."""
    wheel = re.match(r'-(cuda|rocm)-(\d+)', ec['versionsuffix'])
    module = sites.split_provided(site.generations[generation].get('gpu', '')).get('module')
    entry = site.modules().get(module or '')
    if wheel and entry:
        own = '%s %s' % (sites.NAMES_OF_GPUS[wheel.group(1)], wheel.group(2))
        version = entry.get('version', [''])[0]
        if [entry['name'][0], version.split('.')[0]] != own.split():
            _REFUSED[ec.path] = (
                "slingtorch: %s is for %s, but this site's network plugin is for %s %s (%s): one process cannot have "
                "both. Use an easyconfig for the latter ('eb --search PyTorch-'), or another generation: export %s=NAME"
                % (os.path.basename(ec.path), own, entry['name'][0], version, site.role_of(str(module)),
                   sites.GENERATION_VARIABLE))


def add_software(dependencies: List[Any], own: List[str], software: Tuple[str, ...], suffix: str) -> None:
    """Add software that `--robot` installs for a generation of modules, unless the easyconfig already names it."""
    name, (version, dash, of_version) = software[0], software[1].partition('-')
    of_version = dash + of_version or suffix
    if name not in own:
        link_easyconfig(name, version, of_version)
        dependencies.append((name, version, of_version))


def refuse_other_site(self: Any) -> None:
    """
    Refuse to install easyconfigs for another site, because the modules they need would be missing.

    This checks all software: with --robot, PyTorch is not the first of a stack. Fetching sources is allowed anywhere.
    """
    if self.dry_run or build_option('stop') == 'fetch':
        return
    only, here = self.cfg['only_site'], chosen_site().name
    if only and only != here:
        raise EasyBuildError("%s is for the site '%s', but this is the site '%s', which lacks the modules. Use an "
                             "easyconfig of this site ('eb --search %s'), or copy this one and change its dependencies "
                             "and only_site. If this machine is '%s' but was not recognised: export %s=%s",
                             os.path.basename(self.cfg.path), only, here, self.name, only,
                             sites.SITE_VARIABLE, only)
    if self.cfg.path in _REFUSED:
        raise EasyBuildError(_REFUSED[self.cfg.path])
    if self.cfg['site_dependencies'] and not all(optional for _, optional, _ in site_entries(self.cfg)):
        # the parse hook has found no modules
        try:
            chosen_site().generation(None, os.path.basename(self.cfg.path))
        except sites.SiteError as err:
            raise EasyBuildError("slingtorch: %s", err)


# ----------------------------------------------------------------------------------------------------------------------
# the hooks of EasyBuild

def parse_hook(ec: Any, *args: Any, **kwargs: Any) -> None:
    """EasyBuild calls this for every easyconfig that it parses."""
    own = [dep for key in ('dependencies', 'builddependencies') for dep in ec[key]]
    if ec['site_dependencies'] or any(EXTERNAL_MODULE in dep for dep in own):
        # name, version and prefix of the site's modules, unless a metadata file of EasyBuild gives them
        for module, entry in chosen_site().modules().items():
            build_option('external_modules_metadata').setdefault(module, entry)
    # for other sites pre_easyblock_hook raises the error: fetching and checksums must work on any machine
    if ec['site_dependencies'] and chosen_site().generations and ec['only_site'] in (None, chosen_site().name):
        add_site_dependencies(ec)
        if not with_site_values(ec):
            add_site_parameters(ec, [])
    if with_site_values(ec):
        add_site_values(ec)


def pre_easyblock_hook(self: Any, *args: Any, **kwargs: Any) -> None:
    """EasyBuild calls this before an installation."""
    refuse_other_site(self)
    # only now, because eb parses an easyconfig several times, and others for --try-*
    if self.cfg.path in _ADDED:
        print_msg(_ADDED.pop(self.cfg.path), silent=build_option('silent'))


def post_prepare_hook(self: Any, *args: Any, **kwargs: Any) -> None:
    """EasyBuild calls this after loading dependencies: check that each module sets the variable for its prefix."""
    for module, entry in chosen_site().modules().items():
        variable = build_option('external_modules_metadata').get(module, entry).get('prefix', '/').split('/')[0]
        if variable and variable not in os.environ and not self.dry_run and \
                module in [dep['full_mod_name'] for dep in self.cfg.dependencies() if dep['external_module']]:
            raise EasyBuildError("The module %s does not set the variable $%s, which %s names as its prefix. Look at "
                                 "what the module sets ('module show %s'), and correct that line: use a variable of "
                                 "the module, or the path itself",
                                 module, variable, chosen_site().role_of(module), module)


def fail_hook(error: EasyBuildError) -> None:
    """EasyBuild calls this on an error: print where the name of a missing module comes from, or how to remove a stale
    lock."""
    lock = re.search(r'Lock (.+?) already exists', error.msg)
    if lock:
        print_warning("slingtorch: another eb is installing this, or a killed eb left its lock. If no such eb is "
                      "running, on this host or another one: rmdir '%s'. To wait for another eb: "
                      "--wait-on-lock-limit=3600", lock.group(1))
    for module in sorted(set(re.findall(r'[\w.+-]+(?:/[\w.+-]+)*', error.msg))):
        line = chosen_site().role_of(module)
        if line and line not in error.msg:
            print_warning("slingtorch: the module %s is named in %s. A login node may lack it: run eb in a job. If the "
                          "machine no longer has it ('module spider %s'), fix that line, or use another generation "
                          "(export %s=NAME)", module, line,
                          module.split('/')[0], sites.GENERATION_VARIABLE)
