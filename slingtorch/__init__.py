# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch: an EasyBuild bundle for distributed PyTorch on supercomputers."""
import importlib.machinery
import os
import textwrap
import types
from typing import Any

__version__ = '0.1.0'


def bundle_root() -> str:
    """
    Return the directory that holds easyblocks/, easyconfigs/, runscripts/, patches/ and hooks/.

    In an installed wheel that is <site-packages>/slingtorch/bundle, in a checkout the top of the checkout.

    :raises RuntimeError: if neither is there
    """
    package_dir = os.path.dirname(os.path.realpath(__file__))
    candidates = [os.path.join(package_dir, 'bundle'), os.path.dirname(package_dir)]
    for candidate in candidates:
        if os.path.isfile(os.path.join(candidate, 'hooks', 'slingshot_hooks.py')):
            return candidate
    raise RuntimeError("The bundle of slingtorch is neither in %s nor in %s: install slingtorch again, or use a whole "
                       "checkout" % tuple(candidates))


def wrapped(text: str, first: str = '', rest: str = '', width: int = 118) -> str:
    """Text in lines with these indents; a word, which may be a path or an option, stays whole."""
    return textwrap.fill(text, width=width, initial_indent=first, subsequent_indent=rest, break_long_words=False,
                         break_on_hyphens=False)


def bundle_module(path: str) -> Any:
    """
    A file of the bundle that is in no package, since EasyBuild loads it in its own way, as a module.

    :param path: below bundle_root()
    """
    name = os.path.basename(path)[:-len('.py')]
    module = types.ModuleType(name)
    importlib.machinery.SourceFileLoader(name, os.path.join(bundle_root(), path)).exec_module(module)
    return module
