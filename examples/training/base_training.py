#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Train on one device, a GPU or the processor.

    python base_training.py
"""
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import common


def main():
    args = common.parse_arguments()
    device = torch.device('cuda') if torch.cuda.is_available() else torch.device('cpu')

    data = common.load_data(args.data)
    torch.manual_seed(args.seed)
    model = common.make_network(data).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(1, args.epochs + 1):
        batches = common.Batches(len(data), args.batch_size, args.seed + epoch)
        total = torch.zeros((), device=device)
        for step, (images, labels) in enumerate(DataLoader(data, batch_size=None, sampler=batches)):
            size = min(args.batch_size, len(data) - step * args.batch_size)
            loss = cross_entropy(model(images.to(device)), labels.to(device), reduction='sum')
            optimizer.zero_grad()
            (loss / size).backward()
            optimizer.step()
            total += loss.detach()
        loss = total.item() / len(data)
        common.check_loss(loss, epoch)
        print('epoch %d loss %.6f' % (epoch, loss), flush=True)

    common.save(model.state_dict(), args.output_dir)
    print('final loss %.6f' % loss)


if __name__ == '__main__':
    main()
