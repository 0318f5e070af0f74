"""A collective that other ops are to perform than its own: what ``Realise`` hands to the files that write them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..analysis.costs import Algorithm
from ..ir import edit
from ..ir.collectives import WAIT, Kind, group_of, kind_of, operands
from ..ir.edit import insert_before
from ..ir.program import Axis

aten = torch.ops.aten


@dataclass(frozen=True)
class Chosen:
    """A collective, and the algorithm that is to perform it."""

    node: fx.Node
    algorithm: Algorithm
    axis: Axis

    @property
    def kind(self) -> Kind:
        """What it means."""
        return kind_of(self.node)

    @property
    def operand(self) -> fx.Node:
        """What it sends."""
        return operands(self.node)[0]

    def call(self, op: Any, *args: Any) -> fx.Node:
        """A node in the old one's place and phase."""
        return insert_before(self.node, op, *args, like=self.node)

    def start(self, by: str, op: Any, *args: Any) -> fx.Node:
        """A node that starts communication for the old one."""
        node = self.call(op, *args, group_of(self.node))
        node.meta["collective"] = replace(self.node.meta["collective"], by=by)
        return node

    def flat(self, tensor: fx.Node) -> fx.Node:
        """All elements of an old node's value in one dim."""
        return tensor if tensor.meta["val"].ndim == 1 else self.call(aten.reshape.default, tensor, [-1])

    def finish(self, last: fx.Node) -> set[fx.Node]:
        """Wait for ``last`` if that is pending, give it the old shape, and let all readers read that.

        Returns the nodes that shall stand right before their first reader.
        """
        result = self.call(WAIT, last) if "collective" in last.meta else last
        late = {result}
        shape = list(self.node.meta["val"].shape)
        if len(shape) != 1:
            result = self.call(aten.view.default, result, shape)
            late.add(result)
        for wait in self.node.users:
            take_over(wait, result)
        return late


def take_over(old: fx.Node, new: fx.Node) -> None:
    """Let all readers of ``old`` read ``new``, which is as large and contiguous, and carries on what was known."""
    val: torch.Tensor = old.meta["val"]
    edit.replace(old, new, val.new_empty(val.shape))
