# SPDX-License-Identifier: GPL-2.0-only
"""Variables that libraries accept silently: names checked by the libraries' strings, values by variables.cfg."""
import difflib
import functools
import os
import re

from . import elf
from .kinds import Callable, Iterable, Machine, Optional, Report
from .machine import library_kind

# prefixes of PyTorch's own variables
TORCH = ('TORCH_', 'GLOO_')
TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'variables.cfg')


class Family:
    """
    A section of the table: the variables with the same prefix.

    :ivar known: {variable: kind of its value and the words of this kind, [] for any value}
    """

    def __init__(self, prefix: str, section: dict) -> None:
        self.prefix, self.source, self.newest = prefix, section['source'], section['newest']
        self.libraries, self.other, self.open = (section.get(key, '').split() for key in ('library', 'other', 'open'))
        self.known, self.warn, self.misspelt = {}, {}, {}    # type: dict, dict, dict
        for names, value in section.items():
            kind = (section['bool'] if value == 'bool' else value).split()
            if names.startswith(prefix):
                self.known.update(dict.fromkeys(names.split(), kind))
            elif names.startswith('warn '):
                self.warn[tuple(names.split()[1:])] = value
            elif names.startswith('misspelt '):
                self.misspelt[names.split()[1]] = value


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


class LibraryProbe:
    """
    Whether libraries read a variable: those that the process maps (paths), or plugins that NCCL loads.

    :param fi_info: returns the output of `fi_info -e`, None if it does not run
    """

    # libfabric builds names from those of provider and parameter: (prefix, a parameter that shows whether to search)
    FABRIC = (('FI_CXI_', 'rdzv_threshold'), ('FI_', 'mr_cache_max_size'))

    def __init__(self, paths: list, plugins: 'Iterable[str]' = (),
                 fi_info: 'Callable[[], Optional[str]]' = lambda: None) -> None:
        self.paths, self.plugins, self.fi_info = paths, list(plugins), functools.lru_cache()(fi_info)

    @functools.lru_cache(None)
    def libraries(self, family: Family) -> list:
        """The libraries of this family that can be read."""
        wanted = {library_kind(name + '.so') or name for name in family.libraries}
        return list(elf.readable(
            path for path in self.paths
            if (library_kind(path) or re.sub(r'\.so[.0-9]*$', '', os.path.basename(path))) in wanted))

    @functools.lru_cache(None)
    def names(self, family: Family) -> set:
        """Names of variables in the libraries' strings; none for libfabric, which builds its names at run time."""
        found = set()   # type: set
        for library in self.libraries(family) * (family.prefix != 'FI_'):
            found |= library.names(family.prefix)
            for prefix in ('MPIR_CVAR_', 'MPIR_PARAM_') * (family.prefix == 'MPICH_'):
                found |= {family.prefix + name[len(prefix):] for name in library.names(prefix)}
        for library in elf.readable(self.plugins if 'NCCL_' in family.prefix else ()):
            found |= library.names(family.prefix)
        return found

    def reads(self, name: str, family: Family) -> tuple:
        """(whether a library reads the variable, that library); (None, None) if unknown."""
        library, names = next(iter(self.libraries(family)), None), self.names(family)
        if family.prefix == 'FI_':
            return self.fabric_reads(name, name in family.known, library)
        # PyTorch's Python files and other packages read such names, too
        if name in names or family.prefix in TORCH and name in family.known:
            return True, None
        # ROCr has short names in its code (std::string) and others in libhsakmt. MPICH has all names in full
        # (maint/extractcvars); how Cray MPICH stores its own has not been seen
        if not library or not names & set(family.known) or family.prefix in TORCH + ('HSA_',) or \
                family.prefix == 'MPICH_' and library.match(re.compile(b'CRAY MPICH')):
            return None, None
        return False, library.path

    def fabric_reads(self, name: str, known: bool, library: 'Optional[elf.Library]') -> tuple:
        """reads() for libfabric; `known`: whether the table has the name."""
        if not known and re.search(r'\b%s\b' % re.escape(name), self.fi_info() or ''):
            return True, None
        prefix, mark = next(pair for pair in self.FABRIC if name.startswith(pair[0]))
        if not library or not library.has_string(mark):
            return None, None
        # some variables are read by their full names (prov/cxi/src/cxip_curl.c). Many constants end in 'size': an
        # unknown name must be a whole one.
        found = any(library.has_string(text, not known) for text in (name, name[len(prefix):].lower()))
        # a known name that is not in the core may be in a provider's own file
        return (found, library.path) if found or prefix == 'FI_CXI_' or not known else (None, None)


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


def check(report: 'Report', families: list, asked: LibraryProbe, with_gpu: bool) -> None:
    """Check the variables of the ranks, which are facts of the report: 'env NAME'.

    A finding is red if a library's strings show it, and yellow if only this table does: a newer library may differ.
    """
    for fact, values in sorted(report.facts.items()):
        name, ranks = fact[4:], sum(values.values())
        family = family_of(name, families) if fact.startswith('env ') else None
        if not family or name in family.other or not report.ranks:
            continue
        reads, library = asked.reads(name, family)
        if name not in family.known:
            if reads or any(map(name.startswith, family.open)):
                continue
            names = asked.names(family).union(family.known) - {name}
            near = sorted((other for other in sorted(names) if one_edit(name, other)),
                          key=lambda other: asked.reads(other, family)[0] is False)
            meant = next(iter(near), family.misspelt.get(name))
            # the table has few names: without a library to check, another name may well be right
            if reads is None and not meant:
                continue
            meant = meant or next(iter(difflib.get_close_matches(name, sorted(names), 1, 0.84)), None)
            text = "%s is not a variable that %s reads" % (name, library or 'a known ' + family.libraries[0])
            if meant:
                text += ". Perhaps it should be %s" % meant
            report.add('red' if near and reads is False else 'yellow', 'variable', text,
                       "unset it in the job script, or write %s" % meant if meant else
                       "check the name, and unset it if it is wrong", ranks)
            continue
        if reads is False:
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


def check_torch(report: 'Report', machine: 'Machine', libraries: list) -> None:
    """Check the numbers of threads, and the words for PyTorch's allocator, which must be in one of these libraries."""
    cores = len(machine.cpus()[1])
    for fact, values in sorted(report.facts.items()):
        name = fact[4:]
        for value, ranks in values.items() if fact.startswith('env ') else ():
            if name.endswith('_NUM_THREADS') and not re.match(THREADS, value):
                report.add('yellow', 'value', "%s='%s' is not a number of threads: the library uses its own number, "
                           "such as all cores" % (name, value), "correct it in the job script, or unset it", ranks)
            elif name.endswith('_NUM_THREADS') and cores and int(value.split(',')[0]) > 4 * cores:
                report.add('yellow', 'value', "%s=%s, but the node has only %d cores" % (name, value, cores),
                           "use the number of cores that a rank has", ranks)
            for part in re.sub(r'\[[^]]*\]', '', value).split(',') if name.startswith('PYTORCH') else ():
                key = part.partition(':')[0].strip()
                found = list(elf.readable(libraries)) if re.match('[a-z0-9_]+$', key) else []
                if found and not any(library.has_string(key) for library in found):
                    report.add('yellow', 'value', "%s: no library of this PyTorch has '%s'" % (name, key),
                               "correct it in the job script: an unknown word ends programs that use a GPU", ranks)
