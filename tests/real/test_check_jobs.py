# SPDX-License-Identifier: GPL-2.0-only
"""conda-python-distributed --check with the PyTorch that real `eb` installed, under Slurm on two emulated nodes."""
import json

import pytest

import testbed

pytestmark = pytest.mark.real

EIGHT, FOUR = (('-N2', f'--ntasks-per-node={ranks}') for ranks in (4, 2))
PRINT = ('-c', 'import os; print("training", os.environ["RANK"])')


@pytest.fixture
def job(slurm, installed_pytorch, tmp_path):
    """Run `--check ARGS`: (CompletedProcess, the JSON)."""
    def run(*args, step=FOUR, **env):
        path = tmp_path / 'found.json'
        path.unlink(missing_ok=True)
        env = {**installed_pytorch.env, 'GLOO_SOCKET_IFNAME': 'lo', 'OMP_NUM_THREADS': '1',
               'SLINGTORCH_CACHE_ROOT': tmp_path, 'SLINGTORCH_CHECK_JSON': path,
               'SLINGTORCH_CHECK_SECONDS': '200', **env}
        done = slurm.srun(*step, installed_pytorch.runscripts / 'conda-python-distributed', '--check', *args, env=env,
                          check=False)
        return done, json.loads(path.read_text()) if path.exists() else None
    return run


def of_level(found, level):
    return {entry['name']: (entry['text'], entry['ranks']) for entry in found['findings'] if entry['level'] == level}


def red(found):
    return of_level(found, 'red')


def test_a_sound_job_has_no_red_line_and_trains(job):
    done, found = job(*PRINT, step=EIGHT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split()) == sorted(['training'] * 8 + list('01234567'))
    assert not red(found) and found['ranks'] == list(range(8))
    good = [entry['text'] for entry in found['findings'] if entry['level'] == 'good']
    assert 'an all_reduce of gloo over one rank of each node gave the right result' in good
    assert any(text.startswith('torch 2.13.0') for text in good)
    assert tuple(found['facts']['node']) == testbed.NODES
    assert 'slingtorch check: 8 ranks on 2 nodes' in done.stderr


def test_planted_faults_are_named_and_nothing_is_trained(job):
    done, found = job(*PRINT, FI_CXI_RDV_PROTO='alt_read', NCCL_NET_GDR_LEVEL='PBH', GLOO_SOCKET_IFNAME='hsn0',
                      NCCL_NET='OFI', FI_CXI_DEFAULT_TX_SIZE='131072')
    assert done.returncode != 0 and 'training' not in done.stdout
    # without GPUs nobody needs NCCL's plugin, and no library was asked about the variables
    assert set(red(found)) == {'interface'}, 'that gloo does not find it is the same fault'
    assert {'variable', 'value', 'plugin'} <= set(of_level(found, 'yellow'))
    assert all(ranks == list(range(4)) for level in ('red', 'yellow') for _, ranks in of_level(found, level).values())


def test_a_job_with_a_spare_starts_on_the_good_node(slurm, installed_pytorch, tmp_path):
    """Gloo does not start on the second one. That a node which does not answer is bad as well: test_vet_jobs.py."""
    python = tmp_path / 'bin/python'
    python.parent.mkdir()
    python.write_text(f'#!/bin/bash\n[[ $SLURMD_NODENAME != {testbed.NODES[1]} ]] || export GLOO_SOCKET_IFNAME=hsn0\n'
                      f'exec {installed_pytorch.python} "$@"\n')
    python.chmod(0o755)
    script = ('#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2\n$RUNSCRIPTS/with-spares 1 srun '
              'bash -c \'echo "runs on $SLURMD_NODENAME"\'\n')
    batch = slurm.sbatch(script, env={**installed_pytorch.env, 'PATH': f'{python.parent}:{installed_pytorch.env["PATH"]}',
                                      'GLOO_SOCKET_IFNAME': 'lo', 'OMP_NUM_THREADS': '1',
                                      'SLINGTORCH_VET_DIR': tmp_path, 'SLINGTORCH_CACHE_ROOT': tmp_path})
    assert batch.returncode == 0, batch.output
    assert f'Cordon: {testbed.NODES[1]}    fails: gloo does not start' in batch.output
    assert batch.output.count(f'runs on {testbed.NODES[0]}') == 2 and f'runs on {testbed.NODES[1]}' not in batch.output
