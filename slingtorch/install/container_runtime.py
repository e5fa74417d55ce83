# SPDX-License-Identifier: GPL-2.0-only
"""Functions of the Singularity easyblock that call Apptainer or Singularity."""
import os
import re
import shutil
import tempfile
from typing import Any, Dict, Optional

from easybuild.tools.build_log import EasyBuildError, EasyBuildExit
from slingtorch.install.dependencies import last_lines, run

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


def runtime_error(doing: str, output: str, status: int, problems: Any) -> Any:
    """An EasyBuildError with the runtime's output and a remedy."""
    known = meaning(output, problems)
    if known:
        return EasyBuildError("%s failed: %s.\nIts last lines were:\n%s", doing, known, last_lines(output),
                              exit_code=EasyBuildExit.FAIL_DOWNLOAD)
    return EasyBuildError("%s failed with status %s. Its last lines were:\n%s", doing, status, last_lines(output))


def runtime_directories() -> Dict[str, Optional[str]]:
    """Directories that the user has set as the runtime's CACHEDIR and TMPDIR, created and writable; None if not set."""
    found: Dict[str, Optional[str]] = {}
    for kind in ['CACHEDIR', 'TMPDIR']:
        name = next((name for name in ['APPTAINER_' + kind, 'SINGULARITY_' + kind] if os.environ.get(name)), '')
        path = found[kind] = os.environ.get(name)
        try:
            if path:
                os.makedirs(path, 0o700, exist_ok=True)
                tempfile.TemporaryFile(dir=path).close()
        except OSError as err:
            raise EasyBuildError("The container runtime cannot use %s ($%s): %s. Use your own directory with space for "
                                 "several images: export APPTAINER_%s=DIRECTORY", path, name, err.strerror, kind)
    return found


def run_runtime(doing: str, words: Any, directories: Any, **options: Any) -> Any:
    """Run the runtime with its directories and without the user's bind mounts, which no image may contain."""
    runtime = shutil.which('singularity') or shutil.which('apptainer')
    if not runtime:
        raise EasyBuildError("Neither singularity nor apptainer is in PATH, but %s needs one of them. "
                             "Run eb on a node that has it (often a compute node), or load its module", doing)
    env = {name: value for name, value in os.environ.items()
           if not re.match('(SINGULARITY|APPTAINER)_(BIND|BINDPATH|MOUNT)$', name)}
    for kind, path in directories.items():
        if path:
            env.update({'APPTAINER_' + kind: path, 'SINGULARITY_' + kind: path})
    return run(runtime, *words, env=env, **options)


def pull_image(address: str, path: str, directories: Any) -> None:
    """Pull an image from a registry to a file; the runtime verifies the digest at the end of the address."""
    res = run_runtime("pulling %s" % address, ['--quiet', 'pull', '--name', path, address], directories)
    if res.exit_code:
        raise runtime_error("Pulling %s" % address, res.output, res.exit_code, REGISTRY_PROBLEMS)


def build_image(definition: str, options: Any, path: str, directory: str, directories: Any) -> None:
    """Build an image at a path from a definition file in a directory; the files that it names are there, too."""
    res = run_runtime("building an image from %s" % definition, ['build'] + options + [path, definition], directories,
                      work_dir=directory, hidden=False)
    if res.exit_code:
        raise runtime_error("Building the image from %s with %s" % (definition, res.cmd.split()[0]), res.output,
                            res.exit_code, [FULL])


def definition_of(image: str) -> str:
    """The definition inside an image, '' if there is none; EasyBuildError if the runtime cannot read it."""
    res = run_runtime("reading the definition inside the image", ['inspect', '--deffile', image], {},
                      split_stderr=True)
    if res.exit_code:
        raise EasyBuildError("the runtime cannot read the definition inside the image: %s", last_lines(res.stderr))
    return res.output.strip() and res.output
