# SPDX-License-Identifier: GPL-2.0-only
"""Reads a 64-bit little-endian ELF library without loading it (elf(5))."""
import contextlib
import functools
import glob
import mmap
import os
import re
import struct

from .kinds import Any, Iterable, Iterator


def cut_off(directory: str) -> list:
    """Paths of truncated libraries in a directory."""
    found = []
    for path in sorted(glob.glob(os.path.join(glob.escape(directory), '*.so*'))):
        try:
            Library(path)
        except (OSError, ValueError) as err:
            found += [path] * ('truncated' in str(err))
    return found


def readable(paths: 'Iterable[str]') -> 'Iterator[Library]':
    """Those of these libraries that can be read."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            yield _read(path)


@functools.lru_cache()
def _read(path: str) -> 'Library':
    return Library(path)


class Library:
    """A library file. :raises OSError: it cannot be read :raises ValueError: it is not such a library"""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, 'rb') as stream:
            if os.fstat(stream.fileno()).st_size < 64:
                raise ValueError("%s is not an ELF library" % path)
            self.data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if self.data[:6] != b'\x7fELF\x02\x01':
            raise ValueError("%s is not a 64-bit ELF library" % path)
        try:
            offset, = struct.unpack_from('<Q', self.data, 40)
            size, count, names = struct.unpack_from('<HHH', self.data, 58)
            headers = [struct.unpack_from('<IIQQQQIIQQ', self.data, offset + size * i) for i in range(count)]
            name_table = headers[names]
            self.sections = {self._text(name_table, head[0]): head for head in headers} if headers else {}
        except (struct.error, IndexError, OverflowError):
            raise ValueError("%s is truncated, or its sections are stripped" % path)

    def _text(self, section, offset):
        begin = section[4] + offset
        return self.data[begin:self.data.find(b'\0', begin)].decode('ascii', 'replace')

    def _constants(self):
        """Begin and end of the sections with constants; the device code of a GPU library is in other sections."""
        return [(head[4], head[4] + head[5]) for name, head in self.sections.items() if name.startswith('.rodata')]

    @functools.lru_cache(None)
    def names(self, prefix: str) -> set:
        """Words with this prefix at the ends of constants. A pattern alone would take 30 s for 400 MB."""
        found = set()
        for begin, end in self._constants():
            place = self.data.find(prefix.encode(), begin, end)
            while place >= 0:
                match = re.match(br'\W(\w+)\0', self.data[place - 1:place + 80])
                if match:
                    found.add(match.group(1).decode())
                place = self.data.find(prefix.encode(), place + 1, end)
        return found

    def match(self, pattern: 'Any') -> 'Any':
        """The first match of a compiled pattern of bytes among the constants."""
        return next(filter(None, (pattern.search(self.data, begin, end) for begin, end in self._constants())), None)

    def _entries(self, section, form):
        """The entries of a section whose names are in .dynstr; none if one of the two sections is missing."""
        if section not in self.sections or '.dynstr' not in self.sections:
            return []
        head, size = self.sections[section], struct.calcsize(form)
        content = self.data[head[4]:head[4] + head[5]]     # shorter if the file is truncated
        return struct.iter_unpack(form, content[:len(content) // size * size])

    def needed(self) -> list:
        """Names of the libraries that it needs (DT_NEEDED)."""
        return [self._text(self.sections['.dynstr'], value)
                for tag, value in self._entries('.dynamic', '<qQ') if tag == 1]

    def exported(self) -> set:
        """Names of the symbols that it defines."""
        return {self._text(self.sections['.dynstr'], name)
                for name, _, _, section, _, _ in self._entries('.dynsym', '<IBBHQQ') if section}
