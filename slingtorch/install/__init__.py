# SPDX-License-Identifier: GPL-2.0-only
"""Functions shared by several easyblocks. Only easyblocks may import them, since they need EasyBuild."""
