"""ReduceInPlace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import Pass, Program, Realise, ReduceInPlace, Role, StartEarly, run
from passes.analysis.collective_algorithms import Algorithm
from passes.communication.published import reduces_in_place
from passes.runtime.arena import reserve

from ..communication.test_realise import only
from ..programs import MESH, PLAN_MEMORY, all_reduce, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten
SHARED = Realise(only(Algorithm.SHARED, Algorithm.NATIVE))
ANY = ReduceInPlace(min_bytes=1)
GRADIENT = 513 * 4 * 8  # bytes


def shared(step: Callable[..., tuple[Any, ...]], ranks: int = 2) -> Program:
    """A program of ``ranks`` on one host."""
    program = make_program(step, {}, [Role.GRADIENT], x=f64(513, 4))
    program.mesh = replace(MESH, axes=(replace(MESH.axes[0], size=ranks, shared=True, backend="gloo"),))
    return program


def total(x: Any) -> tuple[Any, ...]:
    return (aten.sum.default(all_reduce(aten.exp.default(x))),)


def read_later(x: Any) -> tuple[Any, ...]:
    grad = aten.exp.default(x)
    return aten.sum.default(all_reduce(grad)), aten.sum.default(aten.t.default(grad))


def returned(x: Any) -> tuple[Any, ...]:
    return (all_reduce(aten.exp.default(x)),)


def are_in_place(program: Program) -> list[bool]:
    return [reduces_in_place(node) for node in program.collectives()]


def planned(program: Program, *passes: Pass) -> Program:
    return run(program, [SHARED, *passes, *PLAN_MEMORY])


def test_reduce_in_place(golden: Any) -> None:
    _, text = before_and_after(run(shared(total), [SHARED]), ANY, *PLAN_MEMORY)
    golden(text)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gradient_takes_its_memory_once(ranks: int) -> None:
    def bytes_of(program: Program) -> int:
        return sum(node.args[0] for node in program.graph.find_nodes(op="call_function", target=reserve))

    before = shared(total, ranks)
    after = planned(before, ANY)
    assert are_in_place(after) == [True]
    assert_same_bits(before, after, ranks)
    assert GRADIENT <= bytes_of(after) < 1.1 * GRADIENT and bytes_of(planned(before)) >= 2 * GRADIENT


def of_a_norm(x: Any) -> tuple[Any, ...]:
    """Three gradients of one op: two are reduced, and the third is read later."""
    weight, statistic = aten.exp.default(aten.sum.dim_IntList(x, [0])), aten.sum.dim_IntList(x, [1], True)
    mask = [True, True, True]
    found = aten.native_layer_norm_backward.default(
        x, aten.exp.default(x), [4], statistic, statistic, weight, weight, mask
    )
    both = [aten.reshape.default(each, [-1]) for each in (found[1], found[2], aten.sin.default(x))]
    reduced = all_reduce(aten.cat.default(both))
    return aten.sum.default(reduced), aten.sum.default(found[0])


def test_other_results_of_the_op_may_be_read_later() -> None:
    before = shared(of_a_norm)
    after = planned(before, ANY)
    assert are_in_place(after) == [True]
    assert_same_bits(before, after)


@pytest.mark.parametrize("step", [read_later, returned])
def test_others_are_read_whole(step: Callable[..., Any]) -> None:
    before = shared(step)
    after = planned(before, ANY)
    assert are_in_place(after) == [False]
    assert_same_bits(before, after)


def test_nothing_may_move_a_start_before_a_reader_of_its_operand_afterwards() -> None:
    with pytest.raises(ValueError, match=r"must be the last pass, but StartEarly comes after it"):
        run(shared(read_later), [SHARED, ANY, StartEarly()])


def test_so_are_small_ones_and_those_of_other_algorithms() -> None:
    assert are_in_place(planned(shared(total), ReduceInPlace(min_bytes=GRADIENT + 1))) == [False]
    assert are_in_place(planned(shared(total), ReduceInPlace(min_bytes=GRADIENT))) == [True]
    native = run(shared(total), [ANY])
    assert [node.target for node in native.collectives()] == [node.target for node in shared(total).collectives()]
