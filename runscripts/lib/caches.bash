# SPDX-License-Identifier: GPL-2.0-only
# Private caches: SQLite databases and compiled kernels, which neither a parallel file system nor another job may share
# (ROCm/MIOpen#2214: "locking protocol"). One directory per job and node, so that all ranks of a node use one.
# Sourced by conda-python-distributed, after ranks.bash.

_caches=(MIOPEN_USER_DB_PATH=miopen MIOPEN_CUSTOM_CACHE_DIR=miopen TRITON_CACHE_DIR=triton
    TORCHINDUCTOR_CACHE_DIR=inductor)
_other_root='set SLINGTORCH_CACHE_ROOT to a directory of yours on a local disk of the node'

cache_dir=''

_make_caches() {  # -> cache_dir: private, of this job and node; empty if the user names all caches
    local root=${SLINGTORCH_CACHE_ROOT-} what=SLINGTORCH_CACHE_ROOT
    local job=${SLURM_JOB_ID:-${PBS_JOBID:-${flux_job:-nojob}}} node='' wrong=''
    local cache name path base missing=''
    for cache in "${_caches[@]}"; do
        name=${cache%=*}
        [[ -n ${!name-} ]] || missing=1
    done
    [[ -n $missing ]] || return 0

    if [[ -z $root ]]; then
        what=TMPDIR root=${TMPDIR-}
        if [[ ! -d $root ]]; then
            # A TMPDIR of the submitting host or of outside the container. Python's tempfile takes /tmp then as well.
            [[ -z $root ]] || ((local_rank)) || _say "TMPDIR=$root does not exist on this node; the caches go to" \
                "/tmp. Set SLINGTORCH_CACHE_ROOT to have them elsewhere"
            what='the default directory of caches' root=/tmp
        fi
    fi
    root=${root%/}
    if [[ $root/ != /* ]]; then wrong='is not an absolute path'
    elif [[ ! -d $root/ ]]; then wrong='is not a directory on this node'
    elif [[ ! -w $root/ || ! -x $root/ ]]; then wrong="cannot be written by user id $EUID"
    fi
    [[ -z $wrong ]] || _fail 1 "$what='$root' $wrong, so there is no place for private caches: $_other_root"

    _find_node
    base=$root/slingtorch-$EUID
    path=$base/${job//[!A-Za-z0-9._-]/_}-$node
    _make_private "$base" "$path" "$path"/{miopen,triton,inductor}
    [[ -z $wrong ]] || _fail 1 "the cache directory $wrong, or $_other_root"
    for cache in "${_caches[@]}"; do
        name=${cache%=*}
        export "$name=${!name:-$path/${cache#*=}}"
    done
    cache_dir=$path
}

_find_node() {  # -> node
    # Of Slurm's own tasks only: an mpiexec passes the batch node's SLURMD_NODENAME to all nodes. Not $HOSTNAME: it is
    # inherited.
    node=''
    [[ $launcher != slurm ]] || node=${SLURMD_NODENAME-}
    [[ -n $node ]] || IFS= read -r node 2> /dev/null < /proc/sys/kernel/hostname || node=node
    node=${node//[!A-Za-z0-9._-]/_}
}

# /tmp is everybody's: whoever makes a directory first may be someone else, or it may be a link to somewhere; and other
# ranks may make it at the same moment.
_make_private() {  # DIRECTORY... -> wrong: which one cannot be used, why and what to do; or empty
    local path missing modes mode turn
    for turn in as_found made; do
        missing='' wrong=''
        for path; do
            if [[ -L $path ]]; then wrong='is a symbolic link'
            elif [[ ! -e $path ]]; then missing=1
            elif [[ ! -d $path ]]; then wrong='is not a directory'
            elif [[ ! -O $path ]]; then wrong="does not belong to you (user id $EUID)"
            fi
            [[ -z $wrong ]] || { wrong="'$path' $wrong and is not used. Have its owner remove it"; return; }
        done
        [[ $turn$missing == as_found1 ]] || break
        # -m, not umask: bash cannot read the old umask without a process. Every directory is named, so each gets it.
        # shellcheck disable=SC2174
        mkdir -p -m 700 -- "$@" || { wrong="'$2' cannot be made: free space there"; return; }
    done
    # Bash cannot see permission bits. One rank of the node asks for all; in a directory open to others, what they put
    # there would be loaded as code.
    ((local_rank == 0)) || return 0
    modes=$(stat -c %a -- "$1" "$2") || wrong="'$2': its permissions cannot be read. Remove it"
    for mode in $modes; do
        (((8#$mode & 8#022) == 0)) || wrong="'$2' or the one above it is writable by others (mode $mode). Remove '$1'"
    done
}
