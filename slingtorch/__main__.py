##
# Copyright 2026 the slingtorch authors
#
# This file is part of slingtorch, an EasyBuild bundle, and is distributed under
# the GNU General Public License version 2 (see the file LICENSE).
##
"""Run the command slingtorch as python -m slingtorch."""
import sys

from slingtorch.cli import main

if __name__ == '__main__':
    sys.exit(main())
