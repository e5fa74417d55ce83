# SPDX-License-Identifier: GPL-2.0-only
"""Parts of easyblocks and of slingtorch/install without `eb`: what goes wrong too rarely for an installation."""
import errno
import json
import os
import subprocess
from types import SimpleNamespace

import pytest
from easybuild.framework.easyconfig import CUSTOM
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.config import Singleton, init_build_options

from slingtorch.install import container_image, container_runtime, dependencies, environment_image, nccl, process
from testbed.expected import expected


@pytest.fixture(autouse=True)
def defaults():
    """EasyBuild's options, as far as its functions ask for them."""
    init_build_options()
    yield
    Singleton._instances.clear()


def instance_of(cls, parameters=(), **attributes):
    """An easyblock that knows nothing else; it appends to `said` what it says."""
    made = object.__new__(cls)
    cfg = type('Config', (dict,), {'parallel': 64, 'dependencies': list, 'filename': str, 'get_ref': lambda *_: []})(
        {'name': 'PyTorch', 'version': '1.0', 'versionsuffix': '', 'sources': [], **dict(parameters)})
    made.__dict__.update({'dry_run': False, 'is_extension': False, 'said': [], 'cfg': cfg,
                          'log': SimpleNamespace(info=print), **attributes})
    made.warn = made.say = lambda text, *args: made.said.append(text % args)
    return made


def answers(output='', code=1):
    """A function in the place of run()."""
    return lambda *_, **__: SimpleNamespace(exit_code=code, output=output, stderr=output, cmd='command')


@pytest.mark.parametrize('restored, words', [
    (True, 'The old installation cannot be moved aside for the new one: .*You need'),
    (False, 'A previous installation is left in .*Their owner')])
def test_old_installation_that_may_not_be_moved(load_block, monkeypatch, tmp_path, restored, words):
    keeps, rename = load_block('generic.keepsprevious'), os.rename
    made = instance_of(keeps.KeepsPrevious, installdir=f'{tmp_path}/root', mod_filepath=f'{tmp_path}/1.lua')
    (tmp_path / 'root').mkdir()
    (tmp_path / '1.lua').touch()

    def may_not(source, target):
        if source == made.installdir or not restored and source != made.mod_filepath:
            raise PermissionError(errno.EACCES, 'Permission denied')
        rename(source, target)
    monkeypatch.setattr(keeps.KeepsPrevious, 'will_set_aside', lambda _: True)
    monkeypatch.setattr(keeps.os, 'rename', may_not)
    with pytest.raises(EasyBuildError, match=words):
        made.make_installdir()
    assert (tmp_path / '1.lua').exists() is restored


@pytest.mark.parametrize('output, words', [
    ('ensurepip is not there', 'failed. On Debian and Ubuntu, install the package python3-venv:\n'), ('x', 'failed:\nx')])
def test_environment_that_cannot_be_made(load_block, monkeypatch, output, words):
    monkeypatch.setattr(load_block('generic.pythonvenv'), 'run', answers(output))
    with pytest.raises(EasyBuildError, match='Making a virtual environment with python3 ' + words):
        instance_of(load_block('generic.pythonvenv').PythonVenv).make_venv('python3', '/nowhere')


def test_commands_of_an_image_that_fail(monkeypatch):
    monkeypatch.setattr(environment_image, 'run', answers('no zstd'))
    with pytest.raises(EasyBuildError, match='(?s)image of the environment failed: the remedy.*no zstd'):
        environment_image.run_command(['mksquashfs'], 'the remedy')
    with pytest.raises(EasyBuildError, match='does not run from another directory, so it cannot be packed'):
        environment_image.run_tree_python('/nowhere', 'pass')


def test_files_of_another_file_system_are_copied(monkeypatch, tmp_path):
    monkeypatch.setattr(environment_image.os, 'link', lambda *_: os.stat('/nowhere'))
    (tmp_path / 'a').write_text('text')
    environment_image.link_or_copy(f'{tmp_path}/a', f'{tmp_path}/b')
    assert (tmp_path / 'b').read_text() == 'text'


def test_libraries_of_the_installation_find_each_other_in_the_image(monkeypatch, tmp_path):
    installdir, path = f'{tmp_path}/installation', tmp_path / 'tree/lib/package/libuse.so'
    path.parent.mkdir(parents=True)
    flags = f'-Wl,-rpath,{installdir}/lib:{installdir}-other:/opt'
    subprocess.run(['gcc', '-shared', '-o', path, '-x', 'c', '/dev/null', flags], check=True)
    for module in (environment_image, process):
        monkeypatch.setattr(module, 'run', lambda *words: SimpleNamespace(
            output=subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout))
    environment_image.relocate_run_paths(f'{tmp_path}/tree', installdir)
    assert process.dynamic_entries(str(path), 'RPATH|RUNPATH') == [f'$ORIGIN/..:{installdir}-other:/opt']


@pytest.mark.parametrize('number, words', [
    (errno.EACCES, r"made with --read-only-installdir, .*'chmod -R u\+w /inst'"), (errno.EPERM, 'ask the owner'),
    (errno.EDQUOT, 'Free all of its bytes .*image_transfer'), (errno.EIO, 'error. Fix that and run this again')])
def test_image_that_cannot_be_transferred(number, words):
    with pytest.raises(EasyBuildError, match=words + '.* The installation is unchanged'):
        raise container_image.explain_error(OSError(number, os.strerror(number)), 'docker://x', '/inst')


@pytest.mark.parametrize('output, words', [
    ('FATAL: while mounting: /dev/fuse: permission denied', 'it needs squashfuse and read'),
    ('something else', 'a container cannot be started:\nfirst\nsomething else')])
def test_what_keeps_a_container_from_running(load_block, output, words):
    assert words in instance_of(load_block('generic.singularity').Singularity,
                                inside=answers('first\n' + output)).container_problem('true')


def test_image_of_a_library_with_another_digest(load_block, monkeypatch, tmp_path):
    singularity, address = load_block('generic.singularity'), 'library://x/y:sha256.' + 'a' * 64
    for name, answer in (('check_sif', None), ('check_digest', None), ('sha256', 'b' * 64)):
        monkeypatch.setattr(singularity, name, lambda *_, answer=answer: answer)
    made = instance_of(singularity.Singularity, {'image_address': address}, installdir=str(tmp_path))
    made.pull = lambda path: open(path, 'w').close()
    with pytest.raises(EasyBuildError, match='has the wrong sha256 bbb.* Do not use it'):
        made.stage_image('pull', address)
    assert list(tmp_path.iterdir()) == []


def test_what_a_container_runtime_means():
    """The end of an output, and the cause and remedy of it."""
    outputs = ['no space left on device', 'Disk quota exceeded', 'digest mismatch', '401 unauthorized', 'denied: requested access',
               'manifest unknown', 'dial tcp: no such host', '/dev/fuse: permission denied', 'neither singularity nor apptainer',
               'max_user_namespaces is 0', 'x\n' * 15 + 'other', 'denied\n' + 'x\n' * 15]
    found = {}
    for output in outputs:
        problems = container_runtime.REGISTRY_PROBLEMS + container_runtime.HOST_PROBLEMS
        found.setdefault(container_runtime.meaning(output, problems), []).append(output.splitlines()[-1])
    expected(''.join(f'{", ".join(said)}: {text}\n' for text, said in found.items()), 'container-problems')
    for known in ([container_runtime.FULL], []):
        error = container_runtime.runtime_error('Pulling x', 'a\nno space left', 7, known)
        said = container_runtime.FULL[1] + '.\nIts' if known else 'with status 7. Its'
        assert error.msg.partition(' (at ')[0] == f'Pulling x failed{":" * bool(known)} {said} last lines were:\na\nno space left'


def test_how_a_container_runtime_is_called(monkeypatch, tmp_path):
    """With directories of the user's, and without what he binds into containers."""
    ran = []
    monkeypatch.setattr(container_runtime, 'run', lambda *words, **options: ran.append([words, options]))
    monkeypatch.setattr(container_runtime.os, 'environ', {
        'SINGULARITY_BIND': '/x', 'APPTAINER_BINDPATH': '/x', 'APPTAINER_MOUNT': 'x', 'SINGULARITY_TMPDIR': f'{tmp_path}/tmp', 'A': 'b'})
    monkeypatch.setattr(container_runtime.shutil, 'which', {'apptainer': '/a/apptainer'}.get)
    directories = container_runtime.runtime_directories()
    assert directories == {'CACHEDIR': None, 'TMPDIR': f'{tmp_path}/tmp'} and oct((tmp_path / 'tmp').stat().st_mode) == '0o40700'
    container_runtime.run_runtime('x', ['pull'], directories, hidden=False)
    assert ran == [[('/a/apptainer', 'pull'), {'hidden': False, 'env': {
        'A': 'b', 'SINGULARITY_TMPDIR': f'{tmp_path}/tmp', 'APPTAINER_TMPDIR': f'{tmp_path}/tmp'}}]]
    monkeypatch.setattr(container_runtime.shutil, 'which', {}.get)
    with pytest.raises(EasyBuildError, match='^Neither singularity nor apptainer is in PATH, but building x needs one of them'):
        container_runtime.run_runtime('building x', ['pull'], {})
    (tmp_path / 'file').touch()
    container_runtime.os.environ['APPTAINER_CACHEDIR'] = f'{tmp_path}/file/x'
    with pytest.raises(EasyBuildError, match=rf'^The container runtime cannot use {tmp_path}/file/x \(\$APPTAINER_CACHEDIR\): Not a '
                       'directory. .* export APPTAINER_CACHEDIR=DIRECTORY'):
        container_runtime.runtime_directories()


@pytest.mark.parametrize('default, value, words', [
    ([], 'a', " is 'a', but must be a list of strings: own = ['...']; on the command line: --try-amend='own=ONE,' with a comma"),
    ([], [1], ' is [1], but must be a list of strings'), ({}, 'a', " is 'a', but must be a dictionary: own = {'name': 'value'}"),
    ({}, {'a': None}, " is {'a': None}, but must be a dictionary"), (True, 'yes', " is 'yes', but must be True or False"),
    ([], ('a',), ''), ({}, {'a': 1, 'b': 'x'}, ''), (False, True, ''), ('', [], '')])
def test_types_of_parameters(monkeypatch, default, value, words):
    monkeypatch.setattr(dependencies, 'OWN_PARAMETERS', set())
    assert dependencies.with_parameters({'x': 1}, {'own': [default, 'what']}) == {'x': 1, 'own': [default, 'what', CUSTOM]}
    try:
        dependencies.check_types({'own': value, 'x': 3}, {'own': (default, '', ''), 'x': ([], '', '')})
        assert not words
    except EasyBuildError as err:
        assert words and err.msg.startswith('own' + words)


def test_image_is_packed_and_hashed(monkeypatch, tmp_path):
    """With what is not the node's; what jobs do not need is left out."""
    ran, tree = [], tmp_path / '.environment-image'
    for name in ('make_tree', 'relocate_run_paths'):
        monkeypatch.setattr(environment_image, name, lambda *words: tree.mkdir(exist_ok=True))
    monkeypatch.setattr(environment_image, 'run_tree_python', lambda *words: ran.append(words))
    monkeypatch.setattr(environment_image, 'run_command', lambda cmd, _: ran.append(cmd) or open(cmd[2], 'w').write('x'))
    environment_image.make_image(str(tmp_path), 7, ['torch'])
    options = '-comp zstd -Xcompression-level 3 -noappend -no-progress -no-xattrs -all-root -processors 7'.split()
    assert ran == [(str(tree), 'import sys, torch'), ['mksquashfs', str(tree), f'{tmp_path}/environment.squashfs', *options]]
    assert not tree.exists()
    assert (tmp_path / 'environment.squashfs.sha256').read_text().endswith('b02258717921a4881  environment.squashfs\n')


def test_flags_and_launcher_of_an_mpi(monkeypatch):
    monkeypatch.setattr(process, 'needed_libraries', lambda path: ['libcudart.so.12'] * ('new' in path))
    assert process.gtl_flags(None, '/cuda') == []
    gtl = ['-Wl,--no-as-needed', '-L/new', '-lmpi_gtl_cuda', '-Wl,-rpath,/new', '-Wl,--allow-shlib-undefined']
    assert process.gtl_flags('/new/libmpi_gtl_cuda.so', '/cuda') == gtl
    assert process.gtl_flags('/old/libmpi_gtl_cuda.so', '/cuda') == [word.replace('new', 'old') for word in gtl] + [
        '-L/cuda/lib64', '-lcudart', '-Wl,-rpath,/cuda/lib64', '-L/cuda/lib64/stubs', '-lcuda']
    assert [process.run_path_flags(f'{top}/libmpi.so') for top in ('/opt/mpi/lib', '/usr/lib/x', '/lib64')] == [
        ['-Wl,--disable-new-dtags', '-Wl,-rpath,/opt/mpi/lib'], [], []]
    assert list(map(process.launcher_name, ('/m/mpicc', '/m/mpicxx.mpich', '/m/mpic++', '/m/mpiCC', '/c/cc'))) == [
        '/m/mpiexec', '/m/mpiexec.mpich', '/m/mpiexec', '/m/mpiexec', '']
    ran, failed = [], SimpleNamespace(exit_code=1, output='no\n', stderr='and no\n')
    said = process.check_two_ranks('x', '/m/mpiexec', ['python', 'p'], lambda *words: ran.append(words) or failed)
    assert said == ['x on 2 ranks failed. If /m/mpiexec is not allowed, as on a login node, add --disable-mpi-tests. The output '
                    'is:\nno\nand no']
    assert ran == [('env', 'OMPI_ALLOW_RUN_AS_ROOT=1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1',
                    'OMPI_MCA_rmaps_base_oversubscribe=1', '/m/mpiexec', '-n', '2', 'python', 'p')]


def test_definition_that_the_runtime_cannot_read(monkeypatch):
    monkeypatch.setattr(container_runtime, 'run_runtime', answers('FATAL: no such partition'))
    with pytest.raises(EasyBuildError, match='cannot read the definition inside the image: .*no such partition'):
        container_runtime.definition_of('x.sif')
    for call, words in ((lambda: container_runtime.pull_image('docker://x', 'p', {}), 'Pulling docker://x failed with status 1. Its'),
                        (lambda: container_runtime.build_image('a.def', [], 'p', 'd', {}),
                         'Building the image from a.def with command failed with status 1. Its')):
        with pytest.raises(EasyBuildError, match='^' + words):
            call()
    monkeypatch.setattr(container_runtime, 'run_runtime', answers('Bootstrap: docker\n', 0))
    assert container_runtime.definition_of('x.sif') == 'Bootstrap: docker\n'


def test_script_without_the_function_that_undoes_it(load_block, tmp_path):
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin/activate').write_text('deactivate_all () {\n}\n')
    made = instance_of(load_block('generic.pythonenvironment').PythonEnvironment, installdir=str(tmp_path))
    with pytest.raises(EasyBuildError, match='bin/activate has an unknown form: it has no function deactivate'):
        made.add_to_script(str(tmp_path), 'activate', '. file\n', 'deactivate () {\n', '    . own\n')


@pytest.mark.parametrize('problem, said', [('', 0), ('no python3.10', 1)])
def test_packages_of_the_user_on_another_image(load_block, tmp_path, problem, said):
    path = tmp_path / 'user-software/venv/mine'
    path.mkdir(parents=True)
    made = instance_of(load_block('generic.singularity').Singularity, {'preset_venv': 'mine'}, installdir=str(tmp_path))
    made.container_problem = lambda *words: '' if words == ('true',) else problem
    made.make_preset_venv(f'{tmp_path}/user-software')
    assert [text.partition(' (')[0] for text in made.said] == said * [
        f'The virtual environment {path} was kept, but does not work with this image']


@pytest.mark.parametrize('memory, jobs, warns', [(40, 10, False), (1000, 64, False), (3, 1, True), (None, 64, False)])
def test_jobs_that_memory_allows(load_block, monkeypatch, memory, jobs, warns):
    monkeypatch.setattr(load_block('pytorch_cray').Machine, 'free_memory', lambda _: (memory and memory << 30, ''))
    made = instance_of(load_block('pytorch_cray').EB_PyTorch_Cray)
    made.limit_jobs()
    assert made.cfg.parallel == jobs and bool(made.said) is warns


def test_torchvision_for_rocm(load_block, monkeypatch):
    cray = load_block('pytorch_cray')
    monkeypatch.setattr(cray, 'archs', lambda _, name: {'amdgcn_capabilities': ['gfx90a', 'gfx942']}[name])
    made = instance_of(cray.EB_PyTorch_Cray, ldflags='-L', mpi_compilers=['mpicc'], root='ROCm'.__eq__)
    assert made.extension_variables() == {'LDFLAGS': '-L', 'MPICC': 'mpicc', 'FORCE_CUDA': '1',
                                          'PYTORCH_ROCM_ARCH': 'gfx90a;gfx942'}


def test_pytorch_that_cannot_be_imported(load_block, monkeypatch):
    cray, horovod = load_block('pytorch_cray'), load_block('horovod')
    for module in (cray, horovod):
        monkeypatch.setattr(module, 'probe_pytorch', lambda *_: 'it crashed')
    monkeypatch.setattr(cray.RunScripts, 'sanity_check_step', lambda self, **_: self.sanity_check_fail_msgs)
    made = instance_of(cray.EB_PyTorch_Cray, {'environment_image': False}, sanity_check_module_loaded=True,
                       sanity_check_fail_msgs=[], pylibdir='lib', installdir='/nowhere')
    assert made.sanity_check_step() == ['it crashed']
    with pytest.raises(EasyBuildError, match='Horovod needs the PyTorch of the environment: it crashed'):
        instance_of(horovod.EB_Horovod, master=SimpleNamespace(own_python='python')).check_pytorch()


def test_slingmpi_that_is_not_right(load_block, monkeypatch, tmp_path):
    module, path = load_block('slingmpi'), tmp_path / 'lib/slingmpi/built.json'
    made = instance_of(module.EB_slingmpi, installdir=str(tmp_path), pylibdir='lib', python_cmd='python')
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({'torch': '2.13', 'mpi': 'mpich 4', 'compiler': 'CC'}))
    monkeypatch.setattr(module, 'probe_pytorch', lambda *_: 'it crashed')
    assert made.check_build() == ['slingmpi, built for PyTorch 2.13 and mpich 4, does not load: it crashed']
    found = {'version': '2.13.0', 'import_errors': [], 'libraries': ['/m/libmpi.so.12']}
    for name, value in (('probe_pytorch', found), ('mpi_library', '/m/libmpi.so.12'), ('gtl_library', '/g/libmpi_gtl.so'),
                        ('get_software_root', None)):
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    assert [text[:47] for text in made.check_build()] == ['The GPU Transport Layer /g/libmpi_gtl.so is not']
    # without a dependency PyTorch the next check says so
    monkeypatch.setattr(module.PythonPackage, 'prepare_python', lambda self: self.said.append('asked'))
    made.prepare_python()
    assert made.said[-1] == 'asked'


@pytest.mark.parametrize('code, maps, expected, says', [(0, '7f0-7f1 r-xp 0 0 0 /m/libmpi.so.12', '/m/libmpi.so.12', ''),
    (0, '', '/m/libmpi.so.12', 'mpi4py uses no MPI, but should have been built with mpicc, whose MPI is /m/'),
    (0, '', None, 'It is unknown which MPI mpi4py should be linked with: mpicc links no known MPI'),
    (1, 'ImportError: x', None, 'mpi4py cannot be imported: ImportError: x')])
def test_mpi_of_an_extension(monkeypatch, code, maps, expected, says):
    monkeypatch.setattr(process, 'run_elsewhere', answers(maps, code))
    monkeypatch.setattr(process, 'mpi_library', lambda _: expected)
    found = process.check_mpi('python', 'mpicc', 'mpi4py', 'import mpi4py.MPI')
    assert found.startswith(says) and bool(found) is bool(says)


@pytest.mark.parametrize('numbers, version', [(('MAJOR 2', 'MINOR 27', 'PATCH 3'), '2.27.3'), (('MAJOR 2',), '2.21.5')])
def test_version_of_the_nccl_in_use(load_block, monkeypatch, tmp_path, numbers, version):
    """From its header; else from its module."""
    block = load_block('aws_ofi_nccl')
    (tmp_path / 'include').mkdir()
    (tmp_path / 'include/nccl.h').write_text(''.join(f'#define NCCL_{number}\n' for number in numbers))
    monkeypatch.setattr(block, 'get_software_version', lambda _: '2.21.5')
    made = instance_of(block.EB_aws_minus_ofi_minus_nccl, gpu=lambda: 'CUDA', root=lambda _: str(tmp_path))
    assert made.nccl_in_use() == ('NCCL', version)


def test_all_that_can_be_wrong_with_a_process(monkeypatch):
    needs = {'/env/lib/libuse.so': ['libmpi.so.40'], '/env/libtorch.so': ['libc.so']}
    monkeypatch.setattr(process, 'needed_libraries', lambda path: needs.get(path, []))
    monkeypatch.setattr(process, 'find_plugin', lambda nccls: None)
    found = {'import_errors': ['mpi4py cannot be imported: x'], 'file': '/else/torch/__init__.py', 'version': '2.4.1', 'mpi': False,
             'libraries': ['/other/libmpi.so.40.30', *needs, '/wheel/libnccl.so.2'], 'entry_points': ['x'], 'vision_cuda': -1,
             'config': 'USE_CUDA=ON, USE_MPI=0, USE_NCCL=1', 'nccl': False, 'nccl_version': [2, 18, 3]}
    wanted = {'prefix': '/env', 'version': '2.4.0', 'settings': ['USE_CUDA', 'USE_MPI', 'USE_NCCL'], 'mpi': '/mpi/libmpi.so.12',
              'gtl': '/gtl/libmpi_gtl_cuda.so', 'nccl': '/nccl', 'nccl_version': '2.21.5', 'plugin': '/plugin'}
    mpi = ['The process has another MPI, too: /other/libmpi.so.40.30, needed by /env/lib/libuse.so',
           'No library of PyTorch is linked with MPI']
    wrong = process.check_linkage(found, wanted)
    assert wrong == [
        'mpi4py cannot be imported: x', 'PyTorch was imported from /else/torch/__init__.py, not from the installation',
        'PyTorch reports the version 2.4.1, not 2.4.0',
        "PyTorch's entry points are not installed: torchrun is not among ['x']", 'torchvision was built without CUDA',
        'torch.__config__ does not contain USE_MPI=ON',
        'torch.distributed has no MPI: CMake did not find MPI, and its output only shows a warning',
        'PyTorch is not linked with the MPI that it was built for, /mpi/libmpi.so.12, but with /other/libmpi.so.40.30', *mpi,
        'The GPU Transport Layer /gtl/libmpi_gtl_cuda.so is not in the process: MPI_Init would abort, or GPU buffers would crash',
        'torch.distributed has no NCCL', 'The NCCL in /nccl is not in the process: PyTorch uses /wheel/libnccl.so.2',
        'NCCL reports the version 2.18.3, not 2.21.5',
        'The process has another NCCL, too: /wheel/libnccl.so.2 (from a Python package?)',
        'NCCL would use no plugin instead of the network plugin in /plugin: is that directory in $LD_LIBRARY_PATH?']
    # which MPI is not known: one is right, two are not
    found['libraries'].append('/mpi/libmpi.so.12')
    unknown = process.check_linkage(found, {**wanted, 'mpi': None, 'nccl': None, 'gtl': None, 'plugin': None})[7:]
    assert unknown == ["It is unknown which MPI PyTorch should have, because MPI's compilers link no known MPI",
                       'The process has another MPI, too: /mpi/libmpi.so.12, needed by no library of the process', *mpi]
    assert process.describe_libraries(found) == (
        'PyTorch 2.4.1, MPI /mpi/libmpi.so.12 and /other/libmpi.so.40.30, GPU Transport Layer none, NCCL /wheel/libnccl.so.2')


@pytest.mark.parametrize('plugin, needed, versions, wrong', [
    (None, [], {}, ['NCCL would find no network plugin: $LD_LIBRARY_PATH has no directory with one, and $NCCL_NET_PLUGIN is not '
                    "set to one. Does the plugin's module set them?"]),
    ('/p.so', ['libcudart.so.12'], {'CUDA': '13.1'}, [
        'The PyTorch wheel is for CUDA 12.9, but the module among the dependencies is for CUDA 13.1: the major versions must be '
        'the same']),
    ('/p.so', ['libcudart.so.13', 'libamdhip64.so.7.1'], {'CUDA': '12.2'}, [
        f'The PyTorch wheel is for CUDA 12.9, but the plugin /p.so is for CUDA {number}: the major versions must be the same'
        for number in (13, 7)])])
def test_wheel_and_plugin(monkeypatch, plugin, needed, versions, wrong):
    for name, value in (('find_plugin', plugin), ('needed_libraries', needed), ('exported_apis', {10, 8})):
        monkeypatch.setattr(process, name, lambda *_, value=value: value)
    found = {'hip': None, 'cuda': '12.9', 'nccls': {'/l/libnccl.so.2': 22707}}
    known = ['aws-ofi-nccl 1.19.2: ' + entry.text for entry in nccl.KNOWN_PROBLEMS[:2]]
    said, problems = process.check_wheel(found, {**versions, 'aws-ofi-nccl': '1.19.2'})
    assert said == wrong and [text.rpartition(' (')[0] for text in problems] == known * bool(plugin)
    assert process.check_wheel({**found, 'nccls': {}}, {}) == ([
        'PyTorch in this environment is a CPU build without NCCL: the lock file names the wrong wheel (+cpu?)'], [])
    # RCCL, and what it does not accept
    found = {'hip': '7.14.1', 'cuda': None, 'nccls': {'/a/librccl.so': 21304, '/b/librccl.so': 22707}}
    said, problems = process.check_wheel(found, {})
    assert said[0] == ('The process has two RCCL libraries, each with its own network: /a/librccl.so and /b/librccl.so. Remove one '
                       'of the packages from the lock file')
    assert plugin is None or said[-1] == (
        'RCCL 2.13.4 of the wheel accepts ncclNetPlugin_v4 to v6, but the plugin /p.so has v8, v10: use another release of the '
        'plugin (docs/easyconfigs.md has the table)') and problems == [
            'ROCm 7.14.1: its RCCL gives wrong results for messages of 64 to 512 MB: verify results before you trust them, or use '
            'another ROCm (ROCm/TheRock#7903)']
