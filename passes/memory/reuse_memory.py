"""Compute in memory that was planned ahead, so that a step allocates next to nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..analysis.out_variants import out_variant
from ..analysis.strides import Layouts
from ..base import Pass
from ..ir.edit import insert_before
from ..ir.program import Program
from ..runtime.arena import place, reserve, whole
from .buffers import Lodger, Lodgers
from .canonicalize import Canonicalize, drop_contiguous
from .fold_layout_copies import FoldLayoutCopies
from .offsets import Block, live_bytes, pack, total
from .share_state import ShareState
from .update_in_place import UpdateInPlace

aten = torch.ops.aten


@dataclass(frozen=True)
class ReuseMemory(Pass):
    """Each value that dies within the call, and whose op can write where it is told, gets a place in one arena.

    Places are planned ahead by lifetimes (``offsets.py``). A pointwise op writes over an operand that dies there. What
    is concatenated is written into its part of the whole at once. What other ranks of the host look at (``Realise``)
    lies in an arena of its own, where no two values share a place. Ops without an out variant of their own go on
    allocating, and so do results, new state, and whatever may share memory with them. ``meta["computes"]`` says which
    op a node was. Nothing may reorder the graph afterwards.
    """

    last: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True
    after: ClassVar[tuple[type[Pass], ...]] = (UpdateInPlace, Canonicalize, FoldLayoutCopies, ShareState)

    def rewrite(self, program: Program) -> int:
        """Plan for each device, then write."""
        _drop_contiguous(program.graph)
        lodgers = Lodgers(program.graph)
        writer = _Writer(program.graph, _arenas(program, lodgers.all()))
        for node, results in lodgers.of.items():
            node.meta["computes"] = node.target
            if node in lodgers.wholes:
                writer.join(node, results[0], lodgers.wholes[node])
            else:
                writer.write(node, results)
        return len(lodgers.all())


def _drop_contiguous(graph: fx.Graph) -> None:
    """Drop copies that planned layouts make needless."""
    layouts = Layouts(graph)
    for node in graph.find_nodes(op="call_function", target=aten.contiguous.default):
        drop_contiguous(node, layouts)


_Kind = tuple[torch.device, bool]  # where an arena is, and whether other ranks look at it
_Arenas = dict[_Kind, tuple[fx.Node, dict[int, int]]]  # each arena, and the offsets of blocks in it


def _arenas(program: Program, lodgers: Sequence[Lodger]) -> _Arenas:
    """Plan and reserve."""
    owners: dict[_Kind, list[Lodger]] = defaultdict(list)
    for each in lodgers:
        if each.host is None:
            owners[_kind(each)].append(each)
    return {kind: _arena(program, kind, blocks) for kind, blocks in owners.items()}


def _kind(block: Lodger) -> _Kind:
    return block.val.device, block.shared


def _arena(program: Program, kind: _Kind, owners: Sequence[Lodger]) -> tuple[fx.Node, dict[int, int]]:
    device, shared = kind
    # Nobody tells when the other ranks have read what they look at, so there each block lives as long as the call.
    end = len(program.graph.nodes)
    blocks = [Block(each.size, 0, end) if shared else Block(each.size, each.first, each.last) for each in owners]
    offsets, placeholders = pack(blocks), program.placeholders
    size = total(blocks, offsets)
    args = (size, device, True) if shared else (size, device)
    with program.graph.inserting_after(placeholders[-1]) if placeholders else program.graph.inserting_before():
        node = program.graph.create_node("call_function", reserve, args, name="shared" if shared else "arena")
    node.meta["live_bytes"] = live_bytes(blocks)
    node.meta["val"] = owners[0].val.new_empty(size, dtype=torch.uint8)
    return node, {id(each): offset for each, offset in zip(owners, offsets, strict=True)}


@dataclass
class _Writer:
    """Puts places into the graph, and lets nodes write there."""

    graph: fx.Graph
    arenas: _Arenas

    def place(self, before: fx.Node, lodger: Lodger, val: torch.Tensor, offset: int = 0) -> fx.Node:
        """A place that looks like ``val``, ``offset`` bytes into a lodger's."""
        block, within = lodger.block()
        arena, offsets = self.arenas[_kind(block)]
        at = offsets[id(block)] + within + offset
        return self._add(before, place, (arena, at, list(val.shape), list(val.stride()), val.dtype), val)

    def write(self, node: fx.Node, results: Sequence[Lodger]) -> None:
        """Let a node write into its places."""
        variant = out_variant(node)
        assert variant is not None, f"{node} was given a place because it can write there"
        node.args, node.kwargs = variant.call([self.place(node, each, each.val) for each in results])
        node.target = variant.op

    def join(self, node: fx.Node, result: Lodger, joined: Sequence[Lodger | None]) -> None:
        """Copy what does not lie in the whole yet."""
        offset, members = 0, node.args[0]
        assert isinstance(members, (list, tuple))
        parts: list[fx.Node] = []
        for member, part in zip(members, joined, strict=True):
            val: torch.Tensor = member.meta["val"]
            if part is None:
                like = val.new_empty(val.shape, dtype=result.val.dtype)
                member = self._add(node, aten.copy_.default, (self.place(node, result, like, offset), member), like)
            parts.append(member)
            offset += val.numel() * result.val.element_size()
        node.target, node.args, node.kwargs = whole, (self.place(node, result, result.val), parts), {}

    def _add(self, before: fx.Node, function: Any, args: tuple[Any, ...], val: torch.Tensor) -> fx.Node:
        return insert_before(before, function, *args, like=before, val=val)
