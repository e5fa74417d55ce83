# SPDX-License-Identifier: GPL-2.0-only
# Network and driver: sets NCCL_NET, and checks for the plugin and the driver that NCCL needs. Sourced by
# conda-python-distributed.

_set_network() {
    _warn_of_old_driver
    _several_nodes || return 0
    _check_alt_read
    # On one node the plugin would occupy a network identifier for nothing, or refuse to start.
    [[ -n ${NCCL_NET-} || -z ${SLINGTORCH_MULTINODE_NCCL_NET-} ]] || export NCCL_NET=$SLINGTORCH_MULTINODE_NCCL_NET
    _check_plugin
}

# Without its plugin NCCL would use sockets, or stop long after all ranks have imported PyTorch.
_check_plugin() {
    local dir name plugin=${NCCL_NET_PLUGIN-}
    local remedy="Load the module of the plugin in the job script (module spider aws-ofi-nccl)"
    remedy+=". For a job without NCCL, or with NCCL over sockets: export NCCL_NET=Socket and unset NCCL_NET_PLUGIN"
    if [[ $plugin == /* ]]; then
        [[ -r $plugin ]] || _fail 1 "NCCL_NET_PLUGIN='$plugin' does not exist or is not readable, and this job has" \
            "several nodes. $remedy. In a container, the plugin's directory must be bound"
    elif [[ -z $plugin && -n ${SLINGTORCH_MULTINODE_NCCL_NET-} && $NCCL_NET == "$SLINGTORCH_MULTINODE_NCCL_NET" &&
            -z ${APPTAINER_CONTAINER-}${SINGULARITY_CONTAINER-} ]]; then  # an image finds its own plugin
        local IFS=:
        for dir in ${LD_LIBRARY_PATH-}; do
            for name in $_net_plugins; do [[ ! -r $dir/$name ]] || return 0; done
        done
        _fail 1 "this system needs NCCL's network plugin in jobs of several nodes" \
            "(SLINGTORCH_MULTINODE_NCCL_NET='$SLINGTORCH_MULTINODE_NCCL_NET'), but LD_LIBRARY_PATH has none. $remedy"
    fi
}

# alt_read works only with NICs whose own gets are off (fi_cxi(7), FI_CXI_RDZV_PROTO), except with software matching
# (HPE's SHS guide, rendezvous protocol configuration). The driver shows this in the file that Slurm's
# switch/hpe_slingshot writes for --network=disable_rdzv_get, for steps of several nodes. If the file cannot be read,
# SLURM_NETWORK may name the option. If it does not, the option may still be set: Slurm adds the job's options to the
# step's, and 22.05 and 24.11 set no variable for the job's (seen; since 25.05.3 one is set: 8d2e6385e7).
_check_alt_read() {
    local file gets='' option="Put '#SBATCH --network=disable_rdzv_get' into the job script"
    [[ ${FI_CXI_RDZV_PROTO-} == alt[_-]read && ${FI_CXI_RX_MATCH_MODE-} != software ]] || return 0
    for file in "$_cxi_devices"/cxi*/device/properties/rdzv_get_en; do
        IFS= read -r gets 2> /dev/null < "$file" && break
    done
    if [[ ,${SLURM_NETWORK-}, == *,disable_rdzv_get,* ]]; then
        option="The job requested this, but the driver of the NICs did not apply it: tell the centre"
    elif [[ $launcher == pals ]]; then option="Start the ranks with 'mpiexec --disable-rdzv-get'"
    fi
    case $gets in
        [1Yy]*)
            ((RANK)) || _say "the protocol alt_read (FI_CXI_RDZV_PROTO) is switched off, because it needs a job" \
                "with disable_rdzv_get. $option, or omit the site's group alt_read"
            unset FI_CXI_RDZV_PROTO FI_CXI_RDZV_THRESHOLD FI_CXI_RDZV_GET_MIN FI_CXI_RDZV_EAGER_SIZE ;;
        '')
            [[ -z ${SLURM_JOB_ID-} || $option == The* ]] || ((RANK)) || _say "the protocol alt_read" \
                "(FI_CXI_RDZV_PROTO) needs a job with disable_rdzv_get. It is unknown whether this is one. $option" ;;
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
    [[ -n $fits ]] && fits="'eb $fits' installs one for this driver" || fits="Use a PyTorch for an older CUDA"
    _say "this node's GPU driver is $driver, but this PyTorch is for CUDA $SLINGTORCH_CUDA_VERSION, which needs" \
        "$oldest or newer: without NVIDIA's cuda-compat it finds no GPU. $fits"
}
