"""The hooks, on easyconfigs that EasyBuild parses in this process."""
import contextlib
import importlib.util
import io
import json
import os
import pathlib
import re
import subprocess
import tempfile

import pytest

import easybuild.tools.hooks as eb_hooks
from easybuild.framework.easyconfig import easyconfig as eb_easyconfig
from easybuild.framework.easyconfig.easyconfig import EasyConfig
from easybuild.framework.easyconfig.tools import det_easyconfig_paths
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.config import Singleton
from easybuild.tools.filetools import det_lock_path
from easybuild.tools.module_naming_scheme import toolchain as mns_toolchain
from easybuild.tools.modules import reset_module_caches
from easybuild.tools.options import parse_external_modules_metadata, set_up_configuration
from easybuild.tools.toolchain import utilities as tc_utils

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOOKS = ROOT / 'hooks' / 'slingshot_hooks.py'

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
        """Configure EasyBuild anew, with the hooks of the bundle."""
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
        """Likewise for a file."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            ec = EasyConfig(str(path))
        return ec, out.getvalue()


@pytest.fixture
def parser(tmp_path, monkeypatch):
    environ, cwd = dict(os.environ), os.getcwd()
    yield Parser(tmp_path, monkeypatch)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    reset_easybuild()


# --- values of the site

def test_values_are_added(parser):
    ec, out = parser.configure(site='derecho').parse()
    values = ec['modextravars']
    assert values['FI_MR_CACHE_MONITOR'] == {'value': 'userfaultfd', 'pushenv': True}
    assert values['SLINGTORCH_MULTINODE_NCCL_NET'] == {'value': 'AWS Libfabric', 'pushenv': True}
    assert 'NCCL_NET' not in values and 'NCCL_NET_GDR_LEVEL' not in values
    lines = [line for line in out.splitlines() if 'slingtorch' in line]
    assert len(lines) == 1
    assert re.match(r'^== slingtorch: site derecho: PyTorch-9\.9\.eb: 6 site values \(FI_MR_CACHE_MONITOR, .*\)$',
                    lines[0])


def test_parsing_again_is_the_same_and_silent(parser):
    parser.configure(site='derecho')
    first, _ = parser.parse()
    second, out = parser.parse()
    assert second['modextravars'] == first['modextravars']
    assert 'slingtorch' not in out
    assert first.copy()['modextravars'] == first['modextravars']


def test_other_software_is_left_alone(parser):
    parser.configure(site='derecho', groups='gdr')
    for name in ('zlib', 'NCCL', 'aws-ofi-nccl', 'PyTorch-Lightning'):
        ec, out = parser.parse(name=name)
        assert ec['modextravars'] == {}
        assert out == ''


def test_local_adds_nothing(parser):
    ec, out = parser.configure(site='local').parse()
    assert ec['modextravars'] == {}
    assert out == ''


def test_default_value_is_not_touched(parser):
    """The default of modextravars is one dictionary for all easyconfigs."""
    parser.configure(site='derecho')
    parser.parse()
    assert parser.parse(name='zlib')[0]['modextravars'] == {}


def test_easyconfig_wins(parser):
    ec, out = parser.configure(site='derecho', groups='gdr').parse(
        more="modextravars = {'NCCL_CROSS_NIC': '2', 'NCCL_NET_GDR_LEVEL': 'PIX', 'MINE': 'x'}")
    values = ec['modextravars']
    assert (values['NCCL_CROSS_NIC'], values['NCCL_NET_GDR_LEVEL'], values['MINE']) == ('2', 'PIX', 'x')
    assert 'NCCL_SOCKET_IFNAME' in values
    assert 'NCCL_CROSS_NIC' not in out and 'NCCL_NET_GDR_LEVEL' not in out


def test_groups(parser):
    ec, out = parser.configure(site='frontier', groups='alt_read,hsn0').parse()
    assert ec['modextravars']['FI_CXI_RDZV_PROTO']['value'] == 'alt_read'
    assert ec['modextravars']['NCCL_SOCKET_IFNAME']['value'] == 'hsn0'
    assert 'group alt_read, which needs: #SBATCH --network=disable_rdzv_get' in out


def test_groups_of_the_easyconfig(parser):
    parser.easyblock('Grouped', {'site_groups': []})
    parser.configure(site='frontier', groups='hsn0')
    ec, _ = parser.parse(easyblock='Grouped', more="site_groups = ['alt_read']")
    assert ec['modextravars']['FI_CXI_RDZV_PROTO']['value'] == 'alt_read'
    assert ec['modextravars']['NCCL_SOCKET_IFNAME']['value'] == 'hsn0'
    assert 'FI_CXI_RDZV_PROTO' not in parser.parse(easyblock='Grouped')[0]['modextravars']
    pattern = "(?s)site_groups in .*PyTorch-9.9.eb names the group 'nonsense'.*alt_read"
    with pytest.raises(EasyBuildError, match=pattern):
        parser.parse(easyblock='Grouped', more="site_groups = ['nonsense']")
    with pytest.raises(EasyBuildError, match="is not a list"):
        parser.parse(easyblock='Grouped', more="site_groups = 'alt_read'")


def test_unknown_site_and_group(parser):
    with pytest.raises(EasyBuildError, match="There is no site 'nonsense'. The sites are: cirrus"):
        parser.configure(site='nonsense').parse()
    with pytest.raises(EasyBuildError, match="names the group 'nonsense'"):
        parser.configure(site='lumi', groups='nonsense').parse()


def test_parameters(parser):
    parser.easyblock('Singularity', {'bind_paths': [], 'gpu_visibility': None})
    parser.configure(site='lumi')
    ec, out = parser.parse(easyblock='Singularity')
    assert ec['gpu_visibility'] == 'ROCR_VISIBLE_DEVICES'
    assert '/pfs' in ec['bind_paths'] and '/var/spool/slurmd' in ec['bind_paths']
    assert 'bind_paths' in out

    ec, out = parser.parse(easyblock='Singularity', more="bind_paths = ['/mine']\ngpu_visibility = None")
    assert (ec['bind_paths'], ec['gpu_visibility']) == (['/mine'], None)
    assert 'bind_paths' not in out


def test_parameters_only_where_known(parser):
    """An easyblock of EasyBuild does not know them; one that is derived from the named one does."""
    parser.easyblock('Other', {'gpu_visibility': None})
    parser.configure(site='lumi')
    assert 'gpu_visibility' not in parser.parse()[0]
    assert parser.parse(easyblock='Other')[0]['gpu_visibility'] is None


def test_mpi_values_only_with_the_gtl(parser):
    """Without the GTL library MPI_Init aborts if MPICH_GPU_SUPPORT_ENABLED is set."""
    parser.easyblock('EB_PyTorch_Cray', {'mpi_gtl': None})
    parser.configure(site='derecho')
    for more, expected in (('', False), ("mpi_gtl = 'cuda'", True), ("mpi_gtl = 'hsa'", False)):
        values = parser.parse(easyblock='EB_PyTorch_Cray', more=more)[0]['modextravars']
        assert ('MPICH_GPU_SUPPORT_ENABLED' in values) == expected
    assert 'MPICH_GPU_SUPPORT_ENABLED' not in parser.parse()[0]['modextravars']


def test_site_is_chosen_once(parser, monkeypatch):
    """A module that is loaded during an installation does not change the site."""
    parser.configure(site='derecho').parse()
    monkeypatch.setenv('SLINGTORCH_SITE', 'frontier')
    ec, _ = parser.parse()
    assert ec['modextravars']['FI_MR_CACHE_MONITOR']['value'] == 'userfaultfd'


def test_generic_site_on_a_known_machine_warns(parser, monkeypatch):
    parser.configure(site='local')
    monkeypatch.setenv('NCAR_HOST', 'derecho')
    _, out = parser.parse()
    assert "WARNING" in out and "looks like 'derecho'" in out


def test_easybuilds_own_pytorch(parser):
    """PyTorch of EasyBuild, with a toolchain, a versionsuffix with templates and other modextravars."""
    parser.configure('--ignore-osdeps', site='frontier')
    found = det_easyconfig_paths(['PyTorch-2.6.0-foss-2024a.eb'])
    ec, out = parser.parse_file(found[0])
    assert ec['modextravars']['NCCL_CROSS_NIC'] == {'value': '1', 'pushenv': True}
    assert 'PyTorch-2.6.0-foss-2024a.eb: 10 site values' in out


def test_guard(parser):
    parser.configure(site='derecho')
    ec, _ = parser.parse(name='zlib')
    hooks = eb_hooks.load_hooks(str(HOOKS))
    function = hooks['parse_hook'].__globals__['parse_hook_pytorch_site_values']
    with pytest.raises(EasyBuildError, match='for PyTorch was called for zlib'):
        function(ec)


def test_only_known_hooks(parser):
    """EasyBuild refuses a file with a callable whose name ends in _hook and that it does not know."""
    parser.configure()
    assert sorted(eb_hooks.load_hooks(str(HOOKS))) == ['parse_hook', 'pre_easyblock_hook', 'pre_fetch_hook',
                                                       'pre_ready_hook']


def test_sites_speak_of_easyblocks_that_exist():
    """A site's parameter that no easyblock knows would be left out in silence."""
    spec = importlib.util.spec_from_file_location('slingshot_sites', str(ROOT / 'hooks' / 'slingshot_sites.py'))
    sites = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sites)
    text = '\n'.join(path.read_text() for path in sorted((ROOT / 'easyblocks').rglob('*.py')))
    missing = []
    for site in sites.load_all():
        for value in site.env + site.parameters:
            parameters = [value.name] if value in site.parameters else [value.when[0]] if value.when else []
            missing += ['%s: parameter %s' % (site.name, name) for name in parameters if "'%s': [" % name not in text]
            missing += ['%s: easyblock %s' % (site.name, name) for name in value.easyblocks
                        if 'class %s(' % name not in text]
    assert sorted(set(missing)) == []


@pytest.mark.parametrize('path', sorted((ROOT / 'hooks' / 'metadata').glob('*.cfg')), ids=lambda path: path.name)
def test_metadata(path):
    """EasyBuild's own parser takes the files, and each module has a literal version and a prefix."""
    metadata = parse_external_modules_metadata([str(path)])
    assert metadata
    for module, entry in metadata.items():
        # conda/latest is another one every few months, and ncarenv only opens directories of modules: no prefix
        bare = module == 'conda/latest' or module.startswith('ncarenv/')
        assert sorted(entry) == (['name', 'version'] if bare else ['name', 'prefix', 'version']), module
        version = module.split('/')[1]
        if bare:
            continue
        assert module.startswith('rccl-net-plugin/') or entry['version'] in ([version], [version.split('-')[0]])
        assert entry['prefix'].startswith('/') or re.match('^[A-Z_]+$', entry['prefix'])


# --- other sites

@pytest.mark.parametrize('parameters, meant', [
    ({'versionsuffix': ''}, None),
    # any machine
    ({'versionsuffix': '-local-cpu'}, None),
    ({'versionsuffix': '-rocm-5.6.1-python-3.10-singularity-20231123'}, None),
    ({'versionsuffix': '-derecho'}, 'derecho'),
    ({'versionsuffix': '-frontier-rocm-7.1.1'}, 'frontier'),
    ({'versionsuffix': '-mine', 'only_site': 'derecho'}, 'derecho'),
    ({'versionsuffix': '-mine', 'only_site': None}, None),
])
def test_site_that_is_meant(parser, parameters, meant):
    assert eb_hooks.load_hooks(str(HOOKS))['pre_easyblock_hook'].__globals__['site_meant'](parameters) == meant


def test_another_site_is_refused(locked):
    """Whatever the software is; and on the right site, or in a dry run, nothing is said."""
    hooks, app = locked('--hooks=%s' % HOOKS, name='SomeLibrary')
    here = hooks['pre_easyblock_hook'].__globals__['chosen_site']().name
    other = 'lumi' if here != 'lumi' else 'derecho'
    app.cfg = {'versionsuffix': '-%s' % other}
    app.cfg = type('Config', (dict,), {'path': '/x/SomeLibrary-9.9.eb'})(app.cfg)
    with pytest.raises(EasyBuildError, match="SomeLibrary-9.9.eb is for the site '%s', and this is" % other):
        hooks['pre_easyblock_hook'](app)
    app.dry_run = True
    hooks['pre_easyblock_hook'](app)


# --- locks

class App:
    """What the hooks use of an easyblock."""

    dry_run = False

    def __init__(self, tmp_path, name='PyTorch'):
        self.name = name
        self.cfg = {'versionsuffix': ''}
        self.full_mod_name = '%s/9.9' % name
        self.installdir = str(tmp_path / 'software' / name / '9.9')
        self.lock = pathlib.Path(det_lock_path(self.installdir.replace('/', '_')))

        class Log:
            def info(self, *args, **kwargs):
                pass
            warning = info
        self.log = Log()


@pytest.fixture
def locked(parser):
    """Function that configures EasyBuild and makes a lock; (hooks, app)."""
    def make(*args, name='PyTorch', old=True):
        parser.configure(*args)
        app = App(parser.tmp_path, name)
        app.lock.mkdir(parents=True)
        if old:
            os.utime(str(app.lock), (1, 1))
        return eb_hooks.load_hooks(str(HOOKS)), app
    return make


def write_owner(app, hooks, **changes):
    """Say in a lock that this process holds it, with some changes."""
    hooks['pre_fetch_hook'](app)
    path = app.lock / 'owner.json'
    owner = dict(json.loads(path.read_text()), **changes)
    path.write_text(json.dumps(owner))
    return owner


def dead_pid():
    """Number of a process that has ended."""
    process = subprocess.Popen(['true'])
    process.wait()
    return process.pid


def test_owner_is_written_once(locked):
    hooks, app = locked()
    hooks['pre_fetch_hook'](app)
    text = (app.lock / 'owner.json').read_text()
    owner = json.loads(text)
    assert owner['pid'] == os.getpid()
    with open('/proc/self/stat') as fp:
        assert owner['start'] == fp.read().rpartition(')')[2].split()[19]
    (app.lock / 'owner.json').write_text('{}')
    hooks['pre_ready_hook'](app)
    assert (app.lock / 'owner.json').read_text() == '{}'
    assert os.listdir(str(app.lock)) == ['owner.json']


def test_no_lock_no_owner(locked):
    hooks, app = locked()
    app.lock.rmdir()
    hooks['pre_fetch_hook'](app)
    hooks['pre_easyblock_hook'](app)
    assert not app.lock.exists()


def test_living_owner(locked):
    hooks, app = locked()
    write_owner(app, hooks)
    with pytest.raises(EasyBuildError) as info:
        hooks['pre_easyblock_hook'](app)
    for text in ('PyTorch/9.9 is being installed already', 'process %d' % os.getpid(), '--wait-on-lock-limit=3600'):
        assert text in str(info.value)
    assert app.lock.is_dir()


@pytest.mark.parametrize('change', ['pid', 'start', 'boot'])
def test_dead_owner(change, locked, capsys):
    """The process is gone, its number belongs to another one, or the machine was started anew."""
    hooks, app = locked()
    write_owner(app, hooks, **{change: dead_pid() if change == 'pid' else '1'})
    hooks['pre_easyblock_hook'](app)
    assert not app.lock.exists()
    assert os.listdir(str(app.lock.parent)) == []
    assert 'an earlier installation of PyTorch/9.9 was killed' in capsys.readouterr().out


def test_zombie_is_dead(locked):
    hooks, app = locked()
    process = subprocess.Popen(['true'])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with open('/proc/%d/stat' % process.pid) as fp:
        start = fp.read().rpartition(')')[2].split()[19]
    write_owner(app, hooks, pid=process.pid, start=start)
    hooks['pre_easyblock_hook'](app)
    process.wait()
    assert not app.lock.exists()


@pytest.mark.parametrize('changes', [{'host': 'elsewhere'}, {'pid_namespace': 'pid:[1]'}, None])
def test_unknown_owner(changes, locked):
    """Another host, another container, or a lock without a name in it: not decided here, but told with remedies."""
    hooks, app = locked()
    if changes:
        write_owner(app, hooks, **changes)
        os.utime(str(app.lock), (1, 1))
    with pytest.raises(EasyBuildError) as info:
        hooks['pre_easyblock_hook'](app)
    for text in (str(app.lock), 'minutes ago', 'remove that directory', 'eb --ignore-locks',
                 '--wait-on-lock-limit=3600'):
        assert text in str(info.value)
    assert app.lock.is_dir()


def test_broken_owner_file(locked):
    hooks, app = locked()
    (app.lock / 'owner.json').write_text('{"host": ')
    with pytest.raises(EasyBuildError, match='left no name'):
        hooks['pre_easyblock_hook'](app)


def test_waiting_is_left_to_easybuild(locked):
    hooks, app = locked('--wait-on-lock-limit=60')
    write_owner(app, hooks)
    hooks['pre_easyblock_hook'](app)
    assert app.lock.is_dir()
    # but nobody waits for the dead
    write_owner(app, hooks, boot='1')
    hooks['pre_easyblock_hook'](app)
    assert not app.lock.exists()


def test_ignore_locks_and_dry_run(locked):
    hooks, app = locked('--ignore-locks')
    hooks['pre_easyblock_hook'](app)
    hooks['pre_fetch_hook'](app)
    assert os.listdir(str(app.lock)) == []


def test_dry_run(locked):
    hooks, app = locked()
    app.dry_run = True
    hooks['pre_easyblock_hook'](app)
    hooks['pre_fetch_hook'](app)
    assert os.listdir(str(app.lock)) == []


def test_locks_of_other_software_are_left_alone(locked):
    hooks, app = locked(name='zlib')
    hooks['pre_easyblock_hook'](app)
    hooks['pre_fetch_hook'](app)
    assert os.listdir(str(app.lock)) == []


def test_fresh_lock_is_given_back(locked, monkeypatch):
    """Of two runs that see the same old lock, the slower one must not remove the lock the faster one has made."""
    hooks, app = locked()
    old = write_owner(app, hooks, boot='1')
    new = write_owner(app, hooks, pid=1)
    remove = hooks['parse_hook'].__globals__['remove_stale_lock']
    remove(app, str(app.lock), old)
    assert json.loads((app.lock / 'owner.json').read_text()) == new
