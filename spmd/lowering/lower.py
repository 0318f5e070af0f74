"""Lower: from a program to a callable over live storages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch

from passes import OutputKind, Part, Program
from passes.ir.micro_batches import (
    ascend,
    empty_accumulators,
    gather_rows,
    new_accumulators,
    return_rows,
)
from passes.memory.left_behind import in_planned_memory
from passes.runtime.arena import has_shared_arena
from passes.schedule.node_costs import device_of
from passes.update.split_micro_batches import earlier_runs

from .._torch import DisableAutocast
from ..state.background_reads import READS
from ..state.commit import Commit
from .arenas import Arenas
from .codegen import Bound, Compiles
from .cuda_graphs import Replay, why_not_captured


@dataclass(frozen=True)
class InputRef:
    """An input, or a part of a flat one."""

    position: int
    part: Part | None = None

    def of(self, inputs: Sequence[Any]) -> torch.Tensor:
        """The tensor that is referred to."""
        tensor: torch.Tensor = inputs[self.position]
        return (
            tensor if self.part is None else tensor.narrow(0, self.part.offset, self.part.numel).view(self.part.shape)
        )


@dataclass
class Runs:
    """All runs of a call but the last one. ``accumulators``: by position among the inputs, from the first call on.

    ``executables``: of their programs, by role.
    """

    program: Program
    executables: dict[str, Executable]
    arenas: Arenas
    accumulators: dict[int, torch.Tensor] = field(default_factory=dict)
    is_read_by_peers: bool = False  # whether values of a run lie in memory that ranks share

    @classmethod
    def of(cls, program: Program, arenas: Arenas, regions: Compiles | None, cuda_graphs: bool) -> Runs | None:
        """Those of a program that runs for each micro-batch; None for any other."""
        if program.micro_batches is None:
            return None
        programs = earlier_runs(program)
        executables = {role: lower(each, arenas, Commit(), regions, cuda_graphs) for role, each in programs.items()}
        is_read = any(has_shared_arena(each.graph) for each in programs.values())
        return cls(program, executables, arenas, is_read_by_peers=is_read)

    def accumulate(self, inputs: Sequence[Any], commit: Commit) -> tuple[list[Any], list[list[Any]]]:
        """Run all but the last micro-batch, on the inputs of a call; returns the inputs of the last one, and rows.

        All runs compute in the same memory. What peers may still read there at the end of a run, they have read when
        all ranks have come as far.
        """
        micro, given = self.program.micro_batches, list(inputs)
        assert micro is not None
        self.accumulators = self.accumulators or self.arenas.handed_on(new_accumulators(self.program))
        for k, memory in self.accumulators.items():
            given[k] = memory
        gather_rows(self.program, given)
        turns, idle = micro.turns(self.program.earlier), len(micro.idle_runs)
        for role, k in turns[:idle]:
            self._run(role, given, k, commit)
        empty_accumulators(self.program, given)
        rows = []
        for role, k in turns[idle:-1]:
            rows.append(self._run(role, given, k, commit))
            ascend(self.program, given, k)
        return micro.of_run(self.program.inputs, given, micro.runs[-1]), rows

    def _run(self, role: str, given: Sequence[Any], k: int, commit: Commit) -> list[Any]:
        micro = self.program.micro_batches
        assert micro is not None
        rows = self.executables[role](micro.of_run(self.program.inputs, given, k))
        if self.is_read_by_peers:
            commit.wait_for_ranks()
        return rows

    def close(self) -> None:
        """Drop the generated code, and let go of what runs hand on, which ``arenas`` keep for other programs."""
        for each in self.executables.values():
            each.close_code()
        self.accumulators.clear()

    def join(self, returned: list[Any], rows: Sequence[Sequence[Any]]) -> list[Any]:
        """What the last run ``returned``, with the rows of those before it."""
        micro = self.program.micro_batches
        assert micro is not None
        outputs = [each for each in self.program.outputs if each.kind is not OutputKind.UPDATE]
        names = [each.name for each in outputs if each.name in micro.joined]
        joined = micro.join(outputs, returned, [dict(zip(names, each, strict=True)) for each in rows])
        if micro.spread is None:
            return joined
        pairs = list(zip(outputs, joined, strict=True))
        return [return_rows(micro, each.name, value) if each.name in micro.joined else value for each, value in pairs]


class Function(Protocol):
    """What an executable calls. It returns an output each; None for an update that it has written itself."""

    arenas: Arenas

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run on the inputs of a program."""

    def timed(self, program: Program, commit: Commit, device_type: str) -> Timed:
        """The same, which also measures each node."""

    def close(self) -> None:
        """Drop all references to state, and the generated code."""


@runtime_checkable
class Timed(Function, Protocol):
    """One that measures each node."""

    def seconds(self) -> dict[str, float]:
        """How long each node of the last call took, by its name."""


@dataclass
class Executable:
    """Runs a program: results and new state come back, updates are written into the inputs they belong to."""

    function: Function
    updates: list[tuple[int, InputRef]]  # each output that is an update, and which the graph itself does not write
    returned: list[int]  # the outputs that are results or new state
    commit: Commit  # called before anything is written
    runs: Runs | None = None  # of a program that runs for each micro-batch

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run on this rank's inputs, in the order of ``Program.inputs``; updates them in place."""
        with torch.no_grad(), DisableAutocast():
            if self.runs is None:
                return self.finish(self.function(*inputs), inputs)
            last, rows = self.runs.accumulate(inputs, self.commit)
            return self.runs.join(self.finish(self.function(*last), last), rows)

    def finish(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Write the updates among what the function returned into ``inputs``; returns the rest."""
        self._write(outputs, inputs)
        return [outputs[k] for k in self.returned]

    def timed(self, program: Program, device_type: str) -> Executable:
        """The same, which also measures each node (``Timed.seconds``), a region as one."""
        return replace(self, function=self.function.timed(program, self.commit, device_type))

    def close(self) -> None:
        """Drop all references to state, and the generated code: the model is gone."""
        self.close_code()
        self.function.arenas.release()

    def close_code(self) -> None:
        """Drop the generated code, and keep the arenas, which other programs use."""
        self.function.close()
        self.commit.clear_gradients(())  # of a call that failed
        if self.runs is not None:
            self.runs.close()

    def _write(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        if not self.updates:
            return
        self.commit()
        if READS.is_active:
            READS.wait(*(ref.of(inputs) for _, ref in self.updates))
        # An update may be another input (buffers that are swapped): copy those before anything is written.
        storages = {_storage(x) for x in inputs if isinstance(x, torch.Tensor)}
        updates = [(outputs[k], ref) for k, ref in self.updates if outputs[k] is not None]
        values = [value.clone() if _storage(value) in storages else value for value, _ in updates]
        for value, (_, ref) in zip(values, updates, strict=True):
            ref.of(inputs).copy_(value)


def lower(
    program: Program,
    arenas: Arenas | None = None,
    commit: Commit | None = None,
    regions: Compiles | None = None,
    cuda_graphs: bool = False,
) -> Executable:
    """Make ``program`` run, as Python (``codegen.py``), in ``arenas``; its regions as a backend compiled them.

    ``commit``: that of another program, which runs in its place. Without ``regions`` these run op by op. With
    ``cuda_graphs``, what can be captured is.
    """
    commit = commit or Commit()
    replay = None
    if cuda_graphs and not why_not_captured(program):
        replay = Replay(device_of(program), copied=in_planned_memory(program))
    function = Bound(program, arenas, commit, regions=regions, replay=replay)
    return executable_of(program, function, commit, Runs.of(program, function.arenas, regions, cuda_graphs))


def executable_of(program: Program, function: Function, commit: Commit, runs: Runs | None = None) -> Executable:
    """What runs ``program`` by a function of its inputs."""
    refs = input_refs(program)
    updates = [(k, refs[output.name]) for k, output in enumerate(program.outputs) if output.kind is OutputKind.UPDATE]
    returned = [k for k, output in enumerate(program.outputs) if output.kind is not OutputKind.UPDATE]
    return Executable(function, updates, returned, commit, runs)


def input_refs(program: Program) -> dict[str, InputRef]:
    """Where each input is among those of a call, by name."""
    refs = {declared.name: InputRef(k) for k, declared in enumerate(program.inputs)}
    return refs | {p.input.name: InputRef(k, p) for k, i in enumerate(program.inputs) for p in i.parts}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
