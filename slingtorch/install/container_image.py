# SPDX-License-Identifier: GPL-2.0-only
"""Functions of the Singularity easyblock that check, copy, link and hash the file of an image (SIF)."""
import contextlib
import errno
import hashlib
import os
import struct
from typing import Any, Iterator

from easybuild.tools.build_log import EasyBuildError, EasyBuildExit, print_warning
from easybuild.tools.config import build_option
from easybuild.tools.filetools import remove, verify_checksum
from slingtorch.lockfile import sha256

# header of a SIF: interpreter line, magic, version, architecture, id; creation and modification time, numbers of free
# and of all descriptors, offset and length of the descriptors and of the data
SIF_HEADER = struct.Struct('<32s10s3s3s16s8q')
SIF_MAGIC = b'SIF_MAGIC\0'

BLOCK_SIZE = 8 * 1024 * 1024


def check_sif(path: str) -> None:
    """Raise EasyBuildError if a file is not a SIF, or is shorter than its header specifies; or OSError."""
    size = os.path.getsize(path)
    with open(path, 'rb') as handle:
        header = handle.read(SIF_HEADER.size)
    if SIF_MAGIC not in header[:48]:
        raise EasyBuildError("%s is not a SIF: it has %d bytes and starts with %r. Convert other images: "
                             "apptainer build NEW.sif docker-archive:FILE.tar (or DIRECTORY)", path, size, header[:24])
    fields = SIF_HEADER.unpack(header) if len(header) == SIF_HEADER.size else [0] * 13
    expected = max(fields[9] + fields[10], fields[11] + fields[12])
    if size < expected or not expected:
        raise EasyBuildError("%s is truncated: it has %d of %d bytes. Download or copy it again", path, size, expected)


def transfer_image(how: str, source: str, target: str) -> str:
    """Copy or symlink an image, reading it once; its sha256, or OSError."""
    if how == 'symlink':
        os.symlink(source, target)
        return sha256(target)
    digest = hashlib.sha256()
    with open(source, 'rb', buffering=0) as src, open(target, 'xb') as copy:
        for block in iter(lambda: src.read(BLOCK_SIZE), b''):
            digest.update(block)
            copy.write(block)
    return digest.hexdigest()


@contextlib.contextmanager
def removed_on_error(path: str) -> Iterator[None]:
    """Remove a file or directory if the block ends in an error, Ctrl-C included."""
    try:
        yield
    except BaseException:
        if os.path.lexists(path):
            remove(path)
        raise


def check_digest(path: str, checksum: Any, digest: str) -> None:
    """Raise EasyBuildError if the sha256 of an image is not the easyconfig's checksum (None: there is none)."""
    if verify_checksum(path, checksum, computed_checksums={'sha256': digest}):
        return
    if build_option('ignore_checksums'):
        print_warning("Ignoring that the checksum of %s differs from that in the easyconfig" % path)
        return
    raise EasyBuildError("The checksum of the image %s differs from that in the easyconfig.\n  sha256:      %s\n"
                         "  expected:    %s\nIf the image is damaged, get it again. If it is another build of the same "
                         "name, ask its publisher before you change 'checksums'. The installation is unchanged",
                         path, digest, checksum, exit_code=EasyBuildExit.FAIL_CHECKSUM)


def explain_error(err: OSError, source: str, installdir: str) -> Any:
    """Turn an OSError about an image (path or address) into an EasyBuildError with a remedy."""
    full = ("Free %s bytes (a rebuild needs space for both the old and the new image), install elsewhere with "
            "--prefix or --installpath-software, or save the space with image_transfer = 'symlink' in the "
            "easyconfig" % (os.path.getsize(source) if os.path.exists(source) else 'all of its'))
    access = ("User %s may not read the image, or not write to the installation directory. To replace an installation "
              "made with --read-only-installdir, use that option again, or 'chmod -R u+w %s'. If it belongs to "
              "somebody else, ask the owner" % (os.environ.get('USER') or os.getuid(), installdir))
    remedies = {errno.ENOSPC: full, errno.EDQUOT: full, errno.EACCES: access, errno.EPERM: access}
    return EasyBuildError("Transferring the image %s to %s failed: %s. %s. The installation is unchanged", source,
                          installdir, err.strerror, remedies.get(err.errno or 0, "Fix that and run this again"))
