"""Update many parameters by one op: torch's fused optimizer kernels, found by what is computed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..analysis.list_ops import call_before, replace_by_entries
from ..analysis.topological import settle
from ..base import Numerics, Pass
from ..cleanup.dead_code import DeadCode
from ..ir.collectives import is_wait
from ..ir.program import Program
from .foreach_groups import Alike, alike, in_a_row, over_lists
from .match_optimizers import Chain, groups

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
    What stands around it stays: clipping before it, averages of what it made. Where all new values are selected or
    none, as under a scaler, the kernel skips the step itself. Counts are stepped as a list, too. Left alone are an
    update that is something else, the first step of an optimizer with state, which makes that state, and parameters
    or state that are not contiguous. A kernel rounds in another order, and its results are new lists:
    ``UpdateInPlace`` lets it write where state lies.

    Any other update becomes ops over lists (``_foreach_mul``), each the same op on each entry, where parameters are
    updated alike; what is computed from each one's count becomes the same op on all counts in a row. On a CPU, lists
    pay for parameters of up to ``max_elements`` elements: the larger ones are quicker one after the other, while they
    are in the cache.
    """

    max_elements: int = 4096
    numerics: ClassVar[Numerics] = "reassociates"

    def rewrite(self, program: Program) -> int:
        """One op for each group, in the order in which their gradients come about; then what was read is dead."""
        return _fuse_chains(program) + _fuse_the_rest(program, self.max_elements)


def _fuse_chains(program: Program) -> int:
    found = groups(program)
    replaced = [node for group in found for chain in group for node in chain.new.values()]
    start = _first(program, replaced)
    for group in found:
        _fuse(group, start)
    return _clear(program, len(found))


def _fuse_the_rest(program: Program, max_elements: int) -> int:
    found = alike(program, max_elements)
    replaced = [node for nodes in found for node in nodes]
    start = _first(program, replaced)
    kept = set(program.output_node.all_input_nodes)
    for nodes in found:
        _together(nodes, kept, start)
    return _clear(program, len(found))


def _first(program: Program, nodes: list[fx.Node]) -> fx.Node:
    """The first of ``nodes`` in the graph; its end if there are none."""
    wanted = set(nodes)
    return next((node for node in program.graph.nodes if node in wanted), program.output_node)


def _together(nodes: Alike, kept: set[fx.Node], start: fx.Node) -> None:
    """One op for all ``nodes``: over lists, or over a row of numbers where none of them is kept."""
    first = nodes[0]
    row = in_a_row(first) and kept.isdisjoint(nodes)
    gather: Callable[..., Any] = _row if row else _list
    arguments = tuple(
        gather([node.args[k] for node in nodes], start) if _is_tensor(given) else given
        for k, given in enumerate(first.args)
    )
    results = call_before(start, first.target if row else over_lists(first), arguments, dict(first.kwargs))
    replace_by_entries(nodes, call_before(start, aten.unbind.int, (results,)) if row else results, start)


def _list(values: list[fx.Node], start: fx.Node) -> list[fx.Node]:
    return values


def _row(values: list[fx.Node], start: fx.Node) -> fx.Node:
    """Numbers as a tensor of one dim: what they were cut out of, if they are all of it."""
    cut = values[0].args[0] if values[0].target is operator.getitem else None
    whole = all(value.args == (cut, k) for k, value in enumerate(values))
    if isinstance(cut, fx.Node) and cut.target is aten.unbind.int and whole and len(cut.users) == len(values):
        return cut.all_input_nodes[0]
    return call_before(start, aten.stack.default, (values,))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


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
    if (unless := group[0].unless) is not None:
        options["found_inf"] = call_before(start, aten._to_copy.default, (unless,), {"dtype": torch.float32})
    arguments = tuple(lists.get(name, []) for name in kernel.lists)
    fused = call_before(start, kernel.op, arguments, options)
    for k, name in enumerate(kernel.lists):
        if name in kernel.updates and name != kernel.counts:
            replace_by_entries(
                [chain.new[name] for chain in group], call_before(start, operator.getitem, (fused, k)), start
            )


def _counted(counts: list[fx.Node], new: list[fx.Node], start: fx.Node) -> list[fx.Node]:
    """The counts of this step, one more than they were."""
    return replace_by_entries(new, call_before(start, aten._foreach_add.Scalar, (counts, 1)), start)


def _dense(gradient: fx.Node, start: fx.Node) -> fx.Node:
    """A gradient that surely is contiguous: parts of what was communicated are, of others a fake may be wrong."""
    node = gradient
    while node.target in _PARTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return gradient if is_wait(node) else call_before(start, aten.contiguous.default, (gradient,))


def _clear(program: Program, edits: int) -> int:
    """After edits, bring the graph into order, and erase what nobody reads any more."""
    if not edits:
        return 0
    settle(program.graph)
    DeadCode().rewrite(program)
    return edits
