# SPDX-License-Identifier: GPL-2.0-only
"""The commands beside an image, with a real runtime and a small real image: in-container, its links, make-squashfs."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess

import pytest
import testbed
from testbed import clean_environ, easybuild, forkedeb, missing, smallimage

IMAGE = 'small-1.0.sif'


class Installed:
    """Small/1.0 with a real image.

    :ivar root: where it is installed
    :ivar out: what `eb` printed
    """

    def __init__(self, directory, tool, runtime, image=None, check=True, wrap=(), env=None, name='Small', **parameters):
        self.directory, self.tool, self.runtime = directory, tool, runtime
        self.eb_env = easybuild.EasyBuild(directory / 'eb', tool)
        sources = directory / 'sources'
        sources.mkdir(exist_ok=True)
        shutil.copy(image or smallimage.image(runtime), sources / IMAGE)
        parameters = {'sources': [IMAGE], 'checksums': [None], **parameters}
        self.easyconfig = smallimage.easyconfig(directory, name=name, **parameters)
        env = {**self.eb_env.env, 'PATH': f'{runtime}:{self.eb_env.env["PATH"]}:/usr/sbin',
               'EASYBUILD_SOURCEPATH': f'{sources}:{self.eb_env.env["EASYBUILD_SOURCEPATH"]}', **(env or {})}
        self.env_of_eb = env
        self.root = self.eb_env.prefix / f'software/{name}/1.0'
        done = self.eb(wrap=wrap)
        self.status, self.out = done.returncode, done.stdout
        if check and done.returncode:
            pytest.fail(done.stdout, pytrace=False)
        self.env = {**clean_environ(), 'PATH': f'{runtime}:/usr/local/bin:/usr/bin:/bin'}

    def eb(self, *args, wrap=()):
        """Run `eb` on the easyconfig; its CompletedProcess, whose stdout has both streams."""
        args = [self.easyconfig, *args]
        if wrap:
            done = testbed.run([*wrap, easybuild.BIN / 'eb', *args], self.env_of_eb, 300, check=False,
                               cwd=self.directory)
        else:
            done = forkedeb.eb(args, self.env_of_eb, self.directory, 300)
        done.stdout += done.stderr
        return done

    def __call__(self, name, *args, env=None, check=True, cwd=None, wrap=()):
        """Run a command of bin/; CompletedProcess with text streams. The module is not loaded."""
        done = subprocess.run([*wrap, str(self.root / 'bin' / name), *map(str, args)],
                              env={**self.env, **(env or {})}, cwd=cwd or self.directory, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
        if check and done.returncode:
            pytest.fail(f'{name} {args}: status {done.returncode}\n{done.stdout}\n{done.stderr}', pytrace=False)
        return done

    def user_software(self):
        """What the container shows in /user-software."""
        return self('in-container', 'ls', '-AR', '/user-software').stdout


@pytest.fixture(scope='module')
def kept(tmp_path_factory, lmod, runtime):
    return Installed(tmp_path_factory.mktemp('wrappers'), lmod, runtime, preset_venv='mine', python_version='3',
                     sanity_check_packages={'imagepkg': '1.5'}, sanity_check_imports=['imagepkg'],
                     sanity_check_files_in_container=['/usr/lib/python3*/os.py'],
                     container_environment={'COLOUR': 'dark blue', 'ONLY': 'small'}, bind_paths=['/srv:/from/host'],
                     container_path=['/small/path'],
                     wrappers=['python', 'python3', 'pip', 'nothere'])


def files(directory):
    """What is in a directory, and when files were written."""
    return {(path.relative_to(directory), path.is_dir() or path.lstat().st_mtime_ns) for path in directory.rglob('*')}


@pytest.fixture
def small(kept):
    """The installation, its user-software as `eb` made it whatever the test before did."""
    saved, packages = kept.directory / 'user-software', kept.root / 'user-software'
    if not saved.exists():
        shutil.copytree(packages, saved, symlinks=True)
    for path in kept.root.glob('*user-software*'):
        if path != packages or files(packages) != files(saved):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not packages.exists():
        shutil.copytree(saved, packages, symlinks=True)
    if not (kept.root / IMAGE).exists():
        shutil.copy(kept.directory / 'sources' / IMAGE, kept.root)
    return kept


# --- installation


def test_checked_inside_the_container(small):
    assert 'list-packages imagepkg==1.5' in small.out
    assert 'import imagepkg' in small.out
    assert "ls -d /usr/lib/python3*/os.py" in small.out
    assert 'The inside of the image is not checked' not in small.out
    assert (small.root / 'user-software/venv/mine/bin/python').is_symlink()
    definition, = (small.root / 'share/docker-defs').iterdir()
    assert 'bootstrap: localimage' in definition.read_text()


def test_wrong_inside(tmp_path, lmod, runtime):
    done = Installed(tmp_path, lmod, runtime, check=False, python_version='2.7', sanity_check_imports=['notthere'],
                     sanity_check_packages={'imagepkg': '1.6', 'torch': '2.1'},
                     sanity_check_files_in_container=['/opt/plugin.so'])
    assert done.status != 0
    # each is a failure of its own; list-packages fails for either of its two, see test_list_packages
    failures = done.out.partition('ERROR: ')[2].split('sanity check command ')[1:]
    wanted = [["cannot access '/opt/plugin.so'"], ['3.11.'], ["No module named 'notthere'"],
              ['imagepkg is 1.5+local, not 1.6', 'torch is neither in the image nor in user-software']]
    assert len(failures) == len(wanted)
    for messages, failure in zip(wanted, failures):
        assert 'failed with exit code' in failure and not [message for message in messages if message not in failure]
    assert not (done.eb_env.prefix / 'modules/all/Small/1.0.lua').exists()


def test_image_without_python(tmp_path, lmod, runtime):
    image = smallimage.image(runtime, python=False)
    done = Installed(tmp_path, lmod, runtime, image=image, check=False)
    assert done.status != 0 and 'python": executable file not found' in done.out
    done = Installed(tmp_path, lmod, runtime, image=image, check=False, preset_venv='mine')
    assert done.status != 0
    assert "the image may have no 'python' or no venv for it. Then set container_python" in ' '.join(done.out.split())
    done = Installed(tmp_path, lmod, runtime, image=image, container_python=None, wrappers=['cat'])
    assert done('in-container', 'cat', '/etc/passwd').stdout.startswith('root:')


AS_USER = 'exec unshare --user --map-user=1000 --map-group=1000 "$@"'
NO_USER_NAMESPACES = ['unshare', '--user', '--map-root-user', 'bash', '-c',
                      f'echo 1 > /proc/sys/user/max_user_namespaces && {AS_USER}', 'bash']
NO_FUSE = ['unshare', '--mount', 'bash', '-c',
           f'file=$(mktemp) && chmod 0 $file && mount --bind $file /dev/fuse && rm -f $file; {AS_USER}', 'bash']


@pytest.mark.parametrize('wrap, message', [
    (NO_USER_NAMESPACES, 'the runtime may not create user namespaces on this machine. An administrator can allow them'),
    (NO_FUSE, 'it needs squashfuse and read and write permission for /dev/fuse'),
], ids=['user-namespaces', 'fuse'])
def test_host_that_cannot_run_containers(tmp_path, lmod, runtime, wrap, message):
    """Limits that hold for this one process, an ordinary user's: a warning."""
    if os.geteuid() != 0:
        missing('root, which sets the limits')
    done = Installed(tmp_path, lmod, runtime, wrap=wrap, preset_venv='mine')
    out = ' '.join(done.out.split())
    assert message in out
    assert 'The inside of the image is not checked' in out and 'The virtual environment mine is not made' in out


# --- running


def test_arguments_streams_and_directory(small, tmp_path):
    code = 'import sys, os; print(sys.argv[1:]); print(os.getcwd()); print("err", file=sys.stderr)'
    arguments = ['a b', "it's", '"quoted"', '$HOME', '*', '', '\\', 'new\nline']
    done = small('python', '-c', code, *arguments, cwd='/tmp')
    assert done.stdout.splitlines() == [str(arguments), '/tmp']
    assert 'err' in done.stderr


def test_environment_without_the_module(small):
    """What the module file would set is set by the command itself."""
    code = 'import os, sys; print(sys.prefix, os.environ["COLOUR"], os.environ["PYTHONNOUSERSITE"], ' \
           'os.path.isdir("/from/host"), os.path.exists("/runscripts/get-master"), os.environ["PATH"].split(":")[:2])'
    out = small('python', '-c', code).stdout.strip()
    assert out == "/user-software/venv/mine dark blue 1 True True ['/runscripts', '/user-software/venv/mine/bin']"
    assert 'venv/mine mine 1' in small('python', '-c', code, env={'SINGULARITYENV_COLOUR': 'mine'}).stdout
    code = 'import os; print(os.environ["RANK"], os.environ["MASTER_ADDR"])'
    assert small('in-container', 'conda-python-distributed', '-c', code).stdout == '0 127.0.0.1\n'


def test_binds_of_the_user_are_kept(small, tmp_path):
    (tmp_path / 'with space').mkdir()
    (tmp_path / 'with space/seen').touch()
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other/seen').touch()
    env = {'SINGULARITY_BINDPATH': f'{tmp_path}/with space:/one', 'SINGULARITY_BIND': f'{tmp_path}/other:/two'}
    small('in-container', 'ls', '/one/seen', '/two/seen', '/runscripts/get-master', env=env)
    env = {'APPTAINER_BINDPATH': f'{tmp_path}/with space:/one', 'APPTAINER_BIND': f'{tmp_path}/other:/two',
           'CONTAINERROOT': str(tmp_path)}  # something of the user's, and no container module
    done = small('in-container', 'ls', '/one/seen', '/two/seen', '/runscripts/get-master', env=env)
    assert 'different values' not in done.stderr


def test_another_container_module_is_loaded(small, tmp_path, lmod, runtime):
    """Neither eb nor the commands of one installation touch the packages, binds and variables of the other one."""
    loaded = lmod.load('Small/1.0', modulepath=[small.eb_env.modulepath])
    env = {name: value for name, value in loaded.items()
           if name.startswith(('APPTAINER', 'SINGULARITY', 'CONTAINERROOT', 'SLINGTORCH_C', 'SIF'))}
    assert env['CONTAINERROOT'] == str(small.root)
    before = (small.root / 'user-software/venv/mine/pyvenv.cfg').stat().st_mtime_ns
    other = Installed(tmp_path, lmod, runtime, name='Other', preset_venv='mine', env=env,
                      container_environment={'COLOUR': 'green'})
    assert (other.root / 'user-software/venv/mine/bin/python').is_symlink()
    assert (small.root / 'user-software/venv/mine/pyvenv.cfg').stat().st_mtime_ns == before
    script = 'echo x > /user-software/who; echo "$COLOUR-$ONLY-$PATH"; ls /from'
    done = other('in-container', 'sh', '-c', script, env=env, check=False)
    assert (other.root / 'user-software/who').exists() and not (small.root / 'user-software/who').exists()
    assert done.stdout.startswith('green--') and '/small/path' not in done.stdout and "'/from'" in done.stderr


def test_exit_status(small):
    assert small('python', '-c', 'raise SystemExit(7)', check=False).returncode == 7
    assert small('python', '-c', 'import os; os.kill(os.getpid(), 15)', check=False).returncode in (143, -15)
    assert small('in-container', 'bash', '-c', 'kill -KILL $$', check=False).returncode in (137, -9)
    done = small('nothere', check=False)
    assert done.returncode != 0 and 'nothere' in done.stderr


def test_signals_reach_the_command(small):
    code = 'import signal, sys, time; signal.signal(15, lambda *_: sys.exit(42)); print("ready", flush=True); ' \
           'time.sleep(600)'
    process = subprocess.Popen([small.root / 'bin/python', '-c', code], env=small.env, stdout=subprocess.PIPE,
                               text=True)
    assert process.stdout.readline() == 'ready\n'
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) == 42


def test_no_recursion_inside(small):
    """The host's PATH in the container, and the command by its full path."""
    bin_dir = small.root / 'bin'
    env = {'SINGULARITYENV_PREPEND_PATH': str(bin_dir), 'SINGULARITY_BIND': str(small.root)}
    script = f'python -c "import sys; print(sys.prefix)"; {bin_dir}/python -c "print(2)"; ' \
             f'{bin_dir}/list-packages imagepkg; {bin_dir}/start-shell -c "echo shell"'
    out = small('in-container', 'bash', '-c', script, env=env).stdout
    assert out.split() == ['/user-software/venv/mine', '2', 'imagepkg', '1.5+local', 'image', 'shell']
    done = small('in-container', 'bash', '-c', f'{bin_dir}/make-squashfs', env=env, check=False)
    assert done.returncode == 1 and 'works only outside the container' in done.stderr


def test_called_through_links_and_relative_paths(small, tmp_path):
    (tmp_path / 'python').symlink_to(small.root / 'bin/python')
    done = subprocess.run([tmp_path / 'python', '-c', 'import sys; print(sys.prefix)'], env=small.env,
                          stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == '/user-software/venv/mine\n'
    done = subprocess.run(['bin/python', '-c', 'import sys; print(sys.prefix)'], env=small.env, cwd=small.root,
                          stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == '/user-software/venv/mine\n'


def test_start_shell(small):
    done = small('start-shell', '-c', 'echo "$0 $1 $VIRTUAL_ENV"', 'name', 'a b')
    assert done.stdout == 'name a b /user-software/venv/mine\n'
    done = subprocess.run([small.root / 'bin/start-shell'], env=small.env, input='echo in $APPTAINER_NAME\nexit 3\n',
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert f'in {IMAGE}' in done.stdout and done.returncode == 3


# --- packages


def test_list_packages(small):
    lines = {line.split()[0]: line.split()[1:] for line in small('list-packages').stdout.splitlines()}
    assert lines['imagepkg'] == ['1.5+local', 'image']
    assert small('list-packages', 'ImagePkg==1.5').stdout.split() == ['imagepkg', '1.5+local', 'image']
    for wrong, message in [('imagepkg==2', 'imagepkg is 1.5+local, not 2'),
                           ('torch', 'torch is neither in the image nor in user-software')]:
        done = small('list-packages', 'imagepkg', wrong, check=False)
        assert done.returncode == 1
        assert message in done.stderr


def test_pip_in_the_environment_of_another_user(other_user, lmod):
    """A remedy, not pip's traceback."""
    theirs = Installed(other_user.directory, lmod, other_user.runtime(), preset_venv='mine')
    other_user.open(other_user.directory)
    done = theirs('pip', 'install', 'x', check=False, wrap=other_user.command, cwd='/')
    assert done.returncode == 1 and 'only the owner of ' in done.stderr and "image_transfer = 'symlink'" in done.stderr


def test_pip_installs_into_user_software(small, tmp_path):
    smallimage.wheel(tmp_path, 'newpkg', '0.3', requires=['imagepkg>=1'])
    done = small('python', '-m', 'pip', 'install', '--no-index', '--find-links', tmp_path, '--disable-pip-version-check', 'newpkg')
    assert 'Requirement already satisfied: imagepkg' in done.stdout
    assert small('list-packages', 'newpkg').stdout.split() == ['newpkg', '0.3', 'user-software']
    failed = small('pip', 'install', '-q', '--no-index', 'doesnotexist', check=False)
    assert failed.returncode == 1 and 'doesnotexist' in failed.stderr


# --- squashfs


def test_there_and_back_without_reloading_the_module(small):
    (small.root / 'user-software/with space').mkdir()
    (small.root / 'user-software/with space/file -> x').write_text('content')
    (small.root / 'user-software/empty').touch()
    before = small.user_software()
    script = '''
        module load Small
        make-squashfs && python -c 'import sys; print(sys.prefix, open("/user-software/with space/file -> x").read())'
        in-container touch /user-software/new 2>/dev/null && echo writable
        unmake-squashfs && in-container touch /user-software/new && echo writable again
    '''
    done = small.tool.bash(script, modulepath=[small.eb_env.modulepath], env={'PATH': small.env['PATH']})
    lines = [line for line in done.stdout.splitlines() if 'packages are now in' not in line]
    assert lines == ['/user-software/venv/mine content', 'writable again']
    assert "load the module again" in done.stdout
    (small.root / 'user-software/new').unlink()
    assert small.user_software() == before
    assert not (small.root / 'user-software.squashfs').exists()
    assert not [path for path in small.root.glob('.user-software.*') if path.name != '.user-software.lock']


def test_squashfs_is_one_file(small):
    """Plain `singularity exec` sees the packages when the module is loaded again."""
    small('make-squashfs')
    assert small('pip', 'download', '--help').returncode == 0
    script = 'module load Small; singularity exec $SIF ls /user-software/venv'
    done = small.tool.bash(script, modulepath=[small.eb_env.modulepath], env={'PATH': small.env['PATH']})
    assert done.stdout == 'mine\n'


@pytest.mark.parametrize('command', ['make-squashfs', 'unmake-squashfs'])
def test_killed_at_every_moment(small, command, tmp_path):
    """Killed before each of its external commands, one after the other: nothing is lost, and the next call finishes."""
    shutil.rmtree(small.root / 'user-software/venv')     # a few files are enough here
    smallimage.package(small.root / 'user-software', 'precious', '1')
    before = small.user_software()
    assert '/precious:\n__init__.py' in before
    tools = tmp_path / 'tools'
    tools.mkdir()
    counted = ('mksquashfs', 'unsquashfs', 'sync', 'mv', 'mkdir', 'rm', 'find')
    for name in counted:
        real = shutil.which(name, path='/usr/bin:/bin:/usr/sbin') or missing(name)
        (tools / name).write_text(f'''#!/bin/bash
count=$(( $(cat {tmp_path}/count) + 1 )); echo $count > {tmp_path}/count
[[ $count == $STOP_AT ]] && kill -KILL 0     # the whole process group
exec {real} "$@"
''')
        (tools / name).chmod(0o755)
    if command == 'unmake-squashfs':
        small('make-squashfs')
    kept, names = tmp_path / 'kept', ('user-software', 'user-software.squashfs')
    kept.mkdir()
    testbed.run(['cp', '-a', *(small.root / name for name in names if (small.root / name).exists()), kept])
    stops = 0
    for stop in range(1, 40):
        (tmp_path / 'count').write_text('0')
        env = {'PATH': f'{tools}:{small.env["PATH"]}', 'STOP_AT': str(stop)}
        done = small(command, check=False, env=env, wrap=['setsid'])
        assert small.user_software() == before, f'after stop {stop}'
        if done.returncode == 0:
            break
        stops += 1
        done = small(command, check=False)
        finished = 'already exists' if command == 'make-squashfs' else 'there is no'
        assert done.returncode == 0 or finished in done.stderr, (stop, done.stderr)
        assert small.user_software() == before, f'after finishing stop {stop}'
        testbed.run(['rm', '-rf', *(small.root / name for name in names)])
        testbed.run(['cp', '-a', *kept.iterdir(), small.root])
    assert stops >= 4
    assert not [path for path in small.root.glob('.user-software.*') if path.name != '.user-software.lock']


def test_two_at_once(small):
    with open(small.root / '.user-software.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = small('make-squashfs', check=False)
    assert done.returncode == 1 and 'another make-squashfs or unmake-squashfs is working' in done.stderr
    assert 'mine' in small.user_software()


def test_disk_full(small, tmp_path):
    """The image file does not fit: nothing was changed."""
    if os.geteuid() != 0:
        missing('root, which mounting a small file system needs')
    (small.root / 'user-software/big').write_bytes(os.urandom(3_000_000))
    place = tmp_path / 'full'
    place.mkdir()
    script = ('mount -t tmpfs -o size=60m tmpfs "$1" && cp -a "$0"/. "$1"/ && head -c 80m /dev/zero > "$1"/filler; '
              '"$1"/bin/make-squashfs; status=$?; ls -A "$1"; exit $status')
    (small.root / IMAGE).unlink()
    done = subprocess.run(['unshare', '--mount', 'bash', '-c', script, small.root, place], env=small.env,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and 'nothing was changed' in done.stderr
    assert '.user-software.new' not in done.stdout and 'user-software.squashfs' not in done.stdout
    assert 'user-software' in done.stdout


# --- a preset virtual environment


def test_preset_venv_on_top_of_the_images_own(tmp_path, lmod, runtime):
    """The image has its packages in an environment, as LUMI AI Factory's in /opt/venv: they are seen."""
    small = Installed(tmp_path, lmod, runtime, preset_venv='mine', container_path=['/opt/venv/bin'],
                      wrappers=['python'], sanity_check_packages={'inside': '1.0'})
    done = small('python', '-c', 'import inside, sys; print(sys.prefix, inside.__file__)')
    assert done.stdout.startswith('/user-software/venv/mine /opt/venv/lib/')


def test_rebuilds_with_a_preset_venv(tmp_path, lmod, runtime):
    """What is half made is not taken for the user's own; what is whole is kept, and so are the user's packages."""
    small = Installed(tmp_path, lmod, runtime, preset_venv='mine')

    def rebuild():
        done = small.eb('--rebuild')
        assert done.returncode == 0, done.stdout
        return ' '.join(done.stdout.split())

    # as SIGKILL leaves it
    venv = small.root / 'user-software/venv'
    assert not (venv / 'mine.unfinished').exists()
    shutil.rmtree(venv / 'mine/lib')
    (venv / 'mine.unfinished').touch()
    rebuild()
    assert small('python', '-c', 'import sys; print(sys.prefix)').stdout == '/user-software/venv/mine\n'
    smallimage.package(small.root / 'user-software', 'precious', '1')
    assert 'does not work with this image' not in rebuild()
    assert (small.root / 'user-software/precious').is_dir()
    (venv / 'mine/bin/python').unlink()
    (venv / 'mine/bin/python').symlink_to('/opt/gone/python')
    assert 'does not work with this image' in rebuild()
    assert json.loads((small.root / 'image.json').read_text())['file'] == IMAGE


# --- the nodes of a job


def test_nodes_of_a_job(tmp_path, lmod, runtime, slurm):
    """check-container, with an image on each node's own disk: the same, another one, none, and no runtime."""
    testbed.only_root('gives emulated nodes a disk of their own')
    small = Installed(tmp_path, lmod, runtime, image=smallimage.image(runtime, python=False), container_python=None,
                      wrappers=[], central_image_dirs=[str(slurm.local)])
    (small.root / IMAGE).unlink()
    images = [slurm.dir / f'local.{node}' / IMAGE for node in testbed.NODES]
    for image in images:
        shutil.copy(small.directory / 'sources' / IMAGE, image)

    def check(*command, **env):
        job = ['salloc', '--quiet', '-N2', '--ntasks-per-node=2', small.root / 'bin/check-container', *command]
        module = {'CONTAINERROOT': small.root, 'SIF': f'{slurm.local}/{IMAGE}'}
        done = testbed.run(job, env={**slurm.env, 'PATH': f'{runtime}:{slurm.env["PATH"]}', **module, **env}, check=False)
        return done.returncode, done.stdout + done.stderr

    try:
        assert check() == (0, f'check-container: 2 node(s), one image: {slurm.local}/{IMAGE}\n')
        with open(images[1], 'r+b') as stream:
            stream.seek(48)     # the id in the header
            stream.write(b'another image id')
        status, out = check()
        assert status == 1 and 'check-container: the nodes have different images:' in out
        assert re.search(rf'    {slurm.local}/{IMAGE} \(616e6f74686572[0-9a-f]+\) on nid000002\n', out)
        images[1].unlink()
        status, out = check()
        assert status == 1 and 'is missing or cannot be read' in out and 'does not start on every node' in out
        status, out = check(PATH='/usr/bin:/bin')
        assert status == 1 and 'neither singularity nor apptainer is in PATH' in out
        status, out = check('/bin/echo', 'no', 'tasks')
        assert status == 1 and "no node answered. Does '/bin/echo no tasks' start anything?" in out
    finally:
        for image in images:
            image.unlink(missing_ok=True)
