# SPDX-License-Identifier: GPL-2.0-only
"""Cirrus as far as the modules of EPCC's recipes go, on this machine's gcc, MPICH and Python: that of today, and the
former.

CUDA and NCCL are empty libraries.

Who says so besides us ("believed": nobody):

* modules of the EX: EPCCed/cirrus-docs@7b569d0 docs/user-guide/development.md (`module avail`, `module list`; "mpicc
  are not available on Cirrus")
* cray-python: EPCCed/cirrus-docs@7b569d0 docs/user-guide/python.md, lines 274 to 299
* variables of cray-python: hpc-uk/build-instructions@bc7eb48
  pyenvs/pytorch/build_pytorch_1.13.0a0_from_source_archer2_cpu.md (ARCHER2, the same module)
* prefix of cray-mpich: EPCCed/cirrus-docs@7b569d0 docs/user-guide/containers.md, lines 477 to 481
* what is in the prefix of cray-mpich: believed, by the rule of ofi/gnu/9.1 on Derecho
* variables of cray-mpich: dfielding14/athenak@df52d2b tst/publication/frontier_control_plane/control_plane_common.py
  (cray-mpich/8.1.31 on Frontier)
* the former machine: modules, NVHPC and what they set: hpc-uk/build-instructions@bc7eb48
  pyenvs/pytorch/build_pytorch_2.3.1_cirrus_gpu.md, pyenvs/python/build_python_3.12.1_cirrus_gpu.md (MPI is Open MPI
  4.1.6, for which MPICH stands)
* the former machine: the module for CPUs: hpc-uk/build-instructions@bc7eb48
  pyenvs/python/build_python_3.12.1_cirrus_cpu.md
* the former machine: LD_LIBRARY_PATH: believed
"""

import pathlib

from slingtorch import sites

from . import quickvenv
from .derecho import Derecho, cray_mpich, needed_commands, own_site, script, shared_library


MPI = sites.load('cirrus', {}).generations['cpe-25.03']['mpi'].split()[0]


class Cirrus:
    """A copy of the tree below a directory of the test.

    :ivar modulepath: what MODULEPATH is after login
    :ivar sites: a directory with the site's file, in which the prefixes are those of this tree
    :ivar mpich: prefix of its MPI
    :ivar openmpi: prefix of the former machine's MPI, for which the same MPICH stands
    :ivar nvhpc: what NVHPC_ROOT is
    """

    def __init__(self, path):
        needed_commands()
        self.path = pathlib.Path(path)
        self.modulepath = self.path / 'modules'
        self.mpich = self.path / 'opt/cray/pe/mpich/8.1.32/ofi/gnu/11.2'
        link = cray_mpich(self.mpich, 'mpi_gnu_112')
        # there is no mpicc in PATH
        for name, compiler in (('mpicc', 'gcc'), ('mpicxx', 'g++')):
            script(self.mpich / 'bin' / name, f'#!/bin/sh\nexec {compiler} {link}\n')
        craype = self.path / 'opt/cray/pe/craype/2.7.34/bin'
        for name, compiler in (('cc', 'gcc'), ('CC', 'g++')):
            script(craype / name, f'#!/bin/sh\nexec {compiler} {link}\n')
        python = quickvenv.python3('/usr/bin/python3')
        pythons = self.path / 'opt/cray/pe/python/3.11.7/bin'
        pythons.mkdir(parents=True)
        (pythons / 'python3').symlink_to(f'{python}/python3')

        self.module(self.modulepath, 'PrgEnv-gnu/8.6.0', f'prepend_path("PATH", "{craype}")', 'setenv("PE_ENV", "GNU")')
        self.module(self.modulepath, MPI, f'setenv("CRAY_MPICH_DIR", "{self.mpich}")',
                    f'prepend_path("CRAY_LD_LIBRARY_PATH", "{self.mpich}/lib")')  # fmt: skip
        self.module(self.modulepath, 'cray-python/3.11.7', f'prepend_path("PATH", "{pythons}")',
                    'setenv("CRAY_PYTHON_LEVEL", "3.11.7")')  # fmt: skip

        # the former machine
        self.openmpi = self.path / 'openmpi'
        for name, compiler in (('mpicc', 'gcc'), ('mpicxx', 'g++')):
            script(self.openmpi / 'bin' / name, f'#!/bin/sh\nexec {compiler} {link}\n')
        self.nvhpc = self.path / 'nvhpc'
        shared_library(self.nvhpc / 'cuda/12.4/lib64/stubs/libcuda.so', soname='libcuda.so.1')
        nccl = shared_library(self.nvhpc / 'comm_libs/nccl/lib/libnccl.so.2')
        (nccl.parent / 'libnccl.so').symlink_to(nccl.name)
        cmake = script(self.path / 'cmake/bin/cmake', '#!/bin/sh\necho cmake version 3.25.2\n').parent
        self.module(self.modulepath, 'cmake/3.25.2', f'prepend_path("PATH", "{cmake}")')
        for name in ('python/3.12.1', 'python/3.12.1-gpu'):
            self.module(self.modulepath, name, f'prepend_path("PATH", "{self.openmpi}/bin")', 'conflict("python")',
                        f'prepend_path("PATH", "{pythons}")', 'setenv("MINICONDA3_PYTHON_VERSION", "3.12.1")',
                        f'prepend_path("LD_LIBRARY_PATH", "{nccl.parent}")',
                        f'setenv("NVHPC_ROOT", "{self.nvhpc}")' if name.endswith('gpu') else '')  # fmt: skip
        self.sites = own_site(self.path, 'cirrus', 'cirrus_ice')

    module = Derecho.module

    @property
    def env(self):
        """Variables of a shell on Cirrus, to be put on top of those of testbed.easybuild.EasyBuild."""
        return {'MODULEPATH': str(self.modulepath), 'SLINGTORCH_SITES_PATH': str(self.sites)}
