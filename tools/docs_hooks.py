# SPDX-License-Identifier: GPL-2.0-only
"""
Hooks of mkdocs (mkdocs.yml): files outside docs/ become pages, what the site files say of their systems is on pages,
and links work as they do in the repository.
"""
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

from slingtorch.sites import formats, load_all

ROOT = Path(__file__).resolve().parents[1]
# in the repository: in the site
OUTSIDE = {'README.md': 'index.md', 'LICENSE': 'LICENSE', **{name: name for name in (
    'CHANGELOG.md', 'CONTRIBUTING.md', 'SECURITY.md', 'patches/README.md')}}
LINK = re.compile(r'(\]\()(?![a-z]+:|#)([^)#\s]+)')


def on_files(files, config):
    """Add what lies outside docs/."""
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def systems():
    """{page: what the site files say there}: a table of all, and all of each system without a page of its own."""
    sites = load_all({'HOME': '/nonexistent'})
    texts = {site: formats.everything(site).replace(f'{ROOT}/', '') for site in sites}
    own = [path.stem for path in (ROOT / 'docs/systems').glob('*.md')] + ['local']
    return {'systems/README.md': formats.overview(sites),
            'systems/others.md': ''.join(f'## {site.title}\n\n```text\n{texts[site]}```\n\n'
                                         for site in sites if site.name.split('_ice')[0] not in own)}


MADE = systems()


def on_page_markdown(markdown, page, config, files):
    """Turn links between files of the repository into links between pages; mkdocs says which are broken."""
    here = page.file.src_uri
    if here in MADE:
        markdown += '\n' + MADE[here]
    source = next((path for path, target in OUTSIDE.items() if target == here), f'docs/{here}')

    def link(match):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match.group(2)))
        target = OUTSIDE.get(target) or (target[5:] if target.startswith('docs/') else None)
        return match.group(1) + (posixpath.relpath(target, posixpath.dirname(here)) if target else match.group(2))

    return LINK.sub(link, markdown)
