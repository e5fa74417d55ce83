# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild support for virtual environments made from a lock file with hashes, implemented as an easyblock."""
import functools
import glob
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request

from easybuild.easyblocks.generic.runscripts import RunScripts, wants_checksums_only
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit
from easybuild.tools.config import build_option, source_paths
from easybuild.tools.filetools import convert_name, copy_file, mkdir, read_file, remove_dir, which, write_file
from easybuild.tools.hooks import FETCH_STEP
from easybuild.tools.modules import get_software_root
from slingtorch.install.dependencies import dependency_root, modules_loaded, run, software_of, with_parameters
from slingtorch.install.environment_image import IMAGE, make_image, require_mksquashfs
from slingtorch.install.nccl import PLUGIN_NAMES
from slingtorch.install.process import check_wheel, describe_libraries, probe_pytorch
from slingtorch.lockfile import (
    PROXY_PROBLEM, default_index, find_uv, lock, machine_at_hand, normalised, pinned, pip_settings,
    problem_of, read_head, recipe_of, uv_environment, wheel_dir)

# lines of a requirements file with a package index, and lines with any address that pip would contact
INDEX_REGEX = re.compile(r'^\s*(--(?:extra-)?index-url|-i)[\s=]+(\S+)', re.M)
ADDRESS_REGEX = re.compile(r'^\s*(--(extra-)?index-url|-i|--find-links|-f|--trusted-host)\b')

# time limit for connecting to one address of a package index (seconds)
INDEX_TIMEOUT = 2

# For commands that need no network: a 'user = true' or 'target' in somebody's pip.conf must not send packages
# elsewhere. pip's option --isolated ignores the PIP_* variables and the user's file, but not the file in
# $PIP_CONFIG_FILE.
WITHOUT_PIP_CONFIG = ['env', 'PIP_CONFIG_FILE=' + os.devnull]

# Do not compile the tests of packages (PyTorch's are in torch/testing/_internal), which would take a third of the time:
# no job imports them.
NOT_COMPILED = '/(tests?|testing/_internal|benchmarks)/'

# words in the output of pip or uv, and the remedy; the first two are not problems of an index
PIP_PROBLEMS = [
    ('No space left on device|Errno 28|Disk quota exceeded|Errno 122|os error (28|122)',
     "Free some space there or in the directory for temporary files, or choose another directory with --prefix, "
     "--sourcepath or --tmpdir; then run the same command again"),
    ('Permission denied',
     "You have no permission for the file in the last line above: ask its owner for access (chmod a+rX), or use other "
     "directories with --sourcepath"),
    # pip 26.3 (pip/_internal/exceptions/network.py); pip 23 keeps the partial file and then reports the hash (seen)
    ('not enough bytes were received|incomplete-download|IncompleteRead|Connection broken',
     "The download was interrupted, and the partial file is not kept: 'eb --fetch' downloads it again"),
    ('DO NOT MATCH THE HASHES|Hash mismatch',
     "If the file was truncated or changed, do not install it; 'eb --fetch' downloads it again. If the lock file has "
     "no hash for this platform's wheel, compare the hash that was found with the publisher's, add it to the entry of "
     "the package (' --hash=sha256:...'), and put the new checksum of the lock file into the easyconfig (eb "
     "--inject-checksums --force)"),
    # uv 0.13 also prints 'No solution found' (seen)
    ('invalid package format|Failed to read from zip file',
     "The file of this package in the source path is truncated or damaged: 'eb --fetch' downloads it again"),
    ('versions pinned|Hashes are required|--require-hashes`? mode|Hash-checking is required',
     "The lock file is incomplete: every package, including the dependencies of others, needs an entry "
     "'name==version --hash=sha256:...'"),
    PROXY_PROBLEM,
    ('No matching distribution|No solution found',
     "Either no index that pip reaches has this package ('pip config list' shows the indexes; set $PIP_INDEX_URL to "
     "use a mirror; without network, run 'eb --fetch' elsewhere and copy the source path), or it has no wheel for this "
     "Python and platform, and the lock file needs another version"),
]


@functools.lru_cache(maxsize=None)
def python_version(python):
    """Version of a Python, major.minor."""
    code = 'import sys; print("%s.%s" % sys.version_info[:2])'
    return run(python, '-c', code, in_dry_run=True).output.strip()


class PythonVenv(RunScripts):
    """Installs a Python virtual environment whose packages come from a lock file with hashes.

    The first source is the lock file: a requirements file for 'pip install --require-hashes', with version and sha256
    of every package; it may have extra index addresses. It is beside the easyconfig, which has its checksum.

    The fetch step downloads every package through pip's own configuration (mirrors, proxies, certificates) to the
    directory 'wheels' of the software in EasyBuild's source path; it contacts no index for packages that are present.
    The install step needs no network, and verifies every hash. It uses uv if available, else pip.

    If there is no lock file yet, the fetch step makes one in the source path ('slingtorch lock').

    The Python is that of the dependencies' modules, else the first 'python_command' in $PATH.

    Only wheels are installed: a source distribution runs foreign code at install time that no hash covers.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters of PythonVenv."""
        return with_parameters(RunScripts.extra_options(extra_vars), {
            'byte_compile': [True, "Compile all packages. False: Python compiles what is imported, and keeps that only "
                                   "if its user may write to the installation"],
            'environment_image': [False, "Also make a squashfs image of it, for nodes to copy (docs/runscripts.md)"],
            'extra_packages': [[], "A user's own packages, in addition to python_packages"],
            'index_urls': [[], "Package indexes for 'slingtorch lock', in addition to those of pip's configuration"],
            'python_command': ['python3', "Python that makes the environment: a command in $PATH or a full path. "
                                          "Not used if a dependency is called Python"],
            'python_packages': [[], "Packages for 'slingtorch lock', in pip's form; empty if you make the lock file"],
            'python_versions': [[], "Versions of Python (major.minor) that have wheels; empty: do not check"],
            'sanity_check_imports': [[], "Names of Python modules that must be importable"],
            'sanity_check_packages': [{}, "Versions that must be installed: {distribution: version}"],
            'system_site_packages': [False, "Let the environment see the packages of its base Python"],
            'wheel_platform': ['manylinux_2_28_x86_64', "Newest platform of the wheels, in pip's form; it needs that "
                                                        "glibc or a newer one. May be a list"],
        })

    def __init__(self, *args, **kwargs):
        """Initialise; paths are known only after the lock file is fetched."""
        super().__init__(*args, **kwargs)
        self.lock_file = None
        # extensions are built from source into the environment
        self.cfg['exts_defaultclass'] = self.cfg['exts_defaultclass'] or 'EnvironmentPackage'
        # the module needs no variables for compiling, since nothing is linked with an environment
        for variable in ['CMAKE_PREFIX_PATH', 'CPATH', 'LD_LIBRARY_PATH', 'LIBRARY_PATH']:
            self.module_load_environment.remove(variable)

    def scripts(self):
        """The runscripts, and the command that puts a user's own environment on top of this one."""
        return dict(super().scripts(), **{'bin/extend-venv-activate': 'extend-venv-activate'})

    def fetch_step(self, skip_checksums=False):
        """Find or make the lock file, then download the packages in it."""
        # obtain_file() searches beside the easyconfig, but --try-amend writes a copy elsewhere
        self.robot_path = [os.path.dirname(path) for path in self.named_easyconfigs()] + (self.robot_path or [])
        if self.cfg['sources'] and not self.dry_run:
            self.need_lock_file(self.cfg['sources'][0], wants_checksums_only(skip_checksums))
        super().fetch_step(skip_checksums)

        if not self.src:
            raise EasyBuildError("The easyconfig names no lock file, but PythonVenv needs one (eb can make it): add "
                                 "sources = ['%s']", '%(name)s-%(version)s%(versionsuffix)s.lock')
        self.lock_file = self.src[0]['path']

        if self.dry_run:
            self.dry_run_msg("  * packages named in %s will be downloaded with pip to %s",
                             self.lock_file, self.wheel_dirs()[0])
        elif not wants_checksums_only(skip_checksums):
            # pip chooses wheels for the Python that runs it
            with modules_loaded(self):
                self.download_wheels(self.find_python())

    def named_easyconfigs(self):
        """Full paths of the easyconfigs on the command line, if this one was amended ('eb --try-amend')."""
        # EasyBuild does not record the original file of an amended easyconfig
        if 'tweaked_easyconfigs' not in self.cfg.path.split(os.sep):
            return []
        return [os.path.abspath(path) for path in sys.argv[1:] if path.endswith('.eb') and os.path.isfile(path)]

    def need_lock_file(self, name, for_checksums):
        """Ensure that there is a lock file; warn if it has no checksum; for_checksums: eb only injects checksums."""
        path = self.obtain_file(name, no_download=True, warning_only=True)
        checksum = self.get_checksum_for(self.cfg['checksums'], filename=name, index=0)
        easyconfig = shlex.quote((self.named_easyconfigs() or [self.cfg.path])[0])
        if path:
            self.lock_file = path
            if not checksum and not for_checksums and not self.is_own_lock_file():
                self.warn("The easyconfig has no checksum for %s, so a changed lock file would not be noticed. To "
                          "add it: eb --inject-checksums=sha256 --force %s", path, easyconfig)
        elif not self.cfg['python_packages']:
            # EasyBuild's own message lists the directories that it has searched
            return
        elif build_option('enforce_checksums'):
            raise EasyBuildError("Missing checksum for %s, which does not exist; with --enforce-checksums, eb does not "
                                 "make it. To make it and its checksum: slingtorch lock %s; "
                                 "eb --inject-checksums=sha256 --force %s", name, easyconfig, easyconfig,
                                 exit_code=EasyBuildExit.FAIL_CHECKSUM)
        elif checksum or for_checksums:
            raise EasyBuildError("The lock file %s with the sha256 of every package does not exist%s. To make it on a "
                                 "machine that reaches the package indexes (%s): slingtorch lock %s", name,
                                 ", but the easyconfig has a checksum for it" if checksum else '',
                                 ', '.join(["those of pip's configuration"] + self.cfg['index_urls']), easyconfig)
        else:
            with modules_loaded(self):
                self.make_lock_file(name)

    def is_own_lock_file(self):
        """Whether the lock file is in a source path, where an earlier eb has made it."""
        return any(self.lock_file.startswith(os.path.abspath(path) + os.sep) for path in source_paths())

    def make_lock_file(self, name):
        """Make the lock file in the source path, and print what is in it."""
        path = os.path.join(os.path.dirname(self.wheel_dirs()[0]), name)
        self.say("there is no lock file %s yet: resolving packages...", name)
        python, recipe = self.find_python(), recipe_of(self.cfg)
        mkdir(os.path.dirname(path), parents=True)
        try:
            lock(recipe, os.path.basename(self.cfg.path), path, self.python_with_pip(python, tempfile.mkdtemp()),
                 self.log.info)
        except RuntimeError as err:
            raise EasyBuildError("The lock file %s does not exist and could not be made:\n%s", name, err)
        text = read_file(path)
        pins = re.findall(r'^([\w.-]+==[^\s;]+)', text, re.M)
        wanted = [re.split(r'[^\w.-]', word)[0] for word in recipe['wanted']]
        shown = [pin for pin in pins if pin.split('==')[0] in [normalised(word) for word in wanted]]
        more = " and %d more" % (len(pins) - len(shown)) if len(pins) > len(shown) else ''
        self.say("pinned %s%s, for Python %s, in %s. The next installation is the same; remove this file to renew",
                 ', '.join(shown), more, ', '.join(read_head(text)[0]), path)

    def uv_for(self, python):
        """Path of uv if it can install for that Python (it supports 3.8 or newer), else None."""
        return find_uv() if tuple(map(int, python_version(python).split('.'))) >= (3, 8) else None

    def python_with_pip(self, python, work_dir):
        """Path of a Python with pip: this one, or that of a virtual environment made in this directory."""
        has_no_pip = run(python, '-s', '-c', 'import pip').exit_code
        return self.make_venv(python, os.path.join(work_dir, 'venv')) if has_no_pip else python

    def wheel_dirs(self):
        """Directories with downloaded packages, one per source path; downloads of all versions go to the first."""
        return [wheel_dir(path, self.name) for path in source_paths()]

    def find_python(self):
        """Full path of the Python for the environment; EasyBuildError if there is none, or it is not supported."""
        root = get_software_root('Python')
        command = os.path.join(root, 'bin', 'python3') if root else self.cfg['python_command']
        python = which(command)
        if not python:
            raise EasyBuildError("Python was not found: there is no '%s'. Install Python %s, load a module that "
                                 "provides it, or name another with --try-amend=python_command=/path/to/python3",
                                 command, ' or '.join(self.cfg['python_versions']) or '3')

        if self.lock_file:
            self.check_lock_file(python_version(python))
        self.log.info("Using Python %s at %s", python_version(python), python)
        return python

    def check_lock_file(self, python_version):
        """Compare the head of the lock file with the easyconfig, this version of Python and the machine."""
        text = read_file(self.lock_file)
        pythons, platforms, locked = read_head(text)
        pythons = pythons or self.cfg['python_versions']
        remedy = 'run: slingtorch lock %s' % shlex.quote((self.named_easyconfigs() or [self.cfg.path])[0])
        if self.is_own_lock_file():
            remedy = 'remove the lock file, and eb makes a new one'
        libc, glibc, machine = machine_at_hand()
        fitting = ['manylinux_2_%d_%s' % (number, machine) for number in range((glibc or -1) + 1)]
        wanted = recipe_of(self.cfg)['wanted']
        # a truncated or edited file may have no head to compare
        named = [normalised(name) for name in re.findall(r'^([\w.-]+)', text, re.M)]
        missing = [word for word in wanted if not re.search('^-|;', word)
                   and normalised(re.split(r'[^\w.-]', word)[0]) not in named]
        problem = ''
        if pythons and python_version not in pythons:
            problem = "is for Python %s, but this is Python %s. Load a module with the former, name it with " \
                      "--try-amend=python_command=/path/to/python%s, or change python_versions and " % (
                          ', '.join(pythons), python_version, pythons[-1])
        elif platforms and not set(platforms).intersection(fitting):
            problem = "is for %s, but this machine is %s with %s. Change wheel_platform of the easyconfig and " % (
                ', '.join(platforms), machine, libc)
        elif locked and locked != wanted:
            problem = "is for packages other than those that the easyconfig now requires (%s): " % (
                ', '.join(sorted(set(locked) ^ set(wanted))) or 'their order')
        elif missing or not named:
            problem = "does not pin %s: " % (', '.join(missing) or 'any package')
        if problem:
            raise EasyBuildError("The lock file %s %s%s", self.lock_file, problem, remedy)

    def make_venv(self, python, path, *options):
        """Make a virtual environment; return the path of its Python."""
        res = run(python, '-m', 'venv', *options, path)
        if res.exit_code:
            hint = ". On Debian and Ubuntu, install the package python3-venv"
            raise EasyBuildError("Making a virtual environment with %s failed%s:\n%s", python,
                                 hint if 'ensurepip' in res.output else '', res.output.strip())
        return os.path.join(path, 'bin', 'python')

    def download_wheels(self, python):
        """Download packages of the lock file that are missing; verify the hash of every file."""
        wheel_dirs = self.wheel_dirs()
        mkdir(wheel_dirs[0], parents=True)
        # a project's own wheels ('slingtorch new'): an index may have others with that name and version
        own = glob.glob(os.path.join(glob.escape(os.path.dirname(self.lock_file)), '*.whl'))
        for path in own:
            copy_file(path, os.path.join(wheel_dirs[0], os.path.basename(path)))
        with tempfile.TemporaryDirectory() as work_dir:
            found = self.look_for_wheels(python, work_dir)
            # the installation verifies the hashes: doing so twice would cost a second per gigabyte or two
            if not found.exit_code and self.cfg['stop'] != FETCH_STEP:
                return
            pip_python = self.python_with_pip(python, work_dir)
            download = [pip_python, '-s', '-m', 'pip', 'download', '--require-hashes', '--only-binary', ':all:',
                        '--progress-bar', 'off', '--disable-pip-version-check', '--dest', wheel_dirs[0]]

            # no index is contacted if everything is present, because compute nodes may have no network
            if not found.exit_code:
                found = run(*WITHOUT_PIP_CONFIG, *download, *self.offline_options(work_dir))
                if not found.exit_code:
                    return
            if problem_of(found.output, PIP_PROBLEMS) in PIP_PROBLEMS[:2]:
                self.raise_pip_error(found.output, "Downloading", wheel_dirs[0])
            for line in found.output.splitlines():
                if 'has bad hash' in line:
                    self.warn(line.replace('WARNING: ', '').strip())

            try:
                settings = pip_settings(pip_python)
                if 'index-url' not in settings and 'no-index' not in settings:
                    settings['index-url'] = default_index(pip_python)
            except RuntimeError as err:
                raise EasyBuildError("%s", err)
            answering, silent = ([], []) if 'no-index' in settings else self.look_at_indexes(settings)
            if answering:
                settings.update({'index-url': answering[0], 'extra-index-url': ' '.join(answering[1:])})
            self.say("downloading the packages of %s with pip...", os.path.basename(self.lock_file))
            lock_file, env = self.lock_file, None
            if silent:
                self.log.info("Skipping indexes that do not answer: %s", ', '.join(silent))
                lock_file = self.lock_file_without(INDEX_REGEX, work_dir)
                env = dict(os.environ, PIP_NO_INDEX='1')
                if answering:
                    # an empty list would mean that of pip's configuration
                    env = dict(os.environ, PIP_INDEX_URL=answering[0], PIP_EXTRA_INDEX_URL=' '.join(answering))
            words = ['--requirement', lock_file]
            if own:
                names = [normalised(os.path.basename(path).split('-')[0]) for path in own]
                part, entries = os.path.join(work_dir, 'others'), re.findall(r'(?ms)^[^#\s].*?(?=^\S|\Z)',
                                                                             read_file(lock_file))
                write_file(part, ''.join(text for text in entries if normalised(text.split('==')[0]) not in names))
                words = ['--no-deps', '--requirement', part]
            status, text = self.run_download(download + ['--retries', '2'] + words, env)
            if status:
                self.raise_pip_error(text, "Downloading", wheel_dirs[0], silent)

    def look_for_wheels(self, python, work_dir):
        """Look in the wheel directories, by name and version, for a wheel of each package for that Python."""
        uv, env = self.uv_for(python), None
        if uv:
            cmd = [uv, 'pip', 'install', '--python', python, '--no-cache']
            env = uv_environment()
        else:
            # pip before 22.2 has no --dry-run
            cmd = WITHOUT_PIP_CONFIG + [python, '-s', '-m', 'pip', 'install', '--isolated', '--ignore-installed',
                                        '--disable-pip-version-check']
        cmd += ['--dry-run', '--no-deps', '--target', os.path.join(work_dir, 'none'), '--no-index',
                '--requirement', self.lock_file_without(ADDRESS_REGEX, work_dir, hashes=False)]
        return run(*cmd, *self.find_links(), env=env)

    def run_download(self, command, env):
        """Run pip, and print the name and size of each large file at its start; return exit status and output."""
        self.log.info("Running: %s", ' '.join(command))
        lines = []
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env=dict(env or os.environ, PYTHONUNBUFFERED='1')) as process:
            for line in process.stdout:
                lines.append(line.decode('utf-8', 'replace'))
                found = re.match(r'\s*(?:Downloading|(Using cached)) (?:\S*/)?(\S+\.whl)\S* \((.* [MG]B)\)', lines[-1])
                if found:
                    self.say("  %s (%s%s)", found.group(2), found.group(3), ", pip has it" if found.group(1) else '')
        self.log.info("Exit status %s; pip printed:\n%s", process.returncode, ''.join(lines))
        return process.returncode, ''.join(lines)

    def look_at_indexes(self, settings):
        """Addresses of reachable indexes, and of others with the reason: pip would try them for every package."""
        in_lock_file = INDEX_REGEX.findall(read_file(self.lock_file))
        addresses = [address for option, address in in_lock_file if 'extra' not in option] or [
            settings['index-url']] + settings.get('extra-index-url', '').split()
        addresses += [address for option, address in in_lock_file if 'extra' in option]

        answering, silent = [], []
        for address in addresses:
            url = urllib.parse.urlsplit(address)
            try:
                # leave addresses behind a proxy, or without a server, to pip
                proxy = 'proxy' in settings or url.scheme in urllib.request.getproxies() and \
                    not urllib.request.proxy_bypass(url.hostname)
                if url.scheme in ['http', 'https'] and not proxy:
                    port = url.port or {'http': 80, 'https': 443}[url.scheme]
                    socket.create_connection((url.hostname, port), INDEX_TIMEOUT).close()
                answering.append(address)
            except OSError as err:
                # without user and password
                silent.append('%s (%s)' % (address.replace(url.netloc, url.netloc.rpartition('@')[2]), err))
        return answering, silent

    def lock_file_without(self, regex, directory, hashes=True):
        """Copy the lock file to a directory, without lines whose start matches; return the path of the copy."""
        path, text = os.path.join(directory, os.path.basename(self.lock_file)), read_file(self.lock_file)
        if not hashes:
            text = re.sub(r'(\s*\\\n)?[ \t]*--hash=\S+', '', text)
        lines = [line for line in text.splitlines() if not regex.match(line)]
        write_file(path, '\n'.join(lines) + '\n')
        return path

    def offline_options(self, directory):
        """Options for pip without network, and a lock file without addresses, which pip would contact even so."""
        return ['--isolated', '--no-index', '--requirement', self.lock_file_without(ADDRESS_REGEX, directory),
                *self.find_links()]

    def find_links(self):
        """Options of pip and uv for the directories with wheels; uv accepts only existing ones."""
        return [word for path in self.wheel_dirs() if os.path.isdir(path) for word in ('--find-links', path)]

    def raise_pip_error(self, output, doing, path, silent=(), program='pip'):
        """Raise an error with the last output of pip or another program and a remedy; silent: dead indexes."""
        problem, remedy = problem_of(output, PIP_PROBLEMS)
        if (problem, remedy) in PIP_PROBLEMS[:2]:
            # an index is not the cause
            silent = ()
        # keep only the last line of a traceback
        lines = re.sub(r'(?s)ERROR: Exception:\s*\nTraceback .*\n(?=\w)', 'ERROR: ', output).strip().splitlines()
        first_error = next((number for number, line in enumerate(lines) if line.startswith(('ERROR', 'error'))), -15)
        raise EasyBuildError(
            "%s the packages of %s failed (to %s).%s The output of %s is:\n%s\n%s", doing, self.lock_file, path,
            " No answer from %s." % ', '.join(silent) if silent else '', program, '\n'.join(lines[first_error:]),
            remedy, exit_code=EasyBuildExit.FAIL_CHECKSUM if 'HASHES' in problem else EasyBuildExit.ERROR)

    @property
    def own_python(self):
        """Path of the environment's Python; extensions also use it (EnvironmentPackage)."""
        return os.path.join(self.installdir, 'bin', 'python')

    def extract_step(self):
        """Nothing to unpack: pip does that."""

    def configure_step(self):
        """Nothing to configure: check here what would otherwise fail late."""
        if self.cfg['environment_image'] and not self.dry_run:
            require_mksquashfs()
            if self.cfg['system_site_packages']:
                raise EasyBuildError("environment_image and system_site_packages exclude each other: the image "
                                     "would lack the packages of the base Python")

    def build_step(self):
        """Nothing to build: packages are wheels."""

    def install_step(self):
        """Make the environment and install into it, without network; leave nothing behind if that fails."""
        options = ['--prompt', '%s/%s%s' % (self.name, self.version, self.cfg['versionsuffix'])]
        if self.cfg['system_site_packages']:
            options.append('--system-site-packages')
        work_dir = tempfile.mkdtemp()   # inside eb's own temporary directory, which eb removes
        try:
            base_python = self.find_python()
            uv = self.uv_for(base_python)
            if uv and re.search('^pip==', read_file(self.lock_file), re.M):
                # the lock file has its own pip; installing another one first would take seconds
                options.append('--without-pip')
            python = self.make_venv(base_python, self.installdir, *options)
            # uv unpacks into its cache and links files from there. With the cache beside the environment, each file is
            # written once; it is private and removed at the end, so no file is shared with another installation
            cache = os.path.join(self.installdir, '.uv-cache')
            if uv:
                cmd = [uv, 'pip', 'install', '--python', python, '--offline', '--no-index', '--no-progress',
                       '--link-mode', 'hardlink', '--cache-dir', cache, '--requirement',
                       self.lock_file_without(ADDRESS_REGEX, work_dir)] + self.find_links()
            else:
                cmd = WITHOUT_PIP_CONFIG + [python, '-m', 'pip', 'install', '--no-compile', '--no-cache-dir',
                                            '--disable-pip-version-check', '--progress-bar', 'off']
                cmd += self.offline_options(work_dir)
            res = run(*cmd, '--require-hashes', '--only-binary', ':all:', hidden=False,
                      env=uv_environment() if uv else None)
            if res.exit_code:
                self.raise_pip_error(res.output, "Installing", self.installdir, program='uv' if uv else 'pip')
            remove_dir(cache)
            if self.cfg['byte_compile']:
                # pip compiles with one process, and uv also compiles tests; all skip files that are not valid Python,
                # such as templates in packages
                run(python, '-m', 'compileall', '-q', '-j', str(self.cfg.parallel), '-x', NOT_COMPILED,
                    os.path.join(self.installdir, 'lib'))
            copy_file(self.lock_file, os.path.join(self.installdir, 'packages.lock'))
            if self.cfg['environment_image']:
                make_image(self.installdir, self.cfg.parallel, self.cfg['sanity_check_imports'])
        except BaseException:
            # also if interrupted: leave no half environment that somebody might activate, and free its space
            try:
                remove_dir(self.installdir)
            except EasyBuildError as left:  # a process that Ctrl-C does not end at once still writes there
                self.warn("%s", left)
            raise

    def sanity_check_rpath(self, *args, **kwargs):
        """Skip the RPATH check: wheels are binaries built elsewhere."""
        self.log.info("The PythonVenv easyblock skips the RPATH sanity check: wheels are binaries built elsewhere")
        return []

    def sanity_check_step(self, *args, **kwargs):
        """Check interpreter, imports, versions, and that the packages fit together."""
        python = self.own_python
        paths = {
            'files': ['bin/activate', 'bin/python', 'packages.lock'],
            'dirs': [os.path.relpath(path, self.installdir) + '/site-packages' for path in glob.glob(
                os.path.join(glob.escape(self.installdir), 'lib', 'python3.*'))] or ['lib/python3*/site-packages'],
        }
        if self.cfg['environment_image']:
            paths['files'] += [IMAGE, IMAGE + '.sha256']
        commands = []
        if not self.cfg['system_site_packages']:
            # else it would also check the packages of the base Python, which the user cannot change
            uv = find_uv() if not glob.glob(os.path.join(glob.escape(self.installdir), 'lib', 'python3.[67]')) else None
            # uv takes a tenth of the second that pip takes
            commands.append('UV_NO_CONFIG=1 "%s" pip check --no-cache --python "%s"' % (uv, python) if uv else
                            '"%s" -m pip --disable-pip-version-check check' % python)
        if self.cfg['sanity_check_imports']:
            # in one process, because each would import torch again; it keeps what it compiles
            commands.append('env -u PYTHONDONTWRITEBYTECODE "%s" -s -c "import %s"' % (
                python, ', '.join(self.cfg['sanity_check_imports'])))
        wanted = dict(pinned(self.cfg['python_packages']), **self.cfg['sanity_check_packages'])
        for name, version in sorted(wanted.items()):
            commands.append("\"%s\" -s -c 'import importlib.metadata, sys; found = importlib.metadata.version(\"%s\"); "
                            "\"%s\" in (found, found.split(\"+\")[0]) or sys.exit(\"%s is \" + found + \", not %s\")'"
                            % (python, name, version, name, version))
        self.check_network()
        super().sanity_check_step(*args, custom_paths=paths, custom_commands=commands, **kwargs)

    def check_network(self):
        """Check that the PyTorch wheel and the network plugin among the dependencies are compatible."""
        versions = {}
        for dep in self.cfg.dependencies():
            versions.update(software_of(dep))
        if self.dry_run or not set(PLUGIN_NAMES).intersection(versions):
            return
        if not self.sanity_check_module_loaded:
            self.sanity_check_load_module()
        process = probe_pytorch(self.own_python)
        if isinstance(process, str):
            self.sanity_check_fail_msgs.append(process)
            return
        self.say("a process that imports PyTorch has: %s", describe_libraries(process))
        wrong, known = check_wheel(process, versions)
        self.sanity_check_fail_msgs += wrong
        for text in known:
            self.warn(text)

    def make_module_extra(self, *args, **kwargs):
        """Set what activating the environment would set, and keep packages in ~/.local out of jobs."""
        txt = super().make_module_extra(*args, **kwargs)
        # an environment that sees system packages would also see ~/.local, before its own packages
        for name, value in [('VIRTUAL_ENV', self.installdir), ('PYTHONNOUSERSITE', '1')]:
            # unloading restores the values of a user who works in another environment
            txt += self.module_generator.set_environment(name, {'value': value, 'pushenv': True})
        # extend-venv-activate records this name; only one module of a name is loaded at a time
        txt += self.module_generator.set_environment('SLINGTORCH_MODULE_' + convert_name(self.name, upper=True),
                                                     self.short_mod_name)
        about = os.path.join(self.installdir, 'pyvenv.cfg')
        found = re.search(r'^version = ([\d.]+)', read_file(about) if os.path.exists(about) else '', re.M)
        if found and not dependency_root(self.cfg, 'Python'):
            # EasyBuild's PythonBundle and PythonPackage need these
            txt += self.module_generator.set_environment('EBROOTPYTHON', self.installdir)
            txt += self.module_generator.set_environment('EBVERSIONPYTHON', found.group(1))
        for path in glob.glob(os.path.join(self.installdir, 'lib', 'python3*', 'site-packages', 'torch', 'version.py')):
            # the runscript compares this version with the node's driver
            for version in re.findall(r"^cuda\b.*= '([\d.]+)'", read_file(path), re.M):
                txt += self.module_generator.set_environment('SLINGTORCH_CUDA_VERSION', version)
        if self.cfg['environment_image']:
            txt += self.module_generator.set_environment('SLINGTORCH_ENVIRONMENT_IMAGE', IMAGE, relpath=True)
        return txt
