#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""What the runscripts cost: the start of a rank, and the first host of a long host list.

    benchmarks/runscripts.py [--json FILE] [--runs N]

(a) conda-python-distributed -c pass against python -c pass, alternating in the same run: milliseconds per start
    (median, after warm-up), and processes started besides Python (counted by strace, if it is there).
(b) get-master on 10,000 hosts in 100 bracket groups against `bash -c :`, alternating: milliseconds and largest
    resident set. The list once as 100 ranges (2 kB), once as 10,000 numbers (51 kB).
"""

import argparse
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

RUNSCRIPTS = pathlib.Path(__file__).resolve().parents[1] / 'runscripts'
GOALS = {'start of a rank, more than python (ms)': 25, 'get-master (ms)': 20, 'get-master (MB)': 20}


def environment(caches, rank):
    """A rank of an 8-rank Slurm step on two nodes, and nothing else of this machine but where Python is."""
    node = rank // 4
    path = f'{pathlib.Path(sys.executable).parent}:/usr/bin:/bin'
    # a plugin to be found: without one a job of two nodes is not started
    pathlib.Path(caches, 'libnccl-net.so').touch()
    return {
        'LD_LIBRARY_PATH': str(caches),
        'PATH': path,
        'SLINGTORCH_CACHE_ROOT': caches,
        'SLINGTORCH_GPU_VISIBILITY': 'CUDA_VISIBLE_DEVICES',
        'CUDA_VISIBLE_DEVICES': '0,1,2,3',
        'SLINGTORCH_MULTINODE_NCCL_NET': 'AWS Libfabric',
        'SLURM_JOB_ID': '4711',
        'SLURM_STEP_ID': '0',
        'SLURM_PROCID': str(rank),
        'SLURM_LOCALID': str(rank % 4),
        'SLURM_NODEID': str(node),
        'SLURM_STEP_NUM_TASKS': '8',
        'SLURM_NTASKS': '8',
        'SLURM_STEP_TASKS_PER_NODE': '4(x2)',
        'SLURM_STEP_NODELIST': 'nid[001-002]',
        'SLURM_JOB_NODELIST': 'nid[001-002]',
        'SLURMD_NODENAME': f'nid{node + 1:03d}',
    }


def alternate(commands, env, runs, warm_up=3):
    """Milliseconds of every run of every command, the commands by turns so that a busy machine hits all alike."""
    times = {name: [] for name in commands}
    for number in range(warm_up + runs):
        for name, command in commands.items():
            begin = time.perf_counter()
            subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
            if number >= warm_up:
                times[name].append((time.perf_counter() - begin) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def resident_megabytes(command):
    """Largest resident set of one run, in MB. A helper asks: the kernel keeps one maximum per parent."""
    helper = (
        'import resource, subprocess, sys\n'
        'subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n'
        'print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n'
    )
    done = subprocess.run(
        [sys.executable, '-S', '-c', helper, *command], check=True, stdout=subprocess.PIPE, universal_newlines=True
    )
    return int(done.stdout) / 1024


def processes(command, env, directory):
    """Processes that a command starts, or None without strace."""
    if not shutil.which('strace'):
        return None
    trace = pathlib.Path(directory, 'trace')
    subprocess.run(
        ['strace', '-f', '-qq', '-e', 'trace=clone,clone3,fork,vfork', '-o', str(trace), *command], env=env, check=True
    )
    return len(re.findall(r'(?m)\b(?:clone|clone3|fork|vfork)\(', trace.read_text()))


def machine():
    model = re.search(r'(?m)^model name\s*:\s*(.*)$', pathlib.Path('/proc/cpuinfo').read_text())
    bash = subprocess.run(['bash', '--version'], stdout=subprocess.PIPE, universal_newlines=True).stdout.splitlines()[0]
    return {
        'processor': model.group(1) if model else platform.machine(),
        'cpus': os.cpu_count(),
        'load': os.getloadavg()[0],
        'kernel': platform.release(),
        'bash': re.search(r'version (\S+)', bash).group(1),
        'python': platform.python_version(),
        'date': time.strftime('%Y-%m-%d'),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--json', metavar='FILE', help='write the figures here as well')
    parser.add_argument('--runs', type=int, default=20, help='runs of which the median is taken (default: %(default)s)')
    options = parser.parse_args()

    ranges = ','.join(f'rack{rack:02d}node[0000-0099]' for rack in range(100))
    numbers = ','.join(
        f'rack{rack:02d}node[{",".join("%04d" % number for number in range(100))}]' for rack in range(100)
    )
    rank, master = str(RUNSCRIPTS / 'conda-python-distributed'), str(RUNSCRIPTS / 'get-master')
    with tempfile.TemporaryDirectory() as directory:
        cold = processes([rank, '-c', 'pass'], environment(directory, 0), directory)
        figures = {'local rank 0, first start on the node': {'processes': cold}}
        for name, number in (('local rank 0', 0), ('any other local rank', 5)):
            env = environment(directory, number)
            subprocess.run([rank, '-c', 'pass'], env=env, check=True)
            times = alternate({'python': ['python', '-c', 'pass'], 'rank': [rank, '-c', 'pass']}, env, options.runs)
            figures[name] = {
                'ms': times['rank'],
                'python ms': times['python'],
                'more ms': times['rank'] - times['python'],
                'processes': processes([rank, '-c', 'pass'], env, directory),
            }
        commands = {
            'bash -c :': ['bash', '-c', ':'],
            'get-master, 100 ranges': [master, ranges],
            'get-master, 10,000 numbers': [master, numbers],
        }
        times = alternate(commands, environment(directory, 0), options.runs)
        hostlists = {name: {'ms': times[name], 'MB': resident_megabytes(command)} for name, command in commands.items()}

    result = {
        'machine': machine(),
        'runs': options.runs,
        'goals': GOALS,
        'start of a rank': figures,
        'first of 10,000 hosts': hostlists,
    }
    print(
        ', '.join(f'{key} {value}' for key, value in result['machine'].items()), f'; median of {options.runs}', sep=''
    )
    print(f'\n{"start of a rank (python -c pass)":40} {"ms":>8} {"python":>8} {"more":>8} {"processes":>10}')
    for name, row in figures.items():
        cells = [f'{row[key]:8.1f}' if key in row else f'{"":8}' for key in ('ms', 'python ms', 'more ms')]
        print(f'{name:40} {" ".join(cells)} {"?" if row["processes"] is None else row["processes"]:>10}')
    print(f'\n{"first of 10,000 hosts":40} {"ms":>8} {"MB":>8}')
    for name, row in hostlists.items():
        print(f'{name:40} {row["ms"]:8.1f} {row["MB"]:8.1f}')
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + '\n')
    missed = (
        max(row.get('more ms', 0) for row in figures.values()) > 25
        or max(row['ms'] for row in hostlists.values()) > 20
        or max(row['MB'] for row in hostlists.values()) > 20
    )
    print(
        '\ngoals: at most 25 ms more than python per rank; get-master at most 20 ms and 20 MB:',
        'MISSED' if missed else 'met',
    )


if __name__ == '__main__':
    main()
