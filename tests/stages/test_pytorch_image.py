# SPDX-License-Identifier: GPL-2.0-only
"""The image with PyTorch that `eb` builds on this machine: checked inside, and used through its module."""

import re
import shutil

import pytest

from testbed import ROOT, images

pytestmark = pytest.mark.real

MODULE = 'PyTorch/' + images.EASYCONFIG.stem.split('-', 1)[1]


@pytest.fixture
def eb(eb_env, runtime):
    eb_env.env['PATH'] = f'{runtime}:{eb_env.env["PATH"]}:/usr/sbin'
    return eb_env


def test_image_as_any_other(eb, lmod, runtime, pytorch_image, submit, tmp_path):
    """What was built once is installed like an image from elsewhere, passes the checks of its easyconfig, and trains."""
    text = images.EASYCONFIG.read_text()
    image = f'{images.EASYCONFIG.stem}.sif'
    (tmp_path / image).symlink_to(pytorch_image)
    text = re.sub(r'(?s)^sources = \[.*?^\]\n', f'sources = [{image!r}]\n', text, flags=re.M)
    text = re.sub(r'(?s)^checksums = \[.*?^\]\n', 'checksums = [None]\n', text, flags=re.M)
    easyconfig = tmp_path / images.EASYCONFIG.name
    easyconfig.write_text(text + "image_transfer = 'symlink'\n")
    done = eb(easyconfig)
    assert 'is not checked' not in done.stdout + done.stderr

    script = f"""
module load {MODULE} || exit 1
torchrun --version
python -c 'import torch; print(torch.__version__, torch.distributed.is_gloo_available())'
python -c 'raise SystemExit(7)'
echo "status $?"
ls $EBROOTPYTORCH/share/docker-defs
"""
    path = f'{runtime}:{lmod.env["PATH"]}'
    done = lmod.bash(script, modulepath=[eb.modulepath], env={'PATH': path}, cwd=tmp_path)
    assert '2.13.0+cpu True' in done.stdout
    assert 'status 7' in done.stdout
    assert '.def' in done.stdout

    shutil.copy(ROOT / 'examples/training/ddp_training.py', tmp_path)
    words = {'PyTorch/2.14.1-cuda-13.2-singularity-dockerhub': MODULE, '--output-dir': '--epochs 1 --output-dir'}
    job = submit(ROOT / 'examples/slurm/container_pytorch.job', words, '--gpus-per-node=1', '--ntasks-per-node=1', PATH=path,
                 GLOO_SOCKET_IFNAME='lo', EASYBUILD_PREFIX=eb.modulepath.parents[1], SLINGTORCH_CACHE_ROOT=tmp_path)
    assert job.returncode == 0, job.output
    assert 'check-container: 2 node(s), one image' in job.output and ' test images, 2 ranks' in job.output
    assert (tmp_path / f'container_pytorch-{job.jobid}/model.pt').exists()


def test_definition_and_lock_file_are_those_of_the_easyconfig(eb):
    done = eb(images.EASYCONFIG.name, '--fetch')
    assert 'COMPLETED' in done.stdout
