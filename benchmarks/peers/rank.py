"""What one process does: it joins its host and its group, builds its system, and then does as it is told.

It answers each order of the team with ``("done", result)`` or ``("failed", why)``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from . import memory, wire
from .models import Batches, Workload, build
from .network import Network
from .spent import Spent, copying, spent
from .systems import System

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


@dataclass(frozen=True)
class Seat:
    """The place of one process. ``parts`` is 1 for the one that reads the batch of all ``ranks``."""

    system: System
    workload: Workload
    network: Network
    rank: int
    ranks: int
    parts: int
    device: str
    store: str  # a file, by which the ranks find each other


@dataclass(frozen=True)
class Lap:
    """Some steps: seconds of all together, bytes that came in over the network, CPU time."""

    seconds: float
    received: int
    spent: Spent


def serve(seat: Seat, orders: Connection) -> None:
    """Do what comes, until the other side closes; the body of a process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends its ranks
    logging.disable(logging.WARNING)  # torch.compile's remarks would tear the table
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # and so is any other end of it
    rank = Rank(seat)
    while True:
        name, arguments = orders.recv()
        try:
            orders.send(("done", getattr(rank, name)(*arguments)))
        except Exception as raised:
            orders.send(("failed", _first_line(raised)))


def _first_line(raised: Exception) -> str:
    lines = str(raised).strip().splitlines()
    return f"{type(raised).__name__}: {lines[0] if lines else 'no message'}"


class Rank:
    """One process of one system."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        on_gpu = seat.device == "cuda"
        self.device = torch.device("cuda", seat.rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")

    def prepare(self, steps: int) -> list[float]:
        """Join, build, and take the first ``steps``, in which systems compile: their losses."""
        seat = self.seat
        if seat.system.needs_compiler and self.device.type == "cpu" and not _has_compiler():
            raise RuntimeError("torch.compile needs a C++ compiler on the CPU, and there is none: set CXX")
        seat.network.enter(seat.rank)
        self._take_core()
        if seat.system.communicates:
            self._join()
        self.step = seat.system.make(build(seat.workload, self.device))
        self.batches = Batches(seat.workload, seat.ranks, seat.rank % seat.parts, seat.parts, self.device)
        return [self._one().item() for _ in range(steps)]

    def lap(self, steps: int) -> Lap:
        """Time ``steps`` steps, that all ranks start together."""
        self._meet()
        before, used, start = wire.received(), spent(), time.perf_counter()
        for _ in range(steps):
            self._one()
        self._wait()
        seconds = time.perf_counter() - start
        return Lap(seconds, wire.received() - before, spent().since(used))

    def peak(self) -> int:
        """Bytes of memory that a step needs at the most."""
        self._meet()
        return memory.peak(self._one, self.device)

    def copies(self) -> float:
        """Seconds of a step in ops that copy; 0 on a GPU, whose kernels overlap."""
        self._meet()
        return copying(self._one) if self.device.type == "cpu" else 0.0

    def _take_core(self) -> None:
        """A core for each rank, as if each had a machine; a GPU's rank keeps all."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            return
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[self.seat.rank % len(cores)]})
        torch.set_num_threads(1)

    def _join(self) -> None:
        seat, backend = self.seat, "nccl" if self.device.type == "cuda" else "gloo"
        store = dist.FileStore(seat.store, seat.ranks)
        patience = timedelta(minutes=15)  # ranks compile at different speeds
        dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.ranks, timeout=patience)

    def _one(self) -> torch.Tensor:
        return self.step(*self.batches.draw())

    def _meet(self) -> None:
        if self.seat.system.communicates:
            dist.barrier()
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "g++")) is not None
