# SPDX-License-Identifier: GPL-2.0-only
"""What the test programs share: start torch.distributed, choose the device, check results."""
import argparse
import os

import torch
import torch.distributed as dist

LOCAL_RANK_VARIABLES = ['LOCAL_RANK', 'PALS_LOCAL_RANKID', 'PMI_LOCAL_RANK', 'MPI_LOCALRANKID',
                        'OMPI_COMM_WORLD_LOCAL_RANK', 'SLURM_LOCALID']


class CheckFailed(Exception):
    """Something is not as it must be; the message says what was expected and what was found."""


def require(condition, what, expected, found):
    """
    Check something, also under `python -O`, which leaves assertions out.

    :param condition: whether it is as it must be
    :param what: text, what is checked
    :param expected: what it must be
    :param found: what it is
    :raises CheckFailed: if condition is false
    """
    if not condition:
        raise CheckFailed("%s: expected %s, found %s" % (what, expected, found))


def require_values(what, tensor, expected):
    """
    Check every element of a tensor.

    :param what: text, what is checked
    :param expected: value that each must have
    :raises CheckFailed: if one has another
    """
    wait_for(tensor.device)
    wrong = tensor[tensor != expected]
    if wrong.numel():
        require(False, what, "%s in all %s elements" % (expected, tensor.numel()),
                "%s others, the first is %s" % (wrong.numel(), wrong[0].item()))


def parser(description):
    """Command line of a test program: --backend and --device."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument('--backend', choices=['mpi', 'nccl', 'gloo', 'slingmpi'], default='mpi',
                        help="of torch.distributed (default: mpi); the others are started through "
                             "conda-python-distributed, nccl and gloo also by torchrun")
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
        require(torch.cuda.is_available(), "this node", "GPUs", "none")
        # each rank its own GPU, before anything is on one
        device = torch.device('cuda', local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    return dist.get_rank(), dist.get_world_size(), device


def wait_for(device):
    """Wait for what runs on the GPU: the MPI backend does not look at CUDA's streams."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
