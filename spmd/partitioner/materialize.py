"""The forms of a value: where it is wanted, it is already, or is computed there, or comes by communication.

To bring a value somewhere can take an op once more, on other parts of its operands, and an op takes its operands
somewhere: so both are here, and each op of the step goes through ``Forms.compute``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import Role
from passes.ir.effects import is_random
from passes.ir.ops import Trait, has
from passes.ir.program import Placements, is_sharded
from passes.ir.schemas import name_of

from ..placements import local_shape, splits
from ..rules import OpCall, Option
from . import reasons
from .choose import Chooser
from .context import Facts
from .emit import Emitter
from .local_op import OnParts
from .parameters import Parameters
from .redistribute import Reason
from .values import Value, infos, leaves, results


@dataclass
class Forms:
    """Values in the placements that are asked for. ``values``: what the walk has come to, by global node."""

    facts: Facts
    parameters: Parameters
    emitter: Emitter
    chooser: Chooser
    values: dict[fx.Node, Any]
    _gathered: dict[fx.Node, Value] = field(default_factory=dict)

    # An op: its operands, its call, its part on this rank

    def operands(self, node: fx.Node) -> list[Value]:
        """The tensor operands; a split parameter that forward or backward reads comes gathered."""
        operands = []
        for leaf in leaves(node):
            held = self.values[leaf] if isinstance(leaf, fx.Node) else None
            if isinstance(held, Value):
                operands.append(self._read(leaf, held, node))
        return operands

    def _read(self, operand: fx.Node, held: Value, user: fx.Node) -> Value:
        if self.parameters.is_gathered(operand, user):
            return self._whole_parameter(operand, held)
        return self._exact_part(held, name) if (name := self.parameters.rounded(operand, held)) else held

    def _exact_part(self, held: Value, parameter: str) -> Value:
        """The part of a parameter that this rank updates: of the whole, the rest may have been rounded to get here."""
        place = self.facts.updates[parameter]
        node = self.want(held, place, Reason(value=str(Role.PARAMETER), use="for its update"))
        return replace(held, primary=place, forms={place: node}, batch=frozenset())

    def _whole_parameter(self, parameter: fx.Node, held: Value) -> Value:
        """The parameter, whole along the axes of the batch, and as it is along those that split the model."""
        if parameter not in self._gathered:
            name = self.parameters.name(parameter)
            assert name is not None
            reason, place = self.facts.to_gather(name), self.facts.on_model_axes(held.primary)
            # What is rounded on its way is read here, and by nobody who writes the parameter.
            source = held if reason.wire is None or reason.keeps_own else replace(held, forms=dict(held.forms))
            node = self.want(source, place, reason)
            self._gathered[parameter] = Value(parameter, held.shape, held.dtype, place, {place: node}, weights=True)
        return self._gathered[parameter]

    def call(self, node: fx.Node, operands: Sequence[Value]) -> OpCall:
        """The call on global shapes, with an ``Info`` in the place of each tensor."""
        remaining = iter(operands)

        def info(operand: fx.Node) -> Any:
            return next(remaining).info if isinstance(self.values[operand], Value) else operand.meta["val"]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), info)
        target: Any = node.target
        return OpCall(target, args, kwargs, tuple(v.info for v in operands), infos(results(node.meta["val"])), 1)

    def compute(self, node: fx.Node, call: OpCall, operands: Sequence[Value], chosen: Sequence[Option]) -> Any:
        """Bring the operands to where the options want them, and compute the op on this rank's parts."""
        op = OnParts(self.emitter, node, call, chosen)
        args, kwargs = self._brought(op, operands)
        weights = bool(operands) and all(held.weights for held in operands)
        return op.values(op.emit(args, kwargs), self._batch(op, operands), weights)

    def _brought(self, op: OnParts, operands: Sequence[Value]) -> Any:
        """The arguments of this rank's call."""
        placed = enumerate(zip(operands, op.operands, strict=True))
        nodes = iter(self._operand(op, k, held, place) for k, (held, place) in placed)

        def local(operand: fx.Node) -> Any:
            held = self.values[operand]
            return next(nodes) if isinstance(held, Value) else held

        return fx.node.map_arg((op.node.args, op.node.kwargs), local)

    def _operand(self, op: OnParts, position: int, held: Value, placement: Placements) -> fx.Node:
        reason = reasons.for_operand(held.source, op.node, self.facts)
        return (self._count if position in op.from_zero else self.want)(held, placement, reason)

    def _batch(self, op: OnParts, operands: Sequence[Value]) -> frozenset[int]:
        """The axes over which the results may have the rows of the batch."""
        made_for = None if operands else self.facts.like_the_batch(getattr(op.node.meta["val"], "shape", None))
        if made_for is not None and made_for == op.results[0]:
            return frozenset(range(len(made_for)))
        kept = (held.batch_in(place) for held, place in zip(operands, op.operands, strict=True))
        return frozenset[int]().union(*kept)

    # A value in another placement

    def want(self, held: Value, placement: Placements, reason: Reason) -> fx.Node:
        """The node that holds ``held`` in ``placement``: there already, computed once more, or communicated."""
        if placement not in held.forms:
            node = self._again(held, placement) or self._through_view(held, placement, reason)
            held.forms[placement] = node or self.emitter.redistributed(held, placement, reason)
        return held.forms[placement]

    def _count(self, held: Value, placement: Placements, reason: Reason) -> fx.Node:
        """A count of rows that ``placement`` splits, numbering this rank's own from 0."""
        uncut = tuple(Replicate() if splits(p, held.iota_dim or 0) else p for p in placement)
        length = local_shape(held.shape, placement, self.facts.mesh)[held.iota_dim or 0]
        arguments = (self.want(held, uncut, reason), held.iota_dim, 0, length)
        node = self.emitter.call(torch.ops.aten.slice.Tensor, arguments, {}, like=held.source)
        node.meta["placement"] = placement
        self.emitter.mark(node, (held.shape, placement))
        return node

    def _again(self, held: Value, placement: Placements) -> fx.Node | None:
        """Compute this rank's part of a whole value instead of cutting it, where that is cheap and free of traffic."""
        node = held.source
        if held.primary != self.facts.whole or not is_sharded(placement) or not _is_cheap(node):
            return None
        operands = self.operands(node)
        call = self.call(node, operands)
        chosen = self.chooser.without_traffic(call, operands, placement)
        return self._form(node, call, operands, chosen, placement) if chosen is not None else None

    def _through_view(self, held: Value, placement: Placements, reason: Reason) -> fx.Node | None:
        """A view that is gathered is a view of what is gathered: so a matrix and its transpose are gathered once."""
        viewed = self._viewed(held)
        moved = {k for k, (have, want) in enumerate(zip(held.primary, placement, strict=True)) if have != want}
        gathers = all(isinstance(held.primary[k], Shard) and placement[k] == Replicate() for k in moved)
        if viewed is None or not moved or not gathers:
            return None
        place = tuple(Replicate() if k in moved else p for k, p in enumerate(viewed.primary))
        call = self.call(held.source, [viewed])
        there = replace(viewed, primary=place, forms={place: viewed.forms[viewed.primary]})
        chosen = self.chooser.without_traffic(call, [there], placement)
        if chosen is None:
            return None
        self.want(viewed, place, reason)
        return self._form(held.source, call, [viewed], chosen, placement)

    def _form(
        self, node: fx.Node, call: OpCall, operands: Sequence[Value], chosen: Sequence[Option], placement: Placements
    ) -> fx.Node:
        """The result of ``node``, computed once more, in ``placement``."""
        part = self.compute(node, call, operands, chosen)
        assert isinstance(part, Value)
        return part.forms[placement]

    def base(self, held: Value) -> Value:
        """What ``held`` is a view of, through all views; itself if it is none."""
        while (viewed := self._viewed(held)) is not None:
            held = viewed
        return held

    def _viewed(self, held: Value) -> Value | None:
        """What ``held`` is a view of, all of it."""
        node = held.source
        if not has(node.target, Trait.VIEW):
            return None
        viewed = self.values[node.args[0]]  # type: ignore[index]
        return viewed if isinstance(viewed, Value) and prod(viewed.shape) == prod(held.shape) else None


def _is_cheap(node: fx.Node) -> bool:
    """Whether a rank computes its part once more rather than cut it from a whole."""
    if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor):
        return False
    if is_random(node):
        return False  # it would draw other numbers
    makes = name_of(node.target).startswith("new_") or not any(isinstance(leaf, fx.Node) for leaf in leaves(node))
    return makes or has(node.target, Trait.CHEAP, Trait.POINTWISE_KERNEL)
