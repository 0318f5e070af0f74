"""A collective and the algorithm chosen for it: what ``Realise`` hands to the files that write the ops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..analysis.collective_algorithms import Algorithm
from ..ir import edit
from ..ir.collectives import WAIT, Kind, group_of, kind_of, operands
from ..ir.edit import insert_before
from ..ir.program import Axis

aten = torch.ops.aten


@dataclass(frozen=True)
class Realisation:
    """A collective, and the algorithm that is to perform it in place of its own op."""

    node: fx.Node
    algorithm: Algorithm
    axis: Axis

    @property
    def kind(self) -> Kind:
        """Its kind."""
        return kind_of(self.node)

    @property
    def operand(self) -> fx.Node:
        """The tensor that it sends."""
        return operands(self.node)[0]

    def call(self, op: Any, *args: Any) -> fx.Node:
        """A new node before the collective, in its phase and module."""
        return insert_before(self.node, op, *args, like=self.node)

    def start(self, by: str, op: Any, *args: Any) -> fx.Node:
        """The node that starts communication in its place; ``by`` names the implementation in reports and dumps."""
        node = self.call(op, *args, group_of(self.node))
        node.meta["collective"] = replace(self.node.meta["collective"], by=by)
        return node

    def flat(self, tensor: fx.Node) -> fx.Node:
        """All elements of a value in one dim."""
        return tensor if tensor.meta["val"].ndim == 1 else self.call(aten.reshape.default, tensor, [-1])

    def finish(self, last: fx.Node) -> set[fx.Node]:
        """Wait for ``last`` if that is pending, give it the shape of the result, and let all readers read that.

        Returns the nodes to sink to their first readers.
        """
        result = self.call(WAIT, last) if "collective" in last.meta else last
        sinking = {result}
        shape = list(self.node.meta["val"].shape)
        if len(shape) != 1:
            result = self.call(aten.view.default, result, shape)
            sinking.add(result)
        for wait in self.node.users:
            take_over(wait, result)
        return sinking


def take_over(old: fx.Node, new: fx.Node) -> None:
    """Let all readers of ``old`` read ``new``, which has the same elements and is contiguous."""
    val: torch.Tensor = old.meta["val"]
    edit.replace(old, new, val.new_empty(val.shape))
