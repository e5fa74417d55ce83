# SPDX-License-Identifier: GPL-2.0-only
"""Cirrus' easyconfigs on the emulated site: the former machine with a module of Python and Horovod, and that of today."""
import json
import os
import re

import pytest

from testbed import ROOT, cirrus, derecho, wheels
from testbed.easybuild import EasyBuild
from testbed.sitewheels import Wheels

EASYCONFIGS = ['PyTorch-2.3.1-cirrus-gpu.eb', 'PyTorch-2.3.1-cirrus-cpu.eb']
EX = 'PyTorch-2.15.0-cirrus-ex-cpu.eb'


def said(done):
    return ' '.join((done.stdout + done.stderr).split())


@pytest.fixture(scope='module', params=EASYCONFIGS)
def installed(request, tmp_path_factory, lmod):
    made = Wheels(tmp_path_factory.mktemp('cirrus'), lmod, request.param)
    made.done = made.install()
    made.built = json.loads(next(made.root.glob('lib/python3*/site-packages/horovod/built.json')).read_text())
    return made


def test_options_of_horovod(installed):
    """Those of EPCC's document, without the two that do nothing, and NCCL shared."""
    environ, tree = installed.built['environ'], installed.tree
    options = {name: value for name, value in environ.items() if name.startswith('HOROVOD_')}
    expected = {
        'HOROVOD_CMAKE': f'{tree.path}/cmake/bin/cmake',
        'HOROVOD_CPU_OPERATIONS': 'MPI',
        'HOROVOD_WITHOUT_MXNET': '1',
        'HOROVOD_WITHOUT_TENSORFLOW': '1',
        'HOROVOD_WITH_MPI': '1',
        'HOROVOD_WITH_PYTORCH': '1',
    }
    if 'gpu' in installed.name:
        expected.update({
            'HOROVOD_BUILD_CUDA_CC_LIST': '70',
            'HOROVOD_CUDA_HOME': f'{tree.nvhpc}/cuda/12.4',
            'HOROVOD_GPU': 'CUDA',
            'HOROVOD_GPU_OPERATIONS': 'NCCL',
            'HOROVOD_NCCL_HOME': f'{tree.nvhpc}/comm_libs/nccl',
            'HOROVOD_NCCL_LINK': 'SHARED',
        })
        stubs = environ['LD_LIBRARY_PATH'].split(':')[0]
        assert not os.path.exists(stubs) or os.path.basename(os.readlink(f'{stubs}/libcuda.so.1')) == 'libcuda.so'
    assert options == expected
    assert (environ['CC'], environ['CXX']) == (f'{tree.mpich}/bin/mpicc', f'{tree.mpich}/bin/mpicxx')
    assert re.match(r'-j\d+$', environ['MAKEFLAGS']) and installed.built['python'] == str(installed.root / 'bin/python')


def test_nothing_of_the_build_is_in_the_module(installed):
    env = installed.load()
    assert 'stubs' not in env.get('LD_LIBRARY_PATH', '') and 'HOROVOD_GPU' not in env and 'PYTHONUSERBASE' not in env
    module = re.search(r"^dependencies = \[\('(\S+)',", installed.text, re.M).group(1)
    assert module in env['LOADEDMODULES'].split(':') and 'cmake/3.25.2' not in env['LOADEDMODULES']
    assert env['MINICONDA3_PYTHON_VERSION'] == '3.12.1'
    assert (env['SLINGTORCH_WORK_HOME'], env['PYTHONNOUSERSITE']) == ('/home:/work', '1')
    text = (installed.root / 'pyvenv.cfg').read_text()
    assert 'include-system-site-packages = true' in text


def test_fetching_and_the_module_alone(installed):
    """Neither builds anything, and the module comes out the same."""
    module = installed.eb.modulepath / f'{installed.module}.lua'
    before, nowhere = module.read_text(), {'PIP_CONFIG_FILE': os.devnull, 'PIP_INDEX_URL': 'http://127.0.0.1:9/simple'}
    for options in (['--fetch'], ['--module-only', '--force'], ['--sanity-check-only']):
        done = installed.eb(installed.easyconfig, '--ignore-checksums', *options, env=nowhere)
        assert 'pip install' not in done.stdout
    assert module.read_text() == before


@pytest.fixture(scope='module')
def gpu(tmp_path_factory, lmod):
    """The former machine, before anything is installed, with the lock file at hand."""
    made = Wheels(tmp_path_factory.mktemp('gpu'), lmod, EASYCONFIGS[0])
    made.slingtorch('lock', made.easyconfig)
    return made


@pytest.mark.parametrize('change, words', [
    (("'nccl_home': '$NVHPC_ROOT/comm_libs/nccl'", "'nccl_home': '$NVHPC_ROOT/cuda'"),
     'There is no libnccl.so in .*/nvhpc/cuda/lib or lib64. Horovod would link a static NCCL'),
    (("'cuda_home': '$NVHPC_ROOT/cuda/12.4'", "'cuda_home': '$NVHPC_ROOT/cuda/11.8'"),
     'needs CUDA, and there is no directory .*/nvhpc/cuda/11.8. Correct cuda_home'),
    (("'gpu_operations': 'NCCL'", "'gpu_operations': None"),
     "is for CUDA, and Horovod's gpu_operations is None: set it to 'NCCL'"),
    (("'gpu_operations': 'NCCL'", "'gpu_operations': 'DDL'"), "gpu_operations 'NCCL' or None; they are 'MPI' and 'DDL'"),
    (("cuda_compute_capabilities = ['7.0']", ''), 'List of CUDA compute capabilities must be specified'),
    (("builddependencies = [('cmake/3.25.2', EXTERNAL_MODULE)]", "builddependencies = [('cmake/3.10', EXTERNAL_MODULE)]"),
     'Horovod needs CMake 3.13 or newer, below 5, and there is CMake 3.10'),
    (("builddependencies = [('cmake/3.25.2', EXTERNAL_MODULE)]", "builddependencies = [('cmake/5.1', EXTERNAL_MODULE)]"),
     'Horovod needs CMake 3.13 or newer, below 5, and there is CMake 5.1'),
    (("'modulename'", "'mpicxx': 'mpic++.missing', 'modulename'"), "MPI's compiler 'mpic\\+\\+.missing', and there is none"),
    (("'modulename'", "'mpicc': 'gcc', 'modulename'"), "MPI's compiler 'gcc', and it links no MPI"),
])
def test_horovod_that_cannot_be_right_is_not_built(gpu, change, words):
    for version in ('3.10', '5.1'):
        directory = derecho.script(gpu.tree.path / f'cmake{version}/cmake', f'#!/bin/sh\necho cmake version {version}\n').parent
        gpu.tree.module(gpu.tree.modulepath, f'cmake/{version}', f'prepend_path("PATH", "{directory}")')
    other = gpu.path / 'other' / gpu.name
    other.parent.mkdir(exist_ok=True)
    text = gpu.easyconfig.read_text()
    assert change[0] in text
    other.write_text(text.replace(*change))
    other.with_suffix('.lock').write_text(gpu.easyconfig.with_suffix('.lock').read_text())
    done = gpu.eb(other, '--ignore-checksums', check=False)
    assert done.returncode != 0 and re.search(words, said(done)), said(done)


@pytest.mark.parametrize('replace, words', [
    (("mpi, nccl = environ.get('HOROVOD_WITH_MPI') == '1'", 'mpi, nccl = False'),
     'Horovod was to have Gloo, MPI \\(Available Controllers\\), and has Gloo; .*was to have Gloo, MPI, NCCL '),
    (("TensorFlow=environ.get('HOROVOD_WITHOUT_TENSORFLOW') != '1'", 'TensorFlow=True'),
     'was to have PyTorch \\(Available Frameworks\\), and has PyTorch, TensorFlow'),
    (("print('Horovod v0.28.1:", "raise SystemExit('no libcuda"), "did not print its table: no libcuda"),
    (("HOROVOD_NCCL_LINK') == 'SHARED'", "HOROVOD_NCCL_LINK') == 'STATIC'"), 'not linked with a shared NCCL'),
])
def test_horovod_that_was_not_built_as_asked_for(gpu, replace, words):
    """Its own check has status 0 for all of these."""
    sources = derecho.ToySources(gpu.path / 'sources')
    sources.write_extension('horovod', '0.28.1', replace=[replace])
    try:
        done = gpu.eb(gpu.easyconfig, '--ignore-checksums', '--rebuild', check=False)
    finally:
        sources.write_extension('horovod', '0.28.1')
    assert done.returncode != 0 and re.search(words, said(done)), said(done)
    assert not (gpu.eb.modulepath / f'{gpu.module}.lua').exists()


@pytest.mark.parametrize('version, words, fails', [
    ('2.14.0+cpu', 'Horovod 0.28.1 was tried with PyTorch 2.3.1 to 2.13.0, and this is 2.14.0: it may not compile', False),
    ('2.6.0+rocm6.4', 'Horovod 0.28.1 cannot be built for ROCm: .* Leave it out: torch.distributed with RCCL', True),
])
def test_pytorch_that_horovod_does_not_know(tmp_path, lmod, version, words, fails):
    made = Wheels(tmp_path, lmod, EASYCONFIGS[1], [('torch==%(version)s+cpu', 'torch==' + version),
                                                   ("'torch': '%(version)s+cpu'", f"'torch': '{version}'")])
    made.slingtorch('lock', made.easyconfig)
    done = made.eb(made.easyconfig, '--ignore-checksums', check=False)
    assert bool(done.returncode) == fails and re.search(words, said(done)), said(done)


def test_todays_machine(tmp_path, lmod):
    """From source with Cray's compilers and MPI, without GPU: the options, and what the module loads."""
    tree = cirrus.Cirrus(tmp_path / 'site')
    eb = EasyBuild(tmp_path / 'eb', lmod, ['--site', 'cirrus'])
    eb.env.update(tree.env)
    sources = derecho.ToySources(tmp_path / 'sources')
    sources.write('2.15.0')
    # what pip would download: MKL comes with the environment
    text = (ROOT / 'easyconfigs/p/PyTorch' / EX).read_text()
    easyconfig = tmp_path / EX
    easyconfig.write_text(re.sub('^extra_packages = .*$', "python_packages = ['pip', 'setuptools<80', 'wheel', 'mkl-devel']",
                                 text, flags=re.M))
    store = sources.directory / 'p/PyTorch/wheels'
    wheels.make_wheel(store, 'mkl_devel', '2025.3.0', files={'mkl_devel.py': ''})
    eb(easyconfig, '--ignore-checksums', f'--sourcepath={sources.directory}:{ROOT}/patches:{ROOT}/runscripts',
       env={'PIP_FIND_LINKS': str(store)})
    root = eb.prefix / 'software/PyTorch/2.15.0-cirrus-ex-cpu'
    environ = json.loads(next(root.glob('lib/python3*/site-packages/torch/environment.json')).read_text())['environ']
    expected = {'CC': 'cc', 'CXX': 'CC', 'USE_CUDA': '0', 'USE_MPI': '1', 'USE_NCCL': '0', 'USE_ROCM': '0',
                'MKL_THREADING': 'SEQ', 'BLAS': 'MKL', 'PYTORCH_BUILD_VERSION': '2.15.0+cirrus.cray.mpich.8.1.32'}
    assert {name: environ.get(name) for name in expected} == expected
    assert f'-Wl,-rpath,{tree.mpich}/lib' in environ['LDFLAGS'] and 'mpi_gtl' not in environ['LDFLAGS']
    env = lmod.load('PyTorch/2.15.0-cirrus-ex-cpu', modulepath=[eb.modulepath, tree.modulepath])
    assert env['LOADEDMODULES'].split(':')[:3] == ['PrgEnv-gnu/8.6.0', 'cray-mpich/8.1.32', 'cray-python/3.11.7']
    assert env['SLINGTORCH_WORK_HOME'] == '/home:/work'
