# SPDX-License-Identifier: GPL-2.0-only
"""An environment as one image, through real `eb` and mksquashfs."""
import hashlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

from testbed import run, stagedenv

LIBRARY = 'python%d.%d' % sys.version_info[:2]


@pytest.fixture(scope='module')
def unpacked(image_env, tmp_path_factory):
    """The image, unpacked in another place than the installation's, which is out of the way."""
    directory = tmp_path_factory.mktemp('elsewhere') / 'a place'
    run(['unsquashfs', '-q', '-n', '-d', directory, image_env.image])
    return directory


def python(directory, *arguments, check=True):
    base = directory / 'lib/base'
    return run([directory / 'bin/python', *arguments], check=check,
               env={'PATH': '/usr/bin:/bin', 'LD_LIBRARY_PATH': str(base), 'HOME': '/nonexistent'})


def test_module_and_checksum(image_env):
    image = image_env.root / 'environment.squashfs'
    assert image_env.env['SLINGTORCH_ENVIRONMENT_IMAGE'] == str(image)
    digest = hashlib.sha256(image.read_bytes()).hexdigest()
    assert pathlib.Path(f'{image}.sha256').read_text() == f'{digest}  environment.squashfs\n'
    assert not (image_env.root / '.environment-image').exists()
    # the environment itself is as it was: nothing of it was changed through a link
    done = run([image_env.root / 'bin/python', '-c', 'import alpha, sys; print(sys.prefix)'], env=image_env.env)
    assert done.stdout.strip() == str(image_env.root)


def test_everything_comes_from_where_the_image_lies(unpacked):
    code = ('import alpha, ctypes, json, sqlite3, ssl, sys, sysconfig\n'
            'print(*sys.path, sys.prefix, sys.base_prefix, alpha.__file__, json.__cached__, sep="\\n")\n'
            'print(*{line.split(None, 5)[-1].strip() for line in open("/proc/self/maps") if "/" in line}, sep="\\n")\n')
    paths = [line for line in python(unpacked, '-c', code).stdout.splitlines() if line.startswith('/')]
    assert re.search(f'(?m)^{re.escape(str(unpacked))}/lib/{LIBRARY}/(site|dist)-packages/alpha.py$', '\n'.join(paths))
    foreign = [path for path in paths if not path.startswith((f'{unpacked}/', '/lib/', '/usr/lib/', '/lib64/'))
               and path != str(unpacked)]
    assert foreign == []


def test_bytecode_is_inside(unpacked):
    for module in ('site-packages/alpha.py', 'json/decoder.py', 'os.py'):
        source = unpacked / 'lib' / LIBRARY / module
        assert list((source.parent / '__pycache__').glob(f'{source.stem}.*.pyc')), module
    done = python(unpacked, '-v', '-c', 'import alpha')
    loaded = [line for line in done.stderr.splitlines() if 'code object from' in line]
    assert loaded and all(line.endswith(".pyc'") for line in loaded)


def test_console_scripts_run_the_python_beside_them(unpacked):
    env = {'PATH': '/usr/bin:/bin', 'LD_LIBRARY_PATH': str(unpacked / 'lib/base')}
    done = run([unpacked / 'bin/where', 'two words'], env=env)
    assert done.stdout.splitlines() == [str(unpacked), 'two words']


def test_no_path_of_the_installation_is_left(image_env, unpacked):
    done = subprocess.run(['grep', '-rl', '--exclude=*.pyc', str(image_env.root), str(unpacked)],
                          stdout=subprocess.PIPE, text=True)
    assert done.stdout == ''
    left_out = {'test', 'idlelib', 'turtledemo', 'ensurepip', 'dist-packages', 'runscripts', '.runscripts', 'easybuild', 'pyvenv.cfg'}
    assert not left_out.intersection(os.listdir(unpacked) + os.listdir(unpacked / 'lib' / LIBRARY))


def test_python_of_the_distribution(eb_env, tmp_path):
    """Debian's looks for packages in other directories unless it is in a virtual environment."""
    tiny = stagedenv.write_easyconfig(tmp_path, "python_command = '/usr/bin/python3'\n"
                                                "sanity_check_imports = ['alpha']\n")
    done = eb_env(tiny.easyconfig, env=tiny.pip_env)
    image = eb_env.prefix / 'software/PyTorch/0.1-tiny/environment.squashfs'
    run(['unsquashfs', '-q', '-n', '-d', tmp_path / 'there', image])
    done = python(tmp_path / 'there', '-c', 'import alpha; print(alpha.__file__)')
    assert done.stdout.startswith(f'{tmp_path}/there/lib/')


def test_run_paths_lead_into_the_image(unpacked, tmp_path):
    """The place of the interpreter's own libraries is not even looked into: the search of each is a call."""
    trace = tmp_path / 'trace'
    command = ['strace', '-f', '-qq', '-e', 'trace=openat', '-o', trace, unpacked / 'bin/python', '-c', 'import ctypes']
    run(command, env={'PATH': '/usr/bin:/bin'})
    base = os.path.realpath(sys.base_prefix)
    assert base.startswith(('/usr',)) or f'"{base}/' not in trace.read_text()
