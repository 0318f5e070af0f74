"""Emit the choices of an assignment: the op of each on this rank's parts, or the ops that a rank computes instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from passes import Axis, Collective, Kind, Role
from passes.ir.collectives import WAIT, c10d
from passes.ir.program import Placements, is_sharded
from passes.runtime.master_copies import current

from ..placements import OwnRows
from ..rules import localize_of
from .context import Context
from .emit import Emitter
from .local_op import LocalOp, Placed
from .reasons import for_op
from .values import Value


class OpEmitter(Emitter):
    """One rank's graph, op by op."""

    def compute(self, op: LocalOp, operands: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> list[Any]:
        """Emit the nodes that compute this rank's parts of the results, from those of the tensor operands."""
        remaining = iter(operands)

        def local(operand: fx.Node) -> Any:
            value = values[operand]
            return next(remaining) if isinstance(value, Value) else value

        new = self._on_parts(op, *fx.node.map_arg((op.node.args, op.node.kwargs), local))
        if isinstance(new, tuple):
            return [self._placed(op, item, index) for index, item in enumerate(new)]
        if not isinstance(op.node.meta["val"], torch.Tensor):
            return [self._item(op, new, index) for index in range(len(op.node.meta["val"]))]
        new.meta["placement"] = op.gives[0]
        return [new]

    def own_rows(self, value: Value, node: fx.Node, placement: Placements, length: int) -> fx.Node:
        """Emit the first ``length`` rows of a count, which number the rows that this rank has by ``placement``."""
        new = self.call(torch.ops.aten.slice.Tensor, (node, value.iota_dim, 0, length), {}, like=value.source)
        new.meta["placement"] = placement
        new.meta["numbers"] = "counted from zero"  # on the first rank they are those of its part, too
        self.mark(new, (value.shape, placement))
        return new

    def current(
        self, node: fx.Node, master: fx.Node, part: fx.Node, wire: torch.dtype, placed: tuple[Any, Placements]
    ) -> fx.Node:
        """Emit, for the op of ``node``, the exact values of a part of a parameter that is held rounded."""
        new = self.call(current, (master, part, wire), {}, like=node)
        new.meta["placement"] = placed[1]
        self.mark(new, placed)
        return new

    def mark_parts(self, parameter: str, context: Context, given: Value, updated: Value) -> None:
        """Mark, for passes, this rank's part before and after its update: neither is an input or output."""
        placement = context.update_placements[parameter]
        for key, value in (("part_of", given), ("update_of", updated)):
            if placement in value.nodes:
                value.nodes[placement].meta[key] = parameter

    def _on_parts(self, op: LocalOp, args: Any, kwargs: Any) -> fx.Node | tuple[fx.Node, ...]:
        parts = op.result_parts
        shapes = tuple(None if part is None else part.shape for part in parts)
        local = None if op.body is None else op.body[1].local
        if op.body is not None and local is not None:
            args, kwargs = self.laid_out(op.node, args, kwargs)
            new: fx.Node | tuple[fx.Node, ...] = local(
                _Run(self, op, op.body[0], kwargs), op.call, args, op.operand_parts, parts
            )
            if isinstance(new, tuple):
                for item, shape in zip(new, shapes, strict=True):
                    self.check(op.node, item, [shape])
                return new
        else:
            localize = localize_of(op.call.target)
            if localize is not None and any(p is not None and _divides(p) for p in op.gives):
                args = localize(op.call, args, kwargs, shapes)
            new = self.op(op.node, args, kwargs, op.gives)
        self.check(op.node, new, shapes)
        self.mark(new, *op.placed_results)
        return new

    def _item(self, op: LocalOp, new: fx.Node, index: int) -> fx.Node:
        return self._placed(op, self.item(new, index), index)

    def _placed(self, op: LocalOp, item: fx.Node, index: int) -> fx.Node:
        """``item``, the result at ``index``, with its placement."""
        info, placement = op.call.results[index], op.gives[index]
        placed = [] if info is None or placement is None else [(info.shape, placement)]
        self.mark(item, *placed)
        if placed:
            item.meta["placement"] = placement
        return item


class _Run:
    """Emits the ops that are computed instead of an op itself."""

    def __init__(self, emitter: Emitter, op: LocalOp, axis: Axis, kwargs: dict[str, Any]) -> None:
        self.emitter, self.op, self.axis, self.kwargs = emitter, op, axis, kwargs
        self.size, self.rank = axis.size, axis.coordinate

    def __call__(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, numbers: str = ""
    ) -> fx.Node:
        node = self.emitter.call(op, args, kwargs or {}, like=self.op.node)
        placed = [*self.op.placed_operands, *self.op.placed_results]
        if uneven := self.emitter.uneven(*placed):
            found = f"of {self.op.call.target} on {uneven}"  # such as how many rows this rank has
        else:
            found = f"of parts of {_split_lengths(placed)}"
        node.meta["numbers"] = f"{found}, {numbers}" if numbers else found
        return node

    def whole(self, name: str) -> fx.Node:
        """A captured node that says whose rows are whose."""
        assert self.emitter.own.source is not None, "a program has its nodes"
        return self.emitter.own.source(name)

    def own_ends(self, ends: fx.Node, position: int, dim: int) -> fx.Node:
        """The ends of groups in this rank's rows of an operand, for ``ends`` in the whole."""
        return self.emitter.own.ends(self.op.reads[position], dim, ends)

    def own_numbers(self, position: int | None) -> fx.Node:
        """The experts of this rank's rows of an operand, or of the first result, numbered from its first one."""
        return self.emitter.own.numbers(self.op.gives[0] if position is None else self.op.reads[position])

    def only_own(self, tensor: fx.Node, position: int) -> fx.Node:
        """An operand with zeros behind this rank's own rows."""
        placement, shape = self.op.reads[position], self.op.call.operands[position].shape
        dims = [p.dim for p in placement if isinstance(p, OwnRows)]
        return self.emitter.own.only(placement, shape[dims[0]], tensor) if dims else tensor

    def shape(self, tensor: fx.Node) -> Sequence[int]:
        """The shape of a tensor on this rank."""
        return tensor.meta["val"].shape  # type: ignore[no-any-return]

    def rows(self, tensor: fx.Node, dim: int, start: int, end: int, numbers: str) -> fx.Node:
        """Emit the cut of rows of which ranks may need unequal numbers, as the mark says."""
        node = self(torch.ops.aten.slice.Tensor, (tensor, dim, start, end), numbers=numbers)
        self.emitter.mark_unequal(node, f"rows of dim {dim}: {numbers}")
        return node

    def all_to_all(self, tensor: fx.Node, received: list[int], sent: list[int], numbers: str = "") -> fx.Node:
        """Emit an exchange of rows along the axis of the option."""
        node = self(c10d.all_to_all_single.default, (tensor, received, sent, self.axis.group), numbers=numbers)
        why = f"{Role.ACTIVATION}: passed on {for_op(self.op.node)}"
        node.meta["collective"] = Collective(Kind.ALL_TO_ALL, self.axis.name, None, Role.ACTIVATION, why)
        return self(WAIT, (node,))


def _divides(placement: Placements) -> bool:
    """Whether a rank has other lengths than the whole."""
    return is_sharded(placement) or any(isinstance(p, OwnRows) for p in placement)


def _split_lengths(placed: Sequence[Placed]) -> list[tuple[int, int]]:
    """The lengths that are split, each with its axis: they say with which row each rank starts."""
    return sorted({(shape[p.dim], k) for shape, places in placed for k, p in enumerate(places) if isinstance(p, Shard)})
