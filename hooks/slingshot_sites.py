##
# Copyright 2026 the slingtorch authors
#
# This file is part of slingtorch, an EasyBuild bundle, and is distributed under
# the GNU General Public License version 2 (see the file LICENSE).
##
"""
Sites: which system this is and which values it gives to software that is installed on it.

A site is one file, sites/<site>.cfg, with data alone; docs/sites.md describes its form. This module reads, checks and
chooses sites. It imports nothing but the standard library, so that both the hooks (under eb) and the command
'slingtorch' (without EasyBuild) can use it.
"""
import configparser
import fnmatch
import os
import re
import socket
from collections import OrderedDict, namedtuple

SITES_DIR = os.path.join(os.path.dirname(os.path.realpath(__file__)), 'sites')

# the site that is chosen when nothing is detected
FALLBACK_SITE = 'local'
# variables that name the site and its opt-in groups
SITE_VARIABLE = 'SLINGTORCH_SITE'
GROUPS_VARIABLE = 'SLINGTORCH_SITE_GROUPS'
# '<site>: <what was seen>' of an activation that detected the site: then nobody has named it
DETECTED_VARIABLE = 'SLINGTORCH_SITE_DETECTED'

# variables that must not be set by a module, whatever the site: name pattern and reason
FORBIDDEN = (
    ('NCCL_NET', "on one node NCCL would needlessly take the network, or not start: give the name in "
                 "SLINGTORCH_MULTINODE_NCCL_NET, from which the runscript sets it in jobs of several nodes"),
    ('NCCL_ALGO', "NVIDIA documents it for debugging; the tuner chooses"),
    ('NCCL_DEBUG*', "it floods the logs of large jobs: it belongs in the job script of the one who debugs"),
    ('FI_LOG_*', "it floods the logs of large jobs: it belongs in the job script of the one who debugs"),
    ('FI_PROVIDER', "it breaks other users of libfabric in the same shell; the plugin finds its provider unaided"),
    ('MIOPEN_*', "its directories differ per job and node: the runscript makes them"),
    ('MASTER_*', "it differs per job: the runscript sets it"),
    ('RANK', "it differs per task: the runscript sets it"),
    ('LOCAL_RANK', "it differs per task: the runscript sets it"),
    ('WORLD_SIZE', "it differs per job: the runscript sets it"),
    ('LOCAL_WORLD_SIZE', "it differs per job: the runscript sets it"),
    ('*_VISIBLE_DEVICES', "it differs per task: name the variable in the parameter gpu_visibility instead"),
    ('SLURM_*', "the scheduler owns it, and it reaches every step of the job"),
    ('CUDA_DEVICE_MAX_CONNECTIONS', "tensor parallelism wants 1, FSDP must not have 1: it belongs in the job script"),
    ('MPICH_RDMA_ENABLED_CUDA', "it is of Cray XC systems and does nothing on Slingshot"),
    ('PATH', "setting it would replace what the user has"),
    ('LD_LIBRARY_PATH', "setting it would replace what the user has"),
    ('LD_PRELOAD', "setting it would replace what the user has"),
    ('PYTHONPATH', "setting it would replace what the user has"),
)

SITE_KEYS = ('title', 'centre', 'url', 'scheduler', 'gpu', 'gpus_per_node', 'network', 'source')
CHOICES = {
    'scheduler': ('slurm', 'pbs', 'none'),
    'gpu': ('cuda', 'rocm', 'none', 'any'),
    'network': ('slingshot11', 'infiniband', 'ethernet', 'any'),
    'module_syntax': ('Lua', 'Tcl'),
}
# section kind: (mandatory keys, optional keys)
SECTION_KEYS = {
    'site': (SITE_KEYS, ()),
    'detect': (('source',), ('env', 'file', 'hostname')),
    'env': (('value', 'reason', 'source'), ('for', 'when')),
    'parameter': (('reason', 'source'), ('value', 'values', 'for')),
    'group': (('title', 'needs', 'reason', 'source'), ()),
    'slingtorch': (('reason', 'source'), ('external_modules_metadata', 'module_syntax')),
}

Value = namedtuple('Value', ['name', 'value', 'reason', 'source', 'group', 'easyblocks', 'when'])
Group = namedtuple('Group', ['name', 'title', 'needs', 'reason', 'source'])
Rule = namedtuple('Rule', ['kind', 'name', 'pattern', 'source'])
Choice = namedtuple('Choice', ['site', 'why', 'warning', 'detected'])


class SiteError(Exception):
    """A site that does not exist, cannot be decided on, or whose file is wrong; the message says what to do."""


class Site:
    """One site, as its file describes it.

    Attributes: name, path, the keys of its [site] section, env and parameters (lists of Value), groups (dictionary of
    Group by name), rules (list of Rule), external_modules_metadata (file name or None), module_syntax (or None).
    """

    def __init__(self, name, path):
        self.name = name
        self.path = path
        self.env = []
        self.parameters = []
        self.groups = OrderedDict()
        self.rules = []
        self.external_modules_metadata = None
        self.module_syntax = None
        for key in SITE_KEYS:
            setattr(self, key, None)

    def detected(self, environ, hostname, root='/'):
        """
        Return what shows that this machine is the site, or None.

        :param environ: dictionary of environment variables
        :param hostname: name of this host, short or full
        :param root: directory that stands for / (for tests)
        """
        for rule in self.rules:
            if rule.kind == 'env':
                value = environ.get(rule.name)
                if value is not None and fnmatch.fnmatchcase(value, rule.pattern):
                    return "$%s is %s" % (rule.name, value)
            elif rule.kind == 'file':
                if os.path.exists(os.path.join(root, rule.pattern.lstrip('/'))):
                    return "%s exists" % rule.pattern
            elif any(fnmatch.fnmatchcase(host, rule.pattern) for host in (hostname, hostname.split('.')[0])):
                return "the host name is %s" % hostname
        return None

    def check_groups(self, names, asked_by='$' + GROUPS_VARIABLE):
        """Return the groups with these names; an unknown one is a SiteError that lists the known ones."""
        for name in names:
            if name not in self.groups:
                known = ''.join('\n  %s: %s; needs %s' % (group.name, group.title, group.needs)
                                for group in self.groups.values())
                raise SiteError("%s names the group '%s', which site '%s' does not have. %s"
                                % (asked_by, name, self.name,
                                   "It has:" + known if known else "It has no groups: leave it out."))
        return [self.groups[name] for name in names]

    def _selected(self, values, names):
        """Values outside of groups, replaced by and completed with those of the named groups."""
        res = OrderedDict((value.name, value) for value in values if value.group is None)
        for value in values:
            if value.group in names:
                other = res.get(value.name)
                if other is not None and other.group is not None and other.value != value.value:
                    raise SiteError("The groups '%s' and '%s' of site '%s' exclude each other: they give %s different "
                                    "values ('%s' and '%s'). Choose one of them."
                                    % (other.group, value.group, self.name, value.name, other.value, value.value))
                res[value.name] = value
        return res

    def env_values(self, groups=()):
        """Environment values (dictionary of Value by variable) without groups and with the named groups."""
        self.check_groups(groups)
        return self._selected(self.env, groups)

    def parameter_values(self, groups=()):
        """Easyconfig parameter values (dictionary of Value by parameter), likewise."""
        self.check_groups(groups)
        return self._selected(self.parameters, groups)


def split_list(text):
    """Words of a list that is separated by commas or white space, each once, in order."""
    return list(OrderedDict.fromkeys(word for word in re.split(r'[,\s]+', text or '') if word))


def forbidden_reason(variable):
    """Why no module may set this environment variable; None if it may."""
    for pattern, reason in FORBIDDEN:
        if fnmatch.fnmatchcase(variable, pattern):
            return reason
    return None


class _Reader:
    """Reads one site file; every fault is a SiteError with file, section and remedy."""

    def __init__(self, name, path):
        self.site = Site(name, path)
        self.parser = configparser.ConfigParser(interpolation=None, delimiters=('=',), comment_prefixes=('#',))
        self.parser.optionxform = str

    def fail(self, section, message):
        """Raise the error that names the place."""
        raise SiteError("%s, section [%s]: %s" % (self.site.path, section, message))

    def read(self):
        """Return the Site."""
        try:
            with open(self.site.path, encoding='utf-8') as fp:
                self.parser.read_file(fp)
        except configparser.DuplicateSectionError as err:
            self.fail(err.section, "it is there twice: keep one of them")
        except configparser.DuplicateOptionError as err:
            self.fail(err.section, "key '%s' is there twice: keep one of them" % err.option)
        except (configparser.Error, UnicodeDecodeError) as err:
            raise SiteError("%s is not a valid site file: %s. See docs/sites.md for its form." % (self.site.path, err))
        except (IOError, OSError) as err:
            raise SiteError("%s cannot be read: %s" % (self.site.path, err))
        if self.parser.defaults():
            self.fail('DEFAULT', "a site file has no such section: move the keys to the section they belong to")

        seen = set()
        for section in self.parser.sections():
            words = section.split()
            if tuple(words) in seen:
                self.fail(section, "it is there twice: keep one of them")
            seen.add(tuple(words))
            self.read_section(section, words)
        if ('site',) not in seen:
            self.fail('site', "it is missing: add it with the keys %s" % ', '.join(SITE_KEYS))
        self.check_groups()
        return self.site

    def read_section(self, section, words):
        """Check the keys of a section and hand it to the method for its kind."""
        kind = words[0]
        if kind not in SECTION_KEYS:
            self.fail(section, "unknown section: one of %s was expected"
                      % ', '.join('[%s]' % known for known in SECTION_KEYS))
        keys = OrderedDict((key, ' '.join(value.split())) for key, value in self.parser.items(section))
        if 'values' in keys:
            keys['values'] = [line.strip() for line in self.parser.get(section, 'values').splitlines() if line.strip()]
        mandatory, optional = SECTION_KEYS[kind]
        for key in keys:
            if key not in mandatory + optional:
                self.fail(section, "unknown key '%s': it may have %s" % (key, ', '.join(mandatory + optional)))
        for key in mandatory:
            if not keys.get(key):
                self.fail(section, "key '%s' is missing or empty: every entry says it" % key)
        for key, choices in CHOICES.items():
            if key in keys and keys[key] not in choices:
                self.fail(section, "%s is '%s': it must be one of %s" % (key, keys[key], ', '.join(choices)))
        getattr(self, 'read_' + kind)(section, words[1:], keys)

    def name_and_group(self, section, words):
        """Name and group of [env NAME] and [env NAME in GROUP]."""
        if len(words) == 1:
            return words[0], None
        if len(words) == 3 and words[1] == 'in':
            return words[0], words[2]
        return self.fail(section, "write [%(kind)s NAME], or [%(kind)s NAME in GROUP]" % {'kind': section.split()[0]})

    def read_site(self, section, words, keys):
        """[site]: what the system is."""
        if words:
            self.fail(section, "write [site]; the name of the site is the name of the file")
        gpu, number = keys['gpu'], keys['gpus_per_node']
        fits = number == {'none': '0', 'any': 'any'}[gpu] if gpu in ('none', 'any') else re.match(r'^[1-9]\d*$', number)
        if not fits:
            self.fail(section, "gpus_per_node is '%s' and gpu is '%s': give the number of GPUs that a job sees on a "
                               "node, 0 where gpu is none, any where gpu is any" % (number, gpu))
        for key, value in keys.items():
            setattr(self.site, key, value)

    def read_detect(self, section, words, keys):
        """[detect LABEL]: one rule by which the site is recognised."""
        kinds = [kind for kind in ('env', 'file', 'hostname') if kind in keys]
        if len(words) != 1 or len(kinds) != 1:
            self.fail(section, "write [detect LABEL] with exactly one of env, file and hostname")
        name, pattern = None, keys[kinds[0]]
        if kinds[0] == 'env':
            name, sep, pattern = (part.strip() for part in pattern.partition('='))
            if not (name and sep and pattern):
                self.fail(section, "write env = VARIABLE=PATTERN")
        elif kinds[0] == 'file' and not pattern.startswith('/'):
            self.fail(section, "file must be an absolute path")
        if pattern in ('', '/') or (kinds[0] == 'hostname' and not pattern.strip('*?')):
            self.fail(section, "'%s' would match every machine: make it narrower" % pattern)
        self.site.rules.append(Rule(kinds[0], name, pattern, keys['source']))

    def read_env(self, section, words, keys):
        """[env VARIABLE], [env VARIABLE in GROUP]: a value of an environment variable."""
        name, group = self.name_and_group(section, words)
        if not re.match(r'^[A-Z_][A-Z0-9_]*$', name):
            self.fail(section, "'%s' is not a name of an environment variable: use capitals, digits and _" % name)
        reason = forbidden_reason(name)
        if reason:
            self.fail(section, "%s may not be set by a module: %s. Remove the section." % (name, reason))
        if '%(' in keys['value']:
            self.fail(section, "EasyBuild would take '%(' in a value for a template: write it differently")
        when = None
        if 'when' in keys:
            parameter, sep, wanted = (part.strip() for part in keys['when'].partition('='))
            if not (parameter and sep and wanted):
                self.fail(section, "write when = PARAMETER=VALUE")
            when = (parameter, wanted)
        self.site.env.append(Value(name, keys['value'], keys['reason'], keys['source'], group,
                                   split_list(keys.get('for')), when))

    def read_parameter(self, section, words, keys):
        """[parameter NAME], [parameter NAME in GROUP]: a value of an easyconfig parameter."""
        name, group = self.name_and_group(section, words)
        if not re.match(r'^[a-z_][a-z0-9_]*$', name):
            self.fail(section, "'%s' is not a name of an easyconfig parameter" % name)
        if name in ('modextravars', 'site_groups'):
            self.fail(section, "%s is not set this way: use [env VARIABLE] and [group NAME]" % name)
        if ('value' in keys) == ('values' in keys):
            self.fail(section, "give value (a string) or values (a list, one entry per line), not both")
        value = keys.get('value', keys.get('values'))
        if not value:
            self.fail(section, "the value is empty: remove the section, or give a value")
        self.site.parameters.append(Value(name, value, keys['reason'], keys['source'], group,
                                          split_list(keys.get('for')), None))

    def read_group(self, section, words, keys):
        """[group NAME]: an opt-in group."""
        if len(words) != 1 or not re.match(r'^[A-Za-z0-9_.-]+$', words[0]):
            self.fail(section, "write [group NAME], with a name of letters, digits, '_', '.' and '-'")
        self.site.groups[words[0]] = Group(words[0], keys['title'], keys['needs'], keys['reason'], keys['source'])

    def read_slingtorch(self, section, words, keys):
        """[slingtorch]: how EasyBuild is configured here."""
        if words:
            self.fail(section, "write [slingtorch]")
        metadata = keys.get('external_modules_metadata')
        if metadata and os.path.basename(metadata) != metadata:
            self.fail(section, "external_modules_metadata must be the name of a file in hooks/metadata")
        self.site.external_modules_metadata = metadata
        self.site.module_syntax = keys.get('module_syntax')

    def check_groups(self):
        """Every group that is used is described, and every one that is described is used."""
        used = OrderedDict.fromkeys(value.group for value in self.site.env + self.site.parameters if value.group)
        for name in used:
            if name not in self.site.groups:
                self.fail('group ' + name, "it is missing: values of this group exist, so describe it")
        for name in self.site.groups:
            if name not in used:
                self.fail('group ' + name, "it has no values: add some with [env VARIABLE in %s], or remove it" % name)


def site_names(sites_dir=None):
    """Names of all sites, sorted."""
    sites_dir = sites_dir or SITES_DIR
    return sorted(entry[:-len('.cfg')] for entry in os.listdir(sites_dir) if entry.endswith('.cfg'))


def load(name, sites_dir=None):
    """Return the Site with this name; an unknown name is a SiteError that lists the sites."""
    known = site_names(sites_dir)
    if name not in known:
        raise SiteError("There is no site '%s'. The sites are: %s. A new one is a file in %s (see docs/sites.md)."
                        % (name, ', '.join(known), sites_dir or SITES_DIR))
    return _Reader(name, os.path.join(sites_dir or SITES_DIR, name + '.cfg')).read()


def load_all(sites_dir=None):
    """All sites, sorted by name."""
    return [load(name, sites_dir) for name in site_names(sites_dir)]


def detected_sites(environ, hostname, root='/', sites_dir=None):
    """List of (site, why) of all sites whose rules match this machine."""
    pairs = [(site, site.detected(environ, hostname, root)) for site in load_all(sites_dir)]
    return [(site, why) for site, why in pairs if why]


def _list_found(found):
    return ' and '.join("'%s' (%s)" % (site.name, why) for site, why in found)


def detect(environ, hostname, root='/', sites_dir=None):
    """
    Return (site, why) for this machine; the site 'local' if no rule matches.

    :raises SiteError: if the rules of more than one site match
    """
    found = detected_sites(environ, hostname, root, sites_dir)
    if len(found) > 1:
        raise SiteError("This machine looks like more than one site: %s. Name the right one with 'slingtorch env "
                        "--site NAME', or 'export %s=NAME'." % (_list_found(found), SITE_VARIABLE))
    if found:
        return found[0]
    return load(FALLBACK_SITE, sites_dir), "no rule of any site matches this machine"


def choose(environ=None, hostname=None, root='/', sites_dir=None):
    """
    Return the Choice (site, why, warning, detected) for this machine: the site named by $SLINGTORCH_SITE, else the
    detected one.

    What an earlier activation detected holds where nothing is seen any more, as on a compute node.
    A named site that is contradicted by what is detected is an error, unless it is a site without rules of its own
    (a generic one such as 'local'): that can be meant, and gives a warning.
    """
    environ = os.environ if environ is None else environ
    hostname = socket.gethostname() if hostname is None else hostname
    name = (environ.get(SITE_VARIABLE) or '').strip()
    earlier, _, why = environ.get(DETECTED_VARIABLE, '').partition(': ')
    found = detected_sites(environ, hostname, root, sites_dir)
    if not name or (name == earlier and found):
        site, why = detect(environ, hostname, root, sites_dir)
        return Choice(site, why, None, True)

    site = load(name, sites_dir)
    if name == earlier:
        return Choice(site, why, None, True)
    why = "named by --site or $%s" % SITE_VARIABLE
    if not found or name in [other.name for other, _ in found]:
        return Choice(site, why, None, False)
    if not site.rules:
        return Choice(site, why, "site '%s' was named although this machine looks like %s: nothing of that site is "
                                 "added. To have it, unset %s." % (name, _list_found(found), SITE_VARIABLE), False)
    raise SiteError("Site '%s' is named (by --site or $%s), but this machine looks like %s. Unset %s, or leave --site "
                    "out, to take what is detected; if the detection is wrong, correct the rules in %s."
                    % (name, SITE_VARIABLE, _list_found(found), SITE_VARIABLE, found[0][0].path))


def chosen_groups(environ=None):
    """Names of the opt-in groups in $SLINGTORCH_SITE_GROUPS (not checked against a site)."""
    return split_list((os.environ if environ is None else environ).get(GROUPS_VARIABLE))
