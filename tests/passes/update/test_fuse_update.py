"""FuseUpdate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import FuseUpdate, Program, Role, UpdateInPlace, run
from passes.ir.collectives import operands

from ..programs import (
    all_gather,
    all_reduce,
    before_and_after,
    f64,
    make_program,
    random_inputs,
    reduce_scatter,
    simulate,
    targets,
)

aten = torch.ops.aten
NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decay": 0.01}


def adamw(
    p: Any, g: Any, m: Any, v: Any, n: Any, lr: Any, beta1: Any, beta2: Any, eps: Any, decay: Any, rounded: bool = False
) -> Any:
    """AdamW as torch traces it with counts that are tensors: the new parameter, mean, square and count."""
    count = aten.add.Tensor(n, 1)
    decayed = aten.mul.Tensor(p, 1.0 - lr * decay)
    mean = aten.lerp.Scalar(m, g, 1.0 - beta1)
    square = aten.addcmul.default(aten.mul.Tensor(v, beta2), g, g, value=1.0 - beta2)
    exact = count if rounded else aten._to_copy.default(count, dtype=torch.float64)
    first = aten.rsub.Scalar(aten.pow.Scalar(beta1, exact), 1)
    second = aten.sqrt.default(aten.rsub.Scalar(aten.pow.Scalar(beta2, exact), 1))
    rate = aten.neg.default(aten.mul.Tensor(aten.reciprocal.default(first), lr))
    root = aten.div.Tensor(aten.sqrt.default(square), aten.mul.Tensor(second, rate))
    denominator = aten.add.Tensor(root, aten.mul.Tensor(aten.reciprocal.default(rate), eps))
    return aten.addcdiv.default(decayed, mean, denominator), mean, square, count


def described(program: Program) -> Program:
    """Describe inputs by their names, as capture would: ``m_w`` is state of the parameter ``w``."""
    names = {declared.name for declared in program.inputs}
    for k, declared in enumerate(program.inputs):
        of = declared.name.partition("_")[2]
        role = Role.OPTIMIZER_STATE if of in names else Role.PARAMETER if declared.name in "wb" else Role.UNKNOWN
        program.inputs[k] = replace(declared, role=role, of=of or None)
    return program


def adamw_program(body: Callable[..., Any], dtype: torch.dtype = torch.float64, **others: Any) -> Program:
    """``body(update, w, b, grad_w, grad_b, *state)`` returns the eight new values of both parameters, and results."""

    def step(
        w: Any, m_w: Any, v_w: Any, n_w: Any, b: Any, m_b: Any, v_b: Any, n_b: Any, x: Any, y: Any,
        lr: Any, beta1: Any, beta2: Any, eps: Any, decay: Any,
    ) -> Any:  # fmt: skip
        def update(p: Any, g: Any, rate: Any = lr, rounded: bool = False) -> Any:
            state = (m_w, v_w, n_w) if p is w else (m_b, v_b, n_b)
            return adamw(p, g, *state, rate, beta1, beta2, eps, decay, rounded)

        return body(update, w, b, x, y, m_w, v_w, n_w, m_b, v_b, n_b)

    sizes = {"w": (3, 2), "b": (2,)}
    inputs: dict[str, Any] = {}
    for name, size in sizes.items():
        inputs |= {each: torch.empty(size, dtype=dtype) for each in (name, f"m_{name}", f"v_{name}")}
        inputs[f"n_{name}"] = torch.empty(())
    inputs |= {"x": torch.empty(3, 2, dtype=dtype), "y": torch.empty(2, dtype=dtype)}
    updates = dict(enumerate(["w", "m_w", "v_w", "n_w", "b", "m_b", "v_b", "n_b"]))
    return described(make_program(step, updates, [Role.GRADIENT], **inputs, **NUMBERS))


def both(update: Any, w: Any, b: Any, x: Any, y: Any, *state: Any) -> Any:
    return *update(w, all_reduce(x)), *update(b, all_reduce(y))


def assert_close(before: Program, *passes: Any) -> Program:
    """The program after ``passes``, which leaves the same numbers to rounding."""
    after = run(before, passes)
    inputs = random_inputs(before)
    for rank in inputs:
        for k, (declared, value) in enumerate(zip(before.inputs, rank, strict=True)):
            if declared.name.startswith("v_"):
                rank[k] = value.abs()
            elif declared.name.startswith("n_"):
                rank[k] = torch.tensor(4.0)
    for one, other in zip(simulate(before, inputs), simulate(after, inputs), strict=True):
        torch.testing.assert_close(other.inputs, one.inputs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other.results, one.results, rtol=1e-12, atol=1e-12)
    return after


def fused(program: Program, *then: Any) -> int:
    """How many fused ops there are, having checked the numbers."""
    after = assert_close(program, FuseUpdate(), *then)
    return sum("_fused_" in each for each in targets(after))


def test_fuse_update(golden: Any) -> None:
    program = adamw_program(both)
    assert before_and_after(program, FuseUpdate())[0] is not program
    golden(before_and_after(program, FuseUpdate())[1])
    assert fused(program) == 1


def descent_program() -> Program:
    """Plain descent with momentum, for which torch has no function of shapes."""

    def step(w: Any, m_w: Any, b: Any, m_b: Any, x: Any, y: Any, lr: Any, momentum: Any, decay: Any) -> Any:
        def update(p: Any, buffer: Any, g: Any) -> Any:
            gradient = aten.add.Tensor(g, p, alpha=decay)
            moving = aten.add.Tensor(aten.mul.Tensor(buffer, momentum), gradient)
            along = aten.add.Tensor(gradient, moving, alpha=momentum)
            return aten.add.Tensor(p, along, alpha=-lr), moving

        return *update(w, m_w, x), *update(b, m_b, y)

    tensors = {"w": f64(3), "m_w": f64(3), "b": f64(2), "m_b": f64(2), "x": f64(3), "y": f64(2)}
    updates = dict(enumerate(["w", "m_w", "b", "m_b"]))
    return described(make_program(step, updates, **tensors, lr=0.1, momentum=0.9, decay=0.01))


@pytest.mark.parametrize("make", [descent_program, lambda: adamw_program(both)], ids=["descent", "adamw"])
def test_no_kernel_runs_for_the_sake_of_shapes(make: Callable[[], Program]) -> None:
    """Where torch has no function for them it runs the kernel, on zeros of the size of all that is updated."""
    program = make()
    mode = program.placeholders[0].meta["val"].fake_mode
    mode.allow_fallback_kernels = False
    after = run(program, [FuseUpdate()])
    (fused,) = [node for node in after.graph.nodes if "_fused_" in str(node.target)]
    mode.allow_fallback_kernels = True
    args, kwargs = torch.fx.map_arg((fused.args, fused.kwargs), lambda node: node.meta["val"])
    with mode:
        by_kernel = fused.target(*args, **kwargs)  # type: ignore[operator]
    assert [list(map(facts, each)) for each in fused.meta["val"]] == [list(map(facts, each)) for each in by_kernel]


def facts(value: torch.Tensor) -> Any:
    return value.shape, value.stride(), value.dtype, value.device


def test_what_is_fused_is_written_in_place() -> None:
    program = adamw_program(both)
    after = assert_close(program, FuseUpdate(), UpdateInPlace())
    assert not after.outputs
    assert [each for each in targets(after) if "all_reduce" not in each and "wait" not in each] == [
        "_foreach_add_.Scalar",
        "_fused_adamw_.default",
    ]


def test_an_old_value_that_is_read_later_is_kept() -> None:
    def body(update: Any, w: Any, b: Any, x: Any, y: Any, *state: Any) -> Any:
        new = both(update, w, b, x, y)
        return *new, aten.sub.Tensor(new[0], w)

    after = assert_close(adamw_program(body), FuseUpdate(), UpdateInPlace())
    assert targets(after).count("clone.default") == 1 and targets(after).count("copy_.default") == 1


def test_a_clipped_gradient() -> None:
    def body(update: Any, w: Any, b: Any, x: Any, y: Any, *state: Any) -> Any:
        norm = aten.reciprocal.default(aten.sum.default(aten.mul.Tensor(x, x)))
        return *update(w, aten.mul.Tensor(x, norm)), *update(b, aten.mul.Tensor(y, norm))

    assert fused(adamw_program(body), UpdateInPlace()) == 1


def test_an_update_that_is_selected_or_averaged_afterwards() -> None:
    def body(update: Any, w: Any, b: Any, x: Any, y: Any, *state: Any) -> Any:
        infinite = aten.gt.Scalar(aten.sum.default(x), 0.0)
        old = aten.clone.default(w)
        new = both(update, w, b, x, y)
        return aten.where.self(infinite, w, new[0]), *new[1:], aten.lerp.Scalar(old, new[0], 0.1)

    program = adamw_program(body)
    assert fused(program, UpdateInPlace()) == 1, "of the other parameter"


@pytest.mark.parametrize("limit", [-100.0, 100.0])
def test_a_step_that_is_skipped(limit: float) -> None:
    """As under a scaler: the kernel itself keeps what was, and can still write in place."""

    def body(update: Any, w: Any, b: Any, x: Any, y: Any, *state: Any) -> Any:
        skip = aten.gt.Scalar(aten.sum.default(x), limit)
        new = both(update, w, b, x, y)
        old = (w, *state[:3], b, *state[3:])
        chosen = [aten.where.self(skip, aten.clone.default(a), z) for a, z in zip(old, new, strict=True)]
        return tuple(aten.copy.default(z, kept) for z, kept in zip(new, chosen, strict=True))

    after = assert_close(adamw_program(body), FuseUpdate(), UpdateInPlace())
    assert targets(after).count("_fused_adamw_.default") == 1
    assert targets(after).count("where.self") == 2, "the counts"


@pytest.mark.parametrize("wrong", ["rate", "count", "state", "rounded"])
def test_what_is_nearly_adamw_is_left_alone(wrong: str) -> None:
    def body(update: Any, w: Any, b: Any, x: Any, y: Any, *state: Any) -> Any:
        new, mean, square, count = update(b, y, rounded=wrong == "rounded")
        if wrong == "rate":
            new = aten.mul.Tensor(new, 0.5)
        if wrong == "count":
            count = aten.add.Tensor(count, 1)
        if wrong == "state":
            mean, square = square, mean
        return *update(w, x), new, mean, square, count

    after = assert_close(adamw_program(body), FuseUpdate())
    assert targets(after).count("lerp.Scalar") == 1 and targets(after).count("_fused_adamw.default") == 1


def test_gradients_of_another_layout() -> None:
    """The kernels ignore strides."""

    def body(update: Any, w: Any, b: Any, x: Any, y: Any, *state: Any) -> Any:
        turned = aten.t.default(aten.clone.default(aten.t.default(x), memory_format=torch.contiguous_format))
        return *update(w, turned), *update(b, aten.expand.default(aten.sum.default(y), [2]))

    program = adamw_program(body)
    assert fused(program) == 1
    assert targets(run(program, [FuseUpdate()])).count("contiguous.default") == 2


def test_units_and_numbers_keep_updates_apart() -> None:
    assert fused(adamw_program(lambda up, w, b, x, y, *_: (*up(w, x), *up(b, y, 0.5)))) == 2
    program = adamw_program(both)
    program.units = (("b",), ("w",))
    after = run(program, [FuseUpdate()])
    assert targets(after).count("_fused_adamw.default") == 2


def test_an_update_that_another_leads_to() -> None:
    def body(update: Any, w: Any, b: Any, x: Any, y: Any, *state: Any) -> Any:
        first = update(w, x)
        return *first, *update(b, aten.sum.dim_IntList(first[0], [0]))

    assert fused(adamw_program(body), UpdateInPlace()) == 2


@pytest.mark.parametrize("dim, count", [(0, 1), (1, 0)])
def test_a_part_of_what_every_rank_has_whole(dim: int, count: int) -> None:
    """Rows are dense in memory; columns only if a rank has all of them, and all ranks must decide the same."""

    def step(w: Any, m_w: Any, g: Any, lr: Any, momentum: Any) -> Any:
        moving = aten.add.Tensor(aten.mul.Tensor(m_w, momentum), reduce_scatter(g))
        part = aten.slice.Tensor(w, dim, 0, 2)
        whole = all_gather(aten.add.Tensor(part, moving, alpha=-lr))
        return (whole if dim == 0 else aten.cat.default(aten.split.Tensor(whole, 2), 1)), moving

    shape, part = ([4, 3], [2, 3]) if dim == 0 else ([2, 4], [2, 2])
    tensors = {"w": f64(*shape), "m_w": f64(*part), "g": f64(2 * part[0], part[1])}
    roles = [Role.GRADIENT, Role.PARAMETER]
    program = described(make_program(step, {0: "w", 1: "m_w"}, roles, **tensors, lr=0.1, momentum=0.9))
    (given,) = program.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    (gather,) = [each for each in program.collectives() if each.meta["collective"].role is Role.PARAMETER]
    given.meta["part_of"] = operands(gather)[0].meta["update_of"] = "w"
    assert fused(program, UpdateInPlace()) == count


def test_plain_descent_with_momentum() -> None:
    after = assert_close(descent_program(), FuseUpdate(), UpdateInPlace())
    assert [each for each in targets(after) if each.startswith(("_", "copy", "clone"))] == ["_fused_sgd_.default"]


@pytest.mark.parametrize("new", [
    lambda w, x: aten.sub.Tensor(w, aten.mul.Tensor(x, 0.1)),
    lambda w, x: aten.sub.Tensor(w, x, alpha=0.1),
    lambda w, x: aten.add.Tensor(w, x, alpha=-0.1),
    lambda w, x: aten.add.Tensor(w, aten.mul.Tensor(-0.1, x)),
])  # fmt: skip
def test_plain_descent_by_hand(new: Any) -> None:
    program = described(make_program(lambda w, x: (new(w, x),), {0: "w"}, w=f64(3), x=f64(3)))
    assert fused(program) == 1


def test_numbers_that_were_computed_before() -> None:
    """``1 - 0.9`` is a number by the time that a graph sees it."""

    def step(w: Any, m_w: Any, v_w: Any, n_w: Any, x: Any, lr: Any, decay: Any) -> Any:
        return adamw(w, x, m_w, v_w, n_w, lr, 0.9, 0.99, 1e-8, decay)

    tensors = {"w": f64(3), "m_w": f64(3), "v_w": f64(3), "n_w": torch.empty(()), "x": f64(3)}
    updates = dict(enumerate(["w", "m_w", "v_w", "n_w"]))
    program = described(make_program(step, updates, **tensors, lr=0.1, decay=0.01))
    assert fused(program) == 1


def test_nothing_to_fuse() -> None:
    program = make_program(lambda p, g: (aten.sub.Tensor(p, g),), {0: "p"}, p=f64(3), g=f64(3))
    assert targets(assert_close(program, FuseUpdate())) == ["sub.Tensor"]
