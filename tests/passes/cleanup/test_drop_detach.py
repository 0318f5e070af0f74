"""DropDetach."""

from __future__ import annotations

from typing import Any

import torch

from passes import DropDetach

from ..programs import assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten


def test_drop_detach(golden: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        h = aten.detach.default(aten.detach.default(aten.mul.Tensor(w, x)))
        return aten.alias.default(h), aten.detach.default(x), aten.add.Tensor(w, aten.alias.default(h))

    program = make_program(step, {2: "w"}, w=f64(3), x=f64(3))
    after, text = before_and_after(program, DropDetach())
    golden(text)
    assert_same_bits(program, after)
