# SPDX-License-Identifier: GPL-2.0-only
"""The job scripts for Derecho, with commands in place of `qsub`, `eb` and `mpiexec`; and the test programs."""
import ast
import json
import os
import re
import shlex
import shutil
import sys

import pytest

from testbed import ROOT, derecho, forkedeb, parse_env0, run
from testbed.slurm import free_ports

EXAMPLES = ROOT / 'examples/derecho'
EASYCONFIGS = {path.name: path for path in (ROOT / 'easyconfigs').rglob('*derecho*.eb')}
RECORD = '#!/bin/bash\nprintf "%s|" {name} "$@" >> "{log}"; printf "\\n" >> "{log}"\n'

# real eb tells its configuration; where and with which settings the other calls are made is written down
EB = RECORD + """case " $* " in
    *' --show-full-config '*) exec {path}/forked/eb "$@" ;;
esac
pwd > {path}/eb-directory
env -0 > {path}/eb-environment
exit "${{EB_STATUS:-0}}"
"""
# what test_imports.py imports must be there
# keeps the job script as it is when submitted, and the variables of -v as PBS reads them
QSUB = """#!{python}
import getopt, json, os, shlex, sys
with open('{log}', 'a') as log:
    log.write('|'.join(['qsub'] + sys.argv[1:]) + '|\\n')
options, words = getopt.getopt(sys.argv[1:], 'A:W:v:V')
variables = dict(os.environ) if ('-V', '') in options else dict()
for name, value in options:
    if name == '-v':
        pairs = shlex.shlex(value, posix=True)
        pairs.whitespace, pairs.whitespace_split = ',', True
        for pair in pairs:
            key, equals, value = pair.partition('=')
            variables[key] = value if equals else os.environ[key]
with open(words[0]) if words else sys.stdin as script:
    text = script.read()
with open('{path}/submitted', 'w') as submitted:
    json.dump(dict(script=text, variables=variables, directory=os.getcwd()), submitted)
print('1.desched1')
sys.exit(int(os.environ.get('QSUB_STATUS', '0')))
"""


class Login:
    """A login node of the emulated Derecho, whose commands `eb`, `qsub` and `mpiexec` write down their calls."""

    def __init__(self, path, lmod):
        self.path = path
        self.lmod = lmod
        self.log = path / 'calls'
        self.home = path / 'home'
        self.home.mkdir()
        self.derecho = derecho.Derecho(path / 'derecho')
        for name, text in (('eb', EB), ('qsub', QSUB), ('mpiexec', RECORD), ('python', RECORD)):
            derecho.script(path / 'bin' / name, text.format(name=name, log=self.log, path=path, python=sys.executable))
        (path / 'forked').mkdir()
        forkedeb.command(path / 'forked/eb')
        (path / 'bin/slingtorch').symlink_to(shutil.which('slingtorch'))

    def bash(self, script, *args, env=None, check=True, cwd=None):
        """Run a script file as a login shell's child, in which `module` works."""
        environment = {'PATH': f'{self.path}/bin:{os.environ["PATH"]}', 'HOME': self.home, 'SLINGTORCH_SITE': None,
                       **(env or {})}
        command = f'module purge; export -f module; bash {shlex.join([str(script), *args])}'
        return self.lmod.bash(command, modulepath=[self.path / 'own', self.derecho.modulepath], env=environment,
                              check=check, cwd=cwd or self.path)

    def build(self, *args, env=None, **kwargs):
        """Run build.sh; what it submitted."""
        done = self.bash(EXAMPLES / 'build.sh', *args, env={'PBS_ACCOUNT': 'SCSG0001', **(env or {})}, **kwargs)
        return done, json.loads((self.path / 'submitted').read_text())

    def job(self, submitted, check=True, **variables):
        """Run what was submitted as PBS does: in the home directory, with few variables, the script as it was then."""
        init = self.path / 'module-init'
        uses = '\n'.join(f'module use {path}' for path in (self.derecho.modulepath, self.path / 'own'))
        lmod = f'export LMOD_CMD={self.lmod.variables["LMOD_CMD"]}\n{self.lmod.init}'
        init.write_text(f'unset BASH_ENV\n{lmod}\n{uses}\n')
        script = derecho.script(self.path / 'spool/1.desched1.SC', submitted['script'])
        return run(['bash', script], check=check, cwd=self.home, env={
            'PATH': '/usr/local/bin:/usr/bin:/bin', 'HOME': str(self.home), 'USER': 'me', 'BASH_ENV': str(init),
            'PBS_JOBID': '1.desched1', 'PBS_ENVIRONMENT': 'PBS_BATCH', 'PBS_O_WORKDIR': submitted['directory'],
            **submitted['variables'], **variables})

    def gpu_job(self, script, **kwargs):
        """Run test.sh or train.sh on two nodes."""
        nodefile = self.path / 'nodes'
        nodefile.write_text('deg0001\n' * 4 + 'deg0002\n' * 4)
        directory = ROOT / 'examples/training' if script == 'train.sh' else ROOT
        env = {'PBS_NODEFILE': nodefile, 'PBS_O_WORKDIR': directory, 'PBS_JOBID': '1.desched1',
               **kwargs.pop('env', {})}
        return self.bash(EXAMPLES / script, env=env, **kwargs)

    def install(self, directory, pytorch='2.4.0'):
        """A module of PyTorch."""
        self.derecho.module(directory, f'PyTorch/{pytorch}-derecho-cray-mpich', 'setenv("RUNSCRIPTS", "/runscripts")',
                            f'setenv("EBVERSIONPYTORCH", "{pytorch}")')

    @property
    def calls(self):
        """What was called, a list of words each."""
        return [line.split('|')[:-1] for line in self.log.read_text().splitlines()] if self.log.exists() else []

    @property
    def builds(self):
        """Calls of eb that are more than a question."""
        return [call[1:] for call in self.calls if call[0] == 'eb' and '--show-full-config' not in call]

    def environment(self, everything=False):
        """The settings with which eb was called last."""
        found = parse_env0((self.path / 'eb-environment').read_text())
        return {name: value for name, value in found.items()
                if everything or name.startswith(('EASYBUILD_', 'SLINGTORCH_', 'CCACHE_'))}

    def configuration(self, option):
        """What EasyBuild makes of the settings of the last call."""
        done = forkedeb.eb(['--show-full-config'], self.environment(everything=True), self.path)
        return re.search(rf'^{option} +\([A-Z]\) = (.*)$', done.stdout, re.M).group(1)


@pytest.fixture
def login(tmp_path, lmod):
    (tmp_path / 'own').mkdir()
    return Login(tmp_path, lmod)


# --- build.sh

DEFAULT = ['PyTorch-2.4.0-derecho-cray-mpich.eb']


def test_build_script_fetches_then_builds_in_a_job(login):
    _, submitted = login.build()
    assert login.builds == [[*DEFAULT, '--robot', '--fetch']]
    assert login.calls[-1][:5] == ['qsub', '-A', 'SCSG0001', '-W', 'block=true']
    assert set(DEFAULT) <= set(EASYCONFIGS)
    fetched = login.environment()
    directives = [line for line in submitted['script'].splitlines() if line.startswith('#PBS ')]
    assert submitted['script'].splitlines()[1:6] == directives and '#PBS -l select=1:ncpus=128:mem=230GB' in directives

    login.job(submitted)
    assert login.builds[1:] == [[*DEFAULT, '--robot']]
    built = login.environment()
    assert login.configuration('max-parallel') == '96'
    assert {**fetched, 'EASYBUILD_MAX_PARALLEL': '96'} == built and 'EASYBUILD_HOOKS' in built
    assert built['SLINGTORCH_SITE'] == 'derecho'


def test_build_job_gets_the_modules_of_its_generation(login):
    words = ['--rebuild', 'PyTorch-2.6.0-derecho-cray-mpich.eb', '--robot']
    _, submitted = login.build(*words[:2], env={'NCARENV': '24.12'})
    script = submitted['script'].replace('\nexec eb', '\nmodule -t list 2>&1\nexec eb')
    # what a shell may have at its start
    script = script.replace('pipefail\n', 'pipefail\nmodule load ncarenv/23.09 libfabric/1.15.2.0\n', 1)
    done = login.job({**submitted, 'script': script})
    assert done.stdout.split() == ['ncarenv/24.12']
    assert login.builds == [[*words, '--fetch'], words]


ODD = "/glade/a b,c='d' \"e\" $HOME `f` \\ \n%g"


def test_build_job_has_the_users_settings(login):
    """Whatever is in the values: qsub -v would end them at a comma. It starts where the easyconfigs were fetched, where
    a file of the user's may lie, and ends with the status of eb."""
    mine = login.path / 'my easyconfigs'
    mine.mkdir()
    settings = {'EASYBUILD_SOURCEPATH': '/glade/my sources:/glade/$more', 'EASYBUILD_PREFIX': '/glade/work/me/eb, 2',
                'SLINGTORCH_SITE_GROUPS': 'gdr', 'EASYBUILD_MAX_PARALLEL': '32', 'CCACHE_DIR': ODD}
    _, submitted = login.build('PyTorch-2.4.0-derecho-cray-mpich.eb', env=settings, cwd=mine)
    fetched = login.environment()
    assert (login.path / 'eb-directory').read_text() == f'{mine}\n'
    assert login.job(submitted, check=False, EB_STATUS='7').returncode == 7
    assert len(login.builds) == 2 and (login.path / 'eb-directory').read_text() == f'{mine}\n'
    built = login.environment()
    assert built == fetched
    bundle = f'{ROOT}/patches:{ROOT}/runscripts'
    assert built == {**built, **settings, 'EASYBUILD_SOURCEPATH': f'{settings["EASYBUILD_SOURCEPATH"]}:{bundle}'}
    assert login.configuration('installpath') == '/glade/work/me/eb, 2'


def test_build_job_reads_the_users_configuration_file(login):
    """Without EASYBUILD_PREFIX the prefix is that of EasyBuild's configuration file, also in the job."""
    config = login.home / '.config/easybuild/config.cfg'
    config.parent.mkdir(parents=True)
    config.write_text('[config]\nprefix = /glade/work/me/configured\n[override]\nmax-parallel = 24\n')
    done, submitted = login.build()
    assert 'module use /glade/work/me/configured/modules/all' in done.stdout
    login.job(submitted)
    assert login.configuration('installpath') == '/glade/work/me/configured'
    assert login.configuration('max-parallel') == '24'


def test_build_script_takes_options(login):
    """An option leaves the default easyconfigs in their place."""
    done, submitted = login.build('--prefix=/glade/work/me/my eb', '--rebuild')
    options = ['--prefix=/glade/work/me/my eb', '--rebuild']
    login.job(submitted)
    assert login.builds == [[*DEFAULT, *options, '--robot', '--fetch'], [*DEFAULT, *options, '--robot']]
    assert r'module use /glade/work/me/my\ eb/modules/all' in done.stdout
    assert login.environment()['EASYBUILD_SOURCEPATH'].startswith('/glade/work/me/my eb/sources:')


JOB = {'PBS_JOBID': '1.desched1'}


@pytest.mark.parametrize('words, env, says', [
    (['--prefix', '/glade/work'], {}, ["'/glade/work' is neither", '--prefix=']),
    (['PyTorch-2.6.0-derecho-cray-mpich'], {}, ["'PyTorch-2.6.0-derecho-cray-mpich' is neither", '--prefix=']),
    ([], {'PBS_ACCOUNT': None}, ['name the project to charge']),
    # an interactive job, or the script submitted by hand: nothing can be downloaded there
    ([], {**JOB, 'PBS_ENVIRONMENT': 'PBS_INTERACTIVE'}, ['login node', 'eb NAME.eb --robot --fetch']),
    ([], {**JOB, 'PBS_ENVIRONMENT': 'PBS_BATCH'}, ['login node', 'eb NAME.eb --robot --fetch'])])
def test_build_script_refuses(login, words, env, says):
    done = login.bash(EXAMPLES / 'build.sh', *words, env={'PBS_ACCOUNT': 'SCSG0001', **env}, check=False)
    assert done.returncode == 1 and 'unbound' not in done.stderr and login.builds == []
    assert [word for word in says if word not in done.stderr] == []


def test_build_job_is_private_and_leaves_no_file(login):
    login.log.write_text('')
    temporary = login.path / 'tmp'
    temporary.mkdir()
    derecho.script(login.path / 'bin/qsub', RECORD.format(name='qsub', log=login.log) +
                   f'stat -c %a "${{!#}}" > {login.path}/mode\nexit 3\n')
    done = login.bash(EXAMPLES / 'build.sh', check=False, env={'PBS_ACCOUNT': 'SCSG0001', 'TMPDIR': temporary})
    assert done.returncode == 3 and 'slingtorch-build.o' in done.stderr
    assert (login.path / 'mode').read_text() == '600\n' and list(temporary.glob('slingtorch*')) == []
    assert 'module use' not in done.stdout


def test_build_script_submits_nothing_if_a_download_fails(login):
    done = login.bash(EXAMPLES / 'build.sh', check=False, env={'PBS_ACCOUNT': 'SCSG0001', 'EB_STATUS': '5'})
    assert done.returncode != 0 and 'download' in done.stderr
    assert [call for call in login.calls if call[0] == 'qsub'] == []


@pytest.mark.parametrize('name, remedy', [('slingtorch', 'pip install'), ('eb', 'pip install'),
                                          ('qsub', 'login node')])
def test_build_script_says_which_command_is_missing(login, name, remedy):
    (login.path / 'bin' / name).unlink()
    path = [entry for entry in os.environ['PATH'].split(':') if not os.path.exists(f'{entry}/{name}')]
    done = login.bash(EXAMPLES / 'build.sh', check=False, env={
        'PBS_ACCOUNT': 'SCSG0001', 'PATH': ':'.join([f'{login.path}/bin', *path])})
    assert done.returncode == 1 and f'the command {name} is not in PATH' in done.stderr and remedy in done.stderr
    assert login.builds == []


# --- test.sh and train.sh

def test_batch_jobs(login):
    """Eight ranks on two nodes, and no other test program than those that are there."""
    login.install(login.path / 'own')
    login.gpu_job('test.sh')
    login.gpu_job('train.sh')
    ranks = [call for call in login.calls if call[0] == 'mpiexec']
    assert len(ranks) == 6 and all(call[1:7] == ['-n', '8', '-ppn', '4', '--cpu-bind', 'numa'] for call in ranks)
    programs = {word for call in login.calls for word in call if word.endswith('.py') and '/' in word}
    assert len(programs) == 4 and all((ROOT / program).is_file() for program in programs)
    nccl = [call for call in ranks if 'nccl' in call]
    assert len(nccl) == 3 and all(call[7] == '/runscripts/conda-python-distributed' for call in nccl)


def test_default_module_is_that_of_an_easyconfig():
    for script in ('test.sh', 'train.sh'):
        pytorch = re.search(r'PYTORCH_MODULE:-(\S+?)\}', (EXAMPLES / script).read_text()).group(1)
        assert f'{pytorch.replace("/", "-", 1)}.eb' in EASYCONFIGS


def test_another_pytorch_is_tested(login):
    login.install(login.path / 'own')
    login.install(login.path / 'own', '2.6.0')
    login.gpu_job('test.sh', env={'PYTORCH_MODULE': 'PyTorch/2.6.0-derecho-cray-mpich'})
    assert len([call for call in login.calls if call[0] == 'mpiexec']) == 5


@pytest.mark.parametrize('script', ['test.sh', 'train.sh'])
@pytest.mark.parametrize('variable, below', [
    ('EASYBUILD_INSTALLPATH_MODULES', ''), ('EASYBUILD_INSTALLPATH', 'modules'), ('EASYBUILD_PREFIX', 'modules'),
    ('HOME', '.local/easybuild/modules')])
def test_jobs_find_the_modules_where_they_were_installed(login, script, variable, below):
    prefix = login.path / 'glade work'
    login.install(prefix / below / 'all')
    # EasyBuild takes the more special variable
    order = ['EASYBUILD_PREFIX', 'EASYBUILD_INSTALLPATH', 'EASYBUILD_INSTALLPATH_MODULES']
    env = {name: '/nonexistent' for name in order[:order.index(variable)]} if variable in order else {}
    login.gpu_job(script, env={**env, variable: prefix})
    assert login.calls[-1][0] == 'mpiexec'


@pytest.mark.parametrize('script', ['test.sh', 'train.sh'])
def test_jobs_say_where_modules_were_looked_for(login, script):
    done = login.gpu_job(script, env={'EASYBUILD_PREFIX': '/glade/nothing'}, check=False)
    assert done.returncode == 1 and '/glade/nothing/modules/all' in done.stderr
    assert 'qsub -v EASYBUILD_PREFIX' in done.stderr and login.calls == []


@pytest.mark.parametrize('script, program', [('test.sh', 'test_imports.py'), ('train.sh', 'ddp_training.py')])
def test_jobs_in_the_wrong_place(login, script, program):
    """Not in a job, or submitted from a directory where the programs are not."""
    login.install(login.path / 'own')
    done = login.gpu_job(script, env={'PBS_NODEFILE': None}, check=False)
    assert done.returncode == 1 and 'qsub -A <project>' in done.stderr and 'unbound' not in done.stderr
    done = login.gpu_job(script, env={'PBS_O_WORKDIR': login.path}, check=False)
    assert done.returncode == 1 and program in done.stderr and login.calls == []


@pytest.mark.parametrize('script', ['test.sh', 'train.sh'])
def test_jobs_without_the_command_module(login, script):
    done = run(['bash', EXAMPLES / script], check=False, cwd=ROOT / 'examples/training', env={
        'PATH': '/usr/bin:/bin', 'HOME': str(login.home), 'PBS_NODEFILE': str(login.path / 'nodes'),
        'TESTS': str(EXAMPLES)})
    assert done.returncode == 1 and f"{script}: there is no command module in this job" in done.stderr
    assert '. /etc/profile' in done.stderr


def test_training_program_finds_what_it_imports():
    """In the environment of every PyTorch for Derecho."""
    tree = ast.parse((ROOT / 'examples/training/ddp_training.py').read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split('.')[0] for name in names} - set(sys.stdlib_module_names) == {'torch', 'sklearn'}
    easyconfigs = [path for name, path in EASYCONFIGS.items() if name.endswith('-derecho-cray-mpich.eb')]
    assert easyconfigs
    for path in easyconfigs:
        listed = re.search(r'^extra_packages = (\[.*?^\])', path.read_text(), re.M | re.S).group(1)
        assert 'scikit-learn' in ast.literal_eval(listed), path.name


# --- the test programs, on processors and over gloo: the same code as over MPI and NCCL

# several programs with their settings and arguments, each rank in a fork: PyTorch is imported once
FORKS = """
import gc, json, os, runpy, sys, torch.distributed, traceback
gc.freeze()
for number, (settings, program, *arguments) in enumerate(json.loads(sys.argv[1])):
    children = []
    for rank in range(int(settings.get('WORLD_SIZE', 1))):
        children.append(os.fork())
        if children[-1] == 0:
            os.environ.update(settings, RANK=str(rank), MASTER_PORT=str(int(os.environ['MASTER_PORT']) + number))
            if 'WITHOUT_ALL_REDUCE' in settings:
                torch.distributed.all_reduce = lambda *args, **kwargs: None
            sys.argv = [program, *arguments]
            status = 0
            try:
                runpy.run_path(program, run_name='__main__')
            except SystemExit as end:
                status = end.code or 0
            except BaseException:
                traceback.print_exc()
                status = 1
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)    # to take PyTorch apart takes longer than the program
    status = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for stream in sys.stdout, sys.stderr:
        print(f'{number} ended with {status}', file=stream, flush=True)
"""
TWO, THREE = ({'WORLD_SIZE': number} for number in '23')
ONE = {'WORLD_SIZE': '1', 'MPICH_GPU_SUPPORT_ENABLED': '1'}
RIGHT = [
    (THREE, 'test_backend.py --backend gloo', 0, 'All values are right: backend gloo, 3 ranks, cpu'),
    (THREE, 'all_reduce_test.py --backend gloo --max-bytes 262144 --repeat 5 --json {path}/result.json', 0,
     'operation'),
]
# sizes that make no sense; a wheel without MPI; and without a launcher the local rank is not guessed
REFUSED = [
    ({}, 'all_reduce_test.py --min-bytes 4096 --max-bytes 1024', 2,
     'error: --max-bytes 1024 is less than --min-bytes 4096'),
    ({}, 'all_reduce_test.py --max-bytes 4096 --min-bytes 6', 2, 'error: --min-bytes 6'),
    ({}, 'all_reduce_test.py --max-bytes 4096 --min-bytes 0', 2, 'error: --min-bytes 0'),
    ({}, 'all_reduce_test.py --max-bytes 4096 --factor 1', 2, 'error: --factor 1'),
    ({}, 'all_reduce_test.py --max-bytes 4096 --repeat 0', 2, 'error: --repeat 0'),
    ({}, 'test_imports.py --without-cuda', 1, 'torch.distributed: expected MPI, found none'),
    ({}, '{path}/local.py', 1, 'No launcher has set the local rank'),
]
# an all_reduce that does nothing, and a refusal that is none
WRONG = [
    ({**TWO, 'WITHOUT_ALL_REDUCE': '1'}, 'test_backend.py --backend gloo', 1,
     'all_reduce of torch.float32: expected 3 in all 1000000 elements, found 1000000 others'),
    ({**TWO, 'WITHOUT_ALL_REDUCE': '1'}, 'all_reduce_test.py --backend gloo --max-bytes 1024', 1,
     'all_reduce: expected 3.0 in all 256 elements, found 256 others'),
    (ONE, 'test_refusal.py --backend gloo --device cpu', 1, 'MPICH_GPU_SUPPORT_ENABLED=0'),
    ({**ONE, 'MPICH_GPU_SUPPORT_ENABLED': '0'}, 'test_refusal.py --backend gloo --device cpu', 1,
     'expected a GPU, found cpu'),
]


@pytest.fixture(scope='module')
def ended(installed_pytorch, tmp_path_factory):
    """All of these programs, in one process: [(statuses, stdout, stderr)] for each; and where they wrote."""
    path, cases = tmp_path_factory.mktemp('programs'), RIGHT + REFUSED + WRONG
    (path / 'local.py').write_text('import ranks; ranks.local_rank()')
    words = [[settings, *program.format(path=path).split()] for settings, program, *_ in cases]
    for word in words:
        word[1] = str(EXAMPLES / word[1])
    done = run([installed_pytorch.python, '-c', FORKS, json.dumps(words)], env={
        **installed_pytorch.env, 'PYTHONPATH': EXAMPLES, 'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(free_ports(len(cases))[0]), 'GLOO_SOCKET_IFNAME': 'lo', 'OMP_NUM_THREADS': '1'})
    regex = re.compile(r'(.*?)^\d+ ended with \[([^\n]*)\]$', re.M | re.S)
    out, err = (regex.findall(text) for text in (done.stdout, done.stderr))
    assert len(out) == len(err) == len(cases), done.stderr
    return [(statuses.split(', '), stdout, stderr) for (stdout, statuses), (stderr, _) in zip(out, err)], path


def test_values_and_bandwidth(ended):
    (statuses, values, stderr), (_, table, _) = ended[0][:2]
    assert statuses == ['0'] * 3 and values.split('\n')[-2] == RIGHT[0][3], stderr
    result = json.loads((ended[1] / 'result.json').read_text())
    sizes = [1024, 4096, 16384, 65536, 262144]
    assert [entry['bytes'] for entry in result['operations']] == sizes * 2
    assert (result['backend'], result['ranks'], result['device']) == ('gloo', 3, 'cpu')
    for entry in result['operations']:
        assert entry['bandwidth_gb_per_s'] == pytest.approx(entry['bytes'] / entry['seconds'] / 1e9)
        # 2 (n - 1) / n
        factor = {'all_reduce': 4 / 3, 'broadcast': 1}[entry['operation']]
        assert entry['bus_bandwidth_gb_per_s'] == pytest.approx(entry['bandwidth_gb_per_s'] * factor)
    lines = table.strip().splitlines()
    assert lines[1].split() == ['operation', 'bytes', 'time', 'us', 'GB/s', 'bus', 'GB/s']
    assert len(lines) == 2 + len(result['operations'])


def test_programs_say_what_is_wrong(ended):
    """And the checks are real, also where Python optimizes."""
    for path in EXAMPLES.glob('*.py'):
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text()))), path
    for (settings, _, status, message), (statuses, stdout, stderr) in zip(REFUSED + WRONG, ended[0][len(RIGHT):]):
        assert message in stderr and str(status) in statuses and '0' not in statuses, (message, stderr)
        assert not re.search('All is there|are right|are refused', stdout)
