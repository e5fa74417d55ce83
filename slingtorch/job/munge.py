# SPDX-License-Identifier: GPL-2.0-only
"""
A secret for the processes of one user on all nodes, by MUNGE, with which Slurm's daemons know who calls. Its library is
where slurmd is, but rarely in a container. Constants: munge.h of https://github.com/dun/munge.
"""
import ctypes
import os

CIPHER_TYPE, UID_RESTRICTION, AES128 = 0, 9, 4
# errors: no daemon; an authentic credential is too old (nodes have different clocks), too young, was opened here before
NO_DAEMON, AUTHENTIC = 6, (0, 15, 16, 17)


class NoMunge(Exception):
    """MUNGE does not answer on this node."""


class Munge:
    """The library. :raises NoMunge: there is none"""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL('libmunge.so.2')
        except OSError as err:
            raise NoMunge(str(err))
        self.library.munge_ctx_create.restype = ctypes.c_void_p

    def seal(self, secret: bytes) -> str:
        """
        A credential that only this user can open.

        :raises NoMunge: the daemon does not answer, or does not know this user by the same number (in a user namespace)
        """
        context, credential = ctypes.c_void_p(self.library.munge_ctx_create()), ctypes.c_char_p()
        error = self.library.munge_ctx_set(context, CIPHER_TYPE, AES128) or self.library.munge_ctx_set(
            context, UID_RESTRICTION, os.getuid()) or self.library.munge_encode(
                ctypes.byref(credential), context, secret, len(secret))
        try:
            text = (credential.value or b'').decode()
            self.open(text)
        except ValueError:
            raise NoMunge("MUNGE makes no credential that user %d can open (error %d)" % (os.getuid(), error))
        return text

    def open(self, text: str) -> bytes:
        """The secret in a credential. :raises NoMunge: no daemon answers. :raises ValueError: it is another user's"""
        secret, length, user = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint()
        error = self.library.munge_decode(text.encode(), None, ctypes.byref(secret), ctypes.byref(length),
                                          ctypes.byref(user), None)
        if error == NO_DAEMON:
            raise NoMunge("MUNGE's daemon does not answer")
        if error not in AUTHENTIC or user.value != os.getuid():
            raise ValueError("not made by this user (error %d)" % error)
        return ctypes.string_at(secret, length.value)
