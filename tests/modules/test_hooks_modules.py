# SPDX-License-Identifier: GPL-2.0-only
"""The hooks in real runs of eb: the module files that come out, and the locks of runs that are killed or meet."""
import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess

import pytest

import testbed
from testbed import easybuild, missing

EASYCONFIG = """
easyblock = 'Binary'
name = '%(name)s'
version = '9.9'
homepage = 'https://example.org'
description = "a tiny one"
toolchain = SYSTEM
sources = []
extract_sources = True
install_cmd = "%(command)s"
sanity_check_paths = {'files': ['bin/tool'], 'dirs': []}
%(more)s
moduleclass = 'ai'
"""
INSTALL = "mkdir -p %(installdir)s/bin && touch %(installdir)s/bin/tool"


def write_easyconfig(directory, name='PyTorch', command=INSTALL, more=''):
    """Write an easyconfig that installs an empty file; its path."""
    path = directory / ('%s-9.9.eb' % name)
    path.write_text(EASYCONFIG % {'name': name, 'command': command, 'more': more})
    return path


# --- modules

@pytest.fixture(params=['lmod, Lua', 'lmod, Tcl', 'envmodules, Tcl'])
def tool_and_syntax(request):
    tool, syntax = request.param.split(', ')
    return request.getfixturevalue(tool), syntax


def show(prefix):
    """Shell code that prints some variables."""
    return ''.join('echo "%s %s=${%s-unset}"\n' % (prefix, name, name) for name in
                   ('NCCL_SOCKET_IFNAME', 'FI_MR_CACHE_MONITOR', 'SLINGTORCH_MULTINODE_NCCL_NET', 'NCCL_CROSS_NIC',
                    'FI_CXI_RDZV_PROTO', 'NCCL_NET'))


def test_module(tool_and_syntax, tmp_path):
    """Loading gives the site's values, unloading gives the user's own back."""
    tool, syntax = tool_and_syntax
    eb = easybuild.EasyBuild(tmp_path / 'eb', tool, ['--site', 'derecho', '--with', 'alt_read'])
    done = eb(write_easyconfig(tmp_path, more="modextravars = {'NCCL_CROSS_NIC': '2'}"), '--module-syntax=%s' % syntax)
    assert done.stdout.count('slingtorch: site derecho: PyTorch-9.9.eb: 11 site values') == 1
    assert 'group alt_read, which needs: mpiexec --disable-rdzv-get' in done.stdout

    amended = eb('PyTorch-9.9.eb', '--try-amend=versionsuffix=-mine', '--module-only', '--force', cwd=tmp_path)
    said = [line for line in amended.stdout.splitlines() if 'slingtorch' in line]
    assert len(said) == 1 and 'slingtorch: site derecho: PyTorch-9.9-mine.eb: 11 site values' in said[0]

    module_file = eb.modulepath / ('PyTorch/9.9' + ('.lua' if syntax == 'Lua' else ''))
    text = module_file.read_text()
    expected = {'Lua': 'pushenv("FI_MR_CACHE_MONITOR", "userfaultfd")', 'Tcl': 'pushenv\tFI_MR_CACHE_MONITOR'}
    assert expected[syntax] in text
    assert 'NCCL_NET_GDR_LEVEL' not in text

    environ = {'NCCL_SOCKET_IFNAME': 'eth7', 'NCCL_CROSS_NIC': '0'}
    if tool.name == 'Lmod' and syntax == 'Tcl':
        # Lmod 8.6 with its built-in Tcl interpreter forgets the former value of pushenv (docs/activation.md)
        environ['LMOD_FAST_TCL_INTERP'] = 'no'
    script = 'module load PyTorch || exit 1\n%s\nmodule unload PyTorch || exit 1\n%s' % (show('in'), show('out'))
    done = tool.bash(script, modulepath=[eb.modulepath], env=environ)
    assert done.stdout.splitlines() == [
        'in NCCL_SOCKET_IFNAME=hsn', 'in FI_MR_CACHE_MONITOR=userfaultfd',
        'in SLINGTORCH_MULTINODE_NCCL_NET=AWS Libfabric', 'in NCCL_CROSS_NIC=2', 'in FI_CXI_RDZV_PROTO=alt_read',
        'in NCCL_NET=unset',
        # NCCL_CROSS_NIC is the easyconfig's own entry, without pushenv
        'out NCCL_SOCKET_IFNAME=eth7', 'out FI_MR_CACHE_MONITOR=unset', 'out SLINGTORCH_MULTINODE_NCCL_NET=unset',
        'out NCCL_CROSS_NIC=unset', 'out FI_CXI_RDZV_PROTO=unset', 'out NCCL_NET=unset',
    ]


def test_module_only_gives_the_values_too(lmod, tmp_path):
    eb = easybuild.EasyBuild(tmp_path / 'eb', lmod, ['--site', 'lumi'])
    eb(write_easyconfig(tmp_path), '--module-only', '--force')
    assert 'pushenv("HSA_FORCE_FINE_GRAIN_PCIE", "1")' in (eb.modulepath / 'PyTorch/9.9.lua').read_text()


def test_dry_run_shows_the_values(lmod, tmp_path):
    eb = easybuild.EasyBuild(tmp_path / 'eb', lmod, ['--site', 'lumi'])
    done = eb(write_easyconfig(tmp_path), '-x')
    assert 'site lumi: PyTorch-9.9.eb' in done.stdout
    assert 'pushenv("NCCL_SOCKET_IFNAME", "hsn")' in done.stdout
    assert not list(tmp_path.rglob('*.holder'))


def test_other_software_is_left_alone(lmod, tmp_path):
    eb = easybuild.EasyBuild(tmp_path / 'eb', lmod, ['--site', 'derecho'])
    done = eb(write_easyconfig(tmp_path, name='zlib'))
    assert 'slingtorch' not in done.stdout + done.stderr
    assert 'pushenv' not in (eb.modulepath / 'zlib/9.9.lua').read_text()


def test_wrong_site_stops_eb(lmod, tmp_path):
    eb = easybuild.EasyBuild(tmp_path / 'eb', lmod)
    done = eb(write_easyconfig(tmp_path), env={'SLINGTORCH_SITE': 'nonsense'}, check=False)
    assert done.returncode != 0
    assert "There is no site 'nonsense'. The sites are: " in done.stdout + done.stderr


# --- locks

class Gate:
    """An installation whose install step waits for something to be written into a pipe."""

    def __init__(self, tmp_path, eb):
        self.eb = eb
        self.pipe, self.started = tmp_path / 'pipe', tmp_path / 'started'
        os.mkfifo(self.pipe)
        os.mkfifo(self.started)
        command = '%s && echo $PPID $$ > %s && read line < %s' % (INSTALL, self.started, self.pipe)
        self.waiting = write_easyconfig(tmp_path, command=command)
        self.path = write_easyconfig(tmp_path / 'again', command=INSTALL)
        self.module_file = self.eb.modulepath / 'PyTorch/9.9.lua'
        self.locks = self.eb.prefix / 'software/.locks'
        self.processes = []

    def run(self, path, *args):
        """Start eb in the background."""
        process = subprocess.Popen([str(easybuild.BIN / 'eb'), str(path), *args], env=self.eb.env, cwd=self.eb.prefix,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True, start_new_session=True)
        self.processes.append(process)
        return process

    def start(self):
        """Start eb in the background: what was started, eb itself and its install step, once that runs."""
        return [self.run(self.waiting), *map(int, self.started.read_text().split())]

    def open(self):
        """Let the installation go on."""
        self.pipe.write_text('go\n')

    def refused(self):
        """What another eb says, which must not install."""
        done = self.eb(self.path, check=False)
        assert done.returncode != 0
        assert not self.module_file.exists()
        return ' '.join((done.stdout + done.stderr).split())

    def close(self):
        """End what is still running."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()
            process.wait()


@pytest.fixture
def gate(tmp_path, lmod):
    (tmp_path / 'again').mkdir()
    gate = Gate(tmp_path, easybuild.EasyBuild(tmp_path / 'eb', lmod))
    yield gate
    gate.close()


def test_killed_run_is_done_again(gate):
    """kill -9 leaves EasyBuild's lock; the next eb sees that nobody holds it any more, says so, and installs."""
    process, pid, _ = gate.start()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert list(gate.locks.glob('*.lock')) and not gate.module_file.exists()

    done = gate.eb(gate.path)
    assert 'an earlier installation of PyTorch/9.9 was killed (process %d of user ' % pid in done.stdout
    assert gate.module_file.exists()
    assert not list(gate.locks.iterdir())


def test_what_a_killed_run_has_started_holds_the_lock(gate):
    """`eb` alone is killed, and what it started still writes: nobody else installs there before it has ended."""
    process, pid, child = gate.start()
    os.kill(pid, signal.SIGKILL)
    out = gate.refused()
    assert 'by process %d of user ' % pid in out and re.search(r'left behind: [\d ]*\b%d\b' % child, out)
    os.kill(child, 0)
    gate.open()
    process.communicate(timeout=60)     # its output ends with the last one that could write to it
    assert 'was killed' in gate.eb(gate.path).stdout
    assert gate.module_file.exists()


def test_terminated_run_leaves_no_lock(gate):
    """EasyBuild itself cleans up after a polite signal, and the next run has nothing to say."""
    process, pid, _ = gate.start()
    os.kill(pid, signal.SIGTERM)
    # EasyBuild waits for the command that is running
    gate.open()
    process.communicate(timeout=60)
    assert not list(gate.locks.glob('*.lock'))
    assert 'was killed' not in gate.eb(gate.path).stdout


def test_two_at_once(gate):
    """The second one says who installs; the first one is not disturbed."""
    process, pid, _ = gate.start()
    out = gate.refused()
    assert 'PyTorch/9.9 is being installed already, by process %d of user ' % pid in out
    assert ' on %s. ' % socket.gethostname() in out and 'left behind' not in out and '--wait-on-lock-limit=3600' in out
    assert 'killed' not in out
    gate.open()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert not list(gate.locks.iterdir())


def test_second_one_may_wait(gate):
    """With EasyBuild's own option the second run waits, also for what a killed one has started."""
    process, pid, _ = gate.start()
    os.kill(pid, signal.SIGKILL)
    waiting = gate.run(gate.path, '--wait-on-lock-limit=60', '--wait-on-lock-interval=1')
    lines = iter(waiting.stdout.readline, '')
    assert any('PyTorch/9.9 is being installed by process %d' % pid in line for line in lines)
    gate.open()
    out = waiting.stdout.read()     # communicate() would lose what was read ahead with that line
    assert waiting.wait(timeout=60) == 0, out
    assert gate.module_file.exists()


def test_each_command_of_an_installation_is_marked(gate, tmp_path):
    """After a module load as well, as before extensions: EasyBuild goes back to an earlier environment there."""
    seen = 'env | grep ^SLINGTORCH_INSTALLING=process'
    gate.eb(write_easyconfig(tmp_path, command='%s && %s' % (INSTALL, seen), more="sanity_check_commands = ['%s']" % seen))


def test_what_an_installation_leaves_running_holds_no_lock(gate, tmp_path):
    """A build server that is started in passing is nobody's installation any more."""
    command = '%s && { sleep 600 > %s 2>&1 & } && echo $! > %s' % (INSTALL, os.devnull, tmp_path / 'daemon')
    gate.eb(write_easyconfig(tmp_path, command=command))
    daemon = int((tmp_path / 'daemon').read_text())
    try:
        os.kill(daemon, 0)
        gate.eb(gate.path, '--rebuild')
    finally:
        os.kill(daemon, signal.SIGKILL)


@pytest.mark.parametrize('holder', [None, 'process 1 of user somebody, since 2026-11-01 12:00:00, on elsewhere'])
def test_lock_that_cannot_be_judged(gate, holder):
    """Made without our hooks or on another host: nothing is removed, EasyBuild refuses, and who and where is said."""
    lock = gate.locks / ((str(gate.eb.prefix / 'software/PyTorch/9.9').replace('/', '_')) + '.lock')
    lock.mkdir(parents=True)
    if holder:
        pathlib.Path('%s.holder' % lock).write_text(holder)
    out = gate.refused()
    assert 'the lock of PyTorch/9.9 is held by %s' % (holder or 'a run that left no name') in out
    assert 'remove %s or use --ignore-locks' % lock in out
    assert 'Lock %s already exists, aborting!' % lock in out
    assert lock.is_dir()
    assert pathlib.Path('%s.holder' % lock).read_text() == (holder or '')
    gate.eb(gate.path, '--ignore-locks')
    assert gate.module_file.exists()


def test_no_flock_here(gate):
    """On a file system without flock EasyBuild's own lock stands alone."""
    strace = shutil.which('strace') or missing('strace')
    done = testbed.run([strace, '-f', '-qq', '-o', os.devnull, '-e', 'inject=flock:error=ENOSYS', easybuild.BIN / 'eb',
                        gate.path], env=gate.eb.env, cwd=gate.eb.prefix)
    assert 'slingtorch: the lock' not in done.stdout + done.stderr
    assert gate.module_file.exists()
