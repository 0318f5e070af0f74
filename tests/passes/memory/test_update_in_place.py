"""UpdateInPlace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes import Program, Role, UpdateInPlace, run

from ..programs import (
    all_gather,
    assert_same_bits,
    before_and_after,
    f64,
    make_program,
    random_inputs,
    simulate,
    targets,
)

aten = torch.ops.aten


def rewritten(program: Program) -> list[str]:
    """The ops after the pass, which must leave the same bits."""
    after = run(program, [UpdateInPlace()])
    assert_same_bits(program, after)
    assert all(declared.in_place for declared in after.inputs if declared.name in {o.name for o in program.outputs})
    return targets(after)


def test_update_in_place(golden: Any) -> None:
    def step(p: Any, m: Any, v: Any, n: Any, grad: Any) -> Any:  # Adam
        new_n = aten.add.Tensor(n, 1)
        decayed = aten.mul.Tensor(p, 0.99)
        new_m = aten.lerp.Scalar(m, grad, 0.1)
        new_v = aten.addcmul.default(aten.mul.Tensor(v, 0.999), grad, grad, value=0.001)
        denominator = aten.add.Tensor(aten.sqrt.default(aten.div.Tensor(new_v, new_n)), 1e-8)
        return aten.addcdiv.default(decayed, new_m, denominator, value=-0.1), new_m, new_v, new_n

    inputs = {"p": f64(3), "m": f64(3), "v": f64(3), "n": f64(), "grad": f64(3)}
    program = make_program(step, dict(enumerate("pmvn")), **inputs)
    after, text = before_and_after(program, UpdateInPlace())
    golden(text)
    assert "copy_.default" not in targets(after) and not after.outputs


def test_another_order_of_operands_is_copied() -> None:
    program = make_program(lambda p, g: (aten.sub.Tensor(g, p),), {0: "p"}, p=f64(3), g=f64(3))
    assert rewritten(program) == ["sub.Tensor", "copy_.default"]


@pytest.mark.parametrize(
    "reader",
    [
        lambda p, new: aten.neg.default(p),
        lambda p, new: aten.sum.default(aten.t.default(aten.view.default(p, [9, 1]))),
        lambda p, new: aten.mul.Tensor(new, p),
        lambda p, new: p,
        lambda p, new: aten.t.default(p),
    ],
)
def test_a_later_reader_of_the_old_value_forbids_it(reader: Any) -> None:
    def step(p: Any, g: Any) -> Any:
        new = aten.add.Tensor(p, g)
        return new, reader(p, new)

    ops = rewritten(make_program(step, {0: "p"}, p=f64(3, 3), g=f64(3, 3)))
    assert "add_.Tensor" not in ops and ops[-1] == "copy_.default"


def test_a_view_made_before_and_read_after_forbids_it() -> None:
    def step(p: Any, g: Any) -> Any:
        rows = aten.split.Tensor(p, 1)
        new = aten.add.Tensor(p, g)
        return new, aten.neg.default(rows[1])

    assert "add_.Tensor" not in rewritten(make_program(step, {0: "p"}, p=f64(2, 3), g=f64(2, 3)))


def test_an_earlier_reader_does_not() -> None:
    def step(p: Any, g: Any) -> Any:
        old = aten.clone.default(p)
        return aten.add.Tensor(p, g), old, aten.mm.default(g, aten.t.default(old))

    assert "add_.Tensor" in rewritten(make_program(step, {0: "p"}, p=f64(3, 3), g=f64(3, 3)))


def test_a_chain_breaks_where_its_middle_is_read_later() -> None:
    def step(p: Any, g: Any) -> Any:
        middle = aten.mul.Tensor(p, 0.5)
        return aten.add.Tensor(middle, g), aten.neg.default(aten.view.default(middle, [3, 1]))

    assert rewritten(make_program(step, {0: "p"}, p=f64(3), g=f64(3))).count("copy_.default") == 1


def test_a_collective_reads_until_it_is_waited_for() -> None:
    def step(p: Any, x: Any) -> Any:
        started = torch.ops._c10d_functional.all_gather_into_tensor.default(p, 2, "0")
        new = aten.mul.Tensor(p, 0.5)
        return new, aten.neg.default(torch.ops._c10d_functional.wait_tensor.default(started))

    assert "mul_.Tensor" not in rewritten(make_program(step, {0: "p"}, [Role.PARAMETER], p=f64(3), x=f64(3)))

    def waits_first(p: Any) -> Any:
        whole = all_gather(p)
        return aten.mul.Tensor(p, 0.5), aten.neg.default(whole)

    assert "mul_.Tensor" in rewritten(make_program(waits_first, {0: "p"}, [Role.PARAMETER], p=f64(3)))


def test_an_operand_that_shares_the_memory_forbids_it() -> None:
    program = make_program(lambda p: (aten.add.Tensor(p, aten.t.default(p)),), {0: "p"}, p=f64(3, 3))
    assert rewritten(program)[-1] == "copy_.default"


def test_inputs_that_swap_are_cloned_first() -> None:
    program = make_program(lambda a, b, c: (b, c, a), {0: "a", 1: "b", 2: "c"}, a=f64(3), b=f64(3), c=f64(3))
    assert rewritten(program).count("clone.default") == 3


def test_an_input_that_takes_over_the_old_value_of_another() -> None:
    def step(last: Any, p: Any, g: Any) -> Any:
        return p, aten.add.Tensor(p, g)

    assert "clone.default" in rewritten(make_program(step, {0: "last", 1: "p"}, last=f64(3), p=f64(3), g=f64(3)))


def test_two_inputs_with_one_new_value() -> None:
    def step(p: Any, ema: Any, g: Any) -> Any:
        new = aten.add.Tensor(p, g)
        return new, new

    assert rewritten(make_program(step, {0: "p", 1: "ema"}, p=f64(3), ema=f64(3), g=f64(3))) == [
        "add_.Tensor",
        "copy_.default",
    ]


def test_an_input_that_stays_as_it_is() -> None:
    assert rewritten(make_program(lambda p, g: (p, g), {0: "p"}, p=f64(3), g=f64(3))) == []


def test_a_view_of_itself_as_the_new_value() -> None:
    program = make_program(lambda p: (aten.t.default(p),), {0: "p"}, p=f64(3, 3))
    assert rewritten(program) == ["t.default", "clone.default", "copy_.default"]


@pytest.mark.parametrize("k", [0, 1])
def test_a_result_does_not_change_with_the_state(k: int) -> None:
    def step(p: Any, g: Any) -> Any:
        new = aten.add.Tensor(p, g)
        return new, (new, aten.view.default(new, [3, 1]))[k]

    program = make_program(step, {0: "p"}, p=f64(3), g=f64(3))
    assert "add_.Tensor" in rewritten(program)
    left = simulate(run(program, [UpdateInPlace()]), random_inputs(program, 1))[0]
    (result,) = left.results.values()
    assert result.untyped_storage().data_ptr() != left.inputs["p"].untyped_storage().data_ptr()


def test_ops_that_change_dtype_or_shape_are_copied() -> None:
    def step(n: Any, p: Any, g: Any) -> Any:
        more = aten._to_copy.default(aten.add.Tensor(n, 0.5), dtype=torch.int64)
        return more, aten.sum.dim_IntList(aten.mul.Tensor(p, g), [0], True)

    program = make_program(step, {0: "n", 1: "p"}, n=torch.empty(3, dtype=torch.int64), p=f64(1, 3), g=f64(4, 3))
    assert rewritten(program)[-2:] == ["copy_.default", "copy_.default"]


def test_in_place_views_are_no_updates() -> None:
    program = make_program(lambda p, g: (aten.neg.default(aten.squeeze.dim(p, 0)), g), {0: "p"}, p=f64(3), g=f64(3))
    assert rewritten(program)[-1] == "copy_.default"


def test_batch_statistics() -> None:
    def step(mean: Any, var: Any, x: Any) -> Any:
        out = aten._native_batch_norm_legit_functional.default(x, None, None, mean, var, True, 0.1, 1e-5)
        return out[3], out[4], out[0]

    program = make_program(step, {0: "mean", 1: "var"}, mean=f64(4), var=f64(4), x=f64(5, 4))
    assert rewritten(program).count("copy_.default") == 2


def test_a_number_stays_an_output() -> None:
    program = make_program(lambda n, x: (n + 1, aten.mul.Tensor(x, n)), {0: "n"}, n=3, x=f64(2))
    after = run(program, [UpdateInPlace()])
    assert [output.name for output in after.outputs] == ["n", "result.1"]


def test_nothing_may_follow() -> None:
    program = make_program(lambda p, g: (aten.add.Tensor(p, g),), {0: "p"}, p=f64(3), g=f64(3))
    with pytest.raises(ValueError, match="UpdateInPlace must be the last pass, but UpdateInPlace comes after it"):
        run(program, [UpdateInPlace(), UpdateInPlace()])
    with pytest.raises(ValueError, match="already updates its inputs in place"):
        run(run(program, [UpdateInPlace()]), [UpdateInPlace()])
