"""WaitLate."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from passes import Realise, Role, StartEarly, WaitLate, run
from passes.ir.collectives import WAIT

from ..programs import all_reduce, assert_same_bits, before_and_after, f64, make_program, reduce_scatter

aten = torch.ops.aten


def test_wait_late(golden: Any) -> None:
    def step(w: Any, b: Any, x: Any) -> Any:
        loss = all_reduce(aten.sum.default(x))
        grad = aten.view.default(all_reduce(aten.mm.default(x, x)), [9])  # unpacked
        y = aten.exp.default(x)
        return loss, aten.sub.Tensor(w, grad), aten.sub.Tensor(b, y)

    program = make_program(step, {1: "w", 2: "b"}, [Role.RESULT, Role.GRADIENT], w=f64(9), b=f64(3, 3), x=f64(3, 3))
    after, text = before_and_after(program, StartEarly(), WaitLate())
    golden(text)
    assert_same_bits(program, after)
    assert after.history[1] == "03 WaitLate: 2 edits"


def test_what_completes_a_reduction_is_waited_for_late_as_well() -> None:
    """By messages a reduce_scatter is an exchange and a sum, and its members are unpacked right behind."""

    def step(w: Any, g: Any, x: Any) -> Any:
        grad = aten.view.default(reduce_scatter(aten.mm.default(g, g)), [2, 4])
        y = aten.exp.default(x)
        return aten.sub.Tensor(w, grad), y

    program = make_program(step, {0: "w"}, [Role.GRADIENT], w=f64(2, 4), g=f64(4, 4), x=f64(3, 3))
    after = run(program, [Realise(backend="gloo"), StartEarly(), WaitLate()])
    names = [node.name for node in after.graph.nodes]
    completing = next(node for node in after.graph.nodes if "completes" in node.meta)
    assert names.index(completing.meta["completes"]) < names.index("exp") < names.index(completing.name)
    assert completing.prev.target is WAIT


def test_a_bounded_reduction_is_completed_when_the_next_one_has_started() -> None:
    def step(w: Any, g: Any) -> Any:
        one, other, last = (reduce_scatter(aten.mm.default(g, each)) for each in (g, w, g))
        return one, other, aten.exp.default(last)

    program = make_program(step, {}, [Role.GRADIENT], w=f64(4, 4), g=f64(4, 4))
    for node in program.collectives():
        node.meta["collective"] = replace(node.meta["collective"], ahead=1)
    after = run(program, [Realise(backend="gloo"), StartEarly(), WaitLate()])
    starts = after.collectives()
    order = list(after.graph.nodes)
    for start, following in pairwise(starts):
        (completing,) = [node for node in order if node.meta.get("completes") == start.name]
        assert order.index(following) < order.index(completing) <= order.index(following) + 3  # wait, own part, sum
