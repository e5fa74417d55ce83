# SPDX-License-Identifier: GPL-2.0-only
"""`slingtorch lock`: real uv against indexes of tiny wheels; `eb` that locks by itself, or refuses a lock file."""
import contextlib
import functools
import http.server
import os
import re
import shutil
import sys

import pytest

from slingtorch import lockfile
from slingtorch.commands import lock
from testbed import ROOT, checked, forkedeb, run, said, serving, wheels
from testbed.easybuild import BIN

PYTHON = '%d.%d' % sys.version_info[:2]
MACHINE = os.uname().machine


class Locked:
    """An easyconfig without a lock file, and the package index that pip is configured for."""

    def __init__(self, directory):
        self.dir = directory
        self.easyconfig = directory / 'PyTorch-0.1-tiny.eb'
        self.lock_file = directory / 'PyTorch-0.1-tiny.lock'
        self.files = directory / 'files'
        self.wheels = []
        self.pip_env = {}
        self.write()

    def wheel(self, *args, **kwargs):
        """Add a wheel to the index."""
        self.wheels.append(wheels.make_wheel(self.files, *args, **kwargs))
        self.address = wheels.make_index(self.dir / 'simple', self.wheels)
        self.pip_env.update({'PIP_CONFIG_FILE': os.devnull, 'PIP_INDEX_URL': self.address, 'PIP_EXTRA_INDEX_URL': None,
                             'PIP_NO_INDEX': None, 'PIP_FIND_LINKS': None})
        return self.wheels[-1]

    def have(self, eb):
        """Put the wheels where `eb` downloads them to: it asks pip three times less."""
        shutil.copytree(self.files, eb.prefix / 'sources/p/PyTorch/wheels')

    def write(self, packages="['alpha==1.0']", pythons=f"['{PYTHON}']", options=''):
        """Write the easyconfig."""
        text = wheels.tiny_easyconfig('', f'python_packages = {packages}\npython_versions = {pythons}\n{options}')
        self.easyconfig.write_text(text.replace("checksums = ['']\n", ''))

    def lock(self, easyconfig=None, *options, check=True):
        """`slingtorch lock EASYCONFIG`, of this checkout."""
        words = ['lock', easyconfig or self.easyconfig.name, *options]
        return checked(forkedeb.slingtorch(words, self.env, self.dir), check)

    @property
    def env(self):
        """With it Python has the slingtorch of this checkout."""
        env = {**os.environ, **self.pip_env, 'PYTHONPATH': str(ROOT), 'EASYBUILD_SOURCEPATH': str(self.dir / 'sources')}
        return {key: value for key, value in env.items() if value is not None}

    def text(self):
        """The lock file without comments."""
        return '\n'.join(line for line in self.lock_file.read_text().splitlines() if line and line[0] != '#')


@pytest.fixture
def tiny(tmp_path):
    tiny = Locked(tmp_path)
    tiny.wheel('alpha', '1.0', requires=['beta>=1'])
    tiny.wheel('beta', '1.5')
    return tiny


def test_lock_install(tiny, eb_env):
    """The two commands that a user types; `eb` downloads."""
    gamma = tiny.wheel('gamma', '3.0')
    tiny.write(options=f"extra_packages = ['gamma']\nindex_urls = ['{tiny.address}']")
    message = said(tiny.lock())
    assert f'its checksum is in {tiny.easyconfig}' in message
    assert 'EASYBUILD' not in message
    assert tiny.text().splitlines() == [
        f'--extra-index-url {tiny.address}', '--only-binary :all:',
        *wheels.lock_text([tiny.wheels[0], tiny.wheels[1], gamma]).splitlines()]
    done = eb_env(tiny.easyconfig, '--enforce-checksums', env=tiny.pip_env)
    assert 'no checksum' not in said(done)
    site_packages = eb_env.prefix / f'software/PyTorch/0.1-tiny/lib/python{PYTHON}/site-packages'
    assert {'alpha.py', 'beta.py', 'gamma.py'} <= {path.name for path in site_packages.iterdir()}


def test_python_and_platform_are_those_of_the_easyconfig(tiny):
    """Wheels, and markers, are for them, whatever Python resolves; what is newer than the platform is not taken."""
    chosen = [tiny.wheel('delta', '1.0', tag=f'cp3{minor}-cp3{minor}-{platform}_aarch64', requires=[
        'alpha; python_version < "3.12"', 'beta; platform_machine == "aarch64"', 'alpha==9; platform_machine == "x86_64"'])
              for minor, platform in [(10, 'manylinux_2_17'), (13, 'linux')]]
    tiny.wheel('delta', '1.0', tag='cp311-cp311-manylinux_2_17_aarch64')
    tiny.wheel('delta', '2.0', tag='cp310-cp310-manylinux_2_39_aarch64')
    tiny.wheel('delta', '3.0', tag='cp313-cp313-manylinux_2_17_x86_64')
    tiny.write("['delta']", "['3.10', '3.13']", "wheel_platform = 'manylinux_2_28_aarch64'")
    tiny.lock()
    alpha, beta = (wheels.lock_text([wheel]) for wheel in tiny.wheels[:2])
    hashes = [f'    --hash=sha256:{sha256}' for sha256 in sorted(map(wheels.sha256, chosen))]
    assert tiny.text().splitlines()[1:] == [
        *alpha.replace('1.0 ', "1.0 ; python_version == '3.10' ").splitlines(), *beta.splitlines(),
        'delta==1.0 \\', hashes[0] + ' \\', hashes[1]]


def test_several_pythons_and_both_processors(tiny, eb_env):
    """One lock file; where something is for one of them alone, a marker says so; pip and uv take it here."""
    local = [tiny.wheel('torch', '2.0+rocm1', tag=f'cp3{minor}-cp3{minor}-manylinux_2_28_{machine}',
                        requires=['alpha; platform_machine == "aarch64"', 'beta==1.4; python_version == "3.10"',
                                  'beta; python_version != "3.10"'])
             for minor in (10, sys.version_info[1]) for machine in ('x86_64', 'aarch64')]
    old = tiny.wheel('beta', '1.4')
    tiny.write("['torch==2.0+rocm1']", f"['3.10', '{PYTHON}']", f"""index_urls = ['{tiny.address}']
wheel_platform = ['manylinux_2_28_x86_64', 'manylinux_2_28_aarch64']""")
    assert '4 packages' in said(tiny.lock())
    text = tiny.lock_file.read_text()
    assert f'# python: 3.10 {PYTHON}\n# platform: manylinux_2_28_x86_64 manylinux_2_28_aarch64\n' in text
    assert all(wheels.sha256(wheel) in text for wheel in [*tiny.wheels, *local, old])
    assert "\nbeta==1.4 ; python_version == '3.10' \\\n" in text
    assert f"\nbeta==1.5 ; python_version == '{PYTHON}' \\\n" in text and '\ntorch==2.0+rocm1 \\\n' in text
    assert "\nalpha==1.0 ; platform_machine == 'aarch64' \\\n" in text
    tiny.have(eb_env)
    for uv in (str(BIN / 'uv'), ''):
        eb_env(tiny.easyconfig, '--force', env={**tiny.pip_env, 'SLINGTORCH_UV': uv})
        there = {path.name for path in eb_env.prefix.glob('software/PyTorch/0.1-tiny/lib/python3*/site-packages/*')}
        assert {'torch.py', 'beta.py'} < there and ('alpha.py' in there) == (MACHINE == 'aarch64')


def test_a_platform_without_a_wheel_is_named(tiny):
    tiny.wheel('delta', '1.0', tag='cp312-cp312-manylinux_2_28_x86_64')
    tiny.write("['delta']", "['3.12']", "wheel_platform = ['manylinux_2_28_x86_64', 'manylinux_2_28_aarch64']")
    done = tiny.lock(check=False)
    assert done.returncode == 1 and 'uv failed for Python 3.12 on manylinux_2_28_aarch64' in said(done)
    assert 'delta' in said(done) and 'wheel_platform' in said(done) and not tiny.lock_file.exists()


def test_of_two_indexes_each_version_from_the_first_that_has_it(tiny):
    """PyTorch's index has old releases of common packages; what others offer under the name of its own is not taken."""
    ours = tiny.dir / 'ours'
    mine = [wheels.make_wheel(ours / 'files', 'torch', '2.0+cu1', requires=['triton==3.0', 'alpha']),
            wheels.make_wheel(ours / 'files', 'triton', '3.0'), wheels.make_wheel(ours / 'files', 'alpha', '0.9')]
    address = wheels.make_index(ours / 'simple', mine)
    squatted = tiny.wheel('triton', '3.0', files={'triton.py': 'raise SystemExit("evil")\n'})
    tiny.wheel('triton', '99.0')
    tiny.write("['torch==2.0+cu1']", options=f"index_urls = ['{address}']")
    tiny.lock()
    assert wheels.lock_text([tiny.wheels[0], tiny.wheels[1], mine[0], mine[1]]) in tiny.text() + '\n'
    assert wheels.sha256(squatted) not in tiny.text()


def test_local_version_from_another_index_than_that_of_the_easyconfig(tiny):
    tiny.wheel('torch', '2.0+cu1')
    ours = wheels.make_index(tiny.dir / 'ours', [tiny.wheels[0]])
    tiny.write("['torch==2.0+cu1', 'alpha']", options=f"index_urls = ['{ours}']")
    done = tiny.lock(check=False)
    assert done.returncode == 1 and f'torch 2.0+cu1 is not on the package index of the easyconfig ({ours})' in said(done)
    assert not tiny.lock_file.exists()


def test_index_without_hashes(tiny):
    """The file counts."""
    for page in tiny.dir.glob('simple/*/index.html'):
        page.write_text(re.sub('#sha256=[0-9a-f]*', '', page.read_text()))
    tiny.lock()
    assert wheels.lock_text(tiny.wheels) in tiny.text() + '\n'


def test_settings_of_pip_reach_uv(tiny):
    """uv.toml and variables of uv do not count: pip downloads later, from pip's indexes."""
    config = tiny.dir / 'pip.conf'
    config.write_text(f'[global]\nextra-index-url =\n    http://127.0.0.1:9/none\n    {tiny.address}\n'
                      f'index-url = {(tiny.dir / "empty").as_uri()}\n')
    tiny.pip_env.update(PIP_CONFIG_FILE=str(config), PIP_INDEX_URL=None, UV_INDEX_URL='http://127.0.0.1:7/simple',
                        UV_EXCLUDE_NEWER='2001-01-01')
    done = tiny.lock()
    # as pip does without one of its own
    assert 'skipping an index that does not answer: http://127.0.0.1:9/none' in said(done) and ':7' not in said(done)
    assert wheels.lock_text(tiny.wheels) in tiny.text() + '\n'


def test_uv_is_told_proxy_certificates_and_hosts(monkeypatch):
    for name in ('SSL_CERT_FILE', 'REQUESTS_CA_BUNDLE', 'CURL_CA_BUNDLE', 'UV_HTTP_TIMEOUT'):
        monkeypatch.delenv(name, raising=False)
    options, env = lock.lockfile.uv_settings({'index-url': 'https://a/simple', 'extra-index-url': 'https://b https://c',
                                     'find-links': '/wheels', 'trusted-host': 'b c', 'proxy': 'http://p:3128',
                                     'cert': '/ca.pem', 'client-cert': '/me.pem', 'timeout': '60'}, ['https://o'])
    assert ' '.join(options) == ('--index-strategy unsafe-best-match --index https://o --index https://b --index https://c '
                                 '--default-index https://a/simple --find-links /wheels --allow-insecure-host b '
                                 '--allow-insecure-host c')
    assert [env[name] for name in ('HTTPS_PROXY', 'HTTP_PROXY', 'SSL_CERT_FILE', 'SSL_CLIENT_CERT', 'UV_HTTP_TIMEOUT')] == [
        'http://p:3128', 'http://p:3128', '/ca.pem', '/me.pem', '60']
    assert 'UV_SYSTEM_CERTS' not in env
    # as pip does
    monkeypatch.setenv('REQUESTS_CA_BUNDLE', '/bundle.pem')
    assert lock.lockfile.uv_settings({'cert': '/ca.pem'}, [])[1]['SSL_CERT_FILE'] == '/bundle.pem'
    monkeypatch.delenv('REQUESTS_CA_BUNDLE')
    options, env = lock.lockfile.uv_settings({'no-index': 'true'}, [])
    assert options[2:] == ['--no-index'] and env['UV_SYSTEM_CERTS'] == env['UV_NATIVE_TLS'] == '1'


def test_words_of_uv():
    target = lockfile.Target('3.12', 'manylinux_2_30_aarch64')
    said = lockfile.uv_compile('/bin/echo', target, {'index-url': 'https://a'}, ['https://o'], '--more', '-').stdout
    assert said == (f'pip compile --no-header --only-binary :all: --no-progress --python {sys.executable} --python-version 3.12 '
                    '--python-platform aarch64-manylinux_2_28 --index-strategy unsafe-best-match --index https://o '
                    '--default-index https://a --more -\n')


# --- eb that locks by itself

def test_one_command_without_a_lock_file(tiny, eb_env):
    """`eb` locks in the source path and says once what; the next one installs that, without an index."""
    store = eb_env.prefix / 'sources/p/PyTorch'
    done = eb_env('--fetch', tiny.easyconfig, env=tiny.pip_env)
    made = store / tiny.lock_file.name
    assert done.stdout.count('pinned') == 1
    assert f'== there is no lock file {made.name} yet: resolving packages...' in said(done)
    assert (f'== pinned alpha==1.0 and 1 more, for Python {PYTHON}, in {made}. The next installation is the same; remove this '
            'file to renew') in said(done)
    assert 'no checksum' not in said(done) and not tiny.lock_file.exists()
    assert f'# python: {PYTHON}\n' in made.read_text() and '# wanted: alpha==1.0\n' in made.read_text()
    assert sorted(path.name for path in (store / 'wheels').iterdir()) == sorted(wheel.name for wheel in tiny.wheels)

    tiny.wheel('beta', '1.6')
    nowhere = {'PIP_CONFIG_FILE': os.devnull, 'PIP_INDEX_URL': 'http://127.0.0.1:9/simple'}
    assert 'pinned' not in said(eb_env(tiny.easyconfig, env=nowhere))
    assert (eb_env.modulepath / 'PyTorch/0.1-tiny.lua').exists()
    assert list(eb_env.prefix.glob('software/PyTorch/0.1-tiny/lib/python3*/site-packages/beta-1.5.dist-info'))

    tiny.write("['alpha==1.0', 'beta']")
    done = eb_env(tiny.easyconfig, '--rebuild', env=tiny.pip_env, check=False)
    assert done.returncode != 0 and 'for packages other than those that the easyconfig now requires (beta): remove the lock file' in said(done)
    # cut off, by a full disk or an editor
    made.write_text('')
    done = eb_env(tiny.easyconfig, '--rebuild', env=tiny.pip_env, check=False)
    assert done.returncode != 0 and 'does not pin alpha==1.0, beta: remove the lock file' in said(done)
    made.unlink()
    # the Python that asks what there is may be that of a module
    own = tiny.dir / 'modules/own'
    own.mkdir(parents=True)
    (own / '1.lua').write_text(f'prepend_path("PATH", "{own}")\n')
    (own / 'python-of-a-module').write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (own / 'python-of-a-module').chmod(0o755)
    tiny.write("['alpha==1.0', 'beta']", options="dependencies = [('own/1', EXTERNAL_MODULE)]\n"
                                                 "python_command = 'python-of-a-module'")
    env = {**tiny.pip_env, 'MODULEPATH': own.parent}
    assert 'pinned alpha==1.0, beta==1.6, for' in said(eb_env(tiny.easyconfig, '--fetch', env=env))


def test_forgotten_checksum_is_said(tiny, eb_env):
    """A lock file beside the easyconfig has a checksum there; one that was made in the source path has none."""
    tiny.lock()
    tiny.write()
    tiny.have(eb_env)
    done = eb_env('--fetch', tiny.easyconfig, env=tiny.pip_env)
    assert (f'WARNING: The easyconfig has no checksum for {tiny.lock_file}, so a changed lock file would not be noticed. To add '
            f'it: eb --inject-checksums=sha256 --force {tiny.easyconfig}') in said(done)
    done = eb_env('--inject-checksums=sha256', '--force', tiny.easyconfig, env=tiny.pip_env)
    assert 'no checksum' not in said(done)
    assert 'no checksum' not in said(eb_env('--fetch', tiny.easyconfig, env=tiny.pip_env))


def test_where_eb_makes_no_lock_file(tiny, eb_env, steps):
    def error(*options):
        return steps(eb_env, tiny.easyconfig, *options, env=tiny.pip_env, last='fetch')['error']

    command = f'slingtorch lock {tiny.easyconfig}'
    said = error('--enforce-checksums')
    assert said == (f'Missing checksum for {tiny.lock_file.name}, which does not exist; with --enforce-checksums, eb does not make '
                    f'it. To make it and its checksum: {command}; eb --inject-checksums=sha256 --force {tiny.easyconfig}')
    tiny.write("['alpha==3']")
    said = error()
    assert f'The lock file {tiny.lock_file.name} does not exist and could not be made' in said
    assert 'alpha==3' in said and 'python_versions and wheel_platform' in said
    # another one would have another checksum
    tiny.write(options="index_urls = ['https://wheels.example.org/rocm']\nchecksums = ['%s']" % ('0' * 64))
    assert ('The lock file PyTorch-0.1-tiny.lock with the sha256 of every package does not exist, but the easyconfig has '
            "a checksum for it. To make it on a machine that reaches the package indexes (those of pip's configuration, "
            f'https://wheels.example.org/rocm): {command}') in error()
    assert not list(eb_env.prefix.glob('sources/p/PyTorch/*.lock*'))


def test_lock_file_for_something_else(tiny, eb_env, steps):
    """Another Python, another platform, other packages: said before pip is asked, with the command that helps."""
    text = (f'# python: {PYTHON}\n# platform: manylinux_2_28_{MACHINE}\n# wanted: alpha==1.0\n'
            + wheels.lock_text(tiny.wheels))
    for old, new, words in [
            (f'# python: {PYTHON}', '# python: 3.98 3.99',
             f'is for Python 3.98, 3.99, but this is Python {PYTHON}. Load a module with the former, name it with '
             '--try-amend=python_command=/path/to/python3.99, or change python_versions and'),
            ('2_28_', '2_99_', f'is for manylinux_2_99_{MACHINE}, but this machine is {MACHINE} with glibc N. Change '
             'wheel_platform of the easyconfig and'),
            ('# wanted: alpha==1.0', '# wanted: alpha==1.0\n# wanted: numpy',
             'is for packages other than those that the easyconfig now requires (numpy):')]:
        assert old in text
        tiny.lock_file.write_text(text.replace(old, new))
        said = steps(eb_env, tiny.easyconfig, env=tiny.pip_env, last='fetch')['error']
        assert re.sub(r'(glibc )[0-9.]*\d', r'\1N', said) == (
            f'The lock file {tiny.lock_file} {words} run: slingtorch lock {tiny.easyconfig}')


NEW = 'b' * 64


@pytest.mark.parametrize('old, new', [
    ("sources = ['a.lock']\nx = 1\n", f"sources = ['a.lock']\nchecksums = ['{NEW}']\nx = 1\n"),
    ("sources = ['a.lock']\nchecksums = [None, 'c']\n", f"sources = ['a.lock']\nchecksums = ['{NEW}', 'c']\n"),
    (f"sources = ['a.lock']\nchecksums = [\n    # why\n    '{'a' * 64}',\n]\n",
     f"sources = ['a.lock']\nchecksums = [\n    # why\n    '{NEW}',\n]\n"),
    ("sources = ['a.lock']\nchecksums = [{'a.lock': None}]\n", f"sources = ['a.lock']\nchecksums = [{{'a.lock': '{NEW}'}}]\n"),
    # of another form: the person is told the command
    ("sources = ['a.lock', 'b']\n", None), ("sources = ['a.lock']\nchecksums = [WORD]\n", None),
    ("sources = ['a.lock']\nchecksums = []\n", None), ("sources = [\n    'a.lock',\n]\n", None),
])
def test_checksum_in_the_easyconfig(old, new):
    assert lock.with_checksum(old, NEW) == new


def test_versions_that_are_pinned():
    assert lockfile.pinned(['torch==2.10.0+rocm7.1', 'numpy', 'a==1.0,<2', 'b===1.0', 'c==1.*', 'd==1.0 ; x', 'e>=1']) == {
        'torch': '2.10.0+rocm7.1'}


@pytest.mark.parametrize('output, words', [
    ('alpha @ https://a/alpha-1.0.tar.gz', "'alpha @ https://a/alpha-1.0.tar.gz' has no version: only packages of an index"),
    ('alpha==1.0\n    # from https://a/simple', r'The index gives no sha256 for alpha 1.0 \(https://a/simple\)')])
def test_what_cannot_be_locked(output, words):
    with pytest.raises(RuntimeError, match=words):
        lockfile.packages_of_uv(output, '', [], [])


def test_checksum_of_an_easyconfig_of_another_form(tmp_path, monkeypatch):
    said, path = [], tmp_path / 'a.eb'
    monkeypatch.setattr(lock, 'read_easyconfig', lambda _: {'lock_file': str(path)})
    monkeypatch.setattr(lockfile, 'lock', lambda *_: path.write_text("sources = ['a.lock', 'b']\n"))
    lock.lock(str(path), said.append)
    assert said == [f'now put its checksum into the easyconfig: eb --inject-checksums=sha256 --force {path}']


def test_index_that_pip_asks_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv('PIP_INDEX_URL', 'https://centre/simple')
    assert re.match('https://[^/]+/simple$', lockfile.default_index(sys.executable))
    assert 'centre' not in lockfile.default_index(sys.executable)
    with pytest.raises(RuntimeError, match='does not show which index it uses'):
        lockfile.default_index(shutil.which('false'))


def test_amended_easyconfig_of_the_working_directory(tiny, eb_env):
    """As the message about the wrong Python advises: the lock file lies beside the easyconfig that was named."""
    tiny.lock()
    amend = f"--try-amend=python_command={shutil.which('python3')}"
    tiny.easyconfig.write_text(tiny.easyconfig.read_text() + "\npython_command = '/nowhere/python3'\n")
    done = eb_env(tiny.easyconfig.name, amend, '--fetch', env=tiny.pip_env, cwd=tiny.dir)
    assert 'pinned' not in said(done) and f'{tiny.lock_file} [SHA256: ' in said(done)
    assert len(list(eb_env.prefix.glob('sources/p/PyTorch/wheels/*'))) == 2


@contextlib.contextmanager
def flat_page(tiny):
    """Address of a page with the first wheel of an index, as --find-links takes it; all others lie beside it."""
    name, digest = tiny.wheels[0].name, wheels.sha256(tiny.wheels[0])
    (tiny.files / 'page.html').write_text(f'<a href="{name}#sha256={digest}">{name}</a>')
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tiny.files)
    with serving(handler) as address:
        tiny.pip_env.update(PIP_NO_INDEX='1', PIP_FIND_LINKS=f'{address}/page.html')
        yield address


def test_wheels_of_a_flat_page_and_of_an_address(tiny, eb_env):
    """Elsewhere pip is not configured for that page, and the lock file names it."""
    with flat_page(tiny) as address:
        link = f'{address}/{tiny.wheels[1].name}'
        tiny.write(packages=f"['alpha==1.0', 'beta @ {link}#sha256={wheels.sha256(tiny.wheels[1])}']")
        tiny.lock()
        locked = [line for line in tiny.text().splitlines() if line != '--only-binary :all:']
        assert locked[:2] == sorted([f'--find-links {link}', f'--find-links {address}/page.html'])
        alpha, beta = (f'--hash=sha256:{wheels.sha256(wheel)}' for wheel in tiny.wheels)
        assert [line.strip(' \\') for line in locked[2:]] == ['alpha==1.0', alpha, 'beta==1.5', beta]
        eb_env('--fetch', tiny.easyconfig, env={**tiny.pip_env, 'PIP_FIND_LINKS': None})
        assert len(list(eb_env.prefix.glob('sources/p/PyTorch/wheels/*.whl'))) == 2


# --- bad input

def test_index_of_the_centre_where_the_user_has_pip_install_to_the_home_directory(tiny):
    """With 'user = true' pip lists the settings of the user's own file alone, unless it is told otherwise."""
    for name, text in [('centre', f'index-url = {tiny.address}'), ('own', 'user = true')]:
        (tiny.dir / name / 'pip').mkdir(parents=True)
        (tiny.dir / name / 'pip/pip.conf').write_text(f'[global]\n{text}\n')
    tiny.pip_env.update(SLINGTORCH_UV=str(BIN / 'uv'), XDG_CONFIG_DIRS=str(tiny.dir / 'centre'), PIP_INDEX_URL=None,
                        XDG_CONFIG_HOME=str(tiny.dir / 'own'), PIP_CONFIG_FILE=None, https_proxy='http://127.0.0.1:9',
                        no_proxy='')
    tiny.lock()
    assert 'alpha==1.0' in tiny.text()


@pytest.mark.parametrize('address, words', [
    ('http://127.0.0.1:9/whl', ['index of the easyconfig did not answer: http://127.0.0.1:9/whl/alpha/', 'Connection refused',
     'https_proxy']),
    ('{login}', ['The package index {login} has none of these packages']),
    ('{login}/missing', ['The package index {login}/missing has none of these packages']),
    ('http://packages.example/whl', ['pip ignores the package index on packages.example', 'trusted-host packages.example'])])
def test_index_of_the_easyconfig_that_is_none(tiny, address, words):
    """pip alone would go on without it, and take what another index has under that name."""
    page = tiny.dir / 'login/alpha/index.html'
    page.parent.mkdir(parents=True)
    page.write_text('<html>Who are you?</html>')
    login = page.parents[1].as_uri()
    tiny.write(options=f'index_urls = [{address.format(login=login)!r}]')
    done = tiny.lock(check=False)
    assert done.returncode == 1 and not tiny.lock_file.exists()
    assert [word for word in words if word.format(login=login) not in said(done)] == []


def test_without_uv(tiny):
    tiny.pip_env['SLINGTORCH_UV'] = ''
    done = tiny.lock(check=False)
    assert done.returncode == 1 and 'This needs uv' in said(done) and 'pip install uv' in said(done)


NOT_LOCKED = [
    (("'PythonVenv'", "'Tarball'"), "is for easyconfigs with easyblock = 'PythonVenv' and a list python_packages"),
    (("['alpha==1.0']", '[]'), 'lists no packages to lock'),
    (("['alpha==1.0']", "'alpha==1.0'"), "python_packages is 'alpha==1.0', but must be a list of strings"),
    ((f"['{PYTHON}']", '[]'), 'python_versions is [], but must list the Python'),
    (("moduleclass = 'ai'", "wheel_platform = 'linux'"), "wheel_platform is 'linux', but must have the form manylinux_2"),
    (("moduleclass = 'ai'", "index_urls = ['--pre']"), "index_urls has '--pre', which is not an address"),
    (("moduleclass = 'ai'", "wheel_platform = None"), "wheel_platform is None, but must have the form manylinux_2"),
    (("moduleclass = 'ai'", "index_urls = ['https://me:secret@packages.example/whl']"), 'Put it into ~/.netrc'),
    (("['alpha==1.0']", "['--extra-index-url=https://x/', 'alpha==1.0']"), 'is an option, not a package'),
    (("['%(name)s-%(version)s%(versionsuffix)s.lock']", "['../other.lock']"), "is '../other.lock', but must be the name"),
    (("['%(name)s-%(version)s%(versionsuffix)s.lock']", "['%(pyver)s.lock']"), 'cannot be read as an easyconfig: '),
    (("['%(name)s-%(version)s%(versionsuffix)s.lock']", "['PyTorch-0.1-tiny.eb']"), 'must be the name of the lock file'),
    (("toolchain = SYSTEM", 'toolchain = SYS'), 'cannot be read as an easyconfig'),
    (("name = 'PyTorch'", "name = ''"), 'cannot be read as an easyconfig'),
]
ONE_BY_ONE = """
import sys
from slingtorch.cli import main
for path in sys.argv[1:]:
    print('status', main(['lock', path]), 'end', file=sys.stderr)
"""


def test_easyconfigs_that_cannot_be_locked(tiny):
    good, paths = tiny.easyconfig.read_text(), []
    for number, (replace, _) in enumerate(NOT_LOCKED):
        assert replace[0] in good
        paths.append(tiny.dir / str(number) / tiny.easyconfig.name)
        paths[-1].parent.mkdir()
        paths[-1].write_text(good.replace(*replace))
    messages = said(run([sys.executable, '-c', ONE_BY_ONE, *paths], env=tiny.env, cwd=tiny.dir)).split(' end')
    assert len(messages) == len(NOT_LOCKED) + 1
    for (_, words), message in zip(NOT_LOCKED, messages):
        assert words in message and message.endswith('status 1') and 'Traceback' not in message


def test_name_of_an_easyconfig(tiny):
    """One of the bundle, or none."""
    for name, words in [('PyTorch-2.13.0-local-cpu.eb', 'PyTorch-2.13.0-local-cpu.eb lists no packages to lock'),
                        ('PyTorch-99.eb', 'There is no easyconfig PyTorch-99.eb')]:
        done = tiny.lock(name, check=False)
        assert done.returncode == 1 and words in said(done)


def test_lock_file_beside_an_easyconfig_of_the_centre(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, 'read_easyconfig', lambda _: {'lock_file': f'{tmp_path}/a.lock'})
    monkeypatch.setattr(lock.os, 'access', lambda *_: False)
    with pytest.raises(RuntimeError) as said:
        lock.lock('/centre/a.eb', print)
    assert str(said.value) == (f'The lock file must be beside the easyconfig, but {tmp_path} cannot be written. Copy the easyconfig to '
                               'your own directory and use the copy: slingtorch lock ./a.eb; eb ./a.eb')
