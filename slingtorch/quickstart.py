# SPDX-License-Identifier: GPL-2.0-only
"""From a checkout to a distributed training run: the program behind ./quickstart.

Everything it makes lies below one directory, the prefix. A prefix is new, empty, or carries the mark of an earlier run;
the mark lists what quickstart made there, and nothing else is touched. What an earlier run left is looked at, not
believed: interpreter, paths and versions are asked for, and "Done" is printed after a training that was checked.

It runs on any Python from 3.6 without packages, and looks for one that PyTorch has wheels for.
"""
import argparse
import ast
import configparser
import contextlib
import errno
import fcntl
import glob
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any, Collection, Dict, Iterable, List, Mapping, NoReturn, Optional, Tuple

BUNDLE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
# started as a file
sys.path.insert(0, BUNDLE)
from slingtorch import discard, gpus  # noqa: E402
from slingtorch.job.machine import Machine, read_mounts  # noqa: E402
from slingtorch.job.wire import why_no_loopback  # noqa: E402
COMMAND = shlex.quote(os.path.join(BUNDLE, 'quickstart'))
CPU = 'PyTorch-2.13.0-local-cpu.eb'
BASH = ['bash', '--noprofile', '--norc', '-c']
EXAMPLE = os.path.join(BUNDLE, 'examples', 'digits', 'train_digits.py')
# the versions that the lock file of the easyconfig covers, in the order in which they are looked for
PYTHON_COMMANDS = ('python3', 'python3.13', 'python3.12', 'python3.11', 'python3.14', '/usr/bin/python3')
PYTHON_VERSIONS = ('3.11', '3.12', '3.13', '3.14')
# what the example's batches of 48 images divide by
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
MPICH = 'mpich==5.0.2'
# seconds; training takes about ten
TRAINING_LIMIT = 600
# seconds in which a program must answer, also from a slow disk
ANSWER_LIMIT = 60
# MB that are downloaded, and MB of disk that a whole prefix takes while it is made: pip's cache, wheels, installation
SIZES = {'cpu': (255, 3000), 'cuda-12': (4000, 15500), 'cuda-13': (2900, 12000)}

MARK = '.slingtorch-quickstart.json'
# the files of TREES that quickstart made: {directory: names}
RECORD = '.slingtorch-quickstart.files'
# what quickstart makes in a prefix
ENTRIES = ('activate', 'cache', 'easybuild', 'easybuild.cfg', 'log', 'quickstart.json', 'tmp', 'venv')
# in these a user has files of his own as well: software that he installs with eb, what he puts into the environment
TREES = ('easybuild', 'venv')
# of what --remove keeps, so many paths are shown
SHOWN = 20

# Variables that would decide what is installed, where, or how ranks find each other, instead of quickstart.
# A shell inside a Slurm job counts: mpiexec would start its ranks with srun.
LEFT_OUT_LOUDLY = ('EASYBUILD_', 'SLINGTORCH_')
LEFT_OUT = LEFT_OUT_LOUDLY + (
    'PIP_', 'PYTHON', 'VIRTUAL_ENV', 'CONDA_', 'EBROOT', 'EBVERSION', 'EBDEVEL', 'EB_', 'LMOD_', '__LMOD', '__MOD',
    '_ModuleTable', '_LMFILES_', 'LOADEDMODULES', 'MODULE', 'SLURM_', 'PBS_', 'PALS_', 'PMI', 'OMPI_', 'HYDRA_',
    'MPI_LOCAL', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_', 'TORCH', 'GLOO_', 'BASH_ENV',
    'BASH_FUNC_', 'CDPATH',
)
# pip's options that say how the network is reached, and those that would change what is installed, or where
PIP_NETWORK_OPTIONS = ('index-url', 'extra-index-url', 'find-links', 'no-index', 'trusted-host', 'proxy', 'cert',
                       'client-cert', 'timeout', 'default-timeout', 'retries', 'keyring-provider')
PIP_PLACE_OPTIONS = ('target', 'prefix', 'root', 'user', 'require-virtualenv', 'python', 'no-deps', 'constraint', 'pre',
                     'no-binary', 'only-binary', 'ignore-installed', 'break-system-packages')

# package manager, its command, its names of packages where they differ
PACKAGE_MANAGERS: Tuple[Tuple[str, str, Dict[str, str]], ...] = (
    ('apt-get', 'apt-get update && apt-get install --yes --no-install-recommends', {}),
    ('dnf', 'dnf install --assumeyes', {'lmod': 'Lmod'}),
    ('zypper', 'zypper --non-interactive install', {'lmod': 'lua-lmod'}),
)

Env = Mapping[str, str]
Described = Dict[str, Any]      # what describe_python says of a Python
Tool = Tuple[str, str, str]     # EasyBuild's name of a modules tool, file that defines 'module', syntax of modules

# Asks an environment's interpreter what it is; without pip there is nothing that could install into it. The mark is
# for commands that print something themselves, as wrappers around a Python do.
PYTHON_SAYS = 'slingtorch-python:'
DESCRIBE_PYTHON = """
import importlib.util, json, os, sys
try:
    from importlib import metadata
    packages = {dist.metadata['Name'].lower().replace('_', '-'): dist.version for dist in metadata.distributions()}
except ImportError:  # before Python 3.8
    packages = {}
print('\\n@SAYS@' + json.dumps({
    'version': '%d.%d' % sys.version_info[:2], 'prefix': os.path.realpath(sys.prefix), 'packages': packages,
    'executable': sys.executable, 'venvs': all(map(importlib.util.find_spec, ('ensurepip', 'venv'))),
    'interpreter': os.path.realpath(getattr(sys, '_base_executable', sys.executable))}))
""".replace('@SAYS@', PYTHON_SAYS)


ANOTHER = "choose a directory of your own with --prefix DIR"


class QuickstartError(Exception):
    """What a person has to decide or fix; the first argument says what is wrong, the others how to fix it."""


def last_lines(text: str, count: int = 6) -> str:
    """The end of what a command printed, short enough for a screen."""
    return '\n'.join(line[:300] for line in text.strip().splitlines()[-count:])


def read_text(path: str) -> str:
    """Content of a file; OSError for what is none, as a named pipe, from which reading could wait for ever."""
    if not os.path.isfile(path) and os.path.exists(path):
        raise OSError(errno.EINVAL, "this is no file", path)
    with open(path, errors='replace') as handle:
        return handle.read()


def write_text(path: str, text: str, mode: int = 0o666) -> None:
    """Write a file: whole, or not at all."""
    with open(path + '.new', 'w', opener=lambda name, flags: os.open(name, flags, mode)) as handle:
        handle.write(text)
    os.replace(path + '.new', path)


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode(errors='replace')).hexdigest()


# --- arguments

def parse_arguments(argv: List[str]) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        prog='./quickstart', allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent("""
            Installs PyTorch with EasyBuild and trains a small network with it on several ranks of this machine.
            Everything goes to one directory; only packages of the distribution go elsewhere, and are named first."""),
        epilog="Run it again at any time: what is there and still right is used again.")
    parser.add_argument('--prefix', metavar='DIR', default=os.path.join(BUNDLE, '.slingtorch'),
                        help="directory: new, empty or an earlier quickstart's (default: .slingtorch in this checkout)")
    parser.add_argument('--cpu', action='store_true',
                        help="the small PyTorch for processors, also on a machine with GPUs")
    parser.add_argument('--ranks', metavar='N', type=int, choices=RANKS,
                        help="ranks to train on: %s (default: one for each GPU, without GPUs 2); the example divides "
                             "batches of 48 images evenly" % ', '.join(map(str, RANKS)))
    parser.add_argument('--python', metavar='COMMAND',
                        help="Python to use, %s (default: the first that is found)" % ', '.join(PYTHON_VERSIONS))
    parser.add_argument('--remove', action='store_true',
                        help="remove what quickstart has made in the prefix; what is yours there stays, and is named")
    parser.add_argument('--all', action='store_true',
                        help="with --remove: the whole prefix, with what is yours in it; asks first")
    args = parser.parse_args(argv)
    if args.all and not args.remove:
        parser.error("--all is for --remove")
    return args


def check_path(path: str) -> str:
    """The real path of a prefix, if EasyBuild and the shell can take it: the one divides lists of paths at some
    characters and expands others, and the kernel divides the first line of a script at blanks."""
    if path.startswith('~'):
        raise QuickstartError("--prefix %s: the shell has not replaced the ~" % path, 'write --prefix "$HOME/..."')
    real = os.path.realpath(path)
    bad = sorted(set(re.sub(r'[\w./+@-]', '', real)))
    if not path or bad:
        raise QuickstartError("'%s' cannot be a prefix: EasyBuild installations work in paths of letters, digits and "
                              ". _ + @ - only%s" % (real if path else path, bad and ", and this one has: %s"
                                                    % ' '.join(map(repr, bad)) or ''),
                              ANOTHER)
    return real


# --- the prefix

class Prefix:
    """The directory for everything (path), with a mark that says what quickstart has made in it.

    The mark has the path at which it was made (prefix), the names that quickstart made (entries), and what is known of
    the tools (requirements, packages).
    """

    def __init__(self, path: str) -> None:
        """Look at the directory; nothing is written. A QuickstartError if it is somebody else's."""
        self.path = check_path(path)
        self.mark: Dict[str, Any] = {'made by': 'slingtorch quickstart', 'prefix': self.path, 'entries': []}
        self.easyconfig = CPU
        self.lock = -1  # file descriptor, once it is claimed
        if self.path == os.path.realpath(os.path.expanduser('~')):
            raise QuickstartError("%s is your home directory, and would be full of what quickstart makes" % self.path,
                                  "choose a directory below it with --prefix DIR; nothing was changed")
        try:
            # a mark that was being written is no mark yet, and what was set aside is in nobody's way
            aside = re.compile(r'%s\.new$|(%s)\.old-\d+$' % (re.escape(MARK), '|'.join(map(re.escape, ENTRIES))))
            names = [name for name in os.listdir(self.path) if not aside.match(name)]
        except FileNotFoundError:
            return
        except OSError as err:
            raise QuickstartError("%s cannot be the prefix: %s" % (self.path, err.strerror), ANOTHER)
        if MARK in names:
            self.read_mark(names)
        elif names:
            raise QuickstartError(
                "%s was not made by quickstart, and it is not empty: it has %s" % (
                    self.path, ', '.join(sorted(names)[:4]) + (', ...' if len(names) > 4 else '')),
                "choose a new or an empty directory with --prefix DIR; nothing was changed")

    def file(self, *names: str) -> str:
        """Path of something in the prefix."""
        return os.path.join(self.path, *names)

    @property
    def module(self) -> str:
        """Name of PyTorch's module."""
        return self.easyconfig[:-len('.eb')].replace('-', '/', 1)

    @property
    def software(self) -> str:
        """Directory of PyTorch's installation."""
        return self.file('easybuild', 'software', self.module)

    @property
    def is_cpu(self) -> bool:
        """Whether PyTorch is the one for processors."""
        return self.easyconfig == CPU

    @property
    def sizes(self) -> Tuple[int, int]:
        """MB to download, MB of disk."""
        return next(sizes for kind, sizes in SIZES.items() if '-%s' % kind in self.easyconfig)

    def read_mark(self, names: Iterable[str]) -> None:
        """Read the mark of an earlier run, and check that what is here is that run's."""
        try:
            mark = json.loads(read_text(self.file(MARK)))
            entries = [name for name in mark['entries'] if name in ENTRIES]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:
            why = err.strerror if isinstance(err, OSError) else "it is empty, damaged, or not of quickstart"
            raise QuickstartError("the mark of an earlier run, %s, cannot be read: %s" % (self.file(MARK), why),
                                  ANOTHER + ", or remove this one by hand")
        owner = os.stat(self.file(MARK)).st_uid
        if owner != os.geteuid():
            raise QuickstartError("%s was made by another user (number %d)" % (self.path, owner), ANOTHER)
        foreign = [name for name in names if name in ENTRIES and name not in entries]
        if foreign:
            raise QuickstartError("%s was not made by quickstart, and is in its way" % self.file(foreign[0]),
                                  "move it somewhere else, or choose another directory with --prefix DIR")
        self.mark.update(mark, entries=entries)

    def claim(self) -> None:
        """Make the directory and its mark, and lock it until this process and what it started have ended."""
        try:
            os.makedirs(self.path, exist_ok=True)
            if not os.path.exists(self.file(MARK)):
                self.write_mark()
            self.lock = os.open(self.file('.lock'), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise QuickstartError("cannot write to %s: %s" % (self.path, err.strerror), ANOTHER)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(self.lock, 20).decode(errors='replace')
            raise QuickstartError("another quickstart is running with the prefix %s, or what it started" % self.path,
                                  "wait until it has ended, or use another --prefix",
                                  "it was started as process %s; 'fuser %s' lists what is left of it"
                                  % (owner or '?', self.file('.lock')))
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, str(os.getpid()).encode(), 0)
        self.check_access()
        for name in ('tmp', 'cache', 'log'):
            self.make(name)
        self.check_noexec()

    def write_mark(self) -> None:
        write_text(self.file(MARK), json.dumps(self.mark, indent=1, sort_keys=True) + '\n')

    def register(self, name: str) -> str:
        """Say in the mark that something is quickstart's, before it is made."""
        if name not in self.mark['entries']:
            self.mark['entries'].append(name)
            self.write_mark()
        return self.file(name)

    def make(self, name: str) -> None:
        os.makedirs(self.register(name), exist_ok=True)

    def write(self, name: str, text: str) -> None:
        """Write a file in the prefix; one that the user has changed is kept beside it."""
        path, written = self.register(name), self.mark.setdefault('written', {})
        before = read_text(path) if os.path.exists(path) else None
        if before is not None and before != text and written.get(name) not in (None, checksum(before)):
            self.set_aside(name, "you have changed it")
        if before != text:
            write_text(path, text)
        written[name] = checksum(text)
        self.write_mark()

    def set_aside(self, name: str, why: str) -> str:
        """Rename what cannot be used any more, since it may hold files of the user; return the new path."""
        names = (self.file('%s.old-%d' % (name, number)) for number in itertools.count(1))
        old = next(path for path in names if not os.path.lexists(path))
        shutil.move(self.file(name), old)
        print("%s is made anew: %s\n  what was there is kept as %s; remove it at will" % (self.file(name), why, old))
        return old

    def check_access(self) -> None:
        """Directories of an earlier run that may not be used now: eb would end in a traceback."""
        for name in ('tmp', 'cache', 'log', 'venv', 'easybuild', 'easybuild/build', 'easybuild/modules',
                     'easybuild/modules/all', 'easybuild/modules/all/PyTorch', 'easybuild/software',
                     'easybuild/software/PyTorch', 'easybuild/software/' + self.module):
            path = self.file(name)
            if os.path.isdir(path) and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                raise QuickstartError("you may not use the directory %s, which is quickstart's" % path,
                                      "allow it again: chmod u+rwx %s" % path)

    def check_noexec(self) -> None:
        """Programs are installed here: a file system mounted noexec is an error."""
        if os.statvfs(self.path).f_flag & os.ST_NOEXEC:
            raise QuickstartError("programs cannot run in %s: its file system is mounted noexec" % self.path, ANOTHER)

    def check_disk(self) -> None:
        """Space for a whole installation; what an earlier run has downloaded for it is there already."""
        free, needed = shutil.disk_usage(self.path).free // 10**6, self.sizes[1]
        needed -= min(size_of(self.file('cache')) + size_of(self.file('easybuild', 'sources')), self.sizes[0])
        if free < needed:
            raise QuickstartError("only %d MB are free in %s, and %d MB are needed for %s" % (
                free, self.path, needed, self.easyconfig), "free some space, or choose another place with --prefix DIR"
                + ('' if self.is_cpu else "; --cpu needs %d MB" % SIZES['cpu'][1]))

    def recover_from_move(self) -> None:
        """Environments and modules hold their own path: after a move they are made anew. Downloads stay good."""
        if self.mark['prefix'] == self.path:
            return
        for name in TREES:
            if os.path.lexists(self.file(name)):
                old = self.set_aside(name, "it was made in %s" % self.mark['prefix'])
                if os.path.isdir(os.path.join(old, 'sources')):
                    self.make(name)
                    os.rename(os.path.join(old, 'sources'), self.file(name, 'sources'))
        self.mark['prefix'] = self.path
        self.write_mark()

    # --- what is quickstart's, and what is the user's

    def recorded(self) -> Dict[str, Any]:
        """The record: {directory, from the prefix: set of names}; empty if there is none, or it is damaged."""
        try:
            return {here: set(names) for here, names in json.loads(read_text(self.file(RECORD))).items()}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            return {}

    def record(self, since: int) -> None:
        """Remember which files quickstart has made in TREES: of the record, and what has changed its status `since`,
        st_ctime_ns of a file in the prefix, since the file system may have a clock of its own."""
        before, made = self.recorded(), {}
        for tree in TREES:
            for directory, dirs, files in os.walk(self.file(tree)):
                here = os.path.relpath(directory, self.path)
                names = {name for name in dirs + files
                         if name in before.get(here, ()) or changed(os.path.join(directory, name), since)}
                if names:
                    made[here] = names
        if made != before:
            write_text(self.file(RECORD), json.dumps({here: sorted(names) for here, names in made.items()}))

    def foreign(self) -> List[str]:
        """Paths, from the prefix, of what quickstart has not made, or the user has changed; of a directory its own."""
        made, written = self.recorded(), self.mark.get('written', {})
        paths: List[str] = []
        for name in sorted(set(os.listdir(self.path)) - {MARK, RECORD, '.lock'}):
            path = self.file(name)
            if (name not in self.mark['entries'] or os.path.islink(path)
                    or name in written and os.path.isfile(path) and checksum(read_text(path)) != written[name]):
                paths.append(name)
            # in the environment of an interrupted run nobody has worked
            elif name in TREES and not (name == 'venv' and self.mark.get('unfinished')):
                for directory, dirs, files in os.walk(path):
                    here = os.path.relpath(directory, self.path)
                    mine = {entry for entry in dirs + files if not is_made(made, here, entry)}
                    paths.extend(os.path.join(here, entry) for entry in sorted(mine))
                    dirs[:] = [entry for entry in dirs if entry not in mine]
        return paths

    def check_mounts(self, names: Iterable[str]) -> None:
        """A file system that is mounted below one of these is nobody's to remove."""
        tops = tuple(self.file(name).rstrip('/') + '/' for name in names)
        for path, _, _ in read_mounts(Machine().read('proc/self/mounts')):
            if (path + '/').startswith(tops):
                raise QuickstartError("a file system is mounted at %s, and what is on it may be yours" % path,
                                      "unmount it, then run the same command again; nothing was removed")

    def remove(self) -> None:
        """Remove what quickstart made and name the rest; then the directory, if nothing else is in it."""
        self.check_mounts(self.mark['entries'])
        kept = self.foreign()
        for name in self.mark['entries'] + ['.lock', RECORD, MARK]:
            remove_but(self.path, name, frozenset(kept))
        if not kept:
            os.rmdir(self.path)
            print("removed %s" % self.path)
            return
        # the mark stays: the same directory may be used again
        self.mark['entries'] = [name for name in self.mark['entries'] if os.path.lexists(self.file(name))]
        self.mark.pop('unfinished', None)
        self.write_mark()
        print("removed what quickstart made in %s; not made by it, or changed by you, and left there:" % self.path)
        print_paths(kept)
        print("To remove these as well: %s --remove --all --prefix %s" % (COMMAND, self.path))

    def remove_all(self) -> None:
        """Remove the whole prefix, after a question."""
        self.check_mounts([''])
        kept = self.foreign()
        print("In %s, not made by quickstart, or changed by you:%s" % (self.path, '' if kept else " nothing"))
        print_paths(kept)
        if not sys.stdin or not sys.stdin.isatty():
            raise QuickstartError("--remove --all asks first, and there is no terminal: nothing was removed",
                                  "run it in a terminal; or, if you need none of the above: rm -r %s" % self.path)
        print("Remove all of %s? [y/N] " % self.path, end='', flush=True)
        if sys.stdin.readline().strip().lower() not in ('y', 'yes'):
            raise QuickstartError("nothing was removed")
        shutil.rmtree(self.path)
        print("removed %s" % self.path)


def size_of(top: str) -> int:
    """MB of the files below a directory."""
    return sum(os.lstat(os.path.join(directory, name)).st_size
               for directory, _, names in os.walk(top) for name in names) // 10**6


def changed(path: str, since: int) -> bool:
    """Whether a file's status (st_ctime_ns) is of this time, or later; what a process left behind removes is not."""
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_ctime_ns >= since
    return False


def is_made(made: Mapping[str, Collection[str]], here: str, name: str) -> bool:
    """Whether something in a directory (its path from the prefix) is quickstart's, by the record."""
    if name in made.get(here, ()):
        return True
    # Python writes byte code when it imports a file, also in the user's own runs
    above, directory = os.path.split(here)
    return (name == '__pycache__' and here in made
            or directory == '__pycache__' and name.split('.')[0] + '.py' in made.get(above, ()))


def remove_but(top: str, name: str, kept: Collection[str]) -> None:
    """Remove something below a directory but what is kept (paths from there), and directories that are empty then."""
    path = os.path.join(top, name)
    if name in kept or not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    for entry in os.listdir(path):
        remove_but(top, os.path.join(name, entry), kept)
    if not os.listdir(path):
        os.rmdir(path)


def print_paths(paths: List[str]) -> None:
    """Show paths, and of many only the first."""
    for path in paths[:SHOWN]:
        print('  ' + path)
    if paths[SHOWN:]:
        print("  and %d more" % len(paths[SHOWN:]))


# --- the user's shell and configuration

def clean_environment(environ: Env) -> Dict[str, str]:
    """The environment without what would decide instead of quickstart."""
    return {name: value for name, value in environ.items() if not name.startswith(LEFT_OUT)}


def report_left_out(environ: Env) -> None:
    """Say once which settings of the user have no say here."""
    names = sorted('$' + name for name in environ if name.startswith(LEFT_OUT_LOUDLY))
    # EasyBuild's configuration files of this user and machine: XDG_CONFIG_DIRS in easybuild/tools/options.py
    for directory in (environ.get('XDG_CONFIG_DIRS') or '/etc/xdg').split(':') + ['/etc']:
        names += sorted(glob.glob(os.path.join(glob.escape(directory), 'easybuild.d', '*.cfg')))
    home = environ.get('XDG_CONFIG_HOME') or os.path.expanduser('~/.config')
    names += glob.glob(os.path.join(glob.escape(home), 'easybuild', 'config.cfg'))
    if names:
        print("not used, quickstart has a configuration of its own: " + ', '.join(names))


def pip_environment(python: str, environ: Env) -> Dict[str, str]:
    """pip's settings for the network as PIP_* variables, and nothing else of the user's pip configuration.

    A 'target' or 'user' in a pip.conf would send packages elsewhere; index, proxy and certificates must be kept.
    """
    # a 'user = true' would make 'pip config list' show the user's file alone
    status, said, errors = ask([python, '-sE', '-m', 'pip', 'config', 'list'], dict(environ, PIP_USER='0'))
    if status != 0:
        raise QuickstartError("pip cannot read its configuration: " + last_lines(errors, 2), "correct that file")
    settings, left_out = {'PIP_CONFIG_FILE': os.devnull}, set()
    # what pip would take for 'pip install' comes last
    for where in ('global', 'download', 'install', ':env:'):
        for option, value in re.findall(r"^%s\.\.?([^=\n]+)=(.*)$" % where, said, re.M):
            if option in PIP_NETWORK_OPTIONS:
                settings['PIP_' + option.upper().replace('-', '_')] = ' '.join(ast.literal_eval(value).split())
            elif option in PIP_PLACE_OPTIONS and (where, option) != (':env:', 'user'):
                left_out.add(option)
    if left_out:
        print("not used of pip's configuration: " + ', '.join(sorted(left_out)))
    return settings


# --- running commands

def run(command: List[str], env: Env, lock: Optional[int] = None, log: Optional[str] = None, cwd: Optional[str] = None,
        limit: Optional[float] = None) -> int:
    """Run a command to its end, or for `limit` seconds (subprocess.TimeoutExpired); return its exit status.

    It gets a process group of its own, so that an interrupt ends it and all that it has started, in that order. The
    prefix's lock is held as long as anything of it runs. What it prints goes to the log, else to the screen.
    """
    # an interrupt is held until the process is known: inside Popen it would leave behind what was just started
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    process: 'Optional[subprocess.Popen[bytes]]' = None
    try:
        with open(log or os.devnull, 'w') as output:
            process = subprocess.Popen(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL,
                                       stdout=output if log else None, stderr=subprocess.STDOUT if log else None,
                                       start_new_session=True, pass_fds=[lock] if lock is not None else [],
                                       preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, held))
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return process.wait(timeout=limit)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        # politely, then for good
        if process:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(timeout=20)
        raise


def ask(command: List[str], env: Optional[Env] = None, limit: Optional[float] = None) -> Tuple[Optional[int], str, str]:
    """Status, output and errors of a command; the status is None if it does not start, or not end in time."""
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, encoding='utf-8', errors='replace', timeout=limit or ANSWER_LIMIT)
        return done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        return None, '', "it does not answer"
    except OSError as err:
        return None, '', str(err)


# --- packages of the distribution

def describe_python(python: str) -> Any:
    """What an interpreter says of itself (version, prefix, interpreter, packages); None if it does not run."""
    said = run_python(python, DESCRIBE_PYTHON)[1].rpartition(PYTHON_SAYS)[2]
    try:
        return dict(json.loads(said.partition('\n')[0]), path=os.path.abspath(python))
    except ValueError:
        return None


def run_python(python: str, code: str) -> Tuple[Optional[int], str, str]:
    """Run code in an interpreter as every shell will find it: without the LD_LIBRARY_PATH of this one."""
    env = {name: value for name, value in os.environ.items() if name != 'LD_LIBRARY_PATH'}
    return ask([python, '-sE', '-c', code], env)


def find_python(wanted: Optional[str], path: Optional[str] = None) -> Optional[Described]:
    """A Python that PyTorch has wheels for: that of --python, else the first; None if there is no Python at all."""
    seen = []
    for command in PYTHON_COMMANDS if wanted is None else [wanted]:
        found = describe_python(shutil.which(command, path=path) or '')
        if found and found.get('executable', found['path']) != found['path']:
            # a shim of pyenv, which is another Python in another directory, or a wrapper: what it starts is used
            found = describe_python(found['executable']) or dict(
                found, version="one that does not run by itself, %s" % found['executable'])
        if found and found['version'] in PYTHON_VERSIONS:
            return found
        if found:
            seen.append("%s is %s" % (command, found['version']))
    if seen:
        raise QuickstartError("PyTorch is installed for Python %s, and %s"
                              % (', '.join(PYTHON_VERSIONS), ', '.join(seen)),
                              "install one of these versions, or name one with --python /path/to/python3.12")
    if wanted is not None:
        python = shutil.which(wanted, path=path)
        _, said, errors = run_python(python, '') if python else (None, '', "there is no such command")
        # all of it: what pyenv's shims say ends in a hint on Python 2
        raise QuickstartError("--python '%s': %s" % (wanted, last_lines(errors or said, 12) or "that is no Python"),
                              "name one that starts in every shell (without LD_LIBRARY_PATH), or leave --python out")
    return None


def find_modules_tool(environ: Env, root: str = '/') -> Optional[Tool]:
    """Lmod, else Environment Modules, else None. For tests `root` stands for /."""
    share = os.path.join(root, 'usr/share')
    lmod = [environ.get('LMOD_PKG'), os.path.dirname(os.path.dirname(environ.get('LMOD_CMD') or '')),
            share + '/lmod/lmod', *sorted(glob.glob(share + '/lmod/*')), os.path.join(root, 'opt/apps/lmod/lmod')]
    modules = [environ.get('MODULESHOME'), share + '/modules', share + '/Modules']
    for tool, homes, file, syntax in (('Lmod', lmod, 'libexec/lmod', 'Lua'),
                                      ('EnvironmentModules', modules, 'init/bash', 'Tcl')):
        for home in filter(None, homes):
            if os.access(os.path.join(home, file), os.R_OK):
                return tool, os.path.join(home, 'init/bash'), syntax
    return None


def install_packages(packages: List[str], log: str) -> None:
    """Install packages of the distribution, as root or through sudo; else a QuickstartError names the command."""
    missing = "packages of the distribution are missing: " + ', '.join(packages)
    manager = next((manager for manager in PACKAGE_MANAGERS if shutil.which(manager[0])), None)
    if not manager:
        raise QuickstartError(missing, "no package manager is known here (apt-get, dnf, zypper): install them yourself")
    command = ' '.join([manager[1]] + [manager[2].get(package, package) for package in packages])
    as_root = ['env', 'DEBIAN_FRONTEND=noninteractive', 'sh', '-c', command]
    if os.geteuid() != 0:
        as_root = ['sudo', '-n'] + as_root
        if ask(['sudo', '-n', 'true'])[0] != 0:
            raise QuickstartError(missing, "ask an administrator of this machine for:",
                                  "    sudo sh -c '%s'" % command)
    print("Packages of the distribution that are missing, installed now: " + ' '.join(packages))
    if run(as_root, env=dict(os.environ), log=log):
        raise QuickstartError("'%s' failed:" % command, last_lines(read_text(log)), "all of it: " + log)


def set_up_packages(wanted_python: Optional[str], venv_python: Optional[Described], log: str) -> Tuple[Described, Tool]:
    """Find Python (of --python, else of the present environment) and a modules tool; install what is missing."""
    if not wanted_python and venv_python:
        # a second Python on the machine is no reason to make everything anew
        wanted_python = venv_python['interpreter']
    python, tool = find_python(wanted_python), find_modules_tool(os.environ)
    missing = [] if tool else ['lmod']
    if not python:
        missing += ['python3', 'python3-venv']
    elif not python['venvs']:
        # Debian and Ubuntu keep this part of Python in a package of its own
        missing += ['python%s-venv' % python['version']]
    if missing:
        install_packages(missing, log)
        python, tool = find_python(wanted_python), find_modules_tool(os.environ)
    if not tool:
        raise QuickstartError("no modules tool was found, although the package lmod is installed",
                              "set LMOD_PKG to the directory that has libexec/lmod in it")
    status, said, errors = ask(BASH + ['. "$1" && module --version', 'bash', tool[1]], clean_environment(os.environ))
    if status != 0 or not (said + errors).strip():
        raise QuickstartError("the modules tool %s does not work:" % tool[1],
                              last_lines(said + errors) or "'module --version' prints nothing",
                              "repair or remove it; quickstart installs one where none is")
    if not python or not python['venvs']:
        raise QuickstartError("%s makes no virtual environments: its module ensurepip is missing"
                              % (python['path'] if python else 'Python'),
                              "install the package that has it, or name another Python with --python")
    print("modules tool: %s (%s)" % tool[:2])
    print("Python:       %(path)s (%(version)s)" % python)
    return python, tool


# --- EasyBuild, the bundle, an MPI launcher

def requirements() -> List[str]:
    """Requirements of the bundle, of which only these are installed: it stays where it is; and an MPI launcher."""
    config = configparser.ConfigParser()
    with open(os.path.join(BUNDLE, 'setup.cfg')) as handle:
        config.read_file(handle)
    return [line for line in config['options']['install_requires'].splitlines() if line.strip()] + [MPICH]


def why_not_usable(found: Any, python: Described, venv: str) -> Optional[str]:
    """Why an environment cannot be used or completed with this Python; None if it can. venv is its real path."""
    if not found:
        return "its Python does not run"
    if (found['interpreter'], found['version']) != (python['interpreter'], python['version']):
        return "it is of Python %s (%s)" % (found['version'], found['interpreter'])
    if found['prefix'] != venv:
        return "it believes to be %s" % found['prefix']
    if 'pip' not in found['packages']:
        return "it has no pip"
    return None


def set_up_tools(prefix: Prefix, python: Described, env: Env) -> None:
    """Make the environment with EasyBuild and MPICH's launcher, or complete the one that is there."""
    venv = prefix.file('venv')
    venv_python = os.path.join(venv, 'bin', 'python')
    mark, wanted, found = prefix.mark, requirements(), describe_python(venv_python)
    why = why_not_usable(found, python, venv)
    complete = (not why and mark.get('requirements') == wanted
                and mark.get('packages', {}).items() <= found['packages'].items())
    if complete:
        # its packages are registered, and files of them may be gone
        mpiexec = [os.path.join(venv, 'bin', 'mpiexec'), '-n', '1', 'echo', 'starts']
        if run_python(venv_python, 'import easybuild.main')[0] != 0:
            why = "its EasyBuild does not start"
        elif ask(mpiexec, clean_environment(os.environ))[1] != 'starts\n':
            why = "its mpiexec does not start"
    if why:
        if os.path.lexists(venv):
            # in what an interrupted run has left nobody has worked
            shutil.rmtree(venv) if mark.get('unfinished') else prefix.set_aside('venv', why)
        mark['unfinished'] = True
        prefix.register('venv')
        prefix.write_mark()
        log = prefix.file('log', 'venv.log')
        if run([python['path'], '-m', 'venv', venv], env, prefix.lock, log):
            raise QuickstartError("%s -m venv failed:" % python['path'], last_lines(read_text(log)))
    if why or not complete:
        pip_install(prefix, venv_python, wanted, env)
        found = describe_python(venv_python)
        names = [re.split(r'[^\w.-]', requirement)[0].lower() for requirement in wanted]
        mark.update(requirements=wanted, packages={name: found['packages'].get(name) for name in names})
        mark.pop('unfinished', None)
        prefix.write_mark()
    # the checkout's own package and command: it may have moved since
    site_packages = os.path.join(venv, 'lib', 'python' + found['version'], 'site-packages')
    write_text(os.path.join(site_packages, 'slingtorch-checkout.pth'), BUNDLE + '\n')
    command = os.path.join(venv, 'bin', 'slingtorch')
    write_text(command, '#!/bin/sh\nexec %s -m slingtorch "$@"\n' % venv_python, 0o755)
    version = subprocess.check_output([command, '--version'], env=env, universal_newlines=True).strip()
    print("%s, EasyBuild %s, MPICH %s" % (version, *map(found["packages"].get, ("easybuild-framework", "mpich"))))


def pip_install(prefix: Prefix, python: str, wanted: List[str], env: Env) -> None:
    """Install packages with pip; its words go to a log, and to the screen only what matters of an error."""
    print("installing with pip: " + ' '.join(wanted), flush=True)
    network = pip_environment(python, os.environ)
    env = dict(env, **network)
    log, screen = prefix.file('log', 'pip.log'), prefix.file('log', 'pip.screen')
    pip = [python, '-m', 'pip', 'install', '--disable-pip-version-check', '--no-input', '--progress-bar', 'off',
           '--log', log]
    # EasyBuild comes as source: with these there, pip needs no environment of its own for each package
    steps = [pip + ['setuptools', 'wheel'], pip + ['--no-build-isolation', '--no-compile'] + wanted]
    # pip retries for each package when one of several indexes is out of reach: a quick look first
    for patience in (['--retries', '0', '--timeout', '15'], ['--retries', '2', '--timeout', '15']):
        write_text(log, '')
        if not any(run(step + patience, env, prefix.lock, screen) for step in steps):
            lib = os.path.join(os.path.dirname(os.path.dirname(python)), 'lib')
            run([python, '-m', 'compileall', '-q', '-j', '0', lib], env, prefix.lock, screen)
            return
        # only the log says which address did not answer
        address = re.search(r'Could not fetch URL (\S+): (?:connection|[Tt]imeout|.*(?:ssl|SSL))', read_text(log))
        if not address:
            break
    if address:
        raise QuickstartError("pip could not reach %s" % address.group(1),
                              "tell pip the way: PIP_INDEX_URL, or index-url in pip.conf, for a mirror; PIP_PROXY",
                              "all that pip said: " + log)
    errors = [line for line in read_text(screen).splitlines() if line.startswith('ERROR') or 'not a trusted' in line]
    settings = sorted('%s=%s' % item for item in network.items() if item[0] not in
                      ('PIP_CONFIG_FILE', 'PIP_DEFAULT_TIMEOUT', 'PIP_CERT'))
    raise QuickstartError("pip could not install EasyBuild:", last_lines('\n'.join(errors) or read_text(screen), 4),
                          "settings that pip took from your configuration: %s" % (', '.join(settings) or "none"),
                          "all that pip said: " + log)


ACTIVATE = """\
# Source this file in bash to use the slingtorch installation in {prefix}.
# the next line is for csh and tcsh, which stop there; in other shells "$?tcsh" is a status and four letters
test "$?tcsh" = 1 && echo "activate: this file is for bash. Type 'bash', then do the same in that shell" && exit 1
if [ -z "${{BASH_VERSION-}}" ]; then
    echo "activate: source this file in bash" >&2
    return 1
fi
for path in {bundle}/slingtorch/cli.py {init} {prefix}/venv/bin/python {prefix}/easybuild/modules/all; do
    if ! [ -r "$path" ]; then
        echo "activate: $path is gone, or you may not read it. Where the checkout is now, run: ./quickstart --prefix" \
            "$(printf %q "$(dirname -- "$(readlink -f -- "${{BASH_SOURCE[0]}}")")")" >&2
        unset path
        return 1
    fi
done
unset path
# the configuration here alone: neither the shell's EASYBUILD_* variables nor configuration files elsewhere
unset ${{!EASYBUILD_@}} ${{!SLINGTORCH_@}}
export EASYBUILD_CONFIGFILES={prefix}/easybuild.cfg
export EASYBUILD_IGNORECONFIGFILES=$(
    IFS=: dirs=${{XDG_CONFIG_DIRS:-/etc/xdg}}:/etc
    files=("${{XDG_CONFIG_HOME:-${{HOME-}}/.config}}/easybuild/config.cfg")
    for dir in $dirs; do files+=("$dir"/easybuild.d/*.cfg); done
    IFS=,
    echo "${{files[*]}}"
)
case :$PATH: in *:{prefix}/venv/bin:*) ;; *) export PATH={prefix}/venv/bin:$PATH ;; esac
. {init}
path=$({prefix}/venv/bin/slingtorch env --quiet) && eval "$path" || {{ unset path; return 1; }}
unset path
module use {prefix}/easybuild/modules/all
if [ -z "$(module --version 2>&1)" ]; then
    echo "activate: the modules tool {tool} does not work: 'module --version' prints nothing" >&2
    return 1
fi
compgen -G '{prefix}/easybuild/modules/all/{module}*' >/dev/null || [ -n "${{QUICKSTART_RUNS-}}" ] ||
    echo "activate: {module} is not installed here; quickstart installs it: {quickstart}" >&2
"""


def write_configuration(prefix: Prefix, tool: Tool) -> None:
    """Write EasyBuild's configuration, and the file 'activate' that makes a shell use it."""
    os.makedirs(os.path.join(prefix.register('easybuild'), 'modules', 'all'), exist_ok=True)
    options = [('prefix', prefix.file('easybuild')), ('tmpdir', prefix.file('tmp')), ('modules-tool', tool[0]),
               ('module-syntax', tool[2])]
    if os.geteuid() == 0:
        options.append(('allow-use-as-root-and-accept-consequences', '1'))
    prefix.write('easybuild.cfg', '[config]\n' + ''.join('%s = %s\n' % option for option in options))
    prefix.write('activate', ACTIVATE.format(
        prefix=prefix.path, bundle=shlex.quote(BUNDLE), init=shlex.quote(tool[1]), tool=tool[1], module=prefix.module,
        quickstart=re.sub(r'(["$`\\])', r'\\\1', "%s --prefix %s" % (COMMAND, prefix.path))))


def activated(prefix: Prefix, env: Env) -> Dict[str, str]:
    """The environment of a shell that has sourced 'activate'."""
    command = BASH + ['. "$1" >&2 && env -0', 'bash', prefix.file('activate')]
    done = subprocess.run(command, env=dict(env, QUICKSTART_RUNS='1'), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE)
    if done.returncode:
        raise QuickstartError("the bundle could not be activated; the message above says why")
    entries = done.stdout.decode(errors='surrogateescape').split('\0')
    return dict(entry.split('=', 1) for entry in entries if '=' in entry and not entry.startswith('BASH_FUNC_'))


# --- PyTorch

def choose(prefix: Prefix, cpu: bool, root: str = '/') -> None:
    """Decide which PyTorch is installed, and say which and why, and what it takes. For tests `root` stands for /."""
    name, why = (None, "--cpu was given") if cpu else gpus.fitting_easyconfig(root)
    if name and '-cuda-' not in name:
        name, why = None, "%s; for these GPUs, by README.md: eb %s" % (why, name)
    # as in a container that was given no GPU: the driver's files are those of the machine around it
    if name and not os.path.exists(os.path.join(root, 'dev/nvidiactl')):
        name, why = None, why + ", but there is no /dev/nvidiactl"
    prefix.easyconfig = name or CPU
    print("PyTorch:      %s (%s%s)" % (prefix.easyconfig, "for processors: " if prefix.is_cpu else '', why))


def say_sizes(prefix: Prefix) -> None:
    """What is about to be downloaded, and the disk that it takes; a QuickstartError if there is too little."""
    download, disk = prefix.sizes
    print("It downloads %s, and takes up to %.1f GB of disk while it is installed in %s%s"
          % ("%d MB" % download if download < 1000 else "%.1f GB" % (download / 1000), disk / 1000, prefix.path,
             '' if prefix.is_cpu else " (--cpu: %d MB, %d GB)" % (SIZES['cpu'][0], SIZES['cpu'][1] // 1000)))
    prefix.check_disk()


def ranks_for(prefix: Prefix, env: Env, asked: Optional[int]) -> int:
    """On how many ranks to train, `asked` by --ranks: with GPUs one on each, since NCCL refuses two."""
    if prefix.is_cpu:
        return asked or 2
    python = os.path.join(prefix.software, 'bin', 'python')
    code = 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
    status, said, errors = ask([python, '-s', '-c', code], env, TRAINING_LIMIT)
    if status != 0 or said.strip() == '0':
        raise QuickstartError("PyTorch is installed, and finds no GPU that it can use:",
                              last_lines(errors, 3) or "it does not say why",
                              "'nvidia-smi' says more; without: %s --cpu --prefix %s" % (COMMAND, prefix.path))
    found = int(said)
    if asked and asked > found:
        raise QuickstartError("there are %d GPUs for %d ranks, and each rank needs its own" % (found, asked),
                              "--ranks %d; or --cpu" % max(number for number in RANKS if number <= found))
    return asked or max(number for number in RANKS if number <= found)


def installed_pytorch(prefix: Prefix) -> Tuple[Optional[int], Optional[Described]]:
    """Time of PyTorch's module file (None: not there), and what its Python says of itself (None: it does not run)."""
    module = glob.glob(prefix.file('easybuild', 'modules', 'all', prefix.module + '*'))
    python = os.path.join(prefix.software, 'bin', 'python')
    return (os.stat(module[0]).st_mtime_ns if module else None), describe_python(python)


def install_pytorch(prefix: Prefix, env: Env, why: Optional[str] = None) -> None:
    """Run eb. With `why`, what is there is replaced, and kept: the user may have added to it."""
    module = installed_pytorch(prefix)[0]
    if why:
        prefix.check_disk()
        if os.path.lexists(prefix.software):
            prefix.set_aside(os.path.relpath(prefix.software, prefix.path), why)
    if os.geteuid() == 0 and not module:
        print("You are root. EasyBuild normally refuses to run as root, because a build that goes wrong could then\n"
              "damage the machine. It is allowed here because nothing foreign is built: wheels whose hashes are\n"
              "checked are unpacked below %s. On a shared system use an account of its own." % prefix.path)
    if why or not module:
        env = dict(env, **pip_environment(prefix.file('venv', 'bin', 'python'), os.environ))
    command = [prefix.file('venv', 'bin', 'eb'), prefix.easyconfig, '--disable-trace'] + ['--rebuild'] * bool(why)
    sys.stdout.flush()
    if run(command, env, prefix.lock, cwd=prefix.path):
        raise QuickstartError("EasyBuild could not install %s; its message above says why" % prefix.easyconfig,
                              "fix that, then run the same command again: it goes on from what is there")
    # all of it lies in EasyBuild's source path now
    shutil.rmtree(prefix.file('cache'), ignore_errors=True)


def train(prefix: Prefix, env: Env, tool: Tool, ranks: int) -> Optional[str]:
    """Load the module and train; what is wrong then, None if the training was right."""
    result = prefix.register('quickstart.json')
    with contextlib.suppress(FileNotFoundError):
        os.unlink(result)
    script = ('. "$1" && module load "$2" && shift 2 && { [ "$EBROOTPYTORCH" -ef "$1" ] || '
              '{ echo "the module that was loaded is of $EBROOTPYTORCH and not of $1" >&2; exit 1; }; } && '
              'exec mpiexec -n "$2" conda-python-distributed "$3" --json "$4"')
    print("mpiexec -n %d conda-python-distributed %s" % (ranks, shlex.quote(EXAMPLE)), flush=True)
    env = dict(env, OMP_NUM_THREADS=env.get('OMP_NUM_THREADS', '1'))
    try:
        status = run(BASH + [script, 'bash', tool[1], prefix.module, prefix.software, str(ranks), EXAMPLE, result],
                     env, prefix.lock, cwd=prefix.path, limit=TRAINING_LIMIT)
    except subprocess.TimeoutExpired:
        return "training had not ended after %d minutes" % (TRAINING_LIMIT // 60)
    if status:
        return "training failed with status %d" % status
    try:
        trained = json.loads(read_text(result))
        if trained['world_size'] != ranks or trained['accuracy'] < 0.9:
            return "training ended with accuracy %(accuracy).4f on %(world_size)d ranks" % trained
        devices = {host['device'].partition(':')[0] for host in trained['hosts']}
        if not prefix.is_cpu and (trained['backend'], devices) != ('nccl', {'cuda'}):
            return "training ran on %s with %s, and not on GPUs with NCCL" % (' '.join(devices), trained['backend'])
    except (OSError, ValueError, KeyError) as err:
        return "training ended without a result in %s: %s" % (result, err)
    return None


class Phases:
    """What is being done, and how long each part took."""

    def __init__(self) -> None:
        self.started: List[Tuple[str, float]] = []

    def begin(self, title: str) -> None:
        self.started.append((title, time.time()))
        print("\n==> " + title, flush=True)

    def table(self) -> str:
        """Text with the seconds of each phase."""
        ends = [start for _, start in self.started[1:]] + [time.time()]
        return '\n'.join('  %8.1f s  %s' % (end - start, title) for (title, start), end in zip(self.started, ends))


def check_loopback() -> None:
    """Ranks of one machine meet at 127.0.0.1: without it they would wait for ten minutes."""
    problem = why_no_loopback(10)
    if problem:
        raise QuickstartError("this machine cannot reach itself at 127.0.0.1: %s" % problem,
                              "the network interface lo must be up: ip link set lo up")


def quickstart(args: argparse.Namespace, prefix: Prefix, phases: Phases, root: str = '/') -> None:
    """Everything, in order. For tests `root` stands for / where GPUs are looked for."""
    # EasyBuild stumbles over a locale that is not installed, as ssh may bring one
    env = dict(clean_environment(os.environ), LC_ALL='C.UTF-8', PYTHONNOUSERSITE='1', PYTHONDONTWRITEBYTECODE='1',
               TMPDIR=prefix.file('tmp'), PIP_CACHE_DIR=prefix.file('cache'), SLINGTORCH_CACHE_ROOT=prefix.file('tmp'))
    report_left_out(os.environ)
    check_loopback()
    phases.begin("Packages of the distribution")
    prefix.recover_from_move()
    venv_python = describe_python(prefix.file('venv', 'bin', 'python'))
    python, tool = set_up_packages(args.python, venv_python, prefix.file('log', 'packages.log'))
    choose(prefix, args.cpu, root)
    module, found = installed_pytorch(prefix)
    if not module:
        say_sizes(prefix)

    phases.begin("EasyBuild, the bundle and an MPI launcher in %s" % prefix.file('venv'))
    set_up_tools(prefix, python, env)
    write_configuration(prefix, tool)

    phases.begin("eb %s" % prefix.easyconfig)
    env = dict(activated(prefix, env), SLINGTORCH_CACHE_ROOT=prefix.file('tmp'))
    why = "it is of the Python %s" % found['interpreter'] if found else "its Python does not run"
    fits = not module or found and found['interpreter'] == python['interpreter']
    install_pytorch(prefix, env, None if fits else why)

    number = ranks_for(prefix, env, args.ranks)
    ranks = "%d rank%s" % (number, '' if number == 1 else 's')
    phases.begin("Training on " + ranks)
    wrong = train(prefix, env, tool, number)
    if wrong and module and installed_pytorch(prefix)[0] == module:
        phases.begin("Installing PyTorch anew")
        install_pytorch(prefix, env, wrong)
        phases.begin("Training on %s once more" % ranks)
        wrong = train(prefix, env, tool, number)
    if wrong:
        raise QuickstartError(wrong, "the messages above say why; logs are in " + prefix.file('log'))
    print("\n==> Done\n%s\n\nTo do it again by hand:\n\n  . %s\n  module load %s\n"
          "  mpiexec -n %d conda-python-distributed %s\n\n"
          "Next: README.md says how to do the same on a supercomputer."
          % (phases.table(), prefix.file('activate'), prefix.module, number, shlex.quote(EXAMPLE)))


def interrupt(number: int, _frame: Any) -> NoReturn:
    """End as after Ctrl-C."""
    raise KeyboardInterrupt(number)


def main(argv: Optional[List[str]] = None, root: str = '/') -> int:
    """Run quickstart; return the exit status. For tests `root` stands for / where GPUs are looked for."""
    argv = sys.argv[1:] if argv is None else argv
    for number, name in ((1, 'stdout'), (2, 'stderr')):
        # closed; or bash has given the number of a closed one to its script, which nobody can write to
        if getattr(sys, name) is None or fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, 'w'))
    args = parse_arguments(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    prefix, phases, status = None, Phases(), 1
    # Lmod shows root no module of root's that others may not read (DirTree.lua, l_walk)
    os.umask(0o022 if os.getuid() == 0 else os.umask(0o077) | 0o022)
    try:
        if not os.path.isdir('.'):
            raise QuickstartError("the current directory is gone", "go to another one, then run quickstart again")
        prefix = Prefix(args.prefix)
        if args.python is not None:
            find_python(args.python)    # a typo must not leave a directory
        if args.remove and not os.path.exists(prefix.file(MARK)):
            raise QuickstartError("there is nothing to remove: no quickstart has made %s" % prefix.path)
        prefix.claim()
        if args.remove:
            prefix.remove_all() if args.all else prefix.remove()
        else:
            began = os.fstat(prefix.lock).st_ctime_ns
            try:
                quickstart(args, prefix, phases, root)
            finally:
                try:
                    prefix.record(began)
                except OSError as err:
                    sys.stderr.write("quickstart: which files it made could not be noted, and --remove will keep "
                                     "them: %s\n" % err)
        sys.stdout.flush()
        return 0
    except QuickstartError as err:
        lines = [str(arg) for arg in err.args]
        if prefix and os.path.isdir(prefix.path) and shutil.disk_usage(prefix.path).free < 50 * 10**6:
            # few programs say this clearly
            lines.append("its disk is full: %d MB are free" % (shutil.disk_usage(prefix.path).free // 10**6))
    except OSError as err:
        lines = [str(err), "while: " + (phases.started[-1][0] if phases.started else "looking at the prefix")]
    except KeyboardInterrupt as err:
        status = 128 + (err.args[0] if err.args else signal.SIGINT)
        where = prefix.path if prefix else args.prefix
        # as it can be typed in any directory
        words = [os.path.abspath(word) if before == '--prefix' else word for before, word in zip([''] + argv, argv)]
        lines = ["interrupted; what is in %s is not complete" % where,
                 "to go on from there: %s" % ' '.join([COMMAND] + [shlex.quote(word) for word in words]),
                 "to remove it:        %s --remove --prefix %s" % (COMMAND, where)]
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)     # its reader may be gone, or the disk of a log be full
    sys.stderr.write("\nquickstart: %s\n" % '\n            '.join(lines))
    return status


if __name__ == '__main__':
    sys.exit(main())
