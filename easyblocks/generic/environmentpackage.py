# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild support for a Python package as an extension of a Python environment, implemented as an easyblock."""
import os

import easybuild.easyblocks.generic._bundle  # noqa: F401  # before slingtorch is imported
import easybuild.tools.environment as env
from easybuild.easyblocks.generic.pythonpackage import PythonPackage
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.filetools import IGNORE, which
from slingtorch.install.dependencies import check_types, with_parameters
from slingtorch.install.process import check_mpi, mpi_library, run_path_flags


class EnvironmentPackage(PythonPackage):
    """Builds a Python package from source as an extension of an environment (PythonEnvironment).

    It uses the environment's own Python, not the first one in $PATH or that of the environment's Python module, and the
    variables that the software's easyblock gives its extensions (extension_variables()).
    """

    # Python code that loads the MPI of the package without initialising it
    IMPORT_MPI = 'import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI'

    @staticmethod
    def extra_options(extra_vars=None):
        """Options of an extension."""
        return with_parameters(PythonPackage.extra_options(extra_vars), {
            'mpicc': [None, "MPI's C compiler, for $MPICC: a command in $PATH, with options (for mpi4py on Cray: "
                            "'cc -shared'). The sanity check verifies that the extension links its MPI"],
            'unload_modules': [[], "Modules to unload while this extension is built"],
        })

    def __init__(self, *args, **kwargs):
        """Initialise, and check the types of parameters."""
        super().__init__(*args, **kwargs)
        check_types(self.cfg, self.extra_options())

    def prepare_python(self):
        """Use the environment's Python."""
        if not self.is_extension:
            super().prepare_python()
            return
        self.python_cmd = self.master.own_python
        if os.path.exists(self.python_cmd):
            self.set_pylibdirs()

    def configure_step(self):
        """Set the variables for compiling."""
        for name, value in sorted(getattr(self.master, 'extension_variables', dict)().items()):
            env.setvar(name, value)
        if self.cfg['unload_modules']:
            # the software's own module loads its modules again for the next extension
            self.master.modules_tool.unload(self.cfg['unload_modules'])
        if self.cfg['mpicc']:
            library = mpi_library(self.mpi_compiler()) if self.mpi_compiler() else None
            if not library:
                raise EasyBuildError("%s needs MPI's compiler '%s', but %s. Add the module that provides it to the "
                                     "dependencies, or correct mpicc", self.name, self.cfg['mpicc'],
                                     "it links no MPI" if self.mpi_compiler() else "it is not in $PATH")
            env.setvar('MPICC', self.cfg['mpicc'])
            if run_path_flags(library):
                env.setvar('LDFLAGS', ' '.join(run_path_flags(library)))
        super().configure_step()

    def mpi_compiler(self):
        """Full path of the command in mpicc, or None."""
        return which(self.cfg['mpicc'].split()[0], on_error=IGNORE)

    def sanity_check_step(self, *args, **kwargs):
        """Check which MPI is linked, and that the package can be imported."""
        if self.master.cfg.get('system_site_packages'):
            # 'pip check' would also check the packages of the base Python
            self.cfg['sanity_pip_check'] = False
        passed, message = super().sanity_check_step(*args, **kwargs)
        wrong = ''
        if self.cfg['mpicc'] and not self.dry_run:
            wrong = check_mpi(self.master.own_python, self.mpi_compiler(), self.name, self.IMPORT_MPI)
        return passed and not wrong, '; '.join(text for text in [message, wrong] if text)
