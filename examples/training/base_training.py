#!/usr/bin/env python
# SPDX-License-Identifier: GPL-2.0-only
"""
Train on one device, a GPU or the processor.

    python base_training.py
"""
import common


def main():
    args = common.parse_arguments()
    device = common.own_device()
    data = common.load_data(args.data)
    model = common.make_network(data, args.seed).to(device)
    optimizer = common.make_optimizer(model, args.lr)
    common.train(args, data, model, optimizer)
    common.save(model.state_dict(), args.output_dir)


if __name__ == '__main__':
    main()
