# SPDX-License-Identifier: GPL-2.0-only
"""Derecho as far as modules and files go: the names and variables of its module tree, on this machine's gcc and MPICH.

The GPU Transport Layer, CUDA, cuDNN, NCCL and its plugin are empty libraries of the right names that need each other;
`conda` makes virtual environments. MPI is the real MPICH under the name of Cray's, its compiler defines
CRAY_MPICH_VERSION as Cray's mpi.h does.

ToySources stands for the sources of PyTorch: pip builds and installs them in a second, with the compilers, flags and
options that the easyblock gives.

Who says so besides us ("believed": nobody):

* modules of ncarenv/23.09 and 24.12, and which appear behind the compiler: NCAR/HPC-Docs@b4f71ff
  docs/compute-systems/derecho/derecho-modules-list.md (output of `module avail` and `module spider` of 2025-05-09)
* mkl/2025.0.1: benkirk/conda-recipes@e2eff7f profile.d/modules.sh; the list of 2025-05-09 is cut off there
* modules of ncarenv/25.10: TURBO-ESM/turbo-stack@709db40 build.sh, lines 231 to 237 (2026-08-17); ncarcompilers/1.2.0
  is in other public scripts
* cray-mpich, conda and libfabric of ncarenv/25.10: believed; that cray-mpich is in the README of "WRF-Hydro CTSM
  Coupling" (NCAR, 2026), which could not be located in a repository
* where login looks for modules, and that ncarenv opens the others: NCAR/spack-derecho@b8e4459 util/localinit.sh
  ($MODULEPATH_ROOT/environment), config/modules.yaml (hierarchy)
* NCAR_HOST: NCAR/HPC-Docs@b4f71ff docs/pbs/job-scripts/index.md, line 390
* that ncarenv sets NCAR_HOST too; variables of libfabric: believed
* variables of gcc, cuda, cudnn, mkl, ncarcompilers: NCAR/spack-derecho@b8e4459 config/modules.yaml (2024-10-22)
* CUDA_HOME and MKLROOT: benkirk/derecho-pytorch-mpi@1adc9e4 config_env.sh, utils/build_nccl-ofi-plugin.sh (use them
  after `module load`)
* variables of cray-mpich: prefix: benkirk/derecho-pytorch-mpi@1adc9e4 README.md, utils/build_nccl-ofi-plugin.sh line
  20; NCAR/spack-derecho@b8e4459 config/modules.yaml
* variables of cray-mpich: GPU Transport Layer, libraries: dfielding14/athenak@df52d2b
  tst/publication/frontier_control_plane/control_plane_common.py (environment of cray-mpich/8.1.31 on Frontier)
* PATH of cray-mpich: believed; on the machine mpicc is first of all the wrapper of ncarcompilers
* prefixes of cray-mpich, libfabric, CUDA 12.2.1, cuDNN: NCAR/spack-derecho@b8e4459 config/packages.yaml,
  config/modules.yaml; names of files: NVIDIA's
* prefixes of CUDA and cuDNN of later generations: believed; the bundle takes them from the variables of the modules
* where the driver's library and cuBLAS are: believed; stand-ins, on the machine they are the driver's and CUDA's
* names of Cray MPICH's library of GCC: https://github.com/spack/spack/pull/29392 (2022-03-07: libmpich.so of
  ofi/gnu/9.1 is libmpi_gnu_91.so.12); benkirk/conda-recipes@e2eff7f mpi4py/meta.yaml (libmpi_*.so*)
* names of Cray MPICH's library of GCC 12.3: believed, by the rule of 9.1
* prefix of its cray-mpich: believed; other machines have ofi/gnu/12.3 or ofi/gnu/11.2 of it, the bundle takes
  CRAY_MPICH_DIR
* GPU Transport Layer: directory and names: https://github.com/spectral-compute/scale-validation/issues/66 (2026-08-03:
  mpich/8.1.30/gtl/lib/libmpi_gtl_cuda.so); olcf/olcf-user-docs@2745903 systems/frontier_user_guide.rst (`ldd`:
  libmpi_gtl_hsa.so.0)
* GPU Transport Layer: that of 8.1.27 does not name CUDA's libraries, the later ones name libcudart.so.12:
  https://github.com/eth-cscs/stackinator/pull/158 (2024-01-19);
  https://github.com/spectral-compute/scale-validation/issues/66 (8.1.30)
* mpi.h defines CRAY_MPICH_VERSION: HYPRE's sources, which print CRAY_MPICH_VERSION where it is defined
* conda: NCAR/HPC-Docs@b4f71ff docs/pbs/job-scripts/index.md, line 81 (/glade/u/apps/opt/conda/envs/npl)
"""

import functools
import io
import json
import os
import pathlib
import re
import shutil
import stat
import tarfile

from . import ROOT, easybuild, missing, quickvenv, run

GENERATIONS = {
    '23.09': {'gcc': '12.2.0', 'cray-mpich': ('8.1.27', 'ofi/gnu/9.1'), 'ncarcompilers': '1.0.0',
              'libfabric': ['1.15.2.0'], 'cuda': '12.2.1', 'cudnn': {'8.8.1.3-12': '12', '8.7.0.84-11.8': '11'},
              'mkl': '2024.0.0'},
    '24.12': {'gcc': '12.4.0', 'cray-mpich': ('8.1.29', 'ofi/gnu/12.3'), 'ncarcompilers': '1.0.0',
              'libfabric': ['1.15.2.0', '1.22.0', '2.1.0'], 'cuda': '12.3.2',
              'cudnn': {'8.9.7.29-12': '12', '9.2.0.82-12': '12'}, 'mkl': '2025.0.1'},
    # which cuDNN and MKL there are is not known
    '25.10': {'gcc': '14.3.0', 'cray-mpich': ('8.1.32', 'ofi/gnu/12.3'), 'ncarcompilers': '1.1.0',
              'libfabric': ['1.22.0'], 'cuda': '12.9.0'},
}
"""Versions by ncarenv; cuDNN's with the major version of CUDA that it is for."""

CONDA = """#!/bin/bash
# conda as far as the easyblock calls it: records the call, and makes a virtual environment
echo "CONDA_PKGS_DIRS=$CONDA_PKGS_DIRS conda $*" >> "$(dirname "$0")/../calls"
prefix= download= version=
while [[ $# -gt 0 ]]; do
    case $1 in --prefix) prefix=$2; shift ;; --download-only) download=1 ;; python=*) version=${1#python=} ;; esac
    shift
done
[[ -n $download ]] || {python3} -m venv "$prefix" || exit
# the version that was asked for, by its name at least
[[ -z $prefix || -n $download || -z $version || -e $prefix/bin/python$version ]] ||
    ln -s python3 "$prefix/bin/python$version"
"""


def needed_commands():
    """The real compilers that the tree stands on."""
    for command, package in (('gcc', 'gcc'), ('mpicc.mpich', 'mpich and libmpich-dev'), ('readelf', 'binutils'),
                             ('patchelf', 'patchelf')):  # fmt: skip
        if not shutil.which(command):
            missing(f'{command} (package {package})')


built = {}
"""Libraries that were made before, by what they are made of: every test has a tree of its own."""


def shared_library(path, needs=(), source='', soname=None):
    """Make a shared library that needs others, also where it uses nothing of them; its path."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    recipe = (soname or path.name, source, *(os.path.relpath(need, path.parent) for need in needs))
    if recipe not in built:
        libraries = []
        for need in needs:
            libraries += [f'-Wl,-rpath,$ORIGIN/{os.path.relpath(pathlib.Path(need).parent, path.parent)}', need]
        run(
            ['gcc', '-shared', '-fPIC', '-o', path, f'-Wl,-soname,{recipe[0]}', '-Wl,--no-as-needed',
             '-Wl,--disable-new-dtags', '-xc', '-', '-xnone', *libraries],
            input=source + '\n',
        )  # fmt: skip
        built[recipe] = path.read_bytes()
    path.write_bytes(built[recipe])
    return path


@functools.lru_cache(maxsize=None)
def mpich_of_the_machine():
    """The library of the machine's MPICH, and the flags for its headers."""
    shown = run(['mpicc.mpich', '-show']).stdout
    cache = run(['/sbin/ldconfig', '-p']).stdout
    found = re.search(r'libmpich\.so\.12 .*=> (\S+)', cache) or missing('libmpich.so.12 (package libmpich-dev)')
    return found.group(1), ' '.join(re.findall(r'-I\S+', shown))


def cray_mpich(prefix, name):
    """
    The machine's MPICH as Cray's: its library has the name of the compiler, and the other names are links to it.

    That of other trees is a link to the first one's, which nothing changes: it is large.

    :param prefix: what CRAY_MPICH_DIR is
    :param name: of the library, as mpi_gnu_91
    :return: flags for a compiler
    """
    library, headers = mpich_of_the_machine()
    path = prefix / f'lib/lib{name}.so.12'
    path.parent.mkdir(parents=True)
    if name not in built:
        built[name] = shutil.copy(library, path)
        run(['patchelf', '--set-soname', path.name, path])
    else:
        os.link(built[name], path)
    for link in (f'lib{name}.so', 'libmpi.so', 'libmpich.so'):
        (path.parent / link).symlink_to(path.name)
    return f'{headers} "$@" -L{path.parent} -l{name}'


def gpu_transport_layer(directory, kind, needs=(), source=''):
    """libmpi_gtl_KIND.so of Cray MPICH, which has a number in its name for those that need it; its path."""
    library = shared_library(directory / f'libmpi_gtl_{kind}.so.0', needs, source)
    (directory / f'libmpi_gtl_{kind}.so').symlink_to(library.name)
    return library


def openmpi_library():
    """The library of Open MPI, the second MPI of this machine."""
    cache = run(['/sbin/ldconfig', '-p']).stdout
    found = re.search(r'libmpi\.so\.40 .*=> (\S+)', cache) or missing('libmpi.so.40 (package openmpi-bin)')
    return found.group(1)


def script(path, text):
    """Write an executable file; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return path


def own_site(path, *names):
    """The files of sites with these names, in which modules have their prefixes below path; the directory."""
    directory = path / 'site-files'
    directory.mkdir(parents=True)
    for name in names:
        text = (ROOT / f'hooks/sites/{name}.cfg').read_text()
        (directory / f'{name}.cfg').write_text(re.sub(r'^(\w+ = .* in )(?=/)', rf'\1{path}', text, flags=re.M))
    return directory


class Derecho:
    """A copy of the tree below a directory of the test.

    :ivar path: the directory
    :ivar modulepath: what MODULEPATH is after login
    :ivar sites: a directory with the site's file, in which the prefixes are those of this tree
    :ivar metadata: a user's own file of metadata of external modules, empty
    """

    def __init__(self, path):
        needed_commands()
        self.path = pathlib.Path(path)
        self.modulepath = self.path / 'modules/environment'
        for generation, versions in GENERATIONS.items():
            self.generation(generation, versions)
        self.sites = own_site(self.path, 'derecho')
        self.metadata = self.path / 'metadata.cfg'
        self.metadata.write_text('')

    def prefix(self, path):
        """Where something is that on Derecho is at this absolute path."""
        return self.path / path.lstrip('/')

    def module(self, directory, name, *lines):
        """Write a Lua module file."""
        path = directory / f'{name}.lua'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('\n'.join(lines) + '\n')

    def generation(self, generation, versions):
        """All modules below one ncarenv: most are visible when it is loaded, MPI when the compiler is."""
        core, behind_gcc = (self.path / 'modules' / generation / part for part in ('core', 'gcc'))
        self.module(self.modulepath, f'ncarenv/{generation}', f'prepend_path("MODULEPATH", "{core}")',
                    'setenv("NCAR_HOST", "derecho")')  # fmt: skip

        gcc = versions['gcc']
        self.module(core, f'gcc/{gcc}', f'prepend_path("MODULEPATH", "{behind_gcc}")', 'setenv("PE_ENV", "GNU")',
                    'setenv("GNU_PATH", "/usr")', f'setenv("GNU_VERSION", "{gcc}")',
                    f'setenv("NCAR_BUILD_ENV", "derecho-gcc-{gcc}")',
                    f'setenv("NCAR_BUILD_ENV_COMPILER", "derecho-gcc-{gcc}")')  # fmt: skip

        for version in versions['libfabric']:
            prefix = self.prefix(f'/opt/cray/libfabric/{version}')
            if not prefix.exists():
                shared_library(prefix / 'lib64/libfabric.so.1')
            self.module(core, f'libfabric/{version}', f'prepend_path("LD_LIBRARY_PATH", "{prefix}/lib64")')

        version, flavour = versions['cray-mpich']
        mpich = self.prefix(f'/opt/cray/pe/mpich/{version}/{flavour}')
        # its compilers give no RPATH
        flags = cray_mpich(mpich, 'mpi_gnu_' + flavour.split('/')[-1].replace('.', ''))
        for name, compiler in (('mpicc', 'gcc'), ('mpicxx', 'g++')):
            script(mpich / 'bin' / name, f'#!/bin/sh\nexec {compiler} -DCRAY_MPICH_VERSION={version} {flags}\n')
        cuda = self.prefix(f'/glade/u/apps/common/23.08/spack/opt/spack/cuda/{versions["cuda"]}')
        script(cuda / 'bin/nvcc', '#!/bin/sh\nexit 0\n')
        cudart = shared_library(cuda / 'lib64/libcudart.so.12', source='int cudaMalloc(void) { return 0; }')
        (cuda / 'lib64/libcudart.so').symlink_to('libcudart.so.12')
        shared_library(cuda / 'lib64/stubs/libcuda.so', soname='libcuda.so.1')
        shared_library(cuda / 'lib64/libcuda.so.1')
        # that of 8.1.27 does not name what it needs
        gtl = self.prefix(f'/opt/cray/pe/mpich/{version}/gtl/lib')
        gpu_transport_layer(gtl, 'cuda', [] if generation == '23.09' else [cudart],
                            'int cudaMalloc(void); int mpi_gtl_init(void) { return cudaMalloc(); }')
        self.module(behind_gcc, f'cray-mpich/{version}', f'setenv("CRAY_MPICH_DIR", "{mpich}")',
                    f'setenv("NCAR_ROOT_MPI", "{mpich}")', f'prepend_path("PATH", "{mpich}/bin")',
                    f'prepend_path("CRAY_LD_LIBRARY_PATH", "{mpich}/lib:{gtl}")',
                    f'setenv("PE_MPICH_GTL_DIR_nvidia80", "-L{gtl}")',
                    'setenv("PE_MPICH_GTL_LIBS_nvidia80", "-lmpi_gtl_cuda")',
                    f'pushenv("NCAR_BUILD_ENV", "derecho-gcc-{gcc}-cray-mpich-{version}")')  # fmt: skip
        # without its compilers
        self.module(behind_gcc, f'ncarcompilers/{versions["ncarcompilers"]}', 'setenv("NCAR_EXCLUDE_ASNEEDED", "1")')
        self.module(core, f'cuda/{versions["cuda"]}', f'setenv("CUDATOOLKIT_HOME", "{cuda}")',
                    'setenv("CRAY_ACCEL_TARGET", "nvidia80")', f'setenv("CUDA_VERSION", "{versions["cuda"]}")',
                    f'setenv("CUDA_HOME", "{cuda}")', f'prepend_path("PATH", "{cuda}/bin")',
                    f'prepend_path("CRAY_LD_LIBRARY_PATH", "{cuda}/lib64")',
                    f'prepend_path("LD_LIBRARY_PATH", "{cuda}/lib64")')  # fmt: skip

        for version, cuda_major in versions.get('cudnn', {}).items():
            cudnn = self.prefix(f'/glade/u/apps/common/23.08/spack/opt/spack/cudnn/{version}')
            cublas = shared_library(cudnn / f'cublas/libcublas.so.{cuda_major}')
            library = shared_library(cudnn / 'lib' / f'libcudnn.so.{version[0]}', [cublas])
            (cudnn / 'lib/libcudnn.so').symlink_to(library.name)
            self.module(core, f'cudnn/{version}', f'setenv("NCAR_ROOT_CUDNN", "{cudnn}")',
                        f'prepend_path("LD_LIBRARY_PATH", "{cudnn}/lib")')  # fmt: skip

        if 'mkl' in versions:
            mkl = self.prefix(f'/glade/u/apps/common/23.08/spack/opt/spack/mkl/{versions["mkl"]}')
            (mkl / 'lib').mkdir(parents=True)
            self.module(behind_gcc, f'mkl/{versions["mkl"]}', f'setenv("MKLROOT", "{mkl}")',
                        f'setenv("NCAR_ROOT_MKL", "{mkl}")')  # fmt: skip

        conda = self.prefix('/glade/u/apps/opt/conda')
        script(conda / 'bin/conda', CONDA.replace('{python3}', f'{quickvenv.python3("/usr/bin/python3")}/python3'))
        self.module(core, 'conda/latest', f'prepend_path("PATH", "{conda}/bin")')

    @property
    def conda_calls(self):
        """What conda was called with, one line for each call."""
        path = self.prefix('/glade/u/apps/opt/conda/calls')
        return path.read_text().splitlines() if path.exists() else []

    @property
    def env(self):
        """Variables of a shell on Derecho, to be put on top of those of testbed.easybuild.EasyBuild."""
        return {'MODULEPATH': str(self.modulepath), 'NCAR_HOST': 'derecho',
                'EASYBUILD_EXTERNAL_MODULES_METADATA': str(self.metadata), 'SLINGTORCH_SITES_PATH': str(self.sites)}

    def install(self, prefix, name, version, libraries):
        """
        Something that EasyBuild installed: an empty library or more below prefix, and its module.

        :param prefix: the prefix of testbed.easybuild.EasyBuild
        :param version: version with versionsuffix
        :param libraries: names of libraries in lib/
        """
        root = pathlib.Path(prefix) / 'software' / name / version
        for library in libraries:
            shared_library(root / 'lib' / library)
        (root / 'include').mkdir()
        variable = re.sub('-', 'MIN', name.upper())
        self.module(pathlib.Path(prefix) / 'modules/all', f'{name}/{version}',
                    f'setenv("EBROOT{variable}", "{root}")',
                    f'setenv("EBVERSION{variable}", "{version.split("-")[0]}")',
                    f'prepend_path("LD_LIBRARY_PATH", "{root}/lib")')  # fmt: skip
        return root


BACKEND = """
import glob, json, os, re, shlex, subprocess, sys, zipfile
VERSION = os.environ['PYTORCH_BUILD_VERSION']

def compile(compiler, name, source, flags):
    command = compiler + ['-shared', '-fPIC', '-o', 'torch/lib/' + name, '-xc', '-', '-xnone'] + flags
    print(' '.join(command), flush=True)
    if subprocess.run(command, input=source.encode()).returncode:
        print('FAILED: caffe2/CMakeFiles/torch_cpu.dir/' + name)
        sys.exit('ninja: build stopped: subcommand failed.')

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with open('variant.json') as handle:
        variant = json.load(handle)
    with open(os.environ['CMAKE_PROJECT_INCLUDE_BEFORE']) as handle:
        preset = handle.read()
    mpicc = re.search('set.MPI_C_COMPILER "(.*?)"', preset).group(1)
    flags = shlex.split(os.environ.get('LDFLAGS', ''))
    use_mpi = 'int MPI_Init(int *, char ***); int use(void) { return MPI_Init(0, 0); }'
    compile([mpicc], 'libtorch_cpu.so', variant.get('source', use_mpi), flags)
    if 'gloo' in variant:
        compile(['gcc'], 'libgloo.so', use_mpi, [variant['gloo']])
    nccl = os.environ.get('NCCL_LIB_DIR')
    if nccl:
        compile(['gcc'], 'libtorch_cuda.so', '',
                ['-Wl,--no-as-needed', '-Wl,-rpath,' + nccl, nccl + '/libnccl.so'] + flags)
    with open('torch/environment.json', 'w') as handle:
        json.dump({'environ': dict(os.environ), 'preset': preset}, handle)
    with open('torch/built.py', 'w') as handle:
        handle.write('version = %r\\nnccl_version = %r\\nmpi = True\\n' % (VERSION, '2.21.5'))
    name = 'torch-%s.dist-info' % VERSION
    with zipfile.ZipFile(os.path.join(wheel_directory, 'torch-%s-py3-none-any.whl' % VERSION), 'w',
                         strict_timestamps=False) as wheel:
        for path in glob.glob('torch/*.py') + glob.glob('torch/*.json') + glob.glob('torch/lib/*'):
            wheel.write(path)
        wheel.writestr(name + '/METADATA', 'Metadata-Version: 2.1\\nName: torch\\nVersion: %s\\n' % VERSION)
        wheel.writestr(name + '/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
        wheel.writestr(name + '/entry_points.txt', '[console_scripts]\\ntorchrun = torch:run\\n')
        wheel.writestr(name + '/RECORD', '')
    return 'torch-%s-py3-none-any.whl' % VERSION
"""

EXTENSION_BACKEND = """
import glob, json, os, shlex, subprocess, sys, zipfile
with open('variant.json') as handle:
    NAME, VERSION, SOURCE = json.load(handle)
LIBRARY = 'horovod/torch/mpi_lib_v2.so' if NAME == 'horovod' else NAME + '/libuse.so'

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    command = shlex.split(os.environ['MPICC']) + ['-shared', '-fPIC', '-o', LIBRARY, '-xc', '-', '-xnone']
    if os.environ.get('HOROVOD_NCCL_LINK') == 'SHARED':
        command += ['-Wl,--no-as-needed', '-L' + os.environ['HOROVOD_NCCL_HOME'] + '/lib', '-lnccl']
    if subprocess.run(command + shlex.split(os.environ['LDFLAGS']), input=SOURCE.encode()).returncode:
        sys.exit('it does not compile')
    with open(NAME + '/built.json', 'w') as handle:
        json.dump({'environ': dict(os.environ), 'python': sys.executable}, handle)
    path = '%s-%s-py3-none-any.whl' % (NAME, VERSION)
    with zipfile.ZipFile(os.path.join(wheel_directory, path), 'w', strict_timestamps=False) as wheel:
        for name in glob.glob(NAME + '/*') + glob.glob(NAME + '/*/*'):
            wheel.write(name)
        for name in glob.glob('scripts/*'):
            script = zipfile.ZipInfo('%s-%s.data/%s' % (NAME, VERSION, name))
            script.external_attr = 0o100755 << 16
            with open(name) as handle:
                wheel.writestr(script, handle.read())
        info = '%s-%s.dist-info/' % (NAME, VERSION)
        wheel.writestr(info + 'METADATA', 'Metadata-Version: 2.1\\nName: %s\\nVersion: %s\\n' % (NAME, VERSION))
        wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
        wheel.writestr(info + 'RECORD', '')
    return path
"""

EXTENSIONS = {
    'horovod': {
        'horovod/__init__.py': '',
        'horovod/torch/__init__.py': """
import ctypes, os
ctypes.CDLL(os.path.join(os.path.dirname(__file__), 'mpi_lib_v2.so'), mode=os.RTLD_NOW)
""",
        'scripts/horovodrun': '#!python\n',
    },
    'mpi4py': {
        'mpi4py/__init__.py': 'class rc:\n    initialize = True\n',
        'mpi4py/MPI.py': """
import ctypes, os
from . import rc
if rc.initialize:
    raise RuntimeError('MPI would be initialised')
ctypes.CDLL(os.path.join(os.path.dirname(__file__), 'libuse.so'), mode=os.RTLD_NOW)
""",
    },
    'torchvision': {
        'torchvision/__init__.py': """
import json, os, torch
with open(os.path.join(os.path.dirname(__file__), 'built.json')) as handle:
    cuda = 12020 if json.load(handle)['environ'].get('FORCE_CUDA') == '1' else -1
class torchvision:
    _cuda_version = staticmethod(lambda: cuda)
class ops:
    pass
ops.torchvision = torchvision
torch.ops = ops
""",
    },
}
USE_MPI = 'int MPI_Init(int *, char ***); int use(void) { return MPI_Init(0, 0); }'

TORCH = {
    'torch/__init__.py': """
import ctypes, glob, os
from .built import version as __version__
for path in sorted(glob.glob(os.path.join(os.path.dirname(__file__), 'lib', '*.so'))):
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
from . import __config__, cuda, distributed, version
""",
    'torch/version.py': "cuda, hip = '12.2', None\n",
    'torch/__config__.py': """
from .built import mpi
def show():
    return 'Build settings: USE_CUDA=ON, USE_MPI=%s, USE_NCCL=1, ' % ('ON' if mpi else 'OFF')
""",
    'torch/cuda.py': """
from .built import nccl_version
class nccl:
    version = staticmethod(lambda: tuple(int(part) for part in nccl_version.split('.')))
""",
    'torch/distributed.py': """
from .built import mpi
def is_available(): return True
def is_nccl_available(): return True
def is_mpi_available(): return mpi
""",
}


def preimages(patch):
    """The files that a patch wants, as far as it shows them: {path: text}."""
    files = {}
    for line in pathlib.Path(patch).read_text().splitlines():
        if line.startswith('--- a/'):
            path = line[6:].split('\t')[0]
            files.setdefault(path, '')
        elif files and line[:1] in (' ', '-') and not line.startswith('--- '):
            files[path] += line[1:] + '\n'
    return files


class ToySources:
    """A release tarball of a PyTorch that is two empty libraries, in a directory to be EasyBuild's source path.

    :ivar directory: the directory
    """

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)

    def write(self, version, replace=(), files=None, **variant):
        """
        Write the tarball.

        :param replace: pairs of strings to be replaced in the files that patches are for
        :param files: more files, {path: text}
        :param variant: what is to be wrong with it: source (of libtorch_cpu.so), gloo (an MPI library that another
                        library of it is linked with)
        """
        more, files = files or {}, {}
        for patch in (ROOT / 'patches/p/PyTorch').glob('PyTorch-*.patch'):
            for path, text in preimages(patch).items():
                files[path] = files.get(path, '') + text
        for old, new in replace:
            files = {path: text.replace(old, new) for path, text in files.items()}
        files.update(TORCH)
        files.update(more)
        files['backend.py'] = BACKEND
        files['torch/lib/empty'] = ''
        files['variant.json'] = json.dumps(variant)
        files['pyproject.toml'] = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        text = '\n'.join(path.read_text() for path in (ROOT / 'easyconfigs/p/PyTorch').glob(f'PyTorch-{version}-*.eb')
                         if 'EB_PyTorch_Cray' in path.read_text())
        for name, number in re.findall(r"^    \('(\w+)', '([\d.]+)', {$", text, re.M):
            self.write_extension(name, number)
        return self.pack(f'pytorch-v{version}', files)

    def write_extension(self, name, version, source=USE_MPI, replace=()):
        """
        Write the tarball of a package that is built as an extension of PyTorch.

        :param source: of the library that it compiles with $MPICC and $LDFLAGS
        :param replace: pairs of strings to be replaced in its files
        """
        files = {
            **EXTENSIONS[name], 'backend.py': EXTENSION_BACKEND, 'variant.json': json.dumps([name, version, source]),
            'pyproject.toml': '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'}
        for old, new in replace:
            files = {path: text.replace(old, new) for path, text in files.items()}
        return self.pack(f'{name}-{version}', files)

    def pack(self, name, files):
        """Write a tarball; its path."""
        path = self.directory / f'p/PyTorch/{name}.tar.gz'
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, 'w:gz') as tar:
            for member, text in files.items():
                info = tarfile.TarInfo(f'{name}/{member}')
                info.size = len(text.encode())
                tar.addfile(info, io.BytesIO(text.encode()))
        return path


class Site:
    """Derecho with ncarenv/23.09, NCCL and its plugin, `eb` on it, and a directory for sources."""

    def __init__(self, path, lmod):
        self.path, self.derecho = path, Derecho(path / 'derecho')
        self.eb = easybuild.EasyBuild(path / 'eb', lmod, ['--site', 'derecho'])
        self.eb.env.update(self.derecho.env)
        self.sources = ToySources(path / 'sources')
        self.sourcepath = f'--sourcepath={self.sources.directory}:{ROOT}/patches:{ROOT}/runscripts'
        self.nccl = self.derecho.install(self.eb.prefix, 'NCCL', '2.21.5-derecho-23.09', ['libnccl.so'])
        self.plugin = self.derecho.install(self.eb.prefix, 'aws-ofi-nccl', '1.6.0-derecho-23.09', ['libnccl-net.so'])
        self.mpich = self.derecho.prefix('/opt/cray/pe/mpich/8.1.27/ofi/gnu/9.1')
