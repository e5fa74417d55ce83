# SPDX-License-Identifier: GPL-2.0-only
"""Hashes of the easyconfigs: those of wheels that are no package index's, and what has none."""
import ast
import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EASYCONFIGS = sorted((ROOT / 'easyconfigs').rglob('*.eb'))
LOCK_FILES = sorted((ROOT / 'easyconfigs').rglob('*.lock'))
# sha256 of the only file that may be installed, as public lock files of unrelated projects give it
ROCM = {
    'torch==2.10.0+rocm7.1': '008ee0d77bb8b5f9f4ee1f00212019c4619171e3c4195de56f253331b3bc320d',
    'torchvision==0.25.0+rocm7.1': '8aea3ddbdb74801d3374577a10b3f04d49897c27add235cb25313df6e65b1929',
    'triton-rocm==3.6.0': 'cff15082784c7056b0af9347770e034ab0a8ccbce0642723ddc8c8de1bd6af3f',
}
PINNED = {'PyTorch-2.10.0-frontier-rocm-7.1.1.lock': ROCM, 'PyTorch-2.10.0-rocm-7.1.lock': ROCM}


def values(easyconfig):
    """Assignments of an easyconfig by name, and its checksums that are None."""
    tree = ast.parse(easyconfig.read_text())
    found = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    checksums = [found['checksums']] if 'checksums' in found else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            checksums += [value for key, value in zip(node.keys, node.values)
                          if isinstance(key, ast.Constant) and key.value == 'checksums']
    return found, [node for one in checksums for node in ast.walk(one)
                   if isinstance(node, ast.Constant) and node.value is None]


def entries(text):
    """{requirement: hashes} of a lock file."""
    text = re.sub('^#.*\n', '', text, flags=re.M).replace('\\\n', '')
    return {line.split()[0]: re.findall('--hash=sha256:([0-9a-f]{64})', line)
            for line in text.splitlines() if '==' in line}


def faults(text, pinned):
    """Requirements of the record of which a lock file has another hash, one more, or not two projects that give it."""
    found, wrong = entries(text), []
    for key, value in pinned.items():
        comment = re.search('^(#.*)\n' + re.escape(key), text, re.M)
        projects = re.findall(r'of (\S+/\S+)@[0-9a-f]{12}\b', comment.group(1) if comment else '')
        if found.get(key) != [value] or len(set(projects)) != 2:
            wrong.append(key)
    return wrong


@pytest.mark.parametrize('name', PINNED)
def test_hashes_of_the_record(name):
    text = next(one for one in LOCK_FILES if one.name == name).read_text()
    assert faults(text, PINNED[name]) == []
    # all that download.pytorch.org alone has
    assert {key for key in entries(text) if '+' in key or key.startswith('triton')} == set(PINNED[name])
    for key, value in PINNED[name].items():
        other = value[:-1] + ('0' if value[-1] != '0' else '1')
        more = f'{value} --hash=sha256:{other}'
        for old, new in [(value, other), (value, more), (key, key + '.1'), ('@', '@x')]:
            assert key in faults(text.replace(old, new), PINNED[name])


@pytest.mark.parametrize('lock_file', LOCK_FILES, ids=lambda path: path.name)
def test_lock_file_is_complete_and_that_of_its_easyconfig(lock_file):
    assert all(entries(lock_file.read_text()).values()) and '--only-binary :all:' in lock_file.read_text()
    found, _ = values(lock_file.with_suffix('.eb'))
    assert ast.literal_eval(found['checksums'])[0] == hashlib.sha256(lock_file.read_bytes()).hexdigest()
    heads = {key: re.findall(f'^# {key}: (.*)$', lock_file.read_text(), re.M) for key in ['python', 'wanted']}
    if 'python_packages' in found:
        version = ast.literal_eval(found['version'])
        assert heads['python'] == [' '.join(ast.literal_eval(found['python_versions']))]
        assert heads['wanted'] == [one.replace('%(version)s', version)
                                   for one in ast.literal_eval(found['python_packages'])]
        for address in ast.literal_eval(found['index_urls']) if 'index_urls' in found else []:
            assert f'--extra-index-url {address}\n' in lock_file.read_text()
