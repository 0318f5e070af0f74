"""Collectives among ranks of one host, which read each other's memory (``shared_memory.py``) where gloo moves bytes.

``Realise`` puts them into graphs, along axes that are ``shared``. To start one is to tell where the operand lies; the
wait does the work, on the thread that computes: it reads what all ranks have, in the order of ranks, so that all get
the same bits. Members of a bucket lie one after the other, each as it is, so nobody has to pack or unpack them.

- ``shared_all_reduce(x, scratch, reduce_op, group)``: x of any shape to the same shape. Without ``scratch`` each rank
  reads all that the others have, which is quickest for two ranks, or for little. With it, as long as the longest part
  by ``transport.bounds``, each reduces its part into it, and reads the other parts from the others' scratch.
- ``scratch(x, size, reduce_op, group)``: (size,) such memory, for the all_reduce of x alone.
- ``shared_reduce_scatter(x, reduce_op, lengths, ranks, group)``: as ``transport.define_scatter`` has it.
- ``shared_all_gather(x, lengths, ranks, group)``: the way back.

An operand in a segment (``arena.reserve``) is not copied. It must not be written to before all ranks have met again;
what lies elsewhere is copied into a new segment, which is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import pairwise
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import group_named, register_work
from .message_collectives import bounds, define, define_gather, define_scatter, ops
from .shared_memory import Neighbours, copied, neighbours_of, visible

_Perform = Callable[[], object]
_Plan = Callable[[list[Tensor], int], _Perform]  # given what all ranks have, and which one this is

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class Reading(dist.Work):
    """A collective on tensors that stay where they are, to be started any number of times; its wait performs it.

    ``plan`` is asked for what is to be done whenever a rank's operand lies elsewhere than the last time.
    """

    def __init__(self, x: Tensor, group_name: str, plan: _Plan) -> None:
        super().__init__()
        self._x, self._group_name, self._plan = x, group_name, plan
        self._visible = visible(x) if x.contiguous() is x else None
        self._seen: list[Tensor] = []  # what all ranks had

    def start(self) -> None:
        """Tell the others where the operand lies, or a copy of it that they can look at."""
        self._neighbours = _neighbours(self._group_name)
        self._number = self._neighbours.post(self._visible or copied(self._x))

    def wait(self, timeout: Any = None) -> bool:
        """Perform it, if the call that started it goes on. Raises ``RuntimeError`` if a rank has gone.

        What a call leaves behind that fails, torch keeps by the memory of its result, and waits for in the next call.
        """
        if self._neighbours.awaits(self._number):
            seen = self._neighbours.receive(self._number)
            if len(seen) != len(self._seen) or not all(map(is_, seen, self._seen)):
                self._seen = seen
                self._perform = self._plan([each.view(self._x.dtype) for each in seen], self._neighbours.rank)
            self._perform()
        return True


def _neighbours(group_name: str) -> Neighbours:
    found = neighbours_of(group_name, group_named(group_name))
    if found is None:
        raise RuntimeError(
            f"the ranks of process group {group_name!r} are not connected through memory: a program that was compiled "
            "for ranks of one host runs on those only, and as long as their process group"
        )
    return found


def _shared_all_reduce(x: Tensor, scratch: Tensor | None, reduce_op: str, group_name: str, *, out: Tensor) -> Reading:
    into = out.view(-1)
    if scratch is None:
        return Reading(x, group_name, lambda operands, rank: partial(_reduce, operands, reduce_op, into))
    ends = bounds(x.numel(), _neighbours(group_name).ranks)
    sizes = [end - begin for begin, end in pairwise(ends)]

    def plan(operands: list[Tensor], rank: int) -> _Perform:
        parts, reduced = [operand.split(sizes)[rank] for operand in operands], scratch[: sizes[rank]]
        others = Reading(reduced, group_name, lambda parts, rank: partial(torch.cat, parts, out=into))

        def perform() -> None:
            _reduce(parts, reduce_op, reduced)
            others.start()
            others.wait()

        return perform

    return Reading(x, group_name, plan)


def _shared_reduce_scatter(
    x: Tensor, reduce_op: str, lengths: Sequence[int], ranks: int, group_name: str, *, out: Tensor
) -> Reading:
    def plan(operands: list[Tensor], rank: int) -> _Perform:
        every = [length for length in lengths for _ in range(ranks)]
        mine = zip(*(operand.split(every)[rank::ranks] for operand in operands), strict=True)
        members = list(zip(mine, out.split(lengths), strict=True))

        def perform() -> None:
            for parts, into in members:
                _reduce(parts, reduce_op, into)

        return perform

    return Reading(x, group_name, plan)


def _shared_all_gather(x: Tensor, lengths: Sequence[int], ranks: int, group_name: str, *, out: Tensor) -> Reading:
    def plan(operands: list[Tensor], rank: int) -> _Perform:
        members = zip(*(operand.split(lengths) for operand in operands), strict=True)
        return partial(torch.cat, [part for parts in members for part in parts], out=out)

    return Reading(x, group_name, plan)


def _reduce(operands: Sequence[Tensor], reduction: str, out: Tensor) -> None:
    """One after the other, in the order of ranks: (n,) each."""
    combine, so_far = REDUCTIONS[reduction], operands[0]
    for other in operands[1:]:
        so_far = combine(so_far, other, out=out)


def _scratch(x: Tensor, size: int, reduce_op: str, group_name: str, *, out: Tensor) -> Tensor:
    return out


def _started(prepare: Callable[..., Reading]) -> Callable[..., Tensor]:
    """The op that starts what ``prepare`` makes."""

    @wraps(prepare)
    def start(*given: Any, out: Tensor) -> Tensor:
        reading = prepare(*given, out=out)
        reading.start()
        register_work(out, reading)
        return out

    return start


def _reduced(x: Tensor, scratch: Tensor | None, reduce_op: str, group_name: str) -> Tensor:
    return x.new_empty(x.shape)


def _unwritten(x: Tensor, size: int, reduce_op: str, group_name: str) -> Tensor:
    return x.new_empty([size])


define("Tensor x, Tensor? scratch, str reduce_op, str group_name", _started(_shared_all_reduce), _reduced)
define("Tensor x, int size, str reduce_op, str group_name", _scratch, _unwritten)
define_scatter(_started(_shared_reduce_scatter))
define_gather(_started(_shared_all_gather))

shared_all_reduce, scratch = ops.shared_all_reduce, ops.scratch
shared_reduce_scatter, shared_all_gather = ops.shared_reduce_scatter, ops.shared_all_gather

OUT_VARIANTS: dict[Any, Any] = {
    op.default: op.out for op in (shared_all_reduce, shared_reduce_scatter, shared_all_gather)
}
"""For each of these ops, the one that writes where it is told."""

PREPARED: dict[Any, Callable[..., Reading]] = {
    shared_all_reduce.out: _shared_all_reduce,
    shared_reduce_scatter.out: _shared_reduce_scatter,
    shared_all_gather.out: _shared_all_gather,
}
"""For each op that writes where it is told, what makes of its arguments a collective that each call can start."""
