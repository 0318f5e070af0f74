"""Every redistribution there is on small meshes, on every rank, in one process.

In come a mesh, a global shape and two placements. Each rank's nodes are emitted on fakes, as ``partition`` does it; all
ranks then run in lockstep, a collective among the ranks of its group, and the parts that come out must be those of the
global value that went in. Values are whole multiples of 36, so that sums and shares of 2 and 3 ranks are exact.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, Kind, Mesh, PartitionError
from passes.analysis.agreed_sizes import most_bytes
from passes.ir.collectives import input_bytes, is_collective, is_wait, kind_of, output_bytes, reduction_of
from passes.ir.program import Placements
from passes.ir.rates import UNMEASURED
from passes.runtime.random import _Bits
from spmd.partitioner.redistribute import Reason, Redistribution
from spmd.partitioner.redistribution_steps import cost, total_cost
from spmd.placements import Interleaved, chunk, local_runs, local_shape

pytestmark = pytest.mark.slow

R, S0, S1, SUM, MAX = Replicate(), Shard(0), Shard(1), Partial(), Partial("max")
SOURCES, TARGETS = (R, S0, S1, SUM, MAX), (R, S0, S1, SUM)
SHAPES = [(4, 6), (5, 7), (1, 3)]
SOME = 30  # of those that are too many to try all
FAKES = FakeTensorMode()

Coordinate = tuple[int, ...]
Parts = dict[Coordinate, Tensor]  # by coordinate on the mesh


def mesh_at(sizes: Sequence[int], coordinate: Coordinate | None = None) -> Mesh:
    """The mesh as the rank at ``coordinate`` sees it."""
    at = coordinate or (0,) * len(sizes)
    return Mesh(tuple(Axis(f"axis{k}", n, str(k), c) for k, (n, c) in enumerate(zip(sizes, at, strict=True))))


def emitted(sizes: Sequence[int], at: Coordinate, shape: tuple[int, ...], source: Any, target: Any) -> fx.Graph:
    """The graph of one rank that takes a value of this global shape from ``source`` to ``target``."""
    graph, mesh = fx.Graph(), mesh_at(sizes, at)

    def emit(op: Any, arguments: tuple[Any, ...], collective: Any = None) -> fx.Node:
        node = graph.call_function(op, arguments)
        with FAKES:
            node.meta["val"] = op(*fx.node.map_arg(arguments, lambda operand: operand.meta["val"]))
        if collective is not None:
            node.meta["collective"] = collective
        return node

    start = graph.placeholder("x")
    with FAKES:
        start.meta["val"] = torch.empty(local_shape(shape, source, mesh), dtype=torch.float64)
    graph.output(Redistribution(emit, lambda *_: None, mesh, shape, Reason()).run(start, source, target))
    return graph


def calls(graph: fx.Graph) -> list[fx.Node]:
    """All but the placeholder and the output."""
    return [node for node in graph.nodes if node.op == "call_function"]


def cuts(graph: fx.Graph) -> list[fx.Node]:
    """Slices, which may take nothing off on some ranks."""
    return [node for node in calls(graph) if node.target is torch.ops.aten.slice.Tensor]


def collectives(graph: fx.Graph) -> dict[str, int]:
    """The number of collectives of each kind."""
    return dict(Counter(str(kind_of(node)) for node in calls(graph) if is_collective(node)))


# What the ranks have, and what they stand for


def scattered(x: Tensor, placements: Sequence[Placement], sizes: Sequence[int]) -> Parts:
    """Each rank's part of ``x``; a sum is split into random summands, a maximum is hidden among smaller numbers."""
    if not sizes:
        return {(): x}
    pieces = _pieces(x, placements[0], sizes[0])
    return {
        (k, *rest): part
        for k, piece in enumerate(pieces)
        for rest, part in scattered(piece, placements[1:], sizes[1:]).items()
    }


def _pieces(x: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    if isinstance(placement, Interleaved):
        runs = _pieces(x.unflatten(placement.dim, (placement.outer, -1)), Shard(placement.dim + 1), ranks)
        return [piece.flatten(placement.dim, placement.dim + 1) for piece in runs]
    if isinstance(placement, Shard):
        return [x.narrow(placement.dim, *chunk(x.shape[placement.dim], ranks, k)).contiguous() for k in range(ranks)]
    if placement == SUM:
        summands = [_numbers(x.shape, seed=k) for k in range(1, ranks)]
        return [x - sum(summands), *summands]
    if placement == MAX:
        owner = torch.arange(x.numel()).reshape(x.shape) % ranks
        return [torch.where(owner == k, x, x - 36 * (1 + k)) for k in range(ranks)]
    return [x] * ranks


def joined(parts: Parts, placements: Sequence[Placement], sizes: Sequence[int]) -> Tensor:
    """The global value of the parts; replicas must be equal."""
    if not sizes:
        return parts[()]
    pieces = [
        joined({at[1:]: part for at, part in parts.items() if at[0] == k}, placements[1:], sizes[1:])
        for k in range(sizes[0])
    ]
    if isinstance(placements[0], Interleaved):
        dim, outer = placements[0].dim, placements[0].outer
        return torch.cat([piece.unflatten(dim, (outer, -1)) for piece in pieces], dim + 1).flatten(dim, dim + 1)
    if isinstance(placements[0], Shard):
        return torch.cat(pieces, placements[0].dim)
    if placements[0] == SUM:
        return torch.stack(pieces).sum(0)
    assert all(torch.equal(piece, pieces[0]) for piece in pieces), "replicas differ"
    return pieces[0]


def _numbers(shape: Sequence[int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 36.0 * torch.randint(-99, 99, tuple(shape), generator=generator).double()


# All ranks in lockstep


def simulated(graphs: dict[Coordinate, fx.Graph], parts: Parts) -> Parts:
    """Run each rank's graph on its part, node by node on all ranks."""
    env: dict[Coordinate, dict[fx.Node, Any]] = {at: {} for at in graphs}
    for row in zip(*(graph.nodes for graph in graphs.values()), strict=True):
        nodes = dict(zip(graphs, row, strict=True))
        sent = {at: fx.node.map_arg(node.args, env[at].__getitem__) for at, node in nodes.items()}
        for at, node in nodes.items():
            env[at][node] = _result(at, nodes, sent, parts)
            _check_val(node, env[at][node])
    return {at: env[at][graph.output_node()] for at, graph in graphs.items()}


def _result(at: Coordinate, nodes: dict[Coordinate, fx.Node], sent: dict[Coordinate, Any], parts: Parts) -> Any:
    node = nodes[at]
    if node.op == "placeholder":
        return parts[at]
    if node.op == "output" or is_wait(node):
        return sent[at][0]
    if is_collective(node):
        axis = int(node.args[-1])  # type: ignore[arg-type]
        group = [other for other in nodes if other[:axis] == at[:axis] and other[axis + 1 :] == at[axis + 1 :]]
        return _communicated(node, [sent[other][0] for other in group], at[axis])
    return node.target(*sent[at])  # type: ignore[operator]


def _communicated(node: fx.Node, tensors: list[Tensor], rank: int) -> Tensor:
    """The result of the rank of this number in the group."""
    assert len({tuple(t.shape) for t in tensors}) == 1, "the ranks of a group send equal shapes"
    kind = kind_of(node)
    if kind is Kind.ALL_REDUCE:
        stacked = torch.stack(tensors)
        return stacked.sum(0) if reduction_of(node) == "sum" else stacked.amax(0)
    assert all(t.is_contiguous() for t in tensors)
    if kind is Kind.ALL_GATHER:
        return torch.cat(tensors)
    if kind is Kind.REDUCE_SCATTER:
        return torch.stack(tensors).sum(0).chunk(len(tensors))[rank]
    assert kind is Kind.ALL_TO_ALL
    return torch.cat([t.chunk(len(tensors))[rank] for t in tensors])


def _check_val(node: fx.Node, value: Any) -> None:
    if "val" in node.meta:
        assert node.meta["val"].shape == value.shape, f"{node.format_node()} has another shape than its fake"


def check(sizes: Sequence[int], shape: tuple[int, ...], source: Placements, target: Placements) -> None:
    """Redistribute on every rank, and compare."""
    graphs = {at: emitted(sizes, at, shape, source, target) for at in product(*map(range, sizes))}
    assert len({tuple(node.target for node in calls(graph)) for graph in graphs.values()}) == 1, "one structure"
    assert all("placement" in node.meta for graph in graphs.values() for node in cuts(graph)), "passes must keep cuts"
    check_sizes(list(graphs.values()))
    x = _numbers(shape)
    parts = simulated(graphs, scattered(x, source, sizes))
    for at, part in parts.items():
        assert tuple(part.shape) == local_shape(shape, target, mesh_at(sizes, at)), f"the shape at {at}"
    assert torch.equal(joined(parts, target, sizes), x)


def check_sizes(graphs: list[fx.Graph]) -> None:
    """Assert that all ranks know, of each collective, the bytes of the rank that sends or gets the most."""
    for row in zip(*map(calls, graphs), strict=True):
        if is_collective(row[0]):
            most = max(max(input_bytes(node), output_bytes(node)) for node in row)
            assert [most_bytes(node) for node in row] == [most] * len(row)


# Which redistributions there are


def pairs(axes: int) -> Iterator[tuple[Placements, Placements]]:
    """Every source with every target, but for those that have no meaning or that no steps connect."""
    return ((a, b) for a in product(SOURCES, repeat=axes) for b in product(TARGETS, repeat=axes) if _is_reachable(a, b))


def _is_reachable(source: Placements, target: Placements) -> bool:
    if SUM in source and MAX in source:
        return False  # a sum of maxima is not a maximum of sums
    return all(b != SUM or a in (R, SUM) for a, b in zip(source, target, strict=True))


def _name(value: Any) -> str:
    names: dict[Any, str] = {R: "R", S0: "S0", S1: "S1", SUM: "sum", MAX: "max"}
    return names[value] if isinstance(value, Placement) else "x".join(map(str, value))


def check_all(sizes: Sequence[int], shape: tuple[int, ...], which: Iterable[tuple[Placements, Placements]]) -> None:
    """``check`` each of them."""
    for source, target in which:
        try:
            check(sizes, shape, source, target)
        except Exception as error:
            error.add_note(f"{shape} on {sizes}: {source} -> {target}")
            raise


@pytest.mark.parametrize("shape", SHAPES, ids=_name)
@pytest.mark.parametrize("sizes", [(2,), (3,)], ids=_name)
def test_every_pair_on_one_axis(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    check_all(sizes, shape, pairs(1))


@pytest.mark.parametrize("sizes, shape", [
    ((2, 2), (5, 7)),
    ((2, 2), (1, 3)),
    ((2, 3), (4, 6)),
    pytest.param((2, 2), (4, 6), marks=pytest.mark.exhaustive),
    pytest.param((2, 3), (5, 7), marks=pytest.mark.exhaustive),
    pytest.param((2, 3), (1, 3), marks=pytest.mark.exhaustive),
], ids=_name)  # fmt: skip
def test_every_pair_of_placements(sizes: tuple[int, ...], shape: tuple[int, ...], pytestconfig: pytest.Config) -> None:
    """Every other pair where there are fewer rows than ranks, or three of these; all with --exhaustive."""
    every = 1 if shape == (5, 7) or pytestconfig.getoption("--exhaustive") else 2
    check_all(sizes, shape, list(pairs(len(sizes)))[::every])


@pytest.mark.parametrize("sizes", [(1,), (1, 2), (2, 1)], ids=_name)
def test_axes_of_one_rank(sizes: tuple[int, ...]) -> None:
    check_all(sizes, (5, 7), pairs(len(sizes)))


@pytest.mark.parametrize("shape", [(8, 4), (9, 2)], ids=_name)
def test_three_axes(shape: tuple[int, ...]) -> None:
    check_all((2, 2, 2), shape, random.Random(0).sample(list(pairs(3)), SOME))


@pytest.mark.parametrize("shape", [(3,), (3, 2, 5)], ids=_name)
@pytest.mark.parametrize("source, target", [(S0, R), (R, S0), (SUM, S0), (MAX, S0), (R, SUM)], ids=_name)
def test_other_numbers_of_dims(shape: tuple[int, ...], source: Placement, target: Placement) -> None:
    check((2,), shape, (source,), (target,))


def test_the_last_dim_of_three() -> None:
    for source, target in product([R, SUM, Shard(0), Shard(1), Shard(2)], [R, Shard(0), Shard(1), Shard(2)]):
        check((2,), (2, 4, 6), (source,), (target,))
        check((2,), (3, 5, 7), (source,), (target,))


def runs_fit(shape: Sequence[int], placements: Placements, sizes: Sequence[int]) -> bool:
    """Whether runs divide evenly over each axis, after those before."""
    left = list(shape)
    for placement, ranks in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            outer = placement.outer if isinstance(placement, Interleaved) else 1
            if left[placement.dim] % (outer * ranks):
                return False
            left[placement.dim] //= ranks
    return True


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (3, 2)], ids=_name)
def test_rows_in_runs(sizes: tuple[int, ...]) -> None:
    """A flattened time and batch: redistributed from there, to there, and between axes that split one dim."""
    shape, runs = (36, 24), [Interleaved(0, 2), Interleaved(0, 3), Interleaved(0, 6), Interleaved(1, 4)]
    sources, targets = (list(product([*plain, *runs], repeat=len(sizes))) for plain in (SOURCES, TARGETS))
    found = [
        (source, target)
        for source, target in product(sources, targets)
        if any(p in runs for p in (*source, *target)) and _is_reachable(source, target)
        if runs_fit(shape, source, sizes) and runs_fit(shape, target, sizes)
    ]
    check_all(sizes, shape, random.Random(0).sample(found, min(len(found), SOME)))


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 2), (3, 2)], ids=_name)
def test_the_positions_of_parts_in_runs(sizes: tuple[int, ...]) -> None:
    """Random numbers are drawn by position: at the positions that a rank has, each once."""
    shape, candidates = (48, 2), [S0, *(Interleaved(0, outer) for outer in (2, 3, 4, 8))]
    whole = torch.arange(96).view(shape)
    tried = 0
    for placements in product(candidates, repeat=2):
        if not runs_fit(shape, placements, sizes):
            continue
        for at, part in scattered(whole, placements, sizes).items():
            try:
                lies = local_runs(shape, placements, mesh_at(sizes, at))
            except PartitionError:
                continue
            assert torch.equal(_Bits(0, lies)._positions(part) - 1, part)
            tried += 1
    assert tried > 12 * len(sizes)


def test_a_flattened_batch_is_gathered_and_scattered_once() -> None:
    for source, target, needed in ((S0, R, "all_gather"), (SUM, S0, "reduce_scatter")):
        source, target = (Interleaved(0, 2) if p == S0 else p for p in (source, target))
        assert collectives(emitted((2,), (0,), (8, 3), (source,), (target,))) == {needed: 1}
    assert collectives(emitted((2,), (0,), (8, 3), (R,), (Interleaved(0, 2),))) == {}


def test_nothing_to_do() -> None:
    for source in product(SOURCES, repeat=2):
        assert calls(emitted((2, 3), (1, 2), (5, 7), source, source)) == []


def test_one_rank_communicates_nothing() -> None:
    for source, target in pairs(1):
        assert calls(emitted((1,), (0,), (5, 7), source, target)) == []
    for source, target in pairs(2):
        if source[1] == target[1]:
            assert calls(emitted((1, 2), (0, 1), (5, 7), source, target)) == []


@pytest.mark.parametrize("shape", [(4, 6), (5, 7)], ids=_name)
@pytest.mark.parametrize("source, target, needed", [
    (S0, R, {"all_gather": 1}),
    (S1, R, {"all_gather": 1}),
    (SUM, S0, {"reduce_scatter": 1}),
    (SUM, S1, {"reduce_scatter": 1}),
    (SUM, R, {"all_reduce": 1}),
    (MAX, R, {"all_reduce": 1}),
    (MAX, S1, {"all_reduce": 1}),
    (R, S0, {}),
    (R, S1, {}),
    (R, SUM, {}),
], ids=str)  # fmt: skip
def test_collectives_along_one_axis(shape: Any, source: Placement, target: Placement, needed: dict[str, int]) -> None:
    assert collectives(emitted((2,), (0,), shape, (source,), (target,))) == needed


@pytest.mark.parametrize("shape, kind", [((4, 6), "all_to_all"), ((5, 6), "all_gather"), ((4, 7), "all_gather")])
def test_from_one_dim_to_another(shape: tuple[int, ...], kind: str) -> None:
    for source, target in ((S0, S1), (S1, S0)):
        assert collectives(emitted((2,), (1,), shape, (source,), (target,))) == {kind: 1}


@pytest.mark.parametrize("source, target, needed", [
    ((S0, S0), (R, R), {"all_gather": 2}),
    ((S0, S0), (S0, R), {"all_gather": 1}),
    ((R, R), (S0, S0), {}),
    ((SUM, SUM), (S0, S0), {"reduce_scatter": 2}),
    ((S0, SUM), (S0, S0), {"reduce_scatter": 1}),
    ((SUM, S1), (S0, S1), {"reduce_scatter": 1}),
    ((S0, S0), (S0, S1), {"all_to_all": 1}),
    ((S0, S0), (R, S0), {"all_gather": 2}),
    ((SUM, S0), (S0, S0), {"all_reduce": 1, "all_gather": 1}),
], ids=str)  # fmt: skip
def test_collectives_along_two_axes(source: Placements, target: Placements, needed: dict[str, int]) -> None:
    assert collectives(emitted((2, 2), (1, 0), (4, 8), source, target)) == needed


def test_little_is_communicated() -> None:
    """A value that can be cut before it is reduced is cut."""
    reduced = emitted((2, 2), (0, 0), (4, 8), (R, SUM), (S0, R))
    assert [tuple(n.meta["val"].shape) for n in calls(reduced) if is_collective(n)] == [(2, 8)]


# Costs


@pytest.mark.parametrize("axes", [1, 2])
def test_costs_are_those_of_the_nodes(axes: int) -> None:
    """Latency for every collective, and the time of the bytes that a rank sends; local work costs next to nothing."""
    for source, target in pairs(axes):
        nodes = calls(emitted((2,) * axes, (0,) * axes, (4, 8), source, target))
        moved = sum(UNMEASURED.seconds(_moved(node, ranks=2)) for node in nodes if is_collective(node))
        estimate = total_cost(source, target, 4 * 8 * 8, mesh_at((2,) * axes))
        assert moved <= estimate <= moved + 2 * UNMEASURED.per_byte, f"{source} -> {target}"
        assert (estimate == 0) == (not nodes), f"{source} -> {target}"


def _moved(node: fx.Node, ranks: int) -> float:
    most = max(input_bytes(node), output_bytes(node)) * (ranks - 1) / ranks
    return 2 * most if kind_of(node) is Kind.ALL_REDUCE else most


def test_costs_are_infinite_only_where_no_steps_lead() -> None:
    everything = [R, S0, S1, SUM, MAX]
    for source, target in product(product(everything, repeat=2), repeat=2):
        estimate = total_cost(source, target, 336.0, mesh_at((2, 2)))
        assert math.isinf(estimate) == (not _emits((2, 2), source, target)), f"{source} -> {target}"


def _emits(sizes: Sequence[int], source: Placements, target: Placements) -> bool:
    try:
        emitted(sizes, (0,) * len(sizes), (4, 6), source, target)
    except AssertionError as error:
        assert "no step from" in str(error)
        return False
    return True


def test_a_sum_is_split_only_where_that_is_allowed() -> None:
    (axis,) = mesh_at((2,)).axes
    assert math.isinf(cost(R, SUM, 8.0, axis))
    assert 0 < cost(R, SUM, 8.0, axis, may_become_sum=True) < UNMEASURED.per_byte


def test_along_an_axis_of_one_rank_all_is_free() -> None:
    for source, target in product(SOURCES, repeat=2):
        assert cost(source, target, 1e9, mesh_at((1,)).axes[0]) == 0
        assert total_cost((source, S0), (target, S0), 1e9, mesh_at((1, 2))) == 0
