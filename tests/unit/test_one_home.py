# SPDX-License-Identifier: GPL-2.0-only
"""Each fact about machines has one home; where a program cannot import it, its copy says the same."""
import ast
import os
import pathlib
import re
import runpy
import subprocess
import types

import pytest

import test_runscripts_get_master
from slingtorch.job import elf, nccl
from slingtorch.job.machine import GPU, MPI_LIBRARY, Machine, expand_hosts
from testbed import ROOT

MACHINE = 'slingtorch/job/machine.py'
FACTS = {
    # what a GPU is: cpu-bind, which is bash, has the same pattern
    r'0x10de|0x1002': {MACHINE, 'runscripts/cpu-bind'},
    'simd_count': {MACHINE},
    r'Kernel Module': {MACHINE},
    # which file systems are shared
    'beegfs|panfs': {MACHINE},
    # memory; pytorch_cray.py asks for the limit of a build
    r'memory\.max|limit_in_bytes': {MACHINE, 'easyblocks/pytorch_cray.py'},
    # processors: of bash, cpu-bind and threads.bash
    'Cpus_allowed_list': {MACHINE, 'runscripts/cpu-bind', 'runscripts/lib/threads.bash'},
    'local_cpulist': {MACHINE, 'runscripts/cpu-bind'},
    # host lists: get-master has only the first host, and how many there are
    r'zfill': {MACHINE},
    # names of MPI libraries: easyblocks do not import slingtorch, and mpi.bash looks for files with their ABI
    r'usempi|libmpi\(': {MACHINE, 'easyblocks/generic/_pytorchprocess.py'},
    # interfaces of NCCL's plugins
    r"'.*ncclNetPlugin_v('|\()": {'slingtorch/job/nccl.py', 'easyblocks/generic/_nccl.py'},
    r'Using network \(': {'slingtorch/job/nccl.py'},
    "'libnccl-'": {'slingtorch/job/nccl.py'},
}


@pytest.mark.parametrize('pattern', FACTS)
def test_a_fact_is_written_once(pattern):
    rooms = ['slingtorch', 'easyblocks', 'hooks', 'runscripts', 'quickstart']
    listed = subprocess.run(['git', 'ls-files', *rooms], cwd=ROOT, stdout=subprocess.PIPE, check=True,
                            text=True).stdout.split()
    programs = [name for name in listed if not name.endswith(('.cfg', '.inc', '.txt')) and (ROOT / name).is_file()]
    assert len(programs) > 60
    assert {name for name in programs if re.search(pattern, (ROOT / name).read_text())} == FACTS[pattern]


def test_cpu_bind_knows_the_same_gpus():
    assert ' =~ %s ]]' % GPU in (ROOT / 'runscripts/cpu-bind').read_text()


def test_easyblocks_know_the_same_mpi_libraries():
    text = (ROOT / 'easyblocks/generic/_pytorchprocess.py').read_text()
    assert "\nMPI_LIBRARY_REGEX = re.compile(r'%s')\n" % MPI_LIBRARY.pattern in text


def compiled(path, code):
    command = ['gcc', '-shared', '-fPIC', '-nostdlib', '-o', path, '-x', 'c', '-']
    subprocess.run(command, input=code, text=True, check=True)


def test_easyblocks_know_the_same_interfaces_of_plugins(tmp_path):
    known = runpy.run_path(str(ROOT / 'easyblocks/generic/_nccl.py'))
    # EasyBuild's own wants a configuration
    known['exported_apis'].__globals__['run_shell_cmd'] = lambda command, **_: types.SimpleNamespace(
        output=subprocess.run(command, shell=True, stdout=subprocess.PIPE, check=True, text=True).stdout)
    plugin = tmp_path / 'libnccl-net.so'
    compiled(plugin, 'extern int ncclNetPlugin_v12; int *a = &ncclNetPlugin_v12, ncclNetPlugin_v9, ncclNetPlugin_v10,'
                     'ncclNet_v8;')
    assert nccl.offered(elf.Library(plugin)) == [9, 10] and known['exported_apis'](str(plugin)) == {9, 10}
    # a library is asked for all interfaces that are known
    numbers = {number for _, window in known['NCCL_APIS'] for number in window}
    library = tmp_path / 'libnccl.so.2'
    compiled(library, 'const char *a[] = {%s};' % ', '.join('"%s%d"' % (nccl.INTERFACE, number) for number in numbers))
    assert set(nccl.accepted([str(library)])[0]) == numbers


def test_a_build_sees_the_same_limit_of_memory(tmp_path):
    path = ROOT / 'easyblocks/pytorch_cray.py'
    [function] = [node for node in ast.parse(path.read_text()).body if getattr(node, 'name', '') == 'available_memory']
    block = {'os': os, 're': re, 'read_file': lambda path: pathlib.Path(path).read_text()}
    exec(compile(ast.Module([function], []), str(path), 'exec'), block)
    for name, text in {
        'proc/meminfo': 'MemTotal: 16777216 kB\nMemAvailable: 16777216 kB\n', 'proc/self/cgroup': '0::/job/step\n',
        'sys/fs/cgroup/job/memory.max': str(2 ** 32), 'sys/fs/cgroup/job/memory.current': '0',
        'sys/fs/cgroup/job/step/memory.max': 'max', 'sys/fs/cgroup/job/step/memory.current': '0',
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    free, limit, _ = Machine({}, str(tmp_path)).free_memory()
    assert free == limit == 2 ** 30 * block['available_memory'](str(tmp_path / 'proc'), str(tmp_path / 'sys/fs/cgroup'))


@pytest.mark.parametrize('hosts', ['nid001', 'nid[001-003,7],a1', 'rack[1-2]node[01-16]-hsn', 'b,a', 'x[9-11]'])
def test_get_master_expands_the_same_hosts(hosts):
    assert test_runscripts_get_master.first(hosts) == expand_hosts(hosts)[0]
