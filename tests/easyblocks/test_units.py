# SPDX-License-Identifier: GPL-2.0-only
"""Parts of easyblocks and of slingtorch/install without `eb`: what goes wrong too rarely for an installation of its own."""
import errno
import importlib
import json
import os
import subprocess
import types

import pytest
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.config import Singleton, init_build_options

import testbed
from slingtorch.install import container_image, container_runtime, environment_image, process


@pytest.fixture(autouse=True)
def defaults():
    """EasyBuild's options, as far as its functions ask for them."""
    init_build_options()
    yield
    Singleton._instances.clear()


@pytest.fixture(scope='module')
def block():
    """A function: the module of an easyblock."""
    for name in ('easybuild.easyblocks', 'easybuild.easyblocks.generic'):
        importlib.import_module(name).__path__.append(str(testbed.ROOT / name.replace('easybuild.', '').replace('.', '/')))
    return lambda name: importlib.import_module('easybuild.easyblocks.' + name)


class Config(dict):
    """Parameters of an easyconfig without dependencies."""

    parallel = 64

    def dependencies(self):
        return []


def instance_of(cls, **attributes):
    """An easyblock that knows nothing else; it appends to `said` what it says."""
    made = object.__new__(cls)
    made.__dict__.update({'dry_run': False, 'is_extension': False, 'said': [], 'log': types.SimpleNamespace(info=print),
                          'cfg': Config(name='PyTorch', version='1.0'), **attributes})
    made.warn = made.say = lambda text, *args: made.said.append(text % args)
    return made


def fails(number):
    """A function that ends in this OSError."""
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))
    return fail


# --- an old installation

@pytest.mark.parametrize('restored, words', [(True, 'The old installation cannot be moved aside for the new one: .*You need'),
                                             (False, 'A previous installation is left in .*Their owner')])
def test_old_installation_that_may_not_be_moved(block, monkeypatch, tmp_path, restored, words):
    keeps = block('generic.keepsprevious')
    made = instance_of(keeps.KeepsPrevious, installdir=str(tmp_path / 'root'), mod_filepath=str(tmp_path / '1.lua'))
    monkeypatch.setattr(keeps.KeepsPrevious, 'will_set_aside', lambda _: True)
    (tmp_path / 'root').mkdir()
    (tmp_path / '1.lua').write_text('module')
    rename = os.rename

    def may_not(source, target):
        if source == made.installdir or not restored and source != made.mod_filepath:
            raise PermissionError(errno.EACCES, 'Permission denied')
        rename(source, target)
    monkeypatch.setattr(keeps.os, 'rename', may_not)
    with pytest.raises(EasyBuildError, match=words):
        made.make_installdir()
    assert (tmp_path / '1.lua').exists() is restored


# --- environments

def test_activation_script_of_another_form(block, tmp_path):
    made = instance_of(block('generic.pythonenvironment').PythonEnvironment, installdir=str(tmp_path))
    (tmp_path / 'bin').mkdir()
    script = tmp_path / 'bin/activate'
    for text, right in (('deactivate () {\n}\n', True), ('deactivate() {\n}\n', False), (2 * 'deactivate () {\n}\n', False)):
        script.write_text(text)
        words = str(tmp_path), 'activate', '. more\n', 'deactivate () {\n', '    . less\n'
        if right:
            made.add_to_script(*words)
            made.add_to_script(*words)
            assert script.read_text() == 'deactivate () {\n    . less\n}\n\n. more\n'
        else:
            with pytest.raises(EasyBuildError, match='bin/activate has an unknown form: it has no function deactivate'):
                made.add_to_script(*words)


def test_disk_too_full_for_what_pip_says(block, tmp_path):
    made = instance_of(block('generic.pythonvenv').PythonVenv, installdir=str(tmp_path / 'root'), find_python=fails(errno.ENOSPC))
    made.cfg.update(versionsuffix='', system_site_packages=False)
    (tmp_path / 'root').mkdir()
    with pytest.raises(EasyBuildError, match='Installing to .*/root failed: .*No space left on device. Free some space'):
        made.install_step()
    assert not (tmp_path / 'root').exists()


def test_venv_that_cannot_be_made(block, monkeypatch):
    venv = block('generic.pythonvenv')
    for output, hint in (('ensurepip is not available', '. On Debian and Ubuntu, install the package python3-venv:'), ('x', ':')):
        monkeypatch.setattr(venv, 'run', lambda *_, output=output: types.SimpleNamespace(exit_code=1, output=output))
        with pytest.raises(EasyBuildError, match=f'virtual environment with python3 failed{hint}\n{output}'):
            instance_of(venv.PythonVenv).make_venv('python3', '/nowhere')


# --- an environment as one image

def test_image_that_fails_leaves_nothing(monkeypatch, tmp_path):
    image, tree = tmp_path / environment_image.IMAGE, tmp_path / environment_image.WORK_DIR

    def half(*_):
        image.write_text('half')
        tree.mkdir()
    monkeypatch.setattr(environment_image, 'print_msg', print)
    monkeypatch.setattr(environment_image, 'make_tree', half)
    for name in ('relocate_run_paths', 'check_tree'):
        monkeypatch.setattr(environment_image, name, lambda *_: None)
    monkeypatch.setattr(environment_image, 'run', lambda *_: types.SimpleNamespace(exit_code=1, output='no zstd', cmd='c'))
    with pytest.raises(EasyBuildError, match='(?s)failed: mksquashfs failed. If the disk is full, .*no zstd'):
        environment_image.make_image(str(tmp_path), 2, [])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EasyBuildError, match='does not run from another directory, so it cannot be packed'):
        environment_image.run_tree_python(str(tree), 'pass')


def test_what_an_image_lacks_is_said(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(environment_image, 'run_tree_python', lambda *_: [
        f'{tmp_path}/lib', '/lib/x.so', '/opt/own/lib/liby.so', '3 words'])
    monkeypatch.setattr(environment_image, 'print_warning', lambda text, *args: said.append(text % args))
    environment_image.check_tree(str(tmp_path), [])
    assert said == ['The image of the environment is incomplete: jobs will also read /opt/own/lib/liby.so']


def test_files_of_another_file_system_are_copied(monkeypatch, tmp_path):
    monkeypatch.setattr(environment_image.os, 'link', fails(errno.EXDEV))
    (tmp_path / 'a').write_text('text')
    environment_image.link_or_copy(str(tmp_path / 'a'), str(tmp_path / 'b'))
    assert (tmp_path / 'b').read_text() == 'text'


def test_libraries_of_the_installation_find_each_other_in_the_image(monkeypatch, tmp_path):
    def run(*words):
        return types.SimpleNamespace(output=subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout)
    installdir, tree = f'{tmp_path}/installation', tmp_path / 'tree'
    (tree / 'lib/package').mkdir(parents=True)
    path = tree / 'lib/package/libuse.so'
    flags = f'-Wl,-rpath,{installdir}/lib:{installdir}-other:/opt'
    subprocess.run(['gcc', '-shared', '-o', path, '-x', 'c', '/dev/null', flags], check=True)
    for module in (environment_image, process):
        monkeypatch.setattr(module, 'run', run)
    environment_image.relocate_run_paths(str(tree), installdir)
    assert process.dynamic_entries(str(path), 'RPATH|RUNPATH') == [f'$ORIGIN/..:{installdir}-other:/opt']


# --- images

def test_image_that_shrinks_while_it_is_copied(monkeypatch, tmp_path):
    (tmp_path / 'a').write_text('abc')
    monkeypatch.setattr(container_image.os.path, 'getsize', lambda _: 9)
    with pytest.raises(OSError, match='only 3 of 9 bytes could be read'):
        container_image.transfer_image('copy', str(tmp_path / 'a'), str(tmp_path / 'b'))


def test_checksum_that_the_user_ignores(monkeypatch):
    said = []
    monkeypatch.setattr(container_image, 'verify_checksum', lambda *_, **__: False)
    monkeypatch.setattr(container_image, 'build_option', lambda name: name == 'ignore_checksums')
    monkeypatch.setattr(container_image, 'print_warning', said.append)
    container_image.check_digest('a.sif', '1', '2')
    assert said == ['Ignoring that the checksum of a.sif differs from that in the easyconfig']


@pytest.mark.parametrize('number, words', [
    (errno.EACCES, r"made with --read-only-installdir, .*'chmod -R u\+w /inst'"), (errno.EPERM, 'ask the owner'),
    (errno.EDQUOT, 'Free all of its bytes .*image_transfer'), (errno.EIO, 'Input/output error. Fix that and run this again')])
def test_image_that_cannot_be_transferred(number, words):
    err = container_image.explain_error(OSError(number, os.strerror(number)), 'docker://x', '/inst')
    with pytest.raises(EasyBuildError, match=words + '.* The installation is unchanged'):
        raise err


@pytest.mark.parametrize('output, words', [
    ('FATAL: while mounting: /dev/fuse: permission denied', 'it needs squashfuse and read'), ('something else', None),
    ('ERROR: Failed to create user namespace', 'may not create user namespaces')])
def test_what_keeps_a_container_from_running(block, output, words):
    made = instance_of(block('generic.singularity').Singularity)
    made.inside = lambda *_: types.SimpleNamespace(exit_code=255, output='first\n' + output)
    said = made.container_problem('true')
    assert said.endswith(f'({output})') and words in said if words else said == f'a container cannot be started:\nfirst\n{output}'


def test_definition_that_cannot_be_read(monkeypatch):
    monkeypatch.setattr(container_runtime, 'run_runtime', lambda *_, **__: types.SimpleNamespace(exit_code=1, stderr='damaged'))
    with pytest.raises(EasyBuildError, match='cannot read the definition inside the image: damaged'):
        container_runtime.definition_of('a.sif')


def test_image_of_a_library_with_another_digest(block, monkeypatch, tmp_path):
    """Its runtime does not compare it."""
    singularity, digest = block('generic.singularity'), 'a' * 64
    made = instance_of(singularity.Singularity, installdir=str(tmp_path), pull=lambda path: open(path, 'w').close())
    made.cfg.update(image_address=f'library://x/y:sha256.{digest}', sources=[], versionsuffix='')
    monkeypatch.setattr(singularity, 'check_sif', print)
    monkeypatch.setattr(singularity, 'check_digest', print)
    monkeypatch.setattr(singularity, 'sha256', lambda _: digest)
    made.stage_image('pull', made.cfg['image_address'])
    assert made.image_facts['sha256'] == digest
    os.remove(made.unfinished)
    monkeypatch.setattr(singularity, 'sha256', lambda _: 'b' * 64)
    with pytest.raises(EasyBuildError, match='has the wrong sha256 bbb.* Do not use it'):
        made.stage_image('pull', made.cfg['image_address'])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('works', [True, False])
def test_packages_of_the_user_on_another_image(block, tmp_path, works):
    made = instance_of(block('generic.singularity').Singularity, installdir=str(tmp_path))
    made.cfg.update(preset_venv='mine')
    made.cfg.filename = lambda: 'A.eb'
    (tmp_path / 'user-software/venv/mine').mkdir(parents=True)
    made.container_problem = lambda *words: '' if works or words == ('true',) else 'no python3.10'
    made.make_preset_venv(str(tmp_path / 'user-software'))
    assert [text.partition('(')[0] for text in made.said] == [] if works else [
        f'The virtual environment {tmp_path}/user-software/venv/mine was kept, but does not work with this image ']


# --- PyTorch and its MPI

@pytest.mark.parametrize('memory, jobs, warns', [(40, 10, False), (1000, 64, False), (3, 1, True), (None, 1, True)])
def test_jobs_that_memory_allows(block, monkeypatch, memory, jobs, warns):
    cray = block('pytorch_cray')
    monkeypatch.setattr(cray.Machine, 'free_memory', lambda _: (memory and memory << 30, ''))
    made = instance_of(cray.EB_PyTorch_Cray)
    made.limit_jobs()
    assert made.cfg.parallel == jobs and bool(made.said) is warns


def test_torchvision_for_rocm(block, monkeypatch):
    cray = block('pytorch_cray')
    monkeypatch.setattr(cray, 'archs', lambda _, name: {'amdgcn_capabilities': ['gfx90a', 'gfx942']}[name])
    made = instance_of(cray.EB_PyTorch_Cray, ldflags='-L', mpi_compilers=['mpicc'])
    made.root = lambda name: name == 'ROCm'
    assert made.extension_variables() == {'LDFLAGS': '-L', 'MPICC': 'mpicc', 'FORCE_CUDA': '1',
                                          'PYTORCH_ROCM_ARCH': 'gfx90a;gfx942'}


def test_pytorch_that_cannot_be_imported(block, monkeypatch):
    cray, horovod = block('pytorch_cray'), block('horovod')
    for module in (cray, horovod):
        monkeypatch.setattr(module, 'probe_pytorch', lambda *_: 'PyTorch cannot be imported: x')
    monkeypatch.setattr(cray.RunScripts, 'sanity_check_step', lambda self, **_: self.sanity_check_fail_msgs)
    made = instance_of(cray.EB_PyTorch_Cray, sanity_check_module_loaded=True, sanity_check_fail_msgs=[], pylibdir='lib',
                       installdir='/nowhere')
    made.cfg.update(environment_image=False)
    made.cfg.get_ref = lambda _: []
    assert made.sanity_check_step() == ['PyTorch cannot be imported: x']
    made = instance_of(horovod.EB_Horovod, master=types.SimpleNamespace(own_python='python'))
    with pytest.raises(EasyBuildError, match='Horovod needs the PyTorch of the environment: PyTorch cannot be imported: x'):
        made.check_pytorch()


def test_slingmpi_that_is_not_right(block, monkeypatch, tmp_path):
    module = block('slingmpi')
    made = instance_of(module.EB_slingmpi, installdir=str(tmp_path), pylibdir='lib', python_cmd='python')
    monkeypatch.setattr(module, 'get_software_root', lambda _: None)
    path = tmp_path / 'lib/slingmpi/built.json'
    assert made.check_build() == [f'There is no {path}']
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({'torch': '2.13', 'mpi': 'mpich 4', 'compiler': 'CC'}))
    monkeypatch.setattr(module, 'probe_pytorch', lambda *_: 'it crashed')
    assert made.check_build() == ['slingmpi, built for PyTorch 2.13 and mpich 4, does not load: it crashed']
    found = {'version': '2.13.0', 'import_errors': [], 'libraries': ['/m/libmpi.so.12']}
    monkeypatch.setattr(module, 'probe_pytorch', lambda *_: found)
    monkeypatch.setattr(module, 'mpi_library', lambda _: '/m/libmpi.so.12')
    monkeypatch.setattr(module, 'gtl_library', lambda _: '/g/libmpi_gtl_cuda.so')
    assert [text[:52] for text in made.check_build()] == ['The GPU Transport Layer /g/libmpi_gtl_cuda.so is not']
    # without a dependency PyTorch the next check says so
    asked = []
    monkeypatch.setattr(module.PythonPackage, 'prepare_python', lambda self: asked.append(self))
    made.prepare_python()
    assert asked == [made]


@pytest.mark.parametrize('code, maps, mpicc, expected, says', [
    (0, '7f0-7f1 r-xp 0 0 0 /m/libmpi.so.12', 'mpicc', '/m/libmpi.so.12', ''),
    (0, '7f0-7f1 r-xp 0 0 0 /o/libmpi.so.40', 'mpicc', '/m/libmpi.so.12', 'mpi4py uses /o/libmpi.so.40, but should have been'),
    (0, '', 'mpicc', '/m/libmpi.so.12', 'mpi4py uses no MPI, but should have been built with mpicc, whose MPI is /m/'),
    (0, '', 'mpicc', None, 'It is unknown which MPI mpi4py should be linked with: mpicc links no known MPI'),
    (0, '', None, None, "It is unknown which MPI mpi4py should be linked with: MPI's compiler is not in $PATH"),
    (1, 'ImportError: x', 'mpicc', None, 'mpi4py cannot be imported: ImportError: x')])
def test_mpi_of_an_extension(monkeypatch, code, maps, mpicc, expected, says):
    monkeypatch.setattr(process, 'run_elsewhere', lambda *_: types.SimpleNamespace(exit_code=code, output=maps))
    monkeypatch.setattr(process, 'mpi_library', lambda _: expected)
    found = process.check_mpi('python', mpicc, 'mpi4py', 'import mpi4py.MPI')
    assert found.startswith(says) and bool(found) is bool(says)


def test_nccl_that_pytorch_was_built_without(monkeypatch):
    monkeypatch.setattr(process, 'needed_libraries', lambda _: ['libmpi.so.12'])
    found = {'import_errors': [], 'libraries': ['/m/libmpi.so.12', '/p/libtorch.so', '/n/libnccl.so.2'], 'file': '/p/torch',
             'version': '2', 'entry_points': ['torchrun'], 'config': '', 'mpi': True, 'nccl': False, 'nccl_version': None}
    expected = {'prefix': '/p', 'version': '2', 'settings': [], 'mpi': '/m/libmpi.so.12', 'gtl': None, 'nccl': '/n',
                'nccl_version': '2.21.5', 'plugin': None}
    assert process.check_linkage(found, expected) == ['torch.distributed has no NCCL']
    assert process.check_linkage({**found, 'nccl': True}, expected) == []
