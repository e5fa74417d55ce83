# SPDX-License-Identifier: GPL-2.0-only
"""
EasyBuild support for runscripts: plain bash files that a rank of a distributed job starts through,
implemented as the base of the easyblocks that install PyTorch.
"""
import os

from easybuild.framework.easyblock import EasyBlock
from easybuild.framework.easyconfig import CUSTOM
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.config import build_option
from easybuild.tools.filetools import adjust_permissions, convert_name, copy_file

RUNSCRIPTS_DIR = 'runscripts'
# what every PyTorch installation of the bundle brings (docs/runscripts.md)
DEFAULT_RUNSCRIPTS = (
    ['conda-python-simple', 'conda-python-distributed', 'cpu-bind', 'get-master', 'with-spares']
    + ['lib/%s.bash' % name for name in ['caches', 'gpus', 'master', 'mpi', 'network', 'pals', 'ranks', 'recorder',
                                         'stage', 'torchrun']]
    + ['lib/drivers.cfg', 'lib/job/variables.cfg']
    + ['lib/job/%s.py' % name for name in ['__init__', '__main__', 'bench', 'check', 'elf', 'findings', 'look',
                                           'machine', 'nccl', 'node', 'probe', 'records', 'star', 'tree_copy',
                                           'variables', 'vet', 'wire']]
)
GPU_VISIBILITY_VARIABLES = ['CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES']


class RunScripts(EasyBlock):
    """
    Puts runscripts beside an installation and their variables in its module file.

    To be inherited from first, in front of the easyblock that does the installation itself, as in
    class EB_PyTorch_Cray(RunScripts, EB_PyTorch).

    The module file sets $RUNSCRIPTS and $RUNSCRIPTS<NAME> to the directory of the runscripts, and adds it to $PATH:
    where the module was forgotten, 'srun conda-python-distributed' says that there is no such command.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters for runscripts and for what a site adds."""
        extra_vars = EasyBlock.extra_options(extra_vars)
        extra_vars.update({
            'gpu_visibility': [None, "Name of the variable through which a runscript limits a task to its own GPUs "
                                     "(%s); None: the task sees what the scheduler gives it"
                                     % ', '.join(GPU_VISIBILITY_VARIABLES), CUSTOM],
            'runscripts': [DEFAULT_RUNSCRIPTS, "Names of the runscripts to install, found through the source path",
                           CUSTOM],
            'site_groups': [[], "Opt-in groups of the site's values to add ('slingtorch sites NAME' lists them)",
                            CUSTOM],
        })
        return extra_vars

    def __init__(self, *args, **kwargs):
        """Initialise: where the scripts are is found in the fetch step."""
        super().__init__(*args, **kwargs)
        self.script_paths = {}

    def scripts(self):
        """The scripts to install: {path below the installation directory: name to find through the source path}."""
        return {os.path.join(RUNSCRIPTS_DIR, name): name for name in self.cfg['runscripts']}

    def fetch_step(self, *args, **kwargs):
        """Find the scripts besides fetching the sources."""
        super().fetch_step(*args, **kwargs)

        gpu_visibility = self.cfg['gpu_visibility']
        if gpu_visibility and gpu_visibility not in GPU_VISIBILITY_VARIABLES:
            raise EasyBuildError("Easyconfig parameter gpu_visibility is '%s': it must be one of %s, or None",
                                 gpu_visibility, ', '.join(GPU_VISIBILITY_VARIABLES))

        for target, name in self.scripts().items():
            self.script_paths[target] = self.obtain_file(name, no_download=True, warning_only=True)
            if not self.script_paths[target]:
                raise EasyBuildError("Runscript '%s' was not found: the directory runscripts/ of the bundle must be on "
                                     "EasyBuild's source path. Activate the bundle with "
                                     "'eval \"$(slingtorch env)\"', or add it with --sourcepath", name)

    def post_processing_step(self):
        """Copy the scripts beside the installation, executable for everyone who can read them."""
        super().post_processing_step()
        if self.dry_run:
            self.dry_run_msg("  * runscripts will be copied to %s: %s", self.installdir, ', '.join(self.scripts()))
            return
        for name, path in self.script_paths.items():
            target = os.path.join(self.installdir, name)
            copy_file(path, target)
            adjust_permissions(target, 0o755, recursive=False, relative=False)

    def sanity_check_step(self, custom_paths=None, custom_commands=None, **kwargs):
        """Check that each script is there, and those of bash are valid, besides what the easyblock itself checks."""
        paths = {
            'files': list(self.scripts()) + (custom_paths or {}).get('files', []),
            'dirs': (custom_paths or {}).get('dirs', []),
        }
        scripts = [path for path in self.scripts() if not path.endswith(('.py', '.cfg'))]
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


def wants_checksums_only(skip_checksums):
    """
    Whether a fetch step runs for 'eb --inject-checksums', which needs the sources and nothing else.

    :param skip_checksums: as the fetch step is given it; that of 'eb --job' is, too
    """
    # implied by --inject-checksums (easybuild/tools/options.py), which is no build option itself
    return skip_checksums and not build_option('pre_create_installdir')
