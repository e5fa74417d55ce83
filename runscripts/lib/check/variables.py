# SPDX-License-Identifier: GPL-2.0-only
"""Variables that nobody refuses: names and values against what the libraries really read (variables.cfg)."""
import difflib
import os
import re

import elf

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'variables.cfg')
KINDS = ('int', 'whole', 'bool', 'choice', 'exact', 'words')


class Family:
    """A section of the table: the variables with one prefix."""

    def __init__(self, prefix, section):
        self.prefix, self.source, self.known, self.warn = prefix, section.get('source', ''), {}, {}
        self.libraries = section.get('library', '').split()
        self.other = set(section.get('other', '').split())
        self.open = tuple(section.get('open', '').split())
        self.partial = 'partial' in section
        self.newest = section.get('newest', '')
        self.bool = section.get('bool', 'choice 0 1').split()
        for name, value in section.items():
            if name.startswith(prefix):
                parts = dict((part.split(None, 1) + [''])[:2] for part in value.split(';') if part.strip())
                self.known[name] = parts
            elif name.startswith('warn '):
                self.warn[tuple(name.split()[1:])] = value

    def kind(self, name):
        """[kind, its words and options], or []. A bool is a choice of the words that this family takes."""
        for kind in KINDS:
            if kind in self.known[name]:
                return self.bool if kind == 'bool' else [kind] + self.known[name][kind].split()
        return []


def read_table(path=TABLE):
    """The families, longest prefix first."""
    # every rank reads it: configparser takes ten times as long for its 1,600 lines
    sections = {}
    with open(path) as stream:
        for line in stream:
            if line.startswith('['):
                section = sections[line.strip('[]\n')] = {}
            elif not line.startswith(('#', '\n')):
                key, _, value = line.partition('=')
                section[key.strip()] = value.strip()
    families = [Family(prefix, section) for prefix, section in sections.items()]
    return sorted(families, key=lambda family: -len(family.prefix))


def family_of(name, families):
    """The family of a variable; None if it is none of ours."""
    return next((family for family in families if name.startswith(family.prefix)), None)


def wrong_number(name, words, options, value):
    """The same for a number: int as strtol(3) reads it (NCCL, libfabric, MIOpen), whole without anything around it."""
    digits = '[0-9]+' if name == 'whole' or options.get('base') == '10' else '0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*'
    match = re.match(r'\s*([-+]?)(%s)' % digits, value)
    if not match:
        return 'is no whole number'
    figures, rest = match.group(2).lower(), value[match.end():]
    octal = figures.startswith('0') and digits != '[0-9]+'
    number = int(figures, 16 if figures.startswith('0x') else 8 if octal else 10) * (-1 if match.group(1) == '-' else 1)
    if rest and (name == 'whole' or rest.strip()):
        return 'is no whole number' if name == 'whole' else 'counts as %d: the rest is ignored' % number
    if words and not int(words[0]) <= number <= int(words[1]):
        return 'is not from %s to %s' % tuple(words)
    step, least = int(options.get('step', 1)), int(options.get('least', 1))
    if number > 0 and (number % step or number < least):
        return 'is no multiple of %d from %d' % (step, least)
    return ''


def wrong_value(kind, value):
    """What is wrong with a value of this kind; '' if nothing is. The kinds are in variables.cfg."""
    name, words = kind[0], [word for word in kind[1:] if '=' not in word]
    options = dict(word.split('=') for word in kind[1:] if '=' in word)
    if name in ('int', 'whole'):
        return wrong_number(name, words, options, value)
    if '#' in words and re.match(r'-?[0-9]+$', value):
        return ''
    known = [word.upper() for word in words] if name != 'exact' else words
    if 'dash' in options:
        value = value.replace('-', options['dash'])
    if name == 'words':
        for word in re.split('[,:;]' if 'prefix' in options else ',', value[1:] if value.startswith('^') else value):
            word = word.strip() if 'trim' in options else word.lstrip('^')
            if word and word.upper() not in known:
                return "has '%s', which is none of %s" % (word, ', '.join(words))
    elif (value if name == 'exact' else value.upper()) not in known:
        return 'is none of ' + ', '.join('a whole number' if word == '#' else word for word in words)
    return ''


class Asked:
    """
    The libraries that the process maps: do they read a variable?

    :param paths: their files
    :param fi_info: names that `fi_info -e` prints, or None if it could not be asked
    """

    def __init__(self, paths, fi_info=None):
        self.paths, self.fi_info, self.open = paths, fi_info, {}

    def library(self, family):
        """The first one mapped of the family, as elf.Library, or None."""
        for path in self.paths:
            if re.sub(r'\.so[.0-9]*$', '', os.path.basename(path)) in family.libraries:
                if path not in self.open:
                    try:
                        self.open[path] = elf.Library(path)
                    except (OSError, ValueError):
                        self.open[path] = None
                if self.open[path]:
                    return self.open[path]
        return None

    def reads(self, name, family):
        """(whether it does, the library that was asked); (None, None): nobody could be asked."""
        if family.prefix == 'FI_':
            if self.fi_info and name in self.fi_info:
                return True, 'fi_info -e'
            # libfabric makes the names from those of provider and parameter
            library = self.library(family)
            if library and name.startswith('FI_CXI_') and library.has_string('rdzv_threshold'):
                return library.has_string(name[len('FI_CXI_'):].lower()), library.path
            return None, None
        library = self.library(family)
        # a library without its constants where we look says nothing
        if not library or not any(library.has_string(known) for known in family.known):
            return None, None
        return library.has_string(name), library.path


def check(report, families, asked, with_gpu):
    """
    Look at the variables that the ranks have, which are facts of the report: 'env NAME'.

    :param asked: Asked
    :param with_gpu: whether the nodes have GPUs
    """
    for fact, values in sorted(report.facts.items()):
        name = fact[4:]
        family = family_of(name, families) if fact.startswith('env ') else None
        if not family or name in family.other or not report.ranks:
            continue
        ranks = 0
        for mask in values.values():
            ranks |= mask
        reads, library = asked.reads(name, family)
        if name not in family.known:
            if reads or name.startswith(family.open or ('\0',)):
                continue
            meant = next(iter(difflib.get_close_matches(name, list(family.known), 1, 0.84)), None)
            certain = meant and (reads is False or not family.partial)
            text = "%s is no variable that %s reads" % (name, library or 'a known %s' % family.libraries[0])
            if meant:
                text += ". Meant is perhaps %s" % meant
            report.add('red' if certain else 'yellow', 'variable', text,
                       "unset it in the job script, or write %s" % meant if meant else
                       "see whether the name is right; unset it otherwise", ranks)
            continue
        known = family.known[name]
        if reads is False and library:
            report.add('yellow', 'variable', "%s is set, and %s does not read it%s" % (
                name, library, ''.join(' (%s %s)' % (word, known[word]) for word in ('since', 'until') if word in known)
            ), "it has no effect with this release; unset it, or take a library that knows it", ranks)
        kind = family.kind(name)
        for value, mask in values.items():
            wrong = wrong_value(kind, value) if kind else ''
            if wrong:
                report.add('red', 'value', "%s='%s' %s%s" % (
                    name, value, wrong, '; ' + known['note'] if 'note' in known else ''),
                    "the library ignores it or takes its default: correct it, or unset it (source: %s)" % family.source,
                    mask)
            elif (value, name) in family.warn:
                report.add('red' if with_gpu else 'yellow', 'value',
                           "%s=%s: %s" % (name, value, family.warn[value, name]), "change it in the job script", mask)
