# SPDX-License-Identifier: GPL-2.0-only
"""What --check tries of the network and of limits: words for what the kernel said, limits, directories, programs."""
import ast
import io
import json
import os
import pathlib
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import types

import pytest

from slingtorch.job import check, elf, findings, gather, limits, look, nccl, network, node, probe, program, rules
from slingtorch.job.machine import Machine
from testbed import ROOT, raising

pytestmark = pytest.mark.usefixtures('whole_findings')
QUIET = {'resent': 0, 'sent': 40, 'trip': 0}


def parsed(text, words=(), env=()):
    """A program of one file."""
    return rules.Program(text.encode(), dict(env), list(words))


def of_level(report, level, name):
    return [finding.text for finding in report.having(level, name)]


# --- why an all_reduce failed: what TCP_INFO said in the test bed with each fault planted


def own(**told):
    """One of connections()."""
    return {'state': 1, 'again': 0, 'here': '10.0.0.1', 'underway': 0, 'resent': 0, 'sent': 40, 'trip': 0, **told}


def caused(*errors):
    """The findings of a job whose nodes have these errors: (text, connections, segments resent before)."""
    report = findings.Report()
    for rank, (text, sockets, before) in enumerate(errors):
        report.add('red', 'collective', text + network.state(sockets, before), 'look there', 1 << rank)
    check.one_cause(report)
    return list(report.findings.items())


CONNECTS = own(state=network.CONNECTING)


@pytest.mark.parametrize('error, sockets, before, says', [
    # the second node's egress dropped all packets above 1000 bytes
    ('the all_reduce of 64 kB did not end within 9 s', [own(again=1, underway=1, resent=5)], 0,
     'small messages pass, but the all_reduce of 64 kB does not.*MTU'),
    ('the all_reduce of 64 kB failed: RuntimeError: Read error [10.77.0.2]:50820: Connection timed out', [], 0,
     'small messages pass'),
    # 60 % of all packets dropped: the small ones needed several trials too
    ('the all_reduce of 64 kB did not end within 9 s', [own(again=1, underway=1, resent=9)], 4, 'packets get lost'),
    ('the all_reduce of one float did not end within 9 s', [own(again=1, underway=1, resent=6)], 0, 'packets get lost'),
    ('the rendezvous of one rank of each node did not end', [own(again=4, underway=1, resent=4)], 0, 'packets get lost'),
    # 2 Mbit/s
    ('the all_reduce of 8 MB did not end within 9 s', [own(resent=40, sent=900, underway=1)], 0,
     'is slow, less than 2 MB/s, or loses packets'),
    # all ports but MASTER_PORT dropped
    ('the rendezvous of one rank of each node did not end within 9 s', [CONNECTS], 0, 'get no answer.*firewall'),
    # GLOO_SOCKET_IFNAME=ib0, which is up and has no IPv4 address
    ('the rendezvous of one rank of each node did not end within 9 s', [own(**{**CONNECTS, 'here': 'fe80::1'})], 0,
     'the interface of GLOO_SOCKET_IFNAME has only a link-local address'),
    ('the rendezvous failed: RuntimeError: makeDeviceForHostname(): unsupported gloo device', [], 0,
     "GLOO_DEVICE_TRANSPORT names a transport that this PyTorch's gloo does not have"),
    # 127.0.1.1 in the hosts file
    ('the rendezvous of one rank of each node did not end', [own(state=network.LISTENING, here='127.0.1.1')], 0,
     'gives 127.0.1.1 to the other nodes'),
    ('the rendezvous did not end', [own(state=network.LISTENING, here='::1')], 0, 'gives ::1 to the other nodes'),
    ('... connect [127.0.1.1]:40000: Connection refused', [], 0, 'gives 127.0.1.1 to the other nodes'),
])
def test_the_cause_is_named_and_has_a_remedy(error, sockets, before, says):
    # other nodes only see that this one has given up
    [(finding, ranks)] = caused(('failed: Connection closed by peer', [], 0), (error, sockets, before))
    assert re.search(says, finding.text) and finding.remedy not in ('', 'look there') and ranks == 3
    assert finding.level == ('yellow' if 'slow' in says else 'red')


@pytest.mark.parametrize('texts, left', [
    # of rank 0 alone, before any trial
    (["PyTorch cannot open its store at MASTER_ADDR=127.0.0.1, MASTER_PORT=1: timed out"],
     "PyTorch cannot open its store at MASTER_ADDR=127.0.0.1, MASTER_PORT=1: timed out"),
    (['failed: cannot find hsn', 'failed: Connection reset by peer'], 'failed: cannot find hsn'),
    (['failed: Connection closed by peer'], 'failed: Connection closed by peer'),
    (['a did not end within 5 s', 'a did not end within 6 s'], 'a did not end within 5 s'),
    (['the rendezvous did not end', 'failed: cannot find hsn'], 'failed: cannot find hsn'),
])
def test_of_errors_without_a_known_cause_the_one_that_tells_most_is_left(texts, left):
    [(finding, ranks)] = caused(*[(text, [], 0) for text in texts])
    assert (finding.level, finding.text, finding.remedy) == ('red', left, 'look there')
    assert ranks == (1 << len(texts)) - 1


@pytest.mark.parametrize('other, firewall', [
    ('the rendezvous of one rank of each node did not end within 9 s', True), ('failed: cannot find hsn', False)])
def test_a_connection_is_refused_by_a_firewall_if_the_other_node_has_no_error(other, firewall):
    refused = 'failed: SO_ERROR: Connection refused, remote=[172.30.0.1]:33333'
    [(finding, ranks)] = caused((refused, [], 0), (other, [], 0))
    assert ('firewall' in finding.text) == firewall and ranks == 3


def test_an_interface_that_is_missing_is_one_line():
    # as in the runs with GLOO_SOCKET_IFNAME=hsn0 (tests/faults)
    says = 'device.cc:84] ifa != nullptr. Unable to find address for: hsn0'
    report = findings.Report(0)
    report.add('red', 'collective', 'an all_reduce of gloo among the ranks of a node failed: [enforce fail at ' + says)
    report.add('red', 'rendezvous', 'the rendezvous of one rank of each node failed: [enforce fail at ' + says)
    report.add('red', 'interface', 'GLOO_SOCKET_IFNAME=hsn0: this node has no interface hsn0 (it has eth0, lo)')
    check.one_cause(report)
    assert [finding.name for finding in report.having('red')] == ['interface']


def test_the_kernel_tells_of_this_process_s_connections():
    with socket.create_server(('127.0.0.1', 0)) as server, socket.create_connection(server.getsockname()) as own:
        own.sendall(b'x' * 1000)
        found = network.connections()
        [sender] = [entry for entry in found if entry['there'] == server.getsockname()]
    assert 0 < sender['trip'] < 1 and 2 <= sender['sent'] < 9 and sender['underway'] in (0, 1)
    assert {key: sender[key] for key in ('state', 'again', 'here', 'resent')} == {
        'state': 1, 'again': 0, 'here': '127.0.0.1', 'resent': 0}
    assert {network.LISTENING, 1} <= {entry['state'] for entry in found}
    assert network.state(found, 0) == ' [gloo listens at 127.0.0.1]' and network.totals(found)['sent'] >= 2


def test_a_connection_without_answer_is_seen():
    with socket.socket() as own:
        own.setblocking(False)
        own.connect_ex(('192.0.2.1', 9))    # RFC 5737: nobody's
        found = network.connections()
        refused = own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    assert network.CONNECTING in [entry['state'] for entry in found] or refused
    assert refused or network.SILENT in network.state(found, 0)


@pytest.mark.parametrize('backlog, some', [(0, True), (99, False)])
def test_new_connections_without_an_answer_are_counted(monkeypatch, backlog, some):
    """A listener whose queue is full drops SYN, as a firewall does that limits them."""
    monkeypatch.setattr(network, 'ANSWER', 0.2)
    with socket.create_server(('127.0.0.1', 0), backlog=backlog) as server, socket.create_connection(server.getsockname()):
        count = network.unanswered(server.getsockname()[1], 8)
        assert (6 <= count <= 8 if some else count == 0) and network.unanswered(1, 8) == 0
    report = findings.Report(0)
    node.check_probe(report, {'unanswered': [count, 8]}, Machine({}, '/nowhere'))
    assert [f"{count} of 8 new connections to rank 0's node got no answer" in text
            for text in of_level(report, 'yellow', 'network')] == [True] * some


@pytest.mark.parametrize('seconds, factor, ends', [(8.9, 1, False), (9.1, 1, True), (9.1, 2, False), (18.1, 2, True)])
def test_a_step_ends_after_its_time(monkeypatch, seconds, factor, ends):
    clock = [0]

    class Thread:
        def is_alive(self):
            return clock[0] < 100

        def join(self, _):
            clock[0] = 100 if clock[0] else seconds

    monkeypatch.setattr(network, 'time', types.SimpleNamespace(monotonic=lambda: clock[0]))
    watch = network.Watch(factor)
    watch.enter('the all_reduce of 64 kB')
    assert watch.over(Thread()) == ('the all_reduce of 64 kB did not end within %d s' % (9 * factor) if ends else '')


def of_process(monkeypatch, environ, **planted):
    """A Probe in this process, and what it says to its rank."""
    one = probe.Probe(types.SimpleNamespace(send=lambda said: None, recv=lambda: ({}, 5)))
    one.environ, one.load, one.open = environ, lambda: one.say(imported=0.1), lambda seconds: types.SimpleNamespace(**planted)
    one.look_for_gpus = lambda torch: None
    monkeypatch.setattr(probe, 'Probe', lambda pipe: one)
    return one


@pytest.mark.parametrize('said, says', [({}, 'the store is gone'), ({'now': 'x'}, 'this version of slingtorch does not know')])
def test_a_node_that_loses_rank_0s_node_says_so(monkeypatch, said, says):
    monkeypatch.setattr('slingtorch.job.imports.Trial', lambda words: types.SimpleNamespace(result=lambda: {'late': 'x'}))
    came = []
    one = of_process(monkeypatch, {'RANK': '2', 'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '2'},
                     join=lambda own, _: came.append(own) or {'now': 5, 'nodes': 2, 'go': False, **said},
                     report=raising(probe.meet.NotMet('the store is gone')))
    probe.run(None, 5, [])
    assert [(own['rank'], own['ranks']) for own in came] == [(2, 2)]
    assert says in one.result['lost'] and one.result['over'] and one.result['script'] == {'late': 'x'}
    assert 'error' not in one.result


NCCL_SAYS = 'NCCL error in: NCCLUtils.cpp:93, invalid usage\nncclInvalidUsage: This usually\nLast error:\nUnrecognized "Rings"\n'


@pytest.mark.parametrize('nodes, phase, told', [(2, 'rendezvous', True), (1, 'import', False)])
def test_what_nccl_logged_is_read_also_if_it_failed(monkeypatch, nodes, phase, told):
    """In a job of one node, NCCL would need several processes. It also listens at 127.0.0.1, for its tool ncclras."""
    dist = types.SimpleNamespace(is_nccl_available=lambda: True, PrefixStore=lambda *_: None,
                                 init_process_group=raising(RuntimeError(NCCL_SAYS)))
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True), distributed=dist)
    monkeypatch.setitem(sys.modules, 'torch', torch)
    monkeypatch.setitem(sys.modules, 'torch.distributed', dist)
    one = of_process(monkeypatch, {'GLOO_SOCKET_IFNAME': 'lo'})
    one.nodes, one.store = dict.fromkeys(range(1, nodes)), types.SimpleNamespace(
        number=1, another=lambda: types.SimpleNamespace(store=None))
    one.log.write(b'n1:3:3 [0] NCCL INFO Using network Socket\n')
    one.gpu = True
    with socket.create_server(('127.0.0.1', 0)):
        one.collective(torch, 5)
    assert one.result['facts']['backend'] == 'nccl' and one.result['phase'] == phase
    assert 'address of gloo' not in one.result['facts']
    assert (one.result.get('network') == 'Socket') == told
    assert one.result.get('error') == (
        'the rendezvous of one rank of each node failed: RuntimeError: NCCL error in: NCCLUtils.cpp:93, invalid usage '
        'ncclInvalidUsage: This usually Last error: Unrecognized "Rings"' if told else None)
    if told:
        assert network.cause([one.result['error']])[3].startswith('correct what the message names')


@pytest.mark.parametrize('told, rate, says', [
    ({'seconds': (8 << 20) / 0.1e9}, '200000', ['reached about 0.1 GB/s, but the line rate of hsn0 is 25 GB/s']),
    ({'seconds': (8 << 20) / 1.0e9}, '200000', []), ({'seconds': (8 << 20) / 0.1e9}, '1000', []),
    ({'trip': 0.02}, '1000', ['the shortest round trip to other nodes takes more than 5 ms']),
    ({'trip': 0.0003}, '1000', []), ({'seconds': (8 << 20) / 0.0151e9}, '-1', []),
    ({'seconds': (8 << 20) / 0.0125e9}, '-1', ['an all_reduce of 8 MB over one rank of each node reached about 0.01 GB/s']),
])
def test_a_network_that_is_slow_or_far(tmp_path, told, rate, says):
    card = 'sys/class/net/hsn0/'
    root = tree(tmp_path, {card + 'speed': rate, card + 'operstate': 'up', card + 'device/x': ''})
    report = findings.Report(0)
    node.check_speed(report, {'told': {**QUIET, 'seconds': 0.001, **told}}, Machine({}, root))
    assert [finding.text[-len(text):] for finding, text in zip(report.having('yellow', 'network'), says)] == says
    assert len(report.findings) == len(says)


def test_what_is_no_host_has_no_address_and_no_route():
    with pytest.raises(OSError):
        network.addresses('a..b')
    assert network.address_of_host('a..b', 'none') == 'none' and network.source_of('no-such-host.invalid') == ''


# --- who cannot be reached


@pytest.mark.parametrize('imported, nodes, left, patience', [(3, 16, 4, 4), (3, 16, 100, 31), (20, 16, 100, 100),
                                                             (20, 16, 200, 101), (3, 512, 100, 62)])
def test_who_does_not_come_is_waited_for_by_what_the_import_took_here(imported, nodes, left, patience):
    assert probe.patience(imported, nodes, left) == patience


@pytest.mark.parametrize('seconds, comes', [(600, True), (0, False)])
def test_a_store_that_is_busy_with_others_is_waited_for(monkeypatch, seconds, comes):
    busy, said = threading.Event(), []

    def why_not(environ, text=''):
        said.append('Connection refused')
        if comes:
            busy.set()
        return said[-1]

    monkeypatch.setattr(probe, 'SPEAKS', 0)
    monkeypatch.setattr(probe, 'SLACK', 0.1)
    monkeypatch.setattr(probe.meet, 'why_not', why_not)
    monkeypatch.setattr(probe.meet, 'Store', type('Store', (), {'__init__': lambda self, *_: busy.wait(60) and None}))
    one = probe.Probe(types.SimpleNamespace(send=lambda said: None))
    one.environ = {'RANK': '1'}
    store = one.open(seconds)
    assert one.result['late'] == said[0] and bool(store) == comes
    assert comes or one.result['lost'] == 'Connection refused'
    busy.set()


@pytest.mark.parametrize('level', ['yellow', 'red'])
def test_a_node_with_something_red_does_not_wait_long_for_the_verdict(level):
    rank = check.Rank(Machine({'RANK': '4', 'WORLD_SIZE': '8', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '4'}), None, None, [])
    rank.report.add(level, 'rendezvous', 'packets get lost')
    asked = []
    check.deliver(rank, types.SimpleNamespace(ask=lambda key, seconds, _: asked.append(seconds) or '1'), {'met': True})
    assert asked == [rank.seconds if level == 'red' else rank.limit] and rank.limit > rank.seconds


@pytest.mark.parametrize('found, says', [
    ({}, "cannot reach rank 0's node: it has not imported PyTorch in time"), ({'error': 'no'}, "reach rank 0's node: no"),
    ({'met': True}, 'rank 0 has ended, or its node is gone .gone.')])
def test_a_node_that_has_met_nobody_asks_nobody(found, says):
    rank = check.Rank(Machine({'RANK': '4', 'WORLD_SIZE': '8', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '4'}), None, None, [])
    with pytest.raises(gather.PeerLost, match=says):
        check.deliver(rank, types.SimpleNamespace(ask=raising(gather.PeerLost('gone'))), found)


# --- limits


def limited(ranks, took, world=4, connects=True):
    report = findings.Report(0)
    report.ranks = 15
    details = [{'rank': rank, 'limits': {}, **ranks.get(rank, {})} for rank in range(4)]
    limits.check(report, details, took, world, connects)
    return [(finding.level, finding.text, findings.ranks_of(mask)) for finding, mask in report.findings.items()]


TOOK = {'fds': 8, 'v': 4 << 30, 'd': 1 << 30, 's': 132 << 10, 'anon': 150 << 20}


@pytest.mark.parametrize('option, limit, level', [
    ('n', 24, 'red'), ('n', 40, 'yellow'), ('n', 1000, 'yellow'), ('n', 1024, None), ('v', 500 << 20, 'red'), ('v', 1 << 40, None),
    ('v', 5 << 30, 'yellow'), ('d', 500 << 20, 'red'), ('d', 5 << 30, 'yellow'), ('s', 8 << 20, None), ('s', 64 << 10, 'red'),
    ('s', 512 << 10, 'yellow'), ('f', 102400, 'red'), ('f', 100 << 20, 'yellow'), ('t', 2, 'red'), ('t', 3600, 'yellow'),
    ('f', (16 << 20) - 1, 'red'), ('f', 16 << 20, 'yellow'), ('f', (1 << 30) - 1, 'yellow'), ('f', 1 << 30, None),
    ('t', 59, 'red'), ('t', 60, 'yellow'), ('s', (1 << 20) - 1, 'yellow'), ('s', 1 << 20, None), ('v', (16 << 30) - 1, 'yellow'),
    ('v', 16 << 30, None), ('v', (4 << 30) - 1, 'red'), ('n', 18, 'red'), ('n', 19, 'yellow'), ('n', 1023, 'yellow'),
])
def test_a_limit_is_measured_by_what_pytorch_took(option, limit, level):
    found = limited({3: {'limits': {option: limit}}}, TOOK)
    if (option, limit) == ('n', 24):    # rank 3 trained with it, rank 0 did not
        assert found[0][0] == 'yellow'
        found = [(entry[0], entry[1], [3]) for entry in limited({0: {'limits': {option: limit}}}, TOOK)]
    assert [(entry[0], entry[2]) for entry in found] == ([(level, [3])] if level else [])
    amount = limit >> (0 if option in 'nt' else 20) or limit >> 10
    assert not level or f'ulimit -{option}: this rank may have {amount} ' in found[0][1]


def test_what_must_be_the_same_on_all_ranks():
    report = findings.Report(0)
    for fact in check.SAME:
        for rank in range(6):
            report.fact(fact, rank, 1 << rank)
    check.check_same(report)
    assert len(report.findings) == len(check.SAME)      # with what they say: tests/expected/check-findings


def test_connections_to_all_ranks_need_files_and_gpus_all_addresses():
    assert [entry[::2] for entry in limited({3: {'limits': {'v': 1 << 40}, 'gpus': ['a']}}, TOOK)] == [('yellow', [3])]
    assert [entry[0] for entry in limited({3: {'limits': {'n': 1024}}}, TOOK, 4096)] == ['red']
    assert not limited({3: {'limits': {'n': 1024}}}, TOOK, 4096, False)


def test_memory_of_a_control_group_is_for_all_its_ranks():
    group = {'memory of': '/sys/fs/cgroup/job/memory.max', 'memory': 400 << 20}
    [(level, text, ranks)] = limited({2: group, 3: dict(group, memory=399 << 20), 1: group}, TOOK)
    assert (level, ranks) == ('red', [1, 2, 3]) and '400 MB of memory to 3 ranks' in text
    [(level, text, _)] = limited({2: group, 3: group}, TOOK)
    assert level == 'yellow' and text.endswith('400 MB of memory to 2 ranks, but a training may need more')
    assert limited({2: dict(group, memory=1000 << 20)}, TOOK) and not limited({2: dict(group, memory=1 << 30)}, TOOK)
    assert limited({2: dict(group, memory=1 << 30)}, dict(TOOK, anon=600 << 20))


def test_the_limits_of_this_shell_are_read():
    code = ('import resource, sys; sys.path.insert(0, sys.argv[1]); from slingtorch.job import limits; '
            'print(limits.of_shell())')
    set_them = 'ulimit -n 50 -f 100 -t 77 -d 9000000 -s 9000; ulimit -v unlimited; exec "$0" "$@"'
    done = subprocess.run(['bash', '-c', set_them, sys.executable, '-c', code, str(ROOT)],
                          stdout=subprocess.PIPE, text=True, check=True)
    assert ast.literal_eval(done.stdout) == {'n': 50, 'f': 100 << 10, 't': 77, 'd': 9000000 << 10, 's': 9000 << 10}


NODE = {
    'proc/self/cgroup': '0::/job/task\n5:cpuset,memory:/old\nodd\n', 'proc/meminfo': 'MemAvailable:   2000 kB\n',
    'proc/self/status': 'Cpus_allowed_list:\t0-1,4\n', 'sys/devices/system/cpu/online': '0-5',
    'proc/self/mounts': 'a / ext4 rw 0 0\nb /a\\040b lustre rw,x 0 0\nc /a\\040b nfs4 rw 0 0\nd /a tmpfs rw 0 0\nshort\n',
    'proc/driver/nvidia/version': 'NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n',
    'sys/fs/cgroup/job/task/memory.max': 'max\n', 'dev/nvidia10': '', 'dev/nvidia2': '', 'dev/nvidiactl': '',
    **{f'sys/class/infiniband/mlx5_{number}/ports/1/{name}': text for number, state in enumerate(('4: ACTIVE', '1: DOWN'))
       for name, text in {'rate': '200 Gb/sec (4X HDR)', 'state': state}.items()},
    **{f'sys/class/net/{card}/{name}': text
       for card, state, speed in (('eth0', 'up', '25000'), ('eth1', 'down', '25000'), ('eth2', 'up', '-1'))
       for name, text in {'speed': speed, 'operstate': state, 'device/x': ''}.items()},
    'sys/class/net/lo/speed': '5', 'sys/class/net/lo/operstate': 'up',
}


def test_what_files_say_of_a_node(tmp_path):
    machine = Machine({}, tree(tmp_path, NODE))
    assert machine.cgroups('memory') == [
        'sys/fs/cgroup/job/task', 'sys/fs/cgroup/job', 'sys/fs/cgroup/', 'sys/fs/cgroup/memory/old', 'sys/fs/cgroup/memory/']
    assert machine.cgroups('pids') == machine.cgroups('memory')[:3]
    assert machine.cpus() == ({0, 1, 4}, {0, 1, 2, 3, 4, 5}) and machine.open_gpus() == [2, 10]
    assert [machine.mount_of(path) for path in ('/a b/c', '/a bc', '/a/x')] == [('/a b', 'nfs4'), ('/', 'ext4'), ('/a', 'tmpfs')]
    assert machine.nvidia_driver() == '580.65.06' and machine.line_rates() == {'mlx5_0:1': 25.0}
    shutil.rmtree(tmp_path / 'sys/class/infiniband')
    assert machine.line_rates() == {'eth0': 3.125} and not machine.slingshot()
    tree(tmp_path, {f'sys/class/cxi/cxi{number}/device/net/eth{number}/x': '' for number in (1, 2)})
    tree(tmp_path, {'sys/class/net/eth1/operstate': 'up', 'sys/class/net/eth2/speed': '200000'})
    assert machine.line_rates() == {'eth1': 3.125, 'eth2': 25.0} and machine.slingshot()
    assert Machine({}, '/nowhere').line_rates() == {}


def test_how_much_memory_and_processor_time_a_job_may_have(tmp_path):
    machine, files = Machine({}, tree(tmp_path, NODE)), 'sys/fs/cgroup/job/memory.'
    assert machine.free_memory() == (2000 << 10, None, '')
    tree(tmp_path, {files + 'max': '3000000', files + 'current': '2500000', files + 'stat': 'file 9\ninactive_file 500000\n'})
    assert machine.free_memory() == (1000000, 3000000, f'{tmp_path}/{files}max')
    old = 'sys/fs/cgroup/memory/memory.'
    tree(tmp_path, {old + 'limit_in_bytes': '800', old + 'usage_in_bytes': '1000', old + 'stat': 'total_inactive_file 100\n'})
    assert machine.free_memory() == (0, 800, f'{tmp_path}/{old}limit_in_bytes')
    assert Machine({}, '/nowhere').free_memory() == (None, None, '')
    assert limits.cores_of_quota(machine) == float('inf')
    tree(tmp_path, {'sys/fs/cgroup/job/cpu.max': '150000 100000', 'sys/fs/cgroup/cpu.cfs_quota_us': '-1', 'sys/fs/cgroup/cpu.cfs_period_us': '9'})
    assert limits.cores_of_quota(machine) == 1.5
    tree(tmp_path, {'sys/fs/cgroup/cpu.cfs_quota_us': '45', 'sys/fs/cgroup/cpu.cfs_period_us': '90'})
    assert limits.cores_of_quota(machine) == 0.5


def tree(directory, files):
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return str(directory)


@pytest.mark.parametrize('most, says', [('6', 'a control group of this rank has 5 of at most 6 processes and threads'),
                                        ('9000', 'see ulimit -u, or a filter')])
@pytest.mark.parametrize('error', [RuntimeError("can't start new thread"), BlockingIOError(11, 'try again')])
def test_how_many_processes_there_may_be(tmp_path, most, says, error, capsys):
    root = tree(tmp_path, {'proc/self/cgroup': '0::/job/task\n', 'sys/fs/cgroup/job/task/pids.max': most + '\n',
                           'sys/fs/cgroup/job/task/pids.current': '5\n', 'sys/fs/cgroup/job/pids.max': 'max\n'})
    def start():
        raise error
    assert gather.guarded('check', Machine({}, root), start) == 1
    assert f"{error} ({says}" in capsys.readouterr().err
    report = findings.Report(0)
    limits.look(Machine({}, root), report, {})
    said = [text for text in of_level(report, 'yellow', 'limit') if '5 of at most 6 processes' in text]
    assert bool(said) == (most == '6')


@pytest.mark.parametrize('end, quota, says', [
    ('1000250', '', ['the job ends in less than 5 minutes']), ('1009000', '', []), ('', '', []), ('never', '', []),
    ('', '4000 100000', [
        'a control group (its quota) allows this rank, or several, only 0.04 of a core: all others wait for it']),
])
def test_a_job_that_ends_soon_and_a_quota(tmp_path, end, quota, says):
    root = tree(tmp_path, {'proc/self/cgroup': '0::/job/task\n', 'sys/fs/cgroup/job/task/cpu.max': 'max 100000\n',
                           'sys/fs/cgroup/job/cpu.max': quota})
    report = findings.Report(3)
    limits.look(Machine({'SLURM_JOB_END_TIME': end}, root, lambda: 1000000), report, {})
    assert of_level(report, 'yellow', 'limit') == says


def test_where_the_program_runs(tmp_path, monkeypatch):
    (tmp_path / 'gone').mkdir()
    report = findings.Report(0)
    monkeypatch.setattr(limits, 'write_trial', lambda directory, *more, **named: (
        'Read-only file system' if directory == os.getcwd() else ''))
    limits.look_at_directories(Machine({}, str(tmp_path)), report, {})     # the program need not write there
    assert of_level(report, 'yellow', 'disk') == []
    limits.look_at_outputs(Machine({}), report, {'written': {'.': ('the working directory', False)}})
    assert 'the program cannot write to . (Read-only' in of_level(report, 'yellow', 'disk')[-1]
    assert list(report.facts['working directory']) == [os.getcwd()]
    monkeypatch.chdir(tmp_path / 'gone')
    (tmp_path / 'gone').rmdir()
    report = findings.Report(0)
    limits.look_at_directories(Machine({}, str(tmp_path)), report, {})
    assert list(report.facts['working directory']) == ['one that has been removed'] and not report.having('red', 'disk')


@pytest.mark.parametrize('blocks', [10, 1000])
def test_output_to_a_full_disk(tmp_path, monkeypatch, blocks):
    monkeypatch.setattr(os, 'fstat', lambda number: os.stat(__file__))
    monkeypatch.setattr(os, 'statvfs', lambda number: os.statvfs_result((4096, 4096, 10, 0, blocks, 0, 0, 0, 0, 255)))
    report = findings.Report(0)
    limits.look_at_directories(Machine({}, str(tmp_path)), report, {})
    assert any('stdout goes to a file on a full disk' in text for text in of_level(report, 'yellow', 'disk')) == (blocks == 10)


@pytest.mark.parametrize('environ, title, level, says', [
    ({'SLURM_JOB_ID': '8'}, 'slurmstepd: [7.0]', 'yellow', 'this process runs in job 7'),
    ({'SLURM_JOB_ID': '7'}, 'slurmstepd: [7.0]', None, ''), ({'SLURM_JOB_ID': '8'}, 'bash', None, ''),
    ({'SLURM_JOB_ID': '8', 'SLURM_HET_JOB_ID': '7'}, 'slurmstepd: [7.0]', None, ''),
])
def test_another_job_s_number_is_seen_by_the_parent(tmp_path, environ, title, level, says):
    root = tree(tmp_path, {'proc/self/stat': '30 (python (3)) S 20 1', 'proc/20/stat': '20 (bash) S 10 1',
                           'proc/20/cmdline': 'bash\0', 'proc/10/cmdline': title + '\0', 'proc/10/stat': '10 (x) S 1 1'})
    report = findings.Report(0)
    look.look_at_job(Machine({'RANK': '0', 'WORLD_SIZE': '1', 'SLURM_STEP_ID': '0', **environ}, root), report)
    assert [(finding.level, says in finding.text) for finding in report.findings] == ([(level, True)] if level else [])


@pytest.mark.parametrize('environ, planted, level, name', [
    ({}, None, None, ''), ({'TORCHELASTIC_USE_AGENT_STORE': 'True'}, None, 'red', 'variable'),
    ({'TORCHELASTIC_USE_AGENT_STORE': 'True', 'TORCHELASTIC_RUN_ID': 'x'}, None, None, ''),
    ({'TORCHELASTIC_USE_AGENT_STORE': 'True', 'TORCHELASTIC_RUN_ID': 'x', 'SLINGTORCH_LAUNCHER': 'slurm'}, None, 'red', 'variable'),
    ({}, 'user', 'yellow', 'torch'), ({}, 'encoding', 'yellow', 'value'),
])
def test_what_print_compile_and_the_store_need(monkeypatch, environ, planted, level, name):
    if planted == 'user':
        monkeypatch.setattr(look.getpass, 'getuser', lambda: {}['1234'])
    if planted == 'encoding':
        monkeypatch.setattr(look.sys, 'stdout', open(os.devnull, 'w', encoding='ascii'))
    report = findings.Report(0)
    look.look_at_user(Machine(environ), report)
    assert [(finding.level, finding.name) for finding in report.findings] == ([(level, name)] if level else [])


OPTION = "parser.add_argument('--fast', action='store_true')\n"


@pytest.mark.parametrize('compiler, says', [
    (None, "No such file or directory: 'g++'"), ('PATH=/usr/bin:/bin exec g++ "$@"', ''),
    ('echo "no licence" >&2; exit 3', 'status 3: no licence'),
    ('while (($# > 1)); do shift; [[ $1 != *.so ]] || echo > "$1"; done', '/a.so: file too short'),
    ('PATH=/usr/bin:/bin exec g++ "$@"; # headers', 'Python.h: No such file'),
    ('[[ $* != *c++17* ]] || { echo "no c++17" >&2; exit 1; }', 'status 1: no c++17'),
    ('[[ $* != *openmp* ]] || { echo "no OpenMP" >&2; exit 1; }', 'status 1: no OpenMP'),
    ('PATH=/usr/bin:/bin; for word; do [[ $word = -fopenmp ]] || set -- "$@" "$word"; shift; done; exec g++ -nostdinc "$@"', 'omp.h'),
])
def test_what_torch_compile_needs(tmp_path, monkeypatch, compiler, says):
    place = tmp_path / 'include'
    monkeypatch.setattr(sysconfig, 'get_paths', lambda: {'include': str(place)})
    place.mkdir()
    if 'headers' not in str(compiler):
        (place / 'Python.h').write_text('')
    if compiler:
        (tmp_path / 'g++').write_text('#!/bin/bash\n' + compiler)
        (tmp_path / 'g++').chmod(0o755)
    report, env = findings.Report(0), {'PATH': str(tmp_path), 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path / 'new')}
    limits.look_at_compiler(Machine(env), report, {'compiles': False})
    limits.look_at_compiler(Machine({**env, 'TORCH_COMPILE_DISABLE': '1'}), report, {'compiles': True})
    assert not report.findings
    limits.look_at_compiler(Machine(env), report, {'compiles': True, 'gpus': None})
    assert [says in finding.text for finding in report.having('yellow')] == [True] * bool(says), report.findings
    assert {path.name for path in tmp_path.iterdir()} - {'include'} == {'g++'} - {None if compiler else 'g++'}


def test_an_extension_that_was_left_in_the_middle(tmp_path):
    report, env = findings.Report(0), {'TORCH_EXTENSIONS_DIR': str(tmp_path), 'PATH': os.environ['PATH']}
    lock = tmp_path / 'py311_cpu/fused/lock'
    lock.parent.mkdir(parents=True)
    lock.write_text('')
    limits.look_at_compiler(Machine(env), report, {'compiles': True})
    assert not [text for text in of_level(report, 'yellow', 'torch') if 'lock' in text]
    limits.look_at_compiler(Machine(env), report, {'extends': True})
    assert [text for text in of_level(report, 'yellow', 'torch') if 'lock' in text] == [
        f'{lock}: another process builds this extension, or was killed while it did: the program waits until the file is gone']


@pytest.mark.parametrize('text, fetches', [
    ("datasets.MNIST('data', download=True)", True), ("datasets.MNIST('data', download=False)", False),
    ("AutoModel.from_pretrained('org/name')", True), ("AutoModel.from_pretrained(args.model)", False),
    ("AutoModel.from_pretrained('/models/name')", False), ("from datasets import load_dataset\nload_dataset('imdb')", True),
    ("def load_dataset(part): pass\nload_dataset('imdb')", False),
    (OPTION + "if args.fast:\n    load_dataset('imdb')", False), ("urllib.request.urlretrieve(url)", True),
])
@pytest.mark.parametrize('route, env, reaches', [
    ('eth0 0000A8C0 00000000', {}, False), ('eth0 00000000 0101A8C0', {}, True), ('eth0 0000A8C0 0', {'https_proxy': 'p'}, True)])
def test_what_a_program_downloads(tmp_path, text, fetches, route, env, reaches):
    root = tree(tmp_path, {'proc/net/route': 'Iface Destination Gateway\n%s\n' % route.replace(' ', '\t'), 'train.py': text})
    report = findings.Report(0)
    program.look_at_program(Machine(env, root), report, {'words': [str(tmp_path / 'train.py')]})
    found = [line for line in of_level(report, 'yellow', 'program') if 'downloads' in line]
    assert found == ([] if reaches or not fetches else [
        'line %d: downloads what is not there yet, but this node has no route to the internet and no proxy' % (text.count('\n') + 1)])


@pytest.mark.parametrize('ninja, says', [(True, False), (False, True)])
def test_an_extension_needs_ninja_and_a_compiler_without_openmp(tmp_path, ninja, says):
    (tmp_path / 'ninja').write_text('')
    (tmp_path / 'ninja').chmod(0o755 if ninja else 0o644)
    (tmp_path / 'g++').write_text('#!/bin/bash\n[[ $* != *openmp* ]] || exit 1; PATH=/usr/bin:/bin exec g++ "$@"')
    (tmp_path / 'g++').chmod(0o755)
    report, env = findings.Report(0), {'PATH': str(tmp_path)}
    limits.look_at_compiler(Machine(env), report, {'extends': True})
    limits.look_at_compiler(Machine(env), report, {'compiles': True, 'extends': True, 'gpus': ['a']})
    (tmp_path / 'cc').write_text('#!/bin/bash\n[[ $* == *"-x c "* ]] || exit 1; PATH=/usr/bin:/bin exec gcc "$@"')
    (tmp_path / 'cc').chmod(0o755)
    limits.look_at_compiler(Machine({**env, 'CC': str(tmp_path / 'cc')}), report, {'compiles': True, 'gpus': ['a']})
    assert ['no ninja in PATH' in text for text in of_level(report, 'yellow', 'torch')] == [True] * says


@pytest.mark.parametrize('text, yes', [
    ('model = torch.compile(model)', True), ('@torch.compile\ndef step(): pass', True), ('model.compile()', True),
    ("torch.compile(model, backend='aot_eager')", False), ("re.compile('x')", False), ('compile(text, name, mode)', False),
    ('# torch.compile(model)', False), (OPTION + 'if args.fast:\n    net = torch.compile(net)', False),
    (OPTION + 'net = torch.compile(net) if args.fast and new else net', False),
    (OPTION + 'net = net if args.fast else torch.compile(net)', True), (OPTION + 'if args.fast or new:\n    torch.compile(net)', True),
    (OPTION.replace("action='store_true'", 'default=True') + 'if args.fast:\n    torch.compile(net)', True),
    (OPTION.replace('fast', 'go') + 'if args.go:\n    torch.compile(net)', True),
])
def test_which_program_compiles(text, yes):
    assert program.compiles(parsed(text, ['--go'])) == yes


@pytest.mark.parametrize('addresses, says', [
    (['10.0.0.1 (eth0)', '192.168.99.2 (eth1)'],
     ['the rendezvous did not end [addresses of gloo: 10.0.0.1 (eth0) on n0; 192.168.99.2 (eth1) on n1]']),
    (['10.0.0.1 (eth0)'] * 2, ['the rendezvous did not end [addresses of gloo: 10.0.0.1 (eth0) on n0, n1]',
                               'n0 and n1 give the other nodes the same address, 10.0.0.1 (eth0)']),
])
def test_the_addresses_that_gloo_took_are_said(addresses, says):
    report = findings.Report()
    for number, address in enumerate(addresses):
        report.fact('node', 'n%d' % number, 1 << number)
        report.fact('machine', 'boot id %d' % number, 1 << number)
        report.fact('address of gloo', address, 1 << number)
    report.add('red', 'rendezvous', 'the rendezvous did not end', '', 3)
    check.one_cause(report)
    assert sorted(of_level(report, 'red', 'rendezvous'), reverse=True) == says and max(report.findings.values()) == 3


@pytest.mark.parametrize('least, most, right', [(2, 2, True), (1, 2, False), (2, 3, False),
                                                (float('nan'), float('nan'), False)])
def test_every_element_of_an_all_reduce_is_compared(least, most, right):
    class Tensor(list):
        def __iadd__(self, number):
            return self
        def min(self):
            return types.SimpleNamespace(item=lambda: least)
        def max(self):
            return types.SimpleNamespace(item=lambda: most)

    sizes = []
    watch = types.SimpleNamespace(enter=sizes.append)
    if right:
        late = iter([0] * 5 + [0.2])    # one that a busy machine delays says nothing of the network
        assert 0 <= network.rise(lambda tensor: time.sleep(next(late)), lambda count: Tensor(), 2, watch) < 0.2
        assert sizes == ['the all_reduce of one float', 'the all_reduce of 64 kB', 'the all_reduce of 8 MB']
    else:
        with pytest.raises(RuntimeError, match='wrong values came: an all_reduce of ones over 2 ranks gave values from'):
            network.rise(lambda tensor: None, lambda count: Tensor(), 2, watch)


@pytest.mark.parametrize('error, given, level', [
    ('import torch ended the process with status 1: OpenBLAS error: Memory allocation still failed after 10 retries',
     {'v': 500 << 20}, 'red'),
    ('import torch failed: ImportError: libtorch_cpu.so: failed to map segment from shared object', {'v': 1 << 30}, 'red'),
    ('import torch failed: OSError: [Errno 24] Too many open files', {'n': 12}, 'red'),
    ('import torch ended the process with status -11', {'s': 64 << 10}, 'red'),
    ('import torch failed: ModuleNotFoundError', {'v': 1 << 30}, 'yellow'),
])
def test_a_limit_by_which_an_import_fails_is_red(error, given, level):
    report = findings.Report(1)
    report.add('red', 'import', error)
    limits.check(report, [{'rank': 1, 'limits': given}], {}, 4, True)
    assert [finding.level for finding in report.having(name='limit')] == [level]


# --- directories and programs


def test_directories_are_really_written_to(tmp_path):
    (tmp_path / 'file').write_text('')
    (tmp_path / 'dev').mkdir()
    report = findings.Report(0)
    env = {'HOME': '/proc/nothing', 'HF_HOME': str(tmp_path / 'new/directory'),
           'XDG_CACHE_HOME': str(tmp_path / 'file')}
    limits.look_at_directories(Machine(env, str(tmp_path)), report, {})
    limits.compare_directories(report)
    assert [text.split('=')[0] for text in of_level(report, 'yellow', 'disk')] == ['HOME']
    assert ['XDG_CACHE_HOME' in text and 'Not a directory' in text for text in of_level(report, 'red', 'disk')] == [True]
    assert 'does not exist' in of_level(report, 'red', 'shm')[0]


def test_a_disk_that_is_full_in_the_middle_of_a_file_or_when_it_is_flushed(tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert limits.write_trial(str(tmp_path), 200) == 'no space for 200 bytes'
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.setattr(limits.os, 'fsync', raising(OSError(122, 'Disk quota exceeded')))
    assert limits.write_trial(str(tmp_path)) == ''
    report = findings.Report(0)
    limits.look_at_outputs(Machine({}), report, {'written': {str(tmp_path / 'a'): ('--out', False)}})
    assert ['(Disk quota exceeded)' in said for said in of_level(report, 'yellow', 'disk')] == [True]


@pytest.mark.parametrize('free, wants, says', [
    (1, {}, True), (1 << 10, {}, False), (100, {}, False), (100, {'workers': True, 'saves': True}, True),
    (1 << 10, {'workers': True, 'saves': True}, False),
])
def test_little_space(tmp_path, monkeypatch, free, wants, says):
    (tmp_path / 'dev/shm').mkdir(parents=True)
    monkeypatch.setattr(limits, 'free_in', lambda place: free << 20)
    report = findings.Report(0)
    limits.look_at_directories(Machine({}, str(tmp_path)), report, wants)
    limits.look_at_outputs(Machine({}), report, {'written': {str(tmp_path / 'a'): ('--out', False)}, **wants})
    assert [f'has only {free} MB free' in text for text in of_level(report, 'yellow', 'shm')] == [True] * says
    assert [f'its file system has only {free} MB free' in text for text in of_level(report, 'yellow', 'disk')] == [True] * says


def test_no_directory_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(limits.tempfile, 'gettempdir', raising(FileNotFoundError('No usable temporary directory')))
    report = findings.Report(0)
    limits.look_at_directories(Machine({'TMPDIR': '/full'}, str(tmp_path)), report, {})
    assert of_level(report, 'red', 'disk') == [
        'no directory for temporary files is writable: TMPDIR=/full, /tmp, /var/tmp']


@pytest.mark.parametrize('length, says', [(74, False), (75, True)])
def test_a_long_directory_for_temporary_files(monkeypatch, length, says):
    monkeypatch.setattr(limits.tempfile, 'tempdir', '/tmp'.ljust(length, 'x'))
    report = findings.Report(0)
    limits.look_at_directories(Machine({}), report, {})
    assert ['%d characters' % length in text for text in of_level(report, 'yellow', 'disk')] == [True] * says


def test_a_directory_that_only_some_nodes_can_write_is_red():
    report = findings.Report(0)
    report.fact('writes HF_HOME=/scratch/hf', limits.WRITTEN, 1)
    report.fact('writes HF_HOME=/scratch/hf', 'No space left on device', 2)
    limits.compare_directories(report)
    [finding] = report.having('red', 'disk')
    assert 'HF_HOME=/scratch/hf is not writable (No space left on device), but is on' in finding.text
    assert report.findings[finding] == 2


def test_what_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(limits, 'WAIT', 0.1)
    assert limits.in_time(threading.Event().wait) == (False, '') and limits.in_time(lambda: None) == (True, '')
    assert limits.in_time(open, 'a\0b') == (True, 'ValueError: embedded null byte')


@pytest.mark.parametrize('words, found', [
    (['train.py', '-m', 'x'], ('script', 'train.py')), (['-u', '-X', 'dev', '-W', 'error', 'a.py'], ('script', 'a.py')),
    (['-m', 'torch.distributed.run', 'x'], ('module', 'torch.distributed.run')), (['-mtimeit'], ('module', 'timeit')),
    (['-c', 'print()'], ('', '')), ([], ('', '')), (['-'], ('', '')),
])
def test_what_python_will_run(words, found):
    assert program.program_of(words)[:2] == found


def test_a_script_that_is_not_there_or_not_the_same(tmp_path):
    reports = []
    for number, text in enumerate(['import os\n', 'import sys\n', None]):
        script = tmp_path / 'train.py'
        script.unlink(missing_ok=True)
        if text is not None:
            script.write_text(text)
        report = findings.Report(number)
        program.look_at_program(Machine({}), report, {'words': [str(script)]})
        reports.append(report)
    assert 'cannot be read' in of_level(reports[2], 'red', 'script')[0]
    whole = reports[0]
    whole.merge(reports[1])
    program.compare_programs(whole)
    assert ['different copies' in text for text in of_level(whole, 'red', 'script')] == [True]


@pytest.mark.parametrize('line, sees, words', [
    ("device = f'cuda:{local_rank}'", 1, "'invalid device ordinal'"),
    ("torch.cuda.set_device(int(os.environ['LOCAL_RANK']))", 1, "'invalid device ordinal'"),
    ("model = DDP(model, device_ids=[local_rank])", 1, "ordinal"), ("# device_ids=[local_rank]", 1, None),
    ("torch.cuda.set_device(args.gpu)", 1, None),       # of an option
    ("print('cuda: %s' % local_rank)", 1, None),
    ("torch.cuda.set_device(args.local_rank)", 4, None),
    ("local_rank = rank % torch.cuda.device_count()\ntorch.cuda.set_device(local_rank)", 1, None),
])
def test_gpu_that_the_program_takes_against_the_layout(line, sees, words):
    report = findings.Report(0)
    text = 'import os, torch\ntorch.distributed.init_process_group("nccl")\n%s\n' % line
    rules.check(report, parsed(text, [], {'LOCAL_WORLD_SIZE': '4', 'WORLD_SIZE': '4'}), ['gpu'] * sees)
    said = of_level(report, 'yellow', 'gpus')
    assert not report.having(name='program')
    assert (said == []) if words is None else (words in said[0])


@pytest.mark.parametrize('facts, level, says', [
    ([('program', 'train.py', 3), ('file train.py', 'a', 3), ('file shapes.py', 'a', 1)], 'red', 'these nodes lack shapes.py, but others have it'),
    ([('file shapes.py', 'a', 1), ('file shapes.py', 'b', 2)], 'red', 'nodes have different copies of shapes.py'),
    ([('path /data/x', '5 bytes, abc', 1), ('path /data/x', 'missing', 2)], 'yellow',
     '/data/x, which the program or its arguments name, differs between nodes: 5 bytes, abc; missing'),
    ([('working directory', '/home/a', 1), ('working directory', '/tmp', 2)], 'yellow',
     'the nodes have a different working directory: /home/a; /tmp'),
    ([('file train.py', 'a', 3), ('path 10', 'missing', 3)], None, None),
])
def test_files_that_differ_between_nodes(facts, level, says):
    report = findings.Report()
    for name, value, mask in facts:
        report.fact(name, value, mask)
    program.compare_programs(report)
    assert [finding.level for finding in report.findings] == ([level] if level else [])
    assert not says or of_level(report, level, 'script') == [says]


@pytest.mark.parametrize('text, level', [
    ('if True x', 'red'), ('return 1', 'red'), ('x = ' + '+'.join(['1'] * 5000), None), ('import shapes', 'yellow'),
    ('def later():\n    import shapes', 'yellow'),
])
def test_files_that_are_not_valid_python(tmp_path, text, level):
    (tmp_path / 'train.py').write_text(text + '\n')
    (tmp_path / 'shapes.py').write_text('a = 1\nif True x')
    report = findings.Report(0)
    program.look_at_program(Machine({}), report, {'words': [str(tmp_path / 'train.py')]})
    assert [finding.level for finding in report.findings] == [level] * bool(level)
    name = 'shapes.py' if level == 'yellow' else 'train.py'
    assert not level or f'{name} is not valid for this Python' in of_level(report, level, 'script')[0]


def test_own_modules_of_a_script_are_found_in_its_directory(tmp_path, monkeypatch):
    for name, text in {'train.py': "from lib import model\nimport json, shapes\n", 'lib/__init__.py': '',
                       'lib/model.py': 'from . import layers\n', 'lib/layers.py': 'import train\n',
                       'shapes.py': '', 'unused.py': ''}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    read = rules.read
    monkeypatch.setattr(rules, 'read', lambda path: raising(OSError(13, 'no'))() if path.endswith('shapes.py') else read(path))
    found = program.load([str(tmp_path / 'train.py')], {}).files
    assert sorted(found) == ['lib/__init__.py', 'lib/layers.py', 'lib/model.py', 'shapes.py', 'train.py']


def test_of_a_very_large_program_only_the_script_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, 'NODES', 3)
    tree(tmp_path, {'train.py': 'import lib\nimport more\nhere()\n', 'lib.py': 'there()\n', 'more.py': ''})
    found = program.load([str(tmp_path / 'train.py')], {})
    assert set(found.files) == {'train.py', 'lib.py', 'more.py'} and set(found.calls) == {'here'}


def test_arguments_are_compared_by_what_they_are(tmp_path):
    (tmp_path / 'data').write_bytes(b'x' * 200000)
    report = findings.Report(0)
    words = ['-u', 'train.py', f'--data={tmp_path}/data', str(tmp_path), '--epochs', '3']
    program.look_at_arguments(Machine({}), report, {'words': words})
    facts = {name: list(values)[0] for name, values in report.facts.items()}
    assert facts == {f'path {tmp_path}/data': '200000 bytes, 15601535eca4', f'path {tmp_path}': 'a directory of 1', 'path 3': 'missing',
                     f'path {tmp_path}, three levels deep': '1 files of 200000 bytes'}
    (tmp_path / 'data').write_bytes(b'x' * 199999 + b'y')
    program.look_at_paths(report, [f'{tmp_path}/data', '/dev/null'])
    assert len(report.facts[f'path {tmp_path}/data']) == 2 and list(report.facts['path /dev/null']) == ['no file']
    program.look_at_paths(report, ['/proc/self/mem'])
    assert 'Input/output error' in list(report.facts['path /proc/self/mem'])[0]


@pytest.mark.parametrize('name, text', [
    ('a.json', '{"data": {"train": "/no/train.pt", "sizes": [1, "/no/more"]}, "output_dir": "/no/out"}'),
    ('a.yaml', 'train: /no/train.pt\nmore:\n  - "/no/more"\nurl: https://no/where\nlog_dir: /no/out\nratio: 1/4\n'),
])
def test_paths_in_files_of_arguments_are_compared(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    report = findings.Report(0)
    program.look_at_arguments(Machine({}), report, {'words': ['train.py', '--config', str(tmp_path / name)]})
    assert {fact for fact in report.facts if '/no' in fact} == {'path /no/train.pt', 'path /no/more'}


@pytest.mark.parametrize('seconds, kind, says', [(2, 'ext4', 3), (0, 'ext4', 0), (2, 'lustre', 0)])
def test_what_lies_deep_in_a_directory_is_compared(tmp_path, monkeypatch, seconds, kind, says):
    monkeypatch.setattr(program, 'DEEP', seconds)
    monkeypatch.setattr(Machine, 'mount_of', lambda machine, path: ('/', kind))
    report, words = findings.Report(), ['train.py', str(tmp_path)]
    for rank, text in enumerate(['whole', 'whole', 'cut', '']):
        tree(tmp_path, {'train/n01/a.pt': text, 'train/n01/far/b.pt': 'x' * 9 * rank})
        if not text:
            (tmp_path / 'train/n01/a.pt').unlink()
        node = findings.Report(rank)
        program.look_at_arguments(Machine({}), node, {'words': words})
        report.merge(node)
    assert len(report.facts[f'path {tmp_path}']) == 1
    assert len(report.facts.get(f'path {tmp_path}, three levels deep', ())) == says


@pytest.mark.parametrize('words, text, path', [
    (['--out', '/x/y'], '', '/x/y'), (['--save-dir=/x'], '', '/x'), (['trainer.output_dir=/x'], '', '/x'), (['-o', './a'], '', './a'),
    (['--log-level', 'INFO', '--save_every', '10', '--data', '/x', '--out', 's3://a/b', '--log', '/dev/null'], '', '.'),
    ([], "parser.add_argument('--out', default='/x/y')", '/x/y'),
    (['--out=/z/z'], "parser.add_argument('--out', default='/x/y')", '/z/z'),
])
def test_where_a_program_writes(words, text, path):
    assert list(program.outputs(parsed(text, words))) == [path]


@pytest.mark.parametrize('text, made', [
    ("os.makedirs(args.out, exist_ok=True)", True), ("(Path(args.out) / 'a').mkdir()", True), ("os.makedirs(args.data)", False),
])
def test_an_output_that_must_be_a_directory(text, made):
    dashed = parsed(text.replace('args.out', 'args.out_dir'), ['--model.out-dir', '/x/y'])
    assert program.outputs(dashed) == {'/x/y': ('--model.out-dir', made)}
    assert program.outputs(parsed(text, ['--out', '/x/y'])) == {'/x/y': ('--out', made)}


@pytest.mark.parametrize('path, made, says', [
    ('sound/a', False, ''), ('sound/new/a', False, ''), ('file/a', False, 'is a file'), ('full/a', False, 'No space left on device'),
    ('file', False, ''), ('file', True, 'is a file'), ('link', True, 'is a link to nothing'), ('link', False, ''),
    ('sound', True, ''), ('full', True, 'No space'), ('locked', False, 'permissions forbid'),
])
def test_where_a_program_writes_is_tried(tmp_path, monkeypatch, path, made, says):
    (tmp_path / 'sound').mkdir()
    (tmp_path / 'full').mkdir()
    (tmp_path / 'file').write_text('')
    (tmp_path / 'locked').write_text('')
    (tmp_path / 'link').symlink_to('nothing')
    trial, access = limits.write_trial, os.access
    monkeypatch.setattr(limits, 'write_trial',
                        lambda place, **_: 'No space left on device' if place.endswith('full') else trial(place))
    monkeypatch.setattr(os, 'access', lambda place, mode: not place.endswith('locked') and access(place, mode))    # also of root
    report = findings.Report(0)
    limits.look_at_outputs(Machine({}), report, {'written': {str(tmp_path / path): ('--out', made)}})
    assert [says in said for said in of_level(report, 'yellow', 'disk')] == [True] * bool(says)
    assert not list((tmp_path / 'sound').iterdir())


def test_files_in_the_text_of_a_program_are_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'net.yaml').write_text('')
    # a constant path also in /tmp and where it is missing
    (tmp_path / 'train.py').write_text(
        "a = torch.load('/no/train.pt'), 'no path', '/tmp/x', 'a/b', 'net.yaml', '/proc/self', "
        f"'{'/x' * 100}', '{'/y' * 100}.', '/', torch.load('/tmp/no/a.pt'), open('no.yaml')\n"
        "if os.path.exists('/no/cache.pt'):\n    torch.load('/no/cache.pt')")
    report, details = findings.Report(0), {'words': ['train.py', '--out', '/no']}
    program.look_at_program(Machine({}), report, details)
    assert {fact: list(values) for fact, values in report.facts.items() if fact.startswith('path')} == {
        'path net.yaml': ['0 bytes, e3b0c44298fc'],
        **{f'path {name}': ['missing'] for name in ('/no/train.pt', '/x' * 100, '/tmp/no/a.pt', 'no.yaml')}}
    assert details['written'] == {'/no': ('--out', False)}
    assert not details['saves'] and not details['extends']


GROUP = "dist.init_process_group()\n"
SAMPLED = "loader = DataLoader(data, sampler=DistributedSampler(data))\n"
SPLIT = "DistributedSampler(files)"
STREAM = "DDP(net)\nclass Stream(IterableDataset):\n    def __iter__(self):\n        return rows\nloader = DataLoader(Stream())\n"
LAUNCH = "parser.add_argument('--local_rank', default=-1)\ntorch.device(args.local_rank)"
ALONE = "net = nn.BatchNorm1d(4)\nmodel = DDP(net)\ndef test(net):\n    net(x)\ndef keep(net):\n    net.state_dict()\n"
WRAPPED = "model = DDP(net)\nfor x in loader:\n    loss = USE\n    loss.backward()"


@pytest.mark.parametrize('text, found', [
    ("torch.load('/tmp/a.pt', device)", ['/tmp/a.pt']), ("open('b/c.txt').read()", ['b/c.txt']), ("open('/tmp/a', 'w')", []),
    ("open('/tmp/a', mode='ab')", []), ("torch.save(x, '/tmp/a.pt')\ntorch.load('/tmp/a.pt')", []),
    ("DATA = '/tmp/a'\nx = torch.load(os.path.join(DATA, 'x.pt'))", ['/tmp/a', 'x.pt']), ("OUT = '/tmp/a'\nsave(Path(OUT))", []),
    ("x = torch.load(os.path.join(os.environ['DATA'], 'x.pt'))", ['/tmp/data', 'x.pt']), ("open(f\"{os.getenv('DATA')}/a\")", ['/a', '/tmp/data']),
    ("ROOT = os.environ.get('DATA', '.')\nnp.load(Path(ROOT) / 'a.npy')", ['/tmp/data', 'a.npy']), ("torch.load(os.environ['NO'])", []),
    ("os.makedirs(os.environ['DATA'])\nos.listdir(os.environ['DATA'])", []), ("torch.load(names['DATA'])", []),
    ("if rank == 0:\n    x = np.load('/tmp/a.npy')", []), ("if exists('/tmp/a.pt'):\n    load('/tmp/a.pt')", []),
    ("if not path.isfile('/tmp/a.pt'):\n    sys.exit('no data')\nload('/tmp/a.pt')", ['/tmp/a.pt']),
    ("if Path('/tmp/a.pt').exists():\n    load('/tmp/a.pt')", []),
    ("assert Path('/tmp/a.pt').exists()\nload('/tmp/a.pt')", ['/tmp/a.pt']),
])
def test_what_a_program_only_reads(text, found):
    assert sorted(path for path, uses in program.uses(parsed(text, env={'DATA': '/tmp/data'})).items() if uses == {'read'}) == found


@pytest.mark.parametrize('text, notes', [
    ('torch.save(x, "a")', 'saves'), ('from torch.utils.cpp_extension import CUDA_HOME, load_inline', 'extends'),
    ('torch.utils.cpp_extension.load("a", b)', 'extends'), ('DataLoader(data, num_workers=2)', 'workers'),
    ('from torch.utils.cpp_extension import CUDA_HOME\ntorch.load("a")\nDataLoader(data, num_workers=0)', ''),
])
def test_what_a_program_needs_is_noted(tmp_path, text, notes):
    (tmp_path / 'train.py').write_text(text)
    details = {'words': [str(tmp_path / 'train.py')]}
    program.look_at_program(Machine({}), findings.Report(0), details)
    assert [name for name in ('saves', 'extends', 'workers', 'compiles') if details[name]] == ([notes] if notes else [])


@pytest.mark.parametrize('text, path', [
    ("torch.save(model, 'new/model.pt')", 'new/model.pt'), ("if rank == 0:\n    open(f'new/{epoch}.txt', 'w')", 'new/'),
    ("def save(path):\n    torch.save(model, 'new/model.pt')\nsave()", 'new/model.pt'), ("PATH = 'a/b/c'\ntorch.save(x, PATH)", 'a/b/c'),
    ("def keep(path):\n    torch.save(model, 'new/model.pt')", ''), ("torch.save(model, 'there/model.pt')", ''),
    ("os.makedirs(out)\ntorch.save(model, 'new/model.pt')", ''), ("prepare('new')\ntorch.save(model, 'new/model.pt')", ''),
    ("try:\n    torch.save(model, 'new/model.pt')\nexcept OSError:\n    pass", ''), ("open('new/model.pt')", ''),
    (OPTION + "if args.fast:\n    torch.save(model, 'new/model.pt')", ''), ("torch.save(model, 'model.pt')\nstore.save(1, 'a/b')", ''),
    ("open('s3://new/model.pt', 'w')", ''),
])
def test_a_directory_that_nobody_makes(tmp_path, monkeypatch, text, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'there').mkdir()
    (tmp_path / 'train.py').write_text(text)
    report = findings.Report(0)
    program.look_at_program(Machine({}), report, {'words': ['train.py']})
    assert [f'writes to {path}, but' in said for said in of_level(report, 'yellow', 'disk')] == [True] * bool(path)


def test_paths_in_variables_are_compared(tmp_path):
    script = tmp_path / 'train.py'
    script.write_text("a = torch.load(os.environ['DATA']), open(os.environ['OUT'], 'w'), os.environ['HOME']")
    report = findings.Report(0)
    program.look_at_program(Machine({'DATA': '/tmp/no/a.pt', 'OUT': '/no/b', 'HOME': '/home'}), report, {'words': [str(script)]})
    assert [name for name in report.facts if name.startswith('path')] == ['path /tmp/no/a.pt']
    report = findings.Report(0)
    program.look_at_program(Machine({'DATA': str(tmp_path), 'OUT': '', 'HOME': ''}), report, {'words': [str(script)]})
    assert list(report.facts[f'path {tmp_path}']) == ['a directory']    # which may have more than what is read


@pytest.mark.parametrize('text, level, says', [
    ("dist.init_process_group('gloo', world_size=2)", 'red', 'init_process_group(world_size=2), but this job has 4'),
    ("def main():\n    dist.init_process_group('gloo', world_size=2)\nmain()", 'red', 'world_size=2'),
    ("dist.init_process_group('gloo', world_size=SIZE)", None, ''),
    ("SIZE = 2\ndef main():\n    dist.init_process_group('gloo', world_size=SIZE)\nmain()", 'red', 'world_size=2'),
    ("def main():\n    rank, size = 0, 2\n    dist.init_process_group('gloo', world_size=size)\nmain()", 'red', 'world_size=2'),
    ("SIZE = 2\nSIZE = count()\ndist.init_process_group('gloo', world_size=SIZE)", None, ''),
    ("try:\n    from conf import SIZE\nexcept ImportError:\n    SIZE = 2\ndist.init_process_group('gloo', world_size=SIZE)",
     None, ''),
    ("def main(size):\n    dist.init_process_group('gloo', world_size=size)\nsize = 2\nmain(4)", None, ''),
    ("def other():\n    size = 2\ndef main():\n    dist.init_process_group('gloo', world_size=size)\nother()\nmain()", None, ''),
    ("number, size = int(job.get('SLURM_LOCALID', 0)), int(job['SLURM_NTASKS'])\n"
     "dist.init_process_group('gloo', rank=number, world_size=size)", 'yellow', 'the local rank as the rank'),
    ("dist.init_process_group('gloo', world_size=4)\ndist.init_process_group('gloo', world_size=2)", None, ''),
    # which the program may skip
    ("def alone():\n    dist.init_process_group('gloo', world_size=1)", None, ''),     # which nobody calls
    ("if alone:\n    dist.init_process_group('gloo', rank=0, world_size=1)", None, ''),
    ("try:\n    dist.init_process_group('nccl')\nexcept RuntimeError:\n    dist.start('gloo')", None, ''),
    ("with suppress(RuntimeError):\n    dist.init_process_group('nccl')", None, ''),
    ("start = lambda: dist.init_process_group('nccl')", None, ''),
    ("cuda and dist.init_process_group('nccl')", None, ''),
    # to which it may not come
    ("def alone():\n    dist.init_process_group('gloo', rank=0)\nif 'RANK' not in os.environ:\n    alone()", 'yellow', 'rank=0'),
    ("def main():\n    if no:\n        return\n    dist.init_process_group('gloo', rank=0)\nmain()", 'yellow', 'rank=0'),
    ("def main():\n    dist.init_process_group('gloo', rank=0)\nstart(main)", 'yellow', 'rank=0'),
    ("@run\ndef main():\n    dist.init_process_group('gloo', rank=0)\nmain()", 'yellow', 'rank=0'),
    ("if no:\n    sys.exit()\ndist.init_process_group('gloo', rank=0)", 'yellow', 'rank=0'),
    ("for x in range(n):\n    main()\ndef main():\n    dist.init_process_group('gloo', rank=0)", 'yellow', 'rank=0'),
    ("def main():\n    main()\n    dist.init_process_group('gloo', rank=0)", 'yellow', 'rank=0'),
    ("def f():\n    return 1\ndef main():\n    dist.init_process_group('gloo', rank=0)\nmain()", 'red', 'rank=0'),
    # ranks and groups
    ("dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)", None, ''),
    ("dist.init_process_group('fake', rank=0, world_size=1024)", None, ''),
    ("if __name__ == '__main__':\n    dist.init_process_group('nccl')", 'red', 'but this rank sees no GPU'),
    ("dist.init_process_group('nccl' if gpus else 'gloo')", None, ''), ("dist.init_process_group()", None, ''),
    ("@dataclass\nclass Config:\n    backend: str = 'nccl'\nc = Config(backend='gloo')\ndist.init_process_group(c.backend)", None, ''),
    ("dist.init_process_group('gloo', rank=0)", 'red', 'all 4 ranks call init_process_group(rank=0)'),
    ("dist.init_process_group('gloo', rank=local_rank)", 'yellow', 'uses the local rank as the rank'),
    ("dist.init_process_group(init_method='tcp://127.0.0.1:2345')", 'red', 'means another host on each node'),
    ("dist.init_process_group(init_method='tcp://n7:2345')", 'yellow', 'means a fixed host, but MASTER_ADDR=n1'),
    ("dist.init_process_group(init_method='file:///tmp/meet')", 'yellow', 'is another file on each node'),
    ("dist.init_process_group(init_method='file:///home/me/tmp/meet')", None, ''),
    ("rank = int(os.environ['SLURM_LOCALID'])\nif rank == 0:\n    save()", 'yellow', 'uses the local rank as the rank'),
    ("rank = int(os.environ['LOCAL_RANK'])\nif not rank:\n    save()", 'yellow', 'uses the local rank as the rank'),
    ("rank = int(os.environ['LOCAL_RANK'])\nDistributedSampler(data, rank=rank)", 'yellow', 'uses the local rank as the rank'),
    ("rank = int(os.environ['LOCAL_RANK'])\nif other == 0:\n    net.to(rank)", None, ''),    # FSDP2 of pytorch/examples
    ("rank = int(os.environ.get('RANK', os.environ['SLURM_LOCALID']))", None, ''),
    ("rank = dist.get_rank() if args.local_rank != -1 else 0", None, ''),
    ("rank = int(os.environ['PMI_ID']) if args.local_rank != -1 else 0", None, ''),
    ("rank = dist.get_rank() if args.many else args.local_rank", None, ''),
    ("rank = args.local_rank if args.many else 0\nif rank:\n    sys.exit()", 'yellow', 'uses the local rank as the rank'),
    ("rank = 2 * int(os.environ['SLURM_NODEID']) + int(os.environ['SLURM_LOCALID'])", None, ''),
    ("pool.spawn(main)", None, ''), ("mp.spawn(main, nprocs=2)", 'yellow', 'but the launcher has already started 2 ranks'),
    ("if 'RANK' in os.environ:\n    main()\nelse:\n    mp.spawn(main, nprocs=2)", None, ''),
    ("os.environ['MASTER_ADDR'] = 'localhost'", 'yellow', "sets MASTER_ADDR='localhost'"),
    ("os.environ['MASTER_PORT'] = '23000'", None, ''), ("os.environ['RANK'] = '0'", 'yellow', "sets RANK='0', but"),
    ("if 'RANK' not in os.environ:\n    os.environ['RANK'] = '0'", None, ''),
    # what all must call
    ("for epoch in epochs:\n    if dist.get_rank() == 0:\n        save()\n        dist.barrier()", 'yellow', 'only one rank calls barrier()'),
    ("if os.environ['RANK'] == '0':\n    torch.distributed.barrier()", 'yellow', 'only one rank calls barrier()'),
    ("if rank == 0:\n    threads.barrier()", None, ''), ("if args.local_rank == 0:\n    dist.barrier(group=nodes)", None, ''), ("if rank == 0:\n    save()\ndist.barrier()", None, ''),
    ("if rank != 0:\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()", None, ''),
    ("if rank == 0:\n    dist.gather(x, found)\nelse:\n    dist.gather(x)", None, ''), ("if size == 2:\n    dist.barrier()", None, ''),
    # data
    (GROUP + SAMPLED, 'yellow', 'without set_epoch()'), (GROUP + SAMPLED + "loader.sampler.set_epoch(1)", None, ''),
    ("from accelerate import Accelerator\n" + GROUP + SAMPLED, None, ''), (SAMPLED, None, ''),
    (GROUP + SAMPLED.replace('(data))', '(data, shuffle=False))'), None, ''),
    (GROUP + "DDP(model)\nloader = DataLoader(data)", 'yellow', 'a DataLoader without a sampler'),
    (GROUP + "DDP(model)\nloader = DataLoader(data[rank::size])", 'yellow', 'ranks with more batches than others'),
    (GROUP + "DDP(model)\nloader = DataLoader(data, **more)", None, ''),
    (GROUP + "DDP(model)\nclass Data(IterableDataset): pass\nloader = DataLoader(data)", None, ''),
    # an order of each rank's own
    ("random.shuffle(files)\n" + SPLIT, 'yellow', 'random.shuffle() without a common seed'),
    ("def train(args):\n    order = torch.randperm(64)\ntrain(1)\n" + SPLIT, 'yellow', 'torch.randperm() without'),
    ("torch.manual_seed(1)\norder = np.random.permutation(64)\n" + SPLIT, 'yellow', 'np.random.permutation() without'),
    ("class Files(Dataset):\n    def __init__(self):\n        random.shuffle(files)\n" + SPLIT, 'yellow', 'without a common seed'),
    ("random.seed(args.seed + rank)\nrandom.shuffle(files)\nmine = files[rank::size]", 'yellow', 'without a common seed'),
    ("a, b = torch.utils.data.random_split(data, [48, 16])\n" + SPLIT, 'yellow', 'random_split() without a common seed'),
    ("random_split(data, [48, 16], torch.Generator().manual_seed(1))\n" + SPLIT, None, ''),
    ("torch.manual_seed(1)\nrandom_split(data, [48, 16])\n" + SPLIT, None, ''),
    ("random.seed(1)\nrandom.shuffle(files)\n" + SPLIT, None, ''), ("random.shuffle(files)", None, ''),
    ("set_seed(1)\nrandom.shuffle(files)\n" + SPLIT, None, ''),
    ("torch.manual_seed(1)\ntorch.manual_seed(args.seed + rank)\nrandom_split(data, [48, 16])\n" + SPLIT, 'yellow', 'without a common seed'),
    ("torch.manual_seed(1)\nrandom_split(data, [48, 16])\ntorch.manual_seed(args.seed + rank)\n" + SPLIT, None, ''),
    ("mine = files[rank::size]\nrandom.shuffle(mine)", None, ''),
    ("torch.randperm(9, generator=g)\n" + SPLIT, None, ''), ("if rank == 0:\n    random.shuffle(files)\n" + SPLIT, None, ''),
    ("class Net(Module):\n    def __init__(self):\n        torch.randperm(9)\n" + SPLIT, None, ''),
    ("import lightning\nrandom.shuffle(files)\n" + SPLIT, None, ''),
    # directories that all make
    ("os.makedirs(args.out)", 'yellow', 'all ranks make the same directory'), ("os.mkdir('out')", 'yellow', 'same directory'),
    ("out = Path(args.out)\nout.mkdir(parents=True)", 'yellow', 'same directory'),
    ("def place():\n    return 'out'\nos.makedirs(place())", 'yellow', 'same directory'),
    ("os.makedirs(args.out, exist_ok=True)", None, ''), ("os.makedirs(args.out, 0o755, True)", None, ''),
    ("if not os.path.exists(args.out):\n    os.makedirs(args.out)", None, ''), ("sftp.mkdir(args.out)", None, ''),
    ("out = f'{args.out}/{rank}'\nos.makedirs(out)", None, ''), ("os.makedirs(tempfile.mkdtemp())", None, ''),
    ("def make(path):\n    os.makedirs(path)\nif rank == 0:\n    make(args.out)", None, ''),
    # past DistributedDataParallel
    (WRAPPED.replace('USE', 'model.module(x)'), 'yellow', 'model.module() goes past'),
    (WRAPPED.replace('USE', 'model.module.forward(x)'), 'yellow', 'model.module.forward() goes past'),
    (WRAPPED.replace('USE', 'model(x)'), None, ''), (WRAPPED.replace('USE', 'model.module.state_dict()'), None, ''),
    ("model = Parallel(net)\nmodel.module(x).backward()", None, ''), ("model = DDP(net)\nloss = model.module(x)", None, ''),
    (WRAPPED.replace('USE', '0\n    with torch.no_grad():\n        model.module(x)'), None, ''),
    # a port of each rank's own, and nodes for ranks
    ("with socket.socket() as own:\n    own.bind(('', 0))\n    os.environ['MASTER_PORT'] = str(own.getsockname()[1])", 'yellow',
     'each rank sets MASTER_PORT to a port of its own'),
    ("def one():\n    return own.getsockname()[1]\nport = one()\nos.environ['MASTER_PORT'] = str(port)", 'yellow', 'a port of its own'),
    ("if rank == 0:\n    os.environ['MASTER_PORT'] = str(find_free_port())", None, ''),
    ("os.environ['MASTER_PORT'] = str(args.port)", None, ''),
    ("port = find_free_port()\ndist.init_process_group(init_method=f'tcp://n1:{port}')", 'yellow', 'a port of its own'),
    ("dist.init_process_group(rank=rank, world_size=int(os.environ['SLURM_NNODES']))", 'yellow', 'the number of nodes as the number of ranks'),
    ("dist.init_process_group(rank=int(os.environ['SLURM_NODEID']))", 'yellow', 'the number of the node as the rank'),
    ("size = int(os.environ['SLURM_NNODES']) * gpus\ndist.init_process_group(world_size=size)", None, ''),
    ("os.environ['WORLD_SIZE'] = os.environ['SLURM_JOB_NUM_NODES']", 'yellow', 'sets WORLD_SIZE by nodes'),
    ("os.environ['RANK'] = os.environ['SLURM_NODEID']", 'yellow', 'sets RANK by nodes'),
    ("os.environ['LOCAL_RANK'] = os.environ['SLURM_NODEID']", None, ''),
    # a stream that all ranks read
    (STREAM, 'yellow', 'the IterableDataset Stream does not know the rank'), (STREAM.replace('DDP', 'Parallel'), None, ''),
    (STREAM.replace('rows', 'rows[RANK:]'), None, ''), (STREAM.replace('Stream()', 'Stream(dist.get_rank())'), None, ''),
    (STREAM.replace('rows', 'random.sample(rows)'), None, ''), (STREAM.replace('rows', 'part()') + "def part():\n    return rows[rank:]", None, ''), (STREAM.replace('loader', 'shards'), None, ''),
    (STREAM.replace('__iter__', 'more'), None, ''), (STREAM.replace('(Stream())', '(rows)'), None, ''),
    # a forward pass on one rank
    (ALONE + "if rank == 0:\n    test(model)", 'yellow', 'only one rank calls the model in DistributedDataParallel'),
    (ALONE + "for epoch in epochs:\n    if rank == 0:\n        model(x)", 'yellow', 'only one rank calls the model'),
    (ALONE + "if rank == 0:\n    test(model.module)\n    model.module(x)\n    save(model)", None, ''),
    (ALONE + "test(model)\nif rank == 0:\n    keep(model)\nelse:\n    test(model)", None, ''),
    (ALONE + "model = model.module\nif rank == 0:\n    test(model)", None, ''),
    (ALONE + "def validate(model):\n    if rank == 0:\n        test(model)\nvalidate(model.module)", None, ''),
    (ALONE + "def validate(data):\n    if rank == 0:\n        test(model)\nvalidate(1)", 'yellow', 'only one rank calls the model'),
    (ALONE.replace('BatchNorm1d', 'LayerNorm') + "if rank == 0:\n    test(model)", None, ''),
    (ALONE.replace('net)', 'net, broadcast_buffers=False)') + "if rank == 0:\n    test(model)", None, ''),
    # an option for the local rank
    (LAUNCH, 'yellow', 'line 1: takes the local rank from an option that srun and torchrun do not give'),
    (LAUNCH.replace('rank\'', 'step\''), None, ''), (LAUNCH.replace('default=-1', "default=os.environ['LOCAL_RANK']"), None, ''),
    (LAUNCH.replace('args.local_rank', 'args'), None, ''), ('import deepspeed\n' + LAUNCH, None, ''), (LAUNCH.replace('--local_rank', '--lr'), None, ''),
    # weights of one rank
    ("model = DDP(net)\nif rank == 0:\n    model.module.load_state_dict(torch.load(args.resume))", 'yellow', 'only one rank loads weights'),
    ("if rank == 0:\n    net.load_state_dict(torch.load(args.resume))\nmodel = DDP(net)", None, ''),
    ("model = DDP(net)\nmodel.module.load_state_dict(torch.load(args.resume))", None, ''),
    # variables that are not set
    ("def train(args):\n    load(workers=int(os.environ['SLURM_CPUS_PER_TASK']))\ntrain(1)", 'yellow',
     "line 2: reads os.environ['SLURM_CPUS_PER_TASK'], which is not set"),
    ("if slurm:\n    os.environ['SLURM_CPUS_PER_TASK']", None, ''), ("os.environ['NO'] = '1'\nos.environ['NO']", None, ''),
    ("if 'NO' in os.environ:\n    pass\nos.environ['NO']", None, ''), ("load_dotenv()\nos.environ['NO']", None, ''),
    ("os.environ.setdefault('NO', '1')\nos.environ['NO']", None, ''), ("sizes['NO']", None, ''),
    # GPUs where there are none
    ("model.cuda()", 'yellow', 'uses a GPU, but this rank sees none'), ("model.to(torch.device('cuda', local))", 'yellow', 'sees none'),
    ("device = f'cuda:{local}'\nmodel.to(device)", 'yellow', 'sees none'), ("torch.zeros(3, device='cuda')", 'yellow', 'sees none'),
    ("torch.cuda.set_device(local)", 'yellow', 'sees none'), ("torch.cuda.is_available()\nmodel.to('cpu')\nx.to(torch.float)", None, ''),
    ("model.to(torch.device('cuda' if torch.cuda.is_available() else 'cpu'))", None, ''), ("load('cuda')\nmodel.to('cudagraph')", None, ''),
    ("if torch.cuda.is_available():\n    model.cuda()", None, ''),
])
def test_what_the_program_says_of_ranks_and_data(text, level, says):
    slurm = dict.fromkeys(['SLURM_LOCALID', 'SLURM_NODEID', 'SLURM_NNODES', 'SLURM_JOB_NUM_NODES'], '2')
    alone = findings.Report(0)
    rules.check(alone, parsed(text, [], {**slurm, 'WORLD_SIZE': '1'}), ['gpu'])
    assert all(re.search("world_size|init_method|fixed host|is not set", finding.text) or 'sets' in finding.text
               for finding in alone.findings)
    report = findings.Report(0)
    env = {**slurm, 'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '2', 'MASTER_ADDR': 'n1', 'MASTER_PORT': '23000'}
    rules.check(report, parsed(text, ['7', '--lr', '0.1'], env), None)
    assert [finding.level for finding in report.findings] == ([level] if level else []), text
    assert not level or says in of_level(report, level, 'program')[0]


IMPORTS = {
    # name: (files beside the script, whether it is sure or None, what is said)
    'missing': ({'train.py': 'import json\nimport no_such_package\n'}, True,
                "line 2: import no_such_package: ModuleNotFoundError: No module named 'no_such_package'"),
    'a name that is not there': ({'train.py': 'from shapes import INPUTS\n', 'shapes.py': ''}, True,
                                 "cannot import name 'INPUTS'"),
    'syntax of a module': ({'train.py': 'import shapes\n', 'shapes.py': 'if True x'}, True, 'SyntaxError'),
    'an error of its own': ({'train.py': 'import shapes\n', 'shapes.py': '1 / 0'}, False, 'ZeroDivisionError'),
    'in a try': ({'train.py': 'try:\n    import no_such_package\nexcept ImportError:\n    pass\n'}, None, ''),
    'a path of its own': ({'train.py': 'import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), "lib"))'
                                       '\nimport inside\n', 'lib/inside.py': ''}, None, ''),
    'a path that is not known here': ({'train.py': 'import sys\nsys.path.append(place)\nimport inside\n'}, False,
                                      'No module named'),
    'what only reads the environment': ({'train.py': 'import os, signal\nos.kill(os.getpid(), int(os.environ.get("X", 9)))\n'
                                                     'import shapes\n', 'shapes.py': ''}, None, ''),
    'a module that ends': ({'train.py': 'import shapes\nimport nothing\n', 'shapes.py': 'raise SystemExit(3)'}, True,
                           'line 1: import shapes ends the program: SystemExit: 3'),
    'a module that ends at once': ({'train.py': 'import shapes\n', 'shapes.py': 'import os\nos._exit(0)'}, True,
                                   'import shapes ended the process with status 0'),
    'a module that asks': ({'train.py': 'import shapes\n', 'shapes.py': 'input()'}, False, 'EOFError'),
    'killed': ({'train.py': 'import shapes\n', 'shapes.py': 'import os\nos.kill(os.getpid(), 9)'}, False,
               'import shapes ended the process with status -9'),
    'shadow': ({'train.py': 'from random import no\n', 'random.py': 'numbers = 1\n'}, None, ''),
    'known only to Python itself': ({'train.py': 'import json, sys\nsys.modules["old"] = json\nimport old\n'}, False, 'No module named'),
    'not in the main block': ({'train.py': 'if __name__ != "__main__":\n    import no_such_package\n'}, None, ''),
    'of the script itself': ({'train.py': 'LIMIT = 1\nimport shapes\n', 'shapes.py': 'from __main__ import LIMIT'}, False,
                             "cannot import name 'LIMIT'"),
    # as in yolov5's train.py
    'a path in variables': ({'tools/train.py': 'import sys\nfrom pathlib import Path\nFILE = Path(__file__).resolve()\nROOT = FILE.parents[1]\n'
                                         'if str(ROOT) not in sys.path:\n    sys.path.append(str(ROOT))\nimport inside\n',
                             'inside.py': ''}, None, ''),
    'in the main block': ({'train.py': 'if __name__ == "__main__":\n    import no_such_package\n'}, True, 'No module named'),
    'later': ({'train.py': 'def main():\n    import no_such_package\nif main:\n    import no_such_package\n'}, None, ''),
    'in a function that it calls': ({'train.py': 'def main():\n    import json, os.path\n    from no_such_package import a\n'
                                                 'if __name__ == "__main__":\n    main()\n'}, False,
                                    "line 3: ModuleNotFoundError: No module named 'no_such_package'"),
    'by one rank': ({'train.py': 'def main(rank):\n    if rank == 0:\n        import no_such_package\nmain(0)\n'}, False,
                    "line 3: ModuleNotFoundError: No module named 'no_such_package'"),
    'by one rank that tries': ({'train.py': 'def main(rank):\n    if rank == 0:\n        try:\n            import no_such_package\n'
                                            '        except ImportError:\n            pass\nmain(0)\n'}, None, ''),
    'what a module of PyTorch needs': ({'train.py': 'def main():\n    from torch.utils.tensorboard import SummaryWriter\nmain()\n',
                                        'torch.py': '', 'board/__init__.py': ''}, False, "No module named 'tensorboard'"),
    'in a function that tries': ({'train.py': 'def main():\n    try:\n        import no_such_package\n    except ImportError:\n'
                                              '        pass\nmain()\n'}, None, ''),
    'with MPI': ({'train.py': 'import no_such_package\nimport mpi4py\n'}, False, 'No module named'),
    'sound arguments': ({'train.py': 'import shapes, os.path, json\nshapes.net(1, depth=2)\njson.dumps(1, indent=2)\nshapes.later\n'
                                     'def f(json):\n    json.nothing\n', 'shapes.py': 'def net(a, **more): pass\nlater = 1\n'}, None, ''),
    'a path that is added once': ({'train.py': 'import os, sys\nif __file__ not in sys.path:\n'
                                         '    sys.path.append(os.path.join(os.path.dirname(__file__), "lib"))\nimport inside\n',
                      'lib/inside.py': ''}, None, ''),
    'after a call that is not known': ({'train.py': 'import site\nsite.addsitedir("lib")\nimport inside\n', 'lib/inside.py': ''}, False,
                                       'No module named'),
    'after calls': ({'train.py': 'import os\nprint("begins", flush=True)\n'
                                                      'rank = int(os.environ.get("RANK", 0))\nimport inside\n'},
                                         False, 'No module named'),
    'after what calls nothing': ({'train.py': '"Trains."\nA = [1]\nclass B:\n    def f(self): exit()\nimport inside\n'}, True, 'No module'),
    'after an exit under a condition': ({'train.py': 'import sys\nif sys.argv[2:]:\n    sys.exit()\nimport inside\n'}, False,
                                        'No module named'),
    'after a start of another program': ({'train.py': 'import os\nif os.environ.get("AGAIN"):\n    os.execv("/bin/sh", [])\n'
                                                      'import inside\n'}, False, 'No module named'),
    'after a path that a loop adds': ({'train.py': 'import sys\nfor place in ["lib"]:\n    sys.path += [place]\nimport inside\n'},
                                      False, 'No module named'),
    'closes what is open': ({'train.py': 'import shapes\n', 'shapes.py': 'import os\nos.closerange(3, 99)'}, None, ''),
    'what fails beside PyTorch': ({'train.py': 'import shapes\n', 'shapes.py': 'raise ImportError("static TLS block")'}, False,
                                  'static TLS block'),
    'crash': ({'train.py': 'import shapes\n', 'shapes.py': 'import os\nos.kill(os.getpid(), 11)'}, True,
              'import shapes ended the process with status -11'),
}


def trial(*words, limit=30, preload='random', **env):
    """What the trial of imports says of a program."""
    code = (f'import sys; sys.path[0] = sys.argv[1]; import json, {preload}; from slingtorch.job import imports; '
            f'imports.LIMIT = {limit}; print(json.dumps(imports.Trial(sys.argv[2:]).result()))')
    script = next(word for word in words if isinstance(word, pathlib.Path))
    done = subprocess.run([sys.executable, '-B', '-c', code, str(ROOT), *map(str, words)], text=True, check=True,
                          stdout=subprocess.PIPE, cwd=script.parent, env={**os.environ, **env}, timeout=300)
    return json.loads(done.stdout)


@pytest.mark.parametrize('line, plugin', [
    ('NET/Plugin: libfabric.so.1: cannot open shared object file: No such file or directory', 'libfabric.so.1: cannot'),
    ('NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.', 'Could not find: libnccl-net.so'),
    ('NET/Plugin: Loaded net plugin AWS Libfabric (v6)', None),
])
def test_why_nccl_has_no_plugin_is_in_its_log(line, plugin):
    found = nccl.heard(io.BytesIO(f'n1:33:47 [0] NCCL INFO {line}\n'.encode()))['plugin']
    assert found.startswith(plugin) if plugin else found is None


def test_a_long_script_is_tried_to_its_end(tmp_path):
    """What it says of each statement is more than a pipe holds."""
    (tmp_path / 'train.py').write_text(''.join(f'VALUE_{number} = "{"x" * 80}"\n' for number in range(1000)) + 'import nothing\n')
    text, sure = trial(tmp_path / 'train.py')['wrong']
    assert "line 1001: import nothing: ModuleNotFoundError" in text and sure


@pytest.mark.parametrize('name', IMPORTS)
def test_what_a_script_imports_is_imported(tmp_path, name):
    files, sure, says = IMPORTS[name]
    tree(tmp_path, files)
    found = trial('-u', next(tmp_path.rglob('train.py')), '--x')
    text, certain = found.get('wrong') or ('', None)
    assert certain is sure and says in text, found
    assert found.get('shadows', []) == ['random.py'] * (name == 'shadow')


def test_options_and_places_decide_what_is_imported(tmp_path):
    tree(tmp_path, {'train.py': 'import shapes\n', 'shapes.py': '', 'other/train.py': 'import nothing\n', 'other/random.py': '',
                    'other/json/data.txt': '', 'other/re/__init__.py': '', 'other/new.py': '',
                    'src/mine/__init__.py': '', 'src/mine/train.py': 'import nothing\n'})
    assert 'wrong' not in trial(tmp_path / 'train.py')
    # Python does not search the script's directory
    assert sys.version_info < (3, 11) or "No module named 'shapes'" in trial(
        tmp_path / 'train.py', PYTHONSAFEPATH='1')['wrong'][0]
    # a module beside the script that PyTorch needs: the rest says nothing
    found = trial(tmp_path / 'other/train.py')
    assert found['shadows'] == ['random.py', 're'] and 'wrong' not in found
    found = trial('-m', 'mine.train', tmp_path / 'an argument', PYTHONPATH=tmp_path / 'src')
    assert "'nothing'" in found['wrong'][0]


def test_a_module_that_only_python_can_read(tmp_path, monkeypatch):
    tree(tmp_path, {'pack/__init__.py': '', 'pack/compiled.pyc': '', 'pack/tool.py': '', 'pack/sub/__main__.py': ''})
    monkeypatch.chdir(tmp_path)
    assert program.load(['-m', 'pack.compiled', 'x'], {}) is None is program.load(['-m', 'pack'], {})
    assert program.load(['-m', 'timeit'], {}) is None
    for name in ('pack.tool', 'pack.sub'):
        assert program.load(['-m' + name, 'x'], {}).given == ['x']
    assert program.load(['-m', 'no_such_pack.tool'], {}) is None


CHILD = "import os, time\nif not os.fork():\n    time.sleep(999)\n"


@pytest.mark.parametrize('code, says', [
    ("open('own.lock', 'x')", 'open own.lock'), ("os.open('own.lock', os.O_CREAT | os.O_EXCL)", 'open own.lock'),
    ("os.makedirs('runs')", 'os.mkdir runs'), ("import tools\ntools.save('x')", 'open x'),
    ("import subprocess; subprocess.Popen(['touch', 'x'])", 'subprocess.Popen touch'), ("os.fork()", 'os.fork'),
    ("import socket; socket.create_connection(('localhost', 1))", 'socket.connect'), ("os.kill(os.getppid(), 0)", 'os.kill'),
    ("import threading\ndef f():\n    open('x', 'w')\nt = threading.Thread(target=f)\nt.start()\nt.join()", 'open x'),
    ("try:\n    open('x', 'w')\nexcept BaseException:\n    os._exit(3)", 'open x'),
    ("open(os.devnull, 'w'); open('train.py'); import tools", None), ("import plot", None), ("import starts", None),
])
def test_the_trial_of_imports_has_no_effect(tmp_path, code, says):
    packages = tmp_path / 'lib/site-packages'
    tree(tmp_path, {'train.py': 'import json\nimport shapes\nimport nothing\n' if says else 'import shapes\n',
                    'shapes.py': 'import os\n' + code, 'lib/site-packages/tools.py': 'def save(path):\n    open(path, "w")\n',
                    # what packages do at their import, they do in any case; trial() ends when no child of theirs holds its stdout
                    'lib/site-packages/plot.py': f'open({str(tmp_path / "cache")!r}, "w")\nimport tempfile\ntempfile.mkdtemp()\n',
                    'lib/site-packages/starts.py': CHILD})
    (tmp_path / 'tmp').mkdir()
    found = trial(tmp_path / 'train.py', PYTHONPATH=packages, SLINGTORCH_JOB_DIR=tmp_path / 'tmp')
    assert 'wrong' not in found and (f'line 2: import shapes ({says}' in found['untested'] if says else 'untested' not in found)
    left = {path.name for path in tmp_path.iterdir()} - {'train.py', 'shapes.py', 'lib', 'tmp'}
    assert left == {'import plot': {'cache'}}.get(code, set())
    assert len(list((tmp_path / 'tmp').iterdir())) == (code == 'import plot')


@pytest.mark.parametrize('code, says', [
    ("torch.save([1], 'cache.pt')", 'torch.save cache.pt'), ("assert torch.save([1], io.BytesIO()) == 7", None),
    ("torch.save([1], f='cache.pt')", 'torch.save cache.pt'),
    ("try:\n    torch.distributed.init_process_group('nccl')\nexcept Exception:\n    raise SystemExit(1)",
     'torch.init_process_group'),
])
def test_what_pytorch_does_in_cpp_is_seen(tmp_path, code, says):
    tree(tmp_path, {'train.py': 'import shapes\n', 'shapes.py': 'import io, os, torch\n' + code,
                    # creat(2) stands for C++
                    'site-packages/torch/__init__.py': 'import ctypes\ndef save(what, f):\n'
                                                       '    ctypes.CDLL(None).creat(str(f).encode(), 0o600)\n    return 7\n',
                    'site-packages/torch/distributed.py': 'def init_process_group(backend):\n    1 / 0\n'})
    found = trial(tmp_path / 'train.py', preload='torch.distributed', PYTHONPATH=tmp_path / 'site-packages')
    assert 'wrong' not in found and (f'import shapes ({says}' in found['untested'] if says else 'untested' not in found)
    assert not (tmp_path / 'cache.pt').exists()


def test_the_trial_of_imports_ends_in_time(tmp_path):
    """Also where the program has the process's alarm for itself."""
    (tmp_path / 'train.py').write_text('import shapes\n')
    (tmp_path / 'shapes.py').write_text('import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n'
                                        'signal.alarm(0)\ntime.sleep(999)\n')
    found = trial(tmp_path / 'train.py', limit=2)
    assert found['late'] == 'line 1: import shapes did not end within 2 s' and 'wrong' not in found
    report = findings.Report(0)
    program.check_imports(report, found, {})
    assert of_level(report, 'yellow', 'script') == ["the script's imports take long: " + found['late']]


def test_the_trial_of_imports_ends_with_its_parent(tmp_path):
    script = tmp_path / 'train.py'
    script.write_text('import shapes\n')
    (tmp_path / 'shapes.py').write_text('import time\ntime.sleep(999)\n')
    code = "import sys; sys.path[0] = sys.argv[1]; from slingtorch.job import imports; imports.Trial(sys.argv[2:])"
    # returns when nobody holds its stdout
    subprocess.run([sys.executable, '-B', '-c', code, str(ROOT), str(script)], check=True, stdout=subprocess.PIPE, timeout=300)


def test_a_linked_script_imports_from_where_it_lies(tmp_path):
    (tmp_path / 'src').mkdir()
    (tmp_path / 'src' / 'train.py').write_text('import helper\n')
    (tmp_path / 'src' / 'helper.py').write_text('')
    script = tmp_path / 'train.py'
    script.symlink_to('src/train.py')
    assert set(program.load([str(script)], {}).files) == {'train.py', 'helper.py'}
    assert 'wrong' not in trial(script)


def test_modules_from_elsewhere_are_compared(tmp_path):
    script, far = tmp_path / 'train' / 'train.py', tmp_path / 'lib' / 'far.py'
    tree(tmp_path, {'train/train.py': 'import far, json, shapes\n', 'train/shapes.py': '', 'lib/far.py': 'WIDTH = 1\n'})
    found = [file for file in trial(script, PYTHONPATH=str(far.parent))['files'] if file.startswith(str(tmp_path))]
    assert found == [str(far)]
    report = findings.Report(0)
    for rank, text in enumerate(['WIDTH = 1\n', 'WIDTH = 2\n']):
        far.write_text(text)
        node = findings.Report(rank)
        program.check_imports(node, {'files': found}, {})
        report.merge(node)
    program.compare_programs(report)
    assert f'{far}, which the program or its arguments name, differs between nodes' in of_level(report, 'yellow', 'script')[0]


@pytest.mark.parametrize('said, details, says', [
    ({'wrong': ['line 1: import a: ImportError: no', True], 'worker': 'OSError: too long'}, {'workers': True}, [
        "red script: the script's imports fail: line 1: import a: ImportError: no -> correct",
        'red worker: a worker of a DataLoader fails: OSError: too long -> check TMPDIR']),
    ({'wrong': ['line 1', False], 'worker': 'x', 'untested': 'line 1: import a (os.mkdir x)', 'shadows': ['random.py']},
     {}, [
        'yellow script: beside the script: random.py: Python imports this',
        "yellow script: the script's imports fail: line 1 ->", 'yellow worker: a worker of a DataLoader fails: x',
        'untested script: the imports from here on: line 1: import a (os.mkdir x)']),
    *(({'wrong': [f'line 1: import a: {error}', True]}, {}, [
        f"red script: the script's imports fail: line 1: import a: {error} -> {remedy}"]) for error, remedy in (
            ("ModuleNotFoundError: No module named 'x'", 'install'),
            ('OSError: libx.so: cannot open shared object file: No such file or directory', 'install'),
            ('SyntaxError: invalid syntax (x.py, line 2)', 'correct'),
            ('ImportError: attempted relative import with no known parent package', 'correct'))),
])
def test_what_the_imports_say(said, details, says):
    report = findings.Report(0)
    program.check_imports(report, said, details)
    found = [f'{level} {name}: {text} -> {remedy}' for level, name, text, remedy, _ in report.sorted()]
    assert [text[:len(begin)] for text, begin in zip(found, says)] == says and len(found) == len(says)


@pytest.mark.parametrize('there, name, says', [
    ('project/src/__init__.py', 'src', True), ('project/tools/src.py', 'src', True), ('here/src.py', 'src', True),
    ('project/tools/deep/src.py', 'src', False), ('project/src/more.py', 'other', False),
])
def test_a_package_that_lies_above_the_script_needs_no_installation(tmp_path, monkeypatch, there, name, says):
    tree(tmp_path, {'here/a': '', there: '', 'project/tools/scripts/train.py': ''})
    monkeypatch.chdir(tmp_path / 'here')
    report = findings.Report(0)
    details = {'words': ['-u', str(tmp_path / 'project/tools/scripts/train.py')]}
    program.check_imports(report, {'wrong': [f"line 1: import a: ModuleNotFoundError: No module named '{name}.a'", True]}, details)
    [(_, _, _, remedy, _)] = report.sorted()
    place = tmp_path / re.sub('/src.*', '', there)
    assert remedy == (f'export PYTHONPATH={place}: it lies there' if says else 'install the missing package where all nodes see it')


# --- PyTorch's own variables


@pytest.mark.parametrize('name, value, says', [
    ('OMP_NUM_THREADS', 'abc', 'not a number of threads'), ('OMP_NUM_THREADS', '0', 'not a number of threads'),
    ('OMP_NUM_THREADS', '4,2', ''), ('OMP_NUM_THREADS', '100000', 'the node has only 16 cores'),
    ('TORCH_NCCL_ASYNC_ERROR_HANDLIN', '1', 'Perhaps it should be TORCH_NCCL_ASYNC_ERROR_HANDLING'),
    ('TORCH_NCCL_ASYNC_ERROR_HANDLING', '1', ''), ('TORCH_HOME', '/x', ''),
    ('GLOO_SOCKET_IFNAM', 'eth0', 'Perhaps it should be GLOO_SOCKET_IFNAME'),
    ('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segment:True', "has 'expandable_segment'"),
    ('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True', ''),
    ('TORCH_FR_BUFFER_SIZE', '2000', ''), ('TORCH_NCCL_BLOCKING_WAIT', 'perhaps', 'is not one of y, yes, 1'),
    ('TORCH_NCCL_BLOCKING_WAIT', 'True', ''), ('TORCH_CPP_LOG_LEVEL', 'LOUD', 'is not one of INFO, WARNING'),
    ('TORCH_CPP_LOG_LEVEL', 'info', ''),    # seen with 2.13
])
def test_variables_of_pytorch_against_its_libraries(tmp_path, name, value, says):
    (tmp_path / 'torch/lib').mkdir(parents=True)
    code = ('const char *a[] = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "x", "GLOO_SOCKET_IFNAME", "expandable_segments", '
            '"TORCH_CHECK failed"};')
    subprocess.run(['gcc', '-shared', '-fPIC', '-x', 'c', '-', '-o', tmp_path / 'torch/lib/libtorch_cpu.so'], input=code,
                   text=True, check=True)
    tree(tmp_path, {'sys/devices/system/cpu/online': '0-15'})
    report = findings.Report(0)
    report.fact('env ' + name, value)
    report.fact('torch is in', str(tmp_path / 'torch'))
    node.check_probe(report, {'facts': {}}, Machine({}, str(tmp_path)))
    found = [finding.text for name in ('variable', 'value') for finding in report.having(name=name)]
    assert [says in text for text in found] == [True] * bool(says)
    assert not report.having('red')


# --- what ends the check itself


def test_a_library_that_is_cut_off_is_named(tmp_path):
    mapped = re.search(r' (/\S+\.so\S*)$', pathlib.Path('/proc/self/maps').read_text(), re.M).group(1)
    whole = pathlib.Path(mapped).read_bytes()
    (tmp_path / 'libwhole.so').write_bytes(whole)
    (tmp_path / 'libpart.so').write_bytes(whole[:10000])
    (tmp_path / 'libempty.so').write_text('')
    assert elf.cut_off(str(tmp_path)) == [str(tmp_path / 'libpart.so')]
