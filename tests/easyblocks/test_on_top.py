# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild's own PythonPackage and PythonBundle on the module of an environment (docs/environments.md)."""
import re

from testbed import ROOT, run, wheels


def test_module_as_dependency(eb_env, lmod, tmp_path):
    index = eb_env.prefix / 'sources/p/PyTorch/wheels'
    alpha, *_ = [wheels.make_wheel(index, name, '1.0') for name in ('alpha', 'alone', 'bundled')]
    lock = tmp_path / 'PyTorch-0.1-tiny.lock'
    lock.write_text(wheels.lock_text([alpha]))
    lock.with_suffix('.eb').write_text(wheels.tiny_easyconfig(lock))
    eb_env(lock.with_suffix('.eb'))
    for name, easyblock, what in (
            ('alone', 'PythonPackage', "sources = ['alone-1.0-py3-none-any.whl']"),
            ('bundled', 'PythonBundle', "exts_list = [('bundled', '1.0', {'source_tmpl': 'bundled-1.0-py3-none-any.whl'})]")):
        (tmp_path / f'{name}-1.0.eb').write_text(f'''
easyblock = '{easyblock}'

name = '{name}'
version = '1.0'

homepage = 'https://example.org'
description = "on top"

toolchain = SYSTEM

{what}

dependencies = [('PyTorch', '0.1', '-tiny')]
sanity_check_paths = {{'files': [], 'dirs': ['lib']}}

moduleclass = 'ai'
''')
    eb_env(*tmp_path.glob('*-1.0.eb'), f'--sourcepath={index}:{ROOT}/runscripts', f'--robot-paths={tmp_path}:')
    for name in ('alone', 'bundled'):
        loaded = lmod.load(f'{name}/1.0', modulepath=[eb_env.modulepath])
        done = run(['python', '-c', f'import alpha, {name}; print(alpha.__file__, {name}.__file__)'], env=loaded)
        assert re.match(rf"\S+/PyTorch/0.1-tiny/\S+ \S+/{name}/1.0/", done.stdout)
