# SPDX-License-Identifier: GPL-2.0-only
"""
Lets easyblocks import slingtorch, the package of the bundle that they belong to.

EasyBuild imports easyblocks while it reads its options, before it loads hooks (verify_imports in
easybuild/tools/include.py). It does so through links, whose real path says where the bundle is.
"""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
# for a checkout: a wheel is installed in the Python that runs eb ($EB_PYTHON of 'slingtorch env')
sys.path.insert(0, ROOT)
try:
    import slingtorch
    FOUND = os.path.realpath(slingtorch.bundle_root())
except ImportError:
    raise ImportError("%s, the Python that runs eb, has no slingtorch. Activate the bundle again in this shell: eval "
                      "\"$(slingtorch env)\"; or install slingtorch there: %s -m pip install DIR, a checkout or the "
                      "wheel" % (sys.executable, sys.executable))
if FOUND != ROOT:
    raise ImportError("the easyblocks are those of %s, and 'import slingtorch' gives the package of %s: run eb in "
                      "another directory, or activate that one: eval \"$(slingtorch env)\"" % (ROOT, FOUND))
