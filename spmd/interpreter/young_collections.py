"""Collections of garbage while a step is compiled: of what the compilation makes, not of all that was there before.

Compiling makes so many objects that Python's collector looks through the whole process again and again: modules,
functions, earlier programs, none of which is garbage. That took a seventh of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MADE = 50_000  # objects between two collections: each looks through all that the compilation has made so far

_users_own = False
"""Whether the user has frozen objects: counting takes 60 ms beside torch, so one look that found some is enough."""

_is_entered = False


@contextmanager
def young_collections() -> Iterator[None]:
    """Keep the collector from objects that exist now, for the length of the context, unless the user does so already.

    Later collections look at them again: what becomes garbage meanwhile is freed then.
    """
    global _users_own, _is_entered
    if _is_entered:  # what is compiled to plan another step: the objects are frozen
        yield
        return
    _users_own = _users_own or gc.get_freeze_count() > 0
    if _users_own:
        yield
        return
    thresholds, _is_entered = gc.get_threshold(), True
    gc.freeze()
    gc.set_threshold(thresholds[0] and max(thresholds[0], _MADE), *thresholds[1:])
    try:
        yield
    finally:
        _is_entered = False
        gc.set_threshold(*thresholds)
        gc.unfreeze()
