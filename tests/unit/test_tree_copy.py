# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch/job/tree_copy.py: real processes and sockets, all on this machine."""
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest

from testbed import ROOT

JOB = ROOT / 'slingtorch/job'
NODES = 12  # node 0 sends to 1 to 8, node 1 sends to 9 and more
KEY = 'f00-4711-0'


@pytest.fixture
def port():
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(('', 0))
        return listener.getsockname()[1]


@pytest.fixture
def image(tmp_path):
    path = tmp_path / 'image'
    path.write_bytes(os.urandom(5 * (1 << 20) + 17))
    return path


def start(port, path, host=None, nodes=NODES, key=KEY, seconds=60, program=JOB):
    command = [sys.executable, '-I', '-S', '-B', program, 'tree_copy', *map(str, (port, nodes, key, seconds, path))]
    return subprocess.Popen(command + ([host] if host else []), stderr=subprocess.PIPE, text=True)


def ends(*processes):
    """[(exit status, stderr)]"""
    found = []
    for process in processes:
        _, err = process.communicate(timeout=120)
        found.append((process.returncode, err))
    return found


def connect(port):
    """A connection to a program that may not listen yet."""
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(('localhost', port))
        time.sleep(0.1)
    raise AssertionError('nobody listens')


def impatient(tmp_path, **values):
    """The program with other constants, so that no test waits for half a minute."""
    path = shutil.copytree(JOB, tmp_path / 'job')
    text = (JOB / 'wire.py').read_text()
    for name, value in values.items():
        text, count = re.subn(rf'^{name} = \d+$', f'{name} = {value}', text, flags=re.M)
        assert count == 1
    (path / 'wire.py').write_text(text)
    return path


def test_every_node_has_it(port, image, tmp_path):
    """Whoever comes first; nodes below others get it from these."""
    targets = [tmp_path / f'node{number}' for number in range(1, NODES)]
    nodes = [start(port, target, 'localhost') for target in targets[:6]]
    nodes.append(start(port, image))
    nodes += [start(port, target, '127.0.0.1') for target in targets[6:]]
    assert ends(*nodes) == [(0, '')] * NODES
    assert all(target.read_bytes() == image.read_bytes() for target in targets)


def test_empty_file_and_one_node(port, image, tmp_path):
    image.write_bytes(b'')
    node = start(port, tmp_path / 'node', 'localhost', nodes=2)
    assert ends(start(port, image, nodes=2), node) == [(0, '')] * 2
    assert (tmp_path / 'node').read_bytes() == b''
    assert ends(start(port, image, nodes=1)) == [(0, '')]


def test_without_the_word_nobody_gets_anything(port, image, tmp_path):
    root = start(port, image, nodes=2)
    silent = [connect(port) for _ in range(20)]  # nobody waits for them
    for words in (b'another 1\n', b'\xff\n', b'x' * 300):
        with contextlib.closing(connect(port)) as stranger:
            stranger.sendall(words)
            with contextlib.suppress(ConnectionResetError):  # it was not read to its end
                assert stranger.recv(100) == b''
    node = start(port, tmp_path / 'node', 'localhost')
    begin = time.time()
    assert ends(root, node) == [(0, '')] * 2 and (tmp_path / 'node').read_bytes() == image.read_bytes()
    assert time.time() - begin < 15 and len(silent) == 20


def test_a_node_that_never_calls_is_not_waited_for_long(port, image, tmp_path):
    program = impatient(tmp_path, QUIET=2)
    root = start(port, image, nodes=3, program=program)
    node = start(port, tmp_path / 'node', 'localhost', program=program)
    assert ends(root, node) == [(0, '')] * 2
    assert (tmp_path / 'node').read_bytes() == image.read_bytes()


def test_a_node_that_dies_takes_those_below_it_along(port, image, tmp_path):
    """These say so, and the others have the file."""
    targets = [tmp_path / f'node{number}' for number in range(2, 10)]
    root = start(port, image, nodes=10)
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(('', 0))
        listener.listen()
        node1 = connect(port)
        node1.sendall(f'{KEY} {listener.getsockname()[1]}\n+\n'.encode())
        nodes = [start(port, target, 'localhost') for target in targets]
        assert node1.makefile('rb').readlines(3) == [b'+\n', b'- 0 1 %d\n' % image.stat().st_size]
        below = listener.accept()[0]
        words = below.makefile('rb')
        assert words.readline().startswith(KEY.encode())
        below.sendall(b'+\nhalf')
        assert words.readline() == b'+\n'
        for connection in (node1, words, below):
            connection.close()
    assert ends(root) == [(0, '')]
    failed = [err for status, err in ends(*nodes) if status]
    assert len(failed) == 1 and 'ended the connection' in failed[0]
    assert sum(path.read_bytes() == image.read_bytes() for path in tmp_path.glob('node*')) == 7


def test_nobody_sends(port, tmp_path):
    done, = ends(start(port, tmp_path / 'node', 'localhost', program=impatient(tmp_path, REACH=1)))
    assert done[0] == 1 and f'no connection to localhost, port {port}' in done[1]
    done, = ends(start(port, tmp_path / 'node', 'no-such-host.invalid'))
    assert done[0] == 1 and 'no connection to no-such-host.invalid' in done[1]


def test_port_of_somebody_else(port, image, tmp_path):
    program = impatient(tmp_path, ANSWER=1)
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(('', port))
        listener.listen()
        (status, err), (other_status, other_err) = ends(start(port, image), start(port, tmp_path / 'node', 'localhost',
                                                                                  program=program))
    assert status == 1 and 'Address already in use' in err
    assert other_status == 1 and f'another program is at localhost, port {port} (timed out)' in other_err


def test_full_disk(port, image):
    root = start(port, image, nodes=2)
    (status, err), sent = ends(start(port, '/dev/full', 'localhost'), root)
    assert status == 1 and 'No space left on device' in err and err.count('\n') == 1 and sent == (0, '')
