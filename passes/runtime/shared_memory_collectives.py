"""Collectives among the ranks of one host, through shared memory (``local_peers.py``) where gloo would send messages.

``Realise`` puts them into graphs, along axes that are ``shared``. The start publishes the operand. The wait
collects the operands of all ranks and reads them, on the thread that computes and in the order of ranks, so that all
get the same bits. The members of a bucket are stored one after the other, so nothing is packed or unpacked.

- ``shared_all_reduce(x, scratch, reduce_op, group)``: x of any shape to the same shape. Without ``scratch`` each rank
  reads the whole operands of all others, which is fastest for two ranks or few bytes. With it, as long as the longest
  part by ``collective_ops.bounds``, each rank reduces one part into it and reads the other parts from the others. If
  ``scratch`` is ``x``, each reduces its part in place, since nobody else reads that, and the result may lie in ``x``.
- ``scratch(x, size, reduce_op, group)``: (size,) such memory, for the all_reduce of x alone.
- ``shared_reduce_scatter(x, reduce_op, lengths, ranks, group)``: see ``collective_ops.define_scatter``.
- ``shared_all_gather(x, lengths, ranks, group)``: the inverse, see ``collective_ops.define_gather``.

An operand in a segment (``arena.reserve``) is not copied, and must not be written to before all ranks have read it:
they have once each has published again, after its wait, or has passed the next barrier. Any other operand is copied
into a new segment, which is slow.
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
from .collective_ops import bounds, define, define_gather, define_scatter, ops
from .local_peers import LocalPeers, local_peers_of
from .segments import copy_to_segment, locate

_Compute = Callable[[], object]
_Prepare = Callable[[list[Tensor], int], _Compute]  # from the operands of all ranks, and the number of this one

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class SharedMemoryWork(dist.Work):
    """A persistent collective: its tensors are fixed, and it can be started any number of times; ``wait`` computes it.

    ``prepare`` is called whenever the operand of some rank is at another address than the last time.
    """

    def __init__(self, x: Tensor, group_name: str, prepare: _Prepare) -> None:
        super().__init__()
        self._x, self._group_name, self._prepare = x, group_name, prepare
        self._shared = locate(x) if x.contiguous() is x else None
        self._operands: list[Tensor] = []  # of all ranks, in bytes
        self._is_pending = False

    def start(self) -> None:
        """Publish the operand, or a copy of it where it is not in a segment."""
        self._peers = _local_peers(self._group_name)
        self._number = self._peers.publish(self._shared or copy_to_segment(self._x))
        self._is_pending = True

    def wait(self, timeout: Any = None) -> bool:
        """Compute it, once. Raises ``PeerLostError`` if a rank has left, ``RuntimeError`` if another call has begun.

        torch keeps the pending work of a failed call by the memory of its result, and waits for it in a later one. A
        failed call closes its connections, so its work is known by them, and left as it is.
        """
        if not self._is_pending or self._peers.is_closed:
            return True
        self._is_pending = False
        operands = self._peers.collect(self._number)
        if len(operands) != len(self._operands) or not all(map(is_, operands, self._operands)):
            self._operands = operands
            self._compute = self._prepare([each.view(self._x.dtype) for each in operands], self._peers.rank)
        self._compute()
        return True


def _local_peers(group_name: str) -> LocalPeers:
    found = local_peers_of(group_name, group_named(group_name))
    if found is None:
        raise RuntimeError(
            f"the ranks of process group {group_name!r} are not connected through shared memory: a program that was "
            "compiled for ranks of one host runs on those only, and as long as their process group exists"
        )
    return found


def _shared_all_reduce(
    x: Tensor, scratch: Tensor | None, reduce_op: str, group_name: str, *, out: Tensor
) -> SharedMemoryWork:
    into = out.view(-1)
    if scratch is None:
        return SharedMemoryWork(x, group_name, lambda operands, rank: partial(_reduce, operands, reduce_op, into))
    ends = bounds(x.numel(), _local_peers(group_name).ranks)
    sizes = [end - begin for begin, end in pairwise(ends)]

    def prepare(operands: list[Tensor], rank: int) -> _Compute:
        parts = [operand.split(sizes)[rank] for operand in operands]
        if scratch.data_ptr() == x.data_ptr():
            reduced = x.view(-1).split(sizes)[rank]
            parts.insert(0, parts.pop(rank))  # it is overwritten by the first sum
        else:
            reduced = scratch[: sizes[rank]]
        others = SharedMemoryWork(reduced, group_name, lambda parts, rank: partial(_copy, parts, into.split(sizes)))

        def compute() -> None:
            _reduce(parts, reduce_op, reduced)
            others.start()
            others.wait()

        return compute

    return SharedMemoryWork(x, group_name, prepare)


def _shared_reduce_scatter(
    x: Tensor, reduce_op: str, lengths: Sequence[int], ranks: int, group_name: str, *, out: Tensor
) -> SharedMemoryWork:
    def prepare(operands: list[Tensor], rank: int) -> _Compute:
        every = [length for length in lengths for _ in range(ranks)]
        mine = zip(*(operand.split(every)[rank::ranks] for operand in operands), strict=True)
        members = list(zip(mine, out.split(lengths), strict=True))

        def compute() -> None:
            for parts, into in members:
                _reduce(parts, reduce_op, into)

        return compute

    return SharedMemoryWork(x, group_name, prepare)


def _shared_all_gather(
    x: Tensor, lengths: Sequence[int], ranks: int, group_name: str, *, out: Tensor
) -> SharedMemoryWork:
    def prepare(operands: list[Tensor], rank: int) -> _Compute:
        members = zip(*(operand.split(lengths) for operand in operands), strict=True)
        return partial(torch.cat, [part for parts in members for part in parts], out=out)

    return SharedMemoryWork(x, group_name, prepare)


def _reduce(operands: Sequence[Tensor], reduction: str, out: Tensor) -> None:
    """Reduce ``operands``, (n,) each, in the order of ranks."""
    combine, so_far = REDUCTIONS[reduction], operands[0]
    for other in operands[1:]:
        so_far = combine(so_far, other, out=out)


def _copy(parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Copy each part, but for one that was reduced where it is copied to."""
    for part, to in zip(parts, into, strict=True):
        if part.data_ptr() != to.data_ptr():
            to.copy_(part)


def _scratch(x: Tensor, size: int, reduce_op: str, group_name: str, *, out: Tensor) -> Tensor:
    return out


def _started(make: Callable[..., SharedMemoryWork]) -> Callable[..., Tensor]:
    """The op that makes a collective and starts it once."""

    @wraps(make)
    def start(*args: Any, out: Tensor) -> Tensor:
        work = make(*args, out=out)
        work.start()
        register_work(out, work)
        return out

    return start


def _make_reduced(x: Tensor, scratch: Tensor | None, reduce_op: str, group_name: str) -> Tensor:
    return x.new_empty(x.shape)


def _make_scratch(x: Tensor, size: int, reduce_op: str, group_name: str) -> Tensor:
    return x.new_empty([size])


define("Tensor x, Tensor? scratch, str reduce_op, str group_name", _started(_shared_all_reduce), _make_reduced)
define("Tensor x, int size, str reduce_op, str group_name", _scratch, _make_scratch)
define_scatter(_started(_shared_reduce_scatter))
define_gather(_started(_shared_all_gather))

shared_all_reduce, scratch = ops.shared_all_reduce, ops.scratch
shared_reduce_scatter, shared_all_gather = ops.shared_reduce_scatter, ops.shared_all_gather

OUT_VARIANTS: dict[Any, Any] = {
    op.default: op.out for op in (shared_all_reduce, shared_reduce_scatter, shared_all_gather)
}
"""The out variant of each of these ops."""

PERSISTENT: dict[Any, Callable[..., SharedMemoryWork]] = {
    shared_all_reduce.out: _shared_all_reduce,
    shared_reduce_scatter.out: _shared_reduce_scatter,
    shared_all_gather.out: _shared_all_gather,
}
"""For each out variant, the function that makes a persistent collective from its arguments."""
