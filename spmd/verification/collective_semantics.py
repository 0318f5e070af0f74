"""Reference implementations of collectives: each a function of the operands of all ranks: no process group is asked.

In: for one group of ranks, the operands and the arguments of the op on each. Out: the result of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from passes.ir.collectives import OUT_VARIANTS, c10d
from passes.runtime import coalesced_collectives, message_collectives, shared_memory_collectives
from passes.runtime.collective_ops import bounds

Results = list[Any]  # of each rank of the group: a tensor, or a list of them for a coalesced collective
Arguments = Sequence[dict[str, Any]]  # of each rank, by the names of the op's schema

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def _reduced(operands: Sequence[Tensor], reduction: str | Callable[..., Tensor]) -> Tensor:
    """All operands together, in the order of ranks; ``reduction`` may be a function of them."""
    if callable(reduction):
        return reduction(operands)
    total = reduce(_COMBINE[reduction], operands)
    return total / len(operands) if reduction == "avg" else total


def _all_reduce(x: Sequence[Tensor], arguments: Arguments) -> Results:
    total = _reduced(x, arguments[0]["reduce_op"])
    return [total for _ in x]


def _all_gather(x: Sequence[Tensor], arguments: Arguments) -> Results:
    whole = torch.cat(list(x))
    return [whole for _ in x]


def _reduce_scatter(x: Sequence[Tensor], arguments: Arguments) -> Results:
    total = _reduced(x, arguments[0]["reduce_op"])
    rows = len(total) // len(x)
    return [total[k * rows : (k + 1) * rows].clone() for k in range(len(x))]


def _all_to_all(x: Sequence[Tensor], arguments: Arguments) -> Results:
    sent = [each.split(given["input_split_sizes"]) for each, given in zip(x, arguments, strict=True)]
    return [torch.cat([parts[k] for parts in sent]) for k in range(len(x))]


def _broadcast(x: Sequence[Tensor], arguments: Arguments) -> Results:
    return [x[arguments[0]["src"]].clone() for _ in x]


def _exchange(x: Sequence[Tensor], arguments: Arguments) -> Results:
    parts = [_parts(each) for each in _cut(x)]
    return [torch.stack([each[k] for each in parts]) for k in range(len(x))]


def _swap(x: Sequence[Tensor], arguments: Arguments) -> Results:
    return [_parts(each)[k].clone() for k, each in zip((0, 1), reversed(_cut(x)), strict=True)]


def _cut(x: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    return [(each.reshape(-1), len(x)) for each in x]


def _parts(given: tuple[Tensor, int]) -> list[Tensor]:
    flat, ranks = given
    return [flat[start:stop] for start, stop in pairwise(bounds(flat.numel(), ranks))]


def _gather_members(x: Sequence[Tensor], arguments: Arguments) -> Results:
    members = zip(*(each.split(arguments[0]["lengths"]) for each in x), strict=True)
    whole = torch.cat([part for parts in members for part in parts])
    return [whole for _ in x]


def _scatter_members(x: Sequence[Tensor], arguments: Arguments) -> Results:
    ranks, lengths = len(x), arguments[0]["lengths"]
    total = _reduced(x, arguments[0]["reduce_op"])
    parts = total.split([length for length in lengths for _ in range(ranks)])
    return [torch.cat(parts[k::ranks]) for k in range(ranks)]


def _each(one: Callable[[Sequence[Tensor], Arguments], Results]) -> Callable[[Sequence[Any], Arguments], Results]:
    """The coalesced collective: ``one`` for each of the tensors in the lists."""

    def each(x: Sequence[Any], arguments: Arguments) -> Results:
        results = [one(tensors, arguments) for tensors in zip(*x, strict=True)]
        return [list(of_rank) for of_rank in zip(*results, strict=True)]

    return each


_messages, _shared, _coalesced = message_collectives, shared_memory_collectives, coalesced_collectives

SEMANTICS: dict[Any, Callable[[Any, Arguments], Results]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_reduce_.default: _all_reduce,
    c10d.all_reduce_coalesced.default: _each(_all_reduce),
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_gather_into_tensor_coalesced.default: _each(_all_gather),
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.reduce_scatter_tensor_coalesced.default: _each(_reduce_scatter),
    c10d.all_to_all_single.default: _all_to_all,
    c10d.broadcast.default: _broadcast,
    _messages.exchange.default: _exchange,
    _messages.swap.default: _swap,
    _messages.gather_by_broadcast.default: _all_gather,
    _messages.gather_by_sending.default: _all_gather,
    _shared.shared_all_reduce.default: _all_reduce,
    _shared.shared_all_gather.default: _gather_members,
    _shared.shared_reduce_scatter.default: _scatter_members,
    _coalesced.coalesced_all_gather.default: _gather_members,
    _coalesced.coalesced_reduce_scatter.default: _scatter_members,
}
_OF_TWO_RANKS = (_messages.send.default, _messages.recv.default)
SEMANTICS |= {out: SEMANTICS[op] for op, out in OUT_VARIANTS.items() if op not in _OF_TWO_RANKS}

_EXCHANGES = (_messages.exchange.default, _messages.swap.default)
SENDS_ADDENDS = {*_EXCHANGES, *(OUT_VARIANTS[op] for op in _EXCHANGES)}
"""The collectives whose ranks add up themselves what they receive."""

COPIES_FIRST = {
    c10d.all_reduce.default,
    c10d.all_reduce_.default,
    c10d.all_reduce_coalesced.default,
    OUT_VARIANTS[c10d.all_reduce.default],
}
"""The collectives that read their operand when they start; all others may until they are waited for."""
