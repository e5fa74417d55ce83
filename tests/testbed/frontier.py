# SPDX-License-Identifier: GPL-2.0-only
"""Frontier as far as the modules of its PyTorch page go, on this machine's gcc and MPICH.

What it asserts about the machine, with the witness of each fact: witnesses.cfg. Cray's compiler `cc` links the real MPICH,
and the GPU Transport Layer (an empty library) where an accelerator module is loaded, as Cray's does.
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
        return {
            'MODULEPATH': str(self.modulepath),
            'LMOD_SYSTEM_NAME': 'frontier',
            'SLINGTORCH_SITES_PATH': str(self.sites),
        }
