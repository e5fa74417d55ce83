# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch report: writes versions, site, module, network variables and files that the user names to one text file
(docs/explain.md). The user sees each file before it is included: no program can tell what in it is secret.
"""
import argparse
import os
import platform
import re
import stat
import subprocess
import sys
import time
from typing import Callable, List, Mapping, Optional

from slingtorch import __version__, bundle_root, gpus
from slingtorch.job.machine import Machine

DEFAULT_NAME = 'slingtorch-report.txt'
# of a longer file, only the beginning and the end are included
HEAD_BYTES, TAIL_BYTES = 128 << 10, 512 << 10
# variables of EasyBuild, the bundle and the network libraries; no others are written
VARIABLES = re.compile(r'(SLINGTORCH|RUNSCRIPTS|EASYBUILD|MPICH|FI|NCCL|RCCL|OFI_NCCL|GLOO|TORCH_NCCL)_|RUNSCRIPTS$')
# colours, window titles, and other characters that plain text does not have; a node that crashed leaves zeros
CONTROLS = re.compile(r'\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]')


def versions() -> str:
    """Versions of this installation and system, one fact per line."""
    try:
        from easybuild.tools.version import VERSION as easybuild
    except ImportError as err:
        easybuild = "not in this Python (%s)" % err
    machine = Machine()
    system = re.search(r'^PRETTY_NAME=(.*)$', machine.read('etc/os-release'), re.M)
    revision = ''
    if os.path.exists(os.path.join(bundle_root(), '.git')):
        done = subprocess.run(['git', '-C', bundle_root(), 'describe', '--always', '--dirty'], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, universal_newlines=True, timeout=20)
        revision = ' (checkout %s)' % (done.stdout.strip() or 'of unknown revision')
    return '\n'.join("%-11s %s" % fact for fact in (
        ('slingtorch', '%s%s in %s' % (__version__, revision, bundle_root())),
        ('EasyBuild', easybuild), ('Python', '%s in %s' % (sys.version.replace('\n', ' '), sys.executable)),
        ('system', ', '.join([system.group(1).strip('"') if system else 'unknown', 'Linux ' + os.uname().release,
                              os.uname().machine, ' '.join(platform.libc_ver())])),
        ('GPU driver', machine.nvidia_driver() or gpus.amd_driver(machine) or 'none'),
        ('modules', os.environ.get('LOADEDMODULES', '').replace(':', ' ') or 'none loaded'),
    ))


def module_texts(environ: Mapping[str, str]) -> str:
    """The files of the loaded modules of PyTorch and Horovod."""
    loaded = zip(environ.get('LOADEDMODULES', '').split(':'), environ.get('_LMFILES_', '').split(':'))
    texts = ['%s:\n%s' % (path, Machine().read(path)) for name, path in loaded
             if name.startswith(('PyTorch', 'Horovod'))]
    return '\n'.join(texts) or "No PyTorch module is loaded: load it as the job does, then run this again."


def variables(environ: Mapping[str, str]) -> str:
    """The job's variables that are set in this shell, one per line."""
    return '\n'.join('%s=%s' % (name, value.replace('\n', '\\n'))
                     for name, value in sorted(environ.items()) if VARIABLES.match(name))


def read_parts(path: str) -> Optional[List[str]]:
    """A file's text in one part, or its beginning and end, cut at line ends; None if it is not a plain file."""
    # O_NONBLOCK: opening a named pipe would wait
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), 'rb') as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            return None
        parts = [stream.read(HEAD_BYTES + TAIL_BYTES)]
        if status.st_size > HEAD_BYTES + TAIL_BYTES:
            stream.seek(-TAIL_BYTES, os.SEEK_END)
            # drop the cut lines: nobody could recognise a secret in a part of a word
            parts = [parts[0][:HEAD_BYTES].rpartition(b'\n')[0], stream.read(TAIL_BYTES).partition(b'\n')[2]]
    return [part.decode(errors='replace') for part in parts]


def write_new(path: str, text: str) -> None:
    """Write a file that only its owner can read; RuntimeError if the file exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise RuntimeError("%s already exists and is not overwritten: remove it, or name another file: slingtorch "
                           "report --output FILE" % path)
    try:
        with open(descriptor, 'w', encoding='utf-8', errors='replace') as stream:
            stream.write(text)
    except OSError:
        os.unlink(path)
        raise


def run(args: argparse.Namespace, site_text: Callable[[], str]) -> int:
    """slingtorch report"""
    environ = dict(os.environ)
    contents = [("Versions", versions()), ("Site", site_text()), ("Module", module_texts(environ)),
                ("Variables", variables(environ))]
    for path in args.paths:
        try:
            parts = read_parts(path)
        except OSError as err:
            raise RuntimeError("%s: %s. Name a log, a job script or check's JSON" % (path, err.strerror))
        if parts is None:
            raise RuntimeError("%s is not a file. Name a log, a job script or check's JSON" % path)
        text = CONTROLS.sub('', '\n\n[... the middle is omitted ...]\n\n'.join(parts).replace('\r', '\n'))
        title = "File " + os.path.abspath(path)
        print("===== %s =====\n%s\n" % (title, text))
        if sys.stdin.isatty() and input("Include this file as shown? [y/N] ").strip().lower() not in ('y', 'yes'):
            continue
        contents.append((title, text))
    text = "slingtorch report, %s\n" % time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())
    text += ''.join('\n===== %s =====\n%s\n' % section for section in contents)
    write_new(args.output, text)
    for title, content in contents:
        print("  %-60s %8d bytes" % (title, len(content.encode(errors='replace'))))
    print("%s has %d bytes. Read it before you send it: nothing is removed, not even names of hosts and people."
          % (args.output, len(text.encode(errors='replace'))))
    return 0


def add_parser(commands: 'argparse._SubParsersAction', site_text: Callable[[], str]) -> None:
    """Add 'report' to the command line."""
    parser = commands.add_parser('report', help="collect what a bug report needs",
                                 description="Writes one text file that only you can read: versions, the site and its "
                                             "values, the loaded PyTorch module, network variables, and the files "
                                             "that you name (docs/explain.md).")
    parser.add_argument('paths', nargs='*', metavar='PATH',
                        help="a log, a job script or the JSON of --check. You see each file before you agree to "
                             "include it")
    parser.add_argument('--output', metavar='FILE', default=DEFAULT_NAME,
                        help="file to write, which must not exist (default: %(default)s)")
    parser.set_defaults(function=lambda args: run(args, site_text))
