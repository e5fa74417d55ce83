"""./quickstart as somebody who has just cloned the repository runs it."""
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from testbed import ROOT, clean_environ, run

pytestmark = pytest.mark.real

NOT_ROOT = ['setpriv', '--reuid=65534', '--regid=65534', '--clear-groups']


def clone(target):
    """The files of this checkout, also those not committed yet, as git would bring them."""
    listed = run(['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'], cwd=ROOT).stdout
    for name in filter(None, listed.split('\0')):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def environment(home):
    """That of somebody who has nothing of ours yet: no virtual environment on the path."""
    env = clean_environ()
    env['HOME'] = str(home)
    # pip asks a rustc in the path for its version, and rustup's rustc then makes ~/.rustup
    path = [part for part in env['PATH'].split(':')
            if not os.path.exists(f'{part}/slingtorch') and not os.path.exists(f'{part}/rustup')]
    env['PATH'] = ':'.join(path)
    return env


def files_below(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob('*'))


def quickstart(*args, env=None, prefix_command=(), check=False, cwd=None):
    return run([*prefix_command, ROOT / 'quickstart', *args], env=env or clean_environ(), check=check, cwd=cwd, timeout=900)


def test_from_clone_to_training_and_again(tmp_path):
    checkout, home, prefix = clone(tmp_path / 'checkout'), tmp_path / 'home', tmp_path / 'prefix'
    home.mkdir()
    # pip's own configuration lies in the home directory on some machines
    env = {**environment(home), 'PIP_CONFIG_FILE': os.environ.get('PIP_CONFIG_FILE', '')}
    for candidate in (pathlib.Path.home() / '.config/pip/pip.conf', pathlib.Path.home() / '.pip/pip.conf'):
        if not env['PIP_CONFIG_FILE'] and candidate.exists():
            env['PIP_CONFIG_FILE'] = str(candidate)
    if not env['PIP_CONFIG_FILE']:
        del env['PIP_CONFIG_FILE']
    before = files_below(checkout)

    done = run([checkout / 'quickstart', '--prefix', prefix], env=env, timeout=900, cwd=tmp_path)
    text = done.stdout
    accuracy = float(re.search(r'accuracy (0\.\d+) on 360 test images, 2 ranks', text).group(1))
    assert accuracy > 0.95
    assert re.search(r'rank  local rank  node .*\n +0 +0 .*\n +1 +1 ', text)
    assert len(re.findall(r'^ +\d+\.\d s  \S', text, re.M)) == 4, text
    if os.geteuid() == 0:
        assert 'EasyBuild normally refuses to run as root' in text
    result = json.loads((prefix / 'quickstart.json').read_text())
    assert result['world_size'] == 2 and len({host['pid'] for host in result['hosts']}) == 2

    assert files_below(checkout) == before, 'wrote to the checkout'
    assert files_below(home) == [], 'wrote to the home directory'

    # the three commands to do it again by hand, as printed
    commands = re.search(r'by hand:\n\n((?:  .*\n)+)', text).group(1)
    assert len(commands.strip().splitlines()) == 3
    by_hand = run(['bash', '--noprofile', '--norc', '-ec', commands], env=env, cwd=tmp_path, timeout=300)
    assert 'on 360 test images, 2 ranks' in by_hand.stdout
    # eb goes on working after the module is loaded, whose Python has no EasyBuild
    eb_after = commands.splitlines()[0] + '\n' + commands.splitlines()[1] + '\neb --version'
    assert 'EasyBuild 5.4' in run(['bash', '--noprofile', '--norc', '-ec', eb_after], env=env, cwd=tmp_path).stdout

    again = run([checkout / 'quickstart', '--prefix', prefix, '--ranks', '3'], env=env, timeout=300, cwd=tmp_path).stdout
    assert 'already installed' in again and 'nothing is missing' in again
    assert 'installing with pip' not in again
    assert 'on 360 test images, 3 ranks' in again


def test_help_tells_all_options():
    done = quickstart('--help', check=True)
    for option in ('--prefix', '--ranks', '--python', '--help'):
        assert option in done.stdout


@pytest.mark.parametrize('args, words', [
    (['--ranks', '5'], ['--ranks 5 will not do', '1, 2, 3, 4, 6, 8']),
    (['--ranks', 'many'], ['--ranks many will not do']),
    (['--ranks'], ['--ranks needs a value']),
    (['--prefix', ''], ['--prefix needs a value']),
    (['--prefix='], ['--prefix needs a value']),
    (['--python='], ['--python needs a value']),
    (['--prefix=~/somewhere'], ['has not replaced the ~', '$HOME']),
    (['--prefix', '/tmp/with space'], ['will not do', 'blanks']),
    (['--prefix', '/tmp/with:colon'], ['will not do', 'colons']),
    (['--nonsense'], ["unknown argument '--nonsense'"]),
    (['--prefix', '/proc/no/such'], ['cannot write to /proc/no/such', '--prefix DIR']),
])
def test_bad_arguments(args, words):
    done = quickstart(*args)
    assert done.returncode == 1 and done.stdout == ''
    for word in words:
        assert word in done.stderr


def test_prefix_of_somebody_else(tmp_path):
    prefix = tmp_path / 'prefix'
    prefix.mkdir(mode=0o755)
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.owner() == 'root' and parent != pathlib.Path('/') and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    target = prefix
    if os.geteuid() != 0:
        target = pathlib.Path('/usr')
    command = NOT_ROOT if os.geteuid() == 0 else []
    script = tmp_path / 'quickstart'
    shutil.copy2(ROOT / 'quickstart', script)       # the checkout itself may be closed to others
    done = run([*command, script, '--prefix', target], check=False, env=clean_environ(), cwd='/')
    assert done.returncode == 1 and f'cannot write to {target}' in done.stderr


def fake_python(directory, version):
    """A Python that says it has this version."""
    path = directory / 'python-of-old'
    path.write_text(f'#!/bin/sh\necho {version}\n')
    path.chmod(0o755)
    return path


def test_python_too_old(tmp_path):
    python = fake_python(tmp_path, '3.6')
    done = quickstart('--prefix', str(tmp_path / 'prefix'), '--python', str(python))
    assert done.returncode == 1
    assert f'{python} is 3.6; it must be one of 3.11, 3.12, 3.13, 3.14' in done.stderr and '--python /path/to' in done.stderr


@pytest.mark.parametrize('python', ['/nonexistent', 'true'])
def test_no_python_by_that_name(tmp_path, python):
    done = quickstart('--prefix', str(tmp_path / 'prefix'), '--python', python)
    assert done.returncode == 1 and f'--python {python} will not do' in done.stderr
    assert 'installed now' not in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason='hiding the modules tool of this machine needs root')
def test_no_modules_tool_and_no_right_to_install_it(tmp_path):
    script = tmp_path / 'quickstart'
    shutil.copy2(ROOT / 'quickstart', script)
    prefix = tmp_path / 'prefix'
    prefix.mkdir()
    os.chown(prefix, 65534, 65534)
    for parent in tmp_path.parents:
        if parent != pathlib.Path('/') and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    hide = ['unshare', '--mount', 'sh', '-c', 'mount -t tmpfs none /usr/share/lmod && cd / && exec "$@"', 'sh']
    env = {**clean_environ(), 'PATH': '/usr/sbin:/usr/bin:/sbin:/bin', 'HOME': '/nonexistent'}
    done = run([*hide, *NOT_ROOT, script, '--prefix', prefix], check=False, env=env)
    assert done.returncode == 1
    assert 'packages of the distribution are missing: lmod' in done.stderr
    assert re.search(r'sudo apt-get install .*lmod', done.stderr)


@pytest.mark.skipif(os.geteuid() != 0, reason='mounting a small file system needs root')
def test_small_disk_is_said_before_anything_is_done(tmp_path):
    disk = tmp_path / 'disk'
    disk.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=50m', 'tmpfs', str(disk)], check=True)
    try:
        done = quickstart('--prefix', str(disk / 'prefix'))
    finally:
        subprocess.run(['umount', '--lazy', str(disk)], check=True)
    assert done.returncode == 1 and 'MB are free' in done.stderr and '3000 MB are needed' in done.stderr


def test_two_at_once_with_one_prefix(tmp_path):
    prefix = tmp_path / 'prefix'
    prefix.mkdir()
    with open(prefix / '.lock', 'w') as lock:
        holder = subprocess.Popen(['flock', str(prefix / '.lock'), 'sleep', '30'], stdout=lock)
        try:
            run(['sh', '-c', f'for i in 1 2 3 4 5 6 7 8 9 10; do flock -n {prefix}/.lock true || exit 0; sleep 0.2; done; exit 1'])
            done = quickstart('--prefix', str(prefix))
        finally:
            holder.kill()
            holder.wait()
    assert done.returncode == 1 and 'another quickstart is running' in done.stderr
