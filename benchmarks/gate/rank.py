"""One process of an arm: it imports the arm's spmd, joins its group, compiles and runs steps, each measured.

It begins as a fork of a process that has never imported spmd. All it measures is a ``Span``.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..peers.memory import status
from ..peers.models import Workload
from ..peers.network import Network
from ..peers.spellings import CLEARS, LAST, Spelling, TrainStep
from ..peers.team import bind_core
from .arms import PACKAGES, Arm


class Span(NamedTuple):
    """Seconds of wall time, of CPU time, and of waiting for a core that another process had."""

    wall: float
    cpu: float
    queued: float


class Lap(NamedTuple):
    """Seconds of wall time of each step, and of CPU time of a step in the mean."""

    walls: list[float]
    cpu: float


@dataclass(frozen=True)
class ArmSpec:
    """One rank of an arm. ``store``: the file store of its group. ``cache``: a folder for warm starts."""

    arm: Arm
    workload: Workload
    network: Network
    rank: int
    ranks: int
    store: str
    cache: str

    def start(self) -> ArmRank:
        """The process that executes orders."""
        return ArmRank(self)


class ArmRank:
    """One process of one arm."""

    def __init__(self, spec: ArmSpec) -> None:
        self.spec = spec
        self.steps: dict[str, TrainStep] = {}
        bind_core(spec.rank)
        torch.set_num_threads(1)

    def load(self) -> Span:
        """Import the arm's spmd, with what ``spmd.compile`` and ``spmd.DataParallel`` need."""
        sys.path.insert(0, str(self.spec.arm.source))
        os.environ.pop("SPMD_CACHE", None)
        os.environ["XDG_CACHE_HOME"] = f"{self.spec.store}-cache"  # empty: an arm keeps what it does by default
        return measured(_import_spmd, self.spec.arm.slower)

    def modules(self) -> list[str]:
        """All modules imported so far, but those of the arm, in the order of their imports."""
        return [name for name in sys.modules if name.partition(".")[0] not in (*PACKAGES, "benchmarks", "__main__")]

    def join(self) -> None:
        """Enter the host, and join the group."""
        from ..peers.rank import RankProcess, RankSpec  # which import spmd

        spec, system = self.spec, self._system()
        network, ranks = spec.network, spec.ranks
        self.process = RankProcess(RankSpec(system, spec.workload, network, spec.rank, ranks, ranks, "cpu", spec.store))
        self.process.join()
        torch.optim.AdamW([torch.zeros(1)])  # imports Dynamo
        self.resident = status("VmRSS")

    def _system(self) -> Any:
        from ..peers.systems import SHARD, SYSTEMS, System

        arm = self.spec.arm
        if not arm.system:
            return System(f"spmd, {arm.style}", SHARD, self._compiled, ours=True)
        found = next((each for each in SYSTEMS if each.name == arm.system), None)
        if found is None:
            raise ValueError(f"--system {arm.system!r} is none of: {'; '.join(each.name for each in SYSTEMS)}")
        return found

    def _compiled(self, model: nn.Module, spelling: Spelling = LAST, **options: Any) -> TrainStep:
        """A step by spmd with default options, but for those of the arm."""
        import spmd

        arm = self.spec.arm
        mode = spmd.DataParallel(arm.style, **arm.mode)  # type: ignore[arg-type]
        compiled = spmd.compile(parallel_mode=mode, **arm.compile, **options)(spelling.step)
        if arm.watch:
            compiled.watch(*arm.watch)
        return spelling.bind(compiled, model, torch.optim.AdamW(model.parameters()))

    def warm_call(self, clears: str) -> Span:
        """The first call of a step that the arm's cache has, unless this is the run that fills it."""
        return self._first_call(clears, cache=self.spec.cache)

    def first_call(self, clears: str) -> Span:
        """The first call of a step, or those of its first update, which compile it; laps then run this step."""
        span = self._first_call(clears)
        self.steps[clears] = slowed(self.process.step, self.spec.arm.slower)
        return span

    def _first_call(self, clears: str, **options: Any) -> Span:
        own, spelling = not self.spec.arm.system, CLEARS[clears]
        make = functools.partial(self._compiled, **options) if own else self.process.spec.system.make
        self.process.build(lambda model: make(model, spelling))
        batches = [self.process.batches.draw() for _ in range(spelling.calls)]
        return measured(lambda: [self.process.step(*each) for each in batches], self.spec.arm.slower)

    def lap(self, clears: str, steps: int) -> Lap:
        """Some steps of a spelling, each with the calls of an update, which all ranks start together."""
        step, draw, walls = self.steps[clears], self.process.batches.draw, []
        self.process.start_together()
        cpu = time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            for _ in range(CLEARS[clears].calls):
                step(*draw())
            walls.append(time.perf_counter() - start)
        return Lap(walls, (time.process_time() - cpu) / steps)

    def memory(self) -> int:
        """The most bytes that were resident so far, above those of a rank that has joined its group."""
        return status("VmHWM") - self.resident


def _import_spmd() -> None:
    import spmd

    _ = spmd.compile, spmd.DataParallel  # which are loaded when they are asked for


def measured(run: Callable[[], object], slower: float) -> Span:
    """The time of one call, which ``slower`` makes longer by this share of its CPU time."""
    gc.collect()  # else what was garbage before would count
    queued, cpu, wall = _queued(), time.process_time(), time.perf_counter()
    run()
    burn_until(time.thread_time() + slower * (time.process_time() - cpu))
    return Span(time.perf_counter() - wall, time.process_time() - cpu, _queued() - queued)


def slowed(step: TrainStep, share: float) -> TrainStep:
    """``step`` with busy work at its end: a share of the CPU time of its fastest call."""
    least = math.inf

    def longer(x: Tensor, y: Tensor) -> Tensor:
        nonlocal least
        start = time.thread_time()
        loss = step(x, y)
        end = time.thread_time()
        least = min(least, end - start)
        burn_until(end + share * least)
        return loss

    return longer if share else step


def burn_until(end: float) -> None:
    """Use CPU time until this thread has used ``end`` seconds of it."""
    while time.thread_time() < end:
        pass


def _queued() -> float:
    """Seconds in which this thread was ready to run, and another one had its core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
