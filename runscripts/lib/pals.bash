# SPDX-License-Identifier: GPL-2.0-only
# Where rank 0 is, and what a rank's variables leave out, out of the binary table that PALS and `srun --mpi=cray_shasta`
# write on every node ($PALS_APINFO). PBS_NODEFILE is on the job's first node only and knows nothing of `mpiexec
# --hosts`. Sourced by get-master and conda-python-distributed.
#
# Layout: HPE's pals.h, as Slurm has it (src/plugins/mpi/cray_shasta/apinfo.h: version 1 up to 22.05, 5 since 23.02) and
# flux-coral2 (src/common/libapinfo/apinfo1.h, apinfo5.h). A header of 8-byte slots, of which a number fills the first
# four bytes: [0] version, [8] pe_size, [9] pe_offset, [10] npes, [11] node_size, [12] node_offset, [13] nnodes. A pe's
# third int is its node; a node is an int and a name of 64 bytes. Both versions have these alike.
# Tried on tables that Slurm wrote (tests/records/pals), never on one of PALS itself.

# shellcheck disable=SC2207  # numbers. exec: for a redirection bash would start one process more
_bytes_at() {  # OFFSET COUNT -> chunk; of FILE
    if (($1 + $2 <= ${#bytes[@]})); then chunk=("${bytes[@]:$1:$2}")
    else chunk=($(exec od -An -v -tu1 -j "$1" -N "$2" -- "$file" 2> /dev/null))
    fi
    ((${#chunk[@]} == $2))
}

_number_at() {  # OFFSET -> number
    local -a chunk
    _bytes_at "$1" 4 && number=$((chunk[0] | chunk[1] << 8 | chunk[2] << 16 | chunk[3] << 24))
}

_read_apinfo() {  # FILE [RANKS] -> file, table, bytes, field of the caller
    local i number
    file=$1 table="the table '$1'"
    first_host_error="$table cannot be read"
    [[ -f $file && -r $file ]] || return 1
    _bytes_at 0 4096  # all that is asked for, in jobs of up to 300 ranks
    bytes=("${chunk[@]}")
    first_host_error="$table ends within its header, after ${#bytes[@]} bytes"
    for i in 0 8 9 10 11 12 13; do
        _number_at $((8 * i)) || return 1
        field[i]=$number
        # sizes and offsets have eight bytes; behind the other numbers there may be anything
        case $i in 8 | 9 | 11 | 12) _number_at $((8 * i + 4)) && ((field[i] |= number << 32)) ;; esac
    done
    if ((field[0] != 1 && field[0] != 5)); then
        first_host_error="$table has format version ${field[0]}, and 1 and 5 are known"
    elif ((field[8] < 12 || field[8] > 1 << 20 || field[8] % 4 || field[11] < 68 || field[11] > 1 << 20 ||
        field[9] < 0 ||
            field[12] < 0 || field[10] < 1 || field[13] < 1)); then
        first_host_error="$table is damaged: ranks of ${field[8]} bytes, ${field[13]} nodes of ${field[11]} bytes"
    elif [[ ${2:-${field[10]}} != "${field[10]}" ]]; then
        first_host_error="$table is of a start of ${field[10]} ranks, and this one has $2"
    else
        return 0
    fi
    return 1
}

first_of_apinfo() {  # FILE [RANKS] -> first_host
    local LC_ALL=C file table number at byte name=''
    local -a bytes=() chunk=() field=()
    first_host=''
    _read_apinfo "$@" || return 1
    if ! _number_at $((field[9] + 8)); then
        first_host_error="$table ends before its ranks, which should be at ${field[9]}"
    elif ((number < 0 || number >= field[13])); then
        first_host_error="$table says that rank 0 is on node $number of ${field[13]}"
    elif at=$((field[12] + number * field[11] + 4)) && ! _bytes_at $at 64; then
        first_host_error="$table ends before the name of node $number, which should be at $at"
    else
        for byte in "${chunk[@]}"; do
            ((byte)) || break
            printf -v byte '\\%o' "$byte"
            printf -v byte '%b' "$byte"
            name+=$byte
        done
        if [[ $byte == 0 && $name =~ ^[A-Za-z0-9_.][A-Za-z0-9._-]*$ ]]; then
            first_host=$name first_host_error=''
            return 0
        fi
        printf -v name '%q' "$name"
        first_host_error="$table has no host name for node $number, but $name"
    fi
    return 1
}

# srun of Slurm 22.05 gives PALS_RANKID alone, and PALS with PALS_PMI=pmix no PMI_* (Aurora: tests/records/environment).
# shellcheck disable=SC2154  # rank: ranks.bash
_complete_from_apinfo() {  # FILE -> those of world_size, local_rank, local_world_size that are empty
    local file table number at own size=$world_size
    local -a bytes=() chunk=() field=()
    # where PALS speaks PMIx, a PMI_SIZE=1 is left over from an outer start, and the table is of this one
    [[ $size != 1 ]] || size=''
    _read_apinfo "$1" "$size" || return 1
    [[ $world_size/${field[10]} == 1/1 || -n $size ]] || world_size='' local_rank='' local_world_size=''
    first_host_error="$table has no rank $rank"
    _is_number "$rank" && ((rank < field[10])) || return 1
    at=$((field[9] + rank * field[8]))
    first_host_error="$table ends before rank $rank, which should be at $at"
    _number_at $((at + 8)) || return 1
    own=$number
    first_host_error="$table says that rank $rank is on node $own of ${field[13]}"
    ((own >= 0 && own < field[13])) && _number_at "$at" || return 1
    : "${world_size:=${field[10]}}" "${local_rank:=$number}"
    [[ -z $local_world_size ]] || return 0
    first_host_error="$table ends before the last of its ${field[10]} ranks"
    _number_at $((field[9] + (field[10] - 1) * field[8] + 8)) || return 1
    local_world_size=$(od -An -v -tu4 -w"${field[8]}" -j "${field[9]}" -N $((field[8] * field[10])) -- "$file" |
        grep -cE "^ *[0-9]+ +[0-9]+ +$own( |\$)")
}
