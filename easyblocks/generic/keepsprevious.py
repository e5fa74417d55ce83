# SPDX-License-Identifier: GPL-2.0-only
"""Keeps an installation until its replacement is complete: a base for the bundle's easyblocks."""
import os
import stat

import easybuild.easyblocks.generic._bundle  # noqa: F401  # before slingtorch is imported
from easybuild.framework.easyblock import EasyBlock, StopException
from easybuild.tools.build_log import EasyBuildError, print_msg, print_warning
from easybuild.tools.config import build_option
from easybuild.tools.filetools import adjust_permissions, remove_dir, remove_file
from slingtorch.install.dependencies import check_types


class KeepsPrevious(EasyBlock):
    """A rebuild moves the old installation and its module aside before it writes new files. After a failure, both move
    back; after a SIGKILL the next eb does that. The new one is made in place, since environments have absolute paths.

    This must be the first base class.
    """

    # whether the easyblock makes all files of an installation from scratch, in make_installdir() and after it
    sets_aside = True

    def __init__(self, *args, **kwargs):
        """Initialise, and check the types of parameters."""
        super().__init__(*args, **kwargs)
        check_types(self.cfg, self.extra_options())

    def say(self, text, *args):
        """Print a message, and log it."""
        print_msg(text, *args, log=self.log, silent=build_option('silent'))

    def warn(self, text, *args):
        """Print a warning, and log it."""
        print_warning(text, *args, log=self.log)

    @property
    def module_only(self):
        """Whether eb only makes the module."""
        return build_option('module_only') or self.cfg['module_only']

    def remove_module_file(self):
        """Leave the module in place until the new one replaces it, because jobs may load it meanwhile."""
        if not self.will_set_aside() and not self.module_only:
            super().remove_module_file()

    def will_set_aside(self):
        """Whether make_installdir() will replace a working installation."""
        return (self.sets_aside and os.path.isfile(self.mod_filepath) and os.path.isdir(self.installdir) and not (
            self.dry_run or self.module_only or self.cfg['keeppreviousinstall']))

    def make_installdir(self, *args, **kwargs):
        """Move the old installation aside, the module first, so that nobody loads a half installation."""
        if self.will_set_aside():
            try:
                os.rename(self.mod_filepath, aside(self.mod_filepath))
                os.rename(self.installdir, aside(self.installdir))
            except OSError as err:
                self.end_replacement()
                raise EasyBuildError("The old installation cannot be moved aside for the new one: %s. You need write "
                                     "permission for the directories that contain %s and %s", err,
                                     self.installdir, self.mod_filepath)
        super().make_installdir(*args, **kwargs)

    def post_init(self):
        """Before any step, move back what a killed eb has left aside."""
        super().post_init()
        if not self.dry_run:
            self.end_replacement()

    def run_step(self, *args, **kwargs):
        """Move the old installation back if a step fails or is interrupted."""
        try:
            super().run_step(*args, **kwargs)
        except StopException:
            raise
        except BaseException:
            self.end_replacement()
            raise

    def end_replacement(self):
        """Move the old installation back, or remove it if the new installation has its module."""
        module, installation = aside(self.mod_filepath), aside(self.installdir)
        if not (os.path.lexists(module) or os.path.lexists(installation)):
            return
        try:
            if os.path.lexists(module) and not os.path.lexists(self.mod_filepath):
                if os.path.lexists(installation):
                    remove_dir(self.installdir)
                    os.rename(installation, self.installdir)
                os.rename(module, self.mod_filepath)
                self.say("the previous installation in %s is restored", self.installdir)
            else:
                # in this order: a directory without its module is never moved back
                remove_file(module)
                if build_option('read_only_installdir'):
                    adjust_permissions(installation, stat.S_IWUSR, ignore_errors=True)
                remove_dir(installation)
        except OSError as err:
            raise EasyBuildError("A previous installation is left in %s, and its module in %s: %s. Their owner must "
                                 "run the same command", installation, module, err)

    def make_module_step(self, fake=False):
        """Replace the module by one rename, because jobs may load the old one meanwhile."""
        if fake or self.dry_run or self.cfg['stop']:    # --fetch also sets stop
            return super().make_module_step(fake=fake)
        path = self.mod_filepath
        self.mod_filepath = os.path.join(os.path.dirname(path), '.%s.new' % os.path.basename(path))
        try:
            modpath = super().make_module_step(fake=fake)
            os.rename(self.mod_filepath, path)
        finally:
            self.mod_filepath = path
        self.end_replacement()
        return modpath


def aside(path):
    """Path of an old directory or module while it is replaced; modules tools ignore this name."""
    return os.path.join(os.path.dirname(path), '.%s.previous' % os.path.basename(path))
