#!/bin/bash
# SPDX-License-Identifier: GPL-2.0-only
# Tests an installed PyTorch on two GPU nodes of Derecho: 8 ranks, 4 on each node.
#
#   qsub -A <project> -v EASYBUILD_PREFIX examples/derecho/test.sh          at the top of the checkout
#
# Or in an interactive job, in the same directory:
#   qsub -I -A <project> -q main -l select=2:ncpus=64:mpiprocs=4:ngpus=4 -l walltime=00:30:00
#   bash examples/derecho/test.sh
#
# EASYBUILD_PREFIX is where PyTorch was installed (default: EasyBuild's own). PYTORCH_MODULE names another module,
# TESTS the directory of the test programs.
#PBS -N slingtorch-test
#PBS -q main
#PBS -l select=2:ncpus=64:mpiprocs=4:ngpus=4:mem=480GB
#PBS -l walltime=00:30:00
#PBS -j oe
set -euo pipefail

die() { printf 'test.sh: %s\n' "$*" >&2; exit 1; }

tests=${TESTS:-examples/derecho}
pytorch=${PYTORCH_MODULE:-PyTorch/2.4.0-derecho-cray-mpich}
# where EasyBuild puts modules
installed=${EASYBUILD_INSTALLPATH:-${EASYBUILD_PREFIX:-$HOME/.local/easybuild}}
modules=${EASYBUILD_INSTALLPATH_MODULES:-$installed/modules}/all

[[ -n ${PBS_NODEFILE-} ]] || die "this is not a job: qsub -A <project> $0"
cd "${PBS_O_WORKDIR:-.}"
[[ -f $tests/test_imports.py ]] ||
    die "no $tests/test_imports.py in $PWD: submit at the top of a checkout, or in this directory with qsub -v TESTS=."

module --force purge ||
    die "there is no command module in this job: add '. /etc/profile' before the line 'set -euo pipefail'"
module use "$modules"
# it also loads ncarenv and cuda
module load "$pytorch" || die "the module $pytorch does not load. Looked for in $modules;
if it is installed elsewhere: qsub -v EASYBUILD_PREFIX=DIRECTORY"

nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
ranks=$((4 * nodes))
# binds each rank to one NUMA domain, which is next to one GPU and one network card
run() { mpiexec -n "$ranks" -ppn 4 --cpu-bind numa "$@"; }

python "$tests/test_imports.py"
run python "$tests/test_backend.py" --backend mpi
run "$RUNSCRIPTS/conda-python-distributed" "$tests/test_backend.py" --backend nccl
run env MPICH_GPU_SUPPORT_ENABLED=0 python "$tests/test_refusal.py"
run python "$tests/all_reduce_test.py" --backend mpi
run "$RUNSCRIPTS/conda-python-distributed" "$tests/all_reduce_test.py" --backend nccl
