# SPDX-License-Identifier: GPL-2.0-only
"""Tiny wheels, made in a moment, for everything about PythonVenv that needs no PyTorch."""
import base64
import hashlib
import os
import re
import zipfile

from . import derecho


def sha256(path):
    """sha256 of a file, as lock files and easyconfigs write it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_wheel(directory, name, version, files=None, requires=(), tag='py3-none-any'):
    """Write a wheel; returns its path.

    :param files: {path in the wheel: text or bytes}; default: one module `<name>.py` with its version
    :param requires: requirements, for example ['beta>=1']
    :param tag: Python, ABI and platform that it says it is for
    """
    directory.mkdir(parents=True, exist_ok=True)
    info = f'{name}-{version}.dist-info'
    content = dict(files or {f'{name}.py': f'__version__ = {version!r}\n'})
    metadata = f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n'
    content[f'{info}/METADATA'] = metadata + ''.join(f'Requires-Dist: {requirement}\n' for requirement in requires)
    content[f'{info}/WHEEL'] = 'Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: ' + tag + '\n'
    record = ''
    content = {path: text if isinstance(text, bytes) else text.encode() for path, text in content.items()}
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()
        record += f'{path},sha256={digest},{len(data)}\n'
    content[f'{info}/RECORD'] = record + f'{info}/RECORD,,\n'
    wheel = directory / f'{name}-{version}-{tag}.whl'
    with zipfile.ZipFile(wheel, 'w') as archive:
        for path, data in content.items():
            member = zipfile.ZipInfo(path)
            # pip makes a script executable that is so in the wheel
            member.external_attr = (0o100755 if '.data/scripts/' in path else 0o100644) << 16
            archive.writestr(member, data)
    return wheel


def make_index(directory, wheels):
    """Pages of a package index for these wheels, with their hashes; its address, which is that of files."""
    for name in {wheel.name.split('-')[0] for wheel in wheels}:
        links = [f'<a href="{wheel.as_uri()}#sha256={sha256(wheel)}">{wheel.name}</a>\n'
                 for wheel in wheels if wheel.name.startswith(f'{name}-')]
        page = directory / name.replace('_', '-') / 'index.html'  # PEP 503
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text('<!DOCTYPE html>' + ''.join(links))
    return directory.as_uri()


def lock_text(wheels):
    """A lock file for these wheels: every package with version and hash."""
    lines = []
    for wheel in wheels:
        name, version = wheel.name.split('-')[:2]
        lines.append(f'{name}=={version} \\\n    --hash=sha256:{sha256(wheel)}\n')
    return ''.join(lines)


def tiny_easyconfig(lock_file, options=''):
    """Text of PyTorch-0.1-tiny.eb: a virtual environment from this lock file, which must lie beside it.

    :param lock_file: its path; '' for none yet, and an empty checksum
    :param options: more lines for the easyconfig
    """
    return f"""
easyblock = 'PythonVenv'

name = 'PyTorch'
version = '0.1'
versionsuffix = '-tiny'

homepage = 'https://example.org'
description = "Tiny"

toolchain = SYSTEM

sources = ['%(name)s-%(version)s%(versionsuffix)s.lock']
checksums = ['{lock_file and sha256(lock_file)}']

{options}

moduleclass = 'ai'
"""


TORCH = '''
import ctypes, os, types
from . import distributed, version
__version__ = version.__version__
__config__ = types.SimpleNamespace(show=lambda: '')
cuda = types.SimpleNamespace(nccl=types.SimpleNamespace(version=lambda: (2, 27, 7)))
for name in version.nccls:
    ctypes.CDLL(os.path.join(os.path.dirname(__file__), 'lib', name))
'''


def toy_torch(directory, version, cuda=None, hip=None, nccls=None):
    """
    Files of a wheel for make_wheel(): a torch that maps libraries of NCCL or RCCL, and says what they are.

    :param directory: scratch for libraries
    :param cuda: version of CUDA that it says it is for, or None; hip likewise
    :param nccls: {name of a library in torch/lib: its release as a number, such as 22707}
    """
    nccls = nccls or {}
    files = {
        'torch/__init__.py': TORCH,
        'torch/distributed/__init__.py': 'is_available = is_nccl_available = lambda: True\n'
                                         'is_mpi_available = lambda: False\n',
        'torch/version.py': f'__version__ = {version!r}\ncuda = {cuda!r}\nhip = {hip!r}\nnccls = {list(nccls)!r}\n',
    }
    for name, release in nccls.items():
        source = 'int ncclGetVersion(int *version) { *version = %d; return 0; }' % release
        files[f'torch/lib/{name}'] = derecho.shared_library(directory / name, source=source).read_bytes()
    return files


def stand_in(easyconfig, directory, gpus=0, torch=None):
    """
    Make an easyconfig of a wheel with CUDA, and its lock file, one for tiny wheels of the same names.

    :param easyconfig: path of the file to change
    :param directory: for the wheels
    :param gpus: how many GPUs its torch says that there are
    :param torch: text of torch/__init__.py instead
    :return: settings of pip for these wheels alone
    """
    text = easyconfig.read_text()
    version, cuda = re.search(r"version = '(.*)'\nversionsuffix = '-cuda-(.*)'", text).groups()
    # 2.10.0 of the package index says +cu128 of itself, later ones +cu132 and so on
    files = toy_torch(directory, f'{version}+cu{cuda.replace(".", "")}', cuda=cuda, nccls={'libnccl.so.2': 23007})
    files['torch/__init__.py'] += f'cuda.is_available, cuda.device_count = lambda: {gpus} > 0, lambda: {gpus}\n'
    files['torch/__init__.py'] = torch or files['torch/__init__.py']
    made = [make_wheel(directory, 'torch', version, files=files),
            make_wheel(directory, 'torchvision', re.search("'torchvision==(.*)'", text).group(1)),
            make_wheel(directory, 'numpy', '2.4.6'), make_wheel(directory, 'pip', '26.3'),
            make_wheel(directory, 'scikit_learn', '1.9.1', files={'sklearn/__init__.py': '', 'sklearn/datasets.py': ''})]
    lock = easyconfig.with_suffix('.lock')
    lock.write_text(lock_text(made))
    easyconfig.write_text(re.sub(r"checksums = \['\w+'\]", f"checksums = ['{sha256(lock)}']", text))
    return {'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': str(directory), 'PIP_CONFIG_FILE': os.devnull}


def toy_plugin(path, apis, needs=()):
    """Make a network plugin with these versions of NCCL's interface, linked with the libraries in `needs`."""
    return derecho.shared_library(path, needs=needs, source=''.join(f'int ncclNetPlugin_v{api};' for api in apis))
