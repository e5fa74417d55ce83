# SPDX-License-Identifier: GPL-2.0-only
"""What EasyBuild's own test suite asks of an easyconfig, each as a function that yields what is wrong.

A check takes a Context. CHECKS maps its name to the function; tests/upstream/worker.py runs them.
"""

import ast
import collections
import io
import os
import re
import shutil
import stat
import tempfile
import tokenize
import unittest.mock

CHECKS = {}

# order in which parameters are written; those not named here are the easyblock's own and come in between;
# those in ANYWHERE stand where they are understood best
HEAD = (
    'easyblock',
    'name',
    'version',
    'versionsuffix',
    'homepage',
    'docurls',
    'description',
    'toolchain',
    'toolchainopts',
    'source_urls',
    'sources',
    'patches',
    'checksums',
    'osdependencies',
    'builddependencies',
    'dependencies',
)
ANYWHERE = ('download_instructions',)
TAIL = (
    'sanity_check_paths',
    'sanity_check_commands',
    'modextrapaths',
    'modextravars',
    'modaliases',
    'modloadmsg',
    'modluafooter',
    'modtclfooter',
    'moduleclass',
)

NEEDLESS_DEFAULTS = {'use_pip': True, 'sanity_pip_check': True, 'download_dep_fail': True}


class Context:
    """One easyconfig: its text, its syntax tree, and what EasyBuild makes of it.

    :ivar path: the file
    :ivar home: directory that has `<letter>/<Name>/` in it
    :ivar patches: directories that patch files may be in, besides that of the easyconfig
    :ivar text: contents
    :ivar ec: EasyConfig, or None when it does not parse
    :ivar app: instance of its easyblock, or None
    :ivar error: why ec or app is None
    """

    def __init__(self, path, home, patches):
        self.path = path
        self.home = home
        self.patches = patches
        with open(path) as stream:
            self.text = stream.read()
        self.lines = self.text.splitlines()
        self.ec = self.app = None
        self.error = ''
        try:
            self.tree = ast.parse(self.text)
        except SyntaxError as error:
            self.tree = ast.parse('')
            self.error = str(error)
            return
        self.parse()

    def parse(self):
        from easybuild.framework.easyconfig.easyconfig import get_easyblock_class, process_easyconfig

        try:
            self.ec = process_easyconfig(self.path)[0]['ec']
            self.app = get_easyblock_class(self.ec['easyblock'], name=self.ec.name)(self.ec)
            self.app.close_log()
        except Exception as error:  # whatever it is, it is what the check reports
            self.error = f'{type(error).__name__}: {error}'

    @property
    def assigned(self):
        """Names assigned at top level, in order."""
        return [
            target.id
            for statement in self.tree.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        ]

    def value(self, name):
        """Syntax tree of what is assigned to the name, or None."""
        for statement in self.tree.body:
            if isinstance(statement, ast.Assign) and [getattr(target, 'id', None) for target in statement.targets] == [
                name
            ]:
                return statement.value
        return None

    @property
    def comment_lines(self):
        """Numbers of the lines that have a comment."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}


def check(function):
    CHECKS[function.__name__] = function
    return function


def needs_ec(function):
    """The check is about what EasyBuild parsed; without that it says so."""

    def checked(context):
        if context.app is None:
            yield f'cannot be checked: {context.error}'
        else:
            yield from function(context)

    checked.__name__ = function.__name__
    return checked


@check
def parses(context):
    """EasyBuild parses it, and its easyblock can be instantiated."""
    if context.app is None:
        yield context.error


@check
@needs_ec
def file_name(context):
    """The name of the file is made of name, version and suffix."""
    from easybuild.tools.module_naming_scheme.utilities import det_full_ec_version

    expected = f'{context.ec.name}-{det_full_ec_version(context.ec)}.eb'
    if os.path.basename(context.path) != expected:
        yield f'should be called {expected}'


@check
@needs_ec
def location(context):
    """It lies in <letter>/<Name>."""
    from easybuild.framework.easyconfig.easyconfig import letter_dir_for

    expected = os.path.join(letter_dir_for(context.ec.name), context.ec.name)
    found = os.path.relpath(os.path.dirname(context.path), context.home)
    if found != expected:
        yield f'lies in {found}, should lie in {expected}'


@check
@needs_ec
def module_class(context):
    """It has a module class that exists and means something."""
    from easybuild.tools.config import build_option

    if 'moduleclass' not in context.assigned:
        yield 'no moduleclass'
    elif context.ec['moduleclass'] == 'base' or context.ec['moduleclass'] not in build_option('valid_module_classes'):
        yield f'moduleclass {context.ec["moduleclass"]!r}'


@check
@needs_ec
def parameters_exist(context):
    """Every name is a parameter of EasyBuild or of its easyblock, or local_*."""
    from easybuild.framework.easyconfig.easyconfig import is_local_var_name

    for name in context.assigned:
        if name not in context.ec._config and not is_local_var_name(name):
            yield f'{name} is neither a parameter nor named local_*'


@check
def parameters_once(context):
    """No parameter is assigned twice."""
    for name in sorted(set(context.assigned)):
        if context.assigned.count(name) > 1:
            yield f'{name} is assigned {context.assigned.count(name)} times'


@check
def only_assignments(context):
    """It says what, not how: no imports, branches, loops or functions."""
    for statement in context.tree.body:
        if not isinstance(statement, ast.Assign):
            yield f'line {statement.lineno}: {type(statement).__name__}'


@check
def parameter_order(context):
    """What the software is comes first, then the easyblock's parameters, then sanity checks and module."""
    names = [name for name in context.assigned if not name.startswith(('local_', '_')) and name not in ANYWHERE]
    ranks = []
    for name in names:
        if name in HEAD:
            ranks.append(HEAD.index(name))
        elif name in TAIL:
            ranks.append(len(HEAD) + 1 + TAIL.index(name))
        else:
            ranks.append(len(HEAD))
    for before, after, rank_before, rank_after in zip(names, names[1:], ranks, ranks[1:]):
        if rank_after < rank_before:
            yield f'{after} should stand before {before}'


@check
def easyblock_is_meant(context):
    """It names its easyblock, unless there is one of the software's own name."""
    from easybuild.framework.easyconfig.easyconfig import get_easyblock_class

    name = getattr(context.value('name'), 'value', None)
    if 'easyblock' not in context.assigned and not get_easyblock_class(
        None, name=name, error_on_missing_easyblock=False
    ):
        yield f'no easyblock, and none is called after {name}'


@check
@needs_ec
def dump_round_trip(context):
    """What `eb --dump` writes means the same."""
    from easybuild.framework.easyconfig.easyconfig import EasyConfig

    with tempfile.TemporaryDirectory() as directory:
        dumped_path = os.path.join(directory, os.path.basename(context.path))
        context.ec.dump(dumped_path)
        # with one capability EasyBuild 5.4 writes the template that is made from the parameter into the parameter itself
        with open(dumped_path) as handle:
            text = handle.read()
        for name, value in context.ec.template_values.items():
            if name.startswith('cuda_') and isinstance(value, str):
                text = text.replace(f'%({name})s', value)
        with open(dumped_path, 'w') as handle:
            handle.write(text)
        names = [name for name in sorted(set(context.assigned)) if name in context.ec._config and name != 'easyblock']
        dumped = EasyConfig(dumped_path)
        for ec in (context.ec, dumped):
            # known when something is built only
            for name in ('installdir', 'start_dir'):
                ec.template_values.setdefault(name, '/' + name)
        yield from differences(context.ec, dumped, names)


def differences(before, after, names):
    """Yield what is not the same in both."""
    for name in names:
        if before[name] != after[name]:
            yield f'{name}: {before[name]!r} becomes {after[name]!r}'


@check
@needs_ec
def checksums_complete(context):
    """Every source and patch has a sha256."""
    yield from context.app.check_checksums()


@check
def checksum_none_has_reason(context):
    """A checksum None has a comment on its line or the one above."""
    checksums = context.value('checksums')
    for node in ast.walk(checksums) if checksums else []:
        if (
            isinstance(node, ast.Constant)
            and node.value is None
            and not {node.lineno, node.lineno - 1} & context.comment_lines
        ):
            yield f'line {node.lineno}: None without a reason'


@check
@needs_ec
def checksums_can_be_injected(context):
    """`eb --inject-checksums --force` changes the checksums alone; sources are made up."""
    from easybuild.framework import easyblock
    from easybuild.framework.easyconfig.easyconfig import get_easyblock_class, process_easyconfig
    from easybuild.framework.easyconfig.parser import EasyConfigParser
    from easybuild.tools.config import update_build_options

    with tempfile.TemporaryDirectory() as directory:
        path = shutil.copy(context.path, directory)

        def made_up(self, filename, *args, **kwargs):
            if filename == easyblock.CHECKSUMS_JSON:
                return None
            with open(os.path.join(directory, 'source-' + os.path.basename(filename)), 'w') as source:
                source.write(filename)
            return source.name

        before = update_build_options({'force': True, 'pre_create_installdir': False})  # as eb does with these options
        try:
            with unittest.mock.patch.object(easyblock.EasyBlock, 'obtain_file', made_up):
                easyblock.inject_checksums(process_easyconfig(path, validate=False), 'sha256')
        finally:
            update_build_options(before)
        old, new = (without_checksums(EasyConfigParser(one).get_config_dict()) for one in (context.path, path))
        yield from differences(*(collections.defaultdict(str, values) for values in (old, new)), {*old, *new})
        ec = process_easyconfig(path)[0]['ec']
        yield from get_easyblock_class(ec['easyblock'], name=ec.name)(ec).check_checksums()


def without_checksums(value):
    """The same value, without checksums, also those of extensions."""
    if isinstance(value, dict):
        return {key: without_checksums(item) for key, item in value.items() if key != 'checksums'}
    return [without_checksums(item) for item in value] if isinstance(value, (list, tuple)) else value


@check
@needs_ec
def patches_exist(context):
    """Every patch is beside the easyconfig or in patches/."""
    from easybuild.framework.easyconfig.easyconfig import letter_dir_for

    name = context.ec.name
    directories = [os.path.dirname(context.path)]
    for patches in context.patches:
        directories += [patches, os.path.join(patches, name), os.path.join(patches, letter_dir_for(name), name)]
    for patch in patch_names(context.ec):
        if not any(os.path.isfile(os.path.join(directory, patch)) for directory in directories):
            yield f'{patch} is not there'


def patch_names(ec):
    """File names of the patches of an EasyConfig and of its extensions."""
    names = []
    extensions = [ext[2].get('patches', []) for ext in ec.get_ref('exts_list') if isinstance(ext, tuple) and len(ext) > 2]
    for patch in sum(extensions, list(ec['patches'])):
        if isinstance(patch, (tuple, list)):
            patch = patch[0]
        elif isinstance(patch, dict):
            patch = patch['name']
        names.append(patch)
    return names


@check
@needs_ec
def sources_can_be_had(context):
    """Sources have an address, or instructions for a person."""
    keys = ('source_urls', 'git_config')
    if context.ec['sources'] and not (
        context.ec['source_urls']
        or context.ec['download_instructions']
        or any(isinstance(source, dict) and any(source.get(key) for key in keys) for source in context.ec['sources'])
    ):
        yield 'neither source_urls nor download_instructions'


@check
def python_without_user_packages(context):
    """Python is called with -s: packages in ~/.local must not decide what a check or a build sees."""
    for number, line in enumerate(context.lines, 1):
        if re.search(r'\bpython3? (?!(-\w+ )*-s )(-\w+ )*(-c|-m|\S*\w\.py) ', line.partition('# ')[0]):
            yield f'line {number}: {line.strip()}'


@check
def https_only(context):
    """No address that can be tampered with on the way."""
    for number, line in enumerate(context.lines, 1):
        if re.search(r'\b(http|ftp|git)://', line):
            yield f'line {number}: {line.strip()}'


@check
def no_trailing_whitespace(context):
    """No blanks at ends of lines, no tabs, one newline at the end."""
    for number, line in enumerate(context.lines, 1):
        if line != line.rstrip() or '\t' in line:
            yield f'line {number}: tab, or blank at the end'
    if not context.text.endswith('\n') or context.text.endswith('\n\n'):
        yield 'should end with one newline'


@check
def file_mode(context):
    """Readable by all, executable by none: 644."""
    mode = stat.S_IMODE(os.stat(context.path).st_mode)
    if mode != 0o644:
        yield f'mode {mode:o}'


@check
def no_root_variable(context):
    """$root is Tcl's name; templates work in both module syntaxes."""
    if re.search(r'\$(root\b|\{root\})', context.text):
        yield '$root: use %(installdir)s'


@check
@needs_ec
def no_needless_defaults(context):
    """No parameter is set to what it is anyway."""
    for name, default in NEEDLESS_DEFAULTS.items():
        if name in context.assigned and context.ec[name] == default:
            yield f'{name} = {default} is the default'


@check
@needs_ec
def no_global_search_paths(context):
    """Paths that EasyBuild itself adds, or that reach into every compilation, are not added by hand."""
    for name in ('PYTHONPATH', 'CPATH', 'LD_LIBRARY_PATH', 'LIBRARY_PATH'):
        if name in context.ec['modextrapaths']:
            yield f'modextrapaths has {name}'


@check
@needs_ec
def sanity_check_paths_shape(context):
    """Both keys, something in them, nothing absolute."""
    if 'sanity_check_paths' not in context.assigned:
        return
    paths = context.ec['sanity_check_paths']
    if sorted(paths) != ['dirs', 'files'] or not (paths['files'] or paths['dirs']):
        yield "sanity_check_paths needs 'files' and 'dirs', and something in one of them"
        return
    for path in [*paths['files'], *paths['dirs']]:
        for one in [path] if isinstance(path, str) else path:
            if one.startswith('/'):
                yield f'{one} is absolute'


@check
@needs_ec
def no_duplicate_extensions(context):
    """No extension is listed twice."""
    names = [extension if isinstance(extension, str) else extension[0] for extension in context.ec.get_ref('exts_list')]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            yield f'extension {name} is listed {names.count(name)} times'


@check
def nothing_deprecated(context):
    """No parameter or template that the next EasyBuild will not know."""
    from easybuild.framework.easyconfig.parser import DEPRECATED_EASYCONFIG_PARAMETERS, REPLACED_PARAMETERS
    from easybuild.framework.easyconfig.templates import DEPRECATED_EASYCONFIG_TEMPLATES

    for name in context.assigned:
        if name in DEPRECATED_EASYCONFIG_PARAMETERS or name in REPLACED_PARAMETERS or name == 'parallel':
            yield f'{name} is deprecated'
    for name in DEPRECATED_EASYCONFIG_TEMPLATES:
        if f'%({name})s' in context.text:
            yield f'%({name})s is deprecated'
