# SPDX-License-Identifier: GPL-2.0-only
"""Easyblocks import slingtorch in whichever Python runs eb, and it is that of the bundle which they belong to."""
import pathlib
import shutil
import sys

import pytest

import easybuild.framework
from testbed import ROOT, run

PACKAGES = pathlib.Path(easybuild.framework.__file__).parents[2]
EASYCONFIG = 'PyTorch-2.13.0-local-cpu.eb'


@pytest.fixture
def other_python(eb_env, tmp_path):
    """Variables of a Python that has EasyBuild through a module of its own, and nothing else."""
    eb_env.fresh = True     # in that Python, not in a fork of this one
    run([sys.executable, '-m', 'venv', '--without-pip', tmp_path / 'venv'])
    (tmp_path / 'packages').mkdir()
    (tmp_path / 'packages/easybuild').symlink_to(PACKAGES / 'easybuild')
    return {'EB_PYTHON': tmp_path / 'venv/bin/python', 'PYTHONPATH': tmp_path / 'packages'}


def test_checkout_in_a_python_without_slingtorch(eb_env, other_python):
    assert EASYCONFIG in eb_env('--dry-run-short', EASYCONFIG, env=other_python).stdout
    # and without the hooks
    assert EASYCONFIG in eb_env('--dry-run-short', EASYCONFIG, env={**other_python, 'EASYBUILD_HOOKS': None}).stdout


def test_hooks_without_easyblocks(eb_env, other_python, tmp_path):
    easyconfig = tmp_path / 'Small-1.0.eb'
    easyconfig.write_text("easyblock = 'Tarball'\nname = 'Small'\nversion = '1.0'\ntoolchain = SYSTEM\n"
                          "homepage = description = 'https://example.org'\nonly_site = 'lumi'\n")
    env = {**other_python, 'EASYBUILD_INCLUDE_EASYBLOCKS': None}
    assert 'Small-1.0.eb' in eb_env('--dry-run-short', easyconfig, env=env).stdout
    done = eb_env('--dry-run-short', easyconfig, env={**env, 'EASYBUILD_HOOKS': None}, check=False)
    assert 'only_site' in done.stderr


def test_hooks_alone(eb_env, other_python, tmp_path):
    """As EasyBuild archives them beside an installation."""
    hooks = shutil.copy(ROOT / 'hooks/slingshot_hooks.py', tmp_path)
    env = {**other_python, 'EASYBUILD_INCLUDE_EASYBLOCKS': None, 'EASYBUILD_HOOKS': None}
    done = eb_env('--dry-run-short', EASYCONFIG, f'--hooks={hooks}', env=env, check=False)
    said = ' '.join((done.stdout + done.stderr).split())
    assert done.returncode and f'ERROR: {hooks} cannot be used by itself' in said and 'Traceback' not in said
    assert 'Activate the bundle' in said and 'eval "$(slingtorch env)"' in said


@pytest.mark.parametrize('packages, message', [
    ([], '{0}, the Python that runs eb, has no slingtorch. Activate the bundle again in this shell: eval "$(slingtorch env)"; or '
         'install a checkout or wheel of slingtorch there: {0} -m pip install DIR'),
    ([ROOT], "the easyblocks are from {1}, but 'import slingtorch' imports the package from {2}: run eb in another directory, or "
             'activate the latter: eval "$(slingtorch env)"'),
])
def test_installed_bundle_of_another_python(packages, message, eb_env, other_python, tmp_path):
    bundle = tmp_path / 'site-packages/slingtorch/bundle'
    shutil.copytree(ROOT / 'easyblocks', bundle / 'easyblocks')
    path = ':'.join(map(str, [other_python['PYTHONPATH'], *packages]))
    blocks = f'{bundle}/easyblocks/*.py,{bundle}/easyblocks/generic/*.py'
    env = {**other_python, 'PYTHONPATH': path, 'EASYBUILD_INCLUDE_EASYBLOCKS': blocks}
    done = eb_env('--dry-run-short', EASYCONFIG, env=env, check=False)
    message = message.format(other_python['EB_PYTHON'], bundle, ROOT)
    assert done.returncode and message in ' '.join(done.stderr.split()) and 'Traceback' not in done.stderr
