# SPDX-License-Identifier: GPL-2.0-only
# This rank's share of the GPUs that the task sees, in the variable that SLINGTORCH_GPU_VISIBILITY names.
# Sourced by conda-python-distributed, after ranks.bash and facts.bash.

# PBS may give all nodes the identifiers of the first node's GPUs (openpbs#1164, #2633). CUDA then finds no GPU.
_forget_foreign_gpus() {
    local file line known=' ' entry IFS=$' \t,'
    [[ ${CUDA_VISIBLE_DEVICES-} == *GPU-* ]] || return 0
    for file in "$_nvidia_gpus"/*/information; do
        while read -r line; do
            [[ $line != 'GPU UUID:'* ]] || known+="${line##*[[:space:]]} "
        done 2> /dev/null < "$file"
    done
    [[ $known == *GPU-* && $known != *\?* ]] || return 0     # the driver does not list them
    set -f
    # shellcheck disable=SC2086  # split at commas
    set -- $CUDA_VISIBLE_DEVICES
    set +f
    for entry; do
        [[ $entry == GPU-* && $known != *" $entry"* ]] || continue
        ((local_rank)) || _say "CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:0:120} names $entry, but this node has" \
            "no such GPU, so the variable is unset: PBS gives all nodes the names of the first node's GPUs"
        unset CUDA_VISIBLE_DEVICES
        return
    done
}

# The GPUs that this task sees: those that the scheduler gave it, else those of the node.
_find_gpus() {  # VARIABLE_ASKED_FIRST_OR_EMPTY -> gpus, gpus_from: the variable that lists them, or empty
    local device count=0 i entry IFS=','
    local -a listed there=("$_nvidia_gpus"/*/information)
    gpus=()
    # Slurm sets one or several
    for gpus_from in ${1:+"$1"} $_gpu_variables ''; do
        [[ -z $gpus_from || -z ${!gpus_from+set} ]] || break
    done
    if [[ -n $gpus_from ]]; then
        set -f
        # shellcheck disable=SC2206  # split at commas
        listed=(${!gpus_from})
        set +f
        for entry in ${listed[@]+"${listed[@]}"}; do
            # an invalid entry ends the list; the plain test is first because an expression costs 25 us
            [[ $entry == [0123456789] || $entry =~ $_gpu_entry ]] || break
            # so does a number beyond the driver's GPUs
            [[ $gpus_from != CUDA* || ! -e ${there[0]} || $entry == *[!0-9]* ]] || ((10#$entry < ${#there[@]})) || break
            gpus+=("$entry")
        done
    elif [[ ${SLURM_GPUS_ON_NODE-} =~ ^[0-9]{1,4}$ ]]; then
        count=$((10#$SLURM_GPUS_ON_NODE))
    else  # count device files; NVIDIA's GPUs have files in /dev/dri, too
        [[ $1 == ROCR* || $1 == HIP* ]] || for device in /dev/nvidia[0-9]*; do [[ ! -e $device ]] || ((++count)); done
        ((count)) || for device in /dev/dri/renderD*; do [[ ! -e $device ]] || ((++count)); done
    fi
    for ((i = 0; i < count; i++)); do gpus[i]=$i; done
}

_share_gpus() {
    local variable=${SLINGTORCH_GPU_VISIBILITY-} on_node='' gpus_from name share i IFS=','
    local -a gpus=() mine=()
    _forget_foreign_gpus
    [[ -n $variable ]] || return 0  # some sites want every rank to see all GPUs
    [[ ",$_gpu_variables," == *",$variable,"* && $variable != *,* ]] || _fail 1 \
        "SLINGTORCH_GPU_VISIBILITY='$variable' is not one of ${_gpu_variables//,/, }. Set it to one of them, or unset" \
        "it to let every rank see all GPUs"
    ((local_world_size > 1)) || return 0
    [[ -z ${!variable+set} || -n ${!variable} ]] || return 0  # set to nothing: the user hides all GPUs
    [[ ! ${SLURM_GPUS_ON_NODE-} =~ ^[0-9]{1,4}$ ]] || on_node=$((10#$SLURM_GPUS_ON_NODE))

    _find_gpus "$variable"
    # The layers above ROCR_VISIBLE_DEVICES number the GPUs that it leaves from 0 again (ROCm, "GPU isolation
    # techniques").
    [[ $gpus_from != ROCR_VISIBLE_DEVICES || $gpus_from == "$variable" ]] ||
        for ((i = 0; i < ${#gpus[@]}; i++)); do gpus[i]=$i; done

    # GPUs that Slurm has divided (--gpus-per-task, --gpu-bind) must not be divided again: two ranks with two GPUs each
    # would keep one. The tasks of `srun --gpus-per-task` have no SLURM_GPUS_PER_TASK, but they have a list that is
    # shorter than that of the step's GPUs on the node (seen with Slurm 22.05).
    if [[ $launcher == slurm ]]; then
        case ${SLURM_GPU_BIND-} in '' | none | *,none) ;; *) return 0 ;; esac
        if [[ -n $on_node ]]; then
            ((${#gpus[@]} >= on_node)) || return 0
        else
            [[ -z ${SLURM_GPUS_PER_TASK-}${SLURM_NTASKS_PER_GPU-} && ${SLURM_TRES_PER_TASK-} != *gpu* ]] || return 0
        fi
    fi
    # Fewer GPUs than ranks: the list is already for this rank only, or the ranks share GPUs on purpose.
    ((${#gpus[@]} >= local_world_size)) || return 0
    share=$((${#gpus[@]} / local_world_size))
    mine=("${gpus[@]:local_rank * share:share}")
    export "$variable=${mine[*]}"
    [[ $variable == ROCR_VISIBLE_DEVICES ]] || return 0
    for ((i = 0; i < share; i++)); do mine[i]=$i; done  # numbered again, as above
    for name in HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL; do
        [[ -z ${!name-} ]] || export "$name=${mine[*]}"
    done
}
