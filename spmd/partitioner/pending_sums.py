"""Pending sums: a sum over the batch stays one summand a rank until its value is needed.

A gradient is reduced once, at the node that capture marked as its complete value, to the placement of its update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial

from passes import Phase

from . import reasons
from .context import Context
from .hints import Hints
from .materialize import Materializer
from .values import Value


@dataclass
class PendingSums:
    """Reduces sums before and after the op of each node."""

    context: Context
    hints: Hints
    materializer: Materializer

    def reduce_before(self, node: fx.Node) -> None:
        """Reduce the operands of a gradient's addition, where each backward pass reduces its own gradient."""
        parameter = self.context.complete_gradients.get(node)
        if parameter is None or not self.context.reduces_each(parameter):
            return
        shape = self.context.shapes[parameter]
        for value in (self.materializer.values.get(leaf) for leaf in node.all_input_nodes):
            if isinstance(value, Value) and value.shape == shape and any(isinstance(p, Partial) for p in value.primary):
                self._reduce_gradient(value, parameter)

    def reduce_after(self, node: fx.Node) -> None:
        """Reduce a gradient, once it is complete, and a sum that several ops read."""
        value = self.materializer.values.get(node)
        if not isinstance(value, Value):
            return
        parameter = self.context.complete_gradients.get(node)
        if parameter is not None:
            self._reduce_gradient(value, parameter)
        if node.meta.get("phase") is Phase.BACKWARD and _fans_out(node):
            self._reduce_over_model(node, value)

    def _reduce_gradient(self, value: Value, parameter: str) -> None:
        placement, reason = self.context.gradient_placement(parameter), self.context.to_reduce(parameter)
        value.move(placement, self.materializer.materialize(value, placement, reason))
        value.batch = frozenset()

    def _reduce_over_model(self, node: fx.Node, value: Value) -> None:
        """Reduce a sum over the model's ranks that several ops read: each would leave a sum of its own."""
        hint = self.hints.of(node) or self.context.replicated
        pending = [k for k in self.context.model_axes if isinstance(value.primary[k], Partial)]
        placement = tuple(hint[k] if k in pending else p for k, p in enumerate(value.primary))
        if placement != value.primary:
            reason = reasons.for_branches(node, self.context)
            value.move(placement, self.materializer.materialize(value, placement, reason))


def _fans_out(node: fx.Node) -> bool:
    """Whether more than one value is computed from ``node``, and not all of them are smaller."""
    computed = [val for user in node.users for val in _used_results(user)]
    return len(computed) > 1 and any(val.numel() >= node.meta["val"].numel() for val in computed)


def _used_results(node: fx.Node) -> list[Any]:
    """The tensors that an op returns and that some node reads."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node.meta["val"]]
    return [user.meta["val"] for user in node.users if isinstance(user.meta.get("val"), torch.Tensor) and user.users]
