"""Run a pipeline, and keep the last program in which updates are outputs: that can be cut, and put together anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import Pass
from .ir.program import Program
from .memory.update_in_place import UpdateInPlace
from .regions.form_regions import FormRegions
from .runner import FIRST_STAGE, OnStage, run


@dataclass(frozen=True)
class Parts:
    """A pipeline in parts: ``functional`` leaves updates as outputs, ``in_place`` writes them, and ``rest`` follows.

    Regions are formed at the beginning of ``in_place``, once a step is cut: those of two halves are not one.
    """

    functional: tuple[Pass, ...]
    in_place: tuple[Pass, ...]
    rest: tuple[Pass, ...]

    @classmethod
    def of(cls, pipeline: Sequence[Pass]) -> Parts | None:
        """The parts; None for a pipeline that writes nothing in place, or has nothing before that."""
        write = next((k for k, each in enumerate(pipeline) if isinstance(each, UpdateInPlace)), 0)
        at = next((k for k, each in enumerate(pipeline[:write]) if isinstance(each, FormRegions)), write)
        return cls(tuple(pipeline[:at]), tuple(pipeline[at : write + 1]), tuple(pipeline[write + 1 :])) if at else None


def run_keeping_functional(
    program: Program, pipeline: Sequence[Pass], on_stage: OnStage
) -> tuple[Program, Program | None]:
    """``passes.run``, and what it has before updates are in place; None where there is no such stage."""
    parts, functional = Parts.of(pipeline), list[Program]()

    def keeping(number: int, each: Pass, after: Program, seconds: float) -> None:
        if parts is not None and number == FIRST_STAGE + len(parts.functional) - 1:
            functional.append(after.copy())
        on_stage(number, each, after, seconds)

    done = run(program, pipeline, keeping)
    return done, functional[0] if functional else None
