# SPDX-License-Identifier: GPL-2.0-only
"""
EasyBuild support for slingmpi, MPI for a PyTorch without it (slingmpi/ of the bundle), implemented as an easyblock.
"""
import json
import os
import re
import tempfile

import easybuild.tools.environment as env
from easybuild.easyblocks.generic.keepsprevious import KeepsPrevious
from easybuild.easyblocks.generic.pythonpackage import PythonPackage
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit
from easybuild.tools.filetools import change_dir, copy_dir, mkdir, read_file
from easybuild.tools.modules import get_software_root
from easybuild.tools.run import RunShellCmdError
from slingtorch.install.dependencies import dependency_root, last_lines, run, with_parameters
from slingtorch.install.process import (
    check_two_ranks, describe_libraries, gtl_flags, gtl_library, launcher_name, mpi_launcher, mpi_library,
    probe_pytorch, real_libraries, run_path_flags)
from slingtorch.job.machine import MPI_LIBRARY

# found through EasyBuild's paths, relative to the bundle's directories in them
PROJECT = '../slingmpi/pyproject.toml'
# files in an installation of the Singularity easyblock
OF_IMAGE, IN_CONTAINER = 'container.conf', 'bin/in-container'
BINDPATHS = ['SINGULARITY_BINDPATH', 'APPTAINER_BINDPATH']

ALL_REDUCE = """
import sys, torch, torch.distributed as dist, slingmpi
rank, size = slingmpi._load().start()
dist.init_process_group("slingmpi", init_method="file://" + sys.argv[1], rank=rank, world_size=size)
found = torch.full((1000,), rank + 1.0)
dist.all_reduce(found)
dist.destroy_process_group()
right = size == 2 and bool((found == 3).all())
sys.exit(0 if right else "%d ranks of 2, and a sum of %s in place of 3" % (size, float(found[0])))
"""


class EB_slingmpi(KeepsPrevious, PythonPackage):
    """
    Builds the MPI backend of this bundle for one PyTorch and one MPI.

    An extension (with nosource) is built for the PyTorch of the environment; separate software, for the dependency
    PyTorch. That is an environment, or a container image; then it is built in the container with the MPI there.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Options of the backend."""
        return with_parameters(PythonPackage.extra_options(extra_vars), {
            'mpi_gtl': [None, "GPU Transport Layer of Cray MPICH to link with: 'cuda', 'hsa', or None"],
            'mpicxx': ['mpicxx', "MPI's C++ compiler (Cray's is 'CC'): a command in $PATH, or, for an image, in the "
                                 "container's $PATH"],
        })

    def __init__(self, *args, **kwargs):
        """Initialise; the module needs no variables for compiling, since nothing is linked with slingmpi."""
        super().__init__(*args, **kwargs)
        self.options['modulename'] = False  # the sanity check imports it, after torch
        self.python_asked = None
        for variable in [] if self.is_extension else ['CMAKE_PREFIX_PATH', 'CPATH', 'LD_LIBRARY_PATH', 'LIBRARY_PATH']:
            self.module_load_environment.remove(variable)

    # --- the PyTorch, and its container if it is in one

    @property
    def pytorch(self):
        """Prefix of the PyTorch that this is built for; '' if no dependency is called PyTorch."""
        return self.installdir if self.is_extension else get_software_root('PyTorch') or ''

    @property
    def in_container(self):
        """Words to put in front of a command that must run where the PyTorch is; empty except for an image."""
        is_image = self.pytorch and os.path.exists(os.path.join(self.pytorch, OF_IMAGE))
        return [os.path.join(self.pytorch, IN_CONTAINER)] * bool(is_image)

    def run_there(self, *command):
        """Run a command (its words) where the PyTorch is."""
        return run(*self.in_container, *command, split_stderr=True, work_dir=tempfile.gettempdir())

    def find_there(self, name):
        """Full path of a command in $PATH (the container's, for an image); '' if there is none."""
        return self.run_there('sh', '-c', 'command -v "$0"', name).output.strip()

    def prepare_python(self):
        """Use PyTorch's Python; for an image, the command that runs the Python in the container."""
        own_python = os.path.join(self.pytorch, 'bin', 'python')
        if not self.pytorch or not os.path.exists(own_python):
            super().prepare_python()
            return
        if self.in_container:
            # the image's module does not mount the build and installation directories
            for variable in BINDPATHS:
                paths = [os.environ[variable]] if os.environ.get(variable) else []
                wanted = [path for path in [self.builddir, self.installdir, tempfile.gettempdir()]
                          if path and path not in ','.join(paths).split(',')]
                for path in wanted:
                    mkdir(path, parents=True)
                env.setvar(variable, ','.join(paths + wanted), verbose=False)
        self.python_cmd = own_python
        self.set_pylibdirs()
        self.set_ulimit()

    def set_pylibdirs(self):
        """Ask each Python only once: the container mounts the build directory, which is gone in the module step."""
        if self.python_asked != self.python_cmd:
            super().set_pylibdirs()
            self.python_asked = self.python_cmd

    # --- sources

    def find_sources(self):
        """The directory of the sources in the bundle; EasyBuildError if their version is different."""
        block = self.master if self.is_extension else self
        path = block.obtain_file(PROJECT, no_download=True, warning_only=True)
        if not path:
            raise EasyBuildError("The sources of slingmpi were not found: slingmpi/ is beside the directory "
                                 "runscripts/ of the bundle, which must be in EasyBuild's source path. Activate the "
                                 "bundle with 'eval \"$(slingtorch env)\"'")
        version = re.search('^version = "(.*)"', read_file(path), re.M).group(1)
        if version != self.version:
            raise EasyBuildError("This bundle has slingmpi %s, but the easyconfig is for slingmpi %s: use one of the "
                                 "bundle's version, or --try-software-version=%s", version, self.version, version)
        return os.path.dirname(os.path.realpath(path))

    def fetch_step(self, skip_checksums=False):
        """Check that the bundle has the sources."""
        super().fetch_step(skip_checksums)
        self.find_sources()

    # --- building

    def configure_step(self):
        """Check PyTorch and MPI, and copy the sources to the build directory."""
        if self.dry_run:
            self.dry_run_msg("  * slingmpi/ of the bundle will be built by pip with MPI's compiler %s, for the "
                             "PyTorch of %s", self.cfg['mpicxx'], self.pytorch or "the dependency called PyTorch")
            return
        sources = self.find_sources()
        self.check_pytorch()
        compiler, flags = self.find_mpi()
        # distutils also uses the C compiler for C++
        for name in ['MPICXX', 'CXX', 'CC']:
            env.setvar(name, compiler)
        env.setvar('MAX_JOBS', str(self.cfg.parallel))
        env.setvar('LDFLAGS', ' '.join([os.environ.get('LDFLAGS', '')] + flags).strip())
        target = os.path.join(self.builddir, 'slingmpi')
        copy_dir(sources, target, ignore=lambda _, names: [
            name for name in names if name == 'build' or name.endswith(('.egg-info', '.so'))])
        change_dir(target)
        super().configure_step()

    def check_pytorch(self):
        """Raise EasyBuildError if there is no PyTorch."""
        process = probe_pytorch(self.python_cmd)
        if isinstance(process, str):
            raise EasyBuildError("slingmpi needs the PyTorch of a dependency called PyTorch, or of the environment "
                                 "that it extends, but there is none: %s", process)
        self.say("building for PyTorch %s (%s)", process['version'], os.path.dirname(process['file']))

    def find_mpi(self):
        """MPI's C++ compiler, and flags for linking."""
        wanted = self.cfg['mpicxx']
        compiler = self.find_there(wanted)
        where = "in the container" if self.in_container else "in $PATH"
        if not compiler:
            raise EasyBuildError("slingmpi needs MPI's compiler '%s', but it is not %s. %s, or "
                                 "correct mpicxx", wanted, where, "Use an image that has MPI with its headers and a "
                                 "C++ compiler" if self.in_container else
                                 "Add the module that provides it to the dependencies")
        if self.in_container:
            return wanted, []
        library = mpi_library(compiler)
        if not library:
            raise EasyBuildError("slingmpi needs MPI's compiler '%s', but it links no MPI, or finds no C++ compiler. "
                                 "Add the module that provides it to the dependencies, or correct mpicxx",
                                 wanted)
        return compiler, run_path_flags(library) + gtl_flags(gtl_library(self.cfg), dependency_root(self.cfg, 'CUDA'))

    def install_step(self):
        """Let pip build and install; an error shows the compiler's messages."""
        try:
            super().install_step()
        except RunShellCmdError as err:
            # pip shows the output of setup.py between two lines of its own
            part = re.search(r'lines? of output\](.*)\[end of output\]', err.output, re.S)
            errors = re.findall(r'.*: (?:fatal )?error: .*', err.output)
            raise EasyBuildError("Building slingmpi failed:\n%s\nAll output is in %s",
                                 '\n'.join(errors[:5]) or last_lines(part.group(1) if part else err.output),
                                 err.out_file, exit_code=EasyBuildExit.FAIL_INSTALL_STEP)

    # --- checks

    def sanity_check_step(self, *args, **kwargs):
        """Check a process with the backend, and run an all_reduce on two ranks."""
        if not (self.is_extension or self.sanity_check_module_loaded):
            self.sanity_check_load_module()
        if self.python_cmd is None:
            self.prepare_python()
        if self.dry_run or self.in_container or self.is_extension and self.master.cfg.get('system_site_packages'):
            # 'pip check' would also check the packages of the image or of the base Python
            self.cfg['sanity_pip_check'] = False
        wrong = [] if self.dry_run else self.check_build()
        self.sanity_check_fail_msgs += wrong
        if not self.is_extension:
            package = os.path.join(self.pylibdir, 'slingmpi')
            kwargs['custom_paths'] = {'files': [package + '/__init__.py', package + '/built.json'], 'dirs': []}
        passed, message = super().sanity_check_step(*args, **kwargs)
        return passed and not wrong, '; '.join([message] * bool(message) + wrong * self.is_extension)

    def check_build(self):
        """List of sentences about what is wrong with the installation."""
        path = os.path.join(self.installdir, self.pylibdir, 'slingmpi', 'built.json')
        built = json.loads(read_file(path))
        process = probe_pytorch(self.python_cmd, ['slingmpi._backend'])
        if isinstance(process, str):
            return ["slingmpi, built for PyTorch %s and %s, does not load: %s"
                    % (built['torch'], built['mpi'], process)]
        wrong = []
        if process['version'].split('.')[:2] != built['torch'].split('.'):
            wrong.append("slingmpi was built for PyTorch %s, but this is %s: use 'eb --rebuild' to build it again"
                         % (built['torch'], process['version']))
        wrong += ["%s. slingmpi was built for PyTorch %s with %s of %s: load the module of that MPI, or build it again "
                  "('eb --rebuild')" % (text, built['torch'], built['mpi'], built['compiler'])
                  for text in process['import_errors']]
        if wrong:
            return wrong
        self.say("a process that imports slingmpi has: %s", describe_libraries(process))
        found = real_libraries(process['libraries'], MPI_LIBRARY)
        expected = None if self.in_container else mpi_library(built['compiler'])
        if len(found) != 1:
            wrong.append("A process that imports slingmpi must have one MPI, but has %d: %s"
                         % (len(found), ' and '.join(found) or 'none'))
        elif expected and found != [expected]:
            wrong.append("slingmpi uses %s, but was built with %s, whose MPI is %s: is another MPI's directory in "
                         "$LD_LIBRARY_PATH?" % (found[0], built['compiler'], expected))
        gtl = None if self.in_container else gtl_library(self.cfg)
        if gtl and os.path.realpath(gtl) not in map(os.path.realpath, process['libraries']):
            wrong.append("The GPU Transport Layer %s is not in the process: MPI_Init would abort with "
                         "MPICH_GPU_SUPPORT_ENABLED=1" % gtl)
        if wrong:
            return wrong
        if self.in_container:
            python, launcher = 'python', self.find_there(launcher_name(built['compiler']))
        else:
            python, launcher = self.python_cmd, mpi_launcher(built['compiler'])
        with tempfile.TemporaryDirectory() as directory:
            return check_two_ranks("An all_reduce of slingmpi", launcher, [
                python, '-s', '-c', ALL_REDUCE, os.path.join(directory, 'store')], self.run_there)

    # --- the module

    def make_module_extra(self, *args, **kwargs):
        """Mount the installation in the container, besides what EasyBuild sets."""
        txt = super().make_module_extra(*args, **kwargs)
        for variable in BINDPATHS * bool(self.in_container):
            txt += self.module_generator.prepend_paths(variable, [self.installdir], allow_abs=True, delim=',')
        return txt
