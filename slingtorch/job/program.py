# SPDX-License-Identifier: GPL-2.0-only
"""
Examines the program without running it: the script, its own modules, files that it reads, outputs and variables. Rank 0
finds what differs between nodes.
"""
import ast
import contextlib
import hashlib
import os
import re
import sys
import time

from . import rules
from .kinds import Any, Machine, Mapping, Optional, Report
from .machine import SHARED
from .rules import Program, beginning, keywords, literal, named, read

# bytes at the beginning and the end of a file to compare; words of a command line, and files, that are examined at most
ENDS, MOST = 64 << 10, 50
# options that name what a program writes
OUTPUT = re.compile(r'-o$|-{0,2}(\w+\.)*(out|save|log|ckpt|checkpoint|work_?dir|run_?dir|results?)[\w.-]*$', re.I)
# files of Python and of packages that pip installs
INSTALLED = re.compile('.*/(site|dist)-packages/|<|%s/' % re.escape(os.path.dirname(os.__file__)))
# texts that are perhaps paths of files
PATH = re.compile(r'(?!/(dev|proc|sys)/)(?=[^./]*[./])[\w./-]{2,200}$')
# seconds for counting what the directories of the arguments have
DEEP = 2
# an absolute path in a JSON or YAML file, and its key
IN_FILE = re.compile(r"""(?:([\w.-]+)["']?[ \t]*:[ \t]*|[\[,\s-])["']?(/(?!/|(?:dev|proc|sys)/)[\w./-]{2,200})""")
# calls that read what a path names, and those that make a path of others
READS = re.compile(r'(.*\.)?(open|load\w*|read\w*|\w+read|listdir|scandir|i?glob|\w+Folder|from_pretrained)$')
ASKS = re.compile(r'(.*\.)?(exists|is_?(file|dir))$')
JOINS = re.compile(r'(.*\.)?(join|Path|str)$')
# torch.compile, also as a decorator, but for an eager backend, and model.compile()
COMPILES = rb'torch\.compile\b(?!.*eager)|\.compile\(\)'


def program_of(words: list) -> tuple:
    """
    ('script' or 'module', its name, its arguments) from the words after 'python', options as in python(1); ('', '', [])
    if neither.
    """
    words = list(words)
    while words:
        word = words.pop(0)
        if word in ('-c', '-'):
            break
        if word.startswith('-m') and (len(word) > 2 or words):
            return 'module', word[2:] or words.pop(0), words
        if word in ('-W', '-X', '--check-hash-based-pycs'):
            words = words[1:]
        elif not word.startswith('-'):
            return 'script', word, words
    return '', '', []


def load(words: list, environ: 'Mapping[str, str]') -> 'Optional[Program]':
    """The program that Python will run; None if it is installed, or no file. :raises OSError: it cannot be read"""
    kind, name, given = program_of(words)
    if kind == 'script' and not os.path.isdir(name):
        path = os.path.realpath(name)   # Python, too, follows a link
        return Program(read(path), environ, given, path, os.path.dirname(path))
    for top in (os.getcwd(), *sys.path) if kind == 'module' else ():
        for end in ('/__main__.py', '.py'):
            path = os.path.join(top, *name.split('.')) + end
            if os.path.isfile(path):
                return None if INSTALLED.match(path) else Program(read(path), environ, given, path, top)
    return None


def arguments_of(words: list) -> list:
    """[(option or '', value)] of a command line, if its options are written in one of the usual ways."""
    found, option = [], ''
    for word in words[:MOST]:
        key, equals, value = word.partition('=')
        if equals and re.match(r'-{0,2}[\w.-]+$', key):
            found.append((key, value))
        elif not word.startswith('-'):
            found.append((option, word))
        option = word if word.startswith('-') else ''
    return found


def outputs(program: 'Program') -> dict:
    """{path to write to, of an option or its default: (the option, whether it must be a directory)}, or that of '.'"""
    found = {value: option for option, value in arguments_of(program.given) if OUTPUT.match(option)}
    for call in program.calls.get('add_argument', ()):
        options, default = [str(literal(part)) for part in call.args], literal(keywords(call).get('default'))
        if isinstance(default, str) and any(map(OUTPUT.match, options)) and not set(options) & set(found.values()):
            found[default] = options[-1]
    made = {getattr(part, 'attr', getattr(part, 'id', '')) for name in ('makedirs', 'mkdir')
            for call in program.calls.get(name, ()) for part in ast.walk(call)}
    return {path: (option, option.lstrip('-').replace('-', '_').rpartition('.')[2] in made)
            for path, option in found.items()
            if not re.match('/dev/|.*://', path) and ('/' in path or os.path.isdir(path))} or {
                '.': ('the working directory', False)}


def unmade(program: 'Program') -> list:
    """Files that the program writes into directories that do not exist: [(node, path)]; not those that it may make."""
    texts, found = set(map(literal, program.nodes)), []
    for node in [*program.calls.get('save', ()), *program.calls.get('open', ())]:
        paths = [beginning(program.meant(word)) for word in [*node.args, *keywords(node).values()]]
        path = next((one for one in paths if '/' in one and '://' not in one), '')
        tries = any(isinstance(above, ast.Try) for above in program.around(node))
        called = getattr(program.function(node), 'name', '') in {'', *program.used}
        if path and re.match('(torch|np|numpy)[.]save$|open$', named(node)) and use_of(program, node) == 'other' and \
                called and not tries and not program.turned_off(node) and not os.path.exists(os.path.dirname(path)) \
                and os.path.dirname(path) not in texts:
            found.append((node, path))
    return found if not program.mentions(rb'mkdir|makedirs|copytree|chdir|hydra|SummaryWriter') else []


def uses(program: 'Program') -> dict:
    """
    {text in the program: what calls do that get it, also by a name or as part of a path}: 'read', 'ask' whether it is
    there, without an end of the program if not, or 'other'; rank 0 may read for all
    """
    names = {node.targets[0].id: of_environment(program, node.value) or literal(node.value) for node in program.nodes
             if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}
    found = {}  # type: dict
    for call in [one for calls in program.calls.values() for one in calls if not JOINS.match(named(one))]:
        use = use_of(program, call)
        given = [getattr(call.func, 'value', None), *call.args, *keywords(call).values()]   # Path('a').exists()
        for part in (inner for word in given for inner in [word, *joined(word)]):
            text = literal(part) or names.get(named(part)) or of_environment(program, part)
            if isinstance(text, str):
                found.setdefault(text, set()).add(use)
    return found


def of_environment(program: 'Program', node: 'Any') -> 'Optional[str]':
    """The value of a variable that an expression reads: os.environ['A'], os.environ.get('A'), os.getenv('A')."""
    word = None     # type: Any
    if isinstance(node, ast.Subscript) and named(node.value).endswith('environ'):
        word = node.slice
    elif isinstance(node, ast.Call) and node.args and re.match(r'(.*\.)?(environ\.get|getenv)$', named(node)):
        word = node.args[0]
    return program.environ.get(str(literal(word)))


def use_of(program: 'Program', call: 'ast.Call') -> str:
    """What a call does with a path: see uses()."""
    mode = literal(keywords(call).get('mode') or (call.args + [None, None])[1])
    if ASKS.match(named(call)):
        statement = next(above for above in program.around(call) if isinstance(above, ast.stmt))
        ends = any(isinstance(one, (ast.Raise, ast.Assert)) or rules.EXITS.match(named(one))
                   for one in ast.walk(statement))
        return 'read' if ends else 'ask'
    if not READS.match(named(call)) or named(call).endswith('open') and re.search('[wax+]', str(mode)):
        return 'other'
    return 'other' if program.by_rank(call) else 'read'


def compiles(program: 'Program') -> bool:
    """Whether the program uses torch.compile, and not only for an option that is not given."""
    calls = [call for call in program.calls.get('compile', ()) if named(call) != 're.compile']
    return program.mentions(COMPILES) and not (calls and all(map(program.turned_off, calls)))


def downloads(program: 'Program') -> list:
    """Calls that fetch data or weights from the internet, unless for an option that is not given."""
    offline = '1' in (program.environ.get('HF_HUB_OFFLINE'), program.environ.get('TRANSFORMERS_OFFLINE'))
    hub = ('from_pretrained', 'load_dataset', 'snapshot_download', 'hf_hub_download') if not offline else ()
    found = [call for calls in program.calls.values() for call in calls if literal(keywords(call).get('download'))]
    for name in (*hub, 'urlretrieve', 'load_state_dict_from_url'):
        own = any(isinstance(one, rules.FUNCTIONS) for one in program.stored.get(name, ()))
        for call in program.calls.get(name, ()) if not own else ():
            what = beginning((call.args + [None])[0])
            if name not in hub[:2] or re.match(r'[\w.-]+(/[\w.-]+)?$', what) and not os.path.exists(what):
                found.append(call)
    return [call for call in found if not program.turned_off(call)]


def joined(node: 'Any') -> list:
    """The parts of a path that a call, an f-string or the operators / and + join."""
    if isinstance(node, (ast.BinOp, ast.JoinedStr)):
        return list(ast.walk(node))
    return getattr(node, 'args', []) if JOINS.match(named(node)) else []


def look_at_program(machine: 'Machine', report: 'Report', details: dict) -> None:
    """Report what is wrong with the script on this node; note in `details` what it writes and needs."""
    name = program_of(details['words'])[1]
    try:
        program = load(details['words'], machine.environ)
    except OSError as err:
        report.add('red', 'script', "the script %s cannot be read on this node (%s)" % (name, err.strerror),
                   "put it on a file system that all nodes have, or start in its directory")
        return
    report.fact('program', name)
    if not program:
        return
    for path, content in program.files.items():
        report.fact('file ' + (name if path == program.first else path), hashlib.sha256(content).hexdigest()[:12])
    for path, wrong in program.wrong.items():
        # an archive (zipapp, PEX) is no text; Python runs expressions that are too deep for ast.parse()
        if isinstance(wrong, (SyntaxError, ValueError)) and b'\0' not in program.files[path]:
            shown = name if path == program.first else path
            # the program need not come to the import of a module
            report.add('red' if path == program.first else 'yellow', 'script',
                       "%s is not valid for this Python (%d.%d): line %s: %s" % (
                           shown, *sys.version_info[:2], getattr(wrong, 'lineno', '?'), getattr(wrong, 'msg', wrong)),
                       "run python -m py_compile %s to see the place" % shown)
    rules.check(report, program, details.get('gpus'))
    for call in downloads(program)[:1] if not machine.reaches_internet() else ():
        report.add('yellow', 'program', "%s: downloads what is not there yet, but this node has no route to the "
                   "internet and no proxy" % program.where(call), "download on a login node before the job, and export "
                   "HF_HUB_OFFLINE=1 for what comes from Hugging Face; or set https_proxy")
    for node, path in unmade(program):
        report.add('yellow', 'disk', "%s: writes to %s, but there is no directory %s, and the program makes none" % (
            program.where(node), path, os.path.dirname(path)), "create it before the job")
    details['written'] = outputs(program)
    details['compiles'] = compiles(program)
    details['extends'] = program.mentions(rb'cpp_extension(\.| import .*)\bload')
    details['saves'] = program.mentions(rb'torch\.save\(')
    details['workers'] = program.mentions(rb'num_workers\s*=(?!\s*0\b)')
    used = uses(program)
    read = {text for text in used if used[text] == {'read'}}
    texts = {text for text in map(literal, program.nodes) if isinstance(text, str) and PATH.match(text)}
    texts -= {text for text in used if 'ask' in used[text]} | set(details['written'])
    # what else lies in /tmp may be what another run has left
    look_at_paths(report, [text for text in sorted(texts) if text in read or (
        os.path.isabs(text) or os.path.isfile(text)) and not text.startswith('/tmp/')][:MOST])
    # what variables name may have more than the program reads
    look_at_paths(report, sorted(filter(PATH.match, read - set(map(literal, program.nodes))))[:MOST], False)


def look_at_arguments(machine: 'Machine', report: 'Report', details: dict) -> None:
    """The paths among the arguments of the script, those in files of arguments, and what directories of a node have."""
    paths = [value for option, value in arguments_of(program_of(details['words'])[2])
             if value and '://' not in value and not OUTPUT.match(option)]
    inside = [path for name in paths if re.search(r'\.(json|ya?ml)$', name)
              for key, path in IN_FILE.findall(machine.read(os.path.abspath(name))) if not OUTPUT.match(key)]
    look_at_paths(report, [*paths, *inside][:MOST])
    end = time.monotonic() + DEEP
    for path in paths:
        if os.path.isdir(path) and machine.mount_of(os.path.realpath(path))[1] not in SHARED:
            files, size = files_below(path, end)
            if time.monotonic() < end:
                report.fact('path %s, three levels deep' % path[:200], '%d files of %d bytes' % (files, size))


def files_below(path: str, end: float, levels: int = 3) -> tuple:
    """The number of files on so many levels of a directory, and their bytes; of some until the time `end`."""
    count = size = 0
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if time.monotonic() > end:
                break
            if entry.is_dir():
                more = files_below(entry.path, end, levels - 1) if levels > 1 else (0, 0)
                count, size = count + more[0], size + more[1]
            else:
                count, size = count + 1, size + entry.stat(follow_symlinks=False).st_size
    return count, size


def look_at_paths(report: 'Report', paths: list, count: bool = True) -> None:
    """
    Note what each path has, for compare_programs(): size, beginning and end of a file; of a directory, if it is to
    `count` them, the number of entries.
    """
    for path in paths:
        found = 'no file' if os.path.exists(path) else 'missing'
        try:
            if os.path.isdir(path):
                found = 'a directory' + ' of %d' % len(os.listdir(path)) * count
            elif os.path.isfile(path):
                with open(path, 'rb') as stream:
                    data, end = stream.read(ENDS), stream.seek(0, os.SEEK_END)
                    stream.seek(max(0, end - ENDS))
                    data += stream.read(ENDS)
                found = '%d bytes, %s' % (end, hashlib.sha256(data).hexdigest()[:12])
        except OSError as err:
            found = str(err)
        report.fact('path ' + path[:200], found)


def compare_programs(report: 'Report') -> None:
    """Scripts, own modules, other files and working directories that differ between nodes."""
    remedy = "put it on a file system that all nodes have"
    looked = sum(report.facts.get('program', {}).values())  # each rank has one value
    for fact, values in sorted(report.facts.items()):
        kind, _, name = fact.partition(' ')
        lack, several = looked & ~sum(values.values()), len(values) > 1
        fewest, said = min(values.values(), key=lambda mask: bin(mask).count('1')), '; '.join(sorted(values)[:4])
        if kind == 'file' and (several or lack):
            report.add('red', 'script', "nodes have different copies of %s" % name if several else
                       "these nodes lack %s, but others have it" % name, remedy, fewest if several else lack)
        elif kind == 'path' and several:
            report.add('yellow', 'script', "%s, which the program or its arguments name, differs between nodes: %s" % (
                name, said), remedy, fewest)
        elif kind == 'working' and several:
            report.add('yellow', 'script', "the nodes have a different working directory: %s" % said,
                       "start in one that all nodes have (srun --chdir)", fewest)


def place_of(text: str, words: list) -> str:
    """The directory, of the working directory and two above the script's, that has the module which an error misses."""
    missing = re.search(r"No module named '(\w+)", text)     # type: Any
    with contextlib.suppress(OSError):      # the working directory may be gone
        above = os.path.dirname(os.path.dirname(os.path.realpath(program_of(words)[1])))
        for place in (os.getcwd(), above, os.path.dirname(above)) if missing else ():
            path = os.path.join(place, missing.group(1))
            if os.path.isdir(path) or os.path.isfile(path + '.py'):
                return place
    return ''


def check_imports(report: 'Report', trial: dict, details: dict) -> None:
    """Report what imports.Trial found; `details` says whether the program has a DataLoader with workers."""
    if trial.get('shadows'):
        report.add('yellow', 'script', "beside the script: %s: Python imports this instead of the module of this name "
                   "that PyTorch needs" % ', '.join(trial['shadows']), "rename it")
    if trial.get('wrong'):
        text, sure = trial['wrong']
        remedy = "correct it, or use a release that has it"
        if re.search('No module named|cannot open shared object', text):
            place = place_of(text, details.get('words', []))
            remedy = "export PYTHONPATH=%s: it lies there" % place if place else \
                "install the missing package where all nodes see it"
        report.add('red' if sure else 'yellow', 'script', "the script's imports fail: %s" % text, remedy)
    look_at_paths(report, trial.get('files', [])[:MOST])
    if trial.get('late'):
        report.add('yellow', 'script', "the script's imports take long: %s" % trial['late'],
                   "find out whether it hangs; of a slow file system: copy the environment to the nodes")
    if trial.get('untested'):
        report.add('untested', 'script', "the imports from here on: %s writes, connects or starts a process" %
                   trial['untested'])
    if trial.get('worker') and not report.having('red', 'shm'):
        report.add('red' if details.get('workers') else 'yellow', 'worker',
                   "a worker of a DataLoader fails: %s" % trial['worker'],
                   "check TMPDIR, /dev/shm and the limits on this node")
