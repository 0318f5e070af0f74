"""Definition of collectives as torch ops: each has a functional variant and an out variant, and fake results.

The ops of ``message_collectives.py``, ``shared_memory_collectives.py`` and ``coalesced_collectives.py`` are in one
namespace, ``torch.ops.spmd_transport``. As torch's functional collectives, each starts communication and returns a
tensor that ``_c10d_functional.wait_tensor`` waits for; until then nothing may touch the operand or the result.

Waits are kept by *storage*: to wait for one of two results in one storage is to wait for both, so each ``out`` should
have a storage of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAMESPACE = "spmd_transport"
_library = torch.library.Library(NAMESPACE, "DEF")
ops = getattr(torch.ops, NAMESPACE)

REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
}
"""Process groups' own names for reductions."""


def define(arguments: str, write: Callable[..., Tensor], make_result: Callable[..., Tensor] | None) -> None:
    """Define an op named as ``write``, which writes into its argument ``out``.

    ``make_result`` allocates the result of the functional variant; None: there is an out variant only.
    """
    name = write.__name__.removeprefix("_")
    _library.define(f"{name}.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)")
    _library.impl(f"{name}.out", write, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}.out", lambda *_, out: out, lib=_library)
    if make_result is None:
        return
    _library.define(f"{name}({arguments}) -> Tensor")
    _library.impl(name, lambda *args: write(*args, out=make_result(*args)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", make_result, lib=_library)


def define_scatter(write: Callable[..., Tensor]) -> None:
    """Define an op ``(x, reduce_op, lengths, ranks, group)`` that reduces and scatters the members of a bucket.

    x (ranks * sum of lengths,) has the members one after the other, of each the part of rank 0, then that of rank 1,
    ...; the result has this rank's parts, (sum of lengths,). ``lengths`` counts the elements of a part of each member.
    """

    def make_parts(x: Tensor, reduce_op: str, lengths: Sequence[int], ranks: int, group_name: str) -> Tensor:
        return x.new_empty([sum(lengths)])

    define("Tensor x, str reduce_op, int[] lengths, int ranks, str group_name", write, make_parts)


def define_gather(write: Callable[..., Tensor]) -> None:
    """Define an op ``(x, lengths, ranks, group)``, the inverse: it gathers the members from the parts of all ranks."""

    def make_members(x: Tensor, lengths: Sequence[int], ranks: int, group_name: str) -> Tensor:
        return x.new_empty([ranks * sum(lengths)])

    define("Tensor x, int[] lengths, int ranks, str group_name", write, make_members)


def bounds(total: int, ranks: int) -> list[int]:
    """The indices at which the parts of ``total`` elements begin, and the end: lengths differ by one at most."""
    return [rank * total // ranks for rank in range(ranks + 1)]


def part(total: int, ranks: int, rank: int) -> int:
    """The number of elements in one rank's part."""
    ends = bounds(total, ranks)
    return ends[rank + 1] - ends[rank]


def as_bytes(x: Tensor) -> Tensor:
    """A view of the same memory as a flat tensor of bytes: no backend supports every dtype."""
    return x.view(-1).view(torch.uint8)
