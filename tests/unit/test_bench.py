# SPDX-License-Identifier: GPL-2.0-only
"""Bench: formulas, sizes, what of the machine it reads, and the command that reads, judges and draws."""
import argparse
import copy
import importlib
import json
import math
import os
import re
import struct
import sys
import types

import pytest

from slingtorch import cli, sites
from slingtorch.commands import bench
from slingtorch.job import bench as measuring
from slingtorch.job import records
from slingtorch.job.machine import Machine
from testbed import raising

GIB = 2 ** 30


# --- figures

def operations(ranks, rank, kind='gloo'):
    """The operations of this rank, which does not run them."""
    dist = types.SimpleNamespace(all_gather_into_tensor='whole', reduce_scatter_tensor='shared', all_to_all_single=None)
    return measuring.operations_of(dist, kind, rank, ranks)


def test_all_operations_are_known_and_mpi_gathers_into_lists():
    assert list(operations(4, 0)) == records.OPERATIONS
    assert operations(4, 0)['all_gather'].run == 'whole' and callable(operations(4, 0, 'mpi-gpu')['all_gather'].run)
    assert operations(4, 0)['reduce_scatter'].run == 'shared'


@pytest.mark.parametrize('operation,factor', [
    ('all_reduce', 1.5), ('all_gather', 0.75), ('reduce_scatter', 0.75), ('all_to_all', 0.75), ('broadcast', 1),
    ('send_receive', 1),
])
def test_bus_bandwidth_of_four_ranks_is_that_of_nccl_tests(operation, factor):
    assert operations(4, 0)[operation].bus_factor == factor


@pytest.mark.parametrize('text,size', [('512', 512), ('32768', 32768), ('32K', 32768), ('128 MiB', 2 ** 27), ('16g', 2 ** 34)])
def test_sizes_are_read(text, size):
    assert records.parse_size(text) == size
    assert records.parse_size(records.show_size(size)) == size


@pytest.mark.parametrize('text', ['', '0', '12X', '-1', '1.5G', '32 KiB x'])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match='32K'):
        records.parse_size(text)


@pytest.mark.parametrize('operation,received', [
    ('all_reduce', [6]), ('reduce_scatter', [6]), ('broadcast', [1]), ('send_receive', [2]),
    ('all_gather', [1, 2, 3]), ('all_to_all', [1, 2, 3]),
])
def test_expected_values_are_those_of_the_operation(operation, received):
    """Of the last of three ranks, which send 1, 2 and 3."""
    found = operations(3, 2)[operation]
    assert found.expected == received and (found.receives or found.sends) % len(received) == 0


@pytest.mark.parametrize('words', [['--seconds', 'nan'], ['--seconds', '-1'], ['--factor', '1'], ['--min', '2'],
                                   ['--min', '64K', '--max', '32K']])
def test_options_that_cannot_be(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        measuring.main(words)
    assert stopped.value.code == 2 and '--seconds a positive number' in capsys.readouterr().err


def test_sums_of_many_ranks_are_exact_in_a_float32():
    total = float(100000 * measuring.VALUES)
    assert struct.unpack('f', struct.pack('f', total - 1))[0] == total - 1


# --- the machine

@pytest.fixture
def root(tmp_path):
    """Function that writes files below a directory that stands for /; it returns the directory."""
    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace('__', '/')
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(tmp_path)
    return write


MEMINFO = {'proc__meminfo': 'MemTotal: 100 kB\nMemAvailable:   16777216 kB\n'}


def test_free_memory_is_what_the_kernel_says(root):
    directory = root(proc__self__cgroup='0::/\n', **MEMINFO)
    assert Machine({}, directory).free_memory() == (16 * GIB, None, '')


def test_the_cgroup_of_the_job_is_the_limit(root):
    """Version 2; the limit is two levels up, and cached files count as free."""
    directory = root(proc__self__cgroup='0::/slurm/job_1/step_0\n', **MEMINFO)
    root(**{'sys__fs__cgroup__slurm__job_1__' + name: text for name, text in {
        'memory.max': str(8 * GIB), 'memory.current': str(3 * GIB), 'memory.stat': 'anon 5\ninactive_file %d\n' % GIB,
    }.items()})
    root(**{'sys__fs__cgroup__slurm__job_1__step_0__memory.max': 'max\n'})
    free, limit, file = Machine({}, directory).free_memory()
    assert (free, limit) == (6 * GIB, 8 * GIB) and 'job_1/memory.max' in file


def test_a_cgroup_of_version_1(root):
    root(proc__self__cgroup='4:memory:/job\n3:cpu:/job\n', **MEMINFO)
    free, limit, file = Machine({}, root(**{
        'sys__fs__cgroup__memory__job__memory.limit_in_bytes': str(2 * GIB),
        'sys__fs__cgroup__memory__job__memory.usage_in_bytes': str(GIB),
    })).free_memory()
    assert (free, limit) == (GIB, 2 * GIB) and 'limit_in_bytes' in file


def test_line_rate_of_slingshot(root):
    """Four interfaces of 200 Gb/s; Ethernet for management is not counted."""
    for number in range(4):
        root(**{'sys__class__cxi__cxi%d__device__net__hsn%d__speed' % (number, number): ''})
        root(**{'sys__class__net__hsn%d__%s' % (number, name): text
                for name, text in (('speed', '200000\n'), ('operstate', 'up'), ('device__x', ''))})
    directory = root(**{'sys__class__net__eth0__' + name: text
                        for name, text in (('speed', '10000'), ('operstate', 'up'), ('device__x', ''))})
    assert Machine({}, directory).line_rates() == {'hsn%d' % number: 25.0 for number in range(4)}


def test_line_rate_of_infiniband(root):
    port = 'sys__class__infiniband__mlx5_%d__ports__1__'
    root(**{port % 0 + 'rate': '200 Gb/sec (4X HDR)', port % 0 + 'state': '4: ACTIVE'})
    directory = root(**{port % 1 + 'rate': '10 Gb/sec (4X SDR)', port % 1 + 'state': '1: DOWN'})
    assert Machine({}, directory).line_rates() == {'mlx5_0:1': 25.0}


def test_line_rate_of_ethernet_and_of_none(root):
    """A virtual interface, one that is down and one that does not know (-1) say nothing."""
    for name, speed, state, device in (('eth0', '10000', 'up', True), ('lo', '5', 'up', False),
                                       ('eth1', '40000', 'down', True), ('eth2', '-1', 'up', True)):
        directory = root(**{'sys__class__net__%s__%s' % (name, key): text
                            for key, text in [('speed', speed), ('operstate', state)] + [('device__x', '')] * device})
    assert Machine({}, directory).line_rates() == {'eth0': 1.25}
    assert Machine({}, directory + '/nowhere').line_rates() == {}


# --- what a job wrote

def row(kind, operation, size, bus, wrong=0):
    return {'kind': kind, 'operation': operation, 'size': size, 'seconds': size / bus / 1e9, 'algorithm_bandwidth': bus, 'bus_bandwidth': bus,
            'wrong': wrong, 'first_wrong': 'rank 3 on nid000002' if wrong else None}


RECORD = {
    'format': 'slingtorch bench', 'version': 1, 'complete': True, 'date': '2026-11-22 18:30', 'ranks': 16,
    'ranks_per_node': 8, 'nodes': 2, 'versions': {'torch': '2.10.0+rocm7.1', 'nccl': '2.27.3'}, 'line_rates': {'hsn0': 25.0, 'hsn1': 25.0},
    'networks': {'nccl': 'AWS Libfabric, provider cxi'},
    'notes': ['reduce_scatter: this backend does not support it'],
    'results': [row(kind, operation, 2 ** exponent, speed * 2 ** exponent / (2 ** exponent + 2 ** 22))
                for kind, speed in (('nccl', 90), ('gloo', 20))
                for operation in records.OPERATIONS for exponent in range(15, 31)],
}


@pytest.fixture
def files(tmp_path):
    """Function that writes a changed record: its path."""
    def write(name='bench.json', **changes):
        path = tmp_path / name
        path.write_text(json.dumps({**copy.deepcopy(RECORD), **changes}))
        return str(path)
    return write


def said(capsys, *args):
    """(exit status, stdout, stderr) of slingtorch bench."""
    status = cli.main(['bench', *args])
    return (status, *capsys.readouterr())


def test_tables_of_a_file(capsys, files):
    status, out, _ = said(capsys, files())
    assert status == 0
    line, = [line.split() for line in out.splitlines() if '128 MiB' in line and re.match('nccl +all_reduce', line)]
    assert line[2:4] == ['128', 'MiB'] and '87.27' in line and '174.5' in line  # of 50 GB/s of line rate
    assert '  network of nccl: AWS Libfabric, provider cxi\n' in out
    assert '  nccl 2.27.3\n' in out and 'note: reduce_scatter: this backend does not support it\n' in out


@pytest.mark.parametrize('text,says', [
    ('{', r'not a result of bench \(JSONDecodeError: Expecting'), ('[]', 'its format is not .slingtorch bench., version 1'),
    (json.dumps({**RECORD, 'version': 2}), 'its format is not .slingtorch bench., version 1'),
    (json.dumps({key: RECORD[key] for key in ('format', 'version')}), "KeyError: 'results'"),
    (None, 'cannot be read: No such file'),
    (json.dumps({**RECORD, 'networks': {'nccl': '\x1b[2J'}}), "it has control characters"),
    (json.dumps({**RECORD, 'results': [dict(RECORD['results'][0], seconds='x')]}), "not a result of bench .TypeError"),
    (json.dumps({**RECORD, 'results': [dict(RECORD['results'][0], kind=[])]}), "not a result of bench .TypeError"),
    (json.dumps({**RECORD, 'results': 3}), 'not a result of bench'),
])
def test_files_that_cannot_be_read(capsys, tmp_path, text, says):
    if text is not None:
        (tmp_path / 'x.json').write_text(text)
    status, out, err = said(capsys, str(tmp_path / 'x.json'))
    assert status == 1 and out == ''
    assert err.startswith('slingtorch: error: ') and str(tmp_path / 'x.json') in err
    assert re.search(says, err)


def test_wrong_values_and_an_early_end_are_said(capsys, files):
    status, out, _ = said(capsys, files(results=[row('nccl', 'broadcast', 2 ** 20, 5, wrong=12)], complete=False))
    assert status == 1
    assert 'WRONG VALUES: nccl, broadcast of 1 MiB: 12, first on rank 3 on nid000002' in out
    assert 'INCOMPLETE' in out


# --- the verdict

SITE = """[site]
title = Test
centre = Centre
url = https://example.org
scheduler = slurm
gpu = rocm
gpus_per_node = 8
network = slingshot11
source = paper

[detect login]
hostname = nowhere-at-all
source = paper
"""
REFERENCE = """
[reference two_nodes]
operation = all_reduce
backend = nccl
nodes = 2
ranks_per_node = 8
size = 128 MiB
bus_bandwidth = 85
tolerance = 0.05
source = a report
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Function that writes the file of a site 'test'."""
    def write(text):
        (tmp_path / 'sites').mkdir(exist_ok=True)
        (tmp_path / 'sites/test.cfg').write_text(text)
        monkeypatch.setenv('SLINGTORCH_SITES_PATH', str(tmp_path / 'sites'))
    return write


def verdict(capsys, path):
    status, out, _ = said(capsys, path, '--site', 'test')
    return status, [line for line in out.splitlines() if line.startswith('site test')]


def test_as_fast_as_the_reference(capsys, files, site):
    site(SITE + REFERENCE)
    status, lines = verdict(capsys, files())
    assert status == 0
    assert lines == ['site test: good: nccl, all_reduce of 128 MiB on 2 x 8 ranks: 87.27 GB/s, 1.03 of the reference '
                     '85 (tolerance 0.05; a report)']
    assert verdict(capsys, files(complete=False))[0] == 1


@pytest.mark.parametrize('bus,wrong,status,says', [
    (81, 0, 0, 'good'), (80, 0, 1, 'TOO SLOW'), (99, 1, 1, 'WRONG VALUES')])
def test_the_tolerance_and_wrong_values(capsys, files, site, bus, wrong, status, says):
    site(SITE + REFERENCE)
    found, lines = verdict(capsys, files(results=[row('nccl', 'all_reduce', 2 ** 27, bus, wrong)]))
    assert found == status and lines[0].startswith('site test: ' + says)


@pytest.mark.parametrize('changes', [{'nodes': 4, 'ranks': 32}, {'ranks_per_node': 4},
                                     {'results': [row('nccl', 'all_reduce', 2 ** 26, 200)]},
                                     {'results': [row('gloo', 'all_reduce', 2 ** 27, 200)]}])
def test_what_cannot_be_compared_is_not_called_good(capsys, files, site, changes):
    site(SITE + REFERENCE)
    status, lines = verdict(capsys, files(**changes))
    assert status == bench.NOTHING_COMPARED
    assert 'not compared' in lines[0] and 'nothing was compared' in lines[-1]


def test_every_reference_of_a_site_is_looked_at(capsys, files, site):
    site(SITE + REFERENCE + REFERENCE.replace('two_nodes', 'four_nodes').replace('nodes = 2', 'nodes = 4'))
    status, lines = verdict(capsys, files())
    assert status == 0 and [line.split(': ')[1] for line in lines] == ['good', 'not compared']


def test_a_site_without_references_asks_for_the_first(capsys, files, site):
    site(SITE)
    status, (line,) = verdict(capsys, files())
    assert status == bench.NOTHING_COMPARED
    assert 'nothing was compared' in line and 'Send the JSON file' in line


@pytest.mark.parametrize('old,new,says', [
    ('128 MiB', '128M', 'write it as 128 MiB'), ('= 85', '= fast', 'a number, in GB/s'), ('0.05', '5 %', 'a fraction'),
    ('nodes = 2', 'nodes = two', 'must be numbers'), ('source = a report\n', '', "'source' is missing"),
    ('two_nodes]', ']', r'write \[reference LABEL\]'),
])
def test_faults_in_a_reference(capsys, files, site, old, new, says):
    site(SITE + REFERENCE.replace(old, new))
    status, _, err = said(capsys, files(), '--site', 'test')
    assert status == 1 and re.search(says, err) and 'test.cfg' in err


def test_references_of_the_shipped_sites_name_what_bench_measures():
    references = [reference for one in sites.load_all() for reference in one.references]
    assert references
    for reference in references:
        assert reference.operation in records.OPERATIONS and reference.backend in records.KINDS
        assert math.log2(records.parse_size(reference.size) / 32768).is_integer()  # among the sizes of a usual run


# --- the plot

def test_a_plot(capsys, files, tmp_path):
    pytest.importorskip('matplotlib', reason='remedy: ./run-tests, which installs it')
    path = tmp_path / 'bench.png'
    status, out, _ = said(capsys, files(), '--plot', str(path))
    assert status == 0 and 'plotted: %s' % path in out
    width, height = struct.unpack('>II', path.read_bytes()[16:24])
    assert path.read_bytes().startswith(b'\x89PNG') and (width, height) == (990, 660)


def test_without_matplotlib_the_remedy_is_said(capsys, files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    status, _, err = said(capsys, files(), '--plot', str(tmp_path / 'x.png'))
    assert status == 1 and 'pip install matplotlib' in err and not (tmp_path / 'x.png').exists()


@pytest.mark.parametrize('program', ['bench', 'vet', 'check'])
def test_results_replace_no_other_file(program, tmp_path, capsys):
    """--json with the name of the training program, or of somebody's data."""
    main = importlib.import_module('slingtorch.job.' + program).main
    for text in ('import torch\n', '{"mine": 1}'):
        (tmp_path / 'file').write_text(text)
        with pytest.raises(SystemExit) as stopped:
            main(['--json', str(tmp_path / 'file')])
        assert stopped.value.code == 2 and 'this one is not overwritten' in capsys.readouterr().err
        assert (tmp_path / 'file').read_text() == text


def test_results_replace_results(tmp_path):
    path = str(tmp_path / 'file.json')
    assert records.file_to_write(path) == path
    for record in ({'format': records.FORMAT}, {'format': 1, 'title': 'slingtorch vet: 2 nodes'},
                   {'title': 'slingtorch check: 2 ranks'}, None):
        if record:
            records.write(record, path)
        else:
            open(path, 'w').close()
        assert records.file_to_write(path) == path


def test_results_go_to_a_pipe_as_it_is_and_to_no_file_that_cannot_be_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / 'pipe')
    reader = os.open(tmp_path / 'pipe', os.O_RDONLY | os.O_NONBLOCK)
    records.write({'a': 1}, str(tmp_path / 'pipe'))
    assert os.read(reader, 100) == b'{\n "a": 1\n}\n' and [path.name for path in tmp_path.iterdir()] == ['pipe']
    os.close(reader)
    monkeypatch.setattr(records, 'open', raising(PermissionError(13, 'Permission denied')), raising=False)
    with pytest.raises(argparse.ArgumentTypeError, match='Permission denied'):
        records.file_to_write(__file__)


def test_picture_of_an_unknown_format(files, tmp_path, capsys):
    assert cli.main(['bench', str(files()), '--plot', str(tmp_path / 'a.nosuch')]) == 1
    assert 'a.nosuch: Format' in capsys.readouterr().err
