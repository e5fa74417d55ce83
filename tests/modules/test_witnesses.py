# SPDX-License-Identifier: GPL-2.0-only
"""Each fact that an emulation asserts about its machine has a witness, or is called believed."""
import collections
import types

import pytest

from testbed import NODES, ROOT, cirrus, derecho, frontier, lumi, newex, slurm, witnesses


def of_tree(emulation, directory):
    """Facts of a tree of modules."""
    make, tops = {'derecho': (derecho.Derecho, ('opt', 'glade')), 'frontier': (frontier.Frontier, ('opt', 'sw')),
                  'cirrus': (cirrus.Cirrus, ('opt', 'nvhpc', 'cmake', 'openmpi')),
                  'newex': (newex.NewEX, ('opt', 'usr'))}[emulation]
    tree = make(directory)
    return (witnesses.of_modules(tree.path / 'modules') | witnesses.of_files(tree.path, *tops)
            | witnesses.of_environ(tree.env))


def of_cluster(kind, directory):
    """Facts of a Slurm configuration that is written, and not started."""
    cluster = kind.__new__(kind)
    cluster.dir, cluster.root, cluster.nodes, cluster.separate = directory, None, NODES, False
    directory.mkdir()
    cluster.write_configuration()
    return witnesses.of_slurm((directory / 'slurm.conf').read_text())


@pytest.fixture
def facts(tmp_path, monkeypatch):
    """A function: what an emulation asserts."""
    def read(emulation):
        if emulation == 'slurm':
            return of_cluster(slurm.Cluster, tmp_path / 'slurm')
        if emulation == 'lumi':
            # without the bundle and the container runtime, which are real
            monkeypatch.setattr(lumi.Site, 'copy_of_bundle', lambda self: None)
            monkeypatch.setattr(lumi.Site, 'easybuild_variables', lambda self: {})
            monkeypatch.setattr(lumi.images, 'runtime', lambda: tmp_path)
            site = lumi.Site(tmp_path / 'lumi', types.SimpleNamespace(name='Lmod'))
            return (of_cluster(lumi.Cluster, tmp_path / 'cluster') | witnesses.of_modules(site.modules)
                    | witnesses.of_environ(site.env))
        return of_tree(emulation, tmp_path / emulation)
    return read


@pytest.mark.parametrize('emulation', ['derecho', 'frontier', 'cirrus', 'newex', 'lumi', 'slurm'])
def test_each_fact_has_one_row(emulation, facts):
    """A module, version, variable, path or partition that is new in an emulation needs a witness first."""
    listed = [fact for row in witnesses.rows() if row.emulation == emulation for fact in row.facts]
    asserted = facts(emulation)
    assert not asserted - set(listed), 'in no section of testbed/witnesses.cfg'
    assert not {fact for fact in listed if not fact.startswith('also ')} - asserted, 'not emulated any more'
    assert not [fact for fact, count in collections.Counter(listed).items() if count > 1], 'in two sections'


def test_rows_are_of_emulations():
    emulations = {row.emulation for row in witnesses.rows()}
    assert emulations == {'derecho', 'frontier', 'cirrus', 'newex', 'lumi', 'slurm'}
    for row in witnesses.rows():
        assert row.title and row.witness and (ROOT / f'tests/testbed/{row.emulation}.py').exists()


def test_the_page_has_the_table():
    """If it differs: PYTHONPATH=tests python -m testbed.witnesses prints the section."""
    assert witnesses.section() in (ROOT / 'docs/verification.md').read_text()


def test_a_new_module_is_noticed(tmp_path):
    (tmp_path / 'core/gcc').mkdir(parents=True)
    (tmp_path / 'core/gcc/99.1.lua').write_text('setenv("GNU_VERSION", "99.1")\nprepend_path("PATH", "/x")\n')
    assert witnesses.of_modules(tmp_path) == {'module core/gcc/99.1', 'gcc sets GNU_VERSION', 'gcc sets PATH'}
    assert witnesses.expand('a{b,c}/d{1,2}') == ['ab/d1', 'ab/d2', 'ac/d1', 'ac/d2']
