#!/bin/bash
# Tests an installed PyTorch on two GPU nodes of Derecho: 8 ranks, 4 on each node.
#
#   qsub -A <project> examples/derecho/test.sh
#
# Or in an interactive job, in the same directory:
#   qsub -I -A <project> -q main -l select=2:ncpus=64:mpiprocs=4:ngpus=4 -l walltime=00:30:00
#   bash examples/derecho/test.sh
#PBS -N slingtorch-test
#PBS -q main
#PBS -l select=2:ncpus=64:mpiprocs=4:ngpus=4:mem=480GB
#PBS -l walltime=00:30:00
#PBS -j oe
set -eu
cd "${PBS_O_WORKDIR:-.}"
tests=${TESTS:-examples/derecho}

if ! type module > /dev/null 2>&1; then
    # shellcheck disable=SC1091
    . /etc/profile.d/z00_modules.sh
fi
module --force purge
module load "${PYTORCH_MODULE:-PyTorch/2.4.0-derecho-cray-mpich}"    # brings ncarenv and cuda as well

nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
ranks=$((4 * nodes))
# each rank on the cores of one NUMA domain, which is next to one GPU and one network card
run() { mpiexec -n "$ranks" -ppn 4 --cpu-bind numa "$@"; }

python "$tests/test_imports.py"
run python "$tests/test_backend.py" --backend mpi
run "$RUNSCRIPTS/conda-python-distributed" "$tests/test_backend.py" --backend nccl
run env MPICH_GPU_SUPPORT_ENABLED=0 python "$tests/test_refusal.py"
run python "$tests/all_reduce_test.py" --backend mpi --json all_reduce_mpi.json
run "$RUNSCRIPTS/conda-python-distributed" "$tests/all_reduce_test.py" --backend nccl --json all_reduce_nccl.json
