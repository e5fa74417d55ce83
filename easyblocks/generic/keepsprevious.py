# SPDX-License-Identifier: GPL-2.0-only
"""What is installed stays until its successor is whole: a base of easyblocks, in front of those that install."""
import glob
import os

from easybuild.framework.easyblock import EasyBlock, StopException
from easybuild.tools.build_log import print_msg, print_warning
from easybuild.tools.config import build_option
from easybuild.tools.filetools import mkdir, remove_dir, remove_file
from easybuild.tools.hooks import FETCH_STEP


class KeepsPrevious(EasyBlock):
    """Leaves an installation and its module as they are when 'eb --rebuild' or '--force' fails; EasyBuild's own way is
    to remove both before the new ones are there. To be inherited from first.

    Environments hold their own path, so the new one is made in its place, and the earlier one waits beside it under
    another name. The module goes first and comes last: where there is one, what it loads is whole. This tells the next
    'eb' what one that was killed has left.
    """

    # names of what goes on with the next installation, with wildcards
    moved_along = []

    def previous(self):
        """Where the earlier installation and its module wait, which no modules tool takes for one."""
        return [os.path.join(os.path.dirname(path), '.%s.previous' % os.path.basename(path))
                for path in [self.installdir, self.mod_filepath]]

    def is_installed(self):
        """Whether there is an installation with its module."""
        return os.path.isdir(self.installdir) and os.path.isfile(self.mod_filepath) and os.path.realpath(
            self.module_generator.det_installdir(self.mod_filepath) or '') == os.path.realpath(self.installdir)

    def run_step(self, step, step_methods):
        """Put back what was there if the step fails, or an earlier 'eb' was killed."""
        if step == FETCH_STEP and not build_option('ignore_locks'):     # else another 'eb' may be at work
            self.put_back()
        try:
            super().run_step(step, step_methods)
        except StopException:
            raise
        except BaseException:
            self.put_back()
            raise

    def remove_module_file(self):
        """Leave the module for as long as what it loads is whole."""
        if not self.is_installed():
            super().remove_module_file()

    def set_aside(self):
        """Set the earlier installation aside, and make the directory of the new one; whether that was done."""
        if (self.dry_run or build_option('module_only') or self.cfg['module_only'] or self.cfg['keeppreviousinstall']
                or not self.cfg['cleanupoldinstall'] or not self.is_installed()):
            return False
        software, module = self.previous()
        os.rename(self.mod_filepath, module)
        try:
            os.rename(self.installdir, software)
        except OSError as err:
            print_warning("%s cannot be renamed, and is removed now: %s. If the new one fails there is none",
                          self.installdir, err.strerror, log=self.log)
            remove_file(module)
            return False
        mkdir(self.installdir)
        self.move_along(software, self.installdir)
        return True

    def make_installdir(self, *args, **kwargs):
        """Make the directory for the installation; the earlier one is set aside."""
        if not self.set_aside():
            super().make_installdir(*args, **kwargs)

    def move_along(self, source, target):
        """Move what goes on with the next installation."""
        for pattern in self.moved_along:
            for path in glob.glob(os.path.join(glob.escape(source), pattern)):
                os.rename(path, os.path.join(target, os.path.basename(path)))

    def put_back(self):
        """Put back what was set aside, unless its successor is whole."""
        software, module = self.previous()
        if self.dry_run:
            return
        if self.is_installed():
            self.remove_previous()
            return
        if os.path.isdir(software):
            self.move_along(self.installdir, software)
            remove_dir(self.installdir)
            os.rename(software, self.installdir)
        if os.path.isfile(module):
            os.rename(module, self.mod_filepath)
            print_msg("%s is as it was before", self.installdir, log=self.log, silent=self.silent)

    def remove_previous(self):
        """Remove what was set aside: its successor is whole."""
        software, module = self.previous()
        remove_file(module)
        remove_dir(software)

    def make_module_step(self, fake=False):
        """Write the module, and put it into its place by one rename: jobs load it meanwhile."""
        if fake or self.dry_run:
            return super().make_module_step(fake=fake)
        path = self.mod_filepath
        self.mod_filepath = os.path.join(os.path.dirname(path), '.%s.new' % os.path.basename(path))
        try:
            modpath = super().make_module_step(fake=fake)
            os.rename(self.mod_filepath, path)
        finally:
            self.mod_filepath = path
        self.remove_previous()
        return modpath
