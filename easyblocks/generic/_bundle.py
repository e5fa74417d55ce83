# SPDX-License-Identifier: GPL-2.0-only
"""
Lets easyblocks import slingtorch, the Python package of their bundle.

EasyBuild imports easyblocks while it reads its options, before it loads hooks (verify_imports in
easybuild/tools/include.py). It imports them through links, whose real path shows where the bundle is.
"""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
# for a checkout; a wheel is installed in the Python that runs eb ($EB_PYTHON of 'slingtorch env')
sys.path.insert(0, ROOT)
try:
    import slingtorch
    FOUND = os.path.realpath(slingtorch.bundle_root())
except ImportError:
    raise ImportError("%s, the Python that runs eb, has no slingtorch. Activate the bundle again in this shell: eval "
                      "\"$(slingtorch env)\"; or install a checkout or wheel of slingtorch there: %s -m pip install "
                      "DIR" % (sys.executable, sys.executable))
if FOUND != ROOT:
    raise ImportError("the easyblocks are from %s, but 'import slingtorch' imports the package from %s: run eb in "
                      "another directory, or activate the latter: eval \"$(slingtorch env)\"" % (ROOT, FOUND))
