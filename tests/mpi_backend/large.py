# SPDX-License-Identifier: GPL-2.0-only
"""By hand, on 2 ranks with 12 GB between them: more elements than an int counts, against what they must become.

    mpiexec -n 2 python large.py
"""
import torch
import torch.distributed as dist

from collectives import start

COUNT = (1 << 31) + 11


def made(rank, count):
    """0 to 99, over and over, and the rank added to it."""
    tensor = torch.empty(count, dtype=torch.uint8)
    rows = count // 100
    tensor[:rows * 100].view(rows, 100).copy_((torch.arange(100) + rank).to(torch.uint8))
    tensor[rows * 100:] = rank
    return tensor


def right(name, tensor, expected):
    assert torch.equal(tensor, expected), name
    if dist.get_rank() == 0:
        print(f'{name}: right, {tensor.numel()} elements', flush=True)


def main():
    rank = start(600)
    tensor = made(rank, COUNT)
    dist.all_reduce(tensor)
    tensor -= made(1, COUNT)
    right('all_reduce', tensor, made(0, COUNT))
    dist.broadcast(tensor if rank else tensor.add_(1), 0)
    right('broadcast', tensor, made(1, COUNT))
    if rank:
        dist.send(tensor, 0)
    else:
        tensor.zero_()
        dist.recv(tensor, 1)
        right('a message', tensor, made(1, COUNT))
    half = COUNT // 2 + 1
    whole = torch.empty(2 * half, dtype=torch.uint8)
    dist.all_gather_into_tensor(whole, made(rank, half))
    for source in range(2):
        right('all_gather_into_tensor', whole[source * half:(source + 1) * half], made(source, half))
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
