# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild support for container images (SIF) behind a module, run by Apptainer or Singularity, as an easyblock."""
import glob
import json
import os
import re
import shlex
import socket
import stat

from easybuild.easyblocks.generic.runscripts import RunScripts
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit
from easybuild.tools.config import build_option, source_paths, update_build_option
from easybuild.tools.filetools import (
    adjust_permissions, convert_name, copy_file, mkdir, read_file, remove, remove_dir, remove_file, symlink, write_file)
from slingtorch.install.container_image import (
    check_digest, check_sif, explain_error, removed_on_error, transfer_image)
from slingtorch.install.container_module import module_text
from slingtorch.install.container_runtime import (
    HOST_PROBLEMS, build_image, definition_of, meaning, pull_image, runtime_directories)
from slingtorch.install.dependencies import last_lines, run, with_parameters
from slingtorch.lockfile import sha256

# commands beside an image (runscripts/container of the bundle), and those that are links to them
CONTAINER_SCRIPTS = ['check-container', 'in-container', 'list-packages', 'make-squashfs']
CONTAINER_LINKS = {'start-shell': 'in-container', 'unmake-squashfs': 'make-squashfs'}
# runscripts that start Python: called outside, they run in the container, to use its Python
RUNSCRIPT_LINKS = ['conda-python-distributed', 'conda-python-simple']

# commands that must stay those of the host, because a wrapper of that name would come first in $PATH
NOT_WRAPPED = ['apptainer', 'bash', 'env', 'sh', 'singularity']

CHOICES = {'gpu_driver': [None, 'nv', 'rocm'],
           'image_transfer': ['copy', 'symlink']}
PINNED_REGEX = re.compile(r'[@:.]sha256[:.](?P<digest>[0-9a-f]{64})$')

# a site's kind of GPUs for each gpu_driver
GPUS = {'nv': 'cuda', 'rocm': 'rocm'}

# files and directories that a rebuild does not touch (runscripts/container/make-squashfs)
USER_SOFTWARE = ['user-software', 'user-software.squashfs', '.user-software.lock', '.user-software.new',
                 '.user-software.old']

# what 'module help' prints besides the description
USAGE = """
Commands that run in the container: %s; in-container COMMAND runs any other one, start-shell starts a shell.
Packages: list-packages; pip install (if the module has an environment for yours); make-squashfs, unmake-squashfs.
The image is $SIF: singularity exec $SIF COMMAND. Scripts for jobs are in /runscripts inside, in $RUNSCRIPTS outside."""


class Singularity(RunScripts):
    """
    Installs a container image (SIF) behind a module: from the source path, from a registry, or built from a definition.

    The image is read once: its sha256 is computed while it is copied to a hidden name in the installation directory.
    This happens in the checksum step, before an old installation is touched, so a rebuild that fails there changes
    nothing. The image gets its real name when it is complete, verified and on the disk.

    Beside the image are the runscripts (/runscripts inside), commands that run in the container ('wrappers'), and the
    directory user-software for the user's own packages (/user-software inside), which a rebuild keeps.
    If there is a container runtime, the sanity check also runs inside the container.
    """

    # the user's packages stay in the directory, and the image is replaced when the new one is complete
    sets_aside = False

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters of Singularity."""
        return with_parameters(RunScripts.extra_options(extra_vars), {
            'bind_paths': [[], "Host paths to mount if they exist: 'PATH' or 'PATH:PATH_INSIDE[:ro]'"],
            'bind_paths_excluded': [[], "Host paths in bind_paths to skip, such as a library that the image has"],
            'build_options': [[], "Options for '{singularity,apptainer} build', for example ['--fakeroot']"],
            'central_image_dirs': [[], "Directories of the site with images, used if the installation's own copy is "
                                       "missing: by eb, and whenever the module is loaded"],
            'container_environment': [{}, "Environment variables inside the container: {name: value}"],
            'container_path': [[], "Directories inside the container to put first in its $PATH, after /runscripts"],
            'container_python': ['python', "Python command in the container; None: the image has no Python"],
            'gpu_driver': [None, "Driver libraries of the host to use in containers if they exist: 'nv' (--nv), or "
                                 "'rocm' (--rocm, for an image without ROCm)"],
            'image_address': [None, "Address in a registry, instead of 'sources', pinned by digest: docker://NAME or "
                                    "NAME:TAG, then @sha256:...; the same for oras://; library://NAME:sha256...."],
            'image_transfer': ['copy', "How to get an image from the source path into the installation directory: copy "
                                       "or symlink"],
            'preset_venv': [None, "Name of a virtual environment for the user's own packages: eb makes it as "
                                  "/user-software/venv/<name>, on top of the packages of the image"],
            'python_version': [None, "Version that Python in the container must have, for example '3.10'"],
            'sanity_check_files_in_container': [[], "Files that must exist inside the container; may have wildcards"],
            'sanity_check_imports': [[], "Names of Python modules that must be importable in the container"],
            'sanity_check_packages': [{}, "Versions of Python packages in the container: {distribution: version}; a "
                                          "local version label (+rocm5.6) may be omitted"],
            'site_gpu': [None, "GPUs of this machine's site: cuda, rocm, none or any (set by the hooks)"],
            'wrappers': [['python', 'python3', 'pip', 'torchrun'], "Names of commands in the container that also get "
                         "a command outside, which the module adds to $PATH"],
        })

    def __init__(self, *args, **kwargs):
        """Initialise; the image is found later."""
        super().__init__(*args, **kwargs)
        self.image_checksum = None  # of an image from a registry
        self.image_facts = {}  # the future content of image.json
        if not self.cfg['usage']:
            self.cfg['usage'] = USAGE % ', '.join(self.cfg['wrappers'] or ['none'])
        # the module needs no variables for compiling, since nothing is linked with an image
        for variable in ['CMAKE_LIBRARY_PATH', 'CMAKE_PREFIX_PATH', 'CPATH', 'LD_LIBRARY_PATH', 'LIBRARY_PATH',
                         'XDG_DATA_DIRS']:
            self.module_load_environment.remove(variable)

    # --- names

    @property
    def first_source(self):
        """Name of the first source, '' if there is none."""
        source = (self.cfg['sources'] or [''])[0]
        return source['filename'] if isinstance(source, dict) else source

    @property
    def image_name(self):
        """File name of the image."""
        if self.first_source.endswith('.sif'):
            return self.first_source
        return '%s-%s%s.sif' % (self.name.lower(), self.version, self.cfg['versionsuffix'])

    @property
    def unfinished(self):
        """Hidden name of the image until it is complete: in the installation directory, different for each process."""
        return os.path.join(self.installdir, '.%s.part-%s-%d' % (self.image_name, socket.gethostname(), os.getpid()))

    @property
    def venv_inside(self):
        """Path of preset_venv in the container, '' if there is none."""
        return '/user-software/venv/%s' % self.cfg['preset_venv'] if self.cfg['preset_venv'] else ''

    def inside(self, *words, **options):
        """Run a command in the container; its result."""
        return run(os.path.join(self.installdir, 'bin', 'in-container'), *words, **options)

    def scripts(self):
        """The scripts to install: the runscripts, and the commands of the container."""
        return dict(super().scripts(), **{'bin/' + name: 'container/' + name for name in CONTAINER_SCRIPTS})

    def container(self):
        """The settings of the container, as lists of strings, for the module file and for container.conf, with which
        commands work without the module."""
        for bind in self.cfg['bind_paths']:
            # the runtime splits at commas and colons
            if not re.match(r'^/[^,:\n"]*(:/[^,:\n"]*(:[a-z]+)?)?$', bind):
                raise EasyBuildError("Easyconfig parameter bind_paths has '%s', but must have an absolute path, or two "
                                     "separated by a colon, without commas or other colons. To mount such a path, use "
                                     "a symbolic link with another name", bind)
        # packages in ~/.local would hide those of the image
        environment = {'PYTHONNOUSERSITE': '1'}
        if self.venv_inside:
            environment['VIRTUAL_ENV'] = self.venv_inside
        environment.update(self.cfg['container_environment'])
        return {
            'image': [self.image_name],
            'easyconfig': [self.cfg.filename()],
            'python': [self.cfg['container_python'] or ''],
            'central': list(self.cfg['central_image_dirs']),
            'bind': [bind for bind in self.cfg['bind_paths']
                     if bind.split(':')[0] not in self.cfg['bind_paths_excluded']],
            'path': ['/runscripts'] + [self.venv_inside + '/bin'] * bool(self.venv_inside)
            + list(self.cfg['container_path']),
            'env': ['%s=%s' % item for item in sorted(environment.items())],
            'gpu': [self.cfg['gpu_driver'].upper()] if self.cfg['gpu_driver'] else [],
        }

    # --- fetching

    def check_parameters(self):
        """Check the easyconfig parameters before doing any work."""
        for name in CHOICES:
            if self.cfg[name] not in CHOICES[name]:
                raise EasyBuildError("%s is '%s', but must be one of %s", name, self.cfg[name],
                                     ', '.join(map(str, CHOICES[name])))
        for name, value in self.cfg['container_environment'].items():
            # name and value become Lua, Tcl and bash code
            if not re.match(r'[A-Za-z_][A-Za-z0-9_]*\Z', str(name)):
                raise EasyBuildError("container_environment has '%s', which is not the name of a variable (letters, "
                                     "digits and _, no digit first)", name)
            if re.search(r'[\x00-\x1f\x7f]', str(value)):
                raise EasyBuildError("container_environment: the value of %s has a control character (%r), but "
                                     "variables of a module must have one line", name, value)
        own = CONTAINER_SCRIPTS + sorted(CONTAINER_LINKS) + NOT_WRAPPED
        address, source, venv = self.cfg['image_address'], self.first_source, self.cfg['preset_venv']
        gpu, here = GPUS.get(self.cfg['gpu_driver']), self.cfg['site_gpu']
        problems = [
            (re.search(r'[,:$"\n]', self.installdir),
             "The installation directory is %s, but containers cannot mount a path that has a comma, a colon, a quote "
             "or a dollar. Install elsewhere: --prefix or --installpath" % self.installdir),
            (venv and not re.match(r'^[\w.-]*\w$', venv),
             "preset_venv is '%s', but must be a name of letters, digits, '.', '-' and '_'" % venv),
            (venv and not self.cfg['container_python'],
             "preset_venv is '%s', but container_python is None: an environment needs Python" % venv),
            (bool(address) == bool(source),
             "The image must come from one place: name a SIF or a definition file as the first of 'sources', or a "
             "registry in 'image_address', but not %s" % ('both' if address else 'neither')),
            (source and not source.endswith(('.sif', '.def')),
             "The first source is %s, but must be an image (.sif) or a definition file (.def)" % source),
            (address and not re.match(r'^(docker|oras|library)://\S+$', address), "Easyconfig parameter image_address "
             "is '%s', but must start with docker://, oras:// or library://" % address),
            (gpu and here in GPUS.values() and gpu != here,
             "The image is for GPUs with %s (gpu_driver = '%s'), but this site's have %s. Use an image for these; to "
             "use this one without GPUs, copy the easyconfig and remove gpu_driver"
             % (gpu, self.cfg['gpu_driver'], here)),
        ]
        problems += [(name in own or not re.match(r'^[\w.+-]+$', name), "Easyconfig parameter wrappers has '%s', but "
                      "must have names of commands other than %s" % (name, ', '.join(own)))
                     for name in self.cfg['wrappers']]
        for wrong, text in problems:
            if wrong:
                raise EasyBuildError('%s', text)
        self.container()

    def obtain_file_raise_on_failure(self, filename, *args, **kwargs):
        """Search for an image also in the site's central directories; if there is none, explain where to get it."""
        find = super().obtain_file_raise_on_failure
        if not filename.endswith('.sif') or kwargs.get('no_download') or kwargs.get('force_download') or self.dry_run:
            return find(filename, *args, **kwargs)
        own = find(filename, no_download=True, warning_only=True, alt_location=kwargs.get('alt_location'))
        central = [os.path.join(path, filename) for path in self.cfg['central_image_dirs']]
        found = [path for path in [own] + central if path and os.path.lexists(path)]
        for path in found:
            if os.path.isfile(path) and os.access(path, os.R_OK):
                if path != own:
                    self.say("using the image %s", path)
                return path
        if not found and (self.cfg['source_urls'] or kwargs.get('urls')):
            return find(filename, *args, **kwargs)
        raise EasyBuildError("The image %s %s.\nSearched: %s.\n%s\nRemedy: put the image, or a link to it, into a "
                             "directory, and add that: --sourcepath=DIRECTORY:%s", filename,
                             "cannot be read; ask its owner for read permission: " + ', '.join(found) if found
                             else "was not found",
                             ', '.join(source_paths() + self.cfg['central_image_dirs']),
                             (self.cfg['download_instructions'] or '').strip(), ':'.join(source_paths()),
                             exit_code=EasyBuildExit.MISSING_SOURCES)

    def get_checksums_from_json(self, *args, **kwargs):
        """Read checksums.json, but not in a dry run, where EasyBuild 5.4 reads it even if it does not exist."""
        return {} if self.dry_run else super().get_checksums_from_json(*args, **kwargs)

    def fetch_step(self, *args, **kwargs):
        """Check the easyconfig parameters, and find sources and scripts; with --fetch, pull to the source path."""
        self.check_parameters()
        # skip checksums: EasyBuild would read an image of 10 GB once more
        super().fetch_step(skip_checksums=True)

        address = self.cfg['image_address']
        if self.dry_run and address:
            self.dry_run_msg("  * %s will be pulled from %s", self.image_name, address)
        elif address:
            self.image_checksum = self.get_checksum_for(self.cfg['checksums'], filename=self.image_name, index=0)
            pinned = PINNED_REGEX.search(address)
            # in the source path, with the start of its digest in the name, which distinguishes it from other images
            name = '%s-%s.sif' % (re.sub(r'\.sif$', '', self.image_name), pinned['digest'][:12] if pinned else 'DIGEST')
            path = self.obtain_file(name, no_download=True, warning_only=True)
            if not path and self.cfg['stop'] == 'fetch':
                path = os.path.join(source_paths()[0], self.name.lower()[0], self.name, name)
                self.check_pinned()
                mkdir(os.path.dirname(path), parents=True)
                part = '%s.part-%d' % (path, os.getpid())
                with removed_on_error(part):
                    self.pull(part)
                    os.rename(part, path)
            if path:
                self.src.insert(0, {'name': name, 'path': path, 'checksum': self.image_checksum, 'cmd': None,
                                    'finalpath': self.builddir})

    def check_pinned(self):
        """Refuse an address without a digest; only when it is needed, so that such an easyconfig can be inspected."""
        address = self.cfg['image_address']
        if not PINNED_REGEX.search(address):
            raise EasyBuildError("Easyconfig parameter image_address is '%s': a tag can mean another image tomorrow, "
                                 "so it must end in a digest: @sha256:... (library:// :sha256....).\nTo get it: "
                                 "skopeo inspect --format '{{.Digest}}' %s\nRegistries also show it on their web "
                                 "pages. Then run: eb %s --try-amend=image_address=%s@sha256:...", address,
                                 re.sub('^oras:', 'docker:', address), self.cfg.filename(), address,
                                 exit_code=EasyBuildExit.MISSING_SOURCES)

    def pull(self, path):
        """Pull the image from its registry to a file."""
        address, directories = self.cfg['image_address'], runtime_directories()
        self.say("pulling %s (the download stays in %s)...", address, directories['CACHEDIR'] or
                 "your home directory; to change that: export APPTAINER_CACHEDIR=DIRECTORY")
        # the runtime accepts a digest only without a tag
        pull_image(re.sub(r':[\w.-]+@', '@', address), path, directories)
        check_sif(path)

    def checksum_step(self):
        """Verify the checksums; that of the image while it is copied to its hidden name, so that it is read once."""
        image = self.src[0] if self.src and self.src[0]['path'].endswith('.sif') else None
        if self.dry_run or self.cfg['stop'] == 'fetch':
            if image and not self.dry_run:
                check_sif(image['path'])
            super().checksum_step()
            return
        sources, self.src = self.src, self.src[bool(image):]
        try:
            super().checksum_step()
        finally:
            self.src = sources
        if image:
            self.stage_image(self.cfg['image_transfer'], image['path'], image['checksum'])
        elif self.cfg['image_address']:
            self.check_pinned()
            self.stage_image('pull', self.cfg['image_address'], self.image_checksum)

    def stage_image(self, transfer, origin, checksum=None):
        """Bring the image to its hidden name, verified and on disk; transfer: 'pull', 'build' or for transfer_image."""
        target = self.unfinished
        pattern = os.path.join(glob.escape(self.installdir), '.%s.part-*' % glob.escape(self.image_name))
        for path in glob.glob(pattern):
            self.say("removing %s, left by a killed installation", path)
            remove(path)
        mkdir(self.installdir, parents=True)
        with removed_on_error(target):
            try:
                if transfer == 'pull':
                    self.pull(target)
                elif transfer == 'build':
                    build_image(self.first_source, self.cfg['build_options'], target, self.builddir,
                                runtime_directories())
                else:
                    check_sif(origin)
                if self.dry_run:
                    return
                if transfer in CHOICES['image_transfer']:
                    digest = transfer_image(transfer, origin, target)
                else:
                    digest = sha256(target)
                with open(target, 'rb') as stream:
                    os.fsync(stream.fileno())  # a file system may report only now that it is full
            except OSError as err:
                raise explain_error(err, origin, self.installdir)
            check_digest(origin, checksum, digest)
            origin = self.cfg['image_address'] or origin
            if origin.startswith('library://') and PINNED_REGEX.search(origin)['digest'] != digest:
                raise EasyBuildError("The image from %s has the wrong sha256 %s. Do not use it", origin, digest,
                                     exit_code=EasyBuildExit.FAIL_CHECKSUM)
        self.image_facts = {'file': self.image_name, 'sha256': digest, 'size': os.path.getsize(target),
                            'origin': origin, 'transfer': transfer}

    # --- steps

    def extract_step(self):
        """Unpack nothing; copy only what a definition file needs to the build directory."""
        if self.first_source.endswith('.def'):
            for src in self.src:
                copy_file(src['path'], os.path.join(self.builddir, src['name']))

    def configure_step(self):
        """Nothing to configure."""

    def build_step(self):
        """Build the image if the source is a definition file."""
        if self.first_source.endswith('.def'):
            self.stage_image('build', self.src[0]['path'])

    def make_installdir(self, dontcreate=None):
        """Remove an old installation, except the user's packages and the new image."""
        untouched = self.dry_run or self.module_only or self.cfg['keeppreviousinstall']
        if untouched or not os.path.isdir(self.installdir):
            super().make_installdir(dontcreate=dontcreate)
            return
        for name in os.listdir(self.installdir):
            path = os.path.join(self.installdir, name)
            if name in ['user-software', 'user-software.squashfs']:
                self.say("keeping %s", path)
            elif name not in USER_SOFTWARE and path != self.unfinished:
                remove(path)

    def install_step(self):
        """Give the image its name, and record its facts."""
        if self.dry_run:
            self.dry_run_msg("  * image %s will be put into %s", self.image_name, self.installdir)
            return
        target = os.path.join(self.installdir, self.image_name)
        os.rename(self.unfinished, target)
        write_file(os.path.join(self.installdir, 'image.json'),
                   json.dumps(self.image_facts, indent=4, sort_keys=True) + '\n')
        write_file(target + '.sha256', '%s  %s\n' % (self.image_facts['sha256'], self.image_name))
        self.say("image %s, sha256 %s", self.image_name, self.image_facts['sha256'])

        # the definition file that it was built from, else the definition inside it
        directory = os.path.join(self.installdir, 'share', 'docker-defs')
        paths = [src['path'] for src in self.src if src['name'].endswith('.def')]
        for path in paths:
            copy_file(path, os.path.join(directory, os.path.basename(path)))
        try:
            definition = None if paths else definition_of(target)
        except EasyBuildError as err:
            self.warn("share/docker-defs is not created: %s" % err)
            return
        if definition:
            write_file(os.path.join(directory, re.sub(r'\.sif$', '', self.image_name) + '.def'), definition)

    def post_processing_step(self):
        """Install the commands, then make the user's virtual environment."""
        super().post_processing_step()
        if self.dry_run:
            return
        packages = os.path.join(self.installdir, 'user-software')
        if not os.path.lexists(packages):
            mkdir(packages)
        if self.cfg['preset_venv']:
            self.make_preset_venv(packages)

    def links(self):
        """Links in bin/: {name: name of the script}."""
        inside = list(self.cfg['wrappers']) + RUNSCRIPT_LINKS
        return dict(CONTAINER_LINKS, **dict.fromkeys(inside, 'in-container'))

    def write_scripts(self, directory):
        """Write the scripts, links to them, and the settings of the module file for them."""
        super().write_scripts(directory)
        for name, target in self.links().items():
            symlink(target, os.path.join(directory, 'bin', name), use_abspath_source=False)
        lines = ["# read by bin/in-container; made by EasyBuild together with the module file"]
        # without 'central', because only the module decides which image to use
        lines += ['%s=%s' % (key, value) for key, values in self.container().items() if key != 'central'
                  for value in values]
        write_file(os.path.join(directory, 'container.conf'), '\n'.join(lines) + '\n')

    # --- the virtual environment for the user's own packages

    def make_preset_venv(self, packages):
        """Make the virtual environment in the directory of the user's packages, unless it exists."""
        name, path = self.cfg['preset_venv'], self.installdir + self.venv_inside
        unfinished = path + '.unfinished'
        problem = self.container_problem('true')
        if os.path.exists(unfinished) and not problem:
            # an earlier installation was interrupted while making it, so the user has nothing in it yet
            remove_dir(path)
        if os.path.lexists(path) or os.path.exists(packages + '.squashfs'):
            renew = "To make it again: move %s away (also a .squashfs beside it), then run 'eb --rebuild %s'" % (
                packages, self.cfg.filename())
            if not problem and self.container_problem(self.venv_inside + '/bin/python', '-c', 'pass'):
                self.warn("The virtual environment %s was kept, but does not work with this image (does it have "
                          "another Python?). %s" % (path, renew))
            return
        if problem:
            self.warn("The virtual environment %s is not made: %s. Run 'eb --rebuild %s' on a node where "
                      "containers run" % (name, problem, self.cfg.filename()))
            return
        self.say("making the virtual environment %s...", name)
        mkdir(os.path.dirname(path), parents=True)
        write_file(unfinished, '')
        python = self.cfg['container_python']
        # if the image's Python is in an environment, venv only shows the packages of that environment's base Python
        program = 'import sys, sysconfig; sys.prefix == sys.base_prefix or print(sysconfig.get_path("purelib"))'
        packages_of_image = self.inside(python, '-c', program, split_stderr=True).output.strip()
        with removed_on_error(path):  # else the next attempt would keep it as the user's own
            res = self.inside(python, '-m', 'venv', '--system-site-packages', self.venv_inside)
            if res.exit_code:
                raise EasyBuildError("Making the virtual environment %s failed:\n%s\nIf the disk is not full: the "
                                     "image may have no '%s' or no venv for it. Then set container_python, or "
                                     "preset_venv = None", name, last_lines(res.output), python)
            for directory in glob.glob(os.path.join(glob.escape(path), 'lib/python3*/site-packages')):
                if packages_of_image.startswith('/'):
                    write_file(os.path.join(directory, 'image.pth'), packages_of_image + '\n')
        remove_file(unfinished)

    # --- checks, with the commands that users call

    def container_problem(self, *command):
        """A phrase: why a command (its words) cannot run in the container on this host; '' if it can."""
        res = self.inside(*command)
        if not res.exit_code:
            return ''
        known = meaning(res.output, HOST_PROBLEMS)
        return ("%s (%s)" % (known, last_lines(res.output).splitlines()[-1]) if known
                else "a container cannot be started:\n%s" % last_lines(res.output))

    def container_commands(self):
        """Commands that check the inside of the container."""
        commands = [['in-container', 'sh', '-c', 'ls -d ' + path]
                    for path in self.cfg['sanity_check_files_in_container']]
        python = self.cfg['container_python']
        if python:
            programs = ['import sys; found = "%%d.%%d.%%d." %% sys.version_info[:3]; found.startswith("%s.") or '
                        'sys.exit(found)' % (self.cfg['python_version'] or '3')]
            programs += ['import ' + name for name in self.cfg['sanity_check_imports']]
            commands += [['in-container', python, '-c', program] for program in programs]
            packages = ['%s==%s' % item for item in sorted(self.cfg['sanity_check_packages'].items())]
            if packages:
                commands.append(['list-packages'] + packages)
        return [' '.join(shlex.quote(word) for word in [os.path.join(self.installdir, 'bin', name)] + words)
                for name, *words in commands]

    def sanity_check_step(self, *args, **kwargs):
        """Check the files beside the image, the image itself, and its contents if containers can run."""
        paths = {
            # not the image: after 'rm $SIF' the module uses the central copy, and 'eb --module-only' must still work
            'files': ['container.conf', 'image.json'] + ['bin/' + name for name in self.links()], 'dirs': [],
        }
        image = os.path.join(self.installdir, self.image_name)
        if os.path.exists(image) and not self.dry_run:
            check_sif(image)
        problem = '' if self.dry_run else self.container_problem('true')
        commands = [] if problem else self.container_commands()
        if problem:
            self.warn("The inside of the image is not checked: %s. Run 'eb --sanity-check-only %s' on a node "
                      "where containers run" % (problem, self.cfg.filename()))
        super().sanity_check_step(*args, custom_paths=paths, custom_commands=commands, **kwargs)

    # --- the module

    def make_module_extra(self, *args, **kwargs):
        """Set the variables of the container (docs/easyconfigs.md has the list)."""
        txt = super().make_module_extra(*args, **kwargs)
        record = os.path.join(self.installdir, 'image.json')
        if os.path.exists(record):
            txt += self.module_generator.comment('%(file)s: %(size)d bytes, sha256 %(sha256)s'
                                                 % json.loads(read_file(record)))
        return txt + module_text(self.container(), self.installdir, 'SIF' + convert_name(self.name, upper=True),
                                 self.full_mod_name, self.module_generator)

    def make_module_step(self, fake=False):
        """Make the module even if there is no image yet."""
        if fake or self.dry_run or os.path.exists(os.path.join(self.installdir, self.image_name)):
            return super().make_module_step(fake=fake)
        # 'eb --module-only --force': to make the devel module, eb would have to load this module
        self.warn("The image %s does not exist: the module can be loaded only with a central copy, or after 'eb "
                  "--rebuild %s'" % (self.image_name, self.cfg.filename()))
        wanted = update_build_option('generate_devel_module', False)
        try:
            return super().make_module_step(fake=fake)
        finally:
            update_build_option('generate_devel_module', wanted)

    def close_log(self):
        """Keep the user's packages and their directory writable, even if the installation is read-only.

        Not in the permissions step: after all steps, a rebuild is made read-only once more (build_and_install_one in
        easybuild/framework/easyblock.py), and only then is its log closed.
        """
        packages = os.path.join(self.installdir, 'user-software')
        if build_option('read_only_installdir') and self.image_facts and os.path.isdir(packages):
            adjust_permissions(self.installdir, stat.S_IWUSR, recursive=False)
            adjust_permissions(packages, stat.S_IWUSR, recursive=True, ignore_errors=True)
        super().close_log()
