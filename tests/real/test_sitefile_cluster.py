# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch site new on the emulated cluster: from an account to a module with the site's values and a training."""
import json
import os
import pathlib
import re

import pytest

from testbed import parse_env0, run
from testbed.easybuild import BIN

pytestmark = pytest.mark.real

TRAIN = pathlib.Path(__file__).with_name('light_training.py')


def test_from_login_node_to_training(slurm, lmod, installed_pytorch, tmp_path):
    env = {**slurm.env, **lmod.variables, 'HOME': str(tmp_path), 'GLOO_SOCKET_IFNAME': 'lo',
           'PATH': f'{BIN}:{os.environ["PATH"]}', 'EASYBUILD_PREFIX': str(tmp_path / 'eb'), 'OMP_NUM_THREADS': '1',
           'EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES': '1'}
    del env['SLURM_CONF']   # slurm.srun has its own
    env.pop('XDG_CONFIG_HOME', None)
    login = run(['slingtorch', 'site', 'new', 'here'], env=slurm.environ(env)).stdout
    path = tmp_path / '.config/slingtorch/sites/here.cfg'
    assert f'Written: {path}' in login and 'sinfo shows 4 GPUs per node, but not the vendor: ' in login
    *_, options = re.findall('srun (.*) slingtorch site new --complete here', login)
    assert options == '--nodes=1 --ntasks=1 --partition=gpu --gres=gpu:4'
    path.write_text(path.read_text().replace('gpu = any', 'gpu = cuda  ').replace('node = any', 'node = 4'))
    # two tasks by mistake: the first one does it
    node = slurm.srun('-N2', '--ntasks-per-node=1', 'slingtorch', 'site', 'new', '--complete', 'here', env=env).stdout
    assert node.count('Added to') == 1 and 'network = ' in node and 'This compute node is nid00000' in node
    text = path.read_text()
    assert 'gpu = cuda' in text and 'gpus_per_node = 4' in text and 'network = any' not in text

    # the software is there, as links; EasyBuild refuses a link in what it adds to a search path (bin, share/man)
    software = tmp_path / 'eb/software/PyTorch/2.13.0-local-cpu'
    software.mkdir(parents=True)
    for entry in installed_pytorch.root.iterdir():
        if entry.name == 'bin':
            (software / 'bin').mkdir()
            for program in entry.iterdir():
                (software / 'bin' / program.name).symlink_to(program)
        elif entry.name not in ('easybuild', 'share'):
            (software / entry.name).symlink_to(entry)
    script = '''
        eval "$(slingtorch env)" && eb --module-only --force PyTorch-2.13.0-local-cpu.eb >&2 &&
        module load PyTorch/2.13.0-local-cpu && env -0'''
    done = lmod.bash(script, env=slurm.environ(env), cwd=tmp_path)
    loaded = parse_env0(done.stdout)
    assert loaded['SLINGTORCH_SITE'] == 'here'
    slurm.srun('-N2', '--ntasks-per-node=1', loaded['RUNSCRIPTS'] + '/conda-python-distributed', TRAIN, tmp_path / 'results.json',
               env=loaded)
    assert json.loads((tmp_path / 'results.json').read_text())['world_size'] == 2
