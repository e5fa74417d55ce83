# SPDX-License-Identifier: GPL-2.0-only
"""
EasyBuild support for building the OFI plugin, through which NCCL and RCCL use libfabric, implemented as an easyblock.
"""
import glob
import os
import re

from easybuild.easyblocks.generic.configuremake import ConfigureMake
from easybuild.easyblocks.generic.keepsprevious import KeepsPrevious
from easybuild.tools import LooseVersion
from easybuild.tools.build_log import EasyBuildError
from easybuild.tools.config import build_option
from easybuild.tools.environment import setvar
from easybuild.tools.filetools import read_file, symlink, which, write_file
from easybuild.tools.modules import get_software_version
from easybuild.tools.run import run_shell_cmd
from easybuild.tools.systemtools import get_shared_lib_ext
from slingtorch.install.dependencies import dependency_root, run, with_parameters
from slingtorch.install.nccl import exported_apis, known_problems, misfit
from slingtorch.job.machine import OF_AN_MPI

# from m4/ and src/ of every release tag of aws/aws-ofi-nccl (v1.6.0 to v1.21.1)
FIRST_WITH_ROCM = '1.18.0'

# AMD's own plugin, from the time before aws-ofi-nccl supported ROCm
RCCL_PLUGIN = 'aws-ofi-rccl'

# what the plugin is built against, and options (--with-) for its prefix
COMPONENTS = {'libfabric': ['libfabric'], 'CUDA': ['cuda'], 'ROCm': ['rocm', 'hip', 'rccl'], 'hwloc': ['hwloc']}

# before ROCm 6, these had their own prefixes below that of ROCm
OWN_PREFIXES, SHARED_PREFIX_SINCE = ['hip', 'rccl'], '6'

# with '-isystem /usr/include' in front, '#include_next <stdlib.h>' of the C++ headers finds nothing
SYSTEM_PREFIXES = ['/', '/usr', '/usr/local']

# variable: the plain compiler, and compilers that add MPI to what they link (on a Cray also its GPU transport)
COMPILERS = {
    'CC': ('gcc', ['cc', 'mpicc', 'mpiicc', 'mpiicx']),
    'CXX': ('g++', ['CC', 'mpicxx', 'mpic++', 'mpiCC', 'mpiicpc', 'mpiicpx']),
}

# options of configure, in its help text and in configopts
OPTION_REGEX = re.compile(r'(?<!\S)--(?:with|without|enable|disable)-([\w-]+)')


class EB_aws_minus_ofi_minus_nccl(KeepsPrevious, ConfigureMake):
    """
    Support for building the OFI plugin of NCCL and RCCL: aws-ofi-nccl of all release lines since 1.6, and aws-ofi-rccl.

    The dependencies decide whether it is for NCCL or RCCL: CUDA or ROCm. A dependency may be an external module whose
    metadata has name and prefix. libfabric and hwloc may also be those of the operating system.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters of the plugin."""
        extra_vars = with_parameters(ConfigureMake.extra_options(extra_vars), {
            'libfabric_provider': [None, "Provider that libfabric must have, such as 'cxi' (None: do not check)"],
        })
        # see obtain_config_guess()
        extra_vars['build_type'][0] = extra_vars['host_type'][0] = False
        return extra_vars

    def __init__(self, *args, **kwargs):
        """Initialise; the module needs no variables for compiling, since nothing is linked with a plugin."""
        super().__init__(*args, **kwargs)
        for variable in ['CMAKE_PREFIX_PATH', 'CPATH', 'LIBRARY_PATH']:
            self.module_load_environment.remove(variable)

    @property
    def is_rccl_plugin(self):
        """Whether this is AMD's own plugin."""
        return self.name.lower() == RCCL_PLUGIN

    def obtain_config_guess(self, *args, **kwargs):
        """Download nothing: configure has its own config.guess."""

    def older_than(self, version):
        """Whether the version being built is older than this one."""
        return LooseVersion(self.version) < LooseVersion(version)

    def nccl_in_use(self):
        """Name and version of the NCCL or RCCL that will load the plugin, from its header; version None: unknown."""
        name, roots, header = 'NCCL', ['NCCL'], 'nccl.h'
        if self.gpu() == 'ROCm':
            name, roots, header = 'RCCL', ['RCCL', 'ROCm'], 'rccl/rccl.h'
        for path in [os.path.join(self.root(root), 'include', header) for root in roots if self.root(root)]:
            if os.path.isfile(path):
                numbers = dict(re.findall(r'^#define NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)', read_file(path), re.M))
                if len(numbers) == 3:
                    return name, '.'.join(numbers[part] for part in ['MAJOR', 'MINOR', 'PATCH'])
        return name, get_software_version(name)

    def root(self, name):
        """Prefix of a dependency, or None."""
        return dependency_root(self.cfg, name)

    def gpu(self):
        """GPU software of the plugin, from the dependencies: 'CUDA' or 'ROCm'."""
        found = [name for name in ['CUDA', 'ROCm'] if self.root(name)]
        if len(found) == 2:
            raise EasyBuildError("Both CUDA and ROCm are among the dependencies, but a plugin is for only one of them")
        return found[0] if found else 'ROCm' if self.is_rccl_plugin else 'CUDA'

    def prefix_of(self, name, needed=False):
        """Prefix of a component (see COMPONENTS), None if it is the system's; if needed, it must be a dependency."""
        root = self.root(name)
        if needed and not root and not self.dry_run:
            raise EasyBuildError("%s must be among the dependencies of %s %s. For an external module, "
                                 "its metadata must have the name %s and the prefix (eb option "
                                 "--external-modules-metadata)", name, self.name, self.version, name)
        return root if root and os.path.realpath(root) not in SYSTEM_PREFIXES else None

    def set_compilers(self):
        """Use plain compilers if $CC or $CXX names one that links MPI."""
        for variable, (plain, wrappers) in COMPILERS.items():
            if os.path.basename(os.getenv(variable) or '') in wrappers:
                setvar(variable, plain)

    def configure_options(self, known=None):
        """Options for configure that are known (None: all) and not in configopts; adds run paths to $LDFLAGS."""
        gpu = self.gpu()
        if gpu == 'ROCm' and not self.is_rccl_plugin and self.older_than(FIRST_WITH_ROCM):
            raise EasyBuildError("%s %s does not support ROCm: %s is the first release that does (before that, use "
                                 "aws-ofi-rccl)", self.name, self.version, FIRST_WITH_ROCM)
        options, ldflags, given = [], [], set(OPTION_REGEX.findall(self.cfg['configopts']))
        names = ['libfabric', gpu] + ['hwloc'] * (known is None or 'hwloc' in known)    # needed since 1.7.0
        for name in names:
            root = self.prefix_of(name, needed=name == gpu)
            version = get_software_version(name)
            apart = OWN_PREFIXES if name == 'ROCm' and version and LooseVersion(version) < SHARED_PREFIX_SINCE else []
            prefixes = {option: os.path.join(root or '', option) for option in apart}
            # configure searches for ROCm only on request
            options += [(option, '--with-%s=%s' % (option, prefixes.get(option) or root or 'yes'))
                        for option in COMPONENTS[name] if root or option == 'rocm']
            if root:
                # with a comma: EasyBuild's wrappers drop a '-rpath=' below /usr, such as /usr/local/cuda
                ldflags += ['-Wl,-rpath,%s' % libdir(prefix) for prefix in [root] + sorted(prefixes.values())]
        if self.root('CUDA') and not self.older_than('1.8.0') and self.older_than('1.9.1'):
            # these link the driver's library; a node without GPU has only a stub of it
            ldflags.append('-L%s/stubs' % libdir(self.root('CUDA')))
        options += [(option, '--disable-' + option) for option in ['platform-aws', 'tests']]
        setvar('LDFLAGS', ' '.join([os.getenv('LDFLAGS') or ''] + ldflags).strip())
        return [word for option, word in options if option not in given and (known is None or option in known)]

    def configure_step(self, *args, **kwargs):
        """Check everything possible before compiling, make the configure script if it is missing, and run it."""
        self.set_compilers()
        self.check_provider()
        name, version = self.nccl_in_use()
        for text in known_problems({self.name: self.version, name: version, 'ROCm': get_software_version('ROCm')}):
            self.warn(text)
        if not os.path.exists('configure') and not self.dry_run:
            # since 1.19 the version comes from git, possibly from an unrelated repository around the build directory
            write_file('.release_version', self.version + '\n')
            run_shell_cmd('sh ./autogen.sh')
        known = None if self.dry_run else set(
            OPTION_REGEX.findall(run_shell_cmd('./configure --help', hidden=True).output))
        options = self.configure_options(known)
        self.cfg['configopts'] = ' '.join(options + [self.cfg['configopts']]).strip()
        return super().configure_step(*args, **kwargs)

    def library_names(self):
        """Names of the plugin for any NCCL or RCCL (ROCm 7.2's needs libnccl-net.so) and for NCCL_NET_PLUGIN=ofi."""
        flavours = ['rccl', 'nccl'] if self.gpu() == 'ROCm' else ['nccl']
        ext = get_shared_lib_ext()
        return ['lib%s-%s.%s' % (flavour, name, ext) for flavour in flavours for name in ['net', 'net-ofi']]

    def post_processing_step(self):
        """Add names of the plugin that upstream's installation lacks."""
        super().post_processing_step()
        lib_dir = os.path.join(self.installdir, 'lib')
        built = glob.glob(os.path.join(glob.escape(lib_dir), 'lib[nr]ccl-net*.' + get_shared_lib_ext()))
        for path in [os.path.join(lib_dir, name) for name in self.library_names() if built]:
            if not os.path.lexists(path):
                symlink(os.path.basename(built[0]), path, use_abspath_source=False)

    def make_module_extra(self, *args, **kwargs):
        """Set the plugin's path: some releases of RCCL search for a different file name."""
        path = os.path.join(self.installdir, 'lib', self.library_names()[0])
        return super().make_module_extra(*args, **kwargs) + self.module_generator.set_environment(
            'NCCL_NET_PLUGIN', {'value': path, 'pushenv': True})

    def check_provider(self):
        """Check that the libfabric in use has the required provider, whatever NIC this node has."""
        provider, root = self.cfg['libfabric_provider'], self.root('libfabric')
        if not provider or self.dry_run:
            return
        fi_info = os.path.join(root, 'bin', 'fi_info') if root else which('fi_info', on_error='ignore')
        own = ['env', 'LD_LIBRARY_PATH=%s:%s' % (libdir(root), os.getenv('LD_LIBRARY_PATH', ''))] if root else []
        res = run(*own, fi_info or 'fi_info', '-l')
        providers = re.findall(r'^(\S+):\s*$', res.output, re.M)
        if res.exit_code or not providers:
            self.warn("Unknown whether libfabric has the provider '%s', which jobs need in order to use the "
                      "network: %s failed: %s", provider, res.cmd, res.output.strip())
        elif provider not in providers:
            raise EasyBuildError("The libfabric in use (%s) has no provider '%s', so jobs would not use the network. "
                                 "It has: %s. Make the libfabric of the network's vendor the dependency",
                                 root or fi_info, provider, ', '.join(providers))

    def check_library(self, path):
        """Check the symbols and linked libraries of the plugin with this path."""
        name, version = self.nccl_in_use()
        text = misfit(version, "the plugin", exported_apis(path))
        if text:
            raise EasyBuildError("%s %s cannot load %s: it %s. Use another release of the plugin (docs/easyconfigs.md "
                                 "has the table)", name, version, path, text)
        res = run('env', '-u', 'LD_LIBRARY_PATH', 'ldd', path)
        linked = dict(re.findall(r'^\s*(\S+) => (not found|\S+)', res.output, re.M))
        mpi = sorted(name for name in linked if OF_AN_MPI.match(name))
        if mpi:
            raise EasyBuildError("%s is linked with MPI (%s), so NCCL in programs without MPI could not load it. Build "
                                 "it without MPI modules and wrappers (module --force purge)", path, ', '.join(mpi))
        # only nodes with a GPU have the driver's libraries
        driver = build_option('filter_rpath_sanity_libs')
        absent = sorted(name for name in linked if linked[name] == 'not found' and name not in driver)
        if absent:
            raise EasyBuildError("%s needs %s, which cannot be found without $LD_LIBRARY_PATH, so it would not load "
                                 "without modules. Make what has it a dependency", path, ', '.join(absent))
        root = self.root('libfabric') or '/'
        found = [linked[name] for name in linked if name.startswith('libfabric.so')]
        real_root = os.path.realpath(root)
        if found and real_root not in SYSTEM_PREFIXES and not os.path.realpath(found[0]).startswith(real_root + os.sep):
            raise EasyBuildError("%s uses libfabric from %s instead of %s", path, found[0], root)

    def sanity_check_step(self, custom_paths=None, **kwargs):
        """Check names, symbols and linked libraries of the plugin."""
        names = [os.path.join('lib', name) for name in self.library_names()]
        path = os.path.join(self.installdir, names[0])
        # before EasyBuild's own checks, whose messages about the same faults tell less
        if os.path.exists(path) and not self.dry_run:
            self.check_library(path)
        super().sanity_check_step(custom_paths=custom_paths or {'files': names, 'dirs': []}, **kwargs)


def libdir(root):
    """Library directory below a prefix, as the plugin's configure script chooses it: lib64 if it exists."""
    return os.path.join(root, 'lib64' if os.path.isdir(os.path.join(root, 'lib64')) else 'lib')
