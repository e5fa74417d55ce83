# SPDX-License-Identifier: GPL-2.0-only
"""The checks of .pre-commit-config.yaml, over every file and on a bad sample, and types of public functions."""

import ast
import re
import shlex
import subprocess

import pytest
import yaml

from testbed import ROOT

HOOKS = {
    hook['id']: hook
    for repository in yaml.safe_load((ROOT / '.pre-commit-config.yaml').read_text())['repos']
    for hook in repository['hooks']
}
FILES = subprocess.run(
    ['git', '-c', f'safe.directory={ROOT}', 'ls-files', '--cached', '--others', '--exclude-standard'],
    cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
).stdout.splitlines()

# hook: files, each of which it complains of, by name, and their text
BAD = {
    # the second one by flake8-comprehensions, which upstream's CI runs as well
    'flake8': {'long.py': f'TEXT = "{"x" * 120}"\n', 'links.py': 'LINKS = {name: 1 for name in "ab"}\n'},
    'flake8-tests': {'unused.py': 'import os\n'},
    'flake8-easyconfigs': {'bad.eb': 'toolchain = SYSTEM\nname = nobody_defines_this\n'},
    'python36': {'new.py': 'from contextlib import nullcontext\n', 'walrus.py': 'if (n := 1):\n    pass\n'},
    # jobs run it on 3.8
    'mypy': {'half.py': 'def half(number: int) -> int:\n    return str(number)\n',
             'py39.py': 'def short(name: str) -> str:\n    return name.removeprefix("a")\n'},
    'shellcheck': {'bad.sh': '#!/bin/bash\nrm $1\n'},
    'workflows': {'bad.yml': 'on: push\njobs: {a: {runs_on: ubuntu-24.04}}\n'},
    'issue-forms': {'bad.yml': 'name: A fault\nbody: []\n'},
}


def lint(name, *files):
    """Run a check on files; its CompletedProcess."""
    return subprocess.run([*shlex.split(HOOKS[name]['entry']), *map(str, files)], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize('name', HOOKS)
def test_check(name):
    hook = HOOKS[name]
    files = [path for path in FILES if re.search(hook['files'], path) and (ROOT / path).is_file()
             and not re.search(hook.get('exclude', '^$'), path)]
    assert files
    done = lint(name, *(files if hook.get('pass_filenames', True) else []))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize('name', BAD)
def test_check_can_fail(tmp_path, name):
    for sample, text in BAD[name].items():
        (tmp_path / sample).write_text(text)
    done = lint(name, *(tmp_path / sample for sample in BAD[name]))
    assert done.returncode != 0
    assert all(sample in done.stdout for sample in BAD[name]), done.stdout


def test_every_check_has_a_bad_sample():
    assert set(BAD) == set(HOOKS)


# --- types

def untyped(text):
    """Public functions and methods of a module that lack the type of an argument or of what they return."""
    found = []
    tree = ast.parse(text)
    for scope in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != '_')]:
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef) or node.name[0] == '_' and node.name != '__init__':
                continue
            static = any(getattr(decorator, 'id', None) == 'staticmethod' for decorator in node.decorator_list)
            arguments = [*node.args.posonlyargs, *node.args.args][scope is not tree and not static:]
            arguments += [*node.args.kwonlyargs, *filter(None, [node.args.vararg, node.args.kwarg])]
            if not node.returns or not all(argument.annotation for argument in arguments):
                found.append(f'{node.lineno}: {node.name}')
    return found


@pytest.mark.parametrize('path', [path for path in FILES if re.match(r'(hooks|slingtorch)/.*\.py$', path)
                                  and (ROOT / path).is_file()])
def test_public_functions_have_types(path):
    assert not untyped((ROOT / path).read_text())


def test_untyped_functions_are_found():
    text = 'def a(x): {}\ndef b(x: int): {}\ndef c(*x) -> None: {}\ndef d(x: int, *, y) -> None: {}\nclass E:\n' \
           '    def f(self, x) -> None: {}\n    def __init__(self, x): {}\n    @staticmethod\n    def g(x) -> None: {}\n'
    assert [line.split()[1] for line in untyped(text)] == ['a', 'b', 'c', 'd', 'f', '__init__', 'g']
    text = 'def a(x: int, *y: int, **z: int) -> None: {}\ndef _b(x): {}\nclass _C:\n    def d(self): {}\nclass E:\n' \
           '    def f(self, x: int) -> None: {}\n    def _g(self): {}\n    @staticmethod\n    def h(x: int) -> None: {}\n'
    assert not untyped(text)
