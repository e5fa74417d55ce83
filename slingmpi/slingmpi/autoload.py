# SPDX-License-Identifier: GPL-2.0-only
"""What PyTorch calls to load the backend: importing this has imported slingmpi, whose last line registers it.

A module of its own: where a program imports slingmpi before torch, PyTorch meets a slingmpi that is half imported and
has no functions yet.
"""


def register():
    """Nothing is left to do."""
