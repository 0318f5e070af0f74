"""FoldViews."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from passes import DeadCode, FoldViews, run

from ..programs import all_reduce, assert_same_bits, before_and_after, f64, make_program, targets

aten = torch.ops.aten


def test_fold_views(golden: Any) -> None:
    def step(x: Any) -> Any:
        same = aten.view.default(aten.expand.default(x, [4, 6]), [4, 6])
        twice = aten.t.default(aten.t.default(same))
        back = aten.permute.default(aten.permute.default(aten.view.default(twice, [2, 2, 6]), [2, 0, 1]), [1, 2, 0])
        whole = aten.slice.Tensor(back, 0, 0, sys.maxsize)
        chain = aten.view.default(aten.view.default(whole, [4, 6]), [24])
        return aten.neg.default(aten._unsafe_view.default(chain, [6, 4])), aten.sum.default(aten.transpose.int(x, 0, 1))

    program = make_program(step, x=f64(4, 6))
    after, text = before_and_after(program, FoldViews(), DeadCode())
    golden(text)
    assert_same_bits(program, after)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: aten.t.default(x),
        lambda x: aten.view.default(x, [9]),
        lambda x: aten.slice.Tensor(x, 0, 1, 3),
        lambda x: aten.permute.default(aten.permute.default(aten.unsqueeze.default(x, 0), [1, 2, 0]), [1, 2, 0]),
        lambda x: aten.clone.default(x),
        lambda x: aten._to_copy.default(x, dtype=torch.float32),
    ],
)
def test_what_changes_something_stays(view: Any) -> None:
    program = make_program(lambda x: (aten.neg.default(view(x)),), x=f64(3, 3))
    after = run(program, [FoldViews(), DeadCode()])
    assert targets(after) == targets(program)


def test_an_expanded_tensor_has_strides_that_tell_nothing() -> None:
    def step(x: Any) -> Any:
        square = aten.expand.default(x, [3, 3])
        return aten.mul.Tensor(aten.t.default(square), x), square

    program = make_program(step, x=f64(1, 1))
    after = run(program, [FoldViews(), DeadCode()])
    assert "t.default" in targets(after)
    assert_same_bits(program, after)


def test_a_copy_between_two_outputs_stays() -> None:
    def step(w: Any, x: Any) -> Any:
        h = aten.neg.default(x)
        return (
            h,
            aten.view.default(aten._to_copy.default(h), [4]),
            aten._to_copy.default(w),
            aten.sum.default(aten._to_copy.default(x)),
        )

    program = make_program(step, w=f64(2), x=f64(2, 2))
    after = run(program, [FoldViews(), DeadCode()])
    assert targets(after).count("_to_copy.default") == 2, "only the copy that is summed up may go"


def test_a_view_of_what_may_be_a_copy_becomes_a_reshape() -> None:
    def step(x: Any) -> Any:
        flat = aten.reshape.default(aten.t.default(x), [12])
        return aten.neg.default(aten.view.default(flat, [6, 2])), aten.view.default(flat, [2, 6])

    program = make_program(step, x=f64(3, 4))
    after = run(program, [FoldViews(), DeadCode()])
    assert targets(after) == targets(program), "one copy serves both"
    program.set_outputs(program.output_values()[:1], program.outputs[:1])
    after = run(program, [DeadCode(), FoldViews(), DeadCode()])
    assert targets(after) == ["t.default", "reshape.default", "neg.default"]
    assert_same_bits(program, after)


def test_what_only_looks_the_same_on_this_rank_stays() -> None:
    program = make_program(lambda x: (all_reduce(aten.slice.Tensor(x, 0, 0, 1)),), x=f64(1, 2))
    x = program.placeholders[0]
    x.meta["placement"] = (Replicate(),)
    next(iter(x.users)).meta["placement"] = (Shard(0),)
    assert "slice.Tensor" in targets(run(program, [FoldViews()]))


@pytest.mark.parametrize("start", [0, 2])
def test_all_ranks_drop_the_copy_of_their_part(start: int) -> None:
    """The part of the first rank begins where the whole does, that of the second does not."""
    program = make_program(
        lambda x: (aten.neg.default(aten._to_copy.default(aten.slice.Tensor(x, 0, start, start + 2))),), x=f64(4)
    )
    after = run(program, [FoldViews(), DeadCode()])
    assert targets(after) == ["slice.Tensor", "neg.default"]
    assert_same_bits(program, after)


def test_a_reshape_that_copies_ends_a_chain() -> None:
    def step(x: Any) -> Any:
        return (aten.reshape.default(aten.reshape.default(aten.t.default(x), [2, 8]), [4, 4]),)

    program = make_program(step, x=f64(4, 4))  # the result lies as x does, but is its transpose
    after = run(program, [FoldViews(), DeadCode()])
    assert targets(after)[0] == "t.default"
    assert_same_bits(program, after)
