# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch explain and the files of PyTorch's flight recorder: what they say, and files that are none."""
import json
import os
import pickle
import pathlib
import random
import subprocess
import sys

import pytest

from slingtorch.explain import recorder
from test_explain import command

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


def test_flight_recorder_names_the_rank_that_is_missing(tmp_path):
    waiting = [entry(1), entry(2, state='started', line=20)]
    write(tmp_path, {0: dump(waiting), 1: dump(waiting), 2: dump([entry(1, line=55)]), 3: dump(waiting)})
    done = command(tmp_path)
    shown = ' '.join(done.stdout.decode().split())
    assert done.returncode == 0
    assert ('group default_pg, collective 2 (nccl:all_reduce [[3]] at /home/me/train.py:20): rank 2 did not call it; '
            'ranks 0-1,3 did') in shown
    assert 'rank 2 last called collective 1, nccl:all_reduce [[3]] at /home/me/train.py:55' in shown


@pytest.mark.parametrize('dumps, words', [
    ({0: dump([entry(1, state='started')]), 1: dump([entry(1, 'nccl:broadcast', 'started')])},
     'ranks made different calls: rank 0 called nccl:all_reduce'),
    ({0: dump([entry(1, state='started')], '[0, 1]'), 1: dump([entry(1, state='scheduled')], '[0, 1]')},
     'all ranks with a file called it, but it did not finish'),
    ({0: dump([entry(1, state='started')], '[0, 1]')}, 'rank 1 left no file'),
    ({0: dump([entry(1, state='started')], '[0, 1]'), 1: dump([], '[0, 1]')}, 'rank 1 had not called any'),
    ({0: dump([entry(1), entry(1, 'nccl:recv 0<-1', 'started', 30, is_p2p=True)], '[0]')},
     'rank 0 is waiting in a send or receive: nccl:recv 0<-1 [[3]] at /home/me/train.py:30'),
])
def test_flight_recorder_says(tmp_path, dumps, words):
    write(tmp_path, dumps)
    assert words in ' '.join(command(tmp_path).stdout.decode().split())


def test_flight_recorder_of_a_sound_job(tmp_path):
    write(tmp_path, {rank: dump([entry(1), entry(2)]) for rank in range(4)})
    done = command(tmp_path)
    assert done.returncode == 3 and b'every collective that started also finished' in done.stdout


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
    done = command(files)
    shown = done.stdout.decode()
    assert done.returncode == 3 and not (tmp_path / 'trapped').exists()
    assert 'rank-0 is not a file of the flight recorder' in shown and 'rank-1 is not a file' in shown
    assert 'contains no files of PyTorch' in shown


# a memo of 67 million places; texts, numbers and frames that are longer than the file
HUGE = [b'\x80\x02]r\xff\xff\xff\x07.', b'\x80\x04\x8e\xff\xff\xff\xff\x0f\x00\x00\x00.', b'\x80\x02X\xff\xff\xff\x7f',
        b'\x80\x02\x8b\xff\xff\xff\x7f.', b'\x80\x04\x95\xff\xff\xff\xff\x0f\x00\x00\x00.',
        b'\x80\x02' + b']' * 90000 + b'.',
        b'{' + b'"a":[' * 90000]


@pytest.mark.parametrize('content', HUGE, ids=range(len(HUGE)))
def test_a_malformed_file_takes_no_memory(tmp_path, content):
    """966 MB once for nine bytes. The process may have 50 MB more than what it has before it reads."""
    (tmp_path / 'x-rank-0').write_bytes(content)
    script = ("import sys; sys.path.insert(0, %r)\nfrom slingtorch.explain import recorder\nimport resource\n"
              "pages = int(open('/proc/self/statm').read().split()[0])\nlimit = pages * 4096 + (50 << 20)\n"
              "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\nprint(recorder.find_dumps(%r)[0])\n"
              % (str(ROOT), str(tmp_path)))
    done = subprocess.run([sys.executable, '-c', script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert (done.stdout, done.stderr) == ('{}\n', '')


def test_mutated_files_end_in_an_answer_or_a_remark(tmp_path):
    """2,000 files, each with some bytes that are others: a value or one remark, never a traceback."""
    chance = random.Random(38)
    whole = [pickle.dumps(dump([entry(1), entry(2, state='started')]), protocol) for protocol in (2, 3, 4, 5)]
    whole.append(json.dumps(dump([entry(1), entry(2, state='started')])).encode())
    odd = [None, [], {}, 'x', -1, 1 << 70, 1.5, [[]], {'a': 1}, True]
    for number in range(2000):
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
