# SPDX-License-Identifier: GPL-2.0-only
# No launcher started this process: is it meant to be the only one? Sourced by ranks.bash if it finds no launcher.

# Variables that give the size of a job: a number of nodes or tasks, or a file of one host per line
# (*FILE). Sources: sbatch(1); pbs_environment of PBS and of Torque (PBS_NUM_NODES); LSF's reference,
# environment variables; sge_pe(5) and qsub(1) of Grid Engine, whose jobs have SGE_TASK_ID; oarsub(1); HTCondor's manual,
# parallel universe; AWS Batch's guide, multi-node jobs; Fujitsu's job operation manual (PJM_NODE); MPICH's hydra
# (LOADL_HOSTFILE); HyperQueue's docs, multi-node tasks; Google Batch's API, requireHostsFile; SkyPilot's docs,
# distributed jobs; LeaderWorkerSet's docs; torch/distributed/argparse_util.py (PET_NNODES, which Kubeflow sets).
_sizes=SLURM_JOB_NUM_NODES,SLURM_NNODES,SLURM_HET_SIZE,PBS_NODEFILE,PBS_NUM_NODES,LSB_DJOB_HOSTFILE
_sizes+=,PE_HOSTFILE,NHOSTS,OAR_NODEFILE,_CONDOR_NPROCS,AWS_BATCH_JOB_NUM_NODES,PJM_NODE,LOADL_HOSTFILE,HQ_NODE_FILE
_sizes+=,BATCH_HOSTS_FILE,SKYPILOT_NUM_NODES,LWS_GROUP_SIZE,PET_NNODES
# rank variables of launchers that give the number of ranks in no known variable: PMIx (prun), jsrun, aprun,
# MVAPICH2's mpirun_rsh, HPE MPT's mpiexec_mpt (radical.pilot), Intel's and Platform's older ones
_unknown_ranks=PMIX_RANK,JSM_NAMESPACE_RANK,ALPS_APP_PE,MV2_COMM_WORLD_RANK,MPT_MPI_RANK,MPIRUN_RANK,PMI_ID,MPI_RANKID

_on_purpose="For a single process use conda-python-simple; for one rank on purpose export RANK=0 WORLD_SIZE=1"

_job_size() {  # NAME -> count: the size that this variable gives
    local host IFS=$' \t\r\n'
    local -A different=()
    case $1 in
        *FILE)
            [[ -f ${!1} && -r ${!1} ]] || _fail 1 "$1=${!1} cannot be read, so the job's number of nodes is" \
                "unknown, and no launcher started this process. Start the ranks with $starter, or bind that file into" \
                "the container. $_on_purpose"
            while read -r host _ || [[ -n $host ]]; do [[ -z $host ]] || different[$host]=1; done < "${!1}"
            count=${#different[@]} ;;
        *)
            _need_number "$1" "${!1}"
            count=${!1} ;;
    esac
}

_refuse_several() {  # WORDS
    _fail 1 "$1, but no $starter started this process, so it would train as a single rank, unaware of the others." \
        "Put $starter in front${_torchrun:+, with one task per node}: $starter ... ${0##*/}${_torchrun:+ --torchrun}" \
        "... $_on_purpose"
}

# Some or all of the launcher's variables did not reach this process in a container (--cleanenv, env -i). The parent
# processes still have them, if their environ may be read (proc(5)).
# shellcheck disable=SC2154  # _launchers: ranks.bash
_refuse_lost_launcher() {
    local row parts='' sizes=' ' name line entry lost='' pid=$$ i
    for row in "${_launchers[@]}"; do
        # shellcheck disable=SC2086  # split at blanks
        set -- $row
        [[ $1 != @(torchrun|manual) ]] || continue
        sizes+="${4//,/ } "
        # the batch script has Slurm's variables, too
        [[ $1 == slurm ]] || parts+=,$3,$4,$5
    done
    [[ ${SLURM_PROCID:-0} == 0 ]] || parts+=,SLURM_PROCID
    for name in ${_unknown_ranks//,/ } ${parts//,/ }; do
        # PMIx gives the size only to programs that are linked with it.
        [[ -z ${!name-} ]] || _fail 1 "a launcher set $name=${!name}, but how many ranks there are, or which one" \
            "this is, is unknown. Export RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for every rank, or start" \
            "the ranks with srun, mpirun or mpiexec, and pass on all variables of the launcher"
    done
    for ((i = 0; i < 16 && pid > 1; i++)); do
        IFS= read -r line 2> /dev/null < "/proc/$pid/stat" || return 0
        line=${line##*) ? }
        pid=${line%% *}
        [[ -r /proc/$pid/environ ]] || continue
        while IFS= read -r -d '' entry; do
            name=${entry%%=*}
            [[ $sizes != *" $name "* || -n ${!name-} || $entry != *=[1-9]* || $entry == *=1 ]] ||
                lost="process $pid has $entry"
        done 2> /dev/null < "/proc/$pid/environ"
        [[ -z $lost ]] || _fail 1 "this is one of several ranks or tasks, but it has lost the launcher's variables:" \
            "$lost, which is not set in this process. Pass them on (no --cleanenv, no env -i). $_on_purpose"
    done
}

_check_alone() {  # looks for other ranks, which this one would wait for or miss
    local name starter count known='' by='' tasks=${SLURM_NTASKS:-${SLURM_NPROCS:-1}} IFS=$' \t\n'
    if [[ -n ${SLURM_JOB_ID-}${SLURM_PROCID-} ]]; then
        _need_number SLURM_NTASKS "$tasks"
        ((tasks == 1)) || _fail 1 "this Slurm job has $tasks tasks, but no srun started this process, so it would" \
            "wait for the $((tasks - 1)) others. Put srun in front: srun ${0##*/} ... (for a single process:" \
            "conda-python-simple)"
    fi
    _refuse_lost_launcher
    # pbsdsh starts a process on each node, and passes the node's number (pbsdsh(1B)); the job's script is task 1 of
    # node 0 (seen in public outputs: 1 in the script, 146 below pbsdsh). Some versions write hexadecimal numbers.
    starter=mpiexec
    [[ -z ${PBS_JOBID-} || ${PBS_NODENUM:-0} =~ ^0*$ && ${PBS_TASKNUM:-1} =~ ^0*1?$ ]] ||
        _refuse_several "pbsdsh or a similar tool started this process on node ${PBS_NODENUM-} of the job"
    for name in ${_sizes//,/ }; do
        [[ -n ${!name-} && ( $name != NHOSTS || -n ${SGE_TASK_ID-} ) ]] || continue
        known+=$name
        case $name in
            SLURM*) starter=srun ;;
            PBS* | PJM*) starter=mpiexec ;;
            SKYPILOT* | LWS* | PET*) starter=torchrun ;;
            *) starter=mpirun ;;
        esac
        _job_size "$name"
        ((count <= 1)) || _refuse_several "this job has several nodes ($name: $count)"
    done
    for name in SLURM_JOB_ID PBS_JOBID; do
        [[ -z ${!name-} || $known == *"${name%%_*}"* ]] || _fail 1 "this is a job ($name=${!name}), but none of its" \
            "variables says how many nodes it has (${name%%_*}_...). Pass the job's variables to this process, or put" \
            "srun or mpiexec in front. $_on_purpose"
    done
    # a flux batch script has no variables of a job: ask its instance for the number of brokers, one per node
    if [[ -n ${FLUX_URI-} ]]; then
        starter='flux run' count=''
        ! type -P flux > /dev/null || count=$(flux getattr size 2> /dev/null)
        _is_number "$count" || _fail 1 "FLUX_URI is set, but 'flux getattr size' does not give the number of nodes" \
            "of this Flux instance (is flux in PATH?). Put $starter in front. $_on_purpose"
        ((count <= 1)) || _refuse_several "this Flux instance has $count nodes"
    fi
    [[ -z ${RANK-}${WORLD_SIZE-} && ${LOCAL_WORLD_SIZE:-1} == 1 ]] || _fail 1 "RANK='${RANK-}' and" \
        "WORLD_SIZE='${WORLD_SIZE-}' (LOCAL_WORLD_SIZE='${LOCAL_WORLD_SIZE-}'): some are missing," \
        "and no launcher sets them. Export all of them for every rank, or none and use srun, mpirun or mpiexec"
    [[ -z $known ]] || return 0
    # pdsh, clush and loops over ssh leave only this trace; a login also has SSH_TTY (ssh(1))
    [[ -z ${SSH_CONNECTION-} || -n ${SSH_TTY-} ]] || by='ssh (pdsh, clush) started this process'
    _find_several_nodes
    [[ -z ${JOB_COMPLETION_INDEX-} ]] || by="this is pod $JOB_COMPLETION_INDEX of an indexed Job of Kubernetes"
    _find_lost_job
    [[ -z $by ]] || _say "this rank starts alone: $by, but no launcher's variables are set. For one training on" \
        "several ranks, export RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR for each"
}

# Finds variables of systems outside the table that mean several nodes, by the form of name and value: Azure Batch
# (AZ_BATCH_HOST_LIST), SageMaker (SM_HOSTS), Volcano and ModelArts (VC_WORKER_HOSTS, MA_NUM_HOSTS), Base Command
# (NGC_ARRAY_SIZE), Beaker (BEAKER_REPLICA_COUNT), dstack (DSTACK_NODES_NUM), RunPod (NUM_NODES), Vertex AI
# (CLUSTER_SPEC), TFJob (TF_CONFIG), Kubeflow's MPI Operator (K_MPI_JOB_ROLE): their own guides.
_find_several_nodes() {  # -> by
    local entry form='^((.*_)?(NUM_NODES|NODES_NUM|NODE_COUNT|NNODES|NUM_HOSTS|REPLICA_COUNT|ARRAY_SIZE|WORKER_NUM)='
    form+='0*([2-9]|[1-9][0-9]+)$|(SM|.*_WORKER)_HOSTS=[^,]+,.|.*_(HOST|NODE)_LIST=[^,;]+[,;].'
    form+='|(TF_CONFIG|CLUSTER_SPEC)=.*:[0-9]+".*:[0-9]+"|K_MPI_JOB_ROLE=launcher$)'
    while IFS= read -r -d '' entry; do
        [[ ! $entry =~ $form ]] || by="${entry:0:80} is a variable of a job of several nodes"
    done 2> /dev/null < "/proc/$$/environ"
}

# The kernel knows the job of a process that lost all variables: in a container with --cleanenv, by env -i, in an ssh
# that the job adopts. Slurm's cgroup.conf(5) and pam_slurm_adopt, PBS's cgroups hook; as public exporters parse them
# (.../job_211/step_0/user/task_1, /slurm/uid_7/job_211/step_extern, /pbs_jobs.service/jobid/12.server).
_find_lost_job() {  # -> by
    local line found='' task=''
    local form='/(slurm.*/step_([a-z]+|[0-9]+)(/user)?(/task_([0-9]{1,6}))?|pbs_jobs\.service/job(s|id)/[^/]+)'
    while IFS= read -r line; do
        [[ $line =~ $form ]] || continue
        found=${BASH_REMATCH:0:80} task=${BASH_REMATCH[2]}/${BASH_REMATCH[5]}
    done 2> /dev/null < "$_proc_cgroup"
    [[ -n $found ]] || return 0
    by="this process is in the cgroup $found, but that job's variables are not set (--cleanenv, env -i, ssh)"
    [[ $task != [0-9]*/*[1-9]* ]] || _fail 1 "this is one of several ranks, without their variables: $by. Pass them" \
        "on. $_on_purpose"
}
