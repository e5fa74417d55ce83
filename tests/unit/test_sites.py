# SPDX-License-Identifier: GPL-2.0-only
"""Sites: the files in hooks/sites, and how one of them is chosen."""
import os
import pathlib
import re

import pytest

from slingtorch import sites
from testbed import raising
from testbed.expected import expected

ROOT = pathlib.Path(__file__).resolve().parents[2]


ALL = sites.load_all({})
REAL = sorted(site.name for site in ALL if site.rules and site.name != 'cirrus_ice')

SITE = """
[site]
title = Test
centre = Centre
url = https://example.org
scheduler = slurm
gpu = cuda
gpus_per_node = 4
network = slingshot11
source = paper
"""
ENV = """
[env NCCL_CROSS_NIC]
value = 1
reason = faster
source = paper
"""
GROUP = """
[group fast]
title = fast things
needs = srun --fast
reason = hurt someone
source = paper
"""


REFERENCE = """
[reference one]
operation = all_reduce
backend = nccl
nodes = 2
ranks_per_node = 4
size = 128 MiB
bus_bandwidth = 80.5
tolerance = 0.1
source = paper
"""


@pytest.fixture
def site_dir(tmp_path):
    """Function that writes site files, and returns the variable that names their directory."""
    def write(**texts):
        for name, text in texts.items():
            (tmp_path / (name.replace('__', '.') if '__' in name else name + '.cfg')).write_text(text)
        return {'SLINGTORCH_SITES_PATH': str(tmp_path)}
    return write


# --- the files that are shipped

def test_generic_sites_give_nothing_unasked():
    for name in ('local', 'slurm'):
        site = sites.load(name)
        assert not site.env_values() and not site.parameter_values() and not site.rules


def test_what_has_hurt_is_opt_in():
    assert 'NCCL_NET_GDR_LEVEL' not in sites.load('derecho').env_values()
    assert sites.load('derecho').env_values(['gdr'])['NCCL_NET_GDR_LEVEL'].value == 'PHB'
    assert 'NCCL_NET_GDR_LEVEL' not in sites.load('lumi').env_values()
    for name in ('derecho', 'frontier'):
        site = sites.load(name)
        assert 'FI_CXI_RDZV_PROTO' not in site.env_values()
        assert site.env_values(['alt_read'])['FI_CXI_RDZV_PROTO'].value == 'alt_read'
        assert 'disable_rdzv_get' in site.groups['alt_read'].needs.replace('-', '_')


@pytest.mark.parametrize('name', ['derecho', 'frontier', 'lumi'])
def test_slingshot_gpu_sites(name):
    """Values that every Slingshot system with GPUs needs; memhooks, the default monitor, deadlocks."""
    values = {key: value.value for key, value in sites.load(name).env_values().items()}
    assert values['FI_MR_CACHE_MONITOR'] in ('userfaultfd', 'kdreg2')
    assert values['FI_CXI_DISABLE_HOST_REGISTER'] == '1'
    assert values['FI_CXI_DEFAULT_CQ_SIZE'] == '131072'
    assert values['NCCL_SOCKET_IFNAME'].startswith('hsn')
    assert values['SLINGTORCH_MULTINODE_NCCL_NET'] == 'AWS Libfabric'


@pytest.mark.parametrize('site', ALL, ids=lambda site: site.name)
def test_the_minimum_of_channels_undoes_no_maximum(site):
    """NCCL applies the minimum after the maximum (src/graph/connect.cc)."""
    for group in ([], *([name] for name in site.groups)):
        values = {name: int(value.value) for name, value in site.env_values(group).items() if name.endswith('_NCHANNELS')}
        assert values.get('NCCL_MIN_NCHANNELS', 0) <= values.get('NCCL_MAX_NCHANNELS', 64), group


@pytest.mark.parametrize('name', ['derecho', 'frontier', 'lumi', 'olivia', 'perlmutter'])
def test_one_nccl_engine_on_slingshot(name):
    """Since PyTorch 2.15 'nccl' means another one; no easyconfig decides for itself."""
    assert sites.load(name).env_values()['TORCH_DIST_USE_NCCL2'].value == '0'
    assert not [path for path in (ROOT / 'easyconfigs').rglob('*.eb') if 'TORCH_DIST_USE_NCCL2' in path.read_text()]


# --- detection

EVIDENCE = {
    'cirrus': [({}, 'cs-n0035', None), ({}, 'login01', 'work/y07/shared/cirrus-ex')],
    'derecho': [({'NCAR_HOST': 'derecho'}, 'dec0001', None), ({}, 'derecho6.hsn.example', None)],
    'frontier': [({'LMOD_SYSTEM_NAME': 'frontier'}, 'login05', None)],
    'alps': [({'CLUSTER_NAME': 'daint'}, 'nid005001', None), ({'CLUSTER_NAME': 'clariden'}, 'nid006001', None),
             ({}, 'daint-ln003', None), ({}, 'clariden-ln001', None)],
    'dardel': [({}, 'nid002792', 'pdc/software')],
    'elcapitan': [({}, 'elcap1001', None)],
    'isambard_ai': [({}, 'nid010594', 'lus/lfs1aip2')],
    'jupiter': [({'SYSTEMNAME': 'jupiter'}, 'jpbo-001-01', None)],
    'leonardo': [({'HPC_SYSTEM': 'leonardo'}, 'lrdn0001', None), ({}, 'login01', 'leonardo/prod/spack')],
    'olivia': [({}, 'gpu-1-43', 'cluster/installations/eessi/default/eessi_environment_variables_Olivia')],
    'perlmutter': [({'NERSC_HOST': 'perlmutter'}, 'nid001000', None)],
    'polaris': [({}, 'polaris-login-02.hsn.cm.polaris.alcf.anl.gov', None),
                ({'PBS_O_HOST': 'polaris-login-02'}, 'x3005c0s37b0n0', None)],
    'setonix': [({'PAWSEY_CLUSTER': 'setonix'}, 'nid002000', None)],
    'tuolumne': [({}, 'tuolumne1158', None)],
    'lumi': [({'LUMI_STACK_NAME': 'LUMI'}, 'uan01', None), ({'SLURM_CLUSTER_NAME': 'lumi'}, 'nid005001', None),
             ({}, 'uan02', 'appl/local/containers/easybuild-sif-images')],
}


@pytest.mark.parametrize('name, evidence', [(name, item) for name in REAL for item in EVIDENCE[name]])
def test_detect(name, evidence, tmp_path):
    environ, hostname, directory = evidence
    if directory:
        (tmp_path / directory).mkdir(parents=True)
    choice = sites.choose(environ, hostname, root=str(tmp_path))
    assert choice.site.name == name and choice.detected
    assert any(text in choice.why for text in list(environ) + [hostname, directory or hostname])


@pytest.mark.parametrize('environ, hostname', [({}, 'laptop'), ({'NCAR_HOST': 'casper'}, 'casper-login1'),
                                               ({}, 'cs-nord'), ({}, 'login01'),
                                               ({'SLURM_CLUSTER_NAME': 'mylumi'}, 'nid000001'),
                                               ({'NERSC_HOST': 'cori'}, 'nid001'), ({'CLUSTER_NAME': 'eiger'}, 'nid1'),
                                               ({'SYSTEMNAME': 'juwelsbooster'}, 'jwb0001'), ({}, 'x3005c0s37b0n0'),
                                               ({'PBS_O_HOST': 'sirius-login-01'}, 'x3200c0s1b0n0'), ({}, 'tuolumne')])
def test_nothing_detected_is_local(environ, hostname, tmp_path):
    choice = sites.choose(environ, hostname, root=str(tmp_path))
    assert choice.site.name == 'local' and choice.detected
    assert 'for any machine' in choice.why


def test_file_of_this_machine(site_dir):
    environ = site_dir(mine=SITE + '[detect kernel]\nfile = /proc/version\nsource = me\n')
    assert sites.choose(environ, 'h').site.name == 'mine'


def test_two_detected(tmp_path):
    environ = {'NCAR_HOST': 'derecho', 'LMOD_SYSTEM_NAME': 'frontier'}
    with pytest.raises(sites.SiteError) as info:
        sites.choose(environ, 'h', root=str(tmp_path))
    assert str(info.value) == (
        "This machine matches several sites: 'derecho' ($NCAR_HOST is derecho) and 'frontier' ($LMOD_SYSTEM_NAME is frontier). Name "
        "the right one with 'slingtorch env --site NAME', or 'export SLINGTORCH_SITE=NAME'.")
    # naming one of the two decides
    assert sites.choose(dict(environ, SLINGTORCH_SITE='derecho'), 'h', root=str(tmp_path)).site.name == 'derecho'


def test_named_site_contradicts_detected(tmp_path):
    with pytest.raises(sites.SiteError) as info:
        sites.choose({'SLINGTORCH_SITE': 'frontier', 'NCAR_HOST': 'derecho'}, 'h', root=str(tmp_path))
    assert str(info.value) == (
        "Site 'frontier' is named (by --site or $SLINGTORCH_SITE), but this machine matches 'derecho' ($NCAR_HOST is derecho). To use "
        'the detected site, unset SLINGTORCH_SITE or omit --site; if the detection is wrong, correct the rules in '
        f'{ROOT}/hooks/sites/derecho.cfg.')


def test_generic_site_may_be_named_anywhere(tmp_path):
    choice = sites.choose({'SLINGTORCH_SITE': 'local', 'NCAR_HOST': 'derecho'}, 'h', root=str(tmp_path))
    assert choice.site.name == 'local'
    assert choice.warning == ("site 'local' is named, but this machine matches 'derecho' ($NCAR_HOST is derecho). Values of that site "
                              'are not used. To use them, unset SLINGTORCH_SITE.')
    assert sites.choose({'SLINGTORCH_SITE_DETECTED': 'lumi: x'}, 'h', root=str(tmp_path)).site.name == 'local'


def test_unknown_site(tmp_path):
    with pytest.raises(sites.SiteError) as info:
        sites.choose({'SLINGTORCH_SITE': 'derecko'}, 'h', root=str(tmp_path))
    assert str(info.value) == (
        f"There is no site 'derecko'. The sites are: {', '.join(site.name for site in ALL)}. 'slingtorch site new NAME' writes a new "
        'one for this machine (see docs/sites.md).')


def test_unknown_group():
    with pytest.raises(sites.SiteError) as info:
        sites.load('frontier').env_values(['altread'])
    for text in ("'altread'", 'alt_read:', 'needs #SBATCH --network=disable_rdzv_get', 'channels:'):
        assert text in str(info.value)
    with pytest.raises(sites.SiteError, match='has no groups'):
        sites.load('local').check_groups(['gdr'])


def test_groups_of_environment():
    assert sites.chosen_groups({}) == []
    assert sites.chosen_groups({'SLINGTORCH_SITE_GROUPS': ' a, b,,a'}) == ['a', 'b']


# --- a new centre is one file

def test_new_centre_is_one_file(site_dir, tmp_path):
    rule = "[detect node]\nhostname = mine[0-9]\nsource = me\n"
    environ = site_dir(mine=SITE + rule + ENV + GROUP + ENV.replace('NIC]', 'NIC in fast]').replace('= 1', '= 0'))
    choice = sites.choose(environ, 'mine1', root=str(tmp_path / 'root'))
    assert choice.site.name == 'mine'
    assert sites.choose(environ, 'mine1.lab', root=str(tmp_path / 'root'))[1:] == ('the host name is mine1.lab', None, True)
    assert choice.site.env_values()['NCCL_CROSS_NIC'].value == '1'
    assert choice.site.env_values(['fast'])['NCCL_CROSS_NIC'].value == '0'


def test_broken_file_stops_no_other_site(site_dir, tmp_path):
    """It is named in a warning, and only where its own rules match this machine nothing else is taken for it."""
    rule = "[detect node]\nhostname = %s[0-9]\nsource = me\n"
    environ = site_dir(broken=SITE + rule % 'other' + "[env NCCL_CROSS_NIC]\nvalue = 1\n", worse='no section\n',
                       mine=SITE + rule % 'mine')
    (tmp_path / 'gone.cfg').symlink_to('nowhere.cfg')
    root = str(tmp_path / 'root')
    for named, host, site in (({}, 'mine1', 'mine'), ({'SLINGTORCH_SITE': 'slurm'}, 'mine1', 'slurm'),
                              ({}, 'laptop', 'local'), ({'SLINGTORCH_SITE': 'slurm'}, 'other1', 'slurm')):
        choice = sites.choose({**environ, **named}, host, root=root)
        assert choice.site.name == site
        assert f'ignoring a faulty site file: {tmp_path}/broken.cfg, section [env NCCL_CROSS_NIC]: key' in choice.warning
        assert f'{tmp_path}/worse.cfg is not a valid site file' in choice.warning
        assert f'{tmp_path}/gone.cfg cannot be read: ' in choice.warning
    with pytest.raises(sites.SiteError, match=r'must have it\. This machine matches the rules in this file: correct the file, or '
                       r'name a site \(--site or \$SLINGTORCH_SITE\)$'):
        sites.choose(environ, 'other1', root=root)
    with pytest.raises(sites.SiteError, match="key 'reason' is missing"):
        sites.load('broken', environ)


def test_easybuild_that_is_too_old(tmp_path):
    """The version, where it is, and what puts it first."""
    path = tmp_path / 'easybuild/tools/version.py'
    for version in ('5.4.1', '5.10.0', '6.0.0.dev0'):
        assert sites.old_easybuild(version, str(path), {}) is None
    for version in ('5.4.0', '5.2.1', '4.9.4'):
        said = sites.old_easybuild(version, str(path), {'PYTHONPATH': f'/other:{tmp_path}/'})
        assert said.startswith(f'this is EasyBuild {version} in {tmp_path}, but slingtorch needs 5.4.1 or newer. ')
        assert said.endswith("unload the module that sets PYTHONPATH, or unset it")
        assert sites.old_easybuild(version, str(path), {'PYTHONPATH': '/other'}).endswith(
            "Install a newer one in the Python that runs eb: pip install 'easybuild-framework>=5.4.1'")


def test_example_of_the_page(site_dir):
    text, = re.findall(r'^```ini\n(.*?)^```', (ROOT / 'docs/sites.md').read_text(), re.M | re.S)
    choice = sites.choose(dict(site_dir(aurelia=text), SLURM_CLUSTER_NAME='aurelia'), 'nid000001')
    assert choice.site.name == 'aurelia' and choice.site.env_values(['hsn0'])['NCCL_SOCKET_IFNAME'].value == 'hsn0'
    assert choice.site.env_values()['NCCL_SOCKET_IFNAME'].value == 'hsn'


def test_directory_of_the_user_comes_first(site_dir, tmp_path):
    environ = site_dir(derecho=SITE, mine=SITE)
    assert [site.name for site in sites.load_all(environ)] == sorted({site.name for site in ALL} | {'mine'})
    assert sites.load('derecho', environ).title == 'Test'


def test_directory_that_is_none(tmp_path):
    for path in ('relative', str(tmp_path / 'none')):
        with pytest.raises(sites.SiteError, match=r"SLINGTORCH_SITES_PATH contains '%s'" % path):
            sites.choose({'SLINGTORCH_SITES_PATH': path}, 'h')


@pytest.mark.parametrize('mode, refused', [(0o775, False), (0o777, True)])
@pytest.mark.parametrize('name', ['', 'mine.cfg'])
def test_variable_that_leads_to_what_everybody_may_write(site_dir, name, mode, refused):
    """A centre's group may."""
    environ = site_dir(mine=SITE)
    os.chmod(os.path.join(environ['SLINGTORCH_SITES_PATH'], name), mode)
    if refused:
        with pytest.raises(sites.SiteError, match='Everybody may write to .*chmod o-w'):
            sites.load('mine', environ)
    else:
        assert sites.load('mine', environ).title == 'Test'


def test_directory_whose_files_cannot_be_listed(site_dir, monkeypatch):
    environ = site_dir(mine=SITE)
    monkeypatch.setattr(sites.os, 'listdir', raising(PermissionError(13, 'Permission denied')))
    with pytest.raises(sites.SiteError, match='in .SLINGTORCH_SITES_PATH cannot be read: Perm'):
        sites.load('mine', environ)


def test_pipe_in_place_of_a_site(site_dir):
    environ = site_dir(mine=SITE)
    os.mkfifo(os.path.join(environ['SLINGTORCH_SITES_PATH'], 'pipe.cfg'))
    with pytest.raises(sites.SiteError, match='pipe.cfg is not a file'):
        sites.load('pipe', environ)
    assert 'mine' in [site.name for site in sites.load_all(environ)]
    assert sites.choose(environ, 'h').site.name


@pytest.fixture
def own(tmp_path):
    """The user's own directory, and the environment that leads to it."""
    directory = tmp_path / 'home/.config/slingtorch/sites'
    directory.mkdir(parents=True)
    return directory, {'HOME': str(tmp_path / 'home')}


def test_order_of_the_directories(own, tmp_path):
    """The variable, then the user's, then the bundle's."""
    directory, environ = own
    for name in ('both', 'derecho'):
        (directory / (name + '.cfg')).write_text(SITE.replace('Test', 'user'))
    (tmp_path / 'both.cfg').write_text(SITE.replace('Test', 'variable'))
    environ['SLINGTORCH_SITES_PATH'] = str(tmp_path)
    assert [sites.load(name, environ).title for name in ('both', 'derecho')] == ['variable', 'user']
    assert sites.load('lumi', environ).path.startswith(str(ROOT))


def test_configuration_directory(own, tmp_path):
    """As the XDG specification has it: relative is as good as unset. Without a home, or a directory, nothing."""
    directory, environ = own
    for config in ('', 'relative', str(tmp_path / 'home/.config')):
        assert sites.user_directory(dict(environ, XDG_CONFIG_HOME=config)) == str(directory)
    assert sites.user_directory({'XDG_CONFIG_HOME': '/x'}) == '/x/slingtorch/sites'
    for nothing in ({}, {'HOME': ''}, {'HOME': 'relative'}, {'HOME': '/nonexistent'}):
        assert sites.directories(nothing) == [sites.bundle_sites()]


@pytest.mark.parametrize('place', ['.', '..'])
@pytest.mark.parametrize('mode', [0o775, 0o757])
def test_directory_that_others_may_write_to(own, place, mode):
    directory, environ = own
    (directory / place).resolve().chmod(mode)
    with pytest.raises(sites.SiteError, match="Others may write to .*chmod go-w '"):
        sites.choose(environ, 'h')


def test_directory_of_someone_else(own, monkeypatch):
    directory, environ = own
    monkeypatch.setattr(sites.os, 'geteuid', lambda: os.stat(directory).st_uid + 2)
    if os.stat(directory).st_uid == 0:
        os.chown(directory.parent, 1, 1)
    with pytest.raises(sites.SiteError, match='slingtorch with your sites belongs to someone else'):
        sites.choose(environ, 'h')


def test_directory_that_cannot_be_read(own, monkeypatch):
    """By root too."""
    _, environ = own
    monkeypatch.setattr(sites.os, 'access', lambda path, mode: False)
    with pytest.raises(sites.SiteError, match="no permission to read .*chmod u"):
        sites.choose(environ, 'h')


def test_shared_values(site_dir):
    """From the bundle; the site's own section replaces the shared one, and only its groups are offered."""
    own = ENV.replace('NCCL_CROSS_NIC', 'NCCL_SOCKET_IFNAME').replace('= 1', '= hsn0')
    text = SITE + 'include = slingshot11\n' + own
    environ = site_dir(mine=text, other=text + GROUP.replace('fast', 'alt_read'))
    mine, other = sites.load('mine', environ), sites.load('other', environ)
    values = {name: value.value for name, value in mine.env_values().items()}
    assert values == {
        'FI_MR_CACHE_MONITOR': 'userfaultfd', 'FI_CXI_DISABLE_HOST_REGISTER': '1', 'FI_CXI_DEFAULT_CQ_SIZE': '131072',
        'NCCL_SOCKET_IFNAME': 'hsn0', 'SLINGTORCH_MULTINODE_NCCL_NET': 'AWS Libfabric', 'TORCH_DIST_USE_NCCL2': '0'}
    assert mine.env_values()['NCCL_SOCKET_IFNAME'].reason == 'faster'
    assert list(mine.groups) == ['channels'] and list(other.groups) == ['channels', 'alt_read']
    assert other.env_values(['alt_read'])['FI_CXI_RDZV_PROTO'].value == 'alt_read'


def test_shared_values_of_the_user(site_dir):
    environ = site_dir(mine=SITE + 'include = slingshot11, mine\n', mine__inc=ENV)
    assert list(sites.load('mine', environ).env_values())[-1] == 'NCCL_CROSS_NIC'


def test_what_editors_leave(site_dir, tmp_path):
    """A byte order mark is not part of the text; hidden files, as Emacs' links and copies of editors, are no sites."""
    environ = site_dir(mine=SITE, mine__inc=ENV)
    (tmp_path / 'mine.cfg').write_text('\ufeff' + SITE + 'include = mine\n', encoding='utf-8')
    (tmp_path / 'mine.inc').write_text('\ufeff' + ENV, encoding='utf-8')
    (tmp_path / '.#mine.cfg').symlink_to('me@host.4711')
    (tmp_path / '.cfg').write_text(SITE)
    assert sites.load('mine', environ).env
    assert not {'', '.#mine'} & set(sites.find_files(sites.SITE, environ))


def test_what_a_shipped_site_lacks_goes_into_a_file_of_ones_own():
    """The next update would take it away from the bundle's own file."""
    for generation, call in ((None, lambda site, name: site.generation(None, 'x.eb')),
                             ('26.03', lambda site, name: site.provided(name, 'libfabric', 'x.eb'))):
        site = sites.load('dardel' if generation else 'local', {})
        with pytest.raises(sites.SiteError, match="your own file, .* replaces this one.*slingtorch site new NAME"):
            call(site, generation)


def test_what_a_site_does_not_provide(site_dir):
    provides = '[provides a]\ngpu = cuda/12.9 in CUDA_HOME\nnccl = gpu\nsource = s\n[provides b]\nmpi = mpich/4\nsource = s\n'
    environ = site_dir(mine=SITE + provides, bare=SITE)
    site, path = sites.load('mine', environ), environ['SLINGTORCH_SITES_PATH'] + '/mine.cfg'
    for call, words in (
            (lambda: sites.load('bare', environ).generation(None, 'x.eb'),
             f"x.eb needs modules of the site 'bare', but {path.replace('mine', 'bare')} names none. Add a section [provides NAME] "
             "with lines such as 'gpu = cuda/12.9.0' (docs/sites.md)"),
            (lambda: site.generation('c', 'x.eb'), "x.eb needs the generation 'c' of modules, but site 'mine' does not have it. It has "
                                                   f'a, b ({path})'),
            (lambda: site.generation(None, 'x.eb'), f"x.eb can be for a, b, but {path} does not select one: add 'default = yes' to one "
                                                    "of its sections [provides ...], or 'export SLINGTORCH_SITE_GENERATION=NAME'"),
            (lambda: site.provided('a', 'gpus', 'x.eb'), f"x.eb names the role 'gpus'. The roles are: {', '.join(sites.ROLES)}"),
            (lambda: site.provided('b', 'gpu', 'x.eb'), f"{path}, section [provides b] has no module for the role 'gpu', but x.eb needs "
                                                        "one: add the line 'gpu = MODULE/VERSION'")):
        with pytest.raises(sites.SiteError) as said:
            call()
        assert str(said.value) == words
    assert site.provided('a', 'nccl', 'x.eb')['module'] == 'cuda/12.9' and site.generation('b', '') == 'b'
    assert site.role_of('cuda/12.9') == f'{path}, section [provides a], gpu = cuda/12.9 in CUDA_HOME' and not site.role_of('x')
    assert site.modules() == {'cuda/12.9': {'name': ['CUDA'], 'version': ['12.9'], 'prefix': 'CUDA_HOME'},
                              'mpich/4': {'name': ['MPICH'], 'version': ['4']}}


def test_circular_include(site_dir):
    """Shared files include none, neither themselves nor another."""
    with pytest.raises(sites.SiteError, match=r'loop.inc, section \[site\]: move this section .*: a shared file'):
        sites.load('mine', site_dir(mine=SITE + 'include = loop\n', loop__inc='[site]\ninclude = loop\n'))
    include = '[site]\ninclude = %s\n' + SITE.replace('[site]', '').lstrip()
    environ = site_dir(mine=SITE + 'include = first\n', first__inc=include % 'second', second__inc=include % 'first')
    with pytest.raises(sites.SiteError, match=r'first.inc, section \[site\]: .*: a shared file cannot have it'):
        sites.load('mine', environ)
    with pytest.raises(sites.SiteError, match="include names 'mine', but must be one of first, llnl_mi300a, loop"):
        sites.load('mine', site_dir(mine=SITE + 'include = mine\n'))


def test_groups_that_exclude_each_other(site_dir):
    text = SITE + GROUP + GROUP.replace('fast]', 'slow]')
    for group, value in (('fast', '1'), ('slow', '2')):
        text += ENV.replace('NIC]', 'NIC in %s]' % group).replace('= 1', '= ' + value)
    site = sites.load('x', site_dir(x=text))
    with pytest.raises(sites.SiteError, match="'fast' and 'slow' of site 'x' exclude each other"):
        site.env_values(['fast', 'slow'])


def test_parameters(site_dir):
    text = SITE + """
[parameter bind_paths]
values =
    /opt/cray
    # a comment
    /with blank/in it
for = Singularity, Other
reason = needed
source = paper
"""
    value = sites.load('x', site_dir(x=text)).parameter_values()['bind_paths']
    assert value.value == ['/opt/cray', '/with blank/in it']
    assert value.easyblocks == ['Singularity', 'Other']


FAULTS = {
    'reason missing': SITE + ENV.replace('reason = faster\n', ''),
    'reason empty': SITE + ENV.replace('faster', ''),
    'source of detection missing': SITE + '[detect a]\nhostname = c1\n',
    'unknown key': SITE + ENV + 'colour = red\n',
    'unknown section': SITE + '[colour]\nred = 1\n',
    'no site section': ENV,
    'twice': SITE + ENV + ENV,
    'twice, other blanks': SITE + ENV + ENV.replace('env ', 'env  '),
    'key twice': SITE + ENV + 'value = 2\n',
    'not a variable': SITE + ENV.replace('NCCL_CROSS_NIC', 'nccl'),
    'NCCL_NET': SITE + ENV.replace('NCCL_CROSS_NIC', 'NCCL_NET'),
    'visibility': SITE + ENV.replace('NCCL_CROSS_NIC', 'ZE_AFFINITY_MASK'),
    'in a group too': SITE + GROUP + ENV.replace('NCCL_CROSS_NIC]', 'NCCL_ALGO in fast]'),
    'template': SITE + ENV.replace('= 1', '= %(name)s'),
    'group not described': SITE + ENV.replace('NIC]', 'NIC in fast]'),
    'group without values': SITE + GROUP,
    'odd section': SITE + ENV.replace('NIC]', 'NIC of fast]'),
    'wrong choice': SITE.replace('slurm\n', 'sge\n'),
    'GPUs': SITE.replace('= 4', '= four'),
    'detect two': SITE + '[detect a]\nenv = A=b\nhostname = c1\nsource = x\n',
    'detect all': SITE + '[detect a]\nhostname = *\nsource = x\n',
    'detect env': SITE + '[detect a]\nenv = A\nsource = x\n',
    'detect relative file': SITE + '[detect a]\nfile = opt/x\nsource = x\n',
    'modextravars': SITE + '[parameter modextravars]\nvalue = 1\nreason = x\nsource = y\n',
    'include': SITE + 'include = slingshot12\n',
    'roles in a circle': SITE + '[provides a]\nnccl = gpu\ngpu = nccl\nsource = s\n',
    'odd module': SITE + '[provides a]\ngpu = cuda/1 or cuda/2\nsource = s\n',
    'DEFAULT': SITE + '[DEFAULT]\na = b\n',
    'no file form': 'hello\n',
    'section without a name': SITE + '[ ]\n',
    'GPU kind': SITE.replace('cuda', 'tpu'),
    'GPUs of any': SITE.replace('= 4', '= any'),
    'network': SITE.replace('slingshot11', 'slingshot'),
    'processor': SITE + 'processor = ppc64le\n',
    'when': SITE + ENV + 'when = mpi_gtl\n',
    'generation name': SITE + '[provides a b]\ngpu = cuda/1\nsource = s\n',
    'default': SITE + '[provides a]\ngpu = cuda/1\ndefault = true\nsource = s\n',
    'group name': SITE + GROUP.replace('fast]', 'a,b]'),
    **{f'reference, {old}': SITE + REFERENCE.replace(old, new) for old, new in [
        ('nodes = 2', 'nodes = 0'), ('ranks_per_node = 4', 'ranks_per_node = x'), ('MiB', 'MB'), ('80.5', 'fast'), ('0.1', '10%')]},
    **{name: SITE + ENV.replace('NCCL_CROSS_NIC', name) for name in (
        'NCCL_DEBUG_FILE FI_LOG_LEVEL FI_PROVIDER MIOPEN_X MASTER_PORT WORLD_SIZE LOCAL_WORLD_SIZE RANK LOCAL_RANK '
        'X_VISIBLE_DEVICES SLURM_X CUDA_DEVICE_MAX_CONNECTIONS MPICH_RDMA_ENABLED_CUDA PATH LD_LIBRARY_PATH LD_PRELOAD '
        'PYTHONPATH BASH_ENV ENV SHELLOPTS BASHOPTS BASH_FUNC_X PROMPT_COMMAND LD_AUDIT PYTHONSTARTUP PERL5OPT').split()},
}


def test_faults(site_dir):
    """Each fault is an error that names the file, the section and the remedy."""
    messages = {}
    for fault, text in FAULTS.items():
        environ = site_dir(faulty=text)
        with pytest.raises(sites.SiteError) as info:
            sites.load('faulty', environ)
        messages.setdefault(' '.join(str(info.value).replace(fault, 'NAME').split()), []).append(fault)
    expected(''.join(f'{", ".join(faults)}: {said}\n' for said, faults in messages.items()), 'site-faults', [(environ['SLINGTORCH_SITES_PATH'], 'DIRECTORY')])
