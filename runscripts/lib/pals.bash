# SPDX-License-Identifier: GPL-2.0-only
# Reads where rank 0 is, and what a rank's variables do not give, from the binary table that PALS and `srun
# --mpi=cray_shasta` write on every node ($PALS_APINFO). PBS_NODEFILE is only on the job's first node, and does not
# reflect `mpiexec --hosts`. Sourced by get-master and conda-python-distributed.
#
# Layout: HPE's pals.h, as Slurm has it (src/plugins/mpi/cray_shasta/apinfo.h: version 1 up to 22.05, 5 since 23.02) and
# flux-coral2 (src/common/libapinfo/apinfo1.h, apinfo5.h). A header of 8-byte slots, of which a number fills the first
# four bytes: [0] version, [8] pe_size, [9] pe_offset, [10] npes, [11] node_size, [12] node_offset, [13] nnodes. A pe's
# third int is its node; a node is an int and a name of 64 bytes. Both versions have all of these.
# Tested with tables that Slurm wrote (tests/records/pals), never with one that PALS wrote.

# shellcheck disable=SC2207  # numbers. exec saves the process that bash would start for a redirection
_ints_at() {  # OFFSET COUNT -> ints: four-byte numbers of `file`
    if (($1 % 4 == 0 && $1 / 4 + $2 <= ${#table_start[@]})); then ints=("${table_start[@]:$1 / 4:$2}")
    else ints=($(exec od -An -v -tu4 -j "$1" -N $((4 * $2)) -- "$file" 2> /dev/null))
    fi
    ((${#ints[@]} == $2))
}

_read_apinfo() {  # FILE [RANKS] -> the caller's file, table, table_start, field
    local i
    file=$1 table="the table '$1'"
    first_host_error="$table cannot be read"
    [[ -f $file && -r $file ]] || return 1
    _ints_at 0 1024 || :  # all that is needed in jobs of up to 300 ranks
    table_start=(${ints[@]+"${ints[@]}"})  # bash before 4.4 treats an empty array as unset
    first_host_error="$table ends within its header"
    ((${#table_start[@]} >= 28)) || return 1
    for i in 0 8 9 10 11 12 13; do field[i]=${table_start[2 * i]}; done
    # sizes and offsets have eight bytes; the last four bytes of the other numbers may be anything
    for i in 8 9 11 12; do ((field[i] |= table_start[2 * i + 1] << 32)); done
    if ((field[0] != 1 && field[0] != 5)); then
        first_host_error="$table has format version ${field[0]}, but only 1 and 5 are known"
    elif ((field[8] < 12 || field[8] > 1 << 20 || field[8] % 4 || field[11] < 68 || field[11] > 1 << 20 ||
            field[9] < 0 || field[12] < 0 || field[10] < 1 || field[13] < 1)); then
        first_host_error="$table is damaged: ranks of ${field[8]} bytes, ${field[13]} nodes of ${field[11]} bytes"
    elif [[ ${2:-${field[10]}} != "${field[10]}" ]]; then
        first_host_error="$table is for a start of ${field[10]} ranks, but this one has $2"
    else
        return 0
    fi
    return 1
}

first_of_apinfo() {  # FILE [RANKS] -> first_host
    local LC_ALL=C file table word at number name=''
    local -a table_start=() ints=() field=()
    first_host=''
    _read_apinfo "$@" || return 1
    if ! _ints_at $((field[9] + 8)) 1; then
        first_host_error="$table ends before its ranks, which should be at ${field[9]}"
    elif number=${ints[0]} && ((number >= field[13])); then
        first_host_error="$table puts rank 0 on node $number of ${field[13]}"
    elif at=$((field[12] + number * field[11] + 4)) && ! _ints_at $at 16; then
        first_host_error="$table ends before the name of node $number, which should be at $at"
    else
        for word in "${ints[@]}"; do
            printf -v word '\\%o' $((word & 255)) $((word >> 8 & 255)) $((word >> 16 & 255)) $((word >> 24))
            name+=$word
        done
        printf -v name '%b' "$name"  # up to the first byte 0
        if [[ $word == *'\0' && $name =~ ^[A-Za-z0-9_.][A-Za-z0-9._-]*$ ]]; then
            first_host=$name first_host_error=''
            return 0
        fi
        printf -v name '%q' "$name"
        first_host_error="$table has no host name for node $number, but: $name"
    fi
    return 1
}

# srun of Slurm 22.05 sets only PALS_RANKID, and PALS with PALS_PMI=pmix no PMI_* (Aurora: tests/records/environment).
# shellcheck disable=SC2154  # rank: ranks.bash
_complete_from_apinfo() {  # FILE -> world_size, local_rank, local_world_size, if they are empty
    local file table at own local_id size=$world_size
    local -a table_start=() ints=() field=()
    # if PALS speaks PMIx, PMI_SIZE=1 is left over from an outer start, but the table is for this start
    [[ $size != 1 ]] || size=''
    _read_apinfo "$1" "$size" || return 1
    [[ $world_size/${field[10]} == 1/1 || -n $size ]] || world_size='' local_rank='' local_world_size=''
    first_host_error="$table has no rank $rank"
    _is_number "$rank" && ((rank < field[10])) || return 1
    at=$((field[9] + rank * field[8]))
    first_host_error="$table ends before rank $rank, which should be at $at"
    _ints_at $at 3 || return 1
    local_id=${ints[0]} own=${ints[2]}
    first_host_error="$table puts rank $rank on node $own of ${field[13]}"
    ((own < field[13])) || return 1
    : "${world_size:=${field[10]}}" "${local_rank:=$local_id}"
    [[ -z $local_world_size ]] || return 0
    first_host_error="$table ends before the last of its ${field[10]} ranks"
    _ints_at $((field[9] + (field[10] - 1) * field[8] + 8)) 1 || return 1
    local_world_size=$(od -An -v -tu4 -w"${field[8]}" -j "${field[9]}" -N $((field[8] * field[10])) -- "$file" |
        grep -cE "^ *[0-9]+ +[0-9]+ +$own( |\$)")
}
