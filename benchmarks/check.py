#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""What `conda-python-distributed --check` costs at scale: bringing the findings of all ranks to rank 0.

    PYTHONPATH=. benchmarks/check.py [--json FILE] [--per-node 8] [--python PYTHON]

(a) With a PYTHON that has PyTorch: seconds from the moment when all nodes could come until the last one knows how it
    ended, and processor time of rank 0's process: it has PyTorch's store, takes what the nodes say of themselves and
    what they found, puts together what only all of them show, and writes the table. Four processes stand for the other
    nodes: clients and messages are real, there is no network, and all share this machine's cores.
(b) The header and the table of so many ranks on as many nodes of 8.
(c) With a PYTHON that has PyTorch: seconds and processor seconds until 8 ranks on two "nodes" of this machine have
    imported torch, with --check and without, by turns; the medians of three, and their ratio.
"""

import argparse
import hashlib
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import time

from slingtorch.job import check, findings, meet
from slingtorch.job.machine import Machine

RUNSCRIPT = pathlib.Path(__file__).resolve().parents[1] / 'runscripts/conda-python-distributed'


def free_port():
    """A port on which nothing listens."""
    with socket.socket() as attempt:
        attempt.bind(('', 0))
        return attempt.getsockname()[1]


def own_address():
    """An address of this machine that is not the loopback, which no job of several nodes may have."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attempt:
        attempt.connect(('192.0.2.1', 9))   # RFC 5737: nobody's; nothing is sent
        return attempt.getsockname()[0]


def environment(rank, ranks, per_node, port):
    """What conda-python-distributed gives a rank, and some variables of a Slingshot system."""
    return {
        'RANK': str(rank), 'WORLD_SIZE': str(ranks), 'LOCAL_RANK': str(rank % per_node), 'PATH': '/nowhere',
        'LOCAL_WORLD_SIZE': str(per_node), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port),
        'SLURM_JOB_ID': str(port), 'SLURM_STEP_ID': '0', 'SLURM_PROCID': str(rank), 'SLURM_STEP_NUM_TASKS': str(ranks),
        'SLURMD_NODENAME': f'nid{rank // per_node:06d}', 'NCCL_NET_GDR_LEVEL': 'PHB', 'NCCL_CROSS_NIC': '1',
        'FI_CXI_DEFAULT_CQ_SIZE': '131072', 'FI_CXI_DISABLE_HOST_REGISTER': '1', 'FI_MR_CACHE_MONITOR': 'userfaultfd',
    }


def start(python, checked):
    """(c): (seconds, processor seconds) for 8 ranks on two nodes, started by the runscript."""
    port, processes, begin, before = free_port(), [], time.perf_counter(), os.times()
    for rank in range(8):
        node = f'nid{rank // 4:06d}'
        env = {**environment(rank, 8, 4, port), 'PATH': f'{pathlib.Path(python).parent}:/usr/bin:/bin', 'HOME': '/',
               'SLURM_LOCALID': str(rank % 4), 'SLURM_NODEID': str(rank // 4), 'SLURM_STEP_TASKS_PER_NODE': '4(x2)',
               'SLURM_STEP_NODELIST': 'nid000000,nid000001', 'SLURMD_NODENAME': node, 'GLOO_SOCKET_IFNAME': 'lo',
               'OMP_NUM_THREADS': '1', 'MASTER_ADDR': own_address()}
        command = [RUNSCRIPT] + ['--check'] * checked + ['-c', 'import torch']
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    for process in processes:
        errors = process.communicate()[1]
        if process.returncode:
            sys.exit(errors.decode(errors='replace'))
    after = os.times()
    return (time.perf_counter() - begin,
            after.children_user + after.children_system - before.children_user - before.children_system)


def report_of(node, per_node):
    """What a node sends: 7 findings that all share, 32 facts, its name; 1.1 kB as of real nodes on 2026-11-25."""
    report = findings.Report()
    report.ranks = sum(1 << rank for rank in range(node * per_node, (node + 1) * per_node))
    words = hashlib.sha256
    for number in range(7):
        report.add('good', 'cores', f'a finding of some length about {words(b"%d" % number).hexdigest()} of all ranks')
    for number in range(32):
        report.fact(f'env NCCL_VARIABLE_{number}', words(b'%d' % number).hexdigest()[:30])
    report.fact('node', f'nid{node:06d}')
    return report


def other_nodes(nodes, per_node, environ, begin):
    """(a): these nodes, in this process. They come once `begin` (a descriptor) can be read."""
    texts = {node: report_of(node, per_node).dump().decode() for node in nodes}     # real nodes make them all at once
    stores = {node: meet.Store(environ, 60, False) for node in nodes}
    os.read(begin, 1)
    numbers, end = {}, time.monotonic() + 60
    for node, store in stores.items():
        numbers[node] = store.count('nodes', 1)
        store.put(f'come-{numbers[node]}', {'node': f'nid{node:06d}', 'rank': node * per_node, 'ranks': per_node,
                                            'ready': False})
    for node, store in stores.items():
        store.get('go', end)
        store.put(f'report-{numbers[node]}', json.loads(texts[node]))
    words = set()
    for store in stores.values():
        words.add(store.get('word', end))
        store.count('heard', 1)
    return words - {'0'}


def reduction(ranks, per_node, processes=4):
    """(a): seconds, processor seconds of rank 0, bytes of a report."""
    nodes, environ = max(1, ranks // per_node), environment(0, ranks, per_node, free_port())
    import torch.distributed    # noqa: F401, before the forks
    waits, go = os.pipe()
    listens, tells = os.pipe()
    pids = []
    for number in range(processes):
        pids.append(os.fork())
        if not pids[-1]:
            os.close(go)
            os.read(listens, 1)
            os._exit(bool(other_nodes(range(1 + number, nodes, processes), per_node, environ, waits)))
    store = meet.Store(environ, 60)
    os.write(tells, b'x' * processes)
    report, machine = report_of(0, per_node), Machine(environ)
    time.sleep(2)       # they open their clients
    begin, used, end = time.perf_counter(), time.process_time(), time.monotonic() + 60
    os.close(go)
    there = store.others(ranks - per_node, ranks, end)
    store.put('go', {'now': 0, 'nodes': nodes, 'go': False})
    free = (1 << ranks) - 1 & ~report.ranks
    for text in store.reports(list(there), end).values():
        other = findings.Report.load(text.encode('latin-1'), free)
        free &= ~other.ranks
        report.merge(other)
    check.check_job(report, machine, list(there.values()), (0, 0))
    text = report.text(check.header(report, 1))
    store.word('0', len(there))
    used = time.process_time() - used
    lost = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    seconds = time.perf_counter() - begin
    if lost or f'{ranks} ranks' not in text or report.having('red'):
        sys.exit(f'benchmarks/check.py: a node was lost\n{text}')
    return seconds, used, len(report_of(1, per_node).dump())


def table(ranks, per_node):
    """(b): seconds for header and table."""
    report = findings.Report()
    for node in range(ranks // per_node):
        report.ranks |= ((1 << per_node) - 1) << node * per_node
        report.fact('node', f'nid{node:06d}', ((1 << per_node) - 1) << node * per_node)
    report.add('red', 'cores', 'a finding', ranks=report.ranks // 3)
    begin = time.perf_counter()
    report.text(check.header(report, 1))
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', metavar='FILE')
    parser.add_argument('--per-node', type=int, default=8)
    parser.add_argument('--python', metavar='PYTHON', help='with PyTorch')
    parser.add_argument('--reduce', metavar='RANKS', type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    per_node = args.per_node
    if args.reduce:     # in the Python that has PyTorch
        print(json.dumps(reduction(args.reduce, per_node)), flush=True)
        os._exit(0)
    reductions, starts = [], {False: [], True: []}
    for ranks in (64, 1024, 4096) if args.python else ():
        # the store looks up the name of each address, which takes seconds where a name server does not answer
        alone = ['unshare', '-n', 'sh', '-c', 'ip link set lo up; exec "$@"', 'sh'] if os.geteuid() == 0 else []
        runs = [json.loads(subprocess.run(
            [*alone, args.python, __file__, '--per-node', str(per_node), '--reduce', str(ranks)], check=True,
            stdout=subprocess.PIPE).stdout) for _ in range(3)]
        seconds, used, size = (statistics.median(column) for column in zip(*runs))
        reductions.append({'ranks': ranks, 'nodes': ranks // per_node, 'bytes': size, 'seconds': seconds,
                           'cpu_of_rank_0': used})
    tables = {ranks: table(ranks, per_node) for ranks in (4096, 32768, 100000)}

    print(f'{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}\n')
    print('(a) the store            seconds   processor ms of rank 0   report of a node, bytes')
    for row in reductions:
        print(f'    {row["ranks"]:5} ranks, {row["nodes"]:3} nodes {row["seconds"]:10.2f}'
              f'   {1000 * row["cpu_of_rank_0"]:18.0f}   {row["bytes"]:18}')
    print('(b) header and table     ' + ', '.join(f'{ranks} ranks {took:.2f} s' for ranks, took in tables.items()))
    for checked in [False, True] * 3 if args.python else []:
        starts[checked].append(start(args.python, checked))
    if args.python:
        print('(c) 8 ranks on 2 nodes import torch   without    with --check    more   ratio')
        for number, what in enumerate(('seconds', 'processor seconds')):
            plain, checked = (statistics.median(run[number] for run in starts[which]) for which in (False, True))
            print(f'    {what:32} {plain:8.1f} {checked:15.1f} {checked - plain:7.1f} {checked / plain:7.2f}')
    if args.json:
        with open(args.json, 'w') as stream:
            json.dump({'cores': os.cpu_count(), 'load': os.getloadavg()[0], 'python': platform.python_version(),
                       'per_node': per_node, 'reductions': reductions, 'tables': tables,
                       'starts': [starts[False], starts[True]]}, stream, indent=1)


if __name__ == '__main__':
    main()
