# SPDX-License-Identifier: GPL-2.0-only
"""Finds the easyconfig of a PyTorch wheel that fits the GPUs of this machine and their driver, only by reading files.

The table of drivers is runscripts/lib/drivers.cfg. A wheel's easyconfig tells what it supports: CUDA or ROCm in its
name, processors in wheel_platform, GPUs in cuda_compute_capabilities.
"""
import ast
import glob
import os
import re
from collections import namedtuple
from typing import Dict, List, Optional, Tuple

from slingtorch import bundle_root
from slingtorch.job.machine import Machine

# the CPU build
CPU = 'PyTorch-2.13.0-local-cpu.eb'
# names without a site are for any cluster
NAME = re.compile(r'^PyTorch-(\d[\d.]*)-(cuda|rocm)-(\d+)\.(\d+)\.eb$')
# Compute capability of models older than Turing (7.5; developer.nvidia.com/cuda-legacy-gpus), by the driver's names
# ('Tesla V100-SXM2-32GB', 'Quadro GV100', 'NVIDIA TITAN V'). Every wheel supports all newer models.
OLD_MODELS = (((7, 0), r'\bG?V100S?\b|TITAN V\b'), ((6, 0), r'\bG?P\d{1,4}\b|GTX 10[5-8]0|TITAN X'),
              ((5, 0), r'\bM\d{1,4}M?\b|GTX (9\d0|750)'), ((3, 0), r'\bK\d{1,4}[cmst]?\b'))

Wheel = namedtuple('Wheel', ['name', 'version', 'kind', 'toolkit', 'machines', 'oldest_gpu'])
# name of an easyconfig, or None; what was compared
Answer = Tuple[Optional[str], str]


def oldest_drivers() -> Dict[int, int]:
    """The table of drivers: {major version of CUDA: oldest driver}."""
    with open(os.path.join(bundle_root(), 'runscripts', 'lib', 'drivers.cfg')) as stream:
        rows = [line.split() for line in stream if not line.startswith('#')]
    return {int(row[0]): int(row[1]) for row in rows}


def wheels(easyconfigs: Optional[str] = None) -> List[Wheel]:
    """The easyconfigs of wheels for any cluster in a directory (default: the bundle's), newest first."""
    found = []
    top = easyconfigs or os.path.join(bundle_root(), 'easyconfigs')
    for path in glob.glob(os.path.join(glob.escape(top), '**', 'PyTorch-*.eb'), recursive=True):
        match = NAME.match(os.path.basename(path))
        if not match:
            continue
        version, kind, major, minor = match.groups()
        with open(path) as stream:
            text = stream.read()
        # manylinux_2_28_x86_64, the default of PythonVenv, or a list of such names
        values = {key: ast.literal_eval(value) for key, value in
                  re.findall(r'^(wheel_platform|cuda_compute_capabilities) = (\[[^]]*\]|\S+)', text, re.M)}
        machines = re.findall(r'manylinux_\d+_\d+_(\w+)', str(values.get('wheel_platform', 'manylinux_2_28_x86_64')))
        gpus = map(numbers, values.get('cuda_compute_capabilities', ['0.0']))
        found.append(Wheel(os.path.basename(path), numbers(version), kind, (int(major), int(minor)), machines,
                           min(gpus)))
    return sorted(found, key=lambda wheel: (wheel.version, wheel.toolkit), reverse=True)


def numbers(text: str) -> Tuple[int, ...]:
    """(2, 10, 0) for '2.10.0'."""
    return tuple(int(part) for part in text.split('.') if part.isdigit())


def nvidia_models(node: Machine) -> List[str]:
    """Models of NVIDIA's GPUs, as the driver calls them."""
    texts = map(node.read, node.glob('proc/driver/nvidia/gpus/*/information'))
    return sorted({model for text in texts for model in re.findall(r'^Model:\s*(\S.*?)\s*$', text, re.M)})


def capability(model: str) -> Optional[Tuple[int, int]]:
    """Compute capability of a model that is older than Turing; None for all others."""
    return next((number for number, pattern in OLD_MODELS if re.search(pattern, model)), None)


def amd_driver(node: Machine) -> Optional[str]:
    """Name of the driver of AMD's GPUs ('amdgpu 6.12.12', 'amdgpu'); None if ROCm has no GPU."""
    # AMD's own driver has a version, the kernel's has none
    return ('amdgpu ' + node.read('sys/module/amdgpu/version')).strip() if node.rocm_gpus() else None


def nvidia_wheel(node: Machine, candidates: List[Wheel], machine: str) -> Optional[Answer]:
    """(name or None, reason) for NVIDIA's GPUs, or None without a driver."""
    driver, models = node.nvidia_driver(), nvidia_models(node)
    if not driver:
        # the models are known, so the driver is loaded
        return (None, "NVIDIA's driver is loaded, but /proc/driver/nvidia/version does not give its version"
                ) if models else None
    oldest = oldest_drivers()
    for_machine = [wheel for wheel in candidates if wheel.kind == 'cuda' and machine in wheel.machines]
    if not for_machine:
        return None, "there is no wheel with CUDA for %s" % machine
    runs = [wheel for wheel in for_machine if int(driver.split('.')[0]) >= oldest[wheel.toolkit[0]]]
    if not runs:
        return None, ("driver %s is too old for every wheel: the oldest on %s needs driver %d. Ask the centre for a "
                      "newer driver" % (driver, machine, min(oldest[wheel.toolkit[0]] for wheel in for_machine)))
    # a model that is not in the table is newer than all models in it
    old, model = min((capability(model) or (99, 0), model) for model in models or [''])
    fits = [wheel for wheel in runs if old >= wheel.oldest_gpu]
    if not fits:
        return None, "%s is too old for every wheel that driver %s runs (compute capability %d.%d)" % (
            model, driver, old[0], old[1])
    reason = 'driver %s' % driver
    if fits[0] != runs[0]:
        reason += ', and %s has no code for %s' % (runs[0].name, model)
    return fits[0].name, reason


def amd_wheel(node: Machine, candidates: List[Wheel], machine: str) -> Optional[Answer]:
    """(name or None, reason) for AMD's GPUs, or None without a driver."""
    driver = amd_driver(node)
    if not driver:
        return None
    # AMD names no oldest driver: its table only lists tested pairs
    fits = [wheel for wheel in candidates if wheel.kind == 'rocm' and machine in wheel.machines]
    if not fits:
        return None, "there is no wheel with ROCm for %s" % machine
    return fits[0].name, driver


def without_driver(candidates: List[Wheel], machine: str, site_gpu: Optional[str]) -> Answer:
    """(name or None, reason) if no driver is loaded, as on a login node."""
    fits = [wheel for wheel in candidates if wheel.kind == site_gpu and machine in wheel.machines]
    if not fits:
        return None, "no driver of NVIDIA's or AMD's GPUs is loaded"
    reason = "no driver is loaded to compare with"
    if site_gpu == 'cuda':
        oldest = oldest_drivers()
        reason += "; it needs driver %d" % oldest[fits[0].toolkit[0]]
        other = [wheel for wheel in fits if oldest[wheel.toolkit[0]] < oldest[fits[0].toolkit[0]]]
        if other:
            reason += ", %s %d" % (other[0].name, oldest[other[0].toolkit[0]])
    return fits[0].name, reason


def fitting_easyconfig(root: str = '/', easyconfigs: Optional[str] = None, machine: Optional[str] = None,
                       site_gpu: Optional[str] = None, toolkit: Optional[str] = None) -> Answer:
    """Name of the easyconfig of a PyTorch wheel that fits this machine, or None; what was compared, or why none fits.

    :param site_gpu: cuda or rocm, from the site: decides if this machine has GPUs of both kinds or none
    :param toolkit: CUDA or ROCm version of the site's network plugin; the wheel must have the same major version
    """
    node, machine, candidates = Machine(root=root), machine or os.uname().machine, wheels(easyconfigs)
    if toolkit:
        candidates = [wheel for wheel in candidates
                      if (wheel.kind, wheel.toolkit[0]) == (site_gpu, int(toolkit.split('.')[0]))]
    both = [('cuda', nvidia_wheel(node, candidates, machine)), ('rocm', amd_wheel(node, candidates, machine))]
    # wheels that fit first, then the site's kind of GPU
    answers = sorted([(kind, answer) for kind, answer in both if answer],
                     key=lambda item: (item[1][0] is None, item[0] != site_gpu))
    if not answers:
        return without_driver(candidates, machine, site_gpu)
    name, reason = answers[0][1]
    for _, (other, why) in answers[1:]:
        reason += "; for the other GPUs here" + (", %s: %s" % (why, other) if other else ": none, " + why)
    return name, reason
