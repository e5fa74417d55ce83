# SPDX-License-Identifier: GPL-2.0-only
"""What several easyblocks do, as functions: for them alone, since it uses EasyBuild."""
