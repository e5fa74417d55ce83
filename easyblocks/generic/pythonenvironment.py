# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild support for packages that are built into a Python environment of their own, as a base for easyblocks."""
import json
import os
import re
import shlex
import tempfile

from easybuild.easyblocks.generic.keepsprevious import aside
from easybuild.easyblocks.generic.runscripts import wants_checksums_only
from easybuild.framework.easyblock import EasyBlock
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit, print_msg, print_warning
from easybuild.tools.config import build_option, source_paths
from easybuild.tools.filetools import IGNORE, mkdir, read_file, remove_file, which, write_file
from easybuild.tools.modules import MODULE_LOAD_ENV_HEADERS, get_software_root
from easybuild.tools.run import RunShellCmdError, run_shell_cmd
from slingtorch.install.dependencies import last_lines, modules_loaded, with_parameters
from slingtorch.install.environment_image import IMAGE, make_image, require_mksquashfs
from slingtorch.lockfile import wheel_dir

# software that brings the command conda
CONDA_NAMES = ['Miniforge3', 'Miniconda3', 'Anaconda3', 'conda']

# below the installation until its extensions and its image are there: what it was made from
FINISHED = os.path.join('easybuild', 'finished-without-extensions.json')


class PythonEnvironment(EasyBlock):
    """Makes a Python environment, and lets the easyblock behind it install into that: environment and installation are
    one directory. To be inherited from in front of an easyblock derived from PythonPackage.

    The environment is conda's where a dependency brings conda, else a virtual environment on the dependency's Python.
    Its packages are downloaded in the fetch step, to the software's directory in EasyBuild's source path, and installed
    without network. Activating it gives the variables that its module gives.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters of the environment."""
        return with_parameters(EasyBlock.extra_options(extra_vars), {
            'python_packages': [[], "Packages of the Python environment, as pip or conda takes them"],
            'extra_packages': [[], "More packages for the Python environment, as pip or conda takes them"],
            'environment_image': [False, "Make also one squashfs image of it, for nodes to copy (docs/runscripts.md)"],
        })

    def __init__(self, *args, **kwargs):
        """Initialise; what the environment holds is not there to be compiled or linked against."""
        super().__init__(*args, **kwargs)
        self.use_own_python = False
        self.recipe, self.is_kept = None, False
        self.cfg['exts_defaultclass'] = self.cfg['exts_defaultclass'] or 'EnvironmentPackage'
        if self.cfg['exts_download_dep_fail'] is None:
            self.cfg['exts_download_dep_fail'] = True
        for variable in self.module_load_environment.alias_vars(MODULE_LOAD_ENV_HEADERS) + ['PKG_CONFIG_PATH']:
            self.module_load_environment.remove(variable)

    @property
    def own_python(self):
        """Path of the environment's Python."""
        return os.path.join(self.installdir, 'bin', 'python')

    def dependency(self, names):
        """The first dependency that is one of these softwares (by its own name or its metadata), or None."""
        for dep in self.cfg.dependencies():
            metadata = dep.get('external_module_metadata') or {}
            if any(name in [dep['name']] + metadata.get('name', []) for name in names):
                return dep
        return None

    @property
    def image_imports(self):
        """Names of Python modules that must be importable from the image of the environment."""
        return []

    @property
    def uses_conda(self):
        """Whether the environment is made by conda."""
        return self.dependency(CONDA_NAMES) is not None

    # --- packages

    def fetch_step(self, skip_checksums=False):
        """Download the packages besides the sources: build nodes may have no network."""
        # before later steps add to the parameters
        self.recipe = self.describe_recipe()
        if not (self.dry_run or wants_checksums_only(skip_checksums)):
            self.download_packages()
        super().fetch_step(skip_checksums)

    def download_packages(self):
        """Download the packages of the environment, with the Python or conda that the modules bring."""
        names = [dep['full_mod_name'] for dep in self.cfg.dependencies()
                 if dep['external_module'] or dep['name'] in CONDA_NAMES + ['Python']]
        with modules_loaded(self, names):
            self.make_environment(os.path.join(tempfile.mkdtemp(), 'env'), fetch=True)

    def make_environment(self, path, fetch=False):
        """Make the environment, or download what it takes and is not there yet."""
        packages = ' '.join(shlex.quote(pkg) for pkg in self.cfg['python_packages'] + self.cfg['extra_packages'])
        store = wheel_dir(source_paths()[0], self.name)
        if self.uses_conda:
            store = os.path.join(os.path.dirname(store), 'conda')
        mkdir(store, parents=True)
        if self.uses_conda:
            conda = os.environ.get('CONDA_EXE') or which('conda', on_error=IGNORE)
            if not conda:
                raise EasyBuildError("The environment is made by conda, and there is no conda in $PATH: does the "
                                     "module %s bring it?", self.dependency(CONDA_NAMES)['full_mod_name'])
            cmd = 'CONDA_PKGS_DIRS=%s %s create --yes --prefix %s --override-channels --channel conda-forge ' % (
                shlex.quote(store), shlex.quote(conda), shlex.quote(path))
            offline, online = cmd + '--offline ', cmd
            if fetch:
                offline, online = offline + '--download-only ', online + '--download-only '
        else:
            root = get_software_root('Python')
            python = os.path.join(root, 'bin', 'python3') if root else which('python3', on_error=IGNORE)
            if not python:
                raise EasyBuildError("There is no python3: add a module of Python or of conda to the dependencies")
            self.run_environment_command([shlex.quote(python) + ' -m venv ' + shlex.quote(path)], 'Making')
            pip = '%s/bin/python -m pip --disable-pip-version-check ' % shlex.quote(path)
            if fetch:
                online = pip + 'download --only-binary :all: --progress-bar off --dest %s ' % shlex.quote(store)
                offline = online + '--no-index --find-links %s ' % shlex.quote(store)
            else:
                offline = pip + 'install --no-index --find-links %s ' % shlex.quote(store)
        if packages or self.uses_conda:
            # nothing is asked of any server when everything is there
            commands = [offline, online] if fetch else [offline]
            self.run_environment_command([cmd + packages for cmd in commands],
                                         'Downloading for' if fetch else 'Making')

    def run_environment_command(self, commands, doing):
        """Run commands until one succeeds; EasyBuildError with what the last one printed if none does."""
        for cmd in commands:
            res = run_shell_cmd(cmd, fail_on_error=False, hidden=True)
            if res.exit_code == EasyBuildExit.SUCCESS:
                return
        raise EasyBuildError("%s the Python environment failed. Without network, run 'eb --fetch %s' where there is "
                             "one first; a package that cannot be had is to be changed in python_packages or "
                             "extra_packages. The command was\n%s\nIts output ends with\n%s",
                             doing, os.path.basename(self.cfg.path), cmd, last_lines(res.output))

    # --- installation

    def prepare_python(self):
        """Take the environment's own Python once it is made, and until then the one that modules bring."""
        if self.dry_run:
            # nothing is loaded and nothing made: there is no Python to ask for its version
            self.python_cmd = self.own_python
            self.pylibdir = os.path.join('lib', 'python3.*', 'site-packages')
            self.all_pylibdirs = [self.pylibdir]
            return
        if self.use_own_python and os.path.exists(self.own_python):
            self.python_cmd = self.own_python
            self.set_pylibdirs()
            self.set_ulimit()
        else:
            super().prepare_python()

    def prepare_for_extensions(self):
        """Take back what was for this software alone: extensions start with a copy of its parameters."""
        super().prepare_for_extensions()
        for name in ['prebuildopts', 'preinstallopts', 'buildopts', 'installopts']:
            self.cfg[name] = ''
        self.cfg['runtest'] = None

    def make_installdir(self, *args, **kwargs):
        """Keep an installation that lacks only extensions: rebuilding the base takes hours."""
        if self.dry_run or not self.cfg['exts_list']:
            return super().make_installdir(*args, **kwargs)
        finished = os.path.join(self.installdir, FINISHED)
        if os.path.exists(finished) and read_file(finished) == self.recipe and not (
                build_option('rebuild') or build_option('force')):
            print_msg("%s itself is there already, from a run in which an extension failed: not built again", self.name,
                      log=self.log, silent=self.silent)
            self.is_kept = self.cfg['keeppreviousinstall'] = True
        return super().make_installdir(*args, **kwargs)

    def describe_recipe(self):
        """What this installation is made from, but for its extensions, as text."""
        params = {name: value for name, value in self.cfg.asdict().items()
                  if not name.startswith('exts_') and name != 'environment_image'}
        params['dependencies'] = [dep['full_mod_name'] for dep in self.cfg.dependencies()]
        return json.dumps(params, indent=1, sort_keys=True, default=str)

    def extensions_step(self, *args, **kwargs):
        """Say what is kept when an extension fails."""
        if self.cfg['exts_list'] and not self.dry_run:
            write_file(os.path.join(self.installdir, FINISHED), self.recipe)
        try:
            super().extensions_step(*args, **kwargs)
        except (EasyBuildError, RunShellCmdError):
            if not os.path.lexists(aside(self.mod_filepath)):  # else what worked before is put back
                print_warning("An extension failed. %s itself is finished and stays in %s: the same command goes on "
                              "with the extensions, and with --rebuild from nothing", self.name, self.installdir,
                              log=self.log)
            raise

    def post_processing_step(self):
        """Make an image of the finished environment; what later fails the sanity check is not kept."""
        super().post_processing_step()
        if self.dry_run:
            return
        if self.cfg['environment_image']:
            make_image(self.installdir, self.cfg.parallel, self.image_imports)
        remove_file(os.path.join(self.installdir, FINISHED))

    def install_step(self):
        """Make the environment, let the easyblock install into it, and make it one that can be activated."""
        if self.dry_run:
            kind = 'conda' if self.uses_conda else 'virtual'
            packages = ' '.join(self.cfg['python_packages'] + self.cfg['extra_packages'])
            self.dry_run_msg("  * a %s environment will be made in %s with %s", kind, self.installdir, packages)
            self.dry_run_msg("  * pip will build and install %s into it", self.name)
            return
        if self.cfg['environment_image']:
            require_mksquashfs()
        if not self.is_kept:
            self.make_environment(self.installdir)
        self.use_own_python = True
        self.prepare_python()
        if not self.is_kept:
            super().install_step()

    def sanity_check_step(self, *args, **kwargs):
        """Check with the environment's Python."""
        self.use_own_python = True
        self.python_cmd = None
        if self.dry_run:
            # the block behind this one would ask for a module that nothing has loaded
            self.cfg['sanity_pip_check'] = False
        return super().sanity_check_step(*args, **kwargs)

    # --- module and activation

    def environment_variables(self):
        """What the module sets beyond EasyBuild's own and activating must set as well: {name: value}."""
        variables = {}
        if self.cfg['environment_image']:
            variables['SLINGTORCH_ENVIRONMENT_IMAGE'] = os.path.join(self.installdir, IMAGE)
        for name, value in self.cfg['modextravars'].items():
            variables[name] = str(value['value'] if isinstance(value, dict) else value)
        return variables

    def environment_search_paths(self):
        """What activating must put in front of search paths, as the modules do: {name: [directory]}."""
        return {}

    def write_activation(self, directory):
        """Let activating give the variables, and deactivating the former values; written to a stand-in for it."""
        scripts = {kind: 'etc/conda/%s.d/slingtorch.sh' % kind for kind in ['activate', 'deactivate']}
        activation, own = [shlex.quote(os.path.join(self.installdir, path)) for path in scripts.values()]
        activate = ['if [ "${SLINGTORCH_ACTIVATED-}" != %s ]; then' % own,
                    '    # another such environment takes its values back first',
                    '    if [ -r "${SLINGTORCH_ACTIVATED-}" ]; then . "$SLINGTORCH_ACTIVATED"; fi']
        deactivate = ['if [ "${SLINGTORCH_ACTIVATED-}" = %s ]; then' % own]
        names = sorted(self.environment_variables().items())
        paths = sorted(self.environment_search_paths().items())
        for name, value in names + paths:
            saved = 'SLINGTORCH_SAVED_' + name
            activate.append('    if [ -n "${%s+x}" ]; then export %s="$%s"; fi' % (name, saved, name))
            if isinstance(value, list):
                new = '%s${%s:+:$%s}' % (':'.join(value), name, name)
                activate.append('    export %s="%s"' % (name, new))
            else:
                activate.append('    export %s=%s' % (name, shlex.quote(value)))
            deactivate.append('    if [ -n "${%s+x}" ]; then export %s="$%s"; else unset %s; fi; unset %s'
                              % (saved, name, saved, name, saved))
        activate += ['    export SLINGTORCH_ACTIVATED=' + own, 'fi']
        deactivate += ['    unset SLINGTORCH_ACTIVATED', 'fi']

        for kind, lines in [('activate', activate), ('deactivate', deactivate)]:
            header = '# The variables that the module of this installation sets. Read by %s.\n' % (
                'conda ' + kind if self.uses_conda else 'bin/activate')
            write_file(os.path.join(directory, scripts[kind]), header + '\n'.join(lines) + '\n')
        # these two have another syntax
        warning = ('slingtorch: in this shell activating does not set the variables for network and GPU: module load %s'
                   % self.full_mod_name)
        line = 'sh -c \'echo "%s" >&2\'\n' % warning
        for shell in ['csh', 'fish']:
            if self.uses_conda:
                write_file(os.path.join(directory, re.sub('sh$', shell, scripts['activate'])), line)
            else:
                self.add_to_script(directory, 'activate.' + shell, line)
        if not self.uses_conda:
            self.add_to_script(directory, 'activate', '. %s\n' % activation, 'deactivate () {\n', '    . %s\n' % own)

    def add_to_script(self, directory, name, at_the_end, start=None, after_start=''):
        """Add lines once to a script in bin/, and some after a line in it; written to a stand-in for it."""
        script = os.path.join(self.installdir, 'bin', name)
        text = read_file(script)
        if at_the_end in text:
            return
        if start:
            if text.count(start) != 1:
                raise EasyBuildError("The form of %s is unknown: there is no function deactivate in it", script)
            text = text.replace(start, start + after_start)
        write_file(os.path.join(directory, 'bin', name), text + '\n' + at_the_end)

    def make_module_extra(self, *args, **kwargs):
        """Set the environment up as activating it would; its packages are found without $PYTHONPATH."""
        required, self.require_python = getattr(self, 'require_python', None), False
        txt = super().make_module_extra(*args, **kwargs)
        self.require_python = required
        txt += self.module_generator.set_environment('CONDA_PREFIX' if self.uses_conda else 'VIRTUAL_ENV', '',
                                                     relpath=True)
        if self.cfg['environment_image']:
            txt += self.module_generator.set_environment('SLINGTORCH_ENVIRONMENT_IMAGE', IMAGE, relpath=True)
        # packages in ~/.local stay out of the job
        return txt + self.module_generator.set_environment('PYTHONNOUSERSITE', '1')

    def should_use_ebpythonprefixes(self):
        """Never: the environment is found by its own Python."""
        return False
