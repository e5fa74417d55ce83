# SPDX-License-Identifier: GPL-2.0-only
"""The PythonVenv easyblock, through real `eb`, with tiny wheels."""
import contextlib
import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from testbed import ORDINARY, ROOT, forkedeb, quickvenv, run, wheels
from testbed.easybuild import BIN, EasyBuild
from testbed.expected import expected

UV = str(BIN / 'uv')
PYTHON_VERSION = '%d.%d' % sys.version_info[:2]


class Tiny:
    """An easyconfig with its lock file and an index (a directory) to download from."""

    def __init__(self, directory):
        self.dir = directory
        self.index = directory / 'index'
        self.easyconfig = directory / 'PyTorch-0.1-tiny.eb'
        self.lock_file = directory / 'PyTorch-0.1-tiny.lock'
        self.wheels = [wheels.make_wheel(self.index, 'alpha', '1.0', requires=['beta>=1']),
                       wheels.make_wheel(self.index, 'beta', '1.5')]
        self.pip_env = {'PIP_CONFIG_FILE': os.devnull, 'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': str(self.index),
                        'PIP_EXTRA_INDEX_URL': None}
        self.write()

    def have(self, eb):
        """Put the wheels where `eb` downloads them to: it asks pip four times less. Environment for it without an index."""
        shutil.copytree(self.index, eb.prefix / 'sources/p/PyTorch/wheels')
        return {**self.pip_env, 'PIP_FIND_LINKS': None}

    def write(self, lock=None, options=''):
        """Write lock file and easyconfig."""
        self.lock_file.write_text(wheels.lock_text(self.wheels) if lock is None else lock)
        self.easyconfig.write_text(wheels.tiny_easyconfig(self.lock_file, options))


@pytest.fixture
def tiny(tmp_path):
    return Tiny(tmp_path)


def output(done):
    return done.stdout + done.stderr


@pytest.fixture(scope='module')
def kept(lmod, tmp_path_factory):
    """An installation that is only looked at: Tiny, with `eb` that made it."""
    tiny = Tiny(tmp_path_factory.mktemp('kept'))
    tiny.eb = EasyBuild(tiny.dir / 'eb', lmod)
    tiny.write(options="sanity_check_imports = ['alpha', 'beta']\nsanity_check_packages = {'alpha': '1.0'}\n"
                       "gpu_visibility = 'ROCR_VISIBLE_DEVICES'")
    tiny.eb(tiny.easyconfig, env=tiny.have(tiny.eb))
    return tiny


def test_installs_and_module_works(kept, lmod):
    env = lmod.load('PyTorch/0.1-tiny', modulepath=[kept.eb.modulepath])
    root = kept.eb.prefix / 'software/PyTorch/0.1-tiny'
    text = (kept.eb.modulepath / 'PyTorch/0.1-tiny.lua').read_text()
    ours = text.partition('conflict("PyTorch")\n')[2].partition('-- Built with EasyBuild')[0]
    expected(ours, 'modules/venv.lua', [(root, 'ROOT'), (sys.version.split()[0], 'PYTHON')])
    assert env['EBROOTPYTORCH'] == str(root) and os.access(root / 'bin/extend-venv-activate', os.X_OK)
    scripts = {pathlib.Path(directory, name).relative_to(ROOT / 'runscripts')
               for directory, _, names in os.walk(ROOT / 'runscripts', followlinks=True) for name in names}
    scripts = {path for path in scripts if not {'container', 'extend-venv-activate', '__pycache__'} & set(path.parts)}
    # installed.json says what was installed (test_updating.py)
    installed = [path for path in (root / 'runscripts').glob('**/*') if path.is_file() and path.name != 'installed.json']
    assert {path.relative_to(root / 'runscripts') for path in installed} == scripts
    assert all(os.access(path, os.X_OK) for path in installed)
    done = subprocess.run(['python', '-c', 'import alpha, sys; print(alpha.__version__, sys.prefix)'], env=env,
                          text=True, stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == ['1.0', str(root)]
    code = 'import os; print(os.environ["WORLD_SIZE"])'
    done = subprocess.run(['conda-python-distributed', '-c', code], env=env, text=True, stdout=subprocess.PIPE,
                          check=True)
    assert done.stdout.strip() == '1'
    # behind the environment's own commands, of which none is hidden
    assert env['PATH'].split(':')[:2] == [f'{root}/bin', f'{root}/runscripts']
    assert not {path.name for path in (root / 'runscripts').iterdir()}.intersection(os.listdir(root / 'bin'))


def test_unloading_gives_back_what_the_user_had(kept, lmod):
    script = 'module load PyTorch; module unload PyTorch; echo "$VIRTUAL_ENV $PYTHONNOUSERSITE $PATH"'
    done = lmod.bash(script, modulepath=[kept.eb.modulepath], env={'VIRTUAL_ENV': '/mine', 'PYTHONNOUSERSITE': '0'})
    *own, path = done.stdout.split()
    assert own == ['/mine', '0'] and str(kept.eb.prefix) not in path


def test_sanity_check_only(kept):
    assert 'sanity checking' in output(kept.eb('--sanity-check-only', kept.easyconfig, env=kept.pip_env))
    info, = kept.eb.prefix.glob('software/PyTorch/0.1-tiny/lib/python3*/site-packages/beta-1.5.dist-info')
    away = info.rename(kept.dir / 'away')
    try:
        done = kept.eb('--sanity-check-only', kept.easyconfig, env=kept.pip_env, check=False)
    finally:
        away.rename(info)
    assert done.returncode != 0 and 'requires `beta>=1`' in output(done)


def test_fetch_then_install_without_network(tiny, eb_env, tmp_path):
    """From the second source path; the user's pip configuration is used for downloads, and sends nothing elsewhere."""
    tiny.write(lock='--extra-index-url http://127.0.0.1:7/simple\n' + wheels.lock_text(tiny.wheels))
    config = tmp_path / 'pip.conf'
    config.write_text(f'[global]\nno-index = true\nfind-links = {tiny.index}\n[install]\nuser = true\n')
    env = {'PIP_CONFIG_FILE': config, 'PIP_FIND_LINKS': None, 'PYTHONUSERBASE': tmp_path / 'userbase'}
    eb_env('--fetch', tiny.easyconfig, env=env)
    found = sorted(path.name for path in (eb_env.prefix / 'sources/p/PyTorch/wheels').iterdir())
    assert found == sorted(wheel.name for wheel in tiny.wheels)
    assert not (eb_env.prefix / 'software/PyTorch/0.1-tiny/bin').exists()
    # the index is gone, and pip is pointed at an address that does not answer
    shutil.rmtree(tiny.index)
    config.write_text('[global]\nindex-url = http://127.0.0.1:9/simple\n[install]\nuser = true\n')
    done = eb_env(tiny.easyconfig, f"--sourcepath={tmp_path}/mine:{eb_env.env['EASYBUILD_SOURCEPATH']}", '--logtostdout', env=env)
    assert (eb_env.modulepath / 'PyTorch/0.1-tiny.lua').exists()
    # neither address was asked, nor the one in the lock file
    assert not re.search('127.0.0.1:[79]', output(done).replace(tiny.lock_file.read_text(), ''))
    assert not (tmp_path / 'userbase').exists()


def test_dry_run_and_module_only(tiny, eb_env):
    tiny.write(options="environment_image = 'yes'")
    done = eb_env('-x', tiny.easyconfig, env=tiny.pip_env, check=False)
    assert "environment_image is 'yes', but must be True or False" in output(done) and 'Traceback' not in output(done)
    tiny.write()
    dry = output(eb_env('-x', tiny.easyconfig, env=tiny.pip_env))
    wheel_dir = eb_env.prefix / 'sources/p/PyTorch/wheels'
    assert f'\n  * packages named in {tiny.lock_file} will be downloaded with pip to {wheel_dir}\n' in dry
    assert (f'\n  * runscripts will be copied to {eb_env.prefix}/software/PyTorch/0.1-tiny: runscripts/conda-python-simple, '
            'runscripts/conda-python-distributed, runscripts/cpu-bind, runscripts/get-master, ') in dry
    assert not wheel_dir.exists()
    eb_env('--module-only', '--force', tiny.easyconfig, env=tiny.pip_env)
    text = (eb_env.modulepath / 'PyTorch/0.1-tiny.lua').read_text()
    # the site 'local' adds nothing that names a network
    assert 'RUNSCRIPTS' in text and 'FI_CXI' not in text and 'hsn' not in text


def test_other_python_with_its_packages(tiny, eb_env, lmod, tmp_path):
    """An environment that sees the packages of the system would see those in the home directory too: they stay out."""
    tiny.write(options='system_site_packages = True')
    # an amended easyconfig lies elsewhere: its lock file is found on the robot path
    eb_env(tiny.easyconfig, f"--try-amend=python_command={quickvenv.python3('/usr/bin/python3')}/python3",
           f'--robot-paths={tiny.dir}:', env=tiny.have(eb_env))
    root = eb_env.prefix / 'software/PyTorch/0.1-tiny'
    config = (root / 'pyvenv.cfg').read_text()
    assert 'home = /usr/bin' in config
    library, = root.glob('lib/python3*')
    other = tmp_path / f'home/.local/lib/{library.name}/site-packages/stray.py'
    other.parent.mkdir(parents=True)
    other.write_text('')
    env = {**lmod.load('PyTorch/0.1-tiny', modulepath=[eb_env.modulepath]), 'HOME': str(tmp_path / 'home')}
    found = [subprocess.run(['python', '-c', 'import importlib.util as u; print(u.find_spec("stray"))'], env={**env, **more}, text=True,
                            stdout=subprocess.PIPE, check=True).stdout for more in ({}, {'PYTHONNOUSERSITE': ''})]
    assert found[0] == 'None\n' and str(other) in found[1]


def test_shipped_easyconfig_with_another_lock_file_suffix_and_version(tiny, eb_env):
    """The lock file is of the version, not of the suffix; its checksum needs no package."""
    copy = tiny.dir / 'PyTorch-2.13.0-local-cpu.eb'
    shutil.copy(ROOT / 'easyconfigs/p/PyTorch' / copy.name, copy)
    tiny.lock_file.rename(copy.with_suffix('.lock'))
    eb_env('--inject-checksums', '--force', copy)
    assert wheels.sha256(copy.with_suffix('.lock')) in copy.read_text()
    assert not (eb_env.prefix / 'sources/p/PyTorch/wheels').exists()

    robot = f'--robot-paths={tiny.dir}:'
    done = eb_env(copy, '--try-amend=versionsuffix=-mine', robot, '--fetch', env=tiny.have(eb_env))
    assert 'PyTorch/2.13.0-mine' in done.stdout
    done = eb_env(copy, '--try-software-version=2.99', robot, env=tiny.pip_env, check=False)
    assert done.returncode != 0 and "Couldn't find file PyTorch-2.99-local-cpu.lock" in output(done)
    assert 'Another version needs one of its' in output(done) and 'docs/easyconfigs.md' in output(done)


def test_archived_easyconfig_easyblocks_and_hooks(tiny, lmod, tmp_path):
    """What EasyBuild archives beside an installation makes the same module, where the bundle is activated."""
    eb = EasyBuild(tmp_path / 'eb', lmod, options=['--site', 'derecho'])
    env = tiny.have(eb)
    eb('--skip-sanity-check', tiny.easyconfig, env=env)
    module = eb.modulepath / 'PyTorch/0.1-tiny.lua'
    before = module.read_text()
    assert 'FI_MR_CACHE_MONITOR' in before
    reprod = shutil.copytree(eb.prefix / 'software/PyTorch/0.1-tiny/easybuild/reprod', tmp_path / 'reprod')
    hooks = reprod / 'hooks/slingshot_hooks.py'
    # as docs/easyconfigs.md says: the package is not archived
    bundle = eb.env['EASYBUILD_INCLUDE_EASYBLOCKS']
    command = ['--module-only', '--force', f'--hooks={hooks}', f'--include-easyblocks={reprod}/easyblocks/*.py,{bundle}',
               f'--robot-paths={tiny.dir}:', reprod / tiny.easyconfig.name]
    module.unlink()
    eb(*command, env=env)
    assert sorted(module.read_text().splitlines()) == sorted(before.splitlines())


# --- bad input

def test_wheel_changed_after_download_is_refused(tiny, eb_env):
    """By the one who installs, and by `eb --fetch`, which gets it again."""
    env = tiny.have(eb_env)
    good = tiny.wheels[1].read_bytes()
    wheel = eb_env.prefix / 'sources/p/PyTorch/wheels' / tiny.wheels[1].name
    wheels.make_wheel(wheel.parent, 'beta', '1.5', files={'beta.py': 'raise SystemExit("evil")\n'})
    done = eb_env(tiny.easyconfig, env={**env, 'SLINGTORCH_UV': UV}, check=False)
    assert done.returncode == 42 and 'Hash mismatch for `beta==1.5`' in output(done)
    assert "'eb --fetch' downloads it again" in output(done)
    assert not (eb_env.prefix / 'software/PyTorch/0.1-tiny/bin').exists()
    wheel.write_bytes(b'')
    done = eb_env(tiny.easyconfig, env=env, check=False)
    assert done.returncode == 1 and "truncated or damaged: 'eb --fetch' downloads it again" in output(done)
    # with an index at hand the right file is fetched again
    done = eb_env('--fetch', tiny.easyconfig, env=tiny.pip_env)
    assert f'WARNING: Previously-downloaded file {wheel} has bad hash' in output(done) and wheel.read_bytes() == good


def test_incomplete_lock_file(tiny, eb_env, steps):
    """In the words of pip, which downloads, and of uv, which installs."""
    alpha, beta = (wheels.lock_text([wheel]) for wheel in tiny.wheels)
    for lock, words in [(alpha, 'The lock file is incomplete: '),
                        (alpha + beta + 'gamma==1.0 --hash=sha256:' + '0' * 64 + '\n', 'No matching distribution found for gamma==1.0')]:
        tiny.write(lock=lock)
        assert words in steps(eb_env, tiny.easyconfig, env=tiny.pip_env, last='fetch')['error']
    tiny.write(lock=alpha)
    shutil.rmtree(eb_env.prefix / 'sources')
    done = eb_env(tiny.easyconfig, env={**tiny.have(eb_env), 'SLINGTORCH_UV': UV}, check=False)
    assert done.returncode != 0 and 'no trusted hash was provided for: `beta`' in output(done)
    assert 'The output of uv is' in output(done) and 'The lock file is incomplete' in output(done)


OLD_PYTHON = """#!/bin/sh
case $* in *'% sys.version_info[:2]'*) echo 3.7; exit ;; esac
exec {python} "$@"
"""


def test_uv_installs_where_it_is_at_hand_else_pip(tiny, eb_env):
    """Without the user's settings of uv; no file is shared with a cache; each wheel is hashed once; pip works after it.

    Tests of packages are not compiled.
    """
    files = {f'gamma/{name}.py': '' for name in ('__init__', 'tests/a', 'test/a', 'testing/a', 'testing/_internal/a')}
    tiny.wheels.append(wheels.make_wheel(tiny.index, 'gamma', '1.0', files=files))
    env = {**tiny.have(eb_env), 'UV_CACHE_DIR': eb_env.prefix / 'cache', 'UV_LINK_MODE': 'symlink', 'UV_COMPILE_BYTECODE': '1',
           'UV_INDEX_URL': 'http://127.0.0.1:9/simple'}
    old = eb_env.prefix / 'old/python3'
    old.parent.mkdir()
    old.write_text(OLD_PYTHON.format(python=f'{quickvenv.python3()}/python3'))
    old.chmod(0o755)
    root = eb_env.prefix / 'software/PyTorch/0.1-tiny'
    for options, program in [('', 'uv'), (f'python_command = {str(old)!r}', 'pip')]:
        tiny.write(options=options)
        printed = output(eb_env(tiny.easyconfig, '--force', '--logtostdout', env={**env, 'SLINGTORCH_UV': UV}))
        library, = root.glob('lib/python3*/site-packages')
        assert (library / 'alpha-1.0.dist-info/INSTALLER').read_text().strip() == program
        # what verifies the hashes of all files runs once
        assert printed.count('--require-hashes --only-binary') == 2 and ' download --require-hashes' not in printed
        assert (library / 'alpha.py').stat().st_nlink == 1 and not (library / 'alpha.py').is_symlink()
        assert list(library.glob('__pycache__/alpha.*.pyc')) and not list(root.glob('.uv*'))
        assert {path.parents[1].name for path in library.glob('gamma/**/*.pyc')} == {'gamma', 'testing'}
        assert not (eb_env.prefix / 'cache').exists()
        listed = subprocess.run([root / 'bin/python', '-m', 'pip', 'list', '--format=freeze'], text=True,
                                stdout=subprocess.PIPE, check=True).stdout
        assert {'alpha==1.0', 'beta==1.5'} < set(listed.split())


@pytest.mark.parametrize('what', ['wheel', 'directory'])
def test_what_may_not_be_read_is_named(tiny, eb_env, tmp_path, what):
    tiny.have(eb_env)
    own, central = eb_env.prefix / 'sources/p/PyTorch/wheels', tmp_path / 'central/p/PyTorch/wheels'
    shutil.copytree(own, central)
    path = {'wheel': own / tiny.wheels[1].name, 'directory': central}[what]
    env = tiny.pip_env
    if what == 'directory':
        # the packages are there alone
        shutil.rmtree(own)
        env = dict(env, PIP_FIND_LINKS=None)
    path.chmod(0)
    try:
        done = run([*ORDINARY, BIN / 'eb', '--fetch', tiny.easyconfig,
                    f"--sourcepath={eb_env.env['EASYBUILD_SOURCEPATH']}:{tmp_path}/central"], check=False, timeout=600,
                   env={key: str(value) for key, value in {**eb_env.env, **env}.items() if value is not None})
    finally:
        path.chmod(0o755)
    said = ' '.join(done.stderr.split())
    assert done.returncode != 0 and str(path) in said.partition('The output of ')[2]
    assert 'Permission denied' in said and 'ask its owner for access' in said and 'Traceback' not in said
    assert 'No matching distribution' not in said


def test_what_is_missing_or_does_not_fit(tiny, eb_env, steps):
    def wrong(options='', sourcepath=eb_env.env['EASYBUILD_SOURCEPATH']):
        tiny.write(options=options)
        return steps(eb_env, tiny.easyconfig, f'--sourcepath={sourcepath}', env=tiny.pip_env, last='fetch')['error']

    assert wrong('sources = checksums = []') == (
        'The easyconfig names no lock file, but PythonVenv needs one (eb can make it): add sources = '
        "['%(name)s-%(version)s%(versionsuffix)s.lock']")
    assert f'is for Python 2.7, 3.99, but this is Python {PYTHON_VERSION}' in wrong("python_versions = ['2.7', '3.99']")
    assert wrong("python_command = '/nowhere/python3'\npython_versions = ['3.11', '3.12']") == (
        "Python was not found: there is no '/nowhere/python3'. Install Python 3.11 or 3.12, load a module that provides it, or "
        'name another with --try-amend=python_command=/path/to/python3')
    assert "Runscript 'conda-python-simple' was not found" in wrong(sourcepath=f'{eb_env.prefix}/sources')


@contextlib.contextmanager
def small_disk(path, size):
    """A file system of a few megabytes."""
    path.mkdir(parents=True)
    subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(['umount', '--lazy', str(path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason='mounting a small file system needs root')
def test_full_disk_leaves_nothing_behind(tiny, eb_env, tmp_path):
    """With pip; with uv: test_failed_rebuild_leaves_what_worked."""
    tiny.wheels.append(wheels.make_wheel(tiny.index, 'big', '1.0', files={'big.bin': bytes(40_000_000)}))
    tiny.write()
    with small_disk(tmp_path / 'small', '30m') as disk:
        done = eb_env(tiny.easyconfig, f'--installpath={disk}', env={**tiny.have(eb_env), 'SLINGTORCH_UV': ''},
                      check=False)
        assert done.returncode != 0
        assert f'Installing the packages of {tiny.lock_file} failed (to {disk}/software' in output(done)
        assert 'No space left on device' in output(done) and 'Free some space' in output(done)
        assert not (disk / 'software/PyTorch/0.1-tiny/bin').exists()
        assert not list(disk.glob('modules/all/PyTorch/*'))
        assert not list(disk.glob('software/PyTorch/0.1-tiny/*')), 'the space is free again'


def start_installation(tiny, eb_env, *options, root=None):
    """Start `eb` and return when it is in the middle of the install step."""
    env = {key: str(value) for key, value in {**eb_env.env, **tiny.pip_env}.items() if value is not None}
    many = (root or eb_env.prefix / 'software/PyTorch/0.1-tiny') / f'lib/python{PYTHON_VERSION}/site-packages/many'
    shutil.rmtree(many, ignore_errors=True)     # of the one that was killed
    (eb_env.prefix / 'output').unlink(missing_ok=True)
    process = forkedeb.Started([tiny.easyconfig, *options], env, eb_env.prefix, eb_env.prefix / 'output')
    deadline = time.monotonic() + 600
    while not many.exists():
        assert process.poll() is None, process.end()
        assert time.monotonic() < deadline, 'eb did not get to the install step'
        time.sleep(0.01)
    return process


def unlock(prefix):
    """Remove the lock that a killed eb has left, as the message about it says."""
    lock, = prefix.glob('software/.locks/*')
    lock.rmdir()


def test_ended_in_the_middle_and_two_at_once(tiny, eb_env):
    """Ctrl-C, what a batch system or `kill` sends, and what nobody can clean up after: each time the same `eb` again."""
    many = {f'many/m{number}.py': f'x = {number}\n' for number in range(1000)}
    tiny.wheels.append(wheels.make_wheel(tiny.index, 'many', '1.0', files=many))
    tiny.write()
    tiny.have(eb_env)
    for send, number in [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM), (os.killpg, signal.SIGKILL)]:
        process = start_installation(tiny, eb_env)
        send(process.pid, number)
        text = process.end()
        assert process.returncode != 0 and 'Traceback' not in text
        assert (eb_env.prefix / 'software/PyTorch/0.1-tiny').exists() == (number == signal.SIGKILL)
        assert not list(eb_env.modulepath.glob('PyTorch/*'))
        assert 'rmdir' not in text    # of the one before
    held = eb_env(tiny.easyconfig, env=tiny.pip_env, check=False)
    lock, = eb_env.prefix.glob('software/.locks/*')
    assert held.returncode != 0 and f"left its lock. If no such eb is running, on this host or another one: rmdir '{lock}'." \
        in ' '.join(output(held).split())
    unlock(eb_env.prefix)
    process = start_installation(tiny, eb_env)
    second = eb_env(tiny.easyconfig, env=tiny.pip_env, check=False)
    text = process.end()
    assert process.returncode == 0, text
    assert second.returncode != 0 and '--wait-on-lock-limit' in output(second)
    many = eb_env.prefix.glob('software/PyTorch/0.1-tiny/lib/python3*/site-packages/many/m*.py')
    assert (eb_env.modulepath / 'PyTorch/0.1-tiny.lua').exists() and len(list(many)) == 1000


@pytest.mark.skipif(os.geteuid() != 0, reason='mounting a small file system needs root')
def test_failed_rebuild_leaves_what_worked(tiny, eb_env, lmod, tmp_path):
    """In whatever step, also where nobody could clean up: the next run puts it back before anything else."""
    with small_disk(tmp_path / 'small', '40m') as disk:
        env = {**tiny.have(eb_env), 'SLINGTORCH_UV': UV}
        eb = functools.partial(eb_env, tiny.easyconfig, f'--installpath={disk}')
        eb(env=env)
        software, modules = disk / 'software/PyTorch', disk / 'modules/all/PyTorch'
        alpha, = software.glob('0.1-tiny/lib/python3*/site-packages/alpha.py')
        before = alpha.stat().st_ino, (modules / '0.1-tiny.lua').read_text()

        def works():
            """What was installed is there, alone, and its module loads it."""
            assert os.listdir(software) == ['0.1-tiny'] and os.listdir(modules) == ['0.1-tiny.lua']
            assert (alpha.stat().st_ino, (modules / '0.1-tiny.lua').read_text()) == before
            loaded = lmod.load('PyTorch/0.1-tiny', modulepath=[disk / 'modules/all'])
            subprocess.run(['python', '-c', 'import alpha; alpha.__version__'], env=loaded, check=True)

        good = tiny.wheels[:]
        big = {'big.bin': os.urandom(50_000_000)}
        tiny.wheels.append(wheels.make_wheel(eb_env.prefix / 'sources/p/PyTorch/wheels', 'big', '1.0', files=big))
        wrong_hash = wheels.lock_text(good).replace(wheels.sha256(good[1]), '0' * 64)
        for lock, options, words in [
                (None, 'environment_image = True\nsystem_site_packages = True', 'exclude each other'),   # configure step
                (wrong_hash, '', 'Hash mismatch'),
                (None, '', 'No space left on device'),
                (wheels.lock_text(good) + '# another\n', "sanity_check_packages = {'alpha': '2.0'}", 'alpha is 1.0, not 2.0')]:
            tiny.write(lock=lock, options=options)
            done = eb('--rebuild', env=env, check=False)
            assert done.returncode != 0 and words in output(done), output(done)
            works()

        many = {f'many/m{number}.py': f'x = {number}\n' for number in range(1000)}
        tiny.wheels[2:] = [wheels.make_wheel(eb_env.prefix / 'sources/p/PyTorch/wheels', 'many', '1.0', files=many)]
        tiny.write()
        process = start_installation(tiny, eb_env, '--rebuild', f'--installpath={disk}', root=software / '0.1-tiny')
        os.killpg(process.pid, signal.SIGKILL)
        process.end()
        unlock(disk)
        # a job is told, instead of running with half of it
        assert not (modules / '0.1-tiny.lua').exists()
        done = eb('--sanity-check-only', env=env)
        assert f'the previous installation in {software}/0.1-tiny is restored' in ' '.join(done.stdout.split()), output(done)
        works()
        eb('--rebuild', env=env)
        assert os.listdir(software) == ['0.1-tiny'] and os.listdir(modules) == ['0.1-tiny.lua']
        assert alpha.stat().st_ino != before[0] and (alpha.parent / 'many').exists()
