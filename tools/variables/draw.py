#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""
Draws variables with right and wrong values from what upstream documents, to try check with (test_check_drawn.py).

    tools/variables/draw.py CHECKOUTS       renews tests/records/variables/ from upstream's manuals

A record has a line 'NAME = KIND VALUE ...' for each variable whose manual names right values: numbers, words (there are
no others), or any. It is what the manuals say: make.py and variables.cfg have no part in it.
"""
import argparse
import os
import random
import re

import make

PREFIXES = ('OFI_NCCL', 'NCCL', 'RCCL', 'FI', 'MPICH', 'HSA', 'MIOPEN')
RECORDS = os.path.join(make.ROOT, 'tests/records/variables')
NUMBER = (r'(?:[Dd]efault(?: value)? is(?: set to)?|[Ss]et(?:ting)? (?:it |this variable )?to|[Dd]efine to'
          r'|[Dd]efault(?: value)?:) (?:``)?(-?\d+)\b(?![.\d]*[GMK%])')


def values(text):
    """Right values that a description names: ('numbers' or 'words' or '', [value])."""
    closed = (re.search(r'(?:Valid values are|Options:|one of) ([^.]*)\.', text)
              or re.search(r'\*=? ?((?:\w+ \| )+\w+)', text))
    if closed:
        words = [word for word in re.findall(r'\w+', closed.group(1)) if word not in ('and', 'or')]
        if not any(word.isdigit() for word in words):
            return 'words', words
    numbers = re.findall(NUMBER, text)
    span = re.search(r'(?:^|\n)(\d+) (to|or) (\d+)\b', text)
    if span:
        numbers += [span.group(1), span.group(3)]
    numbers += re.findall(r'(?:^|\n)(?:[-*] )?(?:``)?(-?\d+)(?:``)? ?[:=-] ', text)
    return 'numbers', list(dict.fromkeys(numbers))


def nccl(tree):
    """NVIDIA's guide: a heading, then 'Values accepted'."""
    [(_, text)] = tree.texts('Values accepted', 'docs/userguide/source/env.rst')
    for name, body in re.findall(r'\n(NCCL_[A-Z0-9_]+)\n-{5,}\n(.*?)(?=\n(?:NCCL_[A-Z0-9_]+)\n-{5,}\n|\Z)', text, re.S):
        kind, right = values(body.split('Values accepted', 1)[-1].split('^\n', 1)[-1])
        words = re.findall(r'\n(?:[-*] )?``([\w^=,:;.-]+)``(?: :| -)', body.split('Values accepted', 1)[-1])
        if not right and words:
            kind, right = 'any', words
        if right:
            yield name, kind, right


def libfabric(tree):
    """The manual pages: '*FI_CXI_X*' and ':   text' below."""
    for path in ('man/fi_cxi.7.md', 'man/fabric.7.md'):
        [(_, text)] = tree.texts('FI_', path)
        for names, body in re.findall(r'\n\*(FI_[A-Z0-9_/]+)\*?\n: (.*?)(?=\n\*FI_|\n#|\Z)', text, re.S):
            kind, right = values(body.split('\nNote: ')[0])
            levels = re.findall(r'\n- \*(\w+)\*\n', body)
            if levels:
                kind, right = 'words' if names == 'FI_LOG_LEVEL' else 'any', levels
            for name in names.split('/'):
                for other in re.findall(name + r'\*?=(\w+)', text):
                    if other not in right and kind != 'words':
                        kind, right = 'any', right + [other]
                if right:
                    yield name, kind, right


def rocr(tree):
    """AMD's table: the name, its default, the values '0: Disable.'"""
    [(_, text)] = tree.texts('HSA_', 'projects/rocr-runtime/runtime/docs/data/env_variables.rst')
    for name, body in re.findall(r'\* - \| ``(HSA_[A-Z0-9_]+)``(.*?)(?=\n    \* - \||\Z)', text, re.S):
        right = re.findall(r'[-|] ``?(\d+)``?\s*(?:$|\()', body, re.M) + re.findall(r'[-|] (\d): ', body)
        if right:
            yield name, 'numbers', list(dict.fromkeys(right))


def miopen(tree):
    found = {}
    for _, text in tree.texts('MIOPEN_', 'docs'):
        for name, value in re.findall(r'(?:``|export )(MIOPEN_[A-Z0-9_]+)=(\w+)', text):
            found.setdefault(name, []).append(value)
    for name, right in found.items():
        yield name, 'numbers' if all(re.match(r'\d', value) for value in right) else 'any', list(dict.fromkeys(right))


MANUALS = {'nccl': ('NVIDIA/nccl', 'refs/tags/v2.30.7-1', nccl),
           'libfabric': ('ofiwg/libfabric', 'refs/tags/v2.6.0', libfabric),
           'rocr': ('ROCm/rocm-systems', 'HEAD', rocr), 'miopen': ('ROCm/MIOpen', 'HEAD', miopen)}


def renew(checkouts):
    for name, (repository, ref, extract) in MANUALS.items():
        tree = make.Tree(make.git_dir(checkouts, repository), ref)
        commit = tree.git('rev-parse', ref + '^{commit}').decode().strip()
        lines = ['%s = %s %s' % (variable, kind, ' '.join(right)) for variable, kind, right in extract(tree)]
        with open(os.path.join(RECORDS, name + '.txt'), 'w') as stream:
            stream.write('# right values as the manual of %s names them, at %s\n%s\n' % (
                repository, commit, '\n'.join(sorted(set(lines)))))


def read():
    """{name: (kind, [right value])} of all records; of Cray MPICH's display too."""
    found = {}
    for name in sorted(os.listdir(RECORDS)):
        with open(os.path.join(RECORDS, name)) as stream:
            for line in stream:
                if not line.startswith('#'):
                    variable, said = line.split(' = ')
                    found[variable] = (said.split()[0], said.split()[1:])
    with open(os.path.join(make.ROOT, 'tests/records/mpich-display/crusher-8.1.17.txt')) as stream:
        for variable, value in re.findall(r'^PE 0: +((?:MPICH|FI)_\w+) += (?!NULL)(\S+)$', stream.read(), re.M):
            found.setdefault(variable, ('any', [value]))
    return found


def misspelt(word, rng, known):
    """The word with one letter less, more or different, or with two swapped."""
    # behind the prefix: with another one it is no variable of these libraries
    begin = re.match('(?:(?:%s)_)?' % '|'.join(PREFIXES), word).end()
    while True:
        at = rng.randrange(begin, len(word) - 1)
        letter = rng.choice('ABCDEFGHIJKLMNOPQRSTUVWXYZ')
        new = rng.choice((word[:at] + word[at + 1:], word[:at] + letter + word[at:], word[:at] + letter + word[at + 1:],
                          word[:at] + word[at + 1] + word[at] + word[at + 2:]))
        if new.upper() not in known:
            return new


def draw(seed, right=120, names=30, values_=30):
    """([(name, right value)], [(misspelt name, right value, the right name)], [(name, wrong value)])"""
    rng, found = random.Random(seed), read()
    good = [(name, rng.choice(found[name][1])) for name in rng.sample(sorted(found), right)]
    bad = [(misspelt(name, rng, found), rng.choice(found[name][1]), name)
           for name in rng.sample(sorted(found), names)]
    closed = [name for name in sorted(found) if found[name][0] in ('numbers', 'words')]
    wrong = []
    for name in rng.sample(closed, values_):
        kind, words = found[name]
        wrong.append((name, misspelt(rng.choice(words), rng, {word.upper() for word in words}) if kind == 'words'
                      else rng.choice(('much', 'many', '-', 'x1', 'default'))))
    return good, bad, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkouts', help="directory with a git clone of each of " + ', '.join(
        repository for repository, _, _ in MANUALS.values()))
    args = parser.parse_args()
    os.makedirs(RECORDS, exist_ok=True)
    renew(args.checkouts)


if __name__ == '__main__':
    main()
