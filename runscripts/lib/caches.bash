# SPDX-License-Identifier: GPL-2.0-only
# Private caches for SQLite databases and compiled kernels. They must not be on a parallel file system, nor shared with
# another job (ROCm/MIOpen#2214: "locking protocol"). One directory per job and node serves all ranks of the node.
# Sourced by conda-python-distributed, after ranks.bash.

_caches=(MIOPEN_USER_DB_PATH=miopen MIOPEN_CUSTOM_CACHE_DIR=miopen TRITON_CACHE_DIR=triton
    TORCHINDUCTOR_CACHE_DIR=inductor)
_other_root='set SLINGTORCH_CACHE_ROOT to your own directory on a local disk of the node'

cache_dir=''

_make_caches() {  # -> cache_dir: private to this job and node; empty if the user names all caches
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
            # TMPDIR of the submitting host or from outside the container. Python's tempfile uses /tmp then, too.
            [[ -z $root ]] || ((local_rank)) || _say "TMPDIR=$root does not exist on this node; the caches go to" \
                "/tmp. Set SLINGTORCH_CACHE_ROOT to put them elsewhere"
            what='the default cache directory' root=/tmp
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
    # SLURMD_NODENAME only in Slurm's own tasks: mpiexec passes that of the batch node to all nodes. Not $HOSTNAME,
    # which is inherited.
    node=''
    [[ $launcher != slurm ]] || node=${SLURMD_NODENAME-}
    [[ -n $node ]] || IFS= read -r node 2> /dev/null < /proc/sys/kernel/hostname || node=node
    node=${node//[!A-Za-z0-9._-]/_}
}

# Everybody may write to /tmp: a directory may already belong to someone else, or be a link; and other ranks may create
# it at the same moment.
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
        # -m, not umask: bash cannot read the old umask without a process. Every directory is named and gets the mode.
        # shellcheck disable=SC2174
        mkdir -p -m 700 -- "$@" || { wrong="'$2' cannot be created: free space there"; return; }
    done
    # Bash cannot see permission bits, so one rank of the node calls stat for all. What others put into a directory that
    # they may write to would be loaded as code.
    ((local_rank == 0)) || return 0
    modes=$(stat -c %a -- "$1" "$2") || wrong="'$2': its permissions cannot be read. Remove it"
    for mode in $modes; do
        (((8#$mode & 8#022) == 0)) || wrong="'$2' or its parent is writable by others (mode $mode). Remove '$1'"
    done
}
