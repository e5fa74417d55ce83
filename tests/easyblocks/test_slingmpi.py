# SPDX-License-Identifier: GPL-2.0-only
"""The easyblock of slingmpi: the shipped easyconfigs on this machine, on emulated sites and in a container, as an
extension of a virtual environment, and what goes wrong. PyTorch is a stand-in (testbed.toypytorch), MPI is real."""
import json
import os
import pathlib
import re
import shutil

import pytest

from slingtorch import sites
from slingtorch.install.process import PROBE
from testbed import DIR, ROOT, derecho, frontier, images, missing, run, said, smallimage, toypytorch, wheels
from testbed.easybuild import EasyBuild

LOCAL, DERECHO, FRONTIER, IMAGE = EASYCONFIGS = [f'slingmpi-0.1.0-PyTorch-{name}.eb' for name in [
    '2.13.0-local-cpu', '2.10.0-derecho-cu129', '2.10.0-frontier-rocm-7.1.1', '2.10.0-rocm-7.0-singularity-laif']]
MPICH = '--try-amend=mpicxx=mpicxx.mpich'
# those of the default generation
DERECHO_MODULES = [sites.load('derecho', {}).generations['25.10'][role].split(' ')[0]
                   for role in ('modules_first', 'compiler', 'mpi', 'gpu')]


def needs(library):
    """Names of libraries and RPATH that a library asks for."""
    shown = run(['readelf', '-d', library]).stdout
    return re.findall(r'\(NEEDED\).*\[(libmpi.*)\]', shown), re.findall(r'\((RPATH|RUNPATH)\).*\[(.*)\]', shown)


class Machine:
    """A machine where PyTorch is a module, and slingmpi is installed on it.

    :ivar pytorch: where that PyTorch is
    """

    def __init__(self, path, tool, module='2.13.0-local-cpu', version='2.13.0+cpu', site=None, lines=()):
        self.path, self.tool = path, tool
        self.tree = site and site(path / 'site')
        name = site and site.__name__.lower()
        self.eb = EasyBuild(path / 'eb', tool, ['--site', name] if name else [])
        self.eb.env.update(self.tree.env if site else {'MODULEPATH': ''})
        self.pytorch = toypytorch.make(self.eb.prefix / 'software/PyTorch' / module, version)
        self.module('PyTorch/' + module, *lines)

    def module(self, name, *lines):
        """Make the module of PyTorch."""
        variables = {'EBROOTPYTORCH': self.pytorch, 'EBVERSIONPYTORCH': name.split('/')[1].split('-')[0]}
        path = self.eb.modulepath / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.tool.syntax == 'Lua':
            text = ''.join(f'{line}\n' for line in lines) + ''.join(
                f'setenv("{key}", "{value}")\n' for key, value in variables.items())
            path.with_name(path.name + '.lua').write_text(text)
        else:
            path.write_text('#%Module\n' + ''.join(f'setenv {key} {value}\n' for key, value in variables.items()))

    def install(self, name, *args, **kwargs):
        """`eb`, without ranks: the stand-in can do nothing in them."""
        return self.eb(name, '--disable-mpi-tests', *args, **kwargs)

    def root(self, name):
        return self.eb.prefix / 'software/slingmpi' / name[len('slingmpi-'):-len('.eb')]

    def load(self, name):
        modulepath = [self.eb.modulepath] + ([self.tree.modulepath] if self.tree else [])
        return self.tool.load('slingmpi/' + name[len('slingmpi-'):-len('.eb')], modulepath=modulepath)


@pytest.fixture(scope='module')
def machine(tmp_path_factory, lmod):
    """This machine, with slingmpi on MPICH."""
    made = Machine(tmp_path_factory.mktemp('machine'), lmod)
    made.done = made.install(LOCAL, MPICH)
    return made


def library_of(root):
    library, = root.glob('lib/python3*/site-packages/slingmpi/_backend*.so')
    return library


def test_installed_and_loaded(machine):
    assert 'building for PyTorch 2.13.0+cpu' in said(machine.done)
    assert re.search(r'imports slingmpi has: PyTorch 2.13.0\+cpu, MPI /\S*/libmpich.so.12', said(machine.done))
    root, env = machine.root(LOCAL), machine.load(LOCAL)
    built = json.loads((library_of(root).parent / 'built.json').read_text())
    assert built['torch'] == '2.13' and built['mpi'].startswith('mpich ')
    assert built['compiler'] == shutil.which('mpicxx.mpich')
    assert env['EBROOTSLINGMPI'] == str(root) and env['EBROOTPYTORCH'] == str(machine.pytorch)
    assert needs(library_of(root)) == (['libmpich.so.12'], [])
    # found by PyTorch's Python, and by its name from any directory
    code = ('import importlib.metadata as m, torch, slingmpi, slingmpi.autoload as a; '
            'points = m.entry_points(group="torch.distributed.backends"); '
            'print(slingmpi.__file__, [point.load() is a.register for point in points])')
    done = run([machine.pytorch / 'bin/python', '-s', '-c', code], env=env, cwd='/')
    assert done.stdout.split() == [str(library_of(root).parent / '__init__.py'), '[True]']
    assert 'nothing cannot be imported: No module' in run([machine.pytorch / 'bin/python', '-s', '-c', PROBE, 'nothing']).stdout
    # the checkout has nothing of the build
    assert not list((ROOT / 'slingmpi/slingmpi').glob('_backend*'))


def test_ways_of_eb(machine):
    """Each of them on what is installed: nothing is compiled but by --rebuild."""
    library = library_of(machine.root(LOCAL))
    module = machine.eb.modulepath / 'slingmpi' / LOCAL[len('slingmpi-'):].replace('.eb', '.lua')
    before, text = library.stat().st_mtime_ns, module.read_text()
    machine.install(LOCAL, MPICH, '--fetch')
    # without --try-amend, which EasyBuild 5.4 cannot have in a dry run
    assert "slingmpi/ of the bundle will be built by pip with MPI's compiler mpicxx, for" in said(
        machine.install(LOCAL, '--extended-dry-run'))
    machine.install(LOCAL, MPICH, '--sanity-check-only')
    module.unlink()
    machine.install(LOCAL, MPICH, '--module-only')
    assert module.read_text() == text and library.stat().st_mtime_ns == before
    machine.install(LOCAL, MPICH, '--rebuild')
    assert module.read_text() == text and library.stat().st_mtime_ns != before


# --- what goes wrong, and what to do

# not where it is installed: a failed --rebuild takes the module away
ELSEWHERE = '--try-amend=versionsuffix=-elsewhere'


def refused(machine, *words, args=(MPICH, ELSEWHERE)):
    done = machine.install(LOCAL, *args, check=False)
    assert done.returncode != 0
    for word in words:
        assert word in said(done)


def test_ranks_that_fail(machine):
    """The stand-in cannot reduce: what it printed is shown."""
    done = machine.eb(LOCAL, MPICH, '--sanity-check-only', check=False)
    assert done.returncode != 0 and 'An all_reduce of slingmpi on 2 ranks failed' in said(done)
    assert 'add --disable-mpi-tests. The output is:' in said(done)


def test_versions_are_the_bundles():
    version, = re.findall('^version = "(.*)"', (ROOT / 'slingmpi/pyproject.toml').read_text(), re.M)
    for path in (ROOT / 'easyconfigs').rglob('slingmpi-*.eb'):
        assert f"version = '{version}'" in path.read_text(), path
        name, version_of, suffix = re.search(r"\('(PyTorch)', '(.*)', '(.*)'\)", path.read_text()).groups()
        assert list((ROOT / 'easyconfigs').rglob(f'{name}-{version_of}{suffix}.eb')), path
        assert path.name == f'slingmpi-{version}-{name}-{version_of}{suffix}.eb'


# --- Cray MPICH

@pytest.fixture(scope='module', params=[DERECHO, FRONTIER])
def cray(request, tmp_path_factory, lmod):
    site, version, modules = {
        DERECHO: (derecho.Derecho, '2.10.0+cu129', DERECHO_MODULES),
        FRONTIER: (frontier.Frontier, '2.10.0+rocm7.1', ['PrgEnv-gnu/8.7.0', 'cpe/26.03', 'rocm/7.1.1',
                                                         'craype-accel-amd-gfx90a'])}[request.param]
    module = request.param[len('slingmpi-0.1.0-PyTorch-'):-len('.eb')]
    made = Machine(tmp_path_factory.mktemp('cray'), lmod, module, version, site,
                   [f'depends_on("{name}")' for name in modules])
    made.name = request.param
    made.install(made.name)
    return made


def test_cray_mpich_and_gtl(cray):
    kind, mpi = ('cuda', 'libmpi_gnu_123.so.12') if cray.name == DERECHO else ('hsa', 'libmpi_gnu.so.12')
    env = cray.load(cray.name)
    libraries, paths = needs(library_of(cray.root(cray.name)))
    assert sorted(libraries) == sorted([mpi, f'libmpi_gtl_{kind}.so.0'])
    mpich = env['CRAY_MPICH_DIR']
    gtl = pathlib.Path(mpich).parents[2] / 'gtl/lib'
    (how, found), = paths
    assert how == 'RPATH' and set(found.split(':')) == {f'{mpich}/lib', str(gtl)}
    assert env['MPICH_GPU_SUPPORT_ENABLED'] == '1'
    assert env.get('MPICH_OFI_NIC_POLICY') == ('GPU' if cray.name == DERECHO else None)
    built = json.loads((library_of(cray.root(cray.name)).parent / 'built.json').read_text())
    assert built['torch'] == '2.10' and os.path.basename(built['compiler']) == (
        'mpicxx' if cray.name == DERECHO else 'CC')


def test_roles(tmp_path, lmod):
    """The CUDA wheels with the modules that a site provides."""
    made = Machine(tmp_path, lmod, '2.15.0-cuda-13.2', '2.15.0+cu132', derecho.Derecho)
    made.install('slingmpi-0.1.0-PyTorch-2.15.0-cuda-13.2.eb', '--module-only', '--force')
    env = made.load('slingmpi-0.1.0-PyTorch-2.15.0-cuda-13.2.eb')
    assert set(DERECHO_MODULES[:3]) <= set(env['LOADEDMODULES'].split(':'))
    assert 'MPICH_GPU_SUPPORT_ENABLED' not in env


# --- as an extension

def test_extension_of_a_virtual_environment(tmp_path, lmod):
    """As mpi4py: one environment, one module."""
    files = tmp_path / 'files'
    toy = toypytorch.make(tmp_path / 'toy', '2.13.0+cpu')
    packages, = toy.glob('lib/python3*/site-packages')
    version, = re.findall(r'setuptools-([\d.]+)\.dist-info', ' '.join(path.name for path in packages.iterdir()))
    made = [wheels.make_wheel(files, names[0], version, files={
        str(path.relative_to(packages)): path.read_bytes() for name in names
        for path in (packages / name).rglob('*') if path.is_file() and path.suffix})
        for version, *names in [('2.13.0+cpu', 'torch'),
                                (version, 'setuptools', '_distutils_hack', f'setuptools-{version}.dist-info')]]
    easyconfig = tmp_path / 'Tiny-1.0.eb'
    easyconfig.write_text("""easyblock = 'PythonVenv'
name = 'Tiny'
version = '1.0'
homepage = 'https://example.org'
description = 'An environment with MPI'
toolchain = SYSTEM
toolchainopts = {'rpath': False}
sources = ['Tiny-1.0.lock']
checksums = [None]
exts_list = [('slingmpi', '0.1.0', {'nosource': True, 'mpicxx': 'mpicxx.mpich'})]
sanity_check_imports = ['torch']
moduleclass = 'ai'
""")
    easyconfig.with_suffix('.lock').write_text(wheels.lock_text(made))
    eb = EasyBuild(tmp_path / 'eb', lmod)
    env = {'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': str(files), 'PIP_CONFIG_FILE': os.devnull}
    eb(easyconfig, '--disable-mpi-tests', env=env)
    root = eb.prefix / 'software/Tiny/1.0'
    assert needs(library_of(root)) == (['libmpich.so.12'], [])
    run(['patchelf', '--add-needed', 'libmpi.so.40', library_of(root)])
    done = eb(easyconfig, '--disable-mpi-tests', '--sanity-check-only', env=env, check=False)
    assert done.returncode != 0 and 'A process that imports slingmpi must have one MPI, but has 2' in said(done)


# --- in a container

@pytest.fixture(scope='module')
def image(tmp_path_factory, lmod):
    """A small image that is a PyTorch module, with this machine's compilers and MPI in it."""
    if os.path.realpath('/usr/bin/python3') == os.path.realpath('/usr/local/bin/python3'):
        missing('a Python of the distribution')
    path = tmp_path_factory.mktemp('image')
    inside = toypytorch.make(path / 'inside', '2.10.0+rocm7.0')
    made = Machine(path, lmod)
    runtime = images.runtime()
    made.eb.env['PATH'] = f'{runtime}:{made.eb.env["PATH"]}'
    (path / 'sources').mkdir()
    shutil.copy(smallimage.image(runtime), path / 'sources/small.sif')
    easyconfig = smallimage.easyconfig(
        path, 'PyTorch', '2.10.0', versionsuffix='-rocm-7.0-singularity-laif', sources=['small.sif'], checksums=[None],
        bind_paths=['/usr', '/lib/x86_64-linux-gnu', '/etc/alternatives', str(inside), f'{DIR}/quickvenv'],
        container_path=[f'{inside}/bin'])
    made.eb.env['EASYBUILD_SOURCEPATH'] = f'{path}/sources:{made.eb.env["EASYBUILD_SOURCEPATH"]}'
    made.eb(easyconfig)
    made.runtime, made.inside = runtime, inside
    made.pytorch = made.eb.prefix / 'software/PyTorch/2.10.0-rocm-7.0-singularity-laif'
    made.done = made.install(IMAGE, MPICH)
    return made


def test_built_in_the_container(image):
    root, env = image.root(IMAGE), image.load(IMAGE)
    built = json.loads((library_of(root).parent / 'built.json').read_text())
    assert built['torch'] == '2.10' and built['compiler'] == '/usr/bin/mpicxx.mpich'
    assert needs(library_of(root)) == (['libmpich.so.12'], [])
    for variable in ['SINGULARITY_BINDPATH', 'APPTAINER_BINDPATH']:
        assert str(root) in env[variable].split(',')
    env['PATH'] = f'{image.runtime}:{env["PATH"]}'
    code = 'import os, torch, slingmpi, slingmpi._backend; print(slingmpi.__file__, os.environ["APPTAINER_CONTAINER"])'
    for command in [['python'], [f'{image.runtime}/singularity', 'exec', env['SIFPYTORCH'], 'python']]:
        done = run([*command, '-s', '-c', code], env=env, cwd='/')
        assert done.stdout.split() == [str(library_of(root).parent / '__init__.py'), env['SIFPYTORCH']]
    image.install(IMAGE, MPICH, '--sanity-check-only')      # the container mounts a build directory that is not there


def test_what_the_compiler_says(machine, tmp_path):
    """It is shown, and not pip's own words around it."""
    wrapper = tmp_path / 'mpicxx'
    wrapper.write_text('#!/bin/sh\nexec mpicxx.mpich -DPyMODINIT_FUNC=nonsense "$@"\n')
    wrapper.chmod(0o755)
    refused(machine, 'Building slingmpi failed: ', ': error: ', 'does not name a type', 'All output is in /',
            args=[f'--try-amend=mpicxx={wrapper}', ELSEWHERE])


def test_old_pytorch(machine):
    """What setup.py says."""
    version, = machine.pytorch.glob('lib/python3*/site-packages/torch/__init__.py')
    text = version.read_text()
    version.write_text(text.replace("'2.13.0+cpu'", "'2.5.1+cpu'"))
    try:
        refused(machine, 'Building slingmpi failed:', 'slingmpi is for PyTorch 2.6 and newer, and this is 2.5.1+cpu')
    finally:
        version.write_text(text)
