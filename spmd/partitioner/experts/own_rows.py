"""Emit the rows that have one owner each: which are a rank's own, how they are taken, and how they are put back.

Whose rows are whose is data, a tensor that is equal on all ranks; so all of this is done by ops on it, the same ones on
all ranks with other numbers. A rank with few rows, or none, has the same shapes as one with many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes import Axis, Mesh
from passes.ir.program import Placements
from passes.runtime.rooms import within

from ...placements import ByGroup, Dealt, OwnOrder, OwnRows, chunk, nested

aten = torch.ops.aten
Emit = Callable[..., fx.Node]


@dataclass(frozen=True)
class Own:
    """A rank's own rows of ``dim``. All are nodes of its graph.

    - ``take``: for each row that there is room for, the row in the whole; ``filled``: whether it is one.
    - ``put``: for each row in the whole, the row where it lies on this rank; ``inside``: whether it is there.
    """

    dim: int
    take: fx.Node
    filled: fx.Node
    put: fx.Node
    inside: fx.Node

    def taken(self, emit: Emit, whole: fx.Node) -> fx.Node:
        """A rank's own rows of a whole."""
        return emit(aten.index_select.default, (whole, self.dim, self.take))

    def put_back(self, emit: Emit, own: fx.Node) -> fx.Node:
        """All rows, of which those of other ranks are zero: a summand of the whole."""
        rows = emit(aten.index_select.default, (own, self.dim, self.put))
        return self._zero_outside(emit, rows, self.inside)

    def only(self, emit: Emit, own: fx.Node) -> fx.Node:
        """The own rows, with zeros behind them."""
        return self._zero_outside(emit, own, self.filled)

    def _zero_outside(self, emit: Emit, rows: fx.Node, inside: fx.Node) -> fx.Node:
        shape = [1] * rows.meta["val"].ndim
        shape[self.dim] = -1
        return emit(aten.where.ScalarOther, (emit(aten.view.default, (inside, shape)), rows, 0))


@dataclass
class OwnRowsOf:
    """Emits ``Own``, each once. ``source``: the node that holds a captured node, by name, whole on this rank."""

    mesh: Mesh
    call: Callable[..., fx.Node]
    source: Callable[[str], fx.Node] | None = None
    _own: dict[Any, Own] = field(default_factory=dict)
    _numbers: dict[str, fx.Node] = field(default_factory=dict)

    def __call__(self, rows: OwnRows, index: int, placement: Placements, size: int, like: fx.Node) -> Own:
        """The own rows along the axis at ``index``, of ``size`` rows that the axes before leave by ``placement``."""
        dealt = _dealt(rows, placement[:index])
        key = (rows.along(0), index, dealt, size)
        if key not in self._own:
            self._own[key] = self._made(rows, index, dealt, size, like)
        return replace(self._own[key], dim=rows.dim)

    def ends(self, placement: Placements, dim: int, ends: fx.Node) -> fx.Node:
        """The ends of groups in a rank's own rows by ``placement``, for ``ends`` in the whole."""
        room = None
        for index, rows in enumerate(placement):
            if isinstance(rows, (ByGroup, Dealt)) and rows.dim == dim:  # of its own order a rank has the ends already
                ends = self._ends(rows, index, ends)
                room = self._room(rows, index, placement) if isinstance(rows, ByGroup) else None
                if room is not None:  # a kernel would read behind it, before anybody knows that there are more
                    ends = self._emit(rows, self.mesh.axes[index], ends)(aten.clamp.default, (ends, 0, room))
        return ends

    def _room(self, rows: ByGroup, index: int, placement: Placements) -> int | None:
        """The rows that this rank has room for; None for all."""
        size = rows.rows
        for k in _dealt(rows, placement[:index]):
            size = Dealt(0).length(size, self.mesh.axes[k].size)
        room = rows.length(size, self.mesh.axes[index].size)
        return room if room < size else None

    def _ends(self, rows: OwnRows, index: int, ends: fx.Node) -> fx.Node:
        axis = self.mesh.axes[index]
        emit = self._emit(rows, axis, ends)
        if not isinstance(rows, ByGroup):
            more = emit(aten.add.Tensor, (ends, axis.size - 1 - axis.coordinate))
            return emit(aten.div.Tensor_mode, (more, axis.size), rounding_mode="floor")
        first, own = chunk(rows.count, axis.size, axis.coordinate)
        padded = emit(aten.constant_pad_nd.default, (ends, [1, 0]))
        stops = emit(aten.slice.Tensor, (padded, 0, first + 1, first + 1 + own))
        return emit(aten.sub.Tensor, (stops, emit(aten.slice.Tensor, (padded, 0, first, first + 1))))

    def numbers(self, placement: Placements) -> fx.Node:
        """The experts of a rank's own rows by ``placement``, numbered from its first one; behind them is any of its."""
        (of,) = [(rows, index) for index, rows in enumerate(placement) if isinstance(rows, ByGroup)]
        numbers = self._numbers_of(*of)
        length = numbers.meta["val"].shape[0]
        for index, rows in enumerate(placement):
            if not isinstance(rows, (ByGroup, Dealt)):
                continue
            axis = self.mesh.axes[index]
            emit, own = self._emit(rows, axis, numbers), self(rows, index, placement, length, numbers)
            numbers = own.taken(emit, numbers)
            length = numbers.meta["val"].shape[0]
            if isinstance(rows, ByGroup):
                first = chunk(rows.count, axis.size, axis.coordinate)[0]
                numbers = own.only(emit, emit(aten.sub.Tensor, (numbers, first)))
        return numbers

    def _numbers_of(self, rows: ByGroup, index: int) -> fx.Node:
        """The expert of each row; read by an index, so that one that no expert has raises as in the plain step."""
        assert self.source is not None, "a program has its nodes"
        if rows.of not in self._numbers:
            given = self.source(rows.of)
            emit = self._emit(rows, self.mesh.axes[index], given)
            self._numbers[rows.of] = emit(aten.index.Tensor, (_count(emit, rows.count, given), [given]))
        return self._numbers[rows.of]

    def only(self, placement: Placements, size: int, tensor: fx.Node) -> fx.Node:
        """``tensor`` with zeros behind its own rows; ``size``: of that dim, in the whole."""
        found, emit = None, None
        for rows, axis in nested(placement, self.mesh.axes):
            if isinstance(rows, (ByGroup, Dealt)):
                index = self.mesh.axes.index(axis)
                found, emit = self(rows, index, placement, size, tensor), self._emit(rows, axis, tensor)
            if isinstance(rows, OwnRows):
                size = rows.length(size, axis.size)
        return tensor if found is None or emit is None else found.only(emit, tensor)

    def _emit(self, rows: OwnRows, axis: Axis, like: fx.Node) -> Emit:
        def emit(target: Any, args: Sequence[Any], **kwargs: Any) -> fx.Node:
            new = self.call(target, tuple(args), kwargs, like=like)
            new.meta.pop("grad_of", None)
            new.meta["numbers"] = f"own rows of {rows} over {axis.name}"
            return new

        return emit

    def _made(self, rows: OwnRows, index: int, dealt: Sequence[int], size: int, like: fx.Node) -> Own:
        assert not isinstance(rows, OwnOrder), "no op reads rows in another order (own_order.py)"
        if not isinstance(rows, ByGroup):
            return self._dealt(rows, index, size, like)
        assert self.source is not None, "a program has its nodes"
        if not rows.ends:
            return self._numbered(rows, index, dealt, size, self._numbers_of(rows, index))
        return self._sorted(rows, index, dealt, size, self.source(rows.of))

    def _dealt(self, rows: OwnRows, index: int, size: int, like: fx.Node) -> Own:
        """Every so many rows."""
        axis = self.mesh.axes[index]
        emit = self._emit(rows, axis, like)
        here, there = (_count(emit, count, like) for count in (rows.length(size, axis.size), size))
        take = emit(aten.add.Tensor, (emit(aten.mul.Tensor, (here, axis.size)), axis.coordinate))
        return Own(
            rows.dim,
            emit(aten.clamp.default, (take, 0, size - 1)),
            emit(aten.lt.Scalar, (take, size)),
            emit(aten.div.Tensor_mode, (there, axis.size), rounding_mode="floor"),
            emit(aten.eq.Scalar, (emit(aten.remainder.Scalar, (there, axis.size)), axis.coordinate)),
        )

    def _sorted(self, rows: ByGroup, index: int, dealt: Sequence[int], size: int, ends: fx.Node) -> Own:
        """Rows that are sorted by expert: those between two ends."""
        axis, count = self.mesh.axes[index], rows.rows
        emit, room = self._emit(rows, axis, ends), rows.length(size, axis.size)
        if room < size:
            of_all = room * prod(self.mesh.axes[k].size for k in dealt)
            ends = emit(within, (ends, rows.count // axis.size, rows.rows, of_all))
        for k in dealt:
            ends = self._ends(Dealt(0), k, ends)
            count = (count + self.mesh.axes[k].size - 1 - self.mesh.axes[k].coordinate) // self.mesh.axes[k].size
        first, own = chunk(rows.count, axis.size, axis.coordinate)
        inner = emit(aten.slice.Tensor, (ends, 0, 0, rows.count - 1))
        padded = emit(
            aten.constant_pad_nd.default, (emit(aten.constant_pad_nd.default, (inner, [0, 1], count)), [1, 0])
        )
        start, stop = (emit(aten.slice.Tensor, (padded, 0, at, at + 1)) for at in (first, first + own))
        here, there = _count(emit, room, ends), _count(emit, size, ends)
        take, put = emit(aten.add.Tensor, (here, start)), emit(aten.sub.Tensor, (there, start))
        inside = (emit(aten.ge.Tensor, (there, start)), emit(aten.lt.Tensor, (there, stop)))
        return Own(
            rows.dim,
            emit(aten.clamp.default, (take, 0, size - 1)),
            emit(aten.lt.Tensor, (take, stop)),
            emit(aten.clamp.default, (put, 0, room - 1)),
            emit(aten.bitwise_and.Tensor, inside),
        )

    def _numbered(self, rows: ByGroup, index: int, dealt: Sequence[int], size: int, numbers: fx.Node) -> Own:
        """Rows in any order: those whose expert has one of the rank's numbers."""
        axis = self.mesh.axes[index]
        emit, room = self._emit(rows, axis, numbers), rows.length(size, axis.size)
        counted = None
        for k in dealt:
            own = self(Dealt(0), k, (), numbers.meta["val"].shape[0], numbers)
            numbers, before = own.taken(emit, numbers), counted
            counted = own.filled
            if before is not None:
                counted = emit(aten.bitwise_and.Tensor, (own.taken(emit, before), counted))
        first, count = chunk(rows.count, axis.size, axis.coordinate)
        bounds = (emit(aten.ge.Scalar, (numbers, first)), emit(aten.lt.Scalar, (numbers, first + count)))
        inside = emit(aten.bitwise_and.Tensor, bounds)
        if counted is not None:
            inside = emit(aten.bitwise_and.Tensor, (inside, counted))
        total = emit(aten.cumsum.default, (inside, 0))
        others = emit(aten._to_copy.default, (emit(aten.bitwise_not.default, (inside,)),), dtype=torch.int64)
        order = emit(getitem, (emit(aten.sort.stable, (others,), stable=True, dim=0), 1))
        return Own(
            rows.dim,
            emit(aten.slice.Tensor, (order, 0, 0, room)),
            emit(aten.lt.Tensor, (_count(emit, room, numbers), emit(aten.slice.Tensor, (total, 0, size - 1, size)))),
            emit(aten.clamp.default, (emit(aten.sub.Tensor, (total, 1)), 0)),
            inside,
        )


def _dealt(rows: OwnRows, before: Placements) -> tuple[int, ...]:
    """The axes before that of ``rows`` along which its dim is divided, too."""
    return tuple(k for k, p in enumerate(before) if isinstance(p, Dealt) and p.dim == rows.dim)


def _count(emit: Emit, length: int, like: fx.Node) -> fx.Node:
    """0, 1, 2, ..."""
    device = like.meta["val"].device
    return emit(aten.arange.start_step, (0, length), dtype=torch.int64, device=device, pin_memory=False)
