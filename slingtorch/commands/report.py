# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch report: versions, site, module, variables and a job's files in one text file, without secrets
(docs/report.md).

Only text leaves this file through Redactor. Where it is not certain whether something is a secret, it goes.
"""
import argparse
import contextlib
import json
import os
import platform
import pwd
import re
import stat
import subprocess
import sys
import time
from typing import Callable, Iterable, List, Mapping, Optional, Tuple
from urllib.parse import quote

from slingtorch import __version__, bundle_root, gpus
from slingtorch.job.machine import Machine

DEFAULT_NAME = 'slingtorch-report.txt'
# of a longer file its beginning and its end are taken
HEAD_BYTES, TAIL_BYTES = 128 << 10, 512 << 10
MAX_FILES = 20
# what a job leaves behind; of a directory nothing else is taken
JOB_FILES = re.compile(r'\.(out|err|log|txt|json|sh|sbatch|job|pbs|slurm|[oe]\d+)$|^slurm-')
# variables that say how a job is started; no other one is written
VARIABLES = re.compile(
    r'(SLINGTORCH|RUNSCRIPTS|EASYBUILD|EBROOT|EBVERSION|EB_PYTHON|SLURM|PBS|PALS|PMI|OMPI|MPICH|FI_|NCCL|RCCL|OFI_|'
    r'CUDA|ROCM|ROCR|HIP_|HSA_|MIOPEN|GLOO|TORCH|PYTORCH|OMP_|SIF|SINGULARITY|APPTAINER|CONTAINERROOT|LOADEDMODULES|'
    r'MODULEPATH|RANK$|WORLD_SIZE$|LOCAL_|MASTER_|LD_LIBRARY_PATH$|LD_PRELOAD$|PYTHONPATH$|VIRTUAL_ENV$|CONDA_|CRAY)')

REMOVED = '<removed>'
# 'tokenizer' is none
TOKEN = (r'token(?!i[sz])|signature|(?<=[?&])(?:sig|key|code|pwd)(?==)|'
         r'(?<=[a-z0-9])_(?:keys?|sas|sig|dsn|pat)(?![a-z0-9])')
PASSWORD = (r'secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|account[_-]?key|credential|'
            r'authorization|cookie|\bAWS_|\bauths?(?![a-z])|(?<=[a-z0-9])_(?:pass|pw|pwd|auth)(?![a-z0-9])')
SECRET_VARIABLE = re.compile('%s|%s' % (TOKEN, PASSWORD), re.I)
# numbers of tokens and switches are what a training's log is full of
HARMLESS = r'(?:[+-]?\d[\d.,_]{0,15}(?:e[+-]?\d+)?[A-Za-z/%]{0,4}|true|false|none|null)'
QUOTED = r'(?:"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|\\"(?:(?!\\").)*\\")'
# the name's end, then '=' or ':', or as in setenv("NAME", "value"); {0,8}: JSON may break the line
SEPARATOR = r'[\w.-]{0,64}(?:\\?["\']?\]?\s{0,8}(?:=>|:=|[=:])|["\']\s{0,8},)\s{0,8}'
# as in 'setenv NAME value', or a column after the name; a tool's --name value
BLANK = r'[\w.-]{0,64}["\'}]{0,2}[ \t]+'
# a value in quotes, else all that is left of the line: it may hold blanks
VALUE = r'(?!\s*<removed>)(?:%s(?=[\s,;&)}\]]|$)|[^\n]+)' % QUOTED
WORD = r'(?:%s|\S+)' % QUOTED
NO_NUMBER = r'(?!\s*["\']?%s["\']?(?:[\s,;&)}\]]|$))' % HARMLESS
KEY_NAME = r'[^\n-]{0,40}PRIVATE KEY[^\n-]{0,40}-----'
# (pattern, flags, what stands in its place), in this order
PATTERNS = [(re.compile(pattern, flags | re.M), new) for pattern, flags, new in (
    # the first of them is one whose beginning was cut off
    (r'\A(?:(?!-----BEGIN).){0,16384}?-----END' + KEY_NAME, re.S, '<private key>'),
    (r'-----BEGIN%s.*?(?:-----END%s|\Z)' % (KEY_NAME, KEY_NAME), re.S, '<private key>'),
    (r'(?:ssh-[a-z0-9-]{1,20}|ecdsa-sha2-\w{1,20}|sk-[\w-]{1,40}@openssh\.com) +AAAA[\w+/=]+(?: +\S+)?', 0,
     '<ssh key>'),
    # the last '@' counts: a password may hold one, and a slash
    (r'(?<=://)(?:[^/\s]{1,512}|[^/\s:@]{0,256}:\S{1,512})@(?!sha256:)', 0, REMOVED + '@'),
    (r'(?<![\w.+%-])[\w.+%-]{1,64}:[^\s:@/]{1,128}@(?!sha256:)(?=[\w.-])', 0, REMOVED + '@'),
    # W&B's older keys, in wandb.login(key="...") and wandb login ...: 40 digits, as a git revision has
    (r'\b((?:key|login)\b[\s=:("\']{1,12})[0-9a-f]{40}\b', re.I, r'\1' + REMOVED),
    (r'\b(bearer)\s+[\w.~+/=-]{8,}', re.I, r'\1 ' + REMOVED),
    (r'(\s(?:-u|--user|--proxy-user)[ =])\S+:\S+', 0, r'\1' + REMOVED),
    # by their form: Hugging Face, GitHub, GitLab, AWS, Google, Slack, OpenAI and its like, npm, PyPI, W&B, JWT
    (r'\b(?:(?:hf|api_org)_[A-Za-z0-9]{16,}|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|gl[a-z]{2,5}-[\w-]{16,}|'
     r'(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|ya29\.[\w-]+|xox[a-z]-[\w-]{10,}|sk-[\w-]{16,}|npm_[A-Za-z0-9]{20,}|'
     r'pypi-[\w-]{20,}|wandb_v1_\w+|eyJ[\w-]{8,}\.[\w-]{8,}\.?[\w-]*)', 0, REMOVED),
    (r'((?:%s)%s)%s%s' % (TOKEN, SEPARATOR, NO_NUMBER, VALUE), re.I, r'\1' + REMOVED),
    (r'((?:%s)%s)%s' % (PASSWORD, SEPARATOR, VALUE), re.I, r'\1' + REMOVED),
    (r'((?<![\w-])--?[\w-]{0,40}(?:%s|%s)%s)%s%s' % (TOKEN, PASSWORD, BLANK, NO_NUMBER, WORD), re.I, r'\1' + REMOVED),
    (r'((?:TOKEN(?!I[SZ])|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_?KEY|(?<=[A-Z0-9])_(?:KEY|PASS|PW))%s)%s%s'
     % (BLANK, NO_NUMBER, WORD), 0, r'\1' + REMOVED),
    # netrc
    (r'\b(password|passwd|passphrase)[ \t]+\S+', re.I, r'\1 ' + REMOVED),
    (r'(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+', 0, '<address>'),
    (r'(/(?:home|users))/(?!<)[^/\s:"\'<>,;]+', re.I, r'\1/<user>'),
)]
NO_TEXT = re.compile(rb'[\x01-\x06\x0e-\x1a\x1c-\x1f]')
# colours, titles of windows, and what else no text has: they may stand within a word
CONTROLS = re.compile(r'\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]')


def is_secret(name: str, value: str) -> bool:
    """Whether a variable holds a secret; numbers and names of files, such as a socket, are none."""
    return bool(SECRET_VARIABLE.search(name)) and not os.path.exists(value) and (
        bool(re.search(PASSWORD, name, re.I)) or not re.match(HARMLESS + '$', value, re.I))


class Redactor:
    """Takes secrets and the person out of texts."""

    def __init__(self, environ: Mapping[str, str], people: Iterable[str] = (), homes: Iterable[str] = ()) -> None:
        """Values of variables with a secret's name go; people and homes: besides those of the environment."""
        words = {}
        for name, value in environ.items():
            if is_secret(name, value) and len(value) >= 6:
                for form in (value, quote(value, safe=''), quote(value), json.dumps(value)[1:-1]):
                    words[form] = REMOVED
        for home in [environ.get('HOME', '')] + list(homes):
            for path in {home.rstrip('/'), os.path.realpath(home) if home else ''} - {'', '/'}:
                words[path] = '$HOME'
        self.words = [(re.compile(re.escape(word) + (r'(?![\w.-])' if new == '$HOME' else '')), new)
                      for word, new in sorted(words.items(), key=lambda item: -len(item[0]))]
        names = {environ.get(name, '') for name in ('USER', 'LOGNAME', 'SUDO_USER', 'SLURM_JOB_USER', 'PBS_O_LOGNAME')}
        # these two do not say who it is
        names = (names | set(people)) - {'', 'root', 'nobody'}
        self.words += [(re.compile(r'(?<![A-Za-z0-9])%s(?![A-Za-z0-9])' % re.escape(name), re.I), '<user>')
                       for name in sorted(names, key=len, reverse=True)]

    def __call__(self, text: str) -> str:
        """The text without them."""
        text = CONTROLS.sub('', text.replace('\r\n', '\n').replace('\r', '\n'))
        for pattern, new in self.words + PATTERNS:
            text = pattern.sub(new, text)
        return text


def versions() -> str:
    """What runs here, one fact a line."""
    try:
        from easybuild.tools.version import VERSION as easybuild
    except ImportError as err:
        easybuild = "none for this Python (%s)" % err
    machine = Machine()
    system = re.search(r'^PRETTY_NAME=(.*)$', machine.read('etc/os-release'), re.M)
    revision = ''
    if os.path.exists(os.path.join(bundle_root(), '.git')):
        done = subprocess.run(['git', '-C', bundle_root(), 'describe', '--always', '--dirty'], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, universal_newlines=True, timeout=20)
        revision = ' (checkout %s)' % (done.stdout.strip() or 'whose revision git does not say')
    return '\n'.join("%-11s %s" % fact for fact in (
        ('slingtorch', '%s%s in %s' % (__version__, revision, bundle_root())),
        ('EasyBuild', easybuild), ('Python', '%s in %s' % (sys.version.replace('\n', ' '), sys.executable)),
        ('system', ', '.join([system.group(1).strip('"') if system else 'unknown', 'Linux ' + os.uname().release,
                              os.uname().machine, ' '.join(platform.libc_ver())])),
        ('GPU driver', machine.nvidia_driver() or gpus.amd_driver(machine) or 'none here'),
        ('modules', os.environ.get('LOADEDMODULES', '').replace(':', ' ') or 'none loaded'),
    ))


def module_texts(environ: Mapping[str, str]) -> str:
    """The files of the loaded modules of PyTorch and Horovod."""
    loaded = zip(environ.get('LOADEDMODULES', '').split(':'), environ.get('_LMFILES_', '').split(':'))
    texts = ['%s:\n%s' % (path, Machine().read(path)) for name, path in loaded
             if name.startswith(('PyTorch', 'Horovod'))]
    return '\n'.join(texts) or "No module of PyTorch is loaded here: load it as the job does, and make the report anew."


def variables(environ: Mapping[str, str]) -> str:
    """The variables of a job that are set here, one a line."""
    return '\n'.join('%s=%s' % (name, REMOVED if is_secret(name, value) else value.replace('\n', '\\n'))
                     for name, value in sorted(environ.items()) if VARIABLES.match(name))


def job_files(paths: Iterable[str]) -> Tuple[List[str], List[str]]:
    """Which files to take of these, and of directories the newest that look like a job's; and what was left out and
    why. RuntimeError if one of the paths is not there or may not be read."""
    taken, left = [], []
    for path in paths:
        if not os.path.isdir(path):
            try:
                os.stat(path)
            except OSError as err:
                raise RuntimeError("%s: %s. Name a job's directory, log or check's JSON" % (path, err.strerror))
            taken.append(path)
            continue
        entries = [entry for entry in os.scandir(path) if entry.is_file(follow_symlinks=False)]
        ours = sorted((entry for entry in entries if JOB_FILES.search(entry.name)
                       and not entry.name.startswith('slingtorch-report')), key=lambda entry: -entry.stat().st_mtime)
        taken += sorted(entry.path for entry in ours[:MAX_FILES])
        if len(ours) > MAX_FILES:
            left.append("%s: %d files that are older than the newest %d" % (path, len(ours) - MAX_FILES, MAX_FILES))
        if len(entries) > len(ours):
            left.append("%s: %d files that do not look like a job's" % (path, len(entries) - len(ours)))
    return taken, left


def read_parts(path: str) -> Optional[List[str]]:
    """A file's text: one part, or beginning and end, cut at ends of lines; None if it is no plain file or no text."""
    # O_NONBLOCK: a pipe would wait
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), 'rb') as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            return None
        parts = [stream.read(HEAD_BYTES + TAIL_BYTES)]
        if status.st_size > HEAD_BYTES + TAIL_BYTES:
            stream.seek(-TAIL_BYTES, os.SEEK_END)
            # what a cut word was cannot be seen
            parts = [parts[0][:HEAD_BYTES].rpartition(b'\n')[0], stream.read(TAIL_BYTES).partition(b'\n')[2]]
    # a node that crashed leaves runs of zeros in its log
    parts = [part.replace(b'\0', b'') for part in parts]
    if any(len(NO_TEXT.findall(part)) * 50 > len(part) for part in parts):
        return None
    return [part.decode(errors='replace') for part in parts]


def write_new(path: str, text: str) -> None:
    """Write a file that only its owner can read; RuntimeError if there is a file of this name."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise RuntimeError("%s is there already, and is not overwritten: remove it, or name another file: slingtorch "
                           "report --output FILE" % path)
    except FileNotFoundError:
        os.getcwd()     # where that is gone, its own error says so
        raise
    try:
        with open(descriptor, 'w', encoding='utf-8', errors='replace') as stream:
            stream.write(text)
    except OSError:
        os.unlink(path)
        raise


def run(args: argparse.Namespace, site_text: Callable[[], str]) -> int:
    """slingtorch report"""
    environ = dict(os.environ)
    files, left_out = job_files(args.paths)
    people = []
    for uid in {os.stat(path).st_uid for path in files} | {os.getuid()}:
        with contextlib.suppress(KeyError):     # a container does not know everyone
            people.append(pwd.getpwuid(uid))
    redact = Redactor(environ, [name for entry in people for name in (entry.pw_name, entry.pw_gecos.split(',')[0])],
                      [entry.pw_dir for entry in people])
    sections = [("Versions", versions()), ("Site", site_text()), ("Module", module_texts(environ)),
                ("Variables", variables(environ))]
    contents = [(title, redact(text)) for title, text in sections]
    for path in files:
        parts = read_parts(path)
        if parts is None:
            left_out.append("%s: no text" % path)
        else:
            cut = '\n\n[... what is between is left out ...]\n\n'
            contents.append((redact("File " + os.path.abspath(path)), cut.join(map(redact, parts))))
    left_out += [] if files else ["no file of a job: name its directory or its log"]
    head = ("slingtorch report, %s\nTokens, passwords, keys, addresses, home directories and the user's name are taken "
            "out. Names of hosts,\nprojects and jobs stay, and so does what looks harmless: read it before you send it."
            "\n" % time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime()))
    head += ''.join('Left out: %s\n' % redact(text) for text in left_out)
    text = head + ''.join('\n===== %s =====\n%s\n' % section for section in contents)
    write_new(args.output, text)
    for title, content in contents:
        print("  %-60s %8d bytes" % (title, len(content.encode(errors='replace'))))
    for line in left_out:
        print("  left out: %s" % line)
    print("%s has %d bytes. Read it before you send it: what is secret to you may look harmless to a program."
          % (args.output, len(text.encode(errors='replace'))))
    return 0


def add_parser(commands: 'argparse._SubParsersAction', site_text: Callable[[], str]) -> None:
    """The command, for cli.make_parser()."""
    parser = commands.add_parser('report', help="pack what a bug report needs, without secrets",
                                 description="Writes versions, the site and its values, the loaded module of PyTorch, "
                                             "a job's variables and its files into one text file that only you can "
                                             "read, without secrets: docs/report.md.")
    parser.add_argument('paths', nargs='*', metavar='PATH',
                        help="a job's directory, or its files: log, job script, check's JSON")
    parser.add_argument('--output', metavar='FILE', default=DEFAULT_NAME,
                        help="file to write; it must not exist (default: %(default)s)")
    parser.set_defaults(function=lambda args: run(args, site_text))
