"""Hints: the placement that the result of an op should have, where program, plan or walk say it.

A hint can change what a step costs, never what it computes. The gradient of an activation should lie as the activation
does, so that nothing is built whole and cut afterwards; the gradient of a parameter as the parameter does, over the
axes that split the model. A random draw is split like the first operand that it is computed with, or like the batch
where it has the batch's length; drawn again in recomputation, it is split as it was the first time, since its numbers
depend on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Output, OutputKind, Phase, Role
from passes.ir.origin import Origin
from passes.ir.program import Placements, is_sharded

from ..capture.constraint import CONSTRAIN, constrained_to
from ..placements import Interleaved
from ..rules import Option
from .context import Context
from .parameters import Parameters
from .values import Value


@dataclass
class Hints:
    """The placements of results, as far as capture, the plan and the nodes visited so far say them."""

    context: Context
    parameters: Parameters
    values: Mapping[fx.Node, Any]
    _by_origin: dict[int, fx.Node] = field(default_factory=dict)
    _drawn: dict[int, Placements] = field(default_factory=dict)  # by the number of the draw

    def note_origin(self, node: fx.Node) -> None:
        """Record ``node`` under the number of its op, for its gradient; an op of several results has one number."""
        origin: Origin | None = node.meta.get("origin")
        if origin is not None and node.target is not getitem:
            self._by_origin[origin.number] = node

    def note_draw(self, node: fx.Node, chosen: Sequence[Option]) -> None:
        """Record how ``node`` splits what it draws, if it does."""
        if "draw" in node.meta:
            self._drawn[node.meta["draw"]] = tuple(option.results[0] or Replicate() for option in chosen)

    def required(self, node: fx.Node) -> Placements | None:
        """The placement that a draw must have, since its numbers were drawn in it before; or a parameter's cast."""
        return self._drawn.get(node.meta["draw"]) if "draw" in node.meta else self.parameters.cast_placement(node)

    def of(self, node: fx.Node) -> Placements | None:
        """The placement that the (first) result of ``node`` should have; None where there is no hint."""
        if "draw" in node.meta:
            return self._of_draw(node)
        if node in self.context.routes.hints:
            return self.context.routes.hints[node]
        if node in self.context.routes.returns:
            return self.context.routes.returns[node]
        user = next(iter(node.users)) if len(node.users) == 1 else None
        if user is not None and user.target is CONSTRAIN:
            return constrained_to(user, self.context.replicated, self.context.mesh)
        return self._of_activation_gradient(node) or self._of_parameter_gradient(node)

    def of_output(self, value: Value, output: Output) -> Placements:
        """The placement of an output: that of its parameter for state, that of the update for new state.

        A result stays split along the batch if all ranks have equal parts, or those of an uneven batch; else it is
        replicated.
        """
        context = self.context
        if output.kind is OutputKind.UPDATE:
            return context.placements[output.name]
        if output.kind is OutputKind.NEW:
            if output.of is None:  # in Python state: it stays where it was, or is placed as a result
                same = context.shapes.get(output.name) == value.shape
                return context.placements[output.name] if same else self._of_result(value)
            if output.pending:
                return self._of_pending(value, context.placements[output.of])
            placements = context.placements if output.role is Role.GRADIENT else context.update_placements
            return placements[output.of] if value.shape == context.shapes[output.of] else context.replicated
        return self._of_result(value)

    def _of_pending(self, value: Value, reduced: Placements) -> Placements:
        """The placement of a gradient that is left as it came about over the axes of ranks that split the batch."""
        splits_batch = [
            axis.of_ranks and k not in self.context.model_axes for k, axis in enumerate(self.context.mesh.axes)
        ]
        own = (p == Partial("sum") and splits for p, splits in zip(value.primary, splits_batch, strict=True))
        return tuple(p if left else end for p, end, left in zip(value.primary, reduced, own, strict=True))

    def _of_result(self, value: Value) -> Placements:
        batch = (k in value.batch and self._stays(value, k) for k in range(len(value.primary)))
        return tuple(_in_order(p) if split else Replicate() for p, split in zip(value.primary, batch, strict=True))

    def _stays(self, value: Value, axis: int) -> bool:
        """Whether all ranks of an axis have equal parts of a value, or as many rows for each row of an uneven batch."""
        split = value.primary[axis]
        if not isinstance(split, Shard) or value.shape[split.dim] % self.context.mesh.axes[axis].size == 0:
            return True
        return any(value.shape[split.dim] % rows == 0 for rows in self.context.uneven_rows)

    def _of_activation_gradient(self, node: fx.Node) -> Placements | None:
        """For the gradient of an activation, the placement of the activation."""
        origin: Origin | None = node.meta.get("origin")
        if origin is None or origin.cotangent_of is None:
            return None
        number, index = origin.cotangent_of
        value = self.values.get(self._by_origin[number]) if number in self._by_origin else None
        if isinstance(value, tuple):
            value = value[index] if index < len(value) else None
        val = node.meta["val"]
        if not isinstance(value, Value) or not isinstance(val, torch.Tensor) or value.shape != tuple(val.shape):
            return None
        return value.primary

    def _of_parameter_gradient(self, node: fx.Node) -> Placements | None:
        """For the gradient of a parameter, or a summand of it, the placement of the parameter over the model's axes."""
        complete = self.context.complete_gradients
        end, shape = node, getattr(node.meta["val"], "shape", None)
        while end not in complete and len(end.users) == 1 and end.meta.get("phase") is Phase.BACKWARD:
            end = next(iter(end.users))
            if getattr(end.meta.get("val"), "shape", None) != shape:
                return None
        if end not in complete:
            return None
        return self.context.read_placement(complete[end], self.context.placements[complete[end]])

    def _of_draw(self, node: fx.Node) -> Placements | None:
        """For a draw, the placement of the first value of its shape that it is computed with."""
        val = node.meta["val"]
        shape = tuple(val.shape) if isinstance(val, torch.Tensor) else None
        for leaf, user in _computed_with(node, shape):
            value = self.values.get(leaf)
            if not isinstance(value, Value) or value.shape != shape:
                continue
            given_whole = leaf in self.context.inputs and not is_sharded(value.primary)
            if given_whole or self.parameters.is_gathered(leaf, user):
                return None  # replicated on purpose, such as a weight
            if is_sharded(value.primary):
                return value.primary
        return self.context.batch_placement(shape)


def _computed_with(node: fx.Node, shape: tuple[int, ...] | None) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(operand, user) for the users of ``node`` and of their results of its shape, nearest first."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop(0).users:
            yield from ((leaf, user) for leaf in user.all_input_nodes)
            result = user.meta.get("val")
            if user not in seen and isinstance(result, torch.Tensor) and tuple(result.shape) == shape:
                seen.add(user)
                pending.append(user)


def _in_order(placement: Placement) -> Placement:
    """The placement in which the ranks' parts, one after the other, are the whole: users read results so."""
    return Shard(placement.dim) if isinstance(placement, Interleaved) else placement
