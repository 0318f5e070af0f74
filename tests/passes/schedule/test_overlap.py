"""Overlap: what is held back behind which collective, and when all stays as it was.

A product takes a second, and so does nothing else but collectives, which take as long as the test says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from passes import Axis, Mesh, Overlap, Program, Realise, Role, Table, run
from passes.analysis.collective_algorithms import Algorithm
from passes.schedule.node_costs import NodeCosts
from passes.schedule.rates import Rates, rates_of
from passes.schedule.simulation import simulate

from ..programs import GROUP, all_reduce, assert_same_bits, before_and_after, f64, make_program
from .test_simulation import COMPUTE, ROWS, link

aten = torch.ops.aten
mm = aten.mm.default


def table(seconds: float, algorithm: Algorithm = Algorithm.NATIVE) -> Table:
    """Collectives take so long."""
    return Table("by hand", (link(seconds, algorithm=algorithm),), COMPUTE)


def program_of(step: Callable[..., tuple[Any, ...]], shared: bool = False, ranks: int = 2) -> Program:
    """The program of a function of three matrices, on so many ranks."""
    program = make_program(step, {}, [Role.ACTIVATION], w=f64(ROWS, ROWS), x=f64(ROWS, ROWS), g=f64(ROWS, ROWS))
    program.mesh = Mesh((Axis("dp", ranks, GROUP, backend="gloo", shared=shared),))
    return program


def backward(w: Any, x: Any, g: Any) -> tuple[Any, ...]:
    """The gradients of a weight and of an activation; the second one is a sum over ranks."""
    of_weight = mm(x, g)
    return aten.exp.default(all_reduce(mm(g, w))), of_weight


def seconds(program: Program, costs: Table) -> float:
    return simulate(program, NodeCosts(program, Rates(COMPUTE), costs)).seconds


def order_of(program: Program) -> list[str]:
    return [node.name for node in program.graph.nodes if node.op == "call_function"]


def test_overlap(golden: Any) -> None:
    program, costs = program_of(backward), table(3.0)
    after, text = before_and_after(program, Overlap(costs))
    golden(text)
    assert_same_bits(program, after)
    assert after.history == ["02 Overlap(table=Table('by hand')): 1 edit"]
    assert (seconds(program, costs), seconds(after, costs)) == (5.0, 4.0)


def test_no_more_is_held_back_than_compute_waits_for() -> None:
    def step(w: Any, x: Any, g: Any) -> tuple[Any, ...]:
        early, late = mm(x, g), mm(x, x)
        return all_reduce(mm(g, w)), early, late

    def behind(wait: float) -> list[str]:
        names = order_of(run(program_of(step), [Overlap(table(wait))]))
        return [name for name in names if names.index(name) > names.index("all_reduce") and name != "wait_tensor"]

    assert behind(0.5) == behind(1.0) == ["mm_1"]  # the nearest
    assert behind(1.5) == ["mm", "mm_1"]


def test_what_one_wait_is_filled_with_is_not_taken_for_the_next() -> None:
    def step(w: Any, x: Any, g: Any) -> tuple[Any, ...]:
        other = mm(x, g)
        once = all_reduce(mm(g, w))
        return all_reduce(mm(once, w)), other

    program, costs = program_of(step), table(3.0)
    after = run(program, [Overlap(costs)])
    assert order_of(after)[:4] == ["mm_1", "all_reduce", "mm", "wait_tensor"]
    assert (seconds(program, costs), seconds(after, costs)) == (9.0, 8.0)


def test_what_is_read_before_the_start_stays() -> None:
    def step(w: Any, x: Any, g: Any) -> tuple[Any, ...]:
        other = all_reduce(mm(x, g))  # collectives keep their order
        return all_reduce(mm(g, w)), other

    program = program_of(step)
    assert order_of(run(program, [Overlap(table(3.0))])) == order_of(program)


def test_nothing_moves_where_memory_would_grow() -> None:
    def step(w: Any, x: Any, g: Any) -> tuple[Any, ...]:
        small = aten.sum.default(mm(aten.exp.default(x), g))  # the exponential would have to stay, or to come later
        return aten.exp.default(all_reduce(mm(g, w))), small

    program = program_of(step)
    assert order_of(run(program, [Overlap(table(3.0))])) == order_of(program)


def test_the_search_ends_at_what_is_not_known() -> None:
    def step(w: Any, x: Any, g: Any) -> tuple[Any, ...]:
        other = mm(x, g)
        return all_reduce(mm(g, w)), other, x.numel()  # a method may do anything

    program = program_of(step)
    numel = next(node for node in program.graph.nodes if node.op == "call_method")
    next(node for node in program.graph.nodes if node.name == "mm").append(numel)
    assert order_of(run(program, [Overlap(table(3.0))])) == ["mm", "mm_1", "all_reduce", "wait_tensor"]


def test_less_than_a_hundredth_of_the_step_is_not_worth_it() -> None:
    assert run(program_of(backward), [Overlap(table(0.01))]).history[-1].endswith("nothing to do")
    assert run(program_of(backward), [Overlap(table(0.04))]).history[-1].endswith("1 edit")


@pytest.mark.parametrize("ranks", [2, 3])
def test_through_shared_memory_nothing_moves(ranks: int) -> None:
    """Of three ranks each reduces a part, in memory that is only known to be read by the others."""
    costs = table(3.0, Algorithm.SHARED)
    after = run(program_of(backward, shared=True, ranks=ranks), [Realise(costs), Overlap(costs)])
    assert "1 edit" in after.history[0] and after.history[1].endswith("nothing to do")


@pytest.mark.parametrize("rows", [ROWS, ROWS + 1])
def test_nothing_moves_where_ranks_hold_unequal_parts(rows: int) -> None:
    program = program_of(backward)
    program.inputs[0] = replace(program.inputs[0], shape=(rows, ROWS), placement=(Shard(0),))
    moved = run(program, [Overlap(table(3.0))], check=False).history[-1]
    assert moved.endswith("1 edit" if rows == ROWS else "nothing to do")


def test_costs_that_one_rank_alone_knows_decide_nothing() -> None:
    assert rates_of(Table("", ()), torch.device("cuda"), Mesh(), knows_gpu=False) is None
    assert rates_of(Table("", (), COMPUTE), torch.device("cuda"), Mesh(), knows_gpu=False) is not None
