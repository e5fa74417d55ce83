# SPDX-License-Identifier: GPL-2.0-only
"""What ./quickstart runs: Python takes the directory of this file for the first one to import from."""
import sys

from slingtorch.quickstart import main

sys.exit(main())
