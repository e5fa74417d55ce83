# SPDX-License-Identifier: GPL-2.0-only
"""Variables that libraries accept silently, whatever their names and values: checked by variables.cfg."""
import os
import re

from .kinds import Optional, Report

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'variables.cfg')


class Family:
    """
    A section of the table: the variables with the same prefix.

    :ivar known: {variable: kind of its value and the words of this kind, [] for any value}
    """

    def __init__(self, prefix: str, section: dict) -> None:
        self.prefix, self.source, self.newest = prefix, section['source'], section['newest']
        self.library = section['library']
        self.other, self.open = (section.get(key, '').split() for key in ('other', 'open'))
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
    if name == 'ints':
        return max(wrong_number(words, part) for part in value.split(','))
    if name == 'keys':      # backend:native,roundup_power2_divisions:[256:1,512:2]
        unknown = [key for key in re.findall(r'(?:^|,)\s*(\w+):', re.sub(r'\[.*?\]', '', value)) if key not in words]
        return "has '%s', which is not one of %s" % (unknown[0], ', '.join(words)) if unknown else ''
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
    unset = not value and kind[:1] == ['int'] and family.prefix in ('NCCL_', 'RCCL_')
    return wrong_value(kind, value) if kind and not unset else ''


def check(report: 'Report', families: list, with_gpu: bool) -> None:
    """
    Check the variables of the ranks, which are facts of the report: 'env NAME'. Only the table tells what is wrong, and
    a newer library may differ: nothing is red.
    """
    for fact, values in sorted(report.facts.items()):
        name, ranks = fact[4:], sum(values.values())
        family = family_of(name, families) if fact.startswith('env ') else None
        if not family or name in family.other:
            continue
        if name not in family.known:
            # the table has few names: another one may well be right
            near = next((other for other in sorted(family.known) if one_edit(name, other)), None)
            if near and not any(map(name.startswith, family.open)):
                report.add('yellow', 'variable', "%s is not a variable that a known %s reads. Perhaps it should be %s"
                           % (name, family.library, near), "unset it in the job script, or write %s" % near, ranks)
            continue
        for value, mask in values.items():
            wrong = wrong_text(name, value, family)
            if wrong:
                report.add('yellow', 'value', "%s='%s' %s (up to release %s)" % (
                    name, value, wrong, family.newest),
                           "correct or unset it, unless this release accepts it (source: %s)" % family.source, mask)
            elif with_gpu and (value, name) in family.warn:
                report.add('yellow', 'value', "%s=%s: %s" % (name, value, family.warn[value, name]),
                           "change it in the job script", mask)
