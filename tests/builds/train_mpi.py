# SPDX-License-Identifier: GPL-2.0-only
"""Train a small model with DistributedDataParallel over the backend mpi: every rank ends with the same weights, and with
those that one rank with all the data gets. Started on several ranks by tests/builds/pytorch-debian."""
import torch
import torch.distributed as dist

STEPS, SAMPLES, FEATURES = 10, 48, 16


def train(model, data, target):
    """Plain gradient descent; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def main():
    """Train on all ranks and on this one alone, and compare."""
    torch.set_num_threads(1)
    dist.init_process_group('mpi')
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = torch.randn(SAMPLES, FEATURES)
    target = data.sum(dim=1, keepdim=True)
    alone = torch.nn.Linear(FEATURES, 1)
    shared = torch.nn.Linear(FEATURES, 1)
    shared.load_state_dict(alone.state_dict())
    losses = train(alone, data, target)
    parallel = torch.nn.parallel.DistributedDataParallel(shared)
    mine = slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size)
    train(parallel, data[mine], target[mine])
    if not torch.allclose(alone.weight, shared.weight, rtol=1e-4):
        raise SystemExit('rank %s: %s ranks do not have the weights of one' % (rank, size))
    if not losses[-1] < 0.8 * losses[0]:
        raise SystemExit('the loss does not fall: %s' % losses)
    dist.barrier()
    if rank == 0:
        print('DistributedDataParallel over mpi: %s ranks have the weights of one, loss %.4f to %.4f'
              % (size, losses[0], losses[-1]))
    del parallel
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
