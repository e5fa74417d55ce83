# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild support for runscripts, bash files that ranks start through: the base of the easyblocks for PyTorch."""
import contextlib
import glob
import hashlib
import json
import os
import stat
import tempfile
import time

from easybuild.easyblocks.generic.keepsprevious import KeepsPrevious
from easybuild.tools.build_log import EasyBuildError, print_msg, print_warning
from easybuild.tools.config import build_option
from easybuild.tools.filetools import (
    adjust_permissions, compute_checksum, convert_name, copy_file, read_file, remove_dir, write_file)
from slingtorch import bundle_root
from slingtorch.install.dependencies import with_parameters
from slingtorch.job.machine import VISIBILITY

# a link into one of the directories in COPIES_DIR: a job that started with another one keeps that
RUNSCRIPTS_DIR, COPIES_DIR = 'runscripts', '.runscripts'
# how long a copy is kept after another one took its place (seconds): longer than jobs run
KEPT = 30 * 24 * 3600
# in the directory of the runscripts: what their --version prints, and what 'slingtorch status' reads
VERSION, RECORD = 'lib/version', 'lib/installed.json'
SOURCE = os.path.join(bundle_root(), RUNSCRIPTS_DIR)
# what every PyTorch installation of the bundle brings (docs/runscripts.md), and what these read
DEFAULT_RUNSCRIPTS = (
    ['conda-python-simple', 'conda-python-distributed', 'cpu-bind', 'get-master', 'until-done', 'with-spares', VERSION]
    + sorted(os.path.relpath(path, SOURCE) for kind in ['lib/*.bash', 'lib/*.cfg', 'lib/job/*.cfg', 'lib/job/*.py']
             for path in glob.glob(os.path.join(glob.escape(SOURCE), kind)))
)


class RunScripts(KeepsPrevious):
    """Puts runscripts beside an installation and their variables in its module file.

    To be inherited from first, in front of the easyblock that does the installation itself, as in
    class EB_PyTorch_Cray(RunScripts, EB_PyTorch).

    The module file sets $RUNSCRIPTS and $RUNSCRIPTS<NAME> to the directory of the runscripts, and adds it to $PATH:
    where the module was forgotten, 'srun conda-python-distributed' says that there is no such command.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters for runscripts and for what a site adds."""
        return with_parameters(KeepsPrevious.extra_options(extra_vars), {
            'gpu_visibility': [None, "Name of the variable through which a runscript limits a task to its own GPUs "
                                     "(%s); None: the task sees what the scheduler gives it"
                                     % ', '.join(VISIBILITY)],
            'runscripts': [DEFAULT_RUNSCRIPTS, "Names of the runscripts to install, found through the source path"],
            'site_digest': [None, "Digest of the site's values that were added (a site value)"],
            'site_groups': [[], "Opt-in groups of the site's values to add ('slingtorch sites NAME' lists them)"],
            'site_name': [None, "Name of the site that this is (a site value)"],
        })

    def __init__(self, *args, **kwargs):
        """Initialise: where the scripts are is found in the fetch step."""
        super().__init__(*args, **kwargs)
        self.script_paths = {}

    def scripts(self):
        """The scripts to install: {path below the installation directory: name to find through the source path}."""
        return {os.path.join(RUNSCRIPTS_DIR, name): name for name in list(self.cfg['runscripts']) + [VERSION]}

    def fetch_step(self, *args, **kwargs):
        """Find the scripts besides fetching the sources."""
        super().fetch_step(*args, **kwargs)

        gpu_visibility = self.cfg['gpu_visibility']
        if gpu_visibility and gpu_visibility not in VISIBILITY:
            raise EasyBuildError("Easyconfig parameter gpu_visibility is '%s': it must be one of %s, or None",
                                 gpu_visibility, ', '.join(VISIBILITY))

        self.find_scripts()

    def find_scripts(self):
        """Find the scripts through the source path."""
        for target, name in self.scripts().items():
            self.script_paths[target] = self.obtain_file(name, no_download=True, warning_only=True)
            if not self.script_paths[target]:
                raise EasyBuildError("Runscript '%s' was not found: the directory runscripts/ of the bundle must be on "
                                     "EasyBuild's source path. Activate the bundle with "
                                     "'eval \"$(slingtorch env)\"', or add it with --sourcepath", name)

    def post_processing_step(self):
        """Put the scripts beside the installation."""
        super().post_processing_step()
        if self.dry_run:
            self.dry_run_msg("  * runscripts will be copied to %s: %s", self.installdir, ', '.join(self.scripts()))
            return
        self.put_scripts()

    @property
    def module_only(self):
        """Whether this is 'eb --module-only', and no dry run."""
        return (build_option('module_only') or self.cfg['module_only']) and not self.dry_run

    @property
    def renews(self):
        """Whether this is 'eb --module-only' of something that is installed."""
        return self.module_only and os.path.lexists(os.path.join(self.installdir, RUNSCRIPTS_DIR))

    def make_module_step(self, fake=False):
        """With --module-only, renew the scripts beside what is installed, and then its module."""
        if not fake and self.renews and not self.cfg['stop']:   # which --fetch is, too
            self.renew_scripts()
        elif not fake and self.module_only and not self.cfg['stop']:    # --force skips the sanity check
            print_warning("Nothing is installed in %s, so this module loads nothing that works. To install it run eb "
                          "without --module-only; if it is elsewhere, see EASYBUILD_PREFIX", self.installdir,
                          log=self.log)
        return super().make_module_step(fake=fake)

    def renew_scripts(self):
        """Put the scripts beside what is installed, as far as who runs this may."""
        self.find_scripts()
        try:
            self.put_scripts()
            print_msg("runscripts renewed in %s", self.installdir, log=self.log, silent=self.silent)
        except PermissionError as err:
            print_warning("Only the module is made, and the runscripts stay as they are: %s. Who owns %s renews them "
                          "by the same command", err, self.installdir, log=self.log)

    def write_scripts(self, directory):
        """Write the scripts, and a record for `slingtorch status`, to a directory in place of the installation's."""
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
        """Put what write_scripts() writes into the installation: each file by one rename, and all runscripts by one.

        Jobs that have begun go on with what they have, and eb may be killed at any moment.
        """
        link, copies = os.path.join(self.installdir, RUNSCRIPTS_DIR), os.path.join(self.installdir, COPIES_DIR)
        with writable(self.installdir):
            os.makedirs(copies, exist_ok=True)
            with writable(copies):
                new = tempfile.mkdtemp(prefix=time.strftime('%Y%m%d-'), dir=copies)
                self.write_scripts(new)
                installdir, self.installdir = self.installdir, new
                try:
                    self.permissions_step()  # EasyBuild's, which --module-only leaves out
                finally:
                    self.installdir = installdir
                self.replace_files(new)
                if os.path.isdir(link) and not os.path.islink(link):  # of a bundle that made no copies
                    adjust_permissions(link, stat.S_IWUSR, recursive=False)
                    os.rename(link, os.path.join(tempfile.mkdtemp(dir=copies), RUNSCRIPTS_DIR))
                elif os.path.exists(link):
                    os.utime(os.path.dirname(os.path.realpath(link)))
                with writable(new):
                    os.symlink(os.path.join(COPIES_DIR, os.path.basename(new), RUNSCRIPTS_DIR), new + '/link')
                    os.rename(new + '/link', link)
                for path in glob.glob(os.path.join(glob.escape(copies), '*')):
                    if path != new and os.stat(path).st_mtime < time.time() - KEPT:
                        adjust_permissions(path, stat.S_IWUSR)
                        remove_dir(path)

    def replace_files(self, new):
        """Move all but the runscripts from a directory that stands for that of the installation."""
        for path, directories, names in os.walk(new):
            if path == new:
                directories.remove(RUNSCRIPTS_DIR)
            target = os.path.join(self.installdir, os.path.relpath(path, new))
            os.makedirs(target, exist_ok=True)
            with writable(path, target):
                for name in names:
                    os.rename(os.path.join(path, name), os.path.join(target, name))

    def sanity_check_step(self, custom_paths=None, custom_commands=None, **kwargs):
        """Check that each script is there, and those of bash are valid, besides what the easyblock itself checks."""
        paths = {
            'files': list(self.scripts()) + (custom_paths or {}).get('files', []),
            'dirs': (custom_paths or {}).get('dirs', []),
        }
        scripts = [path for path in self.scripts() if not path.endswith(('.py', '.cfg', VERSION))]
        command = 'cd "%s" && for script in %s; do bash -n "$script" || exit; done' % (
            self.installdir, ' '.join('"%s"' % path for path in scripts))
        super().sanity_check_step(custom_paths=paths, custom_commands=[command] + (custom_commands or []), **kwargs)

    def make_module_req(self, *args, **kwargs):
        """Add the runscripts to $PATH, in front of which the installation's own commands go."""
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
    """Let the owner of directories write to them for a while, which --read-only-installdir forbids."""
    modes = {path: os.stat(path).st_mode for path in paths if not os.access(path, os.W_OK)}
    try:
        for path, mode in modes.items():
            os.chmod(path, mode | stat.S_IWUSR)
        yield
    finally:
        for path, mode in modes.items():
            os.chmod(path, mode)


def wants_checksums_only(skip_checksums):
    """Whether a fetch step, by skip_checksums (also that of 'eb --job'), runs for 'eb --inject-checksums' alone."""
    # implied by --inject-checksums (easybuild/tools/options.py), which is not a build option itself
    return skip_checksums and not build_option('pre_create_installdir')
