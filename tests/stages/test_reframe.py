# SPDX-License-Identifier: GPL-2.0-only
"""Real ReFrame runs tests/reframe on two emulated nodes: a stage of its own, since ReFrame brings 215 MB."""
import json
import re
import sys

import pytest

import testbed
from testbed import DIR, ROOT, easybuild, images, run

pytestmark = pytest.mark.real

RELEASE = '4.10.4'
CHECKS = ROOT / 'tests/reframe/slingtorch_checks.py'
SAMPLE = ROOT / 'tests/reframe/emulated.py'
SMALL = ['-S', 'BandwidthCheck.bench_options=--max,300K,--factor,8,--seconds,0.01']


@pytest.fixture(scope='module')
def reframe():
    """The command."""
    directory = DIR / f'reframe-{RELEASE}'
    with testbed.locked('reframe'):
        if not (directory / 'bin/reframe').exists():
            run([sys.executable, '-m', 'venv', '--without-pip', directory])
            run([sys.executable, '-m', 'pip', '--python', directory / 'bin/python', 'install', '--quiet',
                 '--disable-pip-version-check', f'reframe-hpc=={RELEASE}'], timeout=600)
    return directory / 'bin/reframe'


@pytest.fixture(scope='module')
def container(lmod, tmp_path_factory):
    """Directory of the module of the image with PyTorch, which is made once and installed like one from elsewhere."""
    directory, image = tmp_path_factory.mktemp('container'), f'{images.EASYCONFIG.stem}.sif'
    (directory / image).symlink_to(images.pytorch(lmod))
    text = images.EASYCONFIG.read_text()
    for name, value in (('sources', [image]), ('checksums', [None])):
        text = re.sub(rf'(?ms)^{name} = \[.*?^\]\n', f'{name} = {value!r}\n', text)
    (directory / images.EASYCONFIG.name).write_text(text + "image_transfer = 'symlink'\n")
    eb = easybuild.EasyBuild(directory / 'eb', lmod)
    eb.env['PATH'] = f'{images.runtime()}:{eb.env["PATH"]}:/usr/sbin'
    eb(directory / images.EASYCONFIG.name)
    return eb.modulepath


@pytest.fixture
def checked(reframe, container, slurm, lmod, installed_pytorch, tmp_path):
    """Run ReFrame: (CompletedProcess, {(environment, check): what is wrong, or None})."""
    def start(settings, *arguments, **env):
        report = tmp_path / 'report.json'
        env = {**slurm.env, **lmod.variables, 'PATH': f'{images.runtime()}:{slurm.env["PATH"]}',
               'MODULEPATH': f'{installed_pytorch.modulepath}:{container}', 'SLINGTORCH_CACHE_ROOT': tmp_path, **env}
        done = run([reframe, '-C', settings, '-c', CHECKS, '--prefix', tmp_path, '--report-file', report,
                    '--keep-stage-files', *SMALL, *arguments, '-r'],
                   env={name: str(value) for name, value in env.items()}, cwd=tmp_path, check=False, timeout=500)
        print(done.stdout, done.stderr)     # shown if the test fails
        cases = json.loads(report.read_text())['runs'][0]['testcases']
        return done, {(case['environ'], case['name'].split(' ')[0]): case['fail_reason'] for case in cases}
    return start


def test_green(checked):
    done, wrong = checked(SAMPLE, '-p', 'pytorch$')
    assert done.returncode == 0
    names = ('ModuleCheck', 'OneRank', 'TrainingCheck', 'BandwidthCheck', 'JobCheck', 'NodesCheck')
    assert wrong == {('pytorch', name): None for name in names}
    assert 'BandwidthCheck: site local has no reference figure for this measurement (2 x 2 ranks)' in done.stdout


def test_green_in_container(checked):
    """What is measured and looked at is no other there than without: left out, for the time."""
    done, wrong = checked(SAMPLE, '-p', 'pytorch_container', '-n', 'ModuleCheck|TrainingCheck')
    assert done.returncode == 0
    names = ('ModuleCheck', 'OneRank', 'TrainingCheck')
    assert wrong == {('pytorch_container', name): None for name in names}


# --- planted faults


SITE = """
[site]
title = a site whose figures nobody reaches
centre = none
url = https://example.org
scheduler = slurm
gpu = none
gpus_per_node = 0
network = any
source = made up

[env NCCL_CROSS_NIC]
value = 1
reason = the module does not set it
source = made up

[reference reached]
operation = broadcast
backend = gloo
nodes = 2
ranks_per_node = 2
size = 256 KiB
bus_bandwidth = 0.000001
tolerance = 0.05
source = made up

[reference not_reached]
operation = all_reduce
backend = gloo
nodes = 2
ranks_per_node = 2
size = 32 KiB
bus_bandwidth = 90000
tolerance = 0.05
source = made up
"""
# without any averaging over the ranks
ALONE = """
import runpy, sys, torch
from torch.nn import parallel

class Alone(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, images):
        return self.module(images)

parallel.DistributedDataParallel = Alone
sys.path.insert(0, '.')
runpy.run_path('ddp_training.py', run_name='__main__')
"""
# of --vet on the second node, which gets a network of its own with nothing in it; of --check with an interface that is
# not there
PYTHON = """#!/bin/bash
if [[ " $* " == *"/lib/job vet "* ]]; then
    export SLINGTORCH_CHECK_SECONDS=4
    [[ $SLURMD_NODENAME != {node} ]] || cut=(unshare -n)
elif [[ " $* " == *"/lib/job check "* ]]; then
    export GLOO_SOCKET_IFNAME=hsn0
fi
exec "${{cut[@]}}" {python} "$@"
"""
SETTINGS = """
partition = site_configuration['systems'][0]['partitions'][0]
partition['extras']['slingtorch'] = {{'site': 'planted'}}
partition['devices'] = [{{'type': 'gpu', 'num_devices': 2}}]
partition['resources'] = [{{'name': '_rfm_gpu', 'options': ['--gpus-per-node={{num_gpus_per_node}}']}}]
site_configuration['environments'][0]['env_vars'] = [['PATH', '{bin}:$PATH']]
"""


def test_red(checked, installed_pytorch, tmp_path):
    testbed.only_root('unshares the network')
    scripts = tmp_path / 'bin'
    scripts.mkdir()
    (scripts / 'python').write_text(PYTHON.format(node=testbed.NODES[1], python=installed_pytorch.python))
    (scripts / 'python').chmod(0o755)
    (tmp_path / 'alone.py').write_text(ALONE)
    (tmp_path / 'sites').mkdir()
    (tmp_path / 'sites/planted.cfg').write_text(SITE)
    settings = tmp_path / 'settings.py'
    settings.write_text(SAMPLE.read_text() + SETTINGS.format(bin=scripts))

    done, wrong = checked(settings, '-p', 'pytorch$', '-S', f'TrainingCheck.program={tmp_path}/alone.py',
                          SLINGTORCH_SITES_PATH=tmp_path / 'sites')
    assert done.returncode != 0
    for name, words in {
        'ModuleCheck': 'NCCL_CROSS_NIC is set on only 0 of 2 nodes',
        'TrainingCheck': 'the last loss is ',
        'BandwidthCheck': 'gloo_all_reduce_32KiB',
        'JobCheck': "red: interface: GLOO_SOCKET_IFNAME=hsn0",
        'NodesCheck': f'Cordon: {testbed.NODES[1]}    fails: it did not answer',
    }.items():
        assert words in wrong.pop(('pytorch', name))
    assert wrong == {('pytorch', 'OneRank'): None}
    # as many ranks as the partition has GPUs, and these GPUs
    script = (tmp_path / 'stage/emulated/gpu/pytorch/BandwidthCheck/rfm_job.sh').read_text()
    assert '--ntasks-per-node=2' in script and '--gpus-per-node=2' in script
