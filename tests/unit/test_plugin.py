# SPDX-License-Identifier: GPL-2.0-only
"""NCCL's network plugin by itself, with a stand-in for each known interface; tests/builds/plugin has upstream's."""
import os
import pathlib
import subprocess

import pytest

from slingtorch.job import plugin
from slingtorch.job.findings import Report
from slingtorch.job.machine import Machine

SOURCE = pathlib.Path(__file__).with_name('plugin_stand_in.c')


@pytest.fixture(scope='module')
def build(tmp_path_factory):
    """The directory of a plugin with this interface."""
    made = {}

    def one(version):
        if version not in made:
            made[version] = tmp_path_factory.mktemp(f'v{version}')
            subprocess.run(['gcc', '-shared', '-fPIC', '-w', f'-DVERSION={version}', SOURCE, '-o',
                            made[version] / 'libnccl-net.so'], check=True)
        return made[version]
    return one


@pytest.fixture
def trials(build, tmp_path, monkeypatch):
    """Two nodes: [(what Trial has, its findings as {level: text})], each with a part of its environment changed."""
    def run(version=11, cards=2, need='', second=None, **env):
        for number in range(cards):
            (tmp_path / f'sys/class/cxi/cxi{number}').mkdir(parents=True, exist_ok=True)
        machines = [Machine({**os.environ, 'PROVIDER': 'cxi', 'STAND_IN': str(tmp_path), 'WORLD_SIZE': '2',
                             'LD_LIBRARY_PATH': str(build(version)), 'LOCAL_WORLD_SIZE': '1', **env, **more},
                            str(tmp_path)) for more in ({}, second or {})]
        nodes = [plugin.Trial(machine, 20) for machine in machines]
        try:
            words = [node.handles() for node in nodes]
            pairs = min(len(word.split()) for word in words)
            for number, node in enumerate(nodes):
                node.lane and pairs and node.lane.tell({
                    'handles': words[1 - number].split(), 'bytes': 16 << 20, 'number': number, 'before': 1 - number})
            for node in nodes:
                if pairs:
                    node.limit, node.asked = plugin.Limit(plugin.LIMIT + 2, node.lane.process.pid), True
                node.result()
        finally:
            for node in nodes:
                node.end()
        found = []
        for node in nodes:
            report = Report(0)
            plugin.check(report, node, need)
            found.append((node, {finding.level: finding.text for finding in report.findings}))
        return found
    monkeypatch.setattr(plugin, 'START', 3)
    return run


@pytest.mark.parametrize('version', plugin.KNOWN)
def test_data_goes_both_ways_through_each_known_interface(trials, version):
    for node, said in trials(version):
        assert node.told['devices'] == [['cxi0', 200000], ['cxi1', 200000]] and node.told['version'] == version
        assert len(node.moved['rates']) == 2 and min(node.moved['rates']) > 0
        assert set(said) <= {'good', 'yellow'}      # a stand-in may be slower than 4 Gbit/s
        assert 'error' not in node.moved


def test_an_interface_that_is_not_known_is_not_tested(trials):
    (node, said), _ = trials(13)
    assert said == {'untested': 'libnccl-net.so by itself: it has the interfaces v13; known are v6 to v12'}


@pytest.mark.parametrize('planted, says', [
    ('no-provider', r'does not start by itself: init failed with status 2: NET/OFI no provider cxi of 7, '
                    '1099511627776, a b -5'),
    ('crash', 'does not start by itself: it ended with status -6'),
    ('hang', 'does not start by itself: no answer in time'),
    ('no-device', 'does not start by itself: it has no device'),
    ('no-vni', 'moves no data between the nodes: cxi1: connect failed with status 6 (provider cxi)'),
    ('wrong-values', 'moves no data between the nodes: cxi0: wrong values were received (provider cxi)'),
    ('silent', 'moves no data between the nodes: cxi0: '),
])
@pytest.mark.parametrize('need, level', [('', 'yellow'), ('NCCL takes TCP on nodes with Slingshot', 'red')])
def test_what_does_not_work_is_named(trials, monkeypatch, planted, says, need, level):
    if planted in ('hang', 'silent') and not need:
        monkeypatch.setattr(plugin, 'START', 1)
    (_, said), _ = trials(PLANTED=planted, need=need)
    assert says in said[level]


@pytest.mark.parametrize('env, cards, says', [
    ({'PROVIDER': 'tcp;ofi_rxm', 'FI_PROVIDER': 'tcp'}, 2, "takes libfabric's provider tcp;ofi_rxm, and not cxi, on a "
     "node with Slingshot (no libfabric, FI_PROVIDER=tcp)"),
    ({}, 4, 'finds 2 devices (cxi0, cxi1), and the node has 4 of Slingshot (cxi0, cxi1, cxi2, cxi3)'),
    ({'PLANTED': 'slow-link'}, 2, 'the speed of a device is far from that of the others (200 Gbit/s): cxi1 25 Gbit/s'),
])
def test_a_network_that_is_not_the_one_of_the_machine_is_named(trials, tmp_path, env, cards, says):
    (node, _), _ = trials(cards=cards, **env)
    report = Report(0)
    node.moved = None       # what a stand-in reaches is no matter here
    plugin.check(report, node, '')
    assert [says in finding.text for finding in report.having('yellow')] == [True], report.findings


@pytest.mark.parametrize('passed, waited, left', [(3, 0, 5), (9, 0, -1), (9, 4, 3), (3, 4, 5), (25, 60, -1)])
def test_a_busy_node_is_no_plugin_that_hangs(monkeypatch, passed, waited, left):
    now, ready = [100.0], [7.0]
    monkeypatch.setattr(plugin.time, 'monotonic', lambda: now[0])
    monkeypatch.setattr(plugin, 'starved', lambda process: ready[0])
    limit = plugin.Limit(8)
    now[0], ready[0] = 100.0 + passed, 7.0 + waited
    assert limit.left() == left and limit.over() == (left <= 0)


def test_the_kernel_says_how_long_a_process_had_no_processor():
    before = plugin.starved()
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        with subprocess.Popen(['sh', '-c', 'while :; do :; done']) as other:
            end = plugin.time.process_time() + 0.3
            while plugin.time.process_time() < end:
                pass
            other.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert plugin.starved() > before + 0.05
    assert plugin.starved(1 << 30) == 0


def test_no_plugin_starts_nothing(tmp_path):
    trial = plugin.Trial(Machine({}, str(tmp_path)), 5)
    assert trial.lane is None and trial.handles() == ''
    trial.move('', 0, 0, 2)
    trial.result()
    report = Report(0)
    plugin.check(report, trial, 'needed')
    assert not report.findings


def test_a_device_that_is_slower_than_the_others_is_named():
    report = Report(0)
    devices = [(f'cxi{number}', 200000) for number in range(4)]
    assert plugin.check_rates(report, 'x', devices, {'rates': [2e10, 2e10, 2e9, 2e10]})
    assert [finding.text[:12] for finding in report.having('yellow')] == ['x: cxi2 move']
    assert not plugin.check_rates(Report(0), 'x', devices, {'rates': [2e10, 1e10, 2e10, 2e10]})
