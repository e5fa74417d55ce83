# SPDX-License-Identifier: GPL-2.0-only
"""What train.py imports of its own: a layer of 2 MB."""
INPUTS, OUTPUTS = 512, 1024
