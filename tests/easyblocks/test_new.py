# SPDX-License-Identifier: GPL-2.0-only
"""`slingtorch new`: a project becomes an easyconfig and a lock file, which real `eb` installs; and what it refuses."""
import os
import pathlib
import re
import shutil
import sys
import types

import pytest

from slingtorch.commands import new
from testbed import ROOT, checked, forkedeb, run, wheels
from testbed.expected import expected

PYTHON = '%d.%d' % sys.version_info[:2]
OTHER = '3.%d' % (sys.version_info[1] + 1)
PROJECT = '''[project]
name = "mine"
version = "0.3"
requires-python = ">=3.8"
dependencies = ["torch>=0.1", "alpha<2"]
optional-dependencies = { more = ["beta"] }
'''
# a build backend in the project itself: nothing is to be fetched
BACKEND = '''[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
'''
BUILD = '''
import shutil
def build_wheel(directory, config_settings=None, metadata_directory=None):
    return shutil.copy({path!r}, directory).rpartition('/')[2]
'''


class Project:
    """A project, an index of tiny packages, and a PyTorch with these of them."""

    def __init__(self, directory):
        self.dir, self.files = directory / 'project', directory / 'files'
        self.out, self.wheels = directory / 'out', []
        for path in (self.dir, self.out, self.files):
            path.mkdir()
        (directory / 'bin').mkdir()
        self.on = directory / 'PyTorch-0.1-tiny.eb'
        for name, version, requires in [('torch', '0.1', ()), ('torch', '0.2', ()), ('alpha', '1.0', ()), ('alpha', '1.5', ()),
                                        ('alpha', '2.0', ()), ('beta', '1.0', ()), ('torchvision', '0.9', ('torch==0.2',)),
                                        ('torchvision', '0.8', ('torch==0.1',)), ('pip', '26.3', ())]:
            self.wheel(name, version, requires)
        pinned = [wheel for wheel in self.wheels if re.match('torch-0.1|torchvision-0.8', wheel.name)]
        self.on.with_suffix('.lock').write_text(wheels.lock_text(pinned))
        self.on.write_text(wheels.tiny_easyconfig(self.on.with_suffix('.lock'),
                                                  f"python_versions = ['{PYTHON}', '{OTHER}']"))

    def wheel(self, name, version, requires=(), tag='py3-none-any'):
        files = {'torch/__init__.py': '', 'torch/distributed.py': ''} if name == 'torch' else None
        self.wheels.append(wheels.make_wheel(self.files, name, version, files=files, requires=requires, tag=tag))
        self.index = wheels.make_index(self.files.parent / 'simple', self.wheels)

    def write(self, name, text):
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def package(self, name, version, requires=(), directory='.', more=''):
        """A package of the project, which builds itself to a wheel."""
        self.write(f'{directory}/pyproject.toml', f'[project]\nname = "{name}"\nversion = "{version}"\n'
                   f'requires-python = ">=3.8"\ndependencies = {list(requires)!r}\n{BACKEND}{more}')
        wheel = wheels.make_wheel(self.dir.parent / 'built', name, version, requires=requires)
        self.write(f'{directory}/backend.py', BUILD.format(path=str(wheel)))

    @property
    def env(self):
        return {'PIP_CONFIG_FILE': os.devnull, 'PIP_INDEX_URL': self.index}

    def new(self, source, *options, name='mine', check=True, env=()):
        merged = {**os.environ, **self.env, 'PYTHONPATH': str(ROOT), 'SLINGTORCH_SITE': 'local', **dict(env)}
        for key in ('PIP_EXTRA_INDEX_URL', 'PIP_NO_INDEX', 'PIP_FIND_LINKS'):
            merged.pop(key, None)
        words = ['new', name, '--from', self.dir / source, '--on', self.on, *options]
        return checked(forkedeb.slingtorch(words, merged, self.out), check)

    def made(self, source, *options, **kwargs):
        """(path of the easyconfig, {package: version} of its lock file)"""
        path = pathlib.Path(self.new(source, *options, **kwargs).stdout.strip())
        return path, dict(re.findall(r'^([\w.-]+)==(\S+)', path.with_suffix('.lock').read_text(), re.M))

    def refused(self, source, *options, **kwargs):
        """What it says, with nothing written."""
        done = self.new(source, *options, check=False, **kwargs)
        assert done.returncode == 1 and 'Traceback' not in done.stderr, done.stderr
        assert not list(self.out.iterdir())
        return done.stderr.partition('slingtorch: error: ')[2].rstrip('\n').replace(str(self.dir), 'DIRECTORY')


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def lock_with_uv(project, **env):
    """A uv.lock, as a user makes it."""
    merged = {**os.environ, 'UV_DEFAULT_INDEX': project.index, 'UV_NO_CONFIG': '0', **env}
    run(['uv', 'lock', '--no-progress'], cwd=project.dir, env=merged)


@pytest.mark.parametrize('source', ['requirements.txt', 'pyproject.toml', 'uv.lock'])
def test_becomes_a_module(project, eb_env, lmod, source):
    """PyTorch is that of --on although the index has a newer one, and what eb installs runs."""
    if source == 'requirements.txt':
        project.write('more/base.txt', 'alpha < 2   # a remark\n')
        project.write(source, f'--extra-index-url https://download.pytorch.org/whl/cpu\ntorch\n'
                              f'-r more/base.txt\n{"beta==1.0":40} \\\n  --hash=sha256:{"0" * 64}\n')
    else:
        project.write('pyproject.toml', PROJECT)
    if source == 'uv.lock':
        lock_with_uv(project)
    path, pins = project.made(source, *[] if source == 'requirements.txt' else ['--extra', 'more'])
    assert pins == {'torch': '0.1', 'alpha': '1.5', 'beta': '1.0', 'pip': '26.3'}
    assert re.match(r'mine-\d{8}-tiny\.eb$', path.name)
    if source == 'requirements.txt':
        text = re.sub('[0-9a-f]{64}', 'SHA256', path.read_text())
        expected(text, 'new-easyconfig', [(path.stem[5:13], 'DAY'), (PYTHON, 'PYTHON'), (os.uname().machine, 'MACHINE')])
    if source != 'requirements.txt':
        return      # eb installs all in the same way
    eb_env(path, env={**project.env, 'PIP_EXTRA_INDEX_URL': '', 'PIP_NO_INDEX': '0'})
    module = f'mine/{path.stem.partition("-")[2]}'
    loaded = lmod.load(module, modulepath=[eb_env.modulepath])
    run([f"{loaded['EBROOTMINE']}/bin/python", '-c', 'import torch.distributed, alpha, beta'])
    assert os.access(f"{loaded['RUNSCRIPTS']}/conda-python-distributed", os.X_OK)


def test_uv_lock_keeps_its_versions_and_torchvision_is_that_of_on(project):
    project.write('pyproject.toml', PROJECT.replace('"alpha<2"', '"alpha==1.0", "torchvision"'))
    lock_with_uv(project)
    project.write('pyproject.toml', PROJECT.replace('"alpha<2"', '"alpha", "torchvision"'))
    assert project.made('uv.lock')[1] == {'torch': '0.1', 'torchvision': '0.8', 'alpha': '1.0', 'pip': '26.3'}


def test_packages_of_the_project_are_wheels_beside_the_lock_file(project, eb_env, lmod):
    """A workspace: the project itself, and a member of which the index has another file of this version."""
    project.package('mine', '0.3', ['torch', 'part'], more='[tool.uv.workspace]\nmembers = ["parts/*"]\n'
                    '[tool.uv.sources]\npart = { workspace = true }\n')
    project.package('part', '0.4', ['alpha<1.2'], directory='parts/part')
    lock_with_uv(project)
    project.wheel('part', '0.4', ['beta'])
    path, pins = project.made('uv.lock')
    assert pins == {'torch': '0.1', 'alpha': '1.0', 'mine': '0.3', 'part': '0.4', 'pip': '26.3'}
    assert {file.name for file in project.out.glob('*.whl')} == {'mine-0.3-py3-none-any.whl', 'part-0.4-py3-none-any.whl'}
    eb_env('--fetch', path, env={**project.env, 'PIP_EXTRA_INDEX_URL': '', 'PIP_NO_INDEX': '0'})
    for wheel in project.out.glob('*.whl'):
        wheel.unlink()
    eb_env(path, env={'PIP_CONFIG_FILE': os.devnull, 'PIP_NO_INDEX': '1'})


def test_a_package_without_a_wheel_is_built(project):
    project.package('part', '0.4', ['alpha'], directory='elsewhere')
    project.write('requirements.txt', 'torch\n')
    pins = project.made('requirements.txt', '--build', './elsewhere')[1]
    assert pins['part'] == '0.4' and (project.out / 'part-0.4-py3-none-any.whl').exists()
    said = project.new('requirements.txt', '--build', 'no-such-thing==7', check=False).stderr
    assert said.startswith('slingtorch: building a wheel of no-such-thing==7\n') and said.endswith(
        'slingtorch: error: Building a wheel of no-such-thing==7 failed (the reason is above)\n')


def test_locking_again_finds_the_wheels_beside_it(project):
    project.package('part', '0.4', ['alpha'])
    project.write('requirements.txt', '-e .\n')
    path, pins = project.made('requirements.txt')
    path.with_suffix('.lock').unlink()
    run([sys.executable, '-m', 'slingtorch', 'lock', path], env={**os.environ, **project.env, 'PYTHONPATH': str(ROOT),
                                                                'PIP_FIND_LINKS': '', 'PIP_EXTRA_INDEX_URL': ''})
    assert '\npart==0.4 ' in path.with_suffix('.lock').read_text()


def test_the_same_command_again_is_an_update(project):
    project.write('requirements.txt', 'alpha\n')
    first, second = project.made('requirements.txt')[0], project.made('requirements.txt')[0]
    assert second.name == first.name.replace('-tiny', '.2-tiny') and first.exists()


def test_site_values_and_the_image(project, eb_env):
    """What jobs are staged from, where the site stages them by itself; values of the site as for PyTorch."""
    project.write('requirements.txt', 'alpha\n')
    sites = project.dir / 'sites'
    sites.mkdir()
    text = (ROOT / 'hooks/sites/local.cfg').read_text()
    more = '\n[env %s]\nvalue = %s\nreason = a test\nsource = none\n'
    (sites / 'here.cfg').write_text(text + more % ('SLINGTORCH_STAGE_NODES', '4') + more % ('NCCL_CROSS_NIC', '1'))
    env = {'SLINGTORCH_SITES_PATH': str(sites), 'SLINGTORCH_SITE': 'here'}
    path = project.made('requirements.txt', env=env)[0]
    assert '\nenvironment_image = True\n' in path.read_text()
    path.write_text(path.read_text().replace('environment_image = True\n', ''))
    done = eb_env(path, env={**env, **project.env, 'PIP_EXTRA_INDEX_URL': ''})
    assert 'site here: mine-' in done.stdout and 'NCCL_CROSS_NIC' in done.stdout


def test_a_wheel_for_another_pytorch(project):
    """pip and uv do not know what was compiled for what."""
    pages = project.dir / 'pages'
    for version in ('1.0+cu12torch0.1', '1.1+cu12torch0.2'):
        wheels.make_wheel(pages, 'flash', version)
    project.write('requirements.txt', f'--find-links {pages}\nflash\n')
    assert project.refused('requirements.txt') == (
        'flash 1.1+cu12torch0.2 is compiled for PyTorch 0.2, but PyTorch-0.1-tiny.eb has 0.1. Name a wheel that fits (flash @ '
        'https://...whl), or use another --on')
    project.write('requirements.txt', f'--find-links {pages}\nflash==1.0+cu12torch0.1\n')
    assert project.made('requirements.txt')[1]['flash'] == '1.0+cu12torch0.1'


REMEDY = '\nChange a requirement in requirements.txt, name another easyconfig than PyTorch-0.1-tiny.eb with --on, or, where ' \
    'only a wheel is missing, build one: --build REQUIREMENT'


@pytest.mark.parametrize('lines, says', [
    ('no-such-thing==3\n', ['no-such-thing was not found', REMEDY]),
    ('torch==0.2\n', ['the packages cannot be had together. The output of uv is:\n'
                      'Because you require torch==0.1 and torch==0.2, ', REMEDY]),
    ('gamma\n', ['gamma', REMEDY]),
    ('-c limits.txt\n', ["an easyconfig cannot have the option '-c'. Remove it; write each line of a constraints file as a "
                         'requirement']),
    ('./nowhere\n', ['Building a wheel of', 'nowhere']),
    ('-r gone.txt\n', ['gone.txt']),
])
def test_requirements_that_cannot_be_had(project, lines, says):
    project.wheel('gamma', '1.0', tag='cp27-cp27m-win32')
    said = project.refused(project.write('requirements.txt', lines).name)
    for text in says:
        assert text in said


def test_lines_of_a_requirements_file():
    wanted = new.Wanted('/p/requirements.txt')
    wanted.read('alpha[x] >= 1  # why\n\n# all\n-e .[more]\n--editable=./sub\n./part\nhere @ file:///src/here[a]\n-f wheels\n'
                '--find-links https://page\n-i https://own\n--extra-index-url https://download.pytorch.org/whl/cpu\n'
                'beta @ https://b/beta.whl\n', '/p/requirements.txt')
    assert (wanted.lines, wanted.projects, wanted.links, wanted.index_urls) == (
        ['alpha[x] >= 1', 'beta @ https://b/beta.whl'],
        [('/p/.', '[more]'), ('/p/./sub', ''), ('/p/./part', ''), ('/src/here', '[a]')], ['/p/wheels', 'https://page'], ['https://own'])


def test_extras_of_a_pyproject(tmp_path):
    path = tmp_path / 'pyproject.toml'
    path.write_text(PROJECT + BACKEND)
    wanted, marker = new.read_project('uv', str(path), ['more'], {})
    assert (wanted.projects, wanted.lines, marker) == ([(str(tmp_path), '[more]')], [], "(python_full_version >= '3.8')")
    path.write_text(PROJECT)
    with pytest.raises(RuntimeError, match="pyproject.toml does not have 'none'"):
        new.read_project('uv', str(path), ['none'], {})


@pytest.mark.parametrize('roles, role, version', [
    (['gpu', 'python'], 'build eb CondaPython/3.12', '3.12'), (['gpu'], 'build eb CondaPython/3.12', PYTHON), (['python'], '', PYTHON)])
def test_python_of_the_site(roles, role, version):
    """Where the easyconfig asks for it; else the one in $PATH."""
    site = types.SimpleNamespace(generations={'a': {'python': role}}, generation=lambda *_: 'a')
    on = {'site_dependencies': roles, 'file': 'X.eb', 'python_versions': ['3.12', PYTHON]}
    assert new.chosen_python(None, site, on) == version


def test_a_python_that_the_cluster_lacks(project):
    project.write('pyproject.toml', PROJECT.replace('>=3.8', '>=3.90'))
    assert project.refused('pyproject.toml') == (
        f"DIRECTORY/pyproject.toml is for (python_full_version >= '3.90'), but this is Python {PYTHON} on manylinux_2_28_x86_64. "
        'Load a module with another Python (or name one with --python), or lock the project for this platform, too')
    assert project.refused('pyproject.toml', '--python', 'python3.90') == (
        "There is no working Python 'python3.90'. Load a module with one, or name another with --python")
    project.on.write_text(project.on.read_text().replace(f"'{PYTHON}', ", ''))
    assert project.refused('pyproject.toml', '--python', sys.executable) == (
        f'PyTorch-0.1-tiny.eb has packages for Python {OTHER}, but {sys.executable} is Python {PYTHON}. Load a module with one of '
        'these, or name one with --python')


def test_a_lock_file_of_another_platform(project):
    project.write('pyproject.toml', PROJECT + '[tool.uv]\nenvironments = ["sys_platform == \'darwin\'"]\n')
    lock_with_uv(project)
    assert "(sys_platform == 'darwin')" in project.refused('uv.lock')


LISTS = ' does not have the form of a project: dependencies and each of the optional-dependencies must be lists of texts'


@pytest.mark.parametrize('source, text, words', [
    ('uv.lock', 'version = 1\n[[package]]\nname = 3\n', 'Reading DIRECTORY/uv.lock failed. The output of uv is:'),
    ('pyproject.toml', '[project\n', 'cannot be read: '),
    ('pyproject.toml', 'project = 3\n', ' does not have the form of a project: project must be a table'),
    ('pyproject.toml', '[project]\nrequires-python = 3\n', ': requires-python must be a text'),
    *(('pyproject.toml', f'[project]\n{line}\n', LISTS) for line in (
        'dependencies = "alpha"', 'dependencies = [1]', 'optional-dependencies = 3', 'optional-dependencies = { a = "b" }')),
    ('pyproject.toml', 'x = 1\n', "DIRECTORY/pyproject.toml does not have 'project'"),
    ('latin.txt', 'alpha  # gr\udcfcn\n', 'DIRECTORY/latin.txt is not a text file in UTF-8 (')])
def test_files_that_are_damaged(project, source, text, words):
    (project.dir / 'pyproject.toml').write_text(PROJECT)
    (project.dir / source).write_bytes(text.encode('utf-8', 'surrogateescape'))
    with pytest.raises(RuntimeError) as said:
        new.read_project(shutil.which('uv'), str(project.dir / source), [], {})
    assert words in str(said.value).replace(str(project.dir), 'DIRECTORY')


def test_an_extra_that_is_not_there(project):
    """uv only warns, so the module would lack its packages."""
    project.write('requirements.txt', 'alpha\n')
    assert project.refused('requirements.txt', '--extra', 'more') == (
        "--extra is for a project's pyproject.toml or uv.lock. In DIRECTORY/requirements.txt, write the extra behind its package: "
        'NAME[more]')
    project.package('mine', '0.3', ['torch'], more='[project.optional-dependencies]\nother_ones = ["beta"]\n')
    assert project.refused('pyproject.toml', '--extra', 'more') == "DIRECTORY/pyproject.toml does not have the extra 'more'"
    assert 'mine' in project.made('pyproject.toml', '--extra', 'Other-Ones')[1]


@pytest.mark.parametrize('name', ['../mine', '.hidden'])
def test_a_name_that_is_a_path(project, name):
    project.write('requirements.txt', 'alpha\n')
    assert project.refused('requirements.txt', name=name) == (
        f"'{name}' is not a valid module name: use letters, digits, '_', '.', '+' and '-'")


def test_on_something_else(project):
    project.write('requirements.txt', 'alpha\n')
    text = project.on.read_text()
    project.on.write_text(text + "wheel_platform = ['manylinux_2_28_s390x']\n")
    assert project.refused('requirements.txt') == (
        f'PyTorch-0.1-tiny.eb has no wheel for the processor type {os.uname().machine}: use another --on')
    project.on.write_text(text)
    project.on.with_suffix('.lock').unlink()
    assert project.refused('requirements.txt') == (
        '--on PyTorch-0.1-tiny.eb is not a PythonVenv easyconfig with a lock file of PyTorch beside it: use another one '
        f"('eb --search PyTorch-'), or make the lock file: slingtorch lock {project.on}")
