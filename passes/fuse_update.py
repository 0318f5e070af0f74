"""Update many parameters by one op: torch's fused optimizer kernels, found by what is computed."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from .base import Numerics, Pass
from .chains import Chain, groups
from .collectives import is_wait
from .order import settle
from .program import Program
from .purity import is_pure
from .roles import Phase

aten = torch.ops.aten

# What cuts contiguous parts out of a contiguous tensor.
_PARTS: set[Any] = {
    operator.getitem,
    aten._unsafe_view.default,
    aten.split_with_sizes.default,
    aten.view.default,
}


@dataclass(frozen=True)
class FuseUpdate(Pass):
    """Where a parameter's update is what Adam, AdamW, SGD or Adagrad computes, one op does it for all of a unit.

    It is found by its arithmetic, never by an optimizer's name; so is what users write themselves in the same words.
    What stands around it stays: clipping before it, a select between old and new after it, averages of what it made.
    Counts are stepped as a list, too. Left alone are an update that is something else, the first step of an optimizer
    with state, which makes that state, and parameters or state that are not contiguous. A kernel rounds in another
    order, and its results are new lists: ``UpdateInPlace`` lets it write where state lies.
    """

    numerics: ClassVar[Numerics] = "reassociates"

    def rewrite(self, program: Program) -> int:
        """One op for each group, in the order in which their gradients come about; then what was read is dead."""
        found = groups(program)
        if not found:
            return 0
        position = {node: k for k, node in enumerate(program.graph.nodes)}
        start = min((node for group in found for node in _replaced(group)), key=position.__getitem__)
        for group in found:
            _fuse(group, start)
        settle(program.graph)
        _erase_dead(program.graph, [node for group in found for node in _replaced(group)])
        return len(found)


def _replaced(group: list[Chain]) -> list[fx.Node]:
    return [node for chain in group for node in chain.new.values()]


def _fuse(group: list[Chain], start: fx.Node) -> None:
    """The op of a group before ``start``, and its results in the place of the chains' ones."""
    kernel = group[0].kernel
    lists = {name: [chain.found[name] for chain in group] for name in ("g", *kernel.updates)}
    lists["g"] = [_dense(node, start) for node in lists["g"]]
    if kernel.counts is not None:
        counted = [chain.new[kernel.counts] for chain in group]
        lists[kernel.counts] = _counted(lists[kernel.counts], counted, start)
    options = {
        option: group[0].found[said] if isinstance(said, str) else said for option, said in kernel.options.items()
    }
    arguments = tuple(lists.get(name, []) for name in kernel.lists)
    fused = _call(start, kernel.op, arguments, options)
    for k, name in enumerate(kernel.lists):
        if name in kernel.updates and name != kernel.counts:
            _replace([chain.new[name] for chain in group], _call(start, operator.getitem, (fused, k)), start)


def _counted(counts: list[fx.Node], new: list[fx.Node], start: fx.Node) -> list[fx.Node]:
    """The counts of this step, one more than they were."""
    return _replace(new, _call(start, aten._foreach_add.Scalar, (counts, 1)), start)


def _replace(old: list[fx.Node], results: fx.Node, start: fx.Node) -> list[fx.Node]:
    """Let readers of the old nodes read the entries of a list of results instead."""
    entries = [_call(start, operator.getitem, (results, k)) for k in range(len(old))]
    for node, entry in zip(old, entries, strict=True):
        entry.meta = dict(node.meta)
        node.replace_all_uses_with(entry)
    return entries


def _dense(gradient: fx.Node, start: fx.Node) -> fx.Node:
    """A gradient that surely is contiguous: parts of what was communicated are, of others a fake may be wrong."""
    node = gradient
    while node.target in _PARTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return gradient if is_wait(node) else _call(start, aten.contiguous.default, (gradient,))


def _call(start: fx.Node, op: Any, args: tuple[Any, ...], options: dict[str, Any] | None = None) -> fx.Node:
    """A new node before ``start``, named as tracing names it."""
    name = op._schema.name.split("::")[1] if hasattr(op, "_schema") else op.__name__
    with start.graph.inserting_before(start):
        node = start.graph.create_node("call_function", op, args, options, name=name)
    node.meta["phase"] = Phase.UPDATE
    return node


def _erase_dead(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase the nodes that nobody reads any more, and then what only they read."""
    gone: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        if node not in gone and not node.users and is_pure(node):
            gone.add(node)
            nodes += node.all_input_nodes
            graph.erase_node(node)
