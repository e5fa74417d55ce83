"""The hooks in real runs of eb: the module files that come out, and the locks of runs that are killed or meet."""
import json
import os
import signal
import subprocess
import time

import pytest

from testbed import easybuild

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
    assert done.stdout.count('slingtorch: site derecho: PyTorch-9.9.eb: 10 site values') == 1
    assert 'group alt_read, which needs: mpiexec --disable_rdzv_get' in done.stdout

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
    assert not list(tmp_path.rglob('owner.json'))


def test_other_software_is_left_alone(lmod, tmp_path):
    eb = easybuild.EasyBuild(tmp_path / 'eb', lmod, ['--site', 'derecho'])
    done = eb(write_easyconfig(tmp_path, name='zlib'))
    assert 'slingtorch' not in done.stdout + done.stderr
    assert 'pushenv' not in (eb.modulepath / 'zlib/9.9.lua').read_text()


def test_wrong_site_stops_eb(lmod, tmp_path):
    eb = easybuild.EasyBuild(tmp_path / 'eb', lmod)
    done = eb(write_easyconfig(tmp_path), env={'SLINGTORCH_SITE': 'nonsense'}, check=False)
    assert done.returncode != 0
    assert "There is no site 'nonsense'. The sites are: cirrus, derecho" in done.stdout + done.stderr


# --- locks

class Gate:
    """An installation that stops in its install step until the gate is opened."""

    def __init__(self, tmp_path, eb):
        self.eb = eb
        self.gate = tmp_path / 'gate'
        self.started = tmp_path / 'started'
        self.gate.write_text('')
        command = "%s && touch %s && while test -e %s; do sleep 0.1; done" % (INSTALL, self.started, self.gate)
        self.path = write_easyconfig(tmp_path, command=command)
        self.processes = []

    def run(self, *args):
        """Start eb in the background."""
        process = subprocess.Popen([str(easybuild.BIN / 'eb'), str(self.path)] + list(args), env=self.eb.env,
                                   cwd=str(self.eb.prefix), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, universal_newlines=True, start_new_session=True)
        self.processes.append(process)
        return process

    def start(self, *args):
        """Start eb in the background and return when it is in its install step."""
        process = self.run(*args)
        deadline = time.time() + 60
        while not self.started.exists():
            assert process.poll() is None, process.stdout.read()
            assert time.time() < deadline, 'eb did not start its install step'
            time.sleep(0.1)
        return process

    def open(self):
        """Let installations go on."""
        if self.gate.exists():
            self.gate.unlink()

    @property
    def owner(self):
        """Number of the process that holds the lock, as it says there."""
        return json.loads((self.locks[0] / 'owner.json').read_text())['pid']

    def close(self):
        """End what is still running."""
        self.open()
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.stdout.close()
            process.wait()

    @property
    def locks(self):
        """Paths of all locks."""
        return list((self.eb.prefix / 'software' / '.locks').glob('*'))


@pytest.fixture
def gate(tmp_path, lmod):
    gate = Gate(tmp_path, easybuild.EasyBuild(tmp_path / 'eb', lmod))
    yield gate
    gate.close()


def test_killed_run_is_done_again(gate):
    """kill -9 leaves EasyBuild's lock; the next eb sees that its owner is gone, says so, and installs."""
    process = gate.start()
    assert [lock.name for lock in gate.locks[0].iterdir()] == ['owner.json']
    owner = gate.owner
    os.kill(owner, signal.SIGKILL)
    process.wait(timeout=60)
    assert len(gate.locks) == 1
    assert not (gate.eb.modulepath / 'PyTorch/9.9.lua').exists()
    gate.open()

    done = gate.eb(gate.path)
    assert 'an earlier installation of PyTorch/9.9 was killed (process %d of ' % owner in done.stdout
    assert (gate.eb.modulepath / 'PyTorch/9.9.lua').exists()
    assert gate.locks == []


def test_terminated_run_leaves_no_lock(gate):
    """EasyBuild itself cleans up after a polite signal: the file in the lock is no obstacle."""
    process = gate.start()
    os.kill(gate.owner, signal.SIGTERM)
    # EasyBuild waits for the command that is running
    gate.open()
    process.wait(timeout=60)
    assert gate.locks == []


def test_two_at_once(gate):
    """The second one says who installs; the first one is not disturbed."""
    process = gate.start()
    done = gate.eb(gate.path, check=False)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    for text in ('PyTorch/9.9 is being installed already', 'process %d on' % gate.owner, '--wait-on-lock-limit=3600'):
        assert text in output
    assert 'killed' not in output
    gate.open()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert gate.locks == []


def test_second_one_may_wait(gate):
    """With EasyBuild's own option the second run waits for the first."""
    process = gate.start()
    waiting = gate.run('--wait-on-lock-limit=60', '--wait-on-lock-interval=1')
    time.sleep(5)
    gate.open()
    for run in (process, waiting):
        out, _ = run.communicate(timeout=60)
        assert run.returncode == 0, out
    assert 'waiting 1 seconds' in out


def test_lock_without_a_name(gate):
    """A lock that was not made under our hooks: nothing is removed, and the error names it and the remedies."""
    gate.open()
    name = str(gate.eb.prefix / 'software/PyTorch/9.9').replace('/', '_') + '.lock'
    lock = gate.eb.prefix / 'software' / '.locks' / name
    lock.mkdir(parents=True)
    os.utime(str(lock), (1, 1))
    done = gate.eb(gate.path, check=False)
    assert done.returncode != 0
    for text in (str(lock), 'minutes ago', 'eb --ignore-locks'):
        assert text in done.stdout + done.stderr
    assert lock.is_dir()
    gate.eb(gate.path, '--ignore-locks')
    assert (gate.eb.modulepath / 'PyTorch/9.9.lua').exists()
