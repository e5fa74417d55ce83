"""What the test programs share: start torch.distributed, choose the device."""
import argparse
import os

import torch
import torch.distributed as dist

LOCAL_RANK_VARIABLES = ['LOCAL_RANK', 'PALS_LOCAL_RANKID', 'PMI_LOCAL_RANK', 'MPI_LOCALRANKID',
                        'OMPI_COMM_WORLD_LOCAL_RANK', 'SLURM_LOCALID']


def parser(description):
    """Command line of a test program: --backend and --device."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument('--backend', choices=['mpi', 'nccl', 'gloo'], default='mpi',
                        help="of torch.distributed (default: mpi); nccl and gloo are started through "
                             "conda-python-distributed or torchrun")
    result.add_argument('--device', choices=['cuda', 'cpu'],
                        help="where tensors are (default: cuda if there are GPUs)")
    return result


def local_rank():
    """Number of this rank on its node; an error where no launcher says."""
    for name in LOCAL_RANK_VARIABLES:
        if os.environ.get(name):
            return int(os.environ[name])
    raise SystemExit("No launcher says which rank of its node this is: none of %s is set. Start it with mpiexec"
                     % ', '.join(LOCAL_RANK_VARIABLES))


def start(options):
    """
    Start torch.distributed.

    :return: rank, number of ranks, device of this rank
    """
    kind = options.device or ('cuda' if torch.cuda.is_available() else 'cpu')
    device = torch.device('cpu')
    if kind == 'cuda':
        # each rank its own GPU, before anything is on one
        device = torch.device('cuda', local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    return dist.get_rank(), dist.get_world_size(), device


def wait_for(device):
    """Wait for what runs on the GPU: the MPI backend does not look at CUDA's streams."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
