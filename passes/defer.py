"""Defer the end of a step: from one program, before updates are in place, to a bundle of three, one for each call.

``first`` leaves the end of its step pending, ``steady`` does that of the call before first, ``finish`` only it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .base import Pass
from .default_passes import backend_of, table_of
from .errors import PassError
from .ir.bundle import Bundle
from .ir.check_bundle import check_bundle
from .ir.program import Program
from .memory.update_in_place import UpdateInPlace
from .regions.form_islands import FormIslands
from .regions.form_regions import FormRegions
from .runner import FIRST_STAGE, OnStage, run
from .schedule.node_costs import NodeCosts, device_of
from .schedule.rates import rates_of
from .schedule.start_in_order import start_last, starts_to_hold
from .update.cut_and_join import Halves, cut, join


@dataclass(frozen=True)
class _Parts:
    """A pipeline in parts: ``functional`` leaves updates as outputs, ``in_place`` writes them, and ``rest`` follows.

    Regions are formed at the beginning of ``in_place``, once a step is cut: those of two halves are not one.
    """

    functional: tuple[Pass, ...]
    in_place: tuple[Pass, ...]
    rest: tuple[Pass, ...]

    @classmethod
    def of(cls, pipeline: Sequence[Pass]) -> _Parts:
        """The parts. Raises ``PassError`` for a pipeline that writes nothing in place, or has nothing before that."""
        write = next((k for k, each in enumerate(pipeline) if isinstance(each, UpdateInPlace)), 0)
        at = next((k for k, each in enumerate(pipeline[:write]) if isinstance(each, (FormRegions, FormIslands))), write)
        if not at:
            raise PassError("defer_updates=True takes a pipeline with passes.UpdateInPlace, after passes.UpdateLast")
        return cls(tuple(pipeline[:at]), tuple(pipeline[at : write + 1]), tuple(pipeline[write + 1 :]))


def run_and_defer(program: Program, pipeline: Sequence[Pass], on_stage: OnStage) -> tuple[Program, Bundle | str]:
    """``passes.run``, and the bundle of what it has before updates are in place; else why nothing is deferred.

    Raises ``PassError`` for a pipeline without that pass, or where it comes first, and where the step shows its update.
    """
    last, functional = FIRST_STAGE + len(_Parts.of(pipeline).functional) - 1, list[Program]()

    def keeping(number: int, each: Pass, after: Program, seconds: float) -> None:
        if number == last:
            functional.append(after.copy())
        on_stage(number, each, after, seconds)

    done = run(program, pipeline, keeping)
    return done, defer(functional[0], pipeline)


def _start_and_steady(halves: Halves, end: Program, in_place: Sequence[Pass]) -> tuple[Program, Program]:
    start = run(halves.start, in_place)
    return start, join(Halves(start, end, halves.numbers))


def _costs(program: Program, pipeline: Sequence[Pass]) -> NodeCosts | None:
    """The costs of nodes by the table of a pipeline; None on a device of which nothing is known."""
    table, backend = table_of(pipeline), backend_of(pipeline)
    rates = rates_of(table, device_of(program), program.mesh)
    return None if rates is None else NodeCosts(program, rates, table, backend=backend)


def defer(functional: Program, pipeline: Sequence[Pass]) -> Bundle | str:
    """The bundle, or a sentence on why nothing is deferred. Raises ``PassError`` where the step forbids it."""
    halves = cut(functional)
    if isinstance(halves, str):
        return halves
    parts = _Parts.of(pipeline)
    in_place, rest = parts.in_place, parts.rest
    end = run(halves.end, in_place)
    start, steady = _start_and_steady(halves, end, in_place)
    costs = _costs(steady, pipeline)
    held = starts_to_hold(steady, costs) if costs is not None else []
    if held:
        start_last(halves.start, held)
        start, steady = _start_and_steady(halves, end, in_place)
    made = {"first": start, "steady": steady, "finish": end}
    done = {role: run(replace(each, name=f"{functional.name}-{role}"), rest) for role, each in made.items()}
    handed_on = halves.end.inputs[len(halves.end.inputs) - len(halves.numbers) :]
    given = {each.name: functional.inputs[k].name for each, k in zip(handed_on, halves.numbers, strict=True)}
    bundle = Bundle.of(functional.name, done, {role: [[role]] for role in done}, given=given)
    check_bundle(bundle)
    return bundle
