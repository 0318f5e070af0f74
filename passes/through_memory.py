"""Collectives among ranks of one host, which read each other's memory (``shared_memory.py``) where gloo moves bytes.

``Realise`` puts them into graphs, along axes that are ``shared``. To start one is to tell where the operand lies; the
wait does the work, on the thread that computes: it reads what all ranks have, in the order of ranks, so that all get
the same bits. Members of a bucket lie one after the other, each as it is, so nobody has to pack or unpack them:
``lengths`` counts the elements that one rank's part has of each.

- ``shared_all_reduce(x, reduce_op, group)``: x of any shape to the same shape.
- ``shared_reduce_scatter(x, reduce_op, lengths, ranks, group)``: x (ranks * sum of lengths,), of each member the part
  of rank 0, then that of rank 1, ...; to (sum of lengths,).
- ``shared_all_gather(x, lengths, ranks, group)``: the way back, from (sum of lengths,) to (ranks * sum of lengths,).

An operand in a segment (``arena.reserve``) is not copied. It must not be written to before all ranks have met again;
what lies elsewhere is copied into a new segment, which is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._torch import group_named, register_work
from .shared_memory import neighbours_of
from .transport import define, ops

_Finish = Callable[[list[Tensor], int], None]  # what all ranks have, and which one this is

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class _Reading(dist.Work):
    """A collective under way: to wait for it is to perform it."""

    def __init__(self, perform: Callable[[], None]) -> None:
        super().__init__()
        self._perform = perform

    def wait(self, timeout: Any = None) -> bool:
        """Perform it. Raises ``RuntimeError`` if a rank has gone."""
        self._perform()
        return True


def _start(x: Tensor, group_name: str, out: Tensor, finish: _Finish) -> Tensor:
    """Post ``x``, and let who waits for ``out`` finish it."""
    neighbours = neighbours_of(group_name, group_named(group_name))
    if neighbours is None:
        raise RuntimeError(
            f"the ranks of process group {group_name!r} are not connected through memory: a program that was compiled "
            "for ranks of one host runs on those only, and as long as their process group"
        )
    number = neighbours.post(x.contiguous())

    def perform() -> None:
        finish([each.view(x.dtype) for each in neighbours.receive(number)], neighbours.rank)

    register_work(out, _Reading(perform))
    return out


def _shared_all_reduce(x: Tensor, reduce_op: str, group_name: str, *, out: Tensor) -> Tensor:
    into = out.view(-1)
    return _start(x, group_name, out, lambda operands, rank: _reduce(operands, reduce_op, into))


def _shared_reduce_scatter(
    x: Tensor, reduce_op: str, lengths: Sequence[int], ranks: int, group_name: str, *, out: Tensor
) -> Tensor:
    def finish(operands: list[Tensor], rank: int) -> None:
        mine = [
            operand.split([length for length in lengths for _ in range(ranks)])[rank::ranks] for operand in operands
        ]
        for *parts, into in zip(*mine, out.split(lengths), strict=True):
            _reduce(parts, reduce_op, into)

    return _start(x, group_name, out, finish)


def _shared_all_gather(x: Tensor, lengths: Sequence[int], ranks: int, group_name: str, *, out: Tensor) -> Tensor:
    def finish(operands: list[Tensor], rank: int) -> None:
        members = zip(*(operand.split(lengths) for operand in operands), strict=True)
        torch.cat([part for parts in members for part in parts], out=out)

    return _start(x, group_name, out, finish)


def _reduce(operands: Sequence[Tensor], reduction: str, out: Tensor) -> None:
    """One after the other, in the order of ranks: (n,) each."""
    combine, so_far = REDUCTIONS[reduction], operands[0]
    for other in operands[1:]:
        so_far = combine(so_far, other, out=out)


def _reduced(x: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return x.new_empty(x.shape)


def _scattered(x: Tensor, reduce_op: str, lengths: Sequence[int], ranks: int, group_name: str) -> Tensor:
    return x.new_empty([sum(lengths)])


def _gathered(x: Tensor, lengths: Sequence[int], ranks: int, group_name: str) -> Tensor:
    return x.new_empty([ranks * sum(lengths)])


define("Tensor x, str reduce_op, str group_name", _shared_all_reduce, _reduced)
define("Tensor x, str reduce_op, int[] lengths, int ranks, str group_name", _shared_reduce_scatter, _scattered)
define("Tensor x, int[] lengths, int ranks, str group_name", _shared_all_gather, _gathered)

shared_all_reduce, shared_reduce_scatter, shared_all_gather = (
    ops.shared_all_reduce,
    ops.shared_reduce_scatter,
    ops.shared_all_gather,
)

OUT_FORMS: dict[Any, Any] = {op.default: op.out for op in (shared_all_reduce, shared_reduce_scatter, shared_all_gather)}
"""For each of these ops, the one that writes where it is told."""
