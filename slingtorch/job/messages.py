# SPDX-License-Identifier: GPL-2.0-only
"""What comes from another process is data: JSON of a bounded size with plain numbers, or a ValueError."""
import json
import math
import re

TYPE_CHECKING = False   # typing itself would take 5 ms of each rank
if TYPE_CHECKING:
    from typing import Any

# bytes of a message: a node sends 2.4 kB, one whose ranks all differ in some variables 60 kB
MOST = 256 << 10


def one_line(text: object) -> str:
    """Without what would end the line or steer a terminal: it may come from another process."""
    return re.sub(r'[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+', ' ', str(text))


def whole(text: str) -> int:
    """A whole number of few digits."""
    if len(text) > 18:
        raise ValueError("a number of %d digits" % len(text))
    return int(text)


def finite(text: str) -> float:
    """A number that is one."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("%.20s is no number" % text)
    return number


def load(data: bytes) -> 'Any':
    """What a message says. :raises ValueError: it is too long, too deep, or no JSON"""
    if len(data) > MOST:
        raise ValueError("%d bytes" % len(data))
    try:
        return json.loads(data.decode(), parse_int=whole, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError("too many brackets")


def dump(thing: 'Any') -> bytes:
    """As one line of ASCII, for load()."""
    return json.dumps(thing).encode()


def has_form(thing: 'Any', form: dict) -> bool:
    """Whether a message is a dictionary with these keys and kinds of values at least."""
    return isinstance(thing, dict) and all(
        isinstance(thing.get(key), kind) and (kind is bool or not isinstance(thing[key], bool))
        for key, kind in form.items())
