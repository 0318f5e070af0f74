"""Wait for each collective as late as its readers allow, so that compute can hide it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..analysis.topological import places, settle
from ..base import Pass
from ..ir.collectives import is_wait
from ..ir.program import Program
from .start_early import StartEarly

aten = torch.ops.aten

# Ops that only unpack a result: they can wait until it is read.
UNPACKING: frozenset[Any] = frozenset(
    {
        operator.getitem,
        aten._to_copy.default,
        aten._unsafe_view.default,
        aten.contiguous.default,
        aten.permute.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.split_with_sizes.default,
        aten.split_with_sizes_copy.default,
        aten.t.default,
        aten.transpose.int,
        aten.view.default,
    }
)


@dataclass(frozen=True)
class WaitLate(Pass):
    """Each wait, with the nodes that only unpack its result, moves to right before its first reader.

    All other nodes keep their order. The new order depends on the graph alone, so it is the same on all ranks.
    """

    after: ClassVar[tuple[type[Pass], ...]] = (StartEarly,)

    def rewrite(self, program: Program) -> int:
        """Sink the waits and what unpacks them to their first readers; returns how many waits moved."""
        sinking = _sinking(program.graph)
        before = places(program.graph, sinking)
        settle(program.graph, sinking)
        after = places(program.graph, sinking)
        return sum(before[node] != after[node] for node in sinking if is_wait(node))


def _sinking(graph: fx.Graph) -> set[fx.Node]:
    sinking: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if is_wait(node) or (node.target in UNPACKING and inputs and all(needed in sinking for needed in inputs)):
            sinking.add(node)
    return sinking
