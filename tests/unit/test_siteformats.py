# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch sites NAME --format: what is printed does what it says; our values against those that centres publish."""
import configparser
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

from slingtorch import siteformats, slingshot_sites

ROOT = pathlib.Path(__file__).resolve().parents[2]
SITES = slingshot_sites()
ALL = list(SITES.find_files(SITES.SITE, {}))
GROUPS = {'frontier': ['alt_read'], 'derecho': ['gdr', 'alt_read'], 'lumi': ['gdr'], 'slurm': ['roce'],
          'alps': ['alt_read', 'hook'], 'isambard_ai': ['alt_read', 'gdrcopy'], 'olivia': ['alt_read'], 'polaris': ['gdr', 'proxy'],
          'tuolumne': ['alt_read'], 'elcapitan': ['alt_read']}
# what alt_read needs of the job
OPTION = {'slurm': '\n#SBATCH --network=disable_rdzv_get\n', 'flux': '\n#flux: --setattr=rdzv_get_en=0\n'}
PUBLISHED = sorted(pathlib.Path(__file__).with_name('published_sites').glob('*.cfg'))


def site(name):
    return SITES.load(name, {})


def scheduler_format(name):
    return siteformats.OF_SCHEDULER.get(site(name).scheduler, 'sbatch')


def command(*args):
    env = {'PATH': '/usr/bin:/bin', 'HOME': '/nonexistent', 'PYTHONPATH': str(ROOT)}
    return subprocess.run([sys.executable, '-m', 'slingtorch', 'sites', *args], env=env, cwd='/', text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def expected(name, groups):
    """What the module would set, without what only runscripts read and what holds for some software only."""
    return {value.name: value.value for value in site(name).env_values(groups).values()
            if not value.name.startswith('SLINGTORCH_') and not value.when}


def shell(text, env):
    """The environment after these lines in bash."""
    done = subprocess.run(['bash', '--noprofile', '--norc', '-euc', text + '\nenv -0'], text=True,
                          env={'PATH': '/usr/bin:/bin', **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, '')
    return dict(entry.split('=', 1) for entry in done.stdout.split('\0') if '=' in entry)


@pytest.mark.parametrize('name', ALL)
@pytest.mark.parametrize('nodes', [1, 2])
def test_lines_of_a_job_script_set_what_the_module_sets(name, nodes, tmp_path):
    groups = GROUPS.get(name, [])
    text = siteformats.render(site(name), scheduler_format(name), groups)
    (tmp_path / 'nodes').write_text(''.join('n%d\n' % number for number in range(nodes)) * 4)
    # flux resource list -n -o {nnodes}: the number alone (flux-environment(7), seen with Flux 0.88)
    (tmp_path / 'flux').write_text('#!/bin/sh\n[ "$*" = "resource list -n -o {nnodes}" ] && echo %d\n' % nodes)
    (tmp_path / 'flux').chmod(0o755)
    before = {'SLURM_JOB_NUM_NODES': str(nodes), 'PBS_NODEFILE': str(tmp_path / 'nodes'),
              'PATH': '%s:/usr/bin:/bin' % tmp_path}
    env = shell(text, before)
    net = site(name).env_values(groups).get('SLINGTORCH_MULTINODE_NCCL_NET')
    wanted = expected(name, groups)
    if net and nodes > 1:
        wanted['NCCL_NET'] = net.value
    for scheduler, option in OPTION.items():
        assert (option in text) == ('alt_read' in groups and site(name).scheduler == scheduler)
    added = {key: value for key, value in env.items() if key not in before and key not in ('PATH', 'PWD', 'SHLVL', '_')}
    assert added == wanted
    for value in site(name).env_values(groups).values():
        assert ' '.join(value.reason.split()) in ' '.join(text.replace('\n# ', ' ').split()) or \
            value.name.startswith('SLINGTORCH_'), value.name


def test_sbatch_options_come_before_the_first_command():
    lines = siteformats.render(site('frontier'), 'sbatch', ['alt_read']).splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith('#'))
    options = [number for number, line in enumerate(lines) if line.startswith('#SBATCH')]
    assert options and max(options) < first


@pytest.mark.parametrize('name', ALL)
def test_edf_is_toml_with_the_same_values(name):
    text = siteformats.render(site(name), 'edf', GROUPS.get(name, []))
    if sys.version_info < (3, 11):  # without a reader of TOML: the form alone
        assert '[env]' in text
        return
    data = importlib.import_module('tomllib').loads(text)
    assert data['env'] == expected(name, GROUPS.get(name, []))
    slingshot = site(name).network == 'slingshot11'
    assert (data.get('annotations', {}).get('com', {}).get('hooks', {}).get('cxi') == {'enabled': 'true'}) == slingshot
    if site(name).gpu == 'rocm' and slingshot:
        assert data['annotations']['com']['hooks']['aws_ofi_nccl'] == {'enabled': 'true', 'variant': 'rocm6'}


@pytest.mark.parametrize('name', ALL)
def test_env_file(name):
    lines = siteformats.render(site(name), 'env', GROUPS.get(name, [])).splitlines()
    pairs = [line.split('=', 1) for line in lines if not line.startswith('#')]
    assert dict(pairs) == expected(name, GROUPS.get(name, []))


@pytest.mark.parametrize('name', ALL)
def test_tables_of_markdown(name):
    """Every value of the site is in the table, and every row has four columns."""
    groups = GROUPS.get(name, [])
    rows = [line for line in siteformats.render(site(name), 'markdown', groups).splitlines() if line.startswith('| `')]
    assert [re.match(r'\| `([^`]+)` \| `([^`]*)` \|', row).groups() for row in rows] == \
        [(value.name, value.value) for value in site(name).env_values(groups).values()]
    assert {len(re.findall(r'(?<!\\)\|', row)) for row in rows} <= {5}


# behind it pages are made
MADE = '<!-- made from the site files -->\n\n'


def pages():
    """What docs/systems holds of the sites: the table, and a part for each site without a page of its own."""
    own = [path.stem for path in (ROOT / 'docs/systems').glob('*.md')]
    table = siteformats.overview(SITES.load_all({'HOME': '/nonexistent'}))
    parts = [siteformats.render(site(name), 'markdown').replace('\n#', '\n##') for name in ALL
             if name.split('_ice')[0] not in own + ['local']]
    return table, '\n'.join('#' + part for part in parts)


def test_pages_of_the_systems_are_those_of_the_sites():
    """After a change of a site: PYTHONPATH=tests:. python tests/unit/test_siteformats.py"""
    table, parts = pages()
    for name, made in (('README.md', table), ('others.md', parts)):
        assert (ROOT / 'docs/systems' / name).read_text(encoding='utf-8').partition(MADE)[2] == made
    assert len(re.findall('^## ', parts, re.M)) >= 12
    done = command('--format', 'markdown')
    assert (done.returncode, done.stdout) == (0, table)


def test_a_page_names_what_its_site_is():
    text = ' '.join(siteformats.render(site('tuolumne'), 'markdown').split())
    for words in ('GPUs: AMD, 4 a node', 'scheduler: flux', 'recognised by: `tuolumne[0-9]*`', 'not published: ',
                  'generation rocm-7.1.1 (default): ', 'gpu `rocm/7.1.1 in ROCM_PATH`', 'needs flux run --setattr'):
        assert words in text
    assert '| `isambard_ai` | Isambard-AI (HPE Cray EX, GH200) | 4 NVIDIA, aarch64 | slingshot11 | slurm |' in pages()[0]


def test_the_command():
    done = command('frontier', '--format', 'sbatch', '--group', 'alt_read')
    assert (done.returncode, done.stderr) == (0, '') and 'export FI_CXI_RDZV_PROTO=alt_read' in done.stdout
    for args, words in ((['derecho', '--format', 'sbatch'], "has the scheduler pbs: use --format pbs"),
                        (['derecho', '--format', 'pbs', '--group', 'none'], "--group names the group 'none'"),
                        (['--format', 'env'], "--format needs a site"),
                        (['derecho', '--group', 'gdr'], "--group a --format")):
        done = command(*args)
        assert done.returncode == 1 and words in done.stderr and done.stdout == '', done.stderr


# --- against what centres publish

def published(path):
    """The document, and its values by name."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=('=',), comment_prefixes=('#',))
    parser.optionxform = str
    parser.read(path, encoding='utf-8')
    return parser['document'], {name: parser[name] for name in parser.sections() if name != 'document'}


def ours(document):
    """Our values, of a site or of what sites share, with the groups that the document corresponds to."""
    groups = SITES.split_list(document.get('groups'))
    if 'site' in document:
        return {value.name: value.value for value in site(document['site']).env_values(groups).values()}
    sections = SITES.read_sections(SITES.find_files(SITES.SHARED, {})[document['shared']])
    return {name: keys['value'] for (kind, name, group), keys in sections.items()
            if kind == 'env' and group in [None] + groups}


def differences(document, values):
    """What is wrong with the comparison: differences without a reason, reasons without a difference."""
    mine, wrong = ours(document), []
    for name, keys in values.items():
        theirs = None if keys['value'] == 'unset' else keys['value']
        own = mine.pop(keys.get('as', name), None)
        if (own != theirs) != ('differs' in keys):
            wrong.append("%s: published %s, ours %s, differs = %s" % (name, theirs, own, keys.get('differs')))
    wrong += ["%s: not published, ours %s" % pair for pair in mine.items()
              # no document is of PyTorch 2.15 yet
              if not pair[0].startswith(('SLINGTORCH_', 'TORCH_DIST_USE_NCCL2'))]
    return wrong


@pytest.mark.parametrize('path', PUBLISHED, ids=lambda path: path.stem)
def test_every_difference_from_what_is_published_has_a_reason(path):
    document, values = published(path)
    assert re.match(r'\d{4}-\d\d-\d\d$', document['date']) and '@' in document['source']
    assert differences(document, values) == []


def test_a_difference_without_a_reason_is_found():
    document, values = published(PUBLISHED[0].with_name('frontier.cfg'))
    values['NCCL_CROSS_NIC']['value'] = '0'
    del values['FI_MR_CACHE_MONITOR']
    values['NCCL_NET_GDR_LEVEL']['differs'] = 'a reason that is none'
    assert [text.partition(':')[0] for text in differences(document, values)] == [
        'NCCL_CROSS_NIC', 'NCCL_NET_GDR_LEVEL', 'FI_MR_CACHE_MONITOR']


def test_the_documents_are_those_of_the_docs():
    text = (ROOT / 'docs/sites.md').read_text(encoding='utf-8')
    for path in PUBLISHED:
        document, values = published(path)
        number = len([keys for keys in values.values() if 'differs' in keys])
        row = r'\| %s(?: \(\w+\))? \| %s \| %d \|' % (re.escape(document['source'].partition('@')[0]), document['date'],
                                                       number)
        assert re.search(row, text), path


def write_pages():
    """Put table and parts into the pages, behind their own text."""
    table, parts = pages()
    for name, new in (('README.md', table), ('others.md', parts)):
        path = ROOT / 'docs/systems' / name
        own = path.read_text(encoding='utf-8').partition(MADE)[0]
        path.write_text(own + MADE + new, encoding='utf-8')


if __name__ == '__main__':
    write_pages()
