"""Assign buffers to values: which results lie in planned memory, and which in each other's. Analysis of ReuseMemory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import c10d
from ..analysis.aliases import escaping, last_reads, storages
from ..analysis.out_variants import can_be_planned, is_constant, results_of
from ..analysis.strides import Layouts, is_dense
from ..communication.published import read_by_all, read_by_peers, reduces_in_place
from ..ir.collectives import is_shared, operands
from ..ir.ops import Trait, has
from ..ir.region import island_of
from ..ir.schemas import argument
from ..runtime.arena import ALIGNMENT, extent

aten = torch.ops.aten


@dataclass(eq=False)
class Buffer:
    """The memory of one result: a block of its own, or a part of ``parent`` that starts ``offset`` bytes into it.

    A block is needed from position ``first`` to position ``last``, by all buffers in it.
    """

    val: torch.Tensor
    first: int
    last: int
    parent: Buffer | None = None
    offset: int = 0
    fixed: bool = False  # it cannot move into another one: it is part of a concatenation, or has parts
    shared: bool = False  # of a block: other ranks read it, until ``last``

    @property
    def size(self) -> int:
        """Bytes."""
        return extent(self.val.shape, self.val.stride()) * self.val.element_size()

    def block(self) -> tuple[Buffer, int]:
        """The block that holds this buffer, and the offset of this buffer in it."""
        at, offset = self, 0
        while at.parent is not None:
            at, offset = at.parent, offset + at.offset
        return at, offset

    def move_into(self, parent: Buffer, offset: int) -> None:
        """Lie in the memory of ``parent`` from now on; its block lives as long as both."""
        self.parent, self.offset = parent, offset
        block, _ = parent.block()
        block.first, block.last = min(block.first, self.first), max(block.last, self.last)


class Buffers:
    """The buffers of a graph by the node that writes them: one for each of its results."""

    def __init__(
        self, graph: fx.Graph, only_aligned: bool = False, living_on: Collection[fx.Node] | None = None
    ) -> None:
        """``only_aligned``: no value begins elsewhere than at multiples of ``ALIGNMENT``.

        ``living_on``: the outputs that live on after the call, by default all.
        """
        self.layouts = Layouts(graph)
        self.found = storages(graph)
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self.of: dict[fx.Node, list[Buffer]] = {}
        # For each member of a concatenation, the buffer in which it is computed there; None if it has to be copied.
        self.members: dict[fx.Node, list[Buffer | None]] = {}
        self._only_aligned = only_aligned
        self._shared = [node for node in graph.nodes if is_shared(node)]
        escapes, last = escaping(graph, self.found, living_on), last_reads(graph, self.found)
        for node in graph.nodes:
            if node not in escapes:
                self._assign(node, last.get(node, 0))
        for node in graph.nodes:
            self._embed_members(node)
        for node in self._shared:
            self._share_operands(node)
        for node in graph.nodes:
            self._reuse_operand(node)

    def all(self) -> list[Buffer]:
        """In the order of the graph."""
        return [buffer for each in self.of.values() for buffer in each]

    def _assign(self, node: fx.Node, last: int) -> None:
        if self.found[node] != {node} or (is_constant(node) and self.layouts.is_even(node)):
            return
        vals = results_of(node)
        if can_be_planned(node, self.layouts) and all(map(_is_plain, vals)):
            first = self._first_write(node)
            self.of[node] = [Buffer(val, first, max(first, last)) for val in vals]

    def _first_write(self, node: fx.Node) -> int:
        """The position at which the first result is written: at the wait, if the ranks share memory."""
        if island_of(node.args[0] if node.args else None) is not None:
            return self.position[node.all_input_nodes[0]]
        return min(self.position[user] for user in node.users) if is_shared(node) else self.position[node]

    def _embed_members(self, node: fx.Node) -> None:
        """Let the members of a concatenation be computed in their parts of it, so that nothing is left to copy."""
        if node not in self.of or not _concatenates(node) or not self.layouts.is_contiguous(node):
            return
        (whole,), offset = self.of[node], 0
        embedded: list[Buffer | None] = []
        members: Any = node.args[0]
        for member in members:
            is_aligned = offset % ALIGNMENT == 0 or not self._only_aligned
            part = self._embeddable(member, whole) if is_aligned else None
            if part is not None:
                part.move_into(whole, offset)
                part.fixed = whole.fixed = True
            embedded.append(part)
            offset += member.meta["val"].numel() * whole.val.element_size()
        if any(embedded):
            self.members[node] = embedded

    def _embeddable(self, member: fx.Node, whole: Buffer) -> Buffer | None:
        """The buffer of ``member``, if it is a block that can become a part of ``whole``."""
        if not self.layouts.is_contiguous(member) or member.meta["val"].dtype is not whole.val.dtype:
            return None
        part = self._shown(member)
        return None if part is None or part is whole or part.parent is not None else part

    def _share_operands(self, start: fx.Node) -> None:
        """Let operand and scratch of a collective lie in memory that other ranks can read until all have read it."""
        read = read_by_all(start, self._shared, self.position)
        for operand in read_by_peers(start):
            for block in self._blocks(operand):
                block.shared = block.fixed = True
                block.last = max(block.last, read)
        buffer = self._shown(operands(start)[0])
        if reduces_in_place(start) and start in self.of and buffer is not None:
            self.of[start][0].move_into(buffer, 0)

    def _reuse_operand(self, node: fx.Node) -> None:
        """Let an elementwise ``node`` write over an operand that has no later readers."""
        if node not in self.of or self.of[node][0].fixed or not _is_elementwise(node):
            return
        for operand in node.all_input_nodes:
            buffer = self._shown(operand)
            if buffer is not None and self._may_overwrite(node, buffer):
                self.of[node][0].move_into(buffer, 0)
                return

    def _may_overwrite(self, node: fx.Node, buffer: Buffer) -> bool:
        """Whether the block of ``buffer`` dies at ``node``, which reads it in the layout of its own result only."""
        block, _ = buffer.block()
        if block.shared or block.last > self.position[node]:
            return False
        readers = [operand for operand in node.all_input_nodes if block in self._blocks(operand)]
        return all(self.layouts.have_same_layout(operand, node) for operand in readers)

    def _shown(self, node: fx.Node) -> Buffer | None:
        """The buffer whose memory ``node`` is a view of, all of it."""
        if len(self.found[node]) != 1:
            return None
        (storage,) = self.found[node]
        if self.layouts.is_even(node) != self.layouts.is_even(storage):
            return None  # a part, which is all there is on this rank alone
        buffers = self.of.get(storage, [])
        val = node.meta["val"]
        same = len(buffers) == 1 and (buffers[0].val.numel(), buffers[0].val.dtype) == (val.numel(), val.dtype)
        return buffers[0] if same and self.layouts.is_known(node) and is_dense(val) else None

    def _blocks(self, node: fx.Node) -> list[Buffer]:
        """The blocks that ``node`` may lie in."""
        return [buffer.block()[0] for storage in self.found[node] for buffer in self.of.get(storage, [])]


def _concatenates(node: fx.Node) -> bool:
    """Whether ``node`` puts whole tensors one after the other."""
    if not has(node.target, Trait.JOINS):
        return False
    members = node.args[0]
    listed = isinstance(members, (list, tuple)) and all(isinstance(each, fx.Node) for each in members)
    return listed and argument(node, "dim") in (0, None)


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result depends only on the operands' elements at its index, and may overwrite one."""
    return node.target is c10d.all_reduce.default or has(node.target, Trait.POINTWISE_KERNEL)


def _is_plain(val: torch.Tensor) -> bool:
    """Whether shape and strides are all there is to know of a tensor. What an op writes as it likes has no gaps."""
    if val.layout is not torch.strided or bool(val.is_conj()) or bool(val.is_neg()):
        return False
    return all(isinstance(each, int) for each in (*val.shape, *val.stride()))
