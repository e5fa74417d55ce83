# SPDX-License-Identifier: GPL-2.0-only
"""A fix of a runscript reaches what is installed: `eb --module-only --force`, `slingtorch status`, `--version`."""
import json
import os
import stat
import subprocess
import sys
import time

import pytest

from testbed import ORDINARY, ROOT, copy_of_checkout, forkedeb, run, said, smallimage, stagedenv
from testbed.easybuild import BIN, EasyBuild

RENEW = ('--module-only', '--force')
KILL = """
import os, signal
rename = os.rename
def killed(source, target):
    if os.path.basename(target) == os.environ['KILLED_AT']:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
os.rename = killed
"""


class Installed:
    """An environment with an image and a container, installed from a copy of the bundle that tests may change.

    :ivar bundle: that copy
    :ivar venv: where the environment is
    :ivar container: where the container is
    """

    def __init__(self, directory, tool):
        self.bundle = copy_of_checkout(directory / 'bundle')
        self.eb = EasyBuild(directory / 'eb', tool)
        for name, value in self.eb.env.items():
            if name.startswith('EASYBUILD_'):
                self.eb.env[name] = value.replace(f'{ROOT}/', f'{self.bundle}/')
        sources = directory / 'sources'
        sources.mkdir()
        smallimage.fake_sif(sources / 'small-1.0.sif')
        self.eb.env.update(EASYBUILD_SOURCEPATH=f'{sources}:{self.eb.env["EASYBUILD_SOURCEPATH"]}',
                           PYTHONPATH=str(self.bundle))
        tiny = stagedenv.write_easyconfig(directory)
        small = smallimage.easyconfig(directory, sources=['small-1.0.sif'], checksums=[None], preset_venv='mine')
        self.easyconfigs = [str(tiny.easyconfig), str(small)]
        self.eb(*self.easyconfigs, env=tiny.pip_env)
        self.venv = self.eb.prefix / 'software/PyTorch/0.1-tiny'
        self.container = self.eb.prefix / 'software/Small/1.0'
        self.roots = [self.venv, self.container]
        self.fixes = 0

    def fix(self, name='get-master'):
        """Change one line of a script in the bundle; the line."""
        self.fixes += 1
        line = f'# fix {self.fixes}\n'
        with open(self.bundle / 'runscripts' / name, 'a') as script:
            script.write(line)
        return line

    def ordinary_eb(self, *args, env=(), **kwargs):
        """`eb` as somebody who may not write where permissions say so."""
        return run([*ORDINARY, BIN / 'eb', *args], env={**self.eb.env, **dict(env)}, cwd=self.eb.prefix, **kwargs)

    def status(self, *args, prefix=()):
        if not prefix:
            return forkedeb.slingtorch(['status', *args], self.eb.env, self.eb.prefix)
        return run([*prefix, sys.executable, '-m', 'slingtorch', 'status', *args], env=self.eb.env, cwd=self.eb.prefix,
                   check=False)

    def states(self):
        """{module: state and reasons} of everything that is installed."""
        said = json.loads(self.status('--json').stdout)
        assert said['modules'] == str(self.eb.modulepath) and set(said) == {
            'slingtorch', 'modules', 'installations', 'renew', 'unread'}
        return {entry['module']: [entry['state'], *entry['why']] for entry in said['installations']}


@pytest.fixture(scope='module')
def installed(tmp_path_factory, lmod):
    return Installed(tmp_path_factory.mktemp('updating'), lmod)


def copies(root):
    return sorted(path.name for path in (root / '.runscripts').iterdir())


def test_one_line_reaches_all(installed):
    """Runscripts, commands of a container, and with them a staged image: it has none of its own."""
    line, command = installed.fix(), installed.fix('container/in-container')
    installed.eb(*installed.easyconfigs, *RENEW)
    for root in installed.roots:
        assert (root / 'runscripts/get-master').read_text().endswith(line)
    assert (installed.container / 'bin/in-container').read_text().endswith(command)
    packed = run(['unsquashfs', '-l', installed.venv / 'environment.squashfs']).stdout
    assert 'squashfs-root/bin/python' in packed and 'get-master' not in packed and '.runscripts' not in packed
    assert installed.states() == {'PyTorch/0.1-tiny': ['current'], 'Small/1.0': ['current']}


def test_a_rank_that_starts_meanwhile_keeps_its_files(installed, tmp_path):
    fifo, script = tmp_path / 'fifo', installed.bundle / 'runscripts/lib/master.bash'
    os.mkfifo(fifo)
    text, network = script.read_text(), script.parent / 'network.bash'
    script.write_text(f'read -r _ < {fifo}\n{text}')
    installed.eb(installed.easyconfigs[0], *RENEW)
    command = [installed.venv / 'runscripts/conda-python-distributed', '-c', 'import os; print(os.getcwd())']
    with subprocess.Popen(command, env={'PATH': f'{installed.venv}/bin:/usr/bin:/bin'}, cwd=tmp_path, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as rank:
        with open(fifo, 'w') as word:   # it has come as far as that file
            before = network.read_text()
            network.write_text(before + 'echo "the newer file"\n')
            script.write_text(text)
            installed.eb(installed.easyconfigs[0], *RENEW)
            word.write('go on\n')
        assert rank.stdout.read() == f'{tmp_path}\n' and rank.wait() == 0
    assert 'the newer file' in run(command, env={'PATH': f'{installed.venv}/bin:/usr/bin:/bin'}).stdout
    network.write_text(before)


def test_copies_are_kept_for_long(installed):
    """A container that runs has the earlier copy mounted."""
    earlier = (installed.container / 'runscripts').resolve()
    old, younger = (installed.container / '.runscripts' / name for name in ('old', 'younger'))
    for path, days in ((old, 31), (younger, 29), (earlier.parent, 99)):     # it is kept from now on, however old it is
        path.mkdir(exist_ok=True)
        os.utime(path, (time.time() - days * 24 * 3600,) * 2)
    line = installed.fix()
    installed.eb(installed.easyconfigs[1], *RENEW)
    assert not (earlier / 'get-master').read_text().endswith(line) and not old.exists() and younger.exists()
    assert (installed.container / 'runscripts').resolve() != earlier


@pytest.mark.parametrize('where', ['container.conf', 'runscripts', '1.0.lua'])
def test_killed_in_the_middle(installed, tmp_path, lmod, where):
    """Runscripts, module and each command are the old or the new one, and the same command goes on."""
    (tmp_path / 'sitecustomize.py').write_text(KILL)
    before, line = (installed.container / 'runscripts').resolve(), installed.fix()
    command = installed.fix('container/in-container')
    killed = installed.ordinary_eb(installed.easyconfigs[1], *RENEW, check=False, env={
        'KILLED_AT': where, 'PYTHONPATH': f'{tmp_path}:{installed.bundle}'})
    assert killed.returncode == -9
    after = (installed.container / 'runscripts').resolve()
    assert (after == before) == (where != '1.0.lua')
    assert (after / 'get-master').read_text().endswith(line) == (where == '1.0.lua')
    new_command = (installed.container / 'bin/in-container').read_text().endswith(command)
    assert new_command == (where in ['runscripts', '1.0.lua'])
    # a job that loads the module at this moment gets a whole one
    assert (installed.eb.modulepath / 'Small/.1.0.lua.new').exists() == (where == '1.0.lua')
    env = lmod.load('Small/1.0', modulepath=[installed.eb.modulepath])
    assert env['RUNSCRIPTS'] == f'{installed.container}/runscripts'
    assert installed.states()['Small/1.0'][0] == ('current' if where == '1.0.lua' else 'different')
    # what eb's message about it says
    lock, = installed.eb.prefix.glob('software/.locks/*')
    lock.rmdir()
    installed.eb(installed.easyconfigs[1], *RENEW)
    assert installed.states()['Small/1.0'] == ['current']


def test_read_only(installed):
    """What belongs to the owner and is read-only is renewed and stays so; without the right only the module is made."""
    for root in installed.roots:
        run(['chmod', '-R', 'a-w', root])
    line = installed.fix()
    installed.ordinary_eb(*installed.easyconfigs, *RENEW, '--read-only-installdir')
    for root in installed.roots:
        assert (root / 'runscripts/get-master').read_text().endswith(line)
        for path in [root, root / '.runscripts', root / 'bin', (root / 'runscripts').resolve(),
                     root / 'runscripts/get-master', root / 'runscripts/lib']:
            assert not path.stat().st_mode & 0o222, path
    run(['chmod', '-R', 'u+w', *installed.roots])


def test_owner_alone_may_renew(installed):
    """Somebody with modules of his own for an installation of the centre's."""
    if os.geteuid():
        pytest.skip('only root can give a directory away')
    installed.fix()
    before = copies(installed.venv)
    run(['chown', '12345', installed.venv])
    run(['chmod', '755', installed.venv])
    done = run(['setpriv', '--bounding-set=-dac_override,-dac_read_search,-fowner', BIN / 'eb',
                installed.easyconfigs[0], *RENEW], env=installed.eb.env, cwd=installed.eb.prefix)
    assert copies(installed.venv) == before
    assert 'Only the module was renewed, not the runscripts' in ' '.join(done.stderr.split())
    run(['chown', '0', installed.venv])


def test_permissions_are_those_of_an_installation(installed):
    installed.eb(installed.easyconfigs[0], *RENEW, '--group-writable-installdir')
    directory = (installed.venv / 'runscripts').resolve()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o775
    assert stat.S_IMODE((directory / 'get-master').stat().st_mode) == 0o775


@pytest.mark.parametrize('options', [[*RENEW, '-x'], ['--sanity-check-only'], [*RENEW, '--fetch']])
def test_nothing_is_renewed(installed, options):
    installed.fix()
    before = copies(installed.venv)
    # EasyBuild 5.4 has no modules tool with --fetch
    done = installed.eb(installed.easyconfigs[0], *options, check=False)
    assert copies(installed.venv) == before and 'Nothing is installed' not in said(done)


def test_status(installed):
    """A table for people, and a command that renews all when it is pasted."""
    installed.eb(*installed.easyconfigs, *RENEW)
    done = installed.status()
    assert done.returncode == 0 and done.stderr == '' and ' eb ' not in done.stdout
    installed.fix()
    (installed.venv / 'runscripts/cpu-bind').write_text('#!/bin/bash\n')
    done = installed.status()
    assert done.returncode == 3
    rows = done.stdout.splitlines()
    assert rows[0].split() == ['module', 'slingtorch', 'runscripts', 'site', 'values', 'state']
    assert 'not as in the bundle: get-master; edited after installation: cpu-bind' in rows[1] and ' local ' in rows[1]
    command = rows[-1]
    assert command.startswith('eb --module-only --force ')
    run(['bash', '-c', command], env=installed.eb.env, cwd=installed.eb.prefix)
    assert installed.states() == {'PyTorch/0.1-tiny': ['current'], 'Small/1.0': ['current']}


def test_status_says_what_it_could_not_read(installed):
    closed = installed.eb.modulepath / 'Closed'
    closed.mkdir(mode=0)
    (installed.container / '.runscripts').chmod(0)
    done = installed.status(prefix=ORDINARY)
    (installed.container / '.runscripts').chmod(0o755)
    closed.rmdir()
    assert done.returncode == 3 and f'{closed}: Permission denied' in done.stderr
    assert 'Permission denied' in done.stdout and 'Small/1.0' in done.stdout


def test_version(installed):
    record = json.loads((installed.venv / 'runscripts/lib/installed.json').read_text())
    assert record['site'] == 'local' and record['easyconfig'] == 'PyTorch-0.1-tiny.eb'
    scripts = [installed.venv / 'runscripts' / name for name in (
        'conda-python-distributed', 'conda-python-simple', 'cpu-bind', 'get-master', 'with-spares')]
    for script in [*scripts, installed.venv / 'bin/extend-venv-activate']:
        assert run([script, '--version']).stdout.splitlines() == [
            f'slingtorch {record["slingtorch"]}', f'runscripts {record["runscripts"]}',
            f'site local, values {record["values"]}', 'easyconfig PyTorch-0.1-tiny.eb'], script
    for name in ('check-container', 'in-container', 'list-packages', 'make-squashfs', 'unmake-squashfs'):
        assert 'easyconfig Small-1.0.eb' in run([installed.container / 'bin' / name, '--version']).stdout
