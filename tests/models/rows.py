"""Find nodes by which a rank computes with rows of the batch that are not its own.

``whole_rows`` looks at a program before and after partition. A value that depends on the batch and that has as many
rows on one rank as in the global program was computed whole by every rank: it was gathered, or summed up out of pieces
of rows, or cut from something whole too late. Sums over the batch (losses, statistics, counts) have no rows, and are
every rank's business; so are parameters, their gradients and the update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial

from passes import Phase, Program, Role

_STATE = {Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.RESULT}
_MOVES = ("all_gather", "all_to_all")


def whole_rows(before: Program, after: Program, rows: int, compares: bool = False) -> list[str]:
    """A line for each node that has all rows on a rank; ``rows``: a rank's, a number that no other size divides by.

    Where the step itself ``compares`` all rows, those of other ranks may come in, and what they are sent back is a sum
    of the ranks' shares for all rows; but nothing is computed of all rows that each rank could compute of its own.
    """
    shapes = {node.name: _shapes(node) for node in before.graph.nodes}
    return [
        line
        for node in _of_the_batch(after)
        if not (compares and _is_comparison(node))
        if (line := _gathered(node) or _same_as_global(node, shapes.get(node.name, []), rows))
    ] + list(after.notes)


def _of_the_batch(program: Program) -> list[fx.Node]:
    """The nodes of forward and backward whose values depend on the batch, in order."""
    inputs = zip(program.placeholders, program.inputs, strict=True)
    depends = {node for node, declared in inputs if declared.role is Role.BATCH}
    for node in program.graph.nodes:
        if any(operand in depends for operand in node.all_input_nodes):
            depends.add(node)
    phases = (Phase.FORWARD, Phase.BACKWARD)
    return [node for node in program.graph.nodes if node in depends and node.meta.get("phase") in phases]


def _is_comparison(node: fx.Node) -> bool:
    """Whether a node moves rows or sums sent back to them, or only views what was moved."""
    collective, placement = node.meta.get("collective"), node.meta.get("placement", ())
    views = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
    return collective is not None or views or any(isinstance(p, Partial) for p in placement)


def _gathered(node: fx.Node) -> str:
    """Rows of the batch that come from other ranks."""
    collective = node.meta.get("collective")
    if collective is None or collective.kind not in _MOVES or collective.role in _STATE:
        return ""
    return f"{collective.kind} of {_shapes(node.all_input_nodes[0])[0]}: {collective.why}, {node.meta.get('source')}"


def _same_as_global(node: fx.Node, shapes: list[tuple[int, ...]], rows: int) -> str:
    """A value of the global program that has rows, all of them here."""
    for shape, whole in zip(_shapes(node), shapes, strict=False):
        if shape == whole and any(size and size % rows == 0 for size in shape):
            return f"{node.target} is computed whole, {shape}, {node.meta.get('source')}"
    return ""


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    val: Any = node.meta.get("val")
    return [tuple(v.shape) for v in (val if isinstance(val, tuple | list) else [val]) if isinstance(v, torch.Tensor)]
