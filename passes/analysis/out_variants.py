"""Out variants of ops that really write their result into given memory.

torch generates an out variant for every op, but most of them compute into fresh memory and copy. Here count those
with a kernel of their own on the device; copies and fills, which are writes by nature; and collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload
from ..ir.collectives import OUT_VARIANTS
from ..ir.effects import is_pure
from ..ir.ops import Trait, has, out_overload
from ..ir.region import island_of
from ..ir.schemas import argument
from ..runtime import host_memory, shared_memory_collectives
from .strides import Layouts

aten = torch.ops.aten

_OURS: dict[Any, Any] = OUT_VARIANTS | {
    shared_memory_collectives.scratch.default: shared_memory_collectives.scratch.out,
    host_memory.to_device: host_memory.to_device_out,
}

_FOLLOWS_STRIDES = (
    *(Trait.POINTWISE_KERNEL, Trait.COPIES, Trait.ZEROS, Trait.ONES, Trait.FULL),
    Trait.WRITES_ANY_LAYOUT,
)

CONSTANT_BYTES = 4096  # the largest constant that is kept rather than made anew at each call


@dataclass(frozen=True)
class OutVariant:
    """A call that writes. ``outs``: the names of the arguments for its results; none where that is the first one."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: tuple[str, ...] = ()

    def call(self, memory: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call that writes into ``memory``, a tensor for each result."""
        if not self.outs:
            return (*memory, *self.args), dict(self.kwargs)
        return self.args, self.kwargs | dict(zip(self.outs, memory, strict=True))


def out_variant(node: fx.Node) -> OutVariant | None:
    """The call that writes the results of ``node`` into given memory; None if it has to allocate."""
    vals = results_of(node)
    if not vals or not isinstance(node.target, OpOverload) or not is_pure(node):
        return None
    if has(node.target, Trait.COPIES):
        return OutVariant(aten.copy_.default, (node.args[0],)) if _same_device(node) else None
    if (number := fill_value(node)) is not None:
        return OutVariant(aten.fill_.Scalar, (number,))
    if node.target in _OURS:
        return OutVariant(_OURS[node.target], node.args, dict(node.kwargs), ("out",))
    found = out_overload(node.target, vals[0].device)
    return OutVariant(found[0], node.args, dict(node.kwargs), found[1]) if found else None


def can_be_planned(node: fx.Node, layouts: Layouts) -> bool:
    """Whether ``node`` writes its results into memory that lies as their ``val`` says, on all ranks.

    The ``val`` of an op is torch's guess of what its kernel allocates, and may lie otherwise. Some kernels write into
    given memory by its strides, and some take it for contiguous. An island is compiled for the strides of ``val``.
    """
    if node.target is operator.getitem and island_of(node.args[0]) is not None:
        return True
    if out_variant(node) is None:
        return False
    if node.target in _OURS or has(node.target, *_FOLLOWS_STRIDES):
        return True
    return layouts.are_contiguous(node)


def fill_value(node: fx.Node) -> Any:
    """The number, or its node, that ``node`` fills a new tensor with; None if it does something else."""
    if has(node.target, Trait.FULL):
        return argument(node, "fill_value")
    return 0 if has(node.target, Trait.ZEROS) else 1 if has(node.target, Trait.ONES) else None


def is_constant(node: fx.Node) -> bool:
    """Whether ``node`` makes a small tensor from nothing, the same at every call."""
    vals = results_of(node)
    if len(vals) != 1 or node.all_input_nodes or node.op != "call_function" or not is_pure(node):
        return False
    return isinstance(node.target, OpOverload) and vals[0].numel() * vals[0].element_size() <= CONSTANT_BYTES


def results_of(node: fx.Node) -> list[torch.Tensor]:
    """The results of a node, if they are one tensor or several; else nothing."""
    val = node.meta.get("val")
    vals: list[Any] = list(val) if isinstance(val, (list, tuple)) else [val]
    return vals if all(isinstance(each, torch.Tensor) for each in vals) else []


def _same_device(node: fx.Node) -> bool:
    source = node.args[0]
    val = source.meta.get("val") if isinstance(source, fx.Node) else None
    return isinstance(val, torch.Tensor) and val.device == node.meta["val"].device
