"""BucketAllReduce, and the grouping that the three bucket passes share."""

from __future__ import annotations

from typing import Any

import torch

from passes import BucketAllReduce, Report, Role, run

from .programs import all_reduce, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten


def count(program: Any, max_bytes: int = 25_000_000) -> int:
    after = run(program, [BucketAllReduce(max_bytes)])
    assert_same_bits(program, after)
    return Report.of(after).count("all_reduce")


def test_bucket_all_reduce(golden: Any) -> None:
    def step(w: Any, b: Any, x: Any) -> Any:
        h = aten.mm.default(x, w)
        loss = all_reduce(aten.sum.default(h))
        grad_b = all_reduce(aten.sum.dim_IntList(h, [0]))
        new_b = aten.sub.Tensor(b, grad_b)  # stands before the second member, and must wait for it now
        grad_w = all_reduce(aten.t.default(aten.mm.default(aten.t.default(h), x)))  # not contiguous
        return loss, new_b, aten.sub.Tensor(w, grad_w)

    roles = [Role.RESULT, Role.GRADIENT, Role.GRADIENT]
    program = make_program(step, {1: "b", 2: "w"}, roles, w=f64(3, 4), b=f64(4), x=f64(5, 3))
    after, text = before_and_after(program, BucketAllReduce())
    golden(text)
    assert_same_bits(program, after)
    assert Report.of(after).bytes("all_reduce") == Report.of(program).bytes("all_reduce") == 8 * (1 + 4 + 12)


def test_roles_reductions_and_dtypes_are_kept_apart() -> None:
    def step(x: Any, half: Any) -> Any:
        return all_reduce(x), all_reduce(aten.neg.default(x)), all_reduce(aten.exp.default(x), "max"), all_reduce(half)

    inputs = {"x": f64(3), "half": torch.empty(3)}
    assert count(make_program(step, {}, [Role.GRADIENT], **inputs)) == 3
    assert count(make_program(step, {}, [Role.GRADIENT, Role.RESULT, Role.GRADIENT, Role.GRADIENT], **inputs)) == 4
    assert count(make_program(step, {}, [Role.UNKNOWN], **inputs)) == 4


def test_a_bucket_is_no_larger_than_asked_for() -> None:
    program = make_program(
        lambda x: tuple(all_reduce(aten.mul.Tensor(x, k)) for k in range(5)), {}, [Role.GRADIENT], x=f64(4)
    )
    assert count(program, max_bytes=64) == 3
    assert count(program, max_bytes=32) == 5
    assert count(program, max_bytes=160) == 1


def test_what_needs_a_members_result_is_not_merged_with_it() -> None:
    def step(x: Any) -> Any:
        a = all_reduce(x)
        return (all_reduce(aten.mul.Tensor(a, x)),)

    assert count(make_program(step, {}, [Role.GRADIENT], x=f64(3))) == 2


def test_buckets_do_not_wait_for_each_other_in_a_circle() -> None:
    def step(x: Any, y: Any) -> Any:
        a = all_reduce(x)  # sum
        c = all_reduce(y, "max")
        b = all_reduce(aten.mul.Tensor(c, x))  # the bucket (a, b) needs c
        d = all_reduce(aten.mul.Tensor(a, y), "max")  # the bucket (c, d) would need a
        return b, d

    assert count(make_program(step, {}, [Role.GRADIENT], x=f64(3), y=f64(3))) == 3


def test_nothing_is_merged_across_a_chain_of_layers() -> None:
    def step(x: Any) -> Any:
        left, right = x, aten.neg.default(x)
        for _ in range(3):
            left, right = all_reduce(aten.mul.Tensor(left, x)), all_reduce(aten.mul.Tensor(right, x))
        return left, right

    assert count(make_program(step, {}, [Role.ACTIVATION], x=f64(3))) == 3
