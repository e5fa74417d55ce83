# SPDX-License-Identifier: GPL-2.0-only
"""Our programs on what people published of real machines: tests/records, whose README.md has the form of a record."""
import argparse
import io
import json
import pathlib
import re
import struct

import pytest

import test_runscripts_get_master
from slingtorch import explain, sites
from slingtorch.job import findings, nccl, variables
from slingtorch.job.machine import library_kind
from slingtorch.sites import probe as site_probe, write as sitefile
from test_runscripts import Job, hydra, identity, slurm

RECORDS = pathlib.Path(__file__).parents[1] / 'records'
KINDS = ('environment', 'layout', 'nodefile', 'mpich-display', 'nccl', 'job', 'fi_info', 'interfaces', 'sinfo', 'rocm-smi', 'modules')
FAULTS = explain.read_faults()
RULES = explain.read_rules(FAULTS)


class Record:
    """One file: its kind, the keys of its header, and the text of the machine."""

    def __init__(self, path):
        self.path, self.kind = path, path.parent.name
        header, _, self.text = path.read_text(encoding='utf-8').partition('\n\n')
        self.keys = dict(line.split(': ', 1) for line in header.splitlines())

    def environment(self):
        """The variables in it, in any of the forms in which programs print them."""
        found = re.findall(r'(?m)^(?:PE 0: +)?([A-Z]\w*)\s*= ?(.*?)\s*$', self.text)
        return dict(found + re.findall(r'(?m): set ([A-Z]\w*) to (.*)$', self.text))


ALL = [Record(path) for kind in KINDS for path in sorted((RECORDS / kind).glob('*.txt'))]


def each(*kinds, key=None):
    """A test for each record of these kinds (that has a key)."""
    found = [record for record in ALL if record.kind in kinds and (key is None or key in record.keys)]
    return pytest.mark.parametrize('record', found, ids=[f'{record.kind}/{record.path.stem}' for record in found])


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


# --- which rank a process is, and where rank 0 is


@each('environment')
def test_rank(record, job):
    more = dict(entry.split('=', 1) for entry in record.keys.get('not printed', '').split())
    env = {**record.environment(), **more}
    if 'error' in record.keys:
        assert record.keys['error'] in job.error(env)
        return
    seen = job.rank(env)
    assert identity(seen) == tuple(map(int, re.findall(r'\d+', record.keys['rank'])))
    assert seen['MASTER_ADDR'] == record.keys.get('host', seen['MASTER_ADDR'])


def apinfo(path, nodes):
    """Write a table as PALS does, version 5, for nodes of these ranks; its path."""
    size, number = sum(map(len, nodes)), {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    pes = b''.join(struct.pack('<3i', nodes[number[rank]].index(rank), 0, number[rank]) for rank in range(size))
    hosts = b''.join(struct.pack('<i64s', number, b'n%d' % number) for number in range(len(nodes)))
    header, at = [], 160
    command = struct.pack('<3i', size, len(nodes[0]), 1)
    for width, data in ((36, b''), (12, command), (12, pes), (68, hosts), (112, b'')):
        header += [width, at, len(data) // width]
        at += len(data)
    path.write_bytes(struct.pack('<20q', 5, at, *header, 0, 0, 0) + command + pes + hosts)
    return str(path)


@each('environment', key='nodes')
def test_rank_by_the_table_alone(record, job, tmp_path):
    """PALS with PMIx, and Flux, say the size in no variable: it is in the table, as local ranks and nodes are."""
    nodes = [[rank for part in entry.split(',') for rank in range(int(part.split('-')[0]), int(part.split('-')[1]) + 1)]
             for entry in record.keys['nodes'].split()]
    env = {name: value for name, value in record.environment().items() if not name.startswith('MASTER_')}
    seen = job.rank(dict(env, PALS_APINFO=apinfo(tmp_path / 'apinfo', nodes)))
    rank = int(env['PALS_RANKID'])
    own = next(ranks for ranks in nodes if rank in ranks)
    assert identity(seen) == (rank, sum(map(len, nodes)), own.index(rank), len(own)) and seen['MASTER_ADDR'] == 'n0'


@each('layout')
def test_layout(record, job):
    """Every node: srun's tasks and hydra's ranks are counted as they were there, and find rank 0's node."""
    nodes = re.findall(r'(?m)^PROBE node (\S+)\s+ranks=(\d+)', record.text)
    size, first = sum(int(count) for _, count in nodes), re.search(r'rank 0 +(\S+)', record.text).group(1)
    env = {name: value for name, value in record.environment().items() if name.startswith('SLURM_')}
    assert test_runscripts_get_master.first(env=env) == first == nodes[0][0]
    rank = 0
    for number, (host, count) in enumerate(nodes):
        task = slurm(rank, env['SLURM_TASKS_PER_NODE'], env['SLURM_JOB_NODELIST'], SLURMD_NODENAME=host)
        for seen in (job.rank(task), job.rank({**env, 'SLURM_JOB_ID': '1', **hydra(rank, size, 0, count)})):
            assert identity(seen) == (rank, size, 0, int(count)) and seen['MASTER_ADDR'] == first
        rank += int(count)


@each('nodefile')
def test_node_file(record, tmp_path):
    path = tmp_path / 'nodefile'
    path.write_text(record.text)
    assert test_runscripts_get_master.first(env={'PBS_NODEFILE': str(path)}) == record.keys['first']


# --- variables


@each('environment', 'mpich-display')
def test_variables(record):
    """No variable that a machine has by itself is unknown, and none stops a job; what it says to be wrong is named."""
    report = findings.Report(0)
    for name, value in record.environment().items():
        report.fact('env ' + name, value)
    variables.check(report, variables.read_table(), [], [], True)
    said = report.sorted()
    assert not [text for level, _, text, _, _ in said if level == 'red' or 'is not a variable that' in text]
    assert set(record.keys.get('wrong', '').split()) <= {text.partition('=')[0] for _, _, text, _, _ in said}


@each('mpich-display')
def test_library_of_mpi(record):
    """The library of MPI, as ldd names it, is known as that."""
    libraries = re.findall(r'(?m)^\s*(lib\S+) => ', record.text)
    assert [name for name in libraries if library_kind(name) == 'MPI'] == [
        name for name in libraries if name.startswith('libmpi')]


# --- logs


@each('job', 'nccl')
def test_explain(record):
    """The cause that was found there comes first, and what helped there is what is advised."""
    log = explain.Log(RULES)
    log.read('job.log', io.BytesIO(record.text.encode()))
    first = next(iter(explain.answers(log, FAULTS, ['slingshot'])), None)
    assert (first.fault.name if first else 'nothing') == record.keys['explain']
    assert record.keys.get('remedy', '') in (' '.join(first.remedies) if first else '')


@each('nccl', key='network')
def test_network_of_nccl(record):
    """What check and bench read in NCCL's log."""
    found = nccl.heard(io.BytesIO(record.text.encode()))
    assert (found['network'], found['provider']) == (record.keys['network'], record.keys.get('provider'))
    assert bool(found['plugin']) == bool(re.search('No plugin found|Could not find', record.text))


# --- what 'slingtorch site new' sees


def site_file(record, tmp_path, capsys, **texts):
    """The site that comes out where these probes see this, in a job."""
    probes = [*site_probe.COMMANDS, *site_probe.TREES, 'modules', 'mounts']
    evidence = {name: site_probe.Text('', 'there is no command %s' % name) for name in probes}
    evidence.update((name, site_probe.Text(text, None)) for name, text in texts.items())
    environ = {'HOME': str(tmp_path), 'PATH': '/usr/bin:/bin', 'SLURM_JOB_ID': '1', 'SLURMD_NODENAME': 'n1'}
    args = argparse.Namespace(name='mine', complete=False)
    sitefile.run_new(args, environ, evidence, 'n1')
    capsys.readouterr()
    return sites.load('mine', environ)


@each('fi_info')
def test_fi_info(record, tmp_path, capsys):
    found = site_probe.read_providers(record.text)
    said = ', '.join('%s: %s' % (name, ' '.join(domains)) for name, domains in found.items()) or 'none'
    assert said == record.keys['providers']
    site = site_file(record, tmp_path, capsys, fi_info=record.text)
    assert site.network == ('slingshot11' if 'cxi' in found else 'ethernet')


@each('interfaces')
def test_interfaces(record, tmp_path, capsys):
    """The interface of the fast network, and not that of the management network, where both have an address."""
    seen = re.findall(r'\] (\S+) +speed=(\S+) +addr=(\S*)', record.text)
    net = ''.join('%s/operstate: up\n%s/speed: %s\n' % (name, name, speed) for name, speed, _ in seen)
    addresses = json.dumps([{'ifname': name, 'addr_info': [{'family': 'inet', 'scope': 'global'}] * bool(address)}
                            for name, _, address in seen])
    site = site_file(record, tmp_path, capsys, net=net, addresses=addresses)
    assert {value.name: value.value for value in site.env}['GLOO_SOCKET_IFNAME'] == record.keys['interface']


@each('sinfo')
def test_sinfo(record, tmp_path, capsys):
    rows = [(line.split()[1], line.split()[0], line.split()[5]) for line in record.text.splitlines()[1:]]
    site = site_file(record, tmp_path, capsys, sinfo=''.join('%s|%s|%s\n' % row for row in rows))
    assert (site.gpu, site.gpus_per_node) == tuple(record.keys['GPUs'].split())


@each('rocm-smi')
def test_rocm_smi(record):
    evidence = dict.fromkeys(('nvidia-smi', 'amd-smi', 'pci'), site_probe.Text('', 'no'))
    evidence['rocm-smi'] = site_probe.Text(record.text, None)
    assert site_probe.node_gpus(evidence)[:2] == ('rocm', int(record.keys['GPUs']))


@each('modules')
def test_modules(record):
    found = dict(entry[:2] for entry in site_probe.choose_modules({
        **dict.fromkeys((*site_probe.COMMANDS, 'pci'), site_probe.Text('', 'no')),
        'modules': site_probe.Text(record.text, None)}, {}))
    assert found['mpi'] == record.keys['MPI']
