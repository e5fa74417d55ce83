# SPDX-License-Identifier: GPL-2.0-only
# --torchrun: this task stands for its node, and PyTorch's launcher starts the workers on it. Sourced by
# conda-python-distributed, after ranks.bash, master.bash and gpus.bash, where it is asked for.

_count_cores() {  # -> cores: CPUs that this task may use
    local line entry IFS=,
    cores=0
    while IFS= read -r line; do
        [[ $line == Cpus_allowed_list:* ]] || continue
        for entry in ${line##*[[:space:]]}; do ((cores += ${entry#*-} - ${entry%-*} + 1)); done
    done < "$_proc_status"
}

# The arguments for python -> torchrun_args. NUMBER_OF_WORKERS is empty for one per GPU.
_prepare_torchrun() {  # NUMBER_OF_WORKERS ARGUMENTS OF torchrun...
    local gpu_count cores workers=$1 own gpus_from
    local -a gpus
    ((local_world_size == 1)) || _fail 1 "--torchrun: torchrun starts the workers of a node by itself, but this node" \
        "has $local_world_size tasks already. Start one task per node (srun --ntasks-per-node=1" \
        "--cpus-per-task=CORES_OF_THE_NODE), or leave --torchrun out"
    _find_gpus ''
    gpu_count=${#gpus[@]}
    [[ -n $workers ]] || workers=$gpu_count
    [[ $workers =~ ^[1-9][0-9]{0,3}$ ]] || _fail 1 "--torchrun='$1': this is no number of workers from 1 on, and this" \
        "task sees $gpu_count GPUs. Say how many workers start on each node: --torchrun=N"
    shift
    ((gpu_count == 0 || workers <= gpu_count)) || _fail 1 "--torchrun=$workers: this task sees $gpu_count GPUs only." \
        "Start at most one worker per GPU, or ask for more GPUs"
    _count_cores
    # OLCF's page: without --cpus-per-task all eight workers of a node ran on core 1.
    ((cores >= workers)) || _fail 1 "--torchrun: the $workers workers of this node would share $cores core(s), as" \
        "srun gives a task one core unless told. Add --cpus-per-task=CORES_OF_THE_NODE to srun"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / workers))}
    torchrun_args=(-m torch.distributed.run --nnodes="$WORLD_SIZE" --node-rank="$RANK" --nproc-per-node="$workers"
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
        # of this start alone, also for another --rdzv-backend
        --rdzv-id="${SLURM_JOB_ID:-${PBS_JOBID:-${flux_job:-nojob}}}-$MASTER_PORT")
    # each worker to the cores next to its GPU, where this PyTorch can do that and knows GPUs
    own=$(type -P python) || own=''
    own="${own%/bin/python}/lib/python3*/site-packages/torch"  # a pattern, for compgen
    if ((gpu_count)) && [[ " $* " != *' --numa-binding'* ]] && compgen -G "$own/numa/binding.py" > /dev/null &&
        compgen -G "$own/lib/libtorch_[ch][ui][dp]*.so" > /dev/null; then  # libtorch_cuda or libtorch_hip
        torchrun_args+=(--numa-binding=exclusive)
    fi
    torchrun_args+=("$@")
}
