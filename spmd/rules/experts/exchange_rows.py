"""Rows by number, between ranks that have tokens and ranks that have their experts: by one all_to_all.

A row by group is the row of a token, whose number is known on all ranks; so each rank knows all messages, a message for
each row, and counts need no exchange. Sorted by sender and receiver, the messages of a pair of ranks take the first of
its slots, in one order on both sides. Pairs with more messages than slots are noted (``passes/runtime/rooms.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import getitem
from typing import Any

import torch

from passes import Kind
from passes.runtime.rooms import within

from ...placements import ByGroup, OwnRows
from ..base import Info, OpCall, Option, Parts, Run, S, Sent
from ..einsum_labels import option

aten = torch.ops.aten
_NAME = "all_to_all"


def taken(call: OpCall, index: Any) -> list[Option]:
    """Rows of tokens, each by its number, on the rank of its expert."""
    group = call.hinted
    if not isinstance(group, ByGroup) or not _fits(call, group, index):
        return []

    def local(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
        return _Messages(run, group, call.arg("self").shape[0], _indices(args)).taken(args[0])

    return [replace(option(call, {"self": S(0)}, group), local=local, sends=_sends(group), name=_NAME)]


def added(call: OpCall, index: Any, source: str) -> list[Option]:
    """Rows of experts, the operand called ``source``, added to those of tokens, each by its number."""
    owned = dict.fromkeys(each for held in call.owned for each in held)
    return [each for group in owned for each in _added(call, index, source, group)]


def _added(call: OpCall, index: Any, source: str, group: OwnRows) -> list[Option]:
    if not isinstance(group, ByGroup) or not _fits(call, group, index) or call.arg(source).shape[0] != group.rows:
        return []

    def local(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
        rows = args[2] if source == "values" else args[3]
        return _Messages(run, group, call.arg("self").shape[0], _indices(args)).added(args[0], rows)

    placed = {"self": S(0), source: group}
    return [replace(option(call, placed, S(0)), local=local, sends=_sends(group), name=_NAME)]


def _fits(call: OpCall, group: ByGroup, index: Any) -> bool:
    """Whether ranks have equal parts of tokens and of the slots, and all the rows of a group are there."""
    one_each = isinstance(index, Info) and index.shape == (group.rows,)
    has_room = group.ends and group.room_for(group.rows, call.size**2) * call.size < group.rows
    return group.dim == 0 and one_each and has_room and not call.of_parts and call.even(call.arg("self").shape[0])


def _indices(args: Sequence[Any]) -> Any:
    return args[1][0] if isinstance(args[1], (list, tuple)) else args[2]


def _sends(group: ByGroup) -> Any:
    def sends(call: OpCall, operands: Parts, results: Parts) -> Sequence[Sent]:
        tokens = call.arg("self")
        slots = call.size * group.room_for(group.rows, call.size**2)
        return [Sent(Kind.ALL_TO_ALL, slots * prod(tokens.shape[1:]) * tokens.dtype.itemsize)]

    return sends


@dataclass(frozen=True)
class _Messages:
    """The messages between ranks. ``index``: the number of each row's token, of ``tokens`` in all."""

    run: Run
    group: ByGroup
    tokens: int
    index: Any

    @property
    def slots(self) -> int:
        """Those of a pair of ranks."""
        return self.group.room_for(self.group.rows, self.run.size**2)

    def taken(self, tokens: Any) -> Any:
        """The rows of this rank's experts, from ``tokens``, which each rank has some of."""
        (token, _), (row, is_message), room = self._sent, self._received, self.group.length(self.group.rows, self.size)
        received = self._exchanged(self.run(aten.index_select.default, (tokens, 0, token)))
        row = self.run(aten.where.ScalarOther, (is_message, row, room))
        nowhere = self.run(aten.new_zeros.default, (row, [room + 1]))
        slot = self.run(aten.scatter.src, (nowhere, 0, row, self._count(self.size * self.slots)))
        slot = self.run(aten.slice.Tensor, (slot, 0, 0, room))
        return self.run(aten.index_select.default, (received, 0, slot))

    def added(self, tokens: Any, rows: Any) -> Any:
        """``tokens`` with the ``rows`` of all ranks' experts added to them."""
        (token, is_message), (row, _) = self._sent, self._received
        received = self._exchanged(self.run(aten.index_select.default, (rows, 0, row)))
        shape = [-1] + [1] * (received.meta["val"].ndim - 1)
        is_message = self.run(aten.view.default, (is_message, shape))
        summands = self.run(aten.where.ScalarOther, (is_message, received, 0))
        return self.run(aten.index_add.default, (tokens, 0, token, summands))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.run.size

    def _exchanged(self, rows: Any) -> Any:
        equal = [self.slots] * self.size
        return self.run.all_to_all(rows, equal, equal)

    @cached_property
    def _sent(self) -> tuple[Any, Any]:
        """For each slot that leaves this rank as the one with tokens: its row, and whether there is a message."""
        message, is_message = self._in_slots(self.run.rank * self.size, 1)
        row = self.run(aten.index_select.default, (self._token, 0, message))
        return self._within(row, self.run.rank * self._each, self._each), is_message

    @cached_property
    def _received(self) -> tuple[Any, Any]:
        """For each slot that comes to this rank as the one with experts: its row, and whether there is a message."""
        message, is_message = self._in_slots(self.run.rank, self.size)
        padded = self.run(aten.constant_pad_nd.default, (self._stops, [1, 0]))
        first = self.run(aten.slice.Tensor, (padded, 0, self.run.rank, self.run.rank + 1))
        return self._within(message, first, self.group.length(self.group.rows, self.size)), is_message

    @property
    def _each(self) -> int:
        return self.tokens // self.size

    @cached_property
    def _token(self) -> Any:
        """The token of each message; negative numbers count from the last one."""
        return self.run(aten.remainder.Scalar, (self.index, self.tokens))

    @cached_property
    def _stops(self) -> Any:
        """The first row behind those of each rank's experts but the last rank's."""
        ends = self.run(aten._to_copy.default, (self.run.whole(self.group.of),), {"dtype": torch.int64})
        each = self.group.count // self.size
        return self.run(aten.slice.Tensor, (ends, 0, each - 1, self.group.count - 1, each))

    @cached_property
    def _sorted(self) -> tuple[Any, Any, Any]:
        """The messages, sorted by sender, then receiver; and where those of each pair start and end."""
        run, pairs = self.run, self._count(self.size**2)
        to = run(aten.searchsorted.Tensor, (self._stops, self._count(self.group.rows)), {"right": True})
        by = run(aten.div.Tensor_mode, (self._token, self._each), {"rounding_mode": "floor"})
        pair = run(aten.add.Tensor, (run(aten.mul.Tensor, (by, self.size)), to))
        ordered = run(aten.sort.stable, (pair,), {"stable": True, "dim": 0})
        of_pair, messages = (run(getitem, (ordered, k)) for k in range(2))
        starts = run(aten.searchsorted.Tensor, (of_pair, pairs))
        ends = run(aten.searchsorted.Tensor, (of_pair, pairs), {"right": True})
        return messages, starts, run(within, (ends, list(range(self.size**2)), self.group.rows, self.slots))

    def _in_slots(self, first: int, step: int) -> tuple[Any, Any]:
        """The message of each slot of the pairs from ``first`` on, one in ``step``, and whether there is one."""
        messages, *bounds = self._sorted
        stop = first + (self.size - 1) * step + 1
        starts, ends = (self.run(aten.slice.Tensor, (each, 0, first, stop, step)) for each in bounds)
        at = self.run(aten.add.Tensor, (self._column(starts), self._count(self.slots)))
        is_message = self.run(aten.lt.Tensor, (at, self._column(ends)))
        flat = self.run(aten.clamp.default, (self.run(aten.reshape.default, (at, [-1])), 0, self.group.rows - 1))
        found = self.run(aten.index_select.default, (messages, 0, flat))
        return found, self.run(aten.reshape.default, (is_message, [-1]))

    def _within(self, rows: Any, first: Any, length: int) -> Any:
        """``rows`` counted from ``first``, kept within a rank's own where there is no message."""
        return self.run(aten.clamp.default, (self.run(aten.sub.Tensor, (rows, first)), 0, length - 1))

    def _column(self, values: Any) -> Any:
        return self.run(aten.unsqueeze.default, (values, 1))

    def _count(self, length: int) -> Any:
        options = {"dtype": torch.int64, "device": self.index.meta["val"].device, "pin_memory": False}
        return self.run(aten.arange.start_step, (0, length), options)
