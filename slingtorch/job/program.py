# SPDX-License-Identifier: GPL-2.0-only
"""
Examines the program without running it: the script, its own modules, the paths that it reads, and variables. Rank 0
finds what differs between nodes.
"""
import contextlib
import errno
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import sys

from . import rules
from .kinds import Mapping, Optional, Report
from .syntax import ARGUMENTS, OUTPUT, Program, arguments_of, called, keywords, literal, read

# bytes at the beginning and the end of a file to compare, and entries of a directory at most
ENDS, LISTED = 64 << 10, 20000
# messages that a module or a library is missing
MISSING = 'No module named|cannot open shared object'
# files of Python and of packages that pip installs
INSTALLED = re.compile('.*/(site|dist)-packages/|<|%s/' % re.escape(os.path.dirname(os.__file__)))
# variables that name the rank or its place, so that they differ, or belong to the launcher
PER_RANK = re.compile(r'.*(RANK|LOCALID|PROCID|NODEID|HOST|NODE|VISIBLE|_PID)|(SLURM|PMI|PMIX|PALS|OMPI|MPI|HYDRA|PBS|'
                      r'SLINGTORCH|MASTER|TORCHELASTIC)_|(HOME|PWD|TMPDIR|TMP|TEMP|PATH)$', re.I)


def program_of(words: list) -> tuple:
    """
    ('script' or 'module', its name, its arguments, whether Python does not search its directory: -I, -P) from the words
    after 'python', options as in python(1); ('', '', [], ...) if neither.
    """
    words, isolated = list(words), False
    while words:
        word = words.pop(0)
        if word == '-c' or word == '-':
            break
        isolated = isolated or bool(re.match('-[a-zA-Z]*[IP]', word))
        if word == '-m' and words:
            return 'module', words[0], words[1:], isolated
        if word in ('-W', '-X', '--check-hash-based-pycs'):
            words = words[1:]
        elif word.startswith('-m') and len(word) > 2:
            return 'module', word[2:], words, isolated
        elif not word.startswith('-'):
            return 'script', word, words, isolated
    return '', '', [], isolated


def of_module(name: str) -> tuple:
    """
    (file that 'python -m NAME' runs, directory of its top-level package), found without importing a package; '' if it
    is not a file. :raises OSError: there is no such module
    """
    top, *rest = name.split('.')
    spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    with contextlib.suppress(ImportError, ValueError):
        # another finder may know it: that of an editable installation
        if not spec and not importlib.util.find_spec(top):
            raise FileNotFoundError(errno.ENOENT, 'no such module')
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        for path in (os.path.join(place, *rest, '__main__.py'), os.path.join(place, *rest) + '.py'):
            if os.path.isfile(path):
                return path, os.path.dirname(place)
    return (spec.origin, os.path.dirname(spec.origin)) if spec and spec.origin and not places else ('', '')


def load(words: list, environ: 'Mapping[str, str]') -> 'Optional[Program]':
    """
    The program that Python will run; None if it is installed, or an archive.

    :raises OSError: it is missing or cannot be read
    """
    kind, name, given, _ = program_of(words)
    place, top = of_module(name) if kind == 'module' else (os.path.realpath(name), '')
    if not place or os.path.isdir(place) or kind == 'module' and (INSTALLED.match(place) or not place.endswith('.py')):
        return None
    top = top or os.path.dirname(place)
    return Program({os.path.relpath(place, top): read(place)}, environ, given, place, top)


def check_layout(report: 'Report', program: 'Program', gpus: 'Optional[list]') -> None:
    """Compare the GPU that the script uses with those that the first rank of the node sees."""
    if gpus and len(gpus) < program.local and any(
            re.search(r'local_?(rank|id\b)', words, re.I) and not re.search('device_count|modulo', words)
            for words in map(program.words, program.gpu_numbers())):
        report.add('yellow', 'gpus', "the script uses the GPU with the number of its local rank, but each of the %d "
                   "ranks of this node sees only %d ('invalid device ordinal')" % (program.local, len(gpus)),
                   "let each rank see all GPUs: use srun --gpus-per-node=N instead of --gpus-per-task=1, and unset "
                   "SLINGTORCH_GPU_VISIBILITY")


def look_at_program(report: 'Report', words: list, details: dict, environ: 'Mapping[str, str]') -> None:
    """
    Whether the script or module exists, how it deals with ranks, and which GPU it uses. Rank 0 finds what differs
    between nodes.

    :param details: of look.look(): the GPUs that this rank sees
    """
    kind, name = program_of(words)[:2]
    try:
        program = load(words, environ) if name else None
    except OSError as err:
        report.add('red', 'script', "%s %s cannot be read on this node (%s)" % (
            'the script' if kind == 'script' else 'python -m', name, err.strerror),
            "put it on a file system that all nodes have, or start in its directory")
        return
    if not program:
        return
    first = next(iter(program.files))
    if not program.files[first].strip() and kind == 'script':
        report.add('red', 'script', "the script %s is empty on this node" % name, "see which copy each node has")
        return
    for path, content in program.files.items():
        report.fact('file %s' % (name if path == first else path), hashlib.sha256(content).hexdigest()[:12])
    wrong = program.wrong.get(first)    # the trial says it of modules
    if wrong and b'\0' not in program.files[first]:     # an archive (zipapp, PEX) is no text
        report.add('red', 'script', "%s is not valid for this Python (%d.%d): line %s: %s" % (
            first, *sys.version_info[:2], getattr(wrong, 'lineno', '?'), getattr(wrong, 'msg', wrong)),
            "run python -m py_compile %s to see the place" % first)
    check_layout(report, program, details.get('gpus'))
    rules.check(report, program, bool(details.get('gpus')))
    written, made, reads = program.paths()
    details['written'] = dict({path: program.where(node) for path, node in made.items() if path}, **written)
    details['made'] = {path: not (literal(keywords(node).get('exist_ok')) or program.optional(node)) or None
                       for path, node in made.items()}
    details['reads'] = [name for name in program.variables()
                        if not PER_RANK.match(name) and '/' not in environ.get(name, '')]
    look_at_reads(report, program, reads, set(details['written']))
    details['mpi'] = any(re.search(b'mpi4py|horovod|slingmpi', content) for content in program.files.values())
    details['compiles'] = any(map(rules.compiles, program.nodes))
    details['extension'] = any('cpp_extension' in one for one in program.imports)
    details['workers'] = any(called(node) == 'DataLoader' and word == 'num_workers' and literal(value) != 0
                             for node in program.calls for word, value in keywords(node).items())


def look_at_reads(report: 'Report', program: 'Program', reads: dict, written: set) -> None:
    """Note the contents of the paths that the program reads, for a comparison."""
    paths = {path for path in reads if path not in written and (os.path.isabs(path) or 'chdir' not in program.names)}
    for name in program.variables():
        value = program.environ.get(name, '')
        if os.path.isabs(value) and not PER_RANK.match(name) and not re.search('SCRATCH|CACHE|TMP|WORK', name) and not (
                OUTPUT.match(name) or any((path + '/').startswith(value.rstrip('/') + '/') for path in written)):
            paths.add(value)
    look_at_paths(report, 'named', sorted(path for path in paths if os.path.isabs(path) or '.' in
                                          os.path.basename(path) or os.path.exists(path))[:ARGUMENTS])


def look_at_arguments(report: 'Report', words: list) -> None:
    """The paths among the arguments of the script."""
    look_at_paths(report, 'argument', [value for option, value in arguments_of(program_of(words)[2])
                                       if value and '://' not in value and not OUTPUT.match(option)])


def listing(directory: str) -> str:
    """Names and file sizes in a directory, for a comparison, without files that a job writes."""
    found = []  # type: list
    with os.scandir(directory) as entries:
        for entry in entries:
            if len(found) < LISTED and not re.match(r'\.|tmp|.*\.(out|err|log|part|pyc)$|__pycache__$', entry.name):
                found.append('%s %s' % (entry.name, entry.stat().st_size if entry.is_file() else '/'))
    return 'a directory of %d, %s' % (len(found), hashlib.sha256('\0'.join(sorted(found)).encode(
        errors='replace')).hexdigest()[:12])


def contents(path: str) -> str:
    """Size, beginning and end of a file, for a comparison."""
    with open(path, 'rb') as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha256(stream.read(ENDS))
        stream.seek(max(0, size - ENDS))
        digest.update(stream.read(ENDS))
    return '%d bytes, %s' % (size, digest.hexdigest()[:12])


def look_at_paths(report: 'Report', kind: str, paths: list) -> None:
    """Record what each path has, for compare_programs(): contents() of a file, listing() of a directory."""
    for path in paths:
        try:
            os.stat(path)
            found = 'something else'
            if os.path.isdir(path):
                found = listing(path)
            elif os.path.isfile(path):
                found = contents(path)
        except (OSError, ValueError) as err:
            found = getattr(err, 'strerror', None) or 'no path'
        report.fact('%s %s' % (kind, path[:200]), found)


DIFFERS = {     # kind of a fact: (text, remedy)
    'module': ("nodes have different copies of the package %s: %s", "install one for all nodes; see PYTHONPATH"),
    'argument': ("%s, an argument, differs between nodes: %s", "put it on a file system that all nodes have"),
    'named': ("%s, which the program names, differs between nodes: %s", "put it on a file system that all nodes have"),
    'working': ("the nodes have a different working %s: %s", "start in one that all nodes have (srun --chdir)"),
}


def compare_programs(report: 'Report') -> None:
    """Scripts, own modules and arguments' files that differ between nodes."""
    looked = 0
    for name, values in report.facts.items():
        looked |= sum(values.values()) * name.startswith('file ')   # each rank has one value
    for fact, values in sorted(report.facts.items()):
        kind, _, name = fact.partition(' ')
        lack = looked & ~sum(values.values())
        fewest = min(values.values(), key=lambda mask: bin(mask).count('1'))
        if kind == 'file' and (len(values) > 1 or lack):
            report.add('red', 'script', "nodes have different copies of %s" % name if len(values) > 1 else
                       "these nodes lack %s, but others have it" % name, "put it on a file system that all nodes have",
                       fewest if len(values) > 1 else lack)
        elif kind in DIFFERS and len(values) > 1:
            text, remedy = DIFFERS[kind]
            report.add('yellow', 'script', text % (name, '; '.join(sorted(values)[:4])), remedy, fewest)


def check_imports(report: 'Report', trial: dict, details: dict) -> None:
    """
    Report what imports.py found.

    :param details: of look_at_program(): whether the program has a DataLoader with workers, and whether it uses MPI,
        which ends a process that is not one of its ranks
    """
    for name, what in trial.get('modules', {}).items():
        report.fact('module %s' % name, what)
    text, sure = trial.get('wrong') or ('', False)
    if trial.get('shadows'):
        report.add('yellow', 'script', "beside the script: %s: Python imports this instead of the module of this name "
                   "that PyTorch needs" % ', '.join(trial['shadows']), "rename it")
    for wrong, level, what in [(text, 'red' if sure and not (details.get('mpi') and 'ended the process' in text)
                                else 'yellow', "the script's imports fail")] * bool(text) + [
                                    (late, 'yellow', "the program fails later") for late in trial.get('late', ())]:
        report.add(level, 'script', "%s: %s" % (what, wrong),
                   "see what this module needs: no import may end the program" if re.search('end(s|ed) the pro', wrong)
                   else "install the missing package where all nodes see it, or start Python with the options that the "
                   "script needs" if re.search(MISSING, wrong) else "correct it, or use a release that has it")
    if trial.get('untested'):
        report.add('untested', 'script', "the imports from here on: %s writes, connects or starts a process" %
                   trial['untested'])
    if trial.get('worker') and not report.having('red', 'shm'):
        report.add('red' if details.get('workers') else 'yellow', 'worker',
                   "a worker of a DataLoader fails: %s" % trial['worker'],
                   "check TMPDIR, /dev/shm and the limits on this node")
