# SPDX-License-Identifier: GPL-2.0-only
"""Sites with GPUs or modules: on an emulation made from a file, easyconfigs resolve and a module loads.

The emulation has a module of each role, which says no more than its name, and the prefix where the file says where that
stands. So it proves that a site's file is whole and fits the easyconfigs, and nothing about the machine.
"""
import re

import pytest

from slingtorch import gpus, sites as SITES
from testbed import easybuild

ALL = [site for site in SITES.load_all({}) if site.generations or site.gpu in ('cuda', 'rocm')]
WITH_GPUS = [site for site in ALL if site.gpu in ('cuda', 'rocm')]
TOY = """
easyblock = 'Binary'
name = 'PyTorch'
version = '9.9'
homepage = 'https://example.org'
description = "a tiny one"
toolchain = SYSTEM
sources = []
install_cmd = "mkdir -p %%(installdir)s/bin && touch %%(installdir)s/bin/tool"
sanity_check_paths = {'files': ['bin/tool'], 'dirs': []}
site_dependencies = %r
moduleclass = 'ai'
"""


def chosen(site):
    """The generation that is taken, and its roles; the first one where a site leaves it to the user, None and none."""
    names = [name for name, roles in site.generations.items() if 'default' in roles] or list(site.generations)
    return (names[0], site.generations[names[0]]) if names else (None, {})


def unlike(sites, key):
    """The first site of each kind: what is asked of two of a kind is the same."""
    found = {}
    for site in sites:
        found.setdefault(repr(key(site)), site)
    return list(found.values())


def modules(site, generation):
    """Modules of a generation: {role: parts}, without what --robot installs."""
    parts = {role: SITES.split_provided(text) for role, text in site.generations.get(generation, {}).items()
             if role in SITES.ROLES and text not in SITES.ROLES}
    return {role: part for role, part in parts.items() if not part['eb']}


def emulate(site, directory):
    """A tree of stub modules for every generation of a site; in Tcl, which both modules tools read."""
    for generation in site.generations:
        for part in modules(site, generation).values():
            path = directory / part['module']
            path = path if '/' in part['module'] else path / '1.0'
            path.parent.mkdir(parents=True, exist_ok=True)
            prefix = part['prefix'] or '/'
            line = '' if prefix.startswith('/') else f'setenv {prefix.split("/")[0]} {directory}/{part["module"]}\n'
            path.write_text(f'#%Module1.0\n{line}')
    return directory


@pytest.fixture(scope='module')
def eb(tmp_path_factory, lmod, envmodules):
    """A function: `eb` of this modules tool on an emulated site; (CompletedProcess of it, its EasyBuild)."""
    made = {}

    def run(tool_name, site, *args, **more):
        if tool_name not in made:
            tool = {'lmod': lmod, 'envmodules': envmodules}[tool_name]
            prefix = tmp_path_factory.mktemp(tool_name) / 'eb'
            made[tool_name] = easybuild.EasyBuild(prefix, tool, ['--site', 'slurm'])
        one = made[tool_name]
        tree = one.prefix / 'sites' / site.name
        if not tree.exists():
            emulate(site, tree)
        env = {'SLINGTORCH_SITE': site.name, 'SLINGTORCH_SITE_GENERATION': chosen(site)[0], 'MODULEPATH': str(tree),
               'EASYBUILD_INSTALLPATH': str(one.prefix / 'installed' / site.name)}
        return one(*args, env=env, **more), one
    return run


def wheel(site, tmp_path):
    """The easyconfig of a wheel that the bundle names for the site's GPUs and processor, and its plugin if it has one."""
    roles, toolkit = chosen(site)[1], None
    if 'nccl_plugin' in roles:
        toolkit = site.modules()[SITES.split_provided(roles['gpu'])['module']]['version'][0]
    name, why = gpus.fitting_easyconfig(str(tmp_path), machine=site.processor, site_gpu=site.gpu, toolkit=toolkit)
    assert name, why
    return name


def resolved(done):
    """Easyconfigs that `eb -D` lists."""
    return re.findall(r'^ \* \[[ x]\] \S*/(\S+\.eb) ', done.stdout, re.M)


@pytest.mark.parametrize('site', unlike(WITH_GPUS, lambda site: (
    site.gpu, site.processor, chosen(site)[1].get('nccl_plugin'))), ids=lambda site: site.name)
def test_the_fitting_wheel_resolves(site, eb, tmp_path):
    name = wheel(site, tmp_path)
    done, _ = eb('lmod', site, name, '-D', '--robot')
    found = resolved(done)
    assert found[-1] == name and ('cuda' in name) == (site.gpu == 'cuda')
    plugin = chosen(site)[1].get('nccl_plugin', '').partition('eb ')[2]
    assert [entry for entry in found if entry.startswith(plugin.replace('/', '-'))] if plugin else len(found) == 1


@pytest.mark.parametrize('site', unlike([site for site in WITH_GPUS if site.network == 'slingshot11'], lambda site: (
    bool(chosen(site)[0]), [role for role in ('compiler', 'gpu', 'libfabric') if role not in chosen(site)[1]])),
    ids=lambda site: site.name)
def test_the_plugin_resolves_or_says_what_is_missing(site, eb):
    """What the file has no module for is said with the line to add: no public source names it."""
    generation, roles = chosen(site)
    lacking = [role for role in ('compiler', 'gpu', 'libfabric') if role not in roles]
    # a file without any module is a fault when something is installed, not when it is looked at
    done, _ = eb('lmod', site, 'aws-ofi-nccl-1.21.1.eb', *['-D'] * bool(generation), '--robot', check=not lacking)
    if not lacking:
        assert re.match(r'aws-ofi-nccl-1\.21\.1(-%s-%s)?\.eb' % (site.name, re.escape(generation)), resolved(done)[-1])
        return
    said = ' '.join((done.stdout + done.stderr).split())
    if not generation:
        assert done.returncode != 0 and f"{site.name}.cfg names none. Add a section [provides NAME]" in said
        return
    assert done.returncode != 0 and f"{site.name}.cfg, section [provides {generation}] has no module for the role " \
        f"'{lacking[0]}'" in said and f"add the line '{lacking[0]} = MODULE/VERSION'" in said
    assert site.missing, 'the file says it too'


@pytest.mark.parametrize('site, tool_name', [(site, 'lmod') for site in unlike(ALL, lambda site: (site.gpu, bool(chosen(site)[0])))] + [
    (site, 'envmodules') for site in ALL if site.name == 'derecho'], ids=lambda value: getattr(value, 'name', value))
def test_the_module_loads(site, tool_name, eb, request, tmp_path):
    """In Lua by Lmod, in Tcl by Environment Modules: the site's modules are loaded, all its values are set."""
    generation, _ = chosen(site)
    needed = {role: part for role, part in modules(site, generation).items() if not part['build']}
    path = tmp_path / 'PyTorch-9.9.eb'
    path.write_text(TOY % ([role for role in needed if role != 'modules_first'],))
    _, one = eb(tool_name, site, str(path), '--module-only', '--force', '--rebuild')
    installed = one.prefix / 'installed' / site.name / 'modules/all'
    name, = [str(found.relative_to(installed)).replace('.lua', '') for found in (installed / 'PyTorch').iterdir()]
    env = request.getfixturevalue(tool_name).load(name, modulepath=[installed, one.prefix / 'sites' / site.name])
    loaded = [module.replace('/1.0', '') for module in env['LOADEDMODULES'].split(':')]
    assert set(loaded) == {part['module'] for part in needed.values()} | {name}
    values = {value.name: value.value for value in site.env_values().values() if not value.easyblocks}
    assert {key: env.get(key) for key in values} == values
    in_groups = {value.name for value in site.env} - set(site.env_values())
    assert not [key for key in in_groups if key in env], 'of a group that nobody chose'
