# SPDX-License-Identifier: GPL-2.0-only
"""A wheel of PyTorch with NCCL in it, and the network plugin of another module: do they fit? Through real `eb`.

The wheel is a toy whose library is really mapped; the plugin's symbols and needs are really there.
"""
import os

import pytest

from testbed import derecho, wheels
from testbed.easybuild import EasyBuild


class Site:
    """Modules of CUDA and a plugin, and an easyconfig with the toy."""

    def __init__(self, directory, lmod):
        self.dir = directory
        self.eb = EasyBuild(directory / 'eb', lmod)
        self.modules = directory / 'modules'
        self.metadata = ''
        self.module('cuda', 'CUDA', '12.9.0')
        plugin = self.module('plugin', 'aws-ofi-nccl', '1.19.2', 'prepend_path("LD_LIBRARY_PATH", "{root}/lib")')
        runtime = derecho.shared_library(directory / 'opt/cuda/lib64/libcudart.so.12')
        wheels.toy_plugin(plugin / 'lib/libnccl-net.so', [6, 9, 10], needs=[runtime])

    def module(self, name, software, version, text=''):
        """Add a module and what EasyBuild must know of it; its prefix."""
        root = self.dir / 'opt' / name
        root.mkdir(parents=True)
        path = self.modules / name / f'{version}.lua'
        path.parent.mkdir(parents=True)
        path.write_text(text.format(root=root) + '\n')
        self.metadata += f'[{name}/{version}]\nname = {software}\nversion = {version}\nprefix = {root}\n'
        return root

    def install(self, nccls=('libnccl.so.2',), check=True):
        """Install a wheel with these libraries; all that `eb` printed, in one line."""
        index = self.eb.prefix / 'sources/p/PyTorch/wheels'
        files = wheels.toy_torch(self.dir / 'wheel', '2.10.0+cu129', cuda='12.9',
                                 nccls={name: 22707 + number for number, name in enumerate(nccls)})
        wheel = wheels.make_wheel(index, 'torch', '2.10.0', files=files)
        lock = self.dir / 'PyTorch-0.1-tiny.lock'
        lock.write_text(wheels.lock_text([wheel]))
        easyconfig = self.dir / 'PyTorch-0.1-tiny.eb'
        easyconfig.write_text(wheels.tiny_easyconfig(
            lock, "dependencies = [('cuda/12.9.0', EXTERNAL_MODULE), ('plugin/1.19.2', EXTERNAL_MODULE)]"))
        (self.dir / 'metadata.cfg').write_text(self.metadata)
        done = self.eb(easyconfig, check=check, env={
            'EASYBUILD_EXTERNAL_MODULES_METADATA': self.dir / 'metadata.cfg', 'MODULEPATH': self.modules,
            'PIP_CONFIG_FILE': os.devnull, 'PIP_NO_INDEX': '1'})
        assert check or done.returncode != 0
        assert check or not (self.eb.modulepath / 'PyTorch/0.1-tiny.lua').exists()
        return ' '.join((done.stdout + done.stderr).split())


@pytest.fixture
def site(tmp_path, lmod):
    return Site(tmp_path, lmod)


def test_fits_and_what_is_known_of_it_is_said(site):
    printed = site.install()
    assert 'NCCL ' + str(site.eb.prefix / 'software/PyTorch/0.1-tiny/lib') in printed
    assert 'WARNING: aws-ofi-nccl 1.19.2: large broadcasts' in printed and 'aws/aws-ofi-nccl#1379' in printed
    assert 'setenv("SLINGTORCH_CUDA_VERSION", "12.9")' in (site.eb.modulepath / 'PyTorch/0.1-tiny.lua').read_text()


def test_two_libraries_and_no_plugin_in_the_search_path(site):
    path = site.modules / 'plugin/1.19.2.lua'
    path.write_text('')
    printed = site.install(nccls=('libnccl.so.2', 'libnccl.so.2.28'), check=False)    # more: test_units.py
    assert 'The process has two NCCL libraries' in printed
    assert 'NCCL would find no network plugin: $LD_LIBRARY_PATH has no directory with one' in printed
