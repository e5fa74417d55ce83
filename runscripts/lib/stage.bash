# SPDX-License-Identifier: GPL-2.0-only
# --stage: copies the environment as one image to the node's own storage, checks it, mounts or unpacks it there, and
# removes it at the end. Sourced by conda-python-distributed, after ranks.bash and caches.bash, only if a job stages.
# Run as a program, this file is the watcher of a node.
#
# The first rank of a node does the work; the others wait for its file `result`. The first rank stays in bash and runs
# Python as a child: when the tasks of a step have ended, Slurm kills the rest of the step (all of it with
# slurm.conf(5)'s proctrack/cgroup), and a mount whose program was killed stays behind, dead. The watcher cleans up: it
# reads from a pipe until the first rank has ended, for whatever reason, waits for the other ranks and removes
# everything. It has its own session and no descriptors of the job, so it survives a kill if the scheduler allows that.
# If not, the next start that stages cleans up.

_stage_timeout=${SLINGTORCH_STAGE_TIMEOUT:-600}
_node_dir='' _sent='' _image='' _step='' _child=''

# --- shared by ranks and watcher

_pause() {  # waits without a process: reads from a pipe into which nobody writes
    [[ -n ${_never-} ]] || exec {_never}<> <(:)
    read -rt 0.1 -u "$_never" || :
}

# Seconds since the node started: bash's own SECONDS follows the clock, which may be set while a job runs.
_now() { IFS='. ' read -r now _ < /proc/uptime; }

_is_alive() { kill -0 "$1" 2> /dev/null; }

_ranks_alive() {  # DIRECTORY
    local pid
    for pid in "$1"/ranks/*; do
        [[ $pid == *'*' ]] || ! _is_alive "${pid##*/}" || return 0
    done
    return 1
}

_remove() {  # DIRECTORY FILE_SENT_TO_THE_NODE
    local program
    for program in fusermount3 fusermount; do
        ! type -P $program > /dev/null || $program -u -z "$1/env" || :
    done 2> /dev/null
    ((EUID)) || umount -l "$1/env" 2> /dev/null || :
    rm -rf --one-file-system -- "$1" "$2" "$2".{ok,failed}
}

_close_descriptors() {  # PMI's socket, or the pipe of the job's output, would make the launcher wait for this process
    local fd
    for fd in /proc/self/fd/*; do
        fd=${fd##*/}
        ((fd < 3 || fd == 255)) || exec {fd}>&-
    done 2> /dev/null
    cd /
}

_watch() {  # DIRECTORY NUMBER_OF_RANKS FILE_SENT
    local -a started=()
    local tries=0
    trap '' HUP INT TERM
    : > "$1/watcher-$$"
    read -r  # returns when the first rank ends: nothing is ever written
    # A late rank must still find its environment; for a rank that died earlier, do not wait long.
    while [[ -f $1/done ]] && ((tries++ < 100)); do
        started=("$1"/ranks/*)
        ((${#started[@]} < $2)) || break
        _pause
    done
    started=("$1"/result-*-env)
    if [[ -f ${started[0]} ]]; then
        while _ranks_alive "$1"; do _pause; done
    fi
    _remove "$1" "$3"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    set -u
    _close_descriptors
    _watch "$@"
    exit
fi

# --- a rank

_say_node() { _say "node $node:" "$@"; }

_not_staged() {  # REASON IN WORDS...; ends the staging of this node, not the job
    local IFS=' '
    _say_node "not staged: $*. This node uses the shared copy $shared: the same packages, slower to start"
    rm -rf --one-file-system -- "$_node_dir/image" "$_sent" 2> /dev/null
    _result shared
    return 1
}

# An empty file, which a full disk has room for. Its name tells who made it.
_result() { : > "$_node_dir/result-$$-$1"; } 2> /dev/null

_long() {  # COMMAND...; bash runs a trap only after the foreground program has ended, but at once in `wait`
    "$@" &
    _child=$!
    wait $_child
}

_sha256() {  # FILE; openssl uses the processor's SHA instructions: eight times as fast as coreutils
    openssl dgst -sha256 -r "$1" 2> /dev/null || sha256sum "$1"
}

# True if this start stages. Sets _image and shared.
_check_stage() {  # asked or ''
    local nodes=$(((world_size + local_world_size - 1) / local_world_size)) reason=''
    if [[ -z $1 ]]; then
        _need_number SLINGTORCH_STAGE_NODES "$SLINGTORCH_STAGE_NODES"
        ((SLINGTORCH_STAGE_NODES > 0 && nodes >= SLINGTORCH_STAGE_NODES)) || return 1
    fi
    _need_number SLINGTORCH_STAGE_TIMEOUT "$_stage_timeout"
    _image=${SLINGTORCH_ENVIRONMENT_IMAGE-}
    shared=${_image%/*}
    if [[ -z $_image ]]; then
        reason="SLINGTORCH_ENVIRONMENT_IMAGE is not set. Load a PyTorch module that was installed with"
        reason+=" 'environment_image = True'; a container needs no staging, because it already is one image"
    elif [[ -n ${WITH_CONDA-} ]]; then
        reason="WITH_CONDA='$WITH_CONDA' activates an environment other than the staged one. Unset it, or do not stage"
    elif [[ -n ${VIRTUAL_ENV-} && ! -e $VIRTUAL_ENV/${_image##*/} && ! $VIRTUAL_ENV -ef $shared ]]; then
        reason="the environment $VIRTUAL_ENV is active, but the staged image does not have its packages"
        reason+=". Run 'deactivate' first, and only load the module"
    fi
    [[ -n $reason ]] || return 0
    # an error if the user asked for it; a site's threshold is for all modules, also for those without an image
    [[ -z $1 ]] || _fail 1 "--stage: $reason"
    ((rank)) || _say "SLINGTORCH_STAGE_NODES=$SLINGTORCH_STAGE_NODES, but this job is not staged: $reason"
    return 1
}

# `key` is the same on all ranks of this start, and different for any other start on the same node.
_stage() {
    local job=${SLURM_JOB_ID:-${PBS_JOBID:-${flux_job:-nojob}}} root=${SLINGTORCH_STAGE_DIR:-${TMPDIR:-/tmp}}
    local key staged='' path=$PATH
    set +ef
    # Takes the shared copy out of PATH: each program that it does not have costs a call to the shared file system.
    PATH=:$PATH: PATH=${PATH//":$shared/bin:"/:} PATH=${PATH#:} PATH=${PATH%:}
    key=${job//[!A-Za-z0-9._-]/_}-$MASTER_PORT-${SLURM_RESTART_COUNT:-0}
    root=${root//%u/"${USER:-${LOGNAME:-$EUID}}"}
    [[ $root == / ]] || root=${root%/}
    [[ $root == /* ]] || _fail 1 "SLINGTORCH_STAGE_DIR='$root' is not absolute: name a directory on the node's own disk"
    # it becomes part of PATH, and of the name of a file that is checksummed
    [[ $root != *[:[:cntrl:]]* ]] || _fail 1 "SLINGTORCH_STAGE_DIR='${root//[[:cntrl:]]/?}' has a colon or a control" \
        "character. Name another directory on the node's own storage"
    [[ -d $root/ || -n ${SLINGTORCH_STAGE_DIR-} ]] || root=/tmp  # TMPDIR of the submitting host: caches.bash reports it
    [[ $launcher != slurm ]] || _step=${SLURM_STEP_ID:-${SLURM_STEPID-}}
    _find_node
    _node_dir=$root/slingtorch-$EUID/stage-$key-$node
    _sent=$root/slingtorch-$EUID-stage-$key
    if ((local_rank == 0)); then _stage_node; else _wait_for_stage; fi
    if ((local_rank == 0)) && [[ -z $staged && -n ${_watch_pipe-} ]]; then
        : > "$_node_dir/done"
        exec {_watch_pipe}>&-
        trap - TERM HUP INT
    fi
    [[ -n $staged ]] || { PATH=$path; return 0; }
    export PATH="$staged/bin:$PATH"
    [[ ${VIRTUAL_ENV-} != "$shared" ]] || VIRTUAL_ENV=$staged
    [[ ${CONDA_PREFIX-} != "$shared" ]] || CONDA_PREFIX=$staged
    [[ ! -d $staged/lib/base ]] || export LD_LIBRARY_PATH="$staged/lib/base${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    ((local_rank)) || _start_python=_run_as_child
}

_wait_for_stage() {  # -> staged
    local base=${_node_dir%/*} result pid now begin seen=''
    _now
    begin=$now
    while _now && ((now <= begin + 2 * _stage_timeout)); do
        if _is_mine; then
            seen=1
            for result in "$_node_dir"/result-*; do
                pid=${result##*/result-}
                # The process that wrote it must be alive: otherwise a killed start left it.
                [[ $pid == *-shared ]] || _is_alive "${pid%-*}" || continue
                : 2> /dev/null > "$_node_dir/ranks/$$"
                [[ $pid != *-env ]] || staged=$_node_dir/env
                return
            done
        elif [[ -n $seen || -e $base && ! -O $base || ! -d ${base%/*} || ! -e $base && ! -w ${base%/*} ]] ||
            ((now > begin + 60)); then
            # the first rank has reported why not, or was killed
            ((local_rank > 1)) || [[ -z $seen ]] || _say_node "not staged: the first rank of this node ended before" \
                "staging was done. The other ranks use the shared copy $shared"
            return
        fi
        _pause
    done
    ((local_rank > 1)) || _say_node "not staged: no answer from the first rank of this node within" \
        "$((2 * _stage_timeout)) s (SLINGTORCH_STAGE_TIMEOUT=$_stage_timeout). The others use the shared copy $shared"
}

_stage_node() {  # -> staged
    local sum='' found now begin
    _now
    begin=$now
    _make_node_dir || return 0
    trap 'kill "$_child" 2> /dev/null; exit 143' TERM HUP INT
    # --fork: proctrack/linuxproc does not find a child of init when it kills a step (slurm.conf(5))
    exec {_watch_pipe}> >(
        exec setsid --fork bash "$_here/lib/stage.bash" "$_node_dir" "$local_world_size" "$_sent" > /dev/null 2>&1)

    IFS=$' \t' read -r sum _ 2> /dev/null < "$_image.sha256"
    [[ $sum =~ ^[0-9a-f]{64}$ ]] || { _not_staged "there is no sha256 in $_image.sha256. Install the module again (eb" \
        "--rebuild)"; return 0; }
    _bring_image || return 0
    # from here on nobody else can change the file
    found=$(_sha256 "$_node_dir/image")
    [[ ${found%% *} == "$sum" ]] || { _not_staged "the image that arrived is not the one that was installed (sha256" \
        "${found%% *}, expected $sum). If all nodes report this, $_image is damaged: install the module again (eb" \
        "--rebuild)"; return 0; }
    _open_image || return 0
    staged=$_node_dir/env
    _result env
    _now
    ((rank)) || _say "staged $_image to $_node_dir in $((now - begin)) s"
}

_make_node_dir() {
    local base=${_node_dir%/*} old sent wrong
    # remove what a killed start of this user left on this node
    for old in "$base"/stage-*-"$node"; do
        sent=${old%-"$node"}
        [[ ! -O $old || -L $old ]] || _ranks_alive "$old" || _remove "$old" "$base-${sent##*/}"
    done
    if [[ ! -d ${base%/*} ]]; then wrong="'${base%/*}' is not a directory on this node"
    else _make_private "$base" "$_node_dir" "$_node_dir"/{ranks,env}
    fi
    if [[ -n $wrong ]]; then
        _is_mine || _node_dir=/nonexistent
        _not_staged "$wrong, or set SLINGTORCH_STAGE_DIR to your own directory on the node's own storage"
        return
    fi
    : 2> /dev/null > "$_node_dir/ranks/$$"
}

_is_mine() {
    local dir
    for dir in "$_node_dir" "${_node_dir%/*}"; do [[ -O $dir && ! -L $dir ]] || return 1; done
}

# Brings the image to $_node_dir/image: by sbcast from rank 0, or by a copy that each node makes.
_bring_image() {
    local several=$((world_size > local_world_size)) status='' size free now end
    local -a sbcast=(sbcast --jobid="${SLURM_JOB_ID-}${_step:+.$_step}")
    size=$(stat -L -c %s -- "$_image" 2> /dev/null) || { _not_staged "$_image is missing or not readable"; return; }
    if ((several)) && [[ -n ${SLURM_JOB_ID-} ]] && type -P sbcast > /dev/null; then
        if ((rank == 0)); then
            status=failed
            ! _long "${sbcast[@]}" "$_image" "$_sent" || status=ok
            [[ $status == ok ]] || _say "sbcast of $_image failed (its message is above): each node now copies" \
                "the image from the shared file system"
            # sbcast also tells the nodes whether they have the image; even if it failed, it reaches most of them.
            printf '%s\n' "$status" > "$_node_dir/status"
            _long "${sbcast[@]}" "$_node_dir/status" "$_sent.$status" 2> /dev/null
        fi
        _now
        end=$((now + _stage_timeout))
        while [[ -z $status ]]; do
            if [[ -O $_sent.ok ]]; then status=ok
            elif [[ -O $_sent.failed ]]; then status=failed
            elif _now && ((now > end)); then
                _not_staged "no answer from rank 0, which runs sbcast, in $_stage_timeout s (SLINGTORCH_STAGE_TIMEOUT)"
                return
            fi
            _pause
        done
        # move it out of the directory that others may write to; its content is checked afterwards
        [[ $status != ok || ! -O $_sent || -L $_sent ]] || mv -- "$_sent" "$_node_dir/image" 2> /dev/null || :
    fi
    rm -f -- "$_sent"
    [[ ! -f $_node_dir/image || -L $_node_dir/image ]] || return 0
    free=$(($(stat -f -c '%a * %S' -- "$_node_dir")))
    ((free > size)) || { _not_staged "no space: $((free >> 20)) MB are free in ${_node_dir%/*/*}, but the image has" \
        "$((size >> 20)) MB. Set SLINGTORCH_STAGE_DIR to larger storage on the node"; return; }
    _long cp -- "$_image" "$_node_dir/image" || _not_staged "copying $_image to $_node_dir failed (see above)"
}

# Opens the image as the directory $_node_dir/env. A mounted file is removed at once: its space is free as soon as the
# job ends, for whatever reason.
_open_image() {
    local program words='' options=attr_timeout=86400,entry_timeout=86400,negative_timeout=86400,kernel_cache
    if [[ ! -r /dev/fuse || ! -w /dev/fuse ]]; then
        words='/dev/fuse does not exist, or you may not use it'
    else
        for program in squashfuse_ll squashfuse; do
            type -P $program > /dev/null || continue
            [[ $program != squashfuse ]] || set -- -o $options
            # its daemon must not keep inherited descriptors open
            if words=$(
                (_close_descriptors; exec $program "$@" "$_node_dir/image" "$_node_dir/env") 2>&1 < /dev/null
            ); then
                break
            fi
            words="$program: $words"
        done
    fi
    if [[ -e $_node_dir/env/bin/python ]]; then
        rm -f -- "$_node_dir/image"
    elif type -P unsquashfs > /dev/null; then
        _say_node "cannot mount the image (${words:-no squashfuse}): unpacking it"
        rmdir -- "$_node_dir/env" 2> /dev/null ||
            { _not_staged "the image has no bin/python: it is not an environment. Install the module again (eb" \
                "--rebuild)"; return; }
        _long unsquashfs -q -n -no-xattrs -d "$_node_dir/env" "$_node_dir/image" > /dev/null ||
            { rm -rf -- "$_node_dir/env"; _not_staged "unsquashfs failed (its message is above)"; return; }
        rm -f -- "$_node_dir/image"
    else
        _not_staged "the image can be neither mounted (${words:-no squashfuse}) nor unpacked (no unsquashfs). Have" \
            "squashfuse or squashfs-tools installed on the nodes"
        return
    fi
    words=$(LD_LIBRARY_PATH=$_node_dir/env/lib/base "$_node_dir/env/bin/python" -I -S -c pass 2>&1) ||
        _not_staged "its Python does not start from $_node_dir (mounted noexec?): ${words##*$'\n'}"
}

# Runs Python as a child and passes the task's signals on to it. Then waits until the watcher has removed everything.
_run_as_child() {  # PYTHON ARGUMENTS
    local signal python status tries=0
    local -a watcher=()
    [[ -e /proc/self/fd/0 ]] || exec < /dev/null
    (
        trap - INT QUIT TERM HUP  # which bash ignores in a background job
        exec {_watch_pipe}>&-
        exec "$@"
    ) <&0 &
    python=$!
    : > "$_node_dir/ranks/$python"
    for signal in HUP INT QUIT TERM USR1 USR2 CONT; do
        # shellcheck disable=SC2064  # expands now
        trap "kill -$signal $python 2> /dev/null" $signal
    done
    while wait $python; _is_alive $python; do :; done
    wait $python
    status=$?
    : > "$_node_dir/done"
    rm -f -- "$_node_dir/ranks/$$"
    exec {_watch_pipe}>&-
    while [[ -d $_node_dir ]] && ((tries++ < 100)); do
        watcher=("$_node_dir"/watcher-*)
        ! _is_alive "${watcher[0]##*-}" || tries=0
        _pause
    done
    if ((status > 128)); then  # so that the launcher sees the same signal
        trap - $((status - 128))
        ulimit -c 0
        kill -$((status - 128)) $$
    fi 2> /dev/null
    exit $status
}
