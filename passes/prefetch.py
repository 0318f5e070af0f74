"""A program whose first gathers the call before has started, beside the program that starts them itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .base import Pass
from .functional import Parts, run_keeping_functional
from .ir.program import Program
from .runner import OnStage, run
from .update.first_gathers import continued, divide, update_first


@dataclass(frozen=True)
class Prefetched:
    """``steady`` runs in place of the whole program where its first gathers are in flight, and starts the next ones.

    It takes these as its last inputs, and returns the next ones last, with copies of what they send. ``start`` returns
    the same of state as it is, and ``sent`` computes what would be sent: what is in flight is of use as long as that
    equals the copies.
    """

    sent: Program
    start: Program
    steady: Program


def run_and_prefetch(
    program: Program, pipeline: Sequence[Pass], on_stage: OnStage
) -> tuple[Program, Prefetched | None]:
    """``passes.run``, and the same step with its first gathers started ahead; None where none can be."""
    done, functional = run_keeping_functional(program, pipeline, on_stage)
    return done, None if functional is None else prefetch(functional, pipeline)


def prefetch(functional: Program, pipeline: Sequence[Pass]) -> Prefetched | None:
    """The programs, from what a pipeline has before ``UpdateInPlace``; None where none can be started ahead."""
    first = divide(functional)
    if first is None:
        return None
    parts = Parts.of(pipeline)
    assert parts is not None, "a program without updates in place has no functional stage"
    update_first(functional, first)
    steady = continued(run(functional, parts.in_place), first)
    made = {"start": first.start, "steady": steady}
    return Prefetched(
        sent=first.sent,  # views, mostly, and no part of a call
        **{name: run(replace(each, name=f"{functional.name}-{name}"), parts.rest) for name, each in made.items()},
    )
