# SPDX-License-Identifier: GPL-2.0-only
"""An extended environment in a batch job, where sourcing it is the only line."""
import shlex

import pytest

from testbed import run

pytestmark = pytest.mark.real


@pytest.mark.parametrize('shell', ['bash', 'zsh'])
def test_batch_job(slurm, image_env, lmod, tmp_path, shell):
    """Four ranks on two nodes see both sets of packages; nothing of the submitting shell goes along."""
    venv = tmp_path / 'my env'
    lmod.bash(f'''
        set -e
        module load {image_env.module}
        python -m venv --without-pip --system-site-packages {shlex.quote(str(venv))}
        extend-venv-activate {shlex.quote(str(venv))}
    ''', modulepath=[image_env.modulepath])
    own = next(venv.glob('lib/python3*/site-packages'))
    (own / 'mine.py').write_text('')
    code = 'import alpha, mine, os; print(os.environ["RANK"], os.environ["WORLD_SIZE"], alpha.__file__, mine.__file__, sep="|")'
    done = slurm.sbatch(f'''#!/bin/{shell}
        set -eu
        source '{venv}/bin/activate'
        srun --export=ALL $RUNSCRIPTS/conda-python-distributed -B -c '{code}'
        deactivate
        echo "end: ${{LOADEDMODULES-}} ${{VIRTUAL_ENV-}}"
    ''', '-N2', '--ntasks-per-node=2', '--export=NIL', env={'HOME': tmp_path})
    assert done.returncode == 0, done.output
    alpha = image_env.root / own.relative_to(venv) / 'alpha.py'
    expected = {f'{rank}|4|{alpha}|{own}/mine.py' for rank in range(4)} | {'end:  '}
    assert expected == set(done.output.splitlines()), done.output


def test_module_is_gone(slurm, image_env, lmod, tmp_path):
    """The job ends with the message and a status, before it computes anything with other packages."""
    venv = tmp_path / 'env'
    modules = tmp_path / 'modules/PyTorch'
    modules.mkdir(parents=True)
    file = modules / '0.1-tiny.lua'
    file.write_bytes((image_env.modulepath / 'PyTorch/0.1-tiny.lua').read_bytes())
    lmod.bash(f'module load {image_env.module} && python -m venv --without-pip {venv} && extend-venv-activate {venv}',
              modulepath=[modules.parent])
    file.unlink()
    done = slurm.sbatch(f'#!/bin/bash\nset -e\nsource {venv}/bin/activate\nsrun --export=ALL python -c "print(1)"\n', '--export=NIL')
    assert done.returncode == 1 and '\n1\n' not in done.output
    assert f'cannot load the module {image_env.module}, for which this environment was extended' in done.output
    run([venv / 'bin/python', '-c', ''])
