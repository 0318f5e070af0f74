"""Planned memory: the bytes of small graphs, computed by hand, with an arena and without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import Phase, PlannedMemory, Program, Realise, Report, Role, UpdateInPlace, run

from ..programs import PLAN_MEMORY, all_gather, all_reduce, f64, make_program, reduce_scatter

aten = torch.ops.aten


def planned(program: Program, *passes: Any) -> PlannedMemory:
    (found,) = Report.of(run(program, passes)).memory.values()
    assert found.peak == sum(found.roles.values()) + found.unused
    return found


def held(memory: PlannedMemory) -> dict[str, int]:
    return {role: count for role, count in memory.roles.items() if count}


def with_roles(program: Program, *roles: Role) -> Program:
    """Inputs of these roles, and every op in forward."""
    program.inputs = [replace(declared, role=role) for declared, role in zip(program.inputs, roles, strict=True)]
    for node in program.graph.nodes:
        node.meta["phase"] = Phase.FORWARD
    return program


def products(x: Any) -> Any:
    a = aten.mm.default(x, x)
    b = aten.mm.default(a, a)
    return (aten.sum.default(aten.mm.default(b, b)),)


PASSES = pytest.mark.parametrize("passes", [(), PLAN_MEMORY], ids=["allocated", "planned"])


@PASSES
def test_two_values_of_a_chain_live_at_once(passes: Any) -> None:
    memory = planned(with_roles(make_program(products, x=f64(16, 16)), Role.BATCH), *passes)
    assert held(memory) == {"other": 2048, "activations": 4096} and memory.at == "mm"
    assert (memory.arena, memory.arena_used) == ((4096, 4096) if passes else (0, 0))
    assert memory.unused == (8 if passes else 0)  # the sum is allocated, when less is in use
    assert [(value.name, value.role, value.bytes, value.shape) for value in memory.largest] == [
        ("x", "other", 2048, (16, 16)),
        ("mm", "activations", 2048, (16, 16)),
        ("mm", "activations", 2048, (16, 16)),
    ]


@PASSES
def test_views_count_nothing_and_keep_what_they_show(passes: Any) -> None:
    def step(x: Any) -> Any:
        a = aten.mm.default(x, x)
        flat = aten.view.default(aten.t.default(aten.t.default(a)), [256])
        return (aten.sum.default(aten.mm.default(x, x)), aten.sum.default(flat))

    memory = planned(with_roles(make_program(step, x=f64(16, 16)), Role.BATCH), *passes)
    assert memory.roles["activations"] in (4096, 4096 + 8)


@PASSES
def test_an_op_without_an_out_variant_counts_with_each_of_its_results(passes: Any) -> None:
    def step(x: Any, w: Any) -> Any:
        normed = aten.native_layer_norm.default(x, [16], w, None, 1e-5)
        rows, mean, deviation = normed[0], normed[1], normed[2]
        both = aten.sum.default(aten.add.Tensor(mean, deviation))
        return (aten.add.Tensor(aten.sum.default(rows), both),)

    program = with_roles(make_program(step, x=f64(32, 16), w=f64(16)), Role.BATCH, Role.PARAMETER)
    memory = planned(program, *passes)
    results = 8 * (32 * 16 + 32 + 32)
    assert memory.roles["parameters"] == 128 and memory.roles["other"] == 4096
    assert memory.roles["activations"] == results + 8 * 32  # and their sum
    assert memory.peak - memory.arena == 128 + 4096 + results + (0 if passes else 8 * 32)


@PASSES
def test_a_gathered_parameter(passes: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        return (aten.sum.default(aten.mm.default(x, aten.t.default(all_gather(w)))),)

    program = make_program(step, {}, [Role.PARAMETER], w=f64(8, 16), x=f64(4, 16))
    memory = planned(with_roles(program, Role.PARAMETER, Role.BATCH), *passes)
    assert held(memory) == {"parameters": 1024, "gathered": 2048, "activations": 512, "other": 512}
    assert memory.at == "mm" and (memory.largest[0].name, memory.largest[0].role) == ("w", "gathered")


@PASSES
def test_a_gradient_is_one_from_the_op_that_computes_it(passes: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        grad = aten.view.default(aten.mm.default(aten.t.default(x), x), [256])
        return (aten.mul.Tensor(aten.view.default(reduce_scatter(grad), [8, 16]), w),)

    program = make_program(step, {0: "w"}, [Role.GRADIENT], w=f64(8, 16), x=f64(4, 16))
    memory = planned(with_roles(program, Role.PARAMETER, Role.BATCH), *passes)
    assert held(memory) == {"parameters": 1024, "gradients": 2048 + 1024, "other": 512}


def test_state_that_is_not_written_in_place_is_there_twice() -> None:
    def step(w: Any, m: Any) -> Any:
        return aten.mul.Tensor(w, 2), aten.mul.Tensor(m, 2)

    program = make_program(step, {0: "w", 1: "m"}, w=f64(16), m=f64(4))
    program = with_roles(program, Role.PARAMETER, Role.OPTIMIZER_STATE)
    roles = (Role.PARAMETER, Role.OPTIMIZER_STATE)
    program.outputs = [replace(output, role=role) for output, role in zip(program.outputs, roles, strict=True)]
    assert held(planned(program)) == {"parameters": 256, "optimizer state": 64}
    in_place = planned(program, UpdateInPlace())
    assert held(in_place) == {"parameters": 128, "optimizer state": 32} and in_place.unused == 0


def test_reshape_counts_where_it_has_to_copy() -> None:
    def step(x: Any) -> Any:
        seen = aten.reshape.default(x, [256])
        copied = aten.reshape.default(aten.t.default(x), [256])
        return (aten.add.Tensor(aten.sum.default(seen), aten.sum.default(copied)),)

    memory = planned(with_roles(make_program(step, x=f64(16, 16)), Role.BATCH))
    assert held(memory) == {"other": 2048, "activations": 2048 + 2 * 8}


def test_what_local_ranks_read_lives_until_all_have_read_it() -> None:
    """The memory that they read is planned by itself, and holds what ``ReuseMemory`` says it does."""

    def step(x: Any) -> Any:
        return (aten.sum.default(all_reduce(aten.mm.default(x, x))),)

    program = make_program(step, {}, [Role.GRADIENT], x=f64(16, 16))
    shared = [replace(axis, shared=True, backend="gloo") for axis in program.mesh.axes]
    program.mesh = replace(program.mesh, axes=tuple(shared))
    memory = Report.of(run(program, [Realise(), *PLAN_MEMORY])).memory
    published = memory["cpu, shared with local ranks"]
    assert held(published) == {"gradients": 2048} and published.peak == published.arena == published.arena_used == 2048
    assert memory["cpu"].roles["gradients"] == 2048
