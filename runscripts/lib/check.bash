# SPDX-License-Identifier: GPL-2.0-only
# How --check starts. Sourced by conda-python-distributed.

_check_first() {  # exec python ARGUMENTS: in the environment that the program will have
    _need_python "$2"
    # pass the launcher's numbers: a user may export LOCAL_RANK=0 if each task sees one GPU
    SLINGTORCH_LAUNCHER=$launcher LOCAL_RANK=$local_rank LOCAL_WORLD_SIZE=$local_world_size \
        SLINGTORCH_JOB_DIR=$cache_dir "$2" -B "$_here/lib/job" check --stderr -- "${@:3}" || exit
    "$@"
}

_check_alone_first() {
    _need_python "$2"
    export LOCAL_RANK=$local_rank LOCAL_WORLD_SIZE=$local_world_size SLINGTORCH_JOB_DIR=$cache_dir
    "$@"
}

_need_python() {  # PYTHON: finds what would end the check before its first message
    [[ $(ulimit -f) != 0 ]] || _fail 1 "ulimit -f is 0: this rank cannot write a single byte to a file. Set 'ulimit" \
        "-f unlimited' in the job script, or raise the limit where it is set"
    [[ -z ${PYTHONHOME-} ]] || "$1" -c '' 2> /dev/null || _fail 1 "$1 does not start with PYTHONHOME='$PYTHONHOME'." \
        "Unset PYTHONHOME in the job script"
}
