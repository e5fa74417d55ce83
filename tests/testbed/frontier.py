# SPDX-License-Identifier: GPL-2.0-only
"""Frontier as far as the modules of its PyTorch page go, on this machine's gcc and MPICH.

What it stands for: olcf/olcf-user-docs@2745903 and 4768410 (pytorch_frontier.rst). Cray's compiler `cc` links the real
MPICH, and the GPU Transport Layer (an empty library) where an accelerator module is loaded, as Cray's does.
"""

import pathlib
import re

from . import ROOT, quickvenv
from .derecho import CONDA, Derecho, copy_or_link, mpich_of_the_machine, needed_commands, script, shared_library

CC = """#!/bin/bash
gtl=()
[[ -z ${{CRAY_ACCEL_TARGET-}} ]] || gtl=(-Wl,--no-as-needed -L{gtl} -Wl,-rpath,{gtl} -lmpi_gtl_hsa)
exec gcc {headers} "$@" -L{mpich}/lib -lmpich "${{gtl[@]}}"
"""


class Frontier:
    """A copy of the tree below a directory of the test.

    :ivar modulepath: what MODULEPATH is after login
    :ivar metadata: the bundle's metadata of external modules, with the prefixes of this tree
    :ivar mpich: prefix of its MPI
    """

    def __init__(self, path):
        needed_commands()
        self.path = pathlib.Path(path)
        self.modulepath = self.path / 'modules'
        self.mpich = self.path / 'opt/cray/pe/mpich/9.1.0/ofi/gnu/12.3'
        library, headers = mpich_of_the_machine()
        (self.mpich / 'lib').mkdir(parents=True)
        copy_or_link(library, self.mpich / 'lib/libmpich.so.12')
        (self.mpich / 'lib/libmpich.so').symlink_to('libmpich.so.12')
        gtl = shared_library(self.path / 'opt/cray/pe/mpich/9.1.0/gtl/lib/libmpi_gtl_hsa.so').parent
        compiler = script(self.path / 'opt/cray/pe/craype/bin/cc',
                          CC.format(headers=headers, mpich=self.mpich, gtl=gtl))  # fmt: skip
        for version in ('8.5.0', '8.7.0'):
            self.module(self.modulepath, f'PrgEnv-gnu/{version}', f'prepend_path("PATH", "{compiler.parent}")',
                        f'setenv("CRAY_MPICH_DIR", "{self.mpich}")', 'setenv("PE_ENV", "GNU")')  # fmt: skip
        self.module(self.modulepath, 'cpe/26.03', 'setenv("CPE_VERSION", "26.03")')
        for version in ('5.7.1', '6.4.1', '7.1.1'):
            self.module(self.modulepath, f'rocm/{version}', f'setenv("ROCM_PATH", "/opt/rocm-{version}")')
        self.module(self.modulepath, 'craype-accel-amd-gfx90a', 'setenv("CRAY_ACCEL_TARGET", "amd_gfx90a")')
        self.module(self.modulepath, 'libfabric/2.3.1')
        conda = script(self.path / 'sw/miniforge3/bin/conda',
                       CONDA.replace('{python3}', f'{quickvenv.python3("/usr/bin/python3")}/python3'))  # fmt: skip
        self.module(self.modulepath, 'miniforge3/23.11.0-0', f'prepend_path("PATH", "{conda.parent}")')
        text = (ROOT / 'hooks/sites/frontier_external_modules_metadata.cfg').read_text()
        self.metadata = self.path / 'metadata.cfg'
        self.metadata.write_text(re.sub(r'^(prefix *= *)/', rf'\1{self.path}/', text, flags=re.M))

    module = Derecho.module
    install = Derecho.install

    @property
    def env(self):
        """Variables of a shell on Frontier, to be put on top of those of testbed.easybuild.EasyBuild."""
        return {
            'MODULEPATH': str(self.modulepath),
            'LMOD_SYSTEM_NAME': 'frontier',
            'EASYBUILD_EXTERNAL_MODULES_METADATA': str(self.metadata),
        }
