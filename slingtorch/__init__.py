# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch: an EasyBuild bundle for distributed PyTorch on supercomputers."""
import os
import textwrap
from typing import IO, Sequence

__version__ = '0.1.0'


def bundle_root() -> str:
    """The directory with easyblocks/, easyconfigs/, runscripts/, patches/ and hooks/: the top of a checkout, or
    <site-packages>/slingtorch/bundle of an installed wheel."""
    package_dir = os.path.dirname(os.path.realpath(__file__))
    installed = os.path.join(package_dir, 'bundle')
    return installed if os.path.isdir(installed) else os.path.dirname(package_dir)


def wrapped(text: str, first: str = '', rest: str = '', width: int = 118) -> str:
    """Wrap a text into lines with these indents; never split a word, since it may be a path or an option."""
    return textwrap.fill(text, width=width, initial_indent=first, subsequent_indent=rest, break_long_words=False,
                         break_on_hyphens=False)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ''.join('  '.join(text.ljust(width) for text, width in zip(row, widths)).rstrip() + '\n' for row in rows)


def discard(stream: IO[str]) -> None:
    """Discard the rest of a stream that nobody can read any more: Python would try to write it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
