"""Update many parameters by one fused kernel of torch (``optimizer_kernels.py``), found by what is computed."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..analysis.foreach_ops import call_before, list_before, replace_by_entries
from ..analysis.topological import settle
from ..base import Numerics, Pass
from ..cleanup.dead_code import DeadCode
from ..communication.packed import is_unpacked
from ..ir.program import Program
from ..ir.schemas import schema
from .match_optimizers import Match, groups

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseUpdate(Pass):
    """Updates of a unit that Adam, AdamW, SGD or Adagrad would compute become one fused op.

    An optimizer is found by its arithmetic, never by its name, so an equal update that a user writes is found, too.
    The ops around it stay: clipping before it, averages of its results. Where all new values are selected or none, as
    under a scaler, the kernel skips the step itself. Counts are stepped as a list, too. Left alone are an update that
    is something else (``FuseForeach`` takes it), the first step of an optimizer with state, which makes that state, and
    parameters or state that are not contiguous. A kernel rounds in another order, and its results are new lists:
    ``UpdateInPlace`` lets it write where state lies.
    """

    numerics: ClassVar[Numerics] = "reassociates"

    def rewrite(self, program: Program) -> int:
        """One op for each group, in the order in which their gradients are computed; then erase the dead updates."""
        found = groups(program)
        start = first_of([node for group in found for match in group for node in match.new.values()], program)
        for group in found:
            _fuse(group, start)
        if found:
            settle_and_clear(program)
        return len(found)


def first_of(nodes: Collection[fx.Node], program: Program) -> fx.Node:
    """The first of ``nodes`` in the graph; its end if there are none."""
    chosen = set(nodes)
    return next((node for node in program.graph.nodes if node in chosen), program.output_node)


def settle_and_clear(program: Program) -> None:
    """After edits, bring the graph into topological order, and erase dead code."""
    settle(program.graph)
    DeadCode().rewrite(program)


def _fuse(group: list[Match], start: fx.Node) -> None:
    """Insert the op of a group before ``start``, and let readers of the new values read its results."""
    kernel = group[0].kernel
    lists = {name: [match.found[name] for match in group] for name in ("g", *kernel.updates)}
    lists["g"] = [_dense(node, start) for node in lists["g"]]
    if kernel.counts is not None:
        counted = [match.new[kernel.counts] for match in group]
        lists[kernel.counts] = _counted(lists[kernel.counts], counted, start)
    options = _options(group[0], start)
    arguments = tuple(lists.get(name, []) for name in kernel.lists)
    fused = call_before(start, kernel.op, arguments, options)
    fused.meta["val"] = _results(group)
    for k, name in enumerate(kernel.lists):
        if name in kernel.updates and name != kernel.counts:
            replace_by_entries(
                [match.new[name] for match in group], call_before(start, operator.getitem, (fused, k)), start
            )


def _results(group: list[Match]) -> tuple[list[Any], ...]:
    """The shapes of what the op returns: torch has no function for them, and would run it, on zeros of all sizes."""
    kernel = group[0].kernel
    given = {"g", *kernel.updates}
    returned = kernel.lists[: len(schema(kernel.op).results)]
    return tuple([match.found[name].meta["val"] for match in group if name in given] for name in returned)


def _options(match: Match, start: fx.Node) -> dict[str, Any]:
    """The numbers that the op takes, and what decides whether it skips the step."""
    given = match.kernel.options
    options = {name: match.found[value] if isinstance(value, str) else value for name, value in given.items()}
    if match.unless is not None:
        options["found_inf"] = call_before(start, aten._to_copy.default, (match.unless,), {"dtype": torch.float32})
    return options


def _counted(counts: list[fx.Node], new: list[fx.Node], start: fx.Node) -> list[fx.Node]:
    """The counts of this step, one more than they were."""
    return replace_by_entries(new, list_before(start, aten._foreach_add.Scalar, (counts, 1), new), start)


def _dense(gradient: fx.Node, start: fx.Node) -> fx.Node:
    """A gradient that surely is contiguous: parts of a collective's result are; the ``val`` of others may be wrong."""
    return gradient if is_unpacked(gradient) else call_before(start, aten.contiguous.default, (gradient,))
