# SPDX-License-Identifier: GPL-2.0-only
"""Parts of easyblocks and of slingtorch/install without `eb`: what goes wrong too rarely for an installation."""
import errno
import json
import os
import socket
import subprocess
from types import SimpleNamespace

import pytest
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


def test_definition_that_the_runtime_cannot_read(monkeypatch):
    monkeypatch.setattr(container_runtime, 'run_runtime', answers('FATAL: no such partition'))
    with pytest.raises(EasyBuildError, match='cannot read the definition inside the image: .*no such partition'):
        container_runtime.definition_of('x.sif')
    monkeypatch.setattr(container_runtime, 'run_runtime', answers('Bootstrap: docker\n', 0))
    assert container_runtime.definition_of('x.sif') == 'Bootstrap: docker\n'


def test_script_without_the_function_that_undoes_it(load_block, tmp_path):
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin/activate').write_text('deactivate_all () {\n}\n')
    made = instance_of(load_block('generic.pythonenvironment').PythonEnvironment, installdir=str(tmp_path))
    with pytest.raises(EasyBuildError, match='bin/activate has an unknown form: it has no function deactivate'):
        made.add_to_script(str(tmp_path), 'activate', '. file\n', 'deactivate () {\n', '    . own\n')


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


def test_pytorch_without_nccl():
    found = {'import_errors': [], 'libraries': [], 'file': '/env/torch/__init__.py', 'version': '2.4.0', 'mpi': True,
             'entry_points': ['torchrun'], 'vision_cuda': None, 'config': '', 'nccl': False, 'nccl_version': None}
    expected = {'prefix': '/env', 'version': '2.4.0', 'settings': [], 'mpi': None, 'gtl': None, 'nccl': '/opt/nccl',
                'nccl_version': '2.21.5', 'plugin': None}
    assert 'torch.distributed has no NCCL' in process.check_linkage(found, expected)


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
    'ERROR: [Errno 28] No space left on device', 'error: Disk quota exceeded (os error 122)', 'ERROR: Permission denied',
    'ERROR: Cannot download: not enough bytes were received', 'ERROR: IncompleteRead(9 bytes)',
    'Looking\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES', 'error: Hash mismatch for `a`',
    'error: invalid package format', 'error: Failed to read from zip file', 'ERROR: all requirements must have their versions '
    'pinned', 'ERROR: Hashes are required in --require-hashes mode', 'ERROR: Invalid proxy URL',
    'ERROR: Exception:\nTraceback (most recent call last):\n  File "x"\nKeyError: 1', 'ERROR: No matching distribution',
    '\n'.join(map(str, range(20)))]


def test_remedies_of_pip_and_uv(load_block):
    made = instance_of(load_block('generic.pythonvenv').PythonVenv, lock_file='a.lock')
    found = [error_of(made.raise_pip_error, output, 'Downloading', '/wheels', ['http://x (refused)']) for output in PIP]
    lines = [f'{output!r}\n{"index" if "http://x" in text else "no index"}: {text.splitlines()[-1]}'
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
        for fetch in (True, False) if root or made.conda else (False,):
            made.make_environment('/env', fetch=fetch)
    # without packages nothing is asked of pip
    made.cfg.update(python_packages=[], extra_packages=[])
    made.make_environment('/env')
    made.conda = True
    monkeypatch.setattr(block, 'which', lambda *_, **__: None)
    made.dependency = lambda _: {'full_mod_name': 'conda/latest'}
    lines.append(error_of(made.make_environment, '/env'))
    del made.run_environment_command
    monkeypatch.setattr(block, 'run', answers('no\nnetwork'))
    lines.append(error_of(made.run_environment_command, [['false']], 'Making'))
    expected('\n'.join(lines) + '\n', 'easyblocks/environment', [(tmp_path, 'TMP')])


@pytest.mark.parametrize('conda', [True, False])
def test_scripts_that_activate(load_block, tmp_path, conda):
    block = load_block('generic.pythonenvironment')
    made = instance_of(block.PythonEnvironment, {
        'environment_image': True, 'modextravars': {'A': 1, 'B': {'value': "it's", 'pushenv': True}}},
        installdir=str(tmp_path / 'root'), dependency=lambda _: {} if conda else None)
    made.cfg.full_mod_name = 'PyTorch/1.0'
    (tmp_path / 'root/bin').mkdir(parents=True)
    for name, text in (('activate', 'deactivate () {\n}\n'), ('activate.csh', '#\n'), ('activate.fish', '#\n')):
        (tmp_path / 'root/bin' / name).write_text(text)
    made.write_activation(f'{tmp_path}/new', {'RUNSCRIPTS': '/r'}, {'LD_LIBRARY_PATH': ['/n', '/p'], 'NONE': []})
    # etc/conda is the same but for a comment
    text = ''.join(f'== {path.relative_to(tmp_path)}\n{path.read_text()}'
                   for path in sorted((tmp_path / 'new').rglob('*' if conda else 'bin/*')) if path.is_file())
    expected(text, f'easyblocks/activation-{"conda" if conda else "venv"}', [(tmp_path, 'TMP')])
    assert f'Read by {"conda deactivate" if conda else "bin/activate"}.\n' in (
        tmp_path / 'new/etc/conda/deactivate.d/slingtorch.sh').read_text()


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
            lines.append(f'== {path} {path.stat().st_mode:o}\n{path.read_text()}')
    (tmp_path / 'small.sif').touch()
    made.sanity_check_step()
    made.cfg.update(site_name=None, site_groups=[], container_python=None)
    made.write_scripts(f'{tmp_path}/newer')
    lines.append((tmp_path / 'newer/runscripts/lib/version').read_text())
    made.inside = answers('no /dev/fuse')
    made.sanity_check_step()
    expected('\n'.join(lines + made.said) + '\n', 'easyblocks/image', [(tmp_path, 'TMP')])


def test_packages_that_a_user_adds_to_an_image(load_block, tmp_path):
    """The environment is made in the container, and sees the packages of the image's own; not twice."""
    block, ran, path = load_block('generic.singularity'), [], tmp_path / 'user-software/venv/mine'
    made = instance_of(block.Singularity, {'preset_venv': 'mine', 'container_python': 'python3'}, installdir=str(tmp_path))
    made.cfg.filename = lambda: 'Small.eb'
    packages = path / 'lib/python3.10/site-packages'

    def inside(*words, **_):
        ran.append(words[:2] if '-c' in words else words)
        if 'venv' in words:
            packages.mkdir(parents=True)
        return SimpleNamespace(exit_code=int(code and 'venv' in words), output='/opt/venv/site-packages\n')
    made.inside, code = inside, 1
    assert error_of(made.make_preset_venv, f'{tmp_path}/user-software') == (
        'Making the virtual environment mine failed:\n/opt/venv/site-packages\nIf the disk is not full: the image may have no '
        "'python3' or no venv for it. Then set container_python, or preset_venv = None")
    assert os.listdir(path.parent) == ['mine.unfinished']
    code = 0
    made.make_preset_venv(f'{tmp_path}/user-software')
    assert ran[3:] == [('true',), ('python3', '-c'), ('python3', '-m', 'venv', '--system-site-packages', '/user-software/venv/mine')]
    assert (packages / 'image.pth').read_text() == '/opt/venv/site-packages\n' and os.listdir(path.parent) == ['mine']
    assert made.said == ['making the virtual environment mine...'] * 2
    made.make_preset_venv(f'{tmp_path}/user-software')
    assert ran[6:] == [('true',), ('/user-software/venv/mine/bin/python', '-c')]
    made.container_problem = lambda *words: '' if words == ('true',) else 'no python3.10'
    made.make_preset_venv(f'{tmp_path}/user-software')
    assert made.said[2] == (
        f'The virtual environment {path} was kept, but does not work with this image (does it have another Python?). To make '
        f"it again: move {tmp_path}/user-software away (also a .squashfs beside it), then run 'eb --rebuild Small.eb'")
