# SPDX-License-Identifier: GPL-2.0-only
"""Build slingmpi for the PyTorch that is there, with the MPI of $MPICXX (default: mpicxx; with Cray MPICH CC)."""
import json
import os
import shutil
import subprocess
import sys
import sysconfig

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as err:
    sys.exit(f'slingmpi is built for the PyTorch of this Python, and there is none ({err}). '
             'Install it first, then: pip install --no-build-isolation ./slingmpi')

HERE = os.path.dirname(os.path.abspath(__file__))
TORCH = [int(part) for part in torch.__version__.split('+')[0].split('.')[:2]]
COMPILER = os.environ.get('MPICXX') or ('CC' if os.environ.get('CRAY_MPICH_DIR') else 'mpicxx')
if TORCH < [2, 6]:
    sys.exit(f'slingmpi is for PyTorch 2.6 and newer, and this is {torch.__version__}')
if not shutil.which(COMPILER):
    sys.exit(f"no MPI compiler '{COMPILER}' in PATH: load a module with MPI, or name its C++ compiler in MPICXX")

# what was built is said beside it: an import with another PyTorch or MPI compares
PROBE = '#include <mpi.h>\n#if defined(OPEN_MPI)\nopenmpi OMPI_MAJOR_VERSION\n#elif defined(CRAY_MPICH_VERSION)\n' \
        'cray CRAY_MPICH_VERSION\n#elif defined(MPICH_VERSION)\nmpich MPICH_VERSION\n#endif\n'
probed = subprocess.run([COMPILER, '-E', '-P', '-x', 'c++', '-'], input=PROBE, stdout=subprocess.PIPE, text=True)
if probed.returncode:
    sys.exit(f'{COMPILER} finds no mpi.h: is it the C++ compiler of an MPI?')
built = {'torch': '.'.join(map(str, TORCH)), 'compiler': shutil.which(COMPILER),
         'mpi': probed.stdout.strip().splitlines()[-1].replace('"', ''),
         'cxx11_abi': torch._C._GLIBCXX_USE_CXX11_ABI}
with open(os.path.join(HERE, 'slingmpi', 'built.json'), 'w') as file:
    json.dump(built, file, indent=1)

# always built again: neither distutils nor ninja sees that MPI, PyTorch or the compiler is another one
shutil.rmtree(os.path.join(HERE, 'build'), ignore_errors=True)
os.environ['CXX'] = COMPILER


class Build(BuildExtension):
    """Leaves it to the compiler to find its MPI."""

    def finalize_options(self):
        """For a shared libpython, which no module needs, setuptools lists LIBDIR first: on Debian, another MPI's."""
        super().finalize_options()
        self.library_dirs = [path for path in self.library_dirs if path != sysconfig.get_config_var('LIBDIR')]


flags = ['-O2', '-g0', f'-DSLINGMPI_TORCH={TORCH[0] * 100 + TORCH[1]}', '-DOMPI_SKIP_MPICXX', '-DMPICH_SKIP_MPICXX']
setup(ext_modules=[CppExtension('slingmpi._backend', ['src/slingmpi.cpp'], extra_compile_args=flags)],
      cmdclass={'build_ext': Build})
