"""Changes of parameter groups: numbers that an optimizer counts there are written back by each call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from passes import CaptureError

from ..._torch import tree_flatten
from ...call.refusals import refuse
from ..lines import line_naming
from ..reads import MISSING, Reads
from .carried import Carried
from .writes import GroupEntry, Write


def group_changes(
    groups: Iterable[tuple[str, int, dict[str, Any], dict[str, Any]]], carried: Carried, reads: Reads
) -> tuple[list[Write], Carried]:
    """Each call's writes to groups, given as (optimizer, index, group, its entries before), and what to carry.

    Raises ``CaptureError`` for changes of anything but numbers, which may be new.
    """
    writes, missing = [], set()
    for path, index, group, before in groups:
        for key in {**before, **group}:
            old, new = before.get(key, MISSING), group.get(key, MISSING)
            if new is old:
                continue
            entry = GroupEntry(path, index, key)
            _check(entry, old, new, reads)
            if type(old) is int and (path, index, key) not in carried.counters:
                missing.add((path, index, key))
            writes.append(Write(entry, *tree_flatten(new), in_place=False))
    return writes, Carried(counters=frozenset(missing))


def _check(entry: GroupEntry, old: Any, new: Any, reads: Reads) -> None:
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    values = [new] if old is MISSING else [old, new]
    if not all(isinstance(value, numbers) and not isinstance(value, bool) for value in values):
        line = line_naming(reads.code, str(entry.key))
        refuse(
            CaptureError,
            f"the step changes {entry.name}{f' at {line}' if line else ''}, which is no number: a compiled step would "
            "do so only once, while it is traced. Change it outside of the step, and keep tensors in "
            "self.state[parameter]",
        )
