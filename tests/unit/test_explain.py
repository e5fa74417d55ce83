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
from slingtorch.explain import tables
from slingtorch.explain import log as explain_log
from slingtorch.explain.answers import Answer
from testbed.expected import expected

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAULTS = explain.read_faults()
RULES = explain.read_rules(FAULTS)

TIMEOUT = ("[rank{0}]:[E626 06:24:44.903 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation "
           "timeout: WorkNCCL(SeqNum={1}, OpType={2}, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600020 "
           "milliseconds before timing out.\n")
STATE = ("[rank{0}]:[E626 06:24:44.906 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Exception "
         "(either an error or timeout) detected by watchdog at work: {1}, last enqueued NCCL work: {2}, last completed "
         "NCCL work: 807.\n")
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been OOM Killed\n"
OUT_OF_MEMORY = 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.\n'
MISSING = 'ImportError: libfoo.so.1: cannot open shared object file: No such file or directory\n'
NCCL_MEMORY = 'NCCL WARN Failed to CUDA malloc 6291456 bytes\n'
DISK = 'OSError: [Errno 122] Disk quota exceeded\n'
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


def read(text, name='job.log'):
    """The answers for a log, and what is remarked about it."""
    log = explain.Log(RULES)
    log.read(name, io.BytesIO(text if isinstance(text, bytes) else text.encode()))
    return explain.answers(log, FAULTS), log.remarks


def names(text):
    """The names of the faults that are told."""
    return [answer.fault.name for answer in read(text)[0]]


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


def test_a_message_of_a_cause_is_answered_with_a_reason():
    """Whatever other rules see in the line: the sample's own fault is among the answers."""
    wrong = [(rule.name, expression) for rule, expression, sample in MESSAGES
             if rule.level == 'cause' and rule.lines == 1 and not rule.conditional and rule.role == ''
             and rule.name not in names(sample + '\n')]
    assert wrong == []


OPTIONS = {'role', 'needs', 'unless', 'distinct', 'lines', 'blame', *tables.LEVELS}
ROLES = {'', 'timeout', 'work', 'difference', 'first-failed', 'exception'}


def test_the_tables_have_the_form_that_the_page_describes():
    conditions = {*FAULTS, *(rule.name[1:] for rule in RULES if rule.fact), 'early', 'running'}
    for rule in RULES:
        assert rule.options.keys() <= OPTIONS and rule.role in ROLES and rule.witness and rule.expressions, rule.name
        assert conditions.issuperset(rule.needs + rule.unless), rule.name
    conditions.update(group for rule in RULES for text in rule.expressions for group in re.findall(r'\?P<(\w+)>', text))
    headings = [heading.group('name') for heading, _ in tables.sections('faults.txt')]
    assert sorted(headings) == sorted(FAULTS)
    for (_, lines), fault in zip(tables.sections('faults.txt'), FAULTS.values()):
        assert [line.startswith('- ') for line in lines] == [False] + [True] * len(fault.remedies), fault.name
        assert fault.level in tables.LEVELS and any(not when for when, _ in fault.remedies), fault.name
        assert conditions.issuperset(name.lstrip('!') for when, _ in fault.remedies for name in when), fault.name


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
    assert tables.needed(tables.sre_parse.parse(expression)) == texts


def test_a_text_is_looked_for_once_its_longest_word_was_seen():
    """Without what varies between lines, which are digits and the letters of addresses."""
    rule = tables.Rule('gpu-memory', 'cause', 'x')
    rule.has = [b'a lost node', b'1 2']
    log = explain.Log([rule])
    assert (log.texts, log.likely, log.active) == ({b'a lost node': b'lost', b'1 2': b''}, {b'1 2'}, [])
    log.read('a', io.BytesIO(b'lost 7\n'))
    assert (log.likely, log.possible) == ({b'1 2', b'a lost node'}, {b'1 2'})
    log.read('b', io.BytesIO(b'a lost node\n'))
    assert (log.possible, log.active) == ({b'1 2', b'a lost node'}, [(rule, rule.has)])


def test_the_texts_are_in_every_sample():
    for rule, expression, sample in MESSAGES:
        texts = tables.needed(tables.sre_parse.parse(expression)) or ['']
        assert min(map(len, texts)) >= 3, f'{expression} spells out no text of three letters that every line of it has'
        assert [text for text in texts if text in sample], expression


# --- time and phase

STEPS = ''.join('step %d loss %d.5\n' % (number, number) for number in range(9))


@pytest.mark.parametrize('line', [
    'loss: 0.5', 'train_loss=3', "'loss': 1", 'lm loss | 2', 'val_loss [0.5', 'Loss (-1', 'step 3', 'global_step=7', 'Iter #3',
    'iteration: 9', 'epochs (4', '"epoch": 3', 'Epoch[3]', 'Step|4', '3.1it/s', '2s/it', '100 samples/s', 'saved checkpoint',
    'Wrote the model checkpoint', 'saving a checkpoint',
])
def test_what_tells_that_a_program_makes_progress(line):
    """Three steps after its line, and a fault did not end the program."""
    ends = [read(OUT_OF_MEMORY + (line + '\n') * times)[0][0].level for times in (2, 3)]
    assert ends == ['cause', 'note']
    assert read((line + '\n') * 9 + OUT_OF_MEMORY)[0][0].level == 'cause'
    assert read(OUT_OF_MEMORY + (line + '\n') * 9 + OUT_OF_MEMORY)[0][0].level == 'cause'


@pytest.mark.parametrize('line', [
    'failed in step 3', 'loss 0.5: Error', 'step 3 aborted', 'step 3: Traceback', 'step 3 timed out', 'timeout in step 3',
    'an exception in epoch 3', 'killed in step 3', 'fatal: step 3', 'the loss is influenced', 'footstep 3', 'loss of 3', 'steps of 3',
])
def test_what_tells_of_no_progress(line):
    levels = {answer.fault.name: answer.level for answer in read(OUT_OF_MEMORY + (line + '\n') * 9)[0]}
    assert levels['gpu-memory'] == 'cause'


def test_progress_is_looked_for_at_the_ends_of_blocks_and_at_the_first_step(monkeypatch):
    """The first step says whether a fault came early."""
    monkeypatch.setattr(explain_log, 'TAIL', 40)
    log = explain.Log(RULES)
    log.read('a', io.BytesIO((STEPS + 'x' * 90 + '\n').encode()))
    log.read('b', io.BytesIO((STEPS * 2).encode()))
    assert log.progress == {'a': [0], 'b': [0, 256, 272]}
    assert log.sizes == {'a': 235, 'b': 288}
    assert [(name, number, len(tail)) for name, number, tail in log.tails] == [('a', 10, 40), ('b', 16, 40)]
    log.read('c', io.BytesIO('step 1\nstep 2\nfootstep 3\nstep 3\nfootstep 4\n'.encode()))
    assert log.progress['c'] == [0, 7, 25]


def test_out_of_memory_before_the_first_step_is_perhaps_not_the_batch():
    assert 'another process' in read(OUT_OF_MEMORY)[0][0].remedies[0]
    assert 'smaller batch' in read(STEPS + OUT_OF_MEMORY)[0][0].remedies[0]


# --- lines

@pytest.mark.parametrize('line, who', [
    ('[rank3]: x', ([3], [])), ('rank 3: x', ([3], [])), ('x [rank=4] x', ([4], [])), (' 5: x', ([5], [])),
    ('[1,6]<stderr>: x', ([6], [])), ('x [Rank 7] x', ([7], [])), ('x [rank 8] x', ([8], [])),
    ('PE 9: MPICH WARNING', ([9], [])), ('x Rank 10] x', ([10], [])), ('x rank 3 x', ([], [])),
    ('nid001: x', ([], ['nid001'])), ('nid001 3: x', ([], ['nid001'])), ('x1001c7s6b0n0: x', ([], ['x1001c7s6b0n0'])),
    ('a.b-c:33:34 [0] NCCL', ([], ['a.b-c'])), ('[x] [a1] - Abort(-1)', ([], ['a1'])), ('x<warn> a1: x', ([], ['a1'])),
    ('x<info> a1: x', ([], ['a1'])), ('x<error> a1: x', ([], ['a1'])), ('JOB 1 ON a1 CANCELLED AT', ([], ['a1'])),
    ('srun: error: a1: task 7: Killed', ([], ['a1'])), ('a1: x', ([], [])),
])
def test_who_wrote_a_line(line, who):
    assert explain_log.who(line, {}) == who


def test_who_a_line_names():
    assert explain_log.who('x', {'ranks': '1,4-6', 'rank': '2', 'node': 'a1'}) == ([1, 4, 5, 6, 2], ['a1'])
    assert explain_log.who('[rank3]: x', {'ranks': None, 'rank': '2', 'node': None}) == ([3], [])
    assert len(explain_log.numbers('5-99999999')) == 100001


@pytest.mark.parametrize('line, soft', [
    ('WARN: ', True), ('WARNING: ', True), ('Warning: ', True), ('[W123 x] ', True), ('INFO ', True), ('UserWarning: ', True),
    ('DEBUG ', True), ('', False), ('WARNED ', False), ('NCCL WARN ', False), ('NET/OFI WARN ', False), ('MPICH WARNING ', False),
    ('WARNING: GTL ', False), ('libfabric WARNING ', False), ('WARNING <warn> ', False), ('WARN x\n', False),
])
def test_what_is_a_warning_by_its_own_words(line, soft):
    """A fault is none, if one of its lines is not."""
    [answer] = read(line + OUT_OF_MEMORY)[0]
    assert answer.finding.soft == soft


TRACE = 'Traceback (most recent call last):\n  File "/a/t.py", line 3, in f\n    g()\n'
PACKAGES = ''.join(f'  File "{path}", line 4, in h\n    code()\n' for path in (
    '/x/site-packages/y.py', '/x/dist-packages/y.py', '/usr/lib/python3.9/y.py', '/usr/lib64/python3.9/y.py', '/src/torch/y.py',
    '<frozen y>', '/env/bin/torchrun', '/env/bin/accelerate'))


@pytest.mark.parametrize('before, line, frame', [
    (TRACE, 'ValueError: x', '/a/t.py:3 in f: g()'), (TRACE, 'CustomException', '/a/t.py:3 in f: g()'),
    (TRACE, 'Exception: x', '/a/t.py:3 in f: g()'), (TRACE, 'error: x', ''), (TRACE + PACKAGES, 'KeyError: x', '/a/t.py:3 in f: g()'),
    (TRACE + '  File "/a/u.py", line 5\n', 'KeyError: x', '/a/u.py:5'),
    (TRACE + '  File "/a/u.py", line 5, in g\n' + PACKAGES, 'KeyError: x', '/a/u.py:5 in g'),
    (TRACE + '  File "/a/u.py", line 5, in g\n    \x1b[31m' + 'y' * 300 + '\n', 'KeyError: x', '/a/u.py:5 in g: ' + 'y' * 240),
    (TRACE + '[rank1]:   File "/a/u.py", line 5, in g\n', 'KeyError: x', '/a/t.py:3 in f: g()'),
    (TRACE.replace('  File', '[rank1]:   File').replace('    g', '[rank1]:     g'), '[rank1]: KeyError: x', '/a/t.py:3 in f: g()'),
    ('│ /a/t.py:3 in f │\n│   1 │ g() │\n', 'KeyError: x', '/a/t.py:3 in f'),
    (TRACE + 'Traceback (most recent call last):\n', 'KeyError: x', ''), ('', 'KeyError: x', ''),
    ('Exception ignored in: <g>\n' + TRACE, 'KeyError: x', None), ('12: Error ignored in: <g>\n' + TRACE, 'KeyError: x', None),
    ('Exception in thread Thread-1 (daemon):\n' + TRACE, 'KeyError: x', None),
    ('Exception in thread Thread-1:\n' + TRACE, 'KeyError: x', '/a/t.py:3 in f: g()'),
    (TRACE + 'x' * (1 << 14) + '\n', 'KeyError: x', ''), (TRACE + 'x' * 16000 + '\n', 'KeyError: x', '/a/t.py:3 in f: g()'),
    (TRACE.replace('  ', '\x1b[1;31m[rank1]:\x1b[0m  '), '[rank1]: KeyError: x', '/a/t.py:3 in f: g()'),
])
def test_where_in_the_program_an_exception_arose(before, line, frame):
    assert explain_log.own_frame(before.encode(), line) == (frame and 'place in your program: ' + frame)


def test_a_traceback_in_the_block_before(monkeypatch):
    monkeypatch.setattr(explain_log, 'BLOCK', len(TRACE))
    assert read(TRACE + 'KeyError: 5\n')[0][0].finding.details == ['place in your program: /a/t.py:3 in f: g()']


@pytest.mark.parametrize('line, shown', [
    ('a DUE TO TIME LIMIT ' + 'x' * 300, 'a DUE TO TIME LIMIT ' + 'x' * 220),
    ('x' * 240 + ' DUE TO TIME LIMIT', '...' + 'x' * 39 + ' DUE TO TIME LIMIT'),
    ('x' * 240 + ' DUE TO TIME LIMIT ' + 'y' * 300, '...' + 'x' * 39 + ' DUE TO TIME LIMIT ' + 'y' * 182),
    ('a NCCL WARN No algorithm/protocol available' + ' x' * 300, 'a NCCL WARN No algorithm/protocol available' + ' x' * 98 + ' '),
])
def test_the_evidence_keeps_the_telling_word(line, shown):
    assert read(line + '\n')[0][0].finding.evidence() == shown


def test_lines_of_trouble_that_are_quoted(monkeypatch):
    """Of those that differ in numbers alone the last one, and none that sound logs have."""
    trouble = ['warn', 'Warning', 'err: x', 'errors', 'fatal', 'FAILED', 'failure', 'abort', 'aborted it', 'aborting', 'denied',
               'refused', 'invalid', 'cannot', 'unable 3']
    sound = [kind + 'Warning: error' for kind in ('Future', 'User', 'Deprecation', 'Runtime', 'Import', 'Syntax', 'Resource')]
    sound += ['errors: 0', '0 errors', '0 failed', 'TF-TRT Warning', 'OMP_NUM_THREADS warning', 'Setting OMP warning',
              'warning: deprecated', 'warn errno: 97', 'warning: destroy_process_group', 'TORCH_NCCL_AVOID warning',
              'error error_handling', 'error_file: <none> error', 'standard error', 'test error', 'error rate', 'word error',
              'NCCL INFO error', 'Unable to register cuDNN', 'computation_placer warning', 'oneDNN warning', 'NUMA node error',
              'warned', 'inerrant', 'cannotation']
    log = explain.Log(RULES)
    log.read('a', io.BytesIO(b'error x\n' * 9))
    log.read('b', io.BytesIO(''.join(f'{line}\n' for line in sound + [*trouble, 'unable 7']).encode()))
    assert log.quoted == [('b', 44, 'invalid'), ('b', 45, 'cannot'), ('b', 47, 'unable 7')]
    monkeypatch.setattr(explain_log, 'QUOTED', 99)
    assert [text for _, _, text in log.quoted] == ['error x', *trouble[:-1], 'unable 7']
    log.read('c', io.BytesIO(b''))
    log.read('d', io.BytesIO(b'x\n\x1b[31merror ' + b'y' * 300 + b'\n'))
    assert log.quoted[-1] == ('d', 2, 'error ' + 'y' * 234) and [name for name, _, _ in log.tails] == ['b', 'd']


def test_a_rule_that_holds_on_a_site_with_its_network(tmp_path, capsys):
    (tmp_path / 'log').write_text('node1:33:33 [0] NCCL INFO Using network Socket\n')
    for network, rule in (('slingshot11', 'tcp-on-slingshot'), ('infiniband', 'tcp'), (None, 'tcp')):
        explain.run([str(tmp_path / 'log')], True, network)
        assert [finding['rule'] for finding in json.loads(capsys.readouterr().out)['findings']] == [rule]


# --- what causes what

@pytest.mark.parametrize('line, found', [
    ('EasyBuildError: One or more OS dependencies were not found: x\n', ['easybuild-system-packages']), (MISSING, ['missing-library']),
    ('WARNING: ' + MISSING, ['missing-library']), ('EasyBuildError: x\n', ['easybuild-said']), ('NameError: x\n', []),
])
def test_a_line_that_a_rule_explains_is_left_to_it(line, found):
    """By a rule that is vaguer, or that takes all exceptions."""
    log = explain.Log(RULES)
    log.read('job.log', io.BytesIO(line.encode()))
    assert ([rule.name for rule in log.findings], len(log.exceptions)) == (found, int(not found))


@pytest.mark.parametrize('logs, told', [
    # what is no warning; what mostly causes others; what the program may survive
    ([f'WARNING: {DISK}', OUT_OF_MEMORY], 'gpu-memory disk-full'),
    ([DISK, OOM], 'host-memory disk-full'), ([NCCL_MEMORY, DISK], 'disk-full nccl-gpu-memory'),
    # the first line, the first file, the end of a long log, the rank that failed first as torchrun says
    ([OUT_OF_MEMORY + DISK], 'gpu-memory disk-full'), ([DISK + OUT_OF_MEMORY], 'disk-full gpu-memory'),
    ([DISK, OUT_OF_MEMORY], 'disk-full gpu-memory'),
    ([DISK + 'x' * (1 << 16) + '\n' + OUT_OF_MEMORY], 'gpu-memory disk-full'),
    ([DISK + 'x' * (1 << 15) + '\n' + OUT_OF_MEMORY], 'disk-full gpu-memory'),
    (['[rank3]: ' + DISK + '[rank5]: ' + OUT_OF_MEMORY], 'disk-full gpu-memory'),
    (['[rank3]: ' + DISK + '[rank5]: ' + OUT_OF_MEMORY + ROOT_CAUSE.format(5)],
     'gpu-memory disk-full first-failed other-ranks-ended'),
    ([DISK + '[rank5]: ' + OUT_OF_MEMORY + ROOT_CAUSE.format(5)],
     'disk-full gpu-memory first-failed other-ranks-ended'),
])
def test_the_order_of_answers(logs, told):
    log = explain.Log(RULES)
    for number, text in enumerate(logs):
        log.read('log %d' % number, io.BytesIO(text.encode()))
    assert [answer.fault.name for answer in explain.answers(log, FAULTS)] == told.split()


@pytest.mark.parametrize('ranks, told', [
    ((3,), []), ((0, 9), ['ranks 1-8 wrote n']), ((0, 10), []), ((0, 1), []), ((*range(70), 79), ['ranks 70-78 wrote']),
    ((*range(70), 81), [])])
def test_ranks_that_wrote_nothing_are_named_where_they_are_few(ranks, told):
    details = read(watchdogs({rank: (1, 'SEND') for rank in ranks}, {}))[0][-1].finding.details
    assert [detail[:17].rstrip() for detail in details if 'wrote no' in detail] == told


def test_a_line_with_several_texts_of_a_rule_counts_once():
    assert read('zipfile.BadZipFile: File is not a zip file\n')[0][0].finding.count == 1


def test_a_log_of_consequences_alone_says_what_is_most_likely():
    reset = 'RuntimeError: Connection reset by peer\n'
    child = 'torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n'
    found = read(reset + child + TIMEOUT.format(0, 1, 'ALLREDUCE'))[0]
    assert [answer.fault.name for answer in found if answer.level == 'weak'] == ['waited', 'ended-without-a-word']
    assert {answer.data()['level'] for answer in found} == {'perhaps', 'consequence'}
    more = read(reset + child + TIMEOUT.format(0, 1, 'ALLREDUCE') + 'RuntimeError: NCCL Error 2: unhandled system error\n')[0]
    assert [answer.level for answer in more].count('weak') == 2
    # an exception that is quoted, or a reason, tells more
    for reason in ('ValueError: 3 is odd\n', OOM):
        assert not [answer for answer in read(reset + child + reason)[0] if answer.level == 'weak']


def test_of_exceptions_of_two_rules_that_of_the_rank_that_failed_first_is_told():
    log = TRACEBACK.format(3, 250, '3 is odd') + TRACEBACK.format(5, 99, 'x').replace('ValueError: x', "KeyError: 'x'")
    assert names(log) == ['unknown-exception']
    findings, _ = read(log + ROOT_CAUSE.format(5))
    assert [answer.fault.name for answer in findings] == ['program-error', 'first-failed', 'other-ranks-ended']
    assert findings[0].finding.details[1] == 'also, in line 6: [rank3]: ValueError: 3 is odd'


# --- which faults are told

SOCKET = 'n1:33:33 [0] NCCL INFO Using network Socket\n'
ALONE = 'n1:33:34 [0] NCCL INFO comm 0x1 rank 0 nRanks 4 nNodes 1 localRanks 4\n'
SLINGSHOT = 'n1:33:33 [0] NCCL INFO Bootstrap : Using hsn0:10.0.0.1<0>\n'
NO_PLUGIN = 'n1:33:33 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.\n'
SINGLE = 'n1:%d:47 [0] NCCL INFO ncclCommInitRank comm 0x5 rank 0 nranks %d cudaDev 0 busId 3000 - Init COMPLETE\n'
WAITED = TIMEOUT.format(0, 1, 'ALLREDUCE')
CANCELLED = 'slurmstepd: error: *** %s ON n1 CANCELLED AT 2026-01-01T12:00:00 %s***\n'
KILLED = 'srun: error: n1: task 0: Killed\n'
REQUEUED = CANCELLED % ('JOB 7', 'DUE TO JOB REQUEUE ')
NO_PROVIDER = 'n1:1:1 [0] NCCL INFO NET/OFI No eligible providers were found\n'


@pytest.mark.parametrize('log, told', [
    (SOCKET, 'tcp'), (SLINGSHOT + SOCKET, 'tcp-on-slingshot'),
    # on one node it is right; the plugin that is not found is why
    (SLINGSHOT + SOCKET + ALONE, ''), (SLINGSHOT + NO_PLUGIN + SOCKET, 'plugin-missing tcp-on-slingshot'),
    # several processes without a larger world; groups of one rank in a job of several are none
    (SINGLE % (1, 1), ''), (SINGLE % (1, 1) * 2, ''), (SINGLE % (1, 1) + SINGLE % (2, 1), 'singletons'),
    (SINGLE % (1, 1) + SINGLE % (2, 1) + SINGLE % (2, 8), ''), ('Hello from rank 0 of 1\n' * 4, 'singletons'),
    # what is likely is told where nothing says why
    (WAITED, 'waited collective-timeout'), (WAITED + OOM, 'host-memory collective-timeout'),
    ('RuntimeError: NCCL Error 2: unhandled system error\n', 'nccl-system-error peer-gone'),
    # Megatron's groups count for themselves
    (TIMEOUT.format(0, 5, 'ALLREDUCE') + STATE.format(0, 5, 5) + TIMEOUT.format(1, 5, 'BROADCAST')
     + STATE.format(1, 5, 5).replace('GUID 0(default_pg)', 'GUID 9(TENSOR)'), 'waited collective-timeout'),
    ('Exception ignored in: <function Adam.__del__ at 0x7f30>\n' + TRACE + 'ValueError: x\n', ''),
    # srun cancels the step after a rank has ended: then what ended it comes first
    (KILLED, 'killed'), (CANCELLED % ('JOB 1', '') + KILLED, 'interrupted'),
    (KILLED + CANCELLED % ('STEP 1.0', ''), 'killed other-ranks-ended'),
    # a job that until-done requeued itself was not preempted
    (REQUEUED, 'preempted'), ('until-done: job 7 goes back to the queue: SIGUSR1 came, saved after 12 s\n' + REQUEUED, ''),
    (NO_PROVIDER, 'wrong-provider'),
    (NO_PROVIDER + 'n1:1:1 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)\n', ''),
    # PyTorch 2.15's engine, signals
    ('[TC][rank=3][name=0] Operation timed out after 600004 ms', 'waited collective-timeout'),
    ('Aborting process on rank 3 due to timeout - timeout watchdog detected operation timeout', 'peer-gone'),
    ('Aborting process due to timeout on rank 3 - timeout watchdog detected operation timeout', 'peer-gone'),
    ('RuntimeError: ProcessGroupNCCL is bound to device cuda:0 but an operation was issued on cuda:1', 'current-gpu'),
    ('NCCL WARN NET/OFI The tuner plugin can not be loaded when explicitly choosing an algorithm or protocol with '
     'NCCL_ALGO/NCCL_PROTO', 'tuner-setting'),
    ('[0] NCCL INFO NET/OFI Initializing\n# ROCm 7.2\ndouble free or corruption (out)', 'rccl-exit crash'),
    ('/var/spool/slurmd/job1/slurm_script: line 9: 4711 User defined signal 1   torchrun train.py', 'signal-usr1'),
    ('NET/OFI Initializing aws-ofi-nccl 1.19.2\nNCCL INFO Connected all rings\n'
     '[TC][rank=3][name=0] Operation timed out after 600004 ms', 'tree-stall collective-timeout'),
    # PyTorch 2.11.0 with NCCL 2.28.9 on an H200
    ('ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n'
     'Last error:\nsocketProgress: Connection closed by remote peer', 'waited peer-gone'),
    ('torch/cuda/__init__.py:180: UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 34: CUDA '
     'driver is a stub library\nValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!', 'stub-driver no-gpu'),
    ('ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n'
     'Unrecognized element token "Rings" when parsing "Rings"', 'nccl-setting peer-gone'),
    ("torch._inductor.exc.InductorError: FileNotFoundError: [Errno 2] No such file or directory: '/no/gcc'", 'torch-compile'),
    # sound logs, and what looks like a failure
    ('[rank0]:[W1127 02:04:16.495586935 Utils.hpp:137] Warning: Environment variable TORCH_NCCL_TRACE_BUFFER_SIZE is '
     'deprecated; use TORCH_FR_BUFFER_SIZE instead (function operator())\n', ''),
    ('', ''), ('epoch 1 loss 0.5\nepoch 2 loss 0.4\n', ''), ('No errors.\nError rate: 0.1\n', ''),
    ('nid001:1:1 [0] NCCL INFO Using network AWS Libfabric\nnid001:1:1 [0] NCCL INFO Connected all rings\n'
     'nid001:1:1 [0] NCCL INFO Connected all trees\n', ''),
    ("W dso_loader.cc:64] Could not load dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open "
     "shared object file: No such file or directory\n"
     "libibverbs: Warning: couldn't load driver 'libefa-rdmav34.so': libefa-rdmav34.so: cannot open shared object file: "
     "No such file or directory\n"
     "A matching Triton is not available. Error caught was: No module named 'triton'\n"
     'qsub: waiting for job 4711.pbs to start\nqsub: job 4711.pbs ready\n'
     'srun: Job 1 step creation temporarily disabled, retrying (Requested nodes are busy)\n'
     'srun: Step created for StepId=1.2\nWorld size: 1\nWorld size: 1\n'
     'sh: line 1: lspci: command not found\nThe loss is influenced by the batch\nskipped: audio file too short\n'
     'Request had invalid authentication credentials.\n'
     'Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2\nInitializing distributed: GLOBAL_RANK: 1, MEMBER: 2/2\n', ''),
])
def test_which_faults_are_told(log, told):
    assert names(log if log.endswith('\n') else log + '\n') == told.split()


def test_a_rank_whose_watchdog_caught_nothing_tells_how_far_it_is():
    """As PyTorch 2.11.0 wrote it on an H200."""
    findings, _ = read(
        '[rank0]:[E1 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, '
        'OpType=ALLREDUCE, NumelIn=19210, NumelOut=19210, Timeout(ms)=20000) ran for 20016 milliseconds before timing out.\n'
        '[rank0]:[E1 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected by watchdog at work '
        'sequence id: 9 PG status: last enqueued work: 9, last completed work: 8\n'
        '[rank1]:[E1 ProcessGroupNCCL.cpp:1914] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal due to a '
        'collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: 8, last '
        'completed NCCL work: 8.\n')
    assert [answer.fault.name for answer in findings] == ['waited', 'collective-timeout']
    assert findings[1].finding.details == [
        'rank 0 waited in ALLREDUCE, number 9',
        'rank 1 had begun fewer collectives of group 0(default_pg) than the others (8 of 9)']


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


def test_blocks_end_where_lines_or_words_do(monkeypatch):
    monkeypatch.setattr(explain_log, 'BLOCK', 16)
    pieces = []
    monkeypatch.setattr(explain.Log, 'search', lambda log, name, block, number: pieces.append((block, number)))
    text = b'one\ntwo\nthree four five six seven\r' + b'8' * 40 + b'\n9 10'
    read(text)
    assert pieces == [(b'one\ntwo\n', 1), (b'three four five six ', 3), (b'seven\r', 3), (b'8' * 30, 3), (b'8' * 10 + b'\n', 3),
                      (b'9 10', 4)]


@pytest.mark.parametrize('mark', ' \r')
def test_lines_across_blocks_are_counted_once(monkeypatch, mark):
    monkeypatch.setattr(explain_log, 'BLOCK', 64)
    findings, _ = read('x' * 50 + '\n' + OOM * 5 + 'y' * 1000 + mark + OOM)
    assert (findings[0].finding.count, findings[0].finding.place) == (6, ('job.log', 2))


def test_a_line_of_many_blocks(monkeypatch):
    monkeypatch.setattr(explain_log, 'BLOCK', 1 << 16)
    findings, _ = read('z' * 300000 + ' ' + OOM + 'next ' + OOM)
    assert (findings[0].finding.count, findings[0].finding.place[1]) == (2, 1)
    assert len(findings[0].finding.line) <= 2 * explain_log.LINE


def test_memory_stays_small_whatever_the_size(tmp_path):
    """As a 1 GB log, by hard limit: 150 MB of log in a process that may have 100 MB, with Python itself."""
    script = ("import sys; sys.path.insert(0, %r)\nfrom slingtorch import explain\n"
              "from slingtorch.explain import log as explain_log\n"
              "class Endless:\n  left = 150\n  def read1(self, size):\n    self.left -= 1\n"
              "    return b'' if self.left < 0 else self.data\n"
              "stream = Endless(); stream.data = (b'step 1 loss 0.5\\n' * 70000)[:explain_log.BLOCK - 1] + b'\\n'\n"
              "faults = explain.read_faults(); log = explain.Log(explain.read_rules(faults)); log.read('big', stream)\n"
              "log.read('end', __import__('io').BytesIO(%r))\n"
              "print([answer.fault.name for answer in explain.answers(log, faults)])\n"
              % (str(ROOT), OOM.encode()))
    limit = 100 << 20
    done = subprocess.run([sys.executable, '-c', script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert (done.stdout, done.returncode) == ("['host-memory']\n", 0), done.stderr


# --- whole answers

def watchdogs(timeouts, states):
    """Lines of ranks on nodes: {rank: (number, operation)}, {rank: (number, last one that it had begun, group)}."""
    text = ''.join(f'nid{rank:06} {rank}: ' + TIMEOUT.format(rank, *timeouts[rank]) for rank in timeouts)
    return text + ''.join(STATE.format(rank, number, begun).replace('0(default_pg)', group)
                          for rank, (number, begun, group) in states.items())


MAIN, TENSOR = '0(default_pg)', '9(TENSOR)'
TWELVE = {rank: (808, 'ALLREDUCE') for rank in range(12)}
SCENES = {
    # 62 ranks wait for rank 7, whose end stands at the end of the log
    'missing': [('a.out', 'n0:1:1 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 65 cudaDev 0\n' + watchdogs(
        {rank: (808, 'ALLREDUCE') for rank in range(64) if rank != 7}, {}).replace('In=64', 'In=1') + OOM
        + 'srun: error: nid000007: task 7: Out Of Memory\nsrun: error: nid000001: tasks 8-15: Terminated\n')],
    'different': [('a.out', watchdogs(
        {**TWELVE, 3: (808, 'BROADCAST'), 8: (5, 'SEND'), 9: (5, 'RECV'), 10: (5, 'BARRIER'), 11: (6, 'SEND')},
        {**{rank: (808, 811, MAIN) for rank in range(7)}, 2: (808, 808, MAIN), 7: (807, 1, MAIN), 8: (5, 1, TENSOR),
         9: (5, 1, TENSOR), 10: (5, 9, 'x'), 11: (6, 12, 'x')}))],
    'exceptions': [('a.out', ''.join(TRACEBACK.format(rank, 250, f'{word} {"differ " * 40}') for rank, word in (
        (3, 'shapes'), (4, 'sizes'), (5, 'names'), (6, 'types'), (7, 'rates'))) + ROOT_CAUSE.format(5))],
    'memory': [('a.out.gz', gzip.compress((OUT_OF_MEMORY + STEPS).encode())), ('b.out', ''.join(
        f'srun: error: nid{rank:06}: task {rank}: Out Of Memory\n' for rank in range(5, 15))),
               ('c.out', ''.join(f'[rank{rank}]: {DISK}' for rank in range(0, 40, 2)))],
    'node': [('a.out', 'nid000001: NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off\nsrun: job 1 queued\n')],
    'note': [('a.out', 'mydaemon: warning: it failed\nn1:33:33 [0] NCCL INFO Using network Socket\n')],
    'nothing': [('a.out', 'mydaemon: warning: it failed\nx'), ('b.out.gz', gzip.compress(bytes(999))[:-9]), ('c.out', ''),
                ('d.out.gz', b'\x1f\x8b\x08')],
}


@pytest.mark.parametrize('scene, as_json', [*((name, False) for name in SCENES), ('node', True), ('nothing', True)])
def test_the_whole_answer(scene, as_json, tmp_path, monkeypatch, capsys):
    """Of a directory, whose newest file comes last."""
    for number, (name, text) in enumerate(SCENES[scene]):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        os.utime(tmp_path / name, (number, 9 - number))
    monkeypatch.chdir(tmp_path)
    status = explain.run(['.'], as_json)
    expected(f'{capsys.readouterr().out}status {status}\n', f'explain/{scene}{".json" * as_json}')


@pytest.mark.parametrize('cause, groups, text', [
    ('a {x} b', {'x': ' 1  2 '}, 'a 1 2 b'), ('a {x}, b {x}.', {}, 'a, b.'), ('a: {x} {y}', {'x': None}, 'a'), ('a ({x})', {}, 'a'),
    ('a (status {x}) b', {}, 'a b'), ('a ({x} {y})', {'y': '1'}, 'a (1)'), ('a ({x} {y} {z})', {'x': '1', 'z': '3'}, 'a (1 3)'),
    ('{x} a', {}, 'a'), ('a: {x}{y}{z} b', {'z': 'c'}, 'a: c b'), ('a {x} b', {'x': 'y' * 99 + ' zz'}, 'a ' + 'y' * 99 + ' ... b'), ('a {x}', {'x': 'y' * 100}, 'a ' + 'y' * 100),
])
def test_the_text_of_a_cause(cause, groups, text):
    """What a group did not find leaves no gap."""
    fault, finding = tables.Fault('x', 'cause'), explain_log.Finding(tables.Rule('x', None, 'y'))
    fault.cause, finding.groups = cause, groups
    assert Answer(fault, finding, set(), 'early').cause() == text


def test_the_same_detail_of_two_rules_is_told_once():
    """Ranks and lines of all that show a fault are counted."""
    log = TRACE.replace('  ', '[rank3]:   ').replace('Trace', '[rank3]: Trace') + '[rank3]: RuntimeError: CUDA_ERROR_OUT_OF_MEMORY\n'
    log += '[rank5]: x RuntimeError: OOM when allocating tensor with shape[64,64]\n' * 2
    [answer] = read(log + log.replace('[rank3]: RuntimeError: CUDA', '[rank3]: RuntimeError: OOM when allocating tensor CUDA'))[0]
    finding = answer.finding
    assert (finding.ranks, finding.count, finding.details) == ({3, 5}, 7, ['place in your program: /a/t.py:3 in f: g()'])


BOUNDS = {'BLOCK': 1 << 20, 'LINE': 4096, 'MAX_TRACKED': 100000, 'ALIKE': 10000, 'MAX_KINDS': 50000, 'MAX_EXCEPTIONS': 1000,
          'SEEN_BUDGET': 1 << 20, 'TAIL': 1 << 16}


def test_what_is_remembered_has_a_bound(monkeypatch):
    assert {name: getattr(explain_log, name) for name in BOUNDS} == BOUNDS
    assert f"{BOUNDS['ALIKE']:,} lines that differ in numbers" in (ROOT / 'docs/explain.md').read_text()
    for name, value in (('MAX_TRACKED', 3), ('MAX_EXCEPTIONS', 20), ('MAX_KINDS', 120), ('ALIKE', 20), ('SEEN_BUDGET', 9)):
        monkeypatch.setattr(explain_log, name, value)
    log = explain.Log(RULES)
    exceptions = ''.join(f'{"X" * number}Error: y\n' for number in range(1, 30))
    singles = ''.join(f'n{number}:1:1 [0] NCCL INFO rank 0 nranks 1 x\n' for number in range(9))
    alike = ''.join(f'[rank{number}]: x exit code 137\n' for number in range(30))
    log.read('words', io.BytesIO(b'some more than nine letters\n'))
    log.read('more', io.BytesIO(b'others\n'))
    assert (log.seen, log.words, log.seen_size) == (
        {b'som mor thn nin lttrs', b''}, {b'som', b'mor', b'thn', b'nin', b'lttrs'}, 21)
    log.read('job.log', io.BytesIO((alike + exceptions + singles + watchdogs(TWELVE, {
        rank: (808, 808, MAIN) for rank in range(12)})).encode()))
    found = {finding.rule.name: finding for finding in log.findings.values()}
    assert (found['killed'].count, found['killed'].ranks, len(found['singletons'].distinct)) == (20, {0, 1, 2}, 3)
    assert [len(part) for part in (log.exceptions, log.timeouts, log.works, log.looked)] == [21, 3, 3, 120]
    assert [finding.nodes for finding in found.values() if finding.rule.role == 'timeout'] == [{'nid%06d' % rank for rank in range(3)}]
    assert explain.answers(log, FAULTS) and log.remarks == [
        'the log has very many similar lines: not all of them were counted']
    assert not [detail for finding in found.values() for detail in finding.details if 'look there first' in detail]


# --- the command

@pytest.mark.parametrize('path, error', [
    ('none.out', 'none.out cannot be read: No such file or directory'), ('.', '')])
def test_what_is_not_there(tmp_path, monkeypatch, capsys, path, error):
    monkeypatch.chdir(tmp_path)
    if error:
        with pytest.raises(explain.ExplainError, match=f"^{error}. Name the output of a job .slurm-JOB.out., or '-'$"):
            explain.run([path])
    else:
        assert explain.run([path]) == 3
        assert capsys.readouterr().out.splitlines()[0] == (
            "remark: . contains no files of PyTorch's flight recorder (...rank-0, ...rank-1) and no job outputs (slurm-*, *.out, "
            "*.err, *.log, *.o4711)")


def test_which_files_are_outputs_of_jobs(tmp_path):
    outputs = ['job.o4711', 'job.e4711', 'job.o4711.3', 'train.err', 'stderr.log', 'slurm-1_2', 'out.txt', 'a.out.gz', 'a.output',
               'a.error']
    for name in [*outputs, 'train.py', 'data.bin', 'outputs', 'a.out.zip', 'slurm-x', 'job.o', 'a.o1x']:
        (tmp_path / name).write_text('')
    (tmp_path / 'directory.out').mkdir()
    assert sorted(map(os.path.basename, explain.outputs(str(tmp_path)))) == sorted(outputs)


def test_the_command(tmp_path):
    """Several files are one log."""
    (tmp_path / 'job.gz').write_bytes(gzip.compress(OOM.encode() * 2))
    (tmp_path / 'none.out').write_text('step 1\n')
    done = command(tmp_path / 'none.out', '-', tmp_path / 'job.gz', stdin=OOM.encode())
    lines = done.stdout.decode().splitlines()
    assert (done.returncode, done.stderr, lines[1][:40], lines[2]) == (
        0, b'', '   line     standard input:1: slurmstepd', '   seen     3 lines')
    done = command(tmp_path / 'none')
    assert done.returncode == 1 and b'none cannot be read: No such file' in done.stderr and done.stdout == b''


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


def test_a_log_of_zeros_of_20_megabytes_that_is_one_line(tmp_path):
    with open(tmp_path / 'log', 'wb') as handle:
        handle.seek(20 << 20)
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


def test_a_log_that_is_cut_in_a_character():
    findings, remarks = read(OOM.encode() + 'ü'.encode()[:1])
    assert [answer.fault.name for answer in findings] == ['host-memory'] and len(remarks) == 1


# --- answers

TERMINATE = ("terminate called after throwing an instance of 'boost::filesystem::filesystem_error'\n"
             '  what():  boost::filesystem::permissions: No such file or directory: '
             '"/home/me/.config/miopen//x.ufdb.txt"\n')


@pytest.mark.parametrize('label', LABELS + ['3: ', '2026-01-01T12:00:00 ', 'nid001234 3: ', 'x1001c7s6b0n0: '])
def test_what_terminate_says_on_two_lines(label):
    assert explain_log.LABEL.sub('', explain_log.readable(f'{label}x'.encode())) == 'x'
    labelled = ''.join(label + line + '\n' for line in TERMINATE.splitlines())
    assert names(labelled) == ['miopen-database']


def test_the_last_line_of_two_rules_for_one_fault_counts():
    """The program may have gone on after the last line of one, but not of the other."""
    one, other = explain_log.Finding(RULES[0]), explain_log.Finding(RULES[0])
    one.until, other.until = 5, 9
    one.merge(other)
    assert one.until == 9
