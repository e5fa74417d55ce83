#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""
Horovod against DistributedDataParallel: examples/training, the same ranks and batches, by turns in one run.
To be run on processors with a PyTorch that has Horovod:

    module load PyTorch/2.13.0-local-cpu-horovod
    benchmarks/horovod.py --json horovod.json

Time per epoch is the difference of a long and a short training, divided by the epochs between them: start and end of a
job are in neither. Bytes are those that the loopback interface sends meanwhile: gloo uses it, MPI has shared memory
within a node. DistributedDataParallel over gloo is the baseline.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / 'examples/training'
SHORT = 2


def train(kind, ranks, epochs, launcher):
    """Train once: seconds of the whole job, and bytes that went over the loopback interface meanwhile."""
    program = EXAMPLES / ('horovod_training.py' if kind == 'horovod' else 'ddp_training.py')
    start = pathlib.Path(os.environ['RUNSCRIPTS']) / 'conda-python-distributed'
    with tempfile.TemporaryDirectory() as directory:
        command = [launcher, '-n', str(ranks), start, program, '--epochs', str(epochs), '--json', directory + '/json']
        env = dict(os.environ, OMP_NUM_THREADS='1', GLOO_SOCKET_IFNAME='lo')
        before, begin = loopback(), time.time()
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit('%s failed:\n%s' % (kind, done.stdout[-2000:]))
        seconds, sent = time.time() - begin, loopback() - before
    return seconds, sent, float(re.findall(r': loss (\S+)', done.stdout)[-1])


def loopback():
    """Bytes that the loopback interface has sent."""
    return int(pathlib.Path('/sys/class/net/lo/statistics/tx_bytes').read_text())


def main():
    parser = argparse.ArgumentParser(description="Horovod against DistributedDataParallel")
    parser.add_argument('--ranks', type=int, default=4)
    parser.add_argument('--epochs', type=int, default=12, help="of the long training")
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--launcher', default='mpiexec', help="of the MPI that Horovod was built with")
    parser.add_argument('--json', metavar='FILE')
    args = parser.parse_args()
    if not os.environ.get('RUNSCRIPTS'):
        sys.exit("benchmarks/horovod.py: $RUNSCRIPTS is not set: load a module of PyTorch that has Horovod")
    kinds = ['gloo', 'horovod']
    seconds, sent, losses = ({kind: [] for kind in kinds} for _ in range(3))
    for number in range(args.rounds):
        for kind in kinds[number % len(kinds):] + kinds[:number % len(kinds)]:
            short, long = (train(kind, args.ranks, epochs, args.launcher) for epochs in (SHORT, SHORT + args.epochs))
            seconds[kind].append((long[0] - short[0]) / args.epochs)
            sent[kind].append((long[1] - short[1]) / args.epochs / args.ranks)
            losses[kind].append(long[2])
    base = statistics.median(seconds[kinds[0]])
    head = ('%d ranks' % args.ranks, 's per epoch', 'ratio', 'loopback MB/epoch/rank', 'loss')
    print('%-22s %12s %8s %22s %8s' % head)
    rows = []
    for kind in kinds:
        row = {'kind': kind if kind == 'horovod' else 'DDP over ' + kind, 'seconds': statistics.median(seconds[kind]),
               'bytes': statistics.median(sent[kind]), 'loss': losses[kind][0], 'all': seconds[kind]}
        row['ratio'] = row['seconds'] / base
        rows.append(row)
        print('%-22s %12.3f %8.2f %22.2f %8.4f' % (
            row['kind'], row['seconds'], row['ratio'], row['bytes'] / 1e6, row['loss']))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({'ranks': args.ranks, 'rows': rows}, indent=1))


if __name__ == '__main__':
    main()
