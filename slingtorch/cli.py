# SPDX-License-Identifier: GPL-2.0-only
"""The command slingtorch: 'env' prints shell code that makes EasyBuild find the bundle, 'sites' shows the known sites.
Other commands are in commands/ and explain/, 'site new' in sites/write.py.

Output for a shell goes to standard output, all messages for the user to standard error.
"""
import argparse
import contextlib
import glob
import io
import os
import shlex
import shutil
import sys
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from slingtorch import __version__, bundle_root, discard, explain, gpus, sites, table, wrapped
from slingtorch.commands import bench, lock, new, report, status, values
from slingtorch.job.machine import Machine
from slingtorch.sites import formats, write

SHELLS = {'bash': 'sh', 'sh': 'sh', 'zsh': 'sh', 'csh': 'csh', 'tcsh': 'csh'}
# characters with a meaning in EasyBuild's lists of paths and patterns, and the end of a line
LIST_CHARACTERS = ':,*?[]\n'
# characters in a directory's path that break installations: EasyBuild's templates, quoting in commands and module files
IMPOSSIBLE = ':*?[$%"`\\\n'
IMPOSSIBLE_IN_TCL = ' ;{}'
# the directories of a bundle
BUNDLE_DIRS = ('easyblocks', 'easyconfigs', 'hooks', 'patches', 'runscripts')
# EasyBuild locks an installation with a file whose name is the path (easybuild/framework/easyblock.py, lock_name):
# 255 bytes, less '.lock' and a software's own directories
LONGEST_PATH = 175
# (name, value); the value None unsets the variable
Variables = List[Tuple[str, Optional[str]]]


class CliError(RuntimeError):
    """Something that the user must decide or fix; the message tells how."""


def note(message: str) -> None:
    """Print a message for the user, if stderr can be written."""
    try:
        sys.stderr.write("slingtorch: %s\n" % message)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


# --- EasyBuild's configuration, which slingtorch extends

def easybuild_configuration() -> Any:
    """EasyBuild's options, as 'eb --show-config' shows them; CliError if EasyBuild is missing or rejects them."""
    try:
        from easybuild.tools import version
        problem = sites.old_easybuild(version.VERSION, version.__file__)
        if problem:
            raise CliError(problem)
        from easybuild.tools.build_log import raise_easybuilderror
        from easybuild.tools.options import CONFIG_ENV_VAR_PREFIX, EasyBuildOptions
    except ImportError as err:
        raise CliError("%s, the Python that runs slingtorch, has no EasyBuild (%s). Install slingtorch with pip, which "
                       "also installs EasyBuild, or use the Python of your EasyBuild: PYTHON -m slingtorch env"
                       % (sys.executable, err))

    class Configuration(EasyBuildOptions):
        """The options, without checks of what eb includes at run time, such as a module naming scheme."""

        def validate(self):
            """Nothing."""

    os.getcwd()     # as EasyBuild asks: where it is gone, main() says so
    try:
        # before it fails, it prints the usage of eb
        with contextlib.redirect_stderr(io.StringIO()):
            config = Configuration(go_args=[], prog='eb', envvar_prefix=CONFIG_ENV_VAR_PREFIX, with_include=False,
                                   single_cfg_level=True, error_env_options=True,
                                   error_env_option_method=raise_easybuilderror)
    except (Exception, SystemExit) as err:  # pylint: disable=broad-except
        # EasyBuild 5.4 fails while it reports a file without a section: the first exception tells more
        first = err  # type: BaseException
        while first.__context__ is not None:
            first = first.__context__
        files = EasyBuildOptions.DEFAULT_CONFIGFILES + list(filter(None, [os.environ.get('EASYBUILD_CONFIGFILES')]))
        raise CliError("EasyBuild rejects its configuration: %s. Correct the variable EASYBUILD_... or the file (%s), "
                       "or ignore a file with 'export EASYBUILD_IGNORECONFIGFILES=FILE'."
                       % (first, ', '.join(files) or 'there is none'))
    shutil.rmtree(config.tmpdir, ignore_errors=True)    # made for its temporary files
    return config


def modules_tool(config: Any) -> Optional[str]:
    """EasyBuild's name for the modules tool: the configured one, else that of this shell; None without one."""
    from easybuild.tools.modules import avail_modules_tools
    if is_set(config, 'modules_tool'):
        return config.options.modules_tool
    for name in ('Lmod', 'EnvironmentModules'):
        tool = avail_modules_tools()[name]
        if shutil.which(os.environ.get(tool.COMMAND_ENVIRONMENT) or tool.COMMAND):
            return name
    return None


def is_set(config: Any, option: str) -> bool:
    """Whether an option of EasyBuild is set, by a variable or a file."""
    files = config.configfile_parser.values()
    return 'EASYBUILD_' + option.upper() in os.environ or any(option.replace('_', '-') in part for part in files)


def modules_directory(options: Any) -> str:
    """The directory of EasyBuild's module files, for 'module use'."""
    top = options.installpath_modules or os.path.join(options.installpath, options.subdir_modules)
    return os.path.join(top, options.suffix_modules_path or '').rstrip('/')


def module_paths(options: Any) -> List[str]:
    """Directories for 'module use': modules_directory(), or below it the top of the naming scheme's hierarchy."""
    top, name = modules_directory(options), options.module_naming_scheme
    from easybuild.tools.config import init_build_options
    from easybuild.tools.module_naming_scheme.utilities import avail_module_naming_schemes
    scheme = avail_module_naming_schemes().get(name)
    if not scheme:
        note("warning: slingtorch does not know where the module naming scheme %s puts modules, because it is not one "
             "of EasyBuild's own: call 'module use' yourself, with a directory below %s" % (name, top))
        return [top]
    classes = [cls[0] if isinstance(cls, tuple) else cls for cls in options.moduleclasses]
    init_build_options({'valid_module_classes': classes})
    return [os.path.join(top, path) for path in scheme().det_init_modulepaths(None)] or [top]


# --- slingtorch env

def check_path(what: str, path: str, characters: str) -> None:
    """Raise a CliError if a path contains one of these characters, at which EasyBuild or a shell would split it."""
    bad = sorted(set(path).intersection(characters))
    if bad:
        raise CliError("%s is '%s': EasyBuild cannot handle %s in a path. Use a directory without it."
                       % (what, path, ' '.join(repr(char) for char in bad)))


def check_destination(options: Any, syntax: str) -> None:
    """Raise a CliError if EasyBuild could not install into the configured directories."""
    for option in ('prefix', 'installpath', 'installpath_software', 'installpath_modules', 'buildpath'):
        variable = 'EASYBUILD_' + option.upper()
        if not os.environ.get(variable, '/').startswith('/'):
            raise CliError("%s is '%s': EasyBuild would put this directory below the one in which you start eb. "
                           "Use an absolute path, such as \"$HOME/easybuild\"." % (variable, os.environ[variable]))
        path = getattr(options, option) or ''
        check_path("EasyBuild's %s (%s)" % (option, variable), path,
                   IMPOSSIBLE + (IMPOSSIBLE_IN_TCL if syntax == 'Tcl' else ''))
    # eb would fail with a traceback
    software = options.installpath_software or os.path.join(options.installpath, options.subdir_software)
    if len(os.fsencode(software)) > LONGEST_PATH:
        raise CliError("EasyBuild would install into %s, but this path is too long: EasyBuild names lock files after "
                       "it. Use a path of at most %d bytes: export EASYBUILD_PREFIX=DIRECTORY"
                       % (software, LONGEST_PATH))
    paths = [software, modules_directory(options), options.buildpath]
    paths += options.sourcepath.split(':') + options.repositorypath[:1]
    for path in filter(None, paths):
        closed = os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK)
        try:
            os.stat(path)
        except OSError as err:
            closed = isinstance(err, PermissionError)
        if closed:
            raise CliError("EasyBuild is configured to use the directory %s, but you may not enter or read it. Use "
                           "another one ('eb --show-config' shows the setting), or ask its owner for access (chmod "
                           "u+rwx)." % path)


def other_root(config: Any, root: str, keep_hooks: bool) -> Optional[str]:
    """Root of another copy of the bundle, if its hooks are configured; they are replaced. CliError for other hooks."""
    ours = os.path.join(root, 'hooks', 'slingshot_hooks.py')
    theirs = config.options.hooks
    if not theirs or keep_hooks or os.path.realpath(theirs) == os.path.realpath(ours):
        return None
    directory, name = os.path.split(os.path.abspath(theirs))
    if name == os.path.basename(ours) and os.path.isdir(os.path.join(directory, 'sites')):
        return os.path.dirname(directory)
    where = '$EASYBUILD_HOOKS' if os.environ.get('EASYBUILD_HOOKS') else ' or '.join(config.configfiles)
    raise CliError("EasyBuild uses only one file with hooks, and %s already names %s. Remove that setting, or let that "
                   "file also call the hooks of %s and use 'slingtorch env --keep-hooks'." % (where, theirs, ours))


def activation(root: str, choice: Any, groups: Iterable[str], keep_hooks: bool = False) -> Variables:
    """Variables that make EasyBuild use the bundle at this root for this sites.Choice, with these groups."""
    check_path("The directory of the bundle", root, LIST_CHARACTERS)
    variables = []  # type: Variables
    own = os.path.dirname(sys.executable)
    if not shutil.which('eb') or not shutil.which('slingtorch') and os.path.exists(own + '/slingtorch'):
        # appended, so that the user's python and eb stay the same
        os.environ['PATH'] = '%s:%s' % (os.environ.get('PATH', os.defpath), own)
        variables.append(('PATH', os.environ['PATH']))
    config = easybuild_configuration()
    options = config.options
    roots = [root] + [other for other in [other_root(config, root, keep_hooks)] if other]
    ours = tuple(os.path.join(top, name) for top in roots for name in BUNDLE_DIRS)

    def theirs(elements):
        """Elements that come from no activation of slingtorch."""
        return [elem for elem in elements or [] if elem and not elem.startswith(ours)]

    # an empty element means EasyBuild's own easyconfigs
    robot_paths = ['' if path in config.default_robot_paths else path for path in theirs(options.robot_paths)]
    robot_paths = list(dict.fromkeys(robot_paths)) or ['']
    easyblocks = [os.path.join(root, 'easyblocks', '*.py'), os.path.join(root, 'easyblocks', 'generic', '*.py')]
    easyblocks += theirs(options.include_easyblocks)
    variables += [
        ('EASYBUILD_ROBOT_PATHS', ':'.join([os.path.join(root, 'easyconfigs')] + robot_paths)),
        # lets 'eb --search' find the patches too
        ('EASYBUILD_SEARCH_PATHS', ':'.join(theirs(options.search_paths) + [os.path.join(root, 'patches')])),
        ('EASYBUILD_INCLUDE_EASYBLOCKS', ','.join(easyblocks)),
    ]
    if not keep_hooks:
        variables.append(('EASYBUILD_HOOKS', os.path.join(root, 'hooks', 'slingshot_hooks.py')))
    # EasyBuild stores downloads in the first element
    source_path = theirs(options.sourcepath.split(':'))
    source_path += [os.path.join(root, 'patches'), os.path.join(root, 'runscripts')]
    variables.append(('EASYBUILD_SOURCEPATH', ':'.join(source_path)))

    tool, syntax = modules_tool(config), options.module_syntax
    if tool is None:
        note("warning: this shell has neither Lmod nor Environment Modules, and eb needs one: source its file, such as "
             "/usr/share/lmod/lmod/init/bash, and run this again")
    elif tool != options.modules_tool:
        variables.append(('EASYBUILD_MODULES_TOOL', tool))
    if not is_set(config, 'module_syntax') and tool not in ('Lmod', None):
        # other tools cannot read Lua, EasyBuild's default
        syntax = 'Tcl'
        variables.append(('EASYBUILD_MODULE_SYNTAX', syntax))
    check_destination(options, syntax)
    if os.geteuid() == 0 and not options.allow_use_as_root_and_accept_consequences:
        note("warning: you are root, and eb refuses to run as root: use another account; on a machine that only "
             "you use: export EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES=1")

    # PyTorch's modules put a Python without EasyBuild first
    variables.append(('EB_PYTHON', sys.executable))
    # not 'module use', because the command or the directory may not exist yet
    module_path = [path for path in os.environ.get('MODULEPATH', '').split(':') if path]
    missing = [path for path in module_paths(options) if path not in module_path] if tool else []
    if missing:
        variables.append(('MODULEPATH', ':'.join(missing + module_path)))

    return variables + site_variables(choice, groups)


def site_variables(choice: Any, groups: Iterable[str]) -> Variables:
    """Variables that tell later commands which site this is."""
    return [
        ('SLINGTORCH_SITE', choice.site.name),
        ('SLINGTORCH_SITE_DETECTED', '%s: %s' % (choice.site.name, choice.why) if choice.detected else None),
        ('SLINGTORCH_SITE_GROUPS', ','.join(groups) or None),
    ]


def shell_code(variables: Variables, environ: Mapping[str, str], shell: str) -> str:
    """Shell code that sets and unsets variables; variables that are already unset are skipped."""
    lines = []
    for name, value in variables:
        if value is None:
            if name in environ:
                lines.append(('unset %s' if SHELLS[shell] == 'sh' else 'unsetenv %s;') % name)
        elif SHELLS[shell] == 'sh':
            lines.append('export %s=%s' % (name, shlex.quote(value)))
        else:
            # '!' is special even between single quotes
            lines.append("setenv %s '%s';" % (name, value.replace("'", "'\\''").replace('!', '\\!')))
    return '\n'.join(lines) + '\n'


def gpu_note(site: Any, root: str = '/') -> Optional[str]:
    """
    One line about the PyTorch wheel that fits the GPUs and driver of this machine; None without GPU.

    With Slingshot 11 the wheel must fit the network plugin's CUDA or ROCm; None if the site has its own easyconfigs.
    """
    toolkit = None
    if site.network == 'slingshot11':
        toolkit = site.plugin_toolkit()
        own = os.path.join(glob.escape(bundle_root()), 'easyconfigs/p/PyTorch/PyTorch-*-%s-*.eb')
        if not toolkit or glob.glob(own % site.name):
            return None
    name, reason = gpus.fitting_easyconfig(root, site_gpu=site.gpu, toolkit=toolkit)
    if name:
        return "PyTorch for the GPUs here: eb %s%s   (%s)" % ('--robot ' if toolkit else '', name, reason)
    node = Machine(root=root)
    if node.nvidia_driver() or gpus.amd_driver(node):
        return "no easyconfig with a PyTorch wheel fits the GPUs of this machine: %s" % reason
    return None


def run_env(args: argparse.Namespace) -> int:
    """slingtorch env"""
    environ = dict(os.environ)
    root = bundle_root()
    before = environ.get(sites.SITE_VARIABLE)
    if args.site:
        environ[sites.SITE_VARIABLE] = args.site
        environ.pop(sites.DETECTED_VARIABLE, None)
    choice = sites.choose(environ)
    if choice.warning:
        note("warning: " + choice.warning)

    if args.groups is not None:
        groups = sites.split_list(args.groups)
    elif before and before != choice.site.name and sites.chosen_groups(environ):
        note("groups of site '%s' (%s) are ignored: select groups of '%s' with --with"
             % (before, ','.join(sites.chosen_groups(environ)), choice.site.name))
        groups = []
    else:
        groups = sites.chosen_groups(environ)
    asked_by = '--with' if args.groups is not None else '$' + sites.GROUPS_VARIABLE
    described = choice.site.check_groups(groups, asked_by=asked_by)
    # raises an error if groups exclude each other
    choice.site.env_values(groups)
    choice.site.parameter_values(groups)

    own = None
    if args.values:
        own = values.OwnPyTorch(Machine())
        variables = values.variables(root, choice.site, groups, own) + site_variables(choice, groups)
    else:
        # the shell must not evaluate what EasyBuild prints
        with contextlib.redirect_stdout(sys.stderr):
            variables = activation(root, choice, groups, args.keep_hooks)
    sys.stdout.write(shell_code(variables, os.environ, args.shell))
    if not args.quiet:
        note("site %s (%s), bundle %s" % (choice.site.name, choice.why, root))
        for group in described:
            note("group %s: %s; needs %s" % (group.name, group.title, group.needs))
        if sys.stdout.isatty():
            use = 'eval "$(slingtorch env%s)"' if SHELLS[args.shell] == 'sh' else 'eval "`slingtorch env%s`"'
            options = ' --values' * bool(own) + ' --shell csh' * (SHELLS[args.shell] == 'csh')
            note("your shell has not changed; to activate the bundle in it: %s" % use % options)
        if choice.site.name == sites.FALLBACK_SITE and shutil.which('sinfo'):
            note("slingtorch has no settings for this cluster. Everything works without them; 'slingtorch site new "
                 "NAME' writes a file with them. (Generic Slurm settings: 'slingtorch env --site slurm'.)")
        if own:
            for text in [own.what()] + values.differences(choice.site, own, dict(variables)):
                note(text)
            return 0
        fitting = gpu_note(choice.site)
        if fitting:
            note(fitting)
    return 0


# --- slingtorch sites

def choice_text(choice: Any) -> str:
    """The chosen site, with the reason."""
    return "%s (%s)%s" % (choice.site.name, choice.why, '; ' + choice.warning if choice.warning else '')


def site_text() -> str:
    """The site of this machine with its values, or the reason why there is none, for a report."""
    try:
        choice = sites.choose()
    except sites.SiteError as err:
        return str(err)
    groups = ', '.join(sites.chosen_groups()) or 'none'
    return "%s\ngroups: %s\n\n%s" % (choice_text(choice), groups, formats.everything(choice.site))


def run_sites(args: argparse.Namespace) -> int:
    """slingtorch sites"""
    if (args.form == 'env' or args.group) and not (args.name and args.form == 'env'):
        raise CliError("--format env needs a site, and --group needs both: slingtorch sites NAME --format env")
    if args.form or args.name:
        sys.stdout.write(formats.overview(sites.load_all()) if args.form == 'markdown' else
                         formats.env_file(sites.load(args.name), sites.split_list(args.group)) if args.form else
                         formats.everything(sites.load(args.name)))
        return 0

    chosen, failed = None, False
    try:
        choice = sites.choose()
        chosen = choice.site.name
        message = "this machine: %s" % choice_text(choice)
    except sites.SiteError as err:
        message, failed = str(err), True
    networks: Dict[str, List[str]] = {}
    for site in sites.load_all():
        networks.setdefault(site.network, []).append('*' * (site.name == chosen) + site.name)
    for network, names in sorted(networks.items()):
        print(wrapped(' '.join(names), '%-12s ' % network, ' ' * 13, width=112))
    print("'slingtorch sites NAME' shows the values and the opt-in groups of a site, each with its reason and its "
          "source.\n*: this machine.")
    note(message)
    return 1 if failed else 0


# --- the other commands

def run_explain(args: argparse.Namespace) -> int:
    """slingtorch explain"""
    try:
        network = sites.choose().site.network
    except sites.SiteError:
        network = None
    return explain.run(args.logs, args.json, network)


def run_examples(args: argparse.Namespace) -> int:
    """slingtorch examples"""
    top = os.path.join(bundle_root(), 'examples')

    def below(room):
        return sorted(name for name in os.listdir(os.path.join(top, room)) if name[0] not in '._')

    if not args.name:
        print(table([(room, ' '.join(below(room))) for room in below('') if '.' not in room]), end='')
        note("'slingtorch examples slurm' copies all files of a directory into the working directory, 'slingtorch "
             "examples slurm/ddp_pytorch.job' copies one. The pages docs/NAME.md that messages mention are in %s"
             % os.path.join(bundle_root(), 'docs'))
        return 0
    source = os.path.normpath(os.path.join(top, args.name))
    if not source.startswith(top + '/') or not os.path.exists(source):
        raise CliError("There is no example '%s': 'slingtorch examples' lists all" % args.name)
    room, names = (source, below(source)) if os.path.isdir(source) else (
        os.path.dirname(source), [os.path.basename(source)])
    there = [name for name in names if os.path.lexists(os.path.join(args.directory, name))]
    if there:
        raise CliError("%s already has %s, and nothing is overwritten. Name another directory: slingtorch examples "
                       "%s DIR" % (os.path.abspath(args.directory), ', '.join(there), args.name))
    os.makedirs(args.directory, exist_ok=True)
    for name in names:
        print(shutil.copy(os.path.join(room, name), args.directory))
    return 0


def run_status(args: argparse.Namespace) -> int:
    """slingtorch status"""
    with contextlib.redirect_stdout(sys.stderr):
        directory = modules_directory(easybuild_configuration().options)
    return status.run(args, directory, note)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(prog='slingtorch', description="Distributed PyTorch on supercomputers.", epilog='''
        In a job, conda-python-distributed --check and --vet test the ranks and the nodes (docs/check.md).''')
    parser.add_argument('--version', action='version', version='slingtorch ' + __version__)
    commands = parser.add_subparsers(dest='command', metavar='COMMAND')

    def command(name: str, function: Callable, summary: str, description: str, as_json: bool = False) -> Any:
        added = commands.add_parser(name, help=summary, description=description)
        added.set_defaults(function=function)
        if as_json:
            added.add_argument('--json', action='store_true', help="print JSON")
        return added

    env = command('env', run_env, "print shell code that makes EasyBuild use the bundle",
                  "Prints shell code. Type: eval \"$(slingtorch env)\"")
    env.add_argument('--site', metavar='NAME', help="the site (default: $SLINGTORCH_SITE, else detected)")
    env.add_argument('--with', metavar='GROUP[,GROUP]', dest='groups',
                     help="opt-in groups of the site, '' for no group (default: $SLINGTORCH_SITE_GROUPS)")
    env.add_argument('--values', action='store_true',
                     help="for your own PyTorch: set the variables of a PyTorch module, and none for EasyBuild")
    env.add_argument('--shell', choices=sorted(SHELLS), default='bash', help="default: bash (also for sh and zsh)")
    env.add_argument('--keep-hooks', action='store_true',
                     help="keep your own EasyBuild hooks, which must call slingtorch's hooks")
    env.add_argument('--quiet', '-q', action='store_true', help="no notes on standard error")

    showing = command('sites', run_sites, "list the sites and show which one this machine belongs to",
                      "Lists the sites, or shows everything about one site.")
    showing.add_argument('name', nargs='?', metavar='NAME', help="show the values of this site")
    showing.add_argument('--format', choices=('env', 'markdown'), dest='form',
                         help="'env' prints the values for use without modules, in a shell or as --env-file; "
                              "'markdown' a table of all sites for a documentation page")
    showing.add_argument('--group', metavar='GROUP[,GROUP]', help="with --format env: opt-in groups of the site")

    locking = command('lock', lambda args: lock.lock(lock.find_easyconfig(args.easyconfig, bundle_root()), note),
                      "write the lock file of a PythonVenv easyconfig", """
        Resolves the packages of the easyconfig with uv, for the Python versions and platforms in the easyconfig, and
        writes versions and hashes to the lock file beside the easyconfig. $SLINGTORCH_UV selects another uv.""")
    locking.add_argument('easyconfig', metavar='EASYCONFIG', help="a file, or the name of an easyconfig of the bundle")

    making = command('new', lambda args: new.run(args, bundle_root(), sites.choose().site, sites.chosen_groups(), note),
                     "write an easyconfig for your project", """
        Writes an easyconfig and its lock file for a project's packages, with the PyTorch of another easyconfig. Builds
        wheels of the project's own packages, all in the working directory. See docs/environments.md.""")
    making.add_argument('name', metavar='NAME', help="name of the module")
    making.add_argument('--from', dest='source', metavar='FILE', required=True,
                        help="pyproject.toml, uv.lock or a requirements file")
    making.add_argument('--on', metavar='EASYCONFIG', help="easyconfig of the PyTorch (default: for the local GPUs)")
    making.add_argument('--extra', action='append', default=[], metavar='NAME', help="install an extra of the project")
    making.add_argument('--build', action='append', default=[], metavar='REQUIREMENT',
                        help="build a wheel of a package without one, by 'pip wheel'; also NAME @ git+https://...")
    making.add_argument('--python', metavar='PYTHON', help="Python to use (default: the site's, else python3)")

    explaining = command('explain', run_explain, "find out from a job's output why it failed", """
        Reads the output of jobs and prints the cause, the line that shows it and the remedy. Exit status: 0 a known
        fault was found; 3 none was found.""", as_json=True)
    explaining.add_argument('logs', nargs='+', metavar='LOG',
                            help="output of a job (also .gz), - for standard input, or a directory with such files or "
                                 "with files of PyTorch's flight recorder")
    examples = command('examples', run_examples, "list or copy job scripts and training programs", """
        Lists the job scripts and training programs that come with slingtorch. With NAME it copies a directory of them,
        or one file. It never overwrites a file.""")
    examples.add_argument('name', nargs='?', metavar='NAME', help="a directory from the list, or DIRECTORY/FILE")
    examples.add_argument('directory', nargs='?', metavar='DIR', default='.', help="target (default: this directory)")
    command('status', run_status, "show what is installed and what is out of date", """
        Lists the modules that EasyBuild has installed, with their runscripts and site values. Prints the command that
        updates what differs from the bundle. Exit status: 0 everything is up to date; 3 something differs.""",
            as_json=True)
    actions = commands.add_parser('site', help="write a site file").add_subparsers(dest='action', metavar='new')
    actions.required = True     # not an argument of add_subparsers() before Python 3.7
    writing = actions.add_parser('new', help="describe this machine", description="""
        Examines this machine and writes a commented site file into your configuration (docs/sites.md). Each value comes
        with its reason, and comments name what could not be detected. Nothing is overwritten. A login node does not
        show everything: 'srun slingtorch site new --complete NAME' (PBS: mpiexec -n 1) adds the rest and keeps your
        edits.""")
    writing.add_argument('name', metavar='NAME', help="name of the site")
    writing.add_argument('--complete', action='store_true', help="on a compute node: add what the file lacks")
    writing.set_defaults(function=write.run_new)
    bench.add_parser(commands)
    report.add_parser(commands, site_text)
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, mode))
    for_shell = argv[:1] == ['env']
    if hasattr(sys.stdout, 'reconfigure'):  # Python 3.7
        # Messages may have characters that the terminal's encoding lacks; a shell needs the exact bytes of paths.
        sys.stdout.reconfigure(**{'errors': 'backslashreplace'} if not for_shell else {
            'encoding': sys.getfilesystemencoding(), 'errors': 'surrogateescape'})
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
        if not args.command:
            parser.print_usage(sys.stderr)
            parser.exit(2, "slingtorch: name a command, see slingtorch --help\n")
        result = args.function(args)
        sys.stdout.flush()
        return result
    except BaseException as err:  # pylint: disable=broad-except
        interrupted = isinstance(err, KeyboardInterrupt)
        expected = interrupted or isinstance(err, (RuntimeError, OSError))
        # no message if the reader of a pipe, such as head, has ended
        if expected and not isinstance(err, BrokenPipeError):
            # of all missing files, only the working directory has no name
            gone = isinstance(err, FileNotFoundError) and not err.filename
            note("interrupted" if interrupted else "error: %s" % (
                "the working directory no longer exists: cd to another one" if gone else err))
        try:
            if for_shell and getattr(err, 'code', True):
                # make the shell that evaluates this fail, too: eval "$(slingtorch env ...)"
                print('false')
            sys.stdout.flush()
        except OSError:
            discard(sys.stdout)
        if not expected:
            raise
        return 130 if interrupted else 1


if __name__ == '__main__':
    sys.exit(main())
