# SPDX-License-Identifier: GPL-2.0-only
# Configures PyTorch's flight recorder: when NCCL's watchdog gives up, it writes the last collectives of each rank to a
# file for 'slingtorch explain DIRECTORY'. Sourced by conda-python-distributed, after ranks.bash and caches.bash.

_set_recorder() {
    local where=${SLINGTORCH_FLIGHT_RECORDER-} job=${SLURM_JOB_ID:-${PBS_JOBID:-$flux_job}} step=${SLURM_STEP_ID-}
    local own prefix torch
    [[ $where != off ]] || return 0
    ((world_size > 1)) || [[ -n ${_torchrun-} ]] || return 0
    if [[ -n $where ]]; then
        [[ $where == /* && -d $where && -w $where ]] || _fail 1 "SLINGTORCH_FLIGHT_RECORDER='$where' is not the" \
            "absolute path of a writable directory on this node. Name a directory that outlives the job, or 'off'"
    elif [[ -O $PWD && -w $PWD ]]; then  # outlives the job; not in someone else's directory, where a name can be taken
        where=$PWD
    else
        where=$cache_dir
    fi

    # Two names for one value: the user may set either. Since pytorch pull request 152563 (May 2025) the first is read,
    # and each rank warns about the older one (c10d/Utils.hpp), so that is set only for a PyTorch that may need it.
    if [[ -z ${TORCH_FR_BUFFER_SIZE-}${TORCH_NCCL_TRACE_BUFFER_SIZE-} ]]; then
        export TORCH_FR_BUFFER_SIZE=2000
        hash python 2> /dev/null    # no process, unlike $(type -P)
        own=${BASH_CMDS[python]-}
        # an extended environment uses the PyTorch of the installation next to these scripts
        for torch in "${own%/bin/python}"/lib/python3*/site-packages/torch-[0-9]*.dist-info \
            ${RUNSCRIPTS:+"${RUNSCRIPTS%/runscripts}"/lib/python3*/site-packages/torch-[0-9]*.dist-info}; do
            [[ ! -d $torch ]] || break
        done
        [[ -z ${WITH_CONDA-} && -d $torch && ${torch##*/} != torch-@(1|2.[0-8]).* ]] ||
            export TORCH_NCCL_TRACE_BUFFER_SIZE=2000
    fi
    # PyTorch 2.15 reads the first name (c10d/FlightRecorder.hpp) and warns about the older one. Other versions write
    # the file without either, because the older one is true by default (ProcessGroupNCCL.cpp, dumpOnTimeoutOrEx_)
    if [[ -z ${TORCH_FR_DUMP_ON_TIMEOUT-}${TORCH_NCCL_DUMP_ON_TIMEOUT-} ]]; then
        export TORCH_FR_DUMP_ON_TIMEOUT=1
        [[ -z ${TORCH_NCCL_TRACE_BUFFER_SIZE-} ]] || export TORCH_NCCL_DUMP_ON_TIMEOUT=1
    fi
    if [[ -n $where && -z ${TORCH_FR_DUMP_TEMP_FILE-}${TORCH_NCCL_DEBUG_INFO_TEMP_FILE-} ]]; then
        [[ -z $job ]] || job=-${job//[!A-Za-z0-9._-]/_}${step:+.$step}
        prefix=${where%/}/flight-recorder$job-rank-
        export TORCH_FR_DUMP_TEMP_FILE=$prefix TORCH_NCCL_DEBUG_INFO_TEMP_FILE=$prefix
    fi
}
