# SPDX-License-Identifier: GPL-2.0-only
"""Bench: formulas, sizes, what of the machine it reads, and the command that reads, judges and draws."""
import argparse
import collections
import copy
import importlib
import itertools
import json
import math
import os
import re
import struct
import sys
import textwrap
import types
from unittest import mock

import pytest

from slingtorch import cli, sites
from slingtorch.job import bench as measuring
from slingtorch.job import records, vet
from testbed import raising
from testbed.expected import expected

# --- figures

def operations(ranks, rank, kind='gloo'):
    """The operations of this rank, which does not run them."""
    dist = types.SimpleNamespace(all_gather_into_tensor='whole', reduce_scatter_tensor='shared', all_to_all_single=None)
    return measuring.operations_of(dist, kind, rank, ranks)


def test_all_operations_are_known_and_mpi_gathers_into_lists():
    assert list(operations(4, 0)) == records.OPERATIONS
    assert operations(4, 0)['all_gather'].run == 'whole' and operations(4, 0)['reduce_scatter'].run == 'shared'
    dist = mock.MagicMock()     # with PyTorch's new names
    found, parts = measuring.operations_of(dist, 'mpi-gpu', 1, 4), mock.Mock(**{'chunk.side_effect': range})
    found['all_gather'].run(parts, 'sent')
    dist.all_gather.assert_called_once_with([0, 1, 2, 3], 'sent')
    found['send_receive'].run('received', 'sent')
    assert dist.P2POp.mock_calls == [mock.call(dist.isend, 'sent', 2), mock.call(dist.irecv, 'received', 0)]
    assert found['reduce_scatter'].run is dist.reduce_scatter_single
    assert measuring.operations_of(dist, 'nccl', 1, 4)['all_gather'].run is dist.all_gather_single


@pytest.mark.parametrize('text,size', [('512', 512), ('32768', 32768), ('32K', 32768), ('128 MiB', 2 ** 27), ('16g', 2 ** 34)])
def test_sizes_are_read(text, size):
    assert records.parse_size(text) == size
    assert records.parse_size(records.show_size(size)) == size


@pytest.mark.parametrize('text', ['', '0', '12X', '-1', '1.5G', '32 KiB x'])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match='32K'):
        records.parse_size(text)


@pytest.mark.parametrize('operation, factor, received', [
    ('all_reduce', 1.5, [6]), ('reduce_scatter', 0.75, [6]), ('broadcast', 1, [1]), ('send_receive', 1, [2]),
    ('all_gather', 0.75, [1, 2, 3]), ('all_to_all', 0.75, [1, 2, 3]),
])
def test_bus_bandwidth_is_that_of_nccl_tests_and_values_are_those_of_the_operation(operation, factor, received):
    """The bandwidth of four ranks, and the values of the last of three ranks, which send 1, 2 and 3."""
    assert operations(4, 0)[operation].bus_factor == factor
    found = operations(3, 2)[operation]
    assert found.expected == received and (found.receives or found.sends) % len(received) == 0
    assert operations(130, 2)['all_gather'].expected == [*range(1, 128), 1, 2, 3]


@pytest.mark.parametrize('words', [['--seconds', 'nan'], ['--seconds', '-1'], ['--factor', '1'], ['--min', '2'],
                                   ['--min', '64K', '--max', '32K']])
def test_options_that_cannot_be(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        measuring.main(words)
    assert stopped.value.code == 2 and '--seconds a positive number' in capsys.readouterr().err


def test_sums_of_many_ranks_are_exact_in_a_float32():
    total = float(100000 * measuring.VALUES)
    assert struct.unpack('f', struct.pack('f', total - 1))[0] == total - 1


# --- in the job

class Tensor:
    """As much of a tensor as bench uses, with 16 values at most."""

    def __init__(self, count, **_):
        self.values = [3] * min(count, 16)

    def fill_(self, *values):
        self.values = [value for value in values for _ in range(len(self.values) // len(values))]

    def chunk(self, parts):
        size, found = len(self.values) // parts, [Tensor(0) for _ in range(parts)]
        for number, part in enumerate(found):
            part.values = self.values[number * size:(number + 1) * size]
        return found

    def __ne__(self, value):
        return types.SimpleNamespace(sum=lambda: sum(one != value for one in self.values))

    def __repr__(self):
        return f'{len(self.values)} values'


def pytorch(gpus, size=2, add=2):
    """
    PyTorch for rank 0 of two, whose partner's values come at once. One of those of all_to_all is wrong, reduce_scatter
    does nothing, and all_gather is not there.
    """
    torch = mock.MagicMock(float32='float32', empty=mock.Mock(side_effect=Tensor))
    torch.__version__, dist, cuda = '2.13.0+cu132', torch.distributed, torch.cuda
    cuda.is_available.return_value, cuda.device_count.return_value = gpus > 0, gpus
    cuda.get_device_name, cuda.nccl.version.return_value = 'H100 {}'.format, (2, 27, 3)
    dist.get_rank.return_value, dist.get_world_size.return_value = 0, size
    del dist.all_gather_single, dist.reduce_scatter_single

    def start(backend, timeout):
        torch.environ = sorted(name for name in os.environ if 'NCCL' in name)
        if 'NCCL_DEBUG_FILE' in os.environ:
            with open(os.environ['NCCL_DEBUG_FILE'], 'a') as log:
                log.write('INFO Using network AWS Libfabric\nNET/OFI Selected provider is cxi, fabric is cxi\n')

    def tell(things, thing):
        other = (1, 'rank 1 on n1') if isinstance(thing, tuple) and thing[0] else 'Socket' if 'AWS' in str(thing) else thing
        assert things == [None] * size
        things[:] = [thing] + [other] * (size - 1)

    def all_to_all(received, sent):
        received.fill_(1, 2)
        received.values[12] = 9

    dist.init_process_group.side_effect, dist.all_gather_object.side_effect = start, tell
    dist.all_reduce.side_effect = lambda data: data.fill_(*[value + add for value in data.values])
    dist.all_gather_into_tensor.side_effect = RuntimeError('NCCL does not support this\nat all')
    dist.all_to_all_single.side_effect = all_to_all
    dist.batch_isend_irecv.side_effect = lambda operations: operations
    dist.P2POp.side_effect = lambda what, tensor, other: tensor.fill_(other + 1) or dist.work
    return torch


@pytest.fixture
def measure(monkeypatch, capsys):
    """Run bench in rank 0: (exit status, output, the stand-in for PyTorch); each look at the clock is 1 ms later."""
    def run(torch, *words, **environ):
        ticks = itertools.count()
        with monkeypatch.context() as planted:
            planted.setitem(sys.modules, 'torch', torch)
            planted.setitem(sys.modules, 'torch.distributed', torch and torch.distributed)
            planted.setattr(measuring, 'time', types.SimpleNamespace(
                strftime=lambda form: form, perf_counter=lambda: next(ticks) / 1024))
            planted.setattr(measuring, 'Machine', lambda: types.SimpleNamespace(
                node='n0', environ=environ, line_rates=lambda: {'hsn0': 25.0}))
            planted.setattr(os, '_exit', lambda status: sys.exit(f'_exit {status}'))
            planted.setattr(os, 'environ', environ)
            try:
                status = measuring.main(list(words))
            except SystemExit as err:
                status = err.code
        return (status, *capsys.readouterr())
    return run


TWO = {'RANK': '0', 'WORLD_SIZE': '2', 'LOCAL_RANK': '1', 'LOCAL_WORLD_SIZE': '1'}


def test_what_a_job_measures(measure, tmp_path):
    torch = pytorch(gpus=2)
    status, out, err = measure(torch, '--min', '64', '--max', '100', '--seconds', '0.003', '--json', f'{tmp_path}/x', **TWO)
    calls = collections.Counter(re.sub(r"call\.|<MagicMock name='mock\.|' id='\d+'>|(?<=object)\(.*", '', str(call))
                                for call in torch.mock_calls)
    said = [str(torch.environ), *('%d x %s' % (count, call) for call, count in calls.items() if re.match('dist|empty|cuda.set', call))]
    record = json.loads((tmp_path / 'x').read_text())
    rows = list(map(json.dumps, record.pop('results')))
    expected('\n'.join([out, json.dumps(record), *rows, *said]) + '\n', 'bench/job')
    assert (status, err) == (1, '')


@pytest.mark.parametrize('gpus, words, sizes, times', [(0, [], 1, 921), (1, ['--seconds', '1'], 2, 1000)])
def test_usual_sizes_and_numbers_of_repetitions(measure, tmp_path, gpus, words, sizes, times):
    torch = pytorch(gpus)
    assert measure(torch, *words, '--factor', '32768', '--operations', 'all_reduce', '--json', f'{tmp_path}/x', **TWO)[0] == 0
    record = json.loads((tmp_path / 'x').read_text())
    assert [row['size'] for row in record['results']] == [2 ** 15, 2 ** 30][:sizes]
    assert torch.distributed.all_reduce.call_count == sizes * (1 + 3 + times + 1)
    assert torch.cuda.set_device.mock_calls == [mock.call(0)] * gpus and torch.cuda.synchronize.call_count == 2 * gpus * sizes
    assert record['notes'] == ['gloo, on CPUs: PyTorch 2.13.0+cu132 sees no GPU, or has no NCCL'] * (not gpus)
    assert record['networks'] == ({'nccl': 'AWS Libfabric, provider cxi / Socket'} if gpus else {'gloo': 'TCP'})


def test_a_rank_alone_and_a_backend_that_is_named(measure):
    words = ['--backend', 'gloo', '--operations', 'send_receive', 'broadcast', 'all_reduce', '--max', '32K', '--seconds', '0']
    torch = pytorch(1, size=1, add=0)
    torch.distributed.broadcast.side_effect = RuntimeError('broadcast is not implemented')
    status, out, _ = measure(torch, *words, **{**TWO, 'WORLD_SIZE': '1'})
    assert status == 0 and torch.distributed.all_reduce.call_count == 1 + 3 + 3 + 1
    assert [line for line in out.splitlines() if 'note' in line] == [
        'note: a single rank sends nothing: these are times of calls, not of a network',
        'note: send_receive: a single rank has no partner', 'note: broadcast: this backend: RuntimeError: broadcast is not implemented']
    assert '\n  network of gloo: TCP\n' in out and not torch.cuda.set_device.called


@pytest.mark.parametrize('torch, environ, says', [
    (pytorch(0), {}, "rank ? on n0: 'RANK' is not set: start it with the runscript, as in 'srun -N2 --ntasks-per-node=4 "
                   "$RUNSCRIPTS/conda-python-distributed --bench'"),
    (pytorch(0, size=1), TWO, "rank 0 on n0: MPI sees 1 rank(s), but the job has 2: start the ranks with a launcher of this "
                            "MPI (Slurm: srun --mpi=pmi2, pmix or cray_shasta)"),
    (None, TWO, "rank 0 on n0: ModuleNotFoundError: import of torch halted; None in sys.modules. If a rank or its "
                      "node is gone, the job's first error tells which (srun and mpiexec name the rank that ended first)"),
])
def test_what_ends_a_measurement(measure, torch, environ, says):
    status, out, err = measure(torch, **environ)
    assert (status, out, err) == ('_exit 1', '', f'slingtorch bench: {says}\n')


def test_a_rank_that_dies_ends_it_and_what_was_measured_is_there(measure, tmp_path):
    torch = pytorch(0)
    torch.distributed.broadcast.side_effect = RuntimeError('Connection reset by peer')
    words = ['--operations', 'all_reduce', 'broadcast', '--max', '32K', '--seconds', '0', '--json', f'{tmp_path}/x']
    status, _, err = measure(torch, *words, **TWO)
    assert status == '_exit 1' and 'rank 0 on n0: RuntimeError: Connection reset by peer. If a rank or its node is gone, ' in err
    record = json.loads((tmp_path / 'x').read_text())
    assert not record['complete'] and [row['operation'] for row in record['results']] == ['all_reduce']


def test_a_file_that_cannot_be_written_ends_it_at_once(measure):
    torch = pytorch(0)
    assert "No such file or directory: '/nowhere/x." in measure(torch, '--json', '/nowhere/x', **TWO)[2]
    assert not torch.distributed.all_reduce.called


def test_options_are_explained(capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '900')
    for main in (measuring.main, vet.main, lambda words: cli.main(['bench', *words]), lambda words: cli.main(['report', *words])):
        with pytest.raises(SystemExit):
            main(['--help'])
    expected(textwrap.fill(' '.join(capsys.readouterr().out.split()), 140) + '\n', 'bench/help')


# --- what a job wrote

def row(kind, operation, size, bus, wrong=0):
    return {'kind': kind, 'operation': operation, 'size': size, 'seconds': size / bus / 1e9, 'algorithm_bandwidth': bus / 2,
            'bus_bandwidth': bus, 'wrong': wrong, 'first_wrong': 'rank 3 on nid000002' if wrong else None}


RECORD = {
    'format': 'slingtorch bench', 'version': 1, 'complete': True, 'date': '2026-11-22 18:30', 'ranks': 16,
    'ranks_per_node': 8, 'nodes': 2, 'versions': {'torch': '2.10.0+rocm7.1', 'nccl': '2.27.3'}, 'line_rates': {'hsn1': 25.0, 'hsn0': 25.0},
    'networks': {'nccl': 'AWS Libfabric, provider cxi', 'gloo': 'TCP'},
    'notes': ['reduce_scatter: this backend does not support it'],
    'results': [row('nccl', 'all_reduce', 2 ** 15, 2.5), row('nccl', 'all_reduce', 2 ** 27, 87.2727),
                row('nccl', 'send_receive', 1 << 20, 99), row('gloo', 'all_reduce', 512, 0.01), row('gloo', 'all_reduce', 2 ** 31, 1)],
}


@pytest.fixture
def files(tmp_path):
    """Function that writes a changed record: its path."""
    def write(name='bench.json', **changes):
        path = tmp_path / name
        records.write({**copy.deepcopy(RECORD), **changes}, str(path))
        return str(path)
    return write


def said(capsys, *args):
    """(exit status, stdout, stderr) of slingtorch bench."""
    status = cli.main(['bench', *args])
    return (status, *capsys.readouterr())


def test_tables_of_files(capsys, files):
    """Wrong values and an early end are said."""
    good, text, _ = said(capsys, files())
    rows = [row('mpi', 'broadcast', 2 ** 20, 5, wrong=12), row('mpi', 'broadcast', 2 ** 21, 5)]
    bad, out, _ = said(capsys, files(results=rows, complete=False, nodes=1, line_rates={}, notes=[], networks={}))
    expected(text + out, 'bench/table')
    assert (good, bad) == (0, 1)
    assert said(capsys, files(complete=False))[0] == said(capsys, files(results=rows))[0] == 1


@pytest.mark.parametrize('text, says', [
    ('{', 'JSONDecodeError: .*'), ('[]', "ValueError: its format is not 'slingtorch bench', version 1"),
    (json.dumps({**RECORD, 'version': 2}), "ValueError: its format is not 'slingtorch bench', version 1"),
    (json.dumps({key: RECORD[key] for key in ('format', 'version')}), "KeyError: 'results'"),
    (json.dumps({**RECORD, 'networks': {'nccl': '\x1b[2J'}}), 'ValueError: it has control characters'),
    (json.dumps({**RECORD, 'results': [dict(RECORD['results'][0], kind=[])]}), "TypeError: unhashable type: 'list'"),
    (json.dumps({**RECORD, 'line_rates': 3}), "AttributeError: .*"), ('[' * 200000, 'RecursionError: .*'),
    (json.dumps({**RECORD, 'ranks': 1e999}), 'OverflowError: .*'),
    (json.dumps({**RECORD, 'networks': {'nccl': 1}, 'versions': {'torch': 1, '\xe9': []}, 'ranks': '\xe9'}),
     r'TypeError: %d format: .*'),
    (None, None),
])
def test_files_that_cannot_be_read(capsys, tmp_path, text, says):
    path = tmp_path / 'x.json'
    if text is not None:
        path.write_text(text)
    status, out, err = said(capsys, str(path))
    assert (status, out) == (1, '')
    assert re.fullmatch(re.escape(f"slingtorch: error: [Errno 2] No such file or directory: '{path}'\n") if says is None else
                        rf"slingtorch: error: {path} is not a result of bench \({says}\): give the file that '--bench --json "
                        r"FILE' of this slingtorch wrote\n", err)


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
    table, *lines = out.split('\nsite test: ')
    return status, [line.rstrip('\n') for line in lines]


ALL_REDUCE = 'nccl, all_reduce of 128 MiB on 2 x 8 ranks'
REASON = ("look for the reason: the network in the lines above (with TCP or Socket, the plugin was not used), the variables "
          "NCCL_* and FI_* (slingtorch sites test), other jobs on the same nodes")


@pytest.mark.parametrize('bus, wrong, complete, status, says', [
    (81, 0, True, 0, ['good: %s: 81 GB/s, 0.95 of the reference 85 (tolerance 0.05; a report)']),
    (80, 0, True, 1, ['TOO SLOW: %s: 80 GB/s, 0.94 of the reference 85 (tolerance 0.05; a report)', REASON]),
    (99, 1, True, 1, ['WRONG VALUES: %s: 99 GB/s, 1.16 of the reference 85 (tolerance 0.05; a report)', REASON]),
    (99, 0, False, 1, ['good: %s: 99 GB/s, 1.16 of the reference 85 (tolerance 0.05; a report)'])])
def test_the_tolerance_and_wrong_values(capsys, files, site, bus, wrong, complete, status, says):
    """Each reference is compared; that one cannot be does not change the verdict."""
    site(SITE + REFERENCE + REFERENCE.replace('two_nodes', 'four_nodes').replace('nodes = 2', 'nodes = 4'))
    path = files(results=[row('nccl', 'all_reduce', 2 ** 27, bus, wrong)], complete=complete)
    other = 'not compared: nccl, all_reduce of 128 MiB on 4 x 8 ranks; this was 2 x 8 ranks'
    assert verdict(capsys, path) == (status, [says[0] % ALL_REDUCE, other, *says[1:]])


@pytest.mark.parametrize('changes, says', [
    ({'nodes': 4, 'ranks': 32}, '; this was 4 x 8 ranks'), ({'ranks_per_node': 4}, '; this was 2 x 4 ranks'),
    ({'results': [row('nccl', 'all_reduce', 2 ** 26, 200)]}, ' was not measured'),
    ({'results': [row('gloo', 'all_reduce', 2 ** 27, 200)]}, ' was not measured'),
    (None, ''),
])
def test_what_cannot_be_compared_is_not_called_good(capsys, files, site, tmp_path, changes, says):
    site(SITE + REFERENCE * (changes is not None))
    assert verdict(capsys, files(**changes or {})) == (3, [f'not compared: {ALL_REDUCE}{says}'] * (changes is not None) + [
        'nothing was compared: there is no reference figure for this number of nodes and ranks. Send the JSON file with the '
        f'date to the project, or add a section [reference LABEL] to {tmp_path}/sites/test.cfg (docs/check.md)'])


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

def test_a_plot(capsys, files, tmp_path, monkeypatch):
    figure = pytest.importorskip('matplotlib.figure', reason='remedy: ./run-tests, which installs it')
    drawn, save = [], figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, 'savefig', lambda self, *args, **more: drawn.append(self) or save(self, *args, **more))
    path = tmp_path / 'bench.png'
    status, out, _ = said(capsys, files(), '--plot', str(path))
    assert status == 0 and out.endswith(f'\nplotted: {path}\n')
    width, height = struct.unpack('>II', path.read_bytes()[16:24])
    assert path.read_bytes().startswith(b'\x89PNG') and (width, height) == (990, 660)
    axes, = drawn[0].axes
    assert [(line.get_label(), line.get_linestyle(), line.get_marker(), list(line.get_ydata())) for line in axes.lines] == [
        ('nccl all_reduce', '-', 'o', [2.5, 87.2727]), ('nccl send_receive', '-', 'o', [99]),
        ('gloo all_reduce', '--', 'o', [0.01, 1]), ('line rate of a node', ':', 'None', [50, 50])]
    assert list(axes.lines[0].get_xdata()) == [2 ** 15, 2 ** 27] and axes.get_xscale() == axes.get_yscale() == 'log'
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ('bytes', 'bus bandwidth, GB/s', out.splitlines()[0])
    assert [text.get_text() for text in axes.get_legend().texts] == [line.get_label() for line in axes.lines]


def test_without_matplotlib_the_remedy_is_said(capsys, files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    status, _, err = said(capsys, files(), '--plot', str(tmp_path / 'x.png'))
    assert status == 1 and err == f'slingtorch: error: --plot needs matplotlib: {sys.executable} -m pip install matplotlib\n'


@pytest.mark.parametrize('program', ['bench', 'vet', 'check'])
def test_results_replace_no_other_file(program, tmp_path, capsys):
    """--json with the name of the training program, or of somebody's data."""
    main = importlib.import_module('slingtorch.job.' + program).main
    for text in (b'import torch\n', b'{"mine": 1}', b'\xff'):
        (tmp_path / 'file').write_bytes(text)
        with pytest.raises(SystemExit) as stopped:
            main(['--json', str(tmp_path / 'file')])
        assert stopped.value.code == 2 and capsys.readouterr().err.endswith(
            f': error: argument --json: {tmp_path}/file exists and has no results of slingtorch: choose another file, since this one '
            'is not overwritten\n')
        assert (tmp_path / 'file').read_bytes() == text


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


def test_results_are_on_the_disk_before_they_get_their_name(tmp_path, monkeypatch):
    (tmp_path / 'link').symlink_to('file')
    (tmp_path / f'file.part-{os.getpid()}').write_text('of another process')
    seen = []
    monkeypatch.setattr(records.os, 'fsync', lambda number: seen.append((os.fstat(number).st_size, set(os.listdir(tmp_path)))))
    records.write({}, f'{tmp_path}/link')
    assert seen == [(3, {'link', f'file.part-{os.getpid()}'})]
    assert (tmp_path / 'file').read_text() == '{}\n' and (tmp_path / 'link').is_symlink()


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
    assert f'error: --plot {tmp_path}/a.nosuch: Format' in capsys.readouterr().err
