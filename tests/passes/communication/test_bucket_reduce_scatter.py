"""BucketReduceScatter."""

from __future__ import annotations

from typing import Any

import torch

from passes import BucketReduceScatter, Report, Role, run

from ..programs import assert_same_bits, before_and_after, f64, make_program, reduce_scatter

aten = torch.ops.aten


def test_bucket_reduce_scatter(golden: Any) -> None:
    def step(w: Any, v: Any, x: Any) -> Any:
        grad_v = reduce_scatter(aten.sum.dim_IntList(x, [0]))
        grad_w = reduce_scatter(aten.mm.default(aten.t.default(x), x))
        return aten.sub.Tensor(w, grad_w), aten.sub.Tensor(v, grad_v)

    program = make_program(step, {0: "w", 1: "v"}, [Role.GRADIENT], w=f64(2, 4), v=f64(2), x=f64(3, 4))
    after, text = before_and_after(program, BucketReduceScatter())
    golden(text)
    assert_same_bits(program, after)
    assert Report.of(after).bytes("reduce_scatter") == Report.of(program).bytes("reduce_scatter") == 8 * (4 + 16)


def test_a_bucket_closes_once_its_operand_has_reached_the_limit() -> None:
    program = make_program(
        lambda x, y: (reduce_scatter(x), reduce_scatter(y)), {}, [Role.GRADIENT], x=f64(2, 3), y=f64(4)
    )
    for max_bytes, left in ((48, 2), (49, 1)):
        after = run(program, [BucketReduceScatter(max_bytes)])
        assert len(after.collectives()) == left
        assert_same_bits(program, after)
