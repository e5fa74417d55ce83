# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild support for runscripts, the bash scripts that start ranks: the base of the easyblocks for PyTorch."""
import contextlib
import glob
import hashlib
import json
import os
import stat
import tempfile
import time

from easybuild.easyblocks.generic.keepsprevious import KeepsPrevious
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.config import build_option
from easybuild.tools.filetools import (
    adjust_permissions, compute_checksum, convert_name, copy_file, read_file, remove_dir, write_file)
from slingtorch import bundle_root
from slingtorch.install.dependencies import with_parameters
from slingtorch.job.machine import VISIBILITY

# a link into one of the directories in COPIES_DIR; a job keeps using the directory with which it started
RUNSCRIPTS_DIR, COPIES_DIR = 'runscripts', '.runscripts'
# how long an old copy is kept after a new one replaces it (seconds): longer than jobs run
KEPT = 30 * 24 * 3600
# files in the directory of the runscripts: for their --version, and for 'slingtorch status'
VERSION, RECORD = 'lib/version', 'lib/installed.json'
SOURCE = os.path.join(bundle_root(), RUNSCRIPTS_DIR)
# the runscripts of every PyTorch installation (docs/runscripts.md), and the files that these read
RUNSCRIPTS = (
    ['conda-python-simple', 'conda-python-distributed', 'cpu-bind', 'get-master', 'until-done', 'with-spares', VERSION]
    + sorted(os.path.relpath(path, SOURCE) for kind in ['lib/*.bash', 'lib/*.cfg', 'lib/job/*.cfg', 'lib/job/*.py']
             for path in glob.glob(os.path.join(glob.escape(SOURCE), kind)))
)


class RunScripts(KeepsPrevious):
    """Puts runscripts beside an installation and their variables into its module file.

    This must be the first base class, before the easyblock that does the installation, as in
    class EB_PyTorch_Cray(RunScripts, EB_PyTorch).

    The module file sets $RUNSCRIPTS and $RUNSCRIPTS<NAME> to the directory of the runscripts, and adds it to $PATH: if
    a user forgets the module, 'srun conda-python-distributed' fails because there is no such command.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters for runscripts and for values of the site."""
        return with_parameters(KeepsPrevious.extra_options(extra_vars), {
            'gpu_visibility': [None, "Variable with which the runscript limits a task to its own GPUs "
                                     "(%s); None: the task sees all GPUs that the scheduler gives it"
                                     % ', '.join(VISIBILITY)],
            'site_digest': [None, "Digest of the site values that were added (set by the hooks)"],
            'site_groups': [[], "Opt-in groups of site values to add ('slingtorch sites NAME' lists them)"],
            'site_name': [None, "Name of this machine's site (set by the hooks)"],
        })

    def __init__(self, *args, **kwargs):
        """Initialise; the fetch step finds the scripts."""
        super().__init__(*args, **kwargs)
        self.script_paths = {}

    def scripts(self):
        """The scripts to install: {path below the installation directory: name to search for in the source path}."""
        return {os.path.join(RUNSCRIPTS_DIR, name): name for name in RUNSCRIPTS}

    def fetch_step(self, *args, **kwargs):
        """Fetch the sources, and find the scripts."""
        super().fetch_step(*args, **kwargs)

        gpu_visibility = self.cfg['gpu_visibility']
        if gpu_visibility and gpu_visibility not in VISIBILITY:
            raise EasyBuildError("Easyconfig parameter gpu_visibility is '%s', but must be one of %s, or None",
                                 gpu_visibility, ', '.join(VISIBILITY))

        self.find_scripts()

    def find_scripts(self):
        """Find the scripts in the source path."""
        for target, name in self.scripts().items():
            self.script_paths[target] = self.obtain_file(name, no_download=True, warning_only=True)
            if not self.script_paths[target]:
                raise EasyBuildError("Runscript '%s' was not found: the directory runscripts/ of the bundle must be in "
                                     "EasyBuild's source path. Activate the bundle with "
                                     "'eval \"$(slingtorch env)\"', or add it with --sourcepath", name)

    def post_processing_step(self):
        """Put the scripts beside the installation."""
        super().post_processing_step()
        if self.dry_run:
            self.dry_run_msg("  * runscripts will be copied to %s: %s", self.installdir, ', '.join(self.scripts()))
            return
        self.put_scripts()

    def make_module_step(self, fake=False):
        """With --module-only, renew the scripts of the installation, and then its module."""
        if self.module_only and not (fake or self.dry_run or self.cfg['stop']):    # --fetch also sets stop
            if os.path.lexists(os.path.join(self.installdir, RUNSCRIPTS_DIR)):
                self.renew_scripts()
            else:   # --force skips the sanity check
                self.warn("Nothing is installed in %s, so this module does not work. To install the software, run eb "
                          "--rebuild instead of --module-only; if it is installed elsewhere, correct EASYBUILD_PREFIX",
                          self.installdir)
        return super().make_module_step(fake=fake)

    def renew_scripts(self):
        """Renew the scripts of an installation, if the user has permission."""
        self.find_scripts()
        try:
            self.put_scripts()
            self.say("runscripts renewed in %s", self.installdir)
        except PermissionError as err:
            self.warn("Only the module was renewed, not the runscripts: %s. The owner of %s can renew them with "
                      "the same command", err, self.installdir)

    def write_scripts(self, directory):
        """Write the scripts, and a record for `slingtorch status`, to a copy of the installation directory."""
        for target, path in self.script_paths.items():
            copy_file(path, os.path.join(directory, target))
            adjust_permissions(os.path.join(directory, target), 0o755, recursive=False, relative=False)
        files = {target: {'sha256': compute_checksum(os.path.join(directory, target), 'sha256'), 'source': name}
                 for target, name in self.scripts().items() if name != VERSION}
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
        version = os.path.join(directory, RUNSCRIPTS_DIR, VERSION)
        bundle = read_file(version).split()[1]
        site, groups = self.cfg['site_name'], list(self.cfg['site_groups'])
        record = {'slingtorch': bundle, 'runscripts': digest, 'site': site, 'groups': groups,
                  'values': self.cfg['site_digest'], 'easyconfig': self.cfg.filename(), 'files': files}
        write_file(os.path.join(directory, RUNSCRIPTS_DIR, RECORD), json.dumps(record, indent=1, sort_keys=True) + '\n')
        write_file(version, 'slingtorch %s\nrunscripts %s\nsite %s%s\neasyconfig %s\n' % (
            bundle, digest, '%s, values %s' % (site, record['values']) if site else 'none',
            ', groups %s' % ' '.join(groups) if groups else '', record['easyconfig']))

    def put_scripts(self):
        """Move what write_scripts() writes into the installation: each file by one rename, and all runscripts by one.

        This way running jobs keep their old scripts, and eb may be killed at any moment.
        """
        link, copies = os.path.join(self.installdir, RUNSCRIPTS_DIR), os.path.join(self.installdir, COPIES_DIR)
        with writable(self.installdir):
            os.makedirs(copies, exist_ok=True)
            with writable(copies):
                new = tempfile.mkdtemp(prefix=time.strftime('%Y%m%d-'), dir=copies)
                self.write_scripts(new)
                installdir, self.installdir = self.installdir, new
                try:
                    self.permissions_step()  # EasyBuild's step, which --module-only skips
                finally:
                    self.installdir = installdir
                self.replace_files(new)
                if os.path.exists(link):
                    os.utime(os.path.dirname(os.path.realpath(link)))
                with writable(new):
                    os.symlink(os.path.join(COPIES_DIR, os.path.basename(new), RUNSCRIPTS_DIR), new + '/link')
                    os.rename(new + '/link', link)
                for path in glob.glob(os.path.join(glob.escape(copies), '*')):
                    if path != new and os.stat(path).st_mtime < time.time() - KEPT:
                        adjust_permissions(path, stat.S_IWUSR)
                        remove_dir(path)

    def replace_files(self, new):
        """Move everything except the runscripts from a copy of the installation directory into the installation."""
        for path, directories, names in os.walk(new):
            if path == new:
                directories.remove(RUNSCRIPTS_DIR)
            target = os.path.join(self.installdir, os.path.relpath(path, new))
            os.makedirs(target, exist_ok=True)
            with writable(path, target):
                for name in names:
                    os.rename(os.path.join(path, name), os.path.join(target, name))

    def sanity_check_step(self, custom_paths=None, custom_commands=None, **kwargs):
        """Check that all scripts exist and that the bash scripts are valid, and what the easyblock itself checks."""
        paths = {
            'files': list(self.scripts()) + (custom_paths or {}).get('files', []),
            'dirs': (custom_paths or {}).get('dirs', []),
        }
        scripts = [path for path in self.scripts() if not path.endswith(('.py', '.cfg', VERSION))]
        command = 'cd "%s" && for script in %s; do bash -n "$script" || exit; done' % (
            self.installdir, ' '.join('"%s"' % path for path in scripts))
        super().sanity_check_step(custom_paths=paths, custom_commands=[command] + (custom_commands or []), **kwargs)

    def make_module_req(self, *args, **kwargs):
        """Add the runscripts to $PATH, after the installation's own commands."""
        own = self.module_generator.prepend_paths('PATH', [RUNSCRIPTS_DIR])
        return own + super().make_module_req(*args, **kwargs)

    def make_module_extra(self, *args, **kwargs):
        """Set the variables of the runscripts (docs/architecture.md, 'From a module to a runscript')."""
        txt = super().make_module_extra(*args, **kwargs)
        for variable in ['RUNSCRIPTS', 'RUNSCRIPTS' + convert_name(self.name, upper=True)]:
            txt += self.module_generator.set_environment(variable, RUNSCRIPTS_DIR, relpath=True)
        if self.cfg['gpu_visibility']:
            txt += self.module_generator.set_environment('SLINGTORCH_GPU_VISIBILITY', self.cfg['gpu_visibility'])
        return txt


@contextlib.contextmanager
def writable(*paths):
    """Temporarily make directories writable for their owner, in spite of --read-only-installdir."""
    modes = {path: os.stat(path).st_mode for path in paths if not os.access(path, os.W_OK)}
    try:
        for path, mode in modes.items():
            os.chmod(path, mode | stat.S_IWUSR)
        yield
    finally:
        for path, mode in modes.items():
            os.chmod(path, mode)


def wants_checksums_only(skip_checksums):
    """Whether a fetch step with this skip_checksums (also set by 'eb --job') is for 'eb --inject-checksums'."""
    # --inject-checksums sets this one (easybuild/tools/options.py), but is not a build option itself
    return skip_checksums and not build_option('pre_create_installdir')
