# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch/quickstart.py part by part: what it owns, what it believes, what it says. No network."""
import builtins
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from slingtorch import quickstart
from testbed import ROOT, clean_environ, quickvenv
from testbed.wheels import make_wheel

PYTHON = quickstart.describe_python(sys.executable)
MODULE = 'PyTorch/2.13.0-local-cpu'


def tree(directory):
    """Everything below a directory, with the content of files."""
    return {str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
            for path in directory.rglob('*') if not path.is_symlink()}


@pytest.fixture
def prefix(tmp_path):
    """A prefix that was claimed."""
    made = quickstart.Prefix(str(tmp_path / 'prefix'))
    made.claim()
    return made


# --- what it owns

def test_new_and_empty_directories_are_claimed(tmp_path):
    (tmp_path / 'empty').mkdir()
    for name in ('empty', 'new/deep'):
        made = quickstart.Prefix(str(tmp_path / name))
        assert not (tmp_path / 'new').exists() or name != 'new/deep', 'looking must not write'
        made.claim()
        assert json.loads((tmp_path / name / quickstart.MARK).read_text())['prefix'] == str(tmp_path / name)
        os.close(made.lock)
        quickstart.Prefix(str(tmp_path / name)).claim()


def test_directory_of_the_user_is_refused_untouched(tmp_path):
    """An environment without pip, as uv makes them, was deleted together with the user's files in it."""
    target = tmp_path / 'project'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', target / 'venv'], check=True)
    (target / 'venv/thesis.txt').write_text('years of work')
    (target / 'activate').write_text('my own')
    before = tree(target)
    done = subprocess.run([ROOT / 'quickstart', '--prefix', target], env=clean_environ(), text=True,
                          capture_output=True)
    assert done.returncode == 1 and tree(target) == before
    assert 'was not made by quickstart, and it is not empty: it has activate, venv' in done.stderr


def test_home_is_refused(tmp_path, monkeypatch):
    for home in (tmp_path, tmp_path / 'not-there-yet'):
        monkeypatch.setenv('HOME', str(home))
        with pytest.raises(quickstart.QuickstartError, match='is your home directory'):
            quickstart.Prefix(str(home))
    assert list(tmp_path.iterdir()) == []


def test_users_own_file_in_the_way(prefix):
    (pathlib.Path(prefix.path) / 'venv').mkdir()
    with pytest.raises(quickstart.QuickstartError, match='/venv was not made by quickstart, and is in its way'):
        quickstart.Prefix(prefix.path)


@pytest.mark.parametrize('content', ['', '{"entries": 1}', '[]', '{"made by": ', '[' * 100000], ids=lambda text: '%d characters' % len(text))
def test_mark_that_is_broken(prefix, content):
    pathlib.Path(prefix.file(quickstart.MARK)).write_text(content)
    with pytest.raises(quickstart.QuickstartError, match='the mark of an earlier run.*empty, damaged, or not of quick'):
        quickstart.Prefix(prefix.path)


def test_mark_of_another_user(prefix, monkeypatch):
    monkeypatch.setattr(os, 'geteuid', lambda: os.getuid() + 1)
    with pytest.raises(quickstart.QuickstartError, match='made by another user'):
        quickstart.Prefix(prefix.path)


def test_interrupted_while_the_mark_was_written(tmp_path):
    (tmp_path / (quickstart.MARK + '.new')).write_text('{')
    quickstart.Prefix(str(tmp_path)).claim()
    assert json.loads((tmp_path / quickstart.MARK).read_text())['entries']


def test_remove_removes_only_what_it_made(prefix, capsys):
    prefix.make('easybuild')
    mine = pathlib.Path(prefix.path, 'mine')
    mine.write_text('stays')
    prefix.remove()
    # the mark stays, so that the directory can be used again
    assert sorted(os.listdir(prefix.path)) == [quickstart.MARK, 'mine']
    assert 'left there:\n  mine\n' in capsys.readouterr().out
    quickstart.Prefix(prefix.path)
    mine.unlink()
    again = quickstart.Prefix(prefix.path)
    again.claim()
    again.remove()
    assert not os.path.exists(prefix.path)


def write(prefix, *names):
    """Files in a prefix."""
    for name in names:
        path = pathlib.Path(prefix.file(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


MADE = ('venv/bin/pip', 'venv/lib/pip.py', 'easybuild/software/PyTorch/1/bin/python',
        'easybuild/modules/all/PyTorch/1.lua')
MINE = ('easybuild/modules/all/MyOwn/1.lua', 'easybuild/software/MyOwn/1/bin/own',
        'easybuild/software/PyTorch/1/mine.py', 'venv/lib/__pycache__/mine.pyc', 'venv/mine.py')
SHOWN = {'easybuild/modules/all/MyOwn', 'easybuild/software/MyOwn', 'easybuild/software/PyTorch/1/mine.py',
         'venv/lib/__pycache__/mine.pyc', 'venv/mine.py'}


@pytest.fixture
def used(prefix):
    """A prefix as a run leaves it, and what its user has put there since."""
    began = os.fstat(prefix.lock).st_ctime_ns
    for name in ('venv', 'easybuild'):
        prefix.register(name)
    prefix.write('easybuild.cfg', '[config]\n')
    write(prefix, *MADE)
    os.symlink('lib', prefix.file('venv/lib64'))
    prefix.record(began)
    write(prefix, *MINE, 'venv/lib/__pycache__/pip.cpython-311.pyc')
    os.close(prefix.lock)
    prefix = quickstart.Prefix(prefix.path)
    prefix.claim()
    return prefix


def shown(text):
    return {line.strip() for line in text.splitlines() if line.startswith('  ')}


def test_remove_keeps_and_names_what_the_user_made(used, capsys):
    """Software that he installed with eb, a file in the environment: they were deleted unnamed."""
    used.remove()
    said = capsys.readouterr().out
    assert shown(said) == SHOWN and f'--remove --all --prefix {used.path}\n' in said
    files = [name for name, content in tree(pathlib.Path(used.path)).items() if content is not None]
    assert sorted(files) == sorted([*MINE, quickstart.MARK])
    # the directory can be used again; what is in the way is set aside
    assert sorted(quickstart.Prefix(used.path).mark['entries']) == ['easybuild', 'venv']


def test_remove_after_a_second_run(used):
    """What the user made between two runs is not quickstart's."""
    mine = began = os.stat(used.file('venv/mine.py')).st_ctime_ns
    while began == mine:    # the clock of files has steps of milliseconds
        write(used, 'venv/lib/new.py')
        began = os.stat(used.file('venv/lib/new.py')).st_ctime_ns
    used.record(began)
    used.remove()
    assert not os.path.exists(used.file('venv/lib/new.py')) and os.path.exists(used.file('venv/mine.py'))


def test_remove_without_a_record(used, capsys):
    """A prefix of an earlier version: nobody can say what is whose."""
    os.unlink(used.file(quickstart.RECORD))
    used.remove()
    assert all(os.path.exists(used.file(name)) for name in MADE + MINE)
    assert {'easybuild/software', 'venv/bin', 'venv/lib'} <= shown(capsys.readouterr().out)


def test_remove_keeps_a_file_that_was_changed(used, capsys):
    pathlib.Path(used.file('easybuild.cfg')).write_text('[config]\nmine = 1\n')
    used.remove()
    assert os.path.exists(used.file('easybuild.cfg')) and 'easybuild.cfg' in shown(capsys.readouterr().out)


def test_remove_all_asks(used):
    """Without a terminal it says what to do; on one it names what is the user's, and only y removes."""
    os.close(used.lock)
    command = [str(ROOT / 'quickstart'), '--remove', '--all', '--prefix', used.path]
    done = subprocess.run(command, env=clean_environ(), text=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and 'there is no terminal' in done.stderr
    assert f'rm -r {used.path}' in done.stderr and shown(done.stdout) == SHOWN
    for answer, status in (('\n', 1), ('y\n', 0)):
        assert os.path.exists(used.file('venv/mine.py'))
        done = subprocess.run(['script', '-qec', ' '.join(command), '/dev/null'], env=clean_environ(), text=True,
                              input=answer, stdout=subprocess.PIPE)
        assert done.returncode == status and 'venv/mine.py' in done.stdout and '[y/N]' in done.stdout
    assert not os.path.exists(used.path)
    done = subprocess.run([command[0], '--all'], env=clean_environ(), text=True, capture_output=True)
    assert done.returncode == 2 and '--all is for --remove' in done.stderr


def test_remove_leaves_what_is_mounted(prefix, monkeypatch):
    prefix.make('easybuild')
    mounted = pathlib.Path(prefix.file('easybuild', 'sources'))
    mounted.mkdir()
    (mounted / 'mine').write_text('stays')
    mounts = pathlib.Path(prefix.path, 'mounts')
    mounts.write_text(f'/dev/root {mounted} ext4 rw,noatime 0 0\n')
    monkeypatch.setattr(builtins, 'open', lambda path, *args, real=open, **kwargs: real(
        mounts if path == '/proc/self/mounts' else path, *args, **kwargs))
    with pytest.raises(quickstart.QuickstartError, match=f'a file system is mounted at {mounted}'):
        prefix.remove()
    assert (mounted / 'mine').exists() and os.path.exists(prefix.file(quickstart.MARK))


def test_what_was_set_aside_is_not_in_the_way_after_remove(prefix):
    prefix.make('venv')
    prefix.set_aside('venv', 'another Python')
    prefix.remove()
    assert sorted(os.listdir(prefix.path)) == [quickstart.MARK, 'venv.old-1']
    quickstart.Prefix(prefix.path)


def test_named_pipe_in_place_of_a_file(prefix):
    os.unlink(prefix.file(quickstart.MARK))
    os.mkfifo(prefix.file(quickstart.MARK))
    with pytest.raises(quickstart.QuickstartError, match='the mark of an earlier run.*this is no file'):
        quickstart.Prefix(prefix.path)


def test_machine_that_cannot_reach_itself(monkeypatch):
    quickstart.check_loopback()

    def fail(*args):
        raise OSError('Network is unreachable')
    monkeypatch.setattr('socket.create_connection', fail)
    with pytest.raises(quickstart.QuickstartError, match='cannot reach itself at 127.0.0.1: Network is unreachable'):
        quickstart.check_loopback()


def test_two_at_once(prefix):
    with pytest.raises(quickstart.QuickstartError, match='another quickstart is running with the prefix') as err:
        quickstart.Prefix(prefix.path).claim()
    assert 'started as process %d;' % os.getpid() in err.value.args[2]


def test_wrong_python_leaves_no_directory(tmp_path, capsys):
    assert quickstart.main(['--prefix', str(tmp_path / 'p'), '--python', '']) == 1
    assert "--python '': there is no such command" in capsys.readouterr().err and not (tmp_path / 'p').exists()


def test_what_it_started_keeps_the_lock(prefix):
    """quickstart alone is killed: its pip or eb goes on, and a second run must not build beside it."""
    child = subprocess.Popen(['sleep', '60'], pass_fds=[prefix.lock])
    try:
        os.close(prefix.lock)
        with pytest.raises(quickstart.QuickstartError, match='or what it started'):
            quickstart.Prefix(prefix.path).claim()
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize('name', ['with blank', 'a:b', 'a,b', 'a$b', 'a%b', 'a`b', "a'b", 'a\\b', 'a*b', 'a;b', 'a\nb',
                                  ''])
def test_impossible_prefix(tmp_path, name):
    with pytest.raises(quickstart.QuickstartError, match='cannot be a prefix'):
        quickstart.Prefix(str(tmp_path / name) if name else '')


def test_tilde_that_the_shell_left():
    with pytest.raises(quickstart.QuickstartError, match='has not replaced the ~'):
        quickstart.Prefix('~/somewhere')


def test_prefix_that_cannot_be_written():
    for path in ('/proc/no/such', '/proc/version'):
        with pytest.raises(quickstart.QuickstartError, match='cannot'):
            quickstart.Prefix(path).claim()


def test_noexec_is_named(prefix, monkeypatch):
    fields = list(os.statvfs(prefix.path))
    fields[8] |= os.ST_NOEXEC
    monkeypatch.setattr(os, 'statvfs', lambda path: os.statvfs_result(fields))
    with pytest.raises(quickstart.QuickstartError, match='mounted noexec'):
        prefix.check_noexec()


def test_full_disk_is_said_before_anything_is_installed(prefix, monkeypatch):
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(10**10, 10**10, 50 * 10**6))
    with pytest.raises(quickstart.QuickstartError, match='only 50 MB are free in .*, and 3000 MB are needed'):
        prefix.check_disk()


def test_disk_that_filled_meanwhile_is_named(tmp_path, monkeypatch, capsys):
    """'python -m venv' says that a command returned 1."""
    def fail(*args):
        raise quickstart.QuickstartError("failed")
    monkeypatch.setattr(quickstart, 'quickstart', fail)
    assert quickstart.main(['--prefix', str(tmp_path / 'before')]) == 1
    assert capsys.readouterr().err == '\nquickstart: failed\n'
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=2 * 10**6))
    assert quickstart.main(['--prefix', str(tmp_path / 'after')]) == 1
    assert capsys.readouterr().err == '\nquickstart: failed\n            its disk is full: 2 MB are free\n'


@pytest.mark.parametrize('where, message', [
    ('| true', 'Broken pipe'), ('>/dev/full', 'No space left on device'), ('>&-', None)])
def test_nobody_reads_what_it_prints(tmp_path, where, message):
    """No traceback; the status is that of an error where something could not be said."""
    script = 'set -o pipefail; { sleep 0.3; python3 -m slingtorch.quickstart --prefix %s/p --remove; } %s'
    command = ['bash', '-c', script % (tmp_path, where)]
    prefix = quickstart.Prefix(str(tmp_path / 'p'))
    prefix.claim()
    os.close(prefix.lock)
    done = subprocess.run(command, env=dict(clean_environ(), PYTHONUNBUFFERED=''), text=True, cwd=ROOT,
                          stderr=subprocess.PIPE)
    assert done.returncode == (1 if message else 0) and 'Traceback' not in done.stderr
    assert not message or message in done.stderr


@pytest.mark.parametrize('closed', ['2>&-', '>&- 2>&-'])
def test_nobody_can_read_an_error(tmp_path, closed):
    """Bash gives the number of the closed descriptor to its script."""
    command = f'{ROOT}/quickstart --prefix {tmp_path}/p --remove {closed}'
    assert subprocess.run(['bash', '-c', command], env=clean_environ()).returncode == 1


@pytest.mark.parametrize('uid, mode', [(0, 0o644), (1000, 0o600)])
def test_umask(monkeypatch, tmp_path, uid, mode):
    """Lmod shows root no module of root's that others may not read."""
    monkeypatch.setattr(quickstart, 'quickstart', lambda *args: (tmp_path / 'module').write_text(''))
    monkeypatch.setattr(os, 'getuid', lambda: uid)
    before = os.umask(0o077)
    try:
        assert quickstart.main(['--prefix', str(tmp_path / 'p')]) == 0
    finally:
        os.umask(before)
    assert (tmp_path / 'module').stat().st_mode & 0o777 == mode


def test_moved_prefix_is_made_anew_and_keeps_downloads(prefix, tmp_path, capsys):
    for name in ('venv/bin', 'easybuild/sources/p', 'easybuild/software/PyTorch'):
        os.makedirs(prefix.file(name))
    for name in ('venv', 'easybuild'):
        prefix.register(name)
    os.close(prefix.lock)
    moved = tmp_path / 'elsewhere'
    os.rename(prefix.path, moved)
    new = quickstart.Prefix(str(moved))
    new.claim()
    new.recover_from_move()
    assert 'it was made in %s' % prefix.path in capsys.readouterr().out
    assert (moved / 'easybuild/sources/p').is_dir() and (moved / 'easybuild.old-1/software/PyTorch').is_dir()
    assert not (moved / 'venv').exists() and (moved / 'venv.old-1/bin').is_dir()
    os.close(new.lock)
    assert quickstart.Prefix(str(moved)).mark['prefix'] == str(moved)


# --- the shell it was started from

def test_clean_environment():
    kept = {'HOME': '/h', 'PATH': '/bin', 'https_proxy': 'http://p', 'OMP_NUM_THREADS': '4'}
    leaks = dict.fromkeys(['EASYBUILD_INSTALLPATH', 'SLINGTORCH_SITE', 'PIP_TARGET', 'PYTHONPATH', 'VIRTUAL_ENV',
                           'RANK', 'SLURM_JOB_ID', 'MODULEPATH', 'EBROOTPYTORCH', 'EB_PYTHON', 'BASH_ENV',
                           'MASTER_ADDR'], 'x')
    assert quickstart.clean_environment({**kept, **leaks}) == kept


def test_what_is_left_out_is_said(tmp_path, capsys):
    config = tmp_path / 'easybuild/config.cfg'
    config.parent.mkdir()
    config.write_text('[config]\nmodule-naming-scheme = HierarchicalMNS\n')
    quickstart.report_left_out({'EASYBUILD_PREFIX': '/other', 'SLINGTORCH_SITE': 'lumi',
                                'XDG_CONFIG_HOME': str(tmp_path)})
    said = capsys.readouterr().out
    assert all(word in said for word in ('$EASYBUILD_PREFIX', '$SLINGTORCH_SITE', str(config)))
    quickstart.report_left_out({'XDG_CONFIG_HOME': '/nonexistent', 'XDG_CONFIG_DIRS': '/nonexistent'})
    assert capsys.readouterr().out == ''


def test_pip_keeps_the_network_and_nothing_else(tmp_path, capsys):
    conf = tmp_path / 'pip.conf'
    conf.write_text('[global]\nindex-url = https://mirror.example/simple\nextra-index-url = https://a.example\n'
                    '    https://b.example\nuser = true\n[install]\ntarget = /somewhere\n'
                    '[download]\nproxy = http://p:1\n')
    env = {**clean_environ(), 'PIP_CONFIG_FILE': str(conf), 'PIP_RETRIES': '1', 'PYTHONHOME': '/nonexistent'}
    found = quickstart.pip_environment(sys.executable, env)
    assert found['PIP_INDEX_URL'] == 'https://mirror.example/simple'
    assert found['PIP_EXTRA_INDEX_URL'] == 'https://a.example https://b.example'
    assert (found['PIP_PROXY'], found['PIP_RETRIES'], found['PIP_CONFIG_FILE']) == ('http://p:1', '1', '/dev/null')
    assert not {'PIP_USER', 'PIP_TARGET'}.intersection(found)
    assert "not used of pip's configuration: target, user" in capsys.readouterr().out
    conf.write_text('no section\n')
    with pytest.raises(quickstart.QuickstartError, match='pip cannot read its configuration'):
        quickstart.pip_environment(sys.executable, env)


# --- Python, modules tool, packages

def fake_command(directory, name, text):
    path = directory / name
    path.write_text('#!/bin/bash\n%s\n' % text)
    path.chmod(0o755)
    return path


PYENV_SAYS = """pyenv: python3.12: command not found

The `python3.12' command exists in these Python versions:
  3.12.1

Note: See 'pyenv help global' for tips on allowing multiple
      Python versions to be found at the same time.
"""


def test_find_python(tmp_path):
    old = fake_command(tmp_path, 'python3', """echo '{"version": "3.6", "interpreter": "/x", "packages": {}}'""")
    for wanted, path in ((str(old), None), (None, str(tmp_path))):
        if wanted or not os.path.exists('/usr/bin/python3'):
            with pytest.raises(quickstart.QuickstartError) as err:
                quickstart.find_python(wanted, path)
            assert 'is 3.6' in str(err.value) and '3.11, 3.12, 3.13, 3.14' in str(err.value)
    broken = fake_command(tmp_path, 'python3.12', 'echo "libpython3.12.so.1.0: cannot open" >&2; exit 127')
    for nonsense, why in (('/nonexistent', 'there is no such command'), ('', 'there is no such command'),
                          ('true', 'that is no Python'), (str(broken), 'libpython3.12.so.1.0: cannot open')):
        with pytest.raises(quickstart.QuickstartError, match="--python '%s': %s" % (nonsense, why)):
            quickstart.find_python(nonsense)
    assert quickstart.find_python(sys.executable)['version'] == '%d.%d' % sys.version_info[:2]


def test_python_behind_a_shim(tmp_path):
    """What a wrapper prints is not the Python's answer; what pyenv's shims say of a missing version is shown whole."""
    banner = fake_command(tmp_path, 'banner', 'echo "Welcome"; %s "$@"; echo "{bye}"' % sys.executable)
    found = quickstart.find_python(str(banner))
    assert found['path'] == sys.executable and found['version'] == '%d.%d' % sys.version_info[:2]
    # what the real one (libexec/pyenv-which) printed
    (tmp_path / 'words').write_text(PYENV_SAYS)
    shim = fake_command(tmp_path, 'python3.12', 'cat %s/words >&2; exit 127' % tmp_path)
    with pytest.raises(quickstart.QuickstartError) as err:
        quickstart.find_python(str(shim))
    assert PYENV_SAYS.strip() in err.value.args[0]
    says = fake_command(tmp_path, 'says', 'echo "no license today"; exit 1')
    with pytest.raises(quickstart.QuickstartError, match='no license today'):
        quickstart.find_python(str(says))


def test_python_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, 'ANSWER_LIMIT', 0.5)
    python = fake_command(tmp_path, 'python3.11', 'exec sleep 100')
    with pytest.raises(quickstart.QuickstartError, match='it does not answer'):
        quickstart.find_python(str(python))


def test_python_must_start_in_every_shell(tmp_path, monkeypatch):
    """One that needs a module's LD_LIBRARY_PATH would not start after a new login."""
    python = fake_command(tmp_path, 'python3.11', '[ -n "$LD_LIBRARY_PATH" ] || { echo "no libpython" >&2; exit 127; }\n'
                          'exec %s "$@"' % sys.executable)
    monkeypatch.setenv('LD_LIBRARY_PATH', '/opt/python/lib')
    with pytest.raises(quickstart.QuickstartError, match='no libpython') as err:
        quickstart.find_python(str(python))
    assert 'without LD_LIBRARY_PATH' in err.value.args[1]


def test_find_modules_tool(tmp_path):
    assert quickstart.find_modules_tool({}, str(tmp_path)) is None
    modules = tmp_path / 'usr/share/modules/init/bash'
    modules.parent.mkdir(parents=True)
    modules.touch()
    assert quickstart.find_modules_tool({}, str(tmp_path)) == ('EnvironmentModules', str(modules), 'Tcl')
    lmod = tmp_path / 'usr/share/lmod/8.7/libexec/lmod'
    lmod.parent.mkdir(parents=True)
    lmod.touch()
    assert quickstart.find_modules_tool({}, str(tmp_path)) == ('Lmod', str(lmod.parents[1] / 'init/bash'), 'Lua')
    other = tmp_path / 'opt/lmod'
    shutil.copytree(lmod.parents[1], other)
    assert quickstart.find_modules_tool({'LMOD_PKG': str(other)}, str(tmp_path))[1] == str(other / 'init/bash')


def test_modules_tool_that_does_not_work(tmp_path, monkeypatch):
    """The file is named. A script of Lmod that fails leaves nothing to evaluate, which is no error in itself."""
    init = fake_command(tmp_path, 'init', 'module() { :; }')
    monkeypatch.setattr(quickstart, 'find_modules_tool', lambda environ: ('Lmod', str(init), 'Lua'))
    with pytest.raises(quickstart.QuickstartError, match='the modules tool %s does not work' % init) as err:
        quickstart.set_up_packages(sys.executable, None, str(tmp_path / 'log'))
    assert err.value.args[1] == "'module --version' prints nothing"


def test_packages_nobody_may_install(tmp_path, monkeypatch):
    fake_command(tmp_path, 'apt-get', 'exit 1')
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    with pytest.raises(quickstart.QuickstartError) as err:
        quickstart.install_packages(['lmod'], str(tmp_path / 'log'))
    assert err.value.args[0] == 'packages of the distribution are missing: lmod'
    assert "sudo sh -c 'apt-get update && apt-get install --yes --no-install-recommends lmod'" in err.value.args[2]
    (tmp_path / 'apt-get').rename(tmp_path / 'zypper')
    with pytest.raises(quickstart.QuickstartError, match='lua-lmod'):
        quickstart.install_packages(['lmod'], str(tmp_path / 'log'))
    (tmp_path / 'zypper').unlink()
    with pytest.raises(quickstart.QuickstartError, match='no package manager is known'):
        quickstart.install_packages(['lmod'], str(tmp_path / 'log'))


def test_packages_that_fail(tmp_path, monkeypatch, capsys):
    fake_command(tmp_path, 'apt-get', 'echo "apt-get $*"; [ "$1" = update ]')
    monkeypatch.setenv('PATH', '%s:%s' % (tmp_path, os.environ['PATH']))
    monkeypatch.setattr(os, 'geteuid', lambda: 0)
    with pytest.raises(quickstart.QuickstartError, match='failed:.*apt-get install .* lmod') as err:
        quickstart.install_packages(['lmod'], str(tmp_path / 'log'))
    assert str(tmp_path / 'log') in err.value.args[2]
    assert 'installed now: lmod' in capsys.readouterr().out


# --- which PyTorch

NEWEST, OLDER = 'PyTorch-2.15.0-cuda-13.2.eb', 'PyTorch-2.10.0-cuda-12.8.eb'


def planted(path, driver='580.65.06', device=True):
    """A machine of files with NVIDIA's driver."""
    for name, text in {'proc/driver/nvidia/version': 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  %s  Wed\n' % driver,
                       'dev/nvidiactl': '' if device else None}.items():
        if text is not None:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
    return str(path)


@pytest.mark.parametrize('driver, device, cpu, name, words', [
    ('580.65.06', True, False, NEWEST, '(driver 580.65.06)'),
    ('550.90.07', True, False, OLDER, '(driver 550.90.07)'),
    ('580.65.06', True, True, quickstart.CPU, '(for processors: --cpu was given)'),
    # in a container that was given no GPU
    ('580.65.06', False, False, quickstart.CPU, '(for processors: driver 580.65.06, but there is no /dev/nvidiactl)'),
    ('390.157', True, False, quickstart.CPU, '(for processors: driver 390.157 is too old for every wheel: '),
    (None, False, False, quickstart.CPU, "(for processors: no driver of NVIDIA's or AMD's GPUs is loaded here)"),
])
def test_pytorch_that_fits_the_driver(prefix, tmp_path, monkeypatch, capsys, driver, device, cpu, name, words):
    monkeypatch.setattr(os, 'uname', lambda: os.uname_result(('Linux', 'me', '6', '1', 'x86_64')))
    quickstart.choose(prefix, cpu, planted(tmp_path / 'root', driver, device) if driver else str(tmp_path / 'root'))
    assert prefix.easyconfig == name and 'PyTorch:      %s %s' % (name, words) in capsys.readouterr().out
    assert prefix.module == name[:-3].replace('PyTorch-', 'PyTorch/')


def test_gpus_of_amd(prefix, tmp_path, capsys):
    """Their wheels are not on the package index: quickstart takes the small one, and names the other."""
    node = tmp_path / 'sys/class/kfd/kfd/topology/nodes/1/properties'
    node.parent.mkdir(parents=True)
    node.write_text('simd_count 304\n')
    quickstart.choose(prefix, False, str(tmp_path))
    assert prefix.easyconfig == quickstart.CPU
    assert 'for these GPUs, by README.md: eb PyTorch-2.10.0-rocm-7.1.eb' in capsys.readouterr().out


def test_sizes_are_said_and_disk_is_looked_at_first(prefix, monkeypatch, capsys):
    free = [16 * 10**9]
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(10**12, 10**12, free[0]))
    for name, words in ((quickstart.CPU, 'downloads 255 MB, and takes up to 3.0 GB of disk'),
                        (NEWEST, 'downloads 2.9 GB, and takes up to 12.0 GB of disk'),
                        (OLDER, 'downloads 4.0 GB, and takes up to 15.5 GB of disk')):
        prefix.easyconfig = name
        quickstart.say_sizes(prefix)
        said = capsys.readouterr().out
        assert words in said and ('(--cpu: 255 MB, 3 GB)' in said) == (name != quickstart.CPU)
    free[0] = 12 * 10**9
    with pytest.raises(quickstart.QuickstartError, match='and 15500 MB are needed for ' + OLDER) as err:
        quickstart.say_sizes(prefix)
    assert '--cpu needs 3000 MB' in err.value.args[1]
    # what an earlier run has downloaded needs no space any more
    wheel = pathlib.Path(prefix.file('easybuild', 'sources', 'p', 'torch.whl'))
    wheel.parent.mkdir(parents=True)
    with open(wheel, 'wb') as stream:
        stream.truncate(3600 * 10**6)
    quickstart.say_sizes(prefix)


def test_one_rank_on_each_gpu(prefix):
    assert [quickstart.ranks_for(prefix, {}, asked) for asked in (None, 6)] == [2, 6]
    prefix.easyconfig = NEWEST
    python = pathlib.Path(prefix.file('easybuild', 'software', prefix.module, 'bin', 'python'))
    python.parent.mkdir(parents=True)
    fake_command(python.parent, 'python', 'echo 5')
    assert [quickstart.ranks_for(prefix, {}, asked) for asked in (None, 3)] == [4, 3]
    with pytest.raises(quickstart.QuickstartError, match='there are 5 GPUs for 6 ranks') as err:
        quickstart.ranks_for(prefix, {}, 6)
    assert err.value.args[1] == '--ranks 4; or --cpu'
    # what torch.cuda.is_available() warns of
    fake_command(python.parent, 'python', 'echo "UserWarning: CUDA initialization: Error 802" >&2; echo 0')
    with pytest.raises(quickstart.QuickstartError, match='finds no GPU that it can use') as err:
        quickstart.ranks_for(prefix, {}, None)
    assert 'Error 802' in err.value.args[1] and '--cpu --prefix' in err.value.args[2]


@pytest.mark.parametrize('easyconfig, backend, device, wrong', [
    (NEWEST, 'nccl', 'cuda', None), (quickstart.CPU, 'gloo', 'cpu', None),
    (NEWEST, 'gloo', 'cpu', 'training ran on cpu with gloo, and not on GPUs with NCCL')])
def test_training_for_gpus_that_ran_elsewhere(prefix, easyconfig, backend, device, wrong):
    prefix.easyconfig = easyconfig
    result = {'accuracy': 0.97, 'world_size': 2, 'backend': backend,
              'hosts': [{'device': device + (':%d' % rank if device == 'cuda' else '')} for rank in range(2)]}
    (pathlib.Path(prefix.path) / 'result').write_text(json.dumps(result))
    fake_command(pathlib.Path(prefix.path), 'module', 'true')
    fake_command(pathlib.Path(prefix.path), 'mpiexec', 'cp %s/result "${@: -1}"' % prefix.path)
    env = dict(clean_environ(), PATH='%s:%s' % (prefix.path, os.environ['PATH']),
               EBROOTPYTORCH=prefix.file('easybuild', 'software', prefix.module))
    os.makedirs(env['EBROOTPYTORCH'])
    assert quickstart.train(prefix, env, ('Lmod', '/dev/null', 'Lua'), 2) == wrong


# --- the environment with EasyBuild

@pytest.fixture(scope='session')
def wheelhouse(tmp_path_factory):
    """Tiny wheels of everything that is installed, and the settings of pip that make it the only index."""
    directory = tmp_path_factory.mktemp('wheels')
    for requirement in quickstart.requirements() + ['setuptools==80', 'wheel==0.45']:
        name = re.match(r'[\w-]+', requirement).group(0)
        version = {'mpich': quickstart.MPICH.split('==')[1]}.get(name, '5.4.1')
        files = {
            'easybuild-framework': {'easybuild/main.py': ''},
            'mpich': {'mpich-%s.data/scripts/mpiexec' % version: '#!/bin/sh\necho starts\n'},
        }.get(name)
        make_wheel(directory, name.replace('-', '_'), version, files)
    return {'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': str(directory), 'PIP_CONFIG_FILE': os.devnull}


def set_up_tools(prefix):
    """As quickstart does it, but that pip is copied into the environment (testbed.quickvenv)."""
    python = dict(PYTHON, path=str(quickvenv.python3() / 'python3'))
    quickstart.set_up_tools(prefix, python, quickstart.clean_environment(os.environ))


@pytest.fixture(scope='module')
def prefix_with_tools(tmp_path_factory):
    """One prefix for all who use `tools`: what a test breaks in its environment is repaired by the next."""
    made = quickstart.Prefix(str(tmp_path_factory.mktemp('tools') / 'prefix'))
    made.claim()
    return made


@pytest.fixture
def tools(prefix_with_tools, wheelhouse, monkeypatch):
    """set_up_tools, from the wheelhouse; its environment was made."""
    for name, value in wheelhouse.items():
        monkeypatch.setenv(name, value)

    def call():
        again = quickstart.Prefix(prefix_with_tools.path)
        again.lock = prefix_with_tools.lock
        set_up_tools(again)
        return pathlib.Path(again.path)
    call()
    return call


def test_tools_are_made_once(tools, capsys):
    made = tools()
    assert 'EasyBuild 5.4.1, MPICH 5.0.2' in capsys.readouterr().out
    (made / 'log/pip.log').unlink(missing_ok=True)
    tools()
    assert not (made / 'log/pip.log').exists(), 'pip ran again'


def test_tools_recover(tools, capsys):
    """What an earlier run has noted is not believed."""
    made = tools()
    shutil.rmtree(made / 'venv')
    tools()
    assert (made / 'venv/bin/slingtorch').exists()

    shutil.rmtree(next((made / 'venv').glob('lib/python3.*/site-packages/easybuild_framework-*')))
    tools()
    assert next((made / 'venv').glob('lib/python3.*/site-packages/easybuild_framework-*')).is_dir()
    assert not (made / 'venv.old-1').exists()

    # its packages are registered, and files of them are gone
    shutil.rmtree(next((made / 'venv').glob('lib/python3.*/site-packages/easybuild')))
    capsys.readouterr()
    tools()
    assert next((made / 'venv').glob('lib/python3.*/site-packages/easybuild/main.py')).exists()
    assert 'its EasyBuild does not start' in capsys.readouterr().out
    shutil.rmtree(made / 'venv.old-1')
    (made / 'venv/bin/mpiexec').write_text('#!/bin/sh\nexit 0\n')
    tools()
    assert 'its mpiexec does not start' in capsys.readouterr().out
    shutil.rmtree(made / 'venv.old-1')

    # the user worked in it before its Python went away
    (made / 'venv/notes.txt').write_text('mine')
    (made / 'venv/bin/python').unlink()
    (made / 'venv/bin/python').symlink_to('/nonexistent')
    capsys.readouterr()
    tools()
    assert (made / 'venv.old-1/notes.txt').read_text() == 'mine'
    said = capsys.readouterr().out
    assert 'its Python does not run' in said and 'kept as %s/venv.old-1' % made in said
    shutil.rmtree(made / 'venv.old-1')


def test_interrupted_environment_is_made_anew(tools):
    made = tools()
    mark = json.loads((made / quickstart.MARK).read_text())
    (made / quickstart.MARK).write_text(json.dumps({**mark, 'unfinished': True}))
    (made / 'venv/bin/python').unlink()
    tools()
    assert (made / 'venv/bin/python').exists() and not list(made.glob('venv.old-*'))
    assert 'unfinished' not in json.loads((made / quickstart.MARK).read_text())


def test_another_python_makes_another_environment(tools):
    """--python after a failure was printed, and the old environment was used on."""
    made = tools()
    other = dict(PYTHON, interpreter='/opt/other/bin/python3')
    found = quickstart.describe_python(str(made / 'venv/bin/python'))
    assert quickstart.why_not_usable(found, other, str(made / 'venv')) \
        == 'it is of Python %(version)s (%(interpreter)s)' % PYTHON
    copied = made / 'copied'
    shutil.copytree(made / 'venv', copied, symlinks=True)
    found = quickstart.describe_python(str(copied / 'bin/python'))
    assert quickstart.why_not_usable(found, PYTHON, str(copied)) is None
    assert 'it believes to be' in quickstart.why_not_usable(found, PYTHON, str(made / 'venv'))


def test_index_out_of_reach_that_is_not_needed(prefix, wheelhouse, monkeypatch, capfd):
    """What pip says of it cannot be judged by a newcomer."""
    for name, value in dict(wheelhouse, PIP_INDEX_URL='http://127.0.0.1:9/simple').items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv('PIP_NO_INDEX')
    set_up_tools(prefix)
    out, errors = capfd.readouterr()
    assert errors == '' and 'WARNING' not in out and '127.0.0.1' not in out
    assert '127.0.0.1:9' in pathlib.Path(prefix.file('log', 'pip.log')).read_text(), 'it was not asked'


def test_index_out_of_reach_is_one_line(prefix, monkeypatch, capfd):
    monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
    monkeypatch.setenv('PIP_INDEX_URL', 'http://127.0.0.1:9/simple')
    monkeypatch.delenv('PIP_FIND_LINKS', raising=False)
    with pytest.raises(quickstart.QuickstartError) as err:
        set_up_tools(prefix)
    assert err.value.args[0].startswith('pip could not reach http://127.0.0.1:9/simple/')
    assert 'PIP_INDEX_URL' in err.value.args[1]
    out, errors = capfd.readouterr()
    assert errors == '' and len(out.splitlines()) == 1


def test_pip_that_cannot_install_shows_its_error_and_no_warnings(prefix, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
    monkeypatch.setenv('PIP_NO_INDEX', '1')
    monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path / 'no such directory'))
    with pytest.raises(quickstart.QuickstartError) as err:
        set_up_tools(prefix)
    assert err.value.args[1].startswith('ERROR: Could not find a version that satisfies the requirement ')
    assert 'PIP_FIND_LINKS=%s/no such directory' % tmp_path in err.value.args[2]
    assert 'PIP_NO_INDEX=1' in err.value.args[2]
    assert 'WARNING' not in ''.join(err.value.args) + ''.join(capfd.readouterr())


# --- the shell that goes on

@pytest.fixture
def activated_prefix(prefix, lmod):
    """A prefix with this Python's EasyBuild in it."""
    os.symlink(sys.prefix, prefix.register('venv'))
    tool = quickstart.find_modules_tool({'LMOD_CMD': lmod.variables['LMOD_CMD']})
    quickstart.write_configuration(prefix, tool)
    return prefix


def source(prefix, script='', **env):
    """Source 'activate' in a shell that also has other things in its environment."""
    script = '. %s/activate && %s' % (prefix.path, script or 'true')
    return subprocess.run(['bash', '--noprofile', '--norc', '-c', script],
                          env={**clean_environ(), **env}, text=True, capture_output=True, cwd='/')


def test_activate_is_one_clean_configuration(activated_prefix, tmp_path):
    config = tmp_path / 'xdg/easybuild/config.cfg'
    config.parent.mkdir(parents=True)
    config.write_text('[config]\ninstallpath-software = /elsewhere\nmodule-naming-scheme = HierarchicalMNS\n')
    of_machine = tmp_path / 'etc/easybuild.d/site.cfg'
    of_machine.parent.mkdir(parents=True)
    of_machine.write_text('[config]\ninstallpath-modules = /elsewhere\n')
    done = source(activated_prefix, 'eb --show-config', XDG_CONFIG_HOME=str(tmp_path / 'xdg'),
                  XDG_CONFIG_DIRS='/nonexistent:%s/etc' % tmp_path,
                  EASYBUILD_PREFIX='/other/prefix', EASYBUILD_HOOKS='/foreign/hooks.py', SLINGTORCH_SITE='nonsense')
    assert done.returncode == 0, done.stderr
    assert '/elsewhere' not in done.stdout and '/other' not in done.stdout and 'Hierarchical' not in done.stdout
    assert 'prefix  ' in done.stdout and activated_prefix.file('easybuild') in done.stdout
    assert str(ROOT / 'hooks/slingshot_hooks.py') in done.stdout


def test_changed_configuration_is_kept(activated_prefix, capsys):
    path = pathlib.Path(activated_prefix.file('easybuild.cfg'))
    tool = ('Lmod', '/dev/null', 'Lua')
    quickstart.write_configuration(activated_prefix, tool)
    assert 'made anew' not in capsys.readouterr().out
    path.write_text(path.read_text() + 'optarch = GENERIC\n')
    quickstart.write_configuration(activated_prefix, tool)
    assert 'easybuild.cfg is made anew: you have changed it' in capsys.readouterr().out
    assert 'GENERIC' in path.with_name('easybuild.cfg.old-1').read_text() and 'GENERIC' not in path.read_text()


def test_directory_that_may_not_be_used(prefix, monkeypatch):
    """eb would end in a traceback."""
    closed = prefix.file('easybuild', 'software', 'PyTorch')
    os.makedirs(closed)
    monkeypatch.setattr(os, 'access', lambda path, mode: path != closed)
    with pytest.raises(quickstart.QuickstartError, match='you may not use the directory %s' % closed):
        prefix.check_access()


def test_activate_with_the_checkout_gone(activated_prefix):
    text = pathlib.Path(activated_prefix.file('activate')).read_text()
    pathlib.Path(activated_prefix.file('activate')).write_text(text.replace(str(ROOT), '/gone/checkout'))
    done = source(activated_prefix)
    assert done.returncode == 1 and '/gone/checkout' in done.stderr and len(done.stderr.splitlines()) == 1


def test_activate_says_what_is_missing(activated_prefix):
    """Before PyTorch is installed, and when the module files are gone."""
    done = source(activated_prefix, 'type -t module')
    assert (done.returncode, done.stdout) == (0, 'function\n')
    assert done.stderr == 'activate: %s is not installed here; quickstart installs it: %s --prefix %s\n' % (
        MODULE, quickstart.COMMAND, activated_prefix.path)
    module = pathlib.Path(activated_prefix.file('easybuild', 'modules', 'all', MODULE + '.lua'))
    module.parent.mkdir()
    module.touch()
    assert source(activated_prefix).stderr == ''
    shutil.rmtree(activated_prefix.file('easybuild'))
    done = source(activated_prefix)
    assert done.returncode == 1 and '/easybuild/modules/all is gone, or you may not read it' in done.stderr


def test_activate_passes_an_error_on(activated_prefix):
    """An error of 'slingtorch env' is the only one, and the status."""
    command = pathlib.Path(activated_prefix.path, 'bin/slingtorch')
    os.makedirs(command.parent)
    text = pathlib.Path(activated_prefix.file('activate')).read_text()
    pathlib.Path(activated_prefix.file('activate')).write_text(
        text.replace('%s/venv/bin/slingtorch' % activated_prefix.path, str(command)))
    fake_command(command.parent, 'slingtorch', 'echo "slingtorch: error: wrong" >&2; echo false; exit 1')
    done = source(activated_prefix, 'echo went on')
    assert (done.returncode, done.stdout, done.stderr) == (1, '', 'slingtorch: error: wrong\n')


def test_activate_where_slingtorch_does_not_start(activated_prefix):
    """Its Python may have needed a library that is gone: there is nothing to evaluate then, which is no error."""
    activate = pathlib.Path(activated_prefix.file('activate'))
    command = fake_command(pathlib.Path(activated_prefix.path), 'broken', 'echo "no libpython" >&2; exit 127')
    activate.write_text(activate.read_text().replace('%s/venv/bin/slingtorch' % activated_prefix.path, str(command)))
    done = source(activated_prefix, 'echo went on')
    assert (done.returncode, done.stdout, done.stderr) == (1, '', 'no libpython\n')


def test_activate_in_tcsh(activated_prefix):
    """It is for bash, and says what to type; the shell goes on."""
    script = f"source {activated_prefix.file('activate')}\necho went on\n"
    done = subprocess.run(['tcsh', '-f'], input=script, env=clean_environ(), text=True, capture_output=True)
    assert done.stdout == "activate: this file is for bash. Type 'bash', then do the same in that shell\nwent on\n"


def test_checkout_with_a_blank(tmp_path):
    """The command that is printed, and the file that is sourced, quote it."""
    checkout = tmp_path / 'my checkout'
    checkout.mkdir()
    for name in ('quickstart', 'setup.cfg', 'slingtorch', 'easyconfigs', 'examples'):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, checkout / name)
    script = ('from slingtorch import quickstart as q; p = q.Prefix(%r); p.claim(); '
              'q.write_configuration(p, ("Lmod", "/dev/null", "Lua")); print(q.shlex.quote(q.EXAMPLE))'
              % str(tmp_path / 'prefix'))
    done = subprocess.run([sys.executable, '-c', script], cwd=checkout, text=True, capture_output=True, check=True)
    assert done.stdout == "'%s/examples/digits/train_digits.py'\n" % checkout
    subprocess.run(['bash', '-n', tmp_path / 'prefix/activate'], check=True)
    assert "'%s'/slingtorch/cli.py" % checkout in (tmp_path / 'prefix/activate').read_text()


# --- interrupts

def running(pid):
    try:
        return pathlib.Path('/proc', pid, 'stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False


@pytest.mark.parametrize('moment', ['while it runs', 'before Popen is back'])
def test_interrupt_ends_what_was_started(tmp_path, moment):
    script = """
from slingtorch import quickstart as q
q.signal.signal(q.signal.SIGTERM, q.interrupt)
Popen = q.subprocess.Popen
def interrupted(*args, **keys):
    process = Popen(*args, **keys)
    while not (q.os.path.exists('pid') and open('pid').read().strip()):
        assert process.poll() is None
    q.os.kill(q.os.getpid(), q.signal.SIGTERM)
    return process
if %r:
    q.subprocess.Popen = interrupted
q.run(['sh', '-c', 'sleep 61 & echo $! > pid; wait'], dict(q.os.environ))
""" % (moment == 'before Popen is back')
    process = subprocess.Popen([sys.executable, '-c', script], cwd=tmp_path,
                               env={**clean_environ(), 'PYTHONPATH': str(ROOT)}, stderr=subprocess.DEVNULL)
    pid = tmp_path / 'pid'
    while not (pid.exists() and pid.read_text().strip()):
        assert process.poll() is None
    if moment == 'while it runs':
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) != 0
    deadline = time.monotonic() + 30
    while running(pid.read_text().strip()):
        assert time.monotonic() < deadline, 'what it started goes on'


def test_installation_that_is_replaced_is_kept(prefix, capsys, monkeypatch):
    """The user may have installed packages into it."""
    commands = []
    monkeypatch.setattr(quickstart, 'run', lambda command, *args, **keys: commands.append(command[1:]))
    monkeypatch.setattr(quickstart, 'pip_environment', lambda *args: {})
    own = pathlib.Path(prefix.file('easybuild', 'software', MODULE)) / 'mine.py'
    own.parent.mkdir(parents=True)
    own.touch()
    quickstart.install_pytorch(prefix, {}, 'it is broken')
    assert not own.parent.exists() and (own.parents[1] / (own.parent.name + '.old-1') / 'mine.py').exists()
    assert 'is made anew: it is broken' in capsys.readouterr().out
    quickstart.install_pytorch(prefix, {}, 'it is gone')
    assert commands == [[quickstart.CPU, '--disable-trace', '--rebuild']] * 2


def test_pytorch_whose_python_is_gone_is_made_anew(prefix, monkeypatch, capfd):
    """A module file alone is not believed."""
    module = pathlib.Path(prefix.file('easybuild', 'modules', 'all', MODULE + '.lua'))
    python = pathlib.Path(prefix.file('easybuild', 'software', MODULE, 'bin', 'python'))
    eb = pathlib.Path(prefix.file('venv', 'bin', 'eb'))
    for directory in (module.parent, python.parent, eb.parent):
        directory.mkdir(parents=True)
    module.touch()
    python.symlink_to(PYTHON['interpreter'])
    fake_command(eb.parent, eb.name, 'echo "eb $*"')
    for name, result in (('set_up_packages', (PYTHON, ('Lmod', '/init', 'Lua'))), ('set_up_tools', None),
                         ('write_configuration', None), ('activated', {}), ('pip_environment', {}), ('train', None)):
        monkeypatch.setattr(quickstart, name, lambda *_, result=result: result)

    def printed():
        quickstart.quickstart(quickstart.parse_arguments(['--prefix', prefix.path]), prefix, quickstart.Phases())
        return capfd.readouterr().out

    text = printed()
    assert 'eb PyTorch-' in text and '--rebuild' not in text and 'is made anew' not in text
    python.unlink()
    python.symlink_to('/nonexistent')
    text = printed()
    assert '/software/%s is made anew: its Python does not run' % MODULE in text
    assert re.search(r'^eb PyTorch-\S+\.eb .*--rebuild$', text, re.M)


def test_training_that_hangs_is_ended(prefix, monkeypatch):
    command = pathlib.Path(prefix.path) / 'mpiexec'
    fake_command(command.parent, 'module', 'true')
    fake_command(command.parent, 'mpiexec', 'echo $$ > pid; exec sleep 1000')
    monkeypatch.setattr(quickstart, 'TRAINING_LIMIT', 1)
    env = dict(clean_environ(), PATH='%s:%s' % (prefix.path, os.environ['PATH']),
               EBROOTPYTORCH=prefix.file('easybuild', 'software', MODULE))
    os.makedirs(env['EBROOTPYTORCH'])
    assert quickstart.train(prefix, env, ('Lmod', '/dev/null', 'Lua'), 2) == 'training had not ended after 0 minutes'
    assert not running((command.parent / 'pid').read_text().strip())


def test_interrupt_says_what_is_left(tmp_path, monkeypatch, capsys):
    def interrupted(args, prefix, phases, root):
        raise KeyboardInterrupt(signal.SIGTERM)
    monkeypatch.setattr(quickstart, 'quickstart', interrupted)
    assert quickstart.main(['--prefix', str(tmp_path / 'p')]) == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    assert 'interrupted; what is in %s/p is not complete' % tmp_path in said
    assert 'to go on from there: %s/quickstart --prefix %s/p\n' % (ROOT, tmp_path) in said
    assert '%s/quickstart --remove --prefix %s/p\n' % (ROOT, tmp_path) in said
