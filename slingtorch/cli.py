##
# Copyright 2026 the slingtorch authors
#
# This file is part of slingtorch, an EasyBuild bundle, and is distributed under
# the GNU General Public License version 2 (see the file LICENSE).
##
"""
The command slingtorch: 'env' prints shell code that makes EasyBuild find the bundle, 'sites' shows what it knows.

What is printed for a shell goes to standard output, everything for a person to standard error.
"""
import argparse
import configparser
import glob
import importlib.util
import json
import os
import shlex
import shutil
import sys
import textwrap

from slingtorch import __version__, bundle_root

SHELLS = {'bash': 'sh', 'sh': 'sh', 'zsh': 'sh', 'csh': 'csh', 'tcsh': 'csh'}
# what has a meaning in EasyBuild's path lists and globs, or ends a line
SPECIAL_CHARACTERS = ':,*?[]\n'
# what a bundle holds
BUNDLE_DIRS = ('easyblocks', 'easyconfigs', 'hooks', 'patches', 'runscripts')


class CliError(Exception):
    """Something that a person must decide or mend; the message says how."""


def load_slingshot_sites(root):
    """The module slingshot_sites of the bundle, which is a file beside the hooks and in no package."""
    path = os.path.join(root, 'hooks', 'slingshot_sites.py')
    spec = importlib.util.spec_from_file_location('slingshot_sites', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def note(message):
    """Say something to the person who uses the command."""
    sys.stderr.write("slingtorch: %s\n" % message)


# ----------------------------------------------------------------------------------------------------------------------
# EasyBuild's configuration, as far as it must be continued

def split_words(text, separator):
    """Elements of a list, without the blanks around them."""
    return [word.strip() for word in text.split(separator)]


class EasyBuildConfig:
    """What the user has configured: environment variables first, then configuration files."""

    def __init__(self, environ):
        """
        Read the configuration files that EasyBuild would read (easybuild/tools/options.py).

        :raises CliError: if one cannot be read
        """
        self.environ = environ
        self.files = {}
        home = environ.get('HOME') or os.path.expanduser('~')
        self.home = home
        dirs = (environ.get('XDG_CONFIG_DIRS') or '/etc/xdg').split(':')
        paths = []
        for directory in reversed(dirs):
            paths.extend(sorted(glob.glob(os.path.join(directory, 'easybuild.d', '*.cfg'))))
        paths.append(os.path.join(environ.get('XDG_CONFIG_HOME') or os.path.join(home, '.config'), 'easybuild',
                                  'config.cfg'))
        paths.extend(path for path in split_words(environ.get('EASYBUILD_CONFIGFILES', ''), ',') if path)
        ignored = split_words(environ.get('EASYBUILD_IGNORECONFIGFILES', ''), ',')
        for path in paths:
            if path not in ignored and os.path.isfile(path):
                self._read(path)

    def _read(self, path):
        """Add the options of one file: a later file wins."""
        # an empty element of robot-paths stands for EasyBuild's default, as this constant does
        constants = {'HOME': self.home, 'USER': self.environ.get('USER', ''), 'DEFAULT_ROBOT_PATHS': ''}
        parser = configparser.ConfigParser()
        parser.optionxform = str
        parser.read_dict({'DEFAULT': constants})
        try:
            with open(path, encoding='utf-8') as fp:
                parser.read_file(fp)
            for section in parser.sections():
                for key, value in parser.items(section):
                    if key not in parser.defaults():
                        self.files[key.replace('_', '-')] = (value, path)
        except (configparser.Error, UnicodeDecodeError, OSError) as err:
            raise CliError("EasyBuild's configuration file %s cannot be read: %s. Correct it, or leave it out with "
                           "'export EASYBUILD_IGNORECONFIGFILES=%s'." % (path, err, path))

    def get(self, option):
        """Return (value, where it comes from), or (None, None)."""
        variable = 'EASYBUILD_' + option.upper().replace('-', '_')
        if self.environ.get(variable):
            return self.environ[variable], '$' + variable
        return self.files.get(option, (None, None))

    def elements(self, option, separator, default=()):
        """The elements of an option that is a list."""
        value, _ = self.get(option)
        return split_words(value, separator) if value else list(default)


def default_metadata_files(environ):
    """
    The files with metadata of external modules that EasyBuild reads by itself, unless the option is set.

    They are in etc/, beside the bin/ of eb or beside the package easybuild (parse_external_modules_metadata in
    easybuild/tools/options.py).
    """
    tops = []
    eb_path = environ.get('EB_SCRIPT_PATH') or shutil.which('eb', path=environ.get('PATH'))
    if eb_path:
        tops.append(os.path.dirname(os.path.dirname(eb_path)))
    spec = importlib.util.find_spec('easybuild')
    for place in (spec.submodule_search_locations or []) if spec else []:
        tops.extend([os.path.dirname(place), sys.prefix])
    for top in tops:
        found = sorted(glob.glob(os.path.join(glob.escape(top), 'etc', '*external_modules_metadata.cfg')))
        if found:
            return found
    return []


# ----------------------------------------------------------------------------------------------------------------------
# slingtorch env

def check_root(root):
    """Raise a CliError if EasyBuild could not take the path of the bundle."""
    bad = sorted(set(root) & set(SPECIAL_CHARACTERS))
    if bad:
        raise CliError("The bundle is in '%s': EasyBuild's lists of paths cannot hold the characters %s. Move the "
                       "bundle to a directory without them." % (root, ' '.join(repr(char) for char in bad)))


def other_root(config, root, keep_hooks):
    """
    Look at the hooks that EasyBuild is configured with already.

    :return: root of another copy of the bundle that is to be replaced, or None
    :raises CliError: if they are someone else's, since EasyBuild takes one file with hooks
    """
    ours = os.path.join(root, 'hooks', 'slingshot_hooks.py')
    theirs, where = config.get('hooks')
    if not theirs or keep_hooks or os.path.realpath(os.path.expanduser(theirs)) == os.path.realpath(ours):
        return None
    directory, name = os.path.split(os.path.abspath(os.path.expanduser(theirs)))
    if name == os.path.basename(ours) and os.path.isfile(os.path.join(directory, 'slingshot_sites.py')):
        return os.path.dirname(directory)
    raise CliError("EasyBuild takes one file with hooks, and %s names %s already. Take it out there, or let that file "
                   "call the hooks of %s as well and use 'slingtorch env --keep-hooks'." % (where, theirs, ours))


def activation(environ, root, site, groups, keep_hooks=False):
    """
    Variables that make EasyBuild use the bundle: list of (name, value), where None as value means: to be unset.

    :param environ: environment of the user, in which the variables are set already or not
    :param root: root of the bundle
    :param site: site, as a slingshot_sites.Site
    :param groups: names of opt-in groups
    """
    check_root(root)
    config = EasyBuildConfig(environ)
    roots = [root] + [other for other in [other_root(config, root, keep_hooks)] if other]
    ours = tuple(os.path.join(top, name) for top in roots for name in BUNDLE_DIRS)

    def theirs(elements):
        """Elements that no copy of the bundle has added."""
        return [elem for elem in elements if not elem.startswith(ours)]

    variables = []
    # an empty element stands for EasyBuild's own easyconfigs
    robot_paths = theirs(config.elements('robot-paths', ':', default=['']))
    variables.append(('EASYBUILD_ROBOT_PATHS', ':'.join([os.path.join(root, 'easyconfigs')] + (robot_paths or ['']))))

    # a pattern without a match is an error in EasyBuild
    patterns = [os.path.join(root, 'easyblocks', '*.py'), os.path.join(root, 'easyblocks', 'generic', '*.py')]
    easyblocks = [pattern for pattern in patterns if glob.glob(pattern)]
    easyblocks += [elem for elem in theirs(config.elements('include-easyblocks', ',')) if elem]
    variables.append(('EASYBUILD_INCLUDE_EASYBLOCKS', ','.join(easyblocks) or None))

    if not keep_hooks:
        variables.append(('EASYBUILD_HOOKS', os.path.join(root, 'hooks', 'slingshot_hooks.py')))

    prefix = os.path.expanduser(config.get('prefix')[0] or os.path.join(config.home, '.local', 'easybuild'))
    source_path = [elem for elem in theirs(config.elements('sourcepath', ':')) if elem]
    # the first element is where EasyBuild puts what it downloads
    source_path = source_path or [os.path.join(prefix, 'sources')]
    source_path += [os.path.join(root, 'patches'), os.path.join(root, 'runscripts')]
    variables.append(('EASYBUILD_SOURCEPATH', ':'.join(source_path)))

    defaults = default_metadata_files(environ)
    metadata = [elem for elem in theirs(config.elements('external-modules-metadata', ',')) if elem]
    if site.external_modules_metadata:
        if not (metadata or defaults):
            note("EasyBuild's own metadata of external modules is not found, and is left out: is 'eb' on your PATH?")
        metadata = (metadata or defaults) + [os.path.join(root, 'hooks', 'metadata', site.external_modules_metadata)]
    elif metadata == defaults:
        # left by an earlier activation for another site
        metadata = []
    variables.append(('EASYBUILD_EXTERNAL_MODULES_METADATA', ','.join(metadata) or None))

    if site.module_syntax and not config.get('module-syntax')[0]:
        variables.append(('EASYBUILD_MODULE_SYNTAX', site.module_syntax))
    variables.append(('SLINGTORCH_SITE', site.name))
    variables.append(('SLINGTORCH_SITE_GROUPS', ','.join(groups) or None))
    return variables


def quote_csh(value):
    """Quote a value for csh and tcsh, in which '!' is special even between single quotes."""
    return "'%s'" % value.replace("'", "'\\''").replace('!', '\\!')


def shell_code(variables, environ, shell):
    """Shell code that sets and unsets variables; what is unset already is left out."""
    lines = []
    for name, value in variables:
        if value is None:
            if name in environ:
                lines.append(('unset %s' if SHELLS[shell] == 'sh' else 'unsetenv %s;') % name)
        elif SHELLS[shell] == 'sh':
            lines.append('export %s=%s' % (name, shlex.quote(value)))
        else:
            lines.append('setenv %s %s;' % (name, quote_csh(value)))
    return '\n'.join(lines) + '\n'


def run_env(args):
    """slingtorch env"""
    environ = dict(os.environ)
    root = bundle_root()
    sites = load_slingshot_sites(root)
    before = environ.get(sites.SITE_VARIABLE)
    if args.site:
        environ[sites.SITE_VARIABLE] = args.site
    choice = sites.choose(environ)
    if choice.warning:
        note("warning: " + choice.warning)

    if args.groups is not None:
        groups = sites.split_list(args.groups)
    elif before and before != choice.site.name and sites.chosen_groups(environ):
        note("groups of site '%s' (%s) are left out: name those of '%s' with --with"
             % (before, ','.join(sites.chosen_groups(environ)), choice.site.name))
        groups = []
    else:
        groups = sites.chosen_groups(environ)
    asked_by = '--with' if args.groups is not None else '$' + sites.GROUPS_VARIABLE
    described = choice.site.check_groups(groups, asked_by=asked_by)
    # groups that exclude each other
    choice.site.env_values(groups)
    choice.site.parameter_values(groups)

    text = shell_code(activation(environ, root, choice.site, groups, keep_hooks=args.keep_hooks), os.environ,
                      args.shell)
    sys.stdout.write(text)
    if not args.quiet:
        note("site %s (%s), bundle %s" % (choice.site.name, choice.why, root))
        for group in described:
            note("group %s: %s; needs %s" % (group.name, group.title, group.needs))
        if sys.stdout.isatty():
            use = 'eval "$(slingtorch env)"' if SHELLS[args.shell] == 'sh' else 'eval "`slingtorch env --shell csh`"'
            note("nothing has changed in your shell; to change it: %s" % use)
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# slingtorch sites

def value_data(value):
    """A value of a site, for JSON."""
    data = {'name': value.name, 'value': value.value, 'reason': value.reason, 'source': value.source}
    if value.group:
        data['group'] = value.group
    if value.easyblocks:
        data['for'] = value.easyblocks
    if value.when:
        data['when'] = '='.join(value.when)
    return data


def site_data(site, keys, why=None):
    """A site, for JSON."""
    data = {key: getattr(site, key) for key in keys}
    data.update({
        'name': site.name,
        'file': site.path,
        'detected': why,
        'groups': [dict(group._asdict()) for group in site.groups.values()],
        'env': [value_data(value) for value in site.env],
        'parameters': [value_data(value) for value in site.parameters],
    })
    return data


def print_values(values, group=None):
    """Print values, each with reason and source."""
    for value in values:
        if value.group == group:
            shown = '\n      '.join(value.value) if isinstance(value.value, list) else value.value
            print("  %s = %s" % (value.name, shown))
            if value.easyblocks:
                print("      for:    %s" % ', '.join(value.easyblocks))
            if value.when:
                print("      when:   %s = %s" % value.when)
            for label, text in (('reason', value.reason), ('source', value.source)):
                print(textwrap.fill(text, width=112, initial_indent='      %-7s ' % (label + ':'),
                                    subsequent_indent=' ' * 14, break_long_words=False, break_on_hyphens=False))


def print_site(site):
    """Print one site with everything in it."""
    print("%s: %s" % (site.name, site.title))
    for key in ('centre', 'url', 'scheduler', 'gpu', 'gpus_per_node', 'network', 'source'):
        print("  %-14s %s" % (key + ':', getattr(site, key)))
    print("  %-14s %s" % ('file:', site.path))
    if not (site.env or site.parameters):
        print("It gives no values.")
        return
    if any(value.group is None for value in site.env):
        print("\nEnvironment variables in the module of PyTorch:")
        print_values(site.env)
    if any(value.group is None for value in site.parameters):
        print("\nEasyconfig parameters:")
        print_values(site.parameters)
    for group in site.groups.values():
        print("\nGroup %s (opt-in: slingtorch env --with %s): %s" % (group.name, group.name, group.title))
        print("  needs:  %s" % group.needs)
        print("  reason: %s" % group.reason)
        print("  source: %s" % group.source)
        print_values(site.env + site.parameters, group=group.name)


def run_sites(args):
    """slingtorch sites"""
    sites = load_slingshot_sites(bundle_root())
    if args.name:
        site = sites.load(args.name)
        if args.json:
            print(json.dumps(site_data(site, sites.SITE_KEYS), indent=2, sort_keys=True))
        else:
            print_site(site)
        return 0

    known = sites.load_all()
    found = {site.name: why for site, why in sites.detected_sites(os.environ, sites.socket.gethostname())}
    chosen, message, failed = None, None, False
    try:
        choice = sites.choose()
        chosen = choice.site.name
        message = "this machine: %s (%s)%s" % (chosen, choice.why, '; ' + choice.warning if choice.warning else '')
    except sites.SiteError as err:
        message, failed = str(err), True
    if args.json:
        print(json.dumps({'chosen': chosen, 'sites': [site_data(site, sites.SITE_KEYS, found.get(site.name))
                                                      for site in known]}, indent=2, sort_keys=True))
    else:
        widths = [max(len(text) for text in column) for column in
                  zip(*[('site', 'network', 'gpu')] + [(site.name, site.network, site.gpu) for site in known])]
        row = '  %%-%ds  %%-%ds  %%-%ds  %%s' % tuple(widths)
        print(row % ('site', 'network', 'gpu', 'system and opt-in groups'))
        for site in known:
            print(('*' if site.name == chosen else ' ') + row[1:] % (site.name, site.network, site.gpu, site.title))
            for group in site.groups.values():
                print(row % ('', '', '', '  %s: %s; needs %s' % (group.name, group.title, group.needs)))
        print("'slingtorch sites NAME' shows the values of a site, each with its reason and its source.")
    note(message)
    return 1 if failed else 0


# ----------------------------------------------------------------------------------------------------------------------

def make_parser():
    """The parser of the command line."""
    parser = argparse.ArgumentParser(prog='slingtorch', description="Activates the EasyBuild bundle slingtorch.")
    parser.add_argument('--version', action='version', version='slingtorch ' + __version__)
    commands = parser.add_subparsers(dest='command', metavar='COMMAND')

    env = commands.add_parser('env', help="print shell code that makes EasyBuild use the bundle",
                              description="Prints shell code; use it as: eval \"$(slingtorch env)\"")
    env.add_argument('--site', metavar='NAME', help="the site; without it $SLINGTORCH_SITE, else what is detected")
    env.add_argument('--with', metavar='GROUP[,GROUP]', dest='groups',
                     help="opt-in groups of the site; without it $SLINGTORCH_SITE_GROUPS. Empty for none.")
    env.add_argument('--shell', choices=sorted(SHELLS), default='bash', help="default: bash (also for sh and zsh)")
    env.add_argument('--keep-hooks', action='store_true',
                     help="leave EasyBuild's option for hooks alone: your own file calls those of slingtorch")
    env.add_argument('--quiet', '-q', action='store_true', help="no notes on standard error")
    env.set_defaults(function=run_env)

    sites = commands.add_parser('sites', help="show the sites, and which one this machine is",
                                description="Shows the sites, or everything about one.")
    sites.add_argument('name', nargs='?', metavar='NAME', help="show the values of this site")
    sites.add_argument('--json', action='store_true', help="print JSON")
    sites.set_defaults(function=run_sites)
    return parser


def main(argv=None):
    """Run the command; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    for_shell = argv[:1] == ['env']
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
        if not args.command:
            parser.print_usage(sys.stderr)
            parser.exit(2, "slingtorch: name a command: env or sites\n")
    except SystemExit as err:
        if for_shell and err.code:
            print('false')
        raise
    try:
        status = args.function(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # the reader, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as err:  # pylint: disable=broad-except
        if for_shell:
            # what a shell evaluates must fail there too: eval "$(slingtorch env ...)"
            print('false')
        if isinstance(err, (CliError, RuntimeError)) or type(err).__name__ == 'SiteError':
            note("error: %s" % err)
            return 1
        raise


if __name__ == '__main__':
    sys.exit(main())
