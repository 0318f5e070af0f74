"""Realise, and the table that it chooses by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from passes import (
    Axis,
    Kind,
    Mesh,
    Pass,
    Program,
    Realise,
    Report,
    Role,
    StartEarly,
    Table,
    WaitLate,
    print_program,
    run,
)
from passes.analysis.collective_algorithms import ALGORITHMS, BUILT_IN, Algorithm, Link, Point
from passes.ir.collectives import c10d, group_of, kind_of

from ..programs import (
    GROUP,
    all_gather,
    all_reduce,
    assert_same_bits,
    before_and_after,
    f64,
    make_program,
    reduce_scatter,
    targets,
)

aten = torch.ops.aten


def only(*algorithms: Algorithm, size: int = 1) -> Table:
    """Everything by the first of these algorithms that can do it."""
    point = (Point(size, 0.0, 0.0),)
    first = {kind: next((each for each in algorithms if each in known), None) for kind, known in ALGORITHMS.items()}
    curves = {(kind, algorithm): point for kind, algorithm in first.items() if algorithm}
    return Table("only", (Link("gloo", "", 2, curves),))


def on_gloo(program: Program, rank: int = 0) -> Program:
    return replace(program.copy(), mesh=Mesh((Axis("dp", 2, GROUP, rank, "gloo"),)))


def on_both(program: Program, *pipeline: Pass) -> list[Program]:
    """The programs of two ranks after the passes; each rank has its own half."""
    return [run(on_gloo(program, rank), pipeline) for rank in range(2)]


def step(w: Any, v: Any, x: Any) -> Any:
    whole = all_gather(w)
    h = aten.mm.default(x, whole)
    grad_v = all_reduce(aten.sum.dim_IntList(h, [0]))
    grad_w = reduce_scatter(aten.mm.default(aten.t.default(x), h))
    return aten.sub.Tensor(w, grad_w), aten.sub.Tensor(v, grad_v)


ROLES = [Role.PARAMETER, Role.GRADIENT, Role.GRADIENT]


def test_realise(golden: Any) -> None:
    program = on_gloo(make_program(step, {0: "w", 1: "v"}, ROLES, w=f64(2, 4), v=f64(4), x=f64(3, 4)))
    realise = Realise(only(Algorithm.EXCHANGE, Algorithm.GATHER_BY_BROADCAST))
    golden(before_and_after(program, realise)[1])
    assert_same_bits(program, on_both(program, realise))


@pytest.mark.parametrize("algorithm", [Algorithm.GATHER_BY_BROADCAST, Algorithm.GATHER_BY_SENDING, Algorithm.NATIVE])
def test_every_algorithm_gives_the_same_bits_and_is_counted_once(algorithm: Algorithm) -> None:
    program = on_gloo(make_program(step, {0: "w", 1: "v"}, ROLES, w=f64(2, 4), v=f64(4), x=f64(3, 4)))
    after = on_both(program, Realise(only(algorithm, Algorithm.EXCHANGE)), StartEarly(), WaitLate())
    assert_same_bits(program, after)
    one, other = Report.of(program), Report.of(after[0])
    for kind in ("all_gather", "all_reduce", "reduce_scatter"):
        assert other.count(kind) == one.count(kind) == 1
        assert other.bytes(kind) == one.bytes(kind) > 0
    assert other.count("all_to_all") == 0


@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_whole_numbers_and_other_reductions(reduction: str) -> None:
    def reduce(x: Any) -> Any:
        return (reduce_scatter(x, reduction),)

    x = torch.zeros(4, 2, dtype=torch.int32)
    program = on_gloo(make_program(reduce, {}, [Role.RESULT], x=x))
    after = on_both(program, Realise(only(Algorithm.EXCHANGE)))
    assert targets(after[0])[1].startswith("spmd_transport.swap")
    assert_same_bits(program, after)


def test_four_ranks_are_summed_in_one_pass() -> None:
    mesh = Mesh((Axis("dp", 4, GROUP, 1, "gloo"),))
    program = make_program(lambda x: (reduce_scatter(x, ranks=4),), {}, [Role.GRADIENT], mesh, x=f64(12))
    after = run(program, [Realise(only(Algorithm.EXCHANGE))])
    assert "sum.dim_IntList" in targets(after)
    exchange = after.collectives()[0]
    assert tuple(exchange.meta["val"].shape) == (4, 3)


@pytest.mark.parametrize("other", [Axis("dp", 2, GROUP, backend="mpi"), Axis("dp", 2, GROUP)])
def test_other_backends_keep_their_ops(other: Axis) -> None:
    program = make_program(lambda x: (reduce_scatter(x),), {}, [Role.GRADIENT], x=f64(4))
    program.mesh = Mesh((other,))
    before = print_program(program)
    after = run(program, [Realise(only(Algorithm.EXCHANGE))])
    assert targets(after) == targets(program)
    assert after.history == ["02 Realise(table=Table('only'), backend=None): nothing to do"]
    assert print_program(program) == before
    assert targets(run(program, [Realise(only(Algorithm.EXCHANGE), backend="gloo")])) != targets(program)


def test_a_collective_without_a_wait_is_left_alone() -> None:
    program = on_gloo(make_program(lambda x: (all_reduce(x),), {}, [Role.GRADIENT], x=f64(4)))
    (started,) = program.collectives()
    with program.graph.inserting_before(started):
        program.graph.call_function(c10d.reduce_scatter_tensor.default, (started.args[0], "sum", 2, GROUP))
    program = Program.from_graph(program.graph_module, mesh=program.mesh)
    assert targets(run(program, [Realise(only(Algorithm.EXCHANGE))])) == targets(program)


def test_a_product_is_left_to_the_backend() -> None:
    program = on_gloo(make_program(lambda x: (reduce_scatter(x, "product"),), {}, [Role.RESULT], x=f64(4)))
    assert targets(run(program, [Realise(only(Algorithm.EXCHANGE))])) == targets(program)


def test_gathers_have_a_process_group_of_their_own_where_the_axis_has_one() -> None:
    def both(x: Any, y: Any) -> Any:
        return all_gather(x), reduce_scatter(y)

    made = make_program(both, {}, [Role.PARAMETER], x=f64(4), y=f64(4))
    mesh = Mesh((Axis("dp", 2, GROUP, 0, "nccl", gathers="of gathers"),))
    after = run(replace(made, mesh=mesh), [Realise()])
    assert [(kind_of(node), group_of(node)) for node in after.collectives()] == [
        (Kind.ALL_GATHER, "of gathers"),
        (Kind.REDUCE_SCATTER, GROUP),
    ]
    assert [mesh.axis_of_group(group_of(node)) for node in after.collectives()] == [mesh.axes[0]] * 2
    assert "2, dp_gathers)" in print_program(after)


def test_the_built_in_table_looks_at_kind_and_size() -> None:
    def both(x: Any, y: Any) -> Any:
        return all_reduce(x), reduce_scatter(y)

    program = on_gloo(make_program(both, {}, [Role.GRADIENT], x=f64(64), y=f64(500_000)))
    after = run(program, [Realise()])
    assert [str(node.target) for node in after.collectives()] == [
        "_c10d_functional.all_reduce.default",
        "spmd_transport.swap.default",
    ]


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    table = replace(BUILT_IN, compute={"matmul float32": 5e10})
    table.write(tmp_path / "costs.json")
    again = Table.read(tmp_path / "costs.json")
    assert replace(again, name=table.name) == table
    assert repr(again) == "Table('costs.json')"


def test_a_file_that_calls_an_algorithm_a_way_is_read(tmp_path: Path) -> None:
    BUILT_IN.write(tmp_path / "new.json")
    written = (tmp_path / "new.json").read_text()
    assert '"algorithm": "exchange"' in written
    (tmp_path / "old.json").write_text(written.replace('"algorithm":', '"way":'))
    assert Table.read(tmp_path / "old.json").links == BUILT_IN.links


@pytest.mark.parametrize("text", ["", "[]", '{"links": []}', '{"links": [{"costs": []}], "compute": {}}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=r"expected .*costs\.json to be a table of costs"):
        Table.read(tmp_path / "costs.json")


def test_costs_are_interpolated_linearly() -> None:
    key = Kind.ALL_GATHER, Algorithm.NATIVE
    link = Link("gloo", "dp", 2, {key: (Point(100, 1.0, 1.0), Point(300, 3.0, 3.0))})
    assert [link.cost(*key, size) for size in (10, 100, 200, 300, 600)] == [2.0, 2.0, 4.0, 6.0, 12.0]
    assert link.cost(Kind.ALL_GATHER, Algorithm.GATHER_BY_SENDING, 10) is None
    assert link.cheapest(Kind.ALL_REDUCE, 10, ALGORITHMS[Kind.ALL_REDUCE]) is Algorithm.NATIVE
    assert link.cheapest(Kind.ALL_GATHER, 10, (Algorithm.GATHER_BY_SENDING, Algorithm.NATIVE)) is Algorithm.NATIVE


def test_the_nearest_link_is_taken() -> None:
    links = tuple(Link(*each, {}) for each in (("gloo", "", 2), ("gloo", "", 8), ("gloo", "tp", 2), ("nccl", "", 4)))
    table = Table("many", links)
    assert table.link(Axis("dp", 6, "0"), "gloo") is links[1]
    assert table.link(Axis("tp", 8, "0"), "gloo") is links[2]
    assert table.link(Axis("dp", 2, "0"), "mpi") is None
