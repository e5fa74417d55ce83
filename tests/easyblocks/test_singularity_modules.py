# SPDX-License-Identifier: GPL-2.0-only
"""Module files of the Singularity easyblock: Lua under Lmod, Tcl under Lmod, Tcl under Environment Modules."""

import os
import re
import shlex
import shutil

import pytest
from testbed import ORDINARY, easybuild, modulestools, parse_env0, smallimage

OWN = re.compile(r'^(SIF|CONTAINERROOT|SINGULARITY|APPTAINER|SLINGTORCH_(?!TEST_DIR|CI)|RUNSCRIPTS)')


class Modules:
    """Small/1.0 and Other/2.0, installed, and their modules.

    :ivar bash: runs a script with the modules; its output has both streams
    """

    def __init__(self, directory, tool, syntax):
        self.tool, self.directory = tool, directory
        maker = modulestools.lmod() if tool.name == 'Lmod' else tool
        eb = easybuild.EasyBuild(directory / 'eb', maker)
        self.central = directory / 'central'
        self.second_central = directory / 'central2'
        for path in (self.central, self.second_central, directory / 'with space', directory / 'sources'):
            path.mkdir()
        smallimage.fake_sif(directory / 'sources/small-1.0.sif')
        smallimage.fake_sif(directory / 'sources/other-2.0.sif')
        common = {'central_image_dirs': [str(self.central), str(self.second_central)],
                  'bind_paths': [str(directory / 'with space'), '/usr:/host/usr:ro', '/not/here'],
                  'container_environment': {'COLOUR': 'dark "blue" $5 [x]'}, 'container_path': ['/opt/env/bin'],
                  'preset_venv': 'mine', 'checksums': [None]}
        configs = [smallimage.easyconfig(directory, sources=['small-1.0.sif'], **common),
                   smallimage.easyconfig(directory, name='Other', version='2.0', sources=['other-2.0.sif'], **common)]
        eb(*configs, f'--module-syntax={syntax}', f'--sourcepath={directory}/sources:{eb.env["EASYBUILD_SOURCEPATH"]}')
        self.modulepath = eb.modulepath
        self.root = eb.prefix / 'software/Small/1.0'
        self.other = eb.prefix / 'software/Other/2.0'
        self.image = self.root / 'small-1.0.sif'

    def bash(self, script, env=None, check=False):
        return self.tool.bash('exec 2>&1\n' + script, modulepath=[self.modulepath], env=env, check=check)

    def after(self, script, env=None):
        """Our variables after a script."""
        done = self.bash(f'{script}\necho "---"\nenv -0', env=env, check=True)
        return {key: value for key, value in parse_env0(done.stdout.split('---\n', 1)[1]).items() if OWN.match(key)}

    def message(self, script, env=None):
        """What a script that must fail printed, on one line, as the modules tools break lines where they like."""
        done = self.bash(script, env=env)
        assert done.returncode != 0, done.stdout
        return ' '.join(done.stdout.split())


@pytest.fixture(scope='module', params=['lmod-Lua', 'lmod-Tcl', 'envmodules-Tcl'])
def installed(request, tmp_path_factory):
    tool, syntax = request.param.split('-')
    return Modules(tmp_path_factory.mktemp(request.param), request.getfixturevalue(tool), syntax)


@pytest.fixture
def modules(installed):
    """The modules, with their images and nothing else in place whatever the test before did."""
    kept = installed.directory / 'kept.sif'
    if not kept.exists():
        shutil.copy(installed.image, kept)
    for path in (installed.central, installed.second_central):
        shutil.rmtree(path)
        path.mkdir()
    installed.image.unlink(missing_ok=True)
    shutil.copy(kept, installed.image)
    (installed.root / 'user-software.squashfs').unlink(missing_ok=True)
    return installed


def test_variables(modules):
    env = modules.after('module load Small')
    root = modules.root
    binds = [f'{root}/runscripts:/runscripts:ro', f'{modules.directory}/with space', '/usr:/host/usr:ro',
             f'{root}/user-software:/user-software']
    assert env['SIF'] == env['SIFSMALL'] == f'{root}/small-1.0.sif'
    assert env['RUNSCRIPTS'] == env['RUNSCRIPTSSMALL'] == f'{root}/runscripts'
    assert env['CONTAINERROOT'] == str(root)
    for runtime in ('SINGULARITY', 'APPTAINER'):
        assert env[f'{runtime}_BINDPATH'].split(',') == binds       # /not/here is not
        assert env[f'{runtime}ENV_PREPEND_PATH'] == '/runscripts:/user-software/venv/mine/bin:/opt/env/bin'
        assert env[f'{runtime}ENV_COLOUR'] == 'dark "blue" $5 [x]'
        assert env[f'{runtime}ENV_VIRTUAL_ENV'] == '/user-software/venv/mine'
        assert env[f'{runtime}ENV_PYTHONNOUSERSITE'] == '1'
    assert 'SINGULARITY_BIND' not in env


def test_commands_are_in_the_path(modules):
    """Runscripts that start Python run the ones in the container; those for the job script are the host's."""
    names = ['in-container', 'python', 'make-squashfs', 'conda-python-distributed', 'conda-python-simple']
    done = modules.bash(f'module load Small; type -P {" ".join(names)} cpu-bind', check=True)
    assert done.stdout.split() == [*(f'{modules.root}/bin/{name}' for name in names), f'{modules.root}/runscripts/cpu-bind']
    assert os.readlink(modules.root / 'bin/conda-python-distributed') == 'in-container'


def test_unloading_leaves_nothing(modules):
    assert modules.after('module load Small; module load Small; module unload Small') == {}


USERS = {'SINGULARITY_BIND': '/data', 'SINGULARITY_BINDPATH': '/mine:/m,/b', 'SINGULARITYENV_COLOUR': 'mine',
         'APPTAINERENV_PREPEND_PATH': '/my/bin'}


def test_what_the_user_has_set_stays(modules):
    env = modules.after('module load Small', env=USERS)
    assert env['SINGULARITY_BIND'] == '/data'
    assert env['SINGULARITY_BINDPATH'] == env['APPTAINER_BINDPATH'] + ',/mine:/m,/b'
    assert env['APPTAINERENV_PREPEND_PATH'] == env['SINGULARITYENV_PREPEND_PATH'] + ':/my/bin'
    assert env['SINGULARITYENV_COLOUR'] == 'mine' and 'APPTAINERENV_COLOUR' not in env
    assert modules.after('module load Small; rm "$SIF"; module unload Small', env=USERS) == USERS
    assert modules.after('module load Small; module load Small; module unload Small', env=USERS) == USERS


def test_what_the_user_sets_after_loading_stays(modules):
    script = 'module load Small; export SINGULARITY_BINDPATH="$SINGULARITY_BINDPATH,/later"; module unload Small'
    assert modules.after(script) == {'SINGULARITY_BINDPATH': '/later'}


def test_paths_that_come_and_go_between_loading_and_unloading(modules):
    squashfs = modules.root / 'user-software.squashfs'
    script = f'module load Small; mv "{modules.directory}/with space" "{modules.directory}/away"; ' \
             f'echo x > {squashfs}; module unload Small'
    try:
        assert modules.after(script) == {}
    finally:
        (modules.directory / 'away').rename(modules.directory / 'with space')


def test_squashfs_takes_the_place_of_the_directory(modules):
    (modules.root / 'user-software.squashfs').write_text('something')
    env = modules.after('module load Small')
    assert env['APPTAINER_BINDPATH'].split(',')[-1] == \
        f'{modules.root}/user-software.squashfs:/user-software:image-src=/user-software'
    assert f'{modules.root}/user-software:/user-software' not in env['APPTAINER_BINDPATH'].split(',')


def test_empty_squashfs(modules):
    (modules.root / 'user-software.squashfs').touch()
    message = modules.message('module load Small')
    assert 'user-software.squashfs is empty, left behind by an interrupted command' in message
    assert 'Remedy: remove it' in message


def test_central_image_after_rm(modules):
    shutil.copy(modules.image, modules.central)
    script = 'module load Small; rm "$SIF"; module load Small; module unload Small; module load Small; echo "is $SIF"'
    done = modules.bash(script, check=True)
    text = ' '.join(done.stdout.split())
    assert f'Small/1.0: its own copy of the container image does not exist; using {modules.central}/small-1.0.sif' in text
    assert f'is {modules.central}/small-1.0.sif' in text


def test_commands_take_the_image_that_the_module_has_chosen(modules):
    """Also when the own one comes back, and until the module is loaded again; without it, the own one."""
    runtime = modules.directory / 'bin/singularity'
    runtime.parent.mkdir(exist_ok=True)
    runtime.write_text('#!/bin/sh\necho "runs $2"\n')
    runtime.chmod(0o755)
    kept, central = modules.directory / 'kept.sif', modules.central / modules.image.name
    modules.image.rename(central)
    inside = f'PATH={runtime.parent}:$PATH {modules.root}/bin/in-container true'
    again = 'module unload Small; module load Small'
    done = modules.bash(f'module load Small; cp {kept} {modules.image}; {inside}; rm $SIF; {inside}; {again}; {inside}')
    assert re.findall('runs (.*)', done.stdout) == [str(central), str(modules.image)]
    assert f'the image {central} is missing or cannot be read\nremedy: load the module (again)' in done.stdout + done.stderr
    assert f'runs {modules.image}\n' in modules.bash(inside, check=True).stdout


def test_second_central_directory(modules):
    modules.image.rename(modules.second_central / 'small-1.0.sif')
    assert modules.after('module load Small')['SIF'] == f'{modules.second_central}/small-1.0.sif'


def test_unreadable_images_are_passed_over(modules):
    for path in (modules.central, modules.second_central):
        shutil.copy(modules.image, path)
    for image in (modules.image, modules.central / 'small-1.0.sif'):
        image.chmod(0)
    inner = f'{modules.tool.init}\nmodule use {modules.modulepath}\nmodule load Small && echo "is $SIF"'
    (modules.directory / 'inner').write_text(inner)
    ordinary = f'{shlex.join(ORDINARY)} bash --noprofile --norc {modules.directory}/inner'
    done = modules.bash(ordinary, check=True)
    assert f'is {modules.second_central}/small-1.0.sif' in done.stdout
    # and with none that can be read
    (modules.second_central / 'small-1.0.sif').chmod(0)
    done = modules.bash(ordinary)
    assert done.returncode != 0 and 'is missing or cannot be read' in ' '.join(done.stdout.split())
    modules.image.unlink()


def test_no_image_anywhere(modules):
    modules.image.unlink()
    message = modules.message('module load Small')
    assert 'The container image small-1.0.sif is missing or cannot be read' in message
    for path in (modules.root, modules.central, modules.second_central):
        assert str(path) in message
    assert "Remedy: run 'eb --rebuild Small-1.0.eb' to install it again" in message and 'while executing' not in message
    assert modules.after('module load Small >/dev/null 2>&1 || true', env=USERS) == USERS


def test_showing_and_helping_need_no_image(modules):
    modules.image.unlink()
    for command in ('show', 'help', 'whatis'):
        done = modules.bash(f'module {command} Small', check=True)
        assert 'missing' not in done.stdout


def test_two_container_modules_at_once(modules):
    """Lmod replaces the one that is loaded, and says so; Environment Modules refuses, and says so."""
    done = modules.bash('module load Small; module load Other; echo "is $SIF"; env -0 | grep -zc "^SIFSMALL=" || true')
    if modules.tool.name == 'Lmod':
        assert 'replacing "Small/1.0" with "Other/2.0"' in ' '.join(done.stdout.split())
        assert f'is {modules.other}/other-2.0.sif' in done.stdout
    else:
        assert 'Module cannot be loaded due to a conflict' in done.stdout
        assert f'is {modules.root}/small-1.0.sif' in done.stdout
    script = 'module load Small Other >/dev/null 2>&1; module unload Small; module unload Other'
    assert modules.after(script, env=USERS) == USERS


def test_swap(modules):
    env = modules.after('module load Small; module swap Small Other')
    assert env['SIF'] == f'{modules.other}/other-2.0.sif' and 'SIFSMALL' not in env
    assert str(modules.root) not in env['APPTAINER_BINDPATH']
