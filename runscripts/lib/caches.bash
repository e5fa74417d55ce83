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

# Caches off a home directory that compute nodes do not have (EPCC's Cirrus): to its counterpart on another file system.
_leave_home() {
    local from=${SLINGTORCH_WORK_HOME-} to
    [[ -n $from ]] || return 0
    [[ $from == /*:/* ]] || _fail 1 "SLINGTORCH_WORK_HOME='$from' has not the form /home:/work. Correct or unset it"
    to=${from#*:} from=${from%%:*}
    [[ ${HOME-} == "$from"/* ]] || return 0
    to+=${HOME#"$from"}
    if [[ ! -w $to ]]; then
        ((local_rank)) || _say "$to cannot be written on this node, so programs keep their caches in $HOME, which it" \
            "may not have. Set XDG_CACHE_HOME to a directory of yours"
        return 0
    fi
    # what Matplotlib, PyTorch's hub and others take; CuPy has one of its own
    export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$to/.cache} CUPY_CACHE_DIR=${CUPY_CACHE_DIR:-$to/.cupy/kernel_cache}
}

# Hugging Face's files off the home directory, whose quota they fill: to where the site has room for them. %u is the
# user's name, %a the account that the job is charged to, in small letters (a project's directory).
_set_hf_home() {
    local mode dir=${SLINGTORCH_HF_HOME-} account=${SLURM_JOB_ACCOUNT:-${PBS_ACCOUNT-}}
    local token=${XDG_CACHE_HOME:-${HOME-}/.cache}/huggingface/token
    [[ -n $dir && -z ${HF_HOME-} ]] || return 0
    [[ $dir != *%a* || -n $account ]] || return 0
    dir=${dir//%a/"${account,,}"} dir=${dir//%u/"${USER:-${LOGNAME:-$EUID}}"}
    if [[ ! -w ${dir%/*} ]]; then
        ((rank)) || _say "${dir%/*} cannot be written: Hugging Face's files go to the home directory, or export HF_HOME"
        return 0
    fi
    if [[ -e $dir && ! -O $dir ]] && mode=$(stat -c %a -- "$dir") && ((8#$mode & 2)); then
        ((rank)) || _say "$dir belongs to somebody else and everybody may write there (mode $mode): Hugging Face's" \
            "files go to the home directory. Have it closed (chmod o-w), or export HF_HOME=DIRECTORY"
        return 0
    fi
    export HF_HOME=$dir
    # it would be looked for in HF_HOME
    [[ -n ${HF_TOKEN_PATH-} || ! -r $token ]] || export HF_TOKEN_PATH=$token
    ((rank)) || [[ -d $dir ]] || _say "models and data of Hugging Face go to HF_HOME=$dir. The system deletes there" \
        "what nobody has used for long. For another place: export HF_HOME=DIRECTORY"
}
