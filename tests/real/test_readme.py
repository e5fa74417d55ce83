# SPDX-License-Identifier: GPL-2.0-only
"""README.md, "On a supercomputer", and docs/first-hour.md: line by line, on an emulation of the system, with real ranks."""
import json
import os
import re
import shutil
import sys

import pytest

from testbed import ROOT, derecho, readme, wheels

pytestmark = pytest.mark.real

TRAIN = """
import json, os, sys
names = 'RANK WORLD_SIZE NCCL_SOCKET_IFNAME RUNSCRIPTS'.split()
os.write(1, (json.dumps([os.environ.get(name) for name in names]) + '\\n').encode())
"""
# MPICH's does not know the option of PALS
MPIEXEC = """#!/bin/bash
while [[ $1 != --cpu-bind ]]; do options+=("$1"); shift; done
exec mpiexec.hydra -launcher fork "${options[@]}" "${@:3}"
"""


@pytest.fixture
def home(tmp_path):
    """A user's directory after README's first block, with a copy of the bundle in place of an installed one."""
    for room in ('easyblocks', 'easyconfigs', 'hooks', 'patches', 'runscripts', 'slingtorch'):
        shutil.copytree(ROOT / room, tmp_path / 'bundle' / room, ignore=shutil.ignore_patterns('__pycache__'))
    derecho.script(tmp_path / 'slingtorch-env/bin/slingtorch',
                   f'#!/bin/sh\nPYTHONPATH={tmp_path}/bundle exec {sys.executable} -m slingtorch "$@"\n')
    return tmp_path


def typed(block, home, tool, **kwargs):
    """Run a block as it stands, in a new shell of the user that stops where a line fails; then eb once more."""
    path = [entry for entry in os.environ['PATH'].split(':') if not os.path.exists(f'{entry}/slingtorch')]
    env = {'HOME': home, 'PATH': ':'.join([f'{home}/bin', *path]), 'EASYBUILD_OUTPUT_STYLE': 'no_color',
           'EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES': '1', **kwargs.pop('env', {})}
    done = tool.bash(f'set -e\n{block}\neb --version', env=env, cwd=home, timeout=600, **kwargs)
    assert 'This is EasyBuild' in done.stdout.splitlines()[-1]
    return done


def test_derecho(home, lmod, mpich):
    """NCCL and its plugin are there already, and PyTorch is a toy that compiles in a second."""
    site = derecho.Derecho(home / 'derecho')
    shutil.copy(site.sites / 'derecho.cfg', home / 'bundle/hooks/sites')
    prefix = home / '.local/easybuild'
    site.install(prefix, 'NCCL', '2.21.5-derecho-23.09', ['libnccl.so'])
    site.install(prefix, 'aws-ofi-nccl', '1.6.0-derecho-23.09', ['libnccl-net.so'])
    derecho.ToySources(prefix / 'sources').write('2.4.0')
    derecho.script(home / 'bin/mpiexec', MPIEXEC)
    (home / 'train.py').write_text(TRAIN)
    done = typed(readme.supercomputer()['derecho'], home, lmod, modulepath=[site.modulepath],
                 env={'EASYBUILD_IGNORE_CHECKSUMS': '1'})
    assert 'site derecho ($NCAR_HOST is derecho)' in done.stderr
    ranks = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    runscripts = f'{prefix}/software/PyTorch/2.4.0-derecho-cray-mpich/runscripts'
    assert ranks == [[str(rank), '8', 'hsn', runscripts] for rank in range(8)]


def test_slurm(home, lmod, slurm):
    """One eb, one module load, one srun on eight GPUs of two nodes; the 3 GB of wheels are stand-ins."""
    env = wheels.stand_in(home / 'bundle/easyconfigs/p/PyTorch/PyTorch-2.15.0-cuda-13.2.eb', home / 'wheels')
    (home / 'train.py').write_text("""
import json, os
print(json.dumps([os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'SLURMD_NODENAME', 'SLINGTORCH_CUDA_VERSION')]))
""")
    block = readme.supercomputer()['slurm']
    assert [line.split()[0] for line in block.splitlines()] == ['eval', 'eb', 'module', 'srun']
    done = typed(block, home, lmod, env={**env, 'SLURM_CONF': slurm.env['SLURM_CONF'], 'SLINGTORCH_CACHE_ROOT': home})
    assert 'COMPLETED: Installation ended successfully' in done.stdout
    ranks = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    assert ranks == [[str(rank), '8', f'nid00000{1 + rank // 4}', '13.2'] for rank in range(8)]


def test_no_gpu_yet(home, installed_pytorch, lmod, slurm):
    """PyTorch is really installed, and of its eight ranks the first of each node meet: all would import for half a minute."""
    prefix = installed_pytorch.modulepath.parents[1]
    (home / 'train.py').write_text("""
import json, os
rank, ranks, node = int(os.environ['RANK']), int(os.environ['WORLD_SIZE']), os.environ['SLURMD_NODENAME']
nodes = None
if os.environ['LOCAL_RANK'] == '0':
    import torch.distributed as dist
    os.environ.update(RANK=str(rank // 4), WORLD_SIZE='2')
    dist.init_process_group('gloo')
    nodes = [None, None]
    dist.all_gather_object(nodes, node)
    dist.destroy_process_group()
os.write(1, (json.dumps([rank, ranks, node, nodes]) + '\\n').encode())
""")
    blocks = readme.supercomputer()
    done = typed(blocks['slurm'].splitlines()[0] + '\n' + blocks['cpu'], home, lmod, env={
        'EASYBUILD_PREFIX': prefix, 'SLURM_CONF': slurm.env['SLURM_CONF'], 'GLOO_SOCKET_IFNAME': 'lo',
        'OMP_NUM_THREADS': '1', 'SLINGTORCH_CACHE_ROOT': home})
    assert 'PyTorch/2.13.0-local-cpu is already installed' in done.stdout
    names = ['nid000001', 'nid000002']
    assert sorted(json.loads(line) for line in done.stdout.splitlines() if re.match(r'\[\d', line)) == [
        [rank, 8, names[rank // 4], None if rank % 4 else names] for rank in range(8)]


def test_first_hour(home, installed_pytorch, lmod, slurm):
    """From the activation to the reader's own script; PyTorch is installed already. The reader writes into the scripts."""
    page = 'docs/first-hour.md'
    (activation, which, install), (example,) = readme.blocks('2.', page), readme.blocks('3.', page)
    for room in ('examples', 'docs'):
        shutil.copytree(ROOT / room, home / 'bundle' / room)
    (home / 'train.py').write_text(TRAIN.replace('NCCL_SOCKET_IFNAME', 'HOME'))
    (home / 'model.pt').write_text('PRECIOUS')
    edited = """
sed -i 's/PyTorch-2.15.0-cuda-13.2.eb$/PyTorch-2.13.0-local-cpu.eb/' venv_build.job
sed -i 's,PyTorch/2.15.0-cuda-13.2,PyTorch/2.13.0-local-cpu,; /gpus-per-node/d; s/^##SBATCH --partition=.*/#SBATCH --partition=gpu/
        s/--ntasks-per-node=4/--ntasks-per-node=1/; s/--output-dir/--epochs 1 --output-dir/' ddp_pytorch.job
"""
    own = """
sed -i 's/ddp_training.py --epochs 1 --output-dir "$name"/train.py/; s/--ntasks-per-node=1/--ntasks-per-node=4/' ddp_pytorch.job
sbatch --wait -o mine.out ddp_pytorch.job
"""
    lines = activation + edited + which + install.replace('2.15.0-cuda-13.2', '2.13.0-local-cpu') + example + own
    lines = lines.replace('$PWD/easybuild', str(installed_pytorch.modulepath.parents[1])).replace('PARTITION', 'gpu')
    done = typed(lines, home, lmod, env={'SLURM_CONF': slurm.env['SLURM_CONF'], 'GLOO_SOCKET_IFNAME': 'lo',
                                         'OMP_NUM_THREADS': '1', 'SLINGTORCH_CACHE_ROOT': home})
    assert 'PyTorch/2.13.0-local-cpu is already installed' in (home / 'build.out').read_text()
    assert ' on 360 test images, 2 ranks' in done.stdout and len(list(home.glob('ddp_pytorch-*/model.pt'))) == 1
    assert (home / 'model.pt').read_text() == 'PRECIOUS'
    ranks = sorted(line.split(',')[:2] for line in (home / 'mine.out').read_text().splitlines() if line.startswith('["'))
    assert ranks == [[f'["{rank}"', ' "8"'] for rank in range(8)]
