# SPDX-License-Identifier: GPL-2.0-only
"""The command slingtorch: what it prints, and what a shell and EasyBuild make of it."""
import argparse
import functools
import json
import os
import re
import pathlib
import shutil
import subprocess
import sys

import pytest

import slingtorch
from slingtorch import cli
from slingtorch.commands import status
from test_sites import ENV, GROUP, SITE
from testbed import forkedeb
from testbed.expected import expected

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


def refused(done):
    """What the command says that it refuses, once no shell goes on with it."""
    assert (done.returncode, done.stdout) == (1, 'false\n') and done.stderr.startswith('slingtorch: error: '), done.stderr
    return done.stderr[len('slingtorch: error: '):].rstrip('\n')


def add_easyconfigs_of_easybuild(environ, tmp_path):
    """The name of one, where the package easybuild-easyconfigs has all: beside the other packages of EasyBuild."""
    (tmp_path / 'packages/easybuild/easyconfigs').mkdir(parents=True)
    (tmp_path / 'packages/easybuild/easyconfigs/PyTorch-2.6.0-foss-2024a.eb').touch()
    environ['PYTHONPATH'] += f':{tmp_path}/packages'


def run(args, env):
    """Run slingtorch, with EasyBuild imported once for all; the CompletedProcess."""
    return forkedeb.slingtorch(args, env, '/')


def fresh(args, env):
    """The same in a new Python."""
    return subprocess.run([sys.executable, '-m', 'slingtorch'] + args, env=env, cwd='/', capture_output=True, text=True)


@functools.lru_cache(maxsize=None)
def quick_command():
    """A path of slingtorch as run() starts it."""
    return forkedeb.command(pathlib.Path(forkedeb.the_server().directory.name) / 'slingtorch', 'slingtorch')


def bash(script, env, new=False):
    """Run a bash script in which `slingtorch` is the command, or a `new` Python; the CompletedProcess."""
    prologue = 'slingtorch() { %s "$@"; }\n' % (f'"{sys.executable}" -m slingtorch' if new else quick_command())
    return subprocess.run(['bash', '--noprofile', '--norc', '-c', prologue + script], env=env, cwd='/',
                          capture_output=True, text=True)


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


@pytest.mark.parametrize('seen_by', ['Python', 'EasyBuild'])
def test_in_a_directory_that_is_gone(environ, tmp_path, seen_by):
    """It depends on sys.path whether the import of EasyBuild fails, or later EasyBuild's options."""
    imported = tmp_path / 'imported.py'
    imported.write_text('import os, sys, easybuild.tools.options, slingtorch.cli\n'
                        'os.rmdir(os.getcwd())\nsys.exit(slingtorch.cli.main(sys.argv[1:]))\n')
    start = 'rmdir ../gone; slingtorch' if seen_by == 'Python' else '%s %s' % (sys.executable, imported)
    done = bash(f'mkdir {tmp_path}/gone; cd {tmp_path}/gone; {start} env', environ, new=True)
    assert done.returncode == 1 and done.stdout == 'false\n'
    assert done.stderr == 'slingtorch: error: the working directory no longer exists: cd to another one\n'


def test_encoding_that_lacks_a_character(environ, tmp_path):
    """What is shown has it in other words, and code for a shell byte by byte."""
    name = tmp_path / 'd\u00fc'
    name.mkdir()
    log = name / 'job.out'
    log.write_text('torch.OutOfMemoryError: CUDA out of memory. \u00fc\n', encoding='utf-8')
    env = {**environ, 'PYTHONIOENCODING': 'ascii', 'EASYBUILD_PREFIX': str(name), 'LC_ALL': 'C.UTF-8'}
    done = fresh(['explain', str(log)], env)
    assert (done.returncode, done.stderr) == (0, '') and 'd\\xfc/job.out:1: ' in done.stdout
    done = bash('eval "$(slingtorch env --quiet)" && [ -d "${EASYBUILD_SOURCEPATH%%/sources*}" ]', env, new=True)
    assert done.returncode == 0, done.stderr


def test_code_for_a_shell_and_notes_for_the_user(environ, tmp_path):
    (tmp_path / 'tmp').mkdir()
    environ.update(SLINGTORCH_SITE_DETECTED='local: for any machine', MODULEPATH='', TMPDIR=str(tmp_path / 'tmp'))
    done = run(['env', '--site', 'derecho', '--with', 'alt_read'], without_lmod(environ))
    expected(done.stdout + done.stderr, 'env-derecho', [
        (ROOT, 'BUNDLE'), (tmp_path, 'HOME'), (sys.executable, 'PYTHON')])
    assert run(['env', '--quiet'], environ).stderr == '' and not list((tmp_path / 'tmp').iterdir())


def test_other_site_afterwards(environ):
    """Nothing of the former site stays."""
    first = evaluate('--site derecho --with gdr', environ)
    assert activated(evaluate('--site local', first)) == activated(evaluate('--site local', environ))
    assert run(['env', '--site', 'local'], first).stderr.startswith(
        "slingtorch: groups of site 'derecho' (gdr) are ignored: select groups of 'local' with --with\nslingtorch: site local ")


def test_groups_of_environment_stay_until_changed(environ):
    first = evaluate('--site derecho --with gdr', environ)
    assert evaluate('', first)['SLINGTORCH_SITE_GROUPS'] == 'gdr'
    assert 'SLINGTORCH_SITE_GROUPS' not in evaluate("--with ''", first)


def test_users_own_values_stay(environ):
    environ.update({
        'EASYBUILD_ROBOT_PATHS': '/my/easyconfigs:/more', 'EASYBUILD_INCLUDE_EASYBLOCKS': '/my/easyblocks/*.py',
        'EASYBUILD_SEARCH_PATHS': '/my/search', 'EASYBUILD_SOURCEPATH': '/my/sources:/central/sources',
        'EASYBUILD_EXTERNAL_MODULES_METADATA': '/my/metadata.cfg', 'EASYBUILD_MODULE_SYNTAX': 'Tcl',
    })
    env = evaluate('--site derecho', environ, times=2)
    assert env['EASYBUILD_ROBOT_PATHS'] == '%s/easyconfigs:/my/easyconfigs:/more' % ROOT
    assert env['EASYBUILD_SEARCH_PATHS'] == '/my/search:%s/patches' % ROOT
    assert env['EASYBUILD_INCLUDE_EASYBLOCKS'].endswith('/*.py,/my/easyblocks/*.py')
    assert env['EASYBUILD_SOURCEPATH'] == '/my/sources:/central/sources:%s/patches:%s/runscripts' % (ROOT, ROOT)
    assert env['EASYBUILD_EXTERNAL_MODULES_METADATA'] == '/my/metadata.cfg'
    assert env['EASYBUILD_MODULE_SYNTAX'] == 'Tcl'


def test_sources_in_the_checkout_stay(environ):
    """A prefix of the user inside the bundle's directory is the user's."""
    environ['EASYBUILD_SOURCEPATH'] = '%s/.mine/sources' % ROOT
    assert evaluate('', environ, times=2)['EASYBUILD_SOURCEPATH'].startswith('%s/.mine/sources:' % ROOT)


def test_configuration_file(environ, tmp_path):
    """What is configured in a file is continued, since an environment variable would replace it."""
    add_easyconfigs_of_easybuild(environ, tmp_path)
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
    assert bash('eval "$(slingtorch env)" && echo went on', environ).returncode == 1
    assert refused(run(['env'], environ)) == (
        f'EasyBuild uses only one file with hooks, and {where} already names /site/hooks.py. Remove that setting, or let that '
        f"file also call the hooks of {ROOT}/hooks/slingshot_hooks.py and use 'slingtorch env --keep-hooks'.")
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


@pytest.mark.parametrize('name, bad', [('a,b', "','"), ('a:b', "':'"), ('a[1]', "'[' ']'"), ('what?', "'?'")])
def test_impossible_path_of_bundle(name, bad):
    with pytest.raises(cli.CliError) as said:
        cli.activation('/' + name, None, [])
    assert str(said.value) == (f"The directory of the bundle is '/{name}': EasyBuild cannot handle {bad} in a path. Use a "
                               'directory without it.')


@pytest.mark.parametrize('args, message', [
    ('--site nonsense', 'The sites are: .*cirrus, .*lumi'), ('--site derecho --with nonsense', "--with names the group 'nonsense'"),
    ('--bogus', 'error:'), ('--shell ksh93', 'error:')])
def test_error_reaches_the_shell(args, message, environ):
    """eval "$(...)" loses the status of the command: what it evaluates must fail itself."""
    done = bash('eval "$(slingtorch env %s)" && echo went on' % args, environ)
    assert done.returncode == 1
    assert done.stdout == '' and re.search(message, done.stderr)


CONFIG = '.config/easybuild/config.cfg'


@pytest.mark.parametrize('text, variables, message', [
    ('prefix = /a\n', {}, 'File contains no section headers'),
    ('[config]\nprefixx = /a\n', {}, 'no option corresponding with opt prefixx'),
    ('[config]\nprefix = %d/a\n', {}, "'%' must be followed by"),
    ('[config]\nmodules-tool = mine\n', {}, "invalid choice: 'mine'"),
    ('', {'EASYBUILD_PREFIXX': '/a'}, 'EASYBUILD_PREFIXX'),
    ('', {'EASYBUILD_MODULES_TOOL': 'mine'}, "invalid choice: 'mine'"),
])
def test_configuration_that_easybuild_does_not_accept(text, variables, message, environ, tmp_path):
    """What EasyBuild says, and one remedy."""
    (tmp_path / CONFIG).parent.mkdir(parents=True)
    (tmp_path / CONFIG).write_text(text)
    said = refused(run(['env'], dict(environ, **variables)))
    assert said.startswith('EasyBuild rejects its configuration: ') and message in said and 'Usage' not in said
    assert said.endswith(f". Correct the variable EASYBUILD_... or the file ({tmp_path / CONFIG}), or ignore a file with "
                         "'export EASYBUILD_IGNORECONFIGFILES=FILE'.")
    # the remedy is one
    environ['EASYBUILD_IGNORECONFIGFILES'] = str(tmp_path / CONFIG)
    assert run(['env'], environ).returncode == 0


def test_options_that_only_eb_can_check(environ, tmp_path):
    """A naming scheme of the centre's, which EasyBuild knows when it has included the file."""
    (tmp_path / CONFIG).parent.mkdir(parents=True)
    (tmp_path / CONFIG).write_text('[config]\ninclude-module-naming-schemes = /site/*.py\n'
                                   'module-naming-scheme = SiteMNS\n')
    assert activated(evaluate('', environ)) == activated(evaluate('', dict(environ, XDG_CONFIG_HOME='/nonexistent')))
    assert run(['env'], environ).stderr.startswith(
        'slingtorch: warning: slingtorch does not know where the module naming scheme SiteMNS puts modules, because it is not one '
        f"of EasyBuild's own: call 'module use' yourself, with a directory below {tmp_path}/.local/easybuild/modules/all\n")


@pytest.mark.parametrize('setting, name', [
    ('EASYBUILD_PREFIX', 'a:b'), ('EASYBUILD_INSTALLPATH_SOFTWARE', 'a$b'), ('prefix', 'a%%b')])
def test_destination_that_easybuild_cannot_use(setting, name, environ, tmp_path):
    """Refused before anything is installed: with a colon it took until the virtual environment was to be made."""
    path = '%s/%s' % (tmp_path, name)
    if setting == 'prefix':
        (tmp_path / CONFIG).parent.mkdir(parents=True)
        (tmp_path / CONFIG).write_text('[config]\nprefix = %s\n' % path)
    else:
        environ[setting] = path
    what = {'EASYBUILD_PREFIX': 'prefix', 'EASYBUILD_INSTALLPATH_SOFTWARE': 'installpath_software'}.get(setting, setting)
    path = path.replace('%%', '%')
    assert refused(run(['env'], environ)) == (f"EasyBuild's {what} (EASYBUILD_{what.upper()}) is '{path}': EasyBuild cannot "
                                              f'handle {name[1]!r} in a path. Use a directory without it.')


@pytest.mark.parametrize('value', ['easybuild', '~/easybuild', ''])
def test_destination_that_depends_on_the_directory(value, environ):
    """Tomorrow's eb would install somewhere else."""
    assert refused(run(['env'], dict(environ, EASYBUILD_PREFIX=value))) == (
        f"EASYBUILD_PREFIX is '{value}': EasyBuild would put this directory below the one in which you start eb. Use an "
        'absolute path, such as "$HOME/easybuild".')


def test_output_that_cannot_be_written(environ):
    done = subprocess.run(['bash', '-c', 'python3 -m slingtorch env > /dev/full'], stderr=subprocess.PIPE,
                          universal_newlines=True, env=environ)
    assert done.returncode == 1 and 'No space left on device' in done.stderr and 'Traceback' not in done.stderr


@pytest.mark.parametrize('where', ['>&-', '2>&-', '2>/dev/full', '>&- 2>&-'])
def test_closed_output(environ, where):
    done = subprocess.run(['bash', '-c', 'python3 -m slingtorch env ' + where], capture_output=True, text=True, env=environ)
    assert done.returncode == 0 and 'Traceback' not in done.stderr
    assert ('export SLINGTORCH_SITE=' in done.stdout) is ('>&-' not in where.replace('2>&-', ''))


def test_destination_that_may_not_be_entered(environ, tmp_path):
    """eb would end in a traceback."""
    closed = tmp_path / 'closed'
    closed.mkdir(mode=0)
    caps = '-dac_override,-dac_read_search'
    words = ['setpriv', f'--bounding-set={caps}', f'--inh-caps={caps}'] if os.geteuid() == 0 else []
    done = subprocess.run([*words, sys.executable, '-m', 'slingtorch', 'env'], capture_output=True, text=True,
                          env=dict(environ, EASYBUILD_PREFIX=str(closed / 'easybuild')))
    assert (done.returncode, done.stdout) == (1, 'false\n')
    assert "the directory %s/easybuild/software, but you may not enter" % closed in done.stderr


@pytest.mark.parametrize('syntax, refused, taken', [
    ('Lua', ':$%"`\\*?[\n', " ,;'(){}&#!"), ('Tcl', ':$%"`\\*?[\n ;{}', ",'()#!~")])
def test_characters_of_a_destination(syntax, refused, taken):
    """Each was tried: an installation by EasyBuild 5.4.1, its module and its runscript."""
    def options(char):
        return argparse.Namespace(prefix=None, installpath='/a%sb' % char, installpath_software=None,
                                  installpath_modules=None, buildpath='/b', sourcepath='/s', repositorypath=['/r'],
                                  subdir_software='software', subdir_modules='modules', suffix_modules_path='all')
    for char in refused:
        with pytest.raises(cli.CliError):
            cli.check_destination(options(char), syntax)
    for option in ('prefix', 'installpath', 'installpath_software', 'installpath_modules', 'buildpath'):
        with pytest.raises(cli.CliError, match=rf"^EasyBuild's {option} \(EASYBUILD_{option.upper()}\) is '/:': "):
            cli.check_destination(argparse.Namespace(**{**vars(options('')), option: '/:'}), syntax)
    for char in taken:
        cli.check_destination(options(char), syntax)


def test_python_of_easybuild(environ, tmp_path):
    """eb goes on working when a module puts a Python without EasyBuild first; that Python itself is an error."""
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', str(tmp_path / 'bare')], check=True)
    done = bash('eval "$(slingtorch env)" && PATH=%s/bare/bin:$PATH && eb --version' % tmp_path, environ)
    assert done.returncode == 0 and 'This is EasyBuild' in done.stdout, done.stderr
    done = subprocess.run([str(tmp_path / 'bare/bin/python'), '-m', 'slingtorch', 'env'], env=environ, cwd='/',
                          capture_output=True, text=True)
    assert refused(done) == (
        f"{tmp_path}/bare/bin/python, the Python that runs slingtorch, has no EasyBuild (No module named 'easybuild'). Install "
        'slingtorch with pip, which also installs EasyBuild, or use the Python of your EasyBuild: PYTHON -m slingtorch env')


def test_eb_is_found(environ):
    """Also when slingtorch was called by its path; the user's python stays the first."""
    environ['PATH'] = '/usr/bin:/bin'
    done = bash('eval "$(slingtorch env)" && eb --version && echo $PATH', environ)
    assert 'This is EasyBuild' in done.stdout and done.stdout.endswith('\n/usr/bin:/bin:%s\n' % BIN), done.stderr


def test_slingtorch_is_found_beside_a_centres_eb(environ, tmp_path):
    (tmp_path / 'eb').write_text('#!/bin/sh\necho the eb of the centre\n')
    (tmp_path / 'eb').chmod(0o755)
    environ['PATH'] = f'{tmp_path}:/usr/bin:/bin'
    done = bash(f'eval "$({BIN}/slingtorch env)" && eb --version && slingtorch sites lumi', environ)
    assert done.stdout.startswith('the eb of the centre') and 'lumi: ' in done.stdout, done.stderr


def test_modules_are_visible(environ, tmp_path):
    """Those that eb will make here, before the others; as often as it is activated, once."""
    environ['MODULEPATH'] = '/site/modules'
    assert evaluate('', environ, times=2)['MODULEPATH'] == '%s/.local/easybuild/modules/all:/site/modules' % tmp_path
    environ.update(EASYBUILD_INSTALLPATH_MODULES='/mine', EASYBUILD_SUFFIX_MODULES_PATH='')
    assert evaluate('', environ)['MODULEPATH'] == '/mine:/site/modules'


def without_lmod(environ):
    """The environment of a shell in which only Environment Modules work."""
    return {**{key: value for key, value in environ.items() if key != 'LMOD_CMD'}, 'MODULES_CMD': '/bin/true'}


@pytest.mark.parametrize('args', ['', '--site derecho'])
def test_environment_modules(args, environ):
    env = evaluate(args, without_lmod(environ), times=2)
    assert (env['EASYBUILD_MODULES_TOOL'], env['EASYBUILD_MODULE_SYNTAX']) == ('EnvironmentModules', 'Tcl')


def test_modules_tool_of_the_user(environ):
    env = evaluate('', dict(without_lmod(environ), EASYBUILD_MODULES_TOOL='EnvironmentModulesC'))
    assert (env['EASYBUILD_MODULES_TOOL'], env['EASYBUILD_MODULE_SYNTAX']) == ('EnvironmentModulesC', 'Tcl')
    env = evaluate('', dict(environ, EASYBUILD_MODULE_SYNTAX='Tcl'))
    assert env['EASYBUILD_MODULE_SYNTAX'] == 'Tcl' and 'EASYBUILD_MODULES_TOOL' not in env


def test_no_modules_tool(environ):
    del environ['LMOD_CMD']
    done = run(['env'], environ)
    assert done.returncode == 0 and 'MODULEPATH' not in done.stdout
    assert done.stderr.startswith(
        'slingtorch: warning: this shell has neither Lmod nor Environment Modules, and eb needs one: source its file, such as '
        '/usr/share/lmod/lmod/init/bash, and run this again\n')
    assert 'EASYBUILD_MODULES_TOOL' not in done.stdout and 'EASYBUILD_MODULE_SYNTAX' not in done.stdout


def test_why_is_remembered(environ):
    """Also where nothing is seen of it any more, as on a compute node."""
    env = evaluate('', dict(environ, NCAR_HOST='derecho'))
    for host in ({'NCAR_HOST': 'derecho'}, {}):
        later = {**{key: value for key, value in env.items() if key != 'NCAR_HOST'}, **host}
        assert 'site derecho ($NCAR_HOST is derecho)' in run(['env'], later).stderr
        assert 'this machine: derecho ($NCAR_HOST is derecho)' in run(['sites'], later).stderr
        assert activated(evaluate('', later)) == activated(env)


def test_slurm_without_a_rule(environ, tmp_path):
    (tmp_path / 'sinfo').write_text('')
    (tmp_path / 'sinfo').chmod(0o755)
    environ['PATH'] += f':{tmp_path}'
    done = run(['env'], environ)
    assert done.returncode == 0 and (
        "slingtorch: slingtorch has no settings for this cluster. Everything works without them; 'slingtorch site new NAME' "
        "writes a file with them. (Generic Slurm settings: 'slingtorch env --site slurm'.)\n") in done.stderr
    assert '--site slurm' not in run(['env', '--site', 'slurm'], environ).stderr


def test_long_prefix(environ, tmp_path):
    """EasyBuild's lock has the path of an installation as its name: in 176 bytes it would end in a traceback."""
    top = f'/{"x" * 90}/{"y" * 75}'
    for more, wrong in (('', 0), ('/z', 1)):
        done = run(['env'], {**environ, 'EASYBUILD_PREFIX': '/p', 'EASYBUILD_INSTALLPATH': top[:166] + more})
        assert done.returncode == wrong
    assert refused(done) == (
        f'EasyBuild would install into {top[:166]}/z/software, but this path is too long: EasyBuild names lock files after it. Use a '
        'path of at most 175 bytes: export EASYBUILD_PREFIX=DIRECTORY')


def test_what_nobody_named_is_detected_again(environ):
    """After the site's modules were loaded; but what the user has named stays."""
    env = evaluate('', environ)
    assert env['SLINGTORCH_SITE'] == 'local'
    assert evaluate('', dict(env, NCAR_HOST='derecho'))['SLINGTORCH_SITE'] == 'derecho'
    named = evaluate('--site local', env)
    assert evaluate('', dict(named, NCAR_HOST='derecho'))['SLINGTORCH_SITE'] == 'local'
    assert 'named by --site or $SLINGTORCH_SITE' in run(['sites'], named).stderr


@pytest.fixture
def old_easybuild(tmp_path):
    """A copy of EasyBuild that says that it is 5.0.0, and lacks what came later: print_error_and_exit."""
    import easybuild.tools
    copy = tmp_path / 'old/easybuild'
    shutil.copytree(pathlib.Path(easybuild.tools.__file__).parents[1], copy,
                    ignore=shutil.ignore_patterns('__pycache__', 'easyblocks'))
    version = copy / 'tools/version.py'
    version.write_text(re.sub(r'(?m)^VERSION = .*', "VERSION = LooseVersion('5.0.0')", version.read_text()))
    for path in copy.rglob('*.py'):
        path.write_text(path.read_text().replace('print_error_and_exit', 'print_nothing_and_exit'))
    return tmp_path / 'old'


def test_older_easybuild_in_pythonpath(environ, old_easybuild):
    """An EasyBuild module sets PYTHONPATH: 'slingtorch env' sees it before, and eb says it in one line."""
    wrong = f'this is EasyBuild 5.0.0 in {old_easybuild}, but slingtorch needs 5.4.1 or newer. PYTHONPATH puts this version ' \
            'first: unload the module that sets PYTHONPATH, or unset it\n'
    active = evaluate('', environ)
    environ['PYTHONPATH'] = f'{old_easybuild}:{ROOT}'
    done = fresh(['env'], environ)
    assert (done.returncode, done.stdout, done.stderr) == (1, 'false\n', 'slingtorch: error: ' + wrong)
    # the module is loaded after the activation
    active = {**active, 'PYTHONPATH': str(old_easybuild)}
    done = subprocess.run([BIN / 'eb', '--search', 'PyTorch'], env=active, text=True, capture_output=True)
    assert done.returncode == 1 and done.stderr.endswith('ERROR: ' + wrong) and 'Traceback' not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason='what root is told')
def test_root_is_told_before_eb_refuses(environ):
    assert 'you are root' not in run(['env'], environ).stderr
    del environ['EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES']
    done = run(['env'], environ)
    assert done.returncode == 0
    assert ('slingtorch: warning: you are root, and eb refuses to run as root: use another account; on a machine that only you '
            'use: export EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES=1\n') in done.stderr


def test_quoting():
    """Values with blanks, quotes, dollars and exclamation marks arrive as they are."""
    value = "/a b/$HOME/it's/`x`/\"q\"/!!/*"
    for shell in ('bash', 'tcsh'):
        code = cli.shell_code([('SLINGTORCH_X', value), ('GONE', None), ('NEVER', None)], {'GONE': '1'}, shell)
        done = subprocess.run([shell, '-f' if shell == 'tcsh' else '--norc', '-c',
                               code + '\nenv | grep -a -e SLINGTORCH_X -e GONE'],
                              env={'GONE': '1', 'PATH': '/usr/bin:/bin'}, capture_output=True, text=True)
        assert done.stdout == 'SLINGTORCH_X=%s\n' % value, (shell, done.stderr)


def test_tcsh(environ):
    """The same environment in a real tcsh, evaluated twice."""
    code = 'eval "`%s -m slingtorch env --shell tcsh --site derecho --with gdr`"\n' % sys.executable
    done = subprocess.run(['tcsh', '-f', '-c', 2 * code + 'env -0'], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    env = dict(entry.split('=', 1) for entry in done.stdout.split('\0') if '=' in entry)
    assert activated(env) == activated(evaluate('--site derecho --with gdr', environ))


def test_easybuild_takes_it(environ, tmp_path):
    """eb itself reads the configuration and finds an easyconfig of the bundle by its name."""
    add_easyconfigs_of_easybuild(environ, tmp_path)
    done = bash('eval "$(slingtorch env --site derecho)" && cd / && eb --show-config && eb --search PyTorch-', environ)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ('hooks ', str(ROOT / 'hooks' / 'slingshot_hooks.py'),
                 str(ROOT / 'easyconfigs'), str(ROOT / 'runscripts'), '%s/easyconfigs/p/PyTorch' % ROOT,
                 'patches/p/PyTorch/PyTorch-2.6.0_process-group-gil.patch'):
        assert text in done.stdout
    # EasyBuild's own easyconfigs are still found
    assert 'PyTorch-2.6.0-foss' in done.stdout


def test_groups_whose_parameters_exclude_each_other(tmp_path, monkeypatch, capsys):
    text = SITE
    for name in ('one', 'two'):
        text += GROUP.replace('fast', name) + ENV.replace('env NCCL_CROSS_NIC', f'parameter x in {name}').replace('1', name)
    (tmp_path / 'mine.cfg').write_text(text)
    monkeypatch.setenv('SLINGTORCH_SITES_PATH', str(tmp_path))
    monkeypatch.setattr(cli, 'activation', lambda *_: [])
    assert cli.main(['env', '--site', 'mine', '--with', 'one,two']) == 1
    assert capsys.readouterr().err == ("slingtorch: error: The groups 'one' and 'two' of site 'mine' exclude each other: they set x to "
                                       "different values ('one' and 'two'). Choose one of them.\n")


# --- slingtorch sites

def test_sites(environ):
    environ['NCAR_HOST'] = 'derecho'
    done = run(['sites'], environ)
    assert done.returncode == 0
    expected(done.stdout + done.stderr, 'sites')
    done = run(['sites', 'nonsense'], environ)
    assert (done.returncode, done.stdout) == (1, '')
    # the machine of two sites
    done = run(['sites'], dict(environ, LMOD_SYSTEM_NAME='frontier'))
    assert done.returncode == 1 and 'several sites' in done.stderr and 'lumi' in done.stdout and ' *' not in done.stdout


def test_help_of_each_command(environ):
    """All options, with their defaults: a line for each command."""
    environ['COLUMNS'] = '1000'     # no word is broken
    commands = re.findall(r'^    (\w+)', run(['--help'], environ).stdout, re.M)
    text = [run([*words, '--help'], environ).stdout for words in ([], *([name] for name in commands), ['site', 'new'])]
    expected(''.join(' '.join(part.split()) + '\n' for part in text), 'help')


def test_a_module_of_another_site_is_renewed_with_its_site_and_groups():
    entry = {'module': 'A/1', 'state': 'different', 'owner': None, 'easyconfig': '/a/A-1.eb', 'site': 'lumi', 'groups': []}
    other = dict(entry, site='derecho', groups=['gdr', 'hsn0'], easyconfig='/b/B-1.eb')
    assert status.renewal([entry, other], 'lumi', []) == [
        '(eval "$(slingtorch env --quiet --site derecho --with gdr,hsn0)" && eb --module-only --force /b/B-1.eb)',
        'eb --module-only --force /a/A-1.eb']


@pytest.mark.parametrize('record, why', [
    ({}, []), ({'slingtorch': '0.0.9'}, ['older: slingtorch 0.0.9']), ({'slingtorch': '99.0'}, ['newer: slingtorch 99.0']),
    ({'site': 'local', 'values': 'other'}, ["the values of site 'local' have changed"]),
    ({'site': 'atlantis'}, ["There is no site 'atlantis'."]),
    ({'files': {f'runscripts/{name}': {'source': name, 'sha256': ''} for name in 'abcd'}},
     ['not as in the bundle: a, b, c and 1 more', 'edited after installation: a, b, c and 1 more']),
])
def test_what_the_bundle_would_install_differently(record, why):
    whole = {'slingtorch': slingtorch.__version__, 'files': {}, 'site': None, 'groups': [], 'values': None, **record}
    found = status.differences('/nowhere', whole)
    assert [text[:len(begin)] for text, begin in zip(found, why)] == why and len(found) == len(why)


def test_modules_of_installations(tmp_path):
    """In Lua and Tcl; neither other modules, nor EasyBuild's backups, nor what --module-only made of nothing."""
    root, modules = tmp_path / 'root', tmp_path / 'modules'
    (root / 'runscripts').mkdir(parents=True)
    lua = f'local root = "{root}"\nRUNSCRIPTS'
    modules.mkdir()
    for name, text in {'A.lua': lua, 'A.lua.bak_20260101000000_1': lua, '.A.lua.new': lua, 'C.lua': lua[:-1],
                       'B': f'set root {root}\nRUNSCRIPTS', 'D': f'set root {tmp_path}\nRUNSCRIPTS'}.items():
        (modules / name).write_text(text)
    (modules / 'E.lua').symlink_to('gone')
    unread = []
    assert list(status.installations(str(modules), unread)) == [('A', str(root)), ('B', str(root))]
    assert unread == [f'{modules}/E.lua: No such file or directory']


def test_status_of_all_kinds_of_installations(tmp_path, monkeypatch, capsys):
    """As a table with the commands that renew them, and as JSON."""
    record = {'slingtorch': slingtorch.__version__, 'runscripts': 'abc', 'site': None, 'groups': [], 'values': None, 'files': {},
              'easyconfig': 'A-1.eb'}
    for name, text in {'current': json.dumps(record), 'damaged': '{', 'gone': '', 'old': json.dumps({**record, 'slingtorch': '0.0.9'}),
                       'older': '', 'site': json.dumps({**record, 'site': 'lumi', 'groups': ['gdr'], 'values': 'old'})}.items():
        for path, content in ((f'{name}/runscripts/lib/installed.json', text), (f'{name}/easybuild/A-1.eb', ''),
                              (f'modules/{name}/1.lua', f'local root = "{tmp_path}/{name}"\nRUNSCRIPTS')):
            (tmp_path / path).parent.mkdir(parents=True)
            (tmp_path / path).write_text(content)
    (tmp_path / 'older/runscripts/lib/installed.json').unlink()
    (tmp_path / 'older/easybuild/B-2.eb').touch()
    shutil.rmtree(tmp_path / 'gone')
    for name, value in (('LOADEDMODULES', 'x/1:old/1'), ('SLINGTORCH_SITE', 'local'), ('SLINGTORCH_SITE_GROUPS', '')):
        monkeypatch.setenv(name, value)
    for as_json in (False, True):
        assert status.run(argparse.Namespace(json=as_json), f'{tmp_path}/modules', print) == 3
    table, _, text = capsys.readouterr().out.partition('{\n')
    found = json.loads('{' + text)
    entries = ''.join(json.dumps(entry, sort_keys=True) + '\n' for entry in found.pop('installations'))
    expected(f'{table}\n{entries}{found}\n', 'status', [(tmp_path, '/TOP')])


def test_installation_of_somebody_without_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(status.os, 'geteuid', lambda: -1)
    assert status.describe('A/1', str(tmp_path))['owner'] is None    # whoever may write there may renew it
    monkeypatch.setattr(status.os, 'access', lambda *_: False)
    monkeypatch.setattr(pathlib.Path, 'owner', lambda _: {}['name'])
    entry = status.describe('A/1', str(tmp_path))
    assert (entry['owner'], entry['easyconfig']) == ('unknown', None)


def test_nothing_is_installed_and_the_site_is_unknown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('SLINGTORCH_SITE', 'atlantis')
    notes = []
    assert status.run(argparse.Namespace(json=False), str(tmp_path / 'none'), notes.append) == 0
    assert notes == [f'nothing with runscripts is installed in {tmp_path}/none (see eb --show-config)']
    log = tmp_path / 'job.out'
    log.write_text('torch.OutOfMemoryError: CUDA out of memory.\n')
    assert cli.main(['explain', str(log)]) == 0 and capsys.readouterr().err == ''
    monkeypatch.setattr(cli.explain, 'run', lambda *words: words)
    assert cli.main(['explain', 'a', '--json']) == (['a'], True, None)
    monkeypatch.setenv('SLINGTORCH_SITE', 'local')
    assert cli.main(['explain', 'a']) == (['a'], False, 'any')


def test_no_command(environ):
    done = run([], environ)
    assert (done.returncode, done.stderr.splitlines()) == (2, [
        'usage: slingtorch [-h] [--version] COMMAND ...', 'slingtorch: name a command, see slingtorch --help'])


def test_examples(environ, tmp_path):
    """They are listed, and copied where no file of the same name is."""
    done = run(['examples'], environ)
    assert '\nslurm     container_pytorch.job ddp_pytorch.job horovod_pytorch.job ray.job until_done.job ' in done.stdout
    assert done.stderr == (
        "slingtorch: 'slingtorch examples slurm' copies all files of a directory into the working directory, 'slingtorch "
        "examples slurm/ddp_pytorch.job' copies one. The pages docs/NAME.md that messages mention are in %s/docs\n" % ROOT)
    assert run(['examples', 'slurm/ddp_pytorch.job', str(tmp_path / 'new')], environ).returncode == 0
    assert run(['examples', 'slurm/ray.job/', str(tmp_path / 'slash')], environ).stdout == f'{tmp_path}/slash/ray.job\n'
    job = tmp_path / 'new/ddp_pytorch.job'
    assert job.read_text() == (ROOT / 'examples/slurm/ddp_pytorch.job').read_text()
    job.write_text('mine')
    done = run(['examples', 'slurm', str(job.parent)], environ)
    assert (done.returncode, done.stderr) == (1, f'slingtorch: error: {job.parent} already has ddp_pytorch.job, and nothing is '
                                              f'overwritten. Name another directory: slingtorch examples slurm DIR\n')
    assert [path.name for path in job.parent.iterdir()] == ['ddp_pytorch.job'] and job.read_text() == 'mine'
    for name in ('nowhere', '../hooks', '/etc'):
        done = run(['examples', name, str(tmp_path)], environ)
        assert done.returncode == 1 and "There is no example '%s'" % name in done.stderr


@pytest.mark.parametrize('name', ['slingtorch.py', 'slingtorch/__init__.py'])
def test_a_foreign_package_of_this_name_is_said(tmp_path, name):
    """In the place of a traceback; what runs in jobs is found by its path."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    code = 'import sys, slingtorch_command; sys.exit(slingtorch_command.main())'
    env = {**os.environ, 'PYTHONPATH': f'{tmp_path}:{ROOT}'}
    done = subprocess.run([sys.executable, '-c', code], env=env, cwd='/', stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"slingtorch: 'import slingtorch' takes {tmp_path / name}, and not {ROOT}")
    job = subprocess.run([sys.executable, '-B', ROOT / 'runscripts/lib/job', 'check'], env=env, stderr=subprocess.PIPE, text=True)
    assert 'RANK is not set' in job.stderr and 'slingtorch = slingtorch_command:main\n' in (ROOT / 'setup.cfg').read_text()
