#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""What it costs to activate an extended environment (docs/environments.md), against a plain one in the same run.

    module load PyTorch/2.13.0-local-cpu
    benchmarks/activation.py --json activation.json

Each is activated in a new bash, by turns: the plain one; the extended one in a shell that knows no module; the extended
one where the module is loaded already; and what somebody types without the extension: module use, module load, and the
plain one. Goal: an extended environment costs at most 100 ms more than the plain one.
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

GOAL_MS = 100
BY_HAND = ('if [[ -r $0/init/bash ]]; then . "$0/init/bash"; else eval "$("$1" bash autoinit)"; fi; '
           'module use "$2"; module load "$3"; . "$4/bin/activate"')


def main():
    """Make both environments, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--runs', type=int, default=20)
    parser.add_argument('--json', metavar='FILE')
    args = parser.parse_args()

    modules = [name for name in os.environ if name.startswith('SLINGTORCH_MODULE_')]
    if not modules:
        parser.error("load the module of a PythonVenv first: module load PyTorch/2.13.0-local-cpu")
    module = os.environ[modules[0]]
    new_shell = {'PATH': '/usr/local/bin:/usr/bin:/bin', 'HOME': os.environ.get('HOME', '/')}

    with tempfile.TemporaryDirectory() as directory:
        plain, extended = (os.path.join(directory, name) for name in ('plain', 'extended'))
        for path in (plain, extended):
            subprocess.run(['python', '-m', 'venv', '--without-pip', '--system-site-packages', path], check=True)
        subprocess.run(['extend-venv-activate', extended], check=True, stdout=subprocess.DEVNULL)
        source = '. "$0/bin/activate"'
        tool = [os.environ.get(name, '') for name in ('MODULESHOME', 'MODULES_CMD', 'MODULEPATH')]
        commands = {
            'plain (baseline)': ([source, plain], new_shell),
            'extended, new shell': ([source, extended], new_shell),
            'extended, module loaded before': ([source, extended], dict(os.environ)),
            'by hand: use, load, plain': ([BY_HAND, *tool, module, plain], new_shell),
        }
        times = {name: [] for name in commands}
        for number in range(2 + args.runs):
            for name, (words, env) in commands.items():
                begin = time.perf_counter()
                command = ['bash', '--noprofile', '--norc', '-c', words[0] + ' || exit; [[ $VIRTUAL_ENV ]]', *words[1:]]
                done = subprocess.run(command, env=env, stderr=subprocess.PIPE, universal_newlines=True)
                if done.returncode != 0 or done.stderr:
                    sys.exit('%s failed:\n%s' % (name, done.stderr))
                if number > 1:
                    times[name].append((time.perf_counter() - begin) * 1000)

    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians['plain (baseline)']
    more = medians['extended, new shell'] - base
    machine = '%s, %s cores, %s, load %.1f' % (platform.machine(), os.cpu_count(), platform.platform(),
                                               os.getloadavg()[0])
    print('%s on %s; medians of %d' % (module, machine, args.runs))
    for name, value in medians.items():
        print('%-34s %8.1f ms  %+8.1f ms' % (name, value, value - base))
    print('goal: at most %d ms more in a new shell: %s' % (GOAL_MS, 'met' if more <= GOAL_MS else 'NOT met'))
    if args.json:
        result = {'machine': machine, 'module': module, 'runs': args.runs, 'median_ms': medians, 'more_ms': more,
                  'goal_ms': GOAL_MS, 'goal_met': more <= GOAL_MS}
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
