# SPDX-License-Identifier: GPL-2.0-only
"""
Variables drawn from upstream's manuals (tests/records): right ones stop nothing in check, wrong ones are named.

Libraries with the names of real ones are asked: without one nothing can be red.
"""
import pathlib
import subprocess
import sys

import pytest

from slingtorch.job import findings, variables

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'tools/variables'))

import draw             # noqa: E402
import make             # noqa: E402

SEEDS = range(22, 27)   # any; 22 is the one that docs/verification.md reports
FAMILIES = variables.read_table()
NCCL = make.read_records()      # {release: names among the strings of the real library}
OLDEST = min(NCCL, key=make.in_order)


def family_of(name):
    return variables.family_of(name, FAMILIES)


class Libraries:
    """Libraries that have the names of real ones: of a release of NCCL its own, else those of the table."""

    def __init__(self, directory):
        self.directory, self.files, self.asked = directory, {}, {}

    def file(self, directory, name, strings):
        """A library with these constants."""
        path = self.directory / directory / name
        path.parent.mkdir(exist_ok=True)
        code = 'const char *a[] = {%s};' % ', '.join('"%s"' % text for text in sorted(strings))
        subprocess.run(['gcc', '-shared', '-fPIC', '-nostdlib', '-O2', '-Wl,-O2', '-o', path, '-x', 'c', '-'],
                       input=code, text=True, check=True)
        return str(path)

    def for_family(self, prefix, release, plugin):
        """What the process maps that has all variables with a prefix; LibraryProbe opens each file once."""
        key = prefix, release, plugin
        if key not in self.asked:
            names = set(family_of(prefix).known)
            if prefix == 'FI_':
                # libfabric makes the names of these
                paths = [self.file(prefix, 'libfabric.so.1', {
                    name[len('FI_CXI_' if name.startswith('FI_CXI_') else 'FI_'):].lower() for name in names})]
            elif release:
                paths = [self.file(release, 'libnccl.so.2', NCCL[release])]
            else:
                names |= set(family_of('NCCL_').known) if prefix == 'RCCL_' else set()
                library = {'NCCL_': 'librccl', 'MPICH_': 'libmpich'}.get(prefix, family_of(prefix).libraries[0])
                paths = [self.file(prefix, library + '.so.1', names)]
            plugins = [self.file('plugins', 'libnccl-profiler.so', names)] if plugin else []
            self.asked[key] = variables.LibraryProbe(paths, None, plugins)
        return self.asked[key]

    def knowing(self, name):
        """The newest library that has this variable."""
        prefix = family_of(name).prefix
        having = [release for release in NCCL if name in NCCL[release]]
        return self.for_family(prefix, max(having, key=make.in_order) if having else None,
                               'plugin' in family_of(name).known.get(name, {}))

    def before(self, name):
        """The oldest libnccl for a variable of NCCL: it has few of them."""
        return self.for_family('NCCL_', OLDEST, False) if name.startswith('NCCL_') else self.knowing(name)


@pytest.fixture(scope='module')
def libraries(tmp_path_factory):
    return Libraries(tmp_path_factory.mktemp('libraries'))


NOTHING = variables.LibraryProbe([])


def found(name, value, asked, families=FAMILIES):
    """What check says of one variable: [(level, text)]."""
    report = findings.Report(0)
    report.fact('env ' + name, value)
    variables.check(report, families, asked, False)
    return [(entry[0], entry[2]) for entry in report.sorted()]


def table_without(names):
    """The table as it was before these variables were."""
    families = variables.read_table()
    for name in names:
        variables.family_of(name, families).known.pop(name, None)
    return families


@pytest.mark.parametrize('seed', SEEDS)
def test_120_right_ones_are_right_for_a_library_that_has_them_and_without_one(seed, libraries):
    right = draw.draw(seed)[0]
    assert len(dict(right)) == 120
    said = {(name, ' '.join(asked.paths)): found(name, value, asked)
            for name, value in right for asked in (libraries.knowing(name), NOTHING)}
    asked = [name for name, _ in right if libraries.knowing(name).library(family_of(name))]
    print('seed %d: 120 right, %d asked of a library: %d with a finding' % (
        seed, len(asked), sum(map(bool, said.values()))))
    assert {key: texts for key, texts in said.items() if texts} == {}
    assert (len(asked), len(said)) == (120, 240)


@pytest.mark.parametrize('seed', SEEDS)
def test_120_right_ones_are_never_red_for_another_library_or_table(seed, libraries):
    right = draw.draw(seed)[0]
    old_table = table_without(dict(right))
    unread = unknown = 0
    for name, value in right:
        # a library that does not read what the table knows: yellow
        levels = [level for level, _ in found(name, value, libraries.before(name))]
        assert 'red' not in levels, name
        unread += 'yellow' in levels
        # a newer library than the table: it says that the name is right
        assert found(name, value, libraries.knowing(name), old_table) == [], name
        # nobody can be asked and the table does not know it: yellow
        levels = [level for level, _ in found(name, value, NOTHING, old_table)]
        assert 'red' not in levels, name
        unknown += 'yellow' in levels
    print('seed %d: %d unread, %d unknown, all yellow' % (seed, unread, unknown))
    assert unread >= 5 and unknown >= 100


@pytest.mark.parametrize('seed', SEEDS)
def test_60_wrong_ones_are_named_and_a_wrong_letter_is_red_where_the_library_was_asked(seed, libraries):
    _, names, values = draw.draw(seed)
    assert len(names) + len(values) == 60
    reds = 0
    for name, value, meant in names:
        # ROCr does not show all its names: it is never believed if it says no
        level = 'yellow' if name.startswith('HSA_') else 'red'
        reds += level == 'red'
        for asked, wanted in ((libraries.knowing(meant), level), (NOTHING, 'yellow')):
            [(seen, text)] = found(name, value, asked)
            assert (seen, name in text) == (wanted, True), (meant, text)
    for name, value in values:
        for asked in (libraries.knowing(name), NOTHING):
            [(seen, text)] = found(name, value, asked)
            assert (seen, name in text) == ('yellow', True), text
    print('seed %d: 60 wrong, all named; %d of 30 names red' % (seed, reds))
    assert reds >= 20


def test_a_missing_first_letter_is_red(libraries):
    """The rest is the end of the right name, which the library has."""
    for meant in sorted(draw.read()):
        if meant.startswith('FI_'):
            begin = len('FI_CXI_' if meant.startswith('FI_CXI_') else 'FI_')
            [(level, text)] = found(meant[:begin] + meant[begin + 1:], '1', libraries.knowing(meant))
            assert level == 'red' and meant in text


def test_the_first_word_behind_the_prefix_is_misspelt_too():
    first = {name.split('_')[1] for seed in range(20) for name, _, _ in draw.draw(seed)[1] if name.startswith('FI_')}
    assert first - {name.split('_')[1] for name in draw.read()}


def test_the_same_seed_draws_the_same():
    assert draw.draw(1) == draw.draw(1) != draw.draw(2)


@pytest.mark.parametrize('args, status, says', [(['--help'], 0, 'ofiwg/libfabric'), ([], 2, 'usage: draw.py')])
def test_usage(args, status, says):
    done = subprocess.run([sys.executable, ROOT / 'tools/variables/draw.py', *args], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    assert done.returncode == status and says in done.stdout and 'Traceback' not in done.stdout
