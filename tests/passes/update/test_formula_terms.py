"""Terms: formulas matched against nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from passes.update.formula_terms import Term, lerp, maximum, solutions, sqrt, unknown

from ..programs import f64, make_program

aten = torch.ops.aten

p, q, r = unknown("p"), unknown("q"), unknown("r")


def match(formula: Any, value: Any, rounded: bool = False, **bound: Any) -> list[dict[str, Any]]:
    """All bindings, by the names of nodes; ``value`` is a function of the inputs p, q and r and of a count n."""
    program = make_program(
        lambda p, q, r, n, lr: (value(p, q, r, n, lr),), p=f64(3), q=f64(3), r=f64(3), n=torch.empty(()), lr=0.5
    )
    (computed,) = program.output_values()
    nodes = {node.name: node for node in program.placeholders}
    found = {name: nodes.get(node, node) for name, node in bound.items()}
    scalars = [node for node in program.graph.nodes if rounded]
    return [
        {name: each.name if isinstance(each, fx.Node) else each for name, each in bindings.items()}
        for bindings in solutions(formula, computed, found, lambda name, value: True, scalars)
    ]


def test_an_unknown_is_bound_to_the_value_at_its_position() -> None:
    assert match(p - q, lambda p, q, r, n, lr: aten.sub.Tensor(q, p)) == [{"p": "q", "q": "p"}]


def test_a_bound_unknown_matches_that_value_only() -> None:
    assert match(p - q, lambda p, q, r, n, lr: aten.sub.Tensor(q, p), p="p") == []
    assert match(p * p, lambda p, q, r, n, lr: aten.mul.Tensor(q, p)) == []
    assert match(p * p, lambda p, q, r, n, lr: aten.mul.Tensor(q, q)) == [{"p": "q"}] * 2, "in either order"


@pytest.mark.parametrize("formula, ways", [(p + q, 2), (p * q, 2), (maximum(p, q), 2), (p - q, 1), (p / q, 1)])
def test_operands_commute_where_the_operation_does(formula: Term, ways: int) -> None:
    ops = {"add": aten.add.Tensor, "mul": aten.mul.Tensor, "maximum": aten.maximum.default}
    op = ops | {"sub": aten.sub.Tensor, "div": aten.div.Tensor}
    assert len(match(formula, lambda p, q, r, n, lr: op[formula.op](p, q))) == ways


EQUAL = {
    "alpha": (p + r * q, lambda p, q, r, n, lr: aten.add.Tensor(p, q, alpha=0.5)),
    "addcmul": (p + q * q * r, lambda p, q, r, n, lr: aten.addcmul.default(p, q, q, value=0.5)),
    "addcdiv": (p + q / r, lambda p, q, r, n, lr: aten.addcdiv.default(p, q, r)),
    "reciprocal": (q / p, lambda p, q, r, n, lr: aten.mul.Tensor(aten.reciprocal.default(p), q)),
    "rsub": (1 - p, lambda p, q, r, n, lr: aten.rsub.Scalar(p, 1)),
    "power": (sqrt(p) * (q * q), lambda p, q, r, n, lr: aten.mul.Tensor(
        aten.pow.Tensor_Scalar(p, 0.5), aten.pow.Tensor_Scalar(q, 2))),
    "lerp": (lerp(p, q, r), lambda p, q, r, n, lr: aten.lerp.Scalar(p, q, 0.1)),
    "overwritten": (p + q, lambda p, q, r, n, lr: aten.copy.default(r, aten.add.Tensor(p, q))),
    "cast": (p * r, lambda p, q, r, n, lr: aten.mul.Tensor(p, aten._to_copy.default(q, dtype=torch.float64))),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_up_to_rounding_matches(name: str) -> None:
    assert match(*EQUAL[name])


DIFFERENT = {
    "operation": (p + q, lambda p, q, r, n, lr: aten.sub.Tensor(p, q)),
    "constant": (p * 2, lambda p, q, r, n, lr: aten.mul.Tensor(p, 3)),
    "half": (p + q, lambda p, q, r, n, lr: aten._to_copy.default(aten.add.Tensor(p, q), dtype=torch.bfloat16)),
    "option": (p / q, lambda p, q, r, n, lr: aten.div.Tensor_mode(p, q, rounding_mode="floor")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_does_not(name: str) -> None:
    assert match(*DIFFERENT[name]) == []


def test_numbers_that_were_computed_are_inverted() -> None:
    """``1 - beta`` and ``-rate`` are numbers in a graph; the unknown is what they were computed from."""
    assert match(p * (1 - q), lambda p, q, r, n, lr: aten.mul.Tensor(p, 0.25)) == [{"p": "p", "q": 0.75}]
    assert match(p * -q, lambda p, q, r, n, lr: aten.mul.Tensor(p, -0.5)) == [{"p": "p", "q": 0.5}]


def test_a_scalar_that_is_rounded_is_matched_as_a_whole_unless_that_is_allowed() -> None:
    assert match(p + 1, lambda p, q, r, n, lr: aten.add.Tensor(n, 1)) == []
    assert match(p + 1, lambda p, q, r, n, lr: aten.add.Tensor(n, 1), rounded=True) == [{"p": "n"}]
    (bindings,) = match(p, lambda p, q, r, n, lr: aten.add.Tensor(n, 1))
    assert bindings == {"p": "add"}


def test_unknowns_that_may_not_be_bound() -> None:
    program = make_program(lambda p, q: (aten.add.Tensor(p, q),), p=f64(3), q=f64(3))
    (computed,) = program.output_values()
    first, _ = program.placeholders
    found = list(solutions(p + q, computed, {}, lambda name, value: name == "q" or value is first, ()))
    assert [each["p"] for each in found] == [first]
