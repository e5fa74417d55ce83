# SPDX-License-Identifier: GPL-2.0-only
"""An environment of a user's own on a module that `eb` installed: new shells, nested, a module that is gone."""
import os
import re
import shlex
import sys

import pytest

from testbed import run, wheels
from testbed.easybuild import EasyBuild, Installation

pytestmark = pytest.mark.real

SHELLS = {'bash': ['bash', '--noprofile', '--norc', '-c'], 'zsh': ['zsh', '-f', '-c']}
BOOKKEEPING = ('_=', '_ModuleTable', 'LMOD', '__LMOD', '_LMFILES_=', 'LOADEDMODULES=', 'MODULEPATH=', 'MODULES', '__MODULES',
               'BASH_ENV', 'FPATH', 'MANPATH', 'PS1', 'PYTHONHOME', 'BASH_FUNC_', 'ENV=', 'SHLVL')
"""What the modules tool keeps for itself, and venv's PS1."""

STATE = r'state() { env -0 | tr "\n\0" "?\n" | grep -E "^[A-Za-z_]" | grep -vE "^(%s)" | sort; }; ' % '|'.join(BOOKKEEPING)


@pytest.fixture(scope='module')
def installed(lmod, tmp_path_factory):
    """Directory of an installation of a small environment with the packages alpha and beta, which needs another module."""
    directory = tmp_path_factory.mktemp('module')
    eb = EasyBuild(directory / 'eb', lmod)
    made = [wheels.make_wheel(eb.prefix / 'sources/p/PyTorch/wheels', 'alpha', '1.0', requires=['beta>=1']),
            wheels.make_wheel(eb.prefix / 'sources/p/PyTorch/wheels', 'beta', '1.5')]
    lock_file = directory / 'PyTorch-0.1-tiny.lock'
    lock_file.write_text(wheels.lock_text(made))
    needed = "dependencies = [('site/1.0', EXTERNAL_MODULE)]"
    (directory / 'PyTorch-0.1-tiny.eb').write_text(wheels.tiny_easyconfig(lock_file, needed))
    site = eb.modulepath / 'site/1.0'
    site.parent.mkdir(parents=True)
    site.write_text('#%Module\nsetenv SITE 1\n')
    eb(directory / 'PyTorch-0.1-tiny.eb')
    return directory


@pytest.fixture(scope='module')
def module(installed, modulestool):
    """The Installation as this modules tool loads it."""
    eb = EasyBuild(installed / 'eb', modulestool)
    if modulestool.name != 'Lmod':
        eb(installed / 'PyTorch-0.1-tiny.eb', '--module-only', '--force')
    installation = Installation('PyTorch/0.1-tiny', eb.modulepath, modulestool)
    installation.tool = modulestool
    return installation


def said(done):
    """What was said on stderr, without the lines in which Environment Modules tells of modules that others need."""
    return re.sub(r'^(Loading|Unloading) \S+\n  (Loading|Unloading useless) requirement: \S+\n', '', done.stderr, flags=re.M)


def extended(module, path):
    """An environment that a user made and extended as README says."""
    done = module.tool.bash(f'''
        set -e
        module load {module.module}
        python -m venv --without-pip --system-site-packages {shlex.quote(str(path))}
        extend-venv-activate {shlex.quote(str(path))}
    ''', modulepath=[module.modulepath])
    assert said(done) == '' and f'source {path.parent}/' in done.stdout
    return path


@pytest.fixture
def mine(module, tmp_path):
    """An extended environment, in a path that wants quotes."""
    return extended(module, tmp_path / "my own (env) it's")


@pytest.fixture
def name(module):
    """Name of a shell: another one with each modules tool. test_new_shell has both with both."""
    return 'bash' if module.tool.name == 'Lmod' else 'zsh'


def shell(name, script, cwd, env=None, check=True):
    """A new shell that knows no module."""
    environment = {'PATH': '/usr/local/bin:/usr/bin:/bin', 'HOME': str(cwd), **(env or {})}
    return run([*SHELLS[name], script], env=environment, cwd=cwd, check=check)


@pytest.mark.parametrize('name', SHELLS)
def test_new_shell(module, mine, name):
    """One line is enough: both sets of packages in their order, the module's variables; clean after deactivate."""
    own = next(mine.glob('lib/python3*/site-packages'))
    (own / 'beta.py').write_text('')
    done = shell(name, STATE + '''
        set -eu
        state > before
        source ./bin/activate
        python -c 'import alpha, beta, sys; print(alpha.__file__, beta.__file__, *sys.path, sep="\\n")'
        echo "$RUNSCRIPTS"; echo "$VIRTUAL_ENV"; echo "$LOADEDMODULES"
        deactivate
        state > after
        echo "loaded:${LOADEDMODULES-}" "${MODULEPATH-}"
        set > all; typeset -f >> all
        deactivate 2> again || echo "status $?"
    ''', cwd=mine)
    assert said(done) == ''
    alpha, beta, *path = done.stdout.splitlines()
    assert alpha == str(module.root / own.relative_to(mine) / 'alpha.py') and beta == str(own / 'beta.py')
    packages = [line for line in path if line.endswith('site-packages') and 'quickvenv' not in line]
    assert [line for line in packages if not line.startswith(sys.base_prefix)] == [str(own), os.path.dirname(alpha)]
    assert path[-5:] == [str(module.runscripts), str(mine), f'site/1.0:{module.module}', 'loaded: ', 'status 127']
    assert (mine / 'after').read_text() == with_module_command(module, mine)
    assert 'slingtorch' not in (mine / 'all').read_text().lower().replace(str(mine).lower(), '')


def with_module_command(module, directory):
    """What was noted before, with what defining `module` itself adds."""
    before, after = ((directory / name).read_text().splitlines() for name in ('before', 'after'))
    added = [line for line in after if line.startswith('MODULESHOME=')]
    return '\n'.join(sorted([*before, *added])) + '\n'


def test_module_of_the_user_stays(module, mine, name):
    """What the user had loaded is loaded after deactivate, and the user's own MODULEPATH is as it was."""
    init = module.tool.init.replace(' bash ', f' {name} ').replace('/init/bash', f'/init/{name}')
    done = shell(name, STATE + init + f'''
        mkdir -p 'more modules'
        export MODULEPATH="$PWD/more modules:{module.modulepath}"
        module load {module.module}
        state > before; echo "$MODULEPATH" > path
        . ./bin/activate
        python -c 'import alpha'
        deactivate
        state > after; echo "$MODULEPATH" >> path
        echo "$LOADEDMODULES"
    ''', cwd=mine, env=module.tool.variables)
    assert (done.stdout, said(done)) == (f'site/1.0:{module.module}\n', '')
    assert (mine / 'after').read_text() == (mine / 'before').read_text()
    assert len(set((mine / 'path').read_text().splitlines())) == 1
    assert f'VIRTUAL_ENV={module.root}\n' in (mine / 'after').read_text()


def test_another_version_was_loaded(module, mine, tmp_path):
    """The modules tool replaces it (Lmod), or the two conflict and nothing is activated."""
    other = tmp_path / 'other/PyTorch'
    other.mkdir(parents=True)
    (other / '9.9').write_text('#%Module\nconflict PyTorch\nsetenv EBROOTPYTORCH /nowhere\nprepend-path PATH /nowhere/bin\n')
    done = module.tool.bash('''
        module load PyTorch/9.9
        source bin/activate || echo "status $?"
        echo "$EBROOTPYTORCH" "$(typeset -F deactivate)"
    ''', modulepath=[other.parent], cwd=mine)
    if module.tool.name == 'Lmod':
        assert done.stdout == f'{module.root} deactivate\n'
    else:
        assert done.stdout == 'status 1\n/nowhere \n'
        assert 'conflict' in done.stderr and 'PyTorch/0.1-tiny, for which this environment was extended' in done.stderr


def test_one_after_the_other(module, mine, tmp_path, name):
    """A second environment ends the first, whichever of them is extended; the same one again does no harm."""
    extended(module, tmp_path / 'second')
    run([sys.executable, '-m', 'venv', '--without-pip', tmp_path / 'plain'])
    for first, then in [(mine, tmp_path / 'second'), (mine, mine), (tmp_path / 'plain', mine), (mine, tmp_path / 'plain')]:
        done = shell(name, STATE + f'''
            set -eu
            state > before
            . {shlex.quote(str(first))}/bin/activate
            . {shlex.quote(str(then))}/bin/activate
            echo "$VIRTUAL_ENV"; echo "${{LOADEDMODULES-}}"; echo "$PATH"
            deactivate
            state > after
        ''', cwd=tmp_path)
        active, loaded, path = done.stdout.splitlines()
        assert active == str(then) and said(done) == ''
        path = path.split(':')
        assert path[0] == f'{then}/bin' and (first == then or f'{first}/bin' not in path)
        if then.name != 'plain':
            assert loaded == f'site/1.0:{module.module}' and path[1] == f'{module.root}/bin'
            assert (tmp_path / 'after').read_text() == with_module_command(module, tmp_path)


def test_module_is_gone(module, mine, name):
    """An error that says what to do, and nothing half activated; another installation of that name is not taken."""
    file = next((module.modulepath / 'PyTorch').iterdir())
    text = file.read_text()
    script = STATE + '''
        state > before
        source ./bin/activate || echo "status $?"
        state > after; echo "${LOADEDMODULES-}"
        command -v deactivate python
        set -e
        source ./bin/activate
        echo not reached
    '''
    try:
        file.unlink()
        gone = shell(name, script, cwd=mine, check=False)
        same = (mine / 'after').read_text() == with_module_command(module, mine)
        file.write_text(text.replace(str(module.root), '/elsewhere'))
        moved = shell(name, script, cwd=mine, check=False)
    finally:
        file.write_text(text)
    assert (gone.returncode, gone.stdout) == (1, 'status 1\n\n') and same
    message = f'activate: cannot load the module {module.module}, for which this environment was extended, from {module.root} (the'
    assert message in gone.stderr
    assert (moved.returncode, moved.stdout) == (1, 'status 1\n\n')
    assert message in moved.stderr and '/elsewhere is loaded' in moved.stderr
