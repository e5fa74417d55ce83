# SPDX-License-Identifier: GPL-2.0-only
"""What is installed stays until its successor is whole: a base of the easyblocks that install software of their own."""
import os
import stat

import easybuild.easyblocks.generic._bundle  # noqa: F401  # before slingtorch is imported
from easybuild.framework.easyblock import EasyBlock, StopException
from easybuild.tools.build_log import EasyBuildError, print_msg
from easybuild.tools.config import build_option
from easybuild.tools.filetools import adjust_permissions, remove_dir, remove_file
from slingtorch.install.dependencies import check_types


class KeepsPrevious(EasyBlock):
    """A rebuild puts what is installed aside when the new files come, and its module with it. A failure puts both back;
    after a SIGKILL the next eb does. Paths in an environment are absolute, so the new one is made in its place.

    To be inherited from first.
    """

    # whether the easyblock makes all files of an installation from scratch, in make_installdir() and after it
    sets_aside = True

    def __init__(self, *args, **kwargs):
        """Initialise: the parameters must be of their types."""
        super().__init__(*args, **kwargs)
        check_types(self.cfg, self.extra_options())

    def remove_module_file(self):
        """Leave the module where it is until the new one takes its place: jobs load it meanwhile."""
        if not self.will_set_aside() and not build_option('module_only') and not self.cfg['module_only']:
            super().remove_module_file()

    def will_set_aside(self):
        """Whether a working installation is there that make_installdir() is to replace."""
        return (self.sets_aside and os.path.isfile(self.mod_filepath) and os.path.isdir(self.installdir) and not (
            self.dry_run or build_option('module_only') or self.cfg['module_only'] or self.cfg['keeppreviousinstall']
            or build_option('ignore_locks')))  # without locks another eb may be at work

    def make_installdir(self, *args, **kwargs):
        """Put what is installed aside, the module first: what is there from now on cannot be loaded."""
        if self.will_set_aside():
            try:
                os.rename(self.mod_filepath, aside(self.mod_filepath))
                os.rename(self.installdir, aside(self.installdir))
            except OSError as err:
                self.end_replacement()
                raise EasyBuildError("What is installed cannot be put aside for the new installation: %s. You must be "
                                     "able to write to the directories that have %s and %s in them", err,
                                     self.installdir, self.mod_filepath)
        super().make_installdir(*args, **kwargs)

    def post_init(self):
        """Before any step put back what an eb that was killed has left aside."""
        super().post_init()
        if not self.dry_run:
            self.end_replacement()

    def run_step(self, *args, **kwargs):
        """Put back what was put aside when a step fails, or is interrupted."""
        try:
            super().run_step(*args, **kwargs)
        except StopException:
            raise
        except BaseException:
            self.end_replacement()
            raise

    def end_replacement(self):
        """Put back what was put aside, or remove it if the new installation has its module."""
        module, installation = aside(self.mod_filepath), aside(self.installdir)
        if build_option('ignore_locks') or not (os.path.lexists(module) or os.path.lexists(installation)):
            return
        try:
            if os.path.lexists(module) and not os.path.lexists(self.mod_filepath):
                if os.path.lexists(installation):
                    remove_dir(self.installdir)
                    os.rename(installation, self.installdir)
                os.rename(module, self.mod_filepath)
                print_msg("what was installed in %s before is put back", self.installdir, log=self.log,
                          silent=self.silent)
            else:
                # in this order: a directory without its module is never put back
                remove_file(module)
                if build_option('read_only_installdir'):
                    adjust_permissions(installation, stat.S_IWUSR, ignore_errors=True)
                remove_dir(installation)
        except OSError as err:
            raise EasyBuildError("An earlier installation is left in %s, and its module in %s: %s. Who owns both runs "
                                 "the same command", installation, module, err)

    def make_module_step(self, fake=False):
        """Put the module into its place by one rename: jobs load the earlier one meanwhile."""
        if fake or self.dry_run or self.cfg['stop']:    # which --fetch is, too
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
    """Where a directory or a module lies while another one takes its place; no modules tool shows it."""
    return os.path.join(os.path.dirname(path), '.%s.previous' % os.path.basename(path))
