# SPDX-License-Identifier: GPL-2.0-only
"""PyTorch from wheels on emulated sites: fetched, locked, installed, mpi4py from source, loaded, in ranks.

Frontier's easyconfigs as they are shipped, by one `eb`, from the indexes' own addresses, which have stand-ins.
"""
import re
import subprocess

import pytest

from slingtorch import sites
from testbed import ROOT, derecho, internet, run, said, sitewheels, wheels
from testbed.sitewheels import Wheels

TODAY, OLD, DERECHO = EASYCONFIGS = [
    'PyTorch-2.10.0-frontier-rocm-7.1.1.eb', 'PyTorch-2.2.2-frontier-rocm-5.7.1.eb', 'PyTorch-2.10.0-derecho-cu129.eb']
WANTED = dict(zip(EASYCONFIGS, [
    ['PrgEnv-gnu/8.7.0', 'cpe/26.03', 'rocm/7.1.1', 'craype-accel-amd-gfx90a'],
    ['PrgEnv-gnu/8.5.0', 'rocm/5.7.1', 'craype-accel-amd-gfx90a'],
    ['ncarenv/25.10', 'gcc/14.3.0', sites.load('derecho', {}).generations['25.10']['mpi'].split()[0], 'cuda/12.9.0']]))
# in one write, which the launcher's pipe keeps whole
RANK = ('import os, sys, torch, mpi4py; sys.stdout.write("rank {} of {} {} {}\\n".format('
        'os.environ["RANK"], os.environ["WORLD_SIZE"], torch.__version__, torch.__file__))')
# what OLCF's page of 2026-07 says (olcf/olcf-user-docs@2745903), with NCCL_NET left to the runscript
FRONTIER = {'FI_CXI_DEFAULT_CQ_SIZE': '131072', 'FI_CXI_DEFAULT_TX_SIZE': '2048', 'FI_CXI_DISABLE_HOST_REGISTER': '1',
            'FI_CXI_RX_MATCH_MODE': 'hybrid', 'FI_MR_CACHE_MONITOR': 'kdreg2', 'HSA_FORCE_FINE_GRAIN_PCIE': '1',
            'NCCL_CROSS_NIC': '1', 'NCCL_NET_GDR_LEVEL': 'PHB', 'NCCL_SOCKET_IFNAME': 'hsn0,hsn1,hsn2,hsn3',
            'PYTHONNOUSERSITE': '1', 'SLINGTORCH_MULTINODE_NCCL_NET': 'AWS Libfabric', 'TORCH_DIST_USE_NCCL2': '0'}


@pytest.fixture(scope='module')
def install(tmp_path_factory, lmod):
    """A function: the site on which this easyconfig is installed, once."""
    made = {}

    def install(name):
        if name not in made:
            kind = Wheels if name == DERECHO else sitewheels.Shipped
            made[name] = kind(tmp_path_factory.mktemp('wheels'), lmod, name)
            made[name].install()
        return made[name]

    yield install
    for one in made.values():
        if isinstance(one, sitewheels.Shipped):
            one.internet.stop()


@pytest.fixture(params=EASYCONFIGS)
def installed(request, install):
    return install(request.param)


def needs(library):
    """Names of libraries and RPATH that a library asks for."""
    shown = run(['readelf', '-d', library]).stdout
    return re.findall(r'\(NEEDED\).*\[((?!libc\.).*)\]', shown), re.findall(r'\((RPATH|RUNPATH)\).*\[(.*)\]', shown)


def test_environment(installed):
    """The modules of the site in the order of the easyconfig's roles, and the site's values; the interpreter's module is not needed."""
    env = installed.load()
    loaded = env['LOADEDMODULES'].split(':')
    wanted = WANTED[installed.name]
    assert [name for name in loaded if name in wanted] == wanted
    assert not any('CondaPython' in name for name in loaded)
    values = {key: env.get(key) for key in FRONTIER}
    if installed.site == 'frontier':
        assert values == FRONTIER
    assert values['SLINGTORCH_MULTINODE_NCCL_NET'] == 'AWS Libfabric' and values['PYTHONNOUSERSITE'] == '1'
    assert 'FI_CXI_RDZV_PROTO' not in env and 'NCCL_NET' not in env
    version = re.search(r'torch==\S+(\+[\w.]+)', installed.text).group(1)
    found = subprocess.run(['python', '-c', 'import torch, sys; print(torch.__version__, sys.prefix)'], env=env,
                           stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert found == [installed.name.split('-')[1] + version, str(installed.root)]


def test_libraries_of_a_cpe_that_is_not_the_default(install, lmod):
    """OLCF: LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH (systems/frontier_user_guide.rst)."""
    line = re.search('^.*CRAY_LD_LIBRARY_PATH.*', (ROOT / 'examples/frontier/train.sbatch').read_text(), re.M).group()
    script = f'export LD_LIBRARY_PATH=/b; module load PrgEnv-gnu/8.7.0 cpe/26.03; {line}; echo $LD_LIBRARY_PATH'
    tree = install(TODAY).tree
    mpich = tree.mpich.parents[2]
    said = lmod.bash(script, modulepath=[tree.modulepath]).stdout
    assert said.split()[-1] == f'{mpich}/ofi/gnu/12.3/lib:{mpich}/gtl/lib:/b'
    assert lmod.bash(f'unset LD_LIBRARY_PATH; {line}; echo "<${{LD_LIBRARY_PATH-none}}>"').stdout.strip() == '<none>'


def test_mpi4py_is_linked_with_the_sites_mpi(installed):
    """By its own path, and without the GPU Transport Layer: the accelerator's modules were not loaded."""
    library = next(installed.root.glob('lib/python3*/site-packages/mpi4py/libuse.so'))
    mpich = installed.load()['CRAY_MPICH_DIR']
    name = 'libmpi_gnu.so.12' if installed.site == 'frontier' else 'libmpi_gnu_123.so.12'
    assert needs(library) == ([name], [('RPATH', f'{mpich}/lib')])


@pytest.mark.parametrize('name', [TODAY, OLD])
def test_one_eb_and_a_rank(install, name, mpich, remark):
    """Also where not all hashes are public, and the lock file is made on the way."""
    frontier = install(name)
    shipped = next((ROOT / 'easyconfigs').rglob(name))
    python, = re.findall(r"^python_versions = \['(.*)'\]", shipped.read_text(), re.M)
    if python != frontier.python:
        remark(f'{name}: tried with Python {frontier.python}, since this machine has no {python}')
    for copy in [frontier.easyconfig] + [frontier.lock_file] * (name == TODAY):
        text, own = copy.read_text(), shipped.with_suffix(copy.suffix).read_text()
        text = re.sub(rf"^(# python: |python_versions = \[')({re.escape(frontier.python)})", rf'\g<1>{python}', text,
                      flags=re.M)
        assert text != own and sitewheels.masked(text) == sitewheels.masked(own)

    done = frontier.done
    assert said(done).count('COMPLETED') == 2, 'the interpreter and PyTorch'
    asked = frontier.internet.asked
    index = 'https://download.pytorch.org/whl/rocm' + ('7.1' if name == TODAY else '5.7')
    torch, = [wheel.name for wheel in frontier.wheels if wheel.name.startswith('torch-')]
    assert asked.count(f'{index}/torch/{torch}') >= 1
    assert {re.match('https://([^/]*)', address).group(1) for address in asked} == set(internet.HOSTS)
    made = frontier.eb.prefix / f'sources/p/PyTorch/{name[:-3]}.lock'
    assert made.exists() == (name == OLD) == (f'in {made}. The next installation is the same' in said(done))
    locked = (frontier.root / 'packages.lock').read_text()
    assert locked == (made if name == OLD else frontier.lock_file).read_text()
    assert all(f'sha256:{wheels.sha256(wheel)}' in locked for wheel in frontier.wheels if 'numpy-2.5' not in wheel.name
               or name == TODAY)

    lines = mpich.run(2, 'conda-python-distributed', '-c', RANK, env=frontier.load()).stdout.splitlines()
    version = torch.split('-')[1]
    assert sorted(line.rpartition('/lib/')[0] for line in lines) == [
        f'rank {rank} of 2 {version} {frontier.root}' for rank in range(2)]


def test_gpu_aware_mpi_is_linked_where_the_modules_stay(install, lmod):
    """As mpi4py's own build links then, and a build without MPI, as a wheel of it would be, is noticed."""
    today = install(TODAY)
    library = next(today.root.glob('lib/python3*/site-packages/mpi4py/libuse.so'))
    env = lmod.load(*WANTED[TODAY], modulepath=[today.tree.modulepath])
    run_path = f'-Wl,--disable-new-dtags,-rpath,{env["CRAY_MPICH_DIR"]}/lib'
    run(['cc', '-shared', '-fPIC', '-o', library, run_path, '-xc', '-', '-xnone'], env=env, input=derecho.USE_MPI)
    assert 'libmpi_gtl_hsa.so.0' in needs(library)[0]
    check = [today.easyconfig, '--sanity-check-only']
    today.eb(*check)
    derecho.shared_library(library, source='int use(void) { return 0; }')
    done = today.eb(*check, check=False)
    assert done.returncode != 0 and 'mpi4py uses no MPI, but should have been built with' in said(done)
