"""Look aten ops up by name, and note those that this version of torch lacks."""

from __future__ import annotations

from passes.ir.ops import find

from .._torch import OpOverload

ABSENT: set[str] = set()
"""The names that were looked up and that this torch lacks (a test lists those it expects)."""


def aten(*names: str) -> tuple[OpOverload, ...]:
    """The ops called ``names`` ("mm" is ``mm.default``, "mm.dtype" as it stands), without those this torch lacks."""
    found = [(name, find(name)) for name in names]
    ABSENT.update(name for name, op in found if op is None)
    return tuple(op for _, op in found if op is not None)
