"""How seldom Python's garbage collector runs: in our own processes, and in a program that an engine runs in.

Each whole collection looks at all that there is: the modules of torch alone are a hundred thousand objects.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# While things load that stay: looking at modules and tokenizers again and again was a tenth of the start.
WHILE_LOADING = (50_000, 20, 50)
# While rows run: a run makes and drops many objects, hardly any in cycles.
RARELY = (20_000, 50, 50)

Thresholds = tuple[int, int, int]

_lock = threading.Lock()
_num_inside = 0
_before: Thresholds = (0, 0, 0)
_during: Thresholds = (0, 0, 0)


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Collections are rare until all who entered have left; then the program's thresholds are as before.

    A program that has the collector switched off, or set to be rarer, is left as it is; what it has frozen stays so,
    and what it sets meanwhile too. May be entered by several threads, which may leave in any order.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _num_inside, _before, _during
    with _lock:
        if _num_inside == 0:
            _before = before = gc.get_threshold()
            if before[0]:
                gc.set_threshold(*map(max, before, RARELY))
            _during = gc.get_threshold()  # not always what was set: CPython 3.14 has no third threshold
        _num_inside += 1


def _leave() -> None:
    global _num_inside
    with _lock:
        _num_inside -= 1
        if _num_inside == 0 and gc.get_threshold() == _during:
            gc.set_threshold(*_before)
