# SPDX-License-Identifier: GPL-2.0-only
"""How the ranks of --check meet: files within a node, PyTorch's store between nodes, and what others put there."""
import ctypes
import datetime
import json
import os
import pathlib
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from unittest import mock

import pytest

from slingtorch.job import findings, gather, meet, messages, munge, network
from testbed import ROOT, raising


def environment(directory, rank=0, **more):
    return {'RANK': str(rank), 'WORLD_SIZE': '4', 'LOCAL_RANK': str(rank), 'LOCAL_WORLD_SIZE': '4',
            'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '23000', 'SLURM_JOB_ID': '7', 'SLURM_STEP_ID': '0',
            'SLURMD_NODENAME': 'n1', 'SLINGTORCH_JOB_DIR': str(directory), **more}


DETAILS = {'cpus': [0], 'online': [0], 'near': {}, 'limits': {}, 'memory of': '', 'memory': None,
           'gpus': None}


def report(rank):
    return json.loads(json.dumps(findings.Report(rank).dump()))


@pytest.fixture
def first(tmp_path):
    """The first rank of a node of four, which waits for two seconds at most."""
    yield gather.LocalRanks(environment(tmp_path))


def other(directory, thing, rank=1):
    """A rank has written this."""
    files = gather.Files(environment(directory, rank))
    files.wait_for_first(time.monotonic() + 60)
    files.write('rank-%d' % rank, thing)
    return files


def reported(rank):
    return {'report': report(rank), 'details': DETAILS}


# --- the start


NAMES = ', '.join(findings.NAMES)


@pytest.mark.parametrize('changed, says', [
    ({'WORLD_SIZE': ''}, 'WORLD_SIZE is not set. Start this with the runscript: srun ... $RUNSCRIPTS/conda-python-distributed --check'),
    ({'MASTER_ADDR': ''}, 'MASTER_ADDR is not set. Start this with the runscript: srun ... $RUNSCRIPTS/conda-python-distributed --check'),
    ({'LOCAL_WORLD_SIZE': '-1'}, "LOCAL_WORLD_SIZE='-1' is not a number"), ({'LOCAL_RANK': '1'}, 'rank 0 has LOCAL_RANK=1, but must have 0'),
    ({'SLINGTORCH_CHECK_IGNORE': 'cores,b,a'}, "SLINGTORCH_CHECK_IGNORE: no finding has the name 'a'. Write 1 for all, or names: " + NAMES),
    ({'SLINGTORCH_CHECK_IGNORE': 'yes'}, "SLINGTORCH_CHECK_IGNORE: no finding has the name 'yes'. Write 1 for all, or names: " + NAMES),
    ({'RANK': '1', 'SLINGTORCH_CHECK_IGNORE': '1'}, None), ({'SLINGTORCH_CHECK_IGNORE': 'cores'}, None),
])
def test_a_start_that_cannot_be(changed, says, capsys):
    def start():
        gather.read_ranks({**environment('/nowhere'), **changed})
        return 0
    assert gather.guarded('check', None, start) == (2 if says else 0)
    assert capsys.readouterr().err == (f'slingtorch check: {says}\n' if says else '')


@pytest.mark.parametrize('error, environ, status, says', [
    (gather.PeerLost('it\nis gone'), {'RANK': '3'}, 1, 'rank 3 on n1: it is gone'), (OSError('x'), {}, 1, 'rank ? on n1: x'),
    (gather.PeerLost('gone'), {'SLINGTORCH_CHECK_IGNORE': 'no-answer'}, 0, 'rank ? on n1: gone'),
    (RuntimeError("can't start new thread"), {}, 1, "rank ? on n1: can't start new thread (see ulimit -u, or a filter of the container): "
     "ask for more processes in the job, or have the limit raised where it is set")])
def test_what_ends_a_rank(monkeypatch, error, environ, status, says):
    stream = mock.Mock()
    monkeypatch.setattr(sys, 'stderr', stream)
    monkeypatch.setattr(gather.limits, 'few_processes', lambda machine: '')
    assert gather.guarded('check', types.SimpleNamespace(node='n1', environ=environ), raising(error)) == status
    assert stream.mock_calls == [mock.call.write(f'slingtorch check: {says}\n'), mock.call.flush()]


def test_the_verdict_of_rank_0_is_the_status():
    environ = {'SLINGTORCH_CHECK_IGNORE': 'no-answer'}
    assert [gather.verdict(word, {}) for word in ('0', '1', 'lost', '2')] == [0, 1, 1, 1]
    assert [gather.verdict(word, environ) for word in ('0', '1', 'lost')] == [0, 1, 0]


# --- within a node


def test_ranks_are_read_and_their_files_taken_away(first, tmp_path):
    files = [other(tmp_path, reported(rank), rank) for rank in (1, 2, 3)]
    assert first.look() and sorted(first.reports) == [1, 2, 3]
    for rank, one in enumerate(files, 1):
        os.remove(one.path('rank-%d' % rank))
    begin = time.monotonic()
    first.tell('0')
    assert not list(tmp_path.iterdir()) and time.monotonic() - begin < 1.5


def test_the_verdict_is_kept_until_all_have_read_it(first, tmp_path):
    files = other(tmp_path, reported(1))
    first.look()
    thread = threading.Thread(target=first.tell, args=('1',))
    thread.start()
    assert files.wait_for_word(time.monotonic() + 60) == '1'
    os.remove(files.path('rank-1'))
    thread.join()
    assert not list(tmp_path.iterdir())


def test_a_rank_that_does_not_read_the_verdict_is_waited_for_20_s(first, tmp_path, monkeypatch):
    other(tmp_path, reported(1))
    first.look()
    ends = []
    monkeypatch.setattr(gather.messages, 'until', lambda there, end: ends.append((there(), end)))
    monkeypatch.setattr(gather, 'time', types.SimpleNamespace(monotonic=lambda: 100))
    first.tell('1')
    assert not list(tmp_path.iterdir()) and ends == [(False, 120)]


def test_a_file_system_without_locks_is_used(first, tmp_path, monkeypatch):
    monkeypatch.setattr(gather.fcntl, 'flock', raising(OSError(37, 'No locks available')))
    assert other(tmp_path, reported(1)).place == first.place
    first.remove()
    assert gather.LocalRanks(environment(tmp_path)).place == first.place


def test_a_rank_that_never_writes_is_missed(first, tmp_path):
    other(tmp_path, reported(1))
    assert not first.look() and list(first.reports) == [1]


@pytest.mark.parametrize('data', [b'', b'{"pid": ', b'\xff\xfe\x00', b'[' * 200000, b' ' * (messages.MOST + 2), b'[7]',
                                  b'{"pid": 1e999}', b'{"pid": %s}' % (b'9' * 5000), b'{"report": {}, "details": {}}'])
def test_a_file_that_is_no_message_is_no_traceback(first, data):
    with open(os.path.join(first.place, 'rank-1'), 'wb') as stream:
        stream.write(data)
    assert not first.look() and not first.reports


def test_names_that_are_no_ranks_and_links_are_left_alone(first, tmp_path):
    (tmp_path / 'secret').write_text('{"pid": 1}')
    for name in ('rank-1', 'rank-x', 'rank-99', 'rank-0001234567890'):
        os.symlink(tmp_path / 'secret', os.path.join(first.place, name))
    assert not first.look() and not first.reports


@pytest.mark.parametrize('full', ['a file in the way', 'no room'])
def test_where_the_jobs_directory_is_full_ranks_meet_in_shm(tmp_path, full):
    directory = tmp_path / 'job'
    if full == 'a file in the way':
        directory.write_text('')
    else:
        directory.mkdir()
        (directory / os.path.basename(gather.places(environment(directory))[0])).symlink_to('/nowhere')
    local = gather.LocalRanks(environment(directory))
    try:
        files = other(directory, reported(1))
        local.look()
        assert list(local.reports) == [1] and files.place == local.place and local.place.startswith('/dev/shm/')
    finally:
        shutil.rmtree(local.place)


def test_where_only_the_first_rank_has_room_ranks_meet_in_shm(tmp_path, monkeypatch):
    monkeypatch.setattr(gather.limits, 'write_trial', lambda place, size: (
        'no room' if place.startswith(str(tmp_path)) and size >= 4 * 4096 else ''))
    local = gather.LocalRanks(environment(tmp_path))
    shutil.rmtree(local.place)
    assert local.place.startswith('/dev/shm/') and not list(tmp_path.iterdir())


def test_where_nothing_can_be_written_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(gather, 'places', lambda environ: ['/proc/a/b', '/proc/c/d'])
    with pytest.raises(OSError, match='cannot write to /proc/a/b or /proc/c/d .*: free space there'):
        gather.LocalRanks(environment(tmp_path))


def test_a_full_directory_is_taken_away(tmp_path, monkeypatch):
    monkeypatch.setattr(gather, 'places', lambda environ: [str(tmp_path / 'full')])
    monkeypatch.setattr(gather.limits, 'write_trial', lambda place, size: 'no room')
    with pytest.raises(OSError, match='free space there'):
        gather.LocalRanks(environment(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_cut_off_by_a_full_disk_is_not_taken_for_a_whole_one(first, tmp_path):
    files = gather.Files(environment(tmp_path))
    files.wait_for_first(time.monotonic() + 60)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError):
            files.write('rank-1', {'text': 'x' * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not first.look() and not first.reports and not first.others()


def test_a_directory_of_others_is_not_used(tmp_path, monkeypatch):
    open_ = tmp_path / 'open'
    open_.mkdir()
    open_.chmod(0o777)
    (tmp_path / 'link').symlink_to('open')
    (tmp_path / 'file').touch(mode=0o600)
    assert not any(gather.is_private(f'{tmp_path}/{name}') for name in ('open', 'nowhere', 'file'))
    open_.chmod(0o720)
    assert not gather.is_private(str(open_))
    open_.chmod(0o755)
    assert gather.is_private(str(open_)) and not gather.is_private(f'{tmp_path}/link')
    monkeypatch.setattr(gather.os, 'getuid', lambda: 4711)
    assert not gather.is_private(str(open_))


def test_two_jobs_and_two_starts_of_a_job_on_one_node_have_files_of_their_own(tmp_path):
    found = {gather.places(environment(tmp_path, **more))[0] for more in (
        {}, {'SLURM_JOB_ID': '8'}, {'SLURM_STEP_ID': '1'}, {'SLURMD_NODENAME': 'n2'}, {'PBS_JOBID': '9'},
        {'TORCHELASTIC_RUN_ID': 'a'})}
    assert len(found) == 6
    own, shared = gather.places(environment(tmp_path))
    name = re.fullmatch(f'{tmp_path}/(check-[0-9a-f]{{16}})', own).group(1)
    assert shared == f'/dev/shm/slingtorch-{os.getuid()}-{name}' == gather.places(environment(''))[0]
    locals_ = [gather.LocalRanks(environment(tmp_path, SLURM_JOB_ID=job)) for job in '78']
    other(tmp_path, reported(1))
    for local in locals_:
        local.look()
    assert [bool(local.reports) for local in locals_] == [True, False]


def test_a_second_first_rank_is_refused(first, tmp_path):
    with pytest.raises(gather.PeerLost, match='also local rank 0 of this node: unset LOCAL_RANK'):
        gather.LocalRanks(environment(tmp_path))


def killed_first(directory):
    """A first rank that has ended, and left its file behind."""
    pid = os.fork()
    if not pid:
        gather.LocalRanks(environment(directory))
        os._exit(0)
    os.waitpid(pid, 0)


def test_files_of_a_start_that_was_killed_are_not_taken_for_those_of_this_one(tmp_path):
    killed_first(tmp_path)
    files = gather.Files(environment(tmp_path, 1))
    with pytest.raises(gather.PeerLost) as lost:
        files.wait_for_first(time.monotonic() + 0.1)
    assert str(lost.value) == (f'no answer from the first rank of this node, which has written nothing to {files.places[0]} (a container '
                               'with --contain has its own /tmp): see its own messages, and check LOCAL_RANK in the job script')
    files.place = files.places[0]
    files.write('rank-1', reported(1))
    local = gather.LocalRanks(environment(tmp_path))
    assert not local.look() and not local.reports


def test_a_first_rank_that_is_gone_is_not_waited_for(tmp_path):
    killed_first(tmp_path)
    files = gather.Files(environment(tmp_path, 1))
    files.place = files.places[0]
    with pytest.raises(gather.PeerLost, match='the first rank of this node has ended'):
        files.wait_for_word(time.monotonic() + 600)


# --- between nodes


class Store:
    """PyTorch's store, with what a test puts there."""

    def __init__(self, **kept):
        self.kept = {key.replace('_', '-'): value for key, value in kept.items()}

    def add(self, key, more):
        self.kept[key] = self.kept.get(key, 0) + more
        return self.kept[key]

    def set(self, key, text):
        self.kept[key] = text.encode()

    def check(self, keys):
        return all(key in self.kept for key in keys)

    def wait(self, keys, limit):
        if not set(keys) <= set(self.kept):
            raise RuntimeError('wait timeout')

    def multi_get(self, keys):
        return [self.kept[key] for key in keys]


def store(**kept):
    one = meet.Store.__new__(meet.Store)
    one.store, one.another, one.seconds = Store(**kept), lambda: None, 600
    return one


class OldStore(Store):
    """Of a PyTorch before 2.1."""

    check = multi_get = property()

    def get(self, key):
        return self.kept[key]


COMES = {'node': 'n2', 'rank': 4, 'ranks': 4}
RUBBISH = [b'', b'x', b'\xff\x00', b'7', b'[]', b'{"node": "n2"}', b'[' * 100000, b' ' * (messages.MOST + 1),
           b'{"node": "n2", "rank": 4, "ranks": 4, "more": %s}' % (b'[' * 500 + b']' * 500)]


def test_nodes_of_one_machine_meet_by_their_networks(tmp_path, monkeypatch):
    own = gather.places(environment(tmp_path))
    assert own == gather.places(environment(tmp_path, 1))
    monkeypatch.setattr(gather.os, 'stat', lambda path: types.SimpleNamespace(st_ino=7))
    assert not set(own) & set(gather.places(environment(tmp_path)))


@pytest.mark.parametrize('environ, first, server, prefix', [
    ({'RANK': '0'}, True, True, '0'), ({'RANK': '1'}, True, False, '0'), ({'RANK': '0'}, False, False, '0'),
    ({'RANK': '0', 'TORCHELASTIC_USE_AGENT_STORE': 'True', 'TORCHELASTIC_RESTART_COUNT': '2'}, True, False, '2')])
def test_only_the_first_store_of_rank_0_is_the_server_except_under_torchrun(monkeypatch, environ, first, server, prefix):
    torch = mock.MagicMock()
    monkeypatch.setitem(sys.modules, 'torch', torch)
    monkeypatch.setitem(sys.modules, 'torch.distributed', torch.distributed)
    shared = []
    monkeypatch.setattr(meet.Store, 'share_secret', lambda self: shared.append(1))
    meet.Store({**environ, 'MASTER_ADDR': 'n1', 'MASTER_PORT': '23000'}, 7, first)
    dist = torch.distributed
    assert dist.mock_calls == [
        mock.call.TCPStore('n1', 23000, None, server, datetime.timedelta(seconds=7), False),
        mock.call.PrefixStore('slingtorch-' + prefix, dist.TCPStore.return_value), mock.call.PrefixStore().num_keys()]
    assert bool(shared) == (environ['RANK'] == '0' and first)


@pytest.mark.parametrize('error, says', [
    (RuntimeError('\nBroken pipe\nException raised from ...'), 'Broken pipe'), (KeyError(), 'KeyError()'), (OSError('x' * 999), 'x' * 300)])
def test_what_the_store_itself_says_ends_in_one_line(error, says):
    one = store()
    one.store = types.SimpleNamespace(**dict.fromkeys(('set', 'add', 'wait', 'multi_get', 'check'), raising(error)))
    for ask in (lambda: one.put('x', 1), lambda: one.count('x'), lambda: one.wait('x', 0), lambda: one.raw(['x']), lambda: one.is_there('x')):
        with pytest.raises(meet.NotMet) as lost:
            ask()
        assert str(lost.value) == says


@pytest.mark.parametrize('end, waits', [(160, 60), (90, 0.05)])
def test_how_long_a_key_is_waited_for(monkeypatch, end, waits):
    one, asked = store(x=b'1'), []
    one.store.wait = lambda keys, limit: asked.append((keys, limit.total_seconds()))
    monkeypatch.setattr(meet, 'time', types.SimpleNamespace(monotonic=lambda: 100))
    assert one.get('x', end) == 1 and asked == [(['x'], waits)]


@pytest.mark.parametrize('kind', [Store, OldStore])
def test_who_comes_is_counted_by_its_ranks(kind):
    one = store()
    one.store = kind(nodes=1, come_1=messages.dump(COMES))
    assert one.others(4, 8, time.monotonic() + 5) == {1: COMES} and not one.is_there('come-2')


@pytest.mark.parametrize('said', RUBBISH + [messages.dump({**COMES, **more}) for more in (
    {'rank': '4'}, {'rank': 8}, {'rank': -1}, {'rank': 0}, {'ranks': 0}, {'ranks': 5}, {'node': None},
    {'rank': True})])
def test_what_comes_in_another_form_is_no_node(said):
    assert store(nodes=1, come_1=said).others(4, 8, time.monotonic() + 0.1) == {1: None}


@pytest.mark.parametrize('takes, seconds, found', [(5, 600, {1: COMES}), (0.1, 600, {}), (5, 0, {})])
def test_nodes_that_wait_behind_connections_of_strangers_are_waited_for(monkeypatch, takes, seconds, found):
    one, clock, answers = store(come_1=messages.dump(COMES)), [0], iter([0] * 20 + [1])
    one.seconds = seconds

    def passes(more):
        clock[0] += more

    def count(_):
        passes(takes)
        return next(answers)

    one.count = count
    monkeypatch.setattr(meet, 'time', types.SimpleNamespace(monotonic=lambda: clock[0], sleep=passes))
    assert one.others(4, 8, 1) == found


def test_a_number_of_nodes_that_cannot_be_is_not_believed():
    assert store(nodes=10 ** 9).others(4, 8, time.monotonic() + 0.1) == {}


def signed(secret=b'1' * 32, **kept):
    one = store(**kept)
    one.secret = secret
    return one


def test_what_another_user_writes_is_overlooked_until_the_node_itself_writes():
    one = signed(nodes=1, come_1=messages.dump(COMES), report_1=b'{}', word=b'"1"')
    assert one.others(4, 8, time.monotonic() + 0.1) == one.reports([1], time.monotonic() + 0.1) == {}
    with pytest.raises(meet.Unsigned, match="another user wrote word into PyTorch's store"):
        one.get('word', time.monotonic() + 0.1)
    theirs = signed(b'2' * 32)
    theirs.put('word', '1')
    one.store.kept['come-1'] = theirs.sign('word', b'"1"').encode() + b'"1"'     # a signature of another secret
    writer = signed()
    writer.store = one.store
    writer.put('come-1', COMES)
    one.store.kept['come-2'] = one.store.kept['come-1']     # of another key
    threading.Timer(0.1, writer.put, ('word', '0')).start()
    assert one.get('word', time.monotonic() + 60) == '0' and one.known('come', [1, 2], meet.COMES) == {1: COMES}


class Library:
    """libmunge.so.2, which answers with these errors, and for a user."""

    def __init__(self, encode=0, decode=0, user=None):
        self.errors, self.user, self.options = (encode, decode), user, []
        self.munge_ctx_create = lambda: 7

    def munge_ctx_set(self, context, option, value):
        self.options.append((option, value))
        return 0

    def munge_encode(self, credential, context, secret, length):
        credential._obj.value = None if self.errors[0] else b'MUNGE:' + secret[:length].hex().encode()
        return self.errors[0]

    def munge_decode(self, text, context, secret, length, user, group):
        if self.errors[1] in (0, 15, 16, 17) and text:
            self.kept = bytes.fromhex(text[6:].decode())
            secret._obj.value = ctypes.cast(self.kept, ctypes.c_void_p).value
            length._obj.value = len(self.kept)
        user._obj.value = os.getuid() if self.user is None else self.user
        return self.errors[1] if text else 8


@pytest.mark.parametrize('decode', [0, 15, 16, 17])
def test_an_authentic_credential_of_this_user_is_opened_at_any_time(monkeypatch, decode):
    """Expired or of the future (a clock that is wrong), or opened before (by another rank of this node)."""
    library = Library(decode=decode)
    monkeypatch.setattr(munge.ctypes, 'CDLL', {'libmunge.so.2': library}.get)
    one = munge.Munge()
    text = one.seal(b'secret\0x')
    assert one.open(text) == b'secret\0x'
    assert library.options == [(0, 4), (9, os.getuid())]     # munge.h: AES128, and only this user may open it


@pytest.mark.parametrize('answers, seals, opens', [
    ({'encode': 6}, munge.NoMunge, b'x'), ({'decode': 6}, munge.NoMunge, munge.NoMunge),
    ({'decode': 18}, munge.NoMunge, ValueError), ({'decode': 14}, munge.NoMunge, ValueError),
    ({'user': 12345}, munge.NoMunge, ValueError)])
def test_a_credential_that_is_not_this_users(monkeypatch, answers, seals, opens):
    monkeypatch.setattr(munge.ctypes, 'CDLL', {'libmunge.so.2': Library(**answers)}.get)
    with pytest.raises(seals):
        munge.Munge().seal(b'x')
    if opens == b'x':
        assert munge.Munge().open('MUNGE:78') == opens
    else:
        with pytest.raises(opens):
            munge.Munge().open('MUNGE:78')


@pytest.mark.parametrize('credential, answer, says', [
    (b'', raising(munge.NoMunge('no library')), None), (b'MUNGE:x', lambda _: b'', None),
    (b'MUNGE:x', raising(munge.NoMunge('no library')),
     "MUNGE answers on rank 0's node, but not on this one (no library): see systemctl status munge"),
    (b'\xff', raising(ValueError('x')), "another user writes into PyTorch's store at MASTER_PORT=23000: choose another"),
    (None, None, 'wait timeout')])
def test_the_secret_of_rank_0s_node(monkeypatch, credential, answer, says):
    one = store(**{'secret': credential} if credential is not None else {})
    one.environ = {'MASTER_PORT': '23000'}
    monkeypatch.setattr(munge, 'Munge', lambda: types.SimpleNamespace(open=answer))
    if says:
        with pytest.raises(meet.NotMet, match=re.escape(says)):
            one.get_secret(time.monotonic() + 0.1)
    else:
        one.get_secret(time.monotonic() + 0.1)
        assert one.secret == b''


@pytest.mark.parametrize('there', [True, False])
def test_rank_0s_node_shares_a_secret_if_there_is_munge(monkeypatch, there):
    one, used, sealed = store(), [], []
    one.use = used.append
    monkeypatch.setattr(munge, 'Munge', lambda: types.SimpleNamespace(seal=lambda secret: sealed.append(secret) or 'MUNGE:x')
                        if there else raising(munge.NoMunge('no library'))())
    one.share_secret()
    assert one.store.kept == {'secret': b'MUNGE:x' if there else b''} and used == (sealed if there else [b''])
    assert len(used[0]) == 32 * there


def test_a_node_that_dies_before_it_reports_is_waited_for_until_the_end():
    one = store(report_1=b'{}')
    assert one.reports([1, 2], time.monotonic() + 0.1) == {1: {}}


@pytest.mark.parametrize('heard, all_heard', [(2, False), (3, True)])
def test_who_reads_the_verdict_is_waited_for_3_s(monkeypatch, heard, all_heard):
    one, ends = store(heard=heard), []
    monkeypatch.setattr(meet.messages, 'until', lambda there, end: ends.append((there(), end)))
    monkeypatch.setattr(meet, 'time', types.SimpleNamespace(monotonic=lambda: 100))
    one.word('0', 3)
    assert one.store.kept['word'] == b'"0"' and ends == [(all_heard, 103)]


def test_a_node_joins():
    one, asked, end = store(nodes=4, go=b'7'), [], time.monotonic()
    one.get_secret = asked.append
    assert (one.join({'a': 1}, end), one.number, asked) == (7, 5, [end]) and one.store.kept['come-5'] == b'{"a": 1}'


def test_a_node_reports_and_hears_the_verdict():
    one = store(word=messages.dump('1' * 99))
    one.number = 5
    assert one.report({'a': 1}, time.monotonic()) == '1' * 10
    assert one.store.kept['report-5'] == b'{"a": 1}' and one.store.kept['heard'] == 1


def test_why_a_node_does_not_reach_rank_0s_names_address_and_what_the_kernel_says(monkeypatch):
    monkeypatch.setattr(meet.Machine, 'read', lambda *_: '32768\t60999')
    with socket.socket() as closed:
        closed.bind(('127.0.0.1', 0))
        port = str(closed.getsockname()[1])
        said = meet.why_not({'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}, 'no store')
    assert said == (f'no connection to MASTER_ADDR=127.0.0.1, MASTER_PORT={port} (127.0.0.1, from 127.0.0.1 (lo): Connection refused). '
                    'On this node, 127.0.0.1 is a loopback address: see its /etc/hosts [no store]')


@pytest.mark.parametrize('rank, source, says', [('2', '127.0.0.1', True), ('0', '127.0.0.1', False), ('2', '10.0.0.9', False)])
def test_a_node_that_is_itself_named_as_the_one_of_rank_0_says_so(monkeypatch, rank, source, says):
    monkeypatch.setattr(meet.network, 'is_loopback', lambda address: False)
    monkeypatch.setattr(meet.network, 'source_of', lambda address: source)
    said = meet.why_not({'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '1', 'RANK': rank})
    assert ('MASTER_ADDR is this node, but rank 0 is on another one' in said) == says


def test_a_program_that_answers_at_the_port_is_said():
    with socket.create_server(('127.0.0.1', 0)) as server:
        said = meet.why_not({'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(server.getsockname()[1])})
    assert "something answers there, but not as PyTorch's store does" in said


@pytest.mark.parametrize('error, says', [(socket.timeout('timed out'), 'no answer'), (OverflowError('port must be 0-65535.'), 'port must be 0-65535.')])
def test_an_address_that_does_not_answer_is_said(monkeypatch, error, says):
    asked = []
    monkeypatch.setattr(meet.socket, 'create_connection', lambda *words: asked.append(words) or raising(error)())
    assert meet.attempt('127.0.0.1', 1) == f'127.0.0.1, from 127.0.0.1 (lo): {says}' and asked == [(('127.0.0.1', 1), 3)]
    monkeypatch.setattr(network, 'source_of', lambda address: '')
    assert meet.attempt('192.0.2.1', 1) == f'192.0.2.1, from nowhere: {says}'


@pytest.mark.parametrize('address, asked', [('10.1.2.3', '::ffff:10.1.2.3'), ('fd00::1', 'fd00::1')])
def test_how_long_the_name_of_an_address_is_looked_up(monkeypatch, address, asked):
    clock, said = iter([5, 12]), []
    monkeypatch.setattr(network, 'address_of_host', lambda host: {'n1': address}[host])
    monkeypatch.setattr(meet, 'time', types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(meet.socket, 'getnameinfo', lambda *words: said.append(words) or raising(OSError('no name'))())
    assert meet.look_up('n1') == 7 and said == [((asked, 9, 0, 0), 0)]


def test_a_name_without_an_address_is_said(monkeypatch):
    monkeypatch.setattr(network, 'addresses', raising(OSError('no such name')))
    said = meet.why_not({'MASTER_ADDR': 'nx', 'MASTER_PORT': '1'})
    assert said.startswith('no connection to MASTER_ADDR=nx, MASTER_PORT=1 (it has no address here: no such name)') and 'loopback' not in said


def test_ipv6_alone():
    assert meet.attempt('::1', 1).startswith('::1') and network.is_loopback('::1') and meet.look_up('::1') < 600


def test_another_range_of_ports_than_linux_s_is_said(monkeypatch):
    monkeypatch.setattr(meet.Machine, 'read', lambda *_: '12000\t60999')
    said = meet.why_not({'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '1'})
    assert said.endswith('. conda-python-distributed derives MASTER_PORT from ip_local_port_range, which is 12000 60999 here')


# --- messages


@pytest.mark.parametrize('text', ['a\x1b[2Jb', 'a\nb', 'a\x00b', 'a\u202eb', 'a\x9bb'])
def test_control_characters_are_shown_as_blanks(text):
    assert messages.one_line(text) in ('a b', 'a [2Jb')


def test_what_a_message_may_be():
    thing = {'a': [1, 2.5, 'x', None, True], 'b': {}}
    assert messages.load(messages.dump(thing)) == thing
    assert messages.has_form({'a': 1, 'b': True}, {'a': int, 'b': bool})
    with pytest.raises(ValueError, match='^%d bytes$' % (messages.MOST + 2)):
        messages.load(b'"%s"' % (b'x' * messages.MOST))
    assert not messages.has_form({'a': True}, {'a': int}) and not messages.has_form([], {})
    assert messages.has_form({'a': [{'x': 1.5}]}, {str: [{str: (int, float)}]})
    assert not any(messages.has_form(other, {str: [{str: (int, float)}]}) for other in ({'a': {}}, {'a': [{'x': ''}]}))
    assert [repr(messages.load(b'9' * digits)) for digits in (18, 19)] == ['9' * 18, '1e+19']
    assert messages.load(b'[' * 19 + b'-1' + b']' * 19) and messages.load(b'"%s"' % (b'x' * (messages.MOST - 2)))


@pytest.mark.parametrize('data, says', [
    (b'[' * 20 + b'1' + b']' * 20, 'nested too deeply'), (b'[' * 200000, 'nested too deeply'), (b'[NaN]', 'NaN is not a number'),
    (b'[-%s]' % (b'9' * 400), '-9999999999999999999 is not a number'), (b'{"a": {"b": Infinity}}', 'Infinity is not a number')])
def test_what_a_message_may_not_be(data, says):
    with pytest.raises(ValueError) as refused:
        messages.load(data)
    assert str(refused.value) == says


def running(pid):
    """Whether this process still runs."""
    try:
        return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except OSError:
        return False


def test_what_a_child_started_ends_with_it_and_it_ends_with_its_rank():
    def start(pipe):
        pipe.send(os.fork() or time.sleep(600))
        time.sleep(600)
    child = messages.Child(start)
    grandchild = child.hear(time.monotonic() + 60)
    assert running(grandchild) and child.end() == '-9'
    assert messages.until(lambda: not running(grandchild), time.monotonic() + 60)
    ours, theirs = os.pipe()
    rank = os.fork()
    if not rank:
        try:
            child = messages.Child(lambda pipe: pipe.send('a word') or time.sleep(600))
            child.hear(time.monotonic() + 60)       # it may not be as far yet
            os.write(theirs, b'%d' % child.pid)
        finally:
            os._exit(0)
    os.waitpid(rank, 0)
    pid = int(os.read(ours, 100))
    assert messages.until(lambda: not running(pid), time.monotonic() + 60)
    os.close(ours)
    os.close(theirs)


def test_what_a_child_prints_is_dropped(capfd):
    def talk(pipe):
        os.write(1, b'out')
        os.write(2, ('x' * 999).encode())
        assert not os.read(0, 9)
    child = messages.Child(talk)
    assert messages.until(child.ended, time.monotonic() + 60) and child.end() == '117: ' + 'x' * 600
    assert capfd.readouterr() == ('', '')


def test_a_report_that_would_be_too_long_leaves_facts_out():
    one = findings.Report(0)
    one.add('red', 'cores', 'a finding')
    for number in range(1000):
        one.fact('env A', '%d %s' % (number, 'x' * 1000))
    thing = one.dump()
    assert len(messages.dump(thing)) <= messages.MOST // 2 and findings.Report.load(thing, 1).having('red', 'cores')


def test_a_hundred_thousand_ranks_have_a_header():
    from slingtorch.job import check
    one = findings.Report()
    for node in range(12500):
        one.fact('node', 'nid%06d' % node, 255 << 8 * node)
    one.ranks = (1 << 100000) - 1
    begin = time.process_time()
    assert '100000 ranks on 12500 nodes' in check.header(one, 1)
    assert time.process_time() - begin < 2      # it was 17 s for 32,768


# --- output


@pytest.mark.parametrize('encoding, shown', [('ascii', '\\xe9 is not in /dev/null'), ('utf-8', '\xe9 is not in /dev/null')])
def test_what_stdout_cannot_show_is_no_traceback(tmp_path, encoding, shown):
    (tmp_path / 'torch').mkdir()
    (tmp_path / 'torch/__init__.py').write_text('import sys\nraise ImportError("caf\\xe9 is not in " + sys.path[0])\n')
    env = {**os.environ, **environment(tmp_path, WORLD_SIZE='1', LOCAL_WORLD_SIZE='1'), 'PYTHONPATH': str(tmp_path),
           'PYTHONIOENCODING': encoding, 'NCCL_ALGO': os.fsdecode(b'\xff')}
    done = subprocess.run([sys.executable, '-B', ROOT / 'slingtorch/job', 'check'], env=env, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b'')
    printed = ' '.join(done.stdout.decode().split())
    assert shown in printed and "NCCL_ALGO='\\udcff'" in printed


# --- signals


def test_an_ignored_sigchld_changes_nothing(tmp_path):
    code = ('import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n'
            'import os; os.execv(%r, [%r, "-B", %r, "check", "--json", %r])' % (
                sys.executable, sys.executable, str(ROOT / 'slingtorch/job'), str(tmp_path / 'found.json')))
    env = {**os.environ, **environment(tmp_path, WORLD_SIZE='1', LOCAL_WORLD_SIZE='1'), 'PYTHONPATH': str(tmp_path)}
    (tmp_path / 'torch').mkdir()
    (tmp_path / 'torch/__init__.py').write_text('import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n')
    subprocess.run([sys.executable, '-c', code], env=env, check=False, stdout=subprocess.DEVNULL)
    said = [entry['text'] for entry in json.loads((tmp_path / 'found.json').read_text())['findings']
            if entry['level'] == 'red']
    assert any('import torch ended the process with status -11' in text for text in said), said
