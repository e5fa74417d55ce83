# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild's own checks of easyconfigs, over every one of the bundle."""

import collections

import pytest

import easyconfig_checks
import patch_checks
import testbed
import upstream_files
from testbed import easybuild


@pytest.fixture(scope='module')
def results(lua_checker):
    """What all checks say about all easyconfigs."""
    return lua_checker(
        'easyconfigs',
        upstream_files.EASYCONFIGS,
        [testbed.ROOT / 'easyconfigs'],
        upstream_files.INCLUDE,
        patches=[testbed.ROOT / 'patches'],
    )


def test_there_are_easyconfigs():
    assert upstream_files.EASYCONFIGS


@pytest.mark.parametrize('check', easyconfig_checks.CHECKS)
@pytest.mark.parametrize('path', upstream_files.EASYCONFIGS, ids=upstream_files.name)
def test_easyconfig(results, path, check):
    wrong = results[str(path)][check]
    assert not wrong, '\n'.join([f'{path.name}: {easyconfig_checks.CHECKS[check].__doc__}', *wrong])


def test_no_two_easyconfigs_make_one_module(results):
    modules = collections.defaultdict(list)
    for path, result in results.items():
        modules[result.get(' module')].append(path)
    assert not {module: paths for module, paths in modules.items() if module and len(paths) > 1}


def test_patches(results):
    wrong = []
    for path in upstream_files.PATCHES:
        if path.suffix == '.patch':
            wrong += [f'{path.name}: {problem}' for problem in patch_checks.problems(path.read_text())]
        if not any(path.name in result.get(' patches', []) for result in results.values()):
            wrong.append(f'{path.name}: no easyconfig uses it')
    assert not wrong, '\n'.join(wrong)


def check_with_eb(option, files, include, env, cwd):
    """`eb --check-...` on all files in one run."""
    command = [
        easybuild.BIN / 'eb',
        option,
        '--ignoreconfigfiles=',
        '--output-style=no_color',
        f'--tmpdir={cwd}',
        *files,
    ]
    if include:
        command.append(f'--include-easyblocks={",".join(map(str, include))}')
    return testbed.run(
        command, env={**env, 'EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES': '1'}, check=False, cwd=cwd
    )


@pytest.mark.parametrize('option', ['--check-contrib', '--check-style'])
def test_eb_check(option, lmod, tmp_path):
    done = check_with_eb(option, upstream_files.EASYCONFIGS, upstream_files.INCLUDE, lmod.env, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


# --- each check can fail

SHA = 'a' * 64
GOOD = f"""easyblock = 'Tarball'

name = 'good'
version = '1.0'

homepage = 'https://example.org'
description = "An easyconfig that nothing is wrong with"

toolchain = SYSTEM

source_urls = ['https://example.org/releases']
sources = ['%(name)s-%(version)s.tar.gz']
patches = ['good-1.0_fix.patch']
checksums = [
    # the server signs it anew every day
    None,
    '{SHA}',
]

sanity_check_paths = {{
    'files': ['bin/good'],
    'dirs': [],
}}
sanity_check_commands = ['python -s -c "import good"']

moduleclass = 'tools'
"""

# check: what is replaced by what in the good easyconfig, or what is done to the file
BAD = {
    'parses': ("name = 'good'", "name = good'"),
    'file_name': ("version = '1.0'", "version = '1.1'"),
    'location': ("name = 'good'", "name = 'Good'"),
    'module_class': ("'tools'", "'base'"),
    'parameters_exist': ("moduleclass", "_x = 1\nfrobnicate = []\nmoduleclass"),
    'parameters_once': ("toolchain = SYSTEM", "toolchain = SYSTEM\ntoolchain = SYSTEM"),
    'only_assignments': ("toolchain = SYSTEM", "toolchain = SYSTEM\nif True:\n    toolchain = SYSTEM"),
    'parameter_order': ("moduleclass = 'tools'", "moduleclass = 'tools'\nversionsuffix = ''"),
    'easyblock_is_meant': ("easyblock = 'Tarball'\n", ""),
    'checksums_complete': (f"    '{SHA}',\n", ""),
    'checksum_none_has_reason': ("    # the server signs it anew every day\n", ""),
    'checksums_can_be_injected': (f"    '{SHA}',\n]\n", f"    '{SHA}',\n]  # by hand\nbuildopts = ['a']\n"),
    'sources_can_be_had': ("source_urls = ['https://example.org/releases']\n", ""),
    'python_without_user_packages': ("python -s -c", "python -c"),
    'patches_exist': ("good-1.0_fix.patch", "good-1.0_absent.patch"),
    'https_only': ("https://example.org/releases", "http://example.org/releases"),
    'no_trailing_whitespace': ("toolchain = SYSTEM", "toolchain = SYSTEM "),
    'file_mode': 0o755,
    'no_root_variable': ("'bin/good'", "'$root/bin/good'"),
    'no_needless_defaults': ("easyblock = 'Tarball'", "easyblock = 'PythonPackage'\nuse_pip = True"),
    'no_global_search_paths': ("moduleclass", "modextrapaths = {'PYTHONPATH': 'lib'}\nmoduleclass"),
    'sanity_check_paths_shape': ("'bin/good'", "'/bin/good'"),
    'no_duplicate_extensions': ("moduleclass", "exts_list = [('a', '1'), ('a', '1')]\nmoduleclass"),
    'nothing_deprecated': ("moduleclass", "parallel = 1\nmoduleclass"),
}
# `eb --dump` is right about every easyconfig at hand: test_change_by_dump_is_found
NOT_BY_TEXT = {'dump_round_trip'}


@pytest.fixture(scope='module')
def samples(tmp_path_factory, lua_checker):
    """{name of the bad sample, or 'good': {check: what is wrong}}."""
    home = tmp_path_factory.mktemp('samples')
    (home / 'patches').mkdir()
    (home / 'patches/good-1.0_fix.patch').write_text('')
    files = {}
    for name, change in {'good': None, **BAD}.items():
        directory = home / name / 'g/good'
        directory.mkdir(parents=True)
        path = files[name] = directory / 'good-1.0.eb'
        path.write_text(GOOD.replace(*change) if isinstance(change, tuple) else GOOD)
        path.chmod(change if isinstance(change, int) else 0o644)
        assert isinstance(change, (int, type(None))) or path.read_text() != GOOD
    results = lua_checker(
        'easyconfigs', files.values(), [home / name for name in files], [], patches=[home / 'patches']
    )
    return {name: results[str(path)] for name, path in files.items()}


def test_every_check_has_a_bad_sample():
    assert set(BAD) | NOT_BY_TEXT == set(easyconfig_checks.CHECKS)


def test_good_sample_passes(samples):
    assert not {check: wrong for check, wrong in samples['good'].items() if check in easyconfig_checks.CHECKS and wrong}


@pytest.mark.parametrize('check', BAD)
def test_bad_sample_is_found(samples, check):
    assert samples[check][check]
    if check != 'parses':
        assert 'cannot be checked' not in str(samples[check][check])


def test_change_by_dump_is_found():
    assert list(
        easyconfig_checks.differences({'name': 'a', 'version': '1'}, {'name': 'b', 'version': '1'}, ['name', 'version'])
    ) == ["name: 'a' becomes 'b'"]


PATCH = '''Fix the frobnication of zero-sized tensors on one rank
Author: A. Nonymous
https://github.com/example/example/pull/1
--- a/file
+++ b/file
@@ -1 +1 @@
-a
+b
'''


def test_good_patch_passes():
    assert not list(patch_checks.problems(PATCH))


@pytest.mark.parametrize(
    'change',
    [
        ('Author: ', ''),
        ('https://', ''),
        ('Fix the frobnication of zero-sized tensors on one rank', ''),
        ('@@ -1 +1 @@\n', ''),
    ],
)
def test_bad_patch_is_found(change):
    assert len(list(patch_checks.problems(PATCH.replace(*change)))) == 1


@pytest.mark.parametrize(
    'option, change',
    [
        ('--check-contrib', ("patches = ['good-1.0_fix.patch']\n", '')),  # one checksum too many
        ('--check-style', ("version = '1.0'", "version='1.0'")),
    ],
)
def test_eb_check_can_fail(option, change, lmod, tmp_path):
    path = tmp_path / 'good-1.0.eb'
    path.write_text(GOOD.replace("patches = ['good-1.0_fix.patch']\n", '').replace(f"    '{SHA}',\n", ''))
    assert check_with_eb(option, [path], [], lmod.env, tmp_path).returncode == 0
    path.write_text(GOOD.replace(*change))
    assert check_with_eb(option, [path], [], lmod.env, tmp_path).returncode != 0
