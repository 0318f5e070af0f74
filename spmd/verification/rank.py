"""The first simulated rank: copies of the user's objects, the step compiled for them, and its part of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from passes import Mesh, Program
from passes.ir.program import Placements

from .._torch import DisableAutocast
from ..answers.answer import Answers
from ..call.call import Call
from ..call.found import with_found
from ..call.state import Arguments
from ..call.unequal_rows import Split, UnequalRows
from ..capture.sizes.size_symbols import TracedSizes
from ..dispatch import Turn
from ..placements import chunk
from ..ranks.simulated import Simulated, standing_for
from ..ranks.world import describe
from ..running.compiled import Compiled
from ..running.inputs import Running
from ..state.split_tensor import own_looks
from ..step import CompiledStep
from ..step_compiler import Rehearsal
from ..watching.watch import Watch
from .compared_stages import RankPrograms, after_each, transforms
from .copies import Copy, Subject, on_copies
from .wholes import part_of

Held = tuple[Any, tuple[int, ...], Placements]  # a local value, the global shape, the placement


@dataclass
class _Part:
    """This rank's part of a tensor argument, which later steps read again."""

    value: Tensor
    shape: tuple[int, ...]
    placement: Placements


class SimulatedRank:
    """Compiles and ends calls as a real rank does; what is in between, all ranks do together."""

    def __init__(self, subject: Subject, copied: Copy, number: int, mesh: DeviceMesh) -> None:
        self.number, self._copied = number, copied
        mode = copied.mode(subject.options.mode, mesh)
        self.step = CompiledStep(subject.function, on_copies(subject.options, mode, copied.in_double))
        for spec in subject.step.runner.watches.specs():
            self.step.runner.watches.add(Watch(spec, every=1))
        self._mode = mode
        self._parts: dict[str, _Part] = {}
        self._rows: UnequalRows | None = None
        self._programs: dict[int, tuple[Compiled, RankPrograms]] = {}
        self.turn: Turn | None = None
        self.running: Running | None = None
        with self.active():
            self._cut_batch()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let this process stand for the rank, in a call of the step."""
        with standing_for(Simulated(self.number)), own_looks():
            yield

    def _cut_batch(self) -> None:
        given = with_found(self.step.function, self._read())
        call = Call(given, self._mode)
        self.mesh: Mesh = describe(call.device_mesh)
        splits, brought = {}, {}
        for each in call.inputs:
            shape = tuple(each.value.shape)
            whole = each.value.detach()
            part = part_of(whole, each.placement, self.mesh).clone().requires_grad_(each.value.requires_grad)
            self._parts[each.name] = _Part(part, shape, each.placement)
            split = Split.of(each)
            if split is not None:
                splits[each.name], brought[each.name] = split, self._rows_of(shape[split.dim], split)
        uneven = {name for name, rows in brought.items() if len(set(rows)) > 1}
        if uneven:
            axes = next(iter(splits.values())).axes
            sizes = tuple(self.mesh.axes[k].size for k in axes)
            count = len(next(iter(brought.values())))
            self._rows = UnequalRows(splits, brought, sizes, tuple(range(count)), 0)

    def _rows_of(self, rows: int, split: Split) -> tuple[int, ...]:
        parts = [rows]
        for size in (self.mesh.axes[k].size for k in split.axes):
            parts = [chunk(each, size, k)[1] for each in parts for k in range(size)]
        return tuple(parts)

    def _read(self) -> Arguments:
        return self.step.runner.read(self._copied.args, self._copied.kwargs)

    def given(self) -> Arguments:
        """The arguments of its next call, with its part of the batch."""
        given = self._read()
        leaves = [
            replace(leaf, value=self._parts[leaf.name].value) if leaf.name in self._parts else leaf
            for leaf in given.leaves
        ]
        return replace(given, leaves=leaves)

    @property
    def compiled(self) -> Compiled:
        """The program of the call that was prepared last."""
        assert self.turn is not None and self.turn.compiled is not None
        return self.turn.compiled

    @property
    def program(self) -> Program:
        """The final program of that call."""
        return self.compiled.program

    @property
    def inputs(self) -> list[Any]:
        """The inputs of that call."""
        assert self.running is not None
        return self.running.inputs

    @property
    def programs(self) -> RankPrograms:
        """The programs of that call after each stage."""
        compiled, options = self.compiled, self.step.options
        if id(compiled) not in self._programs:
            partitioned = compiled.partitioned
            if transforms(options):
                with self.active(), DisableAutocast():
                    partitioned = options.mode.partition(compiled.captured.program)
            after, _ = after_each(compiled.partitioned, compiled.pipeline)
            made = RankPrograms(partitioned, compiled.partitioned, after, compiled.program)
            self._programs[id(compiled)] = compiled, made
        return self._programs[id(compiled)][1]

    def prepare(self, answers: Answers = ()) -> list[Any]:
        """Compile, if need be, and gather the inputs of the next call, which gives these answers."""
        with self.active():
            self.turn = self.step.runner.prepare(self.given(), self._rows, answers)
            assert self.turn.call is not None and self.turn.live is not None
            self.running = self.compiled.start(self.turn.call.given, self.turn.live)
        return self.running.inputs

    def rehearse(self) -> Rehearsal:
        """The program of its next call, which is not made: nothing of it is run, kept or changed."""
        with self.active():
            return self.step.runner.rehearse(self.given(), self._rows)

    def traces(self, sizes: TracedSizes) -> bool:
        """Whether its next call can be traced for other sizes of the arguments."""
        with self.active():
            return self.step.runner.traces(self.given(), sizes)

    def outgrow(self, times: float) -> None:
        """Let the call that was prepared run a program with ``times`` the room for rows of experts."""
        assert self.turn is not None
        with self.active():
            self.step.runner.outgrow(self.turn, times)

    def answer(self, number: int) -> Answers:
        """Note that the prepared call gives another answer to this question; returns those that it has shown."""
        assert self.turn is not None
        with self.active():
            self.step.runner.answer(self.turn, number)
        return self.turn.answers

    def finish(self, outputs: tuple[Any, ...]) -> list[Any]:
        """Write what the program gave where it belongs; returns its results and new state."""
        assert self.running is not None
        executable = self.compiled.executable
        with self.active():
            with torch.no_grad():
                returned = executable.finish(outputs, self.running.inputs)
            self.compiled.finish(self.running, returned)
        return returned

    def state(self) -> dict[str, Held]:
        """All that the user can see after a call, by name: state, and tensor arguments, which a step may write to."""
        with self.active():
            call = Call(with_found(self.step.function, self.given()), self._mode)
            held: dict[str, Held] = {
                slot.input.name: (slot.local().detach(), slot.input.shape, slot.input.placement) for slot in call.slots
            }
            held |= {hyper.name: (hyper.get(), (), ()) for hyper in call.hyper_parameters}
        return held | {name: (part.value, part.shape, part.placement) for name, part in self._parts.items()}
