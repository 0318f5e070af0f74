"""Micro-batches: a program that runs several times in a call, each time on a part of its batch, and adds up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from .program import Input, Output
from .roles import Role

if TYPE_CHECKING:
    from .program import Program


@dataclass(frozen=True)
class MicroBatches:
    """How often a program runs in a call, and what each run takes.

    Of the inputs in ``split``, by name, run k takes the k-th of ``count`` parts along a dim, cut as by ``torch.chunk``.
    An accumulator (an input of that role) is zero in the first run, and in the others what the run before made of it.
    Results in ``joined`` are rows of all runs, one after the other along a dim. All other outputs, state included, are
    those of the last run. ``whole``: inputs that are all of an argument, by name, with that of the argument.
    ``accumulating``: the program of all runs but the last one, with the same inputs, once it is another one: its parts
    are longer, or ``SplitMicroBatches`` has left it accumulators and rows alone.
    """

    count: int
    split: Mapping[str, int]
    whole: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, int] = field(default_factory=dict)
    accumulating: Program | None = None

    def __str__(self) -> str:
        split = ", ".join(f"{name} along dim {dim}" for name, dim in self.split.items())
        return f"runs {self.count} times in a call, on parts of {split}"

    def join(self, outputs: Sequence[Output], last: Sequence[Any], before: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The values of ``outputs`` in the last run, with the rows of the runs ``before`` it, by name of the result."""
        return [
            torch.cat([*(each[output.name] for each in before), value], dim=self.joined[output.name])
            if output.name in self.joined
            else value
            for output, value in zip(outputs, last, strict=True)
        ]

    def of_run(self, program: Program, inputs: Sequence[Any], k: int) -> list[Any]:
        """The inputs of run ``k``, of those of a call."""
        return [self._input(each, value, k) for each, value in zip(program.inputs, inputs, strict=True)]

    def _input(self, declared: Input, value: Any, k: int) -> Any:
        if declared.role is Role.RUN:
            return k
        if declared.name not in self.split:
            return value
        dim = self.split[declared.name]
        step = -(-value.shape[dim] // self.count)
        return value.narrow(dim, k * step, min(step, value.shape[dim] - k * step))


def accumulating(program: Program, joined: Collection[str]) -> Program:
    """A copy of a functional program that returns accumulators and ``joined`` results alone."""
    own = program.copy()
    pairs = zip(own.output_values(), own.outputs, strict=True)
    kept = [(value, out) for value, out in pairs if out.role is Role.ACCUMULATOR or out.name in joined]
    own.set_outputs([value for value, _ in kept], [out for _, out in kept])
    return replace(own, name=f"{program.name}-accumulating", micro_batches=None)


def runs_of(program: Program) -> list[Program]:
    """The programs that a call runs, in order: one for each micro-batch, or ``program`` alone."""
    micro = program.micro_batches
    if micro is None:
        return [program]
    last = replace(program, micro_batches=None)
    return [micro.accumulating or last] * (micro.count - 1) + [last]
