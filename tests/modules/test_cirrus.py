# SPDX-License-Identifier: GPL-2.0-only
"""Cirrus' easyconfigs on the emulated site: the former machine with a module of Python and Horovod, and that of today."""
import contextlib
import json
import os
import re
import sys

import pytest

from testbed import ROOT, cirrus, derecho, run, said, wheels
from testbed.easybuild import EasyBuild
from testbed.expected import expected
from testbed.sitewheels import Wheels

EX = 'PyTorch-2.15.0-cirrus-ex-cpu.eb'


def built(made):
    return json.loads(next(made.root.glob('lib/python3*/site-packages/horovod/built.json')).read_text())


@pytest.fixture(scope='module')
def gpu(tmp_path_factory, lmod):
    """The former machine."""
    made = Wheels(tmp_path_factory.mktemp('gpu'), lmod, 'PyTorch-2.3.1-cirrus-gpu.eb')
    made.slingtorch('lock', made.easyconfig)
    made.eb(made.easyconfig, '--ignore-checksums')
    return made


@pytest.fixture(scope='module')
def cpu(tmp_path_factory, lmod):
    made = Wheels(tmp_path_factory.mktemp('cpu'), lmod, 'PyTorch-2.3.1-cirrus-cpu.eb')
    made.install()
    return made


@pytest.fixture(params=['gpu', 'cpu'])
def installed(request):
    return request.getfixturevalue(request.param)


def test_options_of_horovod(installed):
    """Those of EPCC's document, without the two that do nothing, and NCCL shared."""
    environ, tree = built(installed)['environ'], installed.tree
    options = {name: value for name, value in environ.items() if name.startswith('HOROVOD_')}
    wanted = {'HOROVOD_CMAKE': f'{tree.path}/cmake/bin/cmake', 'HOROVOD_CPU_OPERATIONS': 'MPI',
              'HOROVOD_WITHOUT_MXNET': '1', 'HOROVOD_WITHOUT_TENSORFLOW': '1', 'HOROVOD_WITH_MPI': '1',
              'HOROVOD_WITH_PYTORCH': '1'}
    if 'gpu' in installed.name:
        wanted.update({'HOROVOD_BUILD_CUDA_CC_LIST': '70', 'HOROVOD_CUDA_HOME': f'{tree.nvhpc}/cuda/12.4',
                       'HOROVOD_GPU': 'CUDA', 'HOROVOD_GPU_OPERATIONS': 'NCCL',
                       'HOROVOD_NCCL_HOME': f'{tree.nvhpc}/comm_libs/nccl', 'HOROVOD_NCCL_LINK': 'SHARED'})
        stubs = environ['LD_LIBRARY_PATH'].split(':')[0]
        assert not os.path.exists(stubs) or os.path.basename(os.readlink(f'{stubs}/libcuda.so.1')) == 'libcuda.so'
    assert options == wanted
    assert (environ.get('CUDA_PATH'), environ['MPICC']) == (wanted.get('HOROVOD_CUDA_HOME'), 'mpicc')
    assert environ['LDFLAGS'] == f'-Wl,--disable-new-dtags -Wl,-rpath,{tree.mpich}/lib'
    assert (environ['CC'], environ['CXX']) == (f'{tree.openmpi}/bin/mpicc', f'{tree.openmpi}/bin/mpicxx')
    assert re.match(r'-j\d+$', environ['MAKEFLAGS']) and built(installed)['python'] == str(installed.root / 'bin/python')


def test_nothing_of_the_build_is_in_the_module(installed):
    env = installed.load()
    assert 'stubs' not in env.get('LD_LIBRARY_PATH', '') and 'HOROVOD_GPU' not in env and 'PYTHONUSERBASE' not in env
    module = 'python/3.12.1-gpu' if 'gpu' in installed.name else 'python/3.12.1'
    assert module in env['LOADEDMODULES'].split(':') and 'cmake/3.25.2' not in env['LOADEDMODULES']
    assert env['MINICONDA3_PYTHON_VERSION'] == '3.12.1'
    assert (env['SLINGTORCH_WORK_HOME'], env['PYTHONNOUSERSITE']) == ('/home:/work', '1')
    text = (installed.root / 'pyvenv.cfg').read_text()
    assert 'include-system-site-packages = true' in text


def test_fetching_and_the_module_alone(gpu):
    """Neither builds anything, and the module comes out the same."""
    module = gpu.eb.modulepath / f'{gpu.module}.lua'
    before, nowhere = module.read_text(), {'PIP_CONFIG_FILE': os.devnull, 'PIP_INDEX_URL': 'http://127.0.0.1:9/simple'}
    for options in (['--fetch'], ['--module-only', '--force'], ['--sanity-check-only']):
        done = gpu.eb(gpu.easyconfig, '--ignore-checksums', *options, env=nowhere)
        assert 'pip install' not in done.stdout
    assert module.read_text() == before


# an installation's steps until Horovod is to be built, once for each easyconfig that is named
CONFIGURE = """
import json, os, sys
from easybuild.framework.easyblock import get_easyblock_instance
from easybuild.framework.easyconfig.easyconfig import process_easyconfig
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.options import set_up_configuration
set_up_configuration(args=sys.argv[1:], silent=True)
environ, cwd, said = dict(os.environ), os.getcwd(), {}
for path, changed in json.load(sys.stdin):
    for name, text in changed.items():
        with open(name, 'w') as stream:
            stream.write(text)
    app = get_easyblock_instance(process_easyconfig(path)[0])
    try:
        app.make_builddir()
        app.set_parallel()
        app.prepare_step()
        app.exts = app.collect_exts_file_info(fetch_files=False, verify_checksums=False)
        app.init_ext_instances()
        app.ext_instances[0].configure_step()
    except EasyBuildError as err:
        said[path] = ' '.join(str(err).split())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
print(json.dumps(said))
"""


def configure(made, directory, easyconfigs):
    """The errors with which these easyconfigs end: {path: text}.

    :param easyconfigs: pairs: path, and {path: text} of files that are to be written before
    """
    blocks = f'--include-easyblocks={ROOT}/easyblocks/*.py,{ROOT}/easyblocks/generic/*.py'
    done = run([sys.executable, '-c', CONFIGURE, blocks], env=made.eb.env, cwd=directory,
               input=json.dumps([[str(path), changed] for path, changed in easyconfigs]))
    return json.loads(done.stdout.splitlines()[-1])


def test_horovod_that_cannot_be_right_is_not_built(gpu, tmp_path):
    cases = [
        ("'nccl_home': '$NVHPC_ROOT/comm_libs/nccl'", "'nccl_home': '$NVHPC_ROOT/cuda'"),
        ("'cuda_home': '$NVHPC_ROOT/cuda/12.4'", "'cuda_home': '$NVHPC_ROOT/cuda/11.8'"),
        ("'gpu_operations': 'NCCL'", "'gpu_operations': None"), ("cuda_compute_capabilities = ['7.0']", ''),
        ("'modulename'", "'mpicxx': 'mpic++.missing', 'modulename'"), ("'modulename'", "'mpicc': 'gcc', 'modulename'"),
        ("'modulename'", "'mpicc': 'mpicc.missing', 'modulename'")]
    easyconfigs = [tmp_path / str(number) / gpu.name for number in range(len(cases))]
    text = gpu.easyconfig.read_text()
    for path, words in zip(easyconfigs, cases):
        assert words[0] in text
        path.parent.mkdir()
        path.write_text(text.replace(*words))
    # and with a PyTorch that Horovod does not know
    version = next(gpu.root.glob('lib/python3*/site-packages/torch/version.py'))
    (tmp_path / 'rocm').mkdir()
    easyconfigs.append(tmp_path / 'rocm' / gpu.name)
    easyconfigs[-1].write_text(text)
    rocm = {str(version): version.read_text().replace('hip = None', "hip = '6.4.52802'")}
    with other(version):
        errors = configure(gpu, tmp_path, [(path, {} if path.parent.name != 'rocm' else rocm) for path in easyconfigs])
    text = re.sub(r'\$PATH \(.*', '$PATH', '\n'.join(errors[str(path)] for path in easyconfigs))
    expected(text, 'easyblocks/horovod', [(gpu.tree.path, 'SITE')])


@contextlib.contextmanager
def other(path, *replace):
    """Another text in a file, for as long as the context lasts."""
    text = new = path.read_text()
    for old, word in replace:
        assert old in text
        new = new.replace(old, word)
    path.write_text(new)
    try:
        yield
    finally:
        path.write_text(text)


def test_horovod_with_a_second_nccl(gpu):
    library = next(gpu.root.glob('lib/python3*/site-packages/horovod/torch/mpi_lib_v2.so'))
    before = library.read_bytes()
    run(['patchelf', '--remove-needed', 'libnccl.so.2', library])
    done = gpu.eb(gpu.easyconfig, '--ignore-checksums', '--sanity-check-only', check=False)
    library.write_bytes(before)
    assert done.returncode != 0
    assert 'Horovod is not linked with a shared NCCL, so its NCCL is not that of PyTorch' in said(done)


def test_todays_machine(tmp_path, lmod):
    """From source with Cray's compilers and MPI, without GPU: the options, and what the module loads."""
    tree = cirrus.Cirrus(tmp_path / 'site')
    eb = EasyBuild(tmp_path / 'eb', lmod, ['--site', 'cirrus'])
    eb.env.update(tree.env)
    sources = derecho.ToySources(tmp_path / 'sources')
    sources.write('2.15.0')
    # MKL comes with the environment; the toy needs none of the other packages
    text = (ROOT / 'easyconfigs/p/PyTorch' / EX).read_text()
    easyconfig = tmp_path / EX
    easyconfig.write_text(re.sub('^extra_packages = .*$', "python_packages = ['mkl-devel']", text, flags=re.M))
    wheel = wheels.make_wheel(tmp_path / 'files', 'mkl_devel', '2025.3.0', files={'mkl_devel.py': ''})
    eb(easyconfig, '--ignore-checksums', f'--sourcepath={sources.directory}:{ROOT}/patches:{ROOT}/runscripts',
       env={'PIP_INDEX_URL': wheels.make_index(tmp_path / 'index', [wheel])})
    assert (sources.directory / 'p/PyTorch/wheels' / wheel.name).exists()
    root = eb.prefix / 'software/PyTorch/2.15.0-cirrus-ex-cpu'
    environ = json.loads(next(root.glob('lib/python3*/site-packages/torch/environment.json')).read_text())['environ']
    expected = {'CC': 'cc', 'CXX': 'CC', 'USE_CUDA': '0', 'USE_MPI': '1', 'USE_NCCL': '0', 'USE_ROCM': '0',
                'MKL_THREADING': 'SEQ', 'BLAS': 'MKL', 'PYTORCH_BUILD_VERSION': '2.15.0+cirrus.cray.mpich.8.1.32'}
    assert {name: environ.get(name) for name in expected} == expected
    assert f'-Wl,-rpath,{tree.mpich}/lib' in environ['LDFLAGS'] and 'mpi_gtl' not in environ['LDFLAGS']
    env = lmod.load('PyTorch/2.15.0-cirrus-ex-cpu', modulepath=[eb.modulepath, tree.modulepath])
    assert env['LOADEDMODULES'].split(':')[:3] == ['PrgEnv-gnu/8.6.0', cirrus.MPI, 'cray-python/3.11.7']
    assert env['SLINGTORCH_WORK_HOME'] == '/home:/work'
