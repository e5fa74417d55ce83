# SPDX-License-Identifier: GPL-2.0-only
"""Real `eb`, as a user runs it who activated the bundle."""

import copy
import fcntl
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import sys
import types

import pytest

from . import DIR, ROOT, checked, forkedeb, locked, missing, parse_env0, quickvenv, run

BIN = pathlib.Path(sys.executable).parent
"""Directory of `eb` and `slingtorch`: that of the Python that runs the tests."""

activated = {}
"""What `slingtorch env` made of which environment: it takes half a second, and hundreds of tests ask the same."""


class EasyBuild:
    """`eb` with a prefix of its own and the bundle activated by `slingtorch env`.

    :ivar prefix: where it installs to
    :ivar env: the environment that `eb` runs in
    :ivar modulepath: directory of the module files it makes
    """

    def __init__(self, prefix, tool, options=(), fresh=False):
        """
        :param prefix: directory for software, modules, sources and build
        :param tool: testbed.modulestools.ModulesTool
        :param options: of `slingtorch env`, for example ['--site', 'lumi']
        :param fresh: do without what makes tests fast: start `eb` itself each time (testbed.forkedeb), and let Python
                      make virtual environments in its own way (testbed.quickvenv) with the distutils of setuptools
        """
        for command in ('eb', 'slingtorch'):
            if not (BIN / command).exists():
                missing(f'command {command} beside {sys.executable}')
        self.prefix = pathlib.Path(prefix)
        self.tool = tool
        self.fresh = fresh
        self.modulepath = self.prefix / 'modules/all'
        own_files = [f'{os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")}/easybuild/config.cfg']
        base = {**tool.env,
                'PATH': f'{BIN}:{os.environ["PATH"]}' if fresh else f'{quickvenv.python3()}:{BIN}:{os.environ["PATH"]}',
                'EASYBUILD_PREFIX': str(self.prefix), 'EASYBUILD_TMPDIR': str(self.prefix / 'tmp'),
                'EASYBUILD_IGNORECONFIGFILES': ','.join(path for path in own_files if os.path.exists(path)),
                'EASYBUILD_DISABLE_SHOW_PROGRESS_BAR': '1', 'EASYBUILD_OUTPUT_STYLE': 'no_color'}
        if not base['EASYBUILD_IGNORECONFIGFILES']:
            del base['EASYBUILD_IGNORECONFIGFILES']
        if not fresh:
            # EasyBuild asks distutils where packages are, a dozen times: that of setuptools takes 0.3 s to import
            base['SETUPTOOLS_USE_DISTUTILS'] = 'stdlib'
        if os.geteuid() == 0:
            base['EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES'] = '1'
        (self.prefix / 'tmp').mkdir(parents=True, exist_ok=True)
        self.env = self.activate(base, options)

    def activate(self, base, options):
        """The environment after `slingtorch env`, asked once for all that differ in nothing but the prefix."""
        here = str(self.prefix)
        key = (tuple(options), *sorted((name, value.replace(here, '')) for name, value in base.items()))
        if key not in activated:
            script = f'commands=$(slingtorch env {shlex.join(options)}) && eval "$commands" && env -0'
            done = run(['bash', '--noprofile', '--norc', '-c', script], env=base, cwd=self.prefix)
            activated[key] = here, parse_env0(done.stdout)
        there, env = activated[key]
        return {name: value.replace(there, here) for name, value in env.items()}

    def __call__(self, *args, env=None, check=True, timeout=600, cwd=None):
        """Run `eb ARGS`; its CompletedProcess, with text streams. Runs in a directory that is not the checkout.

        :param env: variables on top; None as a value removes the variable
        """
        environment = {key: str(value) for key, value in {**self.env, **(env or {})}.items() if value is not None}
        cwd = cwd or self.prefix
        if self.fresh or not forkedeb.can(environment):
            return run([BIN / 'eb', *args], env=environment, check=check, timeout=timeout, cwd=cwd)
        return checked(forkedeb.eb(args, environment, cwd, timeout), check)

    run = __call__


class Installation:
    """Software that `eb` installed.

    :ivar module: short name of its module
    :ivar modulepath: directory to `module use`
    :ivar root: where it is installed
    :ivar env: environment after `module load`; read-only, since all tests of a run share one installation
    :ivar runscripts: directory of its runscripts
    :ivar python: its python
    """

    def __init__(self, module, modulepath, tool):
        self.module = module
        self.modulepath = pathlib.Path(modulepath)
        self.env = types.MappingProxyType(tool.load(module, modulepath=[modulepath]))
        self.root = pathlib.Path(self.env['EBROOT' + module.split('/')[0].upper()])
        self.runscripts = pathlib.Path(self.env['RUNSCRIPTS'])
        self.python = self.root / 'bin/python'

    def with_variables(self, **variables):
        """The same installation, with more in its environment."""
        other = copy.copy(self)
        other.env = types.MappingProxyType({**self.env, **variables})
        return other


def made_from(easyconfig):
    """The files of the bundle that an installation of a PyTorch for this machine comes from, in order."""
    patterns = ('hooks/*.py', 'slingtorch/sites/*.py', 'hooks/sites/local.cfg', 'runscripts/**/*', 'slingtorch/job/*')
    files = {path for pattern in patterns for path in ROOT.glob(pattern)}
    files.update(easyconfig.parent.glob(f'{easyconfig.stem}*'))
    blocks = {path.stem: path for path in (ROOT / 'easyblocks').rglob('*.py')}
    todo = [re.search(r"^easyblock = '(?:EB_)?(\w+)'", easyconfig.read_text(), re.M).group(1).lower()]
    for name in todo:   # which grows: what an easyblock imports of ours
        path = blocks.get(name) or ROOT / name
        files.add(path)
        text = path.read_text()
        named = {module.replace('.', '/') for module in re.findall(r'^from (slingtorch[\w.]*) import', text, re.M)}
        own = {f'{module}{end}' for module in named for end in ('.py', '/__init__.py') if (ROOT / f'{module}{end}').exists()}
        todo += (set(re.findall(r'\b\w+\b', text)) & set(blocks) | own) - set(todo)
    return sorted(path for path in files if path.is_file() and '__pycache__' not in path.parts)


def state_of_bundle(easyconfig):
    """A short digest of what an installation is made from, so that a kept one is made again after a change."""
    digest = hashlib.sha256(sys.version.encode())
    for path in made_from(easyconfig):
        digest.update(str(path.relative_to(ROOT)).encode() + b'\0' + path.read_bytes() + b'\0')
    return digest.hexdigest()[:12]


def installed(easyconfig, tool, *options, env=None):
    """Install the easyconfig of this file name with real `eb`, or reuse what the same files made earlier.

    :param options: more options of `eb`; always the same ones for an easyconfig
    :param env: more environment for `eb`
    """
    path = next(iter((ROOT / 'easyconfigs').rglob(easyconfig)), None)
    if path is None:
        pytest.fail(f'no easyconfig {easyconfig} in the bundle', pytrace=False)
    module = path.stem.replace('-', '/', 1)
    home = DIR / 'installed' / path.stem
    prefix = home / state_of_bundle(path)
    with locked(f'installed-{path.stem}'):     # what takes minutes keeps nobody from what is there
        for earlier in home.glob('*'):
            if earlier != prefix:
                remove_unless_used(earlier)
        prefix.mkdir(parents=True, exist_ok=True)
        use = open(prefix / '.use', 'w')
        fcntl.flock(use, fcntl.LOCK_SH)
        if not (prefix / 'modules/all' / f'{module}.lua').exists():
            # of an `eb` that was killed: nobody else installs here
            shutil.rmtree(prefix / 'software/.locks', ignore_errors=True)
            # wheels that were downloaded once are kept: sources are checked by sha256 in any case
            eb = EasyBuild(prefix, tool, fresh=True)
            eb(easyconfig, f'--sourcepath={DIR}/sources:{ROOT}/patches:{ROOT}/runscripts', *options, timeout=5400, env=env)
    installation = Installation(module, prefix / 'modules/all', tool)
    installation.use = use  # open as long as this run lasts: remove_unless_used()
    return installation


def remove_unless_used(prefix):
    """Remove an installation of an earlier state of the bundle, unless another test run has it in use."""
    with open(prefix / '.use', 'w') as use:
        try:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(prefix)
