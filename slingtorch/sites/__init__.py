# SPDX-License-Identifier: GPL-2.0-only
"""
Sites: which system this is, and which values the system gives to software that is installed on it.

A site is one file that contains only data, <site>.cfg; docs/sites.md describes its form. This module reads, checks and
chooses sites.
"""
import configparser
import contextlib
import fnmatch
import functools
import hashlib
import os
import re
import socket
import stat
from collections import namedtuple
from typing import Any, Dict, Iterable, List, Mapping, NoReturn, Optional, Tuple

from slingtorch import bundle_root
from slingtorch.job.machine import VISIBILITY

# the site that is chosen when nothing is detected
FALLBACK_SITE = 'local'
# variables that name the site, its opt-in groups, and directories with the user's or the centre's own sites
SITE_VARIABLE = 'SLINGTORCH_SITE'
GROUPS_VARIABLE = 'SLINGTORCH_SITE_GROUPS'
PATH_VARIABLE = 'SLINGTORCH_SITES_PATH'
# names one of the generations of modules that a site provides
GENERATION_VARIABLE = 'SLINGTORCH_SITE_GENERATION'
# '<site>: <what was seen>', set by an activation that detected the site instead of being told its name
DETECTED_VARIABLE = 'SLINGTORCH_SITE_DETECTED'

# The first EasyBuild with everything that our easyblocks call: PythonPackage.set_ulimit since 5.4.0 (without it, source
# builds and extensions end in a traceback), the build option orig_modules_tool since 5.4.1 (eb --fetch)
OLDEST_EASYBUILD = '5.4.1'

# file name extensions: a site, and values that several sites share
SITE, SHARED = '.cfg', '.inc'
# some editors write a byte order mark
ENCODING = 'utf-8-sig'

# variables that no module may set, whatever the site: patterns of names, and the reason
FORBIDDEN = (
    ('NCCL_NET', "on one node NCCL would needlessly use the network, or not start: set SLINGTORCH_MULTINODE_NCCL_NET "
                 "instead, and the runscript sets NCCL_NET in jobs of several nodes"),
    ('NCCL_ALGO', "NVIDIA documents it only for debugging; NCCL's tuner chooses the algorithm"),
    ('NCCL_DEBUG* FI_LOG_*', "it floods the logs of large jobs: set it in a job script for debugging"),
    ('FI_PROVIDER', "it breaks other users of libfabric in the same shell; the plugin finds its provider by itself"),
    ('MIOPEN_*', "its directories differ per job and node: the runscript creates them"),
    ('MASTER_* WORLD_SIZE LOCAL_WORLD_SIZE', "its value differs per job: the runscript sets it"),
    ('RANK LOCAL_RANK', "its value differs per task: the runscript sets it"),
    ('*_VISIBLE_DEVICES ' + ' '.join(VISIBILITY),
     "its value differs per task: name the variable in the parameter gpu_visibility instead"),
    ('SLURM_*', "the scheduler sets it, and a value set here would reach every step of the job"),
    ('CUDA_DEVICE_MAX_CONNECTIONS', "tensor parallelism needs 1, FSDP needs another value: set it in the job script"),
    ('MPICH_RDMA_ENABLED_CUDA', "it is for Cray XC systems and does nothing on Slingshot"),
    ('PATH LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH', "setting it would replace the user's own value"),
    ('BASH_ENV ENV SHELLOPTS BASHOPTS BASH_FUNC_* PROMPT_COMMAND LD_AUDIT PYTHONSTARTUP PERL5OPT',
     "it runs code in every program that the user starts"),
)

# the form of a section: how it is written, the pattern of what follows its kind, its required keys, keys of which it
# must have exactly one, and its optional keys
Kind = namedtuple('Kind', ['form', 'pattern', 'keys', 'one_of', 'optional'])
SITE_KEYS = ('title', 'centre', 'url', 'scheduler', 'gpu', 'gpus_per_node', 'network', 'source')
# only for documentation: how users get PyTorch there without slingtorch, with a source; what the file is based on; what
# no public source gives. processor: as printed by uname -m, default x86_64
ABOUT_KEYS = ('processor', 'pytorch', 'evidence', 'missing')
# roles of a site's modules, in the order in which they are loaded
ROLES = ('modules_first', 'compiler', 'cpe', 'mpi', 'gpu', 'accelerator', 'libfabric', 'cudnn', 'blas', 'cmake',
         'conda', 'python', 'nccl', 'nccl_plugin')
# a role's value: 'build' before a module that is not needed at run time, 'eb' before software that --robot installs,
# the module, EasyBuild's name (and version) for it, its prefix (a path, or a variable that the module sets)
PROVIDED = re.compile(r'(?P<build>build )?(?P<eb>eb (?=[^\s/]+/\S))?(?P<module>[^\s/]+(/\S+)?)'
                      r'( is (?P<name>[^\s/]+)(/(?P<version>\S+))?)?( in (?P<prefix>(/|[A-Z_][A-Z0-9_]*)\S*))?')
# EasyBuild's names, by the first part of a module's name, else by the role
NAMES = {'cray-mpich': 'MPICH', 'mpich': 'MPICH', 'openmpi': 'OpenMPI', 'gcc': 'GCC', 'gcc-native': 'GCC',
         'mkl': 'imkl', 'openblas': 'OpenBLAS', 'cray-python': 'Python', 'python': 'Python', 'conda': 'conda',
         'rccl': 'RCCL', 'aws-ofi-rccl': 'aws-ofi-rccl'}
NAMES_OF_ROLES = {'libfabric': 'libfabric', 'cudnn': 'cuDNN', 'nccl': 'NCCL', 'nccl_plugin': 'aws-ofi-nccl'}
NAMES_OF_GPUS = {'cuda': 'CUDA', 'rocm': 'ROCm'}
IN_GROUP = r'(?P<name>\S+)( in (?P<group>\S+))?'
KINDS = {
    'site': Kind('[site]', '', SITE_KEYS, (), ('include',) + ABOUT_KEYS),
    'detect': Kind('[detect LABEL]', r'(?P<name>\S+)', ('source',), ('env', 'file', 'hostname'), ()),
    'env': Kind('[env NAME], or [env NAME in GROUP]', IN_GROUP, ('value', 'reason', 'source'), (), ('for', 'when')),
    'parameter': Kind('[parameter NAME], or [parameter NAME in GROUP]', IN_GROUP, ('reason', 'source'),
                      ('value', 'values'), ('for',)),
    'reference': Kind('[reference LABEL]', r'(?P<name>\S+)', ('operation', 'backend', 'nodes', 'ranks_per_node', 'size',
                                                              'bus_bandwidth', 'tolerance', 'source'), (), ()),
    'provides': Kind("[provides GENERATION], with a name of letters, digits, '_', '.' and '-'", r'(?P<name>[\w.-]+)',
                     ('source',), (), ('default',) + ROLES),
    'group': Kind("[group NAME], with a name of letters, digits, '_', '.' and '-'", r'(?P<name>[\w.-]+)',
                  ('title', 'needs', 'reason', 'source'), (), ()),
}
# sections that a shared file must not have
OF_A_SITE = ('site', 'detect', 'reference', 'provides')
# (kind, keys): pattern of their values separated by blanks, and what a valid value is
CHECKS = {
    ('site', 'scheduler'): ('slurm|pbs|flux|none', "it must be one of slurm, pbs, flux, none"),
    ('site', 'gpu'): ('cuda|rocm|none|any', "it must be one of cuda, rocm, none, any"),
    ('site', 'processor'): ('x86_64|aarch64', "it must be one of x86_64, aarch64"),
    ('site', 'network'): ('slingshot11|infiniband|ethernet|any',
                          "it must be one of slingshot11, infiniband, ethernet, any"),
    ('site', 'gpus_per_node gpu'): (r'[1-9]\d* (cuda|rocm)|0 none|any any',
                                    "give the number of GPUs that a job sees on a node, 0 if gpu is none, any if gpu "
                                    "is any"),
    ('detect', 'env'): (r'\w+ *= *\S.*', "write env = VARIABLE=PATTERN"),
    ('detect', 'file'): ('/.+', "it must be the absolute path of a file"),
    ('detect', 'hostname'): (r'.*[^*?].*', "it would match every machine: make it more specific"),
    ('env', 'name'): (r'[A-Z_][A-Z0-9_]*|OMPI_MCA_\w+|(all|ftp|http|https|no)_proxy',
                      "it is not the name of an environment variable: use capitals, digits and _"),
    ('env', 'value'): (r'(?!.*%\().*', "EasyBuild would treat '%(' in a value as a template: write it differently"),
    ('env', 'when'): (r'\w+ *= *\S.*', "write when = PARAMETER=VALUE"),
    ('reference', 'nodes ranks_per_node'): (r'[1-9]\d* [1-9]\d*', "nodes and ranks_per_node must be numbers"),
    ('reference', 'size'): (r'[1-9]\d* [KMG]iB', "write it as 128 MiB or 1 GiB"),
    ('reference', 'bus_bandwidth'): (r'\d+(\.\d+)?', "it must be a number, in GB/s"),
    ('reference', 'tolerance'): (r'0\.\d+', "it must be a fraction, such as 0.05"),
    ('provides', 'default'): ('yes', "write default = yes in one section, and omit it in the others"),
    ('parameter', 'name'): ('(?!(modextravars|site_groups)$)[a-z_][a-z0-9_]*', "it is not an easyconfig "
                            "parameter that can be set this way: use [env VARIABLE] and [group NAME]"),
}
CHECKS.update({('provides', role): (PROVIDED.pattern,
                                    "write MODULE, build MODULE (not needed at run time), both with 'is NAME/VERSION' "
                                    "and 'in PREFIX' if EasyBuild cannot know these, eb NAME/VERSION (installed by "
                                    "--robot), or another role whose module provides it") for role in ROLES})

Value = namedtuple('Value', ['name', 'value', 'reason', 'source', 'group', 'easyblocks', 'when'])
Group = namedtuple('Group', ['name', 'title', 'needs', 'reason', 'source'])
Reference = namedtuple('Reference', ['name', *KINDS['reference'].keys])  # type: ignore
Choice = namedtuple('Choice', ['site', 'why', 'warning', 'detected'])

Env = Mapping[str, str]
Identity = Tuple[str, Optional[str], Optional[str]]     # kind, name and group of a section
Sections = Dict[Identity, Dict[str, Any]]
Faults = List[Tuple[str, str]]      # path of a file, and its fault


class SiteError(RuntimeError):
    """A site that does not exist, is ambiguous, or has a faulty file; the message has the remedy."""


class Site:
    """One site, as its file describes it.

    Attributes: name, path, the keys of its [site] section, env and parameters (lists of Value), groups (dictionary of
    Group by name), generations (dictionary by name of what the site provides: {role: text}), references (list of
    Reference), rules (list of (kind, pattern)).
    """
    title = centre = url = scheduler = gpu = gpus_per_node = network = source = ''
    processor, pytorch, evidence, missing = 'x86_64', '', '', ''

    def __init__(self, name: str, path: str, sections: Sections) -> None:
        self.name = name
        self.path = path
        self.rules: List[Tuple[str, str]] = []
        self.references: List[Any] = []
        self.groups: Dict[str, Group] = {}
        self.generations: Dict[str, Dict[str, str]] = {}
        values: Dict[str, List[Value]] = {'env': [], 'parameter': []}
        for (kind, _, _), keys in sections.items():
            if kind == 'site':
                for key in SITE_KEYS + ABOUT_KEYS:
                    setattr(self, key, keys.get(key) or getattr(self, key))
            elif kind == 'detect':
                self.rules.extend((key, keys[key]) for key in KINDS[kind].one_of if key in keys)
            elif kind == 'group':
                self.groups[keys['name']] = Group(*map(keys.get, Group._fields))
            elif kind == 'provides':
                self.generations[keys['name']] = {key: keys[key] for key in ('default',) + ROLES if key in keys}
            elif kind == 'reference':
                self.references.append(Reference(*map(keys.get, Reference._fields)))
            else:
                when = keys.get('when')
                values[kind].append(Value(keys['name'], keys.get('values') or keys['value'], keys['reason'],
                                          keys['source'], keys['group'], split_list(keys.get('for')),
                                          when and tuple(split_pair(when))))
        self.env, self.parameters = values['env'], values['parameter']

    def check_groups(self, names: Iterable[str], asked_by: str = '$' + GROUPS_VARIABLE) -> List[Group]:
        """Return the groups with these names; SiteError with the known groups if one is unknown."""
        for name in names:
            if name not in self.groups:
                known = ''.join('\n  %s: %s; needs %s' % (group.name, group.title, group.needs)
                                for group in self.groups.values())
                raise SiteError("%s names the group '%s', but site '%s' does not have it. %s"
                                % (asked_by, name, self.name,
                                   "The site has:" + known if known else "The site has no groups: omit it."))
        return [self.groups[name] for name in names]

    def _selected(self, values: List[Value], names: Iterable[str]) -> Dict[str, Value]:
        """Values outside of groups, with those of the named groups added; group values replace others."""
        self.check_groups(names)
        res = {value.name: value for value in values if value.group is None}
        for value in values:
            if value.group in names:
                other = res.get(value.name)
                if other is not None and other.group is not None and other.value != value.value:
                    raise SiteError("The groups '%s' and '%s' of site '%s' exclude each other: they set %s to "
                                    "different values ('%s' and '%s'). Choose one of them."
                                    % (other.group, value.group, self.name, value.name, other.value, value.value))
                res[value.name] = value
        return res

    def env_values(self, groups: Iterable[str] = ()) -> Dict[str, Value]:
        """Environment values (dictionary of Value by variable), including those of the named groups."""
        return self._selected(self.env, groups)

    def parameter_values(self, groups: Iterable[str] = ()) -> Dict[str, Value]:
        """Easyconfig parameter values (dictionary of Value by parameter), including those of the named groups."""
        return self._selected(self.parameters, groups)

    def suffix(self, generation: str) -> str:
        """Suffix of module names that distinguishes installations for this generation from others."""
        return '-%s-%s' % (self.name, generation) if len(self.generations) > 1 else ''

    def generation(self, name: Optional[str], asked_by: str) -> str:
        """Name of the generation to use: the named one, else the site's default; asked_by is for the SiteError."""
        known = ', '.join(self.generations)
        if not known:
            raise SiteError("%s needs modules of the site '%s', but %s names none. Add a section [provides "
                            "NAME] with lines such as 'gpu = cuda/12.9.0'%s (docs/sites.md)"
                            % (asked_by, self.name, self.path, self._where_to_add()))
        if name and name not in self.generations:
            raise SiteError("%s needs the generation '%s' of modules, but site '%s' does not have it. It has %s (%s)"
                            % (asked_by, name, self.name, known, self.path))
        chosen = [name] if name else [key for key, roles in self.generations.items()
                                      if 'default' in roles or len(self.generations) == 1]
        if len(chosen) != 1:
            raise SiteError("%s can be for %s, but %s does not select one: add 'default = yes' to one of its sections "
                            "[provides ...], or 'export %s=NAME'" % (asked_by, known, self.path, GENERATION_VARIABLE))
        return chosen[0]

    def toolkit(self, generation: str) -> str:
        """Version of CUDA or ROCm in a generation; '' if the site's file does not give it."""
        module = split_provided(self.generations[generation].get('gpu', '')).get('module')
        return self.modules().get(module or '', {}).get('version', [''])[0]

    def plugin_toolkit(self) -> Optional[str]:
        """CUDA or ROCm version of the network plugin, preferably of the default generation; or None."""
        names = [name for name, roles in self.generations.items() if 'nccl_plugin' in roles and 'gpu' in roles]
        names.sort(key=lambda name: 'default' not in self.generations[name])
        return self.toolkit(names[0]) or None if names else None

    def provided(self, generation: str, role: str, asked_by: str) -> Dict[str, Optional[str]]:
        """Parts of this generation's value for a role, from split_provided(); follows a value that names a role."""
        if role not in ROLES:
            raise SiteError("%s names the role '%s'. The roles are: %s" % (asked_by, role, ', '.join(ROLES)))
        text = self.generations[generation].get(role)
        if text is None:
            raise SiteError("%s, section [provides %s] has no module for the role '%s', but %s needs one: add the line "
                            "'%s = MODULE/VERSION'%s"
                            % (self.path, generation, role, asked_by, role, self._where_to_add()))
        # another role's module provides it, as ROCm's provides RCCL
        return self.provided(generation, text, asked_by) if text in ROLES else split_provided(text)

    def _where_to_add(self) -> str:
        """Which file to edit, if the site's file belongs to the bundle."""
        if os.path.dirname(self.path) != bundle_sites():
            return ''
        return (" in your own file, since an update of slingtorch replaces this one: copy it to "
                "~/.config/slingtorch/sites, or run 'slingtorch site new NAME' on this machine")

    def modules(self) -> Dict[str, Dict[str, Any]]:
        """EasyBuild's metadata of external modules for the site's modules: {module: entry}."""
        found: Dict[str, Dict[str, Any]] = {}
        for _, role, parts in self._modules():
            base, _, version = parts['module'].rpartition('/')
            name = parts['name'] or NAMES.get((base or version).split('/')[0]) or NAMES_OF_ROLES.get(role)
            if role == 'gpu':
                name = name or NAMES_OF_GPUS.get(self.gpu)
            if name:
                entry = found[parts['module']] = {'name': [name]}
                # a dash begins the centre's own suffix: 9.2.0.82-12
                version = parts['version'] or (version.split('-')[0] if base else '')
                entry.update({'version': [version]} if version else {})
                entry.update({'prefix': parts['prefix']} if parts['prefix'] else {})
        return found

    def _modules(self) -> List[Tuple[str, str, Dict[str, Any]]]:
        """Generation, role and parts of each module in the file."""
        found = [(generation, role, split_provided(text)) for generation, roles in self.generations.items()
                 for role, text in roles.items() if role in ROLES and text not in ROLES]
        return [entry for entry in found if not entry[2]['eb']]

    def role_of(self, module: str) -> Optional[str]:
        """A text that tells where the site's file names a module; None if it does not."""
        for generation, role, parts in self._modules():
            if parts['module'] == module:
                return "%s, section [provides %s], %s = %s" % (self.path, generation, role,
                                                               self.generations[generation][role])
        return None

    def digest(self, groups: Iterable[str] = ()) -> str:
        """Digest of the site's values with these groups, to detect changes."""
        values = list(self.env_values(groups).values()) + list(self.parameter_values(groups).values())
        text = repr([(value.name, value.value, value.easyblocks, value.when) for value in values])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def split_provided(text: str) -> Dict[str, Optional[str]]:
    """Parts of a site's value for a role: build, eb, module, name, version, prefix."""
    match = PROVIDED.match(text)
    return match.groupdict() if match else {}


def matching_rule(rules: List[Tuple[str, str]], environ: Env, hostname: str, root: str) -> Optional[str]:
    """Evidence of the first rule that this machine, with this host name, matches, or None. Tests replace `root`."""
    for kind, pattern in rules:
        if kind == 'env':
            variable, pattern = split_pair(pattern)
            if variable in environ and fnmatch.fnmatchcase(environ[variable], pattern):
                return "$%s is %s" % (variable, environ[variable])
        elif kind == 'file':
            if os.path.exists(os.path.join(root, pattern.lstrip('/'))):
                return "%s exists" % pattern
        elif kind == 'hostname' and any(fnmatch.fnmatchcase(host, pattern)
                                        for host in (hostname, hostname.split('.')[0])):
            return "the host name is %s" % hostname
    return None


def split_list(text: Optional[str]) -> List[str]:
    """Words of a list that is separated by commas or white space, each once, in order."""
    return list(dict.fromkeys(word for word in re.split(r'[,\s]+', text or '') if word))


def split_pair(text: str) -> List[str]:
    """The two parts of NAME=VALUE."""
    return [part.strip() for part in text.split('=', 1)]


# ----------------------------------------------------------------------------------------------------------------------
# files

def fail(path: str, section: str, message: str) -> NoReturn:
    """Raise a SiteError with the place of a fault."""
    raise SiteError("%s, section [%s]: %s" % (path, section, message))


def read_section(path: str, section: str, parser: configparser.ConfigParser) -> Tuple[Identity, Dict[str, Any]]:
    """Read and check one section: ((kind, name, group), keys). The keys include name and group."""
    words = section.split()
    if not words or words[0] not in KINDS:
        fail(path, section, "unknown section: must be one of %s" % ', '.join('[%s]' % kind for kind in KINDS))
    kind = KINDS[words[0]]
    match = re.match('(?:%s)$' % kind.pattern, ' '.join(words[1:]))
    if not match:
        fail(path, section, "write %s" % kind.form)
    keys: Dict[str, Any] = {key: ' '.join(value.split()) for key, value in parser.items(section)}
    for key in keys:
        if key not in kind.keys + kind.one_of + kind.optional:
            fail(path, section, "unknown key '%s': the section may have %s"
                 % (key, ', '.join(kind.keys + kind.one_of + kind.optional)))
    for key in list(kind.keys) + list(keys):
        if not keys.get(key):
            fail(path, section, "key '%s' is missing or empty: every entry must have it" % key)
    if kind.one_of and len([key for key in kind.one_of if key in keys]) != 1:
        fail(path, section, "give exactly one of %s" % ', '.join(kind.one_of))

    keys.update(dict({'name': None, 'group': None}, **match.groupdict()))
    for (where, names), (pattern, right) in CHECKS.items():
        # for speed, since each start reads twenty sites
        if where != words[0]:
            continue
        found = [keys.get(name) or '' for name in names.split()]
        if found[0] and not re.match('(?:%s)$' % pattern, ' '.join(found)):
            fail(path, section, "%s is '%s': %s" % (names.split()[0], found[0], right))
    for reason in [reason for patterns, reason in FORBIDDEN if words[0] == 'env'
                   and any(fnmatch.fnmatchcase(keys['name'], pattern) for pattern in patterns.split())]:
        fail(path, section, "%s may not be set by a module: %s. Remove the section." % (keys['name'], reason))
    if 'values' in keys:
        keys['values'] = [line.strip() for line in parser.get(section, 'values').splitlines() if line.strip()]
    return (words[0], keys['name'], keys['group']), keys


def new_parser(strict: bool = True) -> configparser.ConfigParser:
    """A parser of site files."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=('=',), comment_prefixes=('#',), strict=strict)
    parser.optionxform = str  # type: ignore  # names of variables are case sensitive
    return parser


def read_sections(path: str) -> Sections:
    """The sections of one file: {(kind, name, group): keys}."""
    parser = new_parser()
    try:
        if not os.path.isfile(path) and os.path.exists(path):
            # reading from a named pipe would wait forever
            raise SiteError("%s is not a file: remove it from the directory of sites" % path)
        with open(path, encoding=ENCODING) as fp:
            parser.read_file(fp)
    except configparser.DuplicateSectionError as err:
        fail(path, err.section, "the section occurs twice: keep one of them")
    except configparser.DuplicateOptionError as err:
        fail(path, err.section, "key '%s' occurs twice: keep one of them" % err.option)
    except (configparser.Error, UnicodeDecodeError) as err:
        raise SiteError("%s is not a valid site file: %s. See docs/sites.md for its form." % (path, err))
    except OSError as err:
        raise SiteError("%s cannot be read: %s" % (path, err))
    if parser.defaults():
        fail(path, 'DEFAULT', "a site file cannot have this section: move the keys to their sections")

    sections: Sections = {}
    for section in parser.sections():
        if path.endswith(SHARED) and section.partition(' ')[0] in OF_A_SITE:
            fail(path, section, "move this section to the file of a site: a shared file cannot have it")
        identity, keys = read_section(path, section, parser)
        if identity in sections:
            fail(path, section, "the section occurs twice: keep one of them")
        sections[identity] = keys
    return sections


@functools.lru_cache(maxsize=None)
def read_shared(path: str, changed: int) -> Sections:
    """Sections of a shared file, read once for all sites that include it; changed is its modification time."""
    return read_sections(path)


def read_site(name: str, path: str, environ: Env) -> Site:
    """The Site in a file, with the files that it includes; its own sections replace included ones of the same name."""
    own = read_sections(path)
    if ('site', None, None) not in own:
        fail(path, 'site', "the section is missing: add it with the keys %s" % ', '.join(SITE_KEYS))
    sections: Sections = {}
    for include in split_list(own['site', None, None].get('include')):
        shared = find_files(SHARED, environ)
        if include not in shared:
            fail(path, 'site', "include names '%s', but must be one of %s" % (include, ', '.join(shared)))
        sections.update(read_shared(shared[include], os.stat(shared[include]).st_mtime_ns))
    sections.update(own)

    for (kind, generation, _), keys in own.items():
        for role in [role for role in ROLES if kind == 'provides' and keys.get(role) in ROLES]:
            if keys.get(keys[role]) in ROLES:
                fail(path, 'provides %s' % generation, "%s = %s leads to another role instead of a module: write a "
                     "module at '%s'" % (role, keys[role], keys[role]))

    groups = [keys['name'] for (kind, _, _), keys in sections.items() if kind == 'group']
    for kind, value, group in list(sections):
        if group and group not in groups:
            if (kind, value, group) in own:
                fail(path, 'group ' + group, "the section is missing, but values of this group exist: describe it")
            # a shared value of a group that this site does not offer
            del sections[kind, value, group]
    for empty in [group for group in groups if group not in [key[2] for key in sections]]:
        fail(path, 'group ' + empty, "this group has no values: add [env VARIABLE in %s], or remove it" % empty)
    return Site(name, path, sections)


def user_directory(environ: Env) -> Optional[str]:
    """The user's own directory with sites, whether or not it exists; None without a home directory."""
    # a relative path must be ignored: XDG Base Directory Specification
    config = environ.get('XDG_CONFIG_HOME', '')
    if not os.path.isabs(config):
        config = os.path.join(environ.get('HOME', ''), '.config')
    return os.path.join(config, 'slingtorch', 'sites') if os.path.isabs(config) else None


def check_private(path: str) -> None:
    """Raise a SiteError if someone else may write to a directory, because a site's values reach every module."""
    info = os.stat(path)
    if info.st_uid not in (0, os.geteuid()):
        raise SiteError("The directory %s with your sites belongs to someone else (user id %d). Move it away, and make "
                        "your own." % (path, info.st_uid))
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SiteError("Others may write to the directory %s with your sites. Check its contents, then restrict it: "
                        "chmod go-w '%s'" % (path, path))
    if not os.access(path, os.R_OK | os.X_OK):
        raise SiteError("no permission to read the directory %s with your sites: chmod u+rwx '%s'" % (path, path))


def bundle_sites() -> str:
    """The bundle's own directory with sites."""
    return os.path.join(bundle_root(), 'hooks', 'sites')


def directories(environ: Env) -> List[str]:
    """The directories with sites: those of $SLINGTORCH_SITES_PATH, then the user's own, then that of the bundle."""
    paths = [path for path in environ.get(PATH_VARIABLE, '').split(':') if path]
    for path in paths:
        if not (os.path.isabs(path) and os.path.isdir(path)):
            raise SiteError("$%s contains '%s', but must contain absolute paths of directories: correct it, or unset "
                            "it" % (PATH_VARIABLE, path))
        try:
            names = [name for name in os.listdir(path) if name.endswith((SITE, SHARED))]
        except OSError as err:
            raise SiteError("The directory %s in $%s cannot be read: %s"
                            % (path, PATH_VARIABLE, err.strerror))
        # a centre's group may have write permission, but not everybody
        for name in [path] + [os.path.join(path, name) for name in names]:
            if os.path.exists(name) and os.stat(name).st_mode & stat.S_IWOTH:
                raise SiteError("Everybody may write to %s, and $%s reads sites from there: their values reach every "
                                "module. Check its contents, then restrict it: chmod o-w '%s'"
                                % (name, PATH_VARIABLE, name))
    own = user_directory(environ)
    # a home directory that a compute node does not have is not an error
    if own and os.path.isdir(own):
        check_private(os.path.dirname(own))
        check_private(own)
        paths.append(own)
    return paths + [bundle_sites()]


def find_files(suffix: str, environ: Env) -> Dict[str, str]:
    """Files with a suffix in all directories; the first of each name wins: sorted {name without suffix: path}."""
    found = {}
    for directory in reversed(directories(environ)):
        for entry in os.listdir(directory):
            # ignore hidden files, which editors leave: .#mine.cfg
            if entry.endswith(suffix) and not entry.startswith('.'):
                found[entry[:-len(suffix)]] = os.path.join(directory, entry)
    return dict(sorted(found.items()))


def load(name: str, environ: Env = os.environ) -> Site:
    """Return the Site with this name; SiteError with the known sites if it is unknown."""
    known = find_files(SITE, environ)
    if name not in known:
        raise SiteError("There is no site '%s'. The sites are: %s. 'slingtorch site new NAME' writes a new one for "
                        "this machine (see docs/sites.md)." % (name, ', '.join(known)))
    return read_site(name, known[name], environ)


def load_all(environ: Env = os.environ, faults: Optional[Faults] = None) -> List[Site]:
    """
    All sites, sorted by name, except those with faulty files, which must not stop the others.

    :param faults: list to which faulty files are added, as (path, fault)
    """
    sites = []
    for name, path in find_files(SITE, environ).items():
        try:
            sites.append(read_site(name, path, environ))
        except SiteError as err:
            if faults is not None:
                faults.append((path, str(err)))
    return sites


def broken_rules(path: str) -> List[Tuple[str, str]]:
    """The rules that can still be read from the faulty file of a site: list of (kind, pattern)."""
    parser = new_parser(strict=False)
    with contextlib.suppress(configparser.Error, OSError):
        if os.path.isfile(path):
            with open(path, encoding=ENCODING, errors='replace') as fp:
                parser.read_file(fp)
    return [pair for section in parser.sections() if section.split()[:1] == ['detect']
            for pair in parser.items(section) if pair[0] == 'file' or pair[0] == 'hostname' or '=' in pair[1]]


# ----------------------------------------------------------------------------------------------------------------------
# the choice

def detected_sites(environ: Env, hostname: str, root: str = '/',
                   faults: Optional[Faults] = None) -> List[Tuple[Site, str]]:
    """List of (site, why) of all sites whose rules match this machine (faults: see load_all)."""
    pairs = [(site, matching_rule(site.rules, environ, hostname, root)) for site in load_all(environ, faults)]
    return [(site, why) for site, why in pairs if why]


def choose(environ: Env = os.environ, hostname: Optional[str] = None, root: str = '/') -> Choice:
    """
    Return the Choice (site, why, warning, detected) for this machine: the site named by $SLINGTORCH_SITE, else the
    detected one, else 'local'.

    If no rule matches, as on a compute node, the site that an earlier activation detected still holds.
    If a named site contradicts the detected one, that is an error, unless the named site has no rules (a generic one
    such as 'local'): this may be intended and gives a warning. Faulty files also give a warning, or an error if no site
    is named and the rules in such a file match this machine.

    :raises SiteError: also if the rules of several sites match and no site is named
    """
    hostname = socket.gethostname() if hostname is None else hostname
    name = (environ.get(SITE_VARIABLE) or '').strip()
    earlier, _, why = environ.get(DETECTED_VARIABLE, '').partition(': ')
    named = name and name != earlier
    faults: Faults = []
    found = detected_sites(environ, hostname, root, faults)
    if not named:
        for path, fault in faults:
            if matching_rule(broken_rules(path), environ, hostname, root):
                raise SiteError("%s. This machine matches the rules in this file: correct the file, or name a site "
                                "(--site or $%s)" % (fault.rstrip('.'), SITE_VARIABLE))
    broken = '; '.join("ignoring a faulty site file: " + fault for _, fault in faults) or None
    seen = ' and '.join("'%s' (%s)" % (site.name, reason) for site, reason in found)
    if not named:
        if len(found) > 1:
            raise SiteError("This machine matches several sites: %s. Name the right one with 'slingtorch env "
                            "--site NAME', or 'export %s=NAME'." % (seen, SITE_VARIABLE))
        if found:
            return Choice(found[0][0], found[0][1], broken, True)
        why = why if name else "for any machine"
        return Choice(load(name or FALLBACK_SITE, environ), why, broken, True)

    site, warning = load(name, environ), broken
    if found and name not in [other.name for other, _ in found]:
        if site.rules:
            raise SiteError("Site '%s' is named (by --site or $%s), but this machine matches %s. To use the detected "
                            "site, unset %s or omit --site; if the detection is wrong, correct the rules in %s."
                            % (name, SITE_VARIABLE, seen, SITE_VARIABLE, found[0][0].path))
        warning = ("site '%s' is named, but this machine matches %s. Values of that site are not used. To use them, "
                   "unset %s." % (name, seen, SITE_VARIABLE)) + ('; ' + broken if broken else '')
    return Choice(site, "named by --site or $%s" % SITE_VARIABLE, warning, False)


def chosen_groups(environ: Env = os.environ) -> List[str]:
    """Names of the opt-in groups in $SLINGTORCH_SITE_GROUPS (not checked against a site)."""
    return split_list(environ.get(GROUPS_VARIABLE))


# ----------------------------------------------------------------------------------------------------------------------
# EasyBuild

def old_easybuild(version: str, path: str, environ: Env = os.environ) -> Optional[str]:
    """An error message if this version of EasyBuild is too old, else None; path is a file of its tools."""
    numbers = [[int(number) for number in re.findall(r'\d+', str(text))[:3]] for text in (version, OLDEST_EASYBUILD)]
    if numbers[0] >= numbers[1]:
        return None
    where = os.path.realpath(os.path.join(path, '..', '..', '..'))
    remedy = "Install a newer one in the Python that runs eb: pip install 'easybuild-framework>=%s'" % OLDEST_EASYBUILD
    if where in [os.path.realpath(entry) for entry in environ.get('PYTHONPATH', '').split(':') if entry]:
        remedy = "PYTHONPATH puts this version first: unload the module that sets PYTHONPATH, or unset it"
    return ("this is EasyBuild %s in %s, but slingtorch needs %s or newer. %s"
            % (version, where, OLDEST_EASYBUILD, remedy))
