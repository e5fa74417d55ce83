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

from testbed import ROOT, messages, wheels

SCRIPT = ROOT / 'runscripts/extend-venv-activate'
BIN = pathlib.Path(sys.executable).parent
OWN_PYTHON = os.path.realpath(sys.executable)


def call(command, env=None, **more):
    env = {'PATH': '/usr/bin:/bin', **(env or {})}
    return subprocess.run([str(word) for word in command], env=env, text=True, stdin=subprocess.DEVNULL, capture_output=True, **more)


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
        (root / 'packages.lock').write_text('')

    def extend(self, *args, env=None, **more):
        done = call([self.script, *args], {**self.env, **(env or {})}, **more)
        messages.known(done.stderr, *args[:1], self.root)
        return done

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
def test_extended_once(tmp_path, module, tool):
    """Each tool's environment; a second time is refused, and changes nothing."""
    venv = make(tmp_path / 'my env', tool)
    before = tree(venv)
    own, base = python_path(venv)[0], python_path(venv)[1:]
    done = module.extend(venv)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout == (f'{venv} now includes PyTorch/0.1-tiny. From now on you need only this line: '
                           f'source {venv.parent}/my\\ env/bin/activate\n')
    after = tree(venv)
    assert python_path(venv) == [own, str(module.packages), *base] and base
    assert {path.name for path in after if after[path] != before.get(path)} == {'activate', 'zz-slingtorch-module.pth'}
    # of shells in which no module would be loaded
    assert [path.name for path in (venv / 'bin').glob('[aA]ctivate*')] == ['activate']
    assert 'was extended before' in module.refuses(venv) and tree(venv) == after


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
    for version, python in found.items():
        (tmp_path / version).mkdir()
        other = Module(tmp_path / version / 'root', python=python)
        venv = make(tmp_path / version / 'mine', python=python)
        assert other.extend(venv).returncode == 0
        assert python_path(venv)[:2] == [str(next(venv.glob('lib/python3*/site-packages'))), str(other.packages)]
        for shell in ('bash', 'zsh'):
            done = call([shell, '-uc', f'. "{venv}/bin/activate"; echo $VIRTUAL_ENV; deactivate; typeset -f; set'], other.env)
            assert done.stdout.startswith(f'{venv}\n') and done.stderr == ''
            assert 'slingtorch_' not in done.stdout.replace('_slingtorch_"', '')


def test_no_newline_at_the_end(venv, module):
    activate = venv / 'bin/activate'
    text = activate.read_bytes().rstrip(b'\n') + b' # \xff'
    activate.write_bytes(text)
    module.extend(venv, check=True)
    done = call(['bash', '-euc', '. bin/activate; python -c "import sys; print(sys.prefix)"; deactivate'], module.env, cwd=venv)
    assert (done.stdout, done.stderr) == (f'{venv}\n', '')


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
        assert done.stderr.startswith('activate: cannot load the module PyTorch/0.1-tiny, for which') and done.stderr.count('\n') == 1
    assert not list(tmp_path.rglob('evil')) and not list(module.root.parent.glob('evil'))


def test_commands_of_the_module(venv, tmp_path):
    """torchrun, and pip where the environment has none: with the environment's Python, and so its packages."""
    other = Module(tmp_path / 'root')
    for name, start in (('torchrun', f'#!{other.root}/bin/python\n'), ('mine', '#!/bin/sh\nexit 3\n'),
                        ('long', f"#!/bin/sh\n'''exec' '{other.root}/bin/python' \"$0\" \"$@\"\n' '''\n")):
        (other.root / 'bin' / name).write_text(start + 'import sys\nprint(sys.prefix, sys.argv[1:])\n')
        (other.root / 'bin' / name).chmod(0o755)
    other.extend(venv, check=True)
    for name in ('torchrun', 'long'):
        assert call([venv / 'bin' / name, 'a b', '-c']).stdout == f"{venv} ['a b', '-c']\n"
    assert not (venv / 'bin/mine').exists()


def test_pip_keeps_the_pytorch_of_the_module(venv, tmp_path):
    """By the module's index it finds what fits; another PyTorch is refused in pip's words, and not asked what is mute."""
    other = Module(tmp_path / 'root')
    cpu = wheels.make_index(tmp_path / 'cpu pages', [
        wheels.make_wheel(tmp_path / 'cpu', 'torchvision', '0.28.0+cpu', requires=['torch==2.13.0'])])
    index = wheels.make_index(tmp_path / 'pages', [
        wheels.make_wheel(tmp_path / 'index', 'torch', version) for version in ('2.9.0', '2.13.0', '2.15.0')] + [
        wheels.make_wheel(tmp_path / 'index', 'torchvision', vision, requires=[f'torch=={torch}'])
        for vision, torch in (('0.28.0', '2.13.0'), ('0.30.0', '2.15.0'))])
    shutil.unpack_archive(wheels.make_wheel(tmp_path / 'torch', 'torch', '2.13.0+cpu'), other.packages, 'zip')
    (other.root / 'packages.lock').write_text(f'--extra-index-url http://127.0.0.1:9/whl\n--extra-index-url {cpu}\n')
    done = other.extend(venv)
    assert (done.returncode, done.stderr) == (0, 'extend-venv-activate: http://127.0.0.1:9/whl does not answer; pip will '
                                              'not look there for packages that fit\n')

    def pip(*words):
        return call([sys.executable, '-m', 'pip', '--python', venv / 'bin/python', 'install', *words],
                    {'PIP_INDEX_URL': index, 'HOME': str(tmp_path), 'PIP_DISABLE_PIP_VERSION_CHECK': '1'})

    done = pip('torchvision')
    assert done.returncode == 0 and 'Successfully installed torchvision-0.28.0+cpu\n' in done.stdout, done.stderr
    for version in ('2.9.0', '2.15.0'):
        done = pip(f'torch=={version}')
        assert done.returncode == 1 and 'The user requested (constraint) torch==2.13.0+cpu' in done.stdout + done.stderr
    assert '127.0.0.1:9' not in done.stdout + done.stderr


def test_another_shell_refuses(venv, module):
    module.extend(venv, check=True)
    done = call(['dash', '-c', '. ./bin/activate; echo $?; env'], cwd=venv)
    assert done.stdout.startswith('1\n') and 'PATH=/usr/bin:/bin\n' in done.stdout and 'VIRTUAL_ENV' not in done.stdout
    assert 'works only in bash and zsh' in done.stderr


def test_shellcheck(tmp_path, module):
    """The command, and what it writes."""
    venv = make(tmp_path / 'env')
    python_wrote = (venv / 'bin/activate').read_text()
    module.extend(venv, env={'MODULEPATH': '/modules'}, check=True)
    (venv / 'blocks.bash').write_text('#!/bin/bash\n' + (venv / 'bin/activate').read_text().replace(python_wrote, ''))
    # the modules tool's file is not known here, and a file that is sourced may return
    for command in ([SCRIPT], ['-e', 'SC1090,SC2317', venv / 'blocks.bash']):
        done = call([BIN / 'shellcheck', *command])
        assert (done.returncode, done.stdout) == (0, '')


# --- bad input: a message in one line with a remedy, and nothing is changed


@pytest.mark.parametrize('args', [[], [''], ['a', 'b'], ['--force', 'a'], ['--undo']])
def test_wrong_use(module, args):
    assert 'Usage: extend-venv-activate DIR' in module.refuses(*args, status=2)


@pytest.mark.parametrize('env', [
    {'LOADEDMODULES': ''}, {'EBROOTPYTORCH': ''}, {'EBROOTPYTORCH': '/usr'}, {'SLINGTORCH_MODULE_PYTORCH': ''},
])
def test_no_environment_or_no_module(module, venv, env, tmp_path):
    before = tree(venv)
    assert f'the module of this command, in {module.root}, is not loaded' in module.refuses(venv, env=env)
    for directory, words in ((tmp_path / 'gone', f'python -m venv --system-site-packages {tmp_path}/gone'),
                             (tmp_path, 'with a bin/activate'), (module.root, "the module's own environment")):
        assert words in module.refuses(directory)
    assert tree(venv) == before


def test_python_of_another_version(module, venv):
    """The environment's Python says that it is another one; one more on each machine would be needed otherwise."""
    python = venv / 'bin/python'
    python.unlink()
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" python3.5 "{venv}" /nowhere "\'\'" file:///\n')
    python.chmod(0o755)
    before = tree(venv)
    message = module.refuses(venv)
    assert f'has python3.5, which cannot use the packages of PyTorch/0.1-tiny in {module.packages}' in message
    assert tree(venv) == before
    python.write_text('#!/bin/sh\necho broken >&2\nexit 1\n')
    done = module.extend(venv)
    assert done.returncode == 1 and done.stderr.startswith('broken\n') and 'Was its Python removed' in done.stderr
    assert tree(venv)[venv / 'bin/activate'] == before[venv / 'bin/activate']


def test_moved_environment(module, venv):
    """bin/python finds itself, yet the Python of another environment does not belong to this one."""
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
    assert done.returncode == 1 and f'moved; works only in {venv}' in done.stderr


def test_path_that_python_does_not_quote(module, tmp_path):
    """Debian's Python, and newer releases, quote it (CVE-2024-9287): such an environment works."""
    venv = make(tmp_path / 'a`id`b')
    if re.search("VIRTUAL_ENV='.*`", (venv / 'bin/activate').read_text()):
        module.extend(venv, check=True)
    else:
        assert 'does its path have a character that Python does not quote' in module.refuses(venv)


def test_module_that_takes_packages_from_its_python(tmp_path):
    """Such an environment must be made in the same way, on the same Python."""
    other = Module(tmp_path / 'root', options=['--system-site-packages'])
    narrow = make(tmp_path / 'narrow', options=[])
    assert 'made without --system-site-packages' in other.refuses(narrow)
    wide = make(tmp_path / 'wide')
    assert other.extend(wide).returncode == 0
    assert Module(tmp_path / 'narrow-root').extend(narrow).returncode == 0


def test_read_only(other_user):
    """Another user's environment."""
    python = '/usr/bin/python3'
    module = Module(other_user.directory / 'root', python=python)
    venv = make(other_user.directory / 'mine', python=python)
    other_user.open(other_user.directory)
    before = tree(venv)
    done = other_user.run([module.script, venv], env=module.env, check=False)
    assert done.returncode == 1 and f"'{next(venv.glob('lib/python3*/site-packages'))}/zz-slingtorch" in done.stderr
    assert 'Permission denied' in done.stderr and tree(venv) == before
    subprocess.run(['chown', '-R', str(other_user.uid), venv], check=True)
    other_user.run([module.script, venv], env=module.env)


def test_full_disk(module, venv):
    """A file that cannot be written whole takes the place of none."""
    before = (venv / 'bin/activate').read_bytes()
    done = call(['bash', '-c', 'ulimit -f 1; trap "" XFSZ; exec "$@"', 'bash', module.script, venv], module.env)
    assert done.returncode == 1 and 'cannot be written (the reason is above)' in done.stderr
    assert (venv / 'bin/activate').read_bytes() == before
