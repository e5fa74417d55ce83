# SPDX-License-Identifier: GPL-2.0-only
"""LUMI as its users see it: module files, directories, nodes; with the bundle activated where LUMI has its own code.

Only what is named here is emulated: /appl is in a directory of the test, and the nodes are Slurm's, with as many CPUs
and GPUs as LUMI-G's. EasyBuild, the modules tool, the container runtime and the bundle are real.

Who says so besides us ("believed": nobody):

* software stack and partition: Lumi-supercomputer/LUMI-SoftwareStack@02f1731 modules/LUMIstack/21.01.lua,
  modules/LUMIpartition/21.01.lua, modules/EasyBuild-config/25.01.lua, LMOD/SitePackage.lua, docs/directory_structure.md
* LUMI/23.09: Lumi-supercomputer/LUMI-SoftwareStack@02f1731 (easystacks of LUMI-23.09)
* versions of EasyBuild-user and wget: believed; `module load wget`, `EasyBuild-user`:
  Lumi-supercomputer/LUMI-EasyBuild-containers@af6fb1c
* partitions: Lumi-supercomputer/lumi-userguide@6c3a26c docs/runjobs/scheduled-jobs/partitions.md,
  distribution-binding.md (whole nodes)
* nodes of LUMI-G, and the cores that jobs may use: Lumi-supercomputer/lumi-userguide@6c3a26c docs/hardware/lumig.md,
  docs/runjobs/scheduled-jobs/batch-job.md (low-noise mode)
* names of nodes, the default partition and MPI of srun: believed; srun of Frontier sets PALS_* and PMI_*
  (https://github.com/argonne-lcf/DLcomm_benchmark/blob/2a7e27e/examples/8_rccl_pytorch/logs/dlcomm_example_output_rccl_pytorch/terminal_output.log,
  2025-08-20), so MPI is hardly none there
"""

import pathlib
import re
import shlex
import shutil

from . import NODES, ROOT, clean_environ, easybuild, images, parse_env0, run, slurm

STACK = '23.09'
CORES = '1-7,9-15,17-23,25-31,33-39,41-47,49-55,57-63'
"""What a job may use of the 64 cores of a node: the first core of every L3 cache is the system's."""


class Site:
    """A login node of LUMI.

    :ivar user_prefix: the user's EBU_USER_PREFIX
    :ivar central: directory of the images that LUMI keeps
    """

    def __init__(self, directory, tool):
        self.directory = pathlib.Path(directory)
        self.tool = tool
        self.user_prefix = self.directory / 'users/me/EasyBuild'
        self.central = self.directory / 'appl/local/containers/easybuild-sif-images'
        self.central.mkdir(parents=True)
        self.user_prefix.mkdir(parents=True)
        self.modules = self.directory / 'modules'
        self.bundle = self.copy_of_bundle()
        self.node = self.directory / 'node'
        (self.node / 'proc/self').mkdir(parents=True)
        (self.node / 'proc/self/status').write_text(f'Cpus_allowed_list:\t{CORES}\n')
        self.env = {'EBU_USER_PREFIX': str(self.user_prefix), 'HOME': str(self.user_prefix.parent),
                    'PATH': f'{images.runtime()}:{clean_environ()["PATH"]}',
                    'SLINGTORCH_CPU_BIND_ROOT': str(self.node)}
        self.write_modules()

    def copy_of_bundle(self):
        """The bundle, with LUMI's /appl being the one of the test."""
        bundle = self.directory / 'bundle'
        for room in ('easyblocks', 'easyconfigs', 'hooks', 'patches', 'runscripts', 'slingtorch'):
            if (ROOT / room).is_dir():
                shutil.copytree(ROOT / room, bundle / room, ignore=shutil.ignore_patterns('__pycache__'))
        path = bundle / 'hooks/sites/lumi.cfg'
        path.write_text(re.sub(r'(?m)^(\s+)/appl/', rf'\1{self.directory}/appl/', path.read_text()))
        return bundle

    def write(self, name, lines):
        path = self.modules / f'{name}.lua'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('\n'.join(lines) + '\n')

    def write_modules(self):
        """LUMI, partition/container, EasyBuild-user and wget, as small as can be."""
        user_modules = 'pathJoin(os.getenv("EBU_USER_PREFIX"), "modules/container")'
        self.write(f'init/LUMI/{STACK}', [
            'setenv("LUMI_STACK_NAME", "LUMI")', f'setenv("LUMI_STACK_VERSION", "{STACK}")',
            f'prepend_path("MODULEPATH", {user_modules})', f'prepend_path("MODULEPATH", "{self.modules}/partitions")',
        ])
        self.write('init/wget/1.21', ['whatis("only to be loaded")'])
        self.write('partitions/partition/container', ['family("LUMI_partition")',
                                                      'setenv("LUMI_STACK_PARTITION", "container")',
                                                      f'prepend_path("MODULEPATH", "{self.modules}/container")'])
        self.write('container/EasyBuild-user/5', [
            'family("EasyBuildConfig")',
            f'prepend_path("PATH", "{easybuild.BIN}")',
            *(f'setenv("{name}", [==[{value}]==])' for name, value in sorted(self.easybuild_variables().items())),
        ])

    def easybuild_variables(self):
        """LUMI's directories, and on top of them what `slingtorch env --site lumi` says."""
        prefix = self.user_prefix
        variables = {
            'EASYBUILD_PREFIX': prefix, 'EASYBUILD_INSTALLPATH_SOFTWARE': prefix / 'SW/container',
            'EASYBUILD_INSTALLPATH_MODULES': prefix / 'modules/container', 'EASYBUILD_SUFFIX_MODULES_PATH': '',
            'EASYBUILD_REPOSITORYPATH': prefix / 'ebfiles_repo/container',
            'EASYBUILD_BUILDPATH': self.directory / 'run/easybuild/build',
            'EASYBUILD_TMPDIR': self.directory / 'run/easybuild/tmp',
            'EASYBUILD_SOURCEPATH': f'{prefix}/sources:{self.central}', 'EASYBUILD_MODULES_TOOL': self.tool.name,
            'EASYBUILD_OUTPUT_STYLE': 'no_color', 'EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES': '1',
        }
        variables = {name: str(value) for name, value in variables.items()}
        env = {**clean_environ(), **self.tool.variables, **self.env, **variables, 'PYTHONPATH': str(self.bundle)}
        env['PATH'] = f'{easybuild.BIN}:{env["PATH"]}'
        command = f'{shlex.quote(str(easybuild.BIN))}/python -m slingtorch env --site lumi'
        script = f'commands=$({command}) && eval "$commands" && env -0'
        after = parse_env0(run(['bash', '--noprofile', '--norc', '-c', script], env=env, cwd='/').stdout)
        return {name: value for name, value in after.items() if name.startswith(('EASYBUILD_', 'SLINGTORCH_SITE'))}

    def bash(self, script, env=None, **options):
        """Run a bash script as a user who has just logged in: testbed.modulestools.ModulesTool.bash()."""
        env = {**self.env, **(env or {})}
        return self.tool.bash(script, modulepath=[self.modules / 'init'], env=env, **options)

    def environment(self, script):
        """The environment (a dictionary) after these commands."""
        marker = '---environment---'
        return parse_env0(self.bash(f'set -e\n{script}\necho {marker}\nenv -0').stdout.split(f'{marker}\n', 1)[1])


class Cluster(slurm.Cluster):
    """Two nodes of LUMI-G, 64 cores with two threads and 8 GPUs each: standard-g gives whole nodes, small-g parts."""

    def write_configuration(self):
        super().write_configuration()
        for number in range(8):
            gpu = self.dir / f'gpu{number}'
            if not gpu.is_symlink():
                gpu.symlink_to('/dev/null')
        self.edit('gres.conf', {r'gpu\[0-\d+\]': 'gpu[0-7]'})
        self.edit('slurm.conf', {
            r'\bCPUs=\d+': 'CPUs=128 Sockets=1 CoresPerSocket=64 ThreadsPerCore=2',
            r'\bGres=gpu:\d+': 'Gres=gpu:8',
            r'\bRealMemory=\d+': 'RealMemory=512000',
            r'\bPartitionName=.*': 'PartitionName=standard-g Nodes=ALL Default=YES OverSubscribe=EXCLUSIVE State=UP\n'
                                   'PartitionName=small-g Nodes=ALL State=UP',
        })

    def wait_for_nodes(self):
        # every node is listed once for each partition
        idle = ['idle'] * len(NODES)
        sinfo = ['sinfo', '-h', '-N', '-p', 'standard-g', '-o', '%T']
        slurm.wait(lambda: run(sinfo, env=self.env, check=False).stdout.split() == idle, 60,
                   'the nodes do not become idle', self.check_daemons)

    def edit(self, name, changes):
        """Replace text in a file of the configuration; each pattern must be there."""
        text = (self.dir / name).read_text()
        for pattern, replacement in changes.items():
            text, count = re.subn(pattern, replacement, text)
            assert count, f'{pattern} is not in {name}'
        (self.dir / name).write_text(text)
