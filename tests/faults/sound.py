# SPDX-License-Identifier: GPL-2.0-only
"""
Sound set-ups, under each launcher: --check must say nothing red, start the program, and leave nothing in /tmp.

    cd tests && python -m faults.sound [--times 3] [WORD ...]      as root; those whose name has one of the words

Slurm, Open MPI 4, MPICH and torchrun of Debian 12, and Slurm, Open MPI 5 and 6 and MPICH of Debian 13 and sid, on
separate nodes; the container is Debian 13's root, entered by Apptainer.
"""

import argparse
import json
import os
import pathlib
import sys
import time

from testbed import DIR, ROOT, debianroot, images, launchers, modulestools, quickstarted, slurm

TWO = '-N2 --ntasks-per-node=2'
CHECK = '"$RUNSCRIPTS/conda-python-distributed" {options} --check "$PROGRAM"'
START = 'conda-python-distributed --check "$PROGRAM"'
OPENMPI = 'mpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none --map-by ppr:2:node -n 4 '
TORCHRUN = 'torchrun --nproc-per-node=2 --no-python {options} ' + START
MPICH = 'mpiexec.hydra -n 4 -ppn 2 '
CONTAINER = 'apptainer --silent exec --bind "$BINDS" "$CONTAINER" '
PROGRAM = 'import os\nopen(os.environ["STARTED"], "a").write(os.environ["RANK"] + "\\n")\n'
SETUPS = {
    # name: (options of the allocation, what its batch script runs, ranks that are checked, ranks that are started)
    'srun': (TWO, 'srun ' + CHECK, 4, 4),
    'srun, one node': ('-N1 --ntasks-per-node=4', 'srun ' + CHECK, 4, 4),
    'srun --torchrun=2': ('-N2 --ntasks-per-node=1', 'srun ' + CHECK.replace('{options}', '--torchrun=2'), 2, 4),
    'srun torchrun': ('-N2 --ntasks-per-node=1', 'export MASTER_ADDR=$("$RUNSCRIPTS/get-master") MASTER_PORT=29555\n'
                      'srun ' + TORCHRUN.replace('{options}', '--nnodes=2 --rdzv-backend=c10d --rdzv-id=1 '
                                                 '--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT'), 4, 4),
    'torchrun, one node': ('-N1 --ntasks-per-node=1', TORCHRUN, 2, 2),
    'srun --stage': (TWO, 'srun ' + CHECK.replace('{options}', '--stage'), 4, 4),
    'salloc, srun': (TWO, 'srun ' + CHECK, 4, 4),
    'srun in a container': (TWO, 'srun ' + CONTAINER + CHECK, 4, 4),
    'Open MPI': (TWO, OPENMPI + CHECK, 4, 4),
    'MPICH': (TWO, MPICH + CHECK, 4, 4),
    'Open MPI, one node': ('-N1 --ntasks-per-node=4', OPENMPI.replace('2:node', '4:node') + CHECK, 4, 4),
    'MPICH, one node': ('-N1 --ntasks-per-node=4', MPICH.replace('-ppn 2', '') + CHECK, 4, 4),
    'MPICH in a container': ('-N1 --ntasks-per-node=4', MPICH.replace('-ppn 2', '') + CONTAINER + CHECK, 4, 4),
}
SEPARATE = tuple(name for name in SETUPS if 'container' not in name)
CONTAINERS = ('srun in a container', 'MPICH in a container')
"""On one machine: Apptainer does not find /proc/self/mountinfo in the mounts of separate nodes."""
NEWER = ('srun', 'srun, one node', 'Open MPI', 'MPICH', 'Open MPI, one node', 'MPICH, one node')


class System:
    """A cluster, and how jobs find PyTorch there."""

    def __init__(self, name, cluster, installed):
        self.name, self.cluster, self.installed = name, cluster, installed
        self.out = cluster.shared if cluster.separate else cluster.dir
        self.program = self.out / 'program.py'
        self.program.write_text(PROGRAM)

    def run(self, setup):
        """Run one; (what is wrong, or '', seconds)."""
        options, line, checked, ranks = SETUPS[setup]
        found, started = self.out / 'found.json', self.out / 'started'
        for path in (found, started):
            path.unlink(missing_ok=True)
        binds = [ROOT, DIR, sys.base_prefix, self.cluster.dir, '/tmp']
        env = {**self.installed.env, 'SLINGTORCH_CHECK_JSON': found, 'STARTED': started, 'PROGRAM': self.program,
               'OMP_NUM_THREADS': '1', 'PYTHONDONTWRITEBYTECODE': '1', 'BINDS': ','.join(map(str, binds)),
               'CONTAINER': debianroot.make('trixie')}
        env['RUNSCRIPTS'] = ROOT / 'runscripts'     # of the checkout
        env['PATH'] = f"{env['RUNSCRIPTS']}:{env['PATH']}"
        env['APPTAINERENV_PATH'] = env['PATH']
        env['PATH'] = f'{images.runtime()}:{env["PATH"]}'
        if not self.cluster.separate:
            env['GLOO_SOCKET_IFNAME'] = 'lo'    # all nodes are this machine
        before, begin = self.files(), time.monotonic()
        line = line.replace('{options}', '')
        if setup.startswith('salloc'):
            done = self.cluster.run('salloc', *options.split(), 'bash', '-c', line, env=env, check=False)
            status, said = done.returncode, done.stdout + done.stderr
        else:
            done = self.cluster.sbatch(f'#!/bin/bash\n{line}\n', *options.split(), env=env, timeout=120)
            status, said = done.returncode, done.output
        seconds = time.monotonic() - begin
        wrong = [f'status {status}'] * bool(status)
        if not found.exists():
            return f'{wrong} no table: {said}', seconds
        entries = json.loads(found.read_text())
        wrong += [f"{entry['name']}: {entry['text']}" for entry in entries['findings'] if entry['level'] == 'red']
        if sorted(entries['ranks']) != list(range(checked)):
            wrong.append(f"ranks {entries['ranks']}")
        if sorted(started.read_text().split() if started.exists() else []) != [*map(str, range(ranks))]:
            wrong.append('the program was not started by all ranks')
        left = sorted(self.files() - before)
        wrong += [f'left in /tmp: {left}'] * bool(left)
        return '; '.join(wrong) + (f': {said}' if wrong else ''), seconds

    def files(self):
        """Names in /tmp of all nodes; the private caches stay by design, and Apptainer's own directories."""
        places = [self.cluster.dir / f'local.{node}' for node in self.cluster.nodes]
        if not self.cluster.separate:
            places.append(pathlib.Path('/tmp'))
        return {f'{place.name}/{path.name}' for place in places for path in place.iterdir()
                if path.name.startswith('slingtorch-') and path.name != f'slingtorch-{os.getuid()}'
                and not path.name.startswith('slingtorch-slurm-')}


def systems():
    """(name, function that starts the cluster, its set-ups) of each Debian."""
    yield 'separate nodes', lambda: slurm.Cluster(nodes=launchers.NODES[:2], separate=True).start(), SEPARATE
    yield 'one machine', lambda: slurm.Cluster().start(), CONTAINERS
    for suite in debianroot.SUITES:
        yield suite, lambda suite=suite: launchers.cluster(suite, separate=True), NEWER


def main(arguments):
    parser = argparse.ArgumentParser(prog='python -m faults.sound')
    parser.add_argument('--times', type=int, default=3)
    parser.add_argument('words', nargs='*')
    args = parser.parse_args(arguments)
    slurm.clean_up_killed_runs()
    installed = quickstarted.installed(modulestools.lmod())
    bad = 0
    for name, start, setups in systems():
        setups = [setup for setup in dict.fromkeys(setups)
                  if not args.words or any(word in f'{name}, {setup}' for word in args.words)]
        if not setups:
            continue
        cluster = start()
        try:
            print(f'{name}: {launchers.versions(cluster)}', flush=True)
            system = System(name, cluster, installed)
            for setup in setups:
                took = []
                for _ in range(args.times):
                    wrong, seconds = system.run(setup)
                    took.append(f'{seconds:.0f} s')
                    if wrong:
                        bad += 1
                        print(f'{name}, {setup}: WRONG: {wrong}', flush=True)
                print(f'{name}, {setup}: {", ".join(took)}; load {os.getloadavg()[0]:.0f}', flush=True)
        finally:
            cluster.stop()
    print(f'{bad} wrong', flush=True)
    return bool(bad)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
