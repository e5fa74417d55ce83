# SPDX-License-Identifier: GPL-2.0-only
"""What the launchers of three Debians export into their ranks, and where the runscript says that rank 0 is.

    python -m testbed.launchers          in tests/, as root: prints it as a page
"""

import collections
import concurrent.futures
import json
import pathlib
import re
import sys
import tempfile

from . import ROOT, debianroot, only_root, parse_env0, slurm

NODES = tuple(f'nid{number:06}' for number in range(9, 13))
"""Of each cluster: the list nid[000009-000012] is one where the numbers get another digit."""

FIRST, SECOND, THIRD, _ = NODES
SYSTEMS = ('/', *debianroot.SUITES)
"""This machine's Slurm, Open MPI and MPICH, and those of newer Debians."""

# as it is, or with nothing but PALS's variables left
TASK = '''#!/bin/bash
name=$OUT/$1.$$
if [[ $2 == alone ]]; then for variable in ${!SLURM@} ${!PMIX_@}; do unset "$variable"; done; fi
env -0 > "$name.env"
read -r node < "$LOCAL/node"
"$START/get-master" > "$name.master" 2>&1
if [[ $2 == alone ]]; then cp "$PALS_APINFO" "$name.apinfo"; fi
exec "$START/conda-python-distributed" -S "$OUT/task.py" "$name" "$node"
'''
PROGRAM = '''import json, os, sys
names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT'.split()
seen = dict({name: os.environ[name] for name in names}, node=sys.argv[2], gpus=os.environ.get('CUDA_VISIBLE_DEVICES'))
open(sys.argv[1] + '.json', 'w').write(json.dumps(seen))
'''

TWO = ('-N2', '--ntasks-per-node=2')
BLOCK = (FIRST, FIRST, SECOND, SECOND)
SRUN = {'srun': (TWO, BLOCK), '--mpi=cray_shasta': ((*TWO, '--mpi=cray_shasta'), BLOCK),
        '--mpi=pmi2': ((*TWO, '--mpi=pmi2'), BLOCK), '--mpi=pmix': ((*TWO, '--mpi=pmix'), BLOCK),
        'srun --network': ((*TWO, '--network=disable_rdzv_get'), BLOCK)}
"""{name in the page: (options of srun, node of each rank)}."""

# one after the other: each is to get the first GPUs of the nodes
WITH_GPUS = {'--gpus-per-node': ((*TWO, '--gpus-per-node=4'), BLOCK),
             '--gpus-per-task': ((*TWO, '--gpus-per-task=1'), BLOCK),
             '--gpu-bind': ((*TWO, '--gpus-per-node=4', '--gpu-bind=single:1'), BLOCK),
             '--tres-per-task': ((*TWO, '--tres-per-task=gres/gpu:1'), BLOCK)}

PALS_ALONE = {
    'block': (('-N4', '--ntasks-per-node=2'), tuple(sorted(NODES * 2))),
    'two-nodes-uneven': (('-N2', '-n4', '-w', f'{FIRST},{SECOND}'), (FIRST, FIRST, FIRST, SECOND)),
    'cyclic': (('-N4', '--ntasks-per-node=2', '-m', 'cyclic'), NODES * 2),
    'second-and-third': (('-N2', '-n2', '-w', f'{SECOND},{THIRD}'), (SECOND, THIRD)),
    'arbitrary': (('-n4', '-m', 'arbitrary', '-w', f'{THIRD},{FIRST},{NODES[3]},{SECOND}'),
                  (THIRD, FIRST, NODES[3], SECOND)),
}
"""The same with --mpi=cray_shasta, where the task removes SLURM_* before the runscript. Tables: tests/records/pals."""

# in one allocation of two nodes
BATCH = '''#!/bin/bash
env -0 > "$OUT/batch.env"
srun --overlap "$OUT/task" 'sbatch --network'
srun --overlap -N1 -n2 --ntasks-per-node=2 -w {second} "$OUT/task" 'step on the second node'
mpirun.openmpi {root} --oversubscribe --bind-to none --map-by ppr:2:node -n 4 "$OUT/task" openmpi
mpiexec.hydra -n 4 -ppn 2 "$OUT/task" mpich
'''.format(root='--allow-run-as-root', second=SECOND)
BATCHED = {'sbatch --network': BLOCK, 'step on the second node': (SECOND, SECOND), 'openmpi': BLOCK, 'mpich': BLOCK}

HET = '''#!/bin/bash
#SBATCH -N1 -n1
#SBATCH hetjob
#SBATCH -N2 -n2
srun --het-group=0,1 "$OUT/task" 'het step'
srun --het-group=0,1 --mpi=cray_shasta "$OUT/task" 'het PALS alone' alone
'''
HET_STEPS = {'het step': (FIRST, SECOND, THIRD), 'het PALS alone': (FIRST, SECOND, THIRD)}

Rank = collections.namedtuple('Rank', 'seen env master apinfo')
"""What the runscript found (None if it stopped), the task's environment, what get-master printed, PALS's table."""


class Seen:
    """What was seen on one system.

    :ivar versions: {'slurm': ..., 'openmpi': ..., 'mpich': ...}
    :ivar given: environment that the launchers were started in; `batch` is that of a batch script
    :ivar ranks: {case: [Rank, ...] in the order of the ranks}; empty where the launcher refused
    :ivar said: {case: what the launcher and the ranks said on stderr}
    """


def cluster(system, separate=False):
    """The cluster of this system, started; `separate` as slurm.Cluster has it."""
    only_root('mounts file systems, for the launchers of newer Debians')
    return slurm.Cluster(system if system == '/' else debianroot.roots()[system], NODES, separate).start()


def look(nodes):
    """Run all cases on a started cluster; Seen."""
    seen = Seen()
    seen.versions = versions(nodes)
    with tempfile.TemporaryDirectory(prefix='slingtorch-launchers-') as directory:
        out = pathlib.Path(directory)
        for name, text in (('task', TASK), ('task.py', PROGRAM)):
            (out / name).write_text(text)
            (out / name).chmod(0o755)
        for node in NODES:
            (nodes.dir / f'local.{node}' / 'node').write_text(f'{node}\n')
        path = f'{pathlib.Path(sys.executable).parent}:{nodes.env["PATH"]}'
        env = {'PATH': path, 'OUT': out, 'LOCAL': nodes.local, 'START': ROOT / 'runscripts',
               'SLINGTORCH_CACHE_ROOT': out, 'SLINGTORCH_GPU_VISIBILITY': 'CUDA_VISIBLE_DEVICES'}
        seen.given = nodes.environ(env)
        seen.said = {}

        def srun(name, options, mode=''):
            done = nodes.srun(*options, out / 'task', name, mode, env=env, check=False)
            seen.said[name] = done.stdout + done.stderr

        def srun_all(cases):
            for name, (options, _) in cases.items():
                srun(name, (*options, f'-w{FIRST},{SECOND}'))

        def sbatch(name, text, *options):
            seen.said[name] = nodes.sbatch(text, *options, env=env).output

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(sbatch, 'het', HET),
                    pool.submit(sbatch, 'batch', BATCH, *TWO, f'-w{FIRST},{SECOND}', '--network=disable_rdzv_get')]
            jobs += [pool.submit(srun, f'PALS alone {name}', (*options, '--mpi=cray_shasta'), 'alone')
                     for name, (options, _) in PALS_ALONE.items()]
            jobs += [pool.submit(srun_all, cases) for cases in (SRUN, WITH_GPUS)]
            for job in jobs:
                job.result()
        seen.batch = parse_env0((out / 'batch.env').read_text(errors='replace'))
        seen.ranks = {name: ranks_of(out, name) for name in (*SRUN, *WITH_GPUS, *BATCHED, *HET_STEPS)}
        seen.ranks.update({f'PALS alone {name}': ranks_of(out, f'PALS alone {name}') for name in PALS_ALONE})
    return seen


def ranks_of(out, name):
    ranks = []
    for path in out.glob(f'{name}.*.env'):
        env = parse_env0(path.read_text(errors='replace'))
        found = path.with_suffix('.json')
        seen = json.loads(found.read_text()) if found.exists() else None
        table = path.with_suffix('.apinfo')
        ranks.append(Rank(seen, env, path.with_suffix('.master').read_text().strip(),
                          table.read_bytes() if table.exists() else None))
    names = ('SLURM_PROCID', 'PALS_RANKID', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK')
    if name in ('openmpi', 'mpich'):
        names = names[2:]   # those of Slurm are of the launcher's daemon
    return sorted(ranks, key=lambda rank: next((int(rank.env[key]) for key in names if key in rank.env), -1))


def versions(nodes):
    """{'slurm': version, 'openmpi': ..., 'mpich': ...}: two numbers, which name a release's behaviour."""
    commands = {'slurm': ['srun', '--version'], 'openmpi': ['mpirun.openmpi', '--version'],
                'mpich': ['mpiexec.hydra', '--version']}
    return {name: re.search(r'\d+\.\d+', nodes.run(*command).stdout).group(0) for name, command in commands.items()}


# --- the page


MPI = 'Ranks of mpirun and mpiexec'


def cases(names, all_names):
    """How a cell names the cases in which a variable is there."""
    if not names:
        return '-'
    return 'all' if names == all_names else ', '.join(names)


def variable(name):
    """One name for those of all components of a heterogeneous job, and of both spellings."""
    return re.sub(r'_(HET|PACK)_GROUP_\d+$', r'_\1_GROUP_n', name)


def exported(env, given):
    """Variables that are there besides the given ones (which may have another value), without those of the shell."""
    return {variable(name) for name in env if name not in given} - {'_', 'SHLVL', 'PWD', 'OLDPWD'}


def rows(columns):
    """Lines of a table from {column: {variable: cell}}: variables with the same cells share a line."""
    lines = collections.defaultdict(list)
    for name in sorted({name for cells in columns.values() for name in cells}):
        lines[tuple(cells.get(name, '-') for cells in columns.values())].append(name)
    text = [f'| variable | {" | ".join(columns)} |', '|---' * (len(columns) + 1) + '|']
    for cells, names in sorted(lines.items(), key=lambda row: row[1]):
        text.append(f'| {", ".join(names)} | {" | ".join(cells)} |')
    return '\n'.join(text)


def of_slurm(seen):
    """{variable: in which cases a task of srun has it}."""
    there = collections.defaultdict(list)
    shown = [name for name in (*SRUN, *WITH_GPUS, 'sbatch --network', 'het step') if seen.ranks[name]]
    for name in shown:
        for found in exported(seen.ranks[name][0].env, seen.given):
            there[found].append(name)
    return {found: cases(names, shown) for found, names in there.items()}


def of_mpi(seen, name):
    """{variable: on which node a rank of this launcher has it, beyond what the batch script has}."""
    first, second = (exported(seen.ranks[name][rank].env, seen.batch) for rank in (0, -1))
    return {found: 'yes' if found in first & second else 'first node' if found in first else 'second node'
            for found in first | second}


LISTS = ('SLURM_JOB_NODELIST', 'SLURM_STEP_NODELIST', 'SLURM_NNODES', 'SLURM_STEP_NUM_NODES', 'SLURM_NTASKS',
         'SLURM_STEP_NUM_TASKS', 'SLURM_TASKS_PER_NODE', 'SLURM_STEP_TASKS_PER_NODE')
VALUES = {
    'step on the second node': LISTS,
    'het step': LISTS,
    '--gpus-per-task': ('CUDA_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES', 'SLURM_GPUS_ON_NODE', 'SLURM_STEP_GPUS',
                        'SLURM_TRES_BIND', 'SLURM_TRES_PER_TASK'),
    '--gpu-bind': ('CUDA_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES', 'SLURM_GPUS_ON_NODE', 'SLURM_STEP_GPUS',
                   'SLURM_TRES_BIND', 'SLURM_GPU_BIND'),
    '--tres-per-task': ('CUDA_VISIBLE_DEVICES', 'SLURM_GPUS_ON_NODE', 'SLURM_TRES_BIND', 'SLURM_TRES_PER_TASK'),
}
"""{case: variables whose values are in the page}: of its last rank."""


def columns(seen):
    """The columns of the page that come from this Seen: {section: {title: {variable: cell}}}."""
    title = f'Slurm {seen.versions["slurm"]}'
    found = {'Tasks of srun': {title: of_slurm(seen)}}
    for case, names in VALUES.items():
        last = seen.ranks[case][-1].env if seen.ranks[case] else {}
        found[case] = {title: {name: last.get(name, '-') for name in names}}
    found[MPI] = {f'{launcher} {seen.versions[name]}': of_mpi(seen, name)
                  for name, launcher in (('openmpi', 'Open MPI'), ('mpich', 'MPICH'))}
    return found


def page(all_seen):
    """A page in Markdown from a list of Seen."""
    tables = collections.defaultdict(dict)
    for seen in all_seen:
        for section, found in columns(seen).items():
            tables[section].update(found)
    titles = sorted(tables[MPI], key=lambda title: (title[0] != 'O', title))
    tables[MPI] = {title: tables[MPI][title] for title in titles}
    values = '\n\n'.join(f'### {case}\n\n{rows(tables[case])}' for case in VALUES)
    pmix = ' and '.join(seen.versions['slurm'] for seen in all_seen if seen.ranks['--mpi=pmix'])
    return f'''# What each launcher exports

What tasks saw on four emulated nodes, nid[000009-000012], with packages of Debian 12, Debian 13 and Debian's
development suite. docs/runscripts.md says which of these the runscripts read.

## Tasks of srun

Which tasks of `srun -N2 --ntasks-per-node=2` have a variable: all, or those with this option. `sbatch --network` is a
step of a job with `#SBATCH --network=disable_rdzv_get`; het step is `srun --het-group=0,1` in a job of one node and
two. `--mpi=pmix` works in Debian's Slurm {pmix} alone, for want of a plugin or its library in the others.
`--tres-per-task` came after 22.05.

{rows(tables['Tasks of srun'])}

## Values

Of the last rank.

{values}

## {MPI}

What ranks have beyond the batch script that starts them (`sbatch -N2 --ntasks-per-node=2`, two ranks a node): on both
nodes (yes), or on one of them.

{rows(tables[MPI])}
'''


def main():
    seen = []
    for system in SYSTEMS:
        nodes = cluster(system)
        try:
            seen.append(look(nodes))
        finally:
            nodes.stop()
    print(page(seen))


if __name__ == '__main__':
    main()
