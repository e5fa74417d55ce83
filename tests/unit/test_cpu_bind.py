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


# --- the map

def test_whole_lumi_node_is_the_documented_mask(cpu_bind):
    done = cpu_bind('--tasks-per-node', '8', SLINGTORCH_CPU_GPU_MAP=LUMI_G)
    assert (done.returncode, done.stdout, done.stderr) == (0, LUMI_MASK + '\n', '')


def test_site_file_has_that_map():
    text = (testbed.ROOT / 'hooks/sites/lumi.cfg').read_text()
    assert f'[env SLINGTORCH_CPU_GPU_MAP]\nvalue = {LUMI_G}\n' in text


@pytest.mark.parametrize('tasks, expected', [
    (1, 'list:49-55,57-63,17-23,25-31,1-7,9-15,33-39,41-47'),
    (2, 'list:49-55,57-63,17-23,25-31:1-7,9-15,33-39,41-47'),
    (3, 'list:49-55,57-63:17-23,25-31:1-7,9-15'),
    (4, 'list:49-55,57-63:17-23,25-31:1-7,9-15:33-39,41-47'),
    (10, 'list:49-51:57-59:17-23:25-31:1-7:9-15:33-39:41-47:52-55:60-63'),
])
def test_tasks_and_gpus(cpu_bind, tasks, expected):
    done = cpu_bind('-n', str(tasks), '--pals', SLINGTORCH_CPU_GPU_MAP=LUMI_G)
    assert done.stdout.strip() == expected, done.stderr


def test_gpus_with_the_same_cores_share_them(cpu_bind):
    done = cpu_bind('-n4', SLINGTORCH_CPU_GPU_MAP='0-3 0-3 4-7 4-7')
    assert done.returncode == 2                 # -n4 is not a form it has
    done = cpu_bind('-n', '4', SLINGTORCH_CPU_GPU_MAP='0-3 0-3 4-7 4-7')
    assert done.stdout.strip() == 'mask_cpu:0x3,0xc,0x30,0xc0'


@pytest.mark.parametrize('text, reason', [
    ('0-3 x', "'x' is not a CPU list"), ('3-0', "'3-0' is not a CPU list"), ('0-3, 4-7', "'0-3,' is not a CPU list"),
    ('0-3 2-5', 'CPU 2 belongs to GPU 0 and GPU 1'), ('0-3;4-7', 'separated by blanks'), (' ', 'is blank'),
])
def test_bad_map(cpu_bind, text, reason):
    done = cpu_bind('-n', '2', SLINGTORCH_CPU_GPU_MAP=text)
    assert (done.returncode, done.stdout) == (1, '')
    assert reason in done.stderr


# --- how many tasks

@pytest.mark.parametrize('env', [
    {'SLURM_NTASKS_PER_NODE': '8'}, {'SLURM_TASKS_PER_NODE': '8(x2)'}, {'SLURM_TASKS_PER_NODE': '8'},
])
def test_tasks_from_slurm(cpu_bind, env):
    assert cpu_bind(SLINGTORCH_CPU_GPU_MAP=LUMI_G, **env).stdout.strip() == LUMI_MASK
    one = cpu_bind('--tasks-per-node=1', SLINGTORCH_CPU_GPU_MAP=LUMI_G, **env).stdout
    assert one == 'mask_cpu:0xfefefefefefefefe\n'


@pytest.mark.parametrize('env, reason', [
    ({}, '--tasks-per-node N'),
    ({'SLURM_TASKS_PER_NODE': '8,4'}, 'different numbers of tasks'),
    ({'SLURM_NTASKS_PER_NODE': 'x'}, "tasks per node are 'x'"),
])
def test_tasks_not_known(cpu_bind, env, reason):
    done = cpu_bind(SLINGTORCH_CPU_GPU_MAP=LUMI_G, **env)
    assert (done.returncode, done.stdout) == (1, '')
    assert reason in done.stderr


@pytest.mark.parametrize('args', [['-n', '0'], ['-n', '100000'], ['-n', 'x'], ['-n'], ['--tasks-per-node='], ['--unknown'], ['8']])
def test_wrong_use(cpu_bind, args):
    done = cpu_bind(*args)
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr


def test_more_tasks_than_cores(cpu_bind):
    done = cpu_bind('-n', '57', SLINGTORCH_CPU_GPU_MAP=LUMI_G)
    assert done.returncode == 1 and 'Start fewer' in done.stderr
    # as many as cores
    assert len(cpu_bind('-n', '56', SLINGTORCH_CPU_GPU_MAP=LUMI_G).stdout.split(',')) == 56


# --- whole nodes only

@pytest.mark.parametrize('allowed, env, reason', [
    ('1-7,9-15,17-23,25-31', {}, '56 CPUs, including CPU 49'),
    ('0-127', {'SLURM_GPUS_ON_NODE': '4'}, "4 of the node's 8 GPUs"),
    ('0-127', {'SLURM_CPUS_ON_NODE': '28'}, 'this job has 28 CPUs'),
    ('0-127', {'SLURM_JOB_CPUS_PER_NODE': '128,56'}, 'the nodes of this job differ'),
])
def test_part_of_a_node_is_refused(cpu_bind, tmp_path, allowed, env, reason):
    machine = Machine(tmp_path, ['0-127'], allowed=allowed)
    done = cpu_bind('-n', '8', SLINGTORCH_CPU_GPU_MAP=LUMI_G, SLURM_JOB_ID='1', **machine.env, **env)
    assert (done.returncode, done.stdout) == (1, '')
    assert reason in done.stderr and 'only on whole nodes' in done.stderr


@pytest.mark.parametrize('allowed', ['0-127', '1-7,9-15,17-23,25-31,33-39,41-47,49-55,57-63'])
def test_whole_node_in_a_job(cpu_bind, tmp_path, allowed):
    machine = Machine(tmp_path, ['0-127'], allowed=allowed)
    done = cpu_bind(SLINGTORCH_CPU_GPU_MAP=LUMI_G, SLURM_JOB_ID='1', SLURM_NTASKS_PER_NODE='8', SLURM_GPUS_ON_NODE='8',
                    SLURM_CPUS_ON_NODE='112', SLURM_JOB_CPUS_PER_NODE='112(x2)', **machine.env)
    assert done.stdout.strip() == LUMI_MASK, done.stderr


# --- the machine's topology

GCD = ('0x038000', '0x1002')
A100 = ('0x030200', '0x10de')
OF_THE_BOARD = ('0x030000', '0x1a03', '0-127')


def test_machine_with_four_numa_nodes_and_eight_gpus(cpu_bind, tmp_path):
    nodes = ['0-15,64-79', '16-31,80-95', '32-47,96-111', '48-63,112-127']
    near = [3, 3, 1, 1, 0, 0, 2, 2]
    machine = Machine(tmp_path, nodes, threads=2, devices=[OF_THE_BOARD] + [(*GCD, nodes[node]) for node in near])
    done = cpu_bind('-n', '8', '--pals', **machine.env)
    assert done.stdout.strip() == 'list:48-55:56-63:16-23:24-31:0-7:8-15:32-39:40-47', done.stderr


def test_machine_with_four_gpus(cpu_bind, tmp_path):
    nodes = ['0-15', '16-31', '32-47', '48-63']
    machine = Machine(tmp_path, nodes, devices=[(*A100, nodes[node]) for node in (3, 2, 1, 0)])
    assert cpu_bind('-n', '4', **machine.env).stdout.strip() == \
        'mask_cpu:0xffff000000000000,0xffff00000000,0xffff0000,0xffff'


def test_cores_near_a_gpu_are_offline(cpu_bind, tmp_path):
    machine = Machine(tmp_path, ['0-15', '16-31'], devices=[(*A100, '0-15'), (*A100, '32-47')])
    done = cpu_bind('-n', '2', **machine.env)
    assert (done.returncode, done.stdout) == (1, '')
    assert f'no online core is near the GPU {tmp_path}/sys/bus/pci/devices/0000:01:00.0. Give the cores of each GPU in ' \
        'SLINGTORCH_CPU_GPU_MAP' in done.stderr


def test_machine_without_gpus(cpu_bind, tmp_path):
    machine = Machine(tmp_path, ['0,2,4,6', '1,3,5,7'], devices=[OF_THE_BOARD])
    assert cpu_bind('-n', '2', '--pals', **machine.env).stdout.strip() == 'list:0,2,4,6:1,3,5,7'
    assert cpu_bind('-n', '3', '--pals', **machine.env).stdout.strip() == 'list:0,2:4,6,1:3,5,7'


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
