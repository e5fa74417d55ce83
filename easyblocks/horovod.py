# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild support for Horovod as an extension of a Python environment, implemented as an easyblock."""
import glob
import os
import tempfile

import easybuild.tools.environment as env
from easybuild.easyblocks.generic.environmentpackage import EnvironmentPackage
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.filetools import ERROR, IGNORE, symlink, which
from slingtorch.install.dependencies import dependency_root, with_parameters
from slingtorch.install.process import archs, check_two_ranks, mpi_launcher, needed_libraries, probe_pytorch

ALL_REDUCE = """
import horovod.torch as hvd, sys, torch
hvd.init()
found = hvd.allreduce(torch.full((1000,), hvd.rank() + 1.0), op=hvd.Sum)
right = hvd.size() == 2 and bool((found == 3).all())
sys.exit(0 if right else "%d ranks of 2, and a sum of %s in place of 3" % (hvd.size(), float(found[0])))
"""


class EB_Horovod(EnvironmentPackage):
    """Builds Horovod for the PyTorch of the environment: MPI and Gloo, and for GPUs NCCL.

    All options that Horovod would guess are set: otherwise it would use any CUDA that happens to be there, and link a
    static NCCL, a second one besides PyTorch's, without the network plugin.
    """

    IMPORT_MPI = 'import horovod.torch'

    @staticmethod
    def extra_options(extra_vars=None):
        """Options of the extension."""
        extra_vars = with_parameters(EnvironmentPackage.extra_options(extra_vars), {
            'cuda_home': [None, "Directory of CUDA; may contain $VARIABLES; None: the dependency called CUDA"],
            'gpu_operations': [None, "What transfers tensors in GPU memory: 'NCCL', or None without GPUs"],
            'mpicxx': ['mpicxx', "MPI's C++ compiler, besides mpicc: a command in $PATH"],
            'nccl_home': [None, "Directory of NCCL; may contain $VARIABLES; None: the dependency called NCCL"],
        })
        extra_vars['mpicc'][0] = 'mpicc'
        return extra_vars

    def configure_step(self):
        """Check PyTorch and MPI, and set Horovod's options, which are variables."""
        super().configure_step()
        self.check_pytorch()
        options = {
            'CC': self.mpi_compiler(), 'CXX': which(self.cfg['mpicxx'], on_error=ERROR),
            'HOROVOD_CMAKE': which('cmake', on_error=IGNORE) or os.path.join(
                os.path.dirname(self.master.own_python), 'cmake'),
            'HOROVOD_CPU_OPERATIONS': 'MPI',
            # WITH_TENSORFLOW=0, as in older recipes, does nothing
            'HOROVOD_WITH_MPI': '1', 'HOROVOD_WITH_PYTORCH': '1',
            'HOROVOD_WITHOUT_MXNET': '1', 'HOROVOD_WITHOUT_TENSORFLOW': '1',
            'MAKEFLAGS': '-j%d' % self.cfg.parallel,
        }
        if self.cfg['gpu_operations']:
            options.update(self.cuda_options())
        for name, value in sorted(options.items()):
            env.setvar(name, value)

    def check_pytorch(self):
        """Raise EasyBuildError for a PyTorch that Horovod cannot be built for."""
        process = probe_pytorch(self.master.own_python)
        if isinstance(process, str):
            raise EasyBuildError("Horovod needs the PyTorch of the environment: %s", process)
        if process['hip']:
            raise EasyBuildError("Horovod %s cannot be built for ROCm: it uses headers, a macro and a CMake function "
                                 "that ROCm 6 no longer has (ROCm/legacy-rocm-build issues 3987, 4865), and nobody "
                                 "maintains it. Use torch.distributed with RCCL instead", self.version)
        if bool(process['cuda']) != bool(self.cfg['gpu_operations']):
            raise EasyBuildError("PyTorch %s of the environment is %s, but Horovod's gpu_operations is %r: set it to "
                                 "%r", process['version'], "for CUDA" if process['cuda'] else "for processors",
                                 self.cfg['gpu_operations'], 'NCCL' if process['cuda'] else None)

    def root(self, name, option):
        """Value of an option, else the prefix of a dependency; EasyBuildError if it is not a directory."""
        path = os.path.expandvars(self.cfg[option]) if self.cfg[option] else dependency_root(self.master.cfg, name)
        if not path or not os.path.isdir(path):
            raise EasyBuildError("Horovod with gpu_operations = 'NCCL' needs %s, but %s. Correct %s, or add a "
                                 "dependency with that name", name, "there is no directory %s" % path if path else
                                 "no dependency has that name", option)
        return path

    def cuda_options(self):
        """Variables for CUDA and NCCL."""
        cuda, nccl = self.root('CUDA', 'cuda_home'), self.root('NCCL', 'nccl_home')
        capabilities = archs(self.master.cfg, 'cuda_compute_capabilities')
        if not capabilities:
            raise EasyBuildError("List of CUDA compute capabilities must be specified, as parameter "
                                 "cuda_compute_capabilities or as option of eb")
        if not glob.glob(os.path.join(nccl, 'lib*', 'libnccl.so')):
            raise EasyBuildError("There is no libnccl.so in %s/lib or lib64. Horovod would link a static NCCL, besides "
                                 "PyTorch's own and without the network plugin: correct nccl_home", nccl)
        env.setvar('LD_LIBRARY_PATH', with_stub(cuda))
        return {
            'CUDA_PATH': cuda, 'HOROVOD_CUDA_HOME': cuda, 'HOROVOD_NCCL_HOME': nccl,
            'HOROVOD_GPU': 'CUDA', 'HOROVOD_GPU_OPERATIONS': self.cfg['gpu_operations'],
            'HOROVOD_NCCL_LINK': 'SHARED',
            'HOROVOD_BUILD_CUDA_CC_LIST': ','.join(arch.replace('.', '') for arch in capabilities),
        }

    def sanity_check_step(self, *args, **kwargs):
        """Check the NCCL of what was built, and run an all-reduce on two ranks."""
        passed, message = super().sanity_check_step(*args, **kwargs)
        wrong = [] if self.dry_run else self.check_build()
        return passed and not wrong, '; '.join([message] * bool(message) + wrong)

    def check_build(self):
        """List of sentences about what is wrong with the installed Horovod."""
        words, wrong = [], []
        if self.cfg['gpu_operations']:
            words = ['env', 'LD_LIBRARY_PATH=' + with_stub(self.root('CUDA', 'cuda_home'))]
            libraries = glob.glob(os.path.join(self.installdir, 'lib', 'python3*', 'site-packages', 'horovod', 'torch',
                                               'mpi_lib_v2*.so'))
            if not any('libnccl.so.2' in needed_libraries(path) for path in libraries):
                wrong.append("Horovod is not linked with a shared NCCL, so its NCCL is not that of PyTorch")
        return wrong or check_two_ranks("Horovod's all-reduce", mpi_launcher(self.mpi_compiler()),
                                        words + [self.master.own_python, '-s', '-c', ALL_REDUCE])


def with_stub(cuda):
    """$LD_LIBRARY_PATH with CUDA's stub libcuda.so as libcuda.so.1 in front, for nodes without a driver."""
    directory = tempfile.mkdtemp()
    for stub in [os.path.join(cuda, lib, 'stubs', 'libcuda.so') for lib in ['lib64', 'lib']]:
        if os.path.exists(stub):
            symlink(stub, os.path.join(directory, 'libcuda.so.1'))
            break
    return directory + ':' + os.environ.get('LD_LIBRARY_PATH', '')
