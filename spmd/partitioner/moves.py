"""Moves around an op that a data-parallel step needs: which operands are brought first, and which results after it.

- A split parameter is gathered before forward and backward read it, once for all; an update reads the part that is its
  rank's own, and when a parameter has its last value, its parts are gathered.
- A gradient is reduced once, at the node that capture marked as its complete value, to the placement of its update; a
  sum over the batch stays one summand a rank until its value is needed.
- Rows that an op cuts from the batch (``x.chunk(4)``) are gathered, cut, and split over the ranks again: which rows
  meet in a part is the step's own choice, and can decide its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from passes import AxisRole, Phase
from passes.ir.program import Placements

from ..placements import Mirrored
from ..rules import OpCall
from ..rules.attention import BACKWARD, FORWARD
from ..rules.cat_split import cuts_between, dim_of, is_cut, takes_all
from .assignment import Move, MoveKind
from .context import Context
from .hints import Hints
from .parameters import Parameters
from .values import Value, leaves, results

Rows = Mapping[int, int]
"""By mesh axis, the dim of the batch's rows that it splits."""


@dataclass
class Moves:
    """Says the moves of each node; ``values``: the nodes visited so far."""

    context: Context
    parameters: Parameters
    hints: Hints
    values: Mapping[fx.Node, Any]
    _rows: dict[fx.Node, Rows] = field(default_factory=dict)

    # Operands

    def of_operands(self, node: fx.Node) -> Iterator[Move]:
        """The moves of operands that their nodes alone decide, but for rows: first gradients, then parameters."""
        operands = [leaf for leaf in leaves(node) if isinstance(self.values[leaf], Value)]
        parameter = self.context.complete_gradients.get(node)
        if parameter is not None and self.context.reduces_each(parameter):
            yield from self._summands(operands, parameter)
        for k, operand in enumerate(operands):
            value = self.values[operand]
            if self.parameters.is_gathered(operand, node):
                read = self.context.read_placement(self.parameters.name(operand) or "", value.primary)
                yield Move(MoveKind.PARAMETER, k, read)
            elif name := self.parameters.rounded(operand, value):
                yield Move(MoveKind.PART, k, self.context.update_placements[name])
            elif rows := self._rows_of_queries(node, operand):
                yield Move(MoveKind.HEADS, k, rows)

    def _summands(self, operands: Sequence[fx.Node], parameter: str) -> Iterator[Move]:
        """The operands of a gradient's addition, where each backward pass reduces its own gradient."""
        shape, placement = self.context.shapes[parameter], self.context.gradient_placement(parameter)
        for operand in dict.fromkeys(operands):
            value = self.values[operand]
            if value.shape == shape and any(isinstance(p, Partial) for p in value.primary):
                yield Move(MoveKind.GRADIENT, operands.index(operand), placement)

    def _rows_of_queries(self, node: fx.Node, operand: fx.Node) -> Placements | None:
        """The placement in which an op of a micro-batch reads an output of attention, of which ranks have heads: rows.

        The next product flattens dims, and would give each rank whole sequences, of which micro-batches have others.
        """
        if all(axis.at_once for axis in self.context.mesh.axes):
            return None
        attention, index = operand.args if operand.target is getitem else (None, None)
        if index != 0 or not isinstance(attention, fx.Node) or attention.target not in FORWARD:
            return None
        if node.target in BACKWARD or node.target is torch.ops.aten.detach.default:  # it keeps heads for backward
            return None
        query, given = (self.values[each].primary for each in (attention.all_input_nodes[0], operand))
        axes = self.context.mesh.axes_with(AxisRole.SEQUENCE)
        moved = {k for k in axes if given[k] == Shard(1) and type(query[k]) is Shard and query[k] == Shard(2)}
        return tuple(query[k] if k in moved else p for k, p in enumerate(given)) if moved else None

    def of_cut_rows(self, node: fx.Node, call: OpCall, operands: Sequence[Value]) -> Iterator[Move]:
        """The move of rows of the batch that ``node`` cuts across the ranks: replicated along these."""
        rows = _cut_rows(call, operands)
        if rows:
            self._rows[node] = rows
            primary = enumerate(operands[0].primary)
            yield Move(MoveKind.ROWS, 0, tuple(Replicate() if k in rows else p for k, p in primary))

    # Results

    def of_results(self, node: fx.Node, value: Any) -> Iterator[Move]:
        """The moves of results: rows that were cut, a gradient once it is complete, sums, and updated parameters."""
        rows = self._rows.pop(node, None)
        if rows:
            for k, result in enumerate(results(value)):
                if isinstance(result, Value):
                    split = (Shard(rows[axis]) if axis in rows else p for axis, p in enumerate(result.primary))
                    yield Move(MoveKind.ROWS, k, tuple(split))
        if not isinstance(value, Value):
            return
        parameter = self.context.complete_gradients.get(node)
        if parameter is not None:
            yield Move(MoveKind.GRADIENT, 0, self.context.gradient_placement(parameter))
        if tokens := self.context.routes.back_among_tokens(node, value, self.context.mesh):
            yield Move(MoveKind.SUM, 0, tokens)
        elif node.meta.get("phase") is Phase.BACKWARD:
            placement = self._reduced_over_sequence(node, value)
            if placement == value.primary and _fans_out(node):
                placement = self._reduced_over_model(node, value)
            if placement != value.primary:
                yield Move(MoveKind.SUM, 0, placement)
        if updated := self.context.updated_in_parts.get(node):
            yield Move(MoveKind.UPDATE, 0, self.context.placements[updated])

    def _reduced_over_sequence(self, node: fx.Node, value: Value) -> Placements:
        """A gradient's placement along sequences: the activation's own, for a sum, and for heads after attention.

        Each rank then goes on with its rows. To reduce a sum later would cost no more, but every rank would multiply
        all rows by the weights.
        """
        axes, operand = self.context.mesh.axes_with(AxisRole.SEQUENCE), _differentiated(node)
        moved = Partial if operand is None else (Partial, Shard)
        pending = [k for k in axes if isinstance(value.primary[k], moved)]
        hint = None
        if pending:
            hint = self.hints.of(node) if operand is None else self.values[operand].primary
        if hint is None:
            return value.primary
        return tuple(hint[k] if k in pending and isinstance(hint[k], Shard) else p for k, p in enumerate(value.primary))

    def _reduced_over_model(self, node: fx.Node, value: Value) -> Placements:
        """A sum over the model's ranks that several ops read is reduced: each would leave a sum of its own."""
        pending = [k for k in self.context.model_axes if isinstance(value.primary[k], Partial)]
        if not pending:
            return value.primary
        hint = self.hints.of(node) or self.context.replicated
        return tuple(hint[k] if k in pending else p for k, p in enumerate(value.primary))


def _differentiated(node: fx.Node) -> Any:
    """The query, key or value of attention whose gradient a node is; None if it is none."""
    attention, index = node.args if node.target is getitem else (None, None)
    if not isinstance(attention, fx.Node) or attention.target not in BACKWARD or index not in (0, 1, 2):
        return None
    return attention.args[1:4][(0, 1, 2).index(index)]  # after the gradient of the output


def _cut_rows(call: OpCall, operands: Sequence[Value]) -> Rows:
    """The rows of the batch that a call cuts across the ranks; empty if it does not."""
    if not is_cut(call) or takes_all(call):
        return {}
    split = {
        k: p.dim
        for k, p in enumerate(operands[0].primary)
        if isinstance(p, Shard) and (isinstance(p, Mirrored) or not cuts_between(call, getattr(p, "outer", 1)))
    }
    return {k: dim for k, dim in split.items() if k in operands[0].batch and dim == dim_of(call)}


def _fans_out(node: fx.Node) -> bool:
    """Whether more than one value is computed from ``node``, and not all of them are smaller."""
    computed = [val for user in node.users for val in _used_results(user)]
    return len(computed) > 1 and any(val.numel() >= node.meta["val"].numel() for val in computed)


def _used_results(node: fx.Node) -> list[Any]:
    """The tensors that an op returns and that some node reads."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node.meta["val"]]
    return [user.meta["val"] for user in node.users if isinstance(user.meta.get("val"), torch.Tensor) and user.users]
