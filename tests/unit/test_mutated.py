# SPDX-License-Identifier: GPL-2.0-only
"""
What others wrote, changed at random: every reader gives a value or one message.

MUTATIONS=2000 ./run-tests -n 0 tests/unit/test_mutated.py     so many for each reader (default 200)
"""
import functools
import json
import os
import pathlib
import random
import re
import subprocess

import pytest

import test_bench
from slingtorch import lockfile, sites as SITES
from slingtorch.commands import bench, status
from slingtorch.sites import probe as site_probe
from slingtorch.job import elf, findings, machine, program, records, rules
from testbed import ROOT

COUNT = int(os.environ.get('MUTATIONS', '200'))
RECORDS = ROOT / 'tests/records'
SPECIAL = [b'', b'\0', b'\xff', b'\n', b'[', b']', b'[ ]', b'{', b'"', b'$(id)', b'%s', b'-', b',', b'9' * 30, b'\xd9\xa3', b' ',
           b'a' * 300, b'\x1b[31m', b'../', b'null', b'1e400', b'nan']
HOST = re.compile(r'[A-Za-z0-9_.][A-Za-z0-9._-]*')


def mutations(seed, texts):
    """COUNT byte strings: one of these with a few bytes deleted, doubled, replaced, exchanged, or cut off."""
    rng = random.Random(seed)
    for _ in range(COUNT):
        data = bytearray(rng.choice(texts))
        for _ in range(rng.randint(1, 4)):
            at, size = rng.randrange(len(data) + 1), rng.choice([0, 1, 2, 8, 64])
            kind = rng.randrange(6)
            if kind == 0:
                data[at:at + size] = rng.choice(SPECIAL)
            elif kind == 1:
                del data[at:at + size]
            elif kind == 2:
                data[at:at] = data[at:at + size]
            elif kind == 3 and at < len(data):
                data[at] = rng.randrange(256)
            elif kind == 4:
                at = data.find(b'\n', at) + 1
                data[at:at] = rng.choice(SPECIAL) + b'\n'
            else:
                del data[at + rng.randrange(len(data) + 1):]
        yield bytes(data)


def contents(*patterns):
    found = [path.read_bytes() for pattern in patterns for path in sorted(RECORDS.glob(pattern)) if path.is_file()]
    assert found, patterns
    return found


# --- bash: all in one process

def in_bash(code, inputs, tmp_path):
    """What bash says of each input, a line each, by a function of get-master that leaves first_host or its error."""
    for number, data in enumerate(inputs):
        (tmp_path / str(number)).write_bytes(data)
    script = ('set -u; . "$1/get-master"; for ((i = 0; i < $2; i++)); do first_host="" first_host_error=""; %s; '
              '[[ -n $first_host$first_host_error ]] || first_host_error=silent; '
              'printf "%%s|%%q\\n" "$first_host" "$first_host_error"; done' % code)
    done = subprocess.run(['bash', '-c', script, 'bash', ROOT / 'runscripts', str(COUNT)], cwd=tmp_path, timeout=300,
                          env={'PATH': os.environ['PATH'], 'LC_ALL': 'C'}, capture_output=True)
    assert done.stderr == b'', done.stderr[:500]
    lines = done.stdout.decode().splitlines()
    assert len(lines) == COUNT
    assert not [line for line in lines if line.endswith('|silent')]
    assert not list(tmp_path.glob('*[!0-9]*')), 'something was run'
    return [line.partition('|') for line in lines]


def test_host_lists(tmp_path):
    lists = [b'nid[001-004],nid010', b'x1000c0s[0-3]b[0-1]n0', b'gpu-a01,nid[1,3-5]-hsn', b'a.example.org']
    inputs = [data.replace(b'\0', b'') for data in mutations(1, lists)]
    said = in_bash('IFS= read -r -d "" list < $i || :; first_of_hostlist "$list"', inputs, tmp_path)
    accepted = [(data.decode(), host) for data, (host, _, error) in zip(inputs, said) if host]
    assert 10 < len(accepted) < COUNT
    for text, host in accepted:
        assert HOST.fullmatch(host) and machine.expand_hosts(text)[0] == host, text


def test_node_files(tmp_path):
    inputs = list(mutations(2, contents('nodefile/*.txt')))
    inputs = [b'\n'.join(data.splitlines()[:40]) for data in inputs]
    for host, _, _ in in_bash('first_of_nodefile "$i" PBS_NODEFILE', inputs, tmp_path):
        assert not host or HOST.fullmatch(host)


def test_tables_of_pals(tmp_path):
    tables = [path.read_bytes() for path in sorted((RECORDS / 'pals').rglob('*')) if path.is_file() and path.suffix != '.md']
    code = '. "$1/lib/pals.bash"; first_of_apinfo "$i" ""'
    for host, _, _ in in_bash(code, list(mutations(3, [b'', *tables])), tmp_path):
        assert not host or HOST.fullmatch(host)


# --- Python

def probe(function, *more):
    return lambda data, path: function(data.decode(errors='replace'), *more)


def site_file(data, path):
    try:
        (path.parent / 'site.cfg').write_bytes(data)
        SITES.load('site', {'SLINGTORCH_SITES_PATH': str(path.parent)})
    except SITES.SiteError as err:
        assert str(err).strip() and len(str(err)) < 3000


def program_said(data):
    """What check finds in a program."""
    report = findings.Report(0)
    read = rules.Program(data, {'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '2'}, ['--out', 'x'])
    for gpus in (None, ['one']):
        rules.check(report, read, gpus)
    return report.sorted(), program.outputs(read)


def library(data, path):
    path.write_bytes(data)
    try:
        lib = elf.Library(str(path))
        lib.needed(), lib.exported(), lib.names('x'), lib.match(re.compile(b'x'))
    except ValueError as err:
        assert str(path) in str(err)


def bench_record(data, path):
    path.write_bytes(data)
    try:
        record = bench.read(str(path))
        bench.show(record)
    except records.BenchError as err:
        assert str(err)


def installation(data, path):
    (path.parent / 'runscripts/lib').mkdir(parents=True, exist_ok=True)
    (path.parent / status.RECORD).write_bytes(data)
    assert status.describe('PyTorch/1', str(path.parent))['why']


@functools.lru_cache(maxsize=None)
def small_library():
    path = pathlib.Path(os.environ.get('TMPDIR', '/tmp')) / f'mutated-{os.getpid()}.so'
    subprocess.run(['gcc', '-shared', '-o', path, '-x', 'c', '-'], input=b'const char *text = "some text"; int f(void) { return 1; }',
                   check=True)
    data = path.read_bytes()
    path.unlink()
    return data


SINFO = contents('sinfo/*')
INTERFACES = [json.dumps([{'ifname': 'hsn0', 'addr_info': [{'family': 'inet', 'scope': 'global', 'local': '10.1.2.3'}]}]).encode()]
RDMA = [b'mlx5_0/ports/1/state: 4: ACTIVE\nmlx5_0/ports/1/link_layer: InfiniBand\nmlx5_0/ports/1/rate: 200 Gb/sec\n'
        b'mlx5_0/ports/1/gid_attrs/types/0: RoCE v2\nmlx5_0/ports/1/gids/0: 0000:0000:0000:0000:0000:ffff:0a00\n']
READERS = {
    'site file': (site_file, [path.read_bytes() for path in sorted((ROOT / 'hooks/sites').glob('*.cfg'))]),
    'library': (library, None),
    'bench': (bench_record, [json.dumps(dict(test_bench.RECORD, results=test_bench.RECORD['results'][:2])).encode()]),
    'installation': (installation, [json.dumps({'slingtorch': '1', 'site': 'lumi', 'groups': [], 'values': 'x', 'files': {
        'runscripts/a': {'source': 'a', 'sha256': 'x'}}}).encode(), b'[]', b'{}', b'1']),
    'lock file': (probe(lockfile.read_head),
                  [path.read_bytes()[:4000] for path in sorted((ROOT / 'easyconfigs').rglob('*.lock'))]),
    'sinfo': (probe(site_probe.read_sinfo), SINFO),
    'gres': (probe(site_probe.read_gres), [b'gpu:mi250:8(S:0),nvme:1', b'gpu:1g.5gb:7']),
    'interfaces': (probe(lambda text: site_probe.read_interfaces('hsn0/operstate: up\nhsn0/speed: 200000\n', text)), INTERFACES),
    'rdma': (probe(site_probe.infiniband), RDMA),
    'providers': (probe(site_probe.read_providers), contents('fi_info/*')),
    'modules': (probe(site_probe.read_modules), contents('modules/*')),
    'hosts': (probe(machine.expand_hosts), [b'nid[001-004],nid010']),
    'cores': (probe(machine.cpus_of), [b'0-7,16-23', b'0']),
    'mounts': (probe(machine.read_mounts), [b'/dev/sda1 / ext4 rw 0 0\ntmpfs /tmp tmpfs rw,size=1k 0 0\n']),
    'program': (lambda data, path: program_said(data),
                [(ROOT / 'examples/training/ddp_training.py').read_bytes()]),
}


@pytest.mark.parametrize('name', READERS)
def test_reader(name, tmp_path):
    read, texts = READERS[name]
    for number, data in enumerate(mutations(name, texts or [small_library()])):
        try:
            read(data, tmp_path / 'file')
        except Exception as err:  # any is a fault of the reader
            pytest.fail(f'{type(err).__name__}: {err} at input {number}: {data[:300]!r}')
