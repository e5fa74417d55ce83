# SPDX-License-Identifier: GPL-2.0-only
"""Run the command slingtorch as python -m slingtorch."""
import sys

from slingtorch.cli import main

if __name__ == '__main__':
    sys.exit(main())
