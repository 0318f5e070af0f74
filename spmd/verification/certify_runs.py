"""Certify a step that runs its final programs for each micro-batch: the runs are derived in order, as a call has them.

Not looked at is that all runs compute in the same memory, which peers may still read: ``lower.Runs`` waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from passes import Input, InputSource, Program
from passes.ir.inline import inlined
from passes.ir.micro_batches import ascend, empty_accumulators, own_rows
from passes.ir.program import MicroBatches, replicated

from . import symbols
from .certificate import Certificate, Certification
from .compared_stages import values_after
from .lockstep import LockstepError
from .machine import CapturedMachine
from .symbolic.sums_of_runs import Run, Shares, Sum


class RunsCertification(Certification):
    """All runs of all ranks; ``sums``: by rank and name, what they hand on."""

    def run(self) -> Certificate:
        """The outcome."""
        self.whole, last = CapturedMachine(self.captured, self.numbers), self.final
        self.micros = [_micro_of(program) for program in last]
        shares = Shares(self.micros[0].count, len(last[0].mesh.axes), in_a_tree=last[0].same_bits)
        runs = [[inlined(each) for each in program.in_order()] for program in last]
        self.sums = [_empty(program, shares) for program in last]
        rows: list[list[dict[str, Any]]] = [[] for _ in last]
        orders = [micro.turns(each.earlier) for micro, each in zip(self.micros, last, strict=True)]
        turns = list(zip(*orders, strict=True))
        try:
            for turn, at in enumerate(turns):
                self.final, self.runs = [each[turn] for each in runs], [Run(k, shares) for _, k in at]
                for node in self.steps([self._inputs(rank, program) for rank, program in enumerate(self.final)]):
                    raise LockstepError(f"{node} waits for ranks of another program", node)
                for rank in range(len(last)):
                    rows[rank].append(self._ended(rank, last[rank], turn, turn == len(turns) - 1))
        except LockstepError as error:
            return self.not_shown("wrong", "", error.node, str(error))
        self._join(rows)
        return self.outcome()

    def _inputs(self, rank: int, program: Program) -> list[Any]:
        """The inputs of a run: its part of the rows, and what the runs before have handed on."""
        micro, run = self.micros[rank], self.runs[rank]
        wholes = self.wholes()
        given = [self._input(each, micro, self.sums[rank], wholes, program) for each in program.inputs]
        return micro.of_run(program.inputs, given, run.number)

    def _input(
        self, declared: Input, micro: MicroBatches, sums: dict[str, Sum], wholes: dict[str, Any], program: Program
    ) -> Any:
        if declared.name in sums:
            return sums[declared.name].value.clone()
        if declared.role.source is InputSource.RUN:
            return None
        named = replace(declared, name=micro.whole.get(declared.name, declared.name))
        if micro.spread is not None and named.name in micro.split:  # ranks gather all rows
            named = replace(named, placement=replicated(program.mesh))
        return self.input_of(named, wholes, program)

    def _ended(self, rank: int, whole: Program, turn: int, is_last: bool) -> dict[str, Any]:
        """Hand on what a run has left; returns its rows."""
        program, micro, run = self.final[rank], self.micros[rank], self.runs[rank]
        after = values_after(program, self.inputs[rank], self.ranks[rank].returned)
        for name, held in self.sums[rank].items():
            is_sum = next(each.role.is_sum for each in program.inputs if each.name == name)
            held.value = run.outside(after[name]) if is_sum else after[name]
        sums = [self.sums[rank].get(each.name) for each in whole.inputs]
        if turn < len(micro.idle_runs):
            empty_accumulators(whole, sums)
        elif not is_last:
            ascend(whole, sums, run.number)  # type: ignore[arg-type]
        return {name: after[name] for name in (*micro.joined, *micro.split)}

    def _join(self, rows: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Let the last run of each rank have the rows of all; of parts that ranks divide, those that are its own."""
        of_ranks = [each[len(micro.idle_runs) :] for micro, each in zip(self.micros, rows, strict=True)]
        for rank, (micro, machine) in enumerate(zip(self.micros, self.ranks, strict=True)):
            parts = of_ranks[rank] if micro.spread is None else [part for of_rank in of_ranks for part in of_rank]
            joined = {}
            for name, dim in {**micro.joined, **micro.split}.items():
                whole = torch.cat([part[name] for part in parts], dim)
                joined[name] = whole if micro.spread is None else own_rows(micro, whole, dim)
            pairs = zip(machine.program.outputs, machine.returned, strict=True)
            machine.returned = tuple(joined.get(out.name, value) for out, value in pairs)
            given = zip(machine.program.inputs, self.inputs[rank], strict=True)
            self.inputs[rank] = [joined.get(each.name, value) for each, value in given]


def _micro_of(program: Program) -> MicroBatches:
    assert program.micro_batches is not None, "a program that runs several times"
    return program.micro_batches


def _empty(program: Program, shares: Shares) -> dict[str, Sum]:
    """Accumulators that are empty, and memory for what is gathered once, without a value."""
    found = {}
    for declared, node in zip(program.inputs, program.placeholders, strict=True):
        if declared.role.is_carried:
            assert declared.dtype is not None
            is_sum = declared.role.is_sum
            held = torch.full(node.meta["val"].shape, 0 if is_sum else symbols.UNWRITTEN, dtype=torch.int64)
            mark: Tensor | int = symbols.mark_of(declared.dtype) | (shares.summed if is_sum else 0)
            found[declared.name] = Sum(shares, symbols.elements(held, mark))
    return found
