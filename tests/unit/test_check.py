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

    def __init__(self, directory, said):
        self.dir, self.per_node, self.nodes, self.said = directory, 4, NODES, said
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
            'SLINGTORCH_JOB_DIR': self.dir,
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
        self.said |= {'{level} {name}: {text} -> {remedy}'.format(**entry) for entry in found['findings']}
        return statuses, (self.dir / 'out-0').read_text(), found


@pytest.fixture
def job(tmp_path, whole_findings, monkeypatch):
    monkeypatch.setenv('COLUMNS', '110')
    return Job(tmp_path, whole_findings)


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


def test_what_was_not_tested_is_said_and_is_not_good(job):
    job.per_node, job.nodes, job.torch[0] = 1, ['nid1'], None
    _, _, found = job.run()
    assert named(found, 'torch', 'untested') and named(found, 'gpus', 'untested')
    assert not named(found, 'gpus', 'good') and not named(found, 'collective', 'good')


def test_red_lines_come_first_and_every_rank_fails(job):
    job.env['GLOO_SOCKET_IFNAME'] = 'hsn'
    statuses, text, _ = job.run()
    assert statuses == dict.fromkeys(EIGHT, 1)
    levels = re.findall(r'^(RED|yellow|good|not tested) ', text, re.M)
    assert levels == sorted(levels, key=['RED', 'yellow', 'good', 'not tested'].index)


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


def test_a_node_that_does_not_answer_can_be_ignored(job):
    job.left_out = (4,)
    job.env.update(SLINGTORCH_CHECK_SECONDS='2', SLINGTORCH_CHECK_IGNORE='no-answer')
    statuses, text, found = job.run()
    assert {statuses[rank] for rank in range(4)} == {0}, text
    assert named(found, 'no-answer', 'ignored')[0][1] == [4, 5, 6, 7]


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


# --- planted faults: the environment


@pytest.mark.parametrize('name, value, finding, says', [
    ('FI_CXI_RDV_PROTO', 'alt_read', 'variable', 'FI_CXI_RDZV_PROTO'),
    ('NCCL_NET_GDR_LEVEL', 'PBH', 'value', "NCCL_NET_GDR_LEVEL='PBH' is not one of"),
    ('FI_CXI_DEFAULT_TX_SIZE', '131072', 'value', 'not between 16 and 16384'),
    ('NCCL_IB_TIMEOUT', 'ten', 'value', 'not a whole number'),
])
def test_variables_that_nobody_refuses_are_named_and_stop_nothing(job, name, value, finding, says):
    job.env[name] = value
    statuses, _, found = job.run()
    text, ranks = only(found, finding, 'yellow')
    assert says in text and ranks == EIGHT and set(statuses.values()) == {0}


def check_variables(env, paths=(), with_gpu=False, plugins=()):
    report = findings.Report(0)
    for name, value in env.items():
        report.fact('env ' + name, value)
    variables.check(report, variables.read_table(), list(paths), list(plugins), with_gpu)
    return report.sorted()


def test_the_library_present_is_asked_first(tmp_path):
    nccl = library(tmp_path / 'libnccl.so.2', 'const char *a[] = {"NCCL_DEBUG", "NCCL_BRAND_NEW", "NCCL_IB_TC"};')
    assert not check_variables({'NCCL_BRAND_NEW': '1', 'NCCL_IB_TC': '3'}, [nccl])
    [(level, name, text, _, _)] = check_variables({'NCCL_NVLS_ENABLE': '1'}, [nccl])
    assert (level, name) == ('yellow', 'variable') and text.endswith('libnccl.so.2 does not read it')
    # a name that the library has and the table has not is meant
    [(level, name, text, _, _)] = check_variables({'NCCL_BRAND_NEWS': '1'}, [nccl])
    assert (level, name) == ('red', 'variable') and text.endswith('Perhaps it should be NCCL_BRAND_NEW')


ASKED = 'const char *a[] = {"NCCL_DEBUG", "NCCL_IB_TC", "NCCL_IB_HCA"};'


@pytest.mark.parametrize('name, asked, unasked', [
    ('NCCL_IB_TCC', 'red', 'yellow'), ('NCCL_I_HCA', 'red', 'yellow'), ('NCCL_IB_HCB', 'red', 'yellow'),
    ('NCCL_IB_HAC', 'red', 'yellow'),                   # two neighbours swapped
    ('NCCL_IB_TTCC', 'yellow', None), ('NCCL_DE_BUGS', 'yellow', None), ('NCCL_TOMORROW', 'yellow', None),
    ('NCCL_GDR_LEVEL', 'yellow', None),
])
def test_only_one_wrong_letter_is_red_and_only_if_the_library_was_asked(tmp_path, name, asked, unasked):
    nccl = library(tmp_path / 'libnccl.so.2', ASKED)
    for paths, level in (([nccl], asked), ([], unasked)):
        found = check_variables({name: '1'}, paths)
        assert [entry[:2] for entry in found] == [(level, 'variable')] * bool(level)
        assert all(name in text and (nccl in text) == bool(paths) for _, _, text, _, _ in found)


def test_the_end_of_another_name_is_no_name_and_the_end_of_a_message_may_be_one(tmp_path):
    # of the sections, only those with constants count
    code = 'const char *a[] = {"NCCL_DEBUG", "OFI_NCCL_PROTOCOL", "no NCCL_NEW"}; char b[] = " NCCL_PROTOCOL";'
    nccl = library(tmp_path / 'libnccl.so.2', code)
    [(level, name, text, _, _)] = check_variables({'NCCL_PROTOCOL': 'RDMA', 'NCCL_NEW': '1'}, [nccl])
    assert (level, name) == ('yellow', 'variable') and text.startswith('NCCL_PROTOCOL is not a variable')


def test_the_example_of_the_page_is_what_is_said_of_its_variables(monkeypatch):
    monkeypatch.setenv('COLUMNS', '88')
    report = findings.Report(0)
    for entry in check_variables({'FI_CXI_RDV_PROTO': 'alt_read', 'NCCL_NET_GDR_LEVEL': 'PBH'}):
        report.add(*entry[:4])
    lines = textwrap.indent(report.text('').strip(), '    ')
    assert len(report.findings) == 2 and lines in (ROOT / 'docs/check.md').read_text()


def test_memhooks_is_said_with_gpus_alone():
    env = {'FI_MR_CACHE_MONITOR': 'memhooks'}
    assert [entry[0] for entry in check_variables(env, with_gpu=True)] == ['yellow']
    assert not check_variables(env)


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


def test_an_ofi_plugin_is_asked_for_its_own_names(tmp_path):
    plugin = library(tmp_path / 'libnccl-net.so', 'const char *a[] = {"OFI_NCCL_PROTOCOL", "OFI_NCCL_NEW"};')
    env = {'OFI_NCCL_NEW': '1', 'OFI_NCCL_PROTOCL': 'RDMA'}
    [(level, _, text, _, _)] = check_variables(env, plugins=[plugin])
    assert level == 'red' and text.endswith('libnccl-net.so reads. Perhaps it should be OFI_NCCL_PROTOCOL')


@pytest.mark.parametrize('name', ['libmpi_gnu_123.so.12', 'libmpi_cray.so.12', 'libmpi_nvidia.so.12',
                                  'libmpi_amd.so.12', 'libmpich_gnu_82.so.3', 'libmpi.so.12', 'libmpich.so.12'])
def test_an_mpi_is_known_by_its_name(name):
    assert library_kind('/opt/cray/pe/lib64/' + name) == 'MPI'


@pytest.mark.parametrize('kind', ['libnccl', 'librccl', 'libfabric', 'libcuda', 'libcudart', 'libamdhip64'])
def test_a_library_is_known_by_its_name(kind):
    assert (library_kind(f'/x/{kind}.so.2'), library_kind(f'/{kind}.so/x'), library_kind(f'/{kind}x.so')) == (kind, None, None)


@pytest.mark.parametrize('name', [
    'libmpi_gtl_cuda.so', 'libmpi_cxx.so.40', 'libmpi_usempif08.so.40', 'libmpifort.so.12', 'libmpi_java.so.40',
    'libmpi_mpifh-gfortran.so.40', 'libmpi_usempi_ignore_tkr.so.40',
])
def test_what_goes_with_an_mpi_is_no_mpi(name):
    assert library_kind('/lib/' + name) is None


@pytest.mark.parametrize('name, value, says', [
    ('hsa_tomorrow', '1', None), ('fi_provider', 'cxi', None), ('NCCL_DEBUG', 'INFO', None),
    ('NCCL_DEBUG', 'INFO ', "NCCL_DEBUG='INFO ' begins or ends with a space"),
    ('FI_CXI_ODP', '1 ', "FI_CXI_ODP='1 ' begins or ends with a space"),
    ('NCCL_IB_TC', '106 ', None), ('FI_CXI_RDZV_THRESHOLD', ' 16384 ', None),    # strtol(3) reads them
    ('NCCL_IB_TC', 'x ', 'is not a whole number'),
    ('NCCL_IB_TC', '', None),                           # ncclLoadParam: as if not set
    ('NCCL_SOCKET_FAMILY', '', "NCCL_SOCKET_FAMILY='' is empty"),
    ('FI_CXI_RDZV_THRESHOLD', '', 'is empty'),
    ('FI_CXI_ODP', '', "FI_CXI_ODP='' is empty"),
    ('RCCL_IB_QPS_PER_P2P', '', None),
])
def test_blanks_and_nothing(name, value, says):
    texts = [text for _, _, text, _, _ in check_variables({name: value})]
    assert len(texts) == bool(says) and all(says in text for text in texts)


def test_no_site_has_a_value_that_is_wrong():
    for site in sites.load_all():
        for value in site.env:
            assert not check_variables({value.name: value.value}, with_gpu=True), (site.name, value.name)
            family = variables.family_of(value.name, variables.read_table())
            assert not family or value.name in family.known, "not in variables.cfg: " + value.name


def test_ranks_with_another_environment_are_named(job):
    job.ranks[6] = {'NCCL_ALGO': 'Ring'}
    text, ranks = only(job.run()[2], 'variable', 'yellow')
    assert 'Ring on rank 6' in text and '(not set) on ranks 0-5,7' in text


# --- planted faults: the network


def with_gpus(job):
    """One GPU for each rank of the job."""
    job.files.update(gpu_files(4))
    job.ranks.update({rank: {'CUDA_VISIBLE_DEVICES': str(rank % 4)} for rank in EIGHT})


@pytest.mark.parametrize('value', ['hsn', 'eth0 ', '=eth'])
def test_wrong_interface_name(job, value):
    job.env['NCCL_SOCKET_IFNAME'] = value
    says = 'no interface %s (it has eth0, lo)' % value.lstrip('=')
    assert says in only(job.run()[2], 'interface', 'yellow')[0]     # NCCL is not needed
    with_gpus(job)
    assert says in only(job.run()[2], 'interface')[0]


@pytest.mark.parametrize('several, env, yellow', [(True, {}, True), (False, {}, False),
                                                  (True, {'NCCL_SOCKET_IFNAME': 'hsn'}, False)])
def test_nccl_has_to_be_told_the_interfaces_of_slingshot(tmp_path, several, env, yellow):
    for name in ('eth0', 'hsn0'):
        (tmp_path / 'sys/class/net' / name).mkdir(parents=True)
    report = findings.Report(0)
    look.look_at_interfaces(Machine(env, str(tmp_path)), report, several)
    assert ['NCCL may use the management network' in finding.text for finding in report.having('yellow')] == [True] * yellow


@pytest.mark.parametrize('names, level, says', [
    ('eth1', 'yellow', 'eth1 is down on this node'), ('eth', 'good', 'exists'), ('eth2,eth1', 'yellow', 'eth1, eth2 is down')])
def test_an_interface_that_is_down(job, names, level, says):
    job.files.update({'sys/class/net/eth1/operstate': 'down', 'sys/class/net/eth2/operstate': 'down'})
    report = findings.Report(0)
    look.look_at_interfaces(Machine({'NCCL_SOCKET_IFNAME': names}, job.root(0)), report, False)
    assert [(finding.level, says in finding.text) for finding in report.findings] == [(level, True)]


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


def test_what_gloo_alone_is_told_stops_no_job_with_gpus(job):
    with_gpus(job)
    job.env.update(GLOO_SOCKET_IFNAME='hsn', NCCL_SOCKET_IFNAME='=hsn0,eth0')     # one that is there suffices for NCCL
    _, _, found = job.run()
    assert not red(found) and {text[:4] for text, _ in named(found, 'interface', 'yellow')} == {'GLOO', 'NCCL'}


def test_gloo_takes_whole_names_and_nccl_prefixes(job):
    job.files.update({'sys/class/net/hsn0/operstate': 'up', 'sys/class/net/hsn1/operstate': 'up'})
    job.env.update(GLOO_SOCKET_IFNAME='hsn', NCCL_SOCKET_IFNAME='hsn')
    found = job.run()[2]
    assert only(found, 'interface')[0].startswith('GLOO_SOCKET_IFNAME=hsn')


def test_port_taken(job):
    job.per_node, job.nodes, job.answer = 1, ['nid1'], {'lost': 'address already in use'}
    _, _, found = job.run()
    text, ranks = only(found, 'port')
    assert 'MASTER_PORT=%d: address already in use' % job.port in text and ranks == [0]


def test_one_node_of_two_is_unreachable(job):
    job.left_out, job.env['SLINGTORCH_CHECK_SECONDS'] = (4, 5, 6, 7), 2
    _, _, found = job.run()
    text, ranks = only(found, 'no-answer')
    assert 'nid2 sent nothing' in text and ranks == [4, 5, 6, 7]
    assert named(found, 'collective', 'untested')


def test_master_addr_of_another_job(job):
    job.nodes = ('localhost', 'nid2')
    job.env.update(MASTER_ADDR='192.0.2.1')
    _, _, found = job.run()
    assert '192.0.2.1' in only(found, 'master')[0] and found['ranks'] == EIGHT


def test_ranks_with_different_rendezvous(job):
    job.ranks[5] = {'MASTER_PORT': '29500'}
    assert '29500 on rank 5' in only(job.run()[2], 'master')[0]
    job.ranks[5] = {'MASTER_ADDR': 'localhost'}
    assert 'localhost on rank 5' in only(job.run()[2], 'master', 'yellow')[0]     # perhaps it is the same node


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
    monkeypatch.setattr(check.meet, 'look_up', lambda name: 0)
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


def test_clock_skew(job):
    job.clocks[1] = lambda: time.time() + 100
    text, ranks = only(job.run()[2], 'clock', 'yellow')
    assert 'the clock of nid2 differs by 100 s' in text and ranks == [4]


# --- planted faults: ranks


def test_world_size_that_lies(job):
    job.env.update(WORLD_SIZE='12', SLURM_STEP_NUM_TASKS='8', SLINGTORCH_CHECK_SECONDS='2')
    _, _, found = job.run()
    assert 'no answer from ranks 8-11 of 12' in named(found, 'no-answer')[0][0]


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


def test_two_ranks_on_one_core(job):
    job.cpus = lambda local_rank: str(local_rank // 2)
    entries = named(job.run()[2], 'cores', 'yellow')
    assert [text for text, _ in entries] == [
        '2 ranks of the node share one core (%d): they slow each other down' % core for core in (0, 1)]
    assert entries[0][1] == [0, 1, 4, 5]


def test_ranks_that_are_not_bound_are_no_red_line(job):
    job.cpus = lambda local_rank: '0-15'
    assert 'not bound' in only(job.run()[2], 'cores', 'yellow')[0]
    job.cpus, job.files['sys/devices/system/cpu/online'] = (lambda local_rank: '0-1'), '0-1'
    _, text, found = job.run()
    assert not red(found) and 'share its 2 cores' in only(found, 'cores', 'yellow')[0]


def gpu_files(count, cpus='0-3 4-7 8-11 12-15'):
    files = {}
    for number in range(count):
        where = 'sys/bus/pci/devices/0000:%02x:00.0/' % (number + 1)
        files.update({where + 'vendor': '0x10de\n', where + 'class': '0x030200\n', 'dev/nvidia%d' % number: '',
                      where + 'local_cpulist': cpus.split()[number] + '\n'})
    return files


@pytest.mark.parametrize('says, env, level', [
    ('Duplicate GPU detected : rank %d and rank %d', {}, 'red'),
    ('Multiple Ranks are using the same GPU/Partition.', {}, 'red'),
    ('Multiple Ranks are using the same GPU/Partition.', {'NCCL_MULTI_RANK_GPU_ENABLE': '1'}, 'yellow'),
    ('', {}, 'yellow'),
])
def test_two_ranks_on_one_gpu(job, tmp_path, says, env, level):
    job.files.update(gpu_files(4))
    job.ranks.update({rank: {'CUDA_VISIBLE_DEVICES': str(rank % 4 // 2)} for rank in EIGHT})
    job.env.update(env)
    job.torch = dict.fromkeys(EIGHT, torch_of(tmp_path, '2.4.0'))
    job.answer = {'maps': [library(tmp_path / 'libnccl.so.2', 'const char *a = "%s";' % says)]}
    entries = named(job.run()[2], 'gpus', level)
    assert ('2 ranks of the node share one GPU', EIGHT) in entries


def pci(number, vendor, kind):
    where = 'sys/bus/pci/devices/0000:%02x:00.0/' % number
    return {where + 'vendor': vendor + '\n', where + 'class': kind + '\n', where + 'local_cpulist': '0-3\n'}


def test_a_board_chip_of_amd_is_no_gpu(job):
    # the chip has the lower PCI address
    job.files.update({**pci(0, '0x1002', '0x030000'), **gpu_files(4)})
    job.ranks.update({rank: {'CUDA_VISIBLE_DEVICES': str(rank % 4)} for rank in EIGHT})
    _, text, found = job.run()
    assert not red(found), text
    assert named(found, 'gpus', 'good') and not named(found, 'gpus', 'yellow')


@pytest.mark.parametrize('vendor, kind, counts', [
    ('0x10de', '0x030000', True), ('0x10de', '0x030200', True), ('0x1002', '0x038000', True),
    ('0x1002', '0x120000', True), ('0x1002', '0x030000', False), ('0x1a03', '0x030000', False),
    ('0x10de', '0x040300', False),
])
def test_which_devices_are_gpus(tmp_path, vendor, kind, counts):
    for name, text in pci(1, vendor, kind).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    kinds = {'0x10de': 'cuda', '0x1002': 'rocm'}
    assert [entry[2] for entry in Machine({}, str(tmp_path)).gpus()] == [kinds.get(vendor)] * counts


def test_partitions_of_an_accelerator_of_amd(job):
    job.files.update({**pci(1, '0x1002', '0x120000'), 'dev/kfd': ''})
    for number in range(7):     # the first one is the processor
        job.files['%s/%d/properties' % (KFD, number)] = 'cpu_cores_count 0\nsimd_count %d\n' % (number and 160)
    job.ranks.update({rank: {'ROCR_VISIBLE_DEVICES': str(rank % 4 + 2)} for rank in EIGHT})
    _, text, found = job.run()
    assert not red(found), text
    assert named(found, 'gpus', 'good')[0][0] == 'each rank sees a GPU of its own'


@pytest.mark.parametrize('kfd, parts, sees', [(False, 2, []), (True, 1, ['0000:01:00.0']),
                                              (True, 2, ['partition 0', 'partition 1'])])
def test_an_accelerator_of_amd_is_seen_through_its_driver(job, kfd, parts, sees):
    job.files.update({**pci(1, '0x1002', '0x120000'), **({'dev/kfd': ''} if kfd else {})})
    job.files.update({'%s/%d/properties' % (KFD, number): 'simd_count 160\n' for number in range(parts)})
    machine = Machine({}, job.root(0))
    assert look.visible_gpus(machine, machine.gpus()) == sees


def test_each_rank_with_its_own_gpu(job):
    job.files.update(gpu_files(4))
    job.ranks.update({rank: {'CUDA_VISIBLE_DEVICES': str(rank % 4)} for rank in EIGHT})
    _, _, found = job.run()
    assert not red(found)
    assert {text for text, _ in named(found, 'gpus', 'good')} == {
        'each rank sees a GPU of its own', 'each rank runs on cores near its GPU'}


def test_cores_far_from_the_gpu_and_no_gpu_at_all(job):
    job.files.update(gpu_files(4))
    job.ranks.update({rank: {'CUDA_VISIBLE_DEVICES': str(3 - rank % 4)} for rank in EIGHT})
    job.ranks[7] = {'CUDA_VISIBLE_DEVICES': '9'}
    _, _, found = job.run()
    assert only(found, 'gpus')[1] == [7]
    assert named(found, 'gpus', 'yellow') == [("the rank's cores are not near its GPU", EIGHT[:-1])]


def test_a_container_without_its_gpus(job):
    job.files.update(gpu_files(4))
    job.files = {name: text for name, text in job.files.items() if not name.startswith(('dev/nvidia', 'dev/kfd'))}
    assert not red(job.run()[2])    # perhaps none is wanted
    job.env['SLURM_GPUS_ON_NODE'] = '4'
    text, ranks = only(job.run()[2], 'gpus')
    assert "sees none of its node's 4 GPUs" in text and ranks == EIGHT
    for value in ('', '-1', 'NoDevFiles'):      # the user wants none
        job.env['CUDA_VISIBLE_DEVICES'] = value
        assert "sees none of its node's 4 GPUs" in only(job.run()[2], 'gpus', 'yellow')[0]


def test_number_of_gpus_that_is_none(job):
    job.files.update(gpu_files(4))
    job.env['SLURM_GPUS_ON_NODE'] = '(null)'
    assert not red(job.run()[2])


@pytest.mark.parametrize('listed, sees, level', [
    ('GPU-1111', ['GPU-1111'], ''), ('MIG-a,MIG-b', ['MIG-a'], ''), ('void', [], 'yellow'),
    ('NoDevFiles', [], 'yellow'), ('9', [], 'red'), ('10', [], 'red'), ('0.1', ['0.1'], ''),
])
def test_identifiers_of_gpus(tmp_path, listed, sees, level):
    """A process sees one slice; a word for none is somebody's wish."""
    for name, text in gpu_files(4).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine, report, details = Machine({'CUDA_VISIBLE_DEVICES': listed}, str(tmp_path)), findings.Report(0), {}
    look.look_at_gpus(machine, report, details)
    assert details['gpus'] == sees and ''.join(finding.level for finding in report.having(name='gpus')) == level


# --- planted faults: caches and packages


def test_cache_owned_by_another(job, tmp_path):
    other = '/usr'
    if os.geteuid() == 0:
        other = tmp_path / 'others'
        other.mkdir()
        os.chown(other, 65534, 65534)
    job.env['TRITON_CACHE_DIR'] = other
    assert 'TRITON_CACHE_DIR=%s belongs to user id' % other in only(job.run()[2], 'cache', 'yellow')[0]


def test_cache_that_others_can_write(job, tmp_path):
    (tmp_path / 'cache').mkdir()
    (tmp_path / 'cache').chmod(0o777)
    entries = named(job.run()[2], 'cache', 'yellow')
    assert len(entries) == 2 and all('writable by others (mode 777)' in text for text, _ in entries)


def test_a_cache_that_will_be_made_in_a_directory_of_others(tmp_path):
    tmp_path.chmod(0o777)
    report = findings.Report(0)
    look.look_at_caches(Machine({'TRITON_CACHE_DIR': str(tmp_path / 'new')}), report, {})
    assert [finding.level for finding in report.findings] == ['good']


def test_cache_on_a_parallel_file_system(tmp_path):
    (tmp_path / 'proc/self').mkdir(parents=True)
    (tmp_path / 'proc/self/mounts').write_text('disk / ext4 rw 0 0\n10.0.0.1@o2ib:/fs %s lustre rw 0 0\n' % tmp_path)
    report = findings.Report(0)
    env = {'MIOPEN_USER_DB_PATH': str(tmp_path), 'TRITON_CACHE_DIR': str(tmp_path / 'new')}
    look.look_at_caches(Machine(env, str(tmp_path)), report, {})
    assert [(level, name) for level, name, _, _, _ in report.sorted()] == [('yellow', 'cache')] * 2
    assert 'lustre' in report.sorted()[0][2] and 'locks do not work for a database' in report.sorted()[0][2]


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


@pytest.mark.parametrize('env, missing', [
    ({'NCCL_NET': 'AWS Libfabric'}, True), ({'NCCL_NET': 'socket'}, False),
    ({'NCCL_NET_PLUGIN': '/nowhere/libnccl-net.so'}, True), ({'NCCL_NET': 'ib', 'NCCL_NET_PLUGIN': 'none'}, False), ({}, False),
])
def test_plugin_missing(env, missing):
    found = [text for level, name, text in probed({}, env) if (level, name) == ('yellow', 'plugin')]
    name = env.get('NCCL_NET_PLUGIN', "libnccl-net.so in LD_LIBRARY_PATH or the system's directories")
    assert ['missing: no ' + name in text for text in found] == [True] * missing


def test_an_mpiexec_inside_a_job_is_no_srun():
    env = {'SLURM_STEP_ID': '4294967291', 'SLURM_JOB_ID': '1', 'SLURMD_NODENAME': 'first', 'MASTER_PORT': '1'}
    found = {tuple(gather.places({**env, 'SLINGTORCH_LAUNCHER': 'hydra', 'SLURMD_NODENAME': node}))
             for node in ('first', 'second')}
    assert len(found) == 1


def test_plugin_missing_where_there_is_slingshot(job, tmp_path):
    with_gpus(job)
    job.files['sys/class/net/hsn0/operstate'] = 'up'
    job.env.update(NCCL_SOCKET_IFNAME='hsn')
    job.torch = dict.fromkeys(EIGHT, torch_of(tmp_path, '2.4.0'))
    assert 'network plugin is missing' in only(job.run()[2], 'plugin', 'yellow')[0]
    job.answer = {'network': 'AWS Libfabric'}       # NCCL's own word
    assert not named(job.run()[2], 'plugin', 'yellow')


@pytest.mark.parametrize('env, there, says', [
    ({}, False, None), ({'NCCL_NET': 'AWS Libfabric'}, False, 'network plugin is missing'),
    ({}, True, 'did not load the plugin: Plugin load returned 0'),
])
def test_only_a_plugin_that_is_there_or_wanted_is_missed_in_nccls_log(tmp_path, env, there, says):
    """Most clusters need none, and NCCL logs that it found none."""
    report = findings.Report(0)
    if there:
        report.fact('plugin', '/opt/libnccl-net.so')
    node.check_probe(report, {'facts': {}, 'network': 'Socket', 'plugin':
                              'Plugin load returned 0 : libcudart.so.11.0: cannot open shared object file'},
                     Machine(env, str(tmp_path)))
    found = [entry[2] for entry in report.sorted() if entry[1] == 'plugin']
    assert [says in text for text in found] == [True] * bool(says)


def test_two_libnccl_in_a_process_and_two_mpis(job, tmp_path):
    job.torch = dict.fromkeys(EIGHT, torch_of(tmp_path, '2.4.0'))
    job.answer = {'maps': ['/a/libnccl.so.2', '/b/libnccl.so.2', '/a/libmpi.so.40', '/b/libmpich.so.12']}
    entries = named(job.run()[2], 'libraries', 'yellow')
    assert entries == [('one process has loaded 2 MPI: /a/libmpi.so.40 and /b/libmpich.so.12', EIGHT),
                       ('one process has loaded 2 libnccl: /a/libnccl.so.2 and /b/libnccl.so.2', EIGHT)]


def probed(answer, env=(), files=(), tmp_path=None):
    for name, text in dict(files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    report = findings.Report(0)
    whole = {'facts': {}, 'phase': 'collective', **answer}
    node.check_probe(report, whole, Machine(dict(env), str(tmp_path or '/nowhere')))
    return [entry[:3] for entry in report.sorted()]


def test_gpu_support_without_its_library():
    found = probed({'maps': ['/opt/cray/pe/lib64/libmpi_gnu_123.so.12', '/lib64/libcxi.so.1']}, {'MPICH_GPU_SUPPORT_ENABLED': '1'})
    assert found[0][:2] == ('yellow', 'libraries') and 'libmpi_gtl' in found[0][2]
    found = probed({'maps': ['/x/cray/libmpi_gnu_123.so.12', '/x/libmpi_gtl_cuda.so']}, {'MPICH_GPU_SUPPORT_ENABLED': '1'})
    assert [entry[0] for entry in found if entry[1] == 'libraries'] == ['good']


def test_three_ranks_on_two_gpus():
    report = findings.Report(0)
    node.check_gpus(report, [{'rank': rank, 'gpus': ['a', 'b'], 'near': {}, 'cpus': [0]} for rank in range(3)], [], {})
    assert [(finding.text, mask) for finding, mask in report.findings.items()] == [('3 ranks of the node share 2 GPUs', 7)]


def test_a_network_that_is_slow_is_said_with_the_result():
    told = {'sent': 1000, 'resent': 0, 'trip': 0.009, 'seconds': 0.01}
    found = probed({'told': told, 'facts': {'backend': 'gloo'}})
    assert [entry[:2] for entry in found if entry[1] in ('network', 'collective')] == [
        ('yellow', 'network'), ('good', 'collective')]


def test_sockets_are_red_where_there_is_slingshot(tmp_path):
    found = probed({'network': 'Socket'}, files={'sys/class/net/hsn0/operstate': 'up'}, tmp_path=tmp_path)
    assert found[0][:2] == ('red', 'network') and 'sockets (TCP)' in found[0][2]
    found = probed({'network': 'AWS Libfabric', 'provider': 'cxi'})
    assert ('good', 'network', "NCCL runs over AWS Libfabric, libfabric's provider cxi") in found


def test_a_collective_that_failed_is_red():
    found = probed({'error': 'the first all_reduce failed: RuntimeError: no route'})
    assert found[0] == ('red', 'collective', 'the first all_reduce failed: RuntimeError: no route')


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
        pipe.recv()

    monkeypatch.setattr(probe, 'run', run)
    one = check.Probe(Machine({}), 60, [])
    assert one.wait('over here', time.monotonic() + 60)
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


def test_what_a_child_says_is_heard_also_if_it_ends_and_its_own_child_lives_on():
    def run(pipe):
        if os.fork():
            pipe.send('a word')
            os.write(2, b'the reason')
            os._exit(7)
        time.sleep(600)

    child = messages.Child(run)
    assert child.hear(time.monotonic() + 60) == 'a word' and child.hear(time.monotonic() + 600) is None
    assert child.ended() and child.end() == '7: the reason'


@pytest.mark.parametrize('room, says', [(True, '1: ZeroDivisionError: integer division or modulo by zero'), (False, '1')])
def test_a_child_that_fails_says_why_if_there_is_room(monkeypatch, room, says):
    if not room:
        monkeypatch.setattr(messages.tempfile, 'TemporaryFile', raising(FileNotFoundError('No usable directory')))
        assert messages.scratch_file() is None
    child = messages.Child(lambda pipe: 1 // 0)
    assert messages.until(child.ended, time.monotonic() + 60) and child.end() == says


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


@pytest.mark.parametrize('status, trained', [(0, True), (1, False)])
def test_the_runscript_checks_first_and_trains_only_then(tmp_path, status, trained):
    python = tmp_path / 'python'
    python.write_text('#!/bin/bash\necho "$@"\n[[ $2/$3 != */lib/job/check ]] || exit %d\n' % status)
    python.chmod(0o755)
    for args in (['train.py', '--epochs', '1'], []):
        env = {'PATH': '%s:/usr/bin:/bin' % tmp_path, 'TMPDIR': str(tmp_path)}
        done = subprocess.run([ROOT / 'runscripts/conda-python-distributed', '--check', *args], text=True,
                              stdout=subprocess.PIPE, env=env)
        assert done.returncode == (status if not (args and trained) else 0)
        lines = done.stdout.splitlines()
        assert re.match(r'-B \S+/lib/job check( --stderr -- train.py --epochs 1)?$', lines[0])
        assert lines[1:] == (['train.py --epochs 1'] if args and trained else [])


@pytest.mark.parametrize('args', [['train.py'], []])
def test_the_check_has_the_launchers_local_rank_and_the_training_the_users(tmp_path, args):
    python = tmp_path / 'python'
    python.write_text('#!/bin/bash\necho "$2 $LOCAL_RANK/$LOCAL_WORLD_SIZE"\n')
    python.chmod(0o755)
    env = {'PATH': '%s:/usr/bin:/bin' % tmp_path, 'TMPDIR': str(tmp_path), 'SLURM_JOB_ID': '7', 'SLURM_STEP_ID': '0',
           'SLURM_PROCID': '3', 'SLURM_LOCALID': '3', 'SLURM_NODEID': '0', 'SLURM_STEP_NUM_TASKS': '4',
           'SLURM_STEP_TASKS_PER_NODE': '4', 'SLURM_STEP_NODELIST': 'n1', 'LOCAL_RANK': '0'}
    done = subprocess.run([ROOT / 'runscripts/conda-python-distributed', '--check', *args], text=True, check=True,
                          stdout=subprocess.PIPE, env=env)
    seen = done.stdout.splitlines()
    assert seen[0].endswith('/lib/job 3/4') and seen[1:] == ([' 0/4'] if args else [])


@pytest.mark.parametrize('text', ['abc', 'nan', '1e400', '-1', '0', '99999999', '\u0663'])
def test_seconds_that_are_none(text):
    with pytest.raises(SystemExit, match='is not a number of seconds. Write a whole number'):
        check.seconds_to_wait({'SLINGTORCH_CHECK_SECONDS': text})
