# SPDX-License-Identifier: GPL-2.0-only
"""From a checkout to a distributed training run: the program behind ./quickstart, which finds Python for it.

Everything it makes lies below one directory, the prefix, which is quickstart's own: new, empty, or made by an earlier
run of the same user. `rm -r` removes it.
"""
import argparse
import configparser
import fcntl
import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from slingtorch import gpus, lockfile

BUNDLE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
EXAMPLE = os.path.join(BUNDLE, 'examples', 'training', 'ddp_training.py')
MARK = '.slingtorch-quickstart'
AGAIN = "rm -r %s, then run quickstart again"
# All else would decide what is installed, where, or how ranks find each other, instead of quickstart: settings of
# EasyBuild, Python, a modules tool, or of a Slurm job, within which mpiexec would start its ranks with srun. Of pip's
# variables only how the network is reached: a 'target' or 'user' would send packages elsewhere.
KEPT = re.compile(
    r'(PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|OMP_NUM_THREADS|(CUDA|NVIDIA|NCCL|ROCR|HIP)_\w+|\w+_(proxy|PROXY)|'
    r'SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|PIP_(CONFIG_FILE|(EXTRA_)?INDEX_URL|FIND_LINKS|NO_INDEX|'
    r'TRUSTED_HOST|PROXY|CERT|CLIENT_CERT|(DEFAULT_)?TIMEOUT|RETRIES))$')
ACTIVATE = """\
# makes bash use the bundle and what quickstart installed, with this configuration alone: neither the shell's
# EASYBUILD_* variables nor configuration files elsewhere
unset ${{!EASYBUILD_@}} ${{!SLINGTORCH_@}}
export SLINGTORCH_CACHE_ROOT={prefix}/tmp
export EASYBUILD_CONFIGFILES={prefix}/easybuild.cfg EASYBUILD_IGNORECONFIGFILES=$(IFS=:
    printf %s, ${{XDG_CONFIG_HOME:-${{HOME-}}/.config}}/easybuild/config.cfg &&
        for dir in ${{XDG_CONFIG_DIRS:-/etc/xdg}} /etc; do printf %s, "$dir"/easybuild.d/*.cfg; done)
case :$PATH: in *:{prefix}/venv/bin:*) ;; *) export PATH={prefix}/venv/bin:$PATH ;; esac
. {init}
path=$({prefix}/venv/bin/slingtorch env --quiet) && eval "$path" || {{ unset path; return 1; }}
unset path
module use {prefix}/easybuild/modules/all
"""


class QuickstartError(RuntimeError):
    """What a person has to decide or fix; the first argument says what is wrong, the others how to fix it."""


def claim(path: str) -> Tuple[str, int]:
    """Make or check the prefix; return its real path, and the descriptor that holds its lock."""
    prefix, another = os.path.realpath(path), "choose a directory of your own with --prefix DIR; nothing was changed"
    mark = os.path.join(prefix, MARK)
    bad = sorted(set(re.sub(r'[\w./+@-]', '', prefix)))
    if bad or not path or path.startswith('~'):
        raise QuickstartError("'%s' cannot be a prefix: EasyBuild works in paths of letters, digits and . _ + @ - "
                              "only%s" % (path, bad and ", and this one has: " + ' '.join(map(repr, bad)) or ''),
                              another)
    try:
        os.makedirs(prefix, mode=0o755, exist_ok=True)     # a umask of 002 would let the group write
        names, status = sorted(os.listdir(prefix)), os.stat(prefix)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise QuickstartError("%s belongs to another user, or others may write to it" % prefix, another)
        if names and MARK not in names:
            raise QuickstartError("%s is not empty, and quickstart has not made it: it has %s" % (
                prefix, ', '.join(names[:4])), another)
        lock = os.open(mark, os.O_RDWR | os.O_CREAT, 0o600)
        made_for = os.read(lock, 5000).decode(errors='replace')
        if made_for not in ('', prefix):
            raise QuickstartError("%s was moved: what is in it was made for %s" % (prefix, made_for),
                                  "make it again: " + AGAIN % prefix)
        os.pwrite(lock, prefix.encode(), 0)
        for name in ('tmp', 'log', 'easybuild/modules/all'):
            os.makedirs(os.path.join(prefix, name), exist_ok=True)
    except OSError as err:
        raise QuickstartError("%s cannot be the prefix: %s" % (prefix, err.strerror), another)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise QuickstartError("another quickstart, or what it started, uses the prefix %s" % prefix,
                              "wait until it has ended, or use another --prefix; 'fuser %s' lists it" % mark)
    # of all that is started: pip and eb may outlive a quickstart that is killed
    os.set_inheritable(lock, True)
    return prefix, lock


def run(command: List[str], log: Optional[str] = None, env: Optional[Dict[str, str]] = None) -> int:
    """Run a command, which an interrupt ends with all it has started; its status. It prints to the log or screen."""
    sys.stdout.flush()
    with open(log or os.devnull, 'w') as output:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output if log else None,
                                   stderr=subprocess.STDOUT if log else None, start_new_session=True, close_fds=False)
        try:
            return process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise


def ask(python: str, code: str) -> str:
    """What a Python prints for a line of code, empty if it fails or does not start."""
    try:
        return subprocess.run([python, '-s', '-c', code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, universal_newlines=True).stdout.strip()
    except OSError:
        return ''


def run_activated(prefix: str, script: str, *words: str) -> int:
    """Run a line of bash, whose $@ the words are, after 'activate'; return its exit status."""
    return run(['bash', '--noprofile', '--norc', '-c', '. "$0" && ' + script, prefix + '/activate', *words])


def make_venv(venv: str, log: str, *wanted: str) -> str:
    """Make a virtual environment with pip, uv and what is wanted, as uv takes it; its directory of packages."""
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', venv], check=True)
    packages = glob.glob(venv + '/lib/python3*/site-packages')[0]
    # Debian's python3 has ensurepip with python3-venv, which --help does not need
    import ensurepip
    # as ensurepip does, which takes four seconds to compile all of pip; Debian has the wheel elsewhere
    for directory in (os.path.dirname(ensurepip.__file__) + '/_bundled', sysconfig.get_config_var('WHEEL_PKG_DIR')):
        for wheel in glob.glob('%s/pip-*.whl' % directory):
            zipfile.ZipFile(wheel).extractall(packages)
    python = venv + '/bin/python'
    pip = [python, '-m', 'pip', 'install', '--disable-pip-version-check', '--no-input', '--progress-bar', 'off',
           '--retries', '2', '--timeout', '15', '--no-compile', '--prefix', venv]
    options, uv_env = lockfile.uv_settings(lockfile.pip_settings(python, 'install', '-sE'), [])
    uv = [venv + '/bin/uv', 'pip', 'install', '--python', python, '--no-cache', '--no-progress'] + options
    for command, settings in ((pip + ['uv'], None), (uv + list(wanted), uv_env)):
        if run(command, log, settings):
            said = [line[:300] for line in Path(log).read_text(errors='replace').strip().splitlines()[-4:]]
            what = "packages for %s could not be installed; %s said:" % (venv, ' '.join(command[:3]))
            raise QuickstartError(what, *said, "all of it: %s. For a mirror or a proxy: PIP_INDEX_URL, PIP_PROXY" % log)
    return packages


def set_up_tools(prefix: str) -> None:
    """Make the environment with EasyBuild and MPICH's launcher, unless a whole one of this Python is there."""
    config = configparser.ConfigParser()
    config.read(os.path.join(BUNDLE, 'setup.cfg'))
    # only the bundle's requirements are installed: it stays where it is
    wanted = [line for line in config['options']['install_requires'].splitlines() if line and line[0] != '#']
    wanted.append('mpich==5.0.2')
    venv, log = prefix + '/venv', prefix + '/log/pip.log'
    python, mark = venv + '/bin/python', Path(venv, 'made-of')
    made_of = '\n'.join([sys.version, sys.base_prefix, BUNDLE] + wanted)
    if ask(python, 'import easybuild.main; print(open(%r).read())' % str(mark)) == made_of:
        return
    print("installing with uv: " + ' '.join(wanted))
    packages = make_venv(venv, log, *wanted)
    Path(packages, 'slingtorch-checkout.pth').write_text(BUNDLE + '\n')
    start = Path(venv, 'bin', 'slingtorch')
    start.write_text('#!/bin/sh\nexec %s -m slingtorch "$@"\n' % python)
    start.chmod(0o755)
    mark.write_text(made_of)


def write_configuration(prefix: str, tool: str) -> None:
    """Write EasyBuild's configuration, and the file 'activate' that makes a shell use it."""
    name, init, syntax = tool.split()
    Path(prefix, 'easybuild.cfg').write_text(
        '[config]\nprefix = {0}/easybuild\ntmpdir = {0}/tmp\nmodules-tool = {1}\nmodule-syntax = {2}\n{3}'.format(
            prefix, name, syntax, 'allow-use-as-root-and-accept-consequences = 1\n' * (os.geteuid() == 0)))
    Path(prefix, 'activate').write_text(ACTIVATE.format(prefix=prefix, init=init))


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


def install_pytorch(prefix: str, easyconfig: str, module: str) -> None:
    """Run eb, unless the module and a Python that runs are there."""
    installed = glob.glob('%s/easybuild/modules/all/%s*' % (prefix, module))
    if installed and ask('%s/easybuild/software/%s/bin/python' % (prefix, module), 'print(1)'):
        print("%s is already installed" % module)
        return
    if os.geteuid() == 0:
        print("You are root. EasyBuild normally refuses to run as root, because a build that goes wrong could damage\n"
              "the machine. Here nothing is compiled: wheels with checked hashes are unpacked below %s." % prefix)
    # nobody else installs here: a lock is what a killed run has left
    shutil.rmtree(prefix + '/easybuild/software/.locks', ignore_errors=True)
    # nobody else uses it, and compiling what is never imported took 20 s of processor time
    words = ['--disable-trace', '--try-amend=byte_compile=False', *['--rebuild'] * bool(installed)]
    if run_activated(prefix, 'exec eb "$@"', easyconfig, *words):
        raise QuickstartError("EasyBuild could not install %s; the message above says why" % easyconfig,
                              "fix that, then run the same command again: it goes on from what is there",
                              "if there is no remedy: " + AGAIN % prefix)
    # all of it lies in EasyBuild's source path now
    shutil.rmtree(prefix + '/cache', ignore_errors=True)


def ranks_for(python: str, asked: Optional[int]) -> int:
    """On how many ranks to train on GPUs, `asked` by --ranks: one on each, since NCCL refuses two."""
    said = ask(python, 'import torch; print(torch.cuda.is_available() and torch.cuda.device_count())')
    if not said.isdigit():
        raise QuickstartError("PyTorch is installed, and finds no GPU that it can use",
                              "'nvidia-smi' says more; without: --cpu")
    if asked and asked > int(said):
        raise QuickstartError("there are %s GPUs for %d ranks, and each rank needs its own" % (said, asked),
                              "--ranks %s; or --cpu" % said)
    return asked or int(said)


def quickstart(args: argparse.Namespace, root: str = '/') -> None:
    """Everything, in order. For tests `root` stands for / where GPUs are looked for."""
    phases: List[Tuple[str, float]] = []

    def begin(title: str) -> None:
        phases.append((title, time.monotonic()))
        print("\n==> " + title, flush=True)

    prefix = claim(args.prefix)[0]
    loud = sorted('$' + name for name in os.environ if name.startswith(('EASYBUILD_', 'SLINGTORCH_')))
    if loud:
        print("not used, quickstart has a configuration of its own: " + ', '.join(loud))
    for name in set(os.environ):
        if not KEPT.match(name):
            del os.environ[name]
    # EasyBuild stumbles over a locale that is not installed, as ssh may bring one; mpiexec ends what hangs
    os.environ.update(LC_ALL='C.UTF-8', PYTHONNOUSERSITE='1', TMPDIR=prefix + '/tmp', PIP_CACHE_DIR=prefix + '/cache',
                      PIP_USER='0', MPIEXEC_TIMEOUT='600')
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    print("modules tool: %s\nPython:       %s" % (args.modules, sys.executable))
    easyconfig = choose(args.cpu, root)
    module = easyconfig[:-len('.eb')].replace('-', '/', 1)

    begin("EasyBuild, slingtorch and an MPI launcher in %s/venv" % prefix)
    set_up_tools(prefix)
    write_configuration(prefix, args.modules)

    begin("eb %s" % easyconfig)
    os.environ['PYTHONDONTWRITEBYTECODE'] = '1'    # the checkout may be another's, and stays as it is
    install_pytorch(prefix, easyconfig, module)

    python = '%s/easybuild/software/%s/bin/python' % (prefix, module)
    ranks = (args.ranks or 2) if easyconfig == gpus.CPU else ranks_for(python, args.ranks)
    begin("Training on %d rank%s" % (ranks, 's' * (ranks > 1)))
    train = "mpiexec -n %d conda-python-distributed %s" % (ranks, shlex.quote(EXAMPLE))
    print(train)
    status = run_activated(prefix, 'module load %s && exec env -u PYTHONDONTWRITEBYTECODE %s' % (module, train))
    if status:
        raise QuickstartError("training failed with status %d" % status, "the messages above say why",
                              "if the installation is damaged: " + AGAIN % prefix)
    print("\n==> Done")
    for (title, start), (_, end) in zip(phases, phases[1:] + [('', time.monotonic())]):
        print("  %8.1f s  %s" % (end - start, title))
    print("\nTo do it again by hand:\n\n  . %s/activate\n  module load %s\n  %s\n\nTo remove it: rm -r %s\n"
          "Next: docs/first-hour.md shows how to do this on a supercomputer." % (prefix, module, train, prefix))


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
    parser.add_argument('--ranks', metavar='N', type=int, choices=range(1, 49),
                        help="ranks to train on, 1 to 48 (default: one for each GPU, without GPUs 2)")
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
    except (OSError, RuntimeError, subprocess.SubprocessError) as err:
        lines, status = [str(arg) for arg in err.args] if isinstance(err, QuickstartError) else [str(err)], 1
    except KeyboardInterrupt:
        lines = ["interrupted; run the same command again to go on, or rm -r %s to remove it" % args.prefix]
        status = 130
    sys.stderr.write("\nquickstart: %s\n" % '\n            '.join(lines))
    return status
