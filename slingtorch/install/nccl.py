# SPDX-License-Identifier: GPL-2.0-only
"""Which network plugins a release of NCCL or RCCL can load, and releases with known problems."""
import platform
from collections import namedtuple
from typing import Any, List, Set

from easybuild.tools import LooseVersion
from easybuild.tools.build_log import EasyBuildError
from slingtorch.job.elf import Library
from slingtorch.job.nccl import interfaces

# (first release of NCCL, or of RCCL, which has the same numbers; oldest and newest ncclNetPlugin_v* that it accepts).
# From src/ of the tags of NVIDIA/nccl (v2.12.12-1 to v2.30.7-1).
NCCL_APIS = [('2.12', (4, 5)), ('2.13', (4, 6)), ('2.19', (5, 7)), ('2.20', (5, 8)), ('2.24', (5, 9)),
             ('2.26', (6, 10)), ('2.28', (6, 11)), ('2.30', (6, 12))]

PLUGIN_NAMES = ['aws-ofi-nccl', 'aws-ofi-rccl']

# name: a key for known_problems(). since, before: affected releases (before is None: no fixed release is known).
# machine: hardware on which the problem was seen (platform.machine()), None: any.
Problem = namedtuple('Problem', ['name', 'since', 'before', 'machine', 'text', 'source'])
KNOWN_PROBLEMS = [
    Problem('aws-ofi-nccl', '1.18.0', '1.20.0', None,
            "large broadcasts between nodes can hang (1.18.0; fixed in 1.20.0)", 'aws/deep-learning-containers#6668'),
    Problem('aws-ofi-nccl', '1.19.2', None, None,
            "jobs of 64 ranks and more can stop after 'Connected all rings' on Slingshot: set NCCL_MAX_NCHANNELS=20 "
            "and NCCL_MIN_NCHANNELS=0 (the minimum is applied last)",
            'aws/aws-ofi-nccl#1379'),
    Problem('NCCL', '2.27.3', None, 'aarch64',
            "the protocol LL128 can corrupt data on GH200 with Slingshot: set NCCL_PROTO=^LL128", 'NVIDIA/nccl#2001'),
    Problem('ROCm', '7.14', '7.15', None,
            "its RCCL gives wrong results for messages of 64 to 512 MB: verify results before you trust them, or use "
            "another ROCm", 'ROCm/TheRock#7903'),
]


def accepted_apis(version: Any) -> Any:
    """Oldest and newest ncclNetPlugin_v* (numbers) that a release of NCCL or RCCL accepts; None if not known."""
    windows = [window for since, window in NCCL_APIS if version and LooseVersion(version) >= LooseVersion(since)]
    return windows[-1] if windows else None


def misfit(version: Any, plugin: str, apis: Any) -> str:
    """How a release of NCCL or RCCL and a plugin that exports these ncclNetPlugin_v* do not fit; '' if they do."""
    window = accepted_apis(version)
    if not window or any(window[0] <= api <= window[1] for api in apis):
        return ''
    return "accepts ncclNetPlugin_v%d to v%d, but %s has %s" % (
        *window, plugin, ', '.join('v%d' % api for api in sorted(apis)) or 'none')


def exported_apis(path: str) -> Set[int]:
    """The set of numbers of the ncclNetPlugin_v* that a plugin exports."""
    try:
        return set(interfaces(Library(path).exported()))
    except (OSError, ValueError) as err:
        raise EasyBuildError("The plugin cannot be read: %s", err)


def known_problems(versions: Any) -> List[str]:
    """Sentences, each with its source, about known problems of these releases: {name: version, or None}."""
    texts = []
    for problem in KNOWN_PROBLEMS:
        version = versions.get(problem.name)
        if version and LooseVersion(version) >= LooseVersion(problem.since) and (
                problem.before is None or LooseVersion(version) < LooseVersion(problem.before)) and (
                problem.machine in (None, platform.machine())):
            texts.append("%s %s: %s (%s)" % (problem.name, version, problem.text, problem.source))
    return texts
