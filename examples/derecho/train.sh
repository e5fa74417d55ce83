#!/bin/bash
# SPDX-License-Identifier: GPL-2.0-only
# Trains on two GPU nodes of Derecho.
#
#   slingtorch examples training                      in this file's directory
#   qsub -A <project> -v EASYBUILD_PREFIX train.sh
#
# EASYBUILD_PREFIX is where PyTorch was installed (default: EasyBuild's own). PYTORCH_MODULE names another module,
# BACKEND another backend than nccl.
#PBS -N slingtorch-train
#PBS -q main
#PBS -l select=2:ncpus=64:mpiprocs=4:ngpus=4:mem=480GB
#PBS -l walltime=00:30:00
#PBS -j oe
set -euo pipefail

die() { printf 'train.sh: %s\n' "$*" >&2; exit 1; }

pytorch=${PYTORCH_MODULE:-PyTorch/2.4.0-derecho-cray-mpich}
# where EasyBuild puts modules
installed=${EASYBUILD_INSTALLPATH:-${EASYBUILD_PREFIX:-$HOME/.local/easybuild}}
modules=${EASYBUILD_INSTALLPATH_MODULES:-$installed/modules}/all

[[ -n ${PBS_NODEFILE-} ]] || die "this is not a job: qsub -A <project> $0"
cd "${PBS_O_WORKDIR:-.}"
[[ -f ddp_training.py ]] || die "no ddp_training.py in $PWD: run 'slingtorch examples training' and submit there"

module --force purge ||
    die "there is no command module in this job: add '. /etc/profile' before the line 'set -euo pipefail'"
module use "$modules"
module load "$pytorch" || die "module $pytorch does not load. Looked for in $modules;
if it is installed elsewhere: qsub -v EASYBUILD_PREFIX=DIRECTORY"

nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
mpiexec -n $((4 * nodes)) -ppn 4 --cpu-bind numa \
    "$RUNSCRIPTS/conda-python-distributed" -u ddp_training.py --backend "${BACKEND:-nccl}" \
    --output-dir "train-${PBS_JOBID%%.*}"
