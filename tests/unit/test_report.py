# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch report: what a bug report needs is in it, and of files only those that are named, each shown before."""
import os
import platform
import re
import stat
import sys
import types

import pytest

from slingtorch import __version__, cli
from slingtorch.commands import report
from slingtorch.job.machine import Machine
from testbed import ROOT, raising
from testbed.expected import expected

SITE = cli.site_text


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job's directory, in which the test is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'slurm-1.out').write_bytes(b'begin\r\n\x1b[1mNCCL WARN all is lost\x1b[0m\n\x1b]0;title\x07caf\xe9\a\nrank 3 died\n'
                                           + 5000 * b'\0' + b'and this\n')     # of a node that crashed
    (tmp_path / 'check.json').write_text('{"format": 1}')
    (tmp_path / 'long.log').write_text('first line\n' + 'a line\n' * 10 + 'last line')
    os.mkfifo(tmp_path / 'pipe.log')
    for name in ('PyTorch', 'Horovod', 'gcc'):
        (tmp_path / f'{name}.lua').write_text(f'-- {name}\n')
    return tmp_path


@pytest.fixture
def told(job, monkeypatch, capsys):
    """Run it with these words: (exit status, output, what was asked, the report)."""
    def run(*words, answer=None, modules=('gcc', 'PyTorch', 'Horovod')):
        asked = []
        monkeypatch.setattr('builtins.input', lambda text: asked.append(text) or answer)
        monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(isatty=lambda: answer is not None))
        monkeypatch.setattr(report, 'versions', lambda: 'versions')
        monkeypatch.setattr(report.time, 'strftime', lambda form, now: form + ' of %d' % len(now))
        monkeypatch.setattr(cli, 'site_text', lambda: 'a site')
        environ = {'LOADEDMODULES': ':'.join(f'{name}/1' for name in modules), 'NOT_OURS': 'x', 'SINGULARITYENV_KEY': 'x',
                   'NCCL_DEBUG': 'INFO', 'EASYBUILD_X': 'two\nlines', 'RUNSCRIPTS': '/r', 'MY_RUNSCRIPTS': '/m', 'FI_PROVIDER': 'cxi',
                   '_LMFILES_': ':'.join(f'{job}/{name}.lua' for name in modules)}
        with monkeypatch.context() as planted:
            planted.setattr(os, 'environ', environ)
            status = cli.main(['report', *map(str, words)])
        path = job / 'slingtorch-report.txt'
        return status, capsys.readouterr(), asked, path.read_text() if path.exists() else None
    return run


def test_report(told, job, monkeypatch):
    monkeypatch.setattr(report, 'HEAD_BYTES', 15)
    monkeypatch.setattr(report, 'TAIL_BYTES', 15)
    status, said, asked, text = told('long.log', job / 'check.json')
    assert (status, said.err, asked) == (0, '', [])
    assert stat.S_IMODE((job / report.DEFAULT_NAME).stat().st_mode) == 0o600
    module = text.partition('===== Module =====\n')[2].partition('\n\n===== ')[0]
    expected(re.sub(' +', ' ', said.out) + '----\n' + text, 'report', [
        (f' {len(module)} bytes', ' SIZE bytes'), (f' {len(text)} bytes', ' SIZE bytes'), (job, 'JOB')])


@pytest.mark.parametrize('answer, taken', [(' Yes', True), ('y', True), ('', False), ('n', False)])
def test_a_terminal_is_asked_for_each_file(told, job, answer, taken):
    shown = f'===== File {job}/slurm-1.out =====\nbegin\n\nNCCL WARN all is lost\ncaf\ufffd\nrank 3 died\nand this\n\n'
    status, said, asked, text = told('slurm-1.out', answer=answer)
    assert (status, asked) == (0, ['Include this file as shown? [y/N] ']) and said.out.startswith(shown)
    assert text.endswith('NCCL_DEBUG=INFO\nRUNSCRIPTS=/r\n' + ('\n' + shown) * taken)


def test_nothing_is_overwritten(told, job):
    (job / report.DEFAULT_NAME).write_text('mine')
    (job / 'link').symlink_to('nowhere')
    for name, words in ((report.DEFAULT_NAME, []), ('link', ['--output', 'link'])):
        status, said, _, text = told(*words)
        assert (status, text) == (1, 'mine') and not (job / 'nowhere').exists()
        assert said.err == (f'slingtorch: error: {name} already exists and is not overwritten: remove it, or name another '
                            'file: slingtorch report --output FILE\n')


@pytest.mark.parametrize('name, says', [('slurm-2.out', ': No such file or directory'), ('.', ': Is a directory'),
                                        ('pipe.log', ' is not a file')])
def test_what_is_no_file(told, name, says):
    """A pipe does not make it wait."""
    status, said, _, text = told(name)
    assert (status, text) == (1, None)
    assert said.err == f"slingtorch: error: {name}{says}. Name a log, a job script or check's JSON\n"


def test_without_site_and_module(told, monkeypatch):
    """A site that is not known is a part of the report."""
    monkeypatch.setenv('SLINGTORCH_SITE', 'atlantis')
    assert "There is no site 'atlantis'" in SITE()
    text = told(modules=())[-1]
    assert '\nNo PyTorch module is loaded: load it as the job does, then run this again.\n' in text


def test_versions(tmp_path, monkeypatch):
    driver = tmp_path / 'proc/driver/nvidia/version'
    driver.parent.mkdir(parents=True)
    driver.write_text('NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri\n')
    asked = []
    monkeypatch.setattr(report, 'Machine', lambda: Machine({}, str(tmp_path)))
    monkeypatch.setattr(report.subprocess, 'run', lambda words, **_: asked.append(words) or types.SimpleNamespace(stdout='v1-dirty\n'))
    monkeypatch.setattr(report.os.path, 'exists', lambda path: path == f'{ROOT}/.git')
    monkeypatch.setitem(sys.modules, 'easybuild.tools.version', types.SimpleNamespace(VERSION='5.3.0'))
    monkeypatch.setenv('LOADEDMODULES', 'gcc/12:PyTorch/2.4')
    (tmp_path / 'etc').mkdir()
    (tmp_path / 'etc/os-release').write_text('NAME=x\nPRETTY_NAME="SLES 15"\n')
    python, libc = sys.version.replace('\n', ' '), ' '.join(platform.libc_ver())
    assert report.versions() == f"""\
slingtorch  {__version__} (checkout v1-dirty) in {ROOT}
EasyBuild   5.3.0
Python      {python} in {sys.executable}
system      SLES 15, Linux {os.uname().release}, {os.uname().machine}, {libc}
GPU driver  550.90.07
modules     gcc/12 PyTorch/2.4"""
    assert asked == [['git', '-C', str(ROOT), 'describe', '--always', '--dirty']]


def test_versions_of_what_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(report, 'Machine', lambda: Machine({}, str(tmp_path)))
    monkeypatch.setattr(report, 'bundle_root', lambda: '/bundle')
    monkeypatch.setitem(sys.modules, 'easybuild.tools.version', None)
    monkeypatch.delenv('LOADEDMODULES', raising=False)
    lines = report.versions().splitlines()
    monkeypatch.setattr(report.os.path, 'exists', lambda path: path == '/bundle/.git')
    monkeypatch.setattr(report.subprocess, 'run', lambda *_, **more: types.SimpleNamespace(stdout=''))
    monkeypatch.setattr(report.gpus, 'amd_driver', lambda machine: '6.3.6')
    other = report.versions().splitlines()
    assert other[0] == f'slingtorch  {__version__} (checkout of unknown revision) in /bundle' and other[4] == 'GPU driver  6.3.6'
    assert lines[:2] == [f'slingtorch  {__version__} in /bundle',
                         'EasyBuild   not in this Python (import of easybuild.tools.version halted; None in sys.modules)']
    assert lines[3].startswith('system      unknown, Linux ') and lines[4:] == ['GPU driver  none', 'modules     none loaded']


def test_long_file_is_cut_at_ends_of_lines(tmp_path):
    path = tmp_path / 'long.log'
    line = 'step 1000 of 9999\n'
    path.write_text('first\n' + line * 99999 + 'last\n')
    head, tail = report.read_parts(str(path))
    assert 0 <= (128 << 10) - len(head) < len(line) + 1 and 0 <= (512 << 10) - len(tail) < len(line) + 1
    assert head.startswith('first\n') and tail.endswith('\nlast\n') and set(tail.split('\n')[:-2]) == {line.strip()}
    assert head.endswith(line.strip())


def test_a_full_disk_leaves_no_part_of_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(report, 'open', raising(OSError(28, 'No space left on device')), raising=False)
    with pytest.raises(OSError, match='No space left'):
        report.write_new(f'{tmp_path}/report.txt', 'text')
    assert list(tmp_path.iterdir()) == []
