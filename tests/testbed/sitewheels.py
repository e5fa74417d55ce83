# SPDX-License-Identifier: GPL-2.0-only
"""Emulated sites on which PyTorch is installed from tiny wheels that have the names and versions of the real ones."""
import os
import pathlib
import re
import shutil
import subprocess
import sys

from slingtorch import sites

from . import ROOT, checked, cirrus, derecho, forkedeb, frontier, internet, quickvenv, wheels
from .easybuild import EasyBuild

PYTHON = '%d.%d' % sys.version_info[:2]
TREES = {'cirrus_ice': cirrus.Cirrus, 'derecho': derecho.Derecho, 'frontier': frontier.Frontier}


def install_plugin(tree, eb, site, text):
    """Install the plugin that an easyconfig of this text names: itself, or for a generation of the site's modules."""
    found = re.findall(r"^    \('(aws-ofi-\w+)', '(\S+)', '(\S+)'\)", text, re.M)
    if "'nccl_plugin'" in text:
        generation = re.search("^site_generation = '(.*)'", text, re.M).group(1)
        plugin = sites.load(site, {}).generations[generation]['nccl_plugin']
        found.append((*plugin[len('eb '):].split('/'), f'-{site}-{generation}'))
    for software, version, suffix in found:
        root = tree.install(eb.prefix, software, version + suffix, ['libnccl-net.so'])
        wheels.toy_plugin(root / 'lib/libnccl-net.so', [5] if software == 'aws-ofi-rccl' else range(6, 13))


class Wheels:
    """A site, and an installation of PyTorch there.

    :param replace: pairs of strings to be replaced in the easyconfig
    :ivar done: what `eb` of install() said
    """

    def __init__(self, path, lmod, name, replace=()):
        self.path, self.lmod, self.name = path, lmod, name
        self.text = next((ROOT / 'easyconfigs').rglob(name)).read_text()
        for old, new in replace:
            assert old in self.text
            self.text = self.text.replace(old, new)
        self.site = re.search("^only_site = '(.*)'", self.text, re.M).group(1)
        self.tree = TREES[self.site](path / 'site')
        self.eb = EasyBuild(path / 'eb', lmod, ['--site', self.site])
        self.eb.env.update(self.tree.env)
        self.eb.env['EASYBUILD_SOURCEPATH'] = f"{path}/sources:{self.eb.env['EASYBUILD_SOURCEPATH']}"
        if self.site == 'derecho':
            self.eb.env['MODULEPATH'] = f'{self.tree.path}/modules/25.10/core:{self.tree.modulepath}'
        install_plugin(self.tree, self.eb, self.site, self.text)
        for extension, version in re.findall(r"^    \('(\w+)', '([\d.]+)', {$", self.text, re.M):
            derecho.ToySources(path / 'sources').write_extension(extension.lower(), version)
        self.easyconfig = path / name
        # all the rest of it is used as it is
        text = re.sub("index_urls = .*\n", '', self.text)
        text = re.sub("python_versions = .*", f"python_versions = ['{PYTHON}']\nindex_urls = ['{self.index()}']", text)
        # that is for the real sources
        regex = r"        'patches': .*\n|        'checksums': \[\n(    .*\n)+?        \],\n"
        self.easyconfig.write_text(re.sub(regex, '', text))

    def index(self):
        """Address of an index with what the easyconfig wants."""
        version = re.search("^version = '(.*)'", self.text, re.M).group(1)
        packages = re.search(r"^python_packages = \[(.*?)^\]", self.text, re.M | re.S).group(1)
        # of some releases below 2, and of some below 80
        made = [wheels.make_wheel(self.path / 'files', name.replace('-', '_'), '1.26.4',
                                  files=quickvenv.pip_files() if name == 'pip' else {f'{name}/__init__.py': ''})
                for name in re.findall(r"^    '([\w-]+)(?:<\d+)?',", packages, re.M)]
        for name, wanted in re.findall(r"^    '(torch\w*)==(\S+)',", packages, re.M):
            wanted = wanted.replace('%(version)s', version)
            files = {f'{name}/__init__.py': f'__version__ = {wanted!r}\n'}
            if name == 'torch':
                files = self.torch(wanted)
            made.append(wheels.make_wheel(self.path / 'files', name, wanted, requires=['numpy'], files=files))
        return wheels.make_index(self.path / 'simple', made)

    def torch(self, version):
        """Files of a torch whose version says what it is for."""
        if '+' not in version:
            # that of the package index says so of itself, unlike its file's name
            version += '+cu121'
        kind, release = re.search(r'\+(cu|rocm|cpu)([\d.]*)', version).groups()
        nccls = {'cu': {'libnccl.so.2': 22707}, 'cpu': {},
                 'rocm': {'librccl.so.1': 21806 if release == '5.7' else 22707}}
        files = wheels.toy_torch(
            self.path / 'libraries', version, cuda=f'{release[:2]}.{release[2:]}' if kind == 'cu' else None,
            hip=release + '.52802' if kind == 'rocm' else None, nccls=nccls[kind])
        return {**files, 'torch/utils/tensorboard.py': 'class SummaryWriter: pass\n'}

    def slingtorch(self, *args):
        """The command, of this checkout; pip knows no index of its own."""
        env = {**os.environ, **self.eb.env, 'PYTHONPATH': str(ROOT), 'PIP_CONFIG_FILE': os.devnull,
               'PIP_INDEX_URL': (self.path / 'empty').as_uri()}
        return checked(forkedeb.slingtorch(args, env, self.path))

    def install(self):
        """What a user types: eb makes the lock file on the way. Sources of extensions are stand-ins."""
        self.done = self.eb(self.easyconfig, '--robot', '--ignore-checksums', env={
            'PIP_CONFIG_FILE': os.devnull, 'PIP_NO_INDEX': None, 'PIP_INDEX_URL': (self.path / 'empty').as_uri()})

    @property
    def module(self):
        """Name of its module."""
        return re.sub('-', '/', self.name[:-3], count=1)

    @property
    def root(self):
        """Where it is installed."""
        return self.eb.prefix / 'software' / self.module

    def load(self):
        """The environment after `module load`, in a shell as after login."""
        return self.lmod.load(self.module, modulepath=[self.eb.modulepath, self.tree.modulepath])


# the wheels with compiled code, Python 3.12: on the package index the names are longer, with the older platforms
MANYLINUX = ['torch', 'torchvision', 'numpy', 'pillow', 'cython', 'markupsafe']
# download.pytorch.org's own (bazel/pip/pycross/download.py of modular/modular@9192fa1d9c04), and all of 2024
LINUX = ['triton_rocm', 'pytorch_triton_rocm']
HASH = re.compile(r"\b[0-9a-f]{64}\b")


def masked(text):
    """A lock file or an easyconfig without its hashes, of which an entry may have more than one."""
    return re.sub(r'HASH(?: \\\n    --hash=sha256:HASH)+', 'HASH', HASH.sub('HASH', text))


def python_of(version):
    """Path of a Python of this version on this machine, or None."""
    found = [shutil.which(f'python{version}'), *pathlib.Path.home().glob(f'.pyenv/versions/{version}.*/bin/python3')]
    for path in filter(None, found):
        # pyenv's own python3.12 may be there and not run
        if subprocess.run([path, '-c', 'import venv'], stderr=subprocess.DEVNULL).returncode == 0:
            return str(path)
    return None


class Shipped:
    """
    Frontier, with an easyconfig and its lock file as they are in the bundle, but for the hashes of the stand-ins.

    :ivar text: the easyconfig of the bundle
    :ivar internet: indexes and download sites, which have the stand-ins under the names of the real files
    :ivar lock_file: the copy; not there for an easyconfig without one
    :ivar python: version of the Python that is at hand for it: where this machine has not that of the easyconfig, its
                  own one takes the place
    """

    def __init__(self, path, lmod, name):
        shipped = next((ROOT / 'easyconfigs').rglob(name))
        self.path, self.lmod, self.name, self.site = path, lmod, name, 'frontier'
        self.text = text = shipped.read_text()
        wanted, = re.search(r"^python_versions = \['(.*)'\]", text, re.M).groups()
        python = python_of(wanted)
        self.python = wanted if python else PYTHON
        self.tree = frontier.Frontier(path / 'site', python or sys.executable)
        self.eb = EasyBuild(path / 'eb', lmod, ['--site', 'frontier'])
        self.internet = internet.Internet(path / 'internet')
        self.eb.env = {key: value for key, value in {**self.eb.env, **self.tree.env, **self.internet.env}.items()
                       if value is not None}
        self.eb.env['EASYBUILD_ROBOT_PATHS'] = f"{path}/easyconfigs:{self.eb.env['EASYBUILD_ROBOT_PATHS']}"
        install_plugin(self.tree, self.eb, 'frontier', text)

        self.easyconfig = path / 'easyconfigs/p/PyTorch' / name
        self.easyconfig.parent.mkdir(parents=True)
        self.lock_file = self.easyconfig.with_suffix('.lock')
        index = re.search(r"^index_urls = \['(.*)'\]", text, re.M).group(1)
        if shipped.with_suffix('.lock').exists():
            lock = shipped.with_suffix('.lock').read_text()
            lock = lock.replace(f'# python: {wanted}\n', f'# python: {self.python}\n')
            self.wheels = [self.wheel(*pin) for pin in re.findall(r'^([\w-]+)==(\S+)', lock, re.M)]
            for wheel in self.wheels:
                entry = '%s==%s \\\n' % (wheel.name.split('-')[0].replace('_', '-'), wheel.name.split('-')[1])
                lock, count = re.subn(re.escape(entry) + r'(    --hash=sha256:\w+( \\\n|\n|$))+',
                                      lambda _: f'{entry}    --hash=sha256:{wheels.sha256(wheel)}\n', lock)
                assert count == 1, entry
            self.lock_file.write_text(lock)
            text = text.replace(wheels.sha256(shipped.with_suffix('.lock')), wheels.sha256(self.lock_file))
        else:
            version = re.search("^version = '(.*)'", text, re.M).group(1)
            pins = re.findall(r"^    '(torch\w*)==(\S+)',", text, re.M)
            pins = [(package, pin.replace('%(version)s', version)) for package, pin in pins]
            pins += [('pytorch-triton-rocm', '2.2.0'), ('numpy', '1.26.4'), ('numpy', '2.5.5'), ('pip', '26.3'),
                     ('cython', '3.3.1'), ('setuptools', '84.2.1')]
            self.wheels = [self.wheel(*pin, linux=True) for pin in pins]
        for wheel in self.wheels:
            of_pytorch = '+' in wheel.name or wheel.name.startswith(tuple(LINUX))
            self.internet.add_wheel(index if of_pytorch else internet.INDEX, wheel)
        mpi4py = derecho.ToySources(path / 'toys').write_extension('mpi4py', '4.1.2')
        address = f'{internet.SOURCES}/m/mpi4py/{mpi4py.name}'
        self.internet.pages[address] = mpi4py.read_bytes()
        checksum, = re.findall(r"'mpi4py', .*?'checksums': \['(\w+)'\]", text, re.S)
        text = text.replace(checksum, wheels.sha256(mpi4py))
        text = text.replace(f"python_versions = ['{wanted}']", f"python_versions = ['{self.python}']")
        self.easyconfig.write_text(text)

    def wheel(self, package, version, linux=False):
        """The stand-in for a wheel, under its file's name."""
        name, tag = package.replace('-', '_'), 'py3-none-any'
        if name in MANYLINUX + LINUX + ['torchaudio']:
            cpython = 'cp' + self.python.replace('.', '')
            old = name in LINUX or linux and '+' in version
            tag = f'{cpython}-{cpython}-' + ('linux_x86_64' if old else 'manylinux_2_28_x86_64')
        files, requires = {f'{name}/__init__.py': f'__version__ = {version!r}\n'}, []
        if name == 'torch':
            files = Wheels.torch(self, version)
            requires = ['numpy', 'pytorch-triton-rocm==2.2.0' if linux else 'triton-rocm==3.6.0']
        elif name == 'pip':
            # eb asks it whether the packages fit together
            files = quickvenv.pip_files()
        return wheels.make_wheel(self.path / 'files', name, version, files=files, requires=requires, tag=tag)

    def install(self):
        """What a user types, from another directory, and nothing before it."""
        self.done = self.eb(self.name, '--robot')

    module, root, load = Wheels.module, Wheels.root, Wheels.load
