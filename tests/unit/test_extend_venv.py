# SPDX-License-Identifier: GPL-2.0-only
"""extend-venv-activate: what it writes into environments of all kinds, and what it refuses; `module` itself is in
tests/modules/test_extended_venv.py."""
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from testbed import ROOT, wheels

SCRIPT = ROOT / 'runscripts/extend-venv-activate'
BIN = pathlib.Path(sys.executable).parent
MARK = 'slingtorch extend-venv-activate'
OWN_PYTHON = os.path.realpath(sys.executable)


def call(command, env=None, **more):
    env = {'PATH': '/usr/bin:/bin', **(env or {})}
    return subprocess.run([str(word) for word in command], env=env, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


def make(path, tool='venv', python=OWN_PYTHON, options=('--system-site-packages',)):
    """An environment without pip, which takes a moment."""
    command = {'venv': [python, '-m', 'venv', '--without-pip'],
               'virtualenv': [BIN / 'virtualenv', '-q', '--no-seed', '-p', python],
               'uv': [BIN / 'uv', 'venv', '-q', '--offline', '--no-config', '-p', python]}[tool]
    done = call([*command, *options, path], {'HOME': str(path.parent)})
    assert done.returncode == 0, done.stderr
    return path


def tree(path):
    """Every file of a directory with its content and mode."""
    return {found: (found.lstat().st_mode, found.read_bytes() if found.is_file() else b'')
            for found in path.rglob('*') if '__pycache__' not in found.parts}


class Module:
    """What a loaded module of a PythonVenv leaves in the shell, without any module."""

    def __init__(self, root, options=(), **how):
        self.root = make(root, options=options, **how)
        self.script = shutil.copy(SCRIPT, root / 'bin')
        self.env = {'EBROOTOTHER': str(root.parent), 'EBROOTPYTORCH': str(root),
                    'SLINGTORCH_MODULE_PYTORCH': 'PyTorch/0.1-tiny', 'LOADEDMODULES': 'GCC/12:PyTorch/0.1-tiny',
                    'MODULEPATH': str(root.parent / "it's $(touch evil) `touch evil` & more")}
        self.packages = next(root.glob('lib/python3*/site-packages'))

    def extend(self, *args, env=None, **more):
        return call([self.script, *args], {**self.env, **(env or {})}, **more)

    def refuses(self, *args, status=1, **more):
        """Its message, in one line."""
        done = self.extend(*args, **more)
        assert (done.returncode, done.stdout) == (status, ''), done.stderr
        assert done.stderr.startswith('extend-venv-activate: ') and done.stderr.count('\n') == 1, done.stderr
        return done.stderr


@pytest.fixture(scope='module')
def module(tmp_path_factory):
    return Module(tmp_path_factory.mktemp('module') / 'root')


@pytest.fixture
def venv(tmp_path):
    return make(tmp_path / "my 'own' \\ & env")


def python_path(venv):
    """sys.path of the environment, without the standard library."""
    done = call([venv / 'bin/python', '-I', '-c', 'import sys; print(*sys.path, sep="\\n")'])
    assert (done.returncode, done.stderr) == (0, '')
    return [line for line in done.stdout.splitlines() if line.endswith('-packages')]


@pytest.mark.parametrize('tool', ['venv', 'virtualenv', 'uv'])
def test_extended_twice_and_undone(tmp_path, module, tool):
    """The same text after a second time; after --undo every byte and every mode as before."""
    venv = make(tmp_path / 'my env', tool)
    (venv / 'bin/activate').chmod(0o640)
    before = tree(venv)
    own, base = python_path(venv)[0], python_path(venv)[1:]
    for _ in range(2):
        done = module.extend(venv)
        assert (done.returncode, done.stderr) == (0, '')
        assert done.stdout == (f'{venv} is extended by PyTorch/0.1-tiny. From now on this line alone is needed: '
                               f'source {venv.parent}/my\\ env/bin/activate\n')
        after = tree(venv)
        assert (venv / 'bin/activate').read_text().count(f'>>> {MARK}') == 2
        assert python_path(venv) == [own, str(module.packages), *base] and base
    changed = {path.name for path in after if after[path] != before.get(path)}
    assert changed == {'activate', 'activate.csh', 'activate.fish', 'zz-slingtorch-module.pth'}
    assert (venv / 'bin/activate').stat().st_mode & 0o777 == 0o640
    module.extend('--undo', venv, env={'EBROOTPYTORCH': '', 'LOADEDMODULES': ''}, check=True)
    assert tree(venv) == before
    module.extend('--undo', venv, check=True)
    assert tree(venv) == before


def pythons():
    """Pythons of different versions on this machine."""
    found = [*pathlib.Path('/usr/bin').glob('python3*'), *pathlib.Path.home().glob('.pyenv/versions/3*/bin/python3')]
    code = 'import sys, venv; print("%d.%d" % sys.version_info[:2])'
    versions = {}
    for python in found:
        if os.access(python, os.X_OK) and 'config' not in python.name:
            versions[call([python, '-c', code]).stdout.strip()] = python
    versions.pop('', None)
    return versions


def test_every_python_of_this_machine(tmp_path):
    """The text that Python writes differs from version to version."""
    found = pythons()
    assert found
    venv = None
    for version, python in found.items():
        (tmp_path / version).mkdir()
        other = Module(tmp_path / version / 'root', python=python)
        if venv:
            assert f'and PyTorch/0.1-tiny has cpython {version}' in other.refuses(venv)
        venv = make(tmp_path / version / 'mine', python=python)
        before = (venv / 'bin/activate').read_bytes()
        assert other.extend(venv).returncode == 0
        assert python_path(venv)[:2] == [str(next(venv.glob('lib/python3*/site-packages'))), str(other.packages)]
        for shell in ('bash', 'zsh'):
            done = call([shell, '-uc', f'. "{venv}/bin/activate"; echo $VIRTUAL_ENV; deactivate; typeset -f; set'], other.env)
            assert done.stdout.startswith(f'{venv}\n') and done.stderr == ''
            assert 'slingtorch_' not in done.stdout.replace('_slingtorch_"', '')
        assert other.extend('--undo', venv).returncode == 0
        assert (venv / 'bin/activate').read_bytes() == before


def test_no_newline_at_the_end(venv, module):
    activate = venv / 'bin/activate'
    text = activate.read_bytes().rstrip(b'\n') + b' # \xff'
    activate.write_bytes(text)
    module.extend(venv, check=True)
    done = call(['bash', '-euc', '. bin/activate; python -c "import sys; print(sys.prefix)"; deactivate'], module.env, cwd=venv)
    assert (done.stdout, done.stderr) == (f'{venv}\n', '')
    # what somebody adds later stays
    activate.write_bytes(b'# mine\n' + activate.read_bytes() + b'echo mine\n')
    module.extend(venv, check=True)
    module.extend('--undo', venv, check=True)
    assert activate.read_bytes() == b'# mine\n' + text + b'echo mine\n'


def test_another_version_takes_the_place(venv, module, tmp_path):
    module.extend(venv, check=True)
    other = Module(tmp_path / 'other')
    other.extend(venv, env={'SLINGTORCH_MODULE_PYTORCH': 'PyTorch/0.2', 'LOADEDMODULES': 'PyTorch/0.2'}, check=True)
    text = (venv / 'bin/activate').read_text()
    assert text.count(f'>>> {MARK}') == 2 and 'PyTorch/0.1' not in text and str(module.root) not in text
    assert str(other.packages) in python_path(venv) and str(module.packages) not in python_path(venv)


def test_pth_files_of_the_module_count(venv, tmp_path):
    """Old packages that share a namespace, and packages that are linked, stand in such files."""
    other = Module(tmp_path / 'ö')
    (other.packages / 'more.pth').write_text('linked-packages\n')
    (other.packages / 'linked-packages').mkdir()
    assert other.extend(venv).returncode == 0
    assert python_path(venv)[1:3] == [str(other.packages), str(other.packages / 'linked-packages')]


def test_pip_installs_into_the_own_environment(venv, tmp_path):
    """What the module has is there already; a newer version of it goes beside, and wins."""
    other, index = Module(tmp_path / 'root'), tmp_path / 'index'
    for name in ('alpha', 'beta'):
        shutil.unpack_archive(wheels.make_wheel(index, name, '1.5'), other.packages, 'zip')
    wheels.make_wheel(index, 'beta', '2.0')
    wheels.make_wheel(index, 'gamma', '1.0', requires=['alpha', 'beta>=2'])
    module_before = tree(other.packages)
    assert other.extend(venv).returncode == 0
    done = call([sys.executable, '-m', 'pip', '--python', venv / 'bin/python', 'install', '--isolated', '--no-index',
                 '-f', index, 'gamma'], {'PIP_CONFIG_FILE': os.devnull})
    assert done.returncode == 0 and f'Requirement already satisfied: alpha in {other.packages}' in done.stdout
    own = next(venv.glob('lib/python3*/site-packages'))
    code = 'import alpha, beta, gamma; print(alpha.__file__, beta.__file__, gamma.__file__, beta.__version__, sep="\\n")'
    done = call([venv / 'bin/python', '-c', code])
    assert done.stdout.splitlines() == [f'{other.packages}/alpha.py', f'{own}/beta.py', f'{own}/gamma.py', '2.0']
    assert tree(other.packages) == module_before


def test_nothing_recorded_is_evaluated(venv, module, tmp_path):
    """Paths with quotes, dollars and backquotes go through both shells as they are."""
    module.extend(venv, check=True)
    gone = {'LOADEDMODULES': '', 'EBROOTPYTORCH': ''}
    say = 'module() { printf "%s|" "$@" "$MODULEPATH"; }; . bin/activate || echo "status $?"; echo "${MODULEPATH-unset}"'
    for shell in ('bash', 'zsh'):
        done = call([shell, '-uc', say], {**module.env, **gone, 'MODULEPATH': '/user'}, cwd=venv)
        path = module.env['MODULEPATH'] + ':/user|'
        assert done.stdout == f'load|PyTorch/0.1-tiny|{path}unload|PyTorch/0.1-tiny|{path}status 1\n/user\n'
        assert done.stderr.startswith('activate: the module PyTorch/0.1-tiny, for which') and done.stderr.count('\n') == 1
    assert not list(tmp_path.rglob('evil')) and not list(module.root.parent.glob('evil'))


@pytest.mark.parametrize('command, file', [
    (['tcsh', '-fc'], 'activate.csh'), (['fish', '-Nc'], 'activate.fish'), (['dash', '-c'], 'activate'),
])
def test_other_shells_refuse(venv, module, command, file):
    """A message, a status, and the environment as it was."""
    module.extend(venv, check=True)
    source = '.' if file == 'activate' else 'source'
    status = '$?' if file == 'activate' else '$status'
    done = call([*command, f'{source} ./bin/{file}; echo {status}; env'], cwd=venv)
    assert done.stdout.startswith('1\n') and 'PATH=/usr/bin:/bin\n' in done.stdout and 'VIRTUAL_ENV' not in done.stdout
    assert done.stderr.startswith(f'{file}: ') and 'works in bash and zsh' in done.stderr


def test_shellcheck(tmp_path, module):
    """The command, and what it writes."""
    venv = make(tmp_path / 'env')
    module.extend(venv, env={'MODULEPATH': '/modules'}, check=True)
    blocks = re.findall(f'# >>> {MARK} >>>\n(.*?)# <<< {MARK} <<<\n', (venv / 'bin/activate').read_text(), re.S)
    (venv / 'blocks.bash').write_text('\n'.join(['#!/bin/bash', *blocks]))
    # the modules tool's file is not known here, and a file that is sourced may return
    for command in ([SCRIPT], ['-e', 'SC1090,SC2317', venv / 'blocks.bash']):
        done = call([BIN / 'shellcheck', *command])
        assert (len(blocks), done.returncode, done.stdout) == (2, 0, '')


# --- bad input: a message in one line with a remedy, and nothing is changed


@pytest.mark.parametrize('args', [[], [''], ['a', 'b'], ['--force', 'a'], ['--undo']])
def test_wrong_use(module, args):
    assert 'Use: extend-venv-activate [--undo] DIR' in module.refuses(*args, status=2)


def test_help(module):
    done = module.extend('--help')
    assert done.returncode == 0 and done.stdout.startswith('extend-venv-activate: ') and 'Exit status' in done.stdout


def test_no_environment(module, tmp_path):
    for options in ([], ['--undo']):
        assert f'python -m venv --system-site-packages {tmp_path}/gone' in module.refuses(*options, tmp_path / 'gone')
        assert 'no pyvenv.cfg, or no bin/activate' in module.refuses(*options, tmp_path)
        assert "the module's own environment" in module.refuses(*options, module.root)


@pytest.mark.parametrize('env', [
    {'LOADEDMODULES': ''}, {'EBROOTPYTORCH': ''}, {'EBROOTPYTORCH': '/usr'}, {'SLINGTORCH_MODULE_PYTORCH': ''},
])
def test_module_is_not_loaded(module, venv, env):
    before = tree(venv)
    assert f'that of {module.root}, is not loaded' in module.refuses(venv, env=env)
    assert tree(venv) == before


def test_python_of_another_version(module, venv):
    """The environment's Python says that it is another one; one more on each machine would be needed otherwise."""
    python = venv / 'bin/python'
    python.unlink()
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "cpython 3.5" "{venv}" /usr /nowhere "\'\'"\n')
    python.chmod(0o755)
    before = tree(venv)
    message = module.refuses(venv)
    assert 'has cpython 3.5, and PyTorch/0.1-tiny has cpython 3.' in message and 'Remove ' in message
    assert tree(venv) == before
    python.write_text('#!/bin/sh\necho broken >&2\nexit 1\n')
    done = module.extend(venv)
    assert done.returncode == 1 and done.stderr.startswith('broken\n') and 'Was it moved' in done.stderr
    assert tree(venv)[venv / 'bin/activate'] == before[venv / 'bin/activate']


def test_moved_environment(module, venv):
    """bin/python finds itself, yet another environment's Python is none of this one."""
    (venv / 'bin/python').unlink()
    (venv / 'bin/python').symlink_to(OWN_PYTHON)
    other = make(venv.parent / 'other')
    (venv / 'bin/python').unlink()
    (venv / 'bin/python').write_text(f'#!/bin/sh\nexec {other}/bin/python "$@"\n')
    (venv / 'bin/python').chmod(0o755)
    assert f'belongs to {other}' in module.refuses(venv)


def test_environment_that_was_moved_as_a_whole(module, venv):
    """Its activate would leave the module's Python in place, and pip would install into the module."""
    moved = venv.parent / 'moved'
    shutil.copytree(venv, moved, symlinks=True)
    before = tree(moved)
    module.extend(venv, check=True)
    venv.rename(venv.parent / 'elsewhere')
    assert 'activates ' in module.refuses(moved) and 'was the environment moved' in module.refuses(moved)
    assert tree(moved) == before
    done = call(['bash', '-c', '. "$1/bin/activate"', '_', venv.parent / 'elsewhere'], module.env)
    assert done.returncode == 1 and f'this environment was moved: it was made in {venv}' in done.stderr


def test_path_that_python_does_not_quote(module, tmp_path):
    assert 'a character in its path that Python does not quote' in module.refuses(make(tmp_path / 'a`id`b'))


def test_module_that_takes_packages_from_its_python(tmp_path):
    """Such an environment must be made in the same way, on the same Python."""
    other = Module(tmp_path / 'root', options=['--system-site-packages'])
    narrow = make(tmp_path / 'narrow', options=[])
    assert 'made without --system-site-packages' in other.refuses(narrow)
    wide = make(tmp_path / 'wide')
    assert other.extend(wide).returncode == 0
    assert Module(tmp_path / 'narrow-root').extend(narrow).returncode == 0


def test_block_that_was_edited(module, venv):
    module.extend(venv, check=True)
    activate = venv / 'bin/activate'
    activate.write_text(activate.read_text().replace(f'# <<< {MARK} <<<\n', ''))
    before = tree(venv)
    for options in ([], ['--undo']):
        assert 'was edited' in module.refuses(*options, venv)
        assert tree(venv) == before


def test_read_only(other_user):
    """Another user's environment; nothing is left beside its files."""
    python = '/usr/bin/python3'
    module = Module(other_user.directory / 'root', python=python)
    venv = make(other_user.directory / 'mine', python=python)
    other_user.open(other_user.directory)
    before = tree(venv)
    done = other_user.run([module.script, venv], env=module.env, check=False)
    assert done.returncode == 1
    assert f"you may not write '{venv}/bin/activate'. Where it is yours: chmod u+w" in done.stderr
    assert tree(venv) == before
    subprocess.run(['chown', '-R', str(other_user.uid), venv], check=True)
    (venv / 'bin/activate').chmod(0o444)
    before = tree(venv)
    for options in ([], ['--undo']):
        done = other_user.run([module.script, *options, venv], env=module.env, check=False)
        assert (done.returncode, tree(venv)) == (0 if options else 1, before)
    (venv / 'bin/activate').chmod(0o644)
    other_user.run([module.script, venv], env=module.env)


def test_full_disk(module, venv):
    """A file that cannot be written whole takes the place of none."""
    before = tree(venv)
    done = call(['bash', '-c', 'ulimit -f 1; trap "" XFSZ; exec "$@"', 'bash', module.script, venv], module.env)
    assert done.returncode == 1 and 'cannot be written (above is why)' in done.stderr
    assert tree(venv) == before
