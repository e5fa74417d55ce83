# SPDX-License-Identifier: GPL-2.0-only
"""The training programs that users copy: the same losses on any number of ranks, and nothing replaced."""
import contextlib
import json
import os
import re
import shutil

import pytest

from testbed import ROOT, forkedtorch, only_root, readme, run

pytestmark = pytest.mark.real

PROGRAMS = ROOT / 'examples/training'
RESUME = PROGRAMS / 'resume_training.py'
END = re.compile(r' dist\.destroy_process_group\(\)\n(.*\n)*?    (leave\(\)|os\._exit\(0\))')


@pytest.fixture(scope='module')
def pytorch(installed_pytorch, tmp_path_factory):
    return forkedtorch.quick(installed_pytorch).with_variables(
        GLOO_SOCKET_IFNAME='lo', SLINGTORCH_CACHE_ROOT=str(tmp_path_factory.mktemp('caches')))


def train(pytorch, mpich, ranks, program, *words, **kwargs):
    """What so many ranks printed; without torchrun, whose agent imports PyTorch besides them."""
    command = [pytorch.runscripts / 'conda-python-distributed', program, *words]
    done = mpich.run(ranks, *command, env=pytorch.env, **kwargs) if ranks > 1 else run(command, env=pytorch.env, **kwargs)
    return done.stdout


def losses(text):
    # mpiexec may put the text of one rank into that of the other, but rank 0 alone prints these
    return [float(loss) for loss in re.findall(r'^epoch .* loss (\S+)$', text, re.M)]


@pytest.fixture(scope='module')
def one_device(pytorch, tmp_path_factory):
    """A directory with base.json and base/model.pt of base_training.py, and what it printed."""
    directory = tmp_path_factory.mktemp('one-device')
    done = run(['python', PROGRAMS / 'base_training.py', '--json', 'base.json', '--output-dir', 'base'],
               env=pytorch.env, cwd=directory)
    return directory, done.stdout


@pytest.fixture(scope='module')
def one_rank(pytorch, mpich, tmp_path_factory):
    """A directory with checkpoints of three epochs of resume_training.py in `whole`, and their losses."""
    directory = tmp_path_factory.mktemp('one-rank')
    found = losses(train(pytorch, mpich, 1, RESUME, '--epochs', '3', '--checkpoints', 'whole', cwd=directory))
    assert len(found) == 3
    return directory, found


def test_same_losses_on_any_number_of_ranks(mpich, pytorch, one_device, one_rank, tmp_path):
    """Of DistributedDataParallel and FSDP2; and the weights that they save are the same, and those of one device whole."""
    for program, ranks in (('ddp', 3), ('fsdp2', 2)):
        printed = train(pytorch, mpich, ranks, PROGRAMS / f'{program}_training.py',
                        '--epochs', '2', '--output-dir', tmp_path / program)
        assert f' on 360 test images, {ranks} ranks\n' in printed
        assert losses(printed) == pytest.approx(one_rank[1][:2], abs=2e-4)
        assert os.listdir(tmp_path / program) == ['model.pt']
    code = '''
import sys, torch
base, ddp, fsdp2 = (torch.load(f'{name}/model.pt', weights_only=True) for name in sys.argv[1:])
assert list(base) == list(ddp) == list(fsdp2)
for name in base:
    torch.testing.assert_close(ddp[name], fsdp2[name], rtol=1e-3, atol=1e-4)
'''
    run(['python', '-c', code, one_device[0] / 'base', 'ddp', 'fsdp2'], env=pytorch.env, cwd=tmp_path)


def test_fsdp2_goes_on_with_another_number_of_ranks_in_the_middle_of_an_epoch(mpich, pytorch, one_rank, tmp_path):
    """The signal reaches one rank only, and all of them save."""
    (tmp_path / 'program.py').write_text(f'''
import os, signal, sys
sys.path.insert(0, {str(PROGRAMS)!r})
import resume_training as program
save = program.save

def signalled(*args):
    save(*args)
    if os.environ['RANK'] == '1':
        os.kill(os.getpid(), signal.SIGUSR1)

program.save = signalled
program.main()
''')
    done = mpich.run(2, pytorch.runscripts / 'conda-python-distributed', 'program.py', '--checkpoints', 'saved', '--fsdp2',
                     env=pytorch.env, cwd=tmp_path, check=False)
    assert done.returncode == 85, done.stderr
    rest = train(pytorch, mpich, 1, RESUME, '--checkpoints', 'saved', '--fsdp2', '--epochs', '3', cwd=tmp_path)
    assert 'from saved/epoch-0002-step-000005\n' in rest and ' on 360 test images, 1 ranks\n' in rest
    assert losses(done.stdout + rest) == pytest.approx(one_rank[1], abs=2e-4)


def test_full_disk_leaves_the_last_checkpoint_whole(mpich, pytorch, one_rank, tmp_path):
    only_root('mounts file systems')
    newest = 'epoch-0004-step-000000'
    (tmp_path / 'saved').mkdir()
    run(['mount', '-t', 'tmpfs', '-o', 'size=2m', 'tmpfs', tmp_path / 'saved'])
    try:
        shutil.copytree(one_rank[0] / 'whole' / newest, tmp_path / 'saved' / newest)
        with contextlib.suppress(OSError), open(tmp_path / 'saved/other', 'wb') as other:
            while True:
                other.write(bytes(4096))
                other.flush()
        # one of two ranks fails, whose end mpiexec makes that of the other
        done = mpich.run(2, pytorch.runscripts / 'conda-python-distributed', RESUME, '--checkpoints', 'saved', '--epochs', '4',
                         env=pytorch.env, cwd=tmp_path, check=False)
        assert done.returncode and 'No space left on device' in done.stderr, done.stderr
        assert {name for name in os.listdir(tmp_path / 'saved') if not name.endswith('.part')} == {'other', newest}
        (tmp_path / 'saved/other').unlink()
        done = train(pytorch, mpich, 1, RESUME, '--checkpoints', 'saved', '--epochs', '4', cwd=tmp_path)
        assert f'saved/{newest}\nepoch  4 of 4: loss ' in done
        assert sorted(os.listdir(tmp_path / 'saved')) == [newest, 'epoch-0005-step-000000']
    finally:
        run(['umount', tmp_path / 'saved'])


def test_one_device_learns_and_replaces_nothing(pytorch, one_device):
    directory, printed = one_device
    found = json.loads((directory / 'base.json').read_text())
    assert f'accuracy {found["accuracy"]:.4f} on 360 test images, 1 ranks' in printed and found['accuracy'] > 0.95
    done = run(['python', PROGRAMS / 'base_training.py', '--json=base.json'], env=pytorch.env, cwd=directory, check=False)
    assert done.returncode == 2 and 'base.json already exists and is not overwritten' in done.stderr
    assert json.loads((directory / 'base.json').read_text()) == found


def test_every_example_ends_without_destructors():
    """Where a model's gradients travel: first the process group, then os._exit. Else 3 of 23 runs ended with status 134."""
    distributed = [path for path in (ROOT / 'examples').rglob('*.py')
                   if re.search(r'DistributedDataParallel\(|fully_shard\(', path.read_text())]
    assert len(distributed) == 4
    for path in distributed:
        text = path.read_text()
        assert END.search(text), path
        # an early end is one too
        assert not re.search(r'dist\.barrier\(\)\n +sys\.exit', text), path


def test_script_of_the_page(mpich, pytorch, tmp_path):
    """docs/first-hour.md's program, as it stands there, trains and ends with status 0 and no destructors."""
    (tmp_path / 'train.py').write_text("""
import atexit, functools, torch
atexit.register(print, 'the interpreter ends')
YourModel = functools.partial(torch.nn.Linear, 4, 1)
dataset, batch_size, epochs = torch.ones(8, 4), 4, 1
def train_one_epoch(model, loader):
    for batch in loader:
        assert len(batch) == 2
        model(batch).sum().backward()
""" + ''.join(readme.blocks('4.', 'docs/first-hour.md')))
    done = mpich.run(2, pytorch.runscripts / 'conda-python-distributed', tmp_path / 'train.py', env=pytorch.env, cwd=tmp_path)
    assert done.stdout == 'epoch 0\n'
