"""Matches of updates with kernels, and their groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import Program, Role
from passes.update.match_optimizers import groups, matches

from ..programs import f64, make_program
from .test_fuse_update import adamw_program, both, described

aten = torch.ops.aten


def names(program: Program) -> list[list[str]]:
    """The parameters of each group."""
    return [[match.parameter.name for match in group] for group in groups(program)]


def test_what_a_match_binds() -> None:
    program = adamw_program(both)
    inputs = {node.name: node for node in program.placeholders}
    first, second = matches(program)
    assert first.kernel.op is second.kernel.op is aten._fused_adamw.default
    assert (first.parameter.name, second.parameter.name) == ("w", "b")
    bound = {name: first.found[name] for name in ("p", "mean", "square", "step", "lr", "beta1", "eps", "decay")}
    expected = ["w", "m_w", "v_w", "n_w", "lr", "beta1", "eps", "decay"]
    assert bound == dict(zip(bound, map(inputs.__getitem__, expected), strict=True))
    assert first.found["g"] is program.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0].prev
    assert first.unless is None


def test_new_values_are_those_that_are_returned() -> None:
    program = adamw_program(both)
    first, _ = matches(program)
    assert list(first.new.values()) == list(program.output_values()[:4])


def test_a_skipped_step_is_selected_by_its_condition() -> None:
    def body(update: Any, w: Any, b: Any, x: Any, y: Any, *state: Any) -> Any:
        skip = aten.gt.Scalar(aten.sum.default(x), 0.0)
        old, new = (w, *state[:3], b, *state[3:]), both(update, w, b, x, y)
        return tuple(aten.where.self(skip, aten.clone.default(a), z) for a, z in zip(old, new, strict=True))

    program = adamw_program(body)
    first, second = matches(program)
    (condition,) = program.graph.find_nodes(op="call_function", target=aten.gt.Scalar)
    assert first.unless is second.unless is condition
    assert first.new["p"].target is aten.where.self and first.new["step"].target is aten.add.Tensor


@pytest.mark.parametrize("wrong", ["role", "shape", "state", "dtype"])
def test_what_is_no_match(wrong: str) -> None:
    def step(w: Any, x: Any) -> Any:
        new = aten.add.Tensor(w, aten.mul.Tensor(x, -0.1))
        return (aten.sin.default(new) if wrong == "state" else new,)

    w = torch.empty(3, dtype=torch.complex64) if wrong == "dtype" else f64(3)
    x = torch.empty(3, dtype=torch.complex64) if wrong == "dtype" else f64(*((1,) if wrong == "shape" else (3,)))
    program = described(make_program(step, {0: "w"}, w=w, x=x))
    if wrong == "role":
        program.inputs = [replace(each, role=Role.BUFFER) for each in program.inputs]
    assert matches(program) == []


def test_updates_of_one_unit_with_the_same_numbers_are_a_group() -> None:
    program = adamw_program(both)
    assert names(program) == [["w", "b"]]
    program.units = (("b",), ("w",))
    assert names(program) == [["w"], ["b"]]
    assert names(adamw_program(lambda up, w, b, x, y, *_: (*up(w, x), *up(b, y, 0.5)))) == [["w"], ["b"]]


def test_groups_are_in_the_order_of_their_gradients() -> None:
    def body(update: Any, w: Any, b: Any, x: Any, y: Any, *_: Any) -> Any:
        late, early = aten.neg.default(aten.neg.default(x)), y
        second = update(b, early, 0.5)
        return *update(w, late), *second

    assert names(adamw_program(body)) == [["b"], ["w"]]


def test_an_update_that_depends_on_another_is_in_a_later_group() -> None:
    def body(update: Any, w: Any, b: Any, x: Any, y: Any, *_: Any) -> Any:
        first = update(w, x)
        return *first, *update(b, aten.sum.dim_IntList(first[0], [0]))

    assert names(adamw_program(body)) == [["w"], ["b"]]
