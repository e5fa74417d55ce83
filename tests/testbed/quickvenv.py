# SPDX-License-Identifier: GPL-2.0-only
"""A `python3` whose `python3 -m venv` takes pip from an environment that was made before, and not from its wheel.

pip unpacks and compiles itself for 3 to 6 s of processor time in each new environment; a copy of it takes 0.1 s.
"""

import functools
import hashlib
import shutil
import subprocess
import sys

from . import DIR, locked

SCRIPT = """#!/bin/bash
if [[ "$1 $2" != '-m venv' || " $* " == *' --without-pip '* ]]; then exec {python} "$@"; fi
target=${{!#}}
{python} -m venv --without-pip "${{@:3}}" || exit
cp -a {template}/lib/python3*/site-packages/. "$target"/lib/python3*/site-packages || exit
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
            subprocess.run([python, '-m', 'venv', directory / 'template'], check=True)
            part = directory / 'part'
            part.write_text(SCRIPT.format(python=f"'{python}'", template=f"'{directory}/template'"))
            part.chmod(0o755)
            part.rename(directory / 'bin/python3')
    return directory / 'bin'
