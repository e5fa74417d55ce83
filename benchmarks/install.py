#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""
How long `eb` takes to install wheels that were fetched before, by uv and by pip, against a virtual environment that
is made from the same files by hand, in the same run. The bundle must be activated (slingtorch env).

    benchmarks/install.py PyTorch-2.13.0-local-cpu.eb --json result.json

Goal: at most 1.5 times as long as `python3 -m venv` and `pip install --no-index --require-hashes`. Both wall-clock
time, which other work on the machine falsifies, and the time of all processors are compared.
"""
import argparse
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time

GOAL = 1.5
ADDRESS = re.compile(r'\s*--(extra-)?index-url|\s*--find-links')


def timed(name, command, env=None):
    """Run a shell command: {name, seconds, cpu_seconds}, seconds of the command and of all processors."""
    before, started = os.times(), time.perf_counter()
    done = subprocess.run(['bash', '-c', command], env=dict(os.environ, **env or {}), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    seconds, after = time.perf_counter() - started, os.times()
    if done.returncode != 0:
        sys.exit('install.py: %s failed:\n%s' % (command, done.stdout))
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {'name': name, 'seconds': seconds, 'cpu_seconds': cpu}


def size(directory):
    """Bytes of the files below a directory."""
    return sum(path.stat().st_size for path in pathlib.Path(directory).rglob('*') if path.is_file())


def main():
    """Fetch, measure all three, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('easyconfig')
    parser.add_argument('--directory', help="file system to install to; default: that for temporary files")
    parser.add_argument('--sources', help="source path to fetch to; default: a new one")
    parser.add_argument('--json', metavar='FILE')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as work:
        eb = 'eb %s --prefix=%s/%%s --sourcepath=%s:$EASYBUILD_SOURCEPATH' % (
            shlex.quote(args.easyconfig), work, args.sources or work + '/sources')
        timed('fetch', eb % 'fetch' + ' --fetch')
        print('fetched', flush=True)
        runs = [timed('eb with uv', eb % 'uv'), timed('eb with pip', eb % 'pip', {'SLINGTORCH_UV': ''})]
        root, = pathlib.Path(work, 'uv/software').glob('*/*')
        installed_by = root.glob('lib/python3*/site-packages/*.dist-info/INSTALLER')
        if not any(path.read_text().strip() == 'uv' for path in installed_by):
            sys.exit('install.py: eb found no uv')
        lock = pathlib.Path(work, 'lock')
        lines = (root / 'packages.lock').read_text().splitlines()
        lock.write_text('\n'.join(line for line in lines if not ADDRESS.match(line)) + '\n')
        sources = pathlib.Path(args.sources or work + '/sources')
        wheels = sources / root.parent.name.lower()[0] / root.parent.name / 'wheels'
        python = re.search('^executable = (.*)', (root / 'pyvenv.cfg').read_text(), re.M)
        python = python.group(1) if python else 'python3'
        hand = '%s -m venv %s/hand && %s/hand/bin/pip install --no-index --find-links %s --require-hashes -r %s' % (
            shlex.quote(python), work, work, wheels, lock)
        runs.insert(0, timed('by hand (baseline)', hand, {'PIP_CONFIG_FILE': os.devnull, 'PIP_FIND_LINKS': ''}))
        result = {'machine': platform.platform(), 'goal': GOAL, 'installed_bytes': size(root),
                  'wheels_bytes': size(wheels)}
    for run in runs:
        for what in ('seconds', 'cpu_seconds'):
            run['ratio_' + what] = run[what] / runs[0][what]
    result.update(runs=runs, goal_met=runs[1]['ratio_seconds'] <= GOAL)
    print('%s: wheels of %d MB, installed %d MB'
          % (args.easyconfig, result['wheels_bytes'] / 1e6, result['installed_bytes'] / 1e6))
    print('%-20s %8s %8s %12s %8s' % ('', 'wall s', 'ratio', 'processor s', 'ratio'))
    for run in runs:
        print('%-20s %8.1f %8.2f %12.1f %8.2f' % (run['name'], run['seconds'], run['ratio_seconds'], run['cpu_seconds'],
                                                  run['ratio_cpu_seconds']))
    print('goal for eb with uv: at most %.1f of the baseline: %s' % (GOAL, 'met' if result['goal_met'] else 'NOT met'))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + '\n')
    sys.exit(0 if result['goal_met'] else 1)


if __name__ == '__main__':
    main()
