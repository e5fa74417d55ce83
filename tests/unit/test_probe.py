# SPDX-License-Identifier: GPL-2.0-only
"""The process with PyTorch: what it asks the store and PyTorch, and what it tells its rank; what NCCL reads and says."""
import datetime
import gc
import io
import os
import sys
import types
import warnings
from unittest import mock

import pytest

from slingtorch.job import __main__ as program, meet, nccl, probe
from slingtorch.job.machine import Machine
from testbed import derecho, raising


@pytest.fixture
def one(monkeypatch):
    """The process of a rank, at the time 100; what it sends is copied to its `sent`."""
    monkeypatch.setattr(probe, 'time', types.SimpleNamespace(monotonic=lambda: 100, time=None))
    sent = []
    process = probe.Probe(types.SimpleNamespace(send=lambda said: sent.append(dict(said))))
    process.sent, process.clock, process.result['imported'] = sent, lambda: 1000, 1
    return process


OTHERS = {1: {'node': 'n2', 'rank': 2, 'ranks': 2}, 2: {'node': 'n3', 'rank': 4, 'ranks': 2, 'gpu': False}}


@pytest.mark.parametrize('world, others, go', [
    (6, OTHERS, True), (8, OTHERS, False), (6, {**OTHERS, 2: None}, False), (4, {**OTHERS, 2: None}, False), (2, {}, True)])
def test_rank_0_s_node_waits_for_all_others(one, world, others, go):
    one.environ = {'RANK': '0', 'WORLD_SIZE': str(world), 'LOCAL_WORLD_SIZE': '2'}
    store = mock.Mock(**{'others.return_value': others})
    one.open = lambda seconds: store if seconds == 50 else None
    assert one.come(50) == go and one.nodes == one.result['nodes'] == others
    assert store.mock_calls == [mock.call.others(world - 2, world, 132 + world / 32),
                                mock.call.put('go', {'now': 1000, 'nodes': len(others) + 1, 'go': go})]
    assert one.sent == [{'facts': {}, 'phase': 'import', 'imported': 1, 'nodes': others, 'met': True}]


def test_nccl_on_one_node_does_not_wait_for_gloo_on_another(one):
    one.environ, one.gpu = {'RANK': '0', 'WORLD_SIZE': '6', 'LOCAL_WORLD_SIZE': '2'}, True
    others = {1: {**OTHERS[1], 'gpu': True}, 2: OTHERS[2]}
    one.open = lambda seconds: mock.Mock(**{'others.return_value': others})
    assert one.come(50) is False and one.result['others'] == [True, ['n3']]


@pytest.mark.parametrize('cuda, hip, sees, gpu', [('13.0', None, True, True), (None, '6.3', False, False), (None, None, True, False)])
def test_pytorch_looks_for_gpus_if_it_was_built_for_them(one, cuda, hip, sees, gpu):
    def look():
        warnings.warn('CUDA initialization: CUDA unknown error')
        return sees

    one.look_for_gpus(mock.Mock(**{'version.cuda': cuda, 'version.hip': hip, 'cuda.is_available': look}))
    assert bool(one.gpu) == gpu
    assert one.sent == ([{'facts': {}, 'phase': 'import', 'imported': 1, 'sees': sees,
                          'warned': 'CUDA initialization: CUDA unknown error'}] if cuda or hip else [])


def test_without_a_store_and_in_a_job_of_one_rank_there_is_no_network_to_try(one):
    one.environ, one.open = {'RANK': '2', 'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '2'}, lambda _: None
    assert one.come(50) is False
    one.environ, one.open = {'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_WORLD_SIZE': '1'}, lambda _: mock.Mock(
        **{'others.return_value': {}})
    assert one.come(50) is False


@pytest.mark.parametrize('nodes, known', [(3, [1, 2]), (10 ** 9, list(range(1, 6)))])
def test_another_node_hears_whom_it_meets(one, nodes, known):
    one.environ = {'RANK': '4', 'WORLD_SIZE': '6', 'LOCAL_WORLD_SIZE': '2', 'SLURMD_NODENAME': 'n3', 'SLURM_STEP_ID': '0'}
    store = mock.Mock(**{'join.return_value': {'now': 990, 'nodes': nodes, 'go': True}})
    one.open = lambda seconds: store
    assert one.come(50) is True and one.nodes == dict.fromkeys(known) and one.sent[-1]['ahead'] == 10
    assert store.mock_calls == [mock.call.join({'node': 'n3', 'rank': 4, 'ranks': 2, 'gpu': False}, 154)]


@pytest.mark.parametrize('form', [{'now': 'x'}, {'nodes': 1.5}, {'go': 1}])
def test_an_answer_of_rank_0_s_node_in_another_form_ends_it(one, form):
    one.environ = {'RANK': '4', 'WORLD_SIZE': '6', 'LOCAL_WORLD_SIZE': '2'}
    one.open = lambda seconds: mock.Mock(**{'join.return_value': {'now': 990, 'nodes': 3, 'go': True, **form}})
    with pytest.raises(ValueError, match='^the node of rank 0 sent a message that this version of slingtorch does not know$'):
        one.come(50)


@pytest.mark.parametrize('rank, said, lost', [('0', 'the port is taken', 'the port is taken'), ('0', '', 'why not ()'),
                                              ('1', 'timed out', 'why not (timed out)')])
def test_a_store_that_cannot_be_opened(one, monkeypatch, rank, said, lost):
    one.environ = {'RANK': rank}
    monkeypatch.setattr(meet, 'why_not', lambda environ, text='': f'why not ({text})')
    monkeypatch.setattr(meet.Store, '__init__', raising(meet.NotMet(said)))
    joins = []
    monkeypatch.setattr(probe.threading, 'Thread', lambda target, daemon: types.SimpleNamespace(start=target, join=joins.append))
    assert one.open(50) is None and joins == [11, 52] and one.sent == [{'facts': {}, 'phase': 'import', 'imported': 1, 'lost': lost}]


@pytest.mark.parametrize('rank, calls, says', [
    ('0', [mock.call.reports('a thing', 107), mock.call.word('0', 2)], [{'reports': 'reports'}, {'heard': True}]),
    ('2', [mock.call.report('a thing', 107)], [{'word': '1'}])])
def test_reports_and_the_verdict(one, rank, calls, says):
    heard = iter([('a thing', 7), ('0', 5)])
    one.pipe.recv, one.environ, one.nodes = lambda: next(heard), {'RANK': rank}, OTHERS
    one.store = mock.Mock(**{'reports.return_value': 'reports', 'report.return_value': '1'})
    one.exchange()
    assert one.store.mock_calls == calls
    assert [{name: said[name] for name in news} for said, news in zip(one.sent, says)] == says


@pytest.mark.parametrize('gpu', [True, False])
def test_the_network_is_tried_with_one_rank_of_each_node(one, monkeypatch, gpu):
    torch = mock.MagicMock(**{'cuda.is_available.return_value': gpu})
    monkeypatch.setitem(sys.modules, 'torch', torch)
    monkeypatch.setitem(sys.modules, 'torch.distributed', torch.distributed)
    for name, value in (('rise', lambda reduce, zeros, ranks, watch: reduce(zeros(ranks)) and 0.25), ('connections', lambda: ['one']),
                        ('totals', lambda found: {'sent': found}), ('unanswered', lambda *words: words), ('address_of_gloo', lambda environ: '10.0.0.1')):
        monkeypatch.setattr(probe.network, name, value)
    one.log.write(b'Using network IB\n')
    one.gpu, one.nodes, one.store, one.environ = gpu, OTHERS, mock.Mock(number=int(gpu)), {'LOCAL_WORLD_SIZE': '4', 'MASTER_PORT': '23000'}
    monkeypatch.setattr(probe.network.Watch, 'enter', lambda self, name: None)
    one.collective(torch, 5)
    dist, backend = torch.distributed, 'nccl' if gpu else 'gloo'
    assert one.result == {
        'facts': {'backend': backend, **({} if gpu else {'address of gloo': '10.0.0.1'})}, 'phase': 'collective', 'imported': 1,
        'told': {'sent': ['one'], 'seconds': 0.25}, **({
            'unanswered': ((23000, 4), 4), 'network': 'IB', 'provider': None, 'plugin': None} if gpu else {})}
    assert [said['phase'] for said in one.sent] == ['rendezvous', 'collective']
    assert dist.init_process_group.mock_calls == [mock.call(
        backend, store=dist.PrefixStore.return_value, world_size=3, rank=int(gpu), timeout=datetime.timedelta(seconds=5))]
    assert dist.PrefixStore.mock_calls == [mock.call('trial', one.store.another().store)]
    assert torch.zeros.mock_calls == [mock.call(3, device='cuda:0' if gpu else 'cpu')]
    dist.all_reduce.assert_called_once_with(torch.zeros.return_value)


def test_pytorch_is_imported_and_what_it_took(one, monkeypatch, tmp_path):
    (tmp_path / 'torch.py').write_text('import gc, os\ncollects, environ = gc.isenabled(), dict(os.environ)\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'torch', raising=False)
    environ = {}
    monkeypatch.setattr(os, 'environ', environ)
    monkeypatch.setattr(probe, 'mapped_libraries', lambda: ['libx.so'])
    monkeypatch.setattr(probe, 'open', lambda path: io.StringIO(
        'VmPeak:\t 100 kB\nVmData:\t  7 kB\nRssAnon:\t 9 kB\nThreads:\t3\n'), raising=False)
    monkeypatch.setattr(probe.os, 'listdir', lambda path: ['0', '1', '2'])
    torch = one.load()
    sys.modules.pop('torch')
    assert (torch.collects, gc.isenabled()) == (False, True)
    assert torch.environ == {'TORCH_NCCL_ASYNC_ERROR_HANDLING': '0', 'NCCL_ASYNC_ERROR_HANDLING': '0', 'NCCL_DEBUG': 'INFO',
                             'NCCL_DEBUG_SUBSYS': 'INIT,NET', 'NCCL_DEBUG_FILE': f'/proc/self/fd/{one.log.fileno()}'}
    assert one.sent == [{'facts': {}, 'phase': 'import', 'imported': 0, 'maps': ['libx.so'], 'took': {
        'fds': 3, 'v': 102400, 'd': 7168, 's': 0, 'anon': 9216}}]
    nccl.log_into(environ, None)
    assert environ['NCCL_DEBUG_FILE'] == '/dev/null'


def test_an_error_is_that_of_the_import_or_of_the_rendezvous(one, monkeypatch):
    monkeypatch.setattr(probe, 'Probe', lambda pipe: one)
    monkeypatch.setattr('slingtorch.job.imports.Trial', lambda words: types.SimpleNamespace(result=lambda: {'words': words}))
    one.look_for_gpus = lambda torch: None
    one.load, one.come, one.collective = lambda: 'torch', lambda seconds: seconds == 5, lambda *words: raising(ValueError(words))()
    probe.run(None, 5, [])
    assert one.sent.pop()['error'].startswith('the rendezvous failed: ValueError: (\'torch\', 5) (in ')
    one.come = raising(OSError(24, 'Too many open files'))
    probe.run(None, 5, ['train.py'])
    assert one.sent.pop() == {
        'facts': {}, 'phase': 'rendezvous', 'imported': 1, 'over': True, 'maps': probe.mapped_libraries(), 'script': {'words': ['train.py']},
        'error': f'the rendezvous failed: OSError: [Errno 24] Too many open files (in {raising.__code__.co_filename})'}
    one.load = raising(ImportError('libmkl.so:\nno such file\n\nthird\nfourth' + 'x' * 999))
    one.result = {'facts': {}, 'phase': 'import'}
    probe.run(None, 5, [])
    assert one.sent == [{'facts': {}, 'phase': 'import', 'over': True, 'maps': probe.mapped_libraries(), 'error':
                         f'import torch failed: ImportError: libmkl.so: no such file  (in {raising.__code__.co_filename})'}]


# --- NCCL


@pytest.mark.parametrize('wanted, names', [
    (None, ['libnccl-net.so', 'librccl-net.so']), ('none', []), ('STATIC_PLUGIN', []), ('/a/b.so', ['/a/b.so']),
    ('ofi,,libx.so', ['ofi', 'libnccl-net-ofi.so', 'libx.so', 'libnccl-net-libx.so.so'])])
def test_names_of_plugins(wanted, names):
    assert nccl.plugin_names(Machine({'NCCL_NET_PLUGIN': wanted} if wanted else {}, '/nowhere')) == names


def test_where_plugins_are(tmp_path):
    (tmp_path / 'etc').mkdir()
    (tmp_path / 'etc/ld.so.cache').write_bytes(b'1.1\0libnccl-net.so\0/usr/lib64/libnccl-net.so\0/x/aXso\0')
    for name in ('libnccl-net.so', 'b/libnccl-net.so', 'own.so'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    machine = Machine({'LD_LIBRARY_PATH': f':/nowhere:{tmp_path}/b:{tmp_path}'}, str(tmp_path))
    assert nccl.find_library(machine, 'libnccl-net.so') == f'{tmp_path}/b/libnccl-net.so'
    assert nccl.find_library(Machine({}, str(tmp_path)), 'libnccl-net.so') == '/usr/lib64/libnccl-net.so'
    assert nccl.find_library(Machine({}, str(tmp_path)), 'a.so') is None
    machine.environ['NCCL_NET_PLUGIN'] = f'{tmp_path}/own.so,/nowhere/x.so,libnccl-net.so'
    assert nccl.plugin_files(machine) == [f'{tmp_path}/own.so', f'{tmp_path}/b/libnccl-net.so']


def test_interfaces_of_a_plugin():
    assert nccl.interfaces({'ncclNetPlugin_v10', 'ncclNetPlugin_v9', 'ncclNetPlugin_v', 'ncclCollNetPlugin_v7', 'main'}) == [9, 10]


@pytest.mark.parametrize('name, text, refuses', [
    ('libnccl.so.2', 'Duplicate GPU detected : rank', True), ('librccl.so.1', 'ranks using the same GPU', True),
    ('libnccl.so.2', 'one GPU for each rank', False), ('libother.so', 'Duplicate GPU detected', False)])
def test_two_ranks_on_a_gpu(tmp_path, name, text, refuses):
    path = derecho.shared_library(tmp_path / name, source=f'const char *text = "{text}";')
    assert nccl.refuses_to_share(['/nowhere/libnccl.so.2', str(path)]) == refuses


# --- the start of a program


@pytest.mark.parametrize('name, path, says', [
    ('socket', '{}/socket.py', True), ('json', '{}/json.py', True), ('notpythons', '{}/notpythons.py', False),
    ('socket', '{}/x/socket.py', False), ('a.socket', '{}/socket.py', False)])
def test_a_module_that_hides_pythons_own(monkeypatch, tmp_path, capsys, name, path, says):
    path = path.format(tmp_path)
    error = AttributeError('no create_server')
    with monkeypatch.context() as planted:
        planted.setitem(sys.modules, name, types.SimpleNamespace(__file__=path))
        planted.setattr(sys, '__excepthook__', lambda *words: print(words))
        planted.setenv('PYTHONPATH', f'/x:{tmp_path}')
        program.name_shadows(AttributeError, error, None)
    assert capsys.readouterr() == ('' if says else f'{(AttributeError, error, None)}\n', (
        f"slingtorch: PYTHONPATH: 'import {name}' loads {path} instead of Python's own module {name} (AttributeError: no create_server). "
        'Rename this file, or remove its directory from PYTHONPATH\n') * says)


def test_a_program_gets_its_arguments(monkeypatch):
    monkeypatch.setattr('slingtorch.job.vet.main', lambda words: words)
    monkeypatch.setattr(sys, 'excepthook', None)
    assert program.main('vet', '--rounds', '3') == ['--rounds', '3'] and sys.excepthook == program.name_shadows
