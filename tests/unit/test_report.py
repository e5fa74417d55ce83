# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch report: what a bug report needs is in it, and of files only those that are named, each shown before."""
import os
import pty
import stat
import subprocess
import sys

import pytest

from slingtorch.commands import report
from testbed import ROOT, raising


@pytest.fixture
def job(tmp_path):
    """A job's directory."""
    directory = tmp_path / 'job'
    directory.mkdir()
    (directory / 'slurm-1.out').write_text('begin\n\x1b[1mNCCL WARN all is lost\x1b[0m\n')
    (directory / 'check.json').write_text('{"format": 1}')
    (directory / 'train.o17').write_bytes(b'\x00\x01binary')
    os.mkfifo(str(directory / 'pipe.log'))
    (tmp_path / 'PyTorch.lua').write_text('setenv("NCCL_NET_PLUGIN", "x")\n')
    return directory


def run_report(job, *args, stdin=subprocess.DEVNULL, **variables):
    """Run the command; the CompletedProcess."""
    module = job.parent / 'PyTorch.lua'
    env = dict(os.environ, HOME=str(job.parent / 'home'), SLINGTORCH_SITE='lumi', PYTHONPATH=str(ROOT),
               LOADEDMODULES='gcc/12:PyTorch/2.4', _LMFILES_='/none:%s' % module, NCCL_DEBUG='INFO', **variables)
    return subprocess.run([sys.executable, '-m', 'slingtorch', 'report', *map(str, args)], env=env, cwd=str(job.parent),
                          stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=60)


def test_report(job):
    done = run_report(job, job / 'slurm-1.out', job / 'check.json', SINGULARITYENV_KEY='qJ7vXw2L', NOT_OURS='x1y2')
    assert done.returncode == 0, done.stderr
    path = job.parent / report.DEFAULT_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    for there in ('EasyBuild   5', 'Python', 'FI_CXI_DEFAULT_CQ_SIZE', 'NCCL_NET_PLUGIN', '\nNCCL WARN all is lost\n',
                  '"format": 1', 'NCCL_DEBUG=INFO', 'lumi'):
        assert there in text, there
    assert 'x1y2' not in text and 'qJ7vXw2L' not in text
    assert 'NCCL WARN all is lost' in done.stdout and 'Read it before you send it' in done.stdout


@pytest.mark.parametrize('answer, taken', [('y', True), ('', False)])
def test_a_terminal_is_asked_for_each_file(job, answer, taken):
    ours, theirs = pty.openpty()
    os.write(ours, (answer + '\n').encode())
    done = run_report(job, job / 'slurm-1.out', stdin=theirs)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0 and 'all is lost' in done.stdout and 'Include this file' in done.stdout
    assert ('all is lost' in (job.parent / report.DEFAULT_NAME).read_text()) == taken


def test_nothing_is_overwritten(job):
    path = job.parent / 'mine.txt'
    path.write_text('mine')
    for target in (path, job.parent / 'link'):
        done = run_report(job, '--output', target)
        if target == path:
            assert done.returncode == 1 and '--output' in done.stderr and path.read_text() == 'mine'
            (job.parent / 'link').symlink_to('nowhere')
    assert done.returncode == 1 and not (job.parent / 'nowhere').exists()


@pytest.mark.parametrize('name, says', [('slurm-2.out', 'No such file'), ('.', 'Is a directory'),
                                        ('pipe.log', 'is not text'), ('train.o17', 'is not text')])
def test_no_file_of_text(job, name, says):
    """A pipe does not make it wait."""
    done = run_report(job, job / name)
    assert done.returncode == 1 and says in done.stderr and "Name a log, a job script or check's JSON" in done.stderr
    assert not (job.parent / report.DEFAULT_NAME).exists()


def test_log_of_a_node_that_crashed(job):
    """The end of such a file is often zeros."""
    (job / 'slurm-1.out').write_bytes(b'rank 3 died\n' + 5000 * b'\0' + b'and this\n')
    assert run_report(job, job / 'slurm-1.out').returncode == 0
    assert 'rank 3 died\nand this\n' in (job.parent / report.DEFAULT_NAME).read_text()


def test_without_site_module_and_easybuild(job, tmp_path):
    """A site that is not known and an EasyBuild that is not there are part of the report."""
    broken = tmp_path / 'broken/easybuild'
    broken.mkdir(parents=True)
    (broken / '__init__.py').write_text('raise ImportError("no EasyBuild")')
    done = subprocess.run([sys.executable, '-m', 'slingtorch', 'report'], cwd=str(tmp_path), stdout=subprocess.PIPE,
                          env={'PATH': os.environ['PATH'], 'SLINGTORCH_SITE': 'atlantis', 'PYTHONPATH': '%s:%s' % (
                              broken.parent, ROOT)}, stderr=subprocess.STDOUT, universal_newlines=True)
    text = (tmp_path / report.DEFAULT_NAME).read_text()
    assert done.returncode == 0 and 'no EasyBuild' in text and 'atlantis' in text and 'module load' not in text
    assert 'No PyTorch module' in text


def test_directory_that_is_gone(tmp_path):
    gone = tmp_path / 'gone'
    gone.mkdir()
    done = subprocess.run(['bash', '-c', 'rmdir "$PWD"; "$0" -m slingtorch report', sys.executable], cwd=str(gone),
                          env={'PATH': os.environ['PATH'], 'PYTHONPATH': str(ROOT)}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, universal_newlines=True)
    assert done.returncode == 1 and 'the working directory no longer exists: cd to another one' in done.stdout


def test_long_file_is_cut_at_ends_of_lines(tmp_path):
    path = tmp_path / 'long.log'
    line = 'step 1000 of 9999\n'
    path.write_text('first\n' + line * ((report.HEAD_BYTES + report.TAIL_BYTES) // len(line) + 99) + 'last\n')
    head, tail = report.read_parts(str(path))
    assert head.startswith('first\n') and tail.endswith('\nlast\n') and set(tail.split('\n')[:-2]) == {line.strip()}
    assert head.endswith(line.strip())


def test_a_full_disk_leaves_no_part_of_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(report, 'open', raising(OSError(28, 'No space left on device')), raising=False)
    with pytest.raises(OSError, match='No space left'):
        report.write_new(f'{tmp_path}/report.txt', 'text')
    assert list(tmp_path.iterdir()) == []
