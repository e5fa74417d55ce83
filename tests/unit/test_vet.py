# SPDX-License-Identifier: GPL-2.0-only
"""vet's verdicts over the backend that a training takes, with figures and processes that the tests plant."""
import argparse
import json
import os
import re
import resource
import signal
import sys
import types
from unittest import mock

import pytest

from slingtorch.job import check, gather, meet, messages, pairs, records, vet
from slingtorch.job.machine import Machine
from testbed import raising
from testbed.expected import expected


def said(**more):
    """What a node says at first."""
    return {'node': 'n', 'rank': 1, 'ranks': 1, 'ready': True, 'error': '', 'gpus': 0, 'rates': {}, **more}


def nodes(count=6, **different):
    """What these nodes say at first; n3={...} for what node 3 says otherwise."""
    return {number: said(node='n%d' % number, **different.get('n%d' % number, {})) for number in range(count)}


@pytest.mark.parametrize('best, says', [
    (1.0, 'nccl, GPU 2, slow: best pair 1.00 GB/s, median 10.00 GB/s'),
    ('no answer within 10 s', 'nccl, GPU 2, fails: none of its pairs worked (no answer within 10 s)'),
])
def test_one_slow_or_failing_gpu_is_named(best, says):
    found = {number: [10.0] * 4 for number in range(6)}
    found[4][2] = best
    wrong, figures = vet.judge({number: said(gpus=4) for number in range(6)}, 'nccl on 4 GPUs', found)
    assert wrong == {4: says}
    assert figures[0] == 40 and figures[4] in (30, 31)
    broken = {number: said(error='ImportError: libmkl.so') for number in range(6)}
    assert vet.judge(broken, '', {}) == (
        dict.fromkeys(range(6), 'fails: the backend does not start: ImportError: libmkl.so'), {})


@pytest.mark.parametrize('figure, gpus, rates, references, says', [
    (90, 1, [100], {}, ''), (3, 0, [100], {}, ''), (0.1, 0, [0], {}, ''), (86, 1, [100], {'nccl': 85}, ''), (80, 1, [100], {'gloo': 85}, ''),
    (49, 1, [100], {}, '1 of 2 nodes: lowest 49.00 GB/s, less than 0.5 of the line rate of its network cards (50 GB/s)'),
    (0.4, 0, [25], {}, '1 of 2 nodes: lowest 0.40 GB/s, less than 0.02 of the line rate of its network cards (0.5 GB/s)'),
    (80, 1, [100], {'nccl': 85}, "2 of 2 nodes: lowest 80.00 GB/s, less than the site's reference (85 GB/s)"),
    (20, 1, [25] * 4, {}, ''), (20, 8, [25, 25], {},
     '2 of 2 nodes: lowest 20.00 GB/s, less than 0.5 of the line rate of its network cards (25 GB/s)'),
])
def test_line_rate_and_reference(figure, gpus, rates, references, says):
    """A GPU uses at most one card, and all of them no more than there are."""
    there = nodes(2, **{'n%d' % number: {'gpus': gpus, 'rates': {'hsn%d' % card: rate for card, rate in enumerate(rates)}}
                        for number in (0, 1)})
    _, low = vet.table_of(there, vet.uses(there[0]), {0: [figure], 1: [figure + 1]}, references)
    assert low == says


# --- the rounds


@pytest.fixture
def conduct(tmp_path, capsys, monkeypatch):
    """What rank 0 of this many nodes prints, writes and asks the store, at the time 100, where the nodes say this."""
    def run(come, report, size=None, reference=(), rounds=8, hosts=''):
        def reports(numbers, end):
            found = {number: report(number) for number in numbers if report(number) != 'none'}
            return {number: report if messages.has_form(report, {}) else None for number, report in found.items()}
        came = {number: said if messages.has_form(said, meet.COMES) else None for number, said in enumerate(come, 1)}
        store = mock.Mock(**{'others.return_value': came, 'reports.side_effect': reports, 'word.side_effect': meet.NotMet('gone')})
        monkeypatch.setattr(vet, 'time', types.SimpleNamespace(monotonic=lambda: 100))
        monkeypatch.setattr(meet, 'Store', store)
        store.return_value = store
        monkeypatch.setattr(vet, 'Child', mock.Mock())
        status = vet.run(Machine({**ALONE, 'WORLD_SIZE': str(size or len(come)), 'SLURM_STEP_NODELIST': hosts}, str(tmp_path)),
                         argparse.Namespace(rounds=rounds, write=f'{tmp_path}/vet', json=f'{tmp_path}/json', reference=reference))
        lists = ['%s: %s' % (name, (tmp_path / f'vet.{name}').read_text().split('\n')[:-1]) for name in ('vetted', 'cordon')]
        said = '; '.join(str(call).replace('call.', '') for call in store.mock_calls[1:])
        return '\n'.join([capsys.readouterr().out + said, *lists, 'status: %d' % status, ''])
    return run


def report(figure):
    return lambda number: {'best': [figure]}


def come(count, **more):
    return [said(node='n%d' % number, rank=number + 1, **more) for number in range(count)]


def test_what_rank_0_says_and_asks(conduct, tmp_path):
    """All nodes that start take part; one has no partner; two nodes are compared with absolute figures."""
    there = come(6)
    there[2].update(rates={'hsn0': 25.0})
    there[3].update(error='no hsn0')
    there[4].update(gpus=4)
    figures = {1: 5.0, 2: 6.0, 3: 'no route', 6: 1}
    text = conduct(there, lambda number: {'best': [figures[number]]}, size=8, reference=[('gloo', 2.5)], hosts='n[0-6]')
    text += json.dumps(json.loads((tmp_path / 'json').read_text())) + '\n'
    text += conduct(come(3), lambda number: {'best': [5.0] if number != 3 else []}, rounds=1)
    cards = {'hsn%d' % number: 25.0 for number in range(4)}
    text += conduct(come(3, gpus=2, rates=cards), lambda number: {
        'best': [20.0, 20.5], 'network': 'AWS Libfabric', 'provider': 'cxi' if number == 2 else ''}, size=4)
    for figure, rates, reference in ((40, {'a': 25.0}, ()), (0.4, {'a': 25.0}, ()), (40, {}, ()), (40, {}, [('gloo', 80)])):
        text += conduct(come(2, rates=rates), report(float(figure)), reference=reference)
    text += conduct(come(1), report(5.0))
    expected(text, 'vet')


@pytest.mark.parametrize('says', [
    'none', None, 7, [], {'best': 'fast'}, {'best': [True]}, {'best': [1.0, 1.0]}, {'best': {}}, {}])
def test_a_report_in_another_way_is_none(conduct, says):
    text = conduct(come(4), lambda number: says if number == 3 else {'best': [5.0]})
    assert 'Cordon: n2    fails: it did not answer\n' in text and "vetted: ['n0', 'n1', 'n3']\ncordon: ['n2']" in text


@pytest.mark.parametrize('wrong', [None, {**said(), 'gpus': '2'}, {**said(), 'error': 5}, {**said(), 'rates': {'hsn0': 'fast'}}, {'rank': 2}])
def test_a_node_that_comes_in_another_way_did_not_come(conduct, wrong):
    text = conduct([*come(2), wrong, *come(1)], report(5.0))
    assert "'ring': [1, 2, 4]" in text and "vetted: ['n0', 'n0', 'n1']\ncordon: []" in text
    assert 'Cordon: (a node of unknown name)    fails: it did not answer\n' in text and text.endswith('status: 1\n')


def test_a_node_writes_no_lines_of_its_own(conduct):
    there = come(3)
    there[2].update(error='\x1b[2J\nVetted: n2', node='n2\nVetted: n3')
    text = conduct(there, lambda number: {'best': [5.0], 'network': 'a\nVetted: n4\x1b'})
    assert '\x1b' not in text and len([line for line in text.splitlines() if line.startswith('Vetted: ')]) == 2
    assert "vetted: ['n0', 'n1']\ncordon: []" in text


# --- the process

ALONE = {'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1', 'MASTER_ADDR': '127.0.0.1',
         'MASTER_PORT': '1'}


@pytest.mark.parametrize('code, says', [
    (None, "^ModuleNotFoundError: No module named 'torch'$"),
    ('raise ImportError("libmkl.so is missing")', '^ImportError: libmkl.so is missing$'),
    # not SIGSEGV: an MPI that another test has loaded handles it
    ('import os, signal; os.write(2, b"a bug\\n==="); os.kill(os.getpid(), signal.SIGKILL)', '^-9: a bug$'),
])
def test_a_start_that_goes_wrong_is_said(tmp_path, monkeypatch, code, says):
    if code:
        (tmp_path / 'torch.py').write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    child = messages.Child(pairs.play)
    said = child.hear(vet.time.monotonic() + 60) or {}
    assert re.search(says, said.get('error') or child.end())


def test_a_process_that_hangs_is_given_up(tmp_path, monkeypatch):
    (tmp_path / 'torch.py').write_text('import select; select.select([], [], [])')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vet, 'seconds_to_wait', lambda environ: 0.1)
    with pytest.raises(gather.PeerLost, match='^no answer in time$'):
        vet.run(Machine({**ALONE, 'RANK': '1', 'WORLD_SIZE': '2'}, str(tmp_path)), None)


def test_only_the_first_rank_of_a_node_measures():
    assert vet.run(Machine({**ALONE, 'RANK': '1', 'LOCAL_RANK': '1', 'WORLD_SIZE': '2'}), None) == 0
    with pytest.raises(gather.Usage, match='^WORLD_SIZE is not set'):
        vet.run(Machine({**ALONE, 'WORLD_SIZE': ''}), None)


@pytest.mark.parametrize('said, torch, says', [
    (None, True, 'why not: refused'), (None, False, 'ModuleNotFoundError: import of torch halted; None in sys.modules'),
    *((said, True, 'the node of rank 0 sent a message that this version of slingtorch does not know') for said in (
        {'ring': [1], 'rounds': 2}, {'ring': [1], 'rounds': -1}, {'ring': 1, 'rounds': 0})),
    (7, True, 'ZeroDivisionError: division by zero'),
])
def test_a_node_that_cannot_take_part_says_why(monkeypatch, said, torch, says):
    monkeypatch.setitem(sys.modules, 'torch', torch and mock.MagicMock(**{'distributed.is_nccl_available.return_value': False}) or None)
    monkeypatch.setattr(pairs, 'Exchange', lambda gpu: None)
    monkeypatch.setattr(pairs.meet, 'Store', raising(meet.NotMet('refused')) if said is None else (
        lambda *_: types.SimpleNamespace(number=1, join=lambda *_: 1 / 0 if said == 7 else said)))
    monkeypatch.setattr(pairs.meet, 'why_not', lambda environ, text: 'why not: ' + text)
    monkeypatch.setattr(os, 'environ', dict(ALONE))
    told = []
    pairs.play(types.SimpleNamespace(send=told.append))
    assert told == [{'error': says}]


@pytest.mark.parametrize('answers, result', [
    ([{'longest': 7}, {'word': '0'}], 0), ([{'longest': 7}, {'word': '1'}], 1),
    ([{'error': 'it\nfails'}], 'it\nfails'), ([{'longest': 7}, None], 'it ended with status 9: a bug'),
])
def test_what_another_node_says_in_the_end(monkeypatch, answers, result):
    ends, given = [], iter(answers)
    child = types.SimpleNamespace(hear=lambda end: ends.append(end) or next(given), ended=lambda: True,
                                  end=lambda: ends.append('end') or '9: a bug')
    monkeypatch.setattr(vet, 'Child', lambda function: child)
    monkeypatch.setattr(vet, 'time', types.SimpleNamespace(monotonic=lambda: 100))
    machine = Machine({**ALONE, 'RANK': '1', 'WORLD_SIZE': '2', 'SLINGTORCH_CHECK_SECONDS': '20'})
    if isinstance(result, int):
        assert vet.run(machine, None) == result
    else:
        with pytest.raises(gather.PeerLost) as lost:
            vet.run(machine, None)
        assert str(lost.value) == result
    assert ends[:len(answers)] == [160, 117][:len(answers)] and ends[-1] == 'end'


@pytest.mark.parametrize('program', [vet, check])
def test_an_ignored_sigchld_changes_nothing(monkeypatch, program):
    monkeypatch.setattr(gather, 'guarded', lambda name, *_: signal.getsignal(signal.SIGCHLD))
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert program.main([]) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGCHLD, before)


def calls(made):
    """The calls of a mock, as text."""
    return [re.sub(r"call\.|<Mag[^>]*name='mock\.([^']*)' id='\d+'>", r'\1', str(call)) for call in made.mock_calls]


@pytest.mark.parametrize('gpu, says', [
    (None, ["device('cpu')", "distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, datetime.timedelta(seconds=10))"]),
    (0, ["device('cuda', 0)", "distributed.ProcessGroupNCCL(distributed.HashStore(), 0, 1, datetime.timedelta(seconds=3600))"])])
def test_what_is_tried_on_a_node_alone(monkeypatch, gpu, says):
    torch = mock.MagicMock()
    monkeypatch.setitem(sys.modules, 'torch', torch)
    monkeypatch.setitem(sys.modules, 'torch.distributed', torch.distributed)
    one = pairs.Exchange(gpu)
    made = [call for call in calls(torch) if not call.startswith('distributed.HashStore')]
    group = says[1].partition('(')[0]
    assert made == [says[0], 'zeros(33554432, dtype=uint8, device=device())', says[1], 'zeros().__getitem__(slice(None, 4, None))',
                    f'{group}().allreduce([zeros().__getitem__()])', f'{group}().allreduce().wait()',
                    *['cuda.synchronize(device())'] * (gpu == 0)]
    assert (one.best, one.why, len(one.kept)) == (0.0, 'no answer within 10 s', 1)


@pytest.mark.parametrize('gpu, ends, sends', [(None, 0, ['32 MiB', '8 MiB']), (0, 3, ['32 MiB', '8 MiB']), (0, 99, None)])
def test_a_volley(monkeypatch, gpu, ends, sends):
    """Of messages of 32 MiB at most; that of a GPU is over when the GPU says so, or there is an answer too late."""
    clock, sent, waited = [0], [], []
    monkeypatch.setattr(pairs, 'time', types.SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda more: clock.append(clock.pop() + 1)))
    one = pairs.Exchange.__new__(pairs.Exchange)
    one.gpu, one.buffer = gpu, range(pairs.MESSAGE)
    work = types.SimpleNamespace(is_completed=lambda: clock[0] >= ends, wait=lambda: waited.append(1))
    transfer = lambda data, other, tag: sent.append((f'{len(data[0]) >> 20} MiB', other, tag)) or work
    if sends:
        assert one.volley(transfer, 1, 40 << 20, 10) == ends and len(waited) == 2
        assert sent == [(size, 1, 0) for size in sends]
    else:
        with pytest.raises(RuntimeError, match='^no answer$'):
            one.volley(transfer, 1, 4, 10)
        assert clock == [11]


def test_what_a_node_does_in_its_rounds(monkeypatch):
    """Of three, on two GPUs. In its second round another one hangs; it has no partner in a round; it does not take part."""
    text, skipped = '', 'Thread|torch|Machine'
    for number, rounds in ((2, 3), (1, 1), (4, 1)):
        def get(key, end):
            if key == 'next-1':
                raise meet.NotMet('late')
        made = mock.MagicMock()
        made.torch.distributed.is_nccl_available.return_value, made.torch.cuda.device_count.return_value = True, 2
        made.Machine.return_value = types.SimpleNamespace(node='n1', line_rates=lambda: {'hsn0': 25.0})
        made.Store.return_value = made.store
        made.store.number, made.store.join.return_value, made.store.get.side_effect = number, {'ring': [1, 2, 3], 'rounds': rounds}, get
        made.store.count.side_effect = lambda key, more: 3 - (key == 'done-1')
        made.Exchange.side_effect = lambda gpu: types.SimpleNamespace(
            best=2.5 * gpu, why='no route', meet=lambda store, rank, key: made.meet(gpu, rank, key))
        made.Thread.side_effect = lambda target, args, daemon: types.SimpleNamespace(start=lambda: target(*args), join=made.join)
        made.heard.return_value, made.store.report.return_value = {'network': 'Socket'}, '1'
        with monkeypatch.context() as planted:
            for place, name, value in (
                    (pairs, 'Exchange', made.Exchange), (pairs.meet, 'Store', made.Store), (pairs, 'Machine', made.Machine),
                    (pairs, 'time', types.SimpleNamespace(monotonic=lambda: 100)), (pairs, 'threading', made),
                    (pairs.messages, 'scratch_file', lambda: 'log'), (pairs.nccl, 'log_into', made.log_into),
                    (pairs.nccl, 'heard', made.heard), (os, 'environ', {**ALONE, 'RANK': '1', 'WORLD_SIZE': '3'})):
                planted.setattr(place, name, value)
            planted.setitem(sys.modules, 'torch', made.torch)
            pairs.take_part(types.SimpleNamespace(send=made.send))
        text += '\n'.join(call for call in calls(made) if not re.match(skipped, call)) + '\n'
        skipped += '|log_into|Exchange|Store|heard'
    expected(text, 'vet-node')


@pytest.mark.parametrize('gpu', [0, None])
def test_a_pair_that_fails_is_an_answer_and_leaves_no_kernel(monkeypatch, gpu):
    aborted = []
    one = pairs.Exchange.__new__(pairs.Exchange)
    one.gpu, one.best, one.dist = gpu, 0.0, types.SimpleNamespace(PrefixStore=lambda name, store: None)
    one.pair = raising(RuntimeError('no route'))
    one.group = lambda *_: types.SimpleNamespace(abort=lambda: aborted.append(1))
    one.meet(types.SimpleNamespace(another=lambda: types.SimpleNamespace(store=None)), 0, 'pair-1-2')
    assert (one.best, one.why, len(aborted)) == (0.0, 'RuntimeError: no route', int(gpu == 0))


def test_the_best_pair_counts(monkeypatch):
    said, speeds = [], iter([2e9, 3e9, 1e9])
    one = pairs.Exchange.__new__(pairs.Exchange)
    one.gpu, one.best, one.dist = 7, 0.0, types.SimpleNamespace(PrefixStore=lambda name, store: (name, store))
    one.pair, one.group = lambda *words: said.append(words) or next(speeds), lambda *words: words
    monkeypatch.setattr(pairs, 'time', types.SimpleNamespace(monotonic=lambda: 100))
    for key in 'abc':
        one.meet(types.SimpleNamespace(another=lambda: types.SimpleNamespace(store='own')), 1, key)
    own = types.SimpleNamespace(store='own')
    assert one.best == 3 and said[0] == ((('a-7', 'own'), 1, 2), own, 1, 'a-7', 110)


def test_rank_0_without_pytorch_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch', None)
    monkeypatch.setattr(vet, 'Child', lambda function: type('Planted', (), {'end': lambda self: None})())
    with pytest.raises(gather.PeerLost, match='nodes cannot meet at MASTER_ADDR=127.0.0.1, MASTER_PORT=1: Mod.*torch'):
        vet.run(Machine(ALONE, str(tmp_path)), argparse.Namespace(rounds=1))


def test_lists_are_written_whole_or_not_at_all(tmp_path):
    """Also the one that has room where the other has none: they belong together."""
    names = [f'{tmp_path}/vet.vetted', f'{tmp_path}/vet.cordon']
    records.write_whole(dict.fromkeys(names, 'n1\n'))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as a full disk, in the middle of a file
    try:
        with pytest.raises(OSError):
            records.write_whole(dict(zip(names, ('n3\n', 'n4\n' * 50))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {str(path): path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(names, 'n1\n')


@pytest.mark.parametrize('option, text, says', [
    *(('reference', text, f"'{text}' is not a reference: write nccl=80 or gloo=2.5")
      for text in ('nccl', 'nccl=fast', 'ncl=80', 'gloo=nan', 'gloo=-1', 'gloo=2.5x')),
    *(('rounds', text, f'vet: error: --rounds {text} is not a positive number') for text in ('0', '-1'))])
def test_what_would_compare_nothing_is_refused(option, text, says, capsys):
    with pytest.raises(SystemExit):
        vet.main([f'--{option}', text])
    assert capsys.readouterr().err.endswith(f'{says}\n')


@pytest.mark.parametrize('rank', [0, 1])
def test_the_speed_of_a_pair_is_the_mean_of_both_directions(monkeypatch, rank):
    """Of the largest volley: 4 MiB there in 0.1 s and back in 0.3 s. What rank 0 has measured counts for both."""
    sent, seconds = [], {'send': 0.1, 'recv': 0.3}
    answers = {'p-4': [65536, 1.0], 'p-65536': [524288, 2.0], 'p-524288': [4194304, 3.0], 'p-4194304': [0, 20971520.0]}
    store = types.SimpleNamespace(put=lambda key, thing: answers.update({key: thing}), get=lambda key, _: answers[key])
    one = pairs.Exchange.__new__(pairs.Exchange)

    def volley(transfer, other, size, _):
        sent.append(size)
        return seconds[transfer] * (1 if size > 2 << 20 or size == 4 else 1e-3)     # the first one connects
    monkeypatch.setattr(one, 'volley', volley)
    speed = one.pair(types.SimpleNamespace(send='send', recv='recv'), store, rank, 'p', 0)
    assert speed == pytest.approx(2 * (4 << 20) / 0.4) == 20971520 and sent[::2] == [4, 64 << 10, 512 << 10, 4 << 20]
