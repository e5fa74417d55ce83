#!/bin/bash
# Installs PyTorch, with NCCL, the OFI plugin, torchvision and mpi4py, on one CPU node of Derecho.
#
#   PBS_ACCOUNT=<project> examples/derecho/build.sh [easyconfig ...]        on a login node
#
# There everything is downloaded (nodes have no network), then this file is submitted to do the rest; it waits for the
# job and ends with its status. Where to install is EasyBuild's own setting: EASYBUILD_PREFIX or --prefix.
#PBS -N slingtorch-build
#PBS -q main
#PBS -l select=1:ncpus=128:mem=230GB
#PBS -l walltime=04:00:00
#PBS -j oe
set -eu

default=(PyTorch-2.4.0-derecho-cray-mpich.eb torchvision-0.19.0-derecho-cray-mpich.eb
    mpi4py-4.0.0-derecho-cray-mpich-PyTorch-2.4.0.eb)
generation=${NCARENV:-23.09}    # 24.12 for PyTorch 2.5.1 and newer

# a batch shell may not have the command module
if ! type module > /dev/null 2>&1; then
    # shellcheck disable=SC1091
    . /etc/profile.d/z00_modules.sh
fi

if [[ -z ${PBS_JOBID-} ]]; then
    : "${PBS_ACCOUNT:?name the project to charge: PBS_ACCOUNT=<project> $0}"
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    [[ $# -gt 0 ]] || set -- "${default[@]}"
    EASYCONFIGS=$*
    prefix=${EASYBUILD_PREFIX:-$HOME/.local/easybuild}
    variables="EASYCONFIGS='$EASYCONFIGS',NCARENV=$generation,EASYBUILD_PREFIX='$prefix',SLINGTORCH='$(command -v slingtorch)'"
    module --force purge
    module load "ncarenv/$generation"
    eval "$(slingtorch env --site derecho)"
    # shellcheck disable=SC2086  # several names
    eb $EASYCONFIGS --robot --fetch
    exec qsub -A "$PBS_ACCOUNT" -W block=true -v "$variables" "$here/build.sh"
fi

PATH=$(dirname "$SLINGTORCH"):$PATH
# ncarenv survives an ordinary purge
module --force purge
module load "ncarenv/$generation"
eval "$(slingtorch env --site derecho)"
# compilations need up to 4 GiB each: the easyblock starts fewer where memory is short
# shellcheck disable=SC2086  # several names
exec eb $EASYCONFIGS --robot --max-parallel=96
