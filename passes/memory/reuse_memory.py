"""Write values into an arena that is planned ahead, so that a step allocates next to nothing."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..analysis.agreed_sizes import most_bytes
from ..analysis.aliases import storages
from ..analysis.out_variants import CONSTANT_BYTES, out_variant
from ..analysis.strides import Layouts
from ..base import Numerics, Pass
from ..ir.collectives import is_shared
from ..ir.edit import insert_before
from ..ir.program import Program
from ..ir.region import Island, islands
from ..runtime.arena import reserve, view_at, whole
from .buffers import Buffer, Buffers
from .canonicalize import Canonicalize, drop_contiguous
from .fold_layout_copies import FoldLayoutCopies
from .offsets import Block, Packed, live_bytes, pack
from .update_in_place import UpdateInPlace

aten = torch.ops.aten


@dataclass(frozen=True)
class ReuseMemory(Pass):
    """Each value that dies within the call, and whose op has an out variant, is written into one arena.

    Offsets are planned by lifetimes (``offsets.py``). A pointwise op writes over an operand that dies there. Members of
    a concatenation are computed in their parts of it. What other ranks of the host read (``Realise``) lies in an arena
    that they can map, and lives until all are known to have read it; before and after, other values lie there. Ops
    without an out variant of their own go on allocating, and so do results, new state that the caller does not copy
    (``Output.replaces``), and whatever may share memory with them. ``meta["computes"]`` is the op that a node was.
    Nothing may reorder the graph afterwards.

    Kernels of matrices may add in another order where a result begins between two multiples of ``ALIGNMENT``, as
    members of a concatenation do unless ``program.same_bits``.
    """

    numerics: ClassVar[Numerics] = "exact if aligned"
    last: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True
    after: ClassVar[tuple[type[Pass], ...]] = (UpdateInPlace, Canonicalize, FoldLayoutCopies)

    def rewrite(self, program: Program) -> int:
        """Plan an arena for each device, then let nodes write into it."""
        _drop_contiguous(program.graph)
        _copy_results(program)
        buffers = Buffers(program.graph, program.same_bits, program.living_on())
        emitter = _Emitter(_places(program, buffers.all()))
        for node, island in islands(program.graph).items():
            emitter.write_island(node, island, buffers)
        for node, results in buffers.of.items():
            if node.target is operator.getitem:
                continue  # a result of an island
            node.meta["computes"] = node.target
            if node in buffers.members:
                emitter.concatenate(node, results[0], buffers.members[node])
            else:
                emitter.write(node, results)
        return len(buffers.all())


def _drop_contiguous(graph: fx.Graph) -> None:
    """Drop copies that planned layouts make needless."""
    layouts = Layouts(graph)
    for node in graph.find_nodes(op="call_function", target=aten.contiguous.default):
        drop_contiguous(node, layouts)


def _copy_results(program: Program) -> None:
    """Return copies of what small collectives through shared memory give, such as a loss.

    So these write into planned memory, and what has only fixed tensors is prepared once for all calls.
    """
    graph, living_on = program.graph, program.living_on()
    found, output = storages(graph), graph.output_node()
    small = {node for node in graph.nodes if is_shared(node) and most_bytes(node) <= CONSTANT_BYTES}
    for value in output.all_input_nodes:
        if value in living_on and found[value] & small:
            copy = insert_before(output, aten.clone.default, value, like=value)
            output.replace_input_with(value, copy)


_Places = dict[int, tuple[fx.Node, int]]  # by the id of a block: its arena, and its offset there


def _places(program: Program, buffers: Sequence[Buffer]) -> _Places:
    """Plan and reserve the arenas of each device."""
    blocks: dict[torch.device, list[Buffer]] = defaultdict(list)
    for buffer in buffers:
        if buffer.parent is None:
            blocks[buffer.val.device].append(buffer)
    places: _Places = {}
    for each in blocks.values():
        places |= _places_on(program, each)
    return places


def _places_on(program: Program, buffers: Sequence[Buffer]) -> _Places:
    """Places of what other ranks read, in one arena; then of all else, in gaps of that one and in one of its own."""
    published = [each for each in buffers if each.shared]
    others = [each for each in buffers if not each.shared]
    blocks = _blocks(published)
    readable = Packed(blocks, pack(blocks))
    offsets = [*readable.offsets, *pack(_blocks(others), readable)]
    places: _Places = {}
    for shared, start in ((True, 0), (False, readable.size)):
        held = [
            (each, offset - start)
            for each, offset in zip([*published, *others], offsets, strict=True)
            if (each.shared or offset < readable.size) == shared
        ]
        if held:
            arena = _reserve(program, held, shared)
            places |= {id(each): (arena, offset) for each, offset in held}
    return places


def _reserve(program: Program, held: Sequence[tuple[Buffer, int]], shared: bool) -> fx.Node:
    """Insert an arena that holds the blocks at their offsets."""
    planned = Packed(_blocks([each for each, _ in held]), [offset for _, offset in held])
    like = held[0][0].val
    args = (planned.size, like.device, True) if shared else (planned.size, like.device)
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    val = like.new_empty(planned.size, dtype=torch.uint8)
    node = insert_before(first, reserve, *args, like=None, name="shared" if shared else "arena", val=val)
    node.meta["live_bytes"] = live_bytes(planned.blocks)
    return node


def _blocks(buffers: Sequence[Buffer]) -> list[Block]:
    return [Block(each.size, each.first, each.last) for each in buffers]


@dataclass
class _Emitter:
    """Inserts views of the arenas, and lets nodes write into them."""

    places: _Places

    def view(self, before: fx.Node, buffer: Buffer, val: torch.Tensor, offset: int = 0) -> fx.Node:
        """A view that looks like ``val``, ``offset`` bytes into ``buffer``."""
        block, within = buffer.block()
        arena, start = self.places[id(block)]
        at = start + within + offset
        return _insert(before, view_at, (arena, at, list(val.shape), list(val.stride()), val.dtype), val)

    def write(self, node: fx.Node, results: Sequence[Buffer]) -> None:
        """Let a node write its results into their buffers."""
        variant = out_variant(node)
        assert variant is not None, f"{node} has a buffer, so it has an out variant"
        node.args, node.kwargs = variant.call([self.view(node, each, each.val) for each in results])
        node.target = variant.op

    def write_island(self, call: fx.Node, island: Island, buffers: Buffers) -> None:
        """Let an island write its results into their buffers, and into new memory where they have none."""
        of = {user.args[1]: buffers.of[user][0] for user in call.users if user in buffers.of}
        outs = [
            self.view(call, of[k], val) if k in of else _insert(call, aten.empty_strided.default, *_allocated(val))
            for k, val in enumerate(call.meta["val"])
        ]
        call.args, call.target = (*call.args, *outs), island.with_outs()

    def concatenate(self, node: fx.Node, result: Buffer, embedded: Sequence[Buffer | None]) -> None:
        """Copy the members that are not computed in their parts of the concatenation."""
        offset, members = 0, node.args[0]
        assert isinstance(members, (list, tuple))
        parts: list[fx.Node] = []
        for member, part in zip(members, embedded, strict=True):
            val: torch.Tensor = member.meta["val"]
            if part is None:
                like = val.new_empty(val.shape, dtype=result.val.dtype)
                member = _insert(node, aten.copy_.default, (self.view(node, result, like, offset), member), like)
            parts.append(member)
            offset += val.numel() * result.val.element_size()
        node.target, node.args, node.kwargs = whole, (self.view(node, result, result.val), parts), {}


def _insert(
    before: fx.Node, function: Any, args: tuple[Any, ...], val: torch.Tensor, kwargs: dict[str, Any] | None = None
) -> fx.Node:
    return insert_before(before, function, *args, like=before, kwargs=kwargs, val=val)


def _allocated(val: torch.Tensor) -> tuple[tuple[Any, ...], torch.Tensor, dict[str, Any]]:
    """Arguments, value and options of an ``empty_strided`` that is laid out as ``val``."""
    return (list(val.shape), list(val.stride())), val, {"dtype": val.dtype, "device": val.device}
