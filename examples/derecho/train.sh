#!/bin/bash
# Training on two GPU nodes of Derecho.
#
#   cd examples/digits
#   qsub -A <project> ../derecho/train.sh
#PBS -N slingtorch-train
#PBS -q main
#PBS -l select=2:ncpus=64:mpiprocs=4:ngpus=4:mem=480GB
#PBS -l walltime=00:30:00
#PBS -j oe
set -eu
cd "${PBS_O_WORKDIR:-.}"

if ! type module > /dev/null 2>&1; then
    # shellcheck disable=SC1091
    . /etc/profile.d/z00_modules.sh
fi
module --force purge
module load "${PYTORCH_MODULE:-PyTorch/2.4.0-derecho-cray-mpich}"

nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
mpiexec -n $((4 * nodes)) -ppn 4 --cpu-bind numa \
    "$RUNSCRIPTS/conda-python-distributed" -u train_digits.py --backend "${BACKEND:-nccl}" --json losses.json
