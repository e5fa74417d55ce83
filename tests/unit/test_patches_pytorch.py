# SPDX-License-Identifier: GPL-2.0-only
"""
The patches of PyTorch: on the real sources that Debian holds, and what the patched check answers.

The sources are downloaded once by apt (28 and 22 MB) with a list of sources of this test's own; the machine's is not changed.
"""
import collections
import os
import re
import shutil
import tarfile

import pytest

from easybuild.tools.filetools import apply_patch
from easybuild.tools.options import set_up_configuration
from testbed import DIR, ROOT, apptainer, derecho, locked, missing, run

PATCHES = ROOT / 'patches/p/PyTorch'
AWARE = PATCHES / 'PyTorch-2.2.2_cray-mpich-gpu-aware.patch'
SOURCE = 'torch/csrc/distributed/c10d/ProcessGroupMPI.cpp'
CAFFE2 = 'caffe2/mpi/mpi_ops_gpu.cc'
BINDINGS = 'torch/csrc/distributed/c10d/init.cpp'
SUITES = {'2.6.0': 'trixie', '1.13.1': 'bookworm'}
"""Releases of PyTorch whose sources Debian has."""


def from_debian(version, name, directory):
    """One file of the sources of a release, in a directory."""
    kept = DIR / 'sources/debian' / f'pytorch_{version}+dfsg.orig.tar.xz'
    with locked('debian-sources'):
        if not kept.exists():
            download(kept, SUITES[version])
    with tarfile.open(kept) as tar:
        for member in tar:
            if member.name.endswith('/' + name):
                tar.extract(member, directory)
                return next(directory.rglob(os.path.basename(name)))
    pytest.fail(f'no {name} in {kept}')


@pytest.fixture(scope='module')
def upstream_source(tmp_path_factory):
    """ProcessGroupMPI.cpp of PyTorch 2.6.0."""
    return from_debian('2.6.0', SOURCE, tmp_path_factory.mktemp('pytorch'))


def download(target, suite):
    """Let apt download and verify the source package."""
    if not shutil.which('apt-get'):
        missing('apt-get')
    apt = target.parent / 'apt'
    for sub in ('lists/partial', 'cache/archives/partial'):
        (apt / sub).mkdir(parents=True, exist_ok=True)
    (apt / 'sources.list').write_text(f'deb-src {apptainer.debian_mirror()} {suite} main\n')
    (apt / 'apt.conf').write_text(
        f'Dir::Etc::sourcelist "{apt}/sources.list";\nDir::Etc::sourceparts "-";\nDir::State::lists "{apt}/lists";\n'
        f'Dir::Cache "{apt}/cache";\nAPT::Sandbox::User "";\n')
    env = {**os.environ, 'APT_CONFIG': str(apt / 'apt.conf')}
    run(['apt-get', '-qq', 'update'], env=env, timeout=300)
    uris = run(['apt-get', '-qq', 'source', '--print-uris', 'pytorch'], env=env).stdout
    for address, name, digest in re.findall(r"^'(\S+)' (\S+) \d+ (SHA256:\w+)$", uris, re.M):
        if name == target.name:
            # appears under its name when it has this digest
            run(['/usr/lib/apt/apt-helper', 'download-file', address, f'{target}.part', digest], env=env, timeout=300)
            os.rename(f'{target}.part', target)
    shutil.rmtree(apt)


@pytest.fixture
def apply(tmp_path, monkeypatch):
    """EasyBuild's own way of applying a patch."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith('EASYBUILD_')]:
        monkeypatch.delenv(name)
    if os.geteuid() == 0:
        monkeypatch.setenv('EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES', '1')
    set_up_configuration(args=['--ignoreconfigfiles=', f'--prefix={tmp_path}/eb'], silent=True, reconfigure=True)
    return lambda patch, directory: apply_patch(str(patch), str(directory))


@pytest.fixture
def patched(upstream_source, tmp_path, apply):
    """The real source, patched."""
    path = tmp_path / 'source' / SOURCE
    path.parent.mkdir(parents=True)
    shutil.copy(upstream_source, path)
    apply(AWARE, tmp_path / 'source')
    return path


def test_applies_to_the_real_source(patched, upstream_source):
    before, after = upstream_source.read_text(), patched.read_text()
    added = [line for line in after.splitlines() if line not in before.splitlines()]
    assert any('CRAY_MPICH_VERSION' in line for line in added)
    # nothing else was touched
    assert [line for line in before.splitlines() if line not in after.splitlines()] == []


# the parts of the file that the check is made of, in a program that prints its answer
PROGRAM = """
#include <mpi.h>
#include <cstdio>
%(includes)s
namespace {
%(function)s
}
int main() { std::printf("%%d\\n", cudaAwareMpiCheck()); }
"""


@pytest.mark.parametrize('macro', [True, False], ids=['Cray', 'plain'])
@pytest.mark.parametrize('state', ['patched', 'upstream'])
def test_meaning(request, tmp_path, upstream_source, state, macro):
    """Yes with Cray's macro and the variable at 1, no in every other case; compiled against the real MPICH."""
    derecho.needed_commands()
    text = (request.getfixturevalue('patched') if state == 'patched' else upstream_source).read_text()
    source = tmp_path / 'check.cpp'
    source.write_text(PROGRAM % {
        'includes': '\n'.join(re.findall(r'^#if defined\((?:OPEN|CRAY)_MPI.*?^#endif', text, re.M | re.S)),
        'function': re.search(r'^bool cudaAwareMpiCheck\(\) \{.*?^\}', text, re.M | re.S).group(0),
    })
    program = tmp_path / 'check'
    define = ['-DCRAY_MPICH_VERSION=8.1.27'] if macro else []
    run(['mpicxx.mpich', '-Wall', '-Werror', *define, '-o', program, source])
    answers = {}
    for value in (None, '', '0', '1', '11', 'yes'):
        env = {name: val for name, val in os.environ.items() if name != 'MPICH_GPU_SUPPORT_ENABLED'}
        if value is not None:
            env['MPICH_GPU_SUPPORT_ENABLED'] = value
        answers[value] = run([program], env=env).stdout.strip()
    assert answers == {value: '1' if state == 'patched' and macro and value == '1' else '0' for value in answers}


def test_caffe2(tmp_path, apply):
    """Cray MPICH counts as GPU-aware, another one that is not Open MPI does not."""
    derecho.needed_commands()
    patch = PATCHES / 'PyTorch-2.2.2_cray-mpich-caffe2.patch'
    path = tmp_path / 'caffe2/mpi/mpi_ops_gpu.cc'
    path.parent.mkdir(parents=True)
    path.write_text(derecho.preimages(patch)['caffe2/mpi/mpi_ops_gpu.cc'])
    apply(patch, tmp_path)
    names = ['CAFFE2_HAS_CUDA_MPI_BASICS', 'CAFFE2_HAS_CUDA_MPI_ALLREDUCE']
    no = ''.join(f'#define {name} 0\n' for name in names)
    text = '#if OPEN_MPI\n#if 1\n#if 0\n' + path.read_text() + no + '#endif\n' + ' '.join(names) + '\n'
    for define, expected in ((['-DCRAY_MPICH_VERSION=8.1.27'], '1 1'), ([], '0 0')):
        assert run(['g++', '-E', '-P', *define, '-xc++', '-'], input=text).stdout.splitlines()[-1] == expected


@pytest.mark.parametrize('patch, version, name, added, removed', [
    # the last release with Caffe2 of which Debian has the sources
    ('PyTorch-2.2.2_cray-mpich-caffe2.patch', '1.13.1', CAFFE2, 'CRAY_MPICH_VERSION', 0),
    # the declaration was written so up to 2.5.1, and otherwise since
    ('PyTorch-2.2.2_process-group-gil.patch', '1.13.1', BINDINGS, 'IntrusivePtrNoGilDestructor<::c10d::ProcessGroup>', 1),
    ('PyTorch-2.6.0_process-group-gil.patch', '2.6.0', BINDINGS, 'IntrusivePtrNoGilDestructor<::c10d::ProcessGroup>', 1),
])
def test_applies_to_a_real_source(patch, version, name, added, removed, tmp_path, apply):
    """One line says something new, and no more was taken away than should be."""
    source = from_debian(version, name, tmp_path / 'debian')
    path = tmp_path / 'source' / name
    path.parent.mkdir(parents=True)
    shutil.copy(source, path)
    apply(PATCHES / patch, tmp_path / 'source')
    before, after = source.read_text().splitlines(), path.read_text().splitlines()
    assert sum(added in line for line in after) == 1 and not any(added in line for line in before)
    gone = collections.Counter(before) - collections.Counter(after)
    assert sum(gone.values()) == removed


def test_every_easyconfig_takes_the_patches_it_needs():
    """
    Up to 2.11 the check is to be patched, the end of a process group up to 2.7, Caffe2's check up to 2.3; newer ones
    need none.
    """
    seen = {}
    for path in (ROOT / 'easyconfigs/p/PyTorch').glob('*-derecho-cray-mpich.eb'):
        version = tuple(int(part) for part in path.name.split('-')[1].split('.'))
        expected = {'PyTorch-2.2.2_cray-mpich-gpu-aware.patch': version < (2, 12),
                    'PyTorch-2.2.2_process-group-gil.patch': version < (2, 6),
                    'PyTorch-2.6.0_process-group-gil.patch': (2, 6) <= version < (2, 8),
                    'PyTorch-2.2.2_cray-mpich-caffe2.patch': version < (2, 4)}
        names = set(re.findall(r"^    '(PyTorch-\S*\.patch)',$", path.read_text(), re.M))
        assert names == {name for name, needed in expected.items() if needed}, path.name
        seen[version] = names
    assert {(2, 3, 1), (2, 4, 0), (2, 6, 0), (2, 8, 0)} <= set(seen)
