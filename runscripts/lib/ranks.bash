# SPDX-License-Identifier: GPL-2.0-only
# Finds which rank this process is: RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE. Sourced by conda-python-distributed.

# The launchers in the order in which they are tried: the innermost wins, because variables of outer ones are inherited
# and stale. A row applies if all variables of its second field are set (A+B). Each other field names the variable that
# has the value (A,B: A, else B; -: none). Variables in lower case are set below.
_launchers=(  # launcher, applies if set | rank, size | local rank, local size | host of rank 0, id of this start
    'torchrun TORCHELASTIC_RUN_ID+RANK+WORLD_SIZE
        RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR -'
    'openmpi OMPI_COMM_WORLD_RANK
        OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE
        SLURM_JOB_NODELIST,SLURM_NODELIST,PBS_NODEFILE,LSB_DJOB_HOSTFILE,PE_HOSTFILE
        PMIX_NAMESPACE,OMPI_MCA_ess_base_jobid'
    'hydra PMI_RANK+MPI_LOCALRANKID+no_pals
        PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
        SLURM_JOB_NODELIST,SLURM_NODELIST,PBS_NODEFILE,LSB_DJOB_HOSTFILE,PE_HOSTFILE hydra_proxy'
    'flux FLUX_TASK_RANK+FLUX_JOB_SIZE+no_pals
        FLUX_TASK_RANK FLUX_JOB_SIZE FLUX_TASK_LOCAL_ID flux_local_size
        flux_host flux_job'
    'slurm SLURM_PROCID+srun_task
        SLURM_PROCID SLURM_STEP_NUM_TASKS,SLURM_NTASKS,SLURM_NPROCS
        SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE,SLURM_TASKS_PER_NODE
        SLURM_STEP_NODELIST SLURM_STEP_ID,SLURM_STEPID'
    'pals PALS_RANKID
        PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID,PMI_LOCAL_RANK PALS_LOCAL_SIZE,PMI_LOCAL_SIZE
        PALS_APINFO,PBS_NODEFILE PALS_APID'
    'pmi PMI_RANK
        PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE
        SLURM_JOB_NODELIST,SLURM_NODELIST,PBS_NODEFILE,LSB_DJOB_HOSTFILE,PE_HOSTFILE -'
    'horovod HOROVOD_RANK+HOROVOD_SIZE
        HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE MASTER_ADDR -'
    'manual RANK+WORLD_SIZE
        RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR -'
)
_fields=(launcher taken rank world_size local_rank local_world_size)
_row=()
launcher=none rank=0 world_size=1 local_rank=0 local_world_size=1 host_names='' start_names='' step_nodes=''
flux_job='' flux_host='' flux_local_size=''

# Only ASCII: in some locales [0-9] matches other digits, too, and (( )) would execute what is not a number.
# An expression (=~) takes three times as long.
_is_number() { [[ -n $1 && $1 != *[!0123456789]* && ${#1} -le 10 && ( $1 == 0 || $1 != 0* ) ]]; }

_need_number() {  # NAME VALUE
    _is_number "$2" || _fail 1 "$1='$2' is not a whole number (only digits, no leading zero). Check what sets it: the" \
        "job script or the launcher"
}

_several_nodes() { ((world_size > local_world_size)); }

_first_set() {  # A,B -> name, value: of the first one that is set
    local IFS=,
    value=''
    for name in $1; do
        value=${!name-}
        [[ -z $value ]] || return 0
    done
}

_all_set() {  # A+B
    local name IFS=+
    for name in $1; do [[ -n ${!name-} ]] || return 1; done
}

_read_row() {  # FIELD...
    local i name value
    _row=("$@")
    launcher=$1 host_names=$7 start_names=${8#-}
    for i in 2 3 4 5; do
        _first_set "${_row[i]}"
        printf -v "${_fields[i]}" %s "$value"
    done
}

# SLURM_STEP_TASKS_PER_NODE is a list with repetitions in the order of the step's nodes: 4(x2),3 is 4, 4 and 3 tasks.
_slurm_tasks_on_this_node() {
    local list=$local_world_size node=${SLURM_NODEID:-0} name value entry tasks nodes sum=0 IFS=','
    local form='^([1-9][0-9]{0,8})(\(x([1-9][0-9]{0,8})\))?$'
    [[ -n $list ]] || _fail 1 "SLURM_STEP_TASKS_PER_NODE is not set, so the number of ranks on this node is unknown." \
        "Start the ranks with srun and pass its environment on (a container must not be run with --cleanenv)"
    _need_number SLURM_NODEID "$node"
    _first_set SLURM_STEP_TASKS_PER_NODE,SLURM_TASKS_PER_NODE
    local_world_size='' step_nodes=0
    for entry in $list; do
        [[ $entry =~ $form ]] || _fail 1 "$name='$list': '$entry' is not TASKS or TASKS(xNODES). Slurm sets this" \
            "variable: see whether the job script changes it"
        tasks=${BASH_REMATCH[1]} nodes=${BASH_REMATCH[3]:-1}
        ((node < step_nodes || node >= step_nodes + nodes)) || local_world_size=$tasks
        ((step_nodes += nodes, sum += tasks * nodes))
    done
    [[ -n $local_world_size ]] || _fail 1 "$name='$list' is for $step_nodes nodes, but SLURM_NODEID is $node. Slurm" \
        "sets both: see whether the job script changes one of them"
    # A heterogeneous step (srun --het-group=0,1) lists the tasks of all its components, in Slurm 22.05, 24.11 and 26.05
    # (seen).
    ((sum == world_size)) || _fail 1 "$name='$list' has $sum tasks, but the step has $world_size. Do not change" \
        "Slurm's variables; for a heterogeneous step export RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and" \
        "MASTER_ADDR for every rank"
}

_find_rank() {
    local row no_pals='' srun_task='' step_task=${SLURM_STEP_ID:-${SLURM_STEPID-}}
    local pmi=${PALS_RANKID:-${PMI_RANK-}} i name value
    # in ASCII, as Flux itself writes it where the locale is not UTF-8: flux-environment(7)
    flux_job=${FLUX_JOB_ID_PATH:-${FLUX_JOB_ID-}}
    flux_job=${flux_job//$'\xc6\x92'/f}
    for name in RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE; do
        [[ -z ${!name-} ]] || _need_number "$name" "${!name}"
    done

    # The batch script and salloc's interactive step have SLURM_*, too, but are not tasks: Slurm numbers them
    # 0xfffffffb and 0xfffffffa (slurm.h, SLURM_BATCH_SCRIPT and SLURM_INTERACTIVE_STEP).
    [[ $step_task != 429496729[01] ]] || step_task=''
    # shellcheck disable=SC2034  # read through the table
    # Inside Slurm, srun sets PALS_RANKID (--mpi=cray_shasta) but never MPI_LOCALRANKID: a rank with that is hydra's.
    [[ -n ${PALS_RANKID-} && -z ${SLURM_JOB_ID-} ]] || no_pals=1
    # srun's own PMI agrees with Slurm's variables (Slurm's src/plugins/mpi: cray_shasta, pmi2), and Slurm also knows
    # the step's nodes.
    _first_set SLURM_STEP_NUM_TASKS,SLURM_NTASKS,SLURM_NPROCS
    [[ -n $pmi && $pmi/${PMI_SIZE:-$value} != "${SLURM_PROCID-}/$value" ]] || srun_task=$step_task
    for row in "${_launchers[@]}"; do
        # shellcheck disable=SC2086  # split at blanks
        set -- $row
        ! _all_set "$2" || { _read_row "$@"; break; }
    done
    # in a Slurm step, srun itself sets PALS_RANKID and PMI_RANK
    if [[ $launcher != @(none|horovod|manual) && ( $launcher != slurm || -n ${PBS_JOBID-} ) ]]; then
        source "$_here/lib/leftovers.bash" 2> /dev/null || _incomplete "$_"
        _drop_leftovers
    fi
    # Ranks started one by one, by ssh, horovodrun or the user's own launcher, perhaps inside a step of one task.
    if [[ $launcher != torchrun && $world_size == 1 ]]; then
        i=${#_launchers[@]}
        if _all_set RANK+WORLD_SIZE && [[ $RANK/$WORLD_SIZE != 0/1 ]]; then ((i--))
        elif _all_set HOROVOD_RANK+HOROVOD_SIZE; then ((i -= 2))
        fi
        # shellcheck disable=SC2086
        ((i == ${#_launchers[@]})) || _read_row ${_launchers[i]}
    fi

    case $launcher in
        none)
            source "$_here/lib/alone.bash" 2> /dev/null || _incomplete "$_"
            _check_alone ;;
        torchrun | manual)
            ((world_size > 1)) || : "${local_rank:=0}" "${local_world_size:=1}"
            [[ -n $local_rank && -n $local_world_size ]] || _fail 1 "RANK=$rank and WORLD_SIZE=$world_size are set," \
                "but not both LOCAL_RANK='$local_rank' and LOCAL_WORLD_SIZE='$local_world_size'. Export all four" \
                "for every rank, or none and use srun, mpirun or mpiexec" ;;
        *)
            first_host_error=''
            if [[ $launcher == pals && -n ${PALS_APINFO-} &&
                ( -z $world_size || -z $local_rank || -z $local_world_size || $world_size == 1 ) ]]; then
                source "$_here/lib/pals.bash" 2> /dev/null || _incomplete "$_"
                _complete_from_apinfo "$PALS_APINFO" && first_host_error=''
            fi
            for i in 2 3 4 5; do
                name=${_fields[i]}
                [[ $launcher/$name != slurm/local_world_size ]] || _slurm_tasks_on_this_node
                if [[ $launcher/$name == flux/local_world_size ]]; then
                    source "$_here/lib/flux.bash" 2> /dev/null || _incomplete "$_"
                    _flux_tasks
                fi
                _is_number "${!name}" || _fail 1 "the launcher ($launcher) gives no valid $name for this process:" \
                    "'${!name}' (${_row[i]})${first_host_error:+; PALS_APINFO: $first_host_error}. Export RANK," \
                    "WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for every rank, or use srun, mpirun or mpiexec"
            done
            # An export in a job script reaches every task: all ranks would be rank 0.
            [[ ${RANK:-$rank}/${WORLD_SIZE:-$world_size} == "$rank/$world_size" ]] || _fail 1 \
                "RANK='${RANK-}' WORLD_SIZE='${WORLD_SIZE-}' contradict the launcher ($launcher), which started this" \
                "process as rank $rank of $world_size. Do not export them in the job script: 'unset RANK WORLD_SIZE'"
            # Below a shell or notebook that srun started as one task (batchspawner, srun --pty), this is not a task.
            if [[ $launcher == slurm && $world_size == 1 && ${SLURM_TASK_PID:-$$} != "$$" && -z ${RANK-} ]] &&
                _is_number "${SLURM_JOB_NUM_NODES-}" && ((SLURM_JOB_NUM_NODES > 1)); then
                _say "this is one rank in a job of $SLURM_JOB_NUM_NODES nodes: it runs in the only task of this step" \
                    "(a shell, a notebook). To use all nodes, put srun in front: srun --overlap ... ${0##*/} ..."
            fi
            ((local_world_size <= world_size)) || _fail 1 "the launcher ($launcher) reports $local_world_size ranks" \
                "on this node, but only $world_size in total" ;;
    esac

    # Python gets the user's own LOCAL_RANK and LOCAL_WORLD_SIZE; GPUs and nodes are divided by the launcher's.
    : "${LOCAL_RANK:=$local_rank}" "${LOCAL_WORLD_SIZE:=$local_world_size}"
    export RANK=$rank WORLD_SIZE=$world_size LOCAL_RANK LOCAL_WORLD_SIZE
    for name in rank:world_size local_rank:local_world_size LOCAL_RANK:LOCAL_WORLD_SIZE; do
        value=${name#*:} name=${name%:*}
        ((name < value)) || _fail 1 "$name=${!name} is not below $value=${!value} (from: $launcher). Ranks count from" \
            "0: fix ${name^^} and ${value^^} where they are set, or unset both"
    done
}
