# SPDX-License-Identifier: GPL-2.0-only
"""
What runs inside the ranks of a job. A copy of this package lies beside the installed runscripts, as lib/job: it needs
nothing but the standard library of Python 3.8, and nothing of the rest of slingtorch.
"""
