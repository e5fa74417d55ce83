# SPDX-License-Identifier: GPL-2.0-only
# Moves caches and models out of the home directory, at sites that ask for it. Sourced by conda-python-distributed.

# Moves caches from a home directory that compute nodes lack (EPCC's Cirrus) to its counterpart on another file system.
_leave_home() {
    local from=${SLINGTORCH_WORK_HOME-} to
    [[ -n $from ]] || return 0
    [[ $from == /*:/* ]] || _fail 1 "SLINGTORCH_WORK_HOME='$from' does not have the form /home:/work. Fix or unset it"
    to=${from#*:} from=${from%%:*}
    [[ ${HOME-} == "$from"/* ]] || return 0
    to+=${HOME#"$from"}
    if [[ ! -w $to ]]; then
        ((local_rank)) || _say "$to cannot be written on this node, so programs keep their caches in $HOME, which may" \
            "not exist on it. Set XDG_CACHE_HOME to your own directory"
        return 0
    fi
    # Matplotlib, PyTorch's hub and others use the first; CuPy has its own variable
    export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$to/.cache} CUPY_CACHE_DIR=${CUPY_CACHE_DIR:-$to/.cupy/kernel_cache}
}

# Moves Hugging Face's files out of the home directory, whose quota they fill, to where the site has room. %u is the
# user's name, %a the account that the job is charged to, in lower case (a project's directory).
_set_hf_home() {
    local mode dir=${SLINGTORCH_HF_HOME-} account=${SLURM_JOB_ACCOUNT:-${PBS_ACCOUNT-}}
    local token=${XDG_CACHE_HOME:-${HOME-}/.cache}/huggingface/token
    [[ -n $dir && -z ${HF_HOME-} ]] || return 0
    [[ $dir != *%a* || -n $account ]] || return 0
    dir=${dir//%a/"${account,,}"} dir=${dir//%u/"${USER:-${LOGNAME:-$EUID}}"}
    if [[ ! -w ${dir%/*} ]]; then
        ((rank)) || _say "${dir%/*} is not writable: Hugging Face's files go to the home directory or your own HF_HOME"
        return 0
    fi
    if [[ -e $dir && ! -O $dir ]] && mode=$(stat -c %a -- "$dir") && ((8#$mode & 2)); then
        ((rank)) || _say "$dir belongs to somebody else and everybody may write there (mode $mode): Hugging Face's" \
            "files go to the home directory. Ask its owner for chmod o-w, or export HF_HOME=DIRECTORY"
        return 0
    fi
    export HF_HOME=$dir
    # else the token would be looked for in HF_HOME
    [[ -n ${HF_TOKEN_PATH-} || ! -r $token ]] || export HF_TOKEN_PATH=$token
    ((rank)) || [[ -d $dir ]] || _say "models and data of Hugging Face go to HF_HOME=$dir. The system deletes files" \
        "there that nobody has used for long. To use another place, export HF_HOME=DIRECTORY"
}
