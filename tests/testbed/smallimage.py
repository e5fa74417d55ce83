# SPDX-License-Identifier: GPL-2.0-only
"""Small container images: a file that is a SIF by its header only, and a real one that is made in seconds."""

import hashlib
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile

import pytest

from . import DIR, easybuild, forkedeb, images, locked, missing, run

COMMANDS = ('bash', 'sh', 'env', 'cat', 'chmod', 'false', 'id', 'kill', 'ls', 'mkdir', 'mktemp', 'mv', 'readlink', 'rm',
            'rmdir', 'sed', 'sleep', 'stat', 'touch', 'true', 'uname')
RECIPE = 6
"""Raised when images made by an earlier version of this file must be made again."""

ENSUREPIP = '''
def _main(argv=None):
    import shutil, sys
    with open('/usr/bin/pip') as script:
        text = script.read().replace('/usr/bin/python3', sys.executable)
    for name in ('pip', 'pip3'):
        with open(f'{sys.prefix}/bin/{name}', 'w') as script:
            script.write(text)
        shutil.copymode('/usr/bin/pip', script.name)
'''
"""In the image: the commands of the pip that the image has, as testbed.quickvenv has them; to unpack one takes 5 s."""


def fake_sif(path, size=100_000, holes=False):
    """A file with the header of a SIF and nothing in it that could be run.

    :param size: of the file in bytes
    :param holes: leave the data out on the disk: for sizes of gigabytes
    """
    header = struct.pack('<32s10s3s3s16s8q', b'#!/usr/bin/env run-singularity\n', b'SIF_MAGIC\0', b'01\0', b'02\0',
                         b'i' * 16, 0, 0, 45, 48, 4096, 28080, 32176, size - 32176)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'wb') as stream:
        stream.write(header)
        if not holes:
            stream.write(os.urandom(size - len(header)))
        stream.truncate(size)
    return path


def sha256(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as stream:
        for block in iter(lambda: stream.read(1 << 20), b''):
            digest.update(block)
    return digest.hexdigest()


def easyconfig(directory, name='Small', version='1.0', **parameters):
    """Write an easyconfig for the Singularity easyblock; returns its path."""
    lines = [f"easyblock = 'Singularity'\nname = '{name}'\nversion = '{version}'\nhomepage = 'https://example.org'",
             "description = 'A container image'\ntoolchain = SYSTEM"]
    parameters.setdefault('moduleclass', 'ai')
    lines += [f'{key} = {value!r}' for key, value in parameters.items()]
    path = pathlib.Path(directory) / f'{name}-{version}.eb'
    path.write_text('\n'.join(lines) + '\n')
    return path


class Site:
    """`eb` for Small/1.0, with a directory of sources.

    :ivar root: where it is installed
    :ivar env: in which `eb` runs; with a directory of the runtime's commands, or without a runtime
    :ivar status: of the last `eb`
    """

    def __init__(self, directory, tool, runtime=None):
        self.directory, self.eb_ = directory, easybuild.EasyBuild(directory / 'eb', tool)
        self.prefix, self.sources = self.eb_.prefix, directory / 'sources'
        self.sources.mkdir()
        self.root = self.prefix / 'software/Small/1.0'
        self.module = self.prefix / 'modules/all/Small/1.0.lua'
        path = [entry for entry in self.eb_.env['PATH'].split(os.pathsep) if runtime or not any(
            os.path.exists(f'{entry}/{name}') for name in ('apptainer', 'singularity'))]
        self.env = {**self.eb_.env, 'PATH': os.pathsep.join([str(runtime), *path, '/usr/sbin'] if runtime else path),
                    'EASYBUILD_SOURCEPATH': f'{self.sources}:{self.eb_.env["EASYBUILD_SOURCEPATH"]}'}

    def easyconfig(self, **parameters):
        if 'image_address' not in parameters:
            parameters = {'sources': ['small-1.0.sif'], 'checksums': [None], **parameters}
        return easyconfig(self.directory, **parameters)

    def eb(self, *args, wrap=(), check=True, **parameters):
        """Run `eb` on the easyconfig of these parameters; what it printed, both streams."""
        args = [self.easyconfig(**parameters), *args]
        if wrap:
            done = run([*wrap, easybuild.BIN / 'eb', *args], self.env, 300, check=False, cwd=self.prefix)
        else:
            done = forkedeb.eb(args, self.env, self.prefix, 300)
        self.status, out = done.returncode, done.stdout + done.stderr
        if check and self.status:
            pytest.fail(out, pytrace=False)
        return out

    def fails(self, *args, **parameters):
        """Run `eb`, which must fail; what it printed, on one line."""
        out = self.eb(*args, check=False, **parameters)
        assert self.status != 0 and 'Traceback' not in out, out
        return ' '.join(out.split())

    def parts(self):
        """Unfinished images."""
        return list(self.root.glob('.*.part-*'))


def libraries(program):
    """Shared libraries that a program needs."""
    out = subprocess.run(['ldd', program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return re.findall(r'/[^ ()]+', out)


def add(root, program, name=None):
    """Copy a program and its libraries into a root file system."""
    for source in [program, *libraries(program)]:
        target = root / (name if name and source == program else source).lstrip('/')
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def file_system(root, python=True):
    """Fill a directory with a file system: a shell, some commands, and this machine's /usr/bin/python3 with pip."""
    for name in ('bin', 'dev', 'etc', 'home', 'opt', 'proc', 'root', 'sys', 'tmp', 'usr/bin', 'usr/local/bin',
                 'var/tmp'):
        (root / name).mkdir(parents=True, exist_ok=True)
    for command in COMMANDS:
        found = shutil.which(command, path='/usr/bin:/bin') or missing(f'command {command}')
        add(root, os.path.realpath(found), f'/bin/{command}')
    (root / 'etc/passwd').write_text('root:x:0:0:root:/root:/bin/bash\n')
    (root / 'etc/group').write_text('root:x:0:\n')
    for name in ('resolv.conf', 'hosts', 'localtime'):
        (root / 'etc' / name).touch()
    if not python:
        return
    real = os.path.realpath('/usr/bin/python3')
    version = os.path.basename(real)
    add(root, real)
    for name in ('python3', 'python'):
        (root / 'usr/bin' / name).symlink_to(version)
    library = root / f'usr/lib/{version}'
    shutil.copytree(f'/usr/lib/{version}', library, symlinks=True, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns('test', 'idlelib', 'tkinter', 'config-*', 'dist-packages'))
    for module in (library / 'lib-dynload').glob('*.so'):
        for source in libraries(module):
            add(root, source)
    # a pip and a package that the image has already
    packages = root / 'usr/lib/python3/dist-packages'
    packages.mkdir(parents=True, exist_ok=True)
    wheel = next(iter(sorted(pathlib.Path('/usr/share/python-wheels').glob('pip-*.whl'))), None) \
        or missing('the wheel of pip (package python3-venv)')
    shutil.unpack_archive(wheel, packages, 'zip')
    (root / 'usr/bin/pip').write_text('#!/usr/bin/python3\nimport sys\nfrom pip._internal.cli.main import main\n'
                                      'sys.exit(main())\n')
    (root / 'usr/bin/pip').chmod(0o755)
    package(packages, 'imagepkg', '1.5+local')
    # an environment of its own, as LUMI AI Factory's images have
    environment = root / 'opt/venv'
    (environment / 'bin').mkdir(parents=True)
    (environment / 'bin/python').symlink_to('/usr/bin/python3')
    (environment / 'pyvenv.cfg').write_text('home = /usr/bin\ninclude-system-site-packages = false\n')
    package(environment / f'lib/{version}/site-packages', 'inside', '1.0')
    (library / 'ensurepip/__init__.py').write_text(ENSUREPIP)
    # compiled, as in any image: Python takes three times as long to start otherwise. What is so already is left
    run([real, '-m', 'compileall', '-q', '-s', root, '-p', '/', library, packages], timeout=600)


def package(directory, name, version):
    """A Python package as pip installs it, without pip."""
    (directory / name).mkdir(parents=True)
    (directory / name / '__init__.py').write_text(f'__version__ = {version!r}\n')
    info = directory / f'{name}-{version}.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')
    (info / 'RECORD').write_text('')


def wheel(directory, name, version, requires=()):
    """A wheel of a package of one file; returns its path."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = pathlib.Path(temporary)
        package(tree, name, version)
        info = tree / f'{name}-{version}.dist-info'
        with open(info / 'METADATA', 'a') as stream:
            stream.writelines(f'Requires-Dist: {required}\n' for required in requires)
        (info / 'WHEEL').write_text('Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        files = [path.relative_to(tree) for path in tree.rglob('*') if path.is_file()]
        (info / 'RECORD').write_text(''.join(f'{path},,\n' for path in files))
        archive = shutil.make_archive(pathlib.Path(directory) / f'{name}-{version}-py3-none-any', 'zip', tree)
    path = pathlib.Path(archive).with_suffix('.whl')
    os.rename(archive, path)
    return path


def image(runtime, python=True):
    """A real image, kept in the testbed directory.

    :param runtime: directory of the command `apptainer`
    """
    version = os.path.basename(os.path.realpath('/usr/bin/python3')) if python else 'nopython'
    path = DIR / 'images' / f'small-{version}-{RECIPE}-{sysconfig.get_platform()}.sif'
    with locked('image-small'):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
                root = pathlib.Path(temporary) / 'root'
                root.mkdir(mode=0o755)
                file_system(root, python)
                part = pathlib.Path(temporary) / 'part.sif'
                run([f'{runtime}/apptainer', '--quiet', 'build', part, root], env={**os.environ, **images.QUICKLY})
                part.rename(path)
    return path
