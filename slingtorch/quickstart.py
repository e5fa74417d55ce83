# SPDX-License-Identifier: GPL-2.0-only
"""From a checkout to a distributed training run: the program behind ./quickstart, which finds Python for it.

Everything it makes lies below one directory, the prefix, which is quickstart's own: new, empty, or made by an earlier
run of the same user. `rm -r` removes it.
"""
import argparse
import configparser
import contextlib
import fcntl
import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import Dict, List, Mapping, Optional, Tuple

from slingtorch import gpus, lockfile

BUNDLE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
BASH = ['bash', '--noprofile', '--norc', '-c']
EXAMPLE = os.path.join(BUNDLE, 'examples', 'training', 'ddp_training.py')
# what the example's batches of 48 images divide by
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
LIMIT = 600     # seconds of training, which takes about five
# MB that are downloaded, and MB of disk that a whole prefix takes while it is made
SIZES = {'cpu': (255, 3000), 'cuda-12': (4000, 15500), 'cuda-13': (2900, 12000)}
MARK = '.slingtorch-quickstart'
# All else would decide what is installed, where, or how ranks find each other, instead of quickstart: settings of
# EasyBuild, pip, Python, a modules tool, or of a Slurm job, within which mpiexec would start its ranks with srun.
KEPT = re.compile(r'(PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|OMP_NUM_THREADS|(CUDA|NVIDIA|NCCL|ROCR|HIP)_\w+|'
                  r'\w+_(proxy|PROXY)|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE)$')
# of pip's configuration only how the network is reached: a 'target' or 'user' would send packages elsewhere
PIP_NETWORK_OPTIONS = ('index-url', 'extra-index-url', 'find-links', 'no-index', 'trusted-host', 'proxy', 'cert',
                       'client-cert', 'timeout', 'default-timeout', 'retries', 'keyring-provider')
ACTIVATE = """\
# makes bash use the bundle and what quickstart installed; the next line is for csh and tcsh, which stop there
test "$?tcsh" = 1 && echo "activate: this file is for bash. Type 'bash', then do the same in that shell" && exit 1
# this configuration alone: neither the shell's EASYBUILD_* variables nor configuration files elsewhere
unset ${{!EASYBUILD_@}} ${{!SLINGTORCH_@}}
export EASYBUILD_CONFIGFILES={prefix}/easybuild.cfg EASYBUILD_IGNORECONFIGFILES=$(IFS=:
    printf %s, ${{XDG_CONFIG_HOME:-${{HOME-}}/.config}}/easybuild/config.cfg &&
        for dir in ${{XDG_CONFIG_DIRS:-/etc/xdg}} /etc; do printf %s, "$dir"/easybuild.d/*.cfg; done)
case :$PATH: in *:{prefix}/venv/bin:*) ;; *) export PATH={prefix}/venv/bin:$PATH ;; esac
. {init}
path=$({prefix}/venv/bin/slingtorch env --quiet) && eval "$path" || {{ unset path; return 1; }}
unset path
module use {prefix}/easybuild/modules/all
"""
Env = Mapping[str, str]


class QuickstartError(Exception):
    """What a person has to decide or fix; the first argument says what is wrong, the others how to fix it."""


def claim(path: str) -> Tuple[str, int]:
    """Make or check the prefix; return its real path, and the descriptor that holds its lock."""
    prefix, another = os.path.realpath(path), "choose a directory of your own with --prefix DIR; nothing was changed"
    bad = sorted(set(re.sub(r'[\w./+@-]', '', prefix)))
    if bad or not path or path.startswith('~'):
        raise QuickstartError("'%s' cannot be a prefix: EasyBuild works in paths of letters, digits and . _ + @ - "
                              "only%s" % (path, bad and ", and this one has: " + ' '.join(map(repr, bad)) or ''),
                              another)
    if prefix == os.path.realpath(os.path.expanduser('~')):
        raise QuickstartError("%s is your home directory" % prefix, another)
    mark = os.path.join(prefix, MARK)
    try:
        os.makedirs(prefix, mode=0o755, exist_ok=True)
        names, status = sorted(os.listdir(prefix)), os.stat(prefix)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise QuickstartError("%s belongs to another user, or others may write to it" % prefix, another)
        if names and MARK not in names:
            raise QuickstartError("%s is not empty, and quickstart has not made it: it has %s" % (
                prefix, ', '.join(names[:4])), another)
        lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        made_for = os.read(lock, 5000).decode(errors='replace')
        if made_for not in ('', prefix):
            raise QuickstartError("%s was moved: what is in it was made for %s" % (prefix, made_for),
                                  "make it again: rm -r %s, then run quickstart again" % prefix)
        os.pwrite(lock, prefix.encode(), 0)
        for name in ('tmp', 'log', 'cache'):
            os.makedirs(os.path.join(prefix, name), exist_ok=True)
    except OSError as err:
        raise QuickstartError("%s cannot be the prefix: %s" % (prefix, err.strerror), another)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise QuickstartError("another quickstart, or what it started, uses the prefix %s" % prefix,
                              "wait until it has ended, or use another --prefix; 'fuser %s' lists it" % mark)
    if os.statvfs(prefix).f_flag & os.ST_NOEXEC:
        raise QuickstartError("programs cannot run in %s: its file system is mounted noexec" % prefix, another)
    return prefix, lock


def write_file(path: str, text: str) -> None:
    """Write a file."""
    with open(path, 'w') as handle:
        handle.write(text)


def run(command: List[str], env: Env, lock: int, log: Optional[str] = None, limit: Optional[float] = None) -> int:
    """Run a command to its end, or for `limit` seconds (subprocess.TimeoutExpired); return its exit status.

    It is in a process group of its own, so that an interrupt ends it with all that it has started, and it inherits the
    prefix's lock. What it prints goes to the log, else to the screen.
    """
    sys.stdout.flush()
    with open(log or os.devnull, 'w') as output:
        process = subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=output if log else None,
                                   stderr=subprocess.STDOUT if log else None, start_new_session=True, pass_fds=[lock])
        try:
            return process.wait(timeout=limit)
        except BaseException:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(timeout=20)
            raise


def ask(python: str, code: str, env: Optional[Env] = None) -> Tuple[str, str]:
    """What a Python prints for a line of code, empty if it fails or does not start, and its errors."""
    try:
        done = subprocess.run([python, '-s', '-c', code], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True, timeout=60)
        return '' if done.returncode else done.stdout.strip(), done.stderr
    except (OSError, subprocess.TimeoutExpired) as err:
        return '', str(err)


def pip_environment(python: str) -> Dict[str, str]:
    """pip's settings for the network as PIP_* variables, and nothing else of the user's pip configuration."""
    try:
        settings = lockfile.pip_settings(python, 'install', '-sE')
    except RuntimeError as err:
        raise QuickstartError(str(err))
    return dict({'PIP_CONFIG_FILE': os.devnull}, **{
        'PIP_' + option.upper().replace('-', '_'): ' '.join(value.split())
        for option, value in settings.items() if option in PIP_NETWORK_OPTIONS})


def set_up_tools(prefix: str, env: Env, lock: int) -> None:
    """Make the environment with EasyBuild and MPICH's launcher, unless a whole one of this Python is there."""
    config = configparser.ConfigParser()
    config.read(os.path.join(BUNDLE, 'setup.cfg'))
    # only the bundle's requirements are installed: it stays where it is
    wanted = [line for line in config['options']['install_requires'].splitlines() if line and line[0] != '#']
    wanted.append('mpich==5.0.2')
    venv, log = os.path.join(prefix, 'venv'), os.path.join(prefix, 'log', 'pip.log')
    python, mark = venv + '/bin/python', venv + '/made-of'
    made_of = '\n'.join([sys.version, sys.base_prefix, BUNDLE] + wanted)
    if ask(python, 'import easybuild.main; print(open(%r).read())' % mark, env)[0] == made_of:
        return
    shutil.rmtree(venv, ignore_errors=True)
    print("installing with pip: " + ' '.join(wanted))
    pip = [python, '-m', 'pip', 'install', '--disable-pip-version-check', '--no-input', '--progress-bar', 'off',
           '--retries', '2', '--timeout', '15']
    # EasyBuild comes as source: with these there, pip needs no environment of its own for each package
    for step in ([sys.executable, '-m', 'venv', venv], pip + ['--no-compile', 'setuptools', 'wheel'],
                 pip + ['--no-build-isolation'] + wanted):
        if run(step, dict(env, **pip_environment(python)) if step[0] == python else env, lock, log):
            with open(log, errors='replace') as handle:
                said = [line[:300] for line in handle.read().strip().splitlines()[-4:]]
            raise QuickstartError("EasyBuild could not be installed; %s said:" % ' '.join(step[:3]), *said,
                                  "all of it: %s. For a mirror or a proxy: PIP_INDEX_URL, PIP_PROXY" % log)
    write_file(glob.glob(venv + '/lib/python3*/site-packages')[0] + '/slingtorch-checkout.pth', BUNDLE + '\n')
    write_file(venv + '/bin/slingtorch', '#!/bin/sh\nexec %s -m slingtorch "$@"\n' % python)
    os.chmod(venv + '/bin/slingtorch', 0o755)
    write_file(mark, made_of)


def write_configuration(prefix: str, tool: str) -> None:
    """Write EasyBuild's configuration, and the file 'activate' that makes a shell use it."""
    name, init, syntax = tool.split()
    os.makedirs(os.path.join(prefix, 'easybuild', 'modules', 'all'), exist_ok=True)
    root = 'allow-use-as-root-and-accept-consequences = 1\n' if os.geteuid() == 0 else ''
    write_file(os.path.join(prefix, 'easybuild.cfg'), '[config]\nprefix = {0}/easybuild\ntmpdir = {0}/tmp\n'
               'modules-tool = {1}\nmodule-syntax = {2}\n{3}'.format(prefix, name, syntax, root))
    write_file(os.path.join(prefix, 'activate'), ACTIVATE.format(prefix=prefix, init=init))


def activated(prefix: str, env: Env) -> Dict[str, str]:
    """The environment of a shell that has sourced 'activate'."""
    done = subprocess.run(BASH + ['. "$1" >&2 && env -0', 'bash', os.path.join(prefix, 'activate')], env=dict(env),
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    if done.returncode:
        raise QuickstartError("the bundle could not be activated; the message above says why",
                              "if it has no remedy: rm -r %s, then run quickstart again" % prefix)
    entries = done.stdout.decode(errors='surrogateescape').split('\0')
    return dict(entry.split('=', 1) for entry in entries if '=' in entry and not entry.startswith('BASH_FUNC_'))


def choose(cpu: bool, root: str = '/') -> str:
    """The easyconfig that is installed; says which and why. For tests `root` stands for /."""
    name, why = (None, "--cpu was given") if cpu else gpus.fitting_easyconfig(root)
    if name and '-cuda-' not in name:
        name, why = None, "%s; for these GPUs, by README.md: eb %s" % (why, name)
    # as in a container that was given no GPU: the driver's files are those of the machine around it
    if name and not os.path.exists(os.path.join(root, 'dev/nvidiactl')):
        name, why = None, why + ", but there is no /dev/nvidiactl"
    print("PyTorch:      %s (%s%s)" % (name or gpus.CPU, '' if name else "for processors: ", why))
    return name or gpus.CPU


def check_disk(prefix: str, easyconfig: str) -> None:
    """Say what is about to be downloaded and the disk that it takes; a QuickstartError if there is too little."""
    download, disk = next(sizes for kind, sizes in SIZES.items() if '-%s' % kind in easyconfig)
    print("It downloads %s, and takes up to %.1f GB of disk while it is installed in %s"
          % ("%d MB" % download if download < 1000 else "%.1f GB" % (download / 1000), disk / 1000, prefix))
    # what an earlier run has downloaded is there already
    free = (shutil.disk_usage(prefix).free + sum(
        map(os.path.getsize, glob.glob(prefix + '/easybuild/sources/p/PyTorch/wheels/*')))) // 10**6
    if free < disk:
        raise QuickstartError("only %d MB are free in %s, and %d MB are needed for %s" % (
                              free, prefix, disk, easyconfig),
                              "free some space, or choose another place with --prefix DIR%s"
                              % ('' if easyconfig == gpus.CPU else "; --cpu needs %d MB" % SIZES['cpu'][1]))


def install_pytorch(prefix: str, easyconfig: str, module: str, env: Env, lock: int) -> None:
    """Run eb; PyTorch of another Python, or one whose Python does not run, is replaced."""
    installed = glob.glob('%s/easybuild/modules/all/%s*' % (prefix, module))
    code = 'import sys; print(sys.version, sys.base_prefix)'
    python = '%s/easybuild/software/%s/bin/python' % (prefix, module)
    if installed and ask(python, code, env)[0] == '%s %s' % (sys.version, sys.base_prefix):
        print("%s is already installed" % module)
        return
    if os.geteuid() == 0:
        print("You are root. EasyBuild normally refuses to run as root, because a build that goes wrong could "
              "then\ndamage the machine. It is allowed here because nothing is compiled: wheels with checked\n"
              "hashes are unpacked below %s. On a shared system use an account of its own." % prefix)
    env = dict(env, **pip_environment(prefix + '/venv/bin/python'))
    # nobody else installs here: a lock is what a killed run has left
    shutil.rmtree(prefix + '/easybuild/software/.locks', ignore_errors=True)
    if run([prefix + '/venv/bin/eb', easyconfig, '--disable-trace'] + ['--rebuild'] * bool(installed), env, lock):
        raise QuickstartError("EasyBuild could not install %s; its message above says why" % easyconfig,
                              "fix that, then run the same command again: it goes on from what is there")
    # all of it lies in EasyBuild's source path now
    shutil.rmtree(prefix + '/cache', ignore_errors=True)


def ranks_for(python: str, env: Env, asked: Optional[int]) -> int:
    """On how many ranks to train on GPUs, `asked` by --ranks: one on each, since NCCL refuses two."""
    said, errors = ask(python, 'import torch; print(torch.cuda.is_available() and torch.cuda.device_count())', env)
    if not said.isdigit() or said == '0':
        raise QuickstartError("PyTorch is installed, and finds no GPU that it can use:",
                              errors.strip()[-300:] or "it does not say why", "'nvidia-smi' says more; without: --cpu")
    most = max(number for number in RANKS if number <= int(said))
    if asked and asked > int(said):
        raise QuickstartError("there are %s GPUs for %d ranks, and each rank needs its own" % (said, asked),
                              "--ranks %d; or --cpu" % most)
    return asked or most


def train(prefix: str, module: str, init: str, ranks: int, env: Env, lock: int) -> None:
    """Load the module and train; a QuickstartError if what the training wrote of itself is not what it must be."""
    result = os.path.join(prefix, 'quickstart.json')
    with contextlib.suppress(FileNotFoundError):
        os.unlink(result)
    script = '. "$1" && module load "$2" && exec mpiexec -n "$3" conda-python-distributed "$4" --json "$5"'
    print("mpiexec -n %d conda-python-distributed %s" % (ranks, shlex.quote(EXAMPLE)))
    try:
        status = run(BASH + [script, 'bash', init, module, str(ranks), EXAMPLE, result], env, lock, limit=LIMIT)
        wrong = "training failed with status %d" % status
        if not status:
            with open(result) as handle:
                trained = json.load(handle)
            kinds = ' '.join(sorted({host['device'].partition(':')[0] for host in trained['hosts']}))
            found = trained['world_size'], kinds, trained['backend']
            if found == (ranks, *(('cpu', 'gloo') if '-local-cpu' in module else ('cuda', 'nccl'))) and \
                    trained['accuracy'] > 0.9:
                return
            wrong = "training ended with accuracy %.4f on %d ranks, on %s with %s" % (trained['accuracy'], *found)
    except subprocess.TimeoutExpired:
        wrong = "training had not ended after %d minutes" % (LIMIT // 60)
    except (OSError, ValueError, KeyError) as err:
        wrong = "training ended without a result in %s: %s" % (result, err)
    raise QuickstartError(wrong, "the messages above say why",
                          "if the installation is damaged: rm -r %s, then run quickstart again" % prefix)


def quickstart(args: argparse.Namespace, root: str = '/') -> None:
    """Everything, in order. For tests `root` stands for / where GPUs are looked for."""
    phases: List[Tuple[str, float]] = []

    def begin(title: str) -> None:
        phases.append((title, time.monotonic()))
        print("\n==> " + title, flush=True)

    prefix, lock = claim(args.prefix)
    env = {name: value for name, value in os.environ.items() if KEPT.match(name)}
    # EasyBuild stumbles over a locale that is not installed, as ssh may bring one
    env.update(LC_ALL='C.UTF-8', PYTHONNOUSERSITE='1', PYTHONDONTWRITEBYTECODE='1', TMPDIR=prefix + '/tmp',
               PIP_CACHE_DIR=prefix + '/cache')
    loud = sorted('$' + name for name in os.environ if name.startswith(('EASYBUILD_', 'SLINGTORCH_')))
    if loud:
        print("not used, quickstart has a configuration of its own: " + ', '.join(loud))
    print("modules tool: %s\nPython:       %s" % (args.modules, sys.executable))
    easyconfig = choose(args.cpu, root)
    module = easyconfig[:-len('.eb')].replace('-', '/', 1)
    software = os.path.join(prefix, 'easybuild', 'software', module)
    if not os.path.exists(software):
        check_disk(prefix, easyconfig)

    begin("EasyBuild, the bundle and an MPI launcher in %s/venv" % prefix)
    set_up_tools(prefix, env, lock)
    write_configuration(prefix, args.modules)

    begin("eb %s" % easyconfig)
    env = dict(activated(prefix, env), SLINGTORCH_CACHE_ROOT=prefix + '/tmp')
    install_pytorch(prefix, easyconfig, module, env, lock)

    ranks = (args.ranks or 2) if easyconfig == gpus.CPU else ranks_for(software + '/bin/python', env, args.ranks)
    begin("Training on %d rank%s" % (ranks, '' if ranks == 1 else 's'))
    env.setdefault('OMP_NUM_THREADS', '1')
    train(prefix, module, args.modules.split()[1], ranks, env, lock)

    ends = [start for _, start in phases[1:]] + [time.monotonic()]
    print("\n==> Done")
    for (title, start), end in zip(phases, ends):
        print("  %8.1f s  %s" % (end - start, title))
    print("\nTo do it again by hand:\n\n  . %s/activate\n  module load %s\n"
          "  mpiexec -n %d conda-python-distributed %s\n\nTo remove it: rm -r %s\n"
          "Next: README.md says how to do the same on a supercomputer."
          % (prefix, module, ranks, shlex.quote(EXAMPLE), prefix))


def main(argv: Optional[List[str]] = None, root: str = '/') -> int:
    """Run quickstart; return the exit status. For tests `root` stands for / where GPUs are looked for."""
    parser = argparse.ArgumentParser(
        prog='./quickstart', allow_abbrev=False,
        description="Installs PyTorch with EasyBuild and trains a small network with it on several ranks of this "
                    "machine. Everything goes to one directory; only packages of the distribution go elsewhere, and "
                    "are named first.",
        epilog="Run it again at any time: it uses what is already installed and still valid.")
    parser.add_argument('--prefix', metavar='DIR', default=os.path.join(BUNDLE, '.slingtorch'),
                        help="directory: new, empty or an earlier quickstart's (default: .slingtorch in this checkout)")
    parser.add_argument('--cpu', action='store_true', help="PyTorch for CPUs, even if there are GPUs")
    parser.add_argument('--ranks', metavar='N', type=int, choices=RANKS,
                        help="ranks to train on: %s (default: one for each GPU, without GPUs 2); the example divides "
                             "batches of 48 images evenly" % ', '.join(map(str, RANKS)))
    parser.add_argument('--python', metavar='COMMAND', help="Python to use, 3.11 to 3.14 (default: the first of these)")
    parser.add_argument('--modules', help=argparse.SUPPRESS)     # tool, file and syntax that the file quickstart found
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    # Lmod shows root no module of root's that others may not read (DirTree.lua, l_walk)
    os.umask(0o022 if os.getuid() == 0 else os.umask(0o077) | 0o022)
    try:
        quickstart(args, root)
        return 0
    except QuickstartError as err:
        lines = [str(arg) for arg in err.args]
        if os.path.isdir(args.prefix) and shutil.disk_usage(args.prefix).free < 50 * 10**6:
            lines.append("its disk is full")    # few programs say this clearly
    except OSError as err:
        lines = [str(err)]
    except KeyboardInterrupt:
        lines = ["interrupted; run the same command again to go on, or rm -r %s to remove it" % args.prefix]
    sys.stderr.write("\nquickstart: %s\n" % '\n            '.join(lines))
    return 130 if lines[0].startswith("interrupted") else 1
