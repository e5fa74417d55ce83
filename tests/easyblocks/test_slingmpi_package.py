# SPDX-License-Identifier: GPL-2.0-only
"""What slingmpi's Python says, without PyTorch and MPI: tests/stages/mpi_backend has them."""
import datetime
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest

from testbed import ROOT

SECOND = datetime.timedelta(seconds=1)


class Backend:
    """torch.distributed's, as far as it is asked."""

    registered = []

    @classmethod
    def register_backend(cls, *words, **options):
        cls.registered.append((*words, options))
        setattr(cls, words[0].upper(), words[0])


@pytest.fixture
def slingmpi(monkeypatch, tmp_path):
    """The package on a PyTorch 2.13.0 that is a stub; its built.json can be written."""
    c10d = ModuleType('torch.distributed.distributed_c10d')
    c10d.default_pg_timeout, c10d._new_process_group_helper, c10d._MPI_AVAILABLE = SECOND, lambda *words, **_: words, False
    dist = ModuleType('torch.distributed')
    dist.Backend = type('Backend', (Backend,), {'registered': []})
    dist.handlers = []
    dist.register_rendezvous_handler = lambda *words: dist.handlers.append(words)
    dist.DistStoreError, dist.DistBackendError = type('StoreError', (Exception,), {}), type('BackendError', (Exception,), {})
    dist.Store, dist.distributed_c10d, dist.is_initialized, dist.is_mpi_available = object, c10d, lambda: False, lambda: False
    torch = ModuleType('torch')
    torch.__version__, torch.distributed = '2.13.0+cpu', dist
    for name, module in (('torch', torch), ('torch.distributed', dist), (c10d.__name__, c10d)):
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location('slingmpi', ROOT / 'slingmpi/slingmpi/__init__.py',
                                                  submodule_search_locations=[str(tmp_path)])
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, 'slingmpi', module)
    monkeypatch.delenv('SLINGMPI_AS_MPI', raising=False)
    spec.loader.exec_module(module)
    module.made = {'torch': '2.13', 'mpi': 'mpich 4.0.2', 'compiler': '/usr/bin/mpicxx', 'cxx11_abi': True}
    module.built = lambda: module.made
    module.dist, module.c10d, module.path = dist, c10d, tmp_path
    return module


def error_of(function, *args):
    with pytest.raises(Exception) as caught:
        function(*args)
    return str(caught.value)


def test_registers(slingmpi, monkeypatch):
    name, create, options = slingmpi.dist.Backend.registered[0]
    assert (name, create, options) == ('slingmpi', slingmpi._create, {'extended_api': True, 'devices': ['cpu', 'cuda']})
    assert slingmpi.dist.handlers == [('mpi', slingmpi._rendezvous)]
    slingmpi.register()
    assert len(slingmpi.dist.Backend.registered) == 1 and not slingmpi.c10d._MPI_AVAILABLE
    monkeypatch.setenv('SLINGMPI_AS_MPI', '1')
    slingmpi.register()
    assert slingmpi.c10d._MPI_AVAILABLE and slingmpi.c10d.ProcessGroupMPI is slingmpi._NamedMPI
    helper = slingmpi.c10d._new_process_group_helper
    slingmpi.register()     # once
    assert slingmpi.c10d._new_process_group_helper is helper
    del slingmpi.c10d.ProcessGroupMPI
    slingmpi.dist.is_mpi_available = lambda: True
    assert error_of(slingmpi.take_name_mpi) == (
        'SLINGMPI_AS_MPI=1, but this PyTorch was built with MPI and has a backend "mpi" of its own. Unset it, and use the name '
        '"slingmpi" for this one')


def test_name_mpi_has_a_time_limit_and_a_store(slingmpi):
    slingmpi._store_of_mpi = 'store for {}'.format
    make = slingmpi._with_store(lambda *words, **_: words[4])
    assert make(2, 0, [], 'mpi', object(), 'first', timeout=3 * SECOND) == f'store for {3 * SECOND}'
    named = slingmpi._NamedMPI
    assert (named.store, named.timeout, named.name) == (f'store for {3 * SECOND}', 3 * SECOND, 'first')
    assert make(2, 0, [], 'mpi', 'own store', 'second') == 'own store'
    assert (named.store, named.timeout, named.name) == (f'store for {3 * SECOND}', SECOND, 'second')


def test_built_for_something_else(slingmpi, monkeypatch):
    slingmpi.made['torch'] = '2.12'
    assert error_of(slingmpi._load) == (
        'slingmpi was built for PyTorch 2.12, and this is 2.13.0+cpu. Build it again: pip install --no-build-isolation '
        '--force-reinstall .../slingmpi')
    slingmpi.made['torch'] = '2.13'
    said = error_of(slingmpi._load)
    assert said.startswith('slingmpi was built with mpich 4.0.2 (/usr/bin/mpicxx) and does not load: cannot import') and said.endswith(
        '. Load the module of that MPI, or build slingmpi again with this one')
    slingmpi._mpi_libraries = lambda: ['/a/libmpich.so.12', '/b/libmpi.so.40']
    assert error_of(slingmpi._require_one_mpi) == (
        'two MPIs are in this process: /a/libmpich.so.12 and /b/libmpi.so.40. slingmpi was built with mpich 4.0.2. Whatever else '
        'uses MPI here (mpi4py, h5py, PyTorch itself) must be built with the same one')
    slingmpi._mpi_libraries = lambda: ['/a/libmpich.so.12']
    slingmpi._require_one_mpi()
    for built, runs, fits in [
            ('mpich 4.0.2', 'MPICH Version: 4.3.1', True), ('mpich 4.0.2', 'MPICH Version: 3.4', False),
            ('openmpi 5', 'Open MPI v4.1.2', False), ('cray 8.1.27', 'MPI VERSION : CRAY MPICH version 8.1.32', True),
            ('cray 8.1.27', 'MPI VERSION : CRAY MPICH version 9.0', False), ('mpich 3.4', 'CRAY MPICH version 8.1', True),
            ('mpich 4', 'another MPI 2021', True)]:
        slingmpi.made['mpi'] = built
        extension = SimpleNamespace(library_version=lambda runs=runs: runs)
        if fits:
            slingmpi._require_built_mpi(extension)
        else:
            assert error_of(slingmpi._require_built_mpi, extension) == (
                f'slingmpi was built with {built}, and the MPI in this process is {runs} (/a/libmpich.so.12). Load the module of '
                'that MPI, or build slingmpi again with this one')


def test_ranks_that_do_not_meet(slingmpi):
    """They are counted in the store of their group."""
    class Store(dict):
        def add(self, key, number):
            self[key] = self.get(key, 0) + number
            return self[key]
        set = dict.__setitem__

        def wait(self, keys, timeout):
            if not set(keys) <= set(self):
                raise slingmpi.dist.DistStoreError
    store, asked = Store(), []
    assert error_of(slingmpi._meet, store, 2, 3 * SECOND, 'tp') == (
        'group tp: not all of its 2 ranks came to new_group or init_process_group within 0:00:03: one is late, or dead. Look for '
        'the first message of another rank')
    slingmpi._meet(store, 2, 3 * SECOND, 'tp')
    extension = SimpleNamespace(start=lambda: (1, 2), library_version=lambda: 'MPICH 4', create=lambda *words: words)
    slingmpi._load, slingmpi._loaded = lambda: extension, extension
    slingmpi._meet = lambda *words: asked.append(words)
    options = SimpleNamespace(global_ranks_in_group=[], group_size=2, group_rank=1, store=store, timeout=SECOND / 2, group_id='')
    assert slingmpi._create(options) == ([0, 1], 500, '0') and asked == [(store, 2, SECOND / 2, '0')]
    slingmpi.dist.is_initialized, slingmpi.dist.get_rank, slingmpi.dist.get_world_size = lambda: True, lambda: 1, lambda: 2
    options = SimpleNamespace(global_ranks_in_group=[1], group_size=1, group_rank=0, store=store, timeout=SECOND / 9999, group_id='x')
    assert slingmpi._create(options) == ([1], 1, 'x')
    slingmpi.dist.get_world_size = lambda: 4
    assert error_of(slingmpi._create, options) == (
        'this process is rank 1 of 4 for torch.distributed (RANK and WORLD_SIZE), but rank 1 of 2 for MPI (MPICH 4). Start the '
        'ranks with the launcher of that MPI: mpiexec, or srun with its PMI (srun --mpi=list); torchrun starts no MPI')


def test_libraries_that_are_an_mpi(slingmpi):
    for name, found in [('libmpi.so.40', True), ('libmpich.so.12', True), ('libmpi_gnu_123.so.12', True), ('libmpi_cray.so.12', True),
                        ('libmpi_gtl_cuda.so.0', False), ('libmpi_cxx.so.40', False), ('libmpi_usempif08.so', False),
                        ('libmpi_mpifh.so.40', False), ('libmpi_java.so', False), ('libmpifort.so.12', False)]:
        assert bool(slingmpi._MPI_LIBRARY.match(name)) is found, name
    assert [path for path in slingmpi._mpi_libraries() if '/libmpi' not in path] == []


def test_the_store_of_mpi_has_the_time_limit(slingmpi):
    groups = []
    slingmpi.torch.zeros, slingmpi.torch.uint8 = lambda *_, **__: None, None
    slingmpi._load = lambda: SimpleNamespace(start=lambda: (1, 2))
    slingmpi._group = lambda *words: groups.append(words) or 1 / 0
    with pytest.raises(ZeroDivisionError):
        slingmpi._store_of_mpi(3 * SECOND)
    assert groups == [([0, 1], 3 * SECOND, 'store')]
