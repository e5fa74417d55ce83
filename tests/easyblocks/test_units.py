# SPDX-License-Identifier: GPL-2.0-only
"""Parts of easyblocks and of slingtorch/install without `eb`: what goes wrong too rarely for an installation."""
import errno
import json
import os
import socket
import subprocess
from types import SimpleNamespace

import pytest
from easybuild.framework.easyconfig import CUSTOM
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.config import Singleton, init_build_options

from slingtorch.install import container_image, container_runtime, dependencies, environment_image, process
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
    cfg = type('Config', (dict,), {'parallel': 64, 'path': '/a/X.eb', 'dependencies': list, 'filename': str, 'get_ref': lambda *_: []})(
        {'name': 'PyTorch', 'version': '1.0', 'versionsuffix': '', 'sources': [], **dict(parameters)})
    made.__dict__.update({'dry_run': False, 'is_extension': False, 'said': [], 'cfg': cfg,
                          'log': SimpleNamespace(info=print), **attributes})
    made.warn = made.say = lambda text, *args: made.said.append(text % args)
    return made


def answers(output='', code=1):
    """A function in the place of run()."""
    return lambda *_, **__: SimpleNamespace(exit_code=code, output=output, stderr=output, cmd='command')


@pytest.mark.parametrize('restored, words', [
    (True, 'The old installation cannot be moved aside for the new one: [Errno 13] Permission denied. You need write permission '
           'for the directories that contain {0}/root and {0}/1.lua'),
    (False, 'A previous installation is left in {0}/.root.previous, and its module in {0}/.1.lua.previous: [Errno 13] '
            'Permission denied. Their owner must run the same command')])
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
    assert error_of(made.make_installdir) == words.format(tmp_path)
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


def test_image_without_mksquashfs(load_block, monkeypatch):
    monkeypatch.setattr(environment_image, 'which', lambda *_, **__: None)
    venv = instance_of(load_block('generic.pythonvenv').PythonVenv, {'environment_image': True})
    environment = instance_of(load_block('generic.pythonenvironment').PythonEnvironment, {'environment_image': True})
    for step in (venv.configure_step, environment.install_step):
        assert error_of(step) == (
            'environment_image needs the command mksquashfs, but it is not in $PATH. Install the package squashfs-tools (SUSE: '
            'squashfs) or load its module; to make no image: --try-amend=environment_image=False')


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
    outputs = ['no space left on device', 'Disk quota exceeded', 'digest mismatch', 'got sha256:a, want sha256:b', '401 unauthorized', 'denied: requested access',
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
    assert made.said == said * [
        f'The virtual environment {path} was kept, but does not work with this image (does it have another Python?). To make it '
        f"again: move {tmp_path}/user-software away (also a .squashfs beside it), then run 'eb --rebuild '"]


@pytest.mark.parametrize('memory, jobs, warns', [(40, 10, False), (1000, 64, False), (3, 1, True), (None, 64, False)])
def test_jobs_that_memory_allows(load_block, monkeypatch, memory, jobs, warns):
    monkeypatch.setattr(load_block('pytorch_cray').Machine, 'free_memory', lambda _: (memory and memory << 30, ''))
    made = instance_of(load_block('pytorch_cray').EB_PyTorch_Cray)
    made.limit_jobs()
    assert made.cfg.parallel == jobs and made.said == warns * [
        'Little memory: 1 compile jobs at a time: 3.0 GiB of memory are available, one job may need 4 GiB, and EasyBuild allows '
        '64 jobs (--max-parallel). A compiler may be killed: build on a node with more memory']


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
    monkeypatch.setattr(cray.RunScripts, 'sanity_check_step', lambda self, custom_paths: custom_paths)
    made = instance_of(cray.EB_PyTorch_Cray, {'environment_image': True}, sanity_check_module_loaded=True,
                       sanity_check_fail_msgs=[], pylibdir='lib', installdir='/nowhere')
    assert made.sanity_check_step() == {
        'files': ['bin/python', 'etc/conda/activate.d/slingtorch.sh', 'environment.squashfs'], 'dirs': ['lib/torch/lib']}
    assert made.sanity_check_fail_msgs == ['it crashed']
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
    gtl = ('The GPU Transport Layer /g/libmpi_gtl.so is not in the process: MPI_Init would abort with '
           'MPICH_GPU_SUPPORT_ENABLED=1')
    assert made.check_build() == [gtl]
    found.update(version='2.14.1', import_errors=['x cannot be imported'])
    assert made.check_build() == [
        "slingmpi was built for PyTorch 2.13, but this is 2.14.1: use 'eb --rebuild' to build it again",
        "x cannot be imported. slingmpi was built for PyTorch 2.13 with mpich 4 of CC: load the module of that MPI, or build it "
        "again ('eb --rebuild')"]
    found.update(version='2.13.0', import_errors=[], libraries=['/o/libmpi.so.40', '/g/libmpi_gtl.so'])
    assert made.check_build() == ["slingmpi uses /o/libmpi.so.40, but was built with CC, whose MPI is /m/libmpi.so.12: is "
                                  "another MPI's directory in $LD_LIBRARY_PATH?"]
    found['libraries'] = []
    assert made.check_build() == ['A process that imports slingmpi must have one MPI, but has 0: none', gtl]
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


@pytest.mark.parametrize('gpu, root, header, numbers, found', [
    ('CUDA', 'NCCL', 'nccl.h', ('MAJOR 2', 'MINOR 27', 'PATCH 3'), ('NCCL', '2.27.3')),
    ('CUDA', 'NCCL', 'nccl.h', ('MAJOR 2',), ('NCCL', 'NCCL of the module')),
    ('ROCm', 'RCCL', 'rccl/rccl.h', ('MAJOR 2', 'MINOR 27', 'PATCH 3'), ('RCCL', '2.27.3')),
    ('ROCm', 'ROCm', 'rccl/rccl.h', ('MAJOR 2', 'MINOR 26', 'PATCH 6'), ('RCCL', '2.26.6')),
    ('ROCm', 'NCCL', 'nccl.h', ('MAJOR 2', 'MINOR 26', 'PATCH 6'), ('RCCL', 'RCCL of the module'))])
def test_version_of_the_nccl_in_use(load_block, monkeypatch, tmp_path, gpu, root, header, numbers, found):
    """From its header; else from its module."""
    block, path = load_block('aws_ofi_nccl'), tmp_path / 'include' / header
    path.parent.mkdir(parents=True)
    path.write_text(''.join(f'#define NCCL_{number}\n' for number in numbers))
    monkeypatch.setattr(block, 'get_software_version', '{} of the module'.format)
    made = instance_of(block.EB_aws_minus_ofi_minus_nccl, gpu=lambda: gpu, root={root: str(tmp_path)}.get)
    assert made.nccl_in_use() == found


# --- whole outputs

def error_of(function, *args):
    """The message of the EasyBuildError that this raises."""
    with pytest.raises(EasyBuildError) as caught:
        function(*args)
    return caught.value.msg


def test_parameters(load_block):
    """Those of the bundle, and the defaults of EasyBuild's own that it changes, each where it comes in."""
    found = {cls: getattr(load_block(name), cls).extra_options() for name, cls in [
        ('generic.runscripts', 'RunScripts'), ('generic.singularity', 'Singularity'), ('generic.pythonvenv', 'PythonVenv'),
        ('generic.pythonenvironment', 'PythonEnvironment'), ('pytorch_cray', 'EB_PyTorch_Cray'), ('horovod', 'EB_Horovod'),
        ('generic.environmentpackage', 'EnvironmentPackage'), ('slingmpi', 'EB_slingmpi'),
        ('aws_ofi_nccl', 'EB_aws_minus_ofi_minus_nccl')]}
    lines = []
    for cls, parameters in found.items():
        new = [f'    {key} = {parameters[key][0]!r}: {parameters[key][1]}'
               for key in sorted(dependencies.OWN_PARAMETERS.intersection(parameters))]
        lines += [cls, *(line for line in new if line not in lines)]
    for cls, key in [('EB_PyTorch_Cray', 'fix_python_shebang_for'), ('EB_PyTorch_Cray', 'sanity_check_pip_list'),
                     ('EB_aws_minus_ofi_minus_nccl', 'build_type'), ('EB_aws_minus_ofi_minus_nccl', 'host_type')]:
        lines.append(f'{cls}: {key} = {found[cls][key][0]!r}')
    expected('\n'.join(lines) + '\n', 'easyblocks/parameters')


PIP = [
    'ERROR: No space left on device', 'ERROR: Errno 28', 'error: Disk quota exceeded', 'ERROR: Errno 122', 'error: os error 28',
    'ERROR: Permission denied', 'ERROR: not enough bytes were received', 'ERROR: IncompleteRead(9 bytes)',
    'ERROR: incomplete-download', 'ERROR: Connection broken', 'ERROR: Hash-checking is required', 'error: No solution found',
    'Looking\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES', 'error: Hash mismatch for `a`',
    'error: invalid package format', 'error: Failed to read from zip file', 'ERROR: all requirements must have their versions '
    'pinned', 'ERROR: Hashes are required in --require-hashes mode', 'ERROR: Invalid proxy URL',
    'ERROR: Exception:\nTraceback (most recent call last):\n  File "x"\nKeyError: 1', 'ERROR: No matching distribution',
    '\n'.join(map(str, range(20)))]


def test_remedies_of_pip_and_uv(load_block):
    made = instance_of(load_block('generic.pythonvenv').PythonVenv, lock_file='a.lock')
    found = [error_of(made.raise_pip_error, output, 'Downloading', '/wheels', ['http://x (refused)']) for output in PIP]
    lines = [f'{output!r}{" (index)" if "http://x" in text else ""}: {text.splitlines()[-1]}'
             for output, text in zip(PIP, found)]
    assert found[-1].splitlines()[1] == '5'
    lines += [found[-2], error_of(made.raise_pip_error, 'error: other', 'Installing', '/root', (), 'uv')]
    expected('\n'.join(lines) + '\n', 'easyblocks/pip')


@pytest.mark.parametrize('settings, locked, proxies, asked, answering', [
    ({'index-url': 'https://a/', 'extra-index-url': 'http://b:81/ http://me:secret@c/'}, '', {},
     [('a', 443), ('b', 81), ('c', 80)], ['https://a/', 'http://b:81/']),
    # the lock file's own index takes the place of pip's
    ({'index-url': 'https://a/'}, '-i https://d/\n--extra-index-url=http://c/\n', {}, [('d', 443), ('c', 80)], ['https://d/']),
    ({'index-url': 'https://a/', 'proxy': 'http://p'}, '', {}, [], ['https://a/']),
    ({'index-url': 'https://a/'}, '', {'https': 'p'}, [], ['https://a/']),
    ({'index-url': 'https://near/'}, '', {'https': 'p'}, [('near', 443)], ['https://near/']),
    ({'index-url': 'file:///wheels'}, '', {}, [], ['file:///wheels'])])
def test_indexes_that_are_asked(load_block, monkeypatch, tmp_path, settings, locked, proxies, asked, answering):
    block, seen = load_block('generic.pythonvenv'), []
    (tmp_path / 'a.lock').write_text(locked)

    def connect(place, timeout):
        seen.append((*place, timeout))
        if place[0] == 'c':
            raise OSError('refused')
        return socket.socket()
    monkeypatch.setattr(block.socket, 'create_connection', connect)
    monkeypatch.setattr(block.urllib.request, 'getproxies', lambda: proxies)
    monkeypatch.setattr(block.urllib.request, 'proxy_bypass', 'near'.__eq__)
    made = instance_of(block.PythonVenv, lock_file=str(tmp_path / 'a.lock'))
    silent = ['http://c/ (refused)'] if ('c', 80) in asked else []
    assert made.look_at_indexes(settings) == (answering, silent) and seen == [(*place, 2) for place in asked]


def test_commands_that_make_an_environment(load_block, monkeypatch, tmp_path):
    """With conda, with a module's Python and with another one; what is run to download, and to install."""
    block, lines = load_block('generic.pythonenvironment'), []
    monkeypatch.setattr(block, 'source_paths', lambda: [f'{tmp_path}/sources'])
    monkeypatch.setattr(block, 'which', lambda name, on_error: f'/usr/bin/{name}')
    monkeypatch.setattr(block.PythonEnvironment, 'uses_conda', property(lambda self: self.conda))
    made = instance_of(block.PythonEnvironment, {'python_packages': ['a', 'b<2'], 'extra_packages': ['c']})
    made.run_environment_command = lambda commands, doing: lines.extend([doing, *(' '.join(words) for words in commands)])
    for made.conda, root in ((True, None), (False, '/opt/python'), (False, None)):
        monkeypatch.setattr(block, 'get_software_root', lambda _, root=root: root)
        monkeypatch.setenv('CONDA_EXE', '/opt/conda/bin/conda')
        for fetch in (True, False) if root or made.conda else (False,):
            made.make_environment('/env', fetch=fetch)
    # without packages nothing is asked of pip
    made.cfg.update(python_packages=[], extra_packages=[])
    made.make_environment('/env')
    made.conda = True
    monkeypatch.delenv('CONDA_EXE')
    made.make_environment('/env')
    monkeypatch.setattr(block, 'which', lambda *_, **__: None)
    made.dependency = lambda _: {'full_mod_name': 'conda/latest'}
    lines.append(error_of(made.make_environment, '/env'))
    del made.run_environment_command
    monkeypatch.setattr(block, 'run', answers('no\nnetwork'))
    lines.append(error_of(made.run_environment_command, [['false']], 'Making'))
    expected('\n'.join(lines) + '\n', 'easyblocks/environment', [(tmp_path, 'TMP')])


@pytest.mark.parametrize('conda', [True, False])
def test_scripts_that_activate(load_block, tmp_path, conda):
    """etc/conda is the same without conda but for a comment, and bin/activate reads it."""
    block = load_block('generic.pythonenvironment')
    made = instance_of(block.PythonEnvironment, {
        'environment_image': True, 'modextravars': {'A': 1, 'B': {'value': "it's", 'pushenv': True}}},
        installdir=str(tmp_path / 'root'), dependency=lambda _: {} if conda else None)
    made.cfg.full_mod_name = 'PyTorch/1.0'
    (tmp_path / 'root/bin').mkdir(parents=True)
    for name, text in (('activate', 'deactivate () {\n}\n'), ('activate.csh', '#\n'), ('activate.fish', '#\n')):
        (tmp_path / 'root/bin' / name).write_text(text)
    assert made.should_use_ebpythonprefixes() is False
    made.write_activation(f'{tmp_path}/new', {'RUNSCRIPTS': '/r'}, {'LD_LIBRARY_PATH': ['/n', '/p'], 'NONE': []})
    new = {str(path.relative_to(tmp_path / 'new')): path.read_text() for path in sorted((tmp_path / 'new').rglob('*.*h'))}
    text = ''.join(f'== {name}\n{text}' for name, text in new.items() if name.startswith('etc/'))
    if conda:
        expected(text, 'easyblocks/activation', [(tmp_path, 'TMP')])
    else:
        there = f'. {tmp_path}/root/etc/conda/'
        assert 'Read by bin/activate.\n' in new['etc/conda/deactivate.d/slingtorch.sh']
        assert (tmp_path / 'new/bin/activate').read_text() == (
            f'deactivate () {{\n    {there}deactivate.d/slingtorch.sh\n}}\n\n{there}activate.d/slingtorch.sh\n')
        assert new['bin/activate.csh'] == new['bin/activate.fish'] and 'module load PyTorch/1.0' in new['bin/activate.csh']


@pytest.mark.parametrize('uv, own', [('uv', None), (None, '/opt/python')])
def test_commands_of_a_virtual_environment(load_block, monkeypatch, tmp_path, uv, own):
    """With uv and with pip; what is run, and what the sanity check runs."""
    block, lines, ran = load_block('generic.pythonvenv'), [], []
    made = instance_of(block.PythonVenv, {
        'system_site_packages': False, 'byte_compile': True, 'environment_image': True, 'python_versions': [],
        'python_command': 'python3.11', 'python_packages': ['torch==2.0', 'numpy'], 'sanity_check_imports': ['torch', 'numpy'], 'versionsuffix': '-tiny',
        'sanity_check_packages': {'triton': '3.0'}}, lock_file=f'{tmp_path}/a.lock', installdir=f'{tmp_path}/root')
    for path in ('sources/p/PyTorch/wheels', 'root/lib/python3.11'):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / 'a.lock').write_text('-i https://x\n--find-links /y\npip==1 \\\n    --hash=sha256:a --hash=sha256:b\n')

    def run(*words, env=None, **_):
        ran.append(words)
        lines.append(' '.join(words) + (' with settings of uv' if env else ''))
        lock = words[words.index('--requirement') + 1] if '--requirement' in words else None
        if lock:
            lines.append(f'    {open(lock).read()!r}')
        return SimpleNamespace(exit_code=0, output='', cmd='')
    for name, answer in (('run', run), ('find_uv', lambda: uv), ('python_version', lambda _: '3.11'),
                         ('get_software_root', lambda _: own), ('which', lambda name: f'/usr/bin/{name}'),
                         ('source_paths', lambda: [f'{tmp_path}/sources', '/nowhere']), ('require_mksquashfs', lambda: None),
                         ('make_image', lambda *words: lines.append(f'image {words[1:]}')),
                         ('uv_environment', lambda: {'A': 'B'}), ('machine_at_hand', lambda: ('glibc', 28, 'x86_64')),
                         ('recipe_of', lambda _: {'wanted': ['pip']})):
        monkeypatch.setattr(block, name, answer)
    monkeypatch.setattr(block.tempfile, 'mkdtemp', lambda: f'{tmp_path}/work')
    monkeypatch.setattr(block.RunScripts, 'sanity_check_step', lambda self, **words: lines.extend(
        map(str, [*words['custom_paths'].items(), *words['custom_commands']])))
    (tmp_path / 'work').mkdir()
    made.look_for_wheels('/usr/bin/python3', f'{tmp_path}/work')
    made.install_step()
    made.sanity_check_step()
    made.cfg.update(system_site_packages=True, byte_compile=False, environment_image=False, sanity_check_imports=[],
                    python_packages=[], sanity_check_packages={})
    made.install_step()
    made.sanity_check_step()
    expected('\n'.join(lines) + '\n', f'easyblocks/{uv or "pip"}-commands', [(tmp_path, 'TMP')])


def test_what_is_put_beside_an_image(load_block, monkeypatch, tmp_path):
    """Files and links, and what the sanity check asks of them."""
    block, lines = load_block('generic.singularity'), []
    monkeypatch.setattr(block.RunScripts.__mro__[1], 'sanity_check_step', lambda self, **words: lines.extend(
        map(str, [*words['custom_paths'].items(), *words['custom_commands']])))
    monkeypatch.setattr(block, 'check_sif', lines.append)
    made = instance_of(block.Singularity, {
        'sources': [{'filename': 'small.sif'}], 'bind_paths': ['/a', '/b:/c:ro', '/lib/x'], 'bind_paths_excluded': ['/lib/x'],
        'container_environment': {'Z': 1}, 'container_python': 'python', 'central_image_dirs': ['/central'],
        'preset_venv': 'mine', 'container_path': ['/opt/bin'], 'gpu_driver': 'nv', 'wrappers': ['pip'], 'site_name': 'lumi',
        'site_groups': ['tuned'], 'site_digest': 'abc', 'sanity_check_files_in_container': ['/a*'], 'python_version': '3.10',
        'sanity_check_imports': ['torch'], 'sanity_check_packages': {'torch': '2.0', 'a': '1'}}, installdir=str(tmp_path))
    made.cfg.filename = lambda: 'Small.eb'
    made.inside = answers(code=0)
    files = {'runscripts/get-master': 'get-master', 'runscripts/lib/version': 'lib/version',
             'bin/in-container': 'container/in-container'}
    for number, name in enumerate(files.values()):
        (tmp_path / f'{number}').write_text('slingtorch 1.2\n' if 'version' in name else name)
    made.script_paths = {target: f'{tmp_path}/{number}' for number, target in enumerate(files)}
    made.scripts = lambda: files
    made.write_scripts(f'{tmp_path}/new')
    for path in sorted((tmp_path / 'new').rglob('*')):
        if path.is_symlink():
            lines.append(f'== {path} -> {os.readlink(path)}')
        elif path.is_file():
            text = path.read_text()
            lines.append(f'== {path} {path.stat().st_mode:o}\n{json.loads(text) if path.suffix == ".json" else text.strip()}')
    (tmp_path / 'small.sif').touch()
    made.sanity_check_step()
    made.cfg.update(site_name=None, site_groups=[], container_python=None)
    made.write_scripts(f'{tmp_path}/newer')
    lines.append((tmp_path / 'newer/runscripts/lib/version').read_text())
    made.inside = answers('no /dev/fuse')
    before = len(lines)
    made.sanity_check_step()
    assert len(lines) == before + 4
    expected('\n'.join(lines[:before] + made.said) + '\n', 'easyblocks/image', [(tmp_path, 'TMP')])


def test_extension_for_an_mpi(load_block, monkeypatch):
    """Its variables, and what is said of a compiler that is not right."""
    block, done = load_block('generic.environmentpackage'), []
    monkeypatch.setattr(block.env, 'setvar', lambda *words: done.append(words))
    monkeypatch.setattr(block.PythonPackage, 'configure_step', lambda _: done.append('configured'))
    monkeypatch.setattr(block, 'which', lambda name, on_error: {'cc': '/cray/cc', 'mpicc': '/usr/bin/mpicc'}.get(name))
    monkeypatch.setattr(block, 'mpi_library', {'/cray/cc': '/opt/mpi/lib/libmpi.so', '/usr/bin/mpicc': None}.get)
    master = SimpleNamespace(extension_variables=lambda: {'B': '2', 'A': '1'}, cfg={'system_site_packages': True},
                             modules_tool=SimpleNamespace(unload=done.append), own_python='/env/python')
    made = instance_of(block.EnvironmentPackage, {'unload_modules': ['rocm'], 'mpicc': 'cc -shared', 'name': 'mpi4py'},
                       master=master)
    made.configure_step()
    assert done == [('A', '1'), ('B', '2'), ['rocm'], ('MPICC', 'cc -shared'),
                    ('LDFLAGS', '-Wl,--disable-new-dtags -Wl,-rpath,/opt/mpi/lib'), 'configured']
    for made.cfg['mpicc'], why in [('mpicc', 'it links no MPI'), ('nothing', 'it is not in $PATH')]:
        assert error_of(made.configure_step) == (
            f"mpi4py needs MPI's compiler '{made.cfg['mpicc']}', but {why}. Add the module that provides it to the "
            'dependencies, or correct mpicc')
    made.cfg['mpicc'] = 'cc'
    monkeypatch.setattr(block.PythonPackage, 'sanity_check_step', lambda _: (True, 'other'))
    for wrong in ('', 'wrong MPI'):
        monkeypatch.setattr(block, 'check_mpi', lambda *words, wrong=wrong: done.append(words) or wrong)
        assert made.sanity_check_step() == (not wrong, 'other; wrong MPI' if wrong else 'other')
    assert done[-1] == ('/env/python', '/cray/cc', 'mpi4py', made.IMPORT_MPI) and made.cfg['sanity_pip_check'] is False
    assert made.IMPORT_MPI == 'import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI'


def test_horovod_on_two_ranks(load_block, monkeypatch, tmp_path):
    """With a stub of the driver's library in front where nodes have none."""
    block, ran = load_block('horovod'), []
    (tmp_path / 'lib/stubs').mkdir(parents=True)
    (tmp_path / 'lib/stubs/libcuda.so').touch()
    monkeypatch.setenv('LD_LIBRARY_PATH', '/own')
    monkeypatch.setattr(block, 'needed_libraries', lambda _: ['libnccl.so.2'])
    monkeypatch.setattr(block, 'mpi_launcher', lambda _: '/mpi/mpiexec')
    monkeypatch.setattr(block, 'check_two_ranks', lambda *words: ran.append(words) or ['wrong sum'])
    monkeypatch.setattr(block.EnvironmentPackage, 'sanity_check_step', lambda _: (True, 'other'))
    made = instance_of(block.EB_Horovod, {'gpu_operations': 'NCCL', 'cuda_home': str(tmp_path), 'mpicc': 'mpicc'},
                       installdir=str(tmp_path), master=SimpleNamespace(own_python='/env/python'))
    library = tmp_path / 'lib/python3.11/site-packages/horovod/torch/mpi_lib_v2.cpython-311.so'
    library.parent.mkdir(parents=True)
    library.touch()
    assert made.sanity_check_step() == (False, 'other; wrong sum')
    made.cfg['gpu_operations'] = None
    made.sanity_check_step()
    (what, launcher, with_gpus), (*_, without) = ran
    assert (what, launcher, without) == ("Horovod's all-reduce", '/mpi/mpiexec', ['/env/python', '-s', '-c', block.ALL_REDUCE])
    assert with_gpus[0] == 'env' and with_gpus[2:] == without and with_gpus[1].endswith(':/own')
    directory = with_gpus[1][len('LD_LIBRARY_PATH='):-len(':/own')]
    assert os.readlink(f'{directory}/libcuda.so.1') == f'{tmp_path}/lib/stubs/libcuda.so'


def test_extensions_know_nothing_of_the_base(load_block, monkeypatch):
    """Nor is it built again when one of them has changed."""
    block = load_block('generic.pythonenvironment')
    made = instance_of(block.PythonEnvironment, dict.fromkeys(
        ['prebuildopts', 'preinstallopts', 'buildopts', 'installopts', 'runtest', 'exts_list', 'environment_image', 'other'], 'x'))
    made.cfg.asdict = lambda: made.cfg
    made.cfg.dependencies = lambda: [{'full_mod_name': 'gcc/12'}]
    recipe = json.loads(made.describe_recipe())
    assert recipe['dependencies'] == ['gcc/12'] and recipe['other'] == 'x'
    assert not {'exts_list', 'environment_image'}.intersection(recipe)
    monkeypatch.setattr(block.EasyBlock, 'prepare_for_extensions', lambda _: None)
    made.prepare_for_extensions()
    assert {name for name, value in made.cfg.items() if value == 'x'} == {'exts_list', 'environment_image', 'other'}
    assert made.cfg['runtest'] is None


def test_runscripts_that_are_not_renewed(load_block):
    block = load_block('generic.runscripts')
    made = instance_of(block.RunScripts, installdir='/inst', script_paths={}, obtain_file=lambda *_, **__: None)
    assert error_of(made.find_scripts) == (
        "Runscript 'conda-python-simple' was not found: the directory runscripts/ of the bundle must be in EasyBuild's source "
        "path. Activate the bundle with 'eval \"$(slingtorch env)\"', or add it with --sourcepath")

    def may_not():
        raise PermissionError('not yours')
    made.find_scripts, made.put_scripts = lambda: None, may_not
    made.renew_scripts()
    made.put_scripts = lambda: None
    made.renew_scripts()
    assert made.said == ['Only the module was renewed, not the runscripts: not yours. The owner of /inst can renew them with the '
                         'same command', 'runscripts renewed in /inst']


def test_slingmpi_that_cannot_be_built(load_block, monkeypatch, tmp_path):
    """Without sources of its version, without PyTorch, without MPI: outside and inside of a container."""
    block, lines = load_block('slingmpi'), []
    made = instance_of(block.EB_slingmpi, {'version': '0.0.9', 'mpicxx': 'mpicxx', 'name': 'slingmpi'}, python_cmd='python')
    made.obtain_file = lambda *_, **__: None
    lines.append(error_of(made.find_sources))
    (tmp_path / 'pyproject.toml').write_text('name = "slingmpi"\nversion = "0.1.0"\n')
    made.obtain_file = lambda *_, **__: f'{tmp_path}/pyproject.toml'
    lines.append(error_of(made.find_sources))
    made.cfg['version'] = '0.1.0'
    assert made.find_sources() == str(tmp_path)
    monkeypatch.setattr(block, 'probe_pytorch', lambda _: 'no torch')
    lines.append(error_of(made.check_pytorch))
    monkeypatch.setattr(block, 'probe_pytorch', lambda _: {'version': '2.13.0', 'file': '/env/torch/__init__.py'})
    made.check_pytorch()
    monkeypatch.setattr(block, 'mpi_library', lambda _: None)
    for made.cfg['inside'], found in ((False, ''), (True, ''), (False, '/usr/bin/mpicxx')):
        monkeypatch.setattr(block.EB_slingmpi, 'in_container', ['in-container'] * made.cfg['inside'])
        made.find_there = lambda name, found=found: found
        lines.append(error_of(made.find_mpi))
    monkeypatch.setattr(block, 'mpi_library', lambda _: '/opt/mpi/libmpi.so')
    monkeypatch.setattr(block, 'gtl_library', lambda _: '/gtl/libmpi_gtl_cuda.so')
    monkeypatch.setattr(block, 'dependency_root', lambda _, name: None)
    lines.append(str(made.find_mpi()))
    monkeypatch.setattr(block.EB_slingmpi, 'in_container', ['in-container'])
    lines.append(str(made.find_mpi()))
    expected('\n'.join(lines + made.said) + '\n', 'easyblocks/slingmpi', [(tmp_path, 'TMP')])


@pytest.mark.parametrize('compilers, mpi', [(['/mpi/mpicc', '/mpi/mpicxx'], 'MPI of /mpi/mpicc'), ([None, None], None)])
def test_what_a_process_must_have(load_block, monkeypatch, compilers, mpi):
    cray, roots = load_block('pytorch_cray'), {'NCCL': '/opt/nccl', 'aws-ofi-nccl': '/opt/plugin', 'CUDA': '/opt/cuda'}
    monkeypatch.setattr(cray, 'mpi_library', 'MPI of {}'.format)
    monkeypatch.setattr(cray, 'gtl_library', lambda _: '/opt/gtl')
    made = instance_of(cray.EB_PyTorch_Cray, {'version_label': None, 'only_site': 'derecho'}, installdir='/inst', root=roots.get,
                       mpi_compilers=None, dependency=lambda names: {'version': f'that of {names[0]}'})
    made.find_mpi_compilers = lambda: compilers
    made.cfg.dependencies = lambda: [
        {'full_mod_name': 'gcc/12.2.0', 'external_module': True, 'external_module_metadata': {'name': ['GCC']}},
        {'full_mod_name': 'cray-mpich/8.1', 'external_module': True, 'external_module_metadata': {'name': ['MPICH']}},
        {'full_mod_name': 'cuda/12', 'external_module': True, 'external_module_metadata': {'name': ['CUDA']}},
        {'full_mod_name': 'GCC/12', 'external_module': False, 'external_module_metadata': {}}]
    assert made.expectations() == {
        'version': '1.0+derecho.gcc.12.2.0.cray.mpich.8.1', 'prefix': '/inst', 'mpi': mpi, 'gtl': '/opt/gtl', 'nccl': '/opt/nccl',
        'nccl_version': 'that of NCCL', 'plugin': '/opt/plugin', 'settings': ['USE_MPI', 'USE_CUDA', 'USE_NCCL']}
    roots.clear()
    made.cfg['version_label'] = ''
    found = made.expectations()
    assert (found['version'], found['settings'], found['nccl'], found['nccl_version'], found['plugin']) == (
        '1.0', ['USE_MPI'], None, None, None)


RIGHT = {'import_errors': [], 'libraries': ['/mpi/libmpi.so.12', '/gtl/libmpi_gtl_cuda.so', '/nccl/lib/libnccl.so.2',
                                            '/env/libtorch_cpu.so'],
         'file': '/env/torch/__init__.py', 'version': '2.4.0', 'mpi': True, 'entry_points': ['torchrun'], 'vision_cuda': 12,
         'config': 'USE_MPI=ON, USE_CUDA=1', 'nccl': True, 'nccl_version': [2, 21, 5]}
EXPECTED = {'prefix': '/env', 'version': '2.4.0', 'settings': ['USE_MPI', 'USE_CUDA'], 'mpi': '/mpi/libmpi.so.12',
            'gtl': '/gtl/libmpi_gtl_cuda.so', 'nccl': '/nccl', 'nccl_version': '2.21.5', 'plugin': '/plugin'}
WRONG = [
    {}, {'import_errors': ['x cannot be imported']}, {'file': '/other/torch/__init__.py'}, {'version': '2.4.1'},
    {'entry_points': []}, {'vision_cuda': -1}, {'config': 'USE_MPI=OFF, USE_CUDA=ON'}, {'mpi': False}, {'nccl': False},
    {'nccl_version': [2, 18, 3]}, {'libraries': RIGHT['libraries'][1:]}, {'libraries': RIGHT['libraries'][2:]},
    {'libraries': [*RIGHT['libraries'], '/other/libmpi.so.40.30.4', '/env/libgloo.so']},
    {'libraries': [*RIGHT['libraries'], '/wheel/libnccl.so']}, {'libraries': RIGHT['libraries'][:2]}, {'plugin': '/other/plugin.so'},
    {'plugin': None}]


def test_what_is_wrong_with_a_process(monkeypatch):
    monkeypatch.setattr(process, 'needed_libraries', lambda path: {'/env/libtorch_cpu.so': ['libmpi.so.12'],
                                                                   '/env/libgloo.so': ['libmpi.so.40']}.get(path, []))
    lines = []
    for change in WRONG:
        monkeypatch.setattr(process, 'find_plugin', lambda _, change=change: change.get('plugin', '/plugin/libnccl-net.so'))
        lines.append(' / '.join(process.check_linkage({**RIGHT, **change}, EXPECTED)))
    lines += process.check_linkage({**RIGHT, 'libraries': []}, {**EXPECTED, **dict.fromkeys(['mpi', 'gtl', 'nccl', 'plugin'])})
    expected('\n'.join(lines) + '\n', 'easyblocks/process')


@pytest.mark.parametrize('settings, answering, silent, own', [
    ({'index-url': 'https://a/'}, ['https://a/'], [], False), ({}, ['https://default/'], [], False), ({'no-index': '1'}, [], [], True),
    ({'index-url': 'https://a/'}, ['https://a/', 'https://b/'], ['https://c/ (refused)'], False),
    ({'index-url': 'https://a/'}, [], ['https://a/ (refused)'], False)])
def test_download_of_wheels(load_block, monkeypatch, tmp_path, settings, answering, silent, own):
    """What pip gets of its indexes, without those that do not answer; a project's own wheels are not asked for."""
    block, ran = load_block('generic.pythonvenv'), []
    (tmp_path / 'a.lock').write_text('--extra-index-url https://c/\nA==1 \\\n    --hash=sha256:a\nb==2 --hash=sha256:b\n')
    (tmp_path / 'env').mkdir()
    for name in ('PIP_NO_INDEX', 'PIP_INDEX_URL', 'PIP_EXTRA_INDEX_URL'):
        monkeypatch.delenv(name, raising=False)
    for name, answer in (('pip_settings', lambda _: dict(settings)), ('default_index', lambda _: 'https://default/'),
                         ('source_paths', lambda: [f'{tmp_path}/sources']), ('run', answers('no wheel'))):
        monkeypatch.setattr(block, name, answer)
    made = instance_of(block.PythonVenv, {'stop': None}, lock_file=f'{tmp_path}/a.lock')
    made.look_for_wheels = answers('WARNING: b has bad hash ')
    made.python_with_pip = lambda python, _: python
    made.look_at_indexes = lambda _: (answering, silent)

    def download(command, env):
        ran.append((command, env, open(command[-1]).read()))
        return int(bool(silent)), 'ERROR: other'
    made.run_download = download
    if own:
        (tmp_path / 'a-1-py3-none-any.whl').touch()
    if silent:
        assert error_of(made.download_wheels, 'python').startswith(
            f'Downloading the packages of {tmp_path}/a.lock failed (to {tmp_path}/sources/p/PyTorch/wheels). No answer from {silent[0]}. ')
    else:
        made.download_wheels('python')
    (command, env, lock), = ran
    pip = f'python -s -m pip download --require-hashes --only-binary :all: --progress-bar off --disable-pip-version-check --dest ' \
          f'{tmp_path}/sources/p/PyTorch/wheels --retries 2 {"--no-deps " * own}--requirement'
    assert ' '.join(command[:-1]) == pip
    assert {name: value for name, value in (env or {}).items() if os.environ.get(name) != value} == (
        {} if not silent else {'PIP_INDEX_URL': 'https://a/', 'PIP_EXTRA_INDEX_URL': 'https://a/ https://b/'} if answering else {
            'PIP_NO_INDEX': '1'})
    assert lock.startswith('--extra-index-url') == (not silent) and ('A==1' in lock) == (not own) and 'b==2' in lock
    assert made.said == ['b has bad hash', 'downloading the packages of a.lock with pip...']
    assert (tmp_path / 'sources/p/PyTorch/wheels/a-1-py3-none-any.whl').exists() == own


def test_large_files_are_named(load_block):
    made = instance_of(load_block('generic.pythonvenv').PythonVenv)
    script = ("echo '  Downloading https://x/a-1.whl (3.0 MB)'; echo 'Using cached b-1.whl.metadata (1 GB)' >&2; "
              "echo 'Downloading c-1.whl (9 kB)'; echo $PYTHONUNBUFFERED; exit 3")
    assert made.run_download(['sh', '-c', script], None)[0] == 3
    assert made.said == ['  a-1.whl (3.0 MB)', '  b-1.whl (1 GB, pip has it)']
    assert made.run_download(['sh', '-c', 'echo $A $PYTHONUNBUFFERED'], {'A': 'B'}) == (0, 'B 1\n')


def test_cudnn_by_what_its_libraries_need(load_block, monkeypatch, tmp_path):
    cray = load_block('pytorch_cray')
    (tmp_path / 'libcudnn_ops.so').touch()
    for needed, wrong in (('libcublas.so.11', True), ('libcublasLt.so.11', True), ('libcublas.so.12', False), ('libz.so.1', False)):
        monkeypatch.setattr(cray, 'needed_libraries', lambda _, needed=needed: [needed])
        if wrong:
            assert error_of(cray.check_cudnn, '/opt/cudnn', str(tmp_path), '12.4').startswith('cuDNN in /opt/cudnn is for CUDA 11, ')
        else:
            cray.check_cudnn('/opt/cudnn', str(tmp_path), '12.4')


WHEEL = {'hip': None, 'cuda': '12.9', 'nccls': {'/env/libnccl.so.2': 22707}}


@pytest.mark.parametrize('found, versions, plugin, apis, needed, wrong', [
    ({}, {'CUDA': '12.4'}, '/p/plugin.so', {10}, 'libcudart.so.12', []),
    ({'cuda': None}, {}, None, (), '', ['PyTorch in this environment is a CPU build without NCCL: the lock file names the wrong '
                                        'wheel (+cpu?)']),
    ({}, {}, None, (), '', ["NCCL would find no network plugin: $LD_LIBRARY_PATH has no directory with one, and $NCCL_NET_PLUGIN "
                            "is not set to one. Does the plugin's module set them?"]),
    ({'nccls': {'/a/libnccl.so': 22707, '/b/libnccl.so': 22707}}, {'CUDA': '13.0'}, '/p/plugin.so', {10}, 'libcudart.so.13', [
        'The process has two NCCL libraries, each with its own network: /a/libnccl.so and /b/libnccl.so. Remove one of the packages '
        'from the lock file',
        'The PyTorch wheel is for CUDA 12.9, but the module among the dependencies is for CUDA 13.0: the major versions must be the '
        'same',
        'The PyTorch wheel is for CUDA 12.9, but the plugin /p/plugin.so is for CUDA 13: the major versions must be the same']),
    ({'cuda': None, 'hip': '6.4'}, {'ROCm': '6.4.1'}, '/p/plugin.so', {4, 5}, 'libamdhip64.so.6', [
        'RCCL 2.27.7 of the wheel accepts ncclNetPlugin_v6 to v10, but the plugin /p/plugin.so has v4, v5: use another release of '
        'the plugin (docs/easyconfigs.md has the table)'])])
def test_wheel_and_plugin(monkeypatch, found, versions, plugin, apis, needed, wrong):
    monkeypatch.setattr(process, 'find_plugin', lambda _: plugin)
    monkeypatch.setattr(process, 'exported_apis', lambda _: apis)
    monkeypatch.setattr(process, 'needed_libraries', lambda _: [needed])
    assert process.check_wheel({**WHEEL, **found}, versions)[0] == wrong


@pytest.mark.parametrize('code, python', [(0, 'python3'), (1, '/work/venv')])
def test_python_without_pip(load_block, monkeypatch, code, python):
    block, ran = load_block('generic.pythonvenv'), []
    monkeypatch.setattr(block, 'run', lambda *words: ran.append(words) or SimpleNamespace(exit_code=code))
    made = instance_of(block.PythonVenv, make_venv=lambda python, path: path)
    assert made.python_with_pip('python3', '/work') == python and ran == [('python3', '-s', '-c', 'import pip')]


@pytest.mark.parametrize('glibc, says', [(27, 'is for manylinux_2_28_x86_64, but this machine is x86_64 with glibc 2.27'), (28, 'does not pin')])
def test_a_lock_file_fits_from_its_glibc_on(load_block, monkeypatch, tmp_path, glibc, says):
    block = load_block('generic.pythonvenv')
    (tmp_path / 'a.lock').write_text('')
    for name, value in (('read_head', ([], ['manylinux_2_28_x86_64'], [])), ('recipe_of', {'wanted': []}),
                        ('machine_at_hand', (f'glibc 2.{glibc}', glibc, 'x86_64')), ('source_paths', [])):
        monkeypatch.setattr(block, name, lambda *_, value=value: value)
    made = instance_of(block.PythonVenv, {'python_versions': []}, lock_file=str(tmp_path / 'a.lock'))
    made.named_easyconfigs = lambda: ['a.eb']
    assert says in error_of(made.check_lock_file, '3.11')      # what is looked at next
