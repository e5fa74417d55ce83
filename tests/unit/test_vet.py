# SPDX-License-Identifier: GPL-2.0-only
"""vet's verdicts over the backend that a training takes, with figures and processes that the tests plant."""
import argparse
import os
import resource
import subprocess
import sys
import time

import pytest

from slingtorch.job import gather, meet, messages, pairs, records, vet
from slingtorch.job.machine import Machine
from testbed import ROOT


def said(number, **more):
    """What a process of a node says at first."""
    return {'number': number, 'lane': 0, 'ready': True, 'backend': 'gloo', 'gpu': '', 'error': '', 'absent': False,
            **more}


def nodes(**different):
    """What the processes of six nodes say at first."""
    return [said(number, **different.get('n%d' % number, {})) for number in range(6)]


def speeds(slow=(), failing=(), one_direction=False, without=(), lane=0):
    """What six nodes receive from each other, with slow ones and some of which no pair works."""
    def received(one, other):
        return ('no route' if {one, other} & set(failing) else
                1e9 if other in slow or one in slow and not one_direction else 10e9)
    return [[lane, one, other, received(one, other), received(other, one)]
            for one in range(6) for other in range(one + 1, 6) if not {one, other} & set(without)]


def test_a_sound_backend():
    assert vet.judge(nodes(), speeds(), 'gloo') == ({}, dict.fromkeys(range(6), 10.0), {})


@pytest.mark.parametrize('planted, says', [
    (speeds(slow=[2]), 'gloo slow: best pair 1.00 GB/s, median 10.00 GB/s'),
    (speeds(slow=[2], one_direction=True), 'gloo slow: best pair 1.00 GB/s'),
    (speeds(failing=[2]), 'gloo fails: none of its pairs worked (no route)'),
])
def test_a_node_that_is_slow_or_fails_over_the_backend(planted, says):
    wrong, _, untested = vet.judge(nodes(), planted, 'gloo')
    assert list(wrong) == [2] and says in wrong[2] and not untested


def test_one_slow_gpu_is_named():
    lanes = [said(number, lane=lane, backend='nccl', gpu='GPU %d (0000:%x1:00.0)' % (lane, lane))
             for number in range(6) for lane in range(4)]
    found = sum([speeds(slow=[4] if lane == 2 else [], lane=lane) for lane in range(4)], [])
    wrong, figures, _ = vet.judge(lanes, found, 'nccl')
    assert wrong == {4: 'nccl, GPU 2 (0000:21:00.0), slow: best pair 1.00 GB/s, median 10.00 GB/s'}
    assert figures[0] == 40 and figures[4] == 31


@pytest.mark.parametrize('different, says', [
    ({'ready': False, 'error': 'RuntimeError: no such interface'},
     'fails: gloo does not start: RuntimeError: no such interface'),
    ({'ready': False, 'error': 'no torch', 'absent': True}, 'fails: gloo does not start: no torch'),
    ({'backend': 'nccl'}, 'fails: its PyTorch uses nccl, the others use gloo'),
])
def test_a_backend_that_does_not_start_on_one_node(different, says):
    wrong, figures, untested = vet.judge(nodes(n3=different), speeds(without=[3]), 'gloo')
    assert wrong == {3: says} and len(figures) == 5 and not untested


def test_what_starts_nowhere():
    absent = [said(number, lane=1, ready=False, error='no GPU 1', absent=True) for number in range(6)]
    assert vet.judge(nodes() + absent, speeds(), 'gloo') == ({}, dict.fromkeys(range(6), 10.0), {1: 'no GPU 1'})
    # it was tried, and is certain
    broken = [said(number, ready=False, error='ImportError: libmkl.so') for number in range(6)]
    assert set(vet.judge(broken, [], 'gloo')[0]) == set(range(6))


@pytest.mark.parametrize('figure, kind, rate, reference, says', [
    (90, 'nccl', 100, 0, []), (49, 'nccl', 100, 0, ['line rate: 2 of 2 nodes: lowest 49.00 GB/s over nccl']),
    (3, 'gloo', 100, 0, []), (0.4, 'gloo', 100, 0, ['line rate: 2 of 2 nodes']), (0.1, 'gloo', 0, 0, []),
    (80, 'nccl', 100, 85, ['reference: 2 of 2 nodes: lowest 80.00 GB/s over nccl, less than the site\'s reference']),
    (86, 'nccl', 100, 85, []),
])
def test_line_rate_and_reference_are_only_said(figure, kind, rate, reference, says):
    lines = vet.judge_rates(['a', 'b'], {0: figure, 1: figure}, kind, {0: rate, 1: rate}, reference)
    assert len(lines) == len(says) and all(line.startswith(text) for line, text in zip(lines, says))


# --- the rounds


class Planted:
    """PyTorch's store as far as pairs.Keeper asks for it; what the processes of each round say is planted."""

    def __init__(self, lanes, answers):
        self.kept = {'lane-%d' % number: meet.messages.dump(said) if isinstance(said, dict) else said
                     for number, said in lanes.items()}
        self.lanes, self.answers, self.asked = lanes, answers, []

    def count(self, key):
        return len(self.lanes) if key == 'lanes' else 2 * len(self.asked[-1])

    def put(self, key, thing):
        self.asked.append(thing['pairs'])
        for pair in thing['pairs']:
            for number in pair:
                said = self.answers(number, len(self.asked) - 1)
                if said is not None:
                    self.kept['did-%d-%d' % (len(self.asked) - 1, number)] = said

    known = meet.Store.known

    def is_there(self, key):
        return key in self.kept

    def raw(self, keys):
        return [self.kept[key] for key in keys]


def lane(rank, **more):
    return {'rank': rank, 'lane': 0, 'lanes': 1, 'node': 'n%d' % rank, 'ready': True, 'backend': 'gloo', 'gpu': '',
            'error': '', 'absent': False, 'rates': {}, **more}


RIGHT = meet.messages.dump({'error': '', 'received': 5e9})


def keeper(nodes, answers, **different):
    """After all rounds of these nodes, whose process number is the rank and one more."""
    one = pairs.Keeper(Planted({rank + 1: different.get('n%d' % rank, lane(rank)) for rank in range(nodes)}, answers))
    one.gather(nodes, time.monotonic() + 0.2)
    one.measure(99)
    return one


def test_each_pair_is_measured_in_both_directions():
    one = keeper(5, lambda number, turn: RIGHT)
    assert sorted(entry[1:3] for entry in one.speeds) == [[a, b] for a in range(5) for b in range(a + 1, 5)]
    assert {speed for entry in one.speeds for speed in entry[3:]} == {5e9}


@pytest.mark.parametrize('says, words', [
    (None, 'it did not answer'), (b'\xff', 'it did not answer'), (b'[[[[', 'it did not answer'),
    (b'{"error": 7}', 'it did not answer'), (b'{"error": "it ended", "received": 1}', 'it ended'),
    (b'{"error": "", "received": "fast"}', ''),
])
def test_what_a_process_says_wrongly_counts_as_failed(says, words):
    one = keeper(6, lambda number, turn: says if number == 3 else RIGHT)
    failed = [text for entry in one.speeds for text in entry[3:] if isinstance(text, str)]
    assert failed and set(failed) == {words}
    assert len([pair for pairs_ in one.store.asked for pair in pairs_ if 3 in pair]) == (
        1 if words == 'it did not answer' else pairs.FAILED)


@pytest.mark.parametrize('said', [b'', b'{', b'[]', {**lane(2), 'rank': '2'}, lane(2, lane=-1), lane(2, node=5)])
def test_a_node_that_comes_in_another_way_did_not_come(said):
    one = keeper(4, lambda number, turn: RIGHT, n2=said)
    assert sorted(said['rank'] for said in one.lanes.values()) == [0, 1, 3] and len(one.speeds) == 3


def test_a_process_of_another_backend_measures_with_nobody():
    one = keeper(4, lambda number, turn: RIGHT, n2=lane(2, backend='nccl'), n3=lane(3, ready=False, error='no hsn0'))
    assert one.kind == 'gloo' and [entry[1:3] for entry in one.speeds] == [[0, 1]]


# --- the process

ALONE = {'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1', 'MASTER_ADDR': '127.0.0.1',
         'MASTER_PORT': '1'}


@pytest.mark.parametrize('code, found', [
    (None, {'error': "ModuleNotFoundError: No module named 'torch'"}),
    ('raise ImportError("libmkl.so is missing")', {'error': 'ImportError: libmkl.so is missing'}),
    ('import os, signal; print("a bug", file=__import__("sys").stderr, flush=True); os.kill(os.getpid(), '
     'signal.SIGSEGV)', {'error': 'it ended with status -11: a bug'}),
])
def test_a_start_that_goes_wrong_is_said(tmp_path, code, found):
    if code:
        (tmp_path / 'torch.py').write_text(code)
    child = messages.Child({'PYTHONPATH': str(tmp_path), 'TMPDIR': str(tmp_path), **ALONE}, 'pairs', 0, 1)
    try:
        assert child.hear(vet.time.monotonic() + 60) == found
    finally:
        child.end()


def test_a_process_that_hangs_is_given_up(tmp_path):
    (tmp_path / 'torch.py').write_text('import select; select.select([], [], [])')
    child = messages.Child({'PYTHONPATH': str(tmp_path), 'TMPDIR': str(tmp_path), **ALONE}, 'pairs', 0, 1)
    try:
        assert child.hear(vet.time.monotonic() + 0.5) == {'error': 'no answer in time'}
    finally:
        child.end()


def verdict(tmp_path, capsys, monkeypatch, lanes, found, references=None, kind='gloo', size=2):
    """What rank 0 of this many nodes prints and writes, where the processes say this."""
    planted = pairs.Keeper(None)
    planted.lanes, planted.speeds, planted.kind, planted.rounds = dict(enumerate(lanes)), found, kind, 1
    planted.measure, planted.tell = (lambda rounds: None), (lambda word: None)
    monkeypatch.setattr(pairs, 'keep', lambda environ, seconds: planted)
    monkeypatch.setattr(vet, 'Child', lambda environ, *words: type('Planted', (), {'end': lambda self: None})())
    vet.run(Machine({**ALONE, 'WORLD_SIZE': str(size)}, str(tmp_path)), sys.stdout, argparse.Namespace(
        rounds=1, write=f'{tmp_path}/vet', json=None, reference=references or {}))
    return capsys.readouterr().out, *((tmp_path / f'vet.{name}').read_text().split() for name in ('vetted', 'cordon'))


def test_rank_0_without_pytorch_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch', None)
    monkeypatch.setattr(vet, 'Child', lambda environ, *words: type('Planted', (), {'end': lambda self: None})())
    with pytest.raises(gather.PeerLost, match='nodes cannot meet at MASTER_ADDR=127.0.0.1, MASTER_PORT=1: Mod.*torch'):
        vet.run(Machine(ALONE, str(tmp_path)), sys.stdout, argparse.Namespace(rounds=1))


@pytest.mark.parametrize('figure, rates, references, word', [
    (40, {'hsn0': 25.0}, {}, 'Vetted'), (0.4, {'hsn0': 25.0}, {}, 'Cordon'), (40, {}, {}, 'Untested'),
    (40, {}, {'gloo': 80}, 'Cordon'), (90, {}, {'gloo': 80}, 'Vetted'),
])
def test_of_two_nodes_the_absolute_figure_decides(tmp_path, capsys, monkeypatch, figure, rates, references, word):
    lanes = [{**lane(rank, rates=rates), 'number': rank} for rank in (0, 1)]
    found = [[0, 0, 1, figure * 1e9, figure * 1e9]]
    out, vetted, cordon = verdict(tmp_path, capsys, monkeypatch, lanes, found, references)
    assert [line.split()[:2] for line in out.splitlines()[2:4]] == [[word + ':', 'n0'], [word + ':', 'n1']]
    assert out.splitlines()[2].endswith('    gloo %.2f GB/s' % figure)
    assert ['n0', 'n1'] == (cordon if word == 'Cordon' else vetted) and not (vetted and cordon)


def test_a_node_that_did_not_come_is_cordoned_and_a_gpu_uses_one_card(tmp_path, capsys, monkeypatch):
    """One GPU of 25 GB/s reaches more than half of its card's rate, though its node has four cards."""
    rates = {'hsn%d' % number: 25.0 for number in range(4)}
    lanes = [{**lane(rank, backend='nccl', rates=rates), 'number': rank} for rank in (0, 1)]
    out, vetted, cordon = verdict(tmp_path, capsys, monkeypatch, lanes, [[0, 0, 1, 20e9, 20e9]], kind='nccl', size=3)
    assert (vetted, cordon) == (['n0', 'n1'], []) and 'yellow' not in out
    assert 'Cordon: (a node of unknown name)    fails: it did not answer' in out


def test_a_node_writes_no_lines_of_its_own(tmp_path, capsys, monkeypatch):
    lanes = [{**lane(rank), 'number': rank} for rank in range(3)]
    lanes[2].update(ready=False, error='\x1b[2J\nVetted: n2', node='n2\nVetted: n3')
    out, vetted, cordon = verdict(tmp_path, capsys, monkeypatch, lanes, [[0, 0, 1, 5e9, 5e9]], size=3)
    assert '\x1b' not in out and len([line for line in out.splitlines() if line.startswith('Vetted: ')]) == 2
    assert (vetted, cordon) == (['n0', 'n1'], [])


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


# --- with-spares under PBS

MPIEXEC = '''#!/bin/bash
# Starts nothing but vet's answer: which hosts are good; and shows how it was called.
echo "mpiexec MASTER_ADDR=$MASTER_ADDR $*"
while [[ $1 != --hostfile ]]; do shift; done
echo "hosts: $(tr '\\n' ' ' < "$2")"
if [[ $* == *--vet* ]]; then
    printf '%s\\n' {good} > "${{@: -1}}.vetted"
    : > "${{@: -1}}.cordon"
fi
'''


def with_spares(directory, *args, good='a c', nodes='a.hsn\na.hsn\nb.hsn\nc.hsn\n', **env):
    (directory / 'nodes').write_text(nodes)
    launcher = directory / 'mpiexec'
    launcher.write_text(MPIEXEC.format(good=good))
    launcher.chmod(0o755)
    env = {'PBS_NODEFILE': str(directory / 'nodes'), 'PBS_JOBID': '12.server', 'SLINGTORCH_VET_DIR': str(directory),
           'PATH': f'{directory}:{os.environ["PATH"]}', **env}
    return subprocess.run(['/bin/bash', ROOT / 'runscripts/with-spares', *args], env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_under_pbs_the_program_runs_on_the_good_nodes(tmp_path):
    done = with_spares(tmp_path, '1', 'mpiexec', '-ppn', '4', '--cpu-bind', 'numa', 'train.py', '-n', '7')
    vetting, first, program, second = done.stdout.splitlines()
    assert done.returncode == 0
    assert vetting.startswith('mpiexec MASTER_ADDR=a.hsn ') and ' -n 3 -ppn 1 ' in vetting
    assert first == 'hosts: a.hsn b.hsn c.hsn '
    assert program.startswith('mpiexec MASTER_ADDR=a.hsn ')
    assert program.endswith(' -n 8 -ppn 4 --cpu-bind numa train.py -n 7') and second == 'hosts: a.hsn c.hsn '


def test_under_pbs_rank_0_goes_where_the_first_good_node_is(tmp_path):
    done = with_spares(tmp_path, '1', 'mpiexec', '--ppn=2', 'train.py', good='c b')
    assert 'mpiexec MASTER_ADDR=b.hsn ' in done.stdout and done.stdout.endswith('hosts: b.hsn c.hsn \n')


@pytest.mark.parametrize('args, env, status, says', [
    (['1', 'mpiexec', 'train.py'], {}, 2, 'give the ranks per node first'),
    (['1', 'mpiexec', '-ppn', '4', '-n', '8', 'train.py'], {}, 2, '-n: with-spares chooses the nodes'),
    (['1', 'mpiexec', '-ppn', '4', '--hostfile', 'x', 'train.py'], {}, 2, '--hostfile: with-spares chooses the nodes'),
    (['3', 'mpiexec', '-ppn', '4', 'train.py'], {}, 2, "leave none of the job's 3"),
    (['1', 'mpiexec', '-ppn', '4', 'train.py'], {'PBS_NODEFILE': '/nowhere'}, 1, 'cannot be read'),
    (['--help'], {}, 0, 'with-spares N srun [OPTIONS] PROGRAM'),
    (['0', 'mpiexec', '-ppn', '4', 'train.py'], {}, 1, '2 of 3 nodes are good, but 3 are needed. Bad ones: b.hsn.'),
])
def test_spares_under_pbs_that_cannot_be(tmp_path, args, env, status, says):
    done = with_spares(tmp_path, *args, **env)
    assert done.returncode == status and says in done.stdout


SRUN = '''#!/bin/bash
echo "srun tasks=${SLURM_GPUS_PER_TASK-}${SLURM_TRES_PER_TASK-} $*"
[[ $* != *--vet* ]] || { echo n1 > "${@: -1}.vetted"; echo n2 > "${@: -1}.cordon"; }
'''


@pytest.mark.parametrize('env, option', [
    ({}, ''), ({'SLURM_GPUS_ON_NODE': '4'}, ''),
    ({'SLURM_GPUS_ON_NODE': '4', 'SLURM_GPUS_PER_TASK': '1'}, '--gpus-per-node=4 '),
    ({'SLURM_GPUS_ON_NODE': '4', 'SLURM_TRES_PER_TASK': 'gres/gpu=1'}, '--gpus-per-node=4 '),
])
def test_under_slurm_one_task_sees_all_gpus_and_the_program_gets_what_the_job_says(tmp_path, env, option):
    (tmp_path / 'srun').write_text(SRUN)
    (tmp_path / 'srun').chmod(0o755)
    done = subprocess.run(['/bin/bash', ROOT / 'runscripts/with-spares', '1', 'srun', 'train.py'], text=True,
                          stdout=subprocess.PIPE, env={
                              'SLURM_JOB_NUM_NODES': '2', 'SLURM_JOB_ID': '7', 'SLINGTORCH_VET_DIR': str(tmp_path),
                              'PATH': f'{tmp_path}:{os.environ["PATH"]}', **env})
    vetting, program = done.stdout.splitlines()
    assert vetting.startswith(f'srun tasks= {option}--nodes=2 --ntasks=2 --ntasks-per-node=1 ')
    kept = env.get('SLURM_GPUS_PER_TASK', env.get('SLURM_TRES_PER_TASK', ''))
    assert program == f'srun tasks={kept} --nodes=1 --exclude={tmp_path}/vet-7.cordon train.py'


def test_gpus_that_this_rank_does_not_see_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Machine, 'gpus', lambda self: [('0000:%d1:00.0' % n, [], 'cuda') for n in range(4)])
    monkeypatch.setattr(vet.look, 'visible_gpus', lambda machine, known: [known[0][0]])
    out, _, _ = verdict(tmp_path, capsys, monkeypatch, [{**lane(0), 'number': 0}], [], size=1)
    assert "3 of a node's 4 GPUs: not tested, since this rank sees only 1." in out and 'Untested: ' in out


@pytest.mark.parametrize('count', ['0', '-1'])
def test_no_round_is_no_verdict(count, capsys):
    with pytest.raises(SystemExit):
        vet.main(['--rounds', count])
    assert 'not a positive number' in capsys.readouterr().err
