# SPDX-License-Identifier: GPL-2.0-only
"""Every easyconfig and patch: EasyBuild's own checks (eb --check-contrib, --check-style), and what the bundle asks besides.

The suites of EasyBuild's repositories are in none of its packages.
"""
import ast
import re

import pytest

import testbed
from testbed import ROOT, easybuild

EASYCONFIGS = sorted((ROOT / 'easyconfigs').rglob('*.eb'))
PATCHES = sorted((ROOT / 'patches').rglob('*.patch'))
INCLUDE = [ROOT / 'easyblocks/*.py', ROOT / 'easyblocks/generic/*.py']


def check_with_eb(option, files, env, cwd):
    """`eb --check-...` on all files in one run."""
    command = [easybuild.BIN / 'eb', option, '--ignoreconfigfiles=', '--output-style=no_color', f'--tmpdir={cwd}', *files,
               f'--include-easyblocks={",".join(map(str, INCLUDE))}']
    return testbed.run(command, env={**env, 'EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES': '1'}, check=False,
                       cwd=cwd)


def faults(name, text):
    """What the bundle does not want in an easyconfig."""
    lines, tree = text.splitlines(), ast.parse(text)
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    if len(values) != len(tree.body):
        yield 'says how, or something twice: single assignments alone'
    if not name.startswith('%s-%s' % tuple(getattr(values.get(key), 'value', None) for key in ('name', 'version'))):
        yield 'has another name than its software and version'
    for node in ast.walk(values.get('checksums', tree)):
        if isinstance(node, ast.Constant) and node.value is None and 'checksums' in values \
                and not any('#' in line for line in lines[node.lineno - 2:node.lineno]):
            yield f'line {node.lineno}: no checksum, and no reason beside it'
    for number, line in enumerate(lines, 1):
        # packages in ~/.local must not decide what a check or a build sees
        if re.search(r'\bpython3? (?!(-\w+ )*-s )(-\w+ )*(-c|-m|\S*\w\.py) ', line.partition('# ')[0]):
            yield f'line {number}: python without -s'
        if re.search(r'\b(http|ftp|git)://', line):
            yield f'line {number}: an address that can be tampered with'
        if re.search(r'\$(root\b|\{root\})', line):
            yield f'line {number}: $root is Tcl: %(installdir)s'


def test_easyconfigs():
    assert EASYCONFIGS
    for path in EASYCONFIGS:
        assert list(faults(path.name, path.read_text())) == [], path.name
        name = path.parent.name
        assert path.name.startswith(name + '-') and path.parent.parent.name == name[0].lower(), path


GOOD = '''easyblock = 'Tarball'

name = 'good'
version = '1.0'

homepage = 'https://example.org'
description = "An easyconfig that nothing is wrong with"

toolchain = SYSTEM

source_urls = ['https://example.org/releases']
sources = ['%(name)s-%(version)s.tar.gz']
# the server signs it again every day
checksums = [None]

sanity_check_commands = ['python -s -c "import good"']

moduleclass = 'tools'
'''


@pytest.mark.parametrize('old, new', [
    ("toolchain = SYSTEM", "toolchain = SYSTEM\nif True:\n    toolchain = SYSTEM"),
    ("toolchain = SYSTEM", "toolchain = SYSTEM\ntoolchain = SYSTEM"), ("version = '1.0'", "version = '1.1'"),
    ("# the server signs it again every day\n", "\n"), ("python -s -c", "python -c"), ("https:", "http:"),
    ("import good", "import good; $root"),
])
def test_fault_is_found(old, new):
    assert list(faults('good-1.0.eb', GOOD)) == []
    assert list(faults('good-1.0.eb', GOOD.replace(old, new)))


def test_patches():
    """Each is used, and says who, why and where upstream before its first hunk."""
    used = ''.join(path.read_text() for path in EASYCONFIGS)
    for path in PATCHES:
        head, hunk, _ = path.read_text().partition('\n--- ')
        assert hunk and path.name in used, path.name
        assert re.search(r'^(From|Author|Signed-off-by)s?: *\S', head, re.M) and 'https://' in head, path.name
        assert len(re.sub(r'^(From|Author|Date|Signed-off-by|Subject|\S*https://).*$', '', head, flags=re.M).split()) > 4


@pytest.mark.parametrize('option', ['--check-contrib', '--check-style'])
def test_eb_check(option, lmod, tmp_path):
    done = check_with_eb(option, EASYCONFIGS, lmod.env, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize('option, old, new', [('--check-contrib', "[None]", "[]"),
                                              ('--check-style', "version = '1.0'", "version='1.0'")])
def test_eb_check_can_fail(option, old, new, lmod, tmp_path):
    path = tmp_path / 'good-1.0.eb'
    path.write_text(GOOD.replace(old, new))
    assert check_with_eb(option, [path], lmod.env, tmp_path).returncode != 0
