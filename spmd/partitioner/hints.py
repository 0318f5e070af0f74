"""Where the result of an op is wanted, as far as that is known and need not be found out.

A wish can change what a step costs, never what it computes. The gradient of an activation is wanted where the
activation is, so that nothing is built whole and cut afterwards; the gradient of a parameter where the parameter is, as
far as the model is split. What is drawn at random is split as what it meets, or like the batch where it has the
batch's length; drawn again, it is split as it was the first time, since its numbers depend on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Output, OutputKind, Phase, Role
from passes.ir.origin import Origin
from passes.ir.program import Placements, is_sharded

from ..capture.constraint import CONSTRAIN, constrained_to
from ..placements import Interleaved
from ..rules import Option
from .context import Facts
from .parameters import Parameters
from .values import Value


@dataclass
class Wanted:
    """What is known of where results belong: from capture, from the plan, and from what the walk has come to."""

    facts: Facts
    parameters: Parameters
    values: Mapping[fx.Node, Any]
    _by_origin: dict[int, fx.Node] = field(default_factory=dict)
    _drawn: dict[int, Placements] = field(default_factory=dict)  # by the number of the draw

    def note_origin(self, node: fx.Node) -> None:
        """Know ``node`` by the number of its op; an op with several results is known by all of them."""
        origin: Origin | None = node.meta.get("origin")
        if origin is not None and node.target is not getitem:
            self._by_origin[origin.number] = node

    def note_draw(self, node: fx.Node, chosen: Sequence[Option]) -> None:
        """Know how it was split what ``node`` draws, if it does."""
        if "draw" in node.meta:
            self._drawn[node.meta["draw"]] = tuple(option.results[0] or Replicate() for option in chosen)

    def before(self, node: fx.Node) -> Placements | None:
        """Where a draw must be, since the same numbers were drawn there before."""
        return self._drawn.get(node.meta["draw"]) if "draw" in node.meta else None

    def of(self, node: fx.Node) -> Placements | None:
        """Where the (first) result of ``node`` is wanted, if that is known."""
        if "draw" in node.meta:
            return self._meets(node)
        user = next(iter(node.users)) if len(node.users) == 1 else None
        if user is not None and user.target is CONSTRAIN:
            return constrained_to(user, self.facts.whole)
        return self._beside_activation(node) or self._beside_parameter(node)

    def of_output(self, held: Value, output: Output) -> Placements:
        """State goes where its parameter lives, new state where that is updated.

        A result stays split along the batch, in equal parts, or is whole.
        """
        facts = self.facts
        if output.kind is OutputKind.UPDATE:
            return facts.placements[output.name]
        if output.kind is OutputKind.NEW:
            assert output.of is not None, "new state belongs to a parameter"
            place = facts.placements if output.role is Role.GRADIENT else facts.updates
            return place[output.of] if held.shape == facts.shapes[output.of] else facts.whole
        batch = (k in held.batch and self._divides(held, k) for k in range(len(held.primary)))
        return tuple(_in_order(p) if split else Replicate() for p, split in zip(held.primary, batch, strict=True))

    def _divides(self, held: Value, axis: int) -> bool:
        """Whether all ranks of an axis have equally much of a value."""
        split = held.primary[axis]
        return not isinstance(split, Shard) or held.shape[split.dim] % self.facts.mesh.axes[axis].size == 0

    def _beside_activation(self, node: fx.Node) -> Placements | None:
        """For the gradient of an activation, where the activation is."""
        origin: Origin | None = node.meta.get("origin")
        if origin is None or origin.cotangent_of is None:
            return None
        number, index = origin.cotangent_of
        held = self.values.get(self._by_origin[number]) if number in self._by_origin else None
        if isinstance(held, tuple):
            held = held[index] if index < len(held) else None
        val = node.meta["val"]
        if not isinstance(held, Value) or not isinstance(val, torch.Tensor) or held.shape != tuple(val.shape):
            return None
        return held.primary

    def _beside_parameter(self, node: fx.Node) -> Placements | None:
        """For the gradient of a parameter, or a share of it, where the parameter is, as far as the model is split."""
        complete = self.facts.complete
        end, shape = node, getattr(node.meta["val"], "shape", None)
        while end not in complete and len(end.users) == 1 and end.meta.get("phase") is Phase.BACKWARD:
            end = next(iter(end.users))
            if getattr(end.meta.get("val"), "shape", None) != shape:
                return None
        if end not in complete:
            return None
        return self.facts.on_model_axes(self.facts.placements[complete[end]])

    def _meets(self, node: fx.Node) -> Placements | None:
        """How what is drawn here is best split: as the first value of its shape that it is computed with."""
        val = node.meta["val"]
        shape = tuple(val.shape) if isinstance(val, torch.Tensor) else None
        for leaf, user in _computed_with(node, shape):
            held = self.values.get(leaf)
            if not isinstance(held, Value) or held.shape != shape:
                continue
            given_whole = leaf in self.facts.inputs and not is_sharded(held.primary)
            if given_whole or self.parameters.is_gathered(leaf, user):
                return None  # something that every rank holds as a whole, such as a weight
            if is_sharded(held.primary):
                return held.primary
        return self.facts.like_the_batch(shape)


def _computed_with(node: fx.Node, shape: tuple[int, ...] | None) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(operand, user) for the users of ``node``, and of what they make of it in its shape, nearest first."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop(0).users:
            yield from ((leaf, user) for leaf in user.all_input_nodes)
            made = user.meta.get("val")
            if user not in seen and isinstance(made, torch.Tensor) and tuple(made.shape) == shape:
                seen.add(user)
                pending.append(user)


def _in_order(placement: Placement) -> Placement:
    """A placement by which the parts, one after the other, are the whole: so the user reads a result."""
    return Shard(placement.dim) if isinstance(placement, Interleaved) else placement
