# SPDX-License-Identifier: GPL-2.0-only
"""
EasyBuild support for checking which libraries a process has that imported PyTorch: its MPI, NCCL and network plugin,
implemented as a base for easyblocks.
"""
import json
import os
import re
import shlex
import tempfile

from easybuild.framework.easyblock import EasyBlock
from easybuild.tools.build_log import EasyBuildExit, print_msg
from easybuild.tools.filetools import write_file
from easybuild.tools.run import run_shell_cmd

# file names of MPI libraries proper: not those of other languages' bindings, and not the GPU Transport Layer
MPI_LIBRARY_REGEX = re.compile(r'^libmpi(ch)?(_(?!gtl|cxx|mpifh|usempi|java)\w+)?\.so')


# prints libraries and settings of a process that imported PyTorch and the Python modules that are its arguments; it
# initialises neither MPI nor a GPU
PROBE = """
import importlib, importlib.metadata, json, sys, torch, torch.distributed as dist
errors = []
for name in sys.argv[1:]:
    try:
        if name == "mpi4py":
            importlib.import_module(name).rc.initialize = False
            name = "mpi4py.MPI"
        importlib.import_module(name)
    except Exception as err:
        errors.append("%s cannot be imported: %s" % (name, err))
nccl = dist.is_available() and dist.is_nccl_available()
lines = [line.split(None, 5) for line in open("/proc/self/maps")]
print("PROBE " + json.dumps({
    "file": torch.__file__,
    "version": str(torch.__version__),
    "config": torch.__config__.show(),
    "mpi": dist.is_available() and dist.is_mpi_available(),
    "nccl": nccl,
    "nccl_version": torch.cuda.nccl.version() if nccl else None,
    "import_errors": errors,
    "entry_points": sorted(point.name for point in importlib.metadata.distribution("torch").entry_points),
    "vision_cuda": torch.ops.torchvision._cuda_version() if "torchvision" in sys.modules else None,
    "libraries": sorted({line[5].strip() for line in lines if len(line) == 6 and ".so" in line[5]}),
}))
"""


class PyTorchProcess(EasyBlock):
    """
    Lets a process import the installed PyTorch and looks at it, for the sanity check of an easyblock.

    To be inherited from. Neither MPI nor a GPU is initialised: build nodes may lack both.
    """

    def check_pytorch_process(self, python, expected, modules=()):
        """
        Import PyTorch and compare the process with what it should be.

        :param python: path of the Python to do it with
        :param expected: function that returns the dictionary that check_linkage() describes
        :param modules: names of Python modules to import into the same process
        :return: list of what is wrong, each a sentence
        """
        # not where the sources are, which would be imported
        cmd = ' '.join(shlex.quote(word) for word in [python, '-c', PROBE] + list(modules))
        res = run_shell_cmd(cmd, fail_on_error=False, hidden=True, work_dir=tempfile.mkdtemp(), in_dry_run=False)
        if self.dry_run:
            return []
        found = re.search('^PROBE (.*)$', res.output, re.M)
        if not found:
            return ["PyTorch cannot be imported:\n%s" % '\n'.join(res.output.splitlines()[-8:])]
        process = json.loads(found.group(1))
        print_msg("a process that imports PyTorch has: %s" % describe_libraries(process), log=self.log,
                  silent=self.silent)
        return check_linkage(process, expected())


def describe_libraries(process):
    """
    What matters of a process for running on several nodes, for the user.

    :param process: what PROBE printed
    """
    texts = ["PyTorch %s" % process['version']]
    for what, regex in [('MPI', MPI_LIBRARY_REGEX), ('GPU Transport Layer', re.compile('libmpi_gtl')),
                        ('NCCL', re.compile(r'lib(nccl|rccl)\.so'))]:
        paths = {os.path.realpath(path) for path in process['libraries'] if regex.match(os.path.basename(path))}
        texts.append("%s %s" % (what, ' and '.join(sorted(paths)) or 'none'))
    return ', '.join(texts)


def check_linkage(process, expected):
    """
    Compare the libraries and settings of a process that imported PyTorch with what they should be.

    :param process: what PROBE printed
    :param expected: dictionary of version, prefix (of the installation), mpi, gtl (paths of libraries), nccl, plugin
                     (prefixes), nccl_version, and settings (names that must be on in torch.__config__); None: not
                     asked for, but for mpi, where it is wrong
    :return: list of what is wrong, each a sentence
    """
    wrong = list(process['import_errors'])
    real = {path: os.path.realpath(path) for path in process['libraries']}

    def below(path, prefix):
        return os.path.realpath(path).startswith(os.path.realpath(prefix) + os.sep)

    if not below(process['file'], expected['prefix']):
        wrong.append("PyTorch was imported from %s, not from the installation" % process['file'])
    if process['version'] != expected['version']:
        wrong.append("PyTorch says that it is %s, not %s" % (process['version'], expected['version']))
    if 'torchrun' not in process['entry_points']:
        # a build by PEP 517 may drop them, and with them backends that are loaded by name (pytorch#188488)
        wrong.append("PyTorch's entry points are not installed: torchrun is not among %s"
                     % (process['entry_points'] or 'them, there are none'))
    if 'USE_CUDA' in expected['settings'] and process['vision_cuda'] is not None and process['vision_cuda'] <= 0:
        wrong.append("torchvision was built without CUDA")
    for name in expected['settings']:
        if not re.search(r'\b%s=(ON|1)\b' % name, process['config']):
            wrong.append("torch.__config__ does not say %s=ON" % name)

    if not process['mpi']:
        wrong.append("torch.distributed has no MPI: CMake did not find it, which is only a warning in its output")
    mapped = sorted({path for path in real.values() if MPI_LIBRARY_REGEX.match(os.path.basename(path))})
    if not expected['mpi']:
        wrong.append("It cannot be told which MPI PyTorch should be linked with: MPI's compilers link nothing here, or "
                     "no library that is known as an MPI")
    elif expected['mpi'] not in mapped:
        wrong.append("PyTorch is not linked with the MPI that it was built for, %s, but with %s"
                     % (expected['mpi'], ' and '.join(mapped) or 'none'))
    for path in mapped:
        if path != expected['mpi'] and (expected['mpi'] or len(mapped) > 1):
            # the process maps libmpi.so.40.30.4 where a library needs libmpi.so.40
            users = [other for other in sorted(real) if any(os.path.basename(path).startswith(needed)
                                                            for needed in needed_libraries(other))]
            wrong.append("Another MPI is in the same process: %s, which %s needs"
                         % (path, ' and '.join(users) or 'no library of the process'))
    torch_libraries = [path for path in real if os.path.basename(path).startswith('libtorch')]
    needed = sum((needed_libraries(path) for path in torch_libraries), [])
    if not any(MPI_LIBRARY_REGEX.match(name) for name in needed):
        wrong.append("No library of PyTorch says that it needs MPI")

    if expected['gtl'] and os.path.realpath(expected['gtl']) not in real.values():
        wrong.append("The GPU Transport Layer %s is not in the process: MPI_Init would abort, or GPU buffers would "
                     "crash" % expected['gtl'])

    nccls = sorted({path for path in real.values() if re.match(r'lib(nccl|rccl)\.so', os.path.basename(path))})
    if expected['nccl']:
        if not process['nccl']:
            wrong.append("torch.distributed has no NCCL")
        if not any(below(path, expected['nccl']) for path in nccls):
            wrong.append("The NCCL in %s is not in the process: PyTorch uses %s" % (
                expected['nccl'], ' and '.join(nccls) or 'one that was compiled into it'))
        version = '.'.join(str(part) for part in process['nccl_version'] or [])
        if expected['nccl_version'] and version and version != expected['nccl_version']:
            wrong.append("NCCL says that it is %s, not %s" % (version, expected['nccl_version']))
        wrong += ["Another NCCL is in the same process: %s (from a Python package?)" % path for path in nccls
                  if not below(path, expected['nccl'])]
    if expected['plugin']:
        names = ['libnccl-net.so', 'librccl-net.so', 'libnccl-net-ofi.so', 'librccl-net-ofi.so']
        places = os.environ.get('LD_LIBRARY_PATH', '').split(os.pathsep) + [os.path.dirname(path) for path in nccls]
        plugins = [os.path.join(place, name) for place in places for name in names
                   if place and os.path.exists(os.path.join(place, name))]
        if not plugins or not below(plugins[0], expected['plugin']):
            wrong.append("NCCL would not take the network plugin in %s but %s: is its directory in $LD_LIBRARY_PATH?"
                         % (expected['plugin'], plugins[0] if plugins else 'none'))
    return wrong


def check_mpi4py(python, mpicc):
    """
    Compare the MPI in a process that imported mpi4py with that of MPI's compiler.

    :param python: path of the Python to import it with; MPI is not initialised
    :param mpicc: full path of MPI's compiler for C, or None where there is none
    :return: what is wrong, a sentence, or an empty string
    """
    code = 'import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI; print(open("/proc/self/maps").read())'
    res = run_shell_cmd('%s -s -c %s' % (shlex.quote(python), shlex.quote(code)), fail_on_error=False, hidden=True,
                        work_dir=tempfile.mkdtemp(), in_dry_run=True)
    if res.exit_code != EasyBuildExit.SUCCESS:
        return "mpi4py cannot be imported: %s" % '\n'.join(res.output.strip().splitlines()[-3:])
    expected = mpi_library(mpicc) if mpicc else None
    if not expected:
        return "It cannot be told which MPI mpi4py should be linked with: %s" % (
            "%s links none" % mpicc if mpicc else "MPI's compiler is not in $PATH")
    mapped = {os.path.realpath(path) for path in re.findall(r' (/\S+)$', res.output, re.M)
              if MPI_LIBRARY_REGEX.match(os.path.basename(path))}
    if mapped != {expected}:
        return "mpi4py uses %s, and was to be built with %s, whose MPI is %s" % (
            ' and '.join(sorted(mapped)) or 'no MPI', mpicc, expected)
    return ''


def needed_libraries(path):
    """Names of the libraries that a library or program says it needs."""
    res = run_shell_cmd('readelf -d %s' % shlex.quote(path), fail_on_error=False, hidden=True, in_dry_run=True)
    return re.findall(r'\(NEEDED\).*\[(.+)\]', res.output)


def mpi_library(mpicc):
    """
    The MPI library that a compiler wrapper links, as its real path; None if it cannot be told.

    The linker is asked, and not the loader: that would look into $LD_LIBRARY_PATH and its own directories first, where
    another MPI of the same file name may be.

    :param mpicc: full path of MPI's compiler for C
    """
    work_dir = tempfile.mkdtemp()
    source, library = os.path.join(work_dir, 'mpi.c'), os.path.join(work_dir, 'libmpitest.so')
    write_file(source, '#include <mpi.h>\nint init(int *argc, char ***argv) { return MPI_Init(argc, argv); }\n')
    # a library, as PyTorch's are: a program would have to find all that MPI's own libraries need
    res = run_shell_cmd('%s -shared -fPIC -Wl,--trace -o %s %s' % (shlex.quote(mpicc), library, source),
                        fail_on_error=False, hidden=True, in_dry_run=True)
    if res.exit_code != EasyBuildExit.SUCCESS:
        return None
    linked = {os.path.realpath(path) for path in re.findall(r'^(?:-l\S+ \()?(/[^\s()]+)', res.output, re.M)
              if MPI_LIBRARY_REGEX.match(os.path.basename(path))}
    # of those that the linker opened, the one that is really used
    needed = needed_libraries(library)
    for path in sorted(linked):
        if library_name(path) in needed:
            return path
    return None


def library_name(path):
    """The name by which a shared library is asked for."""
    res = run_shell_cmd('readelf -d %s' % shlex.quote(path), fail_on_error=False, hidden=True, in_dry_run=True)
    name = re.search(r'\(SONAME\).*\[(.+)\]', res.output)
    return name.group(1) if name else os.path.basename(path)
