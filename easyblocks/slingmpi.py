# SPDX-License-Identifier: GPL-2.0-only
"""
EasyBuild support for slingmpi, MPI for a PyTorch without it (slingmpi/ of the bundle), implemented as an easyblock.
"""
import json
import os
import re
import shlex
import tempfile

import easybuild.tools.environment as env
from easybuild.easyblocks.generic.keepsprevious import KeepsPrevious
from easybuild.easyblocks.generic.pythonpackage import PythonPackage
from easybuild.easyblocks.generic.runscripts import wants_checksums_only
from easybuild.tools import LooseVersion
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit, print_msg
from easybuild.tools.config import build_option
from easybuild.tools.filetools import change_dir, copy_dir, mkdir, read_file
from easybuild.tools.modules import get_software_root
from easybuild.tools.run import RunShellCmdError, run_shell_cmd
from slingtorch.install.dependencies import dependency_root, last_lines, with_parameters
from slingtorch.install.process import (
    OPENMPI_SETTINGS, describe_libraries, gtl_flags, gtl_library, launcher_name, mpi_launcher, mpi_library,
    probe_pytorch)
from slingtorch.job.machine import MPI_LIBRARY

# found through EasyBuild's paths: it lies beside their directories of the bundle
PROJECT = '../slingmpi/pyproject.toml'
# in an installation of the Singularity easyblock
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

    As an extension (with nosource) for the PyTorch of the environment; as software of its own for the dependency
    PyTorch: an environment, or a container image, in which it is built and where the MPI is the one in the container.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Options of the backend."""
        return with_parameters(PythonPackage.extra_options(extra_vars), {
            'mpi_gtl': [None, "GPU Transport Layer of Cray MPICH to link with: 'cuda', 'hsa', or None"],
            'mpicxx': ['mpicxx', "MPI's compiler for C++ (Cray's is 'CC'): a command in $PATH, for an image in that of "
                                 "the container"],
        })

    def __init__(self, *args, **kwargs):
        """Initialise; nothing in it is there to be linked against."""
        super().__init__(*args, **kwargs)
        self.options['modulename'] = False  # the sanity check imports it, after torch
        self.python_asked = None
        for variable in [] if self.is_extension else ['CMAKE_PREFIX_PATH', 'CPATH', 'LD_LIBRARY_PATH', 'LIBRARY_PATH']:
            self.module_load_environment.remove(variable)

    # --- the PyTorch, and its container if it is in one

    @property
    def pytorch(self):
        """Where the PyTorch is that this is built for; '' if no dependency is called so."""
        return self.installdir if self.is_extension else get_software_root('PyTorch') or ''

    @property
    def in_container(self):
        """Words in front of a command that is to run where the PyTorch is: none, but for an image."""
        is_image = self.pytorch and os.path.exists(os.path.join(self.pytorch, OF_IMAGE))
        return [os.path.join(self.pytorch, IN_CONTAINER)] * bool(is_image)

    def run_there(self, *command):
        """Run a command (its words) where the PyTorch is."""
        return run_shell_cmd(' '.join(shlex.quote(word) for word in self.in_container + list(command)),
                             fail_on_error=False, hidden=True, split_stderr=True, work_dir=tempfile.gettempdir())

    def find_there(self, name):
        """Full path, where the PyTorch is, of a command in $PATH there; '' if there is none."""
        return self.run_there('sh', '-c', 'command -v "$0"', name).output.strip()

    def prepare_python(self):
        """Take the Python of the PyTorch; of an image that is the command that runs the one in the container."""
        own_python = os.path.join(self.pytorch, 'bin', 'python')
        if not self.pytorch or not os.path.exists(own_python):
            super().prepare_python()
            return
        if self.in_container:
            # what is built and installed is not where the image's module says
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
        """Ask a Python once: when the module is made, the build directory that the container is to see is gone."""
        if self.python_asked != self.python_cmd:
            super().set_pylibdirs()
            self.python_asked = self.python_cmd

    # --- sources

    def find_sources(self):
        """The directory of the sources in the bundle; EasyBuildError if they are another version."""
        block = self.master if self.is_extension else self
        path = block.obtain_file(PROJECT, no_download=True, warning_only=True)
        if not path:
            raise EasyBuildError("The sources of slingmpi were not found: slingmpi/ lies beside the directory "
                                 "runscripts/ of the bundle, which must be on EasyBuild's source path. Activate the "
                                 "bundle with 'eval \"$(slingtorch env)\"'")
        version = re.search('^version = "(.*)"', read_file(path), re.M).group(1)
        if version != self.version:
            raise EasyBuildError("This bundle has slingmpi %s, and slingmpi %s is to be built: take an easyconfig of "
                                 "that version, or --try-software-version=%s", version, self.version, version)
        return os.path.dirname(os.path.realpath(path))

    def fetch_step(self, skip_checksums=False):
        """Look whether the bundle has the sources."""
        super().fetch_step(skip_checksums)
        if not wants_checksums_only(skip_checksums):
            self.find_sources()

    # --- building

    def configure_step(self):
        """Look at PyTorch and MPI, and copy the sources to where they are built."""
        if self.dry_run:
            self.dry_run_msg("  * slingmpi/ of the bundle will be built by pip with MPI's compiler %s, for the "
                             "PyTorch of %s", self.cfg['mpicxx'], self.pytorch or "the dependency called PyTorch")
            return
        sources = self.find_sources()
        self.check_pytorch()
        compiler, flags = self.find_mpi()
        # distutils takes that of C for C++ too
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
        """EasyBuildError if there is no PyTorch, or not what building an extension of it takes."""
        process = probe_pytorch(self.python_cmd)
        if isinstance(process, str):
            raise EasyBuildError("slingmpi is built for the PyTorch of a dependency called PyTorch, or of the "
                                 "environment that it is an extension of, and there is none: %s", process)
        print_msg("building for PyTorch %s (%s)", process['version'], os.path.dirname(process['file']), log=self.log,
                  silent=build_option('silent'))
        found = self.run_there(self.python_cmd, '-s', '-c', 'import setuptools; print(setuptools.__version__)')
        version = found.output.strip() if not found.exit_code else ''
        if not version or LooseVersion(version) < LooseVersion('70.1'):
            raise EasyBuildError("Building slingmpi takes setuptools 70.1 or newer beside PyTorch, and there is %s. "
                                 "Add it to the packages of that environment ('setuptools' in extra_packages of "
                                 "PythonVenv)", 'setuptools ' + version if version else 'none')

    def find_mpi(self):
        """MPI's compiler for C++, and flags for linking."""
        wanted = self.cfg['mpicxx']
        compiler = self.find_there(wanted)
        where = "in the container" if self.in_container else "in $PATH"
        if not compiler:
            raise EasyBuildError("slingmpi is to be built with MPI's compiler '%s', and there is none %s. %s, or "
                                 "correct mpicxx", wanted, where, "The image must have MPI with its headers and a "
                                 "compiler for C++" if self.in_container else
                                 "Add the module that has it to the dependencies")
        if self.in_container:
            return wanted, []
        library = mpi_library(compiler)
        if not library:
            raise EasyBuildError("slingmpi is to be built with MPI's compiler '%s', and it links no MPI, or finds no "
                                 "compiler for C++. Add the module that has it to the dependencies, or correct mpicxx",
                                 wanted)
        # RPATH: else the MPI of the default programming environment might be taken in a job
        directory = os.path.dirname(library)
        flags = ['-Wl,--disable-new-dtags', '-Wl,-rpath,' + directory] * (not re.match(r'^/(usr/)?lib', directory))
        gtl = self.gtl_library()
        return compiler, flags + (gtl_flags(gtl, dependency_root(self.cfg, 'CUDA')) if gtl else [])

    def gtl_library(self):
        """Full path of Cray MPICH's GPU Transport Layer, or None where none is wanted."""
        return gtl_library(self.cfg['mpi_gtl'], lambda parameter: build_option(parameter) or self.cfg[parameter])

    def install_step(self):
        """Let pip build and install; an error shows what the compiler said."""
        try:
            super().install_step()
        except RunShellCmdError as err:
            # pip shows what setup.py printed between two lines of its own
            part = re.search(r'lines? of output\](.*)\[end of output\]', err.output, re.S)
            errors = re.findall(r'.*: (?:fatal )?error: .*', err.output)
            raise EasyBuildError("Building slingmpi failed:\n%s\nAll output is in %s",
                                 '\n'.join(errors[:5]) or last_lines(part.group(1) if part else err.output),
                                 err.out_file, exit_code=EasyBuildExit.FAIL_INSTALL_STEP)

    # --- checks

    def sanity_check_step(self, *args, **kwargs):
        """Look at a process that has the backend, and let two ranks add up."""
        if not (self.is_extension or self.sanity_check_module_loaded):
            self.sanity_check_load_module()
        if self.python_cmd is None:
            self.prepare_python()
        if self.dry_run or self.in_container or self.is_extension and self.master.cfg.get('system_site_packages'):
            # 'pip check' would judge the packages of the image, or of the Python beneath, as well
            self.cfg['sanity_pip_check'] = False
        wrong = [] if self.dry_run else self.check_build()
        self.sanity_check_fail_msgs += wrong
        if not self.is_extension:
            package = os.path.join(self.pylibdir, 'slingmpi')
            kwargs['custom_paths'] = {'files': [package + '/__init__.py', package + '/built.json'], 'dirs': []}
        passed, message = super().sanity_check_step(*args, **kwargs)
        return passed and not wrong, '; '.join([message] * bool(message) + wrong * self.is_extension)

    def check_build(self):
        """List of what is wrong with the installation, each a sentence."""
        path = os.path.join(self.installdir, self.pylibdir, 'slingmpi', 'built.json')
        if not os.path.exists(path):
            return ["There is no %s" % path]
        built = json.loads(read_file(path))
        process = probe_pytorch(self.python_cmd, ['slingmpi._backend'])
        if isinstance(process, str):
            return ["slingmpi, built for PyTorch %s and %s, does not load: %s"
                    % (built['torch'], built['mpi'], process)]
        wrong = []
        if process['version'].split('.')[:2] != built['torch'].split('.'):
            wrong.append("slingmpi was built for PyTorch %s, and this is %s: 'eb --rebuild' builds it for that"
                         % (built['torch'], process['version']))
        wrong += ["%s. It was built for PyTorch %s with %s of %s: load the module of that MPI, or build it again ('eb "
                  "--rebuild')" % (text, built['torch'], built['mpi'], built['compiler'])
                  for text in process['import_errors']]
        if wrong:
            return wrong
        print_msg("a process that imports slingmpi has: %s", describe_libraries(process), log=self.log,
                  silent=build_option('silent'))
        mapped = {os.path.realpath(path) for path in process['libraries']}
        found = sorted(path for path in mapped if MPI_LIBRARY.match(os.path.basename(path)))
        expected = None if self.in_container else mpi_library(built['compiler'])
        if len(found) != 1:
            wrong.append("One MPI must be in a process that imports slingmpi, and there are %d: %s"
                         % (len(found), ' and '.join(found) or 'none'))
        elif expected and found != [expected]:
            wrong.append("slingmpi uses %s, and was built with %s, whose MPI is %s: is another MPI's directory in "
                         "$LD_LIBRARY_PATH?" % (found[0], built['compiler'], expected))
        gtl = None if self.in_container else self.gtl_library()
        if gtl and os.path.realpath(gtl) not in mapped:
            wrong.append("The GPU Transport Layer %s is not in the process: MPI_Init would abort with "
                         "MPICH_GPU_SUPPORT_ENABLED=1" % gtl)
        launcher = self.find_launcher(built['compiler'])
        if not wrong and launcher and build_option('mpi_tests'):
            with tempfile.TemporaryDirectory() as directory:
                done = self.run_there('env', *OPENMPI_SETTINGS, launcher, '-n', '2', *self.python_there(), '-s', '-c',
                                      ALL_REDUCE, os.path.join(directory, 'store'))
            if done.exit_code:
                wrong.append("An all_reduce of slingmpi on 2 ranks failed. Where %s may not be used, as on a login "
                             "node, add --disable-mpi-tests. It printed:\n%s"
                             % (launcher, last_lines(done.output + (done.stderr or ''))))
            else:
                print_msg("an all_reduce on 2 ranks is right (%s)", launcher, log=self.log,
                          silent=build_option('silent'))
        return wrong

    def python_there(self):
        """Words that start the Python where the PyTorch is, without another container."""
        return ['python'] if self.in_container else [self.python_cmd]

    def find_launcher(self, compiler):
        """The launcher beside MPI's compiler, full path where the PyTorch is; None if there is none, as with CC."""
        if not self.in_container:
            return mpi_launcher(compiler)
        name = launcher_name(compiler)
        return self.find_there(name) if name else None

    # --- the module

    def make_module_extra(self, *args, **kwargs):
        """Let the container see the installation, besides what EasyBuild sets."""
        txt = super().make_module_extra(*args, **kwargs)
        for variable in BINDPATHS * bool(self.in_container):
            txt += self.module_generator.prepend_paths(variable, [self.installdir], allow_abs=True, delim=',')
        return txt
