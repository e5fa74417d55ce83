# SPDX-License-Identifier: GPL-2.0-only
"""A training of some seconds, with what real ones do: train.py DIRECTORY [--only-start]

Data comes from a worker process through /dev/shm, gradients of 2 MB go over the nodes, each node fills a cache where
Hugging Face's libraries put theirs, each rank writes a temporary file, and rank 0 a checkpoint.
"""
import os
import sys
import tempfile

import shapes       # lies beside this file

if sys.argv[2:]:
    sys.stdout.write('started\n')
    sys.stdout.flush()
    os._exit(0)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

STEPS = 8
MEGABYTE = b'x' * 1_000_000


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS * 8

    def __getitem__(self, number):
        return torch.arange(shapes.INPUTS) % (number + 2) / 10


dist.init_process_group('gloo')
rank, size = dist.get_rank(), dist.get_world_size()
cache = os.environ.get('HF_HOME') or os.path.join(
    os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'), 'huggingface')
if os.environ['LOCAL_RANK'] == '0':
    os.makedirs(cache, exist_ok=True)
    with open(os.path.join(cache, f'model-{os.uname().nodename}'), 'wb') as stream:
        stream.write(MEGABYTE)
with tempfile.TemporaryFile() as stream:
    stream.write(MEGABYTE)
torch.manual_seed(1)
weights = torch.randn(shapes.INPUTS, shapes.OUTPUTS, requires_grad=True)
loader = torch.utils.data.DataLoader(Samples(), batch_size=8, num_workers=1)
for step, batch in enumerate(loader, 1):
    loss = ((batch + rank) @ weights).pow(2).mean()
    gradient, = torch.autograd.grad(loss, weights)
    dist.all_reduce(gradient)
    weights.data -= 0.001 * gradient / size
    if rank == 0:
        print(f'step {step}', flush=True)
dist.all_reduce(loss := loss.detach())
if rank == 0:
    torch.save(weights, os.path.join(sys.argv[1], 'weights.pt'))
    print(f'loss {loss.item():.1f}', flush=True)
dist.barrier()
sys.stdout.flush()
os._exit(0)     # as examples/training/ddp_training.py ends, for the reason given there
