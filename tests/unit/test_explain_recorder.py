# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch explain and the files of PyTorch's flight recorder: what they say, and files that are none."""
import os
import pickle
import pathlib
import random
import subprocess
import sys
from unittest.mock import ANY

import pytest

from slingtorch import explain
from slingtorch.explain import recorder
from testbed.expected import expected

ROOT = pathlib.Path(__file__).resolve().parents[2]


def entry(number, name='nccl:all_reduce', state='completed', line=10, **more):
    """One entry, as PyTorch 2.13 writes it."""
    return {'frames': [{'name': 'all_reduce', 'filename': '/env/site-packages/torch/distributed/c10d.py', 'line': 1},
                       {'name': 'train', 'filename': '/home/me/train.py', 'line': line}],
            'process_group': ('0', 'default_pg'), 'collective_seq_id': number, 'p2p_seq_id': 0, 'op_id': number,
            'profiling_name': name, 'input_sizes': [[3]], 'state': state, 'retired': state == 'completed',
            'is_p2p': False, **more}


def dump(entries, ranks='[0, 1, 2, 3]'):
    return {'version': '2.10', 'pg_config': {'0': {'name': '0', 'desc': 'default_pg', 'ranks': ranks}},
            'entries': entries}


def write(directory, dumps, prefix='slingtorch-1-rank-'):
    for rank, contents in dumps.items():
        (directory / ('%s%d' % (prefix, rank))).write_bytes(pickle.dumps(contents))


def said(directory):
    """What the files of a directory tell."""
    (by_rank,), remarks = recorder.find_dumps(str(directory))[0].values(), recorder.find_dumps(str(directory))[1]
    assert remarks == []
    return recorder.explain_dumps(by_rank)


def test_flight_recorder_names_the_rank_that_is_missing(tmp_path, monkeypatch, capsys):
    """With two jobs in one directory: the other one is sound."""
    waiting = [entry(1), entry(2, state='started', line=20)]
    write(tmp_path, {0: dump(waiting), 1: dump(waiting), 2: dump([entry(1, line=55)]), 3: dump(waiting)})
    write(tmp_path, {rank: dump([entry(1), entry(2)]) for rank in range(4)}, 'sound-')
    (tmp_path / 'cut-0').write_bytes(b'\x80\x02')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'sound').mkdir()
    write(tmp_path / 'sound', {0: dump([entry(1)], '[0]')})
    statuses = explain.run(['.']), explain.run(['.'], as_json=True), explain.run(['sound'])
    expected(f'statuses {statuses}\n{capsys.readouterr().out}', 'explain/recorder')


HERE = 'at /home/me/train.py:10'


@pytest.mark.parametrize('dumps, words', [
    # as PyTorch 2.11.0 wrote it on an H200; ranks may give tensors of different sizes to all_to_all
    ({0: dump([entry(1, state='scheduled')], '[0, 1]'), 1: dump([entry(1, state='scheduled', input_sizes=[[9]])], '[0, 1]')},
     ["group default_pg, collective 1: ranks made different calls: rank 0 called nccl:all_reduce [[3]] " + HERE
      + "; rank 1 called nccl:all_reduce [[9]] " + HERE]),
    ({0: dump([entry(1, 'nccl:all_to_all')], '[0, 1]'), 1: dump([entry(1, 'nccl:all_to_all', input_sizes=[[9]])], '[0, 1]')}, []),
    ({0: dump([entry(1, input_sizes=[[3, 3]])], '[0, 1]'), 1: dump([entry(1, input_sizes=[[9]])], '[0, 1]')}, []),
    ({0: dump([entry(1), entry(2, state='started')]), 1: dump([entry(1), entry(2, 'nccl:broadcast', 'started')])},
     ["group default_pg, collective 2: ranks made different calls: rank 0 called nccl:all_reduce [[3]] " + HERE
      + "; rank 1 called nccl:broadcast [[3]] " + HERE, "group default_pg: ranks 2-3 left no file (ended earlier, or could not write)"]),
    ({0: dump([entry(1, state='started')], '[0, 1]'), 1: dump([entry(1), entry(2, state='scheduled')], '[0, 1]')},
     ["group default_pg, collective 2 (nccl:all_reduce [[3]] " + HERE + "): rank 0 did not call it; rank 1 did",
      "  rank 0 last called collective 1, nccl:all_reduce [[3]] " + HERE]),
    ({0: dump([entry(1), entry(2, state='started')], '[0, 1]'), 1: dump([entry(1), entry(2, state='scheduled')], '[0, 1]')},
     ["group default_pg, collective 2 (nccl:all_reduce [[3]] " + HERE + "): all ranks with a file called it, but it did not finish: "
      "the network stalled, or a rank without a file is missing"]),
    ({0: dump([entry(1, 'gloo:all_reduce', '', retired=True)], '[0, 1]')},
     ["group default_pg: rank 1 left no file (ended earlier, or could not write)"]),
    ({rank: dump([entry(1)] if rank == 2 else [], '[0, 1, 2, 3, 4, 5]') for rank in range(6)},
     ["group default_pg, collective 1 (nccl:all_reduce [[3]] " + HERE + "): ranks 0-1,3-5 did not call it; rank 2 did",
      *(f"  rank {rank} had not called any" for rank in (0, 1, 3, 4))]),
    ({0: dump([entry(1), entry(1, 'nccl:recv 0<-1', 'started', 30, is_p2p=True)], '[0]'),
      1: dump([entry(2, 'nccl:send 1->0', is_p2p=True)], '[0]')},
     ["rank 0 is waiting in a send or receive: nccl:recv 0<-1 [[3]] at /home/me/train.py:30"]),
    # two groups of the same name, one without a name, and one that is in no list
    ({rank: {**dump([entry(1 + (rank == 2), process_group=['3', 'tp'])]), 'pg_config': {
        number: {'name': '3', 'desc': 'tp', 'ranks': f'[{number}, {number + 1}]'} for number in (0, 2)}} for rank in range(4)},
     ["group tp, collective 2 (nccl:all_reduce [[3]] " + HERE + "): rank 3 did not call it; rank 2 did",
      "  rank 3 last called collective 1, nccl:all_reduce [[3]] " + HERE]),
    ({0: {'pg_config': {'0': {'name': '7', 'ranks': '[0, 1]'}}, 'entries': [
        entry(1, state='started', process_group=('7', '')), entry(4, state='started', process_group='none')]}},
     ["group 7, collective 1 (nccl:all_reduce [[3]] " + HERE + "): all ranks with a file called it, but it did not finish: the "
      "network stalled, or a rank without a file is missing", "group 7: rank 1 left no file (ended earlier, or could not write)"]),
])
def test_flight_recorder_says(tmp_path, dumps, words):
    write(tmp_path, dumps)
    assert said(tmp_path) == words


def test_what_is_kept_of_a_collective():
    frames = [{'filename': '/a/torch/x.py', 'line': 1}, 3, {'filename': '??', 'line': 2}, {'filename': '<frozen y>', 'line': -4}]
    raw = {'seq_id': 7, 'profiling_name': 'x' * 600, 'frames': frames, 'input_sizes': [[[[[5]]]], (1 << 63, 2.5, (1 << 63) - 1), *range(8)]}
    kept = recorder.entry_of(raw)
    assert kept == {'number': 7, 'name': 'x' * 500, 'state': '', 'retired': False, 'p2p': False, 'group': '',
                    'sizes': [[[[0]]], [0, 0, (1 << 63) - 1], 0, 1, 2, 3, 4, 5],
                    'frames': [('/a/torch/x.py', 1), ('??', 2), ('<frozen y>', 0)]}
    assert recorder.call_text({**kept, 'name': 'x', 'sizes': 0}) == 'x 0 at /a/torch/x.py:1'    # none is the program's own
    assert recorder.call_text(recorder.entry_of({'frames': 5, 'process_group': ['1', None], 'collective_seq_id': 'x'})) == ' 0'
    assert recorder.entry_of({'process_group': ['1', None]})['group'] == '1'


def test_what_is_no_file_of_the_flight_recorder(tmp_path, monkeypatch):
    good = pickle.dumps(dump([entry(1)], ranks=5))
    for name, content in {'a-0': b'', 'a-1': b'text', 'a-2': pickle.dumps([1]), 'a-3': pickle.dumps({'entries': 1}), 'a': good,
                          'a-4': good + bytes(999), 'a-5': good[:-1], 'a-8': b'\x80\x02I5\n0' + good[2:],
                          'a-9': b'\x80\x02L5\n0' + good[2:], 'b-6': good, 'a-7x': good}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / 'b-8').mkdir()
    monkeypatch.setattr(recorder, 'MAX_DUMP_BYTES', len(good) + 10)
    dumps, remarks = recorder.find_dumps(str(tmp_path))
    assert {prefix: list(by_rank) for prefix, by_rank in dumps.items()} == {'b-': [6]}
    assert [remark.partition(' is not a file of the flight recorder, or was cut off while it was written: ') for remark in remarks] == [
        (f'{tmp_path}/{name}', ANY, why) for name, why in (('a-5', 'the end is missing'), ('a-8', '73'), ('a-9', '76'))]
    assert dumps['b-'][6]['groups'] == [('default_pg', (5,))]


class Trap:
    """What a foreign pickle could do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_foreign_pickle_runs_nothing(tmp_path):
    files = tmp_path / 'files'
    files.mkdir()
    (files / 'rank-0').write_bytes(pickle.dumps({'entries': [Trap(tmp_path / 'trapped')]}))
    (files / 'rank-1').write_bytes(pickle.dumps(dump([entry(1)]))[:40])
    (files / 'notes-2').write_text('not a pickle')
    dumps, [first, second] = recorder.find_dumps(str(files))
    assert dumps == {} and not (tmp_path / 'trapped').exists()
    assert first.endswith('it names posix.mkdir, but the flight recorder never writes a class') and 'rank-1 is not a file' in second


# a memo of 67 million places; texts, numbers, frames and a bytearray that are longer than the file
HUGE = [b'\x80\x02]r\xff\xff\xff\x07.', b'\x80\x04\x8e\xff\xff\xff\xff\x0f\x00\x00\x00.', b'\x80\x02X\xff\xff\xff\x7f',
        b'\x80\x05\x96\x00\x00\x00\x20\x00\x00\x00\x00.', b'\x80\x02\x8b\xff\xff\xff\x7f.', b'\x80\x04\x95\xff\xff\xff\xff\x0f\x00\x00\x00.',
        b'\x80\x02' + b']' * 90000 + b'.']


@pytest.mark.parametrize('content', HUGE, ids=range(len(HUGE)))
def test_a_malformed_file_takes_no_memory(tmp_path, content):
    """966 MB once for nine bytes. Not by a limit: what runs into one only becomes a remark."""
    (tmp_path / 'x-rank-0').write_bytes(content)
    script = ("import re, sys; sys.path.insert(0, %r)\nfrom slingtorch.explain import recorder\n"
              "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read()).group(1))\n"
              "before = peak()\nprint(recorder.find_dumps(%r)[0], peak() - before < 50 << 10)\n"
              % (str(ROOT), str(tmp_path)))
    done = subprocess.run([sys.executable, '-c', script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert (done.stdout, done.stderr) == ('{} True\n', '')


def test_mutated_files_end_in_an_answer_or_a_remark(tmp_path):
    """200 files, each with some bytes that are others: a value or one remark, never a traceback."""
    chance = random.Random(38)
    whole = [pickle.dumps(dump([entry(1), entry(2, state='started')]), protocol) for protocol in (2, 3, 4, 5)]
    odd = [None, [], {}, 'x', -1, 1 << 70, 1.5, [[]], {'a': 1}, True]
    for number in range(200):
        if number % 2:
            content = bytearray(chance.choice(whole))
            for _ in range(chance.randint(1, 4)):
                content[chance.randrange(len(content))] = chance.randrange(256)
        else:   # well formed, with values of other kinds
            changed = dump([entry(1), entry(2, state='started')])
            place = chance.choice([changed, changed['entries'][0], changed['entries'][0]['frames'][0],
                                   changed['pg_config'], changed['pg_config']['0']])
            place[chance.choice(list(place))] = chance.choice(odd)
            content = pickle.dumps(changed)
        (tmp_path / 'm-rank-0').write_bytes(bytes(content))
        (tmp_path / 'm-rank-1').write_bytes(whole[0])
        dumps, remarks = recorder.find_dumps(str(tmp_path))
        for by_rank in dumps.values():
            assert all(isinstance(text, str) for text in recorder.explain_dumps(by_rank) + remarks)
