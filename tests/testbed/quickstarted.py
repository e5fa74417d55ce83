# SPDX-License-Identifier: GPL-2.0-only
"""PyTorch for this machine, installed once for all tests: by ./quickstart, from a clone, as README's first reader does.

What that run said and wrote is kept beside it, for tests/quickstart.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil

from . import DIR, ROOT, clean_environ, copy_of_checkout, easybuild, locked, run

EASYCONFIG = 'easyconfigs/p/PyTorch/PyTorch-2.13.0-local-cpu.eb'
STARTED = ('quickstart', '__main__.py', 'setup.cfg', 'slingtorch/gpus.py', 'slingtorch/lockfile.py', 'slingtorch/quickstart.py',
           'examples/training/ddp_training.py')
"""What quickstart is, besides what it installs."""
WHEELS = 'sources/p/PyTorch/wheels'


def environment(home):
    """That of somebody who has nothing of ours yet: no virtual environment on the path."""
    env = clean_environ()
    env['HOME'] = str(home)
    # pip asks a rustc in the path for its version, and rustup's rustc then makes ~/.rustup
    path = [part for part in env['PATH'].split(':')
            if not os.path.exists(f'{part}/slingtorch') and not os.path.exists(f'{part}/rustup')]
    env['PATH'] = ':'.join(path)
    # pip's own configuration lies in the home directory on some machines
    for candidate in (pathlib.Path.home() / '.config/pip/pip.conf', pathlib.Path.home() / '.pip/pip.conf'):
        if candidate.exists():
            env.setdefault('PIP_CONFIG_FILE', str(candidate))
    return env


class Place:
    """The directory of a run from a shell in which another installation is active, whose configuration has no say.

    :ivar said: once it has run: {'status', 'stdout', 'stderr', 'wrote': files beside the prefix, which are none,
        'compiled': packages of the environment}
    """

    def __init__(self, directory):
        self.dir = directory
        self.home, self.prefix, self.other = directory / 'home', directory / 'prefix', directory / 'other'
        self.checkout, self.record = directory / 'my checkout', directory / 'said.json'
        self.env = {**environment(self.home), 'EASYBUILD_PREFIX': str(self.other), 'EASYBUILD_HOOKS': '/foreign/hooks.py',
                    'EASYBUILD_INSTALLPATH_SOFTWARE': str(self.other / 'software'), 'SLINGTORCH_SITE': 'lumi',
                    'PIP_TARGET': str(self.other / 'target'), 'PYTHONPATH': '/nonexistent', 'SLURM_JOB_ID': '1', 'RANK': '3',
                    'CDPATH': str(directory)}

    @property
    def said(self):
        return json.loads(self.record.read_text())

    def ran(self):
        return self.record.exists() and self.said['status'] == 0

    def files(self):
        """All that is not below the prefix."""
        tops = [path for path in self.dir.iterdir() if path != self.prefix]
        return {str(path.relative_to(self.dir)) for top in tops for path in (top, *top.rglob('*'))}

    def start(self):
        """Clone, and run ./quickstart."""
        from slingtorch import quickstart   # not before conftest.py has chosen which slingtorch is tested
        for path in (self.home, self.prefix, self.other, self.checkout):
            shutil.rmtree(path, ignore_errors=True)
        self.home.mkdir()
        copy_of_checkout(self.checkout)
        with open(self.checkout / EASYCONFIG, 'a') as easyconfig:
            # for the tests of staging; what their jobs import is compiled in the image
            easyconfig.write("environment_image = True\nsanity_check_imports += ['torch._dynamo']\n")
        os.close(quickstart.claim(str(self.prefix))[1])
        # downloaded once: sources are checked by sha256 in any case
        kept, downloaded = DIR / WHEELS, self.prefix / 'easybuild' / WHEELS
        kept.mkdir(parents=True, exist_ok=True)
        downloaded.mkdir(parents=True)
        for wheel in kept.glob('*.whl'):
            (downloaded / wheel.name).symlink_to(wheel)
        before = self.files()
        done = run([self.checkout / 'quickstart', '--prefix', self.prefix], env=self.env, timeout=1800, cwd=self.dir, check=False)
        for wheel in downloaded.glob('*.whl'):
            if not wheel.is_symlink():
                shutil.move(wheel, kept)
        compiled = self.prefix.glob('easybuild/software/PyTorch/*/lib/python3*/site-packages/*/__pycache__/__init__.*.pyc')
        said = {'status': done.returncode, 'stdout': done.stdout, 'stderr': done.stderr, 'wrote': sorted(self.files() - before),
                'compiled': [path.parents[1].name for path in compiled]}
        self.record.write_text(json.dumps(said))


def installed(tool):
    """The testbed.easybuild.Installation, which is one image, too; its `place` is the Place of the run."""
    digest = hashlib.sha256(easybuild.state_of_bundle(ROOT / EASYCONFIG).encode())
    for name in STARTED:
        digest.update((ROOT / name).read_bytes())
    home = DIR / 'installed' / pathlib.Path(EASYCONFIG).stem
    place = Place(home / digest.hexdigest()[:12])
    with locked(f'installed-{home.name}'):
        for earlier in home.glob('*'):
            if earlier != place.dir:
                easybuild.remove_unless_used(earlier)
        place.dir.mkdir(parents=True, exist_ok=True)
        use = open(place.dir / '.use', 'w')
        with contextlib.suppress(BlockingIOError):  # who has it in use would lose it
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not place.ran():
                place.start()
        fcntl.flock(use, fcntl.LOCK_SH)
    assert (place.prefix / 'easybuild/modules/all/PyTorch').is_dir(), place.said['stdout'] + place.said['stderr']
    installation = easybuild.Installation('PyTorch/2.13.0-local-cpu', place.prefix / 'easybuild/modules/all', tool)
    installation.use = use  # open as long as this run lasts: remove_unless_used()
    installation.place = place
    return installation
