# SPDX-License-Identifier: GPL-2.0-only
"""
EasyBuild support for a Python package that is an extension of software which is a Python environment itself,
implemented as an easyblock.
"""
import os

import easybuild.tools.environment as env
from easybuild.easyblocks.generic.pythonpackage import PythonPackage


class EnvironmentPackage(PythonPackage):
    """
    Builds a Python package from source into the environment (PythonEnvironment) that it is an extension of.

    The environment's own Python is used, not the first one in $PATH or that of the environment's Python module, and the
    variables that the software's easyblock gives its extensions (extension_variables()).
    """

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
        for name, value in sorted(self.master.extension_variables().items()):
            env.setvar(name, value)
        super().configure_step()
