# SPDX-License-Identifier: GPL-2.0-only
"""Names for annotations, only for mypy: importing typing would cost each rank 5 ms."""
__all__ = ['Any', 'Callable', 'Iterable', 'Iterator', 'List', 'Machine', 'Mapping', 'MutableMapping', 'Optional',
           'Program', 'Report']
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Iterator, List, Mapping, MutableMapping, Optional

    from .findings import Report
    from .machine import Machine
    from .rules import Program
else:
    globals().update(dict.fromkeys(__all__))
