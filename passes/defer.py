"""Programs that defer the end of a step: from one program, before updates are in place, to three that run in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .base import Pass
from .errors import PassError
from .functional import Parts, run_keeping_functional
from .ir.program import Program
from .pipeline import backend_of, table_of
from .runner import OnStage, run
from .schedule.node_costs import NodeCosts, device_of
from .schedule.rates import rates_of
from .schedule.start_in_order import start_last, starts_to_hold
from .update.cut_and_join import Halves, cut, join


@dataclass(frozen=True)
class Deferred:
    """``first`` leaves the end of its step pending, ``steady`` does that of the call before first, ``finish`` only it.

    ``steady`` and ``finish`` take what ``first`` and ``steady`` return last, and then the numbers of that call, by
    their positions among its inputs.
    """

    first: Program
    steady: Program
    finish: Program
    numbers: tuple[int, ...]

    def programs(self) -> dict[str, Program]:
        """By name."""
        return {"first": self.first, "steady": self.steady, "finish": self.finish}


def run_and_defer(program: Program, pipeline: Sequence[Pass], on_stage: OnStage) -> tuple[Program, Deferred | str]:
    """``passes.run``, and the three programs from what it has before ``UpdateInPlace``; else why nothing is deferred.

    Raises ``PassError`` for a pipeline without that pass, or where it comes first, and where the step shows its update.
    """
    done, functional = run_keeping_functional(program, pipeline, on_stage)
    if functional is None:
        raise PassError("defer_updates=True takes a pipeline with passes.UpdateInPlace, after passes.UpdateLast")
    return done, defer(functional, pipeline)


def _start_and_steady(halves: Halves, end: Program, in_place: Sequence[Pass]) -> tuple[Program, Program]:
    start = run(halves.start, in_place)
    return start, join(Halves(start, end, halves.numbers))


def _costs(program: Program, pipeline: Sequence[Pass]) -> NodeCosts | None:
    """The costs of nodes by the table of a pipeline; None on a device of which nothing is known."""
    table, backend = table_of(pipeline), backend_of(pipeline)
    rates = rates_of(table, device_of(program), program.mesh)
    return None if rates is None else NodeCosts(program, rates, table, backend=backend)


def defer(functional: Program, pipeline: Sequence[Pass]) -> Deferred | str:
    """The three programs, or a sentence on why nothing is deferred. Raises ``PassError`` where the step forbids it."""
    halves = cut(functional)
    if isinstance(halves, str):
        return halves
    parts = Parts.of(pipeline)
    assert parts is not None, "a program without updates in place has no functional stage"
    in_place, rest = parts.in_place, parts.rest
    end = run(halves.end, in_place)
    start, steady = _start_and_steady(halves, end, in_place)
    costs = _costs(steady, pipeline)
    held = starts_to_hold(steady, costs) if costs is not None else []
    if held:
        start_last(halves.start, held)
        start, steady = _start_and_steady(halves, end, in_place)
    made = {"first": start, "steady": steady, "finish": end}
    done = {name: run(replace(each, name=f"{functional.name}-{name}"), rest) for name, each in made.items()}
    return Deferred(**done, numbers=halves.numbers)
