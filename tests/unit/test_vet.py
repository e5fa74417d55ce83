# SPDX-License-Identifier: GPL-2.0-only
"""vet's verdicts over the backend that a training takes, with figures and processes that the tests plant."""
import os
import resource
import subprocess
import sys
import time

import pytest

from slingtorch.commands.check import reference_options
from slingtorch.job import meet, messages, pairs, vet
from slingtorch.job.machine import Machine
from testbed import ROOT

NAMES = ['n%d' % number for number in range(6)]
GOOD = {'ready': True, 'backend': 'gloo', 'gpu': '', 'seconds': 1.0, 'port': 1}
NO_TORCH = {'error': 'no torch', 'absent': True}


def speeds(nodes=6, slow=(), failing=(), one_direction=False):
    """What these nodes tell each other: slow ones, and those of which no pair works."""
    return {(one, other): 'no route' if {one, other} & set(failing) else
            1e9 if {one} & set(slow) or {other} & set(slow) and not one_direction else 10e9
            for one in range(nodes) for other in range(nodes) if one != other}


def states(**different):
    """What each of six nodes says at first: one process with gloo, unless a test says otherwise of n3 ..."""
    return {number: different.get(name, [GOOD]) for number, name in enumerate(NAMES)}


def gpus(count=4):
    return [dict(GOOD, backend='nccl', gpu='GPU %d (0000:%x1:00.0)' % (lane, lane)) for lane in range(count)]


def test_a_sound_backend():
    assert vet.judge_backend(NAMES, states(), {0: speeds()}) == ({}, dict.fromkeys(range(6), 10.0), [])


@pytest.mark.parametrize('planted, says', [
    (speeds(slow=[2]), 'gloo slow: best pair 1.00 GB/s, median 10.00 GB/s'),
    (speeds(slow=[2], one_direction=True), 'gloo slow: best pair 1.00 GB/s'),
    (speeds(failing=[2]), 'gloo fails: none of its pairs worked (no route)'),
])
def test_a_node_that_is_slow_or_fails_over_the_backend(planted, says):
    wrong, _, untested = vet.judge_backend(NAMES, states(), {0: planted})
    assert list(wrong) == [2] and says in wrong[2] and not untested


def test_one_slow_gpu_is_named():
    wrong, figures, _ = vet.judge_backend(NAMES, {number: gpus() for number in range(6)}, {
        lane: speeds(slow=[4] if lane == 2 else []) for lane in range(4)})
    assert wrong == {4: 'nccl, GPU 2 (0000:21:00.0), slow: best pair 1.00 GB/s, median 10.00 GB/s'}
    assert figures[0] == 40 and figures[4] == 31


@pytest.mark.parametrize('said, says', [
    ([{'error': 'RuntimeError: no such interface'}], 'fails: gloo does not start: RuntimeError: no such interface'),
    ([NO_TORCH], 'fails: gloo does not start: no torch'),
    ([{'error': 'no answer in time', 'absent': True}], 'fails: gloo does not start: no answer in time'),
    ([dict(GOOD, backend='nccl')], 'fails: its PyTorch uses nccl, the others use gloo'),
])
def test_a_backend_that_does_not_start_on_one_node(said, says):
    wrong, figures, untested = vet.judge_backend(NAMES, states(n3=said), {0: {
        pair: speed for pair, speed in speeds().items() if 3 not in pair}})
    assert wrong == {3: says} and len(figures) == 5 and not untested


def test_what_starts_nowhere():
    everywhere = {number: [NO_TORCH] for number in range(6)}
    assert vet.judge_backend(NAMES, everywhere, {}) == ({}, {}, ['backend: not tested, no torch'])
    everywhere = {number: [GOOD, {'error': 'PyTorch sees 0 GPUs, but none with number 1', 'absent': True}]
                  for number in range(6)}
    assert vet.judge_backend(NAMES, everywhere, {0: speeds()})[2] == [
        'backend of GPU 1: not tested, PyTorch sees 0 GPUs, but none with number 1']
    # it was tried, and is certain
    broken = {number: [{'error': 'ImportError: libmkl.so', 'absent': False}] for number in range(6)}
    assert set(vet.judge_backend(NAMES, broken, {})[0]) == set(range(6))


HSN = {'hsn%d' % number: 25.0 for number in range(4)}


@pytest.mark.parametrize('figure, kind, lanes, reference, says', [
    (90, 'nccl', 8, 0, []), (49, 'nccl', 8, 0, ['line rate: 2 of 2 nodes: lowest 49.00 GB/s over nccl']),
    (20, 'nccl', 1, 0, []),         # one GPU has one card
    (3, 'gloo', 1, 0, []), (0.4, 'gloo', 1, 0, ['line rate: 2 of 2 nodes']),
    (80, 'nccl', 8, 85, ['reference: 2 of 2 nodes: lowest 80.00 GB/s over nccl, less than the site\'s reference']),
    (86, 'nccl', 8, 85, []),
])
def test_line_rate_and_reference_are_only_said(figure, kind, lanes, reference, says):
    lines = vet.judge_rates(['a', 'b'], {0: figure, 1: figure}, kind, [HSN, HSN], dict.fromkeys((0, 1), lanes),
                            {kind: reference})
    assert len(lines) == len(says) and all(line.startswith(text) for line, text in zip(lines, says))


def test_without_a_known_line_rate_nothing_is_said():
    assert not vet.judge_rates(['a', 'b'], {0: 0.1, 1: 0.1}, 'gloo', [{}, {}], {}, {'nccl': 80})


def test_what_was_measured_stands_behind_the_names_that_vetnode_reads():
    text = vet.table_text(['a', 'b'], [0], {1: 'slow'}, ['c'], {0: 'gloo 1.00 GB/s', 1: 'gloo 0.10 GB/s'})
    assert [line.split()[:2] for line in text.splitlines()] == [['Vetted:', 'a'], ['Cordon:', 'b'], ['Cordon:', 'c']]
    assert text.splitlines()[0] == 'Vetted: a    gloo 1.00 GB/s'


@pytest.mark.parametrize('figure, rates, references, bad, untested', [
    (40, {'hsn0': 25.0}, {}, [], []), (0.4, {'hsn0': 25.0}, {}, [0, 1], []), (40, {}, {}, [], [0, 1]),
    (40, {}, {'gloo': 80}, [0, 1], []), (90, {}, {'gloo': 80}, [], []),
])
def test_of_two_nodes_the_absolute_figure_decides(figure, rates, references, bad, untested):
    figures = {0: figure, 1: figure}
    lines = vet.judge_rates(['a', 'b'], figures, 'gloo', [rates, rates], {0: 1, 1: 1}, references)
    wrong, open_ = vet.judge_two(figures, lines, {0: 1} if rates or references else {})
    assert (sorted(wrong), sorted(open_)) == (bad, untested)
    text = vet.table_text(['a', 'b'], [number for number in (0, 1) if number not in wrong], wrong, [], {}, open_)
    assert [line.split(':')[0] for line in text.splitlines()] == (
        ['Cordon'] * 2 if bad else ['Untested'] * 2 if untested else ['Vetted'] * 2)


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
            'error': '', 'absent': False, 'seconds': 1.0, 'rates': {}, **more}


RIGHT = meet.messages.dump({'error': '', 'received': 5e9})


def keeper(nodes, answers, **different):
    """After all rounds of these nodes, whose process number is the rank and one more."""
    one = pairs.Keeper(Planted({rank + 1: different.get('n%d' % rank, lane(rank)) for rank in range(nodes)}, answers))
    one.gather(nodes, time.monotonic() + 0.2)
    for turn in range(len(one.nodes) - 1 + len(one.nodes) % 2):
        one.round(turn)
    return one


def test_each_pair_is_measured_in_both_directions():
    one = keeper(5, lambda number, turn: RIGHT)
    assert sorted((a, b) for _, a, b, _ in one.speeds) == [(a, b) for a in range(5) for b in range(5) if a != b]
    assert {speed for *_, speed in one.speeds} == {5e9}


@pytest.mark.parametrize('says, words', [
    (None, 'it did not answer'), (b'\xff', 'it did not answer'), (b'[[[[', 'it did not answer'),
    (b'{"error": 7}', 'it did not answer'), (b'{"error": "it ended", "received": 1}', 'it ended'),
    (b'{"error": "", "received": "fast"}', ''),
])
def test_what_a_process_says_wrongly_counts_as_failed(says, words):
    one = keeper(6, lambda number, turn: says if number == 3 else RIGHT)
    failed = [text for _, a, b, text in one.speeds if isinstance(text, str)]
    assert failed and set(failed) == {words}
    assert len([pair for pairs_ in one.store.asked for pair in pairs_ if 3 in pair]) == (
        1 if words == 'it did not answer' else pairs.FAILED)


@pytest.mark.parametrize('said', [b'', b'{', b'[]', {**lane(2), 'rank': '2'}, lane(2, lane=-1), lane(2, node=5)])
def test_a_node_that_comes_in_another_way_did_not_come(said):
    one = keeper(4, lambda number, turn: RIGHT, n2=said)
    assert sorted(one.nodes) == [0, 1, 3] and len(one.speeds) == 6


def test_a_process_of_another_backend_measures_with_nobody():
    one = keeper(4, lambda number, turn: RIGHT, n2=lane(2, backend='nccl'), n3=lane(3, ready=False, error='no hsn0'))
    assert one.kind == 'gloo' and {a for _, a, _, _ in one.speeds} == {0, 1}


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


@pytest.mark.parametrize('address, card', [
    ('0000:41:00.0', 'hsn1'), ('0000:81:00.0', ''),     # two are as near
    ('0000:c1:00.0', ''), ('0000:00:00.0', ''),
])
def test_the_network_card_beside_a_gpu(tmp_path, address, card):
    sys_ = tmp_path / 'sys'
    for name, where in {'0000:41:00.0': 'pci0000:40/0000:40:01.1/0000:41:00.0',
                        '0000:81:00.0': 'pci0000:80/0000:80:01.1/0000:81:00.0',
                        '0000:c1:00.0': 'pci0000:c0/0000:c1:00.0',
                        'hsn0': 'pci0000:00/0000:01:00.0', 'hsn1': 'pci0000:40/0000:40:01.1/0000:42:00.0',
                        'hsn2': 'pci0000:80/0000:80:03.1/0000:82:00.0', 'hsn3': 'pci0000:80/0000:80:04.1/0000:83:00.0',
                        'hsn4': 'pci0000:40/0000:40:02.1/0000:43:00.0', 'lo': 'virtual/net/lo'}.items():
        (sys_ / 'devices' / where).mkdir(parents=True)
        link = sys_ / ('bus/pci/devices/' + name if ':' in name else f'class/net/{name}/device')
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(sys_ / 'devices' / where)
    assert pairs.nearest_card(Machine({}, str(tmp_path)), address) == card


def test_lists_are_written_whole_or_not_at_all(tmp_path):
    """Also the one that has room where the other has none: they belong together."""
    vet.write_lists(f'{tmp_path}/vet', ['n1'], ['n2'])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as a full disk, in the middle of a file
    try:
        with pytest.raises(OSError):
            vet.write_lists(f'{tmp_path}/vet', ['n3'], ['n%d' % number for number in range(10, 100)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {'vet.vetted': 'n1\n', 'vet.cordon': 'n2\n'}


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


def test_references_of_the_site():
    assert reference_options({}) == []
    assert reference_options({'SLINGTORCH_SITE': 'lumi'}) == ['--reference', 'nccl=80.75']


def test_gpus_that_this_rank_does_not_see_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Machine, 'gpus', lambda self: [('0000:%d1:00.0' % n, [], 'cuda') for n in range(4)])
    monkeypatch.setattr(vet.look, 'visible_gpus', lambda machine, known: [known[0][0]])
    told = {'lanes': [lane(0)], 'nodes': {'0': 0}, 'speeds': [], 'network': '', 'kind': 'gloo', 'rounds': 0,
            'imported': 1.0, 'took': 0.0}
    monkeypatch.setattr(vet, 'Child', lambda environ, *words: type('Planted', (), {
        'hear': lambda self, end: told, 'tell': lambda self, word: None, 'end': lambda self: None})())
    assert vet.run(Machine(ALONE), sys.stdout) == 0
    out = capsys.readouterr().out
    assert "3 of a node's 4 GPUs: not tested, since this rank sees only 1." in out and 'Untested: ' in out


@pytest.mark.parametrize('count', ['0', '-1'])
def test_no_round_is_no_verdict(count, capsys):
    with pytest.raises(SystemExit):
        vet.main(['--rounds', count])
    assert 'not a positive number' in capsys.readouterr().err
