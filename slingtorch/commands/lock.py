# SPDX-License-Identifier: GPL-2.0-only
"""'slingtorch lock': writes the lock file of an easyconfig of PythonVenv (slingtorch/lockfile.py)."""
import glob
import os
import pathlib
import re
import shlex
import sys
from typing import Callable, Optional

from slingtorch import lockfile
from slingtorch.job.records import write_whole


def find_easyconfig(name: str, root: str) -> str:
    """Path of an easyconfig, from a file or a name in the bundle with this root; RuntimeError if there is none."""
    if os.path.isfile(name):
        return os.path.abspath(name)
    found = glob.glob(os.path.join(glob.escape(root), 'easyconfigs', '*', '*', glob.escape(os.path.basename(name))))
    if os.path.dirname(name) or not found:
        raise RuntimeError("There is no easyconfig %s: name a file, or an easyconfig that 'eb --search' finds" % name)
    return found[0]


def parameters_of(path: str) -> dict:
    """The parameters in an easyconfig; RuntimeError if it cannot be read."""
    from easybuild.framework.easyconfig.parser import EasyConfigParser
    from easybuild.tools.build_log import EasyBuildError
    from easybuild.tools.config import init_build_options
    try:
        init_build_options()
        return dict(EasyConfigParser(path).get_config_dict())
    except (EasyBuildError, UnicodeDecodeError) as err:
        raise RuntimeError("%s cannot be read as an easyconfig: %s" % (path, err))


def read_easyconfig(path: str) -> dict:
    """What an easyconfig specifies about its packages: lock_file (path), and the lists wanted, index_urls,
    python_versions and platforms; RuntimeError if it is not a PythonVenv easyconfig with a list of packages."""
    from easybuild.framework.easyconfig.easyconfig import resolve_template
    from easybuild.tools.build_log import EasyBuildError
    file_name, params = os.path.basename(path), parameters_of(path)
    try:
        strings = {key: value for key, value in params.items() if value and isinstance(value, str)}
        strings.update(versionsuffix=strings.get('versionsuffix', ''), namelower=strings['name'].lower())

        def texts(key):
            values = resolve_template(params.get(key, ()), strings)
            if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
                raise RuntimeError("%s: %s is %r, but must be a list of strings" % (file_name, key, values))
            return list(values)

        sources = texts('sources')
        values = {key: texts(key) for key in ('python_packages', 'extra_packages', 'index_urls', 'python_versions')}
        values['wheel_platform'] = params.get('wheel_platform', 'manylinux_2_28_x86_64')
        found = lockfile.recipe_of(values)
    except (EasyBuildError, KeyError) as err:
        raise RuntimeError("%s cannot be read as an easyconfig: %s" % (path, err))
    if params.get('easyblock') != 'PythonVenv' or not found['wanted']:
        raise RuntimeError("%s lists no packages to lock: 'slingtorch lock' is for easyconfigs with easyblock = "
                           "'PythonVenv' and a list python_packages" % file_name)
    lock_file = sources[0] if sources else ''
    if os.path.basename(lock_file) != lock_file or lock_file in (file_name, ''):
        raise RuntimeError("%s: the first of 'sources' is '%s', but must be the name of the lock file beside the "
                           "easyconfig, such as '%%(name)s-%%(version)s%%(versionsuffix)s.lock'"
                           % (file_name, lock_file))
    lockfile.check_recipe(found, file_name)
    return dict(found, lock_file=os.path.join(os.path.dirname(path), lock_file))


def lock(path: str, say: Callable[[str], None]) -> int:
    """Write the lock file beside an easyconfig, and the checksum of the lock file into the easyconfig; RuntimeError if
    a file cannot be written, or the packages cannot be found."""
    recipe = read_easyconfig(path)
    file_name, lock_file = os.path.basename(path), recipe['lock_file']
    if not os.access(os.path.dirname(os.path.abspath(lock_file)), os.W_OK):
        raise RuntimeError("The lock file must be beside the easyconfig, but %s cannot be written. Copy the easyconfig "
                           "to your own directory and use the copy: slingtorch lock ./%s; eb ./%s"
                           % (os.path.dirname(lock_file), file_name, file_name))
    lockfile.lock(recipe, file_name, lock_file, sys.executable, say)
    text = with_checksum(pathlib.Path(path).read_text(), lockfile.sha256(lock_file))
    if text is None:
        say("now put its checksum into the easyconfig: eb --inject-checksums=sha256 --force %s" % shlex.quote(path))
    else:
        write_whole({path: text})
        say("its checksum is in %s" % path)
    return 0


def with_checksum(text: str, checksum: str) -> Optional[str]:
    """The text of an easyconfig with this checksum of its first source; None if its form is not the usual one."""
    text, done = re.subn(r"""(?m)^(checksums = \[(?:\s|#.*)*(?:\{'[^']*': )?)(?:None|(['"])[0-9a-f]{64}\2)""",
                         r"\g<1>'%s'" % checksum, text, 1)
    if not done and not re.search('(?m)^(checksums|patches) =', text):
        text, done = re.subn(r"(?m)^sources = \['[^',]*'\]\n", r"\g<0>checksums = ['%s']\n" % checksum, text, 1)
    return text if done else None
