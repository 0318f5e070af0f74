"""Where a step's time goes: CPU time of the transport's threads and of all others, and how much of that is copies.

With one core a rank, what is left of the wall clock is idle: waits for the network or for another rank that nothing
hides. Where a rank has several cores, or a GPU, the parts overlap and say less.
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
    """Seconds of CPU time since the process began, over all its threads."""

    transport: float
    others: float

    def since(self, earlier: Spent) -> Spent:
        """What was spent from ``earlier`` to now."""
        return Spent(self.transport - earlier.transport, self.others - earlier.others)


def spent() -> Spent:
    """By the names of the threads that are there now: the transport's have ``gloo`` in theirs."""
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
    """Seconds that one ``run`` spends in ops that copy, by the profiler; a first one only warms up."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(times):
            run()
    return sum(each.self_cpu_time_total for each in seen.key_averages() if each.key in COPIES) / 1e6 / times
