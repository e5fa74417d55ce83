# SPDX-License-Identifier: GPL-2.0-only
"""Every Derecho easyconfig on the emulated site: the stack that robot finds, the modules, what loading them gives."""
import functools
import hashlib
import re

import pytest

from slingtorch import sites
from testbed import ROOT, derecho
from testbed.easybuild import BIN, EasyBuild

EASYCONFIGS = ROOT / 'easyconfigs'
SITE = sites.load('derecho', {})
PYTORCH = sorted(path.name for path in (EASYCONFIGS / 'p/PyTorch').glob('*-derecho-cray-mpich.eb'))
# 1.19.2 is for those who ask for it: no PyTorch brings it
LIBRARIES = ['NCCL-2.21.5-derecho-23.09.eb', 'NCCL-2.27.7-derecho-24.12.eb', 'NCCL-2.30.4-derecho-25.10.eb',
             'aws-ofi-nccl-1.6.0-derecho-23.09.eb', 'aws-ofi-nccl-1.21.1-derecho-24.12.eb',
             'aws-ofi-nccl-1.21.1-derecho-25.10.eb']
RUN_TIME = {'FI_CXI_DEFAULT_CQ_SIZE': '131072', 'FI_CXI_DISABLE_HOST_REGISTER': '1',
            'FI_MR_CACHE_MONITOR': 'userfaultfd', 'MPICH_GPU_SUPPORT_ENABLED': '1', 'MPICH_OFI_NIC_POLICY': 'GPU',
            'NCCL_CROSS_NIC': '1', 'NCCL_SOCKET_IFNAME': 'hsn', 'SLINGTORCH_MULTINODE_NCCL_NET': 'AWS Libfabric',
            'TORCH_DIST_USE_NCCL2': '0'}
"""What NCAR sets (benkirk/derecho-pytorch-mpi@1adc9e4 and later), with NCCL_NET left to the runscript."""


def module_name(easyconfig):
    """Name of the module of an easyconfig file."""
    return re.sub('-', '/', re.sub(r'\.eb$', '', re.sub('^aws-ofi-nccl', 'aws_ofi_nccl', easyconfig)), count=1)


class Site:
    """Derecho with the modules of all its easyconfigs."""

    def __init__(self, path, lmod):
        self.lmod = lmod
        self.derecho = derecho.Derecho(path / 'derecho')
        self.eb = EasyBuild(path / 'eb', lmod, ['--site', 'derecho'])
        self.eb.env.update(self.derecho.env)

    def generation(self, name):
        """Which ncarenv an easyconfig is for."""
        text = next(EASYCONFIGS.rglob(name)).read_text()
        return re.search("^site_generation = '(.*)'", text, re.M).group(1)

    def run_eb(self, *args):
        """Run eb for all easyconfigs, once in each ncarenv, which is loaded before."""
        output = ''
        for generation in derecho.GENERATIONS:
            # only the wheels are for ncarenv/25.10
            names = [name for name in PYTORCH if self.generation(name) == generation] or ['PyTorch-2.10.0-derecho-cu129.eb']
            modulepath = f'{self.derecho.path}/modules/{generation}/core:{self.derecho.modulepath}'
            output += self.eb(*names, *args, env={'MODULEPATH': modulepath}).stdout
        return output

    @functools.lru_cache(maxsize=None)
    def load(self, module):
        """The environment after `module load`, in a shell as after login."""
        return self.lmod.load(module, modulepath=[self.eb.modulepath, self.derecho.modulepath])


@pytest.fixture(scope='module')
def site(tmp_path_factory, lmod):
    return Site(tmp_path_factory.mktemp('derecho'), lmod)


@pytest.fixture(scope='module')
def modules(site):
    """The site after `eb --module-only` of everything."""
    site.run_eb('--robot', '--module-only', '--force')
    return site


def test_robot_finds_the_whole_stack(site):
    """Nothing is missing: all that is to be built is listed, each with its file."""
    listed = re.findall(r'^ \* \[ \] \S+/([^/]+\.eb) \(module:', site.run_eb('--dry-run', '--robot'), re.M)
    assert set(listed) >= set(PYTORCH)
    assert {name for name in listed if name.startswith(('NCCL', 'aws'))} == set(LIBRARIES)
    assert listed.index('NCCL-2.21.5-derecho-23.09.eb') < listed.index('PyTorch-2.4.0-derecho-cray-mpich.eb')


@pytest.mark.parametrize('name', PYTORCH)
def test_pytorch_module(modules, name):
    """It loads from a fresh login, brings the modules it was built with, and the run-time environment."""
    env = modules.load(module_name(name))
    ours = re.compile('(MPICH|FI|NCCL|SLINGTORCH|TORCH_DIST)_(?!TEST|CI)|CUDA_VISIBLE_DEVICES')
    found = {key: value for key, value in env.items() if ours.match(key)}
    # of the plugin's module
    assert found.pop('NCCL_NET_PLUGIN').startswith(str(modules.eb.prefix / 'software/aws-ofi-nccl'))
    assert found == RUN_TIME
    provided = SITE.generations[modules.generation(name)]
    wanted = [re.sub('^build ', '', text).split(' in ')[0] for role, text in provided.items()
              if role not in ('default', 'libfabric', 'python', 'nccl', 'nccl_plugin')]
    wanted += [f"{provided[role].split(' ')[1]}-derecho-{modules.generation(name)}" for role in ('nccl', 'nccl_plugin')]
    assert len(wanted) == 9
    loaded = env['LOADEDMODULES'].split(':')
    assert set(wanted) <= set(loaded)
    # of one generation alone
    names = [module.split('/')[0] for module in loaded]
    assert len(set(names)) == len(names)


def test_users_own_values_come_back(modules):
    """After unloading; and what the user sets after loading stays."""
    script = f"""
        module load {module_name(PYTORCH[0])} || exit 1
        echo "$NCCL_SOCKET_IFNAME"
        module unload {module_name(PYTORCH[0])}
        echo "$NCCL_SOCKET_IFNAME ${{MPICH_GPU_SUPPORT_ENABLED-unset}}"
    """
    done = modules.lmod.bash(script, modulepath=[modules.eb.modulepath, modules.derecho.modulepath],
                             env={'NCCL_SOCKET_IFNAME': 'eth7'})
    assert done.stdout.splitlines() == ['hsn', 'eth7 unset']


@pytest.mark.parametrize('name', LIBRARIES)
def test_libraries_load_from_a_fresh_login(modules, name):
    """NCCL and its plugin by themselves, as one who tests the network loads them: their modules are behind ncarenv."""
    env = modules.load(module_name(name).replace('aws_ofi_nccl', 'aws-ofi-nccl'))
    # the same file for each generation: its modules are the site's
    generation = re.search(r'-derecho-([\d.]+)\.eb', name).group(1)
    text = (ROOT / 'hooks/sites/derecho.cfg').read_text().split(f'[provides {generation}]')[1]
    roles = 'modules_first|compiler|gpu|libfabric' if name.startswith('aws') else 'modules_first|compiler|gpu'
    wanted = re.findall(rf'^(?:{roles}) = (\S*)', text.split('[')[0], re.M)
    assert len(wanted) >= 3 and set(wanted) <= set(env['LOADEDMODULES'].split(':'))


def test_tcl_modules_of_the_plugin(tmp_path, lmod, site):
    """For the generation that the user names, with the modules that the site has for it."""
    eb = EasyBuild(tmp_path / 'eb', lmod, ['--site', 'derecho'])
    eb.env.update(site.derecho.env, SLINGTORCH_SITE_GENERATION='24.12')
    eb.env['MODULEPATH'] = f'{site.derecho.path}/modules/24.12/core:{site.derecho.modulepath}'
    eb('aws-ofi-nccl-1.21.1.eb', '--robot', '--module-only', '--force', '--module-syntax=Tcl')
    written = eb.prefix / 'software/aws-ofi-nccl/1.21.1-derecho-24.12/easybuild/reprod'
    assert [path.name for path in written.glob('*.eb')] == ['aws-ofi-nccl-1.21.1-derecho-24.12.eb']
    text = (written / 'aws-ofi-nccl-1.21.1-derecho-24.12.eb').read_text()
    assert "('cuda/12.3.2', EXTERNAL_MODULE)" in text and 'site_dependencies' not in text
    env = lmod.load('aws-ofi-nccl/1.21.1-derecho-24.12', modulepath=[eb.modulepath, site.derecho.modulepath])
    assert {'cuda/12.3.2', 'NCCL/2.27.7-derecho-24.12'} <= set(env['LOADEDMODULES'].split(':'))


def test_what_eb_shows_of_roles(tmp_path, lmod, site):
    """--missing has what is installed for them; --inject-checksums changes the checksum, and no dependency."""
    eb = EasyBuild(tmp_path / 'eb', lmod, ['--site', 'derecho'])
    eb.env.update(site.derecho.env)
    missing = eb('--missing', '--robot', 'PyTorch-2.13.0-derecho-cray-mpich.eb').stdout
    assert re.findall(r'^\* (\S+)', missing, re.M) == [
        'NCCL/2.27.7-derecho-24.12', 'aws-ofi-nccl/1.21.1-derecho-24.12', 'PyTorch/2.13.0-derecho-cray-mpich']
    text = (EASYCONFIGS / 'a/aws-ofi-nccl/aws-ofi-nccl-1.21.1.eb').read_text()
    copy = tmp_path / 'aws-ofi-nccl-1.21.1.eb'
    copy.write_text(text)
    (tmp_path / 'v1.21.1.tar.gz').write_text('sources')
    eb('--inject-checksums=sha256', '--force', copy, env={'EASYBUILD_SOURCEPATH': tmp_path})
    checksum = re.search(r"checksums = \['(\w+)'\]", text).group(1)
    assert copy.read_text() == text.replace(checksum, hashlib.sha256(b'sources').hexdigest())


def test_a_module_of_a_role_that_is_not_there(tmp_path, lmod):
    """The site's file names it, and this machine has none of it."""
    eb = EasyBuild(tmp_path / 'eb', lmod, ['--site', 'derecho'])
    done = eb('aws-ofi-nccl-1.21.1.eb', '--robot', '--module-only', '--force', check=False)
    said = ' '.join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and 'ncarenv/25.10' in said
    assert "is named in %s, section [provides 25.10], modules_first = ncarenv/25.10. A login node may lack it" \
        % (ROOT / 'hooks/sites/derecho.cfg') in said


def test_on_another_site(tmp_path, lmod):
    """An error that names both, before anything is fetched or looked for."""
    name = 'PyTorch-2.4.0-derecho-cray-mpich.eb'
    done = EasyBuild(tmp_path / 'eb', lmod, ['--site', 'lumi'])(name, '--robot', check=False)
    said = ' '.join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert f"{name} is for the site 'derecho', but this is the site 'lumi'" in said
    assert 'export SLINGTORCH_SITE=derecho' in said and 'no module' not in said and "Couldn't find file" not in said


def test_checksums_and_sources_on_another_site(tmp_path, lmod):
    """A maintainer needs none of Derecho's modules to refresh checksums or to fetch sources."""
    eb = EasyBuild(tmp_path / 'eb', lmod, ['--site', 'lumi'])
    name = 'PyTorch-2.4.0-derecho-cray-mpich.eb'
    copy = tmp_path / name
    copy.write_text(next(EASYCONFIGS.rglob(name)).read_text())
    for source in ('pytorch-v2.4.0', 'torchvision-0.19.0', 'mpi4py-4.0.0'):
        (tmp_path / f'{source}.tar.gz').write_text(source)
    eb(copy, '--inject-checksums', '--force')
    for source in ('pytorch-v2.4.0', 'torchvision-0.19.0', 'mpi4py-4.0.0'):
        assert hashlib.sha256(source.encode()).hexdigest() in copy.read_text()
    done = eb(copy, '--fetch', env={'LMOD_CMD': None, 'PATH': f'{BIN}:/usr/bin:/bin'})
    said = ' '.join(done.stderr.split())
    assert (f'WARNING: Only the sources of {name} are fetched, not the packages of its Python environment: downloading these needs '
            "modules of the site 'derecho', but this is the site 'lumi'") in said


def test_without_the_hooks(tmp_path, lmod, site):
    """A module without the values of the site is not made in silence."""
    eb = EasyBuild(tmp_path / 'eb', lmod, ['--site', 'derecho'])
    eb.env.update(site.derecho.env)
    eb.env['MODULEPATH'] = f'{site.derecho.path}/modules/23.09/core:{site.derecho.modulepath}'
    done = eb(PYTORCH[0], '--robot', '--module-only', '--force', env={'EASYBUILD_HOOKS': ''})
    said = ' '.join((done.stdout + done.stderr).split())
    assert (f"WARNING: {PYTORCH[0]} is for the site 'derecho', but EasyBuild runs without the hooks of this bundle, so the module "
            'gets no values for the network and for MPI. Activate the bundle with \'eval "$(slingtorch env)"\', or add them with '
            '--hooks') in said
