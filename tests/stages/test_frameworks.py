# SPDX-License-Identifier: GPL-2.0-only
"""docs/training.md: its programs and its lines of srun, as they stand there, on two nodes, with the real frameworks.

A stage of its own: downloads and starts of the frameworks take long. They are installed once for each list.
"""
import hashlib
import re
import shutil

import pytest

import testbed
from testbed import ROOT, clean_environ, parse_env0, readme, run

FRAMEWORKS = ('accelerate==1.15.0', 'ipykernel==7.4.0', 'lightning==2.6.6', 'ray[default,train]==2.60.0', 'transformers==5.23.0')
PAGE = (ROOT / 'docs/training.md').read_text()


@pytest.fixture(scope='module')
def frameworks(installed_pytorch, lmod, tmp_path_factory):
    """Environment (dictionary) of a shell that has activated a user's environment with the frameworks."""
    home = testbed.DIR / 'frameworks'
    venv = home / hashlib.sha256(f'{FRAMEWORKS}{installed_pytorch.root}{installed_pytorch.python.resolve()}'.encode()).hexdigest()[:12]
    with testbed.locked('frameworks'):
        for earlier in home.glob('*'):
            if earlier != venv:
                shutil.rmtree(earlier)
        if not (venv / 'whole').exists():
            shutil.rmtree(venv, ignore_errors=True)
            lmod.bash(f'set -e\nmodule load {installed_pytorch.module}\npython -m venv --system-site-packages --without-pip {venv}\n'
                      f'extend-venv-activate {venv}', modulepath=[installed_pytorch.modulepath])
            torch = run([installed_pytorch.python, '-c', 'import torch; print(torch.__version__)']).stdout.strip()
            pip = [installed_pytorch.python, '-m', 'pip', '--python', venv / 'bin/python']
            run([*pip, 'install', '--quiet', *FRAMEWORKS, f'torch=={torch}'], timeout=900)    # which stays as it is
            (venv / 'whole').touch()
    done = lmod.bash(f'set -e\nsource {venv}/bin/activate\nenv -0')
    return {**parse_env0(done.stdout), 'GLOO_SOCKET_IFNAME': 'lo',
            'OMP_NUM_THREADS': '1', 'SLINGTORCH_CACHE_ROOT': str(tmp_path_factory.mktemp('caches')),
            'PYTHONPATH': str(quick_end(tmp_path_factory.mktemp('end')))}


def quick_end(directory):
    """PYTHONPATH by which programs end before the destructors of torch's objects, in which gloo hangs now and then."""
    (directory / 'sitecustomize.py').write_text('''
import atexit, os, sys


def end():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(hasattr(sys, 'last_value'))


atexit.register(end)
''')
    return directory


@pytest.fixture
def start(frameworks, slurm, tmp_path):
    """A function: run the lines of the page that start this program, or other lines; what the ranks print."""
    def started(framework, command=None):
        name = f'{framework}_program.py'
        program = re.search(rf'^```python\n# {name}\n(.*?)^```\n', PAGE, re.M | re.S).group(1)
        (tmp_path / name).write_text(program)
        after = PAGE.partition(f'# {name}\n')[2].partition('After')[2]
        block = re.search(r'(?:^    \S.*\n)+', after, re.M).group(0)
        env = slurm.environ({key: value for key, value in frameworks.items() if not key.startswith('SLURM')})
        done = run(['bash', '-ec', command or block], env=env, cwd=tmp_path, timeout=400)
        ranks = sorted(re.findall(r'^rank \d+ of \d+: .*$', done.stdout, re.M))
        assert ranks, done.stdout + done.stderr
        return ranks
    return started


@pytest.mark.parametrize('framework, steps', [('lightning', 16), ('accelerate', 8), ('trainer', 24)])
def test_four_ranks(start, framework, steps):
    assert start(framework) == [f'rank {rank} of 4: {steps} steps' for rank in range(4)]


def test_accelerate_by_srun_alone(start):
    """What the page warns of."""
    assert start('accelerate', 'srun -N2 --ntasks-per-node=2 python accelerate_program.py') == ['rank 0 of 1: 32 steps'] * 4


def test_ray_by_its_job_script(frameworks, separate_nodes):
    """examples/slurm/ray.job: a worker on each node, with the caches of the runscript."""
    where = separate_nodes.shared / 'ray'
    where.mkdir()
    shutil.copy(ROOT / 'examples/training/ray_training.py', where)
    job = (ROOT / 'examples/slurm/ray.job').read_text().replace('source myenv/bin/activate', ':')
    # colours come between its words; a Ray that starts slowly is none that failed
    env = {**frameworks, 'PYTHONPATH': None, 'SLINGTORCH_CACHE_ROOT': None, 'HOME': where, 'GLOO_SOCKET_IFNAME': 'eth0', 'NO_COLOR': '1'}
    done = separate_nodes.sbatch(job, env=env, cwd=where, timeout=400)
    found = set(re.findall(r'rank (\d) of 2 on (\w+): loss 0\.0\d+, compiled kernels in \S+-(\w+)/triton', done.output))
    assert done.returncode == 0 and {rank for rank, *_ in found} == {'0', '1'}, done.output
    assert {node for _, node, _ in found} == set(separate_nodes.nodes) and all(node == cache for _, node, cache in found)


def test_a_notebook_has_the_environment(frameworks, tmp_path):
    """The kernel of docs/environments.md, which Jupyter's own client starts as a user whose shell knows no module."""
    lines = next(block for block in readme.blocks('A notebook', 'docs/environments.md') if 'kernel.json' in block)
    lines, count = re.subn('module use .*\nmodule load .*', f"source {frameworks['VIRTUAL_ENV']}/bin/activate", lines)
    env = {**clean_environ(), 'HOME': tmp_path, 'PATH': '/usr/bin:/bin'}
    run(['bash', '-ec', lines], env=env)
    code = 'import os, torch; print(torch.__file__, os.environ["RUNSCRIPTS"])'
    client = (f'from jupyter_client.manager import start_new_kernel\nkernel, client = start_new_kernel(240, "mymodel")\n'
              f'client.execute_interactive({code!r}, timeout=240)\nkernel.shutdown_kernel(now=True)\n')
    done = run([f"{frameworks['VIRTUAL_ENV']}/bin/python", '-c', client], env=env, cwd=tmp_path)
    torch, runscripts = done.stdout.split()
    assert count and torch.startswith(frameworks['EBROOTPYTORCH']) and runscripts == frameworks['RUNSCRIPTS']
