# SPDX-License-Identifier: GPL-2.0-only
"""Frontier as far as the modules of its PyTorch page go, on this machine's gcc and MPICH.

Cray's compiler `cc` links the real MPICH,
and the GPU Transport Layer (an empty library) where an accelerator module is loaded, as Cray's does.

Who says so besides us ("believed": nobody):

* modules of 2026: olcf/olcf-user-docs@2745903 software/analytics/pytorch_frontier.rst (2026-07-22)
* libfabric/2.3.1: dfielding14/athenak@df52d2b tst/publication/frontier_control_plane/control_plane_common.py (loaded
  modules)
* modules of 2024, removed since: olcf/olcf-user-docs@4768410 software/python/pytorch_frontier.rst
* rocm/6.4.1: olcf/olcf-user-docs@aa07b6d software/analytics/pytorch_frontier.rst (2025-09-17, until 2026-04-13)
* variables of the modules: dfielding14/athenak@df52d2b tst/publication/frontier_control_plane/control_plane_common.py
  (environment of cpe/24.11, PrgEnv-amd); olcf/olcf-user-docs@2745903 systems/frontier_user_guide.rst
* LMOD_SYSTEM_NAME: AMReX-Codes/amrex Src/Base/AMReX_Machine.cpp
* miniforge3: olcf/olcf-user-docs@2745903 software/python/conda_basics.rst, line 49
* Cray MPICH 9.1.0: prefix, and a library without a number: believed of Frontier;
  https://github.com/ickc/lfric-env-isambard/blob/480f4e32c474132676f5c9a60360320794e5addb/staging/dr932-mpi-scaling/results/2node-5583599.out
  (Isambard, 2026-07-27: mpich/9.1.0/ofi/gnu/12.3/lib/libmpi_gnu.so.12)
* GPU Transport Layer, and that cc links it where an accelerator's module is loaded: olcf/olcf-user-docs@2745903
  systems/frontier_user_guide.rst (GPU-Aware MPI; `ldd`), software/analytics/pytorch_frontier.rst (modules unloaded for
  mpi4py)
"""

import pathlib

from . import quickvenv
from .derecho import CONDA, Derecho, cray_mpich, gpu_transport_layer, needed_commands, own_site, script

CC = """#!/bin/bash
gtl=()
[[ -z ${{CRAY_ACCEL_TARGET-}} ]] || gtl=(-Wl,--no-as-needed -L{gtl} -Wl,-rpath,{gtl} -lmpi_gtl_hsa)
exec {compiler} {flags} "${{gtl[@]}}"
"""


class Frontier:
    """A copy of the tree below a directory of the test.

    :ivar modulepath: what MODULEPATH is after login
    :ivar sites: a directory with the site's file, in which the prefixes are those of this tree
    :ivar mpich: prefix of its MPI
    """

    def __init__(self, path, python='/usr/bin/python3'):
        """
        :param python: what conda makes environments with, whatever version is asked for
        """
        needed_commands()
        self.path = pathlib.Path(path)
        self.modulepath = self.path / 'modules'
        self.mpich = self.path / 'opt/cray/pe/mpich/9.1.0/ofi/gnu/12.3'
        # from 9.1.0 on without a number
        flags = cray_mpich(self.mpich, 'mpi_gnu')
        gtl = gpu_transport_layer(self.path / 'opt/cray/pe/mpich/9.1.0/gtl/lib', 'hsa').parent
        for name, own in (('cc', 'gcc'), ('CC', 'g++')):
            compiler = script(self.path / 'opt/cray/pe/craype/2.7.33/bin' / name,
                              CC.format(compiler=own, flags=flags, gtl=gtl))
        for version in ('8.5.0', '8.7.0'):
            self.module(self.modulepath, f'PrgEnv-gnu/{version}', f'prepend_path("PATH", "{compiler.parent}")',
                        'setenv("PE_ENV", "GNU")', 'load("cray-mpich/9.1.0")')  # fmt: skip
        self.module(self.modulepath, 'cray-mpich/9.1.0', f'setenv("CRAY_MPICH_DIR", "{self.mpich}")',
                    f'prepend_path("CRAY_LD_LIBRARY_PATH", "{self.mpich}/lib:{gtl}")',
                    f'setenv("PE_MPICH_GTL_DIR_amd_gfx90a", "-L{gtl}")')  # fmt: skip
        self.module(self.modulepath, 'cpe/26.03')
        for version in ('5.7.1', '6.4.1', '7.1.1'):
            self.module(self.modulepath, f'rocm/{version}', f'setenv("ROCM_PATH", "/opt/rocm-{version}")')
        self.module(self.modulepath, 'craype-accel-amd-gfx90a', 'setenv("CRAY_ACCEL_TARGET", "amd_gfx90a")')
        self.module(self.modulepath, 'libfabric/2.3.1')
        conda = script(self.path / 'sw/frontier/miniforge3/23.11.0-0/bin/conda',
                       CONDA.replace('{python3}', f'{quickvenv.python3(python)}/python3'))  # fmt: skip
        self.module(self.modulepath, 'miniforge3/23.11.0-0', f'prepend_path("PATH", "{conda.parent}")')
        self.sites = own_site(self.path, 'frontier')

    module = Derecho.module
    install = Derecho.install

    @property
    def env(self):
        """Variables of a shell on Frontier, to be put on top of those of testbed.easybuild.EasyBuild."""
        return {'MODULEPATH': str(self.modulepath), 'LMOD_SYSTEM_NAME': 'frontier',
                'SLINGTORCH_SITES_PATH': str(self.sites)}
