"""Collectives as messages: ops that are faster than some of the backend's own, and out variants of the backend's.

``Realise`` puts them into graphs. They move bytes, so they support any dtype.

- ``exchange(x, ranks, size, group)``: x (total,) is cut into one part per rank, by ``bounds``. This rank gets its part
  of every rank's x, as rows in the order of ranks: (ranks, size), where ``size`` is the length of its part.
- ``swap(x, size, group)``, for two ranks: only the row of the other rank, (size,), without a copy of this rank's own.
- ``gather_by_broadcast(x, total, ranks, group)``: x (length of this rank's part,) to the whole (total,); each rank
  broadcasts its part, all at once. Where x is stored in its part of ``out`` already, it is not copied.
- ``gather_by_sending(x, total, ranks, group)``: the same; each rank sends its part to each other.
- ``send(x, peer, channel, group)``: x to the rank ``peer`` of the group; the result is an empty tensor to wait for.
- ``recv(shape, dtype, device, peer, channel, group)``: what ``peer`` sends. Messages of one ``channel``
  arrive in the order in which they are sent; on NCCL, which knows no channels, all from one rank to another.

``OUT_VARIANTS`` has the out variant of these and of torch's functional collectives, which allocates nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import c10d, group_named
from .collective_ops import REDUCE_OPS, as_bytes, bounds, define, ops
from .gloo import is_gloo, register, start_message
from .peer_connection import PeerLostError

_TAG = 20_261  # of these point-to-point messages, so that they are not taken for those of the user
_CHANNEL_TAGS = 1 << 30  # the first tag of those that programs send and receive by themselves, and how many there are


def _exchange(x: Tensor, ranks: int, size: int, group_name: str, *, out: Tensor) -> Tensor:
    x = x.contiguous()
    ends = [end * x.element_size() for end in bounds(x.numel(), ranks)]
    sent = [stop - start for start, stop in pairwise(ends)]
    received = [size * x.element_size()] * ranks
    even = len(set(sent)) == 1  # gloo is faster without lists of lengths
    lengths = ([], []) if even else (received, sent)
    group = group_named(group_name)
    register(out, dist.all_to_all_single(as_bytes(out), as_bytes(x), *lengths, group=group, async_op=True), group)
    return out


def _swap(x: Tensor, size: int, group_name: str, *, out: Tensor) -> Tensor:
    group = group_named(group_name)
    other = 1 - group.rank()
    sent = _parts(x.contiguous(), 2)[other]
    received = as_bytes(out)
    incoming, outgoing = [0, 0], [0, 0]  # nothing from and to oneself
    incoming[other], outgoing[other] = len(received), len(sent)
    register(out, dist.all_to_all_single(received, sent, incoming, outgoing, group=group, async_op=True), group)
    return out


def _gather_by_broadcast(x: Tensor, total: int, ranks: int, group_name: str, *, out: Tensor) -> Tensor:
    group = group_named(group_name)
    parts = _parts(out, ranks)
    _fill(parts[group.rank()], as_bytes(x.contiguous()))
    for rank, each in enumerate(parts):
        if each.numel():
            register(out, dist.broadcast(each, group_src=rank, group=group, async_op=True), group)
    return out


def _gather_by_sending(x: Tensor, total: int, ranks: int, group_name: str, *, out: Tensor) -> Tensor:
    group = group_named(group_name)
    rank, mine, parts = group.rank(), as_bytes(x.contiguous()), _parts(out, ranks)
    for step in range(1, ranks):  # in each step, every rank sends to another one
        source, target = (rank - step) % ranks, (rank + step) % ranks
        if parts[source].numel():
            start_message(out, dist.irecv, parts[source], group, group_src=source, tag=_TAG)
        if mine.numel():
            start_message(out, dist.isend, mine, group, group_dst=target, tag=_TAG)
    _fill(parts[rank], mine)
    return out


@cache
def tag_of(channel: str) -> int:
    """The tag by which gloo tells the messages of a channel from others: past those of collectives and of users."""
    return _CHANNEL_TAGS + zlib.crc32(channel.encode()) % _CHANNEL_TAGS


def _send(x: Tensor, peer: int, channel: str, group_name: str, *, out: Tensor) -> Tensor:
    if x.numel():
        operand, group = as_bytes(x.contiguous()), group_named(group_name)
        start_message(out, dist.isend, operand, group, group_dst=peer, tag=tag_of(channel))
    return out


def _recv(
    shape: list[int],
    dtype: torch.dtype,
    device: torch.device,
    peer: int,
    channel: str,
    group_name: str,
    *,
    out: Tensor,
) -> Tensor:
    if out.numel():
        start_message(out, dist.irecv, as_bytes(out), group_named(group_name), group_src=peer, tag=tag_of(channel))
    return out


def connect(ends: Iterable[tuple[str, int, int]], device: torch.device) -> None:
    """Let ranks exchange a byte: by group its name, and two of its ranks. All ranks of the groups give the same order.

    NCCL connects two ranks when the first message between them starts, and the host waits for the other one so long.
    Raises ``PeerLostError`` if the other one fails meanwhile.
    """
    for group_name, source, target in ends:
        group, byte = group_named(group_name), torch.zeros(1, dtype=torch.uint8, device=device)
        try:
            if group.rank() == source:
                dist.send(byte, group_dst=target, group=group, tag=_TAG)
            elif group.rank() == target:
                dist.recv(byte, group_src=source, group=group, tag=_TAG)
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error


def _all_reduce(x: Tensor, reduce_op: str, group_name: str, *, out: Tensor) -> Tensor:
    if x.data_ptr() != out.data_ptr():
        out.copy_(x)
    group = group_named(group_name)
    if is_gloo(group) and _is_by_parts(out, reduce_op):
        register(out, dist.all_reduce(_as_real(out), REDUCE_OPS[reduce_op], group, async_op=True), group)
    else:
        c10d.all_reduce_.default(out, reduce_op, group_name)
    return out


def _all_gather_into_tensor(x: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    group, part, whole = group_named(group_name), as_bytes(x.contiguous()), as_bytes(out)
    if is_gloo(group):
        register(out, group.allgather_into_tensor_coalesced([whole], [part]), group)
    else:
        c10d.all_gather_into_tensor_out.default(part, group_size, group_name, out=whole)
    return out


def _reduce_scatter_tensor(x: Tensor, reduce_op: str, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    group, whole, part = group_named(group_name), x.contiguous(), out
    if is_gloo(group) and _is_by_parts(out, reduce_op):
        options = dist.ReduceScatterOptions()
        options.reduceOp = REDUCE_OPS[reduce_op]
        register(out, group.reduce_scatter_tensor_coalesced([_as_real(part)], [_as_real(whole)], options), group)
    else:
        c10d.reduce_scatter_tensor_out.default(whole, reduce_op, group_size, group_name, out=part)
    return out


def _all_to_all_single(
    x: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group_name: str, *, out: Tensor
) -> Tensor:
    row = math.prod(x.shape[1:]) * x.element_size()
    lengths = ([row * n for n in output_split_sizes], [row * n for n in input_split_sizes])
    group = group_named(group_name)
    register(out, dist.all_to_all_single(as_bytes(out), as_bytes(x), *lengths, group=group, async_op=True), group)
    return out


def _is_by_parts(x: Tensor, reduce_op: str) -> bool:
    """Whether a reduction can take the real and imaginary parts by themselves; torch refuses the others."""
    return not x.is_complex() or reduce_op in ("sum", "avg")


def _as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _fill(part: Tensor, x: Tensor) -> None:
    """Copy ``x`` into ``part``, unless it is stored there."""
    if part.data_ptr() != x.data_ptr():
        part.copy_(x)


def _parts(x: Tensor, ranks: int) -> list[Tensor]:
    ends = [end * x.element_size() for end in bounds(x.numel(), ranks)]
    whole = as_bytes(x)
    return [whole[start:stop] for start, stop in pairwise(ends)]


def _make_rows(x: Tensor, ranks: int, size: int, group_name: str) -> Tensor:
    return x.new_empty([ranks, size])


def _make_row(x: Tensor, size: int, group_name: str) -> Tensor:
    return x.new_empty([size])


def _make_whole(x: Tensor, total: int, ranks: int, group_name: str) -> Tensor:
    return x.new_empty([total])


def _make_token(x: Tensor, peer: int, channel: str, group_name: str) -> Tensor:
    return x.new_empty([0])


def _make_received(
    shape: list[int], dtype: torch.dtype, device: torch.device, peer: int, channel: str, group_name: str
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


define("Tensor x, int ranks, int size, str group_name", _exchange, _make_rows)
define("Tensor x, int size, str group_name", _swap, _make_row)
define("Tensor x, int total, int ranks, str group_name", _gather_by_broadcast, _make_whole)
define("Tensor x, int total, int ranks, str group_name", _gather_by_sending, _make_whole)
define("Tensor x, int peer, str channel, str group_name", _send, _make_token)
define("int[] shape, ScalarType dtype, Device device, int peer, str channel, str group_name", _recv, _make_received)
define("Tensor x, str reduce_op, str group_name", _all_reduce, None)
define("Tensor x, int group_size, str group_name", _all_gather_into_tensor, None)
define("Tensor x, str reduce_op, int group_size, str group_name", _reduce_scatter_tensor, None)
define("Tensor x, int[] output_split_sizes, int[] input_split_sizes, str group_name", _all_to_all_single, None)

exchange, swap = ops.exchange, ops.swap
gather_by_broadcast, gather_by_sending = ops.gather_by_broadcast, ops.gather_by_sending
send, recv = ops.send, ops.recv

OUT_VARIANTS: dict[Any, Any] = {
    c10d.all_reduce.default: ops.all_reduce.out,  # in place where out is the operand
    c10d.all_gather_into_tensor.default: ops.all_gather_into_tensor.out,
    c10d.reduce_scatter_tensor.default: ops.reduce_scatter_tensor.out,
    c10d.all_to_all_single.default: ops.all_to_all_single.out,
    exchange.default: exchange.out,
    swap.default: swap.out,
    gather_by_broadcast.default: gather_by_broadcast.out,
    gather_by_sending.default: gather_by_sending.out,
    send.default: send.out,
    recv.default: recv.out,
}
"""For each functional collective, the op with the same arguments and ``out=``."""
