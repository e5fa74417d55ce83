# SPDX-License-Identifier: GPL-2.0-only
"""bash and Python for aarch64 on this machine: Debian's packages, unpacked, under qemu-user.

The kernel starts such programs by qemu (binfmt_misc) in a user namespace of its own, and nowhere else: Linux 6.7.
"""
import hashlib
import pathlib
import shlex
import shutil
import subprocess
import tempfile

from . import DIR, ROOT, apptainer, locked, missing

SUITE = 'bookworm'
PACKAGES = 'base-files bash coreutils dash grep hostname libc-bin procps python3 sed util-linux'.split()
# an ELF file of 64 bits, little-endian, an executable or a library, for the machine 183
MAGIC = r'\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
MASK = r'\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
ENTER = """set -e
formats=$(mktemp -d -p {root}/tmp)
mount -t binfmt_misc none "$formats"
printf %s {rule} > "$formats/register"
for place in proc dev; do mount --rbind /$place {root}/$place; done
mount --rbind {bundle} {root}/bundle
cd {root}/bundle
exec chroot {root} /usr/bin/env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/tmp LC_ALL=C /bin/bash -c "cd /bundle; $1"
"""


def unpack(directory, packages, architecture=None):
    """Download packages and what they depend on, and unpack them below directory/root."""
    directory.mkdir()
    env = apptainer.own_apt(directory, SUITE, architecture)
    options = ['-q', '-y', '--no-install-recommends', '--download-only']
    apptainer.call('apt-get', 'install', *options, *packages, env=env)
    # base-files first: it has the links /bin, /lib ... into /usr
    debs = directory.glob('apt/cache/archives/*.deb')
    for deb in sorted(debs, key=lambda deb: not deb.name.startswith('base-files_')):
        apptainer.call('dpkg', '-x', deb, directory / 'root')
    return directory / 'root'


def make():
    """Make the root unless it is there; its path, with qemu in it."""
    recipe = hashlib.sha256(' '.join(PACKAGES + [SUITE]).encode()).hexdigest()[:12]
    root = DIR / 'roots' / f'arm64-{recipe}'
    with locked('root-arm64'):
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix='.arm64.', dir=root.parent) as temporary:
                part = unpack(pathlib.Path(temporary) / 'arm64', PACKAGES, 'arm64')
                qemu = unpack(pathlib.Path(temporary) / 'own', ['qemu-user-static'])
                shutil.move(qemu / 'usr/bin/qemu-aarch64-static', part / 'usr/bin')
                # what slingtorch's runscripts call
                (part / 'usr/bin/python').symlink_to('python3')
                for place in ('bundle', 'proc', 'dev', 'tmp'):
                    (part / place).mkdir(exist_ok=True)
                part.chmod(0o755)
                part.rename(root)
    return root


def run(command):
    """What a command line of bash prints there, in the bundle; its CompletedProcess."""
    try:
        root = make()
    except apptainer.Unavailable as error:
        missing(f'Debian packages for arm64 ({error})')
    rule = f':aarch64:M::{MAGIC}:{MASK}:{root}/usr/bin/qemu-aarch64-static:F'
    script = ENTER.format(root=shlex.quote(str(root)), rule=shlex.quote(rule), bundle=shlex.quote(str(ROOT)))
    done = subprocess.run(['unshare', '--user', '--map-root-user', '--mount', 'bash', '-c', script, 'bash', command],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    if 'binfmt_misc' in done.stderr and done.returncode:
        missing(f'binfmt_misc in a user namespace, which Linux has since 6.7: {done.stderr}')
    return done
