# SPDX-License-Identifier: GPL-2.0-only
"""The commands of slingtorch that take a file of their own."""
