# SPDX-License-Identifier: GPL-2.0-only
# --torchrun: the task becomes PyTorch's launcher, which starts the workers of the node. Sourced on request by
# conda-python-distributed, after ranks.bash, master.bash, gpus.bash and threads.bash.

# Node rank, address and port come from the scheduler. With another rendezvous, torchrun would wait a minute or find
# other nodes (torch/distributed/run.py). PET_* set the same options.
_refuse_rendezvous() {  # OPTIONS OF TORCHRUN, SCRIPT AND ITS ARGUMENTS...
    local word name may_follow=''
    local remedy='is set from the scheduler. Leave it out; to change the number of workers on each node, use'
    remedy+=' --torchrun=N; to change the port, export MASTER_PORT'
    for name in PET_RDZV_ENDPOINT PET_RDZV_BACKEND PET_RDZV_ID PET_STANDALONE; do
        [[ -z ${!name-} ]] || _fail 1 "--torchrun: $name=${!name} is an option of torchrun, but the rendezvous" \
            "${remedy/Leave it out/Unset $name}"
    done
    for word; do
        case ${word//_/-} in
            -m | --module | *.py | *.py[co] | */*) return ;;
            --rdzv-[bei]* | --standalone | --nnodes* | --node-rank* | --nproc-per* | --master-[ap]*)
                _fail 2 "--torchrun: ${word%%=*} $remedy" ;;
            --no-python | --run-path) may_follow='' ;;
            -*) may_follow='a value' ;;
            *)
                [[ -n $may_follow ]] || return 0    # the script
                may_follow='' ;;
        esac
    done
}

# Sets torchrun_args, the arguments for python. An empty NUMBER_OF_WORKERS means one per GPU.
_prepare_torchrun() {  # NUMBER_OF_WORKERS ARGUMENTS OF torchrun...
    local gpu_count cores workers=$1 own gpus_from
    local -a gpus
    ((local_world_size == 1)) || _fail 1 "--torchrun: torchrun starts the workers of a node by itself, but this node" \
        "already has $local_world_size tasks. Start one task per node (srun --ntasks-per-node=1" \
        "--cpus-per-task=CORES_OF_THE_NODE), or omit --torchrun"
    _find_gpus ''
    gpu_count=${#gpus[@]}
    # a process sees only one slice (NVIDIA's MIG guide, "Device enumeration"), but each worker gets the whole list
    [[ ${gpus[0]-} != MIG-* ]] || gpu_count=1
    [[ -n $workers ]] || workers=$gpu_count
    [[ $workers =~ ^[1-9][0-9]{0,3}$ ]] || _fail 1 "--torchrun='$1' gives no number of workers from 1 to 9999, and" \
        "this task sees $gpu_count GPUs. Give the number of workers on each node: --torchrun=N"
    shift
    # a task whose GPUs are hidden may still be on a machine with GPUs
    [[ -z $gpus_from ]] || ((gpu_count)) || _fail 1 "--torchrun: $gpus_from='${!gpus_from}' hides all GPUs from this" \
        "task. Request GPUs, or unset this variable for workers without GPUs"
    ((gpu_count == 0 || workers <= gpu_count)) || _fail 1 "--torchrun=$workers: this task sees only $gpu_count" \
        "GPU(s). Start at most one worker per GPU, or request more GPUs; for slices of a GPU (MIG), start one rank" \
        "per slice, without --torchrun"
    _refuse_rendezvous "$@"
    _count_cores
    # OLCF's page: without --cpus-per-task all eight workers of a node ran on core 1.
    ((cores >= workers)) || _fail 1 "--torchrun: the $workers workers of this node would share $cores core(s):" \
        "srun gives a task one core by default. Add --cpus-per-task=CORES_OF_THE_NODE to srun"
    # Slurm signals every process of a step (--signal, scancel -s), and these two would kill torchrun's agent while its
    # workers save. Workers ignore them as well until the program sets its own handler.
    trap '' USR1 USR2
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / workers))}
    torchrun_args=(-m torch.distributed.run --nnodes="$WORLD_SIZE" --node-rank="$RANK" --nproc-per-node="$workers"
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
        # unique to this start
        --rdzv-id="${SLURM_JOB_ID:-${PBS_JOBID:-${flux_job:-nojob}}}-$MASTER_PORT")
    # bind each worker to the cores next to its GPU, if this PyTorch can do that and supports GPUs
    own=$(type -P python) || own=''
    own="${own%/bin/python}/lib/python3*/site-packages/torch"  # a pattern, for compgen
    if ((gpu_count)) && [[ " $* " != *' --numa-binding'* ]] && compgen -G "$own/numa/binding.py" > /dev/null &&
        compgen -G "$own/lib/libtorch_[ch][ui][dp]*.so" > /dev/null; then  # libtorch_cuda or libtorch_hip
        torchrun_args+=(--numa-binding=exclusive)
    fi
    torchrun_args+=("$@")
}
