# SPDX-License-Identifier: GPL-2.0-only
"""Variables that libraries accept silently: names checked by the libraries' strings, values by variables.cfg."""
import difflib
import glob
import os
import re

from . import elf
from .kinds import Machine, Optional, Report
from .machine import library_kind

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'variables.cfg')


class Family:
    """
    A section of the table: the variables with the same prefix.

    :ivar known: {variable: kind of its value and the words of this kind, [] for any value}
    """

    def __init__(self, prefix: str, section: dict) -> None:
        self.prefix, self.source, self.newest = prefix, section['source'], section['newest']
        self.libraries, self.other, self.open = (section.get(key, '').split() for key in ('library', 'other', 'open'))
        self.known, self.warn = {}, {}    # type: dict, dict
        for names, value in section.items():
            kind = (section['bool'] if value == 'bool' else value).split()
            if names.startswith(prefix):
                self.known.update(dict.fromkeys(names.split(), kind))
            elif names.startswith('warn '):
                self.warn[tuple(names.split()[1:])] = value


def read_table() -> list:
    """The families, longest prefix first."""
    # every rank reads it, and configparser would take ten times as long
    sections = {}  # type: dict
    with open(TABLE) as stream:
        for line in stream:
            if line.startswith('['):
                section = sections[line.strip('[]\n')] = {}
            elif not line.startswith(('#', '\n')):
                key, _, value = line.partition('=')
                section[key.strip()] = value.strip()
    families = [Family(prefix, section) for prefix, section in sections.items()]
    return sorted(families, key=lambda family: -len(family.prefix))


def family_of(name: str, families: list) -> 'Optional[Family]':
    """The family of a variable; None if the table has none."""
    return next((family for family in families if name.startswith(family.prefix)), None)


def wrong_number(words: list, value: str) -> str:
    """As wrong_value() for a number, as strtol(3) reads it; `words`: the range, and one valid number out of it."""
    match = re.match(r'\s*([-+]?(0[xX][0-9a-fA-F]+|[0-9]+))', value)
    if not match:
        return 'is not a whole number'
    number = int(match.group(1), 16 if match.group(2)[1:2] in ('x', 'X') else 10)
    if value[match.end():].strip():
        return 'is read as %d: the rest is ignored' % number
    if words and not int(words[0]) <= number <= int(words[1]) and str(number) not in words[2:]:
        return 'is not between %s and %s' % tuple(words[:2])
    return ''


def wrong_value(kind: list, value: str) -> str:
    """What is wrong with a value of this kind; '' if nothing is. variables.cfg describes the kinds."""
    name, words = kind[0], kind[1:]
    if name == 'int':
        return wrong_number(words, value)
    if '#' in words and re.match(r'-?[0-9]+$', value):
        return ''
    known = [word.upper() for word in words] if name != 'exact' else words
    if name == 'words':
        for word in re.split('[,:;]', value):
            if word.strip(' ^') and word.strip(' ^').upper() not in known:
                return "has '%s', which is not one of %s" % (word, ', '.join(words))
    elif (value if name == 'exact' else value.upper()) not in known:
        return 'is not one of ' + ', '.join('a whole number' if word == '#' else word for word in words)
    return ''


def strings(family: Family, mapped: list, plugins: list) -> tuple:
    """
    (names of the family in the strings of the libraries that read it, the path of one); (set(), None) if none shows
    them. Only NCCL, RCCL and their plugins keep their names whole.

    :param mapped: libraries that the process with PyTorch maps
    :param plugins: network plugins
    """
    if 'CCL_' not in family.prefix:
        return set(), None
    plugin = list(elf.readable(plugins))
    found = plugin if family.prefix.startswith('OFI') else list(elf.readable(
        path for path in mapped if library_kind(path) in family.libraries))
    names = set().union(*(library.names(family.prefix) for library in found + plugin))
    return (names, found[0].path) if found and names & set(family.known) else (names, None)


def one_edit(name: str, other: str) -> bool:
    """Whether two names differ only by one letter (added, missing or different), or by two swapped neighbours."""
    begin = len(os.path.commonprefix([name, other]))
    one, two = name[begin:], other[begin:]
    return one != two and (one[1:] == two or one == two[1:] or one[1:] == two[1:]
                           or one[:2] == two[1::-1] and one[2:] == two[2:])


def wrong_text(name: str, value: str, family: Family) -> str:
    """What is wrong with a value of a known variable; '' if nothing is."""
    kind = family.known[name]
    # an empty number is to NCCL as if it were not set (src/misc/param.cc)
    if not kind or kind[0] == 'int' and not value and family.prefix in ('NCCL_', 'RCCL_'):
        return ''
    if not value.strip():
        return 'is empty'
    wrong = wrong_value(kind, value)
    if wrong and not wrong_value(kind, value.strip()):
        return 'begins or ends with a space, which makes it invalid'
    return wrong


def check(report: 'Report', families: list, mapped: list, plugins: list, with_gpu: bool) -> None:
    """
    Check the variables of the ranks, which are facts of the report: 'env NAME'. For the libraries see strings().

    A finding is red if a library's strings show it, and yellow if only this table does: a newer library may differ.
    """
    for fact, values in sorted(report.facts.items()):
        name, ranks = fact[4:], sum(values.values())
        family = family_of(name, families) if fact.startswith('env ') else None
        if not family or name in family.other or not report.ranks:
            continue
        read, library = strings(family, mapped, plugins)
        if name not in family.known:
            if name in read or any(map(name.startswith, family.open)):
                continue
            names = sorted(read.union(family.known))
            near = sorted((other for other in names if one_edit(name, other)), key=lambda other: other not in read)
            # the table has few names: without a library to check, another name may well be right
            if not near and not library:
                continue
            meant = next(iter(near or difflib.get_close_matches(name, names, 1, 0.84)), None)
            text = "%s is not a variable that %s reads" % (name, library or 'a known ' + family.libraries[0])
            if meant:
                text += ". Perhaps it should be %s" % meant
            report.add('red' if near and library else 'yellow', 'variable', text,
                       "unset it in the job script, or write %s" % meant if meant else
                       "check the name, and unset it if it is wrong", ranks)
            continue
        if library and name not in read:
            report.add('yellow', 'variable', "%s is set, but %s does not read it" % (name, library),
                       "it has no effect in this release: unset it, or use a library that reads it", ranks)
        for value, mask in values.items():
            wrong = wrong_text(name, value, family)
            if wrong:
                report.add('yellow', 'value', "%s='%s' %s (up to release %s)" % (
                    name, value, wrong, family.newest),
                           "correct or unset it, unless this release accepts it (source: %s)" % family.source, mask)
            elif with_gpu and (value, name) in family.warn:
                report.add('yellow', 'value', "%s=%s: %s" % (name, value, family.warn[value, name]),
                           "change it in the job script", mask)


# GNU's libgomp accepts a list of positive numbers (libgomp/env.c), and uses all cores for anything else
THREADS = r'\s*0*[1-9][0-9]*(\s*,\s*0*[1-9][0-9]*)*\s*$'


def check_torch(report: 'Report', machine: 'Machine') -> None:
    """Check the numbers of threads, and the words for PyTorch's allocator, which must be in one of its libraries."""
    cores, place = len(machine.cpus()[1]), glob.escape(report.value('torch is in', ''))
    for fact, values in sorted(report.facts.items()):
        name = fact[4:]
        for value, ranks in values.items() if fact.startswith('env ') else ():
            if name.endswith('_NUM_THREADS') and not re.match(THREADS, value):
                report.add('yellow', 'value', "%s='%s' is not a number of threads: the library uses its own number, "
                           "such as all cores" % (name, value), "correct it in the job script, or unset it", ranks)
            elif name.endswith('_NUM_THREADS') and cores and int(value.split(',')[0]) > 4 * cores:
                report.add('yellow', 'value', "%s=%s, but the node has only %d cores" % (name, value, cores),
                           "use the number of cores that a rank has", ranks)
            words = re.sub(r'\[[^]]*\]', '', value) if name.startswith('PYTORCH') else ''
            for key in re.findall(r'(?:^|,)\s*([a-z0-9_]+)', words):
                found = list(elf.readable(path for name in ('c10', 'torch')
                                          for path in glob.glob(os.path.join(place, 'lib/lib%s*.so' % name))))
                if found and not any(library.match(re.compile(key.encode() + b'\0')) for library in found):
                    report.add('yellow', 'value', "%s: no library of this PyTorch has '%s'" % (name, key),
                               "correct it in the job script: an unknown word ends programs that use a GPU", ranks)
