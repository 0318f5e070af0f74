"""Storages of nodes: those that may share memory, and how long each is read.

A program is functional, so values never change under its readers, and passes may forget about memory; but for two
questions. May a value be overwritten (``UpdateInPlace``)? Would an edit make two outputs, or an output and an input,
share memory that they did not share before? When in doubt, the answer here is "they may share".
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from .._torch import c10d
from ..ir.collectives import is_collective, operands, waits_of
from ..ir.effects import written
from ..ir.ops import Trait, has
from ..ir.region import region_of
from ..ir.schemas import argument, nodes_in, schema
from .foreach_ops import entry_of, is_read_by_entries

Storages = frozenset[fx.Node]  # each piece of memory is named by the node that made it

_NONE: Storages = frozenset()


def storages(graph: fx.Graph, known: Mapping[fx.Node, Storages] | None = None) -> dict[fx.Node, Storages]:
    """For each node, the pieces of memory that its value may lie in; ``known``: where that of some nodes does.

    The parts of a flat input are pieces of their own: what is written into one of them leaves the others as they are.
    """
    known = known or {}
    found: dict[fx.Node, Storages] = {}
    for node in graph.find_nodes(op="placeholder"):
        parts = _parts_of(node)
        found |= {part: frozenset({part}) for part in parts}
        found[node] = frozenset({node, *parts})
    entries: dict[Any, fx.Node] = {}
    by_entries: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        entry = entry_of(node)
        if entry is not None and entry.op not in by_entries:
            by_entries[entry.op] = is_read_by_entries(entry.op)
        if entry is not None and by_entries[entry.op]:  # each result of an op over lists has memory of its own
            found[node] = frozenset({entries.setdefault(entry, node)})
        elif node.target is operator.getitem and region_of(node.args[0]) is not None:
            outs = written(node.args[0])
            found[node] = found[outs[node.args[1]]] if outs else frozenset({entries.setdefault(node.args, node)})
        elif node not in found:
            found[node] = known[node] if node in known else _storages_of(node, found)
    return found


def of_each_result(graph: fx.Graph) -> dict[fx.Node, Storages]:
    """For results that are taken out of a tuple, the memory of each by itself, where they share it with nothing.

    ``storages`` names it by the op, as what allocates it; given these, it names it by the first node that takes it.
    """
    known: dict[fx.Node, Storages] = {}
    results: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        if _makes_several(node.args[0]):
            known[node] = frozenset({results.setdefault(node.args, node)})
    return known


def _makes_several(made: Any) -> bool:
    """Whether ``made`` is an op whose results, several tensors, share memory with nothing."""
    if not isinstance(made, fx.Node) or not has(made.target, Trait.DECLARED) or is_view(made):
        return False
    op: Any = made.target
    return not any(each.shared for each in schema(op).arguments)


def _parts_of(placeholder: fx.Node) -> list[fx.Node]:
    """The nodes that show the parts of a flat input, if it is split once."""
    splits = [user for user in placeholder.users if user.target is torch.ops.aten.split_with_sizes.default]
    if len(splits) != 1 or len(splits[0].args) > 2:
        return []
    parts = [user for user in splits[0].users if user.target is operator.getitem]
    return parts if len({part.args[1] for part in parts}) == len(splits[0].users) else []


def escaping(
    graph: fx.Graph, found: dict[fx.Node, Storages], returned: Iterable[fx.Node] | None = None
) -> set[fx.Node]:
    """The pieces of memory that live on after the call: those of inputs, constants and outputs.

    ``returned``: the outputs that do (``Program.living_on``), by default all.
    """
    kept = {piece for node in graph.nodes if node.op in ("placeholder", "get_attr") for piece in found[node]}
    for output in graph.output_node().all_input_nodes if returned is None else returned:
        kept |= found[output]
    return kept


def last_reads(graph: fx.Graph, found: dict[fx.Node, Storages]) -> dict[fx.Node, int]:
    """For each piece of memory, the position of the last node that reads it.

    A collective reads its operands until somebody has waited for it, but for an all_reduce, which copies first. What
    is returned is read at the very end.
    """
    position = {node: k for k, node in enumerate(graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        waits = [] if node.target is c10d.all_reduce.default else waits_of(node)
        until = max([position[node], *(position[wait] for wait in waits)])
        for storage in _read(node, found):
            last[storage] = max(last.get(storage, 0), until)
    return last


def is_view(node: fx.Node) -> bool:
    """Whether the result lies in an argument's memory, by what torch declares, and owns none."""
    return has(node.target, Trait.ALIAS)


def _read(node: fx.Node, found: dict[fx.Node, Storages]) -> set[fx.Node]:
    read = operands(node) if is_collective(node) else node.all_input_nodes
    return {storage for argument in read for storage in found[argument]}


def _storages_of(node: fx.Node, found: dict[fx.Node, Storages]) -> Storages:
    if node.op == "get_attr":
        return frozenset({node})
    if node.op == "output":
        return _NONE
    shared = frozenset().union(*(found[argument] for argument in _shared_arguments(node)))
    return shared if is_view(node) else shared | {node}


def _shared_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result may lie in."""
    op: Any = node.target
    if not has(op, Trait.DECLARED):
        return node.all_input_nodes  # Python code, an op of the user's: its result may be any argument
    return nodes_in([argument(node, name) for name in schema(op).shared])
