"""Run the stage of a pipeline that belongs to this rank: its programs, in the order of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from passes import OutputKind, Program
from passes.ir.bundle import Bundle, messages_of, run_names
from passes.ir.collectives import Kind, group_of, kind_of, peer_of
from passes.ir.micro_batches import new_accumulators
from passes.runtime.message_collectives import connect
from passes.schedule.node_costs import device_of

from ..state.commit import Commit
from .arenas import Arenas
from .codegen import Compiles
from .lower import Executable, executable_of, lower
from .run_bundle import BundleExecutable, Seconds


def lower_step(
    program: Program, arenas: Arenas, regions: Compiles | None = None, cuda_graphs: bool = False
) -> Executable:
    """Make the program of a step run, or its stages in its place."""
    if program.stages is None:
        return lower(program, arenas, regions=regions, cuda_graphs=cuda_graphs)
    commit = Commit()
    return executable_of(program, StageRuns.of(program, arenas, commit, regions), commit)


@dataclass
class StageRuns:
    """The programs of one stage, lowered, which take the inputs of the whole program and return its outputs.

    ``accumulators``: by name, from the first call on. ``unconnected``: the ends of messages on NCCL, before that.
    """

    whole: Program
    arenas: Arenas
    executable: BundleExecutable
    accumulators: dict[str, torch.Tensor] = field(default_factory=dict)
    unconnected: Sequence[tuple[str, int, int]] = ()

    @classmethod
    def of(cls, program: Program, arenas: Arenas, commit: Commit, regions: Compiles | None) -> StageRuns:
        """Those of the rank that ``program`` is for."""
        bundle: Bundle = program.stages
        coordinate = bundle.coordinate_of(program)
        executable = BundleExecutable(bundle, coordinate, arenas, commit, regions)
        is_on_nccl = any(each.name == bundle.axis and each.backend == "nccl" for each in program.mesh.axes)
        # To look at programs of other ranks runs all passes over them.
        return cls(program, arenas, executable, unconnected=ends_on_nccl(bundle) if is_on_nccl else [])

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run a call; None stands for the updates, which the programs write in place."""
        bundle, micro = self.executable.bundle, self.executable.bundle.micro_batches
        assert micro is not None, "a pipeline runs micro-batches"
        if self.unconnected:
            connect(self.unconnected, device_of(self.whole))
            self.unconnected = ()
        self.accumulators = self.accumulators or self._new_accumulators()
        for memory in self.accumulators.values():
            memory.zero_()
        values = dict(zip((each.name for each in self.whole.inputs), inputs, strict=True)) | self.accumulators
        at = "", 0

        def given(role: str, number: int) -> list[Any]:
            nonlocal at
            at = role, number
            declared = [each for each in bundle.programs[role].inputs if each.name in values]
            return bundle.inputs_of(declared, [values[each.name] for each in declared], number)

        try:
            returned = iter(self.executable.run("step", given))
        except BaseException as error:
            self.executable.in_flight.clear()
            error.add_note(f"in {at[0]}, on micro-batch {at[1]} of {micro.count}")
            raise
        return [None if each.kind is OutputKind.UPDATE else next(returned) for each in self.whole.outputs]

    def timed(self, program: Program, commit: Commit, device_type: str) -> TimedStages:
        """The same, which also measures each node of each run."""
        took = list[Seconds]()
        return TimedStages(self, self.arenas, self.executable.timed(device_type, took), took)

    def _new_accumulators(self) -> dict[str, torch.Tensor]:
        found, micro = dict[str, torch.Tensor](), self.executable.bundle.micro_batches
        for role in self.executable.order("step"):
            program = self.executable.bundle.programs[role]
            for k, zeros in new_accumulators(program).items():
                found.setdefault(program.inputs[k].name, zeros)
        assert micro is not None, "a pipeline runs micro-batches"
        return found | {name: found[whole] for whole, name in micro.whole.items() if whole in found}

    def close(self) -> None:
        """Drop what is in flight, all references to state, and the generated code."""
        self.executable.close()
        self.accumulators.clear()


@dataclass
class TimedStages:
    """Runs ``stages`` by programs that also measure each node; ``took``: what each run of the last call took."""

    stages: StageRuns
    arenas: Arenas
    executable: BundleExecutable
    took: list[Seconds]

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run a call."""
        plain, self.stages.executable = self.stages.executable, self.executable
        self.took.clear()
        try:
            return self.stages(*inputs)
        finally:
            self.stages.executable = plain

    def timed(self, program: Program, commit: Commit, device_type: str) -> TimedStages:
        """These."""
        return self

    def seconds(self) -> dict[str, float]:
        """How long each node of each run took: ``forward.0 of 3: mm``."""
        runs = zip(run_names(self.executable.order("step")), self.took, strict=True)
        return {f"{run}: {node}": seconds for run, of_run in runs for node, seconds in of_run().items()}

    def close(self) -> None:
        """Drop the generated code."""
        self.executable.close()


def ends_on_nccl(bundle: Bundle) -> list[tuple[str, int, int]]:
    """The groups in which ranks send messages by NCCL, with the sender and the receiver, in one order on all ranks."""
    found = set[tuple[str, int, int]]()
    for role in bundle.programs:
        axis = bundle.axis_of(role)
        if axis is not None and axis.backend == "nccl":
            sends = [node for node in messages_of(bundle.programs[role]) if kind_of(node) is Kind.SEND]
            found |= {(group_of(node), axis.coordinate, peer_of(node)) for node in sends}
    return sorted(found, key=lambda ends: (ends[1:], ends[0]))
