# SPDX-License-Identifier: GPL-2.0-only
# Threads of the ranks of one node. Sourced by conda-python-distributed, after ranks.bash.

_count_cores() {  # -> cores: CPUs that this task may use
    local entry IFS=$' \n'
    local -a lines
    mapfile -t lines < "$_proc_status"
    cores=0
    [[ ${lines[*]} =~ Cpus_allowed_list:[[:blank:]]*([0123456789,-]+) ]] || return 0
    for entry in ${BASH_REMATCH[1]//,/ }; do ((cores += ${entry#*-} - ${entry%-*} + 1)); done
}

# If nothing binds the ranks, each would start as many threads as there are cores. Start one instead, as torchrun does
# for several workers (torch/distributed/run.py, "Setting OMP_NUM_THREADS environment variable for each process").
_set_threads() {
    local cores on_node=${SLURM_CPUS_ON_NODE-} line
    ((local_world_size > 1)) && [[ -z ${OMP_NUM_THREADS-} ]] || return 0
    if ! _is_number "$on_node"; then
        IFS= read -r line 2> /dev/null < "$_cores_online" || return 0
        [[ $line =~ ^0-([0123456789]{1,5})$ ]] || return 0
        on_node=$((BASH_REMATCH[1] + 1))
    fi
    _count_cores
    ((cores * local_world_size <= on_node)) || export OMP_NUM_THREADS=1
}
