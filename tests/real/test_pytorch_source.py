"""PyTorch from source by EB_PyTorch_Cray, on Debian 13 made by tests/builds/pytorch-debian, against real MPICH.

From nothing that takes two hours on two cores, so that it is done to the end only where an earlier build left its
compiled files: SLINGTORCH_DEBIAN_BUILD names the directory that was given to tests/builds/pytorch-debian. Elsewhere it
is done up to configuring and the patched file. The output says which of the two it was.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from testbed import DIR, ROOT, locked, missing

pytestmark = pytest.mark.real
BUILD = ROOT / 'tests/builds/pytorch-debian'
WARM = 1300
"""Number of compiled files from which on ccache holds a whole build: it has 1,461 steps."""


def say(capsys, text):
    with capsys.disabled():
        print(f'\n[PyTorch from source: {text}]', end=' ', flush=True)


@pytest.mark.timeout(2400)
def test_build(tmp_path, capsys):
    if os.geteuid() != 0:
        missing('root, which debootstrap and chroot need')
    directory = pathlib.Path(os.environ.get('SLINGTORCH_DEBIAN_BUILD') or DIR / 'debian13')
    compiled = sum(1 for path in (directory / 'ccache').glob('?/?/*R'))
    whole = compiled >= WARM
    say(capsys, f'the whole build, {compiled} files are in ccache' if whole else
        'configuring and ProcessGroupMPI.cpp only, there is no warm ccache')
    record = tmp_path / 'record.json'
    options = ['--rebuild'] if whole else ['--configure-only']
    with locked('debian13'):
        done = subprocess.run([sys.executable, BUILD, directory, *options, '--record', record],
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    record = json.loads(record.read_text())
    if whole:
        assert record['build']['from_ccache'] > record['build']['compiled']
        for test in record['tests']:
            output = '\n'.join(test['output'])
            ranks = test['ranks']
            assert f'All values are right: backend mpi, {ranks} ranks, cpu' in output
            assert f'All values are right: backend gloo, {ranks} ranks, cpu' in output
            assert f'{ranks} ranks have the weights of one' in output
    else:
        assert record['configured']['mpi'].startswith('MPICH')
        assert record['configured']['calls'] >= 5


def test_only_root(tmp_path):
    """Others are told so, before anything is made."""
    command = [sys.executable, str(BUILD), str(tmp_path / 'new')]
    if os.geteuid() == 0:
        os.chmod(tmp_path, 0o755)
        command = ['setpriv', '--reuid=65534', '--regid=65534', '--clear-groups', *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd='/')
    assert done.returncode != 0 and 'needs root' in done.stdout
    assert not (tmp_path / 'new').exists()
