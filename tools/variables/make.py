#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""
Makes slingtorch/job/variables.cfg from upstream's sources. For maintainers; users never run it.

    tools/variables/make.py CHECKOUTS [--libraries DIR] [-o FILE]

CHECKOUTS has a git clone (bare or not, with all tags) of each of UPSTREAMS, as NAME, NAME.git or OWNER+NAME/repo.
DIR has real libraries as DIR/RELEASE/libnccl.so*: their strings become tests/records/libnccl/RELEASE.txt, which this
program reads too. by_hand.cfg says what it cannot read, with the source of each line. The same sources give the same
table.
"""
import argparse
import configparser
import fnmatch
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, ROOT)

from slingtorch.job import elf      # noqa: E402

TABLE = os.path.join(ROOT, 'slingtorch/job/variables.cfg')
BY_HAND = os.path.join(HERE, 'by_hand.cfg')
RECORDS = os.path.join(ROOT, 'tests/records/libnccl')
KINDS = ('int', 'whole', 'bool', 'choice', 'exact', 'words', 'text')

# prefix: [(owner/name, tags that are releases, oldest release that is read, whether the newest commit is read too)]
UPSTREAMS = {
    'OFI_NCCL_': [('aws/aws-ofi-nccl', r'v([0-9.]+)(?:-aws)?$', '1.4.0', True)],
    'NCCL_': [('NVIDIA/nccl', r'v(2[0-9.]+)-\d+$', '2.10.3', False)],
    'RCCL_': [('ROCm/rccl', r'rocm-([0-9]+\.[0-9]+\.[0-9]+)$', '5.0.0', True)],
    'FI_': [('ofiwg/libfabric', r'v([0-9.]+)$', '1.15.0', True)],
    'MPICH_': [('pmodels/mpich', r'v([0-9.]+)$', '3.2', False)],
    'HSA_': [('ROCm/ROCR-Runtime', r'rocm-([0-9]+\.[0-9]+\.[0-9]+)$', '5.0.0', False),
             ('ROCm/rocm-systems', r'$', '', True)],
    'MIOPEN_': [('ROCm/MIOpen', r'rocm-([0-9]+\.[0-9]+\.[0-9]+)$', '5.0.0', True)],
}


# --- git

class Tree:
    """The files of one commit."""

    def __init__(self, git_dir, ref):
        self.git_dir, self.ref = git_dir, ref

    def git(self, *args, stdin=None, statuses=(0,)):
        done = subprocess.run(('git', '--git-dir=' + self.git_dir) + args, input=stdin, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)
        if done.returncode not in statuses:
            sys.exit('git %s in %s: %s' % (' '.join(args), self.git_dir, done.stderr.decode(errors='replace')))
        return done.stdout

    def texts(self, pattern, *paths):
        """[(path, text)] of the files below the paths that have a line with the pattern."""
        # status 1: no such line, or no such path in this release
        found = self.git('grep', '-lE', pattern, self.ref, '--', *paths, statuses=(0, 1)).decode().split()
        answer = self.git('cat-file', '--batch', stdin='\n'.join(found + ['']).encode())
        texts = []
        for name in found:
            head, answer = answer.split(b'\n', 1)
            size = int(head.split()[2])
            texts.append((name.split(':', 1)[1], answer[:size].decode('utf-8', 'replace')))
            answer = answer[size + 1:]
        return texts


def git_dir(checkouts, repository):
    """The clone of OWNER/NAME."""
    owner, name = repository.split('/')
    for path in ('%s+%s/repo' % (owner, name), name + '/.git', name + '.git', name):
        path = os.path.join(checkouts, path)
        if os.path.isdir(os.path.join(path, 'objects')):
            return path
    sys.exit("no clone of %s in %s: git clone --bare https://github.com/%s %s" % (
        repository, checkouts, repository, os.path.join(checkouts, name + '.git')))


def in_order(release):
    return [int(part) for part in release.split('.')]


def releases(path, tags, oldest, newest_too):
    """[(release, Tree)], oldest first. The newest commit is the release 'after X'."""
    found = {}
    for tag in sorted(Tree(path, '').git('tag').decode().split()):
        match = re.match(tags, tag)
        if match and match.groups() and in_order(match.group(1)) >= in_order(oldest):
            found[match.group(1)] = Tree(path, 'refs/tags/' + tag)
    answer = [(release, found[release]) for release in sorted(found, key=in_order)]
    if newest_too:
        answer.append(('after ' + answer[-1][0] if answer else 'newest', Tree(path, 'HEAD')))
    return answer


# --- values in sources

def number(text, defines=None):
    """A C expression of numbers, <<, *, - and names that `defines` has; None if it is more."""
    text = re.sub(r'/\*.*?\*/|\((?:size_t|int64_t|int)\)', '', text).strip()
    for _ in range(4):
        text = re.sub(r'\b[A-Za-z_]\w+\b', lambda name: (defines or {}).get(name.group(), name.group()), text)
    text = re.sub(r'(\d)[uUlL]+\b', r'\1', text)
    rest = r'(?:\s*(<<|-)\s*\(*(\d+)\)*|((?:\s*\*\s*\(*\d+\)*)+))?\)*'
    match = re.fullmatch(r'\(*(-?\d+)\)*' + rest, text)
    if not match:
        return None
    value = int(match.group(1))
    if match.group(2):
        value = value << int(match.group(3)) if match.group(2) == '<<' else value - int(match.group(3))
    for factor in re.findall(r'\d+', match.group(4) or ''):
        value *= int(factor)
    return value


def with_default(parts, text, defines=None):
    """The parts of a variable, with its default if that is a number, a truth or a string."""
    value = number(text, defines)
    if value is None and re.fullmatch(r'\s*(true|false)\s*', text):
        value = text.strip()
    elif value is None and re.fullmatch(r'\s*"[^";]+"\s*', text):
        value = text.strip()[1:-1]
    return parts if value is None else dict(parts, default=str(value))


# --- one function per upstream: {name: {part: words}} of one release

def nccl(tree):
    found = {}
    for _, text in tree.texts('NCCL_', 'src/*.cc', 'src/*.h', 'src/*.cu'):
        # read by name: ncclGetEnv("NCCL_X"), ncclGetLevel(&level, "NCCL_X", "NCCL_Y"), ...
        for name in re.findall(r'"(NCCL_[A-Z0-9_]+)"', text):
            found.setdefault(name, {})
        # #define NCCL_PARAM(name, env, deftVal): strtoll(str, nullptr, 0) of NCCL_<env>
        for name, default in re.findall(r'\bNCCL_PARAM\(\s*\w+\s*,\s*"(\w+)"\s*,\s*([^;]*?)\)\s*(?:;|\n)', text):
            found['NCCL_' + name] = with_default({'int': ''}, default)
        # #define DEFINE_NCCL_PARAM(name, type, key, default, flags, parser, desc), since 2.30
        for kind, name, default, rest in re.findall(
                r'\bDEFINE_NCCL_PARAM\(\s*\w+,\s*([^,]+),\s*(NCCL_\w+),\s*([^,]+),(.*?)\);\n', text, re.S):
            options = ' '.join(re.findall(r'makeOption\("(\w+)"', rest))
            parts = {'text': ''} if '*' in kind else {'whole': ''}
            if 'ncclParamOneOf' in rest:
                parts = {'choice': options}
            elif 'ncclParamBitsetOf' in rest:
                parts = {'words': options + ' trim=yes'}
            elif kind == 'bool':
                parts = {'choice': '0 1 T F TRUE FALSE'}
            found[name] = with_default(parts, default)
    # plugins that NCCL's repository brings: plugins/profiler, ext-profiler (until 2.27)
    for path, text in tree.texts(r'getenv\("NCCL_', 'plugins', 'ext-*'):
        plugin = re.match(r'(?:plugins/|ext-)(\w+)', path).group(1)
        for name in re.findall(r'getenv\("(NCCL_[A-Z0-9_]+)"', text):
            found.setdefault(name, {'plugin': plugin})
    return found


def rccl(tree):
    found = {}
    for _, text in tree.texts('[NR]CCL_', 'src/*.cc', 'src/*.h', 'src/*.cpp', 'src/*.hpp'):
        for name in re.findall(r'"((?:NCCL|RCCL)_[A-Z0-9_]+)"', text):
            found.setdefault(name, {})
        # #define RCCL_PARAM(name, env, deftVal): as NCCL_PARAM
        for prefix, name, default in re.findall(
                r'\b([NR]CCL_)PARAM\(\s*\w+\s*,\s*"(\w+)"\s*,\s*([^;]*?)\)\s*(?:;|\n)', text):
            found[prefix + name] = with_default({'int': ''}, default)
    return found


def ofi_nccl(tree):
    found = {}
    for _, text in tree.texts('OFI_NCCL_', 'include', 'src'):
        # OFI_NCCL_PARAM_VALUE_SET(PROTOCOL, (SENDRECV)(RDMA)): strcasecmp
        sets = {name: ' '.join(re.findall(r'\w+', words))
                for name, words in re.findall(r'^OFI_NCCL_PARAM_VALUE_SET\((\w+),\s*([()\w\s]+)\)$', text, re.M)}
        kinds = {'bool': {'bool': ''}, 'float': {'text': ''}, 'std::string': {'text': ''}, 'STR': {'text': ''}}
        # OFI_NCCL_PARAM(type, name, env, default), also _DEPRECATED and _REMOVED; before 1.16 _INT(name, env, default)
        for macro, kind, name, default in re.findall(
                r'^OFI_NCCL_PARAM(_\w+)?\((?:([^,()"]+),)?\s*\w+,\s*"(\w+)",\s*([^,;]*?)(?:\)|,)', text, re.M):
            kind = kind.strip() or macro.strip('_')
            parts = {'choice': sets[kind]} if kind in sets else kinds.get(kind, {'whole': ''})
            if macro == '_REMOVED':
                parts = {'text': '', 'note': 'was removed: the plugin stops with an error where it is set'}
            found['OFI_NCCL_' + name] = with_default(parts, default)
        for name in re.findall(r'getenv\("(OFI_NCCL_[A-Z0-9_]+)"', text):
            found.setdefault(name, {})
    return found


def libfabric(tree):
    found, defines = {}, {}
    for _, text in tree.texts('#define', 'prov/cxi/include/cxip.h'):
        defines = dict(re.findall(r'^#define\s+(\w+)[ \t]+(\S.*)$', text, re.M))
    kinds = {'INT': {'int': ''}, 'SIZE_T': {'int': ''}, 'BOOL': {'bool': ''}, 'STRING': {'text': ''}}
    for path, text in tree.texts(r'fi_param_define|getenv', 'src', 'prov/cxi/src', 'prov/cxi/include', 'prov/util/src'):
        # fi_param_define(&cxip_prov, "name", FI_PARAM_INT, help...): FI_CXI_NAME; NULL and core_prov: FI_NAME
        for provider, name, kind in re.findall(
                r'\bfi_param_define\(\s*(NULL|&core_prov|&cxip_prov),\s*"(\w+)",\s*FI_PARAM_(\w+)', text):
            found[('FI_CXI_' if 'cxip' in provider else 'FI_') + name.upper()] = dict(kinds[kind])
        for name in re.findall(r'getenv\("(FI_[A-Z0-9_]+)"', text):
            found.setdefault(name, {'text': ''})
        # if (cxip_env.x < 16 || cxip_env.x > CXIP_MAX_TX_SIZE) { ... "invalid" }
        for name, low, high in re.findall(r'cxip_env\.(\w+)\s*<\s*(\w+)\s*\|\|\s*cxip_env\.\1\s*>\s*(\w+)', text):
            found['FI_CXI_' + name.upper()]['int'] = '%s %s' % (number(low, defines), number(high, defines))
        # fi_param_get_str(&cxip_prov, "x", &param_str); if (param_str) { if (!strcmp(param_str, "word")) ...
        for name, rest in re.findall(r'fi_param_get_str\(&cxip_prov,\s*"(\w+)",\s*&param_str\);(.*?)param_str = NULL',
                                     text, re.S):
            words = re.findall(r'!str(?:case)?cmp\(param_str,\s*"(\w+)"', rest)
            kind = 'choice' if 'strcasecmp' in rest else 'exact'
            found['FI_CXI_' + name.upper()] = {kind: ' '.join(words + ["dash=_"] * ("*ch == '-'" in rest))}
        # .x = value in struct cxip_environment cxip_env
        block = re.search(r'struct cxip_environment cxip_env = \{(.*?)\n\};', text, re.S)
        for name, default in re.findall(r'\.(\w+)\s*=\s*([^,]+),', block.group(1) if block else ''):
            if 'FI_CXI_' + name.upper() in found:
                found['FI_CXI_' + name.upper()] = with_default(found['FI_CXI_' + name.upper()], default, defines)
    return found


def mpich(tree):
    """Every MPIR_CVAR_X is read as MPICH_X too (maint/extractcvars, $dep_ns)."""
    found = {}
    kinds = {'boolean': {'bool': ''}, 'int': {'whole': ''}}
    for _, text in tree.texts('MPIR_CVAR_|MPICH_', 'src/*.c', 'src/*.h', 'src/*.y', 'src/*.txt'):
        for block in re.findall(r'BEGIN_MPI_T_CVAR_INFO_BLOCK(.*?)END_MPI_T_CVAR_INFO_BLOCK', text, re.S):
            for variable in re.split(r'\n\s*- name\s*:(?=\s*MPIR_CVAR_)', block)[1:]:
                fields = dict(re.findall(r'^\s+([\w-]+)\s*: ?(.*)$', variable, re.M))
                parts = kinds.get(fields['type'].strip(), {'text': ''})
                if fields['type'].strip() == 'enum':
                    # "  auto - text" in its description; compared with strcmp
                    parts = {'exact': ' '.join(dict.fromkeys(re.findall(r'^\s+(\w+)\s+-', variable, re.M)))}
                names = [variable.split(None, 1)[0]] + re.findall(r'\w+', fields.get('alt-env', ''))
                for name in names:
                    default = fields.get('default', '').strip()
                    found[name.replace('MPIR_CVAR_', 'MPICH_')] = with_default(parts, default)
        for name in re.findall(r'(?:getenv|getenv_either|MPL_env2\w+)\(\s*"(MPICH_[A-Z0-9_]+)"', text):
            found.setdefault(name, {})
    return found


def rocr(tree):
    found = {}
    places = ('src', 'runtime', 'libhsakmt/src', 'projects/rocr-runtime/runtime', 'projects/rocr-runtime/libhsakmt/src')
    for path, text in tree.texts(r'getenv|GetEnvVar|IsEnvVarSet', *places):
        # var = os::GetEnvVar("HSA_X"); x_ = (var == "1") ? true : false; what is neither 0 nor 1 counts as not set
        parts = re.split(r'(?:GetEnvVar|IsEnvVarSet|getenv)\("(HSA_[A-Z0-9_]+)"\)', text)
        for name, rest in zip(parts[1::2], parts[2::2]):
            words = sorted(set(re.findall(r'var == "(\w+)"', rest)))
            parts = {'exact': '0 1'} if words and set(words) <= {'0', '1'} else {}
            if re.search(r'ato[il]\(var|strtoul?\(var', rest):
                parts = {} if words else {'int': 'base=10'}
            if 'hsakmt' in path:    # was a repository of its own before: nothing is known of its first release
                parts = dict(parts, since='')
            if parts or name not in found:
                found[name] = parts
    return found


def miopen(tree):
    found = {}
    kinds = {'_BOOL': {'bool': ''}, '_UINT64': {'int': ''}, '_STR': {'text': ''}}
    for _, text in tree.texts('MIOPEN_DECLARE_ENV_VAR', 'src/*.cpp', 'src/*.hpp', 'src/*.h', 'src/*.in'):
        # MIOPEN_DECLARE_ENV_VAR_BOOL(NAME[, default]); before ROCm 6.0 without type
        for kind, name in re.findall(r'^MIOPEN_DECLARE_ENV_VAR(_\w+)?\((MIOPEN_\w+)', text, re.M):
            found[name] = dict(kinds.get(kind, {}))
    return found


EXTRACTORS = {'NCCL_': nccl, 'RCCL_': rccl, 'OFI_NCCL_': ofi_nccl, 'FI_': libfabric, 'MPICH_': mpich, 'HSA_': rocr,
              'MIOPEN_': miopen}


# --- real libraries

def names_in(path):
    """The constants of a library that look like names of NCCL's variables."""
    library = elf.Library(path)
    # a name may be the end of a message: the linker merges them
    text = b''.join(library.data[head[4]:head[4] + head[5]] for name, head in library.sections.items()
                    if name.startswith('.rodata'))
    names = {name.decode() for name in re.findall(rb'(?<![A-Z0-9_])(NCCL_[A-Z0-9_]+)\0', text)}
    return sorted(name for name in names if not name.endswith('_INITIALIZER'))     # macros that messages name


def record_libraries(directory):
    """tests/records/libnccl/RELEASE.txt of each DIRECTORY/RELEASE/libnccl.so*."""
    os.makedirs(RECORDS, exist_ok=True)
    for release in sorted(os.listdir(directory)):
        [library] = [name for name in os.listdir(os.path.join(directory, release)) if name.startswith('libnccl.so')]
        names = names_in(os.path.join(directory, release, library))
        with open(os.path.join(RECORDS, release + '.txt'), 'w') as stream:
            stream.write("# names NCCL_* among the strings of libnccl %s (nvidia-nccl-cu12 of the package index)\n"
                         % release)
            stream.writelines(name + '\n' for name in names)


def read_records(directory=RECORDS):
    """{release: names}"""
    found = {}
    for name in sorted(os.listdir(directory)):
        with open(os.path.join(directory, name)) as stream:
            found[name[:-len('.txt')]] = {line.strip() for line in stream if line.startswith('NCCL_')}
    return found


# --- the table

def history(found, complete_from=None):
    """
    {name: parts} with since and until, of [(release, {name: parts})], oldest first.

    :param complete_from: {prefix of names: first release whose source has them}: nothing is 'since' that one
    """
    answer = {}
    for name in sorted({name for _, names in found for name in names}):
        having = [release for release, names in found if name in names]
        first = next((release for prefix, release in (complete_from or {}).items() if name.startswith(prefix)),
                     found[0][0])
        parts = {}
        for _, names in found:      # the newest release that says a kind
            if any(kind in names.get(name, {}) for kind in KINDS):
                parts = names[name]
        parts = dict(parts or next(names[name] for _, names in reversed(found) if name in names))
        if having[0] != first and 'since' not in parts:
            parts['since'] = having[0]
        if having[-1] != found[-1][0]:
            parts['until'] = having[-1]
        answer[name] = parts
    return answer


def parse(value):
    """{part: words} of 'int 1 2; since 2.18'."""
    return dict((part.split(None, 1) + [''])[:2] for part in value.split(';') if part.strip())


def merged(parts, by_hand):
    """What is found, overridden by what stands by hand; 'also WORDS' adds to the words that were found."""
    parts, by_hand = dict(parts), dict(by_hand)
    also = by_hand.pop('also', '')
    for kind in ('choice', 'exact', 'words'):
        if kind in parts and also:
            # options come last
            parts[kind] = ' '.join(sorted(parts[kind].split() + also.split(), key=lambda word: '=' in word))
    if any(kind in by_hand for kind in KINDS):
        parts = {part: words for part, words in parts.items() if part not in KINDS}
    return {part: words for part, words in dict(parts, **by_hand).items() if part != 'source'}


def line(name, parts):
    order = KINDS + ('default', 'since', 'until', 'plugin', 'only', 'note')
    unknown = set(parts) - set(order)
    if unknown:
        sys.exit('%s: no such part: %s' % (name, ', '.join(sorted(unknown))))
    said = '; '.join((part + ' ' + parts[part]).strip() for part in order
                     if part in parts and part != 'text' and (parts[part] or part in KINDS))
    return ('%s = %s' % (name, said)).rstrip()


def read_sources(checkouts, prefix):
    """([(release, {name: parts})], [what was read])"""
    found, said = [], []
    for repository, tags, oldest, newest_too in UPSTREAMS[prefix]:
        trees = releases(git_dir(checkouts, repository), tags, oldest, newest_too)
        extract = EXTRACTORS[prefix]
        for release, tree in trees:
            label = 'after ' + found[-1][0] if release == 'newest' else release
            found.append((label, extract(tree)))
        head = trees[-1][1]
        said.append('%s %s' % (repository, (trees[0][0] + ' to ' + trees[-1][0]) if len(trees) > 1 else 'at') + (
            ' (%s)' % head.git('rev-parse', '--short=9', head.ref + '^{commit}').decode().strip()))
    return found, said


def make(checkouts, prefixes=tuple(UPSTREAMS), by_hand_path=BY_HAND, records=None):
    """The text of the table."""
    by_hand = configparser.RawConfigParser(delimiters=('=',), comment_prefixes=('#',), interpolation=None)
    by_hand.optionxform = str
    with open(by_hand_path) as stream:
        by_hand.read_file(stream)
    with open(os.path.join(HERE, 'header.txt')) as stream:
        text = [stream.read()]
    sources = {prefix: read_sources(checkouts, prefix) for prefix in prefixes}
    for prefix in prefixes:
        found, said = sources[prefix]
        hand = dict(by_hand[prefix]) if prefix in by_hand else {}
        out = hand.pop('except', '').split()
        if prefix == 'NCCL_' and records:
            said = said + ['strings of libnccl %s to %s' % (min(records, key=in_order), max(records, key=in_order))]
            known, newest = dict(found), found[-1]
            # a plugin's names, and one that the compiler took apart, are in no library's strings
            strings = set().union(*records.values())
            elsewhere = {name: parts for name, parts in newest[1].items() if name not in strings}
            for release, names in records.items():
                known[release] = dict(dict.fromkeys(names, {}), **known.get(release, {}))
                if in_order(release) > in_order(newest[0]):
                    known[release].update(elsewhere)
            found = sorted(known.items(), key=lambda item: in_order(item[0]))
        first = {'FI_CXI_': next((release for release, names in found if 'FI_CXI_ODP' in names), None)}
        names = history(found, first if prefix == 'FI_' else None)
        names = {name: parts for name, parts in names.items()
                 if name.startswith(prefix) and not any(fnmatch.fnmatchcase(name, pattern) for pattern in out)}
        if prefix == 'NCCL_' and 'RCCL_' in sources:
            for name, parts in history(sources['RCCL_'][0]).items():
                if name.startswith(prefix) and name not in names and not any(
                        fnmatch.fnmatchcase(name, pattern) for pattern in out):
                    names[name] = {part: words for part, words in parts.items() if part in KINDS + ('default',)}
                    names[name]['only'] = 'RCCL'
        for name in [name for name in hand if name.startswith(prefix)]:
            names[name] = merged(names.get(name, {}), parse(hand.pop(name)))
        text.append('\n[%s]\n' % prefix)
        keys = {'newest': re.sub(r'^after (.*)', r'\1 and later', found[-1][0])}
        keys.update(hand)
        keys['source'] = '; '.join(said + ([hand['source']] if 'source' in hand else []))
        text += ['%s = %s\n' % item for item in sorted(keys.items())]
        text += [line(name, parts) + '\n' for name, parts in sorted(names.items())]
    return ''.join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkouts')
    parser.add_argument('--libraries', metavar='DIR')
    parser.add_argument('-o', '--output', default=TABLE)
    args = parser.parse_args()
    if args.libraries:
        record_libraries(args.libraries)
    text = make(args.checkouts, records=read_records())
    with open(args.output, 'w') as stream:
        stream.write(text)


if __name__ == '__main__':
    main()
