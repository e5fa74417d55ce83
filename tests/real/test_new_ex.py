# SPDX-License-Identifier: GPL-2.0-only
"""A Cray EX that slingtorch does not know: from `site new` to a training, with the plugin for its libfabric."""
import json
import os
import pathlib
import re
import shutil

import pytest

from testbed import ROOT, newex, parse_env0, run
from testbed.easybuild import BIN

pytestmark = pytest.mark.real

TRAIN = pathlib.Path(__file__).with_name('light_training.py')
NAME = 'PyTorch-2.10.0-cuda-12.8'


@pytest.fixture
def machine(tmp_path, slurm, lmod):
    """The machine, and the environment of a user after login."""
    tree = newex.NewEX(tmp_path / 'machine')
    env = {**lmod.variables, **slurm.env, **tree.env, 'HOME': str(tmp_path), 'OMP_NUM_THREADS': '1',
           'EASYBUILD_PREFIX': str(tmp_path / 'eb'), 'EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES': '1',
           'EASYBUILD_IGNORE_CHECKSUMS': '1'}
    env['PATH'] = f'{tree.libfabric}/bin:{BIN}:{os.environ["PATH"]}'
    del env['SLURM_CONF']   # slurm.srun has its own
    env.pop('XDG_CONFIG_HOME', None)
    return tree, env


def test_from_nothing_to_a_training_on_two_nodes(machine, slurm, lmod, installed_pytorch, tmp_path):
    tree, env = machine
    login = run(['slingtorch', 'site', 'new', 'newex'], env=slurm.environ(env)).stdout
    node = {**env, 'PATH': f'{tree.commands}:{env["PATH"]}'}
    *_, options = re.findall('srun (.*) slingtorch site new --complete newex', login)
    done = slurm.srun('-N1', '-n1', 'slingtorch', 'site', 'new', '--complete', 'newex', env=node).stdout
    path = tmp_path / '.config/slingtorch/sites/newex.cfg'
    text = path.read_text()
    assert 'include = slingshot11' in text and options and 'Added to' in done
    pe = tree.path / 'opt/cray/pe'
    section = text[text.index('[provides cuda-12.9.0]'):].split('\n\n')[0]
    assert re.findall(r'^(\w+) = (.*)', section, re.M)[:-1] == [
        ('compiler', 'build PrgEnv-gnu/8.6.0'), ('mpi', f'cray-mpich/8.1.31 in {pe}/mpich/8.1.31/ofi/gnu/12.3'),
        ('gpu', f'cuda/12.9.0 in {tree.path}/opt/cuda/12.9.0'), ('libfabric', f'libfabric/1.22.0 in {tree.libfabric}'),
        ('python', f'cray-python/3.11.7 in {pe}/python/3.11.7'),
        ('nccl_plugin', 'eb aws-ofi-nccl/1.21.1')]
    assert 'cuda/12.9.0: the newest of 2\n' in text and 'libfabric/1.22.0: it is loaded' in text

    easyconfig = tmp_path / f'{NAME}.eb'
    for suffix in ('.eb', '.lock'):
        shutil.copy(ROOT / f'easyconfigs/p/PyTorch/{NAME}{suffix}', tmp_path)
    packages, = installed_pytorch.root.glob('lib/python3*/site-packages')
    pip = newex.real_torch(easyconfig, tmp_path / 'wheels', packages)
    newex.plugin_source(tmp_path / 'eb/sources')
    script = f'''
        eval "$(slingtorch env)" && eb --robot {easyconfig} >&2 && module load {NAME.replace("-", "/", 1)} && env -0'''
    done = lmod.bash(script, modulepath=[tree.modulepath], env={**slurm.environ(env), **pip}, cwd=tmp_path)
    assert f'PyTorch for the GPUs here: eb --robot {NAME}.eb' in done.stderr
    loaded = parse_env0(done.stdout)
    plugin = tmp_path / 'eb/software/aws-ofi-nccl/1.21.1'
    assert f'--with-libfabric={tree.libfabric}' in (plugin / 'arguments').read_text()
    assert loaded['NCCL_NET_PLUGIN'].startswith(f'{plugin}/lib/') and loaded['SLINGTORCH_SITE'] == 'newex'
    assert {'cuda/12.9.0', 'libfabric/1.22.0', 'aws-ofi-nccl/1.21.1'} <= set(loaded['LOADEDMODULES'].split(':'))

    slurm.srun('-N2', '--ntasks-per-node=1', loaded['RUNSCRIPTS'] + '/conda-python-distributed', TRAIN, tmp_path / 'results.json',
               env={**loaded, 'GLOO_SOCKET_IFNAME': 'lo'})
    assert json.loads((tmp_path / 'results.json').read_text())['world_size'] == 2
