"""Python's garbage collector while an engine runs in somebody else's program.

A run makes and drops many objects, hardly any in cycles, and each whole collection looks at all that the program has:
the modules of torch alone are a hundred thousand objects.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (20_000, 50, 50)


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Collections are rare until the context is left; then the program's thresholds are as before.

    A program that has the collector switched off, or set to be rarer, is left as it is; what it has frozen stays so,
    and what it sets meanwhile too. May be entered by several threads, which may leave in any order.
    """
    before = gc.get_threshold()
    during = (max(before[0], RARELY[0]), max(before[1], RARELY[1]), max(before[2], RARELY[2]))
    if before[0] == 0 or during == before:
        yield
        return
    gc.set_threshold(*during)
    try:
        yield
    finally:
        if gc.get_threshold() == during:
            gc.set_threshold(*before)
