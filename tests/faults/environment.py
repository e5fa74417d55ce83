# SPDX-License-Identifier: GPL-2.0-only
"""Faults of variables."""

import shlex

from . import add_fault, fault

VARIABLES = {
    # what is exported: what --check must say
    'PYTHONHOME=/nonexistent': ('red', 'PYTHONHOME='),
    'PYTHONWARNINGS=error': ('nothing', ''),
    'LD_PRELOAD=/nonexistent.so': ('nothing', ''),
    'OMP_NUM_THREADS=abc': ('yellow', 'OMP_NUM_THREADS'),
    'OMP_NUM_THREADS=100000': ('yellow', 'OMP_NUM_THREADS'),
    'TORCH_NCCL_ASYNC_ERROR_HANDLIN=1': ('yellow', 'TORCH_NCCL_ASYNC_ERROR_HANDLIN'),
    'TORCH_NCCL_BLOCKING_WAIT=perhaps': ('yellow', 'TORCH_NCCL_BLOCKING_WAIT'),
    'TORCH_DISTRIBUTED_DEBUG=DETIAL': ('red', 'TORCH_DISTRIBUTED_DEBUG'),
    'TORCH_DISTRIBUTED_DEBUG=DETAIL': ('nothing', ''),
    'TORCH_CPP_LOG_LEVEL=LOUD': ('yellow', 'TORCH_CPP_LOG_LEVEL'),
    'TORCH_LOGS=dynmo': ('red', 'TORCH_LOGS'),
    'GLOO_SOCKET_IFNAM=eth0': ('yellow', 'GLOO_SOCKET_IFNAM'),
    'GLOO_DEVICE_TRANSPORT=TPC': ('red', 'GLOO_DEVICE_TRANSPORT'),
    'GLOO_DEVICE_TRANSPORT=IBVERBS': ('red', 'GLOO_DEVICE_TRANSPORT'),
    'PYTORCH_CUDA_ALLOC_CONF=expandable_segment:True': ('yellow', 'PYTORCH_CUDA_ALLOC_CONF'),
    'NCCL_IB_DISABEL=1': ('yellow', 'NCCL_IB_DISABEL'),
    'FI_PROVIDR=cxi': ('yellow', 'FI_PROVIDR'),
    'CUDA_VISIBLE_DEVICES=0,1': ('nothing', ''),
    'RANK=0': ('red', 'RANK=.?0'),
    'WORLD_SIZE=2': ('red', 'WORLD_SIZE=.?2'),
    'LOCAL_RANK=0': ('nothing', ''),    # where each task sees one GPU
    'SLURM_STEP_NODELIST= SLURM_JOB_NODELIST= SLURM_NODELIST=': ('red', 'SLURM_STEP_NODELIST'),
    'OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1':
        ('nothing', ''),
    'PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1': ('nothing', ''),
}
# srun would set these again
IN_RANKS = ('SLURM_',)

for exported, (colour, says) in VARIABLES.items():
    def variables(job, exported=exported):
        for word in shlex.split(exported):
            if word.startswith(IN_RANKS):
                job.rank(f'export {word}')
            else:
                name, _, value = word.partition('=')
                job.env[name] = value
    add_fault(exported, variables, f'export {exported}', colour, says)


def shadow(job, name, text=''):
    """A module of this name in a directory of PYTHONPATH."""
    (job.scratch / 'path').mkdir()
    (job.scratch / 'path' / f'{name}.py').write_text(text)
    job.env['PYTHONPATH'] = job.scratch / 'path'


@fault('red', 'PYTHONPATH')
def pythonpath_shadows_torch(job):
    """A directory of PYTHONPATH has a torch.py."""
    shadow(job, 'torch', 'something = 1\n')


@fault('red', 'PYTHONPATH')
def pythonpath_shadows_a_standard_module(job):
    """A directory of PYTHONPATH has a socket.py of another kind."""
    shadow(job, 'socket', 'plug = 1\n')


@fault('red', 'import|libstdc|LD_LIBRARY_PATH|libgomp')
def library_path_has_a_damaged_library(job):
    """A directory of LD_LIBRARY_PATH has a libstdc++.so.6 of 0 bytes."""
    (job.scratch / 'lib').mkdir()
    (job.scratch / 'lib/libstdc++.so.6').write_text('')
    job.env['LD_LIBRARY_PATH'] = job.scratch / 'lib'


@fault('yellow', 'NCCL_ALGO differs')
def variable_differs_between_nodes(job):
    """NCCL_ALGO is set on the second node alone."""
    job.rank('export NCCL_ALGO=Ring', 2)


@fault('nothing')
def recorder_of_an_older_module(job):
    """A module of an older PyTorch has set TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_FR_BUFFER_SIZE."""
    job.env.update(TORCH_NCCL_TRACE_BUFFER_SIZE='1000', TORCH_FR_BUFFER_SIZE='1000')


@fault('nothing')
def torchrun_by_the_runscript(job):
    """One task a node, --torchrun=2 starts the workers."""
    job.options, job.start = ['-N2', '--ntasks-per-node=1'], ['conda-python-distributed', '--torchrun=2']
