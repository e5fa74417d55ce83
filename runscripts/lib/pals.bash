# SPDX-License-Identifier: GPL-2.0-only
# Where rank 0 is, out of the binary table that PALS writes on every node ($PALS_APINFO). PBS_NODEFILE is on the job's first
# node only and knows nothing of `mpiexec --hosts`. Sourced by conda-python-distributed.
#
# Tried on tables that tests/unit/test_runscripts.py writes, of 2 to 2,000 nodes; never on a table of PALS itself.
# Layout, version 1: Slurm's src/plugins/mpi/cray_shasta/apinfo.c. A header of 17 8-byte numbers ([0] version, [8] pe_size,
# [9] pe_offset, [10] npes, [11] node_size, [12] node_offset, [13] nnodes); a pe's third int is its node; a node is an int and
# a name of 64 bytes.

_rank0_of_apinfo() {  # FILE -> first_host; false if the file is anything else
    local LC_ALL=C byte code i node
    local -a bytes=() field=()
    for ((i = 0; i < 1024; i++)); do
        IFS= read -r -d '' -n 1 byte || break  # NUL is the delimiter: it reads as nothing, which is 0
        printf -v code '%d' "'$byte"
        bytes[i]=$((code & 255))
    done < "$1"
    ((${#bytes[@]} >= 136)) || return 1
    for ((i = 0; i < 17; i++)); do
        field[i]=$((bytes[8*i] | bytes[8*i+1] << 8 | bytes[8*i+2] << 16 | bytes[8*i+3] << 24))
    done
    ((field[0] == 1 && field[8] == 12 && field[10] == world_size && field[11] == 68 && field[13] > 1 &&
        field[9] + 12 <= ${#bytes[@]})) || return 1
    node=$((bytes[field[9]+8] | bytes[field[9]+9] << 8 | bytes[field[9]+10] << 16))
    ((node < field[13])) || return 1
    set -f
    for byte in $(od -An -v -tc -j $((field[12] + 68 * node + 4)) -N 64 "$1"); do
        [[ $byte == [A-Za-z0-9._-] ]] || break
        first_host+=$byte
    done
    set +f
    [[ -n $first_host && $byte == '\0' ]] || { first_host=''; return 1; }
}
