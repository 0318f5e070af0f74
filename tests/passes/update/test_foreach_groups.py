"""Groups of structurally equal ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from passes import Phase, Program
from passes.update.foreach_groups import groups, in_a_row, over_lists

from ..programs import f64, make_program
from .test_fuse_update import described

aten = torch.ops.aten


def updating(update: Callable[..., Any], other: Callable[..., Any] | None = None, size: int = 3) -> Program:
    """Two parameters, w and b, updated from x and y."""

    def step(w: Any, b: Any, x: Any, y: Any) -> Any:
        return update(w, x), (other or update)(b, y)

    program = described(make_program(step, {0: "w", 1: "b"}, w=f64(3), b=f64(size), x=f64(3), y=f64(size)))
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta["phase"] = Phase.UPDATE
    return program


def names(program: Program, max_elements: int = 100) -> list[list[str]]:
    return [[node.name for node in group] for group in groups(program, max_elements)]


def step_of(p: Any, g: Any) -> Any:
    return aten.sub.Tensor(p, aten.mul.Tensor(g, 0.1))


def test_the_same_ops_on_structurally_equal_operands() -> None:
    assert names(updating(step_of)) == [["mul", "mul_1"], ["sub", "sub_1"]]
    assert names(updating(step_of, size=7)) == [["mul", "mul_1"], ["sub", "sub_1"]], "shapes may differ"


@pytest.mark.parametrize("other", [
    lambda p, g: aten.sub.Tensor(p, aten.mul.Tensor(g, 0.2)),  # another number
    lambda p, g: aten.sub.Tensor(p, aten.mul.Tensor(g, 1)),  # a number of another type
    lambda p, g: aten.sub.Tensor(p, aten.mul.Tensor(g, 0.1), alpha=2),
    lambda p, g: aten.sub.Tensor(aten.mul.Tensor(g, 0.1), p),
])  # fmt: skip
def test_what_differs_is_in_no_group(other: Callable[..., Any]) -> None:
    assert not any("sub" in name for group in names(updating(step_of, other)) for name in group)


def test_units_are_apart() -> None:
    program = updating(step_of)
    program.units = (("w",), ("b",))
    assert names(program) == []


def test_large_parameters_are_left_alone() -> None:
    program = updating(step_of, size=8)
    assert names(program, max_elements=7) == [] and names(program, max_elements=8) != []


def test_only_what_is_an_update_of_a_parameter() -> None:
    program = updating(step_of)
    for node in program.graph.nodes:
        node.meta.pop("phase", None)
    assert names(program) == []


def test_a_group_follows_those_that_it_depends_on() -> None:
    """``new`` of the first leads to the second: their ops have the same structure, but not the same depth."""

    def step(w: Any, b: Any, x: Any) -> Any:
        new = aten.add.Tensor(w, aten.sqrt.default(x))
        return new, aten.add.Tensor(b, aten.sqrt.default(aten.mul.Tensor(new, x)))

    program = described(make_program(step, {0: "w", 1: "b"}, w=f64(3), b=f64(3), x=f64(3)))
    for node in program.graph.nodes:
        node.meta["phase"] = Phase.UPDATE
    assert names(program) == []


def called(function: Callable[..., Any], **inputs: Any) -> fx.Node:
    """The node of a call with one or two inputs."""
    one, two = (lambda x: (function(x),)), (lambda x, y: (function(x, y),))
    (node,) = make_program(one if len(inputs) == 1 else two, **inputs).output_values()
    assert isinstance(node, fx.Node)
    return node


@pytest.mark.parametrize("function, inputs, op", [
    (aten.mul.Tensor, {"x": f64(3), "y": f64(3)}, aten._foreach_mul.List),
    (lambda x: aten.mul.Tensor(x, 2), {"x": f64(3)}, aten._foreach_mul.Scalar),
    (aten.sqrt.default, {"x": f64(3)}, aten._foreach_sqrt.default),
    (lambda x: aten.pow.Tensor_Scalar(x, 2), {"x": f64(3)}, aten._foreach_pow.Scalar),
    (lambda x: aten.add.Tensor(x, 2, alpha=3), {"x": f64(3)}, None),  # no list op has both
    (lambda x: aten.sum.default(x), {"x": f64(3)}, None),
])  # fmt: skip
def test_the_op_over_lists(function: Callable[..., Any], inputs: dict[str, Any], op: Any) -> None:
    assert over_lists(called(function, **inputs)) is op


@pytest.mark.parametrize("function, shape, row", [
    (lambda x: aten.mul.Tensor(x, 2), (), True),
    (lambda x: aten._to_copy.default(x, dtype=torch.float32), (), True),
    (lambda x: aten.mul.Tensor(x, 2), (3,), False),
    (lambda x: aten.sum.default(x), (), False),
    (lambda x: aten.stack.default([x, x]), (), False),
])  # fmt: skip
def test_numbers_in_a_row(function: Callable[..., Any], shape: tuple[int, ...], row: bool) -> None:
    assert in_a_row(called(function, x=f64(*shape))) is row
