# SPDX-License-Identifier: GPL-2.0-only
"""Functions of several easyblocks for parameters, the prefixes and modules of dependencies, and commands."""
import contextlib
import copy
import os
import shlex
from typing import Any, Dict, Iterable, Iterator, Optional

from easybuild.framework.easyconfig import CUSTOM
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit
from easybuild.tools.config import build_option
from easybuild.tools.environment import restore_env
from easybuild.tools.modules import NoModulesTool, get_software_root, modules_tool
from easybuild.tools.run import run_shell_cmd

# names of the parameters that easyblocks of the bundle declare
OWN_PARAMETERS = set()


def with_parameters(extra_vars: Any, parameters: Any) -> Dict[str, Any]:
    """An easyblock's easyconfig parameters with additional ones: {name: [default, description]}."""
    OWN_PARAMETERS.update(parameters)
    return dict(extra_vars, **{name: parameter + [CUSTOM] for name, parameter in parameters.items()})


def check_types(cfg: Any, parameters: Any) -> None:
    """Raise an EasyBuildError if a parameter of the bundle among these has another type than its default."""
    for name, (default, _, _) in parameters.items():
        if name not in OWN_PARAMETERS:
            continue
        value = cfg[name]
        if isinstance(default, list) and not (isinstance(value, (list, tuple))
                                              and all(isinstance(item, str) for item in value)):
            raise EasyBuildError("%s is %r, but must be a list of strings: %s = ['...']; on the command line: "
                                 "--try-amend='%s=ONE,' with a comma", name, value, name, name)
        if isinstance(default, dict) and not (isinstance(value, dict)
                                              and all(isinstance(item, (str, int)) for item in value.values())):
            raise EasyBuildError("%s is %r, but must be a dictionary: %s = {'name': 'value'}", name, value, name)
        if isinstance(default, bool) and not isinstance(value, bool):
            raise EasyBuildError("%s is %r, but must be True or False", name, value)


def run(*words: str, hidden: bool = True, **options: Any) -> Any:
    """Run a command that may fail, by default shown only in the log; its RunShellCmdResult."""
    return run_shell_cmd(' '.join(map(shlex.quote, words)), fail_on_error=False, hidden=hidden, **options)


def last_lines(output: str) -> str:
    """The end of what a command printed, for messages."""
    return '\n'.join(output.strip().splitlines()[-15:])


def software_of(dep: Any) -> Dict[str, Optional[str]]:
    """{name: version} of a dependency; of an external module, as its metadata says."""
    metadata = dep.get('external_module_metadata') or {}
    names = metadata.get('name') or [dep['name']]
    return dict(zip(names, metadata.get('version') or [dep['version']] * len(names)))


def dependency_root(cfg: Any, name: str) -> Optional[str]:
    """Prefix of a dependency, by name or metadata, since $EBROOT* of external modules exist only during a build."""
    path = get_software_root(name)
    for metadata in [dep.get('external_module_metadata') or {} for dep in cfg.dependencies()]:
        if not path and name in metadata.get('name', []) and metadata.get('prefix'):
            variable, _, rest = metadata['prefix'].partition('/')
            path = os.path.join(os.environ.get(variable, ''), rest).rstrip('/') if variable else metadata['prefix']
    return path if path and os.path.isabs(path) else None


def load_one_by_one(tool: Any, names: Iterable[str], easyconfig: str) -> None:
    """Load modules; EasyBuildError that names the one that does not load."""
    for name in names:
        try:
            tool.load([name])
        except EasyBuildError as err:
            raise EasyBuildError("%s needs the module %s, but this system does not have it. If EasyBuild has an "
                                 "easyconfig for the module, 'eb --robot' installs it first. Otherwise this "
                                 "easyconfig may be for another system, or you need to load another module before "
                                 "'eb': see 'module avail' and 'module spider'. The modules tool printed: %s",
                                 easyconfig, name, err, exit_code=EasyBuildExit.MISSING_DEPENDENCY)


@contextlib.contextmanager
def modules_loaded(easyblock: Any, wanted: Any = lambda dep: True) -> Iterator[None]:
    """Load the modules of the wanted dependencies while the context lasts: their Python or conda downloads."""
    names = [dep['full_mod_name'] for dep in easyblock.cfg.dependencies() if wanted(dep)]
    saved_env = copy.deepcopy(os.environ)
    tool = easyblock.modules_tool
    if names and isinstance(tool, NoModulesTool):
        # with --fetch, EasyBuild uses no modules tool unless asked
        tool = modules_tool(modules_tool_name=build_option('orig_modules_tool'))
    try:
        try:
            tool.load(names)
        except EasyBuildError:
            restore_env(saved_env)
            load_one_by_one(tool, names, os.path.basename(easyblock.cfg.path))
        yield
    finally:
        restore_env(saved_env)
