"""Collectives among ranks of one host, which read each other's memory (``shared_memory.py``) where gloo moves bytes.

``Realise`` puts them into graphs, along axes that are ``shared``. To start one is to tell where the operand lies; the
wait does the work, on the thread that computes: it reads what all ranks have, in the order of ranks, so that all get
the same bits. Members of a bucket lie one after the other, each as it is, so nobody has to pack or unpack them:
``lengths`` counts the elements that one rank's part has of each.

- ``shared_all_reduce(x, scratch, reduce_op, group)``: x of any shape to the same shape. Without ``scratch`` each rank
  reads all that the others have, which is quickest for two ranks, or for little. With it, as long as the longest part
  by ``transport.bounds``, each reduces its part into it, and reads the other parts from the others' scratch.
- ``scratch(x, size, reduce_op, group)``: (size,) such memory, for the all_reduce of x alone.
- ``shared_reduce_scatter(x, reduce_op, lengths, ranks, group)``: x (ranks * sum of lengths,), of each member the part
  of rank 0, then that of rank 1, ...; to (sum of lengths,).
- ``shared_all_gather(x, lengths, ranks, group)``: the way back, from (sum of lengths,) to (ranks * sum of lengths,).

An operand in a segment (``arena.reserve``) is not copied. It must not be written to before all ranks have met again;
what lies elsewhere is copied into a new segment, which is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._torch import group_named, register_work
from .shared_memory import Neighbours, neighbours_of
from .transport import bounds, define, ops

_Finish = Callable[[list[Tensor], int], object]  # given what all ranks have, and which one this is

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class _Reading(dist.Work):
    """A collective under way: to wait for it is to perform it, if the call that started it goes on.

    What a call leaves behind that fails, torch keeps by the memory of its result, and waits for in the next call.
    """

    def __init__(self, perform: Callable[[], None]) -> None:
        super().__init__()
        self._perform = perform

    def wait(self, timeout: Any = None) -> bool:
        """Perform it. Raises ``RuntimeError`` if a rank has gone."""
        self._perform()
        return True


def _start(x: Tensor, group_name: str, out: Tensor, finish: _Finish) -> Tensor:
    """Post ``x``, and let who waits for ``out`` finish it."""
    neighbours = _neighbours(group_name)
    number = neighbours.post(x.contiguous())
    register_work(out, _Reading(lambda: _finish(neighbours, number, x.dtype, finish)))
    return out


def _perform(x: Tensor, group_name: str, finish: _Finish) -> None:
    """Post ``x`` and finish at once."""
    neighbours = _neighbours(group_name)
    _finish(neighbours, neighbours.post(x), x.dtype, finish)


def _finish(neighbours: Neighbours, number: int, dtype: torch.dtype, finish: _Finish) -> None:
    if neighbours.awaits(number):
        finish([each.view(dtype) for each in neighbours.receive(number)], neighbours.rank)


def _neighbours(group_name: str) -> Neighbours:
    found = neighbours_of(group_name, group_named(group_name))
    if found is None:
        raise RuntimeError(
            f"the ranks of process group {group_name!r} are not connected through memory: a program that was compiled "
            "for ranks of one host runs on those only, and as long as their process group"
        )
    return found


def _shared_all_reduce(x: Tensor, scratch: Tensor | None, reduce_op: str, group_name: str, *, out: Tensor) -> Tensor:
    into = out.view(-1)
    if scratch is None:
        return _start(x, group_name, out, lambda operands, rank: _reduce(operands, reduce_op, into))
    ends = bounds(x.numel(), _neighbours(group_name).ranks)
    sizes = [end - begin for begin, end in pairwise(ends)]

    def finish(operands: list[Tensor], rank: int) -> None:
        parts = [operand.split(sizes)[rank] for operand in operands]
        reduced = scratch[: sizes[rank]]
        _reduce(parts, reduce_op, reduced)
        _perform(reduced, group_name, lambda parts, rank: torch.cat(parts, out=into))

    return _start(x, group_name, out, finish)


def _scratch(x: Tensor, size: int, reduce_op: str, group_name: str, *, out: Tensor) -> Tensor:
    return out


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


def _unwritten(x: Tensor, size: int, reduce_op: str, group_name: str) -> Tensor:
    return x.new_empty([size])


def _reduced(x: Tensor, scratch: Tensor | None, reduce_op: str, group_name: str) -> Tensor:
    return x.new_empty(x.shape)


def _scattered(x: Tensor, reduce_op: str, lengths: Sequence[int], ranks: int, group_name: str) -> Tensor:
    return x.new_empty([sum(lengths)])


def _gathered(x: Tensor, lengths: Sequence[int], ranks: int, group_name: str) -> Tensor:
    return x.new_empty([ranks * sum(lengths)])


define("Tensor x, int size, str reduce_op, str group_name", _scratch, _unwritten)
define("Tensor x, Tensor? scratch, str reduce_op, str group_name", _shared_all_reduce, _reduced)
define("Tensor x, str reduce_op, int[] lengths, int ranks, str group_name", _shared_reduce_scatter, _scattered)
define("Tensor x, int[] lengths, int ranks, str group_name", _shared_all_gather, _gathered)

shared_all_reduce, scratch = ops.shared_all_reduce, ops.scratch
shared_reduce_scatter, shared_all_gather = ops.shared_reduce_scatter, ops.shared_all_gather

OUT_FORMS: dict[Any, Any] = {op.default: op.out for op in (shared_all_reduce, shared_reduce_scatter, shared_all_gather)}
"""For each of these ops, the one that writes where it is told."""
