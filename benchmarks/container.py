#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""What the container system costs: installing an image, a command through a wrapper, the ranks of a job.

    benchmarks/container.py [--size GB] [--directory DIR]
    benchmarks/container.py --installation DIR [--srun 'srun -N2 --ntasks-per-node=4']

Without --installation: installs a file of that size, a SIF by its header and random data, with `eb` (which must be in
the PATH), by copying and by the links; against `cp` and against `cp` followed by `sha256sum` (what a careful person
types) of the same file on the same file system, and against `eb` with a small file, which is what EasyBuild itself
costs. The file is in memory; with --cold it is dropped from there before each run.
With --installation (an installed image with Python): `python -c pass` through the wrapper against `singularity exec`;
with --srun the start of ranks through conda-python-distributed against plain Python in the same container.
All by turns in the same run, medians. --json FILE writes the figures, --runs N sets how many.
"""
import argparse
import json
import os
import pathlib
import platform
import shlex
import shutil
import statistics
import struct
import subprocess
import tempfile
import time

BUNDLE = pathlib.Path(__file__).resolve().parents[1]
GOALS = {'copy, times cp and sha256sum': 1.0, 'link (s)': 3, 'wrapper, more than exec (ms)': 20,
         'rank, more than python (ms)': 30}

EASYCONFIG = '''easyblock = 'Singularity'
name = 'Benchmark'
version = '{name}'
homepage = 'https://example.org'
description = "A file to be installed"
toolchain = SYSTEM
sources = ['{name}.sif']
checksums = ['{digest}']
image_transfer = '{transfer}'
moduleclass = 'tools'
'''


def seconds(command, env=None, prepare=None):
    """Wall-clock time of a command that must succeed."""
    if prepare:
        prepare()
    begin = time.perf_counter()
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit('%s failed:\n%s' % (' '.join(map(str, command)), done.stdout.decode(errors='replace')))
    return time.perf_counter() - begin


def by_turns(commands, runs, env=None, prepare=None, warm_up=1):
    """Medians of the times of commands, taken by turns so that a busy machine hits all alike."""
    times = {name: [] for name in commands}
    names = list(commands)
    for number in range(warm_up + runs):
        # each round starts with another one: none always follows the same
        for name in names[number % len(names):] + names[:number % len(names)]:
            taken = seconds(commands[name], env, prepare)
            if number >= warm_up:
                times[name].append(taken)
    return {name: statistics.median(values) for name, values in times.items()}


def make_sif(path, size):
    """A file that is a SIF by its header; returns its sha256."""
    header = struct.pack('<32s10s3s3s16s8q', b'#!/usr/bin/env run-singularity\n', b'SIF_MAGIC\0', b'01\0', b'02\0',
                         b'i' * 16, 0, 0, 45, 48, 4096, 28080, 32176, size - 32176)
    block = os.urandom(1 << 20)
    with open(path, 'wb') as stream:
        stream.write(header)
        while stream.tell() < size:
            stream.write(block[:size - stream.tell()])
    return subprocess.check_output(['sha256sum', path]).split()[0].decode()


def installing(directory, size, runs, cold):
    """Times of installing by copying and by links, of cp, and of `eb` with a small file."""
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        place = pathlib.Path(temporary)
        env = {**{key: value for key, value in os.environ.items() if not key.startswith('EASYBUILD_')},
               'EASYBUILD_PREFIX': str(place / 'eb'), 'EASYBUILD_TMPDIR': str(place / 'tmp'),
               'EASYBUILD_INCLUDE_EASYBLOCKS': '%s/easyblocks/generic/*.py' % BUNDLE,
               'EASYBUILD_SOURCEPATH': '%s:%s/runscripts' % (place, BUNDLE),
               'EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES': '1'}
        files = [place / 'large.sif', place / 'copy']
        commands = {'cp': ['cp', *files],
                    'cp and sha256sum': ['sh', '-c', 'cp "$0" "$1" && sha256sum "$1"', *files],
                    'cp, sync and sha256sum': ['sh', '-c', 'cp "$0" "$1" && sync "$1" && sha256sum "$1"', *files]}
        for name, transfers in (('small', ['copy']), ('large', ['copy', 'hardlink', 'symlink'])):
            digest = make_sif(place / f'{name}.sif', size if name == 'large' else 100_000)
            for transfer in transfers:
                easyconfig = place / f'Benchmark-{name}-{transfer}.eb'
                easyconfig.write_text(EASYCONFIG.format(name=name, digest=digest, transfer=transfer))
                commands[f'eb, {name}, {transfer}'] = ['eb', easyconfig, '--rebuild']

        def prepare():
            (place / 'copy').unlink(missing_ok=True)
            shutil.rmtree(place / 'eb/software', ignore_errors=True)
            subprocess.run(['sync', place / 'large.sif'], check=True)
            if cold:
                with open(place / 'large.sif', 'rb') as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            # a virtual machine gets memory from its host when it is first used, which would be in the time of the
            # command that comes after an idle one
            touch = 'import sys; bytearray(b"x") * int(sys.argv[1])'
            subprocess.run(['python3', '-c', touch, str(2 * size)], check=True)

        return by_turns(commands, runs, env, prepare)


def environment_of(wrapper):
    """The environment that a wrapper gives the runtime: that of the module, asked from a runtime that prints it."""
    with tempfile.TemporaryDirectory() as directory:
        fake = pathlib.Path(directory, 'singularity')
        fake.write_text('#!/bin/sh\nexec env -0\n')
        fake.chmod(0o755)
        env = {**os.environ, 'PATH': '%s:%s' % (directory, os.environ['PATH'])}
        output = subprocess.check_output([wrapper, '-c', 'pass'], env=env).decode()
    found = dict(entry.split('=', 1) for entry in output.split('\0') if '=' in entry)
    return {**found, 'PATH': os.environ['PATH']}


def running(installation, srun, runs):
    """Times of a wrapper and, with srun, of ranks, each with its baseline."""
    wrapper = installation / 'bin/python'
    image = installation / json.loads((installation / 'image.json').read_text())['file']
    runtime = shutil.which('singularity') or shutil.which('apptainer')
    env = environment_of(wrapper)
    times = by_turns({'exec': [runtime, 'exec', image, 'python', '-c', 'pass'], 'wrapper': [wrapper, '-c', 'pass']},
                     runs, env)
    if srun:
        step = shlex.split(srun) + [runtime, 'exec', image]
        times.update(by_turns({'srun, python': step + ['python', '-c', 'pass'],
                               'srun, conda-python-distributed': step + ['conda-python-distributed', '-c', 'pass']},
                              max(3, runs // 3), env))
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--cold', action='store_true')
    parser.add_argument('--directory', default='.', help='where the large files go (default: here)')
    parser.add_argument('--installation', type=pathlib.Path)
    parser.add_argument('--json', metavar='FILE')
    parser.add_argument('--ranks', type=int, default=8, help='how many --srun starts (default: %(default)s)')
    parser.add_argument('--runs', type=int)
    parser.add_argument('--size', type=float, default=2, help='in GB (default: %(default)s)')
    parser.add_argument('--srun')
    options = parser.parse_args()

    figures = {}
    if options.installation:
        times = running(options.installation.resolve(), options.srun, options.runs or 20)
        figures['wrapper, more than exec (ms)'] = (times['wrapper'] - times['exec']) * 1000
        if options.srun:
            more = times['srun, conda-python-distributed'] - times['srun, python']
            figures['rank, more than python (ms)'] = more * 1000 / options.ranks
            figures['whole step, more than python (ms)'] = more * 1000
    else:
        times = installing(options.directory, int(options.size * 1e9), options.runs or 3, options.cold)
        copied = times['eb, large, copy'] - times['eb, small, copy']
        for baseline in ('cp', 'cp and sha256sum', 'cp, sync and sha256sum'):
            figures[f'copy, times {baseline}'] = copied / times[baseline]
        figures['link (s)'] = max(times['eb, large, hardlink'], times['eb, large, symlink'])
        figures['link, more than eb itself (s)'] = figures['link (s)'] - times['eb, small, copy']

    machine = {'cpus': os.cpu_count(), 'load': round(os.getloadavg()[0], 1), 'kernel': platform.release(),
               'python': platform.python_version(), 'date': time.strftime('%Y-%m-%d')}
    print(', '.join('%s %s' % item for item in machine.items()))
    for name, value in times.items():
        print('%-36s %9.3f s' % (name, value))
    for name, value in figures.items():
        goal = GOALS.get(name)
        print('%-36s %9.2f   %s' % (name, value, '' if goal is None else 'goal at most %s: %s'
                                    % (goal, 'met' if value <= goal else 'MISSED')))
    if options.json:
        result = {'machine': machine, 'goals': GOALS, 'seconds': times, 'figures': figures}
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
