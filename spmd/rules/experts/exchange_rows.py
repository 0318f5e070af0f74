"""Rows by number, between ranks that have tokens and ranks that have their experts: by one all_to_all.

Whose row goes where is known on all ranks, so counts need no exchange: each rank knows all messages, a message for each
row by group. Sorted by sender and receiver, those of a pair of ranks take the first of its slots, in one order on both
sides. Pairs with more messages than slots are noted (``passes/runtime/rooms.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from operator import getitem
from typing import Any

import torch

from passes import Kind
from passes.runtime.rooms import within

from ...placements import ByGroup
from ..base import Info, OpCall, Option, Parts, Run, S, Sent
from ..einsum_labels import option

aten = torch.ops.aten
NAME = "all_to_all"
_FROM_ZERO = (aten.index_select.default, aten.index_add.default)  # negative numbers do not count from the last row


def taken(call: OpCall, index: Any) -> list[Option]:
    """Rows by number: those of tokens, on the ranks of their experts; or those of experts, where tokens are."""
    to_experts, to_tokens = [call.hinted], call.owned[0] if call.owned else ()
    found = [_option(call, g, {"self": S(0)}, g, index) for g in to_experts]
    return [*chain(*found, *(_option(call, g, {"self": g}, S(0), index) for g in to_tokens))]


def added(call: OpCall, index: Any, source: str) -> list[Option]:
    """Rows, the operand called ``source``, added by number: those of experts to tokens, or those of tokens to rows."""
    owned = dict.fromkeys(each for held in call.owned for each in held)
    found = [_option(call, g, {"self": S(0), source: g}, S(0), index) for g in owned]
    return [*chain(*found, _option(call, call.hinted, {"self": call.hinted, source: S(0)}, call.hinted, index))]


def _option(call: OpCall, group: Any, placed: dict[str, Any], result: Any, index: Any) -> list[Option]:
    """The option, if ranks have equal parts of the tokens, and room for parts of the rows, which are all there."""
    if not isinstance(group, ByGroup) or group.dim or call.of_parts or not isinstance(index, Info):
        return []
    lengths = {placement: call.arg(name).shape[0] for name, placement in placed.items()}
    tokens = lengths.get(S(0), group.rows)
    is_whole = index.shape == (group.rows,) and lengths.get(group, group.rows) == group.rows
    has_rows_of_self = len({call.arg(name).shape[1:] for name in placed}) == 1  # summands are not broadcast
    if not (is_whole and has_rows_of_self and call.even(tokens)) or group.slots(call.size) * call.size >= group.rows:
        return []
    numbers_rows = placed["self"] == group

    def local(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
        index = args[1][0] if isinstance(args[1], (list, tuple)) else args[2]
        messages = _Messages(run, call, group, tokens, index, numbers_rows)
        base, *others = (each for each in args if getattr(each, "op", "") and each is not index)
        return messages.received(base, others[-1] if others else None, to_experts=result == group)

    def sends(call: OpCall, operands: Parts, results: Parts) -> Sequence[Sent]:
        slots, row = call.size * group.slots(call.size), call.arg("self")
        return [Sent(Kind.ALL_TO_ALL, slots * prod(row.shape[1:]) * row.dtype.itemsize)]

    return [replace(option(call, placed, result), local=local, sends=sends, name=NAME)]


@dataclass(frozen=True)
class _Messages:
    """The messages between ranks that have ``tokens`` in all, and those that have the rows of a group.

    ``index``: the token of each row; or, with ``numbers_rows``, the row of each token.
    """

    run: Run
    call: OpCall
    group: ByGroup
    tokens: int
    index: Any
    numbers_rows: bool

    @property
    def slots(self) -> int:
        """The number of slots of a pair of ranks."""
        return self.group.slots(self.size)

    def received(self, given: Any, summands: Any, to_experts: bool) -> Any:
        """The rows of ``given`` that come to this rank; or ``given``, with those of ``summands`` added to it."""
        here, there = (self._at_tokens, self._at_experts) if to_experts else (self._at_experts, self._at_tokens)
        (sent, _), (number, is_message) = here, there
        rows = self._exchanged(self.run(aten.index_select.default, (given if summands is None else summands, 0, sent)))
        if summands is None:
            room = self.group.length(self.group.rows, self.size) if to_experts else self._each
            return self._placed(rows, self.run(aten.where.ScalarOther, (is_message, number, room)), room)
        is_message = self.run(aten.view.default, (is_message, [-1] + [1] * (rows.meta["val"].ndim - 1)))
        rows = self.run(aten.where.ScalarOther, (is_message, rows, 0))
        return self.run(aten.index_add.default, (given, 0, number, rows))

    def _placed(self, rows: Any, number: Any, length: int) -> Any:
        """``rows`` by ``number``, each of which one row has; that of no message is ``length``."""
        nowhere = self.run(aten.new_zeros.default, (number, [length + 1]))
        slot = self.run(aten.scatter.src, (nowhere, 0, number, self._count(self.size * self.slots)))
        slot = self.run(aten.slice.Tensor, (slot, 0, 0, length))
        return self.run(aten.index_select.default, (rows, 0, slot))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.run.size

    def _exchanged(self, rows: Any) -> Any:
        equal = [self.slots] * self.size
        return self.run.all_to_all(rows, equal, equal)

    @cached_property
    def _at_tokens(self) -> tuple[Any, Any]:
        """Of this rank as one that has tokens: the row of each slot, and whether there is a message."""
        message, is_message = self._in_slots(self.run.rank * self.size, 1)
        row = self.run(aten.index_select.default, (self._token, 0, message))
        return self._within(row, self.run.rank * self._each, self._each), is_message

    @cached_property
    def _at_experts(self) -> tuple[Any, Any]:
        """Of this rank as one that has experts: the row of each slot, and whether there is a message."""
        message, is_message = self._in_slots(self.run.rank, self.size)
        padded = self.run(aten.constant_pad_nd.default, (self._stops, [1, 0]))
        first = self.run(aten.slice.Tensor, (padded, 0, self.run.rank, self.run.rank + 1))
        row = self.run(aten.index_select.default, (self._row, 0, message))
        return self._within(row, first, self.group.length(self.group.rows, self.size)), is_message

    @property
    def _each(self) -> int:
        return self.tokens // self.size

    @cached_property
    def _token(self) -> Any:
        """The token of each message."""
        return self._every if self.numbers_rows else self._checked(self.tokens)

    @cached_property
    def _row(self) -> Any:
        """The row by group of each message."""
        return self._checked(self.group.rows) if self.numbers_rows else self._every

    def _checked(self, length: int) -> Any:
        """The index as one of ``length`` rows: read by the op's own rules, so that it raises what the plain op does."""
        numbers = self._count(length)
        if self.call.target in _FROM_ZERO:
            return self.run(aten.index_select.default, (numbers, 0, self.index))
        return self.run(aten.index.Tensor, (numbers, [self.index]))

    @cached_property
    def _every(self) -> Any:
        return self._count(self.group.rows)

    @cached_property
    def _stops(self) -> Any:
        """The first row behind those of each rank's experts but the last rank's."""
        ends = self.run(aten._to_copy.default, (self.run.whole(self.group.of),), {"dtype": torch.int64})
        each = self.group.count // self.size
        stops = self.run(aten.slice.Tensor, (ends, 0, each - 1, self.group.count - 1, each))
        return self.run(aten.contiguous.default, (stops,))  # what searchsorted reads without a copy, and a warning

    @cached_property
    def _sorted(self) -> tuple[Any, Any, Any]:
        """The messages, sorted by sender, then receiver; and where those of each pair start and end."""
        run, pairs = self.run, self._count(self.size**2)
        to = run(aten.searchsorted.Tensor, (self._stops, self._row), {"right": True})
        by = run(aten.div.Tensor_mode, (self._token, self._each), {"rounding_mode": "floor"})
        pair = run(aten.add.Tensor, (run(aten.mul.Tensor, (by, self.size)), to))
        ordered = run(aten.sort.stable, (pair,), {"stable": True, "dim": 0})
        of_pair, messages = (run(getitem, (ordered, k)) for k in range(2))
        starts = run(aten.searchsorted.Tensor, (of_pair, pairs))
        ends = run(aten.searchsorted.Tensor, (of_pair, pairs), {"right": True})
        return messages, starts, run(within, (ends, 1, self.group.rows, self.slots))

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
