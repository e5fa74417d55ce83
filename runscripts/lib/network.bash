# SPDX-License-Identifier: GPL-2.0-only
# Network and driver: NCCL_NET, and whether the plugin and the driver that NCCL needs are there. Sourced by
# conda-python-distributed.

_set_network() {
    _warn_of_old_driver
    _several_nodes || return 0
    _check_alt_read
    # On one node the plugin would take a network identifier that is not needed, or refuse to start.
    [[ -n ${NCCL_NET-} || -z ${SLINGTORCH_MULTINODE_NCCL_NET-} ]] || export NCCL_NET=$SLINGTORCH_MULTINODE_NCCL_NET
    _check_plugin
}

# Without its plugin NCCL would take sockets, or stop long after all ranks have imported PyTorch.
_check_plugin() {
    local dir name plugin=${NCCL_NET_PLUGIN-}
    local remedy="Load the module of the plugin in the job script (module spider aws-ofi-nccl)"
    remedy+=". For a job without NCCL, or with NCCL over sockets: export NCCL_NET=Socket and unset NCCL_NET_PLUGIN"
    if [[ $plugin == /* ]]; then
        [[ -r $plugin ]] || _fail 1 "NCCL_NET_PLUGIN='$plugin' is not there or not readable, and this job has several" \
            "nodes. $remedy. In a container the plugin's directory must be bound"
    elif [[ -z $plugin && -n ${SLINGTORCH_MULTINODE_NCCL_NET-} && $NCCL_NET == "$SLINGTORCH_MULTINODE_NCCL_NET" &&
            -z ${APPTAINER_CONTAINER-}${SINGULARITY_CONTAINER-} ]]; then  # an image has its own, found in its own way
        local IFS=:
        for dir in ${LD_LIBRARY_PATH-}; do
            for name in $_net_plugins; do [[ ! -r $dir/$name ]] || return 0; done
        done
        _fail 1 "in a job of several nodes this system needs NCCL's network plugin" \
            "(SLINGTORCH_MULTINODE_NCCL_NET='$SLINGTORCH_MULTINODE_NCCL_NET'), and none is in LD_LIBRARY_PATH. $remedy"
    fi
}

# alt_read is for NICs whose own gets are off (fi_cxi(7), FI_CXI_RDZV_PROTO), but for software matching (HPE's SHS
# guide, rendezvous protocol configuration). The driver says so in the file that Slurm's switch/hpe_slingshot writes for
# --network=disable_rdzv_get, for steps of several nodes. Where it cannot be read, SLURM_NETWORK may name the option;
# that it does not says nothing: Slurm adds the job's options to the step's, and 22.05 and 24.11 show the job's in no
# variable (seen; it does since 25.05.3: 8d2e6385e7, src/slurmctld/job_scheduler.c).
_check_alt_read() {
    local file gets='' option="Put '#SBATCH --network=disable_rdzv_get' into the job script"
    [[ ${FI_CXI_RDZV_PROTO-} == alt[_-]read && ${FI_CXI_RX_MATCH_MODE-} != software ]] || return 0
    for file in "$_cxi_devices"/cxi*/device/properties/rdzv_get_en; do
        IFS= read -r gets 2> /dev/null < "$file" && break
    done
    if [[ ,${SLURM_NETWORK-}, == *,disable_rdzv_get,* ]]; then
        option="The job has asked for it, and the driver of the NICs did not follow: tell the centre"
    elif [[ $launcher == pals ]]; then option="Start the ranks with 'mpiexec --disable-rdzv-get'"
    fi
    case $gets in
        [1Yy]*)
            ((RANK)) || _say "the protocol alt_read (FI_CXI_RDZV_PROTO) is switched off: it needs a job with" \
                "disable_rdzv_get. $option, or do without the site's group alt_read"
            unset FI_CXI_RDZV_PROTO FI_CXI_RDZV_THRESHOLD FI_CXI_RDZV_GET_MIN FI_CXI_RDZV_EAGER_SIZE ;;
        '')
            [[ -z ${SLURM_JOB_ID-} || $option == The* ]] || ((RANK)) || _say "the protocol alt_read" \
                "(FI_CXI_RDZV_PROTO) needs a job with disable_rdzv_get, and nothing says if this is one. $option" ;;
    esac
}

# Rows of lib/drivers.cfg: CUDA, oldest driver, easyconfig, machines.
_warn_of_old_driver() {
    local line driver cuda needs easyconfig machines oldest='' fits=''
    [[ -n ${SLINGTORCH_CUDA_VERSION-} && $local_rank == 0 ]] || return 0
    IFS= read -r line 2> /dev/null < "$_nvidia_driver" || return 0
    [[ $line =~ \ ([0-9]+)\.[0-9.]+\  ]] || return 0
    driver=${BASH_REMATCH[1]}
    while read -r cuda needs easyconfig machines; do
        [[ $cuda != "${SLINGTORCH_CUDA_VERSION%%.*}" ]] || oldest=$needs
        [[ $cuda != [0-9]* || ,$machines, != *,$_machine,* ]] || ((driver < needs)) || fits=$easyconfig
    done < "$_here/lib/drivers.cfg"
    [[ -n $oldest ]] && ((driver < oldest)) || return 0
    [[ -n $fits ]] && fits="eb $fits installs one that this driver runs" || fits="Take a PyTorch for an older CUDA"
    _say "the driver of this node's GPUs is $driver, and this PyTorch is for CUDA $SLINGTORCH_CUDA_VERSION, which" \
        "needs $oldest or newer: without NVIDIA's cuda-compat no GPU will be found. $fits"
}
