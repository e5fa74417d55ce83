# SPDX-License-Identifier: GPL-2.0-only
"""What the runscript says of an MPI under a launcher is what happens: both MPIs, under every launcher of the testbed."""

import pytest

import testbed

pytestmark = pytest.mark.real

START = testbed.ROOT / 'runscripts/conda-python-distributed'

# no mpi4py: it would have to be there once for each MPI
PROGRAM = """import ctypes, os, sys
mpi = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
mpi.MPI_Init(None, None)
world = ctypes.c_int(0x44000000)
if 'mpich' not in sys.argv[1]:
    world = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, 'ompi_mpi_comm_world')))
size = ctypes.c_int()
mpi.MPI_Comm_size(world, ctypes.byref(size))
# one write: a launcher may mix the lines of two ranks otherwise
os.write(1, b'size %d\\n' % size.value)
mpi.MPI_Finalize()
"""
LIBRARIES = {'openmpi': 'libmpi.so.40', 'mpich': 'libmpich.so.12'}

# (launcher, MPI) that are two ranks of one job; the others are two jobs of one rank, or end in MPI_Init
UNDERSTAND = {('openmpi', 'openmpi'), ('mpich', 'mpich'), ('pmi2', 'mpich')}


@pytest.fixture(scope='module')
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp('size') / 'size.py'
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize('mpi', LIBRARIES)
@pytest.mark.parametrize('launcher', ['openmpi', 'mpich', 'none', 'pmi2', 'cray_shasta'])
def test_verdict_is_what_happens(request, tmp_path, script, launcher, mpi):
    def start(**env):
        command = [START, script, LIBRARIES[mpi]]
        if launcher in LIBRARIES:
            run = request.getfixturevalue(launcher).run
            env = {**testbed.clean_environ(), 'SLINGTORCH_CACHE_ROOT': str(tmp_path), **env}
            return run(2, *command, env=env, check=False, timeout=240)
        slurm = request.getfixturevalue('slurm')
        env = {**slurm.env, 'SLINGTORCH_CACHE_ROOT': str(tmp_path), **env}
        return testbed.run(['srun', f'--mpi={launcher}', '-N2', '-n2', *command], env=env, check=False, timeout=240)

    real, checked = start(), start(SLINGTORCH_MPI=mpi)
    works = real.stdout.count('size 2') == 2
    assert works == ((launcher, mpi) in UNDERSTAND), real.stdout + real.stderr
    if works:
        assert (checked.returncode, checked.stdout.count('size 2')) == (0, 2), checked.stderr
    else:
        assert checked.returncode != 0 and 'size' not in checked.stdout
        assert 'each rank would be a job of its own, or hang. Start them with ' in checked.stderr
