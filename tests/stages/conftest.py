# SPDX-License-Identifier: GPL-2.0-only
"""Images with a real PyTorch, and LUMI as its users see it."""

import pytest

from testbed import images, lumi as lumi_, slurm as slurm_


@pytest.fixture(scope='session')
def pytorch_image(lmod, runtime):
    """An image with PyTorch for CPUs, as `eb` built it on this machine."""
    return images.pytorch(lmod)


@pytest.fixture(scope='session')
def lumi_image(lmod, runtime):
    """An image that looks like LUMI's with PyTorch 2.1.0."""
    return images.stand_in(lmod)


@pytest.fixture(scope='session')
def lumi(lmod, runtime, tmp_path_factory):
    """A login node of LUMI: testbed.lumi.Site."""
    return lumi_.Site(tmp_path_factory.mktemp('lumi'), lmod)


@pytest.fixture(scope='session')
def lumi_nodes():
    """Two nodes of LUMI-G: testbed.lumi.Cluster."""
    slurm_.clean_up_killed_runs()
    cluster = lumi_.Cluster()
    try:
        yield cluster.start()
    finally:
        cluster.stop()
