# SPDX-License-Identifier: GPL-2.0-only
"""
Sites: which system this is and which values it gives to software that is installed on it.

A site is one file with data alone, <site>.cfg; docs/sites.md describes its form. This module reads, checks and chooses
sites.
"""
import configparser
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
# variables that name the site, its opt-in groups, and directories with sites of the user's or the centre's
SITE_VARIABLE = 'SLINGTORCH_SITE'
GROUPS_VARIABLE = 'SLINGTORCH_SITE_GROUPS'
PATH_VARIABLE = 'SLINGTORCH_SITES_PATH'
# names one of the generations of modules that a site provides
GENERATION_VARIABLE = 'SLINGTORCH_SITE_GENERATION'
# '<site>: <what was seen>' of an activation that detected the site: then nobody has named it
DETECTED_VARIABLE = 'SLINGTORCH_SITE_DETECTED'

# The first EasyBuild that has what our easyblocks call: PythonPackage.set_ulimit came in 5.4.0 (before, source builds
# and extensions end in a traceback), the build option orig_modules_tool in 5.4.1 (eb --fetch): docs/architecture.md
OLDEST_EASYBUILD = '5.4.1'

# ends of the names of files: a site, and values that several sites share
SITE, SHARED = '.cfg', '.inc'
# some editors write a byte order mark
ENCODING = 'utf-8-sig'

# variables that must not be set by a module, whatever the site: patterns of names, and the reason
FORBIDDEN = (
    ('NCCL_NET', "on one node NCCL would needlessly take the network, or not start: give the name in "
                 "SLINGTORCH_MULTINODE_NCCL_NET, from which the runscript sets it in jobs of several nodes"),
    ('NCCL_ALGO', "NVIDIA documents it for debugging; the tuner chooses"),
    ('NCCL_DEBUG* FI_LOG_*', "it floods the logs of large jobs: it belongs in the job script of the one who debugs"),
    ('FI_PROVIDER', "it breaks other users of libfabric in the same shell; the plugin finds its provider unaided"),
    ('MIOPEN_*', "its directories differ per job and node: the runscript makes them"),
    ('MASTER_* WORLD_SIZE LOCAL_WORLD_SIZE', "it differs per job: the runscript sets it"),
    ('RANK LOCAL_RANK', "it differs per task: the runscript sets it"),
    ('*_VISIBLE_DEVICES ' + ' '.join(VISIBILITY),
     "it differs per task: name the variable in the parameter gpu_visibility instead"),
    ('SLURM_*', "the scheduler owns it, and it reaches every step of the job"),
    ('CUDA_DEVICE_MAX_CONNECTIONS', "tensor parallelism wants 1, FSDP must not have 1: it belongs in the job script"),
    ('MPICH_RDMA_ENABLED_CUDA', "it is of Cray XC systems and does nothing on Slingshot"),
    ('PATH LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH', "setting it would replace what the user has"),
    ('BASH_ENV ENV SHELLOPTS BASHOPTS BASH_FUNC_* PROMPT_COMMAND LD_AUDIT PYTHONSTARTUP PERL5OPT',
     "it runs code in every program that the user starts"),
)

# the form of a file: how a section is written, the pattern of what follows its kind, the keys that it must have, those
# of which it must have one, and those that it may have
Kind = namedtuple('Kind', ['form', 'pattern', 'keys', 'one_of', 'optional'])
SITE_KEYS = ('title', 'centre', 'url', 'scheduler', 'gpu', 'gpus_per_node', 'network', 'source')
# for documentation alone: how PyTorch gets there without us, with its source; what the file rests on; what no public
# source says. processor: as uname -m has it, x86_64 if it is not there
ABOUT_KEYS = ('processor', 'pytorch', 'evidence', 'missing')
# what the modules of a site are for, in the order in which they are loaded
ROLES = ('modules_first', 'compiler', 'cpe', 'mpi', 'gpu', 'accelerator', 'libfabric', 'cudnn', 'blas', 'cmake',
         'conda', 'python', 'nccl', 'nccl_plugin')
# what a role's value may be: a module that is not needed at run time, software that --robot installs, EasyBuild's name
# (and version) for a module, its prefix (a path, or the variable that the module sets)
PROVIDED = re.compile(r'(?P<build>build )?(?P<eb>eb (?=[^\s/]+/\S))?(?P<module>[^\s/]+(/\S+)?)'
                      r'( is (?P<name>[^\s/]+)(/(?P<version>\S+))?)?( in (?P<prefix>(/|[A-Z_][A-Z0-9_]*)\S*))?')
# EasyBuild's names: by the first part of a module's name, and else by the role
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
# what a shared file may not have
OF_A_SITE = ('site', 'detect', 'reference', 'provides')
# (kind, keys): pattern of their values with blanks between, what is right
CHECKS = {
    ('site', 'scheduler'): ('slurm|pbs|flux|none', "it must be one of slurm, pbs, flux, none"),
    ('site', 'gpu'): ('cuda|rocm|xpu|none|any', "it must be one of cuda, rocm, xpu (Intel), none, any"),
    ('site', 'processor'): ('x86_64|aarch64', "it must be one of x86_64, aarch64"),
    ('site', 'network'): ('slingshot11|infiniband|ethernet|any',
                          "it must be one of slingshot11, infiniband, ethernet, any"),
    ('site', 'gpus_per_node gpu'): (r'[1-9]\d* (cuda|rocm|xpu)|0 none|any any',
                                    "give the number of GPUs that a job sees on a node, 0 where gpu is none, any where "
                                    "gpu is any"),
    ('detect', 'env'): (r'\w+ *= *\S.*', "write env = VARIABLE=PATTERN"),
    ('detect', 'file'): ('/.+', "it must be the absolute path of a file"),
    ('detect', 'hostname'): (r'.*[^*?].*', "it would match every machine: make it narrower"),
    ('env', 'name'): (r'[A-Z_][A-Z0-9_]*|OMPI_MCA_\w+|(all|ftp|http|https|no)_proxy',
                      "it is not a name of an environment variable: use capitals, digits and _"),
    ('env', 'value'): (r'(?!.*%\().*', "EasyBuild would take '%(' in a value for a template: write it differently"),
    ('env', 'when'): (r'\w+ *= *\S.*', "write when = PARAMETER=VALUE"),
    ('reference', 'nodes ranks_per_node'): (r'[1-9]\d* [1-9]\d*', "nodes and ranks_per_node must be numbers"),
    ('reference', 'size'): (r'[1-9]\d* [KMG]iB', "write it as 128 MiB or 1 GiB"),
    ('reference', 'bus_bandwidth'): (r'\d+(\.\d+)?', "it must be a number, in GB/s"),
    ('reference', 'tolerance'): (r'0\.\d+', "it must be a share, such as 0.05"),
    ('provides', 'default'): ('yes', "write default = yes in one section, and leave it out of the others"),
    ('parameter', 'name'): ('(?!(modextravars|site_groups)$)[a-z_][a-z0-9_]*', "it is not a name of an easyconfig "
                            "parameter that is set this way: use [env VARIABLE] and [group NAME]"),
}
CHECKS.update({('provides', role): (PROVIDED.pattern,
                                    "write MODULE, build MODULE (not needed at run time), both with 'is NAME/VERSION' "
                                    "and 'in PREFIX' where EasyBuild cannot know these, eb NAME/VERSION (installed by "
                                    "--robot), or the role whose module has it") for role in ROLES})

Value = namedtuple('Value', ['name', 'value', 'reason', 'source', 'group', 'easyblocks', 'when'])
Group = namedtuple('Group', ['name', 'title', 'needs', 'reason', 'source'])
Reference = namedtuple('Reference', ['name', *KINDS['reference'].keys])  # type: ignore
Choice = namedtuple('Choice', ['site', 'why', 'warning', 'detected'])

Env = Mapping[str, str]
Identity = Tuple[str, Optional[str], Optional[str]]     # kind, name and group of a section
Sections = Dict[Identity, Dict[str, Any]]
Faults = List[Tuple[str, str]]      # path of a file, what is wrong with it


class SiteError(RuntimeError):
    """A site that does not exist, cannot be decided on, or whose file is wrong; the message says what to do."""


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

    def detected(self, environ: Env, hostname: str, root: str = '/') -> Optional[str]:
        """What shows that this machine, with this host name, is the site, or None. For tests `root` stands for /."""
        return matching_rule(self.rules, environ, hostname, root)

    def check_groups(self, names: Iterable[str], asked_by: str = '$' + GROUPS_VARIABLE) -> List[Group]:
        """Return the groups with these names; an unknown one is a SiteError that lists the known ones."""
        for name in names:
            if name not in self.groups:
                known = ''.join('\n  %s: %s; needs %s' % (group.name, group.title, group.needs)
                                for group in self.groups.values())
                raise SiteError("%s names the group '%s', which site '%s' does not have. %s"
                                % (asked_by, name, self.name,
                                   "It has:" + known if known else "It has no groups: leave it out."))
        return [self.groups[name] for name in names]

    def _selected(self, values: List[Value], names: Iterable[str]) -> Dict[str, Value]:
        """Values outside of groups, replaced by and completed with those of the named groups."""
        self.check_groups(names)
        res = {value.name: value for value in values if value.group is None}
        for value in values:
            if value.group in names:
                other = res.get(value.name)
                if other is not None and other.group is not None and other.value != value.value:
                    raise SiteError("The groups '%s' and '%s' of site '%s' exclude each other: they give %s different "
                                    "values ('%s' and '%s'). Choose one of them."
                                    % (other.group, value.group, self.name, value.name, other.value, value.value))
                res[value.name] = value
        return res

    def env_values(self, groups: Iterable[str] = ()) -> Dict[str, Value]:
        """Environment values (dictionary of Value by variable) without groups and with the named groups."""
        return self._selected(self.env, groups)

    def parameter_values(self, groups: Iterable[str] = ()) -> Dict[str, Value]:
        """Easyconfig parameter values (dictionary of Value by parameter), likewise."""
        return self._selected(self.parameters, groups)

    def suffix(self, generation: str) -> str:
        """What tells installations for this generation from those for another, in names of modules."""
        return '-%s-%s' % (self.name, generation) if len(self.generations) > 1 else ''

    def generation(self, name: Optional[str], asked_by: str) -> str:
        """Name of the generation to take: the named one, else that of the site; asked_by is for the SiteError."""
        known = ', '.join(self.generations)
        if not known:
            raise SiteError("%s needs modules of the site '%s', of which %s says nothing. Add a section [provides "
                            "NAME] with lines such as 'gpu = cuda/12.9.0'%s (docs/sites.md)"
                            % (asked_by, self.name, self.path, self._where_to_add()))
        if name and name not in self.generations:
            raise SiteError("%s is to use the generation '%s' of modules, which site '%s' does not have: it has %s (%s)"
                            % (asked_by, name, self.name, known, self.path))
        chosen = [name] if name else [key for key, roles in self.generations.items()
                                      if 'default' in roles or len(self.generations) == 1]
        if len(chosen) != 1:
            raise SiteError("%s can be for %s, and %s does not say which: add 'default = yes' to one of its sections "
                            "[provides ...], or 'export %s=NAME'" % (asked_by, known, self.path, GENERATION_VARIABLE))
        return chosen[0]

    def toolkit(self, generation: str) -> str:
        """Version of CUDA or ROCm in a generation; '' where its file does not say."""
        module = split_provided(self.generations[generation].get('gpu', '')).get('module')
        return self.modules().get(module or '', {}).get('version', [''])[0]

    def plugin_toolkit(self) -> Optional[str]:
        """The one that the network's plugin is for, of the default generation if that has a plugin; or None."""
        names = [name for name, roles in self.generations.items() if 'nccl_plugin' in roles and 'gpu' in roles]
        names.sort(key=lambda name: 'default' not in self.generations[name])
        return self.toolkit(names[0]) or None if names else None

    def provided(self, generation: str, role: str, asked_by: str) -> Dict[str, Optional[str]]:
        """What this generation has for a role: parts as of split_provided(). Its line may name another role."""
        if role not in ROLES:
            raise SiteError("%s names the role '%s'. The roles are: %s" % (asked_by, role, ', '.join(ROLES)))
        text = self.generations[generation].get(role)
        if text is None:
            raise SiteError("%s, section [provides %s] has no module for the role '%s', which %s needs: add the line "
                            "'%s = MODULE/VERSION'%s"
                            % (self.path, generation, role, asked_by, role, self._where_to_add()))
        # the module of another role has it, as that of ROCm has RCCL
        return self.provided(generation, text, asked_by) if text in ROLES else split_provided(text)

    def _where_to_add(self) -> str:
        """In which file, if the site's own is not the user's."""
        if os.path.dirname(self.path) != bundle_sites():
            return ''
        return (" in a file of your own, since an update of slingtorch replaces this one: a copy of it in "
                "~/.config/slingtorch/sites, or what 'slingtorch site new NAME' writes on this machine")

    def modules(self) -> Dict[str, Dict[str, Any]]:
        """What EasyBuild must know of the site's modules (its metadata of external modules): {module: its entry}."""
        found: Dict[str, Dict[str, Any]] = {}
        for _, role, parts in self._modules():
            base, _, version = parts['module'].rpartition('/')
            name = parts['name'] or NAMES.get((base or version).split('/')[0]) or NAMES_OF_ROLES.get(role)
            if role == 'gpu':
                name = name or NAMES_OF_GPUS.get(self.gpu)
            if name:
                entry = found[parts['module']] = {'name': [name]}
                # what follows a dash is the centre's own: 9.2.0.82-12
                version = parts['version'] or (version.split('-')[0] if base else '')
                entry.update({'version': [version]} if version else {})
                entry.update({'prefix': parts['prefix']} if parts['prefix'] else {})
        return found

    def _modules(self) -> List[Tuple[str, str, Dict[str, Any]]]:
        """Generation, role and parts of each module that the file names."""
        found = [(generation, role, split_provided(text)) for generation, roles in self.generations.items()
                 for role, text in roles.items() if role in ROLES and text not in ROLES]
        return [entry for entry in found if not entry[2]['eb']]

    def role_of(self, module: str) -> Optional[str]:
        """Where the site's file names a module, in words; None if it does not."""
        for generation, role, parts in self._modules():
            if parts['module'] == module:
                return "%s, section [provides %s], %s = %s" % (self.path, generation, role,
                                                               self.generations[generation][role])
        return None

    def digest(self, groups: Iterable[str] = ()) -> str:
        """Digest of what the site gives to easyconfigs with these groups, by which a change of it is seen."""
        values = list(self.env_values(groups).values()) + list(self.parameter_values(groups).values())
        text = repr([(value.name, value.value, value.easyblocks, value.when) for value in values])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def split_provided(text: str) -> Dict[str, Optional[str]]:
    """Parts of what a site has for a role: build, eb, module, name, version, prefix."""
    match = PROVIDED.match(text)
    return match.groupdict() if match else {}


def matching_rule(rules: List[Tuple[str, str]], environ: Env, hostname: str, root: str) -> Optional[str]:
    """What the first of these rules that matches has seen, or None (parameters: Site.detected)."""
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


def forbidden_reason(variable: str) -> Optional[str]:
    """Why no module may set this environment variable; None if it may."""
    return next((reason for patterns, reason in FORBIDDEN
                 if any(fnmatch.fnmatchcase(variable, pattern) for pattern in patterns.split())), None)


# ----------------------------------------------------------------------------------------------------------------------
# files

def fail(path: str, section: str, message: str) -> NoReturn:
    """Raise the SiteError that names the place of a fault."""
    raise SiteError("%s, section [%s]: %s" % (path, section, message))


def read_section(path: str, section: str, parser: configparser.ConfigParser) -> Tuple[Identity, Dict[str, Any]]:
    """Check one section by itself: ((kind, name, group), its keys); also name and group are keys."""
    words = section.split()
    if not words or words[0] not in KINDS:
        fail(path, section, "unknown section: one of %s was expected" % ', '.join('[%s]' % kind for kind in KINDS))
    kind = KINDS[words[0]]
    match = re.match('(?:%s)$' % kind.pattern, ' '.join(words[1:]))
    if not match:
        fail(path, section, "write %s" % kind.form)
    keys: Dict[str, Any] = {key: ' '.join(value.split()) for key, value in parser.items(section)}
    for key in keys:
        if key not in kind.keys + kind.one_of + kind.optional:
            fail(path, section, "unknown key '%s': it may have %s"
                 % (key, ', '.join(kind.keys + kind.one_of + kind.optional)))
    for key in list(kind.keys) + list(keys):
        if not keys.get(key):
            fail(path, section, "key '%s' is missing or empty: every entry says it" % key)
    if kind.one_of and len([key for key in kind.one_of if key in keys]) != 1:
        fail(path, section, "give exactly one of %s" % ', '.join(kind.one_of))

    keys.update(dict({'name': None, 'group': None}, **match.groupdict()))
    for (where, names), (pattern, right) in CHECKS.items():
        # twenty sites are read at each start: look only at what can be there
        if where != words[0]:
            continue
        found = [keys.get(name) or '' for name in names.split()]
        if found[0] and not re.match('(?:%s)$' % pattern, ' '.join(found)):
            fail(path, section, "%s is '%s': %s" % (names.split()[0], found[0], right))
    reason = forbidden_reason(keys['name']) if words[0] == 'env' else None
    if reason:
        fail(path, section, "%s may not be set by a module: %s. Remove the section." % (keys['name'], reason))
    if 'values' in keys:
        keys['values'] = [line.strip() for line in parser.get(section, 'values').splitlines() if line.strip()]
    return (words[0], keys['name'], keys['group']), keys


def new_parser(strict: bool = True) -> configparser.ConfigParser:
    """A parser of site files."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=('=',), comment_prefixes=('#',), strict=strict)
    parser.optionxform = str  # type: ignore  # names of variables have capitals
    return parser


def read_sections(path: str) -> Sections:
    """The sections of one file: {(kind, name, group): keys}."""
    parser = new_parser()
    try:
        if not os.path.isfile(path) and os.path.exists(path):
            # reading from a named pipe would wait for ever
            raise SiteError("%s is not a file: remove it from the directory of sites" % path)
        with open(path, encoding=ENCODING) as fp:
            parser.read_file(fp)
    except configparser.DuplicateSectionError as err:
        fail(path, err.section, "it is there twice: keep one of them")
    except configparser.DuplicateOptionError as err:
        fail(path, err.section, "key '%s' is there twice: keep one of them" % err.option)
    except (configparser.Error, UnicodeDecodeError) as err:
        raise SiteError("%s is not a valid site file: %s. See docs/sites.md for its form." % (path, err))
    except OSError as err:
        raise SiteError("%s cannot be read: %s" % (path, err))
    if parser.defaults():
        fail(path, 'DEFAULT', "a site file has no such section: move the keys to the section they belong to")

    sections: Sections = {}
    for section in parser.sections():
        if path.endswith(SHARED) and section.partition(' ')[0] in OF_A_SITE:
            fail(path, section, "it belongs into the file of a site: shared files include no others")
        identity, keys = read_section(path, section, parser)
        if identity in sections:
            fail(path, section, "it is there twice: keep one of them")
        sections[identity] = keys
    return sections


def read_broken(path: str) -> configparser.ConfigParser:
    """What a file has whose contents may be wrong: nothing, if it is no INI file."""
    parser = new_parser(strict=False)
    try:
        if not os.path.isfile(path):
            return parser
        with open(path, encoding=ENCODING, errors='replace') as fp:
            parser.read_file(fp)
    except (configparser.Error, OSError):
        return new_parser()
    return parser


@functools.lru_cache(maxsize=None)
def read_shared(path: str, changed: int) -> Sections:
    """Sections of a shared file, read once for all sites that include it; changed is when it was."""
    return read_sections(path)


def read_site(name: str, path: str, environ: Env) -> Site:
    """The Site in a file, with what it includes: there a section of its own replaces one of the same name."""
    own = read_sections(path)
    if ('site', None, None) not in own:
        fail(path, 'site', "it is missing: add it with the keys %s" % ', '.join(SITE_KEYS))
    sections: Sections = {}
    for include in split_list(own['site', None, None].get('include')):
        shared = find_files(SHARED, environ)
        if include not in shared:
            fail(path, 'site', "include names '%s', which is not one of %s" % (include, ', '.join(shared)))
        sections.update(read_shared(shared[include], os.stat(shared[include]).st_mtime_ns))
    sections.update(own)

    for (kind, generation, _), keys in own.items():
        for role in [role for role in ROLES if kind == 'provides' and keys.get(role) in ROLES]:
            if keys.get(keys[role]) in ROLES:
                fail(path, 'provides %s' % generation, "%s = %s leads to another role, and not to a module: write a "
                     "module at '%s'" % (role, keys[role], keys[role]))

    groups = [keys['name'] for (kind, _, _), keys in sections.items() if kind == 'group']
    for kind, value, group in list(sections):
        if group and group not in groups:
            if (kind, value, group) in own:
                fail(path, 'group ' + group, "it is missing: values of this group exist, so describe it")
            # shared values of a group that this site does not offer
            del sections[kind, value, group]
    for empty in [group for group in groups if group not in [key[2] for key in sections]]:
        fail(path, 'group ' + empty, "it has no values: add some with [env VARIABLE in %s], or remove it" % empty)
    return Site(name, path, sections)


def user_directory(environ: Env) -> Optional[str]:
    """The user's own directory with sites, there or not; None without a home directory."""
    # what is not absolute is to be ignored: XDG Base Directory Specification
    config = environ.get('XDG_CONFIG_HOME', '')
    if not os.path.isabs(config):
        config = os.path.join(environ.get('HOME', ''), '.config')
    return os.path.join(config, 'slingtorch', 'sites') if os.path.isabs(config) else None


def check_private(path: str) -> None:
    """Raise a SiteError if someone else may write to a directory: a site's values reach every module."""
    info = os.stat(path)
    if info.st_uid not in (0, os.geteuid()):
        raise SiteError("The directory %s with your sites belongs to someone else (user id %d). Move it away, and make "
                        "your own." % (path, info.st_uid))
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SiteError("Others may write to %s, from where your sites are read. Look at what is in it, then close it: "
                        "chmod go-w '%s'" % (path, path))
    if not os.access(path, os.R_OK | os.X_OK):
        raise SiteError("You may not read %s, where your sites are: chmod u+rwx '%s'" % (path, path))


def bundle_sites() -> str:
    """The bundle's own directory with sites."""
    return os.path.join(bundle_root(), 'hooks', 'sites')


def directories(environ: Env) -> List[str]:
    """The directories with sites: those of $SLINGTORCH_SITES_PATH, then the user's own, then that of the bundle."""
    paths = [path for path in environ.get(PATH_VARIABLE, '').split(':') if path]
    for path in paths:
        if not (os.path.isabs(path) and os.path.isdir(path)):
            raise SiteError("$%s names '%s', which is not the absolute path of a directory: correct it, or unset the "
                            "variable" % (PATH_VARIABLE, path))
        try:
            names = [name for name in os.listdir(path) if name.endswith((SITE, SHARED))]
        except OSError as err:
            raise SiteError("%s, from where $%s reads sites, cannot be read: %s"
                            % (path, PATH_VARIABLE, err.strerror))
        # a centre's group may write there, but not everybody
        for name in [path] + [os.path.join(path, name) for name in names]:
            if os.path.exists(name) and os.stat(name).st_mode & stat.S_IWOTH:
                raise SiteError("Everybody may write to %s, from where $%s reads sites: their values reach every "
                                "module. Look at what is in it, then close it: chmod o-w '%s'"
                                % (name, PATH_VARIABLE, name))
    own = user_directory(environ)
    # a home directory that a compute node does not have is not an error
    if own and os.path.isdir(own):
        check_private(os.path.dirname(own))
        check_private(own)
        paths.append(own)
    return paths + [bundle_sites()]


def find_files(suffix: str, environ: Env) -> Dict[str, str]:
    """Files with a suffix in all directories, the first of each name: sorted {name without suffix: path}."""
    found = {}
    for directory in reversed(directories(environ)):
        for entry in os.listdir(directory):
            # hidden ones are what editors leave: .#mine.cfg
            if entry.endswith(suffix) and not entry.startswith('.'):
                found[entry[:-len(suffix)]] = os.path.join(directory, entry)
    return dict(sorted(found.items()))


def load(name: str, environ: Env = os.environ) -> Site:
    """Return the Site with this name; an unknown name is a SiteError that lists the sites."""
    known = find_files(SITE, environ)
    if name not in known:
        raise SiteError("There is no site '%s'. The sites are: %s. 'slingtorch site new NAME' writes a new one for the "
                        "machine that you are on (see docs/sites.md)." % (name, ', '.join(known)))
    return read_site(name, known[name], environ)


def load_all(environ: Env = os.environ, faults: Optional[Faults] = None) -> List[Site]:
    """
    All sites, sorted by name, but those whose files are wrong: one of them must not stop the others.

    :param faults: list to which these are added, as (path, what is wrong with it)
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
    """What can still be read of the rules of a site whose file is wrong: list of (kind, pattern)."""
    parser = read_broken(path)
    return [pair for section in parser.sections() if section.split()[:1] == ['detect']
            for pair in parser.items(section) if pair[0] == 'file' or pair[0] == 'hostname' or '=' in pair[1]]


# ----------------------------------------------------------------------------------------------------------------------
# the choice

def detected_sites(environ: Env, hostname: str, root: str = '/',
                   faults: Optional[Faults] = None) -> List[Tuple[Site, str]]:
    """List of (site, why) of all sites whose rules match this machine (faults: load_all)."""
    pairs = [(site, site.detected(environ, hostname, root)) for site in load_all(environ, faults)]
    return [(site, why) for site, why in pairs if why]


def choose(environ: Env = os.environ, hostname: Optional[str] = None, root: str = '/') -> Choice:
    """
    Return the Choice (site, why, warning, detected) for this machine: the site named by $SLINGTORCH_SITE, else the
    detected one, else 'local'.

    What an earlier activation detected holds where nothing is seen any more, as on a compute node.
    A named site that is contradicted by what is detected is an error, unless it is a site without rules of its own
    (a generic one such as 'local'): that can be meant, and gives a warning. Files that are wrong give a warning too,
    but where no site is named and the rules in such a file match this machine.

    :raises SiteError: also if the rules of more than one site match and none is named
    """
    hostname = socket.gethostname() if hostname is None else hostname
    name = (environ.get(SITE_VARIABLE) or '').strip()
    earlier, _, why = environ.get(DETECTED_VARIABLE, '').partition(': ')
    faults: Faults = []
    found = detected_sites(environ, hostname, root, faults)
    if not name or name == earlier:
        for path, fault in faults:
            if matching_rule(broken_rules(path), environ, hostname, root):
                raise SiteError("%s. This machine looks like the site of this file: correct it, or name a site "
                                "(--site or $%s)" % (fault.rstrip('.'), SITE_VARIABLE))
    broken = '; '.join("a site is left out: " + fault for _, fault in faults) or None
    seen = ' and '.join("'%s' (%s)" % (site.name, reason) for site, reason in found)
    if not name or name == earlier:
        if len(found) > 1:
            raise SiteError("This machine looks like more than one site: %s. Name the right one with 'slingtorch env "
                            "--site NAME', or 'export %s=NAME'." % (seen, SITE_VARIABLE))
        if found:
            return Choice(found[0][0], found[0][1], broken, True)
        why = why if name else "no rule of any site matches this machine"
        return Choice(load(name or FALLBACK_SITE, environ), why, broken, True)

    site, warning = load(name, environ), broken
    if found and name not in [other.name for other, _ in found]:
        if site.rules:
            raise SiteError("Site '%s' is named (by --site or $%s), but this machine looks like %s. Unset %s, or leave "
                            "--site out, to take what is detected; if the detection is wrong, correct the rules in %s."
                            % (name, SITE_VARIABLE, seen, SITE_VARIABLE, found[0][0].path))
        warning = ("site '%s' was named although this machine looks like %s: nothing of that site is added. To have "
                   "it, unset %s." % (name, seen, SITE_VARIABLE)) + ('; ' + broken if broken else '')
    return Choice(site, "named by --site or $%s" % SITE_VARIABLE, warning, False)


def chosen_groups(environ: Env = os.environ) -> List[str]:
    """Names of the opt-in groups in $SLINGTORCH_SITE_GROUPS (not checked against a site)."""
    return split_list(environ.get(GROUPS_VARIABLE))


# ----------------------------------------------------------------------------------------------------------------------
# EasyBuild

def old_easybuild(version: str, path: str, environ: Env = os.environ) -> Optional[str]:
    """What is wrong with the EasyBuild that runs, of this version, if it is too old; path is a file of its tools."""
    numbers = [[int(number) for number in re.findall(r'\d+', str(text))[:3]] for text in (version, OLDEST_EASYBUILD)]
    if numbers[0] >= numbers[1]:
        return None
    where = os.path.realpath(os.path.join(path, '..', '..', '..'))
    remedy = "Install a newer one, in the Python that runs eb: pip install 'easybuild-framework>=%s'" % OLDEST_EASYBUILD
    if where in [os.path.realpath(entry) for entry in environ.get('PYTHONPATH', '').split(':') if entry]:
        remedy = "It comes first by PYTHONPATH: unload the module that sets it, or 'unset PYTHONPATH'"
    return ("this is EasyBuild %s, in %s, and slingtorch needs %s or newer. %s"
            % (version, where, OLDEST_EASYBUILD, remedy))
