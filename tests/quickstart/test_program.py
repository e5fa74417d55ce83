# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch/quickstart.py part by part: whose directory it takes, what it finds, what it says. No network."""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from slingtorch import gpus, lockfile, quickstart
from testbed import ROOT, clean_environ
from testbed.expected import expected
from testbed.wheels import make_wheel

NEWEST, OLDER = 'PyTorch-2.15.0-cuda-13.2.eb', 'PyTorch-2.10.0-cuda-12.8.eb'


def claim(path):
    """A prefix that nobody uses afterwards."""
    prefix, lock = quickstart.claim(str(path))
    os.close(lock)
    return prefix


def fake_command(directory, name, text):
    path = directory / name
    path.write_text('#!/bin/bash\n%s\n' % text)
    path.chmod(0o755)
    return path


# --- the prefix

def test_new_empty_and_own_directories_are_taken(tmp_path):
    (tmp_path / 'empty').mkdir()
    before = os.umask(0o002)    # as users of a group of their own have it
    try:
        for name in ('empty', 'new/deep', 'new/deep'):
            assert claim(tmp_path / name) == str(tmp_path / name)
    finally:
        os.umask(before)


@pytest.mark.parametrize('spoil, words', [
    (lambda path: (path / 'thesis.txt').write_text('x'), 'is not empty, and quickstart has not made it: it has thesis'),
    (lambda path: path.chmod(0o777), 'others may write to it'),
    (lambda path: path.chmod(0o1777), 'others may write to it'),
    (lambda path: os.chown(path, 65534, 65534), 'belongs to another user'),
    (lambda path: (path / quickstart.MARK).write_text('/elsewhere'), 'was moved: .*made for /elsewhere'),
    (lambda path: (path / quickstart.MARK).mkdir(), 'cannot be the prefix: Is a directory'),
], ids=['file', 'mode', 'sticky', 'owner', 'moved', 'directory'])
def test_directory_that_is_not_its_own(tmp_path, spoil, words):
    path = tmp_path / 'prefix'
    path.mkdir()
    if os.geteuid() != 0 and words.startswith('belongs'):
        pytest.skip('only root gives files away; remedy: run the tests as root')
    spoil(path)
    before = sorted(path.iterdir())
    with pytest.raises(quickstart.QuickstartError, match=words) as err:
        claim(path)
    assert sorted(path.iterdir()) == before
    assert re.search(r'--prefix DIR|rm -r', err.value.args[1])


@pytest.mark.parametrize('name', ['with blank', 'a:b', 'a,b', 'a$b', 'a%b', "a'b", 'a\\b', 'a\nb', '~/x', ''])
def test_impossible_prefix(tmp_path, name):
    path = name if name in ('', '~/x') else str(tmp_path / name)
    with pytest.raises(quickstart.QuickstartError, match='cannot be a prefix'):
        claim(path)
    assert list(tmp_path.iterdir()) == []


def test_what_it_started_keeps_the_lock(tmp_path):
    """quickstart alone is killed: its pip or eb goes on, and a second run must not build beside it."""
    lock = quickstart.claim(str(tmp_path / 'p'))[1]
    with subprocess.Popen(['sleep', '60'], close_fds=False) as child:
        os.close(lock)
        with pytest.raises(quickstart.QuickstartError, match='another quickstart, or what it started'):
            claim(tmp_path / 'p')
        child.kill()
    claim(tmp_path / 'p')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_what_was_started(tmp_path, number):
    program = ('import pathlib, subprocess, sys; from slingtorch import gpus, lockfile, quickstart as q\n'
               'class Popen(subprocess.Popen):\n'
               '    def wait(self, *args):\n'
               '        new.with_suffix(".new").write_text(str(self.pid)); new.with_suffix(".new").rename(new)\n'
               '        return super().wait(*args)\n'
               'new = pathlib.Path(%r); subprocess.Popen = Popen\n'
               'q.quickstart = lambda *_: q.run(["sh", "-c", "sleep 600; true"]); sys.exit(q.main(["--prefix", %r]))' % (
                   str(tmp_path / 'pid'), str(tmp_path)))
    with subprocess.Popen([sys.executable, '-c', program], stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        while not (tmp_path / 'pid').exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert 'interrupted; run the same command again' in process.communicate(timeout=240)[1]
    assert process.returncode == 130
    # who ended and waits for its parent is still listed
    state = pathlib.Path('/proc/%s/stat' % (tmp_path / 'pid').read_text().strip())
    assert not state.exists() or state.read_text().rsplit(')', 1)[1].split()[0] in 'ZX'


# --- which PyTorch

def planted(path, driver, device):
    """A machine of files with NVIDIA's driver."""
    files = {'proc/driver/nvidia/version': 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  %s  Wed\n' % driver}
    if device:
        files['dev/nvidiactl'] = ''
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)


@pytest.mark.parametrize('driver, device, cpu, name, words', [
    ('580.65.06', True, False, NEWEST, '(driver 580.65.06)'),
    ('550.90.07', True, False, OLDER, '(driver 550.90.07)'),
    ('580.65.06', True, True, gpus.CPU, '(for processors: --cpu was given)'),
    # in a container that was given no GPU
    ('580.65.06', False, False, gpus.CPU, '(for processors: driver 580.65.06, but there is no /dev/nvidiactl)'),
    ('390.157', True, False, gpus.CPU, '(for processors: driver 390.157 is too old for every wheel: '),
])
def test_pytorch_that_fits_the_driver(tmp_path, monkeypatch, capsys, driver, device, cpu, name, words):
    monkeypatch.setattr(os, 'uname', lambda: os.uname_result(('Linux', 'me', '6', '1', 'x86_64')))
    planted(tmp_path, driver, device)
    assert quickstart.choose(cpu, str(tmp_path)) == name
    assert 'PyTorch:      %s %s' % (name, words) in capsys.readouterr().out


def test_gpus_of_amd(tmp_path, capsys):
    """Their wheels are not on the package index: quickstart takes the small one, and names the other."""
    node = tmp_path / 'sys/class/kfd/kfd/topology/nodes/1/properties'
    node.parent.mkdir(parents=True)
    node.write_text('simd_count 304\n')
    assert quickstart.choose(False, str(tmp_path)) == gpus.CPU
    assert re.search(r'for these GPUs, by README.md: eb PyTorch-.*-rocm-.*\.eb', capsys.readouterr().out)


@pytest.mark.parametrize('asked, ranks', [(None, 5), (2, 2)])
def test_one_rank_on_each_gpu(tmp_path, asked, ranks):
    (tmp_path / 'bin').mkdir()
    python = str(fake_command(tmp_path / 'bin', 'python', 'echo 5'))
    assert quickstart.ranks_for(python, asked) == ranks
    with pytest.raises(quickstart.QuickstartError, match='there are 5 GPUs for 6 ranks'):
        quickstart.ranks_for(python, 6)
    fake_command(tmp_path / 'bin', 'python', 'echo False')
    with pytest.raises(quickstart.QuickstartError, match='finds no GPU that it can use'):
        quickstart.ranks_for(python, asked)


@pytest.mark.parametrize('runs, words', [
    ('1', []), ('', ['PyTorch-1.eb', '--disable-trace', '--try-amend=byte_compile=False', '--rebuild'])])
def test_what_is_installed_is_left_alone(tmp_path, monkeypatch, runs, words):
    called, locks = [], tmp_path / 'easybuild/software/.locks'
    for path in (tmp_path / 'easybuild/modules/all/PyTorch/1.lua', locks):
        path.mkdir(parents=True)
    monkeypatch.setattr(quickstart, 'ask', lambda *_: runs)
    monkeypatch.setattr(quickstart, 'run_activated', lambda prefix, script, *words: called.extend(words))
    quickstart.install_pytorch(str(tmp_path), 'PyTorch-1.eb', 'PyTorch/1')
    assert called == words and locks.exists() is bool(runs)


def test_options(monkeypatch):
    seen = []
    monkeypatch.setattr(quickstart, 'quickstart', lambda args, root: seen.append((vars(args), root)))
    assert quickstart.main([]) == quickstart.main('--cpu --ranks 48 --prefix x --python y --modules z'.split(), '/r') == 0
    assert seen == [({'prefix': f'{ROOT}/.slingtorch', 'cpu': False, 'ranks': None, 'python': None, 'modules': None}, '/'),
                    ({'prefix': 'x', 'cpu': True, 'ranks': 48, 'python': 'y', 'modules': 'z'}, '/r')]


def test_eb_or_the_training_fails(tmp_path, monkeypatch, capsys):
    """Of the environment is kept how the network is reached, not what decides what is installed where."""
    kept = 'SSL_CERT_FILE REQUESTS_CA_BUNDLE CURL_CA_BUNDLE PIP_CONFIG_FILE PIP_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_PROXY PIP_CERT \
        PIP_TIMEOUT PIP_RETRIES PIP_TRUSTED_HOST PIP_CLIENT_CERT PIP_DEFAULT_TIMEOUT PIP_EXTRA_INDEX_URL NO_PROXY CUDA_VISIBLE_DEVICES'.split()
    for name in [name for name in os.environ if name.startswith(('EASYBUILD_', 'SLINGTORCH_')) or name == 'OMP_NUM_THREADS']:
        monkeypatch.delenv(name)
    before, found = dict(os.environ), []
    monkeypatch.setattr(quickstart, 'run_activated', lambda *words: found.append([*words, dict(os.environ)]) or status)
    monkeypatch.setattr(quickstart.time, 'monotonic', lambda: 1000.0 * len(found))
    status = 3
    with pytest.raises(quickstart.QuickstartError, match='EasyBuild could not install X.eb'):
        quickstart.install_pytorch(str(tmp_path), 'X.eb', 'X')
    capsys.readouterr()     # root is told more
    for name in ('set_up_tools', 'write_configuration', 'install_pytorch'):
        monkeypatch.setattr(quickstart, name, lambda *_: None)
    os.environ.update(dict.fromkeys([*kept, 'PIP_TARGET', 'SLURM_JOB_ID', 'PYTHONPATH', 'EASYBUILD_PREFIX'], 'x'))
    try:
        options = ['--cpu', '--ranks', '3', '--modules', 'Lmod x Lua', '--prefix']
        assert quickstart.main([*options, str(tmp_path / 'p')]) == 1
        failed, status = capsys.readouterr(), 0
        assert quickstart.main([*options, str(tmp_path / 'q')]) == 0
    finally:
        os.environ.clear()
        os.environ.update(before)
    # the checkout stays as it is: nothing is compiled there
    prefix, script, environ = found[-2]
    assert {name for name, value in environ.items() if value == 'x'} == set(kept)
    assert {name: environ[name] for name in environ if name in (
        'LC_ALL PYTHONNOUSERSITE TMPDIR PIP_CACHE_DIR PIP_USER MPIEXEC_TIMEOUT OMP_NUM_THREADS PYTHONDONTWRITEBYTECODE'.split())} == {
            'LC_ALL': 'C.UTF-8', 'PYTHONNOUSERSITE': '1', 'TMPDIR': prefix + '/tmp', 'PIP_CACHE_DIR': prefix + '/cache',
            'PIP_USER': '0', 'MPIEXEC_TIMEOUT': '600', 'OMP_NUM_THREADS': '1', 'PYTHONDONTWRITEBYTECODE': '1'}
    assert failed.out.startswith('not used, quickstart has a configuration of its own: $EASYBUILD_PREFIX\nmodules tool: ')
    expected(f'{script}\n{failed.err}{capsys.readouterr().out}', 'quickstart', [
        (tmp_path, 'DIRECTORY'), (sys.executable, 'PYTHON'), (ROOT, 'BUNDLE')])


# --- EasyBuild and its environment, from tiny wheels

@pytest.fixture(scope='session')
def wheelhouse(tmp_path_factory):
    """Tiny wheels of everything that is installed, and the settings of pip that make it the only index."""
    directory = tmp_path_factory.mktemp('wheels')
    text = (ROOT / 'setup.cfg').read_text().partition('install_requires =\n')[2].partition('\n\n')[0]
    for name in re.findall(r'^ +([a-z][\w-]*)', text, re.M) + ['mpich']:
        uv = '#!/bin/sh\nexec %s "$@"\n' % lockfile.find_uv()
        files = {'easybuild-framework': {'easybuild/main.py': ''}, 'uv': {'uv-5.4.1.data/scripts/uv': uv}}.get(name)
        make_wheel(directory, name.replace('-', '_'), {'mpich': '5.0.2'}.get(name, '5.4.1'), files)
    return {'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': str(directory), 'PIP_CONFIG_FILE': os.devnull}


def test_tools_are_made_once_and_again_where_broken(tmp_path, wheelhouse, monkeypatch, capsys):
    for name, value in wheelhouse.items():
        monkeypatch.setenv(name, value)
    prefix, venv = claim(tmp_path / 'p'), tmp_path / 'p/venv'

    def makes():
        quickstart.set_up_tools(prefix)
        assert 'slingtorch ' in subprocess.check_output([venv / 'bin/slingtorch', '--version'], text=True)
        return 'installing with uv' in capsys.readouterr().out

    assert makes() and not makes()
    (venv / 'bin/python').unlink()
    assert makes()

    def refuse(*_, **__):
        raise RuntimeError('it is made again')
    monkeypatch.setattr(shutil, 'rmtree', refuse)
    quickstart.set_up_tools(prefix)
    with monkeypatch.context() as other, pytest.raises(RuntimeError, match='made again'):
        other.setattr(sys, 'version', 'another')
        quickstart.set_up_tools(prefix)
    next(venv.glob('lib/python3*/site-packages/easybuild/main.py')).unlink()
    with pytest.raises(RuntimeError, match='made again'):
        quickstart.set_up_tools(prefix)


def test_index_out_of_reach(tmp_path, monkeypatch):
    for name, value in (('INDEX_URL', 'http://127.0.0.1:9/simple'), ('CONFIG_FILE', os.devnull), ('RETRIES', '0')):
        monkeypatch.setenv('PIP_' + name, value)
    monkeypatch.delenv('PIP_FIND_LINKS', raising=False)
    with pytest.raises(quickstart.QuickstartError, match='packages for .*/venv could not be installed; .* -m pip said:') as err:
        quickstart.set_up_tools(claim(tmp_path / 'p'))
    assert 'PIP_INDEX_URL' in err.value.args[-1] and not (tmp_path / 'p/venv/made-of').exists()


def test_pip_configuration_that_sends_packages_elsewhere_or_is_none(tmp_path, wheelhouse, monkeypatch):
    """Of a centre's file pip and uv take the index; what says where packages go has no say."""
    config = tmp_path / 'pip.conf'
    config.write_text('[global]\nno-index = true\nfind-links = %s\nuser = true\n' % wheelhouse['PIP_FIND_LINKS'])
    monkeypatch.setenv('PIP_CONFIG_FILE', str(config))
    for name in ('PIP_FIND_LINKS', 'PIP_NO_INDEX'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('PIP_USER', '0')     # as quickstart does
    quickstart.set_up_tools(claim(tmp_path / 'p'))
    assert list((tmp_path / 'p/venv').glob('lib/python3*/site-packages/rich.py'))
    config.write_text('no section\n')
    shutil.rmtree(tmp_path / 'p/venv')
    with pytest.raises(RuntimeError, match='(?s)pip cannot read its configuration: .*pip.conf.*Correct that file'):
        quickstart.set_up_tools(claim(tmp_path / 'p'))


# --- the file 'activate'

@pytest.fixture
def prefix(tmp_path, lmod):
    """A prefix with its configuration, whose environment is that of the tests."""
    path = tmp_path / 'p'
    claim(path)
    (path / 'venv/bin').mkdir(parents=True)
    for name in ('slingtorch', 'eb'):
        (path / 'venv/bin' / name).symlink_to(shutil.which(name))
    quickstart.write_configuration(str(path), 'Lmod %s Lua' % lmod.init.partition(' ')[2])
    return path


def source(prefix, script='true', **env):
    """Source 'activate' in a shell that also has other things in its environment."""
    return subprocess.run(['bash', '--noprofile', '--norc', '-c', '. %s/activate && %s' % (prefix, script)],
                          env={**clean_environ(), **env}, text=True, capture_output=True, cwd='/')


def test_activate_is_one_clean_configuration(prefix, tmp_path):
    for name in ('xdg/easybuild/config.cfg', 'etc/easybuild.d/site.cfg'):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text('[config]\ninstallpath-software = /elsewhere\n')
    done = source(prefix, 'eb --show-config && type -t module', XDG_CONFIG_HOME=str(tmp_path / 'xdg'),
                  XDG_CONFIG_DIRS='/nonexistent:%s/etc' % tmp_path, EASYBUILD_PREFIX='/other', SLINGTORCH_SITE='nonsense')
    assert done.returncode == 0, done.stderr
    assert '/elsewhere' not in done.stdout and '/other' not in done.stdout
    assert str(prefix / 'easybuild') in done.stdout and str(ROOT / 'hooks/slingshot_hooks.py') in done.stdout
    assert done.stdout.endswith('function\n')
    assert (prefix / 'easybuild.cfg').read_text().partition('allow-use')[0] == (
        f'[config]\nprefix = {prefix}/easybuild\ntmpdir = {prefix}/tmp\nmodules-tool = Lmod\nmodule-syntax = Lua\n')
    assert f'export SLINGTORCH_CACHE_ROOT={prefix}/tmp\n' in (prefix / 'activate').read_text()


def test_activate_passes_an_error_on(prefix):
    (prefix / 'venv/bin/slingtorch').unlink()
    fake_command(prefix / 'venv/bin', 'slingtorch', 'echo "slingtorch: error: wrong" >&2; exit 1')
    done = source(prefix, 'echo went on')
    assert (done.returncode, done.stdout, done.stderr) == (1, '', 'slingtorch: error: wrong\n')
