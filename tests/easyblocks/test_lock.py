# SPDX-License-Identifier: GPL-2.0-only
"""`slingtorch lock`: real pip against a package index of tiny wheels; and what `eb` says of a lock file that does not fit."""
import os
import sys

import pytest

from testbed import ROOT, run, wheels

PYTHON = '%d.%d' % sys.version_info[:2]
MACHINE = os.uname().machine


class Locked:
    """An easyconfig without a lock file, and the package index that pip is configured for."""

    def __init__(self, directory):
        self.dir = directory
        self.easyconfig = directory / 'PyTorch-0.1-tiny.eb'
        self.lock_file = directory / 'PyTorch-0.1-tiny.lock'
        self.store = directory / 'sources/p/PyTorch/wheels'
        self.files = directory / 'files'
        self.wheels = []
        self.write()

    def wheel(self, *args, **kwargs):
        """Add a wheel to the index."""
        self.wheels.append(wheels.make_wheel(self.files, *args, **kwargs))
        self.address = wheels.make_index(self.dir / 'simple', self.wheels)
        self.pip_env = {'PIP_CONFIG_FILE': os.devnull, 'PIP_INDEX_URL': self.address, 'PIP_EXTRA_INDEX_URL': None,
                        'PIP_NO_INDEX': None, 'PIP_FIND_LINKS': None}
        return self.wheels[-1]

    def write(self, packages="['alpha==1.0']", pythons=f"['{PYTHON}']", options=''):
        """Write the easyconfig."""
        self.easyconfig.write_text(f"""
easyblock = 'PythonVenv'

name = 'PyTorch'
version = '0.1'
versionsuffix = '-tiny'

homepage = 'https://example.org'
description = "Tiny"

toolchain = SYSTEM

sources = ['%(name)s-%(version)s%(versionsuffix)s.lock']

python_packages = {packages}
python_versions = {pythons}
{options}

moduleclass = 'ai'
""")

    def lock(self, easyconfig=None, check=True):
        """`slingtorch lock EASYCONFIG`, of this checkout."""
        return self.python('-m', 'slingtorch', 'lock', easyconfig or self.easyconfig.name, check=check)

    def python(self, *words, check=True):
        """Run a Python that has the slingtorch of this checkout."""
        env = {**os.environ, **self.pip_env, 'PYTHONPATH': str(ROOT), 'EASYBUILD_SOURCEPATH': str(self.dir / 'sources')}
        return run([sys.executable, *words], cwd=self.dir,
                   env={key: value for key, value in env.items() if value is not None}, check=check)

    def text(self):
        """The lock file without comments."""
        return '\n'.join(line for line in self.lock_file.read_text().splitlines() if line and line[0] != '#')


@pytest.fixture
def tiny(tmp_path):
    tiny = Locked(tmp_path)
    tiny.wheel('alpha', '1.0', requires=['beta>=1'])
    tiny.wheel('beta', '1.5')
    return tiny


def said(done):
    return ' '.join((done.stdout + done.stderr).split())


def test_lock_inject_install(tiny, eb_env):
    """The three commands that a user types, the last without any index."""
    gamma = tiny.wheel('gamma', '3.0')
    tiny.write(options=f"extra_packages = ['gamma']\nindex_urls = ['{tiny.address}']")
    message = said(tiny.lock())
    assert f'now put its checksum into the easyconfig: eb --inject-checksums=sha256 --force {tiny.easyconfig}' in message
    assert 'EASYBUILD' not in message
    assert tiny.text().splitlines() == [
        f'--extra-index-url {tiny.address}', '--only-binary :all:',
        *wheels.lock_text([tiny.wheels[0], tiny.wheels[1], gamma]).splitlines()]
    assert sorted(path.name for path in tiny.store.iterdir()) == sorted(wheel.name for wheel in tiny.wheels)
    path = f"{tiny.dir}/sources:{eb_env.env['EASYBUILD_SOURCEPATH']}"
    nowhere = {'PIP_CONFIG_FILE': os.devnull, 'PIP_INDEX_URL': 'http://127.0.0.1:9/simple'}
    eb_env(tiny.easyconfig, '--inject-checksums=sha256', '--force', f'--sourcepath={path}', env=nowhere)
    eb_env(tiny.easyconfig, f'--sourcepath={path}', env=nowhere)
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
    assert {wheel.name for wheel in chosen} < {path.name for path in tiny.store.iterdir()}


# --- bad input

def test_index_that_answers_with_another_file(tiny):
    tiny.lock_file.write_text('as before\n')
    tiny.pip_env['PIP_USER'] = '1'  # as in somebody's pip.conf
    wheels.make_wheel(tiny.files, 'beta', '1.5', files={'beta.py': 'raise SystemExit("evil")\n'})
    done = tiny.lock(check=False)
    assert done.returncode == 1 and 'beta-1.5-py3-none-any.whl' in said(done) and 'DO NOT MATCH THE HASHES' in said(done)
    assert 'another file than its own page announces' in said(done) and 'Traceback' not in said(done)
    assert tiny.lock_file.read_text() == 'as before\n' and not list(tiny.store.glob('beta*'))


def test_index_of_the_easyconfig_does_not_answer(tiny):
    """pip alone would go on without, and take what another index has under that name."""
    tiny.write(options="index_urls = ['http://127.0.0.1:9/whl']")
    done = tiny.lock(check=False)
    assert done.returncode == 1 and 'index of the easyconfig did not answer: http://127.0.0.1:9/whl/alpha/' in said(done)
    assert 'Connection refused' in said(done) and 'https_proxy' in said(done)
    assert not tiny.lock_file.exists()


def test_index_on_which_there_is_nothing(tiny):
    """pip alone says nothing of a wrong address, or of a page to log in."""
    page = tiny.dir / 'login/alpha/index.html'
    page.parent.mkdir(parents=True)
    page.write_text('<html>Who are you?</html>')
    for address in (page.parents[1].as_uri(), (tiny.dir / 'missing').as_uri()):
        tiny.write(options=f'index_urls = [{address!r}]')
        done = tiny.lock(check=False)
        assert done.returncode == 1 and f'None of these packages was found on the package index {address}' in said(done)
        assert not tiny.lock_file.exists()


def test_index_that_pip_does_not_trust(tiny):
    """pip alone would go on without."""
    tiny.write(options="index_urls = ['http://packages.example/whl']")
    done = tiny.lock(check=False)
    assert done.returncode == 1 and 'pip leaves out the package index on packages.example' in said(done)
    assert 'trusted-host packages.example' in said(done) and not tiny.lock_file.exists()


def test_malformed_address_of_a_proxy(tiny):
    tiny.write(options="index_urls = ['https://packages.example/whl']")
    tiny.pip_env.update(https_proxy='http://', no_proxy='')
    done = tiny.lock(check=False)
    assert done.returncode == 1 and 'must have the form http://HOST:PORT' in said(done) and 'Traceback' not in said(done)
    assert not tiny.lock_file.exists()


def test_nothing_for_that_python(tiny):
    tiny.wheel('delta', '1.0', tag='cp310-cp310-manylinux_2_17_x86_64')
    tiny.write("['delta==1.0']", "['3.13']")
    done = tiny.lock(check=False)
    assert done.returncode == 1 and 'failed for Python 3.13 on manylinux_2_28_x86_64' in said(done)
    assert 'No matching distribution found for delta==1.0' in said(done) and 'wheel_platform' in said(done)


NOT_LOCKED = [
    (("'PythonVenv'", "'Tarball'"), "is for easyconfigs with easyblock = 'PythonVenv' and a list python_packages"),
    (("['alpha==1.0']", '[]'), 'names no packages to lock'),
    (("['alpha==1.0']", "'alpha==1.0'"), "python_packages is 'alpha==1.0', and must be a list of strings"),
    ((f"['{PYTHON}']", '[]'), 'python_versions is [], and must name the Python'),
    (("moduleclass = 'ai'", "wheel_platform = 'linux'"), "wheel_platform is 'linux', and must have the form manylinux_2"),
    (("moduleclass = 'ai'", "index_urls = ['--pre']"), "index_urls has '--pre', which is no address"),
    (("moduleclass = 'ai'", "wheel_platform = None"), "wheel_platform is None, and must have the form manylinux_2"),
    (("moduleclass = 'ai'", "index_urls = ['https://me:secret@packages.example/whl']"), 'Keep it in ~/.netrc'),
    (("['alpha==1.0']", "['--extra-index-url=https://x/', 'alpha==1.0']"), 'is an option of pip, and no package'),
    (("['%(name)s-%(version)s%(versionsuffix)s.lock']", "['../other.lock']"), "is '../other.lock', and must be the name"),
    (("['%(name)s-%(version)s%(versionsuffix)s.lock']", "['PyTorch-0.1-tiny.eb']"), 'must be the name of a lock file'),
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
    messages = said(tiny.python('-c', ONE_BY_ONE, *paths)).split(' end')
    assert len(messages) == len(NOT_LOCKED) + 1
    for (_, words), message in zip(NOT_LOCKED, messages):
        assert words in message and message.endswith('status 1') and 'Traceback' not in message


def test_no_such_easyconfig(tiny):
    done = tiny.lock('PyTorch-99.eb', check=False)
    assert done.returncode == 1 and 'There is no easyconfig PyTorch-99.eb' in said(done)


def test_name_of_one_of_the_bundle(tiny):
    done = tiny.lock('PyTorch-2.13.0-local-cpu.eb', check=False)
    assert done.returncode == 1 and 'PyTorch-2.13.0-local-cpu.eb names no packages to lock' in said(done)


def test_without_a_lock_file_eb_says_how_to_make_it(tiny, eb_env):
    tiny.write(options="index_urls = ['https://wheels.example.org/rocm']")
    done = eb_env(tiny.easyconfig, env=tiny.pip_env, check=False)
    assert done.returncode != 0
    assert (f'The lock file PyTorch-0.1-tiny.lock is not there yet: it holds the sha256 of every package. This makes it '
            f"where the package indexes can be reached (those of pip's configuration, https://wheels.example.org/rocm): "
            f'slingtorch lock {tiny.easyconfig}') in said(done)


@pytest.mark.parametrize('change, words', [
    ((f'# python: {PYTHON}', '# python: 3.99'), f'is for Python 3.99, and this is Python {PYTHON}. Load a module'),
    (('2_28_', '2_99_'), f'is for manylinux_2_99_x86_64, and this machine is {MACHINE} with glibc 2.'),
    ((f'_{MACHINE}', '_riscv64'), f'is for manylinux_2_28_riscv64, and this machine is {MACHINE}'),
    ((f'manylinux_2_28_{MACHINE}', 'odd'), "was edited: '# platform: odd' is none"),
    (('# wanted: alpha==1.0', '# wanted: alpha==1.0\n# wanted: numpy'), 'other packages than the easyconfig wants now (numpy)'),
])
def test_lock_file_for_something_else(tiny, eb_env, change, words):
    """Another Python, another platform, other packages: said before pip is asked, with the command that helps."""
    text = (f'# python: {PYTHON}\n# platform: manylinux_2_28_{MACHINE}\n# wanted: alpha==1.0\n'
            + wheels.lock_text(tiny.wheels))
    assert change[0] in text
    tiny.lock_file.write_text(text.replace(*change))
    done = eb_env(tiny.easyconfig, env=tiny.pip_env, check=False)
    assert done.returncode != 0 and words in said(done) and 'pip says' not in said(done)
    assert f'slingtorch lock {tiny.easyconfig}' in said(done)
