"""Cutting a step where its gradients are reduced, and joining the end of one with the start of the next."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import OutputKind, PassError, Phase, Program, Role, UpdateInPlace, print_program, run
from passes.update.cut_and_join import Halves, cut, join

from ..programs import all_reduce, f64, make_program

aten = torch.ops.aten
ROLES = {"w": Role.PARAMETER, "v": Role.PARAMETER, "u": Role.PARAMETER, "x": Role.BATCH, "lr": Role.HYPER_PARAMETER}
PHASES = {"sub": Phase.UPDATE, "mul": Phase.UPDATE, "add": Phase.UPDATE} | {
    f"{name}{suffix}": phase
    for suffix in ("", "_1", "_2")
    for name, phase in (("mm", Phase.FORWARD), ("exp", Phase.BACKWARD), ("sub", Phase.UPDATE), ("mul", Phase.UPDATE))
}


def two_layers(w: Any, v: Any, x: Any, lr: Any) -> Any:
    """The gradient of the second layer comes first; each update takes a step of ``lr``."""
    hidden = aten.mm.default(x, w)
    out = aten.mm.default(hidden, v)
    last = all_reduce(aten.exp.default(out))
    first = all_reduce(aten.exp.default(hidden))
    loss = all_reduce(aten.sum.default(out))
    return loss, aten.sub.Tensor(w, aten.mul.Tensor(first, lr)), aten.sub.Tensor(v, aten.mul.Tensor(last, lr))


def made(step: Any, updates: dict[int, str] | None = None, **more: Any) -> Program:
    """``step`` as a train step: each input and each node has its role."""
    inputs = {"w": f64(3, 3), "v": f64(3, 3), "x": f64(3, 3), "lr": 0.5, **more}
    inputs = {name: inputs[name] for name in inspect.signature(step).parameters}
    roles = [Role.GRADIENT, Role.GRADIENT, Role.RESULT]
    program = make_program(step, updates or {1: "w", 2: "v"}, roles, **inputs)
    program.inputs = [replace(each, role=ROLES.get(each.name, Role.BUFFER)) for each in program.inputs]
    for node in program.graph.nodes:
        if node.name in PHASES:
            node.meta["phase"] = PHASES[node.name]
    return program


def halves_of(program: Program) -> Halves:
    found = cut(program)
    assert isinstance(found, Halves)
    return found


def test_deferral(golden: Any) -> None:
    program = made(two_layers)
    halves = halves_of(program)
    start, end = (run(half, [UpdateInPlace()]) for half in (halves.start, halves.end))
    steady = join(Halves(start, end, halves.numbers))
    shown = {"the step": program, "start": halves.start, "end": halves.end, "steady": steady}
    golden("\n".join(f"{'=' * 20} {name} {'=' * 20}\n\n{print_program(each)}" for name, each in shown.items()))
    assert [program.inputs[k].name for k in halves.numbers] == ["lr"]


def test_each_part_of_the_update_runs_before_what_reads_it() -> None:
    halves = halves_of(made(two_layers))
    start, end = (run(half, [UpdateInPlace()]) for half in (halves.start, halves.end))
    order = [node.name for node in join(Halves(start, end, halves.numbers)).graph.nodes]
    assert order.index("sub") < order.index("mm") < order.index("sub_1") < order.index("mm_1")


def test_an_argument_that_the_update_reads_is_copied() -> None:
    """The user may write to it before the next call."""

    def step(w: Any, v: Any, x: Any, lr: Any) -> Any:
        first = all_reduce(aten.exp.default(x))
        last = all_reduce(aten.exp.default(w))
        loss = all_reduce(aten.sum.default(x))
        return loss, aten.sub.Tensor(w, aten.mul.Tensor(first, x)), aten.sub.Tensor(v, aten.mul.Tensor(last, lr))

    halves = halves_of(made(step))
    values = dict(zip((each.name for each in halves.start.outputs), halves.start.output_values(), strict=True))
    assert values["pending.x"].target is aten.clone.default
    assert values["pending.all_reduce"].target is not aten.clone.default


def test_an_item_of_several_results_is_handed_on_and_not_all_of_them() -> None:
    """As the gradient of an expert, of rows that other ranks have sent, beside that of these rows."""

    def step(w: Any, v: Any, x: Any, lr: Any) -> Any:
        values, places = aten.sort.default(all_reduce(aten.mm.default(x, v)))
        first = all_reduce(aten.index.Tensor(x, [places]).sum(0))
        loss = all_reduce(aten.sum.default(x))
        return loss, aten.sub.Tensor(w, aten.mul.Tensor(first, lr)), aten.sub.Tensor(v, aten.mul.Tensor(values, lr))

    halves = halves_of(made(step))
    handed_on = [each for each in halves.start.outputs if each.kind is OutputKind.CHANNEL]
    assert [each.dtype for each in handed_on] == [torch.float64] * 2
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in halves.start.output_values()[-2:])


def test_what_shows_the_update_is_refused() -> None:
    def returns_its_new_value(w: Any, v: Any, x: Any, lr: Any) -> Any:
        _, new, other = two_layers(w, v, x, lr)
        return aten.sum.default(new), new, other

    with pytest.raises(PassError, match=r"result\.0 depends on the update of the step"):
        cut(made(returns_its_new_value))


def test_state_that_forward_changes_is_not_read_later() -> None:
    def step(w: Any, v: Any, x: Any, lr: Any, mean: Any) -> Any:
        moved = aten.neg.default(mean)
        _, new, other = two_layers(w, v, x, lr)
        return all_reduce(aten.sum.default(moved)), aten.sub.Tensor(new, mean), other, moved

    program = made(step, mean=f64(3, 3))
    program.outputs[3] = replace(program.outputs[3], kind=OutputKind.UPDATE, name="mean")
    with pytest.raises(PassError, match="the update reads mean as it was before forward changed it"):
        cut(program)


def test_without_messages_in_flight_nothing_is_cut() -> None:
    def step(w: Any, v: Any, x: Any, lr: Any) -> Any:
        return aten.sum.default(x), aten.sub.Tensor(w, x), aten.sub.Tensor(v, x)

    assert cut(made(step)) == "it updates nothing that other ranks have a part in"
