# SPDX-License-Identifier: GPL-2.0-only
# Finds the innermost of several launchers. Sourced by ranks.bash only if variables of an outer launcher may be left
# over, because every rank would have to parse this file at every start.

# A launcher sets its variables in the processes that it starts. Variables that an ancestor already has are left over
# from an outer start. environ is the environment that a process started with (proc(5)). Slurm starts the process
# SLURM_TASK_PID (srun(1)).
_depth_of() {  # NAME -> depth: how many ancestors have this value; newest: set if all do, up to Slurm's own process
    local pid=$$ line entry found
    depth=0 newest=''
    while [[ $pid != "${SLURM_TASK_PID-}" ]]; do
        IFS= read -r line 2> /dev/null < "/proc/$pid/stat" || return 0
        line=${line##*) ? }  # skip the command's name, which may contain anything
        pid=${line%% *} found=''
        [[ -r /proc/$pid/environ ]] || continue  # a container's setuid starter
        while IFS= read -r -d '' entry; do
            [[ $entry != "$1=${!1}" ]] || { found=1; break; }
        done 2> /dev/null < "/proc/$pid/environ"
        [[ -n $found ]] || return 0
        ((++depth))
    done
    newest=1
}

_newest_of() {  # NAME... -> depth: the smallest one; a variable may have had the same value before
    local name least=''
    for name; do
        [[ -n ${!name-} ]] || continue
        _depth_of "$name"
        [[ -n $least ]] && ((depth >= least)) || least=$depth
    done
    depth=$least
}

# With several launchers: is the chosen one the innermost? Otherwise a job that was submitted from inside an mpirun
# would become many trainings of one rank each, all complete and with status 0.
_drop_leftovers() {
    local row name value size_name other_rank other_size own_depth depth newest IFS=$' \t\n'
    local -a own=("${_row[@]}") names
    # shellcheck disable=SC2034  # read through the table: a PALS_RANKID may be left over
    local no_pals=1
    for row in "${_launchers[@]}"; do
        # shellcheck disable=SC2086  # split at blanks
        set -- $row
        [[ $1 != "$launcher" && $1 != @(horovod|manual) ]] || continue
        # these three set PMI_RANK, too
        [[ $launcher/$1 != @(hydra|pals|flux)/pmi ]] || _all_set PMI_LOCAL_RANK+PMI_LOCAL_SIZE || continue
        if [[ $1 == slurm ]]; then [[ -n $step_task && -n ${SLURM_PROCID-} ]] || continue
        else _all_set "$2" || continue
        fi
        _first_set "$4"
        size_name=$name other_size=$value
        _first_set "$3"
        other_rank=$value
        _is_number "$other_size" || continue
        IFS=+
        # shellcheck disable=SC2206  # split there
        names=(${own[1]%+[a-z]*})
        IFS=$' \t\n'
        _depth_of "${names[${#names[@]} - 1]}"
        own_depth=$depth
        case $1 in
            hydra) _depth_of MPI_LOCALRANKID ;;     # PALS has a PMI_RANK, too
            pmi) _newest_of PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE ;;
            *) _depth_of "$name" ;;
        esac
        if ((own_depth > depth)) || [[ $own_depth/$1 == "$depth/slurm" && -n $newest ]]; then
            [[ $other_rank != 0 ]] || _say "${own[2]}=$rank and ${own[3]}=$world_size ($launcher) are left over from" \
                "an outer start and ignored: this is rank 0 of $other_size ($1)"
            printf -v value '%s,' "${own[@]:1:5}"
            IFS=+,
            # shellcheck disable=SC2206
            names=($value)
            IFS=$' \t\n'
            for name in "${names[@]}"; do
                # keep those of the innermost launcher, and srun's own PMI variables if they agree with it
                [[ $name == [!A-Z]* || " ${*//[+,]/ } " == *" $name "* || $name == PMI_* && -n $srun_task ]] ||
                    unset "$name"
            done
            if [[ $launcher == torchrun && -n ${MASTER_ADDR-} ]]; then
                _depth_of MASTER_ADDR
                ((depth < own_depth)) || unset MASTER_ADDR MASTER_PORT
            fi
            # shellcheck disable=SC2086
            _read_row $row
            _drop_leftovers
            return
        fi
        ((own_depth < depth)) || [[ $world_size != 1 || $other_size == 1 ]] || _fail 1 "two launchers contradict each" \
            "other: by ${own[2]}=$rank and ${own[3]}=1 ($launcher) this is the only rank, by $name=$other_rank and" \
            "$size_name=$other_size ($1) it is one of $other_size. One launcher is left over from an outer start:" \
            "unset its variables in the job script, such as ${names[0]}"
    done
}
