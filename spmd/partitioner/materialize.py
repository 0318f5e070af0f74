"""Materialize a value in a placement: it is there already, or is computed there once more, or is communicated.

To materialize a value can take an op once more, on other parts of its operands, and to compute an op materializes its
operands: so both are here, and each op of the step goes through ``Materializer.compute``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from passes import Role
from passes.ir.effects import is_random
from passes.ir.ops import Trait, has
from passes.ir.program import Placements, is_sharded
from passes.ir.schemas import name_of

from ..placements import Interleaved, local_shape, splits
from ..rules import OpCall, Option
from . import reasons
from .assignment import Choice, Move, MoveKind
from .calls import Calls
from .context import Context
from .diagnostics import Diagnostics
from .emit_op import OpEmitter
from .local_op import LocalOp
from .option_costs import is_made_as_sum
from .parameters import Parameters
from .redistribute import Reason
from .tally import Tally
from .values import Value, leaves


@dataclass
class Materializer:
    """Materializes values in placements. ``values``: the nodes visited so far; ``moves``: those of their operands.

    ``masters``: what holds the master copy of a parameter, until its first update reads that.
    """

    calls: Calls
    parameters: Parameters
    emitter: OpEmitter | Tally
    diagnostics: Diagnostics | None
    values: dict[fx.Node, Any] = field(default_factory=dict)
    moves: dict[fx.Node, Sequence[Move]] = field(default_factory=dict)
    masters: dict[fx.Node, Any] = field(default_factory=dict)
    _gathered: dict[tuple[fx.Node, Placements], Value] = field(default_factory=dict)

    @property
    def context(self) -> Context:
        """The program and its plan."""
        return self.calls.context

    # An op: its operands, its part on this rank

    def operands(self, node: fx.Node) -> list[Value]:
        """The tensor operands as they are."""
        values = (self.values[leaf] for leaf in leaves(node))
        return [value for value in values if isinstance(value, Value)]

    def _operands_again(self, node: fx.Node) -> list[Value]:
        """The tensor operands of a node that was computed before, as its moves brought them."""
        operands = self.operands(node)
        for move in self.moves[node]:
            if move.kind is not MoveKind.GRADIENT:  # such a move lasts
                operands[move.index] = self.bring(node, move, operands[move.index])
        return operands

    def bring(self, node: fx.Node, move: Move, value: Value) -> Value:
        """An operand of ``node``, brought to the placement of a move, from which alone ``node`` reads it."""
        placement = move.placement
        match move.kind:
            case MoveKind.PARAMETER:
                return self._gathered_parameter(self._operand_node(node, move), value, placement)
            case MoveKind.GRADIENT:
                self.move(value, move, self.context.to_reduce(self.context.complete_gradients[node]))
                return value
            case MoveKind.PART:
                held, batch = self._own_part(node, move, value), frozenset[int]()
                return replace(value, primary=placement, nodes={placement: held}, batch=batch)
            case MoveKind.HEADS:
                held = self.materialize(value, placement, reasons.for_operand(value.source, node, self.context))
                return replace(value, primary=placement, nodes={placement: held})
        reason = Reason(Role.BATCH, f"to be cut by {reasons.op_name(node)}", reader=node)
        return replace(value, primary=placement, nodes={placement: self.materialize(value, placement, reason)})

    def move(self, value: Value, move: Move, reason: Reason) -> None:
        """Let ``value`` be held in the placement of a move alone, from here on."""
        before = value.primary
        value.move(move.placement, self.materialize(value, move.placement, reason))
        if move.kind is MoveKind.GRADIENT:
            value.batch = frozenset()
        elif move.kind is MoveKind.ROWS:
            value.batch |= {k for k, p in enumerate(move.placement) if p != before[k]}

    def _own_part(self, node: fx.Node, move: Move, value: Value) -> Any:
        """The part of a parameter that this rank updates, exact; at first it is that of its master copy."""
        reason = Reason(value=str(Role.PARAMETER), use="for its update")
        part = self.materialize(value, move.placement, reason)
        master = self.masters.pop(self._operand_node(node, move), None)
        if master is not None:
            wire, placed = self.context.plan.options["gather_dtype"], (value.shape, move.placement)
            value.nodes[move.placement] = self.emitter.current(node, master, part, wire, placed)
        return value.nodes[move.placement]

    def _operand_node(self, node: fx.Node, move: Move) -> fx.Node:
        """The global node of the operand that a move brings."""
        return [leaf for leaf in leaves(node) if isinstance(self.values[leaf], Value)][move.index]

    def _gathered_parameter(self, parameter: fx.Node, value: Value, placement: Placements) -> Value:
        """The parameter in ``placement``: replicated over the axes of the batch, as it is over those of the model."""
        if (parameter, placement) not in self._gathered:
            name = self.parameters.name(parameter)
            assert name is not None
            reason = self.context.to_gather(name)
            # A parameter that is rounded to be gathered is read here, but an update must not find it among the nodes.
            source = value if reason.wire is None else replace(value, nodes=dict(value.nodes))
            nodes = {placement: self.materialize(source, placement, reason)}
            gathered = Value(parameter, value.shape, value.dtype, placement, nodes, is_weight=True)
            self._gathered[parameter, placement] = gathered
        return self._gathered[parameter, placement]

    def compute(self, node: fx.Node, operands: Sequence[Value], choice: Choice) -> Any:
        """Bring the operands to the placements that a choice reads, and compute the op on this rank's parts."""
        op = LocalOp(self.context.mesh, node, self.call(node, operands), choice)
        placed = enumerate(zip(operands, op.reads, strict=True))
        held = [self._operand(op, k, value, placement) for k, (value, placement) in placed]
        is_weight = bool(operands) and all(value.is_weight for value in operands)
        return op.values(self.emitter.compute(op, held, self.values), self._batch(op, operands), is_weight)

    def call(self, node: fx.Node, operands: Sequence[Value]) -> OpCall:
        """The call of a node on global shapes."""
        return self.calls.call(node, operands, self.values)

    def _operand(self, op: LocalOp, position: int, value: Value, placement: Placements) -> Any:
        if placement in value.nodes and position not in op.from_zero:
            return value.nodes[placement]
        reason = reasons.for_operand(value.source, op.node, self.context)
        return (self._count_from_zero if position in op.from_zero else self.materialize)(value, placement, reason)

    def _batch(self, op: LocalOp, operands: Sequence[Value]) -> frozenset[int]:
        """The axes over which the results may have the rows of the batch."""
        as_batch = None if operands else self.context.batch_placement(getattr(op.node.meta["val"], "shape", None))
        if as_batch is not None and as_batch == op.gives[0]:
            return frozenset(range(len(as_batch)))
        axes = (value.batch_in(p) for value, p in zip(operands, op.reads, strict=True))
        return frozenset[int]().union(*axes)

    # A value in another placement

    def materialize(self, value: Value, placement: Placements, reason: Reason) -> Any:
        """The node that holds ``value`` in ``placement``: there already, computed once more, or communicated."""
        if placement not in value.nodes:
            node = self._recompute(value, placement) or self._zeros(value, placement)
            node = node or self._view_of_gathered(value, placement, reason)
            if node is None:
                if self.diagnostics is not None:
                    self.diagnostics.moved(value, placement, reason)
                node = self.emitter.redistributed(value, placement, reason)
            value.nodes[placement] = node
        return value.nodes[placement]

    def _count_from_zero(self, value: Value, placement: Placements, reason: Reason) -> Any:
        """A count of rows that ``placement`` splits, numbering this rank's own from 0."""
        uncut = tuple(Replicate() if splits(p, value.iota_dim or 0) else p for p in placement)
        length = local_shape(value.shape, placement, self.context.mesh)[value.iota_dim or 0]
        return self.emitter.own_rows(value, self.materialize(value, uncut, reason), placement, length)

    def _recompute(self, value: Value, placement: Placements) -> Any:
        """Compute this rank's part of a replicated value instead of cutting it, where that is cheap and local."""
        node = value.source
        if value.primary != self.context.replicated or not is_sharded(placement) or not _is_cheap(node):
            return None
        operands = self._operands_again(node)
        chosen = self.calls.options.without_traffic(self.call(node, operands), operands, placement)
        return self._compute_again(node, operands, chosen, placement) if chosen is not None else None

    def _zeros(self, value: Value, placement: Placements) -> Any:
        """Make zeros, to which rows are added, where they are read; in runs or not, they are the same."""
        node, routes = value.source, self.context.routes
        becomes_sum = is_made_as_sum(value) and any(isinstance(p, Partial) for p in placement)
        if not (becomes_sum or routes.groups or routes.own) or not has(node.target, Trait.ZEROS):
            return None
        plain = tuple(Shard(p.dim) if isinstance(p, Interleaved) else p for p in placement)
        given = self._operands_again(node)  # what they are made like, if anything, in one of the placements it has
        for operands in [[replace(x, nodes={p: held})] for x in given for p, held in x.nodes.items()] or [given]:
            for goal in dict.fromkeys((placement, plain)):
                chosen = self.calls.options.without_traffic(self.call(node, operands), operands, goal)
                if chosen is not None:
                    return self._compute_again(node, operands, chosen, goal)
        return None

    def _view_of_gathered(self, value: Value, placement: Placements, reason: Reason) -> Any:
        """Gather the base of a view, and view that: so a matrix and its transpose are gathered once."""
        viewed = self._viewed(value)
        moved = {k for k, (now, goal) in enumerate(zip(value.primary, placement, strict=True)) if now != goal}
        gathers = all(isinstance(value.primary[k], Shard) and placement[k] == Replicate() for k in moved)
        if viewed is None or not moved or not gathers:
            return None
        if _cuts_twice(viewed.primary, moved) and not _cuts_twice(value.primary, moved):
            return None  # what this rank has is not a run of the base: others would be gathered, too
        of_base = tuple(Replicate() if k in moved else p for k, p in enumerate(viewed.primary))
        gathered = replace(viewed, primary=of_base, nodes={of_base: viewed.nodes[viewed.primary]})
        call = self.call(value.source, [viewed])
        chosen = self.calls.options.without_traffic(call, [gathered], placement)
        if chosen is None:
            return None
        self.materialize(viewed, of_base, reason)
        return self._compute_again(value.source, [viewed], chosen, placement)

    def _compute_again(
        self, node: fx.Node, operands: Sequence[Value], chosen: Sequence[Option], placement: Placements
    ) -> Any:
        """The result of ``node``, computed once more, in ``placement``."""
        part = self.compute(node, operands, Choice.of(chosen, len(operands)))
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


def _cuts_twice(placement: Placements, moved: Collection[int]) -> bool:
    """Whether an axis that is not ``moved`` cuts a dim that one of ``moved`` cuts."""
    cut = [(k in moved, p.dim) for k, p in enumerate(placement) if isinstance(p, Shard)]
    return any((not moves, dim) in cut for moves, dim in cut)


def _is_cheap(node: fx.Node) -> bool:
    """Whether a rank computes its part once more rather than cut it from a whole."""
    if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor):
        return False
    if is_random(node):
        return False  # it would draw other numbers
    makes = name_of(node.target).startswith("new_") or not leaves(node)
    return makes or has(node.target, Trait.CHEAP, Trait.POINTWISE_KERNEL)
