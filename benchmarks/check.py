#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""What `conda-python-distributed --check` costs at scale: bringing the findings of all ranks to rank 0.

    PYTHONPATH=. benchmarks/check.py [--json FILE] [--ranks 8,64,256] [--per-node 8] [--python PYTHON]

(a) Real processes on this machine, forked so that Python's own start is not counted, no PyTorch: seconds from the first
    fork to the last end, and processor time per rank. All "nodes" share this machine's cores; those of a job do not.
(b) The star between nodes: rank 0 takes the calls, words and reports of all other nodes, puts together what only all of
    them show, writes the table, and tells them how it ended. Four processes stand for the other nodes: the messages
    and sockets are real, there is no network, and all share this machine's cores. Seconds from the first call until
    the last node knows, processor time of rank 0, and the length of one node's report. What a node does for itself
    before that is (a).
(c) With a PYTHON that has PyTorch: seconds and processor seconds until 8 ranks on two "nodes" of this machine have
    imported torch, with --check and without, by turns; the medians of three, and their ratio.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import time

from slingtorch.job import check, findings, star, wire
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
        report.add('good', 'name', f'a finding of some length about {words(b"%d" % number).hexdigest()} of all ranks')
    for number in range(32):
        report.fact(f'env NCCL_VARIABLE_{number}', words(b'%d' % number).hexdigest()[:30])
    report.fact('node', f'nid{node:06d}')
    return report


def other_nodes(nodes, per_node, port, key, begin):
    """(b): these nodes, in this process, as star.Branch does it. They call once `begin` (a descriptor) can be read."""
    reports = {node: report_of(node, per_node).dump() for node in nodes}    # real nodes make them at the same time
    os.read(begin, 1)
    connections = [wire.call('127.0.0.1', port, key, f'{per_node} {node * per_node} nid{node:06d}', 60)
                   for node in nodes]
    for connection in connections:
        connection.settimeout(60)
        wire.read_line(connection)
    for said in ((star.TRADE + 'handle').encode(), b'1'):
        wire.tell_all(connections, said)
        for connection in connections:
            wire.receive_message(connection, time.time() + 60)
    for node, connection in zip(nodes, connections):
        wire.send_message(connection, reports[node])
    return {wire.receive_message(connection, time.time() + 60) for connection in connections} - {b'0'}


def reduction(ranks, per_node, processes=4):
    """(b): seconds from the first call until the last node knows, processor seconds of rank 0, bytes of a report."""
    nodes, port = max(1, ranks // per_node), free_port()
    environ = environment(0, ranks, per_node, port)
    root = star.Root(environ, ranks - per_node, 20)
    waits, go = os.pipe()
    pids = []
    for number in range(processes):
        pids.append(os.fork())
        if not pids[-1]:
            os.close(go)
            os._exit(bool(other_nodes(range(1 + number, nodes, processes), per_node, port, root.key, waits)))
    report, machine = report_of(0, per_node), Machine(environ)
    time.sleep(0.5)     # they make their reports
    begin, used = time.perf_counter(), time.process_time()
    os.close(go)
    root.gather(lambda: '-')
    root.trade('handle', time.time() + 60)
    root.meet(True, time.time() + 60)
    root.collect(report, time.time() + 60)
    check.check_job(report, machine, root)
    text = report.text(check.header(report, 1))
    wire.tell_all([node.connection for node in root.nodes], b'0')
    used = time.process_time() - used
    lost = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    seconds = time.perf_counter() - begin
    if lost or f'{ranks} ranks' not in text or report.having('red'):
        sys.exit(f'benchmarks/check.py: a node was lost\n{text}')
    return seconds, used, len(report_of(1, per_node).dump())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', metavar='FILE')
    parser.add_argument('--ranks', default='8,64,256', help='real processes, default: %(default)s')
    parser.add_argument('--per-node', type=int, default=8)
    parser.add_argument('--python', metavar='PYTHON', help='with PyTorch, for (c)')
    args = parser.parse_args()
    per_node = args.per_node
    rows = []
    for ranks in map(int, args.ranks.split(',')):
        seconds, used = real(ranks, per_node)
        rows.append({'ranks': ranks, 'nodes': max(1, ranks // per_node), 'seconds': seconds, 'cpu_per_rank': used})
    reductions = []
    for ranks in (8, 64, 256, 1024, 4096):
        runs = [reduction(ranks, per_node) for _ in range(3)]
        seconds, used, size = (statistics.median(column) for column in zip(*runs))
        reductions.append({'ranks': ranks, 'nodes': ranks // per_node, 'bytes': size, 'seconds': seconds,
                           'cpu_of_rank_0': used})

    print(f'{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}\n')
    print(f'(a) real processes, {per_node} per node   seconds   processor ms per rank')
    for row in rows:
        print(f'    {row["ranks"]:5} ranks, {row["nodes"]:3} nodes    {row["seconds"]:8.2f}'
              f'   {1000 * row["cpu_per_rank"]:10.0f}')
    print('(b) the star             seconds   processor ms of rank 0   report of a node, bytes')
    for row in reductions:
        print(f'    {row["ranks"]:5} ranks, {row["nodes"]:3} nodes {row["seconds"]:10.2f}'
              f'   {1000 * row["cpu_of_rank_0"]:18.0f}   {row["bytes"]:18}')
    starts = {False: [], True: []}
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
                       'per_node': per_node, 'real': rows, 'reductions': reductions,
                       'starts': [starts[False], starts[True]]}, stream, indent=1)


if __name__ == '__main__':
    main()
