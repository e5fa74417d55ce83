# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch sites NAME --format: what is printed does what it says."""
import pathlib
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
        text = siteformats.env_file(site, groups)
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


def test_comments_are_wrapped():
    for site, groups in each():
        assert max(map(len, siteformats.env_file(site, groups).splitlines())) <= 118, site.name


def test_everything_in_a_file_is_shown():
    text = ' '.join(siteformats.everything(SITES.load('tuolumne', {})).split())
    for words in ('gpu: rocm gpus_per_node: 4', 'scheduler: flux', 'recognised by: tuolumne[0-9]*', 'not published: ',
                  'generation rocm-7.1.1 (default): ', 'gpu = rocm/7.1.1 in ROCM_PATH', 'needs: flux run --setattr'):
        assert words in text
    for site, _ in each():
        text = ' '.join(siteformats.everything(site).split())
        for value in site.env + site.parameters:
            assert f'{value.name} = ' in text and value.reason in text and value.source in text


def test_the_command():
    done = command('frontier', '--format', 'env', '--group', 'alt_read')
    assert (done.returncode, done.stderr) == (0, '') and '\nFI_CXI_RDZV_PROTO=alt_read\n' in done.stdout
    done = command('--format', 'markdown')
    assert done.returncode == 0 and '\n| `isambard_ai` | Isambard-AI (HPE Cray EX, GH200) | 4 NVIDIA, aarch64 |' in done.stdout
    for args, words in ((['derecho', '--format', 'env', '--group', 'none'], "--group names the group 'none'"),
                        (['--format', 'env'], "--format env needs a site"),
                        (['derecho', '--group', 'gdr'], "--group needs both")):
        done = command(*args)
        assert done.returncode == 1 and words in done.stderr and done.stdout == '', done.stderr
