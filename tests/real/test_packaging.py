# SPDX-License-Identifier: GPL-2.0-only
"""The wheel, and what pip installs as README says: used from an empty directory, without the checkout."""
import os
import pathlib
import shutil
import zipfile

import pytest

from testbed import ROOT, clean_environ, copy_of_checkout, quickvenv, readme, run, wheels

pytestmark = pytest.mark.real

ROOMS = ['docs/*.md', 'easyblocks', 'easyconfigs', 'examples', 'hooks', 'patches', 'runscripts']


def test_wheel_holds_every_file_of_the_rooms_and_of_the_package(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    listed = run(['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard', '--', 'slingtorch', *ROOMS],
                 cwd=ROOT).stdout
    expected = {name if name.startswith('slingtorch/') else f'slingtorch/bundle/{name}'
                for name in filter(None, listed.split('\0')) if (ROOT / name).is_file()}
    # which is there besides as runscripts/lib/job, a link in a checkout
    expected.update(f'slingtorch/bundle/runscripts/lib/{name[len("slingtorch/"):]}' for name in list(expected)
                    if name.startswith('slingtorch/job/'))
    assert expected and not expected - packed
    assert any(name.endswith('LICENSE') for name in packed)


def test_eb_after_the_installation_of_the_readme(lmod, tmp_path):
    copy_of_checkout(tmp_path / 'slingtorch')
    env = {**clean_environ(), 'PIP_NO_COMPILE': '1', 'PATH': f'{quickvenv.python3()}:{os.environ["PATH"]}'}
    run(['bash', '-ec', readme.supercomputer()['installation']], timeout=300, env=env, cwd=tmp_path)
    venv = tmp_path / 'slingtorch-env'
    shutil.rmtree(tmp_path / 'slingtorch')
    index, work = tmp_path / 'index', tmp_path / 'work'
    work.mkdir()
    made = wheels.make_wheel(index, 'alpha', '1.0')
    (work / 'PyTorch-0.1-tiny.lock').write_text(wheels.lock_text([made]))
    (work / 'PyTorch-0.1-tiny.eb').write_text(wheels.tiny_easyconfig(work / 'PyTorch-0.1-tiny.lock'))

    env = {**lmod.env, 'PATH': f'{venv}/bin:/usr/bin:/bin', 'EASYBUILD_PREFIX': str(tmp_path / 'prefix'),
           'HOME': str(tmp_path), 'EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES': '1',
           'EASYBUILD_OUTPUT_STYLE': 'no_color'}
    script = '''
        commands=$(slingtorch env) && eval "$commands"
        eb --dry-run PyTorch-2.13.0-local-cpu.eb
        export PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS=%s
        unset PIP_EXTRA_INDEX_URL
        eb PyTorch-0.1-tiny.eb
        slingtorch examples slurm mine
        echo "$EASYBUILD_ROBOT_PATHS"
    ''' % index
    done = run(['bash', '-euc', script], env=env, cwd=work, timeout=300)
    assert 'PyTorch-2.13.0-local-cpu.eb' in done.stdout
    assert (work / 'mine/ddp_pytorch.job').read_bytes() == (ROOT / 'examples/slurm/ddp_pytorch.job').read_bytes()
    assert f'{venv}/lib' in done.stdout.splitlines()[-1] and str(ROOT) not in done.stdout
    loaded = lmod.load('PyTorch/0.1-tiny', modulepath=[tmp_path / 'prefix/modules/all'])
    scripts = pathlib.Path(loaded['RUNSCRIPTS'])
    assert os.access(scripts / 'conda-python-distributed', os.X_OK)
    assert (scripts / 'get-master').read_bytes() == (ROOT / 'runscripts/get-master').read_bytes()
