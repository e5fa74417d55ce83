#!/bin/bash -e
# SPDX-License-Identifier: GPL-2.0-only
# Trains on two whole nodes of LUMI-G in a container, with one task for each of their 8 GCDs.
#
#   slingtorch examples training                      in this file's directory
#   sbatch --account=project_<your_project_id> train.sh
#
# The image must have scikit-learn, whose handwritten digits are the data set. If it does not, and the module has a
# virtual environment (2.2.2 and newer), install it once:  module load LUMI PyTorch/...; pip install scikit-learn
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --tasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --output="output_%x_%j.txt"
#SBATCH --partition=standard-g
#SBATCH --mem=480G
#SBATCH --time=00:10:00

module load LUMI
module load "${PYTORCH_MODULE:-PyTorch/2.7.1-rocm-6.2.4-python-3.12-singularity-20250827}"

# Uncomment to see what RCCL does and which network it uses (a lot of output).
# export SINGULARITYENV_NCCL_DEBUG=INFO SINGULARITYENV_NCCL_DEBUG_SUBSYS=INIT,COLL

# binds each task to the cores nearest to its GPU; ends the job if that is not possible
binding=$("$RUNSCRIPTS/cpu-bind")

srun --cpu-bind="$binding" \
    singularity exec "$SIFPYTORCH" \
        conda-python-distributed -u ddp_training.py --epochs "${EPOCHS:-20}" \
            --output-dir "$SLURM_JOB_NAME-$SLURM_JOB_ID"
