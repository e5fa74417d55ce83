#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""
What staging an environment costs and saves (docs/runscripts.md). Needs a PyTorch that was installed with
'environment_image = True', strace, squashfuse, and for (b) and (c) root and the tests' emulated Slurm nodes:

    PYTHONPATH=tests benchmarks/staging.py --environment $EBROOTPYTORCH --json staging.json
    benchmarks/staging.py                                            only (d), which tools/pictures.py draws

(a) metadata calls of `import torch` to where environment, interpreter and runscripts are installed, per rank: the plain
    environment against the staged one. Goal: at most 50 staged.
(b) one `srun` that stages the image to two nodes, against one with plain `sbcast` of the same file. Goal: 1.3 times.
(c) the start of 8 ranks on two nodes, `import torch` in each: staged against plain, both on the local disk.
(d) a model of the time to bring an image to N nodes, beside published figures.

Everything is alternated in the same run; median of --rounds.
"""
import argparse
import collections
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
START = ROOT / 'runscripts/conda-python-distributed'
CALLS = {'open': 'open,openat', 'stat': 'stat,lstat,newfstatat,statx', 'readlink': 'readlink,readlinkat',
         'getdents': 'getdents,getdents64', 'access': 'access,faccessat,faccessat2'}
GOALS = {'calls': 50, 'staging': 1.3, 'start': 1.0}

# bytes/s and seconds; what the curves are drawn with
MODEL = {'bandwidth': 1.0e9, 'fanout': 8, 'block': 8e6, 'latency': 1e-3, 'sha256': 0.5e9, 'mount': 0.1}
# seconds by nodes; whose they are: docs/verification.md
PUBLISHED = {
    'ezpz, tarball of 8 GB': {8: 70, 256: 133, 1024: 255, 4096: 751},
    'Aurora, imports from Lustre': {64: 78, 2048: 120},
    'Aurora, imports through Copper': {64: 24, 2048: 57},
    'OLCF, staged': {8: 44},
    'OLCF, from NFS': {8: 236},
}


def bare_environment(root):
    """Environment of a job that loaded the module of the PyTorch in this directory."""
    return {'PATH': f'{root}/bin:/usr/bin:/bin', 'VIRTUAL_ENV': str(root), 'PYTHONNOUSERSITE': '1',
            'HOME': '/nonexistent', 'SLINGTORCH_ENVIRONMENT_IMAGE': f'{root}/environment.squashfs'}


def count_calls(trace, shared):
    """Metadata calls in a trace of strace --decode-fds by kind; only those on paths below one of `shared`."""
    names = {name: kind for kind, calls in CALLS.items() for name in calls.split(',')}
    found = dict.fromkeys(CALLS, 0)
    for line in trace.read_text(errors='replace').splitlines():
        match = re.match(r'(?:\d+\s+)?(\w+)\((.*)', line)
        if match and match.group(1) in names and any(path in match.group(2) for path in shared):
            found[names[match.group(1)]] += 1
    return dict(found, total=sum(found.values()))


def metadata_calls(root, directory):
    """Calls of the plain environment's rank, and of both ranks of a staged node: the first one does the staging."""
    python = (root / 'bin/python').resolve()
    shared = [str(root), str(python.parents[1]), str(ROOT)]
    env = {**bare_environment(root), 'SLINGTORCH_STAGE_DIR': directory, 'TMPDIR': directory, 'RANK': '0',
           'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '2', 'SLURM_JOB_ID': '1', 'MASTER_PORT': '29999'}
    result = {}
    for name, options in (('plain', []), ('staged', ['--stage'])):
        started = []
        for rank in '01':
            trace = pathlib.Path(directory, f'{name}{rank}')
            command = ['strace', '-f', '-y', '-qq', '-s', '4096', '-e',
                       'trace=' + re.sub(r'(\w+)', r'?\1', ','.join(CALLS.values())), '-o', str(trace),
                       str(START), *options, '-c', 'import torch']
            started.append((trace, subprocess.Popen(command, env=dict(env, RANK=rank, LOCAL_RANK=rank), cwd='/')))
        for rank, (trace, process) in enumerate(started):
            if process.wait():
                sys.exit(f'staging.py: {process.args} ended with status {process.returncode}')
            who = 'any other rank' if rank else 'first rank of the node'
            result[f'{name}, {who}'] = count_calls(trace, shared)
    return result


def wall(slurm, *arguments, env):
    """Seconds of an srun, and its output."""
    begin = time.perf_counter()
    done = slurm.srun('-Q', '-N2', *arguments, env=env, timeout=500)
    return time.perf_counter() - begin, done


def on_slurm(root, rounds):
    """(b) and (c): lists of seconds."""
    from testbed.slurm import Cluster
    times = collections.defaultdict(list)
    image = root / 'environment.squashfs'
    code = 'import time; t = time.time(); import torch; print(time.time() - t)'
    cluster = Cluster().start()
    try:
        env = {**bare_environment(root), 'SLINGTORCH_STAGE_DIR': str(cluster.local), 'OMP_NUM_THREADS': '1'}
        os.sync()
        image.read_bytes()  # in the page cache for all alike
        for number in range(rounds):
            target = f'{cluster.local}/plain{number}'
            plain = f'[[ $SLURM_PROCID != 0 ]] || sbcast {image} {target}'
            times['sbcast'].append(wall(cluster, '--ntasks-per-node=1', 'bash', '-c', plain, env=env)[0])
            wall(cluster, '--ntasks-per-node=1', 'rm', target, env=env)
            times['staging'].append(wall(cluster, '--ntasks-per-node=1', START, '--stage', '-c', 'pass', env=env)[0])
            for name, options in (('plain', []), ('staged', ['--stage'])):
                seconds, done = wall(cluster, '--ntasks-per-node=4', START, *options, '-c', code, env=env)
                times[f'{name}: whole step'].append(seconds)
                times[f'{name}: import torch'].append(max(map(float, done.stdout.split())))
    finally:
        cluster.stop()
    return {name: statistics.median(values) for name, values in times.items()}


def model(nodes, size, bandwidth=MODEL['bandwidth'], fanout=MODEL['fanout']):
    """
    Seconds to bring a file to the storage of so many nodes and to check it there.

    sbcast sends blocks of 8 MB through a tree (sbcast(1), --size and --fanout), each node to `fanout` others over its
    one link. Assumed: the next block starts when all nodes have this one. The nodes check and mount at the same time.

    :param size: bytes of the file
    :param bandwidth: of a node's link or its storage, whichever is slower: bytes/s
    """
    levels = max(1, math.ceil(math.log(nodes * (fanout - 1) + 1, fanout)) - 1) if nodes > 1 else 1
    per_block = levels * (min(fanout, nodes) * MODEL['block'] / bandwidth + MODEL['latency'])
    return math.ceil(size / MODEL['block']) * per_block + size / MODEL['sha256'] + MODEL['mount']


def main():
    """Measure, print tables, write JSON; status 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--environment', type=pathlib.Path, metavar='DIR', help='an installation with an image')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--json', metavar='FILE')
    options = parser.parse_args()
    if not options.environment:
        print('%8s %14s %14s %18s' % ('nodes', '8 GB, 1 GB/s', '0.3 GB, 1 GB/s', '0.3 GB, 0.2 GB/s'))
        for nodes in (2, 8, 64, 256, 1024, 4096):
            seconds = model(nodes, 8e9), model(nodes, 0.3e9), model(nodes, 0.3e9, 0.2e9)
            print('%8d %14.1f %14.1f %18.1f' % (nodes, *seconds))
        return
    root = options.environment.resolve()
    with tempfile.TemporaryDirectory() as directory:
        calls = metadata_calls(root, directory)
    times = on_slurm(root, options.rounds)
    size = (root / 'environment.squashfs').stat().st_size
    ratios = {'staging': times['staging'] / times['sbcast'],
              'start': times['staged: import torch'] / times['plain: import torch']}
    result = {'date': time.strftime('%Y-%m-%d'), 'cpus': os.cpu_count(), 'load': os.getloadavg()[0],
              'machine': platform.machine(), 'image bytes': size, 'rounds': options.rounds, 'goals': GOALS,
              'metadata calls': calls, 'seconds': times, 'ratios': ratios,
              'model': {nodes: model(nodes, size) for nodes in (2, 8, 64, 256, 1024, 4096)}}
    print('%s processors, load %.1f, image of %.0f MB, median of %d' % (
        result['cpus'], result['load'], size / 1e6, options.rounds))
    print('\n%-36s' % 'metadata calls of import torch' + ''.join('%10s' % kind for kind in [*CALLS, 'total']))
    for name, row in calls.items():
        print('%-36s' % name + ''.join('%10d' % row[kind] for kind in [*CALLS, 'total']))
    print('\nseconds')
    for name, seconds in times.items():
        print('%-36s%10.2f' % (name, seconds))
    print('staging/sbcast %.2f, import staged/plain %.2f' % (ratios['staging'], ratios['start']))
    missed = [name for name, ratio in ratios.items() if ratio > GOALS[name]]
    missed += [name for name, row in calls.items() if name.startswith('staged') and row['total'] > GOALS['calls']]
    print('Goals (%d calls, %.1f times sbcast, start not slower): %s'
          % (GOALS['calls'], GOALS['staging'], 'MISSED: ' + ', '.join(missed) if missed else 'met'))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + '\n')
    sys.exit(1 if missed else 0)


if __name__ == '__main__':
    main()
