# SPDX-License-Identifier: GPL-2.0-only
# --torchrun: this task stands for its node, and PyTorch's launcher starts the workers on it. Sourced by
# conda-python-distributed, after ranks.bash, master.bash, gpus.bash and threads.bash, where it is asked for.

# Node rank, address and port come from the scheduler; torchrun would wait a minute for its other rendezvous, or find
# other nodes there (torch/distributed/run.py). An option may be cut short (argparse), and PET_* stands for it.
_refuse_rendezvous() {  # OPTIONS OF TORCHRUN, SCRIPT AND ITS ARGUMENTS...
    local word name own before=''
    local remedy='is set here, from what the scheduler says. Leave it out; for another number of workers on each node'
    remedy+=' write --torchrun=N, for another port export MASTER_PORT'
    for own in RDZV_ENDPOINT RDZV_BACKEND RDZV_ID STANDALONE; do
        name=PET_$own
        [[ -z ${!name-} ]] || _fail 1 "--torchrun: $name=${!name} is one of torchrun's options, whose rendezvous" \
            "${remedy/Leave it out/Unset $name}"
    done
    for word; do
        name=${word%%=*}
        name=${name//_/-}
        case $name in
            -m | --module | *.py | *.py[co] | */*) return ;;
            --no-python | --run-path) name='' ;;  # no value follows
            --?*)
                for own in rdzv-endpoint rdzv-backend rdzv-id standalone nnodes node-rank nproc-per-node master-addr \
                    master-port; do
                    [[ --$own != "$name"* ]] || _fail 2 "--torchrun: --$own $remedy"
                done ;;
            -*) ;;
            *) [[ $before == -* ]] || return 0 ;;   # the value of an option, else the script
        esac
        before=$name
    done
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
    # a process sees one slice alone (NVIDIA's MIG guide, "Device enumeration"), and each worker has the whole list
    [[ ${gpus[0]-} != MIG-* ]] || gpu_count=1
    [[ -n $workers ]] || workers=$gpu_count
    [[ $workers =~ ^[1-9][0-9]{0,3}$ ]] || _fail 1 "--torchrun='$1': this is not a number of workers from 1 on, and this" \
        "task sees $gpu_count GPUs. Say how many workers start on each node: --torchrun=N"
    shift
    # a rank that is told to see none may be on a machine with GPUs
    [[ -z $gpus_from ]] || ((gpu_count)) || _fail 1 "--torchrun: $gpus_from='${!gpus_from}' hides all GPUs from this" \
        "task. Ask for GPUs, or unset it for workers without"
    ((gpu_count == 0 || workers <= gpu_count)) || _fail 1 "--torchrun=$workers: this task sees $gpu_count GPU(s)" \
        "only. Start at most one worker per GPU, or ask for more GPUs; slices of a GPU (MIG) want a rank each," \
        "without --torchrun"
    _refuse_rendezvous "$@"
    _count_cores
    # OLCF's page: without --cpus-per-task all eight workers of a node ran on core 1.
    ((cores >= workers)) || _fail 1 "--torchrun: the $workers workers of this node would share $cores core(s), as" \
        "srun gives a task one core unless told. Add --cpus-per-task=CORES_OF_THE_NODE to srun"
    # Slurm signals every process of a step (--signal, scancel -s), and torchrun's agent dies of these two while its
    # workers save. Workers ignore them as well until the program sets its own handler.
    trap '' USR1 USR2
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / workers))}
    torchrun_args=(-m torch.distributed.run --nnodes="$WORLD_SIZE" --node-rank="$RANK" --nproc-per-node="$workers"
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
        # of this start alone
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
