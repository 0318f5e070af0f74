"""The program of every rank after each stage, run on the same inputs: what a stage changes shows in the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import passes
from passes import OutputKind, Pass, Program

from .._torch import DisableAutocast
from ..override import Override
from .lockstep import Watch, run_in_lockstep
from .rank import SimulatedRank

Values = dict[str, Any]  # by the names of inputs and outputs


@dataclass(frozen=True)
class Stage:
    """The programs of all ranks after a stage. ``exact``: it promises the bits of the stage before it."""

    name: str
    programs: Sequence[Program]
    exact: bool = False


def stages_of(ranks: Sequence[SimulatedRank]) -> list[Stage]:
    """All stages of the program that ranks run, in order; passes that found nothing to do are left out."""
    compiled, options = [rank.compiled for rank in ranks], ranks[0].step.options
    found = []
    if any(type(override).transform is not Override.transform for override in options.overrides):
        partitioned = []
        for rank, each in zip(ranks, compiled, strict=True):
            with rank.active(), DisableAutocast():
                partitioned.append(rank.step.options.mode.partition(each.captured.program))
        found.append(Stage("partition", partitioned))
        found.append(Stage("Override.transform", [each.partitioned for each in compiled]))
    else:
        found.append(Stage("partition", [each.partitioned for each in compiled]))
    found += stages_after([each.partitioned for each in compiled], options.pipeline)
    if options.gm_transformation is not None:
        found.append(Stage("gm_transformation", [each.program for each in compiled]))
    return found


def stages_after(partitioned: Sequence[Program], pipeline: Sequence[Pass]) -> list[Stage]:
    """The stages of a pipeline; passes that found nothing to do on any rank are left out."""
    each_rank: list[list[Program]] = []
    for program in partitioned:
        after: list[Program] = []
        with DisableAutocast():
            passes.run(program, pipeline, on_stage=lambda *stage, kept=after: kept.append(stage[2].copy()), check=False)
        each_rank.append(after)
    together = zip(*each_rank, strict=True)
    return [
        Stage(type(each).__name__, programs, exact=each.numerics == "exact")
        for each, programs in zip(pipeline, together, strict=True)
        if not all(program.history[-1].endswith("nothing to do") for program in programs)
    ]


def run_stage(programs: Sequence[Program], inputs: Sequence[Values], watch: Watch | None = None) -> list[Values]:
    """Run a stage; returns, for each rank, its results and the values of all inputs afterwards."""
    given = [_inputs_for(program, values) for program, values in zip(programs, inputs, strict=True)]
    returned = run_in_lockstep(programs, given, watch)
    return [
        values_after(program, after, outputs) for program, after, outputs in zip(programs, given, returned, strict=True)
    ]


def values_after(program: Program, inputs: Sequence[Any], outputs: Sequence[Any]) -> Values:
    """Results and new state by name, and the values that inputs have once a program has run on them."""
    found = by_name(program, inputs)
    return found | {output.name: value for output, value in zip(program.outputs, outputs, strict=True)}


def by_name(program: Program, inputs: Sequence[Any]) -> Values:
    """The inputs of a program by name; in the place of a flat one its parts."""
    found: Values = {}
    for declared, value in zip(program.inputs, inputs, strict=True):
        if declared.parts:
            for part in declared.parts:
                found[part.input.name] = value.narrow(0, part.offset, part.numel).view(part.shape)
        else:
            found[declared.name] = value
    return found


def kept(values: Values) -> Values:
    """Copies of values, which nothing writes to."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def _inputs_for(program: Program, values: Values) -> list[Any]:
    """Fresh inputs for a program."""
    return list(_each_input(program, values))


def _each_input(program: Program, values: Values) -> Iterator[Any]:
    for declared in program.inputs:
        if declared.parts:
            parts = sorted(declared.parts, key=lambda part: part.offset)
            yield torch.cat([values[part.input.name].reshape(-1) for part in parts])
        else:
            value = values[declared.name]
            yield value.detach().clone() if isinstance(value, Tensor) else value


def results_of(program: Program) -> list[str]:
    """The names of what a program returns to the user or makes."""
    return [output.name for output in program.outputs if output.kind is not OutputKind.UPDATE]
