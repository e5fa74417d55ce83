# SPDX-License-Identifier: GPL-2.0-only
"""
Examines the program without running it: the script, its own modules, files that it reads, outputs and variables. Rank 0
finds what differs between nodes.
"""
import ast
import hashlib
import os
import re
import sys

from . import rules
from .kinds import Machine, Mapping, Optional, Report
from .rules import Program, keywords, literal, named, read

# bytes at the beginning and the end of a file to compare; words of a command line, and files, that are examined at most
ENDS, MOST = 64 << 10, 50
# options that name what a program writes
OUTPUT = re.compile(r'-o$|-{0,2}(\w+\.)*(out|save|log|ckpt|checkpoint|work_?dir|run_?dir|results?)[\w.-]*$', re.I)
# files of Python and of packages that pip installs
INSTALLED = re.compile('.*/(site|dist)-packages/|<|%s/' % re.escape(os.path.dirname(os.__file__)))
# calls that read what a path names, and those that make a path of others
READS = re.compile(r'(.*\.)?(open|load\w*|read\w*|\w+read|listdir|scandir|i?glob|exists|is(file|dir)|\w+Folder|'
                   r'from_pretrained)$')
JOINS = re.compile(r'(.*\.)?(join|Path|str)$')
# what needs a compiler: torch.compile, also as a decorator, but for an eager backend, model.compile() and extensions
COMPILES = rb'torch\.compile\b(?!.*eager)|\.compile\(\)|cpp_extension'


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
        option = word if word.startswith('-') and not equals else ''
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


def read_only(program: 'Program') -> set:
    """Texts in the program that all calls which get them, also by a name, read from; but rank 0 may read for all."""
    names = {node.targets[0].id: literal(node.value) for node in program.nodes
             if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}
    uses = {}   # type: dict
    for call in [one for calls in program.calls.values() for one in calls if not JOINS.match(named(one))]:
        for part in (inner for word in [*call.args, *keywords(call).values()] for inner in [word, *joined(word)]):
            text = literal(part) or names.get(named(part))
            writes = named(call).endswith('open') and re.search('[wax+]', str(literal(keywords(call).get(
                'mode') or (call.args + [None, None])[1])))
            uses.setdefault(text, []).append(READS.match(named(call)) and not writes and not program.by_rank(call))
    return {text for text, reads in uses.items() if isinstance(text, str) and all(reads)}


def joined(node: 'ast.AST') -> list:
    """The parts of a path that a call joins."""
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
    details['written'] = outputs(program)
    details['compiles'] = program.mentions(COMPILES)
    details['workers'] = program.mentions(rb'num_workers\s*=(?!\s*0\b)')
    texts = {text for text in map(literal, program.nodes)
             if isinstance(text, str) and re.match(r'(?!/(dev|proc|sys)/)(?=[^./]*[./])[\w./-]{2,200}$', text)}
    certain = texts & read_only(program)    # what else lies in /tmp may be what another run has left
    look_at_paths(report, [text for text in sorted(texts - set(details['written'])) if text in certain or (
        os.path.isabs(text) or os.path.isfile(text)) and not text.startswith('/tmp/')][:MOST])


def look_at_arguments(_: 'Machine', report: 'Report', details: dict) -> None:
    """The paths among the arguments of the script."""
    look_at_paths(report, [value for option, value in arguments_of(program_of(details['words'])[2])
                           if value and '://' not in value and not OUTPUT.match(option)])


def look_at_paths(report: 'Report', paths: list) -> None:
    """Note what each path has, for compare_programs(): the size of a directory, size, beginning and end of a file."""
    for path in paths:
        found = 'no file' if os.path.exists(path) else 'missing'
        try:
            if os.path.isdir(path):
                found = 'a directory of %d' % len(os.listdir(path))
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


def check_imports(report: 'Report', trial: dict, details: dict) -> None:
    """Report what imports.Trial found; `details` says whether the program has a DataLoader with workers."""
    if trial.get('shadows'):
        report.add('yellow', 'script', "beside the script: %s: Python imports this instead of the module of this name "
                   "that PyTorch needs" % ', '.join(trial['shadows']), "rename it")
    if trial.get('wrong'):
        text, sure = trial['wrong']
        missing = re.search('No module named|cannot open shared object', text)
        report.add('red' if sure else 'yellow', 'script', "the script's imports fail: %s" % text,
                   "install the missing package where all nodes see it" if missing else
                   "correct it, or use a release that has it")
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
