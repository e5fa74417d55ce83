# SPDX-License-Identifier: GPL-2.0-only
"""Commands of job scripts, with stand-ins for the launchers and batch systems: all that they say and start."""
import itertools
import os
import re
import shutil
import subprocess
import sys

import pytest

import testbed
from testbed import ROOT
from testbed.expected import expected

# what each stand-in shows of a call: the variables that the command may set, and lists of hosts in files
SHOW = r'''#!/bin/bash
shown="+ ${0##*/} $*"
for name in MASTER_ADDR PBS_NODEFILE SLINGTORCH_LEAVE_OUT SLURM_{JOB_NUM_NODES,KILL_BAD_EXIT,NTASKS,NPROCS} \
    SLURM_{TASKS_PER_NODE,DISTRIBUTION,GPUS_PER_TASK,TRES_PER_TASK,GPU_BIND,TRES_BIND}; do
    [[ ! -v $name ]] || shown+=", $name=${!name}"
done
for word; do
    [[ ! -f ${word#--exclude=} || $word != *vet-* ]] || shown+=", there: $(paste -sd' ' "${word#--exclude=}")"
done
echo "$shown"
'''
LAUNCHER = SHOW + r'''
if [[ $* == *--vet* ]]; then
    [[ -z ${GOOD-} ]] || { printf '%s\n' $GOOD > "${@: -1}.vetted"; : > "${@: -1}.cordon"; }
    [[ -z ${BAD-} ]] || printf '%s\n' $BAD >> "${@: -1}.cordon"
    exit
fi
start=$(($(cat started 2> /dev/null) + 1))
echo $start > started
step=$(cut -d, -f$start <<< "${PROGRAM-0}")
[[ $step != save* ]] || { mkdir -p ckpt/s; echo > ckpt/s/new.part; touch -d @$start ckpt/s/new.part; mv ckpt/s/new.part ckpt/s/$start; echo > ckpt/x.part; }
[[ $step != *deaf* ]] || trap '' USR1
[[ $step != *[a-z]1* && $step != *term* && $step != *deaf* ]] || {
    exec {never}<> <(:)
    [[ $step == *deaf* ]] || trap 'exit 85' USR1
    trap 'exit 7' TERM
    [[ $step != *zero* ]] || trap 'exit 0' USR1
    [[ $step != *both* ]] || trap 'kill -TERM $PPID; exit 85' USR1
    [[ $step == *term* ]] && kill -TERM $PPID || kill -USR1 $PPID
    read -rt 50 -u $never
}
exit ${step//[!0-9]/}
'''
# a batch system ends a job that is requeued
STAND_INS = {
    'srun': LAUNCHER, 'mpiexec': LAUNCHER, 'flux': LAUNCHER,
    'scontrol': SHOW + '[[ $1 != requeue ]] || kill -KILL 0\necho " Requeue=${REQUEUE-1} "\n',
    'qrerun': SHOW + 'exit ${FAILS-0}\n', 'sinfo': 'echo "$NODES"\n',
    'singularity': '[[ $* != *distributions* ]] || exec "${@:3}"\n' + SHOW + r'''
for name in $(compgen -e | grep ^APPTAINER); do
    twin=SINGULARITY${name#APPTAINER}
    [[ ${!twin-} == "${!name}" ]] && twin=both || twin="${!twin-}"
    echo -n "${name#APPTAINER}=${!name} ($twin) "
done
echo
exit ${STATUS-0}
'''}


@pytest.fixture
def say(tmp_path):
    """Function that starts a runscript among the stand-ins: its name, all that it and they printed, its status."""
    (tmp_path / 'bin').mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / 'bin' / name).write_text(text if text.startswith('#!') else '#!/bin/bash\n' + text)
        (tmp_path / 'bin' / name).chmod(0o755)

    def call(scene, *args, files=None, **env):
        for path in tmp_path.iterdir():
            if path.name not in ('bin', 'installed'):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        env = {'PATH': f'{tmp_path}/bin:/usr/bin:/bin', **{name: str(value) for name, value in env.items()}}
        start = ['/bin/bash', '-c', '[[ -z ${BATCH-} ]] || export SLURM_TASK_PID=$$; exec "$@"', 'bash', ROOT / 'runscripts' / args[0]]
        done = subprocess.run([*start, *args[1:]], env=env, cwd=tmp_path, text=True, timeout=100, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        text = done.stdout.replace(str(ROOT), 'ROOT').replace(str(tmp_path), 'DIR')
        left = '; '.join(f'{path.name}: {" ".join(path.read_text().split())}'
                         for path in sorted(tmp_path.glob('*[.-]*')) if path.is_file())
        text = f'{scene}, status {done.returncode}:\n{text}{left}'.rstrip('\n')
        return (text if text.count('\n') > 1 else text.replace('\n', ' ')) + '\n'
    return call


def test_with_spares(say):
    hosts = {'nodes': 'a.hsn\na.hsn\n\nb.hsn\nc.hsn\n'}
    slurm = {'SLURM_JOB_NUM_NODES': 3, 'SLURM_JOB_ID': 7, 'GOOD': 'n1 n3', 'BAD': 'n2'}
    pbs = {'PBS_NODEFILE': 'nodes', 'PBS_JOBID': '12.server', 'GOOD': 'c a', 'BAD': 'b', 'files': hosts}
    per_task = {'SLURM_GPUS_PER_TASK': 1, 'SLURM_GPUS_ON_NODE': 4, **dict.fromkeys(
        ('SLURM_NTASKS', 'SLURM_NPROCS', 'SLURM_TASKS_PER_NODE', 'SLURM_DISTRIBUTION', 'SLURM_GPU_BIND', 'SLURM_TRES_BIND'), 'x')}
    srun, mpiexec = ('with-spares', '1', 'srun'), ('with-spares', '1', 'mpiexec', '-ppn', '4')
    expected(
        say('Slurm', *srun, '--ntasks-per-node=4', 'train', '-n', '7', **slurm, **per_task)
        + say('nodes that until-done leaves out, another directory', *srun, 'train', **{**slurm, 'SLURM_JOB_ID': '', 'BAD': ''},
              SLINGTORCH_LEAVE_OUT='n8,n9', SLINGTORCH_VET_DIR='bin/../', SLURM_GPUS_ON_NODE=4)
        + say('no bad node', 'with-spares', '0', 'srun', 'train', **{**slurm, 'GOOD': 'n1 n2 n3', 'BAD': ''}, SLURM_TRES_PER_TASK='x', SLURM_GPUS_ON_NODE=8)
        + say('too many bad nodes', *srun, 'train', **{**slurm, 'GOOD': 'n1', 'BAD': 'n2 n3'})
        + say('nothing is measured', *srun, 'train', SLURM_JOB_NUM_NODES=3, files={'vet-job.vetted': '', 'vet-job.cordon': ''})
        + say('PBS', *mpiexec, '--cpu-bind', 'numa', 'train', '-n', '7', **pbs)
        + say('PBS, other names', 'with-spares', '2', 'mpiexec', '--ppn=2', 'train', **{**pbs, 'GOOD': 'c.hsn b.hsn'})
        + say('PBS, too few', 'with-spares', '0', *mpiexec[2:], 'train', **pbs)
        + ''.join(say(' '.join(args), 'with-spares', *args, **env) for args, env in [
            ((), {}), (('x', 'srun'), {}), (('1', 'mpirun'), {}), (('1', 'srun', 'a'), {'SLURM_JOB_NUM_NODES': 'x'}),
            (('3', 'srun', 'a'), slurm), (('1', 'srun', '-v', '-N2', 'a'), slurm), (('1', 'srun', '--nodelist=x', 'a'), slurm),
            (('1', 'mpiexec', 'a'), pbs), (('1', 'mpiexec', '-ppn', '0', 'a'), pbs), (mpiexec[1:], {'PBS_NODEFILE': '/x'}),
            ((*mpiexec[1:], '-n', '8', 'a'), pbs), ((*mpiexec[1:], '--hosts=x', 'a'), pbs)]),
        'with-spares')


def test_until_done(say):
    slurm = {'BATCH': 1, 'SLURM_JOB_ID': 7, 'SLURM_JOB_NUM_NODES': 3, 'SLURM_JOB_NODELIST': 'n[1-3]', 'GOOD': 'n1 n2', 'BAD': 'n3'}
    slurm['NODES'] = 'n1 allocated\nn2 mixed\nn3 completing'
    pbs = {'PBS_JOBID': '12.server'}
    command = ('until-done', '--checkpoint', 'ckpt')
    srun, mpiexec = (*command, 'srun', 'train'), (*command, 'mpiexec', 'train')
    text = (
        say('done', *command, 'srun', 'train', '--checkpoint', 'x', **slurm)
        + say('fails, goes on and is done', *srun, **slurm, PROGRAM='save3,save4,0', SLURM_KILL_BAD_EXIT=0)
        + say('no progress', *srun, **slurm, PROGRAM='save3,4,5', files={'ckpt.starts': 'what is this'})
        + say('too many starts', 'until-done', '--checkpoint=ckpt/', '--restarts=1', 'srun', 'train', **slurm, PROGRAM='save3,save4')
        + say('after another job', *mpiexec, **pbs, PROGRAM='3', files={'ckpt.starts': '5 1 ran 9 s, status 3, saved nothing'})
        + say('requeued', *srun, **slurm, PROGRAM='saveusr1')
        + say('status 0 after the signal', *srun, **slurm, PROGRAM='saveusr1zero')
        + say('requeued in PBS, which fails', *mpiexec, **pbs, PROGRAM='saveusr1', FAILS=3)
        + say('submitted', *command, '--submit', 'echo next; exit $FAILS', 'flux', 'run', FLUX_ENCLOSING_ID='f1', FLUX_JOB_ID='f2',
              FAILS=0, PROGRAM='usr1')
        + say('submitted in vain', *command, '--submit', 'exit $FAILS', 'srun', 'train', **slurm, REQUEUE=0, PROGRAM='usr1', FAILS=3)
        + say('cancelled', *srun, **slurm, PROGRAM='term')
        + say('cancelled while it saves', *srun, **slurm, PROGRAM='saveboth1')
        + say('no end after the signal', *command, '--grace=0', *mpiexec[3:], **pbs, PROGRAM='savedeaf', FAILS=1)
        + say('a node is down', *command, '--spares', '1', *srun[3:], **{**slurm, 'NODES': 'n1 mixed\nn2 idle\nn3 mixed*', 'BAD': ''},
              PROGRAM='0')
        + say('one spare', *command, '--spares=1', *srun[3:], **{**slurm, 'NODES': 'n1 allocated\nn2 drained\nn2 drained', 'BAD': ''})
        + say('no spare', *srun, **{**slurm, 'NODES': 'n1 down'})
        + say('nothing can be written', *mpiexec, **pbs, files={'ckpt.starts/x': ''}))
    with_mistakes = [
        (mpiexec[1:], {}), (('mpiexec',), pbs), (('--checkpoint=ckpt', './train'), pbs), (('--checkpoint=ckpt',), pbs),
        (('--checkpoint',), pbs), (('--checkpoint=',), pbs), (('--restarts=x', 'srun'), pbs), (('--spares', '01', 'srun'), pbs),
        (('--requeue', '1', 'srun'), pbs), (('--checkpoint=no/ckpt', 'srun'), pbs), (srun[1:], {'SLURM_JOB_ID': 1}),
        (srun[1:], {'SLURM_JOB_ID': 1, 'SLURM_TASK_PID': os.getpid()}), (srun[1:], {**slurm, 'REQUEUE': 0}),
        ((*command[1:], 'flux', 'run'), {'FLUX_JOB_ID': 'f1'})]
    text += ''.join(say(' '.join(args), 'until-done', *args, **env) for args, env in with_mistakes)
    expected(re.sub(r'ran \d+ s', 'ran N s', text), 'until-done')


CONF = """image=small.sif
easyconfig=Small-1.0.eb
bind=DIR/installed/data:/data
bind=DIR/gone:/gone
path=/user-software/venv/mine/bin
path=/small
env=COLOUR=dark blue
env=ONLY=small
gpu=NV
python=PYTHON
"""


@pytest.fixture
def installed(tmp_path):
    """An installation of an image, with its commands beside it."""
    root = tmp_path / 'installed'
    shutil.copytree(ROOT / 'runscripts/container', root / 'bin')
    for name, target in (('python', 'in-container'), ('pip', 'in-container'), ('start-shell', 'in-container'),
                         ('unmake-squashfs', 'make-squashfs')):
        (root / 'bin' / name).symlink_to(target)
    for name in ('data', 'user-software', 'runscripts/lib', 'packages/Some_Thing-1.5+local.dist-info'):
        (root / name).mkdir(parents=True)
    (root / 'packages/Some_Thing-1.5+local.dist-info/METADATA').write_text('Metadata-Version: 2.1\nName: Some_Thing\nVersion: 1.5+local\n')
    (root / 'runscripts/lib/version').write_text('1.2.3\n')
    (root / 'container.conf').write_text(CONF.replace('DIR', str(tmp_path)).replace('PYTHON', sys.executable))
    (root / 'small.sif').write_bytes(bytes(48) + bytes(range(16)))
    return root


def test_containers(say, installed):
    """in-container and its links, list-packages and check-container: what the runtime is given."""
    own, start = str(installed), str(installed / 'bin/in-container')
    twice = {f'{name}{end}': value for name in ('SINGULARITY', 'APPTAINER') for end, value in (
        ('_BINDPATH', f'{own}/data:/data,{own}/user-software:/user-software'), ('ENV_COLOUR', 'dark blue'),
        ('ENV_PREPEND_PATH', '/user-software/venv/mine/bin:/small'))}
    (installed / 'other').mkdir()
    (installed / 'tools').mkdir()
    shutil.copy(installed.parent / 'bin/singularity', installed / 'tools/apptainer')
    (installed / 'other/container.conf').touch()

    def brief(scene, *args, **env):
        return say(scene, f'{own}/bin/{args[0]}', *args[1:], **env).partition('\nENV_')[0].rstrip().replace(':\n+', ': +') + '\n'

    text = (
        say('without the module', start, 'python', 'train.py', 'a b', STATUS=7)
        + say('with the module, and the central image', start, 'true', **twice, CONTAINERROOT=own, SIF=f'{own}/container.conf')
        + say('added after loading', start, 'true', **{
            **twice, 'APPTAINER_BINDPATH': f'{own}/data:/data,/x:/y', 'SINGULARITYENV_PREPEND_PATH': '/mine:/small:/b?n',
            'SINGULARITYENV_COLOUR': 'red', 'APPTAINERENV_ONLY': '', 'SINGULARITY_NV': 0})
        + say('module of another container', start, 'true', **twice, CONTAINERROOT=f'{own}/other', APPTAINERENV_X=1,
              SLINGTORCH_CONTAINER_ENVIRONMENT='COLOUR X', SIF='/other.sif', APPTAINER_NV=0)
        + brief('shell', 'start-shell') + brief('shell with arguments', 'start-shell', '-c', 'x')
        + say('identity', start, '--identity', SLURMD_NODENAME='n1') + say('identity', start, '--identity', SLURMD_NODENAME='n1', STATUS=1)
        + say('no arguments', start) + say('no runtime', start, 'true', PATH='/usr/bin:/bin')
        + brief('the other runtime', 'in-container', 'true', PATH=f'{own}/tools:/usr/bin:/bin')
        + say('version', start, '--version') + say('version', f'{own}/bin/list-packages', '--version')
        + say('version', f'{own}/bin/check-container', '--version') + say('version', f'{own}/bin/make-squashfs', '--version')
        + ''.join(say(f'list-packages {" ".join(args)}', f'{own}/bin/list-packages', *args, PYTHONPATH=f'{own}/packages').split(
            'SINGULARITY_NV=1\n')[-1] for args in [('Some.thing',), ('some-thing==1.5',), ('some_thing==2', 'none')])
        + brief('pip that installs', 'pip', '-q', 'install', 'x'))
    for scene, launcher in [('one image', 'n1 a A\nn2 a A'), ('two images', 'n1 a A\nn2 b B\nn3 a A'), ('no answer', 'x y z')]:
        answers = ''.join(f'slingtorch-image {line}\n' if 'y' not in line else line for line in launcher.splitlines()).replace(' ', '\t')
        said = say(scene, f'{own}/bin/check-container', 'bash', '-c', 'echo "asked for $*" >&2; cat answers', files={'answers': answers})
        text += ''.join(sorted(said.splitlines(True)))   # bash has its own order of nodes
    text += say('the launcher fails', f'{own}/bin/check-container', 'false')
    text += say('outside a job', f'{own}/bin/check-container') + say('in a job', f'{own}/bin/check-container', SLURM_JOB_NUM_NODES=2)
    (installed / 'container.conf').write_text((installed / 'container.conf').read_text().replace('path=/user-software', 'path=/x'))
    text += brief('no environment', 'python', '-m', 'pip', 'uninstall', 'x') + brief('elsewhere', 'pip', 'install', '--user', 'x')
    (installed / 'user-software').rmdir()
    text += brief('no place', 'python', '-m', 'pip', 'install', 'x')
    (installed / 'user-software.squashfs').touch()
    text += say('empty image file', start, 'true')
    (installed / 'user-software.squashfs').write_text('x')
    text += brief('read-only', 'pip', 'install', 'x') + say('image file', start, 'true')
    (installed / 'small.sif').unlink()
    text += say('no image', start, 'true')
    (installed / 'container.conf').unlink()
    text += say('no settings', start, 'true')
    expected(text.replace(str(sys.executable), 'PYTHON'), 'containers')


def test_user_software_in_one_file_and_back(say, installed):
    own, packages = f'{installed}/bin/', installed / 'user-software'
    tools = testbed.path_without('mksquashfs', installed / 'tools')
    text = say('usage', f'{own}make-squashfs', 'x') + say('no tools', f'{own}make-squashfs', PATH=tools)
    text += say('nothing', f'{own}make-squashfs') + say('nothing', f'{own}unmake-squashfs')
    (packages / 'with space').mkdir()
    (packages / 'with space/file -> x').write_text('content')
    (packages / 'link').symlink_to('with space')
    for scene, command in (('packed', 'make'), ('packed already', 'make'), ('unpacked', 'unmake')):
        text += say(scene, f'{own}{command}-squashfs')
        text += ', '.join(str(path.relative_to(installed)) for path in sorted(installed.rglob('*user-soft*/**/*'))) + '\n'
    say('packed', f'{own}make-squashfs')
    failing = installed / 'failing'
    for name, command, status in [('unsquashfs', 'unmake', 1), ('mv', 'unmake', 1), ('rm', 'unmake', 1), ('mksquashfs', 'make', 1),
                                  ('mv', 'make', 1), ('mksquashfs', 'make', 0), ('unsquashfs', 'unmake', 0)]:
        say('the other state', f'{own}{"unmake" if command == "make" else "make"}-squashfs')
        failing.mkdir()
        (failing / name).write_text(f'#!/bin/sh\n[ "$1" = -rf ] && exec /bin/rm "$@"\necho of the program\nexit {status}\n')
        (failing / name).chmod(0o755)
        text += say(f'{name} fails', f'{own}{command}-squashfs', PATH=f'{failing}:/usr/bin:/bin')
        shutil.rmtree(failing)
        say('finished', f'{own}{command}-squashfs')
    say('packed', f'{own}make-squashfs')
    (packages / 'other').touch()
    text += say('both differ', f'{own}make-squashfs') + say('both differ', f'{own}unmake-squashfs')
    (installed / 'user-software.squashfs').write_text('')
    text += say('empty', f'{own}make-squashfs')
    (installed / 'user-software.squashfs').unlink()
    packages.rename(installed / 'moved')
    packages.symlink_to('moved')
    text += say('a link', f'{own}make-squashfs')
    packages.unlink()
    (installed / '.user-software.lock').unlink()
    (installed / '.user-software.lock').mkdir()
    text += say('no lock', f'{own}make-squashfs')
    expected(re.sub(r'(?m)^Could not open.*\n', '', text), 'squashfs')


@pytest.mark.parametrize('name', ['cpu-bind', 'extend-venv-activate', 'get-master', 'until-done', 'with-spares', 'container/in-container',
                                  'container/list-packages', 'container/check-container'])
def test_help_is_the_head_of_the_file(name):
    lines = (ROOT / 'runscripts' / name).read_text().splitlines()[2:]
    head = itertools.takewhile(lambda line: line.startswith('#') and not line.startswith('# shellcheck'), lines)
    done = testbed.run(['/bin/bash', ROOT / 'runscripts' / name, '--help'])
    assert (done.stdout + done.stderr).strip() == '\n'.join(re.sub('^# ?', '', line) for line in head)


@pytest.mark.parametrize('name', ['conda-python-distributed', 'conda-python-simple', 'cpu-bind', 'extend-venv-activate', 'get-master',
                                  'until-done', 'with-spares'])
def test_version(name):
    done = testbed.run([ROOT / 'runscripts' / name, '--version'])
    assert (done.stdout, done.stderr) == ((ROOT / 'runscripts/lib/version').read_text(), '')
