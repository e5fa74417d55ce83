# SPDX-License-Identifier: GPL-2.0-only
# How Flux distributes the ranks. Sourced by ranks.bash.

# Flux sets no variable for the number of ranks on this node, nor for the host of rank 0. Since 0.62 its command knows
# both (flux-job(1), taskmap). Without the command, as in a container, an even distribution is assumed: if that is
# wrong, some rank finds that its local rank is too high, and stops.
_flux_tasks() {  # -> flux_local_size, flux_host
    local nodes=${FLUX_JOB_NNODES:-1} map='' line host ids entry first last count here IFS=$' \t\n'
    _need_number FLUX_JOB_SIZE "$world_size"
    _need_number FLUX_TASK_RANK "$rank"
    _need_number FLUX_JOB_NNODES "$nodes"
    flux_host=''
    if ((nodes <= 1)); then
        flux_local_size=$world_size
    elif type -P flux > /dev/null && map=$(exec flux job taskmap --to=hosts "${FLUX_JOB_ID-}" 2>&1); then
        IFS=$'\n'
        for line in ${map:-''}; do  # tuolumne1005: 0-3,8
            IFS=$' \t\n'
            host=${line%%: *} ids=${line#*: } count=0 here=''
            [[ $line =~ ^[A-Za-z0-9][A-Za-z0-9._-]*:\ [0-9]{1,9}([,-][0-9]{1,9})*$ ]] || _fail 1 "'flux job taskmap" \
                "--to=hosts' printed '${line:0:60}', not HOST: TASKS. Export MASTER_ADDR, RANK, WORLD_SIZE," \
                "LOCAL_RANK and LOCAL_WORLD_SIZE for every rank"
            for entry in ${ids//,/ }; do
                first=${entry%-*} last=${entry#*-}
                ((count += last - first + 1))
                ((rank < first || rank > last)) || here=1
                # shellcheck disable=SC2034  # read through the table
                ((first != 0)) || flux_host=$host
            done
            [[ -z $here ]] || flux_local_size=$count
        done
        IFS=$' \t\n'
    elif ((world_size % nodes == 0)); then
        flux_local_size=$((world_size / nodes))
    else
        _fail 1 "how the $world_size ranks are distributed over $nodes nodes is unknown, because the flux command" \
            "failed: ${map:-it is not in PATH}. Make it available to the ranks (PATH, FLUX_URI), or start the same" \
            "number on every node"
    fi
    local_world_size=$flux_local_size
}
