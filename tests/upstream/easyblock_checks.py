# SPDX-License-Identifier: GPL-2.0-only
"""What EasyBuild's own test suite asks of an easyblock, each as a function that yields what is wrong.

A check takes a Context. CHECKS maps its name to the function; tests/upstream/worker.py runs them.
"""

import ast
import os
import re
import tempfile

CHECKS = {}

# called or overridden, these end in a deprecation warning now and in an error with EasyBuild 6
DEPRECATED = ('run_cmd', 'run_cmd_qa', 'make_module_req_guess', 'post_install_step', 'install_extensions')


class Context:
    """One file with easyblocks.

    :ivar path: the file
    :ivar home: directory of the easyblocks
    :ivar syntax: syntax of the module files made (Lua or Tcl)
    :ivar text: contents
    :ivar tree: syntax tree
    :ivar class_name: first class in the file, '' if there is none
    :ivar cls: that class as EasyBuild finds it, or None
    :ivar error: why cls is None
    """

    def __init__(self, path, home, syntax):
        self.path = path
        self.home = home
        self.syntax = syntax
        with open(path) as stream:
            self.text = stream.read()
        self.cls = None
        self.error = ''
        try:
            self.tree = ast.parse(self.text)
        except SyntaxError as error:
            self.tree = ast.parse('')
            self.error = str(error)
        classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef)]
        self.class_name = classes[0].name if classes else ''
        if self.class_name:
            self.find_class()

    def find_class(self):
        from easybuild.framework.easyconfig.easyconfig import get_easyblock_class

        try:
            self.cls = get_easyblock_class(self.class_name)
        except Exception as error:  # whatever it is, it is what the check reports
            self.error = f'{type(error).__name__}: {error}'

    @property
    def software(self):
        """Name of software that this easyblock is for."""
        from easybuild.tools.filetools import decode_class_name

        return decode_class_name(self.class_name) if self.class_name.startswith('EB_') else 'minimal'

    def instance(self, directory):
        """Instance for an easyconfig that has only what every easyconfig must have."""
        from easybuild.framework.easyconfig import MANDATORY
        from easybuild.framework.easyconfig.easyconfig import process_easyconfig

        mandatory = [name for name, option in self.cls.extra_options().items() if option[2] == MANDATORY]
        path = os.path.join(directory, f'{self.software}-1.0.eb')
        with open(path, 'w') as stream:
            stream.write(
                '\n'.join(
                    [
                        f"easyblock = '{self.class_name}'",
                        f"name = '{self.software}'",
                        "version = '1.0'",
                        "homepage = 'https://example.org'",
                        "description = 'Minimal'",
                        "toolchain = {'name': 'system', 'version': 'system'}",
                        'sources = []',
                        *(f"{name} = 'foo'" for name in mandatory),
                        "moduleclass = 'tools'",
                        '',
                    ]
                )
            )
        app = self.cls(process_easyconfig(path)[0]['ec'])
        return app

    def functions(self, name=None):
        """Definitions of functions and methods, of this name or all."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and name in (None, node.name)]


def check(function):
    CHECKS[function.__name__] = function
    return function


def needs_class(function):
    """The check is about the class; a file without one has nothing to check, a broken one is reported."""

    def checked(context):
        if context.cls is not None:
            yield from function(context)
        elif context.class_name:
            yield f'cannot be checked: {context.error}'

    checked.__name__ = function.__name__
    return checked


@check
def importable(context):
    """The first class is found by the name that an easyconfig uses, in this file and not in another."""
    import sys

    if context.error:
        yield context.error
    elif not context.class_name:
        yield 'no class: EasyBuild stumbles over such a file in --list-easyblocks'
    else:
        found = os.path.realpath(sys.modules[context.cls.__module__].__file__)
        if found != os.path.realpath(context.path):
            yield f'{context.class_name} is found in {found}'


@check
def location(context):
    """Software-specific easyblocks (EB_*) at the top, generic ones in generic/."""
    generic = os.path.basename(os.path.dirname(context.path)) == 'generic'
    if context.class_name and generic == context.class_name.startswith('EB_'):
        yield f'{context.class_name} does not belong in {os.path.relpath(os.path.dirname(context.path), context.home)}/'


@check
def class_on_one_line(context):
    """EasyBuild finds the class by a regular expression, line by line."""
    match = re.search(r'^class +(\w+)\([^()\n]*\):', context.text, re.M)
    if (match.group(1) if match else '') != context.class_name:
        yield f'the line "class {context.class_name}(...):" is not the first that matches'


@check
def no_log_errors(context):
    """Errors are raised as EasyBuildError: nothing is printed, asserted, or ended by other means."""
    for node in ast.walk(context.tree):
        called = re.sub(r'\(.*', '', ast.unparse(node.func)) if isinstance(node, ast.Call) else ''
        if re.search(r'(\b_?log\.(error|exception|raiseException)|^sys\.exit|^os\._exit|^exit|^print)$', called):
            yield f'line {node.lineno}: {called}()'
        if isinstance(node, ast.Assert):
            yield f'line {node.lineno}: assert does nothing under eb'
        if isinstance(node, ast.Raise) and node.exc and re.match(r'Exception\b', ast.unparse(node.exc)):
            yield f'line {node.lineno}: {ast.unparse(node)}'


@check
def prepare_step_passes_on(context):
    """prepare_step takes and passes on whatever EasyBuild gives it."""
    for function in context.functions('prepare_step'):
        arguments = function.args
        if not (arguments.vararg and arguments.kwarg and len(arguments.args) == 1):
            yield f'line {function.lineno}: should be def prepare_step(self, *args, **kwargs)'
        calls = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == 'prepare_step'
        ]
        if not any(
            any(isinstance(argument, ast.Starred) for argument in call.args)
            and any(keyword.arg is None for keyword in call.keywords)
            for call in calls
        ):
            yield f'line {function.lineno}: does not call super().prepare_step(*args, **kwargs)'


@check
@needs_class
def extra_options_well_formed(context):
    """extra_options() works without arguments: {name: [default, description, category]}."""
    from easybuild.framework.easyconfig.default import ALL_CATEGORIES

    try:
        options = context.cls.extra_options()
    except Exception as error:
        yield f'extra_options() raises {type(error).__name__}: {error}'
        return
    if not isinstance(options, dict):
        yield f'extra_options() returns {type(options).__name__}'
        return
    for name, option in options.items():
        if not (isinstance(name, str) and name.isidentifier()):
            yield f'{name!r} cannot be the name of a parameter'
        if not (
            isinstance(option, (list, tuple))
            and len(option) == 3
            and isinstance(option[1], str)
            and option[1].strip()
            and option[2] in ALL_CATEGORIES.values()
        ):
            yield f'{name}: {option!r} is not [default, description, category]'


@check
@needs_class
def instantiable(context):
    """An instance can be made for the smallest easyconfig."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            context.instance(directory).close_log()
        except Exception as error:
            yield f'{type(error).__name__}: {error}'


@check
def nothing_deprecated(context):
    """No function that EasyBuild has given up."""
    for node in ast.walk(context.tree):
        name = getattr(node, 'id', None) or getattr(node, 'attr', None)
        if isinstance(node, (ast.FunctionDef, ast.alias)):
            name = node.name
        if name in DEPRECATED:
            yield f'{name} is deprecated'


@check
@needs_class
def module_only(context):
    """--module-only --force makes a module file of an installation that is not there."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            app = context.instance(directory)
            app.run_all_steps(run_test_cases=False)
        except Exception as error:
            yield f'{type(error).__name__}: {error}'
            return
        path = app.module_generator.get_module_filepath()
        if not os.path.exists(path):
            yield 'no module file'
            return
        with open(path) as stream:
            text = stream.read()
        os.remove(path)
        start = {'Lua': 'help([', 'Tcl': '#%Module'}[context.syntax]
        if not text.startswith(start):
            yield f'module file does not start with {start}'
        for needed in ('whatis', 'EBROOT' + context.software.upper().replace('-', 'MIN')[:4]):
            if needed not in text:
                yield f'module file has no {needed}'
        for match in re.finditer(r'^.*\bNone\b.*$', text, re.M):
            yield f'module file has None: {match.group()}'


@check
def docstrings(context):
    """The file, its classes, and every function that others may call say what they are."""
    classes = [node for node in context.tree.body if isinstance(node, ast.ClassDef)]
    functions = [node for where in (context.tree, *classes) for node in where.body if isinstance(node, ast.FunctionDef)]
    for node in [context.tree, *classes, *(node for node in functions if not node.name.startswith('_'))]:
        if not ast.get_docstring(node):
            yield f'no docstring: {getattr(node, "name", "file")}'
