# SPDX-License-Identifier: GPL-2.0-only
"""Which worker of pytest-xdist runs what, and in which order."""

from xdist.scheduler.loadscope import LoadScopeScheduling

TOGETHER = {'tests/stages/test_pytorch_image.py': 'tests/stages/test_lumi_document.py',
            'tests/real/test_own_pytorch.py': 'tests/real/test_packaging.py'}
"""Files that need the same dear thing for the first time, which one worker makes: {file: file that it goes with}."""

FIRST = ['tests/stages/test_horovod.py', 'tests/stages/test_pytorch_source.py',
         'tests/stages/mpi_backend/test_mpi_backend.py', 'tests/stages/test_lumi_document.py',
         'tests/quickstart/test_quickstart.py', 'tests/easyblocks/test_pythonvenv.py', 'tests/modules/test_wheels.py',
         'tests/easyblocks/test_lock.py', 'tests/easyblocks/test_pytorch_cray.py', 'tests/faults/test_faults.py',
         'tests/real/test_until_done.py', 'tests/real/test_vet_jobs.py',
         'tests/real/test_training_examples.py', 'tests/containers/test_singularity_wrappers.py',
         'tests/real/test_readme.py', 'tests/easyblocks/test_slingmpi.py', 'tests/unit/test_cli.py',
         'tests/unit/test_runscripts.py', 'tests/easyblocks/test_singularity.py', 'tests/easyblocks/test_new.py',
         'tests/modules/test_derecho_examples.py', 'tests/easyblocks/test_pytorch_cray_input.py',
         'tests/modules/test_cirrus.py', 'tests/real/test_slurm_jobs.py', 'tests/real/test_frontier_example.py']
"""Files that take longest, so that no worker is left alone with one of them at the end.

Of the first ones only one needs PyTorch: one worker installs it, and no other waits for that.
"""


class Scheduling(LoadScopeScheduling):
    """All tests of a file go to one worker, since they share fixtures; the files that take longest go first."""

    def _split_scope(self, nodeid):
        path = nodeid.partition('::')[0]
        return TOGETHER.get(path, path)

    def _assign_work_unit(self, node):
        slow = [path for path in FIRST if path in self.workqueue]
        if slow:
            self.workqueue.move_to_end(slow[0], last=False)
        super()._assign_work_unit(node)
