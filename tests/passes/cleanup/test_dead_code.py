"""DeadCode."""

from __future__ import annotations

from typing import Any

import torch

from passes import PURE_FUNCTIONS, DeadCode, Role, run

from ..programs import all_reduce, assert_same_bits, before_and_after, f64, make_program, targets

aten = torch.ops.aten


def test_dead_code(golden: Any) -> None:
    def step(x: Any, unused: Any) -> Any:
        aten.neg.default(all_reduce(aten.mul.Tensor(x, 2.0)))
        return (all_reduce(x),)

    program = make_program(step, {}, [Role.RESULT], x=f64(3), unused=f64(2))
    after, text = before_and_after(program, DeadCode())
    golden(text)
    assert_same_bits(program, after)


def test_what_does_more_than_compute_stays() -> None:
    def step(x: Any) -> Any:
        aten.bernoulli.p(x, 0.5)
        aten._assert_async.msg(aten.gt.Scalar(aten.sum.default(x), 0), "positive")
        return (x,)

    program = make_program(step, x=f64(3))
    assert targets(run(program, [DeadCode()])) == targets(program)


def seen(x: torch.Tensor) -> torch.Tensor:
    """A function without a declaration: it may have side effects."""
    return x


def test_python_functions_stay_unless_they_are_listed() -> None:
    program = make_program(lambda x: (x,), x=f64(3))
    with program.graph.inserting_before(program.output_node):
        program.graph.call_function(seen, (program.placeholders[0],))
    assert len(targets(run(program, [DeadCode()]))) == 1
    PURE_FUNCTIONS.add(seen)
    try:
        assert targets(run(program, [DeadCode()])) == []
    finally:
        PURE_FUNCTIONS.discard(seen)
