# SPDX-License-Identifier: GPL-2.0-only
"""From a checkout to a distributed training run: the program behind ./quickstart.

Everything it makes lies below one directory, the prefix, which is quickstart's own: new, empty, or made by an earlier
run of the same user. `rm -r` removes it. It runs on any Python from 3.6 without packages, and looks for one that
PyTorch has wheels for.
"""
import argparse
import configparser
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
from typing import Any, Dict, List, Mapping, Optional, Tuple

from slingtorch import gpus, lockfile

BUNDLE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

BASH = ['bash', '--noprofile', '--norc', '-c']
EXAMPLE = os.path.join(BUNDLE, 'examples', 'training', 'ddp_training.py')
# the versions that the lock files cover, and the order in which commands are tried
PYTHON_VERSIONS = ('3.11', '3.12', '3.13', '3.14')
PYTHON_COMMANDS = ('python3', 'python3.13', 'python3.12', 'python3.11', 'python3.14', '/usr/bin/python3')
# what the example's batches of 48 images divide by
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
MPICH = 'mpich==5.0.2'
# seconds; training takes about ten
TRAINING_LIMIT = 600
# MB that are downloaded, and MB of disk that a whole prefix takes while it is made
SIZES = {'cpu': (255, 3000), 'cuda-12': (4000, 15500), 'cuda-13': (2900, 12000)}
MARK = '.slingtorch-quickstart.json'
# Variables that would decide what is installed, where, or how ranks find each other, instead of quickstart.
# A shell inside a Slurm job counts: mpiexec would start its ranks with srun.
LEFT_OUT_LOUDLY = ('EASYBUILD_', 'SLINGTORCH_')
LEFT_OUT = LEFT_OUT_LOUDLY + (
    'PIP_', 'PYTHON', 'VIRTUAL_ENV', 'CONDA_', 'EBROOT', 'EBVERSION', 'EBDEVEL', 'EB_', 'LMOD_', '__LMOD', '__MOD',
    '_ModuleTable', '_LMFILES_', 'LOADEDMODULES', 'MODULE', 'SLURM_', 'PBS_', 'PALS_', 'PMI', 'OMPI_', 'HYDRA_',
    'MPI_LOCAL', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_', 'TORCH', 'GLOO_', 'BASH_ENV',
    'BASH_FUNC_', 'CDPATH',
)
# of pip's configuration only how the network is reached: a 'target' or 'user' would send packages elsewhere
PIP_NETWORK_OPTIONS = ('index-url', 'extra-index-url', 'find-links', 'no-index', 'trusted-host', 'proxy', 'cert',
                       'client-cert', 'timeout', 'default-timeout', 'retries', 'keyring-provider')
# package manager, its command, its names of packages where they differ
PACKAGE_MANAGERS: Tuple[Tuple[str, str, Dict[str, str]], ...] = (
    ('apt-get', 'apt-get update && apt-get install --yes --no-install-recommends', {}),
    ('dnf', 'dnf install --assumeyes', {'lmod': 'Lmod'}),
    ('zypper', 'zypper --non-interactive install', {'lmod': 'lua-lmod'}),
)
# a shim or wrapper may print something itself: the answer is the last line
DESCRIBE_PYTHON = """
import importlib.util, json, os, sys
print('\\n' + json.dumps({'version': '%d.%d' % sys.version_info[:2], 'path': sys.executable,
    'interpreter': os.path.realpath(getattr(sys, '_base_executable', sys.executable)),
    'venvs': all(map(importlib.util.find_spec, ('ensurepip', 'venv')))}))
"""
ACTIVATE = """\
# makes bash use the bundle and what quickstart installed; the next line is for csh and tcsh, which stop there
test "$?tcsh" = 1 && echo "activate: this file is for bash. Type 'bash', then do the same in that shell" && exit 1
# this configuration alone: neither the shell's EASYBUILD_* variables nor configuration files elsewhere
unset ${{!EASYBUILD_@}} ${{!SLINGTORCH_@}}
export EASYBUILD_CONFIGFILES={prefix}/easybuild.cfg EASYBUILD_IGNORECONFIGFILES=$(
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
"""

Env = Mapping[str, str]
Described = Dict[str, Any]      # what describe_python says of a Python
Tool = Tuple[str, str, str]     # EasyBuild's name of a modules tool, file that defines 'module', syntax of modules


class QuickstartError(Exception):
    """What a person has to decide or fix; the first argument says what is wrong, the others how to fix it."""


# --- the prefix

def claim(path: str) -> Tuple[str, Dict[str, Any], int]:
    """Make or check the prefix; return its real path, its mark, and the descriptor that holds its lock."""
    prefix = os.path.realpath(path)
    another = "choose a directory of your own with --prefix DIR; nothing was changed"
    bad = sorted(set(re.sub(r'[\w./+@-]', '', prefix)))
    if bad or not path or path.startswith('~'):
        raise QuickstartError("'%s' cannot be a prefix: EasyBuild works in paths of letters, digits and . _ + @ - "
                              "only%s" % (path, bad and ", and this one has: " + ' '.join(map(repr, bad)) or ''),
                              another)
    if prefix == os.path.realpath(os.path.expanduser('~')):
        raise QuickstartError("%s is your home directory" % prefix, another)
    try:
        os.makedirs(prefix, mode=0o755, exist_ok=True)
        names, status = set(os.listdir(prefix)), os.stat(prefix)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise QuickstartError("%s belongs to another user, or others may write to it" % prefix, another)
        mark: Dict[str, Any] = {'prefix': prefix}
        if MARK in names:
            with open(os.path.join(prefix, MARK)) as handle:
                mark = dict(json.load(handle))
        elif names:
            raise QuickstartError("%s is not empty, and quickstart has not made it: it has %s" % (
                prefix, ', '.join(sorted(names)[:4])), another)
        if mark.get('prefix') != prefix:
            raise QuickstartError("%s was moved: what is in it was made for %s" % (prefix, mark.get('prefix')),
                                  "make it anew: rm -r %s, then run quickstart again" % prefix)
        write_mark(prefix, mark)
        lock = os.open(os.path.join(prefix, '.lock'), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for name in ('tmp', 'log', 'cache'):
            os.makedirs(os.path.join(prefix, name), exist_ok=True)
    except (ValueError, TypeError):
        raise QuickstartError("%s of an earlier run is damaged" % os.path.join(prefix, MARK),
                              "make it anew: rm -r %s, then run quickstart again" % prefix)
    except OSError as err:
        raise QuickstartError("%s cannot be the prefix: %s" % (prefix, err.strerror), another)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise QuickstartError("another quickstart, or what it started, uses the prefix %s" % prefix,
                              "wait until it has ended, or use another --prefix; 'fuser %s/.lock' lists it" % prefix)
    if os.statvfs(prefix).f_flag & os.ST_NOEXEC:
        raise QuickstartError("programs cannot run in %s: its file system is mounted noexec" % prefix, another)
    return prefix, mark, lock


def write_file(path: str, text: str, mode: int = 0o644) -> None:
    """Write a file: whole, or not at all."""
    with open(path + '.new', 'w') as handle:
        handle.write(text)
    os.chmod(path + '.new', mode)
    os.replace(path + '.new', path)


def write_mark(prefix: str, mark: Dict[str, Any]) -> None:
    write_file(os.path.join(prefix, MARK), json.dumps(mark, sort_keys=True) + '\n')


# --- running commands

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
                try:
                    os.killpg(process.pid, number)
                    process.wait(timeout=20)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass
            raise


def ask(command: List[str], env: Optional[Env] = None) -> Tuple[Optional[int], str, str]:
    """Status, output and errors of a command; the status is None if it does not start, or has not ended in a minute."""
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, encoding='utf-8', errors='replace', timeout=60)
        return done.returncode, done.stdout, done.stderr
    except (OSError, subprocess.TimeoutExpired) as err:
        return None, '', str(err)


def last_lines(path: str, count: int = 6) -> str:
    """The end of a log, short enough for a screen."""
    with open(path, errors='replace') as handle:
        return '\n'.join(line[:300] for line in handle.read().strip().splitlines()[-count:])


# --- Python, a modules tool

def describe_python(python: Optional[str]) -> Optional[Described]:
    """What an interpreter says of itself, as every shell will find it; None if it does not run."""
    env = {name: value for name, value in os.environ.items() if name != 'LD_LIBRARY_PATH'}
    try:
        return dict(json.loads(ask([python or '', '-sE', '-c', DESCRIBE_PYTHON], env)[1].strip().rpartition('\n')[2]))
    except ValueError:
        return None


def find_python(wanted: Optional[str]) -> Optional[Described]:
    """A Python that PyTorch has wheels for: that of --python, else the first; None if there is no Python at all."""
    seen = []
    for command in PYTHON_COMMANDS if wanted is None else [wanted]:
        found = describe_python(shutil.which(command))
        if found and found['version'] in PYTHON_VERSIONS:
            return found
        if found or wanted is not None:
            seen.append("%s is %s" % (command, found['version'] if found else "no Python that starts"))
    if seen:
        raise QuickstartError("PyTorch is installed for Python %s, and %s"
                              % (', '.join(PYTHON_VERSIONS), ', '.join(seen)),
                              "install one of these versions, or name one with --python /path/to/python3.12")
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


def install_packages(packages: List[str], lock: int, log: str) -> None:
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
    if run(as_root, os.environ, lock, log):
        raise QuickstartError("'%s' failed:" % command, last_lines(log), "all of it: " + log)


def set_up_packages(wanted: Optional[str], lock: int, log: str) -> Tuple[Described, Tool]:
    """Find Python and a modules tool; install what is missing."""
    for attempt in (1, 2):
        python, tool = find_python(wanted), find_modules_tool(os.environ)
        missing = [] if tool else ['lmod']
        if not python:
            missing += ['python3', 'python3-venv']
        elif not python['venvs']:
            # Debian and Ubuntu keep this part of Python in a package of its own
            missing += ['python%s-venv' % python['version']]
        if python and tool and not missing:
            print("modules tool: %s (%s)\nPython:       %s (%s)" % (tool[:2] + (python['path'], python['version'])))
            return python, tool
        if attempt == 1:
            install_packages(missing, lock, log)
    raise QuickstartError("still missing after the installation: " + ', '.join(missing),
                          "set LMOD_PKG to the directory that has libexec/lmod in it, or name a Python with --python")


# --- EasyBuild, the bundle, an MPI launcher

def pip_environment(python: str) -> Dict[str, str]:
    """pip's settings for the network as PIP_* variables, and nothing else of the user's pip configuration."""
    try:
        settings = lockfile.pip_settings(python, 'install', '-sE')
    except RuntimeError as err:
        raise QuickstartError(str(err))
    return dict({'PIP_CONFIG_FILE': os.devnull}, **{
        'PIP_' + option.upper().replace('-', '_'): ' '.join(value.split())
        for option, value in settings.items() if option in PIP_NETWORK_OPTIONS})


def set_up_tools(prefix: str, mark: Dict[str, Any], python: Described, env: Env, lock: int) -> None:
    """Make the environment with EasyBuild and MPICH's launcher, unless a whole one of this Python is there."""
    config = configparser.ConfigParser()
    config.read(os.path.join(BUNDLE, 'setup.cfg'))
    # only the bundle's requirements are installed: it stays where it is
    wanted = [line for line in config['options']['install_requires'].splitlines() if line and line[0] != '#'] + [MPICH]
    venv, log = os.path.join(prefix, 'venv'), os.path.join(prefix, 'log', 'pip.log')
    venv_python, made_of = os.path.join(venv, 'bin', 'python'), [python['interpreter'], BUNDLE] + wanted
    works = ask([venv_python, '-sE', '-c', 'import easybuild.main'])[0] == 0
    if mark.get('venv') != made_of or not works:
        mark.pop('venv', None)
        write_mark(prefix, mark)
        shutil.rmtree(venv, ignore_errors=True)
        print("installing with pip: " + ' '.join(wanted))
        if run([python['path'], '-m', 'venv', venv], env, lock, log):
            raise QuickstartError("%s -m venv failed:" % python['path'], last_lines(log))
        env = dict(env, **pip_environment(venv_python))
        pip = [venv_python, '-m', 'pip', 'install', '--disable-pip-version-check', '--no-input', '--progress-bar',
               'off', '--retries', '2', '--timeout', '15']
        # EasyBuild comes as source: with these there, pip needs no environment of its own for each package
        for step in (['setuptools', 'wheel'], ['--no-build-isolation'] + wanted):
            if run(pip + step, env, lock, log):
                raise QuickstartError("pip could not install EasyBuild:", last_lines(log, 4),
                                      "all that pip said: %s. For a mirror or a proxy: PIP_INDEX_URL, PIP_PROXY" % log)
        site_packages = glob.glob(os.path.join(venv, 'lib', 'python3*', 'site-packages'))[0]
        write_file(os.path.join(site_packages, 'slingtorch-checkout.pth'), BUNDLE + '\n')
        write_file(os.path.join(venv, 'bin', 'slingtorch'),
                   '#!/bin/sh\nexec %s -m slingtorch "$@"\n' % venv_python, 0o755)
        mark['venv'] = made_of
        write_mark(prefix, mark)


def write_configuration(prefix: str, tool: Tool) -> None:
    """Write EasyBuild's configuration, and the file 'activate' that makes a shell use it."""
    os.makedirs(os.path.join(prefix, 'easybuild', 'modules', 'all'), exist_ok=True)
    options = [('prefix', prefix + '/easybuild'), ('tmpdir', prefix + '/tmp'), ('modules-tool', tool[0]),
               ('module-syntax', tool[2])]
    if os.geteuid() == 0:
        options.append(('allow-use-as-root-and-accept-consequences', '1'))
    write_file(os.path.join(prefix, 'easybuild.cfg'), '[config]\n' + ''.join('%s = %s\n' % item for item in options))
    write_file(os.path.join(prefix, 'activate'), ACTIVATE.format(prefix=prefix, init=shlex.quote(tool[1])))


def activated(prefix: str, env: Env) -> Dict[str, str]:
    """The environment of a shell that has sourced 'activate'."""
    done = subprocess.run(BASH + ['. "$1" >&2 && env -0', 'bash', os.path.join(prefix, 'activate')], env=dict(env),
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    if done.returncode:
        raise QuickstartError("the bundle could not be activated; the message above says why",
                              "if it has no remedy: rm -r %s, then run quickstart again" % prefix)
    entries = done.stdout.decode(errors='surrogateescape').split('\0')
    return dict(entry.split('=', 1) for entry in entries if '=' in entry and not entry.startswith('BASH_FUNC_'))


# --- PyTorch

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
    free = shutil.disk_usage(prefix).free // 10**6
    # what an earlier run has downloaded is there already
    for top in (prefix + '/cache', prefix + '/easybuild/sources'):
        free += sum(os.lstat(os.path.join(directory, name)).st_size
                    for directory, _, names in os.walk(top) for name in names) // 10**6
    if free < disk:
        raise QuickstartError("only %d MB are free in %s, and %d MB are needed for %s" % (
                              free, prefix, disk, easyconfig),
                              "free some space, or choose another place with --prefix DIR%s"
                              % ('' if easyconfig == gpus.CPU else "; --cpu needs %d MB" % SIZES['cpu'][1]))


def install_pytorch(prefix: str, easyconfig: str, software: str, python: Described, env: Env, lock: int) -> None:
    """Run eb; PyTorch of another Python, or one whose Python does not run, is replaced."""
    installed = glob.glob(software.replace('/software/', '/modules/all/') + '*')
    found = describe_python(os.path.join(software, 'bin', 'python')) if installed else None
    whole = bool(found and found['interpreter'] == python['interpreter'])
    if not whole:
        if os.geteuid() == 0:
            print("You are root. EasyBuild normally refuses to run as root, because a build that goes wrong could "
                  "then\ndamage the machine. It is allowed here because nothing foreign is built: wheels whose hashes\n"
                  "are checked are unpacked below %s. On a shared system use an account of its own." % prefix)
        env = dict(env, **pip_environment(os.path.join(prefix, 'venv', 'bin', 'python')))
    # nobody else installs here: a lock is what a killed run has left
    shutil.rmtree(os.path.join(prefix, 'easybuild', 'software', '.locks'), ignore_errors=True)
    command = [os.path.join(prefix, 'venv', 'bin', 'eb'), easyconfig, '--disable-trace']
    if run(command + ['--rebuild'] * bool(installed and not whole), env, lock):
        raise QuickstartError("EasyBuild could not install %s; its message above says why" % easyconfig,
                              "fix that, then run the same command again: it goes on from what is there")
    # all of it lies in EasyBuild's source path now
    shutil.rmtree(os.path.join(prefix, 'cache'), ignore_errors=True)


def ranks_for(software: str, env: Env, asked: Optional[int]) -> int:
    """On how many ranks to train on GPUs, `asked` by --ranks: one on each, since NCCL refuses two."""
    code = 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
    status, said, errors = ask([os.path.join(software, 'bin', 'python'), '-s', '-c', code], env)
    if status != 0 or said.strip() == '0':
        raise QuickstartError("PyTorch is installed, and finds no GPU that it can use:",
                              errors.strip()[-300:] or "it does not say why", "'nvidia-smi' says more; without: --cpu")
    found = int(said)
    if asked and asked > found:
        raise QuickstartError("there are %d GPUs for %d ranks, and each rank needs its own" % (found, asked),
                              "--ranks %d; or --cpu" % max(number for number in RANKS if number <= found))
    return asked or max(number for number in RANKS if number <= found)


def train(prefix: str, software: str, tool: Tool, ranks: int, env: Env, lock: int) -> None:
    """Load the module and train; a QuickstartError if what the training wrote of itself is not what it must be."""
    result, module = os.path.join(prefix, 'quickstart.json'), software[len(prefix + '/easybuild/software/'):]
    if os.path.exists(result):
        os.unlink(result)
    script = ('. "$1" && module load "$2" && shift 2 && { [ "$EBROOTPYTORCH" -ef "$1" ] || '
              '{ echo "the module that was loaded is of $EBROOTPYTORCH and not of $1" >&2; exit 1; }; } && '
              'exec mpiexec -n "$2" conda-python-distributed "$3" --json "$4"')
    print("mpiexec -n %d conda-python-distributed %s" % (ranks, shlex.quote(EXAMPLE)))
    wrong = ''
    try:
        status = run(BASH + [script, 'bash', tool[1], module, software, str(ranks), EXAMPLE, result], env, lock,
                     limit=TRAINING_LIMIT)
        if status:
            wrong = "training failed with status %d" % status
        else:
            with open(result) as handle:
                trained = json.load(handle)
            devices = sorted({host['device'].partition(':')[0] for host in trained['hosts']})
            right = [ranks, 'gloo', ['cpu']] if '-local-cpu' in module else [ranks, 'nccl', ['cuda']]
            if [trained['world_size'], trained['backend'], devices] != right or trained['accuracy'] < 0.9:
                wrong = "training ended with accuracy %.4f on %d ranks, on %s with %s" % (
                    trained['accuracy'], trained['world_size'], ' '.join(devices), trained['backend'])
    except subprocess.TimeoutExpired:
        wrong = "training had not ended after %d minutes" % (TRAINING_LIMIT // 60)
    except (OSError, ValueError, KeyError) as err:
        wrong = "training ended without a result in %s: %s" % (result, err)
    if wrong:
        raise QuickstartError(wrong, "the messages above say why",
                              "if the installation is damaged: rm -r %s, then run quickstart again" % prefix)


# --- all of it

def quickstart(args: argparse.Namespace, root: str = '/') -> None:
    """Everything, in order. For tests `root` stands for / where GPUs are looked for."""
    phases: List[Tuple[str, float]] = []

    def begin(title: str) -> None:
        phases.append((title, time.monotonic()))
        print("\n==> " + title, flush=True)

    if args.python is not None:
        find_python(args.python)    # a typo must not leave a directory
    prefix, mark, lock = claim(args.prefix)
    # EasyBuild stumbles over a locale that is not installed, as ssh may bring one
    env = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    env.update(LC_ALL='C.UTF-8', PYTHONNOUSERSITE='1', PYTHONDONTWRITEBYTECODE='1', TMPDIR=prefix + '/tmp',
               PIP_CACHE_DIR=prefix + '/cache')
    loud = sorted('$' + name for name in os.environ if name.startswith(LEFT_OUT_LOUDLY))
    if loud:
        print("not used, quickstart has a configuration of its own: " + ', '.join(loud))

    begin("Packages of the distribution")
    python, tool = set_up_packages(args.python, lock, prefix + '/log/packages.log')
    easyconfig = choose(args.cpu, root)
    software = os.path.join(prefix, 'easybuild', 'software', easyconfig[:-len('.eb')].replace('-', '/', 1))
    if not os.path.exists(software):
        check_disk(prefix, easyconfig)

    begin("EasyBuild, the bundle and an MPI launcher in %s/venv" % prefix)
    set_up_tools(prefix, mark, python, env, lock)
    write_configuration(prefix, tool)

    begin("eb %s" % easyconfig)
    env = dict(activated(prefix, env), SLINGTORCH_CACHE_ROOT=prefix + '/tmp')
    install_pytorch(prefix, easyconfig, software, python, env, lock)

    ranks = (args.ranks or 2) if easyconfig == gpus.CPU else ranks_for(software, env, args.ranks)
    begin("Training on %d rank%s" % (ranks, '' if ranks == 1 else 's'))
    train(prefix, software, tool, ranks, dict(env, OMP_NUM_THREADS=env.get('OMP_NUM_THREADS', '1')), lock)

    ends = [start for _, start in phases[1:]] + [time.monotonic()]
    print("\n==> Done")
    for (title, start), end in zip(phases, ends):
        print("  %8.1f s  %s" % (end - start, title))
    print("\nTo do it again by hand:\n\n  . %s/activate\n  module load %s\n"
          "  mpiexec -n %d conda-python-distributed %s\n\nTo remove it: rm -r %s\n"
          "Next: README.md says how to do the same on a supercomputer."
          % (prefix, software[len(prefix + '/easybuild/software/'):], ranks, shlex.quote(EXAMPLE), prefix))


def parse_arguments(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='./quickstart', allow_abbrev=False,
        description="Installs PyTorch with EasyBuild and trains a small network with it on several ranks of this "
                    "machine. Everything goes to one directory; only packages of the distribution go elsewhere, and "
                    "are named first.",
        epilog="Run it again at any time: what is there and still right is used again.")
    parser.add_argument('--prefix', metavar='DIR', default=os.path.join(BUNDLE, '.slingtorch'),
                        help="directory: new, empty or an earlier quickstart's (default: .slingtorch in this checkout)")
    parser.add_argument('--cpu', action='store_true', help="the small PyTorch for processors, also with GPUs here")
    parser.add_argument('--ranks', metavar='N', type=int, choices=RANKS,
                        help="ranks to train on: %s (default: one for each GPU, without GPUs 2); the example divides "
                             "batches of 48 images evenly" % ', '.join(map(str, RANKS)))
    parser.add_argument('--python', metavar='COMMAND',
                        help="Python to use, %s (default: the first that is found)" % ', '.join(PYTHON_VERSIONS))
    return parser.parse_args(argv)


def main(argv: Optional[List[str]] = None, root: str = '/') -> int:
    """Run quickstart; return the exit status. For tests `root` stands for / where GPUs are looked for."""
    args = parse_arguments(argv)
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
