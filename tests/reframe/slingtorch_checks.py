# SPDX-License-Identifier: GPL-2.0-only
"""
ReFrame checks of an installed PyTorch, for any centre with its own ReFrame configuration: docs/activation.md.

They contain no system's data: they run in partitions and environments with the feature `slingtorch`, and read `extras`.
"""
import json
import os
import re
import sys

import reframe as rfm
import reframe.utility.sanity as sn
import reframe.utility.typecheck as typ
from reframe.core.builtins import fixture, run_after, run_before, sanity_function, variable

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from slingtorch import sites  # noqa: E402
from slingtorch.commands import bench  # noqa: E402
from slingtorch.job import records  # noqa: E402

CONTAINER = 'slingtorch_container'
LOSS = 2e-4
"""Largest difference between losses, which are printed with four digits."""


class Slingtorch(rfm.RunOnlyRegressionTest):
    """
    What all checks share: where they run, with how many ranks, and how a rank starts.

    :ivar nodes: number of nodes (default: the partition's, or 2)
    :ivar ranks_per_node: ranks per node (default: the partition's, or its number of devices of type `gpu`, or 2)
    :ivar site: site with the expected values and reference figures (default: the partition's, or none)
    """
    nodes = variable(int, type(None), value=None)
    ranks_per_node = variable(int, type(None), value=None)
    site = variable(str, type(None), value=None)

    valid_systems = ['+slingtorch']
    valid_prog_environs = ['+slingtorch']
    sourcesdir = None
    waits = False
    """Whether ranks wait for one that died. --check and --vet have a time limit and name the rank."""
    time_limit = '15m'
    tags = {'slingtorch'}

    def size(self):
        """(nodes, ranks on each)"""
        return self.nodes, self.ranks_per_node

    def arguments(self):
        """Arguments of conda-python-distributed."""
        raise NotImplementedError

    def command(self):
        """The command that the launcher starts; in a container, the module's runscript there."""
        start = ['in-container', 'conda-python-distributed'] if CONTAINER in self.current_environ.features else [
            '"$RUNSCRIPTS"/conda-python-distributed']
        return start + self.arguments()

    @run_after('setup')
    def place(self):
        """Set the size and the site: the command line takes precedence over the partition."""
        said = self.current_partition.extras.get('slingtorch', {})
        gpus = sum(device.num_devices for device in self.current_partition.devices if device.device_type == 'gpu')
        self.nodes = self.nodes or said.get('nodes', 2)
        self.ranks_per_node = self.ranks_per_node or said.get('ranks_per_node') or gpus or 2
        self.site = self.site or said.get('site')
        nodes, self.num_tasks_per_node = self.size()
        self.num_tasks = nodes * self.num_tasks_per_node
        self.num_gpus_per_node = gpus or None

    @run_before('run')
    def start(self):
        if self.waits and self.job.launcher.registered_name.startswith('srun'):
            self.job.launcher.options += ['--kill-on-bad-exit']
        self.executable, *self.executable_opts = self.command()

    def output(self):
        """The job's standard output."""
        with open(os.path.join(self.stagedir, str(sn.evaluate(self.stdout))), errors='replace') as stream:
            return stream.read()

    def expect(self, condition, text):
        """Fail with this text unless the condition holds. ReFrame shows the end of the job's output beside it."""
        sn.evaluate(sn.assert_true(condition, text))

    def written(self, name):
        """Path of a file that the job must write."""
        path = os.path.join(self.stagedir, name)
        self.expect(os.path.exists(path), "the job did not write %s" % name)
        return path


class OnePerNode(Slingtorch):
    """One task on each node."""

    def size(self):
        return self.nodes, 1


@rfm.simple_test
class ModuleCheck(OnePerNode):
    """The module sets its own variables and those of the site's file on every node."""
    descr = 'the module loads and sets what it should'

    def command(self):
        return ['env']

    def contract(self):
        """{variable: value, or None for any}. PyTorch's module is the last one in the environment."""
        words = self.current_environ.modules[-1].split('/')
        name = words[-2 if len(words) > 1 else 0].upper().replace('-', 'MIN')
        wanted = dict.fromkeys(['RUNSCRIPTS', 'RUNSCRIPTS' + name, 'EBROOT' + name])
        if CONTAINER in self.current_environ.features:
            wanted.update(dict.fromkeys(['SIF', 'SIF' + name, 'CONTAINERROOT']))
        if self.site:
            wanted.update((value.name, value.value) for value in sites.load(self.site).env_values().values()
                          if not value.when and not value.easyblocks)
        return wanted

    @sanity_function
    def sets_it(self):
        found, wrong = re.findall(r'^(\w+)=(.*)$', self.output(), re.M), []
        for name, wanted in sorted(self.contract().items()):
            values = [value for key, value in found if key == name]
            if len(values) < self.nodes:
                wrong.append('%s is set on only %d of %d nodes' % (name, len(values), self.nodes))
            elif wanted is not None and set(values) != {wanted}:
                wrong.append('%s is %s but should be %s' % (name, ' / '.join(sorted(set(values))), wanted))
        self.expect(not wrong, '; '.join(wrong))
        return True


class Training(Slingtorch):
    """Runs examples/training/ddp_training.py, which uses data from scikit-learn."""
    sourcesdir = os.path.join(ROOT, 'examples', 'training')
    waits = True
    program = variable(str, value='ddp_training.py')

    def arguments(self):
        return [self.program, '--epochs', '2']

    def loss(self):
        """The last loss. If ranks do not see each other, each prints one."""
        losses = re.findall(r'^epoch +2 of 2: loss (\S+)$', self.output(), re.M)
        self.expect(len(losses) == 1, "%d last losses were printed instead of one" % len(losses))
        return float(losses[0])


class OneRank(Training):
    """The training on a single rank."""

    def size(self):
        return 1, 1

    @sanity_function
    def ends(self):
        return self.loss() > 0


@rfm.simple_test
class TrainingCheck(Training):
    """With DistributedDataParallel, all ranks reach the same loss as a single rank."""
    descr = 'the last loss with N ranks is the same as with one'
    one = fixture(OneRank, scope='environment')

    @sanity_function
    def same_loss(self):
        one, many = self.one.loss(), self.loss()
        # if the number of ranks does not divide 48, the batches differ
        self.expect(abs(one - many) <= (0.5 if 48 % self.num_tasks else LOSS),
                    "the last loss is %g with one rank, but %g with %d" % (one, many, self.num_tasks))
        return True


@rfm.simple_test
class BandwidthCheck(Slingtorch):
    """
    Bandwidth for the largest size of each operation, and for sizes with reference figures of the site.

    :ivar bench_options: options of `--bench`
    """
    descr = "bandwidth, compared with the site's reference figures"
    bench_options = variable(typ.List[str], value=['--min', '1M', '--max', '1G'])
    waits = True

    def arguments(self):
        return ['--bench', '--json', 'bench.json'] + self.bench_options

    @sanity_function
    def is_right(self):
        record = bench.read(self.written('bench.json'))
        self.expect(record['complete'] and record['results'], "the measurement is not complete")
        wrong = records.wrong_values(record)
        self.expect(not wrong, '; '.join(wrong))
        return True

    @run_before('performance')
    def compare(self):
        measured = bench.index(bench.read(self.written('bench.json')))
        chosen, references = set({row[:2]: row for row in sorted(measured)}.values()), {}
        for each in sites.load(self.site).references if self.site else []:
            key = each.backend, each.operation, records.parse_size(each.size)
            if (int(each.nodes), int(each.ranks_per_node)) == self.size() and key in measured:
                chosen.add(key)
                references[self.figure(key)] = (float(each.bus_bandwidth), -float(each.tolerance), None, 'GB/s')
        self.perf_variables = {
            self.figure(key): sn.make_performance_function(lambda key=key: measured[key]['bus_bandwidth'], 'GB/s')
            for key in sorted(chosen)}
        self.reference = {self.current_partition.fullname: references}
        if not references:
            # a warning, since nobody reads the output of a check that passed
            self.logger.warning("%s: site %s has no reference figure for this measurement (%d x %d ranks), so it was "
                                "not compared. See docs/check.md" % (
                                    (self.name, self.site or '(none named)') + self.size()))

    @staticmethod
    def figure(key):
        """Name of a performance variable."""
        return '%s_%s_%s' % (key[0].replace('-', '_'), key[1], records.show_size(key[2]).replace(' ', ''))


@rfm.simple_test
class JobCheck(Slingtorch):
    """`--check` has no red line."""
    descr = 'check finds nothing red'
    env_vars = {'SLINGTORCH_CHECK_JSON': 'check.json'}

    def arguments(self):
        return ['--check']

    @sanity_function
    def nothing_is_red(self):
        with open(self.written('check.json')) as stream:
            found = json.load(stream)
        red = ['%(name)s: %(text)s' % each for each in found['findings'] if each['level'] == 'red']
        self.expect(not red, 'red: ' + '; '.join(red))
        self.expect((len(found['facts']['node']), len(found['ranks'])) == (self.nodes, self.num_tasks),
                    "%d ranks on %d nodes answered" % (len(found['ranks']), len(found['facts']['node'])))
        return True


@rfm.simple_test
class NodesCheck(OnePerNode):
    """`--vet` finds no slow or failing node."""
    descr = 'vet finds all nodes good'

    def arguments(self):
        self.skip_if(self.nodes < 2, 'a single node has no partner to measure with')
        return ['--vet']

    @sanity_function
    def all_are_good(self):
        out = self.output()
        bad = re.findall(r'^Cordon: .*', out, re.M)
        self.expect(not bad, '; '.join(bad))
        self.expect(len(re.findall(r'^(?:Vetted|Untested): ', out, re.M)) == self.nodes,
                    "not all %d nodes were measured" % self.nodes)
        return True
