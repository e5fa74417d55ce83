# SPDX-License-Identifier: GPL-2.0-only
"""cpu-bind: which cores each task gets, from a site's map and from the topology of machines written down here."""
import pathlib
import shutil
import subprocess

import pytest

import testbed
from testbed import messages

CPU_BIND = pathlib.Path(__file__).resolve().parents[2] / 'runscripts/cpu-bind'

LUMI_G = '49-55 57-63 17-23 25-31 1-7 9-15 33-39 41-47'
# the line of LUMI's documentation, with c=fe
LUMI_MASK = ('mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,'
             '0xfe,0xfe00,0xfe00000000,0xfe0000000000')


@pytest.fixture
def cpu_bind(tmp_path):
    """Run cpu-bind in an environment of its own; the CompletedProcess."""
    def call(*args, **env):
        done = subprocess.run([CPU_BIND, *args], env={'PATH': '/nonexistent', **env}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        messages.known(done.stderr, tmp_path)
        return done
    return call


def expand(text):
    """A CPU list as a set of numbers."""
    return {cpu for part in text.split(',') for cpu in range(int(part.split('-')[0]), int(part.split('-')[-1]) + 1)}


class Machine:
    """The files of /sys and /proc that describe a machine.

    :param nodes: CPU list of each NUMA node
    :param threads: of each core, numbered as Linux does: first threads of all cores first
    :param devices: (class, vendor, local CPU list) of each PCI device
    :param allowed: CPU list that the process may use; default: all
    """

    def __init__(self, path, nodes, threads=1, devices=(), allowed=None):
        self.path = path
        cpus = sorted(set().union(*map(expand, nodes)))
        cores = len(cpus) // threads
        self.write('sys/devices/system/cpu/online', f'0-{len(cpus) - 1}')
        for cpu in cpus:
            siblings = [cpu % cores + thread * cores for thread in range(threads)]
            self.write(f'sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list', ','.join(map(str, siblings)))
        self.write('sys/devices/system/node/online', f'0-{len(nodes) - 1}' if len(nodes) > 1 else '0')
        for number, node in enumerate(nodes):
            self.write(f'sys/devices/system/node/node{number}/cpulist', node)
        for number, (kind, vendor, local) in enumerate(devices):
            device = f'sys/bus/pci/devices/0000:{number:02x}:00.0'
            self.write(f'{device}/class', kind)
            self.write(f'{device}/vendor', vendor)
            self.write(f'{device}/local_cpulist', local)
        allowed = allowed or f'0-{len(cpus) - 1}'
        self.write('proc/self/status', f'Name:\tbash\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n')

    def write(self, name, text):
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if text.endswith('\n') else text + '\n')

    @property
    def env(self):
        return {'SLINGTORCH_CPU_BIND_ROOT': str(self.path)}


def test_site_file_has_the_map_of_the_documentation():
    text = (testbed.ROOT / 'hooks/sites/lumi.cfg').read_text()
    assert f'[env SLINGTORCH_CPU_GPU_MAP]\nvalue = {LUMI_G}\n' in text


@pytest.mark.parametrize('args, gpus, env, expected', [
    ('--tasks-per-node 8', LUMI_G, {}, LUMI_MASK),
    *(('', LUMI_G, env, LUMI_MASK) for env in (
        {'SLURM_NTASKS_PER_NODE': '8'}, {'SLURM_TASKS_PER_NODE': '8(x2)'}, {'SLURM_TASKS_PER_NODE': '8'})),
    ('--tasks-per-node=1', LUMI_G, {'SLURM_NTASKS_PER_NODE': '8'}, 'mask_cpu:0xfefefefefefefefe'),
    ('-n 1 --pals', LUMI_G, {}, 'list:49-55,57-63,17-23,25-31,1-7,9-15,33-39,41-47'),
    ('-n 2 --pals', LUMI_G, {}, 'list:49-55,57-63,17-23,25-31:1-7,9-15,33-39,41-47'),
    ('-n 3 --pals', LUMI_G, {}, 'list:49-55,57-63:17-23,25-31:1-7,9-15'),
    ('-n 4 --pals', LUMI_G, {}, 'list:49-55,57-63:17-23,25-31:1-7,9-15:33-39,41-47'),
    ('-n 10 --pals', LUMI_G, {}, 'list:49-51:57-59:17-23:25-31:1-7:9-15:33-39:41-47:52-55:60-63'),
    # as many as cores
    ('-n 56 --pals', LUMI_G, {}, 'list:' + ':'.join(str(first + number) for number in range(7) for first in (49, 57, 17, 25, 1, 9, 33, 41))),
    # GPUs with the same cores share them
    ('-n 4', '0-3 0-3 4-7 4-7', {}, 'mask_cpu:0x3,0xc,0x30,0xc0'),
])
def test_map(cpu_bind, args, gpus, env, expected):
    done = cpu_bind(*args.split(), SLINGTORCH_CPU_GPU_MAP=gpus, **env)
    assert (done.returncode, done.stdout, done.stderr) == (0, f'{expected}\n', '')


@pytest.mark.parametrize('args, gpus, env, reason', [
    ('-n 2', '0-3 x', {}, "'x' is not a CPU list"), ('-n 2', '3-0', {}, "'3-0' is not a CPU list"),
    ('-n 2', '0-3, 4-7', {}, "'0-3,' is not a CPU list"), ('-n 2', '0-3 2-5', {}, 'CPU 2 belongs to GPU 0 and GPU 1'),
    ('-n 2', '0-3;4-7', {}, 'separated by blanks'), ('-n 2', ' ', {}, 'is blank'),
    ('', LUMI_G, {}, '--tasks-per-node N'), ('', LUMI_G, {'SLURM_TASKS_PER_NODE': '8,4'}, 'different numbers of tasks'),
    ('', LUMI_G, {'SLURM_NTASKS_PER_NODE': 'x'}, "tasks per node are 'x'"), ('-n 57', LUMI_G, {}, 'Start fewer'),
])
def test_what_cannot_be_bound(cpu_bind, args, gpus, env, reason):
    done = cpu_bind(*args.split(), SLINGTORCH_CPU_GPU_MAP=gpus, **env)
    assert (done.returncode, done.stdout) == (1, '') and reason in done.stderr


@pytest.mark.parametrize('args', [['-n', '0'], ['-n', '100000'], ['-n', 'x'], ['-n'], ['--tasks-per-node='], ['-n4'], ['8']])
def test_wrong_use(cpu_bind, args):
    done = cpu_bind(*args)
    assert (done.returncode, done.stdout) == (2, '') and done.stderr


@pytest.mark.parametrize('allowed, env, reason', [
    ('1-7,9-15,17-23,25-31', {}, '56 CPUs, including CPU 49'),
    ('0-127', {'SLURM_GPUS_ON_NODE': '4'}, "4 of the node's 8 GPUs"),
    ('0-127', {'SLURM_CPUS_ON_NODE': '28'}, 'this job has 28 CPUs'),
    ('0-127', {'SLURM_JOB_CPUS_PER_NODE': '128,56'}, 'the nodes of this job differ'),
    *((allowed, {'SLURM_GPUS_ON_NODE': '8', 'SLURM_CPUS_ON_NODE': '112', 'SLURM_JOB_CPUS_PER_NODE': '112(x2)'}, None)
      for allowed in ('0-127', '1-7,9-15,17-23,25-31,33-39,41-47,49-55,57-63')),
])
def test_only_whole_nodes(cpu_bind, tmp_path, allowed, env, reason):
    machine = Machine(tmp_path, ['0-127'], allowed=allowed)
    done = cpu_bind('-n', '8', SLINGTORCH_CPU_GPU_MAP=LUMI_G, SLURM_JOB_ID='1', **machine.env, **env)
    assert (done.returncode, done.stdout) == ((1, '') if reason else (0, f'{LUMI_MASK}\n'))
    assert (reason or '') in done.stderr


# --- the machine's topology

GCD = ('0x038000', '0x1002')
A100 = ('0x030200', '0x10de')
OF_THE_BOARD = ('0x030000', '0x1a03', '0-127')
NUMA = ['0-15,64-79', '16-31,80-95', '32-47,96-111', '48-63,112-127']


@pytest.mark.parametrize('nodes, more, tasks, expected', [
    (NUMA, {'threads': 2, 'devices': [OF_THE_BOARD, *((*GCD, NUMA[near]) for near in (3, 3, 1, 1, 0, 0, 2, 2))]}, 8,
     'list:48-55:56-63:16-23:24-31:0-7:8-15:32-39:40-47'),
    (['0-15', '16-31', '32-47', '48-63'], {'devices': [(*A100, near) for near in ('48-63', '32-47', '16-31', '0-15')]}, 4,
     'list:48-63:32-47:16-31:0-15'),
    (['0,2,4,6', '1,3,5,7'], {'devices': [OF_THE_BOARD]}, 2, 'list:0,2,4,6:1,3,5,7'),
    (['0,2,4,6', '1,3,5,7'], {'devices': [OF_THE_BOARD]}, 3, 'list:0,2:4,6,1:3,5,7'),
])
def test_topology(cpu_bind, tmp_path, nodes, more, tasks, expected):
    done = cpu_bind('-n', str(tasks), '--pals', **Machine(tmp_path, nodes, **more).env)
    assert (done.stdout, done.stderr) == (f'{expected}\n', '')


def test_cores_near_a_gpu_are_offline(cpu_bind, tmp_path):
    machine = Machine(tmp_path, ['0-15', '16-31'], devices=[(*A100, '0-15'), (*A100, '32-47')])
    done = cpu_bind('-n', '2', **machine.env)
    assert (done.returncode, done.stdout) == (1, '')
    assert f'no online core is near the GPU {tmp_path}/sys/bus/pci/devices/0000:01:00.0. Give the cores' in done.stderr


def test_part_of_a_machine_is_refused(cpu_bind, tmp_path):
    machine = Machine(tmp_path, ['0-7'], allowed='0-3')
    assert cpu_bind('-n', '2', **machine.env).returncode == 0         # no job: a question about the machine
    done = cpu_bind('-n', '2', SLURM_JOB_ID='1', **machine.env)
    assert done.returncode == 1 and 'only the CPUs 0-3' in done.stderr


def test_this_machine_agrees_with_hwloc(cpu_bind):
    if not shutil.which('hwloc-calc'):
        testbed.missing('hwloc-calc (package hwloc)')
    mask = testbed.run(['hwloc-calc', '--taskset', 'core:all.pu:0']).stdout.strip()
    done = cpu_bind('-n', '1')
    assert int(done.stdout.strip().partition(':')[2], 16) == int(mask, 16)


def test_shellcheck():
    shellcheck = shutil.which('shellcheck') or testbed.missing('shellcheck')
    testbed.run([shellcheck, '-x', CPU_BIND])
