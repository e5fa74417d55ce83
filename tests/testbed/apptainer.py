# SPDX-License-Identifier: GPL-2.0-only
"""Apptainer in a directory of its own, from Debian's packages, whatever the release of the machine.

    python3 tests/testbed/apptainer.py DIR

Debian has the package in its development suite (sid) only, and the libraries that it wants are newer than those of
Debian 12. So the package and its libraries are unpacked together into DIR, and its two programs are told to use these
libraries. Nothing of the machine is changed. apt checks the signatures, with the keyring of debian-archive-keyring.
"""
import argparse
import fcntl
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

KEYRING = '/usr/share/keyrings/debian-archive-keyring.gpg'
PACKAGES = ('apptainer', 'libc6', 'libseccomp2', 'libsqlite3-0')
HELPERS = ('mksquashfs', 'unsquashfs', 'squashfuse', 'fuse2fs', 'newuidmap')
"""Programs that Apptainer calls: packages squashfs-tools, squashfuse, fuse2fs, uidmap."""

CAPABILITIES = """CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
    NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE
    SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL
    SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE""".split()
"""Linux's capabilities in the order of their numbers: linux/capability.h."""

PATCHELF = 'libexec/patchelf'
"""Where it is kept below an installation, for copies of this."""

RECIPE = 3
"""Raised when an installation made by an earlier version of this file must be made again."""


class Unavailable(Exception):
    """Apptainer cannot be installed here; the text says why and what to do."""


def call(*command, **options):
    """Run a command; Unavailable with what it printed when it fails. Returns its standard output."""
    command = [str(word) for word in command]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, **options)
    except FileNotFoundError:
        raise Unavailable(
            f'{command[0]} is missing: Apptainer is unpacked from Debian packages, which needs a Debian machine. '
            'Elsewhere install Apptainer yourself: one on the PATH is used'
        )
    if done.returncode != 0:
        output = done.stdout[-1500:] + done.stderr[-1500:]
        raise Unavailable(f'{" ".join(command)} failed with status {done.returncode}:\n{output}')
    return done.stdout


def debian_mirror():
    """Address of the Debian archive that this machine's own apt uses."""
    fields = '$(LABEL)|$(COMPONENT)|$(REPO_URI)'
    targets = call('apt-get', 'indextargets', '--format', fields, 'Created-By: Packages')
    for line in targets.splitlines():
        label, component, uri = line.split('|', 2)
        if (label, component) == ('Debian', 'main'):
            return uri
    raise Unavailable(
        "this machine's apt has no package lists of the Debian archive. Remedy: apt-get update; on a machine that is "
        'not Debian, install Apptainer yourself: one on the PATH is used'
    )


def own_apt(directory, suite, architecture=None):
    """
    An apt configuration of its own in this directory, for a suite of the Debian archive, with its package lists.

    :param architecture: Debian's name of another one than this machine's
    :return: the environment to call apt in
    """
    if not os.path.exists(KEYRING):
        remedy = 'apt-get install debian-archive-keyring'
        raise Unavailable(f'{KEYRING} is missing, so signatures cannot be checked. Remedy: {remedy}')
    apt = directory / 'apt'
    for part in ('state/lists/partial', 'cache/archives/partial', 'sources', 'preferences'):
        (apt / part).mkdir(parents=True)
    (apt / 'sources.list').write_text(f'deb [signed-by={KEYRING}] {debian_mirror()} {suite} main\n')
    (apt / 'status').touch()
    # apt's own user may not enter our directory
    user = 'APT::Sandbox::User "root";\n' if os.geteuid() == 0 else ''
    if architecture:
        user += f'APT::Architecture "{architecture}";\nAPT::Architectures "{architecture}";\n'
    (apt / 'apt.conf').write_text(
        f'Dir::State "{apt}/state";\nDir::State::status "{apt}/status";\nDir::Cache "{apt}/cache";\n'
        f'Dir::Etc::sourcelist "{apt}/sources.list";\nDir::Etc::sourceparts "{apt}/sources";\n'
        f'Dir::Etc::preferencesparts "{apt}/preferences";\nDir::Etc::preferences "{apt}/none";\n'
        f'Acquire::Languages "none";\nAcquire::Retries "3";\nAcquire::AllowInsecureRepositories "false";\n'
        f'APT::Update::Error-Mode "any";\n{user}')
    env = {**os.environ, 'APT_CONFIG': str(apt / 'apt.conf')}
    call('apt-get', '-q', 'update', env=env)
    return env


def download(packages, directory, suite=None):
    """
    Download packages with apt.

    :param suite: of the Debian archive, with an apt configuration of its own; None: what the machine's own sources have
    :return: paths of the package files
    """
    env = own_apt(directory, suite) if suite else None
    target = directory / f'debs-{suite or "machine"}'
    target.mkdir()
    call('apt-get', '-q', 'download', *packages, cwd=target, env=env)
    return sorted(target.glob('*.deb'))


def use_own_libraries(part, root, patchelf):
    """Make the programs of what is in `part` use the libraries beside them when it is called `root`."""
    starter, = part.glob('usr/lib/*/apptainer/bin/starter')
    library = starter.parents[2]
    interpreter = call(patchelf, '--print-interpreter', part / 'usr/bin/apptainer').strip()
    loader = library.relative_to(part) / os.path.basename(interpreter)
    if not (part / loader).exists():
        raise Unavailable(f'the package libc6 has no {loader}')
    for program in (part / 'usr/bin/apptainer', starter):
        # a forced rpath also holds for the libraries that the libraries want
        rpath = root / library.relative_to(part)
        call(patchelf, '--set-interpreter', root / loader, '--force-rpath', '--set-rpath', rpath, program)


def relocate(part, root, patchelf):
    """Make what was unpacked in `part` work when it is called `root`."""
    use_own_libraries(part, root, patchelf)
    (part / 'libexec').mkdir()
    shutil.copy2(patchelf, part / PATCHELF)

    # unpacked elsewhere than in /, it looks for its files relative to its two programs
    for name in ('usr/etc', 'usr/lib/etc'):
        (part / name).symlink_to(os.path.relpath(part / 'etc', (part / name).parent))
    for name in ('usr/lib/var/lib', 'usr/var/lib'):
        (part / name / 'apptainer/mnt/session').mkdir(parents=True)

    limit_capabilities(part / 'etc/apptainer')

    (part / 'bin').mkdir(exist_ok=True)
    for name in ('apptainer', 'singularity'):
        (part / 'bin' / name).symlink_to('../usr/bin/apptainer')


def limit_capabilities(configuration):
    """
    Make root in a container ask for what root has here: without it Apptainer asks for every capability there is,
    which fails where root itself lacks one, as in many containers and virtual machines.
    """
    status = pathlib.Path('/proc/self/status').read_text()
    bounding = int(re.search(r'CapBnd:\s*(\S+)', status).group(1), 16)
    held = [f'CAP_{name}' for bit, name in enumerate(CAPABILITIES) if bounding >> bit & 1]
    if len(held) == len(CAPABILITIES):
        return
    (configuration / 'capability.json').write_text(json.dumps({'users': {'root': held}}) + '\n')
    path = configuration / 'apptainer.conf'
    text, count = re.subn(r'(?m)^root default capabilities = .*$', 'root default capabilities = file', path.read_text())
    if count != 1:
        raise Unavailable(f'{path} has no line "root default capabilities"')
    path.write_text(text)


def stamp(root):
    return f'{RECIPE} {root}\n'


def install(directory):
    """
    Install Apptainer into `directory`, unless it is there.

    It appears under its name only when it is whole; two calls at the same time end with one installation.

    :return: directory of the commands `apptainer` and `singularity`
    """
    root = pathlib.Path(os.path.abspath(directory))
    done = root / '.installed'
    root.parent.mkdir(parents=True, exist_ok=True)
    with open(root.parent / f'.{root.name}.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() and done.read_text() == stamp(root):
            return root / 'bin'
        if root.exists() and any(root.iterdir()) and not done.exists():
            raise Unavailable(f'{root} is there and is not an Apptainer that was made here; name another directory')
        with tempfile.TemporaryDirectory(prefix=f'.{root.name}.', dir=root.parent) as temporary:
            part = pathlib.Path(temporary) / 'root'
            debs = download(PACKAGES, pathlib.Path(temporary), 'sid')
            for deb in debs:
                call('dpkg', '-x', deb, part)
            tools = pathlib.Path(temporary) / 'tools'
            patchelf = shutil.which('patchelf')
            if not patchelf:
                call('dpkg', '-x', download(['patchelf'], pathlib.Path(temporary))[0], tools)
                patchelf = tools / 'usr/bin/patchelf'
            relocate(part, root, patchelf)
            (part / '.installed').write_text(stamp(root))
            for path in (part, part / 'bin'):
                path.chmod(0o755)
            shutil.rmtree(root, ignore_errors=True)
            part.rename(root)
        try:
            call(root / 'bin/apptainer', 'version')
        except Unavailable:
            shutil.rmtree(root)
            raise
    return root / 'bin'


def copy(root, target):
    """Copy an installation made by install(), which works in its own directory only; directory of the commands."""
    shutil.copytree(root, target, symlinks=True)
    use_own_libraries(target, target, target / PATCHELF)
    (target / '.installed').write_text(stamp(target))
    return target / 'bin'


def main():
    parser = argparse.ArgumentParser(description="Install Apptainer from Debian's packages into a directory of its own")
    parser.add_argument('directory', metavar='DIR', help='made if it is not there; nothing is written elsewhere')
    args = parser.parse_args()
    try:
        bin_dir = install(args.directory)
    except (Unavailable, OSError) as error:
        sys.exit(f'apptainer.py: {error}')
    missing = [name for name in HELPERS if not shutil.which(name)]
    if missing:
        print('apptainer.py: not on the PATH, and needed for some of its work: %s '
              '(packages squashfs-tools, squashfuse, fuse2fs, uidmap)' % ' '.join(missing), file=sys.stderr)
    print(bin_dir)


if __name__ == '__main__':
    main()
