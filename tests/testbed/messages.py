# SPDX-License-Identifier: GPL-2.0-only
"""Whole messages: a test that asserts a word of a runscript's message says little about the rest of it.

`UPDATE_EXPECTED=1 ./run-tests FILE` adds what is said now; read the difference before it is committed.
"""
import os
import re
import socket

from testbed import ROOT

SAID = ROOT / 'tests/expected/runscripts'
LAUNCHER = r'(torchrun|openmpi|hydra|flux|slurm|pals|pmi|horovod|manual|none)'
# what a test has chosen, or the machine; where nothing stands in its place, the form does not fit
VALUES = [
    (re.escape(str(ROOT)), 'ROOT'), (r'/\S*/machine-\d+\b', 'COPY'), (rf'\b{re.escape(socket.gethostname())}\b', 'HOST'), (r'[0-9a-f]{64}', 'SHA256'),
    (r'/\S*/(?=[^/\s]+ is missing)|(?<=\')/[^\']*/(?=[^/\']+\')', 'DIR/'), (r'\d+', 'N'),
    (r"='[^']*'", "='VALUE'"), (r"(?<=printed )'.*'(?=, not HOST)", 'TEXT'), (r'(?<=squashfs to )\S+(?= in N s)', 'DIR'),
    (r"(?<=cache directory )'[^']+'|(?<=Remove )'DIR/caches/[^']+'", "'DIR'"), (r'(host name: |character N: ).*(?=\. (A list|Slurm sets|Call get))', r'\1TEXT'),
    (r'DIR/\S+ is missing', 'FILE is missing'), (r'--torchrun: --\S+ is set', '--torchrun: OPTION is set'),
    (r'alone: \S+ is a variable', 'alone: NAME=VALUE is a variable'), (r'in the cgroup \S+ but', 'in the cgroup FILE, but'),
    (r'nodes \(\w+: N\)', 'nodes (NAME: N)'), (r'\b\w+=N and \w+=N \(\w+\)', 'NAME=N and NAME=N (LAUNCHER)'),
    (r'by \w+=N and \w+=N', 'by NAME=N and NAME=N'), (r'[A-Z_]+=N, which', 'NAME=N, which'),
    (rf'\((launcher: |from: )?{LAUNCHER}\)', r'(\1LAUNCHER)'), (r'MASTER_ADDR=\S+ (means|is)\b', r'MASTER_ADDR=VALUE \1'),
    (r'_DEVICES=\S+ names \S+,', '_DEVICES=LIST names ENTRY,'), (r"the table 'DIR/apinfo' .*?(?=\. (Before|Export)|$)", 'TABLE'),
    (r'/\S+/(?=[\w.-]+\.(eb|cfg)\b)', 'DIR/'), (r'(sites are|The site has): .*?(?=\. |$)', r'\1: LIST'), (r'site values \(.+?\)', 'site values (NAMES)'),
    (r'(group) \w+, which needs: [^;]+(; watch for hangs|; if [^;]+)?', r'\1 NAME, which needs: TEXT'), (r'(roles are): .+', r'\1: LIST'),
    (r'(--system-site-packages) .+$', r'\1 DIR'), (r"activates '.*'(: was| \()", r"activates 'DIR'\1"), (r'belongs to \S+', 'belongs to DIR.'),
    (r"is '[^']+', which is not", "is 'VALUE', which is not"), (r"argument '[^']+'|node '[^']+' is", 'VALUE'), (r"='VALUE': '[^']+' is", "='VALUE': 'VALUE' is"),
    (r'only the CPUs [N,-]+,', 'only the CPUs LIST,'), (r"imports '?\S+ instead", 'imports FILE instead'), (r'a launcher set \w+=', 'a launcher set NAME='),
    (r"for this process: '[^']*' \(\S+\)", "for this process: 'VALUE' (NAMES)"), (r"^'?(\w+)='VALUE' is not a whole", 'NAME is not a whole')]


def known(text, *directories, by=None):
    """Each line of `text` that a runscript has begun with its name has a form that tests/expected/runscripts has.

    :param directories: of this test; their names do not count
    :param by: name of what said the first line, where that does not begin with a name
    """
    names = '|'.join(path.name for path in (ROOT / 'runscripts').rglob('*') if path.is_file() and not path.suffix)
    lines = re.findall(rf'(?m)^(?:{names}): .*', text) if by is None else [f'{by}: {text.splitlines()[0]}']
    said = {form(line, *directories) for line in lines}
    before = set(SAID.read_text().splitlines() if SAID.exists() else [])
    if os.environ.get('UPDATE_EXPECTED'):
        SAID.parent.mkdir(exist_ok=True)
        SAID.write_text(''.join(f'{line}\n' for line in sorted(before | said)))
    else:
        assert said <= before


def form(line, *directories):
    """A message without the values in it."""
    name, line = line.split(': ', 1)
    for path in map(str, directories):
        line = line.replace(path if '/' in path else '\n', 'DIR')
    for value, word in VALUES:
        line = re.sub(value, word, line)
    return f'{name}: {line}'
