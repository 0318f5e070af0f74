"""One process of a system: it enters its host, joins its process group, builds the system and executes orders."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from . import memory, wire
from .models import Model, RandomBatches, Workload, build
from .network import Network
from .spellings import CLEARS, TrainStep
from .spent import Spent, copying, spent
from .systems import System
from .team import bind_core

_IN_FLIGHT = 0.3  # seconds in which what another system has sent after its last step has arrived


@dataclass(frozen=True)
class RankSpec:
    """The system and the rank of one process. ``parts``: 1 for the reference, which trains on the whole batch."""

    system: System
    workload: Workload
    network: Network
    rank: int
    ranks: int
    parts: int
    device: str
    store: str  # the file store of the process group
    cache: str = ""  # the folder of Inductor's cache; empty for the one that it has by default
    clears: str = "last"  # when steps clear gradients

    def start(self) -> RankProcess:
        """The process that executes orders."""
        return RankProcess(self)


@dataclass(frozen=True)
class FirstSteps:
    """The losses of the first steps, and the seconds that they took, compiling included."""

    losses: list[float]
    seconds: float


@dataclass(frozen=True)
class Lap:
    """The figures of some steps together: seconds, bytes received over the network, CPU time."""

    seconds: float
    received: int
    spent: Spent


class RankProcess:
    """One process of one system."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        on_gpu = spec.device == "cuda"
        self.device = torch.device("cuda", spec.rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")

    def prepare(self, steps: int) -> FirstSteps:
        """Join the group, build the system and run the first ``steps``, in which it compiles."""
        self.join()
        self.build(lambda model: self.spec.system.make(model, CLEARS[self.spec.clears]))
        start = time.perf_counter()
        losses = [self._step().item() for _ in range(steps)]
        return FirstSteps(losses, time.perf_counter() - start)

    def join(self) -> None:
        """Enter the host of this rank, bind it to a core and join its group."""
        spec = self.spec
        if spec.cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = spec.cache
        if spec.system.needs_compiler and self.device.type == "cpu" and not _has_compiler():
            raise RuntimeError("torch.compile needs a C++ compiler on the CPU, and there is none: set CXX")
        spec.network.enter(spec.rank)
        self._bind_core()
        if spec.system.communicates:
            self._join()

    def build(self, make: Callable[[Model], TrainStep]) -> None:
        """Make the step that laps run, and its batches."""
        spec = self.spec
        self.step = make(build(spec.workload, self.device))
        self.batches = RandomBatches(spec.workload, spec.ranks, spec.rank % spec.parts, spec.parts, self.device)

    def lap(self, steps: int) -> Lap:
        """Measure ``steps`` steps, which all ranks start together, on a network that is quiet."""
        self.start_together()
        before, used, start = wire.received(), spent(), time.perf_counter()
        for _ in range(steps):
            self._step()
        self._synchronize()
        seconds = time.perf_counter() - start
        return Lap(seconds, wire.received() - before, spent().since(used))

    def start_together(self) -> None:
        """Wait for all ranks, on a network that is quiet."""
        if self.spec.network.hosts:
            time.sleep(_IN_FLIGHT)
        self._barrier()

    def peak(self) -> int:
        """Peak memory of the steps of an update, in bytes."""
        self._barrier()
        calls = CLEARS[self.spec.clears].calls
        return memory.peak(lambda: [self._step() for _ in range(calls)], self.device)

    def copies(self) -> float:
        """Seconds of a step in ops that copy; 0 on a GPU, whose kernels overlap."""
        self._barrier()
        return copying(self._step) if self.device.type == "cpu" else 0.0

    def _bind_core(self) -> None:
        """Bind this process to one core; with a GPU, it keeps all cores."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            return
        bind_core(self.spec.rank)
        torch.set_num_threads(1)

    def _join(self) -> None:
        spec, backend = self.spec, "nccl" if self.device.type == "cuda" else "gloo"
        store = dist.FileStore(spec.store, spec.ranks)
        timeout = timedelta(minutes=15)  # ranks compile at different speeds
        dist.init_process_group(backend, store=store, rank=spec.rank, world_size=spec.ranks, timeout=timeout)

    def _step(self) -> torch.Tensor:
        return self.step(*self.batches.draw())

    def _barrier(self) -> None:
        if self.spec.system.communicates:
            dist.barrier()
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "g++")) is not None
