"""Run a pipeline, and keep the last program in which updates are outputs: that can be cut, and put together anew."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Pass
from .ir.program import Program
from .memory.update_in_place import UpdateInPlace
from .runner import FIRST_STAGE, OnStage, run


def in_place_at(pipeline: Sequence[Pass]) -> int:
    """The position of ``UpdateInPlace``; 0 where there is none, or nothing before it."""
    return next((k for k, each in enumerate(pipeline) if isinstance(each, UpdateInPlace)), 0)


def run_keeping_functional(
    program: Program, pipeline: Sequence[Pass], on_stage: OnStage
) -> tuple[Program, Program | None]:
    """``passes.run``, and what it has before ``UpdateInPlace``; None where ``in_place_at`` is 0."""
    at, functional = in_place_at(pipeline), list[Program]()

    def keeping(number: int, each: Pass, after: Program, seconds: float) -> None:
        if at and number == FIRST_STAGE + at - 1:
            functional.append(after.copy())
        on_stage(number, each, after, seconds)

    done = run(program, pipeline, keeping)
    return done, functional[0] if functional else None
