# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild support for PyTorch from source with MPI as a backend of torch.distributed: GPU-aware Cray MPICH with its
GPU Transport Layer, or any other MPI; CUDA with the system's NCCL, ROCm with RCCL, or only CPUs.
"""
import glob
import os
import re
import shlex

import easybuild.tools.environment as env
from easybuild.easyblocks.generic.pythonenvironment import PythonEnvironment
from easybuild.easyblocks.generic.runscripts import RUNSCRIPTS_DIR, RunScripts
from easybuild.easyblocks.pytorch import EB_PyTorch
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit
from easybuild.tools.filetools import IGNORE, read_file, which, write_file
from easybuild.tools.modules import get_software_root, get_software_root_env_var_name
from easybuild.tools.run import RunShellCmdError, run_shell_cmd
from slingtorch.install.dependencies import dependency_root, with_parameters
from slingtorch.install.environment_image import IMAGE
from slingtorch.install.nccl import PLUGIN_NAMES
from slingtorch.install.process import (
    archs, check_linkage, describe_libraries, gtl_flags, gtl_library, mpi_library, needed_libraries, probe_pytorch,
    run_path_flags)
from slingtorch.job.machine import Machine

# names of MPIs in EasyBuild or in the metadata of external modules
MPI_NAMES = ['MPICH', 'OpenMPI', 'MVAPICH2', 'psmpi', 'impi']
# for C and C++, in bin/ of the MPI among the dependencies, else in $PATH
MPI_COMPILERS = ['mpicc', 'mpicxx']
NCCL_NAMES = ['NCCL', 'RCCL']
# GiB that one compilation may need
MEMORY_PER_JOB = 4
# what the build and a running PyTorch need besides modules, by the names of pip and conda
PYTHON_PACKAGES = ['astunparse', 'cmake>=3.27,<4', 'expecttest!=0.2.0', 'filelock', 'fsspec', 'jinja2', 'networkx',
                   'ninja', 'packaging', 'pip', 'psutil', 'pyyaml', 'requests', 'setuptools<80', 'six', 'sympy',
                   'typing-extensions>=4.8.0', 'wheel']


class EB_PyTorch_Cray(RunScripts, PythonEnvironment, EB_PyTorch):
    """Builds PyTorch with MPI, in its own Python environment (conda or venv), which is the installation.

    It uses the MPI among the dependencies, and passes its compilers to CMake, which would otherwise use any it finds.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters of EB_PyTorch_Cray."""
        extra_vars = EB_PyTorch.extra_options()
        for parent in [PythonEnvironment, RunScripts]:
            extra_vars = parent.extra_options(extra_vars)
        extra_vars = with_parameters(extra_vars, {
            'mpi_gtl': [None, "GPU Transport Layer of Cray MPICH to link with: 'cuda', 'hsa', or None"],
            'only_site': [None, "Name of the only site that this easyconfig is for"],
            'version_label': [None, "What follows '+' in the version that PyTorch reports; None: only_site, with the "
                                    "modules of compiler and MPI, such as system-gcc-12.2.0-cray-mpich-8.1.27"],
        })
        extra_vars['python_packages'][0] = PYTHON_PACKAGES
        # pip's list has the version with its local label; scripts that keep the environment's own python also work
        # without the module
        extra_vars['sanity_check_pip_list'][0] = False
        extra_vars['fix_python_shebang_for'][0] = []
        return extra_vars

    def __init__(self, *args, **kwargs):
        """Initialise; MPI's compilers and what the finished PyTorch must contain are known after modules are loaded."""
        super().__init__(*args, **kwargs)
        self.mpi_compilers = None
        self.compiles_through_ccache = False
        self.ldflags = ''

    # --- dependencies

    def root(self, name):
        """Prefix of a dependency, or None."""
        return dependency_root(self.cfg, name)

    def first_root(self, names):
        """Name and prefix of the first of these names that is a dependency, or (None, None)."""
        return next(((name, self.root(name)) for name in names if self.root(name)), (None, None))

    def network_directories(self):
        """Library directories of NCCL or RCCL and its plugin, where NCCL searches for the latter."""
        roots = [get_software_root(name) for name in NCCL_NAMES + PLUGIN_NAMES]
        return [os.path.join(root, 'lib') for root in roots if root]

    def download_packages(self):
        """Download the packages only on the site with the modules; sources can be fetched ('eb --fetch') anywhere."""
        site, here = self.cfg['only_site'], self.cfg['site_name']
        if site and here and site != here:
            self.warn("Only the sources of %s are fetched, not the packages of its Python environment: downloading "
                      "these needs modules of the site '%s', but this is the site '%s'",
                      os.path.basename(self.cfg.path), site, here)
        else:
            super().download_packages()

    def check_readiness_step(self):
        """Warn if the site's values are missing, also with --module-only; hooks refuse easyconfigs of other sites."""
        if self.cfg['only_site'] and not self.cfg['site_name']:
            self.warn("%s is for the site '%s', but EasyBuild runs without the hooks of this bundle, so the module "
                      "gets no values for the network and for MPI. Activate the bundle with 'eval \"$(slingtorch "
                      "env)\"', or add them with --hooks", os.path.basename(self.cfg.path), self.cfg['only_site'])
        super().check_readiness_step()

    def prepare_step(self, *args, **kwargs):
        """Load the modules, then find MPI's compilers before the environment's own bin/ is in $PATH."""
        super().prepare_step(*args, **kwargs)
        self.mpi_compilers = self.find_mpi_compilers()

    def find_mpi_compilers(self):
        """Full paths of MPI's compilers; None for one that does not exist."""
        root = self.first_root(MPI_NAMES)[1]
        paths = [os.path.join(root, 'bin', name) if root else name for name in MPI_COMPILERS]
        return [which(path, on_error=IGNORE) for path in paths]

    def check_mpi(self):
        """Check that there is an MPI to build with, and that it is that of the dependency."""
        name, root = self.first_root(MPI_NAMES)
        if None in self.mpi_compilers:
            raise EasyBuildError("There is no MPI to build PyTorch with: %s were not found in %s. Add an MPI module to "
                                 "the dependencies (an external module needs name, version and prefix in the metadata "
                                 "file)", ' and '.join(MPI_COMPILERS), os.path.join(root, 'bin') if root else '$PATH')
        own = mpi_library(self.mpi_compilers[0])
        if not own:
            raise EasyBuildError("It is unknown which MPI %s links: it cannot compile a call of MPI_Init into a "
                                 "library, or links no known MPI. Try it by hand: with '-shared -fPIC -Wl,--trace "
                                 "FILE.c' it prints everything that it links", self.mpi_compilers[0])
        if root and not own.startswith(os.path.realpath(root) + os.sep):
            raise EasyBuildError("%s does not link the MPI of the dependency %s, but %s, which is not in %s. Does a "
                                 "wrapper interfere, or is the prefix in the external module's metadata wrong?",
                                 self.mpi_compilers[0], name, own, root)
        self.log.info("MPI to build with: %s, library %s", self.mpi_compilers, own)

    # --- configuration

    def use_packaged_mkl(self):
        """Let the package mkl-devel of the environment, which is made later, be the dependency imkl."""
        packages = [package.split('::')[-1] for package in self.cfg['python_packages'] + self.cfg['extra_packages']]
        if not self.root('imkl') and any(re.match('mkl-devel($|[=<>! ])', package) for package in packages):
            for variable in [get_software_root_env_var_name('imkl'), 'MKLROOT']:
                env.setvar(variable, self.installdir)

    def configure_step(self):
        """Add options that upstream's easyblock does not set; an entry of the same name in custom_opts wins."""
        if self.dry_run:
            self.dry_run_msg("  * options depend on the modules: they are unknown until these are loaded")
            return
        self.check_mpi()
        self.use_packaged_mkl()
        self.limit_jobs()

        own_prefix = [self.installdir]
        options = ['USE_DISTRIBUTED=1', 'USE_MPI=1', 'USE_IBVERBS=0', 'BUILD_TEST=0',
                   'PYTORCH_BUILD_VERSION=' + self.full_version()]
        options += self.cuda_options() + self.rocm_options(own_prefix) + self.ccache_options()
        if not (self.root('CUDA') or self.root('ROCm')):
            options += ['USE_NCCL=0', 'USE_CUDNN=0']

        # CMake has no environment variable for MPI's compilers, but PyTorch passes on every variable called CMAKE_*
        lines = ['set(MPI_%s_COMPILER "%s" CACHE FILEPATH "")' % (language, path) for
                 language, path in zip(['C', 'CXX'], self.mpi_compilers)]
        # PyTorch's FindBLAS.cmake uses this before anything includes it
        lines.append('include(CheckFunctionExists)')
        # NNPACK would download this package, and build nodes have no network
        lines += ['file(GLOB SLINGTORCH_SIX "%s/lib/python3*/site-packages/six.py")' % self.installdir,
                  'if(SLINGTORCH_SIX)',
                  '  get_filename_component(PYTHON_SIX_SOURCE_DIR "${SLINGTORCH_SIX}" DIRECTORY)',
                  'endif()']
        preset = os.path.join(self.builddir, 'preset.cmake')
        write_file(preset, '\n'.join(lines) + '\n')
        options.append('CMAKE_PROJECT_INCLUDE_BEFORE=' + shlex.quote(preset))
        # in addition to the variables of the dependencies' modules
        own_prefix += [path for path in os.environ.get('CMAKE_PREFIX_PATH', '').split(os.pathsep) if path]
        options.append('CMAKE_PREFIX_PATH=' + shlex.quote(';'.join(own_prefix)))

        names = [option.split('=', 1)[0] for option in self.cfg['custom_opts']]
        self.cfg.update('custom_opts', [option for option in options if option.split('=', 1)[0] not in names])

        self.ldflags = ' '.join([os.environ.get('LDFLAGS', '')] + self.link_flags()).strip()
        env.setvar('LDFLAGS', self.ldflags)
        for variable in ['CFLAGS', 'CXXFLAGS']:
            # false warnings of GCC 12 in FBGEMM, which turns them into errors
            flags = ['-Wno-maybe-uninitialized', '-Wno-uninitialized', '-Wno-nonnull'] + self.gpu_aware_flags()
            env.setvar(variable, ' '.join([os.environ.get(variable, '')] + flags).strip())

        super().configure_step()

    def full_version(self):
        """Version that PyTorch itself will report; pip normalises '-' and '_' in the local part to '.'."""
        local = self.cfg['version_label']
        if local is None and self.cfg['only_site']:
            modules = [dep['full_mod_name'] for dep in self.cfg.dependencies() if dep['external_module'] and
                       dep['external_module_metadata'].get('name', [''])[0] in ['GCC'] + MPI_NAMES]
            local = '-'.join([self.cfg['only_site']] + modules)
        return self.version + ('+' + re.sub('[-_/]', '.', local) if local else '')

    def limit_jobs(self):
        """Limit the number of parallel compilations to what memory allows."""
        memory = (Machine().free_memory()[0] or 0) / 2.0 ** 30
        if not memory:
            return
        jobs = max(1, min(self.cfg.parallel, int(memory / MEMORY_PER_JOB)))
        reason = ("%s compile jobs at a time: %.1f GiB of memory are available, one job may need %s GiB, and EasyBuild "
                  "allows %s jobs (--max-parallel)" % (jobs, memory, MEMORY_PER_JOB, self.cfg.parallel))
        self.log.info(reason)
        if memory < MEMORY_PER_JOB:
            self.warn("Little memory: %s. A compiler may be killed: build on a node with more memory", reason)
        self.cfg.parallel = jobs

    def ccache_options(self):
        """Options for ccache, if it is in $PATH."""
        ccache = which('ccache', on_error=IGNORE)
        self.compiles_through_ccache = bool(ccache)
        if not self.compiles_through_ccache:
            return ['USE_CCACHE=0']
        return ['USE_CCACHE=1'] + ['CMAKE_%s_COMPILER_LAUNCHER=%s' % (language, shlex.quote(ccache)) for language in
                                   ['C', 'CXX'] + (['CUDA'] if self.root('CUDA') else [])]

    def cuda_options(self):
        """Options for CUDA, cuDNN and NCCL."""
        cuda = self.root('CUDA')
        if not cuda:
            return []
        options = ['USE_CUDA=1', 'USE_NCCL=1']
        cudnn = self.root('cuDNN')
        if cudnn:
            lib_dir = library_dir(cudnn, 'libcudnn')
            check_cudnn(cudnn, lib_dir, os.environ.get('EBVERSIONCUDA') or '')
            options += ['USE_CUDNN=1', 'CUDNN_LIB_DIR=' + lib_dir, 'CUDNN_LIBRARY=' + lib_dir,
                        'CUDNN_INCLUDE_DIR=' + os.path.join(cudnn, 'include')]
        nccl = self.root('NCCL')
        if nccl:
            options += ['USE_SYSTEM_NCCL=1', 'NCCL_ROOT=' + nccl, 'NCCL_LIB_DIR=' + library_dir(nccl, 'libnccl'),
                        'NCCL_INCLUDE_DIR=' + os.path.join(nccl, 'include')]
        return options

    def rocm_options(self, prefixes):
        """Options for ROCm and RCCL; adds RCCL's directory to CMake's prefixes, and converts CUDA sources to HIP."""
        rocm = self.root('ROCm')
        if not rocm:
            return []
        capabilities = archs(self.cfg, 'amdgcn_capabilities')
        if not capabilities:
            raise EasyBuildError("List of AMD GPU architectures must be specified, either via amdgcn_capabilities "
                                 "(for example ['gfx90a']) or via --amdgcn-capabilities")
        env.setvar('PYTORCH_ROCM_ARCH', ';'.join(capabilities))
        env.setvar('ROCM_PATH', rocm)
        rccl = self.root('RCCL')
        if rccl:
            prefixes.append(rccl)
            env.setvar('RCCL_PATH', rccl)
        run_shell_cmd('%s tools/amd_build/build_amd.py' % self.python_cmd)
        return ['USE_CUDA=0', 'USE_ROCM=1', 'USE_NCCL=1']

    def gpu_aware_flags(self):
        """Compiler flags with which PyTorch passes GPU buffers to Cray MPICH; EasyBuildError if its sources never do.

        Without patch, PyTorch before pull request 178323 raises an error for every GPU tensor. Since then it needs a
        macro that not every mpi.h of Cray has.
        """
        source = os.path.join('torch', 'csrc', 'distributed', 'c10d', 'ProcessGroupMPI.cpp')
        if not self.cfg['mpi_gtl']:
            return []
        text = read_file(source) if os.path.exists(source) else ''
        if 'CRAY_MPICH_VERSION' in text:
            return []
        if 'MPIX_GPU_SUPPORT_CUDA' in text:
            res = run_shell_cmd('%s -E -dM -include mpi.h -x c /dev/null' % shlex.quote(self.mpi_compilers[0]),
                                hidden=True)
            return [] if 'define MPIX_GPU_SUPPORT_CUDA' in res.output else ['-DMPIX_GPU_SUPPORT_CUDA=1']
        raise EasyBuildError("mpi_gtl is set, but %s does not support Cray MPICH, so every GPU tensor would raise an "
                             "error. Add PyTorch-2.2.2_cray-mpich-gpu-aware.patch to the patches", source)

    def link_flags(self):
        """Flags that link every library with the GPU Transport Layer, and the run paths of MPI and NCCL."""
        directories = self.network_directories()
        if self.root('imkl') == self.installdir:
            directories.append(os.path.join(self.installdir, 'lib'))
        return ((run_path_flags(mpi_library(self.mpi_compilers[0])) or ['-Wl,--disable-new-dtags'])
                + ['-Wl,-rpath,' + path for path in directories] + gtl_flags(gtl_library(self.cfg), self.root('CUDA')))

    # --- installation

    def install_step(self):
        """Compile and install; an error message shows where it failed, and whether a next run can resume."""
        try:
            super().install_step()
        except RunShellCmdError as err:
            lines = err.output.splitlines()
            where = [line for line in lines if re.search(r'^\s*FAILED: |:\d+: error: |Killed signal|CMake Error', line)]
            hint = ("run the same command again; ccache has what was compiled" if self.compiles_through_ccache else
                    "run the same command again; it starts from scratch, but with ccache in $PATH it resumes")
            raise EasyBuildError("Building PyTorch failed (exit status %s):\n%s\nAll output is in %s. If a compiler "
                                 "was killed, memory was too small: eb --max-parallel=N. After fixing the error, %s",
                                 err.exit_code, '\n'.join(where[:8] or lines[-20:]), err.out_file, hint,
                                 exit_code=EasyBuildExit.FAIL_INSTALL_STEP)

    def extension_variables(self):
        """Variables to build mpi4py with the same MPI and GPU Transport Layer, and torchvision for the same GPUs."""
        variables = {'LDFLAGS': self.ldflags, 'MPICC': self.mpi_compilers[0]}
        # setup.py builds for GPUs only if it finds one, and build nodes have none
        if self.root('CUDA'):
            variables.update(FORCE_CUDA='1',
                             TORCH_CUDA_ARCH_LIST=';'.join(archs(self.cfg, 'cuda_compute_capabilities')))
        elif self.root('ROCm'):
            variables.update(FORCE_CUDA='1', PYTORCH_ROCM_ARCH=';'.join(archs(self.cfg, 'amdgcn_capabilities')))
        return variables

    def write_scripts(self, directory):
        """Write the runscripts, and the activation scripts, which set the same variables as the module."""
        super().write_scripts(directory)
        variables = dict.fromkeys(['RUNSCRIPTS', 'RUNSCRIPTSPYTORCH'], os.path.join(self.installdir, RUNSCRIPTS_DIR))
        if self.cfg['gpu_visibility']:
            variables['SLINGTORCH_GPU_VISIBILITY'] = self.cfg['gpu_visibility']
        self.write_activation(directory, variables, {'LD_LIBRARY_PATH': self.network_directories()})

    # --- sanity

    def expectations(self):
        """What a process with the finished PyTorch must contain; with the keys for check_linkage()."""
        nccl = self.first_root(NCCL_NAMES)
        compilers = self.mpi_compilers or self.find_mpi_compilers()
        return {
            'version': self.full_version(),
            'prefix': self.installdir,
            'mpi': mpi_library(compilers[0]) if compilers[0] else None,
            'gtl': gtl_library(self.cfg),
            'nccl': nccl[1],
            'nccl_version': self.dependency([nccl[0]])['version'] if nccl[0] and self.dependency([nccl[0]]) else None,
            'plugin': self.first_root(PLUGIN_NAMES)[1],
            'settings': ['USE_MPI'] + [setting for setting, software in
                                       [('USE_CUDA', 'CUDA'), ('USE_ROCM', 'ROCm'), ('USE_NCCL', nccl[0])]
                                       if software and self.root(software)],
        }

    def sanity_check_step(self, *args, **kwargs):
        """Check the libraries of the installed PyTorch, and what the other easyblocks check."""
        if not self.sanity_check_module_loaded:
            self.sanity_check_load_module()
        if not self.dry_run:
            process = probe_pytorch(self.own_python, [ext[0].lower() for ext in self.cfg.get_ref('exts_list')])
            if isinstance(process, str):
                self.sanity_check_fail_msgs.append(process)
            else:
                self.say("a process that imports PyTorch has: %s", describe_libraries(process))
                self.sanity_check_fail_msgs += check_linkage(process, self.expectations())
        paths = {
            'files': ['bin/python', 'etc/conda/activate.d/slingtorch.sh'],
            'dirs': [os.path.join(self.pylibdir, 'torch', 'lib')],
        }
        if self.cfg['environment_image']:
            paths['files'].append(IMAGE)
        return super().sanity_check_step(*args, custom_paths=paths, **kwargs)


def library_dir(root, name):
    """Directory below a prefix with a library: lib64 or lib, as at Cray and NCAR; EasyBuildError if there is none."""
    for path in [os.path.join(root, sub) for sub in ['lib64', 'lib']]:
        if glob.glob(os.path.join(path, name + '.so*')):
            return path
    raise EasyBuildError("There is no %s.so in %s/lib64 or lib: is the prefix in the external module's metadata right?",
                         name, root)


def check_cudnn(root, lib_dir, cuda_version):
    """Check that cuDNN is for the CUDA in use, by its prefix (NCAR's ends in '-<CUDA>') and its libraries' needs."""
    text = ' '.join(sum((needed_libraries(path) for path in glob.glob(os.path.join(lib_dir, 'libcudnn*.so'))), []))
    majors = set(re.findall(r'libcublas(?:Lt)?\.so\.(\d+)', text))
    majors.update(re.findall(r'\d-(\d+)(?:\.\d+)*$', os.path.basename(os.path.realpath(root))))
    cuda_major = cuda_version.split('.')[0]
    if majors and cuda_major and majors != {cuda_major}:
        raise EasyBuildError("cuDNN in %s is for CUDA %s, but PyTorch is built with CUDA %s. Use the cuDNN module for "
                             "CUDA %s", root, ', '.join(sorted(majors)), cuda_version, cuda_major)
