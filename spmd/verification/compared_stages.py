"""The program of every rank after each stage, run on the same inputs: what a stage changes shows in the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import passes
from passes import Pass, Program
from passes.base import Numerics
from passes.ir.numbers import pack

from .._torch import DisableAutocast
from ..options import Options
from ..override import Override
from .lockstep import Watch
from .runs import run_programs
from .values import Values, by_name

_SAME_BITS: tuple[Numerics, ...] = ("exact", "exact if aligned")  # of what passes promise, where products are aligned


@dataclass(frozen=True)
class Stage:
    """The programs of all ranks after a stage. ``exact``: it promises the bits of the stage before it."""

    name: str
    programs: Sequence[Program]
    exact: bool = False


@dataclass
class RankPrograms:
    """The programs of one rank: as partitioned, after transforms of the graph, after each pass, and the final one.

    ``after``: None for a pass that found nothing to do.
    """

    partitioned: Program
    transformed: Program
    after: list[Program | None]
    final: Program


def after_each(program: Program, pipeline: Sequence[Pass]) -> tuple[list[Program | None], Program]:
    """The program after each pass of a pipeline, None after one that found nothing to do; and after all."""
    after: list[Program | None] = []

    def keep(number: int, each: Pass, program: Program, seconds: float) -> None:
        after.append(None if program.history[-1].endswith("nothing to do") else program.copy())

    with DisableAutocast():
        final = passes.run(program, pipeline, on_stage=keep, check=False)
    return after, final


def stages_of(programs: Sequence[RankPrograms], pipeline: Sequence[Pass], options: Options) -> list[Stage]:
    """All stages that changed something, in order."""
    found = [Stage("partition", [each.partitioned for each in programs])]
    if transforms(options):
        found.append(Stage("Override.transform", [each.transformed for each in programs]))
    before = [each.transformed for each in programs]
    for k, each in enumerate(pipeline):
        now = [of_rank.after[k] for of_rank in programs]
        if any(program is not None for program in now):
            before = [program or last for program, last in zip(now, before, strict=True)]
            found.append(Stage(type(each).__name__, before, exact=each.numerics in _SAME_BITS))
    if options.gm_transformation is not None and options.program is None:
        found.append(Stage("gm_transformation", [each.final for each in programs]))
    if options.program is not None:
        found.append(Stage("program", [each.final for each in programs]))
    return found


def transforms(options: Options) -> bool:
    """Whether an override edits the graph after partition."""
    return any(type(override).transform is not Override.transform for override in options.overrides)


def run_stage(programs: Sequence[Program], inputs: Sequence[Values], watch: Watch | None = None) -> list[Values]:
    """Run a stage; returns, for each rank, its results and the values of all inputs afterwards."""
    given = [inputs_for(program, values) for program, values in zip(programs, inputs, strict=True)]
    returned = run_programs(programs, given, watch)
    return [
        values_after(program, after, outputs) for program, after, outputs in zip(programs, given, returned, strict=True)
    ]


def values_after(program: Program, inputs: Sequence[Any], outputs: Sequence[Any]) -> Values:
    """Results and new state by name, and the values that inputs have once a program has run on them."""
    found = by_name(program, inputs)
    return found | {output.name: value for output, value in zip(program.outputs, outputs, strict=True)}


def kept(values: Values) -> Values:
    """Copies of values, which nothing writes to."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def inputs_for(program: Program, values: Values) -> list[Any]:
    """Fresh inputs for a program."""
    return list(_each_input(program, values))


def _each_input(program: Program, values: Values) -> Iterator[Any]:
    for declared in program.inputs:
        if declared.parts:
            parts = sorted(declared.parts, key=lambda part: part.offset)
            yield torch.cat([values[part.input.name].reshape(-1) for part in parts])
        elif declared.numbers:
            yield pack(declared, values)
        else:
            value = values[declared.name]
            yield value.detach().clone() if isinstance(value, Tensor) else value
