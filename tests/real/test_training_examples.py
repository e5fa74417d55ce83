# SPDX-License-Identifier: GPL-2.0-only
"""The training programs that users copy: the same losses on any number of ranks, and what they say of bad input."""
import gzip
import os
import re
import struct

import pytest

from testbed import ROOT, run

pytestmark = pytest.mark.real

PROGRAMS = ROOT / 'examples/training'
# 1437 images: four batches of 359, and one of 1, which is less than there are ranks
ARGUMENTS = ['--epochs', '2', '--batch-size', '359']


@pytest.fixture(scope='module')
def pytorch(installed_pytorch, tmp_path_factory):
    return installed_pytorch.with_variables(
        GLOO_SOCKET_IFNAME='lo', OMP_NUM_THREADS='1', SLINGTORCH_CACHE_ROOT=str(tmp_path_factory.mktemp('caches')))


@pytest.fixture(scope='module')
def distributed(pytorch):
    return pytorch.runscripts / 'conda-python-distributed'


@pytest.fixture(scope='module')
def base(pytorch, tmp_path_factory):
    """What training on one device prints, and the weights that it saves."""
    out = tmp_path_factory.mktemp('base')
    printed = run([pytorch.python, PROGRAMS / 'base_training.py', *ARGUMENTS, '--output-dir', out], env=pytorch.env).stdout
    assert re.fullmatch(r'epoch 1 loss (\d\.\d{6})\nepoch 2 loss (\d\.\d{6})\nfinal loss \2\n', printed)
    return printed, out


def trained(program, outs):
    """Arguments of the runscript."""
    return [PROGRAMS / program, *ARGUMENTS, '--output-dir', outs[program]]


@pytest.fixture(scope='module')
def outs(tmp_path_factory):
    """Where the distributed trainings save."""
    return {program: tmp_path_factory.mktemp(program) for program in ('ddp_training.py', 'fsdp2_training.py')}


def test_ddp_on_two_nodes(slurm, pytorch, distributed, base, outs):
    done = slurm.srun('-N2', '--ntasks-per-node=1', distributed, *trained('ddp_training.py', outs), env=pytorch.env)
    assert done.stdout == base[0]


def test_fsdp2_by_mpiexec(mpich, pytorch, distributed, base, outs):
    done = mpich.run(2, distributed, *trained('fsdp2_training.py', outs), env=pytorch.env)
    assert done.stdout == base[0]


def test_saved_weights(pytorch, base, outs):
    """Those of one device, whole, from DistributedDataParallel and from FSDP2."""
    assert all(os.listdir(out) == ['model.pt'] for out in outs.values())
    code = '''
import sys, torch
base, ddp, fsdp2 = (torch.load(f'{name}/model.pt', weights_only=True) for name in sys.argv[1:])
for weights in (ddp, fsdp2):
    assert list(weights) == list(base)
    for name in base:
        torch.testing.assert_close(weights[name], base[name])
'''
    run([pytorch.python, '-c', code, base[1], *outs.values()], env=pytorch.env)


def test_what_is_there_is_kept_and_named(pytorch, tmp_path):
    (tmp_path / 'model.pt').write_text('PRECIOUS')
    for name in ('model-1.pt', 'model-2.pt'):
        done = run([pytorch.python, PROGRAMS / 'base_training.py', '--epochs', '1'], env=pytorch.env, cwd=tmp_path)
        assert done.stdout.endswith(f'model.pt in {tmp_path} is kept; saved {name}\n')
    assert sorted(os.listdir(tmp_path)) == ['model-1.pt', 'model-2.pt', 'model.pt']
    assert (tmp_path / 'model.pt').read_text() == 'PRECIOUS'


def test_loss_that_is_no_number(pytorch, tmp_path):
    """All ranks end, with one message and a status; what an earlier training saved stays."""
    (tmp_path / 'model.pt').write_text('of an earlier training')
    done = run([pytorch.root / 'bin/torchrun', '--standalone', '--nproc-per-node=2', PROGRAMS / 'ddp_training.py',
                '--lr', '1e30', '--output-dir', tmp_path], env=pytorch.env, check=False)
    assert done.returncode == 1 and 'epoch' not in done.stdout
    assert done.stderr.count('epoch 1: the loss is nan, and nothing was saved. Lower the learning rate') == 1
    assert os.listdir(tmp_path) == ['model.pt'] and (tmp_path / 'model.pt').read_text() == 'of an earlier training'


def test_every_example_ends_without_destructors():
    """Where a model's gradients travel: first the process group, then os._exit. Else 3 of 23 runs ended with status 134."""
    distributed = [path for path in (ROOT / 'examples').rglob('*.py')
                   if re.search(r'DistributedDataParallel\(|fully_shard\(', path.read_text())]
    assert len(distributed) == 4
    for path in distributed:
        text = path.read_text()
        assert re.search(r'dist\.destroy_process_group\(\)\n(.*\n)*    (common\.leave\(\)|leave\(\)|os\._exit\(0\))\n', text), path
        # an early end is one too
        assert not re.search(r'dist\.barrier\(\)\n +sys\.exit', text), path


def test_script_of_the_page(mpich, pytorch, distributed, tmp_path):
    """docs/first-hour.md's changes, as they stand there, make a script that ends with status 0 and no destructors."""
    rows = re.findall(r'^\| (?:at the end, .*?: )?`(.+?)`', (ROOT / 'docs/first-hour.md').read_text(), re.M)
    start, gpu, model, _, end = rows
    assert gpu.startswith('torch.cuda.set_device')
    (tmp_path / 'train.py').write_text(f"""
import atexit, os, sys
import torch
from torch.nn.parallel import DistributedDataParallel
{start}
atexit.register(print, 'the interpreter ends')
model = torch.nn.Linear(4, 1)
{model}
model(torch.ones(2, 4)).sum().backward()
print('trained')
{end}
""")
    done = mpich.run(2, distributed, tmp_path / 'train.py', env=pytorch.env)
    # mpiexec may put the text of one rank into that of the other
    assert done.stdout.replace('\n', '') == 'trained' * 2


def test_without_scikit_learn(mpich, pytorch, distributed, tmp_path):
    """All ranks end, and the package is named: gloo's "Connection closed by peer" was all that was said."""
    (tmp_path / 'sklearn').mkdir()
    (tmp_path / 'sklearn/__init__.py').write_text('raise ModuleNotFoundError("No module named \'sklearn\'")\n')
    done = mpich.run(2, distributed, ROOT / 'examples/digits/train_digits.py',
                     env={**pytorch.env, 'PYTHONPATH': str(tmp_path)}, check=False)
    assert done.returncode == 1 and 'Connection closed' not in done.stderr and 'Traceback' not in done.stderr
    assert done.stderr.count("train_digits.py: No module named 'sklearn'. The images come with scikit-learn") == 1


def idx(path, *dimensions, content):
    """A file of MNIST's form."""
    text = struct.pack(f'>4B{len(dimensions)}I', 0, 0, 8, len(dimensions), *dimensions) + bytes(content)
    with (gzip.open if path.suffix == '.gz' else open)(path, 'wb') as stream:
        stream.write(text)


def test_data_and_bad_input(pytorch, tmp_path):
    """MNIST's files, packed or not, are read as they are; what is wrong is named. One process: torch starts slowly."""
    code = f'''
import sys
sys.path.insert(0, {str(PROGRAMS)!r})
import common
data = common.load_data('MNIST')
images, labels = data[[1, 0]]
assert len(data) == 2 and data.classes == 8 and images.shape == (2, 1, 2, 3), images.shape
assert labels.tolist() == [7, 0] and images[1, 0].tolist()[0] == [-2, 2, -2] and images[0, 0, 1, 2] == 2
assert data[[]][0].shape == (0, 1, 2, 3)
common.make_network(data, 1)(images)
calls = [lambda path=path: common.load_data(path)[[0]] for path in ('nowhere', 'empty', 'broken', 'images')]
for call in [*calls, common.local_rank, common.parse_arguments,
             lambda: [sys.argv.__setitem__(slice(1, None), ['--lr', '-1']), common.parse_arguments()]]:
    try:
        call()
    except SystemExit as err:
        print(err, flush=True)
'''
    raw = tmp_path / 'MNIST/MNIST/raw'
    raw.mkdir(parents=True)
    (tmp_path / 'broken').mkdir()
    (tmp_path / 'images/cats').mkdir(parents=True)
    (tmp_path / 'empty/cats').mkdir(parents=True)
    idx(raw / 'train-images-idx3-ubyte.gz', 2, 2, 3, content=[0, 255, 0, 0, 0, 0] + 6 * [255])
    idx(raw / 'train-labels-idx1-ubyte', 2, content=[0, 7])
    idx(tmp_path / 'broken/train-images-idx3-ubyte', 2, 2, 3, content=[0])
    (tmp_path / 'images/cats/tom.PNG').write_text('')
    done = run([pytorch.python, '-c', code, '--output-dir', 'broken/train-images-idx3-ubyte'], env=pytorch.env, cwd=tmp_path)
    nowhere, empty, broken, images, launcher, status, rate = done.stdout.splitlines()
    assert nowhere == '--data nowhere: there is no such directory on this node'
    assert empty.startswith('--data empty: there are neither') and 'train-images-idx3-ubyte' in empty
    assert broken.startswith('--data: broken/train-images-idx3-ubyte is not whole')
    assert 'pip install pillow' in images
    assert launcher.startswith('nothing says which rank this is')
    assert status == '2' and '--output-dir: [Errno 17] File exists' in done.stderr
    assert rate == '2' and '--lr must not be negative' in done.stderr
