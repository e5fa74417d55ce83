# SPDX-License-Identifier: GPL-2.0-only
"""A `python3` whose `python3 -m venv` names, by a .pth file, the pip of an environment that was made before.

pip unpacks and compiles itself for 3 to 6 s of processor time in each new environment; to copy, compile and remove its
900 files takes 0.7 s. The newest pip starts in half the time of one that a Python brings, so it is that one.
"""

import functools
import hashlib
import pathlib
import shutil
import subprocess
import sys

import pip

from . import DIR, locked, run

SCRIPT = """#!/bin/bash
[[ "$1 $2 $3" != '-s -m pip' ]] || exec {template}/bin/python "$@"
if [[ "$1 $2" != '-m venv' || " $* " == *' --without-pip '* ]]; then exec {python} "$@"; fi
target=${{!#}}
{python} -m venv --without-pip "${{@:3}}" || exit
cd "$target"/lib/python3*/site-packages || exit
echo {template}/lib/python3*/site-packages > a-quickvenv.pth
cp {template}/lib/python3*/site-packages/*.pth . 2>&-
cd "$OLDPWD" || exit
for script in {template}/bin/pip*; do
    sed "1s|^#!.*|#!$(realpath -s "$target")/bin/python3|" "$script" > "$target/bin/${{script##*/}}" || exit
    chmod +x "$target/bin/${{script##*/}}"
done
"""


@functools.lru_cache(maxsize=None)
def python3(python=sys.executable):
    """Directory that holds only such a `python3`, to be put in front of the PATH.

    :param python: the interpreter that it is
    """
    version = subprocess.run([python, '-VV'], stdout=subprocess.PIPE, check=True).stdout
    digest = hashlib.sha256(f'{python} {version} {SCRIPT}'.encode()).hexdigest()[:12]
    directory = DIR / 'quickvenv' / digest
    with locked('quickvenv'):
        if not (directory / 'bin/python3').exists():
            shutil.rmtree(directory, ignore_errors=True)
            (directory / 'bin').mkdir(parents=True)
            subprocess.run([python, '-m', 'venv', '--without-pip', directory / 'template'], check=True)
            # by the pip of the Python that runs this: one to begin with would be unpacked and compiled for nothing
            run([directory / 'template/bin/python', pathlib.Path(pip.__file__).parent, 'install', '--quiet',
                 '--disable-pip-version-check', '--ignore-installed', 'pip'])
            part = directory / 'part'
            part.write_text(SCRIPT.format(python=f"'{python}'", template=f"'{directory}/template'"))
            part.chmod(0o755)
            part.rename(directory / 'bin/python3')
    return directory / 'bin'


PIP = """
__path__ = [{path!r}]
with open(__path__[0] + '/__init__.py') as source:
    exec(source.read())
"""


def pip_files():
    """Files of a wheel of pip for wheels.make_wheel(): one, which names the pip that was made before."""
    path, = python3().parent.glob('template/lib/python3*/site-packages/pip')
    return {'pip/__init__.py': PIP.format(path=str(path))}
