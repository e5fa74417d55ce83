# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch explain: every rule against its own sample, public logs, logs as they come, flight recorders."""
import configparser
import gzip
import io
import json
import os
import pathlib
import pickle
import re
import resource
import subprocess
import sys
import time

import pytest

from slingtorch import explain

ROOT = pathlib.Path(__file__).resolve().parents[2]
RULES = explain.read_rules()
SAMPLES = configparser.ConfigParser(interpolation=None, delimiters=('=',), comment_prefixes=('#',))
SAMPLES.read(pathlib.Path(__file__).with_name('explain_samples.cfg'), encoding='utf-8')

TIMEOUT = ("[rank{0}]:[E626 06:24:44.903 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation "
           "timeout: WorkNCCL(SeqNum={1}, OpType={2}, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600020 "
           "milliseconds before timing out.\n")
STATE = ("[rank{0}]:[E626 06:24:44.906 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Exception "
         "(either an error or timeout) detected by watchdog at work: {1}, last enqueued NCCL work: {2}, last completed "
         "NCCL work: 807.\n")
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been OOM Killed\n"


def read(text, facts=(), name='job.log'):
    """The findings in a log, and what is remarked about it."""
    log = explain.Log(RULES)
    log.read(name, io.BytesIO(text if isinstance(text, bytes) else text.encode()))
    return log.report(facts), log.remarks


def names(text, facts=()):
    """The names of the rules that find something."""
    return [finding.rule.name for finding in read(text, facts)[0]]


def command(*args, stdin=b''):
    """Run the command as a user does."""
    env = {'PATH': '/usr/bin:/bin', 'HOME': '/nonexistent', 'PYTHONPATH': str(ROOT)}
    return subprocess.run([sys.executable, '-m', 'slingtorch', 'explain', *map(str, args)], input=stdin, env=env,
                          cwd='/', stdout=subprocess.PIPE, stderr=subprocess.PIPE)


# --- the rules

@pytest.mark.parametrize('name', RULES)
def test_a_rule_finds_its_sample_and_no_other_comes_before_it(name):
    rule, log = RULES[name], explain.Log(RULES)
    log.read('sample', io.BytesIO('\n'.join(rule.sample).encode() + b'\n'))
    if rule.level == 'fact':
        assert name in log.findings
    else:
        found = own(log, name)
        assert found[0].rule.name == name
        assert '{' not in found[0].cause()


@pytest.mark.parametrize('name', RULES)
def test_each_line_of_a_sample_is_needed_by_some_rule(name):
    """A sample holds no line that proves nothing."""
    rule = RULES[name]
    for line in rule.sample if rule.lines == 1 else ['\n'.join(rule.sample)]:
        log = explain.Log(RULES)
        log.read('line', io.BytesIO(line.encode() + b'\n'))
        assert log.findings, line


def read_forms():
    """[(rule, line)] of explain_forms.txt."""
    forms, name = [], ''
    for line in pathlib.Path(__file__).with_name('explain_forms.txt').read_text(encoding='utf-8').splitlines()[5:]:
        header = re.match(r'\[([a-z0-9-]+)\]$', line)
        if header and header.group(1) in RULES:
            name = header.group(1)
        elif line:
            forms.append((name, line))
    return forms


FORMS = read_forms()


def conditional(rule):
    """Whether it needs more than one line."""
    return rule.level == 'fact' or rule.needs or rule.absent or rule.distinct or rule.lines > 1


def own(log, name):
    """The report without rules that are told only where no other says why, unless it is this one."""
    return [finding for finding in log.report() if not finding.rule.alone or finding.rule.name == name]


@pytest.mark.parametrize('name', dict(FORMS))
def test_each_form_of_a_message_is_answered_by_its_rule_first(name):
    for line in [line for rule, line in FORMS if rule == name]:
        log = explain.Log(RULES)
        log.read('form', io.BytesIO(line.encode() + b'\n'))
        assert name in log.findings and (conditional(RULES[name]) or own(log, name)[0].rule.name == name), line


ORDINARY = ['The model was trained for three epochs on 8 GPUs; the loss is 0.35.',
            'Saved to /scratch/project/out.txt in 2.5 s', '[rank0]: step 100: loss=1.234 lr=1e-4', 'a', '0', ': ', '[]',
            'INFO 2026-01-01 12:00:00 main.py:12] starting']


@pytest.mark.parametrize('name', RULES)
def test_no_rule_matches_ordinary_lines(name):
    """Without the texts that it looks for first, too."""
    if name != 'saving':    # it says that a program saves
        assert [line for line in ORDINARY if RULES[name].search(line)] == []


@pytest.mark.parametrize('name', [name for name, rule in RULES.items()
                                  if rule.level == 'cause' and not (rule.needs or rule.absent or rule.distinct)])
def test_no_broad_rule_answers_for_a_line_that_a_cause_knows(name):
    samples = RULES[name].sample if RULES[name].lines == 1 else []
    for line in samples + [line for rule, line in FORMS if rule == name]:
        log = explain.Log(RULES)
        log.read('form', io.BytesIO(line.encode() + b'\n'))
        if name in log.findings:
            assert [found for found in log.findings if RULES[found].level in explain.BROAD] == [], line


def alternatives(pattern):
    """
    What stands between the bars of an expression, each as an expression that has it alone.

    A group of single words, inside of a text, is a list of names, one of which will do; what must not match needs none.
    """
    groups, found, place = [[0, [], False]], [], 0

    def close(end):
        start, bars, forbidden = groups.pop()
        cuts = [start - 1] + bars + [end]
        parts = [pattern[first + 1:last] for first, last in zip(cuts, cuts[1:])]
        if bars and not forbidden and (not groups or any(' ' in part or '\\s' in part for part in parts)):
            found.extend(pattern[:start] + part + pattern[end:] for part in parts)

    while place < len(pattern):
        char = pattern[place]
        if char == '\\':
            place += 1
        elif char == '[':
            place += 1 + pattern.startswith('[^', place)
            place += pattern[place] == ']'
            while pattern[place] != ']':
                place += 1 + (pattern[place] == '\\')
        elif char == '(':
            head = re.match(r'\((?:\?P<\w+>|\?<?[=!]|\?\w*:|\?\w+(?=\)))?', pattern[place:]).group()
            place += len(head) - 1
            groups.append([place + 1, [], groups[-1][2] or head in ('(?!', '(?<!')])
        elif char == '|':
            groups[-1][1].append(place)
        elif char == ')':
            close(place)
        place += 1
    close(len(pattern))
    return found or [pattern]


def test_alternatives_are_found():
    assert alternatives('a|b c') == ['a', 'b c']
    assert alternatives(r'x (?:a b|c[|)]) \(y\|') == [r'x (?:a b) \(y\|', r'x (?:c[|)]) \(y\|']
    assert alternatives('x(?!a |b)(?:cu|hip)y') == ['x(?!a |b)(?:cu|hip)y']


@pytest.mark.parametrize('name', RULES)
def test_each_alternative_has_a_sample(name):
    rule = RULES[name]
    texts = ['\n'.join(rule.sample)] if rule.lines > 1 else rule.sample
    texts = texts + [line for other, line in FORMS if other == name]
    texts += [line.strip() for section in SAMPLES.sections() for line in SAMPLES[section]['log'].splitlines()]
    texts += [line for marked in TEXTS for line in marked[1].split('\n') if marked[0] == name]
    texts += [line for text, other in DOCUMENTED if other == name for line in text.split('\n')]
    texts = [text for text in texts if any(has in text.encode() for has in rule.has)]
    texts += [explain.LABEL.sub('', text) for text in texts]
    without = [one for pattern in rule.patterns for one in alternatives(pattern.pattern)
               if not any(re.search(one, text) for text in texts)]
    assert without == []


NCCL = 'nid001001:4711:4811 [0] NCCL WARN '
CXI = 'libfabric:4711:1701636928::cxi:core:cxip_cmdq_cp_alloc():83<warn> x1001c7s6b0n0: '
CUDA = 'RuntimeError: CUDA error: '


TEXTS = [
    # NVIDIA/nccl src/bootstrap.cc, v2.12.7-1 to v2.22.3-1; from v2.23.4-1 on
    ('rank-twice', NCCL + 'Bootstrap Root : mismatch in rank count from procs 8 : 4'),
    ('rank-twice', NCCL + 'Bootstrap Root : mismatch in info from procs, nranks 8 vs 4, nroots 1 vs 1, iroot 0 vs 0'),
    # src/transport/net_ib.cc, to v2.19.4-1; v2.20.3-1 to v2.22.3-1; to v2.28.3-1; from v2.28.7-1 on
    ('ib-link', NCCL + 'NET/IB : Got async event : port error'),
    ('ib-link', NCCL + 'NET/IB : mlx5_0:1 Got async event : port error'),
    ('ib-link', NCCL + 'NET/IB : mlx5_0:1 Got async error event: port error'),
    ('ib-link', NCCL + 'NET/IB : mlx5_0:1 Got non-fatal async event: port error(10)'),
    # cudaGetErrorString() of 805 to 810, CUDA 13.0
    ('mps', CUDA + 'MPS client failed to connect to the MPS control daemon or the MPS server'),
    ('mps', CUDA + 'the remote procedural call between the MPS server and the MPS client failed'),
    ('mps', CUDA + 'MPS server is not ready to accept new MPS client requests'),
    ('mps', CUDA + 'the hardware resources required to create MPS client have been exhausted'),
    ('mps', CUDA + 'the hardware resources required to support device connections have been exhausted'),
    ('mps', CUDA + 'the MPS client has been terminated by the server'),
    # ofiwg/libfabric v2.6.0 prov/cxi/src/cxip_cmdq.c
    ('cxi-access', CXI + 'No room to allocate CP for VNI:1024'),
    # prov/cxi/src/cxip_iomm.c: MAP_FAIL_MSG, and line 513; with brackets: issue 27
    ('cxi-register', CXI + 'cxil_map failed: -12:Cannot allocate memory'),
    ('cxi-register', CXI + 'cxil_map() failed: -12:Cannot allocate memory'),
    # NVIDIA/nccl src/transport/net.cc
    ('tcp', 'n1:33:47 [0] NCCL INFO Channel 00/0 : 0[0] -> 4[0] [send] via NET/Socket/1'),
    ('tcp', 'n1:33:47 [0] NCCL INFO Channel 00/0 : 0[0] -> 4[0] [send] via NET/Socket/1(2)/Shared'),
    ('tcp', 'n1:33:47 [0] NCCL INFO Channel 00/0 : 4[0] -> 0[0] [receive] via NET/Socket/0'),
    ('cxi-access', CXI + 'Failed to allocate CP, ret: -28 VNI: 1024 TC: LOW_LATENCY TYPE: DEFAULT'),
]


@pytest.mark.parametrize('rule, line', TEXTS)
def test_texts_of_upstreams_sources(rule, line):
    """Each form that releases in use have."""
    assert names(line + '\n')[:1] == [rule]


def test_a_port_that_came_back_is_no_broken_connection():
    assert 'ib-link' not in names(NCCL + 'NET/IB : mlx5_0:1 Got non-fatal async event: port active(9)\n')


@pytest.mark.parametrize('text', ['HSA_STATUS_ERROR_HARDWARE', 'Failed to create LNI', 'cxip_auth.c'])
def test_nothing_that_upstream_does_not_have(text):
    """Looked for in ROCm/rocm-systems and ofiwg/libfabric, v1.15.2 to v2.6.0."""
    assert text not in pathlib.Path(explain.RULES).read_text(encoding='utf-8')


@pytest.mark.parametrize('name', SAMPLES.sections())
def test_public_logs(name):
    """What people reported, with the cause that was found there."""
    assert names(SAMPLES[name]['log'].strip() + '\n')[:1] == [SAMPLES[name]['expect']]


# what the documents name that the rules come from: HPE's and CSCS' on NCCL on Slingshot, OLCF's, NCAR's and LUMI's
DOCUMENTED = [
    ('NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).', 'plugin-not-loaded'),
    ('NCCL INFO NET/Plugin : No plugin found (librccl-net.so), using internal implementation', 'plugin-not-loaded'),
    ('NCCL INFO NET/Plugin: Could not find: libnccl-net.so.', 'plugin-not-loaded'),
    ('NCCL INFO NET/Plugin: Could not find: ofi libnccl-net-ofi.so. Using internal network plugin.',
     'plugin-not-loaded'),
    ('NCCL WARN Error: network AWS Libfabric not found.', 'network-not-found'),
    ('NCCL INFO NET/IB : No device found.\nNCCL INFO Using network Socket', 'tcp-on-slingshot'),
    ('NCCL INFO NET/OFI Selected Provider is sockets (found 1 nics)', 'wrong-provider'),
    ('MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked', 'gtl-missing'),
    ('(GTL DEBUG: 0) cuIpcGetMemHandle: invalid argument', 'gtl-managed-memory'),
    ('Unable to find address for: hsn', 'no-interface'),
    ('Default TX size invalid. Setting to 512', 'cxi-tx-size'),
    ('Cassini Event Queue overflow detected.', 'cxi-event-queue'),
    ('IndexError: map::at', 'mpi-data-type'),
    ('DistStoreError: Timed out after 601 seconds waiting for clients. 2016/2048 clients joined.', 'store-incomplete'),
    ('(errno: 97 - Address family not supported by protocol).', 'errno-97'),
    ('Internal error while accessing SQLite database: locking protocol', 'miopen-database'),
    ('Internal error while accessing SQLite database: disk I/O error', 'miopen-database'),
    ('NET/OFI Initializing aws-ofi-nccl 1.19.2\nNCCL INFO Connected all rings\n*** JOB 1 DUE TO TIME LIMIT ***',
     'tree-stall'),
    # newer releases of NCCL connect trees later, and say nothing
    ('NCCL INFO Connected all rings\n*** JOB 1 ON n CANCELLED AT 2026 DUE TO TIME LIMIT ***', 'time-limit'),
    ('NET/OFI Initializing aws-ofi-nccl 1.18.0\nNCCL INFO Connected all rings\n*** JOB 1 DUE TO TIME LIMIT ***',
     'time-limit'),
    ('export FI_CXI_RDV_PROTO=alt_read', 'misspelt'),
    ('NCCL_NET_GDR_LEVEL=PBH', 'misspelt'),
    ('RuntimeError: CUDA error: invalid device ordinal', 'gpu-number'),
    ('# Out of bounds values : 951005 FAILED', 'wrong-values'),
    ('ImportError: libcuda.so.1: cannot open shared object file: No such file or directory', 'missing-library'),
]


@pytest.mark.parametrize('text, expected', DOCUMENTED)
def test_lines_that_the_documents_name(text, expected):
    assert names(text + '\n', ['slingshot'])[:1] == [expected]


@pytest.mark.parametrize('text, words', [
    ('[a]\nlevel = cause\n', 'missing: has, pattern, sample, source, cause, remedy'),
    ('[a]\nlevel = fact\nhas = x\npattern = (\nsample = x\nsource = x\n', 'no regular expression'),
    ('[a]\nlevel = fact\nhas = x\npattern = x\nsample = x\nsource = x\nneeds = b\n', '[b], which is not there'),
    ('[a]\nlevel = fact\nhas = x\npattern = x\nsample = x\nsource = x\nwhy = x\n', 'unknown keys: why'),
    ('[a]\nlevel = fact\nhas = x\npattern =\n  x\n  (y\nsample = x\nsource = x\n', '(y is no regular expression'),
    ('[a]\nlevel = fact\nhas = x\npattern = x\nsample = x\nsource = x\nrole = y\n', "role is 'y', one of timeout"),
    ('level = fact\n', 'cannot be read'),
    ('[a]\nlevel = fact\nhas = x\npattern = .*\nsample = x\nsource = x\n', 'rule [a] matches every line'),
    ('[a]\nlevel = fact\nhas = x\npattern =\n  x\n  (y)?\nsample = x\nsource = x\n', 'matches every line'),
])
def test_rules_that_are_wrong(tmp_path, text, words):
    path = tmp_path / 'rules.cfg'
    path.write_text(text)
    with pytest.raises(explain.ExplainError) as info:
        explain.read_rules(str(path))
    assert words in str(info.value)


def test_of_several_patterns_the_leftmost_counts():
    keys = {'has': 'x', 'pattern': 'b(?P<what>.)\na(?P<what>.)', 'sample': 'x', 'source': 'x', 'level': 'fact'}
    rule = explain.Rule('forms', keys)
    assert [rule.search(text).group('what') for text in ('a1 b2', 'b2 a1')] == ['1', '2'] and not rule.search('c')


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
    assert [finding.rule.name for finding in findings] == ['host-memory', 'collective-timeout', 'other-ranks-ended']
    assert (findings[0].ranks, findings[0].nodes, findings[0].count) == ({7}, {'nid001234'}, 2)
    assert findings[1].count == 63
    assert findings[1].details == ["ranks 0-6,8-63 waited in ALLREDUCE, number 808",
                                   "rank 7 wrote no such line: look there first"]


def test_ranks_that_called_different_collectives_are_named():
    log = ''.join(TIMEOUT.format(rank, 808, 'BROADCAST' if rank == 3 else 'ALLREDUCE') + STATE.format(rank, 808, 808)
                  for rank in range(8))
    findings, _ = read(log)
    assert [finding.rule.name for finding in findings] == ['collectives-differ', 'collective-timeout']
    assert findings[0].details == ["rank 3 called BROADCAST as number 808",
                                   "ranks 0-2,4-7 called ALLREDUCE as number 808", "in group 0(default_pg)"]


def test_the_same_number_in_another_group_is_no_difference():
    """Megatron's groups count for themselves."""
    log = TIMEOUT.format(0, 5, 'ALLREDUCE') + STATE.format(0, 5, 5)
    log += TIMEOUT.format(1, 5, 'BROADCAST') + STATE.format(1, 5, 5).replace('GUID 0(default_pg)', 'GUID 9(TENSOR)')
    assert names(log) == ['waited-for-a-rank', 'collective-timeout']


def test_a_rank_that_is_behind():
    log = ''.join(TIMEOUT.format(rank, 808, 'ALLREDUCE') + STATE.format(rank, 808, 808 if rank == 2 else 811)
                  for rank in range(4))
    assert "rank 2 had begun fewer collectives" in read(log)[0][-1].details[-1]


def test_what_is_likely_is_told_where_nothing_says_why():
    timeout = TIMEOUT.format(0, 1, 'ALLREDUCE')
    assert names(timeout) == ['waited-for-a-rank', 'collective-timeout']
    assert names(timeout + OOM) == ['host-memory', 'collective-timeout']
    assert names('RuntimeError: NCCL Error 2: unhandled system error\n')[:1] == ['nccl-system-error']


def test_an_exception_that_nobody_knows_stands_before_what_follows():
    log = TIMEOUT.format(0, 1, 'ALLREDUCE')
    log += '[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: Expected input batch_size (32)\n'
    log += 'torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n'
    findings, _ = read(log)
    assert [finding.rule.name for finding in findings] == ['python-exception', 'collective-timeout',
                                                           'other-ranks-ended']
    assert findings[0].ranks == {1} and 'ValueError' in findings[0].cause()


def test_a_log_of_consequences_alone_says_what_is_most_likely():
    reset = 'RuntimeError: Connection reset by peer\n'
    child = 'torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n'
    findings, _ = read(reset + child + TIMEOUT.format(0, 1, 'ALLREDUCE'))
    # two at most, in the order of the rules
    assert [finding.rule.name for finding in findings if finding.rule.alone] == ['waited-for-a-rank', 'connection-lost']
    assert {finding.rule.level for finding in findings} == {'perhaps', 'consequence'}
    assert names(child)[0] == 'ended-without-a-word'
    # an exception that is quoted, or a reason, tells more
    for reason in ('ValueError: 3 is odd\n', OOM):
        assert not [finding for finding in read(reset + child + reason)[0] if finding.rule.alone]


def test_of_exceptions_of_two_rules_that_of_the_rank_that_failed_first_is_told():
    log = TRACEBACK.format(3, 250, '3 is odd') + TRACEBACK.format(5, 99, 'x').replace('ValueError: x', "KeyError: 'x'")
    assert names(log) == ['python-exception']
    findings, _ = read(log + ROOT_CAUSE.format(5))
    assert [finding.rule.name for finding in findings] == ['program-error', 'first-failed', 'other-ranks-ended']
    assert findings[0].details[1] == 'also, in line 6: [rank3]: ValueError: 3 is odd'


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
    assert findings[0].details == ["the last line of the program itself: /home/me/train.py:250 in main: "
                                   "loss = step(batch)", "also, in line 12: [rank5]: ValueError: file is empty"]
    # torchrun knows better which rank was first
    findings, _ = read(log + ROOT_CAUSE.format(5))
    assert [finding.rule.name for finding in findings] == ['python-exception', 'first-failed', 'other-ranks-ended']
    assert 'file is empty' in findings[0].cause() and 'train.py:99' in findings[0].details[0]
    assert findings[1].cause() == 'torchrun saw rank 5 on nid001002 fail first, with status 1'


def test_an_exception_that_python_ignored_is_none():
    ignored = 'Exception ignored in: <function Adam.__del__ at 0x7f30>\n'
    assert names(ignored + TRACEBACK.replace('[rank{0}]: ', '')) == []


def test_the_progress_bar_before_a_timeout_is_told():
    bar = ' 34%|###  | 73/208 [29:59<57:14, 3MB/s]\r 35%|###  | 74/208 [30:01<57:12, 3MB/s]\n'
    assert 'stood at 35 % after 30:01' in read(bar + TIMEOUT.format(6, 1, 'ALLREDUCE'))[0][-1].details[0]


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
    assert names(missing + line, ['slingshot']) == ['plugin-not-loaded', 'tcp-on-slingshot']


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
    assert [finding.rule.name for finding in findings] == ['gpu-number']
    assert findings[0].ranks == ({12} if '12' in label else {7} if '7' in label else set())
    assert '\x1b' not in findings[0].line


def test_line_ends_of_windows_progress_bars_and_a_last_line_that_is_cut():
    bar = '\r'.join('%3d%%|####|' % number for number in range(100))
    text = 'one\r\n%s\rtorch.OutOfMemoryError: CUDA out of memory. Tried\r\nlast line withou' % bar
    findings, remarks = read(text)
    assert findings[0].place == ('job.log', 2)
    assert findings[0].line == 'torch.OutOfMemoryError: CUDA out of memory. Tried'
    assert len(remarks) == 1 and 'ends in the middle of a line' in remarks[0]


def test_binary_rubbish_is_no_obstacle_and_steers_no_terminal():
    rubbish = bytes(range(256)) * 64
    findings, _ = read(rubbish + b'\n' + b'\x1b]0;title\x07\x9b31m' + OOM.encode() + rubbish + b'\n')
    assert [finding.rule.name for finding in findings] == ['host-memory']
    assert findings[0].line.isprintable()


def test_lines_across_blocks_are_counted_once(monkeypatch):
    monkeypatch.setattr(explain, 'BLOCK', 64)
    findings, _ = read('x' * 50 + '\n' + OOM * 5 + 'y' * 1000 + ' ' + OOM)
    assert (findings[0].count, findings[0].place) == (6, ('job.log', 2))


def test_a_line_of_megabytes():
    findings, _ = read('z' * 3000000 + ' ' + OOM + 'next ' + OOM)
    assert (findings[0].count, findings[0].place[1]) == (2, 1)
    assert len(findings[0].line) <= 2 * explain.LINE


def test_memory_stays_small_whatever_the_size(tmp_path):
    """As a 1 GB log, by hard limit: 150 MB of log in a process that may have 100 MB, with Python itself."""
    script = ("import sys; sys.path.insert(0, %r)\nfrom slingtorch import explain\n"
              "class Endless:\n  left = 150\n  def read(self, size):\n    self.left -= 1\n"
              "    return b'' if self.left < 0 else self.data\n"
              "stream = Endless(); stream.data = (b'step 1 loss 0.5\\n' * 70000)[:explain.BLOCK - 1] + b'\\n'\n"
              "log = explain.Log(explain.read_rules()); log.read('big', stream)\n"
              "log.read('end', __import__('io').BytesIO(%r)); print([f.rule.name for f in log.report()])\n"
              % (str(ROOT), OOM.encode()))
    limit = 100 << 20
    done = subprocess.run([sys.executable, '-c', script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert (done.stdout, done.returncode) == ("['host-memory']\n", 0), done.stderr


def test_many_ranks_are_counted_and_shown_short(capsys):
    text = ''.join('[rank%d]: RuntimeError: CUDA error: invalid device ordinal\n' % rank for rank in range(0, 4000, 2))
    findings, _ = read(text)
    explain.print_finding(1, findings[0])
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


# --- the flight recorder

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
    assert ('group default_pg, collective 2 (nccl:all_reduce [[3]] at /home/me/train.py:20): rank 2 did not come; '
            'ranks 0-1,3 did') in shown
    assert 'rank 2 was last in collective 1, nccl:all_reduce [[3]] at /home/me/train.py:55' in shown


@pytest.mark.parametrize('dumps, words', [
    ({0: dump([entry(1, state='started')]), 1: dump([entry(1, 'nccl:broadcast', 'started')])},
     'ranks called different ones: rank 0 called nccl:all_reduce'),
    ({0: dump([entry(1, state='started')], '[0, 1]'), 1: dump([entry(1, state='scheduled')], '[0, 1]')},
     'all ranks with a file came, and it did not end'),
    ({0: dump([entry(1, state='started')], '[0, 1]')}, 'rank 1 left no file'),
    ({0: dump([entry(1, state='started')], '[0, 1]'), 1: dump([], '[0, 1]')}, 'rank 1 had begun none'),
    ({0: dump([entry(1), entry(1, 'nccl:recv 0<-1', 'started', 30, is_p2p=True)], '[0]')},
     'rank 0 waits in a send or receive: nccl:recv 0<-1 [[3]] at /home/me/train.py:30'),
])
def test_flight_recorder_says(tmp_path, dumps, words):
    write(tmp_path, dumps)
    assert words in ' '.join(command(tmp_path).stdout.decode().split())


def test_flight_recorder_of_a_sound_job(tmp_path):
    write(tmp_path, {rank: dump([entry(1), entry(2)]) for rank in range(4)})
    done = command(tmp_path)
    assert done.returncode == 3 and b'every collective that was begun ended' in done.stdout


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
    assert 'rank-0 is no file of the flight recorder' in shown and 'rank-1 is no file' in shown
    assert 'has no files of PyTorch' in shown


# --- files as they come

def test_an_empty_file_is_called_empty(tmp_path):
    (tmp_path / 'empty').write_bytes(b'')
    done = command(tmp_path / 'empty')
    assert done.returncode == 3 and b'is empty: the job wrote nothing' in done.stdout


@pytest.mark.parametrize('mark, encoding', [(b'\xff\xfe', 'utf-16-le'), (b'\xfe\xff', 'utf-16-be')])
def test_utf_16_is_read(tmp_path, mark, encoding):
    (tmp_path / 'log').write_bytes(mark + OOM.encode(encoding))
    done = command(tmp_path / 'log')
    assert done.returncode == 0 and b'The memory of a node was used up' in done.stdout


@pytest.mark.parametrize('name', ['<(cat {0})', '/dev/stdin < <(cat {0})'])
def test_what_can_be_read_only_once(tmp_path, name):
    (tmp_path / 'log').write_text(OOM)
    env = {'PATH': '/usr/bin:/bin', 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(['bash', '-c', sys.executable + ' -m slingtorch explain ' + name.format(tmp_path / 'log')],
                          env=env, cwd='/', stdout=subprocess.PIPE, check=True)
    assert b'The memory of a node was used up' in done.stdout


def test_the_empty_answer_says_what_to_switch_on():
    done = command('-', stdin=b'all is well\n')
    assert done.returncode == 3
    for word in (b'NCCL_DEBUG=INFO', b'FI_LOG_LEVEL=warn', b'--check'):
        assert word in done.stdout


@pytest.mark.parametrize('encoding', ['utf-16', 'utf-16-le', 'utf-16-be'])
def test_utf_16_without_a_mark_and_on_standard_input(tmp_path, encoding):
    (tmp_path / 'log').write_bytes(OOM.encode(encoding))
    for done in (command(tmp_path / 'log'), command('-', stdin=OOM.encode(encoding))):
        assert done.returncode == 0 and b'The memory of a node was used up' in done.stdout


def test_a_fifo(tmp_path):
    os.mkfifo(tmp_path / 'fifo')
    writer = subprocess.Popen(['bash', '-c', 'printf "%s" "$1" > "$2"', 'bash', OOM, str(tmp_path / 'fifo')])
    done = command(tmp_path / 'fifo')
    assert writer.wait() == 0 and done.returncode == 0 and b'The memory of a node was used up' in done.stdout


def test_a_log_of_zeros_of_one_gigabyte_that_is_one_line(tmp_path):
    with open(tmp_path / 'log', 'wb') as handle:
        handle.seek(1 << 30)
        handle.write(b' ' + OOM.encode())
    done = command(tmp_path / 'log')
    assert done.returncode == 0 and b'The memory of a node was used up' in done.stdout


def test_an_ordinary_log_is_read_as_fast_as_documented():
    """10 MB at the rate of 200 MB in 10 s, in processor time."""
    log = explain.Log(RULES)
    lines = b''.join(b'[rank%d]: step %d: loss=0.%04d lr=1e-4\n' % (step % 64, step, step) for step in range(250000))
    start = time.process_time()
    log.read('job.log', io.BytesIO(lines))
    assert len(lines) > 9 << 20 and time.process_time() - start < 0.5 and log.report() == []


def test_two_jobs_after_one_another():
    """The cause of each is told."""
    first = 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.\n'
    assert names(first + 'step 1\n' + OOM) == ['host-memory', 'gpu-memory']


def test_a_log_that_is_cut_in_a_character():
    findings, remarks = read(OOM.encode() + 'ü'.encode()[:1])
    assert [finding.rule.name for finding in findings] == ['host-memory'] and len(remarks) == 1


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
    shown = read(line + '\n')[0][0].evidence()
    assert words in shown and len(shown) <= explain.SHOWN + 10


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
    assert names(cancelled + killed) == ['job-cancelled'] and names(killed) == ['killed']
    # srun cancels the step after a rank has ended: then what ended it comes first
    assert names(killed + cancelled.replace('JOB 1', 'STEP 1.0'))[0] == 'killed'


def test_a_provider_that_is_found_later_is_no_fault():
    missing = 'nid001:1:1 [0] NCCL INFO NET/OFI No eligible providers were found\n'
    found = 'nid001:1:1 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)\n'
    assert names(missing) == ['ofi-no-provider'] and names(missing + found) == []


def test_after_many_lines_only_new_kinds_are_looked_at(monkeypatch):
    monkeypatch.setattr(explain, 'MATCHES', 10)
    monkeypatch.setattr(explain, 'BLOCK', 256)
    dense = ''.join('2026-01-01T12:00:%02d exit code 0 after %d.5 s\n' % (number % 60, number) for number in range(500))
    late = '[rank3]: x exit code 137\n[rank5]: x exit code 137\n'
    findings, remarks = read(dense + late)
    assert [finding.rule.name for finding in findings] == ['killed'] and findings[0].ranks == {3, 5}
    assert findings[0].place == ('job.log', 501) and 'were not counted after 10' in remarks[0]
