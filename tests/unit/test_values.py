# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch env --values: a module's variables for a PyTorch that is there already, and what is said of it."""
import pathlib
import subprocess
import sys
import types
from unittest import mock

import pytest

from slingtorch import sites as SITES
from slingtorch.commands import values
from testbed import ROOT, derecho, parse_env0, wheels


@pytest.fixture
def environment(tmp_path):
    """A function: an environment with a toy PyTorch for this CUDA or ROCm; the variables in which it is active."""
    def make(cuda=None, hip=None, more=(), release=23007):
        venv = tmp_path / 'venv'
        subprocess.run([sys.executable, '-m', 'venv', '--without-pip', venv], check=True)
        packages = next(venv.glob('lib/python3*/site-packages'))
        library = 'librccl.so.1' if hip else 'libnccl.so.2'
        files = wheels.toy_torch(tmp_path, '9.9.0', cuda, hip, {library: release} if cuda or hip else {})
        for name, content in {**files, **{f'{name}/__init__.py': '' for name in more}}.items():
            (packages / name).parent.mkdir(parents=True, exist_ok=True)
            (packages / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        (tmp_path / 'home').mkdir()
        return {'PATH': f'{venv}/bin:/usr/bin:/bin', 'HOME': str(tmp_path / 'home'), 'PYTHONPATH': str(ROOT)}
    return make


def evaluate(env, args, check=True):
    """(variables of a bash after eval "$(slingtorch env --values ARGS)", what was said)"""
    script = f'eval "$({sys.executable} -m slingtorch env --values {args})" && env -0'
    done = subprocess.run(['bash', '-c', script], env=env, cwd='/', stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)
    assert not check or done.returncode == 0, done.stderr
    return parse_env0(done.stdout), done.stderr


def test_the_values_of_a_module(environment):
    """Also the second time; the user's own values are replaced and named, as a module would."""
    before = {**environment(cuda='13.2', more=['mpi4py']), 'NCCL_SOCKET_IFNAME': 'eth7', 'APPTAINER_BINDPATH': '/mine'}
    env, said = evaluate(before, '--site perlmutter')
    site = SITES.load('perlmutter', {})
    scripts, python = f'{ROOT}/runscripts', before['PATH'].split(':')[0] + '/python'
    assert {name: value for name, value in env.items() if before.get(name) != value and name not in ('_', 'PWD', 'SHLVL')} == {
        **{value.name: value.value for value in site.env_values().values()}, 'PATH': f'{scripts}:{before["PATH"]}',
        'RUNSCRIPTS': scripts, 'RUNSCRIPTSPYTORCH': scripts, 'SLINGTORCH_CUDA_VERSION': '13.2', 'SLINGTORCH_SITE': 'perlmutter',
        'APPTAINERENV_PREPEND_PATH': scripts, 'SINGULARITYENV_PREPEND_PATH': scripts, 'APPTAINER_NV': '1', 'SINGULARITY_NV': '1',
        'APPTAINER_BINDPATH': f'{ROOT},/mine', 'SINGULARITY_BINDPATH': str(ROOT)}
    assert said == f"""\
slingtorch: site perlmutter (named by --site or $SLINGTORCH_SITE), bundle {ROOT}
slingtorch: PyTorch 9.9.0 for CUDA 13.2, in {python}
slingtorch: replaced, as a module would: NCCL_SOCKET_IFNAME=eth7. Export yours after this line
slingtorch: NCCL's network plugin is missing, and jobs of several nodes fail without it: the site has it: module load nccl/2.29.2-cu13
slingtorch: mpi4py is installed and uses an MPI that must understand your launcher: with 'export SLINGTORCH_MPI=auto' each rank checks this
"""
    again, said = evaluate(env, '--site perlmutter')
    assert {**again, 'SHLVL': ''} == {**env, 'SHLVL': ''} and 'replaced' not in said


class Site:
    """A site with these GPUs, whose generations have these versions of CUDA or ROCm and a plugin, and default()."""

    def __init__(self, gpu='cuda', plugin='aws-ofi-nccl/1.21.1-x', **versions):
        self.gpu, self.versions, self.plugin = gpu, versions, plugin
        roles = {'nccl_plugin': plugin}
        self.generations = {name: {**roles, 'default': 'yes'} if name == 'two' else roles for name in versions}

    def toolkit(self, name):
        return self.versions[name]

    def suffix(self, name):
        return f'-{name}' if len(self.versions) > 1 else ''

    def provided(self, name, role, asked_by):
        assert (role, asked_by) == ('nccl_plugin', 'slingtorch env --values')
        return {'module': self.plugin, 'eb': self.plugin[:3] == 'aws'}

    def env_values(self, groups):
        return {name: types.SimpleNamespace(name=name, value=f'{name} {groups}', when=when, easyblocks=easyblocks)
                for name, when, easyblocks in (('B', None, []), ('A', None, ['PythonVenv']), ('C', 'x', []), ('D', None, ['EB_x']),
                                               (values.NET, None, []))}

    def parameter_values(self, groups):
        return {'bind_paths': types.SimpleNamespace(value=['/tmp', '/nowhere', '/:/host'])} if groups else {}


def own(kind, toolkit='', found=(), root='/nowhere', problem='', nccls=(), **environ):
    """A PyTorch of the user's for this."""
    one = values.OwnPyTorch.__new__(values.OwnPyTorch)
    one.machine, one.kind, one.toolkit, one.problem = values.Machine(environ, root=str(root)), kind, toolkit, problem
    one.found, one.report, one.nccls = {'mpi4py': None, 'horovod': None, **dict(found)}, values.Report(0), lambda: list(nccls)
    return one


@pytest.mark.parametrize('kind, gpu, problem, cuda, net', [
    ('cuda', 'cuda', '', '13.2', True), ('rocm', 'rocm', '', None, True), (None, 'rocm', '', None, False),
    (None, 'none', 'no python', None, True)])
def test_variables(kind, gpu, problem, cuda, net):
    """What NCCL needs between nodes is not set for a PyTorch without it, but for images, of which nothing is known."""
    path = {'PATH': '/bin:/b/runscripts', 'SINGULARITY_BINDPATH': '/x,/b', 'APPTAINERENV_PREPEND_PATH': '/y'}
    flag = {'cuda': 'NV', 'rocm': 'ROCM'}.get(gpu)
    assert values.variables('/b', Site(gpu), ['g'], own(kind, '13.2', problem=problem, **path)) == [
        ('RUNSCRIPTS', '/b/runscripts'), ('RUNSCRIPTSPYTORCH', '/b/runscripts'), ('PATH', '/b/runscripts:/bin'),
        ('A', "A ['g']"), ('B', "B ['g']"), *[(values.NET, values.NET + " ['g']")] * net, ('SLINGTORCH_CUDA_VERSION', cuda),
        ('APPTAINER_BINDPATH', '/b,/tmp,/:/host'), ('APPTAINERENV_PREPEND_PATH', '/b/runscripts:/y'),
        *[(f'APPTAINER_{flag}', '1')] * bool(flag), ('SINGULARITY_BINDPATH', '/b,/tmp,/:/host,/x'),
        ('SINGULARITYENV_PREPEND_PATH', '/b/runscripts'), *[(f'SINGULARITY_{flag}', '1')] * bool(flag)]
    assert dict(values.variables('/b', Site(gpu), [], own(kind)))['APPTAINER_BINDPATH'] == '/b'


BUILD = ("build it once ('eval \"$(slingtorch env)\"' in another shell first): {}eb --robot aws-ofi-nccl-1.21.1-x.eb; then in this "
         "shell: module load aws-ofi-nccl/1.21.1-x{}")
NO_OTHER = "the site's file names none for CUDA 13.2%s; docs/easyconfigs.md explains how to build one"


@pytest.mark.parametrize('site, says', [
    (Site(one='13.0'), BUILD.format('', '')),
    (Site(one='13.0', two='13.1'), BUILD.format('SLINGTORCH_SITE_GENERATION=two ', '-two')),
    (Site(one='13.0', two='12.1', three='13.1'), BUILD.format('SLINGTORCH_SITE_GENERATION=one ', '-one')),
    (Site(plugin='nccl/2', one='13.0'), 'the site has it: module load nccl/2'),
    (Site(one='12.9', two='', three='11.8'), NO_OTHER % ' (it has CUDA 12.9, CUDA 11.8)'), (Site('none'), NO_OTHER % ''),
    (Site('rocm', one='13.1'), NO_OTHER % ' (it has ROCm 13.1)'),
])
def test_where_the_plugin_is(site, says):
    assert values.plugin_remedy(site, own('cuda', '13.2')) == says


def test_the_plugin_is_there(tmp_path):
    wheels.toy_plugin(tmp_path / 'libnccl-net.so', [3, 5])
    nccl = derecho.shared_library(tmp_path / 'libnccl.so.2', source='int no_interface;')
    one = own('cuda', '13.2', nccls=['/nowhere', nccl], LD_LIBRARY_PATH='')
    assert values.differences(Site(), one, {values.NET: '1', 'LD_LIBRARY_PATH': str(tmp_path)}) == [
        f'plugin: whether NCCL can load {tmp_path}/libnccl-net.so (v3 to v5): no NCCL shows it']


def test_plugin_that_cannot_be_read(tmp_path):
    (tmp_path / 'libnccl-net.so').write_text('a page to log in')
    report = values.Report()
    values.check_plugin(report, f'{tmp_path}/libnccl-net.so', [])
    path = f'{tmp_path}/libnccl-net.so'
    assert [finding[:4] for finding in report.sorted()] == [
        ('yellow', 'plugin', f'cannot read {path}: {path} is not an ELF library', 'install the plugin again')]


def gpu_of(directory, vendor):
    """A root with a GPU of this vendor."""
    device = directory / 'sys/bus/pci/devices/0000:01:00.0'
    device.mkdir(parents=True)
    for name, text in (('class', '0x030200'), ('vendor', vendor), ('local_cpulist', '0')):
        (device / name).write_text(text + '\n')
    return directory


@pytest.mark.parametrize('kind, toolkit, gpu, vendor, says', [
    (None, '', 'rocm', '0x10de', ["this PyTorch is for processors, but the GPUs of this machine are AMD's: it cannot use them"]),
    ('rocm', '7.1', 'unknown', '0x10de', ["this PyTorch is for ROCm, but the GPUs of this machine are NVIDIA's: it cannot use them"]),
    (None, '', 'none', '0x8086', []), ('cuda', '12.4', 'unknown', '0x10de', []),
])
def test_gpus(tmp_path, kind, toolkit, gpu, vendor, says):
    assert values.differences(Site(gpu), own(kind, toolkit, root=gpu_of(tmp_path, vendor)), {}) == says


def test_what_differs_from_a_module():
    one = own('cuda', '', [('mpi4py', 'x'), ('horovod', 'x')], EBROOTPYTORCH='/sw/PyTorch', A='mine', B='same',
              C='x', Z='2', APPTAINER_BINDPATH='/x')
    one.toolkit = '12.4'
    one.report.add('yellow', 'torch', 'it is in your home', 'remove it')
    assert values.differences(Site(), one, {'A': '1', 'B': 'same', 'C': None, 'NEW': '1', 'Z': '3', 'APPTAINER_BINDPATH': '/b'}) == [
        'replaced, as a module would: A=mine, Z=2. Export yours after this line',
        "a PyTorch module is loaded (/sw/PyTorch), and it needs no --values. To use your own PyTorch, run 'module unload PyTorch', "
        'then this again', 'torch: it is in your home; remove it',
        "mpi4py and horovod is installed and uses an MPI that must understand your launcher: with 'export SLINGTORCH_MPI=auto' each "
        'rank checks this']
    one = own(None, problem='no python', found=[('mpi4py', 'x')])
    assert values.differences(Site(), one, {}) == [
        'activate your environment, or load its module, and run this again; for a container image of another project nothing is missing']
    assert not values.differences(Site('none'), own(None, found=[('mpi4py', 'x')], SLINGTORCH_MPI='auto'), {})


def test_a_pytorch_that_is_there(environment):
    env = environment(hip='7.1.25', more=['horovod'])
    one = values.OwnPyTorch(values.Machine(env))
    torch = pathlib.Path(one.found['torch'])
    for path in (torch / '../nvidia/nccl/lib/libnccl.so.2', torch / '../_rocm_sdk_x/lib/librccl.so', torch / '../../../librccl.so.1'):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert (one.kind, one.toolkit, one.problem, bool(one.found['horovod'])) == ('rocm', '7.1.25', '', True)
    assert one.what() == f'PyTorch 9.9.0 for ROCm 7.1.25, in {env["PATH"].split(":")[0]}/python'
    assert [path.replace(str(torch), 'torch') for path in one.nccls()] == [
        'torch/lib/librccl.so.1', 'torch/../nvidia/nccl/lib/libnccl.so.2', 'torch/../_rocm_sdk_x/lib/librccl.so',
        f'{torch.parents[3]}/lib/librccl.so.1']
    (torch / 'version.py').write_text("__version__ = '9.9.0+cpu'\ncuda = None\nhip = None\n")
    with mock.patch.object(values.look, 'look_at_torch', wraps=values.look.look_at_torch) as look:
        one = values.OwnPyTorch(values.Machine(env))
    assert look.call_args[0][2:] == (str(torch), one.found['home']) and one.found['home'].startswith(env['HOME'])
    assert (one.kind, one.toolkit) == (None, '')
    assert one.what() == f'PyTorch 9.9.0+cpu for processors, in {env["PATH"].split(":")[0]}/python'


@pytest.mark.parametrize('python, says', [
    (None, "PATH has no 'python'"), ('exit 3', '{}/python does not run: it ended with status 3'),
    ('echo "{}"', '{}/python has no PyTorch'), ('echo a greeting; echo "{}"', '{}/python has no PyTorch'),
    ('echo 3', "{}/python does not run: it ended with status 0"),
    (r'printf "\377" >&2; exit 1', '{}/python does not run: \ufffd'),
    ('\n#!/nowhere', "{0}/python does not run: [Errno 2] No such file or directory: '{0}/python'")])
def test_no_python_or_no_pytorch(tmp_path, python, says):
    if python:
        (tmp_path / 'python').write_text(f'#!/bin/sh\n{python}\n'.rpartition('\n\n')[2])
        (tmp_path / 'python').chmod(0o755)
    one = values.OwnPyTorch(values.Machine({'PATH': str(tmp_path)}))
    assert one.what() == says.replace('{}', str(tmp_path)).replace('{0}', str(tmp_path)) and (one.kind, one.toolkit) == (None, '')


def test_an_unknown_site_fails_in_the_shell():
    assert 'There is no site' in evaluate({'PATH': '/usr/bin:/bin', 'PYTHONPATH': str(ROOT)}, '--site nonsense', check=False)[1]
