"""StartEarly."""

from __future__ import annotations

from typing import Any

import torch

from passes import Role, StartEarly, run

from .programs import all_gather, all_reduce, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten


def test_start_early(golden: Any) -> None:
    def step(w: Any, v: Any, x: Any) -> Any:
        h = aten.mm.default(x, all_gather(w))
        grad = aten.sum.default(h)
        h = aten.mm.default(h, all_gather(aten.constant_pad_nd.default(v, [0, 0, 0, 1])))  # packed, then sent
        return aten.exp.default(h), all_reduce(grad)

    program = make_program(step, {}, [Role.PARAMETER], w=f64(2, 4), v=f64(1, 5), x=f64(3, 4))
    after, text = before_and_after(program, StartEarly())
    golden(text)
    assert_same_bits(program, after)
    assert after.history == ["02 StartEarly: 2 edits"]


def test_what_others_read_too_stays() -> None:
    def step(v: Any, x: Any) -> Any:
        y = aten.exp.default(x)
        packed = aten.view.default(v, [4])
        return aten.add.Tensor(all_gather(packed), y), aten.neg.default(packed)

    program = make_program(step, {}, [Role.PARAMETER], v=f64(2, 2), x=f64(8))
    names = [node.name for node in run(program, [StartEarly()]).graph.nodes]
    assert names.index("exp") < names.index("view") < names.index("all_gather_into_tensor")
