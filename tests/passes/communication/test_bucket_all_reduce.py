"""BucketAllReduce, and the grouping that the three bucket passes share."""

from __future__ import annotations

from typing import Any

import torch

from passes import BucketAllReduce, Report, Role, run

from ..programs import all_reduce, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten


def count(program: Any, max_bytes: int = 25_000_000, first_bytes: int = 1_000_000) -> int:
    after = run(program, [BucketAllReduce(max_bytes, first_bytes)])
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


def test_a_bucket_closes_once_it_has_reached_its_limit_and_the_first_of_gradients_early() -> None:
    def five(role: Role) -> Any:  # of 32 bytes each
        return make_program(lambda x: tuple(all_reduce(aten.mul.Tensor(x, k)) for k in range(5)), {}, [role], x=f64(4))

    for max_bytes, first_bytes, gradients, others in (
        (32, 32, 5, 5),
        (33, 33, 3, 3),
        (64, 32, 3, 3),
        (96, 32, 3, 2),
        (128, 1, 2, 2),
        (160, 1, 2, 1),
        (160, 160, 1, 1),
        (32, 160, 5, 5),
    ):
        assert count(five(Role.GRADIENT), max_bytes, first_bytes) == gradients
        assert count(five(Role.ACTIVATION), max_bytes, first_bytes) == others


def test_a_unit_is_one_bucket_in_its_own_order_whatever_its_size() -> None:
    def step(a: Any, b: Any, c: Any) -> Any:
        return all_reduce(c), all_reduce(a), all_reduce(b)

    program = make_program(step, {}, [Role.GRADIENT], a=f64(1), b=f64(2), c=f64(3))
    program.units = (("a", "c"),)
    after = run(program, [BucketAllReduce(max_bytes=8, first_bytes=8)])
    assert_same_bits(program, after)
    assert [node.meta["collective"].of for node in after.collectives()] == [("a", "c"), ("b",)]


def test_a_parameter_is_in_a_bucket_once() -> None:
    def step(a: Any, b: Any) -> Any:  # as with micro-batches that are reduced each
        return all_reduce(a), all_reduce(b), all_reduce(a), all_reduce(b)

    program = make_program(step, {}, [Role.GRADIENT], a=f64(1), b=f64(2))
    program.units = (("a", "b"),)
    assert count(program) == 2


def test_statistics_join_the_first_bucket_and_gradients_the_latest() -> None:
    def step(x: Any, y: Any) -> Any:  # a mean and a variance about it, of two batch norms side by side
        mean = all_reduce(aten.sum.dim_IntList(x, [0]))
        variance = all_reduce(aten.sum.dim_IntList(aten.sub.Tensor(x, mean), [0]))
        other = all_reduce(aten.sum.dim_IntList(y, [0]))
        return variance, all_reduce(aten.sum.dim_IntList(aten.sub.Tensor(y, other), [0]))

    assert count(make_program(step, {}, [Role.ACTIVATION], x=f64(3, 2), y=f64(3, 2))) == 2
    assert count(make_program(step, {}, [Role.GRADIENT], x=f64(3, 2), y=f64(3, 2))) == 3


def test_a_collective_that_needs_a_members_result_is_not_merged_with_it() -> None:
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
