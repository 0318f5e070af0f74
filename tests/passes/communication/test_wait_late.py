"""WaitLate."""

from __future__ import annotations

from typing import Any

import torch

from passes import Role, StartEarly, WaitLate

from ..programs import all_reduce, assert_same_bits, before_and_after, f64, make_program

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
