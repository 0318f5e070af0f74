"""Layouts of values in memory, as far as all ranks know them: the only file in which a pass asks for strides.

Ranks must take the same decisions. Where they hold parts of other lengths, what one of them sees decides nothing: a
tensor with a single row, or none, is contiguous in any order of its dims, and the same tensor on the next rank is not.
The partitioner says of which values ranks hold unequal parts (``meta["uneven"]``: of what and how, or nothing where all
parts are equal); what follows from that is here.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import fx

from ..ir.ops import Trait, has
from ..ir.schemas import argument
from .aliases import is_view

aten = torch.ops.aten


def have_one_layout(first: Any, second: Any) -> bool:
    """Whether both are nodes of one shape, dtype and strides; on global values, which are the same on all ranks."""
    vals = [each.meta.get("val") if isinstance(each, fx.Node) else None for each in (first, second)]
    kinds = [(val.shape, val.dtype, val.stride()) for val in vals if isinstance(val, torch.Tensor)]
    return len(kinds) == 2 and kinds[0] == kinds[1]


class Layouts:
    """Strides of the values of a graph, as far as all ranks know them: where parts are equal, all of them.

    ``graph``: the one to look at; None to look at nodes as they come, in order, by ``see``.
    """

    def __init__(self, graph: fx.Graph | None = None) -> None:
        self._uneven: set[fx.Node] = set()
        self._unknown: set[fx.Node] = set()
        for node in graph.nodes if graph is not None else ():
            self.see(node)

    def see(self, node: fx.Node) -> None:
        """Take in a node whose operands are known; call it again when the node's ``meta`` has changed."""
        if not (node.meta.get("uneven") or self._uneven or self._unknown):
            return  # all parts are equal so far
        operands = node.all_input_nodes
        uneven = bool(node.meta.get("uneven", not self._uneven.isdisjoint(operands)))
        differs = uneven or any(each in self._uneven or each in self._unknown for each in operands)
        _put(self._uneven, node, uneven)
        _put(self._unknown, node, differs and not self._is_surely_contiguous(node))

    def is_known(self, node: fx.Node) -> bool:
        """Whether strides say the same on all ranks."""
        return node not in self._unknown

    def is_even(self, node: fx.Node) -> bool:
        """Whether shapes, hence sizes, are the same on all ranks."""
        return node not in self._uneven

    def is_contiguous(self, value: Any) -> bool:
        """Whether ``value`` is a node that is contiguous on all ranks: any view of it is possible."""
        val = value.meta.get("val") if isinstance(value, fx.Node) else None
        return isinstance(val, torch.Tensor) and self.is_known(value) and val.is_contiguous()

    def has_default_strides(self, node: fx.Node) -> bool:
        """Whether ``node`` is contiguous, also in the strides of dims of size 1, as a new tensor of its shape is.

        By them torch tells a 1 x 1 weight of a convolution that has its channels last, and lays the result likewise.
        """
        if not self.is_contiguous(node):
            return False
        val: torch.Tensor = node.meta["val"]
        return val.stride() == tuple(prod(val.shape[dim + 1 :]) for dim in range(val.ndim)) or not val.numel()

    def are_contiguous(self, node: fx.Node) -> bool:
        """Whether all tensors that ``node`` gives are contiguous on all ranks."""
        val = node.meta["val"]
        vals = val if isinstance(val, (list, tuple)) else [val]
        return self.is_known(node) and all(each.is_contiguous() for each in vals)

    def is_viewable(self, node: fx.Node, shape: torch.Size) -> bool:
        """Whether on all ranks ``node`` can be seen in this local shape without a copy."""
        val: torch.Tensor = node.meta["val"]
        if not self.is_known(node):
            return False
        if val.is_contiguous() and val.numel() == prod(shape):
            return min(shape, default=0) >= 0
        try:
            torch.empty_strided(val.shape, val.stride(), device="meta").view(shape)
        except RuntimeError:
            return False
        return True

    def have_same_layout(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether on all ranks two tensors have the same shape, dtype, device and layout."""
        a, b = one.meta.get("val"), other.meta.get("val")
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return False
        if not self.is_known(one) or not self.is_known(other):
            return False
        # The stride of a dim of length one says nothing.
        same = a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous())
        return same and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)

    def _is_surely_contiguous(self, node: fx.Node) -> bool:
        """Whether op and operands make this contiguous for parts of any length."""
        op: Any = node.target
        if node.op in ("placeholder", "output") or has(op, Trait.MAKES_CONTIGUOUS) or _has_one_dim(node):
            return True
        if has(op, Trait.PERMUTES):
            return self._is_contiguous_again(node)
        if op is aten.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format:
            return True
        tensors = [each for each in node.all_input_nodes if "val" in each.meta]
        return _keeps(node) and all(self._is_plain(each) for each in tensors)

    def _is_contiguous_again(self, node: fx.Node) -> bool:
        """Whether dims of something contiguous are permuted until they are in their old order."""
        turns: list[fx.Node] = []
        at = node
        while has(at.target, Trait.PERMUTES) and isinstance(at.args[0], fx.Node):
            turns, at = [at, *turns], at.args[0]
        seen = torch.empty(list(range(2, at.meta["val"].ndim + 2)), device="meta")  # all dims differ
        for turn in turns:
            turned: Any = turn.target
            seen = turned(seen, *turn.args[1:])
        return self.is_contiguous(at) and seen.is_contiguous()

    def _is_plain(self, node: fx.Node) -> bool:
        """Contiguous, or a number, or several results that are contiguous."""
        return self.is_contiguous(node) if isinstance(node.meta["val"], torch.Tensor) else self.is_known(node)


def is_dense(val: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each at an address of its own."""
    filled = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(val.shape, val.stride(), strict=True) if size > 1
    ):
        if stride != filled:
            return False
        filled *= size
    return True


def overlaps(val: torch.Tensor) -> bool:
    """Whether some elements share memory. The strides of an expanded tensor do not distinguish its dims."""
    return any(stride == 0 and size > 1 for size, stride in zip(val.shape, val.stride(), strict=True))


def _keeps(node: fx.Node) -> bool:
    if has(node.target, Trait.CUTS):
        return _takes_rows(node)
    return has(node.target, Trait.POINTWISE_KERNEL, Trait.KEEPS_CONTIGUOUS) or not node.all_input_nodes


def _takes_rows(node: fx.Node) -> bool:
    """Whether what is cut out of a tensor are rows that lie together."""
    return argument(node, "dim") in (0, None) and argument(node, "step") is None


def _has_one_dim(node: fx.Node) -> bool:
    """Whether a result of at most one dim has memory of its own: then it fills it in order."""
    val, owner = node.meta.get("val"), node.args[0] if node.target is operator.getitem else node
    if not isinstance(val, torch.Tensor) or val.ndim > 1 or not isinstance(owner, fx.Node) or is_view(owner):
        return False
    return not has(owner.target, Trait.COMPOSITE)  # a reshape may be a view


def _put(nodes: set[fx.Node], node: fx.Node, inside: bool) -> None:
    (nodes.add if inside else nodes.discard)(node)
