#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""What `conda-python-distributed --check` costs at scale: bringing the findings of all ranks to rank 0.

    benchmarks/check.py [--json FILE] [--ranks 8,64,256] [--per-node 8] [--python PYTHON]

(a) Real processes on this machine, forked so that Python's own start is not counted, no PyTorch: seconds from the first
    fork to the last end, and processor time per rank. All "nodes" share this machine's cores; those of a job do not.
(b) Processor time of the parts: a node that calls rank 0's (both ends), one merge; the length of a message.
(c) A model to 4,096 ranks, no measurement: the calls of all nodes at rank 0's, then per level of the tree a round trip
    (0.1 ms assumed) and the merges of 8 children. The calls grow with the number of nodes.
(d) With a PYTHON that has PyTorch: seconds until 8 ranks on two "nodes" of this machine have imported torch, with
    --check and without, by turns; the medians of three.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time

RUNSCRIPT = pathlib.Path(__file__).resolve().parents[1] / 'runscripts/conda-python-distributed'
sys.path.insert(0, str(RUNSCRIPT.parents[1]))
from slingtorch.job import check, findings, tree_copy, wire  # noqa: E402
from slingtorch.job.machine import Machine  # noqa: E402

ROUND_TRIP = 0.0001


def free_port():
    """A port on which nothing listens."""
    with socket.socket() as attempt:
        attempt.bind(('', 0))
        return attempt.getsockname()[1]


def environment(rank, ranks, per_node, port):
    """What conda-python-distributed gives a rank, and some variables of a Slingshot system."""
    return {
        'RANK': str(rank), 'WORLD_SIZE': str(ranks), 'LOCAL_RANK': str(rank % per_node), 'PATH': '/nowhere',
        'LOCAL_WORLD_SIZE': str(per_node), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port),
        'SLURM_JOB_ID': str(port), 'SLURM_STEP_ID': '0', 'SLURM_PROCID': str(rank), 'SLURM_STEP_NUM_TASKS': str(ranks),
        'SLURMD_NODENAME': f'nid{rank // per_node:06d}', 'NCCL_NET_GDR_LEVEL': 'PHB', 'NCCL_CROSS_NIC': '1',
        'FI_CXI_DEFAULT_CQ_SIZE': '131072', 'FI_CXI_DISABLE_HOST_REGISTER': '1', 'FI_MR_CACHE_MONITOR': 'userfaultfd',
    }


def real(ranks, per_node):
    """(a): seconds, processor seconds per rank."""
    port, pids, begin, before = free_port(), [], time.perf_counter(), os.times()
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    status = check.run(Machine(environment(rank, ranks, per_node, port)), out)
                    if rank == 0 and f'{ranks} ranks' not in out.getvalue():
                        sys.stderr.write(out.getvalue())
            finally:
                os._exit(status)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begin, used / ranks


def start(python, checked):
    """(d): seconds for 8 ranks on two nodes, started by the runscript."""
    port, processes, begin = free_port(), [], time.perf_counter()
    for rank in range(8):
        node = f'nid{rank // 4:06d}'
        env = {**environment(rank, 8, 4, port), 'PATH': f'{pathlib.Path(python).parent}:/usr/bin:/bin', 'HOME': '/',
               'SLURM_LOCALID': str(rank % 4), 'SLURM_NODEID': str(rank // 4), 'SLURM_STEP_TASKS_PER_NODE': '4(x2)',
               'SLURM_STEP_NODELIST': 'nid000000,nid000001', 'SLURMD_NODENAME': node, 'GLOO_SOCKET_IFNAME': 'lo',
               'OMP_NUM_THREADS': '1'}
        command = [RUNSCRIPT] + ['--check'] * checked + ['-c', 'import torch']
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    for process in processes:
        errors = process.communicate()[1]
        if process.returncode:
            sys.exit(errors.decode(errors='replace'))
    return time.perf_counter() - begin


def report_of(ranks, per_node):
    """What a tree brings up for so many ranks: 12 findings that all share, some per local rank, 25 facts, the nodes."""
    report = findings.Report()
    report.ranks = (1 << ranks) - 1
    for number in range(12):
        report.add('good', 'name', f'a finding of some length about the variable NCCL_NUMBER_{number} of all ranks')
    for number in range(25):
        report.fact(f'env NCCL_VARIABLE_{number}', 'value')
    for rank in range(ranks):
        report.fact('node', f'nid{rank // per_node:06d}', 1 << rank)
    return report


def calls(count):
    """(b): processor seconds per node that calls rank 0's and is told its place, of both ends."""
    port = free_port()
    environ = environment(0, count + 1, 1, port)
    root = wire.Root(environ, count, 20)
    connections = []

    def call():
        for number in range(1, count + 1):
            connections.append(tree_copy.call(
                '127.0.0.1', port, root.key, f'1 1 {number} nid{number:06d}', 20))

    thread = threading.Thread(target=call)
    begin = time.process_time()
    thread.start()
    root.gather(lambda: '-')
    thread.join()
    seconds = time.process_time() - begin
    for connection in connections:
        connection.close()
    return seconds / count


def merges(ranks, per_node):
    """(b): processor seconds to read and merge one report, and its bytes."""
    data, times = report_of(ranks, per_node).dump(), []
    for _ in range(5):
        whole, begin = report_of(ranks, per_node), time.process_time()
        whole.merge(findings.Report.load(data))
        times.append(time.process_time() - begin)
    return statistics.median(times), len(data)


def model(ranks, per_node, per_call):
    """(c): seconds of the reduction alone."""
    nodes = max(1, ranks // per_node)
    seconds, below = (nodes - 1) * per_call, nodes
    while below > 1:
        below = -(-below // tree_copy.FANOUT)
        merge, _ = merges(max(per_node, ranks // max(1, below) // tree_copy.FANOUT), per_node)
        seconds += ROUND_TRIP + tree_copy.FANOUT * merge
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', metavar='FILE')
    parser.add_argument('--ranks', default='8,64,256', help='real processes, default: %(default)s')
    parser.add_argument('--per-node', type=int, default=8)
    parser.add_argument('--python', metavar='PYTHON', help='with PyTorch, for (d)')
    args = parser.parse_args()
    per_node = args.per_node
    rows = []
    for ranks in map(int, args.ranks.split(',')):
        seconds, used = real(ranks, per_node)
        rows.append({'ranks': ranks, 'nodes': max(1, ranks // per_node), 'seconds': seconds, 'cpu_per_rank': used})
    per_call = calls(256)
    modelled = []
    for ranks in (8, 64, 256, 1024, 4096):
        merge, size = merges(ranks, per_node)
        modelled.append({'ranks': ranks, 'nodes': ranks // per_node, 'bytes': size, 'merge': merge,
                         'seconds': model(ranks, per_node, per_call)})

    print(f'{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}\n')
    print(f'(a) real processes, {per_node} per node   seconds   processor ms per rank')
    for row in rows:
        print(f'    {row["ranks"]:5} ranks, {row["nodes"]:3} nodes    {row["seconds"]:8.2f}'
              f'   {1000 * row["cpu_per_rank"]:10.0f}')
    print(f'(b) a node that calls rank 0\'s: {1e6 * per_call:.0f} us')
    print('(c) model of the reduction     ms    whole report, bytes    one merge, ms')
    for row in modelled:
        print(f'    {row["ranks"]:5} ranks, {row["nodes"]:3} nodes {1000 * row["seconds"]:8.1f}   {row["bytes"]:10}'
              f'             {1000 * row["merge"]:8.2f}')
    starts = {False: [], True: []}
    for checked in [False, True] * 3 if args.python else []:
        starts[checked].append(start(args.python, checked))
    if args.python:
        plain, checked = (statistics.median(starts[which]) for which in (False, True))
        print(f'(d) 8 ranks on 2 nodes import torch: {plain:.1f} s, with --check {checked:.1f} s')
    if args.json:
        with open(args.json, 'w') as stream:
            json.dump({'cores': os.cpu_count(), 'load': os.getloadavg()[0], 'python': platform.python_version(),
                       'per_node': per_node, 'real': rows, 'per_call': per_call, 'model': modelled,
                       'round_trip': ROUND_TRIP, 'starts': [starts[False], starts[True]]}, stream, indent=1)


if __name__ == '__main__':
    main()
