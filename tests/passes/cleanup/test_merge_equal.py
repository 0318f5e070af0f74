"""MergeEqual."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes import MergeEqual, Role, run

from ..programs import (
    all_reduce,
    assert_same_bits,
    before_and_after,
    f64,
    make_program,
    random_inputs,
    simulate,
    targets,
)

aten = torch.ops.aten


def test_merge_equal(golden: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        a = all_reduce(aten.mul.Tensor(x, 2.0))
        b = all_reduce(aten.mul.Tensor(x, 2.0))
        c = all_reduce(aten.mul.Tensor(x, 2))  # another constant
        d = all_reduce(aten.mul.Tensor(x, 2.0), "max")
        return aten.sum.default(aten.add.Tensor(b, c)), aten.add.Tensor(w, aten.add.Tensor(a, d))

    program = make_program(step, {1: "w"}, [Role.GRADIENT], w=f64(3), x=f64(3))
    after, text = before_and_after(program, MergeEqual())
    golden(text)
    assert_same_bits(program, after)
    assert after.collectives()[0].meta["collective"].of == ("mul", "mul_1")


@pytest.mark.parametrize(
    "op",
    [
        lambda x: aten.bernoulli.p(x, 0.5),
        lambda x: aten.native_dropout.default(x, 0.5, True)[0],
        lambda x: aten.rand_like.default(x),
    ],
)
def test_random_ops_are_not_merged(op: Any) -> None:
    program = make_program(lambda x: (aten.sub.Tensor(op(x), op(x)),), x=f64(3))
    after = run(program, [MergeEqual()])
    assert targets(after).count(targets(program)[0]) == 2


def test_what_is_recomputed_on_purpose_is_not_merged() -> None:
    program = make_program(lambda x: (aten.mul.Tensor(aten.exp.default(x), aten.exp.default(x)),), x=f64(3))
    program.graph.find_nodes(op="call_function", target=aten.exp.default)[1].meta["recompute_of"] = "exp"
    assert targets(run(program, [MergeEqual()])).count("exp.default") == 2


def test_outputs_do_not_come_to_share_memory() -> None:
    def step(x: Any) -> Any:
        zeros = [aten.new_zeros.default(x, [3]) for _ in range(4)]
        views = [aten.view.default(zero, [3, 1]) for zero in zeros[2:]]
        return zeros[0], zeros[1], *views, aten.add.Tensor(zeros[3], 1), aten.add.Tensor(zeros[1], 1)

    program = make_program(step, x=f64(3))
    after = run(program, [MergeEqual()])
    assert_same_bits(program, after)
    (left, _) = simulate(after, random_inputs(after))
    storages = {value.untyped_storage().data_ptr() for value in left.results.values()}
    assert len(storages) == 6
    assert targets(after).count("new_zeros.default") == 1, "the others are clones"
    assert targets(after).count("add.Tensor") == 1, "readers inside the graph take the first"


def test_several_results_of_one_op_do_not_come_to_share_memory() -> None:
    def step(x: Any) -> Any:
        both = [aten.max.dim(x, 0) for _ in range(3)]
        whole = [all_reduce(x) for _ in range(3)]
        return both[1][0], both[2][0], both[2][1], whole[1], whole[2]

    program = make_program(step, {}, [Role.RESULT], x=f64(3, 3))
    after = run(program, [MergeEqual()])
    assert_same_bits(program, after)
    assert len(after.collectives()) == 1 and targets(after).count("max.dim") == 1
    (left, _) = simulate(after, random_inputs(after))
    assert len({value.untyped_storage().data_ptr() for value in left.results.values()}) == 5


def test_numbers_are_merged_too() -> None:
    program = make_program(lambda x, lr: (aten.mul.Tensor(x, lr * 2), aten.div.Tensor(x, lr * 2)), x=f64(3), lr=0.5)
    assert targets(run(program, [MergeEqual()])).count("<built-in function mul>") == 1
