# SPDX-License-Identifier: GPL-2.0-only
"""EB_PyTorch_Cray with wrong input, and with other input than Derecho's: its steps up to configure, in one process."""
import re
import shutil

import pytest

from slingtorch import sites
from testbed import ROOT, derecho, path_without, run, smallimage
from testbed.expected import expected

NAME = 'PyTorch-2.4.0-derecho-cray-mpich.eb'
AWARE = 'PyTorch-2.2.2_cray-mpich-gpu-aware.patch'
WITHOUT_PATCH = [(f"    '{AWARE}',\n", ''), (
    f"    {{'{AWARE}':\n     '{smallimage.sha256(ROOT / 'patches/p/PyTorch' / AWARE)}'}},\n", '')]
NO_GPU = ['gpu', 'cudnn', 'nccl', 'nccl_plugin', 'mpi_gtl', 'cuda_compute']


class Site(derecho.Site):
    """Derecho, and EasyBuild's steps on it."""

    def __init__(self, path, lmod, steps):
        super().__init__(path, lmod)
        self.steps = steps
        self.sources.write('2.4.0')

    def easyconfig(self, *lines, drop=(), replace=()):
        """A copy of the easyconfig with more lines, and without roles, or lines that contain a word; its path."""
        path = self.path / 'mine' / NAME
        path.parent.mkdir(exist_ok=True)
        text = (ROOT / 'easyconfigs/p/PyTorch' / NAME).read_text()
        for old, new in replace:
            assert old in text
            text = text.replace(old, new)
        roles = set(drop).intersection(sites.ROLES)
        for role in roles:
            text = re.sub(r", '%s\??'" % role, '', text)
        kept = [line for line in text.splitlines() if not any(word in line for word in set(drop) - roles)]
        path.write_text('\n'.join(kept + list(lines)) + '\n')
        return path

    def configure(self, *lines, env=None, **kwargs):
        """What comes of such an easyconfig."""
        return self.steps(self.eb, self.easyconfig(*lines, **kwargs), '--ignore-checksums', self.sourcepath, env=env)

    def fails(self, *args, **kwargs):
        """The error that it ends with, in one line."""
        answer = self.configure(*args, **kwargs)
        assert answer['error'] is not None, 'it was configured'
        return answer['error']

    def works(self, *args, **kwargs):
        """Options of the build command ({name: value}), and the environment."""
        answer = self.answer = self.configure(*args, **kwargs)
        assert answer['error'] is None, answer['error']
        return dict(re.findall(r"(\w+)='?(.*?)'?(?= \w+=| *$)", answer['opts'])), answer['environ']


@pytest.fixture(scope='module')
def site(tmp_path_factory, lmod, steps):
    """One Derecho for all tests that leave it as it is."""
    return Site(tmp_path_factory.mktemp('derecho'), lmod, steps)


@pytest.fixture
def own_site(tmp_path, lmod, steps):
    """A Derecho to be spoilt."""
    return Site(tmp_path, lmod, steps)


@pytest.fixture(scope='module')
def plain(site):
    """Options and environment of the easyconfig as it is, where there is a ccache."""
    derecho.script(site.path / 'bin/ccache', '#!/bin/sh\nexec "$@"\n')
    site.with_ccache = {'PATH': f'{site.path}/bin:{site.eb.env["PATH"]}', 'CMAKE_PREFIX_PATH': '/own:', 'LDFLAGS': '-L/own',
                        'CFLAGS': '-g'}
    return *site.works(env=site.with_ccache), site.answer['preset']


def test_nothing_wrong(site, plain):
    options, environ, preset = plain
    environ = {name: environ[name] for name in ('LDFLAGS', 'CFLAGS', 'CXXFLAGS')}
    del options['MAX_JOBS']
    text = ''.join(f'{name}={value}\n' for name, value in [*sorted(options.items()), *environ.items()]) + preset
    builds = {word for word in re.findall(r'/\S+?/preset.cmake', text)}
    expected(text, 'easyblocks/derecho', [*((path[:-len('/preset.cmake')], 'BUILD') for path in builds),
                                          (site.eb.prefix, 'EB'), (site.path, 'SITE')])


def test_module_missing_on_the_system(own_site):
    (own_site.derecho.path / 'modules/23.09/gcc/mkl/2024.0.0.lua').unlink()
    assert f'{NAME} needs the module mkl/2024.0.0, but this system does not have it' in own_site.fails()


def test_no_transport_layer_variables(own_site):
    """A user may export it."""
    path = own_site.derecho.path / 'modules/23.09/gcc/cray-mpich/8.1.27.lua'
    path.write_text(re.sub('setenv."PE_MPICH.*\n', '', path.read_text()))
    said = own_site.fails()
    assert '$PE_MPICH_GTL_DIR_nvidia80 not set' in said and 'Otherwise set the variable' in said
    gtl = own_site.derecho.prefix('/opt/cray/pe/mpich/8.1.29/gtl/lib')
    flags = own_site.works(env={'PE_MPICH_GTL_DIR_nvidia80': f'-L{gtl}'})[1]['LDFLAGS']
    assert f'-L{gtl} -lmpi_gtl_cuda' in flags and '-lcuda' not in flags


def test_transport_layer_not_there(own_site):
    path = own_site.derecho.path / 'modules/23.09/gcc/cray-mpich/8.1.27.lua'
    path.write_text(re.sub('(PE_MPICH_GTL_DIR_nvidia80", ")[^"]*', r'\1-L/nowhere', path.read_text()))
    assert '/nowhere/libmpi_gtl_cuda.so does not exist' in own_site.fails()


def test_unknown_transport_layer(site):
    assert "mpi_gtl is 'opencl', but must be 'cuda', 'hsa', or None" in \
        site.fails("mpi_gtl = 'opencl'", drop=['mpi_gtl'])


def test_other_mpis_of_the_user(site, tmp_path):
    """Neither an MPI that is first in $PATH, nor one of the same file name in $LD_LIBRARY_PATH, is what is linked."""
    for name in ('mpicc', 'mpicxx'):
        derecho.script(site.path / 'first' / name, f'#!/bin/sh\nexec gcc "$@" {derecho.openmpi_library()}\n')
    shutil.copy(site.mpich / 'lib/libmpi_gnu_91.so.12', tmp_path)
    answer = site.configure(env={'PATH': f'{site.path}/first:{site.eb.env["PATH"]}', 'LD_LIBRARY_PATH': str(tmp_path)})
    assert answer['error'] is None and f'MPI_C_COMPILER "{site.mpich}/bin/mpicc"' in answer['preset']
    flags = answer['environ']['LDFLAGS']
    assert f'-Wl,-rpath,{site.mpich}/lib' in flags and str(tmp_path) not in flags


def test_compiler_links_another_mpi(own_site):
    """One that is a script of somebody's, or a prefix that is wrong."""
    for name in ('mpicc', 'mpicxx'):
        derecho.script(own_site.mpich / 'bin' / name, f'#!/bin/sh\nexec {name}.mpich "$@"\n')
    said = own_site.fails()
    assert re.sub('/usr/lib/[^ ,]+', '/usr/lib/MPI', said) == (
        f'{own_site.mpich}/bin/mpicc does not link the MPI of the dependency MPICH, but /usr/lib/MPI, which is not in '
        f"{own_site.mpich}. Does a wrapper interfere, or is the prefix in the external module's metadata wrong?")


def test_compiler_links_nothing(own_site):
    derecho.script(own_site.mpich / 'bin/mpicc', '#!/bin/sh\necho "ld: cannot find -lcuda" >&2; exit 1\n')
    assert own_site.fails() == (
        f'It is unknown which MPI {own_site.mpich}/bin/mpicc links: it cannot compile a call of MPI_Init into a library, or '
        "links no known MPI. Try it by hand: with '-shared -fPIC -Wl,--trace FILE.c' it prints everything that it links")


def test_no_mpi(own_site):
    (own_site.mpich / 'bin/mpicxx').unlink()
    assert own_site.fails() == (
        f'There is no MPI to build PyTorch with: mpicc and mpicxx were not found in {own_site.mpich}/bin. Add an MPI module to '
        'the dependencies (an external module needs name, version and prefix in the metadata file)')


def test_cudnn_of_another_cuda(own_site):
    metadata = own_site.derecho.metadata
    cudnn = own_site.derecho.prefix('/glade/u/apps/common/23.08/spack/opt/spack/cudnn/8.7.0.84-11.8')
    entry = f'\n[cudnn/8.7.0.84-11.8]\nname = cuDNN\nversion = 8.7.0.84\nprefix = {cudnn}\n'
    metadata.write_text(metadata.read_text() + entry)
    assert (f'cuDNN in {cudnn} is for CUDA 11, but PyTorch is built with CUDA 12.2.1. Use the cuDNN module for CUDA 12') == \
        own_site.fails("dependencies = [('cudnn/8.7.0.84-11.8', EXTERNAL_MODULE)]", drop=['cudnn'])


def test_cudnn_in_lib64(own_site):
    cudnn = own_site.derecho.prefix('/glade/u/apps/common/23.08/spack/opt/spack/cudnn/8.8.1.3-12')
    (cudnn / 'lib').rename(cudnn / 'lib64')
    assert own_site.works()[0]['CUDNN_LIB_DIR'] == f'{cudnn}/lib64'
    (cudnn / 'lib64').rename(cudnn / 'elsewhere')
    assert own_site.fails() == (f"There is no libcudnn.so in {cudnn}/lib64 or lib: is the prefix in the external module's "
                                'metadata right?')


def test_mkl_of_the_environment(site, plain):
    """Where no module of it is known."""
    options, environ = site.works("extra_packages += ['conda-forge::mkl-devel=2024']", drop=['blas'])
    root = site.eb.prefix / 'software/PyTorch/2.4.0-derecho-cray-mpich'
    assert options['BLAS'] == 'MKL' and environ['MKLROOT'] == str(root)
    assert f'-Wl,-rpath,{root}/lib ' in environ['LDFLAGS']
    assert f'-Wl,-rpath,{root}/lib ' not in plain[1]['LDFLAGS']


def test_no_cuda_architectures(site):
    assert 'List of CUDA compute capabilities must be specified' in site.fails(drop=['cuda_compute'])


def test_patch_does_not_apply(own_site):
    own_site.sources.write('2.4.0', replace=[('defined(MPIX_CUDA_AWARE_SUPPORT)', 'defined(SOMETHING_ELSE)')])
    said = own_site.fails()
    assert 'PyTorch-2.2.2_cray-mpich-gpu-aware.patch' in said and 'apply' in said


def test_patch_forgotten(site):
    assert site.fails(replace=WITHOUT_PATCH) == (
        'mpi_gtl is set, but torch/csrc/distributed/c10d/ProcessGroupMPI.cpp does not support Cray MPICH, so every GPU tensor '
        f'would raise an error. Add {AWARE} to the patches')


def test_upstream_form_of_the_check(own_site):
    """Newer sources ask for a macro: it is defined where mpi.h does not."""
    old, new = '#else // !defined(MPIX', '#elif defined(MPIX_GPU_SUPPORT_CUDA)\n#else //'
    own_site.sources.write('2.4.0', replace=[(old, new)])
    flags = own_site.works(replace=WITHOUT_PATCH)[1]['CXXFLAGS'].split()
    header = run([own_site.mpich / 'bin/mpicc', '-E', '-dM', '-include', 'mpi.h', '-x', 'c', '/dev/null']).stdout
    assert ('-DMPIX_GPU_SUPPORT_CUDA=1' in flags) == ('MPIX_GPU_SUPPORT_CUDA' not in header)


def test_parameters_of_the_user(site, plain):
    """Custom options win; more packages."""
    options = site.works(
        "custom_opts = ['USE_MPI=0', 'CUDNN_LIB_DIR=/mine']",
        "extra_packages += ['einops']", drop=['custom_opts'], env=site.with_ccache)[0]
    assert (options['USE_MPI'], options['CUDNN_LIB_DIR'], options['USE_DISTRIBUTED']) == ('0', '/mine', '1')
    assert site.derecho.conda_calls[-1].endswith(' einops')


# --- other flavours

def test_processors_alone(site, tmp_path):
    """And without ccache, and without the patch for GPUs."""
    without_ccache = {'PATH': path_without('ccache', tmp_path / 'bin')}
    options, environ = site.works(drop=NO_GPU, env=without_ccache, replace=WITHOUT_PATCH)
    expected = {'USE_CUDA': '0', 'USE_NCCL': '0', 'USE_CUDNN': '0', 'USE_MPI': '1', 'USE_ROCM': '0', 'USE_CCACHE': '0'}
    assert {name: options[name] for name in expected} == expected
    assert 'gtl' not in environ['LDFLAGS']


def test_cuda_alone(site):
    options = site.works(drop=['cudnn', 'nccl', 'nccl_plugin'])[0]
    assert (options['USE_CUDA'], options['USE_NCCL']) == ('1', '1')
    assert not {'USE_SYSTEM_NCCL', 'NCCL_ROOT', 'CUDNN_LIB_DIR'}.intersection(options)


def test_rocm(own_site):
    """Options, hipify, and the list of architectures, which has to be there."""
    rocm = own_site.derecho.prefix('/opt/rocm-6.4.1')
    rocm.mkdir(parents=True)
    gtl = derecho.shared_library(own_site.derecho.prefix('/opt/cray/pe/mpich/8.1.27/gtl/lib') / 'libmpi_gtl_hsa.so')
    own_site.derecho.module(own_site.derecho.modulepath, 'rocm/6.4.1', f'setenv("ROCM_PATH", "{rocm}")')
    cray = own_site.derecho.path / 'modules/23.09/gcc/cray-mpich/8.1.27.lua'
    cray.write_text(cray.read_text() + f'setenv("PE_MPICH_GTL_DIR_amd_gfx90a", "-L{gtl.parent}")\n')
    metadata = own_site.derecho.metadata
    own_site.derecho.module(own_site.derecho.modulepath, 'rccl/2.22', '')
    metadata.write_text(metadata.read_text() + f'\n[rocm/6.4.1]\nname = ROCm\nversion = 6.4.1\nprefix = {rocm}\n'
                        f'\n[rccl/2.22]\nname = RCCL\nversion = 2.22\nprefix = {rocm}/own\n')
    lines = ["mpi_gtl = 'hsa'", "dependencies = [('rocm/6.4.1', EXTERNAL_MODULE), ('rccl/2.22', EXTERNAL_MODULE)]"]
    assert own_site.fails(*lines, drop=NO_GPU) == (
        "List of AMD GPU architectures must be specified, either via amdgcn_capabilities (for example ['gfx90a']) or via "
        '--amdgcn-capabilities')
    lines.append("amdgcn_capabilities = ['gfx90a', 'gfx942']")
    assert 'tools/amd_build/build_amd.py' in own_site.fails(*lines, drop=NO_GPU)  # the toy has none

    own_site.sources.write('2.4.0', files={'tools/amd_build/build_amd.py': 'open("hipified", "w")'})
    options, environ = own_site.works(*lines, drop=NO_GPU)
    assert (options['USE_ROCM'], options['USE_CUDA'], options['USE_NCCL']) == ('1', '0', '1')
    assert (environ['PYTORCH_ROCM_ARCH'], environ['ROCM_PATH']) == ('gfx90a;gfx942', str(rocm))
    assert f'-L{gtl.parent} -lmpi_gtl_hsa' in environ['LDFLAGS']
    assert environ['RCCL_PATH'] == f'{rocm}/own' and f';{rocm}/own' in options['CMAKE_PREFIX_PATH']
    assert list(own_site.path.rglob('hipified'))
