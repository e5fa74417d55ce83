#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""
How long `module load` of an installed PyTorch takes, against loading an empty module with the same Lmod in the
same run.

    benchmarks/module_load.py --modulepath PREFIX/modules/all --module PyTorch/2.13.0-local-cpu --json result.json

Goal: at most 60 ms above an empty module.
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

GOAL_MS = 60


def load_milliseconds(lmod_cmd, modulepath, module, repeats):
    """
    Time Lmod as the shell function `module` calls it.

    :return: list of milliseconds, one for each of `repeats` runs after one that warms the caches
    """
    env = {'PATH': os.environ['PATH'], 'HOME': os.environ.get('HOME', '/'), 'MODULEPATH': modulepath,
           'LMOD_CMD': lmod_cmd}
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        done = subprocess.run([lmod_cmd, 'bash', 'load', module], env=env, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True)
        times.append((time.perf_counter() - started) * 1000)
        if done.returncode != 0 or module not in done.stdout:
            sys.exit('%s: loading %s failed:\n%s' % (pathlib.Path(__file__).name, module, done.stderr))
    return times[1:]


def main():
    """Measure both, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--modulepath', required=True, help="directory that 'module use' would be given")
    parser.add_argument('--module', default='PyTorch/2.13.0-local-cpu')
    parser.add_argument('--lmod', default=os.environ.get('LMOD_CMD', '/usr/share/lmod/lmod/libexec/lmod'))
    parser.add_argument('--repeats', type=int, default=20)
    parser.add_argument('--json', metavar='FILE')
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        (pathlib.Path(directory) / 'empty').mkdir()
        (pathlib.Path(directory) / 'empty' / '1.0.lua').write_text('')
        empty = load_milliseconds(args.lmod, directory, 'empty/1.0', args.repeats)
        loaded = load_milliseconds(args.lmod, args.modulepath, args.module, args.repeats)

    version = subprocess.run([args.lmod, 'bash', '--version'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             universal_newlines=True).stdout.split('Version')[-1].split()[0]
    more = statistics.median(loaded) - statistics.median(empty)
    result = {
        'machine': '%s, %s cores, %s' % (platform.machine(), os.cpu_count(), platform.platform()),
        'lmod': version, 'module': args.module, 'repeats': args.repeats,
        'empty_ms': statistics.median(empty), 'loaded_ms': statistics.median(loaded), 'difference_ms': more,
        'ratio': statistics.median(loaded) / statistics.median(empty), 'goal_ms': GOAL_MS, 'goal_met': more <= GOAL_MS,
    }
    print('Lmod %s on %s; medians of %d' % (version, result['machine'], args.repeats))
    print('%-40s %8.1f ms' % ('empty module (baseline)', result['empty_ms']))
    print('%-40s %8.1f ms   %.2f times the baseline' % (args.module, result['loaded_ms'], result['ratio']))
    print('%-40s %8.1f ms   goal: at most %d ms: %s'
          % ('difference', more, GOAL_MS, 'met' if result['goal_met'] else 'NOT met'))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
