# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild's own PythonPackage and PythonBundle on the module of an environment (docs/environments.md)."""
import re

import pytest

from testbed import ROOT, run, wheels


@pytest.mark.parametrize('easyblock', ['PythonPackage', 'PythonBundle'])
def test_module_as_dependency(eb_env, lmod, tmp_path, easyblock):
    made = [wheels.make_wheel(tmp_path / 'index', name, '1.0') for name in ('alpha', 'beta')]
    lock = tmp_path / 'PyTorch-0.1-tiny.lock'
    lock.write_text(wheels.lock_text(made[:1]))
    lock.with_suffix('.eb').write_text(wheels.tiny_easyconfig(lock))
    eb_env(lock.with_suffix('.eb'), env={'PIP_CONFIG_FILE': '/dev/null', 'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': str(tmp_path / 'index')})
    what = "sources = ['beta-1.0-py3-none-any.whl']" if easyblock == 'PythonPackage' else \
        "exts_list = [('beta', '1.0', {'source_tmpl': 'beta-1.0-py3-none-any.whl'})]"
    (tmp_path / 'beta-1.0.eb').write_text(f'''
easyblock = '{easyblock}'

name = 'beta'
version = '1.0'

homepage = 'https://example.org'
description = "beta"

toolchain = SYSTEM

{what}

dependencies = [('PyTorch', '0.1', '-tiny')]
sanity_check_paths = {{'files': [], 'dirs': ['lib']}}

moduleclass = 'ai'
''')
    eb_env(tmp_path / 'beta-1.0.eb', f'--sourcepath={tmp_path}/index:{ROOT}/runscripts', f'--robot-paths={tmp_path}:')
    loaded = lmod.load('beta/1.0', modulepath=[eb_env.modulepath])
    done = run(['python', '-c', 'import alpha, beta; print(alpha.__file__, beta.__file__)'], env=loaded)
    assert re.match(r"\S+/PyTorch/0.1-tiny/\S+ \S+/beta/1.0/", done.stdout)
