#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""What `conda-python-distributed --check` costs, with a Python that has PyTorch:

    PYTHON benchmarks/check.py [--json FILE]

(a) Bringing the findings of 64, 1,024 and 4,096 ranks, 8 on a node, to rank 0: seconds from the moment when all nodes
    come until the last one has the verdict, and processor time of rank 0's process. Store, clients and messages are
    real; four processes stand for the other nodes, there is no network, and all share this machine's cores. Medians of
    three.
(b) Seconds for the header and the table of so many ranks.
(c) Seconds until 8 ranks on two "nodes" of this machine have imported torch, with --check and without, by turns; the
    medians of five, and their ratio.
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
import types

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slingtorch.job import check, findings, meet    # noqa: E402
from slingtorch.job.machine import Machine          # noqa: E402

PER_NODE, PROCESSES, LIMIT = 8, 4, 120


def free_port():
    """A port on which nothing listens."""
    with socket.socket() as attempt:
        attempt.bind(('', 0))
        return attempt.getsockname()[1]


def report_of(node):
    """What a node of 8 ranks finds: 7 findings that all share, 32 variables, its name."""
    report = findings.Report()
    report.ranks = ((1 << PER_NODE) - 1) << node * PER_NODE
    digest = [hashlib.sha256(b'%d' % number).hexdigest() for number in range(32)]
    for text in digest[:7]:
        report.add('good', 'cores', f'a finding of some length about {text} of all ranks')
    for number, text in enumerate(digest):
        report.fact(f'env NCCL_VARIABLE_{number}', text[:30])
    report.fact('node', f'nid{node:06d}')
    return report


def other_nodes(nodes, environ, begin):
    """(a): these nodes, in this process; they come once `begin` (a descriptor) can be read."""
    reports = {node: report_of(node).dump() for node in nodes}
    stores = {node: meet.Store(environ, LIMIT, False) for node in nodes}
    os.read(begin, 1)
    end = time.monotonic() + LIMIT
    for node, store in stores.items():
        store.number = store.count('nodes', 1)
        store.put(f'come-{store.number}', {'node': f'nid{node:06d}', 'rank': node * PER_NODE, 'ranks': PER_NODE})
    for node, store in stores.items():
        store.get('go', end)
        store.put(f'report-{store.number}', reports[node])
    for store in stores.values():
        assert store.get('word', end) == '0'
        store.count('heard', 1)


def reduction(ranks):
    """(a): [seconds, processor seconds of rank 0, bytes of a report]."""
    environ = {'RANK': '0', 'WORLD_SIZE': str(ranks), 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': str(PER_NODE),
               'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    import torch.distributed    # noqa: F401, before the forks
    (waits, go), (listens, tells), pids = os.pipe(), os.pipe(), []
    for number in range(PROCESSES):
        pids.append(os.fork())
        if not pids[-1]:
            status = 1
            try:
                os.close(go)
                os.read(listens, 1)
                other_nodes(range(1 + number, ranks // PER_NODE, PROCESSES), environ, waits)
                status = 0
            finally:
                os._exit(status)
    store = meet.Store(environ, LIMIT)
    os.write(tells, b'x' * PROCESSES)
    time.sleep(3)       # they open their clients
    rank = types.SimpleNamespace(report=report_of(0), environ=environ, machine=Machine(environ), world=ranks,
                                 seconds=LIMIT, several=True)
    begin, used, end = time.perf_counter(), time.process_time(), time.monotonic() + LIMIT
    os.close(go)
    rank.nodes = store.others(ranks - PER_NODE, ranks, end)
    store.put('go', {'now': 0, 'nodes': len(rank.nodes) + 1, 'go': False})
    check.collect(rank, types.SimpleNamespace(found={}, ask=lambda key, seconds, wanted: store.reports(wanted, end)))
    check.check_job(rank)
    text = rank.report.text(check.header(rank.report, 1))
    store.word('0', len(rank.nodes))
    used = time.process_time() - used
    lost = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    seconds = time.perf_counter() - begin
    if lost or f'{ranks} ranks' not in text or rank.report.having('red'):
        sys.exit(f'benchmarks/check.py: a node was lost\n{text}')
    return [seconds, used, len(json.dumps(report_of(1).dump()))]


def table(ranks):
    """(b): seconds for header and table."""
    report = findings.Report()
    report.ranks = (1 << ranks) - 1
    for node in range(ranks // PER_NODE):
        report.fact('node', f'nid{node:06d}', ((1 << PER_NODE) - 1) << node * PER_NODE)
    report.add('red', 'cores', 'a finding', ranks=report.ranks // 3)
    begin = time.perf_counter()
    report.text(check.header(report, 1))
    return time.perf_counter() - begin


def start(checked):
    """(c): [seconds, processor seconds] for 8 ranks on two nodes, started by the runscript."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attempt:
        attempt.connect(('192.0.2.1', 9))   # RFC 5737: nobody's; nothing is sent
        own = attempt.getsockname()[0]      # a job of several nodes may not have the loopback
    port, processes, begin, before = str(free_port()), [], time.perf_counter(), os.times()
    for rank in range(8):
        env = {'PATH': f'{os.path.dirname(sys.executable)}:/usr/bin:/bin', 'HOME': '/', 'OMP_NUM_THREADS': '1',
               'MASTER_ADDR': own, 'MASTER_PORT': port, 'GLOO_SOCKET_IFNAME': 'lo', 'SLURM_JOB_ID': port,
               'SLURM_STEP_ID': '0', 'SLURM_PROCID': str(rank), 'SLURM_STEP_NUM_TASKS': '8',
               'SLURM_LOCALID': str(rank % 4), 'SLURM_NODEID': str(rank // 4), 'SLURM_STEP_TASKS_PER_NODE': '4(x2)',
               'SLURM_STEP_NODELIST': 'nid000000,nid000001', 'SLURMD_NODENAME': f'nid{rank // 4:06d}'}
        command = [ROOT / 'runscripts/conda-python-distributed'] + ['--check'] * checked + ['-c', 'import torch']
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    for process in processes:
        errors = process.communicate()[1]
        if process.returncode:
            sys.exit(errors.decode(errors='replace'))
    after = os.times()
    return [time.perf_counter() - begin,
            after.children_user + after.children_system - before.children_user - before.children_system]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', metavar='FILE')
    parser.add_argument('--reduce', metavar='RANKS', type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reduce:
        print(json.dumps(reduction(args.reduce)), flush=True)
        os._exit(0)
    # the store looks up the name of each address, which takes seconds where a name server does not answer
    alone = ['unshare', '-n', 'sh', '-c', 'ip link set lo up; exec "$@"', 'sh'] if os.geteuid() == 0 else []
    found = {'cores': os.cpu_count(), 'load': os.getloadavg()[0], 'python': platform.python_version(), 'reductions': {}}
    print('%(cores)d cores, load %(load).1f, Python %(python)s' % found)
    print('\n(a) ranks  nodes   seconds   processor ms of rank 0   bytes of a report')
    for ranks in (64, 1024, 4096):
        runs = [json.loads(subprocess.run([*alone, sys.executable, __file__, '--reduce', str(ranks)], check=True,
                                          stdout=subprocess.PIPE).stdout) for _ in range(3)]
        seconds, used, size = found['reductions'][ranks] = [statistics.median(column) for column in zip(*runs)]
        print(f'   {ranks:6} {ranks // PER_NODE:6} {seconds:9.2f} {1000 * used:24.0f} {size:19}')
    found['tables'] = {ranks: table(ranks) for ranks in (4096, 32768, 100000)}
    print('\n(b) ' + ', '.join(f'{ranks} ranks: {took:.2f} s' for ranks, took in found['tables'].items()))
    starts = {False: [], True: []}
    for checked in [False, True] * 5:
        starts[checked].append(start(checked))
    print('\n(c) 8 ranks on 2 nodes   without   with --check    more   ratio')
    found['starts'] = {}
    for what, plain, checked in zip(('seconds', 'processor seconds'), zip(*starts[False]), zip(*starts[True])):
        plain, checked = statistics.median(plain), statistics.median(checked)
        found['starts'][what] = [plain, checked]
        print(f'    {what:20} {plain:8.1f} {checked:14.1f} {checked - plain:7.1f} {checked / plain:7.2f}')
    if args.json:
        with open(args.json, 'w') as stream:
            json.dump(found, stream, indent=1)


if __name__ == '__main__':
    main()
