# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild support for Horovod as an extension of software that is a Python environment, as an easyblock."""
import glob
import os
import re
import shlex
import tempfile

import easybuild.tools.environment as env
from easybuild.easyblocks.generic.environmentpackage import EnvironmentPackage
from easybuild.tools import LooseVersion
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit, print_warning
from easybuild.tools.config import build_option
from easybuild.tools.filetools import IGNORE, symlink, which
from easybuild.tools.run import run_shell_cmd
from slingtorch.install.dependencies import dependency_root, last_lines, with_parameters
from slingtorch.install.process import (
    OPENMPI_SETTINGS, mpi_launcher, needed_libraries, probe_pytorch)

# The newer one was tried with the patch as it is, the older one with its changes for C++17 alone, nothing between or
# beyond them (docs/verification.md).
TRIED_PYTORCH = ('2.3.1', '2.13.0')
# Horovod's CMakeLists.txt wants 3.13. From 4.0 on CMake refuses the 2.8 of the Gloo in it, which the patch changes.
OLDEST_CMAKE, UNTRIED_CMAKE = '3.13', '5'
ALL_REDUCE = """
import horovod.torch as hvd, sys, torch
hvd.init()
found = hvd.allreduce(torch.full((1000,), hvd.rank() + 1.0), op=hvd.Sum)
right = hvd.size() == 2 and bool((found == 3).all())
sys.exit(0 if right else "%d ranks of 2, and a sum of %s in place of 3" % (hvd.size(), float(found[0])))
"""


class EB_Horovod(EnvironmentPackage):
    """Builds Horovod for the PyTorch of the environment: MPI and Gloo, and for GPUs NCCL.

    Options that Horovod itself would guess are all given: a CUDA that happens to be there would be built for, and NCCL
    would be linked statically, a second one beside PyTorch's, without the network plugin.
    """

    IMPORT_MPI = 'import horovod.torch'

    @staticmethod
    def extra_options(extra_vars=None):
        """Options of the extension."""
        extra_vars = with_parameters(EnvironmentPackage.extra_options(extra_vars), {
            'cpu_operations': ['MPI', "What moves tensors in the memory of processors: 'MPI' or 'GLOO'"],
            'cuda_home': [None, "Directory of CUDA, may contain $VARIABLES; None: the dependency called CUDA"],
            'gpu_operations': [None, "What moves tensors in the memory of GPUs: 'NCCL', or None without GPUs"],
            'mpicxx': ['mpicxx', "MPI's compiler for C++, beside mpicc: a command in $PATH"],
            'nccl_home': [None, "Directory of NCCL, may contain $VARIABLES; None: the dependency called NCCL"],
        })
        extra_vars['mpicc'][0] = 'mpicc'
        return extra_vars

    def configure_step(self):
        """Look at what Horovod is built for and with; say all of it in variables, which are Horovod's options."""
        super().configure_step()
        operations = self.cfg['cpu_operations'], self.cfg['gpu_operations']
        if operations[0] not in ['MPI', 'GLOO'] or operations[1] not in [None, 'NCCL']:
            raise EasyBuildError("Horovod: cpu_operations is %r and must be 'MPI' or 'GLOO', gpu_operations is %r and "
                                 "must be 'NCCL' or None", *operations)
        self.check_pytorch()
        mpicxx = which(self.cfg['mpicxx'], on_error=IGNORE)
        if not mpicxx:
            raise EasyBuildError("Horovod is to be built with MPI's compiler '%s', and there is none in $PATH. Add the "
                                 "module that has it to the dependencies, or correct mpicxx", self.cfg['mpicxx'])
        options = {
            'CC': self.mpi_compiler(), 'CXX': mpicxx,
            'HOROVOD_CMAKE': self.find_cmake(),
            'HOROVOD_CPU_OPERATIONS': self.cfg['cpu_operations'],
            # WITH_TENSORFLOW=0, as older recipes have it, does nothing
            'HOROVOD_WITH_MPI': '1', 'HOROVOD_WITH_PYTORCH': '1',
            'HOROVOD_WITHOUT_MXNET': '1', 'HOROVOD_WITHOUT_TENSORFLOW': '1',
            'MAKEFLAGS': '-j%d' % self.cfg.parallel,
        }
        if self.cfg['gpu_operations']:
            options.update(self.cuda_options())
        for name, value in sorted(options.items()):
            env.setvar(name, value)

    def check_pytorch(self):
        """EasyBuildError for a PyTorch that Horovod cannot be built for, and a warning for one that was not tried."""
        process = probe_pytorch(self.master.own_python)
        if isinstance(process, str):
            raise EasyBuildError("Horovod needs the PyTorch of the environment: %s", process)
        if process['hip']:
            raise EasyBuildError("Horovod %s cannot be built for ROCm: it asks for headers, a macro and a CMake "
                                 "function that ROCm 6 no longer has (ROCm/legacy-rocm-build issues 3987, 4865), and "
                                 "nobody maintains it. Instead: torch.distributed with RCCL", self.version)
        if bool(process['cuda']) != bool(self.cfg['gpu_operations']):
            raise EasyBuildError("PyTorch %s of the environment is %s, and Horovod's gpu_operations is %r: set it to "
                                 "%r", process['version'], "for CUDA" if process['cuda'] else "for processors",
                                 self.cfg['gpu_operations'], 'NCCL' if process['cuda'] else None)
        version = LooseVersion(process['version'].partition('+')[0])
        if not LooseVersion(TRIED_PYTORCH[0]) <= version <= LooseVersion(TRIED_PYTORCH[1]):
            print_warning("Horovod %s was tried with PyTorch %s to %s, and this is %s: it may not compile",
                          self.version, TRIED_PYTORCH[0], TRIED_PYTORCH[1], version, log=self.log)

    def find_cmake(self):
        """Full path of the CMake to build with: the first in $PATH, else the environment's own."""
        cmake = which('cmake', on_error=IGNORE) or os.path.join(os.path.dirname(self.master.own_python), 'cmake')
        output = run_shell_cmd(shlex.quote(cmake) + ' --version', fail_on_error=False, hidden=True).output
        found = re.search(r'cmake version ([\d.]+)', output)
        version = found.group(1) if found else None
        if not version or not LooseVersion(OLDEST_CMAKE) <= LooseVersion(version) < LooseVersion(UNTRIED_CMAKE):
            raise EasyBuildError("Horovod needs CMake %s or newer, below %s, and there is %s. Add a module of CMake to "
                                 "the builddependencies, or the package cmake to the environment", OLDEST_CMAKE,
                                 UNTRIED_CMAKE, 'CMake %s (%s)' % (version, cmake) if version else 'none in $PATH')
        return cmake

    def root(self, name, option):
        """Prefix of a dependency, or what the option says; EasyBuildError if that is not a directory."""
        path = os.path.expandvars(self.cfg[option]) if self.cfg[option] else dependency_root(self.master.cfg, name)
        if not path or not os.path.isdir(path):
            raise EasyBuildError("Horovod with gpu_operations = 'NCCL' needs %s, and %s. Correct %s, or add a "
                                 "dependency that has that name", name, "there is no directory %s" % path if path else
                                 "no dependency is called so", option)
        return path

    def cuda_options(self):
        """Variables for CUDA and NCCL."""
        cuda, nccl = self.root('CUDA', 'cuda_home'), self.root('NCCL', 'nccl_home')
        archs = build_option('cuda_compute_capabilities') or self.master.cfg['cuda_compute_capabilities']
        if not archs:
            raise EasyBuildError("List of CUDA compute capabilities must be specified, as parameter "
                                 "cuda_compute_capabilities or as option of eb")
        if not glob.glob(os.path.join(nccl, 'lib*', 'libnccl.so')):
            raise EasyBuildError("There is no libnccl.so in %s/lib or lib64. Horovod would link a static NCCL, beside "
                                 "PyTorch's own and without the network plugin: correct nccl_home", nccl)
        env.setvar('LD_LIBRARY_PATH', stub_directory(cuda) + ':' + os.environ.get('LD_LIBRARY_PATH', ''))
        return {
            'CUDA_PATH': cuda, 'HOROVOD_CUDA_HOME': cuda, 'HOROVOD_NCCL_HOME': nccl,
            'HOROVOD_GPU': 'CUDA', 'HOROVOD_GPU_OPERATIONS': self.cfg['gpu_operations'],
            'HOROVOD_NCCL_LINK': 'SHARED',
            'HOROVOD_BUILD_CUDA_CC_LIST': ','.join(arch.replace('.', '') for arch in archs),
        }

    def sanity_check_step(self, *args, **kwargs):
        """Compare what was built with what was asked for: Horovod's own check succeeds whatever it finds."""
        passed, message = super().sanity_check_step(*args, **kwargs)
        wrong = [] if self.dry_run else self.check_build()
        return passed and not wrong, '; '.join([message] * bool(message) + wrong)

    def check_build(self):
        """List of what is wrong with the installed Horovod, each a sentence."""
        prefix = ''
        if self.cfg['gpu_operations']:
            prefix = 'LD_LIBRARY_PATH="%s:$LD_LIBRARY_PATH" ' % stub_directory(self.root('CUDA', 'cuda_home'))
        horovodrun = os.path.join(os.path.dirname(self.master.own_python), 'horovodrun')
        res = run_shell_cmd(prefix + shlex.quote(horovodrun) + ' --check-build', fail_on_error=False, hidden=True,
                            work_dir=tempfile.mkdtemp())
        wrong = compare_table(res.output, {
            'Available Frameworks': {'PyTorch'},
            'Available Controllers': {'MPI', 'Gloo'},
            'Available Tensor Operations': {'MPI', 'Gloo'} | {self.cfg['gpu_operations']} - {None},
        })
        python, launcher = self.master.own_python, mpi_launcher(self.mpi_compiler())
        if self.cfg['gpu_operations']:
            libraries = glob.glob(os.path.join(self.installdir, 'lib', 'python3*', 'site-packages', 'horovod', 'torch',
                                               'mpi_lib_v2*.so'))
            if not any('libnccl.so.2' in needed_libraries(path) for path in libraries):
                wrong.append("Horovod is not linked with a shared NCCL: it has another one than PyTorch")
        if not wrong and launcher and build_option('mpi_tests'):
            cmd = '%s%s %s -n 2 %s -s -c %s' % (prefix, ' '.join(OPENMPI_SETTINGS), shlex.quote(launcher),
                                                shlex.quote(python), shlex.quote(ALL_REDUCE))
            res = run_shell_cmd(cmd, fail_on_error=False, hidden=True, work_dir=tempfile.mkdtemp())
            if res.exit_code != EasyBuildExit.SUCCESS:
                wrong.append("Horovod's all-reduce on 2 ranks failed. Where %s may not be used, as on a login node, "
                             "add --disable-mpi-tests. It printed:\n%s" % (launcher, last_lines(res.output)))
        return wrong


def compare_table(output, expected):
    """What is wrong in the table of 'horovodrun --check-build', by {title: names that must be marked}: sentences."""
    parts = dict(re.findall(r'^(Available [\w ]+):\n((?:\s+\[[X ]\] \w+ *\n?)+)', output, re.M))
    if set(parts) != set(expected):
        return ["'horovodrun --check-build' did not print its table:\n%s" % last_lines(output)]
    wrong = []
    for title, names in sorted(expected.items()):
        found = set(re.findall(r'\[X\] (\w+)', parts[title]))
        if found != names:
            wrong.append("Horovod was to have %s (%s), and has %s" % (
                ', '.join(sorted(names)), title, ', '.join(sorted(found)) or 'none of them'))
    return wrong


def stub_directory(cuda):
    """New directory, which no job finds, where CUDA's stub libcuda.so is libcuda.so.1: for nodes without a driver."""
    directory = tempfile.mkdtemp()
    for stub in [os.path.join(cuda, lib, 'stubs', 'libcuda.so') for lib in ['lib64', 'lib']]:
        if os.path.exists(stub):
            symlink(stub, os.path.join(directory, 'libcuda.so.1'))
            break
    return directory
