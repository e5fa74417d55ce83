# SPDX-License-Identifier: GPL-2.0-only
"""
Functions of several easyblocks that check the libraries of a process with PyTorch: its MPI, NCCL and network plugin.

They initialise neither MPI nor a GPU, since build nodes may lack both.
"""
import json
import os
import re
import shutil
import tempfile
from typing import Any, Callable, List, Optional, Tuple

from easybuild.tools.build_log import EasyBuildError, print_msg
from easybuild.tools.config import build_option
from easybuild.tools.filetools import write_file
from slingtorch.install.dependencies import last_lines, run
from slingtorch.install.nccl import exported_apis, known_problems, misfit
from slingtorch.job.machine import MPI_LIBRARY, TRANSPORT_LAYER, Machine
from slingtorch.job.nccl import plugin_files

# Open MPI refuses to start as root or to start more ranks than cores
OPENMPI_SETTINGS = ['OMPI_%s=1' % name for name in
                    ['ALLOW_RUN_AS_ROOT', 'ALLOW_RUN_AS_ROOT_CONFIRM', 'MCA_rmaps_base_oversubscribe']]

NCCL_LIBRARY = re.compile(r'lib(nccl|rccl)\.so')

# prints libraries and settings of a process that imports PyTorch and the Python modules in its arguments
PROBE = """
import ctypes, importlib, importlib.metadata, json, re, sys, torch, torch.distributed as dist
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
libraries = sorted({line[5].strip() for line in lines if len(line) == 6 and ".so" in line[5]})
nccls = {}
for path in libraries:
    if re.search("/lib[nr]ccl[.]so[^/]*$", path):
        number = ctypes.c_int()
        getattr(ctypes.CDLL(path), "ncclGetVersion", lambda number: None)(ctypes.byref(number))
        nccls[path] = number.value
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
    "cuda": torch.version.cuda,
    "hip": getattr(torch.version, "hip", None),
    "libraries": libraries,
    "nccls": nccls,
}))
"""


def run_elsewhere(*words: str) -> Any:
    """Run a command, but not in the directory of the sources, from which Python would import."""
    return run(*words, work_dir=tempfile.mkdtemp())


def probe_pytorch(python: str, modules: Any = ()) -> Any:
    """The dictionary that PROBE prints after importing PyTorch and these modules, or a text why it cannot import."""
    res = run_elsewhere(python, '-s', '-c', PROBE, *modules)
    found = re.search('^PROBE (.*)$', res.output, re.M)
    return json.loads(found.group(1)) if found else "PyTorch cannot be imported:\n" + last_lines(res.output)


def real_libraries(paths: Any, kind: Any) -> List[str]:
    """Real paths of the libraries among these whose file name matches."""
    return sorted({os.path.realpath(path) for path in paths if kind.match(os.path.basename(path))})


def describe_libraries(process: Any) -> str:
    """A text for the user: the libraries of a process (from PROBE) that matter on several nodes."""
    texts = ["PyTorch %s" % process['version']]
    for what, kind in [('MPI', MPI_LIBRARY), ('GPU Transport Layer', TRANSPORT_LAYER), ('NCCL', NCCL_LIBRARY)]:
        texts.append("%s %s" % (what, ' and '.join(real_libraries(process['libraries'], kind)) or 'none'))
    return ', '.join(texts)


def check_linkage(process: Any, expected: Any) -> List[str]:
    """Sentences about what is wrong with a process that imported PyTorch, as PROBE printed it.

    :param expected: from EB_PyTorch_Cray.expectations(); None means not required, except for mpi, where it is wrong
    """
    wrong = list(process['import_errors'])
    real = {path: os.path.realpath(path) for path in process['libraries']}

    def below(path, prefix):
        return os.path.realpath(path).startswith(os.path.realpath(prefix) + os.sep)

    if not below(process['file'], expected['prefix']):
        wrong.append("PyTorch was imported from %s, not from the installation" % process['file'])
    if process['version'] != expected['version']:
        wrong.append("PyTorch reports the version %s, not %s" % (process['version'], expected['version']))
    if 'torchrun' not in process['entry_points']:
        # a PEP 517 build may drop them, and with them backends that are loaded by name (pytorch#188488)
        wrong.append("PyTorch's entry points are not installed: torchrun is not among %s"
                     % (process['entry_points'] or 'them, there are none'))
    if 'USE_CUDA' in expected['settings'] and process['vision_cuda'] is not None and process['vision_cuda'] <= 0:
        wrong.append("torchvision was built without CUDA")
    for name in expected['settings']:
        if not re.search(r'\b%s=(ON|1)\b' % name, process['config']):
            wrong.append("torch.__config__ does not contain %s=ON" % name)

    if not process['mpi']:
        wrong.append("torch.distributed has no MPI: CMake did not find MPI, and its output only shows a warning")
    mapped = real_libraries(real.values(), MPI_LIBRARY)
    if not expected['mpi']:
        wrong.append("It is unknown which MPI PyTorch should have, because MPI's compilers link no known MPI")
    elif expected['mpi'] not in mapped:
        wrong.append("PyTorch is not linked with the MPI that it was built for, %s, but with %s"
                     % (expected['mpi'], ' and '.join(mapped) or 'none'))
    for path in mapped:
        if path != expected['mpi'] and (expected['mpi'] or len(mapped) > 1):
            # the process maps libmpi.so.40.30.4 where a library needs libmpi.so.40
            users = [other for other in sorted(real) if any(os.path.basename(path).startswith(needed)
                                                            for needed in needed_libraries(other))]
            wrong.append("The process has another MPI, too: %s, needed by %s"
                         % (path, ' and '.join(users) or 'no library of the process'))
    torch_libraries = [path for path in real if os.path.basename(path).startswith('libtorch')]
    needed = sum((needed_libraries(path) for path in torch_libraries), [])
    if not any(MPI_LIBRARY.match(name) for name in needed):
        wrong.append("No library of PyTorch is linked with MPI")

    if expected['gtl'] and os.path.realpath(expected['gtl']) not in real.values():
        wrong.append("The GPU Transport Layer %s is not in the process: MPI_Init would abort, or GPU buffers would "
                     "crash" % expected['gtl'])

    nccls = real_libraries(real.values(), NCCL_LIBRARY)
    if expected['nccl']:
        if not process['nccl']:
            wrong.append("torch.distributed has no NCCL")
        if not any(below(path, expected['nccl']) for path in nccls):
            wrong.append("The NCCL in %s is not in the process: PyTorch uses %s" % (
                expected['nccl'], ' and '.join(nccls) or 'one that was compiled into it'))
        version = '.'.join(str(part) for part in process['nccl_version'] or [])
        if expected['nccl_version'] and version and version != expected['nccl_version']:
            wrong.append("NCCL reports the version %s, not %s" % (version, expected['nccl_version']))
        wrong += ["The process has another NCCL, too: %s (from a Python package?)" % path for path in nccls
                  if not below(path, expected['nccl'])]
    if expected['plugin']:
        plugin = find_plugin(nccls)
        if not plugin or not below(plugin, expected['plugin']):
            wrong.append("NCCL would use %s instead of the network plugin in %s: is that directory in $LD_LIBRARY_PATH?"
                         % (plugin or 'no plugin', expected['plugin']))
    return wrong


def find_plugin(nccls: Any) -> Optional[str]:
    """Path of the network plugin that one of these NCCLs (paths) would probably load, or None."""
    places = [os.environ.get('LD_LIBRARY_PATH', '')] + [os.path.dirname(path) for path in nccls]
    return next(iter(plugin_files(Machine(dict(os.environ, LD_LIBRARY_PATH=':'.join(places))))), None)


def check_wheel(process: Any, versions: Any) -> Tuple[List[str], List[str]]:
    """Check that NCCL or RCCL of an installed wheel, the network plugin, and CUDA or ROCm fit each other.

    :param versions: {'CUDA', 'ROCm' or name of the plugin: version of the dependency}
    :return: two lists of sentences: what is wrong, and known problems of these releases
    """
    wrong = []
    kind, name = ('ROCm', 'RCCL') if process['hip'] else ('CUDA', 'NCCL')
    own = process['hip'] or process['cuda']
    if not own or not process['nccls']:
        return ["PyTorch in this environment is a CPU build without NCCL: the lock file names the wrong wheel "
                "(+cpu?)"], []
    nccls = {os.path.realpath(path): number for path, number in process['nccls'].items()}
    if len(nccls) > 1:
        wrong.append("The process has two %s libraries, each with its own network: %s. Remove one of the packages from "
                     "the lock file" % (name, ' and '.join(sorted(nccls))))
    number = min(nccls.values())
    nccl_version = '%d.%d.%d' % (number // 10000, number // 100 % 100, number % 100) if number else None

    def compare(what, other):
        if other and other.split('.')[0] != own.split('.')[0]:
            wrong.append("The PyTorch wheel is for %s %s, but %s is for %s %s: the major versions must be the same"
                         % (kind, own, what, kind, other))

    compare("the module among the dependencies", versions.get(kind))
    plugin = find_plugin(nccls)
    if not plugin:
        return wrong + ["%s would find no network plugin: $LD_LIBRARY_PATH has no directory with one, and "
                        "$NCCL_NET_PLUGIN is not set to one. Does the plugin's module set them?" % name], []
    for major in re.findall(r'^lib(?:cudart|amdhip64)\.so\.(\d+)', '\n'.join(needed_libraries(plugin)), re.M):
        compare("the plugin %s" % plugin, major)
    text = misfit(nccl_version, "the plugin " + plugin, exported_apis(plugin))
    if text:
        wrong.append("%s %s of the wheel %s: use another release of the plugin (docs/easyconfigs.md has the table)"
                     % (name, nccl_version, text))
    return wrong, known_problems(dict(versions, **{name: nccl_version, kind: own}))


def check_mpi(python: str, mpicc: str, name: str, code: str) -> str:
    """A sentence, or '', about what is wrong with the MPI of a process that ran this code, compared with mpicc's."""
    res = run_elsewhere(python, '-s', '-c', code + '; print(open("/proc/self/maps").read())')
    if res.exit_code:
        return "%s cannot be imported: %s" % (name, last_lines(res.output))
    expected = mpi_library(mpicc) if mpicc else None
    if not expected:
        return "It is unknown which MPI %s should be linked with: %s" % (
            name, "%s links no known MPI" % mpicc if mpicc else "MPI's compiler is not in $PATH")
    mapped = real_libraries(re.findall(r' (/\S+)$', res.output, re.M), MPI_LIBRARY)
    if mapped != [expected]:
        return "%s uses %s, but should have been built with %s, whose MPI is %s" % (
            name, ' and '.join(mapped) or 'no MPI', mpicc, expected)
    return ''


def launcher_name(compiler: str) -> str:
    """Path of the launcher of MPI's compiler (mpiexec beside mpicc or mpicxx); '' for one without, such as cc."""
    directory, name = os.path.split(compiler)
    launcher = re.sub(r'mpi(cc|cxx|CC|c\+\+)', 'mpiexec', name)
    return os.path.join(directory, launcher) if launcher != name else ''


def mpi_launcher(compiler: str) -> Optional[str]:
    """Path of the launcher of MPI's compiler (full path), or None if there is none."""
    # resolve links: hydra looks for its helpers in the directory by which it is called
    return shutil.which(os.path.realpath(launcher_name(compiler)))


def check_two_ranks(what: str, launcher: Optional[str], words: Any, run_there: Callable = run_elsewhere) -> List[str]:
    """Start a program (its words) on 2 ranks, if eb may start ranks; sentences about what is wrong.

    :param launcher: full path, or None to start nothing
    :param run_there: function that runs a command
    """
    if not launcher or not build_option('mpi_tests'):
        return []
    done = run_there('env', *OPENMPI_SETTINGS, launcher, '-n', '2', *words)
    if done.exit_code:
        return ["%s on 2 ranks failed. If %s is not allowed, as on a login node, add --disable-mpi-tests. The output "
                "is:\n%s" % (what, launcher, last_lines(done.output + (done.stderr or '')))]
    print_msg("an all_reduce on 2 ranks gives the right result (%s)", launcher, silent=build_option('silent'))
    return []


def archs(cfg: Any, parameter: str) -> Any:
    """GPU architectures to build for, from the option of eb or the easyconfig parameter with that name."""
    return build_option(parameter) or cfg[parameter]


def gtl_library(cfg: Any) -> Optional[str]:
    """
    Full path of the GPU Transport Layer, or None if the easyconfig does not want it (mpi_gtl): Cray MPICH does not move
    GPU buffers without it, and its mpicc does not link it.
    """
    kind = cfg['mpi_gtl']
    if not kind:
        return None
    if kind not in ['cuda', 'hsa']:
        raise EasyBuildError("Easyconfig parameter mpi_gtl is '%s', but must be 'cuda', 'hsa', or None", kind)
    maker, parameter, what = {'cuda': ('nvidia', 'cuda_compute_capabilities', 'CUDA compute capabilities'),
                              'hsa': ('amd_', 'amdgcn_capabilities', 'AMD GPU architectures')}[kind]
    variables = ['PE_MPICH_GTL_DIR_' + maker + arch.replace('.', '') for arch in archs(cfg, parameter)]
    if not variables:
        raise EasyBuildError("List of %s must be specified: parameter %s, or option of eb", what, parameter)
    values = [os.environ[variable] for variable in variables if os.environ.get(variable)]
    if not values:
        raise EasyBuildError("mpi_gtl = '%s' needs the GPU Transport Layer, but no loaded module sets its directory: "
                             "%s not set. Is cray-mpich among the dependencies? Otherwise set the variable to the "
                             "directory of libmpi_gtl_%s.so (in Cray's own layout: gtl/lib in the directory of "
                             "cray-mpich's version)", kind, ' and '.join('$' + name for name in variables), kind)
    directory = re.sub('^-L', '', values[0].split()[0])
    library = os.path.join(directory, 'libmpi_gtl_%s.so' % kind)
    if not os.path.exists(library):
        raise EasyBuildError("The GPU Transport Layer %s does not exist. Load the cray-mpich module of this system, or "
                             "correct $PE_MPICH_GTL_DIR_*", library)
    return library


def gtl_flags(gtl: Optional[str], cuda: Any) -> List[str]:
    """Flags that link every library with the GPU Transport Layer (full path, or None); cuda: its directory, or None."""
    if not gtl:
        return []
    name = re.sub(r'^lib|\.so$', '', os.path.basename(gtl))
    # the executable is python, so the package's own libraries must load it: do not drop it as unneeded
    flags = ['-Wl,--no-as-needed', '-L' + os.path.dirname(gtl), '-l' + name, '-Wl,-rpath,' + os.path.dirname(gtl),
             '-Wl,--allow-shlib-undefined']
    if cuda and not any(needed.startswith('libcudart') for needed in needed_libraries(gtl)):
        # that of cray-mpich 8.1.27 does not list the libraries that it needs (eth-cscs/stackinator#158)
        lib_dir = os.path.join(cuda, 'lib64')
        flags += ['-L' + lib_dir, '-lcudart', '-Wl,-rpath,' + lib_dir, '-L' + lib_dir + '/stubs', '-lcuda']
    return flags


def run_path_flags(library: str) -> List[str]:
    """Flags to find MPI's library at run time, unless it is the system's.

    Without them a job might use the MPI of the default programming environment. RPATH, not RUNPATH, because only RPATH
    also applies to libraries that are opened later, such as NCCL's plugin.
    """
    directory = os.path.dirname(library)
    return ['-Wl,--disable-new-dtags', '-Wl,-rpath,' + directory] if not re.match(r'^/(usr/)?lib', directory) else []


def needed_libraries(path: str) -> List[str]:
    """Names of the libraries that a library or program needs."""
    return dynamic_entries(path, 'NEEDED')


def mpi_library(mpicc: str) -> Optional[str]:
    """Real path of the MPI library that a compiler wrapper (full path) links; None if unknown.

    This uses the linker, not the loader: the loader would search $LD_LIBRARY_PATH and its own directories first, which
    may have another MPI with the same file name.
    """
    work_dir = tempfile.mkdtemp()
    source, library = os.path.join(work_dir, 'mpi.c'), os.path.join(work_dir, 'libmpitest.so')
    write_file(source, '#include <mpi.h>\nint init(int *argc, char ***argv) { return MPI_Init(argc, argv); }\n')
    # a library, like PyTorch's: a program would have to find everything that MPI's own libraries need
    res = run(mpicc, '-shared', '-fPIC', '-Wl,--trace', '-o', library, source)
    if res.exit_code:
        return None
    linked = real_libraries(re.findall(r'^(?:-l\S+ \()?(/[^\s()]+)', res.output, re.M), MPI_LIBRARY)
    # the one that is really used, of all that the linker opened
    needed = needed_libraries(library)
    return next((path for path in linked if (dynamic_entries(path, 'SONAME') or [os.path.basename(path)])[0] in needed),
                None)


def dynamic_entries(path: str, kind: str) -> List[str]:
    """Entries of a kind ('NEEDED', or several separated by '|') in the dynamic section of a library or program."""
    return re.findall(r'\((?:%s)\).*\[(.+)\]' % kind, run('readelf', '-d', path).output)
