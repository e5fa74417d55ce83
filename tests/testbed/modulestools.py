# SPDX-License-Identifier: GPL-2.0-only
"""Lmod and Environment Modules, each with a bash in which `module` works."""

import glob
import os
import pathlib
import shlex
import shutil

from . import DIR, clean_environ, missing, parse_env0, run

LMOD_CMD = os.environ.get('LMOD_CMD') or '/usr/share/lmod/lmod/libexec/lmod'


class ModulesTool:
    """One modules tool.

    :ivar name: EasyBuild's name of it (--modules-tool)
    :ivar syntax: syntax of the module files it is tested with (--module-syntax)
    :ivar variables: environment variables that make EasyBuild find it
    :ivar init: bash commands that define `module`
    """

    def __init__(self, name, syntax, variables, init):
        self.name = name
        self.syntax = syntax
        self.variables = variables
        self.init = init

    @property
    def env(self):
        """A clean environment in which EasyBuild finds this modules tool."""
        return {**clean_environ(), **self.variables, 'EASYBUILD_MODULES_TOOL': self.name,
                'EASYBUILD_MODULE_SYNTAX': self.syntax}

    def bash(self, script, modulepath=(), env=None, check=True, timeout=120, cwd=None):
        """Run a bash script in which `module` works.

        :param modulepath: directories to `module use` first; the machine's own are not there
        :param env: variables on top of a clean environment; None as a value removes the variable
        :param check: fail the test if the script's status is not 0; `module load` sets the status.
        """
        environment = {**clean_environ(), **self.variables}
        for key, value in (env or {}).items():
            if value is None:
                environment.pop(key, None)
            else:
                environment[key] = str(value)
        uses = ''.join(f'module use {shlex.quote(str(path))}\n' for path in reversed(list(modulepath)))
        prologue = f'{self.init}\nunset MODULEPATH\n{uses}'
        return run(['bash', '--noprofile', '--norc', '-c', prologue + script], env=environment, check=check,
                   timeout=timeout, cwd=cwd)

    def load(self, *modules, modulepath, env=None):
        """The environment (a dictionary) after `module load`; a module that does not load fails the test."""
        marker = '---environment---'
        done = self.bash(f'module load {" ".join(modules)} || exit 1\necho {marker}\nenv -0', modulepath=modulepath,
                         env=env)
        return parse_env0(done.stdout.split(marker + '\n', 1)[1])


def lmod():
    """Lmod, as $LMOD_CMD names it or where Debian and Ubuntu put it."""
    command = LMOD_CMD
    init = pathlib.Path(command).parents[1] / 'init/bash'
    if not (os.access(command, os.X_OK) and init.is_file()):
        missing('Lmod (package lmod)')
    # it asks the terminal otherwise, each time, and starts four processes to do so
    variables = {'LMOD_CMD': command, 'LMOD_TERM_WIDTH': '80'}
    return ModulesTool('Lmod', 'Lua', variables, f'. {shlex.quote(str(init))}')


def envmodules():
    """Environment Modules, unpacked from its Debian package, since installing it would remove Lmod."""
    found = glob.glob(f'{DIR}/envmodules/usr/lib/*/modulecmd.tcl')
    if not (found and shutil.which('tclsh')):
        missing(f'Environment Modules (package environment-modules, unpacked into {DIR}/envmodules)')
    init = f'eval "$(tclsh {shlex.quote(found[0])} bash autoinit)"'
    return ModulesTool('EnvironmentModules', 'Tcl', {'MODULES_CMD': found[0]}, init)
