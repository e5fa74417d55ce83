# SPDX-License-Identifier: GPL-2.0-only
"""The documentation as pages (mkdocs.yml): short, links, headings and pictures work, and search finds every page."""
import json
import re
import runpy
import shutil
import subprocess
import sys

import pytest

from testbed import ROOT

PAGES = sorted((ROOT / 'docs').rglob('*.md'))


def build(root, site):
    """Build the pages; the CompletedProcess."""
    return subprocess.run([sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(site)], cwd=root,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    path = tmp_path_factory.mktemp('site')
    done = build(ROOT, path)
    assert done.returncode == 0, done.stdout
    return path


def test_every_page_is_there_and_found(site):
    sources = [path.relative_to(ROOT / 'docs') for path in PAGES]
    found = {entry['location'].partition('#')[0] for entry in json.loads(
        (site / 'search/search_index.json').read_text())['docs']}
    wanted = {f'{path.with_suffix("")}/'.replace('README/', '') for path in sources}
    assert len(sources) > 15 and found >= wanted | {'', 'CONTRIBUTING/'}


def test_readme_is_the_first_page(site):
    text = (site / 'index.html').read_text()
    assert 'href="first-hour/"' in text and 'href="docs/' not in text
    # the hooks leave what is written as code alone
    assert '<a href="architecture/#tests">docs/architecture.md</a>' in text


def test_few_pages_and_words():
    assert len([path for path in PAGES if path.parent.name == 'docs']) <= 12
    assert sum(len(path.read_text().split()) for path in PAGES) <= 26000


def test_a_page_quotes_our_messages_as_they_are():
    """A reader searches the page for what he sees; numbers and names differ."""
    files = [*ROOT.glob('runscripts/lib/*.bash'), *ROOT.glob('easyblocks/generic/*.py'), *ROOT.glob('examples/training/*.py')]
    source = ' '.join(re.sub(r'"\s*\\?\n\s*"', ' ', '\n'.join(path.read_text() for path in files)).split())
    quotes = re.findall(r'(?m)^\| `((?:this |--torchrun|Horovod |\.\.\. is for Python ).*?)`', (ROOT / 'docs/systems/slurm.md').read_text())
    assert len(quotes) == 5
    for part in [part for quote in quotes for part in re.split(r'\s*(?:[\d.]+|\.\.\.)\s*', quote) if len(part) > 3]:
        assert part in source, part


@pytest.mark.parametrize('page', [ROOT / 'README.md', *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_code_and_tables_fit_the_page(page):
    """88 columns of code are what a page shows without scrolling; a cell with more than 25 words is not a table's."""
    fenced, faults = '', []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith('```'):
            fenced = '' if fenced else line
        # a diff shows lines of a program as they are
        code = line * (fenced != '```diff') if fenced else line[4:] if line.startswith('    ') else ''
        cells = re.split(r'(?<!\\)\|', line) if line.startswith('|') else []
        if len(code) > 88 or any(len(cell.split()) > 25 for cell in cells):
            faults.append(f'{page.name}:{number}: {line}')
    assert not faults, '\n'.join(faults)


def test_pictures_are_drawn_from_the_pages():
    for name, drawn in runpy.run_path(str(ROOT / 'tools/pictures.py'))['pictures']().items():
        assert (ROOT / 'docs/images' / name).read_text() == drawn, f'{name}: run tools/pictures.py'


def test_systems_are_those_of_the_site_files(site):
    assert '<code>isambard_ai</code>' in (site / 'systems/index.html').read_text()
    assert len(re.findall('<h2', (site / 'systems/others/index.html').read_text())) > 12


def test_pictures_are_there(site):
    for path in (ROOT / 'docs/images').iterdir():
        assert (site / 'images' / path.name).read_bytes() == path.read_bytes()
    for page in site.rglob('*.html'):
        for source in re.findall(r'<img[^>]* src="([^":]+)"', page.read_text()):
            assert (page.parent / source).is_file(), f'{page}: {source}'


def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob('*.html'):
        assert not re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="(?:https?:)?//', page.read_text()), page


def test_broken_links_and_a_page_without_a_place_fail(tmp_path):
    """A small copy, with every fault in one page."""
    for name in ('mkdocs.yml', 'tools', 'patches', 'LICENSE'):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for path in ROOT.glob('*.md'):
        (tmp_path / path.name).write_text('# Page\n')
    config = tmp_path / 'mkdocs.yml'
    config.write_text(re.sub(r'^nav:[\s\S]*', 'nav: [index.md, page.md, CONTRIBUTING.md, CHANGELOG.md, SECURITY.md, '
                             'patches/README.md]\n', config.read_text(), flags=re.M))
    faults = ['page.md#nothing-of-this-name', 'no-such-page.md', '../easyconfigs/no-such-file.eb', 'images/no-such.png']
    good = '# Page\n\n## A heading: `code`, and -- more\n\n[x](#a-heading-code-and----more) [y](../README.md#page)\n\n'
    (tmp_path / 'docs').mkdir()
    (tmp_path / 'docs/page.md').write_text(good + '\n'.join(f'[x]({fault})' for fault in faults) + '\n')
    (tmp_path / 'docs/new.md').write_text('# Page\n')
    done = build(tmp_path, tmp_path / 'site')
    assert done.returncode != 0
    for said in [*faults, 'new.md']:
        assert said.partition('#')[2] or said in done.stdout, said
    assert done.stdout.count('WARNING -') == len(faults) + 1, done.stdout
