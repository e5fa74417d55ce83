# SPDX-License-Identifier: GPL-2.0-only
"""vet's verdicts over the backend that a training takes, with figures and processes that the tests plant."""
import argparse
import os
import re
import resource
import subprocess
import sys
import types

import pytest

from slingtorch.job import gather, meet, messages, pairs, records, vet
from slingtorch.job.machine import Machine
from testbed import ROOT, raising


def said(**more):
    """What a node says at first."""
    return {'node': 'n', 'rank': 1, 'ranks': 1, 'ready': True, 'error': '', 'gpus': 0, 'rates': {}, **more}


def nodes(count=6, **different):
    """What these nodes say at first; n3={...} for what node 3 says otherwise."""
    return {number: said(node='n%d' % number, **different.get('n%d' % number, {})) for number in range(count)}


SOUND = {number: [10.0] for number in range(6)}


def test_sound_nodes():
    assert vet.judge(nodes(), 'gloo', SOUND) == ({}, dict.fromkeys(range(6), 10.0))


@pytest.mark.parametrize('best, says', [
    ([1.0], 'gloo slow: best pair 1.00 GB/s, median 10.00 GB/s'),
    (['no route'], 'gloo fails: none of its pairs worked (no route)'),
    (None, 'fails: it did not answer'),
])
def test_a_node_that_is_slow_or_fails(best, says):
    wrong, _ = vet.judge(nodes(), 'gloo', {**SOUND, 2: best})
    assert wrong == {2: says}


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


def test_pairs_that_work_nowhere_fail_on_every_node():
    wrong, _ = vet.judge(nodes(2), 'gloo', dict.fromkeys(range(2), ['no route']))
    assert wrong == dict.fromkeys(range(2), 'gloo fails: none of its pairs worked (no route)')


@pytest.mark.parametrize('different, says', [
    ({'error': 'RuntimeError: no such interface'}, 'fails: gloo does not start: RuntimeError: no such interface'),
    ({'gpus': 3}, 'fails: its PyTorch uses nccl on 3 GPUs, the others use gloo'),
])
def test_a_node_that_does_not_start_or_uses_something_else(different, says):
    wrong, figures = vet.judge(nodes(n3=different), 'gloo', {number: [10.0] for number in range(6) if number != 3})
    assert wrong == {3: says} and len(figures) == 5


def test_what_starts_nowhere_is_wrong_everywhere():
    broken = {number: said(error='ImportError: libmkl.so') for number in range(6)}
    assert vet.judge(broken, '', {}) == (
        dict.fromkeys(range(6), 'fails: the backend does not start: ImportError: libmkl.so'), {})


@pytest.mark.parametrize('figure, gpus, rate, references, says', [
    (90, 1, 100, {}, ''), (49, 1, 100, {}, '2 of 2 nodes: lowest 49.00 GB/s, less than 0.5 of the line rate'),
    (3, 0, 100, {}, ''), (0.4, 0, 100, {}, '2 of 2 nodes'), (0.1, 0, 0, {}, ''),
    (80, 1, 100, {'nccl': 85}, '2 of 2 nodes: lowest 80.00 GB/s, less than the site\'s reference (85 GB/s)'),
    (86, 1, 100, {'nccl': 85}, ''), (80, 1, 100, {'gloo': 85}, ''),
])
def test_line_rate_and_reference(figure, gpus, rate, references, says):
    there = nodes(2, **{'n%d' % number: {'gpus': gpus, 'rates': {'hsn0': rate}} for number in (0, 1)})
    _, low = vet.table_of(there, vet.uses(there[0]), {0: [figure], 1: [figure]}, references)
    assert low.startswith(says) and bool(low) == bool(says)


# --- the rounds


class Planted:
    """PyTorch's store as far as rank 0 asks for it; what the nodes say first, and their reports, are planted."""

    def __init__(self, come, report):
        self.come, self.report, self.kept = come, report, {}

    def others(self, ranks, world, end):
        assert ranks >= len(self.come)
        return {number: said if messages.has_form(said, meet.COMES) else None for number, said in enumerate(self.come, 1)}

    def put(self, key, thing):
        self.kept[key] = thing

    def reports(self, numbers, end):
        found = {number: self.report(number) for number in numbers if self.report(number) != 'none'}
        return {number: report if messages.has_form(report, {}) else None for number, report in found.items()}

    def word(self, word, count):
        self.kept['word'] = word


@pytest.fixture
def conduct(tmp_path, capsys, monkeypatch):
    """What rank 0 of this many nodes prints and writes, and the store, where the nodes say this."""
    def run(come, report, size=None, references=None, rounds=8):
        store = Planted(come, report)
        monkeypatch.setattr(meet, 'Store', lambda *args: store)
        monkeypatch.setattr(vet, 'Child', lambda function: type('Planted', (), {'end': lambda self: None})())
        store.status = vet.run(Machine({**ALONE, 'WORLD_SIZE': str(size or len(come))}, str(tmp_path)), argparse.Namespace(
            rounds=rounds, write=f'{tmp_path}/vet', json=None, reference=list((references or {}).items())))
        lists = [(tmp_path / f'vet.{name}').read_text().split() for name in ('vetted', 'cordon')]
        return capsys.readouterr().out, *lists, store
    return run


def report(figure):
    return lambda number: {'best': [figure]}


def test_all_nodes_that_start_take_part(conduct):
    come = [said(node='n%d' % number, rank=number + 1) for number in range(5)]
    come[3].update(error='no hsn0')
    out, vetted, cordon, store = conduct(come, report(5.0))
    assert store.kept == {'go': {'ring': [1, 2, 3, 5], 'rounds': 3}, 'word': '1'} and store.status == 1
    assert (vetted, cordon) == (['n0', 'n1', 'n2', 'n4'], ['n3'])
    assert out.startswith('slingtorch vet: nodes: 5, rounds: 3, ')
    assert 'Cordon: n3    fails: gloo does not start: no hsn0\n' in out


@pytest.mark.parametrize('says', [
    'none', None, 7, [], {'best': 'fast'}, {'best': [True]}, {'best': [1.0, 1.0]}, {'best': {}}, {}])
def test_a_report_in_another_way_is_none(conduct, says):
    out, vetted, cordon, _ = conduct([said(node='n%d' % number) for number in range(4)],
                                     lambda number: says if number == 3 else {'best': [5.0]})
    assert (vetted, cordon) == (['n0', 'n1', 'n3'], ['n2']) and 'Cordon: n2    fails: it did not answer\n' in out


def test_a_node_without_a_partner_is_untested(conduct):
    """In the only round of three nodes."""
    out, vetted, cordon, store = conduct([said(node='n%d' % number) for number in range(3)],
                                         lambda number: {'best': [5.0] if number != 3 else []}, rounds=1)
    assert 'Untested: n2    no pair was measured\n' in out and len(vetted) == 3 and store.status == 0


@pytest.mark.parametrize('come', [None, {**said(), 'gpus': '2'}, {**said(), 'rates': {'hsn0': 'fast'}}, {'rank': 2}])
def test_a_node_that_comes_in_another_way_did_not_come(conduct, come):
    out, vetted, cordon, store = conduct([said(node='n0'), said(node='n1'), come, said(node='n3')], report(5.0))
    assert store.kept['go']['ring'] == [1, 2, 4] and vetted == ['n0', 'n1', 'n3'] and cordon == []
    assert 'Cordon: (a node of unknown name)    fails: it did not answer\n' in out and store.status == 1


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


@pytest.mark.parametrize('said, says', [
    (None, 'why not'), ({'ring': [1], 'rounds': 2}, 'this version of slingtorch does not know'),
    ({'ring': [1], 'rounds': -1}, 'does not know'), ({'ring': 1, 'rounds': 0}, 'does not know'),
])
def test_a_node_that_cannot_take_part_says_why(monkeypatch, said, says):
    dist = types.SimpleNamespace(is_nccl_available=lambda: False)
    monkeypatch.setitem(sys.modules, 'torch', types.SimpleNamespace(distributed=dist))
    monkeypatch.setattr(pairs, 'Exchange', lambda gpu: None)
    monkeypatch.setattr(pairs.meet, 'Store', raising(meet.NotMet('refused')) if said is None else (
        lambda *_: types.SimpleNamespace(number=1, join=lambda *_: said)))
    monkeypatch.setattr(pairs.meet, 'why_not', lambda environ, text: 'why not: ' + text)
    monkeypatch.setattr(os, 'environ', dict(ALONE))
    with pytest.raises(meet.NotMet, match=says):
        pairs.take_part(types.SimpleNamespace(send=lambda said: None))


@pytest.mark.parametrize('gpu', [0, None])
def test_a_pair_that_fails_is_an_answer_and_leaves_no_kernel(monkeypatch, gpu):
    aborted = []
    one = pairs.Exchange.__new__(pairs.Exchange)
    one.gpu, one.best, one.dist = gpu, 0.0, types.SimpleNamespace(PrefixStore=lambda name, store: None)
    one.pair = raising(RuntimeError('no route'))
    one.group = lambda *_: types.SimpleNamespace(abort=lambda: aborted.append(1))
    one.meet(types.SimpleNamespace(another=lambda: types.SimpleNamespace(store=None)), 0, 'pair-1-2')
    assert (one.best, one.why, len(aborted)) == (0.0, 'RuntimeError: no route', int(gpu == 0))


def test_rank_0_without_pytorch_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch', None)
    monkeypatch.setattr(vet, 'Child', lambda function: type('Planted', (), {'end': lambda self: None})())
    with pytest.raises(gather.PeerLost, match='nodes cannot meet at MASTER_ADDR=127.0.0.1, MASTER_PORT=1: Mod.*torch'):
        vet.run(Machine(ALONE, str(tmp_path)), argparse.Namespace(rounds=1))


@pytest.mark.parametrize('figure, rates, references, word', [
    (40, {'hsn0': 25.0}, {}, 'Vetted'), (0.4, {'hsn0': 25.0}, {}, 'Cordon'), (40, {}, {}, 'Untested'),
    (40, {}, {'gloo': 80}, 'Cordon'), (90, {}, {'gloo': 80}, 'Vetted'),
])
def test_of_two_nodes_the_absolute_figure_decides(conduct, figure, rates, references, word):
    out, vetted, cordon, store = conduct(
        [said(node='n%d' % number, rates=rates) for number in (0, 1)], report(float(figure)), references=references)
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [[word + ':', 'n0'], [word + ':', 'n1']]
    assert out.splitlines()[1].endswith('    gloo %.2f GB/s' % figure)
    assert ['n0', 'n1'] == (cordon if word == 'Cordon' else vetted) and not (vetted and cordon)
    assert store.status == (word == 'Cordon') and store.kept['word'] == '01'[word == 'Cordon']


def test_a_node_that_did_not_come_is_cordoned_and_a_gpu_uses_one_card(conduct):
    """One GPU of 25 GB/s reaches more than half of its card's rate, though its node has four cards."""
    rates = {'hsn%d' % number: 25.0 for number in range(4)}
    out, vetted, cordon, store = conduct(
        [said(node='n%d' % number, gpus=1, rates=rates) for number in (0, 1)],
        lambda number: {'best': [20.0], 'network': 'AWS Libfabric', 'provider': 'cxi'}, size=3)
    assert (vetted, cordon) == (['n0', 'n1'], []) and 'yellow' not in out and store.status == 1
    assert 'Cordon: (a node of unknown name)    fails: it did not answer' in out
    assert '20.00 GB/s (nccl on 1 GPUs, AWS Libfabric, cxi)' in out


def test_a_node_writes_no_lines_of_its_own(conduct):
    come = [said(node='n%d' % number) for number in range(3)]
    come[2].update(error='\x1b[2J\nVetted: n2', node='n2\nVetted: n3')
    out, vetted, cordon, _ = conduct(come, lambda number: {'best': [5.0], 'network': 'a\nVetted: n4\x1b'})
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


@pytest.mark.parametrize('text', ['nccl', 'nccl=fast', 'ncl=80', 'gloo=nan', 'gloo=-1'])
def test_a_reference_that_would_compare_nothing_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        vet.main(['--reference', text])
    assert f"'{text}' is not a reference: write nccl=80" in capsys.readouterr().err


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
echo "srun kill=${SLURM_KILL_BAD_EXIT-} tasks=${SLURM_GPUS_PER_TASK-}${SLURM_TRES_PER_TASK-} $*"
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
    assert vetting.startswith(f'srun kill=0 tasks= {option}--nodes=2 --ntasks=2 --ntasks-per-node=1 ')
    kept = env.get('SLURM_GPUS_PER_TASK', env.get('SLURM_TRES_PER_TASK', ''))
    assert program == f'srun kill= tasks={kept} --nodes=1 --exclude={tmp_path}/vet-7.cordon train.py'


@pytest.mark.parametrize('count', ['0', '-1'])
def test_no_round_is_no_verdict(count, capsys):
    with pytest.raises(SystemExit):
        vet.main(['--rounds', count])
    assert 'not a positive number' in capsys.readouterr().err


@pytest.mark.parametrize('rank', [0, 1])
def test_the_speed_of_a_pair_is_the_mean_of_both_directions(monkeypatch, rank):
    """Of the largest volley: 4 MiB there in 0.1 s and back in 0.3 s. What rank 0 has measured counts for both."""
    sent, seconds = [], {'send': 0.1, 'recv': 0.3}
    answers = {'p-4': [65536, 1.0], 'p-65536': [524288, 2.0], 'p-524288': [4194304, 3.0], 'p-4194304': [0, 20971520.0]}
    store = types.SimpleNamespace(put=lambda key, thing: answers.update({key: thing}), get=lambda key, _: answers[key])
    one = pairs.Exchange.__new__(pairs.Exchange)

    def volley(transfer, other, size, _):
        sent.append(size)
        return seconds[transfer] * (1 if size > 2 << 20 else 1e-3)
    monkeypatch.setattr(one, 'volley', volley)
    speed = one.pair(types.SimpleNamespace(send='send', recv='recv'), store, rank, 'p', 0)
    assert speed == pytest.approx(2 * (4 << 20) / 0.4) == 20971520 and sent[::2] == [4, 64 << 10, 512 << 10, 4 << 20]
