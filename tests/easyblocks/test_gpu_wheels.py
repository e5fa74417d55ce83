# SPDX-License-Identifier: GPL-2.0-only
"""The easyconfigs of PyTorch's GPU wheels for any cluster: what their lock files say, and what eb makes of them."""
import ast
import re

import pytest

from slingtorch import gpus
from testbed import ROOT

DIRECTORY = ROOT / 'easyconfigs/p/PyTorch'
PYTHONS = ['3.11', '3.12', '3.13', '3.14']
X86, ARM = 'manylinux_2_28_x86_64', 'manylinux_2_28_aarch64'
# name: torch, CUDA's package and its version, NCCL, Pythons, platforms, as the wheels' metadata on the index say
EXPECTED = {
    'PyTorch-2.15.0-cuda-13.2': ('2.15.0', 'nvidia-cuda-runtime', '13.2', '2.30.7', PYTHONS, [X86, ARM]),
    'PyTorch-2.13.0-cuda-13.0': ('2.13.0', 'nvidia-cuda-runtime', '13.0', '2.29.7', PYTHONS, [X86, ARM]),
    'PyTorch-2.10.0-cuda-12.8': ('2.10.0', 'nvidia-cuda-runtime-cu12', '12.8', '2.27.5', PYTHONS, [X86]),
    'PyTorch-2.10.0-rocm-7.1': ('2.10.0+rocm7.1', None, None, None, ['3.12'], [X86]),
}
# sha256 of the wheel that pip chose of the package index on 2026-11-23: Python 3.11, x86_64, then aarch64
OF_THE_INDEX = {
    'PyTorch-2.15.0-cuda-13.2': ['48c2d861134c0b5697c7602cb5ffa68f62a2989fdcd1717e593356f67996ca1e',
                                 '58ce2ebfb3430941353109a85be63ee8e941da22f13daa2c43344eeb51c81e06'],
    'PyTorch-2.13.0-cuda-13.0': ['60fcdcb2f3876e21146cb4524ef06397d727ca9ad5f020818547e25075fe3cb7',
                                 '092790c696a760c729fd5722835f50b9d81fd7c8f141571f3f3cf4081a8f664c'],
    'PyTorch-2.10.0-cuda-12.8': ['ac5bdcbb074384c66fa160c15b1ead77839e3fe7ed117d667249afce0acabfac'],
}


def locked(name):
    """{package: [(version, marker, hashes)]} of a lock file, and the values of its head."""
    text = (DIRECTORY / f'{name}.lock').read_text()
    head = {key: re.findall(f'^# {key}: (.*)$', text, re.M) for key in ['python', 'platform', 'wanted']}
    packages = {}
    for line in re.sub('^#.*\n', '', text, flags=re.M).replace('\\\n', '').splitlines():
        found = re.match(r'([a-z][\w.-]*)==(\S+)(?: ; (.*?))?\s+--hash', line)
        if found:
            hashes = re.findall('--hash=sha256:([0-9a-f]{64})(?= |$)', line)
            packages.setdefault(found.group(1), []).append((found.group(2), found.group(3) or '', hashes))
        else:
            assert not line or line == '--only-binary :all:' or line.startswith('--extra-index-url https://'), line
    return packages, head


def test_all_of_them_are_here():
    assert sorted(EXPECTED) == sorted(wheel.name[:-3] for wheel in gpus.wheels())


@pytest.mark.parametrize('name', EXPECTED)
def test_lock_file(name):
    torch, runtime, cuda, nccl, pythons, platforms = EXPECTED[name]
    packages, head = locked(name)
    assert all(hashes for entries in packages.values() for _, _, hashes in entries)
    assert head['python'] == [' '.join(pythons)] and head['platform'] == [' '.join(platforms)]
    assert [version for version, _, _ in packages['torch']] == [torch]
    found = {key.split('-')[1]: entries for key, entries in packages.items() if key.startswith('nvidia-nccl-cu')}
    assert [version for entries in found.values() for version, _, _ in entries] == ([nccl] if nccl else [])
    if cuda:
        assert [version.startswith(cuda) for version, _, _ in packages[runtime]] == [True]
        assert set(OF_THE_INDEX[name]) < set(packages['torch'][0][2])
        # for all processors and Pythons of the head
        assert {packages[key][0][1] for key in ['torch', 'torchvision', 'triton', runtime]} == {''}
    # a wheel of the machine at hand, such as one for processors alone, would have a local version
    assert not [key for key, entries in packages.items() if cuda and '+' in entries[0][0]]


@pytest.mark.parametrize('name', EXPECTED)
def test_name_says_what_is_in_it(name):
    text = (DIRECTORY / f'{name}.eb').read_text()
    values = {node.targets[0].id: node.value for node in ast.parse(text).body if isinstance(node, ast.Assign)}
    packages, _ = locked(name)
    assert name == 'PyTorch-%s%s' % (ast.literal_eval(values['version']), ast.literal_eval(values['versionsuffix']))
    # the sanity check compares what is pinned there
    version = ast.literal_eval(values['version'])
    pinned = dict(word.replace('%(version)s', version).split('==')
                  for word in ast.literal_eval(values['python_packages']) if '==' in word)
    assert {key: pinned[key] for key in ['torch', 'torchvision']} == {
        key: packages[key][0][0] for key in ['torch', 'torchvision']}
    imports = set(ast.literal_eval(values['sanity_check_imports']))
    assert {'torch', 'torchvision', 'torch.distributed', 'numpy'} <= imports


@pytest.mark.parametrize('name', EXPECTED)
def test_no_index_host_but_pytorchs(name):
    for suffix in ['eb', 'lock']:
        text = (DIRECTORY / f'{name}.{suffix}').read_text()
        hosts = set(re.findall(r'https?://([^/\s\'"]+)', text)) - {'pytorch.org'}
        assert hosts <= ({'download.pytorch.org'} if 'rocm' in name else set())


def test_eb_finds_them_by_name(eb_env):
    """From any directory; nothing is downloaded for that."""
    done = eb_env('-D', *[f'{name}.eb' for name in EXPECTED])
    for name in EXPECTED:
        assert re.search(r'\[ \] .*/%s\.eb \(module: %s\)' % (re.escape(name), re.escape(name.replace('-', '/', 1))),
                         done.stdout), done.stdout
