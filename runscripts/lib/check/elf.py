# SPDX-License-Identifier: GPL-2.0-only
"""What a 64-bit little-endian ELF library says of itself, read without loading it (elf(5))."""
import mmap
import os
import struct


class Library:
    """
    A library file.

    :raises OSError: it cannot be read
    :raises ValueError: it is no such library
    """

    def __init__(self, path):
        self.path = path
        with open(path, 'rb') as stream:
            if os.fstat(stream.fileno()).st_size < 64:
                raise ValueError("%s is no ELF library" % path)
            self.data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if self.data[:6] != b'\x7fELF\x02\x01':
            raise ValueError("%s is no 64-bit ELF library" % path)
        try:
            offset, = struct.unpack_from('<Q', self.data, 40)
            size, count, names = struct.unpack_from('<HHH', self.data, 58)
            headers = [struct.unpack_from('<IIQQQQIIQQ', self.data, offset + size * i) for i in range(count)]
            name_table = headers[names]
            self.sections = {self._text(name_table, head[0]): head for head in headers} if headers else {}
        except (struct.error, IndexError, OverflowError):
            raise ValueError("%s is cut off, or stripped of its sections" % path)

    def _text(self, section, offset):
        begin = section[4] + offset
        return self.data[begin:self.data.find(b'\0', begin)].decode('ascii', 'replace')

    def has_string(self, text):
        """Whether this text is one of the constants, whole. A GPU library's device code is not searched."""
        wanted = text.encode() + b'\0'
        for name, head in self.sections.items():
            if name.startswith('.rodata'):
                # the end of a longer constant may serve as another one: the linker merges them
                if self.data.find(wanted, head[4], head[4] + head[5]) != -1:
                    return True
        return False

    def match(self, pattern):
        """The first match of a compiled pattern of bytes among the constants."""
        for name, head in self.sections.items():
            if name.startswith('.rodata'):
                found = pattern.search(self.data, head[4], head[4] + head[5])
                if found:
                    return found
        return None

    def needed(self):
        """Names of the libraries that it wants (DT_NEEDED)."""
        head, strings = self.sections.get('.dynamic'), self.sections.get('.dynstr')
        if not head or not strings:
            return []
        entries = struct.iter_unpack('<qQ', self.data[head[4]:head[4] + head[5] // 16 * 16])
        return [self._text(strings, value) for tag, value in entries if tag == 1]

    def exported(self):
        """Names of the symbols that it defines."""
        head, strings = self.sections.get('.dynsym'), self.sections.get('.dynstr')
        if not head or not strings:
            return set()
        entries = struct.iter_unpack('<IBBHQQ', self.data[head[4]:head[4] + head[5] // 24 * 24])
        return {self._text(strings, name) for name, _, _, section, _, _ in entries if section}
