"""``spmd.Auto``: data parallelism in the style that is estimated to be the fastest one here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import passes
from passes import MemoryBudgetError, PassError, Program, Table
from passes.analysis.collective_algorithms import BUILT_IN
from passes.default_passes import with_micro_batches
from passes.fit_memory import describe_program, rounded_down, rounded_up
from passes.memory.peak_memory import planned_memory
from passes.schedule.node_costs import device_of

from ..annotations.policies import MixedPrecisionPolicy
from ..interpreter.environment import is_set
from ..interpreter.keywords import checks_keywords
from ..partitioner.plan import Plan
from ..ranks.axis_roles import Axes
from ..ranks.simulated import simulated
from .base import check_flag
from .data_parallel import DataParallel
from .option_groups import check_memory
from .sequence import SEQUENCE_DIM

_STYLES: dict[str, dict[str, Any]] = {
    "replicate": {"parallel_style": "replicate"},
    "shard_optimizer": {"parallel_style": "replicate", "shard_optimizer": True},
    "fully_shard": {"parallel_style": "fully_shard"},
}


@dataclass(frozen=True)
class _Made:
    """The estimate of a style behind the passes: seconds, and bytes at the peak, with a sentence on that."""

    style: str
    seconds: float
    peak: int
    where: str

    def __str__(self) -> str:
        return f"{self.style} {self.seconds * 1e3:.1f} ms and {self.peak / 1e6:.0f} MB"


class Auto(DataParallel):
    """Data parallelism in one of three styles: ``"replicate"``, that with ``shard_optimizer``, or ``"fully_shard"``.

    When a step is first compiled, each style is partitioned and goes through the passes, and its time and memory are
    estimated by ``table``, as ``python -m spmd calibrate`` writes it; by default with the figures that are built in. Of
    those that fit into ``memory`` (bytes of a rank, or text such as "600MB"; None for any), the fastest is taken, with
    equal times the first. A line says which, and what was estimated of each. Later programs keep the style. Ranks
    divide the styles among themselves, look at the first rank's share of each, and choose the same.

    ``adapt``: after 11 calls of one program, what they took corrects the table on all ranks. If another schedule of
    the same placements (overlap; with two ranks also the sizes of buckets) is then estimated to save more than 3% of
    the step, that program is compiled with it before its next call, and runs from there on, with the same bits. If its
    calls take longer than those before, the schedule of before is compiled again. A line says what was decided; after
    50 calls of programs that are called less, nothing is measured any more.

    The other options are those of ``DataParallel``. Raises ``ValueError`` for what these refuse, and
    ``MemoryBudgetError`` when the step compiles and no style fits, with the least memory that any needs.
    """

    @checks_keywords("spmd.Auto")
    def __init__(
        self,
        memory: int | str | None = None,
        *,
        table: Table = BUILT_IN,
        mesh: DeviceMesh | ProcessGroup | None = None,
        axes: Axes | None = None,
        input_batch_dim: int = 0,
        sequence_dim: int = SEQUENCE_DIM,
        inputs: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        micro_batches: int = 1,
        adapt: bool = False,
    ) -> None:
        self.memory, self.table = check_memory(memory), table
        self.adapt = check_flag("adapt", adapt)
        if adapt and micro_batches > 1:
            raise ValueError("expected no micro_batches with adapt=True: their runs are not measured node by node")
        self.style, self.note = "", ""
        pipeline = passes.default(table=table)
        super().__init__(
            mesh=mesh,
            axes=axes,
            input_batch_dim=input_batch_dim,
            sequence_dim=sequence_dim,
            inputs=inputs,
            params=params,
            mp_policy=mp_policy,
            micro_batches=micro_batches,
            custom_passes=pipeline,
        )

    def partition(self, program: Program) -> Program:
        """One rank's share in the style that is chosen now, or was."""
        return partition_together(self, program, lambda text: [text])

    def plan(self, program: Program) -> Plan:
        """The plan of the chosen style; of "replicate" before there is one."""
        return self._mode(self.style).plan(program) if self.style else super().plan(program)

    def _mode(self, style: str) -> DataParallel:
        return DataParallel(
            mesh=self.mesh,
            axes=self.axes,
            input_batch_dim=self.input_batch_dim,
            sequence_dim=self.sequence_dim,
            inputs=self.inputs,
            params=self.params,
            mp_policy=self.mp_policy,
            micro_batches=self.micro_batches,
            **_STYLES[style],
        )

    def _choose(
        self, program: Program, count: int, gather: Callable[[str], list[str]]
    ) -> tuple[_Made, str, Program | None]:
        """The fastest style that fits, a line on it, and the first rank's share in it if this rank has made that."""
        axes = program.mesh.axes
        rank = sum(axis.coordinate * prod(other.size for other in axes[k + 1 :]) for k, axis in enumerate(axes))
        of_first = replace(
            program, mesh=replace(program.mesh, axes=tuple(replace(axis, coordinate=0) for axis in axes))
        )
        own = [self._made(style, of_first) for style in [*_STYLES][rank % count :: count]]
        gathered = gather(json.dumps([asdict(each) for each, _ in own]))
        found = {each["style"]: _Made(**each) for text in gathered for each in json.loads(text)}
        made, shares = [found[style] for style in _STYLES], {each.style: local for each, local in own}
        fitting = [each for each in made if self.memory is None or each.peak <= self.memory]
        if not fitting:
            least = min(made, key=lambda each: each.peak)
            raise MemoryBudgetError(
                f"expected memory= to be at least {rounded_up(least.peak)} per rank, with which {least.style} runs, "
                f"got {rounded_down(self.memory or 0)}; {least.where}"
            )
        chosen = min(fitting, key=lambda each: each.seconds)
        why = "the fastest by estimate" if len(fitting) == len(made) else "the fastest by estimate of those that fit"
        others = "; ".join(str(each) for each in made if each is not chosen)
        return chosen, f"spmd.Auto takes {chosen}, {why}; {others}", shares.get(chosen.style)

    def _made(self, style: str, program: Program) -> tuple[_Made, Program]:
        """The estimate of a style, and a rank's share in it."""
        local = self._mode(style).partition(program)
        pipeline = self.custom_passes or ()
        final = passes.run(local, with_micro_batches(pipeline) if self.micro_batches > 1 else pipeline, check=False)
        found = passes.estimate(final, self.table, with_memory=False)
        if found is None:
            raise PassError(f"nothing is known of the speed of {device_of(local)}, by which Auto chooses: calibrate it")
        device = str(device_of(final))
        peaks = [plan.peak for space, plan in planned_memory(final).items() if space.startswith(device)]
        return _Made(style, found.seconds, max(peaks, default=0), describe_program(final)), local


def partition_together(mode: Auto, program: Program, gather: Callable[[str], list[str]]) -> Program:
    """One rank's share in the style of ``mode``; where that is still to choose, all ranks call this together.

    ``gather`` returns the text of each, in the order of the mesh. Each estimates its part of the styles.
    """
    local, is_first = None, not any(axis.coordinate for axis in program.mesh.axes)
    styles = gather(mode.style)  # a call that was interrupted may have left one to some ranks alone
    if not mode.style or len({*styles}) > 1:
        chosen, mode.note, local = mode._choose(program, len(styles), gather)
        mode.style = chosen.style
        if is_first and simulated() is None and not is_set("SPMD_QUIET"):
            print(mode.note, file=sys.stderr)
    local = local if is_first and local is not None else mode._mode(mode.style).partition(program)
    local.notes.append(mode.note)
    return local
