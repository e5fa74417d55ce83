# SPDX-License-Identifier: GPL-2.0-only
"""The commands of LUMI's PyTorch documentation, as they are written there, on a LUMI that is emulated."""

import pathlib
import re
import shutil
import sys

import pytest

import testbed
from testbed import derecho, readme, smallimage

pytestmark = pytest.mark.real

VERSION = '2.1.0-rocm-5.6.1-python-3.10-singularity-20231123'
SIF = 'lumi-pytorch-rocm-5.6.1-python-3.10-pytorch-v2.1.0-dockerhash-10b8c0aaec73.sif'
LOAD = f'module load LUMI PyTorch/{VERSION}'
INSTALL = f"""
module load LUMI partition/container EasyBuild-user
eb PyTorch-{VERSION}.eb
"""
MASK = ('mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,'
        '0xfe,0xfe00,0xfe00000000,0xfe0000000000')


@pytest.fixture(scope='module')
def installed(lumi, lumi_image):
    """What `eb` printed when the user installed the container as the document says."""
    central = lumi.central / SIF
    shutil.copyfile(lumi_image, central)
    return lumi.bash('set -e' + INSTALL, timeout=600)


@pytest.fixture
def batch(lumi, lumi_nodes, installed, tmp_path):
    """Submit a job script as a user of LUMI does; a testbed.slurm.Batch."""
    def submit(script, *options, env=None):
        # a user's shell has `module`, and so has every bash that it starts
        shell = lumi.environment('true')
        return lumi_nodes.sbatch(script, '--nodes=2', *options, env={**shell, **(env or {})}, cwd=tmp_path, timeout=400)

    return submit


def test_installation(lumi, installed):
    assert 'COMPLETED: Installation ended successfully' in installed.stdout
    root = lumi.user_prefix / f'SW/container/PyTorch/{VERSION}'
    assert (root / SIF).stat().st_size == (lumi.central / SIF).stat().st_size
    assert {'conda-python-simple', 'conda-python-distributed', 'cpu-bind', 'get-master'} <= {
        path.name for path in (root / 'runscripts').iterdir()
    }
    assert (lumi.user_prefix / f'modules/container/PyTorch/{VERSION}.lua').is_file()
    assert (lumi.user_prefix / f'ebfiles_repo/container/PyTorch/PyTorch-{VERSION}.eb').is_file()
    assert list((root / 'share/docker-defs').iterdir())
    # checked inside the container, not passed over
    assert 'is not checked' not in installed.stdout + installed.stderr


def test_variables_of_the_module(lumi, installed):
    env = lumi.environment(LOAD)
    root = lumi.user_prefix / f'SW/container/PyTorch/{VERSION}'
    assert env['SIF'] == env['SIFPYTORCH'] == str(root / SIF)
    assert env['RUNSCRIPTS'] == env['RUNSCRIPTSPYTORCH'] == str(root / 'runscripts')
    assert f'{root}/runscripts:/runscripts:ro' in env['SINGULARITY_BINDPATH'].split(',')
    assert '/pfs' not in env['SINGULARITY_BINDPATH'].split(',') or pathlib.Path('/pfs').exists()
    assert env['SLINGTORCH_GPU_VISIBILITY'] == 'ROCR_VISIBLE_DEVICES'
    assert (env['NCCL_SOCKET_IFNAME'], env['NCCL_NET_GDR_LEVEL']) == ('hsn', '3')


def test_shell_in_the_container(lumi, installed, tmp_path):
    script = f"""
{LOAD}
singularity shell $SIF <<'END'
$WITH_CONDA
pip list
END
"""
    done = lumi.bash(script, cwd=tmp_path)
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith('torch ')] == ['2.1.0+rocm5.6']


def test_simple_runscript(lumi, lumi_nodes, installed, tmp_path):
    script = f"""
{LOAD}
srun -N1 -n1 --gpus 8 singularity exec $SIF /runscripts/conda-python-simple \\
    -c 'import torch; print("I have this many devices:", torch.cuda.device_count())'
"""
    done = lumi.bash(script, env={'SLURM_CONF': lumi_nodes.env['SLURM_CONF']}, cwd=tmp_path)
    assert 'I have this many devices: 0' in done.stdout


def test_job_script_of_the_document(batch):
    job = batch(f"""#!/bin/bash -e
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --tasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --partition=standard-g
#SBATCH --mem=480G
#SBATCH --time=00:10:00

module load LUMI
module load wget
module load PyTorch/{VERSION}

export SINGULARITYENV_NCCL_DEBUG=INFO
export SINGULARITYENV_NCCL_DEBUG_SUBSYS=INIT,COLL

c=fe
MYMASKS="0x${{c}}000000000000,0x${{c}}00000000000000,0x${{c}}0000,0x${{c}}000000,\
0x${{c}},0x${{c}}00,0x${{c}}00000000,0x${{c}}0000000000"

srun --cpu-bind=mask_cpu:$MYMASKS \\
  singularity exec $SIFPYTORCH \\
    conda-python-distributed -u -c 'if True:
        import os
        names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR NCCL_DEBUG NCCL_NET ROCR_VISIBLE_DEVICES"
        print(*(os.environ.get(name) for name in names.split()))'
echo "binding $MYMASKS"
$RUNSCRIPTS/cpu-bind
""")
    assert job.returncode == 0, job.output
    ranks = [line.split() for line in job.output.splitlines() if ' nid000001 ' in line]
    expected = [f'{rank} 16 {rank % 8} nid000001 INFO AWS Libfabric {rank % 8}'.split() for rank in range(16)]
    assert sorted(ranks, key=lambda words: int(words[0])) == expected
    # what the document has users copy is what cpu-bind prints
    assert f'binding {MASK.partition(":")[2]}\n{MASK}\n' in job.output


def test_training(batch, tmp_path):
    shutil.copy(testbed.ROOT / 'examples/training/ddp_training.py', tmp_path)
    job = batch(
        (testbed.ROOT / 'examples/lumi/train.sh').read_text(),
        '--tasks-per-node=1',
        '--account=project_465000000',
        env={'PYTORCH_MODULE': f'PyTorch/{VERSION}', 'EPOCHS': '1', 'OMP_NUM_THREADS': '1'},
    )
    assert job.returncode == 0, job.output
    assert 'test images, 2 ranks' in job.output
    assert re.findall(r'^ +(\d)  \S+ +cpu$', job.output, re.M) == ['0', '1'], job.output
    assert len(list(tmp_path.glob('*/model.pt'))) == 1


def test_part_of_a_node_gets_no_binding(batch):
    script = f"""#!/bin/bash -e
module load LUMI PyTorch/{VERSION}
binding=$($RUNSCRIPTS/cpu-bind)
echo "got $binding"
"""
    job = batch(script, '--partition=small-g', '--gpus-per-node=4', '--tasks-per-node=4')
    assert job.returncode != 0 and 'got' not in job.output
    assert "4 of the node's 8 GPUs" in job.output


# the own copy is gone from here on

def test_removed_image(lumi, installed, tmp_path):
    done = lumi.bash(f"""
{LOAD}
rm $SIF
{LOAD}
echo "SIF=$SIF"
singularity exec $SIF conda-python-simple -c 'print("it runs")'
""", cwd=tmp_path)
    assert f'SIF={lumi.central}/{SIF}' in done.stdout
    assert 'it runs' in done.stdout
    assert str(lumi.central) in done.stderr         # the module says which copy it is

    (lumi.central / SIF).rename(lumi.central / 'elsewhere')
    try:
        done = lumi.bash(LOAD, check=False)
        assert done.returncode != 0
        assert 'eb --rebuild' in done.stderr
    finally:
        (lumi.central / 'elsewhere').rename(lumi.central / SIF)


def test_missing_image_says_where_to_get_it(lumi):
    done = lumi.bash('module load LUMI partition/container EasyBuild-user\n'
                     'eb PyTorch-2.7.1-rocm-6.2.4-python-3.12-singularity-20250827.eb', check=False)
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert 'lumi-pytorch-rocm-6.2.4-python-3.12-pytorch-v2.7.1-dockerhash-0d479e852886.sif' in text
    assert str(lumi.central) in text and 'your own copy serves' in text


def test_readme(lumi, runtime, lumi_nodes, tmp_path):
    """README.md, "On a supercomputer": the block for LUMI as it stands, with a small image in place of the newer one."""
    block = readme.supercomputer()['lumi']
    image = lumi.central / 'lumi-pytorch-rocm-6.2.4-python-3.12-pytorch-v2.7.1-dockerhash-0d479e852886.sif'
    image.symlink_to(smallimage.image(runtime))
    derecho.script(tmp_path / 'slingtorch-env/bin/slingtorch',
                   f'#!/bin/sh\nPYTHONPATH={lumi.bundle} exec {sys.executable} -m slingtorch "$@"\n')
    (tmp_path / 'train.py').write_text(
        'import os; print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ROCR_VISIBLE_DEVICES")))')
    done = lumi.bash('set -e\n' + block, cwd=tmp_path, timeout=600, env={
        'SLURM_CONF': lumi_nodes.env['SLURM_CONF'], 'EASYBUILD_SKIP_SANITY_CHECK': '1'})
    assert "slingtorch: site lumi (" in done.stderr
    ranks = sorted(re.findall(r'^\d+ 16 \d \d$', done.stdout, re.M))
    assert ranks == sorted(f'{rank} 16 {rank % 8} {rank % 8}' for rank in range(16))
