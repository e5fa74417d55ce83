# SPDX-License-Identifier: GPL-2.0-only
"""What the training programs here share: command line, device, data, network, the loop, how they save and end."""
import argparse
import gzip
import itertools
import math
import os
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

# so that the losses are the same for any number of ranks to the last digit; your own training has no need of it
torch.set_default_dtype(torch.float64)

# 3 x 5 dots for each digit, row by row
GLYPHS = ('111101101101111', '010110010010111', '111001111100111', '111001111001111', '101101111001001',
          '111100111001111', '111100111101111', '111001001001001', '111101111101111', '111101111001111')
DIGITS = 1437           # no multiple of any batch: the last one is smaller
IMAGE_SIDE = 64         # to which the images of a directory are resized
SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp')


def parse_arguments():
    """Command line; errors end the program with status 2."""
    parser = argparse.ArgumentParser(description="Train a small network on images")
    parser.add_argument('--data', metavar='PATH', default='digits',
                        help="a directory with MNIST's files, or with one directory of images for each class "
                             "(default: digits, which are drawn, not read)")
    parser.add_argument('--epochs', type=int, default=5, help="passes over the data (default: 5)")
    parser.add_argument('--batch-size', type=int, default=32, help="images per step, of all ranks (default: 32)")
    parser.add_argument('--lr', type=float, default=0.05, help="learning rate (default: 0.05)")
    parser.add_argument('--seed', type=int, default=1, help="of weights and order of images (default: 1)")
    parser.add_argument('--output-dir', metavar='DIR', default='.',
                        help="where model.pt goes; where it is already, model-1.pt (default: here)")
    args = parser.parse_args()
    if args.epochs < 1 or args.batch_size < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    if args.lr < 0:
        parser.error("--lr must not be negative")
    try:
        os.makedirs(args.output_dir, exist_ok=True)
    except OSError as err:
        parser.error("--output-dir: %s" % err)
    if not os.access(args.output_dir, os.W_OK):
        parser.error("--output-dir: you may not write to %s" % args.output_dir)
    return args


def local_rank():
    """What the launcher says; the program ends if there is no launcher."""
    if 'LOCAL_RANK' not in os.environ:
        sys.exit("nothing says which rank this is: LOCAL_RANK is not set. Start this program with srun, mpiexec or "
                 "mpirun and conda-python-distributed in front, or with torchrun")
    return int(os.environ['LOCAL_RANK'])


def own_device(local_rank=0):
    """This rank's GPU, else the processor."""
    if not torch.cuda.is_available():
        return torch.device('cpu')
    # a task that sees one GPU calls it 0, whatever its local rank is
    device = torch.device('cuda', local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


# --- data: data[indices] are the images and labels of these indices, len(data) how many there are


def scaled(pixels):
    """Bytes as values from -2 to 2: around zero a network learns faster."""
    return pixels / 63.75 - 2


class InMemory:
    """Images that are all in memory: bytes, one channel each."""

    def __init__(self, images, labels):
        self.images, self.labels = images.unsqueeze(1), labels.long()
        self.channels, self.classes = 1, int(labels.max()) + 1

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, indices):
        return scaled(self.images[indices]), self.labels[indices]


class ImageDirectory:
    """Images that are read when their turn comes: PATH/CLASS/.../FILE."""

    def __init__(self, path):
        classes = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
        self.files = [(os.path.join(directory, name), label) for label, name_of_class in enumerate(classes)
                      for directory, _, names in sorted(os.walk(os.path.join(path, name_of_class)))
                      for name in sorted(names) if name.lower().endswith(SUFFIXES)]
        if not self.files:
            raise SystemExit("--data %s: there are neither MNIST's files (train-images-idx3-ubyte) nor a directory "
                             "of images for each class" % path)
        self.channels, self.classes = 3, len(classes)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, indices):
        images = torch.empty(len(indices), 3, IMAGE_SIDE, IMAGE_SIDE)
        for image, index in zip(images, indices):
            image[:] = read_image(self.files[index][0])
        return images, torch.tensor([self.files[index][1] for index in indices], dtype=torch.long)


def read_image(path):
    """One image, as 3 x IMAGE_SIDE x IMAGE_SIDE values."""
    try:
        from PIL import Image
    except ImportError:
        raise SystemExit("--data: reading images needs Pillow: pip install pillow, in an environment on top of the "
                         "module (docs/extending.md)")
    with Image.open(path) as image:
        pixels = image.convert('RGB').resize((IMAGE_SIDE, IMAGE_SIDE)).tobytes()
    pixels = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
    return scaled(pixels.view(IMAGE_SIDE, IMAGE_SIDE, 3).permute(2, 0, 1))


def draw_digits():
    """8 x 8 pixels each: a glyph somewhere, brighter or darker, with noise. The same ones everywhere, at any time."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(DIGITS) % len(GLYPHS)
    images = 64 * torch.rand(DIGITS, 8, 8, generator=generator)
    downs = torch.randint(4, (DIGITS,), generator=generator).tolist()
    rights = torch.randint(6, (DIGITS,), generator=generator).tolist()
    for image, label, down, right in zip(images, labels, downs, rights):
        dots = torch.tensor([float(dot) for dot in GLYPHS[label]]).view(5, 3)
        image[down:down + 5, right:right + 3] += dots * (96 + 95 * torch.rand((), generator=generator))
    return InMemory(images.byte(), labels)


def read_idx(path):
    """A file as MNIST has them (http://yann.lecun.com/exdb/mnist), packed with gzip or not: its bytes as a tensor."""
    name = path if os.path.exists(path) else path + '.gz'
    with (gzip.open if name.endswith('.gz') else open)(name, 'rb') as stream:
        content = bytearray(stream.read())
    # two zeros, 8 for unsigned bytes, number of dimensions; then each of these as four bytes
    start = 4 + 4 * content[3] if content[:3] == b'\0\0\x08' else len(content)
    shape = [int.from_bytes(content[at:at + 4], 'big') for at in range(4, start, 4)] if start < len(content) else [0]
    if start + math.prod(shape) != len(content) or not math.prod(shape):
        raise SystemExit("--data: %s is not whole, or no file of MNIST's form. Fetch it again" % name)
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)


def load_data(path):
    """
    The images to train on. Nothing is downloaded: a rank must not write where others read.

    :param path: `digits`, or a directory
    """
    if path == 'digits':
        return draw_digits()
    if not os.path.isdir(path):
        raise SystemExit("--data %s: there is no such directory on this node" % path)
    for directory in (path, os.path.join(path, 'MNIST', 'raw')):
        images = os.path.join(directory, 'train-images-idx3-ubyte')
        if os.path.exists(images) or os.path.exists(images + '.gz'):
            return InMemory(read_idx(images), read_idx(os.path.join(directory, 'train-labels-idx1-ubyte')))
    return ImageDirectory(path)


class Batches:
    """
    The order of the images in an epoch, as lists of indices: each list is a rank's part of one global batch.

    PyTorch's DistributedSampler makes all ranks equal by using some images twice, so that the losses depend on the
    number of ranks. Here every image is used once: in the last batch a rank may have one image less than another.
    """

    def __init__(self, images, batch_size, seed, rank=0, ranks=1):
        self.images, self.batch_size, self.rank, self.ranks = images, batch_size, rank, ranks
        self.order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return -(-self.images // self.batch_size)

    def __iter__(self):
        for batch in self.order.split(self.batch_size):
            yield batch[self.rank::self.ranks].tolist()


# --- network, training and end


def make_network(data, seed):
    """A small network for images of any size. Without batch normalisation, which sees a rank's own part of a batch."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(data.channels, 16, 3, padding=1), nn.ReLU(),
                         nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, data.classes))


def make_optimizer(model, rate):
    """Of the parameters that the model has by now: a wrapper may have replaced them."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def train(args, data, model, optimizer, rank=0, ranks=1, sum_over_ranks=None, barrier=None):
    """
    The loop over the data: on many ranks as on one device, where it does what anybody's loop does.

    The program ends with status 1 if the loss is not a number: on all ranks, since all see the same sum.

    :param sum_over_ranks: puts the sum of all ranks' tensors in the place of each
    :param barrier: waits for all ranks: a launcher kills rank 0 when another one has failed, and it has to say why
    """
    device = next(model.parameters()).device
    for epoch in range(1, args.epochs + 1):
        batches = Batches(len(data), args.batch_size, args.seed + epoch, rank, ranks)
        total = torch.zeros((), device=device)
        for step, (images, labels) in enumerate(DataLoader(data, batch_size=None, sampler=batches)):
            size = min(args.batch_size, len(data) - step * args.batch_size)
            loss = cross_entropy(model(images.to(device)), labels.to(device), reduction='sum')
            optimizer.zero_grad()
            (loss / size * ranks).backward()        # the ranks' gradients are averaged, and we want their sum
            optimizer.step()
            total += loss.detach()
        if sum_over_ranks:
            sum_over_ranks(total)
        loss = total.item() / len(data)
        if not math.isfinite(loss):
            if rank == 0:
                print("epoch %d: the loss is %s, and nothing was saved. Lower the learning rate (--lr), and look for "
                      "values in the data that are no numbers" % (epoch, loss), file=sys.stderr, flush=True)
            if barrier:
                barrier()
            leave(1)
        if rank == 0:
            print('epoch %d loss %.6f' % (epoch, loss), flush=True)
    if rank == 0:
        print('final loss %.6f' % loss, flush=True)


def save(weights, directory):
    """Write model.pt, or where that is there already model-1.pt, ...: whole or not at all, and nothing is replaced."""
    part = os.path.join(directory, 'model.pt.part-%d' % os.getpid())
    with open(part, 'wb') as stream:
        torch.save(weights, stream)
        stream.flush()
        os.fsync(stream.fileno())
    for number in itertools.count():
        path = os.path.join(directory, 'model-%d.pt' % number if number else 'model.pt')
        try:
            os.link(part, path)     # never in the place of a file
            break
        except FileExistsError:
            pass
    os.unlink(part)
    if number:
        print("model.pt in %s is kept; saved %s" % (os.path.abspath(directory), os.path.basename(path)), flush=True)


def leave(status=0):
    """
    End the process while the model lives, without the destructors of torch's C++ objects.

    With torch 2.13 and gloo they now and then wait for ever, or abort: docs/from-one-gpu-to-many.md, "The end of a
    program".
    """
    sys.stdout.flush()
    os._exit(status)
