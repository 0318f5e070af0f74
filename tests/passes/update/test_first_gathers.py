"""Gathers that a step starts for the next one: which they are, and where they start."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import OutputKind, Phase, Program, Role, UpdateInPlace, print_program, run
from passes.update.first_gathers import FirstGathers, continued, divide, update_first

from ..programs import all_gather, f64, make_program, reduce_scatter

aten = torch.ops.aten
ROLES = {"w": Role.PARAMETER, "v": Role.PARAMETER, "x": Role.BATCH}
GATHERED = [Role.PARAMETER, Role.PARAMETER, Role.GRADIENT, Role.GRADIENT]


def two_layers(w: Any, v: Any, x: Any) -> Any:
    """The gradient of the second layer comes first, and it is updated first."""
    hidden = aten.mm.default(x, all_gather(w))
    out = aten.mm.default(hidden, all_gather(v))
    last = reduce_scatter(aten.exp.default(out))
    first = reduce_scatter(aten.exp.default(hidden))
    return aten.sum.default(out), aten.sub.Tensor(v, last), aten.sub.Tensor(w, first)


def made(step: Any, **more: Any) -> Program:
    """``step`` as a train step whose parameters are split over two ranks."""
    inputs = {"w": f64(2, 4), "v": f64(2, 4), "x": f64(4, 4)}
    inputs = {name: inputs[name] for name in inspect.signature(step).parameters}
    program = make_program(step, {1: "v", 2: "w"}, GATHERED, **inputs)
    program.inputs = [replace(each, role=ROLES[each.name]) for each in program.inputs]
    for node in program.graph.nodes:
        later = Phase.UPDATE if node.name.startswith("sub") else Phase.BACKWARD
        node.meta["phase"] = later if node.name.startswith(("sub", "exp", "reduce")) else Phase.FORWARD
    return replace(program, **more)


def divided(program: Program) -> FirstGathers:
    found = divide(program)
    assert found is not None
    return found


def steady_of(program: Program, first: FirstGathers) -> Program:
    update_first(program, first)
    return continued(run(program, [UpdateInPlace()]), first)


def order(program: Program) -> list[str]:
    return [node.name for node in program.graph.nodes]


def test_first_gathers(golden: Any) -> None:
    program = made(two_layers, limit_gathers=1)
    first = divided(program)
    shown = {"the step": program.copy(), "what is sent": first.sent, "start": first.start}
    shown["steady"] = steady_of(program, first)
    golden("\n".join(f"{'=' * 20} {name} {'=' * 20}\n\n{print_program(each)}" for name, each in shown.items()))


@pytest.mark.parametrize("prefetch, limit, gathers", [((1, 1), None, 2), ((1, 1), 1, 1), ((0, 1), None, 0)])
def test_as_many_start_ahead_as_may_be_whole(prefetch: tuple[int, int], limit: int | None, gathers: int) -> None:
    first = divide(made(two_layers, prefetch=prefetch, limit_gathers=limit))
    assert (0 if first is None else len(first.names)) == gathers


def test_what_is_gathered_first_is_updated_first() -> None:
    program = made(two_layers, limit_gathers=1)
    names = order(steady_of(program, divided(program)))
    assert names.index("sub_1") < names.index("clone") < names.index("sub")
    assert names.count("all_gather_into_tensor_1") == 1


def test_what_is_computed_from_state_is_sent() -> None:
    """It is no memory of state, so it is not copied."""

    def scaled(w: Any, v: Any, x: Any) -> Any:
        out = aten.mm.default(x, all_gather(aten.mul.Tensor(w, 2.0)))
        return aten.sum.default(out), v, aten.sub.Tensor(w, reduce_scatter(aten.exp.default(out)))

    program = made(scaled)
    first = divided(program)
    assert not first.start.graph.find_nodes(op="call_function", target=aten.clone.default)
    targets = [node.target for node in steady_of(program, first).graph.nodes]
    assert targets.index(aten.sub_.Tensor) < targets.index(aten.mul.Tensor)


def test_an_update_that_only_the_gather_read_stays() -> None:
    def decayed(w: Any, v: Any, x: Any) -> Any:
        new = aten.mul.Tensor(w, 0.9)
        out = aten.mm.default(x, all_gather(new))
        return aten.sum.default(out), aten.sub.Tensor(v, reduce_scatter(aten.exp.default(out))), new

    program = made(decayed)
    targets = [node.target for node in steady_of(program, divided(program)).graph.nodes]
    assert aten.mul_.Tensor in targets


def test_what_depends_on_the_batch_is_not_gathered_ahead() -> None:
    def weighted(w: Any, v: Any, x: Any) -> Any:
        hidden = aten.mm.default(x, all_gather(aten.mul.Tensor(w, aten.sum.default(x))))
        out = aten.mm.default(hidden, all_gather(v))
        return aten.sum.default(out), v, aten.sub.Tensor(w, reduce_scatter(aten.exp.default(out)))

    assert divide(made(weighted)) is None


def test_a_step_that_makes_state_is_run_once() -> None:
    program = made(two_layers)
    program.outputs = [replace(each, kind=OutputKind.NEW) if not k else each for k, each in enumerate(program.outputs)]
    assert divide(program) is None
