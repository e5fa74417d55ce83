# SPDX-License-Identifier: GPL-2.0-only
"""Which easyconfig fits GPUs and driver, on machines of files; and that each fact about drivers has one home."""
import re
import shutil
import subprocess
import types
from pathlib import Path

import pytest

from slingtorch import cli, gpus

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / 'runscripts/lib/drivers.cfg'
NEWEST, OLDER, ROCM = ['PyTorch-%s.eb' % name for name in ['2.15.0-cuda-13.2', '2.10.0-cuda-12.8', '2.10.0-rocm-7.1']]
CLOSED = 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  %s  Wed Jul 14 19:13:55 UTC 2021\nGCC version: 12\n'
OPEN = 'NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  %s  Release Build  (dvs)\nGCC version: 12\n'


@pytest.fixture
def machine(tmp_path):
    """Function that makes the files of a machine: drivers and GPUs."""

    def make(driver=None, models=(), form=CLOSED, simd=None, amdgpu=None):
        texts = {'proc/driver/nvidia/version': form % driver if driver else None,
                 'sys/module/amdgpu/version': amdgpu and amdgpu + '\n'}
        for number, model in enumerate(models):
            texts['proc/driver/nvidia/gpus/0000:%02d:00.0/information' % number] = (
                'Model: \t\t %s\nIRQ:   \t\t 0\nGPU UUID: \t GPU-1\n' % model)
        for number, count in enumerate([0, simd] if simd is not None else []):
            texts['sys/class/kfd/kfd/topology/nodes/%d/properties' % number] = 'cpu_cores 8\nsimd_count %d\n' % count
        for name, text in texts.items():
            if text:
                path = tmp_path / 'machine' / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        return str(tmp_path / 'machine')

    return make


@pytest.mark.parametrize('driver,models,uname,name,reason', [
    ('580.65.06', ['NVIDIA H100 80GB HBM3'], 'x86_64', NEWEST, 'driver 580.65.06'),
    ('590.44.01', ['NVIDIA A100-SXM4-40GB'] * 4, 'x86_64', NEWEST, 'driver 590.44.01'),
    ('550.90.07', ['NVIDIA A100-SXM4-40GB'], 'x86_64', OLDER, 'driver 550.90.07'),
    ('525.60.13', [], 'x86_64', OLDER, 'driver 525.60.13'),
    ('515.65.01', ['Tesla T4'], 'x86_64', None, 'driver 515.65.01 is too old for every wheel: the oldest on x86_64 '
     'needs driver 525. Ask the centre for a newer driver'),
    # what CUDA 13 has no code for
    ('580.65.06', ['Tesla V100-SXM2-32GB'], 'x86_64', OLDER,
     'driver 580.65.06, and %s has no code for Tesla V100-SXM2-32GB' % NEWEST),
    ('580.65.06', ['NVIDIA A100-PCIE-40GB', 'Quadro GV100'], 'x86_64', OLDER,
     'driver 580.65.06, and %s has no code for Quadro GV100' % NEWEST),
    ('580.65.06', ['Tesla P100-PCIE-16GB'], 'x86_64', None, 'Tesla P100-PCIE-16GB is too old for every wheel that '
     'driver 580.65.06 runs (compute capability 6.0)'),
    # GH200: the index has no wheel of 2.10.0 with CUDA for it
    ('580.65.06', ['NVIDIA GH200 480GB'], 'aarch64', NEWEST, 'driver 580.65.06'),
    ('550.90.07', ['NVIDIA GH200 480GB'], 'aarch64', None, 'driver 550.90.07 is too old for every wheel: the oldest on '
     'aarch64 needs driver 580. Ask the centre for a newer driver'),
    ('580.65.06', [], 'ppc64le', None, 'there is no wheel with CUDA for ppc64le'),
])
def test_nvidia(driver, models, uname, name, reason, machine):
    root = machine(driver, models, OPEN if uname == 'aarch64' else CLOSED)
    assert gpus.fitting_easyconfig(root, machine=uname) == (name, reason)


def test_driver_that_says_no_version(machine):
    name, reason = gpus.fitting_easyconfig(machine(None, ['NVIDIA H100 80GB HBM3']), machine='x86_64')
    assert name is None and '/proc/driver/nvidia/version' in reason


@pytest.mark.parametrize('simd,version,expected', [
    (440, '6.12.12', (ROCM, 'amdgpu 6.12.12')),
    (440, None, (ROCM, 'amdgpu')),
    # the chip of a server's board, or a driver without a GPU
    (0, '6.12.12', (None, "no driver of NVIDIA's or AMD's GPUs is loaded")),
])
def test_amd(simd, version, expected, machine):
    assert gpus.fitting_easyconfig(machine(simd=simd, amdgpu=version), machine='x86_64') == expected


def test_amd_on_a_processor_without_wheels(machine):
    found = gpus.fitting_easyconfig(machine(simd=440), machine='aarch64')
    assert found == (None, 'there is no wheel with ROCm for aarch64')


@pytest.mark.parametrize('driver,site_gpu,name,reason', [
    ('580.65.06', None, NEWEST, 'driver 580.65.06; for the other GPUs here, amdgpu: %s' % ROCM),
    ('580.65.06', 'rocm', ROCM, 'amdgpu; for the other GPUs here, driver 580.65.06: %s' % NEWEST),
    ('470.57.02', 'cuda', ROCM, 'amdgpu; for the other GPUs here: none, driver 470.57.02 is too old for every wheel: '
     'the oldest on x86_64 needs driver 525. Ask the centre for a newer driver'),
])
def test_both(driver, site_gpu, name, reason, machine):
    found = gpus.fitting_easyconfig(machine(driver, simd=440), machine='x86_64', site_gpu=site_gpu)
    assert found == (name, reason)


@pytest.mark.parametrize('site_gpu,uname,name,reason', [
    ('cuda', 'x86_64', NEWEST, 'no driver is loaded to compare with; it needs driver 580, %s 525' % OLDER),
    ('cuda', 'aarch64', NEWEST, 'no driver is loaded to compare with; it needs driver 580'),
    ('rocm', 'x86_64', ROCM, 'no driver is loaded to compare with'),
    ('none', 'x86_64', None, "no driver of NVIDIA's or AMD's GPUs is loaded"),
    (None, 'x86_64', None, "no driver of NVIDIA's or AMD's GPUs is loaded"),
])
def test_login_node(site_gpu, uname, name, reason, machine):
    assert gpus.fitting_easyconfig(machine(), machine=uname, site_gpu=site_gpu) == (name, reason)


def test_other_easyconfigs(machine, tmp_path):
    """A directory of a centre's own; what is for one site is not a wheel for any cluster."""
    directory = tmp_path / 'mine/p/PyTorch'
    directory.mkdir(parents=True)
    source = ROOT / 'easyconfigs/p/PyTorch'
    shutil.copy(source / OLDER, directory)
    for name in ['PyTorch-2.13.0-local-cpu.eb', 'PyTorch-2.14.0-cuda-12.6-singularity-dockerhub.eb']:
        shutil.copy(source / name, directory)
    none = 'there is no wheel with ROCm for x86_64'
    assert gpus.fitting_easyconfig(machine(simd=440), str(tmp_path / 'mine'), 'x86_64') == (None, none)
    assert gpus.fitting_easyconfig(machine('580.65.06'), str(tmp_path / 'mine'), 'x86_64') == (
        OLDER, 'driver 580.65.06; for the other GPUs here: none, ' + none)


@pytest.mark.parametrize('model,expected', [
    ('Tesla V100S-PCIE-32GB', (7, 0)), ('NVIDIA TITAN V', (7, 0)), ('Tesla P40', (6, 0)), ('Quadro P6000', (6, 0)),
    ('NVIDIA GeForce GTX 1080 Ti', (6, 0)), ('Tesla M60', (5, 0)), ('GeForce GTX 980', (5, 0)), ('Tesla K40m', (3, 0)),
    ('NVIDIA TITAN X (Pascal)', (6, 0)), ('GeForce GTX 1050', (6, 0)), ('Quadro M6000 24GB', (5, 0)), ('GeForce GTX 750 Ti', (5, 0)),
    ('GeForce GTX 1060', (6, 0)), ('Quadro K2200', (3, 0)), ('Tesla K20c', (3, 0)), ('Tesla K80', (3, 0)), ('Tesla T4', None), ('NVIDIA GeForce GTX 1650', None), ('NVIDIA A100-SXM4-40GB', None),
    ('NVIDIA RTX PRO 6000 Blackwell', None), ('NVIDIA GB200', None), ('NVIDIA L40S', None), ('Quadro RTX 6000', None),
    ('NVIDIA H200', None), ('NVIDIA RTX A4000', None), ('NVIDIA B200', None), ('NVIDIA GH200 480GB', None),
])
def test_models_older_than_turing(model, expected):
    assert gpus.capability(model) == expected


# -------------------------------------------------------------------------------------------------- slingtorch env

@pytest.mark.parametrize('files,gpu,network,line', [
    ({'driver': '550.90.07'}, 'any', 'any', 'PyTorch for the GPUs here: eb %s   (driver 550.90.07)' % OLDER),
    ({'driver': '550.90.07'}, 'none', 'any', 'PyTorch for the GPUs here: eb %s   (driver 550.90.07)' % OLDER),
    ({'driver': '470.57.02'}, 'any', 'any', 'no easyconfig with a PyTorch wheel fits the GPUs of this machine: driver '
     '470.57.02 is too old for every wheel: the oldest on x86_64 needs driver 525. Ask the centre for a newer driver'),
    # a login node: the site says what the others have
    ({}, 'cuda', 'infiniband', 'PyTorch for the GPUs here: eb %s   (no driver is loaded to compare with; it needs '
     'driver 580, %s 525)' % (NEWEST, OLDER)),
    ({}, 'any', 'any', None),
    ({}, 'none', 'any', None),
    # what is not known to have a plugin for the network
    ({'driver': '580.65.06'}, 'cuda', 'slingshot11', None),
])
def test_line_of_env(files, gpu, network, line, machine, monkeypatch):
    monkeypatch.setattr('os.uname', lambda: types.SimpleNamespace(machine='x86_64'))
    site = types.SimpleNamespace(gpu=gpu, network=network, plugin_toolkit=lambda: None)
    assert cli.gpu_note(site, machine(**files)) == line


@pytest.mark.parametrize('cuda, line', [
    ('12.9.0', 'PyTorch for the GPUs here: eb --robot %s   (driver 580.65.06)' % OLDER),
    ('11.8.0', 'no easyconfig with a PyTorch wheel fits the GPUs of this machine: there is no wheel with CUDA for x86_64')])
def test_line_of_env_with_a_plugin(cuda, line, machine, monkeypatch):
    """The wheel for the CUDA that the plugin of the network is built with; Derecho has easyconfigs of its own."""
    monkeypatch.setattr('os.uname', lambda: types.SimpleNamespace(machine='x86_64'))
    sites = cli.sites
    site = sites.load('derecho', {})
    assert cli.gpu_note(site, machine(driver='580.65.06')) is None
    site.name = 'other'
    site.generations = {'x': {'gpu': 'cuda/%s' % cuda, 'nccl_plugin': 'eb aws-ofi-nccl/1.21.1'}}
    assert cli.gpu_note(site, machine(driver='580.65.06')) == line


def test_env_ends_with_it(monkeypatch, capsys):
    monkeypatch.setattr(gpus, 'fitting_easyconfig', lambda root, site_gpu, toolkit: (OLDER, 'driver 550.90.07'))
    monkeypatch.setattr(cli, 'activation', lambda *args: [])
    monkeypatch.delenv('SLINGTORCH_SITE_GROUPS', raising=False)
    line = 'slingtorch: PyTorch for the GPUs here: eb %s   (driver 550.90.07)\n' % OLDER
    for more, last in [([], line), (['--quiet'], '')]:
        assert cli.main(['env', '--site', 'slurm'] + more) == 0
        assert (capsys.readouterr().err.splitlines(True) or [''])[-1] == last
    # who only looks is told how it is used
    monkeypatch.setattr(cli.sys.stdout, 'isatty', lambda: True)
    monkeypatch.setattr(cli.values, 'OwnPyTorch', lambda _: types.SimpleNamespace(what=lambda: 'x'))
    monkeypatch.setattr(cli.values, 'variables', lambda *_: [])
    monkeypatch.setattr(cli.values, 'differences', lambda *_: [])
    for more, command in (([], '"$(slingtorch env)"'), (['--shell', 'tcsh', '--values'], '"`slingtorch env --values --shell csh`"')):
        cli.main(['env', '--site', 'slurm'] + more)
        assert capsys.readouterr().err.splitlines()[1:-1] == [
            f'slingtorch: your shell has not changed; to activate the bundle in it: eval {command}']


# ------------------------------------------------------------------------------------------------ one home for drivers

def rows():
    return [line.split() for line in TABLE.read_text().splitlines() if not line.startswith('#')]


def test_table_names_the_newest_easyconfig_of_each_cuda():
    expected = {}
    for wheel in reversed([wheel for wheel in gpus.wheels() if wheel.kind == 'cuda']):
        expected[str(wheel.toolkit[0])] = [wheel.name, ','.join(wheel.machines)]
    assert {row[0]: row[2:] for row in rows()} == {**{row[0]: ['-', '-'] for row in rows()}, **expected}
    assert [list(map(int, row[:2])) for row in rows()] == sorted(list(map(int, row[:2])) for row in rows())


def test_oldest_drivers_are_written_nowhere_else():
    """What repeats them says the same, and no program has them of its own."""
    oldest = gpus.oldest_drivers()
    said = re.compile(r'(?:CUDA (\d+)\D{0,20}?)?\bdrivers?\b(?: of NVIDIA)?(?: from)? (%s)\b|\bCUDA (\d+) (%s)\b' % (
        ('|'.join(map(str, oldest.values())),) * 2))
    found = {}
    files = subprocess.run(['git', 'ls-files', 'runscripts', 'slingtorch', 'hooks', 'easyblocks', 'docs', 'README.md',
                            'quickstart', 'examples'], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode()
    for name in files.split():
        path = ROOT / name
        if path.suffix in ('.pyc', '.lock') or path == TABLE or path.is_dir():    # a link
            continue
        for match in said.finditer(path.read_text(errors='replace')):
            found.setdefault(name, []).append(match.group())
            cuda, driver = match.group(1) or match.group(3), int(match.group(2) or match.group(4))
            assert driver in oldest.values() and (not cuda or oldest[int(cuda)] == driver), (name, match.group())
    assert not [name for name in found if name.endswith(('.py', '.bash'))], found
    # the sentence of slingtorch explain has all of them
    text = (ROOT / 'slingtorch/explain/faults.txt').read_text()
    sentence = ', '.join('CUDA %d %s%d' % (cuda, 'needs driver ' if cuda == min(oldest) else '', driver)
                         for cuda, driver in sorted(oldest.items()))
    assert sentence + ' or newer' in text
