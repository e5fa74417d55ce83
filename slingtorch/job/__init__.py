# SPDX-License-Identifier: GPL-2.0-only
"""
Programs that run inside the ranks of a job. A copy of this package is installed with the runscripts, as lib/job: it
needs only the standard library of Python 3.8, and nothing else from slingtorch.
"""
