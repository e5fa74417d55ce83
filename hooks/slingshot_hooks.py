# SPDX-License-Identifier: GPL-2.0-only
"""
EasyBuild hooks of slingtorch: they add the values of the site that this machine is, and refuse what is for another one.

Sites are data, in sites/*.cfg (see docs/sites.md); nothing in this file knows one by name.

A callable in this file must not have a name that ends in '_hook' unless it is a hook of EasyBuild.
"""
import functools
import os
import re
import sys
import tempfile
from typing import Any, Dict, List, Tuple

from easybuild.framework.easyconfig.constants import EASYCONFIG_CONSTANTS
from easybuild.framework.easyconfig.default import DEFAULT_CONFIG, DEPENDENCIES, OTHER
from easybuild.framework.easyconfig.easyconfig import ActiveMNS, get_easyblock_class, robot_find_easyconfig
from easybuild.tools import version as easybuild_version
from easybuild.tools.build_log import EasyBuildError, print_msg, print_warning
from easybuild.tools.config import build_option, install_path
from easybuild.tools.include import include_easyblocks

# EasyBuild archives this file, alone (reprod/hooks beside an installation): the rest is the activated bundle then.
ROOTS = [os.path.dirname(os.path.dirname(os.path.realpath(path)))
         for path in (__file__, os.environ.get('EASYBUILD_HOOKS') or __file__)]
try:
    # easyblocks make slingtorch importable; eb --include-easyblocks=... leaves out the bundle's
    if 'easybuild.easyblocks.generic._bundle' not in sys.modules:
        include_easyblocks(None, [file for file in (root + '/easyblocks/generic/_bundle.py' for root in ROOTS)
                                  if os.path.isfile(file)])
    from slingtorch import sites
except (ImportError, EasyBuildError) as error:
    # an EasyBuildError would end in a traceback: hooks are loaded before eb handles errors (easybuild/main.py)
    sys.exit("ERROR: %s cannot be used by itself (%s): it is one file of the bundle slingtorch. Activate the bundle, "
             "if you can in the version of that installation, and run the same command again: "
             "eval \"$(slingtorch env)\""
             % (__file__, error))
TOO_OLD = sites.old_easybuild(easybuild_version.VERSION, easybuild_version.__file__)
if TOO_OLD:
    sys.exit("ERROR: " + TOO_OLD)

# parameters of every easyconfig, whichever its easyblock
DEFAULT_CONFIG.update({
    'only_site': [None, "Name of the one site that this easyconfig is for", OTHER],
    'site_dependencies': [None, "Roles whose modules the site provides: 'gpu'; 'nccl?', where it may have none; "
                                "'run conda', needed at run time too where the site says 'build'", DEPENDENCIES],
    'site_generation': [None, "Generation of the site's modules; default: the site's own", OTHER],
})
EXTERNAL_MODULE = EASYCONFIG_CONSTANTS['EXTERNAL_MODULE'][0]

# These get the site's values for NCCL or RCCL, libfabric and MPI, without which PyTorch runs over TCP, or hangs
# (https://github.com/HewlettPackard/shs-ccl-docs, and the site files with their sources); so does PyTorch under another
# name, by an easyblock of ours ('slingtorch new'). In an image with its PyTorch, Horovod is a software of its own.
WITH_SITE_VALUES = ('Horovod', 'PyTorch')

# what was added to easyconfigs: {path: message}
_ADDED: Dict[str, str] = {}
# why what was parsed cannot run on this site, which is said when it is to be installed: {path: message}
_REFUSED: Dict[str, str] = {}


# ----------------------------------------------------------------------------------------------------------------------
# the site

@functools.lru_cache(maxsize=None)
def chosen_site() -> sites.Site:
    """
    Return the site, as a sites.Site.

    It is chosen once per run: modules that are loaded during an installation must not change it.
    """
    try:
        choice = sites.choose()
        # a wrong name must not wait until the first PyTorch
        choice.site.check_groups(sites.chosen_groups())
    except sites.SiteError as err:
        raise EasyBuildError("slingtorch: %s", err)
    if choice.warning:
        print_warning("slingtorch: %s", choice.warning, silent=build_option('silent'))
    return choice.site


def wanted_groups(ec: Any, site: sites.Site) -> List[str]:
    """Names of the opt-in groups: those of the environment and those of the easyconfig parameter site_groups."""
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
    """Whether an easyconfig gets the site's variables; site_digest is a parameter of the easyblock RunScripts."""
    return ec.name in WITH_SITE_VALUES or 'site_digest' in ec


def applies(value: sites.Value, ec: Any, easyblocks: List[str]) -> bool:
    """Whether a value of the site is for this easyblock, and for what the easyconfig says."""
    if value.easyblocks and not set(value.easyblocks).intersection(easyblocks):
        return False
    if value.when:
        parameter, wanted = value.when
        return parameter in ec and str(ec[parameter]) == wanted
    return True


def easyblocks_of(ec: Any) -> List[str]:
    """Names of the easyblock's class and of those that it is derived from."""
    return [cls.__name__ for cls in get_easyblock_class(ec.easyblock, name=ec.name).__mro__]


def add_site_parameters(ec: Any, groups: List[str]) -> List[str]:
    """Add the site's values for parameters of the easyconfig, but not for those that it gives; names of the added."""
    site, added = chosen_site(), []
    easyblocks, easyconfig_values = easyblocks_of(ec), ec.parser.get_config_dict(validate=False)
    for name, value in site.parameter_values(groups).items():
        if name in easyconfig_values:
            ec.log.info("slingtorch: parameter %s of site %s is left out: the easyconfig gives it", name, site.name)
        elif name in ec and applies(value, ec, easyblocks):
            ec[name] = list(value.value) if isinstance(value.value, list) else value.value
            added.append(name)
    return added


def add_site_values(ec: Any) -> List[str]:
    """
    Add the site's values to an easyconfig; what the easyconfig says itself stays.

    Environment values become entries of modextravars, with pushenv: unloading the module then gives the user's own
    value back. Other values become the easyconfig parameter of their name, if the easyblock knows it. Name and GPUs of
    the site become the parameters site_name and site_gpu; site_groups has all groups then, site_digest stands for the
    values.

    :return: names of the variables and parameters that were added
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
    # lets an easyblock refuse an easyconfig that is for another site, or for other GPUs
    for parameter, word in [('site_name', site.name), ('site_gpu', site.gpu), ('site_digest', site.digest(groups))]:
        if parameter in ec and parameter not in easyconfig_values:
            ec[parameter] = word
    if 'site_groups' in ec:
        ec['site_groups'] = groups

    # a new dictionary: the present one may be shared with other easyconfigs as the default
    modextravars = dict(ec['modextravars'])
    for name, value in env_values.items():
        if name in modextravars:
            ec.log.info("slingtorch: variable %s of site %s is left out: the easyconfig gives it", name, site.name)
        elif applies(value, ec, easyblocks):
            modextravars[name] = {'value': value.value, 'pushenv': True}
            added.append(name)
    if added:
        ec['modextravars'] = modextravars
        what = os.path.basename(ec.path) if ec.path else ec.name
        msg = "slingtorch: site %s: %s: %d site values (%s)" % (site.name, what, len(added), ', '.join(added))
        for name in groups:
            msg += "; group %s, which needs: %s" % (name, site.groups[name].needs)
        ec.log.info(msg)
        _ADDED[ec.path] = msg
    return added


def generation_of(ec: Any, site: sites.Site) -> str:
    """The generation of modules for an easyconfig: its file's name says it, or the parameter, the user, the site."""
    stem = os.path.splitext(os.path.basename(ec.path or ''))[0]
    for generation in site.generations:
        if site.suffix(generation) and stem == '%s-%s%s' % (ec.name, ec.version, site.suffix(generation)):
            return generation
    return site.generation(ec['site_generation'] or os.environ.get(sites.GENERATION_VARIABLE),
                           os.path.basename(ec.path or ec.name))


def link_easyconfig(name: str, version: str, suffix: str) -> None:
    """Let the robot find NAME-VERSION.eb under the name that it has for a generation, from which this is read."""
    path = robot_find_easyconfig(name, version)
    if path and not robot_find_easyconfig(name, version + suffix):
        directory = tempfile.mkdtemp(prefix='generation-')
        os.symlink(path, os.path.join(directory, '%s-%s%s.eb' % (name, version, suffix)))
        build_option('robot_path').append(directory)


def site_entries(ec: Any) -> List[Tuple[str, bool, bool]]:
    """What site_dependencies says: (role, whether it may be missing, whether it is needed at run time in any case)."""
    entries = ec['site_dependencies']
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
        raise EasyBuildError("site_dependencies in %s is %r: it must be a list of roles, such as ['compiler', 'nccl?', "
                             "'run conda']", ec.path, entries)
    return [(re.sub(r'^run |\?$', '', entry), entry.endswith('?'), entry.startswith('run ')) for entry in entries]


def add_site_dependencies(ec: Any) -> None:
    """
    Put the modules in that the site has for the roles in site_dependencies; what the easyconfig names itself stays.

    An easyconfig without a versionsuffix gets that of the generation, where a site has several and something of it is
    there at run time. The parameter is empty then: an easyconfig that EasyBuild writes (reprod/) has the dependencies
    themselves.
    """
    site, asked_by = chosen_site(), os.path.basename(ec.path or ec.name)
    own = [dep[0].split('/')[0] for key in ('dependencies', 'builddependencies') for dep in ec[key]]
    # modules, then what is installed, each at run time and for the build alone
    found: Dict[Tuple[str, bool], List[Any]] = {(kind, build): [] for kind in ('', 'eb') for build in (False, True)}
    try:
        generation = generation_of(ec, site)
        suffix, provides = site.suffix(generation), site.generations[generation]
        # what opens the directories of the others comes with each of them
        first = [(role, False, False) for role in sites.ROLES[:1] if role in provides]
        for role, optional, run_time in first + site_entries(ec):
            if role not in provides and role in sites.ROLES and optional:
                continue
            parts = site.provided(generation, role, asked_by)
            build, module = bool(parts['build']) and not run_time, str(parts['module'])
            if parts['eb']:
                # nothing of a generation is in a Python of conda-forge
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
    ec.log.info("slingtorch: %s: generation %s of site %s gives %s", asked_by, generation, site.name, found)


def refuse_other_gpu(ec: Any, site: sites.Site, generation: str) -> None:
    """Remember what is wrong if a wheel is for another CUDA or ROCm than the plugin of this generation."""
    wheel = re.match(r'-(cuda|rocm)-(\d+)', ec['versionsuffix'])
    module = sites.split_provided(site.generations[generation].get('gpu', '')).get('module')
    entry = site.modules().get(module or '')
    if wheel and entry:
        own = '%s %s' % (sites.NAMES_OF_GPUS[wheel.group(1)], wheel.group(2))
        version = entry.get('version', [''])[0]
        if [entry['name'][0], version.split('.')[0]] != own.split():
            _REFUSED[ec.path] = (
                "slingtorch: %s is for %s, and the plugin of the network here for %s %s (%s): one process cannot have "
                "both. Take an easyconfig for this one ('eb --search PyTorch-'), or another generation: export %s=NAME"
                % (os.path.basename(ec.path), own, entry['name'][0], version, site.role_of(str(module)),
                   sites.GENERATION_VARIABLE))


def add_software(dependencies: List[Any], own: List[str], software: Tuple[str, ...], suffix: str) -> None:
    """Add what `--robot` installs, for a generation of modules, unless the easyconfig names it itself."""
    name, (version, dash, of_version) = software[0], software[1].partition('-')
    of_version = dash + of_version or suffix
    if name not in own:
        link_easyconfig(name, version, of_version)
        dependencies.append((name, version, of_version))


def print_site_values(ec: Any) -> None:
    """Print what was added, before it is installed: it was parsed more than once, with --try-* from other files too."""
    msg = _ADDED.pop(ec.path, None)
    if msg:
        print_msg(msg, silent=build_option('silent'))


def refuse_other_site(self: Any) -> None:
    """
    Refuse to install what is for another site: what follows would end in modules that are missing.

    Every software is looked at: with --robot the first one of a stack is not PyTorch. Sources are fetched anywhere.
    """
    if self.dry_run or build_option('stop') == 'fetch':
        return
    only, here = self.cfg['only_site'], chosen_site().name
    if only and only != here:
        raise EasyBuildError("%s is for the site '%s', and this is the site '%s'. Its modules are not here: take an "
                             "easyconfig of this site ('eb --search %s'), or copy this one and change its dependencies "
                             "and only_site. If this is '%s' and was not recognised, say so: export %s=%s",
                             os.path.basename(self.cfg.path), only, here, self.name, only,
                             sites.SITE_VARIABLE, only)
    if self.cfg.path in _REFUSED:
        raise EasyBuildError(_REFUSED[self.cfg.path])
    if self.cfg['site_dependencies'] and not all(optional for _, optional, _ in site_entries(self.cfg)):
        # the parse hook has found nothing to put in
        try:
            chosen_site().generation(None, os.path.basename(self.cfg.path))
        except sites.SiteError as err:
            raise EasyBuildError("slingtorch: %s", err)


# ----------------------------------------------------------------------------------------------------------------------
# the hooks of EasyBuild

def say_skipped(ec: Any) -> None:
    """Say that eb skips an installation that is to be changed by --try-...: of its own words nobody can tell."""
    if 'tweaked_easyconfigs' not in str(ec.path).split(os.sep) or build_option('rebuild') or build_option('force'):
        return
    name = ActiveMNS().det_full_module_name(ec)
    path = os.path.join(install_path('mod'), build_option('suffix_modules_path'), name)
    if any(os.path.isfile(path + ending) for ending in ('', '.lua')):
        print_warning("slingtorch: %s is installed, so eb skips it and changes nothing of it. With --rebuild it does",
                      name)


def parse_hook(ec: Any, *args: Any, **kwargs: Any) -> None:
    """Run for every easyconfig that is parsed."""
    say_skipped(ec)
    own = [dep for key in ('dependencies', 'builddependencies') for dep in ec[key]]
    if ec['site_dependencies'] or any(EXTERNAL_MODULE in dep for dep in own):
        # name, version and prefix of the site's modules, where no file of EasyBuild's own form gives them
        for module, entry in chosen_site().modules().items():
            build_option('external_modules_metadata').setdefault(module, entry)
    # elsewhere it is refused later: sources are fetched, and checksums looked at, on any machine
    if ec['site_dependencies'] and chosen_site().generations and ec['only_site'] in (None, chosen_site().name):
        add_site_dependencies(ec)
        if not with_site_values(ec):
            add_site_parameters(ec, [])
    if with_site_values(ec):
        add_site_values(ec)


def pre_easyblock_hook(self: Any, *args: Any, **kwargs: Any) -> None:
    """Run before an installation."""
    refuse_other_site(self)
    print_site_values(self.cfg)


def post_prepare_hook(self: Any, *args: Any, **kwargs: Any) -> None:
    """Run when the modules of the dependencies are loaded: each must set the variable that is its prefix here."""
    for module, entry in chosen_site().modules().items():
        variable = build_option('external_modules_metadata').get(module, entry).get('prefix', '/').split('/')[0]
        if variable and variable not in os.environ and not self.dry_run and \
                module in [dep['full_mod_name'] for dep in self.cfg.dependencies() if dep['external_module']]:
            raise EasyBuildError("The module %s does not set the variable $%s, which is its prefix in %s. Look at what "
                                 "it sets ('module show %s'), and correct the line: a variable of the module, or the "
                                 "path itself", module, variable, chosen_site().role_of(module), module)


def fail_hook(error: EasyBuildError) -> None:
    """Run when eb ends with an error: says where the name of a module that it could not load is from, or whose lock
    it met."""
    lock = re.search(r'Lock (.+?) already exists', error.msg)
    if lock:
        print_warning("slingtorch: another eb installs this, or one that was killed has left its lock. If nothing of "
                      "it runs any more, on this host or another one: rmdir '%s'. To wait for another eb: "
                      "--wait-on-lock-limit=3600", lock.group(1))
    for module in sorted(set(re.findall(r'[\w.+-]+(?:/[\w.+-]+)*', error.msg))):
        line = chosen_site().role_of(module)
        if line and line not in error.msg:
            print_warning("slingtorch: the module %s is named in %s. A login node may lack it: run eb in a job. If the "
                          "machine no longer has it ('module spider %s'), fix that line, or take another generation "
                          "(export %s=NAME)", module, line,
                          module.split('/')[0], sites.GENERATION_VARIABLE)
