# SPDX-License-Identifier: GPL-2.0-only
"""
slingtorch check and slingtorch vet: start the check of the runscripts (independent of this package) in a job step;
elsewhere, print what to type (docs/check.md).
"""
import argparse
import os
import shutil
import sys
from typing import Dict, List, Mapping, Optional

from slingtorch import bundle_root, sites

# the batch script and salloc's interactive step (slurm.h) are not tasks
NO_TASKS = ('4294967291', '4294967290')
TASK_VARIABLES = ('OMPI_COMM_WORLD_RANK', 'PALS_RANKID', 'PMI_RANK', 'TORCHELASTIC_RUN_ID', 'RANK')


def runscript(environ: Mapping[str, str]) -> str:
    """Path of conda-python-distributed: the loaded module's, else the bundle's."""
    for directory in (environ.get('RUNSCRIPTS'), os.path.join(bundle_root(), 'runscripts')):
        path = os.path.join(directory or '', 'conda-python-distributed')
        if directory and os.path.isdir(os.path.join(directory, 'lib', 'job')) and os.access(path, os.X_OK):
            return path
    raise RuntimeError("the runscripts of the bundle are missing: install slingtorch again, or use a complete checkout")


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether this process is one rank of a job step."""
    step = environ.get('SLURM_STEP_ID') or environ.get('SLURM_STEPID') or NO_TASKS[0]
    return bool(environ.get('SLURM_PROCID')) and step not in NO_TASKS or any(map(environ.get, TASK_VARIABLES))


def reference_options(environ: Mapping[str, str]) -> List[str]:
    """Options of vet with what nodes should reach, from the reference figures of the site in SLINGTORCH_SITE."""
    name = environ.get('SLINGTORCH_SITE')
    found: Dict[str, float] = {}
    for each in sites.load(name, environ).references if name else []:
        if each.operation not in ('all_reduce', 'send_receive') or int(each.nodes) < 2:
            continue    # all_reduce's bus bandwidth is per node, send_receive's is per rank
        ranks = int(each.ranks_per_node) if each.operation == 'send_receive' else 1
        figure = float(each.bus_bandwidth) * (1 - float(each.tolerance)) * ranks
        found[each.backend] = max(figure, found.get(each.backend, 0.0))
    return [word for backend in sorted(found) for word in ('--reference', '%s=%.4g' % (backend, found[backend]))]


def what_to_type(environ: Mapping[str, str], option: str) -> Optional[str]:
    """The line for a job script; None without a scheduler."""
    path = '$RUNSCRIPTS/conda-python-distributed' if environ.get('RUNSCRIPTS') else runscript(environ)
    if environ.get('SLURM_JOB_ID') or not environ.get('PBS_JOBID') and shutil.which('srun'):
        return 'srun -N NODES --ntasks-per-node=%s %s %s' % ('1' if option == '--vet' else 'RANKS', path, option)
    if environ.get('PBS_JOBID') or shutil.which('qsub'):
        return 'mpiexec -n RANKS -ppn %s %s %s' % ('1' if option == '--vet' else 'RANKS_PER_NODE', path, option)
    return None


def run(args: argparse.Namespace) -> int:
    """slingtorch check, slingtorch vet"""
    path, line = runscript(os.environ), None if is_task(os.environ) else what_to_type(os.environ, args.option)
    if args.option == '--vet':
        more = reference_options(os.environ)
        args.arguments, line = more + args.arguments, line and ' '.join([line] + more)
    if line:
        sys.stderr.write("slingtorch: not inside a job step. In a job script or an allocation, with the PyTorch module "
                         "loaded, type\n    %s\n" % line)
        return 2
    os.execv(path, [path, args.option] + args.arguments)


def add_parsers(commands: 'argparse._SubParsersAction') -> None:
    """Add the two commands to the command line."""
    for name, what, more in (
            ('check', "check a job from inside its ranks", "the program to run after the check, with its arguments"),
            ('vet', "measure the nodes of a job and name the bad ones", "options of conda-python-distributed --vet")):
        parser = commands.add_parser(name, help=what, description=what.capitalize() + " (docs/check.md).")
        parser.add_argument('arguments', nargs=argparse.REMAINDER, metavar='ARGUMENT', help=more)
        parser.set_defaults(function=run, option='--' + name)
