##
# Copyright 2026 the slingtorch authors
#
# This file is part of slingtorch, an EasyBuild bundle: it subclasses EasyBuild's classes and is distributed under
# the same licence, the GNU General Public License version 2 (see the file LICENSE).
##
"""
EasyBuild support for bringing a container image to its installation directory: copied or linked, checked, hashed,
implemented as the base of the easyblocks for container images.
"""
import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import queue
import socket
import struct
import threading

from easybuild.easyblocks.generic.containerruntime import ContainerRuntime
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit, print_msg, print_warning
from easybuild.tools.config import build_option
from easybuild.tools.filetools import remove, remove_file, verify_checksum
from easybuild.tools.output import (PROGRESS_BAR_DOWNLOAD_ONE, start_progress_bar, stop_progress_bar,
                                    update_progress_bar)

# start of a SIF: interpreter line, magic, version, architecture, id; creation and modification time, free and all
# descriptors, offset and length of the descriptors and of the data
SIF_HEADER = struct.Struct('<32s10s3s3s16s8q')
SIF_MAGIC = b'SIF_MAGIC\0'

FICLONE = 0x40049409  # ioctl of Linux: share the data of another file (linux/fs.h)
BLOCK_SIZE = 16 * 1024 * 1024  # bytes that the kernel copies in one call
READ_SIZE = 1024 * 1024  # bytes that are hashed in one call


class ImageTransfer(ContainerRuntime):
    """
    Brings an image to a hidden name beside its own, and cleans up after installations that were killed.

    To be inherited from; image_name comes from there.
    """

    def __init__(self, *args, **kwargs):
        """Initialise: nothing is there yet."""
        super().__init__(*args, **kwargs)
        self.staged = None  # the image under its hidden name
        self.flush = None  # a copy that is on its way to the disk

    @property
    def image_name(self):
        """File name of the image."""
        return '%s-%s%s.sif' % (self.name.lower(), self.version, self.cfg['versionsuffix'])

    @property
    def staged_path(self):
        """Hidden name of the image until it is whole: on the same file system, with host and process that make it."""
        name = '.%s.part-%s-%d' % (self.image_name, socket.gethostname(), os.getpid())
        return os.path.join(self.installdir, name)

    def check_sif(self, path):
        """
        Check that a file is a SIF and not cut off: the header says how long it must be.

        :param path: the file
        """
        try:
            size = os.path.getsize(path)
            with open(path, 'rb') as handle:
                header = handle.read(SIF_HEADER.size)
        except OSError as err:
            self.raise_copy_error(err, path)
        if SIF_MAGIC not in header[:48]:
            raise EasyBuildError("%s is not a SIF: it has %d bytes and starts with %r. Other image formats can be "
                                 "converted: 'apptainer build NEW.sif docker-archive:FILE.tar' (or a sandbox directory "
                                 "instead)", path, size, header[:24])
        fields = SIF_HEADER.unpack(header) if len(header) == SIF_HEADER.size else [0] * 13
        expected = max(fields[9] + fields[10], fields[11] + fields[12])
        if size < expected or not expected:
            raise EasyBuildError("%s is truncated: it has %d bytes, its header says %d. Get it again", path, size,
                                 expected)

    def verify_image_checksum(self, path, checksum, digest):
        """Compare with the checksum of the easyconfig, if it has one."""
        if verify_checksum(path, checksum, computed_checksums={'sha256': digest}):
            return
        if build_option('ignore_checksums'):
            print_warning("Ignoring that the checksum of %s is not that of the easyconfig" % path)
            return
        raise EasyBuildError("The image %s is not the one of the easyconfig.\n  its sha256:  %s\n  expected:    %s\n"
                             "Either it is damaged: then get it again. Or it is another build of the same name: then "
                             "ask who published it, and only then change 'checksums'. What was installed is untouched",
                             path, digest, checksum, exit_code=EasyBuildExit.FAIL_CHECKSUM)

    def finish_flush(self):
        """
        Wait until a copy is on the disk. No module is made before: one that is there after a crash of the machine has
        its image.
        """
        flush, self.flush = self.flush, None
        if not flush:
            return
        # then its name
        error = flush.wait() or Flush(self.installdir).wait()
        if error:
            remove_file(os.path.join(self.installdir, self.image_name))
            self.raise_copy_error(error, self.image_name, "No image was left")

    def raise_copy_error(self, err, source, left="What was installed is untouched"):
        """Turn an error of the operating system into one that says what to do."""
        user = os.environ.get('USER') or os.getuid()
        size = os.path.getsize(source) if os.path.exists(source) else 'all of its'
        old = os.path.exists(os.path.join(self.installdir, self.image_name))
        remedy = {
            errno.ENOSPC: "The disk is full. Make room for %s bytes%s, install elsewhere with --prefix or "
                          "--installpath-software, or share the space with image_transfer = 'hardlink' or 'symlink' in "
                          "the easyconfig"
                          % (size, ", for example by removing the image of the earlier installation" if old else ''),
            errno.EACCES: "User %s may not read it, or not write to the installation directory. What was installed "
                          "with --read-only-installdir is replaced with that option, or after 'chmod -R u+w %s'. What "
                          "belongs to others: ask the owner" % (user, self.installdir),
            errno.EXDEV: "A hard link cannot lead to another file system: use image_transfer = 'copy' or 'symlink'",
            errno.EOPNOTSUPP: "This file system cannot share data between files: use image_transfer = 'copy', "
                              "'hardlink' or 'symlink'",
        }
        remedy[errno.EDQUOT] = remedy[errno.ENOSPC].replace("The disk is full", "The quota is used up")
        remedy[errno.EPERM] = remedy[errno.EACCES]
        remedy[errno.ENOTTY] = remedy[errno.EINVAL] = remedy[errno.EOPNOTSUPP]
        raise EasyBuildError("Bringing the image %s to %s failed: %s. %s. %s", source, self.installdir, err.strerror,
                             remedy.get(err.errno, "Mend that and run the same again"), left)

    # --- what a killed installation leaves

    def parts(self, stale=False):
        """
        Names of images under a hidden name in the installation directory, except our own.

        :param stale: only those that nobody is making any more
        """
        prefix = '.%s.part-' % self.image_name
        names = [os.path.basename(path) for path in glob.glob(os.path.join(glob.escape(self.installdir), prefix + '*'))]
        names = [name for name in names if os.path.join(self.installdir, name) != self.staged_path]
        if stale and build_option('ignore_locks'):  # else EasyBuild's lock says that there is no other installation
            names = [name for name in names if is_dead(*name[len(prefix):].rsplit('-', 1))]
        return names

    def remove_leftovers(self):
        """Remove what installations that were killed left in the installation directory."""
        for name in self.parts(stale=True):
            print_msg("removing %s, left by an installation that was killed", name, log=self.log, silent=self.silent)
            remove(os.path.join(self.installdir, name))

    @contextlib.contextmanager
    def removed_on_error(self, path):
        """Remove a file if the block ends in an error, Ctrl-C included."""
        try:
            yield
        except BaseException:
            if os.path.lexists(path):
                remove_file(path)
            self.staged = None
            raise


def is_dead(host, pid):
    """Whether a process of this host has ended; False for one of another host, about which nothing can be said."""
    return host == socket.gethostname() and not os.path.exists('/proc/%s' % pid)


class Flush(threading.Thread):
    """
    Writes a file, or the names in a directory, to the disk while the installation goes on. The file may get another
    name meanwhile.
    """

    def __init__(self, path):
        """Start at once; OSError if it cannot be opened."""
        super().__init__(daemon=True)
        self.handle = os.open(path, os.O_RDONLY)
        self.error = None
        self.start()

    def run(self):
        """Keep the error, if there is one, for the thread that waits."""
        try:
            os.fsync(self.handle)
        except OSError as err:
            # not every file system can do it with directories
            self.error = None if err.errno == errno.EINVAL else err
        finally:
            os.close(self.handle)

    def wait(self):
        """Wait until it is written; the OSError, or None."""
        self.join()
        return self.error


def link(transfer, source, target):
    """
    Give a file a second name that shares its space.

    :param transfer: 'hardlink', 'symlink' or 'reflink'
    """
    if transfer == 'symlink':
        os.symlink(source, target)
    elif transfer == 'hardlink':
        os.link(os.path.realpath(source), target)
    else:
        with open(source, 'rb') as src, open(target, 'xb') as dst:
            fcntl.ioctl(dst.fileno(), FICLONE, src.fileno())


def copy_and_hash(source, target, label):
    """
    Copy a file and compute its sha256 on the way, moving EasyBuild's progress bar.

    The kernel copies; a thread reads the same data from the page cache right behind it and computes. That the copy is
    on the disk is another matter: see Flush.

    :param source: file to read
    :param target: file to make; None: only compute
    :param label: for the progress bar
    :return: sha256 in hexadecimal; OSError, also when not all of the file was copied
    """
    digest = hashlib.sha256()
    # what was copied and not read yet has a limit, so that it is still in memory
    ranges = queue.Queue(maxsize=32)
    errors = []

    def compute():
        buffer = memoryview(bytearray(READ_SIZE))
        with open(source, 'rb', buffering=0) as src:
            for end in iter(ranges.get, None):
                try:
                    while not errors and src.tell() < end:
                        count = src.readinto(buffer[:end - src.tell()])
                        if not count:
                            raise OSError(errno.EIO, "it became shorter while it was read")
                        digest.update(buffer[:count])
                except OSError as err:
                    errors.append(err)

    done = 0
    worker = threading.Thread(target=compute, daemon=True)
    with contextlib.ExitStack() as stack:
        src = stack.enter_context(open(source, 'rb', buffering=0))
        dst = stack.enter_context(open(target, 'xb', buffering=0)) if target else None
        size = os.fstat(src.fileno()).st_size
        start_progress_bar(PROGRESS_BAR_DOWNLOAD_ONE, size, label=label)
        worker.start()
        try:
            while done < size and not errors:
                if dst:
                    count = copy_range(src, dst, done)
                else:
                    count = min(BLOCK_SIZE, size - done)
                    # the kernel reads ahead while the thread computes
                    os.posix_fadvise(src.fileno(), done, count, os.POSIX_FADV_WILLNEED)
                if not count:
                    break
                done += count
                ranges.put(done)
                update_progress_bar(PROGRESS_BAR_DOWNLOAD_ONE, progress_size=count)
        finally:
            ranges.put(None)
            worker.join()
            stop_progress_bar(PROGRESS_BAR_DOWNLOAD_ONE)
    if errors:
        raise errors[0]
    if done != size or target and os.path.getsize(target) != size:
        raise OSError(errno.EIO, "only %d of %d bytes could be copied" % (done, size))
    return digest.hexdigest()


def copy_range(src, dst, offset):
    """
    Let the kernel copy the next block of an open file to another one.

    :return: number of bytes copied, 0 at the end of the file
    """
    kernel_copy = getattr(os, 'copy_file_range', None)  # since Python 3.8; shares the data where the file system can
    if kernel_copy:
        try:
            return kernel_copy(src.fileno(), dst.fileno(), BLOCK_SIZE, offset, offset)
        except OSError as err:
            if err.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                raise
    dst.seek(offset)
    return os.sendfile(dst.fileno(), src.fileno(), offset, BLOCK_SIZE)
