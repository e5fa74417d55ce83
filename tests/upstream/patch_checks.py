# SPDX-License-Identifier: GPL-2.0-only
"""What a patch file must say before its first hunk."""

import re


def header(text):
    """The lines before the difference itself."""
    match = re.search(r'^(diff |--- |Index: |index )', text, re.M)
    return text[: match.start()] if match else text


def problems(text):
    """Yield what is wrong with a patch of this text."""
    if not re.search(r'^--- .*\n\+\+\+ ', text, re.M) or not re.search(r'^@@ ', text, re.M):
        yield 'is not a unified difference'
    head = header(text)
    author = re.search(r'^(From|Author|Authors|Signed-off-by)s?: *\S', head, re.M | re.I)
    if not author:
        yield 'no line "Author: ..." before the first hunk'
    if 'https://' not in head:
        yield 'no link to the issue or pull request upstream before the first hunk'
    said = re.sub(r'^(From|Author|Authors|Date|Signed-off-by|Subject|\S*https://).*$', '', head, flags=re.M | re.I)
    if len(said.split()) < 5:
        yield 'no description before the first hunk'
