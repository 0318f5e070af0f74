"""Ops that perform a collective where the backend's own are slow, and variants of collectives that allocate nothing.

``Realise`` puts them into graphs. As torch's functional collectives, each starts communication and returns a tensor
that ``_c10d_functional.wait_tensor`` waits for; until then nobody may touch operand or result. They move bytes, so any
dtype goes.

- ``exchange(x, ranks, size, group)``: x (total,) is cut into one part a rank, by ``bounds``. This rank gets its part of
  every rank's x, as rows in the order of ranks: (ranks, size), where ``size`` is the length of its part.
- ``swap(x, size, group)``, for two ranks: only the row of the other, (size,), with no copy of this rank's own part.
- ``gather_by_broadcast(x, total, ranks, group)``: x (length of this rank's part,) to the whole (total,); each rank
  broadcasts its part, all at once. Where x lies in its part of ``out`` already, it is not copied.
- ``gather_by_sending(x, total, ranks, group)``: the same; each rank sends its part to each other.

Every op has an overload ``out``, which writes into the tensor it is given; ``OUT_VARIANTS`` has one for every
functional collective. Waits are kept by *storage*: to wait for one of two results in one storage is to wait for both,
so each ``out`` should have a storage of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import c10d, group_named, register_work

NAMESPACE = "spmd_transport"
_TAG = 20_261  # of our point-to-point messages, so that they are not taken for a user's


def bounds(total: int, ranks: int) -> list[int]:
    """Where the parts of ``total`` elements begin, and the end: lengths differ by one at most."""
    return [rank * total // ranks for rank in range(ranks + 1)]


def part(total: int, ranks: int, rank: int) -> int:
    """The number of elements in one rank's part."""
    ends = bounds(total, ranks)
    return ends[rank + 1] - ends[rank]


def _exchange(x: Tensor, ranks: int, size: int, group_name: str, *, out: Tensor) -> Tensor:
    x = x.contiguous()
    ends = [end * x.element_size() for end in bounds(x.numel(), ranks)]
    sent = [stop - start for start, stop in pairwise(ends)]
    received = [size * x.element_size()] * ranks
    even = len(set(sent)) == 1  # what gloo does without lists of lengths is quicker
    lengths = ([], []) if even else (received, sent)
    group = group_named(group_name)
    register_work(out, dist.all_to_all_single(as_bytes(out), as_bytes(x), *lengths, group=group, async_op=True))
    return out


def _swap(x: Tensor, size: int, group_name: str, *, out: Tensor) -> Tensor:
    group = group_named(group_name)
    other = 1 - group.rank()
    sent = _parts(x.contiguous(), 2)[other]
    received = as_bytes(out)
    incoming, outgoing = [0, 0], [0, 0]  # nothing from and to oneself
    incoming[other], outgoing[other] = len(received), len(sent)
    register_work(out, dist.all_to_all_single(received, sent, incoming, outgoing, group=group, async_op=True))
    return out


def _gather_by_broadcast(x: Tensor, total: int, ranks: int, group_name: str, *, out: Tensor) -> Tensor:
    group = group_named(group_name)
    parts = _parts(out, ranks)
    _fill(parts[group.rank()], as_bytes(x.contiguous()))
    for rank, each in enumerate(parts):
        if each.numel():
            register_work(out, dist.broadcast(each, group_src=rank, group=group, async_op=True))
    return out


def _gather_by_sending(x: Tensor, total: int, ranks: int, group_name: str, *, out: Tensor) -> Tensor:
    group = group_named(group_name)
    rank, mine, parts = group.rank(), as_bytes(x.contiguous()), _parts(out, ranks)
    for step in range(1, ranks):  # at each step, every rank sends to another one
        source, target = (rank - step) % ranks, (rank + step) % ranks
        if parts[source].numel():
            register_work(out, dist.irecv(parts[source], group_src=source, group=group, tag=_TAG))
        if mine.numel():
            register_work(out, dist.isend(mine, group_dst=target, group=group, tag=_TAG))
    _fill(parts[rank], mine)
    return out


def _all_reduce(x: Tensor, reduce_op: str, group_name: str, *, out: Tensor) -> Tensor:
    if x.data_ptr() != out.data_ptr():
        out.copy_(x)
    c10d.all_reduce_.default(out, reduce_op, group_name)
    return out


def _all_gather_into_tensor(x: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    c10d.all_gather_into_tensor_out.default(as_bytes(x.contiguous()), group_size, group_name, out=as_bytes(out))
    return out


def _reduce_scatter_tensor(x: Tensor, reduce_op: str, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    x, into = (torch.view_as_real(each) if each.is_complex() else each for each in (x, out))
    c10d.reduce_scatter_tensor_out.default(x, reduce_op, group_size, group_name, out=into)
    return out


def _all_to_all_single(
    x: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group_name: str, *, out: Tensor
) -> Tensor:
    row = math.prod(x.shape[1:]) * x.element_size()
    lengths = ([row * n for n in output_split_sizes], [row * n for n in input_split_sizes])
    group = group_named(group_name)
    register_work(out, dist.all_to_all_single(as_bytes(out), as_bytes(x), *lengths, group=group, async_op=True))
    return out


def as_bytes(x: Tensor) -> Tensor:
    """The same memory, as a flat tensor of bytes: no backend knows every dtype."""
    return x.view(-1).view(torch.uint8)


def _fill(part: Tensor, x: Tensor) -> None:
    """Copy, unless ``x`` was made where it belongs."""
    if part.data_ptr() != x.data_ptr():
        part.copy_(x)


def _parts(x: Tensor, ranks: int) -> list[Tensor]:
    ends = [end * x.element_size() for end in bounds(x.numel(), ranks)]
    whole = as_bytes(x)
    return [whole[start:stop] for start, stop in pairwise(ends)]


def _exchanged(x: Tensor, ranks: int, size: int, group_name: str) -> Tensor:
    return x.new_empty([ranks, size])


def _swapped(x: Tensor, size: int, group_name: str) -> Tensor:
    return x.new_empty([size])


def _gathered(x: Tensor, total: int, ranks: int, group_name: str) -> Tensor:
    return x.new_empty([total])


_library = torch.library.Library(NAMESPACE, "DEF")


def define(arguments: str, into: Callable[..., Tensor], empty: Callable[..., Tensor] | None) -> None:
    """Make an op of ``into``, which writes into its ``out``, and one that first makes what ``empty`` returns."""
    name = into.__name__.removeprefix("_")
    _library.define(f"{name}.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)")
    _library.impl(f"{name}.out", into, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}.out", lambda *_, out: out, lib=_library)
    if empty is None:
        return
    _library.define(f"{name}({arguments}) -> Tensor")
    _library.impl(name, lambda *given: into(*given, out=empty(*given)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", empty, lib=_library)


def define_scatter(into: Callable[..., Tensor]) -> None:
    """Make an op ``(x, reduce_op, lengths, ranks, group)`` that reduces and scatters the members of a bucket in x.

    x (ranks * sum of lengths,) has the members one after the other, of each the part of rank 0, then that of rank 1,
    ...; the result has this rank's parts, (sum of lengths,). ``lengths`` counts the elements of a part of each member.
    """

    def own(x: Tensor, reduce_op: str, lengths: Sequence[int], ranks: int, group_name: str) -> Tensor:
        return x.new_empty([sum(lengths)])

    define("Tensor x, str reduce_op, int[] lengths, int ranks, str group_name", into, own)


def define_gather(into: Callable[..., Tensor]) -> None:
    """Make an op ``(x, lengths, ranks, group)``, the way back: from this rank's parts to the members, whole."""

    def whole(x: Tensor, lengths: Sequence[int], ranks: int, group_name: str) -> Tensor:
        return x.new_empty([ranks * sum(lengths)])

    define("Tensor x, int[] lengths, int ranks, str group_name", into, whole)


define("Tensor x, int ranks, int size, str group_name", _exchange, _exchanged)
define("Tensor x, int size, str group_name", _swap, _swapped)
define("Tensor x, int total, int ranks, str group_name", _gather_by_broadcast, _gathered)
define("Tensor x, int total, int ranks, str group_name", _gather_by_sending, _gathered)
define("Tensor x, str reduce_op, str group_name", _all_reduce, None)
define("Tensor x, int group_size, str group_name", _all_gather_into_tensor, None)
define("Tensor x, str reduce_op, int group_size, str group_name", _reduce_scatter_tensor, None)
define("Tensor x, int[] output_split_sizes, int[] input_split_sizes, str group_name", _all_to_all_single, None)

ops = getattr(torch.ops, NAMESPACE)
exchange, swap = ops.exchange, ops.swap
gather_by_broadcast, gather_by_sending = ops.gather_by_broadcast, ops.gather_by_sending

OUT_VARIANTS: dict[Any, Any] = {
    c10d.all_reduce.default: ops.all_reduce.out,  # in place where out is the operand
    c10d.all_gather_into_tensor.default: ops.all_gather_into_tensor.out,
    c10d.reduce_scatter_tensor.default: ops.reduce_scatter_tensor.out,
    c10d.all_to_all_single.default: ops.all_to_all_single.out,
    exchange.default: exchange.out,
    swap.default: swap.out,
    gather_by_broadcast.default: gather_by_broadcast.out,
    gather_by_sending.default: gather_by_sending.out,
}
"""For each functional collective, the op with the same arguments and ``out=``, which allocates nothing."""
