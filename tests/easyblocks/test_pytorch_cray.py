# SPDX-License-Identifier: GPL-2.0-only
"""EB_PyTorch_Cray through real `eb` on the emulated Derecho: real gcc, MPICH, Lmod and pip, and a toy PyTorch."""
import json
import os
import re
import shutil

import pytest

from testbed import ROOT, derecho, missing, run, said as words

NAME = 'PyTorch-2.4.0-derecho-cray-mpich.eb'
MODULE = 'PyTorch/2.4.0-derecho-cray-mpich'


class Site(derecho.Site):
    """Where PyTorch is installed."""

    def __init__(self, path, lmod):
        super().__init__(path, lmod)
        self.root = self.eb.prefix / 'software' / MODULE

    def __call__(self, *args, easyconfig=NAME, **kwargs):
        """Install; sources are a toy's, so that checksums are not asked for."""
        return self.eb(easyconfig, '--ignore-checksums', self.sourcepath, *args, **kwargs)


@pytest.fixture(scope='module')
def installed(tmp_path_factory, lmod):
    """The toy, installed by the easyconfig of the bundle."""
    site = Site(tmp_path_factory.mktemp('derecho'), lmod)
    site.sources.write('2.4.0')
    site.done = site()
    site.built = json.loads(next(site.root.glob('lib/python3*/site-packages/torch/environment.json')).read_text())
    return site


def test_options_reach_the_build(installed):
    """All of them: test_pytorch_cray_input.py."""
    environ = installed.built['environ']
    assert [environ[name] for name in ('USE_MPI', 'USE_SYSTEM_NCCL', 'PYTORCH_BUILD_VERSION', 'TORCH_CUDA_ARCH_LIST')] == [
        '1', '1', '2.4.0+derecho.gcc.12.2.0.cray.mpich.8.1.27', '8.0']
    assert f'set(MPI_C_COMPILER "{installed.mpich}/bin/mpicc" CACHE FILEPATH "")' in installed.built['preset']


def test_libraries_hold_the_transport_layer(installed):
    library = next(installed.root.glob('lib/python3*/site-packages/torch/lib/libtorch_cpu.so'))
    dynamic = run(['readelf', '-d', library]).stdout
    needed = re.findall(r'NEEDED.*\[(.*)\]', dynamic)
    assert needed[0] == 'libmpi_gtl_cuda.so.0' and 'libmpi_gnu_91.so.12' in needed
    assert '(RPATH)' in dynamic and 'RUNPATH' not in dynamic and '/gtl/lib' in dynamic and '/stubs' not in dynamic


def test_module_gives_the_environment_of_derecho(installed, lmod):
    """The variables that NCAR's own activation script sets, as far as the site file takes them over."""
    env = lmod.load(MODULE, modulepath=[installed.eb.modulepath, installed.derecho.modulepath])
    own = 'MPICH|FI|NCCL|CUDA_VISIBLE|SLINGTORCH_[GM]|RUNSCRIPTS|CONDA_PREFIX|PYTHONNO|PYTHONPATH'
    assert {name: value for name, value in env.items() if re.match(own, name)} == {
        'CONDA_PREFIX': str(installed.root), 'FI_CXI_DEFAULT_CQ_SIZE': '131072', 'FI_CXI_DISABLE_HOST_REGISTER': '1',
        'FI_MR_CACHE_MONITOR': 'userfaultfd', 'MPICH_GPU_SUPPORT_ENABLED': '1', 'MPICH_OFI_NIC_POLICY': 'GPU',
        'NCCL_CROSS_NIC': '1', 'NCCL_SOCKET_IFNAME': 'hsn', 'PYTHONNOUSERSITE': '1',
        'RUNSCRIPTS': f'{installed.root}/runscripts', 'RUNSCRIPTSPYTORCH': f'{installed.root}/runscripts',
        'SLINGTORCH_MULTINODE_NCCL_NET': 'AWS Libfabric',
    }
    loaded = env['LOADEDMODULES'].split(':')
    assert loaded[:7] == ['ncarenv/23.09', 'gcc/12.2.0', 'cray-mpich/8.1.27', 'cuda/12.2.1', 'cudnn/8.8.1.3-12',
                          'mkl/2024.0.0', 'conda/latest']
    assert f'{installed.plugin}/lib' in env['LD_LIBRARY_PATH'].split(':')
    assert env['PATH'].split(':')[:2] == [f'{installed.root}/bin', f'{installed.root}/runscripts']
    assert not {'CPATH', 'PKG_CONFIG_PATH'}.intersection(env)


def test_activating_gives_the_same_and_takes_it_back(installed, lmod):
    """As conda does it: it reads the scripts in etc/conda."""
    names = ['FI_MR_CACHE_MONITOR', 'MPICH_GPU_SUPPORT_ENABLED', 'NCCL_SOCKET_IFNAME', 'RUNSCRIPTS',
             'SLINGTORCH_MULTINODE_NCCL_NET']
    show = ' '.join(f'"${{{name}-unset}}"' for name in names)
    directory = installed.root / 'etc/conda'
    script = f"""
        export NCCL_SOCKET_IFNAME=eth7 LD_LIBRARY_PATH=/own
        . {directory}/activate.d/slingtorch.sh; . {directory}/activate.d/slingtorch.sh
        printf '%s\\n' {show} "$LD_LIBRARY_PATH"
        . {directory}/deactivate.d/slingtorch.sh
        printf '%s\\n' {show} "$LD_LIBRARY_PATH" "$(env | grep -c SLINGTORCH)"
    """
    env = lmod.load(MODULE, modulepath=[installed.eb.modulepath, installed.derecho.modulepath])
    done = run(['bash', '--noprofile', '--norc', '-euc', script], env={'PATH': '/usr/bin:/bin'})
    assert done.stdout.splitlines() == [
        *[env[name] for name in names], f'{installed.nccl}/lib:{installed.plugin}/lib:/own',
        'unset', 'unset', 'eth7', 'unset', 'unset', '/own', '0']


def test_extensions_are_in_the_same_environment(installed):
    """Built with the environment's own Python, for its MPI with the transport layer, and for its GPUs."""
    environ = installed.built['environ']
    for name in ('mpi4py', 'torchvision'):
        built = json.loads(next(installed.root.glob(f'lib/python3*/site-packages/{name}/built.json')).read_text())
        assert built['python'].startswith(f'{installed.root}/bin/python')
        assert {key: built['environ'][key] for key in ('LDFLAGS', 'MPICC', 'FORCE_CUDA', 'TORCH_CUDA_ARCH_LIST')} == {
            'LDFLAGS': environ['LDFLAGS'], 'MPICC': f'{installed.mpich}/bin/mpicc', 'FORCE_CUDA': '1',
            'TORCH_CUDA_ARCH_LIST': '8.0'}
        # what is for PyTorch alone
        assert 'USE_CUSPARSELT' not in built['environ'] and 'PYTORCH_BUILD_VERSION' not in built['environ']
    # can be loaded into a process that has neither MPI nor CUDA yet
    library = next(installed.root.glob('lib/python3*/site-packages/mpi4py/libuse.so'))
    loaded = run(['ldd', library], env={'PATH': '/usr/bin:/bin'}).stdout
    assert 'libmpi_gtl_cuda.so.0 =>' in loaded and f'=> {installed.mpich}/lib/libmpi_gnu_91.so.12' in loaded
    assert 'not found' not in loaded


@pytest.fixture(scope='module')
def venv(installed):
    """The same without conda: a virtual environment on the machine's own Python, and nothing in it but the toy."""
    path = installed.eb.prefix / 'PyTorch-2.4.0-derecho-venv.eb'
    text = (ROOT / 'easyconfigs/p/PyTorch' / NAME).read_text()
    text = re.sub(r"^extra_packages = \[.*?^\]", "python_packages = []", text, flags=re.M | re.S)
    text = re.sub(r"    \('torchvision'.*?^    }\),\n", '', text, flags=re.M | re.S)
    text = text.replace("'run conda', ", '').replace("'-derecho-cray-mpich'", "'-derecho-venv'")
    path.write_text(text + "modextravars = {'ONLY_HERE': 'yes'}\nenvironment_image = True\n"
                    "gpu_visibility = 'CUDA_VISIBLE_DEVICES'\n")
    installed(easyconfig=str(path))
    return installed.eb.prefix / 'software/PyTorch/2.4.0-derecho-venv'


def test_one_environment_after_the_other(installed, venv):
    """What only the first one sets is gone in the second, and everything afterwards."""
    first = installed.root / 'etc/conda/activate.d/slingtorch.sh'
    script = f"""
        show() {{ printf '%s\\n' "${{ONLY_HERE-unset}} ${{RUNSCRIPTS-unset}} ${{NCCL_SOCKET_IFNAME-unset}} ${{SLINGTORCH_GPU_VISIBILITY-}}"; }}
        export NCCL_SOCKET_IFNAME=eth7
        . {venv}/bin/activate; show
        . {first}; show
        . {venv}/bin/activate; show
        deactivate; show
        env | grep -c SLINGTORCH
    """
    done = run(['bash', '--noprofile', '--norc', '-c', script], env={'PATH': '/usr/bin:/bin'}, check=False)
    assert done.stdout.splitlines() == [
        f'yes {venv}/runscripts hsn CUDA_VISIBLE_DEVICES', f'unset {installed.root}/runscripts hsn ',
        f'yes {venv}/runscripts hsn CUDA_VISIBLE_DEVICES', 'unset unset eth7 ', '0']


def test_environment_as_one_image(installed, venv, lmod, tmp_path):
    """Started from an unpacked image everything is the node's own, but for what belongs to the system: MPI, CUDA."""
    env = lmod.load('PyTorch/2.4.0-derecho-venv', modulepath=[installed.eb.modulepath, installed.derecho.modulepath])
    assert env['SLINGTORCH_ENVIRONMENT_IMAGE'] == f'{venv}/environment.squashfs'
    code = ('import mpi4py, os, sys, torch\n'
            'print(sys.prefix, torch.__file__, mpi4py.__file__, os.environ["VIRTUAL_ENV"], sep="\\n")\n'
            'print(*{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}, sep="\\n")\n')
    done = run([venv / 'runscripts/conda-python-distributed', '--stage', '-c', code],
               env={**env, 'SLINGTORCH_STAGE_DIR': tmp_path, 'TMPDIR': tmp_path})
    assert f'staged {venv}/environment.squashfs to {tmp_path}/' in done.stderr
    paths = done.stdout.splitlines()
    assert not [path for path in paths if path.startswith(str(venv))]
    staged = paths[0]
    assert staged.startswith(str(tmp_path)) and all(path.startswith(staged) for path in paths[:4])
    assert f'{installed.mpich}/lib/libmpi_gnu_91.so.12' in paths


def test_activating_in_another_shell_says_so(installed, venv):
    tcsh = shutil.which('tcsh') or missing('tcsh')
    done = run([tcsh, '-fc', f'set prompt = x; source {venv}/bin/activate.csh; which python'], env={'PATH': '/usr/bin:/bin'})
    assert done.stdout.splitlines()[-1] == f'{venv}/bin/python'
    assert 'activating does not set the variables' in done.stderr and 'module load PyTorch/2.4.0-derecho-venv' in done.stderr
    for shell in ('csh', 'fish'):
        assert f'module load {MODULE}' in (installed.root / f'etc/conda/activate.d/slingtorch.{shell}').read_text()


def test_module_only_renews_what_activating_sets(installed, venv):
    """And adds its lines to the script of the environment once."""
    before = (venv / 'bin/activate').read_text()
    path = installed.eb.prefix / 'PyTorch-2.4.0-derecho-venv.eb'
    path.write_text(path.read_text().replace("'ONLY_HERE': 'yes'", "'ONLY_HERE': 'changed'"))
    installed('--module-only', '--rebuild', easyconfig=str(path))
    done = run(['bash', '-c', f'. {venv}/bin/activate; echo $ONLY_HERE'], env={'PATH': '/usr/bin:/bin'})
    assert done.stdout == 'changed\n'
    assert (venv / 'bin/activate').read_text() == before


def test_sanity_check_only(installed):
    """Also later, without the variables that exist while building; it says what a process is made of."""
    said = installed('--sanity-check-only').stdout
    assert (f'has: PyTorch 2.4.0+derecho.gcc.12.2.0.cray.mpich.8.1.27, MPI {installed.mpich}/lib/libmpi_gnu_91.so.12, '
            'GPU Transport Layer ') in said
    assert f'NCCL {installed.nccl}/lib/libnccl.so' in said


def test_extended_dry_run(installed):
    """It shows all steps, and hides no error."""
    said = installed('-x').stdout
    assert 'ignoring error' not in said and 'Traceback' not in said
    assert '\n  * options depend on the modules: they are unknown until these are loaded\n' in said
    assert f'\n  * a conda environment will be made in {installed.root} with astunparse cmake>=3.27,<4 ' in said
    for step in ('configuring', 'installing', 'sanity checking', 'creating module'):
        assert f'{step}... [DRY RUN]' in said


def test_number_of_jobs_has_its_reason_in_the_log(installed):
    log = next(installed.root.glob('easybuild/*.log')).read_text(errors='replace')
    jobs = re.search(r'(\d+) compile jobs at a time: ([\d.]+) GiB of memory are available, one job may need 4 GiB', log)
    assert int(jobs.group(1)) == int(installed.built['environ']['MAX_JOBS']) <= max(1, float(jobs.group(2)) / 4)


# --- real eb, when it goes wrong

def test_what_goes_wrong_leaves_no_module(tmp_path, lmod):
    """The log tells where; what is fixed installs with the same command.

    When an extension fails, the same command goes on with the extensions: PyTorch is not compiled again unless
    something else has changed.
    """
    site = Site(tmp_path, lmod)
    module, broken = site.eb.modulepath / f'{MODULE}.lua', 'int broken(void) { return missing; }'
    easyconfig = tmp_path / NAME
    text = (ROOT / 'easyconfigs/p/PyTorch' / NAME).read_text()
    text = re.sub(r"    \('torchvision'.*?^    }\),\n", '', text, flags=re.M | re.S)
    # GPUs have no part in it
    regex = r", '(gpu|cudnn|nccl|nccl_plugin)\??'|^(mpi_gtl|cuda_compute_capabilities) = .*$"
    text = re.sub(regex, '', text, flags=re.M)
    easyconfig.write_text(text)

    def fails(*args):
        done = site(*args, easyconfig=easyconfig, check=False)
        assert done.returncode != 0 and not module.exists()
        return words(done)

    site.sources.write('2.4.0', gloo=derecho.openmpi_library())
    assert 'The process has another MPI' in fails()

    # what failed the sanity check is not kept
    site.sources.write('2.4.0')
    site.sources.write_extension('mpi4py', '4.0.0', source=broken)
    said = fails()
    assert 'keeping PyTorch itself' not in said and 'failed with exit code 1 in extensions step' in said
    assert f'An extension failed. PyTorch itself is complete and stays in {site.root}. Run the same command again to continue' in said

    package = next(site.root.glob('lib/python3*/site-packages/torch'))
    unfinished, = site.root.glob('easybuild/finished*')
    recipe, before = unfinished.read_text(), (package / 'environment.json').stat().st_mtime_ns
    site.sources.write_extension('mpi4py', '4.0.0')
    done = site(easyconfig=easyconfig)
    assert 'keeping PyTorch itself: in an earlier run, only an extension failed' in done.stdout
    assert (package / 'environment.json').stat().st_mtime_ns == before and module.exists()
    # a whole installation is never taken for an unfinished one
    assert not unfinished.exists()

    # a rebuild that fails takes nothing away
    site.sources.write_extension('mpi4py', '4.0.0', source=broken)
    done = site('--rebuild', easyconfig=easyconfig, check=False)
    assert done.returncode != 0 and f'the previous installation in {site.root} is restored' in words(done)
    assert 'complete and stays' not in words(done) and os.listdir(module.parent) == [module.name]
    assert (package / 'environment.json').stat().st_mtime_ns == before

    # another recipe than that of an unfinished one is built from nothing
    module.unlink()
    unfinished.write_text(recipe)
    site.sources.write('2.4.0', source=broken)
    said = fails('--try-amend=version_label=changed')
    assert 'keeping PyTorch itself' not in said and 'PYTORCH_BUILD_VERSION=2.4.0+changed' in said
    assert re.search(r"error: .missing. undeclared", said)
    assert 'FAILED: caffe2/CMakeFiles/torch_cpu.dir/libtorch_cpu.so' in said
    assert ('If a compiler was killed, memory was too small: eb --max-parallel=N. After fixing the error, run the same command '
            'again; ') in said
