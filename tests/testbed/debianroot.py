# SPDX-License-Identifier: GPL-2.0-only
"""Newer Debians, each in a directory of its own, for their Slurm, Open MPI and MPICH; made once and kept.

    python -m testbed.debianroot         in tests/: makes all, and says where they are

apt downloads and checks the packages with all that they depend on; they are unpacked and not configured, since no
program of the tests needs that: 40 to 60 s for both on two cores, where debootstrap takes 45 s for one.
"""

import concurrent.futures
import hashlib
import pathlib
import shutil
import sys
import tempfile

import pytest

from . import DIR, apptainer, locked

SUITES = ('trixie', 'sid')
PACKAGES = '''slurmctld slurmd slurm-client munge openmpi-bin mpich
    base-files bash coreutils dash grep hostname libc-bin mount sed util-linux
    libbz2-1.0 libexpat1 libffi8 liblzma5 libreadline8t64 libsqlite3-0 libssl3t64 libuuid1 zlib1g'''.split()
"""The last line is what this machine's Python wants, which runs in there."""


def make(suite):
    """Make the root of this suite unless it is there; its path."""
    recipe = hashlib.sha256(' '.join(PACKAGES).encode()).hexdigest()[:12]
    root = DIR / 'roots' / f'{suite}-{recipe}'
    with locked(f'root-{suite}'):
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            for earlier in root.parent.glob(f'{suite}-*'):
                shutil.rmtree(earlier)
            with tempfile.TemporaryDirectory(prefix=f'.{suite}.', dir=root.parent) as temporary:
                unpack(pathlib.Path(temporary), suite).rename(root)
    return root


def unpack(directory, suite):
    part = directory / 'root'
    env = apptainer.own_apt(directory, suite)
    options = ['-q', '-y', '--no-install-recommends', '--download-only']
    apptainer.call('apt-get', 'install', *options, *PACKAGES, env=env)
    # base-files first: it has the links /bin, /lib ... into /usr
    debs = directory.glob('apt/cache/archives/*.deb')
    for deb in sorted(debs, key=lambda deb: not deb.name.startswith('base-files_')):
        apptainer.call('dpkg', '-x', deb, part)
    # the links that update-alternatives makes, when slurmctld and slurmd are configured
    for program in part.glob('usr/sbin/slurm*-wlm'):
        program.with_name(program.name[:-len('-wlm')]).symlink_to(program.name)
    part.chmod(0o755)
    return part


def roots():
    """{suite: path of its root}; skips the test where they cannot be had."""
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            return dict(zip(SUITES, pool.map(make, SUITES)))
    except apptainer.Unavailable as error:
        pytest.skip(f'no Slurm of a newer Debian: {error}')


if __name__ == '__main__':
    try:
        for name in SUITES:
            print(make(name))
    except (apptainer.Unavailable, OSError) as error:
        sys.exit(f'debianroot.py: {error}')
