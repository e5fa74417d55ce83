# SPDX-License-Identifier: GPL-2.0-only
"""
Sample configuration for ReFrame, with the two emulated nodes of the tests (site `local`). Copy the lines marked with an
arrow into your own configuration (docs/activation.md). It uses the modules in MODULEPATH.
"""
site_configuration = {
    'systems': [{
        'name': 'emulated',
        'hostnames': ['.*'],
        'modules_system': 'lmod',
        'partitions': [{
            'name': 'gpu',
            'scheduler': 'squeue',      # 'slurm' if sacct works
            'launcher': 'srun',
            'access': ['--partition=gpu'],
            'environs': ['pytorch', 'pytorch_container'],
            'features': ['slingtorch'],                                                     # <--
            'extras': {'slingtorch': {'site': 'local', 'nodes': 2, 'ranks_per_node': 2}},   # <--
            # for one rank per GPU, use these instead of ranks_per_node:
            #   'devices': [{'type': 'gpu', 'num_devices': 8}],
            #   'resources': [{'name': '_rfm_gpu', 'options': ['--gpus-per-node={num_gpus_per_node}']}],
            'prepare_cmds': ['source "$(dirname "$LMOD_CMD")/../init/bash"'],
            'env_vars': [['GLOO_SOCKET_IFNAME', 'lo'], ['OMP_NUM_THREADS', '1']],
            'max_jobs': 2,
        }],
    }],
    'environments': [
        {
            'name': 'pytorch',
            'modules': ['PyTorch/2.13.0-local-cpu'],
            'features': ['slingtorch'],                                                     # <--
        },
        {
            'name': 'pytorch_container',
            'modules': ['PyTorch/2.13.0-cpu-python-3.11-singularity-debian12'],
            'features': ['slingtorch', 'slingtorch_container'],                             # <--
        },
    ],
}
