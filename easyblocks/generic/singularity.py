##
# Copyright 2026 the slingtorch authors
#
# This file is part of slingtorch, an EasyBuild bundle: it subclasses EasyBuild's classes and is distributed under
# the same licence, the GNU General Public License version 2 (see the file LICENSE).
##
"""
EasyBuild support for container images (SIF) behind a module, run by Apptainer or Singularity,
implemented as an easyblock.
"""
import os
import re
import shlex
import stat

from easybuild.easyblocks.generic.singularitymodule import SingularityModule
from easybuild.framework.easyconfig import CUSTOM
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit, print_msg, print_warning
from easybuild.tools.config import build_option
from easybuild.tools.filetools import adjust_permissions, copy_file, mkdir, remove_dir, remove_file, symlink, write_file
from easybuild.tools.run import run_shell_cmd

# files beside an image (runscripts/container of the bundle), and the commands that are links to them
CONTAINER_SCRIPTS = ['in-container', 'list-packages', 'make-squashfs']
CONTAINER_LINKS = {'start-shell': 'in-container', 'unmake-squashfs': 'make-squashfs'}

# commands that scripts outside the container need as they are: a wrapper of that name would come first in $PATH
NOT_WRAPPED = ['apptainer', 'bash', 'env', 'sh', 'singularity']

CONTAINER_CHECKS = ['warn', 'require']

# easyconfig parameters that are lists of strings, and dictionaries
LISTS = ['bind_paths', 'build_options', 'central_image_dirs', 'container_path', 'docker_defs', 'preset_venv_packages',
         'sanity_check_files_in_container', 'sanity_check_imports', 'wrappers']
DICTIONARIES = ['container_environment', 'sanity_check_packages']

# what 'module help' says besides the description
USAGE = """
Commands that run in the container: %s, and any other with in-container COMMAND; start-shell is a shell in it.
Packages: list-packages; pip install (where the module has an environment for yours); make-squashfs, unmake-squashfs.
The image itself is $SIF: singularity exec $SIF COMMAND. Scripts for jobs: /runscripts inside, $RUNSCRIPTS outside."""

# beside a virtual environment while it is being made: /user-software/venv/NAME.unfinished
UNFINISHED = '.unfinished'

# what a runtime prints that cannot run containers on this host -> what to do
HOST_PROBLEMS = [
    (r'neither singularity nor apptainer', "no container runtime is here"),
    (r'user namespace|unprivileged_userns|max_user_namespaces|newuidmap|uid_map|setgroups',
     "the runtime may not make user namespaces here. An administrator can allow them (sysctl "
     "user.max_user_namespaces), or install the setuid part of the runtime"),
    (r'/dev/fuse|fusermount|squashfuse|fuse', "the runtime cannot mount the image: it needs squashfuse and read and "
     "write permission for /dev/fuse, or its setuid part"),
]


class Singularity(SingularityModule):
    """
    Installs a container image (SIF) behind a module.

    The image comes from the source path (a SIF, or a definition file to build it from) or from a registry. Beside it go
    the runscripts, which are /runscripts inside, commands that run in the container ('wrappers', one script and links),
    and the directory user-software for packages of the user, which is /user-software inside.

    Where a container runtime is there the installation is checked inside the container. A build host often has none:
    'container_checks' says whether that is a warning or an error.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters of Singularity."""
        extra_vars = SingularityModule.extra_options(extra_vars)
        extra_vars.update({
            'container_checks': ['warn', "What it means if no container can be run while installing: 'warn', or "
                                         "'require' to make it an error", CUSTOM],
            'container_python': ['python', "Command of Python in the container; None: the image has none", CUSTOM],
            'python_version': [None, "Version that Python in the container must have, for example '3.10'", CUSTOM],
            'sanity_check_files_in_container': [[], "Files that must exist inside the container, for example the "
                                                    "network plugin; may have wildcards", CUSTOM],
            'sanity_check_imports': [[], "Names of Python modules that must be importable in the container", CUSTOM],
            'sanity_check_packages': [{}, "Versions of Python packages in the container: {distribution: version}; a "
                                          "local version label (+rocm5.6) need not be given", CUSTOM],
            'wrappers': [['python', 'python3', 'pip', 'torchrun'], "Names of commands in the container that get a "
                         "command outside it, which the module puts into $PATH", CUSTOM],
        })
        return extra_vars

    def __init__(self, *args, **kwargs):
        """Initialise: the paths of the scripts are found in the fetch step."""
        super().__init__(*args, **kwargs)
        self.container_script_paths = []
        if not self.cfg['usage']:
            self.cfg['usage'] = USAGE % ', '.join(self.cfg['wrappers'] or ['none'])

    def fetch_step(self, *args, **kwargs):
        """Check the easyconfig parameters, and find the scripts besides the image."""
        self.check_types()
        if self.cfg['container_checks'] not in CONTAINER_CHECKS:
            raise EasyBuildError("Easyconfig parameter container_checks is '%s': it must be one of %s",
                                 self.cfg['container_checks'], ', '.join(CONTAINER_CHECKS))
        own = CONTAINER_SCRIPTS + sorted(CONTAINER_LINKS) + NOT_WRAPPED
        for name in self.cfg['wrappers']:
            if name in own or not re.match(r'^[\w.+-]+$', name):
                raise EasyBuildError("Easyconfig parameter wrappers has '%s': it must be the name of a command, and "
                                     "not one of %s", name, ', '.join(own))
        if self.cfg['preset_venv'] and not re.match(r'^[\w.-]*\w$', self.cfg['preset_venv']):
            raise EasyBuildError("preset_venv is '%s': it must be a name of letters, digits, '.', '-' and '_'",
                                 self.cfg['preset_venv'])
        if self.cfg['preset_venv'] and not self.cfg['container_python']:
            raise EasyBuildError("preset_venv is '%s', but container_python is None: an environment needs Python",
                                 self.cfg['preset_venv'])
        for name in ['preset_venv_packages', 'preset_venv_squashfs']:
            if self.cfg[name] and not self.cfg['preset_venv']:
                raise EasyBuildError("%s is for a virtual environment, and preset_venv names none: add "
                                     "preset_venv = 'NAME'", name)
        self.bind_mounts()

        for name in CONTAINER_SCRIPTS:
            path = self.obtain_file(os.path.join('container', name), no_download=True, warning_only=True)
            if not path:
                raise EasyBuildError("The script container/%s was not found: the directory runscripts/ of the bundle "
                                     "must be on EasyBuild's source path. Activate the bundle with 'eval "
                                     "\"$(slingtorch env)\"', or add it with --sourcepath", name)
            self.container_script_paths.append(path)
        super().fetch_step(*args, **kwargs)

    def check_types(self):
        """Check that parameters which are lists or dictionaries of strings are that, and what the path may be."""
        for name in LISTS:
            value = self.cfg[name]
            if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
                raise EasyBuildError("Easyconfig parameter %s is %r: it must be a list of strings: %s = ['...']", name,
                                     value, name)
        for name in DICTIONARIES:
            value = self.cfg[name]
            if not isinstance(value, dict) or not all(isinstance(item, (str, int)) for item in value.values()):
                raise EasyBuildError("Easyconfig parameter %s is %r: it must be a dictionary of strings: "
                                     "%s = {'name': 'value'}", name, value, name)
        if re.search(r'[,:$"\n]', self.installdir):
            raise EasyBuildError("The installation directory is %s: a container cannot be given a directory with a "
                                 "comma, a colon, a quote or a dollar in its name. Install elsewhere: --prefix or "
                                 "--installpath", self.installdir)

    @property
    def in_container(self):
        """The command that runs others in the container, ready for the shell."""
        return shlex.quote(os.path.join(self.installdir, 'bin', 'in-container'))

    def post_processing_step(self):
        """Put the scripts beside the image, and make the user's virtual environment."""
        if self.dry_run:
            self.dry_run_msg("  * scripts and wrappers will be put beside the image: %s",
                             ', '.join(self.cfg['wrappers']))
            return
        super().post_processing_step()
        bin_dir = os.path.join(self.installdir, 'bin')
        mkdir(bin_dir, parents=True)
        for path in self.container_script_paths:
            target = os.path.join(bin_dir, os.path.basename(path))
            copy_file(path, target)
            adjust_permissions(target, 0o755, recursive=False, relative=False)
        links = dict(CONTAINER_LINKS, **dict.fromkeys(self.cfg['wrappers'], 'in-container'))
        for name, target in sorted(links.items()):
            symlink(target, os.path.join(bin_dir, name), use_abspath_source=False)
        self.write_container_conf()
        if not os.path.lexists(os.path.join(self.installdir, 'user-software')):
            mkdir(os.path.join(self.installdir, 'user-software'))
        if self.cfg['preset_venv']:
            self.make_preset_venv()

    def write_container_conf(self):
        """Write down for the scripts what the module file says to the shell: they must also work without it."""
        lines = ["# read by bin/in-container; made by EasyBuild together with the module file",
                 "image=%s" % self.image_name, "easyconfig=%s" % self.easyconfig_name(),
                 "python=%s" % (self.cfg['container_python'] or '')]
        lines += ["central=%s" % path for path in self.cfg['central_image_dirs']]
        lines += ["bind=%s" % bind for bind in self.bind_mounts()]
        lines += ["path=%s" % path for path in self.path_inside()]
        lines += ["env=%s=%s" % item for item in sorted(self.environment_inside().items())]
        write_file(os.path.join(self.installdir, 'container.conf'), '\n'.join(lines) + '\n')

    def make_preset_venv(self):
        """Make the virtual environment for the user's own packages, unless an earlier installation has it."""
        name = self.cfg['preset_venv']
        inside = '/user-software/venv/%s' % name
        path = os.path.join(self.installdir, inside[1:])
        unfinished = path + UNFINISHED
        squashfs = os.path.join(self.installdir, 'user-software.squashfs')
        problem = self.container_problem()
        if os.path.exists(unfinished) and not problem:
            # an earlier installation was interrupted while making it: nothing of the user's is in it
            remove_dir(path)
        if os.path.lexists(path) or os.path.exists(squashfs):
            self.keep_preset_venv(inside, problem)
            return
        if problem:
            self.container_warning("The virtual environment %s is not made: %s. Where containers run, 'eb --rebuild "
                                   "%s' makes it" % (name, problem, self.easyconfig_name()))
            return
        print_msg("making the virtual environment %s...", name, log=self.log, silent=self.silent)
        mkdir(os.path.dirname(path), parents=True)
        write_file(unfinished, '')
        try:
            self.fill_preset_venv(inside)
        except BaseException:
            # else the next attempt would keep it as the user's own
            remove_dir(path)
            raise
        finally:
            if not os.path.lexists(path):
                remove_file(unfinished)
        remove_file(unfinished)
        if self.cfg['preset_venv_squashfs']:
            self.run_or_fail('Packing the virtual environment', os.path.join(self.installdir, 'bin', 'make-squashfs'),
                             "Without preset_venv_squashfs in the easyconfig it stays a directory")

    def keep_preset_venv(self, inside, problem):
        """
        Say what is left as it is, and whether it works.

        :param inside: path of the virtual environment inside the container
        :param problem: why no container can be run on this host
        """
        renew = "To have it made anew: move %s away (a .squashfs beside it too), then 'eb --rebuild %s'" % (
            os.path.join(self.installdir, 'user-software'), self.easyconfig_name())
        if not problem:
            res = run_shell_cmd('%s %s/bin/python -c pass' % (self.in_container, inside), fail_on_error=False,
                                hidden=True)
            if res.exit_code != EasyBuildExit.SUCCESS:
                print_warning("The virtual environment %s%s was kept, but does not work with this image (another "
                              "Python?). %s" % (self.installdir, inside, renew), log=self.log)
                return
        if self.cfg['preset_venv_packages'] or self.cfg['preset_venv_squashfs']:
            print_msg("the virtual environment %s is kept as it is: preset_venv_packages are not installed again, "
                      "nothing is packed. %s", self.cfg['preset_venv'], renew, log=self.log, silent=self.silent)

    def fill_preset_venv(self, inside):
        """
        Make the virtual environment, with the packages of the easyconfig.

        :param inside: its path inside the container
        """
        self.run_or_fail('Making the virtual environment %s' % self.cfg['preset_venv'],
                         '%s %s -m venv --system-site-packages %s'
                         % (self.in_container, shlex.quote(self.cfg['container_python']), inside),
                         "If the disk is not full: the image may have no '%s' or no venv for it. Then set "
                         "container_python, or preset_venv = None" % self.cfg['container_python'])
        packages = ' '.join(shlex.quote(package) for package in self.cfg['preset_venv_packages'])
        if packages:
            pip = '%s %s/bin/python -m pip install --no-input --progress-bar off ' % (self.in_container, inside)
            self.run_or_fail('Installing %s into the virtual environment' % packages, pip + packages,
                             "Nodes without network cannot install packages: run eb where there is one, or remove "
                             "preset_venv_packages from the easyconfig")

    @staticmethod
    def run_or_fail(what, command, remedy):
        """Run a command; EasyBuildError with the end of what it printed and the remedy if it fails."""
        res = run_shell_cmd(command, fail_on_error=False, hidden=True)
        if res.exit_code != EasyBuildExit.SUCCESS:
            raise EasyBuildError("%s failed:\n%s\n%s", what, '\n'.join(res.output.strip().splitlines()[-15:]), remedy)

    # --- checks

    def container_problem(self):
        """Why no container can be run on this host, as a phrase; '' if one can."""
        res = run_shell_cmd(self.in_container + ' true', fail_on_error=False, hidden=True, in_dry_run=True)
        if res.exit_code == EasyBuildExit.SUCCESS:
            return ''
        output = res.output.strip()
        for regex, meaning in HOST_PROBLEMS:
            if re.search(regex, output, re.I):
                return "%s (%s)" % (meaning, output.splitlines()[-1])
        return "a container cannot be started:\n%s" % output

    def container_warning(self, text):
        """Warn, or fail where the easyconfig requires that containers run."""
        if self.cfg['container_checks'] == 'require':
            raise EasyBuildError("%s (container_checks is 'require')", text, exit_code=EasyBuildExit.FAIL_SANITY_CHECK)
        print_warning(text, log=self.log)

    def container_commands(self):
        """Commands that check the inside of the container."""
        run, python = self.in_container, self.cfg['container_python']
        commands = ['%s sh -c %s' % (run, shlex.quote('ls -d %s' % path))
                    for path in self.cfg['sanity_check_files_in_container']]
        if not python:
            return commands
        python = '%s %s' % (run, shlex.quote(python))
        check = "import sys; found = '%%d.%%d.%%d.' %% sys.version_info[:3]; found.startswith('%s.') or sys.exit(found)"
        commands.append('%s -c "%s"' % (python, check % (self.cfg['python_version'] or '3')))
        packages = ['%s==%s' % item for item in sorted(self.cfg['sanity_check_packages'].items())]
        if packages:
            command = os.path.join(self.installdir, 'bin', 'list-packages')
            commands.append(' '.join(shlex.quote(word) for word in [command] + packages))
        return commands + ['%s -c "import %s"' % (python, name) for name in self.cfg['sanity_check_imports']]

    def sanity_check_step(self, custom_paths=None, custom_commands=None, **kwargs):
        """Check the files beside the image, the image itself, and where containers run what is inside."""
        scripts = CONTAINER_SCRIPTS + sorted(CONTAINER_LINKS) + self.cfg['wrappers']
        paths = {
            # not the image: after 'rm $SIF' the central copy serves, and the module can be made again
            'files': ['container.conf', 'image.json'] + [os.path.join('bin', name) for name in scripts],
            'dirs': (custom_paths or {}).get('dirs', []),
        }
        paths['files'] += (custom_paths or {}).get('files', [])
        commands = ['bash -n %s' % shlex.quote(os.path.join(self.installdir, 'bin', name))
                    for name in CONTAINER_SCRIPTS]
        if self.dry_run:
            commands += self.container_commands()
        else:
            image = os.path.join(self.installdir, self.image_name)
            if os.path.exists(image):
                self.check_sif(image)
            problem = self.container_problem()
            if problem:
                self.container_warning("The inside of the image is not checked: %s. 'eb --sanity-check-only %s' checks "
                                       "it where containers run" % (problem, self.easyconfig_name()))
            else:
                commands += self.container_commands()
        super().sanity_check_step(custom_paths=paths, custom_commands=commands + (custom_commands or []), **kwargs)

    def make_module_step(self, fake=False):
        """Keep container.conf and the module file together, with --module-only too."""
        if not fake:
            self.finish_flush()
        if not fake and not self.dry_run and os.access(self.installdir, os.W_OK):
            self.write_container_conf()
        return super().make_module_step(fake=fake)

    def permissions_step(self):
        """Let the packages of the user stay changeable when the installation is made read-only."""
        super().permissions_step()
        packages = os.path.join(self.installdir, 'user-software')
        if build_option('read_only_installdir') and os.path.isdir(packages):
            adjust_permissions(self.installdir, stat.S_IWUSR, recursive=False)
            adjust_permissions(packages, stat.S_IWUSR, recursive=True, ignore_errors=True)
