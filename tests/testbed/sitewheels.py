# SPDX-License-Identifier: GPL-2.0-only
"""Emulated sites on which PyTorch is installed from tiny wheels that have the names and versions of the real ones."""
import os
import re
import sys

from . import ROOT, cirrus, derecho, frontier, run, wheels
from .easybuild import EasyBuild

PYTHON = '%d.%d' % sys.version_info[:2]
TREES = {'cirrus_ice': cirrus.Cirrus, 'derecho': derecho.Derecho, 'frontier': frontier.Frontier}


class Wheels:
    """A site, and an installation of PyTorch there: lock, hash, install.

    :param replace: pairs of strings to be replaced in the easyconfig
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
        for software, version, suffix in re.findall(r"\('(aws-ofi-\w+)', '(\S+)', '(\S+)'\)", self.text):
            root = self.tree.install(self.eb.prefix, software, version + suffix, ['libnccl-net.so'])
            wheels.toy_plugin(root / 'lib/libnccl-net.so', [5] if software == 'aws-ofi-rccl' else range(6, 13))
        for extension, version in re.findall(r"^    \('(\w+)', '([\d.]+)', {$", self.text, re.M):
            derecho.ToySources(path / 'sources').write_extension(extension.lower(), version)
        self.easyconfig = path / name
        # all the rest of it is used as it is
        text = re.sub("index_urls = .*\n", '', self.text).replace("    'pip',\n", '')
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
                                  files={f'{name}/__init__.py': ''})
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
        return run([sys.executable, '-m', 'slingtorch', *args], env=env)

    def install(self):
        """What a user types; pip has no index any more when `eb` runs."""
        nowhere = {'PIP_CONFIG_FILE': os.devnull, 'PIP_INDEX_URL': 'http://127.0.0.1:9/simple'}
        self.slingtorch('lock', self.easyconfig)
        self.eb(self.easyconfig, '--inject-checksums=sha256', '--force', env=nowhere)
        return self.eb(self.easyconfig, '--robot', env=nowhere)

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
