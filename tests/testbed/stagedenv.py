# SPDX-License-Identifier: GPL-2.0-only
"""A small environment that is also one image, for everything about staging that needs no PyTorch."""
import os
import shutil

from . import wheels
from .easybuild import EasyBuild, Installation

WHERE = "#!python\nimport sys\nprint(sys.prefix, *sys.argv[1:], sep='\\n')\n"
"""A console script, as pip makes it executable and gives it the environment's interpreter."""


class write_easyconfig:
    """PyTorch-0.1-tiny.eb in a directory, with its lock file and an index to download from.

    :ivar easyconfig: its path
    :ivar pip_env: environment in which pip finds the packages
    """

    def __init__(self, directory, options='', image=True):
        index = directory / 'index'
        script = 'alpha-1.0.data/scripts/where'
        made = [wheels.make_wheel(index, 'alpha', '1.0', files={'alpha.py': "__version__ = '1.0'\n", script: WHERE}),
                wheels.make_wheel(index, 'pip', '26.3')]     # as in the bundle's lock files: eb puts none there itself
        self.lock_file = directory / 'PyTorch-0.1-tiny.lock'
        self.lock_file.write_text(wheels.lock_text(made))
        self.easyconfig = directory / 'PyTorch-0.1-tiny.eb'
        self.easyconfig.write_text(wheels.tiny_easyconfig(self.lock_file, f'environment_image = {image}\n{options}'))
        self.pip_env = {'PIP_CONFIG_FILE': os.devnull, 'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': str(index),
                        'PIP_EXTRA_INDEX_URL': None}


def installed(directory, tool):
    """Install it with real `eb`: an Installation with the path of its image besides."""
    eb = EasyBuild(directory / 'eb', tool)
    files = write_easyconfig(directory)
    shutil.copytree(directory / 'index', eb.prefix / 'sources/p/PyTorch/wheels')
    eb(files.easyconfig)
    installation = Installation('PyTorch/0.1-tiny', eb.modulepath, tool)
    installation.image = installation.root / 'environment.squashfs'
    return installation
