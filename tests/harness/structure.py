"""The structure of programs: compile a step on a fake world and count its collectives, shapes and ops."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

import spmd
from passes.runtime.arena import reserve, view_at

from .cases import mlp
from .fake import fake_world


def compile_on_fake_ranks(world: int, step: Any, objects: tuple[Any, ...], *batch: Any, **options: Any) -> Any:
    """The compiled step after one call as rank 0 of ``world``; its numbers mean nothing."""
    with fake_world(world):
        compiled = spmd.compile(**options)(step)
        compiled(*objects, *batch)
    return compiled


def counts(compiled: spmd.CompiledStep) -> dict[str, int]:
    """The number of collectives of each kind, counted in the program's graph and in its report, which must agree."""
    assert compiled.program is not None
    in_graph = Counter(str(node.meta["collective"].kind) for node in compiled.program.collectives())
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    in_report = {kind: count for kind in kinds if (count := compiled.report().count(kind))}
    assert in_report == dict(in_graph)
    return in_report


def shapes(program: Any, phase: str | None = None) -> set[tuple[int, ...]]:
    """The shapes of every tensor in the graph, or of those that one phase computes."""
    nodes = [node for node in program.graph.nodes if phase in (None, node.meta.get("phase")) and not is_memory(node)]
    values = [value for node in nodes for value in _tensors(node.meta.get("val"))]
    assert values
    return {tuple(value.shape) for value in values}


def is_memory(node: fx.Node) -> bool:
    """Whether a node allocates or views planned memory, and computes nothing."""
    return node.target in (reserve, view_at)


def computes(node: fx.Node) -> Any:
    """The op that a node computes, also where it is an out variant."""
    return node.meta.get("computes", node.target)


def nodes_of(compiled: spmd.CompiledStep, *ops: Any) -> list[fx.Node]:
    """The nodes of the last program that compute one of ``ops``, in order."""
    assert compiled.program is not None
    return [node for node in compiled.program.graph.nodes if computes(node) in ops]


def regression(*sizes: int, rows: int = 7) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Model, SGD, x (rows, first size), y (rows, last size), in fp64."""
    model = mlp(*sizes)
    x, y = (torch.randn(rows, size, dtype=torch.float64) for size in (sizes[0], sizes[-1]))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), x, y


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, torch.Tensor)]
