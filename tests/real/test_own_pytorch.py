# SPDX-License-Identifier: GPL-2.0-only
"""The PyTorch that a user has (docs/environments.md), with the wheel of slingtorch in it or beside it, on two nodes."""
import shlex
import sys

import pytest

from testbed import clean_environ, forkedtorch, readme, run, smallimage

pytestmark = pytest.mark.real

CODE = '''
import os, torch, torch.distributed as dist
dist.init_process_group('gloo')
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, b'%d of %d, %s, %s\\n' % (dist.get_rank(), total, torch.__file__.encode(),
                                     os.environ['NCCL_SOCKET_IFNAME'].encode()))
dist.barrier()
os._exit(0)     # gloo of 2.13 may abort at exit (pytorch pull request 179291)
'''


def of_two(output):
    """The (file of torch, NCCL_SOCKET_IFNAME) that two ranks say, each rank once."""
    lines = [line.split(', ') for line in output.splitlines() if ' of 2, ' in line]
    assert sorted(line[0] for line in lines) == [f'{rank} of 2' for rank in range(2)], output
    return {tuple(line[1:]) for line in lines}


@pytest.fixture(scope='module')
def own(installed_pytorch, tmp_path_factory, wheel):
    """A virtual environment with a real PyTorch and train.py beside it, into which slingtorch was installed by pip."""
    directory = tmp_path_factory.mktemp('own')
    run([sys.executable, '-m', 'venv', '--without-pip', directory / 'venv'])
    packages = next((directory / 'venv').glob('lib/python3*/site-packages'))
    pytorch = next(installed_pytorch.root.glob('lib/python3*/site-packages'))
    (packages / 'its.pth').write_text(f'{pytorch}\n')
    run([sys.executable, '-m', 'pip', '--python', directory / 'venv/bin/python', 'install', '--no-deps', '--no-index', wheel],
        env=clean_environ())
    (directory / 'train.py').write_text(CODE)
    return directory


def typed(own, slurm, lines, env=None):
    """Run lines of a shell where the cluster's Slurm is, with a site that has values."""
    script = f'set -e; cd {shlex.quote(str(own))}; export SLINGTORCH_SITE=slurm SLINGTORCH_SITE_GROUPS=ib_nics\n{lines}'
    done = slurm.run('bash', '-c', script, env={'HOME': own, 'GLOO_SOCKET_IFNAME': 'lo', 'PYTHONPATH': None, **(env or {})})
    assert f'bundle {own}/venv/' in done.stderr     # the wheel's, not the checkout
    return done


def test_lines_of_the_readme(own, slurm):
    lines = readme.blocks('With the PyTorch that you have')[0].replace('\\\n', '')
    activate, install, evaluate, train = lines.splitlines()
    assert install == 'pip install ./slingtorch'    # the fixture has done it
    train = train.replace('--ntasks-per-node=4 --gpus-per-node=4', '--ntasks-per-node=1')
    done = typed(own, slurm, '\n'.join([activate.split('  ')[0].replace('myenv', 'venv'), evaluate, train]))
    (torch, interface), = of_two(done.stdout)
    assert interface == 'ib' and '2 ranks' in done.stderr


def test_beside_an_environment(own, slurm, installed_pytorch):
    """slingtorch has an environment of its own, and `python` is another one: as a centre's module."""
    root = installed_pytorch.root
    done = typed(own, slurm, f'''
        PATH={forkedtorch.quick(installed_pytorch).quick.parent}:$PATH
        eval "$(venv/bin/python venv/bin/slingtorch env --values)"
        srun -N2 --ntasks-per-node=1 conda-python-distributed train.py''')
    (torch, interface), = of_two(done.stdout)
    assert torch.startswith(str(root)) and interface == 'ib'


def test_an_image_of_another_project(own, slurm, runtime):
    """It has no runscripts: what the values bind, and put in front in PATH, is enough. Its Python has no PyTorch here."""
    (own / 'ranks.py').write_text('import os, sys\n'
                                  'words = os.environ["RANK"], os.environ["WORLD_SIZE"], sys.executable\n'
                                  'os.write(1, b"%s of %s, %s, %s\\n" % (*map(os.fsencode, words),\n'
                                  '         os.environb[b"NCCL_SOCKET_IFNAME"]))\n')
    done = typed(own, slurm, f'''
        . venv/bin/activate
        eval "$(slingtorch env --values)"
        srun -N2 --ntasks-per-node=1 singularity exec --bind "$PWD" {smallimage.image(runtime)} \\
            conda-python-distributed ranks.py''', env={'PATH': f'{runtime}:{slurm.env["PATH"]}'})
    (python, interface), = of_two(done.stdout)
    assert python.startswith('/usr/bin/python') and interface == 'ib'
