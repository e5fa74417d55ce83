# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch site new: what it reads in recorded outputs of three centres (centres/), and what it does not overwrite.

A file of a centre is what one probe printed there; its first line says from which public documentation its facts are.
What lies in node/ is of a compute node, the rest is also seen on a login node.
"""
import argparse
import os
import pathlib
import re
import select
import subprocess
import sys

import pytest

import test_sites
from slingtorch import sites
from slingtorch.sites import draft, probe as site_probe, write as sitefile
from testbed import raising
from testbed.expected import expected

CENTRES = pathlib.Path(__file__).parent / 'centres'
ROOT = pathlib.Path(__file__).resolve().parents[2]
PROBES = [*site_probe.COMMANDS, *site_probe.TREES, 'modules', 'mounts']
CLUSTER = re.search(r'ClusterName *= *(\S+)', (CENTRES / 'ethernet-cpu/slurm').read_text()).group(1)
ON_NODE = {'SLURM_JOB_ID': '1', 'SLURMD_NODENAME': 'n1', 'SLURM_PROCID': '0'}


def recorded(centre, node=False):
    """What the probes say at a centre: {name: Text}."""
    evidence = {name: site_probe.Text('', 'there is no command %s' % name) for name in PROBES}
    for directory in [CENTRES / centre] + [CENTRES / centre / 'node'] * node:
        for path in directory.iterdir():
            if path.is_file():
                source, _, text = path.read_text().partition('\n')
                assert re.match('# (facts|form|assumed)', source), path
                assert path.name in PROBES, path
                evidence[path.name] = site_probe.Text(text, None)
    return evidence


class Person:
    """Someone with a home directory, who runs slingtorch site new where the recorded outputs are from."""

    def __init__(self, home, capsys):
        self.environ = {'HOME': str(home), 'PATH': os.environ['PATH']}
        self.directory = home / '.config/slingtorch/sites'
        self.path = self.directory / 'mine.cfg'
        self.capsys = capsys

    def new(self, evidence, name='mine', complete=False, host='login1', loads=None, **environ):
        """What is printed."""
        environ = dict(self.environ, **environ)
        args = argparse.Namespace(name=name, complete=complete)
        sitefile.run_new(args, environ, evidence, host, loads)
        return self.capsys.readouterr().out

    def complete(self, evidence, **keys):
        return self.new(evidence, complete=True, host='n1', **dict(ON_NODE, **keys))

    def site(self):
        return sites.load('mine', self.environ)


@pytest.fixture
def person(tmp_path, capsys):
    return Person(tmp_path, capsys)


def values(site, group=None):
    """Values without a group, or those of one: {variable or parameter: value}."""
    return {value.name: value.value for value in site.env + site.parameters if value.group == group}


# --- three centres: what a person would write who had seen the same

@pytest.mark.parametrize('centre, job', [
    ('slingshot-mi250x', {}), ('infiniband-h100', {'SLURM_JOB_PARTITION': 'h100'}), ('ethernet-cpu', {})])
def test_login_node_then_compute_node(centre, job, person, monkeypatch):
    """What is printed, and the file with its reasons. The login node says what it does not see."""
    monkeypatch.setattr(sitefile.shutil, 'which', lambda name: name)
    said = person.new(recorded(centre))
    assert re.findall(r'not seen: ([\w ]+):', said) == ['network', 'modules by role'] == re.findall(
        r'not seen: ([\w ]+):', person.path.read_text())
    said += ''.join(re.findall('Added .*\n\n?', person.complete(recorded(centre, node=True), **job)))
    text = person.path.read_text()
    said = said + text if centre == 'slingshot-mi250x' else text[text.index('# Added on'):]
    expected(said, f'site-new-{centre}', [(person.directory, 'DIRECTORY')])
    person.site()


def test_site_shows_it_and_is_recognised(person):
    """By 'slingtorch sites', on the login nodes and in jobs."""
    person.new(recorded('ethernet-cpu'), host='login1.lab')
    for environ, host in ((person.environ, 'login2.lab'), (dict(person.environ, SLURM_CLUSTER_NAME=CLUSTER), 'n7')):
        assert sites.choose(environ, host, root='/nonexistent').site.name == 'mine'
    assert sites.choose(person.environ, 'n7', root='/nonexistent').site.name == 'local'
    done = subprocess.run([sys.executable, '-m', 'slingtorch', 'sites', 'mine'], cwd='/', text=True,
                          stdout=subprocess.PIPE, env=dict(person.environ, PYTHONPATH=str(ROOT)))
    assert 'mine: ' + CLUSTER in done.stdout and str(person.path) in done.stdout


def test_machine_that_is_a_site_already(person):
    """A second rule that matches would be an error of everything: the file has none."""
    evidence = recorded('slingshot-mi250x')
    evidence['slurm'] = site_probe.Text('ClusterName = lumi\n', None)
    out = person.new(evidence)
    assert "not seen: rules: this machine already matches the site 'lumi'. Use that one, or select this one with " \
        "'slingtorch env --site'\n" in out and not person.site().rules
    assert sites.choose(dict(person.environ, SLURM_CLUSTER_NAME='lumi'), 'x').site.name == 'lumi'


OTHERS = ('lo docker0 virbr0 veth1 vnet0 br-1 cni0 cali1 flannel.1 tun0 tap0 ifb0 dummy0 kube-ipvs0 podman1 lxcbr0 idrac '
          'usb0').split()
NET = ''.join('%s/operstate: up\n' % name for name in (*OTHERS, 'ib0', 'eth0', 'eth1', 'bmc')) + 'down/operstate: down\n'
ADDRESSES = '[%s]' % ','.join('{"ifname": "%s", "addr_info": [{"family": "inet", "scope": "%s"}]}' % (
    name, 'link' if name == 'bmc' else 'global') for name in (*OTHERS, 'ib0', 'eth0', 'eth1', 'bmc', 'down'))


@pytest.mark.parametrize('gres, rdma, net, wanted', [
    ('gpu:a100:4', 'mlx5_0 InfiniBand', NET, {'NCCL_SOCKET_IFNAME': 'ib', 'GLOO_SOCKET_IFNAME': 'ib0'}),
    ('(null)', 'mlx5_0 InfiniBand', NET, {'GLOO_SOCKET_IFNAME': 'ib0'}),
    ('gpu:a100:4', 'hfi1_0 InfiniBand', NET.replace('ib0', 'x'),
     {'NCCL_SOCKET_IFNAME': '=eth0', 'GLOO_SOCKET_IFNAME': 'eth0'}),
    ('gpu:a100:4', 'mlx5_0 Ethernet', 'eth0/operstate: up\n', {}),
])
def test_interface(gres, rdma, net, wanted, person):
    """IP over InfiniBand first, else the fastest, else the first; nothing where there is one."""
    device, layer = rdma.split()
    port = device + '/ports/1/'
    person.new(without('ethernet-cpu', True, sinfo=('p|1|%s\n' % gres, None), addresses=(ADDRESSES, None),
                       net=(net, None), mounts=('', None),
                       rdma=(port + 'state: 4: ACTIVE\n%slink_layer: %s\n' % (port, layer), None)), **ON_NODE)
    site = person.site()
    assert values(site) == wanted
    assert site.network == ('infiniband' if rdma == 'mlx5_0 InfiniBand' else 'ethernet')


# --- a file that exists

def test_existing_file_stays(person):
    person.new(recorded('ethernet-cpu'))
    before = person.path.read_text()
    with pytest.raises(sites.SiteError, match='The file .*mine.cfg already exists.*site new --complete mine'):
        person.new(recorded('infiniband-h100'))
    assert person.path.read_text() == before


def test_complete_keeps_what_was_edited(person):
    """Edited values, comments, own sections."""
    person.new(recorded('infiniband-h100'))
    text = re.sub('gpus_per_node = .*', 'gpus_per_node = 2', person.path.read_text())
    text = text.replace('[site]', '# mine, all mine\n[site]') + test_sites.ENV.replace('CROSS_NIC', 'SOCKET_IFNAME').replace('1', 'eth7')
    person.path.write_text(text)
    person.complete(recorded('infiniband-h100', node=True))
    now = person.path.read_text()
    assert [line for line in text.splitlines() if line not in now.splitlines()
            and not line.startswith(('#   not seen', 'network'))] == []
    site = person.site()
    assert (site.gpus_per_node, site.network, values(site)['NCCL_SOCKET_IFNAME']) == ('2', 'infiniband', 'eth7')
    again = person.complete(recorded('infiniband-h100', node=True))
    assert 'already has everything' in again and person.path.read_text() == now


def test_complete_of_several_tasks(person):
    """srun without --ntasks=1: the first one does it."""
    person.new(recorded('infiniband-h100'))
    before = person.path.read_text()
    assert person.complete(recorded('infiniband-h100', node=True), SLURM_PROCID='1') == ''
    assert person.new(recorded('infiniband-h100', node=True), name='x', SLURM_PROCID='3') == ''
    assert person.path.read_text() == before


def test_complete_in_the_wrong_place(person):
    with pytest.raises(sites.SiteError, match='no file .*mine.cfg to complete. Write it on the login'):
        person.complete(recorded('infiniband-h100', node=True))
    person.new(recorded('infiniband-h100'))
    with pytest.raises(sites.SiteError, match='This is a login node, .*srun .*slingtorch site new --complete'):
        person.new(recorded('infiniband-h100'), complete=True)


def test_complete_of_a_broken_file(person):
    person.new(recorded('infiniband-h100'))
    person.path.write_text(person.path.read_text() + '[env x]\n')
    with pytest.raises(sites.SiteError, match=r'mine.cfg, section \[env x\]'):
        person.complete(recorded('infiniband-h100', node=True))


@pytest.mark.parametrize('default, gpus, chosen', [
    ('a', {'a': 1, 'b': 4}, 'a'), ('a', {'a': 0, 'b': 2, 'c': 4}, 'c'), ('b', {'a': 0, 'b': 0}, 'b'), (None, {'a': 2, 'b': 4}, 'b')])
def test_partition_to_describe(default, gpus, chosen):
    """The default one, unless only others have GPUs: then the one with the most."""
    assert draft.choose_partition({name: {(('x', count),): 3} for name, count in gpus.items()}, default) == chosen


# --- bad input

def without(centre='infiniband-h100', node=False, **problems):
    """Evidence in which some probes fail, or print something else."""
    evidence = recorded(centre, node)
    for name, (text, problem) in problems.items():
        evidence[name] = site_probe.Text(text, problem)
    return evidence


def test_no_slurm(person):
    """A machine without a scheduler is its own compute node."""
    out = person.new(without('infiniband-h100', True, sinfo=('', 'there is no command sinfo'), slurm=('', 'no')),
                     host='box3')
    site = person.site()
    assert (site.scheduler, site.gpu, site.gpus_per_node, site.network) == ('none', 'cuda', '4', 'infiniband')
    assert out.startswith('This machine is box3 (no scheduler answered).\n   GPUs: 4 GPUs (cuda); nvidia-smi\n')
    assert '--complete' not in out
    assert site.rules == [('hostname', 'box3')]


def test_login_node_of_pbs(person):
    """It names mpiexec, in the file as well."""
    evidence = without(sinfo=('', 'there is no command sinfo'), slurm=('', 'no'), pbs=('pbs_version = 2022', None))
    out = person.new(evidence)
    assert person.site().scheduler == 'pbs' and 'srun' not in out + person.path.read_text()
    assert re.search(r'compute node shows, in a job:\n  mpiexec -n 1 \S*slingtorch site new --complete mine', out)
    with pytest.raises(sites.SiteError, match='Run this there: mpiexec -n 1 slingtorch site new --complete'):
        person.new(evidence, complete=True)


def test_slurm_without_a_cluster(person):
    """Debian's slurm-client on a workstation."""
    out = person.new(without('ethernet-cpu', True, slurm=('', 'no'), sinfo=(
        '', 'sinfo ended with status 1: sinfo: fatal: Could not establish a configuration source')))
    assert 'not seen: partitions: sinfo ended with status 1' in out and person.site().scheduler == 'none'
    assert '   GPUs: no GPUs: neither nvidia-smi nor rocm-smi shows one\n' in out


def test_sinfo_fails(person):
    out = person.new(without(sinfo=('', 'sinfo ended with status 1: Unable to contact slurm controller'),
                             **{'nvidia-smi': ('GPU 0: of the login node\n', None)}))
    site = person.site()
    assert (site.scheduler, site.gpu, site.gpus_per_node) == ('slurm', 'any', 'any')
    for text in (out, person.path.read_text()):
        assert 'not seen: partitions: sinfo ended with status 1: Unable to contact slurm controller' in text
        assert 'not seen: GPUs: a login node does not show the GPUs of compute nodes\n' in text
    person.complete(without(node=True, sinfo=('', 'sinfo did not answer within 20 s')))
    assert (person.site().gpu, person.site().gpus_per_node) == ('cuda', '4')
    assert "GPUs: 4 GPUs (cuda); nvidia-smi (only this job's GPUs: correct gpus_per_node if the nodes have more)\n" in (
        person.path.read_text())


@pytest.mark.parametrize('gres, gpus', [
    ('gpu:0', ('none', '0')), ('(null)', ('none', '0')), ('gpu:a100:4(S:0-1),gpu:a100:4(S:2-3)', ('cuda', '8')),
    ('gpu:4', ('any', 'any')), ('gpu', ('any', 'any')), ('gpu:mi300x:8,nvme:4', ('rocm', '8')),
    ('craynetwork:4', ('none', '0')),
    ('gpu:a100:2,shard:8', ('cuda', '2')), ('gpu:nvidia_gh200:4', ('cuda', '4')),
    ('gpu:3g.20gb:4', ('cuda', '4')), ('gpu:unheard:4', ('any', 'any')), ('gpu:tesla_v100-sxm2-32gb:4', ('cuda', '4')),
])
def test_gres(gres, gpus, person):
    out = person.new(without(sinfo=('gpu|2|%s\n' % gres, None)))
    assert (person.site().gpu, person.site().gpus_per_node) == gpus
    assert gpus[0] != 'none' or 'GPUs: no GPUs per node; sinfo, partition gpu\n' in out
    if 'unheard' in gres:
        assert 'not seen: GPUs: sinfo shows 4 GPUs (unheard) per node, but not the vendor: write gpu = cuda or rocm, and ' \
            'gpus_per_node = 4\n' in out


def test_a_node_shows_the_vendor_that_sinfo_does_not(person):
    person.new(without(node=True, sinfo=('gpu|2|gpu:4\n', None)), host='n1', **ON_NODE)
    assert (person.site().gpu, person.site().gpus_per_node) == ('cuda', '4')


@pytest.mark.parametrize('name', ['', '.', '..', '-x', 'a/b', 'a b', 'ü', 'x' * 65, 'a\nb', '$(id)', '.x'])
def test_odd_names(name, person):
    with pytest.raises(sites.SiteError, match='is not a valid site name'):
        person.new(recorded('ethernet-cpu'), name=name)
    assert not person.directory.exists()


def test_name_of_another_site(person, tmp_path):
    with pytest.raises(sites.SiteError, match="The site 'lumi' already exists in .*hooks/sites/lumi.cfg"):
        person.new(recorded('ethernet-cpu'), name='lumi')
    (tmp_path / 'mine.cfg').write_text(test_sites.SITE)
    with pytest.raises(sites.SiteError, match="The site 'mine' already exists"):
        person.new(recorded('ethernet-cpu'), SLINGTORCH_SITES_PATH=str(tmp_path))


def test_configuration_directory_that_cannot_be_written_to(person, tmp_path):
    (tmp_path / '.config').write_text('')
    with pytest.raises(sites.SiteError, match=r'slingtorch/sites, which cannot be created \(\w+ [\w ]+\)\. Set XDG_CONFIG_HOME to a directory of yours, now and'):
        person.new(recorded('ethernet-cpu'))
    with pytest.raises(sites.SiteError, match='no home directory to write to: set XDG_CONFIG_HOME'):
        person.new(recorded('ethernet-cpu'), HOME='')


def test_disk_full(person, monkeypatch):
    """The file that was there stays, and nothing beside it."""
    person.new(recorded('infiniband-h100'))
    before = person.path.read_text()
    monkeypatch.setattr(sitefile.os, 'chmod', raising(OSError(28, 'No space left on device')))
    with pytest.raises(sites.SiteError, match='sites/mine.cfg could not be written: No space left on device$'):
        person.complete(recorded('infiniband-h100', node=True))
    assert [path.name for path in person.directory.iterdir()] == ['mine.cfg'] and person.path.read_text() == before


def test_private_by_itself(person):
    umask = os.umask(0o002)
    try:
        person.new(recorded('ethernet-cpu'))
    finally:
        os.umask(umask)
    assert [oct(path.stat().st_mode & 0o777) for path in (person.directory, person.directory.parent)] == ['0o700'] * 2
    person.directory.chmod(0o775)
    with pytest.raises(sites.SiteError, match='Others may write to'):
        person.new(recorded('ethernet-cpu'))
    person.path.unlink()
    person.directory.rmdir()
    person.directory.parent.chmod(0o775)
    with pytest.raises(sites.SiteError, match='Others may write to'):
        person.new(recorded('ethernet-cpu'))
    assert not person.path.exists()


@pytest.mark.parametrize('text', ['truncated', '7\n', 'Kein Gerät: 3,5 \x1b[0m\n', '[{"ifname": 3}, 7]', '|||\n: :\nx|1\n'])
def test_other_language_and_cut_off(text, person):
    """Whatever a probe prints, a file is written that the bundle's reader accepts."""
    whole = recorded('infiniband-h100', node=True)
    for probe in PROBES:
        said = whole[probe].text[:len(whole[probe].text) * 2 // 3] if text == 'truncated' else text
        person.new(dict(whole, **{probe: site_probe.Text(said, None)}), host='n1', **ON_NODE)
        assert person.site().scheduler in ('slurm', 'pbs'), probe
        person.path.unlink()


def test_odd_texts_stay_in_their_line(person):
    """A host or a partition cannot add a section, a template or an escape sequence."""
    evidence = without(sinfo=('g\x1b[1m%(x)s|2|gpu:a100:2\n', None),
                       mounts=('a /s\\040,h lustre rw\nb /o%(x)s lustre rw\nc /ok\\012[env lustre rw\n', None))
    person.new(evidence, host='h\n[env X]\nvalue=1', SLURM_CLUSTER_NAME='c')
    assert (person.site().gpu, person.site().title) == ('cuda', 'c') and not person.site().env
    assert not re.search(r'\x1b|^\[env', person.path.read_text(), re.M)


# --- gathering, for real

def test_command_that_hangs(tmp_path):
    """What it has started ends with it."""
    os.mkfifo(tmp_path / 'fifo')
    with open(os.open(tmp_path / 'fifo', os.O_RDWR)) as held, open(tmp_path / 'fifo') as end:
        found = site_probe.run(['sh', '-c', 'sleep 1000 > %s & wait' % (tmp_path / 'fifo')], os.environ, limit=1)
        assert found == ('', 'sh did not answer within 1 s')
        held.close()
        # its end is that of the last process that has it open
        assert select.select([end], [], [], 60)[0]


def test_sinfo_that_hangs(person, monkeypatch, tmp_path):
    """Nothing waits for it: the file is written without."""
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin/sinfo').write_text('#!/bin/sh\nexec sleep 1000\n')
    (tmp_path / 'bin/sinfo').chmod(0o755)
    monkeypatch.setattr(site_probe, 'LIMIT', 0.5)
    out = person.new(None, PATH='%s/bin:%s' % (tmp_path, os.environ['PATH']))
    assert 'not seen: partitions: sinfo did not answer within 0.5 s' in out and person.site().scheduler == 'slurm'


def test_commands_that_fail(tmp_path):
    def run(*command):
        return site_probe.run(command, os.environ, 20)
    assert run('nonexistent-command').problem == 'there is no command nonexistent-command'
    assert run(str(tmp_path)).problem.endswith('Permission denied')
    assert run('sh', '-c', 'echo no; echo "l\33ast" >&2; exit 3') == ('', 'sh ended with status 3: l ast')
    assert run('true').problem == 'true printed nothing'
    assert run('bash', '-c', 'exit 3').problem == 'module ended with status 3'


def test_links_and_files_of_a_tree(tmp_path):
    """Of links, as /sys has them for devices, the name; directories are none of them."""
    (tmp_path / 'cxi0').symlink_to('../../devices/cxi0')
    (tmp_path / 'eth0').mkdir()
    (tmp_path / 'eth0/speed').write_text('25000\n')
    port = tmp_path / 'mlx5_0/ports/1'
    port.mkdir(parents=True)
    for path, text in ((tmp_path / 'eth0/operstate', 'up\n'), (port / 'state', '4: ACTIVE'), (port / 'link_layer', 'InfiniBand')):
        path.write_text(text)
    assert {top: site_probe.tree(str(tmp_path), patterns).text for top, patterns in site_probe.TREES.values()} == {
        '/sys/class/cxi': 'cxi0: cxi0\n', '/sys/class/net': 'eth0/operstate: up\neth0/speed: 25000\n',
        '/sys/class/infiniband': 'mlx5_0/ports/1/link_layer: InfiniBand\nmlx5_0/ports/1/state: 4: ACTIVE\n'}
    assert site_probe.tree(str(tmp_path), ['no*']).problem == f'there is nothing in {tmp_path}'


def test_commands_speak_english(monkeypatch):
    monkeypatch.setenv('LC_ALL', 'de_DE.UTF-8')
    monkeypatch.setenv('LANGUAGE', 'de')
    assert site_probe.run(['sh', '-c', 'echo $LC_ALL,$LANGUAGE'], os.environ, 20).text == 'C,\n'
    assert site_probe.run(['printf', r'\377'], os.environ, 20).text == '\ufffd'
    assert site_probe.run(['/bin/sh', '-c', 'echo $PATH'], {'PATH': '/usr/bin'}, 20).text == '/usr/bin:/usr/sbin:/sbin:/opt/rocm/bin\n'


def roles(person, evidence, **loads):
    """What [provides ...] of the new file has, and the comments about it, where these modules were loaded."""
    person.new(evidence, host='n1', loads={role: site_probe.Loaded(*found) for role, found in loads.items()}, **ON_NODE)
    comments = re.findall(r'^#   (?!partition|GPUs|network|interfaces|shared)(.*)', person.path.read_text(), re.M)
    return person.site().generations, comments


def test_roles_of_slingshot_with_rocm(person):
    """RCCL is in ROCm, and the plugin is built; what does not load is said."""
    evidence = recorded('slingshot-mi250x', node=True)
    assert site_probe.choose_modules(evidence, {}) == [
        ('mpi', 'cray-mpich/8.1.29', 'the only one', 'include/mpi.h'),
        ('rocm', 'rocm/6.3.4', 'the only one', 'bin/hipcc')]
    generations, comments = roles(
        person, evidence, compiler=('PrgEnv-gnu/8.6', 'it is loaded', '/opt', ''), mpi=('cray-mpich/8.1.29', 'w', '/mpi', ''),
        rocm=('rocm/6.3.4+x', 'the only one', '', ''),
        libfabric=('libfabric/1.22.0', 'it is loaded', '', "it cannot be loaded here: 'module spider ...'"))
    assert generations == {'rocm-6.3.4_x': {
        'compiler': 'build PrgEnv-gnu/8.6', 'mpi': 'cray-mpich/8.1.29 in /mpi', 'gpu': 'rocm/6.3.4+x', 'nccl': 'gpu',
        'nccl_plugin': 'eb aws-ofi-nccl/1.21.1'}}
    assert comments == [
        'compiler: PrgEnv-gnu/8.6: it is loaded', 'mpi: cray-mpich/8.1.29: w', 'gpu: rocm/6.3.4+x: the only one',
        "nccl_plugin: there is no module; --robot builds this bundle's plugin for this libfabric",
        "not seen: libfabric: libfabric/1.22.0: it cannot be loaded here: 'module spider ...'"]
    assert (ROOT / 'easyconfigs/a/aws-ofi-nccl/aws-ofi-nccl-1.21.1.eb').exists()
    assert (ROOT / 'easyconfigs/c/CondaPython/CondaPython-3.12.eb').exists()


def test_module_that_a_login_node_lacks(person):
    slingshot = site_probe.Text('ClusterName = x\nSwitchType = switch/hpe_slingshot\n', None)
    out = person.new(dict(recorded('slingshot-mi250x'), slurm=slingshot))
    assert re.findall('not seen: (.*)', out) == [
        f"{role}: no module was found: add the line '{role} = MODULE/VERSION' to the section [provides ...]"
        for role in ('gpu', 'libfabric')]
    assert person.site().network == 'slingshot11' and 'FI_MR_CACHE_MONITOR' in values(person.site())


def test_roles_of_infiniband(person):
    """NCCL needs no plugin there; without a Python that is new enough, conda brings one."""
    generations, comments = roles(person, recorded('infiniband-h100', node=True),
                                  cuda=('cuda/12.6', 'the only one', '', ''), rocm=('rocm/6', 'of other nodes', '', ''),
                                  conda=('miniforge3/24', 'the only one', '/conda', ''))
    assert generations == {'cuda-12.6': {'gpu': 'cuda/12.6', 'conda': 'build miniforge3/24',
                                         'python': 'build eb CondaPython/3.12'}}
    assert comments == ['gpu: cuda/12.6: the only one', 'conda: miniforge3/24: the only one',
                        'python: installed by conda, because there is no module of Python 3.11 or newer']


def test_roles_without_gpus(person):
    generations, comments = roles(person, recorded('ethernet-cpu', node=True), python=('python/3.12', 'w', '/p', ''),
                                  conda=('conda/24', 'w', '', ''), nccl=('nccl/2', 'w', '', ''), cuda=('cuda/12', 'w', '', ''))
    assert generations == {'modules': {'python': 'python/3.12 in /p', 'conda': 'build conda/24'}}
    assert comments == ['python: python/3.12: w', 'conda: conda/24: w']


def test_which_module_is_chosen():
    """One that is loaded, else the default one, else the newest, and no old Python."""
    text = {name: site_probe.Text('', 'x') for name in PROBES}
    text['nvidia-smi'] = site_probe.Text('GPU 0: A', None)
    text['modules'] = site_probe.Text('cuda/12.10.0\ncuda/12.9.0\ncray-python/3.9.1\nnccl/2.9\nnccl/2.30\nlibfabric/1.9\nrocm/6\n', None)
    found = {role: (module, why) for role, module, why, _ in site_probe.choose_modules(text, {})}
    assert found == {'cuda': ('cuda/12.10.0', 'the newest of 2'), 'rocm': ('rocm/6', 'the only one'),
                     'libfabric': ('libfabric/1.9', 'the only one'), 'nccl': ('nccl/2.30', 'the newest of 2')}
    text['modules'] = site_probe.Text('cuda/12.10.0\ncuda/12.9.0(default)\ncuda/12.8.0\n', None)
    for loaded, module, why in (('', 'cuda/12.9.0', 'the default one'), ('x/1:cuda/12.8.0', 'cuda/12.8.0', 'it is loaded')):
        assert site_probe.choose_modules(text, {'LOADEDMODULES': loaded}) == [('cuda', module, why, 'bin/nvcc')]


@pytest.mark.parametrize('listed, chosen', [
    ('gcc/12 openmpi/5 mpich/4 cuda/12 cudnn/9 openblas/0.3 intel-oneapi-mkl/2024 miniconda3/24 mambaforge/23 python3/3.12 '
     'aws-ofi-rccl/1.4 aws-ofi-nccl-plugin/1.9',
     'gcc/12 openmpi/5 cuda/12 cudnn/9 intel-oneapi-mkl/2024 mambaforge/23 python3/3.12 aws-ofi-nccl-plugin/1.9'),
    ('gcc/12 gcc-native/14 cuda/12 cudatoolkit/12 openblas/0.3 mkl-dnn/1', 'gcc-native/14 cudatoolkit/12 openblas/0.3')])
def test_names_of_modules(listed, chosen):
    """The best name of each role first, of those that centres use."""
    text = {**{name: site_probe.Text('', 'x') for name in PROBES}, 'nvidia-smi': site_probe.Text('GPU 0: A', None),
            'modules': site_probe.Text(listed.replace(' ', '\n'), None)}
    assert ' '.join(found[1] for found in site_probe.choose_modules(text, {})) == chosen


def test_prefixes_of_modules(modulestool, tmp_path):
    """In a variable, or above a path in a list; a module that is not there, and the one after it."""
    for path in ('cuda/bin/nvcc', 'fabric/bin/fi_info', 'cuda/include/nccl.h', 'home/bin/nvcc'):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text('')
    modules = tmp_path / 'modules'
    for name, text in {'cuda/1': f'setenv TOOLKIT {tmp_path}/cuda\n', 'nccl/1': 'setenv NCCL_X 1\n',
                       'fabric/1': f'prepend-path PATH {tmp_path}/fabric/bin\n'}.items():
        (modules / name).parent.mkdir(parents=True)
        (modules / name).write_text('#%Module\n' + text)
    environ = {**modulestool.env, 'MODULEPATH': str(modules), 'PATH': os.environ['PATH']}
    chosen = [('compiler', 'gcc/none', 'w', 'bin/gcc'), ('cuda', 'cuda/1', 'w', 'bin/nvcc'),
              ('libfabric', 'fabric/1', 'w', 'bin/fi_info'), ('nccl', 'nccl/1', 'why', 'include/nccl.h')]
    assert site_probe.load_modules(chosen, environ) == {
        'compiler': ('gcc/none', 'w', '', "it cannot be loaded here: 'module spider gcc/none' shows what it needs"),
        'cuda': ('cuda/1', 'w', f'{tmp_path}/cuda', ''), 'libfabric': ('fabric/1', 'w', f'{tmp_path}/fabric', ''),
        'nccl': ('nccl/1', 'why', '', '')}      # its header is known from the module before: not its own
    loaded = {**environ, **modulestool.load('cuda/1', modulepath=[modules]), 'HOME': f'{tmp_path}/home'}
    assert site_probe.load_modules(chosen[1:2], loaded)['cuda'].prefix == f'{tmp_path}/cuda'


def test_this_machine(person, monkeypatch):
    """All probes, as the command runs them."""
    monkeypatch.setitem(site_probe.COMMANDS, 'sinfo', ['nonexistent-sinfo'])
    evidence = site_probe.gather(person.environ)
    assert sorted(evidence) == sorted(PROBES) and '/proc' in evidence['mounts'].text
    person.new(evidence, host='box')
    assert person.site().gpu in ('none', 'cuda', 'rocm')
