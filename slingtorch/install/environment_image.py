# SPDX-License-Identifier: GPL-2.0-only
"""Packs a Python environment into one squashfs image, of which each node can have a copy (docs/runscripts.md)."""
import glob
import os
import re
import shutil
from typing import Any, List

from easybuild.tools.build_log import EasyBuildError, EasyBuildExit, print_msg
from easybuild.tools.filetools import (
    IGNORE, adjust_permissions, compute_checksum, mkdir, remove_dir, remove_file, which, write_file)
from slingtorch.install.dependencies import last_lines, run
from slingtorch.install.process import dynamic_entries

IMAGE = 'environment.squashfs'

# zstd level, 1 to 22: mksquashfs's default, 15, takes several times as long and saves a tenth of the size
LEVEL = '3'

# temporary directory in the installation, so that files can be hard links instead of copies
WORK_DIR = '.environment-image'

# parts of the interpreter's library that no job needs
LEFT_OUT = ['site-packages', 'dist-packages', 'test', 'idlelib', 'turtledemo', 'config-*', 'ensurepip']

# files and directories of the installation that are not part of the environment
NOT_PACKED = ['.runscripts', 'bin', 'easybuild', 'runscripts', IMAGE, IMAGE + '.sha256', WORK_DIR]

# where the system's libraries are: every node has them
SYSTEM_LIBRARIES = ('/lib/', '/lib64/', '/usr/lib/', '/usr/lib64/')

# in Python, because the system's Python may be a link that the command realpath would not resolve this way
DESCRIBE = ("import os, site, sys, sysconfig; print(*map(os.path.realpath, [sys.base_prefix, getattr(sys, "
            "'_base_executable', sys.executable), sysconfig.get_path('stdlib'), sysconfig.get_path('include')]), "
            "sep='\\n')")

# A script's first line cannot name an interpreter beside it. This text is valid in sh, which starts it, and in Python.
SCRIPT_START = """#!/bin/sh
'''exec' "$(dirname "$(readlink -f "$0")")/python" "$0" "$@"
' '''
"""


def require_mksquashfs() -> None:
    """Raise EasyBuildError if there is no mksquashfs."""
    if not which('mksquashfs', on_error=IGNORE):
        raise EasyBuildError("environment_image needs the command mksquashfs, but it is not in $PATH. Install the "
                             "package squashfs-tools (SUSE: squashfs) or load its module; to make no image: "
                             "--try-amend=environment_image=False", exit_code=EasyBuildExit.MISSING_DEPENDENCY)


def make_image(installdir: str, parallel: int, imports: Any) -> None:
    """Pack an environment with its interpreter into <installdir>/environment.squashfs; write its sha256 to a file.

    The Python in the image works in any directory: check that it can import these modules in another place.
    """
    image, tree = os.path.join(installdir, IMAGE), os.path.join(installdir, WORK_DIR)
    remove_dir(tree)
    remove_file(image)
    print_msg("packing the environment into one image...")
    make_tree(installdir, tree)
    relocate_run_paths(tree, installdir)
    run_tree_python(tree, 'import ' + ', '.join(['sys', *imports]))
    # all-root: the files belong to the user who unpacks them, and nobody can write to a mounted image
    cmd = ['mksquashfs', tree, image, '-comp', 'zstd', '-Xcompression-level', LEVEL, '-noappend', '-no-progress',
           '-no-xattrs', '-all-root', '-processors', str(parallel)]
    run_command(cmd, "mksquashfs failed. If the disk is full, free some space or choose another --installpath. If "
                     "mksquashfs does not know zstd, install squashfs-tools 4.4 or newer")
    remove_dir(tree)
    write_file(image + '.sha256', '%s  %s\n' % (compute_checksum(image, 'sha256'), IMAGE))


def run_command(cmd: Any, remedy: str) -> str:
    """Run a command (list); return its output, or raise EasyBuildError with the output and the remedy."""
    res = run(*cmd)
    if res.exit_code:
        raise EasyBuildError("Making an image of the environment failed: %s\n%s\n%s", remedy, ' '.join(cmd),
                             last_lines(res.output))
    return res.output


def link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, or copy it if that fails, as between file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def make_tree(installdir: str, tree: str) -> None:
    """Put interpreter and packages, with their bytecode, into one prefix."""
    python = os.path.join(installdir, 'bin', 'python')
    prefix, base_python, stdlib, include = run_command([python, '-I', '-c', DESCRIBE], "").splitlines()[:4]
    library = os.path.basename(stdlib)
    if prefix != os.path.realpath(installdir):
        # dangling links are ignored: a distribution's links to its configuration point out of the tree
        shutil.copytree(stdlib, os.path.join(tree, 'lib', library), ignore=shutil.ignore_patterns(*LEFT_OUT),
                        copy_function=link_or_copy, ignore_dangling_symlinks=True)
        if os.path.isdir(include):
            # Triton compiles against it at run time
            shutil.copytree(include, os.path.join(tree, 'include', os.path.basename(include)))
    mkdir(os.path.join(tree, 'bin'), parents=True)
    names = sorted(set(os.listdir(installdir)) - set(NOT_PACKED + ['pyvenv.cfg', 'lib64', 'include']))
    # hard links if the file system supports them; also into existing directories
    run_command(['sh', '-c', 'cp -al "$@" || cp -a "$@"', 'cp'] + [os.path.join(installdir, name) for name in names]
                + [tree], "If the disk is full, free some space or choose another --installpath")
    if not os.path.lexists(os.path.join(tree, 'lib64')):
        os.symlink('lib', os.path.join(tree, 'lib64'))

    shutil.copy2(base_python, os.path.join(tree, 'bin', library))
    for name in ['python', 'python3']:
        os.symlink(library, os.path.join(tree, 'bin', name))
    for path in glob.glob(os.path.join(installdir, 'bin', '*')):
        copy_script(path, os.path.join(tree, 'bin', os.path.basename(path)))
    copy_libraries(tree, library)
    packages = os.path.join(tree, 'lib', library, 'site-packages')
    found = run_tree_python(tree, 'import site; print(*site.getsitepackages(), sep="\\n")')
    if packages not in found:
        # outside of a virtual environment, Debian's Python uses another directory
        directory = next((path for path in found if path.startswith(os.path.join(tree, 'lib', library))), None)
        if not directory:
            raise EasyBuildError("The Python %s looks for packages only in %s, but the environment has none there",
                                 base_python, ', '.join(found))
        os.symlink('site-packages', directory)


def copy_script(source: str, target: str) -> None:
    """Copy a program of the environment; make a Python script use the interpreter in its own directory."""
    if os.path.lexists(target) or os.path.basename(source).startswith(('activate', 'Activate', 'python')):
        # nobody activates an image, and these files name the original directory of the environment
        return
    with open(source, 'rb') as stream:
        content = stream.read()
    content = re.sub(br"""^#!(/bin/sh\n'''exec' )?["']?/[^\n]*/python[0-9.]*["']?[^\n]*\n(' '''\n)?""",
                     SCRIPT_START.encode(), content, count=1)
    with open(target, 'wb') as stream:
        stream.write(content)
    shutil.copymode(source, target)


def copy_libraries(tree: str, library: str) -> None:
    """Copy the libraries that the interpreter and its modules are linked with, except those of the system."""
    base = os.path.join(tree, 'lib', 'base')
    paths = [os.path.join(tree, 'bin', library)] + glob.glob(os.path.join(tree, 'lib', library, 'lib-dynload', '*.so'))
    for name, path in sorted(set(re.findall(r'^\s+(\S+) => (/.*) \(0x', run('ldd', *paths).output, re.M))):
        if not path.startswith(SYSTEM_LIBRARIES + (tree,)):
            mkdir(base)
            shutil.copy2(path, os.path.join(base, name))
            adjust_permissions(os.path.join(base, name), 0o755, relative=False)
            paths.append(os.path.join(base, name))
    for path in paths:
        set_run_path(path, '$ORIGIN/' + os.path.relpath(base, os.path.dirname(path)))


def set_run_path(path: str, run_path: str) -> None:
    """Make a library or program search for others in this directory, instead of in its run path.

    The old path could override $LD_LIBRARY_PATH (DT_RPATH), and every rank would search it first for each library. The
    path is a string in the file (ELF specification, 'Dynamic Section'), and a shorter string fits in its place.
    """
    old = dynamic_entries(path, 'RPATH|RUNPATH')
    if not old or len(run_path) > len(old[0]):
        return
    with open(path, 'rb') as stream:
        content = stream.read()
    string = b'\0' + old[0].encode() + b'\0'
    # write a new file: the old one may be a hard link to the interpreter's own
    mode = os.stat(path).st_mode
    os.remove(path)
    with open(path, 'wb') as stream:
        stream.write(content.replace(string, (b'\0' + run_path.encode()).ljust(len(string), b'\0')))
    os.chmod(path, mode)


def relocate_run_paths(tree: str, installdir: str) -> None:
    """Make libraries that search for others in the installation search relative to their own directory."""
    for path in run('grep', '-rlaF', '--include=*.so*', installdir, tree).output.splitlines():
        for old in dynamic_entries(path, 'RPATH|RUNPATH'):
            new = [re.sub('^%s(?=/|$)' % re.escape(installdir), tree, part) for part in old.split(':')]
            new = ['$ORIGIN/' + os.path.relpath(part, os.path.dirname(path)) if part.startswith(tree) else part
                   for part in new]
            if ':'.join(new) != old:
                set_run_path(path, ':'.join(new))


def run_tree_python(tree: str, code: str) -> List[str]:
    """Run code in the tree's Python, which finds its libraries as in runscripts/lib/stage.bash; lines of its output."""
    base, own = os.path.join(tree, 'lib', 'base'), os.environ.get('LD_LIBRARY_PATH')
    path = ['env', 'LD_LIBRARY_PATH=' + (base + ':' + own if own else base)] if os.path.isdir(base) else []
    res = run(*path, os.path.join(tree, 'bin', 'python'), '-I', '-c', code)
    if res.exit_code:
        raise EasyBuildError("The Python of the environment does not run from another directory, so it cannot be "
                             "packed into an image:\n%s\n%s", res.cmd, res.output.strip())
    return res.output.splitlines()
