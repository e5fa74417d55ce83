# SPDX-License-Identifier: GPL-2.0-only
"""Run on 2 ranks: what slingmpi does with tensors whose streams are as late as they can be. $EMULATED: the extension.

MPI must say that it takes such memory, which is the host's: a library that answers so is preloaded. Or it does not, and SLINGMPI_HOST_STAGING=1 is set.
"""
import importlib.util
import os

import torch
import torch.distributed as dist

from collectives import start


def main():
    spec = importlib.util.spec_from_file_location('emulated_gpu', os.environ['EMULATED'])
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    rank = start(20)
    backend = dist.group.WORLD._get_backend(torch.device('cpu'))

    def late(value, device=0, stream=0):
        memory = torch.zeros(5)
        gpu.use_stream(device, stream)
        gpu.fill(memory, value, device)
        return memory, gpu.tensor(memory, device)
    # an operation has what its stream makes, on whichever device and stream
    for device, stream in ((0, 0), (1, 0), (1, 3)):
        memory, tensor = late(rank + 1, device, stream)
        backend.allreduce([tensor]).wait()
        assert memory.tolist() == [3] * 5, memory
    copied = gpu.copies()
    # messages with one tag arrive in order, each made by a stream of its own
    works, kept = [], []
    for number in range(3):
        kept.append(late(0 if rank else 7 + number, stream=0 if rank else number))
        works.append(backend.recv([kept[-1][1]], 0, 4) if rank else backend.send([kept[-1][1]], 1, 4))
    for work in works:
        work.wait()
    if rank:
        assert [memory[0].item() for memory, _ in kept] == [7, 8, 9]
    messages_copied = gpu.copies() - copied
    # a posted receive is not overwritten by what its own stream had been given before
    memory, tensor = late(5)
    (backend.recv if rank else backend.send)([tensor], 1 - rank, 6).wait()
    assert memory.tolist() == [5] * 5, memory
    # one operation, two devices
    try:
        backend.allreduce([late(1)[1], late(1, device=1)[1]])
    except RuntimeError as err:
        assert 'in one operation' in str(err), err
    else:
        raise AssertionError('two devices')
    # the group ends while an operation of it is on its way
    group = dist.new_group()
    memory, tensor = late(1)
    work = group._get_backend(torch.device('cpu')).allreduce([tensor])
    dist.destroy_process_group(group)
    work.wait()
    assert memory.tolist() == [2] * 5, memory
    # a result is there, whatever the stream has been given since; it lies there in columns
    memory = torch.zeros(2, 3)
    columns = gpu.tensor(memory, 0).t()
    gpu.use_stream(0, 0)
    gpu.fill(memory, 1, 0)
    work = backend.allreduce([columns])
    gpu.fill(memory, 9, 0)
    work.wait()
    assert memory.tolist() == [[2] * 3] * 2, memory
    # a future waits for what its callback gives the device
    memory, tensor = late(1)
    backend.allreduce([tensor]).get_future().then(lambda done: gpu.fill(memory, 7, 0) or done.value()).wait()
    assert memory.tolist() == [7] * 5, memory
    # a barrier is one for the device too
    memory, _ = late(3, 1, 2)
    backend.barrier(dist.BarrierOptions()).wait()
    assert memory.tolist() == [3] * 5, memory
    dist.barrier()
    print('emulated: right, copies of 3 collectives: %d, of 3 messages: %d' % (copied, messages_copied), flush=True)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
