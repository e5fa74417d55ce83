# SPDX-License-Identifier: GPL-2.0-only
"""
The check that runs in the ranks (slingtorch/job/check.py): every planted fault is named, a sound job has no red line.

Ranks are forks of this process, each with an environment and a /proc, /sys and /dev of its own; sockets are real.
"""
import ast
import collections
import contextlib
import copy
import fcntl
import json
import os
import pathlib
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest

from slingtorch import sites
from slingtorch.commands import values
from slingtorch.job import check, elf, findings, gather, limits, look, meet, messages, nccl, node, pairs, probe, variables
from slingtorch.job.machine import KFD, Machine, expand_hosts, library_kind
from testbed import ROOT, raising
from testbed.expected import expected

pytestmark = pytest.mark.usefixtures('whole_findings')
JOB = ROOT / 'slingtorch/job'
NODES = ('nid1', 'nid2')
COMES = {'node': 'nid2', 'rank': 4, 'ranks': 4}     # what the second node says at first


class FileStore:
    """PyTorch's store as far as meet.Store asks for it, for processes that have no PyTorch."""

    def __init__(self, directory):
        self.dir = directory
        directory.mkdir(exist_ok=True)

    def set(self, key, text):
        (self.dir / f'{key}.{os.getpid()}').write_text(text)
        os.replace(self.dir / f'{key}.{os.getpid()}', self.dir / key)

    def add(self, key, more):
        with open(self.dir / ('n-' + key), 'a+') as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.write('x' * more)
            return stream.tell()

    def check(self, keys):
        return all((self.dir / key).exists() for key in keys)

    def wait(self, keys, limit):
        end = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise RuntimeError('wait timeout')
            time.sleep(0.01)

    def multi_get(self, keys):
        return [(self.dir / key).read_bytes() for key in keys]


class NoTorch:
    """Stands for the process with PyTorch: its answer is given, and the nodes meet in a FileStore."""

    answer, clock, directory = {}, time.time, None

    def __init__(self, machine, seconds, words):
        self.probe, self.seconds, self.things, self.found = probe.Probe(self), seconds, queue.Queue(), {}
        self.probe.environ, self.probe.clock = machine.environ, type(self).clock
        self.recv, self.probe.open = self.things.get, self.open
        self.probe.say(took={}, imported=0.1)

    def send(self, said):
        self.found.update(copy.deepcopy(said))

    def open(self, *_):
        store = meet.Store.__new__(meet.Store)
        store.environ, store.store, store.another = self.probe.environ, FileStore(self.directory), lambda: None
        store.seconds = 0
        if self.probe.environ['RANK'] == '0':
            store.share_secret()
        return store

    def wait(self, key, *_):
        return key in self.found

    def result(self, _):
        try:
            self.probe.come(self.seconds)
        except meet.NotMet as err:
            self.probe.result['lost'] = str(err)
        self.probe.say(**self.answer)
        threading.Thread(target=self.exchange, daemon=True).start()
        return self.found

    def exchange(self):
        try:
            self.probe.exchange()
        except meet.NotMet as err:
            self.probe.say(lost=str(err))

    def ask(self, key, seconds, thing):
        self.things.put((thing, seconds))
        messages.until(lambda: {key, 'lost'} & set(self.found), time.monotonic() + seconds)
        if key not in self.found:
            raise gather.PeerLost(self.found.get('lost'))
        return self.found[key]

    def end(self):
        pass


class Job:
    """
    Ranks on two nodes, sound until a test changes something.

    :ivar env: of all ranks; :ivar ranks: {rank: what is different there}; :ivar files: of all nodes, below a root each
    """

    def __init__(self, directory):
        self.dir, self.per_node, self.nodes = directory, 4, NODES
        self.env, self.ranks, self.clocks, self.left_out, self.torch = {}, {}, {}, (), collections.defaultdict(
            lambda: '/nowhere/torch')
        self.files = {
            'sys/class/net/lo/operstate': 'unknown', 'sys/class/net/eth0/operstate': 'up',
            'sys/devices/system/cpu/online': '0-15', 'proc/self/mounts': 'disk / ext4 rw 0 0\n',
            'proc/sys/kernel/random/boot_id': 'one\n', 'dev/shm/.keep': '',
        }
        self.cpus = lambda local_rank: '%d-%d' % (4 * local_rank, 4 * local_rank + 3)
        self.answer, self.machine, self.words = {}, Machine, ()
        with socket.socket() as free:
            free.bind(('', 0))
            self.port = free.getsockname()[1]

    def environ(self, rank):
        world, name = self.per_node * len(self.nodes), self.nodes[rank // self.per_node]
        cache = self.dir / 'cache'
        cache.mkdir(mode=0o700, exist_ok=True)
        env = {
            'RANK': rank, 'WORLD_SIZE': world, 'LOCAL_RANK': rank % self.per_node, 'LOCAL_WORLD_SIZE': self.per_node,
            'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': self.port, 'SLURM_JOB_ID': self.port, 'SLURM_STEP_ID': 0,
            'SLURM_PROCID': rank, 'SLURM_STEP_NUM_TASKS': world, 'SLURMD_NODENAME': name,
            'SLURM_STEP_NODELIST': ','.join(self.nodes), 'SLINGTORCH_CHECK_SECONDS': 20,
            'SLINGTORCH_JOB_DIR': self.dir, 'NCCL_HOSTID': name,
            'PATH': '/nowhere', 'TRITON_CACHE_DIR': cache, 'MIOPEN_USER_DB_PATH': cache,
            **self.env, **self.ranks.get(rank, {}),
        }
        return {key: str(value) for key, value in env.items() if value is not None}

    def root(self, rank):
        root = self.dir / ('root-%d' % rank)
        status = 'Name:\tpython\nCpus_allowed_list:\t%s\n' % self.cpus(rank % self.per_node)
        for name, text in {**self.files, 'proc/self/status': status}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(root)

    def start(self, rank):
        """Fork one rank; its process id."""
        clock = self.clocks.get(rank // self.per_node, time.time)
        machine = self.machine(self.environ(rank), self.root(rank), clock)
        start = type('Start', (NoTorch,), {'answer': self.answer, 'clock': staticmethod(clock),
                                           'directory': self.dir / 'store'})
        pid = os.fork()
        if pid:
            return pid
        status = 99
        try:
            with open(self.dir / ('out-%d' % rank), 'w') as out, contextlib.redirect_stderr(out):
                try:
                    status = check.run(machine, out, str(self.dir / 'found.json'), self.torch[rank], start, self.words)
                except (gather.PeerLost, OSError) as err:
                    out.write('lost: %s' % err)
                    status = 1
        finally:
            os._exit(status)

    def run(self):
        """(exit statuses by rank, what rank 0 printed, its JSON)"""
        shutil.rmtree(self.dir / 'store', ignore_errors=True)
        pids = {rank: self.start(rank) for rank in range(self.per_node * len(self.nodes)) if rank not in self.left_out}
        statuses = {rank: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for rank, pid in pids.items()}
        found = json.loads((self.dir / 'found.json').read_text())
        return statuses, (self.dir / 'out-0').read_text(), found


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv('COLUMNS', '110')
    # what takes long on a busy machine is no finding
    monkeypatch.setattr(check.meet, 'look_up', lambda name: 0)
    monkeypatch.setattr(limits, 'WAIT', 100)
    return Job(tmp_path)


def named(found, name, level='red'):
    """The findings of this name and level: [(text, ranks)]."""
    return [(entry['text'], entry['ranks']) for entry in found['findings']
            if (entry['name'], entry['level']) == (name, level)]


def only(found, name, level='red'):
    """The one finding; of the red ones, the only one."""
    if level == 'red':
        assert {entry['name'] for entry in found['findings'] if entry['level'] == 'red'} == {name}, found['findings']
    [entry] = named(found, name, level)
    return entry


def red(found):
    return [entry for entry in found['findings'] if entry['level'] == 'red']


EIGHT = list(range(8))


# --- a sound job


def test_a_sound_job_of_eight_ranks_on_two_nodes_has_no_red_line(job):
    job.words = ['-m', 'timeit']
    statuses, text, found = job.run()
    assert statuses == dict.fromkeys(EIGHT, 0)
    assert (found['format'], found['ranks'], found['title']) == (1, EIGHT, text.splitlines()[0])
    facts = ['%s: %s' % (name, values if not re.match('ulimit|writes HOME', name) else len(values))
             for name, values in found['facts'].items()]
    expected('\n'.join([re.sub(r'\d+\.\d s', 'N s', text), *facts]) + '\n', 'check-sound', [
        (job.port, 'PORT'), (os.getcwd(), 'HERE')])


@pytest.mark.parametrize('ignore, left', [
    ('1', []), ('1 1', []), ('1,variable', []),
    ('interface', ['master']), ('interface, master', []), ('interface master', []),
    ('', ['interface', 'master']), ('0', ['interface', 'master']),
])
def test_named_red_lines_are_shown_and_ignored(job, ignore, left):
    job.env.update(GLOO_SOCKET_IFNAME='hsn', SLINGTORCH_CHECK_IGNORE=ignore)
    job.ranks[5] = {'MASTER_PORT': '29500'}
    statuses, text, found = job.run()
    assert set(statuses.values()) == {1 if left else 0}, text
    assert sorted(entry['name'] for entry in red(found)) == left
    shown = [entry['name'] for entry in found['findings'] if entry['level'] == 'ignored']
    assert sorted(shown + left) == ['interface', 'master']
    assert sorted(re.findall(r'^(?:RED|ignored) +(\S+)', text, re.M)) == ['interface', 'master']
    assert ('%d RED, %s' % (len(left), '%d ignored' % len(shown) if shown else '')) in text.splitlines()[0]


def test_the_names_of_findings_are_those_that_can_be_ignored():
    calls = [call for path in JOB.glob('*.py') for call in ast.walk(ast.parse(path.read_text()))
             if isinstance(call, ast.Call) and ast.unparse(call.func) in ('report.add', 'rank.report.add')]
    names = {word.value for call in calls for word in ast.walk(call.args[1]) if isinstance(word, ast.Constant)}
    names |= {name for _, name, _ in check.SAME.values()}
    names |= {'import', 'rendezvous', 'collective'}      # phases of probe.py
    assert len(calls) > 40 and names == set(findings.NAMES)


def test_twenty_nodes(job):
    job.per_node, job.nodes, job.env['SLINGTORCH_CHECK_SECONDS'] = 1, ['n%d' % i for i in range(20)], 40
    job.ranks[19] = {'GLOO_SOCKET_IFNAME': 'hsn'}
    statuses, text, found = job.run()
    assert set(statuses.values()) == {1}, text
    assert found['ranks'] == list(range(20)) 
    assert text.splitlines()[1] == 'nodes:  ' + ''.join(f'n{rank} rank {rank}; ' for rank in (0, 1, 10, 11, 12, 13)) + '...'
    assert named(found, 'interface')[0][1] == [19]


# --- planted faults


def gpu_files(count, cpus='0-3 4-7 8-11 12-15'):
    files = {}
    for number in range(count):
        files.update(pci(number + 1, '0x10de', '0x030200', cpus.split()[number]))
        files['dev/nvidia%d' % number] = ''
    return files


def pci(number, vendor, kind, cpus='0-3'):
    where = 'sys/bus/pci/devices/0000:%02x:00.0/' % number
    return {where + 'vendor': vendor + '\n', where + 'class': kind + '\n', where + 'local_cpulist': cpus + '\n'}


def visible(number):
    """The GPU that each rank sees."""
    return {rank: {'CUDA_VISIBLE_DEVICES': number(rank % 4)} for rank in EIGHT}


GPUS = {'files': gpu_files(4), 'ranks': visible(lambda local_rank: local_rank)}
HIDDEN = {name: text for name, text in gpu_files(4).items() if not name.startswith('dev')}
SOON = {'SLINGTORCH_CHECK_SECONDS': 2}
UP = {'sys/class/net/hsn0/operstate': 'up', 'sys/class/net/hsn1/operstate': 'up'}
ONE = {'per_node': 1, 'nodes': ['nid1']}
# {file in tests/expected/check-jobs, with what is said: what is different in the job}
JOBS = {
    'untested': {**ONE, 'torch': {0: None}},
    'no-answer': {'left_out': (4, 5, 6, 7), 'env': SOON},
    'no-answer-ignored': {'left_out': (4,), 'env': {**SOON, 'SLINGTORCH_CHECK_IGNORE': 'no-answer'}},
    'world-size': {'env': {**SOON, 'WORLD_SIZE': 12, 'SLURM_STEP_NUM_TASKS': 8}},
    'variables': {'ranks': {6: {'NCCL_ALGO': 'Ring'}}, 'env': {
        'FI_CXI_RDV_PROTO': 'alt_read', 'NCCL_NET_GDR_LEVEL': 'PBH', 'FI_CXI_DEFAULT_TX_SIZE': 131072,
        'NCCL_IB_TIMEOUT': 'ten'}},
    # NCCL is not needed without GPUs, and gloo alone stops no job with them; one interface suffices for NCCL
    'interface-nccl': {'env': {'NCCL_SOCKET_IFNAME': 'eth0 '}},
    'interface-nccl-gpus': {**GPUS, 'env': {'NCCL_SOCKET_IFNAME': '=eth'}},
    'interface-gloo-gpus': {**GPUS, 'env': {'GLOO_SOCKET_IFNAME': 'hsn', 'NCCL_SOCKET_IFNAME': '=hsn0,eth0'}},
    # gloo takes whole names
    'interface-prefix': {'files': UP, 'env': {'GLOO_SOCKET_IFNAME': 'hsn', 'NCCL_SOCKET_IFNAME': 'hsn'}},
    'nccl-and-gloo': {'answer': {'others': [True, ['nid2']]}, 'env': {'SLURM_GPUS_ON_NODE': '4'}},
    'port-taken': {**ONE, 'answer': {'lost': 'address already in use'}},
    'master-of-another-job': {'nodes': ('localhost', 'nid2'), 'env': {'MASTER_ADDR': '192.0.2.1'}},
    'master-port': {'ranks': {5: {'MASTER_PORT': '29500'}}},
    # perhaps it is the same node
    'master-addr': {'ranks': {5: {'MASTER_ADDR': 'localhost'}}},
    'clock': {'clocks': {1: lambda: time.time() + 100}},
    'cores-shared': {'cpus': lambda local_rank: str(local_rank // 2)},
    'cores-not-bound': {'cpus': lambda local_rank: '0-15'},
    'cores-few': {'cpus': lambda local_rank: '0-1', 'files': {'sys/devices/system/cpu/online': '0-1'}},
    # with a chip of the board that has the lower PCI address, and a number that is none
    'gpus': {**GPUS, 'files': {**pci(0, '0x1002', '0x030000'), **gpu_files(4)},
             'env': {'SLURM_GPUS_ON_NODE': '(null)'}},
    'gpus-partitions': {
        'ranks': {rank: {'ROCR_VISIBLE_DEVICES': rank % 4 + 2} for rank in EIGHT},
        # the first one is the processor
        'files': {**pci(1, '0x1002', '0x120000'), 'dev/kfd': '', **{
            f'{KFD}/{number}/properties': 'cpu_cores_count 0\nsimd_count %d\n' % (number and 160)
            for number in range(7)}}},
    'gpus-far-and-none': {
        **GPUS, 'ranks': {**visible(lambda local_rank: 3 - local_rank), 7: {'CUDA_VISIBLE_DEVICES': 9}}},
    # of a container: perhaps none is wanted, some are, none is
    'gpus-hidden': {'files': HIDDEN},
    'gpus-hidden-asked': {'files': HIDDEN, 'env': {'SLURM_GPUS_ON_NODE': 4}},
    'gpus-hidden-unwanted': {'files': HIDDEN, 'env': {'SLURM_GPUS_ON_NODE': 4, 'CUDA_VISIBLE_DEVICES': ''}},
}


@pytest.mark.parametrize('what', JOBS)
def test_what_is_said_of_a_job(job, tmp_path, what):
    for name, value in JOBS[what].items():
        if name in ('env', 'ranks', 'files', 'torch'):
            getattr(job, name).update(value)
        else:
            setattr(job, name, value)
    statuses, _, found = job.run()
    names = {level: ' '.join(sorted({entry['name'] for entry in found['findings'] if entry['level'] == level}))
             for level in ('good', 'untested')}
    ends = [f'{status} of {findings.ranks_text([rank for rank in statuses if statuses[rank] == status])}'
            for status in sorted(set(statuses.values()))]
    lines = [f'{", ".join(ends)}; good: {names["good"]}; untested: {names["untested"]}']
    lines += ['{level} {name}: {text} -> {remedy} '.format(**entry) + findings.ranks_text(entry['ranks'])
              for entry in found['findings'] if entry['level'] not in names]
    expected('\n'.join(lines) + '\n', f'check-jobs/{what}', [(job.port, 'PORT'), (tmp_path, 'TMP')])


# --- planted faults: the environment


def check_variables(env, paths=(), with_gpu=False, plugins=()):
    report = findings.Report(0)
    for name, value in env.items():
        report.fact('env ' + name, value)
    variables.check(report, variables.read_table(), list(paths), list(plugins), with_gpu)
    return report.sorted()


ASKED = 'const char *a[] = {"NCCL_DEBUG", "NCCL_IB_TC", "NCCL_IB_HCA"};'
NEW = 'const char *a[] = {"NCCL_DEBUG", "NCCL_BRAND_NEW", "NCCL_IB_TC"};'
# of the sections, only those with constants count; the end of another name is no name, that of a message may be one
ENDS = 'const char *a[] = {"NCCL_DEBUG", "OFI_NCCL_PROTOCOL", "no NCCL_NEW"}; char b[] = " NCCL_PROTOCOL";'
PLUGIN = 'const char *a[] = {"OFI_NCCL_PROTOCOL", "OFI_NCCL_NEW"};'


@pytest.mark.parametrize('code, name, level, meant', [
    # only one wrong letter is red, and only if the library was asked
    (ASKED, 'NCCL_IB_TCC', 'red', 'NCCL_IB_TC'), ('', 'NCCL_IB_TCC', 'yellow', 'NCCL_IB_TC'),
    (ASKED, 'NCCL_I_HCA', 'red', 'NCCL_IB_HCA'), ('', 'NCCL_I_HCA', 'yellow', 'NCCL_IB_HCA'),
    (ASKED, 'NCCL_IB_HCB', 'red', 'NCCL_IB_HCA'), (ASKED, 'NCCL_IB_HAC', 'red', 'NCCL_IB_HCA'),
    (ASKED, 'NCCL_IB_TTCC', 'yellow', 'NCCL_IB_TC'), ('', 'NCCL_IB_TTCC', None, ''),
    (ASKED, 'NCCL_DE_BUGS', 'yellow', 'NCCL_DEBUG'),
    (ASKED, 'NCCL_TOMORROW', 'yellow', ''), ('', 'NCCL_TOMORROW', None, ''),
    (ASKED, 'NCCL_GDR_LEVEL', 'yellow', 'NCCL_NET_GDR_LEVEL'), ('', 'NCCL_GDR_LEVEL', None, ''),
    (NEW, 'NCCL_BRAND_NEW', None, ''), (NEW, 'NCCL_IB_TC', None, ''),
    # a name that the library has and the table has not is meant
    (NEW, 'NCCL_BRAND_NEWS', 'red', 'NCCL_BRAND_NEW'),
    (ENDS, 'NCCL_PROTOCOL', 'yellow', 'NCCL_PROTO'), (ENDS, 'NCCL_NEW', None, ''),
    (PLUGIN, 'OFI_NCCL_PROTOCL', 'red', 'OFI_NCCL_PROTOCOL'), (PLUGIN, 'OFI_NCCL_NEW', None, ''),
])
def test_names_are_looked_for_in_the_library(tmp_path, code, name, level, meant):
    paths = [library(tmp_path / 'libnccl.so.2', code)] if code else []
    found = check_variables({name: '1'}, paths, plugins=paths * (code == PLUGIN))
    assert [entry[:2] for entry in found] == [(level, 'variable')] * bool(level)
    for _, _, text, remedy, _ in found:
        assert text.startswith(f"{name} is not a variable that {paths[0] if paths else 'a known libnccl'} reads")
        assert text.partition('. Perhaps it should be ')[2] == meant == remedy.partition('or write ')[2]


def test_what_the_library_does_not_read_or_only_gpus_need(tmp_path):
    nccl = library(tmp_path / 'libnccl.so.2', NEW)
    assert [entry[:3] for entry in check_variables({'NCCL_NVLS_ENABLE': '1'}, [nccl])] == [
        ('yellow', 'variable', f'NCCL_NVLS_ENABLE is set, but {nccl} does not read it')]
    memhooks = {'FI_MR_CACHE_MONITOR': 'memhooks'}
    assert [entry[0] for entry in check_variables(memhooks, with_gpu=True)] == ['yellow']
    assert not check_variables(memhooks)


def test_the_example_of_the_page_is_what_is_said_of_its_variables(monkeypatch):
    monkeypatch.setenv('COLUMNS', '88')
    report = findings.Report(0)
    for entry in check_variables({'FI_CXI_RDV_PROTO': 'alt_read', 'NCCL_NET_GDR_LEVEL': 'PBH'}):
        report.add(*entry[:4])
    lines = textwrap.indent(report.text('').strip(), '    ')
    assert len(report.findings) == 2 and lines in (ROOT / 'docs/check.md').read_text()


@pytest.mark.parametrize('name, value', [
    ('libmine.so', 'libmine.so'), ('libnccl-net-b.so', 'a,b'), ('libnccl-net.so', None), ('libown.so', '%s/libown.so'),
])
def test_the_plugin_is_asked_before_a_name_is_unknown(tmp_path, name, value):
    library(tmp_path / name, 'const char *a = "NCCL_TOMORROW";')
    mapped = library(tmp_path / 'libnccl.so.2', ASKED)
    env = {'LD_LIBRARY_PATH': str(tmp_path),
           **({'NCCL_NET_PLUGIN': value.replace('%s', str(tmp_path))} if value else {})}
    machine = Machine(env, '/nowhere')
    files = nccl.plugin_files(machine)
    assert files == [str(tmp_path / name)]
    assert check_variables({'NCCL_TOMORROW': '1'}, [mapped])
    assert not check_variables({'NCCL_TOMORROW': '1'}, [mapped], plugins=files)
    assert not nccl.plugin_files(Machine({**env, 'NCCL_NET_PLUGIN': 'none'}, '/nowhere'))
    report = findings.Report(0)
    report.fact('env NCCL_TOMORROW', '1')
    report.fact('plugin', files[0])
    node.check_probe(report, {'maps': [mapped]}, machine)
    assert not [entry for entry in report.sorted() if entry[1] == 'variable']


KINDS = ['libnccl', 'librccl', 'libfabric', 'libcuda', 'libcudart', 'libamdhip64']


@pytest.mark.parametrize('kind, names', [
    ('MPI', ['libmpi_gnu_123.so.12', 'libmpi_cray.so.12', 'libmpi_nvidia.so.12', 'libmpi_amd.so.12',
             'libmpich_gnu_82.so.3', 'libmpi.so.12', 'libmpich.so.12']),
    # what goes with an MPI is none
    (None, ['libmpi_gtl_cuda.so', 'libmpi_cxx.so.40', 'libmpi_usempif08.so.40', 'libmpifort.so.12', 'libmpi_java.so.40',
            'libmpi_mpifh-gfortran.so.40', 'libmpi_usempi_ignore_tkr.so.40',
            *(kind + '.so/x' for kind in KINDS), *(kind + 'x.so' for kind in KINDS)]),
    *((kind, [kind + '.so.2']) for kind in KINDS),
])
def test_a_library_is_known_by_its_name(kind, names):
    assert {name: library_kind('/opt/cray/pe/lib64/' + name) for name in names} == dict.fromkeys(names, kind)


def test_no_site_has_a_value_that_is_wrong():
    for site in sites.load_all():
        for value in site.env:
            assert not check_variables({value.name: value.value}, with_gpu=True), (site.name, value.name)
            family = variables.family_of(value.name, variables.read_table())
            assert not family or value.name in family.known, "not in variables.cfg: " + value.name


# --- planted faults: the network


@pytest.mark.parametrize('env, several, level, says', [
    ({}, True, 'yellow', 'NCCL may use the management network'), ({}, False, None, ''),
    ({'NCCL_SOCKET_IFNAME': 'hsn'}, True, 'good', 'exists'), ({'NCCL_SOCKET_IFNAME': 'eth'}, False, 'good', 'exists'),
    ({'NCCL_SOCKET_IFNAME': 'eth1'}, False, 'yellow', 'eth1 is down on this node'),
    ({'NCCL_SOCKET_IFNAME': 'eth2,eth1'}, False, 'yellow', 'eth1, eth2 is down')])
def test_interfaces_that_are_down_or_not_named(job, env, several, level, says):
    job.files.update({**UP, 'sys/class/net/eth1/operstate': 'down', 'sys/class/net/eth2/operstate': 'down'})
    report = findings.Report(0)
    look.look_at_interfaces(Machine(env, job.root(0)), report, several)
    assert [(finding.level, says in finding.text) for finding in report.findings] == ([(level, True)] if level else [])


def test_master_addr_without_an_address():
    report = findings.Report(0)
    look.look_at_master(Machine({'MASTER_ADDR': 'no-such-host.invalid', 'RANK': '0'}), report)
    assert ['has no address on this node' in finding.text for finding in report.having('red', 'master')] == [True]


def test_which_variables_and_which_plugin_are_compared(job, tmp_path):
    (tmp_path / 'libnccl-net.so').write_text('')
    job.env.update(LD_LIBRARY_PATH=str(tmp_path), NCCL_ALGO='Ring', UCX_TLS='all')
    rank = rank_of(job)
    look.look(rank.machine, rank.report, None, True)
    assert rank.report.value('plugin') == f'{tmp_path}/libnccl-net.so'
    assert {name for name in rank.report.facts if name.startswith('env ')} == {'env LD_LIBRARY_PATH', 'env NCCL_ALGO'}


def test_the_port_of_torchruns_agent(job):
    with socket.create_server(('', job.port)):
        job.per_node, job.nodes = 1, ['nid1']
        job.env.update(TORCHELASTIC_USE_AGENT_STORE='True', TORCHELASTIC_RUN_ID='1')
        _, _, found = job.run()
    assert not red(found) and found['ranks'] == [0]


def test_a_node_that_does_not_come_says_what_may_be_why(job, capsys):
    rank = check.Rank(Machine(job.environ(4)), None, NoTorch, [])
    rank.report.add('red', 'master', 'the red one')
    rank.report.add('yellow', 'world-size', "another job's number")
    rank.report.add('yellow', 'cores', 'what has nothing to do with it')
    with pytest.raises(gather.PeerLost, match='cannot reach rank 0.*no route'):
        check.deliver(rank, None, {'lost': 'no route'})
    said = capsys.readouterr().err
    assert 'the red one' in said and "world-size: another job's number" in said and 'nothing to do' not in said


def rank_of(job, number=0, **nodes):
    """A rank of the job; node_1={...}: what that node said at first."""
    rank = check.Rank(Machine(job.environ(number), job.root(number)), None, NoTorch, [])
    rank.nodes = {int(name[5:]): said for name, said in nodes.items()}
    return rank


@pytest.mark.parametrize('text, says', [('DataLoader(data, num_workers=2)', True), ('DataLoader(data)', False)])
def test_what_the_program_does_decides_how_much_of_dev_shm_it_needs(job, tmp_path, monkeypatch, text, says):
    (tmp_path / 'train.py').write_text(text)
    rank = rank_of(job)
    rank.words = [str(tmp_path / 'train.py')]
    monkeypatch.setattr(limits, 'free_in', lambda place: limits.LARGE_FILE - 1)
    (pathlib.Path(job.root(0)) / 'dev/shm').mkdir(parents=True, exist_ok=True)
    rank.look()
    assert bool(rank.report.having('yellow', 'shm')) == says


def test_a_node_that_answered_and_then_no_longer_is_named(job):
    rank = rank_of(job, node_1=COMES)
    rank.report.ranks = 15
    check.check_answers(rank)
    [finding] = rank.report.having('red', 'no-answer')
    assert finding.text == 'no answer from ranks 4-7 of 8. nid2 answered at first, then no longer'


@pytest.mark.parametrize('imported', [True, False])
def test_who_waits_for_a_node_that_is_still_importing_has_nothing_red(job, imported):
    rank = rank_of(job)
    rank.report.ranks = 255
    rank.report.add('red', 'rendezvous', 'it did not end')
    if not imported:
        rank.report.add('yellow', 'import', 'import torch did not end', '', 16)
    check.check_job(rank)
    assert [finding.level for finding in rank.report.having(name='rendezvous')] == ['red' if imported else 'yellow']


@pytest.mark.parametrize('answer, said, says', [
    (gather.PeerLost('gone'), COMES, "reports did not arrive: gone"),
    ({1: {}}, COMES, 'nid2 sent a message that this version does not know, or has ranks of another node'),
    ({1: findings.Report(0).dump()}, COMES, 'nid2 sent a message'), ({}, None, 'a node of unknown name sent a message'),
    ({1: findings.Report(4).dump()}, COMES, ''),
])
def test_reports_that_do_not_come_or_are_none(job, answer, said, says):
    rank = rank_of(job, node_1=said)
    ask = raising(answer) if isinstance(answer, Exception) else lambda *_: answer
    check.collect(rank, types.SimpleNamespace(ask=ask, found={}))
    assert [says in finding.text for finding in rank.report.having('red')] == [True] * bool(says)
    assert rank.report.ranks == (1 if says else 17)


@pytest.mark.parametrize('answer, level, name, says', [
    ((True, 'ValueError: odd'), 'untested', 'script', '() ended early: ValueError: odd'),
    ((False, ''), 'yellow', 'disk', 'a file system did not answer within 5 s'),
])
def test_what_hangs_or_fails_on_a_node_hides_nothing_else(job, monkeypatch, answer, level, name, says):
    monkeypatch.setattr(check.limits, 'in_time', lambda *_: answer)
    monkeypatch.setattr(limits, 'WAIT', 5)
    rank = rank_of(job)
    assert rank.look()['words'] == [] and rank.report.having('good', 'master')
    assert all(says in finding.text for finding in rank.report.having(level, name)) and rank.report.having(level, name)


def test_nodes_without_pytorch_cannot_meet(job):
    rank = rank_of(job)
    assert check.meet_nodes(rank, None) == {}
    assert 'this Python has no PyTorch, but the nodes meet' in rank.report.having('red', 'import')[0].text


@pytest.mark.parametrize('looked_up, slow', [([0.99], False), ([1.0], True), ([], True)])
def test_a_slow_name_server_is_named(job, looked_up, slow):
    rank, details = rank_of(job), {'gpus': None, 'cpus': [0], 'online': [0]}
    rank.looked_up = looked_up
    check.finish_node(rank, types.SimpleNamespace(look=lambda: True, reports={}), {}, details)
    said = [finding for finding in rank.report.having('yellow') if 'to look up the name of an address' in finding.text]
    assert len(said) == slow


# --- planted faults: ranks


def test_nodes_and_ranks_of_the_own_node_are_waited_for_at_the_same_time(job):
    # as with RANK=0 for all: the ranks with other numbers end in the runscript
    job.env['SLINGTORCH_CHECK_SECONDS'] = '3'
    job.left_out = {1, 4, 5, 6, 7}
    _, _, found = job.run()
    assert only(found, 'no-answer')[1] == [1, 4, 5, 6, 7] and found['seconds'] < 8


def test_the_first_rank_of_a_node_dies(job):
    job.machine = type('Dies4', (Machine,), {'list': lambda self, name: os._exit(9) if (
        name == 'sys/class/net' and self.environ['RANK'] == '4') else Machine.list(self, name)})
    job.env['SLINGTORCH_CHECK_SECONDS'] = 2
    statuses, text, found = job.run()
    assert only(found, 'no-answer')[1] == [4, 5, 6, 7] and statuses[5] == 1
    assert 'socket' in (job.dir / 'out-5').read_text() or 'lost' in (job.dir / 'out-5').read_text()


@pytest.mark.parametrize('vendor, kind, counts', [
    ('0x10de', '0x030000', True), ('0x10de', '0x030200', True), ('0x1002', '0x038000', True),
    ('0x1002', '0x120000', True), ('0x1002', '0x030000', False), ('0x1a03', '0x030000', False),
    ('0x10de', '0x040300', False),
])
def test_which_devices_are_gpus(job, vendor, kind, counts):
    job.files.update(pci(1, vendor, kind))
    kinds = {'0x10de': 'cuda', '0x1002': 'rocm'}
    assert [entry[2] for entry in Machine({}, job.root(0)).gpus()] == [kinds.get(vendor)] * counts


@pytest.mark.parametrize('kfd, parts, sees', [(False, 2, []), (True, 1, ['0000:01:00.0']),
                                              (True, 2, ['partition 0', 'partition 1'])])
def test_an_accelerator_of_amd_is_seen_through_its_driver(job, kfd, parts, sees):
    job.files.update({**pci(1, '0x1002', '0x120000'), **({'dev/kfd': ''} if kfd else {})})
    job.files.update({'%s/%d/properties' % (KFD, number): 'simd_count 160\n' for number in range(parts)})
    machine = Machine({}, job.root(0))
    assert look.visible_gpus(machine, machine.gpus()) == sees


@pytest.mark.parametrize('listed, sees, level', [
    ('GPU-1111', ['GPU-1111'], ''), ('MIG-a,MIG-b', ['MIG-a'], ''), ('void', [], 'yellow'), ('-1', [], 'yellow'),
    ('NoDevFiles', [], 'yellow'), ('9', [], 'red'), ('10', [], 'red'), ('0.1', ['0.1'], ''),
])
def test_identifiers_of_gpus(job, listed, sees, level):
    """A process sees one slice; a word for none is somebody's wish."""
    job.files.update(gpu_files(4))
    machine, report, details = Machine({'CUDA_VISIBLE_DEVICES': listed}, job.root(0)), findings.Report(0), {}
    look.look_at_gpus(machine, report, details)
    assert details['gpus'] == sees
    said = [(finding.level, f'(CUDA_VISIBLE_DEVICES={listed})' in finding.text) for finding in report.findings]
    assert said == ([(level, True)] if level else [])


# --- planted faults: caches and packages


def test_caches(tmp_path):
    def said(root='/nowhere', **env):
        report = findings.Report(0)
        look.look_at_caches(Machine({name: str(path) for name, path in env.items()}, str(root)), report, {})
        return [f'{level}: {text}'.replace(str(tmp_path), 'TMP') for level, _, text, _, _ in report.sorted()]

    for name in ('own', 'open'):
        (tmp_path / name).mkdir()
    (tmp_path / 'open').chmod(0o777)
    assert said(TRITON_CACHE_DIR=tmp_path / 'open') == [
        'yellow: TRITON_CACHE_DIR=TMP/open is writable by others (mode 777), who could put code there']
    # it will be made there
    assert [text[:4] for text in said(TRITON_CACHE_DIR=tmp_path / 'open/new')] == ['good']
    other = '/usr'
    if os.geteuid() == 0:
        other = tmp_path / 'others'
        other.mkdir()
        os.chown(other, 65534, 65534)
    assert re.match(r'yellow: TRITON_CACHE_DIR=\S+ belongs to user id \d+$', said(TRITON_CACHE_DIR=other)[0])
    (tmp_path / 'proc/self').mkdir(parents=True)
    (tmp_path / 'proc/self/mounts').write_text('disk / ext4 rw 0 0\n10.0.0.1@o2ib:/fs %s lustre rw 0 0\n' % tmp_path)
    assert said(tmp_path, MIOPEN_USER_DB_PATH=tmp_path / 'own', TRITON_CACHE_DIR=tmp_path / 'own/new') == [
        f'yellow: {name} is on a parallel or network file system (TMP, lustre), whose locks do not work for a database '
        'and which all ranks access for every compiled kernel'
        for name in ('MIOPEN_USER_DB_PATH=TMP/own', 'TRITON_CACHE_DIR=TMP/own/new')]


def torch_of(directory, version, cuda="'12.4'"):
    """A torch package that says its release."""
    package = directory / 'torch'
    package.mkdir(parents=True)
    (package / 'version.py').write_text("__version__ = '%s'\ncuda: str = %s\nhip: str = None\n" % (version, cuda))
    return str(package)


def test_mixed_torch_versions(job, tmp_path):
    old, new = torch_of(tmp_path / 'old', '2.3.1'), torch_of(tmp_path / 'new', '2.4.0')
    job.torch = {rank: old if rank == 6 else new for rank in EIGHT}
    _, _, found = job.run()
    assert 'torch differs: 2.4.0 on ranks 0-5,7; 2.3.1 on rank 6' in dict(named(found, 'versions', 'yellow'))
    assert not red(found)
    job.torch[6] = None
    assert only(job.run()[2], 'versions')[0] == 'torch differs: 2.4.0 on ranks 0-5,7; none on rank 6'


def test_torch_of_the_home_directory(tmp_path):
    report = findings.Report(0)
    home = tmp_path / '.local/lib'
    look.look_at_torch(Machine({}), report, torch_of(home, '2.4.0'), str(home))
    [(level, name, text, remedy, _)] = report.sorted()
    assert (level, name) == ('yellow', 'torch') and 'home directory' in text and 'PYTHONNOUSERSITE' in remedy


def library(path, code, *options):
    """A library of this C code."""
    path.parent.mkdir(exist_ok=True)
    command = ['gcc', '-shared', '-fPIC', '-o', path, '-x', 'c', '-', '-x', 'none', *options]
    subprocess.run(command, input=code, text=True, check=True)
    return str(path)


NCCL = 'const char *a[] = {"NCCL_DEBUG", %s};' % ', '.join('"ncclNetPlugin_v%d"' % number for number in range(6, 11))


@pytest.mark.parametrize('symbols, runtime, level, says', [
    ((4, 5), '12', 'yellow', 'has the interfaces v4 to v5, but %s loads only v6 to v10'),
    ((9, 10), '11', 'yellow', 'needs libcudart.so.11, but torch is for libcudart 12'),
    ((9, 10), '12', 'good', 'has an interface that %s loads'),
    ((), '12', 'yellow', 'is not a network plugin: it has no ncclNetPlugin_v*'),
])
def test_plugin_of_another_major(tmp_path, symbols, runtime, level, says):
    cudart = library(tmp_path / 'libcudart.so', 'int cudart;', '-Wl,-soname,libcudart.so.' + runtime)
    plugin = library(tmp_path / 'libnccl-net.so', ''.join('int ncclNetPlugin_v%d;' % api for api in symbols) +
                     'extern int cudart; int *use = &cudart;', cudart)
    nccl = library(tmp_path / 'libnccl.so.2', NCCL)
    report = findings.Report(0)
    report.fact('CUDA of torch', '12.4')
    values.check_plugin(report, plugin, [nccl])
    assert report.sorted()[0][0] == level
    assert says.replace('%s', nccl) in report.sorted()[0][2]


MISSING = "yellow plugin: NCCL's network plugin is missing: no "
NONE = "libnccl-net.so in LD_LIBRARY_PATH or the system's directories"
LOG = {'network': 'Socket', 'plugin': 'Plugin load returned 0 : libcudart.so.11.0: cannot open shared object file'}
SLINGSHOT = {'sys/class/net/hsn0/operstate': 'up', **gpu_files(1)}
NCCL_IS_THERE = {'maps': ['/a/libnccl.so.2']}


@pytest.mark.parametrize('says, answer, env, files', [
    ([MISSING + NONE], {}, {'NCCL_NET': 'AWS Libfabric'}, {}), ([], {}, {'NCCL_NET': 'socket'}, {}), ([], {}, {}, {}),
    ([MISSING + '/nowhere/x.so ('], {}, {'NCCL_NET_PLUGIN': '/nowhere/x.so'}, {}),
    ([], {}, {'NCCL_NET': 'ib', 'NCCL_NET_PLUGIN': 'none'}, {}),
    ([MISSING + NONE], NCCL_IS_THERE, {}, SLINGSHOT),
    *(([f'{level} gpus: PyTorch sees no GPU, although this rank has one. CUDA unknown error'],
       {'sees': False, 'warned': 'CUDA unknown error', **NCCL_IS_THERE}, env, gpu_files(1))
      for level, env in (('red', {'SLURM_GPUS_ON_NODE': '1'}), ('yellow', {}))),
    ([], {'sees': False, 'warned': ''}, {}, {}), ([], {'sees': True, **NCCL_IS_THERE}, {}, gpu_files(1)),
    # NCCL's own word
    (['good network: NCCL runs over AWS Libfabric'], {**NCCL_IS_THERE, 'network': 'AWS Libfabric'}, {}, SLINGSHOT),
    # most clusters need no plugin, and NCCL logs that it found none
    (['good network: NCCL runs over sockets (TCP)'], LOG, {}, {}),
    (['yellow network: NCCL runs over sockets (TCP)'], LOG, {}, {'sys/class/infiniband/mlx5_0/node_type': ''}),
    (['yellow network: NCCL runs', MISSING], LOG, {'NCCL_NET': 'AWS Libfabric'}, {}),
    (['yellow network: NCCL runs', 'yellow plugin: NCCL did not load the plugin: Plugin load returned 0'], LOG, {},
     {'plugin': ''}),
    (['red network: NCCL runs over sockets (TCP)'], {'network': 'Socket'}, {}, {'sys/class/net/hsn0/operstate': 'up'}),
    (["good network: NCCL runs over AWS Libfabric, libfabric's provider cxi"],
     {'network': 'AWS Libfabric', 'provider': 'cxi'}, {}, {}),
    (['yellow libraries: one process has loaded 2 MPI: /a/libmpi.so.40 and /b/libmpich.so.12',
      'yellow libraries: one process has loaded 2 libnccl: /a/libnccl.so.2 and /b/libnccl.so.2'],
     {'maps': ['/a/libnccl.so.2', '/b/libnccl.so.2', '/a/libmpi.so.40', '/b/libmpich.so.12']}, {}, {}),
    (['yellow libraries: MPICH_GPU_SUPPORT_ENABLED=1, but the process maps Cray MPICH without its GPU library'],
     {'maps': ['/opt/cray/pe/lib64/libmpi_gnu_123.so.12', '/lib64/libcxi.so.1']},
     {'MPICH_GPU_SUPPORT_ENABLED': '1'}, {}),
    ([], {'maps': ['/x/cray/libmpi_gnu_123.so.12', '/x/libmpi_gtl_cuda.so']}, {'MPICH_GPU_SUPPORT_ENABLED': '1'}, {}),
    (['yellow network: the shortest round trip', 'good collective: an all_reduce of gloo'],
     {'told': {'sent': 1000, 'resent': 0, 'trip': 0.009, 'seconds': 0.01}, 'facts': {'backend': 'gloo'}}, {}, {}),
    # each with a line on what to do
    *(([f'red {phase}: it failed: no'], {'error': 'it failed: no', 'phase': phase}, {}, {})
      for phase in ('import', 'rendezvous', 'collective')),
])
def test_what_is_said_of_the_process_with_pytorch(job, says, answer, env, files):
    job.files.update(files)
    report = findings.Report(0)
    if 'plugin' in files:
        report.fact('plugin', '/opt/libnccl-net.so')
    node.check_probe(report, {'facts': {}, 'phase': 'collective', **answer}, Machine(env, job.root(0)))
    found = [f'{level} {name}: {text}' for level, name, text, _, _ in report.sorted()
             if (level, name) != ('good', 'libraries')]
    assert [text[:len(begin)] for text, begin in zip(found, says)] == says and len(found) == len(says)


@pytest.mark.parametrize('strings, env, ranks, text, level', [
    ('Duplicate GPU detected : rank %d and rank %d', {}, 2, '2 ranks of the node share one GPU', 'red'),
    ('Multiple Ranks are using the same GPU/Partition.', {}, 2, '2 ranks of the node share one GPU', 'red'),
    ('Multiple Ranks are using the same GPU/Partition.', {'NCCL_MULTI_RANK_GPU_ENABLE': '1'}, 2,
     '2 ranks of the node share one GPU', 'yellow'),
    ('', {}, 2, '2 ranks of the node share one GPU', 'yellow'),
    ('', {}, 3, '3 ranks of the node share 2 GPUs', 'yellow'),
])
def test_ranks_that_share_gpus(tmp_path, strings, env, ranks, text, level):
    nccl = library(tmp_path / 'libnccl.so.2', 'const char *a = "%s";' % strings)
    report, gpus = findings.Report(0), list('ab'[:ranks - 1])
    details = [{'rank': rank, 'gpus': gpus, 'near': {}, 'cpus': [0]} for rank in range(ranks)]
    node.check_gpus(report, details, [nccl], env)
    assert [(*finding[:3], mask) for finding, mask in report.findings.items()] == [
        (level, 'gpus', text, (1 << ranks) - 1)]


# --- the process with PyTorch


@pytest.mark.parametrize('code, says', [
    ('raise ImportError("libmkl.so is missing")', 'import torch failed: ImportError: libmkl.so is missing (in /'),
    ('import os, signal; os.kill(os.getpid(), signal.SIGKILL)', 'import torch ended the process with status -9'),
    ('import select; select.select([], [], [])', 'import torch did not end within 1 s'),
])
def test_an_import_that_goes_wrong_is_a_finding(tmp_path, monkeypatch, code, says):
    (tmp_path / 'torch.py').write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    late = 'did not end' in says
    seconds = 1 if late else 60
    result = check.Probe(Machine({}), seconds, []).result(time.monotonic() + seconds)
    assert says in result['error'] and result['phase'] == 'import'
    assert result.get('level') == ('yellow' if late else None)


@pytest.mark.parametrize('said, error', [
    ({'phase': 'import', 'imported': 1}, None),     # it waits for a node that is still importing
    ({'phase': 'import'}, 'import torch did not end within 0 s'),
    ({'phase': 'rendezvous', 'imported': 1}, 'the rendezvous did not end within 0 s'),
])
def test_only_a_process_that_waits_for_others_may_last(monkeypatch, said, error):
    def run(pipe, *_):
        pipe.send({**said, 'over here': True})
        pipe.send({'answer': pipe.recv()})
        pipe.recv()

    monkeypatch.setattr(probe, 'run', run)
    one = check.Probe(Machine({}), 60, [])
    assert one.wait('over here', time.monotonic() + 60) and one.ask('answer', 60, 'word') == ('word', 60)
    assert one.result(time.monotonic()).get('error') == error


def test_what_the_launcher_left_open_is_not_the_childs():
    """Such as PMI_FD of mpiexec: an MPI that an import starts would answer for the rank."""
    left, mine = os.pipe()
    os.set_inheritable(left, True)

    def look_there(pipe):
        pipe.send([os.readlink('/proc/self/fd/%d' % number) for number in (left, mine)])

    child = messages.Child(look_there)
    there, own = child.hear(time.monotonic() + 60)
    assert there == '/dev/null' and own.startswith('pipe:')
    child.end()
    os.close(left)
    os.close(mine)


def test_a_library_that_writes_where_messages_come_stops_nobody():
    def write(pipe):
        os.write(pipe.fileno(), b'cmd=init pmi_version=1')
        pipe.recv()

    child, begin = messages.Child(write), time.monotonic()
    assert child.hear(begin + 1) is None and time.monotonic() - begin < 60
    assert child.end() == '-9'


def test_a_process_that_dies_after_it_has_met_others_can_no_longer_be_asked(monkeypatch):
    def run(pipe, *_):
        pipe.send({'met': True, 'imported': 1, 'phase': 'collective'})
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(probe, 'run', run)
    one = check.Probe(Machine({}), 60, [])
    found = one.result(time.monotonic() + 60)
    assert found['met'] and found['error'] == 'an all_reduce ended the process with status -9'
    with pytest.raises(gather.PeerLost, match='the process with PyTorch has ended'):
        one.ask('word', 600, {})


def test_a_child_that_is_no_longer_wanted_leaves_nothing_open(tmp_path):
    before = os.listdir('/proc/self/fd')
    child = messages.Child(lambda pipe: pipe.recv())
    assert len(os.listdir('/proc/self/fd')) > len(before) and child.end() == '-9' == child.end()
    assert child.ended() and child.hear(time.monotonic() + 600) is None
    child.tell('a word')
    assert os.listdir('/proc/self/fd') == before


def talks(pipe):
    os.write(1, b'out')
    os.write(2, ('x' * 999).encode())
    assert not os.read(0, 9)


def leaves_a_child(pipe):
    if os.fork():
        pipe.send('a word')
        os.write(2, b'the reason')
        os._exit(7)
    time.sleep(600)


@pytest.mark.parametrize('function, room, hears, says', [
    (lambda pipe: 1 // 0, True, None, '1: ZeroDivisionError: integer division or modulo by zero'),
    (lambda pipe: 1 // 0, False, None, '1'), (talks, True, None, '117: ' + 'x' * 600),
    (leaves_a_child, True, 'a word', '7: the reason'),
])
def test_what_a_child_says_in_the_end(monkeypatch, capfd, function, room, hears, says):
    if not room:
        monkeypatch.setattr(messages.tempfile, 'TemporaryFile', raising(FileNotFoundError('No usable directory')))
        assert messages.scratch_file() is None
    child = messages.Child(function)
    assert child.hear(time.monotonic() + 60) == hears and (not hears or child.hear(time.monotonic() + 600) is None)
    assert messages.until(child.ended, time.monotonic() + 60) and child.end() == says
    assert capfd.readouterr() == ('', '')


def test_a_child_that_a_driver_holds_is_not_waited_for(monkeypatch):
    child = messages.Child(lambda pipe: pipe.recv())
    with monkeypatch.context() as held:
        held.setattr(messages, 'until', lambda *_: False)
        assert child.end() == 'unknown'
    assert child.end() == '-9'


# --- vetting


@pytest.mark.parametrize('nodes', [2, 3, 8, 11])
def test_every_pair_meets_once(nodes):
    rounds = [pairs.pairs_of(turn, nodes) for turn in range(nodes - 1 + nodes % 2)]
    assert all(len(set(sum(met, []))) == 2 * len(met) for met in rounds)
    assert sorted(sum(rounds, [])) == [[one, other] for one in range(nodes) for other in range(one + 1, nodes)]


# --- data, and others' data


WHOLE = '{"ranks": "%s", "findings": [["%s", "%s", "", "", "%s"]], "facts": %s}'


@pytest.mark.parametrize('data', [
    b'', b'x', b'{}', b'[1]', b'\xff\xfe\x00', b'{"ranks": "1"', b'[' * 100000, b'{"a":' * 50000,
    b'{"ranks": ' + b'9' * 1000 + b'}', b'{"ranks": NaN}', b'{"ranks": 1e999}', b' ' * (messages.MOST + 1),
    *((WHOLE % words).encode() for words in [
        ('1', 'blue', 'cores', '1', '{}'), ('1', 'red', 'of its own', '1', '{}'), ('10', 'red', 'cores', '1', '{}'),
        ('1', 'red', 'cores', 'f' * 5000, '{}'), ('1', 'red', 'cores', '10', '{}'), ('1', 'red', 'cores', '1', '[]'),
        ('1', 'red', 'cores', '1', '{"a": "b"}'), ('1', 'red', 'cores', '1', '{"a": {"b": 1}}'),
        ('1', 'red', 'cores', 'x', '{}')])])
def test_what_is_no_report_is_refused(data):
    with pytest.raises(ValueError):
        findings.Report.load(messages.load(data), 0b1111)


def test_a_report_may_speak_of_its_own_ranks():
    report = findings.Report.load(json.loads(WHOLE % ('3', 'red', 'cores', '2', '{"a": {"b": "1"}}')), 0b1111)
    assert report.ranks == 3 and list(report.findings.values()) == [2] and report.facts['a'] == {'b': 1}


def test_no_text_is_endless():
    report = findings.Report(0)
    report.add('red', 'cores', 'x' * 9999, 'y' * 9999)
    report.fact('long', 'z' * 9999)
    assert [(len(entry.text), len(entry.remedy)) for entry in report.findings] == [(2000, 2000)]
    assert [len(value) for value in report.facts['long']] == [2000]
    report.facts['huge'] = {str(number) * 2000: 1 for number in range(99)}
    assert list(report.dump()['facts']) == ['long']     # a message has an end, too


def test_a_node_without_gpus_says_what_asks_for_some():
    for number, env in enumerate([{}, {'CUDA_VISIBLE_DEVICES': '0', 'HIP_VISIBLE_DEVICES': '1'}]):
        report = findings.Report(0)
        look.look_at_gpus(Machine(env, '/nowhere'), report, {})
        assert [finding.text for finding in report.findings] == ['no GPU on the node' + number * (
            ', although CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES is set')]


def test_ranks_are_listed_up_to_eight_groups():
    assert findings.ranks_text(range(0, 16, 2)) == 'ranks 0,2,4,6,8,10,12,14' and findings.ranks_text([3]) == 'rank 3'
    assert findings.ranks_text(range(0, 18, 2)) == 'ranks 0,2,4,6,8,10,12,14,... (9 ranks)'


def test_text_of_others_cannot_steer_the_terminal():
    report = findings.Report(0)
    report.add('red', 'x', 'a\x1b[2Jb\nc', 'd', ranks=0)
    assert report.text('h') == 'h\nRED        x            a [2Jb c\n' + ' ' * 24 + '-> d\n'


def test_a_report_of_4096_ranks_stays_small():
    whole = findings.Report()
    for rank in range(4096):
        report = findings.Report(rank)
        for number in range(40):
            report.add('yellow', 'cores', 'finding %d of local rank %d' % (number, rank % 8))
        whole.merge(report)
    assert len(whole.findings) == 320 and len(messages.dump(whole.dump())) < 400000
    assert findings.ranks_text(whole.sorted()[0][4]) == 'ranks 0,8,16,24,32,40,48,56,... (512 ranks)'


def test_elf_refuses_what_it_cannot_read(tmp_path):
    sound = library(tmp_path / 'sound.so', 'int one; extern int other; int *use = &other;')
    assert [one.path for one in elf.readable([str(tmp_path / 'missing'), __file__, sound])] == [sound]
    assert 'one' in elf.Library(sound).exported() and 'other' not in elf.Library(sound).exported()
    for data in (b'', b'\x7fELF' + b'\1' * 100, b'\x7fELF\x02\x01' + b'\xff' * 100):
        (tmp_path / 'x').write_bytes(data)
        with pytest.raises(ValueError):
            elf.Library(tmp_path / 'x')


@pytest.mark.parametrize('text, hosts', [
    ('nid[001-003,7],a1', ['nid001', 'nid002', 'nid003', 'nid7', 'a1']), ('', []),
    ('r[1-2]n[01-02]', ['r1n01', 'r1n02', 'r2n01', 'r2n02']),
])
def test_lists_of_hosts(text, hosts):
    assert expand_hosts(text) == hosts


def test_without_the_runscript_it_says_what_to_type(monkeypatch, capsys):
    for name in gather.NEEDED:
        monkeypatch.delenv(name, raising=False)
    assert check.main([]) == 2
    assert 'conda-python-distributed' in capsys.readouterr().err


# --- the runscript


@pytest.mark.parametrize('before, says', [
    ('export PYTHONHOME=/nonexistent', "does not start with PYTHONHOME='/nonexistent'"),
    ('ulimit -f 0', 'ulimit -f is 0'),
])
@pytest.mark.parametrize('program', ['', '-V'])
def test_what_would_end_the_check_itself_is_said_by_the_runscript(tmp_path, before, says, program):
    (tmp_path / 'python').symlink_to(sys.executable)
    env = {'PATH': '%s:/usr/bin:/bin' % tmp_path, 'TMPDIR': str(tmp_path)}
    command = '%s; exec %s/runscripts/conda-python-distributed --check %s' % (before, ROOT, program)
    done = subprocess.run(['bash', '-c', command], text=True, stderr=subprocess.PIPE, env=env)
    assert done.returncode == 1 and says in done.stderr and done.stderr.count('\n') == 1


def test_no_training_starts_after_a_check_that_fails(tmp_path):
    python = tmp_path / 'python'
    python.write_text('#!/bin/bash\necho "$@"\n[[ $2/$3 != */lib/job/check ]]\n')
    python.chmod(0o755)
    for args in (['train.py', '--epochs', '1'], []):
        done = subprocess.run([ROOT / 'runscripts/conda-python-distributed', '--check', *args], text=True, check=False,
                              stdout=subprocess.PIPE, env={'PATH': f'{tmp_path}:/usr/bin:/bin', 'TMPDIR': str(tmp_path)})
        assert (done.returncode, done.stdout.count('\n')) == (1, 1)


@pytest.mark.parametrize('text', ['abc', 'nan', '1e400', '-1', '0', '99999999', '\u0663'])
def test_seconds_that_are_none(text):
    with pytest.raises(SystemExit, match='is not a number of seconds. Write a whole number'):
        check.seconds_to_wait({'SLINGTORCH_CHECK_SECONDS': text})
