# SPDX-License-Identifier: GPL-2.0-only
"""The hooks, on easyconfigs that EasyBuild parses in this process."""
import contextlib
import io
import os
import pathlib
import re
import sys
import tempfile

import pytest

import easybuild.easyblocks.nccl
import easybuild.tools.hooks as eb_hooks
from easybuild import easyblocks
from easybuild.easyblocks import generic
from easybuild.framework.easyconfig import easyconfig as eb_easyconfig
from easybuild.framework.easyconfig.easyconfig import EasyConfig
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.config import Singleton
from easybuild.tools.module_naming_scheme import toolchain as mns_toolchain
from easybuild.tools.modules import reset_module_caches
from easybuild.tools.options import parse_external_modules_metadata, set_up_configuration
from easybuild.tools.toolchain import utilities as tc_utils
from slingtorch import sites
from testbed import messages

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOOKS = ROOT / 'hooks' / 'slingshot_hooks.py'


@contextlib.contextmanager
def refused(words):
    """An error with these words, which is known as a whole."""
    with pytest.raises(EasyBuildError, match=words) as error:
        yield
    messages.known(str(error.value), by='hooks')


EASYCONFIG = """
easyblock = '%(easyblock)s'
name = '%(name)s'
version = '9.9'
homepage = 'https://example.org'
description = "a tiny one"
toolchain = SYSTEM
moduleclass = 'ai'
%(more)s
"""


def reset_easybuild():
    """EasyBuild keeps state in singletons and caches."""
    Singleton._instances.clear()
    tc_utils._initial_toolchain_instances.clear()
    eb_easyconfig._easyconfigs_cache.clear()
    eb_easyconfig._easyconfig_files_cache.clear()
    eb_easyconfig.get_toolchain_hierarchy.clear()
    mns_toolchain._toolchain_details_cache.clear()
    eb_hooks._cached_hooks.clear()
    reset_module_caches()
    tempfile.tempdir = None


class Parser:
    """EasyBuild as it is configured for a test."""

    def __init__(self, tmp_path, monkeypatch):
        self.tmp_path = tmp_path
        self.monkeypatch = monkeypatch
        self.easyblocks = []

    def configure(self, *args, site=None, groups=None):
        """Configure EasyBuild again, with the hooks of the bundle."""
        reset_easybuild()
        for variable in list(os.environ):
            if variable.startswith(('EASYBUILD_', 'SLINGTORCH_', 'NCAR_', 'LUMI_', 'LMOD_SYSTEM')):
                self.monkeypatch.delenv(variable)
        for variable, value in (('SLINGTORCH_SITE', site), ('SLINGTORCH_SITE_GROUPS', groups)):
            if value is not None:
                self.monkeypatch.setenv(variable, value)
        self.monkeypatch.setenv('LMOD_CMD', os.environ.get('LMOD_CMD', '/usr/share/lmod/lmod/libexec/lmod'))
        options = ['--prefix=%s' % self.tmp_path, '--tmpdir=%s' % (self.tmp_path / 'tmp'), '--hooks=%s' % HOOKS,
                   '--output-style=no_color', '--disable-show-progress-bar',
                   '--allow-use-as-root-and-accept-consequences'] + list(args)
        if self.easyblocks:
            options.append('--include-easyblocks=%s' % ','.join(self.easyblocks))
        (self.tmp_path / 'tmp').mkdir(exist_ok=True)
        set_up_configuration(args=options, silent=True)
        return self

    def easyblock(self, name, parameters):
        """Add an easyblock that knows some parameters."""
        path = self.tmp_path / ('%s.py' % re.sub('^EB_', '', name).lower())
        path.write_text(
            'from easybuild.easyblocks.generic.tarball import Tarball\n'
            'from easybuild.framework.easyconfig import CUSTOM\n\n\n'
            'class %s(Tarball):\n'
            '    @staticmethod\n'
            '    def extra_options(extra_vars=None):\n'
            '        extra_vars = Tarball.extra_options(extra_vars)\n'
            '        extra_vars.update({%s})\n'
            '        return extra_vars\n' % (name, ', '.join("'%s': [%r, '', CUSTOM]" % item
                                                             for item in sorted(parameters.items()))))
        self.easyblocks.append(str(path))

    def parse(self, name='PyTorch', easyblock='Tarball', more=''):
        """Parse an easyconfig with this text; (EasyConfig, what was printed)."""
        path = self.tmp_path / ('%s-9.9.eb' % name)
        path.write_text(EASYCONFIG % {'name': name, 'easyblock': easyblock, 'more': more})
        return self.parse_file(path)

    def parse_file(self, path):
        """Likewise for a file; what was printed is also that of its installation."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            ec = EasyConfig(str(path))
            eb_hooks.load_hooks(str(HOOKS))['pre_easyblock_hook'](type('App', (), {'cfg': ec, 'dry_run': True}))
        for line in out.getvalue().splitlines():
            if 'slingtorch:' in line:
                messages.known(line, by='hooks')
        return ec, out.getvalue()


@pytest.fixture
def parser(tmp_path, monkeypatch):
    environ, cwd = dict(os.environ), os.getcwd()
    # --include-easyblocks puts its directories and modules before all others for the rest of the process.
    monkeypatch.setattr(sys, 'path', list(sys.path))
    for package in (easyblocks, generic):
        monkeypatch.setattr(package, '__path__', list(package.__path__))
    modules = {name: module for name, module in sys.modules.items() if name.startswith('easybuild.easyblocks.')}
    yield Parser(tmp_path, monkeypatch)
    for name in [name for name in sys.modules if name.startswith('easybuild.easyblocks.')]:
        del sys.modules[name]
    sys.modules.update(modules)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    reset_easybuild()


# --- modules of the site

SITE_FILE = """
[site]
title = Test
centre = c
url = u
scheduler = slurm
gpu = cuda
gpus_per_node = 4
network = slingshot11
source = s
"""
PROVIDES = """
[provides %s]
modules_first = env/%s
compiler = build gcc/14
gpu = cuda/%s
source = s
"""


@pytest.fixture
def roles(parser, tmp_path):
    """Parse an easyconfig with roles on a site with these sections."""
    def parse(sections, more="site_dependencies = ['compiler', 'gpu']", name='NCCL', generation=None):
        (tmp_path / 'sites').mkdir(exist_ok=True)
        (tmp_path / 'sites/mine.cfg').write_text(SITE_FILE + sections)
        parser.configure(site='mine')
        parser.monkeypatch.setenv('SLINGTORCH_SITES_PATH', str(tmp_path / 'sites'))
        if generation:
            parser.monkeypatch.setenv('SLINGTORCH_SITE_GENERATION', generation)
        return parser.parse(name=name, more=more)[0]
    return parse


def names(dependencies):
    return [dep['full_mod_name'] for dep in dependencies]


def test_roles_of_one_generation(roles):
    """Modules come in their order, before what the easyconfig says; and no suffix is needed."""
    ec = roles(PROVIDES % ('a', 'a', '12'), more="""dependencies = [('zlib', '1')]
site_dependencies = ['compiler', 'gpu']""")
    assert names(ec['dependencies']) == ['env/a', 'cuda/12', 'zlib/1'] and names(ec['builddependencies']) == ['gcc/14']
    assert ec['dependencies'][1]['external_module'] and ec.full_mod_name == 'NCCL/9.9'


def test_written_easyconfig_has_the_dependencies(roles, parser, tmp_path):
    """What EasyBuild writes (reprod/) gives the same when it is parsed again."""
    ec = roles(PROVIDES % ('a', 'a', '12') + PROVIDES % ('b', 'b', '13'), generation='b')
    path = tmp_path / 'written' / 'NCCL-9.9-mine-b.eb'
    path.parent.mkdir()
    ec.dump(str(path))
    assert "('cuda/13', EXTERNAL_MODULE)" in path.read_text() and 'site_dependencies' not in path.read_text()
    again = parser.parse_file(path)[0]
    assert names(again['dependencies']) == names(ec['dependencies']) == ['env/b', 'cuda/13']
    assert again.full_mod_name == ec.full_mod_name == 'NCCL/9.9-mine-b'


def test_the_file_name_decides_the_generation(roles, parser, tmp_path):
    """As where the robot finds it for an easyconfig of that generation."""
    roles(PROVIDES % ('a', 'a', '12') + PROVIDES % ('b', 'b', '13'), generation='a')
    path = (tmp_path / 'NCCL-9.9.eb').rename(tmp_path / 'NCCL-9.9-mine-b.eb')
    assert names(parser.parse_file(path)[0]['dependencies']) == ['env/b', 'cuda/13']


def test_the_easyconfig_wins(roles):
    own = "dependencies = [('cuda/11', EXTERNAL_MODULE)]\nversionsuffix = '-x'\n"
    ec = roles(PROVIDES % ('a', 'a', '12') + PROVIDES % ('b', 'b', '13'), generation='a',
               more=own + "site_generation = 'b'\nsite_dependencies = ['gpu']")
    assert names(ec['dependencies']) == ['env/b', 'cuda/11'] and ec.full_mod_name == 'NCCL/9.9-x'


def test_the_sites_own_plugin_or_ours(roles):
    more = "site_dependencies = ['nccl_plugin']"
    section = PROVIDES % ('a', 'a', '12')
    assert names(roles(section + 'nccl_plugin = net/1\n', more)['dependencies']) == ['env/a', 'net/1']
    section += 'nccl_plugin = eb aws-ofi-nccl/1.21.1\n'
    assert names(roles(section, more)['dependencies']) == ['env/a', 'aws-ofi-nccl/1.21.1']


def test_at_run_time_in_any_case(roles):
    """'run ROLE': an easyconfig may need at run time what the site has for builds."""
    ec = roles(PROVIDES % ('a', 'a', '12'), "site_dependencies = ['run compiler', 'gpu']")
    assert names(ec['dependencies']) == ['env/a', 'gcc/14', 'cuda/12'] and not ec['builddependencies']


def test_only_the_build(roles):
    """What has nothing of a generation at run time is the same for all of them, and has no suffix."""
    two = (PROVIDES % ('a', 'a', '12') + 'default = yes\nconda = build conda/1\npython = build eb CondaPython/3.12\n'
           + PROVIDES % ('b', 'b', '13') + 'conda = build conda/1\n')
    ec = roles(two, "site_dependencies = ['conda']", name='CondaPython')
    assert names(ec['dependencies']) == [] and names(ec['builddependencies']) == ['env/a', 'conda/1']
    assert ec.full_mod_name == 'CondaPython/9.9'
    ec = roles(two, "site_dependencies = ['python', 'gpu']")
    assert names(ec['builddependencies']) == ['CondaPython/3.12'] and ec.full_mod_name == 'NCCL/9.9-mine-a'


def test_software_of_a_generation_is_found_under_its_name(roles, parser):
    """As the robot looks for NCCL-9.9-mine-a.eb."""
    roles(PROVIDES % ('a', 'a', '12'), '')
    link = eb_hooks.load_hooks(str(HOOKS))['parse_hook'].__globals__['link_easyconfig']
    parser.monkeypatch.setitem(link.__globals__, 'build_option', lambda _: robot)
    robot = []
    parser.monkeypatch.setitem(link.__globals__, 'robot_find_easyconfig', lambda name, version: {
        'NCCL-9.9': '/x/NCCL-9.9.eb', 'NCCL-9.9-there': 'y'}.get(f'{name}-{version}'))
    link('NCCL', '9.9', '-there')
    link('zlib', '9.9', '-mine-a')
    assert robot == []
    link('NCCL', '9.9', '-mine-a')
    assert [(path.name, os.readlink(path)) for path in pathlib.Path(robot[0]).iterdir()] == [('NCCL-9.9-mine-a.eb', '/x/NCCL-9.9.eb')]


def test_what_a_site_may_have(roles):
    """An optional role, marked with '?', is left out where the site has none, and is no reason to refuse."""
    section = PROVIDES % ('a', 'a', '12')
    assert names(roles(section, "site_dependencies = ['gpu', 'nccl?']")['dependencies']) == ['env/a', 'cuda/12']
    ec = roles(section + 'nccl = net/1\n', "site_dependencies = ['gpu', 'nccl?']")
    assert names(ec['dependencies'])[2] == 'net/1'
    ec = roles('', "site_dependencies = ['nccl_plugin?']")
    app = App(ec.name, ec)
    eb_hooks.load_hooks(str(HOOKS))['pre_easyblock_hook'].__globals__['refuse_other_site'](app)


def test_metadata_of_the_site(roles, parser):
    """EasyBuild gets name, version and prefix from the site's file; and a file of the user's comes first."""
    section = PROVIDES.replace('gpu = cuda/%s', 'gpu = cuda/%s in CUDA_HOME') % ('a', 'a', '12.9')
    section += 'nccl_plugin = net/1 is aws-ofi-nccl/1.19.2 in /opt/net\n'
    more = "dependencies = [('cuda/12.9', EXTERNAL_MODULE), ('net/1', EXTERNAL_MODULE)]"
    ec = roles(section, more)
    assert [dep['external_module_metadata'] for dep in ec['dependencies']] == [
        {'name': ['CUDA'], 'version': ['12.9'], 'prefix': 'CUDA_HOME'},
        {'name': ['aws-ofi-nccl'], 'version': ['1.19.2'], 'prefix': '/opt/net'}]
    own = parser.tmp_path / 'own.cfg'
    own.write_text('[cuda/12.9]\nname = CUDA\nversion = 12.9.1\nprefix = /my/cuda\n')
    parser.configure('--external-modules-metadata=%s' % own, site='mine')
    parser.monkeypatch.setenv('SLINGTORCH_SITES_PATH', str(parser.tmp_path / 'sites'))
    ec = parser.parse(name='NCCL', more=more)[0]
    assert ec['dependencies'][0]['external_module_metadata']['prefix'] == '/my/cuda'


def test_a_prefix_that_the_module_does_not_set(roles, parser):
    ec = roles(PROVIDES.replace('gpu = cuda/%s', 'gpu = cuda/%s in MY_CUDA') % ('a', 'a', '12.9'))
    app = App(ec.name, ec)
    hooks = eb_hooks.load_hooks(str(HOOKS))
    with refused(r"cuda/12.9 does not set the variable \$MY_CUDA, which .*"
                 r"mine.cfg, section \[provides a\], gpu = cuda/12.9 in MY_CUDA names as its prefix"):
        hooks['post_prepare_hook'](app)
    parser.monkeypatch.setenv('MY_CUDA', '/opt/cuda')
    hooks['post_prepare_hook'](app)


def test_parameters_of_the_site_for_what_names_roles(roles):
    """NCCL is compiled for the site's GPUs; what names no role gets nothing."""
    parameter = '[parameter cuda_compute_capabilities]\nvalues = 8.0\nfor = %s\nreason = r\nsource = s\n'
    section = PROVIDES % ('a', 'a', '12')
    more = "site_dependencies = ['gpu']"
    assert roles(section + parameter % 'Tarball', more)['cuda_compute_capabilities'] == ['8.0']
    assert roles(section + parameter % 'Tarball', '')['cuda_compute_capabilities'] == []
    assert roles(section + parameter % 'EB_NCCL', more)['cuda_compute_capabilities'] == []


@pytest.mark.parametrize('suffix, wrong', [
    ('-cuda-13.2', "is for CUDA 13, but this site's network plugin is for CUDA 12"),
    ('-rocm-7.1', "is for ROCm 7, but this site's network plugin is for CUDA 12"), ('-cuda-12.8', None)])
def test_a_plugin_for_another_cuda(roles, suffix, wrong):
    """Said before anything is downloaded; parsing, and so --inject-checksums, goes on."""
    section = PROVIDES % ('a', 'a', '12.9') + 'nccl_plugin = net/1\n'
    ec = roles(section, "versionsuffix = '%s'\nsite_dependencies = ['nccl_plugin?']" % suffix, name='PyTorch')
    app = App(ec.name, ec)
    refuse = eb_hooks.load_hooks(str(HOOKS))['pre_easyblock_hook'].__globals__['refuse_other_site']
    with refused(wrong) if wrong else contextlib.nullcontext():
        refuse(app)


def test_a_role_in_the_module_of_another(roles):
    ec = roles(PROVIDES % ('a', 'a', '12') + 'nccl = gpu\n', "site_dependencies = ['gpu', 'nccl']")
    assert names(ec['dependencies']) == ['env/a', 'cuda/12']


@pytest.mark.parametrize('sections, more, message', [
    (PROVIDES % ('a', 'a', '12'), "[('gpu', '1')]", r"must be a list of roles, such as"),
    (PROVIDES % ('a', 'a', '12'), "['cuda']", r"names the role 'cuda'. The roles are: .*gpu"),
    (PROVIDES % ('a', 'a', '12') + 'nccl = cudnn\n', "['nccl']", r"has no module for the role 'cudnn'"),
])
def test_roles_that_cannot_be_filled(roles, sections, more, message):
    with refused(message):
        roles(sections, 'site_dependencies = ' + more)


def test_errors_about_modules_and_locks_get_a_remedy(roles, capsys):
    roles(PROVIDES % ('a', 'a', '12'))
    capsys.readouterr()
    for words in ('Lock /x/y.lock already exists, aborting!', 'Missing modules for dependencies (use --robot?): cuda/12, zlib/1',
                  'cuda/12 of mine.cfg, section [provides a], gpu = cuda/12', 'nothing of these'):
        eb_hooks.load_hooks(str(HOOKS))['fail_hook'](EasyBuildError(words))
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    assert [re.sub(r'/\S+/(?=mine.cfg)', 'DIR/', line) for line in said] == [
        "WARNING: slingtorch: another eb is installing this, or a killed eb left its lock. If no such eb is running, on this host or "
        "another one: rmdir '/x/y.lock'. To wait for another eb: --wait-on-lock-limit=3600",
        *["WARNING: slingtorch: the module cuda/12 is named in DIR/mine.cfg, section [provides a], gpu = cuda/12. A login node may lack "
          "it: run eb in a job. If the machine no longer has it ('module spider cuda'), fix that line, or use another generation "
          "(export SLINGTORCH_SITE_GENERATION=NAME)"] * 2]


def test_roles_on_a_site_that_provides_nothing(roles, parser):
    """A file of an older form: sources are fetched, and nothing is installed."""
    ec = roles('')
    assert ec['dependencies'] == []
    hooks = eb_hooks.load_hooks(str(HOOKS))
    app = App(ec.name, ec)
    with refused(r"mine.cfg names none. Add a section \[provides NAME\]"):
        hooks['pre_easyblock_hook'](app)


# --- values of the site

def test_values_are_added(parser):
    ec, out = parser.configure(site='derecho').parse()
    values = ec['modextravars']
    assert values['FI_MR_CACHE_MONITOR'] == {'value': 'userfaultfd', 'pushenv': True}
    assert values['SLINGTORCH_MULTINODE_NCCL_NET'] == {'value': 'AWS Libfabric', 'pushenv': True}
    assert 'NCCL_NET' not in values and 'NCCL_NET_GDR_LEVEL' not in values
    lines = [line for line in out.splitlines() if 'slingtorch' in line]
    assert len(lines) == 1
    assert re.match(r'^== slingtorch: site derecho: PyTorch-9\.9\.eb: 7 site values \(FI_MR_CACHE_MONITOR, .*\)$',
                    lines[0])
    # a module that is loaded during an installation does not change the site
    parser.monkeypatch.setenv('SLINGTORCH_SITE', 'frontier')
    assert parser.parse()[0]['modextravars'] == ec.copy()['modextravars'] == values


def test_other_software_is_left_alone(parser):
    parser.configure(site='derecho', groups='gdr')
    parser.parse()  # the default of modextravars is one dictionary for all easyconfigs
    for name in ('zlib', 'NCCL', 'aws-ofi-nccl', 'PyTorch-Lightning'):
        ec, out = parser.parse(name=name)
        assert ec['modextravars'] == {}
        assert out == ''


def test_easyconfig_wins(parser):
    ec, out = parser.configure(site='derecho', groups='gdr').parse(
        more="modextravars = {'NCCL_CROSS_NIC': '2', 'NCCL_NET_GDR_LEVEL': 'PIX', 'MINE': 'x'}")
    values = ec['modextravars']
    assert (values['NCCL_CROSS_NIC'], values['NCCL_NET_GDR_LEVEL'], values['MINE']) == ('2', 'PIX', 'x')
    assert 'NCCL_SOCKET_IFNAME' in values
    assert 'NCCL_CROSS_NIC' not in out and 'NCCL_NET_GDR_LEVEL' not in out


def test_groups_of_the_easyconfig(parser):
    parser.easyblock('Grouped', {'site_groups': []})
    parser.configure(site='frontier', groups='hsn0')
    ec, out = parser.parse(easyblock='Grouped', more="site_groups = ['alt_read']")
    assert 'group alt_read, which needs: #SBATCH --network=disable_rdzv_get' in out
    assert ec['modextravars']['FI_CXI_RDZV_PROTO']['value'] == 'alt_read'
    assert ec['modextravars']['NCCL_SOCKET_IFNAME']['value'] == 'hsn0'
    assert 'FI_CXI_RDZV_PROTO' not in parser.parse(easyblock='Grouped')[0]['modextravars']
    with refused("(?s)site_groups in .*PyTorch-9.9.eb names the group 'nonsense'.*alt_read"):
        parser.parse(easyblock='Grouped', more="site_groups = ['nonsense']")
    with refused("is not a list"):
        parser.parse(easyblock='Grouped', more="site_groups = 'alt_read'")


def test_unknown_site_and_group(parser):
    with refused("There is no site 'nonsense'. The sites are: .*cirrus"):
        parser.configure(site='nonsense').parse()
    with refused("names the group 'nonsense'"):
        parser.configure(site='lumi', groups='nonsense').parse()


def test_parameters(parser):
    parser.easyblock('Singularity', {'bind_paths': [], 'gpu_visibility': None, 'site_gpu': None})
    parser.easyblock('Other', {'gpu_visibility': None})
    parser.configure(site='lumi')
    ec, out = parser.parse(easyblock='Singularity')
    assert ec['gpu_visibility'] == 'ROCR_VISIBLE_DEVICES'
    assert '/pfs' in ec['bind_paths'] and '/var/spool/slurmd' in ec['bind_paths']
    assert 'bind_paths' in out

    ec, out = parser.parse(easyblock='Singularity', more="bind_paths = ['/mine']\ngpu_visibility = None")
    assert (ec['bind_paths'], ec['gpu_visibility']) == (['/mine'], None)
    assert 'bind_paths' not in out

    # an easyblock of EasyBuild does not know them, and what they are not for gets none
    assert 'gpu_visibility' not in parser.parse()[0]
    assert parser.parse(easyblock='Other')[0]['gpu_visibility'] is None

    # which GPUs the site has, for Horovod as for PyTorch
    for name in ('PyTorch', 'Horovod'):
        ec, _ = parser.parse(name=name, easyblock='Singularity')
        assert ec['site_gpu'] == 'rocm' and 'FI_MR_CACHE_MONITOR' in ec['modextravars']
    assert parser.parse(easyblock='Singularity', more="site_gpu = 'any'")[0]['site_gpu'] == 'any'


def test_mpi_values_only_with_the_gtl(parser):
    """Without the GTL library MPI_Init aborts if MPICH_GPU_SUPPORT_ENABLED is set."""
    parser.easyblock('EB_PyTorch_Cray', {'mpi_gtl': None})
    parser.configure(site='derecho')
    for more, expected in (('', False), ("mpi_gtl = 'cuda'", True), ("mpi_gtl = 'hsa'", False)):
        values = parser.parse(easyblock='EB_PyTorch_Cray', more=more)[0]['modextravars']
        assert ('MPICH_GPU_SUPPORT_ENABLED' in values) == expected
    assert 'MPICH_GPU_SUPPORT_ENABLED' not in parser.parse()[0]['modextravars']


def test_generic_site_on_a_known_machine_warns(parser, monkeypatch):
    parser.configure(site='local')
    monkeypatch.setenv('NCAR_HOST', 'derecho')
    _, out = parser.parse()
    assert "WARNING" in out and "this machine matches 'derecho'" in out


def test_easybuilds_own_pytorch(parser, tmp_path):
    """PyTorch with EasyBuild's easyblock, a toolchain, a versionsuffix with templates and other modextravars."""
    parser.configure('--ignore-osdeps', site='frontier')
    path = tmp_path / 'PyTorch-2.7.1-foss-2024a-CUDA-12.6.0.eb'
    path.write_text("""name = 'PyTorch'
version = '2.7.1'
versionsuffix = '-CUDA-%(cudaver)s'
homepage, description, moduleclass = 'https://pytorch.org', 'PyTorch', 'ai'
toolchain = {'name': 'foss', 'version': '2024a'}
dependencies = [('CUDA', '12.6.0', '', SYSTEM), ('Python', '3.12.3')]
modextravars = {'USERS': '1'}
""")
    ec, out = parser.parse_file(path)
    assert ec['modextravars']['NCCL_CROSS_NIC'] == {'value': '1', 'pushenv': True}
    assert ec['modextravars']['USERS'] == '1' and 'PyTorch-2.7.1-foss-2024a-CUDA-12.6.0.eb: ' in out


def test_sites_speak_of_easyblocks_that_exist():
    """A site's parameter that no easyblock knows would be left out in silence."""
    text = '\n'.join(path.read_text() for path in sorted((ROOT / 'easyblocks').rglob('*.py')))
    # and what EasyBuild itself has
    text += pathlib.Path(easybuild.easyblocks.nccl.__file__).read_text()
    text += ''.join("'%s': [" % name for name in eb_easyconfig.DEFAULT_CONFIG)
    missing = []
    for site in sites.load_all():
        for value in site.env + site.parameters:
            parameters = [value.name] if value in site.parameters else [value.when[0]] if value.when else []
            missing += ['%s: parameter %s' % (site.name, name) for name in parameters if "'%s': [" % name not in text]
            missing += ['%s: easyblock %s' % (site.name, name) for name in value.easyblocks
                        if 'class %s(' % name not in text]
    assert sorted(set(missing)) == []


def test_metadata(parser, tmp_path):
    """Of each module of the shipped sites: as EasyBuild's own parser would give it, with a literal version."""
    found = {(site.name, module): entry for site in sites.load_all({}) for module, entry in site.modules().items()}
    assert len(found) > 15
    for (site, module), entry in found.items():
        path = tmp_path / 'metadata.cfg'
        path.write_text('[%s]\n' % module + ''.join(
            '%s = %s\n' % (key, value[0] if isinstance(value, list) else value) for key, value in entry.items()))
        assert parse_external_modules_metadata([str(path)])[module] == entry
        # conda/latest is another one every few months, and of some modules no version is public
        if module != 'conda/latest' and ('/' in module or 'version' in entry):
            assert re.match(r'\d+(\.\d+)+$', entry['version'][0]), (site, module)
            assert entry['version'][0] in module or ' is ' in sites.load(site, {}).role_of(module), (site, module)
    assert found['derecho', 'cudnn/9.2.0.82-12'] == {
        'name': ['cuDNN'], 'version': ['9.2.0.82'], 'prefix': 'NCAR_ROOT_CUDNN'}


# --- other sites

def test_easyconfigs_say_which_site_they_are_for():
    """Those that carry a site's name; a name by itself means nothing."""
    for path in sorted((ROOT / 'easyconfigs').rglob('*.eb')):
        said = re.findall(r"^only_site = '(\w+)'$", path.read_text(), re.M)
        named = [name for name in ('cirrus', 'derecho', 'frontier') if '-%s' % name in path.name]
        assert [name.split('_')[0] for name in said] == named, path.name


def test_another_site_is_refused(parser):
    """Whatever the software is; and on the right site, or in a dry run, nothing is said."""
    parser.configure()
    hooks, app = eb_hooks.load_hooks(str(HOOKS)), App('SomeLibrary')
    here = hooks['pre_easyblock_hook'].__globals__['chosen_site']().name
    other = 'lumi' if here != 'lumi' else 'derecho'
    app.cfg['only_site'] = other
    with refused("SomeLibrary-9.9.eb is for the site '%s', but this is" % other):
        hooks['pre_easyblock_hook'](app)
    app.dry_run = True
    hooks['pre_easyblock_hook'](app)


class Config(dict):
    """What the hooks use of an easyconfig when it is installed."""

    path = '/x/SomeLibrary-9.9.eb'


class App:
    """What the hooks use of an easyblock."""

    dry_run = False

    def __init__(self, name, cfg=None):
        self.name = name
        self.cfg = Config(only_site=None, site_dependencies=None) if cfg is None else cfg
