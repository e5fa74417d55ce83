# SPDX-License-Identifier: GPL-2.0-only
"""The commands of README.md and of other pages, as their readers type them."""

import re

from . import ROOT


def blocks(section, page='README.md'):
    """The indented blocks of a section of a page, in order, each as the text of its lines."""
    text = re.search(rf'^## {section}.*?\n(.*?)(?=^## |\Z)', (ROOT / page).read_text(), re.M | re.S).group(1)
    return [re.sub('^    ', '', block, flags=re.M) for block in re.findall(r'(?:^    .*\S\n)+', text, re.M)]


def supercomputer():
    """The blocks on supercomputers: {system: text}."""
    return dict(zip(('installation', 'slurm', 'cpu', 'derecho', 'lumi'), blocks('On a supercomputer'), strict=True))
