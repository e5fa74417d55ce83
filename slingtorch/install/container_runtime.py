# SPDX-License-Identifier: GPL-2.0-only
"""Functions of the Singularity easyblock: calls of Apptainer or Singularity, through spython where that has them."""
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

# what a runtime prints -> what it means and what to do: with any image, with registries, with hosts
FULL = (r'no space left|disk quota exceeded', "there is no space left. The runtime unpacks in $APPTAINER_TMPDIR (else "
        "in the directory of 'eb --tmpdir') and keeps what it downloads in $APPTAINER_CACHEDIR (else in the home "
        "directory): point them to a place with room")
REGISTRY_PROBLEMS = [
    FULL,
    (r'digest.*(mismatch|match|verif)|(mismatch|verif).*digest|unexpected digest|got "?sha256:.*want',
     "what the registry delivered does not have the digest of the address. Do not use it; ask who published it"),
    (r'unauthorized|authentication required|(?<!permission )denied|\b40[13]\b', "the registry refuses. Log in with "
     "'apptainer registry login' or 'singularity remote login', or correct the address"),
    (r'manifest unknown|manifest_unknown|name unknown|name_unknown|not found|\b404\b', "the registry has no such "
     "image. Compare address and digest with what the publisher says; images can be deleted"),
    (r'no such host|connection re(fused|set)|timeout|timed out|unreachable|dial tcp|tls|certificate|\b50\d\b',
     "the registry does not answer. Compute nodes often have no network: run 'eb --fetch' on a login node first, or "
     "set $https_proxy; docs/easyconfigs.md of slingtorch says how to use a mirror, or no network at all"),
]
HOST_PROBLEMS = [
    (r'neither singularity nor apptainer', "no container runtime is here"),
    (r'user namespace|unprivileged_userns|max_user_namespaces|newuidmap|uid_map|setgroups',
     "the runtime may not make user namespaces here. An administrator can allow them (sysctl "
     "user.max_user_namespaces), or install the setuid part of the runtime"),
    (r'/dev/fuse|fusermount|squashfuse|fuse', "the runtime cannot mount the image: it needs squashfuse and read and "
     "write permission for /dev/fuse, or its setuid part"),
]


def meaning(output: str, problems: Any) -> Any:
    """What the end of an output means and what to do; None if it is not one of the problems."""
    return next((text for regex, text in problems if re.search(regex, last_lines(output), re.I)), None)


def runtime_error(doing: str, output: str, status: int, problems: Any, directories: Any) -> Any:
    """What the runtime printed as an EasyBuildError that says what to do."""
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
    """Directory that the user has set for the runtime's CACHEDIR or TMPDIR, made and found writable; None: none."""
    name = next((name for name in ['APPTAINER_' + kind, 'SINGULARITY_' + kind] if os.environ.get(name)), None)
    if not name:
        return None
    path = os.environ[name]
    try:
        os.makedirs(path, 0o700, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as err:
        raise EasyBuildError("The container runtime cannot use %s ($%s): %s. Name a directory of yours with room for "
                             "some images: export APPTAINER_%s=DIRECTORY", path, name, err.strerror, kind)
    return path


@contextlib.contextmanager
def runtime_for(doing: str, directories: Any = None) -> Any:
    """The runtime's command, without the user's bind mounts, which must not get into an image; directories: it uses."""
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
                # spython knows one name only
                os.symlink(shutil.which('apptainer'), os.path.join(directory, 'singularity'))  # type: ignore
                os.environ['PATH'] += os.pathsep + directory
            command = shutil.which('singularity')
            if not command:
                raise EasyBuildError("Neither singularity nor apptainer is in the PATH; one of them is needed for %s. "
                                     "Run eb on a node that has it (often a compute node), or load its module", doing)
            yield command
        finally:
            os.environ.clear()
            os.environ.update(saved)


def spython_client(doing: str) -> Any:
    """Client of spython; EasyBuildError if that is not installed."""
    try:
        from spython.main import get_client
    except ImportError as err:
        raise EasyBuildError("The Python package spython is needed for %s (%s). Install it for the Python that runs "
                             "eb: python3 -m pip install spython", doing, err)
    return get_client()


def pull_image(address: str, path: str, directories: Any, log: Any) -> None:
    """Pull an image from a registry to a file; the runtime verifies the digest that the address ends in."""
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
    """Build an image to a path from a definition file in a directory, where what it names is too."""
    # not through spython, whose build call reads one of two pipes: it waits for ever when the other one is full
    with runtime_for("building an image from %s" % definition, directories) as runtime:
        cmd = ' '.join(shlex.quote(word) for word in [runtime, 'build'] + options + [path, definition])
        res = run_shell_cmd(cmd, work_dir=directory, fail_on_error=False)
    if res.exit_code:
        raise runtime_error("Building the image from %s with %s" % (definition, runtime), res.output, res.exit_code,
                            [FULL], directories)


def definition_of(image: str) -> Any:
    """The definition that an image holds, or None; ValueError if the runtime cannot read it."""
    doing = "reading the definition that the image holds"
    with runtime_for(doing):
        return spython_client(doing).inspect(image=image).get('attributes', {}).get('deffile')
