# SPDX-License-Identifier: GPL-2.0-only
"""The training programs that users copy: the same losses on any number of ranks, and nothing replaced."""
import contextlib
import json
import os
import re

import pytest

from testbed import ROOT, only_root, readme, run

pytestmark = pytest.mark.real

PROGRAMS = ROOT / 'examples/training'
END = re.compile(r' dist\.destroy_process_group\(\)\n(.*\n)*?    (leave\(\)|os\._exit\(0\))')


@pytest.fixture(scope='module')
def pytorch(installed_pytorch, tmp_path_factory):
    return installed_pytorch.with_variables(
        GLOO_SOCKET_IFNAME='lo', OMP_NUM_THREADS='1', SLINGTORCH_CACHE_ROOT=str(tmp_path_factory.mktemp('caches')))


def train(pytorch, mpich, ranks, program, *words, **kwargs):
    """What so many ranks printed; without torchrun, whose agent imports PyTorch besides them."""
    command = [pytorch.runscripts / 'conda-python-distributed', program, *words]
    done = mpich.run(ranks, *command, env=pytorch.env, **kwargs) if ranks > 1 else run(command, env=pytorch.env, **kwargs)
    return done.stdout


def losses(text):
    # mpiexec may put the text of one rank into that of the other, but rank 0 alone prints these
    return [float(loss) for loss in re.findall(r'^epoch .* loss (\S+)$', text, re.M)]


def test_same_losses_on_any_number_of_ranks(mpich, pytorch, tmp_path):
    """Of DistributedDataParallel and FSDP2; and the weights that they save are the same, and those of one device whole."""
    found = {}
    for program, ranks in (('ddp', 1), ('ddp', 3), ('fsdp2', 2)):
        printed = train(pytorch, mpich, ranks, PROGRAMS / f'{program}_training.py',
                        '--epochs', '2', '--output-dir', tmp_path / f'{program}-{ranks}')
        assert f' on 360 test images, {ranks} ranks\n' in printed
        found[ranks] = losses(printed)
    assert len(found[1]) == 2 and found[3] == pytest.approx(found[1], abs=2e-4) == found[2]
    code = '''
import runpy, sys, torch
words, sys.argv[1:] = sys.argv[1:], ['--epochs', '1', '--output-dir', 'base']
runpy.run_path(PROGRAM, run_name='__main__')
base, one, ddp, fsdp2 = (torch.load(f'{name}/model.pt', weights_only=True) for name in ['base', *words])
assert list(one) == list(base)
for weights in (ddp, fsdp2):
    assert list(weights) == list(one)
    for name in one:
        torch.testing.assert_close(weights[name], one[name], rtol=1e-3, atol=1e-4)
'''.replace('PROGRAM', repr(str(PROGRAMS / 'base_training.py')))
    directories = ['ddp-1', 'ddp-3', 'fsdp2-2']
    run([pytorch.python, '-c', code, *directories], env=pytorch.env, cwd=tmp_path)
    assert all(os.listdir(tmp_path / name) == ['model.pt'] for name in directories)


RESUME = PROGRAMS / 'resume_training.py'


def with_torchrun(pytorch, tmp_path, program, *words):
    """Two ranks of which one fails, whose end torchrun makes that of the other; the CompletedProcess."""
    command = [pytorch.root / 'bin/torchrun', '--standalone', '--nproc-per-node=2', program, '--checkpoints', 'saved', *words]
    return run(command, env=pytorch.env, cwd=tmp_path, check=False)


def test_fsdp2_goes_on_with_another_number_of_ranks_in_the_middle_of_an_epoch(mpich, pytorch, tmp_path):
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
    done = with_torchrun(pytorch, tmp_path, 'program.py', '--fsdp2')
    assert done.returncode and 'exitcode  : 85' in done.stderr, done.stderr
    whole = train(pytorch, mpich, 1, RESUME, '--epochs', '3', '--checkpoints', 'whole', cwd=tmp_path)
    rest = train(pytorch, mpich, 3, RESUME, '--checkpoints', 'saved', '--fsdp2', '--epochs', '3', cwd=tmp_path)
    assert 'from saved/epoch-0002-step-000005\n' in rest and ' on 360 test images, 3 ranks\n' in rest
    assert len(losses(whole)) == 3 and losses(done.stdout + rest) == pytest.approx(losses(whole), abs=2e-4)


def test_full_disk_leaves_the_last_checkpoint_whole(mpich, pytorch, tmp_path):
    only_root('mounts file systems')
    (tmp_path / 'saved').mkdir()
    run(['mount', '-t', 'tmpfs', '-o', 'size=2m', 'tmpfs', tmp_path / 'saved'])
    try:
        train(pytorch, mpich, 1, RESUME, '--checkpoints', 'saved', '--epochs', '1', cwd=tmp_path)
        with contextlib.suppress(OSError), open(tmp_path / 'saved/other', 'wb') as other:
            while True:
                other.write(bytes(4096))
                other.flush()
        done = with_torchrun(pytorch, tmp_path, RESUME, '--epochs', '2')
        assert done.returncode and 'No space left on device' in done.stderr, done.stderr
        assert {name for name in os.listdir(tmp_path / 'saved') if not name.endswith('.part')} == {
            'other', 'epoch-0002-step-000000'}
        (tmp_path / 'saved/other').unlink()
        done = train(pytorch, mpich, 1, RESUME, '--checkpoints', 'saved', '--epochs', '2', cwd=tmp_path)
        assert 'saved/epoch-0002-step-000000\nepoch  2 of 2: loss ' in done
        assert sorted(os.listdir(tmp_path / 'saved')) == ['epoch-0002-step-000000', 'epoch-0003-step-000000']
    finally:
        run(['umount', tmp_path / 'saved'])


def test_one_device_learns_and_replaces_nothing(pytorch, tmp_path):
    done = run([pytorch.python, PROGRAMS / 'base_training.py', '--json', 'new.json'], env=pytorch.env, cwd=tmp_path)
    found = json.loads((tmp_path / 'new.json').read_text())
    assert f'accuracy {found["accuracy"]:.4f} on 360 test images, 1 ranks' in done.stdout and found['accuracy'] > 0.95
    # nothing is saved unasked
    assert os.listdir(tmp_path) == ['new.json']
    (tmp_path / 'there').mkdir()
    for option in ('--output-dir=there', '--json=new.json'):
        done = run([pytorch.python, PROGRAMS / 'base_training.py', option], env=pytorch.env, cwd=tmp_path, check=False)
        assert done.returncode == 2 and f'{option.partition("=")[2]} is there already, and stays as it is' in done.stderr
    assert json.loads((tmp_path / 'new.json').read_text()) == found


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
    done = mpich.run(2, pytorch.runscripts / 'conda-python-distributed', tmp_path / 'train.py', env=pytorch.env)
    assert done.stdout == 'epoch 0\n'
