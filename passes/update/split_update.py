"""Split updates of many parameters again, for schedules that move each on its own."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ..analysis.foreach_ops import Entry, call_before, entries_by_op, erase_results, is_read_by_entries
from ..base import Pass
from ..ir.edit import replace
from ..ir.program import Program
from .fuse_foreach import FuseForeach
from .fuse_update import FuseUpdate


@dataclass(frozen=True)
class SplitUpdate(Pass):
    """Each op over lists, as ``FuseUpdate`` and ``FuseForeach`` make them, becomes ops over up to ``entries`` entries.

    An op does to an entry what it does to it among others, so the bits stay. The parts stand where the whole stood, in
    its order, and each needs only what its own entries need. An op is left alone if a reader takes its results as
    a whole.
    """

    entries: int = 1
    after: ClassVar[tuple[type[Pass], ...]] = (FuseUpdate, FuseForeach)

    def __post_init__(self) -> None:
        if self.entries < 1:
            raise ValueError(f"expected at least one entry for each op, got {self.entries}")

    def rewrite(self, program: Program) -> int:
        """Split op by op, in order, so that an op reads the parts of those before it."""
        edits = 0
        for op, entries in entries_by_op(program.graph).items():
            if _length(op, entries) > self.entries and is_read_by_entries(op):
                _split(op, entries, self.entries)
                edits += 1
        return edits


def _split(op: fx.Node, entries: list[tuple[fx.Node, Entry]], size: int) -> None:
    length = _length(op, entries)
    starts = range(0, length, size)
    parts = [call_before(op, op.target, _cut(op.args, slice(k, k + size), length), dict(op.kwargs)) for k in starts]
    for node, entry in entries:
        results = parts[entry.index // size]
        if node.args[0] is not op:  # one of several lists
            results = call_before(op, operator.getitem, (results, node.args[0].args[1]))  # type: ignore[union-attr]
        taken = call_before(op, operator.getitem, (results, entry.index % size))
        replace(node, taken, node.meta["val"])
    erase_results(op)
    op.graph.erase_node(op)


def _cut(arguments: tuple[Any, ...], part: slice, length: int) -> tuple[Any, ...]:
    """The arguments for a part; an empty list stays empty."""
    return tuple(
        list(value)[part] if isinstance(value, (list, tuple)) and len(value) == length else value for value in arguments
    )


def _length(op: fx.Node, entries: list[tuple[fx.Node, Entry]]) -> int:
    return len(op.args[entries[0][1].argument])  # type: ignore[arg-type]
