"""Levels of recomputation: what costs the fewest seconds for its bytes first, and memory as the passes find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import fx

from passes import FormUnits, Pass, Phase, Program, Recompute, Role, default, run
from passes.memory.peak_memory import planned_memory
from passes.schedule.node_costs import Cost
from passes.schedule.recompute_levels import Level, RecomputeLevels

from ..programs import f64, make_program

aten = torch.ops.aten
CPU = torch.device("cpu")


class ByName:
    """Costs by the start of the name of a node."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds

    def of(self, node: fx.Node) -> Cost:
        return Cost(compute=self._seconds[node.name.partition("_")[0]])


def with_phases(program: Program) -> Program:
    """Forward is what stands before the sum, and it."""
    phase = Phase.FORWARD
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta["phase"] = phase
            phase = Phase.BACKWARD if node.target is aten.sum.default else phase
    return program


def step(w: Any, x: Any) -> Any:
    """Four values that backward reads in the end: (64, 64) each, but for one of twice as many rows."""
    a = aten.tanh.default(x)
    b = aten.exp.default(a)
    c = aten.mm.default(x, w)
    d = aten.cat.default([x, x])
    y = aten.sum.default(b)
    grown = aten.sin.default(aten.cat.default([x, x, x, x, x, x, x, x]))  # where most memory is in use
    total = aten.sum.default(grown)
    return y, total, aten.add.Tensor(aten.mul.Tensor(a, b), c), aten.mul.Tensor(d, 2.0)


def levels_of(program: Program, seconds: Mapping[str, float]) -> list[Level]:
    return RecomputeLevels(program, ByName(seconds), CPU).all()  # type: ignore[arg-type]


def program_of() -> Program:
    return with_phases(make_program(step, {}, [Role.ACTIVATION] * 3, w=f64(64, 64), x=f64(64, 64)))


@pytest.mark.parametrize(("seconds", "order"), [
    ((1, 2, 5, 12), ["tanh", "exp", "mm", "cat"]),
    ((1, 2, 5, 3), ["tanh", "cat", "exp", "mm"]),  # 3 s for twice the bytes
    ((3, 1, 5, 12), ["exp", "tanh", "mm", "cat"]),  # tanh is kept, so that exp alone runs again
    ((4, 1, 4.5, 12), ["exp", "tanh", "mm", "cat"]),
])  # fmt: skip
def test_the_fewest_seconds_for_a_byte_come_first(seconds: tuple[float, ...], order: list[str]) -> None:
    levels = levels_of(program_of(), dict(zip(("tanh", "exp", "mm", "cat"), seconds, strict=True)))
    assert list(levels[-1].ops) == order
    assert all(list(each.ops) == sorted(each.ops, key=order.index) for each in levels)


def test_each_level_needs_less_memory_and_more_time() -> None:
    levels = levels_of(program_of(), {"tanh": 1, "exp": 2, "mm": 5, "cat": 12})
    for less, more in pairwise(levels):
        assert less.peak > more.peak and less.seconds < more.seconds
    assert levels[0].seconds == 0 and levels[-1].seconds == 20


def chain(w: Any, x: Any) -> Any:
    """Layers whose products and functions backward reads, the last ones first."""
    kept, value = [], x
    for _ in range(8):
        value = aten.tanh.default(aten.mm.default(value, w))
        kept.append(aten.exp.default(value))
    gradient = aten.expand.default(aten.sum.default(kept[-1]), [512, 64])
    for each in reversed(kept):
        gradient = aten.mm.default(aten.mul.Tensor(gradient, each), w)
    return (gradient,)


def residual(w: Any, x: Any) -> Any:
    """Blocks that add to what they read; backward reads what they read, and both products."""
    kept, value = [], x
    for _ in range(_BLOCKS):
        inner = aten.tanh.default(aten.mm.default(value, w))
        outer = aten.mm.default(inner, w)
        kept.append((value, inner, outer))
        value = aten.sin.default(aten.add.Tensor(value, outer))
    gradient = aten.expand.default(aten.sum.default(value), [512, 64])
    for value, inner, outer in reversed(kept):
        gradient = aten.mul.Tensor(gradient, outer)
        back = aten.mm.default(aten.mul.Tensor(gradient, inner), w)
        gradient = aten.mm.default(aten.mul.Tensor(back, value), w)
    return (gradient,)


_BLOCKS = 12
_COSTS = {"mm": 9, "tanh": 1, "exp": 1, "sin": 1, "add": 1}


@pytest.mark.parametrize("step", [chain, residual])
def test_levels_are_what_the_passes_make_of_them(step: Callable[..., Any]) -> None:
    program = with_phases(make_program(step, {}, [Role.ACTIVATION], w=f64(64, 64), x=f64(512, 64)))
    levels = levels_of(program, _COSTS)
    assert len(levels) >= 4
    state = 8 * (64 * 64 + 512 * 64)
    for level in levels:
        final = run(program, _with(Recompute(level.ops)))
        again = [node.meta["recompute_of"] for node in final.graph.nodes if "recompute_of" in node.meta]
        assert sum(_COSTS[name.partition("_")[0]] for name in again) == level.seconds
        assert planned_memory(final)["cpu"].peak - state == pytest.approx(level.peak, rel=0.02)


def test_blocks_run_again_one_by_one() -> None:
    """What stays is little more than one sum for each block: a chain of all of them would hold everything again."""
    program = with_phases(make_program(residual, {}, [Role.ACTIVATION], w=f64(64, 64), x=f64(512, 64)))
    levels = levels_of(program, _COSTS)
    size = 8 * 512 * 64
    assert levels[0].peak >= 3 * _BLOCKS * size
    assert levels[-1].peak <= (_BLOCKS + 6) * size
    assert levels[-1].seconds <= 2 * 9 * _BLOCKS + 3 * _BLOCKS  # each op of forward at most once more


@pytest.mark.parametrize("hidden", [0, 4, 9])
def test_what_copies_can_hide_waits_in_host_memory(hidden: int) -> None:
    """In the 240 + 1 s of forward ``hidden`` values are copied, and a part of the next one."""
    program = with_phases(make_program(residual, {}, [Role.ACTIVATION], w=f64(64, 64), x=f64(512, 64)))
    size = 8 * 512 * 64
    costs = ByName(_COSTS | {"sum": 0, "expand": 0, "mul": 3})
    forward = 240  # of backward, longer
    levels = RecomputeLevels(program, costs, CPU, link=hidden * size / forward).all()  # type: ignore[arg-type]
    free = [each for each in levels if each.seconds == 0]
    assert free[0].peak - free[-1].peak == hidden * size
    assert len(free[-1].offloaded) == hidden
    assert not hidden or free[1].offloaded == ("tanh",)  # which takes a product to run again, and itself


def _with(recompute: Recompute) -> list[Pass]:
    """The default passes, with one where ``fit`` has it."""
    place = next(k for k, each in enumerate(default()) if isinstance(each, FormUnits))
    return [*default()[:place], recompute, *default()[place:]]
