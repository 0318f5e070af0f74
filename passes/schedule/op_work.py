"""The work of an op: bytes that it reads and writes, FLOPs of its matrix products, functions like ``exp``.

FLOPs are counted by torch's formulas (``torch.utils.flop_counter``), the rest by shapes and ``ops.py``. Values count as
this rank has them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .._torch import OpOverload
from ..analysis.foreach_ops import is_over_lists, only_read
from ..ir.effects import mutates, written
from ..ir.ops import Trait, find, has
from ..ir.region import Region, region_of
from ..ir.schemas import nodes_in, schema
from ..memory.pieces import tensors

aten = torch.ops.aten


class OpClass(StrEnum):
    """The quantity that the time of an op depends on most."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    TRANSCENDENTAL = "transcendental"
    MEMORY = "memory"


@dataclass(frozen=True)
class Work:
    """The work of one call.

    ``bytes``: read and written; ``fresh``: of those, what is written and was not read before. ``flops``: of matrix
    products, in which operands of ``dtype`` are multiplied; ``product``: of one of them, if an op does many.
    ``transcendental``: elements that a function such as ``exp`` is computed of, half of those that are read and
    written: more operands, as in a backward op, mean more work. ``tensors``: how many an op over lists goes through.
    """

    kind: OpClass
    bytes: int
    fresh: int = 0
    dtype: torch.dtype = torch.float32
    flops: int = 0
    product: int = 0
    transcendental: int = 0
    tensors: int = 1


_FILLS = (aten.copy_.default, aten.fill_.Scalar)  # they write to their first operand, and do not read it
# By position of the first of query, key and value: attention, which has no formula for some devices and layouts.
_ATTENTION: dict[Any, int] = {
    op: int("backward" in name)
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for name in (f"_scaled_dot_product_{kind}", f"_scaled_dot_product_{kind}_backward")
    if (op := find(name)) is not None
}

_TORCH = ("aten", "prims", "rngprims", "c10d", "_c10d", "spmd")  # and what begins so: namespaces of torch and of ours
_OF_MATRICES = ("linalg_", "cholesky", "triangular_solve", "geqrf", "ormqr", "householder")


def work_of(node: fx.Node) -> Work:
    """The work of a node that computes something."""
    op = node.meta.get("computes", node.target)
    if (region := region_of(node)) is not None:
        return _of_region(node, region)
    read, results = list(_read(node)), list(_results(node))
    made = sum(val.nbytes for val in results)
    size = (made + _bytes_read(op, read, made), 0 if _is_in_place(node) else made)
    dtype = next((val.dtype for val in read if val.dtype.is_floating_point), torch.float32)
    if op in _ATTENTION:
        return Work(OpClass.ATTENTION, *size, dtype, *_attention(read[_ATTENTION[op] :], bool(_ATTENTION[op])))
    if flops := _flops(op, node):
        return Work(OpClass.MATMUL, *size, dtype, flops, flops // _products(read))
    lists = [len(each) for each in node.args if isinstance(each, (list, tuple))] if is_over_lists(op) else []
    entries = max(lists, default=1)
    if has(op, Trait.TRANSCENDENTAL):
        elements = sum(val.numel() for val in (*read, *results)) // 2
        return Work(OpClass.TRANSCENDENTAL, *size, dtype, transcendental=elements, tensors=entries)
    return Work(OpClass.MEMORY, *size, dtype, tensors=entries)


def is_counted(node: fx.Node) -> bool:
    """Whether the work of an op is known: by a formula for its FLOPs, or as it does little for each byte.

    Not of ops of other libraries, nor of decompositions and solvers of matrices.
    """
    op = node.target
    if not isinstance(op, OpOverload) or op in _ATTENTION or op.overloadpacket in flop_registry:
        return True
    return op.namespace.startswith(_TORCH) and not any(each in str(op.overloadpacket) for each in _OF_MATRICES)


def _of_region(node: fx.Node, region: Region) -> Work:
    """All that is computed inside, which is as if by its largest op; of bytes, those of operands and results."""
    made = sum(val.nbytes for val in _results(node))
    inside = [work_of(each) for each in region.nodes if each.target is not operator.getitem]
    largest = max(inside, key=lambda work: (work.flops, work.transcendental, work.bytes))
    return replace(
        largest,
        bytes=made + sum(val.nbytes for val in _read(node)),
        fresh=made,
        flops=sum(work.flops for work in inside),
        transcendental=sum(work.transcendental for work in inside),
        tensors=1,
    )


def _attention(operands: list[torch.Tensor], is_backward: bool) -> tuple[int, int, int]:
    """FLOPs of query (..., queries, width), key and value (..., keys, width), those of a head's product, and scores.

    Forward multiplies twice. Backward computes the scores again, and a gradient of each operand of each product.
    """
    query, key, value = operands[:3]
    scores = query.shape[-2] * key.shape[-2]
    width = 3 * query.shape[-1] + 2 * value.shape[-1] if is_backward else query.shape[-1] + value.shape[-1]
    heads = prod(query.shape[:-2])
    return 2 * heads * scores * width, 2 * scores * query.shape[-1], heads * scores


def _bytes_read(op: Any, read: list[torch.Tensor], made: int) -> int:
    """Bytes read; an op that looks rows up reads no more of a table than it has results."""
    sizes = [val.nbytes for val in read]
    if has(op, Trait.LOOKS_UP) and sizes:
        sizes[0] = min(sizes[0], made)
    return sum(sizes)


def _is_in_place(node: fx.Node) -> bool:
    """Whether results are written over what was read."""
    return mutates(node) and not _out_names(node.target) and node.target not in _FILLS


def _read(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that a node reads; what it only writes into is among the results."""
    outs = {name for name in node.kwargs if name in _out_names(node.target)}
    found = nodes_in((node.args, {k: v for k, v in node.kwargs.items() if k not in outs}))
    only_written = written(node) if region_of(node) is not None else node.args[:1] if node.target in _FILLS else ()
    yield from (val for each in found if each not in only_written for val in tensors(each.meta.get("val")))


def _out_names(op: Any) -> set[str]:
    return {each.name for each in schema(op).arguments if each.is_out} if isinstance(op, OpOverload) else set()


def _results(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that a node writes: its results, or in place."""
    if node.meta.get("val") is not None:
        yield from tensors(node.meta["val"])
        return
    unchanged = {each for k in only_read(node) for each in nodes_in(node.args[k])}
    yield from (val for each in written(node) if each not in unchanged for val in tensors(each.meta.get("val")))


def _flops(op: Any, node: fx.Node) -> int:
    """FLOPs by torch's formula; 0 if it has none."""
    packet: Any = op.overloadpacket if isinstance(op, OpOverload) else None
    formula = flop_registry.get(packet)
    if formula is None or "attention" in packet.__name__ or any("val" not in each.meta for each in nodes_in(node.args)):
        return 0
    outs = _out_names(node.target)
    options = {name: value for name, value in node.kwargs.items() if name not in outs}
    args, kwargs = fx.map_arg((node.args, options), lambda each: each.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


def _products(read: list[torch.Tensor]) -> int:
    """The number of matrix products in one op: a batch of them, if both operands have three dims."""
    batched = [val for val in read if val.dim() == 3]
    return max(1, batched[0].shape[0]) if len(batched) >= 2 else 1
