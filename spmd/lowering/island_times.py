"""Seconds of an island as one call, and op by op, each as a program would run it: in an arena, from generated code."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

import passes
from passes import Canonicalize, FoldLayoutCopies, Island, Program, ReuseMemory, Role
from passes.runtime.arena import extent

from .codegen import Bound, Compiles
from .cuda_graphs import CudaCapture

_PASSES = (Canonicalize(), FoldLayoutCopies(), ReuseMemory())
_ROUNDS = 7
_SECONDS = 0.002  # of a round, at least


def seconds_of(island: Island, compiles: Compiles) -> tuple[float, float]:
    """Seconds of one call: op by op, and as ``compiles`` runs the island. The best of several rounds, taken in turn."""
    operands = [example(node.meta["val"]) for node in island.placeholders]
    device = island.results[0].meta["val"].device
    bound = [_bound(graph, len(operands), compiles) for graph in (_by_ops(island), _by_call(island))]
    with torch.no_grad():
        ops, call = (each.halves(*operands)[0] for each in bound)
        if device.type == "cpu":
            count = max(1, int(_SECONDS / _seconds(ops, 3)))
            clocks: list[Callable[[], float]] = [partial(_seconds, each, count) for each in (ops, call)]
        else:
            clocks = [_on_device(device, each) for each in (ops, call)]
        rounds = [tuple(clock() for clock in clocks) for _ in range(_ROUNDS + 1)][1:]
    for each in bound:
        each.close()
    by_ops, by_call = (min(times) for times in zip(*rounds, strict=True))
    return by_ops, by_call


def _seconds(run: Callable[[], Any], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - begin) / count


def _on_device(device: torch.device, run: Callable[[], Any], count: int = 20) -> Callable[[], float]:
    """Measures what a GPU takes for a call, however long the host takes to launch it: it replays ``count`` of them."""
    run()
    _, launch = CudaCapture(device)(lambda: [run() for _ in range(count)])
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def seconds() -> float:
        begin.record()
        launch()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / count

    return seconds


def _by_ops(island: Island) -> fx.Graph:
    graph = fx.Graph()
    env = _placeholders(island, graph)
    for node in island.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    return _read(graph, [env[each] for each in island.results])


def _by_call(island: Island) -> fx.Graph:
    graph = fx.Graph()
    env = _placeholders(island, graph)
    call = graph.call_function(island, tuple(env.values()))
    call.meta["val"] = tuple(node.meta["val"] for node in island.results)
    results = [graph.call_function(operator.getitem, (call, k)) for k in range(len(island.results))]
    for node, val in zip(results, call.meta["val"], strict=True):
        node.meta["val"] = val
    return _read(graph, results)


def _placeholders(island: Island, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    return {node: graph.node_copy(node) for node in island.placeholders}


def _read(graph: fx.Graph, results: list[fx.Node]) -> fx.Graph:
    """Let something read the results, and return nothing: so they lie in the arena."""
    graph.call_function(_ignore, tuple(results))
    graph.output(())
    return graph


def _ignore(*values: Any) -> None:
    """Nothing: a reader of values."""


def _bound(graph: fx.Graph, operands: int, compiles: Compiles) -> Bound:
    module = fx.GraphModule(torch.nn.Module(), graph)
    program = Program.from_graph(module, [Role.CONSTANT] * operands)
    return Bound(passes.run(program, _PASSES), regions=compiles)


def example(val: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Numbers between 0 and 1, of which most functions are finite; integers from 1 to 7, which may be divisors."""
    made = torch.empty(extent(val.shape, val.stride()), dtype=val.dtype)
    own = torch.Generator().manual_seed(seed)  # that of the user stays as it is
    if val.dtype.is_floating_point:
        made.uniform_(generator=own)
    else:
        made.random_(*((0, 2) if val.dtype is torch.bool else (1, 8)), generator=own)
    made = made.to(val.device)
    return made.as_strided(val.shape, val.stride())  # also where elements share memory, as in an expanded one
