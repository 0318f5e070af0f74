"""UpdateLast."""

from __future__ import annotations

from typing import Any

import torch

from passes import Phase, Role, UpdateLast

from ..programs import all_reduce, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten


def in_update(program: Any, *names: str) -> Any:
    """Mark nodes as parts of the update."""
    for node in program.graph.nodes:
        if node.name in names:
            node.meta["phase"] = Phase.UPDATE
    return program


def test_update_last(golden: Any) -> None:
    def step(w: Any, b: Any, x: Any) -> Any:
        weight = aten.sub.Tensor(w, all_reduce(aten.mm.default(x, x)))
        scaled = aten.mul.Tensor(b, 0.5)
        bias = aten.sub.Tensor(scaled, all_reduce(aten.exp.default(x)))
        loss = all_reduce(aten.sum.default(x))
        return loss, weight, bias

    program = make_program(
        step, {1: "w", 2: "b"}, [Role.GRADIENT, Role.GRADIENT, Role.RESULT], w=f64(3, 3), b=f64(3, 3), x=f64(3, 3)
    )
    program = in_update(program, "sub", "mul", "sub_1")
    after, text = before_and_after(program, UpdateLast())
    golden(text)
    assert_same_bits(program, after)


def test_a_collective_of_a_new_value_moves_along() -> None:
    """As the gather of a parameter of which each rank has updated a part, with its momentum."""

    def step(w: Any, m: Any, x: Any) -> Any:
        momentum = aten.add.Tensor(m, all_reduce(aten.mm.default(x, x)))
        gathered = all_reduce(momentum)
        loss = all_reduce(aten.sum.default(x))
        return loss, gathered, momentum

    roles = [Role.GRADIENT, Role.PARAMETER, Role.RESULT]
    program = make_program(step, {1: "w", 2: "m"}, roles, w=f64(3, 3), m=f64(3, 3), x=f64(3, 3))
    in_update(program, "add")
    assert UpdateLast().rewrite(program) > 0
    order = [node.name for node in program.graph.nodes]
    assert order.index("wait_tensor_2") < order.index("add") < order.index("wait_tensor_1")


def test_without_collectives_nothing_moves() -> None:
    def step(w: Any, x: Any) -> Any:
        return aten.sub.Tensor(w, x), aten.sum.default(x)

    program = in_update(make_program(step, {0: "w"}, [], w=f64(3), x=f64(3)), "sub")
    assert UpdateLast().rewrite(program) == 0
