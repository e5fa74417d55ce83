"""The command slingtorch: what it prints, and what a shell and EasyBuild make of it."""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import slingtorch
from slingtorch import cli

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(sys.executable).parent
PREFIXES = ('EASYBUILD_', 'SLINGTORCH_', 'LUMI_', 'SLURM_', 'NCAR_', 'LMOD_SYSTEM')


@pytest.fixture
def environ(tmp_path):
    """Environment of a user without any configuration, whose home directory is empty."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(PREFIXES)}
    env.update({
        'HOME': str(tmp_path), 'XDG_CONFIG_HOME': str(tmp_path / '.config'), 'XDG_CONFIG_DIRS': str(tmp_path / 'xdg'),
        'PATH': '%s:/usr/bin:/bin' % BIN, 'PYTHONPATH': str(ROOT), 'LMOD_CMD': '/usr/share/lmod/lmod/libexec/lmod',
    })
    if os.geteuid() == 0:
        env['EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES'] = '1'
    return env


def run(args, env):
    """Run slingtorch; the CompletedProcess."""
    return subprocess.run([sys.executable, '-m', 'slingtorch'] + args, env=env, cwd='/', stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True)


def bash(script, env):
    """Run a bash script in which `slingtorch` is the command; the CompletedProcess."""
    prologue = 'slingtorch() { "%s" -m slingtorch "$@"; }\n' % sys.executable
    return subprocess.run(['bash', '--noprofile', '--norc', '-c', prologue + script], env=env, cwd='/',
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)


def evaluate(args, env, times=1):
    """The environment after eval "$(slingtorch env ARGS)", as often as wanted, in a real bash."""
    script = ''.join('eval "$(slingtorch env %s)" || exit 3\n' % args for _ in range(times)) + 'env -0'
    done = bash(script, env)
    assert done.returncode == 0, done.stderr
    return dict(entry.split('=', 1) for entry in done.stdout.split('\0') if '=' in entry)


def activated(env):
    """Only what an activation sets."""
    return {key: value for key, value in env.items() if key.startswith(('EASYBUILD_', 'SLINGTORCH_'))
            and not key.startswith('EASYBUILD_ALLOW')}


# --- slingtorch env

def test_version(environ):
    assert run(['--version'], environ).stdout == 'slingtorch %s\n' % slingtorch.__version__


def test_bundle_root():
    assert slingtorch.bundle_root() == str(ROOT)


def test_env(environ, tmp_path):
    env = activated(evaluate('', environ))
    easyblocks = env.pop('EASYBUILD_INCLUDE_EASYBLOCKS')
    assert '%s/easyblocks/generic/*.py' % ROOT in easyblocks.split(',')
    assert env == {
        'EASYBUILD_ROBOT_PATHS': '%s/easyconfigs:' % ROOT,
        'EASYBUILD_HOOKS': '%s/hooks/slingshot_hooks.py' % ROOT,
        'EASYBUILD_SOURCEPATH': '%s/.local/easybuild/sources:%s/patches:%s/runscripts' % (tmp_path, ROOT, ROOT),
        'SLINGTORCH_SITE': 'local',
    }


@pytest.mark.parametrize('args', ['', '--site derecho --with gdr,alt_read', '--site lumi'])
def test_twice_is_once(args, environ):
    assert evaluate(args, environ) == evaluate(args, environ, times=2)


def test_only_shell_code_on_stdout(environ):
    done = run(['env', '--site', 'derecho', '--with', 'alt_read'], environ)
    assert done.returncode == 0
    for line in done.stdout.splitlines():
        assert line.startswith('export '), line
    assert 'site derecho' in done.stderr
    assert '--disable_rdzv_get' in done.stderr
    assert run(['env', '--quiet'], environ).stderr == ''


def test_site_with_metadata(environ):
    env = activated(evaluate('--site derecho --with gdr', environ))
    metadata = env['EASYBUILD_EXTERNAL_MODULES_METADATA'].split(',')
    assert metadata[-1] == '%s/hooks/metadata/derecho_external_modules_metadata.cfg' % ROOT
    # EasyBuild's own files, which the option would otherwise replace
    assert any(path.endswith('/etc/cray_external_modules_metadata.cfg') for path in metadata[:-1])
    assert all(os.path.isfile(path) for path in metadata)
    assert env['EASYBUILD_MODULE_SYNTAX'] == 'Lua'
    assert (env['SLINGTORCH_SITE'], env['SLINGTORCH_SITE_GROUPS']) == ('derecho', 'gdr')


def test_other_site_afterwards(environ):
    """Nothing of the former site stays but the module syntax."""
    first = evaluate('--site derecho --with gdr', environ)
    env = activated(evaluate('--site local', first))
    env.pop('EASYBUILD_MODULE_SYNTAX')
    assert env == activated(evaluate('--site local', environ))


def test_groups_of_environment_stay_until_changed(environ):
    first = evaluate('--site derecho --with gdr', environ)
    assert evaluate('', first)['SLINGTORCH_SITE_GROUPS'] == 'gdr'
    assert 'SLINGTORCH_SITE_GROUPS' not in evaluate("--with ''", first)


def test_detected(environ):
    environ['NCAR_HOST'] = 'derecho'
    assert evaluate('', environ)['SLINGTORCH_SITE'] == 'derecho'


def test_users_own_values_stay(environ):
    environ.update({
        'EASYBUILD_ROBOT_PATHS': '/my/easyconfigs:/more',
        'EASYBUILD_INCLUDE_EASYBLOCKS': '/my/easyblocks/*.py',
        'EASYBUILD_SOURCEPATH': '/my/sources:/central/sources',
        'EASYBUILD_EXTERNAL_MODULES_METADATA': '/my/metadata.cfg',
        'EASYBUILD_MODULE_SYNTAX': 'Tcl',
    })
    env = evaluate('--site derecho', environ, times=2)
    assert env['EASYBUILD_ROBOT_PATHS'] == '%s/easyconfigs:/my/easyconfigs:/more' % ROOT
    assert env['EASYBUILD_INCLUDE_EASYBLOCKS'].endswith('/*.py,/my/easyblocks/*.py')
    assert env['EASYBUILD_SOURCEPATH'] == '/my/sources:/central/sources:%s/patches:%s/runscripts' % (ROOT, ROOT)
    assert env['EASYBUILD_EXTERNAL_MODULES_METADATA'] == \
        '/my/metadata.cfg,%s/hooks/metadata/derecho_external_modules_metadata.cfg' % ROOT
    assert env['EASYBUILD_MODULE_SYNTAX'] == 'Tcl'


def test_sources_in_the_checkout_stay(environ):
    """A prefix of the user inside the bundle's directory is the user's."""
    environ['EASYBUILD_SOURCEPATH'] = '%s/.mine/sources' % ROOT
    assert evaluate('', environ, times=2)['EASYBUILD_SOURCEPATH'].startswith('%s/.mine/sources:' % ROOT)


def test_prefix(environ):
    environ['EASYBUILD_PREFIX'] = '/project/eb'
    assert evaluate('', environ)['EASYBUILD_SOURCEPATH'].startswith('/project/eb/sources:')


def test_configuration_file(environ, tmp_path):
    """What is configured in a file is continued, since an environment variable would replace it."""
    config = tmp_path / '.config' / 'easybuild' / 'config.cfg'
    config.parent.mkdir(parents=True)
    config.write_text('[DEFAULT]\nTOP = /top\n[config]\nrobot-paths = %(TOP)s/ec:%(DEFAULT_ROBOT_PATHS)s\n'
                      'sourcepath = %(HOME)s/src\nprefix = /p\n')
    system = tmp_path / 'xdg' / 'easybuild.d' / 'site.cfg'
    system.parent.mkdir(parents=True)
    system.write_text('[config]\nsourcepath = /lost\ninclude-easyblocks = /sys/*.py\n')
    env = evaluate('', environ, times=2)
    assert env['EASYBUILD_ROBOT_PATHS'] == '%s/easyconfigs:/top/ec:' % ROOT
    assert env['EASYBUILD_SOURCEPATH'] == '%s/src:%s/patches:%s/runscripts' % (tmp_path, ROOT, ROOT)
    assert env['EASYBUILD_INCLUDE_EASYBLOCKS'].endswith(',/sys/*.py')


@pytest.mark.parametrize('in_file', [True, False])
def test_other_hooks_are_refused(in_file, environ, tmp_path):
    if in_file:
        config = tmp_path / '.config' / 'easybuild' / 'config.cfg'
        config.parent.mkdir(parents=True)
        config.write_text('[config]\nhooks = /site/hooks.py\n')
        where = str(config)
    else:
        environ['EASYBUILD_HOOKS'] = '/site/hooks.py'
        where = '$EASYBUILD_HOOKS'
    done = run(['env'], environ)
    assert (done.returncode, done.stdout) == (1, 'false\n')
    for text in (where, '/site/hooks.py', '--keep-hooks'):
        assert text in done.stderr
    kept = activated(evaluate('--keep-hooks', environ))
    assert kept.get('EASYBUILD_HOOKS') == (None if in_file else '/site/hooks.py')


def copy_bundle(target):
    """A second copy of the bundle."""
    for name in ('easyblocks', 'easyconfigs', 'hooks', 'patches', 'runscripts', 'slingtorch'):
        if (ROOT / name).exists():
            shutil.copytree(str(ROOT / name), str(target / name), ignore=shutil.ignore_patterns('__pycache__'))
    return target


def test_other_copy_is_replaced(environ, tmp_path):
    copy = copy_bundle(tmp_path / 'a copy')
    env = evaluate('--site derecho', dict(environ, PYTHONPATH=str(copy)))
    assert str(copy) in env['EASYBUILD_HOOKS']
    again = evaluate('--site derecho', dict(env, PYTHONPATH=str(ROOT)))
    assert activated(again) == activated(evaluate('--site derecho', environ))


@pytest.mark.parametrize('name', ['a,b', 'a:b', 'a[1]', 'what?'])
def test_impossible_path_of_bundle(name, environ, tmp_path):
    copy = copy_bundle(tmp_path / name)
    done = subprocess.run([sys.executable, '-m', 'slingtorch', 'env'], cwd=str(copy), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True,
                          env={key: value for key, value in environ.items() if key != 'PYTHONPATH'})
    assert (done.returncode, done.stdout) == (1, 'false\n')
    assert 'cannot hold the characters' in done.stderr


@pytest.mark.parametrize('args', ['--site nonsense', '--site derecho --with nonsense', '--bogus', '--shell ksh93'])
def test_error_reaches_the_shell(args, environ):
    """eval "$(...)" loses the status of the command: what it evaluates must fail itself."""
    done = bash('eval "$(slingtorch env %s)" && echo went on' % args, environ)
    assert done.returncode == 1
    assert done.stdout == ''
    assert 'error:' in done.stderr


def test_error_messages(environ):
    assert 'The sites are: cirrus, derecho' in run(['env', '--site', 'nonsense'], environ).stderr
    error = run(['env', '--site', 'frontier', '--with', 'nonsense'], environ).stderr
    assert "--with names the group 'nonsense'" in error and 'alt_read:' in error
    environ['NCAR_HOST'] = 'derecho'
    error = run(['env', '--site', 'frontier'], environ).stderr
    assert "Site 'frontier' is named" in error and "'derecho' ($NCAR_HOST is 'derecho')" in error


def test_quoting():
    """Values with blanks, quotes, dollars and exclamation marks arrive as they are."""
    value = "/a b/$HOME/it's/`x`/\"q\"/!!/*"
    for shell in ('bash', 'tcsh'):
        code = cli.shell_code([('SLINGTORCH_X', value), ('GONE', None), ('NEVER', None)], {'GONE': '1'}, shell)
        done = subprocess.run([shell, '-f' if shell == 'tcsh' else '--norc', '-c',
                               code + '\nenv | grep -a -e SLINGTORCH_X -e GONE'],
                              env={'GONE': '1', 'PATH': '/usr/bin:/bin'}, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True)
        assert done.stdout == 'SLINGTORCH_X=%s\n' % value, (shell, done.stderr)


def test_tcsh(environ):
    """The same environment in a real tcsh, evaluated twice."""
    code = 'eval "`%s -m slingtorch env --shell tcsh --site derecho --with gdr`"\n' % sys.executable
    done = subprocess.run(['tcsh', '-f', '-c', 2 * code + 'env -0'], env=environ, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0, done.stderr
    env = dict(entry.split('=', 1) for entry in done.stdout.split('\0') if '=' in entry)
    assert activated(env) == activated(evaluate('--site derecho --with gdr', environ))


def test_hint_on_a_terminal(environ):
    """Who only looks is told how it is used."""
    done = subprocess.run(['script', '-qec', '%s -m slingtorch env' % sys.executable, '/dev/null'], env=environ,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, universal_newlines=True)
    assert 'eval "$(slingtorch env)"' in done.stdout


def test_easybuild_takes_it(environ):
    """eb itself reads the configuration and finds an easyconfig of the bundle by its name."""
    done = bash('eval "$(slingtorch env --site derecho)" && cd / && eb --show-config && eb --search PyTorch-', environ)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ('hooks ', str(ROOT / 'hooks' / 'slingshot_hooks.py'), 'derecho_external_modules_metadata.cfg',
                 str(ROOT / 'easyconfigs'), str(ROOT / 'runscripts'), '%s/easyconfigs/p/PyTorch' % ROOT):
        assert text in done.stdout
    # EasyBuild's own easyconfigs are still found
    assert 'PyTorch-2.6.0-foss' in done.stdout


# --- slingtorch sites

def test_sites(environ):
    environ['NCAR_HOST'] = 'derecho'
    done = run(['sites'], environ)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith('* derecho')]
    assert "this machine: derecho ($NCAR_HOST is 'derecho')" in done.stderr
    assert 'alt_read' in done.stdout


def test_sites_one(environ):
    done = run(['sites', 'lumi'], environ)
    assert done.returncode == 0
    for text in ('NCCL_SOCKET_IFNAME = hsn', 'reason:', 'source:', 'bind_paths', 'Group gdr'):
        assert text in done.stdout
    done = run(['sites', 'nonsense'], environ)
    assert (done.returncode, done.stdout) == (1, '')


def test_sites_json(environ):
    data = json.loads(run(['sites', '--json'], environ).stdout)
    assert data['chosen'] == 'local'
    derecho = next(site for site in data['sites'] if site['name'] == 'derecho')
    assert all(value['reason'] and value['source'] for value in derecho['env'])
    assert json.loads(run(['sites', 'lumi', '--json'], environ).stdout)['parameters']


def test_sites_with_contradiction(environ):
    environ.update({'NCAR_HOST': 'derecho', 'LMOD_SYSTEM_NAME': 'frontier'})
    done = run(['sites'], environ)
    assert done.returncode == 1
    assert 'more than one site' in done.stderr and 'lumi' in done.stdout


def test_no_command(environ):
    done = run([], environ)
    assert done.returncode == 2 and 'env or sites' in done.stderr
