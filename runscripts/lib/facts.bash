# SPDX-License-Identifier: GPL-2.0-only
# Made from slingtorch/job/machine.py, by: python3 -m slingtorch.job.machine
# shellcheck disable=SC2034  # for those who source it
_gpu_device='^0x(0302|0380|1200|0300.*/0x10de$)'
_gpu_variables='ROCR_VISIBLE_DEVICES,CUDA_VISIBLE_DEVICES,HIP_VISIBLE_DEVICES,ZE_AFFINITY_MASK,GPU_DEVICE_ORDINAL'
_gpu_entry='^([0123456789]{1,4}(\.[0123456789]{1,4})?|(GPU|MIG)-[A-Za-z0-9/-]+)$'
_net_plugins='libnccl-net.so:librccl-net.so'
