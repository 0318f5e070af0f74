"""FuseForeach."""

from __future__ import annotations

from typing import Any

import torch

from passes import FuseForeach, FuseUpdate, MergeEqual, Phase, Program, UpdateInPlace, run
from passes.update.foreach_groups import over_lists

from ..programs import assert_same_bits, before_and_after, f64, make_program, targets
from .test_fuse_update import adamw_program, assert_close, both, described

aten = torch.ops.aten


def calls(program: Program) -> list[Any]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


def adamax_program(size: int = 2) -> Program:
    """Two parameters of ``size`` and 3 elements. No kernel computes this one."""

    def step(
        w: Any, m_w: Any, u_w: Any, n_w: Any, b: Any, m_b: Any, u_b: Any, n_b: Any, x: Any, y: Any, lr: Any
    ) -> Any:
        back = -lr

        def update(p: Any, m: Any, u: Any, n: Any, g: Any) -> Any:
            count = aten.add.Tensor(n, 1)
            mean = aten.lerp.Scalar(m, g, 0.1)
            largest = aten.maximum.default(aten.mul.Tensor(u, 0.99), aten.add.Tensor(aten.abs.default(g), 1e-8))
            correction = aten.rsub.Scalar(aten.pow.Scalar(0.9, aten._to_copy.default(count, dtype=torch.float64)), 1)
            rate = aten.mul.Tensor(aten.reciprocal.default(correction), back)
            return aten.addcdiv.default(p, aten.mul.Tensor(mean, rate), largest), mean, largest, count

        return *update(w, m_w, u_w, n_w, x), *update(b, m_b, u_b, n_b, y)

    tensors: dict[str, Any] = {}
    for name, n in (("w", size), ("b", 3)):
        tensors |= {name: f64(n), f"m_{name}": f64(n), f"u_{name}": f64(n), f"n_{name}": torch.empty(())}
    tensors |= {"x": f64(size), "y": f64(3)}
    updates = dict(enumerate(["w", "m_w", "u_w", "n_w", "b", "m_b", "u_b", "n_b"]))
    program = described(make_program(step, updates, **tensors, lr=0.1))
    for node in calls(program):
        node.meta["phase"] = Phase.UPDATE
    return program


def test_fuse_foreach(golden: Any) -> None:
    program = adamax_program()
    after, text = before_and_after(program, FuseForeach())
    golden(text)
    assert_same_bits(program, after)


def test_products_by_numbers_stay_ops_where_the_list_op_would_round_the_number() -> None:
    for dtype, op in ((torch.bfloat16, None), (torch.float32, aten._foreach_mul.Scalar)):
        program = make_program(lambda p: aten.mul.Tensor(p, 0.749), {0: "p"}, p=torch.empty(3, dtype=dtype))
        assert [over_lists(node) for node in calls(program)] == [op]


def test_ops_over_lists_write_in_place_one_after_the_other() -> None:
    program = adamax_program()
    after = run(program, [FuseForeach(), UpdateInPlace()])
    assert_same_bits(program, after)
    in_place = [each for each in targets(after) if "_." in each]
    names = [each.partition(".")[0].removeprefix("_foreach_") for each in in_place]
    assert names == ["add_", "lerp_", "mul_", "maximum_", "addcdiv_"]
    assert not any(each.startswith(("copy_", "clone")) for each in targets(after))


def test_large_parameters_are_updated_one_by_one_on_a_cpu() -> None:
    after = run(adamax_program(5000), [FuseForeach()])
    assert targets(after).count("lerp.Scalar") == 2 and targets(after).count("pow.Scalar") == 1
    after = run(adamax_program(5000), [FuseForeach(max_elements=5000)])
    assert targets(after).count("_foreach_lerp.Scalar") == 1 and "lerp.Scalar" not in targets(after)


def test_what_is_no_update_stays() -> None:
    program = adamax_program()
    for node in calls(program):
        del node.meta["phase"]
    assert targets(run(program, [FuseForeach()])) == targets(program)


def test_a_structurally_equal_update_that_another_leads_to() -> None:
    """The second depends on the first: they cannot be entries of one list."""

    def step(w: Any, b: Any, x: Any) -> Any:
        new = aten.add.Tensor(w, aten.sqrt.default(aten.abs.default(x)))
        return new, aten.add.Tensor(b, aten.sqrt.default(aten.abs.default(aten.mul.Tensor(new, x))))

    program = described(make_program(step, {0: "w", 1: "b"}, w=f64(3), b=f64(3), x=f64(3)))
    for node in calls(program):
        node.meta["phase"] = Phase.UPDATE
    assert_same_bits(program, run(program, [FuseForeach(), UpdateInPlace()]))


def test_what_a_kernel_computes_is_left_to_it() -> None:
    """Both steps of one scaler, with other rates: what decides that they are skipped is cast for each kernel."""

    def body(update: Any, w: Any, b: Any, x: Any, y: Any, *state: Any) -> Any:
        skip = aten.gt.Scalar(aten.sum.default(aten.mul.Tensor(state[0], x)), 0.0)
        new = (*update(w, x), *update(b, y, 0.5))
        old = (w, *state[:3], b, *state[3:])
        return tuple(aten.where.self(skip, aten.clone.default(a), z) for a, z in zip(old, new, strict=True))

    program = adamw_program(body)
    for node in calls(program):
        node.meta["phase"] = Phase.UPDATE
    fused = run(program, [FuseUpdate()])
    assert targets(fused).count("_fused_adamw.default") == targets(fused).count("_to_copy.default") == 2
    after = run(fused, [FuseForeach()])
    assert targets(after).count("_to_copy.default") == 2
    assert_close(program, FuseUpdate(), FuseForeach(), UpdateInPlace())


def test_the_kernels_come_first() -> None:
    program = adamw_program(both)
    for node in calls(program):
        node.meta["phase"] = Phase.UPDATE
    after = assert_close(program, FuseUpdate(), FuseForeach())
    assert targets(after) == targets(run(program, [FuseUpdate()])), "nothing is left"
    assert "_foreach_lerp.Scalar" in targets(assert_close(program, MergeEqual(), FuseForeach()))
