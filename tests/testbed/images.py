# SPDX-License-Identifier: GPL-2.0-only
"""Container images that hold a real PyTorch, and the runtime to run them; made once and kept."""

import hashlib
import os
import pathlib
import shutil
import sys

from . import DIR, ROOT, clean_environ, easybuild, locked, missing, only_root, run

EASYCONFIG = ROOT / 'easyconfigs/p/PyTorch/PyTorch-2.13.0-cpu-python-3.11-singularity-debian12.eb'
DEFINITION = EASYCONFIG.with_suffix('.def')
LOCK = EASYCONFIG.with_name('PyTorch-2.13.0-local-cpu.lock')
QUICKLY = {'APPTAINER_MKSQUASHFS_ARGS': '-comp zstd -Xcompression-level 1'}
"""Images that are read a few times: gzip, which is Apptainer's choice, packs for minutes."""
STAND_IN = pathlib.Path(__file__).with_name('standin.def')


def runtime():
    """Directory of the commands `apptainer` and `singularity`: of the testbed, else of this machine."""
    own = DIR / 'apptainer/bin'
    if (own / 'apptainer').exists():
        return own
    found = shutil.which('apptainer')
    if not found:
        missing(f'apptainer (python3 tests/testbed/apptainer.py {DIR}/apptainer)')
    return pathlib.Path(found).parent


def environ():
    """A clean environment with the runtime in the PATH."""
    env = clean_environ()
    return {**env, 'PATH': f'{runtime()}:{env["PATH"]}'}


def kept(name, files, make):
    """
    A file that takes long to make: made when it is not there or one of `files` has changed.

    :param make: function with the path to make
    """
    digest = hashlib.sha256(b'\0'.join(path.read_bytes() for path in files)).hexdigest()[:12]
    path = DIR / 'images' / f'{name}-{digest}.sif'
    with locked(f'image-{name}'):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix('.part')
            part.unlink(missing_ok=True)
            make(part)
            for earlier in path.parent.glob(f'{name}-*.sif'):
                earlier.unlink()
            part.rename(path)
    return path


def pytorch(tool):
    """The image with PyTorch for CPUs, as `eb` builds it from the easyconfig of the bundle. Takes minutes, is kept."""

    def make(part):
        only_root('builds an image with debootstrap')
        if not shutil.which('debootstrap', path=os.environ['PATH'] + ':/usr/sbin'):
            missing('debootstrap')
        prefix = DIR / 'images/eb'
        shutil.rmtree(prefix, ignore_errors=True)
        eb = easybuild.EasyBuild(prefix, tool)
        eb(EASYCONFIG.name, env={'PATH': f'{runtime()}:{eb.env["PATH"]}:/usr/sbin', **QUICKLY}, timeout=1200)
        image, = prefix.glob('software/PyTorch/*/*.sif')
        image.rename(part)
        shutil.rmtree(prefix)

    return kept('pytorch', [DEFINITION, LOCK, EASYCONFIG], make)


def stand_in(tool):
    """An image that looks like LUMI's with PyTorch 2.1.0, made from pytorch(): standin.def. Kept."""
    image = pytorch(tool)

    def make(part):
        run([runtime() / 'apptainer', '--quiet', 'build', '--build-arg', f'image={image}', part, STAND_IN],
            env={**environ(), **QUICKLY}, timeout=600)

    return kept('stand-in', [DEFINITION, LOCK, EASYCONFIG, STAND_IN], make)


if __name__ == '__main__':
    from . import modulestools
    print({'pytorch': pytorch, 'stand-in': stand_in}[sys.argv[1]](modulestools.lmod()))
