# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch explain: the tables against their own samples, logs as they come, ranking and phases."""
import gzip
import io
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import time

import pytest

from slingtorch import explain
from slingtorch.explain import log as explain_log
from slingtorch.explain import tables

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAULTS, RULES = explain.read_faults(), explain.read_rules()

TIMEOUT = ("[rank{0}]:[E626 06:24:44.903 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation "
           "timeout: WorkNCCL(SeqNum={1}, OpType={2}, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600020 "
           "milliseconds before timing out.\n")
STATE = ("[rank{0}]:[E626 06:24:44.906 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Exception "
         "(either an error or timeout) detected by watchdog at work: {1}, last enqueued NCCL work: {2}, last completed "
         "NCCL work: 807.\n")
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been OOM Killed\n"


def read(text, facts=(), name='job.log'):
    """The answers for a log, and what is remarked about it."""
    log = explain.Log(RULES)
    log.read(name, io.BytesIO(text if isinstance(text, bytes) else text.encode()))
    return explain.answers(log, FAULTS, facts), log.remarks


def names(text, facts=()):
    """The names of the faults that are told."""
    return [answer.fault.name for answer in read(text, facts)[0]]


def command(*args, stdin=b''):
    """Run the command as a user does."""
    env = {'PATH': '/usr/bin:/bin', 'HOME': '/nonexistent', 'PYTHONPATH': str(ROOT)}
    return subprocess.run([sys.executable, '-m', 'slingtorch', 'explain', *map(str, args)], input=stdin, env=env,
                          cwd='/', stdout=subprocess.PIPE, stderr=subprocess.PIPE)


# --- the tables

MESSAGES = [(rule, expression, sample or re.sub(r'\\(.)', r'\1', expression))
            for rule in RULES for expression, sample in zip(rule.expressions, rule.samples)]


@pytest.mark.parametrize('name', sorted({rule.name for rule in RULES}))
def test_each_message_finds_its_sample_and_shows_its_fault(name):
    """A message without a sample is a plain text; a block of several lines has them behind one another."""
    for rule, expression, sample in [message for message in MESSAGES if message[0].name == name]:
        text = sample.replace('\\n', '\n') if rule.lines > 1 else sample
        log = explain.Log([rule])
        log.read('sample', io.BytesIO(text.encode() + b'\n'))
        assert list(log.findings) == [rule] or rule.role == 'exception' and log.exceptions, (
            "the message %r lacks a sample behind a tab that it matches" % expression)
        if not rule.fact and not rule.conditional and rule.role != 'exception':
            (answer,) = explain.answers(log, FAULTS)
            assert answer.fault.name == name and '\0' not in answer.cause() and 1 <= len(answer.remedies) <= 3


@pytest.mark.parametrize('level', ['cause'])
def test_a_message_of_a_cause_is_answered_with_a_reason(level):
    """Whatever other rules see in the line: the sample's own fault is among the answers."""
    wrong = []
    for rule, expression, sample in MESSAGES:
        if rule.level == level and rule.lines == 1 and not rule.conditional and rule.role == '':
            if rule.name not in names(sample + '\n'):
                wrong.append((rule.name, expression))
    assert wrong == []


def test_each_fault_has_a_message_and_each_message_a_fault():
    assert {rule.name for rule in RULES if not rule.fact} == set(FAULTS)


def test_what_a_cause_names_is_a_group_of_its_messages():
    for name, fault in FAULTS.items():
        groups = {group for rule in RULES if rule.name == name for text in rule.expressions
                  for group in re.findall(r'\?P<(\w+)>', text)}
        assert set(re.findall(r'\{(\w+)\}', fault.cause)) <= groups, name


def test_remedies_are_sentences_and_short():
    long = [(fault.name, text) for fault in FAULTS.values() for _, text in fault.remedies if len(text.split()) > 45]
    assert long == [] and [fault.name for fault in FAULTS.values() if len(fault.cause.split()) > 35] == []


def test_a_remedy_for_what_the_log_shows_comes_first():
    line = 'RuntimeError: CUDA error: invalid device ordinal\n'
    slurm = read('srun: job 1 queued\n' + line)[0][0]
    assert '--gpus-per-node' in slurm.remedies[0].split('.')[0] and '--gpus-per-node' in read(line)[0][0].remedies[0]
    assert len(slurm.remedies) <= 3


def test_the_tree_stall_lowers_the_minimum_too():
    """NCCL applies the minimum after the maximum (src/graph/connect.cc)."""
    assert 'NCCL_MIN_NCHANNELS' in FAULTS['tree-stall'].remedies[0][1]


@pytest.mark.parametrize('expression, texts', [
    ('a lost \\S+ node', ['a lost ']), ('(?:one|three) words', [' words']), ('(?P<what>one|three)x?', ['one', 'three']),
    ('(?:word)?other', ['other']), ('(?i:word)|other', None), ('(?!never)more', ['more']), ('x{0,3}y{2}zz', ['zz']),
    (r'lib(?:cuda|ml)\.so\.1', ['.so.1']), ('.*', None), ('a|.', None), (r'(?P<x>\w)(?P=x)abc', ['abc']),
])
def test_what_an_expression_spells_out(expression, texts):
    assert tables.needed(expression) == texts


def test_the_texts_are_in_every_sample():
    for rule, expression, sample in MESSAGES:
        texts = tables.needed(expression)
        assert [text for text in texts if text in sample], expression


@pytest.mark.parametrize('text, words', [
    ('[gpu-memory]\nCUDA out of memory\n', "the witness is ''"), ('[nobody] x\nsome text\n', 'in no table: nobody'),
    ('[gpu-memory] x\n', 'has no expression'), ('[gpu-memory] x\n(text\n', 'not a regular expression'),
    ('[gpu-memory] x\n(?:text|\n', 'not a regular expression'), ('[gpu-memory] x\ntext\n!(\n', 'not a regular expression'),
    ('[gpu-memory] x\n.*\n', 'spells out no text'), ('[gpu-memory] x\n(?:text)?\n', 'spells out no text'),
    ('[gpu-memory why] x\ntext\n', 'unknown: why'), ('[gpu-memory role=y] x\ntext\n', "role is 'y', one of timeout"),
    ('[gpu-memory needs=nothing] x\ntext\n', 'in no table: nothing'), ('text\n', 'a block begins with'),
])
def test_messages_that_are_wrong(tmp_path, text, words):
    (tmp_path / 'messages.txt').write_text(text)
    with pytest.raises(explain.ExplainError) as info:
        explain.read_rules(str(tmp_path / 'messages.txt'), FAULTS)
    assert words in str(info.value)


@pytest.mark.parametrize('text, words', [
    ('[one cause]\n', 'lacks a cause'), ('[one cause]\nwhy\n- @slurm do\n', 'a remedy without conditions'),
    ('[one odd]\nwhy\n- do\n', "'odd' is not one of"), ('[one cause]\nwhy\nwhat\n', 'a fault is [NAME LEVEL]'),
    ('[one cause]\nwhy\n- do\n[one cause]\n', 'defined twice'),
])
def test_faults_that_are_wrong(tmp_path, text, words):
    (tmp_path / 'faults.txt').write_text(text)
    with pytest.raises(explain.ExplainError) as info:
        explain.read_faults(str(tmp_path / 'faults.txt'))
    assert words in str(info.value)


def test_a_remedy_whose_condition_is_in_no_table_is_refused(tmp_path):
    (tmp_path / 'messages.txt').write_text('[one] x\ntext\n')
    (tmp_path / 'faults.txt').write_text('[one cause]\nwhy\n- do\n- @!running,nothing do\n')
    with pytest.raises(explain.ExplainError, match=r'\[one\] has conditions that are in no table: nothing$'):
        explain.read_rules(str(tmp_path / 'messages.txt'), explain.read_faults(str(tmp_path / 'faults.txt')))


# --- time and phase

STEPS = ''.join('step %d loss %d.5\n' % (number, number) for number in range(9))
OUT_OF_MEMORY = 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.\n'


def test_what_the_program_survived_did_not_end_it():
    timed_out = 'slurmstepd: error: *** JOB 1 ON nid001 CANCELLED AT 2026-01-01T12:00:00 DUE TO TIME LIMIT ***\n'
    assert names(OUT_OF_MEMORY + STEPS + timed_out) == ['time-limit', 'gpu-memory']
    answer = read(OUT_OF_MEMORY + STEPS)[0][0]
    assert answer.level == 'note' and 'continued after this line' in answer.finding.details[-1]
    assert read(STEPS + OUT_OF_MEMORY)[0][0].level == 'cause'


def test_out_of_memory_before_the_first_step_is_perhaps_not_the_batch():
    assert 'another process' in read(OUT_OF_MEMORY)[0][0].remedies[0]
    assert 'smaller batch' in read(STEPS + OUT_OF_MEMORY)[0][0].remedies[0]


def test_a_warning_stands_below_an_error():
    warning = "WARNING: FileExistsError: [Errno 17] File exists: '/scratch/checkpoint'\n"
    assert names(warning + 'ImportError: libfoo.so.1: cannot open shared object file: No such file or directory\n'
                 )[0] == 'missing-library'


def test_where_nothing_is_known_the_last_warnings_are_quoted():
    plugin = 'node1:33:33 [0] NCCL INFO x\nmydaemon: warning: the frobnicator failed to start\n'
    done = command('-', stdin=plugin.encode())
    assert done.returncode == 3 and b'standard input:2: mydaemon: warning: the frobnicator' in done.stdout
    assert b'standard input:' not in command('-', stdin=b'FutureWarning: old\n0 errors\n').stdout


# --- PyTorch 2.15's engine, signals

@pytest.mark.parametrize('line, name', [
    ('[TC][rank=3][name=0] Operation timed out after 600004 ms', 'waited'),
    ('Aborting process on rank 3 due to timeout - timeout watchdog detected operation timeout', 'peer-gone'),
    ('RuntimeError: ProcessGroupNCCL is bound to device cuda:0 but an operation was issued on cuda:1', 'current-gpu'),
    ('Aborting process due to timeout on rank 3 - timeout watchdog detected operation timeout', 'peer-gone'),
    ('NCCL WARN NET/OFI The tuner plugin can not be loaded when explicitly choosing an algorithm or protocol with '
     'NCCL_ALGO/NCCL_PROTO', 'tuner-setting'),
    ('[0] NCCL INFO NET/OFI Initializing\n# ROCm 7.2\ndouble free or corruption (out)', 'rccl-exit'),
    ('/var/spool/slurmd/job1/slurm_script: line 9: 4711 User defined signal 1   torchrun train.py', 'signal-usr1'),
    ('NET/OFI Initializing aws-ofi-nccl 1.19.2\nNCCL INFO Connected all rings\n'
     '[TC][rank=3][name=0] Operation timed out after 600004 ms', 'tree-stall'),
])
def test_what_is_new(line, name):
    assert names(line + '\n')[0] == name


def test_a_rule_that_holds_on_a_site_with_its_network(tmp_path, capsys):
    (tmp_path / 'log').write_text('node1:33:33 [0] NCCL INFO Using network Socket\n')
    for network, rule in (('slingshot11', 'tcp-on-slingshot'), ('infiniband', 'tcp'), (None, 'tcp')):
        explain.run([str(tmp_path / 'log')], True, network)
        assert [finding['rule'] for finding in json.loads(capsys.readouterr().out)['findings']] == [rule]


# --- what causes what

def test_the_cause_comes_before_what_follows_from_it():
    """63 ranks wait for rank 7, whose end stands at the end of the log."""
    log = ''.join(TIMEOUT.format(rank, 808, 'ALLREDUCE') + STATE.format(rank, 808, 811)
                  for rank in range(64) if rank != 7)
    log += OOM + "srun: error: nid001234: task 7: Out Of Memory\n"
    log += "srun: error: nid001235: tasks 8-15: Terminated\n"
    findings, _ = read(log)
    assert [answer.fault.name for answer in findings] == ['host-memory', 'collective-timeout', 'other-ranks-ended']
    assert (findings[0].finding.ranks, findings[0].finding.nodes, findings[0].finding.count) == ({7}, {'nid001234'}, 2)
    assert findings[1].finding.count == 63 and '(ALLREDUCE 808 for 600020 milliseconds)' in findings[1].cause()
    assert findings[1].finding.details == ["ranks 0-6,8-63 waited in ALLREDUCE, number 808",
                                           "rank 7 wrote no such line: look there first"]


def test_ranks_that_called_different_collectives_are_named():
    log = ''.join(TIMEOUT.format(rank, 808, 'BROADCAST' if rank == 3 else 'ALLREDUCE') + STATE.format(rank, 808, 808)
                  for rank in range(8))
    findings, _ = read(log)
    assert [answer.fault.name for answer in findings] == ['collectives-differ', 'collective-timeout']
    assert findings[0].finding.details == ["rank 3 called BROADCAST as number 808",
                                           "ranks 0-2,4-7 called ALLREDUCE as number 808", "in group 0(default_pg)"]


def test_the_same_number_in_another_group_is_no_difference():
    """Megatron's groups count for themselves."""
    log = TIMEOUT.format(0, 5, 'ALLREDUCE') + STATE.format(0, 5, 5)
    log += TIMEOUT.format(1, 5, 'BROADCAST') + STATE.format(1, 5, 5).replace('GUID 0(default_pg)', 'GUID 9(TENSOR)')
    assert names(log) == ['waited', 'collective-timeout']


def test_ranks_of_all_that_show_a_fault_are_counted():
    """Found by two rules."""
    log = '[rank3]: CUDA_ERROR_OUT_OF_MEMORY\n[rank5]: OOM when allocating tensor with shape[64,64]\n'
    [answer] = read(log)[0]
    assert (answer.finding.ranks, answer.finding.count) == ({3, 5}, 2)


def test_two_groups_that_differ_are_one_answer():
    log = ''.join(TIMEOUT.format(rank, 5, 'BROADCAST' if rank % 2 else 'ALLREDUCE') + STATE.format(rank, 5, 5).replace(
        '0(default_pg)', '%d(GROUP_%d)' % (rank // 2, rank // 2)) for rank in range(4))
    first, second = [answer.finding for answer in read(log)[0]]
    assert (first.count, first.details[-1], second.count) == (1, 'in group 0(GROUP_0)', 4)


def test_a_rank_whose_watchdog_speaks_of_another_collective_is_not_compared():
    log = ''.join(TIMEOUT.format(rank, 808, 'ALLREDUCE') + STATE.format(rank, 807 if rank == 2 else 808, 808 + rank)
                  for rank in range(3))
    assert 'rank 0 had begun fewer collectives' in read(log)[0][-1].finding.details[-1]
    assert '(808 of 809)' in read(log)[0][-1].finding.details[-1]


def test_a_rank_that_is_behind():
    log = ''.join(TIMEOUT.format(rank, 808, 'ALLREDUCE') + STATE.format(rank, 808, 808 if rank == 2 else 811)
                  for rank in range(4))
    assert "rank 2 had begun fewer collectives" in read(log)[0][-1].finding.details[-1]


def test_a_line_with_several_texts_of_a_rule_counts_once():
    assert read('zipfile.BadZipFile: File is not a zip file\n')[0][0].finding.count == 1


def test_what_waited_is_told_in_few_words(capsys):
    operations = ('ALLREDUCE', 'BROADCAST', 'SEND', 'RECV', 'BARRIER')
    log = ''.join(f'nid00000{rank} {rank}: ' + TIMEOUT.format(rank, 5, name) for rank, name in enumerate(operations))
    for answer in read(log.replace('NumelIn=64', 'NumelIn=1'))[0]:
        answer.show(1)
    said = ' '.join(capsys.readouterr().out.split())
    assert 'unless these are different process groups, which this log does not show' in said    # before PyTorch 2.2
    assert 'nodes nid000000,nid000001,nid000002,nid000003,nid000004' in said
    assert 'an ALLREDUCE of one element is a barrier' in said and '... and other ranks in 1 more collectives' in said


def test_what_is_likely_is_told_where_nothing_says_why():
    timeout = TIMEOUT.format(0, 1, 'ALLREDUCE')
    assert names(timeout) == ['waited', 'collective-timeout']
    assert names(timeout + OOM) == ['host-memory', 'collective-timeout']
    assert names('RuntimeError: NCCL Error 2: unhandled system error\n')[:1] == ['nccl-system-error']


def test_an_exception_that_nobody_knows_stands_before_what_follows():
    log = TIMEOUT.format(0, 1, 'ALLREDUCE')
    log += '[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: Expected input batch_size (32)\n'
    log += 'torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n'
    findings, _ = read(log)
    assert [answer.fault.name for answer in findings] == ['program-error', 'collective-timeout', 'other-ranks-ended']
    assert findings[0].finding.ranks == {1} and 'Expected input batch_size' in findings[0].cause()


def test_a_log_of_consequences_alone_says_what_is_most_likely():
    reset = 'RuntimeError: Connection reset by peer\n'
    child = 'torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n'
    found = read(reset + child + TIMEOUT.format(0, 1, 'ALLREDUCE'))[0]
    assert [answer.fault.name for answer in found if answer.level == 'weak'] == ['waited', 'ended-without-a-word']
    assert {answer.data()['level'] for answer in found} == {'perhaps', 'consequence'}
    # an exception that is quoted, or a reason, tells more
    for reason in ('ValueError: 3 is odd\n', OOM):
        assert not [answer for answer in read(reset + child + reason)[0] if answer.level == 'weak']


def test_of_exceptions_of_two_rules_that_of_the_rank_that_failed_first_is_told():
    log = TRACEBACK.format(3, 250, '3 is odd') + TRACEBACK.format(5, 99, 'x').replace('ValueError: x', "KeyError: 'x'")
    assert names(log) == ['unknown-exception']
    findings, _ = read(log + ROOT_CAUSE.format(5))
    assert [answer.fault.name for answer in findings] == ['program-error', 'first-failed', 'other-ranks-ended']
    assert findings[0].finding.details[1] == 'also, in line 6: [rank3]: ValueError: 3 is odd'


TRACEBACK = """[rank{0}]: Traceback (most recent call last):
[rank{0}]:   File "/home/me/train.py", line {1}, in main
[rank{0}]:     loss = step(batch)
[rank{0}]:   File "/env/lib/python3.12/site-packages/torch/nn/functional.py", line 30, in cross_entropy
[rank{0}]:     return torch._C._nn.cross_entropy_loss(input)
[rank{0}]: ValueError: {2}
"""
ROOT_CAUSE = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-06-16_02:08:15
  host      : nid001002
  rank      : {0} (local_rank: 1)
  exitcode  : 1 (pid: 4711)
"""


def test_the_last_line_of_the_program_itself_and_the_rank_that_failed_first():
    log = TRACEBACK.format(3, 250, 'shapes differ') + TRACEBACK.format(5, 99, 'file is empty')
    findings, _ = read(log)
    assert findings[0].finding.details == ["place in your program: /home/me/train.py:250 in main: "
                                           "loss = step(batch)", "also, in line 12: [rank5]: ValueError: file is empty"]
    # torchrun knows better which rank was first
    findings, _ = read(log + ROOT_CAUSE.format(5))
    assert [answer.fault.name for answer in findings] == ['unknown-exception', 'first-failed', 'other-ranks-ended']
    assert 'file is empty' in findings[0].cause() and 'train.py:99' in findings[0].finding.details[0]
    assert findings[1].cause() == 'torchrun saw rank 5 on nid001002 fail first, with status 1'


def test_an_exception_that_python_ignored_is_none():
    ignored = 'Exception ignored in: <function Adam.__del__ at 0x7f30>\n'
    assert names(ignored + TRACEBACK.replace('[rank{0}]: ', '')) == []


def test_the_progress_bar_before_a_timeout_is_told(monkeypatch):
    bar = ' 34%|###  | 73/208 [29:59<57:14, 3MB/s]\r 35%|###  | 74/208 [30:01<57:12, 3MB/s]\n'
    timeout = TIMEOUT.format(6, 1, 'ALLREDUCE')
    for size in (explain_log.BLOCK, len(timeout)):      # both in one block, and the bar in the block before
        monkeypatch.setattr(explain_log, 'BLOCK', size)
        assert 'was at 35 % after 30:01' in read(bar + timeout)[0][-1].finding.details[0]


def test_tcp_is_a_fault_on_slingshot_only():
    line = 'node1:33:33 [0] NCCL INFO Using network Socket\n'
    assert names(line) == ['tcp']
    assert names(line, facts=['slingshot']) == ['tcp-on-slingshot']
    assert names('node1:33:33 [0] NCCL INFO Bootstrap : Using hsn0:10.0.0.1<0>\n' + line) == ['tcp-on-slingshot']
    # on one node it is right
    alone = 'node1:33:34 [0] NCCL INFO comm 0x1 rank 0 nRanks 4 nNodes 1 localRanks 4\n'
    assert names(line + alone, ['slingshot']) == []
    # the plugin that is not found is why
    missing = 'nid001:33:33 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.\n'
    assert names(missing + line, ['slingshot']) == ['plugin-missing', 'tcp-on-slingshot']


def test_singletons_are_several_processes_without_a_larger_world():
    line = 'nid001:%d:47 [0] NCCL INFO ncclCommInitRank comm 0x5 rank 0 nranks 1 cudaDev 0 busId 3000 - Init COMPLETE\n'
    assert names(line % 1) == []
    assert names(line % 1 + line % 1) == []
    assert names(line % 1 + line % 2) == ['singletons']
    # groups of one rank, as of tensor parallelism, in a job of several
    assert names(line % 1 + line % 2 + (line % 2).replace('nranks 1', 'nranks 8')) == []
    assert names('Hello from rank 0 of 1\n' * 4) == ['singletons']


@pytest.mark.parametrize('text', [
    '', 'epoch 1 loss 0.5\nepoch 2 loss 0.4\n', 'No errors.\nError rate: 0.1\n',
    'nid001:1:1 [0] NCCL INFO Using network AWS Libfabric\nnid001:1:1 [0] NCCL INFO Connected all rings\n'
    'nid001:1:1 [0] NCCL INFO Connected all trees\n',
    # what looks like a failure, and is none
    "W dso_loader.cc:64] Could not load dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open "
    "shared object file: No such file or directory\n"
    "libibverbs: Warning: couldn't load driver 'libefa-rdmav34.so': libefa-rdmav34.so: cannot open shared object file: "
    "No such file or directory\n"
    "A matching Triton is not available. Error caught was: No module named 'triton'\n"
    'qsub: waiting for job 4711.pbs to start\nqsub: job 4711.pbs ready\n'
    'srun: Job 1 step creation temporarily disabled, retrying (Requested nodes are busy)\n'
    'srun: Step created for StepId=1.2\nWorld size: 1\nWorld size: 1\n'
    'sh: line 1: lspci: command not found\nThe loss is influenced by the batch\nskipped: audio file too short\n'
    'Request had invalid authentication credentials.\n'
    'Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2\nInitializing distributed: GLOBAL_RANK: 1, MEMBER: 2/2\n',
])
def test_a_sound_log_gives_nothing(text):
    assert names(text) == []


# --- logs as they come

LABELS = ['', '12: ', '[default0]:', '[rank7]:', '[1,7]<stderr>:', 'nid001: ', '\x1b[31m', '\x1b[1;31m[rank7]:\x1b[0m ']


@pytest.mark.parametrize('label', LABELS)
def test_labels_and_colours(label):
    findings, _ = read('%sRuntimeError: CUDA error: invalid device ordinal\x1b[0m\n' % label)
    assert [answer.fault.name for answer in findings] == ['gpu-number']
    assert findings[0].finding.ranks == ({12} if '12' in label else {7} if '7' in label else set())
    assert '\x1b' not in findings[0].finding.line


def test_line_ends_of_windows_progress_bars_and_a_last_line_that_is_cut():
    bar = '\r'.join('%3d%%|####|' % number for number in range(100))
    text = 'one\r\n%s\rtorch.OutOfMemoryError: CUDA out of memory. Tried\r 99%%|####|\r\nlast line withou' % bar
    findings, remarks = read(text)
    assert findings[0].finding.place == ('job.log', 2)
    assert findings[0].finding.line == 'torch.OutOfMemoryError: CUDA out of memory. Tried'
    assert len(remarks) == 1 and 'ends in the middle of a line' in remarks[0]


def test_binary_rubbish_is_no_obstacle_and_steers_no_terminal():
    rubbish = bytes(range(256)) * 64
    findings, _ = read(rubbish + b'\n' + b'\x1b]0;title\x07\x9b31m' + OOM.encode() + rubbish + b'\n')
    assert [answer.fault.name for answer in findings] == ['host-memory']
    assert findings[0].finding.line.isprintable()


def test_lines_across_blocks_are_counted_once(monkeypatch):
    monkeypatch.setattr(explain_log, 'BLOCK', 64)
    findings, _ = read('x' * 50 + '\n' + OOM * 5 + 'y' * 1000 + ' ' + OOM)
    assert (findings[0].finding.count, findings[0].finding.place) == (6, ('job.log', 2))


def test_a_line_of_megabytes():
    findings, _ = read('z' * 3000000 + ' ' + OOM + 'next ' + OOM)
    assert (findings[0].finding.count, findings[0].finding.place[1]) == (2, 1)
    assert len(findings[0].finding.line) <= 2 * explain_log.LINE


def test_memory_stays_small_whatever_the_size(tmp_path):
    """As a 1 GB log, by hard limit: 150 MB of log in a process that may have 100 MB, with Python itself."""
    script = ("import sys; sys.path.insert(0, %r)\nfrom slingtorch import explain\n"
              "from slingtorch.explain import log as explain_log\n"
              "class Endless:\n  left = 150\n  def read(self, size):\n    self.left -= 1\n"
              "    return b'' if self.left < 0 else self.data\n"
              "stream = Endless(); stream.data = (b'step 1 loss 0.5\\n' * 70000)[:explain_log.BLOCK - 1] + b'\\n'\n"
              "log = explain.Log(explain.read_rules()); log.read('big', stream)\n"
              "log.read('end', __import__('io').BytesIO(%r))\n"
              "print([answer.fault.name for answer in explain.answers(log, explain.read_faults())])\n"
              % (str(ROOT), OOM.encode()))
    limit = 100 << 20
    done = subprocess.run([sys.executable, '-c', script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert (done.stdout, done.returncode) == ("['host-memory']\n", 0), done.stderr


def test_many_ranks_are_counted_and_shown_short(capsys):
    text = ''.join('[rank%d]: RuntimeError: CUDA error: invalid device ordinal\n' % rank for rank in range(0, 4000, 2))
    findings, _ = read(text)
    findings[0].show(1)
    shown = capsys.readouterr().out
    assert '2000 lines; ranks 0,2,4,6,8,10,12,14,... (2000 ranks)' in shown


# --- the command

def test_the_command(tmp_path):
    (tmp_path / 'job.out').write_text('step 1\n' + OOM)
    with gzip.open(tmp_path / 'job.gz', 'wb') as handle:
        handle.write(OOM.encode() * 2)
    done = command(tmp_path / 'job.out', tmp_path / 'job.gz', '-', stdin=OOM.encode())
    assert (done.returncode, done.stderr) == (0, b'')
    shown = done.stdout.decode()
    assert shown.startswith('1. cause: The memory of a node was used up') and '4 lines' in shown
    assert '%s:2: slurmstepd' % (tmp_path / 'job.out') in shown and 'remedy' in shown and 'source' in shown

    data = json.loads(command('--json', tmp_path / 'job.gz').stdout)
    assert data['version'] == 1 and data['findings'][0]['rule'] == 'host-memory'
    assert (data['findings'][0]['line'], data['findings'][0]['count']) == (1, 2)


def test_nothing_known_is_an_answer_with_a_status_of_its_own():
    done = command('-', stdin=b'all is well\n')
    assert done.returncode == 3 and b'Nothing known was found' in done.stdout


def test_a_log_that_is_not_there(tmp_path):
    done = command(tmp_path / 'none.out')
    assert done.returncode == 1 and b'none.out cannot be read: No such file' in done.stderr and done.stdout == b''


def test_a_gzipped_log_that_is_cut_off(tmp_path):
    data = gzip.compress(b''.join(b'%d %s' % (number, OOM.encode()) for number in range(2000)))
    (tmp_path / 'job.gz').write_bytes(data[:-len(data) // 3])
    done = command(tmp_path / 'job.gz')
    assert done.returncode == 0 and done.stdout.count(b'is cut off or damaged') == 1


# --- files as they come

def test_an_empty_file_is_called_empty(tmp_path):
    (tmp_path / 'empty').write_bytes(b'')
    done = command(tmp_path / 'empty')
    assert done.returncode == 3 and b'is empty: the job wrote nothing' in done.stdout


@pytest.mark.parametrize('name', ['<(cat {0})', '/dev/stdin < <(cat {0})'])
def test_what_can_be_read_only_once(tmp_path, name):
    (tmp_path / 'log').write_text(OOM)
    env = {'PATH': '/usr/bin:/bin', 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(['bash', '-c', sys.executable + ' -m slingtorch explain ' + name.format(tmp_path / 'log')],
                          env=env, cwd='/', stdout=subprocess.PIPE, check=True)
    assert b'The memory of a node was used up' in done.stdout


def test_a_closed_standard_input_is_empty():
    done = subprocess.run(['bash', '-c', sys.executable + ' -m slingtorch explain - <&-'], cwd='/', capture_output=True,
                          env={'PATH': '/usr/bin:/bin', 'PYTHONPATH': str(ROOT)})
    assert (done.returncode, done.stderr) == (3, b'') and b'standard input is empty' in done.stdout


def test_the_empty_answer_says_what_to_switch_on():
    done = command('-', stdin=b'all is well\n')
    assert done.returncode == 3
    for word in (b'NCCL_DEBUG=INFO', b'FI_LOG_LEVEL=warn', b'--check'):
        assert word in done.stdout


def test_a_fifo(tmp_path):
    os.mkfifo(tmp_path / 'fifo')
    writer = subprocess.Popen(['bash', '-c', 'printf "%s" "$1" > "$2"', 'bash', OOM, str(tmp_path / 'fifo')])
    done = command(tmp_path / 'fifo')
    assert writer.wait() == 0 and done.returncode == 0 and b'The memory of a node was used up' in done.stdout


def test_a_log_of_zeros_of_200_megabytes_that_is_one_line(tmp_path):
    with open(tmp_path / 'log', 'wb') as handle:
        handle.seek(200 << 20)
        handle.write(b' ' + OOM.encode())
    done = command(tmp_path / 'log')
    assert done.returncode == 0 and b'The memory of a node was used up' in done.stdout


def test_an_ordinary_log_is_read_as_fast_as_documented():
    """10 MB at the rate of 200 MB in 10 s, in processor time: the best of five, since other work on a core slows it."""
    lines = b''.join(b'[rank%d]: step %d: loss=0.%04d lr=1e-4\n' % (step % 64, step, step) for step in range(250000))
    taken = []
    for _ in range(5):
        log, start = explain.Log(RULES), time.process_time()
        log.read('job.log', io.BytesIO(lines))
        taken.append(time.process_time() - start)
    assert len(lines) > 9 << 20 and min(taken) < 0.5 and explain.answers(log, FAULTS) == []


def test_two_jobs_after_one_another():
    """The cause of each is told."""
    first = 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.\n'
    assert names(first + 'step 1\n' + OOM) == ['host-memory', 'gpu-memory']


def test_a_log_that_is_cut_in_a_character():
    findings, remarks = read(OOM.encode() + 'ü'.encode()[:1])
    assert [answer.fault.name for answer in findings] == ['host-memory'] and len(remarks) == 1


def test_a_directory_with_outputs_of_jobs(tmp_path):
    for number in range(1000):
        (tmp_path / ('slurm-%d.out' % number)).write_text(OOM if number == 700 else 'step 1\n')
    (tmp_path / 'train.py').write_text('# ' + OOM)
    (tmp_path / 'data.bin').write_text(OOM)
    done = command(tmp_path)
    shown = done.stdout.decode()
    assert done.returncode == 0 and 'slurm-700.out:1: ' in shown and ' lines' not in shown


@pytest.mark.parametrize('name', ['job.o4711', 'train.err', 'stderr.log', 'slurm-1_2.out', 'out.txt', 'a.out.gz'])
def test_names_of_outputs(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(OOM.encode()) if name.endswith('gz') else OOM.encode())
    assert command(tmp_path).returncode == 0


# --- answers

@pytest.mark.parametrize('line, words', [
    ('x ' * 300 + 'DUE TO TIME LIMIT', 'DUE TO TIME LIMIT'),
    ('DUE TO TIME LIMIT' + ' x' * 300, 'DUE TO TIME LIMIT'),
    ('NCCL WARN No algorithm/protocol available' + ' x' * 300 + ' end', ' end'),
])
def test_the_evidence_keeps_the_telling_word(line, words):
    finding = read(line + '\n')[0][0].finding
    shown = finding.evidence()
    assert words in shown and len(shown) <= explain_log.SHOWN + 10
    assert shown.startswith('...') == bool(finding.line.find(finding.told))


def test_the_node_and_the_rank_come_first_where_a_node_is_the_cause():
    found = read('srun: error: nid001234: task 7: Out Of Memory\n')[0][0]
    assert found.cause().startswith('nid001234, rank 7: The memory')
    found = read('nid001234: NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off\n')[0][0]
    assert found.cause().startswith('nid001234: ')
    many = ''.join('srun: error: nid%06d: task 7: Out Of Memory\n' % number for number in range(9))
    assert read(many)[0][0].cause().startswith('The memory')


TERMINATE = ("terminate called after throwing an instance of 'boost::filesystem::filesystem_error'\n"
             '  what():  boost::filesystem::permissions: No such file or directory: '
             '"/home/me/.config/miopen//x.ufdb.txt"\n')


@pytest.mark.parametrize('label', LABELS + ['3: ', '2026-01-01T12:00:00 ', 'nid001234 3: ', 'x1001c7s6b0n0: '])
def test_what_terminate_says_on_two_lines(label):
    labelled = ''.join(label + line + '\n' for line in TERMINATE.splitlines())
    assert names(labelled) == ['miopen-database']


def test_a_job_that_was_cancelled_is_no_cause():
    cancelled = 'slurmstepd: error: *** JOB 1 ON nid001001 CANCELLED AT 2026-01-01T12:00:00 ***\n'
    killed = 'srun: error: nid001001: task 0: Killed\n'
    assert names(cancelled + killed) == ['interrupted'] and names(killed) == ['killed']
    # srun cancels the step after a rank has ended: then what ended it comes first
    assert names(killed + cancelled.replace('JOB 1', 'STEP 1.0'))[0] == 'killed'


def test_a_provider_that_is_found_later_is_no_fault():
    missing = 'nid001:1:1 [0] NCCL INFO NET/OFI No eligible providers were found\n'
    found = 'nid001:1:1 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)\n'
    assert names(missing) == ['wrong-provider'] and names(missing + found) == []


def test_after_many_lines_only_new_kinds_are_looked_at(monkeypatch):
    monkeypatch.setattr(explain_log, 'MATCHES', 10)
    monkeypatch.setattr(explain_log, 'BLOCK', 256)
    dense = ''.join('2026-01-01T12:00:%02d exit code 0 after %d.5 s\n' % (number % 60, number) for number in range(500))
    late = '[rank3]: x exit code 137\n[rank5]: x exit code 137\n'
    findings, remarks = read(dense + late)
    assert [answer.fault.name for answer in findings] == ['killed'] and findings[0].finding.ranks == {3, 5}
    assert findings[0].finding.place == ('job.log', 501) and 'very many similar lines' in remarks[0]


def test_what_is_remembered_of_lines_has_a_bound(monkeypatch):
    for name, value in (('MATCHES', 10), ('BLOCK', 256), ('MAX_KINDS', 3), ('ALIKE', 20)):
        monkeypatch.setattr(explain_log, name, value)
    log = explain.Log(RULES)
    dense = ''.join('%s rank %d: exit code 0\n' % (chr(97 + number % 20) * 9, number % 900) for number in range(900))
    log.read('job.log', io.BytesIO((dense + '[rank3]: x exit code 137\n').encode()))
    assert [finding.ranks for finding in log.findings.values()] == [{3}]
    assert (len(log.kinds), len(log.shapes), len(log.misses), max(log.shapes.values())) == (3, 3, 3, 20)


def test_a_job_that_until_done_requeued_itself_was_not_preempted():
    """Slurm's line is the same."""
    slurm = 'slurmstepd: error: *** JOB 7 ON nid001001 CANCELLED AT 2024-04-20T09:09:37 DUE TO JOB REQUEUE ***\n'
    assert names(slurm) == ['preempted']
    assert names('until-done: job 7 goes back to the queue: SIGUSR1 came, saved after 12 s\n' + slurm) == []
