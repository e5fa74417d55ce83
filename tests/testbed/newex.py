# SPDX-License-Identifier: GPL-2.0-only
"""A Cray EX with A100 that slingtorch does not know: modules, nvidia-smi and fi_info, on this machine's gcc and Python.

CUDA, libfabric and MPI are empty.

Who says so besides us ("believed": nobody):

* programming environment and Python: EPCCed/cirrus-docs@7b569d0 docs/user-guide/development.md and python.md (Cirrus,
  another Cray EX)
* variable of cray-mpich: dfielding14/athenak@df52d2b tst/publication/frontier_control_plane/control_plane_common.py
  (cray-mpich/8.1.31 on Frontier)
* libfabric, its place, and what fi_info prints: NCAR/HPC-Docs@b4f71ff
  docs/compute-systems/derecho/derecho-modules-list.md; eth-cscs/cscs-docs@80abed1
  docs/software/container-engine/resource-hook.md
* libfabric is loaded after login: merthidayetoglu/Bisection_Bandwidth_Tester@115809f results/crusher_output.md (`module
  list` on Crusher, 2023-01-23)
* CUDA of the centre, an older Python, and what lies where: believed: no machine in particular
"""
import io
import os
import pathlib
import tarfile

from . import ROOT, quickvenv, wheels
from .derecho import Derecho, script, shared_library

GPUS = ''.join(f'GPU {number}: NVIDIA A100-SXM4-40GB (UUID: GPU-{number})\\n' for number in range(4))


class NewEX:
    """A copy of the tree below a directory of the test.

    :ivar modulepath: what MODULEPATH is after login
    :ivar commands: directory of the commands that a node with GPUs has
    :ivar libfabric: prefix of its libfabric
    """

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.modulepath = self.path / 'modules'
        craype = self.path / 'opt/cray/pe/craype/2.7.34/bin'
        for name, compiler in (('cc', 'gcc'), ('CC', 'g++')):
            script(craype / name, f'#!/bin/sh\nexec {compiler} "$@"\n')
        self.module(self.modulepath, 'PrgEnv-gnu/8.6.0', f'prepend_path("PATH", "{craype}")', 'setenv("PE_ENV", "GNU")',
                    'load("cray-mpich/8.1.31")')  # fmt: skip
        mpich = self.path / 'opt/cray/pe/mpich/8.1.31/ofi/gnu/12.3'
        (mpich / 'include').mkdir(parents=True)
        (mpich / 'include/mpi.h').write_text('')
        self.module(self.modulepath, 'cray-mpich/8.1.31', f'setenv("CRAY_MPICH_DIR", "{mpich}")')
        for version in ('12.4.1', '12.9.0'):
            cuda = self.path / f'opt/cuda/{version}'
            script(cuda / 'bin/nvcc', '#!/bin/sh\nexit 0\n')
            (cuda / 'include').mkdir()
            (cuda / 'include/cuda_runtime.h').write_text('')
            shared_library(cuda / 'lib64/libcudart.so.12')
            self.module(self.modulepath, f'cuda/{version}', f'setenv("CUDA_HOME", "{cuda}")',
                        f'prepend_path("PATH", "{cuda}/bin")')  # fmt: skip
        self.libfabric = self.path / 'opt/cray/libfabric/1.22.0'
        (self.libfabric / 'include/rdma').mkdir(parents=True)
        (self.libfabric / 'include/rdma/fabric.h').write_text('')
        library = shared_library(self.libfabric / 'lib64/libfabric.so.1', source='int fi_getinfo;')
        (library.parent / 'libfabric.so').symlink_to(library.name)
        # what the real one printed on Alps
        record = (ROOT / 'tests/records/fi_info/alps-cxi.txt').read_text().partition('\n\n')[2]
        (self.path / 'fi_info').write_text(record)
        script(self.libfabric / 'bin/fi_info', '#!/bin/sh\n[ "$1" = -l ] && { echo cxi:; exit; }\n'
               f'exec cat {self.path}/fi_info\n')  # fmt: skip
        self.module(self.modulepath, 'libfabric/1.22.0', f'prepend_path("PATH", "{self.libfabric}/bin")',
                    f'prepend_path("LD_LIBRARY_PATH", "{self.libfabric}/lib64")')  # fmt: skip
        for version in ('3.9.13', '3.11.7'):
            python = self.path / f'opt/cray/pe/python/{version}/bin'
            python.mkdir(parents=True)
            (python / 'python3').symlink_to(f'{quickvenv.python3()}/python3')
            self.module(self.modulepath, f'cray-python/{version}', f'prepend_path("PATH", "{python}")')
        self.commands = script(self.path / 'usr/bin/nvidia-smi', f'#!/bin/sh\nprintf "{GPUS}"\n').parent

    module = Derecho.module

    @property
    def env(self):
        """Variables of a shell after login, with libfabric's module loaded, as on every Cray EX."""
        return {'MODULEPATH': str(self.modulepath), 'LOADEDMODULES': 'libfabric/1.22.0',
                '_LMFILES_': f'{self.modulepath}/libfabric/1.22.0.lua',
                'PATH': f'{self.libfabric}/bin:{os.environ["PATH"]}'}


CONFIGURE = """#!/bin/sh
[ "$1" = --help ] && { echo '  --with-libfabric=PATH --with-cuda=PATH --with-hwloc=PATH'; exit; }
for argument; do
    case $argument in --prefix=*) prefix=${argument#*=} ;; --with-libfabric=*) fabric=${argument#*=} ;; esac
done
echo "$@" > arguments
{ printf 'all:\\n\\tgcc -shared -fPIC -o plugin.so plugin.c -L%s/lib64 %s -lfabric\\n' "$fabric" "$LDFLAGS"
printf 'install:\\n\\tinstall -D plugin.so %s/lib/libnccl-net-ofi.so\\n\\tcp arguments %s\\n' "$prefix" "$prefix"
} > Makefile
"""


def plugin_source(directory):
    """Put a toy for the plugin's source archive into a source path: configure is asked, and links, as upstream's."""
    path = pathlib.Path(directory) / 'a/aws-ofi-nccl/v1.21.1.tar.gz'
    path.parent.mkdir(parents=True)
    source = ''.join(f'int ncclNetPlugin_v{api} = 1;\n' for api in range(6, 13))
    files = {'configure': CONFIGURE, 'plugin.c': source + 'extern int fi_getinfo; int *use = &fi_getinfo;\n'}
    with tarfile.open(path, 'w:gz') as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f'aws-ofi-nccl-1.21.1/{name}')
            info.size, info.mode = len(text.encode()), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))


TORCH = """
import ctypes, glob, os, sys
for path in glob.glob(os.path.join(os.path.dirname(__file__), 'lib', '*.so*')):
    ctypes.CDLL(path)
del sys.modules['torch']
sys.path.insert(0, %r)
import torch
torch.version.cuda, torch.distributed.is_nccl_available = '12.8', lambda: False
"""


def real_torch(easyconfig, directory, site_packages):
    """
    Make an easyconfig of a wheel one for tiny wheels, as wheels.stand_in does; its torch is the real one of elsewhere.

    :return: settings of pip for these wheels alone
    """
    return wheels.stand_in(easyconfig, directory, torch=TORCH % str(site_packages))
