# SPDX-License-Identifier: GPL-2.0-only
"""PyTorch from source by EB_PyTorch_Cray, on Debian 13 made by tests/builds/pytorch-debian, against real MPICH.

From nothing that takes two hours on two cores, so that it is done to the end only where an earlier build left its
compiled files: SLINGTORCH_DEBIAN_BUILD names the directory that was given to tests/builds/pytorch-debian. Elsewhere it
is done up to configuring and the patched file. The end of the output says which of the two it was.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from testbed import DIR, ROOT, locked, only_root

pytestmark = pytest.mark.real
BUILD = ROOT / 'tests/builds/pytorch-debian'
WARM = 1300
"""Number of compiled files from which on ccache holds a whole build: it has 1,461 steps."""


@pytest.mark.timeout(2400)
def test_build(tmp_path, remark):
    only_root('runs debootstrap and chroot')
    directory = pathlib.Path(os.environ.get('SLINGTORCH_DEBIAN_BUILD') or DIR / 'debian13')
    compiled = sum(1 for path in (directory / 'ccache').glob('?/?/*R'))
    whole = compiled >= WARM
    remark('PyTorch from source: ' + (f'the whole build, {compiled} files were in ccache' if whole else
                                      'configuring and ProcessGroupMPI.cpp only, there is no warm ccache'))
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


def test_only_root(other_user):
    """Others are told so, before anything is made."""
    build = other_user.checkout() / BUILD.relative_to(ROOT)
    done = other_user.run(['/usr/bin/python3', build, other_user.directory / 'new'], check=False)
    assert done.returncode != 0 and 'needs root' in done.stderr
    assert not (other_user.directory / 'new').exists()
