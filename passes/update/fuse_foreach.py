"""Update many parameters by ops over lists, where no fused kernel computes what their updates do."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..analysis.foreach_ops import call_before, list_before, replace_by_entries
from ..base import Pass
from ..ir.program import Program
from ..ir.schemas import is_tensor
from .foreach_groups import Group, groups, in_a_row, over_lists
from .fuse_update import FuseUpdate, first_of, settle_and_clear

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseForeach(Pass):
    """Structurally equal updates of many parameters become ops over lists (``_foreach_mul``), the same on each entry.

    What is computed from each parameter's count becomes one op on all counts, stacked in a row. On a CPU, lists pay for
    parameters of up to ``max_elements`` elements: larger ones are quicker one after the other, while they are in the
    cache. The results are new lists: ``UpdateInPlace`` lets the ops write where state lies.
    """

    max_elements: int = 4096
    after: ClassVar[tuple[type[Pass], ...]] = (FuseUpdate,)

    def rewrite(self, program: Program) -> int:
        """One op for each group, in an order in which each follows what it needs; then erase the dead updates."""
        found = groups(program, self.max_elements)
        start = first_of([node for group in found for node in group], program)
        kept = set(program.output_node.all_input_nodes)
        for group in found:
            _fuse(group, kept, start)
        if found:
            settle_and_clear(program)
        return len(found)


def _fuse(group: Group, kept: Collection[fx.Node], start: fx.Node) -> None:
    """One op for the whole group: over lists, or over a row of numbers where none of them is kept."""
    first = group[0]
    row = in_a_row(first) and not any(node in kept for node in group)
    gather: Callable[..., Any] = _row if row else _list
    arguments = tuple(
        gather([node.args[k] for node in group], start) if is_tensor(given) else given
        for k, given in enumerate(first.args)
    )
    options = dict(first.kwargs)
    if row:
        results = call_before(start, aten.unbind.int, (call_before(start, first.target, arguments, options),))
    else:
        results = list_before(start, over_lists(first), arguments, group, options)
    replace_by_entries(group, results, start)


def _list(values: list[fx.Node], start: fx.Node) -> list[fx.Node]:
    return values


def _row(values: list[fx.Node], start: fx.Node) -> fx.Node:
    """Numbers as a tensor of one dim: what they were cut out of, if they are all of it."""
    cut = values[0].args[0] if values[0].target is operator.getitem else None
    whole = all(value.args == (cut, k) for k, value in enumerate(values))
    if isinstance(cut, fx.Node) and cut.target is aten.unbind.int and whole and len(cut.users) == len(values):
        return cut.all_input_nodes[0]
    return call_before(start, aten.stack.default, (values,))
