"""BucketAllGather."""

from __future__ import annotations

from typing import Any

import torch

from passes import BucketAllGather, Report, Role, run

from ..programs import all_gather, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten


def test_bucket_all_gather(golden: Any) -> None:
    def step(w: Any, v: Any, scale: Any, x: Any) -> Any:
        h = aten.mm.default(x, all_gather(w))
        h = aten.mul.Tensor(h, all_gather(scale))
        return aten.mm.default(h, all_gather(v)), aten.neg.default(w)

    inputs = {"w": f64(2, 6), "v": f64(3, 5), "scale": f64(3), "x": f64(7, 4)}
    program = make_program(step, {1: "w"}, [Role.PARAMETER], **inputs)
    after, text = before_and_after(program, BucketAllGather())
    golden(text)
    assert_same_bits(program, after)
    assert Report.of(after).bytes("all_gather") == Report.of(program).bytes("all_gather") == 8 * (12 + 15 + 3)


def test_a_bucket_closes_once_its_result_has_reached_the_limit() -> None:
    program = make_program(lambda w, v: (all_gather(w), all_gather(v)), {}, [Role.PARAMETER], w=f64(2), v=f64(3, 2))
    for max_bytes, left in ((32, 2), (33, 1)):
        after = run(program, [BucketAllGather(max_bytes)])
        assert len(after.collectives()) == left
        assert_same_bits(program, after)
