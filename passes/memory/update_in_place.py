"""Write updates into the inputs they belong to, so that state keeps its memory from call to call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from .._torch import OpOverload
from ..analysis.aliases import Storages, last_reads, storages
from ..analysis.foreach_ops import entry_of, write_lists_in_place
from ..analysis.strides import Layouts
from ..base import Pass
from ..ir.edit import insert_before
from ..ir.effects import is_pure
from ..ir.meta import Relation
from ..ir.ops import Trait, has, in_place_variant
from ..ir.program import Input, OutputKind, Program
from ..ir.schemas import is_tensor, nodes_in

aten = torch.ops.aten


@dataclass(frozen=True)
class UpdateInPlace(Pass):
    """Each update output becomes a write to its input, and is no output any more.

    Where the new value is computed from the old one by ops that have an in-place variant, and the old value has no
    later reader (no view, no output, no collective that is still pending), these ops write to the input; so do ops over
    lists, entry by entry. Any other new value is copied into its input at the end. So is one that is known before the
    last look whether the program fits the call (``Trait.BEGINS_ANEW``): where it does not, the call begins again.
    Outputs that share memory with an input written to are cloned. Assumes that no two inputs share memory. Nothing may
    reorder the graph afterwards.
    """

    last: ClassVar[bool] = True

    def rewrite(self, program: Program) -> int:
        """Decide for all updates on the functional graph, then write."""
        named = {name: (old, new) for name, old, new in _updates(program)}
        updates = list(named.values())
        memory = _Lifetimes(program.graph)
        chains = {old: chain for old, new in updates if (chain := memory.chain(old, new))}
        overwriting = {node for chain in chains.values() for node in chain}
        for node in overwriting:
            if entry_of(node) is None:
                node.target = _in_place(node)
        became = write_lists_in_place(program.graph, overwriting)
        memory.found.update({new: frozenset({new}) for new in became.values() if new not in memory.found})
        copied = [(old, became.get(new, new)) for old, new in updates if old not in chains and old is not new]
        _drop_outputs(program, set(named))
        written = set[fx.Node]().union(*(memory.found[old] for old, _ in copied))
        written = written.union(*({*memory.found[old], *chain} for old, chain in chains.items()))
        _write(program, copied, memory.found, written)
        return len(updates)


class _Lifetimes:
    """The memory of the values of a functional graph, and its last reads."""

    def __init__(self, graph: fx.Graph) -> None:
        self.found = storages(graph)
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self.last_read = last_reads(graph, self.found)
        self.layouts = Layouts(graph)
        looks = [k for node, k in self.position.items() if has(node.target, Trait.BEGINS_ANEW)]
        self.last_look = max(looks, default=-1)

    def chain(self, old: fx.Node, new: fx.Node) -> list[fx.Node]:
        """The ops from ``old`` to ``new``, first to last, if all of them can write to the memory of ``old``."""
        chain: list[fx.Node] = []
        node = new
        while node is not old:
            if not self._can_write(node, old):
                return []
            chain.append(node)
            node = _overwritten(node)
        return chain[::-1]

    def _can_write(self, node: fx.Node, old: fx.Node) -> bool:
        """Whether ``node`` may overwrite its first argument, which is or will be in the memory of ``old``."""
        entry = entry_of(node)
        if (entry is None and _in_place(node) is None) or not self.layouts.have_same_layout(node, old):
            return False
        source, op = _overwritten(node), entry.op if entry else node
        if not isinstance(source, fx.Node) or len(self.found[source]) != 1:
            return False
        (piece,) = self.found[source]
        readers = [argument for argument in nodes_in((op.args, op.kwargs)) if piece in self.found[argument]]
        owns = source is old or source is piece
        is_free = len(readers) == 1 and self.last_read.get(piece, 0) <= self.position[op]
        return owns and is_free and self.position[op] > self.last_look


def _updates(program: Program) -> Iterator[tuple[str, fx.Node, fx.Node]]:
    """Each input, or part of a flat one, that is updated and can be written to: name, value, new value."""
    values = program.values()
    for value, output in zip(program.output_values(), program.outputs, strict=True):
        if output.kind is OutputKind.UPDATE and is_tensor(value):  # a number cannot be written to
            yield output.name, values[output.name][1], value


def _overwritten(node: fx.Node) -> Any:
    """The value that the in-place variant of ``node`` overwrites: its first argument, or its own entry of a list."""
    entry = entry_of(node)
    return entry.source if entry else node.args[0]


def _in_place(node: fx.Node) -> Any:
    """The variant of the op of ``node`` that writes to its first argument; None if there is none."""
    op = node.target
    return in_place_variant(op) if isinstance(op, OpOverload) and is_pure(node) else None


def _drop_outputs(program: Program, updated: set[str]) -> None:
    """Drop the updates of these names from the outputs: they are written in place."""
    program.inputs = [_marked(each, updated) for each in program.inputs]
    pairs = zip(program.output_values(), program.outputs, strict=True)
    kept = [(value, out) for value, out in pairs if out.kind is not OutputKind.UPDATE or out.name not in updated]
    program.set_outputs([value for value, _ in kept], [out for _, out in kept])


def _marked(declared: Input, updated: set[str]) -> Input:
    """A flat input is written to if one of its parts is."""
    parts = tuple(replace(part, input=_marked(part.input, updated)) for part in declared.parts)
    in_place = declared.in_place or declared.name in updated or any(part.input.in_place for part in parts)
    return replace(declared, in_place=in_place, parts=parts)


def _write(
    program: Program, copied: list[tuple[fx.Node, fx.Node]], found: dict[fx.Node, Storages], written: set[fx.Node]
) -> None:
    """Clone the values that the copies would overwrite, then copy."""
    end = program.output_node
    insert = partial(insert_before, end, relation=Relation.REPLACEMENT)

    def clone(node: fx.Node) -> fx.Node:
        return insert(aten.clone.default, node, like=node, val=node.meta["val"])

    kept = {value: clone(value) for value in end.all_input_nodes if found[value] & written}
    end.args = fx.map_arg(end.args, lambda value: kept.get(value, value))
    targets = {piece for old, _ in copied for piece in found[old]}
    sources = [clone(new) if found[new] & targets else new for _, new in copied]
    for (old, _), source in zip(copied, sources, strict=True):
        insert(aten.copy_.default, old, source, like=source, val=old.meta["val"])
