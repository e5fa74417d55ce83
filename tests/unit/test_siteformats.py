# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch sites NAME --format: what is printed does what it says."""
import pathlib
import re
import subprocess
import sys

from slingtorch import sites as SITES
from slingtorch.sites import formats as siteformats

ROOT = pathlib.Path(__file__).resolve().parents[2]


def each():
    """Every site, with all groups that go together."""
    for name in SITES.find_files(SITES.SITE, {}):
        site, names = SITES.load(name, {}), []
        for group in site.groups:
            try:
                site.check_groups(names + [group])
            except SITES.SiteError:     # it excludes another one
                continue
            names.append(group)
        yield site, names


def command(*args):
    env = {'PATH': '/usr/bin:/bin', 'HOME': '/nonexistent', 'PYTHONPATH': str(ROOT)}
    return subprocess.run([sys.executable, '-m', 'slingtorch', 'sites', *args], env=env, cwd='/', text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_shell_and_a_reader_of_lines_get_what_the_module_sets(tmp_path):
    for site, groups in each():
        values = site.env_values(groups).values()
        text = siteformats.render(site, 'env', groups)
        expected = {value.name: value.value for value in values
                    if not value.name.startswith('SLINGTORCH_') and not value.when}
        assert dict(line.split('=', 1) for line in text.splitlines() if not line.startswith('#')) == expected
        (tmp_path / 'env').write_text(text)
        done = subprocess.run(['bash', '--noprofile', '--norc', '-euc', 'set -a; . ./env; env -0'], text=True,
                              cwd=tmp_path, env={'PATH': '/usr/bin:/bin'}, stdout=subprocess.PIPE, check=True)
        assert expected.items() <= dict(line.split('=', 1) for line in done.stdout.split('\0') if line).items(), site.name
        for value in values:
            assert ' '.join(value.reason.split()) in ' '.join(text.replace('\n# ', ' ').split()) or \
                value.name.startswith('SLINGTORCH_'), value.name
            assert value.name != siteformats.NET or '\n#NCCL_NET=%s\n' % value.value in text


def test_tables_of_markdown():
    """Every value of the site is in the table, and every row has four columns."""
    for site, groups in each():
        text = siteformats.render(site, 'markdown', groups)
        rows = [line for line in text.splitlines() if line.startswith('| `')]
        assert [re.match(r'\| `([^`]+)` \| `([^`]*)` \|', row).groups() for row in rows] == \
            [(value.name, value.value) for value in site.env_values(groups).values()]
        assert {len(re.findall(r'(?<!\\)\|', row)) for row in rows} <= {5}


def test_a_page_names_what_its_site_is():
    text = ' '.join(siteformats.render(SITES.load('tuolumne', {}), 'markdown').split())
    for words in ('GPUs: AMD, 4 per node', 'scheduler: flux', 'recognised by: `tuolumne[0-9]*`', 'not published: ',
                  'generation rocm-7.1.1 (default): ', 'gpu `rocm/7.1.1 in ROCM_PATH`', 'needs flux run --setattr'):
        assert words in text


def test_the_command():
    done = command('frontier', '--format', 'env', '--group', 'alt_read')
    assert (done.returncode, done.stderr) == (0, '') and '\nFI_CXI_RDZV_PROTO=alt_read\n' in done.stdout
    done = command('--format', 'markdown')
    assert done.returncode == 0 and '\n| `isambard_ai` | Isambard-AI (HPE Cray EX, GH200) | 4 NVIDIA, aarch64 |' in done.stdout
    for args, words in ((['derecho', '--format', 'env', '--group', 'none'], "--group names the group 'none'"),
                        (['--format', 'env'], "--format needs a site"),
                        (['derecho', '--group', 'gdr'], "--group needs --format")):
        done = command(*args)
        assert done.returncode == 1 and words in done.stderr and done.stdout == '', done.stderr
