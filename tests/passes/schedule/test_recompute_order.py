"""What is computed again first: what takes the fewest seconds for its bytes, also when ops lean on each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import fx

from passes import Phase, Program, Role
from passes.schedule.node_costs import Cost
from passes.schedule.recompute_order import recompute_order

from ..programs import f64, make_program

aten = torch.ops.aten


class ByName:
    """Costs by the name of a node."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds

    def of(self, node: fx.Node) -> Cost:
        return Cost(compute=self._seconds[node.name])


def step(w: Any, x: Any) -> Any:
    """Four values that backward reads: (4, 4) each, but for one of twice as many rows."""
    a = aten.tanh.default(x)
    b = aten.exp.default(a)
    c = aten.mm.default(x, w)
    d = aten.cat.default([x, x])
    y = aten.sum.default(b)
    return y, aten.add.Tensor(aten.mul.Tensor(a, b), c), aten.mul.Tensor(d, 2.0)


def program_of() -> Program:
    program = make_program(step, {}, [Role.ACTIVATION], w=f64(4, 4), x=f64(4, 4))
    phase = Phase.FORWARD
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta["phase"] = phase
            phase = Phase.BACKWARD if node.target is aten.sum.default else phase
    return program


@pytest.mark.parametrize(("seconds", "order"), [
    ((1, 2, 5, 12), ["tanh", "exp", "mm", "cat"]),
    ((1, 2, 5, 3), ["tanh", "cat", "exp", "mm"]),  # 3 s for twice the bytes
    ((3, 1, 5, 12), ["exp", "tanh", "mm", "cat"]),  # tanh is kept, so that exp alone runs again
    ((4, 1, 4.5, 12), ["exp", "tanh", "mm", "cat"]),
])  # fmt: skip
def test_the_fewest_seconds_for_a_byte_come_first(seconds: tuple[float, ...], order: list[str]) -> None:
    costs = ByName(dict(zip(("tanh", "exp", "mm", "cat"), seconds, strict=True)))
    assert recompute_order(program_of(), costs) == order  # type: ignore[arg-type]


def test_what_became_dearer_is_looked_at_anew() -> None:
    """Without tanh, exp takes both: 1 + 3 s; once tanh runs again anyway, that is no longer its price."""
    costs = ByName({"tanh": 1, "exp": 3, "mm": 3.5, "cat": 20})
    assert recompute_order(program_of(), costs) == ["tanh", "exp", "mm", "cat"]  # type: ignore[arg-type]
