"""Materialize a value in a placement: it is there already, or is computed there once more, or is communicated.

To materialize a value can take an op once more, on other parts of its operands, and to compute an op materializes its
operands: so both are here, and each op of the step goes through ``Materializer.compute``.
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
from .context import Context
from .diagnostics import Diagnostics
from .emit import Emitter
from .local_op import LocalOp
from .parameters import Parameters
from .redistribute import Reason
from .values import Value, infos, leaves, results


@dataclass
class Materializer:
    """Materializes values in placements. ``values``: the nodes visited so far, by global node."""

    context: Context
    parameters: Parameters
    emitter: Emitter
    chooser: Chooser
    diagnostics: Diagnostics
    values: dict[fx.Node, Any]
    _gathered: dict[fx.Node, Value] = field(default_factory=dict)

    # An op: its operands, its call, its part on this rank

    def operands(self, node: fx.Node) -> list[Value]:
        """The tensor operands; a split parameter that forward or backward reads comes gathered."""
        operands = []
        for leaf in leaves(node):
            value = self.values[leaf] if isinstance(leaf, fx.Node) else None
            if isinstance(value, Value):
                operands.append(self._read(leaf, value, node))
        return operands

    def _read(self, operand: fx.Node, value: Value, user: fx.Node) -> Value:
        if self.parameters.is_gathered(operand, user):
            return self._gathered_parameter(operand, value)
        return self._exact_part(value, name) if (name := self.parameters.rounded(operand, value)) else value

    def _exact_part(self, value: Value, parameter: str) -> Value:
        """The part of a parameter that this rank updates; the other parts may have been rounded when gathered."""
        placement = self.context.update_placements[parameter]
        node = self.materialize(value, placement, Reason(value=str(Role.PARAMETER), use="for its update"))
        return replace(value, primary=placement, nodes={placement: node}, batch=frozenset())

    def _gathered_parameter(self, parameter: fx.Node, value: Value) -> Value:
        """The parameter, replicated over the axes of the batch; over those that split the model it stays as it is."""
        if parameter not in self._gathered:
            name = self.parameters.name(parameter)
            assert name is not None
            reason, placement = self.context.to_gather(name), self.context.on_model_axes(value.primary)
            # A parameter that is rounded to be gathered is read here, but an update must not find it among the nodes.
            source = value if reason.wire is None or reason.keeps_own else replace(value, nodes=dict(value.nodes))
            node = self.materialize(source, placement, reason)
            nodes = {placement: node}
            self._gathered[parameter] = Value(parameter, value.shape, value.dtype, placement, nodes, is_weight=True)
        return self._gathered[parameter]

    def call(self, node: fx.Node, operands: Sequence[Value]) -> OpCall:
        """The call on global shapes, with an ``Info`` for each tensor."""
        remaining = iter(operands)

        def info(operand: fx.Node) -> Any:
            return next(remaining).info if isinstance(self.values[operand], Value) else operand.meta["val"]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), info)
        target: Any = node.target
        return OpCall(target, args, kwargs, tuple(v.info for v in operands), infos(results(node.meta["val"])), 1)

    def compute(self, node: fx.Node, call: OpCall, operands: Sequence[Value], chosen: Sequence[Option]) -> Any:
        """Bring the operands to the placements that the options take, and compute the op on this rank's parts."""
        op = LocalOp(self.emitter, node, call, chosen)
        args, kwargs = self._local_arguments(op, operands)
        is_weight = bool(operands) and all(value.is_weight for value in operands)
        return op.values(op.emit(args, kwargs), self._batch(op, operands), is_weight)

    def _local_arguments(self, op: LocalOp, operands: Sequence[Value]) -> Any:
        """The arguments of this rank's call."""
        placed = enumerate(zip(operands, op.operand_placements, strict=True))
        nodes = iter(self._operand(op, k, value, placement) for k, (value, placement) in placed)

        def local(operand: fx.Node) -> Any:
            value = self.values[operand]
            return next(nodes) if isinstance(value, Value) else value

        return fx.node.map_arg((op.node.args, op.node.kwargs), local)

    def _operand(self, op: LocalOp, position: int, value: Value, placement: Placements) -> fx.Node:
        reason = reasons.for_operand(value.source, op.node, self.context)
        return (self._count_from_zero if position in op.from_zero else self.materialize)(value, placement, reason)

    def _batch(self, op: LocalOp, operands: Sequence[Value]) -> frozenset[int]:
        """The axes over which the results may have the rows of the batch."""
        as_batch = None if operands else self.context.batch_placement(getattr(op.node.meta["val"], "shape", None))
        if as_batch is not None and as_batch == op.result_placements[0]:
            return frozenset(range(len(as_batch)))
        axes = (value.batch_in(p) for value, p in zip(operands, op.operand_placements, strict=True))
        return frozenset[int]().union(*axes)

    # A value in another placement

    def materialize(self, value: Value, placement: Placements, reason: Reason) -> fx.Node:
        """The node that holds ``value`` in ``placement``: there already, computed once more, or communicated."""
        if placement not in value.nodes:
            node = self._recompute(value, placement) or self._view_of_gathered(value, placement, reason)
            if node is None:
                self.diagnostics.moved(value, placement, reason)
                node = self.emitter.redistributed(value, placement, reason)
            value.nodes[placement] = node
        return value.nodes[placement]

    def _count_from_zero(self, value: Value, placement: Placements, reason: Reason) -> fx.Node:
        """A count of rows that ``placement`` splits, numbering this rank's own from 0."""
        uncut = tuple(Replicate() if splits(p, value.iota_dim or 0) else p for p in placement)
        length = local_shape(value.shape, placement, self.context.mesh)[value.iota_dim or 0]
        arguments = (self.materialize(value, uncut, reason), value.iota_dim, 0, length)
        node = self.emitter.call(torch.ops.aten.slice.Tensor, arguments, {}, like=value.source)
        node.meta["placement"] = placement
        self.emitter.mark(node, (value.shape, placement))
        return node

    def _recompute(self, value: Value, placement: Placements) -> fx.Node | None:
        """Compute this rank's part of a replicated value instead of cutting it, where that is cheap and local."""
        node = value.source
        if value.primary != self.context.replicated or not is_sharded(placement) or not _is_cheap(node):
            return None
        operands = self.operands(node)
        call = self.call(node, operands)
        chosen = self.chooser.without_traffic(call, operands, placement)
        return self._compute_again(node, call, operands, chosen, placement) if chosen is not None else None

    def _view_of_gathered(self, value: Value, placement: Placements, reason: Reason) -> fx.Node | None:
        """Gather the base of a view, and view that: so a matrix and its transpose are gathered once."""
        viewed = self._viewed(value)
        moved = {k for k, (now, goal) in enumerate(zip(value.primary, placement, strict=True)) if now != goal}
        gathers = all(isinstance(value.primary[k], Shard) and placement[k] == Replicate() for k in moved)
        if viewed is None or not moved or not gathers:
            return None
        of_base = tuple(Replicate() if k in moved else p for k, p in enumerate(viewed.primary))
        call = self.call(value.source, [viewed])
        gathered = replace(viewed, primary=of_base, nodes={of_base: viewed.nodes[viewed.primary]})
        chosen = self.chooser.without_traffic(call, [gathered], placement)
        if chosen is None:
            return None
        self.materialize(viewed, of_base, reason)
        return self._compute_again(value.source, call, [viewed], chosen, placement)

    def _compute_again(
        self, node: fx.Node, call: OpCall, operands: Sequence[Value], chosen: Sequence[Option], placement: Placements
    ) -> fx.Node:
        """The result of ``node``, computed once more, in ``placement``."""
        part = self.compute(node, call, operands, chosen)
        assert isinstance(part, Value)
        return part.nodes[placement]

    def base(self, value: Value) -> Value:
        """The value that ``value`` is a view of, through all views; itself if it is none."""
        while (viewed := self._viewed(value)) is not None:
            value = viewed
        return value

    def _viewed(self, value: Value) -> Value | None:
        """The value that ``value`` is a view of, if it is a view of all of it."""
        node = value.source
        if not has(node.target, Trait.VIEW) or not isinstance(node.meta["val"], torch.Tensor):
            return None  # a split into one piece gives a list
        viewed = self.values[node.args[0]]  # type: ignore[index]
        return viewed if isinstance(viewed, Value) and prod(viewed.shape) == prod(value.shape) else None


def _is_cheap(node: fx.Node) -> bool:
    """Whether a rank computes its part once more rather than cut it from a whole."""
    if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor):
        return False
    if is_random(node):
        return False  # it would draw other numbers
    makes = name_of(node.target).startswith("new_") or not any(isinstance(leaf, fx.Node) for leaf in leaves(node))
    return makes or has(node.target, Trait.CHEAP, Trait.POINTWISE_KERNEL)
