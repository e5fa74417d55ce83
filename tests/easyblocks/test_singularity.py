# SPDX-License-Identifier: GPL-2.0-only
"""The Singularity easyblock with files that are a SIF by their header only: installing, verifying, and what goes wrong.

No container runtime is in the PATH of these tests; tests/containers has those with a real one.
"""

import ast
import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
import testbed
from testbed import forkedeb, missing, smallimage
from testbed.expected import expected

GIGABYTE = 1 << 30
NAME = 'small-1.0.sif'


class Site(smallimage.Site):
    """One with an image, and a directory of central images.

    :ivar image: the image on the source path
    """

    def __init__(self, directory, tool):
        super().__init__(directory, tool)
        self.central, self.image = directory / 'central', smallimage.fake_sif(self.sources / NAME)
        self.central.mkdir()

    def start(self, *args, **parameters):
        """Start `eb` in a process group of its own and wait until it copies."""
        process = forkedeb.Started([self.easyconfig(**parameters), *args], self.env, self.prefix,
                                   self.directory / 'output')
        deadline = time.monotonic() + 600
        while not self.parts():
            assert process.poll() is None, process.end()
            assert time.monotonic() < deadline, 'no copying was seen'
            time.sleep(0.01)
        return process


@pytest.fixture
def site(tmp_path, lmod):
    return Site(tmp_path, lmod)


def test_installs_and_records(site):
    out = ' '.join(site.eb(preset_venv='pytorch').split())
    digest = smallimage.sha256(site.image)
    assert (site.root / NAME).read_bytes() == site.image.read_bytes()
    facts = json.loads((site.root / 'image.json').read_text())
    assert facts == {'file': NAME, 'sha256': digest, 'size': 100_000, 'origin': str(site.image), 'transfer': 'copy'}
    assert (site.root / f'{NAME}.sha256').read_text() == f'{digest}  {NAME}\n'
    subprocess.run(['sha256sum', '--check', '--quiet', f'{NAME}.sha256'], cwd=site.root, check=True)
    text = site.module.read_text()
    assert f'{NAME}: 100000 bytes, sha256 {digest}' in text and not re.search('CMAKE_|CPATH|LIBRARY_PATH|XDG_', text)
    assert ('Commands that run in the container: python, python3, pip, torchrun; in-container COMMAND runs any other one, start-shell '
            'starts a shell.\nPackages: list-packages; pip install (if the module has an environment for yours); make-squashfs, '
            'unmake-squashfs.\nThe image is $SIF: singularity exec $SIF COMMAND. Scripts for jobs are in /runscripts inside, in '
            '$RUNSCRIPTS outside.\n') in text
    assert not site.parts()
    # no runtime is there: said, with what to do, and not an error
    no_runtime = re.search('The inside of the image is not checked: (there is no container runtime .*?). Run', out).group(1)
    assert (f"WARNING: The inside of the image is not checked: {no_runtime}. Run 'eb --sanity-check-only Small-1.0.eb' on a node "
            'where containers run') in out
    assert (f"WARNING: The virtual environment pytorch is not made: {no_runtime}. Run 'eb --rebuild Small-1.0.eb' on a node "
            'where containers run') in out
    assert f'== image {NAME}, sha256 {digest} ' in out
    for name in ('in-container', 'list-packages', 'make-squashfs', 'unmake-squashfs', 'start-shell', 'torchrun'):
        assert os.access(site.root / 'bin' / name, os.X_OK), name
    assert os.readlink(site.root / 'bin/torchrun') == 'in-container'


def test_image_is_read_once_and_written_once(site):
    strace = shutil.which('strace') or missing('strace')
    site.image = smallimage.fake_sif(site.image, 40_000_000)
    trace = site.directory / 'trace'
    site.eb(wrap=[strace, '-f', '--seccomp-bpf', '-qq', '-y', '-e', 'trace=read,write,fsync,rename', '-o', trace],
            checksums=[smallimage.sha256(site.image)])
    counts, order, pending = {'read': 0, 'write': 0, 'fsync': 0, 'rename': 0}, [], {}
    for line in trace.read_text().splitlines():
        process, call = line.split(None, 1)
        if call.endswith('<unfinished ...>'):
            pending[process] = call
            continue
        if call.startswith('<...'):     # its end is on a line of its own when threads take turns
            call = pending.pop(process, '') + call
        arguments = call.split('"')[0] if call.startswith(('read', 'write')) else call   # not what was read or written
        if NAME in arguments and '= ' in call:
            counts[call.split('(')[0]] += int(call.rsplit('= ', 1)[1].split()[0])
            order.append(call.split('(')[0])
    # one pass over the data computes the checksum and writes the copy; a few headers are looked at besides
    assert 40_000_000 <= counts['read'] <= 40_100_000
    assert 40_000_000 <= counts['write'] <= 40_000_200
    # it is on the disk before it gets its name
    assert [call for call in order if call in ('fsync', 'rename')] == ['fsync', 'rename']
    assert list(site.prefix.rglob('*.sif')) == [site.root / NAME]


def test_link(site):
    site.eb(image_transfer='symlink', checksums=[smallimage.sha256(site.image)])
    assert os.path.samefile(site.root / NAME, site.image) and (site.root / NAME).is_symlink()
    assert json.loads((site.root / 'image.json').read_text())['transfer'] == 'symlink'


# --- bad images


@pytest.fixture
def refused(site, steps):
    """A function: the error with which installing the image ends; nothing of it is left."""
    def error(**parameters):
        said = steps(site.eb_, site.easyconfig(**parameters), env=site.env, last='checksum')['error']
        assert not site.parts() and not (site.root / NAME).exists()
        return said
    return error


def test_missing_image(site, refused):
    site.image.unlink()
    out = refused(central_image_dirs=[str(site.central)], download_instructions='It is on LUMI only.')
    paths = site.env['EASYBUILD_SOURCEPATH'].split(':')
    assert out == (
        f'The image {NAME} was not found. Searched: {", ".join([*paths, str(site.central)])}. It is on LUMI only. Remedy: put '
        f'the image, or a link to it, into a directory, and add that: --sourcepath=DIRECTORY:{":".join(paths)}')


def test_image_of_the_central_directory(site):
    smallimage.fake_sif(site.central / NAME)
    site.image.unlink()
    assert f'using the image {site.central}/{NAME}' in site.eb(central_image_dirs=[str(site.central)])
    assert (site.root / NAME).read_bytes() == (site.central / NAME).read_bytes()


def test_unreadable_central_image(site):
    image = smallimage.fake_sif(site.central / NAME)
    image.chmod(0)
    site.image.unlink()
    out = site.fails(wrap=testbed.ORDINARY, central_image_dirs=[str(site.central)])
    assert f'The image {NAME} cannot be read; ask its owner for read permission: {image}' in out


def test_not_a_sif(site, refused):
    site.image.write_bytes(b'<html>404 Not Found</html>')
    out = refused()
    assert f'{site.image} is not a SIF: it has 26 bytes' in out and 'apptainer build NEW.sif' in out


def test_wrong_checksum(site, refused, steps):
    out = refused(checksums=['1' * 64])
    assert f'The checksum of the image {site.image} differs from that in the easyconfig' in out
    assert smallimage.sha256(site.image) in out and '1' * 64 in out and 'get it again' in out
    wrong = site.easyconfig(checksums=['1' * 64])
    assert not steps(site.eb_, wrong, '--ignore-checksums', env=site.env, last='checksum')['error']


def test_failed_rebuild_leaves_the_old_installation(site):
    site.eb()
    before = site.module.read_text(), smallimage.sha256(site.root / NAME)
    smallimage.fake_sif(site.image)
    out = site.fails('--rebuild', checksums=['1' * 64])
    assert 'The installation is unchanged' in out
    assert (site.module.read_text(), smallimage.sha256(site.root / NAME)) == before

    # file systems over a network say late that they are full: copying succeeds, writing to the disk does not
    strace = shutil.which('strace') or missing('strace')
    inject = [strace, '-f', '--seccomp-bpf', '-o', '/dev/null', '-e', 'trace=fsync', '-e', 'inject=fsync:error=ENOSPC']
    out = site.fails('--rebuild', wrap=inject)
    assert 'No space left on device. Free' in out and 'The installation is unchanged' in out
    assert (site.module.read_text(), smallimage.sha256(site.root / NAME)) == before and not site.parts()

    os.truncate(site.root / NAME, 90_000)
    assert 'is truncated: it has 90000 of 100000 bytes' in site.fails('--sanity-check-only')


def test_rebuild_keeps_the_packages_of_the_user(site):
    site.eb()
    (site.root / 'user-software/venv').mkdir()
    (site.root / 'user-software/venv/mine').write_text('precious')
    (site.root / 'user-software.squashfs').write_bytes(b'also')
    (site.root / 'bin/old').touch()
    smallimage.fake_sif(site.image)
    out = site.eb('--rebuild')
    assert f'keeping {site.root}/user-software' in out
    assert (site.root / 'user-software/venv/mine').read_text() == 'precious'
    assert (site.root / 'user-software.squashfs').read_bytes() == b'also'
    assert not (site.root / 'bin/old').exists()
    assert (site.root / NAME).read_bytes() == site.image.read_bytes()


def test_disk_full(site):
    """A file system of 3 MB, mounted for this one process; copying gets as far as the disk does."""
    if os.geteuid() != 0:
        missing('root, which mounting a small file system needs')
    site.image = smallimage.fake_sif(site.image, 8_000_000)
    place = site.prefix / 'software'
    place.mkdir(parents=True)
    script = ('mount -t tmpfs -o size=3m tmpfs "$0" && { "$@"; status=$?; '
              'find "$0" -name "*.sif*" -printf "left: %p\\n"; exit $status; }')
    out = site.fails(wrap=['unshare', '--mount', 'bash', '-c', script, place])
    assert 'No space left on device. Free 8000000 bytes' in out
    assert "image_transfer = 'symlink'" in out
    assert 'left:' not in out and not site.module.exists()


# --- interrupted, and several at once


def test_killed_while_copying_and_again(site):
    site.image = smallimage.fake_sif(site.image, 3 * GIGABYTE, holes=True)
    process = site.start()
    os.killpg(process.pid, signal.SIGKILL)
    process.end()
    assert not site.module.exists() and not (site.root / NAME).exists()
    assert site.parts()
    site.image = smallimage.fake_sif(site.image)    # another one is asked for now: no part of the first may remain
    [lock] = (site.prefix / 'software/.locks').iterdir()
    lock.rmdir()    # what the message says
    out = site.eb()
    assert re.search(rf'== removing {site.root}/\.{NAME}\.part-\S+, left by a killed installation', out)
    assert (site.root / NAME).read_bytes() == site.image.read_bytes()
    assert not site.parts() and site.module.exists()
    assert not list((site.prefix / 'software/.locks').iterdir())


def test_interrupted_by_the_user(site):
    site.image = smallimage.fake_sif(site.image, 3 * GIGABYTE, holes=True)
    process = site.start()
    os.killpg(process.pid, signal.SIGINT)
    process.end()
    assert process.returncode != 0
    assert not site.parts() and not site.module.exists() and not (site.root / NAME).exists()


def test_two_installations_at_once(site):
    site.image = smallimage.fake_sif(site.image, GIGABYTE // 2, holes=True)
    first = site.start()
    os.killpg(first.pid, signal.SIGSTOP)
    out = site.fails('--wait-on-lock-limit=0')
    assert 'already exists, aborting!' in out and '--wait-on-lock-limit=3600' in out
    assert site.parts(), 'the second one removed the work of the first'
    os.killpg(first.pid, signal.SIGCONT)
    out = first.end()
    assert first.returncode == 0, out
    assert (site.root / NAME).stat().st_size == GIGABYTE // 2 and site.module.exists()


# --- the ways to call eb


def test_fetch_verifies_and_installs_nothing(site):
    site.eb('--fetch', checksums=[smallimage.sha256(site.image)])
    assert not (site.root / NAME).exists() and not site.module.exists()
    assert 'Checksum verification' in site.fails('--fetch', checksums=['2' * 64])
    os.truncate(site.image, 50_000)
    assert 'is truncated' in site.fails('--fetch')


def test_module_only_after_the_own_image_was_removed(site):
    central = [str(site.central)]
    site.eb(central_image_dirs=central)
    (site.root / NAME).rename(site.central / NAME)
    site.module.unlink()
    out = site.eb('--module-only', central_image_dirs=central)
    assert site.module.exists() and not (site.root / NAME).exists()
    assert 'copying' not in out
    site.eb('--sanity-check-only', central_image_dirs=central)
    (site.central / NAME).unlink()
    out = site.fails('--sanity-check-only', central_image_dirs=central)
    assert "'eb --rebuild Small-1.0.eb' to install it again" in out


def test_module_only_keeps_wrappers_and_module_together(site):
    site.eb()
    site.eb('--module-only', '--rebuild', bind_paths=['/srv', '/opt:/opt/host'], bind_paths_excluded=['/opt'])
    for text in (site.module.read_text(), (site.root / 'container.conf').read_text()):
        assert '/srv' in text and '/opt' not in text


def test_extended_dry_run(site):
    out = site.eb('-x', sanity_check_imports=['torch'], preset_venv='pytorch')
    assert "in-container python -c 'import torch'" in out
    assert f'setenv("SIF", "{site.root}/{NAME}")' in out
    # EasyBuild's own, with every easyblock: a dry run makes no compiler wrappers, and wants to change their mode
    assert not [line for line in out.splitlines() if 'ignoring error' in line.lower() and 'rpath_wrappers' not in line]
    assert not site.root.exists()


def test_read_only_installation_leaves_the_packages_changeable(site):
    for options in ([], ['--rebuild']):
        site.eb('--read-only-installdir', *options)
        assert not (site.root / NAME).stat().st_mode & 0o222
        assert (site.root / 'user-software').stat().st_mode & 0o200 and site.root.stat().st_mode & 0o200


# --- parameters


BAD = [
    {'bind_paths': ['/a,b']}, {'bind_paths': ['relative']}, {'image_transfer': 'move'}, {'gpu_visibility': 'GPUS'},
    {'gpu_driver': 'cuda'}, {'gpu_driver': 'nv', 'site_gpu': 'rocm'}, {'wrappers': ['make-squashfs']}, {'wrappers': ['bash']},
    {'wrappers': ['../python']}, {'sources': ['image.tar']}, {'sources': []}, {'container_python': None, 'preset_venv': 'x'},
    {'preset_venv': 'a b/../c'}, {'wrappers': 'python'}, {'container_environment': {'A"]); os.execute("id': 'x'}},
    {'container_environment': {'COLOUR': 'a\nb'}}, {'sanity_check_packages': ['torch']},
    {'sanity_check_packages': {'pip': None}}, {'image_address': 'oras://x/debian:12'}, {'image_address': 'shub://x'},
    {'image_address': 'docker://x', 'sources': ['small-1.0.sif']}]


def test_bad_parameters(refused):
    expected(''.join(f'{refused(**parameters)}\n' for parameters in BAD), 'easyblocks/singularity')


def test_directory_that_cannot_be_mounted(site, steps):
    said = steps(site.eb_, site.easyconfig(), f'--installpath={site.directory}/a,b', env=site.env, last='checksum')['error']
    assert said == (f'The installation directory is {site.directory}/a,b/software/Small/1.0, but containers cannot mount a path '
                    'that has a comma, a colon, a quote or a dollar. Install elsewhere: --prefix or --installpath')


def test_module_only_by_force_without_an_image(site):
    """As EasyBuild's own test suite asks of every easyblock: there is a module, and what is missing is said."""
    out = ' '.join(site.eb('--module-only', '--force').split())
    assert site.module.exists()
    assert (f"WARNING: The image {NAME} does not exist: the module can be loaded only with a central copy, or after 'eb "
            "--rebuild Small-1.0.eb'") in out
    assert (f'WARNING: Nothing is installed in {site.root}, so this module does not work. To install the software, run eb '
            '--rebuild instead of --module-only; if it is installed elsewhere, correct EASYBUILD_PREFIX') in out


# --- the easyconfigs

LEAVES_OUT = [path for path in sorted((testbed.ROOT / 'easyconfigs').rglob('*.eb'))
              if 'bind_paths_excluded' in path.read_text()]


@pytest.mark.parametrize('path', LEAVES_OUT, ids=lambda path: path.name)
def test_what_is_left_out_is_in_the_list_of_the_site(path):
    """A misspelt path would leave out nothing, in silence. All of these are for LUMI."""
    excluded = re.search(r'(?m)^bind_paths_excluded = (.*?])', path.read_text()).group(1)
    site = configparser.ConfigParser()
    site.read(testbed.ROOT / 'hooks/sites/lumi.cfg')
    assert set(ast.literal_eval(excluded)) < set(site['parameter bind_paths']['values'].split())
