# SPDX-License-Identifier: GPL-2.0-only
"""./quickstart as somebody who has just cloned the repository runs it."""
import os
import pathlib
import re
import shutil
import sys
import tempfile
import types

import pytest

from slingtorch import quickstart
from testbed import DIR, ROOT, clean_environ, copy_of_checkout, run, wheels

pytestmark = pytest.mark.real

NOT_ROOT = ['setpriv', '--reuid=65534', '--regid=65534', '--clear-groups']


def environment(home):
    """That of somebody who has nothing of ours yet: no virtual environment on the path."""
    env = clean_environ()
    env['HOME'] = str(home)
    # pip asks a rustc in the path for its version, and rustup's rustc then makes ~/.rustup
    path = [part for part in env['PATH'].split(':')
            if not os.path.exists(f'{part}/slingtorch') and not os.path.exists(f'{part}/rustup')]
    env['PATH'] = ':'.join(path)
    # pip's own configuration lies in the home directory on some machines
    for candidate in (pathlib.Path.home() / '.config/pip/pip.conf', pathlib.Path.home() / '.pip/pip.conf'):
        if candidate.exists():
            env.setdefault('PIP_CONFIG_FILE', str(candidate))
    return env


def files_below(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob('*'))


@pytest.fixture(scope='module')
def first(tmp_path_factory):
    """A run from a shell in which another installation is active, whose configuration has no say."""
    here = types.SimpleNamespace(dir=tmp_path_factory.mktemp('first'))
    here.home, here.prefix, here.other = here.dir / 'home', here.dir / 'prefix', here.dir / 'other'
    here.home.mkdir()
    here.checkout = copy_of_checkout(here.dir / 'my checkout')
    here.env = {**environment(here.home), 'EASYBUILD_PREFIX': str(here.other), 'EASYBUILD_HOOKS': '/foreign/hooks.py',
                'EASYBUILD_INSTALLPATH_SOFTWARE': str(here.other / 'software'), 'SLINGTORCH_SITE': 'lumi',
                'PIP_TARGET': str(here.other / 'target'), 'PYTHONPATH': '/nonexistent', 'SLURM_JOB_ID': '1', 'RANK': '3',
                'CDPATH': str(here.dir)}
    here.before = files_below(here.checkout)
    # what the test bed has downloaded; that `eb` does so itself is in the other tests' installation
    os.close(quickstart.claim(str(here.prefix))[1])
    downloaded = here.prefix / 'easybuild/sources/p/PyTorch/wheels'
    downloaded.mkdir(parents=True)
    for wheel in (DIR / 'sources/p/PyTorch/wheels').glob('*.whl'):
        (downloaded / wheel.name).symlink_to(wheel)
    here.done = run([here.checkout / 'quickstart', '--prefix', here.prefix], env=here.env, timeout=900, cwd=here.dir)
    return here


def test_from_clone_to_training_and_again(first):
    done, checkout, tmp_path, prefix = first.done, first.checkout, first.dir, first.prefix
    text = done.stdout
    accuracy = float(re.search(r'accuracy (0\.\d+) on 360 test images, 2 ranks', text).group(1))
    assert accuracy > 0.95
    assert re.search(r'rank  node .*\n +0  .*\n +1  ', text)
    assert len(re.findall(r'^ +\d+\.\d s  \S', text, re.M)) == 3, text
    for said in ('$EASYBUILD_HOOKS', '$EASYBUILD_INSTALLPATH_SOFTWARE', '$EASYBUILD_PREFIX', '$SLINGTORCH_SITE'):
        assert said in text
    if os.geteuid() == 0:
        assert 'EasyBuild normally refuses to run as root' in text
    # a newcomer cannot judge warnings; EasyBuild's own about root is explained
    warnings = [line for line in (text + done.stderr).splitlines() if re.search(r'warning', line, re.I)]
    assert [line for line in warnings if 'Using EasyBuild as root' not in line] == []

    assert files_below(checkout) == first.before, 'wrote to the checkout'
    assert files_below(first.home) == [], 'wrote to the home directory'
    assert set(os.listdir(tmp_path)) == {'home', 'my checkout', 'prefix'}, 'wrote where the shell was, or pointed'
    # eb and the training have compiled what they import, and nothing else
    compiled = {path.parents[1].name for path in prefix.glob('easybuild/software/PyTorch/*/lib/python3*/site-packages/'
                                                             '*/__pycache__/__init__.*.pyc')}
    assert {'torch', 'sklearn'} <= compiled and 'pip' not in compiled

    # the three commands to do it again by hand, as printed: the last one is what has been run
    *commands, train = re.search(r'by hand:\n\n((?:  .*\n)+)', text).group(1).splitlines()
    assert len(commands) == 2 and f'\n{train.strip()}\n' in text.partition('==> Training')[2].partition('==> Done')[0]
    # eb goes on working after the module is loaded, whose Python has no EasyBuild
    by_hand = run(['bash', '--noprofile', '--norc', '-ec', '\n'.join([*commands, 'type mpiexec conda-python-distributed',
                  'eb --version'])], env=environment(first.home), cwd=tmp_path)
    assert f'{prefix}/venv/bin/mpiexec' in by_hand.stdout and 'EasyBuild 5.4' in by_hand.stdout

    # again: nothing is installed. What is broken is made again: test_program.py
    again = run([checkout / 'quickstart', '--prefix', prefix, '--ranks', '1'], env=first.env, timeout=900,
                cwd=tmp_path).stdout
    assert 'PyTorch/2.13.0-local-cpu is already installed' in again
    assert 'installing with uv' not in again
    assert '==> Training on 1 rank\n' in again and 'on 360 test images, 1 ranks' in again


TRAIN = """
import os, torch
rank, ranks = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
if rank == 0:
    print('trained with', torch.__version__, torch.version.cuda)
"""


def test_machine_with_gpus(first, lmod):
    """Driver 550 and three GPUs, of files; wheels with CUDA 12.8 and the training are stand-ins. All else is real."""
    example, root = first.checkout / 'examples/training/ddp_training.py', first.dir / 'root'
    # where an earlier run has downloaded them to: an index would give the real ones
    shutil.rmtree(first.prefix / 'easybuild/sources')
    wheels.stand_in(first.checkout / 'easyconfigs/p/PyTorch/PyTorch-2.10.0-cuda-12.8.eb',
                    first.prefix / 'easybuild/sources/p/PyTorch/wheels', gpus=3)
    for name, text in (('proc/driver/nvidia/version', 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Wed\n'),
                       ('dev/nvidiactl', '')):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    script = 'import sys; from slingtorch import quickstart; sys.exit(quickstart.main(sys.argv[2:], root=sys.argv[1]))'
    real = example.read_text()
    example.write_text(TRAIN)
    try:
        text = run([first.prefix / 'venv/bin/python', '-c', script, root, '--prefix', first.prefix, '--modules',
                    f'Lmod {lmod.init.split()[1]} Lua'], env=environment(first.home), timeout=600, cwd=first.checkout).stdout
    finally:
        example.write_text(real)
    assert 'PyTorch:      PyTorch-2.10.0-cuda-12.8.eb (driver 550.90.07)' in text and 'installing with uv' not in text
    assert '==> Training on 3 ranks\n' in text and 'trained with 2.10.0+cu128 12.8' in text
    assert '  module load PyTorch/2.10.0-cuda-12.8\n  mpiexec -n 3 conda-python-distributed' in text


@pytest.mark.parametrize('command', [
    [ROOT / 'quickstart', '--help'],
    # Debian's python3 without python3-venv
    [sys.executable, '-c', "import sys; sys.modules['ensurepip'] = None; from slingtorch import quickstart; "
     "quickstart.main(['--help'])"]])
def test_help_says_all_options(command):
    done = run(command, cwd=ROOT)
    for option in ('--cpu', '--prefix', '--ranks', '--python', '--help'):
        assert option in done.stdout


@pytest.mark.parametrize('args, words', [
    (['--ranks', '0'], ['invalid choice: 0']),
    (['--ranks', 'many'], ["invalid int value: 'many'"]),
    (['--prefix'], ['expected one argument']),
    (['--prefix', '/tmp/with space'], ['cannot be a prefix', "' '"]),
    (['--nonsense'], ['unrecognized arguments: --nonsense']),
])
def test_bad_arguments(args, words):
    done = run([ROOT / 'quickstart', *args], env=clean_environ(), check=False)
    assert done.returncode in (1, 2) and done.stdout == ''
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize('how', [['bash', 'quickstart'], ['sh', 'quickstart'], ['./a link'],
                                 ['bash', '-c', '. ./quickstart "$@"', 'bash']])
def test_however_it_is_started(tmp_path, how):
    """The checkout is the one that the file lies in: through a link, from another directory, with CDPATH."""
    checkout = tmp_path / 'checkout'
    (checkout / 'slingtorch').mkdir(parents=True)
    for name in ('quickstart', '__main__.py', 'slingtorch/__init__.py'):
        shutil.copy2(ROOT / name, checkout / name)
    (checkout / 'slingtorch/quickstart.py').write_text('import sys\ndef main(): print(__file__, sys.argv[1:])\n')
    (tmp_path / 'CD/quickstart').mkdir(parents=True)
    cwd = checkout
    if how[0] == './a link':
        cwd = tmp_path
        (tmp_path / 'a link').symlink_to('checkout/quickstart')
    env = {**clean_environ(), 'CDPATH': str(tmp_path / 'CD'), 'PYTHONHOME': '/nonexistent'}
    done = run([*how, 'one', 'two words'], cwd=cwd, env=env)
    assert re.fullmatch(r"%s/slingtorch/quickstart.py \['--modules', 'Lmod .*/init/bash Lua', 'one', 'two words'\]\n"
                        % re.escape(str(checkout)), done.stdout)


@pytest.fixture
def bare(tmp_path):
    """A checkout of quickstart alone, run by an ordinary user with what its start needs in the PATH, and no modules."""
    (tmp_path / 'bin').mkdir()
    for name in ('readlink', 'dirname', 'id', 'bash', 'env', 'sh', 'tail', 'sed', 'echo'):
        (tmp_path / 'bin' / name).symlink_to(shutil.which(name))
    script = re.sub('/usr/(bin/python3|share/lmod|share/modules|share/Modules)', '/nonexistent',
                    (ROOT / 'quickstart').read_text())
    (tmp_path / 'quickstart').write_text(script)

    def start(*words, **commands):
        for name, text in commands.items():
            path = tmp_path / 'bin' / name.replace('_', '-')
            path.unlink(missing_ok=True)
            path.write_text(f'#!/bin/sh\n{text}\n')
            path.chmod(0o755)
        done = run(['bash', tmp_path / 'quickstart', *words], env={'PATH': str(tmp_path / 'bin')}, check=False)
        assert done.returncode == 1
        return done.stderr
    return start


def test_nothing_there_and_no_right_to_install_it(bare):
    assert ("sudo sh -c 'apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv lmod'"
            in bare(id='echo 1000', apt_get='exit 1'))


def test_nothing_there_and_it_cannot_be_installed(bare):
    assert "install them, under this distribution's names" in bare(id='echo 0')
    said = bare(id='echo 0', apt_get='echo "E: no $1 today"; [ "$1" = update ]')
    assert 'E: no update today\nE: no install today' in said and 'failed; see its output above' in said
    # it was installed, and is not found
    assert 'still missing after the installation: python3 python3-venv lmod' in bare(apt_get='true')


def test_python_that_pytorch_is_not_for(bare):
    """Also for one that is named, whatever its wrapper prints; nothing is installed then."""
    old = 'echo "Welcome {"; echo 3.9'
    assert 'needs Python 3.11 to 3.14, and python3 is 3.9' in bare(python3=old)
    assert 'needs Python 3.11 to 3.14, and python3 is 3.9\n' in bare('--python=python3', python3_12='echo 3.12')
    assert 'and true does not start as Python' in bare('--python', 'true')
    # Debian keeps venv in a package
    said = bare(python3='case $3 in *version_info*) echo 3.12 ;; *) exit 1; esac', id='echo 1000', apt_get='')
    assert '--no-install-recommends python3.12-venv lmod' in said


@pytest.fixture
def for_everybody():
    """A copy of this checkout that every user can read."""
    with tempfile.TemporaryDirectory(dir='/tmp') as directory:
        os.chmod(directory, 0o755)
        yield copy_of_checkout(pathlib.Path(directory) / 'checkout')


@pytest.mark.skipif(os.geteuid() != 0, reason='hiding the modules tool of this machine needs root')
def test_no_modules_tool_and_no_right_to_install_it(for_everybody):
    prefix = for_everybody.parent / 'prefix'
    prefix.mkdir()
    os.chown(prefix, 65534, 65534)
    hide = ['unshare', '--mount', 'sh', '-c', 'mount -t tmpfs none /usr/share/lmod && cd / && exec "$@"', 'sh']
    env = {**clean_environ(), 'PATH': '/usr/sbin:/usr/bin:/sbin:/bin', 'HOME': '/nonexistent'}
    done = run([*hide, *NOT_ROOT, for_everybody / 'quickstart', '--prefix', prefix], check=False, env=env)
    assert done.returncode == 1
    assert 'packages of the distribution are missing: lmod' in done.stderr
    assert re.search(r'sudo sh -c .apt-get update && apt-get install .*lmod', done.stderr)
