# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild support for a Python package that is an extension of a Python environment, implemented as an easyblock."""
import os
import re

import easybuild.easyblocks.generic._bundle  # noqa: F401  # before slingtorch is imported
import easybuild.tools.environment as env
from easybuild.easyblocks.generic.pythonpackage import PythonPackage
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.filetools import IGNORE, which
from slingtorch.install.dependencies import check_types, with_parameters
from slingtorch.install.process import check_mpi, mpi_library


class EnvironmentPackage(PythonPackage):
    """Builds a Python package from source into the environment (PythonEnvironment) that it is an extension of.

    The environment's own Python is used, not the first one in $PATH or that of the environment's Python module, and the
    variables that the software's easyblock gives its extensions (extension_variables()).
    """

    # Python that maps the MPI which the package was linked with, without initialising it
    IMPORT_MPI = 'import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI'

    @staticmethod
    def extra_options(extra_vars=None):
        """Options of an extension."""
        return with_parameters(PythonPackage.extra_options(extra_vars), {
            'mpicc': [None, "MPI's compiler for C, as $MPICC: a command in $PATH, with options (for mpi4py Cray's is "
                            "'cc -shared'). The sanity check looks whether its MPI was linked"],
            'unload_modules': [[], "Modules that are not loaded while this is built"],
        })

    def __init__(self, *args, **kwargs):
        """Initialise: the parameters must be of their types."""
        super().__init__(*args, **kwargs)
        check_types(self.cfg, self.extra_options())

    def prepare_python(self):
        """Take the environment's Python."""
        if not self.is_extension:
            super().prepare_python()
            return
        self.python_cmd = self.master.own_python
        if os.path.exists(self.python_cmd):
            self.set_pylibdirs()
        self.set_ulimit()

    def configure_step(self):
        """Set the variables for compiling."""
        for name, value in sorted(getattr(self.master, 'extension_variables', dict)().items()):
            env.setvar(name, value)
        if self.cfg['unload_modules']:
            # those of the software's own module come back with the next extension
            self.master.modules_tool.unload(self.cfg['unload_modules'])
        if self.cfg['mpicc']:
            library = mpi_library(self.mpi_compiler()) if self.mpi_compiler() else None
            if not library:
                raise EasyBuildError("%s is to be built with MPI's compiler '%s', and %s. Add the module that has it "
                                     "to the dependencies, or correct mpicc", self.name, self.cfg['mpicc'],
                                     "it links no MPI" if self.mpi_compiler() else "there is none in $PATH")
            env.setvar('MPICC', self.cfg['mpicc'])
            mpi_dir = os.path.dirname(library)
            if not re.match(r'^/(usr/)?lib', mpi_dir):
                # else the MPI of the default programming environment might be taken in a job
                env.setvar('LDFLAGS', '-Wl,--disable-new-dtags -Wl,-rpath,' + mpi_dir)
        super().configure_step()

    def mpi_compiler(self):
        """Full path of the command in mpicc, or None."""
        return which(self.cfg['mpicc'].split()[0], on_error=IGNORE)

    def sanity_check_step(self, *args, **kwargs):
        """Check which MPI is linked, besides that the package can be imported."""
        if self.master.cfg.get('system_site_packages'):
            # 'pip check' would judge the packages of the Python beneath as well
            self.cfg['sanity_pip_check'] = False
        passed, message = super().sanity_check_step(*args, **kwargs)
        wrong = ''
        if self.cfg['mpicc'] and not self.dry_run:
            wrong = check_mpi(self.master.own_python, self.mpi_compiler(), self.name, self.IMPORT_MPI)
        return passed and not wrong, '; '.join(text for text in [message, wrong] if text)
