"""Sizes, shapes and layouts of values as all ranks know them: the only file in which stages ask for them.

Ranks of one stage run one program. Where they hold parts of other lengths, such as shards of a bias of three elements
on two ranks, what one of them sees decides nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import Any

import torch
from torch import fx

from passes import Program
from passes.analysis.strides import Layouts

from ..placements import all_shapes


class Agreed:
    """Facts on the nodes of ``program`` that are the same on all of its ranks."""

    def __init__(self, program: Program) -> None:
        self._layouts = Layouts(program.graph)
        # Of values with unequal parts: elements of the first rank's, as far as inputs say, and what tells their shape.
        self._elements, self._shapes = dict[fx.Node, int](), dict[fx.Node, Hashable]()
        inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        for node in program.graph.nodes:
            if not self._layouts.is_even(node):
                operands = node.all_input_nodes
                self._elements[node] = max(map(self.elements, operands), default=0)  # parts are padded to be cut
                if node in inputs:
                    declared = inputs[node]
                    self._elements[node] = prod(all_shapes(declared.shape, declared.placement, program.mesh.axes)[0])
                whole = node.meta.get("uneven")  # of which global shape it is which part
                self._shapes[node] = whole or next(self._shapes[each] for each in operands if each in self._shapes)

    def elements(self, node: fx.Node) -> int:
        """The number of elements; where parts are unequal, of the first rank's, or of what it is computed from."""
        val = node.meta.get("val")
        return self._elements.get(node, val.numel() if isinstance(val, torch.Tensor) else 0)

    def bytes(self, node: fx.Node) -> int:
        """The bytes of as many elements."""
        val = node.meta.get("val")
        return self.elements(node) * val.element_size() if isinstance(val, torch.Tensor) else 0

    def shape(self, node: Any) -> Hashable:
        """Equal for values of one shape on all ranks; None for what is no tensor."""
        val = node.meta.get("val") if isinstance(node, fx.Node) else None
        return self._shapes.get(node, tuple(val.shape)) if isinstance(val, torch.Tensor) else None

    def is_contiguous(self, node: fx.Node) -> bool:
        """Whether a value is contiguous on all ranks."""
        return self._layouts.is_contiguous(node)

    def dense(self, node: fx.Node) -> tuple[torch.Tensor, list[int] | None]:
        """A value as it is sent, and the order of dims that makes it contiguous, if it is another than its own."""
        val: torch.Tensor = node.meta["val"]
        if self.is_contiguous(node):
            return val, None
        order = sorted(range(val.ndim), key=val.stride, reverse=True)
        permuted = val.permute(order)
        is_dense = self._layouts.is_known(node) and permuted.is_contiguous()
        return (permuted, order) if is_dense else (val.contiguous(), None)
