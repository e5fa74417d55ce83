# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild support for software that is built into its own Python environment, as a base for easyblocks."""
import json
import os
import re
import shlex
import tempfile

from easybuild.easyblocks.generic.keepsprevious import aside
from easybuild.easyblocks.generic.runscripts import wants_checksums_only
from easybuild.framework.easyblock import EasyBlock
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.config import ERROR, IGNORE, build_option, source_paths
from easybuild.tools.filetools import mkdir, read_file, remove_file, which, write_file
from easybuild.tools.modules import MODULE_LOAD_ENV_HEADERS, get_software_root
from easybuild.tools.run import RunShellCmdError
from slingtorch.install.dependencies import last_lines, modules_loaded, run, software_of, with_parameters
from slingtorch.install.environment_image import IMAGE, make_image, require_mksquashfs
from slingtorch.lockfile import wheel_dir

# software that provides the command conda
CONDA_NAMES = ['Miniforge3', 'Miniconda3', 'Anaconda3', 'conda']

# exists in the installation until extensions and image are finished: describes what it was made from
FINISHED = os.path.join('easybuild', 'finished-without-extensions.json')


class PythonEnvironment(EasyBlock):
    """Makes a Python environment, into which the next base class installs: environment and installation are the same
    directory. The next base class must derive from PythonPackage.

    conda makes the environment if a dependency provides it; otherwise it is a virtual environment of the dependency's
    Python. The fetch step downloads its packages to the software's directory in EasyBuild's source path; they are
    installed without network. Activating the environment sets the same variables as its module.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters of the environment."""
        return with_parameters(EasyBlock.extra_options(extra_vars), {
            'python_packages': [[], "Packages of the Python environment, in the form of pip or conda"],
            'extra_packages': [[], "More packages for the Python environment, in the form of pip or conda"],
            'environment_image': [False, "Also make a squashfs image of it, for nodes to copy (docs/runscripts.md)"],
        })

    def __init__(self, *args, **kwargs):
        """Initialise; the module needs no variables for compiling, since nothing is linked with the environment."""
        super().__init__(*args, **kwargs)
        self.use_own_python = False
        self.recipe, self.is_kept = None, False
        self.cfg['exts_defaultclass'] = self.cfg['exts_defaultclass'] or 'EnvironmentPackage'
        for variable in self.module_load_environment.alias_vars(MODULE_LOAD_ENV_HEADERS) + ['PKG_CONFIG_PATH']:
            self.module_load_environment.remove(variable)

    @property
    def own_python(self):
        """Path of the environment's Python."""
        return os.path.join(self.installdir, 'bin', 'python')

    def dependency(self, names):
        """The first dependency with one of these names (its own or in its metadata), or None."""
        return next((dep for dep in self.cfg.dependencies() if set(names).intersection(software_of(dep))), None)

    @property
    def uses_conda(self):
        """Whether conda makes the environment."""
        return self.dependency(CONDA_NAMES) is not None

    # --- packages

    def fetch_step(self, skip_checksums=False):
        """Download sources and packages, because build nodes may have no network."""
        # now, before later steps change the parameters
        self.recipe = self.describe_recipe()
        if not (self.dry_run or wants_checksums_only(skip_checksums)):
            self.download_packages()
        super().fetch_step(skip_checksums)

    def download_packages(self):
        """Download the packages of the environment, with the Python or conda of the modules."""
        with modules_loaded(self, lambda dep: dep['external_module'] or dep['name'] in CONDA_NAMES + ['Python']):
            self.make_environment(os.path.join(tempfile.mkdtemp(), 'env'), fetch=True)

    def make_environment(self, path, fetch=False):
        """Make the environment, or download packages for it that are missing."""
        packages = self.cfg['python_packages'] + self.cfg['extra_packages']
        store = wheel_dir(source_paths()[0], self.name)
        if self.uses_conda:
            store = os.path.join(os.path.dirname(store), 'conda')
        mkdir(store, parents=True)
        if self.uses_conda:
            conda = os.environ.get('CONDA_EXE') or which('conda', on_error=IGNORE)
            if not conda:
                raise EasyBuildError("The environment needs conda, but conda is not in $PATH: does the "
                                     "module %s provide it?", self.dependency(CONDA_NAMES)['full_mod_name'])
            command = ['env', 'CONDA_PKGS_DIRS=' + store, conda, 'create', '--yes', '--prefix', path,
                       '--override-channels', '--channel', 'conda-forge'] + ['--download-only'] * fetch
            offline = ['--offline']
        else:
            root = get_software_root('Python')
            python = os.path.join(root, 'bin', 'python3') if root else which('python3', on_error=ERROR)
            self.run_environment_command([[python, '-m', 'venv', path]], 'Making')
            command = [os.path.join(path, 'bin', 'python'), '-m', 'pip', '--disable-pip-version-check']
            command += ['download', '--only-binary', ':all:', '--progress-bar', 'off', '--dest', store] if fetch else [
                'install']
            offline = ['--no-index', '--find-links', store]
        if packages or self.uses_conda:
            # no server is contacted if all packages are present
            commands = [command + options + packages for options in ([offline, []] if fetch else [offline])]
            self.run_environment_command(commands, 'Downloading for' if fetch else 'Making')

    def run_environment_command(self, commands, doing):
        """Run commands until one succeeds; EasyBuildError with the last one's output if none does."""
        for words in commands:
            res = run(*words)
            if not res.exit_code:
                return
        raise EasyBuildError("%s the Python environment failed. Without network, first run 'eb --fetch %s' on a "
                             "machine with one. If a package cannot be found, change python_packages or "
                             "extra_packages. The command was\n%s\nIts output ends with\n%s",
                             doing, os.path.basename(self.cfg.path), res.cmd, last_lines(res.output))

    # --- installation

    def prepare_python(self):
        """Use the environment's own Python once it exists; until then, that of the modules."""
        if self.dry_run:
            # a dry run loads and makes nothing, so there is no Python whose version could be found
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
        """Reset parameters that are only for this software: extensions start with a copy of its parameters."""
        super().prepare_for_extensions()
        for name in ['prebuildopts', 'preinstallopts', 'buildopts', 'installopts']:
            self.cfg[name] = ''
        self.cfg['runtest'] = None

    def make_installdir(self, *args, **kwargs):
        """Keep an installation that lacks only extensions, because rebuilding the base takes hours."""
        if self.dry_run or not self.cfg['exts_list']:
            return super().make_installdir(*args, **kwargs)
        finished = os.path.join(self.installdir, FINISHED)
        if os.path.exists(finished) and read_file(finished) == self.recipe and not (
                build_option('rebuild') or build_option('force')):
            self.say("keeping %s itself: in an earlier run, only an extension failed", self.name)
            self.is_kept = self.cfg['keeppreviousinstall'] = True
        return super().make_installdir(*args, **kwargs)

    def describe_recipe(self):
        """A text that describes what this installation is made from, without its extensions."""
        params = {name: value for name, value in self.cfg.asdict().items()
                  if not name.startswith('exts_') and name != 'environment_image'}
        params['dependencies'] = [dep['full_mod_name'] for dep in self.cfg.dependencies()]
        return json.dumps(params, indent=1, sort_keys=True, default=str)

    def extensions_step(self, *args, **kwargs):
        """Print what is kept if an extension fails."""
        if self.cfg['exts_list'] and not self.dry_run:
            write_file(os.path.join(self.installdir, FINISHED), self.recipe)
        try:
            super().extensions_step(*args, **kwargs)
        except (EasyBuildError, RunShellCmdError):
            if not os.path.lexists(aside(self.mod_filepath)):  # else the old installation is restored
                self.warn("An extension failed. %s itself is complete and stays in %s. Run the same command again "
                          "to continue with the extensions, or add --rebuild to start from scratch", self.name,
                          self.installdir)
            raise

    def post_processing_step(self):
        """Make an image of the finished environment; it is not kept if the sanity check fails later."""
        super().post_processing_step()
        if self.dry_run:
            return
        if self.cfg['environment_image']:
            make_image(self.installdir, self.cfg.parallel, [self.options['modulename']])
        remove_file(os.path.join(self.installdir, FINISHED))

    def install_step(self):
        """Make the environment, and let the next base class install into it."""
        if self.dry_run:
            kind = 'conda' if self.uses_conda else 'virtual'
            packages = ' '.join(self.cfg['python_packages'] + self.cfg['extra_packages'])
            self.dry_run_msg("  * a %s environment will be made in %s with %s", kind, self.installdir, packages)
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
            # the next base class would use a module that is not loaded
            self.cfg['sanity_pip_check'] = False
        return super().sanity_check_step(*args, **kwargs)

    # --- module and activation

    def write_activation(self, directory, variables, search_paths):
        """Make activation set the module's variables, and deactivation restore them; write to a copy of the directory.

        :param variables: besides those of the easyconfig and the site: {name: value}
        :param search_paths: directories to put first, as the modules do: {name: [directory]}
        """
        if self.cfg['environment_image']:
            variables['SLINGTORCH_ENVIRONMENT_IMAGE'] = os.path.join(self.installdir, IMAGE)
        for name, value in self.cfg['modextravars'].items():
            variables[name] = str(value['value'] if isinstance(value, dict) else value)
        scripts = {kind: 'etc/conda/%s.d/slingtorch.sh' % kind for kind in ['activate', 'deactivate']}
        activation, own = [shlex.quote(os.path.join(self.installdir, path)) for path in scripts.values()]
        activate = ['if [ "${SLINGTORCH_ACTIVATED-}" != %s ]; then' % own,
                    '    # first restore the values of another such environment',
                    '    if [ -r "${SLINGTORCH_ACTIVATED-}" ]; then . "$SLINGTORCH_ACTIVATED"; fi']
        deactivate = ['if [ "${SLINGTORCH_ACTIVATED-}" = %s ]; then' % own]
        for name, value in sorted(variables.items()) + [item for item in search_paths.items() if item[1]]:
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
        # csh and fish have another syntax
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
        """Add lines once at the end of a script in bin/, and some after a line in it; write to a copy of it."""
        script = os.path.join(self.installdir, 'bin', name)
        text = read_file(script)
        if at_the_end in text:
            return
        if start:
            if text.count(start) != 1:
                raise EasyBuildError("%s has an unknown form: it has no function deactivate", script)
            text = text.replace(start, start + after_start)
        write_file(os.path.join(directory, 'bin', name), text + '\n' + at_the_end)

    def make_module_extra(self, *args, **kwargs):
        """Set what activation would set; the environment's packages are found without $PYTHONPATH."""
        self.require_python = False
        txt = super().make_module_extra(*args, **kwargs)
        txt += self.module_generator.set_environment('CONDA_PREFIX' if self.uses_conda else 'VIRTUAL_ENV', '',
                                                     relpath=True)
        if self.cfg['environment_image']:
            txt += self.module_generator.set_environment('SLINGTORCH_ENVIRONMENT_IMAGE', IMAGE, relpath=True)
        # keep packages in ~/.local out of jobs
        return txt + self.module_generator.set_environment('PYTHONNOUSERSITE', '1')

    def should_use_ebpythonprefixes(self):
        """Never, because the environment's own Python finds its packages."""
        return False
