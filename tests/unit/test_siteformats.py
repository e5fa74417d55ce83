# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch sites NAME --format: what is printed does what it says."""
import pathlib
import subprocess
import sys

from slingtorch import sites as SITES
from slingtorch.sites import formats as siteformats
from test_sites import ENV, GROUP, REFERENCE, SITE
from testbed.expected import expected

ROOT = pathlib.Path(__file__).resolve().parents[2]
# a site with all that a file may have
FULL = SITE.replace('Test', 'Full \\ of | <things>').replace('cuda', 'rocm') + '''processor = aarch64
pytorch = module load pytorch
evidence = a page
missing = the number of nodes
[detect host]
hostname = full[0-9]*
source = me
[provides a-1]
gpu = rocm/7 in ROCM_PATH
default = yes
source = me
[provides b-2]
gpu = rocm/6
source = me
[parameter bind_paths]
values =
    /a
    /b
for = Singularity, Other
reason = needed
source = paper
''' + REFERENCE + GROUP + ENV.replace('NIC]', 'NIC in fast]').replace('= 1', '= 0').replace('faster', 30 * 'it-was ') + ENV + ''.join(
    ENV.replace('NCCL_CROSS_NIC', name) for name in (siteformats.NET, 'SLINGTORCH_X', 'MPICH_GPU')) + 'when = mpi_gtl = hsa=1\n'


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


def test_everything_in_a_file_is_shown(tmp_path):
    """As text, for a shell, and in the table."""
    (tmp_path / 'full.cfg').write_text(FULL)
    site = SITES.load('full', {'SLINGTORCH_SITES_PATH': str(tmp_path)})
    bare = SITES.load('local', {})
    expected('\n'.join([siteformats.everything(site), siteformats.env_file(site, ['fast']),
                        siteformats.overview([site, bare])]), 'site-formats', [(tmp_path, 'DIRECTORY')])
    assert siteformats.everything(bare).endswith('/local.cfg\n\nThis site sets no values.\n')


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
