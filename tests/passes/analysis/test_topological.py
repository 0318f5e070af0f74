"""Putting nodes into another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes import Program
from passes.analysis.topological import positions, settle

from ..programs import f64, make_program

aten = torch.ops.aten


def program() -> Program:
    def step(x: Any) -> Any:
        a = aten.neg.default(x)
        b = aten.exp.default(x)
        c = aten.sin.default(a)
        return aten.add.Tensor(b, c), aten.cos.default(x)

    return make_program(step, x=f64(2))


def order(program: Program) -> str:
    return " ".join(node.name for node in program.graph.nodes if node.op == "call_function")


def named(program: Program, name: str) -> torch.fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def test_an_order_that_holds_stays() -> None:
    given = program()
    settle(given.graph)
    assert order(given) == "neg exp sin add cos"


def test_what_is_needed_earlier_is_pulled_up() -> None:
    given = program()
    named(given, "exp").update_arg(0, named(given, "cos"))
    settle(given.graph)
    assert order(given) == "neg cos exp sin add"
    given.graph.lint()


def test_late_nodes_go_to_their_first_reader() -> None:
    given = program()
    late = {named(given, "neg"), named(given, "exp")}
    before = positions(given.graph, late)
    settle(given.graph, late)
    assert order(given) == "neg sin exp add cos"
    after = positions(given.graph, late)
    assert [node.name for node in late if before[node] != after[node]] == ["exp"]


def test_a_cycle_raises() -> None:
    given = program()
    named(given, "neg").update_arg(0, named(given, "sin"))
    with pytest.raises(AssertionError, match="depends on itself"):
        settle(given.graph)
