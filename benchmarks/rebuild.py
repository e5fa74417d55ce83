#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""
How long building PyTorch again takes after one file was changed, with a warm ccache, against the cold build of the
same directory. Needs the directory of tests/builds/pytorch-debian, in which a whole build was done.

    benchmarks/rebuild.py DIR --json result.json

Goal: at most 5 % of the cold build. Both wall-clock time, which other work on the machine falsifies, and the time of
all processors are compared.
"""
import argparse
import json
import pathlib
import subprocess
import sys

BUILD = pathlib.Path(__file__).resolve().parents[1] / 'tests/builds/pytorch-debian'
CHANGED = 'torch/csrc/distributed/c10d/ProcessGroupMPI.cpp'
GOAL = 0.05


def builds(directory):
    """The builds that were done in this directory, oldest first."""
    path = directory / 'builds.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cold_build(all_builds):
    """The first build to its end, with those that were interrupted before it added; None if there is none."""
    parts = []
    for build in all_builds:
        parts.append(build)
        if build['finished']:
            break
    if not parts or not parts[-1]['finished'] or parts[0]['from_ccache'] > parts[0]['compiled'] / 20:
        return None
    cold = {what: sum(part[what] for part in parts) for what in ('seconds', 'cpu_seconds', 'compiled', 'from_ccache')}
    interrupted = len(parts) - 1
    cold['name'] = 'cold (baseline)' + (', interrupted %d times' % interrupted if interrupted else '')
    return cold


def main():
    """Build again, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('directory', type=pathlib.Path, metavar='DIR')
    parser.add_argument('--json', metavar='FILE')
    args = parser.parse_args()
    cold = cold_build(builds(args.directory))
    if not cold:
        sys.exit('rebuild.py: no cold build was done in %s: empty its ccache and run %s %s --rebuild first'
                 % (args.directory, BUILD, args.directory))
    done = subprocess.run([BUILD, args.directory, '--rebuild', '--change', CHANGED, '--ranks', '2'])
    if done.returncode != 0:
        sys.exit('rebuild.py: building again failed')
    again = builds(args.directory)[-1]
    result = {'cold': cold, 'again': again, 'goal': GOAL}
    print('%-34s %10s %12s %10s %12s' % ('', 'wall s', 'processor s', 'compiled', 'from ccache'))
    for name, build in ((cold['name'], cold), ('again, %s changed' % CHANGED.rsplit('/', 1)[1], again)):
        print('%-34s %10d %12d %10d %12d' % (name, build['seconds'], build['cpu_seconds'], build['compiled'],
                                             build['from_ccache']))
    for what in ('seconds', 'cpu_seconds'):
        result['ratio_' + what] = again[what] / cold[what]
    result['goal_met'] = max(result['ratio_seconds'], result['ratio_cpu_seconds']) <= GOAL
    print('%-34s %9.1f%% %11.1f%%   goal: at most %.0f%%: %s'
          % ('ratio', 100 * result['ratio_seconds'], 100 * result['ratio_cpu_seconds'], 100 * GOAL,
             'met' if result['goal_met'] else 'NOT met'))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + '\n')
    sys.exit(0 if result['goal_met'] else 1)


if __name__ == '__main__':
    main()
