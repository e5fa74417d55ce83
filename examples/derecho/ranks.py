# SPDX-License-Identifier: GPL-2.0-only
"""Code that the test programs share: start torch.distributed, choose the device, check results."""
import argparse
import os

import torch
import torch.distributed as dist

LOCAL_RANK_VARIABLES = ['LOCAL_RANK', 'PALS_LOCAL_RANKID', 'PMI_LOCAL_RANK', 'MPI_LOCALRANKID',
                        'OMPI_COMM_WORLD_LOCAL_RANK', 'SLURM_LOCALID']


class CheckFailed(Exception):
    """A check failed; the message says what was expected and what was found."""


def require(condition, what, expected, found):
    """
    Check something, even under `python -O`, which removes assertions.

    :param condition: whether the check passed
    :param what: text, what is checked
    :param expected: what was expected
    :param found: what was found
    :raises CheckFailed: if condition is false
    """
    if not condition:
        raise CheckFailed("%s: expected %s, found %s" % (what, expected, found))


def require_values(what, tensor, expected):
    """
    Check every element of a tensor.

    :param what: text, what is checked
    :param expected: value of every element
    :raises CheckFailed: if an element has another value
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
                        help="of torch.distributed (default: mpi); start the others through "
                             "conda-python-distributed, nccl and gloo also with torchrun")
    result.add_argument('--device', choices=['cuda', 'cpu'],
                        help="where tensors are (default: cuda if there are GPUs)")
    return result


def local_rank():
    """Number of this rank on its node; an error if no launcher sets it."""
    for name in LOCAL_RANK_VARIABLES:
        if os.environ.get(name):
            return int(os.environ[name])
    raise SystemExit("No launcher has set the local rank (one of %s). Start the program with mpiexec"
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
        # give each rank its own GPU, before any GPU is used
        device = torch.device('cuda', local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    return dist.get_rank(), dist.get_world_size(), device


def wait_for(device):
    """Wait for work on the GPU to finish: the MPI backend ignores CUDA streams."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
