"""CPU time of a step: of the communication backend's threads, of all other threads, and in ops that copy.

With one core per rank, the rest of the wall-clock time is idle: waits for the network or another rank that are not
hidden. Where a rank has several cores, or a GPU, the parts overlap and mean less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

# Ops that move bytes and compute nothing; the time in each, without the ops that it calls.
COPIES = frozenset(
    {
        "aten::cat",
        "aten::_chunk_cat",
        "aten::clone",
        "aten::copy_",
        "aten::_foreach_copy_",
        "aten::split_with_sizes_copy",
        "fsdp::chunk_cat",
        "fsdp::split_with_sizes_copy",
    }
)


@dataclass(frozen=True)
class Spent:
    """CPU seconds since the process started, over all its threads."""

    transport: float
    others: float

    def since(self, earlier: Spent) -> Spent:
        """The CPU time from ``earlier`` to now."""
        return Spent(self.transport - earlier.transport, self.others - earlier.others)


def spent() -> Spent:
    """The CPU time by the names of the threads that exist now: those of the backend contain ``gloo``."""
    transport = others = 0.0
    for task in Path("/proc/self/task").iterdir():
        try:
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            name = (task / "comm").read_text()
        except OSError:  # the thread ended meanwhile
            continue
        if "gloo" in name:
            transport += seconds
        else:
            others += seconds
    return Spent(transport, others)


def copying(run: Callable[[], object], times: int = 3) -> float:
    """Seconds of one ``run`` in ops that copy, by the profiler, after one run to warm up."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(times):
            run()
    return sum(each.self_cpu_time_total for each in profiled.key_averages() if each.key in COPIES) / 1e6 / times
