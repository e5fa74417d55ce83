# SPDX-License-Identifier: GPL-2.0-only
"""Functions of the Singularity easyblock that call Apptainer or Singularity, through spython where possible."""
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from typing import Any, Optional

from easybuild.tools.build_log import EasyBuildError, EasyBuildExit
from easybuild.tools.run import run_shell_cmd
from slingtorch.install.dependencies import last_lines

# what a runtime prints -> its meaning and the remedy: for all images, for registries, for hosts
FULL = (r'no space left|disk quota exceeded', "there is no space left. The runtime unpacks in $APPTAINER_TMPDIR (else "
        "in the directory of 'eb --tmpdir') and keeps downloads in $APPTAINER_CACHEDIR (else in the home directory): "
        "set them to directories with enough space")
REGISTRY_PROBLEMS = [
    FULL,
    (r'digest.*(mismatch|match|verif)|(mismatch|verif).*digest|unexpected digest|got "?sha256:.*want',
     "the image from the registry does not have the digest in its address. Do not use it; ask its publisher"),
    (r'unauthorized|authentication required|(?<!permission )denied|\b40[13]\b', "the registry refuses access. Log in "
     "with 'apptainer registry login' or 'singularity remote login', or correct the address"),
    (r'manifest unknown|manifest_unknown|name unknown|name_unknown|not found|\b404\b', "the registry has no such "
     "image. Compare address and digest with those of the publisher; the image may have been deleted"),
    (r'no such host|connection re(fused|set)|timeout|timed out|unreachable|dial tcp|tls|certificate|\b50\d\b',
     "the registry does not answer. Compute nodes often have no network: run 'eb --fetch' on a login node first, or "
     "set $https_proxy; docs/easyconfigs.md of slingtorch explains how to use a mirror or install without network"),
]
HOST_PROBLEMS = [
    (r'neither singularity nor apptainer', "there is no container runtime on this machine"),
    (r'user namespace|unprivileged_userns|max_user_namespaces|newuidmap|uid_map|setgroups',
     "the runtime may not create user namespaces on this machine. An administrator can allow them (sysctl "
     "user.max_user_namespaces), or install the setuid part of the runtime"),
    (r'/dev/fuse|fusermount|squashfuse|fuse', "the runtime cannot mount the image: it needs squashfuse and read and "
     "write permission for /dev/fuse, or its setuid part"),
]


def meaning(output: str, problems: Any) -> Any:
    """Meaning and remedy of the end of an output; None if it matches none of the problems."""
    return next((text for regex, text in problems if re.search(regex, last_lines(output), re.I)), None)


def runtime_error(doing: str, output: str, status: int, problems: Any, directories: Any) -> Any:
    """An EasyBuildError with the runtime's output and a remedy."""
    known = meaning(output, problems)
    if known == FULL[1]:
        rooms = ['%s: %d MB free' % (path, shutil.disk_usage(path).free >> 20)
                 for path in [directories['CACHEDIR'], directories['TMPDIR'] or tempfile.gettempdir()] if path]
        known += ' (%s)' % ', '.join(rooms)
    if known:
        return EasyBuildError("%s failed: %s.\nIts last lines were:\n%s", doing, known, last_lines(output),
                              exit_code=EasyBuildExit.FAIL_DOWNLOAD)
    return EasyBuildError("%s failed with status %s. Its last lines were:\n%s", doing, status, last_lines(output))


def runtime_directory(kind: str) -> Optional[str]:
    """Directory that the user has set as the runtime's CACHEDIR or TMPDIR, created and writable; None if not set."""
    name = next((name for name in ['APPTAINER_' + kind, 'SINGULARITY_' + kind] if os.environ.get(name)), None)
    if not name:
        return None
    path = os.environ[name]
    try:
        os.makedirs(path, 0o700, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as err:
        raise EasyBuildError("The container runtime cannot use %s ($%s): %s. Use your own directory with space for "
                             "several images: export APPTAINER_%s=DIRECTORY", path, name, err.strerror, kind)
    return path


@contextlib.contextmanager
def runtime_for(doing: str, directories: Any = None) -> Any:
    """The runtime's command, with these directories set, the user's bind mounts unset: no image may contain these."""
    saved = dict(os.environ)
    for kind, path in (directories or {}).items():
        if path:
            os.environ.update({'APPTAINER_' + kind: path, 'SINGULARITY_' + kind: path})
    for name in ['_BIND', '_BINDPATH', '_MOUNT']:
        os.environ.pop('SINGULARITY' + name, None)
        os.environ.pop('APPTAINER' + name, None)
    with tempfile.TemporaryDirectory() as directory:
        try:
            if not shutil.which('singularity') and shutil.which('apptainer'):
                # spython knows only the name singularity
                os.symlink(shutil.which('apptainer'), os.path.join(directory, 'singularity'))  # type: ignore
                os.environ['PATH'] += os.pathsep + directory
            command = shutil.which('singularity')
            if not command:
                raise EasyBuildError("Neither singularity nor apptainer is in PATH, but %s needs one of them. "
                                     "Run eb on a node that has it (often a compute node), or load its module", doing)
            yield command
        finally:
            os.environ.clear()
            os.environ.update(saved)


def spython_client(doing: str) -> Any:
    """The client of spython; EasyBuildError if spython is not installed."""
    try:
        from spython.main import get_client
    except ImportError as err:
        raise EasyBuildError("%s needs the Python package spython (%s). Install it for the Python that runs "
                             "eb: python3 -m pip install spython", doing, err)
    return get_client()


def pull_image(address: str, path: str, directories: Any, log: Any) -> None:
    """Pull an image from a registry to a file; the runtime verifies the digest at the end of the address."""
    lines, doing = [], "pulling %s" % address
    with runtime_for(doing, directories):
        try:
            _, stream = spython_client(doing).pull(image=address, name=path, stream=True, quiet=True)
            for line in stream:
                lines.append(line)
                log.info("pull: %s", line.rstrip())
        except subprocess.CalledProcessError as err:
            raise runtime_error("Pulling %s" % address, ''.join(lines), err.returncode, REGISTRY_PROBLEMS, directories)


def build_image(definition: str, options: Any, path: str, directory: str, directories: Any) -> None:
    """Build an image at a path from a definition file in a directory; the files that it names are there, too."""
    # not through spython, whose build call reads only one of two pipes and hangs when the other one is full
    with runtime_for("building an image from %s" % definition, directories) as runtime:
        cmd = ' '.join(shlex.quote(word) for word in [runtime, 'build'] + options + [path, definition])
        res = run_shell_cmd(cmd, work_dir=directory, fail_on_error=False)
    if res.exit_code:
        raise runtime_error("Building the image from %s with %s" % (definition, runtime), res.output, res.exit_code,
                            [FULL], directories)


def definition_of(image: str) -> Any:
    """The definition inside an image, or None; ValueError if the runtime cannot read it."""
    doing = "reading the definition inside the image"
    with runtime_for(doing):
        return spython_client(doing).inspect(image=image).get('attributes', {}).get('deffile')
