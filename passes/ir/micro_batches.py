"""Micro-batches: the programs of a call that runs several times, each time on a part of its batch, and adds up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from .program import Program
from .roles import Role


def accumulating(program: Program, joined: Collection[str]) -> Program:
    """A copy of a functional program that returns accumulators and ``joined`` results alone."""
    own = program.copy()
    pairs = zip(own.output_values(), own.outputs, strict=True)
    kept = [(value, out) for value, out in pairs if out.role is Role.ACCUMULATOR or out.name in joined]
    own.set_outputs([value for value, _ in kept], [out for _, out in kept])
    return replace(own, name=f"{program.name}-accumulating", micro_batches=None)


def new_accumulators(program: Program) -> dict[int, torch.Tensor]:
    """Zeros for the accumulators of a program, by their positions among its inputs."""
    inputs = enumerate(zip(program.inputs, program.placeholders, strict=True))
    vals = {k: node.meta["val"] for k, (declared, node) in inputs if declared.role is Role.ACCUMULATOR}
    return {k: torch.zeros(val.shape, dtype=val.dtype, device=val.device) for k, val in vals.items()}


def ascend(program: Program, inputs: Sequence[torch.Tensor], k: int) -> None:
    """After run ``k``, add the sums of pairs that are complete: of runs, of pairs, and so on, like carries of a count.

    So each sum is that of a balanced tree over the runs, of which the last run adds up what is left: the sum of a
    half of the runs has the same bits, whether it is all that a program runs or the first half of it.
    """
    micro = program.micro_batches
    assert micro is not None
    position = program.positions()
    for name, above in micro.tree.items() if k % 2 else ():
        pair = inputs[position[name]]
        total = pair
        for level, each in enumerate(above, start=1):
            held = inputs[position[each]]
            if (k + 1) >> level & 1:
                held.copy_(total)
                break
            total = held + total
        pair.zero_()


def runs_of(program: Program) -> list[Program]:
    """The programs that a call runs, in order: one for each micro-batch, or ``program`` alone."""
    micro = program.micro_batches
    if micro is None:
        return [program]
    last = replace(program, micro_batches=None)
    return [micro.accumulating or last] * (micro.count - 1) + [last]
