# SPDX-License-Identifier: GPL-2.0-only
"""What the emulations assert about machines, and who says so besides us: witnesses.cfg.

The facts of an emulation are read from what it makes: module files with their places and variables, files, variables
after login, partitions and nodes. `PYTHONPATH=tests python -m testbed.witnesses` prints the section of
docs/verification.md.
"""
import configparser
import itertools
import os
import pathlib
import re

BELIEVED = 'believed'
TABLE = pathlib.Path(__file__).with_name('witnesses.cfg')
HEADING = '## Emulated facts and their witnesses'
VARIABLE = re.compile(r'\b(?:setenv|pushenv|prepend_path)\("(\w+)"|\bfamily\("(\w+)"')
NOT_THE_MACHINE = re.compile(r'^(EASYBUILD_|PATH$|HOME$|SLINGTORCH_)')


class Row:
    """A section of the table: facts with one witness.

    :ivar emulation: the module of testbed whose facts these are
    :ivar title: what they are about
    :ivar facts: all of them; those that begin with `also` cannot be read from the emulation
    """

    def __init__(self, section, keys):
        self.emulation, _, self.title = section.partition(': ')
        self.witness = ' '.join(keys['witness'].split())
        self.facts = [fact for line in keys['facts'].strip().splitlines() for fact in expand(line.strip())]


def expand(text):
    """What a shell makes of {a,b}, without nesting."""
    parts = [part.split(',') if number % 2 else [part] for number, part in enumerate(re.split('[{}]', text))]
    return [''.join(chosen) for chosen in itertools.product(*parts)]


def rows():
    """The rows of witnesses.cfg."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=('=',), comment_prefixes=('#',))
    parser.read(TABLE, encoding='utf-8')
    return [Row(name, parser[name]) for name in parser.sections()]


def of_modules(directory):
    """Facts of the Lua module files below a directory: where they are, and which variables they set."""
    facts = set()
    for path in pathlib.Path(directory).rglob('*.lua'):
        # a version has dots
        name = pathlib.Path(str(path.relative_to(directory))[:-len('.lua')])
        facts.add(f'module {name}')
        software = name.parent.name if name.parent.name not in ('', '.') else name.name
        for variable in VARIABLE.findall(path.read_text()):
            facts.add(f'{software} sets {"".join(variable)}')
    return facts


def of_files(root, *tops):
    """Facts of the files and links below these directories of an emulated machine."""
    return {f'file /{os.path.relpath(os.path.join(directory, name), root)}'
            for top in tops for directory, _, names in os.walk(os.path.join(root, top)) for name in names}


def of_environ(environ):
    """Facts of the variables that a shell has after login."""
    return {f'login sets {name}' for name in environ if not NOT_THE_MACHINE.match(name)}


def of_slurm(text):
    """Facts of nodes, partitions and MPI in a slurm.conf."""
    text = text.replace('\\\n', '')
    kept = re.findall(r'^(?:NodeName|PartitionName|MpiDefault).*', text, re.M)
    words = [word for line in kept for word in line.split()]
    return {f'slurm {word}' for word in words if not re.match('(NodeHostname|NodeAddr|Port|State|Nodes|MaxTime)=', word)}


def section():
    """The section of docs/verification.md."""
    table = rows()
    count = sum(len(row.facts) for row in table)
    believed = sum(len(row.facts) for row in table if row.witness.startswith(BELIEVED))
    lines = [
        HEADING, '',
        'What the test bed asserts about the machines that it emulates, and who says so besides us. A witness is a document, a',
        f'source or a record that nobody of this project wrote. {count} facts; {believed} have none, and are called believed.',
        '`tests/testbed/witnesses.cfg` has the facts of each row; a test compares it with what the emulations make.', '',
        '| emulation | what | facts | witness |', '|---|---|---|---|',
    ]
    lines += [f'| {row.emulation} | {row.title} | {len(row.facts)} | {row.witness} |' for row in table]
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    print(section(), end='')
