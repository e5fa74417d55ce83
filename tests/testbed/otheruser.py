# SPDX-License-Identifier: GPL-2.0-only
"""Another user, whom root becomes for a moment: what this user runs and reads are copies, wherever the checkout is.

A checkout below a home that only root may enter cannot be read by anybody else, and neither can pytest's temporary
directories. So whatever runs as another user does it through this class (fixture `other_user`):

    def test_it(other_user):
        scripts = other_user.checkout() / 'runscripts'
        done = other_user.run([scripts / 'get-master'], check=False)
"""

import os
import pathlib
import subprocess
import tempfile

from . import apptainer, copy_of_checkout, images, only_root, run


class OtherUser:
    """The user with this number, who owns nothing.

    :ivar directory: below /tmp, owned by root, readable by everybody; gone after the test
    :ivar command: words before a command that this user is to run
    """

    uid = 65534
    command = ('setpriv', f'--reuid={uid}', f'--regid={uid}', '--clear-groups')

    def __init__(self):
        only_root('becomes another user')
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix='slingtorch-other-user-', dir='/tmp'))
        self.directory.chmod(0o755)

    def copy(self, path):
        """A copy of this file or directory in `directory`, with the rights of its owner for everybody; its path."""
        target = self.directory / os.path.basename(path)
        subprocess.run(['cp', '-a', '--reflink=auto', path, target], check=True)
        return self.open(target)

    def checkout(self):
        """A copy of the checkout: copy_of_checkout()."""
        return self.open(copy_of_checkout(self.directory / 'checkout'))

    def open(self, path):
        """Let everybody read what is here in `directory`; the path."""
        subprocess.run(['chmod', '-R', 'a+rX', path], check=True)
        return path

    def runtime(self):
        """The container runtime in a place that this user can enter: directory of its commands."""
        found = images.runtime()
        if not (found.parent / apptainer.PATCHELF).exists():
            return found    # the machine's own
        return apptainer.copy(found.parent, self.directory / 'apptainer')

    def run(self, command, env=None, cwd='/', **kwargs):
        """Run a command as this user; arguments as those of testbed.run(), but `env` comes on top of very little."""
        env = {'HOME': '/nonexistent', 'PATH': '/usr/local/bin:/usr/bin:/bin', **(env or {})}
        return run([*self.command, *command], env=env, cwd=cwd, **kwargs)
