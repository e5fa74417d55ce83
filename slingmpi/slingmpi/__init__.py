# SPDX-License-Identifier: GPL-2.0-only
"""torch.distributed over MPI: the backend "slingmpi", for a PyTorch that was built without MPI.

    torch.distributed.init_process_group('slingmpi')

with ranks that mpiexec or srun started, whose RANK, WORLD_SIZE and store are given as for every backend, or by MPI:

    torch.distributed.init_process_group('slingmpi', init_method='mpi://')

PyTorch loads it by name (entry points); with a PyTorch before 2.5 or without
the package's metadata: `import slingmpi`. With SLINGMPI_AS_MPI=1 in the environment it takes the name "mpi" too, where
PyTorch itself has none.
"""
import atexit
import datetime
import functools
import json
import os
import re
import socket

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

NAME = 'slingmpi'
_loaded = None

# An MPI itself, not its parts for other languages or for GPUs. Cray's: libmpi_gnu_123.so.12, libmpi_cray.so.12 ...
_MPI_LIBRARY = re.compile(r'libmpi(ch)?(_(?!gtl|cxx|mpifh|usempi|java)\w+)?\.so')


def built():
    """What it was built for: {'torch': '2.13', 'mpi': 'mpich 4.0.2', 'compiler': path, 'cxx11_abi': bool}."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'built.json')) as file:
        return json.load(file)


def _load():
    """The extension, with MPI started. RuntimeError if it fits neither this PyTorch nor the MPI that is loaded."""
    global _loaded
    if _loaded is None:
        made = built()
        here = '.'.join(torch.__version__.split('.')[:2])
        if here != made['torch']:
            raise RuntimeError(f"slingmpi was built for PyTorch {made['torch']}, and this is {torch.__version__}. "
                               'Build it again: pip install --no-build-isolation --force-reinstall .../slingmpi')
        try:
            from slingmpi import _backend as extension
        except ImportError as err:
            raise RuntimeError(f"slingmpi was built with {made['mpi']} ({made['compiler']}) and does not load: {err}. "
                               'Load the module of that MPI, or build slingmpi again with this one') from err
        _require_one_mpi()
        _require_built_mpi(extension)
        extension.start()
        atexit.register(extension.stop)
        _loaded = extension
    return _loaded


def _mpi_libraries():
    """Paths of the MPIs in this process."""
    with open('/proc/self/maps') as file:
        paths = {line.rstrip('\n').split(None, 5)[-1] for line in file}
    return sorted(path for path in paths if _MPI_LIBRARY.match(os.path.basename(path)))


def _require_one_mpi():
    found = _mpi_libraries()
    if len(found) > 1:
        raise RuntimeError(f"two MPIs are in this process: {' and '.join(found)}. slingmpi was built with "
                           f"{built()['mpi']}. Whatever else uses MPI here (mpi4py, h5py, PyTorch itself) must be "
                           'built with the same one')


def _require_built_mpi(extension):
    """The MPI that runs is the one that it was built for, or takes its place as Cray's does for an image's MPICH."""
    kind, major = re.match(r'(\w+) (\d+)', built()['mpi']).groups()
    found = re.search(r'(CRAY MPICH|MPICH|Open MPI)\D*(\d+)', extension.library_version())
    names = {'CRAY MPICH': 'cray', 'MPICH': 'mpich', 'Open MPI': 'openmpi'}
    if found and names[found.group(1)] == kind and major != found.group(2):
        raise RuntimeError(f"slingmpi was built with {built()['mpi']}, and the MPI in this process is "
                           f"{extension.library_version()} ({', '.join(_mpi_libraries())}). Load the module of that "
                           'MPI, or build slingmpi again with this one')


def _group(members, timeout, name):
    return _loaded.create(members, max(1, timeout // datetime.timedelta(milliseconds=1)), name)


def _meet(store, size, timeout, name):
    """Wait in the store for the other ranks of a group: MPI itself would wait for them without an end."""
    if store.add('slingmpi', 1) == size:
        store.set('slingmpi all', '')
    try:
        store.wait(['slingmpi all'], timeout)
    except dist.DistStoreError as err:
        raise dist.DistBackendError(
            f'group {name}: not all of its {size} ranks came to new_group or init_process_group within {timeout}: one '
            'is late, or dead. Look for the first message of another rank') from err


def _store_of_mpi(timeout):
    """A store that all ranks of MPI_COMM_WORLD share, on rank 0's host ($MASTER_ADDR there, or its name)."""
    rank, size = _load().start()
    address = torch.zeros(256, dtype=torch.uint8)
    store = None
    if rank == 0:
        host = os.environ.get('MASTER_ADDR') or socket.gethostname()
        store = dist.TCPStore(host, 0, size, True, timeout, wait_for_workers=False)
        text = f'{host} {store.port}'.encode()
        address[:len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    world = _group(list(range(size)), timeout, 'store')
    world.broadcast([address], dist.BroadcastOptions()).wait()
    host, port = bytes(address.tolist()).rstrip(b'\0').decode().split()
    return store or dist.TCPStore(host, int(port), size, False, timeout)


def _rendezvous(_, timeout=distributed_c10d.default_pg_timeout, **__):
    """init_method='mpi://': store, rank and size from MPI."""
    yield (_store_of_mpi(timeout), *_load().start())


def _create(options, _=None):
    """A process group for torch.distributed.

    :param options: torch.distributed's _DistributedBackendOptions
    """
    rank, size = _load().start()
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    # the world's rank and size: those of the default group, or of this one while it is being made
    world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (
        options.group_rank, options.group_size)
    if world != (rank, size):
        raise RuntimeError(
            f'this process is rank {world[0]} of {world[1]} for torch.distributed (RANK and WORLD_SIZE), but rank '
            f'{rank} of {size} for MPI ({_loaded.library_version()}). Start the ranks with the '
            'launcher of that MPI: mpiexec, or srun with its PMI (srun --mpi=list); torchrun starts no MPI')
    name = options.group_id or '0'
    _meet(options.store, len(members), options.timeout, name)
    return _group(members, options.timeout, name)


def register(name=NAME):
    """Make torch.distributed know the backend."""
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, _create, extended_api=True, devices=['cpu', 'cuda'])
        dist.register_rendezvous_handler('mpi', _rendezvous)
    if os.environ.get('SLINGMPI_AS_MPI') == '1':
        take_name_mpi()


class _NamedMPI:
    """In the place of PyTorch's own class for the name "mpi"."""

    store, timeout, name = None, None, ''

    @classmethod
    def create(cls, ranks):
        """A process group of these global ranks, or of all; None where this rank is in none."""
        rank, size = _load().start()
        members = list(ranks) or list(range(size))
        if rank not in members:
            return None
        _meet(dist.PrefixStore(cls.name, cls.store), len(members), cls.timeout, cls.name)
        return _group(members, cls.timeout, cls.name)


def _with_store(helper):
    """PyTorch's helper that makes each group, which for the name "mpi" tells neither the time limit nor a store."""
    @functools.wraps(helper)
    def make(size, rank, ranks, backend, store, group_name, *args, **kwargs):
        if type(store) is dist.Store:       # what stands for none
            store = _NamedMPI.store = _store_of_mpi(kwargs['timeout'])
        _NamedMPI.timeout, _NamedMPI.name = kwargs.get('timeout') or distributed_c10d.default_pg_timeout, group_name
        return helper(size, rank, ranks, backend, store, group_name, *args, **kwargs)
    return make


def take_name_mpi():
    """Let init_process_group('mpi') use this backend. RuntimeError where PyTorch has a backend of that name."""
    if getattr(distributed_c10d, 'ProcessGroupMPI', None) is _NamedMPI:
        return
    if dist.is_mpi_available():
        raise RuntimeError('SLINGMPI_AS_MPI=1, but this PyTorch was built with MPI and has a backend "mpi" of its own. '
                           'Unset it, and use the name "slingmpi" for this one')
    distributed_c10d.ProcessGroupMPI = _NamedMPI
    distributed_c10d._new_process_group_helper = _with_store(distributed_c10d._new_process_group_helper)
    distributed_c10d._MPI_AVAILABLE = True


register()
