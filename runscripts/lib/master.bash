# SPDX-License-Identifier: GPL-2.0-only
# Where rank 0 listens: MASTER_ADDR and MASTER_PORT. Sourced by conda-python-distributed, after ranks.bash.

_find_master() {
    _find_host
    _find_port
    export MASTER_ADDR MASTER_PORT
}

_find_host() {
    local colons name hosts=$host_names wanting unread='' remedy='Export MASTER_ADDR=<host of rank 0> in the job script'
    if [[ -n ${MASTER_ADDR-} ]]; then
        colons=${MASTER_ADDR//[!:]/}
        # torch's env:// would use the whole text as a host name and fail much later. An IPv6 address has two colons or
        # more, and a zone (fe80::1%hsn0) if it is link-local.
        [[ ${#colons} -ne 1 && $MASTER_ADDR =~ ^[[:alnum:]_:][[:alnum:]._:%-]*$ ]] || _fail 1 \
            "MASTER_ADDR='$MASTER_ADDR' is not a host name or address. Put only the host there, the port in MASTER_PORT"
        # on every node these mean the node itself: other ranks would look for rank 0 on their own node
        ! _several_nodes ||
            [[ ! $MASTER_ADDR =~ ^(localhost(\..*)?|ip6-localhost|ip6-loopback|127\..*|::1|0\.0\.0\.0)$ ]] ||
            _fail 1 "MASTER_ADDR=$MASTER_ADDR means each node itself, but the $world_size ranks are on several nodes" \
                "($local_world_size on this one), so the others would never reach rank 0. Unset MASTER_ADDR to have" \
                "the node of rank 0 found, or set its name"
        ! _several_nodes || _refuse_loopback_name
        return
    fi
    if ! _several_nodes; then
        # always works, whatever the state of network and name service, and nobody outside the node can connect to it
        MASTER_ADDR=127.0.0.1
        return
    fi

    source "$_here/get-master" 2> /dev/null || _incomplete "$_"
    first_host=''
    if [[ $launcher == slurm && ${SLURM_DISTRIBUTION-} == arbitrary* ]]; then
        # Rank 0 is on the first host of the user's list, but the step's own list is sorted (seen with Slurm 22.05).
        hosts=SLURM_ARBITRARY_NODELIST,SLURM_HOSTFILE,PALS_APINFO
        wanting='with srun -m arbitrary, rank 0 is on the first host of your list, but no variable holds that list'
        wanting+='. Put the list into a file and name it in SLURM_HOSTFILE, without -w'
    elif [[ $launcher == flux ]]; then
        # shellcheck disable=SC2016  # for the user's shell
        remedy='In the script of flux batch: export MASTER_ADDR=$(flux hostlist -n 0 local)'
        wanting="the command 'flux job taskmap' does not work here (check PATH and FLUX_URI)"
    elif [[ $hosts == *,* ]]; then wanting="none of ${hosts//,/, } is set. Pass the launcher's environment on"
    else wanting="$hosts is not set. Pass the launcher's environment on"
    fi
    # Open MPI 6 passes on the variables of the srun that starts its daemons (PRRTE's plm_slurm_module.c). In those,
    # SLURM_JOB_NODELIST has the nodes of that step and SLURM_NODELIST those of the job (seen with Slurm 26.05).
    [[ $hosts != SLURM_JOB_NODELIST,* || -z ${SLURM_NODELIST-} ||
        ${SLURM_JOB_NODELIST-} != "${SLURM_STEP_NODELIST-}" ]] || hosts=SLURM_NODELIST,$hosts
    for name in ${hosts//,/ }; do
        [[ -n ${!name-} ]] || continue
        # shellcheck disable=SC2016  # for the user's shell
        [[ $name != P* ]] || remedy='Before the launcher: export MASTER_ADDR=$("$RUNSCRIPTS/get-master")'
        ! first_of_variable "$name" count || break
        [[ $name == PALS_APINFO ]] || _fail 1 "$first_host_error${unread:+. $unread}. $remedy"
        unread=$first_host_error wanting=$first_host_error
    done
    [[ -n $first_host ]] || _fail 1 "the $world_size ranks are on several nodes (launcher: $launcher), but the" \
        "host of rank 0 is unknown: $wanting. $remedy"
    # Use the step's list, not the job's: a step may leave out the job's first node.
    [[ $name != SLURM_STEP_NODELIST ]] || ((host_count == step_nodes)) || _fail 1 "SLURM_STEP_NODELIST has" \
        "$host_count host(s), but the tasks of the step are on $step_nodes nodes (SLURM_STEP_TASKS_PER_NODE). Slurm" \
        "sets both: see whether the job script changes one of them. $remedy"
    MASTER_ADDR=$first_host
}

# Refuses a name that the hosts file of this node gives only to the loopback and that is not the node's own: other
# nodes, or this one, could not reach rank 0 by it.
_refuse_loopback_name() {
    local address names found=''
    while read -r address names || [[ -n $address ]]; do
        names=" ${names%%#*} "
        names=${names//$'\t'/ }
        [[ $names == *" $MASTER_ADDR "* ]] || continue
        [[ $address == @(127.*|::1) && $names != *" ${SLURMD_NODENAME:-$HOSTNAME} "* &&
            $names != *" ${HOSTNAME%%.*} "* ]] || return 0
        found=$address
    done 2> /dev/null < "$_hosts"
    [[ -z $found ]] || _fail 1 "MASTER_ADDR=$MASTER_ADDR is $found in this node's $_hosts and means the node itself," \
        "but the $world_size ranks are on several nodes. Unset MASTER_ADDR to have the node of rank 0 found"
}

# Sets the port: the same on all ranks of this start, and different from that of any other start on the same node.
_find_port() {
    local name value job=0 start hydra_proxy='' i code
    if [[ -n ${MASTER_PORT-} ]]; then
        if ! _is_number "$MASTER_PORT" || ((MASTER_PORT < 1 || MASTER_PORT > 65535)); then
            _fail 1 "MASTER_PORT='$MASTER_PORT' is not a port (1 to 65535). Fix it in the job script, or unset it"
        fi
        return
    fi

    # The job's number: consecutive jobs may share nodes. A heterogeneous step has one SLURM_JOB_ID per component.
    _first_set SLURM_HET_JOB_ID,SLURM_JOB_ID,SLURM_JOBID,PBS_JOBID
    if [[ $value =~ ^([0-9]{1,10})(\[([0-9]{1,9})\])? ]]; then  # 4711, PBS: 1234.server, 1234[5].server
        job=$((10#${BASH_REMATCH[1]} + 10#${BASH_REMATCH[3]:-0}))
    fi

    # What distinguishes this start from another one in the same job.
    [[ $launcher != hydra ]] || _several_nodes || _find_hydra_proxy
    _first_set "$start_names"
    start=$value
    # hash a text, or a number whose low digits are always the same
    if [[ $launcher == @(openmpi|pals|flux) ]] || ! _is_number "${value:-0}"; then
        start=${value:+0}
        for ((i = 0; i < ${#value}; i++)); do
            printf -v code '%d' "'${value:i:1}"
            start=$((start * 31 + code & 0x7fffffff))
        done
    fi
    [[ -n $start || $world_size -ne 1 ]] || start=$$  # a single rank needs no common value
    if [[ -z $start && $job -eq 0 ]]; then
        MASTER_PORT=29500  # torch's own default; no other value is known to all ranks
    else
        _port_of "$job" "${start:-0}"
    fi
}

# hydra starts one proxy per node, the parent of all ranks there, or their grandparent if a container runtime is in
# between. $PPID would then differ from rank to rank.
_find_hydra_proxy() {  # -> hydra_proxy, or nothing in a separate PID namespace
    local pid=$PPID line i
    for ((i = 0; i < 16 && pid > 1; i++)); do
        IFS= read -r line 2> /dev/null < "/proc/$pid/stat" || return 0
        # shellcheck disable=SC2034  # read through the table
        [[ $line != *'pmi_proxy)'* ]] || { hydra_proxy=$pid; return 0; }
        line=${line##*) ? }  # skip the command's name, which may contain anything: proc(5)
        pid=${line%% *}
    done
}

# Steps of a job get neighbouring ports, and neighbouring jobs get distant ones: 40503/65536 is the golden ratio. As the
# factor is odd and the number of ports a power of two, every port is used once before one repeats.
_port_of() {  # JOB START -> MASTER_PORT
    local low=32768 high=60999 first=10000 last=29999 bits=15
    # Outside the kernel's ephemeral range (ip(7), ip_local_port_range): a port in it may be taken by any connection.
    IFS=$' \t' read -r low high 2> /dev/null < /proc/sys/net/ipv4/ip_local_port_range
    if ((low > 11024)); then last=$((low - 1))                      # from 10000, because services use the ports below
    elif ((high < 64512)); then first=$((high + 1)) last=65535
    elif ((low > 2048)); then first=1024 last=$((low - 1))
    fi                                                              # else the range leaves nothing: share it
    while ((1 << bits > last - first + 1)); do ((bits--)); done
    MASTER_PORT=$((first + ((40503 >> 16 - bits | 1) * $1 + $2 & (1 << bits) - 1)))
}
